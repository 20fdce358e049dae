// Sparsemax and entmax 3/2 in batches: forward, losses and their gradients.
#pragma once

#include "shapes/batch.hpp"
#include "shapes/sweep.hpp"

namespace ANYMAX_UNIT {

// Zeros, and the vectors that have candidates.
template <int R>
__attribute__((noinline)) static void write_few(float *to, const float *x, int64_t n, vf high, vf level, vf lost,
                                                const uint64_t *hits) {
    constexpr int64_t W = width<float>;
    auto value = [&](vf v) ANYMAX_EACH { return power_value<float, R>(v - high, level, lost); };
    for (int64_t i = 0; i < n; i += 64 * W) {
        const int64_t end = i + 64 * W < n ? i + 64 * W : n;
        uint64_t hit = hits[i / (64 * W)];
        if (crowd(hit, end - i)) {
            transform<false>(to + i, x + i, end - i, false, value);
            continue;
        }
        memset(to + i, 0, (size_t)(end - i) * sizeof(float));
        for (; hit; hit &= hit - 1) {
            const int64_t k = i + __builtin_ctzll(hit) * W;
            store_within(to, k, n, value(load_or(x, k, n, -inf32)));
        }
    }
}

struct Rooted {
    vf high, level, lost;  // of each row: what its probabilities are made from
};
// The candidates, less the maximum, lie in `transposed`; where K is SCORES in `other`, and in `transposed` as they are.
template <int R, Keeping K>
ANYMAX_INLINE Rooted batch_root(Batch &b, int64_t rows, int64_t n) {
    const int64_t cells = batch_cells(b, rows, n, cell_groups(n));
    const vf high = load(b.top);
    for (int64_t j = 0; j < cells; j++) b.transposed[j] = b.transposed[j] - high;
    Rooted s{high, tile_level<float, R>(b.transposed, cells), vf{}};
    const vf edge = s.level * -(float)R;
    store(b.edge, edge);
    batch_collect<K>(b, n, BATCH_CANDIDATES_FEW, few_vectors(b.transposed, cells, edge, n));
    for (int64_t j = 0; K == SCORES && j < b.most; j++) b.other[j] = b.transposed[j] - high;
    tile_root<float, R>(K == SCORES ? b.other : b.transposed, b.most, s.level, s.lost);
    return s;
}

// The target's own part of scale (p - y), from 1 - p: the sum of the others' probabilities, which keeps the digits of a small
// one.
template <int R>
ANYMAX_INLINE vf sum_of_others(const Batch &b, const Rooted &s) {
    const vf below = load(b.aim) - s.high;
    vf others{}, tied{};
    for (int64_t i = 0; i < b.most; i += 8) {
        vf sum{};
        for (int64_t j = i; j < i + 8; j++) {
            const vi same = b.transposed[j] == below;
            sum += same ? vf{} : power_value<float, R>(b.transposed[j], s.level, s.lost);
            tied += same ? splat(1.0f) : vf{};
        }
        others += sum;
    }
    return others + larger(tied - 1.0f, vf{}) * power_value<float, R>(below, s.level, s.lost);
}

// A row with too many candidates, from all of it. Apart from the rest, which would pay for its registers.
template <int R>
__attribute__((noinline)) static void sweep_crowded(Batch &b, int64_t r, bool bypass) {
    const int64_t n = b.n[r];
    const Edge edge = sweep_root<float, R>(b.x[r], n, b.top[r], (double)b.edge[r] / -R);
    sweep_write<float, R>(b.out[r], b.x[r], 0, n, n, b.top[r], edge, bypass);
}

// One bit a row: 0 where it is to be served by itself: poisoned, or of losses too, where its support is most of it.
template <int R, Output OUT>
static uint32_t batch_power(Batch &b, int64_t rows, int64_t n, bool bypass) {
    constexpr int64_t W = width<float>;
    const Rooted s = batch_root<R, OUT == LOSS ? SCORES : BELOW_TOP>(b, rows, n);
    if constexpr (OUT == LOSS) {
        for (int h = 0; h < 2; h++)
            power_loss<float, R>(b.transposed, b.most, s.high, s.level, load(b.aim), h, b.value, b.loss, b.tau,
                                 (float *)b.other + h * width<double>);
        return keep_found(b, rows);
    }
    float at[W], less[W], own[W];
    store(at, s.level);
    store(less, s.lost);
    if constexpr (OUT == GRADIENT) store(own, sum_of_others<R>(b, s));
    uint32_t done = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (b.cached) ask_ahead(b, r, n);
        const bool sweeps = OUT <= SUPPORTS && b.count[r] == Batch::CROWDED;
        if (sweeps) sweep_crowded<R>(b, r, bypass);
        if (OUT == SUPPORTS && sweeps) mark_all(b.hit[r], b.n[r]);
        done |= (uint32_t)(sweeps || b.count[r] >= 0) << r;
        if (b.count[r] < 0) continue;
        const float *x = b.x[r];
        const vf m = splat(b.top[r]), l = splat(at[r]), off = splat(less[r]);
        if constexpr (OUT == GRADIENT) {
            const vf by = splat(b.scale[r]);
            transform<true>(b.out[r], x, n, false,
                            [&](vf v) ANYMAX_EACH {  // not around the caches: the target's own is written once more
                                const vf p = power_value<float, R>(v - m, l, off);
                                return p == vf{} ? vf{} : p * by;
                            });
            b.out[r][b.target[r]] = -own[r] * b.scale[r];
            continue;
        }
        if (!bypass && x != b.out[r] && (b.few >> r & 1)) {  // the candidates' vectors are hardly more than the probabilities'
            write_few<R>(b.out[r], x, b.n[r], m, l, off, b.hit[r]);
            continue;
        }
        Marker<OUT == SUPPORTS> marker{b.hit[r]};
        transform<OUT != SUPPORTS>(b.out[r], x, b.n[r], bypass, [&](vf v) ANYMAX_EACH {
            const vf p = power_value<float, R>(v - m, l, off);
            marker.take(p);
            return p;
        });
        marker.end();
    }
    return done;
}

}  // namespace ANYMAX_UNIT
