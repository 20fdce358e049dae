"""Linear attention of torch tensors by the compiled engine, with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..autodiff.torch_adapter import operation
from ..kernels import engine_of
from ..kernels.engine import Engine
from ..kernels.tasks import LINEAR_ATTENTION, LinearAttention

Tensor = torch.Tensor


def _forward(how: Any, operands: Any, wants: Any) -> tuple[Tensor, Any]:
    engine, task, _ = how
    out, below = engine.linear_attention(task, *operands, save=True)
    return out, (out, below)


def _backward(how: Any, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (q, k, v), (out, below), (g,) = operands, kept, grads
    engine = engine_of(LINEAR_ATTENTION, (), g)
    if engine is None:
        return None
    return engine.linear_attention_vjp(how[1], q, k, v, out, below, g, wants[0], wants[1] or wants[2])


def _plain(how: Any, operands: Any, kept: Any) -> Tensor:
    return how[2](*operands)


_attend = operation("LinearAttention", _forward, _backward, _plain)


def attend(
    engine: Engine, task: LinearAttention, q: Tensor, k: Tensor, v: Tensor, plain: Callable[..., Tensor]
) -> Tensor:
    """`engine.linear_attention` with a gradient; `plain(q, k, v)` computes the same with plain operations."""
    return _attend((engine, task, plain), q, k, v)
