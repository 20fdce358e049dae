// Entmax of any alpha below 2 and normmax, in the words of power.hpp.
#pragma once

#include "links/power.hpp"

namespace ANYMAX_UNIT {

// sum (slope y + level)^r = 1 with level in (0, 1], y = x - max(x).
struct Curve {
    static constexpr double start = 1.0;
    double slope, r;
    int32_t quarters;  // 4 (r - 1) where that is a whole number: products and roots alone

    // r = 1 / c of an alpha such as 1.2 is a few roundings off a whole number.
    Curve(double c, double exponent) : slope(c), r(exponent), quarters(-1) {
        const double q = ::floor((exponent - 1.0) * 4.0 + 0.5);
        if (q >= 0.0 && q <= 256.0 && fabs((exponent - 1.0) * 4.0 - q) <= 1e-13 * exponent) quarters = (int32_t)q;
    }
    bool swept() const {
        return slope < 0.4 && (quarters == 8 || quarters == 12);
    }  // entmax 4/3 and 5/4: `sweep_root` has them

    // u^(r-1) of K vectors in [0, 1], in their place.
    template <int K, class V>
    ANYMAX_INLINE void rates(V *u) const {
        typedef scalar<V> S;
        if (quarters >= 0) {
            V w[K];
            for (int j = 0; j < K; j++) w[j] = all<V>(S(1));
            if (quarters & 2)
                for (int j = 0; j < K; j++) w[j] = root2(u[j]);
            if (quarters & 1)
                for (int j = 0; j < K; j++) w[j] = w[j] * root2(root2(u[j]));
            for (int32_t k = quarters >> 2; k; k >>= 1) {
                if (k & 1)
                    for (int j = 0; j < K; j++) w[j] = w[j] * u[j];
                for (int j = 0; j < K; j++) u[j] = u[j] * u[j];
            }
            for (int j = 0; j < K; j++) u[j] = w[j];
            return;
        }
        const S least = sizeof(S) == 4 ? S(1.2e-38) : S(1e-300);
        V v[K];
        for (int j = 0; j < K; j++) v[j] = larger(u[j], all<V>(least));
        power_inside<K>(v, r - 1.0);
        for (int j = 0; j < K; j++) u[j] = u[j] > V{} ? v[j] : V{};
    }

    template <class N, bool CLIPPED>
    struct At {
        static constexpr int TOTALS = 2;
        static constexpr bool DEAR = true;
        template <class V>
        static constexpr int AT_ONCE = sizeof(scalar<V>) == 8 ? 2 : 4;
        const Curve &curve;
        N level;
        template <int K, class V>
        ANYMAX_INLINE void terms(const V *y, V *value, V *rate) const {
            for (int j = 0; j < K; j++) {
                value[j] = larger(y[j] * (scalar<V>)curve.slope + broadcast<V>(level), V{});
                if (CLIPPED) value[j] = smaller(value[j], all<V>(scalar<V>(1)));
                rate[j] = value[j];
            }
            curve.rates<K>(rate);
            for (int j = 0; j < K; j++) value[j] *= rate[j];
        }
    };
    template <class N>
    ANYMAX_INLINE At<N, false> at(N level) const {
        return At<N, false>{*this, level};
    }
    template <class N>
    ANYMAX_INLINE N fall(N s0, N s1, N goal) const {
        if constexpr (sizeof(N) == sizeof(double)) {
            return -s0 * ::expm1(-::log(s0 / goal) / r) / s1;
        } else {
            typedef scalar<N> C;
            const N l = log(s0 / goal);
            const N difference = s0 - s0 * exp(l * C(-1.0 / r)), part = s0 * l * C(1.0 / r);  // near 1 the difference cancels
            return (absolute(l) < C(sizeof(C) == 4 ? 3e-4 : 1e-8) ? part : difference) / s1;
        }
    }
    template <class N>
    ANYMAX_INLINE N fall(N s0, N s1) const {
        return fall(s0, s1, N{} + 1);
    }
    double level_of(double y) const { return -slope * y; }
    template <class V>
    static ANYMAX_INLINE V least(V) {
        return V{};
    }
    ANYMAX_INLINE double reach(double level) const { return -level / slope; }
    ANYMAX_INLINE double tau(double level) const { return -level / slope; }
    static constexpr bool near_one() { return false; }
    static constexpr bool QUICK = false, whole = true;
};

// How far from 1 a sum of p may be: what it takes to be 1 is made good to first order in the result.
constexpr double ENOUGH = 2e-6;

// A link of entmax below alpha = 2, or normmax, of floats.
inline Curve curve_of(Link link, double param) {
    return link == NORM ? Curve(1.0, param / (param - 1.0)) : Curve(param - 1.0, 1.0 / (param - 1.0));
}
inline Finish finish_of(Link link) { return link == NORM ? NORMMAX_FINISH : ENTMAX_FINISH; }

// Any slope c and exponent r: entmax (r = 1/c) and normmax (c = 1). Near alpha = 1 `level` is that of y itself, u = 1 + c (y +
// level), lest the digits of u be lost in its distance from 1.
struct AnyPower {
    double slope, r;
    bool near;
    double start;
    bool whole;

    AnyPower(double c, double exponent) : slope(c), r(exponent), near(c < 0.3), start(near ? 0.0 : 1.0), whole(c > 0.0) {}

    // Near alpha = 1 as P (1 + c y / base)^r, with P and base those of the maximum: in a flat row over many classes the level
    // is large and y small, and their sum would round away what tells the classes apart.
    struct At {
        static constexpr int TOTALS = 2;
        static constexpr bool DEAR = true;
        template <class>
        static constexpr int AT_ONCE = 1;
        double slope, r, level, base, log_p;
        bool near;
        ANYMAX_INLINE void term(vd y, vd &value, vd &rate) const {
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
        ANYMAX_INLINE void term(vf y, vf &value, vf &rate) const {
            vd v0, v1, k0, k1;
            term(low(y), v0, k0);
            term(high(y), v1, k1);
            value = join(v0, v1);
            rate = join(k0, k1);
        }
        template <int K, class V>
        ANYMAX_INLINE void terms(const V *y, V *value, V *rate) const {
            for (int j = 0; j < K; j++) term(y[j], value[j], rate[j]);
        }
    };
    At at(double level) const {
        return At{slope, r, level, near ? 1.0 + slope * level : 1.0, near ? ::log1p(slope * level) * r : 0.0, near};
    }
    bool near_one() const { return near; }
    static constexpr bool QUICK = false;
    double fall(double s0, double s1, double goal = 1.0) const {
        const double fall = -s0 * ::expm1(-::log(s0 / goal) / r) / s1;
        return near ? fall / slope : fall;
    }
    double level_of(double y) const { return near ? -1.0 / slope - y : -slope * y; }
    double reach(double level) const {
        if (slope <= 0.0) return -inf64;
        return near ? -1.0 / slope - level : -level / slope;
    }
    double tau(double level) const { return near ? -1.0 / slope - level : -level / slope; }
    static double least(double) { return 0.0; }
    double floor(double n) const {
        double least = ::exp(-::log(n) / r);  // u where every p is 1/n
        return near ? ::expm1(-::log(n) / r) / slope : least;
    }
};

}  // namespace ANYMAX_UNIT
