// Sigsoftmax: u = exp(x) sigmoid(x).
#pragma once

#include "core/packing.hpp"

namespace ANYMAX_UNIT {

template <class C>
struct SigmoidWeight {
    static constexpr bool SIGNED = false;
    C high, fold;  // the largest score, and what is taken off a negative one once more

    SigmoidWeight(C top) : high(top), fold(top < 0 ? top : C(0)) {}
    // x above 0 and 2 x below, less the same of the largest score: with log(1 + exp(-|x|)), log u
    ANYMAX_INLINE vec<C> bent(vec<C> x) const { return (x - high) + (x < vec<C>{} ? x - fold : vec<C>{}); }
    ANYMAX_INLINE vec<C> weight(vec<C> x) const {
        vec<C> a[2] = {-absolute(x), bent(x)};
        exp_below<2>(a);
        return a[1] / (a[0] + C(1));
    }
    // (log u)' = 1 + sigmoid(-x)
    static ANYMAX_INLINE vec<C> log_slope(vec<C> x) {
        const vec<C> e = exp(-absolute(x));
        return (x < vec<C>{} ? splat(C(1)) : e) / (e + C(1)) + C(1);
    }
    ANYMAX_INLINE vec<C> slope(vec<C> x) const { return weight(x) * log_slope(x); }
    ANYMAX_INLINE vec<C> logarithm(vec<C> x) const { return bent(x) - log1p(exp(-absolute(x))); }
};

}  // namespace ANYMAX_UNIT
