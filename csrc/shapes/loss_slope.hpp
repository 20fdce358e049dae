// The derivative of a loss of a target class by the parameter of its map, -dOmega/dparam at p.
#pragma once

#include "core/rows.hpp"
#include "links/slopes.hpp"

namespace ANYMAX_UNIT {

// From the probabilities of the row, with zeros among them or without; budget's from its threshold. Apart from its callers,
// which would pay for its registers where no slope is wanted.
template <class C>
__attribute__((noinline)) static double loss_slope(Link link, double param, const C *p, int64_t count, double tau) {
    switch (moving_of(link)) {
        case BY_ALPHA: break;
        case BY_NORM: {
            const NormRise norm = norm_rise(param, p, count);
            return -norm.rise * norm.norm();
        }
        case BY_BUDGET: return tau + 0.5;
        case UNMOVED: return not_a_number<double>;
    }
    const EntmaxOmegaRise rise{param - 1.0};
    vd total{};
    for (int64_t i = 0; i < count; i += width<C>) total = widen_add(total, rise.of(load_or(p, i, count, C(0))));
    return sum(total) / param;
}

// Of alpha = 1, whose log p is x less its largest and `rest`.
template <class C>
__attribute__((noinline)) static double loss_slope_softmax(const C *x, int64_t n, C high, double rest) {
    const EntmaxOmegaRise rise{0.0};
    const vec<C> top = splat(high), less = splat((C)rest);
    vd total{};
    for (int64_t i = 0; i < n; i += width<C>) {
        const vec<C> l = larger((load_or(x, i, n, -infinity<C>) - top) - less, splat(C(-1000)));
        total = widen_add(total, rise.of(exp(l), l));
    }
    return sum(total);
}

// The same of rows one a lane, in doubles: class_at(i) gives the part of the i-th class.
template <class C, class F>
ANYMAX_INLINE void lanes_loss_slope(int64_t n, double param, F class_at, double *to) {
    vd total[2]{};
    for (int64_t i = 0; i < n; i += 8) {
        vec<C> part_sum{};
        for (int64_t j = i; j < i + 8 && j < n; j++) part_sum += class_at(j);
        for (int h = 0; h < (sizeof(C) == 4 ? 2 : 1); h++) total[h] += part(part_sum, h);
    }
    for (int h = 0; h < (sizeof(C) == 4 ? 2 : 1); h++) store(to + h * width<double>, total[h] / param);
}

}  // namespace ANYMAX_UNIT
