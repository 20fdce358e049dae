// Each step over all of a row, where it is short or most of it is in the support: no candidates, no branch on a score.
#pragma once

#include "shapes/solve.hpp"
#include "shapes/support.hpp"

namespace ANYMAX_UNIT {

// Where u is 0, tau = top + below: as the number of type C nearest to it, from which u is measured without losing a digit, and
// the rest.
template <class C, int R>
struct Ground {
    static constexpr int TOTALS = 2;
    template <class>
    static constexpr int AT_ONCE = 2;
    C near, rest;
    Ground(double top, double below) : near((C)(top + below)), rest((C)(Power<R>::slope * (((double)near - top) - below))) {}
    ANYMAX_INLINE vec<C> u(vec<C> v) const { return larger((v - splat(near)) * (C)Power<R>::slope + splat(rest), vec<C>{}); }
    template <int K>
    ANYMAX_INLINE void terms(const vec<C> *v, vec<C> *value, vec<C> *rate) const {
        for (int j = 0; j < K; j++) {
            const vec<C> w = u(v[j]);
            rate[j] = Power<R>::rate(w), value[j] = Power<R>::value(w, rate[j]);
        }
    }
};
// Its levels, of a row with this maximum.
template <class C, int R>
struct Grounded {
    double top;
    Ground<C, R> at(double level) const { return Ground<C, R>(top, Power<R>().tau(level)); }
};

struct Edge {
    double below, lost;  // tau - top; p = rate (u - lost)
};

template <class C, int R>
inline Edge sweep_root(const C *x, int64_t n, C top, double level) {
    const Power<R> link;
    const double enough = sizeof(C) == 4 ? 5e-5 : 1e-8;
    const auto rule = [&](const auto &s, double at) {
        const double fall = link.fall(s.value(), s.rate()), next = at - fall;
        // of the mean of u: one class may stand far above a shelf of many. One step more, to first order, is in `lost`
        const bool go = fabs(fall) > enough * s.value() / s.rate() && next > 0.0 && next != at;
        return Step<double>{next, go, go};
    };
    auto s = solve(RowAsItLies<C, vec<C>>(x, n), Grounded<C, R>{(double)top}, level, Everyone(), 60, rule);
    // a third power of a float would have three of its roundings
    if constexpr (R > 2 && sizeof(C) == 4)
        s = totals(RowAsItLies<C, vd>(x, n), Ground<double, R>((double)top, link.tau(level)), Nothing());
    return Edge{link.tau(level), (s.value() - 1.0) / s.rate()};
}

template <class C, int R>
inline void sweep_write(C *to, const C *x, int64_t begin, int64_t end, int64_t n, C top, Edge edge, bool bypass) {
    if constexpr (R > 2 && sizeof(C) == 4) {
        const Ground<double, R> ground((double)top, edge.below);
        const auto half = [&](vd v) ANYMAX_EACH { return Power<R>::p(ground.u(v), all<vd>(edge.lost), vd{}); };
        return write(to, begin, end, bypass, [&](int64_t i) ANYMAX_EACH {
            const vec<C> v = load_or(x, i, n, -infinity<C>);
            return join(half(low(v)), half(high(v)));
        });
    }
    const Ground<C, R> ground((double)top, edge.below);
    const vec<C> lost = splat((C)edge.lost), level = splat((C)(-edge.below * Power<R>::slope));
    write(to, begin, end, bypass,
          [&](int64_t i) ANYMAX_EACH { return Power<R>::p(ground.u(load_or(x, i, n, -infinity<C>)), lost, level); });
}

}  // namespace ANYMAX_UNIT
