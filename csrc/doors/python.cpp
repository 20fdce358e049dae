/* The short way from Python: a builtin function that takes arrays, without Python's headers and without a build for each Python.
 *
 * `kernels/short.py` hands over the functions of Python's stable ABI by address, and makes the builtins of the two functions below with
 * PyCFunction_NewEx. A tensor shows its numbers through the exchange API of DLPack (dlpack.h 1.3), an array of NumPy through the buffer protocol;
 * the structures of both are written out here as their standards have them.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/unit.h"

namespace {

struct Tensor {  // DLTensor
    void *data;
    int32_t device, device_id;
    int32_t ndim;
    uint8_t type, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct Buffer {  // Py_buffer
    void *buf, *obj;
    intptr_t len, itemsize;
    int readonly, ndim;
    char *format;
    intptr_t *shape, *strides, *suboffsets;
    void *internal;
};

anymax_python py;

constexpr int INTS = ANYMAX_F16 + 1, LONGS = INTS + 1;  // of a saved support; of classes

struct Array {  // on the CPU, in C order
    char *data = nullptr;
    int64_t count = 0;
    int dtype = -1, ndim = 0;
    const int64_t *shape = nullptr;
};

bool same(const Array &a, const Array &b) { return a.dtype == b.dtype && a.ndim == b.ndim && !memcmp(a.shape, b.shape, sizeof(int64_t) * a.ndim); }

int64_t size_of(const Array &a) { return a.count * (a.dtype == ANYMAX_F64 ? 8 : a.dtype == ANYMAX_F32 ? 4 : 2); }
bool large(const Array &a) { return size_of(a) > py.large; }

bool apart(const Array &a, const Array &b) {  // or the very same
    const uintptr_t bytes = (uintptr_t)size_of(a);
    const uintptr_t from = (uintptr_t)a.data, to = (uintptr_t)b.data;
    return from == to || from + bytes <= to || to + bytes <= from;
}

struct Tensors {
    static constexpr bool lent = true;
    static int dtype(const Tensor &t) {
        if (t.lanes != 1) return -1;
        if (t.type == 2) return t.bits == 32 ? ANYMAX_F32 : t.bits == 64 ? ANYMAX_F64 : t.bits == 16 ? ANYMAX_F16 : -1;
        return t.type == 4 && t.bits == 16 ? ANYMAX_BF16 : t.type == 0 && t.bits == 32 ? INTS : t.type == 0 && t.bits == 64 ? LONGS : -1;
    }
    static bool open(void *object, Array &a) {
        Tensor t;
        memset(&t, 0, sizeof t);
        if (py.tensor(object, &t)) {  // no numbers of its own: of vmap, of a mode, sparse
            py.clear();
            return false;
        }
        if (t.device != 1 || t.ndim < 0 || !t.data) return false;
        a.count = 1;
        for (int i = t.ndim; i--;) {
            if (t.strides && t.shape[i] != 1 && t.strides[i] != a.count) return false;
            a.count *= t.shape[i];
        }
        a.data = (char *)t.data + t.byte_offset, a.dtype = dtype(t), a.ndim = t.ndim, a.shape = t.shape;
        return a.dtype >= 0 && a.count > 0;
    }
    bool read(void *object, Array &a) { return open(object, a); }
    bool write(void *object, Array &a) { return open(object, a); }
    // False where torch wants to see plain operations, or raises.
    static bool ordinary() {
        if (py.stack && py.within) return !py.stack() && !py.within((uint16_t)py.before) && !py.within((uint16_t)py.tracer);
        long long modes, included;
        return integer(py.ask(py.modes, nullptr), modes) && !modes && integer(py.ask(py.included, py.mode, nullptr), included) && !included && untraced();
    }
    static void *like(void *x, int64_t count) { return py.ask(count < py.many ? py.like : py.room, x, nullptr); }

  private:
    static bool integer(void *object, long long &value) {
        if (!object) return false;
        value = py.integer(object);
        py.drop(object);
        return true;
    }
    static bool untraced() {
        void *by = py.ask(py.tracing, nullptr);
        if (by) py.drop(by);
        return by == py.none;
    }
};

struct Buffers {
    static constexpr bool lent = false;
    Buffer held[5];
    int count = 0;
    ~Buffers() {
        while (count) py.release(&held[--count]);
    }
    bool open(void *object, Array &a, int flags) {
        Buffer &b = held[count];
        if (py.buffer(object, &b, flags)) {
            py.clear();
            return false;
        }
        count++;
        // One letter: aligned, and in the machine's byte order.
        if (b.ndim < 1 || !b.format || !b.format[0] || b.format[1] || sizeof(intptr_t) != sizeof(int64_t)) return false;
        a.dtype = b.format[0] == 'f' ? ANYMAX_F32 : b.format[0] == 'd' ? ANYMAX_F64 : b.format[0] == 'e' ? ANYMAX_F16 : b.format[0] == 'l' || b.format[0] == 'q' ? (b.itemsize == 8 ? LONGS : -1) : -1;
        if (a.dtype < 0 || b.len <= 0) return false;
        a.data = (char *)b.buf, a.count = b.len / b.itemsize, a.ndim = b.ndim, a.shape = (const int64_t *)b.shape;
        return true;
    }
    bool read(void *object, Array &a) { return open(object, a, 0x38 | 0x04); }          // PyBUF_C_CONTIGUOUS | PyBUF_FORMAT
    bool write(void *object, Array &a) { return open(object, a, 0x38 | 0x04 | 0x01); }  // ... | PyBUF_WRITABLE
    static bool ordinary() { return true; }
    static void *like(void *, int64_t) { return nullptr; }
};

// The array that a call writes to: the caller's, or where that is None one like x. A reference of our own, that its last owner gives away.
template <class Kind> class Place {
    void *object = nullptr;

  public:
    Place(void *given, void *x, int64_t count) {
        if (given == py.none)
            object = Kind::like(x, count);
        else
            py.keep(object = given);
    }
    ~Place() {
        if (object) py.drop(object);
    }
    bool open(Kind &kind, Array &a) { return object && kind.write(object, a); }
    void *give() {
        void *given = object;
        object = nullptr;
        return given;
    }
};

// A call of so many elements: a longer one than it takes to let another thread have the interpreter does so. Only tensors go to the pool that
// their framework lends, if it does.
template <class Kind, class F> bool run(int64_t count, F call) {
    if (count <= py.small) return call(0) == 0;
    void *pool = py.ask(py.pool, nullptr);
    if (!pool) return false;
    const int which = Kind::lent && py.integer(pool) == 1;
    py.drop(pool);
    void *state = py.leave();
    const int code = call(which);
    py.enter(state);
    return code == 0;
}

// The support that a call saves, or has saved.
template <class Kind> bool support_of(Kind &kind, void *object, int64_t capacity, const Array &x, int64_t rows, int64_t n, Array &memory) {
    const int64_t words = x.dtype == ANYMAX_F64 ? 2 : 1;
    if (capacity < 1 || capacity > n || !kind.write(object, memory)) return false;
    return memory.dtype == INTS && memory.count == rows * (capacity * (words + 1) + 1);
}

// The array with the result, a new reference; NULL where the call is not served.
template <class Kind> void *served(void *const *args, anymax_packed_call &call, bool whole) {
    Kind kind;
    Array x, out, p, g, memory;
    if (!kind.read(args[2], x) || x.dtype >= INTS || x.ndim < 1 || large(x)) return nullptr;
    const int64_t n = x.shape[x.ndim - 1], rows = x.count / n;
    const bool backward = (call.code & 255) == ANYMAX_VJP;
    if (backward && (!whole || !kind.read(args[4], p) || !kind.read(args[5], g) || !same(p, x) || !same(g, x))) return nullptr;
    if (call.capacity && !support_of(kind, args[6], call.capacity, x, rows, n, memory)) return nullptr;
    Place<Kind> place(args[3], args[2], x.count);
    if (!place.open(kind, out) || !same(x, out) || !apart(x, out)) return nullptr;
    if (backward && (!apart(p, out) || !apart(g, out))) return nullptr;
    if (call.capacity && g.data == out.data) return nullptr;  // g is read where out was cleared
    call.x = x.data, call.p = p.data, call.g = g.data, call.out = out.data, call.rows = rows, call.n = n, call.saved = memory.data;
    const bool done = run<Kind>(x.count, [&](int pool) {
        call.code |= (int64_t)x.dtype << 16 | (int64_t)pool << 24;
        return anymax_packed(&call);
    });
    return done ? place.give() : nullptr;
}

// A number of each row: the caller's array, or room of our own where the caller has one number for all.
class Each {
    char small[1024];
    char *own = nullptr, *one;  // that number
    const int64_t rows;
    const bool wide;

    template <class C> void fill_as(double factor) {
        for (int64_t r = 0; r < rows; r++) ((C *)data)[r] = (C)((double)*(const C *)one * factor);
    }
    template <class C> void sum_as(double factor) const {
        double total = 0.0;
        for (int64_t r = 0; r < rows; r++) total += (double)((const C *)data)[r];
        *(C *)one = (C)(total * factor);
    }

  public:
    char *data;
    Each(const Array &given, int64_t rows, bool shared) : one(given.data), rows(rows), wide(given.dtype == ANYMAX_F64), data(given.data) {
        const int64_t size = rows * (wide ? 8 : 4);
        if (shared) data = size <= (int64_t)sizeof small ? small : (own = (char *)malloc((size_t)size));
    }
    ~Each() { free(own); }
    // The one number, times a factor, for each row; and of the rows' numbers the sum, times a factor, in its place.
    void fill(double factor) { wide ? fill_as<double>(factor) : fill_as<float>(factor); }
    void sum(double factor) const { wide ? sum_as<double>(factor) : sum_as<float>(factor); }
};

// Losses of class indices, and their gradients: rows of two axes, and one number a row beside them, or one for all.
template <class Kind> void *served_loss(void *const *args, int64_t code, double param, int64_t capacity, double factor, bool whole) {
    const bool gradient = (code & 255) == ANYMAX_LOSS_GRAD;
    Kind kind;
    Array x, out, index, scale, memory;
    if (!kind.read(args[2], x) || x.dtype > ANYMAX_F64 || x.ndim != 2 || !kind.read(args[4], index) || (!gradient && args[3] == py.none)) return nullptr;
    const int64_t n = x.shape[1], rows = x.shape[0];
    if (index.dtype != LONGS || index.ndim != 1 || index.count != rows || (gradient && (large(x) || !kind.read(args[5], scale)))) return nullptr;
    const int64_t map = code >> 8 & 255;
    if (map == ANYMAX_BUDGET && !(param <= (double)n)) return nullptr;  // the caller's mistake, as in anymax_packed
    const int64_t *classes = (const int64_t *)index.data;
    bool stray = false;
    for (int64_t r = 0; r < rows; r++) stray |= (uint64_t)classes[r] >= (uint64_t)n;
    if (stray) return nullptr;
    Place<Kind> place(args[3], args[2], x.count);
    if (!place.open(kind, out) || (gradient && (!same(x, out) || !apart(x, out)))) return nullptr;
    const Array &given = gradient ? scale : out;
    const bool one = factor != 0.0;
    if (given.dtype != x.dtype || given.ndim != (one ? 0 : 1) || given.count != (one ? 1 : rows)) return nullptr;
    Each each(given, rows, one);
    if (!each.data) return nullptr;
    if (one && gradient) each.fill(factor);
    anymax_call call;
    memset(&call, 0, sizeof call);
    if (capacity) {
        if (!support_of(kind, args[6], capacity, x, rows, n, memory)) return nullptr;
        call.support = anymax_support_in(memory.data, rows, capacity, x.dtype);
    } else if (whole && args[6] != py.none) {
        if (map != ANYMAX_SOFTMAX || !kind.write(args[6], memory) || memory.dtype != x.dtype || memory.count != rows) return nullptr;
        call.tau = memory.data;
    }
    call.op = (int32_t)(code & 255), call.map = (int32_t)map, call.dtype = x.dtype, call.param = param;
    call.outer = rows, call.inner = 1, call.n = n, call.index = classes;
    call.x = anymax_view{x.data, n, 0, 1};
    if (gradient)
        call.out = anymax_view{out.data, n, 0, 1}, call.scale = each.data;
    else
        call.value = each.data;
    const bool done = run<Kind>(x.count, [&](int pool) {
        call.pool = pool;
        return anymax_run(&call);
    });
    if (done && one && !gradient) each.sum(factor);
    return done ? place.give() : nullptr;
}

template <class Kind> void *serve(void *const *args, intptr_t count) {
    void *answer = nullptr;
    if (count == 4 || count == 6 || count == 8 || count == 9) {
        anymax_packed_call call;
        memset(&call, 0, sizeof call);
        call.code = py.integer(args[0]), call.param = py.real(args[1]), call.capacity = count >= 8 ? py.integer(args[7]) : 0;
        const double factor = count == 9 ? py.real(args[8]) : 0.0;
        if (py.occurred()) return nullptr;
        const int64_t op = call.code & 255;
        if (call.code >> 16 == 0 && Kind::ordinary()) {
            if ((count == 6 || count == 9) && (op == ANYMAX_LOSS || op == ANYMAX_LOSS_GRAD))
                answer = served_loss<Kind>(args, call.code, call.param, call.capacity, factor, count == 9);
            else if (count == 4 || count == 8)
                answer = served<Kind>(args, call, count == 8);
        }
        if (!answer && py.occurred()) return nullptr;
    }
    if (!answer) py.keep(answer = py.none);
    return answer;
}

}  // namespace

extern "C" void anymax_python_bind(const anymax_python *api) { py = *api; }

extern "C" void *anymax_python_tensors(void *, void *const *args, intptr_t count) { return serve<Tensors>(args, count); }

extern "C" void *anymax_python_buffers(void *, void *const *args, intptr_t count) { return serve<Buffers>(args, count); }
