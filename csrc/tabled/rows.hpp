// Rows of a separable map whose link is a table: p_i = link(y_i + level), level such that they sum to the mass.
#pragma once

#include "core/pieces.hpp"
#include "shapes/scan.hpp"
#include "tabled/table.hpp"

namespace ANYMAX_UNIT {

class TabledRows {
    const anymax_tabled_call &call;
    const Team team;
    const Table link;
    const vf sign;
    const double mass, most;  // of all of a row; of one class
    const bool capped;        // several classes may have the most
    const double edge;        // where a rising table begins
    double power = 1.0;       // of t - edge, as which the link rises, by its slope at the end
    int64_t known_count = -1;
    double even_low = 0.0,
           even_high = 0.0;  // arguments of the link next to that of an even share of the mass among `known_count`

    // The argument of the link at the beginning of cell c, and its value there.
    double argument(int64_t c) const {
        return call.link.sign * ((double)bits_as<float>((uint32_t)((link.first + c) << link.shift)) - call.link.offset);
    }
    double value(int64_t c) const { return (double)link.cells[4 * c]; }

    void find_even(int64_t count) {
        if (count == known_count) return;
        known_count = count;
        const double share = mass / (double)count;
        const bool rises = call.link.sign > 0;
        // of the cells in the order of their arguments, the first that begins with more than the share
        const int64_t last = call.link.count;
        const int64_t k = first_not(last, [&](int64_t i) { return value(rises ? i : last - 1 - i) <= share; });
        const double ends[] = {(link.low - call.link.offset) * call.link.sign, (link.high - call.link.offset) * call.link.sign};
        const auto place = [&](int64_t i) { return rises ? argument(i) : argument(last - 1 - i); };
        // a cell early on either side, since values between the beginnings of cells are rounded
        even_low = k > 1 ? place(k - 2) : rises ? ends[0] : ends[1];
        even_high = k + 1 < last ? place(k + 1) : rises ? ends[1] : ends[0];
    }

    struct Row {
        const float *x;
        int64_t n;
        float anchor;
        float *kept = nullptr;     // of a link with an edge: the scores that may be above it, in x, too,
        int32_t *index = nullptr;  // and which they are

        // Keeps those of `x` that are above the edge at this level; in place.
        void keep_above(const float *from, int64_t count, double edge, double level, bool first) {
            const float least = (float)(edge - level), slack = 1e-6f * ::fabsf(least) + 1e-30f;
            const vf bound = all<vf>(least - slack), base = all<vf>(anchor);
            int64_t left = 0;
            for (int64_t i = 0; i < count; i += width<float>) {
                const vf v = load_or(from, i, count, -inf32);
                const vi mark = (v - base > bound) & (v > -inf32);
                if (first)
                    left = append(v, mark, (int32_t)i, kept, index, left);
                else
                    left = again(v, mark, i, left);
            }
            x = kept, n = left;
        }

      private:
        int64_t again(vf v, vi mark, int64_t i, int64_t left) {
            const uint32_t marked = bits(mark);
            for (uint32_t b = marked, k = 0; b; b &= b - 1, k++) index[left + k] = index[i + __builtin_ctz(b)];
            return left + pack(v, marked, kept + left);
        }
    };
    struct Sums {
        double p, rate;
    };

    // p and its rates at a level.
    Sums evaluate(const Row &row, double level, float *p, float *rates) const {
        constexpr int64_t W = width<float>;
        const double place = call.link.sign * level + call.link.offset;
        const float near = (float)place, rest = (float)(place - (double)near);
        const vf base = all<vf>(near), under = all<vf>(rest), anchor = all<vf>(row.anchor), far = all<vf>(1e30f);
        const vf bottom = all<vf>(link.below), top = all<vf>(link.above), low = all<vf>(link.low), high = all<vf>(link.high);
        struct {
            vd p, rate;
        } sums[TABLED_CLASSES / PIECE + 1];
        pieces(team, row.n, [&](int64_t k, int64_t begin, int64_t end) {
            vd sum_p{}, sum_rate{};
            for (int64_t i = begin; i < end; i += W) {
                // far beyond the cells, and finite: what is masked is 0 there
                const vf y = rounded(smaller(larger(load_or(row.x, i, row.n, -inf32) - anchor, -far), far) * sign);
                // v is y + place, and `lost` what the rounding of v loses
                const vf w = rounded(y + base), back = rounded(w - y);
                const vf error = rounded(rounded(y - rounded(w - back)) + rounded(base - back)) + under;
                const vf v = rounded(w + error), lost = rounded(w - v) + error;
                const Table::Found f = link.at(v);
                const vi beneath = v <= low, beyond = v >= high, inside = ~(beneath | beyond);
                const vf rate = inside ? f.rate * sign : vf{};
                const vf q = beneath ? bottom : beyond ? top : larger(f.value + f.rate * lost, vf{});
                store(p + i, q), store(rates + i, rate);
                sum_p = widen_add(sum_p, q), sum_rate = widen_add(sum_rate, rate);
            }
            sums[k].p = sum_p, sums[k].rate = sum_rate;
        });
        for (int64_t k = 1; k < pieces_of(row.n); k++) sums[0].p += sums[k].p, sums[0].rate += sums[k].rate;
        return row.n ? Sums{sum(sums[0].p), sum(sums[0].rate)} : Sums{0.0, 0.0};
    }

    // The level, and what is left to add along the rates so that p sums to the mass.
    struct Found {
        double level, change;
    };
    Found solve(Row &row, double low, double high, float *p, float *rates) const {
        // From above Newton's method descends, best where a power makes of the sum what is nearly linear. Without an edge, that
        // of the logarithm ascends from below. Between an edge and ceilings it goes either way; of usual scores few classes are
        // full.
        const bool rises = call.link.sign > 0, convex = rises && !capped;
        // What a sum of rounded numbers can't tell; and where the link has no edge, what a step along the rates sets right: it
        // is short, then.
        const double least = 0x1p-24 * (mass < 4.0 * most ? mass : 4.0 * most), enough = rises ? 2.0 * least : 1e-5 * mass;
        const double short_step = 1e-3 * call.link.scale;
        double level = convex ? high : rises ? low + 0.2 * (high - low) : low, step = high - low;
        Sums s{};
        for (int turn = 0; turn < 200; turn++) {
            s = evaluate(row, level, p, rates);
            const double residual = s.p - mass;
            if (::fabs(residual) <= least || (::fabs(residual) <= enough && ::fabs(residual) <= short_step * s.rate)) break;
            (residual < 0.0 ? low : high) = level;
            if (residual > 0.0 && row.n > TABLED_FEW && rises) row.keep_above(row.x, row.n, edge, high, false);
            double move = -residual / s.rate;
            if (convex && power > 1.0)
                move = (::pow(mass / s.p, 1.0 / power) - 1.0) * power * s.p / s.rate;
            else if (!rises && s.p > 0.0)
                move = ::log(mass / s.p) * s.p / s.rate;
            double next = level + move;
            if (!(next > low && next < high && 2.0 * ::fabs(move) <= ::fabs(step))) next = 0.5 * (low + high);
            if (!(next > low && next < high)) break;
            step = next - level, level = next;
        }
        const double change = s.rate > 0.0 ? (mass - s.p) / s.rate : 0.0;
        return Found{level, change > short_step ? short_step : change < -short_step ? -short_step : change};
    }

    ANYMAX_INLINE vf ending(const float *p, const float *rates, int64_t i, vf change) const {
        return smaller(larger(load(p + i) + change * load(rates + i), vf{}), all<vf>((float)most));
    }

    // Of the kept scores the one that `rank` others exceed or equal, found in the order of the bits of floats.
    static float ranked(const float *x, int64_t n, int64_t rank) {
        const auto ordered = [](float f) {
            const int32_t b = bits_as<int32_t>(f);
            return b < 0 ? (int64_t)INT32_MIN - b : (int64_t)b;
        };
        int64_t low = ordered(-inf32) + 1, high = ordered(inf32);
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2;
            int64_t count = 0;
            for (int64_t i = 0; i < n; i++) count += ordered(x[i]) >= middle;
            (count > rank ? low : high) = middle;
        }
        return bits_as<float>((int32_t)(low < 0 ? INT32_MIN - low : low));
    }

    struct Bounds {
        float high, low;  // of the kept scores
        int64_t count;
        bool sound;  // no NaN and no +inf
    };
    static Bounds bounds_of(const float *x, int64_t n) {
        constexpr int64_t W = width<float>;
        vf high = all<vf>(-inf32), low = all<vf>(inf32);
        vi ok = high < inf32, dropped{};
        for (int64_t i = 0; i < n; i += W) {
            const vf v = load_or(x, i, n, -inf32);
            const vi keep = v > -inf32;
            high = larger(high, v), low = smaller(low, keep ? v : low);
            ok &= v < inf32, dropped += keep;
        }
        int64_t count = 0;
        for (int64_t j = 0; j < W; j++) count -= dropped[j];
        return Bounds{highest_lane(high), lowest_lane(low), count, every<float>(ok)};
    }

    double forward(const float *x, int64_t n, const Sink<float> *out, Scratch &scratch) {
        const Team alone{nullptr};
        const Bounds b = bounds_of(x, n);
        if (!b.sound || !b.count) {
            if (out) b.sound ? zeros(*out, alone) : fill(*out, not_a_number<float>);
            return b.sound ? -inf64 : not_a_number<double>;
        }
        if ((double)b.count * most <= mass * (1.0 + 1e-12)) return all_at_most(x, n, out, scratch);
        find_even(b.count);
        Row row{x, n, b.high};
        double low = even_low, high = even_high - ((double)b.low - (double)b.high);
        if (capped) {
            // The threshold may be far below the maximum. Without an anchor nothing is lost of scores of a usual size, since
            // levels are doubles.
            const bool usual = b.high < 0x1p20f && b.low > -0x1p20f;
            const int64_t full = (int64_t)::ceil(mass / most) - 1;
            row.anchor = usual ? 0.0f : ranked(x, n, full < b.count ? full : b.count - 1);
            low = even_low - ((double)b.high - row.anchor), high = even_high - ((double)b.low - row.anchor);
        } else if (high > call.link.end) {
            high = call.link.end;
        }
        if (low > high) low = high;
        if (call.link.sign > 0) {  // those that are zero at the highest level are zero
            row.kept = scratch.take<float>(VALUES, n), row.index = scratch.take<int32_t>(INDICES, n);
            if (scratch.failed) return 0.0;
            row.keep_above(x, n, edge, high, true);
        }
        float *const p = scratch.take<float>(RESULT, row.n), *const rates = scratch.take<float>(WIDE, row.n);
        if (scratch.failed) return 0.0;
        const Found f = solve(row, low, high, p, rates);
        const vf change = all<vf>((float)f.change);
        if (out && !row.index) {
            float *const to = out->direct ? out->direct : p;
            write(to, 0, n, false, [=](int64_t i) ANYMAX_EACH { return ending(p, rates, i, change); });
            if (!out->direct) deliver(*out, (const float *)to);
        } else if (out) {
            zeros(*out, alone);
            const int32_t *const index = row.index;
            for (int64_t i = 0; i < row.n; i += width<float>) store(p + i, ending(p, rates, i, change));
            put_each(
                out->row, out->dtype, row.n, [=](int64_t i) ANYMAX_EACH { return (int64_t)index[i]; },
                [=](int64_t i) ANYMAX_EACH { return p[i]; });
        }
        return (double)row.anchor - f.level - f.change;
    }

    double all_at_most(const float *x, int64_t n, const Sink<float> *out, Scratch &scratch) const {
        const float each = (float)most;
        if (out) {
            float *const p = scratch.take<float>(RESULT, n);
            if (!p) return 0.0;
            for (int64_t i = 0; i < n; i++) p[i] = x[i] > -inf32 ? each : 0.0f;
            deliver(*out, (const float *)p);
        }
        float least = inf32;
        for (int64_t i = 0; i < n; i++)
            if (x[i] > -inf32 && x[i] < least) least = x[i];
        return (double)least - call.link.end;
    }

    // J^T g = s (g - <s, g> / sum s), s a function of p.
    void backward(const float *p, const float *g, int64_t n, const Sink<float> &out, Scratch &scratch) const {
        constexpr int64_t W = width<float>;
        float *const s = scratch.take<float>(WIDE, n);
        if (!s) return;
        const vf high = all<vf>(link.high), top = all<vf>(link.above);
        vd sum_s{}, sum_sg{};
        for (int64_t i = 0; i < n; i += W) {
            const vf v = load_or(p, i, n, 0.0f), w = load_or(g, i, n, 0.0f);
            const Table::Found f = link.at(v);
            vf r = v >= high ? top : f.value;
            r = v <= 0.0f ? vf{} : r + 0.0f * v;  // NaN stays NaN
            store(s + i, r);
            sum_s = widen_add(sum_s, r);
            const vf product = r * w;
            sum_sg = widen_add(sum_sg, product);
        }
        const double rate = sum(sum_s);
        const vf mean = all<vf>((float)(sum(sum_sg) / (rate == 0.0 ? 1.0 : rate)));
        emit(out, scratch, Team{nullptr}, [=](int64_t i) ANYMAX_EACH { return load(s + i) * (load_or(g, i, n, 0.0f) - mean); });
    }

  public:
    TabledRows(const anymax_tabled_call &call, const Team &team)
        : call(call),
          team(team),
          link(call.link),
          sign(all<vf>((float)call.link.sign)),
          mass(call.mass),
          most(call.most),
          capped(call.most < call.mass),
          edge((double)link.low - call.link.offset) {
        if (call.link.sign < 0 || capped) return;
        const vf last = all<vf>(link.high);
        const double rises = (double)link.at(last).rate[0] * ((double)link.high - (double)link.low) / (double)link.above;
        if (rises > 1.0 && rises < 1e3) power = rises;
    }

    void run(int64_t begin, int64_t end, Scratch &scratch) {
        const int64_t n = call.n, bytes = n * anymax_item(call.dtype);
        const auto read = [&](const void *data, int64_t r, Slot slot) {
            return stage<float>((const char *)data + r * bytes, 1, call.dtype, nullptr, 0, n, scratch, slot);
        };
        for (int64_t r = begin; r < end && !scratch.failed; r++) {
            char *const to = call.out ? (char *)call.out + r * bytes : nullptr;
            const Sink<float> out{to, 1, call.dtype, call.dtype == ANYMAX_F32 ? (float *)to : nullptr, false, n};
            const float *const x = read(call.x, r, STAGED);
            if (!x) return;
            if (call.g) {
                const float *const g = read(call.g, r, STAGED_G);
                if (g) backward(x, g, n, out, scratch);
                continue;
            }
            const double tau = forward(x, n, to ? &out : nullptr, scratch);
            if (call.tau) call.tau[r] = (float)tau;
        }
    }
};

}  // namespace ANYMAX_UNIT
