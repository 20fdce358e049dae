// Perturb max for one instruction set.
#include "perturb/perturb.hpp"

namespace ANYMAX_UNIT {

template void perturb_forward(int, double, int64_t, const float *, int64_t, float *, double *, double *);
template void perturb_forward(int, double, int64_t, const double *, int64_t, double *, double *, double *);
template void perturb_vjp(int, double, int64_t, const float *, const float *, const float *, int64_t, float *, double *);
template void perturb_vjp(int, double, int64_t, const double *, const double *, const double *, int64_t, double *, double *);
template double perturb_loss(int, double, int64_t, const float *, int64_t, int64_t, double *, double *);
template double perturb_loss(int, double, int64_t, const double *, int64_t, int64_t, double *, double *);

}  // namespace ANYMAX_UNIT
