// The kernels, put together from the stages.
#pragma once

#include "bucket_argmax.cuh"
#include "pack.cuh"

namespace dcut::gpu {

// The shared memory of a block.
struct Block {
  Fixed& fixed;
  int64_t *partial, *gains;  // [targets, 32], [targets]
  Target* targets;           // [targets]
  uint32_t *counts, *keys;   // [targets, kDigitSize], [batch, draft_len] with Storage::kShared
  int32_t at_once;           // targets

  __device__ Block(unsigned char* memory, int32_t targets_at_once, const Shared& s)
      : fixed(*reinterpret_cast<Fixed*>(memory)),
        partial(reinterpret_cast<int64_t*>(memory + s.partial)),
        gains(reinterpret_cast<int64_t*>(memory + s.gains)),
        targets(reinterpret_cast<Target*>(memory + s.target)),
        counts(reinterpret_cast<uint32_t*>(memory + s.counts)),
        keys(reinterpret_cast<uint32_t*>(memory + s.keys)),
        at_once(targets_at_once) {}

  // A barrier must follow.
  __device__ void clear(int32_t buckets) const {
    const int32_t thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
    for (int32_t j = thread; j < kFirstSize; j += threads) fixed.first[j] = 0;
    for (int32_t j = thread; j < min(at_once, buckets + 1) * kDigitSize; j += threads) counts[j] = 0;
    if (thread < 8) {
      fixed.exp2_t[thread] = exp2_t(static_cast<uint32_t>(thread));
      fixed.exp2_s[thread] = exp2_s(static_cast<uint32_t>(thread));
    }
    if (thread == 0) {
      fixed.base_low = fixed.base_high = fixed.floors = fixed.candidates = 0;
      fixed.choice = {-1.0, 0, 0, -1, 0, 0};
    }
  }
};

// Tokens of the step under target `r`: a bucket, or after the last one the given budget or all that fits.
__device__ inline int32_t target_total(const Block& block, const Tables& tables, const Totals& totals, int32_t r) {
  if (r < tables.buckets) return totals.clamp_budget(block.fixed.budgets[r]);
  return tables.budget ? totals.clamp_budget(__ldg(tables.budget)) : totals.highest;
}

// Finds the thresholds of targets 0..last, as many at once as fit, and calls visit(first, n) for each lot of them.
template <class RanksT, class Visit>
__device__ inline void select_all(RanksT& ranks, const Block& block, const Tables& tables, const Totals& totals,
                                  int32_t last, Visit visit) {
  for (int32_t first = 0; first <= last; first += block.at_once) {
    const int32_t n = min(block.at_once, last + 1 - first);
    select(ranks, block.fixed, block.targets, block.counts, n, [&](int32_t t) {
      return static_cast<uint32_t>(target_total(block, tables, totals, first + t) - totals.lowest);
    });
    visit(first, n);
    __syncthreads();
  }
}

// Everything from confidences to the choice, which lies in block.fixed afterwards.
template <class RanksT>
__device__ inline void decide(RanksT& ranks, const Block& block, const Tables& tables, const Decision& out) {
  const int32_t buckets = tables.buckets;
  block.clear(buckets);
  load_tables(tables, ranks.active, block.fixed);
  ranks.stage();
  __syncthreads();
  const int64_t fixed_gain = tally(ranks, block.fixed, tables.count_bonus);
  __syncthreads();
  const Totals totals(block.fixed, ranks.rows.capacity);
  select_all(ranks, block, tables, totals, buckets, [&](int32_t first, int32_t n) {
    const int32_t gained = min(n, buckets - first);  // the last target is no bucket
    if (gained > 0) sum_gains(ranks, block.fixed, block.targets, gained, fixed_gain, block.partial, block.gains);
    if (warp() != 0) return;
    if (blockIdx.x == 0 && lane() < gained) out.gains[first + lane()] = block.gains[lane()];
    if (gained > 0) argmax(block.fixed, block.targets, block.gains, first, gained, block.fixed.choice);
    __syncwarp();
    if (first + n > buckets) {
      conclude(block.fixed, tables, totals, target_total(block, tables, totals, buckets), block.targets[n - 1],
               block.fixed.choice);
    }
  });
  if (blockIdx.x == 0 && threadIdx.x < 4) {
    const Choice& c = block.fixed.choice;
    out.decision[threadIdx.x] = threadIdx.x == 0 ? c.bucket : (threadIdx.x == 3 ? c.padded : c.total);
  }
}

template <Storage kStorage>
__global__ void __launch_bounds__(kMaxThreads, 1)
    select_and_pack(Rows rows, Scores scores, Tables tables, Tokens tokens, Packed packed, Decision decision,
                    int32_t targets) {
  DCUT_SHARED(memory);
  const Block block(memory, targets, shared_layout(targets, 0));
  const Lanes lanes(rows.batch, rows.draft_len, warp(), warps());
  Ranks<kStorage> ranks(rows, scores, lanes, block.keys);
  Entry entries[kHeldTurns];  // loaded before the decision, so that their latency is hidden behind it
  if constexpr (kStorage == Storage::kHeld) {
    ranks.walk([&](int32_t turn) {
      const int32_t i = lanes.row(turn), p = lanes.position(turn);
      const Row row = load_row(rows, nullptr, i, ranks.active);
      if (i < ranks.active && p <= row.drafts) entries[turn] = load_entry(tokens, row, i, p);
    });
  }
  decide(ranks, block, tables, decision);
  const Choice choice = block.fixed.choice;
  pack<kStorage>(Writer{rows, tokens, packed}, lanes, ranks.active, choice.ties, block.fixed, entries,
                 [&](auto visit) { walk_depths(ranks, choice.threshold, visit); });
}

// The parts. Their inputs are small: nothing is kept in shared memory between the stages.

__global__ void __launch_bounds__(kMaxThreads, 1)
    bucket_argmax(Rows rows, Scores scores, Tables tables, Decision decision, int32_t targets) {
  DCUT_SHARED(memory);
  const Block block(memory, targets, shared_layout(targets, 0));
  const Lanes lanes(rows.batch, rows.draft_len, warp(), warps());
  Ranks<Storage::kReread> ranks(rows, scores, lanes, nullptr);
  decide(ranks, block, tables, decision);
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    segmented_topk(Rows rows, Scores scores, Tables tables, int32_t* keep, int32_t targets) {  // keep: [buckets, batch]
  DCUT_SHARED(memory);
  const Block block(memory, targets, shared_layout(targets, 0));
  const Lanes lanes(rows.batch, rows.draft_len, warp(), warps());
  Ranks<Storage::kReread> ranks(rows, scores, lanes, nullptr);
  block.clear(tables.buckets);
  load_tables(tables, ranks.active, block.fixed);
  __syncthreads();
  tally(ranks, block.fixed, false);
  __syncthreads();
  const Totals totals(block.fixed, rows.capacity);
  select_all(ranks, block, tables, totals, tables.buckets - 1, [&](int32_t first, int32_t n) {
    for (int32_t t = 0; t < n; ++t) {
      const Target target = block.targets[t];
      int32_t* to = keep + static_cast<int64_t>(first + t) * rows.batch;
      uint32_t ties = 0;
      walk_depths(ranks, target.threshold, [&](int32_t, int32_t, const Row&, const Depth& depth) {
        if (lanes.column == 0) ties += depth.tie;
      });
      ties = warp_sum(ties);
      if (lane() == 0) block.fixed.verified[warp()] = ties;
      __syncthreads();
      Place place = {warp_sum(lane() < warp() ? block.fixed.verified[lane()] : 0) << kVerifiedBits, 0};
      walk_depths(ranks, target.threshold, [&](int32_t, int32_t i, const Row& row, const Depth& depth) {
        const Place here = advance(place, static_cast<uint32_t>(depth.tie) << kVerifiedBits, 0, lanes, false);
        if (lanes.column == 0 && i < rows.batch) to[i] = depth.kept + (depth.tie && here.ties() < target.ties);
      });
      __syncthreads();
    }
  });
}

__global__ void __launch_bounds__(kMaxThreads, 1) log_prefix_sum(Rows rows, Scores scores, int32_t* prefix) {  // [batch, draft_len]
  const int32_t block_warps = warps(), all_warps = block_warps * static_cast<int32_t>(gridDim.x);
  const Lanes lanes(rows.batch, rows.draft_len, static_cast<int32_t>(blockIdx.x) * block_warps + warp(), all_warps);
  int32_t carry = 0;
  for (int32_t turn = 0; turn < lanes.turns; ++turn) {
    const int32_t i = lanes.row(turn), p = lanes.position(turn);
    const Row row = load_row(rows, nullptr, i, rows.batch);
    const int32_t q = p > 0 && p <= row.drafts ? load_q(scores, int64_t{row.offset} + p - 1) : 0;
    if (p < 32) carry = 0;
    const int32_t sum = prefix_sum(q, scores, lanes, carry);
    if (i < rows.batch && p > 0 && p <= rows.draft_len) {
      prefix[static_cast<int64_t>(i) * rows.draft_len + p - 1] = row.drafts > 0 ? sum : -1;
    }
  }
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    pack_prefixes(Rows rows, const int32_t* keep_lens, Tokens tokens, Packed packed, Decision decision) {  // [batch]
  DCUT_SHARED(memory);
  Fixed& fixed = *reinterpret_cast<Fixed*>(memory);
  const Lanes lanes(rows.batch, rows.draft_len, warp(), warps());
  const int32_t active = active_rows(rows);
  const int32_t total = pack<Storage::kReread>(
      Writer{rows, tokens, packed}, lanes, active, 0, fixed, nullptr, [&](auto visit) {
        for (int32_t turn = lanes.chunks - 1; turn < lanes.turns; turn += lanes.chunks) {
          const int32_t i = lanes.row(turn);
          const Row row = load_row(rows, nullptr, i, active);
          const int32_t kept = i < active ? clamp(__ldg(keep_lens + i), 0, row.drafts) : 0;
          visit(turn, i, row, Depth{kept, false});
        }
      });
  if (blockIdx.x == 0 && threadIdx.x < 4) decision.decision[threadIdx.x] = threadIdx.x == 0 ? -1 : total;
}

}  // namespace dcut::gpu
