// Ratio.relu: u = max(x, 0).
#pragma once

#include "core/packing.hpp"

namespace ANYMAX_UNIT {

template <class C>
struct ReluWeight {
    static constexpr bool SIGNED = false;
    C inverse;  // a power of two that takes the largest score to 1 or less, lest a sum overflow

    explicit ReluWeight(C top) : inverse(1) {
        int exponent = 0;
        if (top > C(0)) ::frexp((double)top, &exponent);
        inverse = (C)::ldexp(1.0, exponent > -120 ? -exponent : 120);
    }
    ANYMAX_INLINE vec<C> weight(vec<C> x) const { return larger(x * inverse, vec<C>{}); }
    ANYMAX_INLINE vec<C> slope(vec<C> x) const { return x > vec<C>{} ? splat(inverse) : vec<C>{}; }
};

}  // namespace ANYMAX_UNIT
