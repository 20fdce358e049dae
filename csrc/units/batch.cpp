// Rows of middling length for one instruction set, as many at once as a vector has lanes.
#include "core/families.hpp"
#include "shapes/batch_curve.hpp"
#include "shapes/batch_power.hpp"
#include "shapes/loss_slope.hpp"

namespace ANYMAX_UNIT {

template <Output OUT>
inline uint32_t solve_batch(Batch &b, const Plan &plan, double param, int64_t rows, int64_t n, bool bypass) {
    const Link link = plan.link;
    switch (link.family) {
        case THRESHOLDS:
            switch (link.threshold()) {
                case POWER1: return batch_power<1, OUT>(b, rows, n, bypass);
                case POWER2: return batch_power<2, OUT>(b, rows, n, bypass);
                case POWER3:
                case POWER4:
                case CURVE:
                case NORM:
                    if constexpr (OUT != GRADIENT)
                        return batch_curve<OUT>(b, rows, n, curve_of(link, param), param, finish_of(link), bypass);
                    return 0;
                case CAPPED:
                    if constexpr (OUT == PROBABILITIES || OUT == SUPPORTS) return batch_budget<OUT>(b, rows, n, param, bypass);
                    return 0;
                case ANY_POWER:  // no rule of plan.hpp sends them here
                case STEEP:
                case NO_LINK: return 0;
            }
            return 0;
        case TRUNCATIONS:
            switch (link.truncation()) {
                case LARGEST:
                    if (plan.rule.source == DENSE) return batch_counted(b, rows, n, (int64_t)param, bypass);
                    if constexpr (OUT != GRADIENT) return batch_largest<OUT>(b, rows, n, (int64_t)param, bypass);
                    return 0;
                case NUCLEUS: return 0;
            }
            return 0;
        case EXPONENTIALS:
        case RATIOS:
        case CEILINGS:
        case NOISES: return 0;
    }
    return 0;
}
inline uint32_t solve_batch(Output output, Batch &b, const Plan &plan, double param, int64_t rows, int64_t n, bool bypass) {
    switch (output) {
        case PROBABILITIES: return solve_batch<PROBABILITIES>(b, plan, param, rows, n, bypass);
        case SUPPORTS: return solve_batch<SUPPORTS>(b, plan, param, rows, n, bypass);
        case LOSS: return solve_batch<LOSS>(b, plan, param, rows, n, bypass);
        default: return solve_batch<GRADIENT>(b, plan, param, rows, n, bypass);
    }
}

// What a loss or its gradient wants of each row beside its scores, which are staged.
inline void aim_at(Batch &b, const anymax_call &call, int64_t r, int64_t count) {
    b.wanted = 0, b.scale = (const float *)call.scale + r;
    for (int64_t j = 0; j < Batch::W; j++) {
        const int64_t t = b.target[j] = j < count ? call.index[r + j] : -1;
        const bool class_ = t >= 0 && t < call.n;
        b.aim[j] = class_ ? b.x[j][t] : 0.0f;
        b.wanted |= (uint32_t)class_ << j;
    }
}

// One a thread, kept: too large for the stack of some, and for taking anew at each call.
static Batch *batch_memory(Scratch &scratch) {
#if defined(ANYMAX_NO_THREADS)
    static Room memory;
#else
    static thread_local Room memory;
#endif
    Batch *const batch = (Batch *)memory.take<char>(sizeof(Batch));
    scratch.failed |= !batch;
    return batch;
}

// Of losses, the derivatives by the parameter of the rows that are done.
__attribute__((noinline)) static void slopes_of_losses(const Batch &b, const anymax_call &call, Link link, int64_t r,
                                                       uint32_t done) {
    for (; done; done &= done - 1) {
        const int64_t j = __builtin_ctz(done);
        ((float *)call.slope)[r + j] = (float)loss_slope(link, call.param, b.side + j * b.step, b.count[j], b.tau[j]);
    }
}

// What a row becomes depends on the row alone, and so does whether the batch leaves it.
void run_batches(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team,
                 Scratch &scratch) {
    if (!PACKS) return;  // nobody calls, and nothing is compiled
    constexpr int64_t W = width<float>;
    const anymax_support &to = call.support;
    const Output output = call.op == ANYMAX_LOSS        ? LOSS
                          : call.op == ANYMAX_LOSS_GRAD ? GRADIENT
                          : to.count                    ? SUPPORTS
                                                        : PROBABILITIES;
    const int64_t n = call.n, size = anymax_item(call.dtype), inner = call.inner;
    const float least = (float)vanishing(call.dtype);
    const bool writes = output != LOSS, direct_x = call.dtype == ANYMAX_F32 && call.x.cls == 1 && !call.mask.data,
               direct_out = call.dtype == ANYMAX_F32 && call.out.cls == 1;
    float *staged = direct_x ? nullptr : scratch.take<float>(BATCH_IN, W * n);
    float *results = direct_out || !writes ? nullptr : scratch.take<float>(BATCH_OUT, W * n);
    if (scratch.failed) return;
    Batch *const memory = batch_memory(scratch);
    if (!memory) return;
    Batch &b = *memory;
    b.below_1 = below_1(call.dtype);
    for (int64_t r = begin; r < end && !scratch.failed; r += W) {
        const int64_t count = end - r < W ? end - r : W;
        const bool together = inner > 1 && r / inner == (r + count - 1) / inner;  // rows side by side are transposed in one go
        const bool transpose_x = together && adjacent_rows(call.x, n) && !call.mask.data,
                   transpose_result = writes && together && adjacent_rows(call.out, n);
        char *out[W];
        if (transpose_x) transpose_in(row_at(call, call.x, size, r), call.x.cls, call.dtype, count, n, staged);
        for (int64_t j = 0; j < count; j++) {
            const char *row = row_at(call, call.x, size, r + j);
            b.n[j] = call.sizes ? call.sizes[r + j] : n;
            if (!direct_x && !transpose_x)
                stage_in(staged + j * n, row, call.x.cls, call.dtype,
                         call.mask.data ? (const uint8_t *)row_at(call, call.mask, 1, r + j) : nullptr, call.mask.cls, b.n[j]);
            b.x[j] = direct_x ? (const float *)row : staged + j * n;
            if (!writes) continue;
            out[j] = (char *)row_at(call, call.out, size, r + j);
            b.out[j] = direct_out ? (float *)out[j] : results + j * n;
        }
        b.ahead = direct_x && inner == 1 && !call.starts && call.x.outer == n && n <= BATCH_AHEAD && end - r >= 2 * W
                      ? b.x[0] + W * n
                      : nullptr;
        b.cached = b.ahead && direct_out && !bypass && output <= SUPPORTS;
        b.wanted = ~0u;
        if (output > SUPPORTS) aim_at(b, call, r, count);
        const uint32_t done = solve_batch(output, b, plan, call.param, count, n, bypass && direct_out);
        const uint32_t all = (uint32_t)((1ull << count) - 1);
        if (output == LOSS && call.slope) slopes_of_losses(b, call, plan.link, r, done & all);
        for (int64_t j = 0; (output == LOSS || to.count) && j < count; j++) {
            if (!(done >> j & 1)) continue;
            if (output == LOSS) {
                ((float *)call.value)[r + j] = (float)b.loss[j];
                if (call.tau) ((float *)call.tau)[r + j] = (float)b.tau[j];
            }
            if (!to.count) continue;
            int32_t *const index = to.index + (r + j) * to.capacity;
            float *const value = (float *)to.value + (r + j) * to.capacity;
            const int64_t found = output == SUPPORTS ? batch_support(b.hit[j], b.out[j], n, least, index, value, to.capacity)
                                  : plan.link == LARGEST ? batch_keep<SCORES_FROM>(b, j, n, least, index, value, to.capacity)
                                                         : batch_keep<SCORES>(b, j, n, least, index, value, to.capacity);
            to.count[r + j] = (int32_t)found;
        }
        if (transpose_result && done == all) {
            transpose_out(results, count, n, out[0], call.out.cls, call.dtype);
            continue;
        }
        for (int64_t j = 0; writes && !direct_out && j < count; j++)
            if (done >> j & 1) deliver(sink_at<float>(call, out[j], b.n[j], false), results + j * n);
        for (uint32_t others = all & ~done; others; others &= others - 1) {
            const int64_t j = __builtin_ctz(others);
            by_rows<float>(call, r + j, r + j + 1, bypass, team, scratch);
        }
    }
}

}  // namespace ANYMAX_UNIT
