"""One call of an output layer: its operands, what to compute for each row, and the targets."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._array import Array
from .layer import Layer
from .per_row import PerRow


@dataclasses.dataclass(frozen=True)
class Job:
    """`per_row` for all rows of a layer."""

    layer: Layer
    per_row: PerRow
    target: Array | None = None  # [rows], class indices with -1 for none, or [rows, classes]
    class_weight: Array | None = None  # [classes]
    chunk: int | None = None  # as the caller says

    def part(self, rows: Any) -> Job:
        """The job for some of the rows: a slice, or their indices."""
        target = None if self.target is None else self.target[rows, ...]
        return dataclasses.replace(self, layer=self.layer.part(rows), target=target)

    def result(self) -> Any:
        """All rows at once, from all of their scores."""
        return self.per_row(self.layer.mapping, self.layer.scores(), self.target, self.class_weight)
