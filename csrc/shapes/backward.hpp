// J^T g from p or from its saved support.
#pragma once

#include "links/weights.hpp"
#include "plan.hpp"
#include "shapes/support.hpp"

namespace ANYMAX_UNIT {

// J^T g of normmax over a support of `count` entries, in place of g: diag(w) - w p^T - p w^T + <w, 1> p p^T.
template <class F>
inline void vjp_norm(const F &weigh, double alpha, const double *p, double *g, int64_t count) {
    constexpr int64_t W = width<double>;
    vd a{}, b{}, all_w{};
    for (int64_t i = 0; i < count; i += W) {
        const vd q = load(p + i);
        a += q > vd{} ? (alpha == 2.0 ? q * q : exp(log(q) * alpha)) : q * 0.0;
        b += q * load(g + i);
    }
    const double norm = ::exp((alpha - 1.0) / alpha * ::log(sum(a))) / (alpha - 1.0), mean = sum(b);
    for (int64_t i = 0; i < count; i += W) {
        const vd q = load(p + i), h = q == vd{} ? vd{} : weigh(q) * norm * (load(g + i) - mean);
        store(g + i, h);
        all_w += h;
    }
    const double total = sum(all_w);
    for (int64_t i = 0; i < count; i += W) store(g + i, load(g + i) - load(p + i) * total);
}

// J^T g over a support of `count` entries, in place of g: all in doubles, in whole vectors that end in zeros.
template <class F>
inline void vjp_support(const F &weigh, bool steep, const double *p, double *g, double *weight, int64_t count) {
    constexpr int64_t W = width<double>;
    vd a{}, b{};
    for (int64_t i = 0; i < count; i += W) {
        const vd w = weigh(load(p + i));
        store(weight + i, w);
        a += w;
    }
    if (steep) {
        double most = -1.0, anchor = 0.0;
        for (int64_t i = 0; i < count; i++)
            if (weight[i] > most) most = weight[i], anchor = g[i];
        for (int64_t i = 0; i < count; i++) g[i] -= anchor;
    }
    for (int64_t i = 0; i < count; i += W) b += load(weight + i) == vd{} ? vd{} : load(weight + i) * load(g + i);
    const double mean = mean_of<F>(sum(a), sum(b));
    for (int64_t i = 0; i < count; i += W)
        store(g + i, load(weight + i) == vd{} ? vd{} : load(weight + i) * (load(g + i) - mean));
}

// What lies at the `count` first of these indices, 0 in the lanes beyond. In registers: a vector that is read from numbers just
// written one by one has to wait for them, and with them for the zeros of the row before.
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
    for (int64_t j = 0; j < W; j++)
        if (j < count) with_numbers<double>(row, dtype, [&](auto number) ANYMAX_EACH { v[j] = number(index[j] * step); });
    return v;
}
ANYMAX_INLINE vf gathered(const float *row, const int32_t *index, int64_t count) {
    constexpr int64_t W = width<float>;
#if defined(__AVX512F__)
    const __mmask16 m = (__mmask16)(count >= W ? 65535 : (1 << count) - 1);
    return (vf)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), m, _mm512_maskz_loadu_epi32(m, index), row, 4);
#else
    vf v{};
    for (int64_t j = 0; j < W; j++) v[j] = j < count ? row[index[j]] : 0.0f;
    return v;
#endif
}
// The dense form. What is 0 takes no part: not even an infinite g there.
template <class C, class F>
inline void vjp_dense(const F &weigh, const C *p, const C *g, int64_t n, const Sink<C> &out, Scratch &scratch,
                      const Team &team) {
    constexpr int64_t W = width<C>;
    C *weight = F::expensive ? scratch.take<C>(EXTRA, n + W) : nullptr;
    if (scratch.failed) return;
    vd rate{}, dot{};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        vec<C> q[4], w[4], a{}, b{};
        for (int j = 0; j < 4; j++) q[j] = load(p + i + j * W);
        weigh.template operator()<4>(q, w);
        for (int j = 0; j < 4; j++) {
            if (F::expensive) store(weight + i + j * W, w[j]);
            if (!F::own) a += w[j];
            b += w[j] == vec<C>{} ? vec<C>{} : w[j] * load(g + i + j * W);
        }
        if (!F::own) rate = widen_add(rate, a);
        dot = widen_add(dot, b);
    }
    for (; i < n; i += W) {
        const vec<C> w = weigh(load_or(p, i, n, C(0)));
        if (F::expensive) store(weight + i, w);
        rate = widen_add(rate, w), dot = widen_add(dot, w == vec<C>{} ? vec<C>{} : w * load_or(g, i, n, C(0)));
    }
    const vec<C> mean = splat((C)mean_of<F>(sum(rate), sum(dot)));
    emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH {
        const vec<C> w = F::expensive ? load(weight + i) : weigh(load_or(p, i, n, C(0)));
        return w == vec<C>{} ? vec<C>{} : w * (load_or(g, i, n, C(0)) - mean);
    });
}

// J^T g from the non-zeros of p.
template <class C>
inline void vjp_found(const Sensitivity &s, const int32_t *index, const C *value, int64_t count, const void *g, int64_t g_step,
                      int32_t dtype, const Sink<C> &out, Scratch &scratch, const Team &team) {
    constexpr int64_t W = width<double>;
    double *w = scratch.take<double>(WIDE, count + W), *h = scratch.take<double>(EXTRA, count + W),
           *q = scratch.take<double>(SORTED, count + W);
    if (scratch.failed) return;
    for (int64_t i = 0; i < count; i += W) {
        store(h + i, gathered(g, g_step, dtype, index + i, count - i));
        store(q + i, load_wide_or(value, i, count, 0.0));
    }
    s.with([&](auto weigh) {
        if (s.link == NORM)
            vjp_norm(weigh, s.alpha, q, h, count);
        else
            vjp_support(weigh, s.steep, q, h, w, count);
    });
    spread(out, index, h, count, team);
}

// Zeros for the rows from r on whose supports are saved, as many as are cleared in one go; and the row after them.
inline int64_t clear_rows(const anymax_call &call, int64_t r, int64_t end, const Team &team) {
    const int64_t n = call.n, bytes = n * (int64_t)sizeof(float),
                  last = call.out.outer == n && 2 * bytes <= CLEARED_TOGETHER ? r + CLEARED_TOGETHER / bytes : r + 1;
    float *out = (float *)call.out.data + r * call.out.outer;
    int64_t after = r + 1;
    while (after < end && after < last && call.support.count[after] >= 0) after++;
    if (after > r + 1)
        zero_bytes((char *)out, (after - r) * bytes, false);
    else
        zeros(sink_of(out, n, false), team);
    return after;
}

// J^T g of rows of floats side by side, from their saved supports.
template <class F>
inline void vjp_saved(const F &weigh, const anymax_call &call, int64_t begin, int64_t end, bool bypass, Scratch &scratch,
                      const Team &team) {
    constexpr int64_t W = width<float>;
    const anymax_support &s = call.support;
    const int64_t n = call.n;
    const bool clear = call.fresh == 2, over = call.out.data == call.g.data;  // in place: a row's zeros come once its g is read
    float *weight = scratch.take<float>(BATCH_IN, s.capacity + W),
          *h = scratch.take<float>(BATCH_OUT, s.capacity + W);  // pieces that `by_rows` has no use for
    if (scratch.failed) return;
    for (int64_t r = begin, cleared = begin; r < end; r++) {
        saved_ahead<float>(call, r, end);
        const Saved<float> saved = saved_row<float>(call, r);
        const int64_t count = saved.count;
        float *out = (float *)call.out.data + r * call.out.outer;
        if (count < 0 && call.p.cls == 1 && n <= SAVED_SHARE * s.capacity) {
            const float *q = (const float *)call.p.data + r * call.p.outer, *h = (const float *)call.g.data + r * call.g.outer;
            vjp_dense(weigh, q, h, n, sink_of(out, n, bypass), scratch, team);
            continue;
        }
        if (count < 0) {
            by_rows<float>(call, r, r + 1, bypass, team, scratch);  // its support was too large to be saved
            continue;
        }
        if (!bypass && !clear && !over && r >= cleared) cleared = clear_rows(call, r, end, team);
        const float *g = (const float *)call.g.data + r * call.g.outer, *p = saved.value;
        const int32_t *index = saved.index;
        vd rate{}, dot{};
        for (int64_t i = 0; i < count; i += W) {
            const vf w = weigh(load_or(p, i, count, 0.0f)), v = gathered(g, index + i, count - i);
            store(weight + i, w);
            store(h + i, v);
            if (!F::own) rate = widen_add(rate, w);
            dot = widen_add(dot, w == vf{} ? vf{} : w * v);
        }
        const vf mean = splat((float)mean_of<F>(sum(rate), sum(dot)));
        for (int64_t i = 0; i < count; i += W) {
            const vf w = load(weight + i);
            store(h + i, w == vf{} ? vf{} : w * (load(h + i) - mean));
        }
        if (bypass && !clear) {
            spread_bypass(out, n, index, h, count, team);
            continue;
        }
        if (over) zero_bytes((char *)out, n * (int64_t)sizeof(float), false);
        for (int64_t i = 0; i < count; i++) out[index[i]] = h[i];
    }
}

// The dense form of short rows of floats, as many in turn as a vector has lanes, so that no row waits for its own sums across
// lanes.
template <bool NORM, class F>
inline void vjp_short(const F &weigh, double alpha, const anymax_call &call, int64_t begin, int64_t end, bool bypass,
                      Scratch &scratch) {
    constexpr int64_t W = width<float>;
    const int64_t n = call.n, step = (n + W - 1) / W * W + W;
    float *const weight = F::expensive ? scratch.take<float>(EXTRA, W * step) : nullptr;
    if (scratch.failed) return;
    auto row = [&](const anymax_view &v, int64_t r) ANYMAX_EACH { return (float *)at(call, v, sizeof(float), r, 0); };
    auto size_of = [&](int64_t r) ANYMAX_EACH { return call.sizes ? call.sizes[r] : n; };
    const int64_t block = n > BACKWARD_BLOCK && W > 8 ? 8 : W;  // rows whose p, g and results stay in the first cache
    for (int64_t first = begin; first < end; first += block) {
        const int64_t count = end - first < block ? end - first : block;
        const bool ahead = bypass && !call.starts && end - first >= 2 * block && call.p.outer == n &&
                           call.g.outer == n;     // nearer than memory it would cost more
        vf rate[W], dot[W], power[W], centre[W];  // sums of w, w g; and for normmax of p^alpha, p g
        float mean[W], norm[W], total[W];
        for (int64_t r = 0; r < W; r++) rate[r] = dot[r] = power[r] = centre[r] = vf{};
        for (int64_t r = 0; r < count; r++) {
            const int64_t size = size_of(first + r);
            const float *p = row(call.p, first + r), *g = row(call.g, first + r);
            vf of_w{}, of_wg{}, of_power{}, of_pg{};  // in registers
            auto weighed = [&](int64_t i, vf q, vf w, vf v) ANYMAX_EACH {
                if (F::expensive) store(weight + r * step + i, w);
                if (NORM) of_power += w == vf{} ? vf{} : q * q / w, of_pg += w == vf{} ? vf{} : q * v;
                if (!F::own) of_w += w;
                of_wg += w == vf{} ? vf{} : w * v;
            };
            int64_t i = 0;
            for (; i + 4 * W <= size; i += 4 * W) {
                vf q[4], w[4];
                for (int64_t j = 0; j < 4; j++) q[j] = load(p + i + j * W);
                weigh.template operator()<4>(q, w);
                for (int64_t j = 0; j < 4; j++) weighed(i + j * W, q[j], w[j], load(g + i + j * W));
            }
            for (; i < size; i += W) {
                const vf q = load_or(p, i, size, 0.0f);
                weighed(i, q, weigh(q), load_or(g, i, size, 0.0f));
            }
            rate[r] = of_w, dot[r] = of_wg, power[r] = of_power, centre[r] = of_pg;
        }
        const vf weighted = sums(dot);
        if (NORM) {
            const vf middle = sums(centre),
                     scale = exp(log(sums(power)) * (float)((alpha - 1.0) / alpha)) * (float)(1.0 / (alpha - 1.0));
            store(mean, middle), store(norm, scale), store(total, scale * (weighted - middle * sums(rate)));
        } else {
            store(mean, mean_of<F>(F::own ? vf{} : sums(rate), weighted));
        }
        for (int64_t r = 0; r < count; r++) {
            const int64_t size = size_of(first + r);
            const float *p = row(call.p, first + r), *g = row(call.g, first + r);
            const vf m = splat(mean[r]);
            for (int64_t i = 0; ahead && i < n; i += 16) {
                __builtin_prefetch(p + block * n + i);
                __builtin_prefetch(g + block * n + i);
            }
            write(row(call.out, first + r), 0, size, bypass, [&](int64_t i) ANYMAX_EACH {
                const vf w = F::expensive ? load(weight + r * step + i) : weigh(load_or(p, i, size, 0.0f)),
                         v = w * (load_or(g, i, size, 0.0f) - m);
                return w == vf{} ? vf{} : NORM ? rounded(v * norm[r]) - load_or(p, i, size, 0.0f) * total[r] : v;
            });
        }
    }
}

// The same of short rows side by side, one a lane: each sum has the order of the one above.
template <class F>
inline void vjp_beside(const F &weigh, const anymax_call &call, int64_t begin, int64_t end) {
    constexpr int64_t W = width<float>;
    const int64_t n = call.n;
    vf p[BESIDE_MOST], g[BESIDE_MOST], w[BESIDE_MOST];
    auto sum_of = [&](vf *lane) ANYMAX_EACH {
        for (int64_t half = W / 2; half; half /= 2)
            for (int64_t j = 0; j < half; j++) lane[j] = lane[j] + lane[j + half];
        return lane[0];
    };
    for (int64_t r = begin; r < end; r += W) {
        const int64_t count = end - r < W ? end - r : W;
        lanes_beside<true>(call, call.p, r, count, n, (float *)p);
        lanes_beside<true>(call, call.g, r, count, n, (float *)g);
        vf rate[W] = {}, dot[W] = {};
        for (int64_t k = n; k & 3; k++) p[k] = vf{};
        for (int64_t k = 0; k < n; k += 4) weigh.template operator()<4>(p + k, w + k);
        for (int64_t k = 0; k < n; k++) {
            if (!F::own) rate[k % W] += w[k];
            dot[k % W] += w[k] == vf{} ? vf{} : w[k] * g[k];
        }
        const vf mean = mean_of<F>(F::own ? vf{} : sum_of(rate), sum_of(dot));
        for (int64_t k = 0; k < n; k++) p[k] = w[k] == vf{} ? vf{} : w[k] * (g[k] - mean);
        lanes_beside<false>(call, call.out, r, count, n, (float *)p);
    }
}

// J^T g of a map whose backward needs p alone. `p` is staged; g is read where p is not 0.
template <class C>
inline void vjp_row(const Sensitivity &s, const C *p, const void *g, int64_t g_step, int32_t dtype, int64_t n,
                    const Sink<C> &out, Scratch &scratch, const Team &team) {
    const bool may = !s.steep && s.link != NORM;
    bool dense =
        may && (s.link == EXPONENTIAL || n < (bit(s.link) & (CURVES | bit(ANY_POWER)) ? WORTH_SEEKING_WIDE : WORTH_SEEKING));
    Candidates<C> c{nullptr, nullptr, 0};
    if (!dense) {
        const int64_t many = many_nonzeros(n);
        c = nonzeros(p, n, C(0), may ? many : n, scratch, may);
        if (scratch.failed) return;
        dense = may && c.count > many;
    }
    if (!dense) return vjp_found(s, c.index, c.value, c.count, g, g_step, dtype, out, scratch, team);
    const C *h = stage<C>(g, g_step, dtype, nullptr, 0, n, scratch, STAGED_G);
    if (h) s.with([&](auto weigh) { vjp_dense(weigh, p, h, n, out, scratch, team); });
}

}  // namespace ANYMAX_UNIT
