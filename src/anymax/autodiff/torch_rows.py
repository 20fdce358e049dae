"""PyTorch: p(x) as autograd records it, and the calls that an engine takes as they are.

The CPU's engine takes any axis, mask and strides, the GPU's the last axis; each returns None for an unusual call, for which the bridge
chooses an engine.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch

from .. import kernels
from .._array import from_last, modes, plain_backward, to_last, transformed, upcast
from .._core.mapping import Mapping, scales_scores
from ..kernels import native, triton
from ..kernels.link import WITH_SLOPE, Link
from ..kernels.linked import link_of
from ..kernels.reference import ENGINE as reference
from ..kernels.support import non_zeros_in
from .saving import As, hooked, params_of, restored, with_params
from .torch_parameters import gradients, slope_from_vjp

Tensor = torch.Tensor

_grad, _functorch = torch.is_grad_enabled, torch._C._are_functorch_transforms_active
KINDS = (torch.Tensor, torch.nn.Parameter)  # the kinds of array that `quick` takes
WIDE = {torch.float64: torch.float64, **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float32)}
_HALVES = (torch.float16, torch.bfloat16)
CPU, GPU = native.ENGINE, triton.ENGINE
_library = native.load()
if not isinstance(_library, str):
    native.engine_for(torch.empty(0, device="cpu"))
tracing = torch._C._get_tracing_state


class Call(NamedTuple):
    """What `Apply` keeps of a call beside tensors. That of a quick call is a plain tuple of the first two."""

    mapping: Mapping
    axis: int
    kind: type = Tensor  # of p
    number: Link | None = None  # the link, in a quick call whose parameter is one number
    lanes: Any = None  # of a GPU's engine: the rest of what it saved beside the memory
    was: Any = None  # `As` of the memory
    params_as: tuple[As, ...] = ()


class Apply(torch.autograd.Function):
    """p(x), computed by an engine; never under a functorch transform.

    Written out, and not by `operation`, for the calls that take the least time: `python -m benchmarks --only ^overhead`. `output` is p and
    a call, and what the engine saved. It is a tuple, since p, given as it is, would count as an input that is returned.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, output: Any, *params: Tensor) -> Tensor:
        if len(output) == 2:
            p, ctx.call = output
            ctx.to_save = (p,)  # what `save_for_backward` sets
            return p
        p, ctx.call, memory = output
        ctx.save_for_backward(p, x if ctx.call.mapping.needs_scores else None, memory, *params)
        return p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: torch's checkpoints say no to a second time
        return CPU.quick_backward(ctx.call, saved, g) or _backward(ctx, saved, g)


def direct(function: Any) -> Any:
    """`apply` of an `autograd.Function` for calls under no transform of functorch.

    torch's own, of the function and of its nodes, ask again what is known, in a third of the time of a small call.
    """
    function._backward_cls.apply = function.backward
    own: Any = super(torch.autograd.Function, function)
    return own.apply


def record(
    x: Tensor, p: Tensor, support: Any, mapping: Mapping, axis: int, *params: Tensor, number: Link | None = None
) -> Tensor:
    """p as autograd records it. `support` is what the engine saved: a tensor, or a tuple with one."""
    memory, lanes = support, None  # the C++ engine's memory, in a quick call
    if support is not None and not isinstance(support, Tensor):
        memory, lanes = support.memory, support._replace(memory=None)
    was = None if memory is None else As.of(memory)
    call = Call(mapping, axis, type(p), number, lanes, was, tuple([As.of(value) for value in params]))
    return Apply.apply(x, (p, call, memory), *params)


def _backward(ctx: Any, saved: Any, g: Tensor) -> Any:
    """The gradients of `Apply`, for what the library does not take as it is."""
    call, (p, *rest) = Call(*ctx.call), saved
    x, memory, *params = rest or (None, None)
    mapping, axis = call.mapping, call.axis
    if call.number is not None and not _grad():
        number = torch.empty_like(params[0]) if ctx.needs_input_grad[2] else None
        out = CPU.quick_vjp(call.number, None, p, g, axis, memory, number)
        if out is not None and (number is None or not math.isnan(number.item())):  # else some of its rows may not count
            return out, None, number
    if params:
        mapping = with_params(mapping, [restored(value, was) for value, was in zip(params, call.params_as)])
        if any(ctx.needs_input_grad[2:]):
            return _learned_backward(ctx, mapping, g, p, x, memory)
    if call.lanes is None and not _grad():
        out = CPU.quick_vjp(mapping, x, p, g, axis, memory)
        if out is not None:
            return out, *(None,) * (1 + len(params))
    if on_gpu(p) and (memory is None or As.of(memory) == call.was):
        support = None if memory is None or call.lanes is None else call.lanes._replace(memory=memory)
        out = _quick_vjp(mapping, axis, p if x is None else x, p, g, support)
        if out is not None:
            return out, *(None,) * (1 + len(params))
    x, p, g, support = _restored(call, g, p, x, memory)
    return from_last(_vjp(mapping, x, p, g, support), axis % p.ndim, xp), *(None,) * (1 + len(params))


def _restored(call: Call, g: Tensor, p: Tensor, x: Tensor | None, memory: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """(x, p, g, support) of `Apply` as they were saved, the classes last. x is p for a map that does not need the scores."""
    axis = call.axis
    was = As(g.dtype, g.shape, g.device, False, Tensor if call.kind in KINDS else call.kind)
    p = restored(p, was)
    scores = p if x is None else restored(x, was)
    support = None
    if memory is not None:
        memory = restored(memory, call.was)
        support = non_zeros_in(memory, p, axis) if call.lanes is None else call.lanes._replace(memory=memory)
    scores, p, g = (to_last(a, axis % a.ndim, xp) for a in (scores, p, g))
    return scores, p, g, support


def _learned_backward(ctx: Any, mapping: Mapping, g: Tensor, p: Tensor, x: Tensor | None, memory: Any) -> Any:
    """The gradients of `Apply` by the scores and by the parameters."""
    call = ctx.call
    axis = call.axis
    x, p, g, support = _restored(call, g, p, x, memory)
    if scales_scores(mapping):  # both follow from J^T g
        wide = (upcast(a, xp) for a in (x, p, g))
        by_scores = _vjp(mapping, *wide)
        by_params = gradients(
            mapping, ctx.needs_input_grad[2:], lambda name: slope_from_vjp(mapping, name, x, by_scores), g
        )
        out = from_last(by_scores.to(x.dtype), axis % p.ndim, xp) if ctx.needs_input_grad[0] else None
        return out, None, *by_params
    out = from_last(_vjp(mapping, x, p, g, support), axis % p.ndim, xp) if ctx.needs_input_grad[0] else None
    by_params = gradients(mapping, ctx.needs_input_grad[2:], lambda name: _slope(mapping, name, x, p, g, support), g)
    return out, None, *by_params


def _slope(mapping: Mapping, name: str, x: Tensor, p: Tensor, g: Tensor, support: Any = None) -> Tensor:
    """`<g, dp / d parameter>` of each row."""
    if plain_backward(g):
        return reference.slope(mapping, name, x, p, g)
    engine = kernels.choose("slope", mapping, g)
    return engine.slope(mapping, name, x, p, g, support if g.shape == p.shape else None)


def _vjp(mapping: Mapping, x: Tensor, p: Tensor, g: Tensor, support: Any = None) -> Tensor:
    if plain_backward(g):
        return reference.vjp(mapping, x, p, g)
    engine = kernels.choose("vjp", mapping, g)  # g may be a batch of torch.vmap when p is not
    return engine.vjp(mapping, x, p, g, support if g.shape == p.shape else None)


def on_gpu(t: Tensor) -> bool:
    return t.is_cuda


def untraced() -> bool:
    """True if nothing of torch traces or transforms the call. Not to be called while `compiling`."""
    return not (modes() or transformed() or tracing() is not None)


def quick_on_gpu(mapping: Mapping, x: Tensor, axis: int | None, mask: Any, out: Any) -> Tensor | None:
    """`quick` for a tensor that is not on the CPU."""
    if mask is not None or (axis is not None and axis != -1 and axis != x.ndim - 1) or not x.ndim or not x.numel():
        return None
    if not isinstance(mapping, Mapping) or not untraced() or not GPU.quick("forward", mapping, x):
        return None
    mapping.check(x.shape[-1])
    wants = x.requires_grad and _grad()
    if out is None:
        if not wants:
            return GPU.forward(mapping, x)
        p, support = (GPU.forward(mapping, x), None) if hooked() else GPU.forward_saving(mapping, x)
        return record(x, p, support, mapping, -1)
    if wants or type(out) is not Tensor or out.requires_grad or out.is_inference():
        return None
    alike = (
        (out.dtype, out.shape, out.device) == (x.dtype, x.shape, x.device) and out.is_contiguous() and not out.is_neg()
    )
    if not alike or (out is not x and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()):
        return None
    return wrote(GPU.forward(mapping, x, None, out))


def once(g: Tensor) -> bool:
    """True for one plain gradient, through which no derivative is taken."""
    return type(g) is Tensor and not plain_backward(g) and untraced()


def _quick_vjp(mapping: Mapping, axis: int, x: Tensor, p: Tensor, g: Tensor, support: Any) -> Tensor | None:
    """J^T g on a GPU, of tensors as they were saved; None for an unusual call."""
    if not once(g) or type(p) is not Tensor or axis not in (-1, p.ndim - 1):
        return None
    if not (g.shape == p.shape == x.shape) or not (g.dtype == p.dtype == x.dtype):
        return None
    return GPU.vjp(mapping, x, p, g, support) if GPU.quick("vjp", mapping, g, p, x) else None


def quick(mapping: Mapping, x: Tensor, axis: int | None, mask: Any, out: Any) -> Tensor | None:
    """p(x) by the CPU engine or the GPU's; None for an unusual call. Not to be called while `compiling`."""
    if not x.is_cpu:
        return quick_on_gpu(mapping, x, axis, mask, out)
    if x.requires_grad and _grad():
        link = link_of(mapping)
        if out is not None or type(link) is not Link or _functorch():
            return None
        if mask is not None and mapping.needs_scores:
            return None
        if link.params is not None:
            return _quick_learned(mapping, link, x, axis, mask)
        output = CPU.quick_saving(mapping, x, axis, mask, None, -1)
        if output is None:
            return None
        p, support = output
        if support is not None and hooked():
            support = None
        params = () if link.upper is None else params_of(mapping)
        return record(x, p, support, mapping, -1 if axis is None else axis, *params)
    if out is None:
        return CPU.quick_forward(mapping, x, axis, mask, None)
    if type(out) is not Tensor or out.requires_grad or (out.is_inference() and not torch.is_inference_mode_enabled()):
        return None
    return wrote(CPU.quick_forward(mapping, x, axis, mask, out))


def number_of(mapping: Mapping, link: Link, x: Tensor) -> Link | None:
    """The link with its parameter as a number, for a plain tensor without axes whose derivative an engine has; None for any other."""
    value = link.params
    if type(value) not in KINDS or value.ndim or not value.is_cpu or x.dtype in _HALVES or kernels.asked() is not None:
        return None
    return native.one_for_all(link) if link.kind in WITH_SLOPE and len(mapping.learns) == 1 else None


def _quick_learned(mapping: Mapping, link: Link, x: Tensor, axis: int | None, mask: Any) -> Tensor | None:
    """`quick` with a gradient, for a parameter that is one tensor for all rows, learned or not."""
    number = number_of(mapping, link, x)
    if number is None or not x.ndim or hooked():
        return None
    output = CPU.quick_saving(number, x, axis, mask, None, -1)
    if output is None:
        return None
    return record(x, *output, mapping, -1 if axis is None else axis, link.params, number=number)


if not isinstance(_library, str):
    _library.bind({"unusual": quick, "record": direct(Apply)})


def wrote(out: Tensor | None) -> Tensor | None:
    """Tell autograd that the values changed, so that a graph that saved the old ones raises an error."""
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out
