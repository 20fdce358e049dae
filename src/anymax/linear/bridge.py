"""The part of a bridge for output layers: functions of all scores, computed for one group of rows at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from .._array import Array, namespace
from .job import Job
from .layer import Layer, dots, rows_at_a_time

PIECE = 1 << 20  # features gathered at once


class LayerBridge(ABC):
    """How a framework computes an output layer."""

    takes_narrow_weights: bool = (
        False  # the weight may be narrower than the features: its classes are converted a part at a time
    )

    @abstractmethod
    def by_rows(self, job: Job) -> Any:
        """The result for all rows, a group at a time, with its gradient."""

    @abstractmethod
    def gathered(self, layer: Layer, classes: Array) -> Array:
        """The scores of `classes` of each row, [rows, width], fp32 or fp64; no other row of the weight is read."""

    def values(self, job: Job, without_class: Array) -> Array:
        """A number for the target class of each row; 0 in the rows `without_class`, a boolean for each."""
        return self.by_rows(job)

    def total(self, job: Job, without_class: Array, factor: Array) -> Array | None:
        """`factor` times the sum of `values`, if its gradient is best computed with it; else None."""
        return None

    def both_ways(self, a: Array, b: Array, keep: Array | None) -> tuple[Array, Array] | None:
        """The cross-entropies of the rows of `a @ b.T` and of as many columns, with targets on the diagonal; None if two losses do as well.

        keep: False where a score is masked, none on the diagonal.
        """
        return None

    def plan(self, job: Job, indices: bool, total: bool) -> str:
        """Which scores are in memory at a time. indices: the targets are classes; total: the caller wants a sum or a mean."""
        layer = job.layer
        return f"all {layer.classes} scores of {rows_at_a_time(layer, job.chunk)} rows at a time"

    def outside_graphs(self, f: Callable[..., Any], *args: Any) -> Any:
        """`f(*args)`, whose shapes depend on values, so that torch.compile must not trace it."""
        return f(*args)

    def thresholds(self, job: Job) -> tuple[Array, Array]:
        """tau of each row, and the number of classes with a probability above 0, which has no derivative."""
        return self.by_rows(job)


def in_turn(job: Job) -> Any:
    """The result for all rows, one group after another, in plain operations."""
    return joined([part.result() for _, part in job.parts(rows_at_a_time(job.layer, job.chunk))])


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
        return in_turn(job)

    def gathered(self, layer: Layer, classes: Array) -> Array:
        xp = namespace(layer.x)
        step = max(1, PIECE // max(1, math.prod(classes.shape[1:]) * layer.x.shape[1]))
        weight, bias = layer.weight, layer.bias
        return xp.concat([dots(layer.x[i, ...], weight, bias, classes[i, ...], xp) for i in layer.groups(step)])


BRIDGE = NumpyLayers()
