// The weight of a class in J^T g, s = 1 / omega''(p): a power of p, by the link.
#pragma once

#include "core/vec.hpp"
#include "maps.hpp"

namespace ANYMAX_UNIT {

// The weight of a class, s = 1 / omega''(p) = dp/dt of a separable map: p^exponent for p > 0. NaN stays NaN.
enum Weighing {
    PLAIN,   // 1
    BELOW,   // 1 where p < 1
    OWN,     // p
    ROOT,    // p^1/2
    ROOTS,   // p^3/4
    THIRDS,  // p^2/3
    ROUGH,   // any power, for results in floats
    POWER    // any power
};

template <int F>
struct Weigh {
    static constexpr bool own = F == OWN, expensive = F >= ROOT;  // too expensive to compute twice
    double exponent;

    template <int K, class V>
    ANYMAX_INLINE void operator()(const V *p, V *w) const {
        typedef scalar<V> C;
        if (F == PLAIN || F == BELOW)
            for (int j = 0; j < K; j++) w[j] = all<V>(C(1)) + p[j] * C(0);
        if (F == OWN)
            for (int j = 0; j < K; j++) w[j] = p[j];
        if (F == ROOT)
            for (int j = 0; j < K; j++) w[j] = root2(p[j]);
        if (F == ROOTS)
            for (int j = 0; j < K; j++) w[j] = three_quarters(p[j]);
        if (F == THIRDS || F == ROUGH) {
            for (int j = 0; j < K; j++) w[j] = larger(p[j], all<V>(C(1.2e-38)));
            if (F == THIRDS && sizeof(C) == 4)
                for (int j = 0; j < K; j++) w[j] = (V)quick_two_thirds((vf)w[j]);
            else
                power_inside<K>(w, exponent);
            for (int j = 0; j < K; j++) w[j] = p[j] != p[j] ? p[j] : w[j];
        }
        if (F == POWER)
            for (int j = 0; j < K; j++) {
                w[j] = exp(log(p[j]) * C(exponent));
                if (sizeof(C) == 8) w[j] = w[j] < C(1e230) ? w[j] : all<V>(C(1e230));
                w[j] = p[j] != p[j] ? p[j] : w[j];
            }
        for (int j = 0; j < K; j++) w[j] = p[j] <= V{} || (F == BELOW && p[j] >= C(1)) ? V{} : w[j];
    }
    template <class V>
    ANYMAX_INLINE V operator()(V p) const {
        V w;
        (*this).template operator()<1>(&p, &w);
        return w;
    }
};

// The mean of g by the weights, from their sums of w and w g; where a weight is p itself, their sum is 1.
template <class F, class V>
ANYMAX_INLINE V mean_of(V rate, V dot) {
    return F::own ? dot : rate > V{} ? dot / rate : rate;
}

struct Sensitivity {
    Link link;
    double alpha, exponent;
    Weighing form;
    bool steep;

    // single: for results in floats
    Sensitivity(Link l, double param, bool single) : link(l), alpha(param), exponent(1.0) {
        switch (l.family) {
            case EXPONENTIALS:
            case TRUNCATIONS: break;
            case THRESHOLDS: exponent = of_threshold(l.threshold(), param); break;
            case RATIOS:
            case CEILINGS:
            case NOISES: exponent = __builtin_nan("");  // they have no such weight
        }
        steep = exponent < 0.0;
        form = l == CAPPED ? BELOW : exponent == 0.0 ? PLAIN : exponent == 1.0 ? OWN : exponent == 0.5 ? ROOT : POWER;
        if (form == POWER && single && !steep && exponent < 1.0)
            form = exponent == 0.75 ? ROOTS : ::fabs(exponent * 3.0 - 2.0) < 1e-7 ? THIRDS : ROUGH;
    }
    static double of_threshold(ThresholdLink l, double param) {
        switch (l) {
            case POWER1:
            case CAPPED: return 0.0;
            case POWER2:
            case POWER3:
            case POWER4:
            case CURVE:
            case ANY_POWER:
            case STEEP:
            case NORM: return 2.0 - param;
            case NO_LINK: break;
        }
        return __builtin_nan("");
    }
    // f(the form of the weights).
    template <class F>
    ANYMAX_INLINE auto with(F f) const {
        switch (form) {
            case PLAIN: return f(Weigh<PLAIN>{exponent});
            case BELOW: return f(Weigh<BELOW>{exponent});
            case OWN: return f(Weigh<OWN>{exponent});
            case ROOT: return f(Weigh<ROOT>{exponent});
            case ROOTS: return f(Weigh<ROOTS>{exponent});
            case THIRDS: return f(Weigh<THIRDS>{exponent});
            case ROUGH: return f(Weigh<ROUGH>{exponent});
            default: return f(Weigh<POWER>{exponent});
        }
    }
};

}  // namespace ANYMAX_UNIT
