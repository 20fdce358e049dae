// Ragged rows.
#include "doors/python/rows.hpp"

namespace {

// An operand with entries along one axis; the others are heads, which must lie with one stride.
struct Entries {
    Array array;
    anymax_view view{nullptr, 0, 0, 0};

    bool read(Kind kind, PyObject *a, int axis, const Array *like, bool writable) {
        if (!array.read(kind, a, writable) || !array.aligned || array.dtype > ANYMAX_F16 || axis >= array.ndim) return false;
        if (like && (array.dtype != like->dtype || !array.same_shape(*like))) return false;
        int64_t step = 1, size = 1;
        for (int i = array.ndim; i--;) {
            if (i == axis || array.shape[i] == 1) continue;
            if (size > 1 && array.strides[i] != step * size) return false;
            if (size == 1) step = array.strides[i];
            size *= array.shape[i];
            if (writable && !array.strides[i]) return false;  // entries on top of each other
        }
        if (writable && array.shape[axis] > 1 && !array.strides[axis]) return false;
        view = anymax_view{array.data, 0, step, array.strides[axis]};
        return true;
    }
};

}  // namespace

// (link, op, ptr, order, axis, x, p, g, out, index, scale, result, kept[, slope]) -> True. ptr [segments + 1] and order
// [entries] or None: int64 of NumPy; x, p, g and out: entries along the axis, those that the operation has; index [segments,
// heads] int64, scale and result the same, as wide as it is computed; kept [entries, heads], as anymax_segments has it; slope
// as the result, beside that of a loss
ANYMAX_CALL(call_segments) {
    if (count != 14 && !arguments(count, 13)) return nullptr;
    int64_t op, axis;
    if (!integer(args[1], op) || !integer(args[4], axis)) return nullptr;
    PyObject *const first = args[5] != Py_None ? args[5] : args[6];
    const Kind kind = kind_of(first);
    GivenMap link;
    Entries x, p, g, out;
    Array ptr, order, params, index, scale, result, kept, slope;
    if (kind == NEITHER || axis < 0 || !link.read(args[0]) || !ptr.read_dense(NUMPY, args[2], LONGS, -1) || ptr.count < 1)
        return none();
    anymax_call call{};
    struct {
        Entries &entries;
        PyObject *given;
        anymax_view &view;
        bool writable;
    } const operands[] = {
        {x, args[5], call.x, false}, {p, args[6], call.p, false}, {g, args[7], call.g, false}, {out, args[8], call.out, true}};
    const Array *like = nullptr;
    for (const auto &o : operands) {
        if (o.given == Py_None) continue;
        if (!o.entries.read(kind, o.given, (int)axis, like, o.writable)) return none();
        o.view = o.entries.view, like = like ? like : &o.entries.array;
    }
    if (!like) return none();
    if (link.upper != Py_None) return none();
    const int64_t segments = ptr.count - 1, entries = like->shape[axis];
    int64_t heads = 1;
    for (int i = 0; i < like->ndim; i++) heads *= i == axis ? 1 : like->shape[i];
    const int wide = like->dtype == ANYMAX_F64 ? ANYMAX_F64 : ANYMAX_F32;
    const int64_t rows = segments * heads;
    if (!beside(order, NUMPY, args[3], LONGS, entries) || !beside(params, kind, link.params, ANYMAX_F64, rows) ||
        !beside(index, kind, args[9], LONGS, rows))
        return none();
    if (!beside(scale, kind, args[10], wide, rows) || !beside(result, kind, args[11], wide, rows, true)) return none();
    if (count == 14 && !beside(slope, kind, args[13], wide, rows, true)) return none();
    if (!beside(kept, kind, args[12], like->dtype, entries * heads, true)) return none();
    call.op = (int32_t)op, call.map = link.map, call.noise = link.noise, call.param = link.param,
    call.nodes = nodes_of(link.nodes, wide), call.dtype = like->dtype;
    call.outer = segments, call.inner = heads, call.n = entries;
    call.params = (const double *)params.data, call.index = (const int64_t *)index.data, call.scale = scale.data;
    (op == ANYMAX_THRESHOLD ? call.tau : call.value) = result.data, call.slope = slope.data;
    const anymax_segments from{(const int64_t *)ptr.data, (const int64_t *)order.data, kept.data};
    return run_call(
        kind, work_of(&call, entries * heads) + rows, call, [&](const auto *c) { return anymax_run_segments(c, &from); },
        "segments", link.kind, entries);
}

// (index, ptr, order or None, whether torch's threads serve) -> see anymax_sort_segments. int64 of NumPy
ANYMAX_CALL(call_sort_segments) {
    if (!arguments(count, 4)) return nullptr;
    Array index, ptr, order;
    if (!index.read_dense(NUMPY, args[0], LONGS, -1) || index.ndim != 1) return none();
    if (!ptr.read_dense(NUMPY, args[1], LONGS, -1, true) || ptr.count < 1 ||
        !beside(order, NUMPY, args[2], LONGS, index.count, true))
        return none();
    int64_t sorted = 0;
    const int code = without_lock(args[3] == Py_True ? TORCH : NUMPY, index.count, [&](int pool) {
        sorted = anymax_sort_segments((const int64_t *)index.data, index.count, ptr.count - 1, (int64_t *)ptr.data,
                                      (int64_t *)order.data, pool);
        return 0;
    });
    return code ? nullptr : PyLong_FromLongLong(sorted);
}
