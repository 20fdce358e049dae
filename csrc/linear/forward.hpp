// Attention with Taylor softmax of order 2 in linear time. With u = <(scale q, 1), (k, 1)> the weight of a key is 1 + s + s^2/2
// = (u^2 + 1)/2, and u^2 is a sum over pairs (i, j) of entries. So the sums over the keys of k_i k_j v are made first, once for
// each pair i <= j, and a query needs these sums alone, whatever the length.
#pragma once

#include "core/rows.hpp"
#include "core/tasks.hpp"
#include "core/unit.h"

namespace ANYMAX_UNIT {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_VECTORS = 4;  // the sums of a tile take 24 of 32 registers
#else
constexpr int TILE_VECTORS = 2;
#endif
constexpr int TILE_ROWS = 6;

// One tile of a product of matrices, whose sums stay in registers: to[m, :] = (where `add`: +=) the sum over t < count of a[m
// am + t at] b[t, :].
template <class C, int M, int N>
static void product_tile(const C *a, int64_t am, int64_t at, const C *b, int64_t bs, int64_t count, C *to, int64_t ts,
                         bool add) {
    constexpr int64_t W = width<C>;
    vec<C> sum[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[m][n] = vec<C>{};
    for (int64_t t = 0; t < count; t++) {
        vec<C> v[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) v[n] = load(b + t * bs + n * W);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const vec<C> s = splat(a[m * am + t * at]);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sum[m][n] += s * v[n];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            C *place = to + m * ts + n * W;
            store(place, add ? load(place) + sum[m][n] : sum[m][n]);
        }
}

template <class C, int M>
static void product_rows(const C *a, int64_t am, int64_t at, const C *b, int64_t bs, int64_t count, int64_t vectors, C *to,
                         int64_t ts, bool add) {
    constexpr int64_t W = width<C>;
    int64_t n = 0;
    for (; n + TILE_VECTORS <= vectors; n += TILE_VECTORS)
        product_tile<C, M, TILE_VECTORS>(a, am, at, b + n * W, bs, count, to + n * W, ts, add);
    if (TILE_VECTORS > 2 && n + 2 <= vectors)
        product_tile<C, M, 2>(a, am, at, b + n * W, bs, count, to + n * W, ts, add), n += 2;
    if (n < vectors) product_tile<C, M, 1>(a, am, at, b + n * W, bs, count, to + n * W, ts, add);
}

// The same for any number of rows, and of vectors in a row of b.
template <class C>
static void product(const C *a, int64_t am, int64_t at, int64_t rows, const C *b, int64_t bs, int64_t count, int64_t vectors,
                    C *to, int64_t ts, bool add) {
    int64_t m = 0;
    for (; m + TILE_ROWS <= rows; m += TILE_ROWS)
        product_rows<C, TILE_ROWS>(a + m * am, am, at, b, bs, count, vectors, to + m * ts, ts, add);
    const C *rest = a + m * am;
    C *last = to + m * ts;
    switch (rows - m) {
        case 5: return product_rows<C, 5>(rest, am, at, b, bs, count, vectors, last, ts, add);
        case 4: return product_rows<C, 4>(rest, am, at, b, bs, count, vectors, last, ts, add);
        case 3: return product_rows<C, 3>(rest, am, at, b, bs, count, vectors, last, ts, add);
        case 2: return product_rows<C, 2>(rest, am, at, b, bs, count, vectors, last, ts, add);
        case 1: return product_rows<C, 1>(rest, am, at, b, bs, count, vectors, last, ts, add);
    }
}

// One head of keys and values and the queries of all groups that see it: what forward and backward have in common. Queries
// (scale q, 1) and keys (k, 1) are rows of D = d + 1 entries, padded with zeros to whole vectors. Causal calls go in steps of
// CHUNK positions: what lies before the step is in the sums, pairs within the step are computed one by one.
template <class C>
class LinearHead {
  protected:
    static constexpr int64_t W = width<C>, CHUNK = 24 * TILE_ROWS,
                             BLOCK = 8 * TILE_ROWS;  // positions of a step; rows that a task serves at once
    static_assert(CHUNK % W == 0, "a chunk consists of whole vectors");

    const anymax_linear_call &call;
    const int64_t d, dv, D, Dp, Vp, L;
    const C *q, *k, *v;
    int64_t keys;       // without those that padding or `lengths` leaves out
    bool empty = true;  // the sums: nothing was added so far
    int64_t from, to;   // the keys, or queries, of the step
    int failed = ANYMAX_OK;

    LinearHead(const anymax_linear_call &call, int64_t head)
        : call(call),
          d(call.d),
          dv(call.dv),
          D(d + 1),
          Dp(padded(D)),
          Vp(padded(dv)),
          L(call.queries),
          q((const C *)call.q + head * call.groups * L * d),
          k((const C *)call.k + head * call.keys * d),
          v((const C *)call.v + head * call.keys * dv),
          keys(keys_of(call, head)) {}

    // Those that `lengths` says are there, of those that are: it was checked, but another thread may have written to it since.
    static int64_t keys_of(const anymax_linear_call &call, int64_t head) {
        const int64_t there = call.lengths ? once(call.lengths + head) : call.keys;
        return there < 0 ? 0 : there < call.keys ? there : call.keys;
    }

    static int64_t padded(int64_t count) { return (count + W - 1) / W * W; }
    static void row_in(const C *from, int64_t count, C factor, C *to, int64_t padded) {
        int64_t i = 0;
        for (; i < count; i++) to[i] = from[i] * factor;
        for (; i < padded; i++) to[i] = C(0);
    }
    void key_in(int64_t l, C *to) const {
        row_in(k + l * d, d, C(1), to, Dp);
        to[d] = C(1);
    }
    void query_in(int64_t l, C *to) const {  // l counts through all groups
        row_in(q + l * d, d, (C)call.scale, to, Dp);
        to[d] = C(1);
    }
    static void transpose(const C *rows, int64_t count, int64_t entries, int64_t step,
                          C *to) {  // [count, step] -> [entries, CHUNK]
        for (int64_t l = 0; l < count; l++)
            for (int64_t i = 0; i < entries; i++) to[i * CHUNK + l] = rows[l * step + i];
    }

    // Where the sums over rows a of a_i a_j b begin, [pairs, Vp], for each i <= j.
    int64_t pairs_before(int64_t i) const { return i * D - i * (i - 1) / 2; }

    // result = the sum over pairs i <= j of a_i a_j sums_ij, half of it where i = j < d: that is of (u^2 + 1) / 2 b over all
    // rows b in the sums.
    void add_values(const C *rows, int64_t count, const C *sums, C *pairs, C *result) const {
        for (int64_t i = 0; i < D; i++) {
            for (int64_t m = 0; m < count; m++) {
                const C *row = rows + m * Dp;
                C *to = pairs + m * Dp;
                for (int64_t j = i / W * W; j < Dp; j += W) store(to + j, load(row + j) * splat(row[i]));
                if (i < d) to[i] *= C(0.5);
            }
            product(pairs + i, Dp, 1, count, sums + pairs_before(i) * Vp, Vp, D - i, Vp / W, result, Vp, i > 0);
        }
    }

    // A task's unit i stands for the entries i and D - 1 - i together, so that all units cost the same.
    template <class F>
    void each_of(int64_t begin, int64_t end, const F &each) const {
        for (int64_t unit = begin; unit < end; unit++) {
            each(unit);
            if (D - 1 - unit != unit) each(D - 1 - unit);
        }
    }
    int64_t units() const { return (D + 1) / 2; }

    // A task's units are tiles of TILE_ROWS rows, group after group: each(group, its first row, count) for blocks of them.
    template <class F>
    static void each_block(int64_t begin, int64_t end, int64_t rows, const F &each) {
        const int64_t tiles = tiles_of(rows);
        while (begin < end) {
            const int64_t group = begin / tiles, tile = begin - group * tiles, own = tile * TILE_ROWS;
            int64_t take = end - begin < BLOCK / TILE_ROWS ? end - begin : BLOCK / TILE_ROWS;
            if (take > tiles - tile) take = tiles - tile;
            each(group, own, own + take * TILE_ROWS < rows ? take * TILE_ROWS : rows - own);
            begin += take;
        }
    }
    static int64_t tiles_of(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

    static Room &task_memory() {
        static thread_local Room room;
        return room;
    }
    // task(begin, end, the memory of a task, which `Head::Work` takes) for parts of the units.
    template <class Head, class Task>
    static void each_task(Head *me, int64_t units, anymax_parallel team, const Task &task) {
        const int64_t threads = me->call.threads > 1 ? me->call.threads : 1, parts = 4 * threads;
        const int code =
            share(threads > 1 ? team : nullptr, units, (units + parts - 1) / parts, [&](int64_t begin, int64_t end) {
                typename Head::Work w;
                Arena size{nullptr, 0};
                w.take(*me, size);
                Arena arena{task_memory().take<char>(size.used), 0};
                w.take(*me, arena);
                if (arena.base) task(begin, end, w);
                task_memory().leave();
                return arena.base ? ANYMAX_OK : ANYMAX_NO_MEMORY;
            });
        if (code) me->failed = code;
    }
};

template <class C>
class Linear : LinearHead<C> {
    friend LinearHead<C>;
    typedef LinearHead<C> Base;
    using Base::BLOCK, Base::CHUNK, Base::D, Base::Dp, Base::L, Base::Vp, Base::W, Base::call, Base::d, Base::dv, Base::empty,
        Base::failed, Base::from, Base::keys, Base::to, Base::v;

    C *sums, *gram;  // over the keys so far: [pairs, Vp] of k_i k_j v, and [D, Dp] of k_i k_j
    C *const out, *const below;

    // The memory of a task.
    struct Work {
        C *keys, *values, *scaled, *transposed, *queries, *pairs, *result, *weights, *below;
        void take(const Linear &l, Arena &arena) {
            arena.take(CHUNK * l.Dp, keys), arena.take(CHUNK * l.Vp, values, scaled), arena.take(CHUNK * l.D, transposed),
                arena.take(CHUNK * TILE_ROWS, weights);
            arena.take(BLOCK * l.Dp, queries, pairs), arena.take(BLOCK * l.Vp, result), arena.take(BLOCK, below);
        }
    };

    void keys_in(const Work &w, int64_t begin, int64_t count) const {
        for (int64_t l = 0; l < count; l++) {
            this->key_in(begin + l, w.keys + l * Dp);
            this->row_in(v + (begin + l) * dv, dv, C(1), w.values + l * Vp, Vp);
        }
    }

    // Adds the keys [from, to) to the sums.
    void add_keys(int64_t begin, int64_t end, const Work &w) const {
        for (int64_t at = from; at < to; at += CHUNK) {
            const int64_t count = to - at < CHUNK ? to - at : CHUNK;
            const bool add = !empty || at > from;
            keys_in(w, at, count);
            this->each_of(begin, end, [&](int64_t i) {
                for (int64_t l = 0; l < count; l++)
                    for (int64_t e = 0; e < Vp; e += W)
                        store(w.scaled + l * Vp + e, load(w.values + l * Vp + e) * splat(w.keys[l * Dp + i]));
                product(w.keys + i, 1, Dp, D - i, w.scaled, Vp, count, Vp / W, sums + this->pairs_before(i) * Vp, Vp, add);
                product(w.keys + i, 1, Dp, 1, w.keys, Dp, count, Dp / W, gram + i * Dp, Dp, add);
            });
        }
    }

    // Numerators and denominators of the queries in w, by the keys in the sums.
    void from_sums(int64_t count, const Work &w) const {
        product(w.queries, Dp, 1, count, gram, Dp, D, Dp / W, w.pairs, Dp, false);
        for (int64_t m = 0; m < count; m++) {
            vec<C> squares{};
            for (int64_t j = 0; j < Dp; j += W) squares += load(w.queries + m * Dp + j) * load(w.pairs + m * Dp + j);
            w.below[m] = (sum(squares) + gram[d * Dp + d]) * C(0.5);
        }
        this->add_values(w.queries, count, sums, w.pairs, w.result);
    }

    // Adds to them the keys of the step. A query sees the keys up to its own; that of the first query in w is the key `first`
    // of the step.
    void from_step(int64_t first, int64_t count, const Work &w) const {
        const int64_t there = to - from;
        for (int64_t m = 0; m < count; m += TILE_ROWS) {
            const int64_t rows = count - m < TILE_ROWS ? count - m : TILE_ROWS,
                          all = first + m;  // all rows of the tile see the first `all` keys
            const int64_t seen = all + rows < there ? all + rows : there;
            product(w.queries + m * Dp, Dp, 1, rows, w.transposed, CHUNK, D, (seen + W - 1) / W, w.weights, CHUNK, false);
            for (int64_t r = 0; r < rows; r++) {
                C *weight = w.weights + r * CHUNK;
                vec<C> total{};
                for (int64_t l = 0; l < seen; l += W) {
                    const vec<C> u = load(weight + l), p = (u * u + splat(C(1))) * splat(C(0.5));
                    store(weight + l, p);
                    total += l + W <= all ? p : vec<C>{};
                }
                C own = sum(total);
                for (int64_t l = all / W * W; l <= all + r && l < seen; l++) own += weight[l];
                w.below[m + r] += own;
            }
            product(w.weights, CHUNK, 1, rows, w.values, Vp, all, Vp / W, w.result + m * Vp, Vp, true);
            for (int64_t r = 0; r < rows; r++)
                product(w.weights + r * CHUNK + all, CHUNK, 1, 1, w.values + all * Vp, Vp,
                        r + 1 < seen - all ? r + 1 : seen - all, Vp / W, w.result + (m + r) * Vp, Vp, true);
        }
    }

    void results_out(int64_t row, int64_t count, const Work &w) const {
        for (int64_t m = 0; m < count; m++) {
            const C by = w.below[m] == C(0) ? C(1) : w.below[m];  // 0: there is no key
            for (int64_t e = 0; e < dv; e++) out[(row + m) * dv + e] = w.result[m * Vp + e] / by;
            if (below) below[row + m] = by;
        }
    }

    // The results of the queries [first, first + rows) of each group: they see the keys in the sums and, where `causal`, those
    // of the step up to their own.
    void answer(int64_t begin, int64_t end, int64_t first, int64_t rows, bool causal, const Work &w) const {
        if (causal) {
            keys_in(w, from, to - from);
            this->transpose(w.keys, to - from, D, Dp, w.transposed);
        }
        this->each_block(begin, end, rows, [&](int64_t group, int64_t own, int64_t count) {
            const int64_t row = group * L + first + own;
            for (int64_t m = 0; m < count; m++) this->query_in(row + m, w.queries + m * Dp);
            if (empty) {
                memset(w.result, 0, (size_t)(count * Vp) * sizeof(C));
                memset(w.below, 0, (size_t)count * sizeof(C));
            } else {
                from_sums(count, w);
            }
            if (causal) from_step(own, count, w);
            results_out(row, count, w);
        });
    }

    void add_keys_shared(anymax_parallel team) {
        this->each_task(this, this->units(), team, [&](int64_t begin, int64_t end, const Work &w) { add_keys(begin, end, w); });
        empty = false;
    }
    void answer_shared(int64_t first, int64_t rows, bool causal, anymax_parallel team) {
        this->each_task(this, call.groups * this->tiles_of(rows), team,
                        [&](int64_t begin, int64_t end, const Work &w) { answer(begin, end, first, rows, causal, w); });
    }

  public:
    Linear(const anymax_linear_call &call, int64_t head)
        : Base(call, head),
          out((C *)call.out + head * call.groups * L * dv),
          below(call.below ? (C *)call.below + head * call.groups * L : nullptr) {}

    int run(Room &room, anymax_parallel team) {
        const int64_t size = this->pairs_before(D) * Vp;
        sums = room.take<C>(size + D * Dp);
        if (!sums) return ANYMAX_NO_MEMORY;
        gram = sums + size;
        const int64_t both = !call.causal ? 0 : keys < L ? keys : L;
        for (from = 0; from < both; from = to) {
            to = both - from < CHUNK ? both : from + CHUNK;
            answer_shared(from, to - from, true, team);
            if (to < L) add_keys_shared(team);
        }
        if (!call.causal && keys) {
            from = 0, to = keys;
            add_keys_shared(team);
        }
        if (both < L) answer_shared(both, L - both, false, team);
        return failed;
    }
};

// Threads share the heads where that leaves none of them idle, else the work of each head. The order of every sum is the same.
template <class Head>
static int each_head(const anymax_linear_call *call, anymax_parallel team) {
    const int64_t threads = call->threads < 1 ? 1 : call->threads;
    const bool by_heads = call->heads % threads == 0 || call->heads >= 4 * threads;
    return share(by_heads ? team : nullptr, call->heads, 1, [&](int64_t begin, int64_t end) {
        static thread_local Room room;
        int code = ANYMAX_OK;
        for (int64_t head = begin; head < end; head++) {
            Head own(*call, head);
            if (const int failed = own.run(room, by_heads ? nullptr : team)) code = failed;
        }
        room.leave();
        return code;
    });
}

}  // namespace ANYMAX_UNIT
