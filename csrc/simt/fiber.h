// Coroutines with stacks of their own, switched between one scheduler and any number of fibers.
#pragma once

#include <cstddef>
#include <memory>

namespace dcut::simt {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(Fiber&&) noexcept;

  // The next resume() runs `entry`, which must never return.  What ran on this stack before is abandoned.
  void start(void (*entry)());
  void resume();   // by the scheduler: runs the fiber until it suspends
  void suspend();  // by the fiber: goes on in the scheduler
  bool owns(const void* address) const;

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace dcut::simt
