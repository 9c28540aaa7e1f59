// Runs CUDA kernels on the CPU: one fiber per CUDA thread, clusters of blocks one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>

namespace dcut::simt {

enum class Schedule {
  kForward,   // the lowest ready thread runs: each warp gets as far ahead as barriers let it
  kReverse,   // the highest ready thread
  kShuffled,  // a random warp for a while, random lanes in it
};

struct Config {
  Schedule schedule = Schedule::kForward;  // also the order of the clusters
  uint64_t seed = 0;                       // of a shuffled schedule
  unsigned char fill = 0xcd;               // every byte that CUDA leaves undefined
};

struct Shape {
  unsigned blocks;
  unsigned threads;      // per block, at most 1024
  size_t shared_bytes;   // dynamic shared memory per block
  unsigned cluster = 1;  // blocks per cluster, at most 16
};

// The same on every run; all but `switches` are also the same under every schedule.  A warp operation is a collective
// of the warp and, when the kernel is instrumented, a memory instruction: one per place in the code and repetition.
struct Stats {
  uint64_t barriers = 0;         // of the block with the most, those of its cluster included
  uint64_t warp_ops = 0;         // of all warps
  uint64_t longest_warp = 0;     // of the warp with the most
  uint64_t shared_requests = 0;  // memory instructions on shared memory, instrumented only
  uint64_t atomics = 0;          // atomic operations of all threads
  uint64_t switches = 0;         // fibers resumed
};

struct Result {
  std::string error;  // empty when all went well
  Stats stats;
};

// Whether a kernel that reports its memory accesses, compiled with -fsanitize=thread, is linked in.
bool instrumented();

// Calls invoke(call) in every thread.  The `bytes` at `call` are kernel parameters, whose reads do not count.
Result run(const Config& config, const Shape& shape, void (*invoke)(void*), void* call, size_t bytes);

// kernel<<<shape.blocks, shape.threads, shape.shared_bytes>>>(arguments...)
template <class... Parameters, class... Arguments>
Result launch(const Config& config, const Shape& shape, void (*kernel)(Parameters...), const Arguments&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  } call{kernel, {arguments...}};
  const auto invoke = [](void* p) { std::apply(static_cast<Call*>(p)->kernel, static_cast<Call*>(p)->parameters); };
  return run(config, shape, invoke, &call, sizeof call);
}

// What emulation.h maps CUDA's names to.

struct Index {
  unsigned x, y, z;
};

// A place in the kernel's source.
struct Place {
  const char* file = "";
  int line = 0;

  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  bool operator==(const Place& other) const;
  std::string text() const;  // file:line
};

// Constant within a thread, which is all that sees the attribute.
[[gnu::const]] Index thread_index();
[[gnu::const]] Index block_index();
[[gnu::const]] Index block_size();
[[gnu::const]] Index grid_size();
[[gnu::const]] uint32_t cluster_rank();
[[gnu::const]] uint32_t cluster_size();
[[gnu::const]] void* dyn_shared();  // 16-byte aligned

enum class BarrierOp { kSync, kCount, kAnd, kOr, kCluster };

int barrier(BarrierOp op, bool predicate, Place place);

enum class WarpOp {
  kSync,
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kAny,
  kAll,
  kReduceAdd,
  kReduceMin,
  kReduceMax,
  kReduceMinUnsigned,
  kReduceMaxUnsigned,
};

// Replaces the operand of `size` bytes, at most 16, by the result.
void collective(WarpOp op, unsigned mask, void* operand, size_t size, int argument, int width, Place place);

// The same place in the shared memory of another block of the cluster.
const void* in_block(const void* address, uint32_t rank, Place place);

void atomic_access(const void* address, size_t size, Place place);
void memory_access(const void* address, size_t size, bool write, const void* code);

}  // namespace dcut::simt
