"""The engine for `Softmax` on torch: torch's own fused softmax, which is faster than a formula of plain operations."""

from __future__ import annotations

import sys
from typing import Any

from .._array import Array, eager, is_jax, is_torch
from .._core.mapping import Mapping
from .engine import Engine


class Framework(Engine):
    name = "framework"
    ops = ("forward", "vjp")

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        if mapping.kernel != "softmax":
            return f"torch has a fused softmax, but no {mapping.name}"
        if not is_torch(x):
            kind = "jax" if is_jax(x) else type(x).__module__.split(".")[0]
            return f"it takes torch tensors, these scores are of {kind}"
        if op not in self.ops:
            return self.lacks(op)
        if not eager(x):
            return "it takes eager calls; under tracing the formula is visible to the compiler"
        return None

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        """torch.softmax, except that fully masked rows are zeros, not NaN."""
        torch = sys.modules["torch"]
        p = torch.softmax(x, -1)
        if x.numel() and bool(p[..., :1].isnan().any()):  # a row that is NaN anywhere is NaN at its first entry
            p = torch.where((x == float("-inf")).all(-1, keepdim=True), torch.zeros_like(p), p)
        return p

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        return sys.modules["torch"].ops.aten._softmax_backward_data(g, p, -1, p.dtype)


ENGINE = Framework()
