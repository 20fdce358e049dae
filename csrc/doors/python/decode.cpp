// Truncations and draws, and the choices of routers.
#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "decode/steps.hpp"
#include "doors/python/rows.hpp"

// The classes of all rows side by side, and where those of each row begin, both of x's kind.
static PyObject *support_of(PyObject *x, Kind kind, const anymax_decode_call &call) {
    const int64_t *const counts = call.counts;
    const Ref code(PyLong_FromLong(LONGS)), begins(PyLong_FromLongLong(call.rows + 1));
    const Ref total(PyLong_FromLongLong(std::accumulate(counts, counts + call.rows, (int64_t)0)));
    const Ref offsets = ask(bound.room, x, begins.get(), code.get()), ids = ask(bound.room, x, total.get(), code.get());
    Array to, classes;
    if (!offsets || !ids || !to.read(kind, offsets.get(), true) || !classes.read(kind, ids.get(), true)) return none();
    int64_t *offset = (int64_t *)to.data, *id = (int64_t *)classes.data;
    *offset = 0;
    for (int64_t r = 0; r < call.rows; r++) {
        const int32_t *const listed = call.listed + r * call.n;
        if (counts[r] == call.n)
            std::iota(id, id + call.n, (int64_t)0);
        else
            std::copy(listed, listed + counts[r], id);
        id += counts[r], offset[r + 1] = offset[r] + counts[r];
    }
    return PyTuple_Pack(2, ids.get(), offsets.get());
}

// (mapping, x, steps, values, keep, u, index, log_p, entropy, left, tau, listed) -> True; where `listed` is True, (ids,
// offsets) of the supports. All in C order; steps [count, 3] of NumPy: kind, least, value; values [rows, count] of NumPy or
// None; keep bool like x; u, index and log_p [rows, draws]: without u the classes of index are given; entropy and tau [rows];
// left like x
ANYMAX_CALL(call_decode) {
    if (!arguments(count, 12)) return nullptr;
    const Kind kind = kind_of(args[1]);
    GivenMap link;
    Array x, steps, values, keep, u, index, log_p, entropy, left, tau;
    if (kind == NEITHER || !link.read(args[0]) || link.params != Py_None || !x.read(kind, args[1]) || x.dtype > ANYMAX_F16 ||
        !x.dense() || x.ndim < 1)
        return none();
    anymax_decode_call call{};
    const int64_t n = x.shape[x.ndim - 1], rows = n ? x.count / n : 0;
    if (!steps.read_dense(NUMPY, args[2], ANYMAX_F64, -1) || steps.ndim != 2 || steps.shape[1] != 3 ||
        steps.shape[0] > STEPS_MOST)
        return none();
    call.count = steps.shape[0];
    if (!beside(values, NUMPY, args[3], ANYMAX_F64, rows * call.count) || !beside(keep, kind, args[4], BOOLS, x.count, true))
        return none();
    if (!beside(index, kind, args[6], LONGS, -1, args[5] != Py_None)) return none();
    if (!beside(u, kind, args[5], ANYMAX_F64, index.count) || !beside(log_p, kind, args[7], ANYMAX_F64, index.count, true))
        return none();
    if (!beside(left, kind, args[9], x.dtype, x.count, true)) return none();
    if (!beside(entropy, kind, args[8], ANYMAX_F64, rows, true) || !beside(tau, kind, args[10], ANYMAX_F64, rows, true) ||
        (rows && index.count % rows))
        return none();
    anymax_step list[STEPS_MOST];
    for (int64_t k = 0; k < call.count; k++) {
        const double *step = (const double *)steps.data + 3 * k;
        list[k] = anymax_step{integer_of(step[0]), integer_of(step[1]), step[2]};
    }
    call.map = link.map, call.param = link.param, call.dtype = x.dtype, call.rows = rows, call.n = n, call.stride = n,
    call.x = x.data;
    call.steps = list, call.values = (const double *)values.data, call.keep = (uint8_t *)keep.data, call.left = left.data;
    call.u = (const double *)u.data, call.log_p = (double *)log_p.data, call.entropy = (double *)entropy.data,
    call.tau = (double *)tau.data, call.draws = rows ? index.count / rows : 0;
    if (u.data)
        call.index = (int64_t *)index.data;
    else
        call.given = (const int64_t *)index.data;
    const std::unique_ptr<void, void (*)(void *)> lists(
        args[11] == Py_True ? malloc((size_t)rows * (8 + 4 * (size_t)n) + 1) : nullptr, free);
    if (lists) call.counts = (int64_t *)lists.get(), call.listed = (int32_t *)(call.counts + rows);
    if (args[11] == Py_True && !lists) return PyErr_NoMemory();
    const Ref done(run_call(kind, at_most_so_much(rows, work_of_row(&call)), call, anymax_decode, "a draw", link.kind, n));
    return done && call.listed ? support_of(args[1], kind, call) : again(done.get()).give();
}

// (x, k, groups, kept, most, index) -> True: the classes of the k largest [rows, k], as anymax_choose has them; all in C order
ANYMAX_CALL(call_choose) {
    if (!arguments(count, 6)) return nullptr;
    const Kind kind = kind_of(args[0]);
    Array x, index;
    if (kind == NEITHER || !x.read(kind, args[0]) || x.dtype > ANYMAX_F16 || !x.dense() || x.ndim < 1) return none();
    const int64_t n = x.shape[x.ndim - 1];
    anymax_choice_call call{};
    call.dtype = x.dtype, call.n = n, call.rows = n ? x.count / n : 0, call.x = x.data;
    int64_t *const sizes[] = {&call.k, &call.groups, &call.kept, &call.most};
    for (int i = 0; i < 4; i++) {
        *sizes[i] = PyLong_AsLongLong(args[1 + i]);
        if (*sizes[i] < 1 || *sizes[i] > n) return PyErr_Occurred() ? nullptr : none();
    }
    if (!index.read_dense(kind, args[5], LONGS, call.rows * call.k, true)) return none();
    call.index = (int64_t *)index.data;
    return run_call(kind, at_most_so_much(x.count, CHOICE_COST), call, anymax_choose, "a choice", Py_None, n);
}
