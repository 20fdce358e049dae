// The quadrature rule of a row: where it begins and ends, its nodes and weights, and what is known at each node. The rule is
// that of mappings/perturb_max.py: trapezoid points for smooth noises, panels of Gauss points for those with kinks.
#pragma once

#include "core/memory.hpp"
#include "limits.hpp"
#include "perturb/noises.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

constexpr int64_t KINKS = 24;  // the highest scores, whose kinks are edges of panels
constexpr int64_t PANEL = 8;   // Gauss nodes a panel

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// -- the two ends -----------------------------------------------------------------------------------

// Candidates for the ends: where they would be for k = n^(j/32) equal scores, 33 lower ends and then 33 upper ones. They depend
// on n, not on the row's scores, and to find them takes up to five times as long as a row of 10 classes: each thread keeps
// those of its last call.
struct Ends {
    int64_t n;
    int noise;
    double mass;
    double deep, tail;  // log G <= -deep below the lower end, >= -tail above the upper one
    double at[66];
};

// The mass of G outside the ends.
template <class C>
constexpr double mass_outside(int64_t nodes) {
    return sizeof(C) == 8 && nodes >= NODES_FINE ? 1e-13 : 1e-9;
}

inline const Ends &ends_for(int noise, int64_t n, double mass) {
    static thread_local Ends kept{-1, 0, 0.0, 0.0, 0.0, {}};
    if (kept.n == n && kept.noise == noise && kept.mass == mass) return kept;
    kept.n = n, kept.noise = noise, kept.mass = mass;
    kept.deep = -::log(mass), kept.tail = -::log1p(-mass);
    for (int j = 0; j < 33; j++) {
        const double k = ::pow((double)n, j / 32.0);
        kept.at[j] = level(noise, kept.deep / k), kept.at[33 + j] = level(noise, kept.tail / k);
    }
    return kept;
}

// Two binary searches at once. log_g(u, v, lu, lv) sets lu and lv to log G(u) and log G(v); log_g_low becomes log G(low), or 0
// where the search did not evaluate it.
template <class F>
ANYMAX_INLINE void find_ends(const Ends &table, double &low, double &high, double &log_g_low, F log_g) {
    int a = 0, b = 65;
    log_g_low = 0.0;
    for (int step = 16; step; step /= 2) {
        double la, lb;
        log_g(table.at[a + step], table.at[b - step], la, lb);
        if (la + table.deep <= 0.0) {
            a += step;
            log_g_low = la;
        }
        if (lb + table.tail >= 0.0) b -= step;
    }
    low = table.at[a];
    high = table.at[b];
}

// -- the rule ---------------------------------------------------------------------------------------

constexpr double GAUSS[PANEL] = {-0.9602898564975362, -0.7966664774136267, -0.525532409916329, -0.18343464249564978,
                                 0.18343464249564978, 0.525532409916329,   0.7966664774136267, 0.9602898564975362};
constexpr double GAUSS_WEIGHT[PANEL] = {0.10122853629037706, 0.22238103445337443, 0.3137066458778869,  0.36268378337836166,
                                        0.36268378337836166, 0.3137066458778869,  0.22238103445337443, 0.10122853629037706};
// The integral from -1 to t of each node's Lagrange polynomial, divided by the node's weight, as a polynomial: GAUSS_PART[k]
// are the coefficients of t^k.
constexpr double GAUSS_PART[PANEL + 1][PANEL] = {
    {1.0024143862437296, 0.9950230144390204, 1.012282805557396, 0.9359682237671803, 0.06403177623282374, -0.012282805557396248,
     0.0049769855609799185, -0.002414386243731914},
    {-0.17656317564076235, 0.31106839282925597, -0.5588505827456023, 1.7205419467537033, 1.7205419467536838,
     -0.5588505827455995, 0.31106839282924, -0.17656317564075907},
    {0.09193222986064332, -0.19523125526701735, 0.5316994463144137, -4.689795567907782, 4.689795567907766, -0.5316994463144226,
     0.1952312552670194, -0.09193222986064675},
    {2.0549355515872265, -3.569447239770723, 6.031717102591245, -3.602119944322314, -3.6021199443222724, 6.031717102591219,
     -3.5694472397706978, 2.054935551587221},
    {-1.604933815828927, 3.360359078392702, -8.608009214243602, 14.72780670808013, -14.727806708080124, 8.608009214243607,
     -3.3603590783926993, 1.604933815828933},
    {-5.654860606833839, 8.943888396205493, -9.026805279781929, 3.902162105794946, 3.902162105794936, -9.026805279781929,
     8.943888396205491, -5.654860606833845},
    {4.90725150030811, -9.355534017658355, 14.31374657625634, -17.727304453444386, 17.727304453444386, -14.313746576256342,
     9.355534017658348, -4.907251500308114},
    {4.276488230887375, -5.185509549264025, 4.053938759936289, -1.5205841082263374, -1.5205841082263483, 4.0539387599363,
     -5.185509549264033, 4.276488230887381},
    {-3.8966643005835566, 5.695383180093652, -6.749719613884545, 7.2533250895048536, -7.2533250895048536, 6.749719613884545,
     -5.695383180093648, 3.896664300583557},
};

// Any rule of at most 2 * nodes nodes, whose panels may be cut at KINKS places, has at most so many nodes, and so many edges of
// panels. Arrays are read and written by whole vectors.
constexpr int64_t most_nodes(int64_t nodes) { return round_up((2 * nodes + KINKS) * PANEL, 16) + 16; }
constexpr int64_t most_edges(int64_t nodes) { return round_up(2 * nodes + 2 * KINKS + 2, 16); }

struct Nodes {
    int64_t count, first;      // before `first` the sums are not needed
    double *u, *w;             // places and weights
    double *top_log, *top_h;   // log F and h of the top score
    double *rest_log;          // sums over all other scores: of log F,
    double *rest_h, *rest_hg;  // of h and, for a gradient g, of h g
    double *c0, *c1;           // the result is the sum over the nodes of c0 h, and of c1 h
    double *edges;             // of the panels: panel i lies between edges[i] and edges[i + 1]

    void take(Arena &arena, int64_t nodes) {
        arena.take(most_nodes(nodes), u, w, top_log, top_h, rest_log, rest_h, rest_hg, c0, c1);
        arena.take(most_edges(nodes), edges);
    }
    // After the last node zeros, for whole vectors.
    void finish() {
        first = 0;
        double *const arrays[] = {u, w, top_log, top_h, rest_log, rest_h, rest_hg, c0, c1};
        for (double *array : arrays)
            for (int64_t q = count; q < count + 16; q++) array[q] = 0.0;
    }
};

inline void trapezoid(Nodes &at, double low, double high, int64_t count) {
    at.count = count;
    for (int64_t k = 0; k < count; k++) {
        const double s = (double)k / (double)(count - 1);
        at.u[k] = low * (1.0 - s) + high * s;
        at.w[k] = (high - low) * ((k == 0 || k == count - 1 ? 0.5 : 1.0) / (double)(count - 1));
    }
    at.finish();
}

// Panels of equal width from low to high, cut once more at each kink (the highest scores, descending). Panels of width 0 are
// left out.
inline void panels(Nodes &at, double low, double high, int64_t cuts, const double *kinks, int64_t count) {
    int64_t k = 0, j = count, panel = 0;
    double left = low, right;
    at.count = 0;
    for (;;) {  // merges two sorted lists: the grid k = 0..cuts and the kinks, backwards
        const double s = (double)k / (double)cuts;
        const double grid = k <= cuts ? low * (1.0 - s) + high * s : inf64;
        const double kink = j == 0 ? inf64 : kinks[j - 1] < low ? low : kinks[j - 1] > high ? high : kinks[j - 1];
        if (k > cuts && j == 0) break;
        right = grid <= kink ? grid : kink;
        grid <= kink ? k++ : j--;
        if (right > left) {
            const double half = 0.5 * (right - left);
            for (int i = 0; i < PANEL; i++) {
                at.u[at.count] = left + half * (1.0 + GAUSS[i]);
                at.w[at.count++] = half * GAUSS_WEIGHT[i];
            }
            at.edges[panel++] = left;
            at.edges[panel] = right;
            left = right;
        }
    }
    at.finish();
}

// -- E max(z + eps) - E eps = INT F(u) - G(u) du, F that of the top score ---------------------------

constexpr double NOTHING = -50.0;  // log(G / F) where G is nothing beside F

// Below the lower end G / F is nothing: no sums are needed there. log_ratio: log(G / F) at the lower end.
inline void skip_low_nodes(Nodes &at, double low, double log_ratio, bool wide) {
    if (log_ratio > (wide ? -31.0 : -18.0)) return;
    for (; at.first < at.count && at.u[at.first] < low; at.first++) at.rest_log[at.first] = NOTHING;
}

inline double integral_above_top(const Nodes &at) {
    vd out{};
    for (int64_t q = 0; q < at.count; q += width<double>) {
        const vd rest = larger(smaller(load(at.rest_log + q), vd{}), all<vd>(NOTHING));
        const vd e = exp(rest), less = e - 1.0;
        const vd minus_one = e < 1.0 ? less * (rest / log(e)) : rest;  // expm1(rest)
        out -= load(at.w + q) * exp(load(at.top_log + q)) * minus_one;
    }
    return sum(out);
}

}  // namespace perturb
}  // namespace ANYMAX_UNIT
