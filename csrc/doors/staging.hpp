// Ragged rows: which of them are served together, and their entries brought side by side and back.
#pragma once

#include <string.h>

#include "core/memory.hpp"
#include "doors/dispatch.hpp"

namespace {

struct Work {
    const anymax_call *call;
    const anymax_segments *segments;
    const anymax_unit *unit;
    int64_t size, wide;                     // bytes of a number, and of one that a row has
    int64_t chunk;                          // entries of a chunk
    int64_t first;                          // the entry that lies first
    bool shared;                            // the longest ones are served already, by all threads
    int64_t longest;                        // length of a segment, but SEGMENT_SHORT_MOST at most
    int16_t alike[SEGMENT_SHORT_MOST + 1];  // of each length the least that is served with it,
    bool uneven[SEGMENT_SHORT_MOST + 1];    // and whether others are

    int64_t length(int64_t s) const { return segments->ptr[s + 1] - segments->ptr[s]; }
    int64_t from(int64_t s) const { return segments->ptr[s] - first; }
    bool long_one(int64_t s) const { return shared && length(s) >= SHARED_ROW; }
};

// ROWS: x, p, g and out; ORDERED: the same from another order.
// clang-format off
enum Staged {
    STARTS, SIZES, PARAMS, TARGETS, SCALES, RESULTS, LOSS_SLOPES, SORTED, ROWS, ORDERED = ROWS + 4, STAGES = ORDERED + 4
};
// clang-format on
typedef ANYMAX_UNIT::Rooms<STAGES> Stage;

// Kept by each thread from call to call: what the system gives anew is slower to come than what is done in it.
Stage &own_stage() {
#if defined(ANYMAX_NO_THREADS)
    static Stage stage;
#else
    static thread_local Stage stage;
#endif
    return stage;
}

// f(the view, its place) for each operand that a call has; false where f said so of one.
template <class Call, class F>
bool each_operand(Call &call, F f) {
    decltype(&call.x) const views[] = {&call.x, &call.p, &call.g, &call.out};
    for (int i = 0; i < 4; i++)
        if (views[i]->data && !f(*views[i], i)) return false;
    return true;
}

// -- entries to staged rows, and back ---------------------------------------------------------------

// Segments that are served together: which, and the most entries of one.
struct Group {
    const int32_t *which;  // from `begin` on
    int64_t begin, count, n;
    bool uneven;  // of different lengths

    int64_t segment(int64_t j) const { return begin + which[j]; }
};

template <bool IN>
inline void move(char *staged, char *own, size_t bytes) {
    memcpy(IN ? staged : own, IN ? own : staged, bytes);
}

// Entry by entry with the heads of all segments side by side; `BYTES` of a segment's, 0: as many as there are.
template <bool IN, int BYTES>
void move_beside(const Work &w, const Group &g, const anymax_view &v, char *staged) {
    const int64_t bytes = BYTES ? BYTES : w.call->inner * w.size, step = v.cls * w.size, row = g.count * bytes;
    for (int64_t j = 0; j < g.count; j++) {
        char *const to = staged + j * bytes, *const own = (char *)v.data + w.from(g.segment(j)) * step;
        for (int64_t k = 0; k < g.n; k++) move<IN>(to + k * row, own + k * step, (size_t)(BYTES ? BYTES : bytes));
    }
}

// As rows one after another.
template <bool IN, int HEADS, class T>
void move_heads(const Work &w, const Group &g, const anymax_view &v, T *staged) {
    const int64_t heads = HEADS ? HEADS : w.call->inner, n = g.n, inner = HEADS ? 1 : v.inner;
    for (int64_t j = 0; j < g.count; j++) {
        T *const row = staged + j * heads * n, *const own = (T *)v.data + w.from(g.segment(j)) * v.cls;
        for (int64_t k = 0; k < n; k++)
            for (int64_t h = 0; h < heads; h++)
                IN ? (void)(row[h * n + k] = own[k * v.cls + h * inner]) : (void)(own[k * v.cls + h * inner] = row[h * n + k]);
    }
}

template <bool IN, class T>
void move_rows(const Work &w, const Group &g, const anymax_view &v, T *staged) {
    const int64_t heads = w.call->inner;
    if (v.inner == 1 && heads == 4) return move_heads<IN, 4>(w, g, v, staged);
    if (v.inner == 1 && heads == 8) return move_heads<IN, 8>(w, g, v, staged);
    if (heads == 1) return move_heads<IN, 1>(w, g, v, staged);
    move_heads<IN, 0>(w, g, v, staged);
}

template <bool IN>
void move_group(const Work &w, const Group &g, const anymax_view &v, char *staged, bool beside) {
    if (beside) switch (w.call->inner * w.size) {
            case 8: return move_beside<IN, 8>(w, g, v, staged);
            case 16: return move_beside<IN, 16>(w, g, v, staged);
            case 32: return move_beside<IN, 32>(w, g, v, staged);
            case 64: return move_beside<IN, 64>(w, g, v, staged);
            default: return move_beside<IN, 0>(w, g, v, staged);
        }
    switch (w.size) {
        case 2: return move_rows<IN>(w, g, v, (uint16_t *)staged);
        case 4: return move_rows<IN>(w, g, v, (uint32_t *)staged);
        default: return move_rows<IN>(w, g, v, (uint64_t *)staged);
    }
}

// What has one number a row: [segments, heads] to [count, heads], and back.
template <bool IN>
void move_each(const Work &w, const Group &g, void *own, char *staged, int64_t size) {
    const int64_t bytes = w.call->inner * size;
    for (int64_t j = 0; j < g.count; j++) move<IN>(staged + j * bytes, (char *)own + g.segment(j) * bytes, (size_t)bytes);
}

// -- entries in another order -----------------------------------------------------------------------

// The entries [begin, end) of the order to memory where they lie side by side with all heads, or back.
struct Moves {
    const int64_t *order;
    anymax_view view;
    char *staged;
    int64_t begin, heads, entries, size;

    // These give ANYMAX_BAD_SEGMENTS where an entry is out of range.
    template <bool IN, int BYTES>
    int pieces(int64_t begin, int64_t end) const {
        // what each turn reads must not wait for what the one before wrote: so nothing is read of *this
        const int64_t bytes = BYTES ? BYTES : heads * size, step = view.cls * size, count = end - begin,
                      ahead = count - ENTRIES_AHEAD, *const places = order + begin;
        const uint64_t most = (uint64_t)entries;
        char *const own = (char *)view.data, *const row = staged + (begin - this->begin) * bytes;
        bool out = false;
        for (int64_t k = 0; k < count; k++) {
            const uint64_t e = (uint64_t)places[k];
            if (BYTES >= 16 && k < ahead) __builtin_prefetch(own + places[k + ENTRIES_AHEAD] * step, !IN);
            out |= e >= most;
            move<IN>(row + k * bytes, own + (int64_t)(e < most ? e : 0) * step, (size_t)(BYTES ? BYTES : bytes));
        }
        return out ? ANYMAX_BAD_SEGMENTS : ANYMAX_OK;
    }
    template <bool IN, class T>
    int strided(int64_t begin, int64_t end) const {
        bool out = false;
        for (int64_t k = begin; k < end; k++) {
            const uint64_t e = (uint64_t)order[k];
            out |= e >= (uint64_t)entries;
            T *const own = (T *)view.data + (int64_t)(e < (uint64_t)entries ? e : 0) * view.cls, *const row =
                                                                                                     (T *)staged +
                                                                                                     (k - this->begin) * heads;
            for (int64_t h = 0; h < heads; h++)
                IN ? (void)(row[h] = own[h * view.inner]) : (void)(own[h * view.inner] = row[h]);
        }
        return out ? ANYMAX_BAD_SEGMENTS : ANYMAX_OK;
    }
    template <bool IN>
    int run(int64_t begin, int64_t end) const {
        if (heads == 1 || view.inner == 1) switch (heads * size) {
                case 2: return pieces<IN, 2>(begin, end);
                case 4: return pieces<IN, 4>(begin, end);
                case 8: return pieces<IN, 8>(begin, end);
                case 16: return pieces<IN, 16>(begin, end);
                case 32: return pieces<IN, 32>(begin, end);
                case 64: return pieces<IN, 64>(begin, end);
                default: return pieces<IN, 0>(begin, end);
            }
        switch (size) {
            case 2: return strided<IN, uint16_t>(begin, end);
            case 4: return strided<IN, uint32_t>(begin, end);
            default: return strided<IN, uint64_t>(begin, end);
        }
    }
};

}  // namespace
