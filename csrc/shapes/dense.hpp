// Maps whose every entry is positive, or that need sums of exponentials: softmax and its truncations, Taylor, sigsoftmax.
#pragma once

#include "core/rows.hpp"

namespace ANYMAX_UNIT {

// -- sums of exponentials ---------------------------------------------------------------------------------------------------

// sum exp(x - high) over [begin, end), blocks summed in C and then as doubles; with `keep`, the exponentials too. high is at least every x. `next`,
// in step with x, is asked for meanwhile.
template <class C, bool KEEP>
inline double exp_sum(const C *x, int64_t begin, int64_t end, C high, C *keep, const C *next = nullptr) {
    constexpr int64_t W = width<C>;
    const vec<C> m = splat(high);
    vd wide{};
    int64_t i = begin;
    while (i + 4 * W <= end) {
        vec<C> a{}, b{};
        for (int64_t stop = i + 16 * W <= end ? i + 16 * W : end; i + 4 * W <= stop; i += 4 * W) {
            vec<C> v[4];
            for (int j = 0; j < 4; j++) v[j] = load(x + i + j * W) - m;
            if (next)
                for (int j = 0; j < 4; j++) __builtin_prefetch(next + i + j * W, 0, 2);
            exp_below<4>(v);
            a += v[0] + v[1], b += v[2] + v[3];
            if (KEEP)
                for (int j = 0; j < 4; j++) store(keep + i + j * W, v[j]);
        }
        wide = widen_add(wide, a + b);
    }
    for (; i < end; i += W) {
        vec<C> p = load_or(x, i, end, -infinity<C>) - m;
        exp_below<1>(&p);
        wide = widen_add(wide, p);
        if (KEEP) {
            if (i + W <= end)
                store(keep + i, p);
            else
                store_part(keep + i, p, end - i);
        }
    }
    return sum(wide);
}

// to = exp(x - high) * factor over [begin, end).
template <class C>
inline void exp_write(C *to, const C *x, int64_t begin, int64_t end, C high, C factor, bool past) {
    constexpr int64_t W = width<C>;
    const vec<C> m = splat(high), scale = splat(factor);
    auto one = [&](int64_t i) ANYMAX_EACH {
        vec<C> p = load_or(x, i, end, -infinity<C>) - m;
        exp_below<1>(&p);
        return p * scale;
    };
    int64_t i = begin;
    if (past) {
        const int64_t lead = unaligned(to + i, end - i);
        if (lead) store_part(to + i, one(i), lead);
        i += lead;
    }
    for (; i + 4 * W <= end; i += 4 * W) {
        vec<C> v[4];
        for (int j = 0; j < 4; j++) v[j] = load(x + i + j * W) - m;
        exp_below<4>(v);
        for (int j = 0; j < 4; j++) {
            if (past)
                stream(to + i + j * W, v[j] * scale);
            else
                store(to + i + j * W, v[j] * scale);
        }
    }
    for (; i + W <= end; i += W) store(to + i, one(i));
    if (i < end) store_part(to + i, one(i), end - i);
}

template <class C>
struct Sums {
    C top;
    double z;  // sum exp(x - top)
    bool sound, any;
};

// The maximum and the sum of exponentials in one reading from memory: chunks that stay in the first cache, rescaled when the maximum rises.
template <class C>
inline Sums<C> running(const C *x, int64_t begin, int64_t end) {
    constexpr int64_t CHUNK = 16384 / sizeof(C);
    Sums<C> s{-infinity<C>, 0.0, true, false};
    for (int64_t i = begin; i < end; i += CHUNK) {
        int64_t e = i + CHUNK < end ? i + CHUNK : end;
        C high;
        bool sound;
        scan_top(x + i, e - i, high, sound);
        if (!sound) return Sums<C>{high, 0.0, false, true};
        if (high == -infinity<C>) continue;
        if (high > s.top) {
            s.z = s.any ? s.z * ::exp((double)s.top - (double)high) : 0.0;
            s.top = high;
            s.any = true;
        }
        s.z += exp_sum<C, false>(x, i, e, s.top, nullptr, e < end ? x + CHUNK : nullptr);  // the next chunk comes meanwhile
    }
    return s;
}

template <class C>
inline Sums<C> sums(const C *x, int64_t n, Scratch &scratch, const Team &team) {
    int64_t count = (n + PIECE - 1) / PIECE;
    if (count == 1) return running(x, 0, n);
    Sums<C> *part = scratch.take<Sums<C>>(PARTIAL, count);
    if (!part) return Sums<C>{};
    pieces(team, n, [&](int64_t k, int64_t b, int64_t e) { part[k] = running(x, b, e); });
    Sums<C> s{-infinity<C>, 0.0, true, false};
    for (int64_t k = 0; k < count; k++) {
        s.sound = s.sound && part[k].sound;
        s.any = s.any || part[k].any;
        s.top = larger(s.top, part[k].top);
    }
    for (int64_t k = 0; k < count && s.sound; k++)
        if (part[k].any) s.z += part[k].z * ::exp((double)part[k].top - (double)s.top);
    return s;
}

// A long row in pieces. By value: what f has seen of its caller stays in the caller's registers.
template <class C, class F>
__attribute__((noinline)) void emit_pieces(C *to, int64_t n, bool past, const Team &team, F f) {
    const auto piece = [=](int64_t k) { write(to, k * PIECE, k * PIECE + PIECE < n ? k * PIECE + PIECE : n, past, f); };
    const int64_t count = (n + PIECE - 1) / PIECE;
    (team.run ? team.run : alone)(0, count, 1, pieces_task<const decltype(piece)>, (void *)&piece);
}

// A dense row f(i) to the caller, through scratch where its layout or type is not C's. f may read only x.
template <class C, class F>
ANYMAX_INLINE void emit(const Sink<C> &out, Scratch &scratch, const Team &team, F f) {
    C *const to = out.direct ? out.direct : scratch.take<C>(RESULT, out.n);
    if (!to) return;
    if (out.n <= PIECE)
        write(to, 0, out.n, out.direct && out.past, f);
    else
        emit_pieces(to, out.n, out.direct && out.past, out.direct ? team : Team{nullptr}, f);
    if (!out.direct) deliver(out, (const C *)to);
}

// The same of f that reads of e its i-th vector alone: e then takes the results.
template <class C, class F>
ANYMAX_INLINE void emit_over(const Sink<C> &out, C *e, F f) {
    C *const to = out.direct ? out.direct : e;
    write(to, 0, out.n, out.direct && out.past, f);
    if (!out.direct) deliver(out, (const C *)to);
}

// exp(x - high) * factor as a row.
template <class C>
inline void exp_row(const C *x, C high, C factor, const Sink<C> &out, Scratch &scratch, const Team &team) {
    C *to = out.direct ? out.direct : scratch.take<C>(RESULT, out.n);
    if (!to) return;
    pieces(team, out.n, [&](int64_t, int64_t b, int64_t e) { exp_write(to, x, b, e, high, factor, out.direct && out.past); });
    if (to != out.direct) deliver(out, to);
}

// -- softmax ------------------------------------------------------------------------------------------------------------------------

template <class C>
inline void softmax_row(const C *x, int64_t n, const Sink<C> &out, bool logarithm, Scratch &scratch, const Team &team) {
    constexpr int64_t KEPT = 262144 / sizeof(C);  // rows whose exponentials are kept rather than computed twice
    if (!logarithm && n <= KEPT && n <= PIECE) {
        C high;
        bool sound;
        scan_top(x, n, high, sound);
        if (!sound) return fill(out, not_a_number<C>);
        if (high == -infinity<C>) return zeros(out, team);
        bool inplace = out.direct && !out.past && out.direct != x;
        C *e = inplace ? out.direct : scratch.take<C>(RESULT, n);
        if (!e) return;
        const vec<C> scale = splat((C)(1.0 / exp_sum<C, true>(x, 0, n, high, e, out.next)));
        return emit_over(out, e, [&](int64_t i) ANYMAX_EACH { return load_or(e, i, n, C(0)) * scale; });
    }
    Sums<C> s = sums(x, n, scratch, team);
    if (!s.sound) return fill(out, not_a_number<C>);
    if (!s.any) return logarithm ? fill(out, -infinity<C>) : zeros(out, team);
    const vec<C> high = splat(s.top);
    if (logarithm) {
        const vec<C> l = splat((C)::log(s.z));
        emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH { return (load_or(x, i, n, C(0)) - high) - l; });
    } else {
        exp_row(x, s.top, (C)(1.0 / s.z), out, scratch, team);
    }
}

// log sum exp(x), and with `rest`, the sum less the first maximum: 1 + rest keeps the digits of a small loss.
template <class C>
inline double lse_row(const C *x, int64_t n, double *rest, Scratch &scratch, const Team &team) {
    Sums<C> s = sums(x, n, scratch, team);
    if (!s.sound) return not_a_number<double>;
    if (!s.any) return -inf64;
    double more = s.z - 1.0;
    if (more < 1e-3) {
        more = 0.0;
        int64_t tied = -1;
        for (int64_t i = 0; i < n; i++) {
            if (x[i] == s.top)
                tied++;
            else
                more += ::exp((double)x[i] - (double)s.top);
        }
        more += (double)tied;
    }
    double l = ::log1p(more);
    if (rest) *rest = l;
    return (double)s.top + l;
}

// -- selection by counting: no sort, no branch on a comparison of scores ---------------------------------------------------------

template <class C>
inline int64_t count_from(const C *v, int64_t n, C limit) {  // entries >= limit
    constexpr int64_t W = width<C>;
    const vec<C> t = splat(limit);
    int64_t total = 0, i = 0;
    if (n <= 32 * W) {
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
ANYMAX_INLINE int64_t rank(float v) {
    int32_t b;
    __builtin_memcpy(&b, &v, 4);
    return b < 0 ? (int64_t)INT32_MIN - b : b;
}
ANYMAX_INLINE int64_t rank(double v) {
    int64_t b;
    __builtin_memcpy(&b, &v, 8);
    return b < 0 ? INT64_MIN - b : b;
}
ANYMAX_INLINE float unrank(int64_t r, float) {
    int32_t b = r < 0 ? (int32_t)(INT32_MIN - r) : (int32_t)r;
    float v;
    __builtin_memcpy(&v, &b, 4);
    return v;
}
ANYMAX_INLINE double unrank(int64_t r, double) {
    int64_t b = r < 0 ? INT64_MIN - r : r;
    double v;
    __builtin_memcpy(&v, &b, 8);
    return v;
}

template <class C>
ANYMAX_INLINE bool neighbours(C low, C high) {
    return (uint64_t)rank(high) - (uint64_t)rank(low) <= 1;
}
// A number between two that are no neighbours: their mean at first, then the one halfway in the order of all numbers, which ends.
template <class C>
ANYMAX_INLINE C between(C low, C high, int turn) {
    if (turn < 40) {
        C mean = low + (high - low) * C(0.5);
        if (mean > low && mean < high) return mean;
    }
    uint64_t a = (uint64_t)rank(low), b = (uint64_t)rank(high);
    return unrank((int64_t)(a + (b - a) / 2), C());
}

// A value t with k <= #(v >= t) <= k + slack; the k-th largest itself where ties allow no other. #(v >= low) = at_low >= k must hold, none is NaN.
// By counting: the next t is where a straight line through the counts meets k, now and then the middle.
template <class C>
inline C select(const C *v, int64_t n, int64_t k, int64_t slack, C low, int64_t at_low, C high) {
    int64_t at_high = count_from(v, n, high);
    if (at_high >= k) return high;
    if (at_low <= k + slack) return low;
    for (int turn = 0; turn < 200 && !neighbours(low, high); turn++) {
        C middle = between(low, high, turn < 24 ? turn : 40);
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
    return -top(-smaller(a, b));
}

// -- sparse softmax ---------------------------------------------------------------------------------------------------------------

// The kept entries of a row: their scores and indices, in the row's order.
template <class C>
struct Kept {
    C *value;
    int32_t *index;
    int64_t count;
    C top;
    bool sound, any;
};

// Of candidates that hold all entries above `edge` and all equal to it, keeps `room` of the equal ones, the first.
template <class C>
inline int64_t keep_first(C *value, int32_t *index, int64_t count, C edge, int64_t room) {
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        bool above = value[i] > edge, equal = value[i] == edge;
        bool in = above || (equal && room > 0);
        room -= equal && in;
        value[at] = value[i];
        index[at] = index[i];
        at += in;
    }
    return at;
}

// A bound that at least k entries reach (-inf where the cells know none), and how many cells do.
template <class C>
inline C reached_by(const Scan<C> &s, int64_t k) {
    const int64_t cells = s.count * width<C>;
    if (cells < k + k / 4) return -infinity<C>;
    const C least = -lanes_max(C());
    const int64_t real = count_from(s.cells, cells, least);
    if (real < k) return -infinity<C>;
    C low = lowest_of(s.cells, cells);
    if (low < least) low = least;
    return select(s.cells, cells, k, k / 4 + 2, low, real, s.top);
}

template <class C>
inline Kept<C> largest_row(const C *x, int64_t n, int64_t k, Scratch &scratch, const Team &team) {
    Scan<C> s = scan(x, n, scratch, team);
    Kept<C> kept{nullptr, nullptr, 0, s.top, s.sound, s.top != -infinity<C>};
    if (!s.sound || !kept.any || scratch.failed) return kept;
    C edge = -infinity<C>;
    if (k < n) edge = reached_by(s, k);
    Candidates<C> c = collect_from(x, n, s, edge, scratch);
    if (scratch.failed) return kept;
    kept.value = c.value, kept.index = c.index, kept.count = c.count;
    if (c.count > k) {
        edge = select(c.value, c.count, k, 0, edge == -infinity<C> ? lowest_of(c.value, c.count) : edge, c.count, s.top);
        int64_t above = 0;
        for (int64_t i = 0; i < c.count; i++) above += c.value[i] > edge;
        kept.count = keep_first(c.value, c.index, c.count, edge, k - above);
    }
    return kept;
}

// Softmax over the k largest of a short row of which they are a large part, without candidates. False where ties, or the shape, want the other way.
template <class C>
inline bool largest_dense(const C *x, int64_t n, int64_t k, const Sink<C> &out, Scratch &scratch) {
    constexpr int64_t W = width<C>;
    if (n > 128 * W || k * 8 < n || k >= n) return false;
    C high;
    bool sound;
    scan_top(x, n, high, sound);
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
    emit_over(out, e, [&](int64_t i) ANYMAX_EACH { return load_or(e, i, n, C(0)) * scale; });
    return true;
}

// Where the nucleus ends: the last of its scores, how many that are equal to it belong to it, whether those are all, and the exponentials of all of it.
template <class C>
struct Nucleus {
    C last;
    int64_t equal;
    bool all_equal;
    double mass;
};

// e = exp(x - top), z their sum, mass < 1. By weighing what reaches a level, within a bracket that is copied out as soon as it holds little.
template <class C>
inline Nucleus<C> nucleus_end(const C *x, const C *e, int64_t n, double mass, double z, C top_, Scratch &scratch) {
    constexpr int64_t W = width<C>, FEW = 16;
    const double goal = mass * z;
    const Nucleus<C> failed{C(0), 0, false, 0.0};
    // All classes of less than an n-th of what the nucleus leaves out are left out.
    C low = top_ + (C)::log((1.0 - mass) * z / (double)n) - C(1e-3) - absolute(top_) * C(1e-6), high = top_ + C(1e-3) + absolute(top_) * C(1e-6);
    const C least = -lanes_max(C());
    if (low < least) low = least;
    double at_low = z, at_high = 0.0, beyond = 0.0;  // the mass of what reaches low (at most), and high; and of what lies above all that is in a
    int64_t many = n, few = 0, above = 0;            // and the numbers of these
    const C *a = x, *w = e;
    for (int turn = 0; many - few > FEW && !neighbours(low, high); turn++) {
        C middle = between(low, high, turn < 24 ? turn : 40);
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
            for (uint32_t some = bits((v >= low) & (v < high)); some; some &= some - 1) {
                const int64_t k = i + __builtin_ctz(some);
                const C value = a[k], weight = w[k];
                values[at] = value, weights[at++] = weight;
            }
        }
        a = values, w = weights, n = at, beyond = at_high, above = few;
    }
    if (many - few > FEW) {  // all of them equal to low
        double each = 0.0;
        for (int64_t i = 0; i < n; i++) each = a[i] == low ? (double)w[i] : each;
        const double want = ::ceil((goal - at_high) / each), all_of_them = (double)(many - few);
        const double equal = want >= 1.0 ? (want < all_of_them ? want : all_of_them) : want < 1.0 ? 1.0 : all_of_them;
        return Nucleus<C>{low, (int64_t)equal, equal == all_of_them, at_high + equal * each};
    }
    C value[FEW], weight[FEW];
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
        if (total >= goal || i + 1 == count) return Nucleus<C>{value[i], equal, i + 1 == count || value[i + 1] < value[i], total};
    }
    return Nucleus<C>{high, n, true, at_high};  // by rounding
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

    ANYMAX_INLINE vec<C> operator()(int64_t i) const { return load_or(x, i, n, -infinity<C>) >= last ? load_or(e, i, n, C(0)) * scale : vec<C>{}; }
};

// False where scores that are no finite numbers, or all the mass, want another way.
template <class C>
inline bool nucleus_row(const C *x, int64_t n, double mass, NucleusRow<C> &row, Scratch &scratch) {
    C high;
    bool sound;
    scan_top(x, n, high, sound);
    if (!(mass < 1.0) || !sound || high == -infinity<C>) return false;
    C *e = scratch.take<C>(RESULT, n + width<C>);
    if (!e) return true;
    const double z = exp_sum<C, true>(x, 0, n, high, e);
    const Nucleus<C> end = nucleus_end(x, e, n, mass, z, high, scratch);
    if (scratch.failed) return true;
    row = NucleusRow<C>{x, e, n, high, end.mass, splat(end.last), splat((C)(1.0 / end.mass))};
    int64_t room = end.equal;
    for (int64_t i = 0; !end.all_equal && i < n; i += width<C>)
        for (uint32_t some = bits(load_or(x, i, n, -infinity<C>) == row.last); some; some &= some - 1)
            if (--room < 0) e[i + __builtin_ctz(some)] = C(0);
    return true;
}

// The fewest largest entries whose mass reaches `mass` of the whole.
template <class C>
inline Kept<C> nucleus_row(const C *x, int64_t n, double mass, Scratch &scratch, const Team &team) {
    Scan<C> s = scan(x, n, scratch, team);
    Kept<C> kept{nullptr, nullptr, 0, s.top, s.sound, s.top != -infinity<C>};
    if (!s.sound || !kept.any || scratch.failed) return kept;
    if (mass != mass) {
        kept.sound = false;
        return kept;
    }
    Candidates<C> c = collect_from(x, n, s, -infinity<C>, scratch);
    C *e = scratch.take<C>(EXTRA, c.count);
    if (scratch.failed) return kept;
    kept.value = c.value, kept.index = c.index, kept.count = c.count;
    const double z = exp_sum<C, true>(c.value, 0, c.count, s.top, e);
    if (mass >= 1.0) return kept;
    const Nucleus<C> end = nucleus_end(c.value, e, c.count, mass, z, s.top, scratch);
    if (!scratch.failed) kept.count = keep_first(c.value, c.index, c.count, end.last, end.equal);
    return kept;
}

// Softmax over what is kept: value becomes exp(x - top); returns their sum.
template <class C>
inline double exponentials(Kept<C> &kept) {
    return exp_sum<C, true>(kept.value, 0, kept.count, kept.top, kept.value);
}

// -- ratio maps -----------------------------------------------------------------------------------------------------------------------

constexpr int MAX_ORDER = 64;

// Horner's coefficients of f_k(x) / M^k in v = x / M: M^-(k-j) / j!. M is a power of two, so that v is exact; returns 1 / M.
template <class C>
inline C taylor_scale(const C *x, int64_t n, int order, C *coefficient) {
    constexpr int64_t W = width<C>;
    vec<C> size{};
    for (int64_t i = 0; i < n; i += W) {
        const vec<C> v = load_or(x, i, n, C(0));
        size = larger(size, v > -infinity<C> ? absolute(v) : vec<C>{});
    }
    const C most = top(size);
    int exponent = 0;
    if (most > C(4)) ::frexp((double)most * 0.25, &exponent);
    const C inverse = (C)::ldexp(1.0, -exponent);
    double s = (double)inverse, scale = 1.0, factorial = 1.0;
    for (int j = 2; j <= order; j++) factorial *= j;
    double term[MAX_ORDER + 1], whole = 0.0;
    for (int j = order; j >= 0; j--) {
        term[j] = scale / factorial;
        whole = whole * ((double)most * s) + term[j];
        scale *= s;
        if (j > 0) factorial /= j;
    }
    for (int j = 0; j <= order; j++) coefficient[j] = (C)(term[j] / whole);  // at most 1 at the largest score: 1/64! is no float
    return inverse;
}

template <class C>
ANYMAX_INLINE vec<C> taylor(vec<C> v, const C *coefficient, int order) {
    vec<C> y = splat(coefficient[order]);
    for (int j = order - 1; j >= 0; j--) y = y * v + coefficient[j];
    return y;
}

// u(x) up to a factor of the row, and u'(x) up to the same one.
template <class C>
struct TaylorWeight {
    C inverse;
    int order;
    C coefficient[MAX_ORDER + 1];

    TaylorWeight(const C *x, int64_t n, int k) : order(k) { inverse = taylor_scale(x, n, k, coefficient); }
    ANYMAX_INLINE vec<C> weight(vec<C> x) const {
        vec<C> in = x > -infinity<C> ? x : vec<C>{};
        vec<C> y = larger(taylor<C>(in * inverse, coefficient, order), vec<C>{});
        return x > -infinity<C> ? y : vec<C>{};
    }
    // f_k' = f_(k-1), whose coefficients in v are those of f_k shifted by one
    ANYMAX_INLINE vec<C> slope(vec<C> x) const {
        vec<C> in = (x > -infinity<C> ? x : vec<C>{}) * inverse;
        vec<C> y = splat(coefficient[order] * (C)order);
        for (int j = order - 1; j >= 1; j--) y = y * in + coefficient[j] * (C)j;
        return x > -infinity<C> ? y * inverse : vec<C>{};
    }
};

template <class C>
struct SigmoidWeight {
    C high, fold;  // the largest score, and what is taken off a negative one once more

    SigmoidWeight(C top_) : high(top_), fold(top_ < 0 ? top_ : C(0)) {}
    // x above 0 and 2 x below, less the same of the largest score: with log(1 + exp(-|x|)), log u
    ANYMAX_INLINE vec<C> bent(vec<C> x) const { return (x - high) + (x < vec<C>{} ? x - fold : vec<C>{}); }
    ANYMAX_INLINE vec<C> weight(vec<C> x) const {
        vec<C> a[2] = {-absolute(x), bent(x)};
        exp_below<2>(a);
        return a[1] / (a[0] + C(1));
    }
    ANYMAX_INLINE vec<C> slope(vec<C> x) const {  // u' = u (1 + sigmoid(-x))
        vec<C> e = exp(-absolute(x));
        vec<C> s = (x < vec<C>{} ? splat(C(1)) : e) / (e + C(1));
        vec<C> u = weight(x);
        return u * (s + C(1));
    }
    ANYMAX_INLINE vec<C> logarithm(vec<C> x) const {
        return bent(x) - log1p(exp(-absolute(x)));
    }
};

// f(the weights of a ratio map on this row, whose largest score is `high`).
template <class C, class F>
ANYMAX_INLINE void with_ratio(Link link, double param, const C *x, int64_t n, C high, F f) {
    if (link == TAYLOR) return f(TaylorWeight<C>(x, n, (int)param));
    return f(SigmoidWeight<C>(high));
}

template <class C, class U>
ANYMAX_INLINE double weight_sum(const C *x, int64_t n, const U &u, C *keep) {
    constexpr int64_t W = width<C>;
    vd wide{};
    int64_t i = 0;
    while (i + W <= n) {
        vec<C> block{};
        for (int64_t stop = i + 16 * W <= n ? i + 16 * W : n; i + W <= stop; i += W) {
            vec<C> v = u.weight(load(x + i));
            store(keep + i, v);
            block += v;
        }
        wide = widen_add(wide, block);
    }
    if (i < n) {
        vec<C> v = u.weight(load_or(x, i, n, -infinity<C>));
        store_part(keep + i, v, n - i);
        wide = widen_add(wide, v);
    }
    return sum(wide);
}

template <class C, class U>
inline void ratio_row(const C *x, int64_t n, const U &u, const Sink<C> &out, Scratch &scratch) {
    C *e = scratch.take<C>(RESULT, n);
    if (!e) return;
    double z = weight_sum(x, n, u, e);
    const vec<C> scale = splat((C)(z > 0.0 ? 1.0 / z : 0.0));
    emit_over(out, e, [&](int64_t i) ANYMAX_EACH { return load_or(e, i, n, C(0)) * scale; });
}

}  // namespace ANYMAX_UNIT
