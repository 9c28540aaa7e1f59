#include <immintrin.h>

#include "confidence.h"

namespace dcut::cpu {
namespace {

struct Avx512 {
  using Vec = __m512;
  using Mask = __mmask16;
  static constexpr int kWidth = 16;

  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static Vec load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load(const BFloat16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
  static Vec set(float x) { return _mm512_set1_ps(x); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  static Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static Mask both(Mask a, Mask b) { return a & b; }
  static Vec where(Mask m, Vec a) { return _mm512_maskz_mov_ps(m, a); }
  static Vec where_not(Mask m, Vec a) { return _mm512_maskz_mov_ps(static_cast<Mask>(~m), a); }
  static bool any_equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ) != 0; }
  static Vec residue(Vec y, Vec c, Vec c_low, Vec n) { return _mm512_fmadd_ps(y, c_low, _mm512_fmsub_ps(y, c, n)); }
  static Vec exp2_of(Vec p, Vec rounded) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(rounded), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), n));
  }
};

}  // namespace

const ConfidenceRows kConfidenceAvx512 = Confidence<Avx512>::rows;

}  // namespace dcut::cpu
