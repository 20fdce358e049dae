"""The engine for maps without a kernel: the C++ engine with a table of the map's link (csrc/tabled/), for rows of floats on the CPU."""

from __future__ import annotations

import math
from typing import Any

from .._array import Array
from .._core.mapping import Mapping
from . import native
from .arrays import arrays_of, dtype_of, empty_like, room_in
from .choice import asked
from .engine import Engine
from .tables import Table, Tables, refuse_map, tables_of

LEAST = 4096  # entries of a call that are worth it
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
        tables = tables_of(mapping)
        if isinstance(tables, str):
            return tables
        return tables.slopes if op == "vjp" and isinstance(tables.slopes, str) else None

    def forward(self, mapping: Mapping, x: Array, mask: Array | None = None, out: Array | None = None) -> Array:
        x = arrays_of(x).contiguous(x)
        p = empty_like(x)
        _run(_tables(mapping).link, x, None, p, None)
        return p

    def vjp(self, mapping: Mapping, x: Array, p: Array, g: Array, saved: Any = None) -> Array:
        arrays, slopes = arrays_of(p), _tables(mapping).slopes
        assert isinstance(slopes, Table), slopes
        p, g = (
            arrays.contiguous(p),
            arrays.contiguous(g if dtype_of(g) == dtype_of(p) else arrays.cast(g, dtype_of(p), p)),
        )
        out = empty_like(p)
        _run(slopes, p, g, out, None)
        return out

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        tau = room_in(arrays_of(x), (*x.shape[:-1], 1), "float32")
        _run(_tables(mapping).link, arrays_of(x).contiguous(x), None, None, tau)
        return tau

    def plan(self, op: str, mapping: Mapping, x: Array) -> str | None:
        tables = _tables(mapping)
        table = tables.slopes if op == "vjp" else tables.link
        assert isinstance(table, Table), table
        return f"a table of {len(table.cells)} cells {native.isa()}"


def _tables(mapping: Mapping) -> Tables:
    tables = tables_of(mapping)
    assert not isinstance(tables, str), tables
    return tables


def _run(table: Table, x: Array, g: Array | None, out: Array | None, tau: Array | None) -> None:
    if native.engine_for(x).tabled(table.cells, table.numbers, x, g, out, tau) is None:
        raise RuntimeError(f"the engine of tables can't compute {dtype_of(x)} {tuple(x.shape)}")


ENGINE = Tabled()
