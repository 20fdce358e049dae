// Maps whose link or u is a table, for one instruction set.
#if !defined(ANYMAX_MAPS_ALONE)
#include "core/families.hpp"
#include "tabled/ratios.hpp"
#include "tabled/rows.hpp"

namespace ANYMAX_UNIT {

int tabled(const anymax_tabled_call *call, int64_t begin, int64_t end, anymax_parallel run) {
    const Team team{run};
    Scratch scratch;
    if (call->ratio)
        TabledRatios(*call, team).run(begin, end, scratch);
    else
        TabledRows(*call, team).run(begin, end, scratch);
    return scratch.failed ? ANYMAX_NO_MEMORY : ANYMAX_OK;
}

}  // namespace ANYMAX_UNIT
#endif
