// Argument checks.  Order and words are those of dcut_kernels/_check.py: every backend refuses alike.
#pragma once

#include <initializer_list>

#include "args.h"
#include "dcut/params.h"

namespace dcut::binding {

constexpr int64_t kAny = -1;
constexpr int64_t kMaxTokens = 1 << 24;  // batch * (draft_len + 1) on the CPU

// "name: expected X, got Y".
[[noreturn]] void fail(const char* name, const std::string& expected, const std::string& got);

enum class Types { kFloats, kIds, kInt32, kInt64, kFloat32, kAsIds };

enum class Limits { kCpu, kOneLaunch };  // what one launch on a GPU takes is less

struct Device {
  int32_t type, index;
};

void check_defined(const Tensor& t, const char* name);  // torch passes None as an undefined tensor

// Dtype, rank, shape (kAny: any size), device and contiguity of one tensor; `ids` is the dtype of kAsIds.
void check(const Tensor& t, const char* name, Types types, std::initializer_list<int64_t> dims, Device device,
           int32_t ids = 0);
void check_optional(const Tensor& t, const char* name, Types types, std::initializer_list<int64_t> dims, Device device);

Device device_of(const Tensor& t);
FloatType float_type(const Tensor& t);
bool is_int64(const Tensor& t);
int32_t int32_dtype();
int32_t int64_dtype();
int32_t float32_dtype();

void check_draft_len(const char* name, int64_t size);
void check_size_limits(const char* name, int64_t batch, int64_t slots, int64_t width, Limits limits);
int64_t check_budgets(const Tensor& budgets, Device device);  // returns R
void check_costs(const Tensor& costs, const Tensor& budgets, Device device);
void check_paging(const Tensor& block_table, int64_t block_size, int64_t batch, Device device);
int64_t check_vocab(const char* name, const Tensor& logits);  // returns V of [B, D, V]
bool is_shifted(const std::string& score);
void check_policy(const std::string& policy);
void check_calibration(const Tensor& calibration, int64_t width, Device device);
void check_envelope(const Tensor& envelope, const Tensor& budgets, const std::string& policy, Device device);
void check_history(const std::string& policy, const Tensor& budget, const Tensor& next_budget,
                   const Tensor& host_budget, Device device);
void check_pad_token(int64_t value, bool ids_64);

struct Capacity {
  bool given = false;
  int64_t value = 0;
};

// `out` is the capacity of given output buffers, or kAny.
int64_t resolve_capacity(const Capacity& capacity, int64_t batch, int64_t width, bool has_base, int64_t out = kAny);

}  // namespace dcut::binding
