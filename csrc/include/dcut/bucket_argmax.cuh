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

// The table row of the batch in shared memory.
struct Buckets {
  int32_t* budgets;  // [count]
  float* costs;      // [count]
  int32_t count;
};

// Budget and cost of one bucket, read by the thread of its number; blocks have at least as many threads as buckets.
struct Bucket {
  int32_t budget;
  float cost;

  __device__ Bucket(const Tables& tables, int32_t active) {
    const int32_t r = static_cast<int32_t>(threadIdx.x);
    if (r >= tables.buckets) return;
    budget = __ldg(table_row(tables.budgets, tables.budget_rows, tables.buckets, active) + r);
    if (tables.costs) cost = __ldg(table_row(tables.costs, tables.cost_rows, tables.buckets, active) + r);
  }
  __device__ void put(const Buckets& buckets) const {
    const int32_t r = static_cast<int32_t>(threadIdx.x);
    if (r < buckets.count) buckets.budgets[r] = budget, buckets.costs[r] = cost;
  }
};

// The gains of `n` targets in each warp, partial[t][warp].  Ends with a barrier.
template <class RanksT>
__device__ inline void sum_gains(RanksT& ranks, const Fixed& fixed, const Target* targets, int32_t n,
                                 int64_t* partial) {
  DCUT_ROLLED
  for (int32_t first = 0; first < n; first += kTogether) {
    int64_t sum[kTogether] = {};
    ranks.walk([&](int32_t turn) {
      const Pair pair = ranks.get(turn);
      DCUT_UNROLL
      for (int j = 0; j < kPair; ++j) {
        const int64_t s = score(pair.v[j] >> 6, fixed);  // that of kNoKey is below no threshold
        DCUT_UNROLL
        for (int g = 0; g < kTogether; ++g) {
          sum[g] += pair.v[j] < targets[first + g].threshold ? s : 0;  // beyond n: of no use, dropped below
        }
      }
    });
    DCUT_UNROLL
    for (int g = 0; g < kTogether; ++g) {
      const int64_t total = warp_sum(sum[g]);
      if (lane() == 0 && first + g < n) partial[(first + g) * kPartialSize + warp()] = fixed.gain[warp()] + total;
    }
  }
  __syncthreads();
}

// The gain of target t in this block.
__device__ inline int64_t block_gain(const int64_t* partial, int32_t t) {
  int64_t total = 0;
  DCUT_ROLLED
  for (int32_t w = 0; w < warps(); ++w) total += partial[t * kPartialSize + w];
  return total;
}

// The gain of target t over all blocks: their sums, and the ties.
__device__ inline int64_t total_gain(const Group& group, const Fixed& fixed, const Target& target,
                                     const int64_t* gain) {
  int64_t total = target.ties > 0 ? target.ties * score(target.threshold >> 6, fixed) : 0;
  DCUT_ROLLED
  for (uint32_t b = 0; b < group.size; ++b) total += *in_block(gain, b);
  return total;
}

// Eq. 5, by one warp: lets `n` buckets, the first of which is `first`, compete with the choice so far.  `gain`: of
// bucket first + lane.
__device__ inline void argmax(const Buckets& buckets, const Target* targets, int64_t gain, int32_t first, int32_t n,
                              Choice& choice) {
  const int32_t r = first + lane();
  double best = lane() < n && enabled(buckets.budgets[r], buckets.costs[r]) ? utility(gain, buckets.costs[r]) : -1.0;
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
__device__ inline int32_t padded_total(const Buckets& buckets, int32_t total) {
  uint32_t padded = kNoKey;
  DCUT_ROLLED
  for (int32_t r = lane(); r < buckets.count; r += 32) {
    if (buckets.budgets[r] >= total) padded = min(padded, static_cast<uint32_t>(buckets.budgets[r]));
  }
  for (int o = 16; o > 0; o >>= 1) padded = min(padded, __shfl_xor_sync(kAllLanes, padded, o));
  return padded == kNoKey ? total : static_cast<int32_t>(padded);
}

// Completes the choice, by one warp.  `given`: a budget is given; `fallback`: its target, or that of all that fits.
__device__ inline void conclude(const Buckets& buckets, bool given, const Totals& totals, int32_t fallback_total,
                                const Target& fallback, Choice& choice) {
  const bool chosen = choice.bucket >= 0 && !given;
  const int32_t raw = chosen ? buckets.budgets[choice.bucket] : 0;
  const int32_t total = chosen ? totals.clamp_budget(raw) : fallback_total;
  const int32_t padded = given ? padded_total(buckets, total) : max(total, raw);
  __syncwarp();  // all lanes have read the bucket
  if (lane() != 0) return;
  choice.total = total, choice.padded = padded;
  if (!chosen) choice.bucket = -1, choice.threshold = fallback.threshold, choice.ties = fallback.ties;
}

}  // namespace dcut::gpu
