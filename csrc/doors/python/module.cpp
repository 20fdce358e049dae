// The module anymax._engine: what Python sees of the engine.
#include <string.h>

#include "doors/python/calls.hpp"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

extern "C" ANYMAX_API void *anymax_xla(void *);

namespace {

#if defined(Py_GIL_DISABLED)
PyMutex binding;
struct Binding {
    Binding() { PyMutex_Lock(&binding); }
    ~Binding() { PyMutex_Unlock(&binding); }
};
#else
struct Binding {
    Binding() {}  // the interpreter's lock is held
};
#endif

// (functions by name): kept for good, what they replace as well. `exchange` is torch's capsule of DLPack's exchange API,
// `smallest` a number of bytes.
PyObject *bind(PyObject *, PyObject *functions) {
    if (!PyDict_Check(functions)) return PyErr_Format(PyExc_TypeError, "expected a dictionary of functions");
    const Ref copy(PyDict_Copy(functions));  // which nobody else changes
    if (!copy) return nullptr;
    PyObject *const given = copy.get();
    const Binding one_at_a_time;
    const struct {
        const char *name;
        Kept *place;
    } places[] = {
#define ANYMAX_PLACE(name) {#name, &bound.name},
        ANYMAX_OF_ENGINE(ANYMAX_PLACE) ANYMAX_OF_TORCH(ANYMAX_PLACE)
#undef ANYMAX_PLACE
    };
    for (const auto &place : places)
        if (PyObject *object = PyDict_GetItemString(given, place.name)) place.place->keep(object);
    if (PyObject *bytes = PyDict_GetItemString(given, "smallest")) smallest.store(PyLong_AsLongLong(bytes));
    if (PyErr_Occurred()) return nullptr;
    if (PyObject *capsule = PyDict_GetItemString(given, "exchange"))
        return PyBool_FromLong(bind_exchange(capsule == Py_None ? nullptr : capsule));
    return PyBool_FromLong(0);
}

// (path of a library) -> True: torch_parallel_for of this library, which is loaded, is what pool 1 runs on
PyObject *borrow_pool(PyObject *, PyObject *path) {
    const Ref bytes(PyUnicode_EncodeFSDefault(path));
    if (!bytes) return nullptr;
    void *run = nullptr;
#if defined(_WIN32)
    if (HMODULE library = GetModuleHandleA(PyBytes_AsString(bytes.get())))
        run = (void *)GetProcAddress(library, "torch_parallel_for");
#else
    if (void *library = dlopen(PyBytes_AsString(bytes.get()), RTLD_LAZY | RTLD_LOCAL))
        run = dlsym(library, "torch_parallel_for");
#endif
    if (run) anymax_set_parallel((anymax_parallel)run);
    return PyBool_FromLong(run != nullptr);
}

// The handler of XLA's FFI, as jax.ffi.register_ffi_target takes it.
PyObject *xla_handler(PyObject *, PyObject *) { return PyCapsule_New((void *)anymax_xla, nullptr, nullptr); }

PyObject *isa(PyObject *, PyObject *) { return PyUnicode_FromString(anymax_isa()); }

PyObject *isas(PyObject *, PyObject *) {
    const Ref all(PyUnicode_FromString(anymax_isas())), comma(PyUnicode_FromString(","));
    return PyUnicode_Split(all.get(), comma.get(), -1);
}

PyObject *set_isa(PyObject *, PyObject *name) {
    const Ref bytes(PyUnicode_AsUTF8String(name));
    if (!bytes) return nullptr;
    return PyBool_FromLong(anymax_set_isa(PyBytes_AsString(bytes.get())) == 0);
}

PyObject *get_num_threads(PyObject *, PyObject *) { return PyLong_FromLong(anymax_get_num_threads()); }

PyObject *set_num_threads(PyObject *, PyObject *count) {
    const long threads = PyLong_AsLong(count);
    if (threads == -1 && PyErr_Occurred()) return nullptr;
    anymax_set_num_threads((int)threads);
    return again(Py_None).give();
}

#define FAST(name) {#name, (PyCFunction)(void (*)())call_##name, METH_FASTCALL, nullptr}
PyMethodDef methods[] = {
    FAST(forward),
    FAST(forward_saving),
    FAST(quick),
    FAST(log_forward),
    FAST(vjp),
    FAST(quick_backward),
    FAST(log_vjp),
    FAST(slope),
    FAST(loss),
    FAST(loss_grad),
    FAST(threshold),
    FAST(largest),
    FAST(decode),
    FAST(choose),
    FAST(segments),
    FAST(sort_segments),
    FAST(linear),
    FAST(order),
    FAST(order_vjp),
    FAST(fused),
    FAST(fused_vjp),
    FAST(tabled),
    FAST(ratio),
    FAST(plan),
    FAST(sinkhorn),
    FAST(gumbel),
    FAST(torch_uniform),
    {"bind", bind, METH_O, nullptr},
    {"borrow_pool", borrow_pool, METH_O, nullptr},
    {"xla_handler", xla_handler, METH_NOARGS, nullptr},
    {"isa", isa, METH_NOARGS, nullptr},
    {"isas", isas, METH_NOARGS, nullptr},
    {"set_isa", set_isa, METH_O, nullptr},
    {"get_num_threads", get_num_threads, METH_NOARGS, nullptr},
    {"set_num_threads", set_num_threads, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

int fill(PyObject *module) {
    return PyModule_AddIntConstant(module, "ABI", anymax_abi()) || PyModule_AddIntConstant(module, "SMALL", INTERPRETER_KEPT)
               ? -1
               : 0;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)fill},
#if defined(Py_GIL_DISABLED)  // calls share nothing but what `bind` was given, which stays
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "anymax._engine",
                          "The kernels in C++; anymax.kernels.native calls them.",
                          0,
                          methods,
                          slots,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__engine(void) { return PyModuleDef_Init(&definition); }
