"""Segments of entries along an axis, without padding, by the C++ engine (csrc/doors/ragged.cpp)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from .._array import Array, from_last, namespace, to_last
from .._core.mapping import Mapping
from . import native
from .arrays import arrays_of, dtype_of, room_in, wide
from .engine import IndexLoss, SegmentsEngine
from .link import CODES, NEED_SCORES, WITH_SLOPE
from .linked import found_link, link_of

MOST = 2**31 - 1  # the most segments: the engine counts them in 32 bits
_FOR_EACH = ("index_loss", "slope", "threshold")  # the operations with a number for each segment


class TooMany(ValueError):
    """There are more segments than MOST."""


def _few(count: int) -> int:
    if count > MOST:
        raise TooMany(count)
    return count


def sort(index: np.ndarray, segments: int | None, threads_of_torch: bool) -> tuple[int, np.ndarray, np.ndarray | None]:
    """(-1, ptr, order), where `order` sorts the entries by segment and is None if they are sorted.

    (entry, ptr, None) where an entry's index is out of range. segments: how many there are; None: the largest index plus one.
    """
    engine = native.load()
    if not isinstance(engine, str):
        # most indices are sorted: the last is then the largest, and no order is needed
        last = segments if segments is not None else max(int(index[-1]) + 1, 0) if index.size else 0
        ptr = np.empty(_few(last) + 1, np.int64)
        if engine.sort_segments(index, ptr, None, threads_of_torch) == index.size:
            return -1, ptr, None
    count = segments if segments is not None else max(int(index.max(initial=-1)) + 1, 0)
    ptr = np.zeros(_few(count) + 1, np.int64)
    if not isinstance(engine, str):
        # zeros: every place has an entry, even if another thread writes to the index meanwhile
        order = np.zeros(index.shape, np.int64)
        done = engine.sort_segments(index, ptr, order, threads_of_torch)
        if done == -1 - index.size:
            raise RuntimeError(
                "the index has changed while it was sorted: let no other thread write to it, or give a copy"
            )
        return (-1 - done, ptr, None) if done < 0 else (-1, ptr, order)
    wrong = (index < 0) | (index >= count)
    if wrong.any():
        return int(wrong.argmax()), ptr, None
    np.cumsum(np.bincount(index, minlength=count), out=ptr[1:])
    return -1, ptr, None if (index[1:] >= index[:-1]).all() else np.argsort(index, kind="stable")


def _one_stride(a: Array, axis: int) -> bool:
    """True if one stride leads through the heads of an entry, and the address is aligned for the dtype."""
    axes = [i for i in range(a.ndim) if i != axis and a.shape[i] != 1]
    steps = arrays_of(a).strides(a)
    return arrays_of(a).aligned(a) and all(steps[i] == steps[j] * a.shape[j] for i, j in itertools.pairwise(axes))


def _laid_out(operands: list[Any], axis: int) -> tuple[list[Any], int]:
    """The operands, copied where their heads have no single stride, and the axis of their entries, moved to the front from the middle."""
    lead = next(a for a in operands if a is not None)
    if 0 < axis < lead.ndim - 1:
        axes, xp = (axis, *(i for i in range(lead.ndim) if i != axis)), namespace(lead)
        operands, axis = [None if a is None else xp.permute_dims(a, axes) for a in operands], 0
    return [a if a is None or _one_stride(a, axis) else arrays_of(a).contiguous(a) for a in operands], axis


def _segments_first(a: Any) -> Any:
    return from_last(a, 0, namespace(a)) if a.ndim > 1 else a


def _scores(mapping: Mapping, x: Array) -> Array | None:
    """The scores, where a gradient needs them."""
    return x if found_link(mapping).kind in NEED_SCORES else None


class NativeSegments(SegmentsEngine):
    """Its `saved` argument is p sorted by segment, [entries, heads], where the entries have an order; losses need none."""

    name = native.ENGINE.name
    rows = native.ENGINE

    def _run(
        self, op: str, mapping: Mapping, x: Any, p: Any = None, g: Any = None, *, index: Any = None, scale: Any = None,
        saved: Any = None, slope: bool = False,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """(the result: a number for each entry, or for each segment and head; the derivative of the latter, a loss, with `slope`)."""
        segments, axis = self.along
        lead, each = x if p is None else p, op in _FOR_EACH
        framework, dtype = arrays_of(lead), dtype_of(lead)
        shape = (segments.num_segments, *lead.shape[:axis], *lead.shape[axis + 1 :])
        g = framework.cast(g, dtype, lead) if g is not None and dtype_of(g) != dtype else g
        (x, p, g), at = _laid_out([x, p, g], axis)
        lead = x if p is None else p
        out = None if each else room_in(framework, tuple(lead.shape), dtype)
        value = room_in(framework, shape, wide(lead)) if each else None
        loss_slope = room_in(framework, shape, wide(lead)) if slope else None
        if math.prod(shape if each else lead.shape):
            link = found_link(mapping)
            if link.params is not None:
                link = native.broadcast(link._replace(params=_segments_first(link.params)), lead, shape)
            index = None if index is None else framework.contiguous(_segments_first(index))
            scale = None if scale is None else framework.contiguous(_segments_first(scale))
            answer = native.engine_for(lead).segments(
                link, CODES[op], segments.ptr, segments.order, at, x, p, g, out, index, scale, value, saved, loss_slope
            )
            if answer is None:
                raise native.not_computed(f"{op} of segments", x, p, g, out)
        if out is not None and at == axis:
            return out, None
        xp = namespace(lead)
        if out is not None:
            return from_last(to_last(out, at, xp), axis, xp), None
        return to_last(value, 0, xp), None if loss_slope is None else to_last(loss_slope, 0, xp)

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        """It knows links alone; soft ranks, which the engine of rows has too, are none."""
        link = link_of(mapping)
        if isinstance(link, str):
            return link
        if link.upper is not None:
            return "it takes no segments of maps with upper bounds"
        return super().refuse(op, mapping, x)

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        return self._run("forward", mapping, x)[0]

    def forward_saving(
        self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None
    ) -> tuple[Array, Array | None]:
        saved = None
        if self.along.segments.order is not None:
            entries = x.shape[self.along.axis]
            saved = room_in(arrays_of(x), (entries, math.prod(x.shape) // max(entries, 1)), dtype_of(x))
        return self._run("forward", mapping, x, saved=saved)[0], saved

    def log_forward(self, mapping: Mapping, x: Array) -> Array:
        return self._run("log_forward", mapping, x)[0]

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        return self._run("vjp", mapping, _scores(mapping, x), p, g, saved=saved)[0]

    def log_vjp(self, mapping: Mapping, x: Array, log_p: Array, g: Array) -> Array:
        return self._run("log_vjp", mapping, _scores(mapping, x), log_p, g)[0]

    def slope(self, mapping: Mapping, name: str, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        native.refuse_parameter(mapping, found_link(mapping), name)
        return self._run("slope", mapping, None, p, g, saved=saved)[0]

    def index_loss(
        self, mapping: Mapping, x: Array, index: Array, *, save: bool, slope: bool = False, **of_rows: Any
    ) -> IndexLoss:
        slope = slope and found_link(mapping).kind in WITH_SLOPE
        value, loss_slope = self._run("index_loss", mapping, x, index=index, slope=slope)
        return IndexLoss(value, None, slope=loss_slope)

    def index_loss_grad(
        self, mapping: Mapping, x: Array, index: Array, scale: Array, saved: Any, **of_rows: Any
    ) -> Array:
        return self._run("index_loss_grad", mapping, x, index=index, scale=scale)[0]

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        """-inf for an empty segment, NaN for one with NaN or +inf."""
        return self._run("threshold", mapping, x)[0]
