"""Dense maps, `p_i = u(x_i) / sum u`: softmax, sigsoftmax and Taylor softmax.

One read and one write of a row that fits on chip, two reads of a longer one (Taylor: three).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# what is traced by Triton is no Python to a type checker

from __future__ import annotations

import triton
import triton.language as tl

from .links import exponent, log1p, taylor
from .policy import aimed, finish, lose, recall, remember, wanted
from .tile import fetch, largest, place, total


@triton.jit
def size_of(x):
    """|x|, 0 for a masked score."""
    return tl.where(x > float("-inf"), tl.abs(x), 0.0)


@triton.jit
def weight(x, anchor, LINK: tl.constexpr, ORDER: tl.constexpr):
    """u(x), times a factor of the row."""
    inside = x > float("-inf")
    if LINK == "taylor":
        u, _ = taylor(tl.where(inside, x, 0.0), anchor, ORDER)
        return tl.where(inside, u, 0.0)
    else:
        return tl.where(inside, tl.exp(exponent(tl.where(inside, x, 0.0), LINK) - anchor), 0.0)


@triton.jit
def running(at, first, end, LINK: tl.constexpr, ORDER: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr,
            K: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """(maximum, sum below it, 1 for +inf and 2 for NaN) of each lane, in one read."""
    tops = tl.full([R, 1, L], float("-inf"), tl.float32)
    bad = tl.zeros([R, 1, L], tl.int32)
    acc = tl.zeros([R, 1, L], tl.float64)
    for begin in range(first, end, K * L):
        v = fetch(at, begin, True, MASKED, FAR, K, L, True)
        wrong = tl.where(v == v, tl.where(v < float("inf"), 0, 1), 2)
        bad = tl.maximum(bad, tl.max(wrong, 1, keep_dims=True))
        v = tl.where(wrong == 0, v, float("-inf"))
        now = tl.maximum(tops, tl.max(v, 1, keep_dims=True))
        base = exponent(tl.where(now > float("-inf"), now, 0.0), LINK)
        fade = weight(tops, base, LINK, ORDER)
        acc = acc * fade.to(tl.float64) + tl.sum(weight(v, base, LINK, ORDER), 1, keep_dims=True).to(tl.float64)
        tops = now
    return tops, acc, bad


@triton.jit
def dense_parts(X, M, SUMS, rows, n, span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, LINK: tl.constexpr, MASKED: tl.constexpr,
                FAR: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """SUMS [rows, PARTS, 3]: of each part of a row the maximum, the sum below it, and what is strange in it."""
    row = tl.program_id(0) + tl.arange(0, 1)[:, None, None]
    at = (X, place(row, d1, d2, x0, x1, x2), xc, M, place(row, d1, d2, m0, m1, m2), mc, n, row < rows)
    first = tl.program_id(1) * span
    tops, acc, bad = running(at, first, tl.minimum(first + span, n), LINK, 0, MASKED, FAR, 1, K, L)
    top = largest(tops)
    anchor = exponent(tl.where(top > float("-inf"), top, 0.0), LINK)
    to = SUMS + (row.to(tl.int64) * PARTS + tl.program_id(1)) * 3
    tl.store(to, top.to(tl.float64))
    tl.store(to + 1, total(acc * weight(tops, anchor, LINK, 0).to(tl.float64)))
    tl.store(to + 2, largest(bad).to(tl.float64))


@triton.jit
def merged(SUMS, row, LINK: tl.constexpr, PARTS: tl.constexpr, L: tl.constexpr):
    """As `gather`, from what `dense_parts` found."""
    of = SUMS + (row.to(tl.int64) * PARTS + tl.arange(0, PARTS)[None, None, :]) * 3
    tops, sums = tl.load(of).to(tl.float32), tl.load(of + 1)
    strange = largest(tl.load(of + 2))
    top = largest(tops)
    anchor = exponent(tl.where(top > float("-inf"), top, 0.0), LINK)
    z = total(sums * weight(tops, anchor, LINK, 0).to(tl.float64))
    x = tl.full([1, 1, L], float("-inf"), tl.float32)
    return x, anchor, tl.where(z > 0.0, z, 1.0), strange > 0.0, top == float("-inf"), strange > 1.0, top


@triton.jit
def gather(at, LINK: tl.constexpr, ORDER: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
           L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(tile, anchor, Z, poisoned, empty, NaN, maximum): p = weight(x, anchor) / Z."""
    n = at[6]
    if WHOLE:
        x = fetch(at, 0, True, MASKED, FAR, K, L, False)
        wrong = tl.where(x == x, tl.where(x < float("inf"), 0, 1), 2)
        x = tl.where(wrong == 0, x, float("-inf"))
        top = largest(x)
        if LINK == "taylor":
            size = 0.25 * largest(size_of(x))
            anchor = 1.0 / tl.maximum(size, 1.0)
        else:
            anchor = exponent(tl.where(top > float("-inf"), top, 0.0), LINK)
        z = total(weight(x, anchor, LINK, ORDER).to(tl.float64))
    else:
        x = tl.full([R, 1, L], float("-inf"), tl.float32)
        if LINK == "taylor":
            tops = x
            bad = tl.zeros([R, 1, L], tl.int32)
            acc = tl.zeros([R, 1, L], tl.float64)
            sizes = tl.zeros([R, 1, L], tl.float32)
            for begin in range(0, n, K * L):
                v = fetch(at, begin, True, MASKED, FAR, K, L, True)
                bad = tl.maximum(bad, tl.max(tl.where(v == v, tl.where(v < float("inf"), 0, 1), 2), 1, keep_dims=True))
                tops = tl.maximum(tops, tl.max(v, 1, keep_dims=True))
                sizes = tl.maximum(sizes, tl.max(size_of(v), 1, keep_dims=True))
            anchor = 1.0 / tl.maximum(0.25 * largest(sizes), 1.0)
            for begin in range(0, n, K * L):
                v = fetch(at, begin, True, MASKED, FAR, K, L, True)
                acc += tl.sum(weight(v, anchor, LINK, ORDER).to(tl.float64), 1, keep_dims=True)
            z = total(acc)
            top = largest(tops)
        else:
            tops, acc, bad = running(at, 0, n, LINK, ORDER, MASKED, FAR, R, K, L)
            top = largest(tops)
            anchor = exponent(tl.where(top > float("-inf"), top, 0.0), LINK)
            z = total(acc * weight(tops, anchor, LINK, ORDER).to(tl.float64))
        wrong = bad
    strange = largest(wrong)
    return x, anchor, tl.where(z > 0.0, z, 1.0), strange > 0, top == float("-inf"), strange > 1, top


@triton.jit
def emit(x, anchor, share, log_z, MODE: tl.constexpr, LINK: tl.constexpr, ORDER: tl.constexpr):
    if MODE == "log":
        inside = x > float("-inf")
        return tl.where(inside, (exponent(tl.where(inside, x, 0.0), LINK) - anchor) - log_z, float("-inf"))
    else:
        return weight(x, anchor, LINK, ORDER) * share


@triton.jit
def dense_rows(X, M, OUT, INDEX, SCALE, VALUE, STATE, SUMS,
               rows, n, span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, o0, o1, o2, oc,
               MODE: tl.constexpr, LINK: tl.constexpr, ORDER: tl.constexpr, MASKED: tl.constexpr, SAVE: tl.constexpr,
               FAR: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """MODE "p", "log", "loss", "grad" and "tau" as in `separable_rows`; "logsumexp" is the threshold of softmax, but for poisoned rows.
    PARTS > 0: `dense_parts` has been over the row."""
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None, None]
    valid = row < rows
    at = (X, place(row, d1, d2, x0, x1, x2), xc, M, place(row, d1, d2, m0, m1, m2), mc, n, valid)
    if MODE == "grad":
        x = fetch(at, 0, True, MASKED, FAR, K, L, False) if WHOLE else tl.zeros([R, 1, L], tl.float32)
        s0, z, _, _, bad = recall(STATE, row, valid)
        anchor = s0.to(tl.float32)
        empty = bad
        worst = bad
        top = anchor
    elif PARTS > 0:
        x, anchor, z, bad, empty, worst, top = merged(SUMS, row, LINK, PARTS, L)
    else:
        x, anchor, z, bad, empty, worst, top = gather(at, LINK, ORDER, MASKED, FAR, R, K, L, WHOLE)
    share, log_z = (1.0 / z).to(tl.float32), tl.log(z).to(tl.float32)
    if MODE == "p" or MODE == "log" or MODE == "grad":
        oo = place(row, d1, d2, o0, o1, o2)
        t, scale = wanted(INDEX, SCALE, row, valid, MODE)
        if WHOLE:
            finish(
                OUT,
                oo,
                oc,
                0,
                emit(x, anchor, share, log_z, MODE, LINK, ORDER),
                t,
                scale,
                bad,
                n,
                valid,
                MODE,
                FAR,
                K,
                L,
            )
        else:
            first = tl.program_id(1) * span
            steps = tl.cdiv(tl.minimum(span, n - first), K * L)
            for i in range(steps):  # from the end, whose scores the cache still has
                begin = first + (steps - 1 - i) * (K * L)
                v = fetch(at, begin, True, MASKED, FAR, K, L, False)
                p = emit(v, anchor, share, log_z, MODE, LINK, ORDER)
                finish(OUT, oo, oc, begin, p, t, scale, bad, n, valid, MODE, FAR, K, L)
    if MODE == "loss":
        t = tl.load(INDEX + row, mask=valid, other=-1)
        aim = aimed(at, t, MASKED)
        value = log1p(z - 1.0) + (top.to(tl.float64) - aim.to(tl.float64))
        lose(VALUE, row, value, aim, t, bad, at)
        if SAVE:
            remember(STATE, row, valid, bad, anchor, z, z, z)
    if MODE == "tau" or MODE == "logsumexp":
        tau = tl.where(empty, float("-inf"), anchor.to(tl.float64) + tl.log(z))
        if MODE == "logsumexp":  # of a row with +inf it is +inf, unless there is a NaN
            tau = tl.where(bad, tl.where(worst, float("nan"), float("inf")), tau)
        else:
            tau = tl.where(bad, float("nan"), tau)
        tl.store(VALUE + row, tau.to(tl.float32), mask=valid)
