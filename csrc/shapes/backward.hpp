// J^T g from p or from its saved support.
#pragma once

#include "plan.hpp"
#include "shapes/support.hpp"
#include "shapes/vjp.hpp"

namespace ANYMAX_UNIT {

// J^T g from all of p.
template <class C, class F>
inline void vjp_dense(const F &weigh, const C *p, const C *g, int64_t n, const Sink<C> &out, Scratch &scratch,
                      const Team &team) {
    C *const weights = F::expensive ? scratch.take<C>(EXTRA, n + width<C>) : nullptr;
    if (!scratch.failed) vjp<false>(WholeRow<C>{{p, g, nullptr, weights, n}, out, scratch, team}, weigh, Norm{});
}

// J^T g from the non-zeros of p: of floats as `vjp_saved` has it, which takes rows side by side; else in doubles. Where weights
// grow without bound as p falls, the smallest p has nearly all of them: less its g the sums stay exact.
template <class C>
inline void vjp_found(const Sensitivity &s, const Saved<C> &found, const void *g, int64_t g_step, int32_t dtype,
                      const Sink<C> &out, Scratch &scratch, const Team &team) {
    constexpr int64_t W = width<double>;
    const auto [index, value, count] = found;
    if constexpr (sizeof(C) == sizeof(float))
        if (dtype == ANYMAX_F32 && !s.steep && s.link != NORM) {
            float *const h = scratch.take<float>(EXTRA, count + width<float>), *const weights = scratch.take<float>(
                                                                                   WIDE, count + width<float>);
            if (scratch.failed) return;
            const SupportRow<float> row{{value, h, h, weights, count}, g, g_step, dtype, index, vf{}};
            s.with([&](auto weigh) { vjp<false>(row, weigh, Norm{}); });
            return spread(out, index, h, count, team);
        }
    double *const p = scratch.take<double>(SORTED, count + W), *const h = scratch.take<double>(EXTRA, count + W),
                  *const weights = scratch.take<double>(WIDE, count + W);
    if (scratch.failed) return;
    int64_t least = -1;
    for (int64_t i = 0; s.steep && i < count; i++)
        if (value[i] > C(0) && (least < 0 || value[i] < value[least])) least = i;
    const vd from = least < 0 ? vd{} : splat(gathered<double>(g, g_step, dtype, index + least, 1)[0]);
    Norm norm{s.alpha};
    if (s.link == NORM) {
        norm.most = 0.0;
        for (int64_t i = 0; i < count; i++) norm.most = larger(norm.most, (double)value[i]);
    }
    for (int64_t i = 0; i < count; i += W) store(p + i, load_wide_or(value, i, count, 0.0) / norm.most);
    const SupportRow<double> row{{p, h, h, weights, count}, g, g_step, dtype, index, from};
    s.with([&](auto weigh) { s.link == NORM ? vjp<true>(row, weigh, norm) : vjp<false>(row, weigh, norm); });
    spread(out, index, (const double *)h, count, team);
}

// Zeros for the rows from r on whose supports are saved, as many as are cleared in one go; and the row after them.
inline int64_t clear_rows(const anymax_call &call, int64_t r, int64_t end, const Team &team) {
    const int64_t n = call.n, bytes = n * (int64_t)sizeof(float),
                  last = call.out.outer == n && 2 * bytes <= CLEARED_TOGETHER ? r + CLEARED_TOGETHER / bytes : r + 1;
    float *out = (float *)call.out.data + r * call.out.outer;
    int64_t after = r + 1;
    while (after < end && after < last && call.support.count[after] >= 0) after++;
    if (after > r + 1)
        zero_bytes((char *)out, (after - r) * bytes, false);
    else
        zeros(sink_of(out, n, false), team);
    return after;
}

// J^T g of rows of floats side by side, from their saved supports.
template <class F>
inline void vjp_saved(const F &weigh, const anymax_call &call, int64_t begin, int64_t end, bool bypass, Scratch &scratch,
                      const Team &team) {
    constexpr int64_t W = width<float>;
    const anymax_support &s = call.support;
    const int64_t n = call.n;
    const bool clear = call.fresh == 2, over = call.out.data == call.g.data;  // in place: a row's zeros come once its g is read
    // pieces that `by_rows` has no use for
    float *const weights = scratch.take<float>(BATCH_IN, s.capacity + W);
    float *const h = scratch.take<float>(BATCH_OUT, s.capacity + W);
    if (scratch.failed) return;
    for (int64_t r = begin, cleared = begin; r < end; r++) {
        saved_ahead<float>(call, r, end);
        const auto [index, value, count] = saved_row<float>(call, r);
        const float *const g = (const float *)call.g.data + r * call.g.outer;
        float *const out = (float *)call.out.data + r * call.out.outer;
        if (count < 0 && call.p.cls == 1 && n <= SAVED_SHARE * s.capacity) {
            vjp_dense(weigh, (const float *)call.p.data + r * call.p.outer, g, n, sink_of(out, n, bypass), scratch, team);
            continue;
        }
        if (count < 0) {
            by_rows<float>(call, r, r + 1, bypass, team, scratch);  // its support was too large to be saved
            continue;
        }
        if (!bypass && !clear && !over && r >= cleared) cleared = clear_rows(call, r, end, team);
        vjp<false>(SupportRow<float>{{value, h, h, weights, count}, g, 1, ANYMAX_F32, index, vf{}}, weigh, Norm{});
        if (bypass && !clear) {
            spread_bypass(out, n, index, (const float *)h, count, team);
            continue;
        }
        if (over) zero_bytes((char *)out, n * (int64_t)sizeof(float), false);
        for (int64_t i = 0; i < count; i++) out[index[i]] = h[i];
    }
}

// Results one after another that are written around the caches, in whole lines: what a line lacks comes with the next rows.
struct Lines {
    float *to, *made;
    int64_t left = 0;  // made, but not written yet

    ANYMAX_INLINE float *place(int64_t i) const { return made + left + i; }
    ANYMAX_INLINE void send(int64_t count, bool last) {
        const int64_t all = left + count, whole = all - (int64_t)((uintptr_t)(to + all) & (Room::LINE - 1)) / 4,
                      stop = last        ? all
                             : whole > 0 ? whole
                                         : 0;
        write(to, 0, stop, true, [this](int64_t i) ANYMAX_EACH { return load(made + i); });
        memmove(made, made + stop, Room::LINE);
        to += stop, left = all - stop;
    }
};

// J^T g from all of p, of short rows of floats, each side by side.
template <bool NORM, class F>
inline void vjp_short(const F &weigh, double alpha, const anymax_call &call, int64_t begin, int64_t end, bool bypass,
                      Scratch &scratch) {
    constexpr int64_t W = width<float>;
    const int64_t n = call.n, step = (n + W - 1) / W * W + W;
    const auto at_row = [&](const anymax_view &v, int64_t r) ANYMAX_EACH { return (float *)at(call, v, sizeof(float), r, 0); };
    const bool dense = !call.starts && call.out.outer == n, whole = bypass && dense && !call.sizes,
               far = call.outer * n >= BACKWARD_FAR_FROM,
               ahead = far && W > 8 && n >= BACKWARD_AHEAD_FROM && dense && call.p.outer == n && call.g.outer == n;
    int64_t block = W;
    while (block > 1 && block * n > (far ? BACKWARD_TOGETHER_FAR : BACKWARD_TOGETHER)) block /= 2;
    float *const weights = F::expensive ? scratch.take<float>(EXTRA, W * step) : nullptr;
    Lines lines{at_row(call.out, begin), whole ? scratch.take<float>(RESULT, (block + 1) * n + 2 * Room::LINE) : nullptr};
    if (scratch.failed) return;
    SumsInTurn all{};
    for (int64_t first = begin; first < end; first += block) {
        const int64_t count = end - first < block ? end - first : block, next = ahead && end - first > block ? block * n : 0;
        const auto row = [&](int64_t r) ANYMAX_EACH {
            const int64_t own = first + r;
            return RowInTurn{{at_row(call.p, own), at_row(call.g, own), whole ? lines.place(r * n) : at_row(call.out, own),
                              F::expensive ? weights + r * step : nullptr, call.sizes ? call.sizes[own] : n},
                             bypass,
                             bypass && !whole,
                             next};
        };
        vjp_in_turn<NORM>(row, count, weigh, Norm{alpha}, all);
        if (whole) lines.send(count * n, first + count == end);
    }
}

// The same of rows side by side, one a lane.
template <class F>
inline void vjp_beside(const F &weigh, const anymax_call &call, int64_t begin, int64_t end) {
    constexpr int64_t W = width<float>;
    const int64_t n = call.n;
    alignas(64) float p[BESIDE_MOST * W], g[BESIDE_MOST * W], weights[BESIDE_MOST * W];
    for (int64_t r = begin; r < end; r += W) {
        const int64_t count = end - r < W ? end - r : W;
        lanes_beside<true>(call, call.p, r, count, n, p);
        lanes_beside<true>(call, call.g, r, count, n, g);
        vjp<false>(RowsBeside{p, g, p, weights, n * W}, weigh, Norm{});
        lanes_beside<false>(call, call.out, r, count, n, p);
    }
}

inline int64_t saved_of(const anymax_call &call) {
    return worth_saving(ANYMAX_FORWARD, call.map, call.param, SAVED_CALL_FROM, call.n);
}

// J^T g of a map whose backward needs p alone. `p` is staged; g is read where p is not 0. `saved`: how many non-zeros a large
// call saves of such a row, which one of them takes from there (0: none).
template <class C>
inline void vjp_row(const Sensitivity &s, int64_t saved, const C *p, const void *g, int64_t g_step, int32_t dtype, int64_t n,
                    const Sink<C> &out, Scratch &scratch, const Team &team) {
    const bool may = !s.steep && s.link != NORM;
    const bool wide = (bit(s.link) & (CURVES | bit(ANY_POWER))) && s.alpha < 1.5;
    bool dense = may && (s.link == EXPONENTIAL || n < (wide ? WORTH_SEEKING_WIDE : WORTH_SEEKING));
    Candidates<C> c{nullptr, nullptr, 0};
    if (!dense) {
        const int64_t many = saved ? saved : many_nonzeros(n);
        c = nonzeros(p, n, C(0), may ? many : n, scratch, may && !saved);
        if (scratch.failed) return;
        dense = may && c.count > many;
    }
    if (!dense) return vjp_found(s, Saved<C>{c.index, c.value, c.count}, g, g_step, dtype, out, scratch, team);
    const C *h = stage<C>(g, g_step, dtype, nullptr, 0, n, scratch, STAGED_G);
    if (h) s.with([&](auto weigh) { vjp_dense(weigh, p, h, n, out, scratch, team); });
}

}  // namespace ANYMAX_UNIT
