"""PyTorch: segments by the engine of their device, with derivatives; where it refuses, padded rows.

Under torch.compile the engine is an opaque operation, as it is for rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch

from .._array import modes, plain_backward, recorded, torch_exports, transformed, wide_dtype
from .._core.mapping import Mapping
from ..autodiff.torch_adapter import opaque, operation
from ..autodiff.torch_operations import mapping_from, spec_of, traced_map
from ..autodiff.torch_parameters import learns
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
            return _apply((call, engine), x, mapping)
        return engine.forward(call.segments_first, x, call.segments_along)

    def log(self, call: SegmentCall) -> Tensor | None:
        mapping, x = call.mapping, call.x
        engine = None if learns(mapping) else _eager_engine(call, "log_forward")
        if engine is None:
            return None
        if recorded(x):
            return _log((call, engine), x, mapping)
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
            return _index_loss((call, engine), x, place, mapping)
        return engine.index_loss(call.segments_first, x, place, call.segments_along, save=False).value


BRIDGE = TorchSegments()


def _compiled() -> bool:
    return torch.compiler.is_compiling() and not torch_exports()


def _eager_engine(call: SegmentCall, op: str) -> RaggedEngine | None:
    """The engine of an operation; None where torch must see plain operations."""
    if _compiled() or modes() or transformed() or unlearned(op, call.mapping, call.x) is not None:
        return None
    return call.engine(op)


# -- derivatives of eager calls --------------------------------------------------------------------------------------------------------


def _with(call: SegmentCall, mapping: Mapping) -> SegmentCall:
    """The call with the map that the graph gave back."""
    return call if mapping is call.mapping else dataclasses.replace(call, mapping=mapping)


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


def _apply_forward(how: Any, operands: Any, wants: Any) -> tuple[Tensor, Sequence[Tensor | None]]:
    (call, engine), (x, mapping) = how, operands
    p, kept = engine.forward_saving(call.segments_first, x.detach(), call.segments_along)
    return p, (p, x if mapping.needs_scores else None, kept)


def _apply_backward(how: Any, operands: Any, saved: Any, grads: Any, wants: Any) -> Any:
    (call, _), (mapping,), (p, x, kept), (g,) = how, operands, saved, grads
    call = _with(call, mapping)
    by_scores = None
    if wants[0]:
        engine = None if plain_backward(g) else choose_ragged("vjp", mapping, g)
        if engine is None:  # this gradient may be differentiated
            by_scores = _rows(call, reference.vjp, p if x is None else x, p, g)
        else:
            by_scores = engine.vjp(call.segments_first, x, p, g, call.segments_along, kept)
    return by_scores, lambda name: _slope(call, name, x, p, g, kept)


_apply = operation("SegmentApply", _apply_forward, _apply_backward, of_map=True, saves=0)


def _log_forward(how: Any, operands: Any, wants: Any) -> tuple[Tensor, Sequence[Tensor]]:
    call, engine = how
    log_p = engine.log_forward(call.segments_first, operands[0].detach(), call.segments_along)
    return log_p, (log_p,)


def _log_backward(how: Any, operands: Any, kept: Any, grads: Any, wants: Any) -> Any:
    (call, _), (x, mapping), (log_p,), (g,) = how, operands, kept, grads
    call, engine = _with(call, mapping), choose_ragged("log_vjp", mapping, g)
    return engine and (engine.log_vjp(call.segments_first, x, log_p, g, call.segments_along), None)


def _log_plain(how: Any, operands: Any, kept: Any) -> Tensor:
    x, mapping = operands
    return _rows(_with(how[0], mapping), reference.log_forward, x)


_log = operation("SegmentLog", _log_forward, _log_backward, _log_plain, of_map=True)


def _index_loss_forward(how: Any, operands: Any, wants: Any) -> tuple[Tensor, Sequence[Tensor | None]]:
    """`place` says which entry of each segment is the target."""
    (call, engine), (x, place, _) = how, operands
    learned = wants[2:]
    loss = engine.index_loss(call.segments_first, x.detach(), place, call.segments_along, save=True, slope=any(learned))
    slopes = _slopes(call, learned, x, place) if loss.slope is None else [loss.slope]
    return loss.value, (loss.saved, *slopes)


def _index_loss_backward(how: Any, operands: Any, saved: Any, grads: Any, wants: Any) -> Any:
    (call, engine), (x, place, mapping), (kept, *slopes), (g,) = how, operands, saved, grads
    call = _with(call, mapping)
    if slopes and torch.is_grad_enabled():
        slopes = _slopes(call, wants[2:], x, place)
    each = iter(slopes)
    by_scores = None
    if wants[0] and (plain_backward(g) or engine.refuse("vjp", mapping, g) is not None):
        by_scores = _by_scores(call, x, place, g)
    elif wants[0]:
        scale = g.to(wide_dtype(x, torch)).contiguous()
        by_scores = engine.index_loss_grad(call.segments_first, x, place, scale, kept, call.segments_along)
    return by_scores, None, lambda _: (next(each) * g).movedim(0, -1)


_index_loss = operation("SegmentIndexLoss", _index_loss_forward, _index_loss_backward, of_map=True)


def _slopes(call: SegmentCall, wanted: Any, x: Tensor, place: Tensor) -> list[Tensor]:
    """`_loss_slope` by each parameter that is wanted, of the tensors of `params_of`."""
    names = [name for name, value in call.mapping.params().items() if isinstance(value, Tensor)]
    return [_loss_slope(call, name, x, place) for name, want in zip(names, wanted, strict=True) if want]


# -- opaque operations, for torch.compile -----------------------------------------------------------------------------------------------


def _opaque(call: SegmentCall) -> Tensor | None:
    mapping, segments, x = call.mapping, call.segments, call.x
    spec = spec_of(mapping)
    if spec is None or transformed() or unlearned("forward", mapping, x) is not None:
        return None
    ptr, order = (segments.placed(name, x) for name in ("ptr", "order"))
    params = list(mapping.params().values())
    if recorded(x) or learns(mapping):
        return _traced((mapping.needs_scores, spec, call.axis), x, ptr, order, *params)
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


def _slope_fake(x: Tensor, p: Tensor, g: Tensor, ptr: Tensor, *others: Any) -> Tensor:
    axis = others[3]
    heads = (n for i, n in enumerate(p.shape) if i != axis)
    return p.new_empty((*heads, ptr.shape[0] - 1), dtype=wide_dtype(p, torch))


_OPERANDS = "Tensor x, Tensor p, Tensor g, Tensor ptr, Tensor? order, Tensor[] params, str spec, int axis"
opaque("segments(Tensor x, Tensor ptr, Tensor? order, Tensor[] params, str spec, int axis) -> Tensor", _forward_op)
opaque(f"segments_vjp({_OPERANDS}) -> Tensor", _vjp_op)
opaque(f"segments_slope({_OPERANDS}, int place) -> Tensor", _slope_op, _slope_fake)

_ops = torch.ops.anymax
_traced = traced_map("TracedSegments", _ops.segments, _ops.segments_vjp, _ops.segments_slope, layout=2)  # ptr and order
