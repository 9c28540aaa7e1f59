#include <immintrin.h>

#include "confidence.h"

namespace dcut::cpu {
namespace {

struct Avx2 {
  using Vec = __m256;
  using Mask = __m256;
  static constexpr int kWidth = 8;

  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static Vec load(const Half* p) {  // one by one: F16C is not part of AVX2
    alignas(32) int32_t bits[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) bits[lane] = widen_half(p[lane].bits);
    return _mm256_castsi256_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(bits)));
  }
  static Vec load(const BFloat16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
  static Vec set(float x) { return _mm256_set1_ps(x); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  static Vec multiply_add(Vec a, Vec b, Vec c) { return add(mul(a, b), c); }
  static Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
  static Vec where(Mask m, Vec a) { return _mm256_and_ps(m, a); }
  static Vec where_not(Mask m, Vec a) { return _mm256_andnot_ps(m, a); }
  static bool any_equal(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)) != 0; }
  // Upper halves of y and c have 12 bits, so their product is exact: FMA is not part of AVX2 either.
  static Vec residue(Vec y, Vec c, Vec c_low, Vec n) {
    const Vec upper = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int32_t>(0xfffff000u)));
    const Vec y_high = _mm256_and_ps(y, upper), c_high = _mm256_and_ps(c, upper);
    const Vec rest = add(mul(y_high, add(sub(c, c_high), c_low)), mul(sub(y, y_high), c));
    return add(sub(mul(y_high, c_high), n), rest);
  }
  static Vec exp2_of(Vec p, Vec rounded) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(rounded), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n));
  }
};

}  // namespace

const ConfidenceRows kConfidenceAvx2 = Confidence<Avx2>::rows;

}  // namespace dcut::cpu
