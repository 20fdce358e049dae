"""Output layers: the scores `x @ weight.T + bias` are computed and used one tile at a time, and never all stored.

`layer_sums` is the forward pass of softmax: the target's score, and the logsumexp and entropy of all others. `layer_slopes` computes the
tiles again for its gradient. `layer_candidates` lists the scores that may have a probability under a threshold map. Each lane keeps its
maximum over all tiles; the threshold of these maxima, with a Newton step for each tile, is a lower bound of the row's, since more classes
only raise it. `layer_products`, a sparse matrix times a dense one, is the gradient from the candidates.
"""

# pyright: reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import bent, share_of
from .thresholds import over
from .tile import INTERPRETED


@triton.jit
def rounded(s, X):
    """s rounded to the dtype of X, as in a matrix product of tensors like X."""
    return s.to(X.dtype.element_ty).to(tl.float32)


@triton.jit
def tile_of(X, W, B, KEEP, i, j, rows, n, d, x0, x1, w0, w1, b0, k0, k1, BIAS: tl.constexpr, KEPT: tl.constexpr, M: tl.constexpr,
            N: tl.constexpr, F: tl.constexpr):  # fmt: skip
    """The scores of rows i [M] and classes j [N]; -inf for a masked class and beyond the last class."""
    f = tl.arange(0, F)
    xi = X + i.to(tl.int64)[:, None] * x0
    wj = W + j.to(tl.int64)[:, None] * w0
    acc = tl.zeros([M, N], tl.float32)
    for begin in range(0, d, F):
        there = (begin + f < d)[None, :]
        x = tl.load(xi + (begin + f)[None, :] * x1, mask=(i < rows)[:, None] & there, other=0.0)
        w = tl.load(wj + (begin + f)[None, :] * w1, mask=(j < n)[:, None] & there, other=0.0)
        if INTERPRETED:  # the interpreter's product would read bf16 as integers
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    s = rounded(acc, X)
    if BIAS:
        s = rounded(s + tl.load(B + j * b0, mask=j < n, other=0.0).to(tl.float32)[None, :], X)
    free = (j < n)[None, :]
    if KEPT:
        at = i.to(tl.int64)[:, None] * k0 + j.to(tl.int64)[None, :] * k1
        free = free & (tl.load(KEEP + at, mask=(i < rows)[:, None] & free, other=0) != 0)
    return tl.where(free, s, float("-inf"))


@triton.jit
def targets(TARGET, i, there, n):
    """The class of each row in 32 bits, since it is compared with every class: -1 for an index below 0, n for one beyond the classes."""
    return tl.minimum(tl.maximum(tl.load(TARGET + i, mask=there, other=-1), -1), n).to(tl.int32)


@triton.jit
def tell(OUT, s, i, j, t, begin, rows, N: tl.constexpr):
    """Stores the scores of the targets within a tile, and returns where they are, [M, N]."""
    mine = j[None, :] == t[:, None]
    own = tl.sum(tl.where(mine, s, 0.0), 1)
    tl.store(OUT + i, own, mask=(t >= begin) & (t < begin + N) & (i < rows))
    return mine


@triton.jit
def layer_sums(X, W, B, KEEP, TARGET, OWN, LEVEL, ENTROPY, rows, n, d, span, x0, x1, w0, w1, b0, k0, k1, MIXED: tl.constexpr,
               BIAS: tl.constexpr, KEPT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, F: tl.constexpr):  # fmt: skip
    """OWN [rows]: the target's score; LEVEL [rows, parts]: the logsumexp of the other scores in each part of `span` classes; if MIXED,
    ENTROPY [rows, parts]: the entropy of their softmax."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    t = targets(TARGET, i, i < rows, n)
    first = tl.program_id(1) * span
    top = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M], tl.float32)
    mean = tl.zeros([M], tl.float32)  # the sum of exp(s - base) (s - base)
    for begin in range(first, tl.minimum(first + span, n), N):
        j = begin + tl.arange(0, N)
        s = tile_of(X, W, B, KEEP, i, j, rows, n, d, x0, x1, w0, w1, b0, k0, k1, BIAS, KEPT, M, N, F)
        mine = tell(OWN, s, i, j, t, begin, rows, N)
        s = tl.where(mine, float("-inf"), s)
        now = tl.maximum(top, tl.max(s, 1))
        base = tl.where(now > float("-inf"), now, 0.0)  # a NaN stays in the sum
        e, change = tl.exp(s - base[:, None]), tl.exp(top - base)
        if MIXED:
            lower = tl.where(top > float("-inf"), top - base, 0.0)
            mean = change * (mean + z * lower) + tl.sum(e * tl.where(s > float("-inf"), s - base[:, None], 0.0), 1)
        z = z * change + tl.sum(e, 1)
        top = now
    base = tl.where(top > float("-inf"), top, 0.0)
    level = tl.where(z == 0.0, float("-inf"), base + tl.log(z))
    to = i.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(LEVEL + to, level, mask=i < rows)
    if MIXED:
        tl.store(ENTROPY + to, tl.where(z == 0.0, 0.0, tl.log(z) - mean / z), mask=i < rows)


@triton.jit
def layer_slopes(X, W, B, KEEP, TARGET, LEVEL, G, EVEN, U, MIX, OUT, rows, n, d, first, x0, x1, w0, w1, b0, k0, k1, o0,
                 BIAS: tl.constexpr, KEPT: tl.constexpr, SPREAD: tl.constexpr, MIXED: tl.constexpr, M: tl.constexpr,
                 N: tl.constexpr, F: tl.constexpr):  # fmt: skip
    """OUT [rows, classes from `first` to n]: `G[0]` for the target, and for the other classes q `G[1]` with q = exp(s - level), or if MIXED
    q `(G[1] - MIX (s - level))`; SPREAD adds `EVEN U` to every class."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    j = first + tl.program_id(1) * N + tl.arange(0, N)
    there = i < rows
    t = targets(TARGET, i, there, n)
    level = tl.load(LEVEL + i, mask=there, other=0.0)
    own = tl.load(G + 2 * i, mask=there, other=0.0)
    others = tl.load(G + 2 * i + 1, mask=there, other=0.0)
    s = tile_of(X, W, B, KEEP, i, j, rows, n, d, x0, x1, w0, w1, b0, k0, k1, BIAS, KEPT, M, N, F)
    mine = j[None, :] == t[:, None]
    log_q = tl.where(mine, float("-inf"), s) - level[:, None]
    slope = tl.exp(log_q) * others[:, None]
    if MIXED:
        mix = tl.load(MIX + i, mask=there, other=0.0)
        slope -= tl.exp(log_q) * mix[:, None] * tl.where(log_q > float("-inf"), log_q, 0.0)
    if SPREAD:
        even = tl.load(EVEN + i, mask=there, other=0.0)
        slope += even[:, None] * tl.load(U + j, mask=j < n, other=0.0)[None, :]
    slope = tl.where(mine, slope + own[:, None], slope)
    to = OUT + i.to(tl.int64)[:, None] * o0 + (j - first)[None, :]
    tl.store(to, slope.to(OUT.dtype.element_ty), mask=there[:, None] & (j < n)[None, :])


@triton.jit
def better_bound(tops, low, r, LINK: tl.constexpr, P: tl.constexpr):
    """A better lower bound of the threshold from a lower bound and some scores: at least the largest minus 1, then one Newton step.

    Scores are multiplied by the slope: u = x - tau. LINK "steep", above alpha = 2, has no Newton step."""
    low = tl.maximum(low, tl.max(tops, 1) - 1.0)
    if LINK != "steep":
        at = tl.where(low > float("-inf"), low, 0.0)[:, None]
        value, rate = share_of(tops, at, 0.0, 0.0, r, LINK, P, 1.0, False)
        s0, s1 = tl.sum(value, 1), tl.sum(rate, 1)
        low += tl.where(s0 > 1.0, over(bent(s0, r, LINK, P), s1), 0.0)
    return low


POISON = tl.constexpr(1 << 25)  # counts from here on mark a row with NaN or +inf


@triton.jit
def layer_candidates(X, W, B, KEEP, TARGET, LOW, OWN, VALUE, INDEX, COUNT, FLOOR, rows, n, d, span, x0, x1, w0, w1, b0, k0, k1,
                     c, r, LINK: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr, KEPT: tl.constexpr, MOST: tl.constexpr,
                     M: tl.constexpr, N: tl.constexpr, F: tl.constexpr):  # fmt: skip
    """For each row and part of `span` classes: VALUE and INDEX [rows, parts, MOST], the scores that may have a probability, in the order of
    the classes; COUNT, how many there are, of which the lists have the first MOST; FLOOR, below which no score was taken, NaN for a row
    with NaN or +inf. OWN [rows]: the target's score. LOW: a known floor to start from. c: the slope of the map."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < rows
    t = targets(TARGET, i, there, n)
    low = tl.load(LOW + i, mask=there, other=0.0) * c
    first = tl.program_id(1) * span
    part = i * tl.num_programs(1) + tl.program_id(1)  # rows are few enough for offsets in 32 bits
    tops = tl.full([M, N // 2], float("-inf"), tl.float32)  # two classes share a lane, to save registers
    count = tl.zeros([M], tl.int32)
    for begin in range(first, tl.minimum(first + span, n), N):
        j = begin + tl.arange(0, N)
        s = tile_of(X, W, B, KEEP, i, j, rows, n, d, x0, x1, w0, w1, b0, k0, k1, BIAS, KEPT, M, N, F)
        tell(OWN, s, i, j, t, begin, rows, N)
        sound = s < float("inf")
        count = tl.maximum(count, tl.max((sound == 0).to(tl.int32), 1) * POISON)
        s = tl.where(sound, s, float("-inf"))
        tops = tl.maximum(tops, tl.max(tl.reshape(s, [M, N // 2, 2]), 2))
        low = better_bound(tops * c, low, r, LINK, P)
        edge = low / c
        s = tl.where(s > (edge - 7.6e-6 * (1.0 + tl.abs(edge)))[:, None], s, float("-inf"))
        more = tl.where(there, tl.sum((s > float("-inf")).to(tl.int32), 1), 0)
        # one of each row at a time: there are few, and offsets for all scores would not fit the registers
        for turn in range(tl.max(more, 0)):
            last = tl.min(tl.where(s > float("-inf"), j[None, :], n), 1)
            mine = (turn < more) & (count + turn < MOST)
            to = part * MOST + count + turn
            it = j[None, :] == last[:, None]
            tl.store(VALUE + to, tl.max(tl.where(it, s, float("-inf")), 1), mask=mine)
            tl.store(INDEX + to, last, mask=mine)
            s = tl.where(it, float("-inf"), s)
        count += more
    tl.store(COUNT + part, count, mask=there)
    tl.store(FLOOR + part, tl.where(count >= POISON, float("nan"), low / c), mask=there)


@triton.jit
def layer_products(VALUE, INDEX, STARTS, ROWS, OUT, d, r0, r1, o0, o1, E: tl.constexpr, F: tl.constexpr):  # fmt: skip
    """OUT [i] += sum of VALUE[e] ROWS[INDEX[e]] over e from STARTS[i] to STARTS[i + 1], E at a time."""
    i = tl.program_id(0).to(tl.int64)
    begin = tl.load(STARTS + i)
    end = tl.load(STARTS + i + 1)
    if begin < end:  # a row without entries is left alone
        f = tl.program_id(1) * F + tl.arange(0, F)
        inside = f < d
        acc = tl.zeros([F], tl.float32)
        for at in range(begin, end, E):
            e = at + tl.arange(0, E)
            value = tl.load(VALUE + e, mask=e < end, other=0.0)
            row = tl.load(INDEX + e, mask=e < end, other=0).to(tl.int64)
            mask = (e < end)[:, None] & inside[None, :]
            more = tl.load(ROWS + row[:, None] * r0 + f[None, :] * r1, mask=mask, other=0.0).to(tl.float32)
            acc += tl.sum(value[:, None] * more, 0)
        to = OUT + i * o0 + f * o1
        tl.store(to, (tl.load(to, mask=inside, other=0.0).to(tl.float32) + acc).to(OUT.dtype.element_ty), mask=inside)
