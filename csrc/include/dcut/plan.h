// The launch shape.  One block decides and packs; from sm_90 on, a cluster of blocks shares the rows of a large batch.
#pragma once

#include "order.h"
#include "params.h"

namespace dcut::gpu {

constexpr int32_t kMaxBatch = 4096;      // requests of one launch
constexpr int32_t kMaxDrafts = 1 << 16;  // batch * draft_len of one launch
constexpr int32_t kMaxThreads = 1024;
constexpr int32_t kMaxCluster = 8;
constexpr uint32_t kPlainShared = 48 * 1024;  // what a block gets without asking

constexpr int32_t kPair = 2;  // neighboring positions of a row that one lane works on

// Where ranks stay between the stages: in registers, a pair a thread; in shared memory; nowhere.
enum class Storage : int32_t { kHeld, kShared, kReread };

// A row lies on 2^log_width lanes.  A warp walks through consecutive rows in `turns`.
struct Plan {
  Storage storage;
  int32_t blocks, threads;
  int32_t targets;  // budgets that are searched at once
  uint32_t shared_bytes;
  int32_t log_width, turns;
};

// What a device offers.
struct Limits {
  uint32_t shared_bytes;  // that a block can ask for
  int32_t cluster;        // blocks; 1 before sm_90
};

// Ranks are searched in digits of 9 bits.  Counts of a digit lie in 32 runs, one per lane, with a gap after each: no
// two lanes meet in a bank.
constexpr int32_t kDigitBits = 9, kRun = 1 << (kDigitBits - 5), kDigitSize = 32 * (kRun + 1);
constexpr int32_t kPartialSize = 33;  // of a budget, by warp, with a gap

// One budget in search of its threshold.
struct Target {
  uint32_t at;         // leading bits of the threshold found so far
  uint32_t need;       // drafts to keep among those that share these bits
  uint32_t threshold;  // ranks below are kept,
  uint32_t ties;       // and the first rows of those equal to it
};

struct Choice {
  double utility;
  uint32_t threshold, ties;
  int32_t bucket, total, padded;
  int32_t next;  // raw budget of the best bucket, whether or not a budget is given
};

// Sums over all rows, next to the counts of the leading digit.
struct Tally {
  uint32_t first[kDigitSize];
  uint32_t base_low, base_high, floors, candidates;  // base in 16-bit halves
};

struct Fixed {
  uint64_t exp2_t[8];  // copies of the tables in order.h
  Tally tally;         // of this block
  Choice choice;
  uint32_t exp2_s[8];
  int64_t gain[32];                  // by warp: scores of what every budget keeps
  uint32_t verified[32], extra[32];  // by warp
};

// Byte offsets into the shared memory of a block, all multiples of 16.
struct Shared {
  uint32_t budgets, costs, partial, gains, target, counts, sums, all, keys, end;
};

DCUT_HD uint32_t round_16(uint32_t bytes) { return (bytes + 15) / 16 * 16; }

// `blocks` > 1: counts of two levels, so that others can still read the last one, and the sums over the cluster.
DCUT_HD Shared shared_layout(int32_t targets, int32_t buckets, int32_t keys, int32_t blocks) {
  const uint32_t n = static_cast<uint32_t>(targets), r = static_cast<uint32_t>(buckets), counts = n * kDigitSize * 4;
  Shared s = {};
  s.budgets = round_16(static_cast<uint32_t>(sizeof(Fixed)));
  s.costs = s.budgets + round_16(r * 4);
  s.partial = s.costs + round_16(r * 4);
  s.gains = s.partial + round_16(n * kPartialSize * 8);
  s.target = s.gains + round_16(n * 8);
  s.counts = s.target + n * static_cast<uint32_t>(sizeof(Target));
  s.sums = s.counts + (blocks > 1 ? 2 * counts : 0);
  s.all = s.sums + counts;
  s.keys = s.all + (blocks > 1 ? round_16(static_cast<uint32_t>(sizeof(Tally))) : 0);
  s.end = s.keys + round_16(static_cast<uint32_t>(keys) * 4);
  return s;
}

// As many budgets at once as fit beside the keys in what a block gets without asking, 4 at least.  Devices with
// clusters have far more.
DCUT_HD int32_t fitting_targets(int32_t buckets, int32_t keys, int32_t blocks) {
  int32_t targets = clamp(buckets + 1, 1, 16);
  while (blocks == 1 && targets > 4 && shared_layout(targets, buckets, keys, 1).end > kPlainShared) --targets;
  return targets;
}

// Lanes for D + 1 positions, the bonus token first.
DCUT_HD int32_t log2_width(int32_t draft_len) {
  int32_t log = 0;
  while (kPair << log <= draft_len) ++log;
  return log;
}

// Threads and turns for all rows on a number of blocks; at least `warps`, so that each searches a budget or two.
DCUT_HD Plan make_shape(int32_t batch, int32_t draft_len, int32_t blocks, int32_t warps) {
  Plan plan = {};
  plan.blocks = blocks;
  plan.log_width = log2_width(draft_len);
  const int32_t lanes = ((batch << plan.log_width) + blocks - 1) / blocks;
  plan.threads = clamp((lanes + 31) / 32 * 32, warps * 32, kMaxThreads);
  const int32_t rows_a_turn = (plan.threads >> plan.log_width) * blocks;
  plan.turns = (batch + rows_a_turn - 1) / rows_a_turn;
  return plan;
}

// Of select_and_pack.
DCUT_HD Plan make_plan(int32_t batch, int32_t draft_len, int32_t buckets, Limits limits) {
  const int32_t warps = clamp(buckets + 1, 2, 8);  // and no fewer threads than buckets
  Plan plan = make_shape(batch, draft_len, 1, warps);
  plan.storage = plan.turns <= 1 ? Storage::kHeld : Storage::kShared;
  int32_t keys = 0;
  if (plan.storage == Storage::kShared) {
    int32_t blocks = 1;
    while (blocks < limits.cluster && blocks * 512 < batch << plan.log_width) blocks *= 2;
    plan = make_shape(batch, draft_len, blocks, warps);
    plan.storage = Storage::kShared;
    const int32_t rows = (plan.threads >> plan.log_width) * plan.turns;
    keys = (rows < batch ? rows : batch) * draft_len;
  }
  plan.targets = fitting_targets(buckets, keys, plan.blocks);
  plan.shared_bytes = shared_layout(plan.targets, buckets, keys, plan.blocks).end;
  if (plan.shared_bytes <= limits.shared_bytes) return plan;
  plan = make_shape(batch, draft_len, 1, warps);
  plan.storage = Storage::kReread;
  plan.targets = fitting_targets(buckets, 0, 1);
  plan.shared_bytes = shared_layout(plan.targets, buckets, 0, 1).end;
  return plan;
}

// Of segmented_topk and bucket_argmax.
DCUT_HD Plan make_part_plan(int32_t batch, int32_t draft_len, int32_t buckets) {
  return make_plan(batch, draft_len, buckets, {0, 1});
}

DCUT_HD Plan make_prefix_plan(int32_t batch, int32_t draft_len) {
  const int32_t blocks = clamp((batch << log2_width(draft_len)) / 128, 1, 128);
  return make_shape(batch, draft_len, blocks, 1);
}

DCUT_HD Plan make_pack_plan(int32_t batch, int32_t draft_len) {
  Plan plan = make_shape(batch, draft_len, 1, 1);
  plan.shared_bytes = static_cast<uint32_t>(sizeof(Fixed));
  return plan;
}

}  // namespace dcut::gpu
