// What a level is found of: one row, whose sums go across lanes, or rows one a lane; and the sums of a link's terms over
// either.
#pragma once

#include "links/power.hpp"

namespace ANYMAX_UNIT {

// Rows one a lane: at(i) gives the i-th vector of `count`. Sums of eight: the rounding of one long sum would show.
template <class V, class F>
struct LaneView {
    int64_t count;
    F at;
    typedef V Vector;
};
template <class V, class F>
ANYMAX_INLINE LaneView<V, F> lane_view(int64_t count, F at) {
    return {count, at};
}
template <class V>
ANYMAX_INLINE auto lane_view(int64_t count, const V *v) {
    return lane_view<V>(count, [=](int64_t i) ANYMAX_EACH { return v[i]; });
}

// One row: the same, and sums of 32 vectors, of doubles 64, go to doubles, whose lanes are joined in the end.
template <class V, class F>
struct RowView {
    int64_t count;
    F at;
    typedef V Vector;
    ANYMAX_INLINE int64_t whole() const { return count; }
    ANYMAX_INLINE V last(int64_t i) const { return at(i); }
};
template <class V, class F>
ANYMAX_INLINE RowView<V, F> row_view(int64_t count, F at) {
    return {count, at};
}
// Scores less their largest, in whole vectors.
template <class C>
ANYMAX_INLINE auto row_below(const C *x, int64_t count, C top) {
    const vec<C> high = splat(top);
    return row_view<vec<C>>(count, [=](int64_t i) ANYMAX_EACH { return load(x + i * width<C>) - high; });
}
ANYMAX_INLINE auto row_of_doubles(const double *y, int64_t count) {
    return row_view<vd>(count, [=](int64_t i) ANYMAX_EACH { return load(y + i * width<double>); });
}
// A row as it lies, of any length, in vectors of its own type or of doubles.
template <class C, class V>
struct RowAsItLies {
    typedef V Vector;
    static constexpr int64_t W = sizeof(V) / sizeof(scalar<V>);
    const C *x;
    int64_t n, count = (n + W - 1) / W;
    RowAsItLies(const C *scores, int64_t length) : x(scores), n(length) {}
    ANYMAX_INLINE int64_t whole() const { return n / W; }
    ANYMAX_INLINE V at(int64_t i) const {
        if constexpr (W == width<C>)
            return load(x + i * W);
        else
            return load_wide(x + i * W);
    }
    ANYMAX_INLINE V last(int64_t i) const {
        if constexpr (W == width<C>)
            return load_or(x, i * W, n, -infinity<C>);
        else
            return load_wide_or(x, i * W, n, -inf64);
    }
};

// Adds the terms of K vectors, by turns to two sums, so that none waits for the last.
template <int K, class At, class V, class F>
ANYMAX_INLINE void add_terms(const At &at, int64_t i, const V *y, Totals<V, 2> *sums, bool first, F keep) {
    V value[K], rate[K];
    at.template terms<K>(y, value, rate);
    for (int j = 0; j < K; j++) {
        sums[j & 1].add(0, value[j], first && j < 2), sums[j & 1].add(1, rate[j], first && j < 2);
        keep(i + j, value[j], rate[j]);
    }
}
// Those of COUNT vectors of a view.
template <int COUNT, class View, class At, class S, class F>
ANYMAX_INLINE void add_vectors(const View &view, const At &at, int64_t i, S *sums, bool first, F keep) {
    constexpr int K = At::template AT_ONCE<typename View::Vector>;
    for (int k = 0; k < COUNT; k += K) {
        typename View::Vector y[K];
        for (int j = 0; j < K; j++) y[j] = view.at(i + k + j);
        add_terms<K>(at, i + k, y, sums, first && k == 0, keep);
    }
}

struct Nothing {
    template <class V>
    ANYMAX_INLINE void operator()(int64_t, V, V) const {}
};

// Sums over a view; keep(i, value, rate) is told of each vector.
template <class V, class F, class At, class K>
ANYMAX_INLINE Totals<V, At::TOTALS> totals(const LaneView<V, F> &view, const At &at, K keep) {
    Totals<V, At::TOTALS> total{}, sums[2];
    const auto join = [&]() ANYMAX_EACH {
        for (int k = 0; k < At::TOTALS; k++) total.of[k] += sums[0].of[k] + sums[1].of[k];
    };
    int64_t i = 0;
    constexpr int STEP = At::DEAR ? At::template AT_ONCE<V> : 8;
    for (; i + STEP <= view.count; i += STEP) add_vectors<STEP>(view, at, i, sums, true, keep), join();
    for (; i < view.count; i++) {
        const V y = view.at(i);
        add_terms<1>(at, i, &y, &total, false, keep);
    }
    return total;
}
template <class View, class At, class K>
ANYMAX_INLINE Totals<double, At::TOTALS> totals(const View &view, const At &at, K keep) {
    typedef typename View::Vector V;
    constexpr int STEP = At::template AT_ONCE<V> == 1 ? 1 : 4, BLOCK = sizeof(scalar<V>) == 8 ? 64 : 32;
    Totals<vd, At::TOTALS> total{};
    const int64_t count = view.count, whole = view.whole();
    for (int64_t i = 0; i < count;) {
        Totals<V, At::TOTALS> sums[2]{};
        for (const int64_t end = i + BLOCK < whole ? i + BLOCK : whole; i + STEP <= end; i += STEP)
            add_vectors<STEP>(view, at, i, sums, false, keep);
        for (; i < count && i + STEP > whole; i++) {
            const V y = view.last(i);
            add_terms<1>(at, i, &y, sums, false, keep);
        }
        for (int k = 0; k < At::TOTALS; k++) total.of[k] = widen_add(total.of[k], sums[0].of[k] + sums[1].of[k]);
    }
    Totals<double, At::TOTALS> sums;
    for (int k = 0; k < At::TOTALS; k++) sums.of[k] = sum(total.of[k]);
    return sums;
}

}  // namespace ANYMAX_UNIT
