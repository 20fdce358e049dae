// Budget: p = clip(x - tau, 0, 1), which sums to k.
#pragma once

#include "core/packing.hpp"

namespace ANYMAX_UNIT {

// Differences of scores, and thresholds, are rounded: what differs by less from a share of 0 or 1, in doubles, is one of these.
constexpr double HARDLY_ANY = 0x1p-51, ALMOST_ALL = 1.0 - 0x1p-52;

// Sums of clip(x - tau, 0, 1): what lies between, how many that are, and how many are 1.
template <class V>
struct ClipSums {
    V part, inside, full;
    // What they have too much. The full ones go off k first: beside their number the digits of a small part would be lost.
    ANYMAX_INLINE V excess(V k) const { return part + (full - k); }
};

// What each share between 0 and 1 has too much. Where there are k full ones, or with those between k, the k largest scores lie
// 1 and more above the others: any tau from the next score to 1 below them is right, the search ends beside such a tau, and
// those between are 0, or 1, but for that.
ANYMAX_INLINE vd left_over(const ClipSums<vd> &s, double k) {
    const vd each = s.inside > vd{} ? s.excess(all<vd>(k)) / larger(s.inside, all<vd>(1.0)) : vd{};
    return s.full == k ? all<vd>(inf64) : s.full + s.inside == k ? all<vd>(-inf64) : each;
}
ANYMAX_INLINE vd share(vd t, vd lost) {
    const vd least = larger(lost + HARDLY_ANY, vd{});
    return t >= ALMOST_ALL ? all<vd>(1.0) : t > least ? smaller(t - lost, all<vd>(1.0)) : vd{};
}

// -- one row, in doubles

// Of y in whole vectors the level in [0, 1] where clip(y + level, 0, 1) sums to k, but for `lost` of the terms that lie
// between.
struct Filled {
    double level;
    vd lost;
};
inline Filled budget_level(const double *y, int64_t count, double k) {
    // a level of 1 itself is that of a row whose k largest scores lie 1 and more above the others
    double low = 0.0, high = 1.0 + 0x1p-52, level = 0.5;
    ClipSums<double> s{};
    for (int turn = 0; turn < 200; turn++) {
        vd part{};
        vl in_lanes{};
        int64_t full = 0, inside = 0;
        for (int64_t i = 0; i < count;) {  // sums of blocks: a long row rounds no more than a short one
            vd block{};
            for (const int64_t end = i + 64 * width<double> < count ? i + 64 * width<double> : count; i < end;
                 i += width<double>) {
                vd t = load(y + i) + level;
                vl in = (t > vd{}) & (t < ALMOST_ALL), whole = t >= ALMOST_ALL;
                block += in ? t : vd{};
                in_lanes += in;
                full += __builtin_popcount(bits(whole));
            }
            part += block;
        }
        for (int64_t j = 0; j < width<double>; j++) inside -= in_lanes[j];
        s = ClipSums<double>{sum(part), (double)inside, (double)full};
        const double excess = s.excess(k);
        if (excess > 0.0)
            high = level;
        else
            low = level;
        double next = inside ? level - excess / s.inside : 0.5 * (low + high);
        if (fabs(excess) <= k * 0x1p-53 || next == level) break;  // the rest is `lost`
        if (!(next > low && next < high)) next = 0.5 * (low + high);
        if (!(next > low && next < high)) break;
        level = next;
    }
    return Filled{level, left_over(ClipSums<vd>{all<vd>(s.part), all<vd>(s.inside), all<vd>(s.full)}, k)};
}

// -- rows one a lane

template <class V>
ANYMAX_INLINE void clip_step(V v, ClipSums<V> &s) {
    const V one = all<V>(scalar<V>(1));
    const auto full = v >= scalar<V>(sizeof(scalar<V>) == 4 ? 1.0 : ALMOST_ALL), above = v > V{};
    s.part += above ? (full ? V{} : v) : V{};
    s.inside += above ? one : V{};
    s.full += full ? one : V{};
}
#if defined(__AVX512F__)
ANYMAX_INLINE void clip_step(vf v, ClipSums<vf> &s) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __mmask16 above = _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_GT_OQ),
                    full = _mm512_cmp_ps_mask((__m512)v, one, _CMP_GE_OQ);
    s.part = (vf)_mm512_mask_add_ps((__m512)s.part, _mm512_kandn(full, above), (__m512)s.part, (__m512)v);
    s.inside = (vf)_mm512_mask_add_ps((__m512)s.inside, above, (__m512)s.inside, one);
    s.full = (vf)_mm512_mask_add_ps((__m512)s.full, full, (__m512)s.full, one);
}
ANYMAX_INLINE void clip_step(vd v, ClipSums<vd> &s) {
    const __m512d one = _mm512_set1_pd(1.0);
    const __mmask8 above = _mm512_cmp_pd_mask((__m512d)v, _mm512_setzero_pd(), _CMP_GT_OQ);
    const __mmask8 full = _mm512_cmp_pd_mask((__m512d)v, _mm512_set1_pd(ALMOST_ALL), _CMP_GE_OQ);
    s.part = (vd)_mm512_mask_add_pd((__m512d)s.part, (__mmask8)(above & ~full), (__m512d)s.part, (__m512d)v);
    s.inside = (vd)_mm512_mask_add_pd((__m512d)s.inside, above, (__m512d)s.inside, one);
    s.full = (vd)_mm512_mask_add_pd((__m512d)s.full, full, (__m512d)s.full, one);
}
#endif
template <class V, class F>
ANYMAX_INLINE ClipSums<V> clip_sums(int64_t n, V tau, F x) {
    ClipSums<V> s{};
    for (int64_t i = 0; i < n; i += 8) {  // sums of eight: the rounding of one long sum would show
        ClipSums<V> t{}, u{};
        for (int64_t j = i; j < i + 8; j += 2) clip_step(x(j) - tau, t), clip_step(x(j + 1) - tau, u);
        s.part += t.part + u.part, s.inside += t.inside + u.inside, s.full += t.full + u.full;
    }
    s.inside = s.inside - s.full;
    return s;
}

// Newton's steps within a bracket [low, high] of tau, until no sum is off by more than `fine` of k. Where `asked` is 0 a lane
// has no row, or one that is served by itself: the others do not wait for it.
template <class V, class F>
ANYMAX_INLINE ClipSums<V> clip_root(int64_t n, V &tau, V low, V high, V k, V asked, scalar<V> fine, int turns, F x) {
    ClipSums<V> s{};
    for (int turn = 0; turn < turns; turn++) {
        s = clip_sums<V>(n, tau, x);
        const V excess = s.excess(k);
        low = excess > V{} ? tau : low;
        high = excess < V{} ? tau : high;
        const V half = low + (high - low) * scalar<V>(0.5);
        V next = s.inside > V{} ? tau + excess / larger(s.inside, all<V>(scalar<V>(1))) : half;
        next = ((next > low) & (next < high)) ? next : half;
        const auto go = (absolute(excess) > k * fine) & (next != tau) & (asked > V{});
        if (!bits(go)) break;
        tau = go ? next : tau;
    }
    return s;
}

constexpr float FLOAT_RANGE = 1e4f;  // scores further apart are solved row by row, in doubles
// The shares of a budget of k among scores one row a lane: of tau in floats, and then in doubles, all relative to an origin
// near to it. It lies between the edge and the largest score.
inline void share_out(const vf *v, vf *out, int64_t n, vf origin, vf edge, vf top, vf asked, double k) {
    vf tau = splat(-0.5f);
    clip_root<vf>(n, tau, edge - origin, top - origin, splat((float)k), asked, 1e-5f, 24,
                  [&](int64_t i) ANYMAX_EACH { return v[i] - origin; });
    for (int upper = 0; upper < 2; upper++) {
        auto half = [&](vf u) { return upper ? high(u) : low(u); };
        auto x = [&](int64_t i) ANYMAX_EACH { return half(v[i]) - half(origin); };  // exact
        vd at = half(tau);
        const vd lost = left_over(
            clip_root<vd>(n, at, half(edge) - half(origin), half(top) - half(origin), all<vd>(k), half(asked), 1e-12, 100, x),
            k);
        for (int64_t i = 0; i < n; i++) store_narrow((float *)(out + i) + upper * width<float> / 2, share(x(i) - at, lost));
    }
}
inline void share_out(const vd *v, vd *out, int64_t n, vd origin, vd edge, vd top, vd asked, double k) {
    vd at = all<vd>(-0.5);
    clip_root<vd>(n, at, edge - origin, top - origin, all<vd>(k), asked, 1e-12, 100,
                  [&](int64_t i) ANYMAX_EACH { return v[i] - origin; });
    const vd nearer = origin + at;  // what is rounded of differences from there is less than a share's last digit
    auto x = [&](int64_t i) ANYMAX_EACH { return v[i] - nearer; };
    at = at - (nearer - origin);  // nothing, but for an origin whose last digit is more than that
    const vd lost = left_over(clip_root<vd>(n, at, edge - nearer, top - nearer, all<vd>(k), asked, 1e-15, 20, x), k);
    for (int64_t i = 0; i < n; i++) out[i] = share(x(i) - at, lost);
}

}  // namespace ANYMAX_UNIT
