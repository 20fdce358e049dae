"""torch: an output layer as opaque operations (`torch.ops.anymax`), so that a compiled model does not hold all scores either.

The gradient computes the scores again, for sparse maps too: outside of torch.compile those keep a few scores of each row, but an
opaque operation must know the sizes of its results.
"""

from __future__ import annotations

from typing import Any

import torch

from .._array import wide_dtype
from ..autodiff.torch_library import library
from ..autodiff.torch_operations import mapping_from, spec_of
from ..losses.further import FurtherLosses
from ..losses.options import EACH_ROW
from ..transforms.softcap import cap_of, softcap
from . import torch_values
from .job import Job
from .layer import Layer
from .per_row import PerRow, RowLoss, RowTerms
from .torch_groups import with_a_class

Tensor = torch.Tensor

_OPERANDS = "Tensor x, Tensor weight, Tensor? bias, Tensor? keep, Tensor index, Tensor? class_weight"
_ARGUMENTS = f"{_OPERANDS}, str spec, float[] loss, float cap, str terms, int chunk"
_LIBRARY = library(__name__)
_LIBRARY.define(f"layer({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"layer_vjp(Tensor g, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Tensor:
        return torch.ops.anymax.layer(x, weight, bias, *others)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        *tensors, spec, loss, cap, terms, chunk = inputs
        ctx.call = spec, loss, cap, terms, chunk
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias, *others = ctx.saved_tensors
        dx, dw, db = torch.ops.anymax.layer_vjp(grads[0], x, weight, bias, *others, *ctx.call)
        return dx, dw, None if bias is None else db, *(None,) * 8


def values(job: Job) -> Tensor | None:
    """The result for each row; None for a user's map, one with tensors, or a transform but a soft cap, which need plain operations."""
    layer, per_row, chunk = job.layer, job.per_row, -1 if job.chunk is None else job.chunk
    spec = None if layer.mapping.params() else spec_of(layer.mapping)
    cap = cap_of(per_row.transforms)
    if spec is None or cap is None or type(layer.x) not in (Tensor, torch.nn.Parameter):
        return None
    tensors = layer.x, layer.weight, layer.bias, layer.keep, job.target, job.class_weight
    call = *tensors, spec, [per_row.options.smoothing, *per_row.further], cap, _name_of(per_row), chunk
    if layer.recorded():
        return _Layer.apply(*call)
    return torch.ops.anymax.layer(*call)  # torch.compile can't trace an autograd function without a gradient


def _values(
    x: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None, index: Tensor, class_weight: Tensor | None, spec: str,
    loss: list[float], cap: float, terms: str, chunk: int,
) -> Tensor:  # fmt: skip
    layer = Layer(x, weight, bias, keep, mapping_from(spec, []), (x.shape[0],), x.dtype)
    who, transforms = "a compiled output layer", (softcap(cap),) if cap else ()
    per_row = (
        RowTerms(who, transforms, entropy="entropy" in terms, rest="rest" in terms)
        if terms
        else RowLoss(who, transforms, EACH_ROW._replace(smoothing=loss[0]), further=FurtherLosses(*loss[1:]))
    )
    job = Job(layer, per_row, index, class_weight, None if chunk < 0 else chunk)
    return with_a_class(job, per_row.empty_rows(index), torch_values.values)


def _forward(*given: Any) -> Tensor:
    with torch.no_grad():
        return _values(*given).contiguous()


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
) -> Tensor:  # fmt: skip
    shape = (x.shape[0], index.shape[1] + terms.count(",")) if terms else (x.shape[0],)
    return x.new_empty(shape, dtype=wide_dtype(x, torch))


def _vjp_fake(g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    one = x.new_empty(0) if bias is None else torch.empty_like(bias)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), one


for _name, _impl, _fake in (("layer", _forward, _forward_fake), ("layer_vjp", _vjp, _vjp_fake)):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anymax::{_name}", _fake, lib=_LIBRARY)
