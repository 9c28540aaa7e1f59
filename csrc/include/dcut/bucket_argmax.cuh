// Gains of the budgets, and the bucket with the largest gain per cost.
#pragma once

#include "select.cuh"

namespace dcut::gpu {

constexpr int32_t kTogether = 4;  // budgets whose gains are summed in one walk

// Row clamp(active, 1, table_rows) - 1 of a table [table_rows, buckets].
template <class T>
__device__ inline const T* table_row(const T* table, int32_t table_rows, int32_t buckets, int32_t active) {
  return table + static_cast<int64_t>(clamp(active, 1, table_rows) - 1) * buckets;
}

__device__ inline void load_tables(const Tables& tables, int32_t active, Fixed& fixed) {
  const int32_t* budgets = table_row(tables.budgets, tables.budget_rows, tables.buckets, active);
  const float* costs = tables.costs ? table_row(tables.costs, tables.cost_rows, tables.buckets, active) : nullptr;
  DCUT_ROLLED
  for (int32_t r = static_cast<int32_t>(threadIdx.x); r < tables.buckets; r += static_cast<int32_t>(blockDim.x)) {
    fixed.budgets[r] = __ldg(budgets + r);
    if (costs) fixed.costs[r] = __ldg(costs + r);
  }
}

// The gains of `n` targets in each warp, partial[t][warp], a gap after each t.  `fixed_gain`: what this thread adds to each.  Ends with a
// barrier.
template <class RanksT>
__device__ inline void sum_gains(RanksT& ranks, const Fixed& fixed, const Target* targets, int32_t n,
                                 int64_t fixed_gain, int64_t* partial) {
  DCUT_ROLLED
  for (int32_t first = 0; first < n; first += kTogether) {
    int64_t sum[kTogether];
    uint32_t threshold[kTogether];
    DCUT_UNROLL
    for (int g = 0; g < kTogether; ++g) {
      sum[g] = fixed_gain;
      threshold[g] = first + g < n ? targets[first + g].threshold : 0;
    }
    ranks.walk([&](int32_t turn) {
      const Quad quad = ranks.get(turn);
      DCUT_UNROLL
      for (int j = 0; j < kQuad; ++j) {
        const int64_t s = score(quad.v[j] >> 6, fixed);  // that of kNoKey is below no threshold
        DCUT_UNROLL
        for (int g = 0; g < kTogether; ++g) sum[g] += quad.v[j] < threshold[g] ? s : 0;
      }
    });
    DCUT_UNROLL
    for (int g = 0; g < kTogether; ++g) {
      const int64_t total = warp_sum(sum[g]);
      if (lane() == 0 && first + g < n) partial[(first + g) * 33 + warp()] = total;
    }
  }
  __syncthreads();
}

// The gain of target t in this block.
__device__ inline int64_t block_gain(const int64_t* partial, int32_t t) {
  int64_t total = 0;
  for (int32_t w = 0; w < warps(); ++w) total += partial[t * 33 + w];
  return total;
}

// The gain of target t over all blocks: their sums, and the ties.
__device__ inline int64_t total_gain(const Group& group, const Fixed& fixed, const Target& target, const int64_t* gain) {
  int64_t total = target.ties * score(target.threshold >> 6, fixed);
  DCUT_ROLLED
  for (uint32_t b = 0; b < group.size; ++b) total += *in_block(gain, b);
  return total;
}

// Eq. 5, by one warp: lets `n` buckets, the first of which is `first`, compete with the choice so far.  `gain`: of
// bucket first + lane.
__device__ inline void argmax(const Fixed& fixed, const Target* targets, int64_t gain, int32_t first, int32_t n,
                              Choice& choice) {
  const int32_t r = first + lane();
  double best = lane() < n && enabled(fixed.budgets[r], fixed.costs[r]) ? utility(gain, fixed.costs[r]) : -1.0;
  int32_t who = lane();
  for (int o = 1; o < n; o <<= 1) {  // ties to the smallest bucket
    const double other = __shfl_xor_sync(kAllLanes, best, o);
    const int32_t other_who = __shfl_xor_sync(kAllLanes, who, o);
    if (other > best || (other == best && other_who < who)) best = other, who = other_who;
  }
  if (lane() == 0 && best > choice.utility) {
    choice.utility = best, choice.bucket = first + who;
    choice.threshold = targets[who].threshold, choice.ties = targets[who].ties;
  }
}

// The padded total of a given budget, by one warp: the smallest listed budget that holds it, else the total.
__device__ inline int32_t padded_total(const Fixed& fixed, int32_t buckets, int32_t total) {
  uint32_t padded = kNoKey;
  DCUT_ROLLED
  for (int32_t r = lane(); r < buckets; r += 32) {
    if (fixed.budgets[r] >= total) padded = min(padded, static_cast<uint32_t>(fixed.budgets[r]));
  }
  for (int o = 16; o > 0; o >>= 1) padded = min(padded, __shfl_xor_sync(kAllLanes, padded, o));
  return padded == kNoKey ? total : static_cast<int32_t>(padded);
}

// Completes the choice, by one warp.  `fallback`: the target of the given budget, or of all that fits.
__device__ inline void conclude(const Fixed& fixed, const Tables& tables, const Totals& totals, int32_t fallback_total,
                                const Target& fallback, Choice& choice) {
  const bool chosen = choice.bucket >= 0 && !tables.budget;
  const int32_t raw = chosen ? fixed.budgets[choice.bucket] : 0;
  const int32_t total = chosen ? totals.clamp_budget(raw) : fallback_total;
  const int32_t padded = tables.budget ? padded_total(fixed, tables.buckets, total) : max(total, raw);
  __syncwarp();  // all lanes have read the bucket
  if (lane() != 0) return;
  choice.total = total, choice.padded = padded;
  if (!chosen) choice.bucket = -1, choice.threshold = fallback.threshold, choice.ties = fallback.ties;
}

}  // namespace dcut::gpu
