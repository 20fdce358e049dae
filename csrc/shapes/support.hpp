// The non-zeros of a row: what a row is found to be, and what is saved of it.
#pragma once

#include "shapes/scan.hpp"

namespace ANYMAX_UNIT {

// What a row of a sparse map is found to be.
template <class C>
struct Support {
    const int32_t *index;
    double *p;
    int64_t count;
    double tau;
    bool sound, any;
};

template <class C>
static Support<C> poisoned(bool sound, bool any) {
    return Support<C>{nullptr, nullptr, 0, sound ? -inf64 : not_a_number<double>, sound, any};
}

template <class C>
static void save_support(const anymax_call &call, int64_t row, const Support<C> &found) {
    const anymax_support &to = call.support;
    if (!to.count) return;
    int64_t at = 0, cap = to.capacity;
    int32_t *index = to.index + row * cap;
    C *value = (C *)to.value + row * cap;
    if (!found.sound) {
        to.count[row] = -1;
        return;
    }
    const double least = vanishing(call.dtype);
    for (int64_t i = 0; i < found.count; i++) {
        if (!(found.p[i] > least)) continue;
        if (at == cap) {
            to.count[row] = -1;
            return;
        }
        index[at] = found.index[i];
        value[at++] = (C)found.p[i];
    }
    to.count[row] = (int32_t)at;
}

// The same of a row of results.
template <class C>
static void save_nonzeros(const anymax_call &call, int64_t row, const C *p, Scratch &scratch) {
    const anymax_support &to = call.support;
    const Candidates<C> found = nonzeros(p, call.n, (C)vanishing(call.dtype), to.capacity, scratch);
    const bool fits = found.count <= to.capacity;
    to.count[row] = fits ? (int32_t)found.count : -1;
    if (!fits || scratch.failed) return;
    memcpy(to.index + row * to.capacity, found.index, (size_t)found.count * sizeof(int32_t));
    memcpy((C *)to.value + row * to.capacity, found.value, (size_t)found.count * sizeof(C));
}

// What was saved of a row; a count below 0: nothing, or it was too much.
template <class C>
struct Saved {
    const int32_t *index;
    const C *value;
    int64_t count;
};
template <class C>
ANYMAX_INLINE Saved<C> saved_row(const anymax_call &call, int64_t row) {
    const anymax_support &s = call.support;
    if (!s.count) return Saved<C>{nullptr, nullptr, -1};
    return Saved<C>{s.index + row * s.capacity, (const C *)s.value + row * s.capacity, s.count[row]};
}

// Asks for what the saved supports of the next rows will want: first where they are, then the gradients there.
template <class C>
ANYMAX_INLINE void saved_ahead(const anymax_call &call, int64_t row, int64_t end) {
    if (row + SAVED_AHEAD >= end) return;
    const anymax_support &s = call.support;
    const int64_t far = (row + SAVED_AHEAD) * s.capacity, next = row + SAVED_AHEAD / 2, near = next * s.capacity,
                  o = next / call.inner, i = next - o * call.inner;
    __builtin_prefetch(s.index + far);
    __builtin_prefetch((const C *)s.value + far);
    const int64_t size = anymax_item(call.dtype);
    const char *g = (const char *)call.g.data + (o * call.g.outer + i * call.g.inner) * size;
    const int32_t count = s.count[next] < 16 ? s.count[next] : 16;
    for (int32_t k = 0; k < count; k++) __builtin_prefetch(g + s.index[near + k] * call.g.cls * size);
}

}  // namespace ANYMAX_UNIT
