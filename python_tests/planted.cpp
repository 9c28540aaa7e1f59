// Small kernels, right ones and broken ones, for test_simt_emulation.py: `planted CASE SCHEDULE SEED FILL` launches one
// twice and prints the error, the counters and the output of each launch as a line of JSON.
#include "emulation.h"
// after emulation.h
#include "planted_cluster.h"
#include "planted_intrinsics.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

namespace {

using dcut::simt::Config;
using dcut::simt::Result;
using dcut::simt::Shape;

constexpr unsigned kAll = 0xffffffffu;

__device__ int* shared() { return static_cast<int*>(dcut::simt::dyn_shared()); }
__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ int warp() { return static_cast<int>(threadIdx.x / 32); }
__device__ int thread() { return static_cast<int>(threadIdx.x); }

__device__ int warp_scan(int v) {
  for (int o = 1; o < 32; o <<= 1) {
    const int left = __shfl_up_sync(kAll, v, static_cast<unsigned>(o));
    if (lane() >= o) v += left;
  }
  return v;
}

// Inclusive scan of 1..n over the block, with two barriers; `first` and `second` say whether they are there.
template <bool first, bool second>
__global__ void scan(int* out) {
  int* sums = shared();  // [warps]
  const int v = warp_scan(thread() + 1);
  if (lane() == 31) sums[warp()] = v;
  if (first) __syncthreads();
  if (warp() == 0) {
    const int warps = static_cast<int>(blockDim.x / 32);
    const int sum = warp_scan(lane() < warps ? sums[lane()] : 0);
    __syncwarp();
    if (lane() < warps) sums[lane()] = sum;
  }
  if (second) __syncthreads();
  out[thread()] = v + (warp() > 0 ? sums[warp() - 1] : 0);
}

// Right under every schedule: two threads write the same.
__global__ void lucky_race(int* out) {
  int* x = shared();
  x[thread()] = thread();  // thread 40 too
  if (thread() == 0) x[40] = 40;
  __syncthreads();
  out[thread()] = x[thread()];
}

__global__ void divergent_barrier(int* out) {
  if (warp() == 0) {
    __syncthreads();  // here
  } else {
    __syncthreads();  // or here
  }
  out[thread()] = 1;
}

__global__ void barrier_kinds(int* out) { out[thread()] = warp() == 0 ? __syncthreads_or(1) : __syncthreads_and(1); }

__global__ void early_exit(int* out) {
  if (thread() == 0) return;
  __syncthreads();
  out[thread()] = 1;
}

__global__ void missing_at_barrier(int* out) {
  if (thread() == 0) __syncthreads();
  if (thread() != 0) __syncwarp(~1u);
  if (thread() < 32) __syncwarp();
  out[thread()] = 1;
}

__global__ void foreign_mask(int* out) { out[thread()] = __shfl_sync(1u, thread(), 0); }

__global__ void mask_names_exited(int* out) {
  if (lane() == 0) return;
  out[thread()] = __shfl_sync(kAll, thread(), 0);
}

__global__ void mask_names_nobody(int* out) { out[thread()] = static_cast<int>(__ballot_sync(kAll, 1)); }

__global__ void masks_differ(int* out) {
  out[thread()] = static_cast<int>(__ballot_sync(lane() == 3 ? kAll >> 1 : kAll, 1));
}

__global__ void collectives_differ(int* out) {
  if (lane() < 16) {
    out[thread()] = __shfl_sync(kAll, thread(), 0);
  } else {
    out[thread()] = __shfl_xor_sync(kAll, thread(), 1);
  }
}

__global__ void bad_width(int* out) { out[thread()] = __shfl_sync(kAll, thread(), 0, 12); }

__global__ void outside_of_mask(int* out) {
  out[thread()] = lane() < 16 ? __shfl_sync(0xffffu, thread(), lane() + (lane() == 3 ? 16 : 0)) : -1;
}

__global__ void halves(int* out) {
  const unsigned mask = lane() < 16 ? 0xffffu : 0xffff0000u;
  const int first = __shfl_sync(mask, thread(), lane() & 16);
  out[thread()] = lane() < 16 ? first : __shfl_xor_sync(mask, thread(), 1);
}

__global__ void uninitialized(int* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = shared()[thread()];
  shared()[thread()] = 1;  // the next block must not see this
}

__global__ void beyond_shared(int* out) {
  shared()[thread()] = 0;
  if (thread() == 9) shared()[blockDim.x] = 1;
  out[thread()] = 1;
}

__global__ void before_shared(int* out) {
  if (thread() == 9) shared()[-1] = 1;
  out[thread()] = 1;
}

__global__ void beyond_global(int* out) { out[thread()] = out[thread() + 1]; }

__global__ void overflow(int* out) { out[thread()] = 0x7fffffff + thread(); }

__global__ void blocks_collide(int* out) {
  if (thread() == 0) out[0] = static_cast<int>(blockIdx.x);
}

__global__ void block_reads_other(int* out) {
  const int n = static_cast<int>(blockDim.x), b = static_cast<int>(blockIdx.x);
  if (b == 1) __syncthreads();  // barriers do not order blocks
  if (b == 0) out[thread()] = 1;
  if (b == 1) out[n + thread()] = out[thread()];
}

// The race of block 1 is with the read of block 0, not with its own.
__global__ void block_rewrites(int* out) {
  if (thread() != 0) return;
  const int v = out[0];  // and of its own
  if (blockIdx.x == 1) out[0] = v + 1;
}

__global__ void blocks_apart(int* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] =
      static_cast<int>(blockIdx.x * 100 + threadIdx.x) + out[gridDim.x * blockDim.x];
}

// Lane 0 gathers what the other lanes stored.
template <bool sync>
__global__ void warp_gather(int* out) {
  int* x = shared();
  if (!sync) __syncwarp();  // too early
  x[thread()] = thread();   // for lane 0
  if (sync) __syncwarp();
  if (lane() == 0) {
    int sum = 0;
    for (int i = 0; i < 32; ++i) sum += x[warp() * 32 + i];
    out[warp()] = sum;
  }
}

// Only the lanes of the mask are in order.
__global__ void half_synced(int* out) {
  int* x = shared();
  x[thread()] = thread();  // for half
  if (lane() < 16) __syncwarp(0xffffu);
  if (lane() == 0) out[warp()] = x[warp() * 32 + 15] + x[warp() * 32 + 16];
}

// A shuffle does not order memory.
__global__ void shuffle_for_sync(int* out) {
  int* x = shared();
  x[thread()] = thread();  // for a neighbor
  const int left = __shfl_xor_sync(kAll, thread(), 1);
  out[thread()] = x[left];
}

// Many readers, and a write that no barrier keeps from them.
__global__ void write_after_reads(int* out) {
  int* x = shared();
  if (thread() == 0) x[0] = 5;
  __syncthreads();
  out[thread()] = x[0];  // before the write
  __syncwarp();
  if (thread() == static_cast<int>(blockDim.x) - 1) x[0] = 5;
}

__global__ void bytes_apart(int* out) {
  unsigned char* x = static_cast<unsigned char*>(dcut::simt::dyn_shared());
  x[thread()] = static_cast<unsigned char>(thread());
  out[thread()] = x[thread()];
}

__global__ void bytes_and_words(int* out) {
  unsigned char* x = static_cast<unsigned char*>(dcut::simt::dyn_shared());
  x[thread()] = 0;  // one byte
  out[thread()] = shared()[thread() / 4];
}

__global__ void words_and_bytes(int* out) {
  unsigned char* x = static_cast<unsigned char*>(dcut::simt::dyn_shared());
  if (thread() < 16) shared()[thread()] = 0;
  out[thread()] = x[thread()];  // bytes
}

struct Pair {
  int a, b;
};
struct Triple {
  int a, b, c;
};

template <class T>
__global__ void store(int* out) {
  T* x = static_cast<T*>(dcut::simt::dyn_shared());
  x[thread()] = reinterpret_cast<const T*>(out)[64 + thread()];
  const int words = static_cast<int>(sizeof(T) / 4);
  out[thread()] = shared()[(thread() * words + 2 * words - 1) % (32 * words)];  // the last word of the next
}

template <class T>
__global__ void load(int* out) {
  const int words = static_cast<int>(sizeof(T) / 4);
  shared()[thread() * words + words - 1] = 0;  // of what the one before loads
  reinterpret_cast<T*>(out)[thread()] = static_cast<const T*>(dcut::simt::dyn_shared())[(thread() + 1) % 32];
}

__global__ void histogram(int* out) {
  unsigned* count = static_cast<unsigned*>(dcut::simt::dyn_shared());
  if (thread() < 8) count[thread()] = 0;
  __syncthreads();
  atomicAdd(&count[thread() % 8], 2);
  __syncthreads();
  if (thread() < 8) out[thread()] = static_cast<int>(count[thread()]);
}

__global__ void atomic_and_read(int* out) {
  unsigned* count = static_cast<unsigned*>(dcut::simt::dyn_shared());
  if (thread() == 0) count[0] = 0;
  __syncthreads();
  atomicAdd(count, 1);
  out[thread()] = static_cast<int>(count[0]);
}

// Here a shuffle keeps the lanes in step, but not their memory: the last access before the wrong one is right.
__global__ void atomic_then_read(int* out) {
  int* x = shared();
  if (lane() == 0) x[0] = 0;
  __syncwarp();
  atomicAdd(&x[0], 1);
  out[thread()] = __shfl_sync(kAll, thread(), 0);
  if (lane() == 5) out[thread()] = x[0];
}

__global__ void lanes_read(int* out) {
  int* x = shared();
  if (lane() == 0) x[0] = 0;
  __syncwarp();
  out[thread()] = x[0];  // all lanes
  out[thread()] += __shfl_sync(kAll, thread(), 0);
  if (lane() == 5) x[0] += 1;
}

__attribute__((noinline)) int deep(int levels) {
  volatile char frame[1024];
  frame[levels % 1024] = 1;
  return levels == 0 ? 0 : deep(levels - 1) + frame[levels % 1024];
}

__global__ void stack_overflow(int* out) { out[thread()] = deep(thread() == 20 ? 200 : 2); }

using Run = Result (*)(const Config&, int*);

template <auto kernel, unsigned blocks, unsigned threads, size_t words, unsigned cluster = 1>
Result run(const Config& config, int* out) {
  return launch(config, Shape{blocks, threads, words * 4, cluster}, kernel, out);
}

const std::map<std::string, Run> kCases = {
    {"scan", run<scan<true, true>, 1, 256, 8>},
    {"scan_in_three_blocks", run<scan<true, true>, 3, 256, 8>},
    {"scan_without_first_barrier", run<scan<false, true>, 1, 256, 8>},
    {"scan_without_second_barrier", run<scan<true, false>, 1, 256, 8>},
    {"lucky_race", run<lucky_race, 1, 64, 64>},
    {"divergent_barrier", run<divergent_barrier, 1, 64, 0>},
    {"barrier_kinds", run<barrier_kinds, 1, 64, 0>},
    {"early_exit", run<early_exit, 1, 64, 0>},
    {"missing_at_barrier", run<missing_at_barrier, 1, 32, 0>},
    {"foreign_mask", run<foreign_mask, 1, 32, 0>},
    {"mask_names_exited", run<mask_names_exited, 1, 32, 0>},
    {"mask_names_nobody", run<mask_names_nobody, 1, 40, 0>},
    {"masks_differ", run<masks_differ, 1, 32, 0>},
    {"collectives_differ", run<collectives_differ, 1, 32, 0>},
    {"bad_width", run<bad_width, 1, 32, 0>},
    {"outside_of_mask", run<outside_of_mask, 1, 32, 0>},
    {"halves", run<halves, 1, 32, 0>},
    {"uninitialized", run<uninitialized, 2, 32, 32>},
    {"beyond_shared", run<beyond_shared, 1, 32, 32>},
    {"before_shared", run<before_shared, 1, 32, 32>},
    {"beyond_global", run<beyond_global, 1, 1024, 0>},
    {"overflow", run<overflow, 1, 32, 0>},
    {"blocks_collide", run<blocks_collide, 3, 32, 0>},
    {"block_reads_other", run<block_reads_other, 2, 32, 0>},
    {"block_rewrites", run<block_rewrites, 2, 32, 0>},
    {"blocks_apart", run<blocks_apart, 3, 32, 0>},
    {"warp_gather", run<warp_gather<true>, 1, 64, 64>},
    {"warp_gather_without_sync", run<warp_gather<false>, 1, 64, 64>},
    {"half_synced", run<half_synced, 1, 32, 32>},
    {"shuffle_for_sync", run<shuffle_for_sync, 1, 32, 32>},
    {"write_after_reads", run<write_after_reads, 1, 256, 1>},
    {"bytes_apart", run<bytes_apart, 1, 64, 16>},
    {"words_and_bytes", run<words_and_bytes, 1, 64, 16>},
    {"store_of_4", run<store<int>, 1, 32, 32>},
    {"store_of_8", run<store<Pair>, 1, 32, 64>},
    {"store_of_12", run<store<Triple>, 1, 32, 96>},
    {"store_of_16", run<store<int4>, 1, 32, 128>},
    {"load_of_4", run<load<int>, 1, 32, 32>},
    {"load_of_8", run<load<Pair>, 1, 32, 64>},
    {"load_of_12", run<load<Triple>, 1, 32, 96>},
    {"load_of_16", run<load<int4>, 1, 32, 128>},
    {"bytes_and_words", run<bytes_and_words, 1, 64, 16>},
    {"histogram", run<histogram, 1, 256, 8>},
    {"atomic_and_read", run<atomic_and_read, 1, 64, 1>},
    {"atomic_then_read", run<atomic_then_read, 1, 32, 1>},
    {"lanes_read", run<lanes_read, 1, 32, 1>},
    {"stack_overflow", run<stack_overflow, 1, 32, 0>},
    {"no_threads", run<halves, 1, 0, 0>},
    {"too_many_threads", run<halves, 1, 1056, 0>},
    {"cluster_sum", run<cluster_sum<true, true, true>, 8, 32, 32, 4>},
    {"cluster_not_started", run<cluster_sum<false, false, true>, 4, 32, 32, 4>},
    {"cluster_not_stored", run<cluster_sum<true, false, true>, 4, 32, 32, 4>},
    {"cluster_not_loaded", run<cluster_sum<true, true, false>, 4, 32, 32, 4>},
    {"cluster_passes", run<cluster_passes<true>, 4, 32, 0, 2>},
    {"cluster_passes_too_early", run<cluster_passes<false>, 4, 32, 0, 2>},
    {"cluster_rewrites", run<cluster_rewrites, 2, 32, 0, 2>},
    {"clusters_rewrite", run<clusters_rewrite, 4, 32, 0, 2>},
    {"cluster_or_block", run<cluster_or_block, 2, 32, 0, 2>},
    {"cluster_divides", run<cluster_divides, 4, 32, 0, 4>},
    {"cluster_exit", run<cluster_exit, 4, 32, 0, 4>},
    {"cluster_rank_too_high", run<cluster_rank_too_high, 2, 32, 32, 2>},
    {"part_of_a_cluster", run<halves, 3, 32, 0, 2>},
    {"no_blocks", run<halves, 0, 32, 0>},
    {"intrinsics", run<intrinsics, 1, 32, 3>},
};

void print(const Result& result, const std::vector<int>& out) {
  std::string error = result.error;
  for (size_t at = 0; (at = error.find('\n', at)) != std::string::npos;) error.replace(at, 1, "\\n");
  const dcut::simt::Stats& s = result.stats;
  std::printf("{\"error\": \"%s\"", error.c_str());
  for (const auto& [name, count] : std::map<std::string, uint64_t>{{"barriers", s.barriers},
                                                                   {"warp_ops", s.warp_ops},
                                                                   {"longest_warp", s.longest_warp},
                                                                   {"shared_requests", s.shared_requests},
                                                                   {"atomics", s.atomics},
                                                                   {"switches", s.switches}}) {
    std::printf(", \"%s\": %llu", name.c_str(), static_cast<unsigned long long>(count));
  }
  for (size_t i = 0; i < out.size(); ++i) std::printf("%s%d", i == 0 ? ", \"output\": [" : ", ", out[i]);
  std::printf("]}\n");
}

}  // namespace

int main(int, char** argv) {
  const std::map<std::string, dcut::simt::Schedule> schedules = {{"forward", dcut::simt::Schedule::kForward},
                                                                 {"reverse", dcut::simt::Schedule::kReverse},
                                                                 {"shuffled", dcut::simt::Schedule::kShuffled}};
  Config config;
  config.schedule = schedules.at(argv[2]);
  config.seed = std::strtoull(argv[3], nullptr, 10);
  config.fill = static_cast<unsigned char>(std::atoi(argv[4]));
  for (int launch = 0; launch < 2; ++launch) {
    std::vector<int> out(1024);
    print(kCases.at(argv[1])(config, out.data()), out);
  }
}
