// The noises: log F and the hazard h = f / F of each law, in floats and doubles, and where log F has a given value.
#pragma once

#include "anymax.h"
#include "core/vec.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

constexpr double WHOLE =
    6755399441055744.0;  // 1.5 * 2^52: adding and subtracting it rounds to whole numbers, which then are the low bits
constexpr double DEEPEST =
    1e4;  // a score so far below the top one has probability 0 for every noise; none is taken to be further below

// 2 atanh(s) for |s| <= 1/3.
ANYMAX_INLINE vf atanh2(vf s) {
    vf z = s * s, y = z * z;
    vf q = (z * 0.2818163834f + 0.2795977146f) * y + (z * 0.4002498004f + 0.6666631252f);
    return s * (q * z + 2.0f);
}
ANYMAX_INLINE vd atanh2(vd s) {
    vd z = s * s;
    vd q = z * 0.16488285931389568 + 0.06980390498332432;
    q = q * z + 0.10976616637947494;
    q = q * z + 0.11715274668110426;
    q = q * z + 0.13336876815743837;
    q = q * z + 0.1538444706045997;
    q = q * z + 0.18181823422495252;
    q = q * z + 0.22222222119103674;
    q = q * z + 0.28571428572622926;
    q = q * z + 0.3999999999999287;
    q = q * z + 0.6666666666666669;
    return s * (q * z + 2.0);
}

// exp(y + lo), y <= 0 and |lo| small; 0 where it is below the smallest normal number.
ANYMAX_INLINE vf exp_sum(vf y, vf lo) {
    vf clipped = larger(y, all<vf>(-86.0f));
    vf shifted = clipped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
    vf k = shifted - 12582912.0f;
    vf r = clipped - k * 0.693145752f;
    r = r - k * 1.42860677e-6f + lo;
    vf r2 = r * r;
    vf q = r * 1.3814221908e-3f + 8.3688986656e-3f;
    q = (q * r + 4.1668405721e-2f) * r2 + (r * 1.6666519130e-1f + 4.9999993346e-1f);
    vf e = q * r2 + (r + 1.0f);
    e = (vf)((vi)e + (((vi)shifted) << 23));
    return y < -86.0f ? vf{} : e;
}
ANYMAX_INLINE vd exp_sum(vd y, vd) { return exp(y); }

// exp(-v^2 / 2), v = a + b, where a * a is exact.
ANYMAX_INLINE vf exp_square(vf a, vf b, vf v) {
    vf y = -(a * a);
    vf clipped = larger(y, all<vf>(-172.0f));
    vf shifted = clipped * 0.72134752f + 12582912.0f;
    vf k = shifted - 12582912.0f;
    vf r = clipped - k * 1.386291504f;
    r = r - b * (a + v);
    r = r - k * 2.85721354e-6f;
    vf r2 = r * r;
    vf q = r * 2.1584721733e-5f + 2.6152808330e-4f;
    q = (q * r + 2.6042753576e-3f) * r2 + (r * 2.0833148913e-2f + 1.2499998337e-1f);
    vf e = q * r2 + (r * 0.5f + 1.0f);
    e = (vf)((vi)e + (((vi)shifted) << 23));
    return y < -172.0f ? vf{} : e;
}
ANYMAX_INLINE vd exp_square(vd a, vd, vd) { return exp(a * a * -0.5); }

// 1 - F(x) = exp(-x^2 / 2) num / den of the normal law, x >= 0. In fp32 a rational minimax fit (2e-9 up to x = 9, still good
// beyond), in fp64 the series of _noises.py.
ANYMAX_INLINE void mills(vf x, vf &num, vf &den) {
    num = x * 0.3989568028f + 4.1245367238f;
    num = num * x + 19.247281345f;
    num = num * x + 47.359328683f;
    num = num * x + 56.066324972f;
    den = x + 10.340226902f;
    den = den * x + 49.216306876f;
    den = den * x + 129.38846309f;
    den = den * x + 184.18758372f;
    den = den * x + 112.13264973f;
}
ANYMAX_INLINE void mills(vd x, vd &num, vd &den) {
    constexpr double series[24] = {
        1.2375126308378275,     -0.14024059858554697,   0.0035854154854790257,  0.0822767384901452,      -0.10880393014244462,
        0.09230432116037748,    -0.05869339857664935,   0.028362277418956364,   -0.009746579683265203,   0.001755625852895578,
        0.0002937143780446766,  -0.0002901540805420362, 5.1646529742613335e-05, 2.2384239158309724e-05,  -1.143804803494536e-05,
        -9.735599024300036e-07, 1.7419821605685549e-06, -5.721822408015812e-08, -2.4857126394415325e-07, 2.3263504032644517e-08,
        3.197926733604639e-08,  -3.744208176587683e-09, -2.623107459747668e-09, 3.11143001991097e-10,
    };
    vd w = x * 0.70710678118654752;
    vd r = (w - 3.75) / (w + 3.75);
    num = all<vd>(series[23]);
    for (int k = 22; k >= 0; k--) num = num * r + series[k];
    num = num * 0.5;
    den = w * 2.0 + 1.0;
}

// y 2^k and k for the k with 2^(k - 1/2) <= h < 2^(k + 1/2), h in [1, 2^60].
ANYMAX_INLINE vf scaled(vf y, vf h, vf &k) {
    const vi b = ((vi)h - (vi)all<vf>(0.70710678f)) >> 23;
    k = __builtin_convertvector(b, vf);
    return (vf)((vi)y + (b << 23));
}
ANYMAX_INLINE vd scaled(vd y, vd h, vd &k) {
    const ul b = ((ul)h - (ul)all<vd>(0.70710678118654752)) >> 52;
    k = (vd)(b + (ul)all<vd>(WHOLE)) - WHOLE;
    return (vd)((ul)y + (b << 52));
}

// The constant factor of h that `law` leaves to its callers.
template <int N>
constexpr double unit = N == ANYMAX_NORMAL ? 0.3989422804014327 : 1.0;

// log F(v) and h(v) / unit<N> at v = a + b: in fp32, a is a multiple of 2^-8 and b the remainder, so that v^2 and v keep their
// digits; in fp64 b is 0. UPPER: all v >= 0, up to a rounding. It saves a sixth of the time of normal noise.
template <int N, bool UPPER, class V>
ANYMAX_INLINE void law(V a, V b, V &l, V &h) {
    typedef scalar<V> S;
    constexpr bool wide = sizeof(S) == 8;
    const V v = wide ? a : a + b;
    if constexpr (N == ANYMAX_NORMAL) {
        const V e = exp_square(a, b, v);
        V num, den;
        mills(UPPER ? v : absolute(v), num, den);
        const V q = e * num, r = den - q;
        if constexpr (UPPER) {
            l = -atanh2(q / (den + r));
            h = e * den / r;
        } else {
            const auto below = v < S(0);
            h = (below ? den : e * den) / (below ? num : r);
            V k;
            const V up = scaled(num, h, k);  // log(num / den) = log(up / den) - k log 2
            const V square = a * a + (wide ? V{} : b * (a + v));
            l = atanh2((below ? up - den : -q) / ((below ? up : r) + den));
            l = below ? l - (k * S(0.6931471805599453) + S(0.5) * square) : l;
        }
    } else if constexpr (N == ANYMAX_LOGISTIC) {
        const auto below = v < S(0);
        const V e = UPPER ? exp_sum(-a, -b) : exp_sum(below ? a : -a, below ? b : -b);
        l = -atanh2(e / (S(2) + e));
        if constexpr (UPPER) {
            h = e / (S(1) + e);
        } else {
            l = below ? l + v : l;
            h = (below ? all<V>(S(1)) : e) / (S(1) + e);
        }
    } else {
        const auto below = v < S(0);
        const V q = S(0.5) * (UPPER ? exp_sum(-a, -b) : exp_sum(below ? a : -a, below ? b : -b));
        l = -atanh2(q / (S(2) - q));
        h = q / (S(1) - q);
        if constexpr (!UPPER) {
            l = below ? v - S(0.6931471805599453) : l;
            h = below ? all<V>(S(1)) : h;
        }
    }
}

// The v with log F(v) = -depth < 0.
inline double level(int noise, double depth) {
    switch (noise) {
        case ANYMAX_LOGISTIC: return -depth - ::log(-::expm1(-depth));
        case ANYMAX_LAPLACE: return depth > 0.6931471805599453 ? 0.6931471805599453 - depth : -::log(-2.0 * ::expm1(-depth));
        case ANYMAX_UNIFORM: return ::expm1(-depth);
        case ANYMAX_GUMBEL: return -::log(depth);
    }
    const bool upper = depth < 0.6931471805599453;
    if (upper) depth = -::log(-::expm1(-depth));
    double v = -normal_at_depth(depth);
    for (int i = 0; i < 2; i++) {
        vd l, h;
        law<ANYMAX_NORMAL, false>(all<vd>(v), vd{}, l, h);
        const double hazard = h[0] * unit<ANYMAX_NORMAL>, step = (l[0] + depth) / hazard;
        v = v - step / (1.0 + 0.5 * step * (v + hazard));
    }
    return upper ? -v : v;
}

inline double mean(int noise) { return noise == ANYMAX_UNIFORM ? 0.5 : noise == ANYMAX_GUMBEL ? 0.5772156649015329 : 0.0; }

// Above this v both log F and h are 0 in the type.
template <int N, class E>
constexpr double reach = sizeof(E) == 8 ? (N == ANYMAX_NORMAL ? 37.0 : 700.0) : (N == ANYMAX_NORMAL ? 13.2 : 86.5);

}  // namespace perturb
}  // namespace ANYMAX_UNIT
