"""This process's scores as rows, and what all processes know of their rows after the first collective."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .. import _array
from .._array import Array, Namespace, as_dtype, stop_gradient
from .._core.mapping import Mapping
from .._core.rows import restore_axis
from .group import Group


@dataclasses.dataclass
class Shard:
    """The scores of this process with the classes last, in the dtype to compute in; masked classes are -inf."""

    group: Group
    mapping: Mapping  # for this process's classes: the gradients of its parameters are added up
    common: Mapping  # for what all processes compute from common values
    temperature: Any  # common
    rows: Array
    xp: Any
    axis: int
    dtype: Any
    n: int  # 0 where the one class of `rows` represents no classes

    def high(self) -> Array:
        """The maximum of each row, [..., 1], a constant."""
        return stop_gradient(self.xp.max(self.rows, axis=-1, keepdims=True))

    def per_class(self, p: Array) -> Array:
        """A result with the shape of the rows, in the axis order and dtype of the scores."""
        return restore_axis(as_dtype(p if self.n else p[..., :0], self.dtype, self.xp), self.axis)

    def per_row(self, value: Array, keepdims: bool) -> Array:
        """A result with one number per row."""
        value = as_dtype(value, self.dtype, self.xp) if _array.is_floating(value) else value
        value = restore_axis(value, self.axis)
        return value if keepdims else self.xp.squeeze(value, axis=self.axis)


class Shards:
    """The results of the first collective: columns [size, ..., 1], common, in the order of the classes."""

    def __init__(
        self, shard: Shard, stacked: Array, width: int, sizes: list[int], starts: list[int], order: list[int], block: Any, most: int
    ) -> None:  # fmt: skip
        self.shard, self.xp = shard, shard.xp
        columns = columns_of(stacked)
        self.head, self.extra = columns[:width], columns[width:]  # of the method, and of the verb
        self.sizes, self.starts = sizes, starts  # the number of classes of each process, and its first one, by rank
        self.count = sum(sizes)
        self.order, self.block = order, block  # the processes in the order of their classes, and the place of this one
        self.most = most  # candidates in the fullest row of any process
        xp, highs = shard.xp, self.head[0]
        self.highs = highs  # the maximum of each process, which may be infinite or NaN
        self.finite = xp.isfinite(highs)
        self.anchors = stop_gradient(xp.where(self.finite, highs, xp.zeros_like(highs)))
        self.poisoned = xp.any(xp.isnan(highs) | (highs == math.inf), axis=0)  # [..., 1]
        high = stop_gradient(xp.max(xp.where(self.finite, highs, -math.inf * xp.ones_like(highs)), axis=0))
        self.empty = high == -math.inf  # [..., 1]: True for a row without classes
        # [..., 1]: the maximum, 0 where it is not finite; a constant
        self.high = xp.where(self.empty, xp.zeros_like(high), high)

    @property
    def start(self) -> Any:
        """The index of this process's first class."""
        group = self.shard.group  # a rank in JAX is traced, and all devices have as many classes
        return self.starts[group.rank] if group.strict else group.rank * self.sizes[0]

    def stack(self, a: Array) -> Array:
        """A further collective: [size, ...] in the order of the classes."""
        out = self.shard.group.stack(a)
        return out if self.order == sorted(self.order) else out[self.order]

    def collect(self, columns: list[Array]) -> list[Array]:
        """`stack` of columns [..., 1] at once, each [size, ..., 1]; none if there are none."""
        if not columns:
            return []
        return columns_of(self.stack(self.xp.concat(columns, axis=-1)))

    def joined(self, stacked: Array) -> Array:
        """Entries of all classes, [size, ..., most], as rows [..., count]."""
        parts = [stacked[i][..., : self.sizes[rank]] for i, rank in enumerate(self.order)]
        return self.xp.concat(parts, axis=-1)

    def mine(self, stacked: Array) -> Array:
        return self.shard.group.mine(stacked, self.block)


def columns_of(a: Array) -> list[Array]:
    """The entries of the last axis, each [..., 1]."""
    return [a[..., i : i + 1] for i in range(a.shape[-1])]


def divided(rows: Array, by: Any, xp: Namespace) -> Array:
    """Scores divided by a number above 0; masked scores add nothing to its gradient."""
    keep = xp.isfinite(rows)
    return xp.where(keep, xp.where(keep, rows, xp.zeros_like(rows)) / by, rows)
