// The rows of one call: their operands by axes, laid out for the engine with two strides for the rows and one for the classes.
#ifndef ANYMAX_PYTHON_ROWS_HPP
#define ANYMAX_PYTHON_ROWS_HPP

#include <stdlib.h>

#include "doors/python/calls.hpp"

// What takes part in a call: the operands that have classes, by the place of their view in anymax_call.
struct Operand {
    Array array;
    int64_t strides[AXES];  // for the axes of the scores: 0 where it is broadcast
    anymax_view *view = nullptr;
    Ref copy;  // in its place
};

struct Axis {
    int64_t size, steps[5];
};

class Rows {
    int axis = 0, used = 0;
    const Array *per_row = nullptr;  // parameters
    double one_bound = 0.0;          // of all classes; a float where the scores are narrower
    float narrow_bound = 0.0f;
    Operand operands[5];  // x, p, g, out, mask, bounds: as far as the call has them

    bool spread(Operand &o);  // its strides for the axes of the scores, by the rules of broadcasting
    int merged(Axis *axes, int only) const;
    bool replace(Operand &o);
    bool stand_in(Operand &o);  // memory of ours in the place of what is written

  public:
    const Kind kind;
    Operand *out = nullptr;
    Ref result, scratch;  // what the call gives back; what stands in for it where it can't be written directly
    int64_t shape[AXES], n = 0, rows = 1;
    int ndim = 0, dtype = OTHER;
    anymax_call call{};

    explicit Rows(Kind kind) : kind(kind) {}
    // The first operand: its shape is that of the call.
    bool lead(PyObject *a, PyObject *asked_axis, anymax_view *view);
    bool look(PyObject *a) { return operands[0].array.look(kind, a); }  // at it, before `lead`
    bool beside(PyObject *a, anymax_view *view);
    bool mask(PyObject *a);
    bool write(PyObject *given, bool zeros);
    // A number a row, in C order; `copy` holds it where it had to be made.
    bool each(PyObject *a, int wanted, Array &array, Ref &copy);
    bool in_order(PyObject *a, Array &array, Ref &copy);  // makes such a copy of what was read where it has to
    bool support(PyObject *memory, Array &array);         // None: there is none
    bool save(int64_t capacity, PyObject *x, Array &array,
              Ref &memory);  // memory for a support of so many non-zeros a row, or less than 0: of what pays
    bool link(const GivenMap &l, int op, Array &params);
    int64_t saves() const;           // how many non-zeros of each row pay; of halves in small calls too, whose p is rounded
    bool bounds(const GivenMap &l);  // of the classes, where the map has them
    bool lay_out();
    int run();
    PyObject *answer(const GivenMap &link) {  // of the call, whose result is an array
        const int code = run();
        return ::answer(code, "op", link.kind, n, result.get());
    }
    bool batch_is(const Array &a) const;
};

inline int wide_of(const Rows &r) { return r.dtype == ANYMAX_F64 ? ANYMAX_F64 : ANYMAX_F32; }

// One number a row: the caller's array, or scratch memory of ours where the caller has one number for all.
class Each {
    char small[1024];
    char *own = nullptr;
    const int64_t rows;
    const bool wide;

  public:
    void *data;
    Each(const Rows &r, const Array &given, bool single) : rows(r.rows), wide(r.dtype == ANYMAX_F64), data(given.data) {
        const int64_t size = rows * (wide ? 8 : 4);
        if (single) data = size <= (int64_t)sizeof small ? small : (own = (char *)malloc((size_t)size));
    }
    ~Each() { free(own); }
    double at(const void *from, int64_t r) const { return wide ? ((const double *)from)[r] : (double)((const float *)from)[r]; }
    void put(void *to, int64_t r, double value) const {
        if (wide)
            ((double *)to)[r] = value;
        else
            ((float *)to)[r] = (float)value;
    }
    void fill(double value) {
        for (int64_t r = 0; r < rows; r++) put(data, r, value);
    }
    double sum() const {
        double total = 0.0;
        for (int64_t r = 0; r < rows; r++) total += at(data, r);
        return total;
    }
};

// The rows of a call whose maps solve them whole: floats or doubles in C order, the classes last.
template <class Call>
bool rows_of(Call &call, const Array &x) {
    if (x.dtype > ANYMAX_F64 || x.ndim < 1 || !x.dense()) return false;
    call.dtype = x.dtype, call.n = x.shape[x.ndim - 1], call.rows = call.n ? x.count / call.n : 0;
    return call.n > 0;
}
// float64 of NumPy, one number or one a row
inline bool one_or_each(Array &array, PyObject *a, int64_t rows) {
    return array.read_dense(NUMPY, a, ANYMAX_F64, -1) && (array.count == 1 || array.count == rows);
}

// What all functions do with their arguments and results.
PyObject *none();  // None, or the error that is set
bool arguments(Py_ssize_t count, Py_ssize_t wanted);
bool integer(PyObject *object, int64_t &value);
// True where the engine may serve arrays of this kind now. A link was chosen already; a mapping is served where no other engine
// is asked for.
bool served(Kind kind, PyObject *mapping);

#endif
