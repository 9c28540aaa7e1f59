// One call, as plain pointers and sizes.  All arrays are contiguous; a pointer that may be null says so.
#pragma once

#include <stdint.h>

namespace dcut {

enum class FloatType : int32_t { kFloat32, kFloat16, kBFloat16 };

// What each request brings to the ranking.
struct Rows {
  const int32_t* draft_lens;  // [batch], may be null
  const int32_t* min_keep;    // [batch], may be null
  const int32_t* max_keep;    // [batch], may be null
  const float* weight;        // [batch], may be null
  const int32_t* row_index;   // [batch], may be null
  const int32_t* base_lens;   // [batch], may be null
  const int32_t* num_reqs;    // [1], may be null
  int32_t batch;
  int32_t slots;
  int32_t draft_len;
  int32_t capacity;
};

// Where the scores come from: confidences, or prefix sums that are already there.
struct Scores {
  const void* confidence;      // [slots, draft_len] of `type`, may be null
  const int32_t* prefix;       // [batch, draft_len], may be null
  const int32_t* calibration;  // [draft_len, 65], may be null
  FloatType type;
  bool log;
  bool shifted;
};

struct Tables {
  const int32_t* budgets;   // [rows, buckets]
  const float* costs;       // [rows, buckets], may be null
  const int32_t* budget;    // [1], may be null: replaces the choice
  const int32_t* envelope;  // [rows, buckets, 2]: height and slope; null: argmax, else early stop
  int32_t budget_rows;
  int32_t cost_rows;
  int32_t envelope_rows;
  int32_t buckets;
  bool count_bonus;
};

struct Tokens {
  const void* draft_ids;       // [slots, draft_len], int32 or int64
  const void* bonus_ids;       // [batch], as draft_ids
  const void* seq_lens;        // [batch], int32 or int64
  const int32_t* block_table;  // [batch, max_blocks], may be null
  int64_t pad_token;
  int32_t max_blocks;
  int32_t block_size;
  bool ids_64;
  bool seq_lens_64;
};

struct Packed {
  int32_t* keep_lens;       // [batch]
  int32_t* cu_seqlens;      // [batch + 1]
  int32_t* kv_lens;         // [batch]
  void* token_ids;          // [capacity], as draft_ids
  int64_t* positions;       // [capacity]
  int32_t* request_ids;     // [capacity]
  int64_t* slot_mapping;    // [capacity]
  int32_t* draft_index;     // [capacity]
  int32_t* logits_indices;  // [capacity]
  bool fill_gaps;           // write the tail values over earlier base tokens: the buffers are new
};

struct Decision {
  int32_t* decision;     // [4]: bucket, clamped budget, total, padded total
  int64_t* gains;        // [buckets]
  int32_t* next_budget;  // [2]: budget that was chosen, and a count of the steps; may be null
  int64_t* host_budget;  // [1]: the same in one word, the count above; may be null, as it is if next_budget is
};

}  // namespace dcut
