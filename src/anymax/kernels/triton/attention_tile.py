"""A tile of attention: from q k^T to scores, and from scores to probabilities by the numbers of each row.

`i` and `j` are the queries and keys of a tile, with shapes that broadcast: [M, 1] and [1, N], or [1, M] and [N, 1] where keys come first.
The numbers of a row have the shape of `i`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .links import LOG2_E, bend, ground, log1p, quick_exp, share_of


@triton.jit
def row_sum(v):
    return tl.sum(v, 1, keep_dims=True)


@triton.jit
def row_max(v):
    return tl.max(v, 1, keep_dims=True)


# -- operands --------------------------------------------------------------------------------------------------------------------


@triton.jit
def load_block(at, first, stride, count, width, N: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr = False):
    """The rows first .. first + N - 1 of a head's matrix, [N, D], with zeros beyond its ends. WHOLE: all of these rows exist."""
    i = first + tl.arange(0, N)[:, None]
    c = tl.arange(0, D)[None, :]
    of = at + i.to(tl.int64) * stride + c
    if WHOLE:
        return tl.load(of, mask=c < width, other=0.0)
    else:
        return tl.load(of, mask=(i < count) & (c < width), other=0.0)


@triton.jit
def once_more(block, at, first, stride, count, width, here, N: tl.constexpr, D: tl.constexpr):
    """The block that `load_block` loaded before a loop. Products of fp32 take operands from registers, too many to keep across the loop, so
    each step loads them again. `here` is always true, but the compiler can't know that before the step, so it can't hoist the load."""
    if block.dtype == tl.float32:
        return load_block(at, first, stride, tl.where(here, count, 0), width, N, D)
    else:
        return block


# -- scores ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def tanh(y):
    """tanh(y) to a few ulp: by its series near 0, where 1 - exp(-2y) loses digits."""
    e = tl.exp(-2.0 * tl.abs(y))
    far = (1.0 - e) / (1.0 + e)
    w = y * y
    near = y * (1.0 + w * (-0.333333333 + w * (0.133333333 + w * (-0.053968254 + w * 0.021869489))))
    return tl.where(w < 0.04, near, tl.where(y < 0.0, -far, far))


@triton.jit
def span(RANGES, b, offset, rows, keys, RANGED: tl.constexpr):
    """(number of keys, number of queries, offset) of a batch; if RANGED, RANGES has these three for each batch."""
    if RANGED:
        length = tl.load(RANGES + b * 3)
        count = tl.load(RANGES + b * 3 + 1)
        return tl.minimum(length, keys), tl.minimum(count, rows), tl.load(RANGES + b * 3 + 2)
    else:
        return keys, rows, offset


@triton.jit
def seen(i0, at, M: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """The keys low <= j < high that some query of i0 .. i0 + M - 1 may see."""
    length, count, offset, left, right = at
    last = tl.minimum(i0 + M, count) - 1 + offset
    low = 0
    high = length
    if CAUSAL:
        high = tl.minimum(high, last + 1)
    if RIGHT:
        high = tl.minimum(high, last + right + 1)
    if LEFT:
        low = tl.maximum(low, i0 + offset - left)
    return low, tl.where(i0 < count, high, 0)


@triton.jit
def whole_blocks(
    i0, at, begin, end, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """The blocks of keys first <= n < last, among begin .. end - 1, that every query of i0 .. i0 + M - 1 sees in full."""
    length, _, offset, left, right = at
    first, last = begin, length // N
    if CAUSAL:
        last = tl.minimum(last, (i0 + offset + 1) // N)
    if RIGHT:
        last = tl.minimum(last, (i0 + offset + right + 1) // N)
    if LEFT:
        first = tl.maximum(first, tl.cdiv(tl.maximum(i0 + M - 1 + offset - left, 0), N))
    last = tl.maximum(tl.minimum(last, end), begin)
    return tl.minimum(first, last), last


@triton.jit
def seeing(j0, at, N: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """The queries low <= i < high that may see some key of j0 .. j0 + N - 1."""
    length, count, offset, left, right = at
    low = 0
    high = count
    if CAUSAL:
        low = tl.maximum(low, j0 - offset)
    if RIGHT:
        low = tl.maximum(low, j0 - offset - right)
    if LEFT:
        high = tl.minimum(high, tl.minimum(j0 + N, length) - offset + left)
    return low, tl.where(j0 < length, high, 0)


@triton.jit
def slope_of(HEADS, head, ALIBI: tl.constexpr):
    """ALiBi's slope of a head, counted over all batches, or of several heads; HEADS has two numbers for each."""
    if ALIBI:
        return tl.load(HEADS + head * 2)
    else:
        return 0.0


@triton.jit
def scores(qk, i, j, i0, j0, at, arrays, scale, cap, slope, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
           LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
           KEEP: tl.constexpr, WHOLE: tl.constexpr = False):  # fmt: skip
    """(scores of a tile, d score / d (scale q k^T)); -inf where a query may not attend. WHOLE: no window or length masks part of it."""
    length, count, offset, left, right = at
    pb, bi, bj, pa, ai, aj, pk, ki, kj = arrays
    x = qk * scale
    rise = 1.0
    if CAP:
        t = tanh(x / cap)
        x = cap * t
        rise = 1.0 - t * t
    inside = (i < count) & (j < length)
    if BIAS:
        x += tl.load(pb + i.to(tl.int64) * bi + j.to(tl.int64) * bj, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(pa + i.to(tl.int64) * ai + j.to(tl.int64) * aj, mask=inside, other=0.0).to(tl.float32)
    if ALIBI:
        x -= slope * tl.abs(i + offset - j).to(tl.float32)
    if KEEP:
        keep = tl.load(pk + i.to(tl.int64) * ki + j.to(tl.int64) * kj, mask=inside, other=0)
        x = tl.where(keep != 0, x, float("-inf"))
    if not WHOLE:
        whole = (i0 + M <= count) & (j0 + N <= length)
        if CAUSAL:
            whole = whole & (j0 + N <= i0 + offset + 1)
        if RIGHT:
            whole = whole & (j0 + N <= i0 + offset + right + 1)
        if LEFT:
            whole = whole & (j0 + left >= i0 + M - 1 + offset)
        if whole == 0:  # a tile in the middle has no key to mask
            if CAUSAL:
                inside = inside & (j <= i + offset)
            if RIGHT:
                inside = inside & (j <= i + offset + right)
            if LEFT:
                inside = inside & (j >= i + offset - left)
            x = tl.where(inside, x, float("-inf"))
    return x, rise


@triton.jit
def kept(i, j, head, seed, drop):
    """The entries that dropout keeps, by Philox of (head, query, key), so that every kernel agrees."""
    nothing = i * 0 + j * 0
    bits, _, _, _ = tl.philox(seed, nothing + j, nothing + i, nothing + head, nothing)
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08 >= drop


# -- probabilities ---------------------------------------------------------------------------------------------------------------


@triton.jit
def parameter(PARAM, i, pl, param, count, LINK: tl.constexpr, P: tl.constexpr, PER_ROW: tl.constexpr):
    """The parameter of a row in fp64: alpha - 1, or the budget."""
    if PER_ROW:
        value = tl.load(PARAM + i.to(tl.int64) * pl, mask=i < count, other=1.5).to(tl.float64)
        return value if LINK == "budget" else value - 1.0
    elif LINK == "power":
        return tl.zeros_like(i).to(tl.float64) + 1.0 / P
    else:
        return tl.zeros_like(i).to(tl.float64) + param


@triton.jit
def constants(top, z, c, LINK: tl.constexpr, P: tl.constexpr):
    """The numbers of a row for `shares`, in fp32, from (top, z): u = c (x - top) + z and p = u^(1/c); for softmax z = log Z. "root" is
    "any" in half precision, where u may have the rounding of fp32, since 1/c is not large."""
    none = top * 0.0
    if LINK == "softmax":
        return (
            top + z.to(tl.float32),
            (z - ((top + z.to(tl.float32)).to(tl.float64) - top)).to(tl.float32),
            none,
            none,
            none,
            none,
        )
    elif LINK == "power" or LINK == "budget":
        a, b = ground(top, z, 1.0 / P)
        return a, b, none, b, none, none
    elif LINK == "root":
        return (z - c * top).to(tl.float32), c.to(tl.float32), (1.0 / c).to(tl.float32), none, none, none
    elif LINK == "any":
        a, b, e, d = bend(top, z, c, 1.0 / c)
        return a, b, e, d, none, none
    else:  # mixed
        near = (top - z / c).to(tl.float32)
        a, b = near, (c * (near - top) + z).to(tl.float32)
        w, r, log_z, _ = bend(top, z, c, 1.0 / c)
        return a, b, w, r, log_z, c.to(tl.float32)


@triton.jit
def recalled(ROWS, plane, STATE, i, rows, c, LINK: tl.constexpr, P: tl.constexpr, EXACT: tl.constexpr):
    """(top, `constants`, anchor, rest of delta) of queries, from the four planes of ROWS that `attention_queries` has written."""
    inside = i < rows
    anchor = tl.load(ROWS + 2 * plane + i, mask=inside, other=0.0)
    rest = 0.0
    if EXACT or LINK == "mixed":
        rest = tl.load(ROWS + 3 * plane + i, mask=inside, other=0.0)
    if LINK == "any" or LINK == "mixed":
        top = tl.load(STATE + 2 * i, mask=inside, other=0.0).to(tl.float32)
        row = constants(top, tl.load(STATE + 2 * i + 1, mask=inside, other=1.0), c, LINK, P)
    else:
        top = 0.0
        a = tl.load(ROWS + i, mask=inside, other=0.0)
        if LINK == "root":
            row = a, c.to(tl.float32), (1.0 / c).to(tl.float32), 0.0, 0.0, 0.0
        else:
            b = 0.0
            if EXACT:
                b = tl.load(ROWS + plane + i, mask=inside, other=0.0)
            row = a, b, 0.0, b, 0.0, 0.0
    return top, row, anchor, rest


@triton.jit
def remembered(ROWS, plane, i, rows, row, anchor, rest, LINK: tl.constexpr, EXACT: tl.constexpr):
    """Stores the numbers for `recalled`. In half precision a query has two, not four: the others are below the rounding of its scores."""
    inside = i < rows
    if EXACT or LINK == "mixed":
        tl.store(ROWS + 2 * plane + i, anchor, mask=inside)
        tl.store(ROWS + 3 * plane + i, rest, mask=inside)
    else:
        tl.store(ROWS + 2 * plane + i, anchor + rest, mask=inside)
    if LINK != "any" and LINK != "mixed":
        tl.store(ROWS + i, row[0], mask=inside)
        if EXACT:
            tl.store(ROWS + plane + i, row[1], mask=inside)


@triton.jit
def added(s, lost, v):
    """(s + v, `lost` plus the rounding error of that sum): a compensated sum with the digits of fp64, which many GPUs compute slowly."""
    t = s + v
    w = t - s
    return t, lost + ((s - (t - w)) + (v - w))


# -- softmax block by block ------------------------------------------------------------------------------------------------------


@triton.jit
def units(scale, FOLD: tl.constexpr):
    """(unit, factor): exp(score) is 2^(unit x) for x = factor q k^T. FOLD: nothing is added to the scores and the scale is above 0, so
    the scale is within the unit, and one instruction computes the exponent."""
    if FOLD:
        return scale * LOG2_E, 1.0
    else:
        return LOG2_E, scale


@triton.jit
def risen(x, top, level, s0, lost, unit):
    """(2^(unit x - level), the factor of the previous sums, top, level, s0, lost) after a tile of scores. `top` is the maximum of a row,
    `level` is unit top as rounded, and s0 and lost are as in `added`."""
    top = tl.maximum(top, row_max(x))
    now = top * unit
    base = tl.where(now > float("-inf"), now, 0.0)
    fade = tl.exp2(level - base)
    p = tl.exp2(tl.fma(x, unit, -base))
    s0, lost = added(s0 * fade, lost * fade, row_sum(p))
    return p, fade, top, now, s0, lost


@triton.jit
def settled(top, level, s0, lost, unit, scale, FOLD: tl.constexpr):
    """(the highest score, the sum of exp(score - highest) in fp64) of each row, after the last tile of `risen`."""
    rounded = tl.where(top > float("-inf"), level - top.to(tl.float64) * unit, 0.0)
    high = top * scale if FOLD else top
    return high, (s0.to(tl.float64) + lost) * (1.0 + rounded * 0.6931471805599453)


@triton.jit
def fall(s0, s1, c, LINK: tl.constexpr, P: tl.constexpr):
    """Newton's step on the r-norm of u, r = 1 / c: `s0 (1 - s0^-c) / s1`, in fp32, and without a logarithm if the power is 1 or 2."""
    s0, s1 = s0.to(tl.float32), s1.to(tl.float32)
    sound = (s0 > 0.0) & (s1 > 0.0)
    if LINK == "power" and P == 1:
        step = s0 - 1.0
    elif LINK == "power" and P == 2:
        root = tl.sqrt(tl.where(sound, s0, 1.0))
        step = (s0 - 1.0) * (root / (root + 1.0))
    else:
        step = s0 * (1.0 - tl.exp(-c.to(tl.float32) * tl.log(tl.where(sound, s0, 1.0))))
    return tl.where(sound, step / tl.where(sound, s1, 1.0), 0.0)


@triton.jit
def shares(x, top, row, LINK: tl.constexpr, P: tl.constexpr):
    """(p, s) of a tile, with s = 1 / omega''(p), the derivative of p by its score at a fixed threshold."""
    a, b, e, d, f, c = row
    if LINK == "softmax":
        p = tl.where(x > float("-inf"), quick_exp((x - a) - b), 0.0)
        p = tl.where(x == x, p, x)
        return p, p
    elif LINK == "mixed":
        above = (x - a) * c + b
        w = (x - top) * e
        far = c > 0.3  # above, p is a power of u; below, it comes from log(1 + w)
        inside = tl.where(far, above > 0.0, w > -1.0) & (x > float("-inf"))
        logs = tl.where(
            far, d * tl.log(tl.where(inside & far, above, 1.0)), d * log1p(tl.where(inside & (far == 0), w, 0.0)) + f
        )
        p = tl.where(inside, tl.exp(logs), 0.0)
        s = tl.where(inside & (p > 0.0), tl.exp(tl.minimum((1.0 - c) * logs, 80.0)), 0.0)
        return p, s
    elif LINK == "root":
        u = x * b + a
        inside = u > 0.0
        log_u = tl.log2(tl.where(inside, u, 1.0))
        return tl.where(inside, tl.exp2(e * log_u), 0.0), tl.where(inside, tl.exp2((e - 1.0) * log_u), 0.0)
    elif LINK == "any":  # a, b, e, d come from `bend`
        w = (x - top) * a
        inside = (w > -1.0) & (x > float("-inf"))
        w = tl.where(inside, w, 0.0)
        value = tl.where(inside, tl.exp(b * log1p(w) + e), 0.0)
        rate = value / (d * (1.0 + w))
        return value, rate
    else:
        return share_of(x, a, b, 0.0, 0.0, LINK, P, 1.0 / P, False)


@triton.jit
def lean(p, s, c):
    """dp/dalpha at a fixed level: `-s (log p)^2 phi((alpha-1) log p)` with `phi(w) = (1 + e^w (w - 1)) / w^2`."""
    inside = p > 0.0
    log_p = tl.log(tl.where(inside, p, 1.0))
    w = c * log_p
    near = tl.abs(w) < 0.3
    series = 0.5 + w * (0.333333333 + w * (0.125 + w * (0.033333333 + w * (0.0069444444 + w * 0.0011904762))))
    safe = tl.where(near, 1.0, w)
    phi = tl.where(near, series, (1.0 + tl.exp(safe) * (safe - 1.0)) / (safe * safe))
    return tl.where(inside, -s * log_p * log_p * phi, 0.0)
