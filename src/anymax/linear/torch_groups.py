"""PyTorch: an output layer of any map by groups of rows, whose scores are made again for the gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .._array import plain_backward
from .._core.mapping import Mapping
from ..autodiff.saving import save, saved
from .layer import Layer, rows_at_a_time
from .torch_backward import plain_grads

Tensor = torch.Tensor

_GROUP = {"cpu": 1 << 23}  # scores of a group of rows
_MANY = 1 << 27


class _Groups(torch.autograd.Function):
    """One number for each row, of a group of rows at a time; for the gradient the scores of each group are made again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer, function: Callable[..., Tensor], step: int,
        *params: Tensor,
    ) -> Tensor:  # fmt: skip
        layer = dataclasses.replace(layer, x=x, weight=weight, bias=bias)
        ctx.call = layer.keep, layer.mapping, function, step
        save(ctx, x, weight, bias, *params)
        layer = dataclasses.replace(layer, mapping=_with(layer.mapping, params))
        return torch.cat([function(part, part.scores(), where) for part, where in _groups(layer, step)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias, *params = saved(ctx)
        keep, mapping, function, step = ctx.call
        layer = Layer(x, weight, bias, keep, mapping, (x.shape[0],), x.dtype)
        (g,) = grads
        none = (None,) * 3
        if plain_backward(g):

            def plain(x: Tensor, weight: Tensor, bias: Tensor | None, *params: Tensor) -> tuple[Tensor]:
                whole = dataclasses.replace(layer, x=x, weight=weight, bias=bias, mapping=_with(mapping, params))
                return (function(whole, whole.scores(), slice(0, whole.rows)),)

            dx, dw, db, *rest = plain_grads(plain, (x, weight, bias, *params), grads)
            return dx, dw, db, *none, *rest
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        wants = ctx.needs_input_grad
        dx = torch.empty_like(x) if wants[0] else None
        dw = torch.zeros(weight.shape, dtype=wide, device=x.device) if wants[1] else None
        db = torch.zeros(weight.shape[0], dtype=wide, device=x.device) if wants[2] else None
        dparams: list[Tensor] = [torch.zeros_like(p) for p in params]
        for part, where in _groups(dataclasses.replace(layer, mapping=_with(mapping, tuple(params))), step):
            with torch.enable_grad():
                s = part.scores().detach().requires_grad_()
                own = {k: v.detach().requires_grad_() for k, v in part.mapping.params().items()}
                part = dataclasses.replace(part, mapping=part.mapping.replace(**own))
                value = function(part, s, where)
                ds, *rest = torch.autograd.grad(value, [s, *own.values()], g[where].to(value.dtype), allow_unused=True)
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
            for whole, d in zip(dparams, rest):
                if d is not None:
                    (whole[where] if whole.ndim and whole.shape[0] == x.shape[0] else whole).add_(d)
        made = [None if dw is None else dw.to(weight.dtype), None if db is None else db.to(bias.dtype)]
        return dx, *made, *none, *dparams


def _with(mapping: Mapping, params: tuple[Tensor, ...]) -> Mapping:
    names = mapping.params()
    return mapping.replace(**dict(zip(names, params))) if names else mapping


def _groups(layer: Layer, step: int) -> Any:
    for i in range(0, layer.rows, step):
        where = slice(i, min(i + step, layer.rows))
        yield layer.part(where), where


def by_rows(
    layer: Layer, ask: Callable[..., Tensor], target: Tensor | None, weight: Tensor | None, chunk: int | None
) -> Tensor:
    """`ask(part of the layer, its scores, their target, weight)` of all rows, one number a row, with its gradient."""
    if not layer.rows:
        return ask(layer, layer.scores(), target, weight)

    def function(part: Layer, scores: Tensor, where: slice) -> Tensor:
        return ask(part, scores, None if target is None else target[where], weight)

    step = rows_at_a_time(layer, chunk, _GROUP.get(layer.x.device.type, _MANY))
    params = layer.mapping.params().values()
    return _Groups.apply(layer.x, layer.weight, layer.bias, layer, function, step, *params)
