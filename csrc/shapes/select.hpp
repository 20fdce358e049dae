// Selection by counting: no sort, no branch on a comparison of scores. Softmax over the k largest.
#pragma once

#include "shapes/exponentials.hpp"

namespace ANYMAX_UNIT {

template <class C>
inline int64_t count_from(const C *v, int64_t n, C limit) {  // entries >= limit
    constexpr int64_t W = width<C>;
    const vec<C> t = splat(limit);
    int64_t total = 0, i = 0;
    if (n <= COUNTED_IN_BITS<C>) {
        for (; i + W <= n; i += W) total += __builtin_popcount(bits(load(v + i) >= t));
        if (i < n) total += __builtin_popcount(bits(load_or(v, i, n, -infinity<C>) >= t));
        return total;
    }
    while (i + W <= n) {
        ints<C> a{}, b{}, c{}, d{};
        int64_t end = n - i > (int64_t)4096 * W ? i + (int64_t)4096 * W : n;
        for (; i + 4 * W <= end; i += 4 * W) {
            a += load(v + i) >= t;
            b += load(v + i + W) >= t;
            c += load(v + i + 2 * W) >= t;
            d += load(v + i + 3 * W) >= t;
        }
        for (; i + W <= end; i += W) a += load(v + i) >= t;
        a = (a + b) + (c + d);
        for (int64_t k = 0; k < W; k++) total -= a[k];
    }
    for (; i < n; i++) total += v[i] >= limit;
    return total;
}

// Floating-point numbers in their order, as integers.
template <class C>
ANYMAX_INLINE int64_t rank(C v) {
    const int64_t b = bits_as<typename lanes_of<C>::integer>(v);
    return b < 0 ? (sizeof(C) == 4 ? INT32_MIN : INT64_MIN) - b : b;
}
template <class C>
ANYMAX_INLINE C unrank(int64_t r) {
    return bits_as<C>((typename lanes_of<C>::integer)(r < 0 ? (sizeof(C) == 4 ? INT32_MIN : INT64_MIN) - r : r));
}

// A thread may take all numbers next to 0 for 0, as those of XLA do.
template <class C>
inline bool flushes() {
    volatile C least = std::numeric_limits<C>::denorm_min();
    return !(least > C(0));
}

// The order of the numbers that a thread tells apart.
template <class C>
struct Order {
    int64_t flushed;  // how many above 0 it takes for 0

    explicit Order(bool flush) : flushed(flush ? rank(std::numeric_limits<C>::min()) - 1 : 0) {}
    int64_t place(C v) const {
        const int64_t r = rank(v);
        return r > flushed ? r - flushed : r < -flushed ? r + flushed : 0;
    }
    C number(int64_t at) const { return unrank<C>(at > 0 ? at + flushed : at < 0 ? at - flushed : 0); }
    bool neighbours(C low, C high) const { return (uint64_t)place(high) - (uint64_t)place(low) <= 1; }
    // A number between two that are no neighbours: their mean at first, then the one halfway in this order, which ends.
    C between(C low, C high, int turn) const {
        if (turn < 40) {
            C mean = low + (high - low) * C(0.5);
            if (mean > low && mean < high) return mean;
        }
        const uint64_t a = (uint64_t)place(low), b = (uint64_t)place(high);
        return number((int64_t)(a + (b - a) / 2));
    }
};

// A value t with k <= #(v >= t) <= k + slack; the k-th largest itself where ties allow no other. #(v >= low) = at_low >= k must
// hold, none is NaN. By counting: the next t is where a straight line through the counts meets k, now and then the middle.
template <class C>
inline C select(const C *v, int64_t n, int64_t k, int64_t slack, C low, int64_t at_low, C high) {
    int64_t at_high = count_from(v, n, high);
    if (at_high >= k) return high;
    if (at_low <= k + slack) return low;
    const Order<C> order(flushes<C>());
    for (int turn = 0; turn < 200 && !order.neighbours(low, high); turn++) {
        C middle = order.between(low, high, turn < 24 ? turn : 40);
        if (turn < 24 && turn % 3 != 2) {
            C part = (C)((double)(at_low - k) - 0.5 * (double)slack) / (C)(at_low - at_high);
            C line = low + (high - low) * part;
            if (line > low && line < high) middle = line;
        }
        int64_t c = count_from(v, n, middle);
        if (c >= k) {
            low = middle, at_low = c;
            if (c <= k + slack) return low;
        } else {
            high = middle, at_high = c;
        }
    }
    return low;
}

template <class C>
inline C lowest_of(const C *v, int64_t n) {
    constexpr int64_t W = width<C>;
    vec<C> a = splat(infinity<C>), b = a;
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) a = smaller(a, load(v + i)), b = smaller(b, load(v + i + W));
    for (; i < n; i += W) a = smaller(a, load_or(v, i, n, infinity<C>));
    return lowest_lane(smaller(a, b));
}

// The kept entries of a row: their scores and indices, in the row's order.
template <class C>
struct Kept {
    C *value;
    int32_t *index;
    int64_t count;
    C top;
    bool sound;

    bool any() const { return top > -infinity<C>; }
};

// Of candidates that hold all entries above `edge` and all equal to it, keeps `left` of the equal ones, the first.
template <class C>
inline int64_t keep_first(C *value, int32_t *index, int64_t count, C edge, int64_t left) {
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        bool above = value[i] > edge, equal = value[i] == edge;
        bool in = above || (equal && left > 0);
        left -= equal && in;
        value[at] = value[i];
        index[at] = index[i];
        at += in;
    }
    return at;
}

// The same of the k largest, the last of which is at the edge.
template <class C>
inline int64_t keep_largest(const Candidates<C> &c, C edge, int64_t k) {
    int64_t above = 0;
    for (int64_t i = 0; i < c.count; i++) above += c.value[i] > edge;
    return keep_first(c.value, c.index, c.count, edge, k - above);
}

// A bound that at least k entries reach (-inf where the cells know none), and how many cells do.
template <class C>
inline C reached_by(const Scan<C> &s, int64_t k) {
    const int64_t cells = s.count * width<C>;
    if (cells < k + k / 4) return -infinity<C>;
    const C least = -largest_number<C>;
    const int64_t real = count_from(s.cells, cells, least);
    if (real < k) return -infinity<C>;
    C low = lowest_of(s.cells, cells);
    if (low < least) low = least;
    return select(s.cells, cells, k, k / 4 + 2, low, real, s.top);
}

template <class C>
inline Kept<C> largest_row(const C *x, int64_t n, int64_t k, Scratch &scratch, const Team &team) {
    Scan<C> s = scan(x, n, scratch, team);
    Kept<C> kept{nullptr, nullptr, 0, s.top, s.sound};
    if (!s.sound || !kept.any() || scratch.failed) return kept;
    C edge = -infinity<C>;
    if (k < n) edge = reached_by(s, k);
    Candidates<C> c = collect_from(x, n, s, edge, scratch);
    if (scratch.failed) return kept;
    kept.value = c.value, kept.index = c.index, kept.count = c.count;
    if (c.count > k) {
        edge = select(c.value, c.count, k, 0, edge == -infinity<C> ? lowest_of(c.value, c.count) : edge, c.count, s.top);
        kept.count = keep_largest(c, edge, k);
    }
    return kept;
}

constexpr int64_t SORTED_BY_INSERTION = 24;  // the most entries

// to(place, value, index) of what is kept, the largest first, equal ones by their place in the row, in whose order they are
// here. They are moved.
template <class C, class F>
inline void in_order(Kept<C> &kept, F to) {
    C *v = kept.value;
    int32_t *index = kept.index;
    const int64_t size = kept.count;
    if (size <= SORTED_BY_INSERTION) {
        for (int64_t i = 1; i < size; i++) {
            const C w = v[i];
            const int32_t m = index[i];
            int64_t j = i;
            for (; j > 0 && v[j - 1] < w; j--) v[j] = v[j - 1], index[j] = index[j - 1];
            v[j] = w, index[j] = m;
        }
        for (int64_t i = 0; i < size; i++) to(i, v[i], index[i]);
        return;
    }
    auto before = [&](C a, int32_t i, C b, int32_t j) { return a > b || (a == b && i < j); };  // a heap
    auto sift = [&](int64_t i, int64_t end) {
        C w = v[i];
        int32_t m = index[i];
        for (int64_t child; (child = 2 * i + 1) < end; i = child) {
            if (child + 1 < end && before(v[child + 1], index[child + 1], v[child], index[child])) child++;
            if (!before(v[child], index[child], w, m)) break;
            v[i] = v[child], index[i] = index[child];
        }
        v[i] = w, index[i] = m;
    };
    for (int64_t i = size / 2 - 1; i >= 0; i--) sift(i, size);
    int64_t i = 0;
    for (int64_t left = size; left > 0; i++) {
        to(i, v[0], index[0]);
        left--;
        v[0] = v[left], index[0] = index[left];
        if (left) sift(0, left);
    }
}

// Softmax over what is kept: value becomes exp(x - top); returns their sum.
template <class C>
inline double exponentials(Kept<C> &kept) {
    return exp_sum<C, true>(kept.value, 0, kept.count, kept.top, kept.value);
}

// Softmax over the k largest of a short row of which they are a large part, without candidates. False where ties, or the shape,
// ask for candidates.
template <class C>
inline bool largest_dense(const C *x, int64_t n, int64_t k, const Sink<C> &out, Scratch &scratch) {
    constexpr int64_t W = width<C>;
    const auto [high, sound] = scan_top(x, n);
    if (!sound || high == -infinity<C>) return false;
    C low = lowest_of(x, n);
    if (low == -infinity<C>) return false;
    const C edge = select(x, n, k, 0, low, n, high);
    if (count_from(x, n, edge) != k) return false;
    C *e = scratch.take<C>(RESULT, n);
    if (!e) return true;
    const vec<C> m = splat(high), t = splat(edge);
    vd wide{};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        vec<C> v[4], w[4], block{};
        for (int j = 0; j < 4; j++) w[j] = load(x + i + j * W), v[j] = w[j] - m;
        exp_below<4>(v);
        for (int j = 0; j < 4; j++) {
            v[j] = w[j] >= t ? v[j] : vec<C>{};
            block += v[j];
            store(e + i + j * W, v[j]);
        }
        wide = widen_add(wide, block);
    }
    for (; i < n; i += W) {
        vec<C> w = load_or(x, i, n, -infinity<C>), v = w - m;
        exp_below<1>(&v);
        v = w >= t ? v : vec<C>{};
        wide = widen_add(wide, v);
        store_part(e + i, v, n - i < W ? n - i : W);
    }
    const vec<C> scale = splat((C)(1.0 / sum(wide)));
    emit_over(out, e, [=](int64_t i) ANYMAX_EACH { return load_or(e, i, n, C(0)) * scale; });
    return true;
}

}  // namespace ANYMAX_UNIT
