"""torch: an output layer as opaque operations (`torch.ops.anymax`), so that a compiled model does not hold all scores either.

The gradient computes the scores again, for sparse maps too: outside of torch.compile those keep a few scores of each row, but an
opaque operation must know the sizes of its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._array import wide_dtype
from ..autodiff.torch_adapter import opaque, traced_operation
from ..autodiff.torch_operations import mapping_from, spec_of
from ..losses.options import EACH_ROW
from ..losses.penalties import NO_PENALTIES, RowPenalties
from ..transforms.softcap import cap_of, softcap
from . import torch_values
from .job import Job, PerRow, RowLoss, RowTerms
from .layer import Layer
from .torch_groups import with_a_class

Tensor = torch.Tensor


class LossNumbers(NamedTuple):
    """What an operation is told of a loss."""

    smoothing: float = 0.0
    penalties: RowPenalties = NO_PENALTIES

    @classmethod
    def of(cls, per_row: RowLoss) -> LossNumbers | None:
        """Those of a loss; None if they do not say all of it."""
        numbers = cls(per_row.options.smoothing, per_row.penalties)
        # the gradient of an operation is exact, so `min_probability` has no meaning
        return numbers if numbers.per_row(per_row.who, per_row.transforms, per_row.min_probability) == per_row else None

    def per_row(self, who: str, transforms: tuple[Callable[[Any], Any], ...], min_probability: float = 0.0) -> RowLoss:
        options = EACH_ROW._replace(smoothing=self.smoothing)
        return RowLoss(who, transforms, options, min_probability=min_probability, penalties=self.penalties)

    def packed(self) -> list[float]:
        return [self.smoothing, *self.penalties]

    @classmethod
    def unpacked(cls, numbers: list[float]) -> LossNumbers:
        return cls(numbers[0], RowPenalties(*numbers[1:]))


def values(job: Job) -> Tensor | None:
    """The result for each row; None for what needs plain operations: a user's map, one with tensors, a transform but a soft cap, or a loss
    that `LossNumbers` can't say."""
    layer, per_row, chunk = job.layer, job.per_row, -1 if job.chunk is None else job.chunk
    spec = None if layer.mapping.params() else spec_of(layer.mapping)
    cap, loss = cap_of(per_row.transforms), LossNumbers.of(per_row) if isinstance(per_row, RowLoss) else LossNumbers()
    if spec is None or cap is None or loss is None or type(layer.x) not in (Tensor, torch.nn.Parameter):
        return None
    tensors = layer.x, layer.weight, layer.bias, layer.keep, job.target, job.class_weight
    how = spec, loss.packed(), cap, _name_of(per_row), chunk, job.invariant, layer.rounded_to
    # torch.compile can't trace an autograd function without a gradient
    return _traced(how, *tensors) if layer.recorded() else _run(how, *tensors)


def _values(
    x: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None, index: Tensor, class_weight: Tensor | None, spec: str,
    loss: list[float], cap: float, terms: str, chunk: int,
    invariant: bool, rounded_to: torch.dtype | None,
) -> Tensor:  # fmt: skip
    layer = Layer(x, weight, bias, keep, mapping_from(spec, []), (x.shape[0],), x.dtype, rounded_to=rounded_to)
    who, transforms = "a compiled output layer", (softcap(cap),) if cap else ()
    per_row = (
        RowTerms(who, transforms, entropy="entropy" in terms, rest="rest" in terms)
        if terms
        else LossNumbers.unpacked(loss).per_row(who, transforms)
    )
    job = Job(layer, per_row, index, class_weight, None if chunk < 0 else chunk, invariant)
    return with_a_class(job, per_row.empty_rows(index), torch_values.values)


def _forward(*args: Any) -> Tensor:
    with torch.no_grad():
        return _values(*args).contiguous()


def _vjp(g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        free: list[Any] = [None if a is None else a.detach().requires_grad_() for a in (x, weight, bias)]
        value = _values(*free, *others)
        grads = torch.autograd.grad(value, [a for a in free if a is not None], g)
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous() if bias is not None else x.new_empty(0)


def _name_of(per_row: PerRow) -> str:
    """The terms that a row has, such as "log_p, entropy"; nothing for a loss."""
    if not isinstance(per_row, RowTerms):
        return ""
    return ", ".join(["log_p", *(["entropy"] if per_row.entropy else []), *(["rest"] if per_row.rest else [])])


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None, index: Tensor, class_weight: Tensor | None, spec: str,
    loss: list[float], cap: float, terms: str, chunk: int,
    invariant: bool, rounded_to: torch.dtype | None,
) -> Tensor:  # fmt: skip
    shape = (x.shape[0], index.shape[1] + terms.count(",")) if terms else (x.shape[0],)
    return x.new_empty(shape, dtype=wide_dtype(x, torch))


def _vjp_fake(g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    one = x.new_empty(0) if bias is None else torch.empty_like(bias)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), one


_OPERANDS = "Tensor x, Tensor weight, Tensor? bias, Tensor? keep, Tensor index, Tensor? class_weight"
_ARGUMENTS = (
    f"{_OPERANDS}, str spec, float[] loss, float cap, str terms, int chunk, bool invariant, ScalarType? rounded_to"
)
opaque(f"layer({_ARGUMENTS}) -> Tensor", _forward, _forward_fake)
opaque(f"layer_vjp(Tensor g, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", _vjp, _vjp_fake)


# -- derivatives ---------------------------------------------------------------------------------------------------------------------


def _run(how: Any, *tensors: Tensor | None) -> Tensor:
    return torch.ops.anymax.layer(*tensors, *how)


def _backward(how: Any, saved: Any, g: Tensor, wants: Any) -> Any:
    dx, dw, db = torch.ops.anymax.layer_vjp(g, *saved, *how)
    return dx, dw, None if saved[2] is None else db, None, None, None


_traced = traced_operation("TracedLayer", _run, _backward)
