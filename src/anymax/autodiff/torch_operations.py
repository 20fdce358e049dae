"""PyTorch: the engines as opaque operations (`torch.ops.anymax`), for torch.compile and export."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import array_api_compat.torch as xp
import torch

from .. import kernels
from .._array import floating, unchecked, upcast
from .._core.mapping import Mapping
from .._random import nodes
from ..mappings import CATALOGUE
from ..mappings.ranks import SoftSorted
from .torch_adapter import like, opaque, traced_operation

Tensor = torch.Tensor

_KINDS = {kind.__name__: kind for kind in (*CATALOGUE, SoftSorted)}
nodes.panel_nodes()


# -- a mapping as a string and tensors, which the schemas of operations allow ---------------------------------------------------


def spec_of(mapping: Mapping) -> str | None:
    """The mapping without its tensors, as a string that `mapping_from` reads; None if it holds a function of the user."""
    if _KINDS.get(type(mapping).__name__) is not type(mapping):
        return None
    words = [type(mapping).__name__]
    for key, value in mapping.constants().items():
        if not (value is None or isinstance(value, (bool, int, float, str))):
            return None
        if isinstance(value, float):  # a symbol under dynamic=True; the ratio is a number again
            over, under = value.as_integer_ratio()
            value = over / under
        words.append(f"{key}={value!r}")
    for key in mapping.params():
        words.append(key)
    return ";".join(words)


def mapping_from(spec: str, params: list[Tensor]) -> Mapping:
    kind, *words = spec.split(";")
    values = iter(params)
    pairs = (word.partition("=") for word in words)
    fields: dict[str, Any] = {k: ast.literal_eval(v) if sep else next(values) for k, sep, v in pairs}
    with unchecked():  # the values were checked, as far as they could be read, before the operation
        return _KINDS[kind](**fields)


# -- the operations ----------------------------------------------------------------------------------------------------------------


def _returnable(out: Tensor, *inputs: Tensor) -> Tensor:
    """A tensor that an operation may return: contiguous, and not one of its inputs."""
    return out.clone() if any(out is a for a in inputs) else out.contiguous()


def _forward(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
    mapping = mapping_from(spec, params)
    return _returnable(kernels.choose("forward", mapping, x).forward(mapping, x), x)


def _vjp(x: Tensor, p: Tensor, g: Tensor, params: list[Tensor], spec: str) -> Tensor:
    mapping = mapping_from(spec, params)
    x, p = (a if a.dtype == g.dtype else a.to(g.dtype) for a in (x, p))  # hooks of saved tensors may have changed them
    return _returnable(kernels.choose("vjp", mapping, x).vjp(mapping, x, p, g), x, p, g)


def _slope(x: Tensor, p: Tensor, g: Tensor, params: list[Tensor], spec: str, place: int) -> Tensor:
    """`<g, dp / d parameter>` for the parameter at this place; 0 for one in which p has no derivative."""
    mapping = mapping_from(spec, params)
    name = list(mapping.params())[place]
    if name not in mapping.learns:
        return _slope_fake(x, p, g, params, spec, place).zero_()
    return kernels.choose("slope", mapping, p).slope(mapping, name, x, p, g).contiguous()


def _slope_fake(x: Tensor, p: Tensor, g: Tensor, params: list[Tensor], spec: str, place: int) -> Tensor:
    mapping = mapping_from(spec, params)
    size = p.shape[-1] if list(mapping.params())[place] in mapping.per_class else 1
    return p.new_empty((*p.shape[:-1], size), dtype=torch.float64 if p.dtype == torch.float64 else torch.float32)


def _hold(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
    return mapping_from(spec, params).hold(upcast(floating(x, xp), xp), xp).clone(memory_format=torch.contiguous_format)


def _hold_fake(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return x.new_empty((*x.shape[:-1], mapping_from(spec, params).held_size(x.shape[-1])), dtype=dtype)


def _hold_vmap(info: Any, in_dims: Any, x: Tensor, params: list[Tensor], spec: str) -> tuple[Tensor, int]:
    """All batches in one call: the batch becomes the first axis of the scores, and of batched parameters."""
    x_dim, param_dims, _ = in_dims
    x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    moved = []
    for value, dim in zip(params, param_dims, strict=True):
        if dim is not None:
            value = value.movedim(dim, 0)
            value = value.reshape(value.shape[0], *([1] * (x.ndim - value.ndim)), *value.shape[1:])
        moved.append(value)
    return torch.ops.anymax.hold(x, moved, spec), 0


opaque("forward(Tensor x, Tensor[] params, str spec) -> Tensor", _forward)
opaque("vjp(Tensor x, Tensor p, Tensor g, Tensor[] params, str spec) -> Tensor", _vjp, lambda x, *others: like(*others))
opaque("slope(Tensor x, Tensor p, Tensor g, Tensor[] params, str spec, int place) -> Tensor", _slope, _slope_fake)
opaque("hold(Tensor x, Tensor[] params, str spec) -> Tensor", _hold, _hold_fake, _hold_vmap)


# -- their derivatives --------------------------------------------------------------------------------------------------------------


def traced_map(name: str, forward: Any, vjp: Any, slope: Any, layout: int = 0) -> Callable[..., Tensor]:
    """p(x) by opaque operations: `call((needs_scores, spec, ...), x, *layout, *params)`.

    forward, vjp, slope : of (x, *layout, params, spec, ...), of (x, p, g, *layout, params, spec, ...), and that with the place of a
        parameter. `layout` is the number of tensors that say where the rows lie.
    """

    def run(how: Any, x: Tensor, *others: Any) -> Tensor:
        return forward(x, *others[:layout], others[layout:], *how[1:])

    def save(how: Any, tensors: Any, p: Tensor) -> Any:
        return tensors[0] if how[0] else p, p, *tensors[1:]

    def backward(how: Any, saved: Any, g: Tensor, wants: Any) -> Any:
        x, p, *others = saved
        params = others[layout:]
        operands = x, p, g, *others[:layout], params, *how[1:]
        by_params = [
            slope(*operands, i).sum_to_size(value.shape).to(value.dtype) if want else None
            for i, (value, want) in enumerate(zip(params, wants[1 + layout :]))
        ]
        return vjp(*operands), *(None,) * layout, *by_params

    return traced_operation(name, run, backward, save)


_ops = torch.ops.anymax
traced_forward = traced_map("TracedForward", _ops.forward, _ops.vjp, _ops.slope)
