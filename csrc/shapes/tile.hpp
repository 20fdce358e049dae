// Short rows: one row a lane. A tile of as many rows as a vector has lanes is turned, solved in step, and turned back.
#pragma once

#include "links/curve.hpp"
#include "shapes/dense.hpp"
#include "core/families.hpp"

namespace ANYMAX_UNIT {

template <class C>
struct Tile {
    vec<C> v[TILE_MOST];
    vec<C> high;
    ints<C> sound, any;
};

template <class C>
ANYMAX_INLINE void prepare(Tile<C> &t, int64_t n) {
    vec<C> high = splat(-infinity<C>);
    ints<C> sound = high < infinity<C>;
    for (int64_t i = 0; i < n; i++) {
        high = larger(high, t.v[i]);
        sound &= t.v[i] < infinity<C>;
    }
    t.any = high > -infinity<C>;
    t.sound = sound;
    t.high = (t.any & sound) ? high : vec<C>{};
    for (int64_t i = 0; i < n; i++) t.v[i] = (sound ? t.v[i] : vec<C>{}) - t.high;
}

template <class C>
ANYMAX_INLINE void conclude(Tile<C> &t, int64_t n) {
    if (bits(~t.sound))
        for (int64_t i = 0; i < n; i++) t.v[i] = t.sound ? t.v[i] : splat(not_a_number<C>);
}

template <class C>
ANYMAX_INLINE void normalise(Tile<C> &t, int64_t n, vec<C> z) {
    vec<C> scale = C(1) / (z > vec<C>{} ? z : splat(C(1)));
    for (int64_t i = 0; i < n; i++) t.v[i] = t.v[i] * scale;
}

template <class C>
ANYMAX_INLINE void exponentials(Tile<C> &t, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) exp_below<4>(t.v + i);
    for (; i < n; i++) exp_below<1>(t.v + i);
}

template <class C>
inline void tile_softmax(Tile<C> &t, int64_t n) {
    prepare(t, n);
    vec<C> z{};
    exponentials(t, n);
    for (int64_t i = 0; i < n; i++) z += t.v[i];
    normalise(t, n, z);
    conclude(t, n);
}

template <class C>
inline void tile_largest(Tile<C> &t, int64_t n, int64_t k) {
    if (k > n) k = n;
    ints<C> keep[TILE_MOST];  // of the scores themselves: differences from the largest may round to ties
    for (int64_t i = 0; i < n; i++) {
        ints<C> before{};
        for (int64_t j = 0; j < i; j++) before += t.v[j] >= t.v[i];
        for (int64_t j = i + 1; j < n; j++) before += t.v[j] > t.v[i];
        keep[i] = -before < (typename lanes_of<C>::integer)k;
    }
    prepare(t, n);
    vec<C> z{};
    exponentials(t, n);
    for (int64_t i = 0; i < n; i++) {
        t.v[i] = keep[i] ? t.v[i] : vec<C>{};
        z += t.v[i];
    }
    normalise(t, n, z);
    conclude(t, n);
}

// One more if v >= middle; else the largest below it so far.
template <class V>
ANYMAX_INLINE void count_step(V v, V middle, V &count, V &under) {
    const auto m = v >= middle;
    count = count + (m ? all<V>(1) : V{});
    under = larger(under, m ? under : v);
}
#if defined(__AVX512F__)
ANYMAX_INLINE void count_step(vf v, vf middle, vf &count, vf &under) {
    const __mmask16 m = _mm512_cmp_ps_mask((__m512)v, (__m512)middle, _CMP_GE_OQ);
    count = (vf)_mm512_mask_add_ps((__m512)count, m, (__m512)count, _mm512_set1_ps(1.0f));
    under = (vf)_mm512_mask_max_ps((__m512)under, (__mmask16)~m, (__m512)under, (__m512)v);
}
#endif

// The level t of each lane for which `want` of v (n, in eights) are >= t; where there is none within `turns` turns (ties), `low` is the best that has
// more. Levels are guessed until at most three entries are missing; those are taken one by one, each as the largest below the last. The guess is where
// the logarithm of the count would be that of `want` on a straight line (log(a / b) as 2 (a - b) / (a + b)), for counts fall off like that in a tail;
// an end of the bracket that stays while the other one moves twice counts half.
template <class C>
ANYMAX_INLINE ints<C> lanes_count(const vec<C> *v, int64_t n, vec<C> want, vec<C> &low, vec<C> at_low, vec<C> high, int turns) {
    vec<C> at_high = splat(C(1)), below = high, less_low = splat(C(1)), less_high = less_low;
    const ints<C> never = ~(low < high);
    ints<C> found = at_low == want, known{}, raised{};
    for (int turn = 0; turn < turns && !every<C>(found | never); turn++) {
        const vec<C> from = at_low + C(0.75), to = at_high - C(0.25);
        const vec<C> a = (from - want) * (want + to) * less_low, b = (want - to) * (from + want) * less_high;
        const vec<C> part = turn > 4 && turn % 4 == 3 ? splat(C(0.5)) : a / (a + b);
        vec<C> middle = larger(low + (high - low) * part, low);
        middle = (known & (at_high >= want - C(3))) ? below : middle;
        vec<C> s{}, t{}, under_s = low, under_t = low;
        for (int64_t i = 0; i < n; i += 8)
            for (int64_t j = 0; j < 8; j += 2) {
                count_step(v[i + j], middle, s, under_s);
                count_step(v[i + j + 1], middle, t, under_t);
            }
        const vec<C> count = s + t;
        const ints<C> go = ~(found | never), up = go & (count >= want), down = go & ~up;
        less_high = (up & raised) ? less_high * C(0.5) : down ? splat(C(1)) : less_high;
        less_low = (down & known & ~raised) ? less_low * C(0.5) : up ? splat(C(1)) : less_low;
        low = up ? middle : low, at_low = up ? count : at_low;
        high = down ? middle : high, at_high = down ? count : at_high;
        below = down ? larger(under_s, under_t) : below;
        known |= down, raised = (raised | up) & ~down;
        found |= go & (count == want);
    }
    return found;
}

// Softmax over the entries of v (n, in eights) from `low` on, in their place; 0 for the others.
template <class C>
ANYMAX_INLINE void lanes_softmax(vec<C> *v, int64_t n, vec<C> low, vec<C> high) {
    vec<C> z{};
    for (int64_t i = 0; i < n;) {
        vec<C> part{};  // sums of sums: one long one would lose what is small beside the largest
        for (const int64_t end = i + 32 < n ? i + 32 : n; i < end; i += 4) {
            vec<C> e[4];
            ints<C> keep[4];
            for (int j = 0; j < 4; j++) keep[j] = v[i + j] >= low, e[j] = keep[j] ? v[i + j] - high : splat(-infinity<C>);
            exp_below<4>(e);
            for (int j = 0; j < 4; j++) v[i + j] = keep[j] ? e[j] : vec<C>{};
            part += (v[i] + v[i + 1]) + (v[i + 2] + v[i + 3]);
        }
        z += part;
    }
    const vec<C> scale = C(1) / z;
    for (int64_t i = 0; i < n; i++) v[i] = v[i] * scale;
}

// The k largest of longer rows by counting. One bit a lane, 0 where ties or masked entries want another way: what becomes of a row does not depend
// on its neighbours.
template <class C>
inline uint32_t tile_count(Tile<C> &t, int64_t n, int64_t k) {
    prepare(t, n);
    vec<C> low = splat(infinity<C>);
    for (int64_t i = 0; i < n; i++) low = smaller(low, t.v[i]);
    const ints<C> never = (low == -infinity<C>) | ~t.sound | ~t.any;
    low = never ? vec<C>{} : low;
    const int64_t whole = (n + 7) & ~(int64_t)7;
    for (int64_t i = n; i < whole; i++) t.v[i] = splat(-infinity<C>);
    const ints<C> found = lanes_count<C>(t.v, whole, splat((C)k), low, splat((C)n), vec<C>{}, 40) & ~never;
    if (bits(found)) lanes_softmax<C>(t.v, whole, low, vec<C>{});
    return bits(found);
}

template <class C, int R>
struct TileSums {
    vec<C> s0, s1;
};

template <class C, int R>
ANYMAX_INLINE TileSums<C, R> tile_sums(const vec<C> *v, int64_t n, vec<C> level) {
    TileSums<C, R> s{};
    int64_t i = 0;
    auto term = [&](vec<C> y, vec<C> &s0, vec<C> &s1) {
        vec<C> u = larger(y * C(Power<R>::slope) + level, vec<C>{});
        vec<C> rate = R == 1 ? (u > vec<C>{} ? splat(C(1)) : vec<C>{}) : u;
        for (int r = 2; r < R; r++) rate = rate * u;
        s0 += R == 1 ? u : rate * u;
        s1 += rate;
    };
    for (; i + 8 <= n; i += 8) {  // sums of eight, then the sum of them: the rounding of one long sum would show
        vec<C> a0{}, a1{}, b0{}, b1{};
        for (int64_t j = 0; j < 8; j += 2) {
            term(v[i + j], a0, a1);
            term(v[i + j + 1], b0, b1);
        }
        s.s0 += a0 + b0, s.s1 += a1 + b1;
    }
    for (; i < n; i++) term(v[i], s.s0, s.s1);
    return s;
}

template <class C, int R>
ANYMAX_INLINE vec<C> tile_fall(const TileSums<C, R> &s) {
    return (R == 2 ? (s.s0 - root2(s.s0)) : (s.s0 - C(1)) * C(Power<R>::slope)) / s.s1;
}

// A level that is surely not too low, from the maxima of disjoint sets of a row's entries.
template <class C, int R>
ANYMAX_INLINE vec<C> tile_level(const vec<C> *cell, int64_t cells, int turns) {
    vec<C> level = splat(C(1));
    for (int turn = 0; turn < turns; turn++) {
        vec<C> fall = tile_fall(tile_sums<C, R>(cell, cells, level));
        level = fall > vec<C>{} ? level - fall : level;
    }
    return smaller(level * (C(1) + (sizeof(C) == 4 ? C(1.2e-6) : C(2.4e-15))), splat(C(1)));
}

// From such a level to the row's, but for `lost`, which is made good to first order in the result.
template <class C, int R>
ANYMAX_INLINE void tile_root(const vec<C> *v, int64_t n, vec<C> &level, vec<C> &lost) {
    const C fine = R == 1 ? (sizeof(C) == 4 ? C(1.5e-7) : C(3e-16)) : sizeof(C) == 4 ? C(5e-5) : C(1e-8);
    TileSums<C, R> s{};
    for (int turn = 0; turn < 60; turn++) {
        s = tile_sums<C, R>(v, n, level);
        vec<C> fall = tile_fall(s);
        ints<C> go = fall > level * fine;
        if (!bits(go)) break;
        level = go ? level - fall : level;
    }
    lost = (s.s0 - C(1)) / s.s1;
}

template <class C, int R>
ANYMAX_INLINE vec<C> power_value(vec<C> y, vec<C> level, vec<C> lost) {
    vec<C> u = larger(y * C(Power<R>::slope) + level, vec<C>{});
    vec<C> rate = splat(C(1));
    for (int r = 1; r < R; r++) rate = rate * u;
    vec<C> p = larger(rate * (u - lost), vec<C>{});
    return R == 1 ? (u > vec<C>{} ? p : vec<C>{}) : p;
}

// The lanes of a vector as vectors of doubles.
ANYMAX_INLINE vd part(vf v, int h) { return h ? high(v) : low(v); }
ANYMAX_INLINE vd part(vd v, int) { return v; }

// Of the lanes of part h the losses for the class with the score `aim`, sum p (x - aim) less Omega, and tau: in doubles, from the level that was found.
// p goes to every vector of `to`, in the type of the scores, if that is not NULL; u has room for as many.
template <class C, int R>
inline void power_loss(const vec<C> *x, int64_t n, vec<C> high, vec<C> level, vec<C> aim, int h, vd *u, double *value, double *tau, C *to) {
    const vd top_ = part(high, h), at = part(level, h), target = part(aim, h), one = all<vd>(1.0);
    vd s0{}, s1{}, sum{};
    for (int64_t i = 0; i < n; i++) {
        u[i] = larger((part(x[i], h) - top_) * Power<R>::slope + at, vd{});
        s0 += R == 1 ? u[i] : u[i] * u[i];
        s1 += R == 1 ? (u[i] > vd{} ? one : vd{}) : u[i];
    }
    const vd lost = (s0 - 1.0) / s1;
    for (int64_t i = 0; i < n; i++) {
        const vd rate = R == 1 ? (u[i] > vd{} ? one : vd{}) : u[i], p = larger(rate * (u[i] - lost), vd{});
        const vd own = R == 1 ? 0.5 * (1.0 - p) : (1.0 - root2(p)) * (4.0 / 3.0);  // -Omega(p) / p
        sum += p > vd{} ? p * ((part(x[i], h) - target) + own) : vd{};
        if (to) store_narrow(to + i * width<C>, p);
    }
    store(value + h * width<double>, target == -inf64 ? all<vd>(inf64) : larger(sum, vd{}));
    store(tau + h * width<double>, top_ - (at - lost / R) * R);
}

// Maxima of eight entries each, one after another.
template <class C>
ANYMAX_INLINE int64_t tile_cells(const Tile<C> &t, int64_t n, vec<C> *cell) {
    int64_t cells = 0;
    for (int64_t i = 0; i < n; i += 8) {
        vec<C> m = t.v[i];
        for (int64_t j = i + 1; j < i + 8 && j < n; j++) m = larger(m, t.v[j]);
        cell[cells++] = m;
    }
    return cells;
}

template <class C, int R>
ANYMAX_INLINE vec<C> first_level(const Tile<C> &t, int64_t n) {
    if (n <= 32) return splat(C(1));
    vec<C> cell[TILE_MOST / 8];
    const int64_t cells = tile_cells(t, n, cell);
    return tile_level<C, R>(cell, cells, 3);
}

template <class C, int R>
inline void tile_power(Tile<C> &t, int64_t n) {
    prepare(t, n);
    vec<C> level = first_level<C, R>(t, n), lost;
    tile_root<C, R>(t.v, n, level, lost);
    for (int64_t i = 0; i < n; i++) {
        vec<C> p = power_value<C, R>(t.v[i], level, lost);
        t.v[i] = t.any ? p : vec<C>{};
    }
    conclude(t, n);
}

// -- entmax of any alpha, normmax ------------------------------------------------------------------------------------------------------

template <class V>
struct CurveSums {
    V s0, s1;
};
ANYMAX_INLINE CurveSums<vf> curve_lanes(const Curve &curve, const vf *v, int64_t n, vf level) {
    const vf c = splat((float)curve.slope);
    CurveSums<vf> s{};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vf u[4], rate[4];
        for (int j = 0; j < 4; j++) rate[j] = u[j] = larger(v[i + j] * c + level, vf{});
        curve.rates<4>(rate);
        vf s0{}, s1{};
        for (int j = 0; j < 4; j++) s0 += u[j] * rate[j], s1 += rate[j];
        s.s0 += s0, s.s1 += s1;
    }
    for (; i < n; i++) {
        const vf u = larger(v[i] * c + level, vf{});
        vf rate = u;
        curve.rates<1>(&rate);
        s.s0 += u * rate, s.s1 += rate;
    }
    return s;
}
// In doubles, of half the lanes: x less its maximum would be rounded in floats.
ANYMAX_INLINE CurveSums<vd> curve_lanes(const Curve &curve, const vf *x, vd top_, int64_t n, bool upper, vd level, vd *value, vd *rate) {
    CurveSums<vd> s{};
    for (int64_t i = 0; i < n; i += 2) {
        vd u[2];
        for (int j = 0; j < 2; j++)
            rate[i + j] = u[j] = i + j < n ? larger(((upper ? high(x[i + j]) : low(x[i + j])) - top_) * curve.slope + level, vd{}) : vd{};
        curve.rates<2>(rate + i);
        value[i] = u[0] * rate[i], value[i + 1] = u[1] * rate[i + 1];
        s.s0 += value[i] + value[i + 1], s.s1 += rate[i] + rate[i + 1];
    }
    return s;
}

// The level of each lane, as near as floats come, from one that is not too low. A lane that is there stays, whatever the others do.
ANYMAX_INLINE vf curve_level(const Curve &curve, const vf *v, int64_t n, vf level, int turns) {
    vi go = level == level;
    for (int turn = 0; turn < turns && bits(go); turn++) {
        const CurveSums<vf> s = curve_lanes(curve, v, n, level);
        const vf fall = curve.steps(s.s0, s.s1);
        go &= (fall > vf{}) & (fall < level);
        level = go ? level - fall : level;
        go &= fall * (float)curve.r > level * 3e-4f;  // the next step is its square
    }
    return level;
}

// From such levels to the rows', in doubles, of half the lanes: the terms there, and what makes p of them (curve_value).
ANYMAX_INLINE void curve_finish(const Curve &curve, const vf *x, vd top_, int64_t n, bool upper, vd level, Finish finish, vd *value, vd *rate, vd &lost,
                                vd &share) {
    const double enough = finish == NORMMAX_FINISH ? 1e-11 : ENOUGH;
    CurveSums<vd> s{};
    for (int turn = 0; turn < 40; turn++) {
        s = curve_lanes(curve, x, top_, n, upper, level, value, rate);
        const vd next = level - curve.steps(s.s0, s.s1);
        const vl go = (absolute(s.s0 - 1.0) > enough) & (next > 0.0) & (next != level);
        if (!bits(go)) break;
        level = go ? next : level;
    }
    lost = (s.s0 - 1.0) / s.s1, share = 1.0 / s.s1;
}
ANYMAX_INLINE vd curve_value(Finish finish, vd value, vd rate, vd lost, vd share) {
    return finish == NORMMAX_FINISH ? rate * share : larger(value - rate * lost, vd{});
}

// A link of entmax below alpha = 2, or normmax, of floats.
inline Curve curve_of(Link link, double param) {
    return link == NORM ? Curve(1.0, param / (param - 1.0)) : Curve(param - 1.0, 1.0 / (param - 1.0));
}
inline Finish finish_of(Link link) { return link == NORM ? NORMMAX_FINISH : ENTMAX_FINISH; }

// Apart from the others, which pay for its registers where it is inlined.
__attribute__((noinline)) inline void tile_curve(Tile<float> &t, int64_t n, const Curve &curve, Finish finish) {
    vf x[TILE_MOST];
    memcpy(x, t.v, (size_t)n * sizeof(vf));
    prepare(t, n);
    vf level = splat(1.0f);
    if (n > 32) {
        vf cell[TILE_MOST / 8];
        const int64_t cells = tile_cells(t, n, cell);
        level = smaller(curve_level(curve, cell, cells, level, 3) * (1.0f + 2e-5f), splat(1.0f));
    }
    level = curve_level(curve, t.v, n, level, 40);
    vd value[2][TILE_MOST + 1], rate[TILE_MOST + 1];
    for (int upper = 0; upper < 2; upper++) {
        const vd top_ = upper ? high(t.high) : low(t.high);
        vd lost, share;
        curve_finish(curve, x, top_, n, upper != 0, upper ? high(level) : low(level), finish, value[upper], rate, lost, share);
        for (int64_t i = 0; i < n; i++) value[upper][i] = curve_value(finish, value[upper][i], rate[i], lost, share);
    }
    for (int64_t i = 0; i < n; i++) t.v[i] = t.any ? join(value[0][i], value[1][i]) : vf{};
    conclude(t, n);
}

// Rows one a lane, and back. Eight by eight floats are turned in registers where the compiler has the means; elsewhere one by one.
template <class C, class T>
ANYMAX_INLINE void gather_lanes(C *to, const T *x, int64_t rows, int64_t n, int64_t stride) {
    constexpr int64_t W = width<C>;
    for (int64_t i = 0; rows < W && i < n; i++) store(to + i * W, vec<C>{});
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++) to[i * W + r] = (C)x[r * stride + i];
}
template <class C, class T>
ANYMAX_INLINE void scatter_lanes(const C *from, T *out, int64_t rows, int64_t n, int64_t stride) {
    constexpr int64_t W = width<C>;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++) out[r * stride + i] = (T)from[i * W + r];
}

#if defined(__AVX2__)
ANYMAX_INLINE void turn8(float *to, int64_t to_step, const float *from, int64_t from_step) {
    __m256 r[8];
    for (int64_t j = 0; j < 8; j++) r[j] = _mm256_loadu_ps(from + j * from_step);
    __m256 a0 = _mm256_unpacklo_ps(r[0], r[1]), a1 = _mm256_unpackhi_ps(r[0], r[1]), a2 = _mm256_unpacklo_ps(r[2], r[3]), a3 = _mm256_unpackhi_ps(r[2], r[3]);
    __m256 a4 = _mm256_unpacklo_ps(r[4], r[5]), a5 = _mm256_unpackhi_ps(r[4], r[5]), a6 = _mm256_unpacklo_ps(r[6], r[7]), a7 = _mm256_unpackhi_ps(r[6], r[7]);
    __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xee), b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xee);
    __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xee), b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xee);
    r[0] = _mm256_permute2f128_ps(b0, b4, 0x20), r[1] = _mm256_permute2f128_ps(b1, b5, 0x20), r[2] = _mm256_permute2f128_ps(b2, b6, 0x20), r[3] = _mm256_permute2f128_ps(b3, b7, 0x20);
    r[4] = _mm256_permute2f128_ps(b0, b4, 0x31), r[5] = _mm256_permute2f128_ps(b1, b5, 0x31), r[6] = _mm256_permute2f128_ps(b2, b6, 0x31), r[7] = _mm256_permute2f128_ps(b3, b7, 0x31);
    for (int64_t j = 0; j < 8; j++) _mm256_storeu_ps(to + j * to_step, r[j]);
}
ANYMAX_INLINE void gather_lanes(float *to, const float *x, int64_t rows, int64_t n, int64_t stride) {
    constexpr int64_t W = width<float>;
    if (rows < W) return gather_lanes<float, float>(to, x, rows, n, stride);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int64_t half = 0; half < W; half += 8) turn8(to + i * W + half, W, x + half * stride + i, stride);
    for (; i < n; i++)
        for (int64_t r = 0; r < W; r++) to[i * W + r] = x[r * stride + i];
}
ANYMAX_INLINE void scatter_lanes(const float *from, float *out, int64_t rows, int64_t n, int64_t stride) {
    constexpr int64_t W = width<float>;
    if (rows < W) return scatter_lanes<float, float>(from, out, rows, n, stride);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int64_t half = 0; half < W; half += 8) turn8(out + half * stride + i, stride, from + i * W + half, W);
    for (; i < n; i++)
        for (int64_t r = 0; r < W; r++) out[r * stride + i] = from[i * W + r];
}
#endif

// Of as many vectors as one has lanes, what `join` makes of the lanes of each, one a lane.
template <class F>
ANYMAX_INLINE vf across(const vf *v, F join) {
    constexpr int64_t W = width<float>;
    alignas(64) vf turned[W];
    gather_lanes((float *)turned, (const float *)v, W, W, W);
    for (int64_t half = W / 2; half; half /= 2)
        for (int64_t j = 0; j < half; j++) turned[j] = join(turned[j], turned[j + half]);
    return turned[0];
}
ANYMAX_INLINE vf sums(const vf *v) {
    return across(v, [](vf a, vf b) { return a + b; });
}

// Sums of clip(x - tau, 0, 1): what lies between, how many that are, and how many are 1.
template <class V>
struct ClipSums {
    V part, inside, full;
};
template <class V>
ANYMAX_INLINE void clip_step(V v, ClipSums<V> &s) {
    const V one = all<V>(scalar<V>(1));
    const auto full = v >= one, some = v > V{};
    s.part += some ? (full ? V{} : v) : V{};
    s.inside += some ? one : V{};
    s.full += full ? one : V{};
}
#if defined(__AVX512F__)
ANYMAX_INLINE void clip_step(vf v, ClipSums<vf> &s) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __mmask16 some = _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_GT_OQ), full = _mm512_cmp_ps_mask((__m512)v, one, _CMP_GE_OQ);
    s.part = (vf)_mm512_mask_add_ps((__m512)s.part, _mm512_kandn(full, some), (__m512)s.part, (__m512)v);
    s.inside = (vf)_mm512_mask_add_ps((__m512)s.inside, some, (__m512)s.inside, one);
    s.full = (vf)_mm512_mask_add_ps((__m512)s.full, full, (__m512)s.full, one);
}
ANYMAX_INLINE void clip_step(vd v, ClipSums<vd> &s) {
    const __m512d one = _mm512_set1_pd(1.0);
    const __mmask8 some = _mm512_cmp_pd_mask((__m512d)v, _mm512_setzero_pd(), _CMP_GT_OQ), full = _mm512_cmp_pd_mask((__m512d)v, one, _CMP_GE_OQ);
    s.part = (vd)_mm512_mask_add_pd((__m512d)s.part, (__mmask8)(some & ~full), (__m512d)s.part, (__m512d)v);
    s.inside = (vd)_mm512_mask_add_pd((__m512d)s.inside, some, (__m512d)s.inside, one);
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

// Newton's steps within a bracket [low, high] of tau, until no lane moves by more than `fine`, or no sum is off by more.
template <class V, class F>
ANYMAX_INLINE ClipSums<V> clip_root(int64_t n, V &tau, V low, V high, V k, scalar<V> fine, int turns, F x) {
    ClipSums<V> s{};
    for (int turn = 0; turn < turns; turn++) {
        s = clip_sums<V>(n, tau, x);
        const V excess = (s.part - k) + s.full;
        low = excess > V{} ? tau : low;
        high = excess < V{} ? tau : high;
        const V half = low + (high - low) * scalar<V>(0.5);
        V next = s.inside > V{} ? tau + excess / larger(s.inside, all<V>(scalar<V>(1))) : half;
        next = ((next > low) & (next < high)) ? next : half;
        const auto go = (absolute(excess) > k * fine) & (next != tau);
        if (!bits(go)) break;
        tau = go ? next : tau;
    }
    return s;
}

// The shares of a budget of k among scores one row a lane: of tau in floats, and then in doubles, all relative to an origin near to it. It lies between
// the edge and the largest score.
constexpr float FAR = 1e4f;  // scores so far apart are for another way: floats say too little of them
ANYMAX_INLINE vd share(vd t, vd lost) {
    return ((t > vd{}) & (t < 1.0)) ? smaller(larger(t - lost, vd{}), all<vd>(1.0)) : t > vd{} ? all<vd>(1.0) : vd{};
}
ANYMAX_INLINE vd left_over(const ClipSums<vd> &s, double k) { return s.inside > vd{} ? ((s.part - k) + s.full) / larger(s.inside, all<vd>(1.0)) : vd{}; }
inline void share_out(const vf *v, vf *out, int64_t n, vf origin, vf edge, vf top, double k) {
    vf tau = splat(-0.5f);
    clip_root<vf>(n, tau, edge - origin, top - origin, splat((float)k), 1e-5f, 24, [&](int64_t i) ANYMAX_EACH { return v[i] - origin; });
    for (int upper = 0; upper < 2; upper++) {
        auto half = [&](vf u) { return upper ? high(u) : low(u); };
        auto x = [&](int64_t i) ANYMAX_EACH { return half(v[i]) - half(origin); };  // exact
        vd at = half(tau);
        const vd lost = left_over(clip_root<vd>(n, at, half(edge) - half(origin), half(top) - half(origin), all<vd>(k), 1e-12, 100, x), k);
        for (int64_t i = 0; i < n; i++) store_narrow((float *)(out + i) + upper * width<float> / 2, share(x(i) - at, lost));
    }
}
inline void share_out(const vd *v, vd *out, int64_t n, vd origin, vd edge, vd top, double k) {
    vd at = all<vd>(-0.5);
    clip_root<vd>(n, at, edge - origin, top - origin, all<vd>(k), 1e-12, 100, [&](int64_t i) ANYMAX_EACH { return v[i] - origin; });
    const vd nearer = origin + at;  // what is rounded of differences from there is less than a share's last digit
    auto x = [&](int64_t i) ANYMAX_EACH { return v[i] - nearer; };
    at = at - (nearer - origin);  // nothing, but for an origin whose last digit is more than that
    const vd lost = left_over(clip_root<vd>(n, at, edge - nearer, top - nearer, all<vd>(k), 1e-15, 20, x), k);
    for (int64_t i = 0; i < n; i++) out[i] = share(x(i) - at, lost);
}

// One bit a lane, as above.
template <class C>
inline uint32_t tile_budget(Tile<C> &t, int64_t n, double k) {
    vec<C> low = t.v[0], high = low;
    ints<C> sound = low == low;
    for (int64_t i = 0; i < n; i++) {
        sound &= (t.v[i] < infinity<C>) & (t.v[i] > -infinity<C>);
        low = smaller(low, t.v[i]), high = larger(high, t.v[i]);
    }
    sound &= high - low < (C)FAR;
    const int64_t whole = (n + 7) & ~(int64_t)7;
    for (int64_t i = 0; i < n; i++) t.v[i] = sound ? t.v[i] : vec<C>{};
    for (int64_t i = n; i < whole; i++) t.v[i] = splat(-infinity<C>);
    low = sound ? low : vec<C>{}, high = sound ? high : vec<C>{};
    share_out(t.v, t.v, whole, low, low - C(1) - (absolute(low) + C(1)) * (sizeof(C) == 4 ? C(1e-6) : C(1e-14)), high, k);
    return bits(sound);
}

// What the rows of a tile become; one bit a lane, 0 where the row is to be served by itself.
template <class C>
inline uint32_t tile_map(Tile<C> &t, Link link, double param, int64_t n) {
    switch (link) {
        case EXPONENTIAL: tile_softmax(t, n); break;
        case POWER1: tile_power<C, 1>(t, n); break;
        case POWER2: tile_power<C, 2>(t, n); break;
        case CAPPED: return tile_budget(t, n, param);
        case LARGEST:
            if (n > TILE_SQUARE) return tile_count(t, n, (int64_t)param);
            tile_largest(t, n, (int64_t)param);
            break;
        default:
            if constexpr (sizeof(C) == 4) tile_curve(t, n, curve_of(link, param), finish_of(link));
    }
    return (1u << width<C>) - 1;
}

}  // namespace ANYMAX_UNIT
