// Fusedmax.
#include "doors/python/rows.hpp"

namespace {

constexpr int64_t WORK = 16;  // of a class, beside that of one that is only copied

}  // namespace

// (x, strength [1 or rows] float64 of NumPy, out, begins or None) -> True. All in C order; begins: booleans like x
ANYMAX_CALL(call_fused) {
    if (!arguments(count, 4)) return nullptr;
    const Kind kind = kind_of(args[0]);
    anymax_fused_call call{};
    Array x, strength, out, begins;
    if (kind == NEITHER || !x.read(kind, args[0]) || !rows_of(call, x)) return none();
    if (!one_or_each(strength, args[1], call.rows)) return none();
    if (!out.read_dense(kind, args[2], x.dtype, x.count, true) || !beside(begins, kind, args[3], BOOLS, x.count, true))
        return none();
    call.x = x.data, call.out = out.data, call.begins = (uint8_t *)begins.data;
    call.strength = (const double *)strength.data, call.strength_step = strength.count > 1;
    return run_call(kind, x.count * WORK, call, anymax_fused, "fusedmax", Py_None, call.n);
}

// (x, p, g, begins, out, slope [rows] float64 of NumPy or None) -> True
ANYMAX_CALL(call_fused_vjp) {
    if (!arguments(count, 6)) return nullptr;
    const Kind kind = kind_of(args[0]);
    anymax_fused_call call{};
    Array x, p, g, begins, out, slope;
    if (kind == NEITHER || !x.read(kind, args[0]) || !rows_of(call, x)) return none();
    if (!p.read_dense(kind, args[1], x.dtype, x.count) || !g.read_dense(kind, args[2], x.dtype, x.count)) return none();
    if (!begins.read_dense(kind, args[3], BOOLS, x.count) || !out.read_dense(kind, args[4], x.dtype, x.count, true))
        return none();
    if (!beside(slope, NUMPY, args[5], ANYMAX_F64, call.rows, true)) return none();
    call.x = x.data, call.p = p.data, call.g = g.data, call.begins = (uint8_t *)begins.data, call.out = out.data;
    call.slope = (double *)slope.data;
    return run_call(kind, x.count * WORK, call, anymax_fused_vjp, "the gradient of fusedmax", Py_None, call.n);
}
