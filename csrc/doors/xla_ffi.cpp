// The handler that XLA calls, one for all operations: attributes of the call say which. Operands are dense, classes last.
//
//   forward, log      x                     -> out
//   vjp               [x,] p, g             -> out     x where the map needs it
//   threshold         x                     -> tau     [rows]
//   loss              x, index              -> value, tau
//   loss_grad         x, tau, index, scale  -> out
//
// With the attribute per_row = 1 one more operand follows, the parameter of each row, float or double.
//
// Ragged rows have one attribute more, `segments`. 1: the operands of the operation (forward, vjp), [entries, heads], the
// parameters [segments, heads] if there are, ptr, order -> out; `order` is empty where the entries lie in order, and entries
// before ptr[0] or from the last bound on become NaN. 2: index -> ptr, order, where entries of the index [segments] come last.
//
// 3: soft ranks, and with `map` 1 sorted scores, 2 descending, 4 by relative entropy; 4: Fusedmax. The strength of each row is
// an operand: forward x, strength -> out; vjp x, p, g, strength -> out; slope of Fusedmax the same -> its derivative by the
// strength.
#include <stdlib.h>
#include <string.h>

#include "core/memory.hpp"
#include "core/unit.h"
#include "doors/pool.h"
#include "doors/xla_ffi_abi.h"
#include "limits.hpp"

#if !defined(ANYMAX_NO_THREADS)
#include <atomic>
#include <new>
#include <thread>
#endif

using namespace ANYMAX_UNIT;

namespace {

xla_error *refuse(const xla_call *call, int32_t code, const char *sentence) {
    char text[256] = "anymax: ";
    strncat(text, sentence, sizeof text - strlen(text) - 1);
    xla_error_args args = {sizeof args, nullptr, text, code};
    return call->api->error_create(&args);
}

// -- XLA's threads ----------------------------------------------------------------------------------

#if !defined(ANYMAX_NO_THREADS)

// The pieces of [begin, end), which the caller works on together with those of XLA's threads that begin before all is done. The
// handler runs on such a thread itself, so it must never wait for a task to begin: it waits only for pieces that another thread
// has begun.
struct Share {
    anymax_task task;
    void *context;
    int64_t end, grain;
    std::atomic<int64_t> next, left;  // the next piece's begin; how much is not done yet
    std::atomic<int> owners;          // threads that may still read this

    void work() {
        for (;;) {
            const int64_t b = next.fetch_add(grain, std::memory_order_relaxed);
            if (b >= end) return;
            const int64_t e = end - b < grain ? end : b + grain;
            task(b, e, context);
            left.fetch_sub(e - b, std::memory_order_release);
        }
    }
    void leave() {
        if (owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
    }
};

void help(void *data) {
    Share *share = (Share *)data;
    share->work();
    share->leave();
}

thread_local const xla_call *current = nullptr;

// True where XLA reports an error, which is freed.
bool failed(const xla_api *api, xla_error *error) {
    if (!error) return false;
    xla_error_destroy_args destroy = {sizeof destroy, nullptr, error};
    api->error_destroy(&destroy);
    return true;
}

int64_t lent_threads(const xla_call *call) {
    const xla_api *api = call->api;
    if (api->size < offsetof(xla_api, threads) + sizeof api->threads || !api->schedule || !api->threads) return 0;
    int64_t count = 0;
    xla_threads_args args = {sizeof args, nullptr, call->context, &count};
    return failed(api, api->threads(&args)) ? 0 : count;
}

int by_xla(int64_t begin, int64_t end, int64_t grain, anymax_task task, void *context) {
    const xla_call *call = current;
    if (grain < 1) grain = 1;
    const int64_t parts = (end - begin + grain - 1) / grain;
    int64_t helpers = (call ? lent_threads(call) : 0) - 1;
    if (helpers > parts - 1) helpers = parts - 1;
    Share *share = nullptr;
    if (helpers > 0)
        share = new (std::nothrow)
            Share{task, context, end, anymax_piece(end - begin, grain, helpers + 1), {begin}, {end - begin}, {1}};
    if (!share) {
        if (end > begin) task(begin, end, context);
        return 0;
    }
    for (int64_t i = 0; i < helpers; i++) {
        share->owners.fetch_add(1, std::memory_order_relaxed);
        xla_schedule_args args = {sizeof args, nullptr, call->context, help, share};
        if (failed(call->api, call->api->schedule(&args))) {
            share->owners.fetch_sub(1, std::memory_order_relaxed);
            break;
        }
    }
    share->work();
    while (share->left.load(std::memory_order_acquire) != 0) std::this_thread::yield();
    share->leave();
    return 0;
}

// f(threads) with those of XLA.
template <class F>
auto with_threads(const xla_call *call, F f) {
    const xla_call *before = current;  // a call on the same thread that waits for its helpers and has begun this one meanwhile
    current = call;
    const auto out = f(by_xla);
    current = before;
    return out;
}

#else

template <class F>
auto with_threads(const xla_call *, F f) {
    return f((anymax_parallel) nullptr);
}

#endif

// -- what a call says -------------------------------------------------------------------------------

// The eight bytes of an attribute, an integer or a double.
bool attribute(const xla_call *call, const char *name, int64_t *to) {
    const xla_attributes &all = call->attributes;
    for (int64_t i = 0; i < all.count; i++) {
        const xla_text *is = all.names[i];
        if (is->length != strlen(name) || memcmp(is->text, name, is->length) != 0) continue;
        if (all.types[i] != XLA_IS_SCALAR) return false;
        const xla_scalar *s = (const xla_scalar *)all.items[i];
        if (s->dtype != XLA_S64 && s->dtype != XLA_F64) return false;
        memcpy(to, s->value, 8);
        return true;
    }
    return false;
}

const xla_buffer *buffer(const xla_list &list, int64_t i) {
    return i >= 0 && i < list.count && list.types[i] == XLA_IS_BUFFER ? (const xla_buffer *)list.items[i] : nullptr;
}

int64_t size_of(const xla_buffer *b) {
    int64_t count = 1;
    for (int64_t i = 0; i < b->rank; i++) count *= b->dims[i];
    return count;
}

int32_t dtype_of(int32_t xla) {
    switch (xla) {
        case XLA_F32: return ANYMAX_F32;
        case XLA_F64: return ANYMAX_F64;
        case XLA_BF16: return ANYMAX_BF16;
        case XLA_F16: return ANYMAX_F16;
        default: return -1;
    }
}

bool whole(const xla_buffer *b) { return b->dtype == XLA_S32 || b->dtype == XLA_S64; }
bool real(const xla_buffer *b) { return b->dtype == XLA_F32 || b->dtype == XLA_F64; }
bool wide(const xla_buffer *b) { return b->dtype == XLA_S64 || b->dtype == XLA_F64; }

// Numbers of 64 bits, as the kernels read them: the caller's, or, from as many of 32 bits, our own, which are freed at the end.
template <class To, class From>
struct Numbers {
    const To *data = nullptr;
    To *own = nullptr;

    Numbers() = default;
    Numbers(const Numbers &) = delete;
    ~Numbers() { free(own); }

    static To at(const xla_buffer *b, int64_t i) { return wide(b) ? ((const To *)b->data)[i] : (To)((const From *)b->data)[i]; }
    bool make(int64_t count) {
        data = own = (To *)malloc((size_t)(count > 0 ? count : 1) * sizeof(To));
        return own != nullptr;
    }
    bool read(const xla_buffer *b) {
        if (wide(b)) return data = (const To *)b->data, true;
        const int64_t count = size_of(b);
        if (!make(count)) return false;
        for (int64_t i = 0; i < count; i++) own[i] = at(b, i);
        return true;
    }
};
typedef Numbers<int64_t, int32_t> Wholes;
typedef Numbers<double, float> Reals;

xla_error *refuse_form(const xla_call *call) {
    return refuse(call, XLA_INVALID_ARGUMENT, "the call does not have the form that this version of the library knows");
}

xla_error *refuse_code(const xla_call *call, int code) {
    return refuse(call, code == ANYMAX_BAD_SEGMENTS ? XLA_INVALID_ARGUMENT : XLA_INTERNAL, anymax_error(code));
}

// The operands and results of a call.
struct Buffers {
    const xla_buffer *in[6] = {}, *out[3] = {};

    // False where they are not so many, or one is no buffer.
    bool read(const xla_call *call, int64_t inputs, int64_t outputs) {
        if (call->operands.count != inputs || call->results.count != outputs) return false;
        bool all = true;
        for (int64_t i = 0; i < inputs; i++) all &= (in[i] = buffer(call->operands, i)) != nullptr;
        for (int64_t i = 0; i < outputs; i++) all &= (out[i] = buffer(call->results, i)) != nullptr;
        return all;
    }
    // The operands with classes, as views like this one; of two inputs of a product with the Jacobian, or of a slope, none is
    // x.
    void lay_out(anymax_call &c, int64_t inputs, bool to_rows, const anymax_view &like) const {
        const auto view = [&](const xla_buffer *b) { return anymax_view{b->data, like.outer, like.inner, like.cls}; };
        if (to_rows) c.out = view(out[0]);
        const bool product = c.op == ANYMAX_VJP || c.op == ANYMAX_SLOPE;
        if (!product || inputs == 3) c.x = view(in[0]);
        if (product) c.p = view(in[inputs - 2]), c.g = view(in[inputs - 1]);
    }
};

// -- ragged rows ------------------------------------------------------------------------------------

xla_error *serve_sort(const xla_call *call) {
    Buffers b;
    if (!b.read(call, 1, 2)) return refuse_form(call);
    const xla_buffer *index = b.in[0], *ptr = b.out[0], *order = b.out[1];
    const int64_t count = size_of(index), segments = size_of(ptr) - 1;
    if (!whole(index) || ptr->dtype != index->dtype || order->dtype != index->dtype || size_of(order) != count || segments < 0)
        return refuse_form(call);
    const int64_t done = with_threads(call, [&](anymax_parallel run) {
        return wide(index) ? anymax_sort_strays((const int64_t *)index->data, count, segments, (int64_t *)ptr->data,
                                                (int64_t *)order->data, run)
                           : anymax_sort_strays_32((const int32_t *)index->data, count, segments, (int32_t *)ptr->data,
                                                   (int32_t *)order->data, run);
    });
    if (done < 0) return refuse_code(call, ANYMAX_BAD_SEGMENTS);
    for (int64_t e = 0; e < done; e++)
        wide(index) ? (void)(((int64_t *)order->data)[e] = e) : (void)(((int32_t *)order->data)[e] = (int32_t)e);
    return nullptr;
}

// True where the places are 0, 1, 2 ...
bool in_order(const xla_buffer *places) {
    int64_t other = 0;
    for (int64_t k = 0, count = size_of(places); k < count; k++) other |= Wholes::at(places, k) ^ k;
    return !other;
}

xla_error *serve_segments(const xla_call *call, anymax_call c, int64_t per_row) {
    const int64_t given = call->operands.count - 2 - per_row;
    Buffers b;
    if ((c.op == ANYMAX_FORWARD ? given != 1 : c.op != ANYMAX_VJP || (given != 2 && given != 3)) ||
        !b.read(call, given + per_row + 2, 1))
        return refuse_form(call);
    const xla_buffer *x = b.in[0], *out = b.out[0], *own_params = b.in[given], *ptr = b.in[given + per_row],
                     *order = b.in[given + per_row + 1];
    const int64_t size = size_of(x), entries = x->rank ? x->dims[0] : 0, segments = size_of(ptr) - 1;
    int64_t heads = 1;
    for (int64_t i = 1; i < x->rank; i++) heads *= x->dims[i];
    c.dtype = dtype_of(x->dtype);
    bool alike = c.dtype >= 0 && x->rank >= 1 && whole(ptr) && whole(order) && segments >= 0 && out->dtype == x->dtype &&
                 size_of(out) == size;
    for (int64_t i = 1; i < given; i++) alike &= b.in[i]->dtype == x->dtype && size_of(b.in[i]) == size;
    if (per_row) alike &= real(own_params) && size_of(own_params) == segments * heads;
    if (!alike || (size_of(order) && size_of(order) != entries)) return refuse_form(call);
    Wholes bounds, places;
    Reals params;
    // two segments more take the entries of none
    if (!bounds.make(segments + 3) || (per_row && !params.make((segments + 2) * heads)) ||
        (!in_order(order) && !places.read(order)))
        return refuse_code(call, ANYMAX_NO_MEMORY);
    bounds.own[0] = 0, bounds.own[segments + 2] = entries;
    for (int64_t s = 0; s <= segments; s++) bounds.own[s + 1] = Wholes::at(ptr, s);
    for (int64_t r = 0; per_row && r < (segments + 2) * heads; r++) {
        const int64_t own = r < heads ? 0 : r - heads < segments * heads ? r - heads : segments * heads - 1;
        params.own[r] = segments ? Reals::at(own_params, own) : 1.0;
    }
    c.outer = segments + 2, c.inner = heads, c.n = entries, c.params = params.data;
    b.lay_out(c, given, true, anymax_view{nullptr, 0, 1, heads});
    newly_mapped(out->data, size * anymax_item(c.dtype));
    const anymax_segments from{bounds.data, places.data, nullptr};
    if (const int code = with_threads(call, [&](anymax_parallel run) { return anymax_run_segments_by(&c, &from, run); }))
        return refuse_code(call, code);
    const size_t bytes = (size_t)(heads * anymax_item(c.dtype));
    for (int64_t k = 0; k < entries; k++) {
        if (k == bounds.own[1]) k = bounds.own[segments + 1];
        if (k < entries)
            memset((char *)out->data + (size_t)(places.data ? places.data[k] : k) * bytes, 0xff, bytes);  // NaN in every dtype
    }
    return nullptr;
}

// -- maps that solve a row whole --------------------------------------------------------------------

template <class T>
struct Memory {
    T *data;
    explicit Memory(int64_t count) : data((T *)malloc((size_t)(count > 0 ? count : 1) * sizeof(T))) {}
    Memory(const Memory &) = delete;
    ~Memory() { free(data); }
};

xla_error *serve_whole(const xla_call *call, int64_t op, int64_t how, bool fused) {
    const bool forward = op == ANYMAX_FORWARD, slope = op == ANYMAX_SLOPE;
    const int64_t inputs = forward ? 2 : 4;
    Buffers b;
    if ((!forward && op != ANYMAX_VJP && !(slope && fused)) || !b.read(call, inputs, 1)) return refuse_form(call);
    const xla_buffer *x = b.in[0], *p = b.in[1], *g = b.in[2], *strength = b.in[inputs - 1], *out = b.out[0];
    const int32_t dtype = dtype_of(x->dtype);
    if ((dtype != ANYMAX_F32 && dtype != ANYMAX_F64) || x->rank < 1 || !real(strength)) return refuse_form(call);
    const int64_t n = x->dims[x->rank - 1], size = size_of(x), rows = n > 0 ? size / n : 0;
    bool alike = size_of(strength) == rows && out->dtype == x->dtype && size_of(out) == (slope ? rows : size);
    for (int64_t i = 1; i < inputs - 1; i++) alike &= b.in[i]->dtype == x->dtype && size_of(b.in[i]) == size;
    if (!alike) return refuse_form(call);
    if (!rows) return nullptr;
    Reals strengths;
    if (!strengths.read(strength)) return refuse_code(call, ANYMAX_NO_MEMORY);
    const auto in_turn = [&](auto &c, auto run, auto run_vjp) -> xla_error * {
        const int code = with_threads(call, [&](anymax_parallel team) {
            const int code = run(&c, team);
            if (code || forward) return code;
            c.p = p->data, c.g = g->data;
            if (!slope) c.out = out->data;
            return run_vjp(&c, team);
        });
        return code ? refuse_code(call, code) : nullptr;
    };
    if (forward) newly_mapped(out->data, size * anymax_item(dtype));
    // a gradient needs what the forward pass keeps: it goes over the rows again, and writes what nobody reads
    const Memory<char> unread(forward ? 0 : size * anymax_item(dtype));
    if (!unread.data) return refuse_code(call, ANYMAX_NO_MEMORY);
    void *const to = forward ? out->data : unread.data;
    if (fused) {
        const Memory<uint8_t> begins(forward ? 0 : size);
        const Memory<double> slopes(slope ? rows : 0);
        if (!begins.data || !slopes.data) return refuse_code(call, ANYMAX_NO_MEMORY);
        anymax_fused_call c{};
        c.dtype = dtype, c.rows = rows, c.n = n, c.x = x->data, c.out = to;
        c.strength = strengths.data, c.strength_step = 1;
        if (!forward) c.begins = begins.data;
        if (slope) c.slope = slopes.data;
        if (xla_error *error = in_turn(c, anymax_fused_by, anymax_fused_vjp_by)) return error;
        for (int64_t r = 0; slope && r < rows; r++)
            dtype == ANYMAX_F64 ? (void)(((double *)out->data)[r] = slopes.data[r])
                                : (void)(((float *)out->data)[r] = (float)slopes.data[r]);
        return nullptr;
    }
    const Memory<int32_t> order(forward ? 0 : size);
    if (!order.data) return refuse_code(call, ANYMAX_NO_MEMORY);
    anymax_order_call c{};
    c.dtype = dtype, c.rows = rows, c.n = n, c.x = x->data, c.out = to, c.strengths = strengths.data;
    c.sorted = how & 1, c.descending = how >> 1 & 1, c.kl = how >> 2 & 1;
    if (!forward) c.order = order.data;
    return in_turn(c, anymax_order_by, anymax_order_vjp_by);
}

// -- rows of one length -----------------------------------------------------------------------------

xla_error *serve_rows(const xla_call *call, anymax_call c, int64_t per_row) {
    const bool loss = c.op == ANYMAX_LOSS, gradient = c.op == ANYMAX_LOSS_GRAD, slope = c.op == ANYMAX_SLOPE,
               to_rows = !loss && !slope && c.op != ANYMAX_THRESHOLD;
    const int64_t given = call->operands.count - per_row, inputs = c.op == ANYMAX_VJP ? (given == 2 ? 2 : 3)
                                                                   : gradient         ? 4
                                                                   : loss || slope    ? 2
                                                                                      : 1;
    const int64_t outputs = loss ? (call->results.count == 3 ? 3 : 2) : 1;  // the third of a loss is its slope
    Buffers b;
    if (c.op < 0 || (c.op > ANYMAX_THRESHOLD && !slope) || c.op == ANYMAX_LOG_VJP || !b.read(call, inputs + per_row, outputs))
        return refuse_form(call);
    const xla_buffer *x = b.in[0], *targets = loss ? b.in[1] : gradient ? b.in[2] : nullptr, *own_params = b.in[inputs];
    c.dtype = dtype_of(x->dtype);
    if (c.dtype < 0) return refuse(call, XLA_INVALID_ARGUMENT, "scores must be float16, bfloat16, float32 or float64");
    if (x->rank < 1) return refuse_form(call);
    const int64_t n = x->dims[x->rank - 1], size = size_of(x), rows = n > 0 ? size / n : 0;
    const int32_t computed = c.dtype == ANYMAX_F64 ? XLA_F64 : XLA_F32;
    const auto like_x = [&](const xla_buffer *a) { return a->dtype == x->dtype && size_of(a) == size; };
    const auto each_row = [&](const xla_buffer *a) { return a->dtype == computed && size_of(a) == rows; };
    bool alike = true;
    for (int64_t i = 0; i < outputs; i++) alike &= to_rows ? like_x(b.out[i]) : each_row(b.out[i]);
    for (int64_t i = 1; i < inputs && (c.op == ANYMAX_VJP || slope); i++) alike &= like_x(b.in[i]);
    if (gradient) alike &= each_row(b.in[1]) && each_row(b.in[3]);
    if (targets) alike &= whole(targets) && size_of(targets) == rows;
    if (per_row) alike &= real(own_params) && size_of(own_params) == rows;
    if (!alike) return refuse_form(call);

    c.outer = rows, c.inner = 1, c.n = n;
    b.lay_out(c, inputs, to_rows, anymax_view{nullptr, n, 0, 1});
    if (c.op == ANYMAX_THRESHOLD) c.tau = b.out[0]->data;
    if (slope) c.value = b.out[0]->data;
    if (loss) c.value = b.out[0]->data, c.tau = b.out[1]->data, c.slope = outputs == 3 ? b.out[2]->data : nullptr;
    if (gradient) c.tau = b.in[1]->data, c.scale = b.in[3]->data;
    Wholes index;
    Reals params;
    if ((targets && !index.read(targets)) || (per_row && !params.read(own_params))) return refuse_code(call, ANYMAX_NO_MEMORY);
    c.index = index.data, c.params = params.data;
    c.fresh = to_rows && newly_mapped(b.out[0]->data, size * anymax_item(c.dtype));
    const int code = with_threads(call, [&](anymax_parallel run) { return anymax_run_by(&c, run); });
    return code ? refuse_code(call, code) : nullptr;
}

}  // namespace

extern "C" ANYMAX_API xla_error *anymax_xla(xla_call *call) {
    for (xla_extension *e = call->extensions; e; e = e->next) {
        if (e->type != XLA_IS_METADATA) continue;
        xla_metadata *to = ((xla_metadata_extension *)e)->metadata;
        // the version that both sides know; early ones of XLA do not say theirs here
        const xla_version *theirs = call->api ? &call->api->version : nullptr;
        const bool older = theirs && theirs->major == XLA_MAJOR && theirs->minor < XLA_MINOR;
        to->version.major = XLA_MAJOR;
        to->version.minor = !theirs ? (int32_t)XLA_OLDEST : older ? theirs->minor : (int32_t)XLA_MINOR;
        to->traits = 0;  // none: a GPU's command buffer cannot record this handler
        return nullptr;
    }
    int64_t op, map, noise, nodes, param, per_row, segments = 0;
    if (call->stage != XLA_EXECUTE || !attribute(call, "op", &op) || !attribute(call, "map", &map) ||
        !attribute(call, "noise", &noise) || !attribute(call, "nodes", &nodes) || !attribute(call, "param", &param) ||
        !attribute(call, "per_row", &per_row) || op != (int32_t)op)
        return refuse_form(call);
    anymax_call c{};
    c.op = (int32_t)op, c.map = (int32_t)map, c.noise = (int32_t)noise, c.nodes = nodes;
    memcpy(&c.param, &param, 8);
    if (!attribute(call, "segments", &segments) || !segments) return serve_rows(call, c, per_row ? 1 : 0);
    if (segments > 2) return serve_whole(call, op, map, segments == 4);
    return segments == 2 ? serve_sort(call) : serve_segments(call, c, per_row ? 1 : 0);
}
