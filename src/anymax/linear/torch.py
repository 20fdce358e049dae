"""torch: chooses how to compute an output layer: with kept scores, by groups of rows, or as opaque operations for torch.compile."""

from __future__ import annotations

from typing import Any

import torch

from .._array import compiling, exporting
from . import torch_groups, torch_kept, torch_values
from .bridge import LayerBridge
from .layer import Layer
from .per_row import PerRow

Tensor = torch.Tensor


class TorchLayers(LayerBridge):
    def by_rows(
        self, layer: Layer, per_row: PerRow, target: Tensor | None, class_weight: Tensor | None, chunk: int | None
    ) -> Any:
        return torch_groups.by_rows(layer, per_row, target, class_weight, chunk)

    def gathered(self, layer: Layer, classes: Tensor) -> Tensor:
        return torch_kept.gathered(layer, classes)

    def values(
        self, layer: Layer, per_row: PerRow, index: Tensor, out: Tensor, class_weight: Tensor | None, chunk: int | None
    ) -> Tensor:
        found = None
        if not per_row.transforms and not compiling():
            found = torch_values.values(layer, per_row, index, out, class_weight, chunk)
        elif not per_row.transforms and not exporting(layer.x) and per_row.margin is None:
            from . import torch_compiled  # late: it registers operations, which takes 10 ms

            found = torch_compiled.values(layer, per_row, index, class_weight, chunk)
        return self.by_rows(layer, per_row, index, class_weight, chunk) if found is None else found

    def thresholds(self, layer: Layer, chunk: int | None) -> tuple[Tensor, Tensor]:
        found = torch_values.thresholds(layer, chunk)
        return super().thresholds(layer, chunk) if found is None else found


BRIDGE = TorchLayers()
