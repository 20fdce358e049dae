// Total variation denoising of a row: the v that minimises |v - y|^2 / 2 + strength sum |v_(i+1) - v_i|.
//
// v are the slopes of the shortest string from 0 to S_m = sum y that stays within `strength` of the running sums S_1 ...
// S_(m-1). It is found in one reading: from the last place where the string is known, the greatest convex function below the
// upper edge of this tube and the least concave one above its lower edge are kept as segments. Once the first segment of the
// one is less steep than that of the other, the string follows the first segments of that one which has several. A place joins
// and leaves a hull once, so the work grows with the length alone. Davies and Kovac 2001 have the string.
#pragma once

#include <math.h>
#include <stdint.h>

namespace ANYMAX_UNIT {

// 1 / k, from a table where k is small: a division is half of a step's time.
struct Reciprocals {
    static constexpr int64_t MOST = 64;
    double of[MOST];
    constexpr Reciprocals() : of() {
        for (int64_t k = 1; k < MOST; k++) of[k] = 1.0 / (double)k;
    }
};
constexpr Reciprocals RECIPROCALS;
inline double reciprocal(int64_t k) { return k < Reciprocals::MOST ? RECIPROCALS.of[k] : 1.0 / (double)k; }

// The convex (SIGN 1) or the concave (-1) one of the two hulls between the last known place of the string and the last that was
// read: the slopes of its segments rise or fall.
template <int SIGN>
struct Hull {
    double *slope;    // of a segment, by its first place, but for that of the first segment; no place begins one of either hull
    int32_t *starts;  // of segments
    int64_t first = 0, last = 0, from = 0;  // of the last segment its first place
    double front = 0.0,
           back = 0.0;  // the slopes of the first segment, which begins where that of the other hull does, and of the last

    static bool bends(double a, double b) { return SIGN > 0 ? a < b : a > b; }  // from the slope a to b
    bool single() const { return first == last; }

    void begin(int64_t place, double value) {
        last = first;
        starts[first] = (int32_t)(from = place);
        front = back = value;
    }
    // A place from which the hull bends
    void bend(int64_t place, double value) {
        starts[++last] = (int32_t)(from = place);
        slope[place] = back = value;
    }
    // and one from which it does not.
    void straighten(int64_t place, double value) {
        const int64_t end = place + 1;
        back += (value - back) * reciprocal(end - from);
        while (!single()) {
            const int64_t before = starts[last - 1];
            const double level = last - 1 == first ? front : slope[before];
            if (bends(level, back)) break;
            back += (level - back) * ((double)(from - before) * reciprocal(end - before));
            from = before, last--;
        }
        (single() ? front : slope[from]) = back;
    }
    // Its first segment ends; returns where.
    int64_t advance() {
        const int64_t to = starts[++first];
        front = slope[to];
        return to;
    }
};

// The segments of the string of places 0 ... m - 1: at the first place of one `value` becomes its v, but for rounding, and
// `next` the first place of the one behind it. The arrays have room for m + 1 numbers each.
class Denoised {
    double *const value;
    int32_t *const next;
    Hull<1> convex;
    Hull<-1> concave;

    void segment(int64_t from, int64_t to, double v) {
        value[from] = v;
        next[from] = (int32_t)to;
        top = v > top ? v : top;
    }
    // The string follows `known` while `other`, of one segment that ends behind `place`, crosses it.
    template <int SIGN>
    void follow(Hull<SIGN> &known, Hull<-SIGN> &other, int64_t place) {
        while (convex.front < concave.front && !known.single()) {
            const int64_t from = known.starts[known.first];
            const double front = known.front;
            const int64_t to = known.advance();
            other.begin(to, other.front + (other.front - front) * ((double)(to - from) / (double)(place + 1 - to)));
            segment(from, to, front);
        }
    }
    void straighten_convex(int64_t place, double v) {
        convex.straighten(place, v);
        if (convex.single()) follow(concave, convex, place);
    }
    void straighten_concave(int64_t place, double v) {
        concave.straighten(place, v);
        if (concave.single()) follow(convex, concave, place);
    }
    template <int SIGN>
    void rest(Hull<SIGN> &hull, int64_t m) {
        int64_t from = hull.starts[hull.first];
        while (!hull.single()) {
            const double front = hull.front;
            const int64_t to = hull.advance();
            segment(from, to, front);
            from = to;
        }
        segment(from, m, hull.front);
    }
    void equal(int64_t m) {
        for (int64_t i = 0, from = 0; i < m; i++)
            if (i + 1 == m || value[i + 1] != value[i]) {
                segment(from, i + 1, value[i]);
                from = i + 1;
            }
    }

  public:
    double top = -INFINITY;  // of v

    Denoised(double *value, int32_t *next, int32_t *convex, int32_t *concave)
        : value(value), next(next), convex{value, convex}, concave{value, concave} {}

    void run(int64_t m, double strength) {
        if (!(strength > 0.0) || m < 2) return equal(m);
        convex.begin(0, value[0] + strength), concave.begin(0, value[0] - strength);
        for (int64_t i = 1; i < m; i++) {
            // the string ends at the sum
            const double v = value[i], end = i == m - 1 ? strength : 0.0;
            if (v + end < concave.back) {
                concave.bend(i, v + end);
                straighten_convex(i, v - end);
            } else if (v - end > convex.back) {
                convex.bend(i, v - end);
                straighten_concave(i, v + end);
            } else {
                straighten_convex(i, v - end);
                straighten_concave(i, v + end);
            }
        }
        convex.single() ? rest(concave, m) : rest(convex, m);
    }
};

}  // namespace ANYMAX_UNIT
