"""The threshold of each query of attention: bounds from the high scores of lanes, and steps towards it from the sums of all keys."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tile import constants, fall, parameter, row_max, row_sum, shares


@triton.jit
def with_sink(s0, s1, extra, top, row, FORM: tl.constexpr):
    value, rate = shares(extra, top, row, FORM)
    return s0 + value, s1 + rate


@triton.jit
def two_powers(u, c, FORM: tl.constexpr):
    """(u^r, u^(r-1)) with r = 1 / c, 0 for u = 0."""
    if FORM.LINK == "root":
        inside = u > 0.0
        log_u = tl.log2(tl.where(inside, u, 1.0))
        r = 1.0 / c.to(tl.float32)
        return tl.where(inside, tl.exp2(r * log_u), 0.0), tl.where(inside, tl.exp2((r - 1.0) * log_u), 0.0)
    else:
        rate = tl.where(u > 0.0, 1.0, 0.0)
        for _ in tl.static_range(FORM.P - 1):
            rate = rate * u
        return rate * u, rate


@triton.jit
def lanes_bound(lanes, extra, top, c, slope, FORM: tl.constexpr, VIEW: tl.constexpr, TURNS: tl.constexpr):
    """z of a lower bound of the threshold: Newton steps on the high scores of the lanes, a tuple, whose sum is at most that of all keys.
    `slope`: see `slope_of`."""
    if FORM.LINK == "power" or FORM.LINK == "root":
        z = tl.full(top.shape, 1.0, tl.float32)  # the maximum alone has probability 1
        for _ in range(TURNS):
            s0, s1 = tl.zeros_like(top), tl.zeros_like(top)
            for level in tl.static_range(len(lanes)):
                value, rate = two_powers(tl.maximum((lanes[level] - top) * slope + z, 0.0), c, FORM)
                s0 += row_sum(value)
                s1 += row_sum(rate)
            if VIEW.SINK:
                value, rate = two_powers(tl.maximum((extra - top) * slope + z, 0.0), c, FORM)
                s0 += value
                s1 += rate
            z -= fall(s0, s1, c, FORM)
    else:
        z = top.to(tl.float64) * 0.0 + 1.0
        for _ in range(TURNS):
            row = constants(top, z, c, slope, FORM)
            s0, s1 = tl.zeros_like(z), tl.zeros_like(z)
            for level in tl.static_range(len(lanes)):
                value, rate = shares(lanes[level], top, row, FORM)
                s0 += row_sum(value)
                s1 += row_sum(rate)
            if VIEW.SINK:
                s0, s1 = with_sink(s0, s1, extra, top, row, FORM)
            z = tl.where(c > 1.0, z, z - fall(s0, s1, c, FORM).to(tl.float64))
    return z


@triton.jit
def lanes_reach(lanes, extra, top, bound, reach, c, slope, FORM: tl.constexpr, VIEW: tl.constexpr):
    """`bound`, raised by the current lanes and by the map's `reach` below the maximum; no score below it is in the support of its row."""
    bound = tl.maximum(bound, top - reach)
    safe = tl.where(top > float("-inf"), top, 0.0)
    z = lanes_bound(lanes, extra, safe, c, slope, FORM, VIEW, 4)
    below = (safe - z / slope).to(tl.float32)
    below -= 2e-6 * (reach + tl.abs(below) + tl.abs(safe))
    sure = (c > 0.0) & (c <= 1.0) & (top > float("-inf"))
    return tl.where(sure, tl.maximum(bound, below), bound)


@triton.jit
def higher(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def noticed(x, first, second, third, lowest, number, M: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr):
    """The three highest scores of each lane, for a budget the lowest score and the number of scores, and the highest score of the tile."""
    if FORM.LINK == "budget":
        here = x > float("-inf")
        lowest = tl.minimum(lowest, tl.min(tl.where(here, x, float("inf")), 1, keep_dims=True))
        number += row_sum(tl.where(here, 1.0, 0.0))
    neighbours = tl.reshape(x, [M, N // 2, 2])
    more, less = tl.reduce(neighbours, 2, higher), tl.min(neighbours, 2)
    middle = tl.minimum(first, more)
    high, low = tl.maximum(middle, less), tl.minimum(middle, less)
    third = tl.maximum(tl.minimum(second, high), tl.maximum(third, low))
    return (
        higher(first, more),
        tl.maximum(second, high),
        third,
        lowest,
        number,
        row_max(more),
    )


@triton.jit
def asked(arrays, call, b, h, i, FORM: tl.constexpr):
    """(alpha - 1, the sum of the probabilities, whether the parameter is invalid) of each row."""
    c = parameter(arrays, call, b, h, i, FORM)
    mass = tl.zeros_like(c) + 1.0
    unsound = c != c
    if FORM.LINK == "budget":
        mass = c
        unsound = unsound | (c <= 0.0)
    elif FORM.LINK == "mixed" or FORM.LINK == "any":
        unsound = unsound | (c <= -1.0)
        c = tl.where(unsound, 1.0, tl.where(tl.abs(c) < 1e-7, 1e-7, c))  # for alpha = 1 this changes p by 1e-8
    return c, mass, unsound


@triton.jit
def first_guess(
    lanes,
    extra,
    top,
    lowest,
    number,
    mass,
    c,
    slope,
    alive,
    FORM: tl.constexpr,
    VIEW: tl.constexpr,
    TURNS: tl.constexpr,
):
    """(z, low, high, width, mass, c, unfinished), the start of `improved`."""
    if FORM.LINK == "budget":  # tau is between the lowest score minus 1 and the maximum
        full = number <= mass
        high = tl.where(alive & (number > 0.0), (top.to(tl.float64) - lowest) + 2.0, 1.0)
        z = tl.where(full, high, tl.minimum(high, 1.0))
        none = tl.zeros_like(c)
        return z, none, high, high, tl.where(full, number, mass), none + 1.0, alive & (full == 0)
    else:
        z = lanes_bound(lanes, extra, top, c, slope, FORM, VIEW, TURNS).to(tl.float64)
        return z, tl.zeros_like(c), z, z, mass, c, alive


@triton.jit
def improved(z, low, high, width, s0, s1, size, mass, c, alive, enough, FORM: tl.constexpr):
    """(z, low, high, width, unfinished) from the sums at z: a Newton step on the r-norm where that is convex, else a step within brackets.
    `size`: the number of scores in the support at z."""
    excess = s0 - mass
    go = alive & (tl.abs(excess) > enough * mass)
    if FORM.LINK == "power" and FORM.P == 2:
        # if the support stays the same, sum (u - step)^2 = 1 is a quadratic in step; else the solution is between its root and Newton's
        over, rate = excess.to(tl.float32), s1.to(tl.float32)
        under = rate * rate - size * over
        exact = (rate > 0.0) & (under >= 0.0)
        step = fall(s0, s1, c, FORM)
        root = tl.where(exact, over / tl.where(exact, rate + tl.sqrt(tl.where(exact, under, 0.0)), 1.0), step)
        go = go & ((exact == 0) | ((root - step) * (2.0 * rate) > 10.0 * enough * enough))
        return tl.where(alive, z - tl.where(go, step, root).to(tl.float64), z), low, high, width, go
    elif FORM.LINK == "power" or FORM.LINK == "any" or FORM.LINK == "root":
        return tl.where(alive, z - fall(s0, s1, c, FORM).to(tl.float64), z), low, high, width, go
    else:
        high = tl.where(excess >= 0.0, tl.minimum(high, z), high)
        low = tl.where(excess <= 0.0, tl.maximum(low, z), low)
        rate = s1 if FORM.LINK == "budget" else s1 / c
        target = z - excess / tl.where(rate > 0.0, rate, 1.0)
        good = (rate > 0.0) & (target > low) & (target < high) & (2.0 * tl.abs(target - z) <= width)
        target = tl.where(good, target, 0.5 * (low + high))
        if FORM.LINK == "mixed":
            steep = c > 1.0
            go = go & ((steep == 0) | (high - low > 1e-15 * high))
            target = tl.where(steep, tl.where(go, target, z), z - fall(s0, s1, c, FORM).to(tl.float64))
        else:
            go = go & (high - low > 1e-15 * high)
            target = tl.where(go, target, z)
        width = tl.where(go, tl.abs(target - z), width)
        return tl.where(alive, target, z), low, high, width, go
