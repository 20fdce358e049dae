// A long row, summed up. For one node, log F(u - z) and h(u - z) are smooth functions of z: the scores of a cell of the z axis
// act through their moments, that is as K weighted points, the cell's Chebyshev points. A result that is known at these points
// is a polynomial of degree K - 1 on the cell. The cost is O(n) + O(cells K nodes) in place of O(n nodes).
#pragma once

#include "perturb/blocks.hpp"
#include "perturb/chebyshev.hpp"
#include "perturb/row.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

constexpr int64_t CHUNK = 256;  // scores located at once
constexpr int64_t CELLS = 640;  // at most

// How wide a cell is (in s, as below): in doubles it has twice the points.
template <int N, class E>
constexpr double cell_breadth(int64_t n) {
    constexpr bool wide = sizeof(E) == 8;
    if (N == ANYMAX_NORMAL) return wide || n < NARROWER_CELLS_FROM ? 4.0 : n < NARROWEST_CELLS_FROM ? 3.0 : 2.0;
    return N == ANYMAX_LOGISTIC ? (wide ? 1.5 : 1.0) : wide ? 0.5 : 0.32;
}
// How far below the first node a score may be that has a probability.
template <int N>
constexpr double node_depth = N == ANYMAX_NORMAL     ? 8.0
                              : N == ANYMAX_LOGISTIC ? 31.0
                                                     : 0.0;

// The cells are of equal width in s = y (y + 2 bend), y = origin - z: in normal noise narrower where scores are far below, as h
// is steeper there.
template <int N, class E>
struct Cells {
    static constexpr int K = points_a_cell<E>;

    Row<E> row;
    static constexpr double bend = N == ANYMAX_NORMAL ? 4.0 : 0.0;

    double origin, breadth, per;  // per: 1 / breadth
    int64_t cells, points;        // points: of all cells that are not empty, padded to whole vectors
    int64_t *cell_of;             // of the scores that were located last; `cells` for those that are in none
    E *t_of;                      // their places in their cells, in [-1, 1]
    E *value, *value1;            // and the polynomials there
    double *moments, *moments1;   // of each cell: the sums of t^k, and of g t^k
    float *sums, *sums1;  // in floats, their latest terms, each twice: one for the even scores and one for the odd ones,
                          // because a cell that gets score after score waits for its own sums (1.4 times as long)
    int64_t *filled, filled_count;  // the cells that are not empty
    int64_t top_cell;               // of the top score
    E top_t;
    Columns<E> at;  // the points

    E *poly, *poly1;  // the results' polynomials: coefficients of t^k in each cell

    void take(Arena &arena) {
        constexpr int64_t rows = CELLS + 1;
        arena.take(CHUNK, cell_of, t_of, value, value1);
        arena.take(rows * K, moments, moments1, poly, poly1);
        if (K == 8) arena.take(2 * rows * K, sums, sums1);
        arena.take(rows, filled);
        at.take(arena, CELLS * K + BLOCK);
    }
    // s of y.
    template <class V>
    static ANYMAX_INLINE V bent(V y) {
        return N == ANYMAX_NORMAL ? y * (y + 2.0 * bend) : y;
    }
    // The cells, for scores of z <= from.
    void set_cells(double from) {
        origin = from;
        breadth = cell_breadth<N, E>(row.n);
        per = 1.0 / breadth;
        // down to the lowest score, or to where no score has any probability
        const double lowest = origin - (row.low - row.high) * row.inv, far = reach<N, E> + node_depth<N>;
        const double last = bent(lowest < 0.0 ? 0.0 : lowest < far ? lowest : far) * per + 2.0;
        cells = last < (double)CELLS ? (int64_t)last : CELLS;
    }

    // cell_of and t_of for the CHUNK scores from pos on.
    ANYMAX_INLINE void locate(int64_t pos) {
        const double out = (double)cells;
        const int64_t m = row.n - pos < CHUNK ? round_up(row.n - pos, 8) : CHUNK;
        for (int64_t j = 0; j < m; j += width<double>) {
            const vd y = origin - load_z(row, pos + j);
            vd s = bent(y) * per - 0.5;
            s = smaller(s, all<vd>(out));
            if (N == ANYMAX_LAPLACE) s = s < -0.5 ? all<vd>(out) : s;
            const vd shifted = s + WHOLE, c = shifted - WHOLE;
            const vl cell = (vl)shifted - (vl)all<vd>(WHOLE);
            __builtin_memcpy(cell_of + j, &cell, sizeof cell);
            store_narrow(t_of + j, 2.0 * (s - c));
        }
    }

    // The top score of the m that were located last, from pos on, is not among the moments: its part is added separately.
    ANYMAX_INLINE void take_out_top(int64_t pos, int64_t m) {
        if (row.top < pos || row.top >= pos + m) return;
        top_cell = cell_of[row.top - pos];
        top_t = t_of[row.top - pos];
        cell_of[row.top - pos] = cells;
    }
    // The powers of the m scores that were located last, whose g are in `value`.
    template <bool G>
    ANYMAX_INLINE void add_located(int64_t m, int64_t copy) {
        for (int64_t j = 0; j < m; j++) {
            const E t = t_of[j], gv = G ? value[j] : E(0);
            if constexpr (K == 8) {
                const int64_t k = cell_of[j] * 8 + (j & 1) * copy;
                add_powers<G>(sums + k, sums1 + k, t, gv);
            } else {
                const int64_t k = cell_of[j] * 16;
                add_powers<G>(moments + k, moments1 + k, t, gv);
            }
        }
    }
    template <bool G>
    void add_moments() {
        const int64_t rows = cells + 1, copy = rows * 8;
        memset(moments, 0, (size_t)(rows * K) * 8);
        if (G) memset(moments1, 0, (size_t)(rows * K) * 8);
        if (K == 8) {
            memset(sums, 0, (size_t)copy * 8);
            if (G) memset(sums1, 0, (size_t)copy * 8);
        }
        const int64_t flush = 8 * cells > CHUNK ? round_up(8 * cells, CHUNK) : CHUNK;
        int64_t due = flush;
        for (int64_t pos = 0; pos < row.n; pos += CHUNK) {
            const int64_t m = row.n - pos < CHUNK ? row.n - pos : CHUNK;
            locate(pos);
            take_out_top(pos, m);
            if (G)
                for (int64_t j = 0; j < m; j += width<double>) store_narrow(value + j, load_g(row, pos + j));
            add_located<G>(m, copy);
            due -= CHUNK;
            if (K == 8 && (due <= 0 || pos + CHUNK >= row.n)) {
                flush_sums(sums, moments, copy);
                if (G) flush_sums(sums1, moments1, copy);
                due = flush;
            }
        }
    }
    // Which cells have scores. False where so few of them lie in cells that to take them one by one is cheaper.
    bool fill_cells() {
        // the top score's cell is there even where it is empty: p is evaluated in it
        filled_count = 0;
        double in_cells = 0.0;
        for (int64_t c = 0; c < cells; c++) {
            in_cells += moments[c * K];
            if (moments[c * K] > 0.0 || c == top_cell) filled[filled_count++] = c;
        }
        return 4.0 * (double)(filled_count * K) <= 3.0 * in_cells;
    }
    // The points of these cells, with their weights.
    void set_points() {
        points = filled_count * K;
        for (int64_t i = 0; i < filled_count; i++) {
            const int64_t c = filled[i], k = i * K;
            for (int m = 0; m < K; m += width<double>) {
                vd s;
                for (int j = 0; j < width<double>; j++) s[j] = CHEBYSHEV<K>.point[m + j];
                s = (0.5 * s + ((double)c + 0.5)) * breadth;
                if (N == ANYMAX_NORMAL) s = s / (root2(s + bend * bend) + bend);
                put_z(at.zh + k + m, at.zl + k + m, origin - s);
            }
            weights(moments + c * K, at.w + k);
            if (row.g) weights(moments1 + c * K, at.wg + k);
        }
        for (; points % width<E>; points++) {  // whole vectors
            at.zh[points] = E(-DEEPEST);
            at.zl[points] = at.w[points] = at.wg[points] = E(0);
        }
    }
    // Cells for the scores up to z = from. False where scores one by one are cheaper.
    bool summarise(const Row<E> &r, double from) {
        row = r;
        set_cells(from);
        if (row.g)
            add_moments<true>();
        else
            add_moments<false>();
        if (!fill_cells()) return false;
        set_points();
        return true;
    }

    // -- results

    // f(block, the place of its first point) for all points.
    template <class F>
    ANYMAX_INLINE void each(int64_t nodes, Cache<E> &cache, F f) const {
        for (int64_t k = 0; k < points; k += BLOCK) {
            const int64_t m = points - k < BLOCK ? points - k : BLOCK;
            f(Block<E>{at.from(k), m, (double)at.zh[k] + (sizeof(E) == 8 ? 0.0 : (double)at.zl[k]), cache.take(nodes, m)});
        }
    }

    // The polynomials that have these values at the points; 0 for the scores that are in no cell.
    void interpolate(const E *values, E *to) const {
        for (int64_t k = 0; k < K; k++) to[cells * K + k] = E(0);
        for (int64_t i = 0; i < filled_count; i++) interpolate_cell(values + i * K, to + filled[i] * K);
    }
    // Adds the sum of the polynomials over the scores, the top one included.
    double add_total(double sum, const E *powers) const {
        for (int64_t i = 0; i < filled_count; i++)
            for (int k = 0; k < K; k++) sum += (double)powers[filled[i] * K + k] * moments[filled[i] * K + k];
        if (top_cell < cells) sum += (double)horner(powers + top_cell * K, top_t);
        return sum;
    }

    // The polynomials at the scores that were located last.
    ANYMAX_INLINE void evaluate(const E *powers, E *to, int64_t m) const {
        for (int64_t j = 0; j < m; j++) to[j] = horner(powers + cell_of[j] * K, t_of[j]);
    }
};

}  // namespace perturb
}  // namespace ANYMAX_UNIT
