// Sums and scans over the lanes of a warp, sums over the blocks of a cluster, and where a thread stands.
#pragma once

#include "plan.h"
#include "shim.cuh"

namespace dcut::gpu {

constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ inline int32_t lane() { return static_cast<int32_t>(threadIdx.x % 32); }
__device__ inline int32_t warp() { return static_cast<int32_t>(threadIdx.x / 32); }
// The same, so that the compiler knows that all lanes agree; only where they are together.
__device__ inline int32_t uniform_warp() { return __shfl_sync(kAllLanes, warp(), 0); }
__device__ inline int32_t warps() { return static_cast<int32_t>(blockDim.x / 32); }

__device__ inline uint32_t warp_sum(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, v);
#else
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(kAllLanes, v, o);
  return v;
#endif
}

// Of values from 0 up whose sum is below 2^59: neither 27-bit limb overflows.
__device__ inline int64_t warp_sum(int64_t v) {
  const uint32_t low = warp_sum(static_cast<uint32_t>(v) & 0x7ffffffu);
  const uint32_t high = warp_sum(static_cast<uint32_t>(v >> 27));
  return (static_cast<int64_t>(high) << 27) + low;
}

// Of values from 0 to INT32_MAX, which saturate there.
__device__ inline uint32_t saturating_add(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(add_tokens(static_cast<int32_t>(a), static_cast<int32_t>(b)));
}
__device__ inline uint32_t saturating_sum(uint32_t v) {
  for (int o = 16; o > 0; o >>= 1) v = saturating_add(v, __shfl_xor_sync(kAllLanes, v, o));
  return v;
}

// Inclusive scan over the lanes of a warp, of which the first `kLanes` matter.
template <int32_t kLanes>
__device__ inline uint32_t warp_scan(uint32_t v) {
  DCUT_UNROLL
  for (int o = 1; o < kLanes; o <<= 1) {
    const uint32_t left = __shfl_up_sync(kAllLanes, v, o);
    if (lane() >= o) v += left;
  }
  return v;
}

// Positions 0..D of a row, 0 being the bonus token, lie in pairs on 2^log_width neighboring lanes.  A turn is what a
// warp works on at once: a pair per lane.
struct Lanes {
  int32_t log_width, column, turns;
  int32_t first, stride;  // row of this lane in the first turn, and rows a turn
  int32_t block_row;      // first row of the block

  // `block` of several that share the rows.
  __device__ Lanes(const Plan& plan, uint32_t block)
      : log_width(plan.log_width),
        column(lane() & ((1 << plan.log_width) - 1)),
        turns(plan.turns),
        stride(32 >> plan.log_width) {
    block_row = static_cast<int32_t>(block) * warps() * turns * stride;
    first = block_row + warp() * turns * stride + (lane() >> log_width);
  }

  __device__ int32_t row(int32_t turn) const { return first + turn * stride; }
  __device__ int32_t position() const { return column * kPair; }  // first of the pair
  __device__ bool leads() const { return column == 0; }           // holds the bonus token

  // Sum over the lanes of this lane's row, the same in all of them.
  __device__ uint32_t row_sum(uint32_t v) const {
    for (int o = 1; o < 1 << log_width; o <<= 1) v += __shfl_xor_sync(kAllLanes, v, o);
    return v;
  }
};

// The blocks that decide together: one, or a cluster.
struct Group {
  uint32_t rank, size;

  __device__ void sync() const {
    if (size == 1) {
      __syncthreads();
    } else {
      cluster_sync();
    }
  }

  // all[j] = sum of own[j] over the blocks; a barrier must precede and follow.
  __device__ void sum(const uint32_t* own, uint32_t* all, int32_t n) const {
    DCUT_ROLLED
    for (int32_t j = static_cast<int32_t>(threadIdx.x); j < n; j += static_cast<int32_t>(blockDim.x)) {
      uint32_t v = 0;
      DCUT_ROLLED
      for (uint32_t b = 0; b < size; ++b) v += *in_block(own + j, b);
      all[j] = v;
    }
  }
};

}  // namespace dcut::gpu
