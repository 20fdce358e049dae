// Backward passes: J^T g from p (or from its saved support), and the gradients of the fused losses.
#pragma once

#include "dense.hpp"

namespace ANYMAX_UNIT {

// s = 1 / omega''(p), dp/dt of a separable map, for p > 0.
struct Sensitivity {
    int32_t map;
    double exponent;  // s = p^exponent
    bool plain, root, steep;

    Sensitivity(int32_t m, double param) : map(m), exponent(1.0), plain(false), root(false), steep(false) {
        if (m == ANYMAX_SPARSEMAX || m == ANYMAX_BUDGET) exponent = 0.0;
        if (m == ANYMAX_ENTMAX || m == ANYMAX_NORMMAX) exponent = 2.0 - param;
        plain = exponent == 0.0;
        root = exponent == 0.5;
        steep = exponent < 0.0;
    }
    double operator()(double p) const {
        if (p != p) return p;
        if (!(p > 0.0) || (map == ANYMAX_BUDGET && p >= 1.0)) return 0.0;
        if (plain) return 1.0;
        if (exponent == 1.0) return p;
        if (root) return sqrt(p);
        double s = ::exp(exponent * ::log(p));
        return s < 1e230 ? s : 1e230;
    }
};

// J^T g over a support of `count` entries, in place of g: all in doubles.
inline void vjp_support(const Sensitivity &s, double alpha, const double *p, double *g, double *weight, int64_t count) {
    double rate = 0.0, most = -1.0, anchor = 0.0, dot = 0.0;
    if (s.map == ANYMAX_NORMMAX) {  // diag(w) - w p^T - p w^T + <w, 1> p p^T
        double norm = 0.0, mean = 0.0, all_w = 0.0;
        for (int64_t i = 0; i < count; i++) {
            norm += p[i] > 0.0 ? ::exp(alpha * ::log(p[i])) : 0.0 * p[i];
            mean += p[i] * g[i];
        }
        norm = ::exp((alpha - 1.0) / alpha * ::log(norm)) / (alpha - 1.0);
        for (int64_t i = 0; i < count; i++) {
            g[i] = s(p[i]) * norm * (g[i] - mean);
            all_w += g[i];
        }
        for (int64_t i = 0; i < count; i++) g[i] -= p[i] * all_w;
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        weight[i] = s(p[i]);
        rate += weight[i];
        if (s.steep && weight[i] > most) most = weight[i], anchor = g[i];
    }
    for (int64_t i = 0; i < count; i++) {
        g[i] -= anchor;
        dot += weight[i] * g[i];
    }
    const double mean = s.exponent == 1.0 ? dot : rate > 0.0 ? dot / rate : rate;
    for (int64_t i = 0; i < count; i++) g[i] = weight[i] * (g[i] - mean);
}

// A row of zeros but for `count` entries.
template <class C>
inline void spread(const Sink<C> &out, const int32_t *index, const double *value, int64_t count, Scratch &scratch, const Team &team) {
    if (out.past && out.direct && out.n * (int64_t)sizeof(C) < 8192) {  // made in the cache: a line that was written past it is slow to touch again
        C *row = scratch.take<C>(RESULT, out.n);
        if (!row) return;
        memset(row, 0, (size_t)out.n * sizeof(C));
        for (int64_t i = 0; i < count; i++) row[index[i]] = (C)value[i];
        return write(out.direct, 0, out.n, true, [&](int64_t i) { return load_or(row, i, out.n, C(0)); });
    }
    zeros(out, team);
    if (out.direct)
        for (int64_t i = 0; i < count; i++) out.direct[index[i]] = (C)value[i];
    else
        for (int64_t i = 0; i < count; i++) put(out, index[i], (C)value[i]);
}

template <class C>
ANYMAX_INLINE C read(const void *row, int64_t step, int32_t dtype, int64_t i) {
    int64_t k = i * step;
    switch (dtype) {
        case ANYMAX_F32: return (C)((const float *)row)[k];
        case ANYMAX_F64: return (C)((const double *)row)[k];
        case ANYMAX_BF16: return (C)from_bf16(((const uint16_t *)row)[k]);
        default: return (C)from_f16(((const uint16_t *)row)[k]);
    }
}

// The non-zeros of a row of probabilities; NaN counts as one.
template <class C>
inline Candidates<C> nonzeros(const C *p, int64_t n, Scratch &scratch) {
    constexpr int64_t W = width<C>;
    Candidates<C> c{scratch.take<C>(VALUES, n), scratch.take<int32_t>(INDICES, n), 0};
    if (!c.value || !c.index) return c;
    int64_t at = 0, i = 0;
    for (; i + 8 * W <= n; i += 8 * W) {
        ints<C> m[8], any{};
        for (int j = 0; j < 8; j++) {
            m[j] = ~(load(p + i + j * W) <= vec<C>{});
            any |= m[j];
        }
        if (!bits(any)) continue;
        for (int j = 0; j < 8; j++)
            if (bits(m[j])) at = append(load(p + i + j * W), m[j], (int32_t)(i + j * W), c.value, c.index, at);
    }
    for (; i < n; i++)
        if (!(p[i] <= 0)) c.value[at] = p[i], c.index[at++] = (int32_t)i;
    c.count = at;
    return c;
}

// The dense form: s p^exponent as a vector.
template <class C>
ANYMAX_INLINE vec<C> sensitivity(const Sensitivity &s, vec<C> p) {
    ints<C> in = ~(p <= vec<C>{});
    if (s.map == ANYMAX_BUDGET) in &= ~(p >= C(1));
    vec<C> w = s.plain ? splat(C(1)) + p * C(0) : s.root ? root2(p) : p;
    return in ? w : vec<C>{};
}

template <class C>
inline void vjp_dense(const Sensitivity &s, const C *p, const C *g, int64_t n, const Sink<C> &out, Scratch &scratch, const Team &team) {
    constexpr int64_t W = width<C>;
    const bool own = s.exponent == 1.0;
    vd rate{}, dot{};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        vec<C> a{}, b{};
        for (int j = 0; j < 4; j++) {
            vec<C> w = own ? load(p + i + j * W) : sensitivity<C>(s, load(p + i + j * W)), h = load(g + i + j * W);
            a += w;
            b += w == vec<C>{} ? vec<C>{} : w * h;
        }
        rate = widen_add(rate, a), dot = widen_add(dot, b);
    }
    for (; i < n; i += W) {
        vec<C> v = load_or(p, i, n, C(0)), w = own ? v : sensitivity<C>(s, v), h = load_or(g, i, n, C(0));
        rate = widen_add(rate, w), dot = widen_add(dot, w == vec<C>{} ? vec<C>{} : w * h);
    }
    const double total = sum(rate);
    const vec<C> mean = splat((C)(own ? sum(dot) : total > 0.0 ? sum(dot) / total : total));
    emit(out, scratch, team, [&](int64_t i) {
        vec<C> v = load_or(p, i, n, C(0)), w = own ? v : sensitivity<C>(s, v), h = load_or(g, i, n, C(0));
        return w == vec<C>{} ? vec<C>{} : w * (h - mean);
    });
}

// J^T g of a map whose backward needs p alone. `p` is staged; g is read where p is not 0.
template <class C>
inline void vjp_row(const Sensitivity &s, double alpha, const C *p, const void *g, int64_t g_step, int32_t dtype, int64_t n, const Sink<C> &out,
                    Scratch &scratch, const Team &team) {
    const bool vector_form = s.plain || s.root || s.exponent == 1.0;
    if (s.map == ANYMAX_SOFTMAX || n <= 16) {
        if (vector_form && s.map != ANYMAX_NORMMAX) {
            const C *h = stage<C>(g, g_step, dtype, nullptr, 0, n, scratch, STAGED_G);
            return h ? vjp_dense(s, p, h, n, out, scratch, team) : void();
        }
    }
    Candidates<C> c = nonzeros(p, n, scratch);
    if (scratch.failed) return;
    if (c.count > n / 8 + 8 && vector_form && s.map != ANYMAX_NORMMAX) {
        const C *h = stage<C>(g, g_step, dtype, nullptr, 0, n, scratch, STAGED_G);
        return h ? vjp_dense(s, p, h, n, out, scratch, team) : void();
    }
    double *w = scratch.take<double>(WIDE, c.count + 8), *h = scratch.take<double>(EXTRA, c.count + 8), *q = scratch.take<double>(SORTED, c.count + 8);
    if (scratch.failed) return;
    for (int64_t i = 0; i < c.count; i++) {
        h[i] = (double)read<C>(g, g_step, dtype, c.index[i]);
        q[i] = (double)c.value[i];
    }
    vjp_support(s, alpha, q, h, w, c.count);
    spread(out, c.index, h, c.count, scratch, team);
}

// The same from a saved support.
template <class C>
inline void vjp_saved(const Sensitivity &s, double alpha, const int32_t *index, const C *value, int64_t count, const void *g, int64_t g_step,
                      int32_t dtype, const Sink<C> &out, Scratch &scratch, const Team &team) {
    double *w = scratch.take<double>(WIDE, count + 8), *h = scratch.take<double>(EXTRA, count + 8), *q = scratch.take<double>(SORTED, count + 8);
    if (scratch.failed) return;
    for (int64_t i = 0; i < count; i++) {
        h[i] = (double)read<C>(g, g_step, dtype, index[i]);
        q[i] = (double)value[i];
    }
    vjp_support(s, alpha, q, h, w, count);
    spread(out, index, h, count, scratch, team);
}

// u'/Z (g - <p, g>).
template <class C, class U>
inline void ratio_vjp_row(const U &u, const C *x, const C *p, const C *g, int64_t n, const Sink<C> &out, Scratch &scratch, const Team &team) {
    C *e = scratch.take<C>(EXTRA, n);
    if (!e) return;
    const double z = weight_sum(x, n, u, e);
    constexpr int64_t W = width<C>;
    vd dot{};
    for (int64_t i = 0; i < n; i += W) {
        vec<C> v = load_or(p, i, n, C(0)), h = load_or(g, i, n, C(0));
        dot = widen_add(dot, v == vec<C>{} ? vec<C>{} : v * h);
    }
    const vec<C> mean = splat((C)sum(dot)), scale = splat((C)(z > 0.0 ? 1.0 / z : 0.0));
    emit(out, scratch, team, [&](int64_t i) {
        vec<C> d = u.slope(load_or(x, i, n, -infinity<C>)) * scale;
        return d == vec<C>{} ? vec<C>{} : d * (load_or(g, i, n, C(0)) - mean);
    });
}

}  // namespace ANYMAX_UNIT
