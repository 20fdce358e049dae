// Omega, which makes the loss of a target with the score `aim` of the probabilities: sum p (x - aim) - Omega(p). Of entmax it
// is a sum over the classes, of normmax a function of one.
#pragma once

#include "core/packing.hpp"
#include "maps.hpp"

namespace ANYMAX_UNIT {

// -Omega / p of a class: (1 - p^c) / (c alpha) with c = alpha - 1, from 1 - p^c.
struct EntmaxOmega {
    double scale;
    constexpr explicit EntmaxOmega(double alpha) : scale(1.0 / ((alpha - 1.0) * alpha)) {}
    template <class V>
    ANYMAX_INLINE V own(V less) const {
        return less * scale;
    }
};

// The norm of p less 1, from the sum of q^alpha, where p = share q.
inline double normmax_omega(double powers, double alpha, double share) { return ::expm1(::log(powers) / alpha + ::log(share)); }
ANYMAX_INLINE vd normmax_omega(vd powers, double alpha, vd share) { return exp(log(powers) * (1.0 / alpha)) * share - 1.0; }

// A row's, a probability at a time. `high`: the largest. Of normmax above alpha = 2 p / high have powers that are numbers for
// any alpha, and below it those of p more digits.
struct Omega {
    ThresholdLink link;
    double alpha, share, powers;  // the sum of (p / share)^alpha
    EntmaxOmega entmax;
    Omega(ThresholdLink l, double param, double high)
        : link(l),
          alpha(l == POWER1 || l == CAPPED ? 2.0 : param),
          share(alpha > 2.0 ? high : 1.0),
          powers(0.0),
          entmax(alpha) {}
    // -Omega / p, or that of the class alone where it is no sum.
    double own(double p) {
        switch (link) {
            case POWER1:
            case CAPPED: return entmax.own(1.0 - p);
            case POWER2:
            case POWER3:
            case POWER4:
            case CURVE:
            case ANY_POWER:
            case STEEP: return entmax.own(-::expm1((alpha - 1.0) * ::log(p)));
            case NORM: return powers += ::exp(alpha * ::log(p / share)), 0.0;
            case NO_LINK: break;
        }
        return __builtin_nan("");
    }
    double rest() const { return link == NORM ? normmax_omega(powers, alpha, share) : 0.0; }
};

}  // namespace ANYMAX_UNIT
