"""Losses of class indices: the Fenchel-Young loss of a map, whose gradient is p - y. One pass forward, one pass backward."""

from __future__ import annotations

from typing import Any

import torch

from ._kernels.triton import launch
from ._links import Words, check, check_classes, link_of, words_of
from ._ops import add_op_namespace_prefix, ops
from .rows import _axis, once

Tensor = torch.Tensor

REDUCTIONS = ("none", "mean", "sum")
_LINK = "str kind, float param, Tensor? params, int ignored"


@torch.library.custom_op(
    add_op_namespace_prefix("loss"),
    mutates_args=(),
    schema=f"(Tensor x, Tensor index, {_LINK}) -> (Tensor, Tensor, Tensor)",
)
def _loss(x: Tensor, index: Tensor, kind: str, param: float, params: Tensor | None, ignored: int) -> Any:
    """(the loss of each row, 1 for each row that counts and else 0, what the gradient needs)."""
    both, state = launch.numbers(x, 2, *x.shape[:-1]), launch.numbers(x, *x.shape[:-1], 4)
    launch.run("loss", _link(kind, param, params), x, index=index, value=both, state=state, ignore=ignored)
    return both[0].clone(), both[1].clone(), state


@_loss.register_fake
def _(x: Tensor, index: Tensor, kind: str, param: float, params: Tensor | None, ignored: int) -> Any:
    one = launch.numbers(x, *x.shape[:-1])
    return one, torch.empty_like(one), launch.numbers(x, *x.shape[:-1], 4)


@torch.library.custom_op(
    add_op_namespace_prefix("loss_grad"),
    mutates_args=(),
    schema=f"(Tensor x, Tensor index, Tensor state, Tensor g, {_LINK}) -> Tensor",
)
def _loss_grad(
    x: Tensor, index: Tensor, state: Tensor, g: Tensor, kind: str, param: float, params: Tensor | None, ignored: int
) -> Tensor:
    return launch.loss_grad(_link(kind, param, params), x, index, g, state, ignored, -1)


@_loss_grad.register_fake
def _(
    x: Tensor, index: Tensor, state: Tensor, g: Tensor, kind: str, param: float, params: Tensor | None, ignored: int
) -> Tensor:
    return torch.empty_like(x)


def _link(kind: str, param: float, params: Tensor | None) -> Any:
    return link_of(Words(kind, param, params, 0, 0))


class _Eager(torch.autograd.Function):
    """The loss, reduced; for a sparse map of long rows the backward reads the support alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, words: Words, ignored: int, reduction: str) -> Tensor:
        value, state, count = launch.loss(link_of(words), x, index, ignored, reduction, -1, True)
        ctx.call = link_of(words), ignored
        ctx.lanes = None if isinstance(state, Tensor) else state._replace(memory=None)
        ctx.save_for_backward(x, index, state if ctx.lanes is None else state.memory, count)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        once()
        x, index, memory, count = ctx.saved_tensors
        g = grads[0] if count is None else grads[0] / count
        state = memory if ctx.lanes is None else ctx.lanes._replace(memory=memory)
        link, ignored = ctx.call
        return launch.loss_grad(link, x, index, g, state, ignored, -1), *(None,) * 4


class _Opaque(torch.autograd.Function):
    """The loss of each row, by operations."""

    @staticmethod
    def forward(
        x: Tensor, index: Tensor, kind: str, param: float, params: Tensor | None, ignored: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return ops.loss(x, index, kind, param, params, ignored)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, index, kind, param, params, ignored = inputs
        ctx.call = kind, param, ignored
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, index, output[2], params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, index, state, params = ctx.saved_tensors
        kind, param, ignored = ctx.call
        return ops.loss_grad(x, index, state, grads[0], kind, param, params, ignored), *(None,) * 5


def fenchel_young(
    x: Tensor,
    target: Tensor,
    map: str = "softmax",
    *,
    alpha: Any = None,
    k: Any = None,
    p: Any = None,
    dim: int = -1,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The loss of the classes `target` (integers, in the shape of x without `dim`), in fp32.

    map: "softmax" (the cross entropy), "sparsemax", "entmax" (alpha), "budget" (k), "normmax" (alpha), "topk" (k) or "topp" (p). Rows whose
    target is ignore_index have loss 0 and do not count in a mean; a target that is no class makes the loss of its row NaN.
    """
    who = "fenchel_young"
    if reduction not in REDUCTIONS:
        raise ValueError(f"{who}: reduction is one of {', '.join(REDUCTIONS)}, not {reduction!r}")
    words = words_of(who, "index_loss", map, alpha=alpha, k=k, p=p)
    check(who, x)
    dim = _axis(who, x, dim)
    check_classes(who, words, x.shape[dim])
    if target.dtype not in (torch.int64, torch.int32) or target.device != x.device:
        raise TypeError(f"{who}: target is int64 or int32 on {x.device}, not {target.dtype} on {target.device}")
    if tuple(target.shape) != (*x.shape[:dim], *x.shape[dim + 1 :]):
        raise ValueError(f"{who}: target has the shape of x without dim {dim}, not {tuple(target.shape)}")
    if words.params is not None and dim != x.ndim - 1:
        raise ValueError(f"{who}: a parameter for each row needs the classes on the last axis")
    rows = x if dim == x.ndim - 1 else x.movedim(dim, -1)
    if torch.compiler.is_compiling():
        value, counted, _ = _Opaque.apply(rows, target, words.kind, words.param, words.params, ignore_index)
        if reduction == "none":
            return value
        return value.sum() if reduction == "sum" else value.sum() / counted.sum().clamp(min=1.0)
    if x.requires_grad and torch.is_grad_enabled():
        return _Eager.apply(rows, target, words, ignore_index, reduction)
    return launch.loss(link_of(words), rows, target, ignore_index, reduction, -1, False).value


def cross_entropy(
    x: Tensor, target: Tensor, dim: int = -1, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    return fenchel_young(x, target, "softmax", dim=dim, ignore_index=ignore_index, reduction=reduction)


def sparsemax_loss(
    x: Tensor, target: Tensor, dim: int = -1, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    return fenchel_young(x, target, "sparsemax", dim=dim, ignore_index=ignore_index, reduction=reduction)


def entmax_loss(
    x: Tensor, target: Tensor, alpha: Any = 1.5, dim: int = -1, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    return fenchel_young(x, target, "entmax", alpha=alpha, dim=dim, ignore_index=ignore_index, reduction=reduction)


def entmax15_loss(
    x: Tensor, target: Tensor, dim: int = -1, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    return fenchel_young(x, target, "entmax", alpha=1.5, dim=dim, ignore_index=ignore_index, reduction=reduction)
