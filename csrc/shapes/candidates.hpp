// The support of a row, of every map that has zeros.
#pragma once

#include "links/steep.hpp"
#include "shapes/nucleus.hpp"
#include "shapes/select.hpp"
#include "shapes/threshold.hpp"

namespace ANYMAX_UNIT {

// tau - top of a few cells, which is no larger than the row's, by bisection of its logarithm.
template <class C>
inline double steep_bound(double c, const Scan<C> &s) {
    vec<C> a[CELL_VECTORS];
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

template <class C>
static Support<C> steep_row(double c, const C *x, int64_t n, Scratch &scratch, const Team &team) {
    Scan<C> s = scan(x, n, scratch, team);
    if (scratch.failed || !s.sound || s.top == -infinity<C>) return poisoned<C>(s.sound, s.top != -infinity<C>);
    C bound = (C)(-1.0 / c * (1.0 + 1e-6));
    if (cells_above(s, bound) >= STEEP_CELLS_FROM) bound = larger(bound, (C)steep_bound(c, s));
    if (!(bound < 0)) bound = C(-1e-37);  // the largest score itself is above any
    Candidates<C> k = collect(x, n, s, bound, scratch);
    double *y = widen(k, s.top, scratch);
    double *above = scratch.take<double>(SORTED, k.count + width<double>);
    if (scratch.failed) return poisoned<C>(true, false);
    double tau = steep(c, y, k.count, above);
    return Support<C>{k.index, y, k.count, (double)s.top + tau, true, true};
}

// Of y the level in [0, 1] where clip(y + level, 0, 1) sums to k, and what each share between 0 and 1 then has too much.
inline double budget_level(const double *y, int64_t count, double k, vd &lost) {
    const Clip link;
    // a level of 1 itself is that of a row whose k largest scores lie 1 and more above the others
    Bracketed<double, Clip> rule{link, 0.0, 1.0 + 0x1p-52, k, k * 0x1p-53, 0.0};
    double level = 0.5;
    const auto s = solve(row_of_doubles(y, (count + width<double> - 1) / width<double>), link, level, true, 200, rule);
    lost = all<vd>(left_over(s, k));
    return level;
}

// clip(y + level, 0, 1) that sums to k: the anchor is the ceil(k)-th largest score, where the level lies in [0, 1].
template <class C>
static Support<C> budget_row(double k, const C *x, int64_t n, Scratch &scratch, const Team &team) {
    Scan<C> s = scan(x, n, scratch, team);
    if (scratch.failed || !s.sound || s.top == -infinity<C> || k != k)
        return poisoned<C>(s.sound && k == k, s.top != -infinity<C>);
    int64_t place = k < (double)n ? (int64_t)::ceil(k) : n;
    if (place < 1) place = 1;
    const C reached = reached_by(s, place);
    C bound = reached;
    if (reached != -infinity<C>) {
        const C slack = C(1e-6) * (C(1) + (reached < 0 ? -reached : reached));
        bound = reached - C(1) - slack;
        if (s.block == 16 &&
            cells_above(s, bound - s.top) * 2 > s.count * width<C>) {  // of a long row of much alike scores: by all its cells
            const int64_t cells = s.count * width<C>;
            double *y = scratch.take<double>(WIDE, cells);
            if (!y) return poisoned<C>(true, false);
            for (int64_t i = 0; i < cells; i += width<double>) store(y + i, load_wide(s.cells + i) - (double)reached);
            vd lost;
            bound = larger(bound, reached - (C)(budget_level(y, cells, k, lost) * (1.0 + 1e-6)) - slack);
        }
    }
    Candidates<C> c = collect_from(x, n, s, bound, scratch);
    if (scratch.failed) return poisoned<C>(true, false);
    const int64_t count = c.count;
    if (count < place) place = count;
    const C edge = select(c.value, count, place, 0, lowest_of(c.value, count), count, s.top);
    vec<C> least = splat(s.top);
    for (int64_t i = 0; i < count; i += width<C>) {
        const vec<C> v = load_or(c.value, i, count, infinity<C>);
        least = v >= edge ? smaller(least, v) : least;
    }
    const C anchor = lowest_lane(least);
    double *y = widen(c, anchor, scratch);
    if (scratch.failed) return poisoned<C>(true, false);
    if (k >= (double)count) {
        for (int64_t i = 0; i < count; i++) y[i] = 1.0;
        return Support<C>{c.index, y, count, (double)lowest_of(c.value, count) - 1.0, true, true};
    }
    vd lost;
    const double level = budget_level(y, count, k, lost);
    for (int64_t i = 0; i < count; i += width<double>) store(y + i, share(load(y + i) + level, lost));
    return Support<C>{c.index, y, count, (double)anchor - level, true, true};
}

template <class C>
static Support<C> truncated(Kept<C> kept, Scratch &scratch) {
    if (scratch.failed || !kept.sound || !kept.any()) return poisoned<C>(kept.sound, kept.any());
    const double z = exponentials(kept);
    double *p = scratch.take<double>(WIDE, kept.count + 8);
    if (!p) return poisoned<C>(true, false);
    const double scale = 1.0 / z;
    for (int64_t i = 0; i < kept.count; i++) p[i] = (double)kept.value[i] * scale;
    return Support<C>{kept.index, p, kept.count, (double)kept.top + ::log(z), true, true};
}

template <class C>
static Support<C> truncated(TruncationLink link, double param, const C *x, int64_t n, Scratch &scratch, const Team &team) {
    switch (link) {
        case LARGEST: return truncated(largest_row(x, n, (int64_t)param, scratch, team), scratch);
        case NUCLEUS: return truncated(nucleus_row(x, n, param, scratch, team), scratch);
    }
    return poisoned<C>(false, true);
}

template <class C>
static Support<C> above_threshold(ThresholdLink link, double param, const C *x, int64_t n, Scratch &scratch, const Team &team,
                                  Scan<C> *known) {
    const double c = param - 1.0;
    const auto solved = [&](const auto &l) { return threshold_row(l, x, n, ENTMAX_FINISH, known, scratch, team); };
    const auto curved = [&](double slope, double r, Finish finish) {
        if constexpr (sizeof(C) == 4)
            return threshold_row(Curve(slope, r), x, n, finish, known, scratch, team);
        else
            return threshold_row(AnyPower(slope, r), x, n, finish, known, scratch, team);
    };
    switch (link) {
        case POWER1: return solved(Power<1>());
        case POWER2: return solved(Power<2>());
        case POWER3:
            if constexpr (sizeof(C) == 8) return solved(Power<3>());
            return curved(c, 1.0 / c, ENTMAX_FINISH);
        case POWER4:
            if constexpr (sizeof(C) == 8) return solved(Power<4>());
            return curved(c, 1.0 / c, ENTMAX_FINISH);
        case CURVE: return curved(c, 1.0 / c, ENTMAX_FINISH);
        case NORM: return curved(1.0, param / c, NORMMAX_FINISH);
        case ANY_POWER: return solved(AnyPower(c, 1.0 / c));
        case STEEP: return steep_row(c, x, n, scratch, team);
        case CAPPED: return budget_row(param, x, n, scratch, team);
        case NO_LINK: break;  // without a number that is one, a row is as one with NaN
    }
    return poisoned<C>(false, true);
}

// The non-zeros of a row of a map that has zeros.
template <class C>
static Support<C> support_of(Link link, double param, const C *x, int64_t n, Scratch &scratch, const Team &team,
                             Scan<C> *known = nullptr) {
    if (link.family == TRUNCATIONS) return truncated(link.truncation(), param, x, n, scratch, team);
    return above_threshold(link.threshold(), param, x, n, scratch, team, known);
}

}  // namespace ANYMAX_UNIT
