"""Sinkhorn of 4 x 4 matrices: kernels that keep a matrix in the registers of one thread, in the log domain, so that no score overflows.

A row of a matrix is a tile [B, 4]; sums over columns are sums along it, sums over rows are those of four tiles.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .operands import on_device_of

Tensor = torch.Tensor

BLOCK = 128  # matrices of a program
PROGRAMS = 660  # of a gradient, each of which takes several blocks: as many as an H100 runs at once
KEPT = 1 << 24  # numbers, at most, of the potentials that they keep; 64 programs keep theirs in any case


@triton.jit
def row_scores(X, at, inside, slope):
    """(z, live, wrong) of one row of each matrix: scores less their maximum, times the slope; a NaN or +inf is wrong."""
    x = tl.load(X + at, mask=inside, other=0.0)
    wrong = tl.max(tl.where((x != x) | (x == float("inf")), 1.0, 0.0), axis=1, keep_dims=True)
    kept = x > float("-inf")
    high = tl.max(tl.where((x == x) & (x < float("inf")), x, float("-inf")), axis=1, keep_dims=True)
    live = high > float("-inf")
    z = tl.maximum((x - tl.where(live, high, 0.0)) * slope, -1.0e30)
    return tl.where(kept & (wrong == 0.0), z, float("-inf")), tl.where(live, 1.0, 0.0), wrong


@triton.jit
def column_shares(live, columns_live):
    """log of what each column shall sum to: equal shares of the number of rows with an entry, among the columns with one."""
    count = tl.sum(columns_live, axis=1, keep_dims=True)
    return tl.log(tl.where((live > 0.0) & (count > 0.0), live / tl.where(count > 0.0, count, 1.0), 1.0))


@triton.jit
def of_row(z, g):
    """(f, share): the potential that gives the row its sum, and its entries then."""
    s = z + g
    high = tl.max(s, axis=1, keep_dims=True)
    high = tl.where(high > float("-inf"), high, 0.0)
    e = tl.exp(s - high)
    total = tl.sum(e, axis=1, keep_dims=True)
    total = tl.where(total > 0.0, total, 1.0)
    return -high - tl.log(total), e / total


@triton.jit
def of_columns(z0, z1, z2, z3, f0, f1, f2, f3):
    """(e of each row, total, high): exponentials of z + f less the largest of their column, and their sum, 1 where there is none."""
    s0, s1, s2, s3 = z0 + f0, z1 + f1, z2 + f2, z3 + f3
    high = tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3))
    high = tl.where(high > float("-inf"), high, 0.0)
    e0, e1, e2, e3 = tl.exp(s0 - high), tl.exp(s1 - high), tl.exp(s2 - high), tl.exp(s3 - high)
    total = e0 + e1 + e2 + e3
    return e0, e1, e2, e3, tl.where(total > 0.0, total, 1.0), high


@triton.jit
def iterated(z0, z1, z2, z3, g):
    """The shares of each row at the potentials g of columns, then (e of each row, total, high) of columns at those of rows."""
    f0, p0 = of_row(z0, g)
    f1, p1 = of_row(z1, g)
    f2, p2 = of_row(z2, g)
    f3, p3 = of_row(z3, g)
    e0, e1, e2, e3, total, high = of_columns(z0, z1, z2, z3, f0, f1, f2, f3)
    return p0, p1, p2, p3, e0, e1, e2, e3, total, high


@triton.jit
def next_columns(z0, z1, z2, z3, g, share):
    """The potentials of columns after one iteration."""
    _, _, _, _, _, _, _, _, total, high = iterated(z0, z1, z2, z3, g)
    return share - high - tl.log(total)


@triton.jit
def store(OUT, at, inside, v0, v1, v2, v3, factor):
    tl.store(OUT + at, v0 * factor, mask=inside)
    tl.store(OUT + at + 4, v1 * factor, mask=inside)
    tl.store(OUT + at + 8, v2 * factor, mask=inside)
    tl.store(OUT + at + 12, v3 * factor, mask=inside)


@triton.jit
def matrices(X, block, count, slope, B: tl.constexpr):
    """The scores of B matrices, where their rows lie, which are there, the sums of their columns, and which are wrong."""
    k = tl.cast(block, tl.int64) * B + tl.arange(0, B)
    at = k[:, None] * 16 + tl.arange(0, 4)[None, :]
    inside = (k < count)[:, None] & (tl.arange(0, 4) < 4)[None, :]
    z0, l0, w0 = row_scores(X, at, inside, slope)
    z1, l1, w1 = row_scores(X, at + 4, inside, slope)
    z2, l2, w2 = row_scores(X, at + 8, inside, slope)
    z3, l3, w3 = row_scores(X, at + 12, inside, slope)
    there = tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3)) > float("-inf")
    share = column_shares(l0 + l1 + l2 + l3, tl.where(there, 1.0, 0.0))
    return z0, z1, z2, z3, at, inside, share, (w0 + w1 + w2 + w3) > 0.0


@triton.jit
def sinkhorn_forward(X, OUT, count, iterations, slope, B: tl.constexpr):
    z0, z1, z2, z3, at, inside, share, wrong = matrices(X, tl.program_id(0), count, slope, B)
    g = tl.zeros([B, 4], tl.float32)
    for _ in range(1, iterations):
        g = next_columns(z0, z1, z2, z3, g, share)
    _, _, _, _, e0, e1, e2, e3, total, _ = iterated(z0, z1, z2, z3, g)
    store(OUT, at, inside, e0, e1, e2, e3, tl.where(wrong, float("nan"), tl.exp(share) / total))


@triton.jit
def back_row(q, p, of_column, of_row):
    """(part, t): what the entries q of a column half step pass on with the gradient of the columns, and those p of a row half step."""
    d = q * of_column
    t = of_row - tl.sum(d, axis=1, keep_dims=True)
    return d + p * t, p * t


@triton.jit
def weigh(G, at, inside, p):
    g = tl.load(G + at, mask=inside, other=0.0)
    return tl.where(p > 0.0, p * g, 0.0)


@triton.jit
def sinkhorn_backward(X, G, OUT, PAST, count, blocks, iterations, slope, B: tl.constexpr):
    """The gradient of the scores. PAST [programs, iterations, B, 4] has the potentials of columns before each iteration."""
    lane = tl.arange(0, B)[:, None] * 4 + tl.arange(0, 4)[None, :]
    past = PAST + tl.program_id(0).to(tl.int64) * iterations * (B * 4) + lane
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        z0, z1, z2, z3, at, inside, share, wrong = matrices(X, block, count, slope, B)
        g = tl.zeros([B, 4], tl.float32)
        tl.debug_barrier()
        for k in range(iterations - 1):
            tl.store(past + k * (B * 4), g)
            g = next_columns(z0, z1, z2, z3, g, share)
        tl.debug_barrier()
        p0, p1, p2, p3, q0, q1, q2, q3, total, _ = iterated(z0, z1, z2, z3, g)
        q0, q1, q2, q3 = q0 / total, q1 / total, q2 / total, q3 / total
        sums = tl.exp(share)
        d0 = weigh(G, at, inside, q0 * sums)
        d1 = weigh(G, at + 4, inside, q1 * sums)
        d2 = weigh(G, at + 8, inside, q2 * sums)
        d3 = weigh(G, at + 12, inside, q3 * sums)
        r0, r1 = tl.sum(d0, axis=1, keep_dims=True), tl.sum(d1, axis=1, keep_dims=True)
        r2, r3 = tl.sum(d2, axis=1, keep_dims=True), tl.sum(d3, axis=1, keep_dims=True)
        c = d0 + d1 + d2 + d3
        for back in range(1, iterations + 1):
            e0, t0 = back_row(q0, p0, c, r0)
            e1, t1 = back_row(q1, p1, c, r1)
            e2, t2 = back_row(q2, p2, c, r2)
            e3, t3 = back_row(q3, p3, c, r3)
            d0, d1, d2, d3 = d0 - e0, d1 - e1, d2 - e2, d3 - e3
            c = -(t0 + t1 + t2 + t3)
            r0, r1, r2, r3 = r0 * 0.0, r1 * 0.0, r2 * 0.0, r3 * 0.0
            more = back < iterations
            g = tl.load(past + (iterations - 1 - back) * (B * 4), mask=more & (lane >= 0), other=0.0)
            p0, p1, p2, p3, q0, q1, q2, q3, total, _ = iterated(z0, z1, z2, z3, g)
            q0, q1, q2, q3 = q0 / total, q1 / total, q2 / total, q3 / total
        store(OUT, at, inside, d0, d1, d2, d3, tl.where(wrong, float("nan"), slope))


def run(x: Tensor, g: Tensor | None, iterations: int, temperature: float) -> Tensor:
    """P of contiguous scores [..., 4, 4], or with its gradient g that of the scores."""
    out, count = torch.empty_like(x), x.numel() // 16
    if not count:
        return out
    blocks, slope = triton.cdiv(count, BLOCK), 1.0 / max(temperature, 1e-37)
    with on_device_of(x, g):
        if g is None:
            sinkhorn_forward[(blocks,)](x, out, count, iterations, slope, B=BLOCK, num_warps=4)
        else:
            programs = min(blocks, PROGRAMS, max(64, KEPT // (iterations * BLOCK * 4)))
            past = torch.empty(programs * iterations * BLOCK * 4, dtype=torch.float32, device=x.device)
            sinkhorn_backward[(programs,)](x, g, out, past, count, blocks, iterations, slope, B=BLOCK, num_warps=4)
    return out
