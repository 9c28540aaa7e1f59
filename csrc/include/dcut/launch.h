// The entry points of the CPU kernel.  Nothing here checks its arguments: the binding has done so.
#pragma once

#include "dcut/params.h"

namespace dcut::cpu {

void select_and_pack(const Rows& rows, const Scores& scores, const Tables& tables, const Tokens& tokens,
                     const Packed& packed, const Decision& decision);
void log_prefix_sum(const Rows& rows, const Scores& scores, int32_t* prefix);                      // [batch, draft_len]
void segmented_topk(const Rows& rows, const Scores& scores, const Tables& tables, int32_t* keep);  // [buckets, batch]
void bucket_argmax(const Rows& rows, const Scores& scores, const Tables& tables, const Decision& decision);
void pack_prefixes(const Rows& rows, const int32_t* keep_lens, const Tokens& tokens, const Packed& packed,
                   const Decision& decision);

}  // namespace dcut::cpu
