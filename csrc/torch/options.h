// What operators have in common: groups of their arguments, read, checked and turned into the parameter structs.
#pragma once

#include <algorithm>

#include "check.h"
#include "dcut/order.h"

namespace dcut::binding {

constexpr Types kI32 = Types::kInt32;

inline Tensor allocate(std::initializer_list<int64_t> dims, int32_t dtype, Device device) {
  int64_t strides[3] = {}, stride = 1;
  for (size_t j = dims.size(); j-- > 0; stride *= std::max<int64_t>(dims.begin()[j], 1)) {
    strides[j] = stride;
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(dims.size()), dims.begin(), strides,
                                                         dtype, device.type, device.index, &handle));
  return Tensor(handle);
}

// The per-row options, in the order in which they are checked.
struct RowOptions {
  Tensor draft_lens, min_keep, max_keep, weight, row_index, base_lens, num_reqs;

  void read_ranked(Reader& in) {
    draft_lens = in.optional_tensor(), min_keep = in.optional_tensor(), max_keep = in.optional_tensor();
    weight = in.optional_tensor();
  }

  void check_all(int64_t batch, Device device) const {
    check_optional(draft_lens, "draft_lens", kI32, {batch}, device);
    check_optional(min_keep, "min_keep", kI32, {batch}, device);
    check_optional(max_keep, "max_keep", kI32, {batch}, device);
    check_optional(weight, "weight", Types::kFloat32, {batch}, device);
    check_optional(base_lens, "base_lens", kI32, {batch}, device);
    check_optional(num_reqs, "num_reqs", kI32, {1}, device);
  }

  Rows rows(int64_t batch, int64_t slots, int64_t width, int64_t capacity) const {
    return {draft_lens.as<int32_t>(),    min_keep.as<int32_t>(),        max_keep.as<int32_t>(),
            weight.as<float>(),          row_index.as<int32_t>(),       base_lens.as<int32_t>(),
            num_reqs.as<int32_t>(),      static_cast<int32_t>(batch),   static_cast<int32_t>(slots),
            static_cast<int32_t>(width), static_cast<int32_t>(capacity)};
  }
};

struct BudgetOptions {
  Tensor budgets, costs, budget, calibration, envelope, next_budget, host_budget;
  bool count_bonus = true;

  // `calibrated`: the schema has a calibration argument.
  void read(Reader& in, bool calibrated) {
    budget = in.optional_tensor();
    if (calibrated) calibration = in.optional_tensor();
    envelope = in.optional_tensor(), next_budget = in.optional_tensor(), host_budget = in.optional_tensor();
    count_bonus = in.boolean();
  }

  void check_all(const std::string& policy, Device device) const {
    check_policy(policy);
    check_history(policy, budget, next_budget, host_budget, device);
    check_envelope(envelope, budgets, policy, device);
  }

  Tables tables(int64_t buckets) const {
    return {budgets.as<int32_t>(),
            costs.as<float>(),
            budget.as<int32_t>(),
            envelope.as<int32_t>(),
            table_rows(budgets, 1),
            table_rows(costs, 1),
            table_rows(envelope, 2),
            static_cast<int32_t>(buckets),
            count_bonus};
  }

  Decision decision(const Tensor& decision, const Tensor& gains) const {
    return {decision.as<int32_t>(), gains.as<int64_t>(), next_budget.as<int32_t>(), host_budget.as<int64_t>()};
  }

 private:
  // `dims`: of the table of one batch.
  static int32_t table_rows(const Tensor& t, int64_t dims) {
    return t.dim > dims ? static_cast<int32_t>(t.sizes[0]) : 1;
  }
};

struct TokenOptions {
  Tensor draft_ids, bonus_ids, seq_lens, block_table;
  int64_t block_size = 0, pad_token = 0, batch = 0, slots = 0, width = 0;

  void check_drafts(const Tensor& row_index, Device device, Limits limits) {
    check(draft_ids, "draft_ids", Types::kIds, {kAny, kAny}, device);
    check(bonus_ids, "bonus_ids", Types::kAsIds, {kAny}, device, draft_ids.dtype);
    batch = bonus_ids.sizes[0], slots = draft_ids.sizes[0], width = draft_ids.sizes[1];
    check_draft_len("draft_ids", width);
    if (!row_index && slots != batch) {
      fail("draft_ids", std::to_string(batch) + " rows, as bonus_ids, without row_index", std::to_string(slots));
    }
    check(seq_lens, "seq_lens", Types::kIds, {batch}, device);
    check_optional(row_index, "row_index", kI32, {batch}, device);
    check_size_limits("draft_ids", batch, slots, width, limits);
  }

  Tokens tokens() const {
    return {draft_ids.data,
            bonus_ids.data,
            seq_lens.data,
            block_table.as<int32_t>(),
            pad_token,
            block_table ? static_cast<int32_t>(block_table.sizes[1]) : 0,
            static_cast<int32_t>(block_size),
            is_int64(draft_ids),
            is_int64(seq_lens)};
  }
};

// The eleven results, in the order of the schema.
struct Results {
  static constexpr int kCount = 11, kTokenIds = 3;
  Tensor t[kCount];
  bool fresh = false;

  void read(Reader& in) {
    for (Tensor& result : t) result = in.tensor();
  }

  // Names, dtypes and sizes of all results; calls `each(index, name, types, size)`.
  template <class Each>
  static void describe(int64_t batch, int64_t buckets, int64_t capacity, Each each) {
    each(0, "keep_lens", kI32, batch);
    each(1, "cu_seqlens", kI32, batch + 1);
    each(2, "kv_lens", kI32, batch);
    each(kTokenIds, "token_ids", Types::kAsIds, capacity);
    each(4, "positions", Types::kInt64, capacity);
    each(5, "request_ids", kI32, capacity);
    each(6, "slot_mapping", Types::kInt64, capacity);
    each(7, "draft_index", kI32, capacity);
    each(8, "logits_indices", kI32, capacity);
    each(9, "decision", kI32, int64_t{4});
    each(10, "gains", Types::kInt64, buckets);
  }

  void check_given(int64_t batch, int64_t buckets, int64_t capacity, int32_t ids, Device device) const {
    describe(batch, buckets, capacity, [&](int j, const char* name, Types types, int64_t size) {
      check(t[j], name, types, {size}, device, ids);
    });
  }

  void allocate(int64_t batch, int64_t buckets, int64_t capacity, int32_t ids, Device device) {
    fresh = true;
    describe(batch, buckets, capacity, [&](int j, const char*, Types types, int64_t size) {
      const int32_t dtype = types == Types::kAsIds ? ids : (types == kI32 ? int32_dtype() : int64_dtype());
      t[j] = binding::allocate({size}, dtype, device);
    });
  }

  void give(StableIValue* stack) {
    for (int j = 0; j < kCount; ++j) stack[j] = torch::stable::detail::from(t[j].release());
  }

  Packed packed() const {
    return {t[0].as<int32_t>(), t[1].as<int32_t>(), t[2].as<int32_t>(), t[kTokenIds].data,  t[4].as<int64_t>(),
            t[5].as<int32_t>(), t[6].as<int64_t>(), t[7].as<int32_t>(), t[8].as<int32_t>(), fresh};
  }

  const Tensor& decision() const { return t[9]; }
  const Tensor& gains() const { return t[10]; }
};

inline Capacity read_capacity(Reader& in) {
  Capacity capacity;
  capacity.given = in.optional_integer(capacity.value);
  return capacity;
}

// Checks the pad token and the capacity, and checks or allocates the results.  Returns the capacity.
inline int64_t prepare(Results& results, bool given, const TokenOptions& tokens, const Capacity& capacity,
                       int64_t buckets, bool has_base, Device device) {
  check_pad_token(tokens.pad_token, is_int64(tokens.draft_ids));
  const int32_t ids = tokens.draft_ids.dtype;
  int64_t out = kAny;
  if (given) {
    const Tensor& token_ids = results.t[Results::kTokenIds];
    check(token_ids, "token_ids", Types::kAsIds, {kAny}, device, ids);
    out = token_ids.sizes[0];
  }
  const int64_t value = resolve_capacity(capacity, tokens.batch, tokens.width, has_base, out);
  if (given) {
    results.check_given(tokens.batch, buckets, value, ids, device);
  } else {
    results.allocate(tokens.batch, buckets, value, ids, device);
  }
  return value;
}

}  // namespace dcut::binding
