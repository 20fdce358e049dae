"""This process's scores as rows, and what all processes know of their rows after the first collective."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from .. import _array
from .._array import Array, Namespace, as_dtype, stop_gradient, top
from .._core.mapping import Mapping, over_all
from .._core.parts import Parts
from .._core.rows import Rows, restore_axis
from ..autodiff.group import Group


@dataclasses.dataclass(frozen=True)
class Shard:
    """The scores of this process with the classes last, in the dtype to compute in; masked classes are -inf."""

    group: Group
    # The map, twice: what a process computes of its own classes, it computes by `local`, so that the gradients of the parameters are
    # added up over the processes; what all compute from the same values, they compute by `shared`. Both have a class that `caller` hides.
    local: Mapping
    shared: Mapping
    caller: Mapping  # the caller's map, shared too
    temperature: Any  # shared
    rows: Array
    xp: Any
    axis: int
    dtype: Any
    # How many classes the caller sees here. `rows` has one class more, the last, if the map hides one: its score is on one process, and
    # masked on the others. Without it one masked class represents no classes.
    n: int
    first: Any  # the index of the first of them
    of_classes: tuple[str, ...] = ()  # the parameters with one value for each class of this process, also in `shared`
    hides: bool = False  # `caller` hides a class
    has_hidden: Any = False  # True on the process that has the hidden class

    @functools.cached_property
    def parts(self) -> Parts:
        return self.local.parts

    def with_hidden(self, here: Any) -> Shard:
        """The shard with the class that the map hides as the last of `rows`, masked where it is not `here`."""
        xp, n = self.xp, self.n
        call = Rows(self.rows, self.rows, self.local, -1).over_all()
        rows = call.rows if n else call.rows[..., 1:]  # no masked class needs to represent no classes
        mine = _array.positions(rows, xp.int32, xp) < n
        rows = xp.where(mine | here, rows, -math.inf * xp.ones_like(rows))
        shared = over_all(self.caller)
        return dataclasses.replace(self, rows=rows, local=call.mapping, shared=shared, hides=True, has_hidden=here)

    @property
    def columns(self) -> int:
        """How many classes of `rows` are classes."""
        return self.n + self.hides

    def with_one_value(self, names: list[str]) -> Shard:
        """The shard with these parameters as one value for all classes, since on other processes they are."""
        params = {
            name: self.group.vary_parameter(self.local.params()[name]) for name in names if name in self.of_classes
        }
        of_classes = tuple(name for name in self.of_classes if name not in names)
        return dataclasses.replace(self, local=self.local.replace(**params), of_classes=of_classes)

    def high(self) -> Array:
        """The maximum of each row, [..., 1], a constant."""
        return stop_gradient(top(self.rows, self.xp))

    def per_class(self, p: Array) -> Array:
        """A result with the shape of the rows, in the axis order and dtype of the scores."""
        return restore_axis(as_dtype(p[..., : self.n], self.dtype, self.xp), self.axis)

    def probabilities(self, p: Array) -> Array:
        """`per_class` of p, in the dtype of the scores as the map rounds it."""
        p = p[..., : self.n]
        if p.dtype != self.dtype:
            p = self.local.in_dtype_of(p, as_dtype(p[..., :0], self.dtype, self.xp), self.xp)
        return restore_axis(p, self.axis)

    def per_row(self, value: Array, keepdims: bool) -> Array:
        """A result with one number per row."""
        value = as_dtype(value, self.dtype, self.xp) if _array.is_floating(value) else value
        value = restore_axis(value, self.axis)
        return value if keepdims else self.xp.squeeze(value, axis=self.axis)

    def place(self, index: Array, hidden: bool) -> tuple[Array, Array]:
        """(True where the class of an index is on this process, its place in `rows`, which is 0 elsewhere).

        hidden: -1 is the class that the map hides.
        """
        xp, at = self.xp, index - self.first
        here = (index >= 0) & (at >= 0) & (at < self.n)
        return self.place_hidden(index, here, at) if hidden else (here, xp.where(here, at, xp.zeros_like(at)))

    def place_hidden(self, index: Array, here: Array, at: Array) -> tuple[Array, Array]:
        """`place`, where the index -1 is the class that the map hides. here, at: for the other indices."""
        xp = self.xp
        hidden = (index == -1) & self.has_hidden
        at = xp.where(here, at, xp.zeros_like(at))
        return here | hidden, xp.where(hidden, self.n * xp.ones_like(at), at)


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the classes of each process lie among all."""

    sizes: list[int]  # the number of classes of each process, by rank
    start: Any  # the index of this process's first class
    order: list[int]  # the processes in the order of their classes
    block: Any  # the place of this process in `order`
    hidden: int | None = None  # the process that has the class that the map hides, after all others

    @classmethod
    def equal(cls, group: Group, size: int, hides: bool) -> Places:
        """Each process has so many classes, in the order of their ranks, which JAX traces."""
        last = group.size - 1 if hides else None
        return cls([size] * group.size, group.rank * size, list(range(group.size)), group.rank, last)

    def width(self, rank: int) -> int:
        """How many classes a process has, with the hidden one."""
        return self.sizes[rank] + (rank == self.hidden)

    @property
    def most(self) -> int:
        """The largest `Shard.columns` of all processes."""
        return max(self.sizes) + (self.hidden is not None)

    def in_order(self, stacked: Array) -> Array:
        """[size, ...] by rank, in the order of the classes."""
        return stacked if self.order == sorted(self.order) else stacked[self.order]


class Shards:
    """The results of the first collective: columns [size, ..., 1], common, in the order of the classes."""

    def __init__(self, shard: Shard, places: Places, columns: list[Array], *, width: int, most: int = 0) -> None:
        """columns: those of the method, `width` of them, then those of the verb. most: candidates in the fullest row of any process."""
        self.shard, self.xp, self.places, self.most = shard, shard.xp, places, most
        self.head, self.extra = columns[:width], columns[width:]
        self.count = sum(places.sizes)  # of the classes that the caller sees
        xp, highs = shard.xp, self.head[0]
        self.highs = highs  # the maximum of each process, which may be infinite or NaN
        self.finite = xp.isfinite(highs)
        self.anchors = stop_gradient(xp.where(self.finite, highs, xp.zeros_like(highs)))
        self.poisoned = xp.any(xp.isnan(highs) | (highs == math.inf), axis=0)  # [..., 1]
        self.high, self.empty = highest(highs, xp)

    def stack(self, a: Array) -> Array:
        """A further collective: [size, ...] in the order of the classes."""
        return self.places.in_order(self.shard.group.stack(a))

    def collect(self, columns: list[Array]) -> list[Array]:
        """`stack` of columns [..., 1] at once, each [size, ..., 1]; none if there are none."""
        if not columns:
            return []
        return columns_of(self.stack(self.xp.concat(columns, axis=-1)))

    def joined(self, stacked: Array) -> Array:
        """Entries of all classes, [size, ..., `places.most`], as rows, with the hidden class last."""
        parts = [stacked[i][..., : self.places.width(rank)] for i, rank in enumerate(self.places.order)]
        return self.xp.concat(parts, axis=-1)

    def mine(self, stacked: Array) -> Array:
        return self.shard.group.mine(stacked, self.places.block)


def highest(highs: Array, xp: Namespace) -> tuple[Array, Array]:
    """(the largest finite maximum of the processes, a constant, 0 if there is none; True for a row without classes), both [..., 1]."""
    high = stop_gradient(xp.max(xp.where(xp.isfinite(highs), highs, -math.inf * xp.ones_like(highs)), axis=0))
    empty = high == -math.inf
    return xp.where(empty, xp.zeros_like(high), high), empty


def columns_of(a: Array) -> list[Array]:
    """The entries of the last axis, each [..., 1]."""
    return [a[..., i : i + 1] for i in range(a.shape[-1])]


def divided(rows: Array, by: Any, xp: Namespace) -> Array:
    """Scores divided by a number above 0; masked scores add nothing to its gradient."""
    keep = xp.isfinite(rows)
    return xp.where(keep, xp.where(keep, rows, xp.zeros_like(rows)) / by, rows)
