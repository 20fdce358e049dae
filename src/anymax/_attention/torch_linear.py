"""Linear attention of torch tensors by the compiled engine, with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..autodiff.torch_adapter import operation
from ..kernels import native, taylor_attention

Tensor = torch.Tensor


def _forward(how: Any, operands: Any, wants: Any) -> tuple[Tensor, Any]:
    q, k, v = operands
    out, below = taylor_attention.attend(q, k, v, how[0], save=True)
    return out, (out, below)


def _backward(how: Any, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (q, k, v), (out, below), (g,) = operands, kept, grads
    if native.refuse_array(g) is not None:
        return None
    return taylor_attention.vjp(q, k, v, out, below, g, how[0], wants[0], wants[1] or wants[2])


def _plain(how: Any, operands: Any, kept: Any) -> Tensor:
    q, k, v = operands
    return how[1](q, k, v)


_attend = operation("LinearAttention", _forward, _backward, _plain)


def attend(q: Tensor, k: Tensor, v: Tensor, how: taylor_attention.How, plain: Callable[..., Tensor]) -> Tensor:
    """`taylor_attention.attend` with a gradient; `plain(q, k, v)` computes the same with plain operations."""
    return _attend((how, plain), q, k, v)
