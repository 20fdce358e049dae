"""Output layers: softmax of a block of scores, some rows and classes, from one reading of it; and its gradient in the scores from another,
written over them. A program takes a row, whatever the other rows are.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .attention_tile import tanh
from .dense import base_of
from .links import log1p
from .tile import higher, highest, poisoned

LOWEST = tl.constexpr(-1e4)  # in place of log 0, so that 0 log 0 is 0
NOWHERE = tl.constexpr(2**31 - 1)


class Read(NamedTuple):
    """How a row is read, K x L numbers at a time, and what makes scores of the numbers: a bias in fp32 is added, half precision rounds the
    sum, a factor of the row multiplies it, and so on in this order."""

    K: int
    L: int
    BIAS: bool = False
    ROUND: bool = False
    FACTOR: bool = False
    MASK: bool = False
    CAP: bool = False


@triton.jit
def rounded(x, S, READ: tl.constexpr):
    return x.to(S.dtype.element_ty).to(tl.float32) if READ.ROUND else x


@triton.jit
def scores_at(cols, inside, S, BIAS, KEEP, k1, factor, cap, READ: tl.constexpr):
    """The scores of these classes of a row in fp32, -inf outside."""
    x = tl.load(S + cols, mask=inside, other=float("-inf")).to(tl.float32)
    if READ.BIAS:  # one of -inf masks a class, whatever its number is
        bias = tl.load(BIAS + cols, mask=inside, other=0.0)
        x = tl.where(bias > float("-inf"), rounded(x + bias, S, READ), float("-inf"))
    if READ.FACTOR:
        x = rounded(x * factor, S, READ)
    if READ.MASK:
        x = tl.where(tl.load(KEEP + cols.to(tl.int64) * k1, mask=inside, other=0) != 0, x, float("-inf"))
    if READ.CAP:  # a row with +inf stays one that is lost
        x = tl.where(tl.abs(x) < float("inf"), cap * tanh(x / cap), x)
    return x


@triton.jit
def columns(begin, READ: tl.constexpr):
    K: tl.constexpr = READ.K
    L: tl.constexpr = READ.L
    return begin + tl.arange(0, K)[:, None] * L + tl.arange(0, L)[None, :]


@triton.jit
def each_lane(number, READ: tl.constexpr):
    L: tl.constexpr = READ.L
    return tl.full([1, L], number, tl.float32)


@triton.jit
def layer_terms(S, BIAS, KEEP, FACTOR, INDEX, WEIGHTS, TERMS, BEST, n, s0, k0, k1, first, cap,
                ENTROPY: tl.constexpr, WEIGHTED: tl.constexpr, BESTS: tl.constexpr, READ: tl.constexpr):  # fmt: skip
    """Writes TERMS [rows, 4]: the score of the row's class INDEX, -inf if it is not among the classes first .. first + n; logsumexp of all
    others here and the entropy of their softmax, ENTROPY; and <scores, WEIGHTS>, WEIGHTED. BEST is the largest class, -1 for none."""
    row = tl.program_id(0).to(tl.int64)
    S += row * s0
    KEEP += row * k0
    factor = tl.load(FACTOR + row) if READ.FACTOR else 1.0
    t = (tl.load(INDEX + row) - first).to(tl.int32)
    tops, acc, ent, dot = (each_lane(float("-inf"), READ), each_lane(0.0, READ), each_lane(0.0, READ), each_lane(0.0, READ))  # fmt: skip
    highs, places = tops, acc.to(tl.int32)
    for begin in range(0, n, READ.K * READ.L):
        cols = columns(begin, READ)
        x = scores_at(cols, cols < n, S, BIAS, KEEP, k1, factor, cap, READ)
        if WEIGHTED:
            w = tl.load(WEIGHTS + cols, mask=cols < n, other=0.0)
            dot += tl.sum(tl.where(w == 0.0, 0.0, x) * w, 0, keep_dims=True)
        if BESTS:
            seen = tl.where(x == x, x, float("inf"))
            high = tl.max(seen, 0, keep_dims=True)
            place = tl.min(tl.where(seen == high, cols, NOWHERE), 0, keep_dims=True)
            places = tl.where(high > highs, place, places)
            highs = tl.maximum(high, highs)
        x = tl.where(cols == t, float("-inf"), x)
        now = higher(tops, highest(x, 0))
        base = base_of(now, "softmax")
        fall = tl.where(tops > float("-inf"), tops - base, 0.0)
        fade, below = tl.exp(fall), x - base
        e = tl.exp(below)
        if ENTROPY:
            ent = (ent + acc * fall) * fade + tl.sum(tl.where(e > 0.0, e * below, 0.0), 0, keep_dims=True)
        acc = acc * fade + tl.sum(e, 0, keep_dims=True)
        tops = now
    top = tl.max(highest(tops, 1), 1)
    bad = poisoned(top)
    base = base_of(top, "softmax")
    fall = tl.where(tops > float("-inf"), tops - base, 0.0)
    share = tl.where(tops > float("-inf"), tl.exp(fall), 0.0)
    z = tl.sum((acc * share).to(tl.float64), 1)
    z = tl.where(z > 0.0, z, 1.0)
    log_z = log1p((z - 1.0).to(tl.float32))
    level = tl.where(top == float("-inf"), top, base + log_z)
    lane = tl.arange(0, 1)
    to = TERMS + row * 4 + lane
    aim = scores_at(t + lane, (t + lane >= 0) & (t + lane < n), S, BIAS, KEEP, k1, factor, cap, READ)
    tl.store(to, aim)
    tl.store(to + 1, tl.where(bad, float("nan"), level))
    if ENTROPY:
        h = log_z - (tl.sum(((ent + acc * fall) * share).to(tl.float64), 1) / z).to(tl.float32)
        tl.store(to + 2, tl.where(bad, float("nan"), h))
    if WEIGHTED:
        tl.store(to + 3, tl.sum(dot.to(tl.float64), 1).to(tl.float32))
    if BESTS:
        high = tl.max(highs, 1, keep_dims=True)
        place = tl.min(tl.where(highs == high, places, NOWHERE), 1)
        tl.store(BEST + row + lane, tl.where(tl.max(high, 1) > float("-inf"), place, -1).to(tl.int64))


@triton.jit
def layer_slopes(S, OUT, BIAS, KEEP, FACTOR, INDEX, WEIGHTS, OF_ROW, n, s0, o0, k0, k1, first, cap,
                 MIXED: tl.constexpr, WEIGHTED: tl.constexpr, NARROWED: tl.constexpr, READ: tl.constexpr):  # fmt: skip
    """Writes OUT: the gradient in the numbers S. That in the scores is e for the class INDEX of the row, q (a - b log q) for the others, of
    which q is the softmax, MIXED, and c times WEIGHTS more, WEIGHTED. OF_ROW [rows, 5] has logsumexp of the others, +inf for none, then a,
    e, b, c. NARROWED: OUT is the memory of S, where a row begins at the same place but has shorter numbers."""
    row = tl.program_id(0).to(tl.int64)
    S += row * s0
    OUT += row * o0
    KEEP += row * k0
    OF_ROW += row * 5
    factor = tl.load(FACTOR + row) if READ.FACTOR else 1.0
    t = (tl.load(INDEX + row) - first).to(tl.int32)
    level, a, e = tl.load(OF_ROW), tl.load(OF_ROW + 1), tl.load(OF_ROW + 2)
    b = tl.load(OF_ROW + 3) if MIXED else 0.0
    c = tl.load(OF_ROW + 4) if WEIGHTED else 0.0
    for begin in range(0, n, READ.K * READ.L):
        cols = columns(begin, READ)
        x = scores_at(cols, cols < n, S, BIAS, KEEP, k1, factor, cap, READ)
        log_q = x - level
        if MIXED:
            d = tl.exp(log_q) * (a - b * tl.maximum(log_q, LOWEST, propagate_nan=tl.PropagateNan.ALL))
        else:
            d = tl.exp(log_q) * a
        d = tl.where(cols == t, e, d)
        if WEIGHTED:
            d += c * tl.load(WEIGHTS + cols, mask=cols < n, other=0.0)
        if READ.CAP:
            u = tl.where(tl.abs(x) < float("inf"), x / cap, 0.0)
            d *= 1.0 - u * u
        if READ.FACTOR:
            d *= factor
        if NARROWED:  # what the other threads read is within what this one writes
            tl.debug_barrier()
        tl.store(OUT + cols, d.to(OUT.dtype.element_ty), mask=cols < n)
