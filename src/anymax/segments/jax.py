"""JAX: the CPU engine for segments as an operation of XLA programs, with derivatives of any order from the map's Jacobian.

On other devices, and where the engine lacks an operation, padded rows are used; softmax uses sums over segments.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import kernels
from .._array import Array, wide_name
from .._core.mapping import Mapping
from .._core.static import Static
from .._random.nodes import node_count
from ..autodiff.jax import BRIDGE as ROWS
from ..autodiff.jax import define, is_zero, static_of, with_zeros
from ..kernels import xla
from ..kernels.link import CODES, Link, link_of
from ..kernels.reference import ENGINE as reference
from ..kernels.xla import alike, outside_of_jit, to_front
from . import padded, reductions
from .bridge import SegmentBridge
from .call import SegmentCall, segments_first
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
        return jnp.moveaxis(reductions.softmax(segments, jnp.moveaxis(x, 0, -1)), -1, 0)
    return padded.formula(segments, mapping, 0, ROWS.apply, x)


def _plain_product(x: Array, p: Array, v: Array, *more: Array, static: Static, transposed: bool) -> Array:
    *params, ptr, order = more
    function = reference.vjp if transposed else reference.jvp
    return padded.formula(_segments(ptr, order, x.shape[0]), _mapping(static, params), 0, function, x, p, v)


# -- the engine's operation -------------------------------------------------------------------------------------------------------------

_served = Primitive("anymax_segments")  # (x) or ([x,] p, g), the parameters, ptr, order -> p or J^T g


def _bind(op: str, static: Static, params: Any, operands: tuple[Array, ...], ptr: Array, order: Array) -> Array:
    link: Any = link_of(static.mapping(dict(zip(static.names, params))))
    nodes = node_count(link.nodes, operands[0])
    facts = link._replace(params=None, nodes=nodes)
    return _served.bind(*alike(*operands, *params, ptr, order), op=op, static=static, link=facts)


def _formula(*operands: Array, op: str, static: Static, link: Link) -> Array:
    *given, ptr, order = operands
    count = len(given) - len(static.names)
    x, params = given[0], given[count:]
    if op == "forward":
        return _plain(static, dict(zip(static.names, params)), x, ptr, order)
    return _plain_product(x, *given[count - 2 : count], *params, ptr, order, static=static, transposed=True)


def _on_cpu(ctx: Any, *operands: Any, op: str, static: Static, link: Link) -> Any:
    if getattr(ctx.module_context.lowering_parameters, "for_export", False):
        return _lowered_formula(ctx, *operands, op=op, static=static, link=link)
    numbers = {"op": CODES[op], "map": link.code, "noise": link.noise, "nodes": link.nodes, "segments": 1}
    attributes = {k: np.int64(v) for k, v in (*numbers.items(), ("per_row", len(static.names)))}
    return jax.ffi.ffi_lowering(xla.TARGET)(ctx, *operands, param=np.float64(link.param), **attributes)


def _batch(primitive: Primitive, operands: Any, dims: Any, **facts: Any) -> Any:
    """Batched scores become more heads; batched segments are computed one after another."""
    if any(d is not None for d in dims[-2:]):
        return jax.lax.map(lambda a: primitive.bind(*a, **facts), tuple(to_front(operands, dims))), 0
    *entries, ptr, order = operands
    size = next(a.shape[d] for a, d in zip(entries, dims) if d is not None)
    last = [
        jnp.broadcast_to(a[..., None], (*a.shape, size)) if d is None else jnp.moveaxis(a, d, -1)
        for a, d in zip(entries, dims)
    ]
    return primitive.bind(*last, ptr, order, **facts), last[0].ndim - 1


_served.def_impl(outside_of_jit(_served))
_served.def_abstract_eval(lambda x, *others, **facts: x.update(weak_type=False))
batching.primitive_batchers[_served] = functools.partial(_batch, _served)
_lowered_formula: Any = mlir.lower_fun(_formula, multiple_results=False)
mlir.register_lowering(_served, _lowered_formula)
mlir.register_lowering(_served, _on_cpu, platform="cpu")


# -- derivatives ------------------------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply(static: Static, params: dict[str, Array], x: Array, ptr: Array, order: Array) -> Array:
    return _bind("forward", static, params.values(), (x,), ptr, order)


@functools.partial(_apply.defjvp, symbolic_zeros=True)
def _apply_rule(static: Static, primals: Any, tangents: Any) -> Any:
    (params, x, ptr, order), (dparams, dx, _, _) = primals, tangents
    mapping = static.mapping(params)
    if mapping.traced or not all(map(is_zero, dparams.values())):
        f = lambda params, x: _plain(static, params, x, ptr, order)  # noqa: E731
        return jax.jvp(f, (params, x), with_zeros((dparams, dx), (params, x)))
    p = _apply(static, params, x, ptr, order)
    scores = x if mapping.needs_scores else p
    return p, _product.bind(scores, p, dx, *params.values(), ptr, order, static=static, transposed=False)


_product = Primitive("anymax_segments_product")  # J v, or J^T v: linear in v


def _product_value(x: Array, p: Array, v: Array, *more: Array, static: Static, transposed: bool) -> Array:
    *params, ptr, order = more
    mapping = static.mapping(dict(zip(static.names, params)))
    if transposed or mapping.facts.has_potential:  # a potential makes the Jacobian symmetric
        return _bind("vjp", static, params, (x, p, v) if mapping.needs_scores else (p, v), ptr, order)
    return _plain_product(x, p, v, *more, static=static, transposed=False)


def _product_shape(x: Any, p: Any, v: Any, *more: Any, **facts: Any) -> Any:
    return v.update(weak_type=False)


def _product_jvp(primals: Any, tangents: Any, **facts: Any) -> Any:
    x, p, v, *params, ptr, order = primals
    dx, dp, dv, *dparams, _, _ = tangents
    total = dv if is_zero(dv) else _product.bind(x, p, dv, *params, ptr, order, **facts)
    if not all(map(is_zero, (dx, dp, *dparams))):
        changes = [ad.instantiate_zeros(t) for t in (dx, dp, *dparams)]
        f = lambda x, p, *params: _plain_product(x, p, v, *params, ptr, order, **facts)  # noqa: E731
        total = ad.add_tangents(total, jax.jvp(f, (x, p, *params), tuple(changes))[1])
    return _product.bind(*primals, **facts), total


def _product_transpose(cotangent: Any, x: Any, p: Any, v: Any, *more: Any, transposed: bool, **facts: Any) -> Any:
    if not is_zero(cotangent):
        cotangent = _product.bind(x, p, cotangent, *more, transposed=not transposed, **facts)
    return [None, None, cotangent, *[None] * len(more)]


define(_product, _product_value, _product_shape, _product_jvp, _product_transpose)
batching.primitive_batchers[_product] = functools.partial(_batch, _product)
_compiled = jax.jit(_apply, static_argnums=(0,))


class JaxSegments(SegmentBridge):
    def apply(self, call: SegmentCall) -> Array | None:
        mapping, x = call.mapping, call.x
        if not x.size or not call.segments.num_segments or not kernels.choose("forward", mapping, x).compiled:
            return None
        ptr, order = (call.segments.placed(name, x) for name in ("ptr", "order"))
        order = jnp.zeros((0,), ptr.dtype) if order is None else order
        x = jnp.moveaxis(x, call.axis, 0)
        wide = wide_name(x)
        shape = (call.segments.num_segments, *x.shape[1:])
        params = {name: jnp.broadcast_to(segments_first(a), shape).astype(wide) for name, a in mapping.params().items()}
        x, *values, ptr, order = alike(x, *params.values(), ptr, order)
        return jnp.moveaxis(_compiled(static_of(mapping), dict(zip(params, values)), x, ptr, order), 0, call.axis)


BRIDGE = JaxSegments()
