// Rows of middling length for one instruction set, as many at once as a vector has lanes.
#include "core/families.hpp"
#include "shapes/batch_curve.hpp"
#include "shapes/batch_power.hpp"

namespace ANYMAX_UNIT {

template <bool SAVE>
inline uint32_t batch_map(Batch &b, Link link, double param, int64_t rows, int64_t n, bool bypass) {
    switch (link) {
        case POWER1: return batch_power<1, SAVE>(b, rows, n, bypass);
        case POWER2: return batch_power<2, SAVE>(b, rows, n, bypass);
        case CAPPED: return batch_budget<SAVE>(b, rows, n, param, bypass);
        case LARGEST:
            return counted(param, n) ? batch_counted(b, rows, n, (int64_t)param, bypass) : batch_largest<SAVE>(b, rows, n, (int64_t)param, bypass);
        default: return batch_curve<SAVE>(b, rows, n, curve_of(link, param), finish_of(link), bypass);
    }
}

// The losses of rows, and of sparsemax and entmax 3/2 the thresholds. One bit a row, as above.
inline uint32_t batch_loss_of(Batch &b, Link link, double param, int64_t rows, int64_t n, uint32_t left, const float *aim, double *value, double *tau) {
    switch (link) {
        case POWER1: return batch_loss<1>(b, rows, n, left, aim, value, tau);
        case POWER2: return batch_loss<2>(b, rows, n, left, aim, value, tau);
        case LARGEST: return batch_largest_loss(b, rows, n, left, (int64_t)param, aim, value);
        default: return batch_curve_loss(b, rows, n, left, curve_of(link, param), param, finish_of(link), aim, value);
    }
}

// One a thread, kept: too large for the stack of some, and for taking anew at each call.
static Batch *batch_memory(Scratch &scratch) {
    static thread_local Room memory;
    Batch *const batch = (Batch *)memory.take<char>(sizeof(Batch));
    scratch.failed |= !batch;
    return batch;
}

// What a row becomes depends on the row alone, and so does whether the batch leaves it.
void run_batches(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team, Scratch &scratch) {
    if (!PACKS) return;  // nobody calls, and nothing is compiled
    constexpr int64_t W = width<float>;
    const int64_t n = call.n, size = item(call.dtype), inner = call.inner;
    const bool direct_x = call.dtype == ANYMAX_F32 && call.x.cls == 1 && !call.mask.data, direct_out = call.dtype == ANYMAX_F32 && call.out.cls == 1;
    float *staged = direct_x ? nullptr : scratch.take<float>(BATCH_IN, W * n);
    float *results = direct_out ? nullptr : scratch.take<float>(BATCH_OUT, W * n);
    if (scratch.failed) return;
    Batch *const memory = batch_memory(scratch);
    if (!memory) return;
    Batch &b = *memory;
    for (int64_t r = begin; r < end && !scratch.failed; r += W) {
        const int64_t count = end - r < W ? end - r : W;
        const bool together = inner > 1 && r / inner == (r + count - 1) / inner;  // rows side by side are transposed in one go
        const bool transpose_x = together && adjacent_rows(call.x, n) && !call.mask.data, transpose_result = together && adjacent_rows(call.out, n);
        char *out[W];
        if (transpose_x) transpose_in(at(call, call.x, size, r / inner, r % inner), call.x.cls, call.dtype, count, n, staged);
        for (int64_t j = 0; j < count; j++) {
            const int64_t o = inner == 1 ? r + j : (r + j) / inner, i = inner == 1 ? 0 : r + j - o * inner;
            const char *row = at(call, call.x, size, o, i);
            out[j] = (char *)at(call, call.out, size, o, i);
            b.n[j] = call.sizes ? call.sizes[r + j] : n;
            if (!direct_x && !transpose_x)
                stage_in(staged + j * n, row, call.x.cls, call.dtype, call.mask.data ? (const uint8_t *)at(call, call.mask, 1, o, i) : nullptr, call.mask.cls, b.n[j]);
            b.x[j] = direct_x ? (const float *)row : staged + j * n;
            b.out[j] = direct_out ? (float *)out[j] : results + j * n;
        }
        b.ahead = direct_x && inner == 1 && !call.starts && call.x.outer == n && n <= BATCH_AHEAD && end - r >= 2 * W ? b.x[0] + W * n : nullptr;
        b.cached = b.ahead && direct_out && !bypass;
        const anymax_support &to = call.support;
        const uint32_t done = (to.count ? batch_map<true> : batch_map<false>)(b, plan.link, call.param, count, n, bypass && direct_out);
        for (int64_t j = 0; to.count && j < count; j++)
            if (done >> j & 1)
                to.count[r + j] = (int32_t)batch_support(b.hit[j], b.out[j], n, (float)vanishing(call.dtype), to.index + (r + j) * to.capacity,
                                                         (float *)to.value + (r + j) * to.capacity, to.capacity);
        if (transpose_result && done == (uint32_t)((1ull << count) - 1)) {
            transpose_out(results, count, n, out[0], call.out.cls, call.dtype);
            continue;
        }
        for (int64_t j = 0; !direct_out && j < count; j++)
            if (done >> j & 1) deliver(sink_at<float>(call, out[j], b.n[j], false), results + j * n);
        for (int64_t j = 0; j < count; j++)
            if (!(done >> j & 1)) by_rows<float>(call, r + j, r + j + 1, bypass, team, scratch);
    }
}

// ANYMAX_LOSS and ANYMAX_LOSS_GRAD in such batches.
void run_batch_losses(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team, Scratch &scratch) {
    if (!PACKS) return;  // nobody calls, and nothing is compiled
    constexpr int64_t W = width<float>;
    const int64_t n = call.n;
    Batch *const memory = batch_memory(scratch);
    if (!memory) return;
    Batch &b = *memory;
    const anymax_support &to = call.support;
    const bool gradient = call.op == ANYMAX_LOSS_GRAD;
    const auto keep = plan.link == LARGEST ? batch_keep<SCORES_FROM> : batch_keep<SCORES>;
    for (int64_t r = begin; r < end && !scratch.failed; r += W) {
        const int64_t count = end - r < W ? end - r : W;
        alignas(64) float aim[W] = {};
        alignas(64) double value[W], tau[W];
        uint32_t left = 0;
        for (int64_t j = 0; j < count; j++) {
            const int64_t t = call.index[r + j];
            b.x[j] = (const float *)at(call, call.x, sizeof(float), r + j, 0), b.n[j] = n;
            if (gradient) b.out[j] = (float *)at(call, call.out, sizeof(float), r + j, 0);
            if (t < 0 || t >= n) continue;
            aim[j] = b.x[j][t];
            left |= 1u << j;
        }
        b.ahead = !call.starts && call.x.outer == n && n <= BATCH_AHEAD && end - r >= 2 * W ? b.x[0] + W * n : nullptr, b.cached = false;
        const uint32_t done = gradient ? (plan.link == POWER2 ? batch_gradient<2> : batch_gradient<1>)(b, count, n, left, aim, call.index + r, (const float *)call.scale + r)
                                       : batch_loss_of(b, plan.link, call.param, count, n, left, aim, value, tau);
        for (int64_t j = 0; j < count; j++) {
            if (!(done >> j & 1)) {
                by_rows<float>(call, r + j, r + j + 1, bypass, team, scratch);
                continue;
            }
            if (gradient) continue;
            ((float *)call.value)[r + j] = (float)value[j];
            if (call.tau) ((float *)call.tau)[r + j] = (float)tau[j];
            if (to.count)
                to.count[r + j] = (int32_t)keep(b, j, n, (float)vanishing(ANYMAX_F32), to.index + (r + j) * to.capacity,
                                                      (float *)to.value + (r + j) * to.capacity, to.capacity);
        }
    }
}

}  // namespace ANYMAX_UNIT
