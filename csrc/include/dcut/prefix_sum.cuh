// From confidences to the ranks of draft positions: q, prefix sums, keys.
#pragma once

#include "rows.cuh"

namespace dcut::gpu {

__device__ inline uint32_t q_of_bits(int32_t bits, bool log) {
  return static_cast<uint32_t>(log ? q_of_log_confidence(bits) : q_of_confidence(bits));
}

// One number for each position of a pair.
struct Pair {
  uint32_t v[kPair];
};

// The q, or given prefix sums, of the drafts from number `draft` of the row at `offset` on that `exists`.
template <class Exists>
__device__ inline Pair load_q(const Scores& scores, int32_t offset, int32_t draft, Exists exists) {
  const int32_t at = offset + draft;
  Pair pair = {};
  if (scores.prefix || scores.type == FloatType::kFloat32) {
    const int32_t* from = (scores.prefix ? scores.prefix : static_cast<const int32_t*>(scores.confidence)) + at;
    DCUT_UNROLL
    for (int j = 0; j < kPair; ++j) {
      if (exists(j)) pair.v[j] = static_cast<uint32_t>(__ldg(from + j));
    }
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(scores.confidence) + at;
    const bool half = scores.type == FloatType::kFloat16;
    for (int j = 0; j < kPair; ++j) {
      if (exists(j))
        pair.v[j] = static_cast<uint32_t>(half ? widen_half(__ldg(from + j)) : widen_bfloat16(__ldg(from + j)));
    }
  }
  DCUT_UNROLL
  for (int j = 0; j < kPair; ++j) {
    const int32_t value = static_cast<int32_t>(pair.v[j]);
    uint32_t q = scores.prefix ? static_cast<uint32_t>(clamp(value, 0, kQMax)) : q_of_bits(value, scores.log);
    if (scores.calibration && exists(j)) {
      const int32_t* table = scores.calibration + (draft + j) * (kCalibrationCells + 1);
      q = static_cast<uint32_t>(calibrate(static_cast<int32_t>(q), table));
    }
    pair.v[j] = exists(j) ? q : 0;
  }
  return pair;
}

// Prefix sums at this lane's positions, from the q of each, or running maxima of given prefix sums.
__device__ inline Pair prefix_sums(Pair q, const Scores& scores, const Lanes& lanes) {
  const auto join = [&](uint32_t a, uint32_t b) { return scores.prefix ? max(a, b) : a + b; };
  DCUT_UNROLL
  for (int j = 1; j < kPair; ++j) q.v[j] = join(q.v[j], q.v[j - 1]);
  uint32_t sum = q.v[kPair - 1];
  DCUT_UNROLL
  for (int o = 1; o < 64 / kPair; o <<= 1) {  // 64 values below 2^26 do not overflow
    const uint32_t left = __shfl_up_sync(kAllLanes, sum, o);
    if (lanes.column >= o) sum = join(sum, left);
  }
  uint32_t before = __shfl_up_sync(kAllLanes, sum, 1);
  if (lanes.leads()) before = 0;
  Pair sums;
  DCUT_UNROLL
  for (int j = 0; j < kPair; ++j) {
    const uint32_t own = scores.shifted ? (j == 0 ? 0 : q.v[j - 1]) : q.v[j];
    sums.v[j] = min(join(before, own), static_cast<uint32_t>(kQMax));
  }
  return sums;
}

// THE RANK of a draft: key, then position; among equal ranks the request decides.  kNoKey: not a candidate.
__device__ inline uint32_t rank_of(uint32_t key, const Row& row, int32_t position) {
  const bool candidate = position > row.floor && position <= row.drafts;
  return candidate ? key << 6 | static_cast<uint32_t>(position - 1) : kNoKey;
}

}  // namespace dcut::gpu
