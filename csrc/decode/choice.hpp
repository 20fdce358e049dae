// A router's choice: the classes with the k largest scores, of the groups with the largest sums.
#pragma once

#include "shapes/select.hpp"

namespace ANYMAX_UNIT {

// The sum of a group's `most` largest scores, the largest first; -inf where none is above it. best: memory for `most` scores.
template <class C>
inline C sum_of_largest(const C *v, int64_t n, int64_t most, C *best) {
    constexpr int64_t W = width<C>;
    if (most > 2) {
        int64_t held = 0;
        for (int64_t i = 0; i < n; i++) {
            const C w = v[i];
            if (w == -infinity<C> || (held == most && !(w > best[held - 1]))) continue;
            int64_t j = held < most ? held++ : held - 1;
            for (; j > 0 && best[j - 1] < w; j--) best[j] = best[j - 1];
            best[j] = w;
        }
        C sum = held ? best[0] : -infinity<C>;
        for (int64_t i = 1; i < held; i++) sum += best[i];
        return sum;
    }
    vec<C> first = splat(-infinity<C>), second = first;  // of each lane
    for (int64_t i = 0; i < n; i += W) {
        const vec<C> w = load_or(v, i, n, -infinity<C>);
        second = larger(second, smaller(first, w));
        first = larger(first, w);
    }
    const C high = highest_lane(first);
    if (most == 1 || high == -infinity<C>) return high;
    const ints<C> there = first == splat(high);
    const C next = __builtin_popcount(bits(there)) > 1 ? high : highest_lane(there ? second : first);
    return next == -infinity<C> ? high : high + next;
}

// The scores of the groups that are kept, side by side in the row's order, and how many: part j of them is group which[j].
template <class C>
inline int64_t of_kept_groups(const anymax_choice_call &call, const C *x, const C *&kept, const int32_t *&which,
                              Scratch &scratch) {
    const int64_t size = call.n / call.groups;
    C *sums = scratch.take<C>(LEFT_KEYS, call.groups), *best = scratch.take<C>(EXTRA, call.most),
      *to = scratch.take<C>(LEFT_SCORES, call.kept * size + width<C>);
    int32_t *part = scratch.take<int32_t>(LEFT_CLASSES, call.groups);
    if (scratch.failed) return 0;
    for (int64_t g = 0; g < call.groups; g++) sums[g] = sum_of_largest(x + g * size, size, call.most, best), part[g] = 0;
    for (int64_t turn = 0; turn < call.kept; turn++) {
        int64_t first = -1;
        for (int64_t g = 0; g < call.groups; g++)
            if (sums[g] > (first < 0 ? -infinity<C> : sums[first])) first = g;
        if (first < 0) break;
        sums[first] = -infinity<C>, part[first] = 1;
    }
    int64_t count = 0;
    for (int64_t g = 0; g < call.groups; g++)
        if (part[g]) {
            memcpy(to + count * size, x + g * size, (size_t)size * sizeof(C));
            part[count++] = (int32_t)g;
        }
    kept = to, which = part;
    return count * size;
}

// The k largest of a row with +inf, one after the other.
template <class C>
inline void choose_one_by_one(const C *x, int64_t n, int64_t k, int64_t *index) {
    C last = infinity<C>;
    int64_t place = -1;
    for (int64_t j = 0; j < k; j++) {
        int64_t found = -1;
        for (int64_t i = 0; i < n; i++)
            if ((x[i] < last || (x[i] == last && i > place)) && x[i] > (found < 0 ? -infinity<C> : x[found])) found = i;
        index[j] = found;
        if (found < 0) {
            while (++j < k) index[j] = -1;
            return;
        }
        last = x[found], place = found;
    }
}

template <class C>
inline void choose_row(const anymax_choice_call &call, int64_t row, Scratch &scratch) {
    const int64_t k = call.k, size = call.n / call.groups;
    int64_t *index = call.index + row * k, n = call.n;
    const C *x =
        stage<C>((const char *)call.x + row * n * anymax_item(call.dtype), 1, call.dtype, nullptr, 0, n, scratch, STAGED);
    if (scratch.failed) return;
    bool nan = false;
    if (!scan_top(x, n).sound)
        for (int64_t i = 0; i < n; i++) nan |= x[i] != x[i];
    const int32_t *which = nullptr;
    if (!nan && call.kept < call.groups) n = of_kept_groups(call, x, x, which, scratch);
    if (scratch.failed) return;
    for (int64_t i = 0; i < k; i++) index[i] = -1;
    if (nan || !n) return;
    Kept<C> kept = largest_row(x, n, k, scratch, Team{nullptr});
    if (scratch.failed) return;
    if (!kept.sound)
        choose_one_by_one(x, n, k, index);
    else if (kept.any())
        in_order(kept, [=](int64_t place, C v, int32_t i) { index[place] = v > -infinity<C> ? i : -1; });
    for (int64_t i = 0; i < k && which && index[i] >= 0; i++) index[i] = which[index[i] / size] * size + index[i] % size;
}

}  // namespace ANYMAX_UNIT
