// The fused kernel; parts.cuh has the others.
#pragma once

#include "decide.cuh"
#include "pack.cuh"
#include "parts.cuh"

namespace dcut::gpu {

template <Storage kStorage>
__global__ void __launch_bounds__(kMaxThreads, 1)
    select_and_pack(Rows rows, Scores scores, Tables tables, Tokens tokens, Packed packed, Decision decision,
                    Plan plan) {
  DCUT_SHARED(memory);
  const Group group = kStorage == Storage::kShared ? Group{cluster_rank(), cluster_size()} : Group{0, 1};
  const Block block(memory, plan, group, tables.buckets);
  const Lanes lanes(plan, group.rank);
  Ranks<kStorage> ranks(rows, scores, lanes, block.keys);
  Early early = {};
  if constexpr (kStorage == Storage::kHeld) {
    const Row row = ranks.row(0);
    if (row.base > 0) early.load(tokens, row, lanes.row(0), lanes.position(), row.drafts);
  }
  decide(ranks, block, group, tables, decision);
  const Choice& choice = block.fixed.choice;
  pack<kStorage>(Writer{rows, tokens, packed}, lanes, group, choice.ties, block.fixed, early,
                 [&](auto visit) { walk_depths(ranks, choice.threshold, visit); });
  if (group.size > 1) cluster_sync();  // others may still read this block's memory
}

}  // namespace dcut::gpu
