// Soft ranks and soft sorting: the projection on a permutahedron by isotonic regression (pool adjacent violators) of a sorted row.
//
// Ranks project the scores z = x / strength on the orderings of w = m, m - 1, ..., 1; soft sorting projects z = (m, ..., 1) / strength on the
// orderings of w = x. Both are found in descending order: v = isotonic(z - w) is constant on blocks, and within a block [a, b)
//
//     l2: z_j - mean z + mean w        kl: log p_j = z_j - lse z + lse(log w) for ranks, z_j - lse z + lse w for sorting
//
// where mean and lse (logsumexp) are those of the block. Blondel et al. 2020 have the mathematics.
#pragma once

#include <math.h>

#include "core/memory.hpp"
#include "order/sort.hpp"

namespace ANYMAX_UNIT {

constexpr uint32_t FIRST_OF_BLOCK = 0x80000000u;  // the bit in `order` of a block's first place

// A block of kl: the sums of exp(z - top) and of exp(w - base), whose first terms are the largest.
struct Block {
    double z, top, w, base;
    void join(const Block &next) {
        z += next.z * (next.top == top ? 1.0 : exp(next.top - top));
        w += next.w * (next.base == base ? 1.0 : exp(next.base - base));
    }
    double value() const { return top - base + log(z / w); }
};

// The arrays of a row that a thread works with.
template <class T> struct OrderRow {
    using Item = typename ItemOf<T>::type;
    Item *a = nullptr, *b = nullptr;
    double *z = nullptr, *w = nullptr, *sum = nullptr;
    Block *block = nullptr;
    int64_t *start = nullptr;

    static bool take(Room &room, int64_t n, bool kl, OrderRow &row) {
        Arena arena{nullptr, 0};
        for (int pass = 0; pass < 2; pass++) {
            arena.take(n, row.a, row.b);
            arena.take(n + 1, row.z, row.w, row.start);
            kl ? arena.take(n, row.block) : arena.take(n, row.sum);
            if (pass) break;
            char *base = room.take<char>(arena.used);
            if (!base) return false;
            arena = Arena{base, 0};
        }
        return true;
    }
};

// The blocks of z - w: their starts, and after the last `m`; how many there are.
template <class T> int64_t pool_means(OrderRow<T> &row, int64_t m) {
    int64_t count = 0;
    for (int64_t j = 0; j < m; j++) {
        double sum = row.z[j] - row.w[j];
        int64_t start = j;
        while (count) {
            const double size = (double)(j + 1 - start), size_before = (double)(start - row.start[count - 1]);
            if (row.sum[count - 1] * size > sum * size_before) break;
            sum += row.sum[--count], start = row.start[count];
        }
        row.sum[count] = sum, row.start[count++] = start;
    }
    row.start[count] = m;
    return count;
}

template <class T> int64_t pool_exponentials(OrderRow<T> &row, int64_t m) {
    int64_t count = 0;
    for (int64_t j = 0; j < m; j++) {
        Block block{1.0, row.z[j], 1.0, row.w[j]};
        double value = block.top - block.base;
        int64_t start = j;
        while (count && row.sum[count - 1] <= value) {
            Block joined = row.block[--count];
            joined.join(block);
            block = joined, start = row.start[count], value = block.value();
        }
        row.block[count] = block, row.sum[count] = value, row.start[count++] = start;
    }
    row.start[count] = m;
    return count;
}

template <class T> struct OrderCall {
    const anymax_order_call *call;
    const T *x, *p, *g;
    T *out;

    // One row, forward; `order` may be NULL.
    void forward(OrderRow<T> &row, const T *x, T *out, int32_t *order) const {
        const int64_t n = call->n;
        const double sign = call->descending ? 1.0 : -1.0;
        bool poisoned = false;
        int64_t m = 0;  // classes that are not masked
        for (int64_t i = 0; i < n; i++) {
            poisoned |= !(x[i] < (T)INFINITY);
            m += x[i] != -(T)INFINITY;
        }
        if (poisoned) {
            for (int64_t i = 0; i < n; i++) out[i] = (T)NAN;
            for (int64_t i = 0; order && i < n; i++) order[i] = (int32_t)((uint32_t)i | FIRST_OF_BLOCK);
            return;
        }
        // a masked class comes last, whichever way the others are sorted
        for (int64_t i = 0; i < n; i++) row.a[i] = OrderRow<T>::Item::of(x[i] == -(T)INFINITY ? x[i] : (T)(sign * x[i]), (uint32_t)i);
        const auto *item = sorted(row.a, row.b, n);
        const double strength = call->strength, far = -1e290, top = m ? sign * (double)x[item[0].place()] : 0.0;
        double *const scores = call->sorted ? row.w : row.z, *const places = call->sorted ? row.z : row.w;
        const double divide = call->sorted ? 1.0 : strength;
        for (int64_t j = 0; j < m; j++) {
            const double s = (sign * (double)x[item[j].place()] - top) / divide;
            scores[j] = s > far ? s : far;
            const double place = (double)(m - j);
            places[j] = call->sorted ? -(double)j / strength : call->kl ? log(place) : place;
        }
        const int64_t count = call->kl ? pool_exponentials(row, m) : pool_means(row, m);
        for (int64_t k = 0; k < count; k++) write(row, item, out, m, row.start[k], row.start[k + 1], k, sign, top);
        for (int64_t j = m; j < n; j++) out[call->sorted ? j : item[j].place()] = 0;
        if (!order) return;
        for (int64_t j = 0; j < n; j++) order[j] = (int32_t)(item[j].place() | (j < m ? 0 : FIRST_OF_BLOCK));
        for (int64_t k = 0; k < count; k++) order[row.start[k]] |= (int32_t)FIRST_OF_BLOCK;
    }

    template <class Item>
    void write(const OrderRow<T> &row, const Item *item, T *out, int64_t m, int64_t a, int64_t b, int64_t k, double sign, double top) const {
        const double size = (double)(b - a);
        if (call->kl) {
            const Block &block = row.block[k];
            if (call->sorted) {
                const double shift = top + block.base - block.top + log(block.w / block.z);
                for (int64_t j = a; j < b; j++) out[j] = (T)(sign * (row.z[j] + shift));
                return;
            }
            const double sum = size * ((double)m - 0.5 * (double)(a + b - 1));  // of the ranks m - a, ..., m - b + 1
            for (int64_t j = a; j < b; j++) out[item[j].place()] = (T)(b - a == 1 ? sum : exp(row.z[j] - block.top) * sum / block.z);
            return;
        }
        if (call->sorted) {
            double mean = 0.0;
            for (int64_t j = a; j < b; j++) mean += row.w[j] - row.w[a];
            mean = top + (row.w[a] + mean / size);
            for (int64_t j = a; j < b; j++) out[j] = (T)(sign * (mean + (0.5 * (double)(a + b - 1) - (double)j) / call->strength));
            return;
        }
        double mean = 0.0;
        const double rank = (double)m - 0.5 * (double)(a + b - 1);
        for (int64_t j = a; j < b; j++) mean += row.z[j] - row.z[a];
        mean = row.z[a] + mean / size;
        for (int64_t j = a; j < b; j++) out[item[j].place()] = (T)(rank + (row.z[j] - mean));
    }

    // J^T g of one row, from the order that `forward` has written; false: that is not what `order` holds.
    bool backward(const T *x, const T *p, const T *g, const int32_t *order, T *out) const {
        const int64_t n = call->n;
        uint32_t wrong = 0;
        for (int64_t j = 0; j < n; j++) wrong |= (uint32_t)(((uint32_t)order[j] & ~FIRST_OF_BLOCK) >= (uint64_t)n);
        if (wrong || !((uint32_t)order[0] & FIRST_OF_BLOCK)) return false;
        if (p[0] != p[0]) {
            for (int64_t i = 0; i < n; i++) out[i] = (T)NAN;
            return true;
        }
        const auto place = [order](int64_t j) { return (uint32_t)order[j] & ~FIRST_OF_BLOCK; };
        for (int64_t a = 0, b; a < n; a = b) {
            for (b = a + 1; b < n && !((uint32_t)order[b] & FIRST_OF_BLOCK);) b++;
            if (call->sorted)
                back_to_scores(x, g, place, a, b, out);
            else
                back_to_ranks(p, g, place, a, b, out);
        }
        return true;
    }

    template <class Place> void back_to_ranks(const T *p, const T *g, Place place, int64_t a, int64_t b, T *out) const {
        double sum = 0.0, size = (double)(b - a);
        if (call->kl) {
            size = 0.0;
            for (int64_t j = a; j < b; j++) {
                const double share = p[place(j)];
                size += share, sum += share != 0.0 ? share * (double)g[place(j)] : 0.0;
            }
        } else {
            for (int64_t j = a; j < b; j++) sum += g[place(j)];
        }
        const double mean = size > 0.0 ? sum / size : 0.0, scale = 1.0 / call->strength;
        for (int64_t j = a; j < b; j++) {
            const uint32_t i = place(j);
            const double share = call->kl ? (double)p[i] : 1.0;
            out[i] = (T)(b - a == 1 && g[i] - g[i] == 0 ? 0.0 : share * (((double)g[i] - mean) * scale));
        }
    }

    template <class Place> void back_to_scores(const T *x, const T *g, Place place, int64_t a, int64_t b, T *out) const {
        const double sign = call->descending ? 1.0 : -1.0, size = (double)(b - a);
        double sum = 0.0, all = 0.0;
        for (int64_t j = a; j < b; j++) sum += g[j];
        if (call->kl)
            for (int64_t j = a; j < b; j++) all += exp(sign * ((double)x[place(j)] - (double)x[place(a)]));
        for (int64_t j = a; j < b; j++) {
            const uint32_t i = place(j);
            const double share = call->kl ? exp(sign * ((double)x[i] - (double)x[place(a)])) / all : 1.0 / size;
            out[i] = x[i] == -(T)INFINITY ? (T)0 : (T)(sum * share);
        }
    }
};

}  // namespace ANYMAX_UNIT
