// Taylor softmax: u = 1 + x + ... + x^k / k!, k even.
#pragma once

#include "core/packing.hpp"

namespace ANYMAX_UNIT {

constexpr int MAX_ORDER = 64;

// The largest |x| of a row that is not masked.
template <class C>
inline C largest_size(const C *x, int64_t n) {
    vec<C> size{};
    for (int64_t i = 0; i < n; i += width<C>) {
        const vec<C> v = load_or(x, i, n, C(0));
        size = larger(size, v > -infinity<C> ? absolute(v) : vec<C>{});
    }
    return highest_lane(size);
}
template <class C>
inline C largest_size(const C *x, int64_t n, Scratch &scratch, const Team &team) {
    if (n <= PIECE) return largest_size(x, n);
    C most = 0;
    const C *const part = of_pieces<C>(n, scratch, team, [=](int64_t b, int64_t e) { return largest_size(x + b, e - b); });
    for (int64_t k = 0; part && k < pieces_of(n); k++) most = part[k] > most ? part[k] : most;
    return most;
}

// Horner's coefficients of f_k(x) / M^k in v = x / M: M^-(k-j) / j!. M is a power of two, so that v is exact; returns 1 / M.
template <class C>
inline C taylor_scale(C most, int order, C *coefficient) {
    int exponent = 0;
    if (most > C(4)) ::frexp((double)most * 0.25, &exponent);
    const C inverse = (C)::ldexp(1.0, -exponent);
    double s = (double)inverse, scale = 1.0, factorial = 1.0;
    for (int j = 2; j <= order; j++) factorial *= j;
    double term[MAX_ORDER + 1], whole = 0.0;
    for (int j = order; j >= 0; j--) {
        term[j] = scale / factorial;
        whole = whole * ((double)most * s) + term[j];
        scale *= s;
        if (j > 0) factorial /= j;
    }
    for (int j = 0; j <= order; j++)
        coefficient[j] = (C)(term[j] / whole);  // at most 1 at the largest score: 1/64! is no float
    return inverse;
}

// u(x) up to a factor of the row, and u'(x) up to the same one.
template <class C>
struct TaylorWeight {
    static constexpr bool SIGNED = false;
    C inverse;
    int order;
    C coefficient[MAX_ORDER + 1];

    TaylorWeight(C most, int k) : order(k) { inverse = taylor_scale(most, k, coefficient); }
    ANYMAX_INLINE vec<C> weight(vec<C> x) const {
        const vec<C> in = (x > -infinity<C> ? x : vec<C>{}) * inverse;
        vec<C> y = splat(coefficient[order]);
        for (int j = order - 1; j >= 0; j--) y = y * in + coefficient[j];
        return x > -infinity<C> ? larger(y, vec<C>{}) : vec<C>{};
    }
    // f_k' = f_(k-1), whose coefficients in v are those of f_k shifted by one
    ANYMAX_INLINE vec<C> slope(vec<C> x) const {
        const vec<C> in = (x > -infinity<C> ? x : vec<C>{}) * inverse;
        vec<C> y = splat(coefficient[order] * (C)order);
        for (int j = order - 1; j >= 1; j--) y = y * in + coefficient[j] * (C)j;
        return x > -infinity<C> ? y * inverse : vec<C>{};
    }
};

}  // namespace ANYMAX_UNIT
