// Softpick: max(exp(x) - 1, 0) over the sum of |exp(x) - 1|, and epsilon beside it. A weight below 0 counts for the sum alone.
#pragma once

#include <math.h>

#include "core/packing.hpp"

namespace ANYMAX_UNIT {

template <class C>
struct SoftpickWeight {
    static constexpr bool SIGNED = true;
    C high, factor, below;  // the largest score, 0 at least; a factor of all numbers beside exp(-high), and both together
    double more;            // beside the sum

    SoftpickWeight(C top, double epsilon) : high(top > C(0) ? top : C(0)), factor(1) {
        int exponent = 0;
        if (high > C(0)) ::frexp((double)high, &exponent);
        if (exponent < -20) factor = (C)::ldexp(1.0, exponent > -100 ? -exponent : 100);  // lest 1 over the sum overflow
        const double down = ::exp(-(double)high) * (double)factor;
        below = (C)down, more = epsilon * down;
    }
    // 1 - exp(-|x|): by exp and log where they nearly cancel (Kahan)
    static ANYMAX_INLINE vec<C> missing(vec<C> x) {
        const vec<C> y = -absolute(x), e = exp(y);
        const vec<C> near = e == splat(C(1)) ? -y : (C(1) - e) * (y / log(e));
        return e < C(0.5) ? C(1) - e : near;
    }
    ANYMAX_INLINE vec<C> weight(vec<C> x) const {
        const vec<C> u = x > vec<C>{} ? exp(x - high) * factor : splat(-below);
        return x > -infinity<C> ? u * missing(x) : vec<C>{};
    }
    ANYMAX_INLINE vec<C> slope(vec<C> x) const { return exp(x - high) * factor; }
};

}  // namespace ANYMAX_UNIT
