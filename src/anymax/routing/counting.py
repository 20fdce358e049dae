"""How often each expert was chosen."""

from __future__ import annotations

import math
import sys

import numpy as np

from .._array import Array, Namespace, device_of, is_jax, is_torch


def loads(index: Array, n: int, xp: Namespace) -> Array:
    """How often each of n experts is in `index` [..., m], as integers [..., n]; -1 is none."""
    *lead, m = index.shape
    there = index >= 0
    if is_torch(index):
        zeros = index.new_zeros((*lead, n + 1))
        return zeros.scatter_add(-1, index.where(there, n), index.new_ones(()).expand(index.shape))[..., :n]
    rows = math.prod(lead)
    row = xp.reshape(xp.arange(rows, dtype=index.dtype, **device_of(index)), (rows, 1))
    flat = xp.reshape(row * (n + 1) + xp.reshape(xp.where(there, index, n * xp.ones_like(index)), (rows, m)), (-1,))
    if isinstance(index, np.ndarray):
        counted = np.bincount(flat, minlength=rows * (n + 1))
    elif is_jax(index):
        counted = sys.modules["jax"].numpy.bincount(flat, length=rows * (n + 1))
    else:
        ends = xp.searchsorted(xp.sort(flat), xp.arange(rows * (n + 1) + 1, dtype=flat.dtype))
        counted = ends[1:] - ends[:-1]
    return xp.reshape(counted, (*lead, n + 1))[..., :n]
