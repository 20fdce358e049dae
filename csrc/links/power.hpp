// Links of the threshold maps: p = link(y + level) with y = x - max(x), as scalar functions over a vector type.
//
// With u = slope * y + level, clipped at 0, a row solves sum u^r = 1. `at(level).terms` gives value = u^r and rate = u^(r-1);
// `fall`, from their sums, is Newton's step on the r-norm of u, which is convex: from a level that is too high it never
// overshoots. `level_of` is the level at which u is 0 at y, `reach` the y at which it is 0 at a level.
#pragma once

#include "links/omega.hpp"

namespace ANYMAX_UNIT {

// A level, of one row or of each lane, for the vectors that it is added to.
template <class V>
ANYMAX_INLINE V broadcast(double level) {
    return all<V>((scalar<V>)level);
}
template <class V>
ANYMAX_INLINE V broadcast(V level) {
    return level;
}

// Sums over the classes: of the values and rates of those that move with the level and, where some don't, of the full ones'.
template <class N, int COUNT>
struct Totals {
    N of[COUNT];
    ANYMAX_INLINE void add(int k, N v, bool first) { of[k] = first ? v : of[k] + v; }
    ANYMAX_INLINE N value() const { return of[0]; }
    ANYMAX_INLINE N rate() const { return of[1]; }
    ANYMAX_INLINE N full() const {
        if constexpr (COUNT > 2) return of[2];
        return N{};
    }
    // What they have too much. The full ones go off first: beside their number the digits of a small part would be lost.
    template <class G>
    ANYMAX_INLINE N excess(G goal) const {
        return value() + (full() - goal);
    }
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

    // The terms of K vectors: as many as are best taken AT_ONCE. They make so many TOTALS. DEAR: eight vectors, one after the
    // other, would be much code.
    template <class N>
    struct At {
        static constexpr int TOTALS = 2;
        static constexpr bool DEAR = false;
        template <class>
        static constexpr int AT_ONCE = 2;
        N level;
        template <int K, class V>
        ANYMAX_INLINE void terms(const V *y, V *value_, V *rate_) const {
            for (int j = 0; j < K; j++) {
                const V u = larger(y[j] * scalar<V>(slope) + broadcast<V>(level), V{});
                rate_[j] = rate(u), value_[j] = value(u, rate_[j]);
            }
        }
    };
    template <class N>
    ANYMAX_INLINE At<N> at(N level) const {
        return At<N>{level};
    }
    // To where the values that sum to s0 would sum to `goal`.
    template <class N>
    ANYMAX_INLINE N fall(N s0, N s1, N goal) const {
        if constexpr (R == 1) return (s0 - goal) / s1;
        if constexpr (R == 2) return (s0 - root2(s0 * goal)) / s1;
        if constexpr (R == 4) return (s0 - s0 / root2(root2(s0 / goal))) / s1;
        if constexpr (sizeof(N) == sizeof(double))
            return (s0 - s0 / ::cbrt(s0 / goal)) / s1;
        else
            return (s0 - s0 * exp(log(goal / s0) * scalar<N>(slope))) / s1;
    }
    template <class N>
    ANYMAX_INLINE N fall(N s0, N s1) const {
        return fall(s0, s1, N{} + 1);
    }
    static double level_of(double y) { return -y / R; }
    ANYMAX_INLINE double reach(double level) const { return -level * R; }
    ANYMAX_INLINE double tau(double level) const { return -level * R; }  // tau - max(x), with p = (slope (x - tau))^r
    ANYMAX_INLINE double floor(double n) const { return ::pow(n, -slope); }
    static constexpr bool near_one() { return false; }
    static constexpr bool QUICK = true;  // candidates cost no more than a better bound of a short row
    static constexpr bool whole = true;  // the row's entries below reach() are exactly 0
};

}  // namespace ANYMAX_UNIT
