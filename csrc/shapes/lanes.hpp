// Rows one a lane: counting, softmax, levels of the links.
#pragma once

#include "core/rows.hpp"
#include "links/any_power.hpp"
#include "links/capped.hpp"
#include "plan.hpp"
#include "shapes/solve.hpp"

namespace ANYMAX_UNIT {

// -- the k largest

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

// The level t of each lane for which `want` of v (n, in eights) are >= t; where there is none within `turns` turns (ties),
// `low` is the best that has more. Levels are guessed until at most three entries are missing; those are taken one by one, each
// as the largest below the last. The guess is where the logarithm of the count would be that of `want` on a straight line
// (log(a / b) as 2 (a - b) / (a + b)), for counts fall off like that in a tail; an end of the bracket that stays while the
// other one moves twice counts half.
template <class C>
ANYMAX_INLINE ints<C> lanes_count(const vec<C> *v, int64_t n, vec<C> want, vec<C> &low, vec<C> at_low, vec<C> high, int turns) {
    vec<C> at_high = splat(C(1)), below = high, less_low = splat(C(1)), less_high = less_low;
    const ints<C> never = ~(low < high);
    ints<C> found = at_low == want, known{},
            rose{};  // known: `high` has been counted, and `below` is the largest under it; rose: `low` was the last to move
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
        less_high = (up & rose) ? less_high * C(0.5) : down ? splat(C(1)) : less_high;
        less_low = (down & known & ~rose) ? less_low * C(0.5) : up ? splat(C(1)) : less_low;
        low = up ? middle : low, at_low = up ? count : at_low;
        high = down ? middle : high, at_high = down ? count : at_high;
        below = down ? larger(under_s, under_t) : below;
        known |= down, rose = (rose | up) & ~down;
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

// log sum exp(y) of each lane, where y is at most 0 and once 0 or more: log1p of the rest, which keeps the digits of a small
// one. In doubles.
template <class C, class F>
ANYMAX_INLINE void lanes_log_sum(int64_t n, F y_of, vd *out) {
    constexpr int PARTS = sizeof(C) == 4 ? 2 : 1;
    vd rest[2]{};
    vec<C> tied{};
    for (int64_t i = 0; i < n; i += 4) {
        vec<C> y[4], e[4], sum{};
        for (int64_t j = 0; j < 4; j++) y[j] = e[j] = y_of(i + j);
        exp_below<4>(e);
        for (int64_t j = 0; j < 4; j++) {
            tied += y[j] == vec<C>{} ? splat(C(1)) : vec<C>{};
            sum += y[j] == vec<C>{} ? vec<C>{} : e[j];
        }
        for (int h = 0; h < PARTS; h++) rest[h] += part(sum, h);
    }
    for (int h = 0; h < PARTS; h++) out[h] = log1p(rest[h] + (part(tied, h) - 1.0));
}

// The losses of softmax over such lanes for the classes with these scores, x = y + high, and their logsumexp.
template <class C, class F>
ANYMAX_INLINE void lanes_softmax_loss(int64_t n, F y_of, vec<C> high, vec<C> aims, double *value, double *tau) {
    vd l[2];
    lanes_log_sum<C>(n, y_of, l);
    for (int h = 0; h < (sizeof(C) == 4 ? 2 : 1); h++) {
        store(value + h * width<double>, larger((part(high, h) - part(aims, h)) + l[h], vd{}));
        store(tau + h * width<double>, part(high, h) + l[h]);
    }
}

// -- sparsemax and entmax 3/2

// A level that is surely not too low, from the maxima of disjoint sets of a row's entries.
template <class C, int R>
ANYMAX_INLINE vec<C> tile_level(const vec<C> *cell, int64_t cells) {
    const Power<R> link;
    vec<C> level = splat(C(1));
    solve(lane_view(cells, cell), link, level, Everyone(), 3, [&](const auto &s, vec<C> at) ANYMAX_EACH {
        const vec<C> fall = link.fall(s.value(), s.rate());
        return Step<vec<C>>{at - fall, fall > vec<C>{}, fall > vec<C>{}};
    });
    return smaller(level * (C(1) + (sizeof(C) == 4 ? C(1.2e-6) : C(2.4e-15))), splat(C(1)));
}

// From such a level to the row's, but for `lost`, which is made good to first order in the result.
template <class C, int R>
ANYMAX_INLINE void tile_root(const vec<C> *v, int64_t n, vec<C> &level, vec<C> &lost) {
    const Power<R> link;
    const C fine = R == 1 ? (sizeof(C) == 4 ? C(1.5e-7) : C(3e-16)) : sizeof(C) == 4 ? C(5e-5) : C(1e-8);
    const auto s = solve(lane_view(n, v), link, level, Everyone(), 60, [&](const auto &sums, vec<C> at) ANYMAX_EACH {
        const vec<C> fall = link.fall(sums.value(), sums.rate());
        return Step<vec<C>>{at - fall, fall > at * fine, fall > at * fine};
    });
    lost = (s.value() - C(1)) / s.rate();
}

template <class C, int R>
ANYMAX_INLINE vec<C> power_value(vec<C> y, vec<C> level, vec<C> lost) {
    return Power<R>::p(larger(y * C(Power<R>::slope) + level, vec<C>{}), lost, level);
}

// Of the lanes of part h the losses for the class with the score `aim`, sum p (x - aim) less Omega, and tau: in doubles, from
// the level that was found. p goes to every vector of `to`, in the type of the scores, if that is not NULL; u takes as many.
template <class C, int R>
ANYMAX_INLINE void power_loss(const vec<C> *x, int64_t n, vec<C> high, vec<C> level, vec<C> aim, int h, vd *u, double *value,
                              double *tau, C *to) {
    const vd top = part(high, h), at = part(level, h), target = part(aim, h);
    vd s0{}, s1{}, sum{};
    for (int64_t i = 0; i < n; i++) {
        u[i] = larger((part(x[i], h) - top) * Power<R>::slope + at, vd{});
        const vd rate = Power<R>::rate(u[i]);
        s0 += Power<R>::value(u[i], rate), s1 += rate;
    }
    const vd lost = (s0 - 1.0) / s1;
    for (int64_t i = 0; i < n; i++) {
        const vd p = Power<R>::p(u[i], lost, at);
        sum += p > vd{} ? p * ((part(x[i], h) - target) + Power<R>::own(p)) : vd{};
        if (to) store_narrow(to + i * width<C>, p);
    }
    store(value + h * width<double>, larger(sum, vd{}));  // infinite where the target's score is -inf
    store(tau + h * width<double>, top - (at - lost / R) * R);
}

// -- entmax of any alpha, normmax

// The level, as near as floats come, from one that is not too low.
template <class View, class N>
ANYMAX_INLINE void curve_level(const Curve &curve, const View &view, N &level, int turns) {
    solve(view, curve, level, level == level, turns, Descent<N, Curve>{curve, (Number<N>)(3e-4 / curve.r)});
}
// That of a few cells, which is surely not too low.
ANYMAX_INLINE vf curve_level_of_cells(const Curve &curve, const vf *cell, int64_t cells) {
    vf level = splat(1.0f);
    curve_level(curve, lane_view(cells, cell), level, 3);
    return smaller(level * (1.0f + 2e-5f), splat(1.0f));
}

// From such a level to the row's, in doubles: the terms there, and what makes p of them (finished).
template <class View, class N>
ANYMAX_INLINE void curve_finish(const Curve &curve, const View &view, N &level, Finish finish, vd *value, vd *rate, N &lost,
                                N &share) {
    const double enough = finish == NORMMAX_FINISH ? 1e-11 : ENOUGH;
    const auto rule = [&](const auto &s, N at) ANYMAX_EACH {
        const N next = at - curve.fall(s.value(), s.rate());
        const Mask<N> go = (absolute(s.value() - 1.0) > enough) & (next > 0.0) & (next != at);
        return Step<N>{next, go, go};
    };
    const auto s =
        solve(view, curve, level, Everyone(), 40, rule, [=](int64_t i, vd v, vd k) ANYMAX_EACH { value[i] = v, rate[i] = k; });
    lost = (s.value() - 1.0) / s.rate(), share = 1.0 / s.rate();
    level = level - lost / curve.r;
}

// -- budget

// The level of each lane, until no sum is off by more than `fine` of k. Where `asked` is 0 a lane has no row, or one that is
// served by itself.
template <class V, class F>
ANYMAX_INLINE Totals<V, 3> clip_root(int64_t n, V &level, V low, V high, double k, V asked, double fine, int turns, F y) {
    typedef scalar<V> C;
    const Clip link;
    Bracketed<V, Clip> rule{link, low, high, (C)k, (C)(k * fine), C(0)};
    return solve(lane_view<V>(n, y), link, level, asked > V{}, turns, rule);
}

constexpr float FLOAT_RANGE = 1e4f;  // scores further apart are solved row by row, in doubles
// The shares of a budget of k among scores one row a lane, all relative to an origin near to tau, which lies between the edge
// and the largest score: the level first in the type of the scores, then in doubles. `most` as in `below_full`.
template <class C>
inline void share_out(const vec<C> *v, vec<C> *out, int64_t n, vec<C> origin, vec<C> edge, vec<C> top, vec<C> asked, double k,
                      double most) {
    constexpr bool NARROW = sizeof(C) == 4;
    vec<C> level = splat(C(0.5));
    clip_root<vec<C>>(n, level, origin - top, origin - edge, k, asked, NARROW ? 1e-5 : 1e-12, NARROW ? 24 : 100,
                      [=](int64_t i) ANYMAX_EACH { return v[i] - origin; });
    for (int h = 0; h < (NARROW ? 2 : 1); h++) {
        // differences of floats are exact; of doubles what is rounded of those from tau is less than a share's last digit
        const vd far = part(origin, h), from = NARROW ? far : far - part(level, h);
        const auto y = [=](int64_t i) ANYMAX_EACH { return part(v[i], h) - from; };
        vd at = part(level, h) + (from - far);
        const auto s = clip_root<vd>(n, at, from - part(top, h), from - part(edge, h), k, part(asked, h),
                                     NARROW ? 1e-12 : 1e-15, NARROW ? 100 : 20, y);
        const vd lost = left_over(s, k);
        for (int64_t i = 0; i < n; i++)
            store_narrow((C *)(out + i) + h * width<double>, below_full(share(y(i) + at, lost), most));
    }
}

}  // namespace ANYMAX_UNIT
