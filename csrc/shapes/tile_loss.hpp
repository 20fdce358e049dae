// Losses of few classes, one row a lane: as many rows as a vector has lanes are transposed, and none waits for a sum across
// lanes. Nothing is saved for the backward, which is as quick to do again.
#pragma once

#include "shapes/loss_slope.hpp"
#include "shapes/tile.hpp"

namespace ANYMAX_UNIT {

// What the loss of each row needs beside its scores, and what it is.
template <class C>
struct TileLoss {
    enum { W = width<C>, PARTS = sizeof(C) == 4 ? 2 : 1 };
    typedef typename lanes_of<C>::integer integer;
    alignas(64) integer target[W];  // of each row; below 0: left out, n: a mistake
    alignas(64) C aim[W];           // its score
    alignas(64) double value[W], tau[W], slope[W];
    alignas(64) C scale[W];  // of the gradient
    bool slopes;             // the derivatives by the parameter are wanted
};

template <class C>
inline void loss_softmax(Tile<C> &t, int64_t n, TileLoss<C> &f) {
    prepare(t, n);
    lanes_softmax_loss<C>(n, padded(t, n), t.high, load(f.aim), f.value, f.tau);
    if (!f.slopes) return;
    vec<C> less;
    for (int h = 0; h < TileLoss<C>::PARTS; h++)
        store_narrow((C *)&less + h * width<double>, load(f.tau + h * width<double>) - part(t.high, h));
    const EntmaxOmegaRise rise{0.0};
    lanes_loss_slope<C>(
        n, 1.0,
        [&](int64_t i) ANYMAX_EACH {
            const vec<C> l = larger(t.v[i] - less, splat(C(-1000)));
            return rise.of(exp(l), l);
        },
        f.slope);
}

// Sparsemax (R = 1) and entmax 3/2 (R = 2).
template <class C, int R>
inline void loss_power(Tile<C> &t, int64_t n, TileLoss<C> &f) {
    vec<C> x[TILE_MOST];
    memcpy(x, t.v, (size_t)n * sizeof(vec<C>));
    prepare(t, n);
    vec<C> level = first_level<C, R>(t, n), unused;
    tile_root<C, R>(t.v, n, level, unused);
    vd u[TILE_MOST];
    C *const p = f.slopes ? (C *)t.v : nullptr;
    for (int h = 0; h < TileLoss<C>::PARTS; h++)
        power_loss<C, R>(x, n, t.high, level, load(f.aim), h, u, f.value, f.tau, p ? p + h * width<double> : p);
    const EntmaxOmegaRise rise{1.0 / R};
    if (p)
        lanes_loss_slope<C>(
            n, 1.0 + rise.c, [&](int64_t i) ANYMAX_EACH { return bits(t.v[i] > vec<C>{}) ? rise.of(t.v[i]) : vec<C>{}; },
            f.slope);
}

// The values and thresholds of rows, or their thresholds alone (targets of none).
template <class C>
inline void tile_losses(Tile<C> &t, int64_t n, Link link, TileLoss<C> &f) {
    if (link == EXPONENTIAL)
        loss_softmax(t, n, f);
    else if (link == POWER1)
        loss_power<C, 1>(t, n, f);
    else
        loss_power<C, 2>(t, n, f);
    const uint32_t sound = bits(t.sound), any = bits(t.any);
    for (int64_t j = 0; j < width<C>; j++) {
        if (!(any >> j & 1)) f.value[j] = inf64, f.tau[j] = -inf64, f.slope[j] = 0.0;
        if (!(sound >> j & 1)) f.value[j] = f.tau[j] = f.slope[j] = not_a_number<double>;
        if (f.target[j] >= n) f.value[j] = f.slope[j] = not_a_number<double>;
        if (f.target[j] < 0) f.value[j] = f.slope[j] = 0.0;
    }
}

// scale (p - y) in place of the scores. A target's own is the sum of the others, which keeps the digits of a small one.
template <class C>
inline void tile_loss_gradient(Tile<C> &t, Link link, double param, int64_t n, const TileLoss<C> &f) {
    tile_map(t, link, param, n);
    ints<C> target;
    memcpy(&target, f.target, sizeof target);
    const vec<C> scale = load(f.scale);
    vec<C> others{};
    for (int64_t i = 0; i < n; i += 8) {
        vec<C> sum{};
        for (int64_t j = i; j < i + 8 && j < n; j++) sum += target == (typename TileLoss<C>::integer)j ? vec<C>{} : t.v[j];
        others += sum;
    }
    const vec<C> own = t.sound ? (t.any ? others : splat(C(1))) * -scale : splat(not_a_number<C>);
    const ints<C> left = target < 0, stray = target >= (typename TileLoss<C>::integer)n;
    for (int64_t i = 0; i < n; i++) {
        vec<C> d = t.v[i] == vec<C>{} ? vec<C>{} : t.v[i] * scale;
        d = target == (typename TileLoss<C>::integer)i ? own : d;
        d = stray ? splat(not_a_number<C>) : d;
        t.v[i] = left ? vec<C>{} : d;
    }
}

}  // namespace ANYMAX_UNIT
