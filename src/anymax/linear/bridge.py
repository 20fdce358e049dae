"""The part of a bridge for output layers: functions of all scores, computed for one group of rows at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, namespace, upcast
from .job import Job
from .layer import Layer, dots, rows_at_a_time

PIECE = 1 << 20  # features gathered at once


class LayerBridge(ABC):
    """How a framework computes an output layer."""

    rounds_products: bool = True  # XLA keeps the digits of a product that is widened afterwards
    takes_narrow_weights: bool = (
        False  # the weight may be narrower than the features: its classes are converted a part at a time
    )

    @abstractmethod
    def by_rows(self, job: Job) -> Any:
        """The result for all rows, a group at a time, with its gradient."""

    @abstractmethod
    def gathered(self, layer: Layer, classes: Array) -> Array:
        """The scores of `classes` of each row, [rows, width], fp32 or fp64; no other row of the weight is read."""

    def product(self, x: Array, weight: Array) -> Array:
        """`x @ weight.T` of operands of one dtype, summed and returned in fp32 or fp64."""
        xp = namespace(x)
        return xp.matmul(upcast(x, xp), upcast(weight, xp).T)

    def values(self, job: Job, without_class: Array) -> Array:
        """A number for the target class of each row; 0 in the rows `without_class`, a boolean for each."""
        return self.by_rows(job)

    def total(self, job: Job, without_class: Array, factor: Array) -> Any:
        """`factor` times the sum of `values`, if its gradient is best computed with it; else None. A pair if a loss predicts classes."""
        return None

    def both_ways(self, a: Array, b: Array, keep: Array | None) -> tuple[Array, Array] | None:
        """The cross-entropies of the rows of `a @ b.T` and of as many columns, with targets on the diagonal; None if two losses do as well.

        keep: False where a score is masked, none on the diagonal.
        """
        return None

    def plan(self, job: Job, indices: bool, total: bool) -> str:
        """Which scores are in memory at a time. indices: the targets are classes; total: the caller wants a sum or a mean."""
        return f"all {job.layer.classes} scores of {self.rows_of_group(job)} rows at a time"

    def rows_of_group(self, job: Job) -> int:
        """How many rows `by_rows` takes at a time."""
        return TILE if job.invariant else rows_at_a_time(job.layer, job.chunk)

    def outside_graphs(self, f: Callable[..., Any], *args: Any) -> Any:
        """`f(*args)`, whose shapes depend on values, so that torch.compile must not trace it."""
        return f(*args)

    def thresholds(self, job: Job) -> tuple[Array, Array]:
        """tau of each row, and the number of classes with a probability above 0, which has no derivative."""
        return self.by_rows(job)


def in_turn(job: Job, step: int) -> Any:
    """The result for all rows, `step` at a time, in plain operations."""
    return joined([part.result() for _, part in job.parts(step)])


# -- rows that do not depend on others, bit for bit ----------------------------------------------------------------------------------

TILE = 64  # rows at a time
_TILES = (TILE, 16, 8, 4)
_tried: dict[Any, int] = {}


def in_tiles(job: Job, step: int, compute: Callable[[Job], Any]) -> Any:
    """`compute(job)` with the last row repeated until each tile has `step` rows, so that all products and sums have one shape.

    A library of products chooses by the shape how to sum, so that a row has other bits among 1 or 2 rows than among 100.
    """
    rows, of_rows = job.layer.rows, compute(padded(job, step))
    return tuple(a[:rows] for a in of_rows) if isinstance(of_rows, tuple) else of_rows[:rows]


def padded(job: Job, step: int) -> Job:
    """The job with its last row repeated, so that the number of its rows is a multiple of `step`."""
    rows = job.layer.rows
    if rows % step == 0:
        return job
    at = _array.counts(
        namespace(job.layer.x).arange(rows + -rows % step, **_array.device_of(job.layer.x)), namespace(job.layer.x)
    )
    return job.rows_at(namespace(at).where(at < rows, at, rows - 1))


def rows_of_tile(layer: Layer, product: Callable[[Array, Array], Array], *how: Any) -> int:
    """The most rows of a tile in which the product gives equal rows equal bits, whatever their places.

    That is tried, once for each size. OpenBLAS, for one, sums the last few of 64 rows in another order. how: what else decides.
    """
    x, weight, xp = layer.x, layer.weight, namespace(layer.x)
    key = xp, x.dtype, weight.dtype, tuple(weight.shape), *how
    if key not in _tried:
        row = xp.sin(xp.arange(1, x.shape[1] + 1, dtype=x.dtype, **_array.device_of(x)))
        for tile in _TILES:
            s = product(row[None, :] * xp.ones((tile, 1), dtype=x.dtype, **_array.device_of(x)), weight)
            if bool(xp.all(s == s[:1, :])):
                break
        else:
            tile = 1
        if not bool(xp.any(s != 0)):  # a weight of zeros says nothing
            return tile
        _tried[key] = tile
    return _tried[key]


def joined(parts: list[Any]) -> Any:
    """The results of groups of rows as those of all rows."""
    if len(parts) == 1:
        return parts[0]
    xp = namespace(parts[0][0] if isinstance(parts[0], tuple) else parts[0])
    if isinstance(parts[0], tuple):
        return tuple(xp.concat(list(each)) for each in zip(*parts))
    return xp.concat(parts)


class NumpyLayers(LayerBridge):
    """Arrays without derivatives."""

    def by_rows(self, job: Job) -> Any:
        step = self.rows_of_group(job)
        return in_tiles(job, step, lambda job: in_turn(job, step)) if job.invariant else in_turn(job, step)

    def rows_of_group(self, job: Job) -> int:
        return (
            min(rows_of_tile(layer, self.product) for layer in job.layers)
            if job.invariant
            else super().rows_of_group(job)
        )

    def gathered(self, layer: Layer, classes: Array) -> Array:
        xp = namespace(layer.x)
        step = max(1, PIECE // max(1, math.prod(classes.shape[1:]) * layer.x.shape[1]))
        weight, bias = layer.weight, layer.bias
        parts = [dots(layer.x[i, ...], weight, bias, classes[i, ...], xp) for i in layer.groups(step)]
        return layer.rounded(xp.concat(parts), xp)


BRIDGE = NumpyLayers()
