// Sums over blocks of scores, for every node, and sums over the nodes, for every score: the inner loops of the quadrature.
#pragma once

#include "perturb/nodes.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

constexpr int64_t BLOCK = 128;  // scores or points at once

// Scores, or points that stand for several of them, as arrays.
template <class E>
struct Columns {
    E *zh, *zl;  // z = zh + zl: in floats zh is a multiple of 2^-8 and zl the remainder, in doubles zl is not used
    E *w, *wg;   // how many scores a point stands for, and the sum of their g; 0 for the top score, whose part is added
                 // separately, and for padding
    E *a0, *a1;  // the results

    void take(Arena &arena, int64_t count) { arena.take(count, zh, zl, w, wg, a0, a1); }
    Columns from(int64_t k) const { return Columns{zh + k, zl + k, w + k, wg + k, a0 + k, a1 + k}; }
};

// A block of them.
template <class E>
struct Block : Columns<E> {
    int64_t m;    // a multiple of the vector
    double high;  // the highest z
    E *cache;     // where h is kept from `collect` for `apply`, [nodes, m], or NULL: computed twice
};

// Memory for h of the first blocks of a row, as many as there is space for.
template <class E>
struct Cache {
    static constexpr int64_t SIZE = (1 << 18) / sizeof(E);
    E *base;
    int64_t used;

    E *take(int64_t nodes, int64_t m) {
        if (nodes == 0 || used + nodes * m > SIZE) return nullptr;
        E *p = base + used;
        used += nodes * m;
        return p;
    }
};

constexpr double GRID = 26388279066624.0;  // 1.5 * 2^44: adding and subtracting it rounds to multiples of 2^-8

ANYMAX_INLINE void put_z(double *zh, double *, vd z) { store(zh, z); }
ANYMAX_INLINE void put_z(float *zh, float *zl, vd z) {
    const vd a = (z + GRID) - GRID;
    store_narrow(zh, a);
    store_narrow(zl, z - a);
}
ANYMAX_INLINE void split(double u, vd &a, vd &b) {
    a = all<vd>(u);
    b = vd{};
}
ANYMAX_INLINE void split(double u, vf &a, vf &b) {
    const double grid = (u + GRID) - GRID;
    a = all<vf>((float)grid);
    b = all<vf>((float)(u - grid));
}

ANYMAX_INLINE double wide_sum(vd v) { return sum(v); }
ANYMAX_INLINE double wide_sum(vf v) { return sum(low(v) + high(v)); }

// Adds the sums over a block at one node: in MODE 0 of log F, in 1 of h too, in 2 of h g too.
template <int N, bool UPPER, int MODE, class E>
ANYMAX_INLINE void collect_node(const Block<E> &block, double u, double &l, double &s, double &t, E *cache) {
    typedef vec<E> V;
    V uh, ul, ls{}, hs{}, gs{};
    split(u, uh, ul);
    for (int64_t j = 0; j < block.m; j += width<E>) {
        V lv, hv;
        law<N, UPPER>(uh - load(block.zh + j), sizeof(E) == 8 ? V{} : ul - load(block.zl + j), lv, hv);
        const V w = load(block.w + j);
        ls += w * lv;
        if (MODE > 0) hs += w * hv;
        if (MODE > 1) gs += load(block.wg + j) * hv;
        if (MODE > 0 && cache) store(cache + j, hv);
    }
    l += wide_sum(ls);
    if (MODE > 0) s += wide_sum(hs) * unit<N>;
    if (MODE > 1) t += wide_sum(gs) * unit<N>;
}

// Adds the sums over a block to those of every node. MODE as above.
template <int N, int MODE, class E>
inline void collect(const Block<E> &block, Nodes &at) {
    for (int64_t q = at.first; q < at.count; q++) {
        const double u = at.u[q];
        E *cache = block.cache ? block.cache + q * block.m : nullptr;
        if (u - block.high > reach<N, E>) {
            if (cache) memset(cache, 0, (size_t)block.m * sizeof(E));
        } else if (u >= block.high) {
            collect_node<N, true, MODE>(block, u, at.rest_log[q], at.rest_h[q], at.rest_hg[q], cache);
        } else {
            collect_node<N, false, MODE>(block, u, at.rest_log[q], at.rest_h[q], at.rest_hg[q], cache);
        }
    }
}

// The sum over a block of log F(u - z).
template <int N, class E>
inline double collect_log(const Block<E> &block, double u) {
    double l = 0.0, none = 0.0;
    if (u - block.high > reach<N, E>) return 0.0;
    if (u >= block.high)
        collect_node<N, true, 0>(block, u, l, none, none, (E *)nullptr);
    else
        collect_node<N, false, 0>(block, u, l, none, none, (E *)nullptr);
    return l;
}

template <int N, bool UPPER, int R, class E>
ANYMAX_INLINE void apply_node(const Block<E> &block, double u, E c0, E c1) {
    typedef vec<E> V;
    V uh, ul;
    split(u, uh, ul);
    for (int64_t j = 0; j < block.m; j += width<E>) {
        V lv, hv;
        law<N, UPPER>(uh - load(block.zh + j), sizeof(E) == 8 ? V{} : ul - load(block.zl + j), lv, hv);
        store(block.a0 + j, load(block.a0 + j) + hv * c0);
        if (R > 1) store(block.a1 + j, load(block.a1 + j) + hv * c1);
    }
}

// The results of a block: a0 = sum over the nodes of c0 h and, where R is 2, a1 = that of c1 h.
template <int N, int R, class E>
inline void apply(const Block<E> &block, const Nodes &at) {
    typedef vec<E> V;
    if (block.cache) {
        for (int64_t j = 0; j < block.m; j += width<E>) {
            V sa{}, sb{};
            for (int64_t q = 0; q < at.count;) {  // the sum of the sums of eight nodes: smaller roundings
                V a{}, b{};
                for (const int64_t end = q + 8 < at.count ? q + 8 : at.count; q < end; q++) {
                    const V h = load(block.cache + q * block.m + j);
                    a += h * (E)(at.c0[q] * unit<N>);
                    if (R > 1) b += h * (E)(at.c1[q] * unit<N>);
                }
                sa += a;
                sb += b;
            }
            store(block.a0 + j, sa);
            if (R > 1) store(block.a1 + j, sb);
        }
        return;
    }
    memset(block.a0, 0, (size_t)block.m * sizeof(E));
    if (R > 1) memset(block.a1, 0, (size_t)block.m * sizeof(E));
    for (int64_t q = 0; q < at.count; q++) {
        const double u = at.u[q];
        if (u - block.high > reach<N, E>) continue;
        const E c0 = (E)(at.c0[q] * unit<N>), c1 = (E)(at.c1[q] * unit<N>);
        if (u >= block.high)
            apply_node<N, true, R>(block, u, c0, c1);
        else
            apply_node<N, false, R>(block, u, c0, c1);
    }
}

}  // namespace perturb
}  // namespace ANYMAX_UNIT
