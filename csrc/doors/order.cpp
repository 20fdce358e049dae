// Soft ranks and soft sorting at the C ABI.
#include "core/unit.h"
#include "doors/dispatch.hpp"
#include "order/blocks.hpp"

using namespace ANYMAX_UNIT;

namespace {

constexpr int64_t CLASSES_OF_A_PIECE = 16384;  // rows that a thread takes at once have so many classes together

template <class T>
int forward(const anymax_order_call *call, anymax_parallel team) {
    const OrderCall<T> rows{call, (const T *)call->x, nullptr, nullptr, (T *)call->out};
    const int64_t n = call->n, grain = CLASSES_OF_A_PIECE / n + 1;
    return share(team, call->rows, grain, [&](int64_t begin, int64_t end) -> int {
        Room room;
        OrderRow<T> row;
        if (!OrderRow<T>::take(room, n, call->kl, row)) return ANYMAX_NO_MEMORY;
        for (int64_t r = begin; r < end; r++)
            rows.forward(row, rows.x + r * n, rows.out + r * n, call->order ? call->order + r * n : nullptr);
        return ANYMAX_OK;
    });
}

template <class T>
int backward(const anymax_order_call *call, anymax_parallel team) {
    const OrderCall<T> rows{call, (const T *)call->x, (const T *)call->p, (const T *)call->g, (T *)call->out};
    const int64_t n = call->n, grain = CLASSES_OF_A_PIECE / n + 1;
    return share(team, call->rows, grain, [&](int64_t begin, int64_t end) -> int {
        for (int64_t r = begin; r < end; r++) {
            const int64_t at = r * n;
            if (!rows.backward(rows.x ? rows.x + at : nullptr, rows.p + at, rows.g + at, call->order + at, rows.out + at))
                return ANYMAX_BAD_SUPPORT;
        }
        return ANYMAX_OK;
    });
}

int check(const anymax_order_call *call) {
    if (!call) return ANYMAX_BAD_CALL;
    if (call->dtype != ANYMAX_F32 && call->dtype != ANYMAX_F64) return ANYMAX_BAD_DTYPE;
    if (!(call->strength > 0.0) || call->strength - call->strength != 0.0) return ANYMAX_BAD_PARAM;
    if (call->rows < 0 || call->n < 1 || call->n > ANYMAX_MOST_CLASSES || call->rows > INT64_MAX / 64 / call->n)
        return ANYMAX_BAD_SHAPE;
    return ANYMAX_OK;
}

}  // namespace

extern "C" int anymax_order(const anymax_order_call *call) {
    const int code = check(call);
    if (code || !call->rows) return code;
    if (!call->x || !call->out) return ANYMAX_BAD_POINTER;
    const anymax_parallel team = parallel_of(call->pool);
    return call->dtype == ANYMAX_F64 ? forward<double>(call, team) : forward<float>(call, team);
}

extern "C" int anymax_order_vjp(const anymax_order_call *call) {
    const int code = check(call);
    if (code || !call->rows) return code;
    if (!call->order || !call->p || !call->g || !call->out || (call->sorted && !call->x)) return ANYMAX_BAD_POINTER;
    const anymax_parallel team = parallel_of(call->pool);
    return call->dtype == ANYMAX_F64 ? backward<double>(call, team) : backward<float>(call, team);
}
