// Fusedmax: sparsemax of a row after total variation denoising, whose segments are the groups of the row.
#pragma once

#include <string.h>

#include "core/memory.hpp"
#include "fused/denoise.hpp"

namespace ANYMAX_UNIT {

constexpr double STRONGEST = 1e150;  // a larger strength counts as this, so that sums are finite

// One operation on rows.
template <class T>
class FusedRow {
    double *value = nullptr;                   // of a place, then of a group
    int32_t *next = nullptr;                   // of the first place of a group: that of the next group
    int32_t *there = nullptr;                  // the classes that are not masked, where others are
    int32_t *some = nullptr, *more = nullptr;  // for the hulls; then groups that may have p > 0

    static bool masked(T x) { return !(x > -(T)INFINITY); }

  public:
    bool take(Room &room, int64_t n) {
        Arena arena{nullptr, 0};
        for (int pass = 0; pass < 2; pass++) {
            arena.take(n, value);
            arena.take(n + 1, next, there, some, more);
            if (pass) break;
            char *base = room.take<char>(arena.used);
            if (!base) return false;
            arena = Arena{base, 0};
        }
        return true;
    }

    // p of one row, and 0 in `begins`, unless it is NULL, where a class continues a group of p > 0, else 1.
    void forward(const T *x, int64_t n, double strength, T *out, uint8_t *begins) {
        constexpr int SIDE = 64 / sizeof(T);  // numbers of which the compiler makes vectors
        T tops[SIDE];
        int32_t lost[SIDE] = {}, without[SIDE] = {};
        for (T &top : tops) top = -(T)INFINITY;
        const auto look = [&](const T *x, int count) {
            for (int k = 0; k < count; k++) {
                const T v = x[k];
                tops[k] = v > tops[k] ? v : tops[k], lost[k] |= !(v < (T)INFINITY), without[k] += !(v > -(T)INFINITY);
            }
        };
        int64_t looked = 0;
        for (; looked + SIDE <= n; looked += SIDE) look(x + looked, SIDE);
        look(x + looked, (int)(n - looked));
        T top = -(T)INFINITY;
        bool poisoned = !(strength >= 0.0 && strength < (double)INFINITY);
        int64_t m = n;
        for (int k = 0; k < SIDE; k++) top = tops[k] > top ? tops[k] : top, poisoned |= lost[k], m -= without[k];
        if (begins) memset(begins, 1, (size_t)n);
        if (poisoned || !m) {
            for (int64_t i = 0; i < n; i++) out[i] = poisoned ? (T)NAN : (T)0;
            return;
        }
        memset(out, 0, (size_t)n * sizeof(T));
        strength = strength < STRONGEST ? strength : STRONGEST;
        // far below the largest score p is 0, as in the whole group: such a score counts as nearer
        const double floor = -4.0 * (double)n * (1.0 + strength);
        const bool all = m == n;
        for (int64_t i = 0, place = 0; !all && i < n; i++)
            if (!masked(x[i])) there[place++] = (int32_t)i;
        const auto class_of = [all, there = there](int64_t place) { return all ? place : (int64_t)there[place]; };
        const auto relative = [=](T v) {
            const double y = (double)v - (double)top;
            return y < floor ? floor : y;
        };
        const auto at = [=](int64_t place) { return relative(x[class_of(place)]); };
        if (all)
            for (int64_t i = 0; i < n; i++) value[i] = relative(x[i]);
        else
            for (int64_t place = 0; place < m; place++) value[place] = at(place);
        Denoised denoised(value, next, some, more);
        denoised.run(m, strength);
        const int64_t groups = candidates(m, denoised.top, strength, at);
        const double tau = threshold(groups);
        for (int64_t k = 0; k < groups; k++) {
            const int64_t from = some[k], to = next[from];
            if (!(value[from] > tau)) continue;
            for (int64_t place = from; place < to; place++) {
                out[class_of(place)] = (T)(value[from] - tau);
                if (begins && place > from) begins[class_of(place)] = 0;
            }
        }
    }

    // J^T g of one row; returns the product of g with the derivative by the strength.
    static double backward(const T *x, const T *p, const T *g, const uint8_t *begins, int64_t n, T *out) {
        if (p[0] != p[0]) {
            for (int64_t i = 0; i < n; i++) out[i] = (T)NAN;
            return NAN;
        }
        double sum = 0.0;
        int64_t count = 0;
        for (int64_t i = 0; i < n; i++)
            if (p[i] > (T)0) sum += (double)g[i], count++;
        memset(out, 0, (size_t)n * sizeof(T));
        const double mean = sum / (double)(count ? count : 1);
        // Groups beside each other approach each other; another class before or behind one has the gradient 0.
        double slope = 0.0, before = 0.0;
        int64_t last = -1;  // the last class of the group before, whose gradient is `before`
        for (int64_t i = 0; i < n;) {
            if (!(p[i] > (T)0)) {
                i++;
                continue;
            }
            int64_t beside = i - 1, end = i;
            while (beside > last && masked(x[beside])) beside--;
            const auto approach = [&](int64_t above, int64_t below, double change) {
                slope += x[above] > x[below] ? change : -change;
            };
            if (last >= 0 && beside > last) approach(last, behind(x, last, n), -before);
            const int64_t first = i;
            double own = 0.0;
            int64_t places = 0;
            for (; i < n && (i == first || masked(x[i]) || (!begins[i] && p[i] > (T)0)); i++) {
                if (masked(x[i])) continue;
                own += (double)g[i], places++, end = i;
            }
            const double share = own / (double)places - mean;
            for (int64_t j = first; j <= end; j++)
                if (!masked(x[j])) out[j] = (T)share;
            if (beside >= 0) approach(beside, first, beside > last ? share : share - before);
            before = share, last = end;
        }
        const int64_t behind_last = last < 0 ? n : behind(x, last, n);
        if (behind_last < n) slope += x[last] > x[behind_last] ? -before : before;
        return slope;
    }

  private:
    // The next class that is not masked, n where there is none.
    static int64_t behind(const T *x, int64_t i, int64_t n) {
        for (i++; i < n && masked(x[i]); i++) {
        }
        return i;
    }

    // The groups that may have p > 0, by their first places in `some`, and their values; how many there are.
    template <class At>
    int64_t candidates(int64_t m, double top, double strength, At at) {
        const double least = top - 2.0 - 1e-9 * fabs(top);  // by 1 and what the string's slopes are wrong by
        int64_t count = 0;
        for (int64_t from = 0; from < m; from = next[from])
            if (value[from] >= least) some[count++] = (int32_t)from;
        for (int64_t k = 0; k < count; k++) {
            const int64_t from = some[k], to = next[from];
            double sum = 0.0, pull = 0.0;  // by each of the groups beside it
            for (int64_t place = from; place < to; place++) sum += at(place);
            if (from > 0) pull += at(from - 1) > at(from) ? 1.0 : -1.0;
            if (to < m) pull += at(to) > at(to - 1) ? 1.0 : -1.0;
            value[from] = (sum + strength * pull) / (double)(to - from);
        }
        return count;
    }

    // Where the values above it, less it, sum to 1. All become relative to the largest, which may be so large that 1 beside it
    // is lost.
    double threshold(int64_t groups) {
        double top = value[some[0]];
        for (int64_t k = 1; k < groups; k++) top = value[some[k]] > top ? value[some[k]] : top;
        int64_t count = 0;
        for (int64_t k = 0; k < groups; k++) {
            value[some[k]] -= top;
            if (value[some[k]] > -1.0) more[count++] = some[k];
        }
        while (true) {
            double places = 0.0, mass = 0.0;
            for (int64_t k = 0; k < count; k++) {
                const int64_t from = more[k], size = next[from] - from;
                places += (double)size, mass += (double)size * value[from];
            }
            const double tau = (mass - 1.0) / places;
            int64_t kept = 0;
            for (int64_t k = 0; k < count; k++) {
                more[kept] = more[k];
                kept += value[more[k]] > tau;
            }
            if (kept == count) return tau;
            count = kept;
        }
    }
};

}  // namespace ANYMAX_UNIT
