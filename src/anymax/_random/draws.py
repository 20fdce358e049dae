"""Draw classes from probabilities, and find the largest of a row, for samplers and decoders. Classes are on the last axis."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from .. import _array
from .._array import Array, Namespace, decides, is_jax, is_torch, running_sum, stop_gradient, sum_dtype, take
from .generators import uniform
from .truncation import topk_keep


def uniforms(p: Array, size: int, generator: Any, xp: Namespace) -> Array:
    """`size` numbers in (0, 1) for each row of p: row i, in C order, has the numbers i * size, ... of the generator."""
    return uniform((*p.shape[:-1], size), xp.astype(p[..., :1], sum_dtype(p, xp)), generator)


def invert(p: Array, u: Array, xp: Namespace) -> Array:
    """For each number u [..., size] the first class whose cumulative probability exceeds u times the sum; -1 if there is none.

    A class of probability 0 is never drawn. A row with NaN or +inf has no class.
    """
    upto = running_sum(p, xp, sum_dtype(p, xp))
    index = first_above(upto, u * upto[..., -1:], xp)
    finite = upto[..., -1:] < math.inf  # and no NaN
    if decides(p) and bool(xp.all((xp.take_along_axis(p, index, axis=-1) > 0) & finite)):
        return index
    # Parallel sums may not be monotone in the last bit, and a class of mass 0 could be found: move on to the next
    # one with mass
    rank = running_sum(p > 0, xp, xp.int32)
    wanted = xp.take_along_axis(rank, index, axis=-1) - xp.astype(xp.take_along_axis(p, index, axis=-1) > 0, xp.int32)
    last = rank[..., -1:] - 1
    index = first_above(rank, xp.where(wanted < last, wanted, last), xp)
    dead = ~finite | (rank[..., -1:] == 0)
    return xp.where(dead, -xp.ones_like(index), index)


def first_above(ascending: Array, level: Array, xp: Namespace) -> Array:
    """The first index of each row whose value is above each of its levels, by bisection; the last index if none is."""
    n = ascending.shape[-1]
    low = xp.zeros_like(level, dtype=xp.asarray(0).dtype)
    high = low + (n - 1)
    for _ in range(int(n).bit_length()):
        middle = (low + high) // 2
        above = xp.take_along_axis(ascending, middle, axis=-1) > level
        high = xp.where(above, middle, high)
        low = xp.where(above | (middle >= high), low, middle + 1)
    return high


def largest(x: Array, k: int, xp: Namespace) -> Array:
    """The indices of the k largest entries of each row, the largest first; in a tie the first. k is at most the row's length.

    A row may hold -inf but no NaN. If it has fewer than k entries above -inf, any others follow.
    """
    x = stop_gradient(x)
    if is_jax(x):  # whose order has -0.0 below 0.0
        return sys.modules["jax"].lax.top_k(xp.where(x == 0, xp.zeros_like(x), x), k)[1]
    if not (is_torch(x) or isinstance(x, np.ndarray)):
        return xp.argsort(x, axis=-1, descending=True, stable=True)[..., :k]
    # in a tie the first, which topk and argpartition do not guarantee
    key = xp.where(topk_keep(x, k, xp), x, -math.inf * xp.ones_like(x))
    index = key.topk(k, dim=-1).indices if is_torch(key) else np.argpartition(-key, k - 1, axis=-1)[..., :k]
    index = xp.sort(index, axis=-1)
    order = xp.argsort(-xp.take_along_axis(x, index, axis=-1), axis=-1, stable=True)
    return xp.take_along_axis(index, order, axis=-1)


def count_of(num_samples: Any) -> int:
    """How many samples to draw from each row; one for None."""
    count = 1 if num_samples is None else _array.number(num_samples)
    if not _array.is_int(count) or count < 0:
        raise TypeError(f"num_samples: expected None or a non-negative integer, got {_array.shown(num_samples)}")
    return count


def check_k(who: str, k: Any, n: int) -> int:
    """k as an integer; raise if it is not from 1 to n."""
    k = _array.check_integer(who, "k", k, "an integer, the number of classes to give")
    if not 1 <= k <= n:
        raise ValueError(f"{who}: k must be from 1 to the number of classes, {n}; got {k}")
    return k


def at(values: Array, index: Array, xp: Namespace) -> Array:
    """values[..., index] for indices [..., m]; -1, which stands for no class, gives the value of the first."""
    return take(values, xp.where(index < 0, xp.zeros_like(index), index), xp)
