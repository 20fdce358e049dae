// A function of one number as a table of cubics, looked up for a vector of arguments at once.
#pragma once

#include "core/packing.hpp"
#include "core/unit.h"

namespace ANYMAX_UNIT {

// The cubics of cells, one coefficient a vector; `cell` is four times the number of each.
struct Cubics {
    vf c[4];
};

#if defined(__AVX512F__)
ANYMAX_INLINE Cubics cubics_at(const float *cells, vi cell) {
    alignas(64) uint32_t at[16];
    _mm512_store_si512(at, (__m512i)cell);
    __m512 r[4];
    for (int j = 0; j < 4; j++) {  // four lanes of four: of the cells j, 4 + j, 8 + j and 12 + j
        const auto one = [&](int k) ANYMAX_EACH { return _mm_loadu_ps(cells + at[4 * k + j]); };
        r[j] = _mm512_insertf32x4(_mm512_insertf32x4(_mm512_insertf32x4(_mm512_castps128_ps512(one(0)), one(1), 1), one(2), 2),
                                  one(3), 3);
    }
    const __m512 a = _mm512_unpacklo_ps(r[0], r[1]), b = _mm512_unpackhi_ps(r[0], r[1]), c = _mm512_unpacklo_ps(r[2], r[3]),
                 d = _mm512_unpackhi_ps(r[2], r[3]);
    return Cubics{{(vf)_mm512_shuffle_ps(a, c, 0x44), (vf)_mm512_shuffle_ps(a, c, 0xee), (vf)_mm512_shuffle_ps(b, d, 0x44),
                   (vf)_mm512_shuffle_ps(b, d, 0xee)}};
}
#elif defined(__AVX2__)
ANYMAX_INLINE Cubics cubics_at(const float *cells, vi cell) {
    alignas(32) uint32_t at[8];
    _mm256_store_si256((__m256i *)at, (__m256i)cell);
    __m256 r[4];
    for (int j = 0; j < 4; j++)
        r[j] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(cells + at[j])), _mm_loadu_ps(cells + at[4 + j]), 1);
    const __m256 a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]), c = _mm256_unpacklo_ps(r[2], r[3]),
                 d = _mm256_unpackhi_ps(r[2], r[3]);
    return Cubics{{(vf)_mm256_shuffle_ps(a, c, 0x44), (vf)_mm256_shuffle_ps(a, c, 0xee), (vf)_mm256_shuffle_ps(b, d, 0x44),
                   (vf)_mm256_shuffle_ps(b, d, 0xee)}};
}
#else
ANYMAX_INLINE Cubics cubics_at(const float *cells, vi cell) {
    constexpr int64_t W = width<float>;
    float to[4][W];
    for (int64_t i = 0; i < W; i++)
        for (int j = 0; j < 4; j++) to[j][i] = cells[cell[i] + j];
    return Cubics{{load(to[0]), load(to[1]), load(to[2]), load(to[3])}};
}
#endif

// Cells are as wide as a share of their place: the upper bits of a float are the number of its cell, the lower ones its place
// in it.
struct Table {
    const float *cells;
    int32_t shift, first;
    float low, high, below, above, steps;

    explicit Table(const anymax_table &t)
        : cells(t.cells),
          shift(t.shift),
          first((int32_t)(bits_as<uint32_t>(t.low) >> t.shift)),
          low(t.low),
          high(t.high),
          below(t.below),
          above(t.above),
          steps((float)(1 << (23 - t.shift))) {}

    // The value and the derivative of the cubic at v, which is clipped to where there are cells.
    struct Found {
        vf value, rate;
    };
    ANYMAX_INLINE Found at(vf v) const {
        const vi b = (vi)smaller(larger(v, all<vf>(low)), all<vf>(bits_as<float>(bits_as<uint32_t>(high) - 1)));
        const vf u = __builtin_convertvector(b & all_of((1 << shift) - 1), vf) * (1.0f / (float)(1 << shift));
        const Cubics k = cubics_at(cells, ((b >> shift) - first) * 4);
        const vf octave = (vf)(all_of(0x7f000000) - (b & all_of(0x7f800000)));  // 2^-e of a number from 2^e on
        return Found{((k.c[3] * u + k.c[2]) * u + k.c[1]) * u + k.c[0],
                     ((3.0f * k.c[3] * u + 2.0f * k.c[2]) * u + k.c[1]) * (octave * steps)};
    }

  private:
    ANYMAX_INLINE static vi all_of(int32_t i) { return i - vi{}; }
};

}  // namespace ANYMAX_UNIT
