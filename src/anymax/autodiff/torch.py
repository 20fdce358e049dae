"""PyTorch: one wrapping that backward, double backward, forward mode, torch.func, compile and export all accept.

Four ways through, chosen at each call:
- eager: an `autograd.Function` around the engines, with `setup_context` and without `jvp` (which torch.compile refuses); its backward
  is in plain operations when it is itself differentiated;
- compiled: the same with opaque operations (`torch.ops.anymax`), so that the compiler need not trace an iteration;
- functorch transforms, forward mode, or a parameter that wants a gradient: `Mapping.differentiable`, plain operations around
  the held outcome of the iteration;
- export: the plain formula, with an iteration of fixed length where there is one.
"""

from __future__ import annotations

import ast
from typing import Any

import array_api_compat.torch as xp
import torch

from .. import kernels
from .._array import floating, upcast
from .._mapping import Mapping
from ..kernels import reference
from ..mappings import CATALOGUE

Tensor = torch.Tensor

_KINDS = {kind.__name__: kind for kind in CATALOGUE}
_LIBRARY = torch.library.Library("anymax", "DEF")
_LIBRARY.define("forward(Tensor x, Tensor[] params, str spec) -> Tensor")
_LIBRARY.define("vjp(Tensor x, Tensor p, Tensor g, Tensor[] params, str spec) -> Tensor")
_LIBRARY.define("hold(Tensor x, Tensor[] params, str spec) -> Tensor")


# -- a mapping as a string and its tensors, for the operations' schemas ---------------------------------------------------


def _spec(mapping: Mapping) -> str | None:
    """The mapping without its tensors, in words that `_restore` understands; None for a kind with functions of the user's."""
    if _KINDS.get(type(mapping).__name__) is not type(mapping):
        return None
    words = [type(mapping).__name__]
    for key, value in mapping.constants().items():
        if not (value is None or isinstance(value, (bool, int, float, str))):
            return None
        if isinstance(value, float):  # a symbol under torch.compile(dynamic=True): the ratio makes it a number again
            over, under = value.as_integer_ratio()
            value = over / under
        words.append(f"{key}={value!r}")
    for key in mapping.params():
        words.append(key)
    return ";".join(words)


def _restore(spec: str, params: list[Tensor]) -> Mapping:
    kind, *words = spec.split(";")
    values = iter(params)
    return _KINDS[kind](
        **{k: ast.literal_eval(v) if sep else next(values) for k, sep, v in (w.partition("=") for w in words)}
    )


def _forward_op(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
    mapping = _restore(spec, params)
    return kernels.choose("forward", mapping, x).forward(mapping, x).clone(memory_format=torch.contiguous_format)


def _vjp_op(x: Tensor, p: Tensor, g: Tensor, params: list[Tensor], spec: str) -> Tensor:
    mapping = _restore(spec, params)
    return kernels.choose("vjp", mapping, x).vjp(mapping, x, p, g).clone(memory_format=torch.contiguous_format)


def _hold_op(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
    return _restore(spec, params).hold(upcast(floating(x, xp), xp), xp).clone(memory_format=torch.contiguous_format)


def _forward_fake(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _vjp_fake(x: Tensor, p: Tensor, g: Tensor, params: list[Tensor], spec: str) -> Tensor:
    return torch.empty_like(p, memory_format=torch.contiguous_format)


def _hold_fake(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return x.new_empty((*x.shape[:-1], 2), dtype=dtype)


for _name, _impl, _fake in (
    ("forward", _forward_op, _forward_fake),
    ("vjp", _vjp_op, _vjp_fake),
    ("hold", _hold_op, _hold_fake),
):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anymax::{_name}", _fake, lib=_LIBRARY)


def _hold_vmap(info: Any, in_dims: Any, x: Tensor, params: list[Tensor], spec: str) -> tuple[Tensor, int]:
    """All batches in one call: the batch becomes the first axis of the scores, and of the parameters that have it."""
    x_dim, param_dims, _ = in_dims
    x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    moved = []
    for value, dim in zip(params, param_dims, strict=True):
        if dim is not None:
            value = value.movedim(dim, 0)
            value = value.reshape(value.shape[0], *([1] * (x.ndim - value.ndim)), *value.shape[1:])
        moved.append(value)
    return torch.ops.anymax.hold(x, moved, spec), 0


torch.library.register_vmap("anymax::hold", _hold_vmap, lib=_LIBRARY)


# -- the autograd functions -------------------------------------------------------------------------------------------------


class _Apply(torch.autograd.Function):
    """p(x), eager."""

    @staticmethod
    def forward(x: Tensor, mapping: Mapping) -> Tensor:
        return kernels.choose("forward", mapping, x).forward(mapping, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.mapping = inputs
        ctx.save_for_backward(*((x, output) if ctx.mapping.needs_scores else (output,)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        saved = ctx.saved_tensors
        return _vjp(ctx.mapping, saved[0], saved[-1], g), None


def _vjp(mapping: Mapping, x: Tensor, p: Tensor, g: Tensor) -> Tensor:
    if torch.is_grad_enabled():  # the backward pass is itself to be differentiated
        return reference.vjp(mapping, x, p, g)
    return kernels.choose("vjp", mapping, x).vjp(mapping, x, p, g)


class _Compiled(torch.autograd.Function):
    """p(x) as opaque operations, for torch.compile."""

    @staticmethod
    def forward(x: Tensor, spec: str, needs_scores: bool, *params: Tensor) -> Tensor:
        return torch.ops.anymax.forward(x, params, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.spec, ctx.needs_scores, *params = inputs
        ctx.count = len(params)
        ctx.save_for_backward(x if ctx.needs_scores else output, output, *params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, p, *params = ctx.saved_tensors
        return torch.ops.anymax.vjp(x, p, grads[0], params, ctx.spec), None, None, *([None] * ctx.count)


class _Loss(torch.autograd.Function):
    """`Omega*(x) - <x, y>`, eager: the gradient is p - y, and no derivative of the solver is taken."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, mapping: Mapping) -> tuple[Tensor, Tensor]:
        p = kernels.choose("forward", mapping, x).forward(mapping, x)
        return kernels.choose("loss", mapping, x).loss(mapping, x, p, y), p

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, y, ctx.mapping = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, y, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y, p = ctx.saved_tensors
        if torch.is_grad_enabled():
            p = apply(ctx.mapping, x)
        return grads[0] * (p - y), None, None


# -- the bridge ---------------------------------------------------------------------------------------------------------------


def _transformed() -> bool:
    """True under torch.func transforms and in forward mode."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _learns(mapping: Mapping) -> bool:
    if not torch.is_grad_enabled():
        return False
    for value in mapping.params().values():
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


def _implicit(mapping: Mapping, x: Tensor) -> Tensor:
    spec = _spec(mapping) if mapping.iterative and not torch.compiler.is_exporting() else None
    if spec is None:
        return reference.differentiable(mapping, x)
    frozen = [value.detach() for value in mapping.params().values()]
    return reference.differentiable(mapping, x, torch.ops.anymax.hold(x.detach(), frozen, spec))


def apply(mapping: Mapping, x: Tensor) -> Tensor:
    if _transformed() or _learns(mapping) or mapping.traced:
        return _implicit(mapping, x)
    wants = torch.is_grad_enabled() and x.requires_grad
    if torch.compiler.is_exporting():
        return reference.differentiable(mapping, x) if wants else reference.forward(mapping, x)
    if torch.compiler.is_compiling():
        spec = _spec(mapping) if mapping.iterative else None
        if spec is None:
            return reference.differentiable(mapping, x)
        params = list(mapping.params().values())
        if wants:
            return _Compiled.apply(x, spec, mapping.needs_scores, *params)
        return torch.ops.anymax.forward(x, params, spec)
    if wants:
        return _Apply.apply(x, mapping)
    return kernels.choose("forward", mapping, x).forward(mapping, x)


def loss(mapping: Mapping, x: Tensor, y: Tensor) -> Tensor:
    plain = _transformed() or _learns(mapping) or (torch.is_grad_enabled() and y.requires_grad)
    if not plain and not torch.compiler.is_compiling():
        if torch.is_grad_enabled() and x.requires_grad:
            return _Loss.apply(x, y, mapping)[0]
        p = kernels.choose("forward", mapping, x).forward(mapping, x)
        return kernels.choose("loss", mapping, x).loss(mapping, x, p, y)
    # Under torch.compile one derivative is all there is, and that one treats p as a constant.
    once = torch.compiler.is_compiling() and not _transformed()
    p = apply(mapping.frozen(), x.detach()) if once else apply(mapping, x)
    return reference.loss(mapping, x, p, y)
