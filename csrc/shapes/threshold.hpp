// The threshold of a row from its candidates: all that lies above a bound is copied out, and the level found of these alone.
#pragma once

#include "shapes/lanes.hpp"
#include "shapes/support.hpp"
#include "shapes/sweep.hpp"

namespace ANYMAX_UNIT {

// y = x - top of the candidates as doubles, padded.
template <class C>
inline double *widen(const Candidates<C> &c, C top, Scratch &scratch) {
    constexpr int64_t W = width<double>;
    double *y = scratch.take<double>(WIDE, c.count + W);
    if (!y) return y;
    const double high = (double)top;
    for (int64_t i = 0; i < c.count; i += W)
        store(y + i, load_wide(c.value + i) - high);  // reads beyond the end: scratch, overwritten below
    int64_t whole = (c.count + W - 1) / W * W;
    for (int64_t i = c.count; i < whole; i++) y[i] = -1e300;
    return y;
}

// p of the candidates as doubles, from a level that is surely not too low, and the row's level.
template <class C, class L>
inline double *probabilities(const L &link, Candidates<C> &c, C top, double &level, Finish finish, Scratch &scratch) {
    constexpr int64_t W = width<double>;
    double *const y = widen(c, top, scratch);
    if (!y) return y;
    const int64_t vectors = (c.count + W - 1) / W;
    const double floor = link.floor((double)c.count);
    Bracketed<double, L> rule{link, floor - 1e-12 * (1.0 + fabs(floor)), link.start, 1.0, 0.0, 0.0};
    if (!(level <= link.start)) level = link.start;
    const auto s = solve(row_of_doubles(y, vectors), link, level, true, 100, rule);
    const double excess = s.excess(1.0), least = L::least(level);
    const vd lost = all<vd>(excess / s.rate()), share = all<vd>(1.0 / s.rate());
    const auto at = link.at(level);
    for (int64_t i = 0; i < vectors; i++) {
        const vd from = load(y + i * W);
        vd value, rate;
        at.template terms<1>(&from, &value, &rate);
        const vd p = finished(finish, value, rate, lost, share);
        store(y + i * W, p > least ? p : vd{});
    }
    return y;
}

// In floats as near as they come, before that.
inline double *probabilities(const Curve &curve, Candidates<float> &c, float top, double &level, Finish finish,
                             Scratch &scratch) {
    constexpr int64_t W = width<float>, HALF = width<double>;
    double *const value = scratch.take<double>(WIDE, c.count + W), *const rate = scratch.take<double>(EXTRA, c.count + W);
    if (scratch.failed) return nullptr;
    for (int64_t i = c.count; i < c.count + W; i++) c.value[i] = -inf32;
    const float *const x = c.value;
    curve_level(curve, row_below(x, (c.count + W - 1) / W, top), level, 40);
    double lost, share;
    const auto y = [=](int64_t i) ANYMAX_EACH { return load_wide(x + i * HALF) - (double)top; };
    curve_finish(curve, row_view<vd>((c.count + HALF - 1) / HALF, y), level, finish, (vd *)value, (vd *)rate, lost, share);
    for (int64_t i = 0; i < c.count; i += HALF)
        store(value + i, finished(finish, load(value + i), load(rate + i), all<vd>(lost), all<vd>(share)));
    return value;
}

// The row is read once: `known`, where it is not NULL, takes what a scan found, and keeps it from the next.
template <class C>
static Scan<C> scanned(const C *x, int64_t n, Scan<C> *known, Scratch &scratch, const Team &team) {
    if (known && known->cells) return *known;
    const Scan<C> s = scan(x, n, scratch, team);
    if (known) *known = s;
    return s;
}

// Where to begin on a row: a level that is surely not too low, and the bound that all of the support lies above. A few of the
// cells tell enough where the support is small; of a long row of much alike scores they all do.
template <class C, class L>
static C bound_of(const L &link, const Scan<C> &s, double &level) {
    const double margin = sizeof(C) == 4 ? 2e-5 : 1e-12;
    auto above = [&] { return (C)(link.reach(level) - margin / link.slope * 0.5); };
    if (s.level > 0.0) {
        level = s.level;
        return above();
    }
    const auto lowered = [&](const C *cells, int64_t count, int turns, double last) {
        solve(row_below(cells, count, s.top), link, level, true, turns, Descent<double, L>{link, last});
        const double loose = link.near_one() ? level + margin * (1.0 + fabs(level)) : level + margin;
        level = loose < link.start ? loose : link.start;
    };
    vec<C> few[CELL_VECTORS];
    level = link.start;
    lowered((const C *)few, few_cells(s, few), 3, 0.0);
    if (link.near_one() || (L::QUICK && s.block < 16) || cells_above(s, above()) * 4 < s.count * width<C>) return above();
    lowered(s.cells, s.count, 8, 3e-3);
    return above();
}

template <class C, class L>
static Support<C> threshold_row(const L &link, const C *x, int64_t n, Finish finish, Scan<C> *known, Scratch &scratch,
                                const Team &team) {
    const Scan<C> s = scanned(x, n, known, scratch, team);
    if (scratch.failed || !s.sound || s.top == -infinity<C>) return poisoned<C>(s.sound, s.top != -infinity<C>);
    C bound = -infinity<C>;
    double level = link.start;
    if (link.whole) bound = bound_of(link, s, level);
    Candidates<C> c = bound == -infinity<C> ? collect_from(x, n, s, bound, scratch) : collect(x, n, s, bound, scratch);
    if (scratch.failed) return poisoned<C>(true, false);
    double *p = probabilities(link, c, s.top, level, finish, scratch);
    if (!p) return poisoned<C>(true, false);
    return Support<C>{c.index, p, c.count, (double)s.top + link.tau(level), true, true};
}

}  // namespace ANYMAX_UNIT
