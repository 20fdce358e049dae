// Rows of middling length, as many at once as a vector has lanes. Each row is read along itself, as memory likes it; the little that is left of it,
// its cells and then its candidates, is turned and solved one row a lane, so that no step waits for a sum across lanes.
#pragma once

#include "shapes/tile.hpp"

namespace ANYMAX_UNIT {

struct Batch {
    enum { W = width<float> };
    const float *x[W];
    float *out[W];
    const float *ahead;     // the scores of as many rows that come next, one after another; NULL where that is not known
    bool through;           // where it is: results are written through the caches
    float top[W], edge[W];  // of each row: its maximum, and a bound that its candidates lie above
    int64_t count[W];       // its candidates; -1: the row is for another way
    int64_t most;           // the largest of these counts, in eights
    uint32_t apart;         // one bit a row, 1 where few of its vectors have candidates: `hit` then says which
    uint64_t hit[W][BATCH_MOST / W / 64];  // of each row: one bit a vector, 1 where it has candidates, in the end where it may have probabilities
    int64_t step;                      // from one row of candidates to the next
    alignas(64) float side[W * (BATCH_CANDIDATES + 4 * W)];  // rows of cells, rows of candidates, rows of their probabilities
    alignas(64) vf turned[BATCH_CANDIDATES];                 // cells and candidates, one row a lane
    alignas(64) vf other[BATCH_CANDIDATES];                  // and what is found of them
    alignas(64) vd value[BATCH_CANDIDATES + 1], rate[BATCH_CANDIDATES + 1];
};

// -- moving lanes ------------------------------------------------------------------------------------------------------------------

#if defined(__AVX2__) && !defined(__AVX512F__)
struct Spreading {
    uint8_t lane[256][8];
    constexpr Spreading() : lane() {
        for (int m = 0; m < 256; m++) {
            int k = 0;
            for (int i = 0; i < 8; i++) {
                lane[m][i] = (uint8_t)k;
                if (m >> i & 1) k++;
            }
        }
    }
};
static constexpr Spreading spreading;
#endif

// The lanes of v that b marks, side by side, to `to`, which has room for a whole vector. How many they are.
ANYMAX_INLINE int64_t pack(vf v, uint32_t b, float *to) {
#if defined(__AVX512F__)
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps((__mmask16)b, (__m512)v));
#elif defined(__AVX2__)
    __m256i lane = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)packing.lane[b]));
    _mm256_storeu_ps(to, _mm256_permutevar8x32_ps((__m256)v, lane));
#else
    int64_t k = 0;
    for (uint32_t r = b; r; r &= r - 1) to[k++] = v[__builtin_ctz(r)];
#endif
    return __builtin_popcount(b);
}
// The way back: the lanes that m marks take one after another what lies at `from`; the others are 0.
ANYMAX_INLINE vf unpack(vi m, uint32_t b, const float *from) {
#if defined(__AVX512F__)
    (void)m;
    return (vf)_mm512_maskz_expand_ps((__mmask16)b, _mm512_loadu_ps(from));
#elif defined(__AVX2__)
    __m256i lane = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)spreading.lane[b]));
    return m ? (vf)_mm256_permutevar8x32_ps(_mm256_loadu_ps(from), lane) : vf{};
#else
    vf v{};
    for (uint32_t r = b; r; r &= r - 1) v[__builtin_ctz(r)] = *from++;
    (void)m;
    return v;
#endif
}

// -- what the kernels share --------------------------------------------------------------------------------------------------------

// Asks for the scores of a row that comes next, and for the place of a row's results: a few at a time beside work, since no more than a dozen lines
// are under way at once.
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

// The cells of all rows, turned, and how many a row has. Rows without a finite maximum are marked, and those without a bit in `left`.
ANYMAX_INLINE int64_t batch_cells(Batch &b, int64_t rows, int64_t n, int64_t groups, uint32_t left = ~0u) {
    constexpr int64_t W = width<float>;
    const int64_t cells = groups * W;
    b.step = (n < BATCH_CANDIDATES ? (n + W - 1) / W * W : BATCH_CANDIDATES) + 4 * W;
    for (int64_t r = 0; r < W; r++) {
        bool sound = false;
        float *to = b.side + r * cells;
        if (r < rows) switch (groups) {
                case 1: sound = cells_of<1>(b.x[r], n, to); break;
                case 2: sound = cells_of<2>(b.x[r], n, to); break;
                case 4: sound = cells_of<4>(b.x[r], n, to); break;
                case 8: sound = cells_of<8>(b.x[r], n, to); break;
                default: sound = cells_of<16>(b.x[r], n, to);
            }
        b.count[r] = sound ? 0 : -1;
        if (!sound)
            for (int64_t j = 0; j < cells; j++) to[j] = 0.0f;
    }
    gather_lanes((float *)b.turned, b.side, W, cells, cells);
    vf high = b.turned[0];
    for (int64_t j = 1; j < cells; j++) high = larger(high, b.turned[j]);
    store(b.top, high);
    for (int64_t r = 0; r < W; r++)
        if (!(b.top[r] > -inf32) || !(left >> r & 1)) b.count[r] = -1;
    return cells;
}

// True where so many of the vectors of `size` entries are marked that to ask each costs more than to take them all.
ANYMAX_INLINE bool crowd(uint64_t hit, int64_t size) { return __builtin_popcountll(hit) * 2 * width<float> > size; }

// Which entries of a vector are candidates, and what is kept of them: x - top where that is above the edge, x there, or x from the edge on.
enum Keeping { BELOW_TOP, SCORES, SCORES_FROM };
template <Keeping K>
ANYMAX_INLINE uint32_t candidates(vf v, vf high, vf edge) {
    return K == SCORES_FROM ? bits_from(v, edge) : bits_above(v - high, edge);
}
template <Keeping K>
ANYMAX_INLINE int64_t keep(vf v, vf high, vf edge, float *to) {
    return pack(K == BELOW_TOP ? v - high : v, candidates<K>(v, high, edge), to);
}
template <Keeping K>
ANYMAX_INLINE int64_t keep_all(const float *x, int64_t n, vf high, vf edge, float *to, int64_t at, int64_t room) {
    constexpr int64_t W = width<float>;
    int64_t i = 0;
    if (K == SCORES && n >= 16 * W) {  // the beginning of a row speaks for it
        for (; i < 8 * W; i += W) at += keep<K>(load(x + i), high, edge, to + at);
        if (at * n > (room + room / 8) * 8 * W) return room + 1;
    }
    for (; i + 4 * W <= n && at <= room; i += 4 * W)
        for (int j = 0; j < 4; j++) at += keep<K>(load(x + i + j * W), high, edge, to + at);
    for (; i < n && at <= room; i += W) at += keep<K>(load_or(x, i, n, -inf32), high, edge, to + at);
    return at;
}
// First which vectors have any, and then those. Apart from the rest, which pays for its registers where it is inlined.
template <Keeping K>
__attribute__((noinline)) static int64_t keep_few(const float *x, int64_t n, vf high, vf edge, float *to, int64_t room, uint64_t *hits) {
    constexpr int64_t W = width<float>;
    int64_t at = 0;
    for (int64_t i = 0; i < n && at <= room; i += 64 * W) {
        const int64_t end = i + 64 * W < n ? i + 64 * W : n;
        uint64_t hit = 0;
        int64_t j = 0;
        for (; i + (j + 1) * W <= end; j++) hit |= (uint64_t)(candidates<K>(load(x + i + j * W), high, edge) != 0) << j;
        if (i + j * W < end) hit |= (uint64_t)(candidates<K>(load_or(x, i + j * W, n, -inf32), high, edge) != 0) << j;
        hits[i / (64 * W)] = hit;
        if (crowd(hit, end - i)) {
            at = keep_all<K>(x + i, end - i, high, edge, to, at, room);
            continue;
        }
        for (; hit && at <= room; hit &= hit - 1) at += keep<K>(load_or(x, i + __builtin_ctzll(hit) * W, n, -inf32), high, edge, to + at);
    }
    return at;
}

// The candidates of all rows, turned.
template <Keeping K>
ANYMAX_INLINE void batch_collect(Batch &b, int64_t n, int64_t room, uint32_t apart) {
    constexpr int64_t W = width<float>;
    b.most = 0, b.apart = apart;
    for (int64_t r = 0; r < W; r++) {
        float *to = b.side + r * b.step;
        int64_t at = 0;
        if (b.through)
            ask_result(b, r, n);
        else
            ask_ahead(b, r, n);
        if (b.count[r] >= 0) {
            const float *x = b.x[r];
            const vf high = splat(b.top[r]), edge = splat(b.edge[r]);
            at = apart >> r & 1 ? keep_few<K>(x, n, high, edge, to, room, b.hit[r]) : keep_all<K>(x, n, high, edge, to, 0, room);
            b.count[r] = at <= room ? at : -1;
            if (at > room) at = 0;
        }
        if (at > b.most) b.most = at;
    }
    b.most = (b.most + 7) & ~(int64_t)7;
    for (int64_t r = 0; r < W; r++) {
        float *to = b.side + r * b.step;
        for (int64_t i = b.count[r] > 0 ? b.count[r] : 0; i < b.most; i += W) store(to + i, splat(-inf32));
    }
    gather_lanes((float *)b.turned, b.side, W, b.most, b.step);
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

// f of each vector of the row, in order. SHIFT: the vectors may begin where results can be written past the caches.
template <bool SHIFT, class F>
ANYMAX_INLINE void transform(float *to, const float *x, int64_t n, bool past, F f) {
    constexpr int64_t W = width<float>;
    int64_t i = 0;
    if (SHIFT && past) {
        const int64_t lead = unaligned(to, n);
        if (lead) store_part(to, f(load_part(x, lead, -inf32)), lead);
        i = lead;
    }
    if (past && !((uintptr_t)(to + i) & (ANYMAX_VECTOR - 1)))
        for (; i + W <= n; i += W) stream(to + i, f(load(x + i)));
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) store(to + i + j * W, f(load(x + i + j * W)));
    for (; i + W <= n; i += W) store(to + i, f(load(x + i)));
    if (i < n) store_part(to + i, f(load_or(x, i, n, -inf32)), n - i);
}

// Of each row one bit: 1 where few of its vectors have entries above the edge, by its cells.
ANYMAX_INLINE uint32_t few_vectors(const vf *cell, int64_t cells, vf edge, int64_t n) {
    if (n <= 24 * width<float>) return 0;
    vi above{};
    for (int64_t j = 0; j < cells; j++) above -= cell[j] > edge;
    return bits(above < (int32_t)(cells / 2));
}

// Zeros but for the candidates, whose results lie at `from` in their order.
template <Keeping K, bool SAVE>
ANYMAX_INLINE void write_candidates(Batch &b, int64_t r, int64_t n, bool past, const float *from) {
    const vf high = splat(b.top[r]), edge = splat(b.edge[r]);
    Marker<SAVE> marker{b.hit[r]};
    transform<!SAVE>(b.out[r], b.x[r], n, past, [&](vf v) {
        const uint32_t some = candidates<K>(v, high, edge);
        const vf p = unpack(K == SCORES_FROM ? v >= edge : v - high > edge, some, from);
        from += __builtin_popcount(some);
        marker.take(p);
        return p;
    });
    marker.end();
}

// -- sparsemax and entmax 3/2 ------------------------------------------------------------------------------------------------------

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
// The candidates, less the maximum, lie in `turned`; where K is SCORES in `other`, and in `turned` as they are.
template <int R, Keeping K>
ANYMAX_INLINE Rooted batch_root(Batch &b, int64_t rows, int64_t n, uint32_t left) {
    constexpr int64_t W = width<float>;
    const int64_t cells = batch_cells(b, rows, n, n <= 12 * W ? 1 : n <= 32 * W ? 2 : 4, left);
    const vf high = load(b.top);
    for (int64_t j = 0; j < cells; j++) b.turned[j] = b.turned[j] - high;
    Rooted s{high, tile_level<float, R>(b.turned, cells, 3), vf{}};
    const vf edge = s.level * -(float)R;
    store(b.edge, edge);
    batch_collect<K>(b, n, BATCH_CANDIDATES_FEW, few_vectors(b.turned, cells, edge, n));
    for (int64_t j = 0; K == SCORES && j < b.most; j++) b.other[j] = b.turned[j] - high;
    tile_root<float, R>(K == SCORES ? b.other : b.turned, b.most, s.level, s.lost);
    return s;
}

// One bit a row: 0 where it is to be served another way, for its support is most of it, or it is poisoned.
template <int R, bool SAVE>
static uint32_t batch_power(Batch &b, int64_t rows, int64_t n, bool past) {
    constexpr int64_t W = width<float>;
    const Rooted s = batch_root<R, BELOW_TOP>(b, rows, n, ~0u);
    float at[W], less[W];
    store(at, s.level);
    store(less, s.lost);
    uint32_t done = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (b.through) ask_ahead(b, r, n);
        if (b.count[r] < 0) continue;
        done |= 1u << r;
        const float *x = b.x[r];
        const vf m = splat(b.top[r]), l = splat(at[r]), off = splat(less[r]);
        if (!past && x != b.out[r] && (b.apart >> r & 1)) {  // the candidates' vectors are hardly more than the probabilities'
            write_few<R>(b.out[r], x, n, m, l, off, b.hit[r]);
            continue;
        }
        Marker<SAVE> marker{b.hit[r]};
        transform<!SAVE>(b.out[r], x, n, past, [&](vf v) {
            const vf p = power_value<float, R>(v - m, l, off);
            marker.take(p);
            return p;
        });
        marker.end();
    }
    return done;
}

ANYMAX_INLINE uint32_t served(const Batch &b, int64_t rows) {
    uint32_t some = 0;
    for (int64_t r = 0; r < rows; r++) some |= (uint32_t)(b.count[r] >= 0) << r;
    return some;
}

// Losses for the classes whose scores are `aim`, and thresholds; the probabilities of the candidates go to `side`. One bit a row, as above.
template <int R>
static uint32_t batch_loss(Batch &b, int64_t rows, int64_t n, uint32_t left, const float *aim, double *value, double *tau) {
    constexpr int64_t W = width<float>;
    const Rooted s = batch_root<R, SCORES>(b, rows, n, left);
    for (int upper = 0; upper < 2; upper++)
        power_loss<float, R>(b.turned, b.most, s.high, s.level, load(aim), upper, b.value, value, tau, (float *)b.other + upper * W / 2);
    scatter_lanes((const float *)b.other, b.side, W, b.most, b.step);
    return served(b, rows);
}

// The marked lanes of the vector that begins at i, with their indices, behind `at` others; -1 where there is no room for them.
ANYMAX_INLINE int64_t append_within(vf v, vi mark, int64_t i, int32_t *index, float *value, int64_t at, int64_t capacity) {
    if (at + width<float> <= capacity) return append(v, mark, (int32_t)i, value, index, at);
    for (uint32_t some = bits(mark); some; some &= some - 1) {
        const int64_t j = __builtin_ctz(some);
        if (at == capacity) return -1;
        index[at] = (int32_t)(i + j), value[at++] = v[j];
    }
    return at;
}

// Of the candidates of a row, whose probabilities lie in `side`, those above `least`: how many they are, -1 where there is no room for them.
template <Keeping K>
static int64_t batch_keep(const Batch &b, int64_t r, int64_t n, float least, int32_t *index, float *value, int64_t capacity) {
    constexpr int64_t W = width<float>;
    const vf high = splat(b.top[r]), edge = splat(b.edge[r]), none = splat(least);
    const float *from = b.side + r * b.step;
    int64_t at = 0;
    auto take = [&](int64_t i) ANYMAX_EACH {
        const vf v = load_or(b.x[r], i, n, -inf32);
        const uint32_t some = candidates<K>(v, high, edge);
        if (!some) return;
        const vf p = unpack(K == SCORES_FROM ? v >= edge : v - high > edge, some, from);
        from += __builtin_popcount(some);
        at = append_within(p, p > none, i, index, value, at, capacity);
    };
    if (b.apart >> r & 1)
        for (int64_t i = 0; i < n && at >= 0; i += 64 * W)
            for (uint64_t hit = b.hit[r][i / (64 * W)]; hit && at >= 0; hit &= hit - 1) take(i + __builtin_ctzll(hit) * W);
    else
        for (int64_t i = 0; i < n && at >= 0; i += W) take(i);
    return at;
}

// Their gradients, scale (p - y). A target's own is the sum of the others, which keeps the digits of a small one.
template <int R>
static uint32_t batch_gradient(Batch &b, int64_t rows, int64_t n, uint32_t left, const float *aim, const int64_t *target, const float *scale, bool past) {
    constexpr int64_t W = width<float>;
    const Rooted s = batch_root<R, BELOW_TOP>(b, rows, n, left);
    const vf below = load(aim) - s.high;
    vf others{}, tied{};
    for (int64_t i = 0; i < b.most; i += 8) {
        vf sum{};
        for (int64_t j = i; j < i + 8; j++) {
            const vi same = b.turned[j] == below;
            sum += same ? vf{} : power_value<float, R>(b.turned[j], s.level, s.lost);
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
        transform<true>(b.out[r], b.x[r], n, past, [&](vf v) {
            const vf p = power_value<float, R>(v - m, l, off);
            return p == vf{} ? vf{} : p * by;
        });
        b.out[r][target[r]] = -own[r] * scale[r];
    }
    return done;
}

// -- softmax over the k largest ----------------------------------------------------------------------------------------------------

// At most the k-th largest entry of each row, for no more than so many of its cells are larger.
ANYMAX_INLINE vf below_largest(const Batch &b, int64_t cells, int64_t k, int turns) {
    const vf least = splat(-lanes_max(0.0f)), high = load(b.top);
    if (k >= cells) return least;
    vf low = high, finite{};
    for (int64_t j = 0; j < cells; j++) {
        low = b.turned[j] > -inf32 ? smaller(low, b.turned[j]) : low;
        finite += b.turned[j] > -inf32 ? splat(1.0f) : vf{};
    }
    const vi few = finite < (float)k;
    lanes_count<float>(b.turned, cells, splat((float)k), low, finite, high, turns);
    return few ? least : low;
}

// Where a normal variable of mean 0 and deviation 1 is larger with a probability of q < 1/2, to three digits (Abramowitz and Stegun, 26.2.23).
inline double normal_above(double q) {
    const double t = ::sqrt(-2.0 * ::log(q));
    return t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
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

// Of short rows, by counting along the row how many scores reach a level. The first level is that of a normal distribution of the row's mean and
// deviation, and so is the slope of the next steps. Wherever they lead, a row is served only where a count is k itself.
static uint32_t batch_counted(Batch &b, int64_t rows, int64_t n, int64_t k, bool past) {
    constexpr int64_t W = width<float>;
    const int64_t vectors = (n + W - 1) / W;
    const double q = ((double)k - 0.5) / (double)n, z_ = q < 0.5 ? normal_above(q) : -normal_above(1.0 - q);
    const float z0 = (float)z_, dense = (float)(0.3989422804 * ::exp(-0.5 * z_ * z_) * (double)n), each = 1.0f / (float)n;
    alignas(64) float at[W], above[W] = {};  // rows that are not asked have 0 above any level
    vf part[3][W];  // of each row the lanes' maxima, sums and sums of squares
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
    const vf top_ = across(part[0], [](vf u, vf v) { return larger(u, v); });
    const vf mean = sums(part[1]) * each, deviation = root2(larger(sums(part[2]) * each - mean * mean, vf{})), center = load(at);
    store(b.top, top_);
    const float want = (float)k;
    const vf step = deviation * (1.0f / dense);
    vf low = center + mean - deviation * ::sqrtf((float)n), high = top_, middle = center + mean + deviation * z0;
    vf at_low = splat((float)n), at_high = splat(1.0f);
    vi found{};
    uint32_t left = bits(deviation < inf32) & bits(deviation > 0.0f) & (uint32_t)((1ull << rows) - 1);  // neither is true of NaN
    for (int turn = 0; turn < 24 && left; turn++) {
        const vf between = low + (high - low) * (turn % 4 == 3 ? splat(0.5f) : (at_low - want + 0.5f) / (at_low - at_high + 0.25f));
        middle = ((middle > low) & (middle < high)) ? middle : between;
        store(at, middle);
        for (uint32_t go = left; go; go &= go - 1) {
            const int64_t r = __builtin_ctz(go);
            if (turn == 0 && b.through) ask_result(b, r, n);
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
        write(b.out[r], 0, n, past, [&](int64_t i) ANYMAX_EACH { return load(e + r * STEP + i) * scale; });
        b.hit[r][0] = ((uint64_t)1 << vectors) - 1;
    }
    return done;
}

// The scores from the k-th largest on are those from `low` on; true where there are k of them.
static vi batch_kth(Batch &b, int64_t rows, int64_t n, int64_t k, uint32_t left, vf &low) {
    constexpr int64_t W = width<float>;
    const int64_t groups = k <= W / 2 ? 1 : k <= W + W / 2 ? 2 : 4, cells = batch_cells(b, rows, n, groups, left);
    const vf high = load(b.top), want = splat((float)k);
    low = below_largest(b, cells, k, 5);
    store(b.edge, low);
    batch_collect<SCORES_FROM>(b, n, BATCH_CANDIDATES_FEW, 0);
    if (bits(low == splat(-lanes_max(0.0f)))) {  // no bound: the lowest candidate is one; the lanes end in -inf, which are none
        vf least = high;
        for (int64_t j = 0; j < b.most; j++) least = smaller(least, b.turned[j] > -inf32 ? b.turned[j] : least);
        low = larger(low, least);
    }
    float counts[W];
    for (int64_t r = 0; r < W; r++) counts[r] = (float)b.count[r];
    return lanes_count<float>(b.turned, b.most, want, low, load(counts), high, 40);
}

template <bool SAVE>
static uint32_t batch_largest(Batch &b, int64_t rows, int64_t n, int64_t k, bool past) {
    vf low;
    const uint32_t exact = bits(batch_kth(b, rows, n, k, ~0u, low));
    lanes_softmax<float>(b.turned, b.most, low, load(b.top));
    scatter_lanes((const float *)b.turned, b.side, width<float>, b.most, b.step);
    uint32_t done = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (b.through) ask_ahead(b, r, n);
        if (b.count[r] < 0 || !(exact >> r & 1)) continue;
        done |= 1u << r;
        write_candidates<SCORES_FROM, SAVE>(b, r, n, past, b.side + r * b.step);
    }
    return done;
}

// The logarithm of the sum of their exponentials, less `aim`.
static uint32_t batch_largest_loss(Batch &b, int64_t rows, int64_t n, uint32_t left, int64_t k, const float *aim, double *value) {
    vf low;
    const uint32_t exact = bits(batch_kth(b, rows, n, k, left, low));
    const vf top_ = load(b.top), target = load(aim);
    vd rest[2]{};
    vf tied{};
    for (int64_t i = 0; i < b.most; i += 4) {
        vf y[4], e[4], sum{};
        for (int64_t j = 0; j < 4; j++) y[j] = e[j] = b.turned[i + j] - top_;
        exp_below<4>(e);
        for (int64_t j = 0; j < 4; j++) {
            tied += y[j] == vf{} ? splat(1.0f) : vf{};
            sum += ((y[j] < vf{}) & (b.turned[i + j] >= low)) ? e[j] : vf{};
        }
        for (int h = 0; h < 2; h++) rest[h] += part(sum, h);
    }
    for (int h = 0; h < 2; h++) {
        const vd v = (part(top_, h) - part(target, h)) + log1p(rest[h] + (part(tied, h) - 1.0));
        store(value + h * width<double>, larger(v, vd{}));
    }
    lanes_softmax<float>(b.turned, b.most, low, top_);
    scatter_lanes((const float *)b.turned, b.side, width<float>, b.most, b.step);
    return served(b, rows) & exact;
}

// -- entmax of any alpha, normmax --------------------------------------------------------------------------------------------------

// Zeros, and the vectors that have candidates.
template <Keeping K>
__attribute__((noinline)) static void write_few_candidates(float *to, const float *x, int64_t n, vf high, vf edge, const uint64_t *hits, const float *from) {
    constexpr int64_t W = width<float>;
    memset(to, 0, (size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i += 64 * W)
        for (uint64_t hit = hits[i / (64 * W)]; hit; hit &= hit - 1) {
            const int64_t k = i + __builtin_ctzll(hit) * W;
            const vf v = load_or(x, k, n, -inf32);
            const uint32_t some = candidates<K>(v, high, edge);
            const vf p = unpack(K == SCORES_FROM ? v >= edge : v - high > edge, some, from);
            from += __builtin_popcount(some);
            if (k + W <= n)
                store(to + k, p);
            else
                store_part(to + k, p, n - k);
        }
}

// The results of all candidates, which lie in `other` one row a lane, to their rows. One bit a row: 0 where it is for another way.
template <Keeping K, bool SAVE>
ANYMAX_INLINE uint32_t write_found(Batch &b, int64_t rows, int64_t n, bool past) {
    scatter_lanes((const float *)b.other, b.side, width<float>, b.most, b.step);
    uint32_t done = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (b.through) ask_ahead(b, r, n);
        if (b.count[r] < 0) continue;
        done |= 1u << r;
        const float *from = b.side + r * b.step;
        if (!past && b.x[r] != b.out[r] && (b.apart >> r & 1))
            write_few_candidates<K>(b.out[r], b.x[r], n, splat(b.top[r]), splat(b.edge[r]), b.hit[r], from);
        else
            write_candidates<K, SAVE>(b, r, n, past, from);
    }
    return done;
}

// The level of each row, as near as floats come; `turned` has the candidates.
ANYMAX_INLINE vf batch_level(Batch &b, int64_t rows, int64_t n, uint32_t left, const Curve &curve) {
    constexpr int64_t W = width<float>;
    const int64_t cells = batch_cells(b, rows, n, n <= 12 * W ? 1 : n <= 32 * W ? 2 : 4, left);
    const vf high_ = load(b.top);
    for (int64_t j = 0; j < cells; j++) b.turned[j] = b.turned[j] - high_;
    vf level = smaller(curve_level(curve, b.turned, cells, splat(1.0f), 3) * (1.0f + 2e-5f), splat(1.0f));
    const vf edge = level * (float)(-1.0 / curve.slope);
    store(b.edge, edge);
    batch_collect<SCORES>(b, n, curve.swept() ? BATCH_CANDIDATES_SWEPT : BATCH_CANDIDATES, few_vectors(b.turned, cells, edge, n));
    for (int64_t j = 0; j < b.most; j++) b.other[j] = b.turned[j] - high_;
    return curve_level(curve, b.other, b.most, level, 40);
}

template <bool SAVE>
static uint32_t batch_curve(Batch &b, int64_t rows, int64_t n, const Curve &curve, Finish finish, bool past) {
    constexpr int64_t W = width<float>;
    const vf level = batch_level(b, rows, n, ~0u, curve), high_ = load(b.top);
    const int64_t most = b.most;
    for (int upper = 0; upper < 2; upper++) {
        const vd top_ = upper ? high(high_) : low(high_);
        vd lost, share;
        curve_finish(curve, b.turned, top_, most, upper != 0, upper ? high(level) : low(level), finish, b.value, b.rate, lost, share);
        for (int64_t i = 0; i < most; i++)
            store_narrow((float *)(b.other + i) + upper * W / 2, curve_value(finish, b.value[i], b.rate[i], lost, share));
    }
    return write_found<SCORES, SAVE>(b, rows, n, past);
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
        curve_finish(curve, b.turned, part(high_, h), most, h != 0, part(level, h), finish, b.value, b.rate, lost, share);
        for (int64_t i = 0; i < most; i++) {
            const vd p = curve_value(finish, b.value[i], b.rate[i], lost, share);
            vd d = part(b.turned[i], h) - target;
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

// -- budget ------------------------------------------------------------------------------------------------------------------------------

template <bool SAVE>
static uint32_t batch_budget(Batch &b, int64_t rows, int64_t n, double k, bool past) {
    constexpr int64_t W = width<float>;
    const int64_t rank = (int64_t)::ceil(k);
    int64_t groups = n <= 12 * W ? 1 : n <= 32 * W ? 2 : 4;
    while (groups < 16 && groups * W < 2 * rank && groups * 2 * W <= n) groups *= 2;
    const int64_t cells = batch_cells(b, rows, n, groups);
    const vf low_ = below_largest(b, cells, rank, 8);
    vf tau = splat(-0.5f);  // of the cells alone, which is no larger than the row's
    const ClipSums<vf> s = clip_root<vf>(cells, tau, splat(-1.0f), load(b.top) - low_, splat((float)k), 1e-5f, 24, [&](int64_t i) ANYMAX_EACH { return b.turned[i] - low_; });
    const vf slack = absolute(low_) * 1e-6f + (float)(k * 2e-5) + 1e-5f;
    const vf edge = low_ - slack + (absolute(s.part + s.full - (float)k) <= (float)(k * 1e-5) ? larger(tau, splat(-1.0f)) : splat(-1.0f));
    const vf high_ = load(b.top);
    store(b.edge, edge);
    const uint32_t apart = few_vectors(b.turned, cells, edge, n), far = bits(~(high_ - low_ < FAR));
    for (int64_t r = 0; r < W; r++)
        if (far >> r & 1) b.count[r] = -1;
    batch_collect<SCORES_FROM>(b, n, BATCH_CANDIDATES, apart);
    share_out(b.turned, b.other, b.most, low_, edge, high_, k);
    return write_found<SCORES_FROM, SAVE>(b, rows, n, past);
}

template <bool SAVE>
inline uint32_t batch_map(Batch &b, Link link, double param, int64_t rows, int64_t n, bool past) {
    switch (link) {
        case POWER1: return batch_power<1, SAVE>(b, rows, n, past);
        case POWER2: return batch_power<2, SAVE>(b, rows, n, past);
        case CAPPED: return batch_budget<SAVE>(b, rows, n, param, past);
        case LARGEST:
            return counted(param, n) ? batch_counted(b, rows, n, (int64_t)param, past) : batch_largest<SAVE>(b, rows, n, (int64_t)param, past);
        default: return batch_curve<SAVE>(b, rows, n, curve_of(link, param), finish_of(link), past);
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

// The probabilities of a row of results above `least`, from the vectors that have any: how many there are, -1 where there is no room for them.
static int64_t batch_support(const uint64_t *hits, const float *p, int64_t n, float least, int32_t *index, float *value, int64_t capacity) {
    constexpr int64_t W = width<float>;
    const vf none = splat(least);
    int64_t at = 0;
    for (int64_t k = 0; k < n; k += 64 * W)
        for (uint64_t hit = hits[k / (64 * W)]; hit; hit &= hit - 1) {
            const int64_t i = k + __builtin_ctzll(hit) * W;
            const vf v = load_or(p, i, n, 0.0f);
            at = append_within(v, v > none, i, index, value, at, capacity);
            if (at < 0) return -1;
        }
    return at;
}

}  // namespace ANYMAX_UNIT
