#include <immintrin.h>

#include "kernels_simd.h"

namespace dcut::cpu {
namespace {

struct Avx512 {
  using Vec = __m512i;
  using Mask = __mmask16;
  static constexpr int kWidth = 16;

  static Vec load(const void* p) { return _mm512_loadu_si512(p); }
  static void store(void* p, Vec a) { _mm512_storeu_si512(p, a); }
  static Vec set(int32_t x) { return _mm512_set1_epi32(x); }
  static Vec set64(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
  static Vec add(Vec a, Vec b) { return _mm512_add_epi32(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_epi32(a, b); }
  static Vec min(Vec a, Vec b) { return _mm512_min_epi32(a, b); }
  static Vec max(Vec a, Vec b) { return _mm512_max_epi32(a, b); }
  static Vec bit_and(Vec a, Vec b) { return _mm512_and_si512(a, b); }
  static Vec bit_xor(Vec a, Vec b) { return _mm512_xor_si512(a, b); }
  template <int bits>
  static Vec shl(Vec a) {
    return _mm512_slli_epi32(a, bits);
  }
  template <int bits>
  static Vec shr(Vec a) {
    return _mm512_srli_epi32(a, bits);
  }
  template <int bits>
  static Vec sar(Vec a) {
    return _mm512_srai_epi32(a, bits);
  }
  template <int bits>
  static Vec shr64(Vec a) {
    return _mm512_srli_epi64(a, bits);
  }
  static Vec shr64(Vec a, Vec bits) { return _mm512_srlv_epi64(a, bits); }
  static Vec add64(Vec a, Vec b) { return _mm512_add_epi64(a, b); }
  static Vec sub64(Vec a, Vec b) { return _mm512_sub_epi64(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_epi32(a, b); }
  static Vec mul_unsigned(Vec a, Vec b) { return _mm512_mul_epu32(a, b); }
  static Vec odd(Vec a) { return _mm512_shuffle_epi32(a, _MM_PERM_DDBB); }
  static Vec up(Vec a) { return _mm512_shuffle_epi32(a, _MM_PERM_CCAA); }  // even lanes to the odd ones
  static Vec merge(Vec even, Vec odd) { return _mm512_mask_blend_epi32(0xaaaa, even, odd); }
  static Vec even(Vec a) { return _mm512_and_si512(a, set64(0xffffffffu)); }
  static Mask greater(Vec a, Vec b) { return _mm512_cmpgt_epi32_mask(a, b); }
  static Mask both(Mask a, Mask b) { return a & b; }
  static Vec where(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_epi32(m, no, yes); }
  static Vec gather(const int32_t* p, Vec offset, Mask m) {
    return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), m, offset, p, 4);
  }
  static Vec table(const uint32_t (&t)[8]) {
    return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(t)));
  }
  static Vec lookup(Vec t, Vec index) { return _mm512_permutexvar_epi32(index, t); }
  static Vec add64_where_less(Vec sum, Vec key, Vec limit, Vec x) {
    return _mm512_mask_add_epi64(sum, _mm512_cmplt_epu64_mask(key, limit), sum, x);
  }
  static int64_t sum64(Vec a) { return _mm512_reduce_add_epi64(a); }
  static uint32_t within(Vec key, uint32_t low, uint32_t width) {
    const Vec from = sub(key, set(static_cast<int32_t>(low)));
    return _mm512_cmple_epu32_mask(from, set(static_cast<int32_t>(width)));
  }
  static Vec count_less(Vec count, Vec key, uint32_t limit) {
    const Mask less = _mm512_cmplt_epu32_mask(key, set(static_cast<int32_t>(limit)));
    return _mm512_mask_add_epi32(count, less, count, set(1));
  }
};

using K = Kernels<Avx512>;

}  // namespace

const Isa kAvx512 = {K::keys, K::gains, K::collect, K::depths, pack};

}  // namespace dcut::cpu
