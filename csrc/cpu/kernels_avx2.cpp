#include <immintrin.h>

#include "kernels_simd.h"

namespace dcut::cpu {
namespace {

struct Avx2 {
  using Vec = __m256i;
  using Mask = __m256i;
  static constexpr int kWidth = 8;

  static Vec load(const void* p) { return _mm256_loadu_si256(static_cast<const Vec*>(p)); }
  static void store(void* p, Vec a) { _mm256_storeu_si256(static_cast<Vec*>(p), a); }
  static Vec set(int32_t x) { return _mm256_set1_epi32(x); }
  static Vec set64(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
  static Vec add(Vec a, Vec b) { return _mm256_add_epi32(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_epi32(a, b); }
  static Vec min(Vec a, Vec b) { return _mm256_min_epi32(a, b); }
  static Vec max(Vec a, Vec b) { return _mm256_max_epi32(a, b); }
  static Vec bit_and(Vec a, Vec b) { return _mm256_and_si256(a, b); }
  static Vec bit_xor(Vec a, Vec b) { return _mm256_xor_si256(a, b); }
  template <int bits>
  static Vec shl(Vec a) {
    return _mm256_slli_epi32(a, bits);
  }
  template <int bits>
  static Vec shr(Vec a) {
    return _mm256_srli_epi32(a, bits);
  }
  template <int bits>
  static Vec sar(Vec a) {
    return _mm256_srai_epi32(a, bits);
  }
  template <int bits>
  static Vec shr64(Vec a) {
    return _mm256_srli_epi64(a, bits);
  }
  static Vec shr64(Vec a, Vec bits) { return _mm256_srlv_epi64(a, bits); }
  static Vec add64(Vec a, Vec b) { return _mm256_add_epi64(a, b); }
  static Vec sub64(Vec a, Vec b) { return _mm256_sub_epi64(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_epi32(a, b); }
  static Vec mul_unsigned(Vec a, Vec b) { return _mm256_mul_epu32(a, b); }
  static Vec odd(Vec a) { return _mm256_shuffle_epi32(a, 0xf5); }
  static Vec up(Vec a) { return _mm256_shuffle_epi32(a, 0xa0); }  // even lanes to the odd ones
  static Vec merge(Vec even, Vec odd) { return _mm256_blend_epi32(even, odd, 0xaa); }
  static Vec even(Vec a) { return _mm256_blend_epi32(a, _mm256_setzero_si256(), 0xaa); }
  static Mask greater(Vec a, Vec b) { return _mm256_cmpgt_epi32(a, b); }
  static Mask both(Mask a, Mask b) { return _mm256_and_si256(a, b); }
  static Vec where(Mask m, Vec yes, Vec no) { return _mm256_blendv_epi8(no, yes, m); }
  static Vec gather(const int32_t* p, Vec offset, Mask m) {
    return _mm256_mask_i32gather_epi32(_mm256_setzero_si256(), p, offset, m, 4);
  }
  static Vec table(const uint32_t (&t)[8]) { return load(t); }
  static Vec lookup(Vec t, Vec index) { return _mm256_permutevar8x32_epi32(t, index); }
  static Vec add64_where_less(Vec sum, Vec key, Vec limit, Vec x) {
    return _mm256_add_epi64(sum, _mm256_and_si256(x, _mm256_cmpgt_epi64(limit, key)));
  }
  static int64_t sum64(Vec a) {
    alignas(32) int64_t lanes[4];
    store(lanes, a);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }
  static uint32_t within(Vec key, uint32_t low, uint32_t width) {
    const Vec from = sub(key, set(static_cast<int32_t>(low)));
    const Vec in = _mm256_cmpeq_epi32(_mm256_min_epu32(from, set(static_cast<int32_t>(width))), from);
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(in)));
  }
  static Vec count_less(Vec count, Vec key, uint32_t limit) {
    const Vec sign = set(static_cast<int32_t>(0x80000000u));
    const Vec bound = set(static_cast<int32_t>(limit ^ 0x80000000u));
    return sub(count, _mm256_cmpgt_epi32(bound, bit_xor(key, sign)));
  }
};

using K = Kernels<Avx2>;

}  // namespace

const Isa kAvx2 = {K::keys, K::gains, K::collect, K::depths, pack};

}  // namespace dcut::cpu
