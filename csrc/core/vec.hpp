// Vectors through the compiler's extensions: one source for SSE2, AVX2, AVX-512, NEON and WebAssembly. No library header but C's, so
// that no inline function compiled for one instruction set can be linked into the code of another.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define ANYMAX_VECTOR 64
#elif defined(__AVX2__)
#define ANYMAX_VECTOR 32
#else
#define ANYMAX_VECTOR 16
#endif

#define ANYMAX_INLINE inline __attribute__((always_inline))
#define ANYMAX_EACH __attribute__((always_inline))  // of a lambda for each vector of a row

namespace ANYMAX_UNIT {

typedef float vf __attribute__((vector_size(ANYMAX_VECTOR)));
typedef double vd __attribute__((vector_size(ANYMAX_VECTOR)));
typedef decltype(vf{} < vf{}) vi;  // integers as a comparison gives them: compilers differ in which type of 64 bits these are
typedef decltype(vd{} < vd{}) vl;
typedef uint32_t ui __attribute__((vector_size(ANYMAX_VECTOR)));  // bits: where a sum may wrap
typedef uint64_t ul __attribute__((vector_size(ANYMAX_VECTOR)));
typedef float vf_half __attribute__((vector_size(ANYMAX_VECTOR / 2)));  // as many lanes as a vd has

template <class C>
struct lanes_of;
template <>
struct lanes_of<float> {
    typedef vf vec;
    typedef vi ints;
    typedef int32_t integer;
    enum { count = ANYMAX_VECTOR / 4 };
};
template <>
struct lanes_of<double> {
    typedef vd vec;
    typedef vl ints;
    typedef int64_t integer;
    enum { count = ANYMAX_VECTOR / 8 };
};
template <class C>
using vec = typename lanes_of<C>::vec;
template <class C>
using ints = typename lanes_of<C>::ints;
template <class C>
constexpr int64_t width = lanes_of<C>::count;
template <class V>
struct scalar_of;
template <>
struct scalar_of<vf> {
    typedef float type;
};
template <>
struct scalar_of<vd> {
    typedef double type;
};
template <class V>
using scalar = typename scalar_of<V>::type;

constexpr float inf32 = __builtin_huge_valf();
constexpr double inf64 = __builtin_huge_val();
template <class C>
constexpr C infinity = C(__builtin_huge_val());
template <class C>
constexpr C not_a_number = C(__builtin_nan(""));

// -- memory ---------------------------------------------------------------------------------------------------------------

template <class C>
ANYMAX_INLINE vec<C> load(const C *p) {
    vec<C> v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
ANYMAX_INLINE void store(scalar<V> *p, V v) {
    __builtin_memcpy(p, &v, sizeof v);
}

// Past the caches, for results larger than they are; p is aligned to the vector.
ANYMAX_INLINE void stream(float *p, vf v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, (__m256)v);
#elif defined(__SSE2__)
    _mm_stream_ps(p, (__m128)v);
#else
    store(p, v);
#endif
}
ANYMAX_INLINE void stream(double *p, vd v) {
#if defined(__AVX512F__)
    _mm512_stream_pd(p, (__m512d)v);
#elif defined(__AVX2__)
    _mm256_stream_pd(p, (__m256d)v);
#elif defined(__SSE2__)
    _mm_stream_pd(p, (__m128d)v);
#else
    store(p, v);
#endif
}
ANYMAX_INLINE void fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

template <class V>
ANYMAX_INLINE V all(scalar<V> s) {
    return s - V{};
}
template <class C>
ANYMAX_INLINE vec<C> splat(C s) {
    return s - vec<C>{};
}

// A product as its dtype has it: of two products of which one may be contracted into their sum, this one is not.
template <class V>
ANYMAX_INLINE V rounded(V v) {
#if defined(__x86_64__)
    __asm__("" : "+x"(v));
#elif defined(__aarch64__)
    __asm__("" : "+w"(v));
#endif
    return v;
}

// The first `count` entries, and `fill` in the other lanes; fewer than there are lanes.
#if defined(__AVX512F__)
ANYMAX_INLINE vf load_part(const float *p, int64_t count, float fill) {
    return (vf)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), (__mmask16)((1u << count) - 1), p);
}
ANYMAX_INLINE vd load_part(const double *p, int64_t count, double fill) {
    return (vd)_mm512_mask_loadu_pd(_mm512_set1_pd(fill), (__mmask8)((1u << count) - 1), p);
}
ANYMAX_INLINE void store_part(float *p, vf v, int64_t count) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), (__m512)v); }
ANYMAX_INLINE void store_part(double *p, vd v, int64_t count) { _mm512_mask_storeu_pd(p, (__mmask8)((1u << count) - 1), (__m512d)v); }
#elif defined(__AVX2__)
static const int32_t first_lanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
ANYMAX_INLINE vf load_part(const float *p, int64_t count, float fill) {
    const __m256i m = _mm256_loadu_si256((const __m256i *)(first_lanes + 8 - count));
    return (vf)_mm256_blendv_ps(_mm256_set1_ps(fill), _mm256_maskload_ps(p, m), _mm256_castsi256_ps(m));
}
ANYMAX_INLINE vd load_part(const double *p, int64_t count, double fill) {
    const __m256i m = _mm256_loadu_si256((const __m256i *)(first_lanes + 8 - 2 * count));
    return (vd)_mm256_blendv_pd(_mm256_set1_pd(fill), _mm256_maskload_pd(p, m), _mm256_castsi256_pd(m));
}
ANYMAX_INLINE void store_part(float *p, vf v, int64_t count) {
    _mm256_maskstore_ps(p, _mm256_loadu_si256((const __m256i *)(first_lanes + 8 - count)), (__m256)v);
}
ANYMAX_INLINE void store_part(double *p, vd v, int64_t count) {
    _mm256_maskstore_pd(p, _mm256_loadu_si256((const __m256i *)(first_lanes + 8 - 2 * count)), (__m256d)v);
}
#else
template <class C>
ANYMAX_INLINE vec<C> load_part(const C *p, int64_t count, C fill) {
    C lane[width<C>];
    for (int64_t i = 0; i < width<C>; i++) lane[i] = i < count ? p[i] : fill;
    return load(lane);
}
template <class V>
ANYMAX_INLINE void store_part(scalar<V> *p, V v, int64_t count) {
    scalar<V> lane[sizeof(V) / sizeof(scalar<V>)];
    __builtin_memcpy(lane, &v, sizeof v);
    for (int64_t i = 0; i < count; i++) p[i] = lane[i];
}
#endif

// -- arithmetic -----------------------------------------------------------------------------------------------------------

ANYMAX_INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return a > b ? a : b;
#endif
}
ANYMAX_INLINE vd larger(vd a, vd b) {
#if defined(__AVX512F__)
    return (vd)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
    return (vd)_mm256_max_pd((__m256d)a, (__m256d)b);
#elif defined(__SSE2__)
    return (vd)_mm_max_pd((__m128d)a, (__m128d)b);
#else
    return a > b ? a : b;
#endif
}
ANYMAX_INLINE vf smaller(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
    return a < b ? a : b;
#endif
}
ANYMAX_INLINE vd smaller(vd a, vd b) {
#if defined(__AVX512F__)
    return (vd)_mm512_min_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
    return (vd)_mm256_min_pd((__m256d)a, (__m256d)b);
#elif defined(__SSE2__)
    return (vd)_mm_min_pd((__m128d)a, (__m128d)b);
#else
    return a < b ? a : b;
#endif
}
ANYMAX_INLINE float larger(float a, float b) { return a > b ? a : b; }
ANYMAX_INLINE double larger(double a, double b) { return a > b ? a : b; }

// One bit a lane.
ANYMAX_INLINE uint32_t bits(vi m) {
#if defined(__AVX512F__)
    return (uint32_t)_mm512_movepi32_mask((__m512i)m);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps((__m256)m);
#elif defined(__SSE2__)
    return (uint32_t)_mm_movemask_ps((__m128)m);
#else
    uint32_t out = 0;
    for (int i = 0; i < ANYMAX_VECTOR / 4; i++) out |= (uint32_t)(m[i] < 0) << i;
    return out;
#endif
}
ANYMAX_INLINE uint32_t bits(vl m) {
#if defined(__AVX512F__)
    return (uint32_t)_mm512_movepi64_mask((__m512i)m);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_pd((__m256d)m);
#elif defined(__SSE2__)
    return (uint32_t)_mm_movemask_pd((__m128d)m);
#else
    uint32_t out = 0;
    for (int i = 0; i < ANYMAX_VECTOR / 8; i++) out |= (uint32_t)(m[i] < 0) << i;
    return out;
#endif
}

// The same of a comparison, which AVX-512 gives as bits at once.
ANYMAX_INLINE uint32_t bits_above(vf a, vf b) {
#if defined(__AVX512F__)
    return (uint32_t)_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
    return bits(a > b);
#endif
}
ANYMAX_INLINE uint32_t bits_from(vf a, vf b) {
#if defined(__AVX512F__)
    return (uint32_t)_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
    return bits(a >= b);
#endif
}

template <class V>
ANYMAX_INLINE scalar<V> sum(V v) {
#if defined(__AVX512F__)
    if constexpr (sizeof(scalar<V>) == 4)
        return _mm512_reduce_add_ps((__m512)v);
    else
        return _mm512_reduce_add_pd((__m512d)v);
#elif defined(__AVX2__)
    if constexpr (sizeof(scalar<V>) == 4) {
        __m128 h = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
        h = _mm_add_ps(h, _mm_movehl_ps(h, h));
        return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
    } else {
        __m128d h = _mm_add_pd(_mm256_castpd256_pd128((__m256d)v), _mm256_extractf128_pd((__m256d)v, 1));
        return _mm_cvtsd_f64(_mm_add_sd(h, _mm_unpackhi_pd(h, h)));
    }
#else
    constexpr int count = sizeof(V) / sizeof(scalar<V>);
    scalar<V> s[count];
    __builtin_memcpy(s, &v, sizeof v);
    for (int w = count / 2; w; w /= 2)
        for (int i = 0; i < w; i++) s[i] += s[i + w];
    return s[0];
#endif
}
template <class V>
ANYMAX_INLINE scalar<V> top(V v) {
#if defined(__AVX512F__)
    if constexpr (sizeof(scalar<V>) == 4)
        return _mm512_reduce_max_ps((__m512)v);
    else
        return _mm512_reduce_max_pd((__m512d)v);
#elif defined(__AVX2__)
    if constexpr (sizeof(scalar<V>) == 4) {
        __m128 h = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
        h = _mm_max_ps(h, _mm_movehl_ps(h, h));
        return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
    } else {
        __m128d h = _mm_max_pd(_mm256_castpd256_pd128((__m256d)v), _mm256_extractf128_pd((__m256d)v, 1));
        return _mm_cvtsd_f64(_mm_max_sd(h, _mm_unpackhi_pd(h, h)));
    }
#else
    constexpr int count = sizeof(V) / sizeof(scalar<V>);
    scalar<V> s[count];
    __builtin_memcpy(s, &v, sizeof v);
    for (int w = count / 2; w; w /= 2)
        for (int i = 0; i < w; i++) s[i] = larger(s[i], s[i + w]);
    return s[0];
#endif
}

// The lanes of a float vector as two double vectors, and back. Said to the compiler in its own words: GCC takes half a vector through memory.
#if defined(__AVX512F__)
ANYMAX_INLINE vd low(vf v) { return (vd)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)); }
ANYMAX_INLINE vd high(vf v) { return (vd)_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1))); }
ANYMAX_INLINE vf join(vd a, vd b) {
    const __m256d l = _mm256_castps_pd(_mm512_cvtpd_ps((__m512d)a)), h = _mm256_castps_pd(_mm512_cvtpd_ps((__m512d)b));
    return (vf)_mm512_insertf64x4(_mm512_castpd256_pd512(l), h, 1);
}
#elif defined(__AVX2__)
ANYMAX_INLINE vd low(vf v) { return (vd)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)); }
ANYMAX_INLINE vd high(vf v) { return (vd)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1)); }
ANYMAX_INLINE vf join(vd a, vd b) { return (vf)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)b), _mm256_cvtpd_ps((__m256d)a)); }
#elif defined(__SSE2__)
ANYMAX_INLINE vd low(vf v) { return (vd)_mm_cvtps_pd((__m128)v); }
ANYMAX_INLINE vd high(vf v) { return (vd)_mm_cvtps_pd(_mm_movehl_ps((__m128)v, (__m128)v)); }
ANYMAX_INLINE vf join(vd a, vd b) { return (vf)_mm_movelh_ps(_mm_cvtpd_ps((__m128d)a), _mm_cvtpd_ps((__m128d)b)); }
#else
ANYMAX_INLINE vd low(vf v) {
    vf_half h;
    __builtin_memcpy(&h, &v, sizeof h);
    return __builtin_convertvector(h, vd);
}
ANYMAX_INLINE vd high(vf v) {
    vf_half h;
    __builtin_memcpy(&h, (const char *)&v + sizeof h, sizeof h);
    return __builtin_convertvector(h, vd);
}
ANYMAX_INLINE vf join(vd a, vd b) {
    vf_half h[2] = {__builtin_convertvector(a, vf_half), __builtin_convertvector(b, vf_half)};
    vf v;
    __builtin_memcpy(&v, h, sizeof v);
    return v;
}
#endif
ANYMAX_INLINE vd load_wide(const double *p) { return load(p); }
ANYMAX_INLINE vd load_wide(const float *p) {
    vf_half h;
    __builtin_memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, vd);
}
ANYMAX_INLINE void store_narrow(double *p, vd v) { store(p, v); }
ANYMAX_INLINE void store_narrow(float *p, vd v) {
    vf_half h = __builtin_convertvector(v, vf_half);
    __builtin_memcpy(p, &h, sizeof h);
}
// Adds the lanes of v to a double accumulator.
ANYMAX_INLINE vd widen_add(vd a, vf v) { return a + (low(v) + high(v)); }
ANYMAX_INLINE vd widen_add(vd a, vd v) { return a + v; }

// -- exp and log ----------------------------------------------------------------------------------------------------------

// exp(x) within 1.5 ulp up to 88; 0 below the smallest normal number. NaN stays NaN: the clip lets it through, as its second operand.
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

// exp(x) of K vectors at once, for x <= 0 (0 below -88; no NaN). In step, since one alone waits for its own results: twice as fast.
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
    for (int j = 0; j < K; j++) x[j] = (vf)_mm512_scalef_ps((__m512)p[j], (__m512)(x[j] - f[j]));
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

ANYMAX_INLINE vf root2(vf x) {
#if defined(__AVX512F__)
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
    return (vf)_mm_sqrt_ps((__m128)x);
#else
    for (size_t i = 0; i < sizeof(vf) / 4; i++) x[i] = sqrtf(x[i]);
    return x;
#endif
}
ANYMAX_INLINE vd root2(vd x) {
#if defined(__AVX512F__)
    return (vd)_mm512_sqrt_pd((__m512d)x);
#elif defined(__AVX2__)
    return (vd)_mm256_sqrt_pd((__m256d)x);
#elif defined(__SSE2__)
    return (vd)_mm_sqrt_pd((__m128d)x);
#else
    for (size_t i = 0; i < sizeof(vd) / 8; i++) x[i] = ::sqrt(x[i]);
    return x;
#endif
}

// The same within 2 ulp, of x > 0 (0 and infinity give NaN).
ANYMAX_INLINE vf quick_root2(vf x) {
#if defined(__AVX512F__)
    const vf y = (vf)_mm512_rsqrt14_ps((__m512)x), r = x * y;
    return r + (0.5f * r) * (1.0f - r * y);
#else
    return root2(x);
#endif
}
ANYMAX_INLINE vd quick_root2(vd x) { return root2(x); }

// x^(2/3) within 2 ulp, of normal x > 0: x over its cube root, which is guessed from the exponent and improved by a cubic and by one step of Newton
// (the first three constants are those of Moroz, Samotyy, Walczyk and Cieslinski, "Fast calculation of cube and inverse cube roots", 2021).
ANYMAX_INLINE vf quick_two_thirds(vf x) {
    const vf third = __builtin_convertvector((vi)x, vf) * (1.0f / 3.0f);
    vf y = (vf)(0x548c2b4b - __builtin_convertvector(third, vi));
    vf c = x * y * (y * y);
    y *= 1.752319676f - c * (1.2509524245f - 0.5093818292f * c);
    const vf w = x * y;
    c = 1.0f - w * (y * y);
    return w + w * c * (1.0f / 3.0f);
}

// u^e of K vectors in (0, 1], in their place, by logarithm and exponential: without their special cases, and as exact as a float result asks for
// (1e-6 in floats, 3e-9 e in doubles).
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
    const ul one = (ul)all<vd>(1.0), shift = one - (ul)all<vd>(0.70710678118654752), magic = (ul)all<vd>(4503599627370496.0);  // 2^52
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

// -- half precision -------------------------------------------------------------------------------------------------------

ANYMAX_INLINE float from_bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}
ANYMAX_INLINE uint16_t to_bf16(float f) {
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
ANYMAX_INLINE float from_f16(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, body = h & 0x7fffu;
    uint32_t u = body << 13;
    float f;
    if (body >= 0x7c00u) {
        u |= 0x7f800000u;
        u |= sign;
        __builtin_memcpy(&f, &u, 4);
        return f;
    }
    __builtin_memcpy(&f, &u, 4);
    f *= 5.192296858534828e33f;  // 2^112: the difference of the exponents' biases
    __builtin_memcpy(&u, &f, 4);
    u |= sign;
    __builtin_memcpy(&f, &u, 4);
    return f;
#endif
}
ANYMAX_INLINE uint16_t to_f16(float f) {
#if defined(__F16C__)
    return (uint16_t)_cvtss_sh(f, 0);
#else
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    uint16_t sign = (uint16_t)((u >> 16) & 0x8000u);
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (u < 0x38800000u) {  // subnormal: let the addition round
        float a;
        __builtin_memcpy(&a, &u, 4);
        a += 0.5f;
        uint32_t v;
        __builtin_memcpy(&v, &a, 4);
        return (uint16_t)(sign | (v - 0x3f000000u));
    }
    u += 0xfffu + ((u >> 13) & 1);
    return (uint16_t)(sign | ((u - 0x38000000u) >> 13));
#endif
}

}  // namespace ANYMAX_UNIT
