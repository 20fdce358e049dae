// Entmax of any alpha below 2, normmax and budget in batches: forward and losses.
#pragma once

#include "links/capped.hpp"
#include "shapes/batch_largest.hpp"

namespace ANYMAX_UNIT {

// The level of each row, as near as floats come; `transposed` has the candidates.
ANYMAX_INLINE vf batch_level(Batch &b, int64_t rows, int64_t n, uint32_t left, const Curve &curve) {
    const int64_t cells = batch_cells(b, rows, n, cell_groups(n), left);
    const vf high_ = load(b.top);
    for (int64_t j = 0; j < cells; j++) b.transposed[j] = b.transposed[j] - high_;
    vf level = smaller(curve_level(curve, b.transposed, cells, splat(1.0f), 3) * (1.0f + 2e-5f), splat(1.0f));
    const vf edge = level * (float)(-1.0 / curve.slope);
    store(b.edge, edge);
    batch_collect<SCORES>(b, n, curve.swept() ? BATCH_CANDIDATES_SWEPT : BATCH_CANDIDATES, few_vectors(b.transposed, cells, edge, n));
    for (int64_t j = 0; j < b.most; j++) b.other[j] = b.transposed[j] - high_;
    return curve_level(curve, b.other, b.most, level, 40);
}

template <bool SAVE>
static uint32_t batch_curve(Batch &b, int64_t rows, int64_t n, const Curve &curve, Finish finish, bool bypass) {
    constexpr int64_t W = width<float>;
    const vf level = batch_level(b, rows, n, ~0u, curve), high_ = load(b.top);
    const int64_t most = b.most;
    for (int upper = 0; upper < 2; upper++) {
        const vd top_ = upper ? high(high_) : low(high_);
        vd lost, share;
        curve_finish(curve, b.transposed, top_, most, upper != 0, upper ? high(level) : low(level), finish, b.value, b.rate, lost, share);
        for (int64_t i = 0; i < most; i++)
            store_narrow((float *)(b.other + i) + upper * W / 2, finished(finish, b.value[i], b.rate[i], lost, share));
    }
    return write_found<SCORES, SAVE>(b, rows, n, bypass);
}

// The losses of these maps: sum p (x - aim) less Omega.
static uint32_t batch_curve_loss(Batch &b, int64_t rows, int64_t n, uint32_t left, const Curve &curve, double alpha, Finish finish, const float *aim, double *value) {
    constexpr int64_t W = width<float>;
    const vf level = batch_level(b, rows, n, left, curve), high_ = load(b.top), aim_ = load(aim);
    const int64_t most = b.most;
    const double c = alpha - 1.0;
    for (int h = 0; h < 2; h++) {
        const vd target = part(aim_, h);
        vd lost, share, s0{}, v{};
        curve_finish(curve, b.transposed, part(high_, h), most, h != 0, part(level, h), finish, b.value, b.rate, lost, share);
        for (int64_t i = 0; i < most; i++) {
            const vd p = finished(finish, b.value[i], b.rate[i], lost, share);
            vd d = part(b.transposed[i], h) - target;
            if (finish == NORMMAX_FINISH)
                s0 += b.value[i];  // as p^alpha
            else
                d += (1.0 - (b.value[i] / b.rate[i] - c * lost)) * (1.0 / (c * alpha));  // (1 - p^(alpha - 1)) / ...
            v += p > vd{} ? p * d : vd{};
            store_narrow((float *)(b.other + i) + h * W / 2, p);
        }
        if (finish == NORMMAX_FINISH) v -= exp(log(s0) * (1.0 / alpha)) * share - 1.0;
        store(value + h * width<double>, target == -inf64 ? all<vd>(inf64) : larger(v, vd{}));
    }
    scatter_lanes((const float *)b.other, b.side, W, most, b.step);
    return served(b, rows);
}

template <bool SAVE>
static uint32_t batch_budget(Batch &b, int64_t rows, int64_t n, double k, bool bypass) {
    constexpr int64_t W = width<float>;
    const int64_t rank = (int64_t)::ceil(k);
    int64_t groups = cell_groups(n);
    while (groups < 16 && groups * W < 2 * rank && groups * 2 * W <= n) groups *= 2;
    const int64_t cells = batch_cells(b, rows, n, groups);
    const vf low_ = below_largest(b, cells, rank, 8);
    vf tau = splat(-0.5f);  // of the cells alone, which is no larger than the row's
    const ClipSums<vf> s = clip_root<vf>(cells, tau, splat(-1.0f), load(b.top) - low_, splat((float)k), 1e-5f, 24, [&](int64_t i) ANYMAX_EACH { return b.transposed[i] - low_; });
    const vf slack = absolute(low_) * 1e-6f + (float)(k * 2e-5) + 1e-5f;
    const vf edge = low_ - slack + (absolute(s.part + s.full - (float)k) <= (float)(k * 1e-5) ? larger(tau, splat(-1.0f)) : splat(-1.0f));
    const vf high_ = load(b.top);
    store(b.edge, edge);
    const uint32_t apart = few_vectors(b.transposed, cells, edge, n), far = bits(~(high_ - low_ < FLOAT_RANGE));
    for (int64_t r = 0; r < W; r++)
        if (far >> r & 1) b.count[r] = -1;
    batch_collect<SCORES_FROM>(b, n, BATCH_CANDIDATES, apart);
    share_out(b.transposed, b.other, b.most, low_, edge, high_, k);
    return write_found<SCORES_FROM, SAVE>(b, rows, n, bypass);
}

}  // namespace ANYMAX_UNIT
