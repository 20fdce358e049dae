// The functions of anymax._engine that work on arrays, as METH_FASTCALL has them. They answer None, with nothing written, where
// an argument is out of the ordinary and Python is to see to it: another kind of array or dtype, shapes that don't fit, a mode
// of torch that looks on.
#ifndef ANYMAX_PYTHON_CALLS_HPP
#define ANYMAX_PYTHON_CALLS_HPP

#include <float.h>

#include "doors/python/arrays.hpp"
#include "limits.hpp"
#include "maps.hpp"

// A mapping in the engine's words: the tuple `Link` of kernels/link.py.
struct GivenMap {
    Ref tuple;
    int32_t map = 0, noise = 0;
    double param = 0.0;
    int64_t nodes = 0;
    bool chosen = false;                          // it was given as such, and not found for a mapping
    PyObject *kind = nullptr, *params = nullptr;  // borrowed of the tuple; params: None, or one number a row
    PyObject *upper = nullptr;                    // the same; bounds of the classes: None, a number, or an array
    bool read(PyObject *mapping_or_link);
};

#define ANYMAX_CALL(name) PyObject *name(PyObject *, PyObject *const *args, Py_ssize_t count)
ANYMAX_CALL(call_forward);
ANYMAX_CALL(call_forward_saving);
ANYMAX_CALL(call_quick);
ANYMAX_CALL(call_log_forward);
ANYMAX_CALL(call_vjp);
ANYMAX_CALL(call_quick_backward);
ANYMAX_CALL(call_log_vjp);
ANYMAX_CALL(call_slope);
ANYMAX_CALL(call_loss);
ANYMAX_CALL(call_loss_grad);
ANYMAX_CALL(call_threshold);
ANYMAX_CALL(call_largest);
ANYMAX_CALL(call_decode);
ANYMAX_CALL(call_choose);
ANYMAX_CALL(call_segments);
ANYMAX_CALL(call_sort_segments);
ANYMAX_CALL(call_linear);
ANYMAX_CALL(call_order);
ANYMAX_CALL(call_order_vjp);
ANYMAX_CALL(call_fused);
ANYMAX_CALL(call_fused_vjp);
ANYMAX_CALL(call_tabled);
ANYMAX_CALL(call_ratio);
ANYMAX_CALL(call_plan);
ANYMAX_CALL(call_sinkhorn);
ANYMAX_CALL(call_gumbel);
ANYMAX_CALL(call_torch_uniform);

// What a function gives back where the engine's code is 0; an error else, with `what`, `kind` and `n` in its sentence. Below 0:
// it is set.
PyObject *answer(int code, const char *what, PyObject *kind, int64_t n, PyObject *result = Py_True);
// An argument beside the scores, as Array::read_dense has it; None: there is none.
bool beside(Array &array, Kind kind, PyObject *a, int wanted, int64_t numbers, bool writable = false);

// Numbers as the engine has them, those beyond as the nearest end, refused or the same to it; NaN is the lowest integer.
inline int32_t integer_of(double v) {
    return v >= (double)INT32_MAX ? INT32_MAX : v > (double)INT32_MIN ? (int32_t)v : INT32_MIN;
}
inline float float_of(double v) {
    return v > FLT_MAX ? __builtin_huge_valf() : v < -FLT_MAX ? -__builtin_huge_valf() : (float)v;
}

// engine(pool) with the interpreter let go where the call is large.
template <class F>
int without_lock(Kind kind, int64_t work, F engine) {
    if (work <= INTERPRETER_KEPT) return engine(0);
    const Ref which = ask(bound.pool, kind == TORCH ? Py_True : Py_False);
    if (!which) return -1;
    const int pool = (int)PyLong_AsLong(which.get());
    PyThreadState *state = PyEval_SaveThread();
    const int code = engine(pool);
    PyEval_RestoreThread(state);
    return code;
}

// What engine(&call) gives, as `answer` has it.
template <class Call, class F>
PyObject *run_call(Kind kind, int64_t work, Call &call, F engine, const char *what, PyObject *name, int64_t n) {
    const int code = without_lock(kind, work, [&](int pool) {
        call.pool = pool;
        return engine(&call);
    });
    return answer(code, what, name, n);
}

#endif
