// Backward passes: J^T g from p (or from its saved support), and the gradients of the fused losses.
#pragma once

#include "curve.hpp"
#include "dense.hpp"

namespace ANYMAX_UNIT {

// s = 1 / omega''(p), dp/dt of a separable map: p^exponent for p > 0. NaN stays NaN.
struct Sensitivity {
    int32_t map;
    double exponent;
    bool plain, own, root, roots, steep, rough;

    // rough: for results in floats
    Sensitivity(int32_t m, double param, bool single) : map(m), exponent(1.0) {
        if (m == ANYMAX_SPARSEMAX || m == ANYMAX_BUDGET) exponent = 0.0;
        if (m == ANYMAX_ENTMAX || m == ANYMAX_NORMMAX) exponent = 2.0 - param;
        plain = exponent == 0.0;
        own = exponent == 1.0;
        root = exponent == 0.5;
        roots = exponent == 0.75;
        steep = exponent < 0.0;
        rough = single && !steep && exponent < 1.0;
    }
    template <class V>
    ANYMAX_INLINE V operator()(V p) const {
        typedef scalar<V> C;
        auto in = ~(p <= V{});
        if (map == ANYMAX_BUDGET) in &= ~(p >= C(1));
        V w = p;
        if (plain) {
            w = all<V>(C(1)) + p * C(0);
        } else if (root) {
            w = root2(p);
        } else if (roots) {
            const V half = root2(p);
            w = half * root2(half);
        } else if (rough) {
            w = larger(p, all<V>(C(1.2e-38)));
            power_inside<1>(&w, exponent);
            w = p != p ? p : w;
        } else if (!own) {
            w = exp(log(p) * C(exponent));
            w = sizeof(C) == 8 && steep ? (w < C(1e230) ? w : all<V>(C(1e230))) : w;
            w = p != p ? p : w;
        }
        return in ? w : V{};
    }
};

// J^T g over a support of `count` entries, in place of g: all in doubles, in whole vectors that end in zeros.
inline void vjp_support(const Sensitivity &s, double alpha, const double *p, double *g, double *weight, int64_t count) {
    constexpr int64_t W = width<double>;
    const int64_t whole = (count + W - 1) / W * W;
    vd a{}, b{};
    if (s.map == ANYMAX_NORMMAX) {  // diag(w) - w p^T - p w^T + <w, 1> p p^T
        for (int64_t i = 0; i < whole; i += W) {
            const vd q = load(p + i);
            a += q > vd{} ? (alpha == 2.0 ? q * q : exp(log(q) * alpha)) : q * 0.0;
            b += q * load(g + i);
        }
        const double norm = ::exp((alpha - 1.0) / alpha * ::log(sum(a))) / (alpha - 1.0), mean = sum(b);
        vd all_w{};
        for (int64_t i = 0; i < whole; i += W) {
            const vd q = load(p + i), h = q == vd{} ? vd{} : s(q) * norm * (load(g + i) - mean);
            store(g + i, h);
            all_w += h;
        }
        const double total = sum(all_w);
        for (int64_t i = 0; i < whole; i += W) store(g + i, load(g + i) - load(p + i) * total);
        return;
    }
    for (int64_t i = 0; i < whole; i += W) {
        const vd w = s(load(p + i));
        store(weight + i, w);
        a += w;
    }
    if (s.steep) {
        double most = -1.0, anchor = 0.0;
        for (int64_t i = 0; i < count; i++)
            if (weight[i] > most) most = weight[i], anchor = g[i];
        for (int64_t i = 0; i < count; i++) g[i] -= anchor;
    }
    for (int64_t i = 0; i < whole; i += W) b += load(weight + i) * load(g + i);
    const double rate = sum(a), dot = sum(b), mean = s.own ? dot : rate > 0.0 ? dot / rate : rate;
    for (int64_t i = 0; i < whole; i += W) store(g + i, load(weight + i) * (load(g + i) - mean));
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

// What lies at the `count` first of these indices, 0 in the lanes beyond. In registers: a vector that is read from numbers just written one by one
// has to wait for them, and with them for the zeros of the row before.
template <class C>
ANYMAX_INLINE vd gathered(const void *row, int64_t step, int32_t dtype, const int32_t *index, int64_t count) {
    constexpr int64_t W = width<double>;
#if defined(__AVX512F__)
    if (dtype == ANYMAX_F32 && step == 1) {
        const __mmask8 m = (__mmask8)(count >= W ? 255 : (1 << count) - 1);
        const __m256i at = _mm256_maskz_loadu_epi32(m, index);
        return (vd)_mm512_cvtps_pd(_mm256_mmask_i32gather_ps(_mm256_setzero_ps(), m, at, (const float *)row, 4));
    }
#endif
    vd v{};
    for (int64_t j = 0; j < W; j++) v[j] = j < count ? (double)read<C>(row, step, dtype, index[j]) : 0.0;
    return v;
}
ANYMAX_INLINE vd widened(const float *p, int64_t count) {
    if (count >= width<double>) return load_wide(p);
    vd v{};
    for (int64_t j = 0; j < width<double>; j++) v[j] = j < count ? (double)p[j] : 0.0;
    return v;
}
ANYMAX_INLINE vd widened(const double *p, int64_t count) { return load_or(p, 0, count, 0.0); }

// The dense form. What is 0 takes no part: not even an infinite g there.
template <class C>
inline void vjp_dense(const Sensitivity &s, const C *p, const C *g, int64_t n, const Sink<C> &out, Scratch &scratch, const Team &team) {
    constexpr int64_t W = width<C>;
    C *weight = s.plain || s.own || s.root ? nullptr : scratch.take<C>(EXTRA, n + W);  // what is dear to compute twice
    if (scratch.failed) return;
    vd rate{}, dot{};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        vec<C> a{}, b{};
        for (int j = 0; j < 4; j++) {
            vec<C> w = s(load(p + i + j * W)), h = load(g + i + j * W);
            if (weight) store(weight + i + j * W, w);
            a += w;
            b += w == vec<C>{} ? vec<C>{} : w * h;
        }
        rate = widen_add(rate, a), dot = widen_add(dot, b);
    }
    for (; i < n; i += W) {
        vec<C> w = s(load_or(p, i, n, C(0))), h = load_or(g, i, n, C(0));
        if (weight) store(weight + i, w);
        rate = widen_add(rate, w), dot = widen_add(dot, w == vec<C>{} ? vec<C>{} : w * h);
    }
    const double total = sum(rate);
    const vec<C> mean = splat((C)(s.own ? sum(dot) : total > 0.0 ? sum(dot) / total : total));
    emit(out, scratch, team, [&](int64_t i) {
        vec<C> w = weight ? load(weight + i) : s(load_or(p, i, n, C(0))), h = load_or(g, i, n, C(0));
        return w == vec<C>{} ? vec<C>{} : w * (h - mean);
    });
}

// J^T g from the non-zeros of p.
template <class C>
inline void vjp_found(const Sensitivity &s, double alpha, const int32_t *index, const C *value, int64_t count, const void *g, int64_t g_step,
                      int32_t dtype, const Sink<C> &out, Scratch &scratch, const Team &team) {
    constexpr int64_t W = width<double>;
    double *w = scratch.take<double>(WIDE, count + W), *h = scratch.take<double>(EXTRA, count + W), *q = scratch.take<double>(SORTED, count + W);
    if (scratch.failed) return;
    for (int64_t i = 0; i < count; i += W) {
        store(h + i, gathered<C>(g, g_step, dtype, index + i, count - i));
        store(q + i, widened(value + i, count - i));
    }
    vjp_support(s, alpha, q, h, w, count);
    spread(out, index, h, count, scratch, team);
}

// J^T g of a map whose backward needs p alone. `p` is staged; g is read where p is not 0.
template <class C>
inline void vjp_row(const Sensitivity &s, double alpha, const C *p, const void *g, int64_t g_step, int32_t dtype, int64_t n, const Sink<C> &out,
                    Scratch &scratch, const Team &team) {
    const bool dense = !s.steep && s.map != ANYMAX_NORMMAX;
    if (dense && (s.map == ANYMAX_SOFTMAX || n <= 16)) {
        const C *h = stage<C>(g, g_step, dtype, nullptr, 0, n, scratch, STAGED_G);
        return h ? vjp_dense(s, p, h, n, out, scratch, team) : void();
    }
    Candidates<C> c = nonzeros(p, n, scratch);
    if (scratch.failed) return;
    if (dense && c.count > n / 8 + 8) {
        const C *h = stage<C>(g, g_step, dtype, nullptr, 0, n, scratch, STAGED_G);
        return h ? vjp_dense(s, p, h, n, out, scratch, team) : void();
    }
    vjp_found(s, alpha, c.index, c.value, c.count, g, g_step, dtype, out, scratch, team);
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
