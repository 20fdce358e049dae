"""Arrays without automatic differentiation: NumPy's, and all others that follow the array-API standard."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernels
from .._array import Array
from .._core.mapping import Mapping
from ..kernels import native
from ..kernels.engine import BELOW
from .bridge import BRIDGES, Bridge

_FLOATS = frozenset(map(np.dtype, ("float32", "float64", "float16")))  # a set is searched quickly


class NumpyBridge(Bridge):
    framework = "numpy"
    kinds = (np.ndarray,)

    def apply(self, mapping: Mapping, x: Array, mask: Array | None = None) -> Array:
        return kernels.choose("forward", mapping, x).forward(mapping, x, mask)

    def quick(self) -> Any:
        engine = native.load()
        return None if isinstance(engine, str) else engine.forward

    def masks(self, mapping: Mapping, x: Array) -> bool:
        return kernels.choose("forward", mapping, x).takes_mask

    def write(self, mapping: Mapping, x: Array, mask: Array | None, out: Any) -> bool:
        return kernels.choose("forward", mapping, x).write(mapping, x, mask, out)

    def loss(self, mapping: Mapping, x: Array, y: Array) -> Array:
        p = self.apply(mapping, x)
        return kernels.choose("loss", mapping, x).loss(mapping, x, p, y)

    def reduces(self, x: Array) -> bool:
        return type(x) is np.ndarray and (x.dtype in _FLOATS or x.dtype.name == "bfloat16")

    def index_loss(
        self, mapping: Mapping, x: Array, index: Array, axis: int = -1, ignored: int = BELOW, reduction: str = "none"
    ) -> Array | None:
        engine = kernels.compiled("index_loss", mapping, x) if type(index) is np.ndarray else None
        loss = engine and engine.index_loss(
            mapping, x, index, save=False, axis=axis, ignored=ignored, reduction=reduction
        )
        return loss and loss.value[()]


BRIDGE = NumpyBridge()
BRIDGES.update(dict.fromkeys(NumpyBridge.kinds, BRIDGE))
