// The kernels of the parts: one block each, but for log_prefix_sum; nothing is kept between the stages.
#pragma once

#include "decide.cuh"
#include "pack.cuh"

namespace dcut::gpu {

__global__ void __launch_bounds__(kMaxThreads, 1)
    bucket_argmax(Rows rows, Scores scores, Tables tables, Decision decision, Plan plan) {
  DCUT_SHARED(memory);
  const Group group = {0, 1};
  const Block block(memory, plan, group, tables.buckets);
  const Lanes lanes(plan, 0);
  Ranks<Storage::kReread> ranks(rows, scores, lanes, nullptr);
  decide(ranks, block, group, tables, decision);
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    segmented_topk(Rows rows, Scores scores, Tables tables, int32_t* keep, Plan plan) {  // keep: [buckets, batch]
  DCUT_SHARED(memory);
  const Group group = {0, 1};
  const Block block(memory, plan, group, tables.buckets);
  const Lanes lanes(plan, 0);
  Ranks<Storage::kReread> ranks(rows, scores, lanes, nullptr);
  prepare(ranks, block, group, tables);
  const Totals totals(block.all, rows.capacity);
  select_all(ranks, block, group, tables, Queue(tables), totals, tables.buckets - 1, [&](int32_t first, int32_t n) {
    for (int32_t t = 0; t < n; ++t) {
      const Target target = block.targets[t];
      int32_t* to = keep + static_cast<int64_t>(first + t) * rows.batch;
      Place mine = {0, 0};
      walk_depths(ranks, target.threshold, [&](int32_t, const Row& row, const Depth& depth) {
        if (lanes.column == 0) mine.add(verified_of(row, depth), 0);
      });
      Places places(mine, group, block.fixed, false);
      walk_depths(ranks, target.threshold, [&](int32_t turn, const Row& row, const Depth& depth) {
        const Place here = advance(places.here, verified_of(row, depth), 0, lanes, false);
        const int32_t i = lanes.row(turn), kept = depth.kept + (depth.tie && here.ties() < target.ties);
        if (lanes.column == 0 && i < rows.batch) to[i] = kept;
      });
      __syncthreads();
    }
  });
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    log_prefix_sum(Rows rows, Scores scores, int32_t* prefix, Plan plan) {  // [batch, draft_len]
  const Lanes lanes(plan, blockIdx.x);
  Ranks<Storage::kReread> ranks(rows, scores, lanes, nullptr);
  ranks.walk([&](int32_t turn) {
    const Row row = ranks.row(turn);
    const auto exists = [&](int j) { return lanes.position() + j > 0 && lanes.position() + j <= row.drafts; };
    const Pair pair = prefix_sums(load_q(scores, row.offset, lanes.position() - 1, exists), scores, lanes);
    int32_t* to = prefix + static_cast<int64_t>(lanes.row(turn)) * rows.draft_len + lanes.position() - 1;
    DCUT_UNROLL
    for (int j = 0; j < kPair; ++j) {
      if (ranks.has_place(turn, j)) to[j] = row.drafts > 0 ? static_cast<int32_t>(pair.v[j]) : -1;
    }
  });
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    pack_prefixes(Rows rows, const int32_t* keep_lens, Tokens tokens, Packed packed, Decision decision, Plan plan) {
  DCUT_SHARED(memory);
  Fixed& fixed = *reinterpret_cast<Fixed*>(memory);
  const Lanes lanes(plan, 0);
  const int32_t active = active_rows(rows);
  const auto walk = [&](auto visit) {
    for (int32_t turn = 0; turn < lanes.turns; ++turn) {
      const Row row = load_row(rows, nullptr, lanes.row(turn), active);
      const int32_t kept = row.base > 0 ? clamp(__ldg(keep_lens + lanes.row(turn)), 0, row.drafts) : 0;
      visit(turn, row, Depth{kept, false});
    }
  };
  const Writer writer = {rows, tokens, packed};
  const int32_t total = pack<Storage::kReread>(writer, lanes, {0, 1}, 0, fixed, Early{}, walk);
  if (threadIdx.x < 4) decision.decision[threadIdx.x] = threadIdx.x == 0 ? -1 : total;
}

}  // namespace dcut::gpu
