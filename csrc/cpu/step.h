// The ranked draft positions of one step: rows, keys and thresholds.
#pragma once

#include "buffer.h"
#include "isa.h"

namespace dcut::cpu {

// The first m positions in rank order: every key below `threshold`, and the first `ties` keys equal to it.
struct Cut {
  uint32_t threshold;
  int32_t ties;
};

class Step {
 public:
  // Reads the rows and computes every key; with `raw`, the keys are the bare prefix sums.
  Step(const Rows& rows, const Scores& scores, bool raw = false);

  int32_t active() const { return active_; }
  int32_t lowest() const { return lowest_; }    // tokens of the step with mandatory drafts only
  int32_t highest() const { return highest_; }  // with all drafts that fit
  int32_t clamp(int32_t budget) const;          // K: tokens of the step under a raw budget

  // Cuts for `count` clamped budgets at once, and the gain of each unless `gains` is null.
  void cut(const int32_t* tokens, int count, Cut* cuts, int64_t* gains, bool count_bonus);
  // Draft tokens kept per active row.
  const int32_t* depths(const Cut& cut);
  uint32_t key(int32_t i, int32_t k) const { return key_[static_cast<size_t>(k) * stride_ + i]; }

 private:
  void read_rows(const Rows& rows);
  void read_scores(const Rows& rows, const Scores& scores, bool raw);
  int64_t fixed_gain(bool count_bonus) const;
  void cut_few(const int32_t* wanted, int count, Cut* cuts, int64_t* gains);
  void cut_many(const int32_t* wanted, int count, Cut* cuts, int64_t* gains);

  int32_t active_, draft_len_, stride_, lowest_, highest_;
  size_t keys_;       // draft_len * stride
  int32_t optional_;  // keys that are candidates
  bool has_floor_, has_weight_;
  Columns columns_;
  int32_t *offset_, *drafts_, *floor_, *w_;
  uint32_t* key_;
};

}  // namespace dcut::cpu
