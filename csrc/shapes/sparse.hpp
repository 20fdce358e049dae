// What is written of a row that is mostly zeros, and what is read of one.
#pragma once

#include "core/rows.hpp"

namespace ANYMAX_UNIT {

// A row of zeros but for `count` entries in order, past the caches: a line that was written past them is slow to touch again, so the row is made
// a piece at a time beside it.
template <class C, class V>
inline void spread_past(C *to, int64_t n, const int32_t *index, const V *value, int64_t count, const Team &team) {
    constexpr int64_t STEP = 8192 / sizeof(C), W = width<C>;
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
template <class C>
inline void spread(const Sink<C> &out, const int32_t *index, const double *value, int64_t count, const Team &team) {
    if (out.past && !out.cleared && out.direct) return spread_past(out.direct, out.n, index, value, count, team);
    zeros(out, team);
    if (out.direct)
        for (int64_t i = 0; i < count; i++) out.direct[index[i]] = (C)value[i];
    else
        for (int64_t i = 0; i < count; i++) put(out, index[i], (C)value[i]);
}

template <class C>
ANYMAX_INLINE C read(const void *row, int64_t step, int32_t dtype, int64_t i) {
    int64_t k = i * step;
    switch (dtype) {
        case ANYMAX_F32: return (C)((const float *)row)[k];
        case ANYMAX_F64: return (C)((const double *)row)[k];
        case ANYMAX_BF16: return (C)from_bf16(((const uint16_t *)row)[k]);
        default: return (C)from_f16(((const uint16_t *)row)[k]);
    }
}

// The largest number that a dtype rounds to 0.
inline double vanishing(int32_t dtype) { return dtype == ANYMAX_F16 ? 0x1p-25 : dtype == ANYMAX_BF16 ? 0x1p-134 : dtype == ANYMAX_F32 ? 0x1p-150 : 0.0; }

// The probabilities above `least` of a row; NaN counts as one. Where there are more than `limit` it stops, with a count above that.
template <class C>
inline Candidates<C> nonzeros(const C *p, int64_t n, C least, int64_t limit, Scratch &scratch) {
    constexpr int64_t W = width<C>;
    const vec<C> none = splat(least);
    Candidates<C> c{scratch.take<C>(VALUES, n + W), scratch.take<int32_t>(INDICES, n + W), 0};
    if (!c.value || !c.index) return c;
    int64_t at = 0, i = 0;
    for (; i + 8 * W <= n && at <= limit; i += 8 * W) {
        ints<C> m[8], any{};
        for (int j = 0; j < 8; j++) {
            m[j] = ~(load(p + i + j * W) <= none);
            any |= m[j];
        }
        if (!bits(any)) continue;
        for (int j = 0; j < 8; j++)
            if (bits(m[j])) at = append(load(p + i + j * W), m[j], (int32_t)(i + j * W), c.value, c.index, at);
    }
    for (; i < n && at <= limit; i += W) {
        const vec<C> v = load_or(p, i, n, C(0));
        const ints<C> m = ~(v <= none);
        if (bits(m)) at = append(v, m, (int32_t)i, c.value, c.index, at);
    }
    c.count = at;
    return c;
}

// Asks for what the saved supports of the next rows will want: first where they are, then the gradients there.
template <class C>
ANYMAX_INLINE void saved_ahead(const anymax_call &call, int64_t row, int64_t end) {
    constexpr int64_t AHEAD = 12;
    if (row + AHEAD >= end) return;
    const anymax_support &s = call.support;
    const int64_t far = (row + AHEAD) * s.capacity, next = row + AHEAD / 2, near = next * s.capacity, o = next / call.inner, i = next - o * call.inner;
    __builtin_prefetch(s.index + far);
    __builtin_prefetch((const C *)s.value + far);
    const int64_t size = item(call.dtype);
    const char *g = (const char *)call.g.data + (o * call.g.outer + i * call.g.inner) * size;
    const int32_t count = s.count[next] < 16 ? s.count[next] : 16;
    for (int32_t k = 0; k < count; k++) __builtin_prefetch(g + s.index[near + k] * call.g.cls * size);
}

}  // namespace ANYMAX_UNIT
