"""Threshold maps: sparsemax, entmax, budget, normmax. The threshold of a row is searched for, and the row is written from it.

A row is written from four numbers (see `links` and `thresholds`): (top, z or q, lost, 1 / sum of the rates for normmax); (edge, z, lost, 0)
for a budget; above alpha = 2 (near, rest, lost, 1 / sum of the rates) for normmax, and (anchor, q, lost, 0) for entmax.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .links import expm1, log1p, share_of
from .policy import aimed, class_of, finish, finish_empty, finish_gathered, lose, recall, remember, wanted
from .search import kth
from .survey import (
    gather,
    part_lanes,
    read_lanes,
    settle_reads,
    survey,
    surveyed,
)
from .thresholds import descent, fitted, positive_power, slope_and_power, solve
from .tile import (
    AT_HAND,
    OUTSIDE,
    any_of,
    as_scalar,
    as_tile,
    fetch,
    fill,
    in_packs,
    operand,
    output,
    parameter,
    per_lane,
    rows_of,
    scatter,
    total,
    wide,
)

# -- from the numbers of a row to its probabilities -----------------------------------------------------------------------------------


class Solved(NamedTuple):
    """A row that is solved."""

    a: Any  # s0, or 0 where it has been subtracted from the scores
    s0: Any
    s1: Any
    s2: Any
    s3: Any
    c: Any  # `slope_and_power`
    r: Any
    high: Any  # whether a row's alpha may be above 2


@triton.jit
def emit(x, row, FORM: tl.constexpr):
    """p of a tile."""
    if FORM.LINK == "steep":
        p, rate = share_of(x, row.a, positive_power(row.s1, row.c), row.s1, row.c, FORM, FORM.EXACT)
    else:
        p, rate = share_of(x, row.a, row.s1, fitted(row.s0, row.s1, row.c, row.r, FORM), row.r, FORM, FORM.EXACT)
    if FORM.NORM:
        return rate * row.s3
    elif FORM.EXACT:
        return tl.maximum(p - row.s2 * rate, 0.0)
    else:
        return p


@triton.jit
def shares(x, row, FORM: tl.constexpr):
    """p of a tile; with an alpha for each row, by the link for its side of alpha = 2."""
    if FORM.ABOVE is not None:
        ABOVE: tl.constexpr = FORM.ABOVE
        if row.high:
            p = emit(x, row, ABOVE)
        else:
            p = emit(x, row, FORM)
        return p
    else:
        return emit(x, row, FORM)


@triton.jit
def stored(p, to, MODE: tl.constexpr, FORM: tl.constexpr):
    """p as it is written. A class of a budget below its bound stays below: at 1, to which a half would round it, it has no gradient."""
    if FORM.LINK == "budget" and MODE != "grad" and to.X.dtype.element_ty.primitive_bitwidth == 16:
        BELOW_1: tl.constexpr = 0.99609375 if to.X.dtype.element_ty == tl.bfloat16 else 0.99951171875
        p = tl.where(p < 0.99999905, tl.minimum(p, BELOW_1), p)
    return p


@triton.jit
def emit_gathered(tile, row, FORM: tl.constexpr):
    """p of a gathered tile."""
    a, c, r = as_scalar(row.s0), as_scalar(row.c), as_scalar(row.r)
    return emit(tile, Solved(a, a, as_scalar(row.s1), as_scalar(row.s2), as_scalar(row.s3), c, r, row.high), FORM)


@triton.jit
def height(top, row, FORM: tl.constexpr):
    """The maximum minus tau."""
    s0, s1, s2, c, r = row.s0, row.s1, row.s2, row.c, row.r
    if FORM.LINK == "edge":
        return (top - s0) + (s1 - s2 / r)
    elif FORM.LINK == "budget":
        return (top - s0) + (s1 - s2)
    elif FORM.LINK == "steep":
        return (top - s0) + positive_power(s1, c) / c
    else:
        if FORM.LINK == "any":
            z = tl.exp2(tl.log2(s1 * (1.0 - s2)) / r)
        else:
            z = s1 - s2 / r
        return z if FORM.NORM else z / c


@triton.jit
def potential(top, row, dot, FORM: tl.constexpr):
    """Omega* minus the maximum, from dot = sum p (x - top): `(1 - 1/alpha) dot + zeta / alpha`, where p_top = (1 - c zeta)^(1/c).
    No large numbers cancel."""
    s0, s1, s2, c = row.s0, row.s1, row.s2, row.c
    if FORM.NORM:  # tau is the potential
        return 1.0 - height(top, row, FORM)
    else:
        if FORM.LINK == "any":
            near = log1p(tl.maximum((s1 - 1.0) - s1 * s2, -0.75))
            zeta = -expm1(c * tl.where(s1 > 0.5, near, tl.log(s1 * (1.0 - s2)))) / c
        elif FORM.LINK == "steep":
            zeta = (1.0 - (positive_power(s1, c) + c * (top - s0))) / c
        else:
            zeta = ((1.0 - s1) + s2 / row.r) / c
        return (c * dot + zeta) / (1.0 + c)


# -- the kernel --------------------------------------------------------------------------------------------------------------------------


@triton.jit
def separable_rows(X, M, OUT, PARAMS, INDEX, SCALE, VALUE, STATE, LIST, COUNT, TOPS, PTR, IDS,
                   rows, n, span, list_span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, o0, o1, o2, oc, ignore, param, slots,
                   MODE: tl.constexpr, SAVE: tl.constexpr, EACH: tl.constexpr, FORM: tl.constexpr, FEW: tl.constexpr,
                   TILE: tl.constexpr):  # fmt: skip
    """MODE "p" writes probabilities and "loss" the losses to VALUE; with SAVE both store the row's four numbers. "tau" writes the
    threshold. "grad" writes scale (p - y) from the numbers, and "write" writes, from the numbers, the rows in parts that "p" did not.

    FEW: a longer row with at most so many live lanes is solved from these lanes. In the list, a part of `list_span` classes has LANES
    lanes. "grad" reads x only in these lanes. PARTS > 0: `survey_parts` has read the row, and "p" writes it only if its live lanes are few.

    `param` is alpha - 1, or the budget; PER_ROW: one for each row, in PARAMS, below or above alpha = 2.
    """
    PARTS: tl.constexpr = FEW.PARTS
    L: tl.constexpr = TILE.L
    mine = rows_of(PTR, IDS, slots, n, d1, d2, TILE)
    row, valid = mine.row, mine.valid
    at = operand(mine, X, x0, x1, x2, xc, M, m0, m1, m2, mc, TILE)
    par = parameter(PARAMS, param, mine, FORM.PER_ROW)
    sound = par == par
    if FORM.PER_ROW and not FORM.NORM and FORM.LINK != "budget":
        sound = par > -1.0
        par = tl.where(sound, par, 1.0)
    high = any_of(par > 1.0)  # PER_ROW has one row a program
    small: tl.constexpr = False  # whether all live lanes are in one tile
    CENTRED: tl.constexpr = TILE.WHOLE and not FORM.PER_ROW and (FORM.LINK == "power" or FORM.LINK == "any")
    if MODE == "grad" or MODE == "write":
        x = fetch(at, 0, True, TILE, False) if TILE.WHOLE else per_lane(0.0, TILE)
        s0, s1, s2, s3, bad = recall(STATE, row, valid)
        top, tops, a = s0, x, s0
        if MODE == "write":
            tops = part_lanes(TOPS, row, PARTS, L)
    else:
        if PARTS > 0:
            cells, tops, top, bad = surveyed(TOPS, row, PARTS, L)
            x = tops
        else:
            FILL: tl.constexpr = 0.0 if FEW.FEW > 0 and MODE == "p" and not FEW.LATE else None
            to = output(mine, OUT, o0, o1, o2, oc, TILE)
            x, tops, top, bad, _, _, _ = survey(at, to, FILL, False, TILE)
            cells = tops
        bad = bad | (sound == 0)
        empty = top == float("-inf")
        live = (bad == 0) & (empty == 0)
        top = tl.where(empty, 0.0, top)
        a = top
        if CENTRED:
            x -= top
            tops -= top
            a = 0.0
        if FEW.FEW > 0:
            held = matters(cells, as_tile(top), as_tile(live.to(tl.int32)) > 0, as_tile(par), at, FORM)
            tile, cols, small = gather(at, held, LIST, COUNT, bad, list_span, FEW, TILE)
        if FORM.ABOVE is not None:
            ABOVE: tl.constexpr = FORM.ABOVE
            if high:
                s0, s1, s2, s3 = solve(x, tops, a, top, live, par, at, ABOVE, TILE)
            else:
                s0, s1, s2, s3 = solve(x, tops, a, top, live, par, at, FORM, TILE)
        elif small:
            best = tl.max(tile, 1, keep_dims=True)
            peak, sane, asked = as_tile(top), as_tile(live.to(tl.int32)) > 0, as_tile(par)
            s0, s1, s2, s3 = solve(tile, best, peak, peak, sane, asked, at, FORM, AT_HAND)
            s0, s1, s2, s3 = as_tile(s0), as_tile(s1), as_tile(s2), as_tile(s3)
        else:
            s0, s1, s2, s3 = solve(x, tops, a, top, live, par, at, FORM, TILE)
        if not CENTRED:
            a = s0
    c, r = slope_and_power(par, FORM)
    solved = Solved(a, s0, s1, s2, s3, c, r, high)
    if MODE == "p" or MODE == "grad" or MODE == "write":
        to = output(mine, OUT, o0, o1, o2, oc, TILE)
        goal = wanted(INDEX, SCALE, row, ignore, tl.program_id(1) * span, span, at, bad, MODE, EACH)
        if TILE.WHOLE:
            settle_reads(MODE, FEW)
            finish(to, 0, stored(shares(x, solved, FORM), to, MODE, FORM), goal, at, MODE, TILE)
        else:
            if FEW.FEW > 0 and MODE != "p":
                few = tl.load(COUNT + tl.program_id(0))
                small = few <= FEW.FEW
            if small:
                if MODE == "p":  # the other classes are zeros already, or are set to zero now
                    if FEW.LATE:
                        tl.debug_barrier()
                        for begin in range(0, at.n, TILE.K * TILE.L):
                            fill(to, begin, 0.0, at, TILE)
                    p = stored(emit_gathered(tile, solved, FORM), to, MODE, FORM)
                    scatter(to, cols, p, p > 0.0, at, TILE)
                elif MODE == "grad":
                    lanes = LIST + tl.program_id(0).to(tl.int64) * FEW.FEW
                    tile, cols, ok = read_lanes(at, lanes, few, list_span, FEW, TILE)
                    settle_reads(MODE, FEW)
                    finish_empty(to, goal, at, TILE)
                    finish_gathered(to, cols, emit_gathered(tile, solved, FORM), ok, goal, at, TILE)
            elif MODE != "p" or PARTS == 0:
                in_steps(to, tops, solved, goal, at, MODE, FORM, FEW, TILE)
    if MODE == "loss":
        t = class_of(INDEX, row, ignore, at)
        aim = aimed(at, t, TILE)
        dot = top * 0.0
        if not FORM.NORM:
            origin = 0.0 if CENTRED else top
            if TILE.WHOLE:
                p = shares(x, solved, FORM)
                dot = wide(tl.where(p > 0.0, p * (x - origin), 0.0)).to(tl.float32)
            elif small:
                p = emit_gathered(tile, solved, FORM)
                dot = wide(tl.where(p > 0.0, p * (tile - as_scalar(top)), 0.0)).to(tl.float32)
            else:
                dot = dot_in_steps(tops, top, solved, at, FORM, TILE)
        if FORM.ABOVE is not None:
            OF_HIGH: tl.constexpr = FORM.ABOVE  # a constant is set once
            if high:
                above = potential(top, solved, dot, OF_HIGH)
            else:
                above = potential(top, solved, dot, FORM)
        else:
            above = potential(top, solved, dot, FORM)
        lose(VALUE, row, rows, tl.maximum((top - aim) + above, 0.0), aim, t, bad, at)
    if SAVE and (MODE == "loss" or MODE == "p"):
        remember(STATE, row, valid, bad, s0, s1, s2, s3)
    if MODE == "tau":
        tau = top - height(top, solved, FORM)
        tau = tl.where(bad, float("nan"), tl.where(empty, float("-inf"), tau))
        tl.store(VALUE + row, tau, mask=valid)


@triton.jit
def in_steps(to, tops, row, goal, at, MODE: tl.constexpr, FORM: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr):
    """Writes a longer row, or a part of it, without reading the lanes that have no probability."""
    live = per_lane(1, TILE, tl.int1)
    if MODE != "grad":
        live = in_packs(shares(tops, row, FORM) > 0.0, at, TILE)
    for begin in range(goal.first, goal.end, TILE.K * TILE.L):
        p = shares(fetch(at, begin, live, TILE, False, OUTSIDE, False), row, FORM)
        settle_reads(MODE, FEW)
        finish(to, begin, stored(p, to, MODE, FORM), goal, at, MODE, TILE)


@triton.jit
def dot_in_steps(tops, top, row, at, FORM: tl.constexpr, TILE: tl.constexpr):
    """sum p (x - top) over a longer row."""
    live = in_packs(shares(tops, row, FORM) > 0.0, at, TILE)
    acc = per_lane(0.0, TILE, tl.float64)
    for begin in range(0, at.n, TILE.K * TILE.L):
        v = fetch(at, begin, live, TILE, False)
        p = shares(v, row, FORM)
        acc += tl.sum(tl.where(p > 0.0, p * (v - top), 0.0), 1, keep_dims=True).to(tl.float64)
    return total(acc).to(tl.float32)


@triton.jit
def matters(tops, top, live, param, at, FORM: tl.constexpr):
    """The lanes that may contain some of the support, by a bound of the threshold from the lane maxima."""
    if FORM.LINK == "budget":  # tau is at most 1 below the ceil(k)-th largest score
        edge, _ = kth(tops, tops, top, live, tl.ceil(param), at, AT_HAND)
        held = tops >= edge - 1.0
    elif FORM.LINK == "steep":
        held = tops >= top - 1.0 / param
    else:
        c, r = slope_and_power(param, FORM)
        if FORM.LINK == "edge":
            held = tops >= top - 1.0
        else:
            b = descent(tops, top, top, c, r, FORM)
            b += 1e-6 * b  # more than the rounding error
            value, _ = share_of(tops, top, b, fitted(top, b, c, r, FORM), r, FORM, False)
            held = value > 0.0
    return held & (tops > float("-inf"))
