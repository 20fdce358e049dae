"""PyTorch: backward, double backward, forward mode, torch.func, compile and export.

Each call takes one of four paths:
- eager: an engine computes the result, and an `autograd.Function` records it. It has no `jvp`, since torch.compile refuses that. If its
  backward is itself differentiated, it uses plain operations;
- compiled: the same with opaque operations (`torch.ops.anymax`), so that the compiler does not trace an iteration;
- functorch transforms, forward mode, or a parameter with a gradient: `Mapping.differentiable`, plain operations around the result of
  the iteration, which is held constant;
- export: the plain formula, with a fixed number of steps if it iterates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
import torch.utils.checkpoint

from .. import kernels
from .._array import from_last, modes, plain_backward, recorded, to_last, torch_exports, transformed, upcast
from .._core.mapping import Mapping
from ..kernels import native, triton
from ..kernels.engine import BELOW, Engine, IndexLoss
from ..kernels.link import WITH_SLOPE, Link
from ..kernels.linked import link_of
from ..kernels.reference import ENGINE as reference
from ..kernels.support import non_zeros_in
from .bridge import Bridge, seen
from .saving import As, hooked, params_of, restored, save, saved, with_params
from .torch_operations import spec_of
from .torch_parameters import gradients, learns, moved, needs_plain, traced

Tensor = torch.Tensor

_compiling = torch.compiler.is_compiling
_grad, _functorch = torch.is_grad_enabled, torch._C._are_functorch_transforms_active
KINDS = (torch.Tensor, torch.nn.Parameter)  # the kinds of array that `quick` takes
_WIDE = {torch.float64: torch.float64, **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float32)}
_HALVES = (torch.float16, torch.bfloat16)
_engine: Any = None if isinstance(native.load(), str) else native.engine_for(torch.empty(0, device="cpu"))
_forward = _engine and _engine.forward
_gpu = triton.ENGINE
_tracing = torch._C._get_tracing_state
_quick_loss = native.ENGINE.quick_index_loss

# -- the autograd functions -------------------------------------------------------------------------------------------------


class _Apply(torch.autograd.Function):
    """p(x), computed by an engine; never under a functorch transform."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: tuple[Any, ...], mapping: Mapping, axis: int, *params: Tensor) -> Tensor:
        p, support, ctx.number = made if len(made) == 3 else (*made, None)
        memory, ctx.support = support, None  # the C++ engine's memory, in a quick call
        if support is not None and not isinstance(support, Tensor):
            memory, ctx.support = support.memory, support._replace(memory=None)
        ctx.call, ctx.kind = (mapping, axis), type(p)
        ctx.was = None if memory is None else As.of(memory)
        ctx.save_for_backward(p, x if mapping.needs_scores else None, memory, *params)
        if params:
            ctx.params_as = [As.of(value) for value in params]
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (p, x, memory, *params), (mapping, axis) = grads, ctx.saved_tensors, ctx.call
        if params:
            if ctx.number is not None and not _grad():
                found = _quick_learned_backward(ctx, g, p, memory)
                if found is not None:
                    return found
            mapping = with_params(mapping, [restored(value, was) for value, was in zip(params, ctx.params_as)])
            if any(ctx.needs_input_grad[4:]):
                return _learned_backward(ctx, mapping, g, p, x, memory)
        if _engine is not None and ctx.support is None and not _grad():
            out = _engine.vjp(mapping, x, p, g, axis, memory)
            if out is not None:
                return out, *(None,) * (3 + len(params))
        if _on_gpu(p) and (memory is None or As.of(memory) == ctx.was):
            found = None if memory is None or ctx.support is None else ctx.support._replace(memory=memory)
            out = _quick_vjp(mapping, axis, p if x is None else x, p, g, found)
            if out is not None:
                return out, *(None,) * (3 + len(params))
        x, p, g, support = _restored(ctx, g, p, x, memory)
        return from_last(_vjp(mapping, x, p, g, support), axis % p.ndim, xp), *(None,) * (3 + len(params))


def _restored(ctx: Any, g: Tensor, p: Tensor, x: Tensor | None, memory: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """(x, p, g, support) of `_Apply` as they were saved, the classes last. x is p for a map that does not need the scores."""
    axis = ctx.call[1]
    was = As(g.dtype, g.shape, g.device, False, Tensor if ctx.kind in KINDS else ctx.kind)
    p = restored(p, was)
    scores = p if x is None else restored(x, was)
    support = None
    if memory is not None:
        memory = restored(memory, ctx.was)
        support = non_zeros_in(memory, p, axis) if ctx.support is None else ctx.support._replace(memory=memory)
    scores, p, g = (to_last(a, axis % a.ndim, xp) for a in (scores, p, g))
    return scores, p, g, support


def _learned_backward(ctx: Any, mapping: Mapping, g: Tensor, p: Tensor, x: Tensor | None, memory: Any) -> Any:
    """The gradients of `_Apply` by the scores and by the parameters."""
    axis = ctx.call[1]
    x, p, g, support = _restored(ctx, g, p, x, memory)
    if mapping.scales_scores:  # both follow from J^T g
        wide = (upcast(a, xp) for a in (x, p, g))
        by_scores = _vjp(mapping, *wide)
        by_params = gradients(mapping, ctx.needs_input_grad[4:], lambda name: moved(mapping, name, x, by_scores))
        out = from_last(by_scores.to(x.dtype), axis % p.ndim, xp) if ctx.needs_input_grad[0] else None
        return out, None, None, None, *by_params
    out = from_last(_vjp(mapping, x, p, g, support), axis % p.ndim, xp) if ctx.needs_input_grad[0] else None
    by_params = gradients(mapping, ctx.needs_input_grad[4:], lambda name: _slope(mapping, name, x, p, g, support))
    return out, None, None, None, *by_params


def _quick_learned_backward(ctx: Any, g: Tensor, p: Tensor, memory: Tensor | None) -> Any:
    """The gradients of `_Apply` by the scores and the number that the parameter was; None for an unusual call."""
    axis, out, by_number = ctx.call[1], None, None
    if type(p) not in KINDS or (memory is not None and As.of(memory) != ctx.was):
        return None
    if ctx.needs_input_grad[0] and (out := _engine.vjp(ctx.number, None, p, g, axis, memory)) is None:
        return None
    if ctx.needs_input_grad[4]:
        rows = [n for i, n in enumerate(p.shape) if i != axis % p.ndim]
        slope = torch.empty(rows, dtype=_WIDE[p.dtype], device="cpu")
        if _engine.slope(ctx.number, None, p, g, axis, memory, slope) is None:
            return None
        by_number = slope.sum(dtype=ctx.params_as[0].dtype)
    return out, None, None, None, by_number


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


def plain_grads(
    function: Callable[..., Iterable[Tensor | None]], given: Iterable[Tensor | None], grads: Iterable[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of `function` by the tensors `given`; they can be differentiated again, and `grads` may be batched."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # a view, so that a tensor that was computed from another of these does not count as a part of that one
        free = [a if a is None else a.view_as(a) if a.requires_grad else a.detach().requires_grad_() for a in given]
        out = function(*free)
        pairs = [(a, g) for a, g in zip(out, grads) if a is not None and g is not None and a.requires_grad]
        wanted = [a for a in free if a is not None]
        found = torch.autograd.grad(
            [a for a, _ in pairs], wanted, [g for _, g in pairs], create_graph=again, allow_unused=True
        )
    left = iter(found)
    return [None if a is None else next(left) for a in free]


class _Log(torch.autograd.Function):
    """log p(x), computed by a compiled engine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mapping: Mapping, engine: Any, *params: Tensor) -> Tensor:
        log_p = engine.log_forward(mapping, x)
        ctx.mapping = mapping
        save(ctx, x, log_p, *params)
        return log_p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, log_p, *params = saved(ctx)
        (g,), mapping, none = grads, with_params(ctx.mapping, params), (None,) * (2 + len(params))
        engine = None if plain_backward(g) else kernels.compiled("log_vjp", mapping, g)
        if engine is None:
            return *plain_grads(lambda a: (reference.log_forward(mapping, a),), (x,), grads), *none
        return engine.log_vjp(mapping, x, log_p, g), *none


class _LossCall(NamedTuple):
    """How an engine computed a loss of class indices."""

    mapping: Mapping
    engine: Engine
    axis: int
    ignored: int
    reduction: str
    number: Link | None = None  # the link with the parameter as a number, in a quick call


class _IndexLoss(torch.autograd.Function):
    """The loss of class indices, computed by an engine: one pass forward, one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, made: IndexLoss, call: _LossCall, *params: Tensor) -> Tensor:
        value, memory, count, slope = made
        ctx.lanes = None  # of a GPU's engine: the rest of what it saved beside the memory
        if memory is not None and not isinstance(memory, Tensor):
            memory, ctx.lanes = memory.memory, memory._replace(memory=None)
        ctx.call, ctx.scores, ctx.index = call, (x.dtype, x.shape), index.dtype
        ctx.was = None if memory is None else As.of(memory)
        ctx.counted = type(count) is Tensor  # on a GPU: the gradient is divided by it
        ctx.factor = 1.0 / max(count or 0, 1) if call.reduction == "mean" and not ctx.counted else 1.0
        ctx.learns = slope is not None
        ctx.save_for_backward(
            x, index, memory, *((count,) if ctx.counted else ()), *((slope,) if ctx.learns else ()), *params
        )
        if params:
            ctx.params_as = [As.of(value) for value in params]
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (x, index, memory, *params) = grads, ctx.saved_tensors
        mapping, engine, axis, ignored, _, number = ctx.call
        g, factor = g / params.pop(0) if ctx.counted else g, ctx.factor
        slope = params.pop(0) if ctx.learns else None
        none = (None,) * (3 + len(params))
        if number is not None and not _grad():
            out = engine.quick_loss_grad(number, x, index, g, axis, factor, memory) if ctx.needs_input_grad[0] else None
            if out is not None or not ctx.needs_input_grad[0]:
                by_row = slope * (g * factor if factor != 1.0 else g)
                return out, None, None, None, by_row.sum(dtype=ctx.params_as[0].dtype)
        if params:
            mapping = with_params(mapping, [restored(value, was) for value, was in zip(params, ctx.params_as)])
        if slope is not None:
            slope = _slope_of_rows(mapping, to_last(x, axis % x.ndim, xp), index, ignored) if _grad() else slope
            by_row = (slope * (g * factor)).unsqueeze(-1)
            none = (None, None, None, *gradients(mapping, ctx.needs_input_grad[4:], lambda name: by_row))
            if not ctx.needs_input_grad[0]:
                return None, *none
        if not _grad():
            out = engine.quick_loss_grad(mapping, x, index, g, axis, factor, memory)
            if out is None and _on_gpu(x) and memory is not None and As.of(memory) == ctx.was:
                kept = memory if ctx.lanes is None else ctx.lanes._replace(memory=memory)
                out = _quick_slope(ctx, mapping, x, index, g, kept)
            if out is not None:
                return out, *none
        axis = axis % len(ctx.scores[1])
        x = restored(x, As(ctx.scores[0], ctx.scores[1], g.device))
        batch = torch.Size([n for i, n in enumerate(x.shape) if i != axis])
        index = restored(index, As(ctx.index, batch, g.device))
        memory = None if memory is None else restored(memory, ctx.was)
        memory = memory if ctx.lanes is None else ctx.lanes._replace(memory=memory)
        out = None
        if not plain_backward(g) and engine.refuse("vjp", mapping, g) is None:
            out = engine.index_loss_grad(mapping, x, index, g, memory, axis=axis, ignored=ignored, factor=factor)
        if out is None:
            out = _plain_slope(mapping, x, index, g * factor, axis, ignored)
        return out, *none


def _slope_of_rows(mapping: Mapping, x: Tensor, index: Tensor, ignored: int, engine: Engine = reference) -> Tensor:
    """The derivative of each row's loss by the parameter, from p; by the reference it has derivatives where autograd records."""
    (name,) = mapping.loss_learns
    engine = engine if mapping.scales_scores else reference
    slope = engine.loss_slope(mapping, name, x, BRIDGE.apply(mapping, x)).squeeze(-1)
    return torch.where((index != ignored) & (index >= 0), slope, torch.zeros_like(slope))


def _plain_slope(mapping: Mapping, x: Tensor, index: Tensor, g: Tensor, axis: int, ignored: int) -> Tensor:
    """The gradient g (p - y) of a loss of class indices, in plain operations."""
    counted = (index != ignored) & (index >= 0)
    at = torch.where(counted, index, 0).to(torch.int64).unsqueeze(axis)
    p = from_last(BRIDGE.apply(mapping, to_last(x, axis, xp)), axis, xp)
    zero = torch.zeros_like(x)
    p_y = torch.where(counted.unsqueeze(axis), p - torch.zeros_like(x).scatter_(axis, at, 1.0), zero)
    return (g.expand(index.shape).unsqueeze(axis) * p_y).to(x.dtype)


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
        out = torch.ops.anymax.vjp(x, p, grads[0], params, ctx.spec)
        by_params = [
            torch.ops.anymax.slope(x, p, grads[0], params, ctx.spec, i).sum_to_size(value.shape).to(value.dtype)
            if want
            else None
            for i, (value, want) in enumerate(zip(params, ctx.needs_input_grad[3:]))
        ]
        return out, None, None, *by_params


class _Loss(torch.autograd.Function):
    """`Omega*(x) - <x, y>`: the gradient is p - y, so the solver is not differentiated."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, mapping: Mapping, *params: Tensor) -> tuple[Tensor, Tensor]:
        p = kernels.choose("forward", mapping, x).forward(mapping, x)
        return kernels.choose("loss", mapping, x).loss(mapping, x, p, y), p

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, y, ctx.mapping, *params = inputs
        ctx.mark_non_differentiable(output[1])
        save(ctx, x, y, output[1], *params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y, p, *params = saved(ctx)
        g, mapping = grads[0], with_params(ctx.mapping, params)
        if torch.is_grad_enabled():
            p = BRIDGE.apply(mapping, x)
        by_params = gradients(
            mapping, ctx.needs_input_grad[3:], lambda name: g * reference.loss_slope(mapping, name, x, p)
        )
        return g * (p - y), None, None, *by_params


# -- the kind of a call, and the fast path: the CPU engine takes any axis, mask and strides --------------------------------


def _saving(engine: Any, mapping: Mapping, x: Tensor, mask: Tensor | None, learning: bool) -> tuple[Tensor, Any]:
    """`forward_saving`; for a learned parameter and half precision with all non-zeros, whose values are floats."""
    if learning and engine is native.ENGINE and x.dtype in _HALVES and not mapping.needs_scores:
        return native.ENGINE.forward_saving(mapping, x, mask, None, x.shape[-1])
    return engine.forward_saving(mapping, x, mask)


def _implicit(mapping: Mapping, x: Tensor) -> Tensor:
    spec = spec_of(mapping) if mapping.iterative and not torch_exports() else None
    if spec is None:
        return reference.differentiable(mapping, x)
    frozen = [value.detach() for value in mapping.params().values()]
    return reference.differentiable(mapping, x, torch.ops.anymax.hold(x.detach(), frozen, spec))


def _on_gpu(t: Tensor) -> bool:
    return t.is_cuda


def _untraced() -> bool:
    """True if nothing of torch traces or transforms the call. Not to be called while `compiling`."""
    return not (modes() or transformed() or _tracing() is not None)


def _quick_on_gpu(mapping: Mapping, x: Tensor, axis: int | None, mask: Any, out: Any) -> Tensor | None:
    """`_quick` for a tensor that is not on the CPU."""
    if mask is not None or (axis is not None and axis != -1 and axis != x.ndim - 1) or not x.ndim or not x.numel():
        return None
    if not isinstance(mapping, Mapping) or not _untraced() or not _gpu.quick("forward", mapping, x):
        return None
    mapping.check(x.shape[-1])
    wants = x.requires_grad and _grad()
    if out is None:
        if not wants:
            return _gpu.forward(mapping, x)
        made = (_gpu.forward(mapping, x), None) if hooked() else _gpu.forward_saving(mapping, x)
        return _Apply.apply(x, made, mapping, -1)
    if wants or type(out) is not Tensor or out.requires_grad or out.is_inference():
        return None
    alike = (
        (out.dtype, out.shape, out.device) == (x.dtype, x.shape, x.device) and out.is_contiguous() and not out.is_neg()
    )
    if not alike or (out is not x and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()):
        return None
    return _wrote(_gpu.forward(mapping, x, None, out))


def _once(g: Tensor) -> bool:
    """True for one plain gradient, through which no derivative is taken."""
    return type(g) is Tensor and not plain_backward(g) and _untraced()


def _quick_vjp(mapping: Mapping, axis: int, x: Tensor, p: Tensor, g: Tensor, support: Any) -> Tensor | None:
    """J^T g on a GPU, of tensors as they were saved; None for an unusual call."""
    if not _once(g) or type(p) is not Tensor or axis not in (-1, p.ndim - 1):
        return None
    if not (g.shape == p.shape == x.shape) or not (g.dtype == p.dtype == x.dtype):
        return None
    return _gpu.vjp(mapping, x, p, g, support) if _gpu.quick("vjp", mapping, g, p, x) else None


def _quick_slope(ctx: Any, mapping: Mapping, x: Tensor, index: Tensor, g: Tensor, kept: Any) -> Tensor | None:
    """The gradient of `_IndexLoss` on a GPU, of tensors as they were saved; None for an unusual call."""
    axis, ignored = ctx.call.axis, ctx.call.ignored
    if not _once(g) or type(x) not in KINDS or type(index) is not Tensor:
        return None
    if (x.dtype, x.shape) != ctx.scores or index.dtype != ctx.index or not _gpu.quick("vjp", mapping, x):
        return None
    return _gpu.index_loss_grad(mapping, x, index, g, kept, axis=axis, ignored=ignored, factor=ctx.factor)


def _quick(mapping: Mapping, x: Tensor, axis: int | None, mask: Any, out: Any) -> Tensor | None:
    """p(x) by the CPU engine or the GPU's; None for an unusual call. Not to be called while `compiling`."""
    if not x.is_cpu:
        return _quick_on_gpu(mapping, x, axis, mask, out)
    if x.requires_grad and _grad():
        link = link_of(mapping)
        if out is not None or type(link) is not Link or _functorch():
            return None
        if mask is not None and mapping.needs_scores:
            return None
        if link.params is not None:
            return _quick_learned(mapping, link, x, axis, mask)
        made = _engine.forward_saving(mapping, x, axis, mask, None, -1)
        if made is None:
            return None
        if made[1] is not None and hooked():
            made = made[0], None
        return _Apply.apply(x, made, mapping, -1 if axis is None else axis)
    if out is None:
        return _forward(mapping, x, axis, mask, None)
    if type(out) is not Tensor or out.requires_grad or (out.is_inference() and not torch.is_inference_mode_enabled()):
        return None
    return _wrote(_forward(mapping, x, axis, mask, out))


def _number(mapping: Mapping, link: Link, x: Tensor) -> Link | None:
    """The link with its parameter as a number, for a plain tensor without axes whose derivative an engine has; None for any other."""
    value = link.params
    if type(value) not in KINDS or value.ndim or not value.is_cpu or x.dtype in _HALVES or kernels.asked() is not None:
        return None
    return native.one_for_all(link) if link.kind in WITH_SLOPE and len(mapping.learns) == 1 else None


def _quick_learned(mapping: Mapping, link: Link, x: Tensor, axis: int | None, mask: Any) -> Tensor | None:
    """`_quick` with a gradient, for a parameter that is one tensor for all rows, learned or not."""
    number = _number(mapping, link, x)
    if number is None or not x.ndim or hooked():
        return None
    made = _engine.forward_saving(number, x, axis, mask, None, -1)
    return (
        None if made is None else _Apply.apply(x, (*made, number), mapping, -1 if axis is None else axis, link.params)
    )


def _quick_without_library(mapping: Mapping, x: Tensor, axis: int | None, mask: Any, out: Any) -> Tensor | None:
    return None if x.is_cpu else _quick_on_gpu(mapping, x, axis, mask, out)


def _wrote(out: Tensor | None) -> Tensor | None:
    """Tell autograd that the values changed, so that a graph that saved the old ones raises an error."""
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


# -- the bridge ---------------------------------------------------------------------------------------------------------------


class TorchBridge(Bridge):
    framework = "torch"
    kinds = KINDS

    def apply(self, mapping: Mapping, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mapping.hides_a_class:
            return seen(self.apply(*mapping.with_hidden(x, xp)))
        if transformed() or mapping.traced or needs_plain(mapping, x):
            return _implicit(mapping, x)
        learning = learns(mapping)
        wants = learning or recorded(x)
        if torch_exports():
            return reference.differentiable(mapping, x) if wants else reference.forward(mapping, x)
        # a mode may trace, or have no values, so it gets opaque operations too
        if torch.compiler.is_compiling() or modes():
            spec = spec_of(mapping) if mapping.iterative else None
            if spec is None:
                return reference.differentiable(mapping, x)
            params = list(mapping.params().values())
            if wants:
                return _Compiled.apply(x, spec, mapping.needs_scores, *params)
            return torch.ops.anymax.forward(x, params, spec)
        engine = kernels.choose("forward", mapping, x)
        if not wants:
            return engine.forward(mapping, x, mask)
        with torch.no_grad():
            made = (engine.forward(mapping, x, mask), None) if hooked() else _saving(engine, mapping, x, mask, learning)
        return _Apply.apply(x, made, mapping, -1, *params_of(mapping))

    def quick(self) -> Any:
        return _quick_without_library if isinstance(native.load(), str) else _quick

    def compiling(self) -> Any:
        return torch.compiler.is_dynamo_compiling

    def masks(self, mapping: Mapping, x: Tensor) -> bool:
        if mapping.needs_scores or mapping.hides_a_class or traced(mapping, x):
            return False
        return kernels.choose("forward", mapping, x).takes_mask

    def write(self, mapping: Mapping, x: Tensor, mask: Tensor | None, out: Any) -> bool:
        """Only without a gradient, and only if `out` is not also an input."""
        alike = type(out) is Tensor and (out.dtype, out.shape, out.device) == (x.dtype, x.shape, x.device)
        if not alike or not x.numel():
            return False
        if (
            recorded(x, out, *mapping.params().values())
            or traced(mapping, x)
            or (out.is_inference() and not torch.is_inference_mode_enabled())
        ):
            return False
        done = kernels.choose("forward", mapping, x).write(mapping, x, mask, out)
        if done:
            _wrote(out)
        return done

    def log(self, mapping: Mapping, x: Tensor) -> Tensor | None:
        if mapping.hides_a_class:
            return seen(self.log(*mapping.with_hidden(x, xp)))
        engine = None if traced(mapping, x, "log_forward") else kernels.compiled("log_forward", mapping, x)
        if engine is None:
            return reference.log_forward(mapping, x)
        if recorded(x):
            return _Log.apply(x, mapping, engine, *params_of(mapping))
        return engine.log_forward(mapping, x)

    def loss(self, mapping: Mapping, x: Tensor, y: Tensor) -> Tensor:
        plain = transformed() or recorded(y) or needs_plain(mapping, x, "loss")
        if not plain and not torch.compiler.is_compiling() and not modes():
            if recorded(x) or learns(mapping):
                return _Loss.apply(x, y, mapping, *params_of(mapping))[0]
            p = kernels.choose("forward", mapping, x).forward(mapping, x)
            return kernels.choose("loss", mapping, x).loss(mapping, x, p, y)
        # torch.compile takes first derivatives only, and these treat p as a constant.
        once = torch.compiler.is_compiling() and not transformed()
        p = self.apply(mapping.frozen(), x.detach()) if once else self.apply(mapping, x)
        return reference.loss(mapping, x, p, y)

    def reduces(self, x: Tensor) -> bool:
        return x.dtype in _WIDE

    def index_loss(
        self, mapping: Mapping, x: Tensor, index: Tensor, axis: int = -1, ignored: int = BELOW, reduction: str = "none"
    ) -> Tensor | None:
        if _compiling() or type(x) not in KINDS or type(index) is not Tensor:
            return None
        wants = _grad() and x.requires_grad
        if x.is_cpu and index.dtype is torch.int64 and x.dtype in _WIDE and not (wants and _functorch()):
            value = torch.empty(index.shape if reduction == "none" else (), dtype=_WIDE[x.dtype], device="cpu")
            save = wants and not hooked()
            link, slope = link_of(mapping), None
            if wants and type(link) is Link and link.params is not None:
                link = _number(mapping, link, x)
                slope = None if link is None else torch.empty(index.shape, dtype=_WIDE[x.dtype], device="cpu")
            done = link and _quick_loss(
                mapping if slope is None else link, x, index, value, axis, ignored, reduction, save, slope
            )
            if done is not None:
                if not wants:
                    return value
                call = _LossCall(mapping, native.ENGINE, axis, ignored, reduction, None if slope is None else link)
                made = IndexLoss(value, done[1], done[0], slope)
                return _IndexLoss.apply(x, index, made, call, *(() if slope is None else params_of(mapping)))
        if _on_gpu(x) and x.numel() and _untraced() and _gpu.quick("index_loss", mapping, x):
            engine: Any = _gpu
        else:
            engine = (
                None if traced(mapping, x, "index_loss") or x.is_nested else kernels.compiled("index_loss", mapping, x)
            )
        if engine is None:
            return None
        learning = learns(mapping)
        wants = wants or learning
        save = wants and (engine.needs_saved or not hooked())
        with torch.no_grad():
            made = engine.index_loss(
                mapping, x, index, save=save, axis=axis, ignored=ignored, reduction=reduction, slope=learning
            )
            if made is not None and learning and made.slope is None:
                made = made._replace(slope=_slope_of_rows(mapping, x, index, ignored, engine))
        if made is None or not wants:
            return made and made.value
        call = _LossCall(mapping, engine, axis, ignored, reduction)
        return _IndexLoss.apply(x, index, made, call, *params_of(mapping))

    def recomputed(self, function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        return functools.partial(torch.utils.checkpoint.checkpoint, function, use_reentrant=False)


BRIDGE = TorchBridge()
