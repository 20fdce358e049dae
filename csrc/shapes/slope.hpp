// What a row gives for the parameter of its map: <g, dp/dparam>, from p or its saved support.
#pragma once

#include "links/slopes.hpp"
#include "shapes/backward.hpp"

namespace ANYMAX_UNIT {

// A support in whole vectors that end in zeros, and what is made of it.
template <class N>
struct Moves {
    const N *p, *g;
    N *s, *r;
    int64_t count;
    double rate, dot;

    // s and r of each class, and the mean of g by s; rise(p, s, r).
    template <class F>
    ANYMAX_INLINE void weigh(const F &rise) {
        constexpr int64_t W = width<N>;
        WideSum<N> of_s, of_g;
        for (int64_t i = 0; i < count; i += 4 * W, of_s.pause(), of_g.pause())
            for (int64_t j = i; j < i + 4 * W && j < count; j += W) {
                vec<N> a, b;
                rise(load(p + j), a, b);
                store(s + j, a), store(r + j, b);
                of_s.add(j, a), of_g.add(j, a * load(g + j));
            }
        rate = of_s.total(), dot = of_g.total();
    }
    // sum r (g - mean). In floats the mean is rounded, as is each product that it was made of: `off` says by how much.
    ANYMAX_INLINE double total() const {
        constexpr int64_t W = width<N>;
        const vec<N> mean = splat((N)(rate > 0.0 ? dot / rate : rate));
        WideSum<N> moved, off, rise;
        for (int64_t i = 0; i < count; i += 4 * W, moved.pause(), off.pause(), rise.pause())
            for (int64_t j = i; j < i + 4 * W && j < count; j += W) {
                const vec<N> h = load(g + j) - mean, d = load(r + j);
                moved.add(j, d * h), off.add(j, load(s + j) * h), rise.add(j, d);
            }
        return moved.total() - (rate > 0.0 ? off.total() / rate : rate) * rise.total();
    }
};

// The logarithm of the smallest.
template <class C>
ANYMAX_INLINE double lowest_log(const C *p, int64_t count) {
    vec<C> low = splat(C(1));
    for (int64_t i = 0; i < count; i += width<C>) low = smaller(low, load_or(p, i, count, C(1)));
    return ::log((double)lowest_lane(low));
}

// Normmax: -sum p log u (g - m) / c + dN/dalpha N^c / c sum p^(1 - c) (g - m), m the mean of g by p, u = p / most; less a
// multiple of p, which leaves nothing to cancel where u = 1.
template <class N>
inline void weigh_norm(double alpha, Moves<N> &m) {
    const NormRise norm = norm_rise(alpha, m.p, m.count);
    const double c = alpha - 1.0, log_most = ::log(norm.most), lowest = c > 1.0 ? lowest_log(m.p, m.count) - log_most : 0.0;
    const double high = 2.0 * log_most + norm.log_mass + (1.0 - c) * lowest;  // of N^alpha p^(1 - c), which are finite together
    const N by = (N)(norm.rise * ::exp(high < 700.0 ? high : 700.0) / c), over_most = (N)(1.0 / norm.most),
            multiple = (N)(norm.rise * norm.most * ::exp(norm.log_mass) / c);
    m.weigh([=](vec<N> p, vec<N> &s, vec<N> &r) ANYMAX_EACH {
        const vec<N> l = log_of(p * over_most);
        s = p, r = p == vec<N>{} ? p : by * exp((l - N(lowest)) * N(1.0 - c)) - p * (l * N(1.0 / c) + multiple);
    });
}

// <g, dp/dparam> of some rows of a link. Each step goes over all of them, so that no row waits for its own sums across lanes.
template <class N>
inline void slopes_of(Moving moving, double param, Moves<N> *rows, int64_t count, double *to) {
    const double c = param - 1.0;
    for (int64_t k = 0; k < count; k++) {
        if (moving == BY_NORM)
            weigh_norm(param, rows[k]);
        else if (c >= 0.5)
            rows[k].weigh(EntmaxRise<true>{c, c > 1.0 ? lowest_log(rows[k].p, rows[k].count) : 0.0});
        else
            rows[k].weigh(EntmaxRise<false>{c, 0.0});
    }
    for (int64_t k = 0; k < count; k++) to[k] = rows[k].total();
}

// Budget's: the mean of g over the classes strictly between 0 and 1.
template <class C>
inline double mean_inside(const C *p, const C *g, int64_t count) {
    vd many{}, dot{};
    for (int64_t i = 0; i < count; i += width<C>) {
        const vec<C> q = load(p + i);
        const ints<C> inside = (q > vec<C>{}) & (q < C(1));
        many = widen_add(many, q != q ? q : inside ? splat(C(1)) : vec<C>{});
        dot = widen_add(dot, inside ? load(g + i) : vec<C>{});
    }
    const double all = sum(many);
    return all == 0.0 ? 0.0 : sum(dot) / all;
}

// -- rows

// Those of p that are not 0, with their g, side by side, and zeros behind them.
template <class C>
inline int64_t pack_nonzeros(const C *p, const C *g, int64_t n, C *to_p, C *to_g) {
    constexpr int64_t W = width<C>;
    int64_t at = 0, i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        ints<C> m[4], any{};
        for (int j = 0; j < 4; j++) any |= m[j] = ~(load(p + i + j * W) == vec<C>{});
        if (!bits(any)) continue;
        for (int j = 0; j < 4; j++) {
            const uint32_t marked = bits(m[j]);
            if (!marked) continue;
            pack(load(p + i + j * W), marked, to_p + at);
            at += pack(load(g + i + j * W), marked, to_g + at);
        }
    }
    for (; i < n; i += W) {
        const vec<C> q = load_or(p, i, n, C(0));
        const uint32_t marked = bits(~(q == vec<C>{}));
        pack(q, marked, to_p + at);
        at += pack(load_or(g, i, n, C(0)), marked, to_g + at);
    }
    store(to_p + at, vec<C>{}), store(to_g + at, vec<C>{});
    return at;
}

// The support of a row, which was saved or is read from p, with its g. How many classes it has.
template <class C>
inline int64_t moved_classes(const anymax_call &call, int64_t row, int64_t n, C *p, C *g, Scratch &scratch) {
    constexpr int64_t W = width<C>;
    const int64_t size = anymax_item(call.dtype);
    const void *const own_g = row_at(call, call.g, size, row);
    const Saved<C> saved = saved_row<C>(call, row);
    if (saved.count < 0) {
        const C *q = stage<C>(row_at(call, call.p, size, row), call.p.cls, call.dtype, nullptr, 0, n, scratch, STAGED_P);
        const C *h = stage<C>(own_g, call.g.cls, call.dtype, nullptr, 0, n, scratch, STAGED_G);
        return scratch.failed ? 0 : pack_nonzeros(q, h, n, p, g);
    }
    for (int64_t i = 0; i < saved.count; i += W) {
        store(p + i, load_or(saved.value, i, saved.count, C(0)));
        store(g + i, gathered<C>(own_g, call.g.cls, call.dtype, saved.index + i, saved.count - i));
    }
    return saved.count;
}

// <g, dp/dparam> of rows: NaN where p has one, 0 where it has nothing but zeros.
template <class C>
static void slope_rows(const anymax_call &call, Link link, int64_t begin, int64_t end, Scratch &scratch) {
    constexpr int64_t W = width<C>, ROWS = 8;
    const Moving moving = moving_of(link);
    const bool wide = sizeof(C) == 4 && call.param > 2.0 &&
                      moving != BY_BUDGET;  // powers of p that grow as p falls leave the range of floats
    C *const value = (C *)call.value;
    if (moving == UNMOVED) {
        for (int64_t r = begin; r < end; r++) value[r] = not_a_number<C>;
        return;
    }
    for (int64_t r = begin, stop; r < end; r = stop) {
        int64_t most = 0;  // classes of these rows
        for (stop = r; stop < end && stop < r + ROWS; stop++) {
            const int64_t saved = saved_row<C>(call, stop).count, n = saved >= 0   ? saved
                                                                      : call.sizes ? call.sizes[stop]
                                                                                   : call.n;
            if (n > SLOPES_TOGETHER && stop > r) break;
            if (n > most) most = n;
            if (n > SLOPES_TOGETHER) {
                stop++;
                break;
            }
        }
        const int64_t step = (most + W - 1) / W * W + W, count = stop - r;
        C *const p = scratch.take<C>(VALUES, count * step), *const g = scratch.take<C>(EXTRA, count * step),
                 *const made = scratch.take<C>(WIDE, 2 * count * step);
        if (scratch.failed) return;
        Moves<C> rows[ROWS];
        double slopes[ROWS];
        for (int64_t k = 0; k < count; k++) {
            if (call.support.count) saved_ahead<C>(call, r + k, end);
            C *const at = made + 2 * k * step;
            rows[k] = Moves<C>{p + k * step, g + k * step, at, at + step, 0, 0.0, 0.0};
            rows[k].count =
                moved_classes(call, r + k, call.sizes ? call.sizes[r + k] : call.n, p + k * step, g + k * step, scratch);
        }
        if (scratch.failed) return;
        for (int64_t k = 0; k < count && moving == BY_BUDGET; k++) slopes[k] = mean_inside(rows[k].p, rows[k].g, rows[k].count);
        for (int64_t k = 0; k < count && wide; k++) {
            constexpr int64_t D = width<double>;
            const Moves<C> &row = rows[k];
            double *const more = scratch.take<double>(SORTED, 4 * step);
            if (!more) return;
            for (int64_t i = 0; i < row.count; i += D)
                store(more + i, load_wide_or(row.p, i, row.count, 0.0)),
                    store(more + step + i, load_wide_or(row.g, i, row.count, 0.0));
            Moves<double> in_doubles{more, more + step, more + 2 * step, more + 3 * step, row.count, 0.0, 0.0};
            slopes_of(moving, call.param, &in_doubles, 1, slopes + k);
        }
        if (moving != BY_BUDGET && !wide) slopes_of(moving, call.param, rows, count, slopes);
        for (int64_t k = 0; k < count; k++) value[r + k] = rows[k].count ? (C)slopes[k] : C(0);
    }
}

}  // namespace ANYMAX_UNIT
