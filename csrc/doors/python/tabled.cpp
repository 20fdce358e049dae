// Maps whose link is a table.
#include "doors/python/rows.hpp"

// (cells, numbers, x, g, out, tau) -> True. All in C order; cells [count, 4] float and numbers [11] double of NumPy: shift, sign, offset, low, high, below,
// above, end, mass, most and scale as fields of anymax.h; x [..., n], g and out of one dtype, tau [rows] float; without g x are scores, with it probabilities
ANYMAX_CALL(call_tabled) {
    if (!arguments(count, 6)) return nullptr;
    const Kind kind = kind_of(args[2]);
    Array cells, numbers, x, g, out, tau;
    if (kind == NEITHER || !x.read(kind, args[2]) || !x.dense() || x.ndim < 1) return none();
    if (!cells.read_dense(NUMPY, args[0], ANYMAX_F32, -1) || cells.count % 4 || !numbers.read_dense(NUMPY, args[1], ANYMAX_F64, 11)) return none();
    if (x.dtype != ANYMAX_F32 && x.dtype != ANYMAX_BF16 && x.dtype != ANYMAX_F16) return none();
    const int64_t n = x.shape[x.ndim - 1], rows = n ? x.count / n : 0;
    if (!beside(g, kind, args[3], x.dtype, x.count) || !beside(out, kind, args[4], x.dtype, x.count, true) || !beside(tau, kind, args[5], ANYMAX_F32, rows, true)) return none();
    const double *v = (const double *)numbers.data;
    anymax_tabled_call call{};
    call.dtype = x.dtype, call.rows = rows, call.n = n, call.x = x.data, call.g = g.data, call.out = out.data, call.tau = (float *)tau.data;
    call.link = anymax_table{(const float *)cells.data, cells.count / 4, integer_of(v[0]), integer_of(v[1]), v[2], v[7], v[10],
                             float_of(v[3]), float_of(v[4]), float_of(v[5]), float_of(v[6])};
    call.mass = v[8], call.most = v[9];
    const int code = without_lock(kind, at_most_so_much(x.count, TABLED_COST), [&](int pool) {
        call.pool = pool;
        return anymax_tabled(&call);
    });
    return answer(code, "a link as a table", Py_None, n);
}
