// The operators on CPU tensors.
#include "dcut/launch.h"
#include "ops.h"
#include "register.h"

namespace dcut::binding {
namespace {

struct CpuKernels {
  static constexpr Limits kLimits = Limits::kCpu;

  template <class... Args>
  static void select_and_pack(Device, const Args&... args) {
    cpu::select_and_pack(args...);
  }
  template <class... Args>
  static void log_prefix_sum(Device, const Args&... args) {
    cpu::log_prefix_sum(args...);
  }
  template <class... Args>
  static void segmented_topk(Device, const Args&... args) {
    cpu::segmented_topk(args...);
  }
  template <class... Args>
  static void bucket_argmax(Device, const Args&... args) {
    cpu::bucket_argmax(args...);
  }
  template <class... Args>
  static void pack_prefixes(Device, const Args&... args) {
    cpu::pack_prefixes(args...);
  }
};

}  // namespace

void bind_cpu(torch::stable::detail::StableLibrary& m) { bind<CpuKernels>(m); }

}  // namespace dcut::binding
