// Gumbel noise: p = softmax(z).
#pragma once

#include "perturb/row.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

template <class C>
struct Gumbel {
    Row<C> row;
    double rest;  // the sum of exp(z) over all scores but the top one, whose exp is 1

    Gumbel(const Row<C> &r, int64_t, Arena) : row(r) {
        vd s{};
        for (int64_t i = 0; i < row.n; i += width<double>) {
            vd e = exp(load_z(row, i));
            if (row.top >= i && row.top < i + width<double>) e[row.top - i] = 0.0;
            s += e;
        }
        rest = sum(s);
    }
    void forward(C *p) {
        for (int64_t i = 0; i < row.n; i += width<double>) store_narrow_within(p, i, row.n, exp(load_z(row, i)) / (1.0 + rest));
    }
    void vjp(C *out) {
        vd s{};
        for (int64_t i = 0; i < row.n; i += width<double>) s += exp(load_z(row, i)) * load_g(row, i);
        const double middle = sum(s) / (1.0 + rest);
        for (int64_t i = 0; i < row.n; i += width<double>)
            store_narrow_within(out, i, row.n,
                                where_p(row, i, exp(load_z(row, i)) / (1.0 + rest) * (load_g(row, i) - middle) * row.inv));
    }
    double excess() { return ::log1p(rest); }
};

}  // namespace perturb
}  // namespace ANYMAX_UNIT
