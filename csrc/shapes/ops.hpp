// One row of each operation.
#pragma once

#include "core/families.hpp"
#include "shapes/backward.hpp"
#include "shapes/bounded_slope.hpp"
#include "shapes/candidates.hpp"
#include "shapes/loss_slope.hpp"
#include "shapes/ratio.hpp"

namespace ANYMAX_UNIT {

template <class C>
static void perturb_probabilities(const anymax_call &call, const C *x, int64_t n, C *p, double *tau, Scratch &scratch) {
    double *work = scratch.take<double>(WORK, perturb_work(n, call.nodes));
    if (work) perturb_forward<C>(call, x, n, p, tau, work);
}

// Sparsemax and entmax 3/2, 4/3, 5/4 from all of a row that is short, or mostly support. False: its candidates are better.
template <class C, int R>
static bool swept(const anymax_call &call, int64_t row, Source source, const C *x, Scan<C> &known, const Sink<C> &out,
                  Scratch &scratch, const Team &team) {
    const int64_t n = call.n;
    const Scan<C> s = scanned(x, n, &known, scratch, team);
    if (scratch.failed || !s.sound || s.top == -infinity<C>) return false;
    double level;
    C bound = bound_of(Power<R>(), s, level);
    known.level = level;
    if (source == EITHER && !crowded(s, bound)) return false;
    const Edge edge = sweep_root<C, R>(x, n, s.top, level);
    C *to = out.direct && (out.direct != x || !call.support.count) ? out.direct : scratch.take<C>(RESULT, n);
    if (!to) return true;
    pieces(team, n, [&](int64_t, int64_t b, int64_t e) {
        sweep_write<C, R>(to, x, b, e, n, s.top, edge, out.bypass && to == out.direct);
    });
    if (call.support.count) save_nonzeros(call, row, to, scratch);
    if (to != out.direct) deliver(out, (const C *)to);
    return true;
}

template <class C>
static bool weighed(const anymax_call &call, int64_t row, const C *x, const Sink<C> &out, Scratch &scratch, const Team &team) {
    NucleusRow<C> nucleus;
    if (!nucleus_row(x, call.n, call.param, nucleus, scratch, team)) return false;
    if (scratch.failed) return true;
    if (!call.support.count) return emit_over(out, nucleus.e, nucleus, team), true;
    save_nucleus(call, row, nucleus, scratch);
    const C *const e = nucleus.e;
    const int64_t n = call.n;
    return emit_over(out, nucleus.e, [=](int64_t i) ANYMAX_EACH { return load_or(e, i, n, C(0)); }, team), true;
}

// The row from all of it. False: its candidates are better.
template <class C>
static bool forward_dense(const anymax_call &call, int64_t row, Source source, Link link, const C *x, Scan<C> &known,
                          const Sink<C> &out, Scratch &scratch, const Team &team) {
    switch (link) {
        case POWER1: return swept<C, 1>(call, row, source, x, known, out, scratch, team);
        case POWER2: return swept<C, 2>(call, row, source, x, known, out, scratch, team);
        case POWER3: return swept<C, 3>(call, row, source, x, known, out, scratch, team);
        case POWER4: return swept<C, 4>(call, row, source, x, known, out, scratch, team);
        case LARGEST: return largest_dense(x, call.n, (int64_t)call.param, out, scratch);
        case NUCLEUS: return weighed(call, row, x, out, scratch, team);
        default: return false;
    }
}

template <class C>
static void forward_row(const anymax_call &call, int64_t row, Source source, Link link, const C *x, const Sink<C> &out,
                        Scratch &scratch, const Team &team) {
    const int64_t n = call.n;
    if (call.support.count) call.support.count[row] = -1;
    if (link == EXPONENTIAL) return softmax_row(x, n, out, false, scratch, team);
    if (link == BOUNDED) return bounded_row(call, row, x, out, scratch, team);
    if (link.has_zeros()) {
        Scan<C> known{};
        if (source != CANDIDATES && forward_dense(call, row, source, link, x, known, out, scratch, team)) return;
        const Support<C> found = support_of(link, call.param, x, n, scratch, team, &known);
        if (scratch.failed) return;
        if (link == CAPPED && !is_type<C>(call.dtype))
            for (int64_t i = 0; i < found.count; i += width<double>)
                store(found.p + i, below_full(load(found.p + i), below_1(call.dtype)));
        save_support(call, row, found);
        if (!found.sound) return fill(out, not_a_number<C>);
        return spread(out, found.index, found.p, found.count, team);
    }
    const auto [high, sound] = scan_top(x, n, scratch, team);
    if (settled(out, high, sound, C(0), team)) return;
    if (link.family == RATIOS)
        return with_ratio(link.ratio(), call.param, x, n, high, scratch, team,
                          [&](const auto &u) { ratio_row(x, n, u, out, scratch, team); });
    C *p = out.direct && out.direct != x ? out.direct : scratch.take<C>(RESULT, n);
    if (!p) return;
    perturb_probabilities(call, x, n, p, nullptr, scratch);
    if (p != out.direct) deliver(out, p);
}

template <class C>
static void log_row(const anymax_call &call, Link link, const C *x, const Sink<C> &out, Scratch &scratch, const Team &team) {
    const int64_t n = call.n;
    if (link == EXPONENTIAL) return softmax_row(x, n, out, true, scratch, team);
    if (link == NO_LINK) return fill(out, not_a_number<C>);
    if (link == SIGMOID) {
        const auto [high, sound] = scan_top(x, n, scratch, team);
        if (settled(out, high, sound, -infinity<C>, team)) return;
        const SigmoidWeight<C> u(high);
        const vec<C> l = splat((C)::log(weights_of(x, n, u, scratch, team)));
        return emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH {
            vec<C> v = load_or(x, i, n, C(0));
            return v > -infinity<C> ? u.logarithm(v) - l : splat(-infinity<C>);
        });
    }
    Kept<C> kept =
        link == LARGEST ? largest_row(x, n, (int64_t)call.param, scratch, team) : nucleus_row(x, n, call.param, scratch, team);
    if (scratch.failed) return;
    if (settled(out, kept.top, kept.sound, -infinity<C>, team)) return;
    const C l = (C)::log(exponentials(kept));
    for (int64_t i = 0; i < kept.count; i++) kept.value[i] = (C)(x[kept.index[i]] - kept.top) - l;
    fill(out, -infinity<C>);  // x may lie there: it is not read from here on
    put_each(
        out.row, out.dtype, kept.count, [=, step = out.step](int64_t i) ANYMAX_EACH { return kept.index[i] * step; },
        [=](int64_t i) ANYMAX_EACH { return kept.value[i]; });
}

// For log p: g - p sum g over the classes that have a probability; sigsoftmax multiplies by (log u)' = 1 + sigmoid(-x).
template <class C>
static void log_vjp_row(const anymax_call &call, const C *x, const C *log_p, const C *g, const Sink<C> &out, Scratch &scratch,
                        const Team &team) {
    const int64_t n = call.n;
    constexpr int64_t W = width<C>;
    vd wide{};
    for (int64_t i = 0; i < n; i += W) {
        vec<C> l = load_or(log_p, i, n, -infinity<C>), h = load_or(g, i, n, C(0));
        wide = widen_add(wide, l == -infinity<C> ? vec<C>{} : h);
    }
    const vec<C> total = splat((C)sum(wide));
    const bool sigmoid = link_of(call.map, call.param) == SIGMOID;
    emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH {
        vec<C> l = load_or(log_p, i, n, -infinity<C>), h = load_or(g, i, n, C(0));
        vec<C> d = h - exp(l) * total;
        if (sigmoid) d = d * SigmoidWeight<C>::log_slope(load_or(x, i, n, C(0)));
        return l == -infinity<C> ? vec<C>{} : d;
    });
}

template <class C>
static double tau_row(const anymax_call &call, Link link, const C *x, Scratch &scratch, const Team &team) {
    if (link == EXPONENTIAL) return lse_row<C>(x, call.n, nullptr, nullptr, scratch, team);
    if (link.has_zeros()) return support_of(link, call.param, x, call.n, scratch, team).tau;
    const auto [high, sound] = scan_top(x, call.n);
    if (!sound || high == -infinity<C>) return sound ? -inf64 : not_a_number<double>;
    C *p = scratch.take<C>(RESULT, call.n);
    double tau = 0.0;
    if (p) perturb_probabilities(call, x, call.n, p, &tau, scratch);
    return tau;
}

// The loss for a target class: Omega*(x) - x_t, as sum p_j (x_j - x_t) - Omega(p), where nothing large cancels.
template <class C>
static double loss_row(const anymax_call &call, int64_t row, Source source, Link link, const C *x, int64_t t, Scratch &scratch,
                       const Team &team) {
    const int64_t n = call.n;
    const double aim = (double)x[t];
    double value = 0.0;
    if (call.support.count) call.support.count[row] = -1;
    if (link == EXPONENTIAL) {
        C high;
        double rest = 0.0, tau = lse_row(x, n, &rest, &high, scratch, team);
        if (call.tau) ((C *)call.tau)[row] = (C)tau;
        if (tau != tau) return tau;
        if (call.slope) ((C *)call.slope)[row] = tau == -inf64 ? C(0) : (C)loss_slope_softmax(x, n, high, rest);
        return aim == -inf64 ? inf64 : ((double)high - aim) + rest;
    }
    NucleusRow<C> nucleus;
    if (link == NUCLEUS && source != CANDIDATES && nucleus_row(x, n, call.param, nucleus, scratch, team)) {
        if (scratch.failed) return 0.0;
        if (call.support.count) save_nucleus(call, row, nucleus, scratch);
        value = ((double)nucleus.high - aim) + ::log1p(nucleus.mass - 1.0);
        return value > 0.0 ? value : 0.0;
    }
    if (link.has_zeros()) {
        const Support<C> found = support_of(link, call.param, x, n, scratch, team);
        if (scratch.failed) return 0.0;
        save_support(call, row, found);
        if (call.tau) ((C *)call.tau)[row] = (C)found.tau;
        if (!found.sound) return not_a_number<double>;
        if (call.slope)
            ((C *)call.slope)[row] = found.any ? (C)loss_slope(link, call.param, found.p, found.count, found.tau) : C(0);
        if (!found.any) return inf64;
        if (link.family == TRUNCATIONS) {
            C *const kept = scratch.take<C>(EXTRA, found.count), high = -infinity<C>;
            for (int64_t i = 0; kept && i < found.count; i++) high = larger(high, kept[i] = x[found.index[i]]);
            value = ((double)high - aim) + ::log1p(kept ? rest_of(kept, found.count, high) : 0.0);
            return value > 0.0 ? value : 0.0;
        }
        double high_p = 0.0;
        for (int64_t i = 0; i < found.count; i++) high_p = larger(high_p, (double)found.p[i]);
        Omega omega(link.threshold(), call.param, high_p);
        for (int64_t i = 0; i < found.count; i++) {
            const double p = found.p[i];
            if (!(p > 0.0)) continue;
            value += p * (((double)x[found.index[i]] - aim) + omega.own(p));
        }
        value -= omega.rest();
        return value > 0.0 ? value : 0.0;
    }
    const auto [high, sound] = scan_top(x, n);
    double tau = sound ? -inf64 : not_a_number<double>;
    if (call.tau) ((C *)call.tau)[row] = (C)tau;
    if (!sound) return tau;
    if (high == -infinity<C>) return inf64;
    double *work = scratch.take<double>(WORK, perturb_work(n, call.nodes));
    if (scratch.failed) return 0.0;
    value = perturb_loss<C>(call, x, n, t, &tau, work);
    if (call.tau) ((C *)call.tau)[row] = (C)tau;
    return value > 0.0 ? value : 0.0;
}

// scale (p - y), of the p > 0 at the indices.
template <class C, class P>
static void put_gradient(const Sink<C> &out, const int32_t *index, const P *p, int64_t count, int64_t t, C scale,
                         Scratch &scratch, const Team &team) {
    double *scaled = scratch.take<double>(EXTRA, count + 8);
    if (!scaled) return;
    for (int64_t i = 0; i < count; i++) scaled[i] = (double)p[i] * (double)scale;
    spread(out, index, scaled, count, team);
    const int64_t own = place_of(index, count, t);
    put(out, t, (C)(((own < 0 ? 0.0 : (double)p[own]) - 1.0) * (double)scale));
}

// scale (p - y) for a target class.
template <class C>
static void loss_gradient_row(const anymax_call &call, int64_t row, Source source, Link link, const C *x, int64_t t, C scale,
                              const Sink<C> &out, Scratch &scratch, const Team &team) {
    const int64_t n = call.n;
    if (link == EXPONENTIAL) {
        const auto [high, sound] = scan_top(x, n);
        if (settled(out, high, sound, C(0), team)) return sound ? put(out, t, -scale) : void();
        const C own = x[t];
        double rest;  // logsumexp less the maximum; a saved one far from 0 has lost too many digits of that
        if (call.tau && fabs((double)high) <= (sizeof(C) == 4 ? 32.0 : 4096.0))
            rest = (double)((const C *)call.tau)[row] - (double)high;
        else
            lse_row<C>(x, n, &rest, nullptr, scratch, team);
        exp_row(x, high, (C)(::exp(-rest) * (double)scale), out, scratch, team);
        double p = ::exp(((double)own - (double)high) - rest);
        return put(out, t, (C)((p - 1.0) * (double)scale));
    }
    const Saved<C> saved = saved_row<C>(call, row);
    if (saved.count >= 0) return put_gradient(out, saved.index, saved.value, saved.count, t, scale, scratch, team);
    NucleusRow<C> nucleus;
    if (link == NUCLEUS && source != CANDIDATES && nucleus_row(x, n, call.param, nucleus, scratch, team)) {
        if (scratch.failed) return;
        const int64_t first = t / width<C> * width<C>;
        const double own = (double)nucleus(first)[t - first];
        const vec<C> by = splat(scale);
        emit_over(
            out, nucleus.e,
            [=](int64_t i) ANYMAX_EACH {
                const vec<C> p = nucleus(i);
                return p == vec<C>{} ? p : p * by;
            },
            team);
        return put(out, t, (C)((own - 1.0) * (double)scale));
    }
    if (link.has_zeros()) {
        const Support<C> found = support_of(link, call.param, x, n, scratch, team);
        if (scratch.failed) return;
        if (!found.sound) return fill(out, not_a_number<C>);
        return put_gradient(out, found.index, found.p, found.count, t, scale, scratch, team);
    }
    const auto [high, sound] = scan_top(x, n);
    C *p = scratch.take<C>(EXTRA, n);
    if (!p) return;
    if (!sound) return fill(out, not_a_number<C>);
    if (high == -infinity<C>)
        memset(p, 0, (size_t)n * sizeof(C));
    else
        perturb_probabilities(call, x, n, p, nullptr, scratch);
    const C own = p[t];
    emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH { return load_or(p, i, n, C(0)) * scale; });
    put(out, t, (own - C(1)) * scale);
}

template <class C>
static void vjp_any(const anymax_call &call, int64_t row, Link link, const C *x, const C *p, const void *g, const Sink<C> &out,
                    Scratch &scratch, const Team &team) {
    const int64_t n = call.n;
    if (link == BOUNDED) return bounded_vjp_row(call, row, x, p, g, out, scratch, team);
    if (needs_scores(call.map)) {
        const auto [high, sound] = scan_top(x, n, scratch, team);
        if (settled(out, high, sound && link != NO_LINK, C(0), team)) return;
        const C *h = stage<C>(g, call.g.cls, call.dtype, nullptr, 0, n, scratch, STAGED_G);
        if (!h) return;
        if (link.family == RATIOS)
            return with_ratio(link.ratio(), call.param, x, n, high, scratch, team,
                              [&](const auto &u) { ratio_vjp_row(u, x, p, h, n, out, scratch, team); });
        C *to = scratch.take<C>(RESULT, n);
        double *work = scratch.take<double>(WORK, perturb_work(n, call.nodes));
        if (scratch.failed) return;
        perturb_vjp<C>(call, x, p, h, n, to, work);
        return emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH { return load_or(to, i, n, C(0)); });
    }
    const Sensitivity s(link, call.param, sizeof(C) == 4);
    const Saved<C> saved = saved_row<C>(call, row);
    if (saved.count >= 0) return vjp_found(s, saved, g, call.g.cls, call.dtype, out, scratch, team);
    vjp_row(s, saved_of(call), p, g, call.g.cls, call.dtype, n, out, scratch, team);
}

template <class C>
static void largest_of(const anymax_call &call, int64_t row, const C *x, Sink<C> out, Scratch &scratch, const Team &team) {
    const int64_t n = call.n, k = (int64_t)call.param;
    out.n = k;
    int64_t *at = call.positions + row * k;
    Kept<C> kept = largest_row(x, n, k, scratch, team);
    if (scratch.failed) return;
    if (!kept.sound || !kept.any()) {
        for (int64_t i = 0; i < k; i++) {
            at[i] = i;
            put(out, i, kept.sound ? -infinity<C> : not_a_number<C>);
        }
        return;
    }
    int64_t i = kept.count;
    in_order(kept, [&](int64_t place, C v, int32_t index) {
        put(out, place, v);
        at[place] = index;
    });
    for (int64_t j = 0; i < k && j < n; j++)  // fewer finite scores than k: the masked ones follow, by their place
        if (x[j] == -infinity<C>) {
            put(out, i, -infinity<C>);
            at[i++] = j;
        }
}

// Row r, which is (o, i), by its operation; the rows of its task end at `end`.
template <class C>
static void run_row(const anymax_call &call, int64_t r, int64_t o, int64_t i, int64_t end, Source source, Link link, const C *x,
                    const Sink<C> &out, Scratch &scratch, const Team &team) {
    const int64_t n = call.n, size = anymax_item(call.dtype);
    switch (call.op) {
        case ANYMAX_FORWARD: forward_row(call, r, source, link, x, out, scratch, team); break;
        case ANYMAX_LOG: log_row(call, link, x, out, scratch, team); break;
        case ANYMAX_VJP: {
            if (call.support.count) saved_ahead<C>(call, r, end);
            const bool saved = saved_row<C>(call, r).count >= 0 && (link == BOUNDED || !needs_scores(call.map));
            const C *p = saved
                             ? nullptr
                             : stage<C>(at(call, call.p, size, o, i), call.p.cls, call.dtype, nullptr, 0, n, scratch, STAGED_P);
            if (saved || p) vjp_any(call, r, link, x, p, at(call, call.g, size, o, i), out, scratch, team);
            break;
        }
        case ANYMAX_LOG_VJP: {
            const C *p = stage<C>(at(call, call.p, size, o, i), call.p.cls, call.dtype, nullptr, 0, n, scratch, STAGED_P);
            const C *g = stage<C>(at(call, call.g, size, o, i), call.g.cls, call.dtype, nullptr, 0, n, scratch, STAGED_G);
            if (p && g) log_vjp_row(call, x, p, g, out, scratch, team);
            break;
        }
        case ANYMAX_LOSS: {
            const int64_t t = call.index[r];
            double v = 0.0;
            if (call.slope) ((C *)call.slope)[r] = t < 0 ? C(0) : not_a_number<C>;  // until the row has one
            if (t >= n)
                v = not_a_number<double>;
            else if (t >= 0)
                v = loss_row(call, r, source, link, x, t, scratch, team);
            if (t < 0 || t >= n) {
                if (call.support.count) call.support.count[r] = 0;
                if (call.tau) ((C *)call.tau)[r] = (C)v;
            }
            ((C *)call.value)[r] = (C)v;
            break;
        }
        case ANYMAX_LOSS_GRAD: {
            const int64_t t = call.index[r];
            const C scale = ((const C *)call.scale)[r];
            if (t < 0)
                zeros(out, team);
            else if (t >= n)
                fill(out, not_a_number<C>);
            else
                loss_gradient_row(call, r, source, link, x, t, scale, out, scratch, team);
            break;
        }
        case ANYMAX_SLOPE: {  // of BOUNDED; the others' rows go together
            if (call.support.count) saved_ahead<C>(call, r, end);
            const C *p = saved_row<C>(call, r).count >= 0
                             ? nullptr
                             : stage<C>(at(call, call.p, size, o, i), call.p.cls, call.dtype, nullptr, 0, n, scratch, STAGED_P);
            if (!scratch.failed) bounded_slope_row(call, r, x, p, at(call, call.g, size, o, i), out, scratch, team);
            break;
        }
        case ANYMAX_THRESHOLD: ((C *)call.tau)[r] = (C)tau_row(call, link, x, scratch, team); break;
        case ANYMAX_LARGEST: largest_of(call, r, x, out, scratch, team); break;
    }
}

}  // namespace ANYMAX_UNIT
