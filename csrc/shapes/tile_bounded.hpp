// Short rows of Bounded above alpha = 1, one a lane: their levels in floats, then in doubles.
#pragma once

#include "links/bounded.hpp"
#include "shapes/tile.hpp"

namespace ANYMAX_UNIT {

// Bounds of the classes, each no more than 1; `alike`: the first is that of all classes.
template <class V>
struct LaneBounds {
    const V *each;
    bool alike;
    template <class>
    ANYMAX_INLINE V at(int64_t i) const {
        return each[alike ? 0 : i];
    }
};
struct TileBounds : LaneBounds<vf> {
    vf room[TILE_MOST];
    TileBounds() { each = room; }
    void read(const anymax_call &call, int64_t r, int64_t count) {
        const anymax_view &view = call.upper;
        alike = view.cls == 0 || call.n == 1;
        const int64_t n = alike ? 1 : call.n;
        const bool shared = view.outer == 0 && view.inner == 0;
        float *const to = (float *)room;
        for (int64_t j = 0; j < (shared ? 1 : width<float>); j++) {
            const float *from = (const float *)row_at(call, view, sizeof(float), r + (j < count ? j : 0));
            for (int64_t i = 0; i < n; i++) to[i * width<float> + j] = from[i * view.cls];
        }
        for (int64_t i = 0; i < n; i++) {
            const vf v = shared ? splat(to[i * width<float>]) : room[i];
            room[i] = v > 1.0f ? splat(1.0f) : v;  // NaN stays
        }
    }
};

// One bit a lane, 0 where the row is served by itself: one with NaN, whose bounds leave no more than 1, or hardly more, or
// whose scores lie far apart.
template <class L>
inline uint32_t tile_bounded(Tile<float> &t, int64_t n, const L &link, const TileBounds &bounds) {
    const vf none = splat(-inf32);
    vf top = none, least = splat(inf32), room{};
    vi sound = top < 0.0f;
    for (int64_t i = 0; i < n; i++) {
        const vf v = t.v[i], most = bounds.at<vf>(i);
        const vi in = (v > -inf32) & (most > 0.0f);
        sound &= (v < inf32) & (most >= 0.0f);
        top = larger(top, in ? v : none), least = smaller(least, in ? v : splat(inf32));
        room += in ? most : vf{};
    }
    sound &= (room > 1.0f + 1e-4f) & (top > -inf32) & (top - least < FLOAT_RANGE);
    const vf anchor = sound ? top : vf{}, end = sound ? top - least : vf{};
    vf y[TILE_MOST];
    for (int64_t i = 0; i < n; i++) y[i] = (sound & (bounds.at<vf>(i) > 0.0f)) ? t.v[i] - anchor : none;
    const vf high_level = end * (float)link.slope * (1.0f + 1e-5f) + (1.0f + 1e-5f);
    vf level = splat(1.0f);
    if (n >= CELLS_FROM) {  // where the best of each eight would be at theirs, if they can be
        vf cell[TILE_MOST / 8], most[TILE_MOST / 8], at = level;
        int64_t cells = 0;
        for (int64_t i = 0; i < n; i += 8, cells++) {
            cell[cells] = none, most[cells] = vf{};
            for (int64_t j = i; j < i + 8 && j < n; j++)
                cell[cells] = larger(cell[cells], y[j]), most[cells] = larger(most[cells], bounds.at<vf>(j));
        }
        const LaneBounds<vf> own{most, false};
        const auto s = solve(lane_view(cells, (const vf *)cell), under(link, own), at, sound, 5,
                             Bracketed<vf, L>{link, vf{}, high_level, 1.0f, 0.05f, 0.05f});
        level = absolute(s.excess(1.0f)) < 0.5f ? at : level;
    }
    solve(lane_view(n, (const vf *)y), under(link, bounds), level, sound, 24,
          Bracketed<vf, L>{link, vf{}, high_level, 1.0f, 1e-6f, 3e-4f});
    for (int h = 0; h < 2; h++) {
        vd value[TILE_MOST], rate[TILE_MOST], x[TILE_MOST], most[TILE_MOST], at = part(level, h);
        const vd zero = part(anchor, h);
        for (int64_t i = 0; i < n; i++) x[i] = part(y[i], h) > -inf64 ? part(t.v[i], h) - zero : all<vd>(-inf64);
        for (int64_t i = 0; i < (bounds.alike ? 1 : n); i++) most[i] = part(bounds.each[i], h);
        const LaneBounds<vd> own{most, bounds.alike};
        const vl asked = part(sound ? splat(1.0f) : vf{}, h) > 0.0;
        const auto s =
            solve(lane_view(n, (const vd *)x), under(link, own), at, asked, 60,
                  Bracketed<vd, L>{link, vd{}, part(high_level, h), 1.0, L::least(1.0) > 0.0 ? 0x1p-50 : ENOUGH, 0.0},
                  [&](int64_t i, vd v, vd k) ANYMAX_EACH { value[i] = v, rate[i] = k; });
        const vd excess = s.excess(1.0), lost = s.rate() > vd{} ? excess / s.rate() : vd{}, tiny = L::least(absolute(at));
        const vl there = asked & (absolute(excess) <= ENOUGH);
        for (int64_t i = 0; i < n; i++) {
            const vd u = own.at<vd>(i), p = value[i] - rate[i] * lost;
            const vl inside = (value[i] < u * NEARLY_FULL) & (p < u);
            store_narrow((float *)(t.v + i) + h * width<double>, x[i] > -inf64 ? (inside ? (p > tiny ? p : vd{}) : u) : vd{});
        }
        store_narrow((float *)&level + h * width<double>, there ? all<vd>(1.0) : vd{});
    }
    return bits(level > 0.0f);
}

inline uint32_t tile_bounded(Tile<float> &t, const anymax_call &call, int64_t r, int64_t count) {
    TileBounds bounds;
    bounds.read(call, r, count);
    const int64_t n = call.n;
    switch (link_of(ANYMAX_ENTMAX, call.param)) {
        case POWER1: return tile_bounded(t, n, Power<1>(), bounds);
        case POWER2: return tile_bounded(t, n, Power<2>(), bounds);
        case POWER3: return tile_bounded(t, n, Power<3>(), bounds);
        case POWER4: return tile_bounded(t, n, Power<4>(), bounds);
        default: return tile_bounded(t, n, BoundedCurve(call.param - 1.0, 1.0 / (call.param - 1.0)), bounds);
    }
}

}  // namespace ANYMAX_UNIT
