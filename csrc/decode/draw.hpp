// Draws from the probabilities of what is left of a row, by their distribution function.
#pragma once

#include "core/families.hpp"
#include "decode/left.hpp"
#include "decode/steps.hpp"

namespace ANYMAX_UNIT {

// Weights of which classes are drawn: up to[k] is the sum of all up to the end of the k-th block.
template <class T>
struct Wheel {
    const T *weight;
    int64_t count, blocks;
    double *upto;
    double total() const { return blocks ? upto[blocks - 1] : 0.0; }
};

template <class T>
inline Wheel<T> wheel(const T *weight, int64_t count, Scratch &scratch) {
    constexpr int64_t W = width<T>;
    Wheel<T> out{weight, count, (count + DRAW_BLOCK - 1) / DRAW_BLOCK, nullptr};
    out.upto = scratch.take<double>(LEFT_SUMS, out.blocks);
    double total = 0.0;
    for (int64_t k = 0; k < out.blocks && out.upto; k++) {
        const int64_t begin = k * DRAW_BLOCK, end = begin + DRAW_BLOCK < count ? begin + DRAW_BLOCK : count;
        vd part{};
        for (int64_t i = begin; i < end; i += W) part = widen_add(part, load_or(weight, i, end, T(0)));
        out.upto[k] = total += sum(part);
    }
    return out;
}

// The first entry up to which the weights exceed the share u of their sum, never one of weight 0; -1 where all are 0.
template <class T>
inline int64_t turn(const Wheel<T> &wheel, double u) {
    const double goal = u * wheel.total();
    const int64_t low = first_not(wheel.blocks - 1, [&](int64_t block) { return !(wheel.upto[block] > goal); });
    const int64_t begin = low * DRAW_BLOCK, end = begin + DRAW_BLOCK < wheel.count ? begin + DRAW_BLOCK : wheel.count;
    double running = low ? wheel.upto[low - 1] : 0.0;
    int64_t last = -1;
    for (int64_t i = begin; i < end; i++) {
        if (!(wheel.weight[i] > T(0))) continue;
        running += (double)wheel.weight[i], last = i;
        if (running > goal) return i;
    }
    for (int64_t i = begin; last < 0 && i-- > 0;)
        last = wheel.weight[i] > T(0) ? i : -1;  // sums of the same, rounded otherwise
    return last;
}

// The exponentials of what is left; 0 for what is here and does not count.
template <class C>
inline C *exponentials(const Left<C> &l, Scratch &scratch) {
    constexpr int64_t W = width<C>;
    if (!l.ended) {
        C *e = scratch.take<C>(EXTRA, l.count + W);
        if (e) exp_sum<C, true>(l.value, 0, l.count, l.top, e);
        return e;
    }
    C *e = l.weight;
    const vec<C> last = splat(l.end.last);
    write(e, 0, l.count, false, [&](int64_t i) ANYMAX_EACH {
        return load_or(l.value, i, l.count, -infinity<C>) >= last ? load_or(e, i, l.count, C(0)) : vec<C>{};
    });
    leave_spare(l.value, l.count, l.end, e);
    return e;
}

// What is asked of a row: classes drawn, by draw(u), or given, and log_of(i) of each, by their places among `count` entries;
// `index` are the classes of the entries, in order (NULL: they are the places).
template <class F, class G>
inline void answers(const anymax_decode_call &call, int64_t row, int64_t count, const int32_t *index, F draw, G log_of) {
    for (int64_t d = row * call.draws; d < (row + 1) * call.draws; d++) {
        int64_t i = -1;
        if (!call.given) {
            i = draw(call.u[d]);
            call.index[d] = i < 0 ? -1 : index ? index[i] : i;
        } else if (const int64_t t = call.given[d]; t >= 0 && t < call.n) {
            i = index ? place_of(index, count, t) : t;
        }
        if (call.log_p) call.log_p[d] = i < 0 ? -inf64 : log_of(i);
    }
}

// The support of a row: those of its entries whose weight is above `least`; `index` as in `answers`.
template <class T>
inline void list(const anymax_decode_call &call, int64_t row, const T *weight, int64_t count, const int32_t *index, T least,
                 Scratch &scratch) {
    if (!call.listed) return;
    int32_t *to = call.listed + row * call.n;
    int64_t at = 0;
    if (!index) {
        const Candidates<T> c = nonzeros(weight, count, least, count, scratch);
        if (scratch.failed) return;
        at = c.count;
        if (at < call.n) memcpy(to, c.index, (size_t)at * sizeof(int32_t));
    } else {
        for (int64_t i = 0; i < count; i++) to[at] = index[i], at += weight[i] > least;
    }
    call.counts[row] = at;
}

// The same of a row that has no class.
inline void no_answers(const anymax_decode_call &call, int64_t row, bool sound) {
    for (int64_t d = row * call.draws; d < (row + 1) * call.draws; d++) {
        if (call.index) call.index[d] = -1;
        if (call.log_p) call.log_p[d] = sound ? -inf64 : not_a_number<double>;
    }
    if (call.entropy) call.entropy[row] = sound ? 0.0 : not_a_number<double>;
    if (call.tau) call.tau[row] = sound ? -inf64 : not_a_number<double>;
    if (call.listed) call.counts[row] = 0;
}

// Which classes are left: inside(i) of all of the row, or the entries of a list. Of a row without a number all but those of
// -inf. `to` may be the memory that value(i) reads: each is read before it is written; the values of a list are read first,
// into `held`.
template <class T, class F, class G>
inline void mark(T *to, int64_t n, T out, const int32_t *index, int64_t count, F inside, G value, T *held) {
    if (!to) return;
    if (!index) {
        for (int64_t i = 0; i < n; i++) {
            const T v = value(i);
            to[i] = inside(i) ? v : out;
        }
        return;
    }
    for (int64_t i = 0; i < count && held; i++) held[i] = value(index[i]);
    for (int64_t i = 0; i < n; i++) to[i] = out;
    for (int64_t i = 0; i < count; i++) to[index[i]] = held ? held[i] : value(index[i]);
}

template <class C>
inline void mark_left(const anymax_decode_call &call, int64_t row, const C *x, const Left<C> &l, bool sound, Scratch &scratch) {
    C *left = call.left ? (C *)call.left + row * call.n : nullptr;
    const bool all = !sound || (!l.index && !l.ended), in_place = left == x;
    if (in_place && all) left = nullptr;  // nothing changes
    if (!call.keep && !left) return;
    uint8_t *keep = call.keep ? call.keep + row * call.n : nullptr;
    C *held = in_place && l.index ? scratch.take<C>(LEFT_KEYS, l.count) : nullptr;
    if (scratch.failed) return;
    const auto both = [&](const int32_t *index, auto inside) {
        mark(keep, call.n, (uint8_t)0, index, l.count, inside, [](int64_t) { return (uint8_t)1; }, (uint8_t *)nullptr);
        mark(left, call.n, -infinity<C>, index, l.count, inside, [=](int64_t i) { return x[i]; }, held);
    };
    if (all) return both(nullptr, [=](int64_t i) { return !(x[i] == -infinity<C>); });
    if (!l.ended) return both(l.index, [](int64_t) { return true; });
    const C *e = l.end.all_equal ? nullptr : exponentials(l, scratch), *v = l.value;
    const C last = l.end.last;
    if (!e) return both(nullptr, [=](int64_t i) { return v[i] >= last; });
    both(nullptr, [=](int64_t i) { return (v[i] > last) | ((v[i] == last) & (e[i] > C(0))); });
}

template <class C>
inline void decode_row(const anymax_decode_call &call, int64_t row, Link link, Scratch &scratch) {
    const char *at = (const char *)call.x + row * call.stride * anymax_item(call.dtype);
    const int64_t n = call.n;
    const C *x = stage<C>(at, 1, call.dtype, nullptr, 0, n, scratch, STAGED);
    if (scratch.failed) return;
    Left<C> l = all_of(x, n, scratch);
    const bool sound = l.cells.sound && l.top != -infinity<C>;
    for (int64_t k = 0; k < call.count && sound && !scratch.failed; k++) {
        const StepRow &range = STEPS[call.steps[k].kind];
        // checked, but perhaps written to since
        const double value = call.values ? call.values[row * call.count + k] : call.steps[k].value;
        take(l, call.steps[k], value >= range.least ? value <= range.most ? value : range.most : range.least, scratch);
    }
    if (scratch.failed) return;
    mark_left(call, row, x, l, l.cells.sound, scratch);
    if ((!call.draws && !call.entropy && !call.tau && !call.listed) || scratch.failed) return;
    if (!sound) return no_answers(call, row, l.cells.sound);
    warm(l, scratch);
    if (link == EXPONENTIAL) {
        const bool drawn = call.draws && !call.given;
        const C *e = drawn || l.ended || call.entropy || call.listed ? exponentials(l, scratch) : nullptr;
        if (scratch.failed) return;
        const Wheel<C> w = e ? wheel(e, l.count, scratch) : Wheel<C>{};
        if (scratch.failed) return;
        const double total = e ? w.total() : exp_sum<C, false>(l.value, 0, l.count, l.top, nullptr), log_total = ::log(total);
        if (call.tau) call.tau[row] = (double)l.top + l.offset + log_total;
        if (call.entropy) call.entropy[row] = log_total - drift_of(l, e) / total;
        list(call, row, e, l.count, l.index, C(0), scratch);
        if (scratch.failed) return;
        return answers(
            call, row, l.count, l.index, [&](double u) { return turn(w, u); },
            [&](int64_t i) {
                const bool in = l.ended ? e[i] > C(0) : l.value[i] > -infinity<C>;
                return in ? (double)l.value[i] - (double)l.top - log_total : -inf64;
            });
    }
    settle(l, scratch);
    const int32_t *classes = nullptr;
    const C *scores = l.value;
    if (l.index) {  // where the map's own candidates go
        C *copy = scratch.take<C>(LEFT_KEYS, l.count + width<C>);
        int32_t *index = scratch.take<int32_t>(LEFT_CLASSES, l.count);
        if (scratch.failed) return;
        memcpy(copy, l.value, (size_t)l.count * sizeof(C));
        memcpy(index, l.index, (size_t)l.count * sizeof(int32_t));
        scores = copy, classes = index;
    }
    const Support<C> found = row_support(link, call.param, scores, l.count, scratch);
    if (scratch.failed) return;
    if (!found.sound || !found.any) return no_answers(call, row, found.sound);
    const Wheel<double> w = wheel(found.p, found.count, scratch);
    int32_t *index = classes ? (int32_t *)classes : scratch.take<int32_t>(LEFT_CLASSES, found.count);
    if (scratch.failed) return;
    for (int64_t i = 0; i < found.count; i++)
        index[i] = classes ? classes[found.index[i]] : found.index[i];  // in order: none is read after it was written
    list(call, row, found.p, found.count, index, call.dtype == ANYMAX_F64 ? 0.0 : vanishing(ANYMAX_F32), scratch);
    const double total = w.total();  // of a budget k, and one of its classes is drawn
    if (call.tau) call.tau[row] = found.tau + l.offset;
    if (call.entropy) {
        double entropy = 0.0;
        for (int64_t i = 0; i < found.count; i++)
            entropy -= found.p[i] > 0.0 ? found.p[i] / total * ::log(found.p[i] / total) : 0.0;
        call.entropy[row] = entropy;
    }
    answers(
        call, row, found.count, index, [&](double u) { return turn(w, u); },
        [&](int64_t i) { return found.p[i] > 0.0 ? ::log(found.p[i] / total) : -inf64; });
}

}  // namespace ANYMAX_UNIT
