// Which way the rows of a call take: one table of rules, the first that holds. The limits of every way stand here, and nowhere else.
// What each way gains over the next one is in csrc/README.md.
#pragma once

#include "core/vec.hpp"
#include "maps.hpp"

namespace ANYMAX_UNIT {

#if defined(__AVX2__)
constexpr bool PACKS = true;  // lanes can be moved by a mask, without which batches gain nothing
#else
constexpr bool PACKS = false;
#endif

// -- limits, in classes unless it says otherwise ---------------------------------------------------------------------------------------------

constexpr int64_t TILE_MOST = 128;     // one row a lane,
constexpr int64_t TILE_SQUARE = 32;    // with k largest that are found in n^2 steps, and budgets: no more than this
constexpr int64_t BATCH_MOST = 2048;   // many rows at once, the candidates of each solved one row a lane
constexpr int64_t BATCH_AHEAD = 512;   // of which the next rows are asked for meanwhile; longer ones come by themselves
constexpr int64_t SWEEP_MOST = 2048;   // all of a row at each step, whatever its support; beyond, where most of the row is a candidate
constexpr int64_t DENSE_MOST = 320;    // a gradient from all of p; beyond, the zeros of a sparse map are worth looking for
constexpr int64_t BESIDE_MOST = 32;    // a gradient of rows side by side, one a lane
template <class C>
constexpr int64_t COUNT_MOST = 128 * width<C>;  // the k largest among all of a row, by counting

// Candidates of a row in a batch; a row with more is served by itself.
constexpr int64_t BATCH_CANDIDATES = 1024;
constexpr int64_t BATCH_CANDIDATES_SWEPT = 512;  // of entmax 4/3 and 5/4, which a sweep serves as well
constexpr int64_t BATCH_CANDIDATES_FEW = 256;    // of sparsemax, entmax 3/2 and the k largest

// -- the ways ----------------------------------------------------------------------------------------------------------------------------------

enum Way {
    TILE,            // as many rows as a vector has lanes, transposed: one row a lane
    TILE_LOSS,       // the same for losses, their gradients and thresholds
    BATCH,           // as many rows, each read along itself; their candidates transposed and solved one row a lane
    BATCH_LOSS,      // the same for losses and their gradients
    DENSE_BACKWARD,  // J^T g from all of p, as many rows in turn as a vector has lanes
    BESIDE_BACKWARD, // the same of short rows side by side, one a lane: the heads of ragged rows
    SAVED_BACKWARD,  // J^T g from saved supports, row after row in one loop
    SAVED_GRADIENT,  // the same for the gradient of a loss
    SWEEP,           // one row: each step over all of it
    SWEEP_CROWDED,   // one row: the same where most of it is a candidate, else its candidates
    COUNT,           // one row: the k largest by counting over all of it
    WEIGH,           // one row: the nucleus by weighing what reaches a level, else its candidates
    CANDIDATES,      // one row: what is above a bound is copied out and solved in doubles
    ROW,             // one row: all of it, in one or two passes
    WAYS
};

constexpr const char *WAY_NAMES[WAYS] = {
    "tile", "tile of losses", "batch", "batch of losses", "dense backward", "backward of rows side by side", "saved backward", "saved gradient", "row: sweep",
    "row: sweep where most of it is a candidate, else candidates", "row: counting", "row: weighing", "row: candidates", "row",
};

// -- the rules -----------------------------------------------------------------------------------------------------------------------------------

// Budgets and k that leave most of a row out.
inline bool within_n(const anymax_call &c) { return c.param <= (double)c.n; }
inline bool small_budget(const anymax_call &c) { return c.param > 0.0 && c.param * 2.0 <= (double)c.n && ::ceil(c.param) <= (double)(8 * width<float>); }
inline bool few_largest(const anymax_call &c) { return c.param >= 1.0 && c.param <= (double)(BATCH_CANDIDATES_FEW / 2) && c.param * 2 <= (double)c.n; }
// k of short rows that a normal distribution of their scores leads to at once.
inline bool counted(double k, int64_t n) { return n <= TILE_MOST && k * 14.0 >= (double)n; }
inline bool some_largest(const anymax_call &c) { return c.param >= 1.0 && c.param < (double)c.n && (counted(c.param, c.n) || few_largest(c)); }
inline bool many_largest(const anymax_call &c) { return c.param < (double)c.n && c.param * 8.0 >= (double)c.n; }
inline bool many_unsaved(const anymax_call &c) { return many_largest(c) && !c.support.count; }
// Beyond, the exponent alpha / (alpha - 1) of normmax is near to 1.
inline bool mild_norm(const anymax_call &c) { return c.param < 51.0; }

inline bool unsaved(const anymax_call &c) { return !c.support.count; }
inline bool unsaved_within_n(const anymax_call &c) { return unsaved(c) && within_n(c); }
inline bool unsaved_mild(const anymax_call &c) { return unsaved(c) && mild_norm(c); }
inline bool untold(const anymax_call &c) { return c.op != ANYMAX_LOSS || !c.tau; }
inline bool plain_scores(const anymax_call &c) { return c.x.cls == 1 && !c.mask.data; }
inline bool plain_untold(const anymax_call &c) { return plain_scores(c) && !c.tau; }
inline bool plain_mild(const anymax_call &c) { return plain_untold(c) && mild_norm(c); }
inline bool plain_few_largest(const anymax_call &c) { return plain_untold(c) && few_largest(c); }
inline bool plain_gradient(const anymax_call &c) { return plain_scores(c) && unsaved(c) && c.out.cls == 1; }
inline bool dense_backward(const anymax_call &c) { return unsaved(c) && c.p.cls == 1 && c.g.cls == 1 && c.out.cls == 1; }
inline bool saved_backward(const anymax_call &c) { return c.support.count && c.g.cls == 1 && c.out.cls == 1; }
inline bool saved_gradient(const anymax_call &c) { return c.support.count && c.out.cls == 1; }
inline bool dense_norm(const anymax_call &c) { return dense_backward(c) && c.param >= 1.5 && c.param <= 2.0; }  // below, 1 / (alpha - 1) times what floats leave out

// As anymax_run_segments makes them: rows of several heads where they lie.
inline bool beside_backward(const anymax_call &c) { return unsaved(c) && c.starts && c.inner > 1 && c.p.inner == 1 && c.g.inner == 1 && c.out.inner == 1; }

constexpr uint32_t bit(int i) { return 1u << i; }
template <class... R>
constexpr uint32_t bit(int i, R... rest) {
    return bit(i) | bit(rest...);
}

struct Rule {
    Way way;
    uint32_t ops, links, types;         // one bit each
    int64_t least, most;                // classes
    bool (*also)(const anymax_call &);  // what else must hold; NULL: nothing
};

constexpr int64_t ANY = INT64_MAX;
constexpr uint32_t FORWARDS = bit(ANYMAX_FORWARD), VJPS = bit(ANYMAX_VJP), LOSSES = bit(ANYMAX_LOSS), GRADS = bit(ANYMAX_LOSS_GRAD), TAUS = bit(ANYMAX_THRESHOLD);
constexpr uint32_t F32 = bit(ANYMAX_F32), F64 = bit(ANYMAX_F64), FLOATS = bit(ANYMAX_F32, ANYMAX_BF16, ANYMAX_F16), ALL_TYPES = FLOATS | F64;
constexpr uint32_t POWERS = bit(POWER1, POWER2), CURVES = bit(POWER3, POWER4, CURVE);
constexpr uint32_t SOLVED = POWERS | CURVES | bit(ANY_POWER, STEEP, NORM, CAPPED, LARGEST, NUCLEUS);
constexpr uint32_t WEIGHED = bit(EXPONENTIAL) | POWERS | CURVES | bit(ANY_POWER, CAPPED, LARGEST, NUCLEUS);  // J^T g by weights of p that are finite

static constexpr Rule RULES[] = {
    // rows of one parameter, several at once
    {BATCH, FORWARDS, POWERS | CURVES, FLOATS, TILE_SQUARE + 1, BATCH_MOST, nullptr},
    {BATCH, FORWARDS, bit(NORM), FLOATS, TILE_SQUARE + 1, BATCH_MOST, mild_norm},
    {BATCH, FORWARDS, bit(LARGEST), FLOATS, TILE_SQUARE + 1, BATCH_MOST, some_largest},
    {BATCH, FORWARDS, bit(CAPPED), FLOATS, TILE_SQUARE + 1, BATCH_MOST, small_budget},
    {BATCH_LOSS, LOSSES, POWERS, F32, TILE_SQUARE + 1, BATCH_MOST, plain_scores},
    {BATCH_LOSS, LOSSES, CURVES, F32, TILE_SQUARE + 1, BATCH_MOST, plain_untold},
    {BATCH_LOSS, LOSSES, bit(NORM), F32, TILE_SQUARE + 1, BATCH_MOST, plain_mild},
    {BATCH_LOSS, LOSSES, bit(LARGEST), F32, TILE_SQUARE + 1, BATCH_MOST, plain_few_largest},
    {BATCH_LOSS, GRADS, POWERS, F32, TILE_SQUARE + 1, TILE_MOST, plain_gradient},
    {TILE, FORWARDS, bit(EXPONENTIAL, LARGEST) | POWERS, ALL_TYPES, 1, TILE_SQUARE, unsaved},
    {TILE, FORWARDS, bit(CAPPED), ALL_TYPES, 1, TILE_SQUARE, unsaved_within_n},
    {TILE, FORWARDS, POWERS | CURVES, FLOATS, 1, TILE_MOST, unsaved},
    {TILE, FORWARDS, bit(NORM), FLOATS, 1, TILE_MOST, unsaved_mild},
    {TILE, FORWARDS, bit(LARGEST), FLOATS, 1, TILE_MOST, many_unsaved},
    {TILE_LOSS, LOSSES | GRADS | TAUS, bit(EXPONENTIAL) | POWERS, ALL_TYPES, 1, TILE_MOST, nullptr},
    {BESIDE_BACKWARD, VJPS, WEIGHED, F32, 1, BESIDE_MOST, beside_backward},
    {DENSE_BACKWARD, VJPS, WEIGHED, F32, 1, DENSE_MOST, dense_backward},
    {DENSE_BACKWARD, VJPS, bit(NORM), F32, 1, DENSE_MOST, dense_norm},
    {SAVED_BACKWARD, VJPS, WEIGHED, F32, 1, ANY, saved_backward},
    {SAVED_GRADIENT, GRADS, ~0u, F32, 1, ANY, saved_gradient},
    // one row at a time, where each may have a parameter of its own
    {SWEEP, FORWARDS, POWERS, ALL_TYPES, 1, SWEEP_MOST, nullptr},
    {SWEEP, FORWARDS, bit(POWER3, POWER4), F64, 1, SWEEP_MOST, nullptr},
    {SWEEP_CROWDED, FORWARDS, POWERS | bit(POWER3, POWER4), ALL_TYPES, 1, ANY, nullptr},
    {COUNT, FORWARDS, bit(LARGEST), FLOATS, TILE_MOST + 1, COUNT_MOST<float>, many_unsaved},
    {COUNT, FORWARDS, bit(LARGEST), F64, TILE_MOST + 1, COUNT_MOST<double>, many_unsaved},
    {WEIGH, FORWARDS | LOSSES | GRADS, bit(NUCLEUS), ALL_TYPES, 1, ANY, untold},
    {CANDIDATES, FORWARDS | LOSSES | GRADS | TAUS, SOLVED, ALL_TYPES, 1, ANY, nullptr},
};

inline Way first_of(int from, const anymax_call &call, Link link) {
    const int64_t n = call.n;
    for (const Rule &rule : RULES) {
        if (!(rule.ops >> call.op & 1) || !(rule.links >> link & 1) || !(rule.types >> call.dtype & 1)) continue;
        if (rule.way < from || n < rule.least || n > rule.most || (!PACKS && (rule.way == BATCH || rule.way == BATCH_LOSS))) continue;
        if (!rule.also || rule.also(call)) return rule.way;
    }
    return ROW;
}

struct Plan {
    Way way;
    Link link;  // of all rows; NO_LINK where each has a parameter of its own
    bool outer;  // the inner rows of each outer one are served as the outer rows of a call of their own: alike, wherever they lie
};

inline Plan plan(const anymax_call &call) {
    const Link link = call.params ? NO_LINK : link_of(call.map, call.param);
    const Way way = first_of(TILE, call, link);
    return Plan{way, link, call.inner > 1 && (way == BATCH_LOSS || way == DENSE_BACKWARD || way == SAVED_BACKWARD || way == SAVED_GRADIENT)};
}

// Into how many vectors of cells a batch of the links POWERS, CURVES and NORM divides a row.
constexpr int64_t ONE_GROUP = 12 * width<float>, TWO_GROUPS = 32 * width<float>;
constexpr int64_t cell_groups(int64_t n) { return n <= ONE_GROUP ? 1 : n <= TWO_GROUPS ? 2 : 4; }

// Up to which length rows from n classes on may be served together, each of a length of its own; 0: they may not.
inline int64_t uneven_from(anymax_call call, int64_t n) {
    call.n = n;
    const Plan way = plan(call);
    if (way.way == DENSE_BACKWARD) return DENSE_MOST;
    if (way.way == BATCH && (bit(way.link) & (POWERS | CURVES | bit(NORM)))) return n <= ONE_GROUP ? ONE_GROUP : n <= TWO_GROUPS ? TWO_GROUPS : BATCH_MOST;
    if (way.way != ROW) return 0;
    for (const Rule &rule : RULES) {  // no longer row may take another way
        const bool here = (rule.ops >> call.op & 1) && (rule.links >> way.link & 1) && (rule.types >> call.dtype & 1) && rule.most >= n;
        if (here && rule.also != saved_backward && rule.also != saved_gradient) return 0;
    }
    return ANY;
}

// All such lengths, in order: where a rule or a number of cells ends, others begin.
inline int uneven(const anymax_call &call, anymax_span *spans) {
    int count = 0;
    for (int64_t n = 1; n < ANY && count < ANYMAX_SPANS;) {
        const int64_t most = uneven_from(call, n);
        if (most) spans[count++] = anymax_span{n, most};
        if (most == ANY) break;
        int64_t next = ANY;
        auto begins = [&](int64_t at) { next = at > n && at > most && at < next ? at : next; };
        begins(ONE_GROUP + 1), begins(TWO_GROUPS + 1);
        for (const Rule &rule : RULES) {
            begins(rule.least);
            if (rule.most < ANY) begins(rule.most + 1);
        }
        n = next;
    }
    return count;
}

// True where the heads of ragged rows are best served where they lie, side by side.
inline bool beside(const anymax_call &call) {
    const Way way = plan(call).way;
    return way == BESIDE_BACKWARD || (way == TILE && call.x.inner == 1 && call.out.inner == 1);
}

// The way of a single row, which may have a parameter of its own.
inline Way row_plan(const anymax_call &call, Link link) { return first_of(SWEEP, call, link); }

// -- what is worth saving ------------------------------------------------------------------------------------------------------------------------

// anymax_saves: beyond a share of the row the support is hardly quicker than all of it, and small calls gain nothing.
inline int64_t worth_saving(int32_t op, int32_t map, double param, int64_t rows, int64_t n) {
    const Link link = link_of(map, param);
    auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
    auto most = [](int64_t a, int64_t b) { return a > b ? a : b; };
    if (op == ANYMAX_LOSS) {
        if (n <= TILE_MOST && (bit(link) & (bit(EXPONENTIAL) | POWERS))) return 0;  // TILE_LOSS is as quick to do again
        return MAPS[map].sparse ? least(n, most(128, n / 32)) : link == EXPONENTIAL ? 1 : 0;
    }
    const bool entmax = map == ANYMAX_ENTMAX;
    if (op != ANYMAX_FORWARD || !MAPS[map].sparse || rows * n < 16384 || (entmax && param < 1.22)) return 0;
    // of 1,000 normal scores entmax 1.25 leaves 230, 4/3 75 and 3/2 18
    const bool wide = entmax && param < 1.45, wider = entmax && param < 1.3;
    if (n < (wider ? 4096 : wide ? 768 : 256)) return 0;
    const int64_t size = wider ? most(n / 24, least(n / 8, 1024)) : most(n / 32, least(n / 8, 256));
    return (map == ANYMAX_TOPK && param * 16 > (double)n) || (map == ANYMAX_BUDGET && param * 2.4 > (double)size) ? 0 : size;
}

}  // namespace ANYMAX_UNIT
