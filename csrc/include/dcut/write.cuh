// What one verified position brings to the packed batch, and the writing of it.
#pragma once

#include "rows.cuh"

namespace dcut::gpu {

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
    DCUT_ROLLED
    for (int32_t bit = 1 << 30; bit > 0; bit >>= 1) {
      if ((int64_t{block} + bit) * size <= position) block += bit;
    }
  }
  const int32_t id = __ldg(t.block_table + static_cast<int64_t>(row) * t.max_blocks + block);
  return id < 0 ? -1 : id * size + (position - block * size);
}

// The token at position p of a row.
__device__ inline int64_t load_token(const Tokens& t, const Row& row, int32_t i, int32_t p) {
  return p == 0 ? load_id(t.bonus_ids, i, t.ids_64) : load_id(t.draft_ids, int64_t{row.offset} + p - 1, t.ids_64);
}

// What is read of a pair of positions before the decision, so that its latency is hidden behind it.
struct Early {
  int64_t seq_len;
  int32_t token[kPair];  // if they are int32: registers are scarce

  __device__ void load(const Tokens& t, const Row& row, int32_t i, int32_t position, int32_t last) {
    seq_len = load_id(t.seq_lens, i, t.seq_lens_64);
    if (t.ids_64) return;
    DCUT_UNROLL
    for (int j = 0; j < kPair; ++j) {
      if (position + j <= last) token[j] = static_cast<int32_t>(load_token(t, row, i, position + j));
    }
  }
};

struct Writer {
  const Rows& rows;
  const Tokens& tokens;
  const Packed& packed;

  // One entry; `at` is inside the buffers.
  __device__ void put(int32_t at, int64_t token, int64_t position, int32_t i, int64_t slot, int32_t draft_index) const {
    if (tokens.ids_64) {
      static_cast<int64_t*>(packed.token_ids)[at] = token;
    } else {
      static_cast<int32_t*>(packed.token_ids)[at] = static_cast<int32_t>(token);
    }
    packed.positions[at] = position;
    packed.request_ids[at] = i;
    packed.slot_mapping[at] = slot;
    packed.draft_index[at] = draft_index;
  }

  __device__ void clear(int32_t from, int32_t to, int32_t thread, int32_t threads) const {
    DCUT_ROLLED
    for (int64_t at = int64_t{from} + thread; at < to && at < rows.capacity; at += threads) {
      put(static_cast<int32_t>(at), tokens.pad_token, 0, -1, -1, -1);
    }
  }

  __device__ void row_lens(int32_t i, int32_t kept, int64_t seq_len, int32_t end) const {
    packed.keep_lens[i] = kept;
    packed.kv_lens[i] = static_cast<int32_t>(static_cast<uint32_t>(seq_len) + static_cast<uint32_t>(kept) + 1u);
    packed.cu_seqlens[i + 1] = end;
  }

  // The padding rows, the tails, and the first offset: by all threads of all blocks.
  __device__ void finish(int32_t total, int32_t verified) const {
    const int32_t threads = static_cast<int32_t>(gridDim.x * blockDim.x);
    const int32_t thread = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
    if (thread == 0) packed.cu_seqlens[0] = 0;
    DCUT_ROLLED
    for (int32_t i = active_rows(rows) + thread; i < rows.batch; i += threads) {
      packed.keep_lens[i] = 0, packed.kv_lens[i] = 0, packed.cu_seqlens[i + 1] = total;
    }
    clear(total, rows.capacity, thread, threads);
    DCUT_ROLLED
    for (int64_t v = int64_t{verified} + thread; v < rows.capacity; v += threads) packed.logits_indices[v] = 0;
  }
};

}  // namespace dcut::gpu
