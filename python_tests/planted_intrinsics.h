// Every collective, atomic operation and intrinsic against plain arithmetic, in one warp.
#pragma once

// Each check writes 1 for each of the 32 lanes, or 0 where it fails.
__global__ void intrinsics(int* out) {
  constexpr unsigned all = 0xffffffffu;
  const int i = static_cast<int>(threadIdx.x);
  const auto wide = static_cast<uint64_t>(i + 1) << 40 | 7u;
  const unsigned u = static_cast<unsigned>(i) * 2654435761u;
  int k = i;
  const auto put = [&](bool right) { out[k] = right, k += 32; };
  const auto element = [](int lane) { return static_cast<uint64_t>(lane + 1) << 40 | 7u; };
  unsigned sum = 0, low = ~0u, high = 0;
  for (unsigned j = 0; j < 32; ++j)
    sum += j * 2654435761u, low = min(low, j * 2654435761u), high = max(high, j * 2654435761u);
  put(__shfl_sync(all, wide, 9) == element(9));
  put(__shfl_sync(all, wide, 9, 8) == element((i & 24) + 1));
  put(__shfl_up_sync(all, wide, 3) == element(i >= 3 ? i - 3 : i));
  put(__shfl_down_sync(all, wide, 3, 16) == element((i & 15) < 13 ? i + 3 : i));
  put(__shfl_xor_sync(all, wide, 16) == element(i ^ 16));
  put(__shfl_xor_sync(all, 0.5 * i, 1) == 0.5 * (i ^ 1));
  put(__ballot_sync(all, i % 3 == 0) == 0x49249249u);
  put(__any_sync(all, i == 31) == 1 && __any_sync(all, 0) == 0);
  put(__all_sync(all, i < 32) == 1 && __all_sync(all, i != 31) == 0);
  put(__reduce_add_sync(all, u) == sum && __reduce_add_sync(all, -i) == -496);
  put(__reduce_min_sync(all, u) == low && __reduce_min_sync(all, i - 9) == -9);
  put(__reduce_max_sync(all, u) == high && __reduce_max_sync(all, i - 40) == -9);
  put(__syncthreads_or(i == 17) != 0 && __syncthreads_or(0) == 0);
  put(__syncthreads_and(1) != 0 && __syncthreads_and(i != 17) == 0 && __syncthreads_count(i % 4 == 0) == 8);
  put(__popc(0xf0f0u) == 8 && __clz(0) == 32 && __clz(1) == 31 && __ffs(0) == 0 && __ffs(8) == 4);
  put(__mulhi(-3, 1 << 30) == -1 && __umulhi(1u << 31, 6) == 3 && __float_as_int(1.0f) == 0x3f800000);
  unsigned* x = static_cast<unsigned*>(dcut::simt::dyn_shared());
  if (i == 0) x[0] = x[1] = 0, x[2] = 99;
  __syncwarp();
  atomicOr(&x[0], 1u << i);
  atomicMax(&x[1], u);
  atomicMin(&x[2], static_cast<unsigned>(i + 4));
  __syncwarp();
  put(x[0] == all && x[1] == high && x[2] == 4);
}
