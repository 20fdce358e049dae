// Above alpha = 2 the link of entmax is infinitely steep at the edge of the support: the row is anchored at its smallest
// supported score.
#pragma once

#include "core/packing.hpp"

namespace ANYMAX_UNIT {

// sum over y > anchor of (q^c + c (y - anchor))^r, and its slope in q but for the anchor's own.
inline double steep_sum(const double *y, int64_t count, double anchor, double c, double q, double *slope) {
    constexpr int64_t W = width<double>;
    const double r = 1.0 / c, base = q > 0.0 ? ::exp(c * ::log(q)) : 0.0, log_q = q > 0.0 ? ::log(q) : 0.0;
    vd s0{}, s1{};
    for (int64_t i = 0; i < count; i += W) {
        const vd gap = load(y + i) - anchor;
        const vl in = gap > vd{};
        if (!bits(in)) continue;
        const vd l = log(in ? gap * c + base : all<vd>(1.0)) * r;
        s0 += in ? exp(l) : vd{};
        if (slope && q > 0.0) s1 += in ? exp((log_q - l) * (c - 1.0)) : vd{};
    }
    if (slope) *slope = sum(s1);
    return sum(s0);
}

// The smallest y of the support: that for which the ones above it sum to less than 1. y ends in -1e300 up to a whole vector.
inline double steep_anchor(const double *y, int64_t count, double c) {
    constexpr int64_t W = width<double>;
    auto least_from = [&](double from, bool itself) {  // the smallest y above it
        vd least = all<vd>(inf64);
        for (int64_t i = 0; i < count; i += W) {
            const vd v = load(y + i);
            const vl in = itself ? v >= from : v > from;
            least = in ? (v < least ? v : least) : least;
        }
        return lowest_lane(least);
    };
    vd most = all<vd>(-1e300);
    for (int64_t i = 0; i < count; i += W) most = larger(most, load(y + i));
    double inside = highest_lane(most), least = least_from(-1e299, true), empty = inside;  // none lies in [empty, inside)
    for (double next = least; least < inside;) {
        if (steep_sum(y, count, next, c, 0.0, nullptr) < 1.0)
            inside = empty = next;
        else
            least = least_from(next, false);
        do {
            const double middle = 0.5 * (least + empty);
            next = middle > least && middle < empty ? least_from(middle, true) : least;
            if (next == inside) empty = middle;
        } while (next == inside && least < inside);
    }
    return inside;
}

// Replaces y by p; returns tau - top. `above` takes as many.
inline double steep(double c, double *y, int64_t count, double *above) {
    constexpr int64_t W = width<double>;
    const double anchor = steep_anchor(y, count, c);
    int64_t size = 0, more = 0;  // at the anchor and above it
    for (int64_t i = 0; i < count; i++) {
        above[more] = y[i];
        more += y[i] > anchor, size += y[i] == anchor;
    }
    for (int64_t i = more; i < more + W; i++) above[i] = -1e300;
    double low = 0.0, high = 1.0 / (double)size, q = high;
    for (int turn = 0; turn < 200; turn++) {
        double slope, excess = steep_sum(above, more, anchor, c, q, &slope) + (double)size * q - 1.0;
        if (excess > 0.0)
            high = q;
        else
            low = q;
        double next = q - excess / (slope + (double)size);
        if (!(next > low && next < high)) next = fabs(excess) < 1e-15 ? q : 0.5 * (low + high);
        if (fabs(next - q) <= 2e-16 * q || next == q) {
            q = next;
            break;
        }
        q = next;
    }
    const double base = q > 0.0 ? ::exp(c * ::log(q)) : 0.0, r = 1.0 / c;
    for (int64_t i = 0; i < count; i += W) {
        const vd gap = load(y + i) - anchor;
        const vl in = gap > vd{};
        vd p = gap == vd{} ? all<vd>(q) : vd{};
        if (bits(in)) p = in ? exp(log(in ? gap * c + base : all<vd>(1.0)) * r) : p;
        store(y + i, p);
    }
    return anchor - base / c;
}

}  // namespace ANYMAX_UNIT
