// Thresholds: for every budget, the rank below which its drafts lie, found digit by digit on counts in shared memory.
//
// All budgets share the count of the leading digit; below it, each budget counts only the ranks that share the bits
// found so far.  A budget is settled as soon as it takes all that is left: with real confidences after two digits.
#pragma once

#include "ranks.cuh"

namespace dcut::gpu {

constexpr uint32_t kSettled = 0xffffffffu;  // as leading bits: those of no rank
constexpr int32_t kLevels = 4;

// Where the digit of a level begins: 9 bits each, and 5 in the last.
__device__ inline int32_t digit_shift(int32_t level) { return max(23 - kDigitBits * level, 0); }

__device__ inline uint32_t digit_slot(uint32_t digit) { return digit + digit / kRun; }

// The sums over all rows that the budgets are clamped with.
struct Totals {
  int32_t lowest, highest;  // tokens of the step with mandatory drafts only, and with all that fit
  uint32_t candidates;

  __device__ Totals(const Tally& t, int32_t capacity) : candidates(t.candidates) {
    const int64_t least = (static_cast<int64_t>(t.base_high) << 16) + t.base_low + t.floors;
    const int64_t most = least + candidates < capacity ? least + candidates : capacity;
    lowest = static_cast<int32_t>(least < kInt32Max ? least : kInt32Max);
    highest = most > lowest ? static_cast<int32_t>(most) : lowest;
  }

  __device__ int32_t clamp_budget(int32_t budget) const { return clamp(budget, lowest, highest); }
};

__device__ inline int64_t score(uint32_t key, const Fixed& fixed) {
  return score_of(key, fixed.exp2_t[exp2_index(key)], fixed.exp2_s[exp2_index(key)]);
}

// Reads every row once: ranks into their place, leading digits and sums into the tally of the block, and into
// fixed.gain the scores of what every budget keeps, the bonus token included if it counts.
template <class RanksT>
__device__ inline void tally(RanksT& ranks, Fixed& fixed, bool count_bonus) {
  uint32_t drafts = 0, base_low = 0, base_high = 0;  // drafts: floors above 16 bits, candidates below
  int64_t gain = 0;
  ranks.walk([&](int32_t turn) {
    const Row row = ranks.row(turn);
    const Pair keys = ranks.keys(turn, row), pair = ranks.ranks_of(keys, row);
    ranks.put(turn, pair);
    DCUT_UNROLL
    for (int j = 0; j < kPair; ++j) {
      const bool candidate = pair.v[j] != kNoKey;
      if (candidate) atomicAdd(fixed.tally.first + digit_slot(pair.v[j] >> digit_shift(0)), 1u);
      drafts += candidate;
    }
    DCUT_ROLLED
    for (int32_t p = max(ranks.lanes.position(), 1); p < ranks.lanes.position() + kPair && p <= row.floor; ++p) {
      uint32_t key = 0;
      DCUT_UNROLL
      for (int j = 0; j < kPair; ++j) key = p == ranks.lanes.position() + j ? keys.v[j] : key;
      gain += score(key, fixed), drafts += 1u << 16;
    }
    if (ranks.lanes.leads() && row.base > 0) {
      if (count_bonus) gain += row.w == 0 ? int64_t{1} << 30 : score(key_of(0, row.w), fixed);
      base_low += static_cast<uint32_t>(row.base) & 0xffffu, base_high += static_cast<uint32_t>(row.base) >> 16;
    }
  });
  drafts = warp_sum(drafts), base_low = warp_sum(base_low), gain = warp_sum(gain);
  base_high = ranks.rows.base_lens ? warp_sum(base_high) : 0;
  if (lane() == 0) {
    fixed.gain[warp()] = gain;
    atomicAdd(&fixed.tally.candidates, drafts & 0xffffu), atomicAdd(&fixed.tally.base_low, base_low);
    if (drafts >> 16) atomicAdd(&fixed.tally.floors, drafts >> 16);
    if (base_high) atomicAdd(&fixed.tally.base_high, base_high);
  }
}

struct Cell {
  uint32_t digit, below, inside;
};

// The digit at which the counts reach `need`, by one warp.
__device__ inline Cell find_cell(const uint32_t* counts, uint32_t need) {
  const uint32_t* run = counts + lane() * (kRun + 1);
  uint32_t own = 0;
  DCUT_UNROLL
  for (int j = 0; j < kRun; ++j) own += run[j];
  uint32_t sum = warp_scan<32>(own);
  const int32_t owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, sum >= need))) - 1;
  const uint32_t before = __shfl_sync(kAllLanes, sum - own, owner);
  const uint32_t inside = lane() < kRun ? counts[owner * (kRun + 1) + lane()] : 0;
  sum = warp_scan<kRun>(inside) + before;
  const int32_t digit = __ffs(static_cast<int>(__ballot_sync(kAllLanes, sum >= need))) - 1;
  return {static_cast<uint32_t>(owner * kRun + digit), __shfl_sync(kAllLanes, sum - inside, digit),
          __shfl_sync(kAllLanes, inside, digit)};
}

// Narrows a target down to a digit, by one warp; returns whether it is still open.
__device__ inline bool narrow(Target& target, int32_t level, uint32_t leading, uint32_t need, const Cell& cell) {
  const uint32_t at = leading + cell.digit, left = need - cell.below;
  const bool whole = left == cell.inside, last = level == kLevels - 1;
  if (lane() == 0) {
    target = {whole || last ? kSettled : at, left, whole ? (at + 1) << digit_shift(level) : at, whole ? 0 : left};
  }
  return !whole && !last;
}

// Where a level counts, [n, kDigitSize].  In a cluster every block adds to its own of two in turns, and sums them up.
struct Counts {
  uint32_t *own, *all;
  int32_t stride;  // from the counts of one turn to the next, 0 with one block

  __device__ uint32_t* of_level(int32_t level) const { return own + (level & 1) * stride; }
};

// Finds the thresholds of `n` targets that keep wanted(t) of the candidates each.  Ends with a barrier.
template <class RanksT, class Wanted>
__device__ inline void select(RanksT& ranks, const Group& group, const Tally& sums, Target* targets,
                              const Counts& counts, int32_t n, Wanted wanted) {
  bool open = false;
  DCUT_ROLLED
  for (int32_t level = 0;; ++level) {
    const int32_t shift = digit_shift(level), above = level == 0 ? 32 : digit_shift(level - 1);
    const uint32_t* found = sums.first;
    if (level > 0) {
      uint32_t* own = counts.of_level(level);
      ranks.walk([&](int32_t turn) {
        const Pair pair = ranks.get(turn);
        DCUT_ROLLED
        for (int32_t t = 0; t < n; ++t) {
          const uint32_t at = targets[t].at;
          DCUT_UNROLL
          for (int j = 0; j < kPair; ++j) {
            const uint32_t rank = pair.v[j], digit = rank >> shift & ((1u << (above - shift)) - 1);
            if (rank >> above == at && rank != kNoKey) atomicAdd(own + t * kDigitSize + digit_slot(digit), 1u);
          }
        }
      });
      group.sync();
      if (group.size > 1) {
        for (int32_t t = 0; t < n; ++t) {
          const int32_t at = t * kDigitSize;
          if (targets[t].at != kSettled) group.sum(own + at, counts.all + at, kDigitSize);
        }
        __syncthreads();
      }
      found = counts.all;
    }
    open = false;
    DCUT_ROLLED
    for (int32_t t = uniform_warp(); t < n; t += warps()) {
      const uint32_t need = level == 0 ? wanted(t) : targets[t].need, at = level == 0 ? 0 : targets[t].at;
      if (level == 0 && (need == 0 || need == sums.candidates)) {
        if (lane() == 0) targets[t] = {kSettled, 0, need == 0 ? 0 : kNoKey, 0};
      } else if (at != kSettled) {
        __syncwarp();  // all lanes have read the target
        const Cell cell = find_cell(level == 0 ? found : found + t * kDigitSize, need);
        open |= narrow(targets[t], level, level == 0 ? 0 : at << (above - shift), need, cell);
      }
      if (level == 0) continue;
      // Counts are zero again for the next use: those that other blocks may still read, a level later.
      uint32_t* used = counts.of_level(group.size == 1 ? level : level - 1) + t * kDigitSize;
      __syncwarp();
      DCUT_ROLLED
      for (int32_t j = lane(); j < kDigitSize; j += 32) used[j] = 0;
    }
    open = __syncthreads_or(open);
    if (!open) break;
  }
}

}  // namespace dcut::gpu
