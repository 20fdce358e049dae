"""Arrays without derivatives: segments by an engine."""

from __future__ import annotations

from .._array import Array
from .._core.mapping import Mapping
from ..kernels import choose_ragged
from ..kernels.engine import SegmentsAlong


def unpadded(op: str, mapping: Mapping, x: Array, along: SegmentsAlong, *place: Array) -> Array | None:
    engine = choose_ragged(op, mapping, x, along)
    return engine and engine.result(op, mapping, x, *place)
