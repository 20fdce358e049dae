// Gumbel noise, and the numbers of torch's generator.
#include "doors/python/rows.hpp"

constexpr int64_t LOGARITHMS = 4;  // the work of one number, in copies

// (pairs [..., 2], out) -> True: Gumbel noise from pairs of uniform numbers, both float32 in C order
ANYMAX_CALL(call_gumbel) {
    if (!arguments(count, 2)) return nullptr;
    const Kind kind = kind_of(args[0]);
    Array pairs, out;
    if (kind == NEITHER || !out.read_dense(kind, args[1], ANYMAX_F32, -1, true) ||
        !pairs.read_dense(kind, args[0], ANYMAX_F32, 2 * out.count))
        return none();
    const int code = without_lock(kind, at_most_so_much(out.count, LOGARITHMS),
                                  [&](int) { return anymax_gumbel((const float *)pairs.data, (float *)out.data, out.count); });
    return answer(code, "noise", Py_None, out.count);
}

// The number that a method gives; below 0: none.
static long long asked(PyObject *object, const char *method) {
    const Ref number(PyObject_CallMethod(object, method, nullptr));
    const long long value = number ? PyLong_AsLongLong(number.get()) : -1;
    return PyErr_Occurred() ? -1 : value;
}

// (generator of torch on a CPU that no other thread has, out) -> True: writes what torch.rand would. (Torch's own lock of a
// generator can't be held from here.) The state is torch's CPUGeneratorImplState, in numbers of 8 bytes.
ANYMAX_CALL(call_torch_uniform) {
    if (!arguments(count, 2)) return nullptr;
    Array out;
    if (!out.read_dense(TORCH, args[1], ANYMAX_F32, -1, true)) return none();
    const Ref state(PyObject_CallMethod(args[0], "get_state", nullptr));
    if (!state) return nullptr;
    constexpr int64_t LEFT = 1, NEXT = 2, WORDS = 3, ALL = WORDS + ANYMAX_TWISTER_WORDS + 5;
    const long long address = asked(state.get(), "data_ptr");
    if (asked(state.get(), "numel") != 8 * ALL || address <= 0 || address % 8) return none();
    int64_t *const at = (int64_t *)(uintptr_t)address, seeded = at[LEFT] & ~(int64_t)0xffffffff;
    int64_t next = at[NEXT], left = (int32_t)at[LEFT];
    if (anymax_twister(at + WORDS, &next, &left, (float *)out.data, out.count)) return none();
    at[NEXT] = next, at[LEFT] = seeded | left;
    const Ref done(PyObject_CallMethod(args[0], "set_state", "O", state.get()));
    return done ? again(Py_True).give() : nullptr;
}
