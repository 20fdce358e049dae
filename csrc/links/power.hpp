// Links of the threshold maps: p = link(y + level) with y = x - max(x), as scalar functions over a vector type.
//
// With u = slope * y + level, clipped at 0, a row solves sum u^r = 1. `at(level).terms` gives value = u^r and rate = u^(r-1);
// `step` is Newton's on the r-norm of u, which is convex: from a level that is too high it never overshoots.
#pragma once

#include "links/omega.hpp"

namespace ANYMAX_UNIT {

struct Sums2 {
    double s0, s1;  // of value, of rate
};

// p from value and rate: of entmax, less what their sum is above 1, to first order; of normmax the rates alone, divided by
// their sum.
enum Finish { ENTMAX_FINISH, NORMMAX_FINISH };
ANYMAX_INLINE vd finished(Finish finish, vd value, vd rate, vd lost, vd share) {
    return finish == NORMMAX_FINISH ? rate * share : larger(value - rate * lost, vd{});
}

// What of a level is lost to rounding.
template <class C>
constexpr C ROUNDED = C(sizeof(C) == 4 ? 0x1p-22 : 0x1p-51);

// Entmax at alpha = 1 + 1/R, in products alone; sparsemax is Power<1>.
template <int R>
struct Power {
    static constexpr double slope = 1.0 / R;
    static constexpr double start = 1.0;  // the level at which the maximum alone has probability 1

    // u^(R - 1), where u is not 0,
    template <class V>
    static ANYMAX_INLINE V rate(V u) {
        V k = R == 1 ? (u > V{} ? all<V>(1) : V{}) : u;
        for (int i = 2; i < R; i++) k = k * u;
        return k;
    }
    // u^R,
    template <class V>
    static ANYMAX_INLINE V value(V u, V rate) {
        return R == 1 ? u : rate * u;
    }
    // and p, less what the sum of u^R is above 1, to first order. Of sparsemax what the level is rounded to is 0: the threshold
    // of scores on a grid is often one of them. Of the others that is a power of it, which hardly is a number.
    template <class V>
    static ANYMAX_INLINE V p(V u, V lost, V level) {
        if (R == 1) return u > larger(lost + least(level), V{}) ? u - lost : V{};
        return larger(rate(u) * (u - lost), V{});
    }
    template <class V>
    static ANYMAX_INLINE V least(V level) {
        return R == 1 ? level * ROUNDED<scalar<V>> : V{};
    }
    static double least(double level) { return R == 1 ? level * ROUNDED<double> : 0.0; }
    // -Omega / p of a class.
    template <class V>
    static ANYMAX_INLINE V own(V p) {
        static_assert(R <= 2, "of sparsemax and entmax 3/2");
        return EntmaxOmega(1.0 + slope).own(1.0 - (R == 1 ? p : root2(p)));
    }

    template <class C>
    struct At {
        C level;
        template <class V>
        ANYMAX_INLINE void terms(V y, V &value_, V &rate_) const {
            const V u = larger(y * C(slope) + level, V{});
            rate_ = rate(u), value_ = value(u, rate_);
        }
    };
    template <class C>
    ANYMAX_INLINE At<C> at(C level) const {
        return At<C>{level};
    }
    ANYMAX_INLINE double step(double s0, double s1) const {
        if (R == 1) return (s0 - 1.0) / s1;
        if (R == 2) return (s0 - sqrt(s0)) / s1;
        if (R == 3) return (s0 - s0 / ::cbrt(s0)) / s1;
        return (s0 - s0 / sqrt(sqrt(s0))) / s1;
    }
    ANYMAX_INLINE double reach(double level) const { return -level * R; }  // y at which u is 0
    ANYMAX_INLINE double tau(double level) const { return -level * R; }    // tau - max(x), with p = (slope (x - tau))^r
    ANYMAX_INLINE double floor(double n) const { return ::pow(n, -slope); }
    bool near_one() const { return false; }
    static constexpr bool whole = true;  // the row's entries below reach() are exactly 0
};

}  // namespace ANYMAX_UNIT
