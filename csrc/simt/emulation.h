// CUDA's names on the CPU, so that kernel sources compile unchanged.  Include it before them.
#pragma once

#include <climits>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "runtime.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#define threadIdx (::dcut::simt::thread_index())
#define blockIdx (::dcut::simt::block_index())
#define blockDim (::dcut::simt::block_size())
#define gridDim (::dcut::simt::grid_size())

constexpr int warpSize = 32;

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace dcut::simt {

// Bodies are inlined, so that what an access reports as its place is the kernel's.
template <class T>
__forceinline__ T shuffle(WarpOp op, unsigned mask, T value, int argument, int width, Place place) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16);
  collective(op, mask, &value, sizeof value, argument, width, place);
  return value;
}

__forceinline__ unsigned combine(WarpOp op, unsigned mask, unsigned value, Place place) {
  return shuffle(op, mask, value, 0, warpSize, place);
}

// Not instrumented: the runtime is told that the access is atomic.
template <class T, class Change>
__attribute__((noinline, no_sanitize("thread"))) T atomic(T* address, Change change, Place place) {
  atomic_access(address, sizeof(T), place);
  const T old = *address;
  *address = change(old);
  return old;
}

template <class T>
struct Same {
  using type = T;
};
template <class T>
using Value = typename Same<T>::type;  // the pointer alone decides T

// What the hardware has no name for in CUDA C++.
__forceinline__ void cluster_sync(Place place = Place::here()) { barrier(BarrierOp::kCluster, false, place); }
template <class T>
__forceinline__ const T* in_block(const T* address, uint32_t rank, Place place = Place::here()) {
  return static_cast<const T*>(in_block(static_cast<const void*>(address), rank, place));
}

}  // namespace dcut::simt

// Synchronization.
#define DCUT_HERE ::dcut::simt::Place place = ::dcut::simt::Place::here()

__forceinline__ void __syncthreads(DCUT_HERE) { ::dcut::simt::barrier(::dcut::simt::BarrierOp::kSync, false, place); }
__forceinline__ int __syncthreads_count(int predicate, DCUT_HERE) {
  return ::dcut::simt::barrier(::dcut::simt::BarrierOp::kCount, predicate != 0, place);
}
__forceinline__ int __syncthreads_and(int predicate, DCUT_HERE) {
  return ::dcut::simt::barrier(::dcut::simt::BarrierOp::kAnd, predicate != 0, place);
}
__forceinline__ int __syncthreads_or(int predicate, DCUT_HERE) {
  return ::dcut::simt::barrier(::dcut::simt::BarrierOp::kOr, predicate != 0, place);
}
__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu, DCUT_HERE) {
  ::dcut::simt::combine(::dcut::simt::WarpOp::kSync, mask, 0, place);
}

// Collectives of a warp.
template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize, DCUT_HERE) {
  return ::dcut::simt::shuffle(::dcut::simt::WarpOp::kShuffle, mask, value, lane, width, place);
}
template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, DCUT_HERE) {
  return ::dcut::simt::shuffle(::dcut::simt::WarpOp::kShuffleUp, mask, value, static_cast<int>(delta), width, place);
}
template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, DCUT_HERE) {
  return ::dcut::simt::shuffle(::dcut::simt::WarpOp::kShuffleDown, mask, value, static_cast<int>(delta), width, place);
}
template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize, DCUT_HERE) {
  return ::dcut::simt::shuffle(::dcut::simt::WarpOp::kShuffleXor, mask, value, lanes, width, place);
}
__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate, DCUT_HERE) {
  return ::dcut::simt::combine(::dcut::simt::WarpOp::kBallot, mask, predicate != 0, place);
}
__forceinline__ int __any_sync(unsigned mask, int predicate, DCUT_HERE) {
  return static_cast<int>(::dcut::simt::combine(::dcut::simt::WarpOp::kAny, mask, predicate != 0, place));
}
__forceinline__ int __all_sync(unsigned mask, int predicate, DCUT_HERE) {
  return static_cast<int>(::dcut::simt::combine(::dcut::simt::WarpOp::kAll, mask, predicate != 0, place));
}
__forceinline__ unsigned __reduce_add_sync(unsigned mask, unsigned value, DCUT_HERE) {
  return ::dcut::simt::combine(::dcut::simt::WarpOp::kReduceAdd, mask, value, place);
}
__forceinline__ int __reduce_add_sync(unsigned mask, int value, DCUT_HERE) {
  return static_cast<int>(
      ::dcut::simt::combine(::dcut::simt::WarpOp::kReduceAdd, mask, static_cast<unsigned>(value), place));
}
__forceinline__ unsigned __reduce_min_sync(unsigned mask, unsigned value, DCUT_HERE) {
  return ::dcut::simt::combine(::dcut::simt::WarpOp::kReduceMinUnsigned, mask, value, place);
}
__forceinline__ int __reduce_min_sync(unsigned mask, int value, DCUT_HERE) {
  return static_cast<int>(
      ::dcut::simt::combine(::dcut::simt::WarpOp::kReduceMin, mask, static_cast<unsigned>(value), place));
}
__forceinline__ unsigned __reduce_max_sync(unsigned mask, unsigned value, DCUT_HERE) {
  return ::dcut::simt::combine(::dcut::simt::WarpOp::kReduceMaxUnsigned, mask, value, place);
}
__forceinline__ int __reduce_max_sync(unsigned mask, int value, DCUT_HERE) {
  return static_cast<int>(
      ::dcut::simt::combine(::dcut::simt::WarpOp::kReduceMax, mask, static_cast<unsigned>(value), place));
}

// Atomics.
template <class T>
__forceinline__ T atomicAdd(T* address, ::dcut::simt::Value<T> value, DCUT_HERE) {
  return ::dcut::simt::atomic(address, [value](T old) { return static_cast<T>(old + value); }, place);
}
template <class T>
__forceinline__ T atomicMin(T* address, ::dcut::simt::Value<T> value, DCUT_HERE) {
  return ::dcut::simt::atomic(address, [value](T old) { return old < value ? old : value; }, place);
}
template <class T>
__forceinline__ T atomicMax(T* address, ::dcut::simt::Value<T> value, DCUT_HERE) {
  return ::dcut::simt::atomic(address, [value](T old) { return old > value ? old : value; }, place);
}
template <class T>
__forceinline__ T atomicOr(T* address, ::dcut::simt::Value<T> value, DCUT_HERE) {
  return ::dcut::simt::atomic(address, [value](T old) { return old | value; }, place);
}

#undef DCUT_HERE

// Arithmetic.
__forceinline__ int __popc(unsigned x) { return __builtin_popcount(x); }
__forceinline__ int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
__forceinline__ int __ffs(int x) { return __builtin_ffs(x); }
__forceinline__ int __mulhi(int a, int b) { return static_cast<int>((static_cast<int64_t>(a) * b) >> 32); }
__forceinline__ unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
__forceinline__ int __float_as_int(float x) {
  int bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
template <class T>
__forceinline__ T __ldg(const T* address) {
  return *address;
}
template <class T>
__forceinline__ T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
__forceinline__ T max(T a, T b) {
  return a < b ? b : a;
}
