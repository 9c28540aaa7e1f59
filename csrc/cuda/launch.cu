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

// Compiled for sm_90 or later, a kernel can use clusters where the device is no older.
template <class Kernel>
cudaError_t limits_of(Kernel* kernel, int device, Limits& limits) {
  int shared = 0, major = 0;
  cudaFuncAttributes attributes = {};
  cudaError_t error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  limits = {static_cast<uint32_t>(shared), major >= 9 && attributes.ptxVersion >= 90 ? kMaxCluster : 1};
  return error;
}

template <class... Parameters, class... Arguments>
cudaError_t launch(const Plan& plan, bool cluster, Where where, void (*kernel)(Parameters...),
                   const Arguments&... arguments) {
  if (plan.shared_bytes > kPlainShared) {
    const auto size = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), size, static_cast<int>(plan.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(plan.blocks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads));
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = where.stream;
  config.attrs = &attribute;
  config.numAttrs = cluster && plan.blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace

cudaError_t launch_select_and_pack(const Rows& rows, const Scores& scores, const Tables& tables, const Tokens& tokens,
                                   const Packed& packed, const Decision& decision, Where where) {
  const DeviceGuard guard(where.device);
  if (guard.error != cudaSuccess) return guard.error;
  Plan plan = make_plan(rows.batch, rows.draft_len, tables.buckets, {kPlainShared, 1});
  if (plan.storage != Storage::kHeld) {  // a large batch
    Limits limits = {};
    const cudaError_t error = limits_of(select_and_pack<Storage::kShared>, where.device, limits);
    if (error != cudaSuccess) return error;
    plan = make_plan(rows.batch, rows.draft_len, tables.buckets, limits);
  }
  const auto go = [&](auto* kernel) {
    return launch(plan, true, where, kernel, rows, scores, tables, tokens, packed, decision, plan);
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
  const Plan plan = make_prefix_plan(rows.batch, rows.draft_len);
  return launch(plan, false, where, log_prefix_sum, rows, scores, prefix, plan);
}

cudaError_t launch_segmented_topk(const Rows& rows, const Scores& scores, const Tables& tables, int32_t* keep,
                                  Where where) {
  const DeviceGuard guard(where.device);
  if (guard.error != cudaSuccess) return guard.error;
  const Plan plan = make_part_plan(rows.batch, rows.draft_len, tables.buckets);
  return launch(plan, false, where, segmented_topk, rows, scores, tables, keep, plan);
}

cudaError_t launch_bucket_argmax(const Rows& rows, const Scores& scores, const Tables& tables, const Decision& decision,
                                 Where where) {
  const DeviceGuard guard(where.device);
  if (guard.error != cudaSuccess) return guard.error;
  const Plan plan = make_part_plan(rows.batch, rows.draft_len, tables.buckets);
  return launch(plan, false, where, bucket_argmax, rows, scores, tables, decision, plan);
}

cudaError_t launch_pack_prefixes(const Rows& rows, const int32_t* keep_lens, const Tokens& tokens, const Packed& packed,
                                 const Decision& decision, Where where) {
  const DeviceGuard guard(where.device);
  if (guard.error != cudaSuccess) return guard.error;
  const Plan plan = make_pack_plan(rows.batch, rows.draft_len);
  return launch(plan, false, where, pack_prefixes, rows, keep_lens, tokens, packed, decision, plan);
}

}  // namespace dcut::gpu
