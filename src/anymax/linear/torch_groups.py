"""PyTorch: an output layer of any map by groups of rows, whose scores are computed again for the gradient.

`PerRow` lists the tensors that it uses. The backward pass takes them from the graph, so that a change in between is an error. Tensors
that a user's function reads are not seen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import array_api_compat.torch as xp
import torch

from .._array import modes, plain_backward, recorded, transformed, upcast, wide_dtype
from ..autodiff.saving import params_of, save, saved, with_params
from ..autodiff.torch import KINDS, plain_grads
from .bridge import in_turn
from .layer import Layer, rows_at_a_time
from .per_row import PerRow

Tensor = torch.Tensor

_GROUP = {"cpu": 1 << 23}  # scores of a group of rows
_MANY = 1 << 27


class _Groups(torch.autograd.Function):
    """One number for each row, a group of rows at a time; the gradient computes the scores of each group again."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, per_row: PerRow, step: int, *tensors: Tensor | None) -> Tensor:
        """tensors: the result of `_tensors`."""
        ctx.call = layer, per_row, step
        save(ctx, *tensors)
        layer, per_row, target, class_weight = _with(layer, per_row, tensors)
        parts = [
            _value(part, part.scores(), where, per_row, target, class_weight) for part, where in layer.groups(step)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (layer, per_row, step), tensors, (g,) = ctx.call, saved(ctx), grads
        none = (None,) * 3
        if plain_backward(g):

            def plain(*free: Tensor | None) -> tuple[Tensor]:
                whole, again, target, class_weight = _with(layer, per_row, (*free, *tensors[len(free) :]))
                return (_value(whole, whole.scores(), slice(0, whole.rows), again, target, class_weight),)

            count = 3 + len(params_of(layer.mapping))
            found = plain_grads(plain, tuple(tensors[:count]), grads)
            return *none, *found, *(None,) * (len(tensors) - count)
        layer, per_row, target, class_weight = _with(layer, per_row, tensors)
        x, weight, bias, params = layer.x, layer.weight, layer.bias, params_of(layer.mapping)
        wide = wide_dtype(x, torch)
        wants = ctx.needs_input_grad[3:]
        dx = torch.empty_like(x) if wants[0] else None
        dw = torch.zeros(weight.shape, dtype=wide, device=x.device) if wants[1] else None
        db = torch.zeros(weight.shape[0], dtype=wide, device=x.device) if wants[2] else None
        dparams: list[Tensor] = [torch.zeros_like(p) for p in params]
        for part, where in layer.groups(step):
            with torch.enable_grad():
                s = part.scores().detach().requires_grad_()
                free = [value.detach().requires_grad_() for value in params_of(part.mapping)]
                part = dataclasses.replace(part, mapping=with_params(part.mapping, free))
                value = _value(part, s, where, per_row, target, class_weight)
                ds, *rest = torch.autograd.grad(value, [s, *free], g[where].to(value.dtype), allow_unused=True)
            ds = torch.zeros_like(s) if ds is None else ds
            if part.keep is not None:
                ds = ds.masked_fill(~part.keep, 0)
            if dx is not None:
                dx[where] = ds @ weight
            if dw is not None:
                if dw.dtype == ds.dtype:
                    dw.addmm_(ds.t(), part.x)
                else:
                    dw += ds.t() @ part.x
            if db is not None:
                db += ds.sum(0, dtype=db.dtype)
            for dparam, d in zip(dparams, rest):
                if d is not None:
                    (dparam[where] if dparam.ndim and dparam.shape[0] == x.shape[0] else dparam).add_(d)
        dw = None if dw is None else dw.to(weight.dtype)
        db = None if db is None or bias is None else db.to(bias.dtype)
        return *none, dx, dw, db, *dparams, *(None,) * (len(tensors) - 3 - len(params))


def _tensors(
    layer: Layer, per_row: PerRow, target: Tensor | None, class_weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    """All tensors that the result depends on, those that may have a gradient first."""
    free = layer.x, layer.weight, layer.bias, *params_of(layer.mapping)
    return *free, layer.keep, target, class_weight, *per_row.arrays()


def _with(layer: Layer, per_row: PerRow, tensors: Any) -> tuple[Layer, PerRow, Tensor | None, Tensor | None]:
    """The layer, `per_row`, the target and the class weights, from the result of `_tensors`."""
    x, weight, bias, *rest = tensors
    count = len(params_of(layer.mapping))
    keep, target, class_weight, *arrays = rest[count:]
    mapping = with_params(layer.mapping, rest[:count])
    layer = dataclasses.replace(layer, x=x, weight=weight, bias=bias, keep=keep, mapping=mapping)
    return layer, per_row.with_arrays(arrays), target, class_weight


def _value(
    part: Layer, scores: Tensor, where: slice, per_row: PerRow, target: Tensor | None, class_weight: Tensor | None
) -> Tensor:
    return per_row(part, scores, None if target is None else target[where], class_weight)


def runs_eagerly(layer: Layer, *others: Any) -> bool:
    """True for eager calls on plain tensors, without tracing, if none of `others` requires a gradient."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or modes() or transformed():
        return False
    tensors = [a for a in (layer.x, layer.weight, layer.bias, layer.keep, *others) if a is not None]
    if any(type(a) not in KINDS or a.layout is not torch.strided or a.is_meta for a in tensors):
        return False
    return not recorded(*others)


def by_rows(
    layer: Layer, per_row: PerRow, target: Tensor | None, class_weight: Tensor | None, chunk: int | None
) -> Any:
    """`per_row(part of the layer, its scores, their target, class_weight)` for all rows, with its gradient.

    If something traces the calls, all scores are computed at once, in plain operations.
    """
    if not runs_eagerly(layer, target, class_weight):
        return per_row(layer, layer.scores(), target, class_weight)
    if not layer.recorded():
        return in_turn(layer, per_row, target, class_weight, chunk)
    if not layer.rows or _learns(per_row, layer):
        return per_row(layer, layer.scores(), target, class_weight)
    step = rows_at_a_time(layer, chunk, _GROUP.get(layer.x.device.type, _MANY))
    return _Groups.apply(layer, per_row, step, *_tensors(layer, per_row, target, class_weight))


def _learns(per_row: PerRow, layer: Layer) -> bool:
    """True if the transforms, or functions among them, have tensors that require a gradient; one row shows it."""
    if not per_row.transforms:
        return False
    return per_row.transformed(upcast(layer.constant().part(slice(0, 1)).scores(), xp)).requires_grad
