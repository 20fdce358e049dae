// Sinkhorn of one matrix of any size and any scores. Entries exp(z + f + g) are computed for potentials f of rows and g of
// columns, and then scaled by factors of rows and columns; where a factor leaves its range, it goes to the potentials and the
// entries are computed again.
#pragma once

#include "core/memory.hpp"
#include "core/vec.hpp"
#include "core/packing.hpp"

namespace ANYMAX_UNIT {

template <class C>
constexpr C FACTOR_REACH = C(sizeof(C) == 4 ? 1e9 : 1e90);

template <class C>
class OneMatrix {
    typedef vec<C> V;
    static constexpr int64_t W = width<C>;
    const int64_t n, m, wide;  // wide: m in whole vectors, filled with entries of 0
    C *z, *entries, *part, *rows, *columns, *f, *g, *u, *v, *sums, *s, *before, *of_rows, *of_columns;
    C *past;               // of each iteration f + log u [n] and g + log v [wide], and u and v themselves
    int64_t epochs = 0;    // how often entries were computed
    C most = infinity<C>;  // the largest change of a factor of rows, by which its sum was wrong before

    ANYMAX_INLINE C *history(int64_t k) const { return past + k * 2 * (n + wide); }

    static C logarithm(C a) { return sizeof(C) == 4 ? (C)logf((float)a) : (C)::log((double)a); }

    // exp(z + f + g) of a row, and its sum. z, f and g are such that it does not overflow.
    ANYMAX_INLINE V exponentials(int64_t i, C level, const C *other, C *to) const {
        V sum{};
        for (int64_t j = 0; j < wide; j += W) {
            const V e = exp(load(z + i * wide + j) + (load(other + j) + level));
            store(to + j, e);
            sum += e;
        }
        return sum;
    }
    // The factors go to the potentials.
    void absorb() {
        for (int64_t i = 0; i < n; i++)
            if (u[i] != C(1)) f[i] = rows[i] > C(0) ? f[i] + logarithm(u[i]) : C(0), u[i] = C(1);
        for (int64_t j = 0; j < m; j++)
            if (v[j] != C(1)) g[j] = columns[j] > C(0) ? g[j] + logarithm(v[j]) : C(0), v[j] = C(1);
        epochs++;
    }
    // The potentials of rows in the log domain, and the entries for them.
    void rows_by_logs() {
        absorb();
        for (int64_t i = 0; i < n; i++) {
            V high = all<V>(-infinity<C>);
            for (int64_t j = 0; j < wide; j += W) high = larger(high, load(z + i * wide + j) + load(g + j));
            const C most = highest_lane(high);
            if (!(rows[i] > C(0)) || most == -infinity<C>) {
                f[i] = C(0);
                for (int64_t j = 0; j < wide; j++) entries[i * wide + j] = C(0);
                continue;
            }
            const C sum = ANYMAX_UNIT::sum(exponentials(i, -most, g, entries + i * wide));
            const C factor = rows[i] / sum;
            f[i] = logarithm(factor) - most;
            for (int64_t j = 0; j < wide; j += W) store(entries + i * wide + j, load(entries + i * wide + j) * factor);
        }
    }
    void columns_by_logs() {
        absorb();
        for (int64_t j = 0; j < wide; j++) sums[j] = -infinity<C>, before[j] = C(0);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < wide; j += W) store(sums + j, larger(load(sums + j), load(z + i * wide + j) + f[i]));
        for (int64_t j = 0; j < wide; j++) g[j] = sums[j] > -infinity<C> ? -sums[j] : C(0);
        for (int64_t i = 0; i < n; i++) {
            exponentials(i, f[i], g, entries + i * wide);
            for (int64_t j = 0; j < wide; j += W) store(before + j, load(before + j) + load(entries + i * wide + j));
        }
        for (int64_t j = 0; j < wide; j++) {
            const bool there = columns[j] > C(0) && before[j] > C(0);
            before[j] = there ? columns[j] / before[j] : C(0);
            g[j] = there ? g[j] + logarithm(before[j]) : C(0);
        }
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < wide; j += W)
                store(entries + i * wide + j, load(entries + i * wide + j) * load(before + j));
    }

    static bool beyond(C factor) { return !(factor < FACTOR_REACH<C> && factor > C(1) / FACTOR_REACH<C>); }

    // Factors of rows, then the sums of columns that they give. False where a factor is out of range.
    bool scale_rows() {
        most = C(0);
        for (int64_t j = 0; j < wide; j += W) store(sums + j, V{});
        for (int64_t i = 0; i < n; i++) {
            const C *row = entries + i * wide;
            if (!(rows[i] > C(0))) continue;
            V dot{};
            for (int64_t j = 0; j < wide; j += W) dot += load(row + j) * load(v + j);
            const C factor = rows[i] / sum(dot);
            if (beyond(factor)) return false;
            const C off = factor / u[i] - C(1);
            most = larger(most, larger(off, -off));
            u[i] = factor;
            for (int64_t j = 0; j < wide; j += W) store(sums + j, load(sums + j) + load(row + j) * factor);
        }
        return true;
    }
    void sum_columns() {
        for (int64_t j = 0; j < wide; j += W) store(sums + j, V{});
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < wide; j += W) store(sums + j, load(sums + j) + load(entries + i * wide + j) * u[i]);
    }
    bool scale_columns() {
        for (int64_t j = 0; j < m; j++) {
            if (!(columns[j] > C(0))) continue;
            const C factor = columns[j] / sums[j];
            if (beyond(factor)) return false;
            v[j] = factor;
        }
        return true;
    }

    void remember(int64_t k) {
        C *const p = history(k);
        for (int64_t i = 0; i < n; i++) p[i] = rows[i] > C(0) ? f[i] + logarithm(u[i]) : C(0), p[n + wide + i] = u[i];
        for (int64_t j = 0; j < wide; j++) {
            p[n + j] = columns[j] > C(0) ? g[j] + logarithm(v[j]) : C(0);
            p[n + wide + n + j] = v[j];
        }
    }

    // Iterates so often, or until the sums are within the tolerance.
    void iterate(int64_t iterations, bool remembering, C tolerance) {
        for (int64_t i = 0; i < n; i++) f[i] = C(0), u[i] = C(1);
        for (int64_t j = 0; j < wide; j++) g[j] = C(0), v[j] = C(1);
        for (int64_t k = 0; k < iterations; k++) {
            if (k == 0 || !scale_rows()) rows_by_logs(), sum_columns(), most = infinity<C>;
            if (!scale_columns()) columns_by_logs();
            if (remembering) remember(k);
            if (most <= tolerance) return;
        }
    }

    // The iterations backwards with the entries that all of them had in common.
    void back_by_factors(int64_t iterations) {
        for (int64_t e = 0; e < n * wide; e += W) store(part + e, V{});
        for (int64_t k = iterations - 1; k >= 0; k--) {
            const C *const a = history(k) + n + wide, *const b = a + n,
                           *const old = k ? history(k - 1) + n + wide + n : nullptr;
            for (int64_t j = 0; j < wide; j++) {
                s[j] = columns[j] > C(0) ? of_columns[j] * b[j] / columns[j] : C(0);
                before[j] = old ? old[j] : C(1);
                of_columns[j] = C(0);
            }
            for (int64_t i = 0; i < n; i++) {
                if (!(rows[i] > C(0))) continue;
                const C *row = entries + i * wide;
                V dot{};
                for (int64_t j = 0; j < wide; j += W) dot += load(row + j) * load(s + j);
                const C t = (of_rows[i] - a[i] * sum(dot)) * a[i] / rows[i];
                of_rows[i] = C(0);
                for (int64_t j = 0; j < wide; j += W) {
                    store(part + i * wide + j, load(part + i * wide + j) + (a[i] * load(s + j) + t * load(before + j)));
                    store(of_columns + j, load(of_columns + j) - load(row + j) * t);
                }
            }
            for (int64_t j = 0; j < wide; j++) of_columns[j] *= before[j];
        }
        for (int64_t e = 0; e < n * wide; e += W) store(part + e, load(part + e) * load(entries + e));
    }
    // The same from potentials: entries are computed for each half of an iteration.
    void back_by_logs(int64_t iterations) {
        for (int64_t e = 0; e < n * wide; e += W) store(part + e, V{});
        for (int64_t k = iterations - 1; k >= 0; k--) {
            const C *const a = history(k), *const b = a + n, *const old = k ? history(k - 1) + n : nullptr;
            for (int64_t j = 0; j < wide; j++) {
                s[j] = columns[j] > C(0) ? of_columns[j] / columns[j] : C(0);
                before[j] = old ? old[j] : C(0);
                of_columns[j] = C(0);
            }
            for (int64_t i = 0; i < n; i++) {
                if (!(rows[i] > C(0))) continue;
                C *const to = part + i * wide;
                exponentials(i, a[i], b, sums);
                V dot{};
                for (int64_t j = 0; j < wide; j += W) {
                    const V d = load(sums + j) * load(s + j);
                    dot += d;
                    store(to + j, load(to + j) + d);
                }
                const C t = (of_rows[i] - sum(dot)) / rows[i];
                of_rows[i] = C(0);
                exponentials(i, a[i], before, sums);
                for (int64_t j = 0; j < wide; j += W) {
                    const V d = load(sums + j) * t;
                    store(to + j, load(to + j) + d);
                    store(of_columns + j, load(of_columns + j) - d);
                }
            }
        }
    }

  public:
    OneMatrix(int64_t n, int64_t m) : n(n), m(m), wide((m + W - 1) / W * W) {}

    // Points the arrays into memory; without a base it only says how many bytes they take.
    int64_t lay_out(char *base, int64_t remembered) {
        Arena arena{base, 0};
        arena.take(n * wide, z, entries, part);
        arena.take(n + wide, rows, columns, f, g, u, v, sums, s, before, of_rows, of_columns);
        arena.take(remembered * 2 * (n + wide), past);
        return arena.used;
    }

    // The scores and the sums that are asked for (NULL: the default). False where the matrix becomes NaN.
    bool read(const C *x, C temperature, const C *of_rows, const C *of_columns) {
        C total = C(0), other = C(0);
        for (int64_t i = 0; i < n; i++) rows[i] = of_rows ? of_rows[i] : C(1);
        for (int64_t j = 0; j < wide; j++) columns[j] = j >= m ? C(0) : of_columns ? of_columns[j] : C(1), sums[j] = C(0);
        for (int64_t i = 0; i < n; i++)
            if (!(rows[i] >= C(0) && rows[i] < infinity<C>)) return false;
        for (int64_t j = 0; j < m; j++)
            if (!(columns[j] >= C(0) && columns[j] < infinity<C>)) return false;
        for (int64_t i = 0; i < n; i++) {
            C high = -infinity<C>, wrong = C(0);
            for (int64_t j = 0; j < m; j++) {
                const C score = x[i * m + j];
                if (!(score < infinity<C>)) wrong = C(1);
                if (rows[i] > C(0) && columns[j] > C(0) && score > high) high = score;
            }
            if (wrong > C(0)) return false;
            for (int64_t j = 0; j < wide; j++) {
                const bool kept = j < m && high > -infinity<C> && columns[j] > C(0) && x[i * m + j] > -infinity<C>;
                const C below = kept ? (x[i * m + j] - high) / temperature : -infinity<C>,
                        lowest = C(sizeof(C) == 4 ? -1e30 : -1e300);
                z[i * wide + j] = !kept ? -infinity<C> : below > lowest ? below : lowest;
                if (kept) sums[j] = C(1);
            }
            if (high == -infinity<C>) rows[i] = C(0);
            total += rows[i];
        }
        for (int64_t j = 0; j < m; j++) columns[j] *= sums[j], other += columns[j];
        if (!of_columns)
            for (int64_t j = 0; j < m; j++) columns[j] *= other > C(0) ? total / other : C(0);
        else if (!of_rows)
            for (int64_t i = 0; i < n; i++) rows[i] *= total > C(0) ? other / total : C(0);
        return true;
    }

    // P, and by how much a sum of a row was wrong before the last iteration.
    double forward(int64_t iterations, C *out, C tolerance) {
        iterate(iterations, false, tolerance > C(0) ? tolerance : C(-1));
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < m; j++) out[i * m + j] = entries[i * wide + j] * u[i] * v[j];
        return (double)most;
    }

    void backward(int64_t iterations, C temperature, const C *gradient, C *out) {
        iterate(iterations, true, C(-1));
        for (int64_t j = 0; j < wide; j++) of_columns[j] = C(0);
        for (int64_t i = 0; i < n; i++) {
            of_rows[i] = C(0);
            for (int64_t j = 0; j < m; j++) {
                const C p = entries[i * wide + j] * u[i] * v[j], w = p > C(0) ? p * gradient[i * m + j] : C(0);
                of_rows[i] += w, of_columns[j] += w;
                out[i * m + j] = w;
            }
        }
        epochs == 1 ? back_by_factors(iterations) : back_by_logs(iterations);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < m; j++)
                out[i * m + j] = z[i * wide + j] > -infinity<C> ? (out[i * m + j] - part[i * wide + j]) / temperature : C(0);
    }
};

}  // namespace ANYMAX_UNIT
