// The inner loops that exist once per instruction set.  Their translation units share no inline code with the rest.
#pragma once

#include <stddef.h>

#include "dcut/order.h"
#include "dcut/params.h"

namespace dcut::cpu {

constexpr int kLanes = 16;         // columns of a key matrix come in multiples of this
constexpr int kMaxThresholds = 4;  // thresholds that one pass over the keys serves

// What the numbers of the source matrix are.
enum class Source { kConfidence, kQ, kPrefix };

// The ranked rows of a step as columns: position-major, so that memory order is tie order.
struct Columns {
  const int32_t* source;  // matrix of Source numbers
  const int32_t* offset;  // [stride] start of each row in `source`
  const int32_t* drafts;  // [stride] positions that exist
  const int32_t* floor;   // [stride] of them, kept whatever their score
  const int32_t* w;       // [stride] -log2(weight)
  int32_t stride;         // rows, rounded up to kLanes
  int32_t draft_len;
  Source kind;
  bool shifted;
  int32_t limit;  // key = min(prefix + w, limit) + lift
  int32_t lift;
};

struct Pack {
  const Rows* rows;
  const int32_t* keep;  // [batch]
  const Tokens* tokens;
  const Packed* packed;
  int32_t active;
};

struct Isa {
  // keys[draft_len][stride]: key of every position that is neither mandatory nor missing, else kNoKey.
  void (*keys)(const Columns& columns, uint32_t* keys);
  // sums[r] = scores of the keys below thresholds[r]; n is a multiple of kLanes, count at most kMaxThresholds.
  void (*gains)(const uint32_t* keys, size_t n, const uint32_t* thresholds, int count, int64_t* sums);
  // Keys in [low, low + width] in memory order; `out` has room for all n.  Returns their number.
  size_t (*collect)(const uint32_t* keys, size_t n, uint32_t low, uint32_t width, uint32_t* out);
  // keep[i] = floor[i] + number of positions k with keys[k][i] < limits[k].
  void (*depths)(const uint32_t* keys, const int32_t* floor, int32_t stride, int32_t draft_len, const uint32_t* limits,
                 int32_t* keep);
  // The packed batch; returns the total number of tokens.
  int32_t (*pack)(const Pack& pack);
};

extern const Isa kPortable;
#if defined(__x86_64__)
extern const Isa kAvx2;
extern const Isa kAvx512;
#endif

const Isa& isa();

}  // namespace dcut::cpu
