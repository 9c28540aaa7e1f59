// The launch shape: one block decides; where packing is the larger part, more blocks repeat the decision and pack a
// share of the rows each.
#pragma once

#include "order.h"
#include "params.h"

namespace dcut::gpu {

constexpr int32_t kMaxBatch = 4096;        // requests of one launch
constexpr int32_t kMaxDrafts = 1 << 16;    // batch * draft_len of one launch
constexpr int32_t kMaxThreads = 1024;
constexpr int32_t kHeldTurns = 2;          // turns whose keys a thread can hold in registers
constexpr int32_t kFirstBits = 10;         // leading key bits that are counted first, by all budgets together
constexpr int32_t kDigitBits = 8;          // and then per budget
constexpr uint32_t kPlainShared = 48 * 1024;  // what a block gets without asking

enum class Storage : int32_t { kHeld, kShared, kReread };  // where keys stay between the stages

struct Plan {
  Storage storage;
  int32_t blocks, threads;
  int32_t targets;        // budgets that are searched at once
  uint32_t shared_bytes;
};

// Lanes of a row: the power of two that holds D + 1 positions, 32 at most.
DCUT_HD int32_t log2_lanes(int32_t draft_len) {
  int32_t log = 0;
  while (log < 5 && (1 << log) <= draft_len) ++log;
  return log;
}

// Counts of digits lie in 32 runs, one per lane, with a gap after each: no two lanes meet in a bank.
constexpr int32_t kFirstRun = 1 << (kFirstBits - 5), kDigitRun = 1 << (kDigitBits - 5);
constexpr int32_t kFirstSize = 32 * (kFirstRun + 1), kDigitSize = 32 * (kDigitRun + 1);

// What the budgets of one search share.
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
};

struct Fixed {
  uint64_t exp2_t[8];  // copies of the tables in order.h
  uint32_t exp2_s[8];
  uint32_t first[kFirstSize];
  int32_t budgets[kMaxBuckets];
  float costs[kMaxBuckets];
  uint32_t base_low, base_high, floors, candidates;  // sums over rows; base in 16-bit halves
  Choice choice;
  uint32_t verified[32], extra[32];  // by warp
};

// Byte offsets into the shared memory of a block.
struct Shared {
  uint32_t counts, partial, gains, target, keys, end;
};

DCUT_HD Shared shared_layout(int32_t targets, int32_t keys) {
  Shared s = {};
  s.partial = (static_cast<uint32_t>(sizeof(Fixed)) + 15) / 16 * 16;
  s.gains = s.partial + static_cast<uint32_t>(targets) * 32 * 8;
  s.target = s.gains + static_cast<uint32_t>(targets) * 8;
  s.counts = s.target + static_cast<uint32_t>(targets) * static_cast<uint32_t>(sizeof(Target));
  s.keys = (s.counts + static_cast<uint32_t>(targets) * kDigitSize * 4 + 15) / 16 * 16;
  s.end = s.keys + (static_cast<uint32_t>(keys) * 4 + 15) / 16 * 16;
  return s;
}

// As many budgets at once as fit beside the keys in what a block gets without asking, 6 at least.
DCUT_HD int32_t fitting_targets(int32_t buckets, int32_t keys) {
  const uint32_t one = shared_layout(1, 0).end - shared_layout(0, 0).end, fixed = shared_layout(0, keys).end + 32;
  const int32_t room = fixed < kPlainShared ? static_cast<int32_t>((kPlainShared - fixed) / one) : 0;
  return clamp(buckets + 1, 1, clamp(room, 6, 24));
}

// Threads for all rows, and the blocks among which packing is split.
DCUT_HD Plan make_shape(int32_t batch, int32_t draft_len) {
  Plan plan = {};
  const int32_t lanes = batch << log2_lanes(draft_len);
  plan.threads = clamp((lanes + 31) / 32 * 32, 64, kMaxThreads);
  plan.blocks = clamp(batch * (draft_len + 1) / 2048, 1, 16);
  return plan;
}

// Of select_and_pack; `shared_limit`: bytes of shared memory that a block of the device can ask for.
DCUT_HD Plan make_plan(int32_t batch, int32_t draft_len, int32_t buckets, uint32_t shared_limit) {
  Plan plan = make_shape(batch, draft_len);
  const int32_t rows_a_turn = plan.threads >> log2_lanes(draft_len);
  const bool held = draft_len > 0 && draft_len < 32 && batch <= kHeldTurns * rows_a_turn;
  const int32_t keys = held ? 0 : batch * draft_len;
  plan.storage = held ? Storage::kHeld : Storage::kShared;
  plan.targets = fitting_targets(buckets, keys);
  plan.shared_bytes = shared_layout(plan.targets, keys).end;
  if (plan.shared_bytes > shared_limit) {
    plan.storage = Storage::kReread;
    plan.targets = fitting_targets(buckets, 0);
    plan.shared_bytes = shared_layout(plan.targets, 0).end;
  }
  return plan;
}

// Of segmented_topk and bucket_argmax.
DCUT_HD Plan make_part_plan(int32_t batch, int32_t draft_len, int32_t buckets) {
  Plan plan = make_plan(batch, draft_len, buckets, 0);
  plan.blocks = 1;
  return plan;
}

DCUT_HD Plan make_prefix_plan(int32_t batch, int32_t draft_len) {
  Plan plan = make_shape(batch, draft_len);
  plan.threads = 128;
  plan.blocks = ((batch << log2_lanes(draft_len)) + plan.threads - 1) / plan.threads;
  if (plan.blocks == 0) plan.blocks = 1;
  return plan;
}

DCUT_HD Plan make_pack_plan(int32_t batch, int32_t draft_len) {
  Plan plan = make_shape(batch, draft_len);
  plan.shared_bytes = static_cast<uint32_t>(sizeof(Fixed));
  return plan;
}

}  // namespace dcut::gpu
