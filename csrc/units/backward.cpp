// Backward passes of rows of floats side by side, for one instruction set.
#include "core/families.hpp"

#include "shapes/backward.hpp"

namespace ANYMAX_UNIT {

void run_backward(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team, Scratch &scratch) {
    const auto row = [&](int64_t r) { by_rows<float>(call, r, r + 1, bypass, team, scratch); };
    if (plan.way == SAVED_GRADIENT) return gradient_saved(call, begin, end, bypass, scratch, team, row);
    Sensitivity(plan.link, call.param, true).with([&](auto weigh) {
        if (plan.way == SAVED_BACKWARD)
            vjp_saved(weigh, call, begin, end, bypass, scratch, team, row);
        else if (plan.way == BESIDE_BACKWARD)
            vjp_beside(weigh, call, begin, end);
        else if (plan.link == NORM)
            vjp_short<true>(weigh, call.param, call, begin, end, bypass, scratch);
        else
            vjp_short<false>(weigh, call.param, call, begin, end, bypass, scratch);
    });
}

}  // namespace ANYMAX_UNIT
