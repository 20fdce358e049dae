"""JAX: the CPU engine for segments as an operation of XLA programs, with derivatives of any order from the map's Jacobian.

On other devices, and where the engine lacks an operation, padded rows are used; softmax uses sums over segments.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import kernels
from .._array import Array, alike, as_dtype, from_last, stop_gradient, upcast, wide_name
from .._core.mapping import Mapping
from .._core.static import Static
from ..autodiff.jax import BRIDGE as ROWS
from ..autodiff.jax import differentiate, shape_of_vector, static_of
from ..kernels.engine import SegmentsAlong
from ..kernels.jax_primitives import by_library, handler_attributes, linear_primitive, link_for, to_front
from ..kernels.link import Link
from ..kernels.reference import ENGINE as reference
from . import padded
from .layout import Segments


class SegmentOperands(NamedTuple):
    """The segments of entries along the first axis, as operands of a program."""

    ptr: Array
    order: Array  # empty if the entries are sorted
    index: Any = None  # empty if no parameter needs it

    def along(self, x: Array) -> SegmentsAlong:
        n = x.shape[0]
        return SegmentsAlong(Segments(self.ptr, self.order if self.order.shape[0] == n else None, n), 0)

    def spread(self, a: Array) -> Array:
        """What each segment has, for each of its entries."""
        return a[jnp.minimum(self.index, max(self.ptr.shape[0] - 2, 0))]


# -- in plain operations; entries first, then heads; in parameters segments first ----------------------------------------------------------


def _mapping(static: Static, params: Any) -> Mapping:
    """The mapping for padded rows, with the segments last."""
    return static.mapping({name: jnp.moveaxis(a, 0, -1) for name, a in zip(static.names, params)})


def _plain(static: Static, params: dict[str, Array], x: Array, segments: SegmentOperands) -> Array:
    mapping = _mapping(static, params.values())
    if mapping.is_softmax:
        return _softmax(segments.along(x), x)
    return padded.formula(segments.along(x), mapping, ROWS.apply, x)


def _plain_product(x: Array, p: Array, v: Array, *more: Array, static: Static, transposed: bool) -> Array:
    *params, ptr, order = more
    function = reference.vjp if transposed else reference.jvp
    return padded.formula(SegmentOperands(ptr, order).along(x), _mapping(static, params), function, x, p, v)


def _softmax(along: SegmentsAlong, x: Array) -> Array:
    """p(x) by sums over segments: one program for all lengths."""
    _, e, z, index = _terms(along, x)
    return as_dtype(jnp.moveaxis(e / z[index], 0, along.axis), x.dtype, jnp)


def _log_softmax(along: SegmentsAlong, x: Array) -> Array:
    y, _, z, index = _terms(along, x)
    return as_dtype(jnp.moveaxis(y - jnp.log(z)[index], 0, along.axis), x.dtype, jnp)


def _terms(along: SegmentsAlong, x: Array) -> tuple[Array, Array, Array, Any]:
    """Scores minus the maximum of their segment, their exponentials, the sums of these, and the segment of each entry; entries first."""
    segments, x = along.segments, jnp.moveaxis(upcast(x, jnp), along.axis, 0)
    index, count = segments.index_of(x), segments.num_segments + 1  # the last one for entries without a segment
    high = stop_gradient(jax.ops.segment_max(x, index, count))
    high = jnp.where(high > -jnp.inf, high, 0.0)  # 0 if empty or all masked; also for NaN, which x itself keeps
    high = high.at[-1].set(jnp.nan)
    y = x - high[index]
    e = jnp.exp(y)
    z = jax.ops.segment_sum(e, index, count)
    return y, e, jnp.where(z == 0, 1.0, z), index


# -- the engine's operation: (x) or ([x,] p, g), the parameters, ptr, order -> p or J^T g ---


def _bind(op: str, static: Static, params: Any, operands: tuple[Array, ...], ptr: Array, order: Array) -> Array:
    link = link_for(static.mapping_of(params), operands[0])
    return _engine.bind(*alike(*operands, *params, ptr, order), op=op, static=static, link=link)[0]


def _formula(*operands: Array, op: str, static: Static, link: Link) -> list[Array]:
    *arrays, ptr, order = operands
    count = len(arrays) - len(static.names)
    x, params = arrays[0], arrays[count:]
    if op == "forward":
        return [_plain(static, dict(zip(static.names, params)), x, SegmentOperands(ptr, order))]
    return [_plain_product(x, *arrays[count - 2 : count], *params, ptr, order, static=static, transposed=True)]


def _attributes(**facts: Any) -> dict[str, Any]:
    return {**handler_attributes(**facts), "segments": np.int64(1)}


def _batch(primitive: Any, operands: Any, dims: Any, **facts: Any) -> Any:
    """Batched scores become more heads; batched segments are computed one after another."""
    if any(d is not None for d in dims[-2:]):
        return jax.lax.map(lambda a: primitive.bind(*a, **facts), tuple(to_front(operands, dims))), [0]
    *entries, ptr, order = operands
    size = next(a.shape[d] for a, d in zip(entries, dims) if d is not None)
    last = [
        jnp.broadcast_to(a[..., None], (*a.shape, size)) if d is None else jnp.moveaxis(a, d, -1)
        for a, d in zip(entries, dims)
    ]
    return primitive.bind(*last, ptr, order, **facts), [last[0].ndim - 1]


_engine = by_library(
    "anymax_segments", lambda x, *others, **facts: [x.update(weak_type=False)], _formula, _attributes, _batch
)


# -- derivatives ------------------------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply(static: Static, params: dict[str, Array], x: Array, segments: SegmentOperands) -> Array:
    return _bind("forward", static, params.values(), (x,), segments.ptr, segments.order)


def _score_change(
    static: Static, params: dict[str, Array], x: Array, name: str, v: Array, segments: SegmentOperands
) -> Array:
    change = lambda mapping, x, v: mapping.score_change(name, upcast(x, jnp), jnp) * v  # noqa: E731
    mapping = _mapping(static, params.values())
    return padded.formula(segments.along(x), mapping, change, x, segments.spread(v)).astype(x.dtype)


def _param_jvp(
    static: Static, params: dict[str, Array], x: Array, p: Array, name: str, v: Array, segments: SegmentOperands
) -> Array:
    """By sums over segments, or on padded rows."""
    if name not in static.mapping(params).parts.learns_by_sums:
        change = lambda mapping, x, p, v: reference.param_jvp(mapping, name, x, p, v)  # noqa: E731
        return padded.formula(segments.along(p), _mapping(static, params.values()), change, x, p, segments.spread(v))
    # a parameter has a number for each entry
    entries: Any = static.mapping({k: segments.spread(a) for k, a in params.items()})
    index, count = segments.index, segments.ptr.shape[0] - 1
    owned = (index < count).reshape(-1, *[1] * (p.ndim - 1))
    q = jnp.where(owned, upcast(p, jnp), 0.0)  # not NaN where an entry has no segment

    def totals(parts: list[Array], xp: Any) -> list[Array]:
        is_sorted = not segments.order.shape[0]
        return [segments.spread(jax.ops.segment_sum(a, index, count, indices_are_sorted=is_sorted)) for a in parts]

    change = entries.param_jvp(name, q, q, segments.spread(v), jnp, totals)
    return as_dtype(change, p.dtype, jnp)


def _product_value(x: Array, p: Array, v: Array, *more: Array, static: Static, transposed: bool) -> Array:
    *params, ptr, order = more
    mapping = static.mapping_of(params)
    if transposed or mapping.facts.has_potential:  # a potential makes the Jacobian symmetric
        return _bind("vjp", static, params, (x, p, v) if mapping.needs_scores else (p, v), ptr, order)
    return _plain_product(x, p, v, *more, static=static, transposed=False)


_product = linear_primitive("anymax_segments_product", 2, shape_of_vector, _product_value, _plain_product, _batch)


def _by_scores(
    static: Static, params: dict[str, Array], x: Array, p: Array, dx: Array, segments: SegmentOperands
) -> Array:
    return _product(x, p, dx, *params.values(), segments.ptr, segments.order, static=static, transposed=False)


differentiate(_apply, _plain, _score_change, _param_jvp, _by_scores)
_compiled = jax.jit(_apply, static_argnums=(0,))


def unpadded(op: str, mapping: Mapping, x: Array, along: SegmentsAlong, *target_rank: Array) -> Array | None:
    there = op == "forward" and x.size and along.segments.num_segments
    if there and kernels.choose("forward", mapping, x).compiled:
        return _by_engine(mapping, x, along)
    plain = {"forward": _softmax, "log_forward": _log_softmax}.get(op) if mapping.is_softmax else None
    return plain and plain(along, x)


def _by_engine(mapping: Mapping, x: Array, along: SegmentsAlong) -> Array:
    segments, axis = along
    ptr, order = segments.ptr_of(x), segments.order_of(x)
    order = jnp.zeros((0,), ptr.dtype) if order is None else order
    x = jnp.moveaxis(x, axis, 0)
    dtype = wide_name(x)
    shape = (segments.num_segments, *x.shape[1:])
    first = {k: from_last(a, 0, jnp) if a.ndim else a for k, a in mapping.params().items()}
    params = {k: jnp.broadcast_to(a, shape).astype(dtype) for k, a in first.items()}
    index = segments.index_of(x) if params else jnp.zeros((0,), ptr.dtype)
    x, *values, ptr, order, index = alike(x, *params.values(), ptr, order, index)
    out = _compiled(static_of(mapping), dict(zip(params, values)), x, SegmentOperands(ptr, order, index))
    return jnp.moveaxis(out, 0, axis)
