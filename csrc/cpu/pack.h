// Packing, included once per instruction set so that the compiler vectorises it for each.
#pragma once

#include <string.h>

#include "isa.h"

namespace dcut::cpu {
namespace {

constexpr int32_t kBlock = 8;  // entries written at once; what overruns a row is overwritten by the next one

template <class T>
void fill(T* p, int32_t from, int32_t to, T value) {
  for (int32_t j = from; j < to; ++j) p[j] = value;
}

// KV-cache slots of one row: position // block_size finds the block, advanced without dividing again.
void map_slots(const Tokens& t, int64_t* slots, int32_t row, int64_t position, int32_t first, int32_t last) {
  const int32_t* table = t.block_table + static_cast<int64_t>(row) * t.max_blocks;
  // A wrapped position turns negative in mid-row: nothing there has a slot.
  int64_t block = position < 0 ? 0 : position / t.block_size;
  int64_t within = position < 0 ? 0 : position % t.block_size;
  for (int32_t j = first; j < last; ++j) {
    const int64_t p = static_cast<int64_t>(static_cast<uint64_t>(position) + static_cast<uint64_t>(j - first));
    if (p < 0) continue;
    if (block < t.max_blocks && table[block] >= 0) {
      slots[j] = static_cast<int64_t>(table[block]) * t.block_size + within;
    }
    if (++within == t.block_size) {
      within = 0;
      ++block;
    }
  }
}

template <class Id>
struct Packer {
  const Pack& in;
  const Rows& rows = *in.rows;
  const Tokens& t = *in.tokens;
  const Packed& out = *in.packed;
  Id* ids = static_cast<Id*>(out.token_ids);
  const Id* drafts = static_cast<const Id*>(t.draft_ids);
  const Id* bonus = static_cast<const Id*>(t.bonus_ids);
  const int32_t capacity = rows.capacity;

  void clear(int32_t from, int32_t to) const {
    fill(ids, from, to, static_cast<Id>(t.pad_token));
    fill(out.positions, from, to, int64_t{0});
    fill(out.request_ids, from, to, int32_t{-1});
    fill(out.slot_mapping, from, to, int64_t{-1});
    fill(out.draft_index, from, to, int32_t{-1});
  }

  // Row i at [first, first + count): the bonus token and its kept drafts.
  void exact(int32_t i, int32_t slot, int64_t position, int32_t first, int32_t count) const {
    const int32_t base = count > 1 ? slot * rows.draft_len - 1 : 0;  // a row without a slot has its bonus only
    for (int32_t k = 0; k < count; ++k) {
      ids[first + k] = k == 0 ? bonus[i] : drafts[base + k];
      out.positions[first + k] = static_cast<int64_t>(static_cast<uint64_t>(position) + static_cast<uint64_t>(k));
      out.request_ids[first + k] = i;
      out.draft_index[first + k] = k == 0 ? -1 : base + k;
    }
  }

  // The same in whole blocks; the caller has made sure that reads and writes stay inside the buffers.
  void wide(int32_t i, int32_t slot, int64_t position, int32_t first, int32_t count) const {
    const int32_t base = slot * rows.draft_len;
    for (int32_t c = 0; c < count; c += kBlock) {
      Id* to = ids + first + 1 + c;
      int64_t* positions = out.positions + first + c;
      int32_t *requests = out.request_ids + first + c, *index = out.draft_index + first + c;
      memcpy(to, drafts + base + c, kBlock * sizeof(Id));
      const uint64_t p = static_cast<uint64_t>(position) + static_cast<uint64_t>(c);
      for (int32_t j = 0; j < kBlock; ++j) positions[j] = static_cast<int64_t>(p + static_cast<uint64_t>(j));
      for (int32_t j = 0; j < kBlock; ++j) requests[j] = i;
      for (int32_t j = 0; j < kBlock; ++j) index[j] = base - 1 + c + j;
    }
    ids[first] = bonus[i];
    out.draft_index[first] = -1;
  }

  int32_t run() const {
    const bool plain = rows.base_lens == nullptr;
    const int64_t readable = static_cast<int64_t>(rows.slots) * rows.draft_len;
    int32_t offset = 0, verified = 0;
    out.cu_seqlens[0] = 0;
    for (int32_t i = 0; i < in.active; ++i) {
      const int32_t kept = in.keep[i], slot = rows.row_index ? rows.row_index[i] : i;
      const int32_t base = plain || rows.base_lens[i] < 1 ? 1 : rows.base_lens[i];
      const int64_t position =
          t.seq_lens_64 ? static_cast<const int64_t*>(t.seq_lens)[i] : static_cast<const int32_t*>(t.seq_lens)[i];
      out.keep_lens[i] = kept;
      out.kv_lens[i] = static_cast<int32_t>(static_cast<uint32_t>(position) + static_cast<uint32_t>(kept) + 1u);
      const int32_t first = add_tokens(offset, base - 1);
      const int32_t padded = (kept + kBlock) / kBlock * kBlock;
      const bool roomy = int64_t{first} + padded + 1 <= capacity;
      if (plain && roomy && kept > 0 && int64_t{slot} * rows.draft_len + padded <= readable) {
        wide(i, slot, position, first, kept + 1);
      } else if (first < capacity) {
        exact(i, slot, position, first, kept < capacity - first ? kept + 1 : capacity - first);
      }
      if (!plain || t.block_table) map_row(i, position, first, kept);
      if (!plain) verified = index_row(first, kept, verified);
      if (!plain && out.fill_gaps) clear(offset < capacity ? offset : capacity, first < capacity ? first : capacity);
      offset = add_tokens(first, kept + 1);
      out.cu_seqlens[i + 1] = offset;
    }
    fill(out.keep_lens, in.active, rows.batch, int32_t{0});
    fill(out.kv_lens, in.active, rows.batch, int32_t{0});
    fill(out.cu_seqlens, in.active + 1, rows.batch + 1, offset);
    finish(plain, offset, verified);
    return offset;
  }

  void map_row(int32_t i, int64_t position, int32_t first, int32_t kept) const {
    if (first >= capacity) return;
    const int32_t last = kept < capacity - first ? first + kept + 1 : capacity;
    fill(out.slot_mapping, first, last, int64_t{-1});
    if (t.block_table) map_slots(t, out.slot_mapping, i, position, first, last);
  }

  int32_t index_row(int32_t first, int32_t kept, int32_t verified) const {
    for (int32_t k = 0; k <= kept && verified < capacity; ++k, ++verified) {
      const int32_t at = add_tokens(first, k);
      out.logits_indices[verified] = at < capacity ? at : 0;
    }
    return verified;
  }

  void finish(bool plain, int32_t total, int32_t verified) const {
    const int32_t end = total < capacity ? total : capacity;
    if (plain) {
      for (int32_t j = 0; j < end; ++j) out.logits_indices[j] = j;
      verified = end;
    }
    if (t.block_table == nullptr && plain) fill(out.slot_mapping, 0, end, int64_t{-1});
    fill(out.logits_indices, verified, capacity, int32_t{0});
    clear(end, capacity);
  }
};

int32_t pack(const Pack& in) { return in.tokens->ids_64 ? Packer<int64_t>{in}.run() : Packer<int32_t>{in}.run(); }

}  // namespace
}  // namespace dcut::cpu
