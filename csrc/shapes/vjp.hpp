// J^T g, once for all ways in which rows lie: w (g - mean), w the weights of the classes (links/weights.hpp) and mean that of g
// by them; of normmax N w (g - <p, g>) - p <N w, g - <p, g>>. What is 0 takes no part: not even an infinite g there.
#pragma once

#include "core/rows.hpp"
#include "links/weights.hpp"

namespace ANYMAX_UNIT {

// -- sums: place i of a row adds v

// In doubles, of the few vectors that come together in their own type.
template <class C>
struct WideSum {
    vd all{};
    vec<C> few{};

    ANYMAX_INLINE void add(int64_t, vec<C> v) { few += v; }
    ANYMAX_INLINE void pause() { all = widen_add(all, few), few = vec<C>{}; }
    ANYMAX_INLINE double total() const { return sum(all); }
};
// In floats, for rows in turn.
struct FloatSum {
    vf all{};

    ANYMAX_INLINE void add(int64_t, vf v) { all += v; }
    ANYMAX_INLINE void pause() {}
};
// Of rows one a lane: each in the order of its FloatSum.
struct LaneSum {
    vf all[width<float>] = {};

    ANYMAX_INLINE void add(int64_t i, vf v) { all[i / width<float> % width<float>] += v; }
    ANYMAX_INLINE void pause() {}
    ANYMAX_INLINE vf total() {
        for (int64_t half = width<float> / 2; half; half /= 2)
            for (int64_t j = 0; j < half; j++) all[j] = all[j] + all[j + half];
        return all[0];
    }
};

// -- views: p and g of one row, or of rows one a lane; where the product goes, by write(f), whose f(i) gives the vector at
//    place i and reads what lies there alone; and weights that are too expensive to compute twice. Here all of it is in whole
//    vectors

template <class C, class S, int K>
struct View {
    typedef C Number;
    typedef S Sum;
    static constexpr int TOGETHER = K;  // vectors
    template <class F>
    static constexpr bool KEEPS = K == 1 || F::expensive;
    const C *p, *g;
    C *to, *weights;
    int64_t n;

    // g at place i for the first time, one of `together` vectors.
    template <int together>
    ANYMAX_INLINE vec<C> first_g(int64_t i) const {
        return together > 1 ? load(g + i) : load_or(g, i, n, C(0));
    }
    ANYMAX_INLINE vec<C> g_again(int64_t i) const { return load_or(g, i, n, C(0)); }
    template <class F>
    ANYMAX_INLINE void write(F f) const {
        for (int64_t i = 0; i < n; i += width<C>) store(to + i, f(i));
    }
};
typedef View<float, LaneSum, 4> RowsBeside;  // one a lane: n is that of all their classes

// All of a row.
template <class C>
struct WholeRow : View<C, WideSum<C>, 4> {
    const Sink<C> &out;
    Scratch &scratch;
    const Team &team;

    template <class F>
    ANYMAX_INLINE void write(F f) const {
        emit(out, scratch, team, f);
    }
};

// One of several short rows in turn; behind it by `ahead`, if not 0, lie those that come next.
struct RowInTurn : View<float, FloatSum, 4> {
    bool aside, bypass;  // where the caches are written around it may lie apart from the others
    int64_t ahead;

    template <class F>
    ANYMAX_INLINE void write(F f) const {
        for (int64_t i = ahead; ahead && i < ahead + n; i += 16) {
            __builtin_prefetch(p + i), __builtin_prefetch(g + i);
            if (!aside) __builtin_prefetch(to + i, 1);
        }
        ANYMAX_UNIT::write(to, 0, n, bypass, f);
    }
};

// What lies at the `count` first of these indices, 0 in the lanes beyond. In registers: a vector that is read from numbers just
// written one by one has to wait for them, and with them for the zeros of the row before.
template <class N>
ANYMAX_INLINE vec<N> gathered(const void *row, int64_t step, int32_t dtype, const int32_t *index, int64_t count) {
    constexpr int64_t W = width<N>;
#if defined(__AVX512F__)
    if (dtype == ANYMAX_F32 && step == 1) {
        const __mmask16 m = (__mmask16)(count >= W ? (1 << W) - 1 : (1 << count) - 1);
        const __m512i at = _mm512_maskz_loadu_epi32(m, index);
        const vf v = (vf)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), m, at, row, 4);
        if constexpr (sizeof(N) == 4)
            return v;
        else
            return low(v);
    }
#endif
    vec<N> v{};
    for (int64_t j = 0; j < W; j++)
        if (j < count) with_numbers<N>(row, dtype, [&](auto number) ANYMAX_EACH { v[j] = number(index[j] * step); });
    return v;
}

// The classes of a support, whose g, less `from`, are gathered; the product takes their place.
template <class C>
struct SupportRow : View<C, WideSum<C>, 1> {
    const void *all_g;
    int64_t step;
    int32_t dtype;
    const int32_t *index;
    vec<C> from;

    template <int>
    ANYMAX_INLINE vec<C> first_g(int64_t i) const {
        const vec<C> v = gathered<C>(all_g, step, dtype, index + i, this->n - i) - from;
        store(this->to + i, v);
        return v;
    }
    ANYMAX_INLINE vec<C> g_again(int64_t i) const { return load(this->to + i); }
};

// -- the product

// Of w and w g; of normmax those of p^alpha and p g as well.
template <class Sum>
struct WeightSums {
    Sum w, wg, power, pg;
};
template <bool NORM, class View, class F>
ANYMAX_INLINE WeightSums<typename View::Sum> sums_of(const View &view, const F &weigh) {
    typedef typename View::Number C;
    constexpr int64_t W = width<C>, K = View::TOGETHER;
    WeightSums<typename View::Sum> s;
    const auto add = [&](auto &p, int64_t first) ANYMAX_EACH {
        constexpr int count = sizeof p / sizeof p[0];
        vec<C> w[count];
        weigh.template operator()<count>(p, w);
        for (int j = 0; j < count; j++) {
            const int64_t i = first + j * W;
            const vec<C> g = view.template first_g<count>(i);
            const auto unless_0 = [&](vec<C> v) ANYMAX_EACH { return w[j] == vec<C>{} ? vec<C>{} : v; };
            if (View::template KEEPS<F>) store(view.weights + i, w[j]);
            if (NORM) s.power.add(i, unless_0(p[j] * p[j] / w[j])), s.pg.add(i, unless_0(p[j] * g));
            if (NORM || !F::own) s.w.add(i, w[j]);
            s.wg.add(i, unless_0(w[j] * g));
        }
        if (NORM) s.power.pause(), s.pg.pause();
        if (NORM || !F::own) s.w.pause();
        s.wg.pause();
    };
    int64_t i = 0;
    for (; K > 1 && i + K * W <= view.n; i += K * W) {
        vec<C> p[K];
        for (int j = 0; j < K; j++) p[j] = load(view.p + i + j * W);
        add(p, i);
    }
    for (; i < view.n; i += W) {
        const vec<C> p[1] = {load_or(view.p, i, view.n, C(0))};
        add(p, i);
    }
    return s;
}

// Normmax'. Its views have p / most: where that is not far from 1, its powers are numbers for any alpha.
struct Norm {
    double alpha, most = 1.0;
};
// The mean of g; of normmax N and <N w, g - mean> as well. total(sum) joins the lanes of one.
template <class S>
struct Means {
    S mean, norm, total;
};
ANYMAX_INLINE double times(double v, double by) { return v * by; }
ANYMAX_INLINE vf times(vf v, double by) { return v * (float)by; }
ANYMAX_INLINE double norm_of(double powers, const Norm &of) {
    return of.most * ::exp((of.alpha - 1.0) / of.alpha * ::log(powers)) / (of.alpha - 1.0);
}
ANYMAX_INLINE vf norm_of(vf powers, const Norm &of) {
    return exp(times(log(powers), (of.alpha - 1.0) / of.alpha)) * (float)(of.most / (of.alpha - 1.0));
}
template <bool NORM, class F, class All, class T>
ANYMAX_INLINE auto means_of(All &s, const Norm &of, T total) {
    const auto wg = total(s.wg);
    typedef decltype(total(s.wg)) S;
    if constexpr (NORM) {
        const S mean = times(total(s.pg), of.most), norm = norm_of(total(s.power), of);
        return Means<S>{mean, norm, times(norm * (wg - mean * total(s.w)), of.most)};
    } else {
        return Means<S>{mean_of<F>(F::own ? S{} : total(s.w), wg), S{}, S{}};
    }
}

template <bool NORM, class View, class F, class S>
ANYMAX_INLINE void write_product(const View &view, const F &weigh, const Means<S> &m) {
    typedef typename View::Number C;
    const auto in_lanes = [](S s) ANYMAX_EACH {
        if constexpr (sizeof s == sizeof(vec<C>))
            return s;
        else
            return splat((C)s);
    };
    const vec<C> mean = in_lanes(m.mean), norm = in_lanes(m.norm), total = in_lanes(m.total);
    view.write([=](int64_t i) ANYMAX_EACH {
        const vec<C> w = View::template KEEPS<F> ? load(view.weights + i) : weigh(load_or(view.p, i, view.n, C(0))),
                     v = w * (view.g_again(i) - mean);
        return w == vec<C>{} ? vec<C>{} : NORM ? rounded(v * norm) - load_or(view.p, i, view.n, C(0)) * total : v;
    });
}

// Of one row, or of rows one a lane.
template <bool NORM, class View, class F>
ANYMAX_INLINE void vjp(const View &view, const F &weigh, const Norm &of) {
    auto s = sums_of<NORM>(view, weigh);
    write_product<NORM>(view, weigh, means_of<NORM, F>(s, of, [](auto &sum) ANYMAX_EACH { return sum.total(); }));
}

// Of rows in turn, as many at most as a vector has lanes, so that no row waits for its own sums across lanes. row(r): its view.
typedef WeightSums<vf[width<float>]> SumsInTurn;
template <bool NORM, class F, class R>
ANYMAX_INLINE void vjp_in_turn(R row, int64_t count, const F &weigh, const Norm &of, SumsInTurn &all) {
    constexpr int64_t W = width<float>;
    for (int64_t r = 0; r < count; r++) {
        const auto s = sums_of<NORM>(row(r), weigh);
        all.w[r] = s.w.all, all.wg[r] = s.wg.all, all.power[r] = s.power.all, all.pg[r] = s.pg.all;
    }
    const auto m = means_of<NORM, F>(all, of, [](const vf *lanes) ANYMAX_EACH { return sums(lanes); });
    Means<float[W]> own;
    store(own.mean, m.mean), store(own.norm, m.norm), store(own.total, m.total);
    for (int64_t r = 0; r < count; r++)
        write_product<NORM>(row(r), weigh, Means<float>{own.mean[r], own.norm[r], own.total[r]});
}

}  // namespace ANYMAX_UNIT
