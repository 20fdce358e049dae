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

// f(solver) of the call's noise.
template <class C, class F>
ANYMAX_INLINE void with_solver(const anymax_call &call, const Row<C> &row, double *work, F f) {
    const Arena arena{(char *)work, 0};
    const auto solve = [&](auto &&solver) ANYMAX_EACH { f(solver); };
    const int64_t nodes = at_least(call.nodes);
    switch ((anymax_noise)call.noise) {
        case ANYMAX_NORMAL: return solve(Solver<ANYMAX_NORMAL, C>(row, nodes, arena));
        case ANYMAX_LOGISTIC: return solve(Solver<ANYMAX_LOGISTIC, C>(row, nodes, arena));
        case ANYMAX_LAPLACE: return solve(Solver<ANYMAX_LAPLACE, C>(row, nodes, arena));
        case ANYMAX_UNIFORM: return solve(Uniform<C>(row, nodes, arena));
        case ANYMAX_GUMBEL: return solve(Gumbel<C>(row, nodes, arena));
    }
}

// While it lives, results below the smallest normal number are set to 0. Far from a node h is such a number, and they are slow:
// without this normal and Laplace noise take a fifth longer.
struct Flush {
#if defined(__SSE2__)
    unsigned kept = _mm_getcsr();
    Flush() { _mm_setcsr(kept | 0x8000); }
    ~Flush() { _mm_setcsr(kept); }
#endif
};

}  // namespace perturb

// Doubles of scratch memory that the functions below need, `work`, aligned to a cache line: as many as the solver with the
// longest arrays takes.
int64_t perturb_work(int64_t n, int64_t nodes) {
    Arena arena{nullptr, 0};
    perturb::Solver<ANYMAX_LAPLACE, double>().take(arena, n, perturb::at_least(nodes));
    return arena.used / 8;
}

// p(x), for the call's noise, scale and nodes; x is finite but for -inf (masked classes: probability 0), one class at least is
// finite. tau, where it is not NULL, becomes E max(x + noise).
template <class C>
void perturb_forward(const anymax_call &call, const C *x, int64_t n, C *p, double *tau, double *work) {
    [[maybe_unused]] const perturb::Flush flush;
    const perturb::Row<C> row = perturb::read_row(x, n, call.param);
    perturb::with_solver(call, row, work, [&](auto &solver) {
        solver.forward(p);
        if (tau) *tau = row.high + call.param * (perturb::mean(call.noise) + solver.excess());
    });
}

// J^T g, with p = p(x).
template <class C>
void perturb_vjp(const anymax_call &call, const C *x, const C *p, const C *g, int64_t n, C *out, double *work) {
    [[maybe_unused]] const perturb::Flush flush;
    perturb::Row<C> row = perturb::read_row(x, n, call.param);
    row.p = p;
    row.g = g;
    row.mid = perturb::one_g(row, row.top);  // a constant added to g changes nothing: less cancels where <p, g> is 0
    vd s{};
    for (int64_t i = 0; i < n; i += width<double>) s += load_wide_or(p, i, n, 0.0) * perturb::load_g(row, i);
    row.mid += sum(s);
    perturb::with_solver(call, row, work, [&](auto &solver) { solver.vjp(out); });
}

// E max(x + noise) - E noise - x[target], for a masked target infinite; tau as above.
template <class C>
double perturb_loss(const anymax_call &call, const C *x, int64_t n, int64_t target, double *tau, double *work) {
    [[maybe_unused]] const perturb::Flush flush;
    const perturb::Row<C> row = perturb::read_row(x, n, call.param);
    double value = 0.0;
    perturb::with_solver(call, row, work, [&](auto &solver) {
        const double excess = call.param * solver.excess();
        value = (row.high - (double)x[target]) + excess;
        if (tau) *tau = row.high + call.param * perturb::mean(call.noise) + excess;
    });
    return value;
}

}  // namespace ANYMAX_UNIT
