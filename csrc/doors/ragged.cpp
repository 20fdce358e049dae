// Ragged rows. Segments whose lengths a kernel takes together go through it in order, others by length, as the rows of one
// call: where they lie, or staged side by side (heads); long ones one by one. Where an order says that entries lie apart, those
// of some segments at a time are brought side by side first. Threads share the entries. What a row becomes depends on the row
// alone, so all of this changes no bit of a result.
#include <stdlib.h>

#include <atomic>

#include "doors/pool.h"
#include "doors/staging.hpp"
#include "maps.hpp"

namespace {

// -- rows of one call -------------------------------------------------------------------------------

bool rows_lie_dense(const anymax_call &call) {
    return call.inner == 1 && each_operand(call, [](const anymax_view &v, int) { return v.cls == 1; });
}

// True where the entries of all operands are as far apart, and their heads side by side.
bool heads_lie_alike(const anymax_call &call) {
    return call.inner > 1 &&
           each_operand(call, [&](const anymax_view &v, int) { return v.inner == 1 && v.cls == call.out.cls; });
}

// What has one number a row and is written, if there is such.
void *result_of(const anymax_call &call) {
    return call.op == ANYMAX_LOSS || call.op == ANYMAX_SLOPE ? call.value : call.op == ANYMAX_THRESHOLD ? call.tau : nullptr;
}
// And beside it.
void *slope_of(const anymax_call &call) { return call.op == ANYMAX_LOSS ? call.slope : nullptr; }

int serve_group(const Work &w, const Group &g, Stage &stage) {
    const anymax_call &call = *w.call;
    const int64_t heads = call.inner, rows = g.count * heads, numbers = rows * g.n;
    const bool dense = rows_lie_dense(call);
    anymax_call c = call;
    int64_t *const starts = stage.take<int64_t>(STARTS, g.count), *const sizes =
                                                                      g.uneven ? stage.take<int64_t>(SIZES, g.count) : nullptr;
    if (stage.failed) return ANYMAX_NO_MEMORY;
    c.outer = g.count, c.n = g.n, c.fresh = 0, c.starts = starts, c.sizes = sizes;
    if (dense || (heads_lie_alike(call) && w.unit->beside(&c))) {
        const int64_t step = dense ? 1 : call.out.cls;
        for (int64_t j = 0; j < g.count; j++) starts[j] = w.from(g.segment(j)) * step;
        for (int64_t j = 0; g.uneven && j < g.count; j++) sizes[j] = w.length(g.segment(j));
    } else {
        const bool beside =
            (call.op == ANYMAX_FORWARD || call.op == ANYMAX_LOG) && heads > 1 && call.x.inner == 1 && call.out.inner == 1;
        c.starts = nullptr, c.outer = beside ? 1 : rows, c.inner = beside ? rows : 1;
        const anymax_view like = beside ? anymax_view{nullptr, 0, 1, rows} : anymax_view{nullptr, g.n, 0, 1};
        each_operand(c, [&](anymax_view &v, int i) {
            char *const staged = stage.take<char>(ROWS + i, numbers * w.size);
            if (staged && i < 3) move_group<true>(w, g, v, staged, beside);
            v = like, v.data = staged;
            return staged != nullptr;
        });
    }
    const auto each = [&](Staged use, const void *own, int64_t size) -> void * {
        char *const staged = own ? stage.take<char>(use, rows * size) : nullptr;
        if (staged) move_each<true>(w, g, (void *)own, staged, size);
        return staged;
    };
    c.params = (const double *)each(PARAMS, call.params, 8), c.index = (const int64_t *)each(TARGETS, call.index, 8),
    c.scale = each(SCALES, call.scale, w.wide);
    void *const result = result_of(call), *const slope = slope_of(call);
    char *const made = result ? stage.take<char>(RESULTS, rows * w.wide) : nullptr, *const slopes =
                                                                                        slope ? stage.take<char>(LOSS_SLOPES,
                                                                                                                 rows * w.wide)
                                                                                              : nullptr;
    if (stage.failed) return ANYMAX_NO_MEMORY;
    c.value = call.op == ANYMAX_THRESHOLD ? nullptr : made, c.tau = call.op == ANYMAX_THRESHOLD ? made : nullptr,
    c.slope = slopes;
    const int code = w.unit->rows(&c, 0, rows, 0, nullptr);
    if (code) return code;
    if (call.out.data && !c.starts) move_group<false>(w, g, call.out, (char *)c.out.data, c.inner > 1);
    if (result) move_each<false>(w, g, result, made, w.wide);
    if (slope) move_each<false>(w, g, slope, slopes, w.wide);
    return ANYMAX_OK;
}

// One segment where it lies.
int serve_in_place(const Work &w, int64_t s, anymax_parallel team) {
    anymax_call c = *w.call;
    const int64_t first = w.from(s);
    c.starts = c.sizes = nullptr, c.outer = 1, c.n = w.length(s), c.fresh = 0;
    each_operand(c, [&](anymax_view &v, int) { return v.data = (char *)v.data + first * v.cls * w.size, v.outer = 0, true; });
    if (c.op != ANYMAX_THRESHOLD) c.tau = nullptr;
    anymax_skip_rows(&c, s * c.inner);
    return w.unit->rows(&c, 0, c.inner, 0, team);
}

void serve_empty(const Work &w, int64_t s) {
    const anymax_call &call = *w.call;
    void *const results[] = {result_of(call), slope_of(call)};
    for (void *const to : results)
        for (int64_t r = s * call.inner; to && r < (s + 1) * call.inner; r++) {
            const double v = call.op == ANYMAX_THRESHOLD                    ? -__builtin_inf()
                             : call.op == ANYMAX_SLOPE || call.index[r] < 0 ? 0.0
                                                                            : __builtin_nan("");
            if (w.wide == 8)
                ((double *)to)[r] = v;
            else
                ((float *)to)[r] = (float)v;
        }
}

// Brings the entries of segments into the cache, in order, before they are taken by length. Reads and no prefetches, which are
// dropped where a page is not known yet. Not where one is long: it is read in order anyway.
void bring(const Work &w, int64_t begin, int64_t end) {
    const anymax_call &call = *w.call;
    const int64_t first = w.from(begin), count = w.from(end) - first, heads = call.inner;
    if (count > 2 * w.chunk) return;
    each_operand(call, [&](const anymax_view &v, int) {
        if (v.cls != heads || (heads > 1 && v.inner != 1)) return true;
        const char *const from = (const char *)v.data + first * heads * w.size;
        for (int64_t i = 0; i < count * heads * w.size; i += 64) (void)*(const volatile char *)(from + i);
        return true;
    });
}

// Segments whose entries lie in order.
int serve(const Work &w, int64_t begin, int64_t end, Stage &stage) {
    const int64_t heads = w.call->inner;
    int32_t start[SEGMENT_SHORT_MOST + 2];
    memset(start, 0, (size_t)(w.longest + 2) * sizeof(int32_t));
    bool mixed = false;  // some are taken by length
    for (int64_t s = begin; s < end; s++) {
        const int64_t n = w.length(s);
        if (n == 0) serve_empty(w, s);
        if (n == 0 || n > SEGMENT_SHORT_MOST) continue;
        start[w.alike[n] + 1]++;
        mixed |= !w.uneven[n];
    }
    if (mixed) bring(w, begin, end);
    for (int64_t s = begin; s < end; s++) {
        if (w.length(s) <= SEGMENT_SHORT_MOST || w.long_one(s)) continue;
        const int code = serve_in_place(w, s, nullptr);
        if (code) return code;
    }
    for (int64_t n = 1; n <= w.longest + 1; n++) start[n] += start[n - 1];
    int32_t *which = stage.take<int32_t>(SORTED, start[w.longest + 1]);
    if (!which) return ANYMAX_NO_MEMORY;
    for (int64_t s = begin; s < end; s++) {
        const int64_t n = w.length(s);
        if (n > 0 && n <= SEGMENT_SHORT_MOST) which[start[w.alike[n]]++] = (int32_t)(s - begin);
    }
    for (int64_t n = 1; n <= w.longest; n++) {
        // each start has moved on to the next length's
        const int64_t last = start[n];
        int64_t few = last - start[n - 1];
        if (!few) continue;
        if (!w.uneven[n]) {
            const int64_t most = SEGMENTS_STAGED / (n * heads);
            few = most * heads >= ROWS_AT_ONCE ? most : (ROWS_AT_ONCE + heads - 1) / heads;
            if (heads == 1) few = few / ROWS_AT_ONCE * ROWS_AT_ONCE;
        }
        for (int64_t j = start[n - 1]; j < last;) {
            Group g{which + j, begin, last - j < few ? last - j : few, n, false};
            for (int64_t k = 0; w.uneven[n] && k < g.count; k++) {
                const int64_t own = w.length(g.segment(k));
                g.uneven |= own != n, g.n = own > g.n ? own : g.n;
            }
            const int code = serve_group(w, g, stage);
            if (code) return code;
            j += g.count;
        }
    }
    return ANYMAX_OK;
}

// -- entries in another order -----------------------------------------------------------------------

// Segments whose entries lie in another order; a team for a single long one.
int serve_ordered(const Work &w, int64_t begin, int64_t end, Stage &stage, anymax_parallel team) {
    const anymax_segments &segments = *w.segments;
    const int64_t first = segments.ptr[begin], last = segments.ptr[end], heads = w.call->inner, bytes = heads * w.size;
    anymax_call c = *w.call;
    const auto moves = [&](bool in, const anymax_view &v, void *staged) {
        const Moves m{segments.order, v, (char *)staged, first, heads, w.call->n, w.size};
        return share(team, last - first, SEGMENTS_CHUNK, [&](int64_t from, int64_t to) {
            return in ? m.run<true>(first + from, first + to) : m.run<false>(first + from, first + to);
        });
    };
    const int holds = w.call->op == ANYMAX_FORWARD ? 3 : 1;  // which of them `kept` is: out or p
    int code = ANYMAX_OK;
    each_operand(c, [&](anymax_view &v, int i) {
        const bool kept = segments.kept && i == holds;
        char *const staged =
            kept ? (char *)segments.kept + first * bytes : stage.take<char>(ORDERED + i, (last - first) * bytes);
        code = !staged ? ANYMAX_NO_MEMORY : i < 3 && !kept ? moves(true, v, staged) : ANYMAX_OK;
        v = anymax_view{staged, 0, 1, heads};
        return code == ANYMAX_OK;
    });
    if (code) return code;
    const anymax_segments lying{segments.ptr, nullptr, nullptr};
    Work beside = w;
    beside.call = &c, beside.segments = &lying, beside.first = first;
    code = team ? serve_in_place(beside, begin, team) : serve(beside, begin, end, stage);
    return code || !w.call->out.data ? code : moves(false, w.call->out, c.out.data);
}

// -- sharing out ------------------------------------------------------------------------------------

// The first segment that begins at this entry or later.
int64_t first_from(const Work &w, int64_t entry) {
    return first_not(w.call->outer, [&](int64_t s) { return w.segments->ptr[s] < entry; });
}

// The chunks [begin, end) of the entries.
int serve_chunks(const Work &w, int64_t begin, int64_t end) {
    Stage &stage = own_stage();
    const int64_t last = w.call->n / w.chunk;  // with the segments that begin at the very end
    int all = ANYMAX_OK;
    for (int64_t k = begin; k < end; k++) {
        const int64_t from = first_from(w, k * w.chunk);
        int64_t to = k == last ? w.call->outer : first_from(w, (k + 1) * w.chunk);
        if (w.segments->order)
            while (to > from && w.long_one(to - 1)) to--;
        const int code = w.segments->order ? serve_ordered(w, from, to, stage, nullptr) : serve(w, from, to, stage);
        if (code) all = code;
    }
    stage.leave();
    return all;
}

// The length of the longest segment; less than 0 where the bounds don't ascend to the number of entries.
int64_t longest_of(const anymax_segments &segments, int64_t count, int64_t entries, anymax_parallel run) {
    const int64_t *const ptr = segments.ptr;
    std::atomic<uint64_t> longest{0};
    share(count > 2 * BOUNDS_PART ? run : nullptr, count, BOUNDS_PART, [&](int64_t begin, int64_t end) {
        uint64_t own = 0;
        for (int64_t s = begin; s < end; s++) {
            const uint64_t n = (uint64_t)(ptr[s + 1] - ptr[s]);
            own = n > own ? n : own;
        }
        for (uint64_t known = longest.load(); own > known && !longest.compare_exchange_weak(known, own);) {
        }
        return ANYMAX_OK;
    });
    const uint64_t most = longest.load();
    return ptr[0] == 0 && ptr[count] == entries && most <= (uint64_t)ANYMAX_MOST_CLASSES ? (int64_t)most : -1;
}

// Which lengths are served together, where entries lie side by side.
void find_alike(Work &w) {
    for (int64_t n = 0; n <= w.longest; n++) w.alike[n] = (int16_t)n, w.uneven[n] = false;
    anymax_call c = *w.call;
    if (w.segments->order) each_operand(c, [&](anymax_view &v, int) { return v.cls = c.inner, true; });
    if (!rows_lie_dense(c)) return;
    anymax_span spans[ANYMAX_SPANS];
    c.n = w.longest;
    const int count = w.unit->uneven(&c, spans);
    for (int i = 0; i < count; i++)
        for (int64_t n = spans[i].from; n <= spans[i].to && n <= w.longest; n++)
            w.alike[n] = (int16_t)spans[i].from, w.uneven[n] = true;
}

}  // namespace

extern "C" int anymax_run_segments_by(const anymax_call *call, const anymax_segments *segments, anymax_parallel run) {
    if (!call || !segments || !segments->ptr) return ANYMAX_BAD_CALL;
    if (call->op == ANYMAX_LARGEST || call->map == ANYMAX_BOUNDED || call->mask.data || call->support.count)
        return ANYMAX_BAD_CALL;
    if (segments->kept &&
        (!segments->order || (call->op != ANYMAX_FORWARD && call->op != ANYMAX_VJP && call->op != ANYMAX_SLOPE)))
        return ANYMAX_BAD_CALL;
    if (call->outer < 0 || call->outer > INT32_MAX || call->inner < 0 || call->n < 0) return ANYMAX_BAD_SHAPE;
    if (call->inner && (call->n > INT64_MAX / 16 / call->inner || call->outer > INT64_MAX / 16 / call->inner))
        return ANYMAX_BAD_SHAPE;
    anymax_call row = *call;
    row.outer = 1, row.inner = 1, row.n = 1;
    int code = check_map(&row);
    if (code) return code;
    const int64_t longest = longest_of(*segments, call->outer, call->n, run);
    if (longest < 0) return ANYMAX_BAD_SEGMENTS;
    if (!call->outer || !call->inner) return ANYMAX_OK;
    if (call->n && (code = check_operands(call))) return code;
    if ((call->op == ANYMAX_LOSS && !(call->value && call->index)) || (call->op == ANYMAX_THRESHOLD && !call->tau) ||
        (call->op == ANYMAX_SLOPE && !call->value))
        return ANYMAX_BAD_POINTER;
    const int64_t chunk =
        SEGMENTS_CHUNK / call->inner > SEGMENTS_CHUNK_LEAST ? SEGMENTS_CHUNK / call->inner : SEGMENTS_CHUNK_LEAST;
    Work w;
    w.call = call, w.segments = segments, w.unit = unit_in_use();
    w.size = anymax_item(call->dtype), w.wide = anymax_wide(call->dtype), w.chunk = chunk, w.first = 0;
    w.shared = run != nullptr && longest >= SHARED_ROW;
    w.longest = longest < SEGMENT_SHORT_MOST ? longest : SEGMENT_SHORT_MOST;
    find_alike(w);
    Stage &stage = own_stage();
    for (int64_t s = 0; w.shared && s < call->outer; s++)
        if (w.long_one(s) && (code = segments->order ? serve_ordered(w, s, s + 1, stage, run) : serve_in_place(w, s, run)))
            return code;
    stage.leave();
    if (work_of(call, call->n * call->inner) < ALONE_MOST) run = nullptr;
    if (run && call->n / chunk < 15) {  // a chunk for each thread at least, where the entries are few
        const int64_t few = ALONE_MOST / 2 / work_of(call, call->inner);
        w.chunk = (call->n / 16 > few ? call->n / 16 : few) + 1;
    }
    return share(run, call->n / w.chunk + 1, 1, [&](int64_t begin, int64_t end) { return serve_chunks(w, begin, end); });
}

extern "C" int anymax_run_segments(const anymax_call *call, const anymax_segments *segments) {
    return anymax_run_segments_by(call, segments, call ? parallel_of(call->pool) : nullptr);
}

// -- from an index ----------------------------------------------------------------------------------

namespace {

// Of an index in order: ptr[t] = e for all t above the segment of entry e - 1, up to that of entry e.
template <class T>
struct Bounds {
    const T *index;
    int64_t count, segments, most;  // the largest index allowed
    T *ptr;
    std::atomic<bool> out_of_order{false};

    void fill(int64_t from, int64_t to, int64_t e) const {
        // two threads may come here where the index turns out to be out of order, and nobody reads the bounds then
        for (int64_t t = from; t <= to; t++) __atomic_store_n(ptr + t, (T)e, __ATOMIC_RELAXED);
    }
    void run(int64_t begin, int64_t end) {
        constexpr int64_t STEP = 8;
        int64_t before = begin ? once(index + begin - 1) : -1;
        if (out_of_order.load(std::memory_order_relaxed)) return;
        if ((begin ? before : once(index)) < 0 || before > most) return out_of_order.store(true);
        for (int64_t e = begin; e < end;) {
            if (e + STEP <= end) {
                T other = 0;
                for (int64_t j = 0; j < STEP; j++) other |= index[e + j] ^ (T)before;
                if (!other) {
                    e += STEP;
                    continue;
                }
            }
            for (const int64_t stop = e + STEP < end ? e + STEP : end; e < stop; e++) {
                const int64_t s = once(index + e);
                if (s == before) continue;
                if (s < before || s > most) return out_of_order.store(true);
                fill(before + 1, s, e);
                before = s;
            }
        }
        if (end == count) fill(before + 1, segments, count);
    }
};

// Counting, and then placing, by threads that have parts of the entries one after another; what they count lies in `counts`,
// [parts, most + 1].
template <class T>
class Parts {
    const T *const index;
    const int64_t count, parts;
    const uint64_t most;
    T *const ptr, *const order, *const counts;
    struct {
        uint64_t counted, placed;  // sums of squares, as in `sorted`
        int64_t wrong;             // the first entry that is out of range; below 0: there is none
    } found[SORT_PARTS] = {};

    int64_t from(int64_t k) const { return count * k / parts; }
    T *counts_of(int64_t k) const { return counts + k * (int64_t)(most + 1); }

    // f(entry, segment) for the entries of a part, up to the first that is out of range or that f refuses; the sum of the
    // squares of the segments.
    template <class F>
    uint64_t each_entry(int64_t k, F f) {
        const T *const entries = index;
        const uint64_t largest = most;
        uint64_t squares = 0;  // not in memory that the counts may lie in
        found[k].wrong = -1;
        for (int64_t e = from(k), end = from(k + 1); e < end; e++) {
            const uint64_t s = (uint64_t)(int64_t)once(entries + e);
            if (s > largest || !f(e, s)) {
                found[k].wrong = e;
                break;
            }
            squares += s * s;
        }
        return squares;
    }
    void count_part(int64_t k) {
        T *const own = counts_of(k);
        found[k].counted = each_entry(k, [own](int64_t, uint64_t s) { return own[s]++, true; });
    }
    void place_part(int64_t k) {
        T *const next = counts_of(k), *const to = order;
        const int64_t end = count;
        found[k].placed = each_entry(k, [=](int64_t e, uint64_t s) {
            const int64_t place = next[s];
            if (place >= end) return false;
            next[s] = (T)(place + 1), to[place] = (T)e;
            return true;
        });
    }
    template <class F>
    void each(anymax_parallel run, int64_t number, F f) const {
        share(run, number, 1, [&](int64_t begin, int64_t end) {
            for (int64_t k = begin; k < end; k++) f(k);
            return ANYMAX_OK;
        });
    }

  public:
    Parts(const T *index, int64_t count, uint64_t most, T *ptr, T *order, T *counts, int64_t parts)
        : index(index), count(count), parts(parts), most(most), ptr(ptr), order(order), counts(counts) {}

    // As `sorted` has it, but for an index in order.
    int64_t run(anymax_parallel run) {
        each(run, parts, [this](int64_t k) { count_part(k); });
        for (int64_t k = 0; k < parts; k++)
            if (found[k].wrong >= 0) return -1 - found[k].wrong;
        int64_t begins = 0;
        for (uint64_t s = 0; s <= most; s++) {
            ptr[s] = (T)begins;
            for (int64_t k = 0; k < parts; k++) {
                T &own = counts_of(k)[s];
                const int64_t n = own;
                own = (T)begins, begins += n;
            }
        }
        each(run, parts, [this](int64_t k) { place_part(k); });
        bool changed = false;
        for (int64_t k = 0; k < parts; k++) changed |= found[k].wrong >= 0 || found[k].counted != found[k].placed;
        return changed ? -1 - count : 0;
    }
};

template <class T>
int64_t sorted(const T *index, int64_t count, int64_t segments, T *ptr, T *order, bool strays, anymax_parallel run) {
    Bounds<T> bounds{index, count, segments, strays ? segments : segments - 1, ptr};
    const int64_t grain = 2 * ALONE_MOST;
    if (count)
        share(count > grain ? run : nullptr, count, grain,
              [&](int64_t begin, int64_t end) { return bounds.run(begin, end), ANYMAX_OK; });
    else
        bounds.fill(0, segments, 0);
    if (!bounds.out_of_order.load()) return count;
    if (!order) return 0;
    if (bounds.most < 0) return -1;  // there are no segments
    const uint64_t most = (uint64_t)bounds.most;
    // counts of all parts are few beside the entries, else what they cost is more than what threads gain
    const int64_t few = count / (SORT_COUNTS * (int64_t)(most + 1)), parts = few < SORT_PARTS ? few : SORT_PARTS;
    T *const counts =
        run && parts > 1 && count >= SORT_FROM ? (T *)calloc((size_t)parts * (size_t)(most + 1), sizeof(T)) : nullptr;
    if (counts) {
        const int64_t code = Parts<T>(index, count, most, ptr, order, counts, parts).run(run);
        free(counts);
        if (most < (uint64_t)segments) ptr[segments] = (T)count;
        return code;
    }
    memset(ptr, 0, (size_t)(segments + 1) * sizeof(T));
    uint64_t counted = 0, placed = 0;  // sums of squares: where they differ, the index has changed meanwhile
    for (int64_t e = 0; e < count; e++) {
        const uint64_t s = (uint64_t)(int64_t)once(index + e);
        if (s > most) return -1 - e;
        ptr[s]++, counted += s * s;
    }
    for (int64_t s = 0, from = 0; s <= segments; s++) {
        const int64_t n = ptr[s];
        ptr[s] = (T)from, from += n;
    }
    for (int64_t e = 0; e < count; e++) {
        const uint64_t s = (uint64_t)(int64_t)once(index + e);
        if (s > most || (int64_t)ptr[s] >= count) return -1 - count;
        order[ptr[s]++] = (T)e, placed += s * s;
    }
    for (int64_t s = segments; s > 0; s--) ptr[s] = ptr[s - 1];
    ptr[0] = 0;
    return counted == placed ? 0 : -1 - count;
}

}  // namespace

extern "C" int64_t anymax_sort_segments(const int64_t *index, int64_t count, int64_t segments, int64_t *ptr, int64_t *order,
                                        int32_t pool) {
    return sorted(index, count, segments, ptr, order, false, parallel_of(pool));
}
extern "C" int64_t anymax_sort_strays(const int64_t *index, int64_t count, int64_t segments, int64_t *ptr, int64_t *order,
                                      anymax_parallel run) {
    return sorted(index, count, segments, ptr, order, true, run);
}
extern "C" int64_t anymax_sort_strays_32(const int32_t *index, int64_t count, int64_t segments, int32_t *ptr, int32_t *order,
                                         anymax_parallel run) {
    return sorted(index, count, segments, ptr, order, true, run);
}
