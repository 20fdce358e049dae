// What the entry points share: which unit serves, whose threads, what a call must satisfy, and what is enough for a thread.
#ifndef ANYMAX_DISPATCH_HPP
#define ANYMAX_DISPATCH_HPP

#include "core/tasks.hpp"
#include "core/unit.h"
#include "limits.hpp"

using ANYMAX_UNIT::first_not;
using ANYMAX_UNIT::once;
using ANYMAX_UNIT::share;

// How many of a kind are enough for a thread, by the work of one.
constexpr int64_t grain_of(int64_t work) { return ALONE_MOST / 2 / work + 1; }

// Codes of core/unit.h: of all but the operands; and of these, for a call that has rows.
int check_map(const anymax_call *call);
int check_operands(const anymax_call *call);
// There is one where check_map has found no fault.
const anymax_unit *unit_in_use();
anymax_parallel parallel_of(int pool);

#endif
