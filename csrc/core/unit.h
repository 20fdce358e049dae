/* What each instruction set's unit offers to the dispatcher. */
#ifndef ANYMAX_UNIT_H
#define ANYMAX_UNIT_H

#include "anymax.h"

enum {
    ANYMAX_OK = 0,
    ANYMAX_BAD_CALL = 1,
    ANYMAX_BAD_DTYPE = 2,
    ANYMAX_BAD_MAP = 3,
    ANYMAX_BAD_SHAPE = 4,
    ANYMAX_BAD_POINTER = 5,
    ANYMAX_NO_MEMORY = 6,
    ANYMAX_BAD_PARAM = 7,
    ANYMAX_BAD_SUPPORT = 8,
    ANYMAX_BAD_SEGMENTS = 9
};

/* Classes of a row, at most: their indices and the lanes beyond the last fit into 32 bits. */
#define ANYMAX_MOST_CLASSES (INT32_MAX - 1024)

typedef struct {
    int64_t from, to;
} anymax_span;
enum { ANYMAX_SPANS = 8 };

typedef struct {
    /* The rows [begin, end) of a call; `team` splits a single long row, NULL: the caller alone. */
    int (*rows)(const anymax_call *call, int64_t begin, int64_t end, int bypass, anymax_parallel team);
    const char *(*plan)(const anymax_call *call);
    /* The lengths of rows up to n that may be served together, each of a length of its own (sizes), in order; how many spans of
     * them there are. */
    int (*uneven)(const anymax_call *call, anymax_span spans[ANYMAX_SPANS]);
    /* 1: a call whose rows begin at `starts`, several inner ones side by side, is best served so. */
    int (*beside)(const anymax_call *call);
    int64_t (*saves)(int32_t op, int32_t map, double param, int64_t rows, int64_t n);
    int (*linear)(const anymax_linear_call *call, anymax_parallel team);
    int (*linear_vjp)(const anymax_linear_call *call, anymax_parallel team);
    int (*decode)(const anymax_decode_call *call, int64_t begin, int64_t end);
    int (*choose)(const anymax_choice_call *call, int64_t begin, int64_t end);
    /* The matrices [begin, end), and the rows; a team for one at a time. */
    int (*transport)(const anymax_sinkhorn_call *call, int64_t begin, int64_t end, anymax_parallel team);
    int (*tabled)(const anymax_tabled_call *call, int64_t begin, int64_t end, anymax_parallel team);
    void (*gumbel)(const float *pairs, float *out, int64_t count);
    void (*twister)(int64_t *words, int64_t *next, int64_t *left, float *out, int64_t count);
} anymax_unit;

/* Bytes of a number of this dtype, and of one that a row has. */
static inline int64_t anymax_item(int32_t dtype) { return dtype == ANYMAX_F64 ? 8 : dtype == ANYMAX_F32 ? 4 : 2; }
static inline int64_t anymax_wide(int32_t dtype) { return dtype == ANYMAX_F64 ? 8 : 4; }

/* What has one number a row, or a support, from this row on. */
static inline void anymax_skip_rows(anymax_call *call, int64_t rows) {
    const int64_t wide = anymax_wide(call->dtype), saved = rows * call->support.capacity;
    anymax_support *s = &call->support;
    if (s->count) s->index += saved, s->value = (char *)s->value + saved * wide, s->count += rows;
    if (call->params) call->params += rows;
    if (call->index) call->index += rows;
    if (call->scale) call->scale = (const char *)call->scale + rows * wide;
    if (call->value) call->value = (char *)call->value + rows * wide;
    if (call->tau) call->tau = (char *)call->tau + rows * wide;
    if (call->slope) call->slope = (char *)call->slope + rows * wide;
}

/* The support that lies in one piece: the values, the indices, the counts. */
static inline anymax_support anymax_support_in(void *saved, int64_t rows, int64_t capacity, int32_t dtype) {
    const int64_t size = rows * capacity;
    int32_t *index = (int32_t *)((char *)saved + size * anymax_wide(dtype));
    const anymax_support support = {index, saved, index + size, capacity};
    return support;
}

/* Those that were built, as ANYMAX_HAVE_<UNIT> says. */
#if defined(__cplusplus)
extern "C" {
#endif
#if defined(ANYMAX_HAVE_AVX512)
extern const anymax_unit anymax_unit_avx512;
#endif
#if defined(ANYMAX_HAVE_AVX2)
extern const anymax_unit anymax_unit_avx2;
#endif
#if defined(ANYMAX_HAVE_NEON)
extern const anymax_unit anymax_unit_neon;
#endif
#if defined(ANYMAX_HAVE_SIMD128)
extern const anymax_unit anymax_unit_simd128;
#endif
#if defined(ANYMAX_HAVE_BASELINE)
extern const anymax_unit anymax_unit_baseline;
#endif
#if defined(__cplusplus)
}
#endif

#endif
