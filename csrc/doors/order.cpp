// Soft ranks and soft sorting at the C ABI.
#include "core/unit.h"
#include "doors/dispatch.hpp"
#include "doors/pool.h"
#include "order/blocks.hpp"

using namespace ANYMAX_UNIT;

namespace {

constexpr int64_t CLASSES_OF_A_PIECE = 16384;  // rows that a thread takes at once have so many classes together

bool usable(double strength) { return strength > 0.0 && strength < (double)INFINITY; }

// True where all threads share each row.
bool one_at_a_time(const anymax_order_call *call) { return call->rows < ROWS_FEW && call->n >= SHARED_ROW; }

// f(r, own) for rows from `begin` on, with a call that has the row's own strength.
template <class F>
int each_row(const anymax_order_call *call, int64_t begin, int64_t end, F f) {
    anymax_order_call own = *call;
    for (int64_t r = begin; r < end; r++) {
        if (call->strengths) own.strength = call->strengths[r];
        if (const int code = f(r, &own)) return code;
    }
    return ANYMAX_OK;
}

template <class T>
int forward(const anymax_order_call *call, anymax_parallel team) {
    const int64_t n = call->n, grain = CLASSES_OF_A_PIECE / n + 1;
    const anymax_parallel of_row = one_at_a_time(call) ? team : nullptr;
    return share(of_row ? nullptr : team, call->rows, grain, [&](int64_t begin, int64_t end) -> int {
        Room room;
        OrderRow<T> row;
        if (!OrderRow<T>::take(room, n, call->kl, of_row, row)) return ANYMAX_NO_MEMORY;
        return each_row(call, begin, end, [&](int64_t r, const anymax_order_call *own) -> int {
            OrderCall<T>{own, of_row}.forward(row, (const T *)call->x + r * n, !usable(own->strength), (T *)call->out + r * n,
                                              call->order ? call->order + r * n : nullptr);
            return ANYMAX_OK;
        });
    });
}

template <class T>
int backward(const anymax_order_call *call, anymax_parallel team) {
    const int64_t n = call->n, grain = CLASSES_OF_A_PIECE / n + 1;
    return share(team, call->rows, grain, [&](int64_t begin, int64_t end) -> int {
        return each_row(call, begin, end, [&](int64_t r, const anymax_order_call *own) -> int {
            const int64_t at = r * n;
            const bool done =
                OrderCall<T>{own, nullptr}.backward(call->x ? (const T *)call->x + at : nullptr, (const T *)call->p + at,
                                                    (const T *)call->g + at, call->order + at, (T *)call->out + at);
            return done ? ANYMAX_OK : ANYMAX_BAD_SUPPORT;
        });
    });
}

int check(const anymax_order_call *call) {
    if (!call) return ANYMAX_BAD_CALL;
    if (call->dtype != ANYMAX_F32 && call->dtype != ANYMAX_F64) return ANYMAX_BAD_DTYPE;
    if (!call->strengths && !usable(call->strength)) return ANYMAX_BAD_PARAM;
    if (call->rows < 0 || call->n < 1 || call->n > ANYMAX_MOST_CLASSES || call->rows > INT64_MAX / 64 / call->n)
        return ANYMAX_BAD_SHAPE;
    return ANYMAX_OK;
}

}  // namespace

extern "C" int anymax_order_by(const anymax_order_call *call, anymax_parallel team) {
    const int code = check(call);
    if (code || !call->rows) return code;
    if (!call->x || !call->out) return ANYMAX_BAD_POINTER;
    return call->dtype == ANYMAX_F64 ? forward<double>(call, team) : forward<float>(call, team);
}

extern "C" int anymax_order_vjp_by(const anymax_order_call *call, anymax_parallel team) {
    const int code = check(call);
    if (code || !call->rows) return code;
    if (!call->order || !call->p || !call->g || !call->out || (call->sorted && !call->x)) return ANYMAX_BAD_POINTER;
    return call->dtype == ANYMAX_F64 ? backward<double>(call, team) : backward<float>(call, team);
}

extern "C" int anymax_order(const anymax_order_call *call) {
    return anymax_order_by(call, call ? parallel_of(call->pool) : nullptr);
}
extern "C" int anymax_order_vjp(const anymax_order_call *call) {
    return anymax_order_vjp_by(call, call ? parallel_of(call->pool) : nullptr);
}
