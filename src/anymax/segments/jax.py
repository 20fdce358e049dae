"""JAX: the CPU engine for segments as an operation of XLA programs, with derivatives of any order from the map's Jacobian.

On other devices, and where the engine lacks an operation, padded rows are used; softmax uses sums over segments.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import kernels
from .._array import Array, alike, as_dtype, from_last, stop_gradient, to_last, upcast, wide_name
from .._core.mapping import Mapping, scales_scores
from .._core.static import Static
from ..autodiff.jax import BRIDGE as ROWS
from ..autodiff.jax import shape_of_vector, static_of, with_zeros
from ..kernels.jax_primitives import by_library, handler_attributes, is_zero, linear_primitive, link_for, to_front
from ..kernels.link import Link
from ..kernels.reference import ENGINE as reference
from . import padded
from .bridge import SegmentBridge
from .call import SegmentCall
from .layout import Segments

# -- in plain operations; entries first, then heads; in parameters segments first ----------------------------------------------------------


def _segments(ptr: Array, order: Array, n: int) -> Segments:
    return Segments(ptr, order if order.shape[0] == n else None, n)


def _mapping(static: Static, params: Any) -> Mapping:
    """The mapping for padded rows, with the segments last."""
    return static.mapping({name: jnp.moveaxis(a, 0, -1) for name, a in zip(static.names, params)})


def _plain(static: Static, params: dict[str, Array], x: Array, ptr: Array, order: Array) -> Array:
    segments, mapping = _segments(ptr, order, x.shape[0]), _mapping(static, params.values())
    if mapping.is_softmax:
        return jnp.moveaxis(_softmax(segments, jnp.moveaxis(x, 0, -1)), -1, 0)
    return padded.formula(segments, mapping, 0, ROWS.apply, x)


def _plain_product(x: Array, p: Array, v: Array, *more: Array, static: Static, transposed: bool) -> Array:
    *params, ptr, order = more
    function = reference.vjp if transposed else reference.jvp
    return padded.formula(_segments(ptr, order, x.shape[0]), _mapping(static, params), 0, function, x, p, v)


def _softmax(segments: Segments, x: Array) -> Array:
    """p of x [..., entries], by sums over segments: one program for all lengths."""
    _, e, z, index = _terms(segments, upcast(x, jnp))
    return as_dtype(to_last(e / z[index], 0, jnp), x.dtype, jnp)


def _log_softmax(segments: Segments, x: Array) -> Array:
    y, _, z, index = _terms(segments, upcast(x, jnp))
    return as_dtype(to_last(y - jnp.log(z)[index], 0, jnp), x.dtype, jnp)


def _terms(segments: Segments, x: Array) -> tuple[Array, Array, Array, Any]:
    """Scores minus the maximum of their segment, their exponentials, the sums of these, and the segment of each entry; entries first."""
    x = from_last(x, 0, jnp)
    index, count = segments.placed("index", x), segments.num_segments + 1  # the last one for entries without a segment
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
        return [_plain(static, dict(zip(static.names, params)), x, ptr, order)]
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
def _apply(static: Static, params: dict[str, Array], x: Array, ptr: Array, order: Array, index: Array) -> Array:
    """index: the segment of each entry, which the derivative by a parameter needs; empty without parameters."""
    return _bind("forward", static, params.values(), (x,), ptr, order)


@functools.partial(_apply.defjvp, symbolic_zeros=True)
def _apply_rule(static: Static, primals: Any, tangents: Any) -> Any:
    (params, x, ptr, order, index), (dparams, dx, _, _, _) = primals, tangents
    mapping = static.mapping(params)
    changes = {name: change for name, change in dparams.items() if not is_zero(change)}
    if mapping.traced or not changes.keys() <= set(mapping.learns):
        f = lambda params, x: _plain(static, params, x, ptr, order)  # noqa: E731
        return jax.jvp(f, (params, x), with_zeros((dparams, dx), (params, x)))
    p = _apply(static, params, x, ptr, order, index)
    scores = x if mapping.needs_scores else p
    if scales_scores(mapping):
        for name, change in changes.items():
            moved = _moved_scores(static, params, name, x, change, ptr, order, index)
            dx = moved if is_zero(dx) else dx + moved
        changes = {}
    by_params = [_by_param(static, params, name, scores, p, v, ptr, order, index) for name, v in changes.items()]
    if is_zero(dx):
        return p, functools.reduce(jnp.add, by_params, jnp.zeros_like(p))
    by_scores = _product(scores, p, dx, *params.values(), ptr, order, static=static, transposed=False)
    return p, functools.reduce(jnp.add, by_params, by_scores)


def _moved_scores(
    static: Static, params: dict[str, Array], name: str, x: Array, v: Array, ptr: Array, order: Array, index: Array
) -> Array:
    """The change of the scores that does what a change of a parameter by v does, on padded rows."""
    segments = _segments(ptr, order, x.shape[0])
    change = lambda mapping, x, v: mapping.score_change(name, upcast(x, jnp), jnp) * v  # noqa: E731
    moved = padded.formula(segments, _mapping(static, params.values()), 0, change, x, _of_entries(v, segments, index))
    return moved.astype(x.dtype)


def _of_entries(a: Array, segments: Segments, index: Array) -> Array:
    """What each segment has, for each of its entries."""
    return a[jnp.minimum(index, max(segments.num_segments - 1, 0))]


def _by_param(
    static: Static, params: dict[str, Array], name: str, x: Array, p: Array, v: Array, ptr: Array, order: Array,
    index: Array,
) -> Array:  # fmt: skip
    """The change of p where a parameter changes by v, [segments, heads ...], by sums over segments or on padded rows."""
    segments = _segments(ptr, order, p.shape[0])
    count = segments.num_segments
    spread = lambda a: _of_entries(a, segments, index)  # noqa: E731
    if name not in static.mapping(params).parts.learns_by_sums:
        change = lambda mapping, x, p, v: reference.param_jvp(mapping, name, x, p, v)  # noqa: E731
        return padded.formula(segments, _mapping(static, params.values()), 0, change, x, p, spread(v))
    entries: Any = static.mapping({k: spread(a) for k, a in params.items()})  # a parameter has a number for each entry
    owned = (index < count).reshape(-1, *[1] * (p.ndim - 1))
    q = jnp.where(owned, upcast(p, jnp), 0.0)  # not NaN where an entry has no segment

    def totals(parts: list[Array], xp: Any) -> list[Array]:
        return [spread(jax.ops.segment_sum(a, index, count, indices_are_sorted=segments.order is None)) for a in parts]

    change = entries.param_jvp(name, q, q, spread(v), jnp, totals)
    return as_dtype(change, p.dtype, jnp)


def _product_value(x: Array, p: Array, v: Array, *more: Array, static: Static, transposed: bool) -> Array:
    *params, ptr, order = more
    mapping = static.mapping_of(params)
    if transposed or mapping.facts.has_potential:  # a potential makes the Jacobian symmetric
        return _bind("vjp", static, params, (x, p, v) if mapping.needs_scores else (p, v), ptr, order)
    return _plain_product(x, p, v, *more, static=static, transposed=False)


_product = linear_primitive("anymax_segments_product", 2, shape_of_vector, _product_value, _plain_product, _batch)
_compiled = jax.jit(_apply, static_argnums=(0,))


class JaxSegments(SegmentBridge):
    def apply(self, call: SegmentCall) -> Array | None:
        mapping, x = call.mapping, call.x
        if not x.size or not call.segments.num_segments or not kernels.choose("forward", mapping, x).compiled:
            return from_last(_softmax(call.segments, call.rows), call.axis, jnp) if mapping.is_softmax else None
        ptr, order = (call.segments.placed(name, x) for name in ("ptr", "order"))
        order = jnp.zeros((0,), ptr.dtype) if order is None else order
        x = jnp.moveaxis(x, call.axis, 0)
        dtype = wide_name(x)
        shape = (call.segments.num_segments, *x.shape[1:])
        first = {k: from_last(a, 0, jnp) if a.ndim else a for k, a in mapping.params().items()}
        params = {k: jnp.broadcast_to(a, shape).astype(dtype) for k, a in first.items()}
        index = call.segments.placed("index", x) if params else jnp.zeros((0,), ptr.dtype)
        x, *values, ptr, order, index = alike(x, *params.values(), ptr, order, index)
        out = _compiled(static_of(mapping), dict(zip(params, values)), x, ptr, order, index)
        return jnp.moveaxis(out, 0, call.axis)

    def log(self, call: SegmentCall) -> Array | None:
        if not call.mapping.is_softmax:
            return None
        return from_last(_log_softmax(call.segments, upcast(call.rows, jnp)), call.axis, jnp)


BRIDGE = JaxSegments()
