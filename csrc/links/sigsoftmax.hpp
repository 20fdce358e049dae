// Sigsoftmax: u = exp(x) sigmoid(x).
#pragma once

#include "core/lanes.hpp"

namespace ANYMAX_UNIT {

template <class C>
struct SigmoidWeight {
    C high, fold;  // the largest score, and what is taken off a negative one once more

    SigmoidWeight(C top_) : high(top_), fold(top_ < 0 ? top_ : C(0)) {}
    // x above 0 and 2 x below, less the same of the largest score: with log(1 + exp(-|x|)), log u
    ANYMAX_INLINE vec<C> bent(vec<C> x) const { return (x - high) + (x < vec<C>{} ? x - fold : vec<C>{}); }
    ANYMAX_INLINE vec<C> weight(vec<C> x) const {
        vec<C> a[2] = {-absolute(x), bent(x)};
        exp_below<2>(a);
        return a[1] / (a[0] + C(1));
    }
    ANYMAX_INLINE vec<C> slope(vec<C> x) const {  // u' = u (1 + sigmoid(-x))
        vec<C> e = exp(-absolute(x));
        vec<C> s = (x < vec<C>{} ? splat(C(1)) : e) / (e + C(1));
        vec<C> u = weight(x);
        return u * (s + C(1));
    }
    ANYMAX_INLINE vec<C> logarithm(vec<C> x) const {
        return bent(x) - log1p(exp(-absolute(x)));
    }
};

}  // namespace ANYMAX_UNIT
