// Short rows: as many as a vector has lanes are transposed, solved in step, and transposed back.
#pragma once

#include "shapes/lanes.hpp"

namespace ANYMAX_UNIT {

template <class C>
struct Tile {
    vec<C> v[TILE_MOST];
    vec<C> high;
    ints<C> sound, any;
    double below_1 = 1.0;  // of the dtype that its probabilities get
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
ANYMAX_INLINE void exponentials(Tile<C> &t, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) exp_below<4>(t.v + i);
    for (; i < n; i++) exp_below<1>(t.v + i);
}

// The i-th scores, and beyond them what adds nothing.
template <class C>
ANYMAX_INLINE auto padded(const Tile<C> &t, int64_t n) {
    return [&t, n](int64_t i) ANYMAX_EACH { return i < n ? t.v[i] : splat(-infinity<C>); };
}

// Softmax over what keep(i, the i-th exponentials) leaves of them.
template <class C, class F>
ANYMAX_INLINE void tile_softmax(Tile<C> &t, int64_t n, F keep) {
    prepare(t, n);
    vec<C> z{};
    exponentials(t, n);
    for (int64_t i = 0; i < n; i++) z += t.v[i] = keep(i, t.v[i]);
    const vec<C> scale = C(1) / (z > vec<C>{} ? z : splat(C(1)));
    for (int64_t i = 0; i < n; i++) t.v[i] = t.v[i] * scale;
    conclude(t, n);
}
template <class C>
inline void tile_softmax(Tile<C> &t, int64_t n) {
    tile_softmax(t, n, [](int64_t, vec<C> e) ANYMAX_EACH { return e; });
}

template <class C>
inline void tile_log_softmax(Tile<C> &t, int64_t n) {
    prepare(t, n);
    vd l[2];
    lanes_log_sum<C>(n, padded(t, n), l);
    vec<C> log_z;
    for (int h = 0; h < (sizeof(C) == 4 ? 2 : 1); h++) store_narrow((C *)&log_z + h * width<double>, l[h]);
    for (int64_t i = 0; i < n; i++) t.v[i] = t.any ? t.v[i] - log_z : splat(-infinity<C>);
    conclude(t, n);
}

// g becomes its product with the transposed Jacobian, from log p.
template <class C>
inline void tile_log_gradient(Tile<C> &log_p, Tile<C> &g, int64_t n) {
    vec<C> total{};
    for (int64_t i = 0; i < n; i += 8) {
        vec<C> sum{};
        for (int64_t j = i; j < i + 8 && j < n; j++) sum += log_p.v[j] == -infinity<C> ? vec<C>{} : g.v[j];
        total += sum;
    }
    for (int64_t i = 0; i < n; i++) g.v[i] = log_p.v[i] == -infinity<C> ? vec<C>{} : g.v[i] - exp(log_p.v[i]) * total;
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
    tile_softmax(t, n, [&](int64_t i, vec<C> e) ANYMAX_EACH { return keep[i] ? e : vec<C>{}; });
}

// The k largest of longer rows by counting. One bit a lane, 0 where ties or masked entries ask for a row by itself: what
// becomes of a row does not depend on its neighbours.
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
    if (n < CELLS_FROM) return splat(C(1));
    vec<C> cell[TILE_MOST / 8];
    const int64_t cells = tile_cells(t, n, cell);
    return tile_level<C, R>(cell, cells);
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

// Apart from the others, which pay for its registers where it is inlined.
__attribute__((noinline)) inline void tile_curve(Tile<float> &t, int64_t n, const Curve &curve, Finish finish) {
    vf x[TILE_MOST];
    memcpy(x, t.v, (size_t)n * sizeof(vf));
    prepare(t, n);
    vf level = splat(1.0f);
    if (n >= CELLS_FROM) {
        vf cell[TILE_MOST / 8];
        const int64_t cells = tile_cells(t, n, cell);
        level = curve_level_of_cells(curve, cell, cells);
    }
    curve_level(curve, lane_view(n, (const vf *)t.v), level, 40);
    vd value[2][TILE_MOST], rate[TILE_MOST];
    for (int h = 0; h < 2; h++) {
        const vd top = part(t.high, h);  // x less its maximum would be rounded in floats
        vd lost, share, at = part(level, h);
        curve_finish(curve, lane_view<vd>(n, [&](int64_t i) ANYMAX_EACH { return part(x[i], h) - top; }), at, finish, value[h],
                     rate, lost, share);
        for (int64_t i = 0; i < n; i++) value[h][i] = finished(finish, value[h][i], rate[i], lost, share);
    }
    for (int64_t i = 0; i < n; i++) t.v[i] = t.any ? join(value[0][i], value[1][i]) : vf{};
    conclude(t, n);
}

// One bit a lane, as above.
template <class C>
inline uint32_t tile_budget(Tile<C> &t, int64_t n, double k) {
    vec<C> low = t.v[0], high = low;
    ints<C> sound = low == low;
    for (int64_t i = 0; i < n; i++) {
        sound &= (t.v[i] < infinity<C>)&(t.v[i] > -infinity<C>);
        low = smaller(low, t.v[i]), high = larger(high, t.v[i]);
    }
    sound &= high - low < (C)FLOAT_RANGE;
    const int64_t whole = (n + 7) & ~(int64_t)7;
    for (int64_t i = 0; i < n; i++) t.v[i] = sound ? t.v[i] : vec<C>{};
    for (int64_t i = n; i < whole; i++) t.v[i] = splat(-infinity<C>);
    low = sound ? low : vec<C>{}, high = sound ? high : vec<C>{};
    share_out<C>(t.v, t.v, whole, low, low - C(1) - (absolute(low) + C(1)) * (sizeof(C) == 4 ? C(1e-6) : C(1e-14)), high,
                 sound ? splat(C(1)) : vec<C>{}, k, t.below_1);
    return bits(sound);
}

// What the rows of a tile become; one bit a lane, 0 where the row is to be served by itself.
template <class C>
inline uint32_t tile_map(Tile<C> &t, Link link, double param, int64_t n) {
    constexpr uint32_t all_lanes = ~(~0u << width<C>);
    switch (link.family) {
        case EXPONENTIALS: return tile_softmax(t, n), all_lanes;
        case THRESHOLDS:
            switch (link.threshold()) {
                case POWER1: return tile_power<C, 1>(t, n), all_lanes;
                case POWER2: return tile_power<C, 2>(t, n), all_lanes;
                case POWER3:
                case POWER4:
                case CURVE:
                case NORM:
                    if constexpr (sizeof(C) == 4) tile_curve(t, n, curve_of(link, param), finish_of(link));
                    return all_lanes;
                case CAPPED: return tile_budget(t, n, param);
                case ANY_POWER:  // no rule of plan.hpp sends them here
                case STEEP:
                case NO_LINK: return 0;
            }
            return 0;
        case TRUNCATIONS:
            switch (link.truncation()) {
                case LARGEST:
                    if (n > TILE_SQUARE) return tile_count(t, n, (int64_t)param);
                    return tile_largest(t, n, (int64_t)param), all_lanes;
                case NUCLEUS: return 0;
            }
            return 0;
        case RATIOS:
        case CEILINGS:
        case NOISES: return 0;
    }
    return 0;
}

}  // namespace ANYMAX_UNIT
