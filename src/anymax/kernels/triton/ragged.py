"""The engine for segments on a GPU: maps and `Segments` to links and layouts for the kernels (`segments`)."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from ..._array import Array
from ..._core.mapping import Mapping
from ..engine import SLOPE, IndexLoss, SegmentsEngine
from ..link import Link
from . import ENGINE, prepared, triton_link

_INTS = 2**31


class TritonSegments(SegmentsEngine):
    """Gradients of p need no `saved` argument; those of losses need four numbers for each segment and head."""

    name = ENGINE.name
    rows = ENGINE

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        reason = self.lacks(op) if op == SLOPE else super().refuse(op, mapping, x)
        link = triton_link(mapping) if reason is None else None
        if isinstance(link, Link) and link.kind == "perturb_max":
            return "it has no kernel for segments of perturb_max"
        if reason is None and x.numel() >= _INTS:
            return f"it takes fewer than {_INTS} scores in segments"
        return reason

    def entries(self, mapping: Mapping, like: Array) -> Any:
        """The entries of a call on scores like these, with the kernels for them."""
        kernels = importlib.import_module(f"{__package__}.segments")
        segments, axis = self.along
        groups = segments.cached("launches", like, lambda: _groups(kernels, segments.ptr))
        ptr, order = segments.ptr_of(like), segments.order_of(like)
        return kernels.Entries(
            prepared(mapping)[1], like, kernels.Layout(segments.num_segments, ptr, groups, order), axis
        )

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        return self.entries(mapping, x).forward("p", x)

    def log_forward(self, mapping: Mapping, x: Array) -> Array:
        return self.entries(mapping, x).forward("log", x)

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        return self.entries(mapping, p).backward(False, x, p, g)

    def log_vjp(self, mapping: Mapping, x: Array, log_p: Array, g: Array) -> Array:
        return self.entries(mapping, log_p).backward(True, x, log_p, g)

    def index_loss(
        self, mapping: Mapping, x: Array, index: Array, *, save: bool, slope: bool = False, **of_rows: Any
    ) -> IndexLoss:
        return IndexLoss(*self.entries(mapping, x).loss(x, index, save))

    def index_loss_grad(
        self, mapping: Mapping, x: Array, index: Array, scale: Array, saved: Any, **of_rows: Any
    ) -> Array:
        return self.entries(mapping, x).loss_grad(x, index, scale, saved)

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        return self.entries(mapping, x).threshold(x)


def _groups(kernels: Any, ptr: np.ndarray) -> Any:
    """The launches, as NumPy arrays, which `Segments` moves to devices."""
    made = kernels.launches(sys.modules["torch"].tensor(ptr, device="cpu"))
    return tuple(kernels.Launch(ids.numpy(), longest) for ids, longest in made)
