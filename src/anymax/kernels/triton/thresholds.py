"""The search of a threshold map: the numbers of a row, from its lane maxima and a few passes over its scores.

The search is in fp32. It starts on the lane maxima, whose root is a bound of the row's and nearly exact, so one or two steps over the row
remain. For fp32 results (EXACT) a last pass sums in fp64, and a first-order correction along the rates brings the sum to 1. Half-precision
results don't need that.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import bent, ground, log1p, over, share_of
from .search import kth, probe
from .tile import any_of, fetch, in_packs, largest, per_lane, smallest, total, wide


@triton.jit
def fitted(top, b, c, r, FORM: tl.constexpr):
    """k of `share_of` from b: the slope over the r-th root of b."""
    if FORM.LINK == "any":
        return c * tl.exp2(-tl.log2(b) / r)
    else:
        return b


@triton.jit
def sums(x, tops, a, b, k, r, at, FORM: tl.constexpr, TILE: tl.constexpr, FINE: tl.constexpr):
    """The sums of value and rate over the row, in fp32, or in fp64 if FINE."""
    if TILE.WHOLE:
        value, rate = share_of(x, a, b, k, r, FORM, FINE)
        if FINE:
            s0, s1 = wide(value), wide(rate)
        else:
            s0, s1 = total(value), total(rate)
    else:
        live, _ = share_of(tops, a, b, k, r, FORM, FINE)
        live = in_packs(live > 0.0, at, TILE)
        t0 = tl.zeros_like(tops)
        t1 = tl.zeros_like(tops)
        if FINE:
            t0, t1 = t0.to(tl.float64), t1.to(tl.float64)
        for begin in range(0, at.n, TILE.K * TILE.L):
            value, rate = share_of(fetch(at, begin, live, TILE, True), a, b, k, r, FORM, FINE)
            t0 += tl.sum(value, 1, keep_dims=True).to(t0.dtype)
            t1 += tl.sum(rate, 1, keep_dims=True).to(t1.dtype)
        s0, s1 = total(t0), total(t1)
    return s0, s1


@triton.jit
def moved(b, s0, s1, r, FORM: tl.constexpr):
    """One Newton step on the r-norm of u, which is convex: from a b that is too large (a threshold too low) it never overshoots."""
    by = over(bent(s0, r, FORM), s1)
    if FORM.LINK == "any":
        return b * tl.exp(r * log1p(-tl.minimum(by, 0.999)))
    else:
        return b - by


@triton.jit
def descent(tops, a, top, c, r, FORM: tl.constexpr):
    """A lower bound of the threshold, as a b: four steps on the lane maxima, whose sum is at most that of the row."""
    b = top * 0.0 + 1.0  # the maximum alone has probability 1
    for _ in range(4):
        value, rate = share_of(tops, a, b, fitted(top, b, c, r, FORM), r, FORM, False)
        b = moved(b, total(value), total(rate), r, FORM)
    return b


@triton.jit
def newton(x, tops, a, top, go, c, r, at, FORM: tl.constexpr, TILE: tl.constexpr):
    """(b, lost, sum of the rates): p = value - lost rate. `a` is the maximum, or 0 where it has been subtracted from the scores.

    A step squares the error, so a rough sum of 1 is enough to stop, except for power 1, whose rate jumps at the edge of the support.
    """
    if (x.shape[1] > 1) | (not TILE.WHOLE):
        b = descent(tops, a, top, c, r, FORM)
    else:
        b = top * 0.0 + 1.0
    if FORM.EXACT:
        enough = 2e-6 if FORM.LINK == "power" and FORM.P == 1 else 2e-4
    else:
        enough = 5e-4 if FORM.LINK == "power" and FORM.P == 1 else 1e-2
    turn = 0
    while any_of(go) & (turn < 50):
        s0, s1 = sums(x, tops, a, b, fitted(top, b, c, r, FORM), r, at, FORM, TILE, False)
        b = tl.where(go, moved(b, s0, s1, r, FORM), b)
        go = go & (tl.abs(s0 - 1.0) > enough)
        turn += 1
    lost, norm = top * 0.0, top * 0.0
    if FORM.EXACT:
        s0, s1 = sums(x, tops, a, b, fitted(top, b, c, r, FORM), r, at, FORM, TILE, True)
        norm = s1.to(tl.float32)
        lost = over((s0 - 1.0).to(tl.float32), norm)
    return b, lost, norm


@triton.jit
def edged(x, tops, top, live, r, at, FORM: tl.constexpr, TILE: tl.constexpr):
    """(near, rest, lost, sum of the rates) for normmax above alpha = 2. tau is in two fp32 numbers, since the link is infinitely steep."""
    z = top.to(tl.float64) * 0.0 + 1.0
    go = live
    turn = 0
    while any_of(go) & (turn < 50):
        near, rest = ground(top, z, 1.0)
        s0, s1 = sums(x, tops, near, rest, rest, r, at, FORM, TILE, False)
        z = tl.where(go, z - over(bent(s0, r, FORM), s1).to(tl.float64), z)
        go = go & (tl.abs(s0 - 1.0) > 2e-6)
        turn += 1
    near, rest = ground(top, z, 1.0)
    s0, s1 = sums(x, tops, near, rest, rest, r, at, FORM, TILE, True)
    norm = s1.to(tl.float32)
    return near, rest, over((s0 - 1.0).to(tl.float32), norm), norm


@triton.jit
def bracketed(x, tops, top, live, k, at, FORM: tl.constexpr, TILE: tl.constexpr):
    """(edge, z, lost) of the budget k: tau is between the ceil(k)-th largest score and that score minus 1.

    Where the row has fewer than ceil(k) classes, all have probability 1.
    """
    edge, few = kth(x, tops, top, live, tl.ceil(k), at, TILE)
    low = edge * 0.0
    high = low + 1.0
    z = high
    width = high
    go = live & (few == 0)
    turn = 0
    while any_of(go) & (turn < 80):
        s0, s1 = sums(x, tops, edge, z, z, k, at, FORM, TILE, False)
        excess = s0 - k
        high = tl.where(excess >= 0.0, tl.minimum(high, z), high)
        low = tl.where(excess <= 0.0, tl.maximum(low, z), low)
        target = z - over(excess, s1)
        good = (s1 > 0.0) & (target >= low) & (target <= high) & (2.0 * tl.abs(target - z) <= width)
        target = tl.where(good, target, 0.5 * (low + high))
        width = tl.where(go, tl.abs(target - z), width)
        z = tl.where(go, target, z)
        go = go & (tl.abs(excess) > 1e-6 * k) & (width > 3e-8)
        turn += 1
    z = tl.where(few, 1e30, z)
    s0, s1 = sums(x, tops, edge, z, z, k, at, FORM, TILE, True)
    lost = over((s0 - k.to(tl.float64)).to(tl.float32), s1.to(tl.float32))
    return edge, z, tl.where(few, 0.0, lost)


# -- above alpha = 2 ---------------------------------------------------------------------------------------------------------------


@triton.jit
def reach_terms(x, m, c, r):
    from_m = x - m
    u = c * from_m
    inside = from_m > 0.0
    return tl.where(inside, tl.exp2(r * tl.log2(tl.where(inside, u, 1.0))), 0.0)


@triton.jit
def reach(x, tops, m, low, c, r, at, TILE: tl.constexpr):
    """(mass of the scores above m with the threshold at m, the lowest score >= m, the highest score below m)."""
    if TILE.WHOLE:
        return (
            total(reach_terms(x, m, c, r)),
            smallest(tl.where(x >= m, x, float("inf"))),
            largest(tl.where(x < m, x, float("-inf"))),
        )
    else:
        live = in_packs(tops >= low, at, TILE)
        mass = tl.zeros_like(tops)
        above = per_lane(float("inf"), TILE)
        below = per_lane(float("-inf"), TILE)
        for begin in range(0, at.n, TILE.K * TILE.L):
            v = fetch(at, begin, live, TILE, True)
            mass += tl.sum(reach_terms(v, m, c, r), 1, keep_dims=True)
            above = tl.minimum(above, tl.min(tl.where(v >= m, v, float("inf")), 1, keep_dims=True))
            below = tl.maximum(below, tl.max(tl.where(v < m, v, float("-inf")), 1, keep_dims=True))
        return total(mass), smallest(above), largest(below)


@triton.jit
def positive_power(q, c):
    """q^c, and about 0 for q = 0."""
    return tl.exp2(c * tl.log2(tl.maximum(q, 1.2e-38)))


@triton.jit
def anchored(x, tops, top, live, c, at, FORM: tl.constexpr, TILE: tl.constexpr):
    """(anchor, q, lost): the smallest supported score and its probability. A score is supported if the scores above it have a mass below 1
    with the threshold at that score; such scores lie within 1/c of the maximum."""
    r = 1.0 / c
    anchor = top
    low = anchor - r
    next_ = anchor
    go = live
    turn = 0
    while any_of(go) & (turn < 120):
        middle = 0.5 * low + 0.5 * next_
        m = tl.where((turn % 2 == 0) & (middle > low) & (middle < next_), middle, next_)
        mass, above, below = reach(x, tops, m, low, c, r, at, TILE)
        inside = mass < 1.0
        anchor = tl.where(go & inside, above, anchor)
        next_ = tl.where(go & inside, below, next_)
        low = tl.where(go & (inside == 0), m, low)
        go = go & (next_ > low)
        turn += 1
    q = 1.0 / tl.maximum(probe(x, tops, top, anchor, at, "count", TILE), 1.0)
    go = live
    turn = 0
    while any_of(go) & (turn < 60):
        s0, s1 = sums(x, tops, anchor, positive_power(q, c), q, c, at, FORM, TILE, False)
        excess = s0 - 1.0
        q = tl.where(go, q - tl.minimum(over(excess, s1), 0.999 * q), q)
        go = go & (tl.abs(excess) > 1e-6) & (q > 1e-30)
        turn += 1
    s0, s1 = sums(x, tops, anchor, positive_power(q, c), q, c, at, FORM, TILE, True)
    return anchor, q, over((s0 - 1.0).to(tl.float32), s1.to(tl.float32))


# -- every link ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def slope_and_power(param, FORM: tl.constexpr):
    """(slope, power) of p = (slope (x - tau))^power: alpha - 1 and 1 / (alpha - 1) for entmax, 1 and alpha / (alpha - 1) for normmax."""
    if FORM.NORM:
        return param * 0.0 + 1.0, (param + 1.0) / param
    else:
        c = tl.where(tl.abs(param) < 1e-7, 1e-7, param)  # for alpha = 1 this changes p by 1e-8
        return c, 1.0 / c


@triton.jit
def solve(x, tops, a, top, live, param, at, FORM: tl.constexpr, TILE: tl.constexpr):
    """The four numbers of each row (see `separable`). `live`: the rows to solve."""
    c, r = slope_and_power(param, FORM)
    if FORM.LINK == "budget":
        s0, s1, s2 = bracketed(x, tops, top, live, param, at, FORM, TILE)
        s3 = s2 * 0.0
    elif FORM.LINK == "steep":
        s0, s1, s2 = anchored(x, tops, top, live, param, at, FORM, TILE)
        s3 = s2 * 0.0
    elif FORM.LINK == "edge":
        s0, s1, s2, norm = edged(x, tops, top, live, r, at, FORM, TILE)
        s3 = over(1.0, norm)
    else:
        s0 = top
        s1, s2, norm = newton(x, tops, a, top, live, c, r, at, FORM, TILE)
        s3 = over(1.0, norm)
    return s0, s1, s2, s3
