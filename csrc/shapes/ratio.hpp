// A row of a ratio map, and its backward.
#pragma once

#include "links/ratio.hpp"
#include "shapes/scan.hpp"

namespace ANYMAX_UNIT {

// What a weight counts for in the sum.
template <class U, class V>
ANYMAX_INLINE V share_of(V weight) {
    if constexpr (U::SIGNED) return absolute(weight);
    return weight;
}

// The sum of the weights of x, which go to `keep` with KEEP.
template <bool KEEP, class C, class U>
ANYMAX_INLINE double weight_sum(const C *x, int64_t n, const U &u, C *keep) {
    constexpr int64_t W = width<C>;
    vd wide{};
    int64_t i = 0;
    while (i + W <= n) {
        vec<C> block{};
        for (int64_t stop = i + 16 * W <= n ? i + 16 * W : n; i + W <= stop; i += W) {
            vec<C> v = u.weight(load(x + i));
            if (KEEP) store(keep + i, v);
            block += share_of<U>(v);
        }
        wide = widen_add(wide, block);
    }
    if (i < n) {
        vec<C> v = u.weight(load_or(x, i, n, -infinity<C>));
        if (KEEP) store_part(keep + i, v, n - i);
        wide = widen_add(wide, share_of<U>(v));
    }
    return sum(wide);
}

// f(begin, end) added up over a row, whose pieces threads share.
template <class F>
inline double sum_of(int64_t n, Scratch &scratch, const Team &team, F f) {
    if (n <= PIECE) return f(0, n);
    const double *const part = of_pieces<double>(n, scratch, team, f);
    double all = 0.0;
    for (int64_t k = 0; part && k < pieces_of(n); k++) all += part[k];
    return all;
}

template <class U>
ANYMAX_INLINE double with_more(const U &u, double z) {
    if constexpr (U::SIGNED) return z + u.more;
    return z;
}

template <class C, class U>
inline double weights_of(const C *x, int64_t n, const U &u, Scratch &scratch, const Team &team) {
    const auto part = [&](int64_t b, int64_t e) { return weight_sum<false>(x + b, e - b, u, (C *)nullptr); };
    return with_more(u, sum_of(n, scratch, team, part));
}

// 1 / z; 0 where there is nothing to share.
template <class C>
inline C reciprocal_sum(double z) {
    const double most = sizeof(C) == 4 ? 3e38 : 1e308;
    return (C)(z > 1.0 / most ? 1.0 / z : z > 0.0 ? most : 0.0);
}

template <class C, class U>
inline void ratio_row(const C *x, int64_t n, const U &u, const Sink<C> &out, Scratch &scratch, const Team &team) {
    const auto shared = [](vec<C> v, vec<C> scale) ANYMAX_EACH { return (U::SIGNED ? larger(v, vec<C>{}) : v) * scale; };
    if (n > PIECE) {  // to keep so many weights takes longer than to find them again
        const vec<C> scale = splat(reciprocal_sum<C>(weights_of(x, n, u, scratch, team)));
        return emit(out, scratch, team,
                    [=](int64_t i) ANYMAX_EACH { return shared(u.weight(load_or(x, i, n, -infinity<C>)), scale); });
    }
    C *e = scratch.take<C>(RESULT, n);
    if (!e) return;
    const vec<C> scale = splat(reciprocal_sum<C>(with_more(u, weight_sum<true>(x, n, u, e))));
    emit_over(out, e, [=](int64_t i) ANYMAX_EACH { return shared(load_or(e, i, n, C(0)), scale); });
}

// u'/Z (g - <p, g>); u'/Z <p, g> where u is below 0.
template <class C, class U>
inline void ratio_vjp_row(const U &u, const C *x, const C *p, const C *g, int64_t n, const Sink<C> &out, Scratch &scratch,
                          const Team &team) {
    const vec<C> scale = splat(reciprocal_sum<C>(weights_of(x, n, u, scratch, team)));
    const double dot = sum_of(n, scratch, team, [=](int64_t begin, int64_t end) {
        vd sums{};
        for (int64_t i = begin; i < end; i += width<C>) {
            vec<C> v = load_or(p, i, end, C(0)), h = load_or(g, i, end, C(0));
            sums = widen_add(sums, v == vec<C>{} ? vec<C>{} : v * h);
        }
        return sum(sums);
    });
    const vec<C> mean = splat((C)dot);
    emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH {
        const vec<C> v = load_or(x, i, n, -infinity<C>);
        vec<C> d = u.slope(v) * scale;
        if constexpr (U::SIGNED) {
            const vec<C> pull = v > vec<C>{} ? load_or(g, i, n, C(0)) - mean : mean;
            return d == vec<C>{} ? vec<C>{} : d * pull;
        }
        d = load_or(p, i, n, C(0)) == vec<C>{} ? vec<C>{} : d;
        return d == vec<C>{} ? vec<C>{} : d * (load_or(g, i, n, C(0)) - mean);
    });
}

}  // namespace ANYMAX_UNIT
