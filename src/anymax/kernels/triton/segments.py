"""Ragged rows on a GPU: the row kernels over segments of one tensor, without padding; segments of about the same length share a launch.

A short segment is a tile that is read once, and a program of one warp has several. A segment too long for a tile is read in steps. If the
index is not sorted, the entries are sorted first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..link import LEFT_OUT, NEED_SCORES, Link
from . import launch
from .operands import Cut

Tensor = torch.Tensor

# the longest segments of each launch; one more launch is for longer ones
_LENGTHS = (16, 64, 256, 1024, 4096, 16384)
_SPARE = 1 << 18  # scores: a launch costs as much as reading so many places of padding


class Launch(NamedTuple):
    """The indices of segments of about the same length, int32, and the longest length."""

    ids: Any
    longest: int


def launches(ptr: Tensor) -> tuple[Launch, ...]:
    """The segments grouped by length, from their bounds on the CPU; a small group joins the next longer one."""
    lengths = ptr.diff()
    kinds = torch.bucketize(lengths, torch.tensor(_LENGTHS, device=ptr.device))
    out: list[Tensor] = []
    for kind in range(len(_LENGTHS) + 1):
        ids = (kinds == kind).nonzero().flatten()
        if not len(ids):
            continue
        longest = int(lengths[ids].max())
        if out and longest <= _LENGTHS[-1] and len(out[-1]) * longest <= _SPARE:
            ids = torch.cat([out.pop(), ids]).sort().values
        out.append(ids)
    return tuple(Launch(ids.to(torch.int32), int(lengths[ids].max())) for ids in out)


class Layout(NamedTuple):
    """The segments of a call, on the device of its scores."""

    count: int
    ptr: Tensor  # int64 [count + 1]
    launches: tuple[Launch, ...]
    order: Tensor | None = None  # of the entries, if those of a segment are not side by side


class Entries:
    """The entries of a call as the kernels take them: [entries, heads], one segment after another."""

    def __init__(self, link: Link, like: Tensor, layout: Layout, axis: int) -> None:
        self.layout, self.axis = layout, axis
        self.lead = tuple(n for i, n in enumerate(like.shape) if i != axis)
        self.count, self.heads = like.shape[axis], math.prod(self.lead)
        if link.params is not None:
            params = torch.as_tensor(link.params).expand((*self.lead, layout.count)).movedim(-1, 0)
            link = link._replace(params=params.reshape(-1, self.heads))
        self.link = link
        self.shape, self.kind, self.device = tuple(like.shape), like.dtype, like.device

    def rows(self, a: Tensor) -> Tensor:
        a = a.movedim(self.axis, 0).reshape(self.count, self.heads)
        return a if self.layout.order is None else a.index_select(0, self.layout.order)

    def room(self) -> tuple[Tensor, Tensor]:
        """(a result with the shape of the scores, a view of it as [entries, heads])."""
        if 0 < self.axis < len(self.shape) - 1:
            flat = torch.empty((self.count, self.heads), dtype=self.kind, device=self.device)
            return flat.view(self.count, *self.lead).movedim(0, self.axis), flat
        out = torch.empty(self.shape, dtype=self.kind, device=self.device)
        return out, out.movedim(self.axis, 0).view(self.count, self.heads)

    def each(self, call: Callable[[Cut], Any]) -> None:
        """Runs call(cut) for each group of segments."""
        for ids, longest in self.layout.launches:
            call(Cut(self.layout.ptr, ids, longest))

    def written(self, call: Callable[[Cut, Tensor], Any]) -> Tensor:
        """The result of call(cut, out [entries, heads]), in the shape and order of the scores."""
        result, flat = self.room()
        if not result.numel():
            return result
        order = self.layout.order
        out = flat if order is None else flat.new_empty(flat.shape)
        self.each(lambda cut: call(cut, out))
        if order is not None:
            flat.index_copy_(0, order, out)
        return result

    def each_last(self, a: Tensor) -> Tensor:
        """A number for each head of each segment, [..., segments], from [segments, heads]."""
        return a.view(self.layout.count, *self.lead).movedim(0, -1)

    def numbers(self, *parts: int) -> Tensor:
        """An uninitialized fp32 tensor with a number for each head of each segment."""
        return torch.empty((*parts, self.layout.count, self.heads), dtype=torch.float32, device=self.device)

    # -- the operations of the engine --------------------------------------------------------------------------------------------------

    def forward(self, mode: str, x: Tensor) -> Tensor:
        """p or, with mode "log", log p."""
        rows = self.rows(x)
        return self.written(lambda cut, out: launch.run(mode, self.link, rows, out=out, cut=cut))

    def backward(self, logs: bool, x: Tensor, p: Tensor, g: Tensor) -> Tensor:
        """J^T g of p, or of log p with `logs`."""
        scores = self.rows(x) if self.link.kind in NEED_SCORES else None
        rows, slopes = self.rows(p), self.rows(g)
        return self.written(lambda cut, out: launch.backward(self.link, logs, scores, rows, slopes, out, cut=cut))

    def loss(self, x: Tensor, index: Tensor, save: bool) -> tuple[Tensor, Tensor | None]:
        """(the loss of one class of each segment, four numbers each for the gradient); segments with `LEFT_OUT` are left out."""
        both = self.numbers(2)
        state = both.new_empty((*both.shape[1:], 4)) if save else None
        targets = {"index": _flat(index), "value": both, "state": state, "ignore": LEFT_OUT}
        rows = self.rows(x)
        if both.numel():
            self.each(lambda cut: launch.run("loss", self.link, rows, cut=cut, **targets))
        return self.each_last(both[0]), state

    def loss_grad(self, x: Tensor, index: Tensor, scale: Tensor, state: Any) -> Tensor:
        targets = {"index": _flat(index), "scale": _flat(scale.float()), "state": state, "ignore": LEFT_OUT}
        rows = self.rows(x)
        return self.written(lambda cut, out: launch.run("grad", self.link, rows, out=out, cut=cut, **targets))

    def threshold(self, x: Tensor) -> Tensor:
        tau, rows = self.numbers(), self.rows(x)
        if tau.numel():
            self.each(lambda cut: launch.run("tau", self.link, rows, value=tau, cut=cut))
        return self.each_last(tau)


def _flat(a: Tensor) -> Tensor:
    """[segments * heads] from [..., segments]."""
    return a.movedim(-1, 0).reshape(-1)
