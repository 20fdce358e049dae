// Rows of middling length, as many at once as a vector has lanes. Each row is read along itself, as memory likes it; the little that is left of it,
// its cells and then its candidates, is turned and solved one row a lane, so that no step waits for a sum across lanes.
#pragma once

#include "tile.hpp"

namespace ANYMAX_UNIT {

#if defined(__AVX2__)
constexpr bool PACKS = true;  // lanes can be moved by a mask
#else
constexpr bool PACKS = false;
#endif
constexpr int64_t MIDDLE = 2048;     // the longest rows that are served this way
constexpr int64_t ROOM = 256;        // the most candidates of a row
constexpr int64_t ROOM_STEP = ROOM + 4 * width<float>;

struct Batch {
    enum { W = width<float> };
    const float *x[W];
    float *out[W];
    const float *ahead;     // the scores of as many rows that come next, one after another; NULL where that is not known
    float top[W], edge[W];  // of each row: its maximum, and a bound that its candidates lie above
    int64_t count[W];       // its candidates; -1: the row is for another way
    int64_t most;           // the largest of these counts, in eights
    uint64_t hit[W][MIDDLE / W / 64];  // of each row: one bit a vector, 1 where it has candidates
    alignas(64) float side[W * ROOM_STEP];  // rows of cells, rows of candidates
    alignas(64) vf turned[ROOM];            // the same, one row a lane
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

// The cells of all rows, turned, and how many a row has. Rows without a finite maximum are marked.
ANYMAX_INLINE int64_t batch_cells(Batch &b, int64_t rows, int64_t n, int64_t groups) {
    constexpr int64_t W = width<float>;
    const int64_t cells = groups * W;
    for (int64_t r = 0; r < W; r++) {
        bool sound = false;
        if (r < rows) sound = groups == 1 ? cells_of<1>(b.x[r], n, b.side + r * cells) : groups == 2 ? cells_of<2>(b.x[r], n, b.side + r * cells) : cells_of<4>(b.x[r], n, b.side + r * cells);
        b.count[r] = sound ? 0 : -1;
        if (!sound)
            for (int64_t j = 0; j < cells; j++) b.side[r * cells + j] = 0.0f;
    }
    gather_lanes((float *)b.turned, b.side, W, cells, cells);
    vf high = b.turned[0];
    for (int64_t j = 1; j < cells; j++) high = larger(high, b.turned[j]);
    store(b.top, high);
    for (int64_t r = 0; r < W; r++)
        if (!(b.top[r] > -inf32)) b.count[r] = -1;
    return cells;
}

// True where so many of the vectors of `size` entries are marked that to ask each costs more than to take them all.
ANYMAX_INLINE bool crowd(uint64_t hit, int64_t size) { return __builtin_popcountll(hit) * 2 * width<float> > size; }

template <bool RAW>
ANYMAX_INLINE int64_t keep(vf v, vf high, vf edge, float *to) {
    const vf y = RAW ? v : v - high;
    return pack(y, RAW ? bits_from(y, edge) : bits_above(y, edge), to);
}
template <bool RAW>
ANYMAX_INLINE int64_t keep_all(const float *x, int64_t n, vf high, vf edge, float *to, int64_t at, int64_t room) {
    constexpr int64_t W = width<float>;
    int64_t i = 0;
    for (; i + 4 * W <= n && at <= room; i += 4 * W)
        for (int j = 0; j < 4; j++) at += keep<RAW>(load(x + i + j * W), high, edge, to + at);
    for (; i < n && at <= room; i += W) at += keep<RAW>(load_or(x, i, n, -inf32), high, edge, to + at);
    return at;
}
// First which vectors have any, and then those. Apart from the rest, which pays for its registers where it is inlined.
__attribute__((noinline)) static int64_t keep_few(const float *x, int64_t n, vf high, vf edge, float *to, int64_t room, uint64_t *hits) {
    constexpr int64_t W = width<float>;
    int64_t at = 0;
    for (int64_t i = 0; i < n && at <= room; i += 64 * W) {
        const int64_t end = i + 64 * W < n ? i + 64 * W : n;
        uint64_t hit = 0;
        int64_t j = 0;
        for (; i + (j + 1) * W <= end; j++) hit |= (uint64_t)(bits_above(load(x + i + j * W) - high, edge) != 0) << j;
        if (i + j * W < end) hit |= (uint64_t)(bits_above(load_or(x, i + j * W, n, -inf32) - high, edge) != 0) << j;
        hits[i / (64 * W)] = hit;
        if (crowd(hit, end - i)) {
            at = keep_all<false>(x + i, end - i, high, edge, to, at, room);
            continue;
        }
        for (; hit && at <= room; hit &= hit - 1) at += keep<false>(load_or(x, i + __builtin_ctzll(hit) * W, n, -inf32), high, edge, to + at);
    }
    return at;
}

// The candidates of all rows, turned: x - top > edge, or with RAW x >= edge. `apart`: one bit a row, 1 where few of its vectors have any.
template <bool RAW>
ANYMAX_INLINE void batch_collect(Batch &b, int64_t n, int64_t room, uint32_t apart) {
    constexpr int64_t W = width<float>;
    b.most = 0;
    for (int64_t r = 0; r < W; r++) {
        float *to = b.side + r * ROOM_STEP;
        int64_t at = 0;
        for (int64_t i = 0; b.ahead && i < n; i += 16) __builtin_prefetch(b.ahead + r * n + i, 0, 2);
        if (b.count[r] >= 0) {
            const float *x = b.x[r];
            const vf high = splat(b.top[r]), edge = splat(b.edge[r]);
            at = apart >> r & 1 ? keep_few(x, n, high, edge, to, room, b.hit[r]) : keep_all<RAW>(x, n, high, edge, to, 0, room);
            b.count[r] = at <= room ? at : -1;
            if (at > room) at = 0;
        }
        if (at > b.most) b.most = at;
    }
    b.most = (b.most + 7) & ~(int64_t)7;
    for (int64_t r = 0; r < W; r++) {
        float *to = b.side + r * ROOM_STEP;
        for (int64_t i = b.count[r] > 0 ? b.count[r] : 0; i < b.most; i += W) store(to + i, splat(-inf32));
    }
    gather_lanes((float *)b.turned, b.side, W, b.most, ROOM_STEP);
}

// f of each vector of the row, in order.
template <class F>
ANYMAX_INLINE void transform(float *to, const float *x, int64_t n, bool past, F f) {
    constexpr int64_t W = width<float>;
    int64_t i = 0;
    if (past && !((uintptr_t)to & (ANYMAX_VECTOR - 1)))
        for (; i + W <= n; i += W) stream(to + i, f(load(x + i)));
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) store(to + i + j * W, f(load(x + i + j * W)));
    for (; i + W <= n; i += W) store(to + i, f(load(x + i)));
    if (i < n) store_part(to + i, f(load_or(x, i, n, -inf32)), n - i);
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
            transform(to + i, x + i, end - i, false, value);
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

// One bit a row: 0 where it is to be served another way, for its support is most of it, or it is poisoned.
template <int R>
static uint32_t batch_power(Batch &b, int64_t rows, int64_t n, bool past) {
    constexpr int64_t W = width<float>;
    const int64_t cells = batch_cells(b, rows, n, n <= 12 * W ? 1 : n <= 32 * W ? 2 : 4);
    const vf high = load(b.top);
    for (int64_t j = 0; j < cells; j++) b.turned[j] = b.turned[j] - high;
    vf level = tile_level<float, R>(b.turned, cells, 3);
    store(b.edge, level * -(float)R);
    uint32_t apart = 0;
    if (n > 24 * W) {
        vi above{};
        for (int64_t j = 0; j < cells; j++) above -= b.turned[j] > level * -(float)R;
        apart = bits(above < (int32_t)(cells - cells / 8));
    }
    batch_collect<false>(b, n, ROOM, apart);
    vf lost;
    tile_root<float, R>(b.turned, b.most, level, lost);
    float at[W], less[W];
    store(at, level);
    store(less, lost);
    uint32_t done = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (b.count[r] < 0) continue;
        done |= 1u << r;
        const float *x = b.x[r];
        const vf m = splat(b.top[r]), l = splat(at[r]), off = splat(less[r]);
        if (past || x == b.out[r] || !(apart >> r & 1))
            transform(b.out[r], x, n, past, [&](vf v) { return power_value<float, R>(v - m, l, off); });
        else
            write_few<R>(b.out[r], x, n, m, l, off, b.hit[r]);
    }
    return done;
}

// -- softmax over the k largest ----------------------------------------------------------------------------------------------------

static uint32_t batch_largest(Batch &b, int64_t rows, int64_t n, int64_t k, bool past) {
    constexpr int64_t W = width<float>;
    const int64_t groups = k <= W / 2 ? 1 : k <= W + W / 2 ? 2 : 4, cells = batch_cells(b, rows, n, groups);
    const vf high = load(b.top), want = splat((float)k);
    vf low = b.turned[0];
    if (k < cells) {  // the k-th largest cell is at most the k-th largest entry
        for (int64_t j = 1; j < cells; j++) low = smaller(low, b.turned[j]);
        low = larger(low, splat(-lanes_max(0.0f)));
        lanes_count<float>(b.turned, cells, want, low, splat((float)cells), high, 5);
    } else {
        low = splat(-lanes_max(0.0f));
    }
    store(b.edge, low);
    batch_collect<true>(b, n, ROOM, 0);
    low = b.turned[0];  // the lowest candidate; the lanes end in -inf, which are none
    for (int64_t j = 1; j < b.most; j++) low = smaller(low, b.turned[j] > -inf32 ? b.turned[j] : low);
    float counts[W];
    for (int64_t r = 0; r < W; r++) counts[r] = (float)b.count[r];
    const vi found = lanes_count<float>(b.turned, b.most, want, low, load(counts), high, 40);
    lanes_softmax<float>(b.turned, b.most, low, high);
    scatter_lanes((const float *)b.turned, b.side, W, b.most, ROOM_STEP);
    const uint32_t exact = bits(found);
    uint32_t done = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (b.count[r] < 0 || !(exact >> r & 1)) continue;
        done |= 1u << r;
        const float *x = b.x[r], *from = b.side + r * ROOM_STEP;
        const vf edge = splat(b.edge[r]);
        transform(b.out[r], x, n, past, [&](vf v) {
            const uint32_t some = bits_from(v, edge);
            const vf p = unpack(v >= edge, some, from);
            from += __builtin_popcount(some);
            return p;
        });
    }
    return done;
}

inline bool batch_serves(int32_t map, double param, int64_t n) {
    if (!PACKS || n <= NARROW || n > MIDDLE) return false;
    if (map == ANYMAX_TOPK) return param >= 1.0 && param < (double)n && param <= (double)(ROOM / 2) && param * 2 <= (double)n;
    return rank_of(map, param) > 0;
}

inline uint32_t batch_map(Batch &b, int32_t map, double param, int64_t rows, int64_t n, bool past) {
    if (map == ANYMAX_TOPK) return batch_largest(b, rows, n, (int64_t)param, past);
    return rank_of(map, param) == 2 ? batch_power<2>(b, rows, n, past) : batch_power<1>(b, rows, n, past);
}

}  // namespace ANYMAX_UNIT
