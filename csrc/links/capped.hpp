// Budget: p = clip(x - tau, 0, 1), which sums to k.
#pragma once

#include "links/power.hpp"

namespace ANYMAX_UNIT {

// Differences of scores, and thresholds, are rounded: what differs by less from a share of 0 or 1, in doubles, is one of these.
constexpr double HARDLY_ANY = 0x1p-51, ALMOST_ALL = 1.0 - 0x1p-52;
// The same of floats, generously.
constexpr double NEARLY_1 = 1.0 - 0x1p-20;

// Of y the level in [0, 1] where clip(y + level, 0, 1) sums to k: sparsemax's link, whose classes are full from 1 on.
struct Clip : Power<1> {
    template <class N>
    struct At {
        static constexpr int TOTALS = 3;
        static constexpr bool DEAR = false;
        template <class>
        static constexpr int AT_ONCE = 2;
        N level;
    };
    template <class N>
    ANYMAX_INLINE At<N> at(N level) const {
        return At<N>{level};
    }
};

// What each share between 0 and 1 has too much. Where there are k full ones, or with those between k, the k largest scores lie
// 1 and more above the others: any tau from the next score to 1 below them is right, the search ends beside such a tau, and
// those between are 0, or 1, but for that.
template <class N>
ANYMAX_INLINE N left_over(const Totals<N, 3> &s, double k) {
    const N one = N{} + 1.0, each = s.rate() > N{} ? s.excess(k) / larger(s.rate(), one) : N{};
    return s.full() == k ? inf64 * one : s.full() + s.rate() == k ? -inf64 * one : each;
}
ANYMAX_INLINE vd share(vd t, vd lost) {
    const vd least = larger(lost + HARDLY_ANY, vd{});
    return t >= ALMOST_ALL ? all<vd>(1.0) : t > least ? smaller(t - lost, all<vd>(1.0)) : vd{};
}
// A share below 1 stays below: at 1, to which a half would round it, a class has no gradient. `most` is `below_1` of the dtype.
ANYMAX_INLINE vd below_full(vd p, double most) { return p < NEARLY_1 ? smaller(p, all<vd>(most)) : p; }

// The shares between 0 and 1, how many they are, and how many are 1.
template <class V>
ANYMAX_INLINE void add_clipped(V v, V *s) {
    const V one = all<V>(scalar<V>(1));
    const auto full = v >= scalar<V>(sizeof(scalar<V>) == 4 ? 1.0 : ALMOST_ALL), inside = (v > V{}) & ~full;
    s[0] += inside ? v : V{};
    s[1] += inside ? one : V{};
    s[2] += full ? one : V{};
}
#if defined(__AVX512F__)
ANYMAX_INLINE void add_clipped(vf v, vf *s) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __mmask16 full = _mm512_cmp_ps_mask((__m512)v, one, _CMP_GE_OQ),
                    inside = _kandn_mask16(full, _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_GT_OQ));
    s[0] = (vf)_mm512_mask_add_ps((__m512)s[0], inside, (__m512)s[0], (__m512)v);
    s[1] = (vf)_mm512_mask_add_ps((__m512)s[1], inside, (__m512)s[1], one);
    s[2] = (vf)_mm512_mask_add_ps((__m512)s[2], full, (__m512)s[2], one);
}
ANYMAX_INLINE void add_clipped(vd v, vd *s) {
    const __m512d one = _mm512_set1_pd(1.0);
    const __mmask8 full = _mm512_cmp_pd_mask((__m512d)v, _mm512_set1_pd(ALMOST_ALL), _CMP_GE_OQ),
                   inside = _kandn_mask8(full, _mm512_cmp_pd_mask((__m512d)v, _mm512_setzero_pd(), _CMP_GT_OQ));
    s[0] = (vd)_mm512_mask_add_pd((__m512d)s[0], inside, (__m512d)s[0], (__m512d)v);
    s[1] = (vd)_mm512_mask_add_pd((__m512d)s[1], inside, (__m512d)s[1], one);
    s[2] = (vd)_mm512_mask_add_pd((__m512d)s[2], full, (__m512d)s[2], one);
}
#endif
template <int K, class N, class V, class F>
ANYMAX_INLINE void add_terms(const Clip::At<N> &at, int64_t, const V *y, Totals<V, 3> *sums, bool first, F) {
    if (first) sums[0] = sums[1] = {};
    for (int j = 0; j < K; j++) add_clipped(y[j] + broadcast<V>(at.level), sums[j & 1].of);
}

}  // namespace ANYMAX_UNIT
