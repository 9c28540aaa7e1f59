// Where the ranks of all positions stay between the stages.
#pragma once

#include "prefix_sum.cuh"

namespace dcut::gpu {

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
      pair = load_q(scores, row.offset, lanes.position() - 1, exists);
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
    return !rows.row_index && !scores.calibration && scores.type == FloatType::kFloat32 && offset % 4 == 0 &&
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
