// Backward passes of rows of floats side by side, for one instruction set.
#include "core/families.hpp"

#include "shapes/backward.hpp"

namespace ANYMAX_UNIT {

void run_backward(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team, Scratch &scratch) {
    Sensitivity(plan.link, call.param, true).with([&](auto weigh) {
        if (plan.rule.source == SAVED)
            vjp_saved(weigh, call, begin, end, bypass, scratch, team);
        else if (plan.rule.grouping == TILE)
            vjp_beside(weigh, call, begin, end);
        else if (plan.link == NORM)
            vjp_short<true>(weigh, call.param, call, begin, end, bypass, scratch);
        else
            vjp_short<false>(weigh, call.param, call, begin, end, bypass, scratch);
    });
}

}  // namespace ANYMAX_UNIT
