// The maps: one row each. What a call may ask of a map is read here, and here alone a parameter such as alpha becomes a link: everything else
// asks `link_of`. Without vectors, so that the doors can include it; all of it is internal to each file, since units are compiled with different flags.
#pragma once

#include <stdint.h>

#include "anymax.h"

struct MapRow {
    int32_t code;
    const char *name;
    double least, most;  // the range of its parameter; least > most: it has none
    int step;            // of which it is a multiple; 0: any number
    bool per_row;        // the parameter may differ from row to row (anymax_call.params)
    bool scores;         // its gradient needs the scores beside p
    bool log;            // has ANYMAX_LOG and ANYMAX_LOG_VJP
    bool loss;           // has a loss, and with it a threshold
    bool sparse;         // has zeros, and its non-zeros are all that its gradient needs
};

static constexpr MapRow MAPS[ANYMAX_MAPS] = {
    // code            name          least                  most   step per row scores log    loss   sparse
    {ANYMAX_SOFTMAX, "softmax", 1.0, 0.0, 0, false, false, true, true, false},
    {ANYMAX_SPARSEMAX, "sparsemax", 1.0, 0.0, 0, false, false, false, true, true},
    {ANYMAX_ENTMAX, "entmax", 1e-300, 1e300, 0, true, false, false, true, true},  // at alpha = 1 it is softmax, and has a log
    {ANYMAX_BUDGET, "budget", 1e-300, 1e300, 0, true, false, false, true, true},
    {ANYMAX_NORMMAX, "normmax", 1.0000000000000002, 1e300, 0, true, false, false, true, true},
    {ANYMAX_TOPK, "topk", 1.0, 9e15, 1, true, false, true, true, true},
    {ANYMAX_TOPP, "topp", 1e-300, 1.0, 0, true, false, true, true, true},
    {ANYMAX_TAYLOR, "taylor", 2.0, 64.0, 2, false, true, false, false, false},
    {ANYMAX_SIGSOFTMAX, "sigsoftmax", 1.0, 0.0, 0, false, true, true, false, false},
    {ANYMAX_PERTURB, "perturb", 1e-300, 1e300, 0, false, true, false, true, false},
    {ANYMAX_RELU, "relu", 1.0, 0.0, 0, false, true, false, false, false},
};

static inline bool is_multiple(double number, int64_t step) { return number == (double)((int64_t)number / step * step); }

static inline bool in_range(const MapRow &map, double param) {
    if (map.least > map.most) return true;
    return param >= map.least && param <= map.most && (!map.step || is_multiple(param, map.step));
}

// -- links -----------------------------------------------------------------------------------------------------------------------------------

enum Link {
    EXPONENTIAL,  // softmax; entmax at alpha = 1
    POWER1,       // sparsemax; entmax at alpha = 2
    POWER2,       // entmax at alpha = 3/2,
    POWER3,       // 4/3
    POWER4,       // and 5/4: products alone
    CURVE,        // entmax of any other alpha from 1.02 to 2
    ANY_POWER,    // and nearer to 1, or below
    STEEP,        // entmax above alpha = 2
    NORM,         // normmax
    CAPPED,       // budget
    LARGEST,      // softmax over the k largest
    NUCLEUS,      // and over the nucleus
    TAYLOR,
    SIGMOID,      // sigsoftmax
    PERTURBED,
    RELU,         // Ratio.relu
    NO_LINK       // a parameter of a row out of range: NaN
};

static constexpr const char *LINK_NAMES[] = {"exponential", "power 1", "power 2", "power 3", "power 4", "curve", "any power", "steep", "norm",
                                             "capped", "largest", "nucleus", "taylor", "sigmoid", "perturbed", "relu", "each row its own"};

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
            return c > 1.0 ? STEEP : c >= 0.02 ? CURVE : ANY_POWER;  // nearer to alpha = 1 floats lose the digits of u in its distance from 1
        case ANYMAX_NORMMAX: return c > 0.0 && c - c == 0.0 ? NORM : NO_LINK;
        case ANYMAX_BUDGET: return CAPPED;
        case ANYMAX_TOPK: return in_range(MAPS[ANYMAX_TOPK], param) ? LARGEST : NO_LINK;
        case ANYMAX_TOPP: return NUCLEUS;
        case ANYMAX_TAYLOR: return TAYLOR;
        case ANYMAX_SIGSOFTMAX: return SIGMOID;
        case ANYMAX_RELU: return RELU;
        default: return PERTURBED;
    }
}

// Found as a support: non-zeros and their classes. A row without a link is one without a number.
static inline bool has_zeros(Link link) { return link != EXPONENTIAL && link != TAYLOR && link != SIGMOID && link != RELU && link != PERTURBED; }
