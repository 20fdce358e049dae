/* The C ABI of the kernels: pointers, sizes and enumerations; no Python, no framework.
 *
 * One call works on `outer * inner` rows of `n` classes. Row (o, i) of an operand starts at data + o * outer + i * inner, and
 * its classes are `cls` apart; all strides count elements and may be zero (an operand that is shared by rows) or negative.
 */
#ifndef ANYMAX_H
#define ANYMAX_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define ANYMAX_API __declspec(dllexport)
#else
#define ANYMAX_API __attribute__((visibility("default")))
#endif

#define ANYMAX_ABI 13

enum anymax_dtype { ANYMAX_F32 = 0, ANYMAX_F64 = 1, ANYMAX_BF16 = 2, ANYMAX_F16 = 3 };

enum anymax_map {
    ANYMAX_SOFTMAX = 0,
    ANYMAX_SPARSEMAX = 1,
    ANYMAX_ENTMAX = 2,  /* param: alpha */
    ANYMAX_BUDGET = 3,  /* param: k */
    ANYMAX_NORMMAX = 4, /* param: alpha */
    ANYMAX_TOPK = 5,    /* param: k (sparse softmax over the k largest) */
    ANYMAX_TOPP = 6,    /* param: p (sparse softmax over the nucleus) */
    ANYMAX_TAYLOR = 7,  /* param: order */
    ANYMAX_SIGSOFTMAX = 8,
    ANYMAX_PERTURB = 9,   /* param: scale; noise: which; nodes: how many, as ANYMAX_NODES says */
    ANYMAX_RELU = 10,     /* p = max(x, 0) / sum max(x, 0) */
    ANYMAX_BOUNDED = 11,  /* param: alpha, 1 to 2; upper: the bounds */
    ANYMAX_SOFTPICK = 12, /* max(exp(x) - 1, 0) / (sum |exp(x) - 1| + param) */
    ANYMAX_MAPS = 13
};

/* Nodes that the digits of floats and of doubles need. */
enum { ANYMAX_NODES = 32, ANYMAX_NODES_F64 = 64 };

enum anymax_noise { ANYMAX_NORMAL = 0, ANYMAX_LOGISTIC = 1, ANYMAX_UNIFORM = 2, ANYMAX_LAPLACE = 3, ANYMAX_GUMBEL = 4 };

enum anymax_op {
    ANYMAX_FORWARD = 0,   /* x -> p; with `support`, the non-zeros as well */
    ANYMAX_LOG = 1,       /* x -> log p (softmax, sparse softmax, sigsoftmax) */
    ANYMAX_VJP = 2,       /* (x where the map needs it, p or `support`, g) -> out = J^T g */
    ANYMAX_LOG_VJP = 3,   /* (x where the map needs it, p = log p, g) -> out = g - p sum g where p > 0, for log p */
    ANYMAX_LOSS = 4,      /* (x, index) -> value[row]; with `support` the non-zeros of p, with `tau` the threshold */
    ANYMAX_LOSS_GRAD = 5, /* (x; support or tau where they were saved; index; scale[row]) -> out = scale (p - y) */
    ANYMAX_THRESHOLD = 6, /* x -> tau[row]: logsumexp for softmax and sparse softmax */
    ANYMAX_LARGEST = 7,   /* x -> the k largest values, sorted, and their indices */
    ANYMAX_SLOPE = 8, /* (x where the map needs it, p or `support`, g) -> value[row] = <g, dp/dparam>: entmax, normmax, budget,
                         bounded; of bounded out = the same by the bound of each class, too. One of both may be NULL there */
    ANYMAX_OPS = 9
};

typedef struct {
    void *data;
    int64_t outer, inner, cls;
} anymax_view;

/* The non-zeros of the probabilities of each row, their classes in order: `count` of them, or -1 where there were more than
 * `capacity`. */
typedef struct {
    int32_t *index; /* [rows, capacity] */
    void *value;    /* [rows, capacity], float; double for ANYMAX_F64 */
    int32_t *count; /* [rows] */
    int64_t capacity;
} anymax_support;

typedef struct {
    int32_t op, map, dtype;
    int32_t noise;
    int64_t outer, inner, n;
    double param;
    const double *params; /* one a row, or NULL: `param` for all */
    int64_t nodes;
    anymax_view x;    /* scores */
    anymax_view p;    /* probabilities, read by VJP and SLOPE */
    anymax_view g;    /* the incoming gradient, read by VJP and SLOPE */
    anymax_view out;  /* the result */
    anymax_view mask; /* bytes, 0 = leave out; data NULL: none */
    anymax_support support;
    const int64_t *index; /* [rows]: the target class of each row; a negative one leaves the row out (value and gradient 0) */
    const void *scale;    /* [rows]: factor of the gradient, float; double for ANYMAX_F64 */
    void *value;          /* [rows]: losses, or the slopes of ANYMAX_SLOPE, float; double for ANYMAX_F64 */
    void *tau;            /* [rows]: thresholds, float; double for ANYMAX_F64 */
    int64_t *positions;   /* [rows, k]: indices of ANYMAX_LARGEST; `out` has k classes */
    int32_t pool;         /* 0: the pool of this library; 1: the one given to anymax_set_parallel; -1: no threads */
    int32_t fresh; /* 1: out is newly allocated. At the first write the system clears a page, which leaves it in the caches, so
                      the stores do not bypass them; 2: the same, and out holds zeros: those of the result are not written */
    const int64_t *starts; /* [outer]: row (o, i) of x, p, g and out begins at data + starts[o] + i * inner; NULL: as said
                              above. Not with a mask or a support */
    const int64_t *sizes;  /* [outer], of calls that anymax_run_segments makes by itself: how many classes each row has, n at
                              most; else NULL */
    void *slope;       /* [rows]: beside the value of ANYMAX_LOSS its derivative by the parameter, float; double for ANYMAX_F64.
                          Entmax', normmax' and budget's (there of Omega*(x) - x_t, whatever k is); NULL: it is not wanted */
    anymax_view upper; /* of ANYMAX_BOUNDED the bounds of the classes, float; double for ANYMAX_F64. A row with one that is NaN
                          or below 0 becomes NaN */
} anymax_call;

/* 0, or one of the codes that anymax_error() puts into words. Nothing is written where the call is refused, but for a support
   whose classes are not those of its rows, in order: some rows may have been written when the first such row is found. */
ANYMAX_API int anymax_run(const anymax_call *call);

/* The short way for x and p contiguous, classes last, without mask or support: code = op | map << 8 | dtype << 16 | pool << 24
 * (pool 0 or 1). */
ANYMAX_API int anymax_rows(int64_t code, const void *x, void *out, int64_t rows, int64_t n, double param);

/* Ragged rows: the entries ptr[s] ... ptr[s + 1] - 1 are one row of each head. In a call on segments `outer` is their number,
   `inner` that of heads and `n` that of all entries; entry e of head h of an operand lies at data + order[e] * cls + h * inner,
   the strides of `outer` are not read, and what has one number a row (params, index, scale, value, tau, slope) is [segments,
   heads]. A target (index) counts from the first entry of its segment. Each row becomes what anymax_run makes of it where its
   entries lie side by side, to the last bit. An empty segment has no entries to write; its threshold is -inf, its loss, and the
   slope of that, 0 for a target below 0 and NaN for any other; its ANYMAX_SLOPE 0. Neither mask nor support nor ANYMAX_LARGEST
   nor ANYMAX_BOUNDED; tau for ANYMAX_THRESHOLD alone. */
typedef struct {
    const int64_t *ptr;   /* [segments + 1], ascending from 0 to the number of entries */
    const int64_t *order; /* [entries]: a permutation, or NULL: they lie in order */
    void *kept; /* [entries, heads], of the dtype of the call, or NULL; with an order alone: p in that order, written by
                   ANYMAX_FORWARD beside out, read by ANYMAX_VJP and ANYMAX_SLOPE in the place of p */
} anymax_segments;
ANYMAX_API int anymax_run_segments(const anymax_call *call, const anymax_segments *segments);

/* Sorts entries by segment, and by place within one: index[e] from 0 to segments - 1 gives ptr [segments + 1] and order
   [entries], for anymax_segments. `count` where the entries are in order already: `order` was not written. 0 where they are
   not; below 0: entry -1 - result is out of range, or, where that is entry `count`, the index has changed meanwhile. With order
   NULL it is 0 in all these cases, and ptr is nothing. `pool` as in anymax_call. */
ANYMAX_API int64_t anymax_sort_segments(const int64_t *index, int64_t count, int64_t segments, int64_t *ptr, int64_t *order,
                                        int32_t pool);

/* Attention with Taylor softmax of order 2, at a cost that grows with the length and not its square: sum_l w_l v_l / sum_l w_l
   over the keys of a head, w_l = 1 + s + s^2 / 2, s = scale <q, k_l>; zeros where there is no key. In C order, F32 or F64: q
   [heads, groups, queries, d] and out [heads, groups, queries, dv], k [heads, keys, d] and v [heads, keys, dv]; out overlaps
   none of them. */
typedef struct {
    int32_t dtype, causal; /* causal: query i sees the keys up to the i-th */
    int32_t pool, threads; /* the pool as above, and how many threads it has; results don't depend on it */
    int64_t heads, groups, queries, keys, d, dv;
    double scale;
    const void *q, *k, *v;
    void *out;
    const int64_t *lengths; /* [heads]: how many keys are there; NULL: all */
    void *below;   /* [heads, groups, queries]: the denominators that the gradient asks for (1 where there is no key); NULL: it
                      won't */
    const void *g; /* read by the gradient: like out, */
    void *dq, *dk, *dv_; /* and written by it: like q, k and v; dq NULL: it is not wanted, dk NULL: neither dk nor dv_ */
} anymax_linear_call;
ANYMAX_API int anymax_linear(const anymax_linear_call *call);
ANYMAX_API int anymax_linear_vjp(
    const anymax_linear_call *call); /* of what anymax_linear has made: `out` and `below` are read */

/* Soft ranks and soft sorting, the projection on a permutahedron (order/blocks.hpp says which); rows in C order, F32 or F64.
   -inf is a masked class: it has the rank 0, and sorted it comes last, as 0. A row with NaN or +inf becomes NaN. */
typedef struct {
    int32_t dtype, pool;
    int32_t sorted;     /* 0: the rank of each score, 1 for the smallest; 1: the scores in order */
    int32_t descending; /* 1: as said; 0: of -x, and sorted scores with their sign again */
    int32_t kl;         /* 0: squared distance; 1: relative entropy */
    int64_t rows, n;
    double strength;   /* above 0 */
    const void *x;     /* read by anymax_order, and by the gradient of sorted scores */
    int32_t *order;    /* [rows, n]: the classes in descending order, the sign bit set at the first of each block; anymax_order
                          writes it unless it is NULL */
    const void *p, *g; /* read by the gradient: the result of anymax_order, and the incoming gradient */
    void *out;
    const double *strengths; /* [rows], in the place of `strength`, or NULL; a row whose own is not finite and above 0 becomes
                                NaN */
} anymax_order_call;
ANYMAX_API int anymax_order(const anymax_order_call *call);
ANYMAX_API int anymax_order_vjp(const anymax_order_call *call);

/* Fusedmax, sparsemax after total variation denoising; rows in C order, F32 or F64. -inf is a masked class: it is left out of
   the chain, and its p is 0. A row with NaN or +inf, or whose strength is not finite or below 0, becomes NaN. */
typedef struct {
    int32_t dtype, pool;
    int64_t rows, n;
    const double *strength; /* read by anymax_fused: of row r at strength + r * strength_step, */
    int64_t strength_step;  /* 0 or 1 */
    const void *x;
    uint8_t *begins; /* [rows, n]: 0 where a class continues a group of one p above 0, else 1. anymax_fused writes it unless it
                        is NULL; the gradient reads it */
    const void *p, *g; /* read by the gradient: the result of anymax_fused, and the incoming gradient */
    void *out;
    double *slope; /* [rows]: written by the gradient, <g, dp/dstrength>, or NULL */
} anymax_fused_call;
ANYMAX_API int anymax_fused(const anymax_fused_call *call);
ANYMAX_API int anymax_fused_vjp(const anymax_fused_call *call);

/* Truncations of rows one after the other, then draws from a map of the scores that they leave. A step keeps `least` classes at
   least; equal scores at the end of a step stay by their place, but for TYPICAL and WITHOUT_TOP, which treat them alike. */
enum anymax_step_kind {
    ANYMAX_TEMPERATURE = 0,      /* scores / value; at 0 the largest alone */
    ANYMAX_LARGEST_SCORES = 1,   /* the `value` largest */
    ANYMAX_NUCLEUS_MASS = 2,     /* the fewest largest of softmax mass `value` */
    ANYMAX_SHARE_OF_LARGEST = 3, /* probability at least `value` of the largest */
    ANYMAX_DEVIATIONS = 4,       /* within `value` standard deviations of the largest score */
    ANYMAX_LEAST_SHARE = 5,      /* probability at least `value` */
    ANYMAX_ETA = 6,              /* probability at least min(value, sqrt(value) exp(-entropy)) */
    ANYMAX_TYPICAL = 7,          /* -log p nearest to the entropy, of mass `value` */
    ANYMAX_WITHOUT_TOP = 8,      /* of those with a probability of `value` or more only the least likely */
    ANYMAX_STEPS = 9
};
typedef struct {
    int32_t kind, least;
    double value;
} anymax_step;
typedef struct {
    int32_t map, dtype, pool; /* a map that may have zeros, or softmax */
    int64_t rows, n, stride;  /* row r begins at x + r * stride, its classes side by side */
    double param;
    const void *x;
    const anymax_step *steps;
    int64_t count;
    const double *values; /* [rows, count]: the steps' values row by row, or NULL */
    uint8_t *keep;        /* [rows, n]: which classes are left, or NULL */
    void *left; /* [rows, n], of F32 or F64: the scores, -inf where a class is not left, or NULL; x itself if rows are dense and
                   nothing is drawn */
    int64_t draws;
    const double *u;      /* [rows, draws], from 0 to 1: for each a class is drawn, */
    int64_t *index;       /* [rows, draws]: and goes here, -1 where there is none; */
    const int64_t *given; /* [rows, draws]: or NULL; classes in the place of draws */
    double *log_p;        /* [rows, draws]: log p of each, or NULL */
    double *entropy;      /* [rows]: of the probabilities, or NULL */
    double *tau;          /* [rows]: thresholds of what is left, logsumexp for softmax, or NULL */
    int32_t *listed;      /* [rows, n], or NULL: each row begins with the classes that could be drawn, in order; where these are
                             all n, nothing is written */
    int64_t *counts;      /* [rows]: how many they are */
} anymax_decode_call;
ANYMAX_API int anymax_decode(const anymax_decode_call *call);

/* The k largest scores of each row, as a router chooses its experts: their classes, the largest first, equal ones by their
   place; -1 where a row has fewer, and in all of a row with a NaN. With groups, equal blocks of the classes, only the `kept`
   groups with the largest sums are chosen from, equal sums by their place. The sum of a group is that of its `most` largest
   scores, added in their order; scores of -inf count as nothing, and a group that has no other is never kept. */
typedef struct {
    int32_t dtype, pool;
    int64_t rows, n; /* in C order */
    const void *x;
    int64_t k, groups, kept, most; /* groups 1: there are none */
    int64_t *index;                /* [rows, k] */
} anymax_choice_call;
ANYMAX_API int anymax_choose(const anymax_choice_call *call);
/* Sinkhorn: `count` matrices [n, m] in C order, F32 or F64. P = exp(x / temperature) with factors of rows and columns, after so
   many iterations, each of which gives the rows and then the columns their sums. -inf is an entry of 0; a matrix with NaN or
   +inf, or with a sum below 0, becomes NaN. */
typedef struct {
    int32_t dtype, pool;
    int64_t count, n, m, iterations;
    double temperature;
    const void *x;
    const void *rows, *columns; /* the sums of rows [n] and columns [m], of the dtype of x. NULL: equal shares of the other's
                                   total; both: 1 a row. Rows and columns without an entry have none */
    int64_t rows_step, columns_step; /* from those of a matrix to those of the next; 0: all have the same */
    const void *g;                   /* the gradient of P, or NULL */
    void *out;                       /* P; with g the gradient of x */
    double tolerance; /* above 0, without g: a matrix is iterated until no sum of a row is wrong by more than this part of it */
    double *left;     /* [count], with a tolerance: by how much it was wrong before the last iteration */
} anymax_sinkhorn_call;
ANYMAX_API int anymax_sinkhorn(const anymax_sinkhorn_call *call);
/* A rising function of t as cubics: at v = sign * t + offset, which is above 0, cell (bits of v >> shift) less that of `low`,
   and a fraction u of it the lower bits of v: ((c[3] u + c[2]) u + c[1]) u + c[0]. */
typedef struct {
    const float *cells; /* [count, 4]: c */
    int64_t count;
    int32_t shift, sign;
    double offset;
    double end;         /* the largest t: where one class has all of the mass, or the most; it may be infinite */
    double scale;       /* the largest value over the largest derivative */
    float low, high;    /* cells are from here to there, */
    float below, above; /* and these are the values up to `low` and from `high` on */
} anymax_table;

/* A function u of a score that is never below 0, and its derivative, as cubics in cells on either side of 0, which have their
   numbers by |x|: first those above 0, then those below. With `per` > 0, a power of two, there are so many to a unit; else they
   are as in anymax_table, with v = |x|, from `least` on. */
typedef struct {
    const float *weights, *slopes; /* [above + beneath, 4]; slopes may be NULL without a gradient */
    int64_t above, beneath;
    float low, high;  /* there are cells of the scores between these, but for those below `least`, */
    float lost, gone; /* and up to the one and from the other on, which may be infinite, u and u' are 0 */
    float per, least;
    int32_t shift;
    float weight, slope; /* at 0 */
} anymax_weights;

/* p_i = link(x_i - tau), tau such that a row sums to `mass`, for a link that is 0 or vanishes at small t. Without g: x are
   scores, out becomes p, and tau the thresholds; either may be NULL. With g: x are probabilities, `link` is 1 / omega'' as a
   function of p, with sign 1 and offset 0, and out becomes s (g - <s, g> / sum s), s = link(p). With a ratio there is no link:
   x are scores, and out becomes p_i = u(x_i) / sum u, with g u' (g - <p, g>) / sum u. F32, BF16 or F16, rows [rows, n] in C
   order. */
typedef struct {
    int32_t dtype, pool;
    int64_t rows, n;
    double mass, most; /* of a row; of one class */
    anymax_table link;
    const void *x, *g;
    void *out;
    float *tau; /* [rows] */
    const anymax_weights *ratio;
    uint8_t *left; /* [rows], with a ratio: 1 where a score has no cell, and the row is left to the caller */
} anymax_tabled_call;
ANYMAX_API int anymax_tabled(const anymax_tabled_call *call);

/* Gumbel noise from pairs of numbers in [0, 1): out[i] = -log(-log(1 - u)), u = pairs[2 i] + 2^-24 pairs[2 i + 1], at least
   2^-48 and at most 1 - 2^-24. */
ANYMAX_API int anymax_gumbel(const float *pairs, float *out, int64_t count);

/* `count` floats in [0, 1) of the 24 lowest bits of the numbers of a Mersenne twister (MT19937), which goes on: its words, each
   as 64 bits, the place of the next one, and how many are left, one more than there are (1: none), as torch keeps them. */
enum { ANYMAX_TWISTER_WORDS = 624 };
ANYMAX_API int anymax_twister(int64_t *words, int64_t *next, int64_t *left, float *out, int64_t count);

ANYMAX_API const char *anymax_error(int code);

/* The instruction set in use ("avx512", "avx2", "neon", "simd128", "baseline"), and all that this library and machine have,
 * separated by commas. */
ANYMAX_API const char *anymax_isa(void);
ANYMAX_API const char *anymax_isas(void);
/* Choose one of them; 0, or -1 where there is none of this name. ANYMAX_ISA in the environment does the same at load. */
ANYMAX_API int anymax_set_isa(const char *name);

/* Threads of the pool that serves where no framework lends its own. */
ANYMAX_API int anymax_get_num_threads(void);
ANYMAX_API void anymax_set_num_threads(int count);

/* `parallel_for(begin, end, grain, task, context)` of a framework, in the form of torch_parallel_for, for the calls that ask
 * for it. */
typedef void (*anymax_task)(int64_t begin, int64_t end, void *context);
typedef int (*anymax_parallel)(int64_t begin, int64_t end, int64_t grain, anymax_task task, void *context);
ANYMAX_API void anymax_set_parallel(anymax_parallel parallel);

/* How the rows of a call are taken, and the instruction set that does it: "tile: all classes (power 2, 1 to 128 classes)
   avx512". NULL where its op, map, dtype, shape or parameter is out of range. Of operands it is only asked whether they are
   there. The text is the thread's, until it asks again. */
ANYMAX_API const char *anymax_plan(const anymax_call *call);

/* How many non-zeros of each row are worth saving for the gradient (support.capacity), 0: none. op ANYMAX_FORWARD: for its
   ANYMAX_VJP; ANYMAX_LOSS: for its ANYMAX_LOSS_GRAD, where the 1 of softmax is its threshold (tau). rows: outer * inner. -1: no
   such operation or map. */
ANYMAX_API int64_t anymax_saves(int32_t op, int32_t map, double param, int64_t rows, int64_t n);

ANYMAX_API int anymax_abi(void);

#ifdef __cplusplus
}
#endif
#endif
