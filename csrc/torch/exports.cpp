// What Python reaches through ctypes: binding namespaces, and the launch shape for callers that launch on their own.
#include <string.h>

#include "dcut/plan.h"
#include "register.h"

#define DCUT_EXPORT extern "C" __attribute__((visibility("default")))

using torch::stable::detail::StableLibrary;

#if defined(DCUT_CUDA)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
namespace dcut::binding {
void bind_cuda(StableLibrary&) {}
}  // namespace dcut::binding
#endif

DCUT_EXPORT bool dcut_has_cuda() { return kHasCuda; }

// Binds every operator of a namespace for "CPU" or "CUDA", for as long as the process lives.
DCUT_EXPORT void dcut_bind(const char* name, const char* key) {
  auto* library = new StableLibrary(StableLibrary::Kind::IMPL, strdup(name), strdup(key), __FILE__, __LINE__);
  strcmp(key, "CUDA") == 0 ? dcut::binding::bind_cuda(*library) : dcut::binding::bind_cpu(*library);
}

// `operation`: 0 select_and_pack, 1 log_prefix_sum, 2 segmented_topk and bucket_argmax, 3 pack_prefixes.
DCUT_EXPORT void dcut_gpu_plan(int32_t operation, int32_t batch, int32_t draft_len, int32_t buckets,
                               uint32_t shared_bytes, int32_t cluster, dcut::gpu::Plan* plan) {
  using namespace dcut::gpu;
  *plan = operation == 0   ? make_plan(batch, draft_len, buckets, {shared_bytes, cluster})
          : operation == 1 ? make_prefix_plan(batch, draft_len)
          : operation == 2 ? make_part_plan(batch, draft_len, buckets)
                           : make_pack_plan(batch, draft_len);
}
