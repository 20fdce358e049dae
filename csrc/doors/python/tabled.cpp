// Maps whose link or u is a table.
#include "doors/python/rows.hpp"

namespace {

// The rows of both.
struct TabledCall {
    Kind kind;
    Array x, g, out;
    anymax_tabled_call call{};

    // x, g and out
    bool read(PyObject *const *args) {
        kind = kind_of(args[0]);
        if (kind == NEITHER || !x.read(kind, args[0]) || !x.dense() || x.ndim < 1) return false;
        if (x.dtype != ANYMAX_F32 && x.dtype != ANYMAX_BF16 && x.dtype != ANYMAX_F16) return false;
        if (!beside(g, kind, args[1], x.dtype, x.count) || !beside(out, kind, args[2], x.dtype, x.count, true)) return false;
        call.dtype = x.dtype, call.n = x.shape[x.ndim - 1], call.rows = call.n ? x.count / call.n : 0;
        call.x = x.data, call.g = g.data, call.out = out.data;
        return true;
    }
    PyObject *run(const char *what) {
        return run_call(kind, at_most_so_much(x.count, TABLED_COST), call, anymax_tabled, what, Py_None, call.n);
    }
};

}  // namespace

// (cells, numbers, x, g, out, tau) -> True. All in C order; cells [count, 4] float and numbers [11] double of NumPy: shift,
// sign, offset, low, high, below, above, end, mass, most and scale as fields of anymax.h; x [..., n], g and out of one dtype,
// tau [rows] float; without g x are scores, with it probabilities
ANYMAX_CALL(call_tabled) {
    if (!arguments(count, 6)) return nullptr;
    Array cells, numbers, tau;
    TabledCall rows;
    anymax_tabled_call &call = rows.call;
    if (!rows.read(args + 2) || !beside(tau, rows.kind, args[5], ANYMAX_F32, call.rows, true)) return none();
    if (!cells.read_dense(NUMPY, args[0], ANYMAX_F32, -1) || cells.count % 4 ||
        !numbers.read_dense(NUMPY, args[1], ANYMAX_F64, 11))
        return none();
    const double *v = (const double *)numbers.data;
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
    return rows.run("a link as a table");
}

// (weights, slopes, numbers, x, g, out, left) -> True. x, g and out as above; weights [cells, 4] float, slopes of the same
// shape or None, and numbers [10] double of NumPy: above, low, high, lost, gone, per, least, shift, weight and slope as fields
// of anymax.h; left [rows] bool of NumPy
ANYMAX_CALL(call_ratio) {
    if (!arguments(count, 7)) return nullptr;
    Array weights, slopes, numbers, left;
    TabledCall rows;
    anymax_tabled_call &call = rows.call;
    if (!rows.read(args + 3) || !beside(left, NUMPY, args[6], BOOLS, call.rows, true)) return none();
    if (!weights.read_dense(NUMPY, args[0], ANYMAX_F32, -1) || weights.count % 4 ||
        !beside(slopes, NUMPY, args[1], ANYMAX_F32, weights.count))
        return none();
    if (!numbers.read_dense(NUMPY, args[2], ANYMAX_F64, 10)) return none();
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
    call.ratio = &ratio, call.left = (uint8_t *)left.data;
    return rows.run("u as a table");
}
