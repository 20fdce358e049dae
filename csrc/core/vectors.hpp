// Vectors, and how they are read and written, through the compiler's extensions: one source for SSE2, AVX2, AVX-512, NEON and
// WebAssembly. No library header but C's, so that no inline function compiled for one instruction set can be linked into the
// code of another.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>  // a tenth of the former's time to compile
#elif defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__wasm_simd128__)
#include <wasm_simd128.h>
#endif

#if defined(__AVX512F__)
#define ANYMAX_VECTOR 64
#elif defined(__AVX2__)
#define ANYMAX_VECTOR 32
#else
#define ANYMAX_VECTOR 16
#endif

#if defined(__aarch64__) || defined(__wasm_simd128__)
#define ANYMAX_BYTES 1  // a vector's bytes can be moved by a table, in which a number beyond them gives 0
#endif

#define ANYMAX_INLINE inline __attribute__((always_inline))
#define ANYMAX_EACH __attribute__((always_inline))  // for a lambda that is called for each vector of a row

namespace ANYMAX_UNIT {

// The intrinsics for whole vectors, by the part of their names that follows the width.
#if defined(__AVX512F__)
#define ANYMAX_X86(name) _mm512_##name
typedef __m512 xf;
typedef __m512d xd;
#elif defined(__AVX2__)
#define ANYMAX_X86(name) _mm256_##name
typedef __m256 xf;
typedef __m256d xd;
#elif defined(__SSE2__)
#define ANYMAX_X86(name) _mm_##name
typedef __m128 xf;
typedef __m128d xd;
#endif

typedef float vf __attribute__((vector_size(ANYMAX_VECTOR)));
typedef double vd __attribute__((vector_size(ANYMAX_VECTOR)));
typedef decltype(vf{} < vf{}) vi;  // integers as a comparison gives them: compilers differ in which type of 64 bits these are
typedef decltype(vd{} < vd{}) vl;
typedef uint32_t ui __attribute__((vector_size(ANYMAX_VECTOR)));  // bits: where a sum may wrap
typedef uint64_t ul __attribute__((vector_size(ANYMAX_VECTOR)));
typedef float vf_half __attribute__((vector_size(ANYMAX_VECTOR / 2)));  // as many lanes as a vd has

template <class C>
struct lanes_of {
    typedef vf vec;
    typedef int32_t integer;
};
template <>
struct lanes_of<double> {
    typedef vd vec;
    typedef int64_t integer;
};
template <class C>
using vec = typename lanes_of<C>::vec;
template <class C>
using ints = decltype(vec<C>{} < vec<C>{});
template <class C>
constexpr int64_t width = ANYMAX_VECTOR / sizeof(C);
template <class V>
using scalar = decltype(+V{}[0]);

constexpr float inf32 = __builtin_huge_valf();
constexpr double inf64 = __builtin_huge_val();
template <class C>
constexpr C infinity = C(__builtin_huge_val());
template <class C>
constexpr C not_a_number = C(__builtin_nan(""));

// The same bits as another type.
template <class To, class From>
ANYMAX_INLINE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

// -- memory -----------------------------------------------------------------------------------------

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

// A non-temporal store, which bypasses the caches: for results larger than they are. p is aligned to the vector.
#if defined(ANYMAX_X86)
ANYMAX_INLINE void stream(float *p, vf v) { ANYMAX_X86(stream_ps)(p, (xf)v); }
ANYMAX_INLINE void stream(double *p, vd v) { ANYMAX_X86(stream_pd)(p, (xd)v); }
#else
template <class V>
ANYMAX_INLINE void stream(scalar<V> *p, V v) {
    store(p, v);
}
#endif
// After the last of them.
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

// A product rounded to its dtype: the compiler may not contract it with an addition.
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
ANYMAX_INLINE void store_part(float *p, vf v, int64_t count) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), (__m512)v);
}
ANYMAX_INLINE void store_part(double *p, vd v, int64_t count) {
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << count) - 1), (__m512d)v);
}
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

}  // namespace ANYMAX_UNIT
