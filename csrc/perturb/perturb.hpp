// Perturb max: p_i = P[argmax(x + scale * eps) = i] = INT G(u) h(u - z_i) du with z = (x - max x) / scale, h = f / F and
// G(u) = prod_j F(u - z_j), F and f the noise's cdf and density. One rule of nodes u serves all classes.
#pragma once

#include "core/families.hpp"
#include "perturb/gumbel.hpp"
#include "perturb/solver.hpp"
#include "perturb/uniform.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

constexpr int64_t at_least(int64_t nodes) { return nodes < NODES_LEAST ? NODES_LEAST : nodes; }

// f(solver) of the noise.
template <class C, class F>
ANYMAX_INLINE void with_solver(int noise, const Row<C> &row, int64_t nodes, double *work, F f) {
    const Arena arena{(char *)work, 0};
    const auto solve = [&](auto &&solver) ANYMAX_EACH { f(solver); };
    nodes = at_least(nodes);
    switch ((anymax_noise)noise) {
        case ANYMAX_NORMAL: return solve(Solver<ANYMAX_NORMAL, C>(row, nodes, arena));
        case ANYMAX_LOGISTIC: return solve(Solver<ANYMAX_LOGISTIC, C>(row, nodes, arena));
        case ANYMAX_LAPLACE: return solve(Solver<ANYMAX_LAPLACE, C>(row, nodes, arena));
        case ANYMAX_UNIFORM: return solve(Uniform<C>(row, nodes, arena));
        case ANYMAX_GUMBEL: return solve(Gumbel<C>(row, nodes, arena));
    }
}

// While it lives, results below the smallest normal number are set to 0. Far from a node h is such a number, and they are slow: without this normal
// and Laplace noise take a fifth longer.
struct Flush {
#if defined(__SSE2__)
    unsigned kept = _mm_getcsr();
    Flush() { _mm_setcsr(kept | 0x8000); }
    ~Flush() { _mm_setcsr(kept); }
#endif
};

}  // namespace perturb

// Doubles of scratch memory that the functions below need, `work`, aligned to a cache line: as many as the solver with the longest arrays takes.
int64_t perturb_work(int64_t n, int64_t nodes) {
    perturb::Arena arena{nullptr, 0};
    perturb::Solver<ANYMAX_LAPLACE, double>().take(arena, n, perturb::at_least(nodes));
    return arena.used / 8;
}

// p(x); x is finite but for -inf (masked classes: probability 0), one class at least is finite. tau, where it is not NULL, becomes E max(x + noise).
template <class C>
void perturb_forward(int noise, double scale, int64_t nodes, const C *x, int64_t n, C *p, double *tau, double *work) {
    [[maybe_unused]] const perturb::Flush flush;
    const perturb::Row<C> row = perturb::read_row(x, n, scale);
    perturb::with_solver(noise, row, nodes, work, [&](auto &solver) {
        solver.forward(p);
        if (tau) *tau = row.high + scale * (perturb::mean(noise) + solver.excess());
    });
}

// J^T g, with p = p(x); p may be NULL.
template <class C>
void perturb_vjp(int noise, double scale, int64_t nodes, const C *x, const C *p, const C *g, int64_t n, C *out, double *work) {
    [[maybe_unused]] const perturb::Flush flush;
    perturb::Row<C> row = perturb::read_row(x, n, scale);
    row.g = g;
    row.mid = (double)g[row.top];
    if (p) {  // a constant added to g changes nothing: less cancels where <p, g> is 0
        vd s{};
        for (int64_t i = 0; i < n; i += width<double>) {
            vd v{};
            if (i + width<double> <= n)
                v = load_wide(p + i);
            else
                for (int64_t k = 0; i + k < n; k++) v[k] = (double)p[i + k];
            s += v * perturb::load_g(row, i);
        }
        row.mid += sum(s);
    }
    perturb::with_solver(noise, row, nodes, work, [&](auto &solver) { solver.vjp(out); });
}

// E max(x + noise) - E noise - x[target], for a masked target infinite; tau as above.
template <class C>
double perturb_loss(int noise, double scale, int64_t nodes, const C *x, int64_t n, int64_t target, double *tau, double *work) {
    [[maybe_unused]] const perturb::Flush flush;
    const perturb::Row<C> row = perturb::read_row(x, n, scale);
    double value = 0.0;
    perturb::with_solver(noise, row, nodes, work, [&](auto &solver) {
        const double excess = scale * solver.excess();
        value = (row.high - (double)x[target]) + excess;
        if (tau) *tau = row.high + scale * perturb::mean(noise) + excess;
    });
    return value;
}

}  // namespace ANYMAX_UNIT
