"""`<g, dp/dparam>` of each row, from p: the derivative by the alpha of entmax or normmax, or by the k of budget.

One pass takes all sums of a row: a thread's in fp32 within a step, then in fp64. Powers of p that grow as p falls are those of p over the
smallest that the thread has seen. g is read only where p is not 0.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

import triton
import triton.language as tl

from .tile import alone, fetch, largest, parameter, rows_of, smallest, total

LN_2 = tl.constexpr(0.6931471805599453)
BELOW_ALL = tl.constexpr(-1e4)  # the logarithm of no number
FLAT = tl.constexpr(1e30)  # an alpha above is as good as this


@triton.jit
def pair(pa, ga, begin, V: tl.constexpr, TILE: tl.constexpr):
    """(p, where it is not 0, g there), `folded`."""
    p = fetch(pa, begin, True, TILE, False, 0.0)
    inside = (p <= 0.0) == 0  # NaN is
    if TILE.WHOLE:
        g = fetch(ga, begin, True, TILE, False, 0.0)
    else:
        g = fetch(ga, begin, inside, TILE, False, 0.0)
    return folded(p, V), folded(inside, V), folded(tl.where(inside, g, 0.0), V)


@triton.jit
def folded(v, V: tl.constexpr):
    """A tile [R, K, L] as [R, threads, numbers of each], where a thread reads V neighbours at once; none leaves its thread."""
    R: tl.constexpr = v.shape[0]
    K: tl.constexpr = v.shape[1]
    L: tl.constexpr = v.shape[2]
    return tl.reshape(tl.permute(tl.reshape(v, (R, K, L // V, V)), (0, 2, 1, 3)), (R, L // V, K * V))


@triton.jit
def added(sum_, v):
    """The sums of threads, and those of a step."""
    return sum_ + tl.sum(v, 2, keep_dims=True).to(tl.float64)


@triton.jit
def bend(z):
    """(e^z - 1 - z) / z^2, 1/2 at 0."""
    near = tl.abs(z) < 0.5
    v = tl.where(near, z, 0.0)
    series = v * (0.00138888889 + v * (0.000198412698 + v * 0.0000248015873))
    series = 0.5 + v * (0.166666667 + v * (0.0416666667 + v * (0.00833333333 + series)))
    w = tl.where(near, 1.0, z)
    return tl.where(near, series, (tl.exp(w) - 1.0 - w) / (w * w))


@triton.jit
def link_rate(p, log_p, c, FORM: tl.constexpr):
    """r, the derivative of p by alpha at a fixed argument of the link, up to a multiple of p^(1 - c): one form up to c = 1/2 ("early"), one
    that does not grow as p falls from there on ("late"), or that of each row ("each")."""
    if FORM != "early":
        over = 1.0 / tl.where(c >= 0.5, c, 1.0)
        late = p * (over - log_p) * over
    if FORM == "late":
        return late
    else:
        early = -p * log_p * log_p * bend(-tl.where(c >= 0.5, 0.0, c) * log_p)
        if FORM == "early":
            return early
        else:
            return tl.where(c >= 0.5, late, early)


@triton.jit
def lower(low, log_p, c, STEEP: tl.constexpr):
    """log2 of what p^(1 - c) is divided by: the smallest p of the thread where c > 1; else 1."""
    if STEEP:
        return tl.where(c > 1.0, tl.minimum(low, tl.min(log_p, 2, keep_dims=True)), 0.0)
    else:
        return low


@triton.jit
def by_entmax(p, inside, g, c, low, s0, s1, r0, r1, FORM: tl.constexpr, STEEP: tl.constexpr):
    """(low, sum s, sum s g, sum r, sum r g) of each thread after a step, with s = p^(1 - c) / 2^((1 - c) low)."""
    q = tl.where(inside, p, 1.0)
    log_q = tl.log2(q)
    before, low = low, lower(low, log_q, c, STEEP)
    s = tl.where(inside, tl.exp2((1.0 - c) * (log_q - low)), 0.0)
    r = tl.where(inside, link_rate(q, log_q * LN_2, c, FORM), 0.0)
    if STEEP:
        less = tl.exp2((1.0 - c) * (before - low))
        s0, s1 = s0 * less, s1 * less
    return low, added(s0, s), added(s1, s * g), added(r0, r), added(r1, r * g)


@triton.jit
def of_entmax(c, low, s0, s1, r0, r1, STEEP: tl.constexpr):
    """sum r g - sum r (sum s g / sum s), from the sums of the threads."""
    if STEEP:
        less = tl.exp2((1.0 - c) * (low - smallest(low)))
        s0, s1 = s0 * less, s1 * less
    rate = total(s0)
    return total(r1) - total(r0) * (total(s1) / tl.where(rate == 0.0, 1.0, rate))


@triton.jit
def raised(high, new, powers, logs, tied, alpha):
    """(powers, logs, tied) relative to a larger `high`. Sums of u^alpha and u^alpha log2 u over the p = 2^high u, the first without the
    `tied` ones of u = 1: it may be many orders of magnitude below their number."""
    change = (high - new).to(tl.float64)
    less = tl.exp2(alpha.to(tl.float64) * change)
    other = change != 0.0
    logs = less * (logs + (powers + tied) * change)
    return tl.where(other, (powers + tied) * less, powers), logs, tl.where(other, 0.0, tied)


@triton.jit
def by_norm(p, inside, g, c, low, w0, w1, high, powers, logs, tied, dot, e0, e1, STEEP: tl.constexpr):
    """(low, sum w, sum w g, high, powers, logs, tied, sum p g, sum p log2 p, sum p log2 p g) of each thread after a step, with
    w = p^(1 - c) / 2^((1 - c) low) and `raised`."""
    log_q = tl.log2(tl.where(inside, p, 1.0))
    before, low = low, lower(low, log_q, c, STEEP)
    w = tl.where(inside, tl.exp2((1.0 - c) * (log_q - low)), 0.0)
    if STEEP:
        less = tl.exp2((1.0 - c) * (before - low))
        w0, w1 = w0 * less, w1 * less
    new = tl.maximum(high, tl.max(tl.where(inside, log_q, BELOW_ALL), 2, keep_dims=True))
    powers, logs, tied = raised(high, new, powers, logs, tied, 1.0 + c)
    log_u = tl.where(inside, log_q - new, 0.0)
    same = inside & (log_u == 0.0)
    lift = (1.0 + c) * log_u
    if STEEP:  # u^alpha is small where p^(2 - alpha) is large
        lift = lift.to(tl.float64)
    u = tl.where(inside & (same == 0), tl.exp2(lift), 0.0)
    p = tl.where(inside, p, 0.0)
    powers, logs, tied = added(powers, u), added(logs, u * log_u), added(tied, same.to(tl.float32))
    e = p * log_q
    return low, added(w0, w), added(w1, w * g), new, powers, logs, tied, added(dot, p * g), added(e0, e), added(e1, e * g)  # fmt: skip


@triton.jit
def of_norm(c, low, w0, w1, high, powers, logs, tied, dot, e0, e1, STEEP: tl.constexpr):
    """`<a, g> - <p, g> sum a` with `a = (w d log||p||/d alpha - p log p) / c` and `w = p^(1 - c) ||p||^alpha`."""
    alpha = 1.0 + c
    least, most = smallest(low), largest(high)
    powers, logs, tied = raised(high, most, powers, logs, tied, alpha)
    if STEEP:
        less = tl.exp2((1.0 - c) * (low - least))
        w0, w1 = w0 * less, w1 * less
    alpha, c = alpha.to(tl.float64), c.to(tl.float64)
    mean, first, e = total(dot), total(tied), total(e0)
    more = total(powers) + (first - 1.0)  # of the sum of u^alpha, above 1
    mass = tl.where(first > 0.0, 1.0 + more, 1.0)
    tiny = tl.abs(more) < 1e-4
    log_mass = tl.where(tiny, more * (1.0 - more * (0.5 - more / 3.0)), tl.log(mass))
    rise = (total(logs) * LN_2 / mass - log_mass / alpha) / alpha
    scale = tl.exp2(tl.minimum((1.0 - c) * least.to(tl.float64) + alpha * most.to(tl.float64), 1000.0)) * mass
    value = (rise * scale * (total(w1) - mean * total(w0)) - (total(e1) - mean * e) * LN_2) / c
    return tl.where(first > 0.0, value, e)  # without a largest p the row has none, or NaN


@triton.jit
def by_budget(p, g, many, dot):
    """(how many p are between 0 and 1, the sum of their g) of each thread after a step; the first is NaN where a p is."""
    free = (p > 0.0) & (p < 1.0)
    return added(many, tl.where(p == p, free.to(tl.float32), p)), added(dot, tl.where(free, g, 0.0))


@triton.jit
def by_map(p, inside, g, c, low, a0, a1, high, powers, logs, tied, dot, b0, b1, MAP: tl.constexpr, FORM: tl.constexpr,
           STEEP: tl.constexpr):  # fmt: skip
    if MAP == "entmax":
        low, a0, a1, b0, b1 = by_entmax(p, inside, g, c, low, a0, a1, b0, b1, FORM, STEEP)
    elif MAP == "budget":
        a0, a1 = by_budget(p, g, a0, a1)
    else:
        return by_norm(p, inside, g, c, low, a0, a1, high, powers, logs, tied, dot, b0, b1, STEEP)
    return low, a0, a1, high, powers, logs, tied, dot, b0, b1


@triton.jit
def slope_rows(P, G, OUT, PARAMS, rows, n, span, d1, d2, p0, p1, p2, pc, g0, g1, g2, gc, param,
               MAP: tl.constexpr, FORM: tl.constexpr, STEEP: tl.constexpr, PER_ROW: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Writes OUT [rows]; `param` is alpha - 1, or each row's in PARAMS (PER_ROW). A row with NaN in p or with an alpha out of its range is
    NaN, one of zeros 0. STEEP: alpha may be above 2. FORM: as `link_rate` takes it."""
    mine = rows_of(P, P, rows, n, d1, d2, TILE)
    pa, ga = alone(mine, P, p0, p1, p2, pc, TILE), alone(mine, G, g0, g1, g2, gc, TILE)
    c = parameter(PARAMS, param, mine, PER_ROW)
    bad = (c > (0.0 if MAP == "normmax" else -1.0)) == 0
    c = tl.where(bad, 1.0, tl.minimum(c, FLAT))
    R: tl.constexpr = TILE.R
    PACK: tl.constexpr = 128 // P.dtype.element_ty.primitive_bitwidth
    V: tl.constexpr = PACK if PACK < TILE.L else TILE.L
    T: tl.constexpr = TILE.L // V
    low = tl.zeros([R, T, 1], tl.float32)
    high = tl.full([R, T, 1], BELOW_ALL, tl.float32)
    none = tl.zeros([R, T, 1], tl.float64)
    a0, a1, b0, b1, powers, logs, tied, dot = none, none, none, none, none, none, none, none
    if TILE.WHOLE:
        p, inside, g = pair(pa, ga, 0, V, TILE)
        low, a0, a1, high, powers, logs, tied, dot, b0, b1 = by_map(
            p, inside, g, c, low, a0, a1, high, powers, logs, tied, dot, b0, b1, MAP, FORM, STEEP
        )
    else:
        for begin in range(0, pa.n, TILE.K * TILE.L):
            p, inside, g = pair(pa, ga, begin, V, TILE)
            low, a0, a1, high, powers, logs, tied, dot, b0, b1 = by_map(
                p, inside, g, c, low, a0, a1, high, powers, logs, tied, dot, b0, b1, MAP, FORM, STEEP
            )
    if MAP == "entmax":
        out = of_entmax(c, low, a0, a1, b0, b1, STEEP)
    elif MAP == "normmax":
        out = of_norm(c, low, a0, a1, high, powers, logs, tied, dot, b0, b1, STEEP)
    else:
        many = total(a0)
        out = total(a1) / tl.where(many == 0.0, 1.0, many)
    tl.store(OUT + mine.row, tl.where(bad, float("nan"), out.to(tl.float32)), mask=mine.valid)
