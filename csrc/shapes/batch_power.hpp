// Sparsemax and entmax 3/2 in batches: forward, losses and their gradients.
#pragma once

#include "shapes/batch.hpp"

namespace ANYMAX_UNIT {

// Zeros, and the vectors that have candidates.
template <int R>
__attribute__((noinline)) static void write_few(float *to, const float *x, int64_t n, vf high, vf level, vf lost, const uint64_t *hits) {
    constexpr int64_t W = width<float>;
    auto value = [&](vf v) { return power_value<float, R>(v - high, level, lost); };
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
            const vf p = value(load_or(x, k, n, -inf32));
            if (k + W <= n)
                store(to + k, p);
            else
                store_part(to + k, p, n - k);
        }
    }
}

struct Rooted {
    vf high, level, lost;  // of each row: what its probabilities are made from
};
// The candidates, less the maximum, lie in `transposed`; where K is SCORES in `other`, and in `transposed` as they are.
template <int R, Keeping K>
ANYMAX_INLINE Rooted batch_root(Batch &b, int64_t rows, int64_t n, uint32_t left) {
    const int64_t cells = batch_cells(b, rows, n, cell_groups(n), left);
    const vf high = load(b.top);
    for (int64_t j = 0; j < cells; j++) b.transposed[j] = b.transposed[j] - high;
    Rooted s{high, tile_level<float, R>(b.transposed, cells, 3), vf{}};
    const vf edge = s.level * -(float)R;
    store(b.edge, edge);
    batch_collect<K>(b, n, BATCH_CANDIDATES_FEW, few_vectors(b.transposed, cells, edge, n));
    for (int64_t j = 0; K == SCORES && j < b.most; j++) b.other[j] = b.transposed[j] - high;
    tile_root<float, R>(K == SCORES ? b.other : b.transposed, b.most, s.level, s.lost);
    return s;
}

// One bit a row: 0 where it is to be served by itself, for its support is most of it, or it is poisoned.
template <int R, bool SAVE>
static uint32_t batch_power(Batch &b, int64_t rows, int64_t n, bool bypass) {
    constexpr int64_t W = width<float>;
    const Rooted s = batch_root<R, BELOW_TOP>(b, rows, n, ~0u);
    float at[W], less[W];
    store(at, s.level);
    store(less, s.lost);
    uint32_t done = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (b.cached) ask_ahead(b, r, n);
        if (b.count[r] < 0) continue;
        done |= 1u << r;
        const float *x = b.x[r];
        const vf m = splat(b.top[r]), l = splat(at[r]), off = splat(less[r]);
        if (!bypass && x != b.out[r] && (b.apart >> r & 1)) {  // the candidates' vectors are hardly more than the probabilities'
            write_few<R>(b.out[r], x, b.n[r], m, l, off, b.hit[r]);
            continue;
        }
        Marker<SAVE> marker{b.hit[r]};
        transform<!SAVE>(b.out[r], x, b.n[r], bypass, [&](vf v) {
            const vf p = power_value<float, R>(v - m, l, off);
            marker.take(p);
            return p;
        });
        marker.end();
    }
    return done;
}

// Losses for the classes whose scores are `aim`, and thresholds; the probabilities of the candidates go to `side`. One bit a row, as above.
template <int R>
static uint32_t batch_loss(Batch &b, int64_t rows, int64_t n, uint32_t left, const float *aim, double *value, double *tau) {
    constexpr int64_t W = width<float>;
    const Rooted s = batch_root<R, SCORES>(b, rows, n, left);
    for (int upper = 0; upper < 2; upper++)
        power_loss<float, R>(b.transposed, b.most, s.high, s.level, load(aim), upper, b.value, value, tau, (float *)b.other + upper * W / 2);
    scatter_lanes((const float *)b.other, b.side, W, b.most, b.step);
    return served(b, rows);
}

// Their gradients, scale (p - y). A target's own is the sum of the others, which keeps the digits of a small one.
template <int R>
static uint32_t batch_gradient(Batch &b, int64_t rows, int64_t n, uint32_t left, const float *aim, const int64_t *target, const float *scale) {
    constexpr int64_t W = width<float>;
    const Rooted s = batch_root<R, BELOW_TOP>(b, rows, n, left);
    const vf below = load(aim) - s.high;
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
    others += larger(tied - 1.0f, vf{}) * power_value<float, R>(below, s.level, s.lost);
    float at[W], less[W], own[W];
    store(at, s.level);
    store(less, s.lost);
    store(own, others);
    uint32_t done = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (b.count[r] < 0) continue;
        done |= 1u << r;
        const vf m = splat(b.top[r]), l = splat(at[r]), off = splat(less[r]), by = splat(scale[r]);
        transform<true>(b.out[r], b.x[r], n, false, [&](vf v) {  // not around the caches: the target's own is written once more
            const vf p = power_value<float, R>(v - m, l, off);
            return p == vf{} ? vf{} : p * by;
        });
        b.out[r][target[r]] = -own[r] * scale[r];
    }
    return done;
}

}  // namespace ANYMAX_UNIT
