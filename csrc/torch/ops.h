// The operators over any kernels: read, check, fill the parameter structs, run.  Schemas are Python's.
//
// Kernels has kLimits and the functions of launch.h with the device of the tensors in front.
#pragma once

#include "options.h"

namespace dcut::binding {

template <class Kernels, bool given>
void select_and_pack(StableIValue* stack, uint64_t, uint64_t) {
  Reader in(stack);
  RowOptions options;
  BudgetOptions policy;
  TokenOptions tokens;
  Results results;
  const Tensor confidence = in.tensor();
  tokens.draft_ids = in.tensor(), tokens.bonus_ids = in.tensor(), tokens.seq_lens = in.tensor();
  policy.budgets = in.tensor(), policy.costs = in.tensor();
  options.read_ranked(in);
  options.row_index = in.optional_tensor(), options.base_lens = in.optional_tensor();
  options.num_reqs = in.optional_tensor();
  tokens.block_table = in.optional_tensor();
  tokens.block_size = in.integer();
  const std::string score = in.word(), policy_name = in.word();
  policy.read(in, true);
  const bool log = in.boolean();
  tokens.pad_token = in.integer();
  const Capacity capacity = read_capacity(in);
  if (given) results.read(in);

  check_defined(confidence, "confidence");
  const Device device = device_of(confidence);
  tokens.check_drafts(options.row_index, device, Kernels::kLimits);
  check(confidence, "confidence", Types::kFloats, {tokens.slots, tokens.width}, device);
  const int64_t buckets = check_budgets(policy.budgets, device);
  check_costs(policy.costs, policy.budgets, device);
  options.check_all(tokens.batch, device);
  check_paging(tokens.block_table, tokens.block_size, tokens.batch, device);
  const bool shifted = is_shifted(score);
  policy.check_all(policy_name, device);
  Kernels::check_pinned(policy.host_budget);
  check_calibration(policy.calibration, tokens.width, device);
  const int64_t size = prepare(results, given, tokens, capacity, buckets, static_cast<bool>(options.base_lens), device);

  Kernels::select_and_pack(
      device, options.rows(tokens.batch, tokens.slots, tokens.width, size),
      Scores{confidence.data, nullptr, policy.calibration.as<int32_t>(), float_type(confidence), log, shifted},
      policy.tables(buckets), tokens.tokens(), results.packed(), policy.decision(results.decision(), results.gains()));
  if (!given) results.give(stack);
}

template <class Kernels>
void log_prefix_sum(StableIValue* stack, uint64_t, uint64_t) {
  Reader in(stack);
  RowOptions options;
  const Tensor confidence = in.tensor();
  options.row_index = in.optional_tensor();
  const std::string score = in.word();
  const Tensor calibration = in.optional_tensor();
  const bool log = in.boolean();

  check_defined(confidence, "confidence");
  const Device device = device_of(confidence);
  check(confidence, "confidence", Types::kFloats, {kAny, kAny}, device);
  const int64_t slots = confidence.sizes[0], width = confidence.sizes[1];
  check_draft_len("confidence", width);
  check_optional(options.row_index, "row_index", kI32, {kAny}, device);
  const int64_t batch = options.row_index ? options.row_index.sizes[0] : slots;
  check_size_limits("confidence", batch, slots, width, Kernels::kLimits);
  const bool shifted = is_shifted(score);
  check_calibration(calibration, width, device);

  Tensor prefix = allocate({batch, width}, int32_dtype(), device);
  Kernels::log_prefix_sum(
      device, options.rows(batch, slots, width, kInt32Max),
      Scores{confidence.data, nullptr, calibration.as<int32_t>(), float_type(confidence), log, shifted},
      prefix.as<int32_t>());
  stack[0] = torch::stable::detail::from(prefix.release());
}

// What segmented_topk and bucket_argmax share.
struct Ranked {
  Tensor prefix;
  RowOptions options;
  BudgetOptions policy;
  Capacity capacity;
  int64_t batch = 0, width = 0, buckets = 0, size = 0;
  Device device = {};

  void read_rows(Reader& in) {
    options.read_ranked(in);
    options.base_lens = in.optional_tensor(), options.num_reqs = in.optional_tensor();
  }

  void check_all(Limits limits) {
    check_defined(prefix, "prefix");
    device = device_of(prefix);
    check(prefix, "prefix", kI32, {kAny, kAny}, device);
    batch = prefix.sizes[0], width = prefix.sizes[1];
    check_draft_len("prefix", width);
    check_size_limits("prefix", batch, batch, width, limits);
    buckets = check_budgets(policy.budgets, device);
    if (policy.costs) check_costs(policy.costs, policy.budgets, device);
    options.check_all(batch, device);
    size = resolve_capacity(capacity, batch, width, static_cast<bool>(options.base_lens));
  }

  Rows rows() const { return options.rows(batch, batch, width, size); }
  Scores scores() const { return {nullptr, prefix.as<int32_t>(), nullptr, FloatType::kFloat32, false, false}; }
};

template <class Kernels>
void segmented_topk(StableIValue* stack, uint64_t, uint64_t) {
  Reader in(stack);
  Ranked ranked;
  ranked.prefix = in.tensor(), ranked.policy.budgets = in.tensor();
  ranked.read_rows(in);
  ranked.capacity = read_capacity(in);
  ranked.check_all(Kernels::kLimits);
  Tensor keep = allocate({ranked.buckets, ranked.batch}, int32_dtype(), ranked.device);
  Kernels::segmented_topk(ranked.device, ranked.rows(), ranked.scores(), ranked.policy.tables(ranked.buckets),
                          keep.as<int32_t>());
  stack[0] = torch::stable::detail::from(keep.release());
}

template <class Kernels>
void bucket_argmax(StableIValue* stack, uint64_t, uint64_t) {
  Reader in(stack);
  Ranked ranked;
  ranked.prefix = in.tensor(), ranked.policy.budgets = in.tensor(), ranked.policy.costs = in.tensor();
  ranked.read_rows(in);
  const std::string policy_name = in.word();
  ranked.policy.read(in, false);
  ranked.capacity = read_capacity(in);
  ranked.check_all(Kernels::kLimits);
  ranked.policy.check_all(policy_name, ranked.device);
  Kernels::check_pinned(ranked.policy.host_budget);
  Tensor decision = allocate({4}, int32_dtype(), ranked.device);
  Tensor gains = allocate({ranked.buckets}, int64_dtype(), ranked.device);
  Kernels::bucket_argmax(ranked.device, ranked.rows(), ranked.scores(), ranked.policy.tables(ranked.buckets),
                         ranked.policy.decision(decision, gains));
  stack[0] = torch::stable::detail::from(decision.release());
  stack[1] = torch::stable::detail::from(gains.release());
}

template <class Kernels>
void pack_prefixes(StableIValue* stack, uint64_t, uint64_t) {
  Reader in(stack);
  RowOptions options;
  TokenOptions tokens;
  Results results;
  const Tensor keep_lens = in.tensor();
  tokens.draft_ids = in.tensor(), tokens.bonus_ids = in.tensor(), tokens.seq_lens = in.tensor();
  options.row_index = in.optional_tensor(), options.base_lens = in.optional_tensor();
  options.num_reqs = in.optional_tensor();
  tokens.block_table = in.optional_tensor();
  tokens.block_size = in.integer(), tokens.pad_token = in.integer();
  const Capacity capacity = read_capacity(in);

  check_defined(tokens.draft_ids, "draft_ids");
  const Device device = device_of(tokens.draft_ids);
  tokens.check_drafts(options.row_index, device, Kernels::kLimits);
  check(keep_lens, "keep_lens", kI32, {tokens.batch}, device);
  options.check_all(tokens.batch, device);
  check_paging(tokens.block_table, tokens.block_size, tokens.batch, device);
  const int64_t size = prepare(results, false, tokens, capacity, 0, static_cast<bool>(options.base_lens), device);
  Kernels::pack_prefixes(device, options.rows(tokens.batch, tokens.slots, tokens.width, size), keep_lens.as<int32_t>(),
                         tokens.tokens(), results.packed(),
                         Decision{results.decision().as<int32_t>(), nullptr, nullptr, nullptr});
  results.give(stack);
}

template <class Kernels>
void bind(torch::stable::detail::StableLibrary& m) {
  m.impl("select_and_pack", &select_and_pack<Kernels, false>);
  m.impl("select_and_pack.out", &select_and_pack<Kernels, true>);
  m.impl("log_prefix_sum", &log_prefix_sum<Kernels>);
  m.impl("segmented_topk", &segmented_topk<Kernels>);
  m.impl("bucket_argmax", &bucket_argmax<Kernels>);
  m.impl("pack_prefixes", &pack_prefixes<Kernels>);
}

}  // namespace dcut::binding
