// Ragged rows. Short segments of one length are served as the rows of one call, where they lie or staged side by side (heads, an order); long ones one
// by one. Threads share the entries. What a row becomes depends on the row alone, so all of this changes no bit of a result.
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "doors/dispatch.hpp"
#include "maps.hpp"

namespace {

constexpr int64_t CHUNK = 65536;      // numbers of segments that are sorted by length together: those of all operands fit into the second cache
constexpr int64_t SHORT_MOST = 2048;  // entries of a segment up to which others of its length are looked for (plan.hpp: no way serves longer rows together)
constexpr int64_t TOGETHER = 8192;    // numbers that are staged at once
constexpr int64_t LANES = 16;         // rows that the widest vector serves at once

struct Work {
    const anymax_call *call;
    const anymax_segments *segments;
    const anymax_unit *unit;
    int64_t size, wide;  // bytes of a number, and of one a row
    int64_t chunk;       // entries of a chunk
    bool shared;         // the longest ones are served already, by all threads
    std::atomic<int> code;

    bool long_one(int64_t n) const { return shared && n >= SHARED_ROW; }
};

// Memory that goes when the task ends.
class Memory {
    void *data = nullptr;
    int64_t bytes = 0;

  public:
    ~Memory() { free(data); }
    template <class T>
    T *take(int64_t count) {
        const int64_t wanted = count * (int64_t)sizeof(T) + 64;
        if (wanted > bytes) {
            free(data);
            data = malloc((size_t)wanted);
            bytes = data ? wanted : 0;
        }
        return data ? (T *)(((uintptr_t)data + 63) & ~(uintptr_t)63) : nullptr;
    }
};

// -- entries to staged rows, and back --------------------------------------------------------------------------------------------------------

// Segments of one length: which, how many, and how their entries are staged: as rows one after another, or entry by entry with all heads side by side.
struct Group {
    const anymax_segments *segments;
    const int32_t *which;  // from `base` on
    int64_t base, count, n, heads, entries;
    bool beside;
    bool wrong;  // an entry was out of range

    int64_t from(int64_t j) const { return segments->ptr[base + which[j]]; }
};

template <bool IN>
inline void move(char *staged, char *own, size_t bytes) {
    memcpy(IN ? staged : own, IN ? own : staged, bytes);
}

// f(k, e) for each entry of the segment that begins at `first`: its place and where it lies.
template <class F>
inline void each_entry(Group &g, int64_t first, F f) {
    const int64_t n = g.n, *const order = g.segments->order;
    if (!order) {
        for (int64_t k = 0; k < n; k++) f(k, first + k);
        return;
    }
    const uint64_t entries = (uint64_t)g.entries;
    bool wrong = false;
    for (int64_t k = 0; k < n; k++) {
        const uint64_t e = (uint64_t)order[first + k];
        wrong |= e >= entries;
        f(k, (int64_t)(e < entries ? e : 0));
    }
    g.wrong |= wrong;
}

// The heads of an entry at once, `BYTES` of them; 0: as many as there are.
template <bool IN, int BYTES>
void move_beside(Group &g, const anymax_view &v, char *staged, int64_t size) {
    const int64_t bytes = BYTES ? BYTES : g.heads * size, step = v.cls * size, row = g.count * bytes, count = g.count;
    char *const own = (char *)v.data;
    for (int64_t j = 0; j < count; j++) {
        char *const to = staged + j * bytes;
        each_entry(g, g.from(j), [=](int64_t k, int64_t e) { move<IN>(to + k * row, own + e * step, (size_t)(BYTES ? BYTES : bytes)); });
    }
}

template <bool IN, int HEADS, class T>
void move_heads(Group &g, const anymax_view &v, T *staged) {
    const int64_t heads = HEADS ? HEADS : g.heads, n = g.n, cls = v.cls, inner = HEADS ? 1 : v.inner, count = g.count;
    T *const own = (T *)v.data;
    for (int64_t j = 0; j < count; j++) {
        T *const row = staged + j * heads * n;
        each_entry(g, g.from(j), [=](int64_t k, int64_t e) {
            T *const at = own + e * cls;
            for (int64_t h = 0; h < heads; h++) IN ? (void)(row[h * n + k] = at[h * inner]) : (void)(at[h * inner] = row[h * n + k]);
        });
    }
}

template <bool IN, class T>
void move_rows(Group &g, const anymax_view &v, T *staged) {
    if (g.heads == 1 && v.cls == 1 && !g.segments->order) {
        for (int64_t j = 0; j < g.count; j++) move<IN>((char *)(staged + j * g.n), (char *)((T *)v.data + g.from(j)), (size_t)g.n * sizeof(T));
        return;
    }
    if (v.inner == 1 && g.heads == 4) return move_heads<IN, 4>(g, v, staged);
    if (v.inner == 1 && g.heads == 8) return move_heads<IN, 8>(g, v, staged);
    if (g.heads == 1) return move_heads<IN, 1>(g, v, staged);
    move_heads<IN, 0>(g, v, staged);
}

template <bool IN>
void move_group(Group &g, const anymax_view &v, char *staged, int64_t size) {
    if (g.beside) switch (g.heads * size) {
            case 8: return move_beside<IN, 8>(g, v, staged, size);
            case 16: return move_beside<IN, 16>(g, v, staged, size);
            case 32: return move_beside<IN, 32>(g, v, staged, size);
            case 64: return move_beside<IN, 64>(g, v, staged, size);
            default: return move_beside<IN, 0>(g, v, staged, size);
        }
    switch (size) {
        case 2: return move_rows<IN>(g, v, (uint16_t *)staged);
        case 4: return move_rows<IN>(g, v, (uint32_t *)staged);
        default: return move_rows<IN>(g, v, (uint64_t *)staged);
    }
}

// What has one number a row: [segments, heads] to [count, heads], and back.
template <bool IN>
void move_each(const Group &g, void *own, char *staged, int64_t size) {
    const int64_t bytes = g.heads * size;
    for (int64_t j = 0; j < g.count; j++) move<IN>(staged + j * bytes, (char *)own + (g.base + g.which[j]) * bytes, (size_t)bytes);
}

// -- rows of one length ----------------------------------------------------------------------------------------------------------------------

struct Stage {
    Memory x, p, g, out, starts, sizes, params, index, scale, result, sorted;
};

bool rows_lie_dense(const anymax_call &call) {
    const anymax_view *const views[] = {&call.x, &call.p, &call.g, &call.out};
    for (const anymax_view *v : views)
        if (v->data && v->cls != 1) return false;
    return call.inner == 1;
}

int serve_group(const Work &w, Group &g, Stage &stage) {
    const anymax_call &call = *w.call;
    const int64_t rows = g.count * g.heads, numbers = rows * g.n;
    anymax_call c = call;
    c.n = g.n, c.fresh = 0, c.starts = c.sizes = nullptr;
    g.beside = (call.op == ANYMAX_FORWARD || call.op == ANYMAX_LOG) && g.heads > 1 && call.x.inner == 1 && call.out.inner == 1;
    c.outer = g.beside ? 1 : rows, c.inner = g.beside ? rows : 1;
    const anymax_view like = g.beside ? anymax_view{nullptr, 0, 1, rows} : anymax_view{nullptr, g.n, 0, 1};
    struct {
        anymax_view *view;
        Memory *memory;
        bool read;
    } const operands[] = {{&c.x, &stage.x, true}, {&c.p, &stage.p, true}, {&c.g, &stage.g, true}, {&c.out, &stage.out, false}};
    if (g.heads == 1 && !g.segments->order && rows_lie_dense(call)) {  // as they lie
        int64_t *starts = stage.starts.take<int64_t>(rows);
        if (!starts) return ANYMAX_NO_MEMORY;
        for (int64_t j = 0; j < rows; j++) starts[j] = g.from(j);
        c.starts = starts;
    }
    for (const auto &o : operands) {
        if (!o.view->data || c.starts) continue;
        char *staged = o.memory->take<char>(numbers * w.size);
        if (!staged) return ANYMAX_NO_MEMORY;
        if (o.read) move_group<true>(g, *o.view, staged, w.size);
        *o.view = like, o.view->data = staged;
    }
    struct {
        const void *own;
        const void **to;
        Memory *memory;
        int64_t size;
    } const each[] = {{call.params, (const void **)&c.params, &stage.params, 8}, {call.index, (const void **)&c.index, &stage.index, 8}, {call.scale, (const void **)&c.scale, &stage.scale, w.wide}};
    for (const auto &e : each) {
        if (!e.own) continue;
        char *staged = e.memory->take<char>(rows * e.size);
        if (!staged) return ANYMAX_NO_MEMORY;
        move_each<true>(g, (void *)e.own, staged, e.size), *e.to = staged;
    }
    void *const result = call.op == ANYMAX_LOSS ? call.value : call.op == ANYMAX_THRESHOLD ? call.tau : nullptr;
    char *made = nullptr;
    if (result) {
        made = stage.result.take<char>(rows * w.wide);
        if (!made) return ANYMAX_NO_MEMORY;
    }
    c.value = call.op == ANYMAX_LOSS ? made : nullptr, c.tau = call.op == ANYMAX_THRESHOLD ? made : nullptr;
    if (g.wrong) return ANYMAX_BAD_SEGMENTS;
    const int code = w.unit->rows(&c, 0, rows, 0, nullptr);
    if (code) return code;
    if (call.out.data && !c.starts) move_group<false>(g, call.out, (char *)c.out.data, w.size);
    if (result) move_each<false>(g, result, made, w.wide);
    return ANYMAX_OK;
}

// One segment where it lies.
int serve_in_place(const Work &w, int64_t s, anymax_parallel team) {
    const anymax_call &call = *w.call;
    anymax_call c = call;
    const int64_t first = w.segments->ptr[s], row = s * call.inner;
    c.starts = c.sizes = nullptr, c.outer = 1, c.n = w.segments->ptr[s + 1] - first, c.fresh = 0;
    anymax_view *const views[] = {&c.x, &c.p, &c.g, &c.out};
    for (anymax_view *v : views)
        if (v->data) v->data = (char *)v->data + first * v->cls * w.size, v->outer = 0;
    if (c.params) c.params += row;
    if (c.index) c.index += row;
    if (c.scale) c.scale = (const char *)c.scale + row * w.wide;
    if (c.value) c.value = (char *)c.value + row * w.wide;
    if (c.tau) c.tau = (char *)c.tau + row * w.wide;
    return w.unit->rows(&c, 0, c.inner, 0, team);
}

// One segment whose entries lie apart, head after head: it is too long for all heads at once.
int serve_apart(const Work &w, int64_t s, Stage &stage) {
    const int32_t which = 0;
    const int64_t n = w.segments->ptr[s + 1] - w.segments->ptr[s];
    Work one{w.call, w.segments, w.unit, w.size, w.wide, w.chunk, w.shared, {0}};
    for (int64_t h = 0; h < w.call->inner; h++) {
        anymax_call c = *w.call;
        const int64_t row = s * c.inner + h;
        anymax_view *const views[] = {&c.x, &c.p, &c.g, &c.out};
        for (anymax_view *v : views)
            if (v->data) v->data = (char *)v->data + h * v->inner * w.size;
        if (c.params) c.params += row;
        if (c.index) c.index += row;
        if (c.scale) c.scale = (const char *)c.scale + row * w.wide;
        if (c.value) c.value = (char *)c.value + row * w.wide;
        if (c.tau) c.tau = (char *)c.tau + row * w.wide;
        const anymax_segments from{w.segments->ptr + s, w.segments->order};
        c.inner = 1;
        one.call = &c;
        Group g{&from, &which, 0, 1, n, 1, w.call->n, false, false};
        const int code = serve_group(one, g, stage);
        if (code) return code;
    }
    return ANYMAX_OK;
}

void serve_empty(const Work &w, int64_t s) {
    const anymax_call &call = *w.call;
    void *const to = call.op == ANYMAX_LOSS ? call.value : call.op == ANYMAX_THRESHOLD ? call.tau : nullptr;
    if (!to) return;
    for (int64_t r = s * call.inner; r < (s + 1) * call.inner; r++) {
        const double v = call.op == ANYMAX_THRESHOLD ? -__builtin_inf() : call.index[r] < 0 ? 0.0 : __builtin_nan("");
        if (w.wide == 8)
            ((double *)to)[r] = v;
        else
            ((float *)to)[r] = (float)v;
    }
}

// -- sharing out -----------------------------------------------------------------------------------------------------------------------------

// The first segment that begins at this entry or later.
int64_t first_from(const Work &w, int64_t entry) {
    int64_t low = 0, high = w.call->outer;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (w.segments->ptr[middle] < entry)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Brings the entries of segments into the cache, in order, before they are taken by length. Reads and no prefetches, which are dropped where a page is
// not known yet. Not where one is long: it is read in order anyway.
void bring(const Work &w, int64_t begin, int64_t end) {
    const anymax_call &call = *w.call;
    const int64_t first = w.segments->ptr[begin], count = w.segments->ptr[end] - first, heads = call.inner;
    if (w.segments->order || count > 2 * w.chunk) return;
    const anymax_view *const views[] = {&call.x, &call.p, &call.g, &call.out};
    for (const anymax_view *v : views) {
        if (!v->data || v->cls != heads || (heads > 1 && v->inner != 1)) continue;
        const char *const from = (const char *)v->data + first * heads * w.size;
        for (int64_t i = 0; i < count * heads * w.size; i += 64) (void)*(const volatile char *)(from + i);
    }
}

// The segments of up to `most` entries at once, in order, by a kernel that takes rows of any such length.
int serve_uneven(const Work &w, int64_t begin, int64_t end, int64_t most, Stage &stage) {
    const int64_t *ptr = w.segments->ptr;
    int64_t *starts = stage.starts.take<int64_t>(end - begin), *sizes = stage.sizes.take<int64_t>(end - begin), rows = 0;
    if (!starts || !sizes) return ANYMAX_NO_MEMORY;
    for (int64_t s = begin; s < end; s++) {
        const int64_t n = ptr[s + 1] - ptr[s];
        starts[rows] = ptr[s], sizes[rows] = n;
        rows += n > 0 && n <= most;
    }
    anymax_call c = *w.call;
    c.outer = rows, c.inner = 1, c.n = most, c.fresh = 0, c.starts = starts, c.sizes = sizes;
    return rows ? w.unit->rows(&c, 0, rows, 0, nullptr) : ANYMAX_OK;
}

int serve(const Work &w, int64_t begin, int64_t end, Stage &stage) {
    const anymax_call &call = *w.call;
    const int64_t *ptr = w.segments->ptr, heads = call.inner;
    const bool lies = !w.segments->order;
    const int64_t uneven = lies && rows_lie_dense(call) ? w.unit->uneven(&call) : 0;
    if (uneven) {
        const int code = serve_uneven(w, begin, end, uneven, stage);
        if (code) return code;
    } else {
        bring(w, begin, end);
    }
    int32_t start[SHORT_MOST + 2] = {};
    for (int64_t s = begin; s < end; s++) {
        const int64_t n = ptr[s + 1] - ptr[s];
        if (n == 0) serve_empty(w, s);
        if (n <= uneven) continue;
        if (n > 0 && n <= SHORT_MOST) start[n + 1]++;
        if (n <= SHORT_MOST || w.long_one(n)) continue;
        const int code = lies ? serve_in_place(w, s, nullptr) : serve_apart(w, s, stage);
        if (code) return code;
    }
    for (int64_t n = 1; n <= SHORT_MOST + 1; n++) start[n] += start[n - 1];
    int32_t *which = stage.sorted.take<int32_t>(start[SHORT_MOST + 1]);
    if (!which) return ANYMAX_NO_MEMORY;
    for (int64_t s = begin; s < end; s++) {
        const int64_t n = ptr[s + 1] - ptr[s];
        if (n > uneven && n <= SHORT_MOST) which[start[n]++] = (int32_t)(s - begin);
    }
    for (int64_t n = 1; n <= SHORT_MOST; n++) {
        // each start has moved on to the next length's
        int64_t few = TOGETHER / (n * heads);
        few = few * heads >= LANES ? few : (LANES + heads - 1) / heads;
        if (heads == 1) few = few / LANES * LANES;
        for (int64_t j = start[n - 1]; j < start[n];) {
            const int64_t count = start[n] - j < few ? start[n] - j : few;
            Group g{w.segments, which + j, begin, count, n, heads, call.n, false, false};
            const int code = serve_group(w, g, stage);
            if (code) return code;
            j += count;
        }
    }
    return ANYMAX_OK;
}

void some_chunks(int64_t begin, int64_t end, void *context) {
    Work &w = *(Work *)context;
    Stage stage;
    const int64_t last = w.call->n / w.chunk;  // with the segments that begin at the very end
    for (int64_t k = begin; k < end; k++) {
        const int code = serve(w, first_from(w, k * w.chunk), k == last ? w.call->outer : first_from(w, (k + 1) * w.chunk), stage);
        if (code) w.code.store(code);
    }
}

bool ascending(const anymax_segments &segments, int64_t count, int64_t entries) {
    bool fine = segments.ptr[0] == 0 && segments.ptr[count] == entries;
    for (int64_t s = 0; s < count && fine; s++) {
        const int64_t n = segments.ptr[s + 1] - segments.ptr[s];
        fine = n >= 0 && n <= INT32_MAX - 1024;
    }
    return fine;
}

}  // namespace

extern "C" int anymax_run_segments(const anymax_call *call, const anymax_segments *segments) {
    if (!call || !segments || !segments->ptr) return ANYMAX_BAD_CALL;
    if (call->op == ANYMAX_LARGEST || call->mask.data || call->support.count) return ANYMAX_BAD_CALL;
    if (call->outer < 0 || call->outer > INT32_MAX || call->inner < 0 || call->n < 0) return ANYMAX_BAD_SHAPE;
    if (call->inner && (call->n > INT64_MAX / 16 / call->inner || call->outer > INT64_MAX / 16 / call->inner)) return ANYMAX_BAD_SHAPE;
    anymax_call row = *call;
    row.outer = 1, row.inner = 1, row.n = 1;
    int code = check_map(&row);
    if (code) return code;
    if (!ascending(*segments, call->outer, call->n)) return ANYMAX_BAD_SEGMENTS;
    if (!call->outer || !call->inner) return ANYMAX_OK;
    if (call->n && (code = check_operands(call))) return code;
    if ((call->op == ANYMAX_LOSS && !(call->value && call->index)) || (call->op == ANYMAX_THRESHOLD && !call->tau)) return ANYMAX_BAD_POINTER;
    const bool f64 = call->dtype == ANYMAX_F64;
    const anymax_parallel run = parallel_of(call->pool);
    const int64_t chunk = CHUNK / call->inner > 1024 ? CHUNK / call->inner : 1024;
    Work w{call, segments, unit_in_use(), f64 ? 8 : call->dtype == ANYMAX_F32 ? 4 : 2, f64 ? 8 : 4, chunk, run && !segments->order, {0}};
    for (int64_t s = 0; w.shared && s < call->outer; s++)
        if (w.long_one(segments->ptr[s + 1] - segments->ptr[s]) && (code = serve_in_place(w, s, run))) return code;
    const int64_t chunks = call->n / chunk + 1;
    if (run && call->n * call->inner >= ALONE_MOST) {
        // a chunk for each thread at least, where the entries are few
        if (chunks < 16) w.chunk = (call->n * call->inner / 16 > ALONE_MOST / 2 ? call->n / 16 : ALONE_MOST / 2 / call->inner) + 1;
        run(0, call->n / w.chunk + 1, 1, some_chunks, &w);
    } else {
        some_chunks(0, chunks, &w);
    }
    return w.code.load();
}

extern "C" int64_t anymax_sort_segments(const int64_t *index, int64_t count, int64_t segments, int64_t *ptr, int64_t *order) {
    memset(ptr, 0, (size_t)(segments + 1) * sizeof(int64_t));
    int64_t sorted = count, before = 0;
    for (int64_t e = 0; e < count; e++) {
        const int64_t s = index[e];
        if ((uint64_t)s >= (uint64_t)segments) return -1 - e;
        if (s < before && e < sorted) sorted = e;
        before = s;
        ptr[s]++;
    }
    for (int64_t s = 0, from = 0; s <= segments; s++) {
        const int64_t n = s < segments ? ptr[s] : 0;
        ptr[s] = from, from += n;
    }
    if (sorted == count) return sorted;
    for (int64_t e = 0; e < count; e++) order[ptr[index[e]]++] = e;
    for (int64_t s = segments; s > 0; s--) ptr[s] = ptr[s - 1];
    if (segments) ptr[0] = 0;
    return sorted;
}
