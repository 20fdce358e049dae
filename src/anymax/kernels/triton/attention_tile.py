"""A tile of attention: from q k^T to scores, and from scores to probabilities by the numbers of each row.

`i` and `j` are the queries and keys of a tile, with shapes that broadcast: [M, 1] and [1, N], or [1, M] and [N, 1] where keys come first.
The numbers of a row have the shape of `i`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .attention_operands import load_block, once_more
from .links import LOG2_E, bend, ground, log1p, quick_exp, share_of, whole_power


@triton.jit
def row_sum(v):
    return tl.sum(v, 1, keep_dims=True)


@triton.jit
def row_max(v):
    return tl.max(v, 1, keep_dims=True)


# -- scores ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def slope_of(c, scale, VIEW: tl.constexpr):
    """What u of a threshold map rises by for each unit of x = factor q k^T; see `units`."""
    return c.to(tl.float32) * scale if VIEW.FOLD else c


@triton.jit
def units(scale, VIEW: tl.constexpr):
    """(unit, factor): exp(score) is 2^(unit x) for x = factor q k^T. FOLD: nothing is added to the scores and the scale is above 0, so
    the scale is within the unit, or the slope of a threshold map, and one instruction computes the exponent, or u."""
    if VIEW.FOLD:
        return scale * LOG2_E, 1.0
    else:
        return LOG2_E, scale


@triton.jit
def tanh(y):
    """tanh(y) to a few ulp: by its series near 0, where 1 - exp(-2y) loses digits."""
    e = tl.exp(-2.0 * tl.abs(y))
    far = (1.0 - e) / (1.0 + e)
    w = y * y
    near = y * (1.0 + w * (-0.333333333 + w * (0.133333333 + w * (-0.053968254 + w * 0.021869489))))
    return tl.where(w < 0.04, near, tl.where(y < 0.0, -far, far))


@triton.jit
def seen(i0, at, M: tl.constexpr, VIEW: tl.constexpr):
    """The keys low <= j < high that some query of i0 .. i0 + M - 1 may see."""
    last = tl.minimum(i0 + M, at.count) - 1 + at.offset
    low = 0
    high = at.length
    if VIEW.CAUSAL:
        high = tl.minimum(high, last + 1)
    if VIEW.RIGHT:
        high = tl.minimum(high, last + at.right + 1)
    if VIEW.LEFT:
        low = tl.maximum(low, i0 + at.offset - at.left)
    return low, tl.where(i0 < at.count, high, 0)


@triton.jit
def whole_blocks(i0, at, begin, end, M: tl.constexpr, N: tl.constexpr, VIEW: tl.constexpr):
    """The blocks of keys first <= n < last, among begin .. end - 1, that every query of i0 .. i0 + M - 1 sees in full."""
    first, last = begin, at.length // N
    if VIEW.CAUSAL:
        last = tl.minimum(last, (i0 + at.offset + 1) // N)
    if VIEW.RIGHT:
        last = tl.minimum(last, (i0 + at.offset + at.right + 1) // N)
    if VIEW.LEFT:
        first = tl.maximum(first, tl.cdiv(tl.maximum(i0 + M - 1 + at.offset - at.left, 0), N))
    last = tl.maximum(tl.minimum(last, end), begin)
    return tl.minimum(first, last), last


@triton.jit
def seeing(j0, at, N: tl.constexpr, VIEW: tl.constexpr):
    """The queries low <= i < high that may see some key of j0 .. j0 + N - 1."""
    low = 0
    high = at.count
    if VIEW.CAUSAL:
        low = tl.maximum(low, j0 - at.offset)
    if VIEW.RIGHT:
        low = tl.maximum(low, j0 - at.offset - at.right)
    if VIEW.LEFT:
        high = tl.minimum(high, tl.minimum(j0 + N, at.length) - at.offset + at.left)
    return low, tl.where(j0 < at.length, high, 0)


@triton.jit
def scores(
    qk, i, j, i0, j0, at, terms, M: tl.constexpr, N: tl.constexpr, VIEW: tl.constexpr, WHOLE: tl.constexpr = False
):
    """(scores of a tile, d score / d (scale q k^T)); -inf where a query may not attend. WHOLE: no window or length masks part of it."""
    x = qk * terms.scale
    rise = 1.0
    if VIEW.CAP:
        t = tanh(x / terms.cap)
        x = terms.cap * t
        rise = 1.0 - t * t
    inside = (i < at.count) & (j < at.length)
    far_i, far_j = i.to(tl.int64), j.to(tl.int64)
    if VIEW.BIAS:
        x += tl.load(terms.pb + far_i * terms.bi + far_j * terms.bj, mask=inside, other=0.0).to(tl.float32)
    if VIEW.ADD:
        x += tl.load(terms.pa + far_i * terms.ai + far_j * terms.aj, mask=inside, other=0.0).to(tl.float32)
    if VIEW.ALIBI:
        x -= terms.slope * tl.abs(i + at.offset - j).to(tl.float32)
    if VIEW.KEEP:
        keep = tl.load(terms.pk + far_i * terms.ki + far_j * terms.kj, mask=inside, other=0)
        x = tl.where(keep != 0, x, float("-inf"))
    if not WHOLE:
        whole = (i0 + M <= at.count) & (j0 + N <= at.length)
        if VIEW.CAUSAL:
            whole = whole & (j0 + N <= i0 + at.offset + 1)
        if VIEW.RIGHT:
            whole = whole & (j0 + N <= i0 + at.offset + at.right + 1)
        if VIEW.LEFT:
            whole = whole & (j0 + at.left >= i0 + M - 1 + at.offset)
        if whole == 0:  # a tile in the middle has no key to mask
            if VIEW.CAUSAL:
                inside = inside & (j <= i + at.offset)
            if VIEW.RIGHT:
                inside = inside & (j <= i + at.offset + at.right)
            if VIEW.LEFT:
                inside = inside & (j >= i + at.offset - at.left)
            x = tl.where(inside, x, float("-inf"))
    return x, rise


@triton.jit
def score_tile(
    q, own, n, i, i0, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr, WHOLE: tl.constexpr = False
):
    """(the keys' places, the n-th block of keys, and the `scores` of M queries of a head for them)."""
    j0 = n * N
    j = j0 + tl.arange(0, N)[None, :]
    k = load_block(own.k, j0, N, D, WHOLE)
    q = once_more(q, own.q, i0, j0 < own.k.count, M, D)
    x, rise = scores(tl.dot(q, tl.trans(k), input_precision="ieee"), i, j, i0, j0, own.at, own.terms, M, N, VIEW, WHOLE)
    return j, k, x, rise


@triton.jit
def kept(i, j, head, seed, drop):
    """The entries that dropout keeps, by Philox of (head, query, key), so that every kernel agrees."""
    nothing = i * 0 + j * 0
    bits, _, _, _ = tl.philox(seed, nothing + j, nothing + i, nothing + head, nothing)
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08 >= drop


@triton.jit
def dropped(v, i, j, head, seed, drop, VIEW: tl.constexpr):
    """v of a tile after dropout."""
    if VIEW.DROP:
        return tl.where(kept(i, j, head, seed, drop), v / (1.0 - drop), 0.0)
    else:
        return v


# -- probabilities ---------------------------------------------------------------------------------------------------------------


@triton.jit
def parameter(arrays, call, b, h, i, FORM: tl.constexpr):
    """The parameter of a row in fp64: alpha - 1, or the budget."""
    if FORM.PER_ROW:
        steps = call.steps.param
        own = arrays.param + b.to(tl.int64) * steps.b + h.to(tl.int64) * steps.h
        value = tl.load(own + i.to(tl.int64) * steps.i, mask=i < call.rows, other=1.5).to(tl.float64)
        return value if FORM.LINK == "budget" else value - 1.0
    elif FORM.LINK == "power":
        return tl.zeros_like(i).to(tl.float64) + FORM.SLOPE
    else:
        return tl.zeros_like(i).to(tl.float64) + call.shape


@triton.jit
def constants(top, z, c, slope, FORM: tl.constexpr):
    """The numbers of a row for `shares`, in fp32, from (top, z): u = slope (x - top) + z and p = u^(1/c); for softmax z = log Z. The slope
    is c, unless x is q k^T without its scale. "root" is "any" in half precision, where u may have the rounding of fp32, since 1/c is not
    large."""
    none = top * 0.0
    if FORM.LINK == "softmax":
        return (
            top + z.to(tl.float32),
            (z - ((top + z.to(tl.float32)).to(tl.float64) - top)).to(tl.float32),
            none,
            none,
            none,
            none,
        )
    elif FORM.LINK == "root" or (FORM.LINK == "power" and not FORM.EXACT):
        return (z - slope * top).to(tl.float32), slope.to(tl.float32), (1.0 / c).to(tl.float32), none, none, none
    elif FORM.LINK == "power" or FORM.LINK == "budget":
        a, b = ground(top, z, FORM.SLOPE)
        return a, b, none, b, none, none
    elif FORM.LINK == "any":
        a, b, e, d = bend(top, z, c, 1.0 / c)
        return a, b, e, d, none, none
    else:  # mixed
        near = (top - z / c).to(tl.float32)
        a, b = near, (c * (near - top) + z).to(tl.float32)
        w, r, log_z, _ = bend(top, z, c, 1.0 / c)
        return a, b, w, r, log_z, c.to(tl.float32)


@triton.jit
def recalled(ROWS, plane, STATE, i, rows, c, slope, FORM: tl.constexpr, EXACT: tl.constexpr):
    """(top, `constants`, anchor, rest of delta) of queries, from the four planes of ROWS that `attention_queries` has written."""
    inside = i < rows
    anchor = tl.load(ROWS + 2 * plane + i, mask=inside, other=0.0)
    rest = 0.0
    if EXACT or FORM.LINK == "mixed":
        rest = tl.load(ROWS + 3 * plane + i, mask=inside, other=0.0)
    if FORM.LINK == "any" or FORM.LINK == "mixed":
        top = tl.load(STATE + 2 * i, mask=inside, other=0.0).to(tl.float32)
        row = constants(top, tl.load(STATE + 2 * i + 1, mask=inside, other=1.0), c, slope, FORM)
    else:
        top = 0.0
        a = tl.load(ROWS + i, mask=inside, other=0.0)
        if FORM.LINK == "root" or (FORM.LINK == "power" and not EXACT):
            row = a, slope.to(tl.float32), (1.0 / c).to(tl.float32), 0.0, 0.0, 0.0
        else:
            b = 0.0
            if EXACT:
                b = tl.load(ROWS + plane + i, mask=inside, other=0.0)
            row = a, b, 0.0, b, 0.0, 0.0
    return top, row, anchor, rest


@triton.jit
def remembered(ROWS, plane, i, rows, row, anchor, rest, FORM: tl.constexpr, EXACT: tl.constexpr):
    """Stores the numbers for `recalled`. In half precision a query has two, not four: the others are below the rounding of its scores."""
    inside = i < rows
    if EXACT or FORM.LINK == "mixed":
        tl.store(ROWS + 2 * plane + i, anchor, mask=inside)
        tl.store(ROWS + 3 * plane + i, rest, mask=inside)
    else:
        tl.store(ROWS + 2 * plane + i, anchor + rest, mask=inside)
    if FORM.LINK != "any" and FORM.LINK != "mixed":
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
def settled(top, level, s0, lost, unit, scale, VIEW: tl.constexpr):
    """(the highest score, the sum of exp(score - highest) in fp64) of each row, after the last tile of `risen`."""
    rounded = tl.where(top > float("-inf"), level - top.to(tl.float64) * unit, 0.0)
    high = top * scale if VIEW.FOLD else top
    return high, (s0.to(tl.float64) + lost) * (1.0 + rounded * 0.6931471805599453)


@triton.jit
def fall(s0, s1, c, FORM: tl.constexpr):
    """Newton's step on the r-norm of u, r = 1 / c: `s0 (1 - s0^-c) / s1`, in fp32, and without a logarithm if the power is 1 or 2."""
    s0, s1 = s0.to(tl.float32), s1.to(tl.float32)
    sound = (s0 > 0.0) & (s1 > 0.0)
    if FORM.LINK == "power" and FORM.P == 1:
        step = s0 - 1.0
    elif FORM.LINK == "power" and FORM.P == 2:
        root = tl.sqrt(tl.where(sound, s0, 1.0))
        step = (s0 - 1.0) * (root / (root + 1.0))
    else:
        step = s0 * (1.0 - tl.exp(-c.to(tl.float32) * tl.log(tl.where(sound, s0, 1.0))))
    return tl.where(sound, step / tl.where(sound, s1, 1.0), 0.0)


@triton.jit
def shares(x, top, row, FORM: tl.constexpr):
    """(p, s) of a tile, with s = 1 / omega''(p), the derivative of p by its score at a fixed threshold."""
    a, b, e, d, f, c = row
    if FORM.LINK == "softmax":
        p = tl.where(x > float("-inf"), quick_exp((x - a) - b), 0.0)
        p = tl.where(x == x, p, x)
        return p, p
    elif FORM.LINK == "mixed":
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
    elif FORM.LINK == "root":
        u = x * b + a
        inside = u > 0.0
        log_u = tl.log2(tl.where(inside, u, 1.0))
        return tl.where(inside, tl.exp2(e * log_u), 0.0), tl.where(inside, tl.exp2((e - 1.0) * log_u), 0.0)
    elif FORM.LINK == "any":  # a, b, e, d come from `bend`
        w = (x - top) * a
        inside = (w > -1.0) & (x > float("-inf"))
        w = tl.where(inside, w, 0.0)
        value = tl.where(inside, tl.exp(b * log1p(w) + e), 0.0)
        rate = value / (d * (1.0 + w))
        return value, rate
    elif FORM.LINK == "power" and not FORM.EXACT:
        return whole_power(tl.maximum(x * b + a, 0.0), FORM.P)
    else:
        return share_of(x, a, b, 0.0, 0.0, FORM, False)


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
