"""Shared by the row kernels: a row's target, its four saved numbers, and the rules for special rows in the output."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tile import as_scalar, lanes, per_class, put, scatter


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
    t = tl.load(INDEX + row, mask=at.valid, other=0).to(tl.int64)
    column = tl.where((t < 0) | (t >= at.n - at.lead), at.n, t + at.lead)
    return tl.where((t == ignore) | (at.valid == 0), -1, column).to(tl.int32)


class Goal(NamedTuple):
    """What a row becomes in the output."""

    t: Any  # the column of its class, -1 unless MODE is "grad"
    scale: Any  # NaN for a poisoned row and for an index that is no class, 0 for a sample that is left out
    first: Any  # the columns that the program writes
    end: Any


@triton.jit
def wanted(INDEX, SCALE, row, ignore, first, span, at, bad, MODE: tl.constexpr, EACH: tl.constexpr):
    """The goal of a row. EACH: a factor for each row."""
    t = tl.full(row.shape, -1, tl.int32)
    scale = tl.where(bad, float("nan"), 1.0)
    if MODE == "grad":
        t = class_of(INDEX, row, ignore, at)
        if EACH:
            scale *= tl.load(SCALE + row, mask=at.valid, other=0.0)
        else:
            scale *= tl.load(SCALE)
        scale = tl.where(t < 0, 0.0, tl.where(t < at.n, scale, float("nan")))
    return Goal(t, scale, first, tl.minimum(first + span, at.n))


@triton.jit
def aimed(at, t, TILE: tl.constexpr):
    """The score of class t of each row, -inf if it is masked."""
    inside = (t >= 0) & (t < at.n) & at.valid
    far = t.to(tl.int64)
    aim = tl.load(at.X + at.xo + far * at.xc, mask=inside, other=0.0).to(tl.float32)
    if TILE.MASKED:
        aim = tl.where(tl.load(at.M + at.mo + far * at.mc, mask=inside, other=1) != 0, aim, float("-inf"))
    return aim


@triton.jit
def lose(VALUE, row, rows, value, aim, t, bad, at):
    """Stores the loss of a row, and after the losses of all rows whether it counts. The loss is +inf for a class with score -inf, NaN for a
    poisoned row or an index that is no class, and 0 for a row that is left out."""
    value = tl.where(aim == float("-inf"), float("inf"), value)
    value = tl.where(bad | (t >= at.n), float("nan"), value)
    tl.store(VALUE + row, tl.where(t < 0, 0.0, value), mask=at.valid)
    tl.store(VALUE + rows + row, tl.where(t < 0, 0.0, 1.0), mask=at.valid)


@triton.jit
def finish(to, begin, p, goal, at, MODE: tl.constexpr, TILE: tl.constexpr):
    """Writes `scale p`, or the gradient `scale (p - y)`; the scale of a poisoned row is NaN, which makes the whole row NaN."""
    if MODE == "grad":
        p = tl.where(lanes(begin, TILE.K, TILE.L) == goal.t, p - 1.0, p)
    put(to, begin, goal.scale * p, at, TILE)


@triton.jit
def finish_empty(to, goal, at, TILE: tl.constexpr):
    """Writes the gradient of a longer row, or of a part of it, as it is where p is 0."""
    nothing = per_class(0.0, TILE)
    for begin in range(goal.first, goal.end, TILE.K * TILE.L):
        finish(to, begin, nothing, goal, at, "grad", TILE)


@triton.jit
def finish_gathered(to, cols, p, ok, goal, at, TILE: tl.constexpr):
    """Writes the gradient of a gathered tile, after `finish_empty`."""
    p = tl.where(cols == as_scalar(goal.t), p - 1.0, p)
    scatter(to, cols, as_scalar(goal.scale) * p, ok & (cols >= goal.first) & (cols < goal.end), at, TILE)
