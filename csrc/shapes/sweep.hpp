// Each step over all of a row, where it is short or most of it is in the support: no candidates, no branch on a score.
#pragma once

#include "links/power.hpp"
#include "shapes/support.hpp"

namespace ANYMAX_UNIT {

// Where u is 0, tau = top + below: as the number of type C nearest to it, from which u is measured without losing a digit, and
// the rest.
template <class C, int R>
struct Ground {
    C near, rest;
    Ground(C top, double below)
        : near((C)((double)top + below)), rest((C)(Power<R>::slope * (((double)near - (double)top) - below))) {}
};

// Sums of value and rate at a threshold.
template <class C, int R>
inline Sums2 sweep(const C *x, int64_t n, Ground<C, R> ground) {
    constexpr int64_t W = width<C>;
    const vec<C> a = splat(ground.near), l = splat(ground.rest);
    const C s = (C)Power<R>::slope;
    vd wide0{}, wide1{};
    int64_t i = 0;
    auto term = [&](vec<C> v, vec<C> &s0, vec<C> &s1) ANYMAX_EACH {
        const vec<C> u = larger((v - a) * s + l, vec<C>{}), rate = Power<R>::rate(u);
        s0 += Power<R>::value(u, rate), s1 += rate;
    };
    while (i + 4 * W <= n) {
        vec<C> p0{}, p1{}, q0{}, q1{};
        for (int64_t stop = i + 32 * W <= n ? i + 32 * W : n; i + 4 * W <= stop; i += 4 * W) {
            term(load(x + i), p0, q0);
            term(load(x + i + W), p1, q1);
            term(load(x + i + 2 * W), p0, q0);
            term(load(x + i + 3 * W), p1, q1);
        }
        wide0 = widen_add(wide0, p0 + p1);
        wide1 = widen_add(wide1, q0 + q1);
    }
    if (i < n) {
        vec<C> p{}, q{};
        for (; i < n; i += W) term(load_or(x, i, n, -infinity<C>), p, q);
        wide0 = widen_add(wide0, p);
        wide1 = widen_add(wide1, q);
    }
    return Sums2{sum(wide0), sum(wide1)};
}

struct Edge {
    double below, lost;  // tau - top; p = rate (u - lost)
};

// u of a vector of doubles: a third power of a float would have three of its roundings.
template <int R>
struct WideGround {
    double zero, off;
    WideGround(double top, double below) : zero(top + below), off((top - zero) + below) {}
    ANYMAX_INLINE vd u(vd v) const { return larger(((v - zero) - off) * Power<R>::slope, vd{}); }
};

template <int R>
inline Sums2 sweep_wide(const float *x, int64_t n, double top, double below) {
    constexpr int64_t W = width<float>;
    const WideGround<R> ground(top, below);
    vd s0{}, s1{}, t0{}, t1{};
    for (int64_t i = 0; i < n; i += W) {
        const vf v = load_or(x, i, n, -inf32);
        const vd a = ground.u(low(v)), b = ground.u(high(v)), p = Power<R>::rate(a), q = Power<R>::rate(b);
        s0 += p * a, t0 += q * b, s1 += p, t1 += q;
    }
    return Sums2{sum(s0 + t0), sum(s1 + t1)};
}
template <class C, int R>
inline Edge sweep_root(const C *x, int64_t n, C top, double below) {
    const Power<R> link;
    const double enough = sizeof(C) == 4 ? 5e-5 : 1e-8;
    Sums2 s{};
    for (int turn = 0; turn < 60; turn++) {
        s = sweep<C, R>(x, n, Ground<C, R>(top, below));
        double fall = link.step(s.s0, s.s1), mean = s.s0 / s.s1;  // of u: one class may stand far above a shelf of many
        if (fabs(fall) <= enough * mean) break;                   // one step more, to first order, is in `lost`
        double next = below + fall * R;
        if (!(next < 0.0) || next == below) break;
        below = next;
    }
    if constexpr (R > 2 && sizeof(C) == 4) s = sweep_wide<R>(x, n, (double)top, below);
    return Edge{below, (s.s0 - 1.0) / s.s1};
}

template <class C, int R>
inline void sweep_write(C *to, const C *x, int64_t begin, int64_t end, int64_t n, C top, Edge edge, bool bypass) {
    const Ground<C, R> ground(top, edge.below);
    const C s = (C)Power<R>::slope;
    const vec<C> a = splat(ground.near), l = splat(ground.rest), lost = splat((C)edge.lost);
    const vec<C> level = splat((C)(-edge.below * Power<R>::slope));
    if constexpr (R > 2 && sizeof(C) == 4) {
        const WideGround<R> wide((double)top, edge.below);
        auto half = [&](vd v) ANYMAX_EACH { return Power<R>::p(wide.u(v), all<vd>(edge.lost), vd{}); };
        return write(to, begin, end, bypass, [&](int64_t i) ANYMAX_EACH {
            vec<C> v = load_or(x, i, n, -infinity<C>);
            return join(half(low(v)), half(high(v)));
        });
    }
    write(to, begin, end, bypass, [&](int64_t i) ANYMAX_EACH {
        return Power<R>::p(larger((load_or(x, i, n, -infinity<C>) - a) * s + l, vec<C>{}), lost, level);
    });
}

}  // namespace ANYMAX_UNIT
