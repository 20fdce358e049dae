/* Threads for calls that no framework lends its own to. */
#ifndef ANYMAX_POOL_H
#define ANYMAX_POOL_H

#include "anymax.h"

#ifdef __cplusplus
extern "C" {
#endif
/* The size of the pieces of a range, a multiple of `grain`: so large that there are about eight of them for each of these
 * threads. */
static inline int64_t anymax_piece(int64_t range, int64_t grain, int64_t threads) {
    const int64_t even = range / (8 * threads) / grain * grain;
    return even > grain ? even : grain;
}
/* task(b, e, context) over pieces of [begin, end), multiples of `grain`, by the pool's threads and the caller; by the caller
   alone where the pool is busy. */
int anymax_pool_run(int64_t begin, int64_t end, int64_t grain, anymax_task task, void *context);
/* anymax_run where `run` shares out the rows (NULL: one thread), whatever the call's `pool` says. */
int anymax_run_by(const anymax_call *call, anymax_parallel run);
/* And anymax_run_segments. */
int anymax_run_segments_by(const anymax_call *call, const anymax_segments *segments, anymax_parallel run);
/* And anymax_sort_segments, where an index of `segments` is none: such entries come last, beyond the bounds. */
int64_t anymax_sort_strays(const int64_t *index, int64_t count, int64_t segments, int64_t *ptr, int64_t *order,
                           anymax_parallel run);
int64_t anymax_sort_strays_32(const int32_t *index, int64_t count, int64_t segments, int32_t *ptr, int32_t *order,
                              anymax_parallel run);
/* And those of an order and of fusedmax. */
int anymax_order_by(const anymax_order_call *call, anymax_parallel run);
int anymax_order_vjp_by(const anymax_order_call *call, anymax_parallel run);
int anymax_fused_by(const anymax_fused_call *call, anymax_parallel run);
int anymax_fused_vjp_by(const anymax_fused_call *call, anymax_parallel run);
#ifdef __cplusplus
}
#endif
#endif
