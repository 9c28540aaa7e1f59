// From confidences to the ranks of draft positions: rows, prefix sums, keys, and where the ranks stay.
#pragma once

#include "warp.cuh"

namespace dcut::gpu {

// One request; all zero for padding rows.
struct Row {
  int32_t drafts;  // draft tokens that exist and may be kept
  int32_t floor;   // of these, kept whatever their score
  int32_t base;    // tokens of the step before the drafts, bonus included
  int32_t w;       // -log2(weight)
  int32_t offset;  // first draft in the tables [slots, draft_len]
};

__device__ inline int32_t active_rows(const Rows& rows) {
  return rows.num_reqs ? clamp(__ldg(rows.num_reqs), 0, rows.batch) : rows.batch;
}

__device__ inline Row load_row(const Rows& rows, const int32_t* prefix, int32_t i, int32_t active) {
  Row row = {};
  if (i >= active) return row;
  const int32_t slot = rows.row_index ? __ldg(rows.row_index + i) : i;
  const bool inside = slot >= 0 && slot < rows.slots;
  row.offset = inside ? slot * rows.draft_len : 0;
  row.drafts = inside ? rows.draft_len : 0;
  if (rows.draft_lens) row.drafts = clamp(__ldg(rows.draft_lens + i), 0, row.drafts);
  if (rows.max_keep) row.drafts = clamp(__ldg(rows.max_keep + i), 0, row.drafts);
  if (prefix && row.drafts > 0 && __ldg(prefix + row.offset) < 0) row.drafts = 0;
  if (rows.min_keep) row.floor = clamp(__ldg(rows.min_keep + i), 0, row.drafts);
  row.base = rows.base_lens ? max(__ldg(rows.base_lens + i), 1) : 1;
  if (rows.weight) row.w = w_of_weight(__float_as_int(__ldg(rows.weight + i)));
  return row;
}

__device__ inline uint32_t q_of_bits(int32_t bits, bool log) {
  return static_cast<uint32_t>(log ? q_of_log_confidence(bits) : q_of_confidence(bits));
}

// One number for each position of a pair.
struct Pair {
  uint32_t v[kPair];
};

// The q, or given prefix sums, of the drafts from `at` on that `exists`.
template <class Exists>
__device__ inline Pair load_q(const Scores& scores, int32_t at, Exists exists) {
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
      if (exists(j)) pair.v[j] = static_cast<uint32_t>(half ? widen_half(__ldg(from + j)) : widen_bfloat16(__ldg(from + j)));
    }
  }
  DCUT_UNROLL
  for (int j = 0; j < kPair; ++j) {
    const int32_t value = static_cast<int32_t>(pair.v[j]);
    const uint32_t q = scores.prefix ? static_cast<uint32_t>(clamp(value, 0, kQMax)) : q_of_bits(value, scores.log);
    pair.v[j] = exists(j) ? q : 0;
  }
  return pair;
}

// Prefix sums at this lane's positions, from the q of each, or running maxima of given prefix sums.
__device__ inline Pair prefix_sums(Pair q, const Scores& scores, const Lanes& lanes) {
  const auto join = [&](uint32_t a, uint32_t b) { return scores.prefix ? max(a, b) : a + b; };
  DCUT_UNROLL
  for (int j = 1; j < kPair; ++j) q.v[j] = join(q.v[j], q.v[j - 1]);
  uint32_t sum = min(q.v[kPair - 1], static_cast<uint32_t>(kQMax));
  DCUT_UNROLL
  for (int o = 1; o < 64 / kPair; o <<= 1) {  // 32 values below 2^26 do not overflow
    const uint32_t left = __shfl_up_sync(kAllLanes, sum, o);
    if (lanes.column >= o) sum = join(sum, left);
  }
  uint32_t before = __shfl_up_sync(kAllLanes, min(sum, static_cast<uint32_t>(kQMax)), 1);
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

// The ranks of a warp's positions, turn by turn.
template <Storage kStorage>
struct Ranks {
  static constexpr bool kHolds = kStorage == Storage::kHeld;

  const Rows& rows;
  const Scores& scores;
  const Lanes& lanes;
  uint32_t* shared;  // [rows of the block, draft_len], with Storage::kShared
  int32_t active;
  Row held_row = {};
  Pair held = {};  // keys, and when they have been counted, ranks

  __device__ Ranks(const Rows& r, const Scores& s, const Lanes& l, uint32_t* memory)
      : rows(r), scores(s), lanes(l), shared(memory), active(active_rows(r)) {
    if constexpr (kHolds) held_row = load_row(rows, scores.prefix, lanes.row(0), active);
  }

  // What can be read before the counts are clear; a barrier must follow.
  __device__ void fetch() {
    if constexpr (kHolds) held = read_keys(0, held_row);
    if constexpr (kStorage == Storage::kShared) stage();
  }

  // Calls visit(turn) for every turn of the warp.
  template <class Visit>
  __device__ void walk(Visit visit) const {
    if constexpr (kHolds) {
      visit(0);
    } else {
      DCUT_ROLLED
      for (int32_t turn = 0; turn < lanes.turns; ++turn) visit(turn);
    }
  }

  __device__ Row row(int32_t turn) const {
    if constexpr (kHolds) return held_row;
    return load_row(rows, scores.prefix, lanes.row(turn), active);
  }

  // The keys at this lane's positions.
  __device__ Pair keys(int32_t turn, const Row& row) const {
    if constexpr (kHolds) return held;
    return read_keys(turn, row);
  }
  __device__ Pair read_keys(int32_t turn, const Row& row) const {
    const auto exists = [&](int j) { return lanes.position() + j > 0 && lanes.position() + j <= row.drafts; };
    Pair pair = {};
    if (staged()) {
      DCUT_UNROLL
      for (int j = 0; j < kPair; ++j) {
        if (exists(j)) pair.v[j] = place(turn)[j];
      }
    } else {
      pair = load_q(scores, row.offset + lanes.position() - 1, exists);
    }
    pair = prefix_sums(pair, scores, lanes);
    DCUT_UNROLL
    for (int j = 0; j < kPair; ++j) pair.v[j] = key_of(static_cast<int32_t>(pair.v[j]), row.w);
    return pair;
  }

  __device__ Pair ranks_of(const Pair& keys, const Row& row) const {
    Pair ranks;
    DCUT_UNROLL
    for (int j = 0; j < kPair; ++j) ranks.v[j] = rank_of(keys.v[j], row, lanes.position() + j);
    return ranks;
  }

  // Entry j of a pair has a place in shared memory: place(turn)[j].
  __device__ bool has_place(int32_t turn, int32_t j) const {
    const int32_t p = lanes.position() + j;
    return lanes.row(turn) < rows.batch && p > 0 && p <= rows.draft_len;
  }
  __device__ uint32_t* place(int32_t turn) const {
    return shared + (lanes.row(turn) - lanes.block_row) * rows.draft_len + lanes.position() - 1;
  }

  __device__ void put(int32_t turn, const Pair& ranks) {
    if constexpr (kHolds) held = ranks;
    if constexpr (kStorage == Storage::kShared) {
      DCUT_UNROLL
      for (int j = 0; j < kPair; ++j) {
        if (has_place(turn, j)) place(turn)[j] = ranks.v[j];
      }
    }
  }

  __device__ Pair get(int32_t turn) const {
    if constexpr (kHolds) return held;
    if constexpr (kStorage == Storage::kShared) {
      Pair ranks;
      DCUT_UNROLL
      for (int j = 0; j < kPair; ++j) ranks.v[j] = has_place(turn, j) ? place(turn)[j] : kNoKey;
      return ranks;
    }
    const Row from = row(turn);
    return ranks_of(read_keys(turn, from), from);
  }

// Whether the rows lie in order in one aligned table of float32, to be read in 16-byte loads.
  __device__ bool staged() const {
    if constexpr (kStorage != Storage::kShared) return false;
    const int32_t offset = lanes.block_row * rows.draft_len;
    return !rows.row_index && scores.type == FloatType::kFloat32 && offset % 4 == 0 &&
           reinterpret_cast<uintptr_t>(scores.confidence) % 16 == 0;
  }

  // Puts the q of every draft of the block where its rank will be.
  __device__ void stage() {
    if (!staged()) return;
    const int32_t* source = static_cast<const int32_t*>(scores.confidence) + lanes.block_row * rows.draft_len;
    const int32_t rows_a_block = lanes.turns * lanes.stride * warps();
    const int32_t drafts = min(active - lanes.block_row, rows_a_block) * rows.draft_len;
    DCUT_ROLLED
    for (int32_t at = static_cast<int32_t>(threadIdx.x) * 4; at < drafts; at += static_cast<int32_t>(blockDim.x) * 4) {
      int4 bits = {0, 0, 0, 0};
      if (at + 4 <= drafts) {
        bits = __ldg(reinterpret_cast<const int4*>(source + at));
      } else {  // the last one to three
        bits.x = __ldg(source + at);
        if (at + 1 < drafts) bits.y = __ldg(source + at + 1);
        if (at + 2 < drafts) bits.z = __ldg(source + at + 2);
      }
      *reinterpret_cast<uint4*>(shared + at) = {q_of_bits(bits.x, scores.log), q_of_bits(bits.y, scores.log),
                                                q_of_bits(bits.z, scores.log), q_of_bits(bits.w, scores.log)};
    }
  }
};

}  // namespace dcut::gpu
