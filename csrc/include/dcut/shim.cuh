// What device code needs of its compiler.  Under nvcc and NVRTC these are CUDA's own names; any other compiler must
// have included a header that provides them before.
#pragma once

#include "order.h"
#include "params.h"

#if defined(__CUDACC__)

// The dynamic shared memory of the block, 16-byte aligned.
#define DCUT_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define DCUT_UNROLL _Pragma("unroll")
#define DCUT_ROLLED _Pragma("unroll 1")  // code that runs once is bound by instruction fetch: small beats unrolled

namespace dcut::gpu {

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}
// The same place in the shared memory of another block of the cluster.
template <class T>
__device__ __forceinline__ const T* in_block(const T* p, uint32_t rank) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(p), "r"(rank));
  return reinterpret_cast<const T*>(address);
}
#else
__device__ __forceinline__ uint32_t cluster_rank() { return 0; }
__device__ __forceinline__ uint32_t cluster_size() { return 1; }
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
template <class T>
__device__ __forceinline__ const T* in_block(const T* p, uint32_t) {
  return p;
}
#endif

}  // namespace dcut::gpu

#else

#define DCUT_SHARED(name) unsigned char* const name = static_cast<unsigned char*>(simt::dyn_shared())
#define DCUT_UNROLL
#define DCUT_ROLLED

namespace dcut::gpu {
using simt::cluster_rank;
using simt::cluster_size;
using simt::cluster_sync;
using simt::in_block;
}  // namespace dcut::gpu

#endif
