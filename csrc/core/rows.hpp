// Where rows lie and where their results go. Every kernel reads a contiguous row of C = float or double and is told where to
// put its result by a `Sink`; what depends on the caller's layout and dtype is settled here.
#pragma once

#include "core/packing.hpp"
#include "core/memory.hpp"
#include "core/pieces.hpp"
#include "core/unit.h"
#include "limits.hpp"

namespace ANYMAX_UNIT {

// -- where a result goes

template <class C>
ANYMAX_INLINE bool is_type(int32_t dtype) {
    return dtype == (sizeof(C) == 8 ? ANYMAX_F64 : ANYMAX_F32);
}

template <class C>
struct Sink {
    void *row;      // the caller's row
    int64_t step;   // its stride
    int32_t dtype;  // its type
    C *direct;      // the row itself where it is contiguous and of type C, else NULL
    bool bypass;    // write around the caches (non-temporal stores)
    int64_t n;
    const C *next =
        nullptr;           // the row of scores that is read after this one, NULL where it may be there already or is not known
    bool cleared = false;  // it holds zeros already
};
// A row of C, side by side.
template <class C>
ANYMAX_INLINE Sink<C> sink_of(C *row, int64_t n, bool bypass) {
    return Sink<C>{row, 1, sizeof(C) == 8 ? ANYMAX_F64 : ANYMAX_F32, row, bypass, n};
}

// f(number) for a row of this dtype, of which number(i) is the i-th as C.
template <class C, class F>
ANYMAX_INLINE void with_numbers(const void *row, int32_t dtype, F f) {
    switch (dtype) {
        case ANYMAX_F32: return f([=](int64_t i) ANYMAX_EACH { return (C)((const float *)row)[i]; });
        case ANYMAX_F64: return f([=](int64_t i) ANYMAX_EACH { return (C)((const double *)row)[i]; });
        case ANYMAX_BF16: return f([=](int64_t i) ANYMAX_EACH { return (C)from_bf16(((const uint16_t *)row)[i]); });
        default: return f([=](int64_t i) ANYMAX_EACH { return (C)from_f16(((const uint16_t *)row)[i]); });
    }
}

// Of a row the number at place(i) becomes f(i), for i from 0 to n - 1.
template <class P, class F>
ANYMAX_INLINE void put_each(void *row, int32_t dtype, int64_t n, P place, F f) {
    switch (dtype) {
        case ANYMAX_F32:
            for (int64_t i = 0; i < n; i++) ((float *)row)[place(i)] = (float)f(i);
            break;
        case ANYMAX_F64:
            for (int64_t i = 0; i < n; i++) ((double *)row)[place(i)] = (double)f(i);
            break;
        case ANYMAX_BF16:
            for (int64_t i = 0; i < n; i++) ((uint16_t *)row)[place(i)] = to_bf16((float)f(i));
            break;
        default:
            for (int64_t i = 0; i < n; i++) ((uint16_t *)row)[place(i)] = to_f16((float)f(i));
            break;
    }
}
template <class C>
ANYMAX_INLINE void put(const Sink<C> &out, int64_t i, C v) {
    put_each(
        out.row, out.dtype, 1, [=, &out](int64_t) ANYMAX_EACH { return i * out.step; }, [=](int64_t) ANYMAX_EACH { return v; });
}

template <class C>
inline Sink<C> sink_at(const anymax_call &call, char *row, int64_t n, bool bypass) {
    return Sink<C>{row,
                   call.out.cls,
                   call.dtype,
                   is_type<C>(call.dtype) && call.out.cls == 1 ? (C *)row : nullptr,
                   bypass && call.out.cls == 1,
                   n,
                   nullptr,
                   call.fresh == 2};
}

// The entries before the first that lies where a vector may be written around the caches, `most` if there are no more.
template <class C>
ANYMAX_INLINE int64_t unaligned(const C *to, int64_t most) {
    const int64_t lead = (int64_t)((-(uintptr_t)to & (ANYMAX_VECTOR - 1)) / sizeof(C));
    return lead < most ? lead : most;
}

// Zeros for bytes that are contiguous.
inline void zero_bytes(char *p, int64_t bytes, bool bypass) {
    if (!bypass || bytes < ZEROS_BYPASS_FROM) {
        memset(p, 0, (size_t)bytes);
        return;
    }
    const int64_t lead = unaligned(p, bytes);
    memset(p, 0, (size_t)lead);
    int64_t i = lead;
    for (; i + 4 * ANYMAX_VECTOR <= bytes; i += 4 * ANYMAX_VECTOR)
        for (int j = 0; j < 4; j++) stream((float *)(p + i + j * ANYMAX_VECTOR), vf{});
    memset(p + i, 0, (size_t)(bytes - i));
}

template <class C>
inline void fill(const Sink<C> &out, C v) {
    put_each(
        out.row, out.dtype, out.n, [step = out.step](int64_t i) ANYMAX_EACH { return i * step; },
        [=](int64_t) ANYMAX_EACH { return v; });
}

template <class C>
inline void zeros(const Sink<C> &out, const Team &team) {
    if (out.cleared) return;
    int64_t size = anymax_item(out.dtype);
    if (out.step == 1) {
        if (out.n <= PIECE) return zero_bytes((char *)out.row, out.n * size, out.bypass);
        pieces(team, out.n,
               [&](int64_t, int64_t b, int64_t e) { zero_bytes((char *)out.row + b * size, (e - b) * size, out.bypass); });
        return;
    }
    fill(out, C(0));
}

// True where the largest score of a row is no finite number, and its results are written: NaN, or `empty` where no class is
// left.
template <class C>
inline bool settled(const Sink<C> &out, C high, bool sound, C empty, const Team &team) {
    if (sound && high > -infinity<C>) return false;
    sound &&empty == C(0) ? zeros(out, team) : fill(out, sound ? empty : not_a_number<C>);
    return true;
}

// Of `count` indices in order, the first that is no less than `least`.
inline int64_t first_from(const int32_t *index, int64_t count, int64_t least) {
    return first_not(count, [=](int64_t i) { return index[i] < least; });
}
// The place of the class t among them, -1 where it has none.
inline int64_t place_of(const int32_t *index, int64_t count, int64_t t) {
    const int64_t i = first_from(index, count, t);
    return i < count && index[i] == t ? i : -1;
}

// The whole row at once: f(i) gives the vector of results that starts at i (of all lanes, also beyond the end).
template <class C, class F>
ANYMAX_INLINE void write(C *to, int64_t begin, int64_t end, bool bypass, F f) {
    constexpr int64_t W = width<C>;
    int64_t i = begin;
    if (bypass) {
        const int64_t lead = unaligned(to + i, end - i);
        if (lead) store_part(to + i, f(i), lead);
        i += lead;
        for (; i + W <= end; i += W) stream(to + i, f(i));
    }
    for (; i + W <= end; i += W) store(to + i, f(i));
    if (i < end) store_part(to + i, f(i), end - i);
}

// A row of results of type C in the caller's layout and type.
template <class C>
inline void deliver(const Sink<C> &out, const C *from) {
    const int64_t n = out.n, step = out.step;
    if (step != 1)
        return put_each(
            out.row, out.dtype, n, [=](int64_t i) ANYMAX_EACH { return i * step; },
            [=](int64_t i) ANYMAX_EACH { return from[i]; });
    int64_t done = 0;
#if defined(__F16C__)
    uint16_t *const to = (uint16_t *)out.row;
    if (out.dtype == ANYMAX_F16 && sizeof(C) == 4)
        for (; done + 8 <= n; done += 8)
            _mm_storeu_si128((__m128i *)(to + done), _mm256_cvtps_ph(_mm256_loadu_ps((const float *)from + done), 0));
#endif
    put_each(
        out.row, out.dtype, n - done, [=](int64_t i) ANYMAX_EACH { return done + i; },
        [=](int64_t i) ANYMAX_EACH { return from[done + i]; });
}

// The largest number that a dtype rounds to 0.
inline double vanishing(int32_t dtype) {
    return dtype == ANYMAX_F16 ? 0x1p-25 : dtype == ANYMAX_BF16 ? 0x1p-134 : dtype == ANYMAX_F32 ? 0x1p-150 : 0.0;
}

// The largest number below 1 of a half; of other dtypes 1.
inline double below_1(int32_t dtype) { return dtype == ANYMAX_F16 ? 1.0 - 0x1p-11 : dtype == ANYMAX_BF16 ? 1.0 - 0x1p-8 : 1.0; }

// A long row in pieces. By value: what f has seen of its caller stays in the caller's registers.
template <class C, class F>
__attribute__((noinline)) void emit_pieces(C *to, int64_t n, bool bypass, const Team &team, F f) {
    pieces(team, n, [=](int64_t, int64_t begin, int64_t end) { write(to, begin, end, bypass, f); });
}

// A dense row f(i) to the caller, through scratch where its layout or type is not C's. Of rows that may be the caller's own
// f(i) reads the i-th vector alone, for results may take their place; and nothing of the scratch memory RESULT.
// f captures by value: what it has by reference is read from memory again for each vector (softmax took 1.06 to 1.18 as long).
template <class C, class F>
ANYMAX_INLINE void emit(const Sink<C> &out, Scratch &scratch, const Team &team, F f) {
    C *const to = out.direct ? out.direct : scratch.take<C>(RESULT, out.n);
    if (!to) return;
    if (out.n <= PIECE)
        write(to, 0, out.n, out.direct && out.bypass, f);
    else
        emit_pieces(to, out.n, out.direct && out.bypass, out.direct ? team : Team{nullptr}, f);
    if (!out.direct) deliver(out, (const C *)to);
}

// The same where f(i) reads of the scratch memory e the i-th vector alone: results that do not go to the caller at once take
// its place.
template <class C, class F>
ANYMAX_INLINE void emit_over(const Sink<C> &out, C *e, F f, const Team &team = Team{nullptr}) {
    C *const to = out.direct ? out.direct : e;
    if (out.n <= PIECE)
        write(to, 0, out.n, out.direct && out.bypass, f);
    else
        emit_pieces(to, out.n, out.direct && out.bypass, team, f);
    if (!out.direct) deliver(out, (const C *)to);
}

// A row of zeros but for `count` entries in order, around the caches: a line that was written so is slow to touch again, so the
// row is made a piece at a time beside it.
template <class C, class V>
inline void spread_bypass(C *to, int64_t n, const int32_t *index, const V *value, int64_t count, const Team &team) {
    constexpr int64_t STEP = SPREAD_CHUNK / sizeof(C), W = width<C>;
    pieces(team, n, [&](int64_t, int64_t begin, int64_t end) {
        alignas(64) C made[STEP + W];
        memset(made, 0, (size_t)(end - begin < STEP ? end - begin + W : STEP + W) * sizeof(C));
        int64_t k = first_from(index, count, begin);
        for (int64_t i = begin, stop; i < end; i = stop) {
            const int64_t lead = unaligned(to + i, end - i), first = k;
            stop = lead ? i + lead : i + STEP < end ? i + STEP : end;
            for (; k < count && index[k] < stop; k++) made[index[k] - i] = (C)value[k];
            write(to, i, stop, true, [&](int64_t j) ANYMAX_EACH { return load(made + (j - i)); });
            for (int64_t j = first; j < k; j++) made[index[j] - i] = C(0);
        }
    });
}

// A row of zeros but for `count` entries in order.
template <class C, class V>
inline void spread(const Sink<C> &out, const int32_t *index, const V *value, int64_t count, const Team &team) {
    if (out.bypass && !out.cleared && out.direct) return spread_bypass(out.direct, out.n, index, value, count, team);
    zeros(out, team);
    if (out.direct)
        for (int64_t i = 0; i < count; i++) out.direct[index[i]] = (C)value[i];
    else
        put_each(
            out.row, out.dtype, count, [=, step = out.step](int64_t i) ANYMAX_EACH { return index[i] * step; },
            [=](int64_t i) ANYMAX_EACH { return (C)value[i]; });
}

// -- the rows of a call

inline const char *at(const anymax_call &call, const anymax_view &v, int64_t size, int64_t o, int64_t i) {
    return (const char *)v.data + ((call.starts ? call.starts[o] : o * v.outer) + i * v.inner) * size;
}

// The same of row r, counted through all of them.
ANYMAX_INLINE const char *row_at(const anymax_call &call, const anymax_view &v, int64_t size, int64_t r) {
    const int64_t o = call.inner == 1 ? r : r / call.inner;
    return at(call, v, size, o, r - o * call.inner);
}

// `part` numbers at each of n places, from one step to another.
template <class C>
ANYMAX_INLINE void copy_beside(C *to, int64_t to_step, const C *from, int64_t from_step, int64_t n, int64_t part) {
    const auto copied = [=](size_t bytes) ANYMAX_EACH {
        for (int64_t k = 0; k < n; k++) memcpy(to + k * to_step, from + k * from_step, bytes);
    };
    switch (part) {  // a few bytes of a number that is known are moved in registers
        case 4: return copied(4 * sizeof(C));
        case 8: return copied(8 * sizeof(C));
        case 16: return copied(16 * sizeof(C));
    }
    for (int64_t k = 0; k < n; k++)
        for (int64_t i = 0; i < part; i++) to[k * to_step + i] = from[k * from_step + i];
}
// Rows r to r + count - 1 that lie side by side within each outer one, one a lane; the lanes beyond are 0. And back.
template <bool IN, class C>
ANYMAX_INLINE void lanes_beside(const anymax_call &call, const anymax_view &v, int64_t r, int64_t count, int64_t n, C *lanes) {
    constexpr int64_t W = width<C>;
    for (int64_t k = 0; IN && count < W && k < n; k++) store(lanes + k * W, vec<C>{});
    for (int64_t j = 0; j < count;) {
        const int64_t o = (r + j) / call.inner, i = r + j - o * call.inner,
                      part = call.inner - i < count - j ? call.inner - i : count - j;
        C *const own = (C *)at(call, v, sizeof(C), o, i), *const lane = lanes + j;
        IN ? copy_beside(lane, W, (const C *)own, v.cls, n, part) : copy_beside(own, v.cls, (const C *)lane, W, n, part);
        j += part;
    }
}

// Rows that lie side by side, their classes far apart: as many as a cache line holds are transposed at once.
constexpr int64_t GROUP = 16;

template <class C>
inline void transpose_in(const void *from, int64_t step, int32_t dtype, int64_t rows, int64_t n, C *to) {
    with_numbers<C>(from, dtype, [=](auto number) ANYMAX_EACH {
        for (int64_t k = 0; k < n; k++)
            for (int64_t r = 0; r < rows; r++) to[r * n + k] = number(k * step + r);
    });
}
template <class C>
inline void transpose_out(const C *from, int64_t rows, int64_t n, void *to, int64_t step, int32_t dtype) {
    for (int64_t k = 0; k < n; k++)
        put_each((char *)to + k * step * anymax_item(dtype), dtype, rows, [](int64_t r) ANYMAX_EACH { return r; },
                 [=](int64_t r) ANYMAX_EACH { return from[r * n + k]; });
}

inline bool adjacent_rows(const anymax_view &v, int64_t n) { return n > 1 && v.inner == 1 && (v.cls > 1 || v.cls < -1); }

// The caller's row as contiguous C, -inf where the mask says 0.
template <class C>
inline void stage_in(C *to, const void *row, int64_t step, int32_t dtype, const uint8_t *mask, int64_t mask_step, int64_t n) {
    if (is_type<C>(dtype) && step == 1) {
        const C *from = (const C *)row;
        if (mask && mask_step == 1) {
            for (int64_t i = 0; i < n; i++) to[i] = mask[i] ? from[i] : -infinity<C>;
            return;
        }
        memcpy(to, from, (size_t)n * sizeof(C));
    } else {
        int64_t done = 0;
#if defined(__F16C__)
        const uint16_t *from = (const uint16_t *)row;
        if (dtype == ANYMAX_F16 && step == 1 && sizeof(C) == 4)
            for (; done + 8 <= n; done += 8)
                _mm256_storeu_ps((float *)to + done, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + done))));
#endif
        with_numbers<C>(row, dtype, [=](auto number) ANYMAX_EACH {
            if (step == 1)
                for (int64_t i = done; i < n; i++) to[i] = number(i);
            else
                for (int64_t i = done; i < n; i++) to[i] = number(i * step);
        });
    }
    if (mask)
        for (int64_t i = 0; i < n; i++)
            if (!mask[i * mask_step]) to[i] = -infinity<C>;
}

// `row` itself where nothing is to be done.
template <class C>
ANYMAX_INLINE const C *stage(const void *row, int64_t step, int32_t dtype, const uint8_t *mask, int64_t mask_step, int64_t n,
                             Scratch &scratch, Slot slot) {
    if (is_type<C>(dtype) && step == 1 && !mask) return (const C *)row;
    C *to = scratch.take<C>(slot, n);
    if (to) stage_in(to, row, step, dtype, mask, mask_step, n);
    return to;
}

// The inner rows of an outer one, as outer rows of a call of their own.
inline anymax_call inner_rows(anymax_call call, int64_t o) {
    anymax_view *const views[] = {&call.x, &call.p, &call.g, &call.out, &call.mask};
    for (anymax_view *v : views)
        if (v->data)
            *v = anymax_view{(void *)at(call, *v, v == &call.mask ? 1 : anymax_item(call.dtype), o, 0), v->inner, 0, v->cls};
    anymax_skip_rows(&call, o * call.inner);
    if (call.sizes) call.sizes += o * call.inner;
    call.outer = call.inner, call.inner = 1, call.starts = nullptr;
    return call;
}

}  // namespace ANYMAX_UNIT
