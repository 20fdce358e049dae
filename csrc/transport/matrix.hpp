// Sinkhorn of one matrix of any size and any scores. Entries exp(z + f + g) are computed for potentials f of rows and g of
// columns, and then scaled by factors of rows and columns; where a factor leaves its range, it goes to the potentials and the
// entries are computed again. Several threads share the rows of the matrix, and then blocks of its columns, whose sums are over
// all rows in order; one thread alone does both at once. So no sum depends on who computes it.
#pragma once

#include "core/memory.hpp"
#include "core/pieces.hpp"
#include "core/vec.hpp"
#include "core/packing.hpp"

namespace ANYMAX_UNIT {

template <class C>
constexpr C FACTOR_REACH = C(sizeof(C) == 4 ? 1e9 : 1e90);

template <class C>
class OneMatrix {
    typedef vec<C> V;
    static constexpr int64_t W = width<C>, BLOCK = 8 * W;
    const int64_t n, m, wide;  // wide: m in whole vectors, filled with entries of 0
    const Team team;
    C *z, *entries, *part, *rows, *columns, *f, *g, *u, *v, *sums, *s, *before, *of_rows, *of_columns;
    C *past;               // of each iteration f + log u [n] and g + log v [wide], and u and v themselves
    int64_t epochs = 0;    // how often entries were computed
    C most = infinity<C>;  // the largest change of a factor of rows, by which its sum was wrong before

    ANYMAX_INLINE C *history(int64_t k) const { return past + k * 2 * (n + wide); }

    // f(i) for each row, f(first, last) for blocks of columns.
    template <class F>
    void each_row(F f) const {
        const auto rows_of = [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) f(i);
            return 0;
        };
        share(team.run, n, MATRIX_PART / wide + 1, rows_of);
    }
    template <class F>
    void each_block(F f) const {
        const auto blocks_of = [&](int64_t begin, int64_t end) {
            for (int64_t k = begin; k < end; k++) f(k * BLOCK, k * BLOCK + BLOCK < wide ? k * BLOCK + BLOCK : wide);
            return 0;
        };
        share(team.run, (wide + BLOCK - 1) / BLOCK, MATRIX_PART / (BLOCK * n) + 1, blocks_of);
    }

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
        each_row([this](int64_t i) {
            V high = all<V>(-infinity<C>);
            for (int64_t j = 0; j < wide; j += W) high = larger(high, load(z + i * wide + j) + load(g + j));
            const C most = highest_lane(high);
            if (!(rows[i] > C(0)) || most == -infinity<C>) {
                f[i] = C(0);
                for (int64_t j = 0; j < wide; j++) entries[i * wide + j] = C(0);
                return;
            }
            const C sum = ANYMAX_UNIT::sum(exponentials(i, -most, g, entries + i * wide));
            const C factor = rows[i] / sum;
            f[i] = logarithm(factor) - most;
            for (int64_t j = 0; j < wide; j += W) store(entries + i * wide + j, load(entries + i * wide + j) * factor);
        });
    }
    void columns_by_logs() {
        absorb();
        each_block([this](int64_t first, int64_t last) {
            for (int64_t j = first; j < last; j++) sums[j] = -infinity<C>, before[j] = C(0);
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = first; j < last; j += W)
                    store(sums + j, larger(load(sums + j), load(z + i * wide + j) + f[i]));
        });
        for (int64_t j = 0; j < wide; j++) g[j] = sums[j] > -infinity<C> ? -sums[j] : C(0);
        each_row([this](int64_t i) { exponentials(i, f[i], g, entries + i * wide); });
        each_block([this](int64_t first, int64_t last) {
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = first; j < last; j += W) store(before + j, load(before + j) + load(entries + i * wide + j));
        });
        for (int64_t j = 0; j < wide; j++) {
            const bool there = columns[j] > C(0) && before[j] > C(0);
            before[j] = there ? columns[j] / before[j] : C(0);
            g[j] = there ? g[j] + logarithm(before[j]) : C(0);
        }
        each_row([this](int64_t i) {
            for (int64_t j = 0; j < wide; j += W)
                store(entries + i * wide + j, load(entries + i * wide + j) * load(before + j));
        });
    }

    static bool beyond(C factor) { return !(factor < FACTOR_REACH<C> && factor > C(1) / FACTOR_REACH<C>); }

    C row_factor(int64_t i) const {
        const C *row = entries + i * wide;
        V dot{};
        for (int64_t j = 0; j < wide; j += W) dot += load(row + j) * load(v + j);
        return rows[i] / sum(dot);
    }
    bool scale_row(int64_t i, C factor) {
        if (beyond(factor)) return false;
        const C off = factor / u[i] - C(1);
        most = larger(most, larger(off, -off));
        u[i] = factor;
        return true;
    }
    ANYMAX_INLINE void add_row(int64_t i, int64_t first, int64_t last) {
        const C *const row = entries + i * wide, factor = u[i];
        for (int64_t j = first; j < last; j += W) store(sums + j, load(sums + j) + load(row + j) * factor);
    }
    void sum_columns() {
        each_block([this](int64_t first, int64_t last) {
            for (int64_t j = first; j < last; j += W) store(sums + j, V{});
            for (int64_t i = 0; i < n; i++)
                if (rows[i] > C(0)) add_row(i, first, last);
        });
    }
    // Factors of rows, then the sums of columns that they give. False where a factor is out of range.
    bool scale_rows() {
        most = C(0);
        if (!team.run) {
            for (int64_t j = 0; j < wide; j += W) store(sums + j, V{});
            for (int64_t i = 0; i < n; i++) {
                if (!(rows[i] > C(0))) continue;
                if (!scale_row(i, row_factor(i))) return false;
                add_row(i, 0, wide);
            }
            return true;
        }
        each_row([this](int64_t i) {
            if (rows[i] > C(0)) part[i] = row_factor(i);
        });
        for (int64_t i = 0; i < n; i++)
            if (rows[i] > C(0) && !scale_row(i, part[i])) return false;
        sum_columns();
        return true;
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

    void clear_part() {
        each_row([this](int64_t i) {
            for (int64_t e = i * wide; e < (i + 1) * wide; e += W) store(part + e, V{});
        });
    }
    // f(i) for each row that has entries, then g(i, first, last) for its columns.
    template <class F, class G>
    void rows_then_columns(F f, G g) const {
        if (!team.run) {
            for (int64_t i = 0; i < n; i++)
                if (rows[i] > C(0)) f(i), g(i, 0, wide);
            return;
        }
        each_row([&](int64_t i) {
            if (rows[i] > C(0)) f(i);
        });
        each_block([&](int64_t first, int64_t last) {
            for (int64_t i = 0; i < n; i++)
                if (rows[i] > C(0)) g(i, first, last);
        });
    }

    // The iterations backwards with the entries that all of them had in common. They leave in u what each row passes on.
    void back_by_factors(int64_t iterations) {
        clear_part();
        for (int64_t k = iterations - 1; k >= 0; k--) {
            const C *const a = history(k) + n + wide, *const b = a + n,
                           *const old = k ? history(k - 1) + n + wide + n : nullptr;
            for (int64_t j = 0; j < wide; j++) {
                s[j] = columns[j] > C(0) ? of_columns[j] * b[j] / columns[j] : C(0);
                before[j] = old ? old[j] : C(1);
                of_columns[j] = C(0);
            }
            const auto row_part = [=](int64_t i) {
                const C *row = entries + i * wide;
                V dot{};
                for (int64_t j = 0; j < wide; j += W) dot += load(row + j) * load(s + j);
                const C t = (of_rows[i] - a[i] * sum(dot)) * a[i] / rows[i];
                of_rows[i] = C(0), u[i] = t;
                for (int64_t j = 0; j < wide; j += W)
                    store(part + i * wide + j, load(part + i * wide + j) + (a[i] * load(s + j) + t * load(before + j)));
            };
            const auto columns_part = [=](int64_t i, int64_t first, int64_t last) {
                const C *const row = entries + i * wide, t = u[i];
                for (int64_t j = first; j < last; j += W) store(of_columns + j, load(of_columns + j) - load(row + j) * t);
            };
            rows_then_columns(row_part, columns_part);
            for (int64_t j = 0; j < wide; j++) of_columns[j] *= before[j];
        }
        each_row([this](int64_t i) {
            for (int64_t e = i * wide; e < (i + 1) * wide; e += W) store(part + e, load(part + e) * load(entries + e));
        });
    }
    // The same from potentials: entries are computed for each half of an iteration.
    void back_by_logs(int64_t iterations) {
        clear_part();
        for (int64_t k = iterations - 1; k >= 0; k--) {
            const C *const a = history(k), *const b = a + n, *const old = k ? history(k - 1) + n : nullptr;
            for (int64_t j = 0; j < wide; j++) {
                s[j] = columns[j] > C(0) ? of_columns[j] / columns[j] : C(0);
                before[j] = old ? old[j] : C(0);
                of_columns[j] = C(0);
            }
            const auto row_part = [=](int64_t i) {
                C *const to = part + i * wide, *const e = entries + i * wide;
                exponentials(i, a[i], b, e);
                V dot{};
                for (int64_t j = 0; j < wide; j += W) {
                    const V d = load(e + j) * load(s + j);
                    dot += d;
                    store(to + j, load(to + j) + d);
                }
                const C t = (of_rows[i] - sum(dot)) / rows[i];
                of_rows[i] = C(0), u[i] = t;
                exponentials(i, a[i], before, e);
                for (int64_t j = 0; j < wide; j += W) store(to + j, load(to + j) + load(e + j) * t);
            };
            const auto columns_part = [=](int64_t i, int64_t first, int64_t last) {
                const C *const e = entries + i * wide, t = u[i];
                for (int64_t j = first; j < last; j += W) store(of_columns + j, load(of_columns + j) - load(e + j) * t);
            };
            rows_then_columns(row_part, columns_part);
        }
    }

  public:
    OneMatrix(int64_t n, int64_t m, const Team &team) : n(n), m(m), wide((m + W - 1) / W * W), team(team) {}

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
        each_row([=](int64_t i) {
            C high = -infinity<C>, wrong = C(0);
            for (int64_t j = 0; j < m; j++) {
                const C score = x[i * m + j];
                if (!(score < infinity<C>)) wrong = C(1);
                if (rows[i] > C(0) && columns[j] > C(0) && score > high) high = score;
            }
            f[i] = wrong > C(0) ? infinity<C> : high;
            if (wrong > C(0)) return;
            for (int64_t j = 0; j < wide; j++) {
                const bool kept = j < m && high > -infinity<C> && columns[j] > C(0) && x[i * m + j] > -infinity<C>;
                const C below = kept ? (x[i * m + j] - high) / temperature : -infinity<C>,
                        lowest = C(sizeof(C) == 4 ? -1e30 : -1e300);
                z[i * wide + j] = !kept ? -infinity<C> : below > lowest ? below : lowest;
            }
        });
        for (int64_t i = 0; i < n; i++) {
            if (f[i] == infinity<C>) return false;
            if (f[i] == -infinity<C>) rows[i] = C(0);
            total += rows[i];
        }
        each_block([this](int64_t first, int64_t last) {
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = first; j < last; j++)
                    if (z[i * wide + j] > -infinity<C>) sums[j] = C(1);
        });
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
        each_row([=](int64_t i) {
            for (int64_t j = 0; j < m; j++) out[i * m + j] = entries[i * wide + j] * u[i] * v[j];
        });
        return (double)most;
    }

    void backward(int64_t iterations, C temperature, const C *gradient, C *out) {
        iterate(iterations, true, C(-1));
        each_row([=](int64_t i) {
            of_rows[i] = C(0);
            for (int64_t j = 0; j < m; j++) {
                const C p = entries[i * wide + j] * u[i] * v[j], w = p > C(0) ? p * gradient[i * m + j] : C(0);
                of_rows[i] += w;
                out[i * m + j] = w;
            }
        });
        each_block([=](int64_t first, int64_t last) {
            for (int64_t j = first; j < last; j++) of_columns[j] = C(0);
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = first; j < last && j < m; j++) of_columns[j] += out[i * m + j];
        });
        epochs == 1 ? back_by_factors(iterations) : back_by_logs(iterations);
        each_row([=](int64_t i) {
            for (int64_t j = 0; j < m; j++)
                out[i * m + j] = z[i * wide + j] > -infinity<C> ? (out[i * m + j] - part[i * wide + j]) / temperature : C(0);
        });
    }
};

}  // namespace ANYMAX_UNIT
