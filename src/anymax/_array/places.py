"""Entries by their place in a row: take, sort and select them, and add what belongs to one place. Rows are on the last axis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .kinds import Array, Namespace, device_of, is_jax, is_torch
from .tracing import at_least, decides, differentiates

_LONG = 1024  # scores of a row from which on NumPy sorts for torch on a CPU


def positions(x: Array, dtype: Any, xp: Namespace) -> Array:
    """0, 1, ... along the last axis, [1, ..., n], with the rank of `x`, since JAX may be set to forbid rank promotion."""
    n = x.shape[-1]
    return xp.reshape(xp.arange(n, dtype=dtype, **device_of(x)), (1,) * (x.ndim - 1) + (n,))


def take(x: Array, index: Array, xp: Namespace) -> Array:
    """x[..., index], m entries a row: index is [..., m], with the leading axes of x."""
    if is_torch(x):
        return x.gather(-1, index)  # torch.take_along_dim pins the sizes of an exported graph
    return xp.take_along_axis(x, index, axis=-1)


# -- order ---------------------------------------------------------------------------------------------------------------------------


def descending(x: Array, xp: Namespace, most: int | None = None) -> Array:
    """Each row sorted in descending order; `most`: at most so many of its largest entries."""
    n = x.shape[-1]
    most = n if most is None else min(most, n)
    if (
        is_torch(x)
        and at_least(n, _LONG)
        and decides(x)
        and not differentiates(x)
        and x.dtype in (xp.float32, xp.float64)
    ):
        # torch's sort takes 15 to 28 times as long; a copy, since NumPy calls one column that is read backwards contiguous
        return xp.from_numpy(descending(x.numpy(), np, most).copy())
    if is_torch(x):  # the standard's stable sort can't be exported to ONNX
        return x.topk(most, dim=-1).values if most < n else x.sort(-1, descending=True).values
    if most < n and isinstance(x, np.ndarray):
        x = np.partition(x, n - most, axis=-1)[..., n - most :]
    return xp.flip(xp.sort(x, axis=-1), axis=-1)[..., :most]


def smallest(x: Array, m: int, xp: Namespace) -> Array:
    """The indices of the m smallest entries of each row, the smallest first."""
    if is_torch(x):
        return x.topk(m, dim=-1, largest=False).indices if m < x.shape[-1] else x.sort(dim=-1).indices
    if m < x.shape[-1] and isinstance(x, np.ndarray):
        index = np.argpartition(x, m - 1, axis=-1)[..., :m]
        return np.take_along_axis(index, np.argsort(np.take_along_axis(x, index, axis=-1), axis=-1), axis=-1)
    return xp.argsort(x, axis=-1)[..., :m]


# -- sums by place -------------------------------------------------------------------------------------------------------------------


def sums_at(index: Array, weight: Array | None, n: int, xp: Namespace) -> Array:
    """For each of n places the sum of the weights [..., m], [..., n], where `index` [..., m] names it; without weights how often it does.

    An index that is none of the places, such as -1, names none.
    """
    lead, rows = tuple(index.shape[:-1]), math.prod(index.shape[:-1])
    index = _or_n(index, n, xp)
    values: Array = xp.ones_like(index) if weight is None else weight
    if is_torch(index):
        return values.new_zeros((*lead, n + 1)).scatter_add(-1, index, values)[..., :n]
    if isinstance(index, np.ndarray) or is_jax(index):
        first = (n + 1) * xp.reshape(xp.arange(rows, dtype=index.dtype), (*lead, 1))
        flat, size, values = xp.reshape(first + index, (-1,)), rows * (n + 1), xp.reshape(values, (-1,))
        if is_jax(index):
            out = xp.zeros(size, values.dtype).at[flat].add(values)
        else:
            out = np.bincount(flat, None if weight is None else values, minlength=size).astype(values.dtype)
        return xp.reshape(out, (*lead, n + 1))[..., :n]
    out = xp.zeros((*lead, n), dtype=values.dtype)  # the standard has no scatter
    places = positions(out, index.dtype, xp)
    for i in range(index.shape[-1]):
        out = out + xp.where(places == index[..., i : i + 1], values[..., i : i + 1], xp.zeros_like(out))
    return out


def largest_at(index: Array, value: Array, n: int, xp: Namespace) -> Array:
    """For each of n places the largest value [..., m], at least 0, [..., n], where `index` [..., m] names it, as in `sums_at`."""
    lead, rows = tuple(index.shape[:-1]), math.prod(index.shape[:-1])
    index = _or_n(index, n, xp)
    if is_torch(value):
        return value.new_zeros((*lead, n + 1)).scatter_reduce(-1, index, value, "amax")[..., :n]
    flat, value = (xp.reshape(a, (rows, a.shape[-1])) for a in (index, value))
    if is_jax(value):
        out = xp.zeros((rows, n + 1), value.dtype).at[xp.arange(rows)[:, None], flat].max(value)
    elif isinstance(value, np.ndarray):
        out = np.zeros((rows, n + 1), value.dtype)
        np.maximum.at(out, (np.arange(rows)[:, None], flat), value)
    else:  # the standard has no scatter
        out = xp.zeros((rows, n + 1), dtype=value.dtype)
        places = positions(out, flat.dtype, xp)
        for i in range(flat.shape[-1]):
            here = (places == flat[:, i : i + 1]) & (value[:, i : i + 1] > out)
            out = xp.where(here, value[:, i : i + 1], out)
    return xp.reshape(out[:, :n], (*lead, n))


def _or_n(index: Array, n: int, xp: Namespace) -> Array:
    """The index, n where it is none of the places from 0 to n - 1."""
    return xp.where((index >= 0) & (index < n), index, n * xp.ones_like(index))
