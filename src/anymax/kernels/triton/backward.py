"""J^T g from p (and from the scores, for ratio maps): `s (g - <s, g> / <s, 1>)` with s = 1 / omega''(p).

g is read only where p is not 0.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import over, sensitivity, taylor
from .survey import (
    read_lanes,
)
from .tile import (
    alone,
    as_scalar,
    fetch,
    fetch_one,
    fill,
    in_packs,
    lanes,
    largest,
    output,
    parameter,
    per_lane,
    put,
    rows_of,
    scatter,
    smallest,
    there,
    total,
    wide,
)


@triton.jit
def pair(pa, ga, begin, SENSE: tl.constexpr, ALONE: tl.constexpr, TILE: tl.constexpr):
    """(p, g). In a longer row of a sparse map, g is read only on the support."""
    p = fetch(pa, begin, True, TILE, False, 0.0, ALONE)
    if SENSE == "log":
        p = tl.where(there(pa, lanes(begin, TILE.K, TILE.L), TILE.SHIFT), p, float("-inf"))
    if TILE.WHOLE or SENSE == "taylor" or SENSE == "sigsoftmax" or SENSE == "own":
        g = fetch(ga, begin, True, TILE, False, 0.0, ALONE)
    elif SENSE == "log":
        g = fetch(ga, begin, in_packs(p != float("-inf"), ga, TILE), TILE, False, 0.0, ALONE)
    else:
        g = fetch(ga, begin, in_packs((p <= 0.0) == 0, ga, TILE), TILE, False, 0.0, ALONE)
    return p, g


@triton.jit
def summed(v, EXACT: tl.constexpr):
    """The sum of a row, in fp64 if EXACT."""
    if EXACT:
        return wide(v).to(tl.float32)
    else:
        return total(v)


@triton.jit
def lifted(p, c):
    """p^(c + 1), 0 for 0."""
    return tl.where(p > 0.0, tl.exp2((c + 1.0) * tl.log2(tl.where(p > 0.0, p, 1.0))), 0.0)


@triton.jit
def peak(p):
    """What the p of a steep norm are divided by, the largest, without which their powers are no numbers of fp32; 1 where all are 0."""
    most = largest(p)
    return tl.where(most > 0.0, most, 1.0)


@triton.jit
def parts(p, g, anchor, e, high, SENSE: tl.constexpr):
    """(s, h): the sensitivity, of a norm that of p / high, and h = g - anchor where s is not 0."""
    if SENSE == "log":
        s = tl.where(p > float("-inf"), tl.exp(tl.where(p > float("-inf"), p, 0.0)), 0.0)
        s = tl.where(p == p, s, p)
    elif SENSE == "norm":
        s = sensitivity(p / high, e, "any")
    elif SENSE == "taylor" or SENSE == "sigsoftmax":
        s = p
    else:
        s = sensitivity(p, e, SENSE)
    return s, tl.where((s == 0.0) & (SENSE != "taylor"), 0.0, g - anchor)


@triton.jit
def pulled(p, s, h, SENSE: tl.constexpr):
    """What `dot` sums."""
    return h if SENSE == "log" else (p * h if SENSE == "norm" else s * h)


@triton.jit
def slope_of(x, p, scale, share, SENSE: tl.constexpr, ORDER: tl.constexpr):
    """u'(x) / Z of a ratio map."""
    if SENSE == "taylor":
        inside = x > float("-inf")
        _, du = taylor(tl.where(inside, x, 0.0), scale, ORDER)
        return tl.where(p == p, tl.where(inside, du * share, 0.0), p)
    else:  # (log u)' = 1 + sigmoid(-x)
        small = tl.exp(-tl.abs(x))
        return p * (1.0 + tl.where(x < 0.0, 1.0, small) / (1.0 + small))


@triton.jit
def few_lanes(
    pa, ga, to, mine, count, span, first, part, c, SENSE: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr
):
    """Writes zeros, then the entries of the listed lanes. For a row in parts, each program reads all lanes and writes its own part."""
    for begin in range(first, tl.minimum(first + part, pa.n), TILE.K * TILE.L):
        fill(to, begin, 0.0, pa, TILE)
    p, cols, ok = read_lanes(pa, mine, count, span, FEW, TILE)
    g, _, _ = read_lanes(ga, mine, count, span, FEW, TILE)
    p = tl.where(ok, p, 0.0)
    held = ok & ((p <= 0.0) == 0)
    g = tl.where(held, g, 0.0)
    high = 1.0
    if SENSE == "norm":
        high = peak(p)
    s, h = parts(p, g, 0.0, 1.0 - c, high, SENSE)
    rate, dot = wide(s).to(tl.float32), wide(pulled(p, s, h, SENSE)).to(tl.float32)
    norm, cross = rate, rate
    if SENSE == "norm":
        norm = wide(lifted(p / high, c)).to(tl.float32)
        cross = wide(s * (h - dot)).to(tl.float32)
    out = product(p, p, s, h, rate, dot, norm, cross, c, high, 1.0, 1.0, SENSE, 0)
    scatter(to, cols, out, held & (cols >= first) & (cols < first + part), pa, TILE)


@triton.jit
def backward_parts(P, G, SUMS, COUNT, rows, n, span, d1, d2, p0, p1, p2, pc, g0, g1, g2, gc, param, SENSE: tl.constexpr,
                   FEW: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Writes SUMS [rows, PARTS, 2]: <s, 1> and <s, g> of each part of a row, unless the row has few lanes."""
    few = FEW.FEW + 1
    if FEW.FEW > 0:
        few = tl.load(COUNT + tl.program_id(0))
    if few > FEW.FEW:
        mine = rows_of(P, P, rows, n, d1, d2, TILE)
        pa, ga = alone(mine, P, p0, p1, p2, pc, TILE), alone(mine, G, g0, g1, g2, gc, TILE)
        e = 1.0 - (tl.zeros(mine.row.shape, tl.float32) + param)
        first = tl.program_id(1) * span
        rate = per_lane(0.0, TILE, tl.float64)
        dot = rate
        for begin in range(first, tl.minimum(first + span, pa.n), TILE.K * TILE.L):
            p, g = pair(pa, ga, begin, SENSE, True, TILE)
            s, h = parts(p, g, 0.0, e, 1.0, SENSE)
            rate += tl.sum(s, 1, keep_dims=True).to(tl.float64)
            dot += tl.sum(pulled(p, s, h, SENSE), 1, keep_dims=True).to(tl.float64)
        to = SUMS + (mine.row.to(tl.int64) * FEW.PARTS + tl.program_id(1)) * 2
        tl.store(to, total(rate))
        tl.store(to + 1, total(dot))


@triton.jit
def all_lanes(xa, pa, ga, to, SUMS, row, first, part, c, SENSE: tl.constexpr, ORDER: tl.constexpr, STEEP: tl.constexpr,
              PARTS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Writes J^T g from all of the row. STEEP: above alpha = 2 one entry may have a sensitivity larger by many orders of magnitude. Its
    own g is then subtracted first, so that nothing cancels; of a norm those of p / high are taken."""
    EXACT: tl.constexpr = to.X.dtype.element_ty == tl.float32
    n, e = pa.n, 1.0 - c
    anchor = tl.zeros(c.shape, tl.float32)
    scale = tl.full(c.shape, 1.0, tl.float32)
    share = scale
    high = 1.0
    ANCHORED: tl.constexpr = STEEP and SENSE != "norm"
    SCALED: tl.constexpr = STEEP and SENSE == "norm"
    if TILE.WHOLE:
        p, g = pair(pa, ga, 0, SENSE, True, TILE)
        x = p
        if SENSE == "taylor" or SENSE == "sigsoftmax":
            x = fetch(xa, 0, True, TILE, False)
        if SENSE == "taylor":
            sound = tl.where((x > float("-inf")) & (x < float("inf")), x, 0.0)
            scale = 1.0 / tl.maximum(0.25 * largest(tl.abs(sound)), 1.0)
            u, _ = taylor(sound, scale, ORDER)
            z = summed(tl.where(x > float("-inf"), u, 0.0), EXACT)
            share = over(1.0, z)
        if SCALED:
            high = peak(p)
        if ANCHORED:
            s, _ = parts(p, g, anchor, e, high, SENSE)
            most = largest(s)
            cols = lanes(0, TILE.K, TILE.L)
            first_most = smallest(tl.where((s == most) & there(pa, cols, TILE.SHIFT), cols, n))
            anchor = total(tl.where(cols == first_most, g, 0.0))
        s, h = parts(p, g, anchor, e, high, SENSE)
        rate, dot = summed(s, EXACT), summed(pulled(p, s, h, SENSE), EXACT)
        norm, cross = rate, rate
        if SENSE == "norm":
            norm = summed(lifted(p / high, c), EXACT)
            cross = summed(s * (h - dot), EXACT)
        out = product(x, p, s, h, rate, dot, norm, cross, c, high, scale, share, SENSE, ORDER)
        put(to, 0, out, pa, TILE)
    else:
        size_, most_, mine_ = per_lane(0.0, TILE), per_lane(-1.0, TILE), per_lane(0.0, TILE)
        if SENSE == "taylor":
            for begin in range(0, n, TILE.K * TILE.L):
                x = fetch(xa, begin, True, TILE, True)
                sound = tl.where((x > float("-inf")) & (x < float("inf")), tl.abs(x), 0.0)
                size_ = tl.maximum(size_, tl.max(sound, 1, keep_dims=True))
            scale = 1.0 / tl.maximum(0.25 * largest(size_), 1.0)
        if SCALED:
            for begin in range(0, n, TILE.K * TILE.L):
                size_ = tl.maximum(size_, tl.max(fetch(pa, begin, True, TILE, False, 0.0, True), 1, keep_dims=True))
            high = peak(size_)
        if ANCHORED:  # the largest sensitivity of each lane, and the g at its first occurrence
            for begin in range(0, n, TILE.L):
                p = fetch_one(pa, begin, True, TILE, 1, False, 0.0, True)
                g = fetch_one(ga, begin, (p <= 0.0) == 0, TILE, 1, False, 0.0, True)
                s, _ = parts(p, g, anchor, e, high, SENSE)
                mine_ = tl.where(s > most_, g, mine_)
                most_ = tl.maximum(most_, s)
            most = largest(most_)
            lane = tl.arange(0, TILE.L)[None, None, :]
            first_most = tl.min(tl.where(most_ == most, lane, TILE.L), 2, keep_dims=True)
            anchor = tl.sum(tl.where(lane == first_most, mine_, 0.0), 2, keep_dims=True)
        if PARTS > 0:
            of = SUMS + (row.to(tl.int64) * PARTS + tl.arange(0, PARTS)[None, None, :]) * 2
            rate, dot = total(tl.load(of)).to(tl.float32), total(tl.load(of + 1)).to(tl.float32)
            norm = rate
        else:
            rate_ = per_lane(0.0, TILE, tl.float64)
            dot_, norm_ = rate_, rate_
            for begin in range(0, n, TILE.K * TILE.L):
                p, g = pair(pa, ga, begin, SENSE, True, TILE)
                s, h = parts(p, g, anchor, e, high, SENSE)
                rate_ += tl.sum(s, 1, keep_dims=True).to(tl.float64)
                dot_ += tl.sum(pulled(p, s, h, SENSE), 1, keep_dims=True).to(tl.float64)
                if SENSE == "norm":
                    norm_ += tl.sum(lifted(p / high, c), 1, keep_dims=True).to(tl.float64)
                if SENSE == "taylor":
                    x = fetch(xa, begin, True, TILE, True)
                    inside = (x > float("-inf")) & (x < float("inf"))
                    u, _ = taylor(tl.where(inside, x, 0.0), scale, ORDER)
                    norm_ += tl.sum(tl.where(inside, u, 0.0), 1, keep_dims=True).to(tl.float64)
            rate, dot, norm = total(rate_).to(tl.float32), total(dot_).to(tl.float32), total(norm_).to(tl.float32)
        cross = rate
        if SENSE == "taylor":
            share = over(1.0, norm)
        if SENSE == "norm":
            cross_ = per_lane(0.0, TILE, tl.float64)
            for begin in range(0, n, TILE.K * TILE.L):
                p, g = pair(pa, ga, begin, SENSE, True, TILE)
                s, h = parts(p, g, anchor, e, high, SENSE)
                cross_ += tl.sum(s * (h - dot), 1, keep_dims=True).to(tl.float64)
            cross = total(cross_).to(tl.float32)
        steps = tl.cdiv(tl.minimum(part, n - first), TILE.K * TILE.L)
        for i in range(steps):
            begin = first + (steps - 1 - i) * (TILE.K * TILE.L)
            p, g = pair(pa, ga, begin, SENSE, False, TILE)
            x = p
            if SENSE == "taylor" or SENSE == "sigsoftmax":
                x = fetch(xa, begin, True, TILE, False, 0.0, False)
            s, h = parts(p, g, anchor, e, high, SENSE)
            out = product(x, p, s, h, rate, dot, norm, cross, c, high, scale, share, SENSE, ORDER)
            put(to, begin, out, pa, TILE)


@triton.jit
def backward_rows(X, P, G, OUT, PARAMS, LIST, COUNT, SUMS, PTR, IDS,
                  rows, n, part, span, d1, d2, x0, x1, x2, xc, p0, p1, p2, pc, g0, g1, g2, gc, o0, o1, o2, oc, param, slots,
                  SENSE: tl.constexpr, ORDER: tl.constexpr, STEEP: tl.constexpr, PER_ROW: tl.constexpr, FEW: tl.constexpr,
                  TILE: tl.constexpr):  # fmt: skip
    """Writes J^T g; `param` is alpha - 1. FEW > 0: the forward has listed the lanes that may contain some of the support, where a part of
    `span` classes has LANES lanes; if there are at most FEW, p and g are read only there. `part`: the classes of a part in this kernel.
    PARTS > 0: `backward_parts` has read the row."""
    mine = rows_of(PTR, IDS, slots, n, d1, d2, TILE)
    xa, pa = alone(mine, X, x0, x1, x2, xc, TILE), alone(mine, P, p0, p1, p2, pc, TILE)
    ga, to = alone(mine, G, g0, g1, g2, gc, TILE), output(mine, OUT, o0, o1, o2, oc, TILE)
    c = parameter(PARAMS, param, mine, PER_ROW)
    first = tl.program_id(1) * part
    few: tl.constexpr = 1
    if FEW.FEW > 0:
        few = tl.load(COUNT + tl.program_id(0))
    if few <= FEW.FEW:
        listed = LIST + tl.program_id(0).to(tl.int64) * FEW.FEW
        few_lanes(pa, ga, to, listed, few, span, first, part, as_scalar(c), SENSE, FEW, TILE)
    else:
        all_lanes(xa, pa, ga, to, SUMS, mine.row, first, part, c, SENSE, ORDER, STEEP, FEW.PARTS, TILE)


@triton.jit
def product(x, p, s, h, rate, dot, norm, cross, c, high, scale, share, SENSE: tl.constexpr, ORDER: tl.constexpr):
    if SENSE == "log":  # g - p sum g, on the classes whose probability is not 0
        return tl.where(p == float("-inf"), 0.0, h - s * dot)
    elif SENSE == "norm":  # diag(w) - w p^T - p w^T + <w, 1> p p^T, w = s ||p||^(alpha-1) / (alpha-1)
        factor = high * tl.exp2(c / (c + 1.0) * tl.log2(tl.maximum(norm, 1.2e-38))) / c
        out = factor * (s * (h - dot) - p * cross)
        return tl.where(p == p, tl.where(p <= 0.0, 0.0, out), p)
    elif SENSE == "taylor" or SENSE == "sigsoftmax":
        du = slope_of(x, p, scale, share, SENSE, ORDER)
        return tl.where(du == 0.0, 0.0, du * (h - dot))
    else:
        mean = dot if SENSE == "own" else tl.where(rate == 0.0, dot, dot / tl.where(rate == 0.0, 1.0, rate))
        return tl.where(s == 0.0, 0.0, s * (h - mean))
