// The way of each call, and single rows in any layout. This and the other files of units/ are compiled once for each
// instruction set, with its own flags and -DANYMAX_UNIT=<name>.
#include "shapes/ops.hpp"
#include "shapes/slope.hpp"

namespace ANYMAX_UNIT {

template <class C>
void by_rows(const anymax_call &given, int64_t begin, int64_t end, bool bypass, const Team &team, Scratch &scratch) {
    anymax_call own;  // of the length and the parameter of its own
    const bool each = given.sizes || given.params;
    if (each) own = given, own.params = nullptr;
    if (given.sizes) own.n = given.sizes[begin];
    if (given.params) own.param = given.params[begin];
    const anymax_call &call = each ? own : given;
    int64_t n = call.n;
    const int64_t size = anymax_item(call.dtype), inner = call.inner;
    const bool reads_x = call.x.data != nullptr;
    const bool to_rows = call.op == ANYMAX_FORWARD || call.op == ANYMAX_LOG || call.op == ANYMAX_VJP ||
                         call.op == ANYMAX_LOG_VJP || call.op == ANYMAX_LOSS_GRAD;
    const bool transpose_x = reads_x && inner > 1 && adjacent_rows(call.x, n) && !call.mask.data,
               transpose_result = to_rows && inner > 1 && adjacent_rows(call.out, n);
    C *transposed = nullptr, *result = nullptr;
    int64_t first = 0, held = 0;  // the rows that `transposed` and `result` hold
    Link link = link_of(call.map, call.param);
    const Rule *rule = &first_of(ROW_RULES, call, link);
    const bool varies = given.sizes && rule != LAST_RULE;  // a row of another length may have another rule
    for (int64_t r = begin; r < end && !scratch.failed; r++) {
        const int64_t o = inner == 1 ? r : r / inner, i = inner == 1 ? 0 : r - o * inner;
        if (given.sizes) own.n = n = given.sizes[r];
        if (given.params) own.param = given.params[r], link = link_of(call.map, own.param);
        if (varies) rule = &first_of(ROW_RULES, call, link);
        if ((transpose_x || transpose_result) && r >= first + held) {
            first = r;
            held = GROUP;
            if (held > inner - i) held = inner - i;
            if (held > end - r) held = end - r;
            if (transpose_x) {
                transposed = scratch.take<C>(STAGED, GROUP * n);
                if (!transposed) break;
                transpose_in(at(call, call.x, size, o, i), call.x.cls, call.dtype, held, n, transposed);
            }
            if (transpose_result && !(result = scratch.take<C>(TRANSPOSED, GROUP * n))) break;
        }
        const C *x = nullptr;
        if (transpose_x)
            x = transposed + (r - first) * n;
        else if (reads_x) {
            const uint8_t *mask = call.mask.data ? (const uint8_t *)at(call, call.mask, 1, o, i) : nullptr;
            x = stage<C>(at(call, call.x, size, o, i), call.x.cls, call.dtype, mask, call.mask.cls, n, scratch, STAGED);
            if (!x) break;
        }
        Sink<C> out{};
        if (call.out.data) {
            char *row = (char *)at(call, call.out, size, o, i);
            out = sink_at<C>(call, row, n, bypass);
            if (out.bypass && out.direct && inner == 1 && r + 1 < end && x == (const C *)at(call, call.x, size, o, 0))
                out.next = (const C *)at(call, call.x, size, o + 1, 0);
            if (transpose_result) {
                C *to = result + (r - first) * n;
                out = sink_of(to, n, false);
            }
        }
        run_row(call, r, o, i, end, rule->source, link, x, out, scratch, team);
        if (transpose_result && r == first + held - 1) {
            transpose_out(result, held, n, (void *)row_at(call, call.out, size, first), call.out.cls, call.dtype);
        }
    }
}

template void by_rows<float>(const anymax_call &, int64_t, int64_t, bool, const Team &, Scratch &);
template void by_rows<double>(const anymax_call &, int64_t, int64_t, bool, const Team &, Scratch &);

template <class C>
Support<C> row_support(Link link, double param, const C *x, int64_t n, Scratch &scratch) {
    return support_of(link, param, x, n, scratch, Team{nullptr});
}
template Support<float> row_support<float>(Link, double, const float *, int64_t, Scratch &);
template Support<double> row_support<double>(Link, double, const double *, int64_t, Scratch &);

template <class C>
static int run_rows(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team) {
    Scratch scratch;
    const Grouping grouping = plan.rule.grouping;
    if (call.op == ANYMAX_SLOPE && plan.link != BOUNDED)
        slope_rows<C>(call, plan.link, begin, end, scratch);
    else if (grouping == ROW)
        by_rows<C>(call, begin, end, bypass, team, scratch);
    else if (call.op == ANYMAX_VJP)
        run_backward(call, plan, begin, end, bypass, team, scratch);
    else if (grouping == TILE)
        run_tiles<C>(call, plan, begin, end, bypass, team, scratch);
    else
        run_batches(call, plan, begin, end, bypass, team, scratch);
    if (bypass) fence();
    return scratch.failed ? ANYMAX_NO_MEMORY : 0;
}

static int run_plan(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team) {
    if (call.dtype == ANYMAX_F64) return run_rows<double>(call, plan, begin, end, bypass, team);
    return run_rows<float>(call, plan, begin, end, bypass, team);
}

static int rows_alike(const anymax_call &call, int64_t begin, int64_t end, bool bypass, const Team &team) {
    const Plan plan = plan_of(call);
    if (!plan.outer) return run_plan(call, plan, begin, end, bypass, team);
    int code = 0;
    for (int64_t r = begin; r < end && !code;) {
        const int64_t o = r / call.inner, i = r - o * call.inner, count = call.inner - i < end - r ? call.inner - i : end - r;
        code = run_plan(inner_rows(call, o), plan, i, i + count, bypass, team);
        r += count;
    }
    return code;
}

// Rows with parameters of their own: those in turn with the same one are rows of a call with that, where it decides on the
// rule. What a row becomes depends on its own alone.
static int rows(const anymax_call *call, int64_t begin, int64_t end, int bypass, anymax_parallel team) {
    if (!by_parameter(*call)) return rows_alike(*call, begin, end, bypass != 0, Team{team});
    anymax_call alike = *call;
    alike.params = nullptr;
    int code = 0;
    for (int64_t r = begin, stop; r < end && !code; r = stop) {
        for (stop = r + 1; stop < end && call->params[stop] == call->params[r];) stop++;
        alike.param = call->params[r];
        code = rows_alike(alike, r, stop, bypass != 0, Team{team});
    }
    return code;
}

#if defined(ANYMAX_MAPS_ALONE)
constexpr decltype(anymax_unit::linear) linear = nullptr, linear_vjp = nullptr;
constexpr decltype(anymax_unit::decode) decode = nullptr;
constexpr decltype(anymax_unit::choose) choose = nullptr;
constexpr decltype(anymax_unit::transport) transport = nullptr;
constexpr decltype(anymax_unit::tabled) tabled = nullptr;
constexpr decltype(anymax_unit::gumbel) gumbel_of = nullptr;
constexpr decltype(anymax_unit::twister) twister = nullptr;
#endif

}  // namespace ANYMAX_UNIT

#define ANYMAX_JOIN2(a, b) a##b
#define ANYMAX_JOIN(a, b) ANYMAX_JOIN2(a, b)
extern "C" const anymax_unit ANYMAX_JOIN(anymax_unit_, ANYMAX_UNIT) = {
    ANYMAX_UNIT::rows,
    [](const anymax_call *call) { return ANYMAX_UNIT::plan_name(*call); },
    [](const anymax_call *call, anymax_span *spans) { return ANYMAX_UNIT::uneven(*call, spans); },
    [](const anymax_call *call) -> int { return ANYMAX_UNIT::beside(*call); },
    ANYMAX_UNIT::worth_saving,
    ANYMAX_UNIT::linear,
    ANYMAX_UNIT::linear_vjp,
    ANYMAX_UNIT::decode,
    ANYMAX_UNIT::choose,
    ANYMAX_UNIT::transport,
    ANYMAX_UNIT::tabled,
    ANYMAX_UNIT::gumbel_of,
    ANYMAX_UNIT::twister,
};
