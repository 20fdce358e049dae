"""The part of a bridge for segments: the operations on rows of unequal length."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .._array import Array
from ..kernels import ragged
from .call import SegmentCall


class SegmentBridge(ABC):
    """An operation returns None if no engine can compute it; the caller then pads the rows, whose operations have derivatives."""

    @abstractmethod
    def apply(self, call: SegmentCall) -> Array | None:
        """p(x), of the shape of the scores."""

    def log(self, call: SegmentCall) -> Array | None:
        """log p(x)."""
        return None

    def threshold(self, call: SegmentCall) -> Array | None:
        """tau of each segment, [segments, heads ...], without a derivative."""
        return None

    def index_loss(self, call: SegmentCall, place: Array) -> Array | None:
        """The loss of each segment for the place of its target in it (none if below 0), both [segments, heads ...]."""
        return None


class NumpySegments(SegmentBridge):
    """Arrays without derivatives."""

    def apply(self, call: SegmentCall) -> Array | None:
        return ragged.forward(call.segments_first, call.x, call.layout) if _has("forward", call) else None

    def log(self, call: SegmentCall) -> Array | None:
        return ragged.log_forward(call.segments_first, call.x, call.layout) if _has("log_forward", call) else None

    def threshold(self, call: SegmentCall) -> Array | None:
        return ragged.threshold(call.segments_first, call.x, call.layout) if _has("threshold", call) else None

    def index_loss(self, call: SegmentCall, place: Array) -> Array | None:
        if not _has("index_loss", call):
            return None
        return ragged.index_loss(call.segments_first, call.x, place, call.layout)


def _has(op: str, call: SegmentCall) -> bool:
    return call.segments.known and ragged.refuse(op, call.mapping, call.x) is None


BRIDGE = NumpySegments()
