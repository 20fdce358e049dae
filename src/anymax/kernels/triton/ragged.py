"""Ragged rows on a GPU: the row kernels over segments of one array, without padding; segments of about the same length share a launch.

A short segment is a tile that is read once, and a program of one warp has several. A segment too long for a tile is read in steps. If the
index is not sorted, the entries are sorted first.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from ..._array import Array
from ..._core.mapping import Mapping
from ..engine import IndexLoss, RaggedEngine, SegmentsAlong
from ..link import NEED_SCORES, Link
from . import ENGINE, prepared, triton_link

# the longest segments of each launch; one more launch is for longer ones
_LENGTHS = (16, 64, 256, 1024, 4096, 16384)
_SPARE = 1 << 18  # scores: a launch costs as much as reading so many places of padding
_INTS = 2**31


class Launch(NamedTuple):
    """The indices of segments of about the same length, and the longest length."""

    ids: Any
    longest: int


def launches(ptr: np.ndarray) -> tuple[Launch, ...]:
    """The segments grouped by length; a small group joins the next longer one."""
    lengths = np.diff(ptr)
    kinds = np.searchsorted(_LENGTHS, lengths)
    groups = [ids for kind in range(len(_LENGTHS) + 1) if (ids := np.flatnonzero(kinds == kind)).size]
    out: list[np.ndarray] = []
    for ids in groups:
        longest = int(lengths[ids].max())
        if out and longest <= _LENGTHS[-1] and out[-1].size * longest <= _SPARE:
            ids = np.sort(np.concatenate([out.pop(), ids]))
        out.append(ids)
    return tuple(Launch(ids.astype(np.int32), int(lengths[ids].max())) for ids in out)


class _Entries:
    """The entries of a call as the kernels take them: [entries, heads], one segment after another."""

    def __init__(self, mapping: Mapping, like: Array, along: SegmentsAlong) -> None:
        self.launch, link = prepared(mapping)
        self.segments, self.axis = along
        self.lead = tuple(n for i, n in enumerate(like.shape) if i != self.axis)
        self.count, self.heads = like.shape[self.axis], math.prod(self.lead)
        self.order = self.segments.placed("order", like)
        if link.params is not None:
            torch = sys.modules["torch"]
            shape = (self.segments.num_segments, *self.lead)
            link = link._replace(params=torch.as_tensor(link.params).expand(shape).reshape(-1, self.heads))
        self.link = link
        self.shape, self.kind, self.device = tuple(like.shape), like.dtype, like.device

    def rows(self, a: Array) -> Array:
        a = a.movedim(self.axis, 0).reshape(self.count, self.heads)
        return a if self.order is None else a.index_select(0, self.order)

    def room(self) -> tuple[Array, Array]:
        """(a result with the shape of the scores, a view of it as [entries, heads])."""
        torch = sys.modules["torch"]
        if 0 < self.axis < len(self.shape) - 1:
            flat = torch.empty((self.count, self.heads), dtype=self.kind, device=self.device)
            return flat.view(self.count, *self.lead).movedim(0, self.axis), flat
        out = torch.empty(self.shape, dtype=self.kind, device=self.device)
        return out, out.movedim(self.axis, 0).view(self.count, self.heads)

    def each(self, call: Any, like: Array) -> None:
        """Runs call(cut) for each group of segments."""
        made = self.segments.cached("launches", like, lambda: launches(self.segments.ptr))
        ptr = self.segments.placed("ptr", like)
        for ids, longest in made:
            call(self.launch.Cut(ptr, ids, longest))

    def written(self, call: Any, like: Array) -> Array:
        """The result of call(cut, out [entries, heads]), in the shape and order of the scores."""
        result, flat = self.room()
        if not result.numel():
            return result
        out = flat if self.order is None else flat.new_empty(flat.shape)
        self.each(lambda cut: call(cut, out), like)
        if self.order is not None:
            flat.index_copy_(0, self.order, out)
        return result

    def numbers(self, *parts: int) -> Array:
        """An uninitialized fp32 tensor with a number for each head of each segment."""
        torch = sys.modules["torch"]
        return torch.empty((*parts, self.segments.num_segments, self.heads), dtype=torch.float32, device=self.device)


class TritonRagged(RaggedEngine):
    """Gradients of p need no `saved` argument; those of losses need four numbers for each segment and head."""

    rows = ENGINE

    def refuse(self, op: str, mapping: Mapping, x: Array) -> str | None:
        reason = super().refuse(op, mapping, x)
        link = triton_link(mapping) if reason is None else None
        if isinstance(link, Link) and link.kind == "perturb_max":
            return "it has no kernel for segments of perturb_max"
        if reason is None and x.numel() >= _INTS:
            return f"it takes fewer than {_INTS} scores in segments"
        return reason

    def forward(self, mapping: Mapping, x: Array, along: SegmentsAlong) -> Array:
        return _forward("p", mapping, x, along)

    def log_forward(self, mapping: Mapping, x: Array, along: SegmentsAlong) -> Array:
        return _forward("log", mapping, x, along)

    def vjp(
        self, mapping: Mapping, x: Array | None, p: Array, g: Array, along: SegmentsAlong, saved: Any = None
    ) -> Array:
        return _backward(mapping, False, x, p, g, along)

    def log_vjp(self, mapping: Mapping, x: Array | None, log_p: Array, g: Array, along: SegmentsAlong) -> Array:
        return _backward(mapping, True, x, log_p, g, along)

    def index_loss(self, mapping: Mapping, x: Array, index: Array, along: SegmentsAlong, *, save: bool) -> IndexLoss:
        entries = _Entries(mapping, x, along)
        both = entries.numbers(2)
        state = both.new_empty((*both.shape[1:], 4)) if save else None
        rows, index = entries.rows(x), index.reshape(-1)
        run = entries.launch.run
        if both.numel():
            entries.each(
                lambda cut: run("loss", entries.link, rows, index=index, value=both, state=state, ignore=-1, cut=cut),
                rows,
            )
        return IndexLoss(both[0].view(entries.segments.num_segments, *entries.lead), state)

    def index_loss_grad(
        self, mapping: Mapping, x: Array, index: Array, scale: Array, saved: Any, along: SegmentsAlong
    ) -> Array:
        entries = _Entries(mapping, x, along)
        rows, index, scale = entries.rows(x), index.reshape(-1), scale.float().reshape(-1)
        run = entries.launch.run

        def write(cut: Any, out: Array) -> None:
            run("grad", entries.link, rows, out=out, index=index, scale=scale, state=saved, ignore=-1, cut=cut)

        return entries.written(write, rows)

    def threshold(self, mapping: Mapping, x: Array, along: SegmentsAlong) -> Array:
        entries = _Entries(mapping, x, along)
        tau, rows = entries.numbers(), entries.rows(x)
        if tau.numel():
            entries.each(lambda cut: entries.launch.run("tau", entries.link, rows, value=tau, cut=cut), rows)
        return tau.view(entries.segments.num_segments, *entries.lead)


def _forward(mode: str, mapping: Mapping, x: Array, along: SegmentsAlong) -> Array:
    entries = _Entries(mapping, x, along)
    rows = entries.rows(x)
    return entries.written(lambda cut, out: entries.launch.run(mode, entries.link, rows, out=out, cut=cut), rows)


def _backward(mapping: Mapping, logs: bool, x: Array | None, p: Array, g: Array, along: SegmentsAlong) -> Array:
    entries = _Entries(mapping, p, along)
    scores = entries.rows(x) if x is not None and entries.link.kind in NEED_SCORES else None
    rows, slopes = entries.rows(p), entries.rows(g)
    back = entries.launch.backward
    return entries.written(lambda cut, out: back(entries.link, logs, scores, rows, slopes, out, cut=cut), rows)


RAGGED = TritonRagged()
