// Compiled with -fsanitize=thread, this file alone, the kernels report their memory accesses to the runtime.
#include "emulation.h"
// after emulation.h
#include "dcut/step.cuh"
#include "kernels.h"

namespace dcut::simt {
namespace {

template <class... Parameters, class... Arguments>
Result go(const Device& device, const gpu::Plan& plan, bool cluster, void (*kernel)(Parameters...),
          const Arguments&... arguments) {
  const unsigned blocks = static_cast<unsigned>(plan.blocks), threads = static_cast<unsigned>(plan.threads);
  const Shape shape = {blocks, threads, plan.shared_bytes, cluster ? blocks : 1};
  return launch(device.config, shape, kernel, arguments...);
}

}  // namespace

Result select_and_pack(const Device& device, const Rows& rows, const Scores& scores, const Tables& tables,
                       const Tokens& tokens, const Packed& packed, const Decision& decision) {
  const gpu::Plan plan =
      gpu::make_plan(rows.batch, rows.draft_len, tables.buckets, {device.shared_limit, device.cluster});
  const auto run = [&](auto* kernel) {
    return go(device, plan, true, kernel, rows, scores, tables, tokens, packed, decision, plan);
  };
  switch (plan.storage) {
    case gpu::Storage::kHeld: return run(gpu::select_and_pack<gpu::Storage::kHeld>);
    case gpu::Storage::kShared: return run(gpu::select_and_pack<gpu::Storage::kShared>);
    default: return run(gpu::select_and_pack<gpu::Storage::kReread>);
  }
}

Result log_prefix_sum(const Device& device, const Rows& rows, const Scores& scores, int32_t* prefix) {
  const gpu::Plan plan = gpu::make_prefix_plan(rows.batch, rows.draft_len);
  return go(device, plan, false, gpu::log_prefix_sum, rows, scores, prefix, plan);
}

Result segmented_topk(const Device& device, const Rows& rows, const Scores& scores, const Tables& tables,
                      int32_t* keep) {
  const gpu::Plan plan = gpu::make_part_plan(rows.batch, rows.draft_len, tables.buckets);
  return go(device, plan, false, gpu::segmented_topk, rows, scores, tables, keep, plan);
}

Result bucket_argmax(const Device& device, const Rows& rows, const Scores& scores, const Tables& tables,
                     const Decision& decision) {
  const gpu::Plan plan = gpu::make_part_plan(rows.batch, rows.draft_len, tables.buckets);
  return go(device, plan, false, gpu::bucket_argmax, rows, scores, tables, decision, plan);
}

Result pack_prefixes(const Device& device, const Rows& rows, const int32_t* keep_lens, const Tokens& tokens,
                     const Packed& packed, const Decision& decision) {
  const gpu::Plan plan = gpu::make_pack_plan(rows.batch, rows.draft_len);
  return go(device, plan, false, gpu::pack_prefixes, rows, keep_lens, tokens, packed, decision, plan);
}

}  // namespace dcut::simt
