// What the parameter of a map moves, class by class: entmax' p by its alpha at a fixed level, and Omega by the alpha of entmax
// and normmax. With c = alpha - 1 and l = log p all of it is a power series in c l, so that alpha = 1 is a parameter as any
// other.
#pragma once

#include "core/packing.hpp"
#include "maps.hpp"

namespace ANYMAX_UNIT {

// By which formulas a link moves with its parameter.
enum Moving { BY_ALPHA, BY_NORM, BY_BUDGET, UNMOVED };
inline Moving moving_of(Link link) {
    if (link == EXPONENTIAL) return BY_ALPHA;
    if (link.family != THRESHOLDS) return UNMOVED;
    switch (link.threshold()) {
        case POWER1:
        case POWER2:
        case POWER3:
        case POWER4:
        case CURVE:
        case ANY_POWER:
        case STEEP: return BY_ALPHA;
        case NORM: return BY_NORM;
        case CAPPED: return BY_BUDGET;
        case NO_LINK: break;
    }
    return UNMOVED;
}

// 1 / 2!, 1 / 3! ...
struct OverFactorials {
    double of[16] = {};
    constexpr OverFactorials() {
        double v = 1.0;
        for (int k = 0; k < 16; k++) of[k] = v /= (double)(k + 2);
    }
};
static constexpr OverFactorials OVER_FACTORIALS;

// (e^z - 1 - z) / z^2 by its series, for |z| < 1/2.
template <class V>
ANYMAX_INLINE V bend_near(V z) {
    typedef scalar<V> C;
    constexpr int DEGREE = sizeof(C) == 4 ? 6 : 13;
    V y = all<V>(C(OVER_FACTORIALS.of[DEGREE]));
#pragma GCC unroll 16
    for (int k = DEGREE - 1; k >= 0; k--) y = y * z + C(OVER_FACTORIALS.of[k]);
    return y;
}
// log p, of p that may be 0: no less than that of the smallest number, or nearly. In floats without the special cases of `log`;
// within 3e-7 of itself.
ANYMAX_INLINE vf log_of(vf p) {
    const ui b = (ui)p;
    const vi n = (vi)(b - (ui)all<vf>(0.70710678f)) >> 23;
    const vf f = (vf)(b - ((ui)n << 23)) - 1.0f, s = f / (f + 2.0f), z = s * s;
    return __builtin_convertvector(n, vf) * 0.693147181f + s * (2.0f + z * (0.666666667f + z * (0.4f + z * 0.285714286f)));
}
ANYMAX_INLINE vd log_of(vd p) { return larger(log(p), all<vd>(-745.0)); }

// near(z) where |z| < 1/2, far(z) elsewhere; of whole vectors of one kind only that.
template <class V, class N, class F>
ANYMAX_INLINE void by_size(V z, N near, F far, V &a, V &b) {
    typedef scalar<V> C;
    const ints<C> small = absolute(z) < C(0.5);
    if (every<C>(small)) return near(a, b);
    far(a, b);
    if (!bits(small)) return;
    V c, d;
    near(c, d);
    a = small ? c : a, b = small ? d : b;
}

// 1 / c, 0 where c is so small that every c l is near to 0.
inline double over(double c) { return c > 1e-15 || c < -1e-15 ? 1.0 / c : 0.0; }

// Of entmax' p its rate in the level, s = p^(1 - c) up to a factor of the row, and r, the derivative by alpha at a fixed level
// up to a multiple of s. What is 0 has neither; NaN gives NaN. LATE: r in the form that doesn't grow as p falls, from c = 1/2
// on. `lowest`: of log p, where p^(1 - c) would grow without bound; else 0.
template <bool LATE>
struct EntmaxRise {
    double c, lowest;

    template <class V>
    ANYMAX_INLINE void operator()(V p, V &s, V &r) const {
        typedef scalar<V> C;
        const V l = log_of(p);
        if (LATE) {
            s = p == V{} ? V{} : exp((l - C(lowest)) * C(1.0 - c));
            r = p * (C(over(c)) - l) * C(over(c));
        } else {
            const V z = l * C(-c);
            by_size(
                z,
                [=](V &of_s, V &of_r) ANYMAX_EACH {
                    const V b = bend_near(z);
                    of_s = p * (C(1) + z * (C(1) + z * b)), of_r = -p * (l * l * b);
                },
                [=](V &of_s, V &of_r) ANYMAX_EACH {
                    const V e = exp(z);
                    of_s = p * e, of_r = p * ((C(1) + z - e) * C(over(c) * over(c)));
                },
                s, r);
        }
    }
};

// Of -Omega, entmax', the part of a class in its derivative by alpha, times alpha.
struct EntmaxOmegaRise {
    double c;

    // l: log p, or what is below all of them where p is 0
    template <class V>
    ANYMAX_INLINE V of(V p, V l) const {
        typedef scalar<V> C;
        const V z = l * C(c);
        V first, second;  // (p^c - 1) / c and what it rises by
        by_size(
            z,
            [=](V &a, V &b) ANYMAX_EACH {
                const V bend = bend_near(z);
                a = l * (C(1) + z * bend), b = l * l * (C(1) - (C(1) - z) * bend);
            },
            [=](V &a, V &b) ANYMAX_EACH {
                const V e = exp(z);
                const C by = C(over(c));
                a = (e - C(1)) * by, b = (z * e - e + C(1)) * (by * by);
            },
            first, second);
        return p * (first * C(1.0 / (1.0 + c)) - second);
    }
    template <class V>
    ANYMAX_INLINE V of(V p) const {
        return of(p, log_of(p));
    }
};

// Of normmax: the norm N of p, whose u = p / most have powers that sum to `mass`, and d log N / d alpha. From u all parts have
// one sign, and their powers are numbers for any alpha.
struct NormRise {
    double alpha, most, log_mass, rise;

    // Sums over the classes but for those with u = 1, which are `tied`.
    NormRise(double alpha_, double most_, double powers, double logs, double tied)
        : alpha(alpha_), most(most_), log_mass(::log1p(powers + (tied - 1.0))) {
        rise = (logs / (powers + tied) - log_mass / alpha) / alpha;
    }
    double norm() const { return most * ::exp(log_mass / alpha); }
};
template <class C>
inline NormRise norm_rise(double alpha, const C *p, int64_t count) {
    constexpr int64_t W = width<C>;
    vec<C> high{};
    for (int64_t i = 0; i < count; i += W) high = larger(high, load_or(p, i, count, C(0)));
    const C most = highest_lane(high);
    vd powers{}, logs{};
    double tied = 0.0;
    for (int64_t i = 0; i < count; i += W) {
        const vec<C> u = load_or(p, i, count, C(0)) / most, l = log(u), t = alpha == 2.0 ? u * u : exp(l * C(alpha));
        const auto same = u == C(1);
        tied += (double)__builtin_popcount(bits(same));
        powers = widen_add(powers, same || u == vec<C>{} ? vec<C>{} : t);
        logs = widen_add(logs, u == vec<C>{} ? vec<C>{} : t * l);
    }
    return NormRise(alpha, (double)most, sum(powers), sum(logs), tied);
}

}  // namespace ANYMAX_UNIT
