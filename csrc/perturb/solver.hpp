// Normal, logistic and Laplace noise: p, its gradient and E max of one row. Its scores are summed up in cells, or taken one by
// one where that is cheaper: in short rows, and where they are far apart. For Laplace noise, whose h has a kink at 0, the
// scores above the first node are always taken one by one.
#pragma once

#include "perturb/cells.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

template <int N, class E>
struct Solver {
    static constexpr bool KINK = N == ANYMAX_LAPLACE;

    Row<E> row;
    int64_t count;  // nodes asked for
    Nodes at;
    double *kinks;
    int64_t kink_count;
    double low, high, log_g_low;  // the ends, and log G at the lower one
    bool summed;                  // there are cells, for all scores but those that are taken one by one
    double cut;                   // of those the ones of z > cut are taken; -inf: all
    Columns<E> single;            // a block of them, and which they are
    int64_t *index;
    Cache<E> cache;
    Cells<N, E> cells;

    void take(Arena &arena, int64_t n, int64_t nodes) {
        at.take(arena, nodes);
        arena.take(KINKS, kinks);
        single.take(arena, BLOCK);
        arena.take(BLOCK, index);
        arena.take(Cache<E>::SIZE, cache.base);
        if (n >= SUMMED_FROM) cells.take(arena);
    }
    Solver() = default;

    Solver(const Row<E> &r, int64_t nodes, Arena arena) : row(r), count(nodes), summed(false), cut(-inf64) {
        take(arena, r.n, nodes);
        const Ends &table = ends_for(N, row.n, mass_outside<E>(count));
        if (!KINK && row.n >= SUMMED_FROM) summed = cells.summarise(row, 0.0);
        const double last = table.at[0] - reach<N, E>;  // a score below this has probability 0
        if (!summed && (row.low - row.high) * row.inv < last) cut = last;
        find_ends(table, low, high, log_g_low, [&](double a, double b, double &la, double &lb) {
            logs_of_top(a, b, la, lb);
            each(0, [&](const Block<E> &block) {
                la += collect_log<N>(block, a);
                lb += collect_log<N>(block, b);
            });
        });
        if (KINK) {
            kink_count = highest(row, kinks);
            if (row.n >= SUMMED_FROM) summed = cells.summarise(row, low);
            if (summed) cut = low;
        }
    }

    void logs_of_top(double a, double b, double &la, double &lb) {
        vd u = all<vd>(a), l, h;
        u[1] = b;
        law<N, false>(u, vd{}, l, h);
        la = l[0];
        lb = l[1];
    }

    void rule(double from, double to, int64_t nodes) {
        if (KINK)
            panels(at, from, to, nodes / 4, kinks, kink_count);
        else
            trapezoid(at, from, to, nodes);
        for (int64_t q = 0; q < at.count; q += width<double>) {
            vd l, h;
            law<N, false>(load(at.u + q), vd{}, l, h);
            store(at.top_log + q, l);
            store(at.top_h + q, h * unit<N>);
        }
        double *const sums[] = {at.rest_log, at.rest_h, at.rest_hg};
        for (double *sum : sums) memset(sum, 0, (size_t)at.count * 8);
    }

    // -- scores one by one

    // Fills `one` and `index` with the scores from pos on; returns where the next block begins.
    int64_t load_all(int64_t pos, int64_t &got, double &highest_z) {
        const int64_t next = pos + BLOCK < row.n ? pos + BLOCK : row.n;
        vd most = all<vd>(-DEEPEST);
        got = next - pos;
        const int64_t padded = round_up(got, width<E>);
        for (int64_t j = 0; j < padded; j += width<double>) {
            const vd z = load_z(row, pos + j);
            most = larger(most, z);
            put_z(single.zh + j, single.zl + j, z);
            if (row.g) store_narrow(single.wg + j, load_g(row, pos + j));
        }
        for (int64_t j = 0; j < padded; j++) single.w[j] = E(j < got);
        for (int64_t j = 0; j < got; j++) index[j] = pos + j;
        if (row.top >= pos && row.top < next) single.w[row.top - pos] = single.wg[row.top - pos] = E(0);
        highest_z = highest_lane(most);
        return next;
    }
    // The same with those above `cut` alone.
    int64_t load_above(int64_t pos, int64_t &got, double &highest_z) {
        got = 0, highest_z = -DEEPEST;
        pos = each_between(row, pos, cut, inf64, BLOCK, [&](double z, double g, int64_t i) {
            const bool is_top = i == row.top;
            const double a = sizeof(E) == 8 ? z : (z + GRID) - GRID;
            highest_z = larger(highest_z, z);
            single.zh[got] = (E)a;
            single.zl[got] = (E)(z - a);
            single.w[got] = E(is_top ? 0 : 1);
            single.wg[got] = is_top ? E(0) : (E)g;
            index[got++] = i;
        });
        for (int64_t j = got; j < round_up(got, width<E>); j++) {
            single.zh[j] = E(-DEEPEST);
            single.zl[j] = single.w[j] = single.wg[j] = E(0);
        }
        return pos;
    }

    // f(block, how many scores are in it) for the scores that are taken one by one. The cache serves their blocks first, and
    // serves the same blocks each time.
    template <class F>
    ANYMAX_INLINE void each_single(int64_t nodes, F f) {
        cache.used = 0;
        if (summed && !KINK) return;
        for (int64_t pos = 0; pos < row.n;) {
            int64_t got;
            double highest_z;
            pos = cut == -inf64 ? load_all(pos, got, highest_z) : load_above(pos, got, highest_z);
            const int64_t m = round_up(got, width<E>);
            if (got) f(Block<E>{single, m, highest_z, cache.take(nodes, m)}, got);
        }
    }
    // f(block, its place) for the cells' points; the singles' blocks come first.
    template <class F>
    ANYMAX_INLINE void each_point(int64_t nodes, F f) {
        if (summed) cells.each(nodes, cache, f);
    }
    template <class F>
    ANYMAX_INLINE void each(int64_t nodes, F f) {
        each_single(nodes, [&](const Block<E> &block, int64_t) { f(block); });
        each_point(nodes, f);
    }

    // The sums at the nodes; MODE as in collect().
    template <int MODE>
    void sweep() {
        each(MODE ? at.count : 0, [&](const Block<E> &block) { collect<N, MODE>(block, at); });
    }

    // -- results

    void weigh() {
        for (int64_t q = 0; q < at.count; q += width<double>)
            store(at.c0 + q, load(at.w + q) * exp(load(at.top_log + q) + load(at.rest_log + q)));
    }

    // p is divided by the sum of what was found, so that its own is 1.
    void forward(E *p) {
        rule(low, high, count);
        sweep<1>();
        weigh();
        if (summed)
            forward_in_cells(p);
        else
            forward_one_by_one(p);
    }
    void forward_one_by_one(E *p) {
        vd norm{};
        if (cut > -inf64) memset(p, 0, (size_t)row.n * sizeof(E));
        each_single(at.count, [&](const Block<E> &block, int64_t got) {
            apply<N, 1>(block, at);
            for (int64_t j = got; j < block.m; j++) block.a0[j] = E(0);
            for (int64_t j = 0; j < block.m; j += width<E>) norm = widen_add(norm, load(block.a0 + j));
            for (int64_t j = 0; j < got; j++) p[index[j]] = block.a0[j];
        });
        divide(p, p, row.n, sum(norm));
    }
    void forward_in_cells(E *p) {
        double norm = 0.0;
        each_single(at.count, [&](const Block<E> &block, int64_t got) {
            apply<N, 1>(block, at);
            for (int64_t j = 0; j < got; j++) norm += (double)block.a0[j];
        });
        each_point(at.count, [&](const Block<E> &block) { apply<N, 1>(block, at); });
        cells.interpolate(cells.at.a0, cells.poly);
        norm = cells.add_total(norm, cells.poly);
        each_located([&](int64_t pos, int64_t m) {
            cells.evaluate(cells.poly, cells.value, m);
            divide(cells.value, p + pos, m, norm);
        });
        each_single(at.count, [&](const Block<E> &block, int64_t got) {
            apply<N, 1>(block, at);
            for (int64_t j = 0; j < got; j++) p[index[j]] = (E)((double)block.a0[j] / norm);
        });
    }
    // A polynomial may be below 0 by its rounding.
    static void divide(const E *from, E *to, int64_t n, double norm) {
        for (int64_t j = 0; j < n; j += width<double>)
            store_narrow_within(to, j, n, larger(load_wide_or(from, j, n, 0.0), vd{}) / norm);
    }

    // f(pos, m): the m scores from pos on are located in the cells.
    template <class F>
    ANYMAX_INLINE void each_located(F f) {
        for (int64_t pos = 0; pos < row.n; pos += CHUNK) {
            cells.locate(pos);
            f(pos, row.n - pos < CHUNK ? row.n - pos : CHUNK);
        }
    }

    // J^T g: the sum over the nodes of h_i (g_i sum h - sum h g), which needs two sums of h.
    void vjp(E *out) {
        rule(low, high, count);
        sweep<2>();
        weigh_gradient();
        if (summed)
            gradient_in_cells(out);
        else if (cut > -inf64)
            memset(out, 0, (size_t)row.n * sizeof(E));
        each_single(at.count, [&](const Block<E> &block, int64_t got) {
            apply<N, 2>(block, at);
            for (int64_t j = 0; j < got; j++) out[index[j]] = gradient(index[j], block.a0[j], block.a1[j]);
        });
    }
    void weigh_gradient() {
        weigh();
        const double top_g = one_g(row, row.top);
        double norm = 0.0;
        for (int64_t q = 0; q < at.count; q++) {
            const double s = at.rest_h[q] + at.top_h[q], t = at.rest_hg[q] + at.top_h[q] * top_g, wg = at.c0[q];
            norm += wg * s;
            at.c0[q] = wg * s;
            at.c1[q] = wg * t;
        }
        norm = 1.0 / norm;
        for (int64_t q = 0; q < at.count; q++) {
            at.c0[q] *= norm;
            at.c1[q] *= norm;
        }
    }
    void gradient_in_cells(E *out) {
        each_single(at.count, [](const Block<E> &, int64_t) {});  // their blocks come first in the cache
        each_point(at.count, [&](const Block<E> &block) { apply<N, 2>(block, at); });
        cells.interpolate(cells.at.a0, cells.poly);
        cells.interpolate(cells.at.a1, cells.poly1);
        each_located([&](int64_t pos, int64_t m) {
            cells.evaluate(cells.poly, cells.value, m);
            cells.evaluate(cells.poly1, cells.value1, m);
            finish(out, pos, m);
        });
    }
    E gradient(int64_t i, E a0, E a1) const { return (E)where_p(row, i, (one_g(row, i) * (double)a0 - (double)a1) * row.inv); }
    void finish(E *out, int64_t pos, int64_t m) {
        for (int64_t j = 0; j < m; j += width<double>) {
            const vd v = (load_g(row, pos + j) * load_wide(cells.value + j) - load_wide(cells.value1 + j)) * row.inv;
            store_narrow_within(out + pos, j, m, where_p(row, pos + j, v));
        }
    }

    // E max(z + eps) - E eps.
    double excess() {
        rule(ends_for(N, row.n, mass_outside<E>(count)).at[0], high, 2 * count);
        double log_f, none;
        logs_of_top(low, low, log_f, none);
        skip_low_nodes(at, low, log_g_low - log_f, sizeof(E) == 8);
        sweep<0>();
        return integral_above_top(at);
    }
};

}  // namespace perturb
}  // namespace ANYMAX_UNIT
