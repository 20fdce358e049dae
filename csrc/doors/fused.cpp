// Fusedmax at the C ABI.
#include "core/unit.h"
#include "doors/dispatch.hpp"
#include "doors/pool.h"
#include "fused/rows.hpp"

using namespace ANYMAX_UNIT;

namespace {

constexpr int64_t CLASSES_OF_A_PIECE = 16384;  // rows that a thread takes at once have so many classes together

template <class T>
int forward(const anymax_fused_call *call, anymax_parallel team) {
    const int64_t n = call->n;
    return share(team, call->rows, CLASSES_OF_A_PIECE / n + 1, [&](int64_t begin, int64_t end) -> int {
        Room room;
        FusedRow<T> row;
        if (!row.take(room, n)) return ANYMAX_NO_MEMORY;
        for (int64_t r = begin; r < end; r++)
            row.forward((const T *)call->x + r * n, n, call->strength[r * call->strength_step], (T *)call->out + r * n,
                        call->begins ? call->begins + r * n : nullptr);
        return ANYMAX_OK;
    });
}

template <class T>
int backward(const anymax_fused_call *call, anymax_parallel team) {
    const int64_t n = call->n;
    return share(team, call->rows, CLASSES_OF_A_PIECE / n + 1, [&](int64_t begin, int64_t end) -> int {
        for (int64_t r = begin, at = r * n; r < end; r++, at += n) {
            const double slope = FusedRow<T>::backward((const T *)call->x + at, (const T *)call->p + at,
                                                       (const T *)call->g + at, call->begins + at, n, (T *)call->out + at);
            if (call->slope) call->slope[r] = slope;
        }
        return ANYMAX_OK;
    });
}

int check(const anymax_fused_call *call) {
    if (!call) return ANYMAX_BAD_CALL;
    if (call->dtype != ANYMAX_F32 && call->dtype != ANYMAX_F64) return ANYMAX_BAD_DTYPE;
    if (call->rows < 0 || call->n < 1 || call->n > ANYMAX_MOST_CLASSES || call->rows > INT64_MAX / 64 / call->n)
        return ANYMAX_BAD_SHAPE;
    return ANYMAX_OK;
}

}  // namespace

extern "C" int anymax_fused_by(const anymax_fused_call *call, anymax_parallel team) {
    const int code = check(call);
    if (code || !call->rows) return code;
    if (call->strength_step < 0 || call->strength_step > 1) return ANYMAX_BAD_SHAPE;
    if (!call->x || !call->strength || !call->out) return ANYMAX_BAD_POINTER;
    return call->dtype == ANYMAX_F64 ? forward<double>(call, team) : forward<float>(call, team);
}

extern "C" int anymax_fused_vjp_by(const anymax_fused_call *call, anymax_parallel team) {
    const int code = check(call);
    if (code || !call->rows) return code;
    if (!call->x || !call->p || !call->g || !call->begins || !call->out) return ANYMAX_BAD_POINTER;
    return call->dtype == ANYMAX_F64 ? backward<double>(call, team) : backward<float>(call, team);
}

extern "C" int anymax_fused(const anymax_fused_call *call) {
    return anymax_fused_by(call, call ? parallel_of(call->pool) : nullptr);
}
extern "C" int anymax_fused_vjp(const anymax_fused_call *call) {
    return anymax_fused_vjp_by(call, call ? parallel_of(call->pool) : nullptr);
}
