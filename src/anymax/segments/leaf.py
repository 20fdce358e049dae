"""Which engine serves the segments of a kind of array, with its derivatives."""

from __future__ import annotations

from typing import Any

from .._array import Array, is_jax, is_torch
from ..kernels import ragged
from .call import SegmentCall


def leaf_of(call: SegmentCall) -> Any:
    """`apply`, `log`, `threshold`, `index_loss` for arrays like x, which answer None where no engine serves; None: padded rows do."""
    if is_jax(call.x):
        from . import jax  # late: JAX is loaded already

        return jax
    if is_torch(call.x):
        from . import torch  # late: torch is loaded already

        return torch
    return _plain if call.segments.known else None


class _plain:
    """The engine for arrays without derivatives. Each answers None where it refuses."""

    @staticmethod
    def apply(call: SegmentCall) -> Array | None:
        if ragged.refuse("forward", call.mapping, call.x) is not None:
            return None
        return ragged.forward(call.segments_first, call.x, call.layout)

    @staticmethod
    def log(call: SegmentCall) -> Array | None:
        if ragged.refuse("log_forward", call.mapping, call.x) is not None:
            return None
        return ragged.log_forward(call.segments_first, call.x, call.layout)

    @staticmethod
    def threshold(call: SegmentCall) -> Array | None:
        if ragged.refuse("threshold", call.mapping, call.x) is not None:
            return None
        return ragged.threshold(call.segments_first, call.x, call.layout)

    @staticmethod
    def index_loss(call: SegmentCall, place: Array) -> Array | None:
        if ragged.refuse("index_loss", call.mapping, call.x) is not None:
            return None
        return ragged.index_loss(call.segments_first, call.x, place, call.layout)
