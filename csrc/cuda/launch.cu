#include "dcut/launch_cuda.h"
#include "dcut/step.cuh"

namespace dcut::gpu {
namespace {

// Makes a device current, and on leaving the one that was.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    error = cudaGetDevice(&before_);
    if (error == cudaSuccess && before_ != device) error = cudaSetDevice(device), switched_ = error == cudaSuccess;
  }
  ~DeviceGuard() {
    if (switched_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  cudaError_t error;

 private:
  int before_ = 0;
  bool switched_ = false;
};

template <class... Parameters, class... Arguments>
cudaError_t launch(const Plan& plan, Where where, void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (plan.shared_bytes > kPlainShared) {
    const auto size = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), size, static_cast<int>(plan.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.threads), plan.shared_bytes, where.stream>>>(
      arguments...);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_select_and_pack(const Rows& rows, const Scores& scores, const Tables& tables, const Tokens& tokens,
                                   const Packed& packed, const Decision& decision, Where where) {
  const DeviceGuard guard(where.device);
  if (guard.error != cudaSuccess) return guard.error;
  int limit = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, where.device);
  if (error != cudaSuccess) return error;
  const Plan plan = make_plan(rows.batch, rows.draft_len, tables.buckets, static_cast<uint32_t>(limit));
  const auto go = [&](auto* kernel) {
    return launch(plan, where, kernel, rows, scores, tables, tokens, packed, decision, plan.targets);
  };
  switch (plan.storage) {
    case Storage::kHeld: return go(select_and_pack<Storage::kHeld>);
    case Storage::kShared: return go(select_and_pack<Storage::kShared>);
    default: return go(select_and_pack<Storage::kReread>);
  }
}

cudaError_t launch_log_prefix_sum(const Rows& rows, const Scores& scores, int32_t* prefix, Where where) {
  const DeviceGuard guard(where.device);
  if (guard.error != cudaSuccess) return guard.error;
  return launch(make_prefix_plan(rows.batch, rows.draft_len), where, log_prefix_sum, rows, scores, prefix);
}

cudaError_t launch_segmented_topk(const Rows& rows, const Scores& scores, const Tables& tables, int32_t* keep,
                                  Where where) {
  const DeviceGuard guard(where.device);
  if (guard.error != cudaSuccess) return guard.error;
  const Plan plan = make_part_plan(rows.batch, rows.draft_len, tables.buckets);
  return launch(plan, where, segmented_topk, rows, scores, tables, keep, plan.targets);
}

cudaError_t launch_bucket_argmax(const Rows& rows, const Scores& scores, const Tables& tables, const Decision& decision,
                                 Where where) {
  const DeviceGuard guard(where.device);
  if (guard.error != cudaSuccess) return guard.error;
  const Plan plan = make_part_plan(rows.batch, rows.draft_len, tables.buckets);
  return launch(plan, where, bucket_argmax, rows, scores, tables, decision, plan.targets);
}

cudaError_t launch_pack_prefixes(const Rows& rows, const int32_t* keep_lens, const Tokens& tokens, const Packed& packed,
                                 const Decision& decision, Where where) {
  const DeviceGuard guard(where.device);
  if (guard.error != cudaSuccess) return guard.error;
  return launch(make_pack_plan(rows.batch, rows.draft_len), where, pack_prefixes, rows, keep_lens, tokens, packed,
                decision);
}

}  // namespace dcut::gpu
