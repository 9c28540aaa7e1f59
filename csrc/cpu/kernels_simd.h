// The loops of kernels_portable.cpp over a vector type V, included once per instruction set.
//
// V has 32-bit lanes.  Products of 32-bit lanes are 64 bits wide, so they are formed for the even and the odd lanes in
// turn: `V::odd` copies the odd lanes down to the even ones, which also takes the high half of a product, and
// `V::merge` takes the even lanes of one vector and the odd lanes of another.  Odd lanes hold garbage meanwhile, except
// where 64-bit lanes are compared or shifted by.
#pragma once

#include "pack.h"

namespace dcut::cpu {
namespace {

template <class V>
struct Kernels {
  using Vec = typename V::Vec;

  // Even lanes of y * P(y) before the last addition, as products.
  static inline Vec log2_half(Vec y) {
    Vec log = V::set(log2_coefficient(9));
    for (int k = 8; k > 0; --k) log = V::add(V::odd(V::mul(y, log)), V::set(log2_coefficient(k)));
    return V::mul(y, log);
  }

  static inline Vec q_of_confidence(Vec bits) {
    const Vec y = V::bit_xor(V::template shl<9>(bits), V::set(static_cast<int32_t>(0x80000000u)));
    const Vec log = V::add(V::merge(V::odd(log2_half(y)), log2_half(V::odd(y))), V::set(log2_coefficient(0)));
    const Vec whole = V::template shl<20>(V::sub(V::set(127), V::template sar<23>(bits)));
    Vec q = V::add(whole, V::template sar<10>(V::sub(V::set(512), log)));
    q = V::min(V::max(q, V::set(0)), V::set(kQMax));
    q = V::where(V::greater(bits, V::set(0x3f7fffff)), V::set(0), q);
    q = V::where(V::greater(V::set(1), bits), V::set(kQMax), q);
    return V::where(V::greater(bits, V::set(0x7f800000)), V::set(kQMax), q);
  }

  template <Source kind>
  static void keys_of(const Columns& in, uint32_t* keys) {
    const Vec limit = V::set(in.limit), lift = V::set(in.lift);
    for (int32_t i = 0; i < in.stride; i += V::kWidth) {
      const Vec offset = V::load(in.offset + i), drafts = V::load(in.drafts + i), floor = V::load(in.floor + i);
      const Vec w = V::load(in.w + i);
      Vec total = V::set(0);
      for (int32_t k = 0; k < in.draft_len; ++k) {
        const auto exists = V::greater(drafts, V::set(k));
        const Vec x = V::gather(in.source + k, offset, exists), before = total;
        if (kind == Source::kPrefix) {
          total = V::max(total, V::min(x, V::set(kQMax)));
        } else {
          total = V::min(V::add(total, kind == Source::kQ ? x : q_of_confidence(x)), V::set(kQMax));
        }
        const Vec prefix = in.shifted ? before : total;
        const Vec key = V::add(V::min(V::add(prefix, w), limit), lift);
        const auto ranked = V::both(exists, V::greater(V::set(k + 1), floor));
        V::store(keys + static_cast<size_t>(k) * in.stride + i, V::where(ranked, key, V::set(-1)));
      }
    }
  }

  static void keys(const Columns& in, uint32_t* keys) {
    switch (in.kind) {
      case Source::kConfidence: return keys_of<Source::kConfidence>(in, keys);
      case Source::kQ: return keys_of<Source::kQ>(in, keys);
      case Source::kPrefix: return keys_of<Source::kPrefix>(in, keys);
    }
  }

  // Scores of the even lanes as 64-bit lanes; x = g << 15, t = T[j], s = S[j] and shift as in score_of.
  static inline Vec scores_half(Vec g, Vec x, Vec t, Vec s, Vec shift) {
    Vec rho = V::set(static_cast<int32_t>(exp2_rho(3)));
    for (int k = 2; k >= 0; --k) {
      rho = V::sub(V::set(static_cast<int32_t>(exp2_rho(k))), V::odd(V::mul_unsigned(x, rho)));
    }
    rho = V::odd(V::mul_unsigned(x, rho));
    const Vec w = V::mul_unsigned(g, s);
    const Vec second = V::template shr64<19>(V::mul_unsigned(V::template shr64<17>(w), rho));
    const Vec value = V::add64(V::sub64(t, w), second);
    return V::template shr64<1>(V::add64(V::shr64(value, shift), V::set64(1)));
  }

  template <int count>
  static void gains_of(const uint32_t* keys, size_t n, const uint32_t* thresholds, int64_t* sums) {
    Vec limit[count], sum[count];
    for (int r = 0; r < count; ++r) limit[r] = V::set64(thresholds[r]), sum[r] = V::set(0);
    uint32_t t_words[2][8], s_words[8];
    for (uint32_t j = 0; j < 8; ++j) {
      t_words[0][j] = static_cast<uint32_t>(exp2_t(j));
      t_words[1][j] = static_cast<uint32_t>(exp2_t(j) >> 32);
      s_words[j] = exp2_s(j);
    }
    const Vec t_low = V::table(t_words[0]), t_high = V::table(t_words[1]), s_table = V::table(s_words);
    for (size_t j = 0; j < n; j += V::kWidth) {
      const Vec key = V::load(keys + j);
      const Vec shift = V::add(V::template shr<20>(key), V::set(13));
      const Vec cell = V::bit_and(V::template shr<17>(key), V::set(7));
      const Vec g = V::bit_and(key, V::set(0x1ffff)), x = V::template shl<15>(g);
      const Vec low = V::lookup(t_low, cell), high = V::lookup(t_high, cell), s = V::lookup(s_table, cell);
      const Vec even = scores_half(g, x, V::merge(low, V::up(high)), s, V::even(shift));
      const Vec odd =
          scores_half(V::odd(g), V::odd(x), V::merge(V::odd(low), high), V::odd(s), V::template shr64<32>(shift));
      const Vec even_key = V::even(key), odd_key = V::template shr64<32>(key);
      for (int r = 0; r < count; ++r) {
        sum[r] = V::add64_where_less(sum[r], even_key, limit[r], even);
        sum[r] = V::add64_where_less(sum[r], odd_key, limit[r], odd);
      }
    }
    for (int r = 0; r < count; ++r) sums[r] = V::sum64(sum[r]);
  }

  static void gains(const uint32_t* keys, size_t n, const uint32_t* thresholds, int count, int64_t* sums) {
    switch (count) {
      case 1: return gains_of<1>(keys, n, thresholds, sums);
      case 2: return gains_of<2>(keys, n, thresholds, sums);
      case 3: return gains_of<3>(keys, n, thresholds, sums);
      case 4: return gains_of<4>(keys, n, thresholds, sums);
    }
  }

  static size_t collect(const uint32_t* keys, size_t n, uint32_t low, uint32_t width, uint32_t* out) {
    uint32_t* end = out;
    for (size_t j = 0; j < n; j += V::kWidth) {
      for (uint32_t found = V::within(V::load(keys + j), low, width); found != 0; found &= found - 1) {
        *end++ = keys[j + static_cast<size_t>(__builtin_ctz(found))];
      }
    }
    return static_cast<size_t>(end - out);
  }

  static void depths(const uint32_t* keys, const int32_t* floor, int32_t stride, int32_t draft_len,
                     const uint32_t* limits, int32_t* keep) {
    for (int32_t i = 0; i < stride; i += V::kWidth) {
      Vec depth = V::load(floor + i);
      for (int32_t k = 0; k < draft_len; ++k) {
        depth = V::count_less(depth, V::load(keys + static_cast<size_t>(k) * stride + i), limits[k]);
      }
      V::store(keep + i, depth);
    }
  }
};

}  // namespace
}  // namespace dcut::cpu
