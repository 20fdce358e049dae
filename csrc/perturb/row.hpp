// One row of scores: its extremes, and its scores as z = (x - max x) / scale, a vector of doubles at a time.
#pragma once

#include "core/packing.hpp"
#include "perturb/nodes.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

template <class C>
struct Row {
    const C *x;
    const C *p, *g;    // the probabilities and the gradient of a vjp, or NULL
    int64_t n, top;    // top: the first of the highest scores
    double high, low;  // the highest score, and the lowest finite one
    double inv;        // 1 / scale
    double mid;        // subtracted from g
};

template <class C>
inline Row<C> read_row(const C *x, int64_t n, double scale) {
    constexpr int64_t W = width<C>;
    typedef vec<C> V;
    V high = splat(-infinity<C>), low = splat(infinity<C>);
    for (int64_t i = 0; i < n; i += W) {
        V v = load_or(x, i, n, -infinity<C>);
        high = larger(high, v);
        low = smaller(low, v > -infinity<C> ? v : splat(infinity<C>));
    }
    const C most = highest_lane(high);
    Row<C> row{x, nullptr, nullptr, n, 0, (double)most, (double)lowest_lane(low), 1.0 / (scale > 1e-300 ? scale : 1e-300), 0.0};
    const V goal = splat(most);
    for (int64_t i = 0; i < n; i += W) {
        uint32_t hit = bits((ints<C>)(load_or(x, i, n, -infinity<C>) == goal));
        if (hit) {
            row.top = i + __builtin_ctz(hit);
            break;
        }
    }
    return row;
}

// z of the scores from i on, as many as a vd holds; -DEEPEST after the end, for masked scores and for all below that.
template <class C>
ANYMAX_INLINE vd load_z(const Row<C> &row, int64_t i) {
    return larger((load_wide_or(row.x, i, row.n, -inf64) - row.high) * row.inv, all<vd>(-DEEPEST));
}

// value, but 0 where p is 0, and after the end: such a class has no part in a gradient, not even where its g is infinite.
template <class C>
ANYMAX_INLINE vd where_p(const Row<C> &row, int64_t i, vd value) {
    return load_wide_or(row.p, i, row.n, 0.0) == vd{} ? vd{} : value;
}
template <class C>
inline double where_p(const Row<C> &row, int64_t i, double value) {
    return row.p[i] == C(0) ? 0.0 : value;
}

// g - mid, of classes with p.
template <class C>
ANYMAX_INLINE vd load_g(const Row<C> &row, int64_t i) {
    return where_p(row, i, load_wide_or(row.g, i, row.n, 0.0) - row.mid);
}
template <class C>
inline double one_g(const Row<C> &row, int64_t i) {
    return where_p(row, i, (double)row.g[i] - row.mid);
}

// take(z, g, i) of the scores above `cut` and below `under`, a vector after the other from pos on while there is room for all
// of one more; the place behind them.
template <class C, class F>
ANYMAX_INLINE int64_t each_between(const Row<C> &row, int64_t pos, double cut, double under, int64_t room, F take) {
    constexpr int64_t W = width<double>;
    for (; pos < row.n && room >= W; pos += W) {
        const vd z = load_z(row, pos);
        uint32_t in = bits((vl)(z > cut)) & bits((vl)(z < under));
        if (!in) continue;
        const vd g = row.g ? load_g(row, pos) : vd{};
        for (room -= __builtin_popcount(in); in; in &= in - 1) {
            const int k = __builtin_ctz(in);
            if (pos + k < row.n) take(z[k], g[k], pos + k);
        }
    }
    return pos;
}

// The highest scores as z, descending; returns how many.
template <class C>
inline int64_t highest(const Row<C> &row, double *to) {
    constexpr int64_t W = width<double>;
    const int64_t most = row.n < KINKS ? row.n : KINKS;
    int64_t count = 0;
    for (int64_t i = 0; i < row.n; i += W) {
        const vd z = load_z(row, i);
        if (count == most && !bits((vl)(z > to[most - 1]))) continue;
        for (int64_t k = 0; k < W && i + k < row.n; k++) {
            if (count == most && !(z[k] > to[most - 1])) continue;
            int64_t j = count < most ? count++ : most - 1;
            for (; j > 0 && to[j - 1] < z[k]; j--) to[j] = to[j - 1];
            to[j] = z[k];
        }
    }
    return count;
}

}  // namespace perturb
}  // namespace ANYMAX_UNIT
