"""The part of a bridge for segments: the operations on rows of unequal length."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .._array import Array
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
        engine = call.engine("forward")
        return engine and engine.forward(call.segments_first, call.x, call.segments_along)

    def log(self, call: SegmentCall) -> Array | None:
        engine = call.engine("log_forward")
        return engine and engine.log_forward(call.segments_first, call.x, call.segments_along)

    def threshold(self, call: SegmentCall) -> Array | None:
        engine = call.engine("threshold")
        return engine and engine.threshold(call.segments_first, call.x, call.segments_along)

    def index_loss(self, call: SegmentCall, place: Array) -> Array | None:
        engine = call.engine("index_loss")
        if engine is None:
            return None
        return engine.index_loss(call.segments_first, call.x, place, call.segments_along, save=False).value


BRIDGE = NumpySegments()
