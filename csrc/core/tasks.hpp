// Work that threads share.
#pragma once

#include "anymax.h"

// In each unit its own, as all that units compile; in a door, which has no unit, that of this name.
namespace ANYMAX_UNIT {

// f(begin, end) for parts of [0, count), multiples of `grain`, by the threads of `run` (NULL: the caller alone). Gives a code that f gave, 0 where all were.
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

}  // namespace ANYMAX_UNIT
