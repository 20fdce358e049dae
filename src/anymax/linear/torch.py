"""torch: chooses how to compute an output layer: from candidates, by groups of rows, or as opaque operations for torch.compile."""

from __future__ import annotations

from typing import Any

import torch

from .._array import compiling, exporting
from . import torch_candidate_scores, torch_contrastive, torch_groups, torch_values
from .bridge import LayerBridge
from .job import Job
from .layer import Layer
from .torch_candidates import BlockSize
from .torch_groups import rows_ahead, rows_of_group, runs_eagerly, total

Tensor = torch.Tensor


class TorchLayers(LayerBridge):
    def by_rows(self, job: Job) -> Any:
        return torch_groups.by_rows(job)

    def gathered(self, layer: Layer, classes: Tensor) -> Tensor:
        return torch_candidate_scores.gathered(layer, classes)

    def values(self, job: Job, out: Tensor) -> Tensor:
        found = None
        if not job.per_row.transforms and not compiling():
            found = torch_values.values(job, out)
        elif not job.per_row.transforms and not exporting(job.layer.x) and job.per_row.margin is None:
            from . import torch_compiled  # late: it registers operations, which takes 10 ms

            found = torch_compiled.values(job)
        return _rows_with_a_class(job, out) if found is None else found

    def total(self, job: Job, out: Tensor, factor: Tensor) -> Tensor | None:
        if compiling() or torch_values.by_blocks(job):
            return None
        rows = (~out).nonzero(as_tuple=True)[0] if runs_eagerly(job.layer) and bool(out.any()) else None
        return total(job if rows is None else job.part(rows), factor)

    def both_ways(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
        return None if compiling() else torch_contrastive.both_ways(a, b)

    def plan(self, job: Job, indices: bool, total: bool) -> str:
        layer, few = job.layer, torch_values.by_blocks(job)
        rows = rows_ahead(job) if total and indices and not few else None
        if rows is not None:
            return f"all {layer.classes} scores of {rows} rows at a time, with their gradient in the forward pass"
        blocks = BlockSize.of(layer, job.chunk)
        some = f"the scores of {blocks.classes} classes and {blocks.rows} rows at a time"
        if indices and few and not layer.mapping.is_softmax:
            return f"{some}, of which each row keeps those that may have a probability; a gradient of these alone"
        if indices and layer.mapping.is_softmax and not job.per_row.transforms:
            return f"{some}, computed again for the gradient"
        return f"all {layer.classes} scores of {rows_of_group(job)} rows at a time, computed again for the gradient"

    def thresholds(self, job: Job) -> tuple[Tensor, Tensor]:
        found = torch_values.thresholds(job)
        return self.by_rows(job) if found is None else found


def _rows_with_a_class(job: Job, out: Tensor) -> Tensor:
    """`by_rows` for the rows that are not in `out`, and 0 for the others, which are not computed."""
    if not runs_eagerly(job.layer) or not bool(out.any()):
        return torch_groups.by_rows(job)
    rows = (~out).nonzero(as_tuple=True)[0]
    value = torch_groups.by_rows(job.part(rows))
    return value.new_zeros((job.layer.rows, *value.shape[1:])).index_copy(0, rows, value)


BRIDGE = TorchLayers()
