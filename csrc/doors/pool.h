/* Threads for calls that no framework lends its own to. */
#ifndef ANYMAX_POOL_H
#define ANYMAX_POOL_H

#include "anymax.h"

#ifdef __cplusplus
extern "C" {
#endif
/* The size of pieces of `range`, a multiple of `grain`: as large as leaves each of these threads about eight of them. */
static inline int64_t anymax_piece(int64_t range, int64_t grain, int64_t threads) {
    const int64_t even = range / (8 * threads) / grain * grain;
    return even > grain ? even : grain;
}
/* task(b, e, context) over pieces of [begin, end), multiples of `grain`, by the pool's threads and the caller; serially where the pool is busy. */
int anymax_pool_run(int64_t begin, int64_t end, int64_t grain, anymax_task task, void *context);
/* anymax_run with the caller's own way to share out rows, NULL: none; `pool` is not looked at. */
int anymax_run_by(const anymax_call *call, anymax_parallel run);
#ifdef __cplusplus
}
#endif
#endif
