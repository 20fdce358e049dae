// The few scores of a row among which a nucleus ends, found by weighing what reaches several levels of their exponentials at
// once.
#pragma once

#include "shapes/select.hpp"

namespace ANYMAX_UNIT {

// Scores with their exponentials e, and the mass of all that are larger.
template <class C>
struct Shortlist {
    const C *x, *e;
    int64_t n;
    double beyond;
};

// How many levels are weighed at once: as many as registers hold, with two sums each. Fewer suffice around a guess.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int LEVELS = 8;
#else
constexpr int LEVELS = 4;
#endif
constexpr int AROUND = 4;

// What a piece of a row has: the mass that reaches each level; how many scores lie in the bracket, and the mass above it.
struct Weighed {
    double mass[LEVELS], above;
    int64_t count;
};

// mass[j] = the sum of all e >= level[j] in [begin, end).
template <int COUNT, class C>
inline void weigh(const C *e, int64_t begin, int64_t end, const C *level, double *mass) {
    constexpr int64_t W = width<C>;
    vec<C> t[COUNT];
    vd wide[COUNT];
    for (int j = 0; j < COUNT; j++) t[j] = splat(level[j]), wide[j] = vd{};
    int64_t i = begin;
    while (i < end) {
        vec<C> part[COUNT] = {};
        const int64_t stop = i + 16 * W <= end ? i + 16 * W : end;
        for (; i + W <= stop; i += W) {
            const vec<C> v = load(e + i);
            for (int j = 0; j < COUNT; j++) part[j] = plus_from(part[j], v, t[j]);
        }
        if (i < stop) {
            const vec<C> v = load_part(e + i, end - i, C(0));
            for (int j = 0; j < COUNT; j++) part[j] = plus_from(part[j], v, t[j]);
            i = end;
        }
        for (int j = 0; j < COUNT; j++) wide[j] = widen_add(wide[j], part[j]);
    }
    for (int j = 0; j < COUNT; j++) mass[j] = sum(wide[j]);
}

// A bracket of e in which the masses of the largest reach `goal`: those from high on don't, those from low on do.
template <class C>
struct Bracket {
    static constexpr double DOUBT =
        sizeof(C) == 4 ? 0x1p-18 : 0x1p-46;  // how far sums, and the order of e beside that of the scores, may be off
    C low, high;
    double goal;

    // By the masses that reach some of the rising levels.
    template <int COUNT>
    void narrow(const C *level, const double *mass, double beyond) {
        for (int j = 0; j < COUNT; j++)
            if (level[j] > low && beyond + mass[j] >= goal * (1.0 + DOUBT)) low = level[j];
        for (int j = COUNT - 1; j >= 0; j--)
            if (level[j] < high && beyond + mass[j] < goal * (1.0 - DOUBT)) high = level[j];
    }

    // Levels that divide it evenly in their exponents.
    void divide(C *level) const {
        const int64_t from = rank(low), step = (rank(high < C(1) ? high : C(1)) - from) / (LEVELS + 1);
        for (int j = 0; j < LEVELS; j++) level[j] = unrank<C>(from + step * (j + 1));
    }

    // The scores of [begin, end) that lie in it, and their e, to values and weights, which may be x and e themselves.
    void copy_out(const C *x, const C *e, int64_t begin, int64_t end, C *values, C *weights, Weighed &to) const {
        constexpr int64_t W = width<C>;
        const vec<C> least = splat(low * (C)(1.0 - DOUBT)), most = splat(high * (C)(1.0 + DOUBT));
        vd wide{};
        int64_t at = 0, i = begin;
        vec<C> above{};
        const auto one = [&](vec<C> v, vec<C> score) ANYMAX_EACH {
            above = plus_from(above, v, most);
            const uint32_t inside = bits_from(v, least) & ~bits_from(v, most);
            pack(score, inside, values + at);
            at += pack(v, inside, weights + at);
        };
        for (; i + 4 * W <= end; i += 4 * W) {
            for (int64_t j = i; j < i + 4 * W; j += W) one(load(e + j), load(x + j));
            wide = widen_add(wide, above), above = vec<C>{};
        }
        for (; i < end; i += W) one(load_or(e, i, end, C(0)), load_or(x, i, end, C(0)));
        wide = widen_add(wide, above);
        to.above = sum(wide), to.count = at;
    }
};

// Levels of e around the one that holds a share of their mass where log e, weighed by e, is normal: by its mean and deviation
// in a sample.
template <class C>
inline void levels_around(const C *x, const C *e, int64_t n, C top, double share, C *level) {
    constexpr int64_t W = width<C>, BLOCK = 4 * W;
    const vec<C> high = splat(top), least = splat(C(-200));
    vd mass{}, first{}, second{};
    const int64_t step = (n + SAMPLED - 1) / SAMPLED * BLOCK;
    for (int64_t i = 0; i + BLOCK <= n; i += step) {
        vec<C> a{}, b{}, c{};
        for (int64_t j = i; j < i + BLOCK; j += W) {
            const vec<C> y = larger(load(x + j) - high, least), w = load(e + j), product = w * y;
            a += w, b += product, c += product * y;
        }
        mass = widen_add(mass, a), first = widen_add(first, b), second = widen_add(second, c);
    }
    const double z = sum(mass), mean = sum(first) / z, variance = sum(second) / z - mean * mean;
    const double deviation = ::sqrt(variance > 0.0 ? variance : 0.0),
                 quantile = share < 0.5 ? normal_above(share) : -normal_above(1.0 - share);
    for (int j = 0; j < AROUND; j++) {
        const C y = (C)(mean + deviation * (quantile + 0.2 * j - 0.3));
        level[j] = y < C(0) ? y : C(0);
    }
    for (int64_t j = 0; j < AROUND; j += W) {
        vec<C> y = load_or(level, j, AROUND, C(0));
        exp_below<1>(&y);
        store_within(level, j, AROUND, y);
    }
}

// The few of the scores x, with e = exp(x - top), among which the largest hold `share` of the mass z; all e below `low` are
// surely less. What lies in a bracket is copied out until it is little, or hardly less than before.
template <class C>
inline Shortlist<C> shortlist(const C *x, const C *e, int64_t n, C top, double share, double z, C low, Scratch &scratch,
                              const Team &team) {
    constexpr int64_t W = width<C>;
    const int64_t count = pieces_of(n);
    C *values = scratch.take<C>(SORTED, n + count * W), *weights = scratch.take<C>(WIDE, n + count * W);
    Weighed *part = scratch.take<Weighed>(PARTIAL, count);
    Shortlist<C> list{x, e, n, 0.0};
    if (scratch.failed) return list;
    Bracket<C> bracket{low, C(2), share * z};
    C level[LEVELS];
    if (n >= GUESSED_FROM) {
        levels_around(x, e, n, top, share, level);
        pieces(team, n, [&](int64_t k, int64_t begin, int64_t end) { weigh<AROUND>(e, begin, end, level, part[k].mass); });
        for (int64_t k = 1; k < count; k++)
            for (int j = 0; j < AROUND; j++) part[0].mass[j] += part[k].mass[j];
        bracket.template narrow<AROUND>(level, part[0].mass, 0.0);
        pieces(team, n, [&](int64_t k, int64_t begin, int64_t end) {
            bracket.copy_out(x, e, begin, end, values + begin + k * W, weights + begin + k * W, part[k]);
        });
        list = Shortlist<C>{values, weights, 0, 0.0};
        for (int64_t k = 0; k < count; k++) {
            const int64_t from = k * (PIECE + W);
            if (k) memmove(values + list.n, values + from, (size_t)part[k].count * sizeof(C));
            if (k) memmove(weights + list.n, weights + from, (size_t)part[k].count * sizeof(C));
            list.n += part[k].count, list.beyond += part[k].above;
        }
    }
    for (int64_t most = list.n; list.n >= WEIGHED_AT_ONCE && list.n <= most;) {
        most = list.n / 2;
        bracket.divide(level);
        weigh<LEVELS>(list.e, 0, list.n, level, part[0].mass);
        bracket.template narrow<LEVELS>(level, part[0].mass, list.beyond);
        bracket.copy_out(list.x, list.e, 0, list.n, values, weights, part[0]);
        list = Shortlist<C>{values, weights, part[0].count, list.beyond + part[0].above};
    }
    return list;
}

}  // namespace ANYMAX_UNIT
