"""The bridges to the frameworks' automatic differentiation. One file a framework; imported when its first array arrives."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import kernels
from .._array import Array, is_jax, is_torch
from .._mapping import Mapping
from ..kernels import native, short
from ..kernels._memory import MANY


class plain:
    """Arrays without automatic differentiation: NumPy, and whatever else follows the array-API standard."""

    @staticmethod
    def apply(mapping: Mapping, x: Array, mask: Array | None = None) -> Array:
        """p(x). A mask comes only where `masks` said yes."""
        engine = kernels.choose("forward", mapping, x)
        return engine.forward(mapping, x) if mask is None else engine.forward(mapping, x, mask)

    @staticmethod
    def masks(mapping: Mapping, x: Array) -> bool:
        """True where the engine of this call takes a mask beside the scores."""
        return kernels.choose("forward", mapping, x) is native

    @staticmethod
    def log(mapping: Mapping, x: Array) -> Array | None:
        """log p(x) by a compiled engine; None: it is for the reference."""
        engine = kernels.compiled("log_forward", mapping, x)
        return None if engine is None else engine.log_forward(mapping, x)

    @staticmethod
    def index_loss(mapping: Mapping, x: Array, index: Array) -> Array | None:
        """The loss of each row for its class index (below 0: none), fp32 or fp64; None: no engine has it in one pass."""
        engine = kernels.compiled("index_loss", mapping, x)
        return None if engine is None else engine.index_loss(mapping, x, index, False)[0]

    @staticmethod
    def loss(mapping: Mapping, x: Array, y: Array) -> Array:
        p = plain.apply(mapping, x)
        return kernels.choose("loss", mapping, x).loss(mapping, x, p, y)

    KINDS = (np.ndarray,)  # the kinds of array that `quick` takes

    @staticmethod
    def quick(link: tuple[Mapping, int, float], x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray | None:
        """p(x) along the last axis in as few steps as Python has; None where anything is out of the ordinary."""
        call = short.buffers
        if kernels.asked() is not None or (call is None and not (short.ready() and (call := short.buffers))):
            return None
        if out is None:
            out = np.empty_like(x) if x.size < MANY else native.empty_like(x)
        elif type(out) is not np.ndarray:
            return None
        _, code, param = link
        return call(code, param, x, out)


_registered: dict[str, Any] = {}


def library(leaf: str) -> Any:
    """Where a leaf registers its operations with torch. What an interrupted import of it has left there is taken back first."""
    torch = sys.modules["torch"]
    if leaf in _registered:
        _registered[leaf]._destroy()
    _registered[leaf] = torch.library.Library("anymax", "FRAGMENT")
    return _registered[leaf]


def bridge(x: Array) -> Any:
    """The bridge of x's framework: `apply` and `loss`, on rows."""
    if is_torch(x):
        from . import torch as leaf  # late: only where torch is loaded already

        return leaf
    if is_jax(x):
        from . import jax as leaf  # late: only where jax is loaded already

        return leaf
    return plain
