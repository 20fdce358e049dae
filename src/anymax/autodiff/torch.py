"""PyTorch: backward, double backward, forward mode, torch.func, compile and export.

Each call takes one of four paths:
- eager: an engine computes the result, and an `autograd.Function` records it (`torch_adapter.py`; those of the calls that take the least
  time are written out, in `torch_rows.py` and here). If its backward is itself differentiated, it uses plain operations;
- compiled: the same with opaque operations (`torch.ops.anymax`), so that the compiler does not trace an iteration;
- functorch transforms, forward mode, or a parameter with a gradient: `Mapping.differentiable`, plain operations around the result of
  the iteration, which is held constant;
- export: the plain formula, with a fixed number of steps if it iterates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
import torch.utils.checkpoint

from .. import kernels
from .._array import from_last, modes, plain_backward, recorded, to_last, torch_exports, transformed
from .._core.mapping import Mapping, loss_learns, scales_scores
from ..kernels import native
from ..kernels.engine import BELOW, REDUCTIONS, Engine, IndexLoss
from ..kernels.link import WITHOUT_LOSS, Link
from ..kernels.linked import link_of
from ..kernels.reference import ENGINE as reference
from .bridge import BRIDGES, Bridge
from .saving import As, hooked, params_of, restored, with_params
from .torch_adapter import operation
from .torch_operations import spec_of, traced_forward
from .torch_parameters import gradients, learns, needs_plain, traced
from .torch_rows import CPU, GPU, KINDS, WIDE, direct, number_of, on_gpu, once, quick, record, tracing, untraced, wrote

Tensor = torch.Tensor

_compiling = torch.compiler.is_compiling
_grad, _functorch = torch.is_grad_enabled, torch._C._are_functorch_transforms_active


# -- operations with derivatives ----------------------------------------------------------------------------------------------


def log_forward(engine: Engine, operands: Any, wants: Any) -> tuple[Any, list[Any]]:
    x, mapping = operands
    log_p = engine.log_forward(mapping, x)
    return log_p, [log_p]


def log_backward(engine: Engine, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (x, mapping), (log_p,), (g,) = operands, kept, grads
    return None if engine.refuse("log_vjp", mapping, g) else (engine.log_vjp(mapping, x, log_p, g), None)


def _log_plain(_: Engine, operands: Any, kept: Any) -> Any:
    x, mapping = operands
    return reference.log_forward(mapping, x)


_log = operation("Log", log_forward, log_backward, _log_plain, of_map=True)


class _LossCall(NamedTuple):
    """How an engine computed a loss of class indices."""

    mapping: Mapping
    engine: Engine
    axis: int
    ignored: int
    reduction: str
    number: Link | None = None  # the link with the parameter as a number, in a quick call


class _IndexLoss(torch.autograd.Function):
    """The loss of class indices, computed by an engine: one pass forward, one backward.

    Written out, and not by `operation`, for the calls that take the least time: `python -m benchmarks --only 'loss|learned'`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, loss: IndexLoss, call: _LossCall, *params: Tensor) -> Tensor:
        value, memory, count, slope = loss
        ctx.lanes = None  # of a GPU's engine: the rest of what it saved beside the memory
        if memory is not None and not isinstance(memory, Tensor):
            memory, ctx.lanes = memory.memory, memory._replace(memory=None)
        ctx.call, ctx.scores, ctx.index = call, (x.dtype, x.shape), index.dtype
        ctx.was = None if memory is None else As.of(memory)
        # a mean divides the gradient by the rows that count: a tensor on a GPU, else as part of a factor
        ctx.counted = type(count) is Tensor
        ctx.factor = 1.0 / max(count or 0, 1) if call.reduction == "mean" and not ctx.counted else 1.0
        ctx.learns = slope is not None  # the engine gave the derivative by the parameter
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
        slope: Any = params.pop(0) if ctx.learns else None
        by_scores: Any = None
        if number is not None and not _grad():  # a quick call, whose parameter is one number
            if ctx.needs_input_grad[0]:
                by_scores = engine.quick_loss_grad(number, x, index, g, axis, factor, memory)
            if by_scores is not None or not ctx.needs_input_grad[0]:
                each, dtype = slope * (g * factor if factor != 1.0 else g), ctx.params_as[0].dtype
                if each.ndim:
                    each = each.masked_fill_(g == 0, 0.0).sum(dtype=dtype)  # of a row of NaN, too
                return by_scores, None, None, None, each.to(dtype)
        by_params: Any = (None,) * len(params)
        if params:
            mapping = with_params(mapping, [restored(value, was) for value, was in zip(params, ctx.params_as)])
        if slope is not None:
            slope = _slope_of_rows(mapping, to_last(x, axis % x.ndim, xp), index, ignored) if _grad() else slope
            by_row = (slope * (g * factor)).unsqueeze(-1)
            by_params = gradients(mapping, ctx.needs_input_grad[4:], lambda name: by_row, g.unsqueeze(-1))
        if ctx.needs_input_grad[0]:
            if not _grad():
                by_scores = engine.quick_loss_grad(mapping, x, index, g, axis, factor, memory)
                if by_scores is None and on_gpu(x) and memory is not None and As.of(memory) == ctx.was:
                    kept = memory if ctx.lanes is None else ctx.lanes._replace(memory=memory)
                    by_scores = _quick_slope(ctx, mapping, x, index, g, kept)
            if by_scores is None:
                by_scores = _restored_slope(ctx, mapping, x, index, memory, g)
        return by_scores, None, None, None, *by_params


_record_loss = direct(_IndexLoss)  # of a quick call


def _restored_slope(ctx: Any, mapping: Mapping, x: Tensor, index: Tensor, memory: Tensor | None, g: Tensor) -> Tensor:
    """The gradient of `_IndexLoss` of tensors that a hook may have changed, and of one through which derivatives are taken."""
    engine, ignored, axis, factor = ctx.call.engine, ctx.call.ignored, ctx.call.axis % len(ctx.scores[1]), ctx.factor
    x = restored(x, As(ctx.scores[0], ctx.scores[1], g.device))
    batch = torch.Size([n for i, n in enumerate(x.shape) if i != axis])
    index = restored(index, As(ctx.index, batch, g.device))
    out = None
    if not plain_backward(g) and engine.refuse("vjp", mapping, g) is None:
        kept = None if memory is None else restored(memory, ctx.was)
        kept = kept if ctx.lanes is None else ctx.lanes._replace(memory=kept)
        out = engine.index_loss_grad(mapping, x, index, g, kept, axis=axis, ignored=ignored, factor=factor)
    return _plain_slope(mapping, x, index, g * factor, axis, ignored) if out is None else out


def _slope_of_rows(mapping: Mapping, x: Tensor, index: Tensor, ignored: int, engine: Engine = reference) -> Tensor:
    """The derivative of each row's loss by the parameter, from p; by the reference it has derivatives where autograd records."""
    (name,) = loss_learns(mapping)
    engine = engine if scales_scores(mapping) else reference
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


def _loss_forward(_: None, operands: Any, wants: Any) -> tuple[Tensor, list[Tensor]]:
    x, y, mapping = operands
    p = kernels.choose("forward", mapping, x).forward(mapping, x)
    return kernels.choose("loss", mapping, x).loss(mapping, x, p, y), [p]


def _loss_backward(_: None, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (x, y, mapping), (p,), (g,) = operands, kept, grads
    if torch.is_grad_enabled():
        p = BRIDGE.apply(mapping, x)
    slope = lambda name: torch.where(g == 0, 0.0, g * reference.loss_slope(mapping, name, x, p))  # noqa: E731
    return g * (p - y), None, slope


# `Omega*(x) - <x, y>`: the gradient is p - y, so the solver is not differentiated
_loss = operation("Loss", _loss_forward, _loss_backward, of_map=True)


# -- the kind of a call, and the fast path: the CPU engine takes any axis, mask and strides --------------------------------


def _records(mapping: Mapping, x: Tensor) -> bool:
    """True if autograd, or a tracer, records the formula of a map that is `traced`: of the scores, or of what its functions hold."""
    if _compiling() or modes() or torch_exports() or recorded(x):
        return True
    return _grad() and reference.differentiable(mapping, x.reshape(-1, x.shape[-1])[:1]).requires_grad


def _implicit(mapping: Mapping, x: Tensor) -> Tensor:
    spec = spec_of(mapping) if mapping.iterative and not torch_exports() else None
    if spec is None:
        return reference.differentiable(mapping, x)
    frozen = [value.detach() for value in mapping.params().values()]
    return reference.differentiable(mapping, x, torch.ops.anymax.hold(x.detach(), frozen, spec))


def _quick_slope(ctx: Any, mapping: Mapping, x: Tensor, index: Tensor, g: Tensor, kept: Any) -> Tensor | None:
    """The gradient of `_IndexLoss` on a GPU, of tensors as they were saved; None for an unusual call."""
    axis, ignored = ctx.call.axis, ctx.call.ignored
    if not once(g) or type(x) not in KINDS or type(index) is not Tensor:
        return None
    if (x.dtype, x.shape) != ctx.scores or index.dtype != ctx.index or not GPU.quick("vjp", mapping, x):
        return None
    return GPU.index_loss_grad(mapping, x, index, g, kept, axis=axis, ignored=ignored, factor=ctx.factor)


# -- the bridge ---------------------------------------------------------------------------------------------------------------


class TorchBridge(Bridge):
    framework = "torch"
    kinds = KINDS

    def apply(self, mapping: Mapping, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if transformed() or needs_plain(mapping, x) or (mapping.traced and _records(mapping, x)):
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
                return traced_forward((mapping.needs_scores, spec), x, *params)
            return torch.ops.anymax.forward(x, params, spec)
        engine = kernels.choose("forward", mapping, x)
        if tracing() is not None:
            # torch.jit.trace would keep p as a constant; it checks itself without a gradient, so both have one graph
            return reference.differentiable(mapping, x)
        if not wants:
            return engine.forward(mapping, x, mask)
        with torch.no_grad():
            saving = engine.forward_learning if learning else engine.forward_saving
            p, support = (engine.forward(mapping, x, mask), None) if hooked() else saving(mapping, x, mask)
        return record(x, p, support, mapping, -1, *params_of(mapping))

    def quick(self) -> Any:
        engine = native.load()
        return quick if isinstance(engine, str) else engine.quick

    def compiling(self) -> Any:
        return torch.compiler.is_dynamo_compiling

    def masks(self, mapping: Mapping, x: Tensor) -> bool:
        if mapping.needs_scores or traced(mapping, x):
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
            wrote(out)
        return done

    def log(self, mapping: Mapping, x: Tensor) -> Tensor | None:
        engine = None if traced(mapping, x, "log_forward") else kernels.compiled("log_forward", mapping, x)
        if engine is None:
            return reference.log_forward(mapping, x)
        if recorded(x):
            return _log(engine, x, mapping)
        return engine.log_forward(mapping, x)

    def loss(self, mapping: Mapping, x: Tensor, y: Tensor) -> Tensor:
        plain = transformed() or recorded(y) or needs_plain(mapping, x, "loss")
        if not plain and not torch.compiler.is_compiling() and not modes() and tracing() is None:
            if recorded(x) or learns(mapping):
                return _loss(None, x, y, mapping)
            p = kernels.choose("forward", mapping, x).forward(mapping, x)
            return kernels.choose("loss", mapping, x).loss(mapping, x, p, y)
        # torch.compile takes first derivatives only, and these treat p as a constant.
        once = torch.compiler.is_compiling() and not transformed()
        p = self.apply(mapping.frozen(), x.detach()) if once else self.apply(mapping, x)
        return reference.loss(mapping, x, p, y)

    def reduces(self, x: Tensor) -> bool:
        return x.dtype in WIDE

    def index_loss(
        self, mapping: Mapping, x: Tensor, index: Tensor, axis: int = -1, ignored: int = BELOW, reduction: str = "none"
    ) -> Tensor | None:
        if _compiling() or type(x) not in KINDS or type(index) is not Tensor:
            return None
        wants = _grad() and x.requires_grad
        link: Any = link_of(mapping)
        if (
            x.is_cpu and index.dtype is torch.int64 and x.dtype in WIDE and not (wants and _functorch())
            and type(link) is Link and link.kind not in WITHOUT_LOSS
        ):  # fmt: skip
            number = number_of(mapping, link, x) if wants and link.params is not None else None
            if number is not None or link.params is None:
                value = torch.empty(index.shape if reduction == "none" else (), dtype=WIDE[x.dtype], device="cpu")
                slope = None if number is None else torch.empty_like(value)
                how = REDUCTIONS[reduction], wants and not hooked()
                saved = CPU.quick_index_loss(number or mapping, x, index, value, axis, ignored, *how, slope)
                if saved is not None and not wants:
                    return value
                if saved is not None:
                    call = _LossCall(mapping, CPU, axis, ignored, reduction, number)
                    loss = IndexLoss(value, saved[1], saved[0], slope)
                    return _record_loss(x, index, loss, call, *(() if number is None else (link.params,)))
        if on_gpu(x) and x.numel() and untraced() and GPU.quick("index_loss", mapping, x):
            engine: Any = GPU
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
            loss = engine.index_loss(
                mapping, x, index, save=save, axis=axis, ignored=ignored, reduction=reduction, slope=learning
            )
            if loss is not None and learning and loss.slope is None:
                loss = loss._replace(slope=_slope_of_rows(mapping, x, index, ignored, engine))
        if loss is None or not wants:
            return loss and loss.value
        call = _LossCall(mapping, engine, axis, ignored, reduction)
        return _IndexLoss.apply(x, index, loss, call, *params_of(mapping))

    def recomputed(self, function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        return functools.partial(torch.utils.checkpoint.checkpoint, function, use_reentrant=False)


BRIDGE = TorchBridge()
BRIDGES.update(dict.fromkeys(TorchBridge.kinds, BRIDGE))
