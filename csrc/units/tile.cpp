// Rows of few classes for one instruction set, one a lane.
#include "core/families.hpp"
#include "shapes/tile_loss.hpp"

namespace ANYMAX_UNIT {

// Rows of a call as the lanes of a tile, and back.
template <class C>
struct Lanes {
    const anymax_call &call;
    const int64_t n, size;
    const bool direct_in, direct_out, beside_in, beside_out;  // rows one after another; classes one after another, each with all rows side by side

    explicit Lanes(const anymax_call &c)
        : call(c),
          n(c.n),
          size(item(c.dtype)),
          direct_in(is_type<C>(c.dtype) && c.inner == 1 && c.x.cls == 1 && !c.mask.data),
          direct_out(is_type<C>(c.dtype) && c.inner == 1 && c.out.cls == 1),
          beside_in(is_type<C>(c.dtype) && c.inner > 1 && c.x.inner == 1 && !c.mask.data),
          beside_out(is_type<C>(c.dtype) && c.inner > 1 && c.out.inner == 1) {}

    void in(Tile<C> &t, int64_t r, int64_t count) const {
        C *lanes = (C *)t.v;
        if (direct_in) {
            if (call.starts) return lanes_of_rows(lanes, count, n, [&](int64_t j) ANYMAX_EACH { return (const C *)at(call, call.x, size, r + j, 0); });
            const C *x = (const C *)at(call, call.x, size, r, 0);
            for (int64_t i = 0; call.x.outer == n && i < count * n * size; i += 64) __builtin_prefetch((const char *)(x + count * n) + i, 0, 2);
            return gather_lanes(lanes, x, count, n, call.x.outer);
        }
        if (beside_in) return lanes_beside<true>(call, call.x, r, count, n, lanes);
        for (int64_t i = 0; i < n; i++) t.v[i] = vec<C>{};
        for (int64_t j = 0; j < count; j++) {
            const int64_t o = (r + j) / call.inner, i = (r + j) - o * call.inner;
            const char *row = at(call, call.x, size, o, i);
            const uint8_t *mask = call.mask.data ? (const uint8_t *)at(call, call.mask, 1, o, i) : nullptr;
            for (int64_t k = 0; k < n; k++) lanes[k * width<C> + j] = mask && !mask[k * call.mask.cls] ? -infinity<C> : read<C>(row, call.x.cls, call.dtype, k);
        }
    }
    // But for `others`: those may be the very scores, and are still to be read.
    void out(const Tile<C> &t, int64_t r, int64_t count, uint32_t others) const {
        const C *lanes = (const C *)t.v;
        if (direct_out && !others && call.starts) return rows_of_lanes(lanes, count, n, [&](int64_t j) ANYMAX_EACH { return (C *)at(call, call.out, size, r + j, 0); });
        if (direct_out && !others) return scatter_lanes(lanes, (C *)at(call, call.out, size, r, 0), count, n, call.out.outer);
        if (beside_out && !others) return lanes_beside<false>(call, call.out, r, count, n, (C *)lanes);
        for (int64_t j = 0; j < count; j++) {
            if (others >> j & 1) continue;
            const int64_t o = (r + j) / call.inner, i = (r + j) - o * call.inner;
            const Sink<C> out{(void *)at(call, call.out, size, o, i), call.out.cls, call.dtype, nullptr, false, n, nullptr};
            for (int64_t k = 0; k < n; k++) put(out, k, lanes[k * width<C> + j]);
        }
    }
};

// ANYMAX_LOSS, ANYMAX_LOSS_GRAD and ANYMAX_THRESHOLD of few classes.
template <class C>
static void loss_rows(const anymax_call &call, Link link, int64_t begin, int64_t end) {
    const int64_t n = call.n;
    const Lanes<C> lanes(call);
    Tile<C> t;
    TileLoss<C> f;
    for (int64_t r = begin; r < end; r += width<C>) {
        const int64_t count = end - r < width<C> ? end - r : width<C>;
        lanes.in(t, r, count);
        for (int64_t j = 0; j < width<C>; j++) {
            const int64_t target = call.index && j < count ? call.index[r + j] : -1;
            f.target[j] = (typename TileLoss<C>::integer)(target < 0 ? -1 : target > n ? n : target);
            f.aim[j] = f.target[j] >= 0 && f.target[j] < n ? ((const C *)t.v)[f.target[j] * width<C> + j] : C(0);
            f.scale[j] = call.op == ANYMAX_LOSS_GRAD && j < count ? ((const C *)call.scale)[r + j] : C(0);
        }
        if (call.op == ANYMAX_LOSS_GRAD) {
            tile_loss_gradient(t, link, call.param, n, f);
            lanes.out(t, r, count, 0);
            continue;
        }
        tile_losses(t, n, link, f);
        for (int64_t j = 0; j < count; j++) {
            if (call.support.count) call.support.count[r + j] = -1;  // found again
            if (call.value && call.op == ANYMAX_LOSS) ((C *)call.value)[r + j] = (C)f.value[j];
            if (call.tau && f.target[j] >= (call.op == ANYMAX_LOSS ? 0 : -1)) ((C *)call.tau)[r + j] = (C)f.tau[j];
        }
    }
}

template <class C>
void run_tiles(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team, Scratch &scratch) {
    if (call.op != ANYMAX_FORWARD) return loss_rows<C>(call, plan.link, begin, end);
    const Lanes<C> lanes(call);
    Tile<C> t;
    for (int64_t r = begin; r < end; r += width<C>) {
        const int64_t count = end - r < width<C> ? end - r : width<C>;
        lanes.in(t, r, count);
        const uint32_t others = ~tile_map(t, plan.link, call.param, call.n) & ((1u << count) - 1);
        lanes.out(t, r, count, others);
        for (int64_t j = 0; others && j < count; j++)
            if (others >> j & 1) by_rows<C>(call, r + j, r + j + 1, bypass, team, scratch);
    }
}
template void run_tiles<float>(const anymax_call &, const Plan &, int64_t, int64_t, bool, const Team &, Scratch &);
template void run_tiles<double>(const anymax_call &, const Plan &, int64_t, int64_t, bool, const Team &, Scratch &);

}  // namespace ANYMAX_UNIT
