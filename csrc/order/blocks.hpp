// Soft ranks and soft sorting: the projection on a permutahedron by isotonic regression (pool adjacent violators) of a sorted
// row.
//
// Ranks project the scores z = x / strength on the orderings of w = m, m - 1, ..., 1; soft sorting projects z = (m, ..., 1) /
// strength on the orderings of w = x. Both are found in descending order: v = isotonic(z - w) is constant on blocks, and within
// a block [a, b)
//
//     l2: z_j - v, v = mean z - mean w        kl: z_j - v, v = lse z - lse w, where w is log m, ..., log 1 for ranks, which are
//     exp(z_j - v)
//
// mean and lse (logsumexp) are those of the block. Blondel et al. 2020 have the mathematics.
#pragma once

#include <math.h>

#include "core/memory.hpp"
#include "order/sort.hpp"

namespace ANYMAX_UNIT {

constexpr uint32_t FIRST_OF_BLOCK = 0x80000000u;  // the bit in `order` of a block's first place
constexpr double WITHOUT_LOGARITHMS = 600.0;      // a product of exponentials whose sum is above minus this is far from 0

// A block, whose value falls from one to the next. l2: a = sum z - w, b = its size, v = a / b; kl: a = sum exp(z), b = sum
// exp(w), v = log(a / b).
struct Block {
    double a, b;
    int64_t start;
};

// The same for kl in logarithms: a = sum exp(z - z_top), b = sum exp(w - w_top), whose first terms are the largest.
struct LogBlock {
    double a, z_top, b, w_top, value;
    int64_t start;
    void join(const LogBlock &next) {
        a += next.a * (next.z_top == z_top ? 1.0 : exp(next.z_top - z_top));
        b += next.b * (next.w_top == w_top ? 1.0 : exp(next.w_top - w_top));
        value = z_top - w_top + log(a / b);
    }
};

// The arrays of a row that a thread works with.
template <class T>
struct OrderRow {
    using Item = typename ItemOf<T>::type;
    Item *first = nullptr, *second = nullptr;
    Counts *counts = nullptr;
    double *z = nullptr, *w = nullptr, *logarithm = nullptr;  // z lies where the sorted items do not
    Block *block = nullptr;
    LogBlock *in_logarithms = nullptr;

    static bool take(Room &room, int64_t n, bool kl, anymax_parallel team, OrderRow &row) {
        Arena arena{nullptr, 0};
        for (int pass = 0; pass < 2; pass++) {
            arena.take(n, row.first, row.second);
            arena.take(sorted_parts(n, team) * Item::DIGITS, row.counts);
            arena.take(n + 1, row.block);
            if (kl) arena.take(n + 2, row.in_logarithms), arena.take(n + 1, row.logarithm, row.w);  // the blocks may begin at 1
            if (pass) break;
            char *base = room.take<char>(arena.used);
            if (!base) return false;
            arena = Arena{base, 0};
        }
        for (int64_t i = 1; kl && i <= n; i++) row.logarithm[i] = log((double)i);
        return true;
    }
};

// Blocks of places 0 ... m - 1, from terms(j, a, b), so that a / b falls; how many there are. The start of one more is m.
template <class Terms>
int64_t pooled(Block *block, int64_t m, Terms terms) {
    if (!m) return block[0].start = 0;
    Block last{0.0, 0.0, 0};
    terms(0, last.a, last.b);
    int64_t count = 0;  // before the last
    for (int64_t j = 1; j < m; j++) {
        double a, b;
        terms(j, a, b);
        if (last.a * b > a * last.b) {
            block[count++] = last;
            last = Block{a, b, j};
            continue;
        }
        last.a += a, last.b += b;
        while (count && block[count - 1].a * last.b <= last.a * block[count - 1].b) {
            const Block &before = block[--count];
            last = Block{before.a + last.a, before.b + last.b, before.start};
        }
    }
    block[count++] = last;
    block[count].start = m;
    return count;
}

inline int64_t pooled_in_logarithms(LogBlock *block, const double *z, const double *w, int64_t m) {
    int64_t count = 0;
    for (int64_t j = 0; j < m; j++) {
        LogBlock last{1.0, z[j], 1.0, w[j], z[j] - w[j], j};
        while (count && block[count - 1].value <= last.value) {
            LogBlock &before = block[--count];
            before.join(last);
            last = before;
        }
        block[count++] = last;
    }
    block[count].start = m;
    return count;
}

// One operation on rows, as the call has it.
template <class T>
struct OrderCall {
    const anymax_order_call *call;
    anymax_parallel team;  // of one row, or NULL

    static constexpr T MASKED = -(T)INFINITY;

    // f(begin, end) for parts of [0, count).
    template <class F>
    void in_parts(int64_t count, F f) const {
        share(team, count, PIECE, [=](int64_t begin, int64_t end) { return f(begin, end), 0; });
    }

    // each(block) for every block, then places(block, a, b) for those parts of blocks that lie in a part of the row.
    template <class F, class G>
    void in_blocks(Block *block, int64_t count, F each, G places) const {
        if (!team) {
            for (int64_t k = 0; k < count; k++)
                each(block[k], block[k + 1].start), places(block[k], block[k + 1].start, block[k].start, block[k + 1].start);
            return;
        }
        in_parts(count, [=](int64_t begin, int64_t end) {
            for (int64_t k = begin; k < end; k++) each(block[k], block[k + 1].start);
        });
        in_parts(block[count].start, [=](int64_t begin, int64_t end) {
            for (int64_t k = first_not(count, [=](int64_t k) { return block[k + 1].start <= begin; }), a = begin, b; a < end;
                 k++, a = b) {
                b = block[k + 1].start < end ? block[k + 1].start : end;
                places(block[k], block[k + 1].start, a, b);
            }
        });
    }

    // One row, forward; it becomes NaN where it is `poisoned`, or has NaN. `order` may be NULL.
    void forward(OrderRow<T> &row, const T *x, int32_t poisoned, T *out, int32_t *order) const {
        const int64_t n = call->n;
        int64_t masked = 0;
        bool alone = !team;  // or no other thread came
        in_parts(n, [=, &poisoned, &masked, &alone](int64_t begin, int64_t end) {
            int32_t bad = 0, hidden = 0;
            if (end - begin == n) alone = true;
            for (int64_t i = begin; i < end; i++) {
                bad |= !(x[i] < (T)INFINITY);
                hidden += x[i] == MASKED;
            }
            if (bad) __atomic_store_n(&poisoned, 1, __ATOMIC_RELAXED);
            if (hidden) __atomic_fetch_add(&masked, (int64_t)hidden, __ATOMIC_RELAXED);
        });
        if (poisoned) {
            for (int64_t i = 0; i < n; i++) out[i] = (T)NAN;
            for (int64_t i = 0; order && i < n; i++) order[i] = (int32_t)((uint32_t)i | FIRST_OF_BLOCK);
            return;
        }
        OrderCall{call, alone ? nullptr : team}.of_sound(row, x, n - masked, out, order);
    }

    // The same of a row of which m classes are not masked.
    void of_sound(OrderRow<T> &row, const T *x, int64_t m, T *out, int32_t *order) const {
        using Item = typename OrderRow<T>::Item;
        const int64_t n = call->n;
        const bool descending = call->descending;
        in_parts(n, [=, first = row.first](int64_t begin, int64_t end) {
            if (m < n)  // such a class comes last, whichever way the others are sorted
                for (int64_t i = begin; i < end; i++)
                    first[i] = Item::of(x[i] == MASKED || descending ? x[i] + (T)0 : (T)0 - x[i], (uint32_t)i);
            else if (descending)
                for (int64_t i = begin; i < end; i++) first[i] = Item::of(x[i] + (T)0, (uint32_t)i);  // -0 is 0
            else
                for (int64_t i = begin; i < end; i++) first[i] = Item::of((T)0 - x[i], (uint32_t)i);
        });
        const Item *item = sorted(row.first, row.second, n, row.counts, team);
        row.z = (double *)(item == row.first ? row.second : row.first);
        call->sorted ? sorted_scores(row, item, x, out, m) : ranks(row, item, out, m);
        for (int64_t j = m; j < n; j++) out[call->sorted ? j : (int64_t)item[j].place()] = 0;
        if (!order) return;
        in_parts(n, [=](int64_t begin, int64_t end) {
            for (int64_t j = begin; j < end; j++) order[j] = (int32_t)item[j].place();
        });
        const bool logarithms = call->kl && row.in_logarithms[0].start == 1;
        for (int64_t k = 0, a; (a = logarithms ? row.in_logarithms[k + 1].start : row.block[k].start) < m; k++)
            order[a] |= (int32_t)FIRST_OF_BLOCK;
        for (int64_t j = m; j < n; j++) order[j] |= (int32_t)FIRST_OF_BLOCK;
    }

    // z and w of kl, from their numbers at place 0 down, and its blocks. f(a, b, exponentials, v): for each block, with exp(v)
    // where there are exponentials
    template <class F>
    void each_block(OrderRow<T> &row, int64_t m, F f) const {
        row.in_logarithms[0].start = 0;
        int64_t rises = 0;  // where they are few, a block of one place needs no exponential
        for (int64_t j = 1; j < m; j++) rises += row.z[j] - row.z[j - 1] >= row.w[j] - row.w[j - 1];
        const bool exponentials = row.z[m - 1] + row.w[m - 1] > -WITHOUT_LOGARITHMS && rises > m / 8;
        if (exponentials) {
            for (int64_t j = 0; j < m; j++) row.z[j] = exp(row.z[j]);
            if (call->sorted)
                for (int64_t j = 0; j < m; j++) row.w[j] = exp(row.w[j]);
            else
                for (int64_t j = 0; j < m; j++) row.w[j] = (double)(m - j);  // exactly
            const int64_t count = pooled(row.block, m, [&row](int64_t j, double &a, double &b) { a = row.z[j], b = row.w[j]; });
            for (int64_t k = 0; k < count; k++)
                f(row.block[k].start, row.block[k + 1].start, true, row.block[k].a / row.block[k].b);
            return;
        }
        row.in_logarithms[0].start = 1;  // the blocks begin behind
        const int64_t count = pooled_in_logarithms(row.in_logarithms + 1, row.z, row.w, m);
        for (int64_t k = 1; k <= count; k++)
            f(row.in_logarithms[k].start, row.in_logarithms[k + 1].start, false, row.in_logarithms[k].value);
    }

    // Blocks end at a gap of n in l2, and of log n in kl: a larger one counts as that, so that no numbers are large.
    template <class Item>
    void ranks(OrderRow<T> &row, const Item *item, T *out, int64_t m) const {
        if (!m) return nothing(row);
        const double scale = fmin(1.0 / call->strength, 1e300), widest = call->kl ? log((double)m) + 2.0 : (double)m + 1.0;
        double *const z = row.z;
        double above = (double)item[0].number(), at = 0.0;
        const auto next = [&](int64_t j) {
            const double here = (double)item[j].number(), gap = (above - here) * scale;
            above = here, at -= gap < widest ? gap : widest;
            return z[j] = at;
        };
        if (!call->kl) {
            const int64_t count =
                pooled(row.block, m, [&](int64_t j, double &a, double &b) { a = next(j) - (double)(m - j), b = 1.0; });
            // not z - v, which may be the difference of large numbers
            return in_blocks(
                row.block, count,
                [=](Block &block, int64_t end) {
                    const int64_t a = block.start;
                    if (end - a == 1) return;
                    const double first = z[a];
                    block.a = (double)m - 0.5 * (double)(a + end - 1) -
                              sum_of(a, end, [=](int64_t j) { return z[j] - first; }) / (double)(end - a);
                },
                [=](const Block &block, int64_t end, int64_t a, int64_t b) {
                    if (end - block.start == 1) {
                        out[item[a].place()] = (T)(m - a);
                        return;
                    }
                    const double first = z[block.start];
                    for (int64_t j = a; j < b; j++) out[item[j].place()] = (T)((z[j] - first) + block.a);
                });
        }
        for (int64_t j = 0; j < m; j++) next(j), row.w[j] = row.logarithm[m - j];
        each_block(row, m, [=](int64_t a, int64_t b, bool exponentials, double v) {
            if (b - a == 1)
                out[item[a].place()] = (T)(m - a);
            else if (exponentials)
                for (int64_t j = a; j < b; j++) out[item[j].place()] = (T)(z[j] / v);
            else
                for (int64_t j = a; j < b; j++) out[item[j].place()] = (T)exp(z[j] - v);
        });
    }

    template <class Item>
    void sorted_scores(OrderRow<T> &row, const Item *item, const T *x, T *out, int64_t m) const {
        if (!m) return nothing(row);
        const double sign = call->descending ? 1.0 : -1.0, gap = fmin(1.0 / call->strength, 1e280),
                     top = (double)item[0].number();
        const auto alone = [=](int64_t j) { out[j] = x[item[j].place()]; };
        if (!call->kl) {
            const int64_t count = pooled(row.block, m, [=](int64_t j, double &a, double &b) {
                a = -(double)j * gap - ((double)item[j].number() - top), b = 1.0;
            });
            return in_blocks(
                row.block, count,
                [=](Block &block, int64_t end) {
                    if (end - block.start == 1) return;
                    const double first = (double)item[block.start].number();
                    block.a = first + sum_of(block.start, end, [=](int64_t j) { return (double)item[j].number() - first; }) /
                                          (double)(end - block.start);
                },
                [=](const Block &block, int64_t end, int64_t a, int64_t b) {
                    if (end - block.start == 1) return alone(a);
                    const double middle = 0.5 * (double)(block.start + end - 1);
                    for (int64_t j = a; j < b; j++) out[j] = (T)(sign * block.a + sign * ((middle - (double)j) * gap));
                });
        }
        for (int64_t j = 0; j < m; j++) row.z[j] = -(double)j * gap, row.w[j] = (double)item[j].number() - top;
        each_block(row, m, [=](int64_t a, int64_t b, bool exponentials, double v) {
            if (b - a == 1) return alone(a);
            const double shift = top - (exponentials ? log(v) : v);
            for (int64_t j = a; j < b; j++) out[j] = (T)(sign * (-(double)j * gap + shift));
        });
    }

    void nothing(OrderRow<T> &row) const {
        row.block[0].start = 0;
        if (call->kl) row.in_logarithms[0].start = 0;
    }

    // J^T g of one row, from the order that `forward` has written; false: that is not what `order` holds.
    bool backward(const T *x, const T *p, const T *g, const int32_t *order, T *out) const {
        const int64_t n = call->n;
        uint32_t highest = 0;
        for (int64_t j = 0; j < n; j++) {
            const uint32_t i = (uint32_t)order[j] & ~FIRST_OF_BLOCK;
            highest = i > highest ? i : highest;
        }
        if (highest >= (uint64_t)n || !((uint32_t)order[0] & FIRST_OF_BLOCK)) return false;
        if (p[0] != p[0]) {
            for (int64_t i = 0; i < n; i++) out[i] = (T)NAN;
            return true;
        }
        for (int64_t a = 0, b; a < n; a = b) {
            for (b = a + 1; b < n && order[b] >= 0;) b++;
            call->sorted ? back_to_scores(x, g, order, a, b, out) : back_to_ranks(p, g, order, a, b, out);
        }
        return true;
    }

    static uint32_t place(int32_t entry) { return (uint32_t)entry & ~FIRST_OF_BLOCK; }

    // The sum of f(j) over a block, in four parts that need not wait for each other.
    template <class F>
    static double sum_of(int64_t a, int64_t b, F f) {
        double s0 = 0.0, s1 = 0.0, s2 = 0.0, s3 = 0.0;
        for (; a + 4 <= b; a += 4) s0 += f(a), s1 += f(a + 1), s2 += f(a + 2), s3 += f(a + 3);
        for (; a < b; a++) s0 += f(a);
        return (s0 + s1) + (s2 + s3);
    }

    void back_to_ranks(const T *p, const T *g, const int32_t *order, int64_t a, int64_t b, T *out) const {
        const double scale = fmin(1.0 / call->strength, 1e300);
        if (b - a == 1) {
            const uint32_t i = place(order[a]);
            out[i] = p[i] == 0 || g[i] - g[i] == 0 ? (T)0 : (T)NAN;
        } else if (call->kl) {
            const double size = sum_of(a, b, [=](int64_t j) { return (double)p[place(order[j])]; });
            const double mean =
                sum_of(a, b, [=](int64_t j) { return (double)p[place(order[j])] * (double)g[place(order[j])]; }) / size;
            for (int64_t j = a; j < b; j++) {
                const uint32_t i = place(order[j]);
                out[i] = (T)((double)p[i] * (((double)g[i] - mean) * scale));
            }
        } else {
            const double mean = sum_of(a, b, [=](int64_t j) { return (double)g[place(order[j])]; }) / (double)(b - a);
            for (int64_t j = a; j < b; j++) {
                const uint32_t i = place(order[j]);
                out[i] = (T)(((double)g[i] - mean) * scale);
            }
        }
    }

    void back_to_scores(const T *x, const T *g, const int32_t *order, int64_t a, int64_t b, T *out) const {
        if (b - a == 1) {
            const uint32_t i = place(order[a]);
            out[i] = x[i] == MASKED ? (T)0 : g[a];
            return;
        }
        double sum = 0.0;
        for (int64_t j = a; j < b; j++) sum += g[j];
        if (!call->kl) {
            for (int64_t j = a; j < b; j++) out[place(order[j])] = (T)(sum / (double)(b - a));
            return;
        }
        const double sign = call->descending ? 1.0 : -1.0, top = x[place(order[a])];
        const auto share = [=](uint32_t i) { return exp(sign * ((double)x[i] - top)); };
        const double all = sum_of(a, b, [=](int64_t j) { return share(place(order[j])); });
        for (int64_t j = a; j < b; j++) {
            const uint32_t i = place(order[j]);
            out[i] = (T)(sum * (share(i) / all));
        }
    }
};

}  // namespace ANYMAX_UNIT
