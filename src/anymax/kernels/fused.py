"""The engine for Fusedmax: the C++ engine (csrc/fused/), for NumPy arrays and torch tensors on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._array import Array, as_dtype, namespace, upcast
from .._core.mapping import Mapping
from . import native
from .arrays import arrays_of, empty_like, wide
from .engine import SLOPE, Engine
from .order import one_a_row, refuse_strength

KERNEL = "fusedmax"  # of the map
_ENGINE = "the engine of Fusedmax"


class Groups(NamedTuple):
    """Where the groups of each row begin, [..., n]."""

    memory: Array  # bool


class Fused(Engine):
    name = "fused"
    ops = ("forward", "vjp", SLOPE)
    compiled = True

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        if mapping.kernel != KERNEL:
            return "its map is Fusedmax"
        if op not in self.ops:
            return self.lacks(op)
        return refuse_strength(mapping) or native.refuse_array(x)

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        return _forward(mapping, x, None)

    def forward_saving(
        self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None
    ) -> tuple[Array, Groups]:
        groups = Groups(arrays_of(x).empty(tuple(x.shape), "bool"))
        return _forward(mapping, x, groups), groups

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Groups | None = None) -> Array:
        return _backward(mapping, x, p, g, saved, None)

    def slope(self, mapping: Mapping, name: str, x: Array, p: Array, g: Array, saved: Groups | None = None) -> Array:
        slope = np.empty((*p.shape[:-1], 1))
        _backward(mapping, x, p, g, saved, slope)
        arrays = arrays_of(p)
        return arrays.cast(slope, wide(p), p)

    def plan(self, op: str, mapping: Mapping, x: Array) -> str | None:
        return "reads each row once, joins neighbours into groups, and gives each group one probability"


def _forward(mapping: Any, x: Array, groups: Groups | None) -> Array:
    """p(x), and where its groups begin, written to `groups`."""
    xp = namespace(x)
    rows = arrays_of(x).contiguous(upcast(x, xp))
    out = empty_like(rows)
    answer = native.engine_for(x).fused(rows, one_a_row(mapping.strength, x), out, groups and groups.memory)
    if answer is None:
        raise native.not_computed(mapping.name, x, engine=_ENGINE)
    return as_dtype(out, x.dtype, xp)


def _backward(mapping: Mapping, x: Array, p: Array, g: Array, groups: Groups | None, slope: np.ndarray | None) -> Array:
    """J^T g, and its product with the derivative by the strength, written to `slope`."""
    groups = ENGINE.forward_saving(mapping, x)[1] if groups is None else groups
    xp, arrays = namespace(p), arrays_of(p)
    x, p, g, dtype = (*(arrays.contiguous(upcast(a, xp)) for a in (x, p, g)), p.dtype)
    out = empty_like(p)
    answer = native.engine_for(p).fused_vjp(x, p, g, arrays.contiguous(groups.memory), out, slope)
    if answer is None:
        raise native.not_computed(mapping.name, p, g, engine=_ENGINE)
    return as_dtype(out, dtype, xp)


ENGINE = Fused()
