// The entry points of the CPU kernel.  Nothing here checks its arguments: the binding has done so.
#pragma once

#include "dcut/params.h"

namespace dcut::cpu {

enum class Statistic : int32_t { kLogProb, kMaxProb, kCollision, kMargin };

struct Logits {
  const void* logits;           // [rows, vocab] of `type`
  const float* temperature;     // [draft_len], may be null
  const int64_t* given;         // [rows] tokens, may be null: the most likely ones
  const Statistic* statistics;  // [count]
  int64_t* draft_ids;           // [rows]
  float* values;                // [count, rows]
  int64_t rows;                 // batch * draft_len
  int64_t draft_len, vocab, count;
  FloatType type;
};

void select_and_pack(const Rows& rows, const Scores& scores, const Tables& tables, const Tokens& tokens,
                     const Packed& packed, const Decision& decision);
void log_prefix_sum(const Rows& rows, const Scores& scores, int32_t* prefix);                      // [batch, draft_len]
void segmented_topk(const Rows& rows, const Scores& scores, const Tables& tables, int32_t* keep);  // [buckets, batch]
void bucket_argmax(const Rows& rows, const Scores& scores, const Tables& tables, const Decision& decision);
void pack_prefixes(const Rows& rows, const int32_t* keep_lens, const Tokens& tokens, const Packed& packed,
                   const Decision& decision);
void draft_confidence(const Logits& logits, int64_t first, int64_t end);  // rows [first, end)

}  // namespace dcut::cpu
