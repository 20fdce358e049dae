"""Links of the row kernels: scalar functions over tiles of fp32, chosen at compile time by name.

A threshold map is `p = u^r` with `u = slope (x - top) + z` clipped at 0; the search finds z for each row. `share_of` gives value = u^r
and rate = u^(r-1), with the sums s0 and s1. Newton's step on the r-norm of u is `z -= s0 (1 - s0^(-1/r)) / s1`. The norm is convex, so from
a z that is too high (a threshold too low) a step never overshoots.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# type checkers can't read the code that Triton traces

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


class Form(NamedTuple):
    """A threshold map: `p = link(slope (x - tau))`, where the link may be a power."""

    LINK: str
    P: int = 1
    SLOPE: float = 1.0
    NORM: bool = False  # True for normmax
    EXACT: bool = True  # to fp32's last digits
    PER_ROW: bool = False  # a parameter for each row
    ABOVE: Any = None  # the form of the rows whose alpha is above 2, where each row has its own


@triton.jit
def quick_exp(x):
    """exp(x), 0 below 1.2e-38. `tl.exp` keeps the smaller numbers, which takes three more instructions."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def over(a, b):
    """a / b, or 0 where b is not positive."""
    return tl.where(b > 0.0, a / tl.where(b > 0.0, b, 1.0), 0.0)


@triton.jit
def log1p(w):
    """log(1 + w) to 2 ulp for w > -1; a GPU's own logarithm has few digits near 1. `1 + w = 2^k m` with m in [0.7, 1.42). The rounding
    error of 1 + w goes into f = m - 1; log(1 + f) = 2 artanh(f / (2 + f))."""
    u = 1.0 + w
    bits = u.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    f = (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0
    f += (w - (u - 1.0)) * ((127 - tl.minimum(k, 126)) << 23).to(tl.float32, bitcast=True)
    s = f / (2.0 + f)
    q = s * s
    # the sum s + s^3/3 + ..., of which f - s f = 2 s is the larger part
    more = s * q * (0.666666667 + q * (0.4 + q * (0.285714286 + q * (0.222222222 + q * 0.181818182))))
    return k.to(tl.float32) * 0.693147181 + (2.0 * s + more)


@triton.jit
def expm1(t):
    """exp(t) - 1 to a few ulp."""
    near = tl.abs(t) < 0.5
    v = tl.where(near, t, 0.0)
    series = v * (
        1.0
        + v
        * (
            0.5
            + v * (0.166666667 + v * (0.0416666667 + v * (0.00833333333 + v * (0.00138888889 + v * 0.000198412698))))
        )
    )
    return tl.where(near, series, tl.exp(t) - 1.0)


@triton.jit
def power(u, r):
    """u^r for u > 0, else 0."""
    inside = u > 0.0
    return tl.where(inside, tl.exp2(r * tl.log2(tl.where(inside, u, 1.0))), 0.0)


@triton.jit
def ground(top, z, SLOPE: tl.constexpr):
    """(near, rest): the fp32 number nearest to the score at which u is 0, and the remainder in u. `(x - near) + rest` loses no digit."""
    below = z * (1.0 / SLOPE)
    near = (top.to(tl.float64) - below).to(tl.float32)
    return near, (SLOPE * ((near.to(tl.float64) - top.to(tl.float64)) + below)).to(tl.float32)


@triton.jit
def bend(top, z, c, r):
    """(c / z, r, r log z, z) of a row for any slope c and exponent r: `u = z (1 + w)` with `w = (c / z) (x - top)`, and
    `u^r = exp(r log1p(w) + r log z)`."""
    return (c / z).to(tl.float32), r.to(tl.float32), (r * tl.log(z)).to(tl.float32), z.to(tl.float32)


@triton.jit
def whole_power(u, P: tl.constexpr):
    """(u^P, u^(P-1)) for u >= 0; P is 1, 2, 3 or 4."""
    if P == 1:
        rate = tl.where(u > 0.0, 1.0, 0.0)
        value = u
    elif P == 2:
        rate = u
        value = u * u
    elif P == 3:
        rate = u * u
        value = rate * u
    else:
        rate = u * u * u
        value = rate * u
    return value, rate


@triton.jit
def capped(u):
    """(u clipped to [0, 1], 1 where it was strictly within)."""
    return tl.minimum(tl.maximum(u, 0.0), 1.0), tl.where((u > 0.0) & (u < 1.0), 1.0, 0.0)


@triton.jit
def share_of(x, a, b, k, r, FORM: tl.constexpr, FINE: tl.constexpr):
    """(value, rate) of the scores x; a, b, k are numbers of a row, r is the exponent.

    "power": u = slope (x - a) + b with a the maximum, value u^P. "budget": u = (x - a) + b, clipped to [0, 1]; a is the edge. "edge": the
    same u, unclipped above, with a the fp32 number nearest to tau, so that u keeps its digits near 0, and value u^r. "any": value
    b (1 + w)^r with w = k (x - a), where b is the probability of the maximum a; FINE uses log1p, else the device's logarithm. The rate is
    u^(r-1), and 1 within the clip of "budget"; for "any" it is value / (1 + w). "steep": as in `steep`, where k is q and r is c.
    """
    if FORM.LINK == "any":
        w = (x - a) * k
        if FINE:
            inside = (w > -1.0) & (w < 1e37)
            w = tl.where(inside, w, 0.0)
            value = tl.where(inside, b * tl.exp(r * log1p(w)), 0.0)
            rate = value / (1.0 + w)
        else:
            v = tl.minimum(tl.maximum(1.0 + w, 0.0), 1e37)
            rate = tl.where(v > 0.0, b * tl.exp2((r - 1.0) * tl.log2(v)), 0.0)
            value = rate * v
    elif FORM.LINK == "edge":
        u = (x - a) + b
        value = power(u, r)
        rate = power(u, r - 1.0)
    elif FORM.LINK == "budget":
        value, rate = capped((x - a) + b)
    elif FORM.LINK == "steep":
        value, rate = steep(x, a, b, k, r, 1.0 / r)
    else:
        value, rate = whole_power(tl.maximum((x - a) * FORM.SLOPE + b, 0.0), FORM.P)
    return value, rate


@triton.jit
def bent(s, r, FORM: tl.constexpr):
    """s (1 - s^(-1/r)), the numerator of Newton's step on the r-norm, without a logarithm where the power is 1, 2 or 4."""
    if FORM.LINK == "power" and FORM.P == 1:
        return s - 1.0
    elif FORM.LINK == "power" and FORM.P == 2:
        root = tl.sqrt(s)
        return root * (root - 1.0)
    elif FORM.LINK == "power" and FORM.P == 4:
        root = tl.sqrt(tl.sqrt(s))
        return root * root * root * (root - 1.0)
    else:  # s may be on either side of 1, and 1/r as small as 1e-7
        return -s * expm1(-tl.log(tl.where(s > 0.0, s, 1.0)) / r)


@triton.jit
def steep(x, anchor, base, q, c, r):
    """(p, dp/dq) above alpha = 2, where the link is infinitely steep at the edge of the support. A row is anchored at its smallest
    supported score, which has probability q: p = (q^c + c (x - anchor))^(1/c), base = q^c; dp/dq = (q/p)^(c-1)."""
    gap = x - anchor
    inside = gap >= 0.0
    u = base + c * tl.where(inside, gap, 1.0)
    whole = u > 1e-37
    p = tl.where(whole, power(u, r), q)
    rate = tl.where(
        p > 0.0, tl.exp2((c - 1.0) * (tl.log2(tl.maximum(q, 1.2e-38)) - tl.log2(tl.where(p > 0.0, p, 1.0)))), 0.0
    )
    return tl.where(inside, p, 0.0), tl.where(inside, rate, 0.0)


@triton.jit
def sensitivity(p, e, SENSE: tl.constexpr):
    """s = 1 / omega''(p) on the support, 0 off it, NaN where p is NaN. e is the exponent, 2 - alpha."""
    if SENSE == "own":
        return p
    else:
        off = p <= 0.0
        if SENSE == "one":
            s = 1.0 + 0.0 * p
        elif SENSE == "budget":
            off = off | (p >= 1.0)
            s = 1.0 + 0.0 * p
        elif SENSE == "root":
            s = tl.sqrt(tl.where(off, 1.0, p))
        else:
            s = tl.exp2(tl.minimum(e * tl.log2(tl.where(off, 1.0, p)), 95.0))
            s = tl.where(p == p, s, p)
        return tl.where(off, 0.0, s)


# -- ratio maps: p = u(x) / sum u, by log u where u would overflow -----------------------------------------------------------


@triton.jit
def exponent(x, LINK: tl.constexpr):
    """log u: x for softmax, x - log(1 + exp(-x)) for sigsoftmax."""
    if LINK == "sigsoftmax":
        small = tl.exp(-tl.abs(x))
        return tl.where(x > float("-inf"), tl.maximum(tl.minimum(x, 2.0 * x) - log1p(small), -3.4e38), float("-inf"))
    else:
        return x


@triton.jit
def taylor(x, scale, ORDER: tl.constexpr):
    """`f(x) s^order` and `f'(x) s^order`, by Horner's rule in v = x s and s; they are finite for |x| s <= 4."""
    v = x * scale
    value = tl.zeros_like(v)
    slope = tl.zeros_like(v)
    factor = 1.0  # order! / j!
    whole = 1.0
    for i in tl.static_range(ORDER):
        whole = whole * (i + 1)
    # the terms are s^(order-j) v^j / j!
    high = tl.zeros_like(scale) + 1.0
    for i in tl.static_range(ORDER + 1):
        slope = slope * v + value
        value = value * v + high * (factor / whole)
        factor = factor * (ORDER - i)
        high = high * scale
    return tl.maximum(value, 0.0), slope * scale


# -- noises of perturb max: log F and h = f / F ---------------------------------------------------------------------------------


@triton.jit
def law(v, NOISE: tl.constexpr):
    """(log F(v), h(v)). For the normal law, 1 - F(x) = exp(-x^2/2) num / den for x >= 0, a rational minimax fit with error 2e-9."""
    if NOISE == "normal":
        x = tl.minimum(tl.abs(v), 1e15)
        num = ((((0.3989568028 * x + 4.1245367238) * x + 19.247281345) * x + 47.359328683) * x) + 56.066324972
        den = (((((x + 10.340226902) * x + 49.216306876) * x + 129.38846309) * x) + 184.18758372) * x + 112.13264973
        # exp(-x^2/2) with x = whole + rest, where whole^2 is exact
        whole = tl.floor(x * 256.0) * 0.00390625
        rest = x - whole
        e = tl.exp(-0.5 * whole * whole) * tl.exp(-rest * (whole + 0.5 * rest))
        far = x > 1e4  # here num / den is 0.3989 / x
        mills = tl.where(far, 0.3989422804 / x, num / den)
        upper = e * mills
        below = v < 0.0
        log_f = tl.where(below, -0.5 * x * x + tl.log(mills), log1p(-tl.minimum(upper, 0.75)))
        h = tl.where(below, 0.3989422804 / mills, 0.3989422804 * e / (1.0 - tl.minimum(upper, 0.75)))
    else:  # logistic
        small = tl.exp(-tl.abs(v))
        log_f = tl.minimum(v, 0.0) - log1p(small)
        h = tl.where(v < 0.0, 1.0, small) / (1.0 + small)
    return log_f, h
