// Softmax over the k largest in batches: forward and losses.
#pragma once

#include "shapes/batch.hpp"

namespace ANYMAX_UNIT {

// At most the k-th largest entry of each row, for no more than so many of its cells are larger.
ANYMAX_INLINE vf below_largest(const Batch &b, int64_t cells, int64_t k, int turns) {
    const vf least = splat(-largest_number<float>), high = load(b.top);
    if (k >= cells) return least;
    vf low = high, finite{};
    for (int64_t j = 0; j < cells; j++) {
        low = b.transposed[j] > -inf32 ? smaller(low, b.transposed[j]) : low;
        finite += b.transposed[j] > -inf32 ? splat(1.0f) : vf{};
    }
    const vi few = finite < (float)k;
    lanes_count<float>(b.transposed, cells, splat((float)k), low, finite, high, turns);
    return few ? least : low;
}

// How many scores of the row reach a level: one bit each.
ANYMAX_INLINE int32_t count_from(const float *x, int64_t n, vf level) {
    constexpr int64_t W = width<float>;
    int32_t above = 0;
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
#if defined(__AVX512F__)
        __mmask16 m[4];
        for (int64_t l = 0; l < 4; l++) m[l] = _mm512_cmp_ps_mask((__m512)load(x + i + l * W), (__m512)level, _CMP_GE_OQ);
        above += (int32_t)__builtin_popcountll(_mm512_kunpackd(_mm512_kunpackw(m[0], m[1]), _mm512_kunpackw(m[2], m[3])));
#else
        for (int64_t l = 0; l < 4; l++) above += __builtin_popcount(bits_from(load(x + i + l * W), level));
#endif
    }
    for (; i < n; i += W) above += __builtin_popcount(bits_from(load_or(x, i, n, -inf32), level));
    return above;
}

// Of short rows, by counting along the row how many scores reach a level. The first level is that of a normal distribution of
// the row's mean and deviation, and so is the slope of the next steps. Wherever they lead, a row is served only where a count
// is k itself.
static uint32_t batch_counted(Batch &b, int64_t rows, int64_t n, int64_t k, bool bypass) {
    constexpr int64_t W = width<float>;
    const int64_t vectors = (n + W - 1) / W;
    const double q = ((double)k - 0.5) / (double)n, quantile = normal_above(q);
    const float z0 = (float)quantile, dense = (float)(0.3989422804 * ::exp(-0.5 * quantile * quantile) * (double)n),
                each = 1.0f / (float)n;
    alignas(64) float at[W], above[W] = {};  // rows that are not asked have 0 above any level
    vf part[3][W];                           // of each row the lanes' maxima, sums and sums of squares
    for (int64_t r = 0; r < W; r++) {
        const float *x = b.x[r < rows ? r : 0];
        const vf center = splat(at[r] = x[0]);
        vf most = center, s1{}, s2{};
        for (int64_t i = 0; i < n; i += W) {
            const vf v = load_or(x, i, n, x[0]), d = v - center;
            most = larger(most, v);
            s1 += d, s2 += d * d;
        }
        part[0][r] = most, part[1][r] = s1, part[2][r] = s2;
    }
    const vf top = across(part[0], [](vf u, vf v) { return larger(u, v); });
    const vf mean = sums(part[1]) * each, deviation = root2(larger(sums(part[2]) * each - mean * mean, vf{})),
             center = load(at);
    store(b.top, top);
    const float want = (float)k;
    const vf step = deviation * (1.0f / dense);
    vf low = center + mean - deviation * ::sqrtf((float)n), high = top, middle = center + mean + deviation * z0;
    vf at_low = splat((float)n), at_high = splat(1.0f);
    vi found{};
    uint32_t left =
        bits(deviation < inf32) & bits(deviation > 0.0f) & (uint32_t)((1ull << rows) - 1);  // neither is true of NaN
    for (int turn = 0; turn < 24 && left; turn++) {
        const vf between =
            low + (high - low) * (turn % 4 == 3 ? splat(0.5f) : (at_low - want + 0.5f) / (at_low - at_high + 0.25f));
        middle = ((middle > low) & (middle < high)) ? middle : between;
        store(at, middle);
        for (uint32_t go = left; go; go &= go - 1) {
            const int64_t r = __builtin_ctz(go);
            if (turn == 0 && b.cached) ask_result(b, r, n);
            above[r] = (float)count_from(b.x[r], n, splat(at[r]));
        }
        const vf count = load(above);
        const vi many = ~found & (count >= want), less = ~found & (count < want);
        low = many ? middle : low, at_low = many ? count : at_low;
        high = less ? middle : high, at_high = less ? count : at_high;
        found |= count == want;
        left &= ~bits(found);
        middle = turn % 3 == 1 ? low : middle + (count - want) * step;  // every third by what the bracket says
    }
    store(at, low);
    uint32_t done = bits(found) & (uint32_t)((1ull << rows) - 1);
    constexpr int64_t STEP = TILE_MOST + W;
    float *const e = b.side;
    for (uint32_t go = done; go; go &= go - 1) {
        const int64_t r = __builtin_ctz(go);
        const float *x = b.x[r];
        const vf level = splat(at[r]), m = splat(b.top[r]);
        vf z{};
        ask_ahead(b, r, n);
        for (int64_t i = 0; i < vectors; i += 4) {
            vf v[4], p[4];
            for (int64_t l = 0; l < 4; l++) v[l] = load_or(x, (i + l) * W, n, -inf32), p[l] = v[l] - m;
            exp_below<4>(p);
            for (int64_t l = 0; l < 4; l++) store(e + r * STEP + (i + l) * W, p[l] = v[l] >= level ? p[l] : vf{});
            z += (p[0] + p[1]) + (p[2] + p[3]);
        }
        part[0][r] = z;
    }
    store(above, splat(1.0f) / sums(part[0]));
    for (uint32_t go = done; go; go &= go - 1) {
        const int64_t r = __builtin_ctz(go);
        const vf scale = splat(above[r]);
        write(b.out[r], 0, n, bypass, [&](int64_t i) ANYMAX_EACH { return load(e + r * STEP + i) * scale; });
        b.hit[r][0] = ((uint64_t)1 << vectors) - 1;
    }
    return done;
}

// The scores from the k-th largest on are those from `low` on; true where there are k of them.
static vi batch_kth(Batch &b, int64_t rows, int64_t n, int64_t k, vf &low) {
    constexpr int64_t W = width<float>;
    const int64_t groups = k <= W / 2 ? 1 : k <= W + W / 2 ? 2 : 4, cells = batch_cells(b, rows, n, groups);
    const vf high = load(b.top), want = splat((float)k);
    low = below_largest(b, cells, k, 5);
    store(b.edge, low);
    batch_collect<SCORES_FROM>(b, n, BATCH_CANDIDATES_FEW, 0);
    if (bits(low ==
             splat(-largest_number<float>))) {  // no bound: the lowest candidate is one; the lanes end in -inf, which are none
        vf least = high;
        for (int64_t j = 0; j < b.most; j++) least = smaller(least, b.transposed[j] > -inf32 ? b.transposed[j] : least);
        low = larger(low, least);
    }
    float counts[W];
    for (int64_t r = 0; r < W; r++) counts[r] = (float)b.count[r];
    return lanes_count<float>(b.transposed, b.most, want, low, load(counts), high, 40);
}

// A loss is the logarithm of the sum of their exponentials, less the target's score.
template <Output OUT>
static uint32_t batch_largest(Batch &b, int64_t rows, int64_t n, int64_t k, bool bypass) {
    vf low;
    const uint32_t exact = bits(batch_kth(b, rows, n, k, low));
    const vf high = load(b.top);
    if constexpr (OUT == LOSS)
        lanes_softmax_loss<float>(
            b.most, [&](int64_t i) ANYMAX_EACH { return b.transposed[i] >= low ? b.transposed[i] - high : splat(-inf32); },
            high, load(b.aim), b.loss, b.tau);
    lanes_softmax<float>(b.transposed, b.most, low, high);
    scatter_lanes((const float *)b.transposed, b.side, width<float>, b.most, b.step);
    const uint32_t done = served(b, rows) & exact;
    for (int64_t r = 0; OUT != LOSS && r < rows; r++) {
        if (b.cached) ask_ahead(b, r, n);
        if (done >> r & 1) write_candidates<SCORES_FROM, OUT>(b, r, bypass, b.side + r * b.step);
    }
    return done;
}

}  // namespace ANYMAX_UNIT
