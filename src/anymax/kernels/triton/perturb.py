"""Perturb max: `p_i = INT G(u) h(u - z_i) du`, z = (x - max x) / scale, G(u) = prod_j F(u - z_j), by the trapezoid rule.

The nodes are as in mappings/perturb_max.py, but the ends are found differently. Each node takes a sum over the row, then each class a sum
over the nodes. Arithmetic is the bottleneck, not memory. A row that is one tile (WHOLE) is read once, and computes h once for both sums; a
longer one is read in steps, and computes h again from the weights of the nodes, which it keeps in memory.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import law, over
from .survey import (
    survey,
)
from .tile import (
    alone,
    fetch,
    operand,
    output,
    parameter,
    per_class,
    per_lane,
    put,
    rows_of,
    total,
    wide,
)

FAR_BELOW = tl.constexpr(-1e15)
LEAST_SCALE = tl.constexpr(1e-37)  # its reciprocal is a float


@triton.jit
def scaled(x, top, scale):
    """(z, kept) of scores; z of a masked score is so low that it never wins."""
    kept = (x > float("-inf")) & (x < float("inf"))
    return tl.maximum(tl.where(kept, (tl.where(kept, x, top) - top) / scale, FAR_BELOW), FAR_BELOW), kept


@triton.jit
def centred(at, begin, top, scale, TILE: tl.constexpr):
    """`scaled` of the tile that begins there."""
    return scaled(fetch(at, begin, True, TILE, True), top, scale)


@triton.jit
def node(low, up, i, nodes):
    s = i / (nodes - 1.0)
    return (low * (1.0 - s) + up * s).to(tl.float32)


@triton.jit
def log_g(x, kept, at, u, top, scale, NOISE: tl.constexpr, TILE: tl.constexpr):
    """log G(u) of each row."""
    acc = per_lane(0.0, TILE, tl.float64)
    if TILE.WHOLE:
        log_f, _ = law(u - x, NOISE)
        acc += tl.sum(tl.where(kept, log_f, 0.0), 1, keep_dims=True).to(tl.float64)
    else:
        for begin in range(0, at.n, TILE.K * TILE.L):
            z, inside = centred(at, begin, top, scale, TILE)
            log_f, _ = law(u - z, NOISE)
            acc += tl.sum(tl.where(inside, log_f, 0.0), 1, keep_dims=True).to(tl.float64)
    return total(acc)


@triton.jit
def end(x, kept, at, top, scale, near, away, goal, NOISE: tl.constexpr, LOWER: tl.constexpr, TILE: tl.constexpr):
    """The end of the nodes: a u with log G(u) <= -goal (LOWER) or >= -goal. `near` satisfies that in any row, and bisection moves it
    towards `away`."""
    good, other = tl.zeros(top.shape, tl.float32) + near, tl.zeros(top.shape, tl.float32) + away
    for _ in range(9):
        u = 0.5 * (good + other)
        excess = log_g(x, kept, at, u, top, scale, NOISE, TILE) + goal
        holds = excess <= 0.0 if LOWER else excess >= 0.0
        good, other = tl.where(holds, u, good), tl.where(holds, other, u)
    return good


@triton.jit
def pulls(pa, ga, begin, kept, TILE: tl.constexpr):
    """(g, classes with a part in the gradient): those whose p is not 0. g is 0 elsewhere, even where the caller's is infinite."""
    active = kept & (fetch(pa, begin, True, TILE, True) != 0.0)
    return tl.where(active, fetch(ga, begin, True, TILE, True), 0.0), active


@triton.jit
def perturb_rows(X, M, P, G, OUT, NODES, SCALES,
                 rows, n, nodes, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, p0, p1, p2, pc, g0, g1, g2, gc, o0, o1, o2, oc, scale,
                 low1, low_n, deep, up1, up_n, shallow,
                 BACK: tl.constexpr, PER_ROW: tl.constexpr, NOISE: tl.constexpr, TILE: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """p, or with BACK J^T g = `INT G h_i (g_i sum h - sum h g) du / scale`, from P = p(x) and G = g.

    low1, low_n: the lower end for one class and for n equal classes; up1, up_n: the upper end. NODES [rows, nodes, 2] has the weights of
    the nodes of longer rows. SCALES [rows] are the scales where each row has its own (PER_ROW); NaN makes the row NaN. PLAIN: the TILE
    of P and G, which have no mask.
    """
    mine = rows_of(X, X, rows, n, d1, d2, TILE)
    row, valid = mine.row, mine.valid
    at, to = operand(mine, X, x0, x1, x2, xc, M, m0, m1, m2, mc, TILE), output(mine, OUT, o0, o1, o2, oc, TILE)
    pa, ga = alone(mine, P, p0, p1, p2, pc, PLAIN), alone(mine, G, g0, g1, g2, gc, PLAIN)
    x, _, top, bad, _, _, _ = survey(at, to, None, False, TILE)
    if PER_ROW:
        scale = parameter(SCALES, scale, mine, PER_ROW)
        bad = bad | (scale != scale)
        scale = tl.where(scale == scale, tl.maximum(scale, LEAST_SCALE), 1.0)
    top = tl.where((top == float("-inf")) | bad, 0.0, top)
    kept = valid
    if TILE.WHOLE:
        x, kept = scaled(x, top, scale)
    low = end(x, kept, at, top, scale, low1, low_n, deep, NOISE, True, TILE)
    up = end(x, kept, at, top, scale, up_n, up1, shallow, NOISE, False, TILE)
    if TILE.WHOLE and BACK:
        g, active = pulls(pa, ga, 0, kept, PLAIN)
    norm = tl.zeros(top.shape, tl.float64)  # p is divided by its sum, so the spacing of the nodes cancels
    out = per_class(0.0, TILE)
    weights = NODES + row.to(tl.int64) * (2 * nodes)
    for i in range(nodes):
        u = node(low, up, i, nodes)
        weight = tl.where((i == 0) | (i == nodes - 1), 0.5, 1.0)
        # the sums of log F and h over the row, and of h g for J^T g
        if TILE.WHOLE:
            log_f, h = law(u - x, NOISE)
            h = tl.where(kept, h, 0.0)
            log_sum, sum_h = wide(tl.where(kept, log_f, 0.0)), wide(h)
            mass = weight * tl.exp(log_sum)
            if BACK:
                out += h * (g * (mass * sum_h).to(tl.float32) - (mass * wide(h * g)).to(tl.float32))
            else:
                out += h * mass.to(tl.float32)
        else:
            a0 = per_lane(0.0, TILE, tl.float64)
            a1, a2 = a0, a0
            for begin in range(0, at.n, TILE.K * TILE.L):
                z, inside = centred(at, begin, top, scale, TILE)
                log_f, h = law(u - z, NOISE)
                h = tl.where(inside, h, 0.0)
                a0 += tl.sum(tl.where(inside, log_f, 0.0), 1, keep_dims=True).to(tl.float64)
                a1 += tl.sum(h, 1, keep_dims=True).to(tl.float64)
                if BACK:
                    pull, _active = pulls(pa, ga, begin, inside, PLAIN)
                    a2 += tl.sum(h * pull, 1, keep_dims=True).to(tl.float64)
            mass, sum_h = weight * tl.exp(total(a0)), total(a1)
            tl.store(weights + 2 * i, (mass * sum_h if BACK else mass).to(tl.float32), mask=valid)
            if BACK:
                tl.store(weights + 2 * i + 1, (mass * total(a2)).to(tl.float32), mask=valid)
        norm += mass * sum_h
    share = over(1.0, norm).to(tl.float32)
    if BACK:
        share = share / scale
    if TILE.WHOLE:
        if BACK:
            kept = active
        put(to, 0, tl.where(bad, float("nan"), tl.where(kept, out * share, 0.0)), at, TILE)
    else:
        tl.debug_barrier()  # the weights of all nodes are in memory
        for begin in range(0, at.n, TILE.K * TILE.L):
            z, inside = centred(at, begin, top, scale, TILE)
            out = per_class(0.0, TILE)
            if BACK:
                pull, inside = pulls(pa, ga, begin, inside, PLAIN)
            for i in range(nodes):
                _, h = law(node(low, up, i, nodes) - z, NOISE)
                weight = tl.load(weights + 2 * i, mask=valid, other=0.0)
                if BACK:
                    out += h * (pull * weight - tl.load(weights + 2 * i + 1, mask=valid, other=0.0))
                else:
                    out += h * weight
            put(to, begin, tl.where(bad, float("nan"), tl.where(inside, out * share, 0.0)), at, TILE)
