"""The maps and the losses of one row, written plainly in fp64: bisection and the definitions, no code of the library."""

from __future__ import annotations

import math

import numpy as np


def bisect(f, low, high):
    """The root of a decreasing function."""
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return 0.5 * (low + high)


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def logsumexp(x):
    return np.max(x) + math.log(np.exp(x - np.max(x)).sum())


def entmax(x, alpha):
    x = np.asarray(x, np.float64)
    if alpha == 1:
        return softmax(x)
    c = alpha - 1.0
    y = c * (x - x.max())

    def p(t):
        return np.maximum(y - t, 0.0) ** (1.0 / c) if c > 0 else np.maximum(y - t, 1e-300) ** (1.0 / c)

    if c > 0:
        q = p(bisect(lambda t: p(t).sum() - 1.0, -1.0, 0.0))
    else:  # t is minus the level: p = (1 + c (x - tau'))^(1/c), above every y
        q = p(bisect(lambda t: 1.0 - p(t).sum(), -(float(len(y)) ** -c) - 1.0, -1.0))
    return q / q.sum()


def normmax(x, alpha):
    x = np.asarray(x, np.float64)
    beta, r = alpha / (alpha - 1.0), 1.0 / (alpha - 1.0)
    tau = bisect(lambda t: (np.maximum(x - t, 0.0) ** beta).sum() - 1.0, x.max() - 1.0, x.max())
    q = np.maximum(x - tau, 0.0) ** r
    return q / q.sum()


def budget(x, k):
    x = np.asarray(x, np.float64)
    return np.clip(x - bisect(lambda t: np.clip(x - t, 0, 1).sum() - k, x.min() - 1.0, x.max()), 0, 1)


def topk_softmax(x, k):
    keep = np.zeros(len(x), bool)
    keep[np.argsort(-np.asarray(x), kind="stable")[:k]] = True
    return np.where(keep, softmax(np.where(keep, x, -np.inf)), 0.0)


def topp_softmax(x, mass):
    order = np.argsort(-np.asarray(x), kind="stable")
    p = softmax(x)[order]
    k = int(np.sum(np.cumsum(p) - p < mass))
    return topk_softmax(x, k)


def taylor(x, order=2):
    f = sum(np.asarray(x, np.float64) ** m / math.factorial(m) for m in range(order + 1))
    return f / f.sum()


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-np.asarray(x, np.float64)))


def sigsoftmax(x):
    u = np.exp(x - np.max(x)) * sigmoid(x)
    return u / u.sum()


def neg_shannon(p):
    q = p[p > 0]
    return float((q * np.log(q)).sum())


def neg_tsallis(p, alpha):
    if alpha == 1:
        return neg_shannon(p)
    q = p[p > 0]
    # (sum p^alpha - sum p) / ...
    return float((q * np.expm1((alpha - 1.0) * np.log(q))).sum() / (alpha * (alpha - 1.0)))


def fenchel_young(p, omega, x, y):
    """`max_p <p, x> - omega(p)  +  omega(y) - <x, y>` with the maximiser p given."""
    return float(p @ x - omega(p) + omega(y) - y @ x)


def numeric_gradient(f, x, h=1e-6):
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        d = np.zeros_like(x)
        d[i] = h
        out[i] = (f(x + d) - f(x - d)) / (2 * h)
    return out
