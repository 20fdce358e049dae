"""The part of a bridge for output layers: functions of all scores, computed for one group of rows at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from .._array import Array, namespace
from .layer import Layer, dots, rows_at_a_time
from .per_row import PerRow, Thresholds

PIECE = 1 << 20  # features gathered at once


class LayerBridge(ABC):
    """How a framework computes an output layer; a `PerRow` says what to compute."""

    @abstractmethod
    def by_rows(
        self, layer: Layer, per_row: PerRow, target: Array | None, class_weight: Array | None, chunk: int | None
    ) -> Any:
        """`per_row` for all rows, a group at a time, with its gradient."""

    @abstractmethod
    def gathered(self, layer: Layer, classes: Array) -> Array:
        """The scores of the given classes of each row, [rows, width], fp32 or fp64; no other row of the weight is read."""

    def values(
        self, layer: Layer, per_row: PerRow, index: Array, out: Array, class_weight: Array | None, chunk: int | None
    ) -> Array:
        """`per_row` for the target class of each row; 0 where `out` is True and the class is -1."""
        return self.by_rows(layer, per_row, index, class_weight, chunk)

    def thresholds(self, layer: Layer, chunk: int | None) -> tuple[Array, Array]:
        """tau of each row, and the number of classes with a probability above 0; without a derivative."""
        return self.by_rows(layer, Thresholds(), None, None, chunk)


def in_turn(layer: Layer, per_row: PerRow, target: Array | None, class_weight: Array | None, chunk: int | None) -> Any:
    """`per_row` for all rows, one group after another, in plain operations."""
    parts = [
        per_row(part, part.scores(), None if target is None else target[where, ...], class_weight)
        for part, where in layer.groups(rows_at_a_time(layer, chunk))
    ]
    if len(parts) == 1:
        return parts[0]
    xp = namespace(layer.x)
    if isinstance(parts[0], tuple):
        return tuple(xp.concat(list(each)) for each in zip(*parts))
    return xp.concat(parts)


class NumpyLayers(LayerBridge):
    """Arrays without derivatives."""

    def by_rows(
        self, layer: Layer, per_row: PerRow, target: Array | None, class_weight: Array | None, chunk: int | None
    ) -> Any:
        return in_turn(layer, per_row, target, class_weight, chunk)

    def gathered(self, layer: Layer, classes: Array) -> Array:
        xp = namespace(layer.x)
        step = max(1, PIECE // max(1, math.prod(classes.shape[1:]) * layer.x.shape[1]))
        return xp.concat(
            [dots(part.x, part.weight, part.bias, classes[where, ...], xp) for part, where in layer.groups(step)]
        )


BRIDGE = NumpyLayers()
