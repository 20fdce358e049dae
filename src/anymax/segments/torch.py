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
from ..autodiff.torch import BRIDGE as ROWS
from ..autodiff.torch import learns, plain_grads
from ..autodiff.torch_library import library
from ..autodiff.torch_operations import mapping_from, spec_of
from ..kernels import choose_ragged
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
        if recorded(x):
            return _Apply.apply(x, call, engine, *params_of(mapping))
        return engine.forward(call.segments_first, x, call.segments_along)

    def log(self, call: SegmentCall) -> Tensor | None:
        mapping, x = call.mapping, call.x
        engine = _eager_engine(call, "log_forward")
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
        if recorded(x):
            return _IndexLoss.apply(x, place, call, engine, *params_of(mapping))
        return engine.index_loss(call.segments_first, x, place, call.segments_along, save=False).value


BRIDGE = TorchSegments()


def _compiled() -> bool:
    return torch.compiler.is_compiling() and not torch_exports()


def _eager_engine(call: SegmentCall, op: str) -> RaggedEngine | None:
    """The engine of an operation; None where torch must see plain operations."""
    return None if _compiled() or modes() or transformed() or learns(call.mapping) else call.engine(op)


# -- the autograd functions ---------------------------------------------------------------------------------------------------------------


def _with(call: SegmentCall, params: Any) -> SegmentCall:
    """The call with the parameters that the graph gave back."""
    return dataclasses.replace(call, mapping=with_params(call.mapping, params)) if params else call


def _rows(call: SegmentCall, formula: Any, *tensors: Tensor) -> Tensor:
    """formula(mapping, *rows) on padded rows: the first is padded with -inf, the others with 0."""
    return padded.formula(call.segments, call.mapping, call.axis, formula, *tensors)


def _slope(call: SegmentCall, x: Tensor, place: Tensor, g: Tensor) -> Tensor:
    """The gradient of `index_loss`, `g (p - y)`, in plain operations."""
    p = BRIDGE.apply(dataclasses.replace(call, x=x))
    p = (_rows(call, ROWS.apply, x) if p is None else p).movedim(call.axis, 0)
    index, rank = (call.segments.placed(name, x) for name in ("index", "rank"))
    target = place.index_select(0, index)
    y = (rank.reshape(-1, *[1] * (p.ndim - 1)) == target).to(p.dtype)
    out = torch.where(target >= 0, g.to(p.dtype).index_select(0, index) * (p - y), torch.zeros_like(p))
    return out.movedim(0, call.axis)


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
        call, none = _with(ctx.call, params), (None,) * (2 + len(params))
        engine = None if plain_backward(g) else choose_ragged("vjp", call.mapping, g)
        if engine is None:  # this gradient may be differentiated
            return _rows(call, reference.vjp, p if x is None else x, p, g), *none
        return engine.vjp(call.segments_first, x, p, g, call.segments_along, kept), *none


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
        loss = engine.index_loss(call.segments_first, x.detach(), place, call.segments_along, save=True)
        save(ctx, x, place, loss.saved, *params)
        return loss.value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (x, place, kept, *params), (call, engine) = grads, saved(ctx), ctx.call
        call, none = _with(call, params), (None,) * (3 + len(params))
        if plain_backward(g) or engine.refuse("vjp", call.mapping, g) is not None:
            return _slope(call, x, place, g), *none
        scale = g.to(wide_dtype(x, torch)).contiguous()
        return engine.index_loss_grad(call.segments_first, x, place, scale, kept, call.segments_along), *none


# -- opaque operations, for torch.compile -----------------------------------------------------------------------------------------------

_LIBRARY.define("segments(Tensor x, Tensor ptr, Tensor? order, Tensor[] params, str spec, int axis) -> Tensor")
_LIBRARY.define(
    "segments_vjp(Tensor x, Tensor p, Tensor g, Tensor ptr, Tensor? order, Tensor[] params, str spec, int axis) -> Tensor"
)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, ptr: Tensor, order: Tensor | None, spec: str, axis: int, scores: bool, *params: Tensor
    ) -> Tensor:
        return torch.ops.anymax.segments(x, ptr, order, params, spec, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ptr, ctx.order, ctx.spec, ctx.axis, scores, *params = inputs
        ctx.count, ctx.sorted = len(params), ctx.order is None
        ctx.save_for_backward(x if scores else output, output, ptr, *([] if ctx.sorted else [ctx.order]), *params)
        ctx.order = None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, p, ptr, *rest = ctx.saved_tensors
        order = None if ctx.sorted else rest.pop(0)
        out = torch.ops.anymax.segments_vjp(x, p, grads[0], ptr, order, rest, ctx.spec, ctx.axis)
        return out, None, None, None, None, None, *([None] * ctx.count)


def _opaque(call: SegmentCall) -> Tensor | None:
    mapping, segments, x = call.mapping, call.segments, call.x
    spec = spec_of(mapping)
    if spec is None or learns(mapping) or transformed():
        return None
    ptr, order = (segments.placed(name, x) for name in ("ptr", "order"))
    params = list(mapping.params().values())
    if recorded(x):
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
        return _rows(call, ROWS.apply, x).contiguous()


def _vjp_op(
    x: Tensor, p: Tensor, g: Tensor, ptr: Tensor, order: Tensor | None, params: list[Tensor], spec: str, axis: int
) -> Tensor:
    call = _of(mapping_from(spec, params), x, ptr, order, axis)
    with torch.no_grad():
        if (engine := choose_ragged("vjp", call.mapping, p)) is not None:
            return engine.vjp(call.segments_first, x, p, g, call.segments_along)
        return _rows(call, reference.vjp, x, p, g).contiguous()


def _like(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _name, _impl in (("segments", _forward_op), ("segments_vjp", _vjp_op)):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anymax::{_name}", _like, lib=_LIBRARY)
