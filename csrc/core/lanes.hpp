// Arithmetic on vectors that the language has no operator for: the larger of two, sums and maxima over the lanes, comparisons
// as bits, floats as doubles and back.
#pragma once

#include "core/vectors.hpp"

namespace ANYMAX_UNIT {

#if defined(ANYMAX_X86)
ANYMAX_INLINE vf larger(vf a, vf b) { return (vf)ANYMAX_X86(max_ps)((xf)a, (xf)b); }
ANYMAX_INLINE vd larger(vd a, vd b) { return (vd)ANYMAX_X86(max_pd)((xd)a, (xd)b); }
ANYMAX_INLINE vf smaller(vf a, vf b) { return (vf)ANYMAX_X86(min_ps)((xf)a, (xf)b); }
ANYMAX_INLINE vd smaller(vd a, vd b) { return (vd)ANYMAX_X86(min_pd)((xd)a, (xd)b); }
#else
ANYMAX_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
ANYMAX_INLINE vd larger(vd a, vd b) { return a > b ? a : b; }
ANYMAX_INLINE vf smaller(vf a, vf b) { return a < b ? a : b; }
ANYMAX_INLINE vd smaller(vd a, vd b) { return a < b ? a : b; }
#endif
ANYMAX_INLINE float larger(float a, float b) { return a > b ? a : b; }
ANYMAX_INLINE double larger(double a, double b) { return a > b ? a : b; }

// One bit a lane.
#if defined(__AVX512F__)
ANYMAX_INLINE uint32_t bits(vi m) { return (uint32_t)_mm512_movepi32_mask((__m512i)m); }
ANYMAX_INLINE uint32_t bits(vl m) { return (uint32_t)_mm512_movepi64_mask((__m512i)m); }
#elif defined(ANYMAX_X86)
ANYMAX_INLINE uint32_t bits(vi m) { return (uint32_t)ANYMAX_X86(movemask_ps)((xf)m); }
ANYMAX_INLINE uint32_t bits(vl m) { return (uint32_t)ANYMAX_X86(movemask_pd)((xd)m); }
#elif defined(__aarch64__)
ANYMAX_INLINE uint32_t bits(vi m) {
    const uint32x4_t weights = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32((uint32x4_t)m, weights));
}
ANYMAX_INLINE uint32_t bits(vl m) {
    const uint64x2_t weights = {1, 2};
    return (uint32_t)vaddvq_u64(vandq_u64((uint64x2_t)m, weights));
}
#elif defined(__wasm_simd128__)
ANYMAX_INLINE uint32_t bits(vi m) { return wasm_i32x4_bitmask((v128_t)m); }
ANYMAX_INLINE uint32_t bits(vl m) { return wasm_i64x2_bitmask((v128_t)m); }
#else
template <class M>
ANYMAX_INLINE uint32_t bits(M m) {
    uint32_t out = 0;
    for (size_t i = 0; i < sizeof m / sizeof m[0]; i++) out |= (uint32_t)(m[i] < 0) << i;
    return out;
}
#endif

// The same of a comparison, a > b and a >= b, which AVX-512 gives as bits at once.
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

ANYMAX_INLINE uint32_t bits_from(vd a, vd b) {
#if defined(__AVX512F__)
    return (uint32_t)_mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_GE_OQ);
#else
    return bits(a >= b);
#endif
}

// sum + v in the lanes where v >= t.
#if defined(__AVX512F__)
ANYMAX_INLINE vf plus_from(vf sum, vf v, vf t) {
    return (vf)_mm512_mask_add_ps((__m512)sum, _mm512_cmp_ps_mask((__m512)v, (__m512)t, _CMP_GE_OQ), (__m512)sum, (__m512)v);
}
ANYMAX_INLINE vd plus_from(vd sum, vd v, vd t) {
    return (vd)_mm512_mask_add_pd((__m512d)sum, _mm512_cmp_pd_mask((__m512d)v, (__m512d)t, _CMP_GE_OQ), (__m512d)sum,
                                  (__m512d)v);
}
#else
template <class V>
ANYMAX_INLINE V plus_from(V sum, V v, V t) {
    return sum + (v >= t ? v : V{});
}
#endif

// All lanes joined, the upper half with the lower one, and so on.
#if defined(__AVX512F__)
ANYMAX_INLINE float sum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
ANYMAX_INLINE double sum(vd v) { return _mm512_reduce_add_pd((__m512d)v); }
ANYMAX_INLINE float highest_lane(vf v) { return _mm512_reduce_max_ps((__m512)v); }
ANYMAX_INLINE double highest_lane(vd v) { return _mm512_reduce_max_pd((__m512d)v); }
#elif defined(__AVX2__)
ANYMAX_INLINE float sum(vf v) {
    __m128 h = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
ANYMAX_INLINE double sum(vd v) {
    const __m128d h = _mm_add_pd(_mm256_castpd256_pd128((__m256d)v), _mm256_extractf128_pd((__m256d)v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(h, _mm_unpackhi_pd(h, h)));
}
ANYMAX_INLINE float highest_lane(vf v) {
    __m128 h = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
ANYMAX_INLINE double highest_lane(vd v) {
    const __m128d h = _mm_max_pd(_mm256_castpd256_pd128((__m256d)v), _mm256_extractf128_pd((__m256d)v, 1));
    return _mm_cvtsd_f64(_mm_max_sd(h, _mm_unpackhi_pd(h, h)));
}
#else
template <class V, class F>
ANYMAX_INLINE scalar<V> fold(V v, F join) {
    constexpr int count = sizeof(V) / sizeof(scalar<V>);
    scalar<V> s[count];
    __builtin_memcpy(s, &v, sizeof v);
    for (int w = count / 2; w; w /= 2)
        for (int i = 0; i < w; i++) s[i] = join(s[i], s[i + w]);
    return s[0];
}
template <class V>
ANYMAX_INLINE scalar<V> sum(V v) {
    return fold(v, [](scalar<V> a, scalar<V> b) { return a + b; });
}
template <class V>
ANYMAX_INLINE scalar<V> highest_lane(V v) {
    return fold(v, [](scalar<V> a, scalar<V> b) { return larger(a, b); });
}
#endif

template <class V>
ANYMAX_INLINE scalar<V> lowest_lane(V v) {
    return -highest_lane(-v);
}

// The lanes of a float vector as two double vectors, and back. By intrinsics, because GCC takes half a vector through memory.
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
// From i on as many as a vd has lanes, `fill` in those beyond n.
template <class C>
ANYMAX_INLINE vd load_wide_or(const C *p, int64_t i, int64_t n, double fill) {
    constexpr int64_t W = width<double>;
    if (i + W <= n) return load_wide(p + i);
    vd v = all<vd>(fill);
    for (int64_t k = 0; i + k < n; k++) v[k] = (double)p[i + k];
    return v;
}
// And back, of a vector that may reach beyond n.
template <class C>
ANYMAX_INLINE void store_narrow_within(C *p, int64_t i, int64_t n, vd v) {
    if (i + width<double> <= n) return store_narrow(p + i, v);
    for (int64_t k = 0; i + k < n; k++) p[i + k] = (C)v[k];
}
// Adds the lanes of v to a double accumulator.
ANYMAX_INLINE vd widen_add(vd a, vf v) { return a + (low(v) + high(v)); }
ANYMAX_INLINE vd widen_add(vd a, vd v) { return a + v; }

}  // namespace ANYMAX_UNIT
