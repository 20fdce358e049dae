"""Linear attention of torch tensors by the compiled engine, with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._array import plain_backward
from ..autodiff.saving import save, saved
from ..autodiff.torch import plain_grads
from ..kernels import native, taylor_attention

Tensor = torch.Tensor


class _Linear(torch.autograd.Function):
    """The backward pass uses plain operations where autograd must differentiate it again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: taylor_attention.How, plain: Callable[..., Tensor]
    ) -> Tensor:
        out, below = taylor_attention.attend(q, k, v, how, save=True)
        ctx.how, ctx.plain = how, plain
        save(ctx, q, k, v, out, below)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, below = saved(ctx)
        (g,) = grads
        wants = ctx.needs_input_grad
        if plain_backward(g) or native.refuse_array(g) is not None:
            return *plain_grads(lambda *free: (ctx.plain(*free),), (q, k, v), grads), None, None
        return *taylor_attention.vjp(q, k, v, out, below, g, ctx.how, wants[0], wants[1] or wants[2]), None, None


def attend(q: Tensor, k: Tensor, v: Tensor, how: taylor_attention.How, plain: Callable[..., Tensor]) -> Tensor:
    """`taylor_attention.attend` with a gradient; `plain(q, k, v)` computes the same with plain operations."""
    return _Linear.apply(q, k, v, how, plain)
