// How the rows of a call are taken: one table of rules, the first that holds. What each rule gains over the next one is in
// csrc/README.md.
#pragma once

#include <stdio.h>

#include "core/vec.hpp"
#include "limits.hpp"
#include "maps.hpp"

namespace ANYMAX_UNIT {

#if defined(__AVX2__) || defined(ANYMAX_BYTES)
constexpr bool PACKS = true;  // lanes can be moved by a mask, without which batches gain nothing
#else
constexpr bool PACKS = false;
#endif

// -- limits in vectors; all others are in limits.hpp ------------------------------------------------

constexpr int64_t BATCH_LARGEST = width<float> > 4 ? BATCH_CANDIDATES_FEW / 2 : 8;  // as many scores of a row at most
constexpr int64_t BATCH_PACKED = PACKS ? BATCH_MOST : 0, LONGEST_PACKED = PACKS ? BATCH_LONGEST : 0,
                  TILE_PACKED = PACKS ? TILE_MOST : 0, TILE_SQUARE_PACKED = PACKS ? TILE_SQUARE : 0;
template <class C>
constexpr int64_t LOG_TILE_MOST =
    (PACKS ? 8 : 4) * width<C>;  // log softmax and its gradient one row a lane; a longer row is as quick along itself
template <class C>
constexpr int64_t COUNT_MOST = 128 * width<C>;  // the k largest among all of a row, by counting
template <class C>
constexpr int64_t BLOCKS_OF_16_FROM = 512 * width<C> + 1;  // a scan's cells are of 16 vectors in place of 4
template <class C>
constexpr int64_t COUNTED_IN_BITS = 32 * width<C>;  // beyond, in lanes
constexpr int64_t SPEAKS_FROM =
    16 * width<float>;  // the beginning of a row tells whether it has too many candidates for a batch
constexpr int64_t FEW_VECTORS_FROM = 24 * width<float> + 1;  // a batch notes which vectors have candidates, where those are few
constexpr int64_t ONE_GROUP = 12 * width<float>,
                  TWO_GROUPS =
                      32 * width<float>;  // of cells, into which a batch of the links POWERS, CURVES and NORM divides a row
constexpr int64_t cell_groups(int64_t n) { return n <= ONE_GROUP ? 1 : n <= TWO_GROUPS ? 2 : 4; }

// -- what a plan is: a grouping and a source; the output is the operation of the call ---------------

enum Grouping {
    TILE,   // as many rows as a vector has lanes, transposed: one row a lane
    BATCH,  // as many rows, each read along itself; what is left of them is solved one row a lane
    ROW     // one row after another, in any layout, each with a parameter of its own if the call has them
};
enum Source {
    DENSE,       // all of the row
    EITHER,      // all of it or its candidates: the row decides
    CANDIDATES,  // what is above a bound is copied out and solved
    SAVED        // the support that an earlier call saved
};
constexpr const char *GROUPING_NAMES[] = {"tile", "batch", "row"};
constexpr const char *SOURCE_NAMES[] = {"all classes", "all classes or candidates", "candidates", "saved support"};

// -- traits of a call, one bit each, which a rule needs or refuses ----------------------------------

enum Trait : uint32_t {
    SUPPORT = 1 << 0,       // there is a support, to be read or saved
    TAU = 1 << 1,           // a loss whose threshold is wanted, too
    SPACED = 1 << 2,        // classes that do not lie one after another in p, g or the result
    HEADS = 1 << 3,         // as anymax_run_segments makes them: rows of several heads where they lie
    MILD = 1 << 4,          // normmax: beyond, the exponent alpha / (alpha - 1) is near to 1
    MIDDLING = 1 << 5,      // normmax: below, 1 / (alpha - 1) times what floats leave out; above, a root
    CURVED = 1 << 11,       // bounded: a link other than the exponential, in floats
    LEAVES_MANY = 1 << 12,  // entmax below 3/2
    // budgets and k beside n
    WITHIN = 1 << 6,
    SMALL_BUDGET = 1 << 7,
    FEW_LARGEST = 1 << 8,
    MANY_LARGEST = 1 << 9,
    COUNTED = 1 << 10,  // a normal distribution of the scores leads to the k largest at once
};
constexpr uint32_t BY_LENGTH = WITHIN | SMALL_BUDGET | FEW_LARGEST | MANY_LARGEST | COUNTED;

inline uint32_t traits_of(const anymax_call &c) {
    const double k = c.param, n = (double)c.n;
    const auto is = [](bool holds, Trait trait) -> uint32_t { return holds ? trait : 0; };
    const bool spaced = c.out.cls != 1 || c.g.cls != 1 || (c.p.cls != 1 && !c.support.count);
    return is(c.support.count, SUPPORT) | is(c.op == ANYMAX_LOSS && c.tau, TAU) | is(spaced, SPACED) |
           is(c.starts && c.inner > 1 && c.p.inner == 1 && c.g.inner == 1 && c.out.inner == 1, HEADS) | is(k < 51.0, MILD) |
           is(k >= 1.5 && k <= 2.0, MIDDLING) | is(k >= 1.02 && k <= 2.0, CURVED) | is(k < 1.5, LEAVES_MANY) |
           is(k <= n, WITHIN) | is(k > 0.0 && k * 2.0 <= n && ::ceil(k) <= (double)(8 * width<float>), SMALL_BUDGET) |
           is(k >= 1.0 && k <= (double)BATCH_LARGEST && k * 2.0 <= n, FEW_LARGEST) | is(k < n && k * 8.0 >= n, MANY_LARGEST) |
           is(k >= 1.0 && k < n && k * 14.0 >= n, COUNTED);
}

// -- the rules --------------------------------------------------------------------------------------

constexpr uint32_t bit(int i) { return 1u << i; }
template <class... R>
constexpr uint32_t bit(int i, R... rest) {
    return bit(i) | bit(rest...);
}

struct Rule {
    Grouping grouping;
    Source source;
    uint32_t ops, links, types;  // one bit each
    int64_t least, most;         // classes
    uint32_t needs, refuses;     // traits
};

constexpr int64_t ANY = INT64_MAX;
constexpr uint32_t FORWARDS = bit(ANYMAX_FORWARD), VJPS = bit(ANYMAX_VJP), LOSSES = bit(ANYMAX_LOSS),
                   GRADS = bit(ANYMAX_LOSS_GRAD), TAUS = bit(ANYMAX_THRESHOLD), SLOPES = bit(ANYMAX_SLOPE);
constexpr uint32_t LOGS = bit(ANYMAX_LOG), LOG_VJPS = bit(ANYMAX_LOG_VJP);
constexpr uint32_t F32 = bit(ANYMAX_F32), F64 = bit(ANYMAX_F64), FLOATS = bit(ANYMAX_F32, ANYMAX_BF16, ANYMAX_F16),
                   ALL_TYPES = FLOATS | F64;
constexpr uint32_t POWERS = bit(POWER1, POWER2), CURVES = bit(POWER3, POWER4, CURVE);
constexpr uint32_t SOLVED = POWERS | CURVES | bit(ANY_POWER, STEEP, NORM, CAPPED, LARGEST, NUCLEUS);
constexpr uint32_t WEIGHED =
    bit(EXPONENTIAL) | POWERS | CURVES | bit(ANY_POWER, CAPPED, LARGEST, NUCLEUS);  // J^T g by weights of p that are finite

static constexpr Rule RULES[] = {
    // rows of one parameter, several at once
    {BATCH, CANDIDATES, FORWARDS | LOSSES, POWERS | CURVES, FLOATS, TILE_SQUARE + 1, BATCH_PACKED, 0, 0},
    {BATCH, CANDIDATES, FORWARDS | LOSSES, bit(NORM), FLOATS, TILE_SQUARE + 1, LONGEST_PACKED, MILD, 0},
    {BATCH, DENSE, FORWARDS, bit(LARGEST), FLOATS, TILE_SQUARE + 1, TILE_PACKED, COUNTED, 0},
    {BATCH, CANDIDATES, FORWARDS | LOSSES, bit(LARGEST), FLOATS, TILE_SQUARE + 1, BATCH_PACKED, FEW_LARGEST, 0},
    {BATCH, CANDIDATES, LOSSES, CURVES, FLOATS, 1, TILE_SQUARE_PACKED, 0, 0},
    {BATCH, CANDIDATES, LOSSES, bit(NORM), FLOATS, 1, TILE_SQUARE_PACKED, MILD, 0},
    {BATCH, CANDIDATES, LOSSES, bit(LARGEST), FLOATS, 1, TILE_SQUARE_PACKED, FEW_LARGEST, 0},
    {BATCH, CANDIDATES, FORWARDS, bit(CAPPED), FLOATS, TILE_SQUARE + 1, LONGEST_PACKED, SMALL_BUDGET, 0},
    {BATCH, CANDIDATES, GRADS, POWERS, FLOATS, TILE_SQUARE + 1, TILE_PACKED, 0, SUPPORT},
    {TILE, DENSE, FORWARDS, bit(EXPONENTIAL, LARGEST) | POWERS, ALL_TYPES, 1, TILE_SQUARE, 0, SUPPORT},
    {TILE, DENSE, LOGS | LOG_VJPS, bit(EXPONENTIAL), FLOATS, 1, LOG_TILE_MOST<float>, 0, 0},
    {TILE, DENSE, LOGS | LOG_VJPS, bit(EXPONENTIAL), F64, 1, LOG_TILE_MOST<double>, 0, 0},
    {TILE, DENSE, FORWARDS, bit(CAPPED), ALL_TYPES, 1, TILE_SQUARE, WITHIN, SUPPORT},
    {TILE, DENSE, FORWARDS, POWERS | CURVES, FLOATS, 1, TILE_MOST, 0, SUPPORT},
    {TILE, DENSE, FORWARDS, bit(NORM), FLOATS, 1, TILE_MOST, MILD, SUPPORT},
    {TILE, DENSE, FORWARDS, bit(LARGEST), FLOATS, 1, TILE_MOST, MANY_LARGEST, SUPPORT},
    {TILE, DENSE, FORWARDS, bit(BOUNDED), FLOATS, 1, TILE_MOST, CURVED, SUPPORT},
    {TILE, DENSE, LOSSES | GRADS | TAUS, bit(EXPONENTIAL) | POWERS, ALL_TYPES, 1, TILE_MOST, 0, 0},
    {TILE, DENSE, VJPS, WEIGHED, F32, 1, BESIDE_MOST, HEADS, SUPPORT},
    {BATCH, DENSE, VJPS, WEIGHED, FLOATS, 1, DENSE_MOST, 0, SUPPORT},
    {BATCH, DENSE, VJPS, bit(NORM), FLOATS, 1, DENSE_MOST, MIDDLING, SUPPORT},
    {BATCH, DENSE, VJPS, CURVES | bit(ANY_POWER), F32, 1, WORTH_SEEKING_WIDE - 1, LEAVES_MANY, SUPPORT},
    {BATCH, SAVED, VJPS, WEIGHED, F32, 1, ANY, SUPPORT, SPACED},
    // one row at a time
    {ROW, DENSE, FORWARDS, POWERS, ALL_TYPES, 1, SWEEP_MOST, 0, 0},
    {ROW, DENSE, FORWARDS, bit(POWER3, POWER4), F64, 1, SWEEP_MOST, 0, 0},
    {ROW, EITHER, FORWARDS, POWERS | bit(POWER3, POWER4), ALL_TYPES, 1, ANY, 0, 0},
    {ROW, DENSE, FORWARDS, bit(LARGEST), FLOATS, TILE_MOST + 1, COUNT_MOST<float>, MANY_LARGEST, SUPPORT},
    {ROW, DENSE, FORWARDS, bit(LARGEST), F64, TILE_MOST + 1, COUNT_MOST<double>, MANY_LARGEST, SUPPORT},
    {ROW, EITHER, FORWARDS | LOSSES | GRADS, bit(NUCLEUS), ALL_TYPES, 1, ANY, 0, TAU},
    {ROW, SAVED, VJPS | GRADS | SLOPES, SOLVED, ALL_TYPES, 1, ANY, SUPPORT, 0},
    {ROW, SAVED, VJPS | GRADS | SLOPES, bit(BOUNDED), ALL_TYPES, 1, ANY, SUPPORT, 0},
    {ROW, EITHER, FORWARDS, bit(BOUNDED), ALL_TYPES, 1, ANY, 0, 0},
    {ROW, CANDIDATES, FORWARDS | LOSSES | GRADS | TAUS, SOLVED, ALL_TYPES, 1, ANY, 0, 0},
    {ROW, DENSE, ~0u, ~0u, ALL_TYPES, 1, ANY, 0, 0},
};

static constexpr const Rule *LAST_RULE = RULES + sizeof(RULES) / sizeof(Rule) - 1;  // holds for any call

constexpr const Rule *first_from(const Rule *rule, Grouping grouping) {
    return rule->grouping >= grouping ? rule : first_from(rule + 1, grouping);
}
constexpr bool all_from(const Rule *rule, Grouping grouping) {
    return rule->grouping == grouping && (rule == LAST_RULE || all_from(rule + 1, grouping));
}
static constexpr const Rule *ROW_RULES = first_from(RULES, ROW);
static_assert(all_from(ROW_RULES, ROW), "the rules for one row at a time come after the others");

// Whether the rule holds for some length of row with these traits. Most rules are of another operation or link: one branch for
// all three.
ANYMAX_INLINE bool covers(const Rule &rule, const anymax_call &call, Link link, uint32_t traits) {
    return ((rule.ops >> call.op) & (rule.links >> link) & (rule.types >> call.dtype) & 1) && !(rule.needs & ~traits) &&
           !(rule.refuses & traits);
}

// The first rule of these that holds.
inline const Rule &first_of(const Rule *rule, const anymax_call &call, Link link) {
    const uint32_t traits = traits_of(call);
    while (!covers(*rule, call, link, traits) || call.n < rule->least || call.n > rule->most) rule++;
    return *rule;
}

struct Plan {
    const Rule &rule;
    Link link;   // NO_LINK where each row goes by its parameter: such a call is never run as it is, `rows` makes a call of the
                 // rows of each parameter
    bool outer;  // the call is run once for each outer row: its inner rows are the outer rows of that call, and what a row
                 // becomes does not depend on where it lies
};

// True where the parameter of each row decides on its rule. Noises have one rule, whatever the scale of a row.
inline bool by_parameter(const anymax_call &call) { return call.params && MAPS[call.map].family != NOISES; }

inline Plan plan_of(const anymax_call &call) {
    const Link link = by_parameter(call) ? NO_LINK : link_of(call.map, call.params ? 1.0 : call.param);
    const Rule &rule = first_of(RULES, call, link);
    return Plan{rule, link, call.inner > 1 && rule.grouping == BATCH && call.op == ANYMAX_VJP};
}

// "batch: candidates (power 2, 33 to 2048 classes)"
inline const char *plan_name(const anymax_call &call) {
    static thread_local char text[96];
    const Plan plan = plan_of(call);
    const Rule &rule = plan.rule;
    if (by_parameter(call)) return "each row by the rule of its parameter";
    const char *const way = GROUPING_NAMES[rule.grouping], *const source = SOURCE_NAMES[rule.source],
                      *const link = LINKS[plan.link].name;
    if (rule.most == ANY)
        snprintf(text, sizeof text, "%s: %s (%s)", way, source, link);
    else
        snprintf(text, sizeof text, "%s: %s (%s, %d to %d classes)", way, source, link, (int)rule.least, (int)rule.most);
    return text;
}

// Up to which length rows from n classes on may be served together, each of a length of its own; 0: they may not.
inline int64_t uneven_from(anymax_call call, int64_t n) {
    call.n = n;
    const Plan plan = plan_of(call);
    const Rule &rule = plan.rule;
    if (rule.grouping == BATCH && !(rule.needs & BY_LENGTH) && rule.source != SAVED) {
        if (call.op == ANYMAX_VJP) return rule.most;
        if (call.op == ANYMAX_FORWARD) return n <= ONE_GROUP ? ONE_GROUP : n <= TWO_GROUPS ? TWO_GROUPS : rule.most;
    }
    if (&rule != LAST_RULE || by_parameter(call)) return 0;
    const uint32_t traits = traits_of(call) | BY_LENGTH;
    for (const Rule *other = RULES; other != LAST_RULE; other++)
        if (other->most >= n && covers(*other, call, plan.link, traits)) return 0;  // a longer row may take another way
    return ANY;
}

// All such lengths up to n, in order: where a rule or a number of cells ends, others begin.
inline int uneven(const anymax_call &call, anymax_span *spans) {
    int count = 0;
    for (int64_t n = 1; n <= call.n && count < ANYMAX_SPANS;) {
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
    if (plan_of(call).rule.grouping != TILE) return false;
    return call.op == ANYMAX_VJP || (call.op == ANYMAX_FORWARD && call.x.inner == 1 && call.out.inner == 1);
}

// -- what is worth saving ---------------------------------------------------------------------------

// anymax_saves: beyond a share of the row the support is hardly quicker than all of it, and small calls gain nothing.
inline int64_t worth_saving(int32_t op, int32_t map, double param, int64_t rows, int64_t n) {
    const Link link = link_of(map, param);
    auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
    auto most = [](int64_t a, int64_t b) { return a > b ? a : b; };
    if (op == ANYMAX_LOSS) {
        if (n <= TILE_MOST && (bit(link) & (bit(EXPONENTIAL) | POWERS))) return 0;  // a tile is as quick to do again
        return is_sparse(map) ? least(n, most(128, n / 32)) : link == EXPONENTIAL ? 1 : 0;
    }
    const bool entmax = map == ANYMAX_ENTMAX || map == ANYMAX_BOUNDED;
    if (op != ANYMAX_FORWARD || !is_sparse(map) || rows * n < SAVED_CALL_FROM || (entmax && param < 1.22)) return 0;
    const bool wide = entmax && param < 1.5, wider = entmax && param < 1.3;
    if (n < (wider ? SAVED_FROM_WIDER : wide ? SAVED_FROM_WIDE : SAVED_FROM)) return 0;
    const int64_t size = wider ? most(n / 24, least(n / 8, 1024)) : most(n / 32, least(n / 8, 256));
    return (map == ANYMAX_TOPK && param * 16 > (double)n) || (map == ANYMAX_BUDGET && param * 2.4 > (double)size) ? 0 : size;
}

}  // namespace ANYMAX_UNIT
