"""PyTorch: segments by the engine of their device, with derivatives; where it refuses, padded rows.

Under torch.compile the engine is an opaque operation, as it is for rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch

from .._array import modes, plain_backward, recorded, torch_exports, transformed, wide_dtype
from .._core.mapping import Mapping
from ..autodiff.saving import params_of, save, saved, with_params
from ..autodiff.torch import plain_grads
from ..autodiff.torch_library import library
from ..autodiff.torch_operations import mapping_from, spec_of
from ..autodiff.torch_parameters import gradients, learns
from ..functional import apply
from ..kernels import choose, choose_ragged
from ..kernels.choice import unlearned
from ..kernels.engine import RaggedEngine
from ..kernels.reference import ENGINE as reference
from . import padded
from .bridge import SegmentBridge
from .call import SegmentCall
from .layout import Segments, check

Tensor = torch.Tensor
_LIBRARY = library(__name__)


# -- the operations: None where the engines refuse ------------------------------------------------------------------------------


class TorchSegments(SegmentBridge):
    def apply(self, call: SegmentCall) -> Tensor | None:
        mapping, x = call.mapping, call.x
        if _compiled():
            return _opaque(call)
        engine = _eager_engine(call, "forward")
        if engine is None:
            return None
        if recorded(x) or learns(mapping):
            return _Apply.apply(x, call, engine, *params_of(mapping))
        return engine.forward(call.segments_first, x, call.segments_along)

    def log(self, call: SegmentCall) -> Tensor | None:
        mapping, x = call.mapping, call.x
        engine = None if learns(mapping) else _eager_engine(call, "log_forward")
        if engine is None:
            return None
        if recorded(x):
            return _Log.apply(x, call, engine, *params_of(mapping))
        return engine.log_forward(call.segments_first, x, call.segments_along)

    def threshold(self, call: SegmentCall) -> Tensor | None:
        engine = _eager_engine(call, "threshold")
        return engine and engine.threshold(call.segments_first, call.x.detach(), call.segments_along)

    def index_loss(self, call: SegmentCall, place: Tensor) -> Tensor | None:
        mapping, x = call.mapping, call.x
        engine = _eager_engine(call, "index_loss")
        if engine is None:
            return None
        if recorded(x) or learns(mapping):
            return _IndexLoss.apply(x, place, call, engine, *params_of(mapping))
        return engine.index_loss(call.segments_first, x, place, call.segments_along, save=False).value


BRIDGE = TorchSegments()


def _compiled() -> bool:
    return torch.compiler.is_compiling() and not torch_exports()


def _eager_engine(call: SegmentCall, op: str) -> RaggedEngine | None:
    """The engine of an operation; None where torch must see plain operations."""
    if _compiled() or modes() or transformed() or unlearned(op, call.mapping, call.x) is not None:
        return None
    return call.engine(op)


# -- the autograd functions ---------------------------------------------------------------------------------------------------------------


def _with(call: SegmentCall, params: Any) -> SegmentCall:
    """The call with the parameters that the graph gave back."""
    return dataclasses.replace(call, mapping=with_params(call.mapping, params)) if params else call


def _rows(call: SegmentCall, formula: Any, *tensors: Tensor) -> Tensor:
    """formula(mapping, *rows) on padded rows: the first is padded with -inf, the others with 0."""
    return padded.formula(call.segments, call.mapping, call.axis, formula, *tensors)


def _by_scores(call: SegmentCall, x: Tensor, place: Tensor, g: Tensor) -> Tensor:
    """The gradient of `index_loss`, `g (p - y)`, in plain operations."""
    p = _p(call, x).movedim(call.axis, 0)
    index, rank = (call.segments.placed(name, x) for name in ("index", "rank"))
    target = place.index_select(0, index)
    y = (rank.reshape(-1, *[1] * (p.ndim - 1)) == target).to(p.dtype)
    out = torch.where(target >= 0, g.to(p.dtype).index_select(0, index) * (p - y), torch.zeros_like(p))
    return out.movedim(0, call.axis)


def _p(call: SegmentCall, x: Tensor) -> Tensor:
    """p(x), which autograd records."""
    p = BRIDGE.apply(dataclasses.replace(call, x=x))
    return _rows(call, apply, x) if p is None else p


def _slope(call: SegmentCall, name: str, x: Tensor | None, p: Tensor, g: Tensor, kept: Any = None) -> Tensor:
    """`<g, dp / d parameter>` of each segment, the segments last as in the parameters of a call."""
    plain = plain_backward(g)
    engine = None if plain else choose_ragged("slope", call.mapping, g)
    if engine is not None:
        return engine.slope(call.segments_first, name, x, p, g, call.segments_along, kept).movedim(0, -1)

    def of_rows(mapping: Mapping, x: Tensor, p: Tensor, g: Tensor) -> Tensor:
        return (reference if plain else choose("slope", mapping, p)).slope(mapping, name, x, p, g)

    return padded.each_formula(call.segments, call.mapping, call.axis, of_rows, p if x is None else x, p, g)


def _loss_slope(call: SegmentCall, name: str, x: Tensor, place: Tensor) -> Tensor:
    """The derivative of `index_loss` by a parameter, [segments, heads ...]; autograd records it."""

    def of_rows(mapping: Mapping, x: Tensor, p: Tensor) -> Tensor:
        return reference.loss_slope(mapping, name, x, p)

    each = padded.each_formula(call.segments, call.mapping, call.axis, of_rows, x, _p(call, x)).movedim(-1, 0)
    return torch.where(place >= 0, each, torch.zeros_like(each))


class _Apply(torch.autograd.Function):
    """p(x) by the engine, in eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any, engine: Any, *params: Tensor) -> Tensor:
        p, kept = engine.forward_saving(call.segments_first, x.detach(), call.segments_along)
        ctx.call = call
        save(ctx, p, x if call.mapping.needs_scores else None, kept, *params)
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (p, x, kept, *params) = grads, saved(ctx)
        call, wanted = _with(ctx.call, params), ctx.needs_input_grad
        others = None, None, *gradients(call.mapping, wanted[3:], lambda name: _slope(call, name, x, p, g, kept))
        if not wanted[0]:
            return None, *others
        engine = None if plain_backward(g) else choose_ragged("vjp", call.mapping, g)
        if engine is None:  # this gradient may be differentiated
            return _rows(call, reference.vjp, p if x is None else x, p, g), *others
        return engine.vjp(call.segments_first, x, p, g, call.segments_along, kept), *others


class _Log(torch.autograd.Function):
    """log p(x) by the engine, in eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any, engine: Any, *params: Tensor) -> Tensor:
        log_p = engine.log_forward(call.segments_first, x.detach(), call.segments_along)
        ctx.call = call
        save(ctx, log_p, x, *params)
        return log_p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (log_p, x, *params) = grads, saved(ctx)
        call, none = _with(ctx.call, params), (None,) * (2 + len(params))
        engine = None if plain_backward(g) else choose_ragged("log_vjp", call.mapping, g)
        if engine is None:
            return *plain_grads(lambda a: (_rows(call, reference.log_forward, a),), (x,), grads), *none
        return engine.log_vjp(call.segments_first, x, log_p, g, call.segments_along), *none


class _IndexLoss(torch.autograd.Function):
    """The loss by the engine, in eager mode; `place` says which entry of each segment is the target."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, call: Any, engine: Any, *params: Tensor) -> Tensor:
        ctx.call = call, engine
        learned = ctx.needs_input_grad[4:]
        loss = engine.index_loss(
            call.segments_first, x.detach(), place, call.segments_along, save=True, slope=any(learned)
        )
        slopes = _slopes(call, learned, x, place) if loss.slope is None else [loss.slope]
        ctx.ready = len(slopes)
        save(ctx, x, place, loss.saved, *slopes, *params)
        return loss.value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (x, place, kept, *params), (call, engine) = grads, saved(ctx), ctx.call
        wanted, slopes = ctx.needs_input_grad, params[: ctx.ready]
        params = params[ctx.ready :]
        call = _with(call, params)
        if slopes and torch.is_grad_enabled():
            slopes = _slopes(call, wanted[4:], x, place)
        each = iter(slopes)
        others = None, None, None, *gradients(call.mapping, wanted[4:], lambda _: (next(each) * g).movedim(0, -1))
        if not wanted[0]:
            return None, *others
        if plain_backward(g) or engine.refuse("vjp", call.mapping, g) is not None:
            return _by_scores(call, x, place, g), *others
        scale = g.to(wide_dtype(x, torch)).contiguous()
        return engine.index_loss_grad(call.segments_first, x, place, scale, kept, call.segments_along), *others


def _slopes(call: SegmentCall, wanted: Any, x: Tensor, place: Tensor) -> list[Tensor]:
    """`_loss_slope` by each parameter that is wanted, of the tensors of `params_of`."""
    names = [name for name, value in call.mapping.params().items() if isinstance(value, Tensor)]
    return [_loss_slope(call, name, x, place) for name, want in zip(names, wanted, strict=True) if want]


# -- opaque operations, for torch.compile -----------------------------------------------------------------------------------------------

_LIBRARY.define("segments(Tensor x, Tensor ptr, Tensor? order, Tensor[] params, str spec, int axis) -> Tensor")
_OPERANDS = "Tensor x, Tensor p, Tensor g, Tensor ptr, Tensor? order, Tensor[] params, str spec, int axis"
_LIBRARY.define(f"segments_vjp({_OPERANDS}) -> Tensor")
_LIBRARY.define(f"segments_slope({_OPERANDS}, int place) -> Tensor")


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, ptr: Tensor, order: Tensor | None, spec: str, axis: int, scores: bool, *params: Tensor
    ) -> Tensor:
        return torch.ops.anymax.segments(x, ptr, order, params, spec, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ptr, ctx.order, ctx.spec, ctx.axis, scores, *params = inputs
        ctx.sorted = ctx.order is None
        ctx.save_for_backward(x if scores else output, output, ptr, *([] if ctx.sorted else [ctx.order]), *params)
        ctx.order = None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, p, ptr, *params = ctx.saved_tensors
        order = None if ctx.sorted else params.pop(0)
        given = x, p, grads[0], ptr, order, params, ctx.spec, ctx.axis
        by_params = [
            torch.ops.anymax.segments_slope(*given, i).sum_to_size(value.shape).to(value.dtype) if want else None
            for i, (value, want) in enumerate(zip(params, ctx.needs_input_grad[6:]))
        ]
        return torch.ops.anymax.segments_vjp(*given), None, None, None, None, None, *by_params


def _opaque(call: SegmentCall) -> Tensor | None:
    mapping, segments, x = call.mapping, call.segments, call.x
    spec = spec_of(mapping)
    if spec is None or transformed() or unlearned("forward", mapping, x) is not None:
        return None
    ptr, order = (segments.placed(name, x) for name in ("ptr", "order"))
    params = list(mapping.params().values())
    if recorded(x) or learns(mapping):
        return _Compiled.apply(x, ptr, order, spec, call.axis, mapping.needs_scores, *params)
    return torch.ops.anymax.segments(x, ptr, order, params, spec, call.axis)


def _of(mapping: Mapping, x: Tensor, ptr: Tensor, order: Tensor | None, axis: int) -> SegmentCall:
    """The call of an opaque operation, now that its values are known."""
    bounds, places = (None if a is None else a.detach().cpu().numpy().astype(np.int64) for a in (ptr, order))
    segments = check("segment_apply", Segments(bounds, places, x.shape[axis]))
    return SegmentCall(xp, mapping, x, axis, segments)


def _forward_op(x: Tensor, ptr: Tensor, order: Tensor | None, params: list[Tensor], spec: str, axis: int) -> Tensor:
    call = _of(mapping_from(spec, params), x, ptr, order, axis)
    with torch.no_grad():
        if (engine := choose_ragged("forward", call.mapping, x)) is not None:
            return engine.forward(call.segments_first, x, call.segments_along)
        return _rows(call, apply, x).contiguous()


def _vjp_op(
    x: Tensor, p: Tensor, g: Tensor, ptr: Tensor, order: Tensor | None, params: list[Tensor], spec: str, axis: int
) -> Tensor:
    call = _of(mapping_from(spec, params), x, ptr, order, axis)
    with torch.no_grad():
        if (engine := choose_ragged("vjp", call.mapping, p)) is not None:
            return engine.vjp(call.segments_first, x, p, g, call.segments_along)
        return _rows(call, reference.vjp, x, p, g).contiguous()


def _slope_op(
    x: Tensor, p: Tensor, g: Tensor, ptr: Tensor, order: Tensor | None, params: list[Tensor], spec: str, axis: int, place: int
) -> Tensor:  # fmt: skip
    """`<g, dp / d parameter>` of each segment for the parameter at this place."""
    call = _of(mapping_from(spec, params), x, ptr, order, axis)
    with torch.no_grad():
        name = list(call.mapping.params())[place]
        return _slope(call, name, x if call.mapping.needs_scores else None, p, g).contiguous()


def _like(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _slope_fake(x: Tensor, p: Tensor, g: Tensor, ptr: Tensor, *others: Any) -> Tensor:
    axis = others[3]
    heads = (n for i, n in enumerate(p.shape) if i != axis)
    return p.new_empty((*heads, ptr.shape[0] - 1), dtype=wide_dtype(p, torch))


for _name, _impl, _fake in (
    ("segments", _forward_op, _like),
    ("segments_vjp", _vjp_op, _like),
    ("segments_slope", _slope_op, _slope_fake),
):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anymax::{_name}", _fake, lib=_LIBRARY)
