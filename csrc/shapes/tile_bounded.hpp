// Short rows of Bounded above alpha = 1, one a lane: their levels in floats, then in doubles.
#pragma once

#include "links/bounded.hpp"
#include "shapes/tile.hpp"

namespace ANYMAX_UNIT {

// Bounds of the classes, each no more than 1; of all classes in each row the same.
struct TileBounds {
    vf each[TILE_MOST];
    bool alike;

    ANYMAX_INLINE vf at(int64_t i) const { return each[alike ? 0 : i]; }
    void read(const anymax_call &call, int64_t r, int64_t count) {
        const anymax_view &view = call.upper;
        alike = view.cls == 0 || call.n == 1;
        const int64_t n = alike ? 1 : call.n;
        const bool shared = view.outer == 0 && view.inner == 0;
        float *const to = (float *)each;
        for (int64_t j = 0; j < (shared ? 1 : width<float>); j++) {
            const float *from = (const float *)row_at(call, view, sizeof(float), r + (j < count ? j : 0));
            for (int64_t i = 0; i < n; i++) to[i * width<float> + j] = from[i * view.cls];
        }
        for (int64_t i = 0; i < n; i++) {
            const vf v = shared ? splat(to[i * width<float>]) : each[i];
            each[i] = v > 1.0f ? splat(1.0f) : v;  // NaN stays
        }
    }
};

// Links as (slope y + level)^r, clipped to [0, 1]: no bound is above 1.
template <int R>
struct TilePower {
    static constexpr double slope = Power<R>::slope, r = R;
    template <int K, class V>
    ANYMAX_INLINE void rates(V *u) const {
        for (int j = 0; j < K; j++) u[j] = Power<R>::rate(u[j]);
    }
    template <class V>
    ANYMAX_INLINE V root(V share) const {  // share^(1 / r), less 1
        return (R == 1   ? share
                : R == 2 ? root2(share)
                : R == 4 ? root2(root2(share))
                         : exp(log(share) * scalar<V>(1.0 / R))) -
               scalar<V>(1);
    }
    template <class V>
    static ANYMAX_INLINE V least(V level) {
        return Power<R>::least(absolute(level));
    }
};
struct TileCurve {
    Curve curve;
    double slope, r;
    explicit TileCurve(double c) : curve(c, 1.0 / c), slope(c), r(1.0 / c) {}
    template <int K, class V>
    ANYMAX_INLINE void rates(V *u) const {
        curve.rates<K>(u);
    }
    template <class V>
    ANYMAX_INLINE V root(V share) const {
        return exp(log(share) * scalar<V>(1.0 / r)) - scalar<V>(1);
    }
    template <class V>
    static ANYMAX_INLINE V least(V) {
        return V{};
    }
};

template <class V>
struct TileBoundedSums {
    V free, rate, full;  // as in BoundedSums
    ANYMAX_INLINE V excess() const { return (full - scalar<V>(1)) + free; }
};

// Of y(i) under the bounds u(i), for i below n; keep(i, value, rate) of each.
template <class V, class L, class Y, class U, class K>
ANYMAX_INLINE TileBoundedSums<V> tile_bounded_sums(const L &link, int64_t n, V level, Y y, U u, K keep) {
    typedef scalar<V> C;
    TileBoundedSums<V> s{};
    for (int64_t i = 0; i < n;) {  // sums of eight: the rounding of one long sum would show
        V free{}, all_rates{}, full{};
        const int64_t end = i + 8 < n ? i + 8 : n;
        const auto add = [&](int64_t j, V v, V rate) ANYMAX_EACH {
            const V most = u(j), value = v * rate;
            const auto inside = value < most * C(NEARLY_FULL);
            free += inside ? value : V{}, all_rates += inside ? rate : V{};
            full += inside ? V{} : most;  // of classes without a budget 0
            keep(j, value, rate);
        };
        for (; i + 4 <= end; i += 4) {
            V v[4], rate[4];
            for (int j = 0; j < 4; j++) v[j] = rate[j] = smaller(larger(y(i + j) * C(link.slope) + level, V{}), all<V>(C(1)));
            link.template rates<4>(rate);
            for (int j = 0; j < 4; j++) add(i + j, v[j], rate[j]);
        }
        for (; i < end; i++) {
            V v = smaller(larger(y(i) * C(link.slope) + level, V{}), all<V>(C(1))), rate = v;
            link.template rates<1>(&rate);
            add(i, v, rate);
        }
        s.free += free, s.rate += all_rates, s.full += full;
    }
    return s;
}

// Newton's steps on the r-norm of what is free, within a bracket, until no sum is off by more than `enough`, or a step leads
// nowhere. From a sum that is off by `last` or less a lane takes one step more; the sums are those before it. Lanes that are
// not asked for don't hold up the others.
template <class V, class L, class Y, class U, class K, class M>
ANYMAX_INLINE TileBoundedSums<V> tile_bounded_root(const L &link, int64_t n, V &level, V low, V high, M asked, scalar<V> enough,
                                                   scalar<V> last, int turns, Y y, U u, K keep) {
    typedef scalar<V> C;
    TileBoundedSums<V> s{};
    for (int turn = 0; turn < turns; turn++) {
        s = tile_bounded_sums<V>(link, n, level, y, u, keep);
        const V excess = s.excess(), mass = all<V>(C(1)) - s.full;
        low = excess > V{} ? low : level, high = excess > V{} ? level : high;
        const auto some = (mass > V{}) & (s.rate > V{}) & (s.free > V{});
        const V share = some ? mass / s.free : all<V>(C(1));
        V next = level + (some ? s.free * link.root(share) / s.rate : V{});
        next = some & (next > low) & (next < high) & (turn < 12 || turn % 2 == 0 ? level == level : level != level)
                   ? next
                   : low + (high - low) * C(0.5);
        asked &= (absolute(excess) > enough) & (next != level);
        if (!bits(asked)) break;
        level = asked ? next : level;
        asked &= absolute(excess) > last;
    }
    return s;
}

// One bit a lane, 0 where the row is served by itself: one with NaN, whose bounds leave no more than 1, or hardly more, or
// whose scores lie far apart.
template <class L>
inline uint32_t tile_bounded(Tile<float> &t, int64_t n, const L &link, const TileBounds &bounds) {
    const vf none = splat(-inf32);
    vf top = none, least = splat(inf32), room{};
    vi sound = top < 0.0f;
    for (int64_t i = 0; i < n; i++) {
        const vf v = t.v[i], most = bounds.at(i);
        const vi in = (v > -inf32) & (most > 0.0f);
        sound &= (v < inf32) & (most >= 0.0f);
        top = larger(top, in ? v : none), least = smaller(least, in ? v : splat(inf32));
        room += in ? most : vf{};
    }
    sound &= (room > 1.0f + 1e-4f) & (top > -inf32) & (top - least < FLOAT_RANGE);
    const vf anchor = sound ? top : vf{}, end = sound ? top - least : vf{};
    vf y[TILE_MOST];
    for (int64_t i = 0; i < n; i++) y[i] = sound & (bounds.at(i) > 0.0f) ? t.v[i] - anchor : none;
    const auto nothing = [](int64_t, auto, auto) ANYMAX_EACH {};
    const vf high_level = end * (float)link.slope * (1.0f + 1e-5f) + (1.0f + 1e-5f);
    vf level = splat(1.0f);
    if (n >= CELLS_FROM) {  // where the best of each eight would be at theirs, if they can be
        vf cell[TILE_MOST / 8], most[TILE_MOST / 8], at = level;
        int64_t cells = 0;
        for (int64_t i = 0; i < n; i += 8, cells++) {
            cell[cells] = none, most[cells] = vf{};
            for (int64_t j = i; j < i + 8 && j < n; j++)
                cell[cells] = larger(cell[cells], y[j]), most[cells] = larger(most[cells], bounds.at(j));
        }
        const auto s = tile_bounded_root<vf>(
            link, cells, at, vf{}, high_level, sound, 0.05f, 0.05f, 5, [&](int64_t i) ANYMAX_EACH { return cell[i]; },
            [&](int64_t i) ANYMAX_EACH { return most[i]; }, nothing);
        level = absolute(s.excess()) < 0.5f ? at : level;
    }
    tile_bounded_root<vf>(
        link, n, level, vf{}, high_level, sound, 1e-6f, 3e-4f, 24, [&](int64_t i) ANYMAX_EACH { return y[i]; },
        [&](int64_t i) ANYMAX_EACH { return bounds.at(i); }, nothing);
    for (int upper = 0; upper < 2; upper++) {
        const auto half = [&](vf v) ANYMAX_EACH { return upper ? high(v) : low(v); };
        vd value[TILE_MOST], rate[TILE_MOST], x[TILE_MOST], most[TILE_MOST], at = half(level);
        const vd zero = half(anchor);
        for (int64_t i = 0; i < n; i++) x[i] = half(y[i]) > -inf64 ? half(t.v[i]) - zero : all<vd>(-inf64);
        for (int64_t i = 0; i < (bounds.alike ? 1 : n); i++) most[i] = half(bounds.at(i));
        const auto bound = [&](int64_t i) ANYMAX_EACH { return most[bounds.alike ? 0 : i]; };
        const vl asked = half(sound ? splat(1.0f) : vf{}) > 0.0;
        const auto s = tile_bounded_root<vd>(
            link, n, at, vd{}, half(high_level), asked, L::least(vd{} + 1.0)[0] > 0.0 ? 0x1p-50 : ENOUGH, 0.0, 60,
            [&](int64_t i) ANYMAX_EACH { return x[i]; }, bound,
            [&](int64_t i, vd v, vd k) ANYMAX_EACH { value[i] = v, rate[i] = k; });
        const vd excess = s.excess(), lost = s.rate > vd{} ? excess / s.rate : vd{}, tiny = L::least(at);
        const vl there = asked & (absolute(excess) <= ENOUGH);
        for (int64_t i = 0; i < n; i++) {
            const vd u = bound(i), p = value[i] - rate[i] * lost;
            const vl inside = (value[i] < u * NEARLY_FULL) & (p < u);
            store_narrow((float *)(t.v + i) + upper * width<double>,
                         x[i] > -inf64 ? (inside ? (p > tiny ? p : vd{}) : u) : vd{});
        }
        store_narrow((float *)&level + upper * width<double>, there ? all<vd>(1.0) : vd{});
    }
    return bits(level > 0.0f);
}

inline uint32_t tile_bounded(Tile<float> &t, const anymax_call &call, int64_t r, int64_t count) {
    TileBounds bounds;
    bounds.read(call, r, count);
    const int64_t n = call.n;
    switch (link_of(ANYMAX_ENTMAX, call.param)) {
        case POWER1: return tile_bounded(t, n, TilePower<1>(), bounds);
        case POWER2: return tile_bounded(t, n, TilePower<2>(), bounds);
        case POWER3: return tile_bounded(t, n, TilePower<3>(), bounds);
        case POWER4: return tile_bounded(t, n, TilePower<4>(), bounds);
        default: return tile_bounded(t, n, TileCurve(call.param - 1.0), bounds);
    }
}

}  // namespace ANYMAX_UNIT
