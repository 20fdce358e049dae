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
// Ragged rows have one attribute more, `segments`. 1: the operands of the operation (forward, vjp), [entries, heads], the parameters
// [segments, heads] if there are, ptr, order -> out; `order` is empty where the entries lie in order, and entries before ptr[0] or from the last
// bound on become NaN. 2: index -> ptr, order, where entries of the index [segments] come last.
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "doors/pool.h"
#include "doors/xla_ffi_abi.h"

#if !defined(ANYMAX_NO_THREADS)
#include <atomic>
#include <new>
#include <thread>
#endif

namespace {

xla_error *refuse(const xla_call *call, int32_t code, const char *sentence) {
    char text[256] = "anymax: ";
    strncat(text, sentence, sizeof text - strlen(text) - 1);
    xla_error_args args = {sizeof args, nullptr, text, code};
    return call->api->error_create(&args);
}

// -- XLA's threads --------------------------------------------------------------------------------------------------

#if !defined(ANYMAX_NO_THREADS)

// The pieces of [begin, end), which the caller works on together with those of XLA's threads that begin before all is done. The handler runs on
// such a thread itself, so it must never wait for a task to begin: it waits only for pieces that another thread has begun.
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
    if (helpers > 0) share = new (std::nothrow) Share{task, context, end, anymax_piece(end - begin, grain, helpers + 1), {begin}, {end - begin}, {1}};
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

// XLA gets results of this size from the system at each run of a program, and for the system to clear and map them page by page can take longer
// than the kernel: large pages are asked for. True for such memory.
bool newly_mapped(void *data, int64_t bytes) {
    if (bytes < (int64_t)32 << 20) return false;  // malloc maps at least all that is larger than this
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 16, first = (uintptr_t)data, last = first + (uintptr_t)bytes;  // a multiple of every page size
    const uintptr_t begin = (first + page - 1) & ~(page - 1), end = last & ~(page - 1);
    madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)data;
#endif
    return true;
}

// -- what a call says -----------------------------------------------------------------------------------------------

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

// Numbers in the type that the kernels read: the caller's, or converted ones, which are freed at the end.
template <class To>
struct Numbers {
    const To *data = nullptr;
    To *own = nullptr;

    Numbers() = default;
    Numbers(const Numbers &) = delete;
    ~Numbers() { free(own); }

    template <class From>
    bool convert(const void *from, int64_t count) {
        data = own = (To *)malloc((size_t)(count > 0 ? count : 1) * sizeof(To));
        for (int64_t i = 0; own && i < count; i++) own[i] = (To)((const From *)from)[i];
        return own != nullptr;
    }
};

// -- ragged rows ----------------------------------------------------------------------------------------------------

const char *const UNKNOWN_FORM = "the call does not have the form that this version of the library knows";

bool whole(const xla_buffer *b) { return b && (b->dtype == XLA_S32 || b->dtype == XLA_S64); }

xla_error *serve_sort(const xla_call *call) {
    const xla_buffer *index = buffer(call->operands, 0), *ptr = buffer(call->results, 0), *order = buffer(call->results, 1);
    if (call->operands.count != 1 || call->results.count != 2 || !whole(index) || !ptr || !order || ptr->dtype != index->dtype || order->dtype != index->dtype)
        return refuse(call, XLA_INVALID_ARGUMENT, UNKNOWN_FORM);
    const int64_t count = size_of(index), segments = size_of(ptr) - 1;
    if (size_of(order) != count || segments < 0) return refuse(call, XLA_INVALID_ARGUMENT, UNKNOWN_FORM);
    const int64_t done = with_threads(call, [&](anymax_parallel run) {
        return index->dtype == XLA_S64 ? anymax_sort_strays((const int64_t *)index->data, count, segments, (int64_t *)ptr->data, (int64_t *)order->data, run)
                                       : anymax_sort_strays_32((const int32_t *)index->data, count, segments, (int32_t *)ptr->data, (int32_t *)order->data, run);
    });
    if (done < 0) return refuse(call, XLA_INVALID_ARGUMENT, anymax_error(9));
    for (int64_t e = 0; e < done; e++) index->dtype == XLA_S64 ? (void)(((int64_t *)order->data)[e] = e) : (void)(((int32_t *)order->data)[e] = (int32_t)e);
    return nullptr;
}

// True where the places are 0, 1, 2 ...
template <class T>
bool in_order(const T *places, int64_t count) {
    T other = 0;
    for (int64_t k = 0; k < count; k++) other |= places[k] ^ (T)k;
    return !other;
}

xla_error *serve_segments(const xla_call *call, anymax_call c, int64_t per_row) {
    const int64_t given = call->operands.count - 2 - per_row;
    const xla_buffer *in[6] = {}, *out = buffer(call->results, 0);
    if (given < 1 || given > 3 || (c.op != ANYMAX_FORWARD && c.op != ANYMAX_VJP) || given != (c.op == ANYMAX_FORWARD ? 1 : given == 2 ? 2 : 3) || call->results.count != 1 || !out)
        return refuse(call, XLA_INVALID_ARGUMENT, UNKNOWN_FORM);
    for (int64_t i = 0; i < call->operands.count; i++)
        if (!(in[i] = buffer(call->operands, i))) return refuse(call, XLA_INVALID_ARGUMENT, UNKNOWN_FORM);
    const xla_buffer *x = in[0], *ptr = in[given + per_row], *order = in[given + per_row + 1];
    const int64_t size = size_of(x), entries = x->rank ? x->dims[0] : 0, segments = size_of(ptr) - 1, item = x->dtype == XLA_F64 ? 8 : x->dtype == XLA_F32 ? 4 : 2;
    int64_t heads = 1;
    for (int64_t i = 1; i < x->rank; i++) heads *= x->dims[i];
    c.dtype = dtype_of(x->dtype);
    bool alike = c.dtype >= 0 && x->rank >= 1 && whole(ptr) && whole(order) && segments >= 0 && out->dtype == x->dtype && size_of(out) == size;
    for (int64_t i = 1; i < given; i++) alike &= in[i]->dtype == x->dtype && size_of(in[i]) == size;
    if (per_row) alike &= (in[given]->dtype == XLA_F32 || in[given]->dtype == XLA_F64) && size_of(in[given]) == segments * heads;
    if (!alike || (size_of(order) && size_of(order) != entries)) return refuse(call, XLA_INVALID_ARGUMENT, UNKNOWN_FORM);
    Numbers<int64_t> bounds, places;
    Numbers<double> params;
    // two segments more take the entries of none
    bounds.own = (int64_t *)malloc((size_t)(segments + 3) * 8), params.own = per_row ? (double *)malloc((size_t)((segments + 2) * heads + 1) * 8) : nullptr;
    bool memory = bounds.own && (!per_row || params.own);
    const bool wide = order->dtype == XLA_S64, lies = !size_of(order) || (wide ? in_order((const int64_t *)order->data, entries) : in_order((const int32_t *)order->data, entries));
    if (wide && !lies)
        places.data = (const int64_t *)order->data;
    else if (!lies)
        memory &= places.convert<int32_t>(order->data, entries);
    if (!memory) return refuse(call, XLA_INTERNAL, anymax_error(6));
    bounds.own[0] = 0, bounds.own[segments + 2] = entries;
    for (int64_t s = 0; s <= segments; s++) bounds.own[s + 1] = ptr->dtype == XLA_S64 ? ((const int64_t *)ptr->data)[s] : ((const int32_t *)ptr->data)[s];
    for (int64_t r = 0; per_row && r < (segments + 2) * heads; r++) {
        const int64_t own = r < heads ? 0 : r - heads < segments * heads ? r - heads : segments * heads - 1;
        params.own[r] = !segments ? 1.0 : in[given]->dtype == XLA_F64 ? ((const double *)in[given]->data)[own] : (double)((const float *)in[given]->data)[own];
    }
    c.outer = segments + 2, c.inner = heads, c.n = entries, c.params = params.own;
    const auto view = [heads](const xla_buffer *b) { return anymax_view{b->data, 0, 1, heads}; };
    c.out = view(out);
    if (given != 2) c.x = view(x);
    if (c.op == ANYMAX_VJP) c.p = view(in[given - 2]), c.g = view(in[given - 1]);
    newly_mapped(out->data, size * item);
    const anymax_segments from{bounds.own, places.data, nullptr};
    if (const int code = with_threads(call, [&](anymax_parallel run) { return anymax_run_segments_by(&c, &from, run); })) return refuse(call, code == 9 ? XLA_INVALID_ARGUMENT : XLA_INTERNAL, anymax_error(code));
    for (int64_t k = 0; k < entries; k++) {
        if (k == bounds.own[1]) k = bounds.own[segments + 1];
        if (k < entries) memset((char *)out->data + (places.data ? places.data[k] : k) * heads * item, 0xff, (size_t)(heads * item));  // NaN in every dtype
    }
    return nullptr;
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
    const char *unknown_form = UNKNOWN_FORM;
    int64_t op, map, noise, nodes, param, per_row, segments = 0;
    if (call->stage != XLA_EXECUTE || !attribute(call, "op", &op) || !attribute(call, "map", &map) ||
        !attribute(call, "noise", &noise) || !attribute(call, "nodes", &nodes) || !attribute(call, "param", &param) ||
        !attribute(call, "per_row", &per_row))
        return refuse(call, XLA_INVALID_ARGUMENT, unknown_form);

    if (attribute(call, "segments", &segments) && segments) {
        if (segments == 2) return serve_sort(call);
        anymax_call c;
        memset(&c, 0, sizeof c);
        c.op = (int32_t)op, c.map = (int32_t)map, c.noise = (int32_t)noise, c.nodes = nodes;
        memcpy(&c.param, &param, 8);
        return serve_segments(call, c, per_row ? 1 : 0);
    }
    const int64_t given = call->operands.count - (per_row ? 1 : 0);
    const xla_buffer *in[5], *out[2];
    for (int64_t i = 0; i < 5; i++) in[i] = i < call->operands.count ? buffer(call->operands, i) : nullptr;
    for (int64_t i = 0; i < 2; i++) out[i] = buffer(call->results, i);
    int64_t inputs = 1, outputs = 1;
    switch (op) {
        case ANYMAX_FORWARD:
        case ANYMAX_LOG:
        case ANYMAX_THRESHOLD: break;
        case ANYMAX_VJP: inputs = given == 2 ? 2 : 3; break;
        case ANYMAX_LOSS: inputs = outputs = 2; break;
        case ANYMAX_LOSS_GRAD: inputs = 4; break;
        default: return refuse(call, XLA_INVALID_ARGUMENT, unknown_form);
    }
    if (given != inputs || call->results.count != outputs || call->operands.count > 5)
        return refuse(call, XLA_INVALID_ARGUMENT, unknown_form);
    for (int64_t i = 0; i < call->operands.count; i++)
        if (!in[i]) return refuse(call, XLA_INVALID_ARGUMENT, unknown_form);
    for (int64_t i = 0; i < outputs; i++)
        if (!out[i]) return refuse(call, XLA_INVALID_ARGUMENT, unknown_form);

    const xla_buffer *x = in[0];
    const int32_t dtype = dtype_of(x->dtype), wide = x->dtype == XLA_F64 ? XLA_F64 : XLA_F32;
    if (dtype < 0) return refuse(call, XLA_INVALID_ARGUMENT, "scores must be float16, bfloat16, float32 or float64");
    if (x->rank < 1) return refuse(call, XLA_INVALID_ARGUMENT, unknown_form);
    const int64_t n = x->dims[x->rank - 1], size = size_of(x), rows = n > 0 ? size / n : 0;

    const bool to_rows = op != ANYMAX_LOSS && op != ANYMAX_THRESHOLD;
    bool alike = to_rows ? out[0]->dtype == x->dtype && size_of(out[0]) == size : true;
    for (int64_t i = 0; !to_rows && i < outputs; i++) alike &= out[i]->dtype == wide && size_of(out[i]) == rows;
    if (op == ANYMAX_VJP)
        for (int64_t i = 1; i < inputs; i++) alike &= in[i]->dtype == x->dtype && size_of(in[i]) == size;
    if (op == ANYMAX_LOSS_GRAD)
        for (int64_t i = 1; i < 4; i += 2) alike &= in[i]->dtype == wide && size_of(in[i]) == rows;

    anymax_call c;
    memset(&c, 0, sizeof c);
    c.op = (int32_t)op, c.map = (int32_t)map, c.dtype = dtype, c.noise = (int32_t)noise, c.nodes = nodes;
    c.outer = rows, c.inner = 1, c.n = n;
    memcpy(&c.param, &param, 8);
    const auto view = [n](const xla_buffer *b) { return anymax_view{b->data, n, 0, 1}; };
    if (to_rows) c.out = view(out[0]);
    if (op == ANYMAX_VJP) {
        if (inputs == 3) c.x = view(x);
        c.p = view(in[inputs - 2]), c.g = view(in[inputs - 1]);
    } else {
        c.x = view(x);
    }
    if (op == ANYMAX_THRESHOLD) c.tau = out[0]->data;
    if (op == ANYMAX_LOSS) c.value = out[0]->data, c.tau = out[1]->data;
    if (op == ANYMAX_LOSS_GRAD) c.tau = in[1]->data, c.scale = in[3]->data;

    bool memory = true;
    Numbers<int64_t> index;
    if (op == ANYMAX_LOSS || op == ANYMAX_LOSS_GRAD) {
        const xla_buffer *t = in[op == ANYMAX_LOSS ? 1 : 2];
        alike &= (t->dtype == XLA_S32 || t->dtype == XLA_S64) && size_of(t) == rows;
        if (!alike) return refuse(call, XLA_INVALID_ARGUMENT, unknown_form);
        if (t->dtype == XLA_S64)
            index.data = (const int64_t *)t->data;
        else
            memory &= index.convert<int32_t>(t->data, rows);
        c.index = index.data;
    }
    Numbers<double> params;
    if (per_row) {
        const xla_buffer *a = in[inputs];
        alike &= (a->dtype == XLA_F32 || a->dtype == XLA_F64) && size_of(a) == rows;
        if (!alike) return refuse(call, XLA_INVALID_ARGUMENT, unknown_form);
        if (a->dtype == XLA_F64)
            params.data = (const double *)a->data;
        else
            memory &= params.convert<float>(a->data, rows);
        c.params = params.data;
    }
    if (!alike) return refuse(call, XLA_INVALID_ARGUMENT, unknown_form);
    if (!memory) return refuse(call, XLA_INTERNAL, anymax_error(6));
    const int64_t item = x->dtype == XLA_F64 ? 8 : x->dtype == XLA_F32 ? 4 : 2;
    c.fresh = to_rows && newly_mapped(out[0]->data, size * item);
    const int code = with_threads(call, [&](anymax_parallel run) { return anymax_run_by(&c, run); });
    return code ? refuse(call, XLA_INTERNAL, anymax_error(code)) : nullptr;
}
