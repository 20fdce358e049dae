"""Solvers for the threshold, in array-API code: one number for each row, all rows at once.

A separable map is `p_i = phi(x_i - tau)`. Rows are centred at an anchor (their maximum, unless a map chooses another), and the
unknown is the `level`, the argument of phi at the anchor: `p_i = phi(y_i + level)` with `y_i = x_i - anchor`. So a common offset
of the scores costs no digits, and the unknown lies in a known interval of about its own size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .._array import Array, Namespace, counts, descending, known, loop, positions, running_sum, take, top, total


def totals(parts: list[Array], xp: Namespace) -> list[Array]:
    """The sums of several arrays over the classes, [..., 1]. Classes on several machines need another function of this type."""
    return [total(a, xp) for a in parts]


Totals = Callable[[list[Array], Namespace], list[Array]]


def root(
    evaluate: Callable[[Array], tuple[Array, Array]],
    low: Array,
    high: Array,
    xp: Namespace,
    limit: int = 200,
    traced: int = 20,
    start: Array | None = None,
) -> Array:
    """The root of an increasing function in [low, high], one per row: Newton's method inside a shrinking bracket.

    `evaluate(level)` gives the residual, of which only the sign is used, and the Newton step. From `high`, Newton's method on a
    convex function descends to the root without crossing it. A step that leaves the bracket, or is longer than half the step
    before, is replaced by bisection, so the method is not slower than bisection.
    """
    eps = xp.finfo(high.dtype).eps
    level = high if start is None else start
    traced = traced if start is None else 6  # enough after a closed form, even a badly rounded one
    step = xp.where(high > low, high - low, xp.zeros_like(high))  # a row with a NaN bound stops at once

    def tolerance(level: Array) -> Array:
        size = xp.abs(level)
        return eps * xp.where(size > 1.0, size, xp.ones_like(size))

    def active(state: tuple) -> Array:
        level, low, high, step = state
        tol = tolerance(level)
        return (xp.abs(step) > tol) & (high - low > tol)

    def body(state: tuple) -> tuple:
        level, low, high, step = state
        go = active(state)
        residual, newton = evaluate(level)
        below, above = residual <= 0, residual >= 0
        new_low = xp.where(below & (level > low), level, low)
        new_high = xp.where(above & (level < high), level, high)
        target = level + newton
        good = (target >= new_low) & (target <= new_high) & (2.0 * xp.abs(newton) <= xp.abs(step))
        # the first Newton step may be as long as half the bracket, whose width is the first `step`
        target = xp.where(good, target, 0.5 * (new_low + new_high))
        return (
            xp.where(go, target, level),
            xp.where(go, new_low, low),
            xp.where(go, new_high, high),
            xp.where(go, target - level, step),
        )

    return loop(lambda s: active(s), body, (level, low, high, step), limit, traced)[0]


# -- under a ceiling --------------------------------------------------------------------------------------------------------
#
# A rising level brings one class after the other to its ceiling. The anchor is the class whose ceiling, with those of the classes
# before it, reaches the mass: it is in the support, and measured from there nothing cancels. A ceiling may be open: the link reaches
# it only in the limit, where `slope` is infinite. Then no level brings a class to its ceiling, and the anchor is found with the same
# share, below 1, of each ceiling: under one ceiling for all, m classes with mass / m each.


def below_one_ceiling(
    slope: Callable[[Array, Namespace], Array], most: Any, mass: Any, x: Array, keep: Array, xp: Namespace
) -> tuple[Array, Array, Array, Array]:
    """(anchor, the level at the edge of the support, an upper bound of the level, True where the mass can be reached), [..., 1].

    For one ceiling that is the same for all classes of a row.
    """
    count = xp.sum(counts(keep, xp), axis=-1, keepdims=True)
    ordered = descending(xp.where(keep, x, -math.inf * xp.ones_like(x)), xp)
    each = most * xp.ones_like(x[..., :1])
    one = xp.where(each < mass, each, mass * xp.ones_like(each))  # no class gets more than the mass, which may be tiny
    end, edge = slope(one, xp), slope(xp.zeros_like(each), xp)  # at the edge the sum is below the mass
    opened, n = end == math.inf, x.shape[-1] + 1
    ratio = mass / each
    # mass / more is below the ceiling, even after rounding
    more = xp.floor(ratio * (1.0 + 8.0 * xp.finfo(x.dtype).eps)) + 1.0
    needed = xp.where(opened, more, xp.ceil(ratio))
    rank = counts(xp.where(needed < n, needed, n * xp.ones_like(needed)), xp) - 1
    rank = xp.where(rank > 0, rank, xp.zeros_like(rank))
    last = xp.where(count > 0, count, xp.ones_like(count)) - 1
    reachable = (count > 0) & (rank <= last)
    anchor = take(ordered, xp.where(rank < last, rank, last), xp)
    anchor = xp.where(anchor > -math.inf, anchor, xp.zeros_like(anchor))
    if not known(opened) or bool(xp.any(opened)):
        end = xp.where(opened & reachable, slope(mass / needed, xp), end)
    return anchor, edge, end, reachable


def below_ceilings(
    slope: Callable[[Array, Namespace], Array], most: Array, mass: Any, x: Array, keep: Array, xp: Namespace
) -> tuple[Array, Array, Array, Array, Array]:
    """Like `below_one_ceiling`, for ceilings and links that differ between classes. The first result is an argument of the links at which
    no class has more than an even share of the mass."""
    zero, infinite = xp.zeros_like(x), math.inf * xp.ones_like(x)
    count = xp.sum(counts(keep, xp), axis=-1, keepdims=True)
    nonempty = count > 0
    most = most * xp.ones_like(x)
    room = xp.where(keep, most, zero)
    even = mass / xp.astype(xp.where(nonempty, count, xp.ones_like(count)), x.dtype) + zero
    lowest = slope(xp.where(even < most, even, most), xp)
    lowest = -top(-xp.where(keep & (even <= most), lowest, infinite), xp)
    opened = xp.any(keep & (slope(most, xp) == math.inf), axis=-1, keepdims=True)
    share = 0.5 + 0.5 * mass / xp.where(nonempty, total(room, xp), xp.ones_like(lowest))
    share = xp.where(opened & (share < 1.0), share, xp.ones_like(share))
    ends = slope(share * most, xp)
    # by the threshold at which a class gets its share
    order = xp.argsort(-xp.where(keep, x - ends, -infinite), axis=-1)
    full = running_sum(xp.take_along_axis(share * room, order, axis=-1), xp)
    rank = xp.sum(counts(full < mass, xp), axis=-1, keepdims=True)
    last = xp.where(nonempty, count, xp.ones_like(count)) - 1
    reachable = nonempty & (rank <= last)
    first = take(order, xp.where(rank < last, rank, last), xp)
    anchor = xp.where(nonempty, take(xp.where(keep, x, zero), first, xp), xp.zeros_like(lowest))
    # where scores are so large that the differences of ends are rounded away, a class before `first` may need a higher level
    upto = xp.take_along_axis(ends - (xp.where(keep, x, anchor) - anchor), order, axis=-1)
    upto = xp.where(positions(x, rank.dtype, xp) <= xp.where(rank < last, rank, last), upto, -infinite)
    end = xp.where(opened & ~reachable, infinite[..., :1], top(upto, xp))
    return lowest, anchor, -infinite[..., :1], end, reachable


def sorted_power_threshold(z: Array, r: int, xp: Namespace) -> Array:
    """The root tau of `sum_i (z_i - tau)_+^r = 1` for r = 1, 2 or 3, in closed form after one sort; the maximum of z is 0.

    With the scores in descending order, k is in the support exactly if `sum_{i<=k} (z_i - z_k)^r < 1`. This sum never decreases with
    k, so it is enough to count, also with ties. Entries below -1 are not in the support, since tau >= -1; clipping them to -1 keeps
    every running sum small.
    """
    zs = descending(xp.where(z > -1.0, z, -xp.ones_like(z)), xp)
    count = running_sum(xp.ones_like(zs), xp)
    mean = running_sum(zs, xp) / count
    gap = mean - zs  # >= 0
    if r == 1:
        size = _support(count * gap, xp)
        return take(mean, size, xp) - 1.0 / take(count, size, xp)
    square = running_sum(zs * zs, xp) / count
    var = _floored(square - mean * mean, 0.0, xp)
    if r == 2:
        size = _support(count * (gap * gap + var), xp)
        k, m, v = (take(a, size, xp) for a in (count, mean, var))
        return m - xp.sqrt(_floored(1.0 / k - v, 0.0, xp))
    if r != 3:
        raise ValueError(f"closed forms exist for r = 1, 2, 3, not {r}")
    cube = running_sum(zs * zs * zs, xp) / count
    third = cube - 3.0 * mean * square + 2.0 * mean * mean * mean  # the third central moment
    size = _support(count * (gap * gap * gap + 3.0 * gap * var + third), xp)
    k, m, v, c = (take(a, size, xp) for a in (count, mean, var, third))
    return m - _depressed_cubic(v, 1.0 / k - c, xp)


def _support(mass: Array, xp: Namespace) -> Array:
    """The index of the last supported entry, [..., 1]; `mass` is the sum of each prefix with tau at its last entry."""
    inside = counts(mass < 1.0, xp)
    last = xp.sum(inside, axis=-1, keepdims=True) - 1
    return xp.where(last < 0, xp.zeros_like(last), last)


def _depressed_cubic(v: Array, q: Array, xp: Namespace) -> Array:
    """The real root w of `w^3 + 3 v w = q`, v >= 0, by the hyperbolic formula, which does not cancel."""
    tiny = xp.finfo(v.dtype).smallest_normal ** 0.25
    spread = xp.sqrt(xp.where(v > tiny, v, xp.ones_like(v)))
    bent = 2.0 * spread * xp.sinh(xp.asinh(q / (2.0 * spread * spread * spread)) / 3.0)
    size = xp.abs(q)
    plain = xp.sign(q) * xp.where(size > 0, size, xp.ones_like(size)) ** (1.0 / 3.0)
    return xp.where(v > tiny, bent, plain)


def _floored(x: Array, floor: float, xp: Namespace) -> Array:
    return xp.where(x > floor, x, floor * xp.ones_like(x))


def pivot(z: Array, keep: Array, c: Any, xp: Namespace) -> tuple[Array, Array]:
    """The smallest supported score of `sum_i (c (z_i - tau))_+^(1/c) = 1` and its probability q, for c >= 1.

    Above alpha = 2 the map has infinite slope at the edge of its support, so rounding the threshold to the working precision
    gives much larger errors in the small probabilities. With the smallest supported score as the anchor, every term
    `q^c + c (z_i - z_m)` is a sum of non-negative numbers and loses no digits. The function `sum_i (q^c + c d_i)^(1/c)` is a
    sum of c-norms, hence convex in q, and Newton's method from q = 1 / |support| descends to the root.
    """
    n = z.shape[-1]
    order = descending(xp.where(keep, z, -xp.inf * xp.ones_like(z)), xp)
    kept = xp.sum(counts(keep, xp), axis=-1, keepdims=True)
    low = xp.zeros_like(kept)  # always in the support
    high = xp.where(kept > 0, kept, xp.ones_like(kept))  # an index that is never in it
    r = 1.0 / c
    rounds = max(1, (n - 1).bit_length() + 1) if isinstance(n, int) else 32  # a size may be a symbol, below 2^31
    for _ in range(rounds):
        middle = (low + high) // 2
        gap = z - take(order, middle, xp)
        above = keep & (gap > 0)
        mass = total(xp.where(above, (c * xp.where(above, gap, xp.ones_like(gap))) ** r, xp.zeros_like(gap)), xp)
        inside = (mass < 1.0) & (middle < kept)
        low, high = xp.where(inside, middle, low), xp.where(inside, high, middle)
    anchor = take(order, low, xp)
    anchor = xp.where(anchor > -xp.inf, anchor, xp.zeros_like(anchor))
    gap = z - anchor
    support = keep & (gap >= 0)
    size = xp.astype(xp.sum(counts(support, xp), axis=-1, keepdims=True), z.dtype)
    high_q = 1.0 / xp.where(size > 0, size, xp.ones_like(size))

    def evaluate(q: Array) -> tuple[Array, Array]:
        p = anchored_power(q, gap, support, c, xp)
        residual = total(p, xp) - 1.0
        ratio = xp.where(support, q / xp.where(support, p, xp.ones_like(p)), xp.zeros_like(p))
        slope = total(xp.where(support, ratio ** (c - 1.0), xp.zeros_like(p)), xp)
        return residual, -residual / slope

    return anchor, root(evaluate, 0.0 * high_q, high_q, xp)


def anchored_power(q: Array, gap: Array, support: Array, c: Any, xp: Namespace) -> Array:
    """`(q^c + c gap)^(1/c)` on the support (gap >= 0), 0 elsewhere; q if the sum is too small for the dtype."""
    base = q**c + c * xp.where(support, gap, xp.ones_like(gap))
    whole = base > xp.finfo(gap.dtype).smallest_normal
    p = xp.where(whole, xp.where(whole, base, xp.ones_like(base)) ** (1.0 / c), q + 0.0 * gap)
    return xp.where(support, p, xp.zeros_like(gap))
