// What truncations leave of a row, one after the other: of all of it, or of entries that were copied out, in the row's order.
#pragma once

#include "shapes/nucleus.hpp"

namespace ANYMAX_UNIT {

template <class C>
struct Left {
    const C *value;  // the scores
    C *own;          // the same memory where it may be written; NULL: it is the caller's row
    int32_t *index;  // their classes; NULL: all of the row
    int64_t count;
    C top;
    double scale;   // by which the scores are still to be multiplied: one over the temperatures so far
    double offset;  // what was taken from them, as they are here
    Scan<C> cells;  // of all of the row
    bool ended;     // all of the row is here, but only what `end` leaves of it counts; its exponentials are `weight`
    Nucleus<C> end;
    C *weight;
};

template <class C>
inline Left<C> all_of(const C *x, int64_t n, Scratch &scratch) {
    const Scan<C> s = scan(x, n, scratch, Team{nullptr});
    return Left<C>{x, nullptr, nullptr, n, s.top, 1.0, 0.0, s, false, Nucleus<C>{}, nullptr};
}

// Copied out: entries from `bound` on where all of the row was here, and those that are here otherwise.
template <class C>
inline Candidates<C> copied_out(const Left<C> &l, C bound, Scratch &scratch) {
    if (l.index) return Candidates<C>{l.own, l.index, l.count};
    return collect_from(l.value, l.count, l.cells, bound, scratch);
}
template <class C>
inline void become(Left<C> &l, const Candidates<C> &c, int64_t count) {
    l.value = l.own = c.value, l.index = c.index, l.count = count;
    l.ended = false;
}

// What is marked as ended is copied out.
template <class C>
inline void settle(Left<C> &l, Scratch &scratch) {
    if (!l.ended) return;
    const Candidates<C> c = copied_out(l, l.end.last, scratch);
    if (!scratch.failed) become(l, c, keep_first(c.value, c.index, c.count, l.end.last, l.end.equal));
}

// The scores less the largest, by the temperatures so far.
template <class C>
inline void warm(Left<C> &l, Scratch &scratch) {
    if (l.scale == 1.0) return;
    C *to = l.own ? l.own : scratch.take<C>(LEFT_SCORES, l.count + width<C>);
    if (!to) return;
    const vec<C> high = splat(l.top), scale = splat((C)l.scale);
    write(to, 0, l.count, false,
          [&](int64_t i) ANYMAX_EACH { return (load_or(l.value, i, l.count, -infinity<C>) - high) * scale; });
    l.offset = (l.offset + (double)l.top) * l.scale;
    l.value = l.own = to, l.top = C(0), l.scale = 1.0;
    if (!l.index) l.cells = scan(to, l.count, scratch, Team{nullptr});
}

// Entries that hold the k largest, and the k-th largest of them; the lowest where they are no more.
template <class C>
inline C rank_of(const Left<C> &l, int64_t k, Candidates<C> &c, Scratch &scratch) {
    const C bound = l.index ? -infinity<C> : reached_by(l.cells, k);
    c = copied_out(l, bound, scratch);
    if (scratch.failed) return bound;
    const C low = lowest_of(c.value, c.count);
    return c.count > k ? select(c.value, c.count, k, 0, larger(bound, low), c.count, l.top) : low;
}

// The k largest, of equal ones the first.
template <class C>
inline void largest(Left<C> &l, int64_t k, Scratch &scratch) {
    if (k >= l.count) return;
    Candidates<C> c;
    const C edge = rank_of(l, k, c, scratch);
    if (scratch.failed) return;
    become(l, c, c.count > k ? keep_largest(c, edge, k) : c.count);
}

// Those for which in(value, place) holds.
template <class C, class F>
inline void filter(Left<C> &l, const Candidates<C> &c, F in) {
    int64_t at = 0;
    for (int64_t i = 0; i < c.count; i++) {
        const bool inside = in(c.value[i], i);
        c.value[at] = c.value[i], c.index[at] = c.index[i];
        at += inside;
    }
    become(l, c, at);
}

// Those not deeper below the largest than `deep`, all of which are `bound` or more; where they are fewer than `least`, the
// `least` largest, or all that are not below the last of these (`alike`).
template <class C>
inline void keep(Left<C> &l, C bound, C deep, int64_t least, bool alike, Scratch &scratch) {
    Candidates<C> c = copied_out(l, bound, scratch);
    const C high = l.top;
    if (!scratch.failed && (least > 1 || !(C(0) >= deep))) {
        int64_t count = 0;
        for (int64_t i = 0; i < c.count; i++) count += c.value[i] - high >= deep;
        if (count < least && !alike) return largest(l, least, scratch);
        if (count < least) {
            const C edge = rank_of(l, least, c, scratch);
            if (!scratch.failed) filter(l, c, [=](C v, int64_t) { return v >= edge; });
            return;
        }
    }
    if (!scratch.failed) filter(l, c, [=](C v, int64_t) { return v - high >= deep; });
}

// Those within `below` of the largest: x - top >= -below, with room for rounding in the bound.
template <class C>
inline void within(Left<C> &l, double below, int64_t least, bool alike, Scratch &scratch) {
    const double bound = (double)l.top - below;
    const C limit = (C)(bound - 1e-5 * (1.0 + (bound < 0 ? -bound : bound) + absolute(below)));
    keep(l, limit == limit ? limit : -infinity<C>, (C)-below, least > 1 ? least : 1, alike, scratch);
}

// sum (x - top) e over the e that are above 0.
template <class C>
inline double drift_of(const Left<C> &l, const C *e) {
    constexpr int64_t W = width<C>;
    vd wide{};
    const vec<C> high = splat(l.top);
    for (int64_t i = 0; i < l.count; i += W) {
        const vec<C> w = load_or(e, i, l.count, C(0)), y = load_or(l.value, i, l.count, C(0)) - high;
        wide = widen_add(wide, w > vec<C>{} ? w * y : vec<C>{});
    }
    return sum(wide);
}

// The exponentials of x - top, their sum, and the entropy of softmax.
template <class C>
struct Mass {
    C *e;
    double z, entropy;
};
template <class C>
inline Mass<C> mass_of(const Left<C> &l, Scratch &scratch) {
    C *e = scratch.take<C>(EXTRA, l.count + width<C>);
    if (!e) return Mass<C>{e, 1.0, 0.0};
    const double z = exp_sum<C, true>(l.value, 0, l.count, l.top, e);
    return Mass<C>{e, z, ::log(z) - drift_of(l, e) / z};
}

// A share that sums of rounded exponentials reach where exact ones would.
template <class C>
constexpr double reached(double share, int64_t n) {
    return n > EDGE_MOST ? share : share * (1.0 - (sizeof(C) == 4 ? 0x1p-21 : 0x1p-48));
}

// The fewest largest whose exponentials hold a share of their sum.
template <class C>
inline void nucleus(Left<C> &l, double share, int64_t least, Scratch &scratch) {
    if (!(share < 1.0)) return;
    C *e = scratch.take<C>(EXTRA, l.count + width<C>);
    if (!e) return;
    const double z = exp_sum<C, true>(l.value, 0, l.count, l.top, e);
    const Nucleus<C> end = nucleus_end(l.value, e, l.count, reached<C>(share, l.count), z, l.top, scratch, Team{nullptr});
    if (scratch.failed) return;
    if (least > 1) {
        int64_t kept = 0;
        for (int64_t i = 0; i < l.count; i++) kept += l.value[i] > end.last;
        if (kept + end.equal < least) return largest(l, least, scratch);
    }
    if (!l.index) {
        l.ended = true, l.end = end, l.weight = e;
        return;
    }
    l.count = keep_first(l.own, l.index, l.count, end.last, end.equal);
}

// Those whose -log p is nearest to its mean, the entropy, up to a share of the mass; equally near ones together. Meister et al.
// 2023.
template <class C>
inline void typical(Left<C> &l, double share, int64_t least, Scratch &scratch) {
    const Candidates<C> c = copied_out(l, -infinity<C>, scratch);
    if (scratch.failed) return;
    if (!l.index) become(l, c, c.count);
    const Mass<C> m = mass_of(l, scratch);
    C *near = scratch.take<C>(LEFT_KEYS, l.count + width<C>);
    if (scratch.failed) return;
    const C centre = (C)(::log(m.z) - m.entropy);
    C nearest = -infinity<C>, farthest = C(0);
    for (int64_t i = 0; i < l.count; i++) {
        near[i] = -absolute(l.value[i] - l.top - centre);
        nearest = larger(nearest, near[i]), farthest = near[i] < farthest ? near[i] : farthest;
    }
    C last = farthest;
    if (share < 1.0)
        last = weigh_down(near, m.e, l.count, reached<C>(share, l.count) * m.z, m.z, 0.0, farthest,
                          nearest + absolute(nearest) * C(1e-5) + C(1e-6), scratch)
                   .last;
    if (scratch.failed) return;
    if (least > 1 && count_from(near, l.count, last) < least)
        last = select(near, l.count, least < l.count ? least : l.count, 0, farthest, l.count, nearest);
    int64_t at = 0;
    C high = -infinity<C>;
    for (int64_t i = 0; i < l.count; i++) {
        const bool inside = near[i] >= last;
        high = inside ? larger(high, l.value[i]) : high;
        l.own[at] = l.own[i], l.index[at] = l.index[i];
        at += inside;
    }
    l.count = at, l.top = high;
}

// sum f(x) over the scores, as doubles.
template <class C, class F>
inline double wide_sum(const C *x, int64_t n, F f) {
    constexpr int64_t W = width<double>;
    vd total{};
    for (int64_t i = 0; i < n; i += W) total += f(load_wide_or(x, i, n, -inf64));
    return sum(total);
}

// n standard deviations, of all scores that are finite.
template <class C>
inline double deviations(const Left<C> &l, double n) {
    constexpr int64_t W = width<C>;
    vec<C> deepest = splat(l.top);
    for (int64_t i = 0; i < l.count; i += W) {
        const vec<C> v = load_or(l.value, i, l.count, -infinity<C>);
        deepest = smaller(deepest, v > -infinity<C> ? v : splat(l.top));
    }
    const double unit = (double)l.top - (double)lowest_lane(deepest);  // squares of large scores must not overflow
    if (!(unit > 0.0)) return 0.0;
    const vd high = splat((double)l.top), rate = splat(1.0 / unit), out = splat(-inf64);
    const double count = wide_sum(l.value, l.count, [=](vd v) { return v > out ? splat(1.0) : vd{}; });
    const vd mean = splat(wide_sum(l.value, l.count, [=](vd v) { return v > out ? (v - high) * rate : vd{}; }) / count);
    const double square = wide_sum(l.value, l.count, [=](vd v) {
        const vd d = (v - high) * rate - mean;
        return v > out ? d * d : vd{};
    });
    return n * unit * ::sqrt(square / count);
}

// Of those with a probability of `share` or more, the least likely stays, of equal ones the last, and the others go.
template <class C>
inline void without_top(Left<C> &l, double share, Scratch &scratch) {
    const double below = -::log(share * exp_sum<C, false>(l.value, 0, l.count, l.top, nullptr));
    if (!(below >= 0.0)) return;  // no class has so much
    const C deep = (C)-below, high = l.top;
    const Candidates<C> c = copied_out(l, -infinity<C>, scratch);
    if (scratch.failed) return;
    C lowest = infinity<C>;
    int64_t last = 0;
    for (int64_t i = 0; i < c.count; i++)
        if (c.value[i] - high >= deep && c.value[i] <= lowest) lowest = c.value[i], last = i;
    filter(l, c, [=](C v, int64_t i) { return v < lowest || i == last; });
    l.top = lowest;
}

template <class C>
inline void take(Left<C> &l, const anymax_step &step, double value, Scratch &scratch) {
    const int64_t least = step.least;
    settle(l, scratch);
    if (step.kind == ANYMAX_LARGEST_SCORES)
        return largest(l, value > (double)least ? (value < 9e15 ? (int64_t)value : INT64_MAX) : least, scratch);
    if (step.kind == ANYMAX_TEMPERATURE) {
        if (l.scale / value <= (double)largest_number<C>)
            l.scale /= value;
        else
            within(l, 0.0, 1, true, scratch), l.scale = 1.0, l.offset = -(double)l.top;  // the largest alone, as 0
        return;
    }
    warm(l, scratch);
    if (scratch.failed) return;
    switch (step.kind) {
        case ANYMAX_NUCLEUS_MASS: return nucleus(l, value, least, scratch);
        case ANYMAX_SHARE_OF_LARGEST: return within(l, -::log(value), least, false, scratch);
        case ANYMAX_DEVIATIONS: return within(l, deviations(l, value), least, true, scratch);
        case ANYMAX_LEAST_SHARE:
            return within(l, -::log(value * exp_sum<C, false>(l.value, 0, l.count, l.top, nullptr)), least, true, scratch);
        case ANYMAX_ETA: {
            const Mass<C> m = mass_of(l, scratch);
            const double eta = ::sqrt(value) * ::exp(-m.entropy);
            return within(l, -::log((eta < value ? eta : value) * m.z), least, true, scratch);
        }
        case ANYMAX_TYPICAL: return typical(l, value, least, scratch);
        default: return without_top(l, value, scratch);
    }
}

}  // namespace ANYMAX_UNIT
