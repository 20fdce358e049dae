// A long row, summed up. For one node, log F(u - z) and h(u - z) are smooth functions of z: the scores of a cell of the z axis act through their
// moments, that is as K weighted points, the cell's Chebyshev points. A result that is known at these points is a polynomial of degree K - 1 on
// the cell. The cost is O(n) + O(cells K nodes) in place of O(n nodes).
#pragma once

#include "perturb/blocks.hpp"
#include "perturb/row.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

constexpr int64_t CHUNK = 256;       // scores located at once
constexpr int64_t CELLS = 640;       // at most

// K Chebyshev points; fit: the Chebyshev coefficients of a function from its values there; power[k][j]: the coefficient of t^j in Chebyshev's k-th
// polynomial.
template <int K>
struct Chebyshev {
    double point[K], fit[K][K], power[K][K];
};
template <int K>
constexpr Chebyshev<K> chebyshev() {
    constexpr double upper8[4] = {0.19509032201612827, 0.55557023301960222, 0.83146961230254524, 0.98078528040323045};
    constexpr double upper16[8] = {0.098017140329560602, 0.29028467725446237, 0.47139673682599765, 0.63439328416364550,
                                   0.77301045336273697,  0.88192126434835503, 0.95694033573220887, 0.99518472667219689};
    Chebyshev<K> c{};
    for (int m = 0; m < K / 2; m++) {
        const double x = K == 8 ? upper8[m] : upper16[m];
        c.point[K / 2 + m] = x;
        c.point[K / 2 - 1 - m] = -x;
    }
    for (int m = 0; m < K; m++) {
        double a = 1.0, b = c.point[m];
        for (int k = 0; k < K; k++) {
            c.fit[k][m] = a * (k ? 2.0 : 1.0) / K;
            const double next = 2.0 * c.point[m] * b - a;
            a = b;
            b = next;
        }
    }
    c.power[0][0] = 1.0;
    c.power[1][1] = 1.0;
    for (int k = 2; k < K; k++)
        for (int j = 0; j < K; j++) c.power[k][j] = (j ? 2.0 * c.power[k - 1][j - 1] : 0.0) - c.power[k - 2][j];
    return c;
}

template <int K>
constexpr Chebyshev<K> CHEBYSHEV = chebyshev<K>();
template <class E>
constexpr int points_a_cell = sizeof(E) == 8 ? 16 : 8;

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef double d4 __attribute__((vector_size(32)));

// to[k] += t^k, weighted[k] += g t^k: k < 8 in floats, k < 16 in doubles.
template <bool G>
ANYMAX_INLINE void add_powers(float *to, float *weighted, float t, float g) {
    constexpr i8 odd = {0, -1, 0, -1, 0, -1, 0, -1}, second = {0, 0, -1, -1, 0, 0, -1, -1}, upper = {0, 0, 0, 0, -1, -1, -1, -1};
    const f8 one = {1, 1, 1, 1, 1, 1, 1, 1};
    const float t2 = t * t, t4 = t2 * t2;
    f8 p = odd ? t - f8{} : one;
    p = p * (second ? t2 - f8{} : one);
    p = p * (upper ? t4 - f8{} : one);
    f8 a;
    __builtin_memcpy(&a, to, sizeof a);
    a += p;
    __builtin_memcpy(to, &a, sizeof a);
    if (G) {
        __builtin_memcpy(&a, weighted, sizeof a);
        a += p * g;
        __builtin_memcpy(weighted, &a, sizeof a);
    }
}
template <bool G>
ANYMAX_INLINE void add_powers(double *to, double *weighted, double t, double g) {
    const double t2 = t * t, t4 = t2 * t2, t8 = t4 * t4;
    d4 p[4];
    p[0] = d4{1.0, t, t2, t2 * t};
    p[1] = p[0] * t4;
    p[2] = p[0] * t8;
    p[3] = p[1] * t8;
    for (int i = 0; i < 4; i++) {
        d4 a;
        __builtin_memcpy(&a, to + 4 * i, sizeof a);
        a += p[i];
        __builtin_memcpy(to + 4 * i, &a, sizeof a);
        if (G) {
            __builtin_memcpy(&a, weighted + 4 * i, sizeof a);
            a += p[i] * g;
            __builtin_memcpy(weighted + 4 * i, &a, sizeof a);
        }
    }
}

// Adds the two copies of the floats' sums to the moments, and begins them again.
inline void flush_sums(float *from, double *to, int64_t copy) {
    for (int64_t k = 0; k < copy; k += width<float>) {
        const vf a = load(from + k);
        const vf b = load(from + k + copy);
        constexpr int64_t half = width<double>;
        store(to + k, load(to + k) + (low(a) + low(b)));
        store(to + k + half, load(to + k + half) + (high(a) + high(b)));
        store(from + k, vf{});
        store(from + k + copy, vf{});
    }
}

// The weights of a cell's points, from its moments.
template <class E>
__attribute__((noinline)) void weights(const double *moment, E *to) {
    constexpr int K = points_a_cell<E>;
    double c[K], out[K] = {};
    for (int k = 0; k < K; k++) {
        double a = 0.0;
        for (int j = 0; j <= k; j++) a += CHEBYSHEV<K>.power[k][j] * moment[j];
        c[k] = a;
    }
    for (int k = 0; k < K; k++)
        for (int m = 0; m < K; m++) out[m] += CHEBYSHEV<K>.fit[k][m] * c[k];
    for (int m = 0; m < K; m++) to[m] = (E)out[m];
}
// The powers of the polynomial that has these values at a cell's points.
template <class E>
__attribute__((noinline)) void interpolate_cell(const E *values, E *to) {
    constexpr int K = points_a_cell<E>;
    double out[K] = {};
    for (int k = 0; k < K; k++) {
        double a = 0.0;
        for (int m = 0; m < K; m++) a += CHEBYSHEV<K>.fit[k][m] * (double)values[m];
        for (int j = 0; j <= k; j++) out[j] += CHEBYSHEV<K>.power[k][j] * a;
    }
    for (int m = 0; m < K; m++) to[m] = (E)out[m];
}

template <class E>
ANYMAX_INLINE E horner(const E *c, E t) {
    constexpr int K = points_a_cell<E>;
    E y = c[K - 1];
    for (int k = K - 2; k >= 0; k--) y = y * t + c[k];
    return y;
}

// The cells are of equal width in s = y (y + 2 bend), y = origin - z: in normal noise narrower where scores are far below, as h is steeper there.
template <int N, class E>
struct Cells {
    static constexpr int K = points_a_cell<E>;

    Row<E> row;
    double origin, bend, breadth, per;  // per: 1 / breadth
    int64_t cells, points;              // points: of all cells that are not empty, padded to whole vectors
    int64_t *cell_of;                   // of the scores that were located last; `cells` for those that are in none
    E *t_of;                            // their places in their cells, in [-1, 1]
    E *value, *value1;                  // and the polynomials there
    double *moments, *moments1;         // of each cell: the sums of t^k, and of g t^k
    float *sums, *sums1;                // in floats, their latest terms, each twice: one for the even scores and one for the odd ones, because a cell that
                                        // gets score after score waits for its own sums (1.4 times as long)
    int64_t *filled, filled_count;      // the cells that are not empty
    int64_t top_cell;                   // of the top score
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
    // The cells, for scores of z <= from.
    void set_cells(double from) {
        origin = from;
        if (N == ANYMAX_NORMAL) {
            bend = 4.0;
            breadth = sizeof(E) == 8 ? 4.0 : row.n < NARROWER_CELLS_FROM ? 4.0 : row.n < NARROWEST_CELLS_FROM ? 3.0 : 2.0;
        } else {
            bend = 0.0;
            breadth = N == ANYMAX_LOGISTIC ? (sizeof(E) == 8 ? 1.5 : 1.0) : (sizeof(E) == 8 ? 0.5 : 0.32);
        }
        per = 1.0 / breadth;
        // down to the lowest score, or to where no score has any probability
        double y = origin - (row.low - row.high) * row.inv;
        const double far = reach<N, E> + (N == ANYMAX_NORMAL ? 8.0 : N == ANYMAX_LOGISTIC ? 31.0 : 0.0);
        y = y < 0.0 ? 0.0 : y < far ? y : far;
        const double last = (N == ANYMAX_NORMAL ? y * (y + 2.0 * bend) : y) * per + 2.0;
        cells = last < (double)CELLS ? (int64_t)last : CELLS;
    }

    // cell_of and t_of for the CHUNK scores from pos on.
    ANYMAX_INLINE void locate(int64_t pos) {
        constexpr double MAGIC = 6755399441055744.0;  // 1.5 * 2^52
        const double out = (double)cells;
        const int64_t m = row.n - pos < CHUNK ? round_up(row.n - pos, 8) : CHUNK;
        for (int64_t j = 0; j < m; j += width<double>) {
            const vd y = origin - load_z(row, pos + j);
            vd s = (N == ANYMAX_NORMAL ? y * (y + 2.0 * bend) : y) * per - 0.5;
            s = smaller(s, all<vd>(out));
            if (N == ANYMAX_LAPLACE) s = s < -0.5 ? all<vd>(out) : s;
            const vd shifted = s + MAGIC, c = shifted - MAGIC;
            const vl cell = (vl)shifted - (vl)all<vd>(MAGIC);
            __builtin_memcpy(cell_of + j, &cell, sizeof cell);
            store_narrow(t_of + j, 2.0 * (s - c));
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
            if (row.top >= pos && row.top < pos + m) {  // it is not among the moments: its part is added separately
                top_cell = cell_of[row.top - pos];
                top_t = t_of[row.top - pos];
                cell_of[row.top - pos] = cells;
            }
            if (G)
                for (int64_t j = 0; j < m; j += width<double>) store_narrow(value + j, load_g(row, pos + j));
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
            due -= CHUNK;
            if (K == 8 && (due <= 0 || pos + CHUNK >= row.n)) {
                flush_sums(sums, moments, copy);
                if (G) flush_sums(sums1, moments1, copy);
                due = flush;
            }
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
        // the top score's cell is there even where it is empty: p is evaluated in it
        filled_count = 0;
        double in_cells = 0.0;
        for (int64_t c = 0; c < cells; c++) {
            in_cells += moments[c * K];
            if (moments[c * K] > 0.0 || c == top_cell) filled[filled_count++] = c;
        }
        if (4.0 * (double)(filled_count * K) > 3.0 * in_cells) return false;
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
            at.zh[points] = E(-FAR);
            at.zl[points] = at.w[points] = at.wg[points] = E(0);
        }
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
