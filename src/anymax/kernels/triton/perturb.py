"""Perturb max: `p_i = INT G(u) h(u - z_i) du`, z = (x - max x) / scale, G(u) = prod_j F(u - z_j), by the trapezoid rule.

The nodes are as in mappings/perturb_max.py, but the ends are found differently. Each node takes a sum over the row, then each class a sum
over the nodes. Arithmetic is the bottleneck, not memory, so rows of any length are read in steps.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import law
from .tile import fetch, operand, place, put, survey, total

FAR_BELOW = tl.constexpr(-1e15)


@triton.jit
def centred(at, begin, top, scale, MASKED: tl.constexpr, FAR: tl.constexpr, K: tl.constexpr, L: tl.constexpr):
    """(z, kept); z of a masked score is so low that it never wins."""
    x = fetch(at, begin, True, MASKED, FAR, K, L, True)
    kept = (x > float("-inf")) & (x < float("inf"))
    return tl.maximum(tl.where(kept, (tl.where(kept, x, top) - top) / scale, FAR_BELOW), FAR_BELOW), kept


@triton.jit
def log_g(at, u, top, scale, NOISE: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
          L: tl.constexpr):  # fmt: skip
    acc = tl.zeros([R, 1, L], tl.float64)
    for begin in range(0, at[6], K * L):
        z, kept = centred(at, begin, top, scale, MASKED, FAR, K, L)
        log_f, _ = law(u - z, NOISE)
        acc += tl.sum(tl.where(kept, log_f, 0.0), 1, keep_dims=True).to(tl.float64)
    return total(acc)


@triton.jit
def end(at, top, scale, near, away, goal, NOISE: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
        L: tl.constexpr, LOWER: tl.constexpr):  # fmt: skip
    """The end of the nodes: a u with log G(u) <= -goal (LOWER) or >= -goal. `near` satisfies that in any row, and bisection moves it
    towards `away`."""
    good = tl.zeros([R, 1, 1], tl.float32) + near
    other = tl.zeros([R, 1, 1], tl.float32) + away
    for _ in range(9):
        u = 0.5 * (good + other)
        excess = log_g(at, u, top, scale, NOISE, MASKED, FAR, R, K, L) + goal
        holds = excess <= 0.0 if LOWER else excess >= 0.0
        good, other = tl.where(holds, u, good), tl.where(holds, other, u)
    return good


@triton.jit
def pick(v, q, Q: tl.constexpr):
    """v[..., q] for v [R, 1, Q]."""
    return tl.sum(tl.where(tl.arange(0, Q)[None, None, :] == q, v, 0.0), 2, keep_dims=True)


@triton.jit
def perturb_rows(X, M, G, OUT,
                 rows, n, nodes, d1, d2, x0, x1, x2, xc, m0, m1, m2, mc, g0, g1, g2, gc, o0, o1, o2, oc, scale,
                 low1, low_n, deep, up1, up_n, shallow,
                 BACK: tl.constexpr, NOISE: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr, UNIT: tl.constexpr, Q: tl.constexpr,
                 R: tl.constexpr, K: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """p, or with BACK J^T g = `INT G h_i (g_i sum h - sum h g) du / scale`.

    low1, low_n: the lower end for one class and for n equal classes; up1, up_n: the upper end.
    """
    n = n * UNIT
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None, None]
    valid = row < rows
    xo, mo, go = (
        place(row, d1, d2, x0, x1, x2, UNIT),
        place(row, d1, d2, m0, m1, m2, UNIT),
        place(row, d1, d2, g0, g1, g2, UNIT),
    )
    at = operand(X, xo, xc, M, mo, mc, n, valid, 0, False)
    ga = operand(G, go, gc, M, mo, mc, n, valid, 0, False)
    oo = place(row, d1, d2, o0, o1, o2, UNIT)
    _, _, top, bad = survey(at, at, None, MASKED, FAR, R, K, L, False)
    empty = top == float("-inf")
    top = tl.where(empty | bad, 0.0, top)
    low = end(at, top, scale, low1, low_n, deep, NOISE, MASKED, FAR, R, K, L, True)
    up = end(at, top, scale, up_n, up1, shallow, NOISE, MASKED, FAR, R, K, L, False)
    # for each node, the sums of log F and h over the row, and of h g for J^T g
    q = tl.arange(0, Q)[None, None, :]
    mass = tl.zeros([R, 1, Q], tl.float64)
    sum_h = tl.zeros([R, 1, Q], tl.float64)
    sum_hg = tl.zeros([R, 1, Q], tl.float64)
    for i in range(nodes):
        s = i / (nodes - 1.0)
        u = (low * (1.0 - s) + up * s).to(tl.float32)
        w = tl.where((i == 0) | (i == nodes - 1), 0.5, 1.0)
        a0 = tl.zeros([R, 1, L], tl.float64)
        a1 = tl.zeros([R, 1, L], tl.float64)
        a2 = tl.zeros([R, 1, L], tl.float64)
        for begin in range(0, n, K * L):
            z, kept = centred(at, begin, top, scale, MASKED, FAR, K, L)
            log_f, h = law(u - z, NOISE)
            h = tl.where(kept, h, 0.0)
            a0 += tl.sum(tl.where(kept, log_f, 0.0), 1, keep_dims=True).to(tl.float64)
            a1 += tl.sum(h, 1, keep_dims=True).to(tl.float64)
            if BACK:
                g = tl.where(kept, fetch(ga, begin, True, False, FAR, K, L, True), 0.0)
                a2 += tl.sum(h * g, 1, keep_dims=True).to(tl.float64)
        here = q == i
        mass = tl.where(here, w * tl.exp(total(a0)), mass)
        sum_h = tl.where(here, total(a1), sum_h)
        if BACK:
            sum_hg = tl.where(here, total(a2), sum_hg)
    norm = tl.sum(mass * sum_h, 2, keep_dims=True)  # p is divided by its sum, so the spacing of the nodes cancels
    share = tl.where(norm > 0.0, 1.0 / tl.where(norm > 0.0, norm, 1.0), 0.0)
    for begin in range(0, n, K * L):
        z, kept = centred(at, begin, top, scale, MASKED, FAR, K, L)
        out = tl.zeros([R, K, L], tl.float32)
        if BACK:
            g = tl.where(kept, fetch(ga, begin, True, False, FAR, K, L, True), 0.0)
        for i in range(nodes):
            s = i / (nodes - 1.0)
            _, h = law((low * (1.0 - s) + up * s).to(tl.float32) - z, NOISE)
            if BACK:
                out += h * (
                    g * pick(mass * sum_h * share, i, Q).to(tl.float32)
                    - pick(mass * sum_hg * share, i, Q).to(tl.float32)
                )
            else:
                out += h * pick(mass * share, i, Q).to(tl.float32)
        if BACK:
            out = out / scale
        out = tl.where(bad, float("nan"), tl.where(kept, out, 0.0))
        put(OUT, oo, oc, begin, out, at, FAR, K, L)
