// What the families of kernels give each other, each compiled once for an instruction set: rows, batch, tile, backward, perturb and
// linear, each a file in units/. And where the rows of a call lie.
#pragma once

#include "core/unit.h"

#include "core/rows.hpp"
#include "plan.hpp"

namespace ANYMAX_UNIT {

// The rows [begin, end) of a call, one after the other: any operation, dtype and layout.
template <class C>
void by_rows(const anymax_call &call, int64_t begin, int64_t end, bool past, const Team &team, Scratch &scratch);

// The rows of a call whose plan says so; each leaves single rows to by_rows where it cannot serve them.
template <class C>
void run_tiles(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool past, const Team &team, Scratch &scratch);
void run_batches(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool past, const Team &team, Scratch &scratch);
void run_batch_losses(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool past, const Team &team, Scratch &scratch);
void run_backward(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool past, const Team &team, Scratch &scratch);

// Of perturb max; what they are is said in perturb.hpp.
int64_t perturb_work(int64_t n, int64_t nodes);
template <class C>
void perturb_forward(int noise, double scale, int64_t nodes, const C *x, int64_t n, C *p, double *tau, double *work);
template <class C>
void perturb_vjp(int noise, double scale, int64_t nodes, const C *x, const C *p, const C *g, int64_t n, C *out, double *work);
template <class C>
double perturb_loss(int noise, double scale, int64_t nodes, const C *x, int64_t n, int64_t target, C *p, double *work);

#if !defined(ANYMAX_NO_ATTENTION)
int linear(const anymax_linear_call *call, anymax_parallel team);
int linear_vjp(const anymax_linear_call *call, anymax_parallel team);
#endif

// -- where rows lie ---------------------------------------------------------------------------------------------------------------

inline const char *at(const anymax_view &v, int64_t size, int64_t o, int64_t i) {
    return (const char *)v.data + (o * v.outer + i * v.inner) * size;
}

// Rows that lie side by side, their classes far apart: as many as a cache line holds are turned at once.
constexpr int64_t GROUP = 16;

template <class C, class T>
inline void turn_in(const T *from, int64_t step, int64_t rows, int64_t n, C *to) {
    for (int64_t k = 0; k < n; k++)
        for (int64_t r = 0; r < rows; r++) to[r * n + k] = (C)from[k * step + r];
}
template <class C>
inline void turn_in(const void *from, int64_t step, int32_t dtype, int64_t rows, int64_t n, C *to) {
    if (dtype == ANYMAX_F32) return turn_in<C, float>((const float *)from, step, rows, n, to);
    if (dtype == ANYMAX_F64) return turn_in<C, double>((const double *)from, step, rows, n, to);
    const uint16_t *h = (const uint16_t *)from;
    for (int64_t k = 0; k < n; k++)
        for (int64_t r = 0; r < rows; r++) to[r * n + k] = (C)(dtype == ANYMAX_BF16 ? from_bf16(h[k * step + r]) : from_f16(h[k * step + r]));
}
template <class C>
inline void turn_out(const C *from, int64_t rows, int64_t n, void *to, int64_t step, int32_t dtype) {
    for (int64_t k = 0; k < n; k++)
        for (int64_t r = 0; r < rows; r++) {
            Sink<C> one{(char *)to + r * item(dtype), step, dtype, nullptr, false, n, nullptr};
            put(one, k, from[r * n + k]);
        }
}

template <class C>
inline Sink<C> sink_at(const anymax_call &call, char *row, int64_t n, bool past) {
    bool same = sizeof(C) == 8 ? call.dtype == ANYMAX_F64 : call.dtype == ANYMAX_F32;
    return Sink<C>{row, call.out.cls, call.dtype, same && call.out.cls == 1 ? (C *)row : nullptr, past && call.out.cls == 1, n, nullptr, call.fresh == 2};
}

inline bool sideways(const anymax_view &v, int64_t n) { return n > 1 && v.inner == 1 && (v.cls > 1 || v.cls < -1); }

}  // namespace ANYMAX_UNIT
