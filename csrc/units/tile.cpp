// Rows of few classes for one instruction set, one a lane.
#include "core/families.hpp"
#include "shapes/tile_bounded.hpp"
#include "shapes/tile_loss.hpp"

namespace ANYMAX_UNIT {

// The rows of an operand as the lanes of a tile, and back.
template <class C>
struct Lanes {
    const anymax_call &call;
    const anymax_view &view;
    const uint8_t *const mask;
    const int64_t n, size;
    const bool direct, beside;  // rows one after another; classes one after another, each with all rows side by side

    Lanes(const anymax_call &c, const anymax_view &v)
        : call(c),
          view(v),
          mask(&v == &c.x ? (const uint8_t *)c.mask.data : nullptr),
          n(c.n),
          size(anymax_item(c.dtype)),
          direct(is_type<C>(c.dtype) && c.inner == 1 && v.cls == 1 && !mask),
          beside(is_type<C>(c.dtype) && c.inner > 1 && v.inner == 1 && !mask) {}

    void in(Tile<C> &t, int64_t r, int64_t count) const {
        C *lanes = (C *)t.v;
        if (direct) {
            if (call.starts)
                return lanes_of_rows(lanes, count, n,
                                     [&](int64_t j) ANYMAX_EACH { return (const C *)at(call, view, size, r + j, 0); });
            const C *x = (const C *)at(call, view, size, r, 0);
            for (int64_t i = 0; view.outer == n && i < count * n * size; i += 64)
                __builtin_prefetch((const char *)(x + count * n) + i, 0, 2);
            return gather_lanes(lanes, x, count, n, view.outer);
        }
        if (beside) return lanes_beside<true>(call, view, r, count, n, lanes);
        C rows[width<C> * TILE_MOST];
        for (int64_t j = 0; j < count; j++) {
            const uint8_t *keep = mask ? (const uint8_t *)row_at(call, call.mask, 1, r + j) : nullptr;
            stage_in(rows + j * n, row_at(call, view, size, r + j), view.cls, call.dtype, keep, call.mask.cls, n);
        }
        gather_lanes(lanes, rows, count, n, n);
    }
    // But for `others`: those may be the very scores, and are still to be read.
    void out(const Tile<C> &t, int64_t r, int64_t count, uint32_t others) const {
        const C *lanes = (const C *)t.v;
        if (direct && !others && call.starts)
            return rows_of_lanes(lanes, count, n, [&](int64_t j) ANYMAX_EACH { return (C *)at(call, view, size, r + j, 0); });
        if (direct && !others) return scatter_lanes(lanes, (C *)at(call, view, size, r, 0), count, n, view.outer);
        if (beside && !others) return lanes_beside<false>(call, view, r, count, n, (C *)lanes);
        C rows[width<C> * TILE_MOST];
        const int64_t step = view.cls;
        if (step == 1) scatter_lanes(lanes, rows, count, n, n);
        for (int64_t j = 0; j < count; j++) {
            if (others >> j & 1) continue;
            void *const row = (void *)row_at(call, view, size, r + j);
            if (step == 1)
                deliver(Sink<C>{row, 1, call.dtype, nullptr, false, n}, rows + j * n);
            else
                put_each(
                    row, call.dtype, n, [=](int64_t k) ANYMAX_EACH { return k * step; },
                    [=](int64_t k) ANYMAX_EACH { return lanes[k * width<C> + j]; });
        }
    }
};

// f(the first row, how many) for each tile.
template <class C, class F>
static void each_tile(int64_t begin, int64_t end, F f) {
    for (int64_t r = begin; r < end; r += width<C>) f(r, end - r < width<C> ? end - r : width<C>);
}

// ANYMAX_LOSS, ANYMAX_LOSS_GRAD and ANYMAX_THRESHOLD of few classes.
template <class C>
static void loss_rows(const anymax_call &call, Link link, int64_t begin, int64_t end) {
    const int64_t n = call.n;
    const Lanes<C> lanes(call, call.x), out(call, call.out);
    Tile<C> t;
    TileLoss<C> f;
    f.slopes = call.op == ANYMAX_LOSS && call.slope;
    each_tile<C>(begin, end, [&](int64_t r, int64_t count) {
        lanes.in(t, r, count);
        for (int64_t j = 0; j < width<C>; j++) {
            const int64_t target = call.index && j < count ? call.index[r + j] : -1;
            f.target[j] = (typename TileLoss<C>::integer)(target < 0 ? -1 : target > n ? n : target);
            f.aim[j] = f.target[j] >= 0 && f.target[j] < n ? ((const C *)t.v)[f.target[j] * width<C> + j] : C(0);
            f.scale[j] = call.op == ANYMAX_LOSS_GRAD && j < count ? ((const C *)call.scale)[r + j] : C(0);
        }
        if (call.op == ANYMAX_LOSS_GRAD) {
            tile_loss_gradient(t, link, call.param, n, f);
            return out.out(t, r, count, 0);
        }
        tile_losses(t, n, link, f);
        for (int64_t j = 0; j < count; j++) {
            if (call.support.count) call.support.count[r + j] = -1;  // found again
            if (call.value && call.op == ANYMAX_LOSS) ((C *)call.value)[r + j] = (C)f.value[j];
            if (f.slopes) ((C *)call.slope)[r + j] = (C)f.slope[j];
            if (call.tau && f.target[j] >= (call.op == ANYMAX_LOSS ? 0 : -1)) ((C *)call.tau)[r + j] = (C)f.tau[j];
        }
    });
}

// The gradients of log softmax: g - p sum g over the classes that have a probability.
template <class C>
static void log_gradient_rows(const anymax_call &call, int64_t begin, int64_t end) {
    const Lanes<C> logs(call, call.p), grads(call, call.g), out(call, call.out);
    Tile<C> l, g;
    each_tile<C>(begin, end, [&](int64_t r, int64_t count) {
        logs.in(l, r, count), grads.in(g, r, count);
        tile_log_gradient(l, g, call.n);
        out.out(g, r, count, 0);
    });
}

template <class C>
void run_tiles(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team,
               Scratch &scratch) {
    if (call.op == ANYMAX_LOG_VJP) return log_gradient_rows<C>(call, begin, end);
    if (call.op != ANYMAX_FORWARD && call.op != ANYMAX_LOG) return loss_rows<C>(call, plan.link, begin, end);
    const Lanes<C> lanes(call, call.x), out(call, call.out);
    Tile<C> t;
    t.below_1 = below_1(call.dtype);
    each_tile<C>(begin, end, [&](int64_t r, int64_t count) {
        lanes.in(t, r, count);
        if (call.op == ANYMAX_LOG) return tile_log_softmax(t, call.n), out.out(t, r, count, 0);
        uint32_t done = 0;
        if (plan.link != BOUNDED)
            done = tile_map(t, plan.link, call.param, call.n);
        else if constexpr (sizeof(C) == 4)
            done = tile_bounded(t, call, r, count);
        const uint32_t others = ~done & ((1u << count) - 1);
        out.out(t, r, count, others);
        for (int64_t j = 0; others && j < count; j++)
            if (others >> j & 1) by_rows<C>(call, r + j, r + j + 1, bypass, team, scratch);
    });
}
template void run_tiles<float>(const anymax_call &, const Plan &, int64_t, int64_t, bool, const Team &, Scratch &);
template void run_tiles<double>(const anymax_call &, const Plan &, int64_t, int64_t, bool, const Team &, Scratch &);

}  // namespace ANYMAX_UNIT
