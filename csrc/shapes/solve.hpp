// The level at which a link's values sum to what they should: Newton's steps, of one row or of rows one a lane.
#pragma once

#include "shapes/view.hpp"

namespace ANYMAX_UNIT {

// N: a double, of one row, or a vector of levels.
template <class N>
struct number_of {
    typedef scalar<N> type;
};
template <>
struct number_of<double> {
    typedef double type;
};
template <class N>
using Number = typename number_of<N>::type;
template <class N>
using Mask = decltype(N{} < N{});
ANYMAX_INLINE bool any(bool m) { return m; }
template <class M>
ANYMAX_INLINE bool any(M m) {
    return bits(m) != 0;
}

template <class N>
struct Step {
    N next;
    Mask<N> go, on;  // whether a level goes there, and whether it then asks for the sums again
};
struct Everyone {};  // who asks, where `go` alone says who goes on
template <class M>
inline constexpr bool ALL = false;
template <>
inline constexpr bool ALL<Everyone> = true;

// From `level` as a rule says, which is told the sums at a level and the level; gives the sums that it was told last. A lane
// that is there stays, whatever the others do, and doesn't hold them up.
template <class View, class Link, class N, class M, class Rule, class F>
ANYMAX_INLINE auto solve(const View &view, const Link &link, N &level, M asked, int turns, Rule &&rule, F keep) {
    decltype(totals(view, link.at(level), keep)) sums{};
    for (int turn = 0; turn < turns; turn++) {
        sums = totals(view, link.at(level), keep);
        const Step<N> step = rule(sums, level);
        if constexpr (ALL<M>) {
            if (!any(step.go)) break;
            level = step.go ? step.next : level;
        } else {
            asked &= step.go;
            if (!any(asked)) break;
            level = asked ? step.next : level;
            asked &= step.on;
            if (!any(asked)) break;
        }
    }
    return sums;
}
template <class View, class Link, class N, class M, class Rule>
ANYMAX_INLINE auto solve(const View &view, const Link &link, N &level, M asked, int turns, Rule &&rule) {
    return solve(view, link, level, asked, turns, rule, Nothing());
}

// Down from a level that is not too low, which never overshoots but by rounding. After a fall of no more than `last` of it the
// level is where it should be, for the next fall is its square.
template <class N, class L>
struct Descent {
    L link;
    Number<N> last;
    template <class S>
    ANYMAX_INLINE Step<N> operator()(const S &sums, N level) const {
        const N fall = link.fall(sums.value(), sums.rate()), next = level - fall;
        const Mask<N> falls = fall > N{}, go = link.near_one() ? falls : Mask<N>(falls & (fall < level));
        return Step<N>{next, go, fall > next * last};
    }
};

// Within a bracket, until no sum is off its goal by more than `enough`, or a step leads nowhere; from one that is off by `last`
// or less a level takes one step more. The middle where Newton's step leads out of the bracket, and from the twelfth turn on
// by turns with it; of a very wide bracket that of the logarithm.
template <class N, class L>
struct Bracketed {
    typedef Number<N> C;
    L link;
    N low, high;
    C goal, enough, last;
    bool falls = false;  // the first level is worth going on from only where it is not too low
    N newton{};          // where the step from the last level leads
    N sure = high;       // the last level where the sum was surely more than its goal
    int turn = 0;

    ANYMAX_INLINE N middle() const {
        if constexpr (sizeof(N) == sizeof(C)) {
            const N least = low > 1.0 ? low : 1.0;
            if (high > 16.0 * least) return sqrt(least) * sqrt(high);
        }
        return low + (high - low) * C(0.5);
    }
    template <class S>
    ANYMAX_INLINE Step<N> operator()(const S &sums, N level) {
        const N excess = sums.excess(goal), off = absolute(excess);
        const Mask<N> over = excess > N{};
        low = over ? low : level, high = over ? level : high;
        newton = level - link.fall(sums.value(), sums.rate(), goal - sums.full());
        const Mask<N> within = (newton > low) & (newton < high);
        N next = middle();
        if (turn < 12 || turn % 2 == 0) next = within ? newton : next;
        Mask<N> go = (off > enough) & (next != level);
        if constexpr (sizeof(N) == sizeof(C)) {
            sure = excess > 1e-5 ? level : sure;
            // what is left is rounding: the correction of the result does the rest
            go = go && (within || off >= 1e-14) && (off > 1e-9 || fabs(newton - level) > 4e-16 * fabs(level)) && next > low &&
                 next < high && !(falls && turn == 0 && excess < 0.0);
            newton = within ? newton : level;
        }
        turn++;
        return Step<N>{next, go, off > last};
    }
};

}  // namespace ANYMAX_UNIT
