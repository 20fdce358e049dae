// Exponentials, logarithms, roots and powers of vectors.
#pragma once

#include "core/lanes.hpp"

namespace ANYMAX_UNIT {

// exp(x) within 1.5 ulp up to 88; 0 below the smallest normal number. NaN stays NaN: the clip lets it through, as its second
// operand.
ANYMAX_INLINE vf exp(vf x) {
    vf clipped = larger(all<vf>(-87.33654f), smaller(all<vf>(88.37626f), x));
    vf shifted = clipped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
    vf k = shifted - 12582912.0f;
    vf r = clipped - k * 0.693145752f;
    r = r - k * 1.42860677e-6f;
    vf q = r * 1.381461043e-03f + 8.368710987e-03f;
    q = q * r + 4.166838899e-02f;
    q = q * r + 1.666652113e-01f;
    q = q * r + 4.999999404e-01f;
    vf y = q * (r * r) + (r + 1.0f);
    y = (vf)((ui)y + ((ui)shifted << 23));
    return x < -87.33654f ? vf{} : y;
}

ANYMAX_INLINE vd exp(vd x) {
    vd clipped = larger(all<vd>(-708.0), smaller(all<vd>(709.0), x));
    vd shifted = clipped * 1.4426950408889634 + 6755399441055744.0;  // 1.5 * 2^52
    vd k = shifted - 6755399441055744.0;
    vd r = clipped - k * 6.93147180369123816490e-01;
    r = r - k * 1.90821492927058770002e-10;
    vd q = r * 1.6059043836821613e-10 + 2.08767569878681e-09;
    q = q * r + 2.505210838544172e-08;
    q = q * r + 2.755731922398589e-07;
    q = q * r + 2.7557319223985893e-06;
    q = q * r + 2.48015873015873e-05;
    q = q * r + 1.984126984126984e-04;
    q = q * r + 1.388888888888889e-03;
    q = q * r + 8.333333333333333e-03;
    q = q * r + 4.1666666666666664e-02;
    q = q * r + 1.6666666666666666e-01;
    q = q * r + 0.5;
    vd y = q * (r * r) + r + 1.0;
    y = (vd)((ul)y + ((ul)shifted << 52));
    return x < -708.0 ? vd{} : y;
}

// exp(x) of K vectors at once, for x <= 0 (no NaN): 0 below -88.03, and between that and -87.33, the logarithm of the smallest
// normal number, no more than this number. Interleaved, because each step of one vector waits for the step before: twice as
// fast.
template <int K>
ANYMAX_INLINE void exp_below(vf *x) {  // 2^k 2^f by the minimax polynomial of degree 6
#if defined(__AVX512DQ__)
    vf f[K], p[K];
    for (int j = 0; j < K; j++) x[j] = x[j] * 1.44269504f;
    for (int j = 0; j < K; j++) f[j] = (vf)_mm512_reduce_ps((__m512)x[j], 0);  // less the nearest integer
    for (int j = 0; j < K; j++) p[j] = f[j] * 1.535334159e-04f + 1.339890063e-03f;
    for (int j = 0; j < K; j++) p[j] = p[j] * f[j] + 9.618437849e-03f;
    for (int j = 0; j < K; j++) p[j] = p[j] * f[j] + 5.550332367e-02f;
    for (int j = 0; j < K; j++) p[j] = p[j] * f[j] + 2.402264774e-01f;
    for (int j = 0; j < K; j++) p[j] = p[j] * f[j] + 6.931471825e-01f;
    for (int j = 0; j < K; j++) p[j] = p[j] * f[j] + 1.0f;
    for (int j = 0; j < K; j++) {  // what would be subnormal is 0
        const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x[j], _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
        x[j] = (vf)_mm512_maskz_scalef_ps(normal, (__m512)p[j], (__m512)(x[j] - f[j]));
    }
    return;
#endif
    vf k[K], q[K];
    for (int j = 0; j < K; j++) x[j] = larger(x[j] * 1.44269504f, all<vf>(-127.0f));
    for (int j = 0; j < K; j++) k[j] = x[j] + 12582912.0f;
    for (int j = 0; j < K; j++) x[j] = x[j] - (k[j] - 12582912.0f);
    for (int j = 0; j < K; j++) q[j] = x[j] * 1.535334159e-04f + 1.339890063e-03f;
    for (int j = 0; j < K; j++) q[j] = q[j] * x[j] + 9.618437849e-03f;
    for (int j = 0; j < K; j++) q[j] = q[j] * x[j] + 5.550332367e-02f;
    for (int j = 0; j < K; j++) q[j] = q[j] * x[j] + 2.402264774e-01f;
    for (int j = 0; j < K; j++) q[j] = q[j] * x[j] + 6.931471825e-01f;
    for (int j = 0; j < K; j++) q[j] = q[j] * x[j] + 1.0f;
    for (int j = 0; j < K; j++) x[j] = (vf)((ui)q[j] + ((ui)k[j] << 23));  // -127 gives the bits of 0
}
template <int K>
ANYMAX_INLINE void exp_below(vd *x) {
    for (int j = 0; j < K; j++) x[j] = exp(x[j]);
}

// log(x) for normal x > 0, by fdlibm's series in s = f / (2 + f); -inf at 0, NaN below.
ANYMAX_INLINE vd log(vd x) {
    ul b = (ul)x;
    vl k = (vl)(b - (ul)all<vd>(0.70710678118654752)) >> 52;
    vd m = (vd)(b - ((ul)k << 52));
    vd e = __builtin_convertvector(k, vd);
    vd f = m - 1.0;
    vd s = f / (2.0 + f);
    vd z = s * s, w = z * z;
    vd t1 = w * (0.3999999999940941908 + w * (0.2222219843214978396 + w * 0.1531383769920937332));
    vd t2 = z * (0.6666666666666735130 + w * (0.2857142874366239149 + w * (0.1818357216161805012 + w * 0.1479819860511658591)));
    vd half = 0.5 * f * f;
    vd y = e * 6.93147180369123816490e-01 - ((half - (s * (half + t1 + t2) + e * 1.90821492927058770002e-10)) - f);
    y = x < inf64 ? y : x;
    y = x > 0.0 ? y : all<vd>(-inf64);
    return x < 0.0 ? all<vd>(not_a_number<double>) : (x != x ? x : y);
}

ANYMAX_INLINE vf log(vf x) {
    ui b = (ui)x;
    vi k = (vi)(b - (ui)all<vf>(0.70710678f)) >> 23;
    vf m = (vf)(b - ((ui)k << 23));
    vf e = __builtin_convertvector(k, vf);
    vf f = m - 1.0f;
    vf s = f / (2.0f + f);
    vf z = s * s, w = z * z;
    vf t1 = w * (0.40000972152f + w * 0.24279078841f);
    vf t2 = z * (0.66666662693f + w * 0.28498786688f);
    vf half = 0.5f * f * f;
    vf y = e * 6.9313812256e-01f - ((half - (s * (half + t1 + t2) + e * 9.0580006145e-06f)) - f);
    y = x < inf32 ? y : x;
    y = x > 0.0f ? y : all<vf>(-inf32);
    return x < 0.0f ? all<vf>(not_a_number<float>) : (x != x ? x : y);
}

// log(1 + x) without loss near 0.
template <class V>
ANYMAX_INLINE V log1p(V x) {
    V u = 1.0f + x;
    V lost = x - (u - 1.0f);
    V y = log(u);
    return u > 0.0f ? y + (u < infinity<scalar<V>> ? lost / u : V{}) : y;
}

template <class V>
ANYMAX_INLINE V absolute(V x) {
    return larger(x, -x);
}

#if defined(ANYMAX_X86)
ANYMAX_INLINE vf root2(vf x) { return (vf)ANYMAX_X86(sqrt_ps)((xf)x); }
ANYMAX_INLINE vd root2(vd x) { return (vd)ANYMAX_X86(sqrt_pd)((xd)x); }
#else
ANYMAX_INLINE vf root2(vf x) {
    for (int64_t i = 0; i < width<float>; i++) x[i] = sqrtf(x[i]);
    return x;
}
ANYMAX_INLINE vd root2(vd x) {
    for (int64_t i = 0; i < width<double>; i++) x[i] = ::sqrt(x[i]);
    return x;
}
#endif

ANYMAX_INLINE double root2(double x) { return ::sqrt(x); }

// x^(3/4) within 2 ulp, of x > 0 (0 and infinity may give NaN).
template <class V>
ANYMAX_INLINE V three_quarters(V x) {
    const V half = root2(x);
    return half * root2(half);
}
#if defined(__AVX512F__)
ANYMAX_INLINE vf three_quarters(vf x) {
    const vf r = (vf)_mm512_rsqrt14_ps((__m512)x), y = (vf)_mm512_rsqrt14_ps((__m512)r), s = y * y;  // y^4 is nearly x
    return s * y + (x - s * s) * (0.75f * (r * y));
}
#endif

// x^(2/3) within 2 ulp, of normal x > 0: x over its cube root, which is guessed from the exponent and improved by a cubic and
// by one step of Newton (the first three constants are those of Moroz, Samotyy, Walczyk and Cieslinski, "Fast calculation of
// cube and inverse cube roots", 2021).
ANYMAX_INLINE vf quick_two_thirds(vf x) {
    const vf third = __builtin_convertvector((vi)x, vf) * (1.0f / 3.0f);
    vf y = (vf)(0x548c2b4b - __builtin_convertvector(third, vi));
    vf c = x * y * (y * y);
    y *= 1.752319676f - c * (1.2509524245f - 0.5093818292f * c);
    const vf w = x * y;
    c = 1.0f - w * (y * y);
    return w + w * c * (1.0f / 3.0f);
}

// u^e of K vectors in (0, 1], in place, by logarithm and exponential: without their special cases, and as exact as a float
// result needs (1e-6 in floats, 3e-9 e in doubles).
template <int K>
ANYMAX_INLINE void power_inside(vf *u, double e) {
    vf k[K], s[K];
    for (int j = 0; j < K; j++) {
        const ui b = (ui)u[j];
        const vi n = (vi)(b - (ui)all<vf>(0.70710678f)) >> 23;
        const vf f = (vf)(b - ((ui)n << 23)) - 1.0f;
        k[j] = __builtin_convertvector(n, vf), s[j] = f / (f + 2.0f);
    }
    for (int j = 0; j < K; j++) {
        const vf z = s[j] * s[j];
        u[j] = (k[j] * 0.693147181f + s[j] * (2.0f + z * (0.666666667f + z * (0.4f + z * 0.285714286f)))) * (float)e;
    }
    exp_below<K>(u);
}
template <int K>
ANYMAX_INLINE void power_inside(vd *u, double e) {
    const ul one = (ul)all<vd>(1.0), shift = one - (ul)all<vd>(0.70710678118654752),
             magic = (ul)all<vd>(4503599627370496.0);  // 2^52
    vd k[K], s[K];
    for (int j = 0; j < K; j++) {
        const ul b = (ul)u[j], n = (b + shift) >> 52;  // the exponent of the nearest power of two, biased
        const vd f = (vd)(b - (n << 52) + one) - 1.0;
        k[j] = (vd)(n | magic) - (4503599627370496.0 + 1023.0), s[j] = f / (f + 2.0);
    }
    for (int j = 0; j < K; j++) {
        const vd z = s[j] * s[j];
        vd l = z * 0.32059889797532 + 0.41219858311113243;
        l = l * z + 0.57707801635558538;
        l = l * z + 0.96179669392597566;
        l = l * z + 2.8853900817779268;
        u[j] = larger((k[j] + s[j] * l) * e, all<vd>(-1020.0));
    }
    for (int j = 0; j < K; j++) {
        const vd shifted = u[j] + 6755399441055744.0, f = u[j] - (shifted - 6755399441055744.0);  // 1.5 * 2^52
        vd q = f * 1.3215486790144307e-6 + 1.5252733804059841e-5;
        q = q * f + 1.5403530393381608e-4;
        q = q * f + 1.3333558146428443e-3;
        q = q * f + 9.6181291076284772e-3;
        q = q * f + 5.5504108664821580e-2;
        q = q * f + 2.4022650695910072e-1;
        q = q * f + 6.9314718055994531e-1;
        q = q * f + 1.0;
        u[j] = (vd)((ul)q + ((ul)shifted << 52));
    }
}

// Where a normal variable of mean 0 and deviation 1 is larger with a probability of exp(-depth) <= 1/2, to three digits
// (Abramowitz and Stegun, 26.2.23); and with one of q.
inline double normal_at_depth(double depth) {
    const double t = ::sqrt(2.0 * depth);
    return t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
}
inline double normal_above(double q) { return q < 0.5 ? normal_at_depth(-::log(q)) : -normal_at_depth(-::log(1.0 - q)); }

}  // namespace ANYMAX_UNIT
