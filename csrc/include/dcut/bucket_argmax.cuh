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

// Which targets are searched: every bucket, and for early stop behind each of them the same with one token more, whose
// gain is larger by the score of that token.  The last target is the given budget, or all that fits.
struct Queue {
  int32_t shift;  // 1 for early stop, else 0
  int32_t count;  // targets of buckets, the last target left out

  __device__ Queue(const Tables& tables) : shift(tables.envelope ? 1 : 0), count(tables.buckets << shift) {}

  __device__ int32_t bucket(int32_t target) const { return target >> shift; }
  __device__ bool one_more(int32_t target) const { return (target & shift) != 0; }
};

// The utility of the bucket of target first + lane, of which there are `n`; below 0 for what takes no part.
__device__ inline double utility_of(const Tables& tables, const Buckets& buckets, const Queue& queue, int32_t first,
                                    int32_t n, int64_t gain, int32_t lowest, int32_t active) {
  const int64_t more = __shfl_down_sync(kAllLanes, gain, 1);
  const int32_t target = first + lane();
  if (lane() >= n || queue.one_more(target)) return -1.0;
  const int32_t r = queue.bucket(target), budget = buckets.budgets[r];
  if (!enabled(budget, buckets.costs[r])) return -1.0;
  if (queue.shift == 0) return utility(gain, buckets.costs[r]);
  const int32_t* envelope = table_row(tables.envelope, tables.envelope_rows, 2 * buckets.count, active) + 2 * r;
  const bool stop = budget >= lowest && stops(gain, more - gain, __ldg(envelope), __ldg(envelope + 1));
  return early_utility(stop, budget);
}

// The largest utility, by one warp: lets `n` targets, the first of which is `first`, compete with the choice so far.
// `best`: the utility of target first + lane.
__device__ inline void argmax(const Buckets& buckets, const Queue& queue, const Target* targets, double best,
                              int32_t first, int32_t n, Choice& choice) {
  int32_t who = lane();
  for (int o = 1; o < n; o <<= 1) {  // ties to the smallest bucket
    const double other = __shfl_xor_sync(kAllLanes, best, o);
    const int32_t other_who = __shfl_xor_sync(kAllLanes, who, o);
    if (other > best || (other == best && other_who < who)) best = other, who = other_who;
  }
  if (lane() == 0 && best > choice.utility) {
    choice.utility = best, choice.bucket = queue.bucket(first + who);
    choice.next = buckets.budgets[choice.bucket];
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
