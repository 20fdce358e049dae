"""The engine for maps without a kernel: the C++ engine with a table of the map's link or u (csrc/tabled/), for rows of floats on a CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._array import Array
from .._core.mapping import Mapping, no_threshold
from .._core.ratio_map import RatioMap
from . import native
from .arrays import arrays_of, dtype_of, empty_like, room_in
from .choice import asked
from .engine import Engine
from .ratios import WeightNumbers, Weights
from .reference import ENGINE as reference
from .tables import Table, Tables, forget, made, refuse_map, tables_of

_ENGINE = "the engine of tables"
LEAST = 4096  # the fewest scores for which a table pays
# the same for a map that holds a function: a lambda in the call needs a new table each time
FIRST = 1 << 18
LONGEST = 1 << 20  # TABLED_CLASSES of csrc/limits.hpp, which a test compares


class Tabled(Engine):
    name = "tabled"
    ops = ("forward", "vjp", "threshold")
    compiled = True

    def refuse(self, op: str, mapping: Mapping, x: Any) -> str | None:
        if op not in self.ops:
            return self.lacks(op)
        if reason := refuse_map(mapping) or native.refuse_array(x):
            return reason
        if dtype_of(x) == "float64":
            return "its tables are as exact as float32, not float64"
        if not x.ndim or not 1 <= x.shape[-1] <= LONGEST:
            return f"it takes rows of 1 to {LONGEST} classes"
        if math.prod(x.shape) < LEAST and asked() != self.name:
            return f"it is for calls of at least {LEAST} scores"
        if isinstance(mapping, RatioMap):
            return self._refuse_ratio(op, mapping, x)
        tables = tables_of(mapping)
        if isinstance(tables, str):
            return tables
        assert isinstance(tables, Tables)
        return tables.slopes if op == "vjp" and isinstance(tables.slopes, str) else None

    def _refuse_ratio(self, op: str, mapping: RatioMap, x: Any) -> str | None:
        if op == "threshold":
            return no_threshold(mapping)
        functions = any(callable(value) for value in mapping.constants().values())
        if functions and not made(mapping) and math.prod(x.shape) < FIRST and asked() != self.name:
            return f"it makes a table of functions in the first call of at least {FIRST} scores"
        tables = tables_of(mapping)
        if isinstance(tables, str):
            return tables
        assert isinstance(tables, Weights)
        if not tables.stand(mapping):
            forget(mapping, "its u is no longer what it was in another call, so that no table of it stands")
            return self._refuse_ratio(op, mapping, x)
        return tables.no_slopes or None if op == "vjp" else None

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        x = arrays_of(x).contiguous(x)
        p = empty_like(x)
        if isinstance(mapping, RatioMap):
            return self._ratio(mapping, x, None, p)
        _run(_tables(mapping).link, x, None, p, None)
        return p

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        arrays = arrays_of(p)
        p, g = (
            arrays.contiguous(p),
            arrays.contiguous(g if dtype_of(g) == dtype_of(p) else arrays.cast(g, dtype_of(p), p)),
        )
        out = empty_like(p)
        if isinstance(mapping, RatioMap):
            return self._ratio(mapping, arrays.contiguous(x), g, out)
        slopes = _tables(mapping).slopes
        assert isinstance(slopes, Table), slopes
        _run(slopes, p, g, out, None)
        return out

    def _ratio(self, mapping: RatioMap, x: Array, g: Array | None, out: Array) -> Array:
        """p, or with `g` J^T g. Rows with a score that has no cell are the reference's."""
        w, n = _weights(mapping), x.shape[-1]
        left = np.empty(math.prod(x.shape[:-1]), bool)
        answer = native.engine_for(x).ratio(w.cells, w.slopes, w.numbers, x, g, out, left)
        if answer is None:
            raise native.not_computed(mapping.name, x, g, engine=_ENGINE)
        if left.any():
            at = np.flatnonzero(left)
            rows = x.reshape(-1, n)[at]
            p = reference.forward(mapping, rows)
            out.reshape(-1, n)[at] = p if g is None else reference.vjp(mapping, rows, p, g.reshape(-1, n)[at])
        return out

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        tau = room_in(arrays_of(x), (*x.shape[:-1], 1), "float32")
        _run(_tables(mapping).link, arrays_of(x).contiguous(x), None, None, tau)
        return tau

    def plan(self, op: str, mapping: Mapping, x: Array) -> str | None:
        if isinstance(mapping, RatioMap):
            w = _weights(mapping)
            numbers = WeightNumbers(*w.numbers)
            return f"{len(w.cells)} cells, for scores from {numbers.low:g} to {numbers.high:g} ({native.isa()})"
        tables = _tables(mapping)
        table = tables.slopes if op == "vjp" else tables.link
        assert isinstance(table, Table), table
        return f"{len(table.cells)} cells ({native.isa()})"


def _tables(mapping: Mapping) -> Tables:
    tables = tables_of(mapping)
    assert isinstance(tables, Tables), tables
    return tables


def _weights(mapping: RatioMap) -> Weights:
    tables = tables_of(mapping)
    assert isinstance(tables, Weights), tables
    return tables


def _run(table: Table, x: Array, g: Array | None, out: Array | None, tau: Array | None) -> None:
    answer = native.engine_for(x).tabled(table.cells, table.numbers, x, g, out, tau)
    if answer is None:
        raise native.not_computed("rows", x, g, engine=_ENGINE)


ENGINE = Tabled()
