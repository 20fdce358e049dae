"""The reference engine: the maps' own array-API code. It computes every call."""

from __future__ import annotations

from typing import Any

from .._array import Array, floating, namespace, quiet, upcast
from .._core.mapping import Mapping
from .engine import Engine


class Reference(Engine):
    name = "reference"

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        return None

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        return _in_compute_dtype(mapping.forward, x)

    def log_forward(self, mapping: Mapping, x: Array) -> Array | None:
        return _in_compute_dtype(mapping.log_forward, x)

    def differentiable(self, mapping: Mapping, x: Array, held: Array | None = None) -> Array:
        return _in_compute_dtype(lambda x, xp: mapping.differentiable(x, xp, held), x)

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        return _in_compute_dtype(mapping.vjp, x, p, g)

    def jvp(self, mapping: Mapping, x: Array, p: Array, v: Array) -> Array:
        return _in_compute_dtype(mapping.jvp, x, p, v)

    def loss(self, mapping: Mapping, x: Array, p: Array, y: Array) -> Array:
        return _in_compute_dtype(mapping.loss, x, p, y)

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        xp = namespace(x)
        with quiet(x):
            return mapping.threshold(upcast(x, xp), xp)


def _in_compute_dtype(method: Any, x: Array, *others: Array) -> Array:
    xp = namespace(x)
    x = floating(x, xp)
    with quiet(x):
        out = method(upcast(x, xp), *(upcast(a, xp) for a in others), xp)
    return out if out is None or out.dtype == x.dtype else xp.astype(out, x.dtype)


ENGINE = Reference()
