// Long rows in pieces of a fixed size for several threads, so that no sum depends on who computes it.
#pragma once

#include "core/tasks.hpp"
#include "limits.hpp"

namespace ANYMAX_UNIT {

struct Team {
    anymax_parallel run;  // NULL: the caller alone
};

constexpr int64_t pieces_of(int64_t n) { return (n + PIECE - 1) / PIECE; }

// f(k, begin, end) for every piece [begin, end) of [0, n), each whole: a team chooses itself where it divides.
template <class F>
inline __attribute__((always_inline)) void pieces(const Team &team, int64_t n, F f, int64_t size = PIECE) {
    const int64_t count = (n + size - 1) / size;
    const auto each = [&](int64_t from, int64_t to) {
        for (int64_t k = from; k < to; k++) f(k, k * size, k * size + size < n ? k * size + size : n);
        return 0;
    };
    if (!team.run || count == 1) return (void)each(0, count);
    share(team.run, count, 1, each);
}

}  // namespace ANYMAX_UNIT
