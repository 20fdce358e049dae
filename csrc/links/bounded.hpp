// Bounded: p = min(f(x - tau), u), f a link of entmax (power.hpp, any_power.hpp). What lies below its bound is free: it has the
// rate of f; a full one has none.
#pragma once

#include "links/any_power.hpp"

namespace ANYMAX_UNIT {

// A curve for results in floats: u ends at 1, where no bound lies above.
struct BoundedCurve {
    Curve curve;
    double r;
    BoundedCurve(double c, double exponent) : curve(c, exponent), r(exponent) {}

    template <class C>
    struct At {
        const Curve &curve;
        C level;
        template <int K, class V>
        ANYMAX_INLINE void terms(const V *y, V *value, V *rate) const {
            for (int j = 0; j < K; j++)
                value[j] = rate[j] =
                    smaller(larger(y[j] * (scalar<V>)curve.slope + (scalar<V>)level, V{}), all<V>(scalar<V>(1)));
            curve.rates<K>(rate);
            for (int j = 0; j < K; j++) value[j] *= rate[j];
        }
        template <class V>
        ANYMAX_INLINE void terms(V y, V &value, V &rate) const {
            terms<1>(&y, &value, &rate);
        }
    };
    template <class C>
    ANYMAX_INLINE At<C> at(C level) const {
        return At<C>{curve, level};
    }
    double tau(double level) const { return curve.tau(level); }
    static double least(double) { return 0.0; }
};

template <int K, class A, class V>
ANYMAX_INLINE void terms_of(const A &at, const V *y, V *value, V *rate) {
    for (int j = 0; j < K; j++) at.terms(y[j], value[j], rate[j]);
}
template <int K, class C, class V>
ANYMAX_INLINE void terms_of(const BoundedCurve::At<C> &at, const V *y, V *value, V *rate) {
    at.template terms<K>(y, value, rate);
}

// Bounds of candidates: one for all, or one each, padded with 0.
template <class C>
struct OneBound {
    C bound;
    template <class V>
    ANYMAX_INLINE V at(int64_t) const {
        return all<V>(bound);
    }
};
template <class C>
struct EachBound {
    const C *bound;
    template <class V>
    ANYMAX_INLINE V at(int64_t i) const {
        if constexpr (sizeof(scalar<V>) == sizeof(C))
            return load(bound + i);
        else
            return load_wide(bound + i);
    }
};

// What rounds to its bound is full.
constexpr double NEARLY_FULL = 1.0 - 0x1p-51;

struct BoundedSums {
    double free, rate, full;  // of what lies below its bound the values and rates; of the others the bounds
    double excess() const { return (full - 1.0) + free; }
};

// Of count entries in whole vectors, beyond them none that has a value: y(i) gives the vector from the i-th on.
template <class V, class L, class U, class Y>
inline BoundedSums bounded_sums(const L &link, const U &bound, int64_t count, double level, Y y) {
    typedef scalar<V> C;
    constexpr int64_t W = width<C>;
    const auto at = link.at((C)level);
    vd free{}, rate{}, full{};
    for (int64_t i = 0; i < count;) {  // sums of blocks: a long row rounds no more than a short one
        V f{}, r{}, u{};
        const auto add = [&](int64_t j, V v, V k) ANYMAX_EACH {
            const V most = bound.template at<V>(j);
            const auto inside = v < most * C(NEARLY_FULL);
            f += inside ? v : V{}, r += inside ? k : V{};
            u += v > V{} ? (inside ? V{} : most) : V{};
        };
        const int64_t end = i + 32 * W < count ? i + 32 * W : count;
        for (; i + 4 * W <= end; i += 4 * W) {
            V a[4], v[4], k[4];
            for (int j = 0; j < 4; j++) a[j] = y(i + j * W);
            terms_of<4>(at, a, v, k);
            for (int j = 0; j < 4; j++) add(i + j * W, v[j], k[j]);
        }
        for (; i < end; i += W) {
            V a = y(i), v, k;
            terms_of<1>(at, &a, &v, &k);
            add(i, v, k);
        }
        free = widen_add(free, f), rate = widen_add(rate, r), full = widen_add(full, u);
    }
    return BoundedSums{sum(free), sum(rate), sum(full)};
}

// By how much a level is too high for the free ones to sum to `mass`: Newton's step on their r-norm, as in power.hpp.
template <int R>
inline double bounded_step(const Power<R> &, const BoundedSums &s, double mass) {
    if (R == 1) return (s.free - mass) / s.rate;
    if (R == 2) return (s.free - sqrt(s.free * mass)) / s.rate;
    return -s.free * ::expm1(::log(mass / s.free) / R) / s.rate;
}
inline double bounded_step(const BoundedCurve &link, const BoundedSums &s, double mass) {
    return -s.free * ::expm1(::log(mass / s.free) / link.r) / s.rate;
}
inline double bounded_step(const AnyPower &link, const BoundedSums &s, double mass) {
    const double fall = -s.free * ::expm1(::log(mass / s.free) / link.r) / s.rate;
    return link.near ? fall / link.slope : fall;
}

// The level at which y, or more, has f = 0, and that at which y has f = 1.
template <int R>
inline double level_of_none(const Power<R> &, double y) {
    return -y / R;
}
inline double level_of_none(const BoundedCurve &link, double y) { return -link.curve.slope * y; }
inline double level_of_none(const AnyPower &link, double y) { return link.near ? -1.0 / link.slope - y : -link.slope * y; }
template <class L>
inline double level_of_all(const L &link, double y) {
    return level_of_none(link, y) + (level_of_none(link, 0.0) < 0.0 ? -level_of_none(link, 0.0) : 1.0);
}

// Of a bracket; of a very wide one by its logarithm.
inline double bounded_middle(double low, double high) {
    const double least = low > 1.0 ? low : 1.0;
    return high > 16.0 * least ? sqrt(least) * sqrt(high) : low + (high - low) * 0.5;
}

struct BoundedRoot {
    double level, next, low, sure;  // `next`: where Newton's step from there leads; `low`: the last one where the sum was 1 at
                                    // most, `sure`: and surely more
    BoundedSums sums;
    bool reached;  // the sum was no less than 1 at the first level
};

// A level of y(i) where the sum is within `enough` of 1, between `low`, where it is 1 at most, and `high`, where it is no less:
// Newton's steps, which the bounds may lead astray, within the bracket. falls: the first level is worth going on from only
// where it is not too low.
template <class V, class L, class U, class Y>
inline BoundedRoot bounded_root(const L &link, const U &bound, int64_t count, double level, double low, double high,
                                double enough, int turns, bool falls, Y y) {
    BoundedSums s{};
    double next = level, sure = high;
    for (int turn = 0; turn < turns; turn++) {
        s = bounded_sums<V>(link, bound, count, level, y);
        const double excess = s.excess(), mass = 1.0 - s.full;
        if (falls && turn == 0 && excess < 0.0) return BoundedRoot{level, next, low, sure, s, false};
        (excess > 0.0 ? high : low) = level;
        if (excess > 1e-5) sure = level;
        const double newton =
            mass > 0.0 && s.rate > 0.0 && s.free > 0.0 ? level - bounded_step(link, s, mass) : not_a_number<double>;
        next = newton > low && newton < high ? newton : level;
        if (fabs(excess) <= enough) break;
        next = newton;
        if (next == level || (fabs(excess) <= 1e-9 && fabs(next - level) <= 4e-16 * fabs(level)))
            break;  // bounded_values does the rest
        if (!(next > low && next < high) || (turn >= 12 && turn % 2)) next = bounded_middle(low, high);
        if (!(next > low && next < high)) break;
        level = next;
    }
    return BoundedRoot{level, next, low, sure, s, true};
}

// p in the place of y.
template <class L, class U>
inline void bounded_values(const L &link, const U &bound, const BoundedRoot &root, double *y, int64_t count) {
    constexpr int64_t W = width<double>;
    const double lost = root.sums.rate > 0.0 ? root.sums.excess() / root.sums.rate : 0.0, least = L::least(fabs(root.level));
    const auto at = link.at(root.level);
    for (int64_t i = 0; i < count; i += 2 * W) {  // y goes on beyond its end
        vd a[2] = {load(y + i), load(y + i + W)}, v[2], k[2];
        terms_of<2>(at, a, v, k);
        for (int j = 0; j < 2; j++) {
            const vd most = bound.template at<vd>(i + j * W), p = v[j] - k[j] * lost;
            const vl inside = (v[j] < most * NEARLY_FULL) & (p < most);
            store(y + i + j * W, inside ? (p > least ? p : vd{}) : most);
        }
    }
}

}  // namespace ANYMAX_UNIT
