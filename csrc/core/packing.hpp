// Lanes of vectors: marked ones side by side, rows transposed, one row a lane.
#pragma once

#include "core/vec.hpp"

namespace ANYMAX_UNIT {

template <class C>
ANYMAX_INLINE vec<C> load_or(const C *x, int64_t i, int64_t n, C fill) {
    return i + width<C> <= n ? load(x + i) : load_part(x + i, n - i > 0 ? n - i : 0, fill);
}

// And back, what lies before n.
template <class V>
ANYMAX_INLINE void store_within(scalar<V> *to, int64_t i, int64_t n, V v) {
    i + width<scalar<V>> <= n ? store(to + i, v) : store_part(to + i, v, n - i);
}

template <class C>
ANYMAX_INLINE bool every(ints<C> m) {
    return bits(m) == (uint32_t)~(~0ull << width<C>);
}

// The largest finite number.
template <class C>
constexpr C largest_number = C(sizeof(C) == 4 ? 3.4028234663852886e38 : 1.7976931348623157e308);

#if defined(__AVX2__) && !defined(__AVX512F__)
// By marks: the lanes that are marked, in order; of doubles as two floats each; and of each lane how many marked ones come
// before it.
struct LaneTables {
    uint8_t packed[256][8] = {}, halves[16][8] = {}, spread[256][8] = {};
    constexpr LaneTables() {
        for (int m = 0; m < 256; m++)
            for (int i = 0, k = 0; i < 8; i++) {
                spread[m][i] = (uint8_t)k;
                if (m >> i & 1) packed[m][k++] = (uint8_t)i;
            }
        for (int m = 0; m < 16; m++)
            for (int i = 0; i < 8; i++) halves[m][i] = (uint8_t)(2 * packed[m][i / 2] + i % 2);
    }
};
static constexpr LaneTables TABLES;
ANYMAX_INLINE __m256i lanes_by(const uint8_t *table) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)table)); }
#endif

#if defined(ANYMAX_BYTES)
typedef uint8_t bytes __attribute__((vector_size(16)));
// By marks of floats and of doubles: the bytes of the lanes that are marked, in order; and of each lane the bytes that are its
// own among those.
struct ByteTables {
    alignas(16) uint8_t packed[16][16] = {}, spread[16][16] = {}, packed2[4][16] = {};
    constexpr ByteTables() {
        fill(packed, spread, 4);
        for (int m = 0; m < 4; m++)
            for (int i = 0; i < 16; i++) packed2[m][i] = packed[(m & 1) * 3 + (m >> 1) * 12][i];
    }
    static constexpr void fill(uint8_t (&pack)[16][16], uint8_t (&back)[16][16], int size) {
        for (int m = 0; m < 16; m++) {
            for (int i = 0; i < 16; i++) pack[m][i] = back[m][i] = 255;
            for (int i = 0, k = 0; i < 4; i++)
                if (m >> i & 1) {
                    for (int b = 0; b < size; b++) {
                        pack[m][k * size + b] = (uint8_t)(i * size + b);
                        back[m][i * size + b] = (uint8_t)(k * size + b);
                    }
                    k++;
                }
        }
    }
};
static constexpr ByteTables BYTES;
template <class V>
ANYMAX_INLINE V bytes_by(V v, const uint8_t *table) {
    bytes t;
    __builtin_memcpy(&t, table, sizeof t);
#if defined(__aarch64__)
    return (V)vqtbl1q_u8((uint8x16_t)v, (uint8x16_t)t);
#else
    return (V)wasm_i8x16_swizzle((v128_t)v, (v128_t)t);
#endif
}
#endif

// The marked lanes one by one: their numbers and, where it is not NULL, their indices.
template <class V>
ANYMAX_INLINE void append_each(V v, uint32_t marked, int32_t first, scalar<V> *values, int32_t *indices) {
    for (; marked; marked &= marked - 1) {
        const int i = __builtin_ctz(marked);
        *values++ = v[i];
        if (indices) *indices++ = first + i;
    }
}

// Appends the lanes of v that m marks, and their indices, to values[at] and indices[at]; may write a whole vector there.
ANYMAX_INLINE int64_t append(vf v, vi m, int32_t first, float *values, int32_t *indices, int64_t at) {
    uint32_t b = bits(m);
#if defined(__AVX512F__)
    __mmask16 k = (__mmask16)b;
    __m512i iota =
        _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(first));
    _mm512_storeu_ps(values + at, _mm512_maskz_compress_ps(k, (__m512)v));
    _mm512_storeu_si512(indices + at, _mm512_maskz_compress_epi32(k, iota));
#elif defined(__AVX2__)
    const __m256i lane = lanes_by(TABLES.packed[b]);
    _mm256_storeu_ps(values + at, _mm256_permutevar8x32_ps((__m256)v, lane));
    _mm256_storeu_si256((__m256i *)(indices + at), _mm256_add_epi32(lane, _mm256_set1_epi32(first)));
#elif defined(ANYMAX_BYTES)
    const vi classes = bytes_by(vi{first, first + 1, first + 2, first + 3}, BYTES.packed[b]);
    store(values + at, bytes_by(v, BYTES.packed[b]));
    __builtin_memcpy(indices + at, &classes, sizeof classes);
#else
    append_each(v, b, first, values + at, indices + at);
#endif
    return at + __builtin_popcount(b);
}
ANYMAX_INLINE int64_t append(vd v, vl m, int32_t first, double *values, int32_t *indices, int64_t at) {
    uint32_t b = bits(m);
#if defined(__AVX512F__)
    const __m256i iota = _mm256_add_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(first));
    _mm512_storeu_pd(values + at, _mm512_maskz_compress_pd((__mmask8)b, (__m512d)v));
    _mm256_storeu_si256((__m256i *)(indices + at), _mm256_maskz_compress_epi32((__mmask8)b, iota));
#elif defined(__AVX2__)
    const __m128i lane = _mm256_castsi256_si128(lanes_by(TABLES.packed[b]));
    const __m256i halves = lanes_by(TABLES.halves[b]);
    _mm256_storeu_pd(values + at, (__m256d)_mm256_permutevar8x32_ps((__m256)v, halves));
    _mm_storeu_si128((__m128i *)(indices + at), _mm_add_epi32(lane, _mm_set1_epi32(first)));
#elif defined(ANYMAX_BYTES)
    store(values + at, bytes_by(v, BYTES.packed2[b]));
    indices[at] = first + !(b & 1), indices[at + 1] = first + 1;
#else
    append_each(v, b, first, values + at, indices + at);
#endif
    return at + __builtin_popcount(b);
}

// The marked lanes of the vector that begins at i, with their indices, behind `at` others; -1 where there are more than
// `capacity`.
ANYMAX_INLINE int64_t append_within(vf v, vi mark, int64_t i, int32_t *index, float *value, int64_t at, int64_t capacity) {
    if (at + width<float> <= capacity) return append(v, mark, (int32_t)i, value, index, at);
    const uint32_t marked = bits(mark);
    const int64_t after = at + __builtin_popcount(marked);
    if (after > capacity) return -1;
    append_each(v, marked, (int32_t)i, value + at, index + at);
    return after;
}

// The lanes of v that b marks, side by side, to `to`, which takes a whole vector. How many they are.
ANYMAX_INLINE int64_t pack(vf v, uint32_t b, float *to) {
#if defined(__AVX512F__)
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps((__mmask16)b, (__m512)v));
#elif defined(__AVX2__)
    const __m256i lane = lanes_by(TABLES.packed[b]);
    _mm256_storeu_ps(to, _mm256_permutevar8x32_ps((__m256)v, lane));
#elif defined(ANYMAX_BYTES)
    store(to, bytes_by(v, BYTES.packed[b]));
#else
    append_each(v, b, 0, to, nullptr);
#endif
    return __builtin_popcount(b);
}
ANYMAX_INLINE int64_t pack(vd v, uint32_t b, double *to) {
#if defined(__AVX512F__)
    _mm512_storeu_pd(to, _mm512_maskz_compress_pd((__mmask8)b, (__m512d)v));
#elif defined(__AVX2__)
    _mm256_storeu_pd(to, (__m256d)_mm256_permutevar8x32_ps((__m256)v, lanes_by(TABLES.halves[b])));
#elif defined(ANYMAX_BYTES)
    store(to, bytes_by(v, BYTES.packed2[b]));
#else
    append_each(v, b, 0, to, nullptr);
#endif
    return __builtin_popcount(b);
}
// The way back: the lanes that m marks take one after another what lies at `from`; the others are 0.
ANYMAX_INLINE vf unpack(vi m, uint32_t b, const float *from) {
#if defined(__AVX512F__)
    (void)m;
    return (vf)_mm512_maskz_expand_ps((__mmask16)b, _mm512_loadu_ps(from));
#elif defined(__AVX2__)
    const __m256i lane = lanes_by(TABLES.spread[b]);
    return m ? (vf)_mm256_permutevar8x32_ps(_mm256_loadu_ps(from), lane) : vf{};
#elif defined(ANYMAX_BYTES)
    (void)m;
    return bytes_by(load(from), BYTES.spread[b]);
#else
    vf v{};
    for (uint32_t r = b; r; r &= r - 1) v[__builtin_ctz(r)] = *from++;
    (void)m;
    return v;
#endif
}

// -- transposition

// Rows one a lane, and back. Eight by eight floats, or four by four, are transposed in registers; other types one by one.
// row(r) is where row r lies.
template <class C, class R>
ANYMAX_INLINE void lanes_of_rows(C *to, int64_t rows, int64_t n, R row) {
    constexpr int64_t W = width<C>;
    for (int64_t i = 0; rows < W && i < n; i++) store(to + i * W, vec<C>{});
    for (int64_t r = 0; r < rows; r++) {
        const auto *x = row(r);
        for (int64_t i = 0; i < n; i++) to[i * W + r] = (C)x[i];
    }
}
template <class C, class R>
ANYMAX_INLINE void rows_of_lanes(const C *from, int64_t rows, int64_t n, R row) {
    constexpr int64_t W = width<C>;
    for (int64_t r = 0; r < rows; r++) {
        auto *out = row(r);
        for (int64_t i = 0; i < n; i++) out[i] = from[i * W + r];
    }
}

#if defined(__AVX2__)
constexpr int64_t SQUARE = 8;
template <class T, class F>
ANYMAX_INLINE void transpose(T to, F from) {
    __m256 r[8];
    for (int64_t j = 0; j < 8; j++) r[j] = _mm256_loadu_ps(from(j));
    __m256 a0 = _mm256_unpacklo_ps(r[0], r[1]), a1 = _mm256_unpackhi_ps(r[0], r[1]), a2 = _mm256_unpacklo_ps(r[2], r[3]),
           a3 = _mm256_unpackhi_ps(r[2], r[3]);
    __m256 a4 = _mm256_unpacklo_ps(r[4], r[5]), a5 = _mm256_unpackhi_ps(r[4], r[5]), a6 = _mm256_unpacklo_ps(r[6], r[7]),
           a7 = _mm256_unpackhi_ps(r[6], r[7]);
    __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xee), b2 = _mm256_shuffle_ps(a1, a3, 0x44),
           b3 = _mm256_shuffle_ps(a1, a3, 0xee);
    __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xee), b6 = _mm256_shuffle_ps(a5, a7, 0x44),
           b7 = _mm256_shuffle_ps(a5, a7, 0xee);
    r[0] = _mm256_permute2f128_ps(b0, b4, 0x20), r[1] = _mm256_permute2f128_ps(b1, b5, 0x20),
    r[2] = _mm256_permute2f128_ps(b2, b6, 0x20), r[3] = _mm256_permute2f128_ps(b3, b7, 0x20);
    r[4] = _mm256_permute2f128_ps(b0, b4, 0x31), r[5] = _mm256_permute2f128_ps(b1, b5, 0x31),
    r[6] = _mm256_permute2f128_ps(b2, b6, 0x31), r[7] = _mm256_permute2f128_ps(b3, b7, 0x31);
    for (int64_t j = 0; j < 8; j++) _mm256_storeu_ps(to(j), r[j]);
}
#else
constexpr int64_t SQUARE = 4;
// a0 b0 a1 b1, and a2 b2 a3 b3.
#if defined(__aarch64__)
ANYMAX_INLINE vf zip_low(vf a, vf b) { return (vf)vzip1q_f32((float32x4_t)a, (float32x4_t)b); }
ANYMAX_INLINE vf zip_high(vf a, vf b) { return (vf)vzip2q_f32((float32x4_t)a, (float32x4_t)b); }
#elif defined(__SSE2__)
ANYMAX_INLINE vf zip_low(vf a, vf b) { return (vf)_mm_unpacklo_ps((__m128)a, (__m128)b); }
ANYMAX_INLINE vf zip_high(vf a, vf b) { return (vf)_mm_unpackhi_ps((__m128)a, (__m128)b); }
#else
ANYMAX_INLINE vf zip_low(vf a, vf b) { return vf{a[0], b[0], a[1], b[1]}; }
ANYMAX_INLINE vf zip_high(vf a, vf b) { return vf{a[2], b[2], a[3], b[3]}; }
#endif
template <class T, class F>
ANYMAX_INLINE void transpose(T to, F from) {
    const vf a = load(from(0)), b = load(from(1)), c = load(from(2)), d = load(from(3));
    const vf low = zip_low(a, c), high = zip_high(a, c), next_low = zip_low(b, d), next_high = zip_high(b, d);
    store(to(0), zip_low(low, next_low)), store(to(1), zip_high(low, next_low));
    store(to(2), zip_low(high, next_high)), store(to(3), zip_high(high, next_high));
}
#endif
template <class R>
ANYMAX_INLINE void lanes_of_rows(float *to, int64_t rows, int64_t n, R row) {
    constexpr int64_t W = width<float>;
    if (rows < W) return lanes_of_rows<float, R>(to, rows, n, row);
    int64_t i = 0;
    for (; i + SQUARE <= n; i += SQUARE)
        for (int64_t first = 0; first < W; first += SQUARE)
            transpose([&](int64_t j) ANYMAX_EACH { return to + (i + j) * W + first; },
                      [&](int64_t j) ANYMAX_EACH { return row(first + j) + i; });
    for (; i < n; i++)
        for (int64_t r = 0; r < W; r++) to[i * W + r] = row(r)[i];
}
template <class R>
ANYMAX_INLINE void rows_of_lanes(const float *from, int64_t rows, int64_t n, R row) {
    constexpr int64_t W = width<float>;
    if (rows < W) return rows_of_lanes<float, R>(from, rows, n, row);
    int64_t i = 0;
    for (; i + SQUARE <= n; i += SQUARE)
        for (int64_t first = 0; first < W; first += SQUARE)
            transpose([&](int64_t j) ANYMAX_EACH { return row(first + j) + i; },
                      [&](int64_t j) ANYMAX_EACH { return from + (i + j) * W + first; });
    for (; i < n; i++)
        for (int64_t r = 0; r < W; r++) row(r)[i] = from[i * W + r];
}

// The same of rows that lie `stride` apart.
template <class C, class T>
ANYMAX_INLINE void gather_lanes(C *to, const T *x, int64_t rows, int64_t n, int64_t stride) {
    lanes_of_rows(to, rows, n, [=](int64_t r) ANYMAX_EACH { return x + r * stride; });
}
template <class C, class T>
ANYMAX_INLINE void scatter_lanes(const C *from, T *out, int64_t rows, int64_t n, int64_t stride) {
    rows_of_lanes(from, rows, n, [=](int64_t r) ANYMAX_EACH { return out + r * stride; });
}

// Of as many vectors as one has lanes, what `join` makes of the lanes of each, one a lane.
template <class F>
ANYMAX_INLINE vf across(const vf *v, F join) {
    constexpr int64_t W = width<float>;
    alignas(64) vf transposed[W];
    gather_lanes((float *)transposed, (const float *)v, W, W, W);
    for (int64_t half = W / 2; half; half /= 2)
        for (int64_t j = 0; j < half; j++) transposed[j] = join(transposed[j], transposed[j + half]);
    return transposed[0];
}
ANYMAX_INLINE vf sums(const vf *v) {
    return across(v, [](vf a, vf b) { return a + b; });
}

// The lanes of a vector as vectors of doubles.
ANYMAX_INLINE vd part(vf v, int h) { return h ? high(v) : low(v); }
ANYMAX_INLINE vd part(vd v, int) { return v; }

}  // namespace ANYMAX_UNIT
