"""Sinkhorn of many 4 x 4 matrices, as hyper-connections mix their streams: one matrix a thread."""

from __future__ import annotations

from typing import Any

import torch

from ._kernels.triton import sinkhorn_kernels
from ._links import check
from ._ops import add_op_namespace_prefix, ops

Tensor = torch.Tensor


@torch.library.custom_op(
    add_op_namespace_prefix("sinkhorn"),
    mutates_args=(),
    schema="(Tensor x, Tensor? g, int iterations, float temperature) -> Tensor",
)
def _sinkhorn(x: Tensor, g: Any, iterations: int, temperature: float) -> Tensor:
    return sinkhorn_kernels.run(x.contiguous(), None if g is None else g.contiguous(), iterations, temperature)


@_sinkhorn.register_fake
def _(x: Tensor, g: Any, iterations: int, temperature: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, iterations: int, temperature: float) -> Tensor:
        return ops.sinkhorn(x, None, iterations, temperature)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.iterations, ctx.temperature = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ops.sinkhorn(x, grads[0], ctx.iterations, ctx.temperature), None, None


def sinkhorn(x: Tensor, iterations: int = 20, temperature: float = 1.0) -> Tensor:
    """P of the scores x [..., 4, 4] in fp32: exp(x / temperature), with rows and columns scaled in turn so that each sums to 1.

    The gradient is that of these iterations. The columns are scaled last.
    """
    check("sinkhorn", x, dtypes=("float32",))
    if tuple(x.shape[-2:]) != (4, 4):
        raise ValueError(f"sinkhorn: the kernel takes matrices of 4 x 4, not {tuple(x.shape[-2:])}")
    if iterations < 1 or not temperature > 0:
        raise ValueError(f"sinkhorn: iterations >= 1 and temperature > 0, not {iterations} and {temperature}")
    return _Sinkhorn.apply(x, int(iterations), float(temperature))
