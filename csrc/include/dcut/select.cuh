// Thresholds: for every budget, the rank below which its drafts lie, found digit by digit on counts in shared memory.
//
// All budgets share the count of the leading bits; below these, each budget counts only the ranks that share the bits
// found so far.  A budget is settled as soon as it takes all that is left: with real confidences after two digits.
#pragma once

#include "prefix_sum.cuh"

namespace dcut::gpu {

constexpr uint32_t kSettled = 0xffffffffu;  // as leading bits: those of no rank
constexpr int32_t kLevels = 4;

// Position of the digit of a level in a rank: 10, 8 and 8 bits of the key after the leading one, then the position.
__device__ inline int32_t digit_shift(int32_t level) { return level == 3 ? 0 : 22 - 8 * level; }

template <int32_t kRun>
__device__ inline uint32_t digit_slot(uint32_t digit) {
  return digit + digit / kRun;
}

// The sums over all rows that the budgets are clamped with.
struct Totals {
  int32_t lowest, highest;  // tokens of the step with mandatory drafts only, and with all that fit
  uint32_t candidates;

  __device__ Totals(const Fixed& f, int32_t capacity) : candidates(f.candidates) {
    const int64_t base = (static_cast<int64_t>(f.base_high) << 16) + f.base_low, least = base + f.floors;
    const int64_t most = least + candidates < capacity ? least + candidates : capacity;
    lowest = static_cast<int32_t>(least < kInt32Max ? least : kInt32Max);
    highest = most > lowest ? static_cast<int32_t>(most) : lowest;
  }

  __device__ int32_t clamp_budget(int32_t budget) const { return clamp(budget, lowest, highest); }
};

// Adds one to counts[slot] for every lane with `counted`; lanes of equal slots share one addition where they are first.
__device__ inline void count(uint32_t* counts, uint32_t slot, bool counted) {
  const uint32_t all = __ballot_sync(kAllLanes, counted);
  if (all == 0) return;
  const int32_t leader = __ffs(static_cast<int>(all)) - 1;
  const bool same = __shfl_sync(kAllLanes, slot, leader) == slot && counted;
  const uint32_t equal = __ballot_sync(kAllLanes, same);
  if (counted && (!same || lane() == leader)) {
    atomicAdd(counts + slot, same ? static_cast<uint32_t>(__popc(equal)) : 1u);
  }
}

__device__ inline int64_t score_of(uint32_t key, const Fixed& fixed) {
  return dcut::score_of(key, fixed.exp2_t[exp2_index(key)], fixed.exp2_s[exp2_index(key)]);
}

// Reads every row once: ranks into their place, leading digits into the counts, sums into `fixed`.  Returns this
// thread's scores of what every budget keeps, the bonus token included if it counts.
template <class RanksT>
__device__ inline int64_t tally(RanksT& ranks, Fixed& fixed, bool count_bonus) {
  uint32_t floors = 0, candidates = 0, base_low = 0, base_high = 0;
  int64_t gain = 0;
  ranks.walk([&](int32_t turn) {
    const int32_t i = ranks.lanes.row(turn), p = ranks.lanes.position(turn);
    const Row row = load_row(ranks.rows, ranks.scores.prefix, i, ranks.active);
    const uint32_t key = ranks.key(turn, row), rank = rank_of(key, row, p);
    ranks.put(turn, rank);
    count(fixed.first, digit_slot<kFirstRun>(rank >> (32 - kFirstBits)), rank != kNoKey);
    const bool bonus = p == 0 && i < ranks.active, floor = p > 0 && p <= row.floor;
    if (floor || (bonus && count_bonus)) gain += score_of(p == 0 ? key_of(0, row.w) : key, fixed);
    candidates += rank != kNoKey;
    floors += floor;
    if (bonus) base_low += static_cast<uint32_t>(row.base) & 0xffffu, base_high += static_cast<uint32_t>(row.base) >> 16;
  });
  candidates = warp_sum(candidates), floors = warp_sum(floors);
  base_low = warp_sum(base_low), base_high = warp_sum(base_high);
  if (lane() == 0) {
    atomicAdd(&fixed.candidates, candidates), atomicAdd(&fixed.floors, floors);
    atomicAdd(&fixed.base_low, base_low), atomicAdd(&fixed.base_high, base_high);
  }
  return gain;
}

struct Cell {
  uint32_t digit, below, inside;
};

// The digit at which the counts reach `need`, by one warp.
template <int32_t kRun>
__device__ inline Cell find_cell(const uint32_t* counts, uint32_t need) {
  const uint32_t* run = counts + lane() * (kRun + 1);
  uint32_t own = 0;
#pragma unroll
  for (int32_t j = 0; j < kRun; ++j) own += run[j];
  uint32_t sum = segment_scan(own, lane(), 32);
  const int32_t owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, sum >= need))) - 1;
  const uint32_t before = __shfl_sync(kAllLanes, sum - own, owner);
  const uint32_t inside = lane() < kRun ? counts[owner * (kRun + 1) + lane()] : 0;
  sum = segment_scan(inside, lane(), kRun) + before;
  const int32_t digit = __ffs(static_cast<int>(__ballot_sync(kAllLanes, sum >= need))) - 1;
  return {static_cast<uint32_t>(owner * kRun + digit), __shfl_sync(kAllLanes, sum - inside, digit),
          __shfl_sync(kAllLanes, inside, digit)};
}

// Narrows a budget down to a digit; returns whether it is still open.
__device__ inline bool narrow(Target& target, int32_t level, uint32_t leading, uint32_t need, const Cell& cell) {
  const uint32_t at = leading + cell.digit, left = need - cell.below;
  const bool whole = left == cell.inside, last = level == kLevels - 1;
  if (lane() == 0) {
    target = {at, left, at, left};
    if (whole || last) target.at = kSettled;
    if (whole) target.threshold = (at + 1) << digit_shift(level), target.ties = 0;
  }
  return !whole && !last;
}

// Finds the thresholds of `n` targets that keep wanted(t) of the candidates each.  Ends with a barrier.
template <class RanksT, class Wanted>
__device__ inline void select(RanksT& ranks, const Fixed& fixed, Target* targets, uint32_t* counts, int32_t n, Wanted wanted) {
  bool open = false;
  for (int32_t t = warp(); t < n; t += warps()) {
    const uint32_t need = wanted(t);
    if (need == 0 || need == fixed.candidates) {
      if (lane() == 0) targets[t] = {kSettled, 0, need == 0 ? 0 : kNoKey, 0};
    } else {
      open |= narrow(targets[t], 0, 0, need, find_cell<kFirstRun>(fixed.first, need));
    }
  }
  open = __syncthreads_or(open);
  for (int32_t level = 1; open; ++level) {
    const int32_t shift = digit_shift(level), above = digit_shift(level - 1);
    ranks.walk([&](int32_t turn) {
      const uint32_t rank = ranks.get(turn), digit = rank >> shift & ((1u << (above - shift)) - 1);
      for (int32_t t = 0; t < n; ++t) {
        count(counts + t * kDigitSize, digit_slot<kDigitRun>(digit), rank != kNoKey && rank >> above == targets[t].at);
      }
    });
    __syncthreads();
    open = false;
    for (int32_t t = warp(); t < n; t += warps()) {
      if (targets[t].at == kSettled) continue;
      uint32_t* own = counts + t * kDigitSize;
      const Cell cell = find_cell<kDigitRun>(own, targets[t].need);
      const uint32_t leading = targets[t].at << (above - shift), need = targets[t].need;
      __syncwarp();
      for (int32_t j = lane(); j < kDigitSize; j += 32) own[j] = 0;
      open |= narrow(targets[t], level, leading, need, cell);
    }
    open = __syncthreads_or(open);
  }
}

}  // namespace dcut::gpu
