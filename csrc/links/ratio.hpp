// Ratio maps: p = u(x) / sum u. Each has a file, whose struct gives `weight`, u(x) up to a factor of the row, and `slope`,
// u'(x) up to the same one; and a line here. With SIGNED u may be below 0: such a class has p = 0, and |u| counts in the sum,
// as does `more`.
#pragma once

#include "links/relu.hpp"
#include "links/sigsoftmax.hpp"
#include "links/softpick.hpp"
#include "links/taylor.hpp"
#include "maps.hpp"

namespace ANYMAX_UNIT {

// f(the weights of a ratio map on this row, whose largest score is `high`).
template <class C, class F>
ANYMAX_INLINE void with_ratio(RatioLink link, double param, const C *x, int64_t n, C high, Scratch &scratch, const Team &team,
                              F f) {
    switch (link) {
        case TAYLOR: return f(TaylorWeight<C>(largest_size(x, n, scratch, team), (int)param));
        case RELU: return f(ReluWeight<C>(high));
        case SIGMOID: return f(SigmoidWeight<C>(high));
        case PICK: return f(SoftpickWeight<C>(high, param));
    }
}

}  // namespace ANYMAX_UNIT
