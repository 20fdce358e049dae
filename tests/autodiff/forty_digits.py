"""Derivatives in the parameter of entmax, normmax and budget to 40 digits, by differences of p and of Omega*."""

from __future__ import annotations

import functools

import mpmath
import numpy as np

import anymax as A


def level(f, low, high):
    """The root of a rising function, by halving."""
    for _ in range(140):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return low


def exact(kind, value, x):
    """(p, Omega*) of one row."""
    x, one = [mpmath.mpf(float(v)) for v in x], mpmath.mpf(1)
    top, positive = max(x), lambda v: v if v > 0 else mpmath.mpf(0)
    if kind is A.Budget:

        def p(t):
            return [min(positive(v + t), one) for v in x]

        p = p(level(lambda t: sum(p(t)) - value, -top, 2 - min(x)))
        return p, sum(v * u - v * (v - 1) / 2 for v, u in zip(p, x))
    if kind is A.NormMax:
        beta = value / (value - 1)
        tau = -level(lambda t: sum(positive(v + t) ** beta for v in x) - 1, -top, 1 - top)
        w = [positive(v - tau) ** (beta - 1) for v in x]
        p = [v / sum(w) for v in w]
        return p, sum(v * u for v, u in zip(p, x)) - sum(v**value for v in p) ** (1 / value) + 1
    c = value - 1
    link = (lambda t: mpmath.exp(t)) if c == 0 else (lambda t: positive(1 + c * t) ** (1 / c))
    t = level(lambda t: sum(link(v + t) for v in x) - 1, -top - 40, -top)
    p = [link(v + t) for v in x]
    return p, sum(v * u for v, u in zip(p, x)) - tsallis(p, value)


def tsallis(p, alpha):
    """Omega of entmax."""
    c = alpha - 1
    return sum(v * (mpmath.log(v) if c == 0 else (v**c - 1) / c) / alpha for v in p if v > 0)


@functools.cache
def slopes(kind, value, row):
    """(dp/d parameter, d Omega*/d parameter) of a row, a tuple of numbers."""
    with mpmath.workdps(40):
        h = mpmath.mpf(10) ** -13
        (p, o), (q, u) = (exact(kind, value + s, row) for s in (h, -h))
        return np.array([float((a - b) / (2 * h)) for a, b in zip(p, q)]), float((o - u) / (2 * h))
