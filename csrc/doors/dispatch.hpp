// What the entry points share: which unit serves, whose threads, what a call must satisfy, and when threads pay.
#ifndef ANYMAX_DISPATCH_HPP
#define ANYMAX_DISPATCH_HPP

#include "core/unit.h"

constexpr int64_t ALONE_MOST = 32768;      // work (maps.hpp) that is not worth a second thread
constexpr int64_t SHARED_ALONE = 3 * 32768;  // classes of a single row that is worth more than one thread,
constexpr int64_t SHARED_ROW = 4 * 65536;    // and of one among fewer than
constexpr int64_t ROWS_FEW = 8;
// Bytes of a row whose results are written around the caches; a gradient of a loss writes the target's own once more, which costs a line.
constexpr int64_t BYPASS_FROM = 256, BYPASS_GRADIENT_FROM = 16384;

// Codes of core/unit.h: of all but the operands; and of these, for a call that has rows.
int check_map(const anymax_call *call);
int check_operands(const anymax_call *call);
// There is one where check_map has found no fault.
const anymax_unit *unit_in_use();
anymax_parallel parallel_of(int pool);

#endif
