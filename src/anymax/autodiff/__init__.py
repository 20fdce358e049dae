"""Bridges to the automatic differentiation of each framework, one file each, imported when the first array of the framework arrives."""

from __future__ import annotations

from .._array import Array, is_jax, is_torch
from .bridge import BRIDGES, Bridge
from .numpy import BRIDGE as _PLAIN


def bridge(x: Array) -> Bridge:
    """The bridge of x's framework. No other code chooses a bridge."""
    return BRIDGES.get(type(x)) or _of_framework(x)


def _of_framework(x: Array) -> Bridge:
    if is_torch(x):
        from . import torch  # late: torch is loaded already

        return torch.BRIDGE
    if is_jax(x):
        from . import jax  # late: jax is loaded already

        return jax.BRIDGE
    return _PLAIN
