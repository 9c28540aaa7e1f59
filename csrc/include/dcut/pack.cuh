// Packing: every position finds its place from a scan over rows and is written by the lane that holds it.
#pragma once

#include "select.cuh"

namespace dcut::gpu {

constexpr int32_t kVerifiedBits = 18;  // a sum over rows holds verified tokens below and ties above

// What one verified position brings to the batch.
struct Entry {
  int64_t token, position, slot;
};

__device__ inline int64_t load_id(const void* ids, int64_t at, bool is_64) {
  return is_64 ? static_cast<int64_t>(__ldg(static_cast<const long long*>(ids) + at))
               : static_cast<int64_t>(__ldg(static_cast<const int32_t*>(ids) + at));
}

// KV-cache slot of a position, -1 outside the block table.
__device__ inline int64_t map_slot(const Tokens& t, int32_t row, int64_t position) {
  const int64_t size = t.block_size;
  if (!t.block_table || position < 0 || position >= t.max_blocks * size) return -1;
  int32_t block = static_cast<int32_t>(position) / t.block_size;
  if (position > kInt32Max) {
    block = 0;  // bit by bit: a 64-bit division costs registers everywhere for what hardly happens
    for (int32_t bit = 1 << 30; bit > 0; bit >>= 1) {
      if ((int64_t{block} + bit) * size <= position) block += bit;
    }
  }
  const int32_t id = __ldg(t.block_table + static_cast<int64_t>(row) * t.max_blocks + block);
  return id < 0 ? -1 : id * size + (position - block * size);
}

__device__ inline int64_t load_seq_len(const Tokens& t, int32_t i) { return load_id(t.seq_lens, i, t.seq_lens_64); }

__device__ inline Entry load_entry(const Tokens& t, const Row& row, int32_t i, int32_t p) {
  Entry e;
  e.token = p == 0 ? load_id(t.bonus_ids, i, t.ids_64) : load_id(t.draft_ids, int64_t{row.offset} + p - 1, t.ids_64);
  e.position = static_cast<int64_t>(static_cast<uint64_t>(load_seq_len(t, i)) + static_cast<uint64_t>(p));
  e.slot = map_slot(t, i, e.position);
  return e;
}

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

struct Writer {
  const Rows& rows;
  const Tokens& tokens;
  const Packed& packed;

  __device__ void put_token(int32_t at, int64_t token) const {
    if (tokens.ids_64) {
      static_cast<int64_t*>(packed.token_ids)[at] = token;
    } else {
      static_cast<int32_t*>(packed.token_ids)[at] = static_cast<int32_t>(token);
    }
  }

  __device__ void put(int32_t at, int32_t i, const Entry& e, int32_t draft_index) const {
    if (at >= rows.capacity) return;
    put_token(at, e.token);
    packed.positions[at] = e.position;
    packed.request_ids[at] = i;
    packed.slot_mapping[at] = e.slot;
    packed.draft_index[at] = draft_index;
  }

  __device__ void clear(int32_t from, int32_t to, int32_t thread, int32_t threads) const {
    for (int64_t at = int64_t{from} + thread; at < to && at < rows.capacity; at += threads) {
      put(static_cast<int32_t>(at), -1, {tokens.pad_token, 0, -1}, -1);
    }
  }

  __device__ void row_lens(int32_t i, int32_t kept, int64_t seq_len, int32_t end) const {
    packed.keep_lens[i] = kept;
    packed.kv_lens[i] = static_cast<int32_t>(static_cast<uint32_t>(seq_len) + static_cast<uint32_t>(kept) + 1u);
    packed.cu_seqlens[i + 1] = end;
  }

  // The padding rows, the tails, and the first offset: shared by all threads of all blocks.
  __device__ void finish(int32_t active, int32_t total, int32_t verified) const {
    const int32_t threads = static_cast<int32_t>(gridDim.x * blockDim.x);
    const int32_t thread = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
    if (thread == 0) packed.cu_seqlens[0] = 0;
    for (int32_t i = active + thread; i < rows.batch; i += threads) {
      packed.keep_lens[i] = 0, packed.kv_lens[i] = 0, packed.cu_seqlens[i + 1] = total;
    }
    clear(total, rows.capacity, thread, threads);
    for (int64_t v = int64_t{verified} + thread; v < rows.capacity; v += threads) packed.logits_indices[v] = 0;
  }
};

// Drafts of this lane's row that lie below the threshold, its floor included, and whether one is equal to it.
struct Depth {
  int32_t kept;
  bool tie;
};

// Walks through the rows of a warp: calls visit(turn, i, row, depth) at the last turn of each group of rows.
template <class RanksT, class Visit>
__device__ inline void walk_depths(RanksT& ranks, uint32_t threshold, Visit visit) {
  int32_t below = 0;
  bool tie = false;
  ranks.walk([&](int32_t turn) {
    const uint32_t rank = ranks.get(turn);
    const uint32_t less = __ballot_sync(kAllLanes, rank < threshold), equal = __ballot_sync(kAllLanes, rank == threshold);
    if (ranks.lanes.position(turn) < 32) below = 0, tie = false;
    below += __popc(ranks.lanes.row_bits(less)), tie |= ranks.lanes.row_bits(equal) != 0;
    if (ranks.lanes.chunks == 2 && (turn & 1) == 0) return;
    const int32_t i = ranks.lanes.row(turn);
    const Row row = load_row(ranks.rows, ranks.scores.prefix, i, ranks.active);
    visit(turn, i, row, Depth{row.floor + below, tie});
  });
}

// Tokens of a row, in the form of Place.
__device__ inline uint32_t verified_of(const Depth& depth, bool active) {
  return active ? static_cast<uint32_t>(depth.kept + 1) | static_cast<uint32_t>(depth.tie) << kVerifiedBits : 0;
}
__device__ inline uint32_t extra_of(const Row& row) { return row.base > 1 ? static_cast<uint32_t>(row.base - 1) : 0; }

// Exclusive sums over the rows that a warp walks through together; afterwards `place` is that of the next group.
__device__ inline Place advance(Place& place, uint32_t verified, uint32_t extra, const Lanes& lanes, bool has_base) {
  Place before = place;
  uint32_t v = verified, e = extra;
  if (lanes.width < 32) {
    for (int o = lanes.width; o < 32; o <<= 1) {
      const uint32_t v_left = __shfl_up_sync(kAllLanes, v, o), e_left = has_base ? __shfl_up_sync(kAllLanes, e, o) : 0;
      if (lane() >= o) v += v_left, e = saturating_add(e, e_left);
    }
    const uint32_t v_left = __shfl_up_sync(kAllLanes, v, lanes.width);
    const uint32_t e_left = has_base ? __shfl_up_sync(kAllLanes, e, lanes.width) : 0;
    if (lane() >= lanes.width) before.add(v_left, e_left);
  }
  place.add(__shfl_sync(kAllLanes, v, 31), has_base ? __shfl_sync(kAllLanes, e, 31) : 0);
  return before;
}

// Packs all rows and returns the total.  walk(visit) must go through the rows as walk_depths does; `ties`: how many of the tied rows keep one
// more draft; `entries`: of this thread's turns, with Storage::kHeld.
template <Storage kStorage, class Walk>
__device__ inline int32_t pack(const Writer& out, const Lanes& lanes, int32_t active, uint32_t ties, Fixed& fixed,
                            const Entry* entries, Walk walk) {
  const bool has_base = out.rows.base_lens != nullptr;
  Place mine = {0, 0};
  walk([&](int32_t, int32_t i, const Row& row, const Depth& depth) {
    if (lanes.column == 0) mine.add(verified_of(depth, i < active), extra_of(row));
  });
  mine = {warp_sum(mine.verified), has_base ? saturating_sum(mine.extra) : 0};
  if (lane() == 0) fixed.verified[warp()] = mine.verified, fixed.extra[warp()] = mine.extra;
  __syncthreads();
  const bool exists = lane() < warps(), earlier = lane() < warp();
  const uint32_t v = exists ? fixed.verified[lane()] : 0, e = exists && has_base ? fixed.extra[lane()] : 0;
  Place place = {warp_sum(earlier ? v : 0), has_base ? saturating_sum(earlier ? e : 0) : 0};
  const Place all = {warp_sum(v), has_base ? saturating_sum(e) : 0};

  walk([&](int32_t turn, int32_t i, const Row& row, const Depth& depth) {
    const Place here = advance(place, verified_of(depth, i < active), extra_of(row), lanes, has_base);
    if (i >= active || (turn >> (lanes.chunks - 1)) % gridDim.x != blockIdx.x) return;
    const int32_t kept = depth.kept + (depth.tie && here.ties() < ties);
    const int32_t offset = here.offset(ties), first = add_tokens(offset, row.base - 1), verified = here.index(ties);
    if (lanes.column == 0) out.row_lens(i, kept, load_seq_len(out.tokens, i), add_tokens(first, kept + 1));
    for (int32_t p = lanes.column; p <= kept; p += 32) {
      const int32_t at = add_tokens(first, p);
      Entry entry;
      if constexpr (kStorage == Storage::kHeld) entry = entries[turn];
      if constexpr (kStorage != Storage::kHeld) entry = load_entry(out.tokens, row, i, p);
      out.put(at, i, entry, p == 0 ? -1 : row.offset + p - 1);
      if (verified + p < out.rows.capacity) out.packed.logits_indices[verified + p] = at < out.rows.capacity ? at : 0;
    }
    if (out.packed.fill_gaps && row.base > 1) out.clear(offset, first, lanes.column, lanes.width);
  });
  out.finish(active, all.offset(ties), all.index(ties));
  return all.offset(ties);
}

}  // namespace dcut::gpu
