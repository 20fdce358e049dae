// Links of the threshold maps: p = link(y + level) with y = x - max(x), as scalar functions over a vector type.
//
// With u = slope * y + level, clipped at 0, a row solves sum u^r = 1. `at(level).terms` gives value = u^r and rate = u^(r-1); `step` is Newton's on the
// r-norm of u, which is convex: from a level that is too high it never overshoots.
#pragma once

#include "core/vec.hpp"

namespace ANYMAX_UNIT {

// Entmax at alpha = 1 + 1/R, in products alone; sparsemax is Power<1>.
template <int R>
struct Power {
    static constexpr double slope = 1.0 / R;
    static constexpr double start = 1.0;  // the level at which the maximum alone has probability 1

    template <class C>
    struct At {
        C level;
        template <class V>
        ANYMAX_INLINE void terms(V y, V &value, V &rate) const {
            V u = larger(y * C(slope) + level, V{});
            rate = R == 1 ? (u > V{} ? all<V>(1) : V{}) : u;
            for (int i = 2; i < R; i++) rate = rate * u;
            value = R == 1 ? u : rate * u;
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

// Any slope c and exponent r: entmax (r = 1/c) and normmax (c = 1). Near alpha = 1 `level` is that of y itself, u = 1 + c (y + level), lest the
// digits of u be lost in its distance from 1.
struct AnyPower {
    double slope, r;
    bool near;
    double start;
    bool whole;

    AnyPower(double c, double exponent)
        : slope(c), r(exponent), near(c < 0.3), start(near ? 0.0 : 1.0), whole(c > 0.0) {}

    // Near alpha = 1 as P (1 + c y / base)^r, with P and base those of the maximum: in a flat row over many classes the level is large and y
    // small, and their sum would round away what tells the classes apart.
    struct At {
        double slope, r, level, base, log_p;
        bool near;
        ANYMAX_INLINE void terms(vd y, vd &value, vd &rate) const {
            if (near) {
                vd w = larger(y * (slope / base), all<vd>(-1.0));
                vd u = w + 1.0;
                value = exp(log1p(w) * r + log_p);
                rate = u > vd{} ? (u < inf64 ? value / (u * base) : vd{}) : vd{};
                value = u > vd{} ? value : vd{};
            } else {
                vd u = larger(y * slope + level, vd{});
                rate = u > vd{} ? exp(log(u) * (r - 1.0)) : vd{};
                value = u * rate;
            }
        }
        ANYMAX_INLINE void terms(vf y, vf &value, vf &rate) const {
            vd v0, v1, k0, k1;
            terms(low(y), v0, k0);
            terms(high(y), v1, k1);
            value = join(v0, v1);
            rate = join(k0, k1);
        }
    };
    At at(double level) const {
        return At{slope, r, level, near ? 1.0 + slope * level : 1.0, near ? ::log1p(slope * level) * r : 0.0, near};
    }
    bool near_one() const { return near; }
    double step(double s0, double s1) const {
        double fall = -s0 * ::expm1(-::log(s0) / r) / s1;
        return near ? fall / slope : fall;
    }
    double reach(double level) const {
        if (slope <= 0.0) return -inf64;
        return near ? -1.0 / slope - level : -level / slope;
    }
    double tau(double level) const { return near ? -1.0 / slope - level : -level / slope; }
    double floor(double n) const {
        double least = ::exp(-::log(n) / r);  // u where every p is 1/n
        return near ? ::expm1(-::log(n) / r) / slope : least;
    }
};

}  // namespace ANYMAX_UNIT
