"""J^T g from p (and from the scores, for ratio maps): `s (g - <s, g> / <s, 1>)` with s = 1 / omega''(p).

g is read only where p is not 0.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import sensitivity, taylor
from .tile import (
    aligned,
    as_scalar,
    fetch,
    first_of,
    lanes,
    largest,
    operand,
    place,
    put,
    read_lanes,
    rows_of,
    scatter,
    there,
    total,
    wide,
)


@triton.jit
def pair(pa, ga, begin, INT64: tl.constexpr, K: tl.constexpr, L: tl.constexpr, SENSE: tl.constexpr, WHOLE: tl.constexpr,
         ALONE: tl.constexpr):  # fmt: skip
    """(p, g). In a longer row of a sparse map, g is read only on the support."""
    p = fetch(pa, begin, True, False, INT64, K, L, False, 0.0, ALONE)
    if SENSE == "log":
        p = tl.where(there(pa, lanes(begin, K, L)), p, float("-inf"))
    if WHOLE or SENSE == "taylor" or SENSE == "sigsoftmax" or SENSE == "own":
        g = fetch(ga, begin, True, False, INT64, K, L, False, 0.0, ALONE)
    elif SENSE == "log":
        g = fetch(ga, begin, p != float("-inf"), False, INT64, K, L, False, 0.0, ALONE)
    else:
        g = fetch(ga, begin, (p <= 0.0) == 0, False, INT64, K, L, False, 0.0, ALONE)
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
def parts(p, g, anchor, e, SENSE: tl.constexpr):
    """(s, h): the sensitivity, and h = g - anchor where s is not 0."""
    if SENSE == "log":
        s = tl.where(p > float("-inf"), tl.exp(tl.where(p > float("-inf"), p, 0.0)), 0.0)
        s = tl.where(p == p, s, p)
    elif SENSE == "norm":
        s = sensitivity(p, e, "any")
    elif SENSE == "taylor" or SENSE == "sigsoftmax":
        s = p
    else:
        s = sensitivity(p, e, SENSE)
    return s, tl.where((s == 0.0) & (SENSE != "taylor"), 0.0, g - anchor)


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
def few_lanes(pa, ga, OUT, oo, oc, mine, count, span, first, part, c, e, SENSE: tl.constexpr, INT64: tl.constexpr, FEW: tl.constexpr,
              DEPTH: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Writes zeros, then the entries of the listed lanes. For a row in parts, each program reads all lanes and writes its own part."""
    nothing = tl.zeros([R, K, L], tl.float32)
    for begin in range(first, tl.minimum(first + part, pa[6]), K * L):
        put(OUT, oo, oc, begin, nothing, pa, INT64, K, L)
    p, cols, ok = read_lanes(pa, mine, count, span, FEW, DEPTH, False, INT64, LANES)
    g, _, _ = read_lanes(ga, mine, count, span, FEW, DEPTH, False, INT64, LANES)
    p = tl.where(ok, p, 0.0)
    held = ok & ((p <= 0.0) == 0)
    g = tl.where(held, g, 0.0)
    s, h = parts(p, g, 0.0, as_scalar(e), SENSE)
    rate, dot = wide(s).to(tl.float32), wide(s * h).to(tl.float32)
    norm, cross = rate, rate
    if SENSE == "norm":
        dot = wide(p * h).to(tl.float32)
        norm = wide(lifted(p, c)).to(tl.float32)
        cross = wide(s * (h - dot)).to(tl.float32)
    out = product(p, p, s, h, rate, dot, norm, cross, c, 1.0, 1.0, SENSE, 0)
    scatter(OUT, oo, oc, cols, out, held & (cols >= first) & (cols < first + part), pa, INT64)


@triton.jit
def backward_parts(P, G, SUMS, COUNT, rows, n, span, d1, d2, p0, p1, p2, pc, g0, g1, g2, gc, param, SENSE: tl.constexpr,
                   INT64: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr,
                   K: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Writes SUMS [rows, PARTS, 2]: <s, 1> and <s, g> of each part of a row, unless the row has few lanes."""
    few = FEW + 1
    if FEW > 0:
        few = tl.load(COUNT + tl.program_id(0))
    if few > FEW:
        row = tl.program_id(0) + tl.arange(0, 1)[:, None, None]
        po, go = place(row, d1, d2, p0, p1, p2, UNIT), place(row, d1, d2, g0, g1, g2, UNIT)
        pa = operand(P, po, pc, P, 0, pc, n * UNIT, row < rows, SHIFT, False)
        ga = operand(G, go, gc, G, 0, gc, n * UNIT, row < rows, SHIFT, False)
        e = 1.0 - (tl.zeros([1, 1, 1], tl.float32) + param)
        first = tl.program_id(1) * span
        rate = tl.zeros([1, 1, L], tl.float64)
        dot = tl.zeros([1, 1, L], tl.float64)
        for begin in range(first, tl.minimum(first + span, pa[6]), K * L):
            p, g = pair(pa, ga, begin, INT64, K, L, SENSE, False, True)
            s, h = parts(p, g, 0.0, e, SENSE)
            rate += tl.sum(s, 1, keep_dims=True).to(tl.float64)
            dot += tl.sum(h if SENSE == "log" else s * h, 1, keep_dims=True).to(tl.float64)
        to = SUMS + (row.to(tl.int64) * PARTS + tl.program_id(1)) * 2
        tl.store(to, total(rate))
        tl.store(to + 1, total(dot))


@triton.jit
def all_lanes(xa, pa, ga, OUT, oo, oc, SUMS, row, first, part, c, e, SENSE: tl.constexpr, ORDER: tl.constexpr, STEEP: tl.constexpr,
              INT64: tl.constexpr, EXACT: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
              WHOLE: tl.constexpr):  # fmt: skip
    """Writes J^T g from all of the row. STEEP: above alpha = 2 one entry may have a sensitivity larger by many orders of magnitude. Its
    own g is then subtracted first, so that nothing cancels."""
    n = pa[6]
    anchor = tl.zeros([R, 1, 1], tl.float32)
    scale = tl.full([R, 1, 1], 1.0, tl.float32)
    share = tl.full([R, 1, 1], 1.0, tl.float32)
    if WHOLE:
        p, g = pair(pa, ga, 0, INT64, K, L, SENSE, True, True)
        x = p
        if SENSE == "taylor" or SENSE == "sigsoftmax":
            x = fetch(xa, 0, True, False, INT64, K, L, False)
        if SENSE == "taylor":
            sound = tl.where((x > float("-inf")) & (x < float("inf")), x, 0.0)
            scale = 1.0 / tl.maximum(0.25 * largest(tl.abs(sound)), 1.0)
            u, _ = taylor(sound, scale, ORDER)
            z = summed(tl.where(x > float("-inf"), u, 0.0), EXACT)
            share = tl.where(z > 0.0, 1.0 / tl.where(z > 0.0, z, 1.0), 0.0)
        if STEEP:
            s, _ = parts(p, g, anchor, e, SENSE)
            most = largest(s)
            peak = tl.min(
                tl.min(tl.where((s == most) & there(pa, lanes(0, K, L)), lanes(0, K, L), n), 1, keep_dims=True),
                2,
                keep_dims=True,
            )
            anchor = total(tl.where(lanes(0, K, L) == peak, g, 0.0))
        s, h = parts(p, g, anchor, e, SENSE)
        rate = summed(s, EXACT)
        dot = summed(h if SENSE == "log" else (p * h if SENSE == "norm" else s * h), EXACT)
        norm, cross = rate, rate
        if SENSE == "norm":
            norm = summed(lifted(p, c), EXACT)
            cross = summed(s * (h - dot), EXACT)
        out = product(x, p, s, h, rate, dot, norm, cross, c, scale, share, SENSE, ORDER)
        put(OUT, oo, oc, 0, out, pa, INT64, K, L)
    else:
        size_ = tl.zeros([R, 1, L], tl.float32)
        most_ = tl.full([R, 1, L], -1.0, tl.float32)
        mine_ = tl.zeros([R, 1, L], tl.float32)
        if SENSE == "taylor":
            for begin in range(0, n, K * L):
                x = fetch(xa, begin, True, False, INT64, K, L, True)
                sound = tl.where((x > float("-inf")) & (x < float("inf")), tl.abs(x), 0.0)
                size_ = tl.maximum(size_, tl.max(sound, 1, keep_dims=True))
            scale = 1.0 / tl.maximum(0.25 * largest(size_), 1.0)
        if STEEP:  # the largest sensitivity of each lane, and the g at its first occurrence
            for begin in range(0, n, L):
                p, g = pair(pa, ga, begin, INT64, 1, L, SENSE, False, True)
                s, _ = parts(p, g, anchor, e, SENSE)
                mine_ = tl.where(s > most_, g, mine_)
                most_ = tl.maximum(most_, s)
            most = largest(most_)
            lane = tl.arange(0, L)[None, None, :]
            peak = tl.min(tl.where(most_ == most, lane, L), 2, keep_dims=True)
            anchor = tl.sum(tl.where(lane == peak, mine_, 0.0), 2, keep_dims=True)
        if PARTS > 0:
            of = SUMS + (row.to(tl.int64) * PARTS + tl.arange(0, PARTS)[None, None, :]) * 2
            rate, dot = total(tl.load(of)).to(tl.float32), total(tl.load(of + 1)).to(tl.float32)
            norm = rate
        else:
            rate_ = tl.zeros([R, 1, L], tl.float64)
            dot_ = tl.zeros([R, 1, L], tl.float64)
            norm_ = tl.zeros([R, 1, L], tl.float64)
            for begin in range(0, n, K * L):
                p, g = pair(pa, ga, begin, INT64, K, L, SENSE, False, True)
                s, h = parts(p, g, anchor, e, SENSE)
                rate_ += tl.sum(s, 1, keep_dims=True).to(tl.float64)
                more = h if SENSE == "log" else (p * h if SENSE == "norm" else s * h)
                dot_ += tl.sum(more, 1, keep_dims=True).to(tl.float64)
                if SENSE == "norm":
                    norm_ += tl.sum(lifted(p, c), 1, keep_dims=True).to(tl.float64)
                if SENSE == "taylor":
                    x = fetch(xa, begin, True, False, INT64, K, L, True)
                    inside = (x > float("-inf")) & (x < float("inf"))
                    u, _ = taylor(tl.where(inside, x, 0.0), scale, ORDER)
                    norm_ += tl.sum(tl.where(inside, u, 0.0), 1, keep_dims=True).to(tl.float64)
            rate, dot, norm = total(rate_).to(tl.float32), total(dot_).to(tl.float32), total(norm_).to(tl.float32)
        cross = rate
        if SENSE == "taylor":
            share = tl.where(norm > 0.0, 1.0 / tl.where(norm > 0.0, norm, 1.0), 0.0)
        if SENSE == "norm":
            cross_ = tl.zeros([R, 1, L], tl.float64)
            for begin in range(0, n, K * L):
                p, g = pair(pa, ga, begin, INT64, K, L, SENSE, False, True)
                s, h = parts(p, g, anchor, e, SENSE)
                cross_ += tl.sum(s * (h - dot), 1, keep_dims=True).to(tl.float64)
            cross = total(cross_).to(tl.float32)
        steps = tl.cdiv(tl.minimum(part, n - first), K * L)
        for i in range(steps):
            begin = first + (steps - 1 - i) * (K * L)
            p, g = pair(pa, ga, begin, INT64, K, L, SENSE, False, False)
            x = p
            if SENSE == "taylor" or SENSE == "sigsoftmax":
                x = fetch(xa, begin, True, False, INT64, K, L, False, 0.0, False)
            s, h = parts(p, g, anchor, e, SENSE)
            out = product(x, p, s, h, rate, dot, norm, cross, c, scale, share, SENSE, ORDER)
            put(OUT, oo, oc, begin, out, pa, INT64, K, L)


@triton.jit
def backward_rows(X, P, G, OUT, PARAMS, LIST, COUNT, SUMS, PTR, IDS,
                  rows, n, part, span, d1, d2, x0, x1, x2, xc, p0, p1, p2, pc, g0, g1, g2, gc, o0, o1, o2, oc, param, slots,
                  SENSE: tl.constexpr, ORDER: tl.constexpr, STEEP: tl.constexpr, PER_ROW: tl.constexpr, INT64: tl.constexpr,
                  RAGGED: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr, FEW: tl.constexpr, DEPTH: tl.constexpr,
                  LANES: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
                  WHOLE: tl.constexpr):  # fmt: skip
    """Writes J^T g; `param` is alpha - 1. FEW > 0: the forward has listed the lanes that may contain some of the support, where a part of
    `span` classes has LANES lanes; if there are at most FEW, p and g are read only there. `part`: the classes of a part in this kernel.
    PARTS > 0: `backward_parts` has read the row. RAGGED: see `tile`."""
    row, valid, n, start = rows_of(PTR, IDS, slots, n, d2, RAGGED, UNIT, R, WHOLE)
    xo = first_of(row, start, d1, d2, x0, x1, x2, xc, RAGGED, UNIT)
    po = first_of(row, start, d1, d2, p0, p1, p2, pc, RAGGED, UNIT)
    go = first_of(row, start, d1, d2, g0, g1, g2, gc, RAGGED, UNIT)
    xa = operand(X, xo, xc, X, 0, xc, n, valid, SHIFT, WHOLE)
    pa = operand(P, po, pc, P, 0, pc, n, valid, SHIFT, WHOLE)
    ga = operand(G, go, gc, G, 0, gc, n, valid, SHIFT, WHOLE)
    oo = aligned(OUT, first_of(row, start, d1, d2, o0, o1, o2, oc, RAGGED, UNIT), SHIFT)
    EXACT: tl.constexpr = OUT.dtype.element_ty == tl.float32
    if PER_ROW:
        c = tl.load(PARAMS + row, mask=valid, other=1.0)
    else:
        c = tl.zeros([R, 1, 1], tl.float32) + param
    e = 1.0 - c
    first = tl.program_id(1) * part
    if FEW > 0:
        few = tl.load(COUNT + tl.program_id(0))
        if few <= FEW:
            mine = LIST + tl.program_id(0).to(tl.int64) * FEW
            few_lanes(
                pa,
                ga,
                OUT,
                oo,
                oc,
                mine,
                few,
                span,
                first,
                part,
                as_scalar(c),
                e,
                SENSE,
                INT64,
                FEW,
                DEPTH,
                LANES,
                R,
                K,
                L,
            )
        else:
            all_lanes(
                xa,
                pa,
                ga,
                OUT,
                oo,
                oc,
                SUMS,
                row,
                first,
                part,
                c,
                e,
                SENSE,
                ORDER,
                STEEP,
                INT64,
                EXACT,
                PARTS,
                R,
                K,
                L,
                WHOLE,
            )
    else:
        all_lanes(
            xa,
            pa,
            ga,
            OUT,
            oo,
            oc,
            SUMS,
            row,
            first,
            part,
            c,
            e,
            SENSE,
            ORDER,
            STEEP,
            INT64,
            EXACT,
            PARTS,
            R,
            K,
            L,
            WHOLE,
        )


@triton.jit
def product(x, p, s, h, rate, dot, norm, cross, c, scale, share, SENSE: tl.constexpr, ORDER: tl.constexpr):
    if SENSE == "log":  # g - p sum g, on the classes whose probability is not 0
        return tl.where(p == float("-inf"), 0.0, h - s * dot)
    elif SENSE == "norm":  # diag(w) - w p^T - p w^T + <w, 1> p p^T, w = s ||p||^(alpha-1) / (alpha-1)
        factor = tl.exp2(c / (c + 1.0) * tl.log2(tl.maximum(norm, 1.2e-38))) / c
        out = factor * (s * (h - dot) - p * cross)
        return tl.where(p == p, tl.where(p <= 0.0, 0.0, out), p)
    elif SENSE == "taylor" or SENSE == "sigsoftmax":
        du = slope_of(x, p, scale, share, SENSE, ORDER)
        return tl.where(du == 0.0, 0.0, du * (h - dot))
    else:
        mean = dot if SENSE == "own" else tl.where(rate == 0.0, dot, dot / tl.where(rate == 0.0, 1.0, rate))
        return tl.where(s == 0.0, 0.0, s * (h - mean))
