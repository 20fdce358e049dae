// Random numbers and noise, for one instruction set.
#if !defined(ANYMAX_MAPS_ALONE)
#include "core/families.hpp"
#include "random/noise.hpp"

namespace ANYMAX_UNIT {

void gumbel_of(const float *pairs, float *out, int64_t count) { gumbel(pairs, out, count); }

void twister(int64_t *words, int64_t *next, int64_t *left, float *out, int64_t count) {
    Twister().fill(words, *next, *left, out, count);
}

}  // namespace ANYMAX_UNIT
#endif
