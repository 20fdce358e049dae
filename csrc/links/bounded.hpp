// Bounded: p = min(f(x - tau), u), f a link of entmax (power.hpp, any_power.hpp). What lies below its bound is free: it has the
// rate of f; a full one has none.
#pragma once

#include "links/any_power.hpp"

namespace ANYMAX_UNIT {

// A curve for results in floats: u ends at 1, where no bound lies above.
struct BoundedCurve : Curve {
    using Curve::Curve;
    template <class N>
    ANYMAX_INLINE At<N, true> at(N level) const {
        return At<N, true>{*this, level};
    }
};

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
            return load(bound + i * width<C>);
        else
            return load_wide(bound + i * width<double>);
    }
};

// What rounds to its bound is full.
constexpr double NEARLY_FULL = 1.0 - 0x1p-51;

// A link under bounds: at<V>(i) gives those of the i-th vector.
template <class A, class U>
struct UnderAt {
    static constexpr int TOTALS = 3;
    static constexpr bool DEAR = A::DEAR;
    template <class>
    static constexpr int AT_ONCE = 4;
    A free;
    const U &bound;
};
template <class L, class U>
struct Under {
    const L &link;
    const U &bound;
    template <class N>
    ANYMAX_INLINE auto at(N level) const {
        return UnderAt<decltype(link.at(level)), U>{link.at(level), bound};
    }
};
template <class L, class U>
ANYMAX_INLINE Under<L, U> under(const L &link, const U &bound) {
    return Under<L, U>{link, bound};
}
template <int K, class A, class U, class V, class F>
ANYMAX_INLINE void add_terms(const UnderAt<A, U> &at, int64_t i, const V *y, Totals<V, 3> *sums, bool first, F keep) {
    V value[K], rate[K];
    at.free.template terms<K>(y, value, rate);
    for (int j = 0; j < K; j++) {
        const bool begins = first && j < 2;
        const V most = at.bound.template at<V>(i + j);
        const auto inside = value[j] < most * scalar<V>(NEARLY_FULL);
        sums[j & 1].add(0, inside ? value[j] : V{}, begins), sums[j & 1].add(1, inside ? rate[j] : V{}, begins);
        sums[j & 1].add(2, inside ? V{} : most, begins);
        keep(i + j, value[j], rate[j]);
    }
}

// The level at which y has f = 1.
template <class L>
inline double level_of_all(const L &link, double y) {
    return link.level_of(y) + (link.level_of(0.0) < 0.0 ? -link.level_of(0.0) : 1.0);
}

}  // namespace ANYMAX_UNIT
