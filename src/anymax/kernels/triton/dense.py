"""Dense maps, `p_i = u(x_i) / sum u`: softmax, sigsoftmax and Taylor softmax.

A row that fits on chip is read once, a longer row twice (Taylor: three times); each is written once.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import exponent, log1p, taylor
from .policy import aimed, class_of, finish, lose, recall, remember, wanted
from .tile import OUTSIDE, fetch, higher, highest, largest, operand, output, per_lane, poisoned, rows_of, total, wide


@triton.jit
def size_of(x):
    """|x|, 0 for a masked score."""
    return tl.where(x > float("-inf"), tl.abs(x), 0.0)


@triton.jit
def weight(x, anchor, LINK: tl.constexpr, ORDER: tl.constexpr):
    """u(x) times a factor of the row, which `anchor` sets."""
    inside = x > float("-inf")
    if LINK == "softmax":  # the anchor is finite
        return tl.exp(x - anchor)
    elif LINK == "taylor":
        u, _ = taylor(tl.where(inside, x, 0.0), anchor, ORDER)
        return tl.where(inside, u, 0.0)
    else:
        return tl.where(inside, tl.exp(exponent(tl.where(inside, x, 0.0), LINK) - anchor), 0.0)


@triton.jit
def base_of(top, LINK: tl.constexpr):
    """The `exponent` of the maximum, or of 0 where the maximum is not finite."""
    return exponent(tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0), LINK)


@triton.jit
def running(at, first, end, LINK: tl.constexpr, TILE: tl.constexpr):
    """(maximum, sum of the weights relative to it) of each lane, in one read."""
    tops, acc = per_lane(float("-inf"), TILE), per_lane(0.0, TILE)
    for begin in range(first, end, TILE.K * TILE.L):
        v = fetch(at, begin, True, TILE, True)
        now = higher(tops, highest(v, 1))
        base = base_of(now, LINK)
        acc = acc * weight(tops, base, LINK, 0) + tl.sum(weight(v, base, LINK, 0), 1, keep_dims=True)
        tops = now
    return tops, acc


@triton.jit
def dense_parts(X, M, SUMS, rows, n, span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, LINK: tl.constexpr, PARTS: tl.constexpr,
                TILE: tl.constexpr):  # fmt: skip
    """Writes SUMS [rows, PARTS, 2]: the maximum of each part of a row, and the sum of the weights relative to it."""
    mine = rows_of(X, X, rows, n, d1, d2, TILE)
    at = operand(mine, X, x0, x1, x2, xc, M, m0, m1, m2, mc, TILE)
    first = tl.program_id(1) * span
    tops, acc = running(at, first, tl.minimum(first + span, at.n), LINK, TILE)
    top = highest(tops, 2)
    to = SUMS + (mine.row.to(tl.int64) * PARTS + tl.program_id(1)) * 2
    tl.store(to, top.to(tl.float64))
    tl.store(to + 1, wide(acc * weight(tops, base_of(top, LINK), LINK, 0)))


@triton.jit
def merged(SUMS, row, LINK: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    """The result of `gather`, from the SUMS of `dense_parts`."""
    of = SUMS + (row.to(tl.int64) * PARTS + tl.arange(0, PARTS)[None, None, :]) * 2
    tops, sums = tl.load(of).to(tl.float32), tl.load(of + 1)
    top = highest(tops, 2)
    anchor = base_of(top, LINK)
    z = total(sums * weight(tops, anchor, LINK, 0).to(tl.float64))
    return per_lane(float("-inf"), TILE), anchor, z, top


@triton.jit
def gather(at, LINK: tl.constexpr, ORDER: tl.constexpr, TILE: tl.constexpr):
    """(tile, anchor, Z, maximum): p = weight(x, anchor) / Z. The maximum of a poisoned row is NaN or +inf."""
    if TILE.WHOLE:
        x = fetch(at, 0, True, TILE, False)
        top = highest(highest(x, 1), 2)
        if LINK == "taylor":
            anchor = 1.0 / tl.maximum(0.25 * largest(size_of(x)), 1.0)
        else:
            anchor = base_of(top, LINK)
        z = wide(weight(x, anchor, LINK, ORDER))
    else:
        x = per_lane(float("-inf"), TILE)
        if LINK == "taylor":
            tops = x
            acc = per_lane(0.0, TILE, tl.float64)
            sizes = per_lane(0.0, TILE)
            for begin in range(0, at.n, TILE.K * TILE.L):
                v = fetch(at, begin, True, TILE, True)
                tops = higher(tops, highest(v, 1))
                sizes = tl.maximum(sizes, tl.max(size_of(v), 1, keep_dims=True))
            anchor = 1.0 / tl.maximum(0.25 * largest(sizes), 1.0)
            for begin in range(0, at.n, TILE.K * TILE.L):
                v = fetch(at, begin, True, TILE, True)
                acc += tl.sum(weight(v, anchor, LINK, ORDER), 1, keep_dims=True).to(tl.float64)
            z = total(acc)
            top = highest(tops, 2)
        else:
            tops, acc = running(at, 0, at.n, LINK, TILE)
            top = highest(tops, 2)
            anchor = base_of(top, LINK)
            z = wide(acc * weight(tops, anchor, LINK, ORDER))
    return x, anchor, z, top


@triton.jit
def emit(x, anchor, share, log_z, MODE: tl.constexpr, LINK: tl.constexpr, ORDER: tl.constexpr):
    if MODE == "log":
        inside = x > float("-inf")
        return tl.where(inside, (exponent(tl.where(inside, x, 0.0), LINK) - anchor) - log_z, float("-inf"))
    elif MODE == "grad":  # the maximum turns NaN to 0; the factor of a poisoned row is NaN
        return tl.maximum(weight(x, anchor, LINK, ORDER) * share, 0.0)
    else:
        return weight(x, anchor, LINK, ORDER) * share


@triton.jit
def dense_rows(X, M, OUT, INDEX, SCALE, VALUE, STATE, SUMS, PTR, IDS,
               rows, n, span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, o0, o1, o2, oc, ignore, slots,
               MODE: tl.constexpr, SAVE: tl.constexpr, EACH: tl.constexpr, LINK: tl.constexpr, ORDER: tl.constexpr, PARTS: tl.constexpr,
               TILE: tl.constexpr):  # fmt: skip
    """MODE "p", "loss", "grad" and "tau" are as in `separable_rows`, "log" writes log p, and "logsumexp" is "tau" of softmax except for
    poisoned rows. PARTS > 0: `dense_parts` has read the row."""
    mine = rows_of(PTR, IDS, slots, n, d1, d2, TILE)
    row, valid = mine.row, mine.valid
    at, to = operand(mine, X, x0, x1, x2, xc, M, m0, m1, m2, mc, TILE), output(mine, OUT, o0, o1, o2, oc, TILE)
    if MODE == "grad":
        x = fetch(at, 0, True, TILE, False) if TILE.WHOLE else per_lane(0.0, TILE)
        anchor, share, log_z, top, bad = recall(STATE, row, valid)
    else:
        if PARTS > 0:
            x, anchor, z, top = merged(SUMS, row, LINK, PARTS, TILE)
        else:
            x, anchor, z, top = gather(at, LINK, ORDER, TILE)
        bad = poisoned(top)
        z = tl.where(z > 0.0, z, 1.0)
        share, log_z = 1.0 / z.to(tl.float32), log1p((z - 1.0).to(tl.float32))
    if MODE == "p" or MODE == "log" or MODE == "grad":
        goal = wanted(INDEX, SCALE, row, ignore, tl.program_id(1) * span, span, at, bad, MODE, EACH)
        if TILE.WHOLE:
            finish(to, 0, emit(x, anchor, share, log_z, MODE, LINK, ORDER), goal, at, MODE, TILE)
        else:
            steps = tl.cdiv(tl.minimum(span, at.n - goal.first), TILE.K * TILE.L)
            for i in range(steps):  # backwards, since the cache still holds the last scores
                begin = goal.first + (steps - 1 - i) * (TILE.K * TILE.L)
                v = fetch(at, begin, True, TILE, False, OUTSIDE, False)
                finish(to, begin, emit(v, anchor, share, log_z, MODE, LINK, ORDER), goal, at, MODE, TILE)
    if MODE == "loss":
        t = class_of(INDEX, row, ignore, at)
        aim = aimed(at, t, TILE)
        lose(VALUE, row, rows, log_z + (top - aim), aim, t, bad, at)
        if SAVE:
            remember(STATE, row, valid, bad, anchor, share, log_z, top)
    if MODE == "tau" or MODE == "logsumexp":
        tau = tl.where(top == float("-inf"), top, anchor + log_z)
        # the logsumexp of a poisoned row is its maximum: NaN if it has NaN, else +inf
        tau = tl.where(bad, top if MODE == "logsumexp" else float("nan"), tau)
        tl.store(VALUE + row, tau, mask=valid)
