// The state of the emulation: a cluster of blocks, often of one, runs at a time.
#pragma once

#include <string>
#include <vector>

#include "collective.h"
#include "fiber.h"
#include "racecheck.h"
#include "ready.h"
#include "runtime.h"
#include "shared_memory.h"
#include "sites.h"

namespace dcut::simt {

struct Block;

struct Thread {
  Fiber fiber;
  Block* block;
  unsigned index;
  BarrierOp barrier_op;
  Place barrier_place;
  Part part;
  Clock clock;
  std::vector<uint32_t> executed;  // repetitions, by site

  unsigned bit() const { return 1u << index % kLanes; }
};

// A lane that can not run waits at a barrier unless it is in a collective or has exited.
struct Warp {
  unsigned lanes = 0, collective = 0, exited = 0;
  uint64_t ops = 0;
  std::vector<uint32_t> executed;  // repetitions that a lane has reached, by site
};

struct Block {
  Block(size_t shared_bytes, unsigned rank, Thread* threads) : shared(shared_bytes), rank(rank), threads(threads) {}

  SharedMemory shared;
  unsigned rank;       // in the cluster
  unsigned index = 0;  // in the grid
  Thread* threads;     // [shape.threads]
  std::vector<Warp> warps;
  unsigned live = 0;
  unsigned at_barrier = 0, predicates = 0, passed = 0;
  uint32_t barriers = 0;
  const Thread* first_at_barrier = nullptr;
  const Thread* first_exited = nullptr;
};

class Machine {
 public:
  Result run(const Config& config, const Shape& shape, void (*invoke)(void*), void* call, size_t bytes);
  int barrier(BarrierOp op, bool predicate, Place place);
  void collective(void* operand);
  void atomic(const void* address, size_t bytes, Place place);
  void memory(const void* address, size_t bytes, Kind kind, uint32_t site);
  const void* in_block(const void* address, unsigned rank, Place place);
  bool on_own_stack(const void* address) const { return current->fiber.owns(address); }

  Thread* current = nullptr;
  bool in_kernel = false;
  Shape shape = {};
  Sites sites;

 private:
  static void thread_main();
  void run_cluster(unsigned first_block);
  void start_thread(Thread& thread);
  void exit_thread();
  void release(Block& block);
  bool cluster_arrived() const;
  void meet(Warp& warp);
  void complete(Warp& warp, unsigned mask);
  void order(unsigned mask);
  void count(uint32_t site, bool is_shared);
  void report(const Race& race, bool is_shared);
  void report(const std::string& text);
  void stop(const std::string& text);
  std::string text(const Thread& thread) const;
  std::string waiting_at(const Thread& thread) const;
  std::string waiting(const Thread& thread) const { return text(thread) + " waits at " + waiting_at(thread); }
  std::string deadlock() const;

  static Warp& warp_of(const Thread& thread) { return thread.block->warps[thread.index / kLanes]; }
  static Thread* lanes_of(const Thread& thread) { return thread.block->threads + thread.index / kLanes * kLanes; }

  Config config_;
  void (*invoke_)(void*) = nullptr;
  void* call_ = nullptr;
  size_t call_bytes_ = 0;
  Result result_;
  bool stopped_ = false;
  int reports_ = 0;

  std::vector<Thread> threads_;  // kept between launches for their stacks
  std::vector<Block> blocks_;    // of the cluster
  uint32_t cluster_barriers_ = 0;
  Ready ready_;
  Racecheck racecheck_;
};

extern Machine machine;

// While the runtime works for a thread: the linker may have given it library code that is instrumented.
struct Entered {
  Entered() { machine.in_kernel = false; }
  ~Entered() { machine.in_kernel = true; }
};

inline unsigned lowest(unsigned bits) { return static_cast<unsigned>(__builtin_ctz(bits)); }

}  // namespace dcut::simt
