// Long rows in pieces of a fixed size for several threads, so that no sum depends on who computes it.
#pragma once

#include "anymax.h"
#include "core/vec.hpp"
#include "limits.hpp"

namespace ANYMAX_UNIT {

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
    auto piece = [&](int64_t k) { f(k, k * PIECE, k * PIECE + PIECE < n ? k * PIECE + PIECE : n); };
    if (team.run && count > 1) {
        team.run(0, count, 1, pieces_task<decltype(piece)>, &piece);
        return;
    }
    for (int64_t k = 0; k < count; k++) piece(k);
}

}  // namespace ANYMAX_UNIT
