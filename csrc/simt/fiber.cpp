#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__) && !defined(DCUT_SIMT_UCONTEXT)
#define DCUT_SIMT_ASM 1
// Saves the callee-saved registers and the stack pointer, and continues where `to` was saved.
extern "C" void dcut_simt_switch(void** from, void* to);
asm(R"(
.text
.type dcut_simt_switch, @function
.hidden dcut_simt_switch
.globl dcut_simt_switch
dcut_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size dcut_simt_switch, . - dcut_simt_switch
)");
#else
#include <ucontext.h>
#endif

namespace dcut::simt {
namespace {

constexpr size_t kStackBytes = 128 << 10;

// Where the scheduler stopped, and for the address sanitizer the stack it runs on.
struct Scheduler {
#if defined(DCUT_SIMT_ASM)
  void* saved = nullptr;
#else
  ucontext_t saved;
#endif
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;
  void (*entry)() = nullptr;
} scheduler;

#if defined(__SANITIZE_ADDRESS__)
void leave(void** fake, const void* stack, size_t bytes) { __sanitizer_start_switch_fiber(fake, stack, bytes); }
void arrive(void* fake, const void** stack, size_t* bytes) { __sanitizer_finish_switch_fiber(fake, stack, bytes); }
void forget_frames(char* stack) { ASAN_UNPOISON_MEMORY_REGION(stack, kStackBytes); }
#else
void leave(void**, const void*, size_t) {}
void arrive(void*, const void**, size_t*) {}
void forget_frames(char*) {}
#endif

void first_resume() {
  arrive(nullptr, &scheduler.stack, &scheduler.stack_bytes);
  scheduler.entry();
}

}  // namespace

struct Fiber::Context {
  char* mapping;
  char* stack;  // above a guard page that a stack overflow hits
#if defined(DCUT_SIMT_ASM)
  void* saved = nullptr;
#else
  ucontext_t saved;
#endif
  void* fake_stack = nullptr;

  Context() {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, page + kStackBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) throw std::bad_alloc();
    mapping = static_cast<char*>(memory);
    stack = mapping + page;
  }
  ~Context() { munmap(mapping, static_cast<size_t>(stack - mapping) + kStackBytes); }
};

Fiber::Fiber() : context_(std::make_unique<Context>()) {}
Fiber::~Fiber() = default;
Fiber::Fiber(Fiber&&) noexcept = default;

void Fiber::start(void (*entry)()) {
  Context& self = *context_;
  scheduler.entry = entry;
  self.fake_stack = nullptr;
  forget_frames(self.stack);
  // Stacks are a power of two apart: staggered tops keep them from sharing the same few cache sets.
  const size_t stagger = reinterpret_cast<size_t>(self.stack) / kStackBytes % 64 * 320;
#if defined(DCUT_SIMT_ASM)
  void** top = reinterpret_cast<void**>(self.stack + kStackBytes - stagger);
  *--top = nullptr;  // the return address of first_resume
  *--top = reinterpret_cast<void*>(first_resume);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  self.saved = top;
#else
  getcontext(&self.saved);
  self.saved.uc_stack.ss_sp = self.stack;
  self.saved.uc_stack.ss_size = kStackBytes - stagger;
  self.saved.uc_link = nullptr;
  makecontext(&self.saved, first_resume, 0);
#endif
}

void Fiber::resume() {
  leave(&scheduler.fake_stack, context_->stack, kStackBytes);
#if defined(DCUT_SIMT_ASM)
  dcut_simt_switch(&scheduler.saved, context_->saved);
#else
  swapcontext(&scheduler.saved, &context_->saved);
#endif
  arrive(scheduler.fake_stack, nullptr, nullptr);
}

void Fiber::suspend() {
  leave(&context_->fake_stack, scheduler.stack, scheduler.stack_bytes);
#if defined(DCUT_SIMT_ASM)
  dcut_simt_switch(&context_->saved, scheduler.saved);
#else
  swapcontext(&context_->saved, &scheduler.saved);
#endif
  arrive(context_->fake_stack, &scheduler.stack, &scheduler.stack_bytes);
}

bool Fiber::owns(const void* address) const {
  const char* p = static_cast<const char*>(address);
  return p >= context_->stack && p < context_->stack + kStackBytes;
}

}  // namespace dcut::simt
