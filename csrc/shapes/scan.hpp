// One read of a row: its maximum, the maxima of its blocks, and what lies above a bound.
#pragma once

#include "core/rows.hpp"
#include "plan.hpp"

namespace ANYMAX_UNIT {

// Maxima of blocks: `cells` has one vector a block of `block` vectors, each lane the maximum of its `block` entries.
template <class C>
constexpr int64_t block_of(int64_t n) {
    return n < BLOCKS_OF_16_FROM<C> ? 4 : 16;
}

template <class C>
struct Scan {
    C top;
    bool sound;  // no NaN and no +inf
    C *cells;    // vectors of maxima of disjoint sets of entries
    int64_t count, block;
    double level;  // where to begin on the row, by them; 0 where that is not known
};

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
        s.top = highest_lane(high);
        s.sound = every<C>(ok);
        return s;
    }
    int64_t count = pieces_of(n);
    C *tops = scratch.take<C>(PARTIAL, 2 * count);
    if (!tops) return s;
    C *cells = s.cells;
    pieces(team, n, [&](int64_t k, int64_t b, int64_t e) {
        vec<C> h = splat(-infinity<C>);
        ints<C> o = h < infinity<C>;
        scan_blocks<C, 16>(x + b, 0, e - b, cells + b / 16, h, o);
        tops[2 * k] = highest_lane(h);
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
struct Top {
    C high;
    bool sound;  // no NaN and no +inf
};
template <class C>
inline Top<C> scan_top(const C *x, int64_t n) {
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
    return Top<C>{highest_lane(larger(larger(a, b), larger(c, d))), every<C>(ok)};
}

// f(begin, end) of each piece, in order; nothing where there is no memory.
template <class T, class F>
inline T *of_pieces(int64_t n, Scratch &scratch, const Team &team, F f) {
    T *const part = scratch.take<T>(PARTIAL, pieces_of(n));
    if (part) pieces(team, n, [&](int64_t k, int64_t b, int64_t e) { part[k] = f(b, e); });
    return part;
}

// The same of a row that threads share.
template <class C>
inline Top<C> scan_top(const C *x, int64_t n, Scratch &scratch, const Team &team) {
    if (n <= PIECE) return scan_top(x, n);
    Top<C> all{-infinity<C>, true};
    const Top<C> *const part =
        of_pieces<Top<C>>(n, scratch, team, [=](int64_t b, int64_t e) { return scan_top(x + b, e - b); });
    for (int64_t k = 0; part && k < pieces_of(n); k++) all = {larger(all.high, part[k].high), all.sound && part[k].sound};
    return all;
}

// Maxima of a few disjoint sets of entries, in up to four vectors: how many.
constexpr int CELL_VECTORS = 4;
template <class C>
inline int few_cells(const Scan<C> &s, vec<C> *a) {
    constexpr int64_t W = width<C>;
    for (int j = 0; j < CELL_VECTORS; j++) a[j] = splat(-infinity<C>);
    int64_t k = 0;
    for (; k + CELL_VECTORS <= s.count; k += CELL_VECTORS)
        for (int j = 0; j < CELL_VECTORS; j++) a[j] = larger(a[j], load(s.cells + (k + j) * W));
    for (; k < s.count; k++) a[k % CELL_VECTORS] = larger(a[k % CELL_VECTORS], load(s.cells + k * W));
    return s.count < CELL_VECTORS ? (int)s.count : CELL_VECTORS;
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

// -- candidates

template <class C>
struct Candidates {
    C *value;
    int32_t *index;
    int64_t count;
};

// All entries where inside(vector) marks their lanes, as it marks those of the cells that have one. ASK: no vectors are taken
// without asking, not even of a short row, whose cells have told already.
template <bool ASK, class C, class F>
inline Candidates<C> collect_where(const C *x, int64_t n, const Scan<C> &s, Scratch &scratch, F inside) {
    constexpr int64_t W = width<C>;
    Candidates<C> c{scratch.take<C>(VALUES, n), scratch.take<int32_t>(INDICES, n), 0};
    if (!c.value || !c.index) return c;
    const C *const cells = s.cells;
    const int64_t count = s.count, block = s.block * W;
    int64_t at = 0;
    for (int64_t k = 0; k < count; k++) {
        if (!bits(inside(load(cells + k * W)))) continue;
        int64_t i = k * block;
        const int64_t end = i + block;
        for (; end > n && i < n; i += W) {  // the last one
            const vec<C> v = load_or(x, i, n, -infinity<C>);
            at = append(v, inside(v), (int32_t)i, c.value, c.index, at);
        }
        for (; i < end && end <= n; i += 4 * W) {
            const vec<C> a = load(x + i), b = load(x + i + W), d = load(x + i + 2 * W), e = load(x + i + 3 * W);
            const ints<C> ma = inside(a), mb = inside(b), md = inside(d), me = inside(e);
            if ((ASK || block > 4 * W) && !bits(ma | mb | md | me)) continue;
            at = append(a, ma, (int32_t)i, c.value, c.index, at);
            at = append(b, mb, (int32_t)(i + W), c.value, c.index, at);
            at = append(d, md, (int32_t)(i + 2 * W), c.value, c.index, at);
            at = append(e, me, (int32_t)(i + 3 * W), c.value, c.index, at);
        }
    }
    c.count = at;
    return c;
}
// Those with x - top > bound (an entry of -inf never).
template <class C>
inline Candidates<C> collect(const C *x, int64_t n, const Scan<C> &s, C bound, Scratch &scratch) {
    const vec<C> high = splat(s.top), limit = splat(bound);
    return collect_where<true>(x, n, s, scratch, [=](vec<C> v) ANYMAX_EACH { return (v - high) > limit; });
}
// Those with x >= bound (the same).
template <class C>
inline Candidates<C> collect_from(const C *x, int64_t n, const Scan<C> &s, C bound, Scratch &scratch) {
    const vec<C> limit = splat(bound == -infinity<C> ? -largest_number<C> : bound);
    return collect_where<false>(x, n, s, scratch, [=](vec<C> v) ANYMAX_EACH { return v >= limit; });
}

// The probabilities above `least` of a row; NaN counts as one. Where there are more than `limit` it stops, with a count above
// that; if `spread`, also where there would be more if they went on as they began.
template <class C>
inline Candidates<C> nonzeros(const C *p, int64_t n, C least, int64_t limit, Scratch &scratch, bool spread = false) {
    constexpr int64_t W = width<C>;
    const vec<C> none = splat(least);
    Candidates<C> c{scratch.take<C>(VALUES, n + W), scratch.take<int32_t>(INDICES, n + W), 0};
    if (!c.value || !c.index) return c;
    int64_t at = 0, i = 0;
    for (; i + 8 * W <= n && at <= limit; i += 8 * W) {
        ints<C> m[8], any{};
        for (int j = 0; j < 8; j++) {
            m[j] = ~(load(p + i + j * W) <= none);
            any |= m[j];
        }
        if (!bits(any)) continue;
        for (int j = 0; j < 8; j++)
            if (bits(m[j])) at = append(load(p + i + j * W), m[j], (int32_t)(i + j * W), c.value, c.index, at);
        if (spread && at * n > limit * (i + n / 8)) at = limit + 1;
    }
    for (; i < n && at <= limit; i += W) {
        const vec<C> v = load_or(p, i, n, C(0));
        const ints<C> m = ~(v <= none);
        if (bits(m)) at = append(v, m, (int32_t)i, c.value, c.index, at);
    }
    c.count = at;
    return c;
}

}  // namespace ANYMAX_UNIT
