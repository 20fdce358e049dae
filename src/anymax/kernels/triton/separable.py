"""Threshold maps: sparsemax, entmax, budget, normmax. The threshold of a row is searched for, and the row is written from it.

A row is written from four numbers (see `links` and `thresholds`): (top, z or q, lost, 1 / sum of the rates for normmax); (edge, z, lost, 0)
for a budget; above alpha = 2 (near, rest, lost, 1 / sum of the rates) for normmax, and (anchor, q, lost, 0) for entmax.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import expm1, log1p, share_of, steep
from .policy import aimed, class_of, finish, finish_empty, finish_gathered, lose, recall, remember, wanted
from .search import kth
from .thresholds import descent, fitted, positive_power, slope_and_power, solve
from .tile import (
    OUTSIDE,
    aligned,
    any_of,
    as_scalar,
    as_tile,
    fetch,
    fill,
    first_of,
    gather,
    operand,
    read_lanes,
    rows_of,
    scatter,
    survey,
    surveyed,
    total,
    wide,
)

# -- from the numbers of a row to its probabilities -----------------------------------------------------------------------------------


@triton.jit
def emit(x, a, s0, s1, s2, s3, c, r, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
         EXACT: tl.constexpr):  # fmt: skip
    """p of a tile from the four numbers of its rows; `a` is s0, or 0 where it has been subtracted from the scores."""
    if LINK == "steep":
        p, rate = steep(x, a, positive_power(s1, c), s1, c, 1.0 / c)
    else:
        p, rate = share_of(x, a, s1, fitted(s0, s1, c, r, LINK), r, LINK, P, SLOPE, EXACT)
    if NORM:
        return rate * s3
    elif EXACT:
        return tl.maximum(p - s2 * rate, 0.0)
    else:
        return p


@triton.jit
def emit_gathered(tile, s0, s1, s2, s3, c, r, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
                  EXACT: tl.constexpr):  # fmt: skip
    """p of a gathered tile."""
    a, b = as_scalar(s0), as_scalar(s1)
    return emit(tile, a, a, b, as_scalar(s2), as_scalar(s3), as_scalar(c), as_scalar(r), LINK, P, SLOPE, NORM, EXACT)


@triton.jit
def height(top, s0, s1, s2, c, r, LINK: tl.constexpr, NORM: tl.constexpr):
    """The maximum minus tau."""
    if LINK == "edge":
        return (top - s0) + (s1 - s2 / r)
    elif LINK == "budget":
        return (top - s0) + (s1 - s2)
    elif LINK == "steep":
        return (top - s0) + positive_power(s1, c) / c
    elif LINK == "any":
        z = tl.exp2(tl.log2(s1 * (1.0 - s2)) / r)
        return z if NORM else z / c
    else:
        z = s1 - s2 / r
        return z if NORM else z / c


@triton.jit
def potential(top, s0, s1, s2, c, r, dot, LINK: tl.constexpr, NORM: tl.constexpr):
    """Omega* minus the maximum, from dot = sum p (x - top): `(1 - 1/alpha) dot + zeta / alpha`, where p_top = (1 - c zeta)^(1/c).
    No large numbers cancel."""
    if NORM:  # tau is the potential
        return 1.0 - height(top, s0, s1, s2, c, r, LINK, NORM)
    else:
        if LINK == "any":
            near = log1p(tl.maximum((s1 - 1.0) - s1 * s2, -0.75))
            zeta = -expm1(c * tl.where(s1 > 0.5, near, tl.log(s1 * (1.0 - s2)))) / c
        elif LINK == "steep":
            zeta = (1.0 - (positive_power(s1, c) + c * (top - s0))) / c
        else:
            zeta = ((1.0 - s1) + s2 / r) / c
        return (c * dot + zeta) / (1.0 + c)


# -- the kernel --------------------------------------------------------------------------------------------------------------------------


@triton.jit
def separable_rows(X, M, OUT, PARAMS, INDEX, SCALE, VALUE, STATE, LIST, COUNT, TOPS, PTR, IDS,
                   rows, n, span, list_span, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, o0, o1, o2, oc, ignore, param, slots,
                   MODE: tl.constexpr, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
                   PER_ROW: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr, SAVE: tl.constexpr, EACH: tl.constexpr,
                   INT64: tl.constexpr, FEW: tl.constexpr, DEPTH: tl.constexpr, LATE: tl.constexpr, KEEP: tl.constexpr,
                   LANES: tl.constexpr, PARTS: tl.constexpr, RAGGED: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr,
                   R: tl.constexpr, K: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """MODE "p" writes probabilities and "loss" the losses to VALUE; with SAVE both store the row's four numbers. "tau" writes the
    threshold. "grad" writes scale (p - y) from the numbers, and "write" writes, from the numbers, the rows in parts that "p" did not.

    EXACT: to fp32's last digits. FEW: a longer row with at most so many live lanes, of DEPTH classes each, is solved from these lanes; 0:
    always in steps. In the list, a part of `list_span` classes has LANES lanes. LATE: OUT is X, so zeros are written after the row is read,
    not meanwhile. KEEP: the list of lanes and their COUNT are for the backward; "grad" with FEW reads x only in these lanes. PARTS > 0:
    `survey_parts` has read the row, and "p" writes it only if its live lanes are few.

    `param` is alpha - 1, or the budget; PER_ROW: one for each row, in PARAMS, below or above alpha = 2. RAGGED: see `tile`, UNIT: see
    `place`.
    """
    row, valid, n, start = rows_of(PTR, IDS, slots, n, d2, RAGGED, UNIT, R, WHOLE)
    xo = first_of(row, start, d1, d2, x0, x1, x2, xc, RAGGED, UNIT)
    mo = first_of(row, start, d1, d2, m0, m1, m2, mc, RAGGED, UNIT)
    at = operand(X, xo, xc, M, mo, mc, n, valid, SHIFT, WHOLE)
    if PER_ROW:
        par = tl.load(PARAMS + row, mask=valid, other=1.0)
    else:
        par = tl.zeros([R, 1, 1], tl.float32) + param
    sound = par == par
    if PER_ROW and not NORM and LINK != "budget":
        sound = par > -1.0
        par = tl.where(sound, par, 1.0)
    high = any_of(par > 1.0)  # PER_ROW has one row a program
    first = tl.program_id(1) * span
    CENTRED: tl.constexpr = WHOLE and not PER_ROW and (LINK == "power" or LINK == "any")
    if MODE == "grad" or MODE == "write":
        x = fetch(at, 0, True, MASKED, INT64, K, L, False) if WHOLE else tl.zeros([R, 1, L], tl.float32)
        s0, s1, s2, s3, bad = recall(STATE, row, valid)
        top, tops, a = s0, x, s0
        if MODE == "write":
            tops = tl.load(TOPS + (row.to(tl.int64) * PARTS + tl.program_id(1)) * L + tl.arange(0, L)[None, None, :])
        small = False
    else:
        if PARTS > 0:
            cells, tops, top, bad = surveyed(TOPS, row, PARTS, L)
            x = tops
        else:
            ot = (OUT, aligned(OUT, first_of(row, start, d1, d2, o0, o1, o2, oc, RAGGED, UNIT), SHIFT), oc)
            FILL: tl.constexpr = 0.0 if FEW > 0 and MODE == "p" and not LATE else None
            x, tops, top, bad = survey(at, ot, FILL, MASKED, INT64, R, K, L, WHOLE)
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
        if PER_ROW and LINK == "any":
            if high:
                s0, s1, s2, s3 = solve(
                    x, tops, a, top, live, par, at, "steep", P, SLOPE, NORM, EXACT, MASKED, INT64, R, K, L, WHOLE
                )
            else:
                s0, s1, s2, s3 = solve(
                    x, tops, a, top, live, par, at, LINK, P, SLOPE, NORM, EXACT, MASKED, INT64, R, K, L, WHOLE
                )
        elif FEW > 0:
            LIVE: tl.constexpr = L * PARTS if PARTS > 0 else L
            wanted_ = matters(cells, top, live, par, at, LINK, P, SLOPE, NORM, MASKED, INT64, R, LIVE)
            tile, cols, count = gather(at, wanted_, LIST, list_span, FEW, DEPTH, MASKED, INT64, L, LIVE)
            count += any_of(bad) * (FEW + 1)  # a poisoned row has NaN in all lanes
            small = count <= FEW
            if KEEP or PARTS > 0:
                tl.store(COUNT + tl.program_id(0), count)
            if small:
                best = tl.max(tile, 1, keep_dims=True)
                peak, sane, asked = as_tile(top), as_tile(live.to(tl.int32)) > 0, as_tile(par)
                s0, s1, s2, s3 = solve(
                    tile,
                    best,
                    peak,
                    peak,
                    sane,
                    asked,
                    at,
                    LINK,
                    P,
                    SLOPE,
                    NORM,
                    EXACT,
                    MASKED,
                    INT64,
                    R,
                    DEPTH,
                    FEW,
                    True,
                )
                s0, s1, s2, s3 = as_tile(s0), as_tile(s1), as_tile(s2), as_tile(s3)
            else:
                s0, s1, s2, s3 = solve(
                    x, tops, a, top, live, par, at, LINK, P, SLOPE, NORM, EXACT, MASKED, INT64, R, K, L, WHOLE
                )
        else:
            s0, s1, s2, s3 = solve(
                x, tops, a, top, live, par, at, LINK, P, SLOPE, NORM, EXACT, MASKED, INT64, R, K, L, WHOLE
            )
        if CENTRED == 0:
            a = s0
    c, r = slope_and_power(par, LINK, P, NORM)
    if MODE == "p" or MODE == "grad" or MODE == "write":
        oo = aligned(OUT, first_of(row, start, d1, d2, o0, o1, o2, oc, RAGGED, UNIT), SHIFT)
        t, scale = wanted(INDEX, SCALE, row, ignore, at, bad, MODE, EACH)
        if WHOLE:
            p = shares(x, a, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW)
            finish(OUT, oo, oc, 0, p, t, scale, at, MODE, INT64, K, L)
        elif FEW > 0 and MODE == "p":
            if small:  # the other classes are zeros already, or are set to zero now
                if LATE:
                    tl.debug_barrier()
                    for begin in range(0, at[6], K * L):
                        fill(at, (OUT, oo, oc), begin, 0.0, INT64, R, K, L)
                p = emit_gathered(tile, s0, s1, s2, s3, c, r, LINK, P, SLOPE, NORM, EXACT)
                scatter(OUT, oo, oc, cols, p, p > 0.0, at, INT64)
            elif PARTS == 0:
                in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, high, t, scale, at,
                         MODE, LINK, P, SLOPE, NORM, EXACT, PER_ROW, MASKED, INT64, R, K, L)  # fmt: skip
        elif MODE == "grad" and FEW > 0:
            few = tl.load(COUNT + tl.program_id(0))
            if few <= FEW:
                mine = LIST + tl.program_id(0).to(tl.int64) * FEW
                tile, cols, ok = read_lanes(at, mine, few, list_span, FEW, DEPTH, MASKED, INT64, LANES)
                finish_empty(OUT, oo, oc, first, span, t, scale, at, INT64, R, K, L)
                p = emit_gathered(tile, s0, s1, s2, s3, c, r, LINK, P, SLOPE, NORM, EXACT)
                finish_gathered(OUT, oo, oc, first, span, cols, p, ok, t, scale, at, INT64)
            else:
                in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, high, t, scale, at,
                         MODE, LINK, P, SLOPE, NORM, EXACT, PER_ROW, MASKED, INT64, R, K, L)  # fmt: skip
        elif MODE == "write" and FEW > 0:
            if tl.load(COUNT + tl.program_id(0)) > FEW:  # else "p" has written the row
                in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, high, t, scale, at,
                         MODE, LINK, P, SLOPE, NORM, EXACT, PER_ROW, MASKED, INT64, R, K, L)  # fmt: skip
        elif MODE == "write" or PARTS == 0:
            in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, high, t, scale, at,
                     MODE, LINK, P, SLOPE, NORM, EXACT, PER_ROW, MASKED, INT64, R, K, L)  # fmt: skip
    if MODE == "loss":
        t = class_of(INDEX, row, ignore, at)
        aim = aimed(at, t, MASKED)
        dot = top * 0.0
        if not NORM:
            origin = 0.0 if CENTRED else top
            if WHOLE:
                p = shares(x, a, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW)
                dot = wide(tl.where(p > 0.0, p * (x - origin), 0.0)).to(tl.float32)
            elif FEW > 0:
                if small:
                    p = emit_gathered(tile, s0, s1, s2, s3, c, r, LINK, P, SLOPE, NORM, EXACT)
                    dot = wide(tl.where(p > 0.0, p * (tile - as_scalar(top)), 0.0)).to(tl.float32)
                else:
                    dot = dot_in_steps(tops, top, s0, s1, s2, s3, c, r, high, at,
                                       LINK, P, SLOPE, NORM, EXACT, PER_ROW, MASKED, INT64, R, K, L)  # fmt: skip
            else:
                dot = dot_in_steps(tops, top, s0, s1, s2, s3, c, r, high, at,
                                   LINK, P, SLOPE, NORM, EXACT, PER_ROW, MASKED, INT64, R, K, L)  # fmt: skip
        if PER_ROW and LINK == "any":
            if high:
                above = potential(top, s0, s1, s2, c, r, dot, "steep", NORM)
            else:
                above = potential(top, s0, s1, s2, c, r, dot, LINK, NORM)
        else:
            above = potential(top, s0, s1, s2, c, r, dot, LINK, NORM)
        lose(VALUE, row, rows, tl.maximum((top - aim) + above, 0.0), aim, t, bad, at)
    if SAVE and (MODE == "loss" or MODE == "p"):
        remember(STATE, row, valid, bad, s0, s1, s2, s3)
    if MODE == "tau":
        tau = top - height(top, s0, s1, s2, c, r, LINK, NORM)
        tau = tl.where(bad, float("nan"), tl.where(empty, float("-inf"), tau))
        tl.store(VALUE + row, tau, mask=valid)


@triton.jit
def shares(x, a, s0, s1, s2, s3, c, r, high, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
           EXACT: tl.constexpr, PER_ROW: tl.constexpr):  # fmt: skip
    """p of a tile; with an alpha for each row, by the link for its side of alpha = 2."""
    if PER_ROW and LINK == "any":
        if high:
            p = emit(x, a, s0, s1, s2, s3, c, r, "steep", P, SLOPE, NORM, EXACT)
        else:
            p = emit(x, a, s0, s1, s2, s3, c, r, LINK, P, SLOPE, NORM, EXACT)
        return p
    else:
        return emit(x, a, s0, s1, s2, s3, c, r, LINK, P, SLOPE, NORM, EXACT)


@triton.jit
def in_steps(OUT, oo, oc, first, span, tops, s0, s1, s2, s3, c, r, high, t, scale, at, MODE: tl.constexpr, LINK: tl.constexpr,
             P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr, PER_ROW: tl.constexpr,
             MASKED: tl.constexpr, INT64: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Writes a longer row, or a part of it, without reading the lanes that have no probability."""
    live = tl.full([R, 1, L], 1, tl.int1)
    if MODE != "grad":
        live = shares(tops, s0, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW) > 0.0
    for begin in range(first, tl.minimum(first + span, at[6]), K * L):
        v = fetch(at, begin, live, MASKED, INT64, K, L, False, OUTSIDE, False)
        p = shares(v, s0, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW)
        finish(OUT, oo, oc, begin, p, t, scale, at, MODE, INT64, K, L)


@triton.jit
def dot_in_steps(tops, top, s0, s1, s2, s3, c, r, high, at, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr,
                 NORM: tl.constexpr, EXACT: tl.constexpr, PER_ROW: tl.constexpr, MASKED: tl.constexpr, INT64: tl.constexpr,
                 R: tl.constexpr, K: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """sum p (x - top) over a longer row."""
    live = shares(tops, s0, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW) > 0.0
    acc = tl.zeros([R, 1, L], tl.float64)
    for begin in range(0, at[6], K * L):
        v = fetch(at, begin, live, MASKED, INT64, K, L, False)
        p = shares(v, s0, s0, s1, s2, s3, c, r, high, LINK, P, SLOPE, NORM, EXACT, PER_ROW)
        acc += tl.sum(tl.where(p > 0.0, p * (v - top), 0.0), 1, keep_dims=True).to(tl.float64)
    return total(acc).to(tl.float32)


@triton.jit
def matters(tops, top, live, param, at, LINK: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr, NORM: tl.constexpr,
            MASKED: tl.constexpr, INT64: tl.constexpr, R: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """The lanes that may contain some of the support, by a bound of the threshold from the lane maxima."""
    if LINK == "budget":  # tau is at most 1 below the ceil(k)-th largest score
        edge, _ = kth(tops, tops, top, live, tl.ceil(param), at, MASKED, INT64, R, 1, L, True)
        held = tops >= edge - 1.0
    elif LINK == "steep":
        held = tops >= top - 1.0 / param
    else:
        c, r = slope_and_power(param, LINK, P, NORM)
        if LINK == "edge":
            held = tops >= top - 1.0
        else:
            b = descent(tops, top, top, c, r, LINK, P, SLOPE)
            b += 1e-6 * b  # more than the rounding error
            value, _ = share_of(tops, top, b, fitted(top, b, c, r, LINK), r, LINK, P, SLOPE, False)
            held = value > 0.0
    return held & (tops > float("-inf"))
