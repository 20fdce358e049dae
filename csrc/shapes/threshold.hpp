// The threshold of a row from its candidates: all that lies above a bound is copied out, and the level found of these alone.
#pragma once

#include "links/any_power.hpp"
#include "shapes/support.hpp"
#include "shapes/sweep.hpp"

namespace ANYMAX_UNIT {

// A level that is surely not below the row's: three Newton steps on the maxima of disjoint sets of entries, which the whole row
// only adds to.
template <class C, class L>
inline C level_of_cells(const L &link, const Scan<C> &s) {
    vec<C> a[CELL_VECTORS];
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

// p of the candidates from the root, in place of y.
template <class L>
inline void values(const L &link, const Root &root, double *y, int64_t count, Finish finish) {
    constexpr int64_t W = width<double>;
    const double lost = root.excess / root.rate, share = 1.0 / root.rate, least = L::least(root.level);
    const auto at = link.at(root.level);
    for (int64_t i = 0; i < count; i += W) {
        vd v, k;
        at.terms(load(y + i), v, k);
        const vd p = finished(finish, v, k, splat(lost), splat(share));
        store(y + i, p > least ? p : vd{});
    }
}

// Sums over the candidates, which end in -inf up to a whole vector.
inline Sums2 row_sums(const Curve &curve, const float *x, int64_t count, float top, float level) {
    constexpr int64_t W = width<float>;
    const vf high = splat(top);
    vd wide0{}, wide1{};
    curve_sums(
        curve, count / W, (count + W - 1) / W, splat(level), [&](int64_t i) ANYMAX_EACH { return load(x + i * W) - high; },
        [&](vf s0, vf s1) ANYMAX_EACH { wide0 = widen_add(wide0, s0), wide1 = widen_add(wide1, s1); });
    return Sums2{sum(wide0), sum(wide1)};
}

// p of the candidates, in doubles; and the level.
inline double *curve_root(const Curve &curve, Candidates<float> &c, float top, double &level, Finish finish, Scratch &scratch) {
    constexpr int64_t W = width<float>;
    double *value = scratch.take<double>(WIDE, c.count + W), *rate = scratch.take<double>(EXTRA, c.count + W);
    if (scratch.failed) return nullptr;
    for (int64_t i = c.count; i < c.count + W; i++) c.value[i] = -inf32;
    for (int turn = 0; turn < 40; turn++) {
        const Sums2 s = row_sums(curve, c.value, c.count, top, (float)level);
        const double fall = curve.step(s.s0, s.s1);
        if (!(fall > 0.0) || !(fall < level)) break;  // as near as floats come
        level = (double)(float)level - fall;
        if (fall * curve.r <= 3e-4 * level) break;  // the next step is its square
    }
    const double enough = finish == NORMMAX_FINISH ? 1e-11 : ENOUGH;
    Sums2 s{};
    for (int turn = 0; turn < 40; turn++) {
        const CurveTerms t = curve_terms(
            curve, (c.count + W - 1) / W * 2, splat(level),
            [&](int64_t i) ANYMAX_EACH { return load_wide(c.value + i * width<double>) - (double)top; }, (vd *)value,
            (vd *)rate);
        s = Sums2{sum(t.s0), sum(t.s1)};
        if (fabs(s.s0 - 1.0) <= enough) break;
        const double next = level - curve.step(s.s0, s.s1);
        if (!(next > 0.0) || next == level) break;
        level = next;
    }
    const vd lost = splat((s.s0 - 1.0) / s.s1), share = splat(1.0 / s.s1);
    for (int64_t i = 0; i < c.count; i += width<double>)
        store(value + i, finished(finish, load(value + i), load(rate + i), lost, share));
    level -= (s.s0 - 1.0) / (s.s1 * curve.r);
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

// The sums of all the cells at a level; none where they would take too long beside what they save.
template <class C, int R>
static Sums2 sums_of_cells(const Power<R> &link, const Scan<C> &s, double level) {
    if (s.block < 16) return Sums2{0.0, 0.0};
    return sweep<C, R>(s.cells, s.count * width<C>, Ground<C, R>(s.top, link.tau(level)));
}
static Sums2 sums_of_cells(const Curve &curve, const Scan<float> &s, double level) {
    return row_sums(curve, s.cells, s.count * width<float>, s.top, (float)level);
}
template <class C>
static Sums2 sums_of_cells(const AnyPower &link, const Scan<C> &s, double level) {
    const auto at = link.at(level);
    const vec<C> high = splat(s.top);
    vd wide0{}, wide1{};
    for (int64_t k = 0; k < s.count; k++) {
        vec<C> value, rate;
        at.terms(load(s.cells + k * width<C>) - high, value, rate);
        wide0 = widen_add(wide0, value), wide1 = widen_add(wide1, rate);
    }
    return Sums2{sum(wide0), sum(wide1)};
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
    auto loosened = [&](double guess) {
        const double loose = link.near_one() ? guess + margin * (1.0 + fabs(guess)) : guess + margin;
        return loose < link.start ? loose : link.start;
    };
    level = loosened((double)level_of_cells(link, s));
    if (link.near_one() || cells_above(s, above()) * 4 < s.count * width<C>) return above();
    double guess = level;
    for (int turn = 0; turn < 8; turn++) {
        const Sums2 sums = sums_of_cells(link, s, guess);
        const double fall = link.step(sums.s0, sums.s1);
        if (!(fall > 0.0) || !(fall < guess)) break;
        guess -= fall;
        if (fall <= 0.01 * sums.s0 / sums.s1) break;
    }
    level = loosened(guess);
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
    double *y = widen(c, s.top, scratch);
    if (scratch.failed) return poisoned<C>(true, false);
    Root root = solve(link, y, c.count, level);
    values(link, root, y, c.count, finish);
    double tau = (double)s.top + (finish == NORMMAX_FINISH ? -root.level : link.tau(root.level));
    return Support<C>{c.index, y, c.count, tau, true, true};
}

template <class C>
static Support<C> curve_row(double slope, double r, const C *x, int64_t n, Finish finish, Scan<C> *known, Scratch &scratch,
                            const Team &team) {
    if constexpr (sizeof(C) == 4) {
        const Curve curve(slope, r);
        const Scan<C> s = scanned(x, n, known, scratch, team);
        if (scratch.failed || !s.sound || s.top == -infinity<C>) return poisoned<C>(s.sound, s.top != -infinity<C>);
        double level;
        const C bound = bound_of(curve, s, level);
        Candidates<C> c = collect(x, n, s, bound, scratch);
        if (scratch.failed) return poisoned<C>(true, false);
        const double *p = curve_root(curve, c, s.top, level, finish, scratch);
        if (scratch.failed) return poisoned<C>(true, false);
        return Support<C>{c.index, p, c.count, (double)s.top + curve.tau(level), true, true};
    } else {
        return threshold_row(AnyPower(slope, r), x, n, finish, known, scratch, team);
    }
}

}  // namespace ANYMAX_UNIT
