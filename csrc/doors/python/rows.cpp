#include "doors/python/rows.hpp"

#include <string.h>

#include "core/unit.h"

bool Rows::lead(PyObject *a, PyObject *asked_axis, anymax_view *view) {
    Operand &o = operands[0];
    if (!(o.array.get() == a ? o.array.plain(kind) : o.array.read(kind, a)) || o.array.dtype > ANYMAX_F16 || o.array.ndim < 1)
        return false;
    ndim = o.array.ndim, dtype = o.array.dtype;
    long long asked = -1;
    if (asked_axis != Py_None) {
        if ((PyObject *)Py_TYPE(asked_axis) != (PyObject *)&PyLong_Type) return false;
        asked = PyLong_AsLongLong(asked_axis);
        if (asked == -1 && PyErr_Occurred()) return PyErr_Clear(), false;
    }
    if (asked < -ndim || asked >= ndim) return false;
    axis = (int)(asked < 0 ? asked + ndim : asked);
    memcpy(shape, o.array.shape, sizeof(int64_t) * (size_t)ndim);
    n = shape[axis];
    for (int i = 0; i < ndim; i++) rows *= i == axis ? 1 : shape[i];
    o.view = view, used = 1;
    call.dtype = dtype, call.n = n;
    return n > 0 && n <= ANYMAX_MOST_CLASSES && spread(o);
}

bool Rows::beside(PyObject *a, anymax_view *view) {
    Operand &o = operands[used];
    if (!o.array.read(kind, a) || o.array.dtype != dtype || !o.array.same_shape(operands[0].array)) return false;
    o.view = view, used++;
    return spread(o);
}

bool Rows::mask(PyObject *a) {
    Operand &o = operands[used];
    if (!o.array.read(kind, a) || o.array.dtype != BOOLS) return false;
    o.view = &call.mask, used++;
    return spread(o);
}

bool Rows::spread(Operand &o) {
    const int missing = ndim - o.array.ndim;
    if (missing < 0) return false;
    for (int i = 0; i < ndim; i++) {
        const int64_t size = i < missing ? 1 : o.array.shape[i - missing];
        if (size != 1 && size != shape[i]) return false;
        o.strides[i] = size == 1 ? 0 : o.array.strides[i - missing];
    }
    return o.array.aligned || replace(o);
}

bool Rows::write(PyObject *given, bool zeros) {
    Operand &o = operands[used];
    const Operand &like = operands[0];
    if (given == Py_None) {
        if (rows * n * like.array.item() < smallest) {
            if (kind == TORCH) result = o.array.empty_like(like.array);
            if (!result && PyErr_Occurred()) return false;
            if (!result) result = ask(kind == TORCH ? bound.torch_empty_like : bound.empty_like, like.array.get());
        } else {
            const Ref code(PyLong_FromLong(call.map));
            const Ref made = ask(bound.result, like.array.get(), code.get(), zeros ? Py_True : Py_False);
            if (!made) return false;
            result = again(PyTuple_GetItem(made.get(), 0));
            call.fresh = (int32_t)PyLong_AsLong(PyTuple_GetItem(made.get(), 1));
        }
        if (!result || (o.array.get() != result.get() && !o.array.look(kind, result.get(), true))) return false;
    } else {
        if (!o.array.read(kind, given, true) || o.array.dtype != dtype || !o.array.same_shape(like.array)) return false;
        for (int i = 0; i < ndim; i++)
            if (shape[i] > 1 && !o.array.strides[i]) return false;  // rows on top of each other
        result = again(given);
        bool free = o.array.aligned && (!per_row || o.array.disjoint(*per_row));  // to be written while the others are read
        for (int i = 0; i < used && free; i++)
            free = o.array.disjoint(operands[i].array) || (o.array.same_place(operands[i].array));
        if (!free && !stand_in(o)) return false;
    }
    o.view = &call.out, out = &o, used++;
    return spread(o);
}

// -- what goes beside the rows ----------------------------------------------------------------------

bool Rows::batch_is(const Array &a) const {
    if (a.ndim != ndim - 1) return false;
    for (int i = 0, j = 0; i < ndim; i++)
        if (i != axis && a.shape[j++] != shape[i]) return false;
    return true;
}

bool Rows::each(PyObject *a, int wanted, Array &array, Ref &copy) {
    return array.read(kind, a) && array.dtype == wanted && batch_is(array) && in_order(a, array, copy);
}

bool Rows::in_order(PyObject *a, Array &array, Ref &copy) {
    if (array.dense()) return true;
    copy = ask(bound.copied, a, Py_None);
    return copy && array.read(kind, copy.get());
}

bool Rows::support(PyObject *memory, Array &array) {
    if (memory == Py_None) return true;
    const int64_t words = dtype == ANYMAX_F64 ? 2 : 1;
    if (!array.read_dense(kind, memory, INTS, -1, true) || !rows) return false;
    const int64_t capacity = (array.count / rows - 1) / (words + 1);
    if (capacity < 1 || capacity > n || array.count != rows * (capacity * (words + 1) + 1)) return false;
    call.support = anymax_support_in(array.data, rows, capacity, dtype);
    return true;
}

int64_t Rows::saves() const {
    const bool rounded = dtype == ANYMAX_BF16 || dtype == ANYMAX_F16;
    return anymax_saves(call.op, call.map, call.params ? 1.5 : call.param, rounded && rows ? SAVED_CALL_FROM : rows, n);
}

bool Rows::save(int64_t capacity, PyObject *x, Array &array, Ref &memory) {
    if (capacity < 0) capacity = saves();
    if (!capacity || !rows) return true;
    const bool threshold = call.op == ANYMAX_LOSS && call.map == ANYMAX_SOFTMAX;
    const int64_t words = dtype == ANYMAX_F64 ? 2 : 1, size = threshold ? rows : rows * (capacity * (words + 1) + 1);
    const int numbers = !threshold ? INTS : words == 2 ? ANYMAX_F64 : ANYMAX_F32;
    const Ref count(PyLong_FromLongLong(size)), code(PyLong_FromLong(numbers));
    memory = ask(bound.room, x, count.get(), code.get());
    if (!memory) return false;
    if (!threshold) return support(memory.get(), array);
    if (!array.read(kind, memory.get(), true)) return false;
    call.tau = array.data;
    return true;
}

bool Rows::link(const GivenMap &l, int op, Array &params) {
    call.op = op, call.map = l.map, call.noise = l.noise, call.param = l.param, call.nodes = nodes_of(l.nodes, dtype);
    if (l.params == Py_None)
        return !(l.map == ANYMAX_BUDGET && !(l.param <= (double)n));  // the caller's mistake, which `Mapping.check` words
    if (!l.chosen) return false;                                      // Python is to cast it, and a gradient may be asked for
    if (!params.read_dense(kind, l.params, ANYMAX_F64, -1) || params.ndim != ndim || axis != ndim - 1) return false;
    for (int i = 0; i < ndim; i++)
        if (params.shape[i] != (i == axis ? 1 : shape[i])) return false;
    call.params = (const double *)params.data, per_row = &params;
    return true;
}

bool Rows::bounds(const GivenMap &l) {
    if (l.upper == Py_None) return true;
    if (PyFloat_Check(l.upper)) {
        one_bound = PyFloat_AsDouble(l.upper), narrow_bound = float_of(one_bound);
        call.upper = anymax_view{dtype == ANYMAX_F64 ? (void *)&one_bound : (void *)&narrow_bound, 0, 0, 0};
        return true;
    }
    if (!l.chosen && kind == TORCH) {  // Python is to see to a gradient
        static PyObject *const learned = name_of("requires_grad");
        const Ref asked(PyObject_GetAttr(l.upper, learned));
        if (!asked || asked.get() != Py_False) return PyErr_Clear(), false;
    }
    Operand &o = operands[used];
    if (!o.array.read(kind, l.upper) || o.array.dtype != (dtype == ANYMAX_F64 ? ANYMAX_F64 : ANYMAX_F32)) return false;
    o.view = &call.upper, used++;
    return spread(o);
}

// -- two strides for the rows and one for the classes -----------------------------------------------

// The axes of the rows, as few as the strides of all operands allow, or of one of them.
int Rows::merged(Axis *axes, int only) const {
    int count = 0;
    for (int i = 0; i < ndim; i++) {
        if (i == axis || shape[i] == 1) continue;
        Axis next{shape[i], {}};
        bool joins = count > 0;
        for (int k = 0; k < used; k++) {
            next.steps[k] = operands[k].strides[i];
            if (only < 0 || only == k) joins = joins && axes[count - 1].steps[k] == next.steps[k] * next.size;
        }
        if (joins)
            next.size *= axes[count - 1].size, axes[count - 1] = next;
        else
            axes[count++] = next;
    }
    return count;
}

bool Rows::stand_in(Operand &o) {
    scratch = ask(bound.copied, operands[0].array.get(), Py_None);
    return scratch && o.array.read(kind, scratch.get(), true);
}

// A copy in C order in the place of an operand; of a mask that is broadcast, all of it.
bool Rows::replace(Operand &o) {
    if (&o == out) {  // nothing of it is read
        if (!stand_in(o)) return false;
    } else {
        const Ref whole(PyTuple_New(ndim));
        for (int i = 0; i < ndim; i++) PyTuple_SetItem(whole.get(), i, PyLong_FromLongLong(shape[i]));
        o.copy = ask(bound.copied, o.array.get(), whole.get());
        if (!o.copy || !o.array.read(kind, o.copy.get())) return false;
    }
    memcpy(o.strides, o.array.strides, sizeof(int64_t) * (size_t)ndim);
    return true;
}

bool Rows::lay_out() {
    Axis axes[AXES];
    int count = merged(axes, -1);
    for (int attempt = 0; count > 2 && attempt < 2;
         attempt++) {  // those that alone have too many; then all, which then lie alike
        for (int k = 0; k < used; k++) {
            Axis own[AXES];
            if (merged(own, k) > (attempt ? 0 : 2) && !replace(operands[k])) return false;
        }
        count = merged(axes, -1);
    }
    Axis outer{1, {}}, inner{1, {}};
    if (count == 2) outer = axes[0];
    if (count) inner = axes[count - 1];
    if (outer.size == 1) {
        outer = inner, inner = Axis{1, {}};
        bool sideways = false;  // rows side by side are transposed in groups
        for (int k = 0; k < used; k++)
            sideways |= operands[k].view != &call.upper && operands[k].strides[axis] != 1 && outer.steps[k] == 1;
        if (sideways && n > 1) inner = outer, outer = Axis{1, {}};
    }
    call.outer = outer.size, call.inner = inner.size;
    for (int k = 0; k < used; k++) {
        const Operand &o = operands[k];
        *o.view = anymax_view{o.array.data, outer.steps[k], inner.steps[k], n > 1 ? o.strides[axis] : 1};
    }
    return true;
}

int Rows::run() {
    if (!rows) return 0;
    if (!lay_out()) return -1;
    if (scratch) call.fresh = 0;
    const int code = without_lock(kind, work_of(&call, rows * n), [this](int pool) {
        call.pool = pool;
        return anymax_run(&call);
    });
    if (!code && scratch && !ask(bound.store, result.get(), scratch.get())) return -1;
    return code;
}
