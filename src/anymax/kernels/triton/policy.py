"""What the row kernels share at their ends: a row's target and its numbers, and the house's policy for what they write."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# what is traced by Triton is no Python to a type checker

from __future__ import annotations

import triton
import triton.language as tl

from .tile import lanes, put


@triton.jit
def recall(STATE, row, valid):
    """The four numbers of a row, and whether it is poisoned: its scores are then infinitely far below the maximum."""
    mine = STATE + row.to(tl.int64) * 4
    s0 = tl.load(mine, mask=valid, other=0.0)
    s1 = tl.load(mine + 1, mask=valid, other=0.5)
    s2 = tl.load(mine + 2, mask=valid, other=0.0)
    s3 = tl.load(mine + 3, mask=valid, other=1.0)
    return s0, s1, s2, s3, s0 != s0


@triton.jit
def remember(STATE, row, valid, bad, s0, s1, s2, s3):
    mine = STATE + row.to(tl.int64) * 4
    tl.store(mine, tl.where(bad, float("nan"), s0), mask=valid)
    tl.store(mine + 1, s1, mask=valid)
    tl.store(mine + 2, s2, mask=valid)
    tl.store(mine + 3, s3, mask=valid)


@triton.jit
def wanted(INDEX, SCALE, row, valid, bad, MODE: tl.constexpr):
    """(target class, factor) of a row that is written: -1 and 1 where it is no gradient; 0 for a sample that does not count."""
    t = tl.full(row.shape, -1, tl.int64)
    scale = tl.full(row.shape, 1.0, tl.float32)
    if MODE == "grad":
        t = tl.load(INDEX + row, mask=valid, other=-1)
        scale = tl.load(SCALE + row, mask=valid, other=0.0)
        scale = tl.where(t < 0, 0.0, tl.where(bad, float("nan"), scale))
    return t, scale


@triton.jit
def aimed(at, t, MASKED: tl.constexpr):
    """The score of the class t of each row, -inf where it is masked."""
    X, xo, xc, M, mo, mc, n, valid = at
    inside = (t >= 0) & (t < n) & valid
    aim = tl.load(X + xo + t * xc, mask=inside, other=0.0).to(tl.float32)
    if MASKED:
        aim = tl.where(tl.load(M + mo + t * mc, mask=inside, other=1) != 0, aim, float("-inf"))
    return aim


@triton.jit
def lose(VALUE, row, value, aim, t, bad, at):
    """The loss of a row: +inf for a class that has no score, NaN for a poisoned row or a class that is none, 0 for a row left out."""
    value = tl.where(aim == float("-inf"), float("inf"), value)
    value = tl.where(bad | (t >= at[6]), float("nan"), value)
    tl.store(VALUE + row, tl.where(t < 0, 0.0, value), mask=at[7])


@triton.jit
def finish(OUT, oo, oc, begin, p, t, scale, bad, n, valid, MODE: tl.constexpr, FAR: tl.constexpr, K: tl.constexpr,
           L: tl.constexpr):  # fmt: skip
    """A poisoned row is NaN; a gradient is `scale (p - y)`, where p of a poisoned row is 0 and its scale NaN."""
    if MODE == "grad":
        p = scale * tl.where(lanes(begin, K, L) == t, p - 1.0, p)
    else:
        p = tl.where(bad, float("nan"), p)
    put(OUT, oo, oc, begin, p, n, valid, FAR, K, L)
