"""The bridges to the frameworks' automatic differentiation. One file a framework; imported when its first array arrives."""

from __future__ import annotations

from typing import Any

from .. import kernels
from .._array import Array, is_jax, is_torch
from .._mapping import Mapping


class plain:
    """Arrays without automatic differentiation: NumPy, and whatever else follows the array-API standard."""

    @staticmethod
    def apply(mapping: Mapping, x: Array) -> Array:
        return kernels.choose("forward", mapping, x).forward(mapping, x)

    @staticmethod
    def loss(mapping: Mapping, x: Array, y: Array) -> Array:
        p = plain.apply(mapping, x)
        return kernels.choose("loss", mapping, x).loss(mapping, x, p, y)


def bridge(x: Array) -> Any:
    """The bridge of x's framework: `apply` and `loss`, on rows."""
    if is_torch(x):
        from . import torch as leaf  # late: only where torch is loaded already

        return leaf
    if is_jax(x):
        from . import jax as leaf  # late: only where jax is loaded already

        return leaf
    return plain
