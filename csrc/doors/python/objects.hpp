// Objects of Python: references, and what was handed over once (numpy's and torch's own functions, and ours written in Python).
#ifndef ANYMAX_PYTHON_OBJECTS_HPP
#define ANYMAX_PYTHON_OBJECTS_HPP

// CMakeLists.txt defines Py_LIMITED_API where there is one: not for a Python without a lock.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include <atomic>

// A reference of our own.
class Ref {
    PyObject *object = nullptr;

  public:
    Ref() = default;
    explicit Ref(PyObject *owned) : object(owned) {}
    Ref(Ref &&other) noexcept : object(other.give()) {}
    Ref &operator=(Ref &&other) noexcept {
        PyObject *old = object;
        object = other.give();
        Py_XDECREF(old);
        return *this;
    }
    ~Ref() { Py_XDECREF(object); }
    PyObject *get() const { return object; }
    explicit operator bool() const { return object != nullptr; }
    PyObject *give() {
        PyObject *given = object;
        object = nullptr;
        return given;
    }
};

inline Ref again(PyObject *borrowed) {
    Py_XINCREF(borrowed);
    return Ref(borrowed);
}

// The functions and types that calls need, by the names under which Python hands them over (`bind`). They are kept to the end
// of the process.
// clang-format off
#define ANYMAX_OF_ENGINE(X)                                                                                           \
    X(link_of)  /* (mapping) -> Link, or the sentence that says why there is none */                                  \
    X(forced)   /* () -> the name of the engine that is asked for, or None */                                         \
    X(pool)     /* (tensors) -> 1: torch's threads serve a call, 0: our own */                                        \
    X(result)   /* (x, link code, zeros) -> (an array like x, of kept memory where it is large; see anymax_call.fresh) */\
    X(room)     /* (x, count, dtype of arrays.hpp) -> an array of so many numbers of x's kind */                      \
    X(copied)   /* (array, shape) -> the same numbers, broadcast, in C order and aligned */                           \
    X(store)    /* (out, array): out[...] = array */                                                                  \
    X(bits)     /* (array of bfloat16) -> the same memory as uint16 */                                                \
    X(ndarray) X(empty_like)
#define ANYMAX_OF_TORCH(X)                                                                                            \
    X(tensor) X(parameter) X(torch_empty_like)                                                                        \
    X(empty_strided) /* (sizes, strides, dtype) -> a tensor on the CPU, quicker; None where this torch has none */    \
    X(transforms)    /* () -> whether a transform of functorch is active */                                           \
    X(unusual)       /* (mapping, x, axis, mask, out) -> what `quick` does not take itself */                         \
    X(recording)     /* () -> whether autograd records */                                                             \
    X(record)        /* (x, (p, (mapping, axis))) -> p as autograd records it */                                      \
    X(modes)    /* () -> how many dispatch modes are on */                                                            \
    X(functions) /* () -> how many modes of functions are on */                                                       \
    X(included) /* (key) -> whether dispatch has it */                                                                \
    X(before)   /* the key of modes before dispatch */                                                                \
    X(tracing)  /* () -> whether torch.jit traces */                                                                  \
    X(forward_ad) /* the names of the module; `_current_level` is below 0 outside of forward mode */                  \
    X(is_neg)   /* (tensor) -> whether it has a lazy minus sign */                                                    \
    X(strided) X(f32) X(f64) X(bf16) X(f16) X(i32) X(i64) X(boolean)
// clang-format on

// A reference that is never given back, so that a call may use it while another thread hands over a new one.
class Kept {
    PyObject *object = nullptr;

  public:
    void keep(PyObject *borrowed) { __atomic_store_n(&object, again(borrowed).give(), __ATOMIC_RELEASE); }
    operator PyObject *() const { return __atomic_load_n(&object, __ATOMIC_ACQUIRE); }
};

#define ANYMAX_MEMBER(name) Kept name;
struct Bound {
    ANYMAX_OF_ENGINE(ANYMAX_MEMBER)
    ANYMAX_OF_TORCH(ANYMAX_MEMBER)
};
#undef ANYMAX_MEMBER
extern Bound bound;
extern std::atomic<int64_t> smallest;  // bytes of a result that `result` finds memory for

// A call of Python.
inline Ref ask(PyObject *function) { return Ref(PyObject_CallNoArgs(function)); }
template <class... T>
Ref ask(PyObject *function, const T &...arguments) {
    return Ref(PyObject_CallFunctionObjArgs(function, (PyObject *)arguments..., nullptr));
}

// Attribute names, made once.
inline PyObject *name_of(const char *text) { return PyUnicode_InternFromString(text); }

#endif
