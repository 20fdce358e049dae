"""The bridges to the frameworks' automatic differentiation. One file a framework; imported when its first array arrives."""

from __future__ import annotations

from .._array import Array, is_jax, is_torch
from .bridge import Bridge
from .numpy import BRIDGE as _PLAIN


def bridge(x: Array) -> Bridge:
    """The bridge of x's framework. Nothing else picks code by the framework of an array."""
    if is_torch(x):
        from . import torch  # late: only where torch is loaded already

        return torch.BRIDGE
    if is_jax(x):
        from . import jax  # late: only where jax is loaded already

        return jax.BRIDGE
    return _PLAIN
