// Maps whose link or u is a table.
#include "doors/python/rows.hpp"

// (cells, numbers, x, g, out, tau) -> True. All in C order; cells [count, 4] float and numbers [11] double of NumPy: shift,
// sign, offset, low, high, below, above, end, mass, most and scale as fields of anymax.h; x [..., n], g and out of one dtype,
// tau [rows] float; without g x are scores, with it probabilities
ANYMAX_CALL(call_tabled) {
    if (!arguments(count, 6)) return nullptr;
    const Kind kind = kind_of(args[2]);
    Array cells, numbers, x, g, out, tau;
    if (kind == NEITHER || !x.read(kind, args[2]) || !x.dense() || x.ndim < 1) return none();
    if (!cells.read_dense(NUMPY, args[0], ANYMAX_F32, -1) || cells.count % 4 ||
        !numbers.read_dense(NUMPY, args[1], ANYMAX_F64, 11))
        return none();
    if (x.dtype != ANYMAX_F32 && x.dtype != ANYMAX_BF16 && x.dtype != ANYMAX_F16) return none();
    const int64_t n = x.shape[x.ndim - 1], rows = n ? x.count / n : 0;
    if (!beside(g, kind, args[3], x.dtype, x.count) || !beside(out, kind, args[4], x.dtype, x.count, true) ||
        !beside(tau, kind, args[5], ANYMAX_F32, rows, true))
        return none();
    const double *v = (const double *)numbers.data;
    anymax_tabled_call call{};
    call.dtype = x.dtype, call.rows = rows, call.n = n, call.x = x.data, call.g = g.data, call.out = out.data,
    call.tau = (float *)tau.data;
    call.link = anymax_table{(const float *)cells.data,
                             cells.count / 4,
                             integer_of(v[0]),
                             integer_of(v[1]),
                             v[2],
                             v[7],
                             v[10],
                             float_of(v[3]),
                             float_of(v[4]),
                             float_of(v[5]),
                             float_of(v[6])};
    call.mass = v[8], call.most = v[9];
    const int code = without_lock(kind, at_most_so_much(x.count, TABLED_COST), [&](int pool) {
        call.pool = pool;
        return anymax_tabled(&call);
    });
    return answer(code, "a link as a table", Py_None, n);
}

// (weights, slopes, numbers, x, g, out, left) -> True. x, g and out as above; weights [cells, 4] float, slopes of the same
// shape or None, and numbers [10] double of NumPy: above, low, high, lost, gone, per, least, shift, weight and slope as fields
// of anymax.h; left [rows] bool of NumPy
ANYMAX_CALL(call_ratio) {
    if (!arguments(count, 7)) return nullptr;
    const Kind kind = kind_of(args[3]);
    Array weights, slopes, numbers, x, g, out, left;
    if (kind == NEITHER || !x.read(kind, args[3]) || !x.dense() || x.ndim < 1) return none();
    if (!weights.read_dense(NUMPY, args[0], ANYMAX_F32, -1) || weights.count % 4 ||
        !beside(slopes, NUMPY, args[1], ANYMAX_F32, weights.count))
        return none();
    if (!numbers.read_dense(NUMPY, args[2], ANYMAX_F64, 10)) return none();
    if (x.dtype != ANYMAX_F32 && x.dtype != ANYMAX_BF16 && x.dtype != ANYMAX_F16) return none();
    const int64_t n = x.shape[x.ndim - 1], rows = n ? x.count / n : 0;
    if (!beside(g, kind, args[4], x.dtype, x.count) || !beside(out, kind, args[5], x.dtype, x.count, true) ||
        !beside(left, NUMPY, args[6], BOOLS, rows, true))
        return none();
    const double *v = (const double *)numbers.data;
    const int64_t above = integer_of(v[0]);
    const anymax_weights ratio{(const float *)weights.data,
                               (const float *)slopes.data,
                               above,
                               weights.count / 4 - above,
                               float_of(v[1]),
                               float_of(v[2]),
                               float_of(v[3]),
                               float_of(v[4]),
                               float_of(v[5]),
                               float_of(v[6]),
                               integer_of(v[7]),
                               float_of(v[8]),
                               float_of(v[9])};
    anymax_tabled_call call{};
    call.dtype = x.dtype, call.rows = rows, call.n = n, call.x = x.data, call.g = g.data, call.out = out.data,
    call.ratio = &ratio, call.left = (uint8_t *)left.data;
    const int code = without_lock(kind, at_most_so_much(x.count, TABLED_COST), [&](int pool) {
        call.pool = pool;
        return anymax_tabled(&call);
    });
    return answer(code, "u as a table", Py_None, n);
}
