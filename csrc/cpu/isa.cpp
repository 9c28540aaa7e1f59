#include "isa.h"

#include <atomic>

#define DCUT_EXPORT extern "C" __attribute__((visibility("default")))

namespace dcut::cpu {
namespace {

constexpr int kCount = 3;

const Isa* table(int index) {
#if defined(__x86_64__)
  if (index == 2) {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return has ? &kAvx512 : nullptr;
  }
  if (index == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") ? &kAvx2 : nullptr;
#endif
  return index == 0 ? &kPortable : nullptr;
}

int best() {
  int index = kCount - 1;
  while (table(index) == nullptr) --index;
  return index;
}

std::atomic<int> current{best()};

}  // namespace

const Isa& isa() { return *table(current.load(std::memory_order_relaxed)); }

}  // namespace dcut::cpu

// 0 portable, 1 AVX2, 2 AVX-512.
DCUT_EXPORT int dcut_cpu_isa() { return dcut::cpu::current.load(); }

// Returns 0 if this machine lacks the instruction set.
DCUT_EXPORT int dcut_cpu_set_isa(int index) {
  if (index < 0 || index >= dcut::cpu::kCount || dcut::cpu::table(index) == nullptr) return 0;
  dcut::cpu::current.store(index);
  return 1;
}
