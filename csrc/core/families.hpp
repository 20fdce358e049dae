// What the families of kernels give each other, each compiled once for an instruction set: rows, batch, tile, backward,
// perturb, decode, tabled, linear and transport, each a file in units/.
#pragma once

#include "core/unit.h"
#include "core/rows.hpp"
#include "maps.hpp"

namespace ANYMAX_UNIT {

// The rows [begin, end) of a call, one after the other: any operation, dtype and layout.
template <class C>
void by_rows(const anymax_call &call, int64_t begin, int64_t end, bool bypass, const Team &team, Scratch &scratch);

// The non-zeros of a row of a map that has zeros (shapes/candidates.hpp).
template <class C>
struct Support;
template <class C>
Support<C> row_support(Link link, double param, const C *x, int64_t n, Scratch &scratch);

struct Plan;  // plan.hpp

// The rows of a call whose plan says so; each leaves single rows to by_rows where it cannot serve them.
template <class C>
void run_tiles(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team,
               Scratch &scratch);
void run_batches(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team,
                 Scratch &scratch);
void run_backward(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool bypass, const Team &team,
                  Scratch &scratch);

// Of perturb max; what they are is said in perturb.hpp.
int64_t perturb_work(int64_t n, int64_t nodes);
template <class C>
void perturb_forward(const anymax_call &call, const C *x, int64_t n, C *p, double *tau, double *work);
template <class C>
void perturb_vjp(const anymax_call &call, const C *x, const C *p, const C *g, int64_t n, C *out, double *work);
template <class C>
double perturb_loss(const anymax_call &call, const C *x, int64_t n, int64_t target, double *tau, double *work);

#if !defined(ANYMAX_MAPS_ALONE)
// The rows [begin, end) of a call, truncated and drawn from.
int decode(const anymax_decode_call *call, int64_t begin, int64_t end);
int choose(const anymax_choice_call *call, int64_t begin, int64_t end);

int transport(const anymax_sinkhorn_call *call, int64_t begin, int64_t end, anymax_parallel team);

// Rows of a map whose link is a table.
int tabled(const anymax_tabled_call *call, int64_t begin, int64_t end, anymax_parallel team);

// Gumbel noise, and the numbers of torch's generator (random/noise.hpp).
void gumbel_of(const float *pairs, float *out, int64_t count);
void twister(int64_t *words, int64_t *next, int64_t *left, float *out, int64_t count);

int linear(const anymax_linear_call *call, anymax_parallel team);
int linear_vjp(const anymax_linear_call *call, anymax_parallel team);
#endif

}  // namespace ANYMAX_UNIT
