// Soft ranks and soft sorting.
#include "doors/python/rows.hpp"

namespace {

// the bits of `how`: 1 sorted, 2 descending, 4 kl; false where they can't be read
bool read(anymax_order_call &call, PyObject *how) {
    int64_t bits;
    if (!integer(how, bits)) return false;
    call.sorted = bits & 1, call.descending = bits >> 1 & 1, call.kl = bits >> 2 & 1;
    return true;
}
bool strength_of(anymax_order_call &call, Array &strength, PyObject *a) {
    if (!one_or_each(strength, a, call.rows)) return false;
    if (strength.count == 1)
        call.strength = *(const double *)strength.data;
    else
        call.strengths = (const double *)strength.data;
    return true;
}

constexpr int64_t WORK = 16;  // of a class, beside that of one that is only copied

}  // namespace

// (x, out, order or None, strength, how) -> True. All in C order; order [rows, n] int32
ANYMAX_CALL(call_order) {
    if (!arguments(count, 5)) return nullptr;
    const Kind kind = kind_of(args[0]);
    anymax_order_call call{};
    Array x, out, order, strength;
    if (!read(call, args[4])) return nullptr;
    if (kind == NEITHER || !x.read(kind, args[0]) || !rows_of(call, x)) return none();
    if (!out.read_dense(kind, args[1], x.dtype, x.count, true) || !beside(order, kind, args[2], INTS, x.count, true) ||
        !strength_of(call, strength, args[3]))
        return none();
    call.x = x.data, call.out = out.data, call.order = (int32_t *)order.data;
    return run_call(kind, x.count * WORK, call, anymax_order, "an order", Py_None, call.n);
}

// (x or None, p, g, order, out, strength, how) -> True
ANYMAX_CALL(call_order_vjp) {
    if (!arguments(count, 7)) return nullptr;
    const Kind kind = kind_of(args[1]);
    anymax_order_call call{};
    Array x, p, g, order, out, strength;
    if (!read(call, args[6])) return nullptr;
    if (kind == NEITHER || !p.read(kind, args[1]) || !rows_of(call, p)) return none();
    if (!beside(x, kind, args[0], p.dtype, p.count) || !g.read_dense(kind, args[2], p.dtype, p.count)) return none();
    if (!order.read_dense(kind, args[3], INTS, p.count) || !out.read_dense(kind, args[4], p.dtype, p.count, true) ||
        !strength_of(call, strength, args[5]))
        return none();
    call.x = x.data, call.p = p.data, call.g = g.data, call.order = (int32_t *)order.data, call.out = out.data;
    return run_call(kind, p.count * WORK, call, anymax_order_vjp, "the gradient of an order", Py_None, call.n);
}
