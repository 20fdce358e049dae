// One row: the scan, the candidates, the threshold, the result. Every kernel reads a contiguous row of C = float or double and is told
// where to put its result by a `Sink`; anything that depends on the caller's layout and dtype has been settled before.
#pragma once

#include "anymax.h"
#include "links/powers.hpp"

namespace ANYMAX_UNIT {

// -- scratch memory: one a task, slots that only grow ------------------------------------------------------------------------

struct Scratch {
    enum { SLOTS = 15 };
    void *memory[SLOTS] = {};
    size_t size[SLOTS] = {};
    bool failed = false;

    ~Scratch() {
        for (void *m : memory) free(m);
    }
    template <class T>
    T *take(int slot, int64_t count) {
        size_t bytes = (size_t)count * sizeof(T) + 2 * ANYMAX_VECTOR;
        if (bytes > size[slot]) {
            free(memory[slot]);
            memory[slot] = malloc(bytes + 64);
            size[slot] = memory[slot] ? bytes : 0;
        }
        if (!memory[slot]) {
            failed = true;
            return nullptr;
        }
        return (T *)(((uintptr_t)memory[slot] + 63) & ~(uintptr_t)63);
    }
};
enum Slot { STAGED, STAGED_P, STAGED_G, TURNED, RESULT, CELLS, VALUES, INDICES, WIDE, EXTRA, SORTED, PARTIAL, WORK, BATCH_IN, BATCH_OUT };

// Memory that a thread keeps from one call to the next, where `leave` does not find it too much.
struct Room {
    void *data = nullptr;
    int64_t bytes = 0;
    ~Room() { free(data); }
    template <class C>
    C *take(int64_t count) {
        const int64_t wanted = count * (int64_t)sizeof(C) + 64;
        if (wanted > bytes) {
            free(data);
            data = malloc((size_t)wanted);
            bytes = data ? wanted : 0;
        }
        return data ? (C *)(((uintptr_t)data + 63) & ~(uintptr_t)63) : nullptr;
    }
    void leave() {
        if (bytes <= (4 << 20)) return;
        free(data);
        data = nullptr, bytes = 0;
    }
};

// -- long rows: pieces of a fixed size, so that no sum depends on who computes it ------------------------------------------------

constexpr int64_t PIECE = 65536;

struct Team {
    anymax_parallel run;  // NULL: the caller alone
};

template <class F>
void pieces_task(int64_t begin, int64_t end, void *context) {
    for (int64_t k = begin; k < end; k++) (*(F *)context)(k);
}
// In the place of a team.
inline int alone(int64_t begin, int64_t end, int64_t, anymax_task task, void *context) { return task(begin, end, context), 0; }
// f(k, begin, end) for every piece [begin, end) of [0, n).
template <class F>
ANYMAX_INLINE void pieces(const Team &team, int64_t n, F f) {
    int64_t count = (n + PIECE - 1) / PIECE;
    auto one = [&](int64_t k) { f(k, k * PIECE, k * PIECE + PIECE < n ? k * PIECE + PIECE : n); };
    if (team.run && count > 1) {
        team.run(0, count, 1, pieces_task<decltype(one)>, &one);
        return;
    }
    for (int64_t k = 0; k < count; k++) one(k);
}

// -- where a result goes --------------------------------------------------------------------------------------------------------

template <class C>
struct Sink {
    void *row;         // the caller's row
    int64_t step;      // its stride
    int32_t dtype;     // its type
    C *direct;         // the row itself where it is contiguous and of type C, else NULL
    bool past;         // write past the caches
    int64_t n;
    const C *next;     // the row of scores that is read after this one, NULL where it may be there already or is not known
    bool cleared;      // it holds zeros already
};

template <class C>
ANYMAX_INLINE void put(const Sink<C> &out, int64_t i, C v) {
    int64_t k = i * out.step;
    switch (out.dtype) {
        case ANYMAX_F32: ((float *)out.row)[k] = (float)v; break;
        case ANYMAX_F64: ((double *)out.row)[k] = (double)v; break;
        case ANYMAX_BF16: ((uint16_t *)out.row)[k] = to_bf16((float)v); break;
        default: ((uint16_t *)out.row)[k] = to_f16((float)v); break;
    }
}

ANYMAX_INLINE int64_t item(int32_t dtype) { return dtype == ANYMAX_F64 ? 8 : dtype == ANYMAX_F32 ? 4 : 2; }

// The entries before the first that lies where a vector may be written past the caches, `most` if there are no more.
template <class C>
ANYMAX_INLINE int64_t unaligned(const C *to, int64_t most) {
    const int64_t lead = (int64_t)((-(uintptr_t)to & (ANYMAX_VECTOR - 1)) / sizeof(C));
    return lead < most ? lead : most;
}

// Zeros for bytes that are contiguous.
inline void zero_bytes(char *p, int64_t bytes, bool past) {
    if (!past || bytes < 1024) {
        memset(p, 0, (size_t)bytes);
        return;
    }
    const int64_t lead = unaligned(p, bytes);
    memset(p, 0, (size_t)lead);
    int64_t i = lead;
    for (; i + 4 * ANYMAX_VECTOR <= bytes; i += 4 * ANYMAX_VECTOR)
        for (int j = 0; j < 4; j++) stream((float *)(p + i + j * ANYMAX_VECTOR), vf{});
    memset(p + i, 0, (size_t)(bytes - i));
}

template <class C>
inline void zeros(const Sink<C> &out, const Team &team) {
    if (out.cleared) return;
    int64_t size = item(out.dtype);
    if (out.step == 1) {
        if (out.n <= PIECE) return zero_bytes((char *)out.row, out.n * size, out.past);
        pieces(team, out.n, [&](int64_t, int64_t b, int64_t e) { zero_bytes((char *)out.row + b * size, (e - b) * size, out.past); });
        return;
    }
    for (int64_t i = 0; i < out.n; i++) put(out, i, C(0));
}

template <class C>
inline void fill(const Sink<C> &out, C v) {
    for (int64_t i = 0; i < out.n; i++) put(out, i, v);
}

// Of `count` indices in order, the first that is no less than `least`.
inline int64_t first_from(const int32_t *index, int64_t count, int64_t least) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (index[middle] < least)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Of p at indices in order, that of the class t; 0 where it has none.
template <class P>
inline double value_at(const int32_t *index, const P *p, int64_t count, int64_t t) {
    const int64_t i = first_from(index, count, t);
    return i < count && index[i] == t ? (double)p[i] : 0.0;
}

// The whole row at once: f(i) gives the vector of results that starts at i (of all lanes, also past the end).
template <class C, class F>
ANYMAX_INLINE void write(C *to, int64_t begin, int64_t end, bool past, F f) {
    constexpr int64_t W = width<C>;
    int64_t i = begin;
    if (past) {
        const int64_t lead = unaligned(to + i, end - i);
        if (lead) store_part(to + i, f(i), lead);
        i += lead;
        for (; i + W <= end; i += W) stream(to + i, f(i));
    }
    for (; i + W <= end; i += W) store(to + i, f(i));
    if (i < end) store_part(to + i, f(i), end - i);
}

// A row of results of type C in the caller's layout and type.
template <class C>
inline void deliver(const Sink<C> &out, const C *from) {
    if (out.step == 1 && out.dtype == ANYMAX_BF16) {
        uint16_t *to = (uint16_t *)out.row;
        for (int64_t i = 0; i < out.n; i++) to[i] = to_bf16((float)from[i]);
    } else if (out.step == 1 && out.dtype == ANYMAX_F16) {
        uint16_t *to = (uint16_t *)out.row;
        int64_t i = 0;
#if defined(__F16C__)
        if (sizeof(C) == 4)
            for (; i + 8 <= out.n; i += 8) _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps((const float *)from + i), 0));
#endif
        for (; i < out.n; i++) to[i] = to_f16((float)from[i]);
    } else {
        for (int64_t i = 0; i < out.n; i++) put(out, i, from[i]);
    }
}

template <class C>
ANYMAX_INLINE bool is_type(int32_t dtype) {
    return sizeof(C) == 8 ? dtype == ANYMAX_F64 : dtype == ANYMAX_F32;
}

// The caller's row as contiguous C, -inf where the mask says 0.
template <class C>
inline void stage_in(C *to, const void *row, int64_t step, int32_t dtype, const uint8_t *mask, int64_t mask_step, int64_t n) {
    if (is_type<C>(dtype)) {
        const C *from = (const C *)row;
        if (step == 1 && mask_step == 1) {
            for (int64_t i = 0; i < n; i++) to[i] = mask[i] ? from[i] : -infinity<C>;
            return;
        }
        if (step == 1)
            memcpy(to, from, (size_t)n * sizeof(C));
        else
            for (int64_t i = 0; i < n; i++) to[i] = from[i * step];
    } else if (dtype == ANYMAX_BF16) {
        const uint16_t *from = (const uint16_t *)row;
        if (step == 1)
            for (int64_t i = 0; i < n; i++) to[i] = from_bf16(from[i]);
        else
            for (int64_t i = 0; i < n; i++) to[i] = from_bf16(from[i * step]);
    } else if (dtype == ANYMAX_F16) {
        const uint16_t *from = (const uint16_t *)row;
        int64_t i = 0;
#if defined(__F16C__)
        if (step == 1 && sizeof(C) == 4)
            for (; i + 8 <= n; i += 8) _mm256_storeu_ps((float *)to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
        for (; i < n; i++) to[i] = from_f16(from[i * step]);
    } else {  // float as double or double as float
        for (int64_t i = 0; i < n; i++) to[i] = dtype == ANYMAX_F32 ? (C)((const float *)row)[i * step] : (C)((const double *)row)[i * step];
    }
    if (mask)
        for (int64_t i = 0; i < n; i++)
            if (!mask[i * mask_step]) to[i] = -infinity<C>;
}

// `row` itself where nothing is to be done.
template <class C>
inline const C *stage(const void *row, int64_t step, int32_t dtype, const uint8_t *mask, int64_t mask_step, int64_t n, Scratch &scratch, int slot) {
    if (is_type<C>(dtype) && step == 1 && !mask) return (const C *)row;
    C *to = scratch.take<C>(slot, n);
    if (to) stage_in(to, row, step, dtype, mask, mask_step, n);
    return to;
}

// -- the scan: one read of the row ---------------------------------------------------------------------------------------------------

// Maxima of blocks: `cells` has one vector a block of `block` vectors, each lane the maximum of its `block` entries.
template <class C>
constexpr int64_t block_of(int64_t n) {
    return n <= 512 * width<C> ? 4 : 16;
}

template <class C>
struct Scan {
    C top;
    bool sound;  // no NaN and no +inf
    C *cells;    // vectors of maxima of disjoint sets of entries
    int64_t count, block;
    double level;  // where to begin on the row, by them; 0 where that is not known
};

template <class C>
ANYMAX_INLINE vec<C> load_or(const C *x, int64_t i, int64_t n, C fill) {
    return i + width<C> <= n ? load(x + i) : load_part(x + i, n - i > 0 ? n - i : 0, fill);
}

template <class C, int BLOCK>
inline void scan_blocks(const C *x, int64_t begin, int64_t end, C *cells, vec<C> &high, ints<C> &ok) {
    constexpr int64_t W = width<C>;
    const vec<C> inf = splat(infinity<C>);
    ints<C> fine = ok;
    vec<C> most = high;
    int64_t i = begin;
    for (; i + BLOCK * W <= end; i += BLOCK * W) {
        vec<C> a[4];
        for (int j = 0; j < 4; j++) {
            vec<C> v = load(x + i + j * W);
            a[j] = v;
            fine &= v < inf;
        }
        for (int k = 4; k < BLOCK; k += 4)
            for (int j = 0; j < 4; j++) {
                vec<C> v = load(x + i + (k + j) * W);
                a[j] = larger(a[j], v);
                fine &= v < inf;
            }
        vec<C> m = larger(larger(a[0], a[1]), larger(a[2], a[3]));
        store(cells + i / BLOCK, m);
        most = larger(most, m);
    }
    if (i < end) {
        vec<C> m = splat(-infinity<C>);
        for (int64_t j = i; j < end; j += W) {
            vec<C> v = load_or(x, j, end, -infinity<C>);
            m = larger(m, v);
            fine &= v < inf;
        }
        store(cells + i / BLOCK, m);
        most = larger(most, m);
    }
    high = most;
    ok = fine;
}

template <class C>
ANYMAX_INLINE bool every(ints<C> m) {
    return bits(m) == (uint32_t)((1ull << width<C>) - 1);
}

template <class C>
inline Scan<C> scan(const C *x, int64_t n, Scratch &scratch, const Team &team) {
    constexpr int64_t W = width<C>;
    Scan<C> s{};
    s.block = block_of<C>(n);
    int64_t blocks = (n + s.block * W - 1) / (s.block * W);
    s.cells = scratch.take<C>(CELLS, blocks * W);
    if (!s.cells) return s;
    s.count = blocks;
    vec<C> high = splat(-infinity<C>);
    ints<C> ok = high < infinity<C>;
    if (n <= PIECE || !team.run) {
        if (s.block == 4)
            scan_blocks<C, 4>(x, 0, n, s.cells, high, ok);
        else
            scan_blocks<C, 16>(x, 0, n, s.cells, high, ok);
        s.top = top(high);
        s.sound = every<C>(ok);
        return s;
    }
    int64_t count = (n + PIECE - 1) / PIECE;
    C *tops = scratch.take<C>(PARTIAL, 2 * count);
    if (!tops) return s;
    C *cells = s.cells;
    pieces(team, n, [&](int64_t k, int64_t b, int64_t e) {
        vec<C> h = splat(-infinity<C>);
        ints<C> o = h < infinity<C>;
        scan_blocks<C, 16>(x + b, 0, e - b, cells + b / 16, h, o);
        tops[2 * k] = top(h);
        tops[2 * k + 1] = every<C>(o) ? C(1) : C(0);
    });
    s.top = -infinity<C>;
    s.sound = true;
    for (int64_t k = 0; k < count; k++) {
        s.top = larger(s.top, tops[2 * k]);
        s.sound = s.sound && tops[2 * k + 1] != 0;
    }
    return s;
}

// The maximum alone.
template <class C>
inline void scan_top(const C *x, int64_t n, C &high, bool &sound) {
    constexpr int64_t W = width<C>;
    const vec<C> inf = splat(infinity<C>);
    vec<C> a = splat(-infinity<C>), b = a, c = a, d = a;
    ints<C> ok = a < inf;
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        vec<C> p = load(x + i), q = load(x + i + W), r = load(x + i + 2 * W), s = load(x + i + 3 * W);
        a = larger(a, p), b = larger(b, q), c = larger(c, r), d = larger(d, s);
        ok &= (p < inf) & (q < inf) & (r < inf) & (s < inf);
    }
    for (; i < n; i += W) {
        vec<C> v = load_or(x, i, n, -infinity<C>);
        a = larger(a, v);
        ok &= v < inf;
    }
    high = top(larger(larger(a, b), larger(c, d)));
    sound = every<C>(ok);
}

// -- candidates -----------------------------------------------------------------------------------------------------------------------

#if defined(__AVX2__) && !defined(__AVX512F__)
struct Packing {
    uint8_t lane[256][8];
    constexpr Packing() : lane() {
        for (int m = 0; m < 256; m++) {
            int k = 0;
            for (int i = 0; i < 8; i++)
                if (m >> i & 1) lane[m][k++] = (uint8_t)i;
            for (; k < 8; k++) lane[m][k] = 0;
        }
    }
};
static constexpr Packing packing;
#endif

// Appends the lanes of v that m marks, and their indices, to values[at] and indices[at]; may write a whole vector there.
ANYMAX_INLINE int64_t append(vf v, vi m, int32_t first, float *values, int32_t *indices, int64_t at) {
    uint32_t b = bits(m);
#if defined(__AVX512F__)
    __mmask16 k = (__mmask16)b;
    __m512i iota = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(first));
    _mm512_storeu_ps(values + at, _mm512_maskz_compress_ps(k, (__m512)v));
    _mm512_storeu_si512(indices + at, _mm512_maskz_compress_epi32(k, iota));
#elif defined(__AVX2__)
    __m256i lane = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)packing.lane[b]));
    _mm256_storeu_ps(values + at, _mm256_permutevar8x32_ps((__m256)v, lane));
    _mm256_storeu_si256((__m256i *)(indices + at), _mm256_add_epi32(lane, _mm256_set1_epi32(first)));
#else
    int64_t k = at;
    for (uint32_t r = b; r; r &= r - 1) {
        int i = __builtin_ctz(r);
        values[k] = v[i];
        indices[k++] = first + i;
    }
#endif
    return at + __builtin_popcount(b);
}
ANYMAX_INLINE int64_t append(vd v, vl m, int32_t first, double *values, int32_t *indices, int64_t at) {
    for (uint32_t b = bits(m); b; b &= b - 1) {
        int i = __builtin_ctz(b);
        values[at] = v[i];
        indices[at++] = first + i;
    }
    return at;
}

template <class C>
struct Candidates {
    C *value;
    int32_t *index;
    int64_t count;
};

// All entries with x - top > bound (an entry of -inf never).
template <class C>
inline Candidates<C> collect(const C *x, int64_t n, const Scan<C> &s, C bound, Scratch &scratch) {
    constexpr int64_t W = width<C>;
    Candidates<C> c{scratch.take<C>(VALUES, n), scratch.take<int32_t>(INDICES, n), 0};
    if (!c.value || !c.index) return c;
    const vec<C> high = splat(s.top), limit = splat(bound);
    int64_t at = 0;
    for (int64_t k = 0; k < s.count; k++) {
        if (!bits((load(s.cells + k * W) - high) > limit)) continue;
        int64_t i = k * s.block * W, end = i + s.block * W;
        if (end <= n) {
            for (; i < end; i += 4 * W) {
                vec<C> a = load(x + i), b = load(x + i + W), d = load(x + i + 2 * W), e = load(x + i + 3 * W);
                ints<C> ma = (a - high) > limit, mb = (b - high) > limit, md = (d - high) > limit, me = (e - high) > limit;
                if (!bits(ma | mb | md | me)) continue;
                at = append(a, ma, (int32_t)i, c.value, c.index, at);
                at = append(b, mb, (int32_t)(i + W), c.value, c.index, at);
                at = append(d, md, (int32_t)(i + 2 * W), c.value, c.index, at);
                at = append(e, me, (int32_t)(i + 3 * W), c.value, c.index, at);
            }
        } else {
            for (; i < n; i += W) {
                vec<C> a = load_or(x, i, n, -infinity<C>);
                at = append(a, (a - high) > limit, (int32_t)i, c.value, c.index, at);
            }
        }
    }
    c.count = at;
    return c;
}

// The same for x >= bound, and not -inf.
ANYMAX_INLINE float lanes_max(float) { return 3.402823466e38f; }
ANYMAX_INLINE double lanes_max(double) { return 1.7976931348623157e308; }

template <class C>
inline Candidates<C> collect_from(const C *x, int64_t n, const Scan<C> &s, C bound, Scratch &scratch) {
    constexpr int64_t W = width<C>;
    Candidates<C> c{scratch.take<C>(VALUES, n), scratch.take<int32_t>(INDICES, n), 0};
    if (!c.value || !c.index) return c;
    const vec<C> limit = splat(bound == -infinity<C> ? -lanes_max(C()) : bound);
    int64_t at = 0;
    for (int64_t k = 0; k < s.count; k++) {
        if (!bits(load(s.cells + k * W) >= limit)) continue;
        int64_t i = k * s.block * W, end = i + s.block * W < n ? i + s.block * W : n;
        if (s.block == 4 && end == i + 4 * W) {  // a short row: most vectors have some, so to ask would cost more
            for (int j = 0; j < 4; j++) {
                vec<C> a = load(x + i + j * W);
                at = append(a, a >= limit, (int32_t)(i + j * W), c.value, c.index, at);
            }
            continue;
        }
        for (; i < end; i += W) {
            vec<C> a = load_or(x, i, n, -infinity<C>);
            ints<C> m = a >= limit;
            if (bits(m)) at = append(a, m, (int32_t)i, c.value, c.index, at);
        }
    }
    c.count = at;
    return c;
}

// -- the threshold ------------------------------------------------------------------------------------------------------------------------

// Maxima of a few disjoint sets of entries, in up to four vectors: how many.
constexpr int FEW = 4;
template <class C>
inline int few_cells(const Scan<C> &s, vec<C> *a) {
    constexpr int64_t W = width<C>;
    for (int j = 0; j < FEW; j++) a[j] = splat(-infinity<C>);
    int64_t k = 0;
    for (; k + FEW <= s.count; k += FEW)
        for (int j = 0; j < FEW; j++) a[j] = larger(a[j], load(s.cells + (k + j) * W));
    for (; k < s.count; k++) a[k % FEW] = larger(a[k % FEW], load(s.cells + k * W));
    return s.count < FEW ? (int)s.count : FEW;
}

// A level that is surely not below the row's: three Newton steps on the maxima of disjoint sets of entries, which the whole row only adds to.
template <class C, class L>
inline C level_of_cells(const L &link, const Scan<C> &s) {
    vec<C> a[FEW];
    const int used = few_cells(s, a);
    const vec<C> high = splat(s.top);
    C level = (C)link.start;
    for (int step = 0; step < 3; step++) {
        vec<C> s0{}, s1{};
        const auto at = link.at(level);
        for (int j = 0; j < used; j++) {
            vec<C> value, rate;
            at.terms(a[j] - high, value, rate);
            s0 += value, s1 += rate;
        }
        double fall = link.step((double)sum(s0), (double)sum(s1));
        if (!(fall > 0.0)) break;
        level -= (C)fall;
    }
    return level;
}

struct Root {
    double level, excess, rate;  // excess: sum p - 1 at this level; rate: sum of the rates
};

// The exact level over the candidates' y, padded to whole vectors with -1e300.
template <class L>
inline Root solve(const L &link, const double *y, int64_t count, double level) {
    constexpr int64_t W = width<double>;
    double low = link.floor((double)count), high = link.start;
    low -= 1e-12 * (1.0 + fabs(low));
    Root root{level, 0.0, 1.0};
    if (!(level <= high)) level = high;
    for (int turn = 0; turn < 100; turn++) {
        vd s0{}, s1{}, t0{}, t1{};
        const auto at = link.at(level);
        int64_t i = 0;
        for (; i + 64 * W <= count; i += 64 * W) {  // partial sums of blocks: a long row rounds no more than a short one
            vd b0{}, b1{}, c0{}, c1{};
            for (int64_t j = i; j < i + 64 * W; j += 2 * W) {
                vd v, k;
                at.terms(load(y + j), v, k);
                b0 += v, b1 += k;
                at.terms(load(y + j + W), v, k);
                c0 += v, c1 += k;
            }
            t0 += b0 + c0, t1 += b1 + c1;
        }
        for (; i < count; i += W) {
            vd v, k;
            at.terms(load(y + i), v, k);
            s0 += v, s1 += k;
        }
        double sum0 = sum(s0 + t0), sum1 = sum(s1 + t1);
        root = Root{level, sum0 - 1.0, sum1};
        if (sum0 > 1.0)
            high = level;
        else
            low = level;
        double next = level - link.step(sum0, sum1);
        if (!(next >= low && next <= high)) {
            if (fabs(sum0 - 1.0) < 1e-14) break;  // rounding: the correction of the result does the rest
            next = 0.5 * (low + high);
        }
        double change = fabs(next - level);
        if (change <= 4e-16 * fabs(level) || next == level) break;
        level = next;
    }
    return root;
}

// y = x - top of the candidates as doubles, padded.
template <class C>
inline double *widen(const Candidates<C> &c, C top_, Scratch &scratch) {
    constexpr int64_t W = width<double>;
    double *y = scratch.take<double>(WIDE, c.count + W);
    if (!y) return y;
    const double high = (double)top_;
    for (int64_t i = 0; i < c.count; i += W) store(y + i, load_wide(c.value + i) - high);  // reads past the end: scratch, overwritten below
    int64_t whole = (c.count + W - 1) / W * W;
    for (int64_t i = c.count; i < whole; i++) y[i] = -1e300;
    return y;
}

// What a row of a threshold map is found to be: p of its candidates.
struct Found {
    const int32_t *index;
    double *p;  // of each candidate
    int64_t count;
    double tau;
};

enum Finish { ENTMAX_FINISH, NORMMAX_FINISH };

// p of the candidates from the root, in place of y.
template <class L>
inline void values(const L &link, const Root &root, double *y, int64_t count, Finish finish) {
    constexpr int64_t W = width<double>;
    const double lost = root.excess / root.rate, share = 1.0 / root.rate;
    const auto at = link.at(root.level);
    for (int64_t i = 0; i < count; i += W) {
        vd v, k;
        at.terms(load(y + i), v, k);
        store(y + i, finish == NORMMAX_FINISH ? k * share : larger(v - k * lost, vd{}));
    }
}

// -- the whole row, where it is short or most of it is in the support: no candidates, no branch on a score ------------------------

struct Sums2 {
    double s0, s1;
};

// Where u is 0, tau = top + below: as the number of type C nearest to it, from which u is measured without losing a digit, and the rest.
template <class C, int R>
struct Ground {
    C near, rest;
    Ground(C top_, double below) : near((C)((double)top_ + below)), rest((C)(Power<R>::slope * (((double)near - (double)top_) - below))) {}
};

// Sums of value and rate at a threshold.
template <class C, int R>
inline Sums2 sweep(const C *x, int64_t n, Ground<C, R> ground) {
    constexpr int64_t W = width<C>;
    const vec<C> a = splat(ground.near), l = splat(ground.rest);
    const C s = (C)Power<R>::slope;
    vd wide0{}, wide1{};
    int64_t i = 0;
    auto term = [&](vec<C> v, vec<C> &s0, vec<C> &s1) {
        vec<C> u = larger((v - a) * s + l, vec<C>{});
        vec<C> rate = R == 1 ? (u > vec<C>{} ? splat(C(1)) : vec<C>{}) : u;
        for (int r = 2; r < R; r++) rate = rate * u;
        s0 += R == 1 ? u : rate * u;
        s1 += rate;
    };
    while (i + 4 * W <= n) {
        vec<C> p0{}, p1{}, q0{}, q1{};
        for (int64_t stop = i + 32 * W <= n ? i + 32 * W : n; i + 4 * W <= stop; i += 4 * W) {
            term(load(x + i), p0, q0);
            term(load(x + i + W), p1, q1);
            term(load(x + i + 2 * W), p0, q0);
            term(load(x + i + 3 * W), p1, q1);
        }
        wide0 = widen_add(wide0, p0 + p1);
        wide1 = widen_add(wide1, q0 + q1);
    }
    if (i < n) {
        vec<C> p{}, q{};
        for (; i < n; i += W) term(load_or(x, i, n, -infinity<C>), p, q);
        wide0 = widen_add(wide0, p);
        wide1 = widen_add(wide1, q);
    }
    return Sums2{sum(wide0), sum(wide1)};
}

struct Edge {
    double below, lost;  // tau - top; p = rate (u - lost)
};

// u of a vector of doubles: a third power of a float would have three of its roundings.
template <int R>
struct WideGround {
    double zero, off;
    WideGround(double top_, double below) : zero(top_ + below), off((top_ - zero) + below) {}
    ANYMAX_INLINE vd u(vd v) const { return larger(((v - zero) - off) * Power<R>::slope, vd{}); }
    ANYMAX_INLINE vd rate(vd u) const {
        vd rate = u;
        for (int r = 2; r < R; r++) rate = rate * u;
        return rate;
    }
};

template <int R>
inline Sums2 sweep_wide(const float *x, int64_t n, double top_, double below) {
    constexpr int64_t W = width<float>;
    const WideGround<R> ground(top_, below);
    vd s0{}, s1{}, t0{}, t1{};
    for (int64_t i = 0; i < n; i += W) {
        const vf v = load_or(x, i, n, -inf32);
        const vd a = ground.u(low(v)), b = ground.u(high(v)), p = ground.rate(a), q = ground.rate(b);
        s0 += p * a, t0 += q * b, s1 += p, t1 += q;
    }
    return Sums2{sum(s0 + t0), sum(s1 + t1)};
}
template <class C, int R>
inline Edge sweep_root(const C *x, int64_t n, C top_, double below) {
    const Power<R> link;
    const double enough = sizeof(C) == 4 ? 5e-5 : 1e-8;
    Sums2 s{};
    for (int turn = 0; turn < 60; turn++) {
        s = sweep<C, R>(x, n, Ground<C, R>(top_, below));
        double fall = link.step(s.s0, s.s1), mean = s.s0 / s.s1;  // of u: one class may stand far above a shelf of many
        if (fabs(fall) <= enough * mean) break;  // one step more, to first order, is in `lost`
        double next = below + fall * R;
        if (!(next < 0.0) || next == below) break;
        below = next;
    }
    if constexpr (R > 2 && sizeof(C) == 4) s = sweep_wide<R>(x, n, (double)top_, below);
    return Edge{below, (s.s0 - 1.0) / s.s1};
}

template <class C, int R>
inline void sweep_write(C *to, const C *x, int64_t begin, int64_t end, int64_t n, C top_, Edge edge, bool past) {
    const Ground<C, R> ground(top_, edge.below);
    const C s = (C)Power<R>::slope;
    const vec<C> a = splat(ground.near), l = splat(ground.rest), lost = splat((C)edge.lost);
    if constexpr (R > 2 && sizeof(C) == 4) {
        const WideGround<R> wide((double)top_, edge.below);
        auto half = [&](vd v) {
            const vd u = wide.u(v);
            return larger(wide.rate(u) * (u - edge.lost), vd{});
        };
        return write(to, begin, end, past, [&](int64_t i) ANYMAX_EACH {
            vec<C> v = load_or(x, i, n, -infinity<C>);
            return join(half(low(v)), half(high(v)));
        });
    }
    write(to, begin, end, past, [&](int64_t i) ANYMAX_EACH {
        vec<C> u = larger((load_or(x, i, n, -infinity<C>) - a) * s + l, vec<C>{});
        vec<C> rate = u > vec<C>{} ? splat(C(1)) : vec<C>{};
        for (int r = 1; r < R; r++) rate = r == 1 ? u : rate * u;
        return larger(rate * (u - lost), vec<C>{});
    });
}

// The cells that reach above the bound.
template <class C>
inline int64_t cells_above(const Scan<C> &s, C bound) {
    constexpr int64_t W = width<C>;
    const vec<C> high = splat(s.top), limit = splat(bound);
    int64_t above = 0;
    for (int64_t k = 0; k < s.count; k++) above += __builtin_popcount(bits((load(s.cells + k * W) - high) > limit));
    return above;
}
// True where they are so many that the candidates would be most of the row.
template <class C>
inline bool crowded(const Scan<C> &s, C bound) {
    return cells_above(s, bound) * 5 > s.count * width<C> * 4;
}

// -- above alpha = 2: the link is infinitely steep at the edge of the support, so the row is anchored at its smallest supported score ---------

// sum over y > anchor of (q^c + c (y - anchor))^r, and its slope in q but for the anchor's own.
inline double steep_sum(const double *y, int64_t count, double anchor, double c, double q, double *slope) {
    constexpr int64_t W = width<double>;
    const double r = 1.0 / c, base = q > 0.0 ? ::exp(c * ::log(q)) : 0.0, log_q = q > 0.0 ? ::log(q) : 0.0;
    vd s0{}, s1{};
    for (int64_t i = 0; i < count; i += W) {
        const vd gap = load(y + i) - anchor;
        const vl in = gap > vd{};
        if (!bits(in)) continue;
        const vd l = log(in ? gap * c + base : all<vd>(1.0)) * r;
        s0 += in ? exp(l) : vd{};
        if (slope && q > 0.0) s1 += in ? exp((log_q - l) * (c - 1.0)) : vd{};
    }
    if (slope) *slope = sum(s1);
    return sum(s0);
}

// The smallest y of the support: that for which the ones above it sum to less than 1. y ends in -1e300 up to a whole vector.
inline double steep_anchor(const double *y, int64_t count, double c) {
    constexpr int64_t W = width<double>;
    auto least_from = [&](double from, bool itself) {  // the smallest y above it
        vd least = all<vd>(inf64);
        for (int64_t i = 0; i < count; i += W) {
            const vd v = load(y + i);
            const vl in = itself ? v >= from : v > from;
            least = in ? (v < least ? v : least) : least;
        }
        return -top(-least);
    };
    vd most = all<vd>(-1e300);
    for (int64_t i = 0; i < count; i += W) most = larger(most, load(y + i));
    double inside = top(most), least = least_from(-1e299, true), empty = inside;  // none lies in [empty, inside)
    for (double next = least; least < inside;) {
        if (steep_sum(y, count, next, c, 0.0, nullptr) < 1.0)
            inside = empty = next;
        else
            least = least_from(next, false);
        do {
            const double middle = 0.5 * (least + empty);
            next = middle > least && middle < empty ? least_from(middle, true) : least;
            if (next == inside) empty = middle;
        } while (next == inside && least < inside);
    }
    return inside;
}

// tau - top of a few cells, which is no larger than the row's, by bisection of its logarithm.
template <class C>
inline double steep_bound(double c, const Scan<C> &s) {
    vec<C> a[FEW];
    const int used = few_cells(s, a);
    const vec<C> high = splat(s.top);
    double near = ::exp(-c * ::log((double)(used * width<C>))) / c, far = 1.0 / c;  // the cells alike, or all but one far below
    for (int turn = 0; turn < 12; turn++) {
        const double middle = sqrt(near * far);
        vec<C> total{};
        for (int j = 0; j < used; j++) {
            const vec<C> u = (a[j] - high) * (C)c + (C)(c * middle);
            total += u > vec<C>{} ? exp(log(u) * (C)(1.0 / c)) : vec<C>{};
        }
        (sum(total) >= C(1) ? far : near) = middle;
    }
    return -far * (1.0 + 1e-5 * (10.0 + c));
}

// Replaces y by p; returns tau - top. `above` has room for as many.
inline double steep(double c, double *y, int64_t count, double *above) {
    constexpr int64_t W = width<double>;
    const double anchor = steep_anchor(y, count, c);
    int64_t size = 0, more = 0;  // at the anchor and above it
    for (int64_t i = 0; i < count; i++) {
        above[more] = y[i];
        more += y[i] > anchor, size += y[i] == anchor;
    }
    for (int64_t i = more; i < more + W; i++) above[i] = -1e300;
    double low = 0.0, high = 1.0 / (double)size, q = high;
    for (int turn = 0; turn < 200; turn++) {
        double slope, excess = steep_sum(above, more, anchor, c, q, &slope) + (double)size * q - 1.0;
        if (excess > 0.0)
            high = q;
        else
            low = q;
        double next = q - excess / (slope + (double)size);
        if (!(next > low && next < high)) next = fabs(excess) < 1e-15 ? q : 0.5 * (low + high);
        if (fabs(next - q) <= 2e-16 * q || next == q) {
            q = next;
            break;
        }
        q = next;
    }
    const double base = q > 0.0 ? ::exp(c * ::log(q)) : 0.0, r = 1.0 / c;
    for (int64_t i = 0; i < count; i += W) {
        const vd gap = load(y + i) - anchor;
        const vl in = gap > vd{};
        vd p = gap == vd{} ? all<vd>(q) : vd{};
        if (bits(in)) p = in ? exp(log(in ? gap * c + base : all<vd>(1.0)) * r) : p;
        store(y + i, p);
    }
    return anchor - base / c;
}

}  // namespace ANYMAX_UNIT
