// Arrays of NumPy and tensors of torch as the engine sees them: an address, sizes, and strides that count elements.
#ifndef ANYMAX_PYTHON_ARRAYS_HPP
#define ANYMAX_PYTHON_ARRAYS_HPP

#include "anymax.h"
#include "doors/python/objects.hpp"

constexpr int AXES = 32;                                                               // more are not served
constexpr int INTS = ANYMAX_F16 + 1, LONGS = INTS + 1, BOOLS = LONGS + 1, OTHER = -1;  // dtypes beside those of the engine

enum Kind { NEITHER, NUMPY, TORCH };

// An open array. It holds what it reads from until it goes.
class Array {
    Ref object;
    Py_buffer buffer;
    bool open = false;

    bool from_buffer(PyObject *a, int flags);
    bool from_exchange(PyObject *a);
    bool from_attributes(PyObject *a);

  public:
    char *data = nullptr;
    int dtype = OTHER, ndim = 0;
    int64_t count = 0;
    int64_t shape[AXES], strides[AXES];
    bool aligned = true;  // strides are whole elements, and the address is one's

    Array() = default;
    Array(const Array &) = delete;
    ~Array() { close(); }
    void close();
    // False, with no error set, where the numbers are not plainly there: another kind of array, another device, a lazy tensor.
    bool read(Kind kind, PyObject *a, bool writable = false);
    // The same, but that a tensor may have a lazy minus sign. No mode of torch sees it.
    bool look(Kind kind, PyObject *a, bool writable = false);
    bool plain(Kind kind) const;  // after `look`: it has none
    // Memory for a result of a tensor's shape and dtype, in C order as it is: as torch.empty_like has it. What it is, or
    // nothing where torch has no quick way.
    Ref empty_like(const Array &like);
    // The same of an array in C order of this dtype, with so many numbers; less than 0: with any number.
    bool read_dense(Kind kind, PyObject *a, int wanted, int64_t numbers, bool writable = false);
    PyObject *get() const { return object.get(); }
    int64_t item() const {
        return dtype == ANYMAX_F64 || dtype == LONGS ? 8 : dtype == ANYMAX_F32 || dtype == INTS ? 4 : dtype == BOOLS ? 1 : 2;
    }
    bool dense() const;  // in C order
    bool same_shape(const Array &other) const;
    bool same_place(const Array &other) const;
    bool disjoint(const Array &other) const;
};

Kind kind_of(PyObject *a);
// True where torch runs calls as they come: no mode, trace or forward-mode level wants to see plain operations.
bool ordinary();
// What torch's DLPack exchange API is; false where this torch has none that we know.
bool bind_exchange(PyObject *capsule);

#endif
