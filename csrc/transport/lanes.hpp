// Sinkhorn of many small matrices, one a lane: factors of rows and columns of fixed entries, exp(x / temperature) less the
// largest of their row.
#pragma once

#include "core/packing.hpp"

namespace ANYMAX_UNIT {

// How far below the largest of its row an entry may lie, so that neither factors nor their products leave the range of the
// numbers. Sums that are given lie within 1 / SUMS_WITHIN and SUMS_WITHIN.
template <class C>
constexpr C ENTRY_REACH = C(sizeof(C) == 4 ? 25.0 : 200.0);
constexpr double SUMS_WITHIN = 1e5;

// a / b, in floats of AVX-512 within 2 ulp, by a third of the division's time.
template <class V>
ANYMAX_INLINE V over(V a, V b) {
    return a / b;
}
#if defined(__AVX512F__)
ANYMAX_INLINE vf over(vf a, vf b) {
    const vf guess = (vf)_mm512_rcp14_ps((__m512)b);
    return a * (guess * (2.0f - b * guess));
}
#endif

// Equal shares of a total.
template <class C, class T>
ANYMAX_INLINE void share_out(const T *from, int64_t count, T *to, int64_t size) {
    T total = from[0];
    for (int64_t i = 1; i < count; i++) total += from[i];
    for (int64_t i = 0; i < size; i++) to[i] = total / C(size);
}

// Matrices [n, m]; SIDE: n and m where they are known to the compiler and equal, else 0. All arrays hold a vector for each
// entry.
template <class C, int SIDE>
class SmallMatrices {
    typedef vec<C> V;
    const int64_t given_n, given_m;
    V *const entries, *const work, *const weighed;
    V rows[SMALL_LONGEST], columns[SMALL_LONGEST];  // the sums that are asked for

    ANYMAX_INLINE int64_t n() const { return SIDE ? SIDE : given_n; }
    ANYMAX_INLINE int64_t m() const { return SIDE ? SIDE : given_m; }

    // Factors u of rows from those of columns, and the other way round.
    ANYMAX_INLINE void scale_rows(const V *v, V *u) const {
        for (int64_t i = 0; i < n(); i++) {
            V sum = rounded(entries[i * m()] * v[0]);
            for (int64_t j = 1; j < m(); j++) sum += entries[i * m() + j] * v[j];
            u[i] = over(rows[i], sum);
        }
    }
    ANYMAX_INLINE void scale_columns(const V *u, V *v) const {
        for (int64_t j = 0; j < m(); j++) {
            V sum = rounded(entries[j] * u[0]);
            for (int64_t i = 1; i < n(); i++) sum += entries[i * m() + j] * u[i];
            v[j] = over(columns[j], sum);
        }
    }

    // P from factors of rows.
    ANYMAX_INLINE void finish(const V *u) {
        for (int64_t j = 0; j < m(); j++) {
            V sum = V{};
            for (int64_t i = 0; i < n(); i++) sum += work[i * m() + j] = entries[i * m() + j] * u[i];
            const V factor = columns[j] / sum;
            for (int64_t i = 0; i < n(); i++) work[i * m() + j] *= factor;
        }
    }

  public:
    static int64_t room(int64_t n, int64_t m) { return 3 * n * m * width<C>; }  // numbers that it works in
    SmallMatrices(int64_t n, int64_t m, C *room)
        : given_n(n), given_m(m), entries((V *)room), work(entries + n * m), weighed(work + n * m) {}

    // The scores of `count` matrices; which of them are beyond the reach, as bits.
    ANYMAX_INLINE uint32_t read(const C *x, int64_t count, C temperature) {
        const int64_t size = n() * m();
        gather_lanes((C *)entries, x, count, size, size);
        const V slope = all<V>(C(1) / temperature);
        ints<C> near = V{} == V{};
        for (int64_t i = 0; i < n(); i++) {
            V *row = entries + i * m(), high = row[0];
            for (int64_t j = 1; j < m(); j++) high = larger(high, row[j]);
            for (int64_t j = 0; j < m(); j++) {
                const V z = (row[j] - high) * slope;
                near &= z >= -ENTRY_REACH<C>;  // not so for NaN either
                row[j] = exp(z);
            }
        }
        return ~bits(near) & (uint32_t)((1ull << count) - 1);
    }
    // The sums: those of matrix l at rows + l * step. Which matrices have some that are out of range, as bits.
    ANYMAX_INLINE uint32_t read_sums(const C *of_rows, int64_t rows_step, const C *of_columns, int64_t columns_step,
                                     int64_t count) {
        const ints<C> good =
            read_sums(of_rows, rows_step, rows, n(), count) & read_sums(of_columns, columns_step, columns, m(), count);
        if (!of_columns) share_out<C>(rows, n(), columns, m());
        if (!of_rows && of_columns) share_out<C>(columns, m(), rows, n());
        return ~bits(good) & (uint32_t)((1ull << count) - 1);
    }
    ANYMAX_INLINE ints<C> read_sums(const C *from, int64_t step, V *to, int64_t size, int64_t count) {
        ints<C> good = V{} == V{};
        for (int64_t i = 0; i < size; i++) to[i] = all<V>(C(1));
        if (!from) return good;
        gather_lanes((C *)to, from, count, size, step);
        for (int64_t i = 0; i < size; i++) good &= (to[i] >= C(1.0 / SUMS_WITHIN)) & (to[i] <= C(SUMS_WITHIN));
        return good;
    }

    ANYMAX_INLINE void forward(int64_t iterations) {
        V u[SMALL_LONGEST], v[SMALL_LONGEST];
        for (int64_t j = 0; j < m(); j++) v[j] = all<V>(C(1));
        for (int64_t k = 1; k < iterations; k++) scale_rows(v, u), scale_columns(u, v);
        scale_rows(v, u);
        finish(u);
    }

    // The same until the rows of every matrix have their sums within the tolerance; `left` is what they lack. A matrix that is
    // done does not change any more, so it does not depend on the others.
    ANYMAX_INLINE void converge(int64_t iterations, C tolerance, double *left, int64_t count) {
        V u[SMALL_LONGEST], v[SMALL_LONGEST], by_row[SMALL_LONGEST], most = all<V>(C(1));
        for (int64_t j = 0; j < m(); j++) v[j] = all<V>(C(1));
        for (int64_t i = 0; i < n(); i++) by_row[i] = C(1) / rows[i], u[i] = V{};
        for (int64_t k = 0; k < iterations && bits(most > tolerance); k++) {
            const ints<C> going = most > tolerance;
            V wrong{};
            for (int64_t i = 0; i < n(); i++) {
                V sum = rounded(entries[i * m()] * v[0]);
                for (int64_t j = 1; j < m(); j++) sum += entries[i * m() + j] * v[j];
                const V off = u[i] * sum * by_row[i] - C(1);
                wrong = larger(wrong, larger(off, -off));
                u[i] = going ? over(rows[i], sum) : u[i];
            }
            most = going ? wrong : most;
            scale_columns(u, v);
        }
        finish(u);
        for (int64_t l = 0; l < count; l++) left[l] = (double)most[l];
    }

    // The gradient of the scores from that of P. The factors of all iterations go to `past`, [iterations, n + m]; then the
    // iterations backwards: s and t are what a column's and a row's factor pass on, and `work` gathers the part of each entry.
    ANYMAX_INLINE void backward(const C *g, int64_t count, int64_t iterations, C temperature, V *past) {
        const int64_t size = n() * m(), step = n() + m();
        V ones[SMALL_LONGEST], of_rows[SMALL_LONGEST], of_columns[SMALL_LONGEST], s[SMALL_LONGEST], t[SMALL_LONGEST],
            by_row[SMALL_LONGEST], by_column[SMALL_LONGEST];
        for (int64_t j = 0; j < m(); j++) ones[j] = all<V>(C(1)), by_column[j] = C(1) / columns[j], of_columns[j] = V{};
        for (int64_t i = 0; i < n(); i++) by_row[i] = C(1) / rows[i];
        const V *v = ones;
        for (int64_t k = 0; k < iterations; k++) {
            V *u = past + k * step;
            scale_rows(v, u), scale_columns(u, u + n());
            v = u + n();
        }
        gather_lanes((C *)weighed, g, count, size, size);
        const V *u = past + (iterations - 1) * step;
        for (int64_t i = 0; i < n(); i++) {
            of_rows[i] = V{};
            for (int64_t j = 0; j < m(); j++) {
                V &w = weighed[i * m() + j];
                w *= entries[i * m() + j] * u[i] * v[j];
                of_rows[i] += w, of_columns[j] += w;
                work[i * m() + j] = V{};
            }
        }
        for (int64_t k = iterations - 1; k >= 0; k--) {
            u = past + k * step, v = u + n();
            const V *before = k ? u - m() : ones;
            for (int64_t j = 0; j < m(); j++) s[j] = of_columns[j] * v[j] * by_column[j], of_columns[j] = V{};
            for (int64_t i = 0; i < n(); i++) {
                V sum = V{};
                for (int64_t j = 0; j < m(); j++) sum += entries[i * m() + j] * s[j];
                t[i] = (of_rows[i] - u[i] * sum) * u[i] * by_row[i];
                of_rows[i] = V{};
                for (int64_t j = 0; j < m(); j++) {
                    work[i * m() + j] += u[i] * s[j] + t[i] * before[j];
                    of_columns[j] -= entries[i * m() + j] * t[i];
                }
            }
            for (int64_t j = 0; j < m(); j++) of_columns[j] *= before[j];
        }
        const V slope = all<V>(C(1) / temperature);
        for (int64_t e = 0; e < size; e++) work[e] = (weighed[e] - entries[e] * work[e]) * slope;
    }

    ANYMAX_INLINE void write(C *out, int64_t count) const { scatter_lanes((const C *)work, out, count, n() * m(), n() * m()); }
};

}  // namespace ANYMAX_UNIT
