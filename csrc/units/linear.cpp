// Linear attention for one instruction set.
#if !defined(ANYMAX_MAPS_ALONE)
#include "core/families.hpp"
#include "linear/backward.hpp"

namespace ANYMAX_UNIT {

int linear(const anymax_linear_call *call, anymax_parallel team) {
    return call->dtype == ANYMAX_F64 ? each_head<Linear<double>>(call, team) : each_head<Linear<float>>(call, team);
}

int linear_vjp(const anymax_linear_call *call, anymax_parallel team) {
    return call->dtype == ANYMAX_F64 ? each_head<LinearVJP<double>>(call, team) : each_head<LinearVJP<float>>(call, team);
}

}  // namespace ANYMAX_UNIT
#endif
