// The maps: one row each. What a call may ask of a map is read here, and here alone a parameter such as alpha becomes a link:
// everything else asks `link_of`. Without vectors, so that the doors can include it; all of it is internal to each file, since
// units are compiled with different flags.
#pragma once

#include <stdint.h>

#include "anymax.h"

enum Family {
    EXPONENTIALS,  // softmax
    THRESHOLDS,    // p is a function of x - tau, 0 below
    TRUNCATIONS,   // softmax over some of the classes
    RATIOS,        // p = u(x) / sum u: the gradient needs the scores beside p; no loss
    CEILINGS,      // entmax under a bound of each class: the gradient needs the scores, too; no loss
    NOISES         // the share of draws of a noise in which a class is the largest: the gradient needs the scores, too
};

struct MapRow {
    int32_t code;
    const char *name;
    Family family;
    double least, most;  // the range of its parameter; least > most: it has none
    int step;            // of which it is a multiple; 0: any number
    bool per_row;        // the parameter may differ from row to row (anymax_call.params)
    bool log;            // has ANYMAX_LOG and ANYMAX_LOG_VJP
    int cost;            // the work of a class, softmax's is 1; of NOISES that of a node
    bool slope = false;  // has ANYMAX_SLOPE, and the slope of its loss
};

static constexpr MapRow MAPS[ANYMAX_MAPS] = {
    // code            name       family         least                  most   step per row log   cost slope
    {ANYMAX_SOFTMAX, "softmax", EXPONENTIALS, 1.0, 0.0, 0, false, true, 1},
    {ANYMAX_SPARSEMAX, "sparsemax", THRESHOLDS, 1.0, 0.0, 0, false, false, 1},
    {ANYMAX_ENTMAX, "entmax", THRESHOLDS, 1e-300, 1e300, 0, true, false, 2, true},  // at alpha = 1 it is softmax, and has a log
    {ANYMAX_BUDGET, "budget", THRESHOLDS, 0.0, 1e300, 0, true, false, 2, true},
    {ANYMAX_NORMMAX, "normmax", THRESHOLDS, 1.0000000000000002, 1e300, 0, true, false, 3, true},
    {ANYMAX_TOPK, "topk", TRUNCATIONS, 1.0, 9e15, 1, true, true, 2},
    {ANYMAX_TOPP, "topp", TRUNCATIONS, 1e-300, 1.0, 0, true, true, 5},
    {ANYMAX_TAYLOR, "taylor", RATIOS, 2.0, 64.0, 2, false, false, 1},
    {ANYMAX_SIGSOFTMAX, "sigsoftmax", RATIOS, 1.0, 0.0, 0, false, true, 2},
    {ANYMAX_PERTURB, "perturb", NOISES, 1e-300, 1e300, 0, true, false, 4},
    {ANYMAX_RELU, "relu", RATIOS, 1.0, 0.0, 0, false, false, 1},
    {ANYMAX_BOUNDED, "bounded", CEILINGS, 1.0, 2.0, 0, true, false, 3, true},
    {ANYMAX_SOFTPICK, "softpick", RATIOS, 0.0, 1e300, 0, false, false, 3},
};

static inline bool needs_scores(int32_t map) {
    return MAPS[map].family == RATIOS || MAPS[map].family == NOISES || MAPS[map].family == CEILINGS;
}
static inline bool has_loss(int32_t map) { return MAPS[map].family != RATIOS && MAPS[map].family != CEILINGS; }
static inline bool is_sparse(int32_t map) {
    return MAPS[map].family == THRESHOLDS || MAPS[map].family == TRUNCATIONS || MAPS[map].family == CEILINGS;
}

// The nodes of perturb max where the caller has no wish.
static inline int64_t nodes_of(int64_t asked, int32_t dtype) {
    return asked ? asked : dtype == ANYMAX_F64 ? ANYMAX_NODES_F64 : ANYMAX_NODES;
}

// The product of two numbers that are not negative; the largest number where it is larger.
static inline int64_t at_most_so_much(int64_t count, int64_t each) {
    return each && count > INT64_MAX / each ? INT64_MAX : count * each;
}

// The work of so many classes, softmax's is 1 each.
static inline int64_t work_of(const anymax_call *call, int64_t classes) {
    return at_most_so_much(classes, MAPS[call->map].cost * (MAPS[call->map].family == NOISES ? call->nodes : 1));
}

static inline bool is_multiple(double number, int64_t step) { return number == (double)((int64_t)number / step * step); }

static inline bool in_range(const MapRow &map, double param) {
    if (map.least > map.most) return true;
    return param >= map.least && param <= map.most && (!map.step || is_multiple(param, map.step));
}

// -- links ------------------------------------------------------------------------------------------

// Each family has an enumeration: a switch over a link's family, and then over its own, names what it must and nothing else,
// and one that forgets a link does not compile. No two links have the same number.
enum ExponentialLink {
    EXPONENTIAL  // softmax; entmax at alpha = 1
};
enum ThresholdLink {
    POWER1 = EXPONENTIAL + 1,  // sparsemax; entmax at alpha = 2
    POWER2,                    // entmax at alpha = 3/2,
    POWER3,                    // 4/3
    POWER4,                    // and 5/4: products alone
    CURVE,                     // entmax of any other alpha from 1.02 to 2
    ANY_POWER,                 // and nearer to 1, or below
    STEEP,                     // entmax above alpha = 2
    NORM,                      // normmax
    CAPPED,                    // budget
    NO_LINK                    // a parameter of a row out of range: a support without a number, NaN
};
enum TruncationLink {
    LARGEST = NO_LINK + 1,  // softmax over the k largest
    NUCLEUS                 // and over the nucleus
};
enum RatioLink {
    TAYLOR = NUCLEUS + 1,
    SIGMOID,  // sigsoftmax
    RELU,     // Ratio.relu
    PICK      // Softpick
};
enum NoiseLink { PERTURBED = PICK + 1 };
enum CeilingLink { BOUNDED = PERTURBED + 1 };

// A link of any family.
struct Link {
    int code;
    Family family;
    constexpr Link(ExponentialLink link) : code(link), family(EXPONENTIALS) {}
    constexpr Link(ThresholdLink link) : code(link), family(THRESHOLDS) {}
    constexpr Link(TruncationLink link) : code(link), family(TRUNCATIONS) {}
    constexpr Link(RatioLink link) : code(link), family(RATIOS) {}
    constexpr Link(NoiseLink link) : code(link), family(NOISES) {}
    constexpr Link(CeilingLink link) : code(link), family(CEILINGS) {}
    constexpr operator int() const { return code; }
    constexpr ThresholdLink threshold() const { return (ThresholdLink)code; }
    constexpr TruncationLink truncation() const { return (TruncationLink)code; }
    constexpr RatioLink ratio() const { return (RatioLink)code; }
    constexpr bool has_zeros() const {
        return family == THRESHOLDS || family == TRUNCATIONS;
    }  // found as a support: non-zeros and their classes
};

struct LinkRow {
    Link link;
    const char *name;
};

static constexpr LinkRow LINKS[] = {
    {EXPONENTIAL, "exponential"},
    {POWER1, "power 1"},
    {POWER2, "power 2"},
    {POWER3, "power 3"},
    {POWER4, "power 4"},
    {CURVE, "curve"},
    {ANY_POWER, "any power"},
    {STEEP, "steep"},
    {NORM, "norm"},
    {CAPPED, "capped"},
    {NO_LINK, "one for each row"},
    {LARGEST, "largest"},
    {NUCLEUS, "nucleus"},
    {TAYLOR, "Taylor"},
    {SIGMOID, "sigmoid"},
    {RELU, "relu"},
    {PICK, "pick"},
    {PERTURBED, "perturbed"},
    {BOUNDED, "bounded"},
};
constexpr bool in_order(int i = 0) { return i > BOUNDED || (LINKS[i].link == i && in_order(i + 1)); }
static_assert(sizeof(LINKS) / sizeof(LinkRow) == BOUNDED + 1 && in_order(),
              "each link has its row, in the order of the enumerations");

static inline Link link_of(int32_t map, double param) {
    const double c = param - 1.0;
    switch (map) {
        case ANYMAX_SOFTMAX: return EXPONENTIAL;
        case ANYMAX_SPARSEMAX: return POWER1;
        case ANYMAX_ENTMAX:
            if (!(param > 0.0) || c - c != 0.0) return NO_LINK;
            if (c == 0.0) return EXPONENTIAL;
            if (c == 1.0) return POWER1;
            if (c == 0.5) return POWER2;
            if (c - 1.0 / 3.0 < 1e-15 && 1.0 / 3.0 - c < 1e-15) return POWER3;
            if (c == 0.25) return POWER4;
            // nearer to alpha = 1 floats lose the digits of u in its distance from 1
            return c > 1.0 ? STEEP : c >= 0.02 ? CURVE : ANY_POWER;
        case ANYMAX_NORMMAX: return c > 0.0 && c - c == 0.0 ? NORM : NO_LINK;
        case ANYMAX_BUDGET: return in_range(MAPS[ANYMAX_BUDGET], param) ? CAPPED : NO_LINK;
        case ANYMAX_TOPK: return in_range(MAPS[ANYMAX_TOPK], param) ? Link(LARGEST) : NO_LINK;
        case ANYMAX_TOPP: return in_range(MAPS[ANYMAX_TOPP], param) ? Link(NUCLEUS) : NO_LINK;
        case ANYMAX_TAYLOR: return TAYLOR;
        case ANYMAX_SIGSOFTMAX: return SIGMOID;
        case ANYMAX_RELU: return RELU;
        case ANYMAX_SOFTPICK: return PICK;
        case ANYMAX_PERTURB: return param > 0.0 && param - param == 0.0 ? Link(PERTURBED) : NO_LINK;
        case ANYMAX_BOUNDED: return BOUNDED;
    }
    return NO_LINK;
}
