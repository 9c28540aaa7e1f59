// What each request brings, and its lanes.
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
  if (prefix && __ldg(prefix + row.offset) < 0) row.drafts = 0;
  if (rows.min_keep) row.floor = clamp(__ldg(rows.min_keep + i), 0, row.drafts);
  row.base = rows.base_lens ? max(__ldg(rows.base_lens + i), 1) : 1;
  if (rows.weight) row.w = w_of_weight(__float_as_int(__ldg(rows.weight + i)));
  return row;
}

}  // namespace dcut::gpu
