// Vectors of GCC and Clang, which they compile to what every machine of an architecture has.
#include "confidence.h"

namespace dcut::cpu {
namespace {

struct Portable {
  using Vec = float __attribute__((vector_size(16)));
  using Mask = int32_t __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;

  static inline Mask bits(Vec a) { return reinterpret_cast<Mask>(a); }
  static inline Vec floats(Mask a) { return reinterpret_cast<Vec>(a); }
  static inline Vec select(Mask m, Vec yes, Vec no) { return floats((m & bits(yes)) | (~m & bits(no))); }

  static inline Vec load(const float* p) {
    Vec a;
    memcpy(&a, p, sizeof a);
    return a;
  }
  static inline Vec load(const Half* p) {
    return floats(Mask{widen_half(p[0].bits), widen_half(p[1].bits), widen_half(p[2].bits), widen_half(p[3].bits)});
  }
  static inline Vec load(const BFloat16* p) {
    return floats(Mask{widen_bfloat16(p[0].bits), widen_bfloat16(p[1].bits), widen_bfloat16(p[2].bits),
                       widen_bfloat16(p[3].bits)});
  }
  static inline void store(float* p, Vec a) { memcpy(p, &a, sizeof a); }
  static inline Vec set(float x) { return Vec{x, x, x, x}; }
  static inline Vec add(Vec a, Vec b) { return a + b; }
  static inline Vec sub(Vec a, Vec b) { return a - b; }
  static inline Vec mul(Vec a, Vec b) { return a * b; }
  static inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }
  static inline Vec min(Vec a, Vec b) { return select(a < b, a, b); }
  static inline Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
  static inline Mask less(Vec a, Vec b) { return a < b; }
  static inline Mask both(Mask a, Mask b) { return a & b; }
  static inline Vec where(Mask m, Vec a) { return floats(m & bits(a)); }
  static inline Vec where_not(Mask m, Vec a) { return floats(~m & bits(a)); }
  static inline bool any_equal(Vec a, Vec b) {
    const Mask equal = a == b;
    return (equal[0] | equal[1] | equal[2] | equal[3]) != 0;
  }
  // As with AVX2: the product of upper halves is exact.
  static inline Vec residue(Vec y, Vec c, Vec c_low, Vec n) {
    const Vec y_high = floats(bits(y) & ~0xfff), c_high = floats(bits(c) & ~0xfff);
    const Vec rest = y_high * (c - c_high + c_low) + (y - y_high) * c;
    return y_high * c_high - n + rest;
  }
  static inline Vec exp2_of(Vec p, Vec rounded) { return floats(bits(p) + (bits(rounded) << 23)); }
};

}  // namespace

const ConfidenceRows kConfidencePortable = Confidence<Portable>::rows;

}  // namespace dcut::cpu
