#include "doors/python/arrays.hpp"

#include <string.h>

Bound bound;
std::atomic<int64_t> smallest{INT64_MAX};

namespace {

// -- DLPack's exchange API, as dlpack.h 1.3 has it --------------------------------------------------

struct Tensor {  // DLTensor
    void *data;
    int32_t device, device_id;
    int32_t ndim;
    uint8_t type, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct Exchange {  // DLPackExchangeAPI
    uint32_t major, minor;
    Exchange *previous;
    void *allocate, *from_object, *to_object;
    int (*tensor)(void *object, Tensor *out);  // dltensor_from_py_object_no_sync
};

std::atomic<int (*)(void *, Tensor *)> tensor_of{nullptr};

int dtype_of(const Tensor &t) {
    if (t.lanes != 1) return OTHER;
    switch (t.type << 8 | t.bits) {
        case 2 << 8 | 32: return ANYMAX_F32;
        case 2 << 8 | 64: return ANYMAX_F64;
        case 2 << 8 | 16: return ANYMAX_F16;
        case 4 << 8 | 16: return ANYMAX_BF16;
        case 0 << 8 | 32: return INTS;
        case 0 << 8 | 64: return LONGS;
        case 6 << 8 | 8: return BOOLS;
        default: return OTHER;
    }
}

// -- numbers out of objects -------------------------------------------------------------------------

bool number(Ref object, long long &value) {
    if (!object) return false;
    value = PyLong_AsLongLong(object.get());
    return !(value == -1 && PyErr_Occurred());
}

bool numbers(Ref tuple, int64_t *values, int count) {
    if (!tuple || PySequence_Size(tuple.get()) != count) return false;
    for (int i = 0; i < count; i++) {
        long long value;
        if (!number(Ref(PySequence_GetItem(tuple.get(), i)), value)) return false;
        values[i] = value;
    }
    return true;
}

bool zero(Ref object) {
    long long value;
    return number(static_cast<Ref &&>(object), value) && value == 0;
}

bool is_true(Ref object) { return object && PyObject_IsTrue(object.get()) == 1; }

}  // namespace

bool bind_exchange(PyObject *capsule) {
    const Exchange *exchange = capsule ? (const Exchange *)PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
    if (!exchange) PyErr_Clear();
    const auto found = exchange && exchange->major == 1 ? exchange->tensor : nullptr;
    tensor_of.store(found);
    return found != nullptr;
}

Kind kind_of(PyObject *a) {
    PyObject *type = (PyObject *)Py_TYPE(a);
    if (type == bound.ndarray) return NUMPY;
    return bound.tensor && (type == bound.tensor || type == bound.parameter) ? TORCH : NEITHER;
}

bool ordinary() {
    static PyObject *const level_name = name_of("_current_level");
    long long level = 0;
    if (!zero(ask(bound.modes)) || !number(Ref(PyObject_GetItem(bound.forward_ad, level_name)), level) || level >= 0 ||
        ask(bound.tracing).get() != Py_False)
        return false;
    return zero(ask(bound.functions)) ||
           ask(bound.included, bound.before).get() == Py_False;  // a mode before dispatch comes with one of functions
}

// -- opening ----------------------------------------------------------------------------------------

void Array::close() {
    if (open) PyBuffer_Release(&buffer);
    open = false;
}

bool Array::from_buffer(PyObject *a, int flags) {
    if (PyObject_GetBuffer(a, &buffer, flags)) {
        PyErr_Clear();
        Ref bits = ask(bound.bits, a);  // numbers that the protocol has no letter for: bfloat16
        if (!bits || bits.get() == Py_None || PyObject_GetBuffer(bits.get(), &buffer, flags)) return false;
        dtype = ANYMAX_BF16;
    }
    open = true;
    const char *letter = buffer.format;
    if (letter && letter[0] == '=') letter++;  // of an array that is not aligned
    if (!letter || !letter[0] || letter[1] || buffer.ndim > AXES)
        return false;  // more than a letter: another byte order, or no number
    const Py_ssize_t size = buffer.itemsize;
    if (dtype == OTHER) switch (letter[0]) {
            case 'f': dtype = ANYMAX_F32; break;
            case 'd': dtype = ANYMAX_F64; break;
            case 'e': dtype = ANYMAX_F16; break;
            case '?': dtype = BOOLS; break;
            case 'i':
            case 'l':
            case 'q': dtype = size == 8 ? LONGS : size == 4 ? INTS : OTHER; break;
            default: return false;
        }
    if (dtype == OTHER || item() != size) return false;
    data = (char *)buffer.buf, ndim = buffer.ndim, count = 1;
    for (int i = 0; i < ndim; i++) {
        shape[i] = buffer.shape[i], strides[i] = buffer.strides[i] / size, count *= shape[i];
        aligned &= buffer.strides[i] % size == 0;
    }
    return true;
}

bool Array::from_exchange(PyObject *a) {
    Tensor t;
    memset(&t, 0, sizeof t);
    if (tensor_of.load(std::memory_order_relaxed)(a, &t)) return false;  // no numbers of its own: of vmap, of a mode, sparse
    if (t.device != 1 || t.ndim < 0 || t.ndim > AXES) return false;
    data = (char *)t.data + t.byte_offset, dtype = dtype_of(t), ndim = t.ndim, count = 1;
    for (int i = ndim; i--;) {
        shape[i] = t.shape[i], strides[i] = t.strides ? t.strides[i] : count;
        count *= shape[i];
    }
    return dtype != OTHER && (t.data || !count);
}

namespace {

Ref numbers_of(const int64_t *values, int count) {
    Ref tuple(PyTuple_New(count));
    for (int i = 0; tuple && i < count; i++) PyTuple_SetItem(tuple.get(), i, PyLong_FromLongLong(values[i]));
    return tuple;
}

// (sizes, strides, dtype). Calls repeat a shape, so the last is kept, where one lock is held by all that come here.
Ref strided_arguments(const Array &like) {
    constexpr int KEPT = 4;
    static struct {
        int ndim = -1, dtype;
        int64_t shape[KEPT], strides[KEPT];
        PyObject *arguments = nullptr;  // kept to the end of the process
    } last;
    const size_t bytes = sizeof(int64_t) * (size_t)like.ndim;
#if defined(Py_GIL_DISABLED)
    const bool kept = false;
#else
    const bool kept = like.ndim <= KEPT;
#endif
    if (kept && last.ndim == like.ndim && last.dtype == like.dtype && !memcmp(last.shape, like.shape, bytes) &&
        !memcmp(last.strides, like.strides, bytes))
        return again(last.arguments);
    PyObject *const kinds[] = {bound.f32, bound.f64, bound.bf16, bound.f16};
    const Ref sizes = numbers_of(like.shape, like.ndim), strides = numbers_of(like.strides, like.ndim);
    if (!sizes || !strides) return Ref();
    Ref arguments(PyTuple_Pack(3, sizes.get(), strides.get(), kinds[like.dtype]));
    if (arguments && kept) {
        Py_XDECREF(last.arguments);
        last.ndim = like.ndim, last.dtype = like.dtype, last.arguments = again(arguments.get()).give();
        memcpy(last.shape, like.shape, bytes), memcpy(last.strides, like.strides, bytes);
    }
    return arguments;
}

}  // namespace

// For a torch without the exchange API.
bool Array::from_attributes(PyObject *a) {
    if (!is_true(Ref(PyObject_GetAttrString(a, "is_cpu")))) return false;
    const Ref layout(PyObject_GetAttrString(a, "layout")), kind(PyObject_GetAttrString(a, "dtype")),
        sizes(PyObject_GetAttrString(a, "shape"));
    if (layout.get() != bound.strided || !kind || !sizes) return false;
    PyObject *const known[] = {bound.f32, bound.f64, bound.bf16, bound.f16, bound.i32, bound.i64, bound.boolean};
    for (int i = 0; i < 7; i++)
        if (kind.get() == known[i]) dtype = i;
    const Py_ssize_t axes = PySequence_Size(sizes.get());
    if (dtype == OTHER || axes < 0 || axes > AXES) return false;
    long long address;
    ndim = (int)axes;
    if (!numbers(again(sizes.get()), shape, ndim) || !numbers(Ref(PyObject_CallMethod(a, "stride", nullptr)), strides, ndim))
        return false;
    if (!number(Ref(PyObject_CallMethod(a, "data_ptr", nullptr)), address)) return false;
    data = (char *)(intptr_t)address, count = 1;
    for (int i = 0; i < ndim; i++) count *= shape[i];
    return data || !count;
}

bool Array::look(Kind kind, PyObject *a, bool writable) {
    close();
    dtype = OTHER, aligned = true;
    if (kind_of(a) != kind || kind == NEITHER) return false;
    object = again(a);
    const bool found = kind == NUMPY ? from_buffer(a, PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0))
                       : tensor_of.load(std::memory_order_relaxed) ? from_exchange(a)
                                                                   : from_attributes(a);
    if (found)
        aligned &= (uintptr_t)data % (uintptr_t)item() == 0;
    else
        PyErr_Clear();
    return found;
}

bool Array::read(Kind kind, PyObject *a, bool writable) { return look(kind, a, writable) && plain(kind); }

bool Array::plain(Kind kind) const {
    if (kind == NUMPY || ask(bound.is_neg, object.get()).get() == Py_False) return true;
    PyErr_Clear();
    return false;
}

Ref Array::empty_like(const Array &like) {
    PyObject *const make = bound.empty_strided;
    // what is made within a transform of functorch is of its level
    if (!make || make == Py_None || like.dtype > ANYMAX_F16 || !like.dense() || ask(bound.transforms).get() != Py_False)
        return Ref();
    const Ref arguments = strided_arguments(like);
    Ref made(arguments ? PyObject_CallObject(make, arguments.get()) : nullptr);
    return made && look(TORCH, made.get(), true) ? static_cast<Ref &&>(made) : Ref();
}

bool Array::read_dense(Kind kind, PyObject *a, int wanted, int64_t numbers, bool writable) {
    return read(kind, a, writable) && dtype == wanted && dense() && (numbers < 0 || count == numbers);
}

// -- comparing --------------------------------------------------------------------------------------

bool Array::dense() const {
    if (!count) return true;  // nothing is read, whatever the strides are
    int64_t step = 1;
    for (int i = ndim; i--; step *= shape[i])
        if (shape[i] != 1 && strides[i] != step) return false;
    return aligned;
}

bool Array::same_shape(const Array &other) const {
    return ndim == other.ndim && !memcmp(shape, other.shape, sizeof(int64_t) * (size_t)ndim);
}

bool Array::same_place(const Array &other) const {
    if (data != other.data || dtype != other.dtype || !same_shape(other)) return false;
    for (int i = 0; i < ndim; i++)
        if (shape[i] > 1 && strides[i] != other.strides[i]) return false;
    return true;
}

namespace {

struct Span {
    uintptr_t low, high;
};

Span span_of(const Array &a) {
    int64_t low = 0, high = 0;
    for (int i = 0; i < a.ndim; i++) (a.strides[i] < 0 ? low : high) += (a.shape[i] - 1) * a.strides[i];
    return Span{(uintptr_t)a.data + (uintptr_t)(low * a.item()), (uintptr_t)a.data + (uintptr_t)((high + 1) * a.item())};
}

}  // namespace

bool Array::disjoint(const Array &other) const {
    const Span a = span_of(*this), b = span_of(other);
    return a.high <= b.low || b.high <= a.low;
}
