#include "step.h"

#include <string.h>

#include <algorithm>

namespace dcut::cpu {
namespace {

struct Scratch {
  Buffer<int32_t> rows, source, depths;
  Buffer<uint32_t> keys, candidates, sorted, counts;
};

Scratch& scratch() {
  static thread_local Scratch s;
  return s;
}

int32_t round_up(int32_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

int32_t float32_bits(const Scores& scores, int64_t at) {
  switch (scores.type) {
    case FloatType::kFloat16: return widen_half(static_cast<const uint16_t*>(scores.confidence)[at]);
    case FloatType::kBFloat16: return widen_bfloat16(static_cast<const uint16_t*>(scores.confidence)[at]);
    default: return static_cast<const int32_t*>(scores.confidence)[at];
  }
}

}  // namespace

Step::Step(const Rows& rows, const Scores& scores, bool raw) : draft_len_(rows.draft_len) {
  read_rows(rows);
  read_scores(rows, scores, raw);
  int64_t tokens = 0, base = 0, candidates = 0;
  for (int32_t i = 0; i < active_; ++i) {
    base += rows.base_lens && rows.base_lens[i] > 1 ? rows.base_lens[i] : 1;
    tokens += floor_[i];
    candidates += drafts_[i] - floor_[i];
  }
  const int64_t lowest = base + tokens, highest = lowest + candidates;
  lowest_ = static_cast<int32_t>(std::min<int64_t>(lowest, kInt32Max));
  highest_ = static_cast<int32_t>(std::max<int64_t>(lowest_, std::min<int64_t>(highest, rows.capacity)));
  optional_ = static_cast<int32_t>(candidates);
  keys_ = static_cast<size_t>(draft_len_) * static_cast<size_t>(stride_);
  key_ = scratch().keys.get(keys_);
  isa().keys(columns_, key_);
}

void Step::read_rows(const Rows& rows) {
  active_ = rows.num_reqs ? dcut::clamp(*rows.num_reqs, 0, rows.batch) : rows.batch;
  stride_ = round_up(active_);
  int32_t* memory = scratch().rows.get(static_cast<size_t>(stride_) * 4);
  offset_ = memory, drafts_ = memory + stride_, floor_ = memory + 2 * stride_, w_ = memory + 3 * stride_;
  std::fill(memory, memory + 4 * stride_, 0);
  has_floor_ = rows.min_keep != nullptr, has_weight_ = rows.weight != nullptr;
  const int32_t d = rows.draft_len;
  for (int32_t i = 0; i < active_; ++i) offset_[i] = i * d, drafts_[i] = d;
  if (rows.row_index) {
    for (int32_t i = 0; i < active_; ++i) {
      const int32_t slot = rows.row_index[i];
      const bool inside = slot >= 0 && slot < rows.slots;
      offset_[i] = inside ? slot * d : 0, drafts_[i] = inside ? d : 0;
    }
  }
  if (rows.draft_lens) {
    for (int32_t i = 0; i < active_; ++i) drafts_[i] = std::min(drafts_[i], std::max(rows.draft_lens[i], 0));
  }
  if (rows.max_keep) {
    for (int32_t i = 0; i < active_; ++i) drafts_[i] = std::min(drafts_[i], std::max(rows.max_keep[i], 0));
  }
}

void Step::read_scores(const Rows& rows, const Scores& scores, bool raw) {
  const int32_t limit = raw ? kQMax : kZero, lift = raw ? 0 : kWeightSpan;
  columns_ = {nullptr,        offset_, drafts_, floor_, w_, stride_, draft_len_, Source::kConfidence,
              scores.shifted, limit,   lift};
  if (scores.prefix) {
    columns_.source = scores.prefix;
    columns_.kind = Source::kPrefix;
    for (int32_t i = 0; i < active_ && draft_len_ > 0; ++i) {
      if (scores.prefix[offset_[i]] < 0) drafts_[i] = 0;
    }
  } else if (scores.log || scores.calibration || scores.type != FloatType::kFloat32) {
    // Copy the rows that are needed, as float32 bits or as q.
    int32_t* source = scratch().source.get(static_cast<size_t>(active_) * static_cast<size_t>(draft_len_) + 1);
    const bool as_q = scores.log || scores.calibration;
    for (int32_t i = 0; i < active_; ++i) {
      int32_t* to = source + static_cast<size_t>(i) * draft_len_;
      for (int32_t k = 0; k < drafts_[i]; ++k) {
        const int32_t bits = float32_bits(scores, int64_t{offset_[i]} + k);
        if (as_q) {
          const int32_t q = scores.log ? q_of_log_confidence(bits) : q_of_confidence(bits);
          to[k] = scores.calibration ? calibrate(q, scores.calibration + k * (kCalibrationCells + 1)) : q;
        } else {
          to[k] = bits;
        }
      }
      offset_[i] = i * draft_len_;
    }
    columns_.source = source;
    if (as_q) columns_.kind = Source::kQ;
  } else {
    columns_.source = static_cast<const int32_t*>(scores.confidence);
  }
  if (rows.min_keep) {
    for (int32_t i = 0; i < active_; ++i) floor_[i] = dcut::clamp(rows.min_keep[i], 0, drafts_[i]);
  }
  if (rows.weight) {
    for (int32_t i = 0; i < active_; ++i) {
      int32_t bits;
      memcpy(&bits, rows.weight + i, sizeof bits);
      w_[i] = w_of_weight(bits);
    }
  }
}

int32_t Step::clamp(int32_t budget) const { return std::max(lowest_, std::min(budget, highest_)); }

// Scores of what every budget keeps: bonus tokens and mandatory drafts.
int64_t Step::fixed_gain(bool count_bonus) const {
  int64_t gain = 0;
  if (count_bonus && !has_weight_) gain = int64_t{active_} << 30;
  for (int32_t i = 0; has_weight_ && count_bonus && i < active_; ++i) gain += score_of(key_of(0, w_[i]));
  for (int32_t i = 0; has_floor_ && i < active_; ++i) {
    int32_t total = 0;
    for (int32_t k = 0; k < floor_[i]; ++k) {
      const int32_t x = columns_.source[offset_[i] + k], before = total;
      switch (columns_.kind) {
        case Source::kConfidence: total = add_prefix(total, q_of_confidence(x)); break;
        case Source::kQ: total = add_prefix(total, x); break;
        case Source::kPrefix: total = std::max(total, dcut::clamp(x, 0, kQMax)); break;
      }
      gain += score_of(key_of(columns_.shifted ? before : total, w_[i]));
    }
  }
  return gain;
}

void Step::cut(const int32_t* tokens, int count, Cut* cuts, int64_t* gains, bool count_bonus) {
  // Distinct numbers of optional drafts, in ascending order; 0 and all of them need no search.
  int32_t wanted[kMaxBuckets + 1];
  for (int r = 0; r < count; ++r) wanted[r] = tokens[r] - lowest_;
  std::sort(wanted, wanted + count);
  const int distinct = static_cast<int>(std::unique(wanted, wanted + count) - wanted);
  Cut found[kMaxBuckets + 1];
  int64_t gain[kMaxBuckets + 1];
  if (distinct <= 2 * kMaxThresholds) {
    cut_few(wanted, distinct, found, gains ? gain : nullptr);
  } else {
    cut_many(wanted, distinct, found, gain);
  }
  const int64_t fixed = gains ? fixed_gain(count_bonus) : 0;
  for (int r = 0; r < count; ++r) {
    const auto at = std::lower_bound(wanted, wanted + distinct, tokens[r] - lowest_) - wanted;
    cuts[r] = found[at];
    if (gains) gains[r] = fixed + gain[at];
  }
}

// Few cuts: count the leading key bits, then search inside the one cell that each cut falls into.
void Step::cut_few(const int32_t* wanted, int count, Cut* cuts, int64_t* gains) {
  const int shift = keys_ < 2048 ? 18 : 16;  // small steps: clearing the counts would cost more than the search
  const uint32_t cells = (1u << 26) >> shift;
  uint32_t* counts = scratch().counts.get(2 * (cells + 1));
  std::fill(counts, counts + 2 * (cells + 1), 0);
  for (size_t j = 0; j < keys_; j += 2) {  // two tables: neighbors often share a cell
    ++counts[2 * std::min(key_[j] >> shift, cells)];
    ++counts[2 * std::min(key_[j + 1] >> shift, cells) + 1];
  }
  uint32_t cell = 0;
  int32_t below = 0;  // keys in earlier cells
  for (int r = 0; r < count; ++r) {
    const int32_t m = wanted[r];
    if (m == 0 || m == optional_) {
      cuts[r] = {m == 0 ? 0 : kNoKey, 0};
      continue;
    }
    for (int32_t here; below + (here = static_cast<int32_t>(counts[2 * cell] + counts[2 * cell + 1])) < m; ++cell) {
      below += here;
    }
    uint32_t* candidates = scratch().candidates.get(keys_);
    const size_t n = isa().collect(key_, keys_, cell << shift, (1u << shift) - 1, candidates);
    uint32_t* nth = candidates + (m - below - 1);
    std::nth_element(candidates, nth, candidates + n);
    const auto less = std::count_if(candidates, nth, [nth](uint32_t key) { return key < *nth; });
    cuts[r] = {*nth, m - below - static_cast<int32_t>(less)};
  }
  for (int r = 0; gains && r < count; r += kMaxThresholds) {
    const int n = std::min(kMaxThresholds, count - r);
    uint32_t thresholds[kMaxThresholds];
    for (int s = 0; s < n; ++s) thresholds[s] = cuts[r + s].threshold;
    isa().gains(key_, keys_, thresholds, n, gains + r);
    for (int s = 0; s < n; ++s) gains[r + s] += cuts[r + s].ties * score_of(cuts[r + s].threshold);
  }
}

// Many cuts: sort the keys once; a running sum of their scores gives every gain.
void Step::cut_many(const int32_t* wanted, int count, Cut* cuts, int64_t* gains) {
  constexpr int kDigit = 9, kPasses = 3;
  uint32_t *from = scratch().candidates.get(keys_), *to = scratch().sorted.get(keys_);
  const size_t n = isa().collect(key_, keys_, 0, kNoKey - 1, from);
  for (int pass = 0; pass < kPasses; ++pass) {
    uint32_t start[1 << kDigit] = {};
    const auto digit = [pass](uint32_t key) { return key >> (kDigit * pass) & ((1u << kDigit) - 1); };
    for (size_t j = 0; j < n; ++j) ++start[digit(from[j])];
    uint32_t sum = 0;
    for (uint32_t& s : start) sum += s, s = sum - s;
    for (size_t j = 0; j < n; ++j) to[start[digit(from[j])]++] = from[j];
    std::swap(from, to);
  }
  int64_t gain = 0;
  int32_t m = 0, first = 0;  // first: where the keys equal to the last one begin
  for (int r = 0; r < count; ++r) {
    for (; m < wanted[r]; ++m) {
      gain += score_of(from[m]);
      if (m > 0 && from[m] != from[m - 1]) first = m;
    }
    gains[r] = gain;
    cuts[r] = m == 0 ? Cut{0, 0} : Cut{from[m - 1], m - first};
  }
}

const int32_t* Step::depths(const Cut& cut) {
  int32_t* keep = scratch().depths.get(static_cast<size_t>(stride_) + 1);
  uint32_t limits[kMaxDraftLen];
  int32_t left = cut.ties, k = 0;
  // Positions whose ties are all kept, then one whose first ties are kept, then positions without.
  for (; k < draft_len_ && left > 0; ++k) {
    const uint32_t* row = key_ + static_cast<size_t>(k) * stride_;
    int32_t equal = 0;
    for (int32_t i = 0; i < active_; ++i) equal += row[i] == cut.threshold;
    if (equal > left) break;
    left -= equal;
    limits[k] = cut.threshold + 1;
  }
  for (int32_t j = k; j < draft_len_; ++j) limits[j] = cut.threshold;
  isa().depths(key_, floor_, stride_, draft_len_, limits, keep);
  for (int32_t i = 0; left > 0; ++i) {
    if (key_[static_cast<size_t>(k) * stride_ + i] == cut.threshold) ++keep[i], --left;
  }
  return keep;
}

}  // namespace dcut::cpu
