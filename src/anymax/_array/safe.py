"""Powers and logarithms with finite derivatives wherever their values are finite."""

from __future__ import annotations

import math
from typing import Any

from .kinds import Array, Namespace, is_array, is_torch


def safe(x: Array, keep: Array, fill: float, xp: Namespace) -> Array:
    """`x` where `keep`, else `fill`: the inner half of a double `where`, which keeps NaN out of derivatives."""
    return xp.where(keep, x, fill * xp.ones_like(x))


def power(x: Array, exponent: Any, xp: Namespace) -> Array:
    """x^exponent for x > 0 and exactly 0 elsewhere, with derivatives that are 0 there too."""
    keep = x > 0
    return xp.where(keep, safe(x, keep, 1.0, xp) ** exponent, xp.zeros_like(x))


def log(x: Array, xp: Namespace) -> Array:
    """log(x), -inf where x <= 0, with derivatives that are 0 there; NaN stays NaN, and what comes in at it, maybe 0, goes on."""
    keep = x > 0
    return xp.where(keep, xp.log(safe(x, keep, 1.0, xp)), xp.where(x <= 0, -math.inf * xp.ones_like(x), x))


def xlogx(x: Array, xp: Namespace) -> Array:
    """x log(x), 0 at 0."""
    keep = x > 0
    y = safe(x, keep, 1.0, xp)
    return xp.where(keep, y * xp.log(y), xp.zeros_like(x))


def sigmoid(x: Array, xp: Namespace) -> Array:
    """1 / (1 + exp(-x)), accurate on both sides, with its derivative at 0 too."""
    if is_torch(x):
        return x.sigmoid()
    e = xp.exp(xp.where(x < 0, x, -x))  # not of the absolute value, whose derivative at 0 is 0
    return xp.where(x < 0, e, xp.ones_like(e)) / (1.0 + e)


# Coefficients of log(1+w)/w and (exp(w)-1)/w; twelve terms reach 1e-17 for |w| < 1/32.
_LOG1P = tuple((-1.0) ** k / (k + 1) for k in range(12))
_EXPM1 = tuple(1.0 / math.factorial(k + 1) for k in range(12))
_NEAR = 1.0 / 32.0


def _series(w: Array, coefficients: tuple[float, ...]) -> Array:
    out = coefficients[-1] + 0.0 * w
    for a in reversed(coefficients[:-1]):
        out = out * w + a
    return out


def log1p_over(c: Any, t: Array, xp: Namespace) -> Array:
    """log(1 + c t) / c, which is t at c = 0. For an array c a series is used near 0, where the derivative in c would cancel."""
    return _over(xp.log1p, _LOG1P, c, t, xp)


def expm1_over(c: Any, t: Array, xp: Namespace) -> Array:
    """(exp(c t) - 1) / c, which is t at c = 0; the inverse of `log1p_over`."""
    return _over(xp.expm1, _EXPM1, c, t, xp)


def _over(function: Any, coefficients: tuple[float, ...], c: Any, t: Array, xp: Namespace) -> Array:
    w = c * t
    if not is_array(c):
        return function(w) / c if c else t
    near = xp.abs(w) < _NEAR
    series = t * _series(xp.where(near, w, xp.zeros_like(w)), coefficients)
    away = function(xp.where(near, xp.ones_like(w), w)) / xp.where(near, xp.ones_like(w), c + xp.zeros_like(w))
    return xp.where(near, series, away)


# Coefficients of (exp(z) - 1 - z)/z^2 and (z exp(z) - exp(z) + 1)/z^2; fifteen terms reach 1e-17 for |z| < 1/2.
_PHI = tuple(1.0 / math.factorial(k + 2) for k in range(15))
_PSI = tuple((k + 1.0) / math.factorial(k + 2) for k in range(15))


def phi(z: Array, xp: Namespace) -> Array:
    """`(exp(z) - 1 - z) / z^2`, 1/2 at 0."""
    near = xp.abs(z) < 0.5
    away = xp.where(near, xp.ones_like(z), z)
    far = (xp.exp(away) - 1.0 - away) / (away * away)  # three bits cancel at 1/2; XLA takes expm1 twice as long as exp
    return xp.where(near, _series(xp.where(near, z, xp.zeros_like(z)), _PHI), far)


def psi(z: Array, xp: Namespace) -> Array:
    """`(z exp(z) - exp(z) + 1) / z^2`, 1/2 at 0."""
    near = xp.abs(z) < 0.5
    away = xp.where(near, xp.ones_like(z), z)
    far = (away * xp.exp(away) - xp.expm1(away)) / (away * away)
    return xp.where(near, _series(xp.where(near, z, xp.zeros_like(z)), _PSI), far)
