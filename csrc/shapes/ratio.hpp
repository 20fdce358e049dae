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

template <class C, class U>
ANYMAX_INLINE double weight_sum(const C *x, int64_t n, const U &u, C *keep) {
    constexpr int64_t W = width<C>;
    vd wide{};
    int64_t i = 0;
    while (i + W <= n) {
        vec<C> block{};
        for (int64_t stop = i + 16 * W <= n ? i + 16 * W : n; i + W <= stop; i += W) {
            vec<C> v = u.weight(load(x + i));
            store(keep + i, v);
            block += share_of<U>(v);
        }
        wide = widen_add(wide, block);
    }
    if (i < n) {
        vec<C> v = u.weight(load_or(x, i, n, -infinity<C>));
        store_part(keep + i, v, n - i);
        wide = widen_add(wide, share_of<U>(v));
    }
    if constexpr (U::SIGNED) return sum(wide) + u.more;
    return sum(wide);
}

// 1 / z; 0 where there is nothing to share.
template <class C>
inline C reciprocal_sum(double z) {
    const double most = sizeof(C) == 4 ? 3e38 : 1e308;
    return (C)(z > 1.0 / most ? 1.0 / z : z > 0.0 ? most : 0.0);
}

template <class C, class U>
inline void ratio_row(const C *x, int64_t n, const U &u, const Sink<C> &out, Scratch &scratch) {
    C *e = scratch.take<C>(RESULT, n);
    if (!e) return;
    double z = weight_sum(x, n, u, e);
    const vec<C> scale = splat(reciprocal_sum<C>(z));
    emit_over(out, e, [=](int64_t i) ANYMAX_EACH {
        const vec<C> v = load_or(e, i, n, C(0));
        return (U::SIGNED ? larger(v, vec<C>{}) : v) * scale;
    });
}

// u'/Z (g - <p, g>); u'/Z <p, g> where u is below 0.
template <class C, class U>
inline void ratio_vjp_row(const U &u, const C *x, const C *p, const C *g, int64_t n, const Sink<C> &out, Scratch &scratch,
                          const Team &team) {
    C *e = scratch.take<C>(EXTRA, n);
    if (!e) return;
    const double z = weight_sum(x, n, u, e);
    constexpr int64_t W = width<C>;
    vd dot{};
    for (int64_t i = 0; i < n; i += W) {
        vec<C> v = load_or(p, i, n, C(0)), h = load_or(g, i, n, C(0));
        dot = widen_add(dot, v == vec<C>{} ? vec<C>{} : v * h);
    }
    const vec<C> mean = splat((C)sum(dot)), scale = splat(reciprocal_sum<C>(z));
    emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH {
        vec<C> d = u.slope(load_or(x, i, n, -infinity<C>)) * scale;
        if constexpr (U::SIGNED) {
            const vec<C> pull = load_or(e, i, n, C(0)) > vec<C>{} ? load_or(g, i, n, C(0)) - mean : mean;
            return d == vec<C>{} ? vec<C>{} : d * pull;
        }
        d = load_or(p, i, n, C(0)) == vec<C>{} ? vec<C>{} : d;
        return d == vec<C>{} ? vec<C>{} : d * (load_or(g, i, n, C(0)) - mean);
    });
}

}  // namespace ANYMAX_UNIT
