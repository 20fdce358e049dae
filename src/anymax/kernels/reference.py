"""The reference engine: the maps' own array-API code. It serves everything."""

from __future__ import annotations

from typing import Any

from .._array import Array, floating, namespace, quiet, upcast
from .._core.mapping import Mapping

name = "reference"


def refuse(op: str, mapping: Mapping, x: Any) -> str | None:
    return None


def forward(mapping: Mapping, x: Array) -> Array:
    return _in_compute_dtype(mapping.forward, x)


def log_forward(mapping: Mapping, x: Array) -> Array | None:
    return _in_compute_dtype(mapping.log_forward, x)


def differentiable(mapping: Mapping, x: Array, held: Array | None = None) -> Array:
    return _in_compute_dtype(lambda x, xp: mapping.differentiable(x, xp, held), x)


def vjp(mapping: Mapping, x: Array, p: Array, g: Array) -> Array:
    return _in_compute_dtype(mapping.vjp, x, p, g)


def jvp(mapping: Mapping, x: Array, p: Array, v: Array) -> Array:
    return _in_compute_dtype(mapping.jvp, x, p, v)


def loss(mapping: Mapping, x: Array, p: Array, y: Array) -> Array:
    """`Omega*(x) - <x, y>`, [..., 1]; x is finite here, p = p(x)."""
    return _in_compute_dtype(mapping.loss, x, p, y)


def _in_compute_dtype(method: Any, x: Array, *others: Array) -> Array:
    xp = namespace(x)
    x = floating(x, xp)
    with quiet(x):
        out = method(upcast(x, xp), *(upcast(a, xp) for a in others), xp)
    return out if out is None or out.dtype == x.dtype else xp.astype(out, x.dtype)
