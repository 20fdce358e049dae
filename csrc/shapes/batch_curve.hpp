// Entmax of any alpha below 2, normmax and budget in batches: forward and losses.
#pragma once

#include "shapes/batch_largest.hpp"

namespace ANYMAX_UNIT {

// The level of each row, as near as floats come; `transposed` has the candidates.
ANYMAX_INLINE vf batch_level(Batch &b, int64_t rows, int64_t n, const Curve &curve) {
    const int64_t cells = batch_cells(b, rows, n, cell_groups(n));
    const vf top = load(b.top);
    for (int64_t j = 0; j < cells; j++) b.transposed[j] = b.transposed[j] - top;
    vf level = curve_level_of_cells(curve, b.transposed, cells);
    const vf edge = level * (float)(-1.0 / curve.slope);
    store(b.edge, edge);
    batch_collect<SCORES>(b, n, curve.swept() ? BATCH_CANDIDATES_SWEPT : BATCH_CANDIDATES,
                          few_vectors(b.transposed, cells, edge, n));
    for (int64_t j = 0; j < b.most; j++) b.other[j] = b.transposed[j] - top;
    curve_level(curve, lane_view(b.most, (const vf *)b.other), level, 40);
    return level;
}

// A loss is sum p (x - aim) less Omega.
template <Output OUT>
static uint32_t batch_curve(Batch &b, int64_t rows, int64_t n, const Curve &curve, double alpha, Finish finish, bool bypass) {
    const vf level = batch_level(b, rows, n, curve), high = load(b.top), aims = load(b.aim);
    const int64_t most = b.most;
    const vf *const x = b.transposed;
    const double c = alpha - 1.0;
    const EntmaxOmega omega(alpha);
    for (int h = 0; h < 2; h++) {
        const vd top = part(high, h), aim = part(aims, h);
        vd lost, share, power{}, loss{}, root = part(level, h);
        curve_finish(curve, lane_view<vd>(most, [=](int64_t i) ANYMAX_EACH { return part(x[i], h) - top; }), root, finish,
                     b.value, b.rate, lost, share);
        for (int64_t i = 0; i < most; i++) {
            const vd p = finished(finish, b.value[i], b.rate[i], lost, share);
            store_narrow((float *)(b.other + i) + h * width<double>, p);
            if (OUT != LOSS) continue;
            vd d = part(b.transposed[i], h) - aim;
            if (finish == NORMMAX_FINISH)
                power += b.value[i];  // p^alpha
            else
                d += omega.own(1.0 - (b.value[i] / b.rate[i] - c * lost));  // u is p^c, to first order
            loss += p > vd{} ? p * d : vd{};
        }
        if (OUT != LOSS) continue;
        if (finish == NORMMAX_FINISH) loss -= normmax_omega(power, alpha, share);
        store(b.loss + h * width<double>, larger(loss, vd{}));  // infinite where the target's score is -inf
        store(b.tau + h * width<double>, top - root / curve.slope);
    }
    if (OUT != LOSS) return write_found<SCORES, OUT>(b, rows, n, bypass);
    return keep_found(b, rows);
}

// 1 in the lanes of rows that are in the batch, 0 in others.
ANYMAX_INLINE vf lanes_asked(const Batch &b) {
    float asked[Batch::W];
    for (int64_t r = 0; r < Batch::W; r++) asked[r] = b.count[r] >= 0 ? 1.0f : 0.0f;
    return load(asked);
}

template <Output OUT>
static uint32_t batch_budget(Batch &b, int64_t rows, int64_t n, double k, bool bypass) {
    constexpr int64_t W = width<float>;
    const int64_t rank = (int64_t)::ceil(k);
    int64_t groups = cell_groups(n);
    while (groups < 16 && groups * W < 2 * rank && groups * 2 * W <= n) groups *= 2;
    const int64_t cells = batch_cells(b, rows, n, groups);
    const vf lowest = below_largest(b, cells, rank, 8);
    const vf top = load(b.top);
    vf level = splat(0.5f);  // of the cells alone, whose tau is no larger than the row's
    const auto s = clip_root<vf>(cells, level, lowest - top, splat(1.0f), k, lanes_asked(b), 1e-5, 24,
                                 [&](int64_t i) ANYMAX_EACH { return b.transposed[i] - lowest; });
    const vf slack = absolute(lowest) * 1e-6f + (float)(k * 2e-5) + 1e-5f;
    const vi near = absolute(s.excess((float)k)) <= (float)(k * 1e-5);
    const vf edge = lowest - slack - (near ? smaller(level, splat(1.0f)) : splat(1.0f));
    store(b.edge, edge);
    const uint32_t few = few_vectors(b.transposed, cells, edge, n), far = bits(~(top - lowest < FLOAT_RANGE));
    for (int64_t r = 0; r < W; r++)
        if (far >> r & 1) b.count[r] = -1;
    batch_collect<SCORES_FROM>(b, n, BATCH_CANDIDATES, few);
    share_out<float>(b.transposed, b.other, b.most, lowest, edge, top, lanes_asked(b), k, b.below_1);
    return write_found<SCORES_FROM, OUT>(b, rows, n, bypass);
}

}  // namespace ANYMAX_UNIT
