// Everything from confidences to the choice, put together from the stages.
#pragma once

#include "bucket_argmax.cuh"

namespace dcut::gpu {

// The shared memory of a block.
struct Block {
  Fixed& fixed;
  Tally& all;  // of the cluster
  Buckets buckets;
  int64_t *partial, *gains;  // [targets, kPartialSize], [targets]
  Target* targets;           // [targets]
  Counts counts;
  uint32_t* keys;  // [rows of the block, draft_len] with Storage::kShared
  int32_t at_once;

  __device__ Block(unsigned char* memory, const Plan& plan, const Group& group, int32_t count)
      : Block(memory, plan, group, count, shared_layout(plan.targets, count, 0, static_cast<int32_t>(group.size))) {}

  // All counts and sums to zero; a barrier must follow.
  __device__ void clear() const {
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    clear(&fixed.tally, static_cast<int32_t>(sizeof(Tally)));
    clear_counts();
    if (thread < 8) {  // by immediates: a table in memory would have to be fetched
      uint64_t t = 0;
      uint32_t s = 0;
      DCUT_UNROLL
      for (int j = 0; j < 8; ++j) {
        if (thread == j) t = exp2_t(j), s = exp2_s(j);
      }
      fixed.exp2_t[thread] = t, fixed.exp2_s[thread] = s;
    }
    if (thread == 0) fixed.choice = {-1.0, 0, 0, -1, 0, 0, kInt32Max};
  }

  __device__ void clear_counts() const { clear(counts.own, (counts.stride > 0 ? 2 : 1) * at_once * kDigitSize * 4); }

 private:
  __device__ static void clear(void* memory, int32_t bytes) {
    DCUT_ROLLED
    for (int32_t j = static_cast<int32_t>(threadIdx.x); j < bytes / 16; j += static_cast<int32_t>(blockDim.x)) {
      static_cast<uint4*>(memory)[j] = {0, 0, 0, 0};
    }
  }

  __device__ Block(unsigned char* memory, const Plan& plan, const Group& group, int32_t count, const Shared& s)
      : fixed(*reinterpret_cast<Fixed*>(memory)),
        all(group.size == 1 ? fixed.tally : *reinterpret_cast<Tally*>(memory + s.all)),
        buckets{reinterpret_cast<int32_t*>(memory + s.budgets), reinterpret_cast<float*>(memory + s.costs), count},
        partial(reinterpret_cast<int64_t*>(memory + s.partial)),
        gains(reinterpret_cast<int64_t*>(memory + s.gains)),
        targets(reinterpret_cast<Target*>(memory + s.target)),
        counts{reinterpret_cast<uint32_t*>(memory + s.counts), reinterpret_cast<uint32_t*>(memory + s.sums),
               group.size == 1 ? 0 : plan.targets * kDigitSize},
        keys(reinterpret_cast<uint32_t*>(memory + s.keys)),
        at_once(plan.targets) {}
};

// Tokens of the step under target `t`.
__device__ inline int32_t target_total(const Block& block, const Tables& tables, const Queue& queue,
                                       const Totals& totals, int32_t t) {
  if (t < queue.count) {
    const int32_t total = totals.clamp_budget(block.buckets.budgets[queue.bucket(t)]);
    return queue.one_more(t) && total < totals.highest ? total + 1 : total;
  }
  return tables.budget ? totals.clamp_budget(__ldg(tables.budget)) : totals.highest;
}

// The sums over all rows, after every rank is in its place.
template <class RanksT>
__device__ inline void prepare(RanksT& ranks, const Block& block, const Group& group, const Tables& tables) {
  const Bucket bucket(tables, ranks.active);
  ranks.fetch();
  block.clear();
  __syncthreads();
  tally(ranks, block.fixed, tables.count_bonus);
  bucket.put(block.buckets);
  group.sync();
  if (group.size > 1) {
    group.sum(block.fixed.tally.first, block.all.first, static_cast<int32_t>(sizeof(Tally) / 4));
    __syncthreads();
  }
}

// Finds the thresholds of targets 0..last, as many at once as fit, and calls visit(first, n) for each lot of them.
template <class RanksT, class Visit>
__device__ inline void select_all(RanksT& ranks, const Block& block, const Group& group, const Tables& tables,
                                  const Queue& queue, const Totals& totals, int32_t last, Visit visit) {
  const int32_t at_once = block.at_once & ~queue.shift;  // a bucket and one token more stay together
  for (int32_t first = 0; first <= last; first += at_once) {
    const int32_t n = min(at_once, last + 1 - first);
    select(ranks, group, block.all, block.targets, block.counts, n, [&](int32_t t) {
      return static_cast<uint32_t>(target_total(block, tables, queue, totals, first + t) - totals.lowest);
    });
    visit(first, n);
    group.sync();
    if (group.size > 1) block.clear_counts();  // no block reads the counts of another any more
  }
}

// What the next step is to use, by one thread.
__device__ inline void write_next(const Decision& out, int32_t budget) {
  const uint32_t count = static_cast<uint32_t>(out.next_budget[1]) + 1;
  out.next_budget[0] = budget, out.next_budget[1] = static_cast<int32_t>(count);
  if (out.host_budget) *static_cast<volatile int64_t*>(out.host_budget) = budget_word(count, budget);  // in one store
}

// Everything from confidences to the choice, which lies in block.fixed afterwards.
template <class RanksT>
__device__ inline void decide(RanksT& ranks, const Block& block, const Group& group, const Tables& tables,
                              const Decision& out) {
  const Queue queue(tables);
  prepare(ranks, block, group, tables);
  const Totals totals(block.all, ranks.rows.capacity);
  select_all(ranks, block, group, tables, queue, totals, queue.count, [&](int32_t first, int32_t n) {
    const int32_t gained = min(n, queue.count - first);  // the last target is no bucket
    sum_gains(ranks, block.fixed, block.targets, gained, block.partial);
    if (warp() == 0 && lane() < gained) block.gains[lane()] = block_gain(block.partial, lane());
    if (group.size > 1) group.sync();
    if (warp() != 0) return;
    Choice& choice = block.fixed.choice;
    int64_t gain = 0;
    if (lane() < gained) {
      gain = total_gain(group, block.fixed, block.targets[lane()], block.gains + lane());
      if (group.rank == 0 && !queue.one_more(first + lane())) out.gains[queue.bucket(first + lane())] = gain;
    }
    const double worth = utility_of(tables, block.buckets, queue, first, gained, gain, totals.lowest, ranks.active);
    argmax(block.buckets, queue, block.targets, worth, first, gained, choice);
    __syncwarp();
    // What the last lot concludes, whose last target is the fallback, is what stays.
    const int32_t fallback = target_total(block, tables, queue, totals, queue.count);
    conclude(block.buckets, tables.budget != nullptr, totals, fallback, block.targets[n - 1], choice);
  });
  if (group.rank == 0 && threadIdx.x < 4) {
    const Choice& c = block.fixed.choice;
    out.decision[threadIdx.x] = threadIdx.x == 0 ? c.bucket : (threadIdx.x == 3 ? c.padded : c.total);
    if (threadIdx.x == 0 && out.next_budget) write_next(out, c.next);
  }
}

}  // namespace dcut::gpu
