#include "check.h"

#include <stdexcept>

#include "dcut/plan.h"

namespace dcut::binding {
namespace {

const int32_t kDtypeFloat32 = aoti_torch_dtype_float32(), kDtypeFloat16 = aoti_torch_dtype_float16(),
              kDtypeBFloat16 = aoti_torch_dtype_bfloat16(), kDtypeInt32 = aoti_torch_dtype_int32(),
              kDtypeInt64 = aoti_torch_dtype_int64();

std::string dtype_name(int32_t dtype) {
  const struct {
    int32_t dtype;
    const char* name;
  } names[] = {{kDtypeFloat32, "float32"},
               {kDtypeFloat16, "float16"},
               {kDtypeBFloat16, "bfloat16"},
               {aoti_torch_dtype_float64(), "float64"},
               {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
               {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
               {aoti_torch_dtype_uint8(), "uint8"},
               {aoti_torch_dtype_uint16(), "uint16"},
               {aoti_torch_dtype_uint32(), "uint32"},
               {aoti_torch_dtype_uint64(), "uint64"},
               {aoti_torch_dtype_int8(), "int8"},
               {aoti_torch_dtype_int16(), "int16"},
               {kDtypeInt32, "int32"},
               {kDtypeInt64, "int64"},
               {aoti_torch_dtype_bool(), "bool"},
               {aoti_torch_dtype_complex64(), "complex64"},
               {aoti_torch_dtype_complex128(), "complex128"}};
  for (const auto& entry : names) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "dtype " + std::to_string(dtype);
}

std::string types_name(Types types, int32_t ids) {
  switch (types) {
    case Types::kFloats: return "float32, float16 or bfloat16";
    case Types::kIds: return "int32 or int64";
    case Types::kInt32: return "int32";
    case Types::kInt64: return "int64";
    case Types::kFloat32: return "float32";
    case Types::kAsIds: return dtype_name(ids);
  }
  return "";
}

bool accepts(Types types, int32_t dtype, int32_t ids) {
  switch (types) {
    case Types::kFloats: return dtype == kDtypeFloat32 || dtype == kDtypeFloat16 || dtype == kDtypeBFloat16;
    case Types::kIds: return dtype == kDtypeInt32 || dtype == kDtypeInt64;
    case Types::kInt32: return dtype == kDtypeInt32;
    case Types::kInt64: return dtype == kDtypeInt64;
    case Types::kFloat32: return dtype == kDtypeFloat32;
    case Types::kAsIds: return dtype == ids;
  }
  return false;
}

std::string list(const int64_t* values, int64_t n) {
  std::string text = "[";
  for (int64_t j = 0; j < n; ++j) {
    text += (j ? ", " : "") + (values[j] == kAny ? std::string("*") : std::to_string(values[j]));
  }
  return text + "]";
}

std::string shape(const Tensor& t) { return list(t.sizes, t.dim); }

std::string device_name(Device device) {
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  if (device.type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(device.index);
  return "device type " + std::to_string(device.type);
}

bool is_contiguous(const Tensor& t) {
  int64_t expected = 1, numel = 1;
  for (int64_t j = 0; j < t.dim; ++j) numel *= t.sizes[j];
  if (numel == 0) return true;
  for (int64_t j = t.dim - 1; j >= 0; expected *= t.sizes[j--]) {
    if (t.sizes[j] != 1 && t.strides[j] != expected) return false;
  }
  return true;
}

// One bucket table, [R] or [M, R]; returns R.
int64_t check_table(const Tensor& t, const char* name, Types types, Device device) {
  check_defined(t, name);
  if (t.dim != 1 && t.dim != 2) fail(name, "shape [R] or [M, R]", shape(t));
  if (t.dim == 2 && t.sizes[0] < 1) fail(name, "at least one row", shape(t));
  if (t.dim == 1) {
    check(t, name, types, {kAny}, device);
  } else {
    check(t, name, types, {kAny, kAny}, device);
  }
  return t.sizes[t.dim - 1];
}

}  // namespace

void fail(const char* name, const std::string& expected, const std::string& got) {
  throw std::runtime_error(std::string(name) + ": expected " + expected + ", got " + got);
}

void check_defined(const Tensor& t, const char* name) {
  if (!t.is_defined()) fail(name, "a tensor", "None");
}

Device device_of(const Tensor& t) { return {t.device_type, t.device_index}; }
bool is_int64(const Tensor& t) { return t.dtype == kDtypeInt64; }
int32_t int32_dtype() { return kDtypeInt32; }
int32_t int64_dtype() { return kDtypeInt64; }
int32_t float32_dtype() { return kDtypeFloat32; }

FloatType float_type(const Tensor& t) {
  if (t.dtype == kDtypeFloat16) return FloatType::kFloat16;
  return t.dtype == kDtypeBFloat16 ? FloatType::kBFloat16 : FloatType::kFloat32;
}

void check(const Tensor& t, const char* name, Types types, std::initializer_list<int64_t> dims, Device device,
           int32_t ids) {
  bool fits = t.dim == static_cast<int64_t>(dims.size());
  const int64_t* size = t.sizes;
  for (auto dim = dims.begin(); fits && dim != dims.end(); ++dim, ++size) fits = *dim == kAny || *dim == *size;
  if (!fits || !accepts(types, t.dtype, ids)) check_defined(t, name);
  if (!fits) fail(name, "shape " + list(dims.begin(), static_cast<int64_t>(dims.size())), shape(t));
  if (!accepts(types, t.dtype, ids)) fail(name, "dtype " + types_name(types, ids), dtype_name(t.dtype));
  if (t.device_type != device.type || t.device_index != device.index) {
    fail(name, "device " + device_name(device), device_name(device_of(t)));
  }
  if (!is_contiguous(t)) {
    fail(name, "a contiguous tensor", "strides " + list(t.strides, t.dim) + " for shape " + shape(t));
  }
}

void check_optional(const Tensor& t, const char* name, Types types, std::initializer_list<int64_t> dims,
                    Device device) {
  if (t) check(t, name, types, dims, device);
}

void check_draft_len(const char* name, int64_t size) {
  if (size > kMaxDraftLen) {
    fail(name, "at most " + std::to_string(kMaxDraftLen) + " draft tokens a row", std::to_string(size));
  }
}

void check_size_limits(const char* name, int64_t batch, int64_t slots, int64_t width, Limits limits) {
  if (limits == Limits::kOneLaunch && batch > gpu::kMaxBatch) {
    fail(name, "at most " + std::to_string(gpu::kMaxBatch) + " requests in one GPU launch", std::to_string(batch));
  }
  if (limits == Limits::kOneLaunch && batch * width > gpu::kMaxDrafts) {
    fail(name, "batch * draft tokens at most " + std::to_string(gpu::kMaxDrafts) + " in one GPU launch",
         std::to_string(batch * width));
  }
  if (batch * (width + 1) >= kMaxTokens) {
    fail(name, "batch * (draft tokens + 1) below " + std::to_string(kMaxTokens), std::to_string(batch * (width + 1)));
  }
  if (slots * width > kInt32Max) {
    fail(name, "slots * draft tokens at most " + std::to_string(kInt32Max), std::to_string(slots * width));
  }
}

int64_t check_budgets(const Tensor& budgets, Device device) {
  const int64_t buckets = check_table(budgets, "budgets", Types::kInt32, device);
  if (buckets > kMaxBuckets) {
    fail("budgets", "at most " + std::to_string(kMaxBuckets) + " buckets", std::to_string(buckets));
  }
  return buckets;
}

void check_costs(const Tensor& costs, const Tensor& budgets, Device device) {
  const int64_t buckets = budgets.sizes[budgets.dim - 1];
  if (check_table(costs, "costs", Types::kFloat32, device) != buckets) {
    fail("costs", std::to_string(buckets) + " buckets, as in budgets", shape(costs));
  }
  if (budgets.dim == 2 && costs.dim == 2 && budgets.sizes[0] != costs.sizes[0]) {
    fail("costs", std::to_string(budgets.sizes[0]) + " rows, as in budgets", shape(costs));
  }
}

void check_paging(const Tensor& block_table, int64_t block_size, int64_t batch, Device device) {
  check_optional(block_table, "block_table", Types::kInt32, {batch, kAny}, device);
  if (block_table && (block_size < 1 || block_size > kInt32Max)) {
    fail("block_size", "1 to " + std::to_string(kInt32Max) + " with a block_table", std::to_string(block_size));
  }
}

int64_t check_vocab(const char* name, const Tensor& logits) {
  const int64_t vocab = logits.sizes[2];
  if (vocab < 1 || vocab > kInt32Max) {
    fail(name, "a vocabulary of 1 to " + std::to_string(kInt32Max) + " tokens", std::to_string(vocab));
  }
  return vocab;
}

bool is_shifted(const std::string& score) {
  if (score != "inclusive" && score != "shifted") fail("score", "'inclusive' or 'shifted'", "'" + score + "'");
  return score == "shifted";
}

void check_policy(const std::string& policy) {
  if (policy != "argmax" && policy != "early_stop" && policy != "history") {
    fail("policy", "'argmax', 'early_stop' or 'history'", "'" + policy + "'");
  }
}

void check_calibration(const Tensor& calibration, int64_t width, Device device) {
  check_optional(calibration, "calibration", Types::kInt32, {width, kCalibrationCells + 1}, device);
}

void check_envelope(const Tensor& envelope, const Tensor& budgets, const std::string& policy, Device device) {
  if (policy != "early_stop") {
    if (envelope) fail("envelope", "None without policy 'early_stop'", "a tensor");
    return;
  }
  if (!envelope) fail("envelope", "a tensor with policy 'early_stop'", "None");
  const int64_t buckets = budgets.sizes[budgets.dim - 1];
  if (envelope.dim == 2) return check(envelope, "envelope", Types::kInt32, {buckets, 2}, device);
  if (envelope.dim != 3) fail("envelope", "shape [R, 2] or [M, R, 2]", shape(envelope));
  if (envelope.sizes[0] < 1) fail("envelope", "at least one row", shape(envelope));
  check(envelope, "envelope", Types::kInt32, {budgets.dim == 2 ? budgets.sizes[0] : kAny, buckets, 2}, device);
}

void check_history(const std::string& policy, const Tensor& budget, const Tensor& next_budget,
                   const Tensor& host_budget, Device device) {
  check_optional(budget, "budget", Types::kInt32, {1}, device);
  if (policy == "history" && !budget) fail("budget", "a value with policy 'history'", "None");
  if (policy == "history" && !next_budget) fail("next_budget", "a tensor with policy 'history'", "None");
  check_optional(next_budget, "next_budget", Types::kInt32, {2}, device);
  if (host_budget && !next_budget) fail("host_budget", "None without next_budget", "a tensor");
  check_optional(host_budget, "host_budget", Types::kInt64, {1}, {aoti_torch_device_type_cpu(), -1});
}

void check_pad_token(int64_t value, bool ids_64) {
  if (!ids_64 && (value < -int64_t{kInt32Max} - 1 || value > kInt32Max)) {
    fail("pad_token", "a value of int32, as draft_ids", std::to_string(value));
  }
}

int64_t resolve_capacity(const Capacity& capacity, int64_t batch, int64_t width, bool has_base, int64_t out) {
  int64_t value = capacity.value;
  if (!capacity.given) {
    if (out == kAny && has_base) fail("capacity", "a value, since base_lens is given", "None");
    value = out == kAny ? batch * (width + 1) : out;
  }
  if (value < batch || value > kInt32Max) {
    fail("capacity", std::to_string(batch) + " (the batch) to " + std::to_string(kInt32Max), std::to_string(value));
  }
  if (out != kAny && value != out) {
    fail("capacity", std::to_string(out) + ", the size of out's token_ids", std::to_string(value));
  }
  return value;
}

}  // namespace dcut::binding
