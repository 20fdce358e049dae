// Backward passes of rows of floats side by side, for one instruction set.
#include "core/families.hpp"

#include "shapes/backward.hpp"

namespace ANYMAX_UNIT {

// Rows of halves, or with classes that don't lie one after another: as many in turn as a vector has lanes, as floats side by
// side. f(call, rows).
template <class F>
static void staged_rows(const anymax_call &call, int64_t begin, int64_t end, Scratch &scratch, F f) {
    constexpr int64_t W = width<float>;
    const int64_t n = call.n, size = anymax_item(call.dtype);
    float *const p = scratch.take<float>(STAGED_P, W * n), *const g = scratch.take<float>(STAGED_G, W * n),
                 *const result = scratch.take<float>(BATCH_OUT, W * n);
    if (scratch.failed) return;
    anymax_call block = call;
    block.dtype = ANYMAX_F32, block.starts = block.sizes = nullptr, block.outer = W;
    block.p = anymax_view{p, n, 0, 1}, block.g = anymax_view{g, n, 0, 1}, block.out = anymax_view{result, n, 0, 1};
    for (int64_t r = begin; r < end; r += W) {
        const int64_t count = end - r < W ? end - r : W;
        if (call.sizes) block.sizes = call.sizes + r;
        for (int64_t j = 0; j < count; j++) {
            const int64_t own = call.sizes ? call.sizes[r + j] : n;
            stage_in(p + j * n, at(call, call.p, size, r + j, 0), call.p.cls, call.dtype, nullptr, 0, own);
            stage_in(g + j * n, at(call, call.g, size, r + j, 0), call.g.cls, call.dtype, nullptr, 0, own);
        }
        f(block, count);
        for (int64_t j = 0; j < count; j++)
            deliver(sink_at<float>(call, (char *)at(call, call.out, size, r + j, 0), call.sizes ? call.sizes[r + j] : n, false),
                    (const float *)result + j * n);
    }
}

void run_backward(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team,
                  Scratch &scratch) {
    const bool lie = call.dtype == ANYMAX_F32 && call.p.cls == 1 && call.g.cls == 1 && call.out.cls == 1;
    Sensitivity(plan.link, call.param, true).with([&](auto weigh) {
        if (plan.rule.source == SAVED) return vjp_saved(weigh, call, begin, end, bypass, scratch, team);
        if (plan.rule.grouping == TILE) return vjp_beside(weigh, call, begin, end);
        const auto dense = [&](const anymax_call &c, int64_t from, int64_t to, bool around) {
            if (plan.link == NORM)
                vjp_short<true>(weigh, c.param, c, from, to, around, scratch);
            else
                vjp_short<false>(weigh, c.param, c, from, to, around, scratch);
        };
        if (lie) return dense(call, begin, end, bypass);
        staged_rows(call, begin, end, scratch, [&](const anymax_call &block, int64_t rows) { dense(block, 0, rows, false); });
    });
}

}  // namespace ANYMAX_UNIT
