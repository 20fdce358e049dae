// The truncations of anymax_decode: one row each, and the work of a call. Without vectors, so that the doors can include it.
#pragma once

#include <float.h>

#include "limits.hpp"
#include "maps.hpp"

struct StepRow {
    int32_t kind;
    double least, most;  // the range of its value
    int cost;            // the work of a class, where softmax's is 1
};

constexpr double ABOVE_ZERO = 4.9406564584124654e-324, ANY_VALUE = __builtin_huge_val();

static constexpr StepRow STEPS[ANYMAX_STEPS] = {
    {ANYMAX_TEMPERATURE, 0.0, DBL_MAX, 0},
    {ANYMAX_LARGEST_SCORES, 1.0, ANY_VALUE, 2},
    {ANYMAX_NUCLEUS_MASS, ABOVE_ZERO, 1.0, 4},
    {ANYMAX_SHARE_OF_LARGEST, ABOVE_ZERO, 1.0, 1},
    {ANYMAX_DEVIATIONS, 0.0, DBL_MAX, 3},
    {ANYMAX_LEAST_SHARE, ABOVE_ZERO, 1.0, 2},
    {ANYMAX_ETA, ABOVE_ZERO, 1.0, 4},
    {ANYMAX_TYPICAL, ABOVE_ZERO, 1.0, 20},
    {ANYMAX_WITHOUT_TOP, ABOVE_ZERO, ANY_VALUE, 5},  // beyond 1: nothing happens
};
constexpr bool steps_in_order(int i = 0) { return i == ANYMAX_STEPS || (STEPS[i].kind == i && steps_in_order(i + 1)); }
static_assert(steps_in_order(), "each step has its row, in the order of the enumeration");

constexpr int CHOICE_COST = 3;  // the same of a router's choice

static inline bool is_step(int32_t kind) { return kind >= 0 && kind < ANYMAX_STEPS; }

// The work of one row: its classes are read, truncated and made probabilities; then some weights are added up for each draw.
static inline int64_t work_of_row(const anymax_decode_call *call) {
    int64_t each = 1;
    if (call->draws || call->entropy || call->tau || call->listed) each += MAPS[call->map].cost;
    for (int64_t k = 0; k < call->count; k++) each += is_step(call->steps[k].kind) ? STEPS[call->steps[k].kind].cost : 0;
    const int64_t weights = call->u ? (call->n < DRAW_BLOCK ? call->n : DRAW_BLOCK) : 1;
    const int64_t truncated = at_most_so_much(call->n, each), drawn = at_most_so_much(call->draws, weights);
    return truncated > INT64_MAX - drawn ? INT64_MAX : truncated + drawn;
}
