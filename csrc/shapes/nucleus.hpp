// Softmax over the nucleus, the fewest largest entries that hold a share of the mass.
#pragma once

#include "shapes/shortlist.hpp"
#include "shapes/support.hpp"

namespace ANYMAX_UNIT {

// Where the nucleus ends: the last of its scores, how many that are equal to it belong to it, whether those are all, and the
// exponentials of all of it.
template <class C>
struct Nucleus {
    C last;
    int64_t equal;
    bool all_equal;
    double mass;
};

// The fewest largest x whose weights e, with those of weight `beyond` that are larger than all, reach `goal`. All of x from low
// on, without high, are asked, and reach `at_low` at most. By weighing what reaches a level, within a bracket that is copied
// out as soon as it holds little.
template <class C>
inline Nucleus<C> weigh_down(const C *x, const C *e, int64_t n, double goal, double at_low, double beyond, C low, C high,
                             Scratch &scratch) {
    constexpr int64_t W = width<C>;
    const Nucleus<C> failed{C(0), 0, false, 0.0};
    double at_high = beyond;               // the mass of what reaches high
    int64_t many = n, few = 0, above = 0;  // and the numbers of these
    const C *a = x, *w = e;
    const Order<C> order(flushes<C>());
    for (int turn = 0; many - few > SORTED_MOST && !order.neighbours(low, high); turn++) {
        C middle = order.between(low, high, turn < 24 ? turn : 40);
        if (turn < 24 && turn % 3 != 2) {
            const C line = high + (low - high) * (C)((goal - at_high) / (at_low - at_high));
            if (line > low && line < high) middle = line;
        }
        const vec<C> t = splat(middle);
        vd wide{};
        ints<C> reach{};
        int64_t i = 0;
        for (; i + 4 * W <= n; i += 4 * W) {
            vec<C> part{};
            for (int64_t j = 0; j < 4; j++) {
                const ints<C> in = load(a + i + j * W) >= t;
                part += in ? load(w + i + j * W) : vec<C>{};
                reach -= in;
            }
            wide = widen_add(wide, part);
        }
        for (; i < n; i += W) {
            const ints<C> in = load_or(a, i, n, -infinity<C>) >= t;
            wide = widen_add(wide, in ? load_or(w, i, n, C(0)) : vec<C>{});
            reach -= in;
        }
        const double total = beyond + sum(wide);
        int64_t count = above;
        for (int64_t j = 0; j < W; j++) count += reach[j];
        if (total >= goal)
            low = middle, at_low = total, many = count;
        else
            high = middle, at_high = total, few = count;
        if ((many - few) * 8 > n) continue;
        C *values = scratch.take<C>(SORTED, n / 8 + W), *weights = scratch.take<C>(WIDE, n / 8 + W);
        if (scratch.failed) return failed;
        int64_t at = 0;
        for (i = 0; i < n; i += W) {
            const vec<C> v = load_or(a, i, n, -infinity<C>);
            for (uint32_t marked = bits((v >= low) & (v < high)); marked; marked &= marked - 1) {
                const int64_t k = i + __builtin_ctz(marked);
                const C value = a[k], weight = w[k];
                values[at] = value, weights[at++] = weight;
            }
        }
        a = values, w = weights, n = at, beyond = at_high, above = few;
    }
    if (many - few > SORTED_MOST) {  // all of them equal to low
        double each = 0.0;
        for (int64_t i = 0; i < n; i++) each = a[i] == low ? (double)w[i] : each;
        const double want = ::ceil((goal - at_high) / each), all_of_them = (double)(many - few);
        const double equal = want >= 1.0 ? (want < all_of_them ? want : all_of_them) : want < 1.0 ? 1.0 : all_of_them;
        return Nucleus<C>{low, (int64_t)equal, equal == all_of_them, at_high + equal * each};
    }
    C value[SORTED_MOST], weight[SORTED_MOST];
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!(a[i] >= low && a[i] < high)) continue;
        int64_t k = count++;
        for (; k > 0 && value[k - 1] < a[i]; k--) value[k] = value[k - 1], weight[k] = weight[k - 1];
        value[k] = a[i], weight[k] = w[i];
    }
    double total = at_high;
    int64_t equal = 0;
    for (int64_t i = 0; i < count; i++) {
        total += (double)weight[i];
        equal = i > 0 && value[i] == value[i - 1] ? equal + 1 : 1;
        if (total >= goal || i + 1 == count)
            return Nucleus<C>{value[i], equal, i + 1 == count || value[i + 1] < value[i], total};
    }
    return Nucleus<C>{high, n, true, at_high};  // by rounding
}

// The fewest largest x whose e = exp(x - top) reach `mass` < 1 of their sum z.
template <class C>
inline Nucleus<C> nucleus_end(const C *x, const C *e, int64_t n, double mass, double z, C top, Scratch &scratch,
                              const Team &team) {
    const double goal = mass * z,
                 left_out = (1.0 - mass) * z /
                            (double)n;  // all classes of less than an n-th of what the nucleus leaves out are left out
    if (n < WEIGHED_AT_ONCE || !(left_out > 1e-30)) {
        C low = top + (C)::log(left_out) - C(1e-3) - absolute(top) * C(1e-6);
        const C high = top + C(1e-3) + absolute(top) * C(1e-6), least = -largest_number<C>;
        return weigh_down(x, e, n, goal, z, 0.0, low < least ? least : low, high, scratch);
    }
    const Shortlist<C> few = shortlist(x, e, n, top, mass, z, (C)(left_out * (1.0 - 1e-5)), scratch, team);
    if (scratch.failed) return Nucleus<C>{C(0), 0, false, 0.0};
    const Order<C> order(flushes<C>());
    double inside = 0.0;
    C low = infinity<C>, high = -infinity<C>;
    for (int64_t i = 0; i < few.n; i++) {
        inside += (double)few.e[i];
        low = few.x[i] < low ? few.x[i] : low, high = larger(high, few.x[i]);
    }
    return weigh_down(few.x, few.e, few.n, goal, few.beyond + inside, few.beyond, low, order.number(order.place(high) + 1),
                      scratch);
}

// 0 in e for the scores that are equal to the last, but too many.
template <class C>
inline void leave_spare(const C *x, int64_t n, const Nucleus<C> &end, C *e) {
    int64_t left = end.equal;
    for (int64_t i = 0; !end.all_equal && i < n; i += width<C>)
        for (uint32_t marked = bits(load_or(x, i, n, -infinity<C>) == end.last); marked; marked &= marked - 1)
            if (--left < 0) e[i + __builtin_ctz(marked)] = C(0);
}

// Softmax over the nucleus, without candidates: its i-th vector, from the exponentials in e.
template <class C>
struct NucleusRow {
    const C *x;
    C *e;
    int64_t n;
    C high;
    double mass;  // the sum of the exponentials that stay
    vec<C> last, scale;

    ANYMAX_INLINE vec<C> operator()(int64_t i) const {
        return load_or(x, i, n, -infinity<C>) >= last ? load_or(e, i, n, C(0)) * scale : vec<C>{};
    }
};

// False where scores are no finite numbers, or all of the mass is asked for: its candidates serve it.
template <class C>
inline bool nucleus_row(const C *x, int64_t n, double mass, NucleusRow<C> &row, Scratch &scratch, const Team &team) {
    const auto [high, sound] = scan_top(x, n);
    if (!(mass < 1.0) || !sound || high == -infinity<C>) return false;
    C *e = scratch.take<C>(RESULT, n + width<C>);
    double *part = scratch.take<double>(PARTIAL, pieces_of(n)), z = 0.0;
    if (scratch.failed) return true;
    const C top = high;
    pieces(team, n, [&](int64_t k, int64_t begin, int64_t stop) { part[k] = exp_sum<C, true>(x, begin, stop, top, e); });
    for (int64_t k = 0; k < pieces_of(n); k++) z += part[k];
    const Nucleus<C> end = nucleus_end(x, e, n, mass, z, high, scratch, team);
    if (scratch.failed) return true;
    row = NucleusRow<C>{x, e, n, high, end.mass, splat(end.last), splat((C)(1.0 / end.mass))};
    leave_spare(x, n, end, e);
    return true;
}

// The fewest largest entries whose mass reaches `mass` of the whole.
template <class C>
inline Kept<C> nucleus_row(const C *x, int64_t n, double mass, Scratch &scratch, const Team &team) {
    Scan<C> s = scan(x, n, scratch, team);
    Kept<C> kept{nullptr, nullptr, 0, s.top, s.sound && mass == mass};
    if (!kept.sound || !kept.any() || scratch.failed) return kept;
    Candidates<C> c = collect_from(x, n, s, -infinity<C>, scratch);
    C *e = scratch.take<C>(EXTRA, c.count);
    if (scratch.failed) return kept;
    kept.value = c.value, kept.index = c.index, kept.count = c.count;
    const double z = exp_sum<C, true>(c.value, 0, c.count, s.top, e);
    if (mass >= 1.0) return kept;
    const Nucleus<C> end = nucleus_end(c.value, e, c.count, mass, z, s.top, scratch, team);
    if (!scratch.failed) kept.count = keep_first(c.value, c.index, c.count, end.last, end.equal);
    return kept;
}

// Of a nucleus, whose probabilities then lie in its e.
template <class C>
static void save_nucleus(const anymax_call &call, int64_t row, const NucleusRow<C> &nucleus, Scratch &scratch) {
    write(nucleus.e, 0, nucleus.n, false, nucleus);
    save_nonzeros(call, row, nucleus.e, scratch);
}

}  // namespace ANYMAX_UNIT
