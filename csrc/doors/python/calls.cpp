// Probabilities and their gradients.
#include "core/unit.h"
#include "doors/python/rows.hpp"

PyObject *none() {
    if (PyErr_Occurred()) return nullptr;
    return again(Py_None).give();
}

bool arguments(Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted) PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, count);
    return count == wanted;
}

bool integer(PyObject *object, int64_t &value) {
    value = PyLong_AsLongLong(object);
    return !(value == -1 && PyErr_Occurred());
}

PyObject *answer(int code, const char *what, PyObject *kind, int64_t n, PyObject *result) {
    if (code < 0) return nullptr;
    if (code == ANYMAX_NO_MEMORY)
        return PyErr_Format(PyExc_MemoryError, "the native engine ran out of memory on rows of %lld classes", (long long)n);
    if (code) return PyErr_Format(PyExc_RuntimeError, "the native engine refused %s of %S: %s", what, kind, anymax_error(code));
    return again(result).give();
}

bool beside(Array &array, Kind kind, PyObject *a, int wanted, int64_t numbers, bool writable) {
    return a == Py_None || array.read_dense(kind, a, wanted, numbers, writable);
}

bool served(Kind kind, PyObject *mapping) {
    if (kind == NEITHER || (kind == TORCH && !ordinary())) return false;
    if (PyTuple_Check(mapping)) return true;
    const Ref name = ask(bound.forced);
    return name && (name.get() == Py_None || PyUnicode_CompareWithASCIIString(name.get(), "native") == 0);
}

namespace {

// capacity: how many non-zeros of each row `memory` gets; 0: none, less than 0: as many as pay. alone: only where p is all that
// its gradient needs
PyObject *forward(int op, PyObject *const *args, int64_t capacity, Ref &memory, bool alone = false) {
    Rows r(kind_of(args[1]));
    GivenMap link;
    Array support, params;
    if (!r.look(args[1]) || !served(r.kind, args[0]) || !link.read(args[0]) || !r.lead(args[1], args[2], &r.call.x) ||
        !r.link(link, op, params))
        return none();
    if (alone && (link.params != Py_None || needs_scores(link.map) || r.rows * r.n >= SAVED_CALL_FROM || r.saves()))
        return none();
    if (!r.bounds(link) || (args[3] != Py_None && !r.mask(args[3])) ||
        (capacity && !r.save(capacity, args[1], support, memory)))
        return none();
    if (!r.write(args[4], op == ANYMAX_FORWARD)) return none();
    return r.answer(link);
}

// number: a float or a double for the sum of <g, dp/dparam> over the rows, or None
PyObject *backward(int op, PyObject *const *args, PyObject *number = Py_None) {
    Rows r(kind_of(args[2]));
    GivenMap link;
    Array support, params, sum;
    if (!served(r.kind, args[0]) || !link.read(args[0]) || !r.lead(args[2], args[4], &r.call.p) || !r.link(link, op, params))
        return none();
    if (!r.beside(args[3], &r.call.g) || (args[1] != Py_None && !r.beside(args[1], &r.call.x)) || !r.bounds(link))
        return none();
    const bool slope = number != Py_None;
    if (slope && (!MAPS[link.map].slope || !sum.read(r.kind, number, true) || sum.count != 1 ||
                  (sum.dtype != ANYMAX_F32 && sum.dtype != ANYMAX_F64)))
        return none();
    if (!r.support(args[5], support) || !r.write(Py_None, op == ANYMAX_VJP)) return none();
    if (!slope) return r.answer(link);
    Each slopes(r, sum, true);
    if (!slopes.data) return PyErr_NoMemory();
    int code = r.run();
    r.call.op = ANYMAX_SLOPE, r.call.value = slopes.data;
    if (!code) code = r.run();
    if (!code && sum.dtype == ANYMAX_F64) *(double *)sum.data = slopes.sum();
    if (!code && sum.dtype == ANYMAX_F32) *(float *)sum.data = (float)slopes.sum();
    return answer(code, "op", link.kind, r.n, r.result.get());
}

}  // namespace

// -- the engine's words -----------------------------------------------------------------------------

bool GivenMap::read(PyObject *mapping) {
    static PyObject *const found_before = name_of("_link");
    chosen = PyTuple_Check(mapping);
    if (chosen) {
        tuple = again(mapping);
    } else {
        tuple = Ref(PyObject_GetAttr(mapping, found_before));
        if (!tuple) PyErr_Clear(), tuple = ask(bound.link_of, mapping);
        if (!tuple) return PyErr_Clear(), false;
        if (!PyTuple_Check(tuple.get())) return false;  // a sentence: it has none
    }
    PyObject *t = tuple.get();
    kind = PyTuple_GetItem(t, 0);
    map = (int32_t)PyLong_AsLong(PyTuple_GetItem(t, 1)), param = PyFloat_AsDouble(PyTuple_GetItem(t, 2));
    params = PyTuple_GetItem(t, 3);
    noise = (int32_t)PyLong_AsLong(PyTuple_GetItem(t, 4)), nodes = PyLong_AsLongLong(PyTuple_GetItem(t, 5));
    upper = PyTuple_GetItem(t, 6);
    return params && upper && !PyErr_Occurred();
}

// (mapping, x, axis, mask, out) -> out
ANYMAX_CALL(call_forward) {
    Ref memory;
    return arguments(count, 5) ? forward(ANYMAX_FORWARD, args, 0, memory) : nullptr;
}

// (mapping, x, axis, mask, out) -> out, for a tensor. Plain ones on the CPU are served here, where autograd records with no
// more than p for the gradient; `unusual` sees to all else.
ANYMAX_CALL(call_quick) {
    static PyObject *const learned = name_of("requires_grad");
    if (!arguments(count, 5)) return nullptr;
    PyObject *const x = args[1];
    if (args[4] == Py_None && kind_of(x) == TORCH) {
        const bool recorded = Ref(PyObject_GetAttr(x, learned)).get() != Py_False && ask(bound.recording).get() != Py_False;
        Ref memory, p;
        if (!recorded || ask(bound.transforms).get() == Py_False) p = Ref(forward(ANYMAX_FORWARD, args, 0, memory, recorded));
        if (p && p.get() != Py_None) {
            if (!recorded) return p.give();
            static PyObject *const last = PyLong_FromLong(-1);
            const Ref call(PyTuple_Pack(2, args[0], args[2] == Py_None ? last : args[2]));
            if (!call) return nullptr;
            const Ref output(PyTuple_Pack(2, p.get(), call.get()));
            return output ? ask(bound.record, x, output.get()).give() : nullptr;
        }
    }
    if (PyErr_Occurred()) return nullptr;
    return ask(bound.unusual, args[0], args[1], args[2], args[3], args[4]).give();
}

// (mapping, x, axis, mask, out, capacity) -> (out, the support for vjp or None)
ANYMAX_CALL(call_forward_saving) {
    Ref memory;
    int64_t capacity;
    if (!arguments(count, 6) || !integer(args[5], capacity)) return nullptr;
    Ref p(forward(ANYMAX_FORWARD, args, capacity, memory));
    if (!p || p.get() == Py_None) return p.give();
    return PyTuple_Pack(2, p.get(), memory ? memory.get() : Py_None);
}

// (mapping, x, axis, mask, out) -> out
ANYMAX_CALL(call_log_forward) {
    Ref memory;
    return arguments(count, 5) ? forward(ANYMAX_LOG, args, 0, memory) : nullptr;
}

// (mapping, x or None, p, g, axis, the support or None[, number]) -> J^T g; number: as `backward` has it
ANYMAX_CALL(call_vjp) {
    if (count == 7) return backward(ANYMAX_VJP, args, args[6]);
    return arguments(count, 6) ? backward(ANYMAX_VJP, args) : nullptr;
}

// ((mapping, axis), (p,), g) -> (J^T g, None), the gradients of `record`; None as well where there is more in either of them
ANYMAX_CALL(call_quick_backward) {
    if (!arguments(count, 3)) return nullptr;
    PyObject *const call = args[0], *const saved = args[1];
    if (!PyTuple_Check(call) || PyTuple_Size(call) != 2 || !PyTuple_Check(saved) || PyTuple_Size(saved) != 1) return none();
    if (ask(bound.recording).get() != Py_False) return none();
    PyObject *const given[] = {PyTuple_GetItem(call, 0), Py_None, PyTuple_GetItem(saved, 0), args[2],
                               PyTuple_GetItem(call, 1), Py_None};
    const Ref out(backward(ANYMAX_VJP, given));
    if (!out || out.get() == Py_None) return none();
    return PyTuple_Pack(2, out.get(), Py_None);
}
ANYMAX_CALL(call_log_vjp) { return arguments(count, 6) ? backward(ANYMAX_LOG_VJP, args) : nullptr; }
