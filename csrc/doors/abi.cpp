// The entry points: what a call must satisfy, which unit serves it, how its rows are shared out.
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "decode/steps.hpp"
#include "doors/dispatch.hpp"
#include "doors/pool.h"
#include "maps.hpp"

#if defined(ANYMAX_HAVE_AVX2) || defined(ANYMAX_HAVE_AVX512)
#include "doors/cpu.hpp"
#endif
#if defined(__linux__)
#include <stdio.h>
#endif

// -- the units that were built, the best first ------------------------------------------------------

namespace {

struct Entry {
    const char *name;
    const anymax_unit *unit;
    bool (*here)();
};

bool always() { return true; }

const Entry entries[] = {
#if defined(ANYMAX_HAVE_AVX512)
    {"avx512", &anymax_unit_avx512, has_avx512},
#endif
#if defined(ANYMAX_HAVE_AVX2)
    {"avx2", &anymax_unit_avx2, has_avx2},
#endif
#if defined(ANYMAX_HAVE_NEON)
    {"neon", &anymax_unit_neon, always},
#endif
#if defined(ANYMAX_HAVE_SIMD128)
    {"simd128", &anymax_unit_simd128, always},
#endif
#if defined(ANYMAX_HAVE_BASELINE)
    {"baseline", &anymax_unit_baseline, always},
#endif
};

const Entry *named(const char *name) {
    for (const Entry &e : entries)
        if (strcmp(e.name, name) == 0 && e.here()) return &e;
    return nullptr;
}

const Entry *first() {
    const char *asked = getenv("ANYMAX_ISA");
    const Entry *e = asked ? named(asked) : nullptr;
    if (e) return e;
    for (const Entry &entry : entries)
        if (entry.here()) return &entry;
    return nullptr;
}

std::atomic<const Entry *> chosen{nullptr};
std::atomic<anymax_parallel> lent{nullptr};

const Entry *entry() {
    const Entry *e = chosen.load(std::memory_order_relaxed);
    if (e) return e;
    e = first();
    chosen.store(e);
    return e;
}

// Bytes of the largest cache of a core, as the system describes the first of them (in use or not, all are taken to be alike); 0
// where it does not. sysconf says on some machines what the caches of all dies hold together, of which a core sees its own.
int64_t described_cache() {
    int64_t largest = 0;
#if defined(__linux__)
    for (int index = 0; index < 8; index++) {
        char path[64];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
        FILE *file = fopen(path, "r");
        if (!file) break;
        long long size = 0;
        char unit = 0;
        if (fscanf(file, "%lld%c", &size, &unit) >= 1) size <<= unit == 'K' ? 10 : unit == 'M' ? 20 : 0;
        fclose(file);
        if (size > largest) largest = size;
    }
#endif
    return largest;
}

// What is described as smaller or larger than any last cache is none: 32 MB, a usual one, then.
int64_t cache_size() {
    static const int64_t size = [] {
        const int64_t bytes = described_cache();
        return bytes >= (4 << 20) && bytes <= ((int64_t)1 << 30) ? bytes : (int64_t)32 << 20;
    }();
    return size;
}

// -- sharing out ------------------------------------------------------------------------------------

// The saved support of these rows, before anything is read or written by its indices: it may have gone through other hands
// since it was saved.
bool in_order(const anymax_call *call, int64_t begin, int64_t end) {
    const anymax_support &s = call->support;
    if (!s.count || (call->op != ANYMAX_VJP && call->op != ANYMAX_LOSS_GRAD && call->op != ANYMAX_SLOPE)) return true;
    for (int64_t r = begin; r < end; r++) {
        const int32_t count = s.count[r], *const index = s.index + r * s.capacity;
        if (count < -1 || count > s.capacity) return false;
        int32_t wrong = count > 0 && (index[0] < 0 || index[count - 1] >= call->n);  // as wide as they are: in vectors
        for (int32_t i = 1; i < count; i++) wrong |= index[i] <= index[i - 1];
        if (wrong) return false;
    }
    return true;
}

int rows_of(const anymax_unit *unit, const anymax_call *call, int64_t begin, int64_t end, int bypass, anymax_parallel team) {
    return in_order(call, begin, end) ? unit->rows(call, begin, end, bypass, team) : ANYMAX_BAD_SUPPORT;
}

bool writes_rows(int32_t op) {
    return op == ANYMAX_FORWARD || op == ANYMAX_LOG || op == ANYMAX_VJP || op == ANYMAX_LOG_VJP || op == ANYMAX_LOSS_GRAD;
}

int execute(const anymax_call *call, anymax_parallel run) {
    const Entry *e = entry();
    const int64_t rows = call->outer * call->inner, n = call->n, size = anymax_item(call->dtype);
    const int64_t elements = rows * n;
    const int64_t least = call->op == ANYMAX_LOSS_GRAD ? BYPASS_GRADIENT_FROM : BYPASS_FROM;
    const int bypass = !call->fresh && writes_rows(call->op) && elements * size >= cache_size() / 4 * 3 && n * size >= least;
    if (!run || work_of(call, elements) < ALONE_MOST) return rows_of(e->unit, call, 0, rows, bypass, nullptr);
    if (n >= (rows == 1 ? SHARED_ALONE : SHARED_ROW) && rows < ROWS_FEW)
        return rows_of(e->unit, call, 0, rows, bypass, run);  // the threads share each row
    int64_t grain = grain_of(work_of(call, n));
    if (call->inner > 1 || grain > ROWS_AT_ONCE / 2) {  // transposed, or solved, so many at once
        const int64_t groups = (grain + ROWS_AT_ONCE / 2) / ROWS_AT_ONCE;
        grain = (groups ? groups : 1) * ROWS_AT_ONCE;
    }
    return share(run, rows, grain,
                 [=](int64_t begin, int64_t end) { return rows_of(e->unit, call, begin, end, bypass, nullptr); });
}

}  // namespace

// Of all but the operands.
int check_map(const anymax_call *c) {
    if (!entry()) return ANYMAX_BAD_CALL;
    if (c->op < 0 || c->op >= ANYMAX_OPS) return ANYMAX_BAD_CALL;
    if (c->map < 0 || c->map >= ANYMAX_MAPS) return ANYMAX_BAD_MAP;
    if (c->dtype < ANYMAX_F32 || c->dtype > ANYMAX_F16) return ANYMAX_BAD_DTYPE;
    if (c->outer < 0 || c->inner < 0 || c->n < 1 || c->n > ANYMAX_MOST_CLASSES) return ANYMAX_BAD_SHAPE;
    int64_t rows, classes;
    if (__builtin_mul_overflow(c->outer, c->inner, &rows) || __builtin_mul_overflow(rows, c->n, &classes) ||
        classes > INT64_MAX / 16)
        return ANYMAX_BAD_SHAPE;
    if (c->outer == 0 || c->inner == 0) return ANYMAX_OK;
    const MapRow &map = MAPS[c->map];
    if (c->params ? !map.per_row : !in_range(map, c->param)) return ANYMAX_BAD_PARAM;
    if (c->map == ANYMAX_PERTURB && (c->nodes < 1 || c->nodes > NODES_MOST || c->noise < 0 || c->noise > ANYMAX_GUMBEL))
        return ANYMAX_BAD_PARAM;
    switch (c->op) {
        case ANYMAX_LOG:
        case ANYMAX_LOG_VJP:
            return map.log || (!c->params && link_of(c->map, c->param) == EXPONENTIAL) ? ANYMAX_OK : ANYMAX_BAD_MAP;
        case ANYMAX_LOSS: return has_loss(c->map) && (!c->slope || map.slope) ? ANYMAX_OK : ANYMAX_BAD_MAP;
        case ANYMAX_LOSS_GRAD:
        case ANYMAX_THRESHOLD: return has_loss(c->map) ? ANYMAX_OK : ANYMAX_BAD_MAP;
        case ANYMAX_SLOPE: return map.slope ? ANYMAX_OK : ANYMAX_BAD_MAP;
        case ANYMAX_LARGEST:
            return !c->params && c->param >= 1.0 && c->param <= (double)c->n && is_multiple(c->param, 1) ? ANYMAX_OK
                                                                                                         : ANYMAX_BAD_PARAM;
        default: return ANYMAX_OK;
    }
}

int check_operands(const anymax_call *c) {
    if (c->support.count && c->support.capacity < 0) return ANYMAX_BAD_SHAPE;
    if (c->support.count && c->support.capacity > 0 && (!c->support.index || !c->support.value)) return ANYMAX_BAD_POINTER;
    if (c->sizes || (c->starts && (c->mask.data || c->support.count || c->map == ANYMAX_BOUNDED))) return ANYMAX_BAD_CALL;
    if (c->map == ANYMAX_BOUNDED && !c->upper.data) return ANYMAX_BAD_POINTER;
    const bool x = c->x.data, out = c->out.data, given = c->p.data && c->g.data && out && (x || !needs_scores(c->map));
    bool there = x && out;
    switch (c->op) {
        case ANYMAX_VJP:
        case ANYMAX_LOG_VJP: there = given; break;
        case ANYMAX_LOSS: there = x && c->index && c->value; break;
        case ANYMAX_SLOPE:
            there = c->p.data && c->g.data && (x || !needs_scores(c->map)) && (c->value || (out && c->map == ANYMAX_BOUNDED));
            break;
        case ANYMAX_LOSS_GRAD: there = x && out && c->index && c->scale; break;
        case ANYMAX_THRESHOLD: there = x && c->tau; break;
        case ANYMAX_LARGEST: there = x && out && c->positions; break;
    }
    return there ? ANYMAX_OK : ANYMAX_BAD_POINTER;
}

const anymax_unit *unit_in_use() { return entry()->unit; }

extern "C" int anymax_run_by(const anymax_call *call, anymax_parallel run) {
    if (!call) return ANYMAX_BAD_CALL;
    int code = check_map(call);
    if (code || call->outer == 0 || call->inner == 0) return code;
    code = check_operands(call);
    return code ? code : execute(call, run);
}

anymax_parallel parallel_of(int pool) { return pool < 0 ? nullptr : pool == 1 ? lent.load() : anymax_pool_run; }

extern "C" int anymax_run(const anymax_call *call) {
    if (!call) return ANYMAX_BAD_CALL;
    return anymax_run_by(call, parallel_of(call->pool));
}

extern "C" int anymax_rows(int64_t code, const void *x, void *out, int64_t rows, int64_t n, double param) {
    anymax_call c{};
    c.op = (int32_t)(code & 255), c.map = (int32_t)(code >> 8 & 255), c.dtype = (int32_t)(code >> 16 & 255),
    c.pool = (int32_t)(code >> 24 & 1);
    if (code >> 25 || (c.op != ANYMAX_FORWARD && c.op != ANYMAX_LOG)) return ANYMAX_BAD_CALL;
    c.outer = rows, c.inner = 1, c.n = n, c.param = param;
    if (c.map == ANYMAX_BUDGET && !(c.param <= (double)n))
        return ANYMAX_BAD_PARAM;  // no mask may have left fewer classes: the caller's mistake
    c.x = anymax_view{(void *)x, n, 0, 1};
    c.out = anymax_view{out, n, 0, 1};
    return anymax_run(&c);
}

static int check(const anymax_linear_call *call) {
    if (!call || !entry() || !entry()->unit->linear) return ANYMAX_BAD_CALL;
    if (call->dtype != ANYMAX_F32 && call->dtype != ANYMAX_F64) return ANYMAX_BAD_DTYPE;
    const int64_t sizes[] = {call->heads, call->groups, call->queries, call->keys, call->d, call->dv};
    for (const int64_t size : sizes)
        if (size < 0 || size > INT32_MAX) return ANYMAX_BAD_SHAPE;
    if (call->d > HEAD_MOST || call->dv > VALUES_MOST) return ANYMAX_BAD_SHAPE;
    const bool queries = call->heads && call->groups && call->queries, keys = call->heads && call->keys;
    if ((queries && ((call->dv && !call->out) || (call->d && !call->q))) ||
        (keys && ((call->dv && !call->v) || (call->d && !call->k))))
        return ANYMAX_BAD_POINTER;
    for (int64_t h = 0; call->lengths && h < call->heads; h++)
        if (call->lengths[h] < 0 || call->lengths[h] > call->keys) return ANYMAX_BAD_SHAPE;
    return ANYMAX_OK;
}

extern "C" int anymax_linear(const anymax_linear_call *call) {
    const int code = check(call);
    if (code || !call->heads || !call->groups || !call->queries) return code;
    return entry()->unit->linear(call, parallel_of(call->pool));
}

extern "C" int anymax_linear_vjp(const anymax_linear_call *call) {
    const int code = check(call);
    if (code || !call->heads) return code;
    const bool queries = call->groups && call->queries, keys = call->keys;
    if (queries && (!call->below || (call->dv && !call->g))) return ANYMAX_BAD_POINTER;
    if (keys && call->dk && call->dv && !call->dv_) return ANYMAX_BAD_POINTER;
    anymax_linear_call c = *call;
    if (!queries) c.queries = 0;  // nothing of no groups
    return entry()->unit->linear_vjp(&c, parallel_of(call->pool));
}

// -- truncations and draws --------------------------------------------------------------------------

static int check(const anymax_decode_call *call) {
    if (!call || !entry() || !entry()->unit->decode) return ANYMAX_BAD_CALL;
    if (call->map < 0 || call->map >= ANYMAX_MAPS || needs_scores(call->map)) return ANYMAX_BAD_MAP;
    if (!in_range(MAPS[call->map], call->param)) return ANYMAX_BAD_PARAM;
    if (call->dtype < ANYMAX_F32 || call->dtype > ANYMAX_F16) return ANYMAX_BAD_DTYPE;
    if (call->left && call->dtype > ANYMAX_F64) return ANYMAX_BAD_DTYPE;
    if (call->rows < 0 || call->n < 1 || call->n > ANYMAX_MOST_CLASSES || call->draws < 0 || call->count < 0 ||
        call->count > STEPS_MOST)
        return ANYMAX_BAD_SHAPE;
    if (call->rows && call->rows > INT64_MAX / 16 / (call->n > call->draws ? call->n : call->draws)) return ANYMAX_BAD_SHAPE;
    if (!call->rows) return ANYMAX_OK;
    if (!call->x || (call->count && !call->steps) || (call->listed && !call->counts) ||
        (call->draws && (call->given ? call->log_p == nullptr : !call->u || !call->index)))
        return ANYMAX_BAD_POINTER;
    if (call->left == call->x && (call->draws || call->entropy || call->tau || call->listed || call->stride != call->n))
        return ANYMAX_BAD_POINTER;
    for (int64_t k = 0; k < call->count; k++) {
        if (!is_step(call->steps[k].kind) || call->steps[k].least < 0) return ANYMAX_BAD_CALL;
        const StepRow &step = STEPS[call->steps[k].kind];
        for (int64_t r = 0; r < (call->values ? call->rows : 1); r++) {
            const double value = call->values ? call->values[r * call->count + k] : call->steps[k].value;
            if (!(value >= step.least && value <= step.most)) return ANYMAX_BAD_PARAM;
        }
    }
    return ANYMAX_OK;
}

extern "C" int anymax_decode(const anymax_decode_call *call) {
    const int code = check(call);
    if (code || !call->rows) return code;
    const anymax_unit *unit = entry()->unit;
    const int64_t row = work_of_row(call);
    const bool large = call->rows > 1 && at_most_so_much(call->rows, row) >= ALONE_MOST;
    return share(large ? parallel_of(call->pool) : nullptr, call->rows, grain_of(row),
                 [=](int64_t begin, int64_t end) { return unit->decode(call, begin, end); });
}

static int check(const anymax_choice_call *call) {
    if (!call || !entry() || !entry()->unit->choose) return ANYMAX_BAD_CALL;
    if (call->dtype < ANYMAX_F32 || call->dtype > ANYMAX_F16) return ANYMAX_BAD_DTYPE;
    const int64_t n = call->n;
    if (call->rows < 0 || n < 1 || n > ANYMAX_MOST_CLASSES || call->rows > INT64_MAX / 16 / n) return ANYMAX_BAD_SHAPE;
    if (call->k < 1 || call->k > n || call->groups < 1 || n % call->groups || call->kept < 1 || call->kept > call->groups)
        return ANYMAX_BAD_PARAM;
    if (call->most < 1 || call->most > n / call->groups) return ANYMAX_BAD_PARAM;
    return call->rows && (!call->x || !call->index) ? ANYMAX_BAD_POINTER : ANYMAX_OK;
}

extern "C" int anymax_choose(const anymax_choice_call *call) {
    const int code = check(call);
    if (code || !call->rows) return code;
    const anymax_unit *unit = entry()->unit;
    const int64_t row = at_most_so_much(call->n, CHOICE_COST);
    const bool large = call->rows > 1 && at_most_so_much(call->rows, row) >= ALONE_MOST;
    return share(large ? parallel_of(call->pool) : nullptr, call->rows, grain_of(row),
                 [=](int64_t begin, int64_t end) { return unit->choose(call, begin, end); });
}

// -- Sinkhorn ---------------------------------------------------------------------------------------

static int check(const anymax_sinkhorn_call *call) {
    if (!call || !entry() || !entry()->unit->transport) return ANYMAX_BAD_CALL;
    if (call->dtype != ANYMAX_F32 && call->dtype != ANYMAX_F64) return ANYMAX_BAD_DTYPE;
    if (call->count < 0 || call->n < 1 || call->m < 1 || call->n > INT32_MAX || call->m > INT32_MAX || call->rows_step < 0 ||
        call->columns_step < 0)
        return ANYMAX_BAD_SHAPE;
    if (call->n > INT64_MAX / 64 / call->m || call->count > INT64_MAX / 64 / (call->n * call->m)) return ANYMAX_BAD_SHAPE;
    if (call->iterations < 1 || call->iterations > INT32_MAX || !(call->temperature > 0.0 && call->temperature <= DBL_MAX))
        return ANYMAX_BAD_PARAM;
    if (!(call->tolerance >= 0.0) || (call->tolerance > 0.0 && call->g)) return ANYMAX_BAD_PARAM;
    return call->count && (!call->x || !call->out || (call->tolerance > 0.0 && !call->left)) ? ANYMAX_BAD_POINTER : ANYMAX_OK;
}

extern "C" int anymax_sinkhorn(const anymax_sinkhorn_call *call) {
    const int code = check(call);
    if (code || !call->count) return code;
    const anymax_unit *unit = entry()->unit;
    const int64_t one = at_most_so_much(call->n * call->m, 2 * call->iterations + 2),
                  work = call->g ? at_most_so_much(one, 3) : one;
    const bool large = call->count > 1 && at_most_so_much(call->count, work) >= ALONE_MOST;
    if (call->count == 1)
        return unit->transport(call, 0, 1, call->n * call->m >= SHARED_MATRIX ? parallel_of(call->pool) : nullptr);
    const int64_t grain =
        (grain_of(work) + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;  // as many as are computed together
    const bool few = call->count < 2 * ROWS_AT_ONCE;
    return share(large ? parallel_of(call->pool) : nullptr, call->count, few ? 1 : grain,
                 [=](int64_t begin, int64_t end) { return unit->transport(call, begin, end, nullptr); });
}

// -- a link as a table ------------------------------------------------------------------------------

static bool sound(const anymax_table &t) {
    if (!t.cells || t.shift < 8 || t.shift > 23 || !(t.low > 0.0f) || !(t.scale > 0.0) || !(t.low < t.high) ||
        !(t.high <= 3.4e38f) || (t.sign != 1 && t.sign != -1))
        return false;
    uint32_t low, high;
    memcpy(&low, &t.low, sizeof low), memcpy(&high, &t.high, sizeof high);
    return (int64_t)((high - 1) >> t.shift) - (int64_t)(low >> t.shift) < t.count;
}

static bool sound(const anymax_weights &w) {
    const double size = (double)w.high > -(double)w.low ? (double)w.high : -(double)w.low;
    if (!w.weights || w.above < 1 || w.beneath < 1 || w.above > INT32_MAX / 8 || w.beneath > INT32_MAX / 8 || !(w.low < 0.0f) ||
        !(w.high > 0.0f) || !(size <= 3.4e38) || !(w.lost <= w.low) || !(w.gone >= w.high))
        return false;
    if (w.per > 0.0f)
        return w.per <= 1024.0f && (double)w.high * w.per <= (double)w.above && -(double)w.low * w.per <= (double)w.beneath;
    if (w.shift < 8 || w.shift > 23 || !(w.least > 0.0f) || !(w.least < w.high) || !(w.least < -w.low)) return false;
    const float sides[] = {w.high, -w.low};
    uint32_t least, most[2];
    memcpy(&least, &w.least, sizeof least), memcpy(most, sides, sizeof most);
    const auto cells = [&](uint32_t to) { return (int64_t)((to - 1) >> w.shift) - (int64_t)(least >> w.shift) + 1; };
    return cells(most[0]) <= w.above && cells(most[1]) <= w.beneath;
}

static int check(const anymax_tabled_call *call) {
    if (!call || !entry() || !entry()->unit->tabled) return ANYMAX_BAD_CALL;
    if (call->dtype < ANYMAX_F32 || call->dtype > ANYMAX_F16 || call->dtype == ANYMAX_F64) return ANYMAX_BAD_DTYPE;
    if (call->rows < 0 || call->n < 1 || call->n > TABLED_CLASSES || call->rows > INT64_MAX / 16 / call->n)
        return ANYMAX_BAD_SHAPE;
    if (const anymax_weights *const ratio = call->ratio) {
        if (!sound(*ratio)) return ANYMAX_BAD_PARAM;
        return call->rows && (!call->x || !call->out || !call->left || (call->g && !ratio->slopes)) ? ANYMAX_BAD_POINTER
                                                                                                    : ANYMAX_OK;
    }
    if (!sound(call->link) || !(call->mass > 0.0) || !(call->most > 0.0)) return ANYMAX_BAD_PARAM;
    return call->rows && (!call->x || (call->g && !call->out)) ? ANYMAX_BAD_POINTER : ANYMAX_OK;
}

extern "C" int anymax_tabled(const anymax_tabled_call *call) {
    const int code = check(call);
    if (code || !call->rows) return code;
    const anymax_unit *unit = entry()->unit;
    const int64_t row = at_most_so_much(call->n, TABLED_COST);
    if (call->n >= (call->rows == 1 ? SHARED_ALONE : SHARED_ROW) && call->rows < ROWS_FEW)
        return unit->tabled(call, 0, call->rows, parallel_of(call->pool));
    const bool large = call->rows > 1 && at_most_so_much(call->rows, row) >= ALONE_MOST;
    return share(large ? parallel_of(call->pool) : nullptr, call->rows, grain_of(row),
                 [=](int64_t begin, int64_t end) { return unit->tabled(call, begin, end, nullptr); });
}

// -- noise ------------------------------------------------------------------------------------------

extern "C" int anymax_gumbel(const float *pairs, float *out, int64_t count) {
    if (!entry() || !entry()->unit->gumbel) return ANYMAX_BAD_CALL;
    if (count < 0) return ANYMAX_BAD_SHAPE;
    if (count && (!pairs || !out)) return ANYMAX_BAD_POINTER;
    entry()->unit->gumbel(pairs, out, count);
    return ANYMAX_OK;
}

extern "C" int anymax_twister(int64_t *words, int64_t *next, int64_t *left, float *out, int64_t count) {
    if (!entry() || !entry()->unit->twister) return ANYMAX_BAD_CALL;
    if (count < 0) return ANYMAX_BAD_SHAPE;
    if (!words || !next || !left || (count && !out)) return ANYMAX_BAD_POINTER;
    if (*next < 0 || *left < 1 || *left > ANYMAX_TWISTER_WORDS + 1 || *next > ANYMAX_TWISTER_WORDS + 1 - *left)
        return ANYMAX_BAD_PARAM;
    entry()->unit->twister(words, next, left, out, count);
    return ANYMAX_OK;
}

extern "C" const char *anymax_error(int code) {
    switch (code) {
        case ANYMAX_OK: return "no error";
        case ANYMAX_BAD_CALL: return "no such operation";
        case ANYMAX_BAD_DTYPE: return "no such dtype";
        case ANYMAX_BAD_MAP: return "the map does not have this operation";
        case ANYMAX_BAD_SHAPE: return "the shape is out of range (rows of 1 to 2^31 - 1025 classes)";
        case ANYMAX_BAD_POINTER: return "an operand is missing";
        case ANYMAX_NO_MEMORY: return "out of memory";
        case ANYMAX_BAD_PARAM: return "the map's parameter is out of range";
        case ANYMAX_BAD_SUPPORT:
            return "the saved support has changed since it was saved: its classes are not those of its rows";
        case ANYMAX_BAD_SEGMENTS:
            return "the segments are not those of the entries: their bounds must ascend from 0 to the number of entries, and "
                   "their order name each entry";
        default: return "unknown error";
    }
}

extern "C" const char *anymax_isa(void) {
    const Entry *e = entry();
    return e ? e->name : "none";
}

extern "C" const char *anymax_isas(void) {
    struct Names {
        char text[128] = "";
        Names() {
            for (const Entry &e : entries)
                if (e.here()) {
                    if (text[0]) strcat(text, ",");
                    strcat(text, e.name);
                }
        }
    };
    static const Names names;  // made by one thread, even where Python has no lock
    return names.text;
}

extern "C" int anymax_set_isa(const char *name) {
    const Entry *e = name ? named(name) : nullptr;
    if (!e) return -1;
    chosen.store(e);
    return 0;
}

extern "C" const char *anymax_plan(const anymax_call *call) {
    static thread_local char text[96];
    if (!call || check_map(call)) return nullptr;
    return strcat(strcat(strcpy(text, entry()->unit->plan(call)), " "), entry()->name);
}

extern "C" int64_t anymax_saves(int32_t op, int32_t map, double param, int64_t rows, int64_t n) {
    if (!entry() || op < 0 || op >= ANYMAX_OPS || map < 0 || map >= ANYMAX_MAPS) return -1;
    return entry()->unit->saves(op, map, param, rows, n);
}

extern "C" void anymax_set_parallel(anymax_parallel parallel) { lent.store(parallel); }

extern "C" int anymax_abi(void) { return ANYMAX_ABI; }
