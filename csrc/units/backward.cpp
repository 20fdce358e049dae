// Backward passes of rows of floats side by side, for one instruction set.
#include "core/families.hpp"

#include "shapes/backward.hpp"

namespace ANYMAX_UNIT {

// The backward of plain rows of floats, of a map for which floats are good.
bool plain_backward(const anymax_call &call) {
    if (call.dtype != ANYMAX_F32 || call.op != ANYMAX_VJP || call.params || call.map > ANYMAX_TOPP) return false;
    if ((call.map == ANYMAX_ENTMAX || call.map == ANYMAX_NORMMAX) && call.param > 2.0) return false;
    return call.g.cls == 1 && call.out.cls == 1;
}

// With their supports saved.
static bool saved_serves(const anymax_call &call) {
    return plain_backward(call) && call.support.count && call.map != ANYMAX_NORMMAX;
}

// Short ones with all of p: to look for what is not 0 takes longer than to take all.
static bool short_serves(const anymax_call &call) {
    if (!plain_backward(call) || call.support.count || call.n > BRIEF || call.p.cls != 1) return false;
    return call.map != ANYMAX_NORMMAX || call.param >= 1.5;  // below, 1 / (alpha - 1) times what floats leave out
}

bool run_backward(const anymax_call &call, int64_t begin, int64_t end, bool past, const Team &team, Scratch &scratch) {
    const auto row = [&](int64_t r) { by_rows<float>(call, r, r + 1, past, team, scratch); };
    if (short_serves(call)) {
        const Sensitivity s(kind(call.map, call.param), call.param, true);
        s.with([&](auto weigh) {
            if (call.map == ANYMAX_NORMMAX)
                vjp_short<true>(weigh, call.param, call, begin, end, past, scratch);
            else
                vjp_short<false>(weigh, call.param, call, begin, end, past, scratch);
        });
    } else if (saved_serves(call)) {
        const Sensitivity s(kind(call.map, call.param), call.param, true);
        s.with([&](auto weigh) { vjp_saved(weigh, call, begin, end, past, scratch, team, row); });
    } else if (call.op == ANYMAX_LOSS_GRAD && call.support.count && call.dtype == ANYMAX_F32 && call.inner == 1 && call.out.cls == 1) {
        gradient_saved(call, begin, end, past, scratch, team, row);
    } else {
        return false;
    }
    return true;
}

}  // namespace ANYMAX_UNIT
