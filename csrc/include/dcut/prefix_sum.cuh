// From confidences to the ranks of draft positions: rows, prefix sums, keys, and where the keys stay.
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

__device__ inline int32_t q_of_bits(int32_t bits, bool log) {
  return log ? q_of_log_confidence(bits) : q_of_confidence(bits);
}

// The q of one draft, or its given prefix sum.
__device__ inline int32_t load_q(const Scores& scores, int64_t at) {
  if (scores.prefix) return clamp(__ldg(scores.prefix + at), 0, kQMax);
  if (scores.type == FloatType::kFloat32) {
    return q_of_bits(__ldg(static_cast<const int32_t*>(scores.confidence) + at), scores.log);
  }
  const uint32_t half = __ldg(static_cast<const uint16_t*>(scores.confidence) + at);
  return q_of_bits(scores.type == FloatType::kFloat16 ? widen_half(half) : widen_bfloat16(half), scores.log);
}

// The prefix sum at this lane's position, from the q of every lane; `carry` is the sum before the chunk, then after it.
__device__ inline int32_t prefix_sum(int32_t q, const Scores& scores, const Lanes& lanes, int32_t& carry) {
  int32_t sum;
  if (scores.prefix) {
    sum = max(static_cast<int32_t>(segment_max(static_cast<uint32_t>(q), lanes.column, lanes.width)), carry);
  } else {  // 32 values below 2^26 do not overflow
    sum = static_cast<int32_t>(segment_scan(static_cast<uint32_t>(q), lanes.column, lanes.width));
    sum = add_prefix(min(sum, kQMax), carry);
  }
  const int32_t before = carry;
  if (lanes.chunks > 1) carry = __shfl_sync(kAllLanes, sum, 31);
  if (!scores.shifted) return sum;
  const int32_t left = __shfl_up_sync(kAllLanes, sum, 1);
  return lanes.column == 0 ? before : left;
}

// THE RANK of a draft: key, then position; among equal ranks the request decides.  kNoKey: not a candidate.
__device__ inline uint32_t rank_of(uint32_t key, const Row& row, int32_t position) {
  const bool candidate = position > row.floor && position <= row.drafts;
  return candidate ? key << 6 | static_cast<uint32_t>(position - 1) : kNoKey;
}

// The ranks of a warp's positions, turn by turn.
template <Storage kStorage>
struct Ranks {
  const Rows& rows;
  const Scores& scores;
  const Lanes& lanes;
  uint32_t* shared;  // [batch, draft_len], with Storage::kShared
  int32_t active;
  int32_t carry = 0;
  uint32_t held[kStorage == Storage::kHeld ? kHeldTurns : 1];

  __device__ Ranks(const Rows& r, const Scores& s, const Lanes& l, uint32_t* memory)
      : rows(r), scores(s), lanes(l), shared(memory), active(active_rows(r)) {}

  // Calls visit(turn) for every turn of the warp.
  template <class Visit>
  __device__ void walk(Visit visit) const {
    if constexpr (kStorage == Storage::kHeld) {
#pragma unroll
      for (int32_t turn = 0; turn < kHeldTurns; ++turn) {
        if (turn < lanes.turns) visit(turn);
      }
    } else {
      for (int32_t turn = 0; turn < lanes.turns; ++turn) visit(turn);
    }
  }

  // The key at this lane's position, from the tables.  Turns of one row must come in order.
  __device__ uint32_t key(int32_t turn, const Row& row) {
    const int32_t p = lanes.position(turn);
    const bool exists = p > 0 && p <= row.drafts;
    int32_t q = 0;
    if (exists) q = staged() ? static_cast<int32_t>(shared[row.offset + p - 1]) : load_q(scores, row.offset + p - 1);
    if (p < 32) carry = 0;
    return key_of(prefix_sum(q, scores, lanes, carry), row.w);
  }

  __device__ void put(int32_t turn, uint32_t rank) {
    if constexpr (kStorage == Storage::kHeld) held[turn] = rank;
    if constexpr (kStorage == Storage::kShared) {
      const int32_t i = lanes.row(turn), p = lanes.position(turn);
      if (i < rows.batch && p > 0 && p <= rows.draft_len) shared[i * rows.draft_len + p - 1] = rank;
    }
  }

  __device__ uint32_t get(int32_t turn) {
    const int32_t i = lanes.row(turn), p = lanes.position(turn);
    if constexpr (kStorage == Storage::kHeld) return held[turn];
    if constexpr (kStorage == Storage::kShared) {
      return i < rows.batch && p > 0 && p <= rows.draft_len ? shared[i * rows.draft_len + p - 1] : kNoKey;
    }
    const Row row = load_row(rows, scores.prefix, i, active);
    return rank_of(key(turn, row), row, p);
  }

  // Whether the rows lie in order in one aligned table of float32, to be read in 16-byte loads.
  __device__ bool staged() const {
    if constexpr (kStorage != Storage::kShared) return false;
    return !rows.row_index && scores.confidence && scores.type == FloatType::kFloat32 &&
           reinterpret_cast<uintptr_t>(scores.confidence) % 16 == 0;
  }

  // Puts the q of every draft where its rank will be; a barrier must follow.
  __device__ void stage() {
    if (!staged()) return;
    const int32_t drafts = active * rows.draft_len, step = static_cast<int32_t>(blockDim.x) * 4;
    const int32_t* source = static_cast<const int32_t*>(scores.confidence);
    for (int32_t at = static_cast<int32_t>(threadIdx.x) * 4; at < drafts; at += step) {
      if (at + 4 <= drafts) {
        const int4 bits = __ldg(reinterpret_cast<const int4*>(source + at));
        uint4 q;
        q.x = static_cast<uint32_t>(q_of_bits(bits.x, scores.log)), q.y = static_cast<uint32_t>(q_of_bits(bits.y, scores.log));
        q.z = static_cast<uint32_t>(q_of_bits(bits.z, scores.log)), q.w = static_cast<uint32_t>(q_of_bits(bits.w, scores.log));
        *reinterpret_cast<uint4*>(shared + at) = q;
      } else {
        for (int32_t j = at; j < drafts; ++j) shared[j] = static_cast<uint32_t>(q_of_bits(__ldg(source + j), scores.log));
      }
    }
  }
};

}  // namespace dcut::gpu
