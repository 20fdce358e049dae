// What a row of Bounded gives for its alpha, and for the bounds of its classes.
#pragma once

#include "shapes/bounded.hpp"
#include "shapes/slope.hpp"

namespace ANYMAX_UNIT {

// g_i - mean of a class that has its bound, 0 of the others. A bound above 1 is none.
template <class C, bool EACH>
static void bounds_vjp(const Bounds<C> &u, const C *p, const C *g, C mean, int64_t n, const Sink<C> &out, Scratch &scratch,
                       const Team &team) {
    const vec<C> by = splat(mean), one = splat(u.mean);
    emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH {
        const vec<C> most = EACH ? load_or(u.each, i, n, C(0)) : one;
        const ints<C> full = (load_or(p, i, n, C(0)) >= most) & (most <= C(1));
        return full ? load_or(g, i, n, C(0)) - by : by * C(0);
    });
}

// True where a class has the bound 0, which it has reached though it is in no support.
template <class C>
inline bool some_have_none(const Bounds<C> &u, int64_t n) {
    if (!u.each) return u.one <= C(0);
    ints<C> none{};
    for (int64_t i = 0; i < n; i += width<C>) none |= load_or(u.each, i, n, C(1)) <= vec<C>{};
    return bits(none) != 0;
}

// Writes call.value[row], the product of g with the derivative by alpha, and `out`, that by the bounds, as far as they are
// wanted. The classes that are free are those between 0 and their bounds. A saved support tells them as p does; half precision
// has rounded p, and such a row is solved again.
template <class C>
static void bounded_slope_row(const anymax_call &call, int64_t row, const C *x, const C *p, const void *g, const Sink<C> &out,
                              Scratch &scratch, const Team &team) {
    constexpr int64_t W = width<C>;
    const int64_t n = call.n;
    const Saved<C> saved = saved_row<C>(call, row);
    const bool wanted = out.row != nullptr;
    if (saved.count < 0 && !is_type<C>(call.dtype)) {
        C *const exact = scratch.take<C>(BATCH_OUT, n + W);
        if (exact) bounded_row<C>(call, row, x, sink_of(exact, n, false), scratch, team);
        p = exact;
    }
    const Bounds<C> u = bounds_of<C>(call, row, true, scratch);
    const C *h = stage<C>(g, call.g.cls, call.dtype, nullptr, 0, n, scratch, STAGED_G);
    C *const q = scratch.take<C>(VALUES, n + 2 * W), *const d = scratch.take<C>(EXTRA, n + 2 * W),
             *const made = scratch.take<C>(WIDE, 2 * (n + 2 * W));
    C *const free = scratch.take<C>(SORTED, n + W);
    if (scratch.failed) return;
    int64_t count = 0;
    if (saved.count >= 0) {
        for (int64_t i = 0; i < saved.count; i++) {
            q[count] = saved.value[i], d[count] = h[saved.index[i]];
            count += saved.value[i] < u.of(saved.index[i]);
        }
        store(q + count, vec<C>{}), store(d + count, vec<C>{});
    } else {
        for (int64_t i = 0; i < n; i += W) {
            const vec<C> v = load_or(p, i, n, C(0)), most = u.each ? bounds_at<C, true>(u, i, n) : splat(u.one);
            store(free + i, v >= most ? vec<C>{} : v);
        }
        count = pack_nonzeros((const C *)free, h, n, q, d);
    }
    if (call.value) {
        Moves<C> moves{q, d, made, made + n + 2 * W, count, 0.0, 0.0};
        double slope;
        slopes_of(BY_ALPHA, call.param, &moves, 1, &slope);
        ((C *)call.value)[row] = count ? (C)slope : C(0);
    }
    if (!wanted) return;
    vd rate{}, dot{};
    bounded_weight<C>(call).with([&](auto weigh) ANYMAX_EACH {
        for (int64_t i = 0; i < count; i += W) {
            const vec<C> w = weigh(load(q + i));
            rate = widen_add(rate, w), dot = widen_add(dot, w * load(d + i));
        }
    });
    const C mean = (C)mean_of<Weigh<PLAIN>>(sum(rate), sum(dot));
    if (saved.count >= 0 && !some_have_none(u, n)) {
        double *const each = scratch.take<double>(BATCH_OUT, saved.count + 1);
        for (int64_t i = 0; each && i < saved.count; i++) {
            const int64_t at = saved.index[i];
            const C most = u.each ? u.each[at] : u.mean;
            each[i] = saved.value[i] >= most && most <= C(1) ? (double)(h[at] - mean) : 0.0;
        }
        return each ? spread(out, saved.index, (const double *)each, saved.count, team) : void();
    }
    if (saved.count >= 0) {
        memset(free, 0, (size_t)n * sizeof(C));
        for (int64_t i = 0; i < saved.count; i++) free[saved.index[i]] = saved.value[i];
        p = free;
    }
    u.each ? bounds_vjp<C, true>(u, p, h, mean, n, out, scratch, team)
           : bounds_vjp<C, false>(u, p, h, mean, n, out, scratch, team);
}

}  // namespace ANYMAX_UNIT
