"""torch: chooses how to compute an output layer: from candidates, by rows or blocks, or as opaque operations for torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .._array import autocast_dtype, compiling, exporting, without_autocast
from ..autodiff.torch_graphs import outside_graphs
from . import torch_contrastive, torch_groups, torch_values
from .bridge import LayerBridge
from .job import Job
from .layer import Layer
from .torch_blocks import BlockSize
from .torch_candidates import gathered
from .torch_groups import rows_ahead, rows_of_group, rows_with_a_class, runs_eagerly, with_a_class

Tensor = torch.Tensor


def _outside_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose operands already have their dtypes. It runs outside of autocast, which would round the scores."""

    @functools.wraps(method)
    def call(self: TorchLayers, of: Any, *args: Any) -> Any:
        x = of.layer.x if isinstance(of, Job) else of.x if isinstance(of, Layer) else of
        if autocast_dtype(x) is None:
            return method(self, of, *args)
        with without_autocast(x):
            return method(self, of, *args)

    return call


class TorchLayers(LayerBridge):
    takes_narrow_weights = True

    @_outside_autocast
    def by_rows(self, job: Job) -> Any:
        return torch_groups.by_rows(job)

    @_outside_autocast
    def gathered(self, layer: Layer, classes: Tensor) -> Tensor:
        return gathered(layer, classes)

    @_outside_autocast
    def values(self, job: Job, out: Tensor) -> Tensor:
        if runs_eagerly(job.layer):
            return with_a_class(job, out, torch_values.values)
        value = None
        if compiling() and not (job.per_row.margin is not None or exporting(job.layer.x)):
            from . import torch_compiled  # late: it registers operations, which takes 10 ms

            value = torch_compiled.values(job)
        return self.by_rows(job) if value is None else value

    @_outside_autocast
    def total(self, job: Job, out: Tensor, factor: Tensor) -> Tensor | None:
        step = torch_values.rows_to_hold(job)
        if step is None:
            return None
        rows = rows_with_a_class(out)
        if rows is not None:
            job = job.part(rows)
            step = rows_ahead(job)
        return None if step is None else torch_groups.total(job, step, factor)

    @_outside_autocast
    def both_ways(self, a: Tensor, b: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor] | None:
        return None if compiling() else torch_contrastive.both_ways(a, b, keep)

    def plan(self, job: Job, indices: bool, total: bool) -> str:
        layer = job.layer
        rows = torch_values.rows_to_hold(job) if total and indices else None
        if rows is not None:
            return f"all {layer.classes} scores of {rows} rows at a time, with their gradient in the forward pass"
        if not indices or torch_values.way(job) is None:
            return f"all {layer.classes} scores of {rows_of_group(job)} rows at a time, computed again for the gradient"
        blocks = BlockSize.of(layer, job.chunk)
        block = f"the scores of {blocks.classes} classes and {blocks.rows} rows at a time"
        if layer.mapping.is_softmax and torch_values.least_of(job):
            return f"{block}; if few classes of each row are above least=, only these have a gradient, else all, computed again"
        if layer.mapping.is_softmax:
            return f"{block}, computed again for the gradient"
        return f"{block}; each row keeps those that may have a probability, and only these have a gradient"

    def outside_graphs(self, f: Callable[..., Any], *args: Any) -> Any:
        return outside_graphs(f, *args) if compiling() else f(*args)

    @_outside_autocast
    def thresholds(self, job: Job) -> tuple[Tensor, Tensor]:
        of_rows = torch_values.thresholds(job)
        return self.by_rows(job) if of_rows is None else of_rows


BRIDGE = TorchLayers()
