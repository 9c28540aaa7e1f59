// Plain loops over the scalar definitions: any architecture, and the shape that the SIMD versions follow.
#include "pack.h"

namespace dcut::cpu {
namespace {

void keys(const Columns& in, uint32_t* keys) {
  for (int32_t i = 0; i < in.stride; ++i) {
    int32_t total = 0;
    for (int32_t k = 0; k < in.draft_len; ++k) {
      uint32_t key = kNoKey;
      if (k < in.drafts[i]) {
        const int32_t x = in.source[in.offset[i] + k], before = total;
        if (in.kind == Source::kPrefix) {
          const int32_t given = clamp(x, 0, kQMax);
          total = given > total ? given : total;
        } else {
          total = add_prefix(total, in.kind == Source::kQ ? x : q_of_confidence(x));
        }
        const int32_t score = (in.shifted ? before : total) + in.w[i];
        if (k >= in.floor[i]) key = static_cast<uint32_t>((score < in.limit ? score : in.limit) + in.lift);
      }
      keys[static_cast<size_t>(k) * in.stride + i] = key;
    }
  }
}

void gains(const uint32_t* keys, size_t n, const uint32_t* thresholds, int count, int64_t* sums) {
  for (int r = 0; r < count; ++r) sums[r] = 0;
  for (size_t j = 0; j < n; ++j) {
    const int64_t score = score_of(keys[j]);
    for (int r = 0; r < count; ++r) sums[r] += keys[j] < thresholds[r] ? score : 0;
  }
}

size_t collect(const uint32_t* keys, size_t n, uint32_t low, uint32_t width, uint32_t* out) {
  size_t found = 0;
  for (size_t j = 0; j < n; ++j) {
    out[found] = keys[j];
    found += keys[j] - low <= width;
  }
  return found;
}

void depths(const uint32_t* keys, const int32_t* floor, int32_t stride, int32_t draft_len, const uint32_t* limits,
            int32_t* keep) {
  for (int32_t i = 0; i < stride; ++i) keep[i] = floor[i];
  for (int32_t k = 0; k < draft_len; ++k) {
    const uint32_t* row = keys + static_cast<size_t>(k) * stride;
    for (int32_t i = 0; i < stride; ++i) keep[i] += row[i] < limits[k];
  }
}

}  // namespace

const Isa kPortable = {keys, gains, collect, depths, pack};

}  // namespace dcut::cpu
