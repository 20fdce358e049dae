"""Shared by the row kernels: a row's target, its four saved numbers, and the rules for special rows in the output."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .tile import as_scalar, lanes, lead_of, put, scatter


@triton.jit
def recall(STATE, row, valid):
    """The four saved numbers of a row, and whether the row is poisoned (it had NaN or +inf)."""
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
def class_of(INDEX, row, ignore, at):
    """The column of each row's class: -1 for a sample that is left out, the column after the last for an index that is no class. It is
    checked as it is given and then has 32 bits, so that comparing all columns with it does not take 64."""
    n, valid, lead = at[6], at[7], lead_of(at)
    t = tl.load(INDEX + row, mask=valid, other=0).to(tl.int64)
    column = tl.where((t < 0) | (t >= n - lead), n, t + lead)
    return tl.where((t == ignore) | (valid == 0), -1, column).to(tl.int32)


@triton.jit
def wanted(INDEX, SCALE, row, ignore, at, bad, MODE: tl.constexpr, EACH: tl.constexpr):
    """(target class, factor) of a row to write: -1 and 1 unless MODE is "grad". The factor is NaN for a poisoned row and for an index
    that is no class, and 0 for a sample that is left out. EACH: a factor for each row."""
    t = tl.full(row.shape, -1, tl.int32)
    scale = tl.where(bad, float("nan"), 1.0)
    if MODE == "grad":
        t = class_of(INDEX, row, ignore, at)
        if EACH:
            scale *= tl.load(SCALE + row, mask=at[7], other=0.0)
        else:
            scale *= tl.load(SCALE)
        scale = tl.where(t < 0, 0.0, tl.where(t < at[6], scale, float("nan")))
    return t, scale


@triton.jit
def aimed(at, t, MASKED: tl.constexpr):
    """The score of class t of each row, -inf if it is masked."""
    X, xo, xc, M, mo, mc, n, valid = at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]
    inside = (t >= 0) & (t < n) & valid
    far = t.to(tl.int64)
    aim = tl.load(X + xo + far * xc, mask=inside, other=0.0).to(tl.float32)
    if MASKED:
        aim = tl.where(tl.load(M + mo + far * mc, mask=inside, other=1) != 0, aim, float("-inf"))
    return aim


@triton.jit
def lose(VALUE, row, rows, value, aim, t, bad, at):
    """Stores the loss of a row, and after the losses of all rows whether it counts. The loss is +inf for a class with score -inf, NaN for a
    poisoned row or an index that is no class, and 0 for a row that is left out."""
    value = tl.where(aim == float("-inf"), float("inf"), value)
    value = tl.where(bad | (t >= at[6]), float("nan"), value)
    tl.store(VALUE + row, tl.where(t < 0, 0.0, value), mask=at[7])
    tl.store(VALUE + rows + row, tl.where(t < 0, 0.0, 1.0), mask=at[7])


@triton.jit
def finish(OUT, oo, oc, begin, p, t, scale, at, MODE: tl.constexpr, INT64: tl.constexpr, K: tl.constexpr,
           L: tl.constexpr):  # fmt: skip
    """Writes `scale p`, or the gradient `scale (p - y)`; the scale of a poisoned row is NaN, which makes the whole row NaN."""
    if MODE == "grad":
        p = tl.where(lanes(begin, K, L) == t, p - 1.0, p)
    put(OUT, oo, oc, begin, scale * p, at, INT64, K, L)


@triton.jit
def finish_empty(
    OUT, oo, oc, first, span, t, scale, at, INT64: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr
):
    """Writes the gradient of a longer row, or of a part of it, as it is where p is 0."""
    nothing = tl.zeros([R, K, L], tl.float32)
    for begin in range(first, tl.minimum(first + span, at[6]), K * L):
        finish(OUT, oo, oc, begin, nothing, t, scale, at, "grad", INT64, K, L)


@triton.jit
def finish_gathered(OUT, oo, oc, first, span, cols, p, ok, t, scale, at, INT64: tl.constexpr):
    """Writes the gradient of a gathered tile, after `finish_empty`."""
    p = tl.where(cols == as_scalar(t), p - 1.0, p)
    scatter(OUT, oo, oc, cols, as_scalar(scale) * p, ok & (cols >= first) & (cols < first + span), at, INT64)
