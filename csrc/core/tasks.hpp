// Work that threads share, and a search that doors and units have in common.
#pragma once

#include "anymax.h"

// In each unit its own, as all that units compile; in a door, which has no unit, that of this name.
namespace ANYMAX_UNIT {

// f(begin, end) for parts of [0, count) by the threads of `run` (NULL: the caller alone). torch's threads do not divide at
// multiples of `grain`: what needs whole pieces shares their number. Gives a code that f gave, 0 where all were.
template <class F>
int share(anymax_parallel run, int64_t count, int64_t grain, const F &f) {
    if (!run) return f(0, count);
    struct Task {
        const F &f;
        int code;
    } task{f, 0};
    const anymax_task part = [](int64_t begin, int64_t end, void *context) {
        Task &t = *(Task *)context;
        if (const int code = t.f(begin, end)) __atomic_store_n(&t.code, code, __ATOMIC_RELAXED);
    };
    run(0, count, grain, part, &task);
    return __atomic_load_n(&task.code, __ATOMIC_RELAXED);
}

// A number that another thread may write to meanwhile: what is checked of it holds for what is done with it.
template <class T>
inline T once(const T *number) {
    return __atomic_load_n(number, __ATOMIC_RELAXED);
}

// The first of `count` places for which before(place), true of those that come first, is false.
template <class F>
inline int64_t first_not(int64_t count, F before) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (before(middle))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

}  // namespace ANYMAX_UNIT
