// Losses of class indices and their gradients, slopes by a parameter, thresholds, the largest scores, linear attention.
#include "doors/python/rows.hpp"

namespace {

// The classes of the rows: from 0 to n - 1, or `ignored` and below 0, for rows to leave out, which are not counted.
bool classes(const Array &index, int64_t n, int64_t ignored, int64_t &counted) {
    const int64_t *classes = (const int64_t *)index.data;
    bool stray = false;
    counted = 0;
    for (int64_t r = 0; r < index.count; r++) {
        const bool left_out = classes[r] < 0 && (classes[r] == ignored || ignored == INT64_MIN);
        stray |= !left_out && ((uint64_t)classes[r] >= (uint64_t)n || classes[r] == ignored);
        counted += !left_out;
    }
    return !stray;
}

struct Loss {
    GivenMap link;
    Array index, params, memory;
    Ref copy;
    int64_t counted = 0;
    bool open(Rows &r, int op, PyObject *const *args, int64_t ignored) {
        if (!served(r.kind, args[0]) || !link.read(args[0]) || !r.lead(args[1], args[4], &r.call.x) || !r.rows ||
            !r.link(link, op, params))
            return false;
        if (!r.each(args[2], LONGS, index, copy) || !classes(index, r.n, ignored, counted)) return false;
        r.call.index = (const int64_t *)index.data;
        return true;
    }
};

}  // namespace

// (mapping, x, index, value, axis, ignored, reduction, save[, slope]) -> (how many rows count, what loss_grad wants of it or
// None). reduction 0: a value a row, 1: their sum, 2: their mean; slope: one a row, as anymax_call has it, where it has no axes
// their sum, or None
ANYMAX_CALL(call_loss) {
    int64_t ignored, reduction;
    if ((count != 9 && !arguments(count, 8)) || !integer(args[5], ignored) || !integer(args[6], reduction)) return nullptr;
    Rows r(kind_of(args[1]));
    Loss loss;
    if (!loss.open(r, ANYMAX_LOSS, args, ignored)) return none();
    Array value, slope;
    if (!value.read_dense(r.kind, args[3], wide_of(r), reduction ? 1 : r.rows, true)) return none();
    if (count == 9 && !beside(slope, r.kind, args[8], wide_of(r), -1, true)) return none();
    const bool summed = slope.data && slope.ndim == 0;
    if (slope.data && !summed && slope.count != r.rows) return none();
    Ref memory;
    if (args[7] == Py_True && !r.save(-1, args[1], loss.memory, memory)) return none();
    Each each(r, value, reduction != 0), slopes(r, slope, summed);
    if (!each.data || (summed && !slopes.data)) return PyErr_NoMemory();
    r.call.value = each.data, r.call.slope = slopes.data;
    const int code = r.run();
    if (code) return answer(code, "the loss", loss.link.kind, r.n);
    if (reduction) each.put(value.data, 0, each.sum() / (double)(reduction == 2 && loss.counted ? loss.counted : 1));
    if (summed) slopes.put(slope.data, 0, slopes.sum());
    const Ref counted(PyLong_FromLongLong(loss.counted));
    return PyTuple_Pack(2, counted.get(), memory ? memory.get() : Py_None);
}

// (mapping, x, index, scale, axis, factor, what loss has saved or None) -> factor scale (p - y); scale is one a row, or one for
// all
ANYMAX_CALL(call_loss_grad) {
    if (!arguments(count, 7)) return nullptr;
    Rows r(kind_of(args[1]));
    Loss loss;
    const double factor = PyFloat_AsDouble(args[5]);
    if (!loss.open(r, ANYMAX_LOSS_GRAD, args, INT64_MIN)) return none();
    if (r.call.map != ANYMAX_SOFTMAX) {
        if (!r.support(args[6], loss.memory)) return none();
    } else if (args[6] != Py_None) {
        if (!loss.memory.read_dense(r.kind, args[6], wide_of(r), r.rows, true)) return none();
        r.call.tau = loss.memory.data;
    }
    Array scale;
    Ref copy;
    if (!scale.read(r.kind, args[3]) || scale.dtype != wide_of(r)) return none();
    const bool single = scale.ndim == 0;
    if (single ? !r.in_order(args[3], scale, copy) : factor != 1.0 || !r.each(args[3], wide_of(r), scale, copy)) return none();
    Each each(r, scale, single);
    if (!each.data) return PyErr_NoMemory();
    if (single) each.fill(each.at(scale.data, 0) * factor);
    r.call.scale = each.data;
    if (!r.write(Py_None, true)) return none();
    return r.answer(loss.link);
}

// (mapping, x or None, p, g, axis, the support or None, value) -> True: <g, dp/dparam> of each row. Of bounded, with None for
// the value: -> the same by the bound of each class
ANYMAX_CALL(call_slope) {
    if (!arguments(count, 7)) return nullptr;
    Rows r(kind_of(args[2]));
    GivenMap link;
    Array support, params, value;
    if (!served(r.kind, args[0]) || !link.read(args[0]) || !MAPS[link.map].slope || !r.lead(args[2], args[4], &r.call.p) ||
        !r.link(link, ANYMAX_SLOPE, params))
        return none();
    if (!r.beside(args[3], &r.call.g) || (args[1] != Py_None && !r.beside(args[1], &r.call.x)) || !r.bounds(link) ||
        !r.support(args[5], support))
        return none();
    if (args[6] == Py_None && link.map == ANYMAX_BOUNDED) return r.write(Py_None, false) ? r.answer(link) : none();
    if (!value.read_dense(r.kind, args[6], wide_of(r), r.rows, true)) return none();
    r.call.value = value.data;
    return answer(r.run(), "the slope", link.kind, r.n);
}

// (mapping, x, tau) -> True: tau [..., 1] of each row
ANYMAX_CALL(call_threshold) {
    if (!arguments(count, 3)) return nullptr;
    Rows r(kind_of(args[1]));
    GivenMap link;
    Array params, tau;
    if (!link.read(args[0]) || !r.lead(args[1], Py_None, &r.call.x) || !r.link(link, ANYMAX_THRESHOLD, params)) return none();
    if (!tau.read_dense(r.kind, args[2], wide_of(r), r.rows, true)) return none();
    r.call.tau = tau.data;
    return answer(r.run(), "the threshold", link.kind, r.n);
}

// (mapping, x, code of the operation) -> the name of the way that its rows take, and the instruction set: anymax_plan. None: no
// such call
ANYMAX_CALL(call_plan) {
    int64_t op;
    if (!arguments(count, 3) || !integer(args[2], op)) return nullptr;
    Rows r(kind_of(args[1]));
    GivenMap link;
    Array params;
    if (!link.read(args[0]) || !r.lead(args[1], Py_None, &r.call.x) || !r.link(link, (int)op, params) || !r.bounds(link) ||
        !r.lay_out())
        return none();
    r.call.p = r.call.g = r.call.out = r.call.x;
    r.call.value = (void *)r.call.x.data, r.call.scale = r.call.value,
    r.call.index = (const int64_t *)r.call.value;  // asked whether they are there
    const char *plan = anymax_plan(&r.call);
    return plan ? PyUnicode_FromString(plan) : none();
}

// (x, k, value, positions) -> True: the k largest scores [..., k] of each row, and their places; all in C order
ANYMAX_CALL(call_largest) {
    if (!arguments(count, 4)) return nullptr;
    const Kind kind = kind_of(args[0]);
    Array x, value, positions;
    const double k = PyFloat_AsDouble(args[1]);
    if (!x.read(kind, args[0]) || x.dtype > ANYMAX_F16 || !x.dense() || x.ndim < 1) return none();
    const int64_t n = x.shape[x.ndim - 1], rows = n ? x.count / n : 0;
    if (!(k >= 1.0 && k <= (double)n)) return none();
    const int64_t numbers = rows * (int64_t)k;
    if (!value.read_dense(kind, args[2], x.dtype, numbers, true)) return none();
    if (!positions.read_dense(kind, args[3], LONGS, numbers, true)) return none();
    anymax_call call{};
    call.op = ANYMAX_LARGEST, call.map = ANYMAX_TOPK, call.dtype = x.dtype, call.param = k, call.outer = rows, call.inner = 1,
    call.n = n;
    call.x = anymax_view{x.data, n, 0, 1}, call.out = anymax_view{value.data, (int64_t)k, 0, 1},
    call.positions = (int64_t *)positions.data;
    return run_call(kind, x.count, call, anymax_run, "the largest scores", Py_None, n);
}

// (q, k, v, out, lengths, below, g, dq, dk, dv, groups, causal, scale, threads) -> True, of the backward where there is g; all
// in C order, lengths of NumPy, and None for what there is not
ANYMAX_CALL(call_linear) {
    if (!arguments(count, 14)) return nullptr;
    const Kind kind = kind_of(args[0]);
    Array a[10];
    for (int i = 0; i < 10; i++) {
        if (args[i] == Py_None) continue;
        if (!a[i].read(i == 4 ? NUMPY : kind, args[i], i == 3 || (i > 6) || (i == 5 && args[6] == Py_None)) || !a[i].dense())
            return none();
        if (a[i].dtype != (i == 4 ? LONGS : a[0].dtype)) return none();
    }
    const Array &q = a[0], &k = a[1], &v = a[2];
    if (q.ndim < 2 || k.ndim < 2 || v.ndim < 2) return none();
    anymax_linear_call call{};
    int64_t threads;
    if (!integer(args[10], call.groups) || !integer(args[13], threads)) return none();
    call.dtype = q.dtype, call.causal = PyObject_IsTrue(args[11]), call.scale = PyFloat_AsDouble(args[12]),
    call.threads = (int32_t)threads;
    call.heads = 1;
    for (int i = 0; i < k.ndim - 2; i++) call.heads *= k.shape[i];
    call.queries = q.shape[q.ndim - 2], call.d = q.shape[q.ndim - 1], call.keys = k.shape[k.ndim - 2],
    call.dv = v.shape[v.ndim - 1];
    const int64_t queries = call.heads * call.groups * call.queries, keys = call.heads * call.keys;
    const int64_t sizes[] = {queries * call.d, keys * call.d,     keys * call.dv,   queries * call.dv, call.heads,
                             queries,          queries * call.dv, queries * call.d, keys * call.d,     keys * call.dv};
    for (int i = 0; i < 10; i++)
        if (args[i] != Py_None && a[i].count != sizes[i]) return none();
    call.q = q.data, call.k = k.data, call.v = v.data, call.out = a[3].data, call.lengths = (const int64_t *)a[4].data,
    call.below = a[5].data;
    call.g = a[6].data, call.dq = a[7].data, call.dk = a[8].data, call.dv_ = a[9].data;
    const bool backward = args[6] != Py_None;
    return run_call(
        kind, INTERPRETER_KEPT + 1, call, [&](const auto *c) { return backward ? anymax_linear_vjp(c) : anymax_linear(c); },
        "linear attention", Py_None, call.d);
}
