"""PyTorch: segments by the engine of their device, with derivatives; where it refuses, padded rows.

Under torch.compile the engine is an opaque operation, as it is for rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .._array import batched, known, modes, plain_backward, recorded, torch_exports, transformed, wide_dtype
from .._core.mapping import Mapping
from ..autodiff.torch import log_backward, log_forward
from ..autodiff.torch_adapter import opaque, operation
from ..autodiff.torch_operations import mapping_from, spec_of, traced_map
from ..autodiff.torch_parameters import learns
from ..functional import apply
from ..kernels import choose, choose_ragged
from ..kernels.choice import unlearned
from ..kernels.engine import SegmentsAlong, SegmentsEngine
from ..kernels.reference import ENGINE as reference
from . import padded
from .layout import Segments, check

Tensor = torch.Tensor


# -- the operations: None where the engines refuse ------------------------------------------------------------------------------


def unpadded(op: str, mapping: Mapping, x: Tensor, along: SegmentsAlong, *target_rank: Tensor) -> Tensor | None:
    if torch.compiler.is_compiling() and not torch_exports():
        return _opaque(mapping, x, along) if op == "forward" else None
    if modes() or transformed() or unlearned(op, mapping, x) is not None:
        return None
    engine = choose_ragged(op, mapping, x, along)
    if engine is None:
        return None
    if op in _RECORDED and (recorded(x) or learns(mapping)):
        return _RECORDED[op](engine, x, *target_rank, mapping)
    return engine.result(op, mapping, x, *target_rank)


# -- derivatives of eager calls ---------------------------------------------------------------------------------------------------


def _p(mapping: Mapping, x: Tensor, along: SegmentsAlong) -> Tensor:
    """p(x), which autograd records."""
    p = unpadded("forward", mapping, x, along)
    return padded.formula(along, mapping, apply, x) if p is None else p


def _vjp(mapping: Mapping, x: Tensor, p: Tensor, g: Tensor, along: SegmentsAlong, kept: Any = None) -> Tensor:
    engine = None if plain_backward(g) else choose_ragged("vjp", mapping, g, along)
    if engine is None:  # this gradient may be differentiated
        return padded.formula(along, mapping, reference.vjp, x, p, g)
    return engine.vjp(mapping, x, p, g, kept)


def _slope(
    name: str, mapping: Mapping, x: Tensor, p: Tensor, g: Tensor, along: SegmentsAlong, kept: Any = None
) -> Tensor:
    """`<g, dp / d parameter>` of each segment."""
    plain = plain_backward(g)
    engine = None if plain else choose_ragged("slope", mapping, g, along)
    if engine is not None:
        return engine.slope(mapping, name, x, p, g, kept)

    def of_rows(mapping: Mapping, x: Tensor, p: Tensor, g: Tensor) -> Tensor:
        return (reference if plain else choose("slope", mapping, p)).slope(mapping, name, x, p, g)

    return padded.each_formula(along, mapping, of_rows, x, p, g)


def _apply_forward(engine: SegmentsEngine, operands: Any, wants: Any) -> tuple[Tensor, Sequence[Tensor | None]]:
    x, mapping = operands
    p, kept = engine.forward_saving(mapping, x)
    return p, (p, x if mapping.needs_scores else None, kept)


def _apply_backward(engine: SegmentsEngine, operands: Any, saved: Any, grads: Any, wants: Any) -> Any:
    (mapping,), (p, x, kept), (g,) = operands, saved, grads
    given = mapping, p if x is None else x, p, g, engine.along, kept
    return _vjp(*given) if wants[0] else None, lambda name: _of_counted(_slope(name, *given), g, engine.along)


def _of_counted(slope: Tensor, g: Tensor, along: SegmentsAlong) -> Tensor:
    """The slope of each segment, [..., segments]; 0 for one of NaN whose gradient is 0."""
    if not batched(g) and known(slope) and not bool(slope.isnan().any()):
        return slope
    counts = (g != 0).to(slope.dtype).movedim(along.axis, -1)
    of_segment = torch.zeros_like(slope).index_add(-1, along.segments.index_of(g), counts)
    return torch.where(of_segment > 0, slope, torch.zeros_like(slope))


def _log_plain(engine: SegmentsEngine, operands: Any, kept: Any) -> Tensor:
    x, mapping = operands
    return padded.formula(engine.along, mapping, reference.log_forward, x)


def _loss_forward(engine: SegmentsEngine, operands: Any, wants: Any) -> tuple[Tensor, Sequence[Tensor | None]]:
    x, target_rank, mapping = operands
    loss = engine.index_loss(mapping, x, target_rank, save=True, slope=any(wants[2:]))
    slopes = _loss_slopes(wants[2:], mapping, x, target_rank, engine.along) if loss.slope is None else [loss.slope]
    return loss.value, (loss.saved, *slopes)


def _loss_backward(engine: SegmentsEngine, operands: Any, saved: Any, grads: Any, wants: Any) -> Any:
    (x, target_rank, mapping), (kept, *slopes), (g,) = operands, saved, grads
    if slopes and torch.is_grad_enabled():
        slopes = _loss_slopes(wants[2:], mapping, x, target_rank, engine.along)
    each = iter(slopes)
    by_scores = None
    if wants[0] and (plain_backward(g) or engine.refuse("vjp", mapping, g) is not None):
        by_scores = _loss_by_scores(mapping, x, target_rank, g, engine.along)
    elif wants[0]:
        by_scores = engine.index_loss_grad(mapping, x, target_rank, g, kept)
    return by_scores, None, lambda _: torch.where(g == 0, 0.0, next(each) * g)


def _loss_by_scores(mapping: Mapping, x: Tensor, target_rank: Tensor, g: Tensor, along: SegmentsAlong) -> Tensor:
    """The gradient of a loss, `g (p - y)`, in plain operations."""
    p = _p(mapping, x, along).movedim(along.axis, -1)
    index, rank = along.segments.index_of(x), along.segments.rank_of(x)
    target = target_rank.index_select(-1, index)
    p_y = g.to(p.dtype).index_select(-1, index) * (p - (rank == target).to(p.dtype))
    return torch.where(target >= 0, p_y, torch.zeros_like(p)).movedim(-1, along.axis)


def _loss_slopes(wanted: Any, mapping: Mapping, x: Tensor, target_rank: Tensor, along: SegmentsAlong) -> list[Tensor]:
    """The derivatives of a loss by those of the tensors of `params_of` that are wanted, [..., segments]; autograd records them."""
    names = [name for name, value in mapping.params().items() if isinstance(value, Tensor)]

    def slope(name: str) -> Tensor:
        of_rows = lambda mapping, x, p: reference.loss_slope(mapping, name, x, p)  # noqa: E731
        each = padded.each_formula(along, mapping, of_rows, x, _p(mapping, x, along))
        return torch.where(target_rank >= 0, each, torch.zeros_like(each))

    return [slope(name) for name, want in zip(names, wanted, strict=True) if want]


_RECORDED = {
    "forward": operation("SegmentApply", _apply_forward, _apply_backward, of_map=True, saves=0),
    "log_forward": operation("SegmentLog", log_forward, log_backward, _log_plain, of_map=True),
    "index_loss": operation("SegmentIndexLoss", _loss_forward, _loss_backward, of_map=True),
}


# -- opaque operations, for torch.compile -----------------------------------------------------------------------------------------------


def _opaque(mapping: Mapping, x: Tensor, along: SegmentsAlong) -> Tensor | None:
    spec = spec_of(mapping)
    if spec is None or transformed() or unlearned("forward", mapping, x) is not None:
        return None
    ptr, order = along.segments.ptr_of(x), along.segments.order_of(x)
    params = list(mapping.params().values())
    if recorded(x) or learns(mapping):
        return _traced((mapping.needs_scores, spec, along.axis), x, ptr, order, *params)
    return torch.ops.anymax.segments(x, ptr, order, params, spec, along.axis)


def _along(x: Tensor, ptr: Tensor, order: Tensor | None, axis: int) -> SegmentsAlong:
    """The segments of an opaque operation, now that their values are known."""
    bounds, places = (None if a is None else a.detach().cpu().numpy().astype(np.int64) for a in (ptr, order))
    return SegmentsAlong(check("segment_apply", Segments(bounds, places, x.shape[axis])), axis)


@torch.no_grad()
def _forward_op(x: Tensor, ptr: Tensor, order: Tensor | None, params: list[Tensor], spec: str, axis: int) -> Tensor:
    return _p(mapping_from(spec, params), x, _along(x, ptr, order, axis)).contiguous()


@torch.no_grad()
def _vjp_op(
    x: Tensor, p: Tensor, g: Tensor, ptr: Tensor, order: Tensor | None, params: list[Tensor], spec: str, axis: int
) -> Tensor:
    return _vjp(mapping_from(spec, params), x, p, g, _along(x, ptr, order, axis)).contiguous()


@torch.no_grad()
def _slope_op(
    x: Tensor, p: Tensor, g: Tensor, ptr: Tensor, order: Tensor | None, params: list[Tensor], spec: str, axis: int, number: int
) -> Tensor:  # fmt: skip
    """`<g, dp / d parameter>` of each segment for the parameter of this number in `Mapping.params`."""
    mapping = mapping_from(spec, params)
    return _slope(list(mapping.params())[number], mapping, x, p, g, _along(x, ptr, order, axis)).contiguous()


def _slope_fake(x: Tensor, p: Tensor, g: Tensor, ptr: Tensor, *others: Any) -> Tensor:
    axis = others[3]
    heads = (n for i, n in enumerate(p.shape) if i != axis)
    return p.new_empty((*heads, ptr.shape[0] - 1), dtype=wide_dtype(p, torch))


_OPERANDS = "Tensor x, Tensor p, Tensor g, Tensor ptr, Tensor? order, Tensor[] params, str spec, int axis"
opaque("segments(Tensor x, Tensor ptr, Tensor? order, Tensor[] params, str spec, int axis) -> Tensor", _forward_op)
opaque(f"segments_vjp({_OPERANDS}) -> Tensor", _vjp_op)
opaque(f"segments_slope({_OPERANDS}, int number) -> Tensor", _slope_op, _slope_fake)

_ops = torch.ops.anymax
_traced = traced_map("TracedSegments", _ops.segments, _ops.segments_vjp, _ops.segments_slope, layout=2)  # ptr and order
