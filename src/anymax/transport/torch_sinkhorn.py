"""Sinkhorn of torch tensors.

An engine computes the iterations and their gradient, also in programs of torch.compile. Under the transforms of torch.func, and for
derivatives in the sums, plain operations do. The way to the limit is an opaque operation, and plain operations around it have the
derivatives.
"""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as xp
import torch

from .._array import modes, recorded, transformed
from ..autodiff.torch_adapter import opaque, operation, plain_grads, traced_operation
from ..autodiff.torch_graphs import outside_graphs
from ..kernels import engine_of
from ..kernels.tasks import SINKHORN, Sinkhorn
from . import plain
from .assignment import assignment
from .limit import limit
from .problem import Given, Problem, check_totals, problem

Tensor = torch.Tensor


def plan(given: Given, iterations: int | None) -> Tensor:
    """P with its gradient."""
    if iterations is not None:
        return _steps(given, iterations)
    posed = problem(given, xp, balanced=True)
    if torch.compiler.is_compiling() or modes() or transformed():
        held = torch.ops.anymax.sinkhorn_limit(*(a.detach() for a in posed))
        return plain.differentiable(posed, held, xp)
    if recorded(*posed):
        return _limit(None, *posed)
    return limit(posed, xp)


# -- n steps -----------------------------------------------------------------------------------------------------------------------


def _steps(given: Given, iterations: int) -> Tensor:
    x, task = given.x, Sinkhorn(given.rows, given.columns, iterations, given.temperature)
    if not (transformed() or recorded(given.rows, given.columns) or torch.compiler.is_exporting()):
        (*sums, _, _), how = task, task[2:]
        if torch.compiler.is_compiling() or modes():
            check_totals(given, xp)
            return _traced(how, x, *sums) if recorded(x) else torch.ops.anymax.sinkhorn(x, *task)
        engine = engine_of(SINKHORN, task, x)
        if engine is not None:
            check_totals(given, xp)
            return _eager((engine, *how), x, *sums) if recorded(x) else engine.sinkhorn(task, x)
    return _plain(x, *task)


def _plain(x: Tensor, rows: Tensor | None, columns: Tensor | None, iterations: int, temperature: float) -> Tensor:
    return plain.steps(problem(Given(x, rows, columns, temperature), xp), iterations, xp)


def _eager_forward(how: Any, operands: Any, wants: Any) -> tuple[Tensor, tuple[()]]:
    (x, *sums), (engine, *steps) = operands, how
    return engine.sinkhorn(Sinkhorn(*sums, *steps), x), ()


def _eager_backward(how: Any, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (x, *sums), (_, *steps), (g,) = operands, how, grads
    task = Sinkhorn(*sums, *steps)
    engine = engine_of(SINKHORN, task, g)
    return None if engine is None else (engine.sinkhorn(task, x, g), None, None)


def _eager_plain(how: Any, operands: Any, kept: Any) -> Tensor:
    return _plain(*operands, *how[1:])


_eager = operation("Sinkhorn", _eager_forward, _eager_backward, _eager_plain)


def _traced_run(how: Any, *tensors: Any) -> Tensor:
    return torch.ops.anymax.sinkhorn(*tensors, *how)


def _traced_backward(how: Any, saved: Any, g: Tensor, wants: Any) -> Any:
    return torch.ops.anymax.sinkhorn_vjp(*saved, g, *how), None, None


_traced = traced_operation("TracedSinkhorn", _traced_run, _traced_backward)


def _steps_op(x: Tensor, rows: Tensor | None, columns: Tensor | None, iterations: int, temperature: float) -> Tensor:
    task = Sinkhorn(rows, columns, iterations, temperature)
    engine = engine_of(SINKHORN, task, x)
    return (_plain(x, *task) if engine is None else engine.sinkhorn(task, x)).contiguous()


def _vjp_op(
    x: Tensor, rows: Tensor | None, columns: Tensor | None, g: Tensor, iterations: int, temperature: float
) -> Tensor:
    task = Sinkhorn(rows, columns, iterations, temperature)
    engine = engine_of(SINKHORN, task, x)
    if engine is not None:
        return engine.sinkhorn(task, x, g)
    (slope,) = plain_grads(lambda a: (_plain(a, *task),), (x,), (g,), (True,))
    assert slope is not None
    return slope.contiguous()


_OPERANDS = "Tensor x, Tensor? rows, Tensor? columns"
opaque(f"sinkhorn({_OPERANDS}, int iterations, float temperature) -> Tensor", _steps_op)
opaque(f"sinkhorn_vjp({_OPERANDS}, Tensor g, int iterations, float temperature) -> Tensor", _vjp_op)


# -- the limit -----------------------------------------------------------------------------------------------------------------------


def _limit_forward(_: None, operands: Any, wants: Any) -> tuple[Tensor, tuple[Tensor]]:
    held = limit(Problem(*operands), xp)
    return held, (held,)


def _limit_backward(_: None, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    """The gradient solves the equations of the limit's potentials once."""
    posed = Problem(*operands)
    (held,), (g,) = kept, grads
    dz, of_rows, of_columns = plain.slopes(posed, held, g, xp)
    return dz, None, of_rows.sum_to_size(posed.rows.shape), of_columns.sum_to_size(posed.columns.shape), None


def _limit_plain(_: None, operands: Any, kept: Any) -> Tensor:
    return plain.differentiable(Problem(*operands), kept[0].detach(), xp)


_limit = operation("SinkhornLimit", _limit_forward, _limit_backward, _limit_plain)


def _limit_op(z: Tensor, keep: Tensor, rows: Tensor, columns: Tensor, poisoned: Tensor) -> Tensor:
    return limit(Problem(z, keep, rows, columns, poisoned), xp).contiguous()


def _limit_vmap(info: Any, in_dims: Any, *operands: Tensor) -> tuple[Tensor, int]:
    """All batches in one call: the batch becomes the first axis of each operand."""
    moved = [
        a.unsqueeze(0).expand(info.batch_size, *a.shape) if dim is None else a.movedim(dim, 0)
        for a, dim in zip(operands, in_dims)
    ]
    return torch.ops.anymax.sinkhorn_limit(*moved), 0


opaque(
    "sinkhorn_limit(Tensor z, Tensor keep, Tensor rows, Tensor columns, Tensor poisoned) -> Tensor",
    _limit_op,
    vmap=_limit_vmap,
)


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
