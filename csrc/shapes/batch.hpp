// Rows of middling length, as many at once as a vector has lanes. Each row is read along itself, as memory likes it; the little
// that is left of it, its cells and then its candidates, is transposed and solved one row a lane, so that no step waits for a
// sum across lanes.
#pragma once

#include "shapes/lanes.hpp"

namespace ANYMAX_UNIT {

struct Batch {
    enum { W = width<float>, CROWDED = -2 };
    const float *x[W];
    float *out[W];
    int64_t n[W];           // the length of each
    const float *ahead;     // the scores of as many rows that come next, one after another; NULL where that is not known
    bool cached;            // where it is: results are written to the caches
    float top[W], edge[W];  // of each row: its maximum, and a bound that its candidates lie above
    int64_t count[W];       // its candidates; CROWDED: too many; -1: the row is served by itself, as are crowded ones but for
                            // the powers' probabilities
    int64_t most;           // the largest of these counts, in eights
    double below_1;         // of the dtype of the results
    uint32_t few;           // one bit a row, 1 where few of its vectors have candidates: `hit` then says which
    uint64_t hit[W][BATCH_LONGEST / W / 64];  // of each row one bit a vector: 1 where it has candidates; of SUPPORTS, once the
                                              // row is written, where p is not 0
    uint32_t wanted;                          // one bit a row, 0: a loss or gradient whose target is no class
    int64_t target[W];
    const float *scale;
    alignas(64) float aim[W];                                // the targets' scores
    alignas(64) double loss[W], tau[W];                      // losses and thresholds, where they are wanted
    int64_t step;                                            // from one row of candidates to the next
    alignas(64) float side[W * (BATCH_CANDIDATES + 4 * W)];  // rows of cells, rows of candidates, rows of their probabilities
    alignas(64) vf transposed[BATCH_CANDIDATES];             // cells and candidates, one row a lane
    alignas(64) vf other[BATCH_CANDIDATES];                  // and what is found of them
    alignas(64) vd value[BATCH_CANDIDATES + 1], rate[BATCH_CANDIDATES + 1];
};

// What a batch gives: probabilities, with what their supports are saved from or without; losses and thresholds, the
// probabilities of the candidates then lie in `side`; or the gradients of losses.
enum Output { PROBABILITIES, SUPPORTS, LOSS, GRADIENT };

// Asks for the scores of a row that comes next, and for the place of a row's results: a few at a time beside work, since no
// more than a dozen lines are under way at once.
ANYMAX_INLINE void ask_ahead(const Batch &b, int64_t r, int64_t n) {
    for (int64_t i = 0; b.ahead && i < n; i += 16) __builtin_prefetch(b.ahead + r * n + i, 0, 2);
}
ANYMAX_INLINE void ask_result(const Batch &b, int64_t r, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(b.out[r] + i, 1);
}

// True where all are below infinity, and numbers.
template <int G>
ANYMAX_INLINE bool cells_of(const float *x, int64_t n, float *to) {
    constexpr int64_t W = width<float>, K = G < 4 ? 4 : G;
    const vf inf = splat(inf32);
    vf a[K];
    uint32_t fine = bits_above(inf, vf{});
    const uint32_t full = fine;
    for (auto &v : a) v = -inf;
    int64_t i = 0;
    for (; i + K * W <= n; i += K * W)
        for (int j = 0; j < K; j++) {
            vf v = load(x + i + j * W);
            a[j] = larger(a[j], v);
            fine &= bits_above(inf, v);
        }
    for (int j = 0; i < n; i += W, j++) {
        vf v = load_or(x, i, n, -inf32);
        a[j] = larger(a[j], v);
        fine &= bits_above(inf, v);
    }
    for (int j = G; j < K; j++) a[j % G] = larger(a[j % G], a[j]);
    for (int j = 0; j < G; j++) store(to + j * W, a[j]);
    return fine == full;
}

// The cells of all rows, transposed, and how many a row has. Rows without a finite maximum are marked, and those that are not
// wanted.
ANYMAX_INLINE int64_t batch_cells(Batch &b, int64_t rows, int64_t n, int64_t groups) {
    constexpr int64_t W = width<float>;
    const int64_t cells = groups * W;
    b.step = (n < BATCH_CANDIDATES ? (n + W - 1) / W * W : BATCH_CANDIDATES) + 4 * W;
    for (int64_t r = 0; r < W; r++) {
        bool sound = false;
        float *to = b.side + r * cells;
        if (r < rows) switch (groups) {
                case 1: sound = cells_of<1>(b.x[r], b.n[r], to); break;
                case 2: sound = cells_of<2>(b.x[r], b.n[r], to); break;
                case 4: sound = cells_of<4>(b.x[r], b.n[r], to); break;
                case 8: sound = cells_of<8>(b.x[r], b.n[r], to); break;
                default: sound = cells_of<16>(b.x[r], b.n[r], to);
            }
        b.count[r] = sound ? 0 : -1;
        if (!sound)
            for (int64_t j = 0; j < cells; j++) to[j] = 0.0f;
    }
    gather_lanes((float *)b.transposed, b.side, W, cells, cells);
    vf high = b.transposed[0];
    for (int64_t j = 1; j < cells; j++) high = larger(high, b.transposed[j]);
    store(b.top, high);
    for (uint32_t out = ~(bits_above(high, splat(-inf32)) & b.wanted) & (uint32_t)((1ull << W) - 1); out; out &= out - 1)
        b.count[__builtin_ctz(out)] = -1;
    return cells;
}

// True where so many of the vectors of `size` entries are marked that to ask each costs more than to take them all.
ANYMAX_INLINE bool crowd(uint64_t hit, int64_t size) { return __builtin_popcountll(hit) * 2 * width<float> > size; }

// Which entries of a vector are candidates, and what is kept of them: x - top where that is above the edge, x there, or x from
// the edge on.
enum Keeping { BELOW_TOP, SCORES, SCORES_FROM };
template <Keeping K>
ANYMAX_INLINE uint32_t candidates(vf v, vf high, vf edge) {
    return K == SCORES_FROM ? bits_from(v, edge) : bits_above(v - high, edge);
}
template <Keeping K>
ANYMAX_INLINE int64_t keep(vf v, vf high, vf edge, float *to) {
    return pack(K == BELOW_TOP ? v - high : v, candidates<K>(v, high, edge), to);
}
// The results of the candidates of a vector, which lie at `from` in their order; 0 in the other lanes.
template <Keeping K>
ANYMAX_INLINE vf results_of(vf v, vf high, vf edge, uint32_t marked, const float *&from) {
    const vf p = unpack(K == SCORES_FROM ? v >= edge : v - high > edge, marked, from);
    from += __builtin_popcount(marked);
    return p;
}
template <Keeping K>
ANYMAX_INLINE int64_t keep_all(const float *x, int64_t n, vf high, vf edge, float *to, int64_t at, int64_t limit) {
    constexpr int64_t W = width<float>;
    int64_t i = 0;
    // The beginning of these n speaks for them; `at` counts those before them, too. No more than four vectors are stored beyond
    // the limit, here and below.
    if (K == SCORES && n >= SPEAKS_FROM && at + 4 * W <= limit) {
        const int64_t before = at;
        for (; i < 8 * W; i += W) at += keep<K>(load(x + i), high, edge, to + at);
        if ((at - before) * n > (limit + limit / 8 - before) * 8 * W) return limit + 1;
    }
    for (; i + 4 * W <= n && at <= limit; i += 4 * W)
        for (int j = 0; j < 4; j++) at += keep<K>(load(x + i + j * W), high, edge, to + at);
    for (; i < n && at <= limit; i += W) at += keep<K>(load_or(x, i, n, -inf32), high, edge, to + at);
    return at;
}
// First which vectors have any, and then those. Apart from the rest, which pays for its registers where it is inlined.
template <Keeping K>
__attribute__((noinline)) static int64_t keep_few(const float *x, int64_t n, vf high, vf edge, float *to, int64_t limit,
                                                  uint64_t *hits) {
    constexpr int64_t W = width<float>;
    int64_t at = 0;
    for (int64_t i = 0; i < n && at <= limit; i += 64 * W) {
        const int64_t end = i + 64 * W < n ? i + 64 * W : n;
        uint64_t hit = 0;
        int64_t j = 0;
        for (; i + (j + 1) * W <= end; j++) hit |= (uint64_t)(candidates<K>(load(x + i + j * W), high, edge) != 0) << j;
        if (i + j * W < end) hit |= (uint64_t)(candidates<K>(load_or(x, i + j * W, n, -inf32), high, edge) != 0) << j;
        hits[i / (64 * W)] = hit;
        if (crowd(hit, end - i)) {
            at = keep_all<K>(x + i, end - i, high, edge, to, at, limit);
            continue;
        }
        for (; hit && at <= limit; hit &= hit - 1)
            at += keep<K>(load_or(x, i + __builtin_ctzll(hit) * W, n, -inf32), high, edge, to + at);
    }
    return at;
}

// The candidates of all rows, transposed.
template <Keeping K>
ANYMAX_INLINE void batch_collect(Batch &b, int64_t n, int64_t limit, uint32_t few) {
    constexpr int64_t W = width<float>;
    b.most = 0, b.few = few;
    for (int64_t r = 0; r < W; r++) {
        float *to = b.side + r * b.step;
        int64_t at = 0;
        if (b.cached)
            ask_result(b, r, n);
        else
            ask_ahead(b, r, n);
        if (b.count[r] >= 0) {
            const float *x = b.x[r];
            const vf high = splat(b.top[r]), edge = splat(b.edge[r]);
            at = few >> r & 1 ? keep_few<K>(x, b.n[r], high, edge, to, limit, b.hit[r])
                              : keep_all<K>(x, b.n[r], high, edge, to, 0, limit);
            b.count[r] = at <= limit ? at : (int64_t)Batch::CROWDED;
            if (at > limit) at = 0;
        }
        if (at > b.most) b.most = at;
    }
    b.most = (b.most + 7) & ~(int64_t)7;
    for (int64_t r = 0; r < W; r++) {
        float *to = b.side + r * b.step;
        for (int64_t i = b.count[r] > 0 ? b.count[r] : 0; i < b.most; i += W) store(to + i, splat(-inf32));
    }
    gather_lanes((float *)b.transposed, b.side, W, b.most, b.step);
}

// f(where it begins) for each vector of n entries that is marked in `hits`, as long as that gives true.
template <class F>
ANYMAX_INLINE void each_hit(const uint64_t *hits, int64_t n, F f) {
    constexpr int64_t W = width<float>;
    for (int64_t i = 0; i < n; i += 64 * W)
        for (uint64_t hit = hits[i / (64 * W)]; hit; hit &= hit - 1)
            if (!f(i + __builtin_ctzll(hit) * W)) return;
}

// All of n entries.
inline void mark_all(uint64_t *hits, int64_t n) {
    for (int64_t left = (n + width<float> - 1) / width<float>; left > 0; left -= 64)
        *hits++ = left < 64 ? (1ull << left) - 1 : ~0ull;
}

// Takes the vectors of a row in order, and notes which have probabilities.
template <bool ON>
struct Marker {
    uint64_t *to, word = 0;
    int64_t at = 0;
    ANYMAX_INLINE void take(vf p) {
        if (!ON) return;
        word |= (uint64_t)(bits(~(p == vf{})) != 0) << at;
        if (++at < 64) return;
        *to++ = word;
        word = 0, at = 0;
    }
    ANYMAX_INLINE void end() {
        if (ON && at) *to = word;
    }
};

// f of each vector of the row, in order. SHIFT: the vectors may begin where results can be written around the caches.
template <bool SHIFT, class F>
ANYMAX_INLINE void transform(float *to, const float *x, int64_t n, bool bypass, F f) {
    constexpr int64_t W = width<float>;
    int64_t i = 0;
    if (SHIFT && bypass) {
        const int64_t lead = unaligned(to, n);
        if (lead) store_part(to, f(load_part(x, lead, -inf32)), lead);
        i = lead;
    }
    if (bypass && !((uintptr_t)(to + i) & (ANYMAX_VECTOR - 1)))
        for (; i + W <= n; i += W) stream(to + i, f(load(x + i)));
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) store(to + i + j * W, f(load(x + i + j * W)));
    for (; i + W <= n; i += W) store(to + i, f(load(x + i)));
    if (i < n) store_part(to + i, f(load_or(x, i, n, -inf32)), n - i);
}

// Of each row one bit: 1 where few of its vectors have entries above the edge, by its cells.
ANYMAX_INLINE uint32_t few_vectors(const vf *cell, int64_t cells, vf edge, int64_t n) {
    if (n < FEW_VECTORS_FROM) return 0;
    vi above{};
    for (int64_t j = 0; j < cells; j++) above -= cell[j] > edge;
    return bits(above < (int32_t)(cells / 2));
}

// Zeros but for the candidates, whose results lie at `from` in their order.
template <Keeping K, Output OUT>
ANYMAX_INLINE void write_candidates(Batch &b, int64_t r, bool bypass, const float *from) {
    const vf high = splat(b.top[r]), edge = splat(b.edge[r]);
    Marker<OUT == SUPPORTS> marker{b.hit[r]};
    transform<OUT != SUPPORTS>(b.out[r], b.x[r], b.n[r], bypass, [&](vf v) ANYMAX_EACH {
        const vf p = results_of<K>(v, high, edge, candidates<K>(v, high, edge), from);
        marker.take(p);
        return p;
    });
    marker.end();
}

ANYMAX_INLINE uint32_t served(const Batch &b, int64_t rows) {
    uint32_t done = 0;
    for (int64_t r = 0; r < rows; r++) done |= (uint32_t)(b.count[r] >= 0) << r;
    return done;
}
// The probabilities of the candidates, which lie in `other` one row a lane, to `side`.
ANYMAX_INLINE uint32_t keep_found(Batch &b, int64_t rows) {
    scatter_lanes((const float *)b.other, b.side, width<float>, b.most, b.step);
    return served(b, rows);
}

// Of the candidates of a row, whose probabilities lie in `side`, those above `least`: how many they are, -1 where there are
// more than `capacity`.
template <Keeping K>
static int64_t batch_keep(const Batch &b, int64_t r, int64_t n, float least, int32_t *index, float *value, int64_t capacity) {
    constexpr int64_t W = width<float>;
    const vf high = splat(b.top[r]), edge = splat(b.edge[r]), none = splat(least);
    const float *from = b.side + r * b.step;
    int64_t at = 0;
    auto take = [&](int64_t i) ANYMAX_EACH {
        const vf v = load_or(b.x[r], i, n, -inf32);
        const uint32_t marked = candidates<K>(v, high, edge);
        if (!marked) return;
        const vf p = results_of<K>(v, high, edge, marked, from);
        at = append_within(p, p > none, i, index, value, at, capacity);
    };
    if (b.few >> r & 1)
        each_hit(b.hit[r], n, [&](int64_t i) ANYMAX_EACH { return take(i), at >= 0; });
    else
        for (int64_t i = 0; i < n && at >= 0; i += W) take(i);
    return at;
}

// The probabilities of a row of results above `least`, from the vectors that have any: how many there are, -1 where there are
// more than `capacity`.
static int64_t batch_support(const uint64_t *hits, const float *p, int64_t n, float least, int32_t *index, float *value,
                             int64_t capacity) {
    const vf none = splat(least);
    int64_t at = 0;
    each_hit(hits, n, [&](int64_t i) ANYMAX_EACH {
        const vf v = load_or(p, i, n, 0.0f);
        at = append_within(v, v > none, i, index, value, at, capacity);
        return at >= 0;
    });
    return at;
}

// Zeros, and the vectors that have candidates.
template <Keeping K>
__attribute__((noinline)) static void write_few_candidates(float *to, const float *x, int64_t n, vf high, vf edge,
                                                           const uint64_t *hits, const float *from) {
    memset(to, 0, (size_t)n * sizeof(float));
    each_hit(hits, n, [&](int64_t i) ANYMAX_EACH {
        const vf v = load_or(x, i, n, -inf32);
        store_within(to, i, n, results_of<K>(v, high, edge, candidates<K>(v, high, edge), from));
        return true;
    });
}

// The results of all candidates, which lie in `other` one row a lane, to their rows. One bit a row: 0 where it is served by
// itself.
template <Keeping K, Output OUT>
ANYMAX_INLINE uint32_t write_found(Batch &b, int64_t rows, int64_t n, bool bypass) {
    scatter_lanes((const float *)b.other, b.side, width<float>, b.most, b.step);
    uint32_t done = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (b.cached) ask_ahead(b, r, n);
        if (b.count[r] < 0) continue;
        done |= 1u << r;
        const float *from = b.side + r * b.step;
        if (!bypass && b.x[r] != b.out[r] && (b.few >> r & 1))
            write_few_candidates<K>(b.out[r], b.x[r], b.n[r], splat(b.top[r]), splat(b.edge[r]), b.hit[r], from);
        else
            write_candidates<K, OUT>(b, r, bypass, from);
    }
    return done;
}

}  // namespace ANYMAX_UNIT
