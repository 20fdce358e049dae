// Sinkhorn.
#include "doors/python/rows.hpp"

// The sums of rows or columns: None, or [size] for all matrices, or [count, size]. False where it is anything else.
static bool sums(Array &array, Kind kind, PyObject *a, int dtype, int64_t count, int64_t size, int64_t &step) {
    step = 0;
    if (a == Py_None) return true;
    if (!array.read_dense(kind, a, dtype, -1)) return false;
    step = array.count == size ? 0 : size;
    return array.count == size || array.count == count * size;
}

// (x, rows, columns, g, out, iterations, temperature, tolerance, left) -> True. All in C order and of one dtype; x, g and out
// [..., n, m]; without g out becomes P, with it the gradient of x; with a tolerance above 0 `left` is written, an array of
// NumPy
ANYMAX_CALL(call_sinkhorn) {
    if (!arguments(count, 9)) return nullptr;
    const Kind kind = kind_of(args[0]);
    Array x, rows, columns, g, out, left;
    if (kind == NEITHER || !x.read(kind, args[0]) || x.dtype > ANYMAX_F64 || !x.dense() || x.ndim < 2) return none();
    anymax_sinkhorn_call call{};
    call.dtype = x.dtype, call.n = x.shape[x.ndim - 2], call.m = x.shape[x.ndim - 1];
    if (!call.n || !call.m) return none();
    call.count = x.count / (call.n * call.m);
    if (!sums(rows, kind, args[1], x.dtype, call.count, call.n, call.rows_step) ||
        !sums(columns, kind, args[2], x.dtype, call.count, call.m, call.columns_step))
        return none();
    if (!beside(g, kind, args[3], x.dtype, x.count) || !out.read_dense(kind, args[4], x.dtype, x.count, true)) return none();
    if (!beside(left, NUMPY, args[8], ANYMAX_F64, call.count, true)) return none();
    if (!integer(args[5], call.iterations)) return nullptr;
    call.temperature = PyFloat_AsDouble(args[6]), call.tolerance = PyFloat_AsDouble(args[7]);
    if (PyErr_Occurred()) return nullptr;
    call.x = x.data, call.rows = rows.data, call.columns = columns.data, call.g = g.data, call.out = out.data,
    call.left = (double *)left.data;
    return run_call(kind, at_most_so_much(x.count, call.iterations), call, anymax_sinkhorn, "Sinkhorn", Py_None, call.m);
}
