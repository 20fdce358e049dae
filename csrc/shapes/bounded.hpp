// Rows of Bounded, and their gradients.
#pragma once

#include "links/bounded.hpp"
#include "shapes/backward.hpp"
#include "shapes/select.hpp"
#include "shapes/solve.hpp"
#include "shapes/support.hpp"

namespace ANYMAX_UNIT {

// -- the bounds of a row

template <class C>
struct Bounds {
    const C *each;  // one a class, or NULL
    C one;          // one for all
    C mean;
    bool sound;  // none is below 0, or NaN
    // Those above 1 act as 1.
    ANYMAX_INLINE C of(int64_t i) const { return smaller_bound(each ? each[i] : one); }
    static ANYMAX_INLINE C smaller_bound(C u) { return u < C(1) ? u : C(1); }
};
template <class C, bool EACH>
ANYMAX_INLINE vec<C> bounds_at(const Bounds<C> &u, int64_t i, int64_t n) {
    if (!EACH) return splat(u.one);
    const vec<C> most = splat(C(1)), v = load_or(u.each, i, n, C(0));
    return v < most ? v : most;
}

// `checked`: they are sound, since p is
template <class C>
inline Bounds<C> bounds_of(const anymax_call &call, int64_t row, bool checked, Scratch &scratch) {
    const anymax_view &view = call.upper;
    const int64_t n = call.n;
    const C *from = (const C *)row_at(call, view, sizeof(C), row);
    if (view.cls == 0 || n == 1) return Bounds<C>{nullptr, Bounds<C>::smaller_bound(*from), *from, *from >= C(0)};
    if (view.cls != 1) {
        C *to = scratch.take<C>(BATCH_IN, n);
        if (!to) return Bounds<C>{};
        for (int64_t i = 0; i < n; i++) to[i] = from[i * view.cls];
        from = to;
    }
    if (checked) return Bounds<C>{from, C(0), C(0), true};
    vec<C> total{};
    ints<C> sound = total == total;
    for (int64_t i = 0; i < n; i += width<C>) {
        const vec<C> v = load_or(from, i, n, C(0));
        sound &= v >= vec<C>{};
        total += smaller(v, splat(C(1)));
    }
    return Bounds<C>{from, C(0), (C)((double)sum(total) / (double)n), every<C>(sound)};
}

// -- alpha = 1: min(s e, u) of the exponentials e, filled up as s grows

// The scale at which the terms sum to 1, from below: Newton's steps on a concave sum never overshoot, and what is full stays
// so. A class of an infinite e is full from the start. before: how many are full where the scale is from, if it was made of all
// others. `infinity` where all classes of an e above 0 are full and don't sum to 1.
template <class C, bool EACH>
inline double filled_scale(const C *e, const Bounds<C> &u, int64_t n, double scale, int64_t before = -1) {
    constexpr int64_t W = width<C>;
    for (;;) {
        const vec<C> by = splat((C)scale);
        vd free{}, full{};
        int64_t count = 0;
        for (int64_t i = 0; i < n;) {
            vec<C> f{}, g{};
            ints<C> c{};
            for (const int64_t end = i + 8 * W < n ? i + 8 * W : n; i < end; i += W) {
                const vec<C> v = load_or(e, i, n, C(0)), most = bounds_at<C, EACH>(u, i, n);
                const ints<C> filled = v * by >= most;
                f += filled ? vec<C>{} : v;
                g += filled ? most : vec<C>{};
                c += filled;
            }
            free = widen_add(free, f), full = widen_add(full, g);
            for (int64_t j = 0; j < W; j++) count -= c[j];
        }
        const double left = 1.0 - sum(full), rest = sum(free);
        if (count == before || !(left > 0.0)) return scale;
        if (!(rest > 0.0)) return inf64;
        const double next = left / rest;
        if (!(next > scale)) return scale;
        before = count, scale = next;
    }
}

template <class C, bool EACH>
inline void filled_row(const C *x, int64_t n, const Bounds<C> &u, C high, const Sink<C> &out, Scratch &scratch,
                       const Team &team) {
    constexpr int64_t W = width<C>;
    C *const e = scratch.take<C>(RESULT, n);
    if (!e) return;
    double scale = 1.0 / exp_sum<C, true>(x, 0, n, high, e);
    if (EACH || !((C)scale < u.one)) scale = filled_scale<C, EACH>(e, u, n, scale, 0);  // the largest has e = 1
    while (scale > (sizeof(C) == 4
                        ? 1e12
                        : 1e100)) {  // the free ones lie far below: their exponentials once more, from the largest of them
        const vec<C> by = splat((C)(scale < 1e30     ? scale
                                    : sizeof(C) == 4 ? 1e30
                                    : scale < 1e290  ? scale
                                                     : 1e290)),
                     none = splat(-infinity<C>);
        vec<C> top = none;
        const bool whole = scale == inf64;
        for (int64_t i = 0; i < n; i += W) {
            const vec<C> v = load_or(e, i, n, C(0)), most = bounds_at<C, EACH>(u, i, n), score = load_or(x, i, n, -infinity<C>);
            const ints<C> filled = whole ? v > vec<C>{} : v * by >= most;
            const ints<C> out_of_play = filled | (most <= vec<C>{});
            top = larger(top, out_of_play ? none : score);
            store_within(e, i, n, out_of_play ? splat(infinity<C>) : v);
        }
        const C next = highest_lane(top);
        if (next == -infinity<C>) {  // all are full
            scale = 1.0;
            break;
        }
        vd total{};
        for (int64_t i = 0; i < n; i += W) {
            const vec<C> v = load_or(e, i, n, C(0));
            const vec<C> w = exp(load_or(x, i, n, -infinity<C>) - splat(next));
            const ints<C> gone = v == infinity<C>;
            total = widen_add(total, gone ? vec<C>{} : w);
            store_within(e, i, n, gone ? v : w);
        }
        scale = filled_scale<C, EACH>(e, u, n, 1e-30 / sum(total));
    }
    const vec<C> by = splat((C)scale);
    emit_over(out, e, [=](int64_t i) ANYMAX_EACH {
        const vec<C> v = load_or(e, i, n, C(0)) * by, most = bounds_at<C, EACH>(u, i, n);
        return v < most ? v : most;
    });
}

// -- above alpha = 1: by candidates

// A bound, less the top, that tau is surely not below in a row with `most` for all classes: by the maxima of its blocks, to
// which the whole row only adds.
template <class C, class L>
inline C bounded_floor(const L &link, const Scan<C> &s, double alpha, double most) {
    const int64_t needed = (int64_t)::ceil(1.0 / most), cells = s.count * width<C>;
    if (needed > cells) return -infinity<C>;
    const double none = link.level_of(0.0);
    double bound = -inf64, level = level_of_all(link, 0.0), high = link.level_of(-1e4);
    const OneBound<C> all{(C)most};
    const auto climb = [&](const C *from, int64_t vectors, int turns) {
        Bracketed<double, L> rule{link, none, high, 1.0, 0.0, 0.0};
        const auto steps = [&](const auto &s, double at) {
            const double excess = s.excess(1.0), mass = 1.0 - s.full();
            if (excess > 0.0) bound = larger(bound, link.tau(at));
            (excess > 0.0 ? rule.high : rule.low) = at;
            const double next = at - link.fall(s.value(), s.rate(), mass * 1.03);
            const bool on = !(excess > 0.0 && excess < 0.1);
            return Step<double>{next > rule.low && next < rule.high ? next : rule.middle(), true, on};
        };
        solve(row_below(from, vectors, s.top), under(link, all), level, true, turns, steps);
        high = rule.high;
    };
    vec<C> few[CELL_VECTORS];
    const int used = few_cells(s, few);
    if (needed * 4 <= used * width<C>) climb((const C *)few, used, 4);
    if (bound == -inf64) {  // from the score that so many reach as it takes to be full
        const C reached = needed == 1 ? s.top : reached_by(s, needed);
        if (!((double)reached - (double)s.top > -1e4))
            return -infinity<C>;                                   // of no use, where classes are masked or lie far apart
        const double c = alpha - 1.0, reach = ::pow(most, c) / c;  // x - tau of a class that is just full
        bound = ((double)reached - (double)s.top) - reach, level = link.level_of(bound), high = level;
        climb((const C *)few, used, 4);
    }
    if (used < s.count) climb(s.cells, s.count, 2);
    return (C)(bound - (1e-5 * (1.0 + fabs(bound))));
}

constexpr double FURTHEST = -1e307;  // from an anchor; what lies further is seen as it is from the next one

// y = x - anchor of the candidates as doubles, padded.
template <class C>
inline double bounded_scores(const C *value, C anchor, double *y, int64_t count) {
    constexpr int64_t W = width<double>;
    vd least{};
    for (int64_t i = 0; i < count; i += W) {  // reads beyond the end: scratch, overwritten below
        const vd v = larger(load_wide(value + i) - (double)anchor, splat(FURTHEST));
        store(y + i, v);
        if (i + W <= count) least = smaller(least, v);
    }
    double lowest = lowest_lane(least);
    for (int64_t i = count / W * W; i < count; i++) lowest = y[i] < lowest ? y[i] : lowest;
    for (int64_t i = count; i < (count + W - 1) / W * W; i++) y[i] = -1.6e308;
    return lowest;
}

// How near to 1 a sum of p comes; the rest is made good to first order. In sparsemax what is not 0 has all of its weight in the
// gradient.
template <class C, class L>
constexpr double BOUNDED_ENOUGH = sizeof(C) == 4 ? 5e-7 : 0x1p-52;
template <class C>
constexpr double BOUNDED_ENOUGH<C, Power<1>> = 0x1p-52;

// What lies above a threshold, less the anchor, stays: the others are none of the support. How many do.
template <class C>
inline int64_t bounded_thinned(Candidates<C> &c, C *most, C anchor, C threshold) {
    int64_t count = 0;
    for (int64_t i = 0; i < c.count; i++) {
        const C v = c.value[i];
        c.value[count] = v, c.index[count] = c.index[i];
        if (most) most[count] = most[i];
        count += v - anchor > threshold;
    }
    for (int64_t i = count; most && i < count + 2 * width<C>; i++) most[i] = C(0);
    return count;
}

// p of the candidates as doubles, from a level that is surely not too low; of `all` classes one has nothing to be sure of.
// NULL: it is too low, and they are not all of the support. bound: of the first ones of `most`, their bounds, if they are not
// all alike.
template <class C, class L, class U>
inline double *bounded_solve(const L &link, const U &bound, Candidates<C> &c, C *most, C anchor, double level, bool all,
                             Scratch &scratch) {
    typedef Bracketed<double, L> Rule;
    constexpr int64_t W = width<double>;
    constexpr double enough = BOUNDED_ENOUGH<C, L>;
    const double none = link.level_of(0.0), lowest = larger((double)lowest_of(c.value, c.count) - (double)anchor, FURTHEST);
    const auto terms = under(link, bound);
    double high = all ? level_of_all(link, lowest) : level;
    if (!(level < high)) level = high;
    high += 1e-12 * (1.0 + fabs(high));
    if (sizeof(C) == 4 && fabs(high) < 1e4) {  // first in floats
        const int64_t vectors = (c.count + width<C> - 1) / width<C>;
        for (int64_t i = c.count; i < vectors * width<C>; i++) c.value[i] = -infinity<C>;
        Rule rule{link, none, high, 1.0, 3e-4, 0.0, !all};
        const double first = level;
        const auto s = solve(row_below((const C *)c.value, vectors, anchor), terms, level, true, 12, rule);
        if (!all && level == first && s.excess(1.0) < 0.0) return nullptr;
        const double tau = link.tau(rule.sure);
        level = rule.newton;
        c.count = bounded_thinned(c, most, anchor, (C)(tau - 1e-5 * (1.0 + fabs(tau))));
        all = true;
    }
    double *const y = scratch.take<double>(WIDE, c.count + 2 * W);
    if (!y) return y;
    const int64_t vectors = (c.count + W - 1) / W;
    bounded_scores((const C *)c.value, anchor, y, c.count);
    Rule rule{link, none, high, 1.0, enough, 0.0, !all};
    const double first = level;
    auto s = solve(row_of_doubles(y, vectors), terms, level, true, 400, rule);
    if (!all && level == first && s.excess(1.0) < 0.0) return nullptr;
    const auto each = [&](double at_level, auto use) {  // use(i, value, rate, bound) of each vector
        const auto at = link.at(at_level);
        for (int64_t i = 0; i < vectors; i++) {
            const vd from = load(y + i * W);
            vd v, k;
            at.template terms<1>(&from, &v, &k);
            use(i, v, k, bound.template at<vd>(i));
        }
    };
    for (int64_t again = 0; fabs(level) > 16.0 && again < c.count; again++) {  // far below the anchor digits are lost: once
        C next = -infinity<C>;                                                 // more, from the largest free one
        each(rule.low, [&](int64_t i, vd v, vd, vd u) {
            const uint32_t inside = bits(v < u * NEARLY_FULL);
            for (int64_t j = i * W; j < (i + 1) * W && j < c.count; j++)
                if (inside >> (j - i * W) & 1) next = larger(next, c.value[j]);
        });
        if (next == anchor || next == -infinity<C>) break;
        const double moved = level + (link.level_of((double)anchor - (double)next) - none),
                     furthest = level_of_all(link, bounded_scores((const C *)c.value, next, y, c.count));
        level = moved > none && moved < furthest ? moved : 0.5 * (none + furthest);
        rule = Rule{link, none, furthest + 1e-12 * (1.0 + fabs(furthest)), 1.0, enough, 0.0};
        s = solve(row_of_doubles(y, vectors), terms, level, true, 400, rule);
        anchor = next;
    }
    const double lost = s.rate() > 0.0 ? s.excess(1.0) / s.rate() : 0.0, least = L::least(fabs(level));
    each(level, [&](int64_t i, vd v, vd k, vd u) ANYMAX_EACH {
        const vd p = v - k * lost;
        const vl inside = (v < u * NEARLY_FULL) & (p < u);
        store(y + i * W, inside ? (p > least ? p : vd{}) : u);
    });
    return y;
}

// The support of a row with finite scores.
template <class C, class L>
static Support<C> bounded_support(const L &link, double alpha, const C *x, int64_t n, const Bounds<C> &u, const Scan<C> &s,
                                  Scratch &scratch) {
    double guess = u.each ? 0.5 * (double)u.mean : (double)u.one;
    for (int attempt = 0;; attempt++, guess *= 0.25) {
        const C bound =
            attempt < 4 && guess * (double)n > 1.5 ? bounded_floor(link, s, alpha, guess < 1.0 ? guess : 1.0) : -infinity<C>;
        const bool every_class = bound == -infinity<C>;
        Candidates<C> c = every_class ? collect_from(x, n, s, bound, scratch) : collect(x, n, s, bound, scratch);
        C *const most = u.each ? scratch.take<C>(EXTRA, c.count + 2 * width<C>) : nullptr;
        if (scratch.failed) return poisoned<C>(true, false);
        double capacity = u.one * (double)c.count;
        if (u.each) {
            int64_t count = 0;
            vd sums{};
            for (int64_t i = 0; i < c.count; i++) {  // a class of the bound 0 is none
                const C own = u.of(c.index[i]);
                c.value[count] = c.value[i], c.index[count] = c.index[i], most[count] = own;
                count += own > C(0);
            }
            for (int64_t i = count; i < count + 2 * width<C>; i++) most[i] = C(0);
            for (int64_t i = 0; i < count; i += width<C>) sums = widen_add(sums, load((const C *)most + i));
            c.count = count, capacity = sum(sums);
        }
        if (!(capacity > 1.0)) {
            if (!every_class) continue;
            double *const p = scratch.take<double>(WIDE, c.count);
            for (int64_t i = 0; p && i < c.count; i++) p[i] = u.of(c.index[i]);
            return Support<C>{c.index, p, c.count, -inf64, true, true};
        }
        C anchor = s.top;
        if (u.each) {
            vec<C> high = splat(-infinity<C>);
            for (int64_t i = 0; i < c.count; i += width<C>)
                high = larger(high, load_or((const C *)c.value, i, c.count, -infinity<C>));
            anchor = highest_lane(high);
        }
        const double level = link.level_of(every_class ? -1.0 : ((double)s.top - (double)anchor) + (double)bound);
        double *const p = u.each ? bounded_solve(link, EachBound<C>{most}, c, most, anchor, level, every_class, scratch)
                                 : bounded_solve(link, OneBound<C>{u.one}, c, most, anchor, level, every_class, scratch);
        if (p || scratch.failed) return Support<C>{c.index, p, p ? c.count : 0, -inf64, true, true};
    }
}

template <class C>
static void bounded_row(const anymax_call &call, int64_t row, const C *x, const Sink<C> &out, Scratch &scratch,
                        const Team &team) {
    const int64_t n = call.n;
    const double c = call.param - 1.0;
    const Bounds<C> u = bounds_of<C>(call, row, false, scratch);
    if (scratch.failed) return;
    if (!u.sound || !in_range(MAPS[ANYMAX_BOUNDED], call.param)) return fill(out, not_a_number<C>);
    if (c == 0.0) {
        const auto [high, sound] = scan_top(x, n);
        if (settled(out, high, sound, C(0), team)) return;
        return u.each ? filled_row<C, true>(x, n, u, high, out, scratch, team)
                      : filled_row<C, false>(x, n, u, high, out, scratch, team);
    }
    const Scan<C> s = scan(x, n, scratch, team);
    if (scratch.failed || settled(out, s.top, s.sound, C(0), team)) return;
    if (!u.each && u.one == C(0)) return zeros(out, team);
    const Support<C> found = [&] {
        const auto solved = [&](const auto &link) { return bounded_support(link, call.param, x, n, u, s, scratch); };
        switch (const Link link = link_of(ANYMAX_ENTMAX, call.param)) {
            case POWER1: return solved(Power<1>());
            case POWER2: return solved(Power<2>());
            case POWER3: return solved(Power<3>());
            case POWER4: return solved(Power<4>());
            default:
                if constexpr (sizeof(C) == 4)
                    if (link == CURVE) return solved(BoundedCurve(c, 1.0 / c));
                return solved(AnyPower(c, 1.0 / c));
        }
    }();
    if (scratch.failed) return;
    if (call.op == ANYMAX_FORWARD) save_support(call, row, found);
    spread(out, found.index, found.p, found.count, team);
}

// -- gradients

template <class C>
inline Sensitivity bounded_weight(const anymax_call &call) {
    return Sensitivity(link_of(ANYMAX_ENTMAX, call.param), call.param, sizeof(C) == 4);
}

// From all of p; `free` takes it with 0 for what is full, but for softmax, whose weights are p.
template <class C, bool EACH>
static void bounded_vjp(const anymax_call &call, const Bounds<C> &u, const C *p, C *free, const void *g, const Sink<C> &out,
                        Scratch &scratch, const Team &team) {
    constexpr int64_t W = width<C>;
    const int64_t n = call.n;
    const auto inside = [=](int64_t i) ANYMAX_EACH {
        const vec<C> v = load_or(p, i, n, C(0));
        return v >= bounds_at<C, EACH>(u, i, n) ? vec<C>{} : v;
    };
    if (call.param != 1.0) {
        for (int64_t i = 0; i < n; i += W) store_within(free, i, n, inside(i));
        return vjp_row(bounded_weight<C>(call), saved_of(call), (const C *)free, g, call.g.cls, call.dtype, n, out, scratch,
                       team);
    }
    const C *h = stage<C>(g, call.g.cls, call.dtype, nullptr, 0, n, scratch, STAGED_G);
    if (!h) return;
    vd rate{}, dot{};
    for (int64_t i = 0; i < n;) {
        vec<C> r{}, d{};
        for (const int64_t end = i + 8 * W < n ? i + 8 * W : n; i < end; i += W) {
            const vec<C> v = inside(i);
            r += v, d += v == vec<C>{} ? vec<C>{} : v * load_or(h, i, n, C(0));
        }
        rate = widen_add(rate, r), dot = widen_add(dot, d);
    }
    const vec<C> mean = splat((C)mean_of<Weigh<PLAIN>>(sum(rate), sum(dot)));
    emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH {
        const vec<C> v = inside(i);
        return v == vec<C>{} ? vec<C>{} : v * (load_or(h, i, n, C(0)) - mean);
    });
}

// J^T g: that of entmax among the classes between 0 and their bounds. p shows them, and so does a saved support; but p that was
// rounded to half precision does not, and such a row is solved again.
template <class C>
static void bounded_vjp_row(const anymax_call &call, int64_t row, const C *x, const C *p, const void *g, const Sink<C> &out,
                            Scratch &scratch, const Team &team) {
    constexpr int64_t W = width<C>;
    const int64_t n = call.n;
    const Saved<C> saved = saved_row<C>(call, row);
    C *const free = scratch.take<C>(BATCH_OUT, (saved.count < 0 ? n : saved.count) + W);
    if (!free) return;
    if (saved.count < 0 && !is_type<C>(call.dtype)) {
        bounded_row<C>(call, row, x, sink_of(free, n, false), scratch, team);
        p = free;
    }
    const Bounds<C> u = bounds_of<C>(call, row, true, scratch);
    if (scratch.failed) return;
    if (saved.count >= 0) {
        for (int64_t i = 0; i < saved.count; i++) free[i] = saved.value[i] >= u.of(saved.index[i]) ? C(0) : saved.value[i];
        return vjp_found(bounded_weight<C>(call), Saved<C>{saved.index, free, saved.count}, g, call.g.cls, call.dtype, out,
                         scratch, team);
    }
    u.each ? bounded_vjp<C, true>(call, u, p, free, g, out, scratch, team)
           : bounded_vjp<C, false>(call, u, p, free, g, out, scratch, team);
}

}  // namespace ANYMAX_UNIT
