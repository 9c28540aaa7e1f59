// The number format and the tie rule: this file is the definition, every backend takes its decisions from these
// integers.
//
// q = -log2(score) in units of 2^-20.
//
// THE TIE RULE: positions are ranked by (key, position, request), smaller first.  Keys of equal value that lie in
// [position][request] order in memory are already in tie order.
#pragma once

#include <stdint.h>

#if defined(__CUDACC__)
#define DCUT_HD __host__ __device__ __forceinline__
#else
#define DCUT_HD static inline  // internal linkage: translation units for different instruction sets must not share code
#endif

namespace dcut {

constexpr int kMaxDraftLen = 63;
constexpr int kMaxBuckets = 256;
constexpr int32_t kUnit = 1 << 20;
constexpr int32_t kQMax = (1 << 26) - 1;   // a score of 0, and where prefix sums saturate
constexpr int32_t kWeightSpan = 1 << 23;   // weights reach from 2^-8 to 2^8: keys are shifted up by 8 units
constexpr int32_t kZero = 56 * kUnit - 1;  // scores below 2^-56 count as 0 and tie
constexpr uint32_t kNoKey = 0xffffffffu;   // not a candidate; above every key
constexpr int32_t kInt32Max = 0x7fffffff;
constexpr int32_t kCalibrationShift = 17, kCalibrationCells = 64;

// Tables live inside functions: device code cannot index arrays of namespace scope.

// log2(3/2 + y), y in [-1/2, 1/2) as a signed Q32, result Q30; coefficient of y^k.
DCUT_HD int32_t log2_coefficient(int k) {
  static constexpr int32_t c[10] = {628098697, 1032721379, -344239122, 152992897, -76539554,
                                    40853766,  -22211244,  12517897,   -9529180,  5956685};
  return c[k];
}

constexpr uint32_t kLog2E = 3098164009u;  // log2(e), Q31

// 2^-f with f = j/8 + g is T[j] * (1 - ln2 * g * (1 - rho(g))): T in Q52, corrected for the rounding of S = T * ln2 in
// Q32; rho = x * (r0 - x * (r1 - x * (r2 - x * r3))) in Q36 with x = 8 * g in Q32 and r in Q33.
DCUT_HD uint64_t exp2_t(uint32_t j) {
  static constexpr uint64_t t[8] = {4503599627370496u, 4129819067240750u, 3787060782364434u, 3472750049309270u,
                                    3184525836273106u, 2920223067578992u, 2677856360014424u, 2455605109274073u};
  return t[j];
}
DCUT_HD uint32_t exp2_s(uint32_t j) {
  static constexpr uint32_t s[8] = {2977044472u, 2729961817u, 2503386024u, 2295615106u,
                                    2105088334u, 1930374514u, 1770161234u, 1623245009u};
  return s[j];
}
DCUT_HD uint32_t exp2_rho(int k) {
  static constexpr uint32_t r[4] = {2977044406u, 85979939u, 1861222u, 31037u};
  return r[k];
}

DCUT_HD int32_t clamp(int32_t x, int32_t low, int32_t high) { return x < low ? low : (x > high ? high : x); }

// The high word of a product.  nvcc does not see one instruction in a widened product.
DCUT_HD int32_t mul_high(int32_t a, int32_t b) {
#if defined(__CUDA_ARCH__)
  return __mulhi(a, b);
#else
  return static_cast<int32_t>((static_cast<int64_t>(a) * b) >> 32);
#endif
}
DCUT_HD uint32_t mul_high(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
#endif
}

// float16 and bfloat16 bits to float32 bits.
DCUT_HD int32_t widen_half(uint32_t h) {
  const uint32_t sign = (h & 0x8000u) << 16;
  uint32_t exponent = h >> 10 & 0x1fu, fraction = h & 0x3ffu;
  if (exponent == 0 && fraction == 0) return static_cast<int32_t>(sign);
  if (exponent == 0x1f) return static_cast<int32_t>(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {
    for (exponent = 1; fraction < 0x400u; --exponent) fraction <<= 1;  // wraps below 0, and back when it is widened
  }
  return static_cast<int32_t>(sign | ((exponent + 112u) << 23) | (fraction & 0x3ffu) << 13);
}
DCUT_HD int32_t widen_bfloat16(uint32_t b) { return static_cast<int32_t>(b << 16); }

// -log2 of a positive finite float32 given by its bits, unclamped.
DCUT_HD int32_t neg_log2(int32_t bits) {
  const int32_t y = static_cast<int32_t>((static_cast<uint32_t>(bits) << 9) ^ 0x80000000u);
  int32_t log = log2_coefficient(9);
  for (int k = 8; k >= 0; --k) log = log2_coefficient(k) + mul_high(y, log);
  return (127 - (bits >> 23)) * kUnit + ((512 - log) >> 10);
}

// Bits of a float32 confidence to q: NaN and negatives count as 0, values above 1 as 1.
DCUT_HD int32_t q_of_confidence(int32_t bits) {
  if (bits <= 0 || bits > 0x7f800000) return kQMax;
  return bits >= 0x3f800000 ? 0 : clamp(neg_log2(bits), 0, kQMax);
}

// Bits of the natural logarithm of a confidence to q: NaN and -inf count as 0, values of 0 and above as 1.
DCUT_HD int32_t q_of_log_confidence(int32_t bits) {
  const int32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return kQMax;
  if (bits >= 0 || magnitude == 0) return 0;
  if (magnitude >= 0x42800000) return kQMax;  // -64 and below
  const uint64_t mantissa = (static_cast<uint32_t>(magnitude) & 0x7fffffu) | 0x800000u;
  const int shift = 161 - (magnitude >> 23);  // Q23 * Q31 * 2^exponent to Q20
  if (shift > 56) return 0;                   // the product has 56 bits: below half a unit
  const uint64_t q = (mantissa * kLog2E + (uint64_t{1} << (shift - 1))) >> shift;
  return q > static_cast<uint64_t>(kQMax) ? kQMax : static_cast<int32_t>(q);
}

// Looks q up in the table of its draft position: entry j is the calibrated q of q = j * 2^17; linear between, of slope
// 1 beyond the last; a score of 0 stays 0.  Entries out of range are clamped.
DCUT_HD int32_t calibrate(int32_t q, const int32_t* table) {
  const int32_t j = q >> kCalibrationShift < kCalibrationCells ? q >> kCalibrationShift : kCalibrationCells;
  const int32_t low = clamp(table[j], 0, kQMax), beyond = q - (j << kCalibrationShift);
  if (j == kCalibrationCells) return q < kQMax && low + beyond < kQMax ? low + beyond : kQMax;
  const int32_t rise = clamp(table[j + 1], 0, kQMax) - low;
  return low + mul_high(rise * 16, beyond << 11);  // rise * beyond >> 17
}

// Bits of a weight to w = -log2(weight): NaN counts as 1, weights are clamped to [2^-8, 2^8].
DCUT_HD int32_t w_of_weight(int32_t bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) return 0;
  if (bits <= 0x3b800000) return kWeightSpan;
  return bits >= 0x43800000 ? -kWeightSpan : clamp(neg_log2(bits), -kWeightSpan, kWeightSpan);
}

DCUT_HD int32_t add_prefix(int32_t a, int32_t b) { return a + b < kQMax ? a + b : kQMax; }

// The 26-bit integer that ranks a position.
DCUT_HD uint32_t key_of(int32_t prefix, int32_t w) {
  return static_cast<uint32_t>((prefix + w < kZero ? prefix + w : kZero) + kWeightSpan);
}

// The score of a key in units of 2^-30, rounded half up; weights above 1 give up to 2^38.  t and s: the entries of the
// tables for exp2_index(key).
DCUT_HD uint32_t exp2_index(uint32_t key) { return key >> 17 & 7; }
DCUT_HD int64_t score_of(uint32_t key, uint64_t t, uint32_t s) {
  const uint32_t g = key & 0x1ffff, x = g << 15;
  uint32_t rho = 0;
  for (int k = 3; k >= 0; --k) rho = exp2_rho(k) - mul_high(x, rho);
  rho = mul_high(x, rho);
  const uint64_t w = static_cast<uint64_t>(g) * s;
  const uint64_t scaled = static_cast<uint32_t>(w >> 17);  // w is below 2^49
  const uint64_t value = t - w + ((scaled * rho) >> 19);
  const uint32_t shift = 13 + (key >> 20);
  return shift > 63 ? 0 : static_cast<int64_t>(((value >> shift) + 1) >> 1);
}
DCUT_HD int64_t score_of(uint32_t key) { return score_of(key, exp2_t(exp2_index(key)), exp2_s(exp2_index(key))); }

// Utility of a bucket under argmax; the one floating-point operation.
DCUT_HD double utility(int64_t gain, float cost) { return static_cast<double>(gain) / static_cast<double>(cost); }

// a * b, of a below 2^63.
struct WideProduct {
  uint64_t high;
  uint32_t low;
};
DCUT_HD WideProduct wide_product(int64_t a, int32_t b) {
  const uint64_t value = static_cast<uint64_t>(a), factor = static_cast<uint32_t>(b);
  const uint64_t low = (value & 0xffffffffu) * factor;
  return {(value >> 32) * factor + (low >> 32), static_cast<uint32_t>(low)};
}

// EARLY STOP: whether what a bucket keeps, of this gain, ends before a position of score `next` that is not worth its
// cost: next * height <= gain * slope, exactly.  Height and slope: of the convex envelope of the costs at the budget.
DCUT_HD bool stops(int64_t gain, int64_t next, int32_t height, int32_t slope) {
  const WideProduct cost = wide_product(next, height > 0 ? height : 0);
  const WideProduct worth = wide_product(gain, slope > 0 ? slope : 0);
  return cost.high < worth.high || (cost.high == worth.high && cost.low <= worth.low);
}

// The smallest budget that stops wins, without any the largest: the larger value of these.
DCUT_HD double early_utility(bool stops, int32_t budget) {
  return static_cast<double>(stops ? (int64_t{1} << 33) - budget : int64_t{budget});
}

// What a host reads of the next budget: the count of the steps tells a new value from a stale one.
DCUT_HD int64_t budget_word(uint32_t count, int32_t budget) {
  return static_cast<int64_t>(uint64_t{count} << 32 | static_cast<uint32_t>(budget));
}

// Whether a bucket takes part in the choice.
DCUT_HD bool enabled(int32_t budget, float cost) { return budget > 0 && cost > 0.0f && cost <= 3.402823466e+38f; }

// Token offsets saturate, so that absurd base_lens stay harmless.
DCUT_HD int32_t add_tokens(int32_t a, int32_t b) { return a > kInt32Max - b ? kInt32Max : a + b; }

}  // namespace dcut
