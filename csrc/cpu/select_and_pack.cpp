// The operators, put together from the stages.
#include <algorithm>

#include "dcut/launch.h"
#include "step.h"

namespace dcut::cpu {
namespace {

// Row clamp(active, 1, rows) - 1 of a table [rows, buckets].
template <class T>
const T* table_row(const T* table, int32_t rows, int32_t buckets, int32_t active) {
  return table + static_cast<size_t>(dcut::clamp(active, 1, rows) - 1) * static_cast<size_t>(buckets);
}

// The bucket of the largest utility, ties to the smallest; -1 if all are disabled.
template <class Utility>
int argmax(const int32_t* budgets, const float* costs, int32_t buckets, Utility utility_of) {
  int best = -1;
  double best_utility = 0.0;
  for (int r = 0; r < buckets; ++r) {
    if (!enabled(budgets[r], costs[r])) continue;
    const double u = utility_of(r);
    if (best < 0 || u > best_utility) best = r, best_utility = u;
  }
  return best;
}

// The bucket that the policy chooses: eq. 5, or with an envelope early stop.  tokens: clamped budgets.
int choose(Step& step, const Tables& tables, const int32_t* raw, const int32_t* tokens, const int64_t* gains) {
  const int32_t n = tables.buckets;
  const float* costs = table_row(tables.costs, tables.cost_rows, n, step.active());
  if (!tables.envelope) return argmax(raw, costs, n, [&](int r) { return utility(gains[r], costs[r]); });
  int32_t more[kMaxBuckets] = {};
  int64_t gains_of_more[kMaxBuckets] = {};
  Cut cuts[kMaxBuckets];
  for (int r = 0; r < n; ++r) more[r] = tokens[r] < step.highest() ? tokens[r] + 1 : tokens[r];
  step.cut(more, n, cuts, gains_of_more, tables.count_bonus);
  const int32_t* envelope = table_row(tables.envelope, tables.envelope_rows, 2 * n, step.active());
  return argmax(raw, costs, n, [&](int r) {
    const int64_t next = gains_of_more[r] - gains[r];
    const bool stop = raw[r] >= step.lowest() && stops(gains[r], next, envelope[2 * r], envelope[2 * r + 1]);
    return early_utility(stop, raw[r]);
  });
}

// What the next step is to use: the chosen budget and a count of the steps, as one word too.
void write_next(const Decision& out, int32_t budget) {
  if (!out.next_budget) return;
  const uint32_t count = static_cast<uint32_t>(out.next_budget[1]) + 1;
  out.next_budget[0] = budget, out.next_budget[1] = static_cast<int32_t>(count);
  if (out.host_budget) *out.host_budget = budget_word(count, budget);
}

// The padded total of a given budget: the smallest listed budget that holds it.
int32_t padded_total(const int32_t* budgets, int32_t buckets, int32_t total) {
  int32_t padded = kInt32Max;
  bool listed = false;
  for (int r = 0; r < buckets; ++r) {
    if (budgets[r] >= total) padded = std::min(padded, budgets[r]), listed = true;
  }
  return listed ? padded : total;
}

void write_decision(int32_t* decision, int bucket, int32_t total, int32_t padded) {
  decision[0] = bucket, decision[1] = total, decision[2] = total, decision[3] = padded;
}

// Writes decision and gains, and returns the cut of the chosen budget.
Cut decide(Step& step, const Tables& tables, const Decision& out) {
  const int32_t n = tables.buckets;
  const int32_t* raw = table_row(tables.budgets, tables.budget_rows, n, step.active());
  int32_t tokens[kMaxBuckets] = {};
  Cut cuts[kMaxBuckets], cut;
  for (int r = 0; r < n; ++r) tokens[r] = step.clamp(raw[r]);
  step.cut(tokens, n, cuts, out.gains, tables.count_bonus);

  const int chosen = tables.budget && !out.next_budget ? -1 : choose(step, tables, raw, tokens, out.gains);
  const int bucket = tables.budget ? -1 : chosen;
  int32_t total, padded;
  if (bucket >= 0) {
    cut = cuts[bucket], total = tokens[bucket], padded = std::max(total, raw[bucket]);
  } else {
    total = tables.budget ? step.clamp(*tables.budget) : step.highest();
    step.cut(&total, 1, &cut, nullptr, false);
    padded = tables.budget ? padded_total(raw, n, total) : total;
  }
  write_decision(out.decision, bucket, total, padded);
  write_next(out, chosen < 0 ? kInt32Max : raw[chosen]);
  return cut;
}

}  // namespace

void select_and_pack(const Rows& rows, const Scores& scores, const Tables& tables, const Tokens& tokens,
                     const Packed& packed, const Decision& decision) {
  Step step(rows, scores);
  const Cut cut = decide(step, tables, decision);
  isa().pack({&rows, step.depths(cut), &tokens, &packed, step.active()});
}

void log_prefix_sum(const Rows& rows, const Scores& scores, int32_t* prefix) {
  const Step step(rows, scores, true);
  for (int32_t i = 0; i < rows.batch; ++i) {
    for (int32_t k = 0; k < rows.draft_len; ++k) *prefix++ = static_cast<int32_t>(step.key(i, k));
  }
}

void segmented_topk(const Rows& rows, const Scores& scores, const Tables& tables, int32_t* keep) {
  Step step(rows, scores);
  const int32_t n = tables.buckets;
  const int32_t* raw = table_row(tables.budgets, tables.budget_rows, n, step.active());
  int32_t tokens[kMaxBuckets] = {};
  Cut cuts[kMaxBuckets];
  for (int r = 0; r < n; ++r) tokens[r] = step.clamp(raw[r]);
  step.cut(tokens, n, cuts, nullptr, false);
  for (int r = 0; r < n; ++r) {
    int32_t* row = keep + static_cast<size_t>(r) * static_cast<size_t>(rows.batch);
    const int32_t* depths = step.depths(cuts[r]);
    std::fill(std::copy(depths, depths + step.active(), row), row + rows.batch, 0);
  }
}

void bucket_argmax(const Rows& rows, const Scores& scores, const Tables& tables, const Decision& decision) {
  Step step(rows, scores);
  decide(step, tables, decision);
}

void pack_prefixes(const Rows& rows, const int32_t* keep_lens, const Tokens& tokens, const Packed& packed,
                   const Decision& decision) {
  const int32_t active = rows.num_reqs ? dcut::clamp(*rows.num_reqs, 0, rows.batch) : rows.batch;
  static thread_local Buffer<int32_t> buffer;
  int32_t* keep = buffer.get(static_cast<size_t>(active) + 1);
  for (int32_t i = 0; i < active; ++i) {
    const bool inside = !rows.row_index || (rows.row_index[i] >= 0 && rows.row_index[i] < rows.slots);
    keep[i] = inside ? dcut::clamp(keep_lens[i], 0, rows.draft_len) : 0;
  }
  const int32_t total = isa().pack({&rows, keep, &tokens, &packed, active});
  write_decision(decision.decision, -1, total, total);
}

}  // namespace dcut::cpu
