// Sums and scans over the lanes of a warp, and where a thread stands.
#pragma once

#include "plan.h"
#include "shim.cuh"

namespace dcut::gpu {

constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ inline int32_t lane() { return static_cast<int32_t>(threadIdx.x % 32); }
__device__ inline int32_t warp() { return static_cast<int32_t>(threadIdx.x / 32); }
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

// Inclusive scan over segments of `width` lanes, a power of two; `column` is the lane's place in its segment.
__device__ inline uint32_t segment_scan(uint32_t v, int32_t column, int32_t width) {
  for (int o = 1; o < width; o <<= 1) {
    const uint32_t other = __shfl_up_sync(kAllLanes, v, o);
    if (column >= o) v += other;
  }
  return v;
}

__device__ inline uint32_t segment_max(uint32_t v, int32_t column, int32_t width) {
  for (int o = 1; o < width; o <<= 1) {
    const uint32_t other = __shfl_up_sync(kAllLanes, v, o);
    if (column >= o && other > v) v = other;
  }
  return v;
}

// Of values that are no less than 0, as int32, and saturate there.
__device__ inline uint32_t saturating_add(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(add_tokens(static_cast<int32_t>(a), static_cast<int32_t>(b)));
}
__device__ inline uint32_t saturating_sum(uint32_t v) {
  for (int o = 16; o > 0; o >>= 1) v = saturating_add(v, __shfl_xor_sync(kAllLanes, v, o));
  return v;
}

// Positions 0..D of a row, 0 being the bonus token, lie on `width` neighboring lanes; where D > 31, on 32 lanes in two
// chunks.  A warp walks through consecutive rows, 32 / width of them at a time; a turn is one chunk of such a group.
struct Lanes {
  int32_t width, column, chunks, turns, first, stride;

  __device__ Lanes(int32_t batch, int32_t draft_len, int32_t this_warp, int32_t all_warps) {
    const int32_t log_width = log2_lanes(draft_len);
    width = 1 << log_width;
    column = lane() & (width - 1);
    chunks = draft_len > 31 ? 2 : 1;
    stride = 32 >> log_width;
    const int32_t groups = (batch + stride * all_warps - 1) / (stride * all_warps);
    turns = groups * chunks;
    first = this_warp * groups * stride + (lane() >> log_width);
  }

  __device__ int32_t row(int32_t turn) const { return first + (chunks == 1 ? turn : turn >> 1) * stride; }
  __device__ int32_t position(int32_t turn) const { return column + (chunks == 1 ? 0 : (turn & 1) * 32); }

  // Of a ballot, the bits of this lane's row.
  __device__ uint32_t row_bits(uint32_t ballot) const {
    return width == 32 ? ballot : (ballot >> (lane() & ~(width - 1))) & ((1u << width) - 1);
  }
};

}  // namespace dcut::gpu
