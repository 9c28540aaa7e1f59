// Kernels of clusters, right ones and broken ones.  Each block of 32 threads has 32 words of shared memory.
#pragma once

using dcut::simt::cluster_rank;
using dcut::simt::cluster_size;
using dcut::simt::cluster_sync;
using dcut::simt::in_block;

// The sum over the blocks, by threads, in all blocks; all three barriers are needed.
template <bool started, bool stored, bool loaded>
__global__ void cluster_sum(int* out) {
  int* x = static_cast<int*>(dcut::simt::dyn_shared());
  if (started) cluster_sync();
  x[threadIdx.x] = static_cast<int>(threadIdx.x * (blockIdx.x + 1));  // own block
  if (stored) cluster_sync();
  int sum = 0;
  for (uint32_t b = 0; b < cluster_size(); ++b) sum += *in_block(x + threadIdx.x, b);  // all blocks
  out[blockIdx.x * 32 + threadIdx.x] = sum;
  if (loaded) cluster_sync();
}

// In global memory, after a barrier of the cluster or only of each block.
template <bool cluster>
__global__ void cluster_passes(int* out) {
  if (cluster_rank() == 0) out[blockIdx.x * 32 + threadIdx.x] = 7;  // passed on
  if (cluster) cluster_sync();
  if (!cluster) __syncthreads();
  if (cluster_rank() == 1) out[blockIdx.x * 32 + threadIdx.x] = out[(blockIdx.x - 1) * 32 + threadIdx.x];
}

__global__ void cluster_rewrites(int* out) {
  if (threadIdx.x != 0) return;
  const int v = out[0];  // both blocks
  out[8 + cluster_rank()] = v;
  if (cluster_rank() == 1) out[0] = v + 1;
}

__global__ void clusters_rewrite(int* out) {
  const int v = threadIdx.x == 0 && cluster_rank() == 0 ? out[0] : 0;  // both clusters
  cluster_sync();
  if (threadIdx.x == 0 && blockIdx.x == 2) out[0] = v + 1;
}

__global__ void cluster_or_block(int*) {
  if (threadIdx.x < 16) {
    cluster_sync();  // of the cluster
  } else {
    __syncthreads();  // of the block
  }
}

__global__ void cluster_divides(int*) {
  if (cluster_rank() == 0) {
    cluster_sync();  // block 0
  } else {
    cluster_sync();  // the others
  }
}

__global__ void cluster_exit(int*) {
  if (cluster_rank() == 3) return;
  cluster_sync();
}

__global__ void cluster_rank_too_high(int* out) {
  cluster_sync();
  out[threadIdx.x] = *in_block(static_cast<int*>(dcut::simt::dyn_shared()), 2);
}
