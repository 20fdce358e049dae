// Sums of exponentials, and softmax.
#pragma once

#include "shapes/scan.hpp"

namespace ANYMAX_UNIT {

// sum exp(x - high) over [begin, end), blocks summed in C and then as doubles; with `keep`, the exponentials too. high is at
// least every x. `next`, in step with x, is asked for meanwhile.
template <class C, bool KEEP>
inline double exp_sum(const C *x, int64_t begin, int64_t end, C high, C *keep, const C *next = nullptr) {
    constexpr int64_t W = width<C>;
    const vec<C> m = splat(high);
    vd wide{};
    int64_t i = begin;
    while (i + 4 * W <= end) {
        vec<C> a{}, b{};
        for (int64_t stop = i + 16 * W <= end ? i + 16 * W : end; i + 4 * W <= stop; i += 4 * W) {
            vec<C> v[4];
            for (int j = 0; j < 4; j++) v[j] = load(x + i + j * W) - m;
            if (next)
                for (int j = 0; j < 4; j++) __builtin_prefetch(next + i + j * W, 0, 2);
            exp_below<4>(v);
            a += v[0] + v[1], b += v[2] + v[3];
            if (KEEP)
                for (int j = 0; j < 4; j++) store(keep + i + j * W, v[j]);
        }
        wide = widen_add(wide, a + b);
    }
    for (; i < end; i += W) {
        vec<C> p = load_or(x, i, end, -infinity<C>) - m;
        exp_below<1>(&p);
        wide = widen_add(wide, p);
        if (KEEP) store_within(keep, i, end, p);
    }
    return sum(wide);
}

// to = exp(x - high) * factor over [begin, end).
template <class C>
inline void exp_write(C *to, const C *x, int64_t begin, int64_t end, C high, C factor, bool bypass) {
    constexpr int64_t W = width<C>;
    const vec<C> m = splat(high), scale = splat(factor);
    auto vector_at = [&](int64_t i) ANYMAX_EACH {
        vec<C> p = load_or(x, i, end, -infinity<C>) - m;
        exp_below<1>(&p);
        return p * scale;
    };
    int64_t i = begin;
    if (bypass) {
        const int64_t lead = unaligned(to + i, end - i);
        if (lead) store_part(to + i, vector_at(i), lead);
        i += lead;
    }
    for (; i + 4 * W <= end; i += 4 * W) {
        vec<C> v[4];
        for (int j = 0; j < 4; j++) v[j] = load(x + i + j * W) - m;
        exp_below<4>(v);
        for (int j = 0; j < 4; j++) {
            if (bypass)
                stream(to + i + j * W, v[j] * scale);
            else
                store(to + i + j * W, v[j] * scale);
        }
    }
    for (; i + W <= end; i += W) store(to + i, vector_at(i));
    if (i < end) store_part(to + i, vector_at(i), end - i);
}

template <class C>
struct Sums {
    C top;
    double z;  // sum exp(x - top)
    bool sound;
};

// The maximum and the sum of exponentials in one reading from memory: chunks that stay in the first cache, rescaled when the
// maximum rises.
template <class C>
inline Sums<C> running(const C *x, int64_t begin, int64_t end) {
    constexpr int64_t CHUNK = EXPONENTIALS_CHUNK / sizeof(C);
    Sums<C> s{-infinity<C>, 0.0, true};
    for (int64_t i = begin; i < end; i += CHUNK) {
        int64_t e = i + CHUNK < end ? i + CHUNK : end;
        const auto [high, sound] = scan_top(x + i, e - i);
        if (!sound) return Sums<C>{high, 0.0, false};
        if (high == -infinity<C>) continue;
        if (high > s.top) s.z *= ::exp((double)s.top - (double)high), s.top = high;
        s.z += exp_sum<C, false>(x, i, e, s.top, nullptr, e < end ? x + CHUNK : nullptr);  // the next chunk comes meanwhile
    }
    return s;
}

template <class C>
inline Sums<C> sums(const C *x, int64_t n, Scratch &scratch, const Team &team) {
    int64_t count = pieces_of(n);
    if (count == 1) return running(x, 0, n);
    Sums<C> *part = scratch.take<Sums<C>>(PARTIAL, count);
    if (!part) return Sums<C>{};
    pieces(team, n, [&](int64_t k, int64_t b, int64_t e) { part[k] = running(x, b, e); });
    Sums<C> s{-infinity<C>, 0.0, true};
    for (int64_t k = 0; k < count; k++) {
        s.sound = s.sound && part[k].sound;
        s.top = larger(s.top, part[k].top);
    }
    for (int64_t k = 0; k < count && s.sound; k++)
        if (part[k].top > -infinity<C>) s.z += part[k].z * ::exp((double)part[k].top - (double)s.top);
    return s;
}

// exp(x - high) * factor as a row.
template <class C>
inline void exp_row(const C *x, C high, C factor, const Sink<C> &out, Scratch &scratch, const Team &team) {
    C *to = out.direct ? out.direct : scratch.take<C>(RESULT, out.n);
    if (!to) return;
    pieces(team, out.n, [&](int64_t, int64_t b, int64_t e) { exp_write(to, x, b, e, high, factor, out.direct && out.bypass); });
    if (to != out.direct) deliver(out, to);
}

template <class C>
inline void softmax_row(const C *x, int64_t n, const Sink<C> &out, bool logarithm, Scratch &scratch, const Team &team) {
    if (!logarithm && n * (int64_t)sizeof(C) <= EXPONENTIALS_KEPT && n <= PIECE) {
        const auto [high, sound] = scan_top(x, n);
        if (settled(out, high, sound, C(0), team)) return;
        bool inplace = out.direct && !out.bypass && out.direct != x;
        C *e = inplace ? out.direct : scratch.take<C>(RESULT, n);
        if (!e) return;
        const vec<C> scale = splat((C)(1.0 / exp_sum<C, true>(x, 0, n, high, e, out.next)));
        return emit_over(out, e, [=](int64_t i) ANYMAX_EACH { return load_or(e, i, n, C(0)) * scale; });
    }
    const Sums<C> s = sums(x, n, scratch, team);
    if (settled(out, s.top, s.sound, logarithm ? -infinity<C> : C(0), team)) return;
    const vec<C> high = splat(s.top);
    if (logarithm) {
        const vec<C> l = splat((C)::log(s.z));
        emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH { return (load_or(x, i, n, C(0)) - high) - l; });
    } else {
        exp_row(x, s.top, (C)(1.0 / s.z), out, scratch, team);
    }
}

// sum exp(x - top) but for one that is equal to the top: a small one keeps its digits.
template <class C>
inline double rest_of(const C *x, int64_t n, C top) {
    constexpr int64_t W = width<double>;
    const double high = (double)top;
    vd more{};
    int64_t tied = -1;
    for (int64_t i = 0; i < n; i += W) {
        const vd y = load_wide_or(x, i, n, -inf64) - high;
        const vl same = y == vd{};
        tied += __builtin_popcount(bits(same));
        more += same ? vd{} : exp(y);
    }
    return sum(more) + (double)tied;
}

// log sum exp(x); with `rest` and `top` also log sum exp(x - top), where 1 + rest keeps the digits of a small loss, and the
// maximum.
template <class C>
inline double lse_row(const C *x, int64_t n, double *rest, C *top, Scratch &scratch, const Team &team) {
    const Sums<C> s = sums(x, n, scratch, team);
    if (top) *top = s.top;
    if (!s.sound) return not_a_number<double>;
    if (s.top == -infinity<C>) return -inf64;
    double more = s.z - 1.0;
    if (more < 1e-3) more = rest_of(x, n, s.top);
    const double l = ::log1p(more);
    if (rest) *rest = l;
    return (double)s.top + l;
}

}  // namespace ANYMAX_UNIT
