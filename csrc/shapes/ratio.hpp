// A row of a ratio map, and its backward.
#pragma once

#include "links/ratio.hpp"
#include "shapes/scan.hpp"

namespace ANYMAX_UNIT {

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
            block += v;
        }
        wide = widen_add(wide, block);
    }
    if (i < n) {
        vec<C> v = u.weight(load_or(x, i, n, -infinity<C>));
        store_part(keep + i, v, n - i);
        wide = widen_add(wide, v);
    }
    return sum(wide);
}

template <class C, class U>
inline void ratio_row(const C *x, int64_t n, const U &u, const Sink<C> &out, Scratch &scratch) {
    C *e = scratch.take<C>(RESULT, n);
    if (!e) return;
    double z = weight_sum(x, n, u, e);
    const vec<C> scale = splat((C)(z > 0.0 ? 1.0 / z : 0.0));
    emit_over(out, e, [=](int64_t i) ANYMAX_EACH { return load_or(e, i, n, C(0)) * scale; });
}

// u'/Z (g - <p, g>).
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
    const vec<C> mean = splat((C)sum(dot)), scale = splat((C)(z > 0.0 ? 1.0 / z : 0.0));
    emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH {
        vec<C> d = u.slope(load_or(x, i, n, -infinity<C>)) * scale;
        d = load_or(p, i, n, C(0)) == vec<C>{} ? vec<C>{} : d;
        return d == vec<C>{} ? vec<C>{} : d * (load_or(g, i, n, C(0)) - mean);
    });
}

}  // namespace ANYMAX_UNIT
