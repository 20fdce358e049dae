// Scratch memory, and long rows in pieces for several threads.
#pragma once

#include "anymax.h"
#include "core/room.hpp"
#include "core/vec.hpp"

namespace ANYMAX_UNIT {

// -- scratch memory: one a task, slots that only grow ------------------------------------------------------------------------

enum Slot { STAGED, STAGED_P, STAGED_G, TRANSPOSED, RESULT, CELLS, VALUES, INDICES, WIDE, EXTRA, SORTED, PARTIAL, WORK, BATCH_IN, BATCH_OUT, LEFT_SCORES, LEFT_CLASSES, LEFT_SUMS, LEFT_KEYS, SLOTS };

struct Scratch {
    void *memory[SLOTS] = {};
    size_t size[SLOTS] = {};
    bool failed = false;

    ~Scratch() {
        for (void *m : memory) free(m);
    }
    template <class T>
    T *take(int slot, int64_t count) {
        size_t bytes = (size_t)count * sizeof(T) + 2 * ANYMAX_VECTOR;
        if (bytes > size[slot]) {
            free(memory[slot]);
            memory[slot] = malloc(bytes + 64);
            size[slot] = memory[slot] ? bytes : 0;
        }
        if (!memory[slot]) {
            failed = true;
            return nullptr;
        }
        return (T *)(((uintptr_t)memory[slot] + 63) & ~(uintptr_t)63);
    }
};

// -- long rows: pieces of a fixed size, so that no sum depends on who computes it ------------------------------------------------

constexpr int64_t PIECE = 65536;

struct Team {
    anymax_parallel run;  // NULL: the caller alone
};

template <class F>
void pieces_task(int64_t begin, int64_t end, void *context) {
    for (int64_t k = begin; k < end; k++) (*(F *)context)(k);
}
// In the place of a team.
inline int alone(int64_t begin, int64_t end, int64_t, anymax_task task, void *context) { return task(begin, end, context), 0; }
// f(k, begin, end) for every piece [begin, end) of [0, n).
template <class F>
ANYMAX_INLINE void pieces(const Team &team, int64_t n, F f) {
    int64_t count = (n + PIECE - 1) / PIECE;
    auto one = [&](int64_t k) { f(k, k * PIECE, k * PIECE + PIECE < n ? k * PIECE + PIECE : n); };
    if (team.run && count > 1) {
        team.run(0, count, 1, pieces_task<decltype(one)>, &one);
        return;
    }
    for (int64_t k = 0; k < count; k++) one(k);
}

}  // namespace ANYMAX_UNIT
