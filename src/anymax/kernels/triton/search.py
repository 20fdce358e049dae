"""The score at which a running sum over the scores in descending order reaches a target: top-k counts them, top-p adds their weights.

No sort: pivots by turns between two neighbours in value and in the order of the floats, each pass jumping to scores that occur. The bound
from the lane maxima leaves few candidates.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# what is traced by Triton is no Python to a type checker

from __future__ import annotations

import triton
import triton.language as tl

from .tile import fetch, lanes, largest, smallest, some, total

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def key(x):
    """Integers in the order of the floats; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def unkey(k):
    bits = k.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(x, top, BY: tl.constexpr):
    """1 for each score, or its exponential below the maximum."""
    if BY == "count":
        return tl.where(x > float("-inf"), 1.0, 0.0)
    else:
        return tl.where(x > float("-inf"), tl.exp(x - top), 0.0)


@triton.jit
def probe(x, tops, top, m, low, at, BY: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
          L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(weight of the scores from m on, the lowest of them, the highest below m)."""
    if WHOLE:
        return (
            total(tl.where(x >= m, weigh(x, top, BY), 0.0).to(tl.float64)),
            smallest(tl.where(x >= m, x, float("inf"))),
            largest(tl.where(x < m, x, float("-inf"))),
        )
    else:
        live = tops >= low
        weight = tl.zeros([R, 1, L], tl.float64)
        above = tl.full([R, 1, L], float("inf"), tl.float32)
        below = tl.full([R, 1, L], float("-inf"), tl.float32)
        for begin in range(0, at[6], K * L):
            v = fetch(at, begin, live, MASKED, FAR, K, L, True)
            weight += tl.sum(tl.where(v >= m, weigh(v, top, BY), 0.0), 1, keep_dims=True).to(tl.float64)
            above = tl.minimum(above, tl.min(tl.where(v >= m, v, float("inf")), 1, keep_dims=True))
            below = tl.maximum(below, tl.max(tl.where(v < m, v, float("-inf")), 1, keep_dims=True))
        return total(weight), smallest(above), largest(below)


@triton.jit
def select(x, tops, top, bound, target, at, BY: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
           L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(edge, few): the lowest score that has less than `target` above it; few: the whole row has not so much.

    `bound` is a score that is surely not above the edge, or the maximum where none is known.
    """
    if (BY == "count") & (
        (K > 1) | (not WHOLE)
    ):  # as many lane maxima are as large as the bound, each of another score
        bound = of_lanes(tops, top, target, R, L)
    else:
        bound = tl.where(bound < top, bound, LOWEST)
    bound = tl.where(top > float("-inf"), bound, LOWEST)
    low, high = key(bound), key(tl.maximum(top, bound))
    weight_low = target * 0.0
    weight_high = target * 0.0
    few = top == float("-inf")
    go = few == 0
    m = bound
    turn = 0
    while some(go) & (turn < 100):
        s, above, below = probe(x, tops, top, m, unkey(low), at, BY, MASKED, FAR, R, K, L, WHOLE)
        short = s < target
        none = short & (turn == 0) & (below == float("-inf"))
        few = few | (go & none)
        one_above = weigh(above, top, BY).to(tl.float64)
        one_below = weigh(below, top, BY).to(tl.float64)
        down = go & short & (none == 0)
        up = go & (short == 0)
        high = tl.where(down, key(below), high)
        weight_high = tl.where(down, s, weight_high)
        low = tl.where(down & (s + one_below >= target), key(below), low)
        low = tl.where(up, key(above), low)
        weight_low = tl.where(up, s, weight_low)
        high = tl.where(up & (s - one_above < target), key(above), high)
        go = go & (none == 0) & (low < high)
        turn += 1
        # the next pivot, above low and at most high
        half = low + (high - low + 1) // 2
        part = (weight_low - target) / tl.maximum(weight_low - weight_high, 1e-30)
        guess = unkey(low).to(tl.float64) + (unkey(high).to(tl.float64) - unkey(low).to(tl.float64)) * tl.minimum(
            tl.maximum(part, 0.0), 1.0
        )
        guess = key(guess.to(tl.float32))
        guess = tl.minimum(tl.maximum(guess, low + 1), high)
        m = unkey(tl.where((turn % 3 == 0) | (weight_low <= weight_high), half, guess))
    edge = tl.where(few, LOWEST, unkey(low))
    return edge, few


@triton.jit
def of_lanes(tops, top, target, R: tl.constexpr, L: tl.constexpr):
    """A score that at least `target` lane maxima reach, nearly the largest such; LOWEST where there are fewer lanes."""
    low = key(tl.zeros_like(top) + LOWEST)
    high = key(tl.maximum(top, LOWEST)) + 1  # no lane reaches it
    enough = total(tl.where(tops >= LOWEST, 1.0, 0.0)).to(tl.float64) >= target
    for _ in range(20):
        middle = low + (high - low) // 2
        full = total(tl.where(tops >= unkey(middle), 1.0, 0.0)).to(tl.float64) >= target
        low = tl.where(full, middle, low)
        high = tl.where(full, high, middle)
    return tl.where(enough, unkey(low), LOWEST)


@triton.jit
def tally(x, tops, top, edge, at, BY: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
          L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(number of scores above the edge, their weight exp(x - top), number at the edge)."""
    if WHOLE:
        above = x > edge
        return (
            total(tl.where(above, 1.0, 0.0)).to(tl.float64),
            total(tl.where(above, weigh(x, top, "exp"), 0.0).to(tl.float64)),
            total(tl.where(x == edge, 1.0, 0.0)).to(tl.float64),
        )
    else:
        live = tops >= edge
        count = tl.zeros([R, 1, L], tl.float32)
        equal = tl.zeros([R, 1, L], tl.float32)
        weight = tl.zeros([R, 1, L], tl.float64)
        for begin in range(0, at[6], K * L):
            v = fetch(at, begin, live, MASKED, FAR, K, L, True)
            count += tl.sum(tl.where(v > edge, 1.0, 0.0), 1, keep_dims=True)
            equal += tl.sum(tl.where(v == edge, 1.0, 0.0), 1, keep_dims=True)
            weight += tl.sum(tl.where(v > edge, weigh(v, top, "exp"), 0.0).to(tl.float64), 1, keep_dims=True)
        return total(count).to(tl.float64), total(weight), total(equal).to(tl.float64)


@triton.jit
def cut(x, cols, tops, edge, room, equal, at, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
        WHOLE: tl.constexpr):  # fmt: skip
    """The class up to which scores at the edge are kept, `room` of them: ties are broken by position."""
    n = at[6]
    low = (room * 0.0).to(tl.int32) - 1
    high = low + n
    last = high
    go = room < equal
    turn = 0
    while some(go) & (turn < 40):
        middle = low + (high - low) // 2
        if WHOLE:
            count = total(tl.where((x == edge) & (cols <= middle), 1.0, 0.0))
        else:
            live = tops >= edge
            acc = tl.zeros([R, 1, L], tl.float32)
            for begin in range(0, n, K * L):
                v = fetch(at, begin, live, MASKED, FAR, K, L, True)
                acc += tl.sum(tl.where((v == edge) & (lanes(begin, K, L) <= middle), 1.0, 0.0), 1, keep_dims=True)
            count = total(acc)
        count = count.to(tl.float64)
        last = tl.where(go & (count == room), middle, last)
        low = tl.where(go & (count < room), middle, low)
        high = tl.where(go & (count > room), middle, high)
        go = go & (count != room) & (high - low > 1)
        turn += 1
    return last
