"""Sinkhorn of torch tensors.

An engine computes the iterations and their gradient, also in programs of torch.compile. Under the transforms of torch.func, and for
derivatives in the sums, plain operations do. The way to the limit is an opaque operation, and plain operations around it have the
derivatives.
"""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as xp
import torch

from .._array import modes, plain_backward, recorded, transformed
from ..autodiff.saving import save, saved
from ..autodiff.torch import plain_grads
from ..autodiff.torch_graphs import outside_graphs
from ..autodiff.torch_library import library
from ..kernels import sinkhorn as kernel
from . import plain
from .assignment import assignment
from .limit import limit
from .problem import Given, Problem, check_totals, problem

Tensor = torch.Tensor

_LIBRARY = library(__name__)
_LIBRARY.define("sinkhorn_limit(Tensor z, Tensor keep, Tensor rows, Tensor columns, Tensor poisoned) -> Tensor")
_LIBRARY.define("sinkhorn(Tensor x, Tensor? rows, Tensor? columns, int iterations, float temperature) -> Tensor")
_LIBRARY.define(
    "sinkhorn_vjp(Tensor x, Tensor? rows, Tensor? columns, Tensor g, int iterations, float temperature) -> Tensor"
)


def plan(given: Given, iterations: int | None) -> Tensor:
    """P with its gradient."""
    if iterations is not None:
        return _steps(given, iterations)
    posed = problem(given, xp, balanced=True)
    if torch.compiler.is_compiling() or modes() or transformed():
        held = torch.ops.anymax.sinkhorn_limit(*(a.detach() for a in posed))
        return plain.differentiable(posed, held, xp)
    if recorded(*posed):
        return _Limit.apply(*posed)
    return limit(posed, xp)


# -- n steps -----------------------------------------------------------------------------------------------------------------------


def _steps(given: Given, iterations: int) -> Tensor:
    call = kernel.Call(given.x, given.rows, given.columns, iterations, given.temperature)
    if not (transformed() or recorded(given.rows, given.columns) or torch.compiler.is_exporting()):
        traced = torch.compiler.is_compiling() or modes()
        if traced or kernel.refuse(call) is None:
            check_totals(given, xp)
            return _Steps.apply(*call) if traced or recorded(given.x) else kernel.forward(call)
    return _plain(*call)


def _plain(x: Tensor, rows: Tensor | None, columns: Tensor | None, iterations: int, temperature: float) -> Tensor:
    return plain.steps(problem(Given(x, rows, columns, temperature), xp), iterations, xp)


class _Steps(torch.autograd.Function):
    """P by an engine. The backward pass uses plain operations where it is itself differentiated."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor | None, columns: Tensor | None, iterations: int, temperature: float
    ) -> Tensor:
        ctx.iterations, ctx.temperature = iterations, temperature
        if torch.compiler.is_compiling() or modes():
            ctx.save_for_backward(x, rows, columns)
            return torch.ops.anymax.sinkhorn(x, rows, columns, iterations, temperature)
        save(ctx, x, rows, columns)
        return kernel.forward(kernel.Call(x, rows, columns, iterations, temperature))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), how = grads, (ctx.iterations, ctx.temperature)
        if torch.compiler.is_compiling() or modes():
            x, rows, columns = ctx.saved_tensors
            return torch.ops.anymax.sinkhorn_vjp(x, rows, columns, g, *how), None, None, None, None
        x, rows, columns = saved(ctx)
        call = kernel.Call(x, rows, columns, *how)
        if plain_backward(g) or kernel.refuse(call._replace(x=g)) is not None:
            return *plain_grads(lambda a: (_plain(a, rows, columns, *how),), (x,), grads), None, None, None, None
        return kernel.vjp(call, g), None, None, None, None


def _steps_op(x: Tensor, rows: Tensor | None, columns: Tensor | None, iterations: int, temperature: float) -> Tensor:
    call = kernel.Call(x, rows, columns, iterations, temperature)
    return (kernel.forward(call) if kernel.refuse(call) is None else _plain(*call)).contiguous()


def _vjp_op(
    x: Tensor, rows: Tensor | None, columns: Tensor | None, g: Tensor, iterations: int, temperature: float
) -> Tensor:
    call = kernel.Call(x, rows, columns, iterations, temperature)
    if kernel.refuse(call) is None:
        return kernel.vjp(call, g)
    (slope,) = plain_grads(lambda a: (_plain(a, *call[1:]),), (x,), (g,))
    assert slope is not None
    return slope.contiguous()


def _like_x(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# -- the limit -----------------------------------------------------------------------------------------------------------------------


class _Limit(torch.autograd.Function):
    """The limit, whose gradient solves the equations of its potentials once."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, keep: Tensor, rows: Tensor, columns: Tensor, poisoned: Tensor) -> Tensor:
        held = limit(Problem(z, keep, rows, columns, poisoned), xp)
        save(ctx, z, keep, rows, columns, poisoned, held)
        return held

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, keep, rows, columns, poisoned, held = saved(ctx)
        if plain_backward(*grads):

            def again(z: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor]:
                return (plain.differentiable(Problem(z, keep, rows, columns, poisoned), held.detach(), xp),)

            dz, of_rows, of_columns = plain_grads(again, (z, rows, columns), grads)
        else:
            dz, of_rows, of_columns = plain.slopes(Problem(z, keep, rows, columns, poisoned), held, grads[0], xp)
            of_rows, of_columns = of_rows.sum_to_size(rows.shape), of_columns.sum_to_size(columns.shape)
        return dz, None, of_rows, of_columns, None


def _limit_op(z: Tensor, keep: Tensor, rows: Tensor, columns: Tensor, poisoned: Tensor) -> Tensor:
    return limit(Problem(z, keep, rows, columns, poisoned), xp).contiguous()


def _limit_vmap(info: Any, in_dims: Any, *operands: Tensor) -> tuple[Tensor, int]:
    """All batches in one call: the batch becomes the first axis of each operand."""
    moved = [
        a.unsqueeze(0).expand(info.batch_size, *a.shape) if dim is None else a.movedim(dim, 0)
        for a, dim in zip(operands, in_dims)
    ]
    return torch.ops.anymax.sinkhorn_limit(*moved), 0


for _name, _impl in (("sinkhorn", _steps_op), ("sinkhorn_vjp", _vjp_op), ("sinkhorn_limit", _limit_op)):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anymax::{_name}", _like_x, lib=_LIBRARY)
torch.library.register_vmap("anymax::sinkhorn_limit", _limit_vmap, lib=_LIBRARY)


# -- assignments ---------------------------------------------------------------------------------------------------------------------


def assigned(x: Tensor) -> Tensor:
    """The assignment with the largest total for each matrix, computed on the CPU."""
    if transformed():
        raise TypeError(
            "gumbel_sinkhorn(hard=True): an assignment reads values, which torch.func hides; call it outside, on a batch of matrices"
        )
    return outside_graphs(_assigned, x)


def _assigned(x: Tensor) -> Tensor:
    return torch.as_tensor(assignment(x.detach().cpu().numpy())).to(x)
