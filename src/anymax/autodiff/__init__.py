"""The bridges to the frameworks' automatic differentiation. One file a framework; imported when its first array arrives."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernels
from .._array import Array, is_jax, is_torch
from .._core.mapping import Mapping
from ..kernels import native
from ..kernels.engine import BELOW

_FLOATS = frozenset(map(np.dtype, ("float32", "float64", "float16")))  # found quickly


class plain:
    """Arrays without automatic differentiation: NumPy, and whatever else follows the array-API standard."""

    @staticmethod
    def apply(mapping: Mapping, x: Array, mask: Array | None = None) -> Array:
        """p(x). A mask comes only where `masks` said yes."""
        engine = kernels.choose("forward", mapping, x)
        return engine.forward(mapping, x, mask)

    @staticmethod
    def masks(mapping: Mapping, x: Array) -> bool:
        """True where the engine of this call takes a mask beside the scores."""
        return kernels.choose("forward", mapping, x).takes_mask

    @staticmethod
    def log(mapping: Mapping, x: Array) -> Array | None:
        """log p(x) by a compiled engine; None: it is for the reference."""
        engine = kernels.compiled("log_forward", mapping, x)
        return None if engine is None else engine.log_forward(mapping, x)

    @staticmethod
    def reduces(x: Array) -> bool:
        """True for scores whose losses `index_loss` has along any axis, their sum and mean too, without the rows of a negative index."""
        return type(x) is np.ndarray and (x.dtype in _FLOATS or x.dtype.name == "bfloat16")

    @staticmethod
    def index_loss(
        mapping: Mapping, x: Array, index: Array, axis: int = -1, ignored: int = BELOW, reduction: str = "none"
    ) -> Array | None:
        """The loss of class indices, fp32 or fp64, by an engine that has it in one pass.
        None where none has, or where an index is no class: the caller composes the loss, or says what is wrong."""
        engine = kernels.compiled("index_loss", mapping, x) if type(index) is np.ndarray else None
        made = engine and engine.index_loss(
            mapping, x, index, save=False, axis=axis, ignored=ignored, reduction=reduction
        )
        return made and made.value[()]

    @staticmethod
    def loss(mapping: Mapping, x: Array, y: Array) -> Array:
        p = plain.apply(mapping, x)
        return kernels.choose("loss", mapping, x).loss(mapping, x, p, y)

    KINDS = (np.ndarray,)  # the kinds of array that `quick` takes

    @staticmethod
    def ready() -> Any:
        """`quick(mapping, x, axis, mask, out)`: p(x) by the CPU engine, None where anything is out of the ordinary. None: no engine."""
        engine = native.load()
        return None if isinstance(engine, str) else engine.forward

    @staticmethod
    def into(mapping: Mapping, x: Array, mask: Array | None, out: Any) -> bool:
        """Writes p(x) to `out`, where an engine can."""
        return kernels.choose("forward", mapping, x).write(mapping, x, mask, out)


def bridge(x: Array) -> Any:
    """The bridge of x's framework: `apply` and `loss`, on rows."""
    if is_torch(x):
        from . import torch as leaf  # late: only where torch is loaded already

        return leaf
    if is_jax(x):
        from . import jax as leaf  # late: only where jax is loaded already

        return leaf
    return plain
