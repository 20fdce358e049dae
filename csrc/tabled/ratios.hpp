// Rows of a ratio map whose u is a table: p_i = u(x_i) / sum u.
#pragma once

#include "core/pieces.hpp"
#include "shapes/scan.hpp"
#include "tabled/table.hpp"

namespace ANYMAX_UNIT {

class TabledRatios {
    const anymax_tabled_call &call;
    const anymax_weights &of;
    const Team team;

    // Where scores stand in the tables: four times the number of a cell, and the place in it. There are scores beyond the
    // cells; one of 0 has numbers of its own, and those that are `none` are 0.
    struct Place {
        vi cell, beyond, zero, none;
        vf u;
    };
    template <bool EVEN>
    ANYMAX_INLINE Place place(vf v) const {
        const vi inside = (v > of.low) & (v < of.high), zero = v == vf{};
        const vf size = inside ? absolute(v) : vf{};
        const vi none = (v <= of.lost) | (v >= of.gone);  // masked ones too, but not those of +inf
        vi cell, beyond = ~(inside | none) | (v == inf32);
        vf u;
        if constexpr (EVEN) {
            const vf at = size * of.per;
            cell = __builtin_convertvector(at, vi);
            u = at - __builtin_convertvector(cell, vf);
        } else {
            const vi bits = (vi)larger(size, all<vf>(of.least)), rest = ((vi{} + 1) << of.shift) - 1;
            cell = (bits >> of.shift) - (int32_t)(bits_as<uint32_t>(of.least) >> of.shift);
            u = __builtin_convertvector(bits & rest, vf) * (1.0f / (float)(1 << of.shift));
            beyond |= inside & ~zero & (size < of.least);
        }
        cell = v < vf{} ? cell + (int32_t)of.above : cell;
        return Place{(inside ? cell : vi{}) * 4, beyond, zero, none, u};
    }
    ANYMAX_INLINE static vf found(const float *cells, float at_zero, const Place &at) {
        const Cubics k = cubics_at(cells, at.cell);
        const vf cubic = ((k.c[3] * at.u + k.c[2]) * at.u + k.c[1]) * at.u + k.c[0];
        const vf value = at.zero ? all<vf>(at_zero) : cubic;
        return at.none ? vf{} : value;
    }

    // u of a row to `u`, and its sum; false where a score has no cell.
    template <bool EVEN>
    bool weigh(const float *x, int64_t n, float *u, double &total) const {
        constexpr int64_t W = width<float>;
        struct {
            vd wide;
            vi beyond;
        } found_in[TABLED_CLASSES / PIECE + 1];
        pieces(team, n, [&](int64_t k, int64_t begin, int64_t end) {
            vd wide{};
            vi beyond{};
            for (int64_t i = begin; i < end;) {
                vf block{};
                for (const int64_t stop = i + 16 * W; i < end && i < stop; i += W) {
                    const vf v = load_or(x, i, n, -inf32);
                    const Place at = place<EVEN>(v);
                    const vf w = larger(found(of.weights, of.weight, at), vf{});
                    store(u + i, w);
                    block += w, beyond |= at.beyond;
                }
                wide = widen_add(wide, block);
            }
            found_in[k].wide = wide, found_in[k].beyond = beyond;
        });
        for (int64_t k = 1; k < pieces_of(n); k++)
            found_in[0].wide += found_in[k].wide, found_in[0].beyond |= found_in[k].beyond;
        total = sum(found_in[0].wide);
        return !bits(found_in[0].beyond);
    }

    template <bool EVEN>
    bool row(const float *x, const float *g, int64_t n, const Sink<float> &out, Scratch &scratch) const {
        constexpr int64_t W = width<float>;
        float *const u = scratch.take<float>(EXTRA, n);
        double total;
        if (!u || !weigh<EVEN>(x, n, u, total)) return false;
        const vf scale = all<vf>((float)(total > 0.0 ? 1.0 / total : 0.0));
        if (!g) return emit_over(out, u, [=](int64_t i) ANYMAX_EACH { return load_or(u, i, n, 0.0f) * scale; }), true;
        vd wide{};
        for (int64_t i = 0; i < n; i += W) {
            const vf w = load_or(u, i, n, 0.0f);
            wide = widen_add(wide, w == vf{} ? vf{} : w * load_or(g, i, n, 0.0f));
        }
        const vf mean = all<vf>((float)(total > 0.0 ? sum(wide) / total : 0.0));
        emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH {
            const vf v = load_or(x, i, n, -inf32);
            const vf slope = found(of.slopes, of.slope, place<EVEN>(v)) * scale;
            return slope == vf{} ? vf{} : slope * (load_or(g, i, n, 0.0f) - mean);
        });
        return true;
    }

  public:
    TabledRatios(const anymax_tabled_call &call, const Team &team) : call(call), of(*call.ratio), team(team) {}

    void run(int64_t begin, int64_t end, Scratch &scratch) const {
        const int64_t n = call.n, bytes = n * anymax_item(call.dtype);
        const auto read = [&](const void *data, int64_t r, Slot slot) {
            return stage<float>((const char *)data + r * bytes, 1, call.dtype, nullptr, 0, n, scratch, slot);
        };
        for (int64_t r = begin; r < end; r++) {
            char *const to = (char *)call.out + r * bytes;
            const Sink<float> out{to, 1, call.dtype, call.dtype == ANYMAX_F32 ? (float *)to : nullptr, false, n};
            const float *const x = read(call.x, r, STAGED), *const g = call.g ? read(call.g, r, STAGED_G) : nullptr;
            if (scratch.failed) return;
            call.left[r] = !(of.per > 0.0f ? row<true>(x, g, n, out, scratch) : row<false>(x, g, n, out, scratch));
            if (scratch.failed) return;
        }
    }
};

}  // namespace ANYMAX_UNIT
