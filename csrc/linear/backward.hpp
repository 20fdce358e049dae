// The backward of forward.hpp. With g^ = (g / Z, -<g, out> / Z) for a query, Z its denominator, and v^ = (v, 1) for a key, the
// gradients are
//   dv = sum over queries of w g^,   dq = scale * sum over keys of <g^, v^> u k,   dk = sum over queries of <g^, v^> u (scale
//   q),
// with w and u as in forward.hpp. All three need sums of one kind over the other side, of a_i a_j b, which are made first; for
// dq and dk they are stored transposed, [dv + 1, j] for each i.
#pragma once

#include "linear/forward.hpp"

namespace ANYMAX_UNIT {

template <class C>
class LinearVJP : LinearHead<C> {
    friend LinearHead<C>;
    typedef LinearHead<C> Base;
    using Base::BLOCK, Base::CHUNK, Base::D, Base::Dp, Base::L, Base::Vp, Base::W, Base::call, Base::d, Base::dv, Base::empty,
        Base::failed, Base::from, Base::keys, Base::to, Base::v;

    const int64_t B, Bp;  // entries of g^ and v^
    const C *const out, *const below, *const g;
    C *const dq, *const dk, *const dv_;
    C *transposed;  // the sums of a_i a_j b over a side, [B, Dp - first(i)] for each i
    C *sums;        // the same of the queries, [pairs, Vp], for dv

    struct Work {
        C *a, *b, *scaled, *a_transposed, *b_transposed;     // of a chunk of one side
        C *row_a, *row_b, *row_da, *row_db, *share, *pairs;  // of a block of the other side
        C *u, *t;                                            // of a tile of rows and a chunk
        void take(const LinearVJP &l, Arena &arena) {
            arena.take(CHUNK * l.Dp, a, scaled), arena.take(CHUNK * l.Bp, b), arena.take(CHUNK * l.D, a_transposed),
                arena.take(CHUNK * l.B, b_transposed);
            arena.take(CHUNK * TILE_ROWS, u, t), arena.take(BLOCK * l.Dp, row_a, row_da, share, pairs),
                arena.take(BLOCK * l.Bp, row_b), arena.take(BLOCK * l.Vp, row_db);
        }
    };

    static int64_t first(int64_t i) { return i / W * W; }
    int64_t transposed_before(int64_t i) const {
        const int64_t whole = i / W;
        return B * (W * (whole * Dp - W * (whole * (whole - 1) / 2)) + (i - whole * W) * (Dp - whole * W));
    }

    // Rows of a side: of a query a = (scale q, 1) and b = g^, where `at` counts through all groups; of a key a = (k, 1) and b =
    // v^.
    void side_in(bool queries, int64_t at, C *a, C *b) const {
        if (!queries) {
            this->key_in(at, a);
            this->row_in(v + at * dv, dv, C(1), b, Bp);
            b[dv] = C(1);
            return;
        }
        this->query_in(at, a);
        const C z = C(1) / below[at];
        this->row_in(g + at * dv, dv, z, b, Bp);
        C total = 0;
        for (int64_t e = 0; e < dv; e++) total += g[at * dv + e] * out[at * dv + e];
        b[dv] = -total * z;
    }
    void chunk_in(bool queries, int64_t at, int64_t count, const Work &w) const {
        for (int64_t l = 0; l < count; l++) side_in(queries, at + l, w.a + l * Dp, w.b + l * Bp);
    }

    // Adds the rows [from, to) of a side to the sums; of queries those of all groups, and then copies the sums for dv.
    void add_to_sums(bool queries, int64_t begin, int64_t end, const Work &w) const {
        bool add = !empty;
        for (int64_t group = 0; group < (queries ? call.groups : 1); group++)
            for (int64_t at = from; at < to; at += CHUNK, add = true) {
                const int64_t count = to - at < CHUNK ? to - at : CHUNK;
                chunk_in(queries, group * L + at, count, w);
                this->each_of(begin, end, [&](int64_t i) {
                    const int64_t low = first(i), wide = Dp - low;
                    for (int64_t l = 0; l < count; l++)
                        for (int64_t j = low; j < Dp; j += W)
                            store(w.scaled + l * Dp + j, load(w.a + l * Dp + j) * splat(w.a[l * Dp + i]));
                    product(w.b, 1, Bp, B, w.scaled + low, Dp, count, wide / W, transposed + transposed_before(i), wide, add);
                });
            }
        if (!queries) return;
        this->each_of(begin, end, [&](int64_t i) {
            const C *from_i = transposed + transposed_before(i);
            C *to_i = sums + this->pairs_before(i) * Vp;
            const int64_t low = first(i), wide = Dp - low;
            for (int64_t j = i; j < D; j++)
                for (int64_t e = 0; e < dv; e++) to_i[(j - i) * Vp + e] = from_i[e * wide + (j - low)];
        });
    }

    // da_j += the sum over i of a_i <b, sums_ij>, where sums_ij = sums_ji is stored for i <= j alone.
    void from_sums(int64_t count, const Work &w) const {
        vec<C> place;
        for (int64_t j = 0; j < W; j++) place[j] = (C)j;
        for (int64_t i = 0; i < D; i++) {
            const int64_t low = first(i), wide = Dp - low;
            product(w.row_b, Bp, 1, count, transposed + transposed_before(i), wide, B, wide / W, w.share, Dp, false);
            for (int64_t m = 0; m < count; m++) {
                const C *a = w.row_a + m * Dp, *h = w.share + m * Dp;
                C *da = w.row_da + m * Dp;
                const vec<C> by = splat(a[i]), head = load(h);
                const vec<C> after = place > splat(C(i - low)) ? head : vec<C>{},
                             from_i = place == splat(C(i - low)) ? head : after;
                store(da + low, load(da + low) + by * from_i);
                vec<C> dot = load(a + low) * after;
                for (int64_t j = low + W; j < Dp; j += W) {
                    const vec<C> part = load(h + j - low);
                    store(da + j, load(da + j) + by * part);
                    dot += load(a + j) * part;
                }
                da[i] += sum(dot);
            }
        }
    }

    // Adds the pairs within the step: of a block of queries, the first of them the `own`-th of the step, with the keys up to
    // each one's own, which are in w; or of a block of keys with the queries from each one's own on.
    void from_step(bool queries, int64_t own, int64_t count, const Work &w) const {
        const int64_t there = to - from;
        for (int64_t m = 0; m < count; m += TILE_ROWS) {
            const int64_t rows = count - m < TILE_ROWS ? count - m : TILE_ROWS, at = own + m;
            // [begin, end) is in pairs with all rows of the tile; the TILE_ROWS from `at` on with some of them.
            const int64_t begin = queries ? 0 : at + rows, end = queries ? at : there;
            const int64_t low = queries ? 0 : at / W * W, high = queries ? at + rows : there;
            const int64_t vectors = (high - low + W - 1) / W;
            product(w.row_a + m * Dp, Dp, 1, rows, w.a_transposed + low, CHUNK, D, vectors, w.u + low, CHUNK, false);
            product(w.row_b + m * Bp, Bp, 1, rows, w.b_transposed + low, CHUNK, B, vectors, w.t + low, CHUNK, false);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t l = low; l < low + vectors * W; l += W) {
                    C *const u = w.u + r * CHUNK + l, *const t = w.t + r * CHUNK + l;
                    const vec<C> was = load(u);
                    store(u, (was * was + splat(C(1))) * splat(C(0.5)));
                    store(t, load(t) * was);
                }
            const auto add = [&](int64_t row, int64_t rows, int64_t begin, int64_t end) {
                if (begin >= end) return;
                const int64_t tile = row - m;
                product(w.t + tile * CHUNK + begin, CHUNK, 1, rows, w.a + begin * Dp, Dp, end - begin, Dp / W,
                        w.row_da + row * Dp, Dp, true);
                if (!queries)
                    product(w.u + tile * CHUNK + begin, CHUNK, 1, rows, w.b + begin * Bp, Bp, end - begin, Vp / W,
                            w.row_db + row * Vp, Vp, true);
            };
            add(m, rows, begin, end);
            for (int64_t r = 0; r < rows; r++) queries ? add(m + r, 1, at, at + r + 1) : add(m + r, 1, at + r, at + rows);
        }
    }

    // The gradients of the queries [start, start + rows) of each group, or of such keys: of pairs with all that is in the sums
    // and, where `causal`, with some of the step.
    void answer(bool queries, int64_t begin, int64_t end, int64_t start, int64_t rows, bool causal, const Work &w) const {
        this->each_block(begin, end, rows, [&](int64_t group, int64_t own, int64_t count) {
            const int64_t row = group * L + start + own;  // keys have one group
            for (int64_t m = 0; m < count; m++) side_in(queries, row + m, w.row_a + m * Dp, w.row_b + m * Bp);
            memset(w.row_da, 0, (size_t)(count * Dp) * sizeof(C));
            if (!queries) memset(w.row_db, 0, (size_t)(count * Vp) * sizeof(C));
            if (!empty) from_sums(count, w);
            if (!empty && !queries) this->add_values(w.row_a, count, sums, w.pairs, w.row_db);
            for (int64_t other = 0; causal && other < (queries ? 1 : call.groups); other++) {
                chunk_in(!queries, other * L + from, to - from, w);
                this->transpose(w.a, to - from, D, Dp, w.a_transposed);
                this->transpose(w.b, to - from, B, Bp, w.b_transposed);
                from_step(queries, own, count, w);
            }
            for (int64_t m = 0; m < count; m++) {
                if (queries) {
                    this->row_in(w.row_da + m * Dp, d, (C)call.scale, dq + (row + m) * d, d);
                } else {
                    this->row_in(w.row_da + m * Dp, d, C(1), dk + (row + m) * d, d);
                    this->row_in(w.row_db + m * Vp, dv, C(1), dv_ + (row + m) * dv, dv);
                }
            }
        });
    }

    void add_to_sums_shared(bool queries, int64_t begin, int64_t end, anymax_parallel team) {
        if (begin >= end) return;
        from = begin, to = end;
        this->each_task(this, this->units(), team,
                        [&](int64_t first, int64_t last, const Work &w) { add_to_sums(queries, first, last, w); });
        empty = false;
    }
    void answer_shared(bool queries, int64_t start, int64_t rows, bool causal, anymax_parallel team) {
        if (rows <= 0) return;
        from = start, to = start + rows;
        this->each_task(
            this, (queries ? call.groups : 1) * this->tiles_of(rows), team,
            [&](int64_t begin, int64_t end, const Work &w) { answer(queries, begin, end, start, rows, causal, w); });
    }

  public:
    LinearVJP(const anymax_linear_call &call, int64_t head)
        : Base(call, head),
          B(dv + 1),
          Bp(this->padded(B)),
          out((const C *)call.out + head * call.groups * L * dv),
          below((const C *)call.below + head * call.groups * L),
          g((const C *)call.g + head * call.groups * L * dv),
          dq((C *)call.dq + head * call.groups * L * d),
          dk((C *)call.dk + head * call.keys * d),
          dv_((C *)call.dv_ + head * call.keys * dv) {}

    int run(Room &room, anymax_parallel team) {
        const int64_t size = transposed_before(D), both = !call.causal ? 0 : keys < L ? keys : L;
        transposed = room.take<C>(size + this->pairs_before(D) * Vp);
        if (!transposed) return ANYMAX_NO_MEMORY;
        sums = transposed + size;
        if (call.dq) {
            for (int64_t at = 0; at < both; at += CHUNK) {
                const int64_t rows = both - at < CHUNK ? both - at : CHUNK;
                answer_shared(true, at, rows, true, team);
                if (at + rows < L) add_to_sums_shared(false, at, at + rows, team);
            }
            if (!call.causal) add_to_sums_shared(false, 0, keys, team);
            answer_shared(true, both, L - both, false, team);
        }
        if (call.dk) {
            if (Vp > dv)
                memset(sums, 0, (size_t)(this->pairs_before(D) * Vp) * sizeof(C));  // the padding after dv is summed too
            empty = true;
            add_to_sums_shared(true, both, L, team);
            for (int64_t at = (both - 1) / CHUNK * CHUNK; both && at >= 0; at -= CHUNK) {
                const int64_t rows = both - at < CHUNK ? both - at : CHUNK;
                answer_shared(false, at, rows, true, team);
                if (at) add_to_sums_shared(true, at, at + rows, team);
            }
            const int64_t seen = call.causal ? both : keys;  // by a query
            if (!call.causal) answer_shared(false, 0, keys, false, team);
            memset(dk + seen * d, 0, (size_t)((call.keys - seen) * d) * sizeof(C));
            memset(dv_ + seen * dv, 0, (size_t)((call.keys - seen) * dv) * sizeof(C));
        }
        return failed;
    }
};

}  // namespace ANYMAX_UNIT
