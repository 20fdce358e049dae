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
from .job import Job, PerRow, RowDivergence, RowLoss, RowTerms
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
    cap, numbers = cap_of(per_row.transforms), _numbers_of(per_row)
    if spec is None or cap is None or numbers is None:
        return None
    tensors = tuple(a for each in job.layers for a in (each.x, each.weight, each.bias))
    if any(type(each.x) not in (Tensor, torch.nn.Parameter) for each in job.layers):
        return None
    of_other = (None, None) if job.reference is None else (job.reference.keep, job.reference.factor)
    tensors = (
        *tensors,
        *(None,) * (_LEARNED - len(tensors)),
        *of_other,
        layer.keep,
        layer.factor,
        job.target,
        job.class_weight,
    )
    how = spec, numbers, cap, _name_of(per_row), chunk, job.invariant, layer.rounded_to
    # torch.compile can't trace an autograd function without a gradient
    return _traced(how, *tensors) if job.recorded() else _run(how, *tensors)


_LEARNED = 6  # tensors that may have a gradient: x, weight and bias of a layer, and of the reference


def _values(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_ref: Tensor | None, weight_ref: Tensor | None, bias_ref: Tensor | None,
    keep_ref: Tensor | None, factor_ref: Tensor | None, keep: Tensor | None, factor: Tensor | None, index: Tensor,
    class_weight: Tensor | None, spec: str, numbers: list[float], cap: float, result: str, chunk: int, invariant: bool,
    rounded_to: torch.dtype | None,
) -> Tensor:  # fmt: skip
    mapping, reference = mapping_from(spec, []), None
    layer = Layer(x, weight, bias, keep, mapping, (x.shape[0],), x.dtype, rounded_to=rounded_to, factor=factor)
    if x_ref is not None and weight_ref is not None:
        reference = Layer(x_ref, weight_ref, bias_ref, keep_ref, mapping, (x.shape[0],), x_ref.dtype, factor=factor_ref)
    who, transforms = "a compiled output layer", (softcap(cap),) if cap else ()
    per_row: RowTerms | RowLoss | RowDivergence
    if result == _DIVERGENCE:
        per_row = RowDivergence(who, transforms, beta=numbers[0])
    elif result:
        per_row = RowTerms(who, transforms, entropy="entropy" in result, rest="rest" in result)
    else:
        per_row = LossNumbers.unpacked(numbers).per_row(who, transforms)
    job = Job(layer, per_row, index, class_weight, None if chunk < 0 else chunk, invariant, reference)
    return with_a_class(job, per_row.empty_rows(index), torch_values.values)


def _forward(*args: Any) -> Tensor:
    with torch.no_grad():
        return _values(*args).contiguous()


def _vjp(g: Tensor, wants: list[bool], *args: Any) -> tuple[Tensor, ...]:
    """The gradients by the tensors that may have one; nothing for the others."""
    with torch.enable_grad():
        free = [a.detach().requires_grad_() if want else a for a, want in zip(args, wants)]
        value = _values(*free, *args[_LEARNED:])
        grads = list(torch.autograd.grad(value, [a for a, want in zip(free, wants) if want], g))
    return tuple(grads.pop(0).contiguous() if want else g.new_empty(0) for want in wants)


_DIVERGENCE = "divergence"


def _name_of(per_row: PerRow) -> str:
    """A divergence, or the terms that a row has, such as "log_p, entropy"; nothing for a loss."""
    if isinstance(per_row, RowDivergence):
        return _DIVERGENCE
    if not isinstance(per_row, RowTerms):
        return ""
    return ", ".join(["log_p", *(["entropy"] if per_row.entropy else []), *(["rest"] if per_row.rest else [])])


def _numbers_of(per_row: PerRow) -> list[float] | None:
    """What an operation is told beside the name of the result; None if that does not say all of it."""
    if isinstance(per_row, RowDivergence):
        return [per_row.beta]
    loss = LossNumbers.of(per_row) if isinstance(per_row, RowLoss) else LossNumbers()
    return None if loss is None else loss.packed()


def _forward_fake(x: Tensor, *others: Any) -> Tensor:
    index, result = others[_INDEX - 1], others[_RESULT - 1]
    per_row = not result or result == _DIVERGENCE
    shape = (x.shape[0],) if per_row else (x.shape[0], index.shape[1] + result.count(","))
    return x.new_empty(shape, dtype=wide_dtype(x, torch))


def _vjp_fake(g: Tensor, wants: list[bool], *args: Any) -> tuple[Tensor, ...]:
    return tuple(a.new_empty(a.shape) if want else g.new_empty(0) for a, want in zip(args, wants))


_LEARN = "Tensor x, Tensor weight, Tensor? bias, Tensor? x_ref, Tensor? weight_ref, Tensor? bias_ref"
_FIXED = "Tensor? keep_ref, Tensor? factor_ref, Tensor? keep, Tensor? factor, Tensor index, Tensor? class_weight"
_INDEX, _RESULT = 10, 15  # the places of `index` and `result`
_ARGUMENTS = f"{_LEARN}, {_FIXED}, str spec, float[] numbers, float cap, str result, int chunk, bool invariant, ScalarType? rounded_to"
_GRADIENTS = ", ".join(["Tensor"] * _LEARNED)
opaque(f"layer({_ARGUMENTS}) -> Tensor", _forward, _forward_fake)
opaque(f"layer_vjp(Tensor g, bool[] wants, {_ARGUMENTS}) -> ({_GRADIENTS})", _vjp, _vjp_fake)


# -- derivatives ---------------------------------------------------------------------------------------------------------------------


def _run(how: Any, *tensors: Tensor | None) -> Tensor:
    return torch.ops.anymax.layer(*tensors, *how)


def _backward(how: Any, saved: Any, g: Tensor, wants: Any) -> Any:
    wants = list(wants[:_LEARNED])
    grads = torch.ops.anymax.layer_vjp(g, wants, *saved, *how)
    return *(d if want else None for d, want in zip(grads, wants)), *(None,) * (len(saved) - _LEARNED)


_traced = traced_operation("TracedLayer", _run, _backward)
