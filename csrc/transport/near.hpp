// Sinkhorn of one matrix whose entries are fixed: what SmallMatrices computes of a matrix in a lane, bit for bit, with the
// lanes along its columns and, for what is summed over them, along its rows.
#pragma once

#include "core/memory.hpp"
#include "transport/lanes.hpp"

namespace ANYMAX_UNIT {

template <class C>
class NearMatrix {
    typedef vec<C> V;
    static constexpr int64_t W = width<C>;
    const int64_t n, m, high, wide;  // high and wide: n and m in whole vectors, with entries of 0
    C *entries, *weighed, *work;     // [high, wide]
    C *across;                       // [high / W, m, W]: entries of W rows, one a lane
    C *rows, *u, *t, *of_rows, *by_row, *columns, *v, *ones, *s, *of_columns, *by_column;
    C *past;  // factors of rows and columns of each iteration, [iterations, high + wide]

    // f(j) for the first place of each vector along a row, or along a column.
    template <class F>
    ANYMAX_INLINE void along(int64_t size, F f) const {
        for (int64_t j = 0; j < size; j += W) f(j);
    }
    // f(j, the sums that `add` makes of 0 and what each of `count` has at j) for each vector of places, 4 vectors at once.
    template <class A, class F>
    ANYMAX_INLINE void sums(int64_t size, int64_t count, A add, F f) const {
        int64_t j = 0;
        for (; j + 4 * W <= size; j += 4 * W) {
            V sum[4] = {};
            for (int64_t i = 0; i < count; i++)
                for (int64_t k = 0; k < 4; k++) sum[k] = add(sum[k], j + k * W, i);
            for (int64_t k = 0; k < 4; k++) f(j + k * W, sum[k]);
        }
        for (; j < size; j += W) {
            V sum = V{};
            for (int64_t i = 0; i < count; i++) sum = add(sum, j, i);
            f(j, sum);
        }
    }
    // Over the rows of an array, over its columns (of what `cross` took), and the same of entries times factors.
    template <class F>
    ANYMAX_INLINE void over_rows(const C *a, F f) const {
        sums(wide, n, [=](V sum, int64_t j, int64_t i) ANYMAX_EACH { return sum + load(a + i * wide + j); }, f);
    }
    template <class F>
    ANYMAX_INLINE void over_columns(F f) const {
        sums(high, m, [=](V sum, int64_t i, int64_t j) ANYMAX_EACH { return sum + load(across + i * m + j * W); }, f);
    }
    template <class F>
    ANYMAX_INLINE void over_rows_times(const C *b, F f) const {
        sums(wide, n, [=](V sum, int64_t j, int64_t i) ANYMAX_EACH { return sum + load(entries + i * wide + j) * b[i]; }, f);
    }
    template <class F>
    ANYMAX_INLINE void over_columns_times(const C *b, F f) const {
        sums(high, m, [=](V sum, int64_t i, int64_t j) ANYMAX_EACH { return sum + load(across + i * m + j * W) * b[j]; }, f);
    }
    void cross(const C *a) {
        for (int64_t i = 0; i < high; i += W) gather_lanes(across + i * m, a + i * wide, W, m, wide);
    }

    void scale_rows(const C *b, C *to) const {
        over_columns_times(b, [=](int64_t i, V sum) ANYMAX_EACH { store(to + i, over(load(rows + i), sum)); });
    }
    void scale_columns(const C *b, C *to) const {
        over_rows_times(b, [=](int64_t j, V sum) ANYMAX_EACH { store(to + j, over(load(columns + j), sum)); });
    }
    // P from the factors of rows.
    void finish(C *out) {
        for (int64_t i = 0; i < n; i++)
            along(wide, [=](int64_t j) ANYMAX_EACH { store(work + i * wide + j, load(entries + i * wide + j) * u[i]); });
        over_rows(work, [=](int64_t j, V sum) ANYMAX_EACH { store(s + j, load(columns + j) / sum); });
        for (int64_t i = 0; i < n; i++)
            along(wide,
                  [=](int64_t j) ANYMAX_EACH { store_within(out + i * m, j, m, load(work + i * wide + j) * load(s + j)); });
    }

    static bool read_sums(const C *from, C *to, int64_t size) {
        bool good = true;
        for (int64_t i = 0; i < size; i++) {
            to[i] = from ? from[i] : C(1);
            good &= (to[i] >= C(1.0 / SUMS_WITHIN)) & (to[i] <= C(SUMS_WITHIN));
        }
        return good;
    }

  public:
    NearMatrix(int64_t n, int64_t m) : n(n), m(m), high((n + W - 1) / W * W), wide((m + W - 1) / W * W) {}

    // Points the arrays into memory; without a base it only says how many bytes they take.
    int64_t lay_out(char *base, int64_t remembered) {
        Arena arena{base, 0};
        arena.take(high * wide, entries, across, work, weighed);
        arena.take(high, rows, u, t, of_rows, by_row);
        arena.take(wide, columns, v, ones, s, of_columns, by_column);
        arena.take(remembered * (high + wide), past);
        return arena.used;
    }

    // The scores and the sums that are asked for (NULL: the default). False where they are beyond the reach.
    bool read(const C *x, C temperature, const C *of_rows, const C *of_columns) {
        for (int64_t j = 0; j < wide; j++) ones[j] = v[j] = columns[j] = C(1);
        for (int64_t i = 0; i < high; i++) rows[i] = C(1);
        if (!(read_sums(of_rows, rows, n) & read_sums(of_columns, columns, m))) return false;
        if (!of_columns) share_out<C>(rows, n, columns, m);
        if (!of_rows && of_columns) share_out<C>(columns, m, rows, n);
        const V slope = all<V>(C(1) / temperature);
        const V none = all<V>(-infinity<C>);
        for (int64_t i = 0; i < high; i++) {
            C *const row = entries + i * wide;
            const C *const from = x + i * m;
            if (i >= n) {
                along(wide, [=](int64_t j) ANYMAX_EACH { store(row + j, V{}); });
                continue;
            }
            V most = none;
            for (int64_t j = 0; j < m; j += W) most = larger(most, load_or(from, j, m, -infinity<C>));
            const V top = all<V>(highest_lane(most));
            ints<C> near = V{} == V{};
            for (int64_t j = 0; j < m; j += W) {
                const V z = (load_or(from, j, m, top[0]) - top) * slope;
                near &= z >= -ENTRY_REACH<C>;  // not so for NaN either
                store(row + j, exp(z));
            }
            if (bits(near) != (uint32_t)((1ull << W) - 1)) return false;
            for (int64_t j = m; j < wide; j++) row[j] = C(0);
        }
        cross(entries);
        return true;
    }

    void forward(int64_t iterations, C *out) {
        for (int64_t k = 1; k < iterations; k++) scale_rows(v, u), scale_columns(u, v);
        scale_rows(v, u);
        finish(out);
    }

    // The same until the rows have their sums within the tolerance. By how much one was wrong before the last iteration.
    double converge(int64_t iterations, C tolerance, C *out) {
        for (int64_t i = 0; i < high; i++) by_row[i] = C(1) / rows[i], u[i] = C(0);
        C most = C(1);
        for (int64_t k = 0; k < iterations && most > tolerance; k++) {
            V wrong{};
            over_columns_times(v, [&](int64_t i, V sum) ANYMAX_EACH {
                const V off = load(u + i) * sum * load(by_row + i) - C(1);
                const V size = larger(off, -off);
                wrong = larger(wrong, i + W <= n ? size : load_part((const C *)&size, n - i, C(0)));
                store(u + i, over(load(rows + i), sum));
            });
            most = highest_lane(wrong);
            scale_columns(u, v);
        }
        finish(out);
        return (double)most;
    }

    void backward(const C *g, int64_t iterations, C temperature, C *out) {
        const int64_t step = high + wide;
        along(wide, [=](int64_t j) ANYMAX_EACH { store(by_column + j, C(1) / load(columns + j)), store(of_columns + j, V{}); });
        along(high, [=](int64_t i) ANYMAX_EACH { store(by_row + i, C(1) / load(rows + i)); });
        const C *b = ones;
        for (int64_t k = 0; k < iterations; k++) {
            C *const a = past + k * step;
            scale_rows(b, a), scale_columns(a, a + high);
            b = a + high;
        }
        const C *a = past + (iterations - 1) * step;
        for (int64_t i = 0; i < high; i++)
            along(wide, [=](int64_t j) ANYMAX_EACH {
                const int64_t e = i * wide + j;
                V w{};
                if (i < n) w = load_or(g + i * m, j, m, C(0)) * (load(entries + e) * a[i] * load(b + j));
                store(weighed + e, w), store(work + e, V{});
            });
        over_rows(weighed, [=](int64_t j, V sum) ANYMAX_EACH { store(of_columns + j, sum); });
        cross(weighed);
        over_columns([=](int64_t i, V sum) ANYMAX_EACH { store(of_rows + i, sum); });
        cross(entries);
        for (int64_t k = iterations - 1; k >= 0; k--) {
            a = past + k * step, b = a + high;
            const C *const before = k ? a - wide : ones;
            along(wide, [=](int64_t j) ANYMAX_EACH {
                store(s + j, load(of_columns + j) * load(b + j) * load(by_column + j)), store(of_columns + j, V{});
            });
            over_columns_times(s, [=](int64_t i, V sum) ANYMAX_EACH {
                const V scale = load(a + i);
                store(t + i, (load(of_rows + i) - scale * sum) * scale * load(by_row + i));
                store(of_rows + i, V{});
            });
            for (int64_t i = 0; i < n; i++)
                along(wide, [=](int64_t j) ANYMAX_EACH {
                    C *const to = work + i * wide + j;
                    store(to, load(to) + (a[i] * load(s + j) + t[i] * load(before + j)));
                    store(of_columns + j, load(of_columns + j) - load(entries + i * wide + j) * t[i]);
                });
            along(wide, [=](int64_t j) ANYMAX_EACH { store(of_columns + j, load(of_columns + j) * load(before + j)); });
        }
        const V slope = all<V>(C(1) / temperature);
        for (int64_t i = 0; i < n; i++)
            along(wide, [=](int64_t j) ANYMAX_EACH {
                const int64_t e = i * wide + j;
                store_within(out + i * m, j, m, (load(weighed + e) - load(entries + e) * load(work + e)) * slope);
            });
    }
};

}  // namespace ANYMAX_UNIT
