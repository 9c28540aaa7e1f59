// Confidences of draft tokens from the drafter's logits, in one pass: the loops over a float vector type V, included
// once per instruction set.
//
// A row is read chunk by chunk.  The first loop over a chunk finds the two largest logits and leaves clean float32
// values in a buffer that stays in the first-level cache; the second one sums exp2((x - max) * scale) from there.
// Equals of the maximum are counted, not summed, so that 1 - q keeps its digits where q is close to 1.
//
// V has kWidth lanes; `residue` is y * scale - n to about 2^-24 of |y * scale|, `exp2_of` adds n's integer, left in the
// low bits of n + kMagic, to the exponent of p.
#pragma once

#include <math.h>
#include <string.h>

#include "dcut/launch.h"
#include "dcut/order.h"

namespace dcut::cpu {

// Rows [first, end) of the batch * draft_len rows.
using ConfidenceRows = void (*)(const Logits& logits, int64_t first, int64_t end);
extern const ConfidenceRows kConfidencePortable;
#if defined(__x86_64__)
extern const ConfidenceRows kConfidenceAvx2;
extern const ConfidenceRows kConfidenceAvx512;
#endif

namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

constexpr float kFloatMax = 3.402823466e38f;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr float kLowest = -60.0f;      // log2 of the smallest ratio to the maximum that counts
constexpr double kLog2e = 1.4426950408889634;

// 2^r for |r| <= 1/2 within 2.4e-7, relatively; coefficient of r^k.
constexpr float kExp2[6] = {1.0000001f, 0.69314694f, 0.2402212f, 0.05550713f, 0.009675542f, 0.0013276472f};

// NaN becomes -inf, +inf the largest float32.
static inline float harmless(float x) { return x > kFloatMax ? kFloatMax : (x == x ? x : -INFINITY); }

static inline float float_of(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline double temperature_of(const float* temperature, int64_t position) {
  const double t = temperature ? temperature[position] : 1.0;
  const double low = 0x1p-100, high = 0x1p100;
  if (!(t > 0.0)) return 1.0;
  return t < low ? low : (t > high ? high : t);
}

// What the logits read so far amount to: the two largest, and sums of exp((x - max) / temperature) below the maximum.
struct Sums {
  float max = -INFINITY, second = -INFINITY;
  int64_t token = 0;  // first one of the largest logit
  double equals = 0.0, others = 0.0, squares = 0.0;

  void insert(float x) {
    second = x > max ? max : (x > second ? x : second);
    max = x > max ? x : max;
  }

  double total() const { return equals + others; }

  // `x`: logit of the token.
  double statistic(Statistic kind, double x, double temperature) const {
    if (max == -INFINITY) return kind == Statistic::kLogProb ? -INFINITY : 0.0;
    switch (kind) {
      case Statistic::kLogProb: return (x - max) / temperature - log1p(equals - 1.0 + others);
      case Statistic::kMaxProb: return 1.0 / total();
      case Statistic::kCollision: return (equals + squares) / (total() * total());
      case Statistic::kMargin: return -expm1((static_cast<double>(second) - max) / temperature) / total();
    }
    return 0.0;
  }
};

template <class V>
struct Confidence {
  using Vec = typename V::Vec;
  static constexpr int64_t kChunk = 4096;
  static constexpr int64_t kSums = 128 * V::kWidth;  // what float32 sums are trusted with

  static inline float widen(float x) { return x; }
  static inline float widen(Half x) { return float_of(widen_half(x.bits)); }
  static inline float widen(BFloat16 x) { return float_of(widen_bfloat16(x.bits)); }

  // Clean values of n logits, and -inf up to a multiple of the width, which is returned; updates the two largest.
  template <class T>
  static int64_t read(const T* logits, int64_t n, float* clean, Sums& sums) {
    Vec first = V::set(-INFINITY), second = first;
    const Vec none = first, most = V::set(kFloatMax);
    int64_t j = 0;
    for (; j + V::kWidth <= n; j += V::kWidth) {
      const Vec x = V::min(V::max(V::load(logits + j), none), most);  // max(NaN, none) is none
      V::store(clean + j, x);
      second = V::max(second, V::min(first, x));
      first = V::max(first, x);
    }
    float lanes[2][V::kWidth];
    V::store(lanes[0], first), V::store(lanes[1], second);
    for (const auto& lane : lanes) {
      for (const float x : lane) sums.insert(x);
    }
    if (j == n) return n;
    for (const int64_t end = j + V::kWidth; j < end; ++j) {
      clean[j] = j < n ? harmless(widen(logits[j])) : -INFINITY;
      sums.insert(clean[j]);
    }
    return j;
  }

  static int64_t find(const float* clean, float x) {
    int64_t j = 0;
    while (!V::any_equal(V::load(clean + j), V::set(x))) j += V::kWidth;
    while (clean[j] != x) ++j;
    return j;
  }

  static void add(const float* clean, int64_t n, double scale, Sums& sums) {
    const float high = static_cast<float>(scale);
    const Vec max = V::set(sums.max), c = V::set(high), c_low = V::set(static_cast<float>(scale - high));
    const Vec magic = V::set(kMagic), lowest = V::set(kLowest), zero = V::set(0.0f), one = V::set(1.0f);
    Vec others = zero, squares = zero, equals = zero;
    for (int64_t j = 0; j < n; j += V::kWidth) {
      const Vec y = V::sub(V::load(clean + j), max), t = V::mul(y, c);
      const Vec rounded = V::add(t, magic), whole = V::sub(rounded, magic);
      const Vec r = V::residue(y, c, c_low, whole);
      Vec p = V::set(kExp2[5]);
      for (int k = 4; k >= 0; --k) p = V::multiply_add(p, r, V::set(kExp2[k]));
      const auto below = V::less(t, zero);
      const Vec e = V::where(V::both(below, V::less(lowest, t)), V::exp2_of(p, rounded));
      others = V::add(others, e);
      squares = V::multiply_add(e, e, squares);
      equals = V::add(equals, V::where_not(below, one));
    }
    float lanes[3][V::kWidth];
    V::store(lanes[0], others), V::store(lanes[1], squares), V::store(lanes[2], equals);
    for (int lane = 0; lane < V::kWidth; ++lane) {
      sums.others += lanes[0][lane], sums.squares += lanes[1][lane], sums.equals += lanes[2][lane];
    }
  }

  template <class T>
  static Sums sums_of(const T* logits, int64_t vocab, double temperature) {
    alignas(64) float clean[kChunk];
    const double scale = kLog2e / temperature;
    Sums sums;
    for (int64_t start = 0; start < vocab; start += kChunk) {
      const float before = sums.max;
      const int64_t n = read(logits + start, vocab - start < kChunk ? vocab - start : kChunk, clean, sums);
      if (sums.max == -INFINITY) continue;
      if (sums.max > before) {
        sums.token = start + find(clean, sums.max);
        const double ratio = exp2((static_cast<double>(before) - sums.max) * scale);
        sums.others = sums.total() * ratio;
        sums.squares = (sums.equals + sums.squares) * ratio * ratio;
        sums.equals = 0.0;
      }
      for (int64_t j = 0; j < n; j += kSums) add(clean + j, n - j < kSums ? n - j : kSums, scale, sums);
    }
    return sums;
  }

  template <class T>
  static void rows_of(const T* logits, const Logits& in, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const T* mine = logits + row * in.vocab;
      const double temperature = temperature_of(in.temperature, row % in.draft_len);
      const Sums sums = sums_of(mine, in.vocab, temperature);
      const int64_t token = in.given ? in.given[row] : sums.token;
      const bool exists = 0 <= token && token < in.vocab;
      const double x = exists ? harmless(widen(mine[token])) : -INFINITY;
      in.draft_ids[row] = token;
      for (int64_t s = 0; s < in.count; ++s) {
        in.values[s * in.rows + row] = static_cast<float>(sums.statistic(in.statistics[s], x, temperature));
      }
    }
  }

  static void rows(const Logits& in, int64_t first, int64_t end) {
    switch (in.type) {
      case FloatType::kFloat32: return rows_of(static_cast<const float*>(in.logits), in, first, end);
      case FloatType::kFloat16: return rows_of(static_cast<const Half*>(in.logits), in, first, end);
      case FloatType::kBFloat16: return rows_of(static_cast<const BFloat16*>(in.logits), in, first, end);
    }
  }
};

}  // namespace
}  // namespace dcut::cpu
