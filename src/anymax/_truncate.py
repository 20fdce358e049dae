"""Which entries a truncation keeps: the k largest, or the nucleus of mass p. Both are masks without a derivative.

A threshold on the sorted row and a count of its ties, so that shapes never depend on values and equal scores are kept
by position. Classes on the last axis; -inf is never kept; a row with a NaN keeps all the rest, for its maker to find.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from ._array import Array, Namespace, descending, is_array, is_jax, is_torch, like, running_sum, stop_gradient, top


def topk_keep(x: Array, k: int, xp: Namespace) -> Array:
    """True at the k largest entries of each row, exactly k of them where the row has as many."""
    n = x.shape[-1]
    if k >= n:
        return x != -math.inf
    x = stop_gradient(x)
    return _first(x, _kth(x, k, xp), k, xp)


def topp_keep(x: Array, p: Any, xp: Namespace) -> Array:
    """True at the smallest set of largest entries whose softmax mass reaches p (a number, or an array [..., 1]).

    An entry is kept where the mass of the entries before it is still below p: the largest one always, and all where p
    is 1.
    """
    x = stop_gradient(x)
    live = x != -math.inf
    if x.shape[-1] == 0:
        return live
    high = top(x, xp)
    strange = xp.isnan(high) | (high == math.inf)
    y = xp.where(strange, xp.zeros_like(x), x)
    # the standard's sort is stable, for which torch's ONNX exporter has no translation
    s = y.sort(dim=-1, descending=True).values if is_torch(y) else descending(y, xp)
    e = xp.exp(s - xp.where(high > -math.inf, s[..., :1], xp.zeros_like(high)))
    # NumPy sums one by one: in fp64, lest the rounding of 100,000 terms move the end of the nucleus
    wide = s.dtype if is_torch(s) or is_jax(s) else xp.float64
    upto = running_sum(e, xp, wide)
    before = xp.concat([xp.zeros_like(upto[..., :1]), upto[..., :-1]], axis=-1)
    level = stop_gradient(like(p, upto, xp))
    inside = before < level * upto[..., -1:]
    count = xp.sum(xp.astype(inside, xp.int32), axis=-1, keepdims=True, dtype=xp.int32)
    edge = xp.min(xp.where(inside, s, math.inf * xp.ones_like(s)), axis=-1, keepdims=True)
    kept = _first(y, edge, count, xp) | strange
    if is_array(level):
        return (kept | (level >= 1)) & live
    return live if level >= 1 else kept & live  # a bool beside a tensor is no operation of torch.jit.trace


def _kth(x: Array, k: int, xp: Namespace) -> Array:
    """The k-th largest entry of each row, by the selection of each framework where it has one."""
    if is_torch(x):
        return x.topk(k, dim=-1).values[..., -1:]
    if is_jax(x):
        return sys.modules["jax"].lax.top_k(x, k)[0][..., -1:]
    if isinstance(x, np.ndarray):
        return np.partition(x, x.shape[-1] - k, axis=-1)[..., -k, None]
    return descending(x, xp)[..., k - 1 : k]


def _first(x: Array, edge: Array, count: Any, xp: Namespace) -> Array:
    """True at the entries above `edge` and, up to `count` in all, at the first of those equal to it."""
    above = x > edge
    equal = (x == edge) & (x != -math.inf)
    room = count - xp.sum(xp.astype(above, xp.int32), axis=-1, keepdims=True, dtype=xp.int32)
    place = running_sum(equal, xp, xp.int32)
    nan = xp.any(xp.isnan(x), axis=-1, keepdims=True)
    return above | (equal & (place <= room)) | (nan & (x != -math.inf))
