"""The score at which a running sum over the scores in descending order reaches a target: top-k counts them, top-p adds their weights.

Nothing is sorted. Pivots between a lower and an upper bound are chosen by interpolation and, every third time, half-way in the order of
the floats. The search stops when the scores from the pivot on are those wanted, or when only equal scores are left to decide on.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .tile import fetch, lanes, smallest, some, total, wide

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def key(x):
    """Integers in the order of the floats, the same for both zeros."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unkey(k):
    return (k ^ ((k >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(x, top):
    """exp(x - top) for a finite maximum."""
    return tl.exp(x - top)


@triton.jit
def chosen(x, cols, edge, last):
    """True for the scores above the edge, and for those equal to it up to the class `last`."""
    return (x > edge) | ((x == edge) & (cols <= last))


@triton.jit
def probe(x, tops, top, m, at, BY: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
          L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(weight, number) of the scores >= m."""
    if WHOLE:
        from_m = x >= m
        number = total(tl.where(from_m, 1.0, 0.0))
        if BY == "count":
            weight = number
        else:
            weight = wide(tl.where(from_m, weigh(x, top), 0.0))
    else:
        live = tops >= m
        number_ = tl.zeros([R, 1, L], tl.float32)
        weight_ = tl.zeros([R, 1, L], tl.float64)
        for begin in range(0, at[6], K * L):
            v = fetch(at, begin, live, MASKED, FAR, K, L, True)
            number_ += tl.sum(tl.where(v >= m, 1.0, 0.0), 1, keep_dims=True)
            if BY == "exp":
                weight_ += tl.sum(tl.where(v >= m, weigh(v, top), 0.0), 1, keep_dims=True).to(tl.float64)
        number = total(number_)
        if BY == "count":
            weight = number
        else:
            weight = total(weight_)
    return weight, number


@triton.jit
def select(x, tops, top, live, bound, target, at, BY: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr,
           K: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(pivot, few, tied): the scores >= the pivot weigh at least `target`, and less without their lowest value. few: the whole row weighs
    less, and all of it is kept; tied: several scores have the lowest value, and not all of them are needed.

    `bound`: a score such that those >= it surely weigh enough, or LOWEST.
    """
    GRAIN: tl.constexpr = (  # the distance between the keys of neighbouring numbers
        65536 if at[0].dtype.element_ty == tl.bfloat16 else (8192 if at[0].dtype.element_ty == tl.float16 else 1)
    )
    low = key(bound) & -GRAIN
    high = (key(tl.maximum(top, bound)) & -GRAIN) + GRAIN  # above every score
    weight_low, number_low = probe(x, tops, top, unkey(low), at, BY, MASKED, FAR, R, K, L, WHOLE)
    weight_high, number_high = weight_low * 0.0, number_low * 0.0
    few = live & (weight_low < target)
    go = live & (few == 0) & (weight_low > target) & (number_low > 1.0)
    distance = 2.0
    turn = 0
    while some(go) & (turn < 100):
        half = (low & high) + ((low ^ high) >> 1)
        part = ((weight_low - target) / (weight_low - weight_high)).to(tl.float32)
        a, b = unkey(low), unkey(high)
        guess = tl.where(a > 0.99 * LOWEST, a + (b - a) * part, top - distance)
        m = tl.where(turn % 3 == 2, half, key(guess)) & -GRAIN
        m = tl.minimum(tl.maximum(m, low + GRAIN), high - GRAIN)
        weight, number = probe(x, tops, top, unkey(m), at, BY, MASKED, FAR, R, K, L, WHOLE)
        up = go & (weight >= target)
        down = go & (weight < target)
        low = tl.where(up, m, low)
        weight_low, number_low = tl.where(up, weight, weight_low), tl.where(up, number, number_low)
        high = tl.where(down, m, high)
        weight_high, number_high = tl.where(down, weight, weight_high), tl.where(down, number, number_high)
        go = go & (weight_low > target) & (number_low - number_high > 1.0) & (low + GRAIN < high)
        distance *= 4.0
        turn += 1
    tied = live & (few == 0) & (number_low - number_high > 1.0) & (weight_low > target)
    return tl.where(few, LOWEST, unkey(low)), few, tied


@triton.jit
def from_lanes(tops, top, live, target, at, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, L: tl.constexpr):
    """A number that at least `target` lane maxima, so at least `target` scores, reach; LOWEST where there are fewer lanes."""
    lowest = top * 0.0 + LOWEST
    pivot, _, _ = select(tops, tops, top, live, lowest, target, at, "count", MASKED, FAR, R, 1, L, True)
    return tl.where(live, pivot, LOWEST)


@triton.jit
def kth(x, tops, top, live, k, at, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
        WHOLE: tl.constexpr):  # fmt: skip
    """(the k-th largest score, few); the lowest score where the row has fewer than k."""
    bound = top * 0.0 + LOWEST
    if (K > 1) | (not WHOLE):
        bound = from_lanes(tops, top, live, k, at, MASKED, FAR, R, L)
    pivot, few, _ = select(x, tops, top, live, bound, k, at, "count", MASKED, FAR, R, K, L, WHOLE)
    return lowest_from(x, tops, pivot, at, MASKED, FAR, R, K, L, WHOLE), few


@triton.jit
def lowest_from(x, tops, m, at, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
                WHOLE: tl.constexpr):  # fmt: skip
    """The lowest score >= m; m where there is none."""
    if WHOLE:
        found = smallest(tl.where(x >= m, x, float("inf")))
    else:
        live = tops >= m
        found_ = tl.full([R, 1, L], float("inf"), tl.float32)
        for begin in range(0, at[6], K * L):
            v = fetch(at, begin, live, MASKED, FAR, K, L, True)
            found_ = tl.minimum(found_, tl.min(tl.where(v >= m, v, float("inf")), 1, keep_dims=True))
        found = smallest(found_)
    return tl.where(found < float("inf"), found, m)


@triton.jit
def tally(x, cols, tops, top, edge, last, at, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
          L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(number, sum of exp(x - top)) of the `chosen` scores."""
    if WHOLE:
        kept = chosen(x, cols, edge, last)
        return total(tl.where(kept, 1.0, 0.0)), wide(tl.where(kept, weigh(x, top), 0.0))
    else:
        live = tops >= edge
        number_ = tl.zeros([R, 1, L], tl.float32)
        weight_ = tl.zeros([R, 1, L], tl.float64)
        for begin in range(0, at[6], K * L):
            v = fetch(at, begin, live, MASKED, FAR, K, L, True)
            kept = chosen(v, lanes(begin, K, L), edge, last)
            number_ += tl.sum(tl.where(kept, 1.0, 0.0), 1, keep_dims=True)
            weight_ += tl.sum(tl.where(kept, weigh(v, top), 0.0), 1, keep_dims=True).to(tl.float64)
        return total(number_), total(weight_)


@triton.jit
def cut(x, cols, tops, top, edge, room, go, at, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
        L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """The class up to which scores equal to the edge are kept, so that `room` scores are kept in all: ties are broken by position."""
    low = (edge * 0.0).to(tl.int32) - 1
    high = low + at[6]
    turn = 0
    while some(go & (high - low > 1)) & (turn < 40):
        middle = low + (high - low) // 2
        number, _ = tally(x, cols, tops, top, edge, middle, at, MASKED, FAR, R, K, L, WHOLE)
        enough = number >= room
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
        turn += 1
    return high
