// Packing: every row finds its place from a scan over rows, and the lanes that hold its positions write them there.
#pragma once

#include "ranks.cuh"
#include "write.cuh"

namespace dcut::gpu {

constexpr int32_t kVerifiedBits = 18;  // a sum over rows holds verified tokens below and ties above

// Tokens before a row. Offsets saturate, so that absurd base_lens stay harmless.
struct Place {
  uint32_t verified;  // bonus tokens and kept drafts, ties left out, and the number of ties above kVerifiedBits
  uint32_t extra;     // base tokens before the bonus

  __device__ uint32_t ties() const { return verified >> kVerifiedBits; }
  __device__ int32_t index(uint32_t ties_kept) const {
    return static_cast<int32_t>((verified & ((1u << kVerifiedBits) - 1)) + min(ties(), ties_kept));
  }
  __device__ int32_t offset(uint32_t ties_kept) const {
    return add_tokens(static_cast<int32_t>(extra), index(ties_kept));
  }
  __device__ void add(uint32_t other_verified, uint32_t other_extra) {
    verified += other_verified;
    extra = saturating_add(extra, other_extra);
  }
};

// Drafts of this lane's row that lie below the threshold, its floor included, and whether one is equal to it.
struct Depth {
  int32_t kept;
  bool tie;
};

// Walks through the rows of a warp: calls visit(turn, row, depth) for each.
template <class RanksT, class Visit>
__device__ inline void walk_depths(RanksT& ranks, uint32_t threshold, Visit visit) {
  ranks.walk([&](int32_t turn) {
    const Pair pair = ranks.get(turn);
    uint32_t sum = 0;  // drafts below, and the tie above them
    DCUT_UNROLL
    for (int j = 0; j < kPair; ++j) sum += (pair.v[j] < threshold) + (pair.v[j] == threshold ? 256 : 0);
    sum = ranks.lanes.row_sum(sum);
    const Row row = ranks.row(turn);
    visit(turn, row, Depth{row.floor + static_cast<int32_t>(sum & 255), sum > 255});
  });
}

// Tokens of a row, in the form of Place.
__device__ inline uint32_t verified_of(const Row& row, const Depth& depth) {
  return row.base > 0 ? static_cast<uint32_t>(depth.kept + 1) | static_cast<uint32_t>(depth.tie) << kVerifiedBits : 0;
}
__device__ inline uint32_t extra_of(const Row& row) { return row.base > 1 ? static_cast<uint32_t>(row.base - 1) : 0; }

// Exclusive sums over the rows that a warp walks through together; afterwards `place` is that of the next ones.
__device__ inline Place advance(Place& place, uint32_t verified, uint32_t extra, const Lanes& lanes, bool has_base) {
  Place before = place;
  uint32_t v = verified, e = extra;
  DCUT_ROLLED
  for (int o = lanes.log_width; o < 5; ++o) {
    const uint32_t v_left = __shfl_up_sync(kAllLanes, v, 1u << o);
    const uint32_t e_left = has_base ? __shfl_up_sync(kAllLanes, e, 1u << o) : 0;
    if (lane() >= 1 << o) v += v_left, e = saturating_add(e, e_left);
  }
  place.add(__shfl_sync(kAllLanes, v, 31), has_base ? __shfl_sync(kAllLanes, e, 31) : 0);
  const int32_t width = 1 << lanes.log_width, left = lane() - width;
  v = __shfl_sync(kAllLanes, v, left), e = has_base ? __shfl_sync(kAllLanes, e, left) : 0;
  if (lane() >= width) before.add(v, e);
  return before;
}

// Sums of `mine` over the warps of all blocks before this one, and over all.
struct Places {
  Place here, all;

  __device__ Places(const Place& mine, const Group& group, Fixed& fixed, bool has_base) {
    const uint32_t verified = warp_sum(mine.verified), extra = has_base ? saturating_sum(mine.extra) : 0;
    if (lane() == 0) fixed.verified[warp()] = verified, fixed.extra[warp()] = extra;
    group.sync();
    here = {0, 0}, all = {0, 0};
    DCUT_ROLLED
    for (uint32_t b = 0; b < group.size; ++b) {
      Place part = {0, 0};
      if (lane() < warps()) part.verified = *in_block(fixed.verified + lane(), b);
      if (lane() < warps() && has_base) part.extra = *in_block(fixed.extra + lane(), b);
      if (b < group.rank || (b == group.rank && lane() < warp())) here.add(part.verified, part.extra);
      all.add(part.verified, part.extra);
    }
    here = {warp_sum(here.verified), has_base ? saturating_sum(here.extra) : 0};
    all = {warp_sum(all.verified), has_base ? saturating_sum(all.extra) : 0};
  }
};

// Packs all rows and returns the total.  walk(visit) must go through the rows as walk_depths does; `ties`: how many of
// the tied rows keep one more draft; `early`: of this thread, with Storage::kHeld.
template <Storage kStorage, class Walk>
__device__ inline int32_t pack(const Writer& out, const Lanes& lanes, const Group& group, uint32_t ties, Fixed& fixed,
                               const Early& early, Walk walk) {
  const bool has_base = out.rows.base_lens != nullptr;
  Place mine = {0, 0};
  walk([&](int32_t, const Row& row, const Depth& depth) {
    if (lanes.leads()) mine.add(verified_of(row, depth), extra_of(row));
  });
  Places places(mine, group, fixed, has_base);
  walk([&](int32_t turn, const Row& row, const Depth& depth) {
    const Place here = advance(places.here, verified_of(row, depth), extra_of(row), lanes, has_base);
    if (row.base == 0) return;
    const int32_t i = lanes.row(turn), kept = depth.kept + (depth.tie && here.ties() < ties);
    const int32_t offset = here.offset(ties), first = add_tokens(offset, row.base - 1), verified = here.index(ties);
    constexpr bool held = kStorage == Storage::kHeld;
    const int64_t seq_len = held ? early.seq_len : load_id(out.tokens.seq_lens, i, out.tokens.seq_lens_64);
    if (lanes.leads()) out.row_lens(i, kept, seq_len, add_tokens(first, kept + 1));
    const int32_t q = lanes.position(), at = add_tokens(first, q), last = kept - q;  // of the pair: j <= last
    const auto write = [&](int j) {
      if (j > last) return;
      const int64_t position = static_cast<int64_t>(static_cast<uint64_t>(seq_len) + static_cast<uint64_t>(q + j));
      const bool inside = at < out.rows.capacity - j;
      if (inside) {
        const int32_t draft = q + j == 0 ? -1 : row.offset + q + j - 1;
        const int64_t token = held && !out.tokens.ids_64 ? early.token[j] : load_token(out.tokens, row, i, q + j);
        out.put(at + j, token, position, i, map_slot(out.tokens, i, position), draft);
      }
      if (verified + q < out.rows.capacity - j) out.packed.logits_indices[verified + q + j] = inside ? at + j : 0;
    };
    if constexpr (held) {
      DCUT_UNROLL
      for (int j = 0; j < kPair; ++j) write(j);
    } else {
      DCUT_ROLLED
      for (int j = 0; j < kPair; ++j) write(j);
    }
    if (out.packed.fill_gaps) out.clear(offset, first, lanes.column, 1 << lanes.log_width);
  });
  out.finish(places.all.offset(ties), places.all.index(ties));
  return places.all.offset(ties);
}

}  // namespace dcut::gpu
