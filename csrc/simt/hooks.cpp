// What g++ -fsanitize=thread calls at every memory access of an instrumented kernel, in place of libtsan.
#include "runtime.h"

namespace dcut::simt {
namespace {
bool is_instrumented = false;
}
bool instrumented() { return is_instrumented; }
}  // namespace dcut::simt

using dcut::simt::memory_access;

#define DCUT_HOOK(bytes)                                                                            \
  void __tsan_read##bytes(void* p) { memory_access(p, bytes, false, __builtin_return_address(0)); } \
  void __tsan_write##bytes(void* p) { memory_access(p, bytes, true, __builtin_return_address(0)); }

extern "C" {

DCUT_HOOK(1)
DCUT_HOOK(2)
DCUT_HOOK(4)
DCUT_HOOK(8)
DCUT_HOOK(16)

void __tsan_read_range(void* p, unsigned long bytes) { memory_access(p, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, unsigned long bytes) { memory_access(p, bytes, true, __builtin_return_address(0)); }

void __tsan_init() { dcut::simt::is_instrumented = true; }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

}  // extern "C"
