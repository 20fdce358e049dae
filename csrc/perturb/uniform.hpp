// Uniform noise.
#pragma once

#include "perturb/blocks.hpp"
#include "perturb/row.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

// On [-1, 0]: F(v) = 1 + v. Only the scores above the first node have a part in p, and those are few, so that all is done in
// doubles for floats too. The support of a score ends inside a panel; the weights of that panel's nodes are the integrals of
// its polynomial over the support.
template <class C>
struct Uniform {
    Row<C> row;
    int64_t count;
    Nodes at;
    double *kinks, *z, *g, *a0, *a1;  // z, g and the two results of a block of scores
    int64_t *index, kink_count;       // and which they are
    double low, high, log_g_low;      // the ends, and log G at the lower one
    double ties, ties_g;              // how many scores equal the top one, it included, and the sum of their g

    void take(Arena &arena, int64_t nodes) {
        at.take(arena, nodes);
        arena.take(KINKS, kinks);
        arena.take(BLOCK, z, g, a0, a1, index);
    }

    Uniform(const Row<C> &r, int64_t nodes, Arena arena) : row(r), count(nodes), ties(0.0), ties_g(0.0) {
        take(arena, nodes);
        constexpr int64_t W = width<double>;
        for (int64_t i = 0; i < row.n; i += W) {
            const uint32_t same = bits((vl)(load_z(row, i) >= 0.0));
            if (!same) continue;
            ties += (double)__builtin_popcount(same);
            if (row.g) {
                const vd v = load_g(row, i);
                for (int64_t k = 0; k < W; k++) ties_g += same >> k & 1 ? v[k] : 0.0;
            }
        }
        find_ends(ends_for(ANYMAX_UNIFORM, row.n, mass_outside<C>(count)), low, high, log_g_low,
                  [&](double a, double b, double &la, double &lb) {
                      la = (ties - 1.0) * ::log1p(a);
                      lb = (ties - 1.0) * ::log1p(b);
                      each(a < b ? a : b, [&](int64_t m, double) {
                          la += log_product(m, a);
                          lb += log_product(m, b);
                      });
                      la += ::log1p(a);
                      lb += ::log1p(b);
                  });
        kink_count = highest(row, kinks);
    }

    void rule(double from, int64_t nodes) {
        panels(at, from, high, row.n > KINKS ? nodes : nodes / 4, kinks, kink_count);
        for (int64_t q = 0; q < at.count; q++) {
            at.top_log[q] = ::log1p(at.u[q]);
            at.top_h[q] = 1.0 / (1.0 + at.u[q]);
            at.rest_log[q] = (ties - 1.0) * at.top_log[q];
            at.rest_h[q] = ties * at.top_h[q];
            at.rest_hg[q] = ties_g * at.top_h[q];
        }
    }

    // f(m, the highest z) for blocks of the scores above `cut` and below the top: m of them in z, g and index; after them
    // -DEEPEST up to a multiple of the vector.
    template <class F>
    ANYMAX_INLINE void each(double cut, F f) {
        for (int64_t pos = 0; pos < row.n;) {
            int64_t m = 0;
            double most = -DEEPEST;
            pos = each_between(row, pos, cut, 0.0, BLOCK, [&](double v, double own_g, int64_t i) {
                most = larger(most, v);
                z[m] = v, g[m] = own_g, index[m++] = i;
            });
            for (int64_t j = m; j < round_up(m, width<double>); j++) z[j] = -DEEPEST, g[j] = 0.0;
            if (m) f(m, most);
        }
    }

    // log prod (1 + min(u - z, 0)): of the product, or where that is close to 1, log1p of its difference from 1, which is
    // summed up separately.
    double log_product(int64_t m, double u) {
        vd out{};
        for (int64_t j = 0; j < m;) {
            vd product = all<vd>(1.0), less{};
            const int64_t end = j + 8 * width<double> < m ? j + 8 * width<double> : m;
            for (; j < end; j += width<double>) {
                const vd v = smaller(u - load(z + j), vd{});
                less = less + (v + less * v);
                product = product + product * v;
            }
            out += less > -0.5 ? log1p(less) : log(product);
        }
        return sum(out);
    }

    // h of a vector of scores at node i of the panel [left, right].
    ANYMAX_INLINE static vd hazard(vd zj, double u, double left, double right, int i) {
        vd h = 1.0 / (1.0 + smaller(u - zj, vd{}));
        if (!bits((vl)(zj < right))) return h;
        vd part = zj < right ? vd{} : all<vd>(1.0);
        const vl inside = (vl)(zj > left) & (vl)(zj < right);
        if (bits(inside)) {
            const vd t = (zj - left) * (2.0 / (right - left)) - 1.0;
            vd s = all<vd>(GAUSS_PART[PANEL][i]);
            for (int k = PANEL - 1; k >= 0; k--) s = s * t + GAUSS_PART[k][i];
            part = inside ? s : part;
        }
        return h * part;
    }

    template <int MODE>
    void sweep() {
        each(at.u[0] < low ? at.u[0] : low, [&](int64_t m, double most) {
            for (int64_t q = at.first; q < at.count; q++) {
                const double left = at.edges[q / PANEL], right = at.edges[q / PANEL + 1], u = at.u[q];
                if (most <= left) break;
                at.rest_log[q] += log_product(m, u);
                if (MODE == 0) continue;
                vd s{}, t{};
                for (int64_t j = 0; j < m; j += width<double>) {
                    const vd h = hazard(load(z + j), u, left, right, (int)(q % PANEL));
                    s += h;
                    if (MODE > 1) t += h * load(g + j);
                }
                at.rest_h[q] += sum(s);
                at.rest_hg[q] += sum(t);
            }
        });
        for (int64_t q = 0; q < at.count; q++) at.c0[q] = at.w[q] * ::exp(at.top_log[q] + at.rest_log[q]);
    }

    template <int R>
    void apply(int64_t m, double most) {
        const int64_t padded = round_up(m, width<double>);
        memset(a0, 0, (size_t)padded * 8);
        if (R > 1) memset(a1, 0, (size_t)padded * 8);
        for (int64_t q = 0; q < at.count; q++) {
            const double left = at.edges[q / PANEL], right = at.edges[q / PANEL + 1], u = at.u[q];
            if (most <= left) break;
            for (int64_t j = 0; j < m; j += width<double>) {
                const vd h = hazard(load(z + j), u, left, right, (int)(q % PANEL));
                store(a0 + j, load(a0 + j) + h * at.c0[q]);
                if (R > 1) store(a1 + j, load(a1 + j) + h * at.c1[q]);
            }
        }
    }

    void forward(C *p) {
        rule(low, count);
        sweep<1>();
        double own = 0.0;
        for (int64_t q = 0; q < at.count; q++) own += at.c0[q] * at.top_h[q];
        double norm = ties * (double)(C)own;
        memset(p, 0, (size_t)row.n * sizeof(C));
        each(low, [&](int64_t m, double most) {
            apply<1>(m, most);
            for (int64_t j = 0; j < m; j++) {
                const C v = (C)larger(a0[j], 0.0);
                norm += (double)v;
                p[index[j]] = v;
            }
        });
        constexpr int64_t W = width<double>;
        const double top_p = (double)(C)own / norm;
        for (int64_t i = 0; i < row.n; i += W) {
            const vd v = load_z(row, i);
            if (!bits((vl)(v > low))) continue;
            for (int64_t k = 0; k < W && i + k < row.n; k++) p[i + k] = (C)(v[k] >= 0.0 ? top_p : (double)p[i + k] / norm);
        }
    }

    void vjp(C *out) {
        rule(low, count);
        sweep<2>();
        double norm = 0.0, own = 0.0, own1 = 0.0;
        for (int64_t q = 0; q < at.count; q++) norm += at.c0[q] * at.rest_h[q];
        for (int64_t q = 0; q < at.count; q++) {
            const double wg = at.c0[q] / norm;
            at.c0[q] = wg * at.rest_h[q];
            at.c1[q] = wg * at.rest_hg[q];
            own += at.c0[q] * at.top_h[q];
            own1 += at.c1[q] * at.top_h[q];
        }
        memset(out, 0, (size_t)row.n * sizeof(C));
        each(low, [&](int64_t m, double most) {
            apply<2>(m, most);
            for (int64_t j = 0; j < m; j++) out[index[j]] = (C)where_p(row, index[j], (g[j] * a0[j] - a1[j]) * row.inv);
        });
        constexpr int64_t W = width<double>;
        for (int64_t i = 0; i < row.n; i += W) {
            const vd v = load_z(row, i);
            if (!bits((vl)(v >= 0.0))) continue;
            for (int64_t k = 0; k < W && i + k < row.n; k++)
                if (v[k] >= 0.0) out[i + k] = (C)where_p(row, i + k, (one_g(row, i + k) * own - own1) * row.inv);
        }
    }

    double excess() {
        rule(ends_for(ANYMAX_UNIFORM, row.n, mass_outside<C>(count)).at[0], 2 * count);
        skip_low_nodes(at, low, log_g_low - ::log1p(low), sizeof(C) == 8);
        sweep<0>();
        return integral_above_top(at);
    }
};

}  // namespace perturb
}  // namespace ANYMAX_UNIT
