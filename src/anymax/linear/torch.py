"""torch: an output layer by the method that `torch_methods` chooses, or as opaque operations for torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .._array import autocast_dtype, compiling, exporting, wide_dtype, without_autocast
from ..autodiff.torch_adapter import operation
from ..autodiff.torch_graphs import outside_graphs
from ..autodiff.torch_rows import KINDS, untraced
from . import torch_blocks, torch_contrastive, torch_groups, torch_values
from .bridge import LayerBridge
from .job import Job
from .layer import Layer
from .torch_candidates import gathered
from .torch_groups import rows_with_a_class, runs_eagerly, with_a_class
from .torch_methods import LayerMethod, choose, rows_ahead

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

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        if compiling() or not untraced() or type(x) not in KINDS or x.dtype is wide_dtype(x, torch):
            return super().product(x, weight)
        return _product(None, x, weight)

    @_outside_autocast
    def gathered(self, layer: Layer, classes: Tensor) -> Tensor:
        return gathered(layer, classes)

    @_outside_autocast
    def values(self, job: Job, without_class: Tensor) -> Tensor:
        if runs_eagerly(job.layer, reference=job.reference):
            return with_a_class(job, without_class, torch_values.values)
        value = None
        if compiling() and not exporting(job.layer.x):
            from . import torch_compiled  # late: it registers operations, which takes 10 ms

            value = torch_compiled.values(job)
        return self.by_rows(job) if value is None else value

    @_outside_autocast
    def total(self, job: Job, without_class: Tensor, factor: Tensor) -> Any:
        step = rows_ahead(job)
        if step is None or choose(job, step) is not LayerMethod.AHEAD:
            return None
        rows, part = rows_with_a_class(without_class), job
        if rows is not None:
            part = job.rows_at(rows)
            step = rows_ahead(part)
        if step is None:
            return None
        value, predicted = torch_groups.total(part, step, factor)
        if predicted is None:
            return value
        return value, predicted if rows is None else torch_groups.among_all(job, rows, predicted)

    @_outside_autocast
    def both_ways(self, a: Tensor, b: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor] | None:
        return None if compiling() else torch_contrastive.both_ways(a, b, keep)

    def plan(self, job: Job, indices: bool, total: bool) -> str:
        ahead = rows_ahead(job) if total and indices else None
        return (choose(job, ahead) if indices else LayerMethod.GROUPS).words(job, ahead)

    def outside_graphs(self, f: Callable[..., Any], *args: Any) -> Any:
        return outside_graphs(f, *args) if compiling() else f(*args)

    @_outside_autocast
    def thresholds(self, job: Job) -> tuple[Tensor, Tensor]:
        of_rows = torch_values.thresholds(job)
        return self.by_rows(job) if of_rows is None else of_rows


def _product_forward(_: None, operands: Any, wants: Any) -> tuple[Tensor, tuple[()]]:
    return torch_blocks.product(*operands), ()


def _product_backward(_: None, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    """In the dtype of the operands, as all gradients of an output layer are."""
    (x, weight), g = operands, grads[0].to(operands[0].dtype)
    return g @ weight if wants[0] else None, g.t() @ x if wants[1] else None


def _product_plain(_: None, operands: Any, kept: Any) -> Tensor:
    x, weight = (a.to(wide_dtype(a, torch)) for a in operands)
    return x @ weight.t()


_product = operation("ScoreProduct", _product_forward, _product_backward, _product_plain)

BRIDGE = TorchLayers()
