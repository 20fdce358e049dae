// Perturb max for one instruction set.
#include "perturb/perturb.hpp"

namespace ANYMAX_UNIT {

template void perturb_forward(const anymax_call &, const float *, int64_t, float *, double *, double *);
template void perturb_forward(const anymax_call &, const double *, int64_t, double *, double *, double *);
template void perturb_vjp(const anymax_call &, const float *, const float *, const float *, int64_t, float *, double *);
template void perturb_vjp(const anymax_call &, const double *, const double *, const double *, int64_t, double *, double *);
template double perturb_loss(const anymax_call &, const float *, int64_t, int64_t, double *, double *);
template double perturb_loss(const anymax_call &, const double *, int64_t, int64_t, double *, double *);

}  // namespace ANYMAX_UNIT
