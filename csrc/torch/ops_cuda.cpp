// The operators on CUDA tensors.
#include <dlfcn.h>

#include <string>

#include "dcut/launch_cuda.h"
#include "ops.h"
#include "register.h"

namespace dcut::binding {
namespace {

// torch's current stream.  The symbol is looked up, since the same library serves torch without CUDA.
cudaStream_t current_stream(int32_t device) {
  using Get = AOTITorchError (*)(int32_t, void**);
  static const Get get = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return torch_cuda ? reinterpret_cast<Get>(dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  if (!get) throw std::runtime_error("dcut: CUDA tensors need torch's libtorch_cuda.so, which is not loaded");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(get(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

template <class Function, class... Args>
void run(Function function, Device device, const Args&... args) {
  const cudaError_t error = function(args..., gpu::Where{device.index, current_stream(device.index)});
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("dcut: the launch failed: ") + cudaGetErrorString(error));
}

struct CudaKernels {
  static constexpr Limits kLimits = Limits::kOneLaunch;

  static void check_pinned(const Tensor& host_budget) {
    if (!host_budget) return;
    cudaPointerAttributes attributes = {};
    const cudaError_t error = cudaPointerGetAttributes(&attributes, host_budget.data);
    if (error != cudaSuccess || attributes.type != cudaMemoryTypeHost) {
      fail("host_budget", "a tensor in pinned memory", "one in pageable memory");
    }
  }

  template <class... Args>
  static void select_and_pack(Device device, const Args&... args) {
    run(gpu::launch_select_and_pack, device, args...);
  }
  template <class... Args>
  static void log_prefix_sum(Device device, const Args&... args) {
    run(gpu::launch_log_prefix_sum, device, args...);
  }
  template <class... Args>
  static void segmented_topk(Device device, const Args&... args) {
    run(gpu::launch_segmented_topk, device, args...);
  }
  template <class... Args>
  static void bucket_argmax(Device device, const Args&... args) {
    run(gpu::launch_bucket_argmax, device, args...);
  }
  template <class... Args>
  static void pack_prefixes(Device device, const Args&... args) {
    run(gpu::launch_pack_prefixes, device, args...);
  }
};

}  // namespace

void bind_cuda(torch::stable::detail::StableLibrary& m) { bind<CudaKernels>(m); }

}  // namespace dcut::binding
