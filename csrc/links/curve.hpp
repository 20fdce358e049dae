// Entmax of any alpha in (1, 2) and normmax, of floats: the level is found in floats, and one or two passes in doubles finish it.
#pragma once

#include "core/rows.hpp"

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
    bool swept() const { return slope < 0.4 && (quarters == 8 || quarters == 12); }  // entmax 4/3 and 5/4: `sweep_root` has them

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

    template <class C>
    struct At {
        const Curve &curve;
        C level;
        template <class V>
        ANYMAX_INLINE void terms(V y, V &value, V &rate) const {
            V u = larger(y * (scalar<V>)curve.slope + (scalar<V>)level, V{});
            rate = u;
            curve.rates<1>(&rate);
            value = u * rate;
        }
    };
    template <class C>
    ANYMAX_INLINE At<C> at(C level) const {
        return At<C>{*this, level};
    }
    ANYMAX_INLINE double step(double s0, double s1) const { return -s0 * ::expm1(-::log(s0) / r) / s1; }
    template <class V>
    ANYMAX_INLINE V steps(V s0, V s1) const {  // of many rows
        const V l = log(s0);
        const V whole_ = s0 - s0 * exp(l * scalar<V>(-1.0 / r)), part = s0 * l * scalar<V>(1.0 / r);  // near 1 the difference would cancel
        return (absolute(l) < scalar<V>(sizeof(scalar<V>) == 4 ? 3e-4 : 1e-8) ? part : whole_) / s1;
    }
    ANYMAX_INLINE double reach(double level) const { return -level / slope; }
    ANYMAX_INLINE double tau(double level) const { return -level / slope; }
    bool near_one() const { return false; }
};

// How far from 1 a sum of p may be: what it takes to be 1 is made good to first order in the result.
constexpr double ENOUGH = 2e-6;

// Sums over the candidates, which end in -inf up to a whole vector.
inline Sums2 curve_sums(const Curve &curve, const float *x, int64_t count, float top_, float level) {
    constexpr int64_t W = width<float>;
    const vf high = splat(top_), c = splat((float)curve.slope), l = splat(level);
    vd wide0{}, wide1{};
    int64_t i = 0;
    for (; i + 4 * W <= count; i += 4 * W) {
        vf u[4], rate[4], s0{}, s1{};
        for (int j = 0; j < 4; j++) rate[j] = u[j] = larger((load(x + i + j * W) - high) * c + l, vf{});
        curve.rates<4>(rate);
        for (int j = 0; j < 4; j++) s0 += u[j] * rate[j], s1 += rate[j];
        wide0 = widen_add(wide0, s0), wide1 = widen_add(wide1, s1);
    }
    for (; i < count; i += W) {
        const vf u = larger((load(x + i) - high) * c + l, vf{});
        vf rate = u;
        curve.rates<1>(&rate);
        wide0 = widen_add(wide0, u * rate), wide1 = widen_add(wide1, rate);
    }
    return Sums2{sum(wide0), sum(wide1)};
}

// The same in doubles, which keeps the terms.
inline Sums2 curve_terms(const Curve &curve, const float *x, int64_t count, double top_, double level, double *value, double *rate) {
    constexpr int64_t W = width<double>;
    vd t0{}, t1{};
    int64_t i = 0;
    for (; i < count; i += 2 * W) {  // a vector of floats
        vd u[2], k[2];
        for (int j = 0; j < 2; j++) k[j] = u[j] = larger((load_wide(x + i + j * W) - top_) * curve.slope + level, vd{});
        curve.rates<2>(k);
        const vd v0 = u[0] * k[0], v1 = u[1] * k[1];
        store(value + i, v0), store(value + i + W, v1);
        store(rate + i, k[0]), store(rate + i + W, k[1]);
        t0 += v0 + v1, t1 += k[0] + k[1];
    }
    return Sums2{sum(t0), sum(t1)};
}

// p of the candidates, in doubles; and the level.
inline double *curve_root(const Curve &curve, Candidates<float> &c, float top_, double &level, Finish finish, Scratch &scratch) {
    constexpr int64_t W = width<float>;
    double *value = scratch.take<double>(WIDE, c.count + W), *rate = scratch.take<double>(EXTRA, c.count + W);
    if (scratch.failed) return nullptr;
    for (int64_t i = c.count; i < c.count + W; i++) c.value[i] = -inf32;
    for (int turn = 0; turn < 40; turn++) {
        const Sums2 s = curve_sums(curve, c.value, c.count, top_, (float)level);
        const double fall = curve.step(s.s0, s.s1);
        if (!(fall > 0.0) || !(fall < level)) break;  // as near as floats come
        level = (double)(float)level - fall;
        if (fall * curve.r <= 3e-4 * level) break;  // the next step is its square
    }
    const double enough = finish == NORMMAX_FINISH ? 1e-11 : ENOUGH;
    Sums2 s{};
    for (int turn = 0; turn < 40; turn++) {
        s = curve_terms(curve, c.value, c.count, (double)top_, level, value, rate);
        if (fabs(s.s0 - 1.0) <= enough) break;
        const double next = level - curve.step(s.s0, s.s1);
        if (!(next > 0.0) || next == level) break;
        level = next;
    }
    const vd lost = splat((s.s0 - 1.0) / s.s1), share = splat(1.0 / s.s1);
    for (int64_t i = 0; i < c.count; i += width<double>)
        store(value + i, finish == NORMMAX_FINISH ? load(rate + i) * share : larger(load(value + i) - load(rate + i) * lost, vd{}));
    level -= (s.s0 - 1.0) / (s.s1 * curve.r);
    return value;
}

}  // namespace ANYMAX_UNIT
