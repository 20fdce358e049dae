"""The arguments of a verb on segments, checked once."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import _array
from .._array import (
    Array,
    as_dtype,
    asarray,
    check_axis,
    floating,
    from_last,
    namespace,
    pick_axis,
    quiet,
    stop_gradient,
    to_last,
    upcast,
)
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.shards import refuse as refuse_sharded
from ..autodiff import bridge
from ..kernels.engine import SegmentsAlong
from . import tensors
from .layout import Segments, along, read
from .padded import segments_last


@dataclasses.dataclass(frozen=True)
class SegmentCall:
    """Scores, and the segments of their entries."""

    xp: Any
    mapping: Mapping  # parameters that are arrays have the segments last
    x: Array  # as given, in a floating dtype
    axis: int  # of the entries
    segments: Segments

    @classmethod
    def of(
        cls, who: str, mapping: Mapping | str, x: Any, *, index: Any = None, ptr: Any = None, lengths: Any = None,
        num_segments: Any = None, axis: Any = 0, dim: Any = None,
    ) -> SegmentCall:  # fmt: skip
        tensors.refuse(who, x)
        refuse_sharded(who, x, index=index, ptr=ptr, lengths=lengths)
        mapping, x = as_mapping(mapping, who), asarray(x)
        xp = namespace(x)
        x = floating(x, xp)
        axis = check_axis(pick_axis(axis, dim, 0), x.ndim)
        what = f"x of shape {tuple(x.shape)} along axis {axis}"
        segments = along(who, read(who, index, ptr, lengths, num_segments), x.shape[axis], what)
        call = cls(xp, mapping, x, axis, segments)
        params = {k: call.one_each(v, f"{mapping.name}: {k}") for k, v in mapping.params().items()}
        return dataclasses.replace(call, mapping=mapping.laid_out(**params)) if params else call

    def constant(self) -> SegmentCall:
        """The call as a constant of differentiation."""
        return dataclasses.replace(self, mapping=self.mapping.frozen(), x=stop_gradient(self.x))

    def one_each(self, value: Any, name: str) -> Any:
        """A value with one number per segment, checked to broadcast, with the segments moved last."""
        if not _array.is_array(value):
            return value
        value = _array.like(value, upcast(self.x[:0], self.xp), self.xp)
        return segments_last(value, self.axis, self.shape, name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a result with one number per segment."""
        return tuple(self.segments.num_segments if i == self.axis else n for i, n in enumerate(self.x.shape))

    @property
    def scores(self) -> Array:
        return upcast(self.x, self.xp) if _array.narrow(self.x) else self.x

    @property
    def rows(self) -> Array:
        """The scores with the entries last; 8-bit scores as fp32."""
        return to_last(self.scores, self.axis, self.xp)

    def back(self, out: Array) -> Array:
        """Move the last axis back to that of the entries; convert to the dtype of the scores."""
        with quiet(out):
            return as_dtype(from_last(out, self.axis, self.xp), self.x.dtype, self.xp)

    @property
    def along(self) -> SegmentsAlong:
        return SegmentsAlong(self.segments, self.axis)

    def unpadded(self, op: str, *target_rank: Array) -> Array | None:
        """The result of an operation of engines; None if none has it for segments, so that the rows must be padded.

        "index_loss" takes the rank of each target in its segment, [..., segments].
        """
        return bridge(self.x).segments(op, self.mapping, self.x, self.along, *target_rank)
