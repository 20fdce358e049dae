"""JAX: an engine computes the values, the map's Jacobian gives the derivatives, of any order.

`jax.custom_jvp` has the rule `dp = J(x, p) dx`, where p is the function itself. So jit, grad, jvp, vmap, hessian and shard_map
work, and no iteration is differentiated. J times a vector is a primitive, `_product`. It is linear in the vector; to transpose it
swaps `vjp` and `jvp`; its derivatives in x and p are those of the map's formula. A parameter that is differentiated adds
`Mapping.param_jvp` of its change; where the map has none, the rule is `jax.jvp` of `Mapping.differentiable`. Calls outside jit are
compiled too, once for each mapping and shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .. import kernels
from .._array import Array, alike, upcast, wide_name
from .._core.mapping import Mapping, loss_learns, scales_scores
from .._core.static import Static
from ..kernels import xla, xla_rows
from ..kernels.engine import BELOW, Engine, slope_by_scale
from ..kernels.jax_primitives import is_zero, linear_primitive
from ..kernels.link import Link
from ..kernels.linked import link_of
from ..kernels.reference import ENGINE as reference
from .bridge import BRIDGES, Bridge


def with_zeros(tangents: Any, primals: Any) -> Any:
    """The tangents, with arrays of zeros for symbolic zeros."""
    return jax.tree.map(lambda t, a: _zeros_like(a) if is_zero(t) else t, tangents, primals, is_leaf=is_zero)


def _zeros_like(a: Array) -> Array:
    """Zeros that vary along the same mesh axes as `a`; before JAX 0.8 new zeros did not."""
    return alike(jnp.zeros_like(a), a)[0]


# -- p(x) ------------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply(static: Static, params: dict[str, Array], x: Array) -> Array:
    mapping = static.mapping(params)
    return kernels.choose("forward", mapping, x).forward(mapping, x)


def differentiate(apply: Any, plain: Any, score_change: Any, param_jvp: Any, product: Any) -> None:
    """Give apply(static, params, x, *layout), which is p(x), its rule. `layout` says where the rows lie; it has no derivative.

    Parameters
    ----------
    plain
        ``plain(static, params, x, *layout)`` is p(x) by operations that JAX differentiates.
    score_change
        ``score_change(static, params, x, name, change, *layout)`` is the change of the scores that does what one of a parameter does.
    param_jvp
        ``param_jvp(static, params, scores, p, name, change, *layout)`` is the change of p where a parameter changes.
    product
        ``product(static, params, scores, p, dx, *layout)`` is the change of p where the scores change.
    """

    def rule(static: Static, primals: Any, tangents: Any) -> Any:
        (params, x, *layout), (dparams, dx, *_) = primals, tangents
        mapping = static.mapping(params)
        changes = {name: change for name, change in dparams.items() if not is_zero(change)}
        if mapping.traced or not changes.keys() <= set(mapping.learns):
            f = lambda params, x: plain(static, params, x, *layout)  # noqa: E731
            return jax.jvp(f, (params, x), with_zeros((dparams, dx), (params, x)))
        p = apply(static, params, x, *layout)
        scores = x if mapping.needs_scores else p
        if scales_scores(mapping):
            for name, change in changes.items():
                by_name = score_change(static, params, x, name, change, *layout)
                dx = by_name if is_zero(dx) else dx + by_name
            changes = {}
        by_params = [param_jvp(static, params, scores, p, name, change, *layout) for name, change in changes.items()]
        if is_zero(dx):
            return p, functools.reduce(jnp.add, by_params, _zeros_like(p))
        return p, functools.reduce(jnp.add, by_params, product(static, params, scores, p, dx, *layout))

    apply.defjvp(rule, symbolic_zeros=True)


def _plain(static: Static, params: dict[str, Array], x: Array) -> Array:
    return reference.differentiable(static.mapping(params), x)


def _score_change(static: Static, params: dict[str, Array], x: Array, name: str, change: Array) -> Array:
    return (static.mapping(params).score_change(name, upcast(x, jnp), jnp) * change).astype(x.dtype)


# -- the Jacobian times a vector -------------------------------------------------------------------------------------


def _by_scores(static: Static, params: dict[str, Array], x: Array, p: Array, dx: Array) -> Array:
    engine = kernels.choose("vjp", static.mapping(params), x)
    return _product(x, p, dx, *_beside(x, params), static=static, engine=engine, transposed=False)


def _beside(x: Array, params: dict[str, Array]) -> list[Array]:
    """The parameters, with one value per row, or one per class."""
    return [jnp.broadcast_to(a, (*x.shape[:-1], a.shape[-1] if a.ndim else 1)) for a in params.values()]


def _product_value(
    x: Array, p: Array, v: Array, *params: Array, static: Static, engine: Engine, transposed: bool
) -> Array:
    mapping = static.mapping_of(params)
    if transposed or mapping.facts.has_potential:  # its Jacobian is symmetric
        return engine.vjp(mapping, x, p, v)
    return reference.jvp(mapping, x, p, v)


def _product_plain(
    x: Array, p: Array, v: Array, *params: Array, static: Static, engine: Engine, transposed: bool
) -> Array:
    mapping = static.mapping_of(params)
    return (reference.vjp if transposed else reference.jvp)(mapping, x, p, v)


def shape_of_vector(x: Any, p: Any, v: Any, *others: Any, **facts: Any) -> Any:
    return v.update(weak_type=False)


_product = linear_primitive("anymax_product", 2, shape_of_vector, _product_value, _product_plain)


# -- the derivative by a parameter, times its change -------------------------------------------------------------------


def _param_jvp(static: Static, params: dict[str, Array], scores: Array, p: Array, name: str, change: Array) -> Array:
    engine = kernels.choose("slope", static.mapping(params), p)
    size = p.shape[-1] if name in static.kind.per_class else 1
    change = jnp.broadcast_to(change, (*p.shape[:-1], size)).astype(wide_name(p))
    together = alike(scores, p, change, *_beside(p, params))
    return _param_product(*together, static=static, engine=engine, name=name, transposed=False)


def _param_value(
    x: Array, p: Array, v: Array, *params: Array, static: Static, engine: Engine, name: str, transposed: bool
) -> Array:
    mapping = static.mapping_of(params)
    return (engine.slope if transposed else reference.param_jvp)(mapping, name, x, p, v)


def _param_plain(
    x: Array, p: Array, v: Array, *params: Array, static: Static, engine: Engine, name: str, transposed: bool
) -> Array:
    return _param_value(x, p, v, *params, static=static, engine=reference, name=name, transposed=transposed)


def _param_shape(
    x: Any, p: Any, v: Any, *others: Any, static: Static, name: str, transposed: bool, **facts: Any
) -> Any:
    if not transposed:
        return p.update(weak_type=False)
    size = p.shape[-1] if name in static.kind.per_class else 1
    return p.update(shape=(*p.shape[:-1], size), dtype=jnp.dtype(wide_name(p)), weak_type=False)


_param_product = linear_primitive("anymax_param_product", 2, _param_shape, _param_value, _param_plain)
differentiate(_apply, _plain, _score_change, _param_jvp, _by_scores)


# -- the loss --------------------------------------------------------------------------------------------------------


def _plain_loss(static: Static, params: dict[str, Array], x: Array, y: Array) -> Array:
    return reference.loss(static.mapping(params), x, _apply(static, params, x), y)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _loss(static: Static, params: dict[str, Array], x: Array, y: Array) -> Array:
    return _plain_loss(static, params, x, y)


@functools.partial(_loss.defjvp, symbolic_zeros=True)
def _loss_rule(static: Static, primals: Any, tangents: Any) -> Any:
    """The gradient is p - y, or that of plain operations on the scores where the loss needs no p."""
    (params, x, y), (dparams, dx, dy) = primals, tangents
    mapping = static.mapping(params)
    changes = {name: change for name, change in dparams.items() if not is_zero(change)}
    closed = changes.keys() <= set(loss_learns(mapping)) and is_zero(dy)
    if static.kind.loss_from_scores or mapping.traced or not closed:
        return jax.jvp(functools.partial(_plain_loss, static), primals, with_zeros(tangents, primals))
    p = _apply(static, params, x)
    value = reference.loss(mapping, x, p, y)
    by_params = [_times(reference.loss_slope(mapping, name, x, p), change, value) for name, change in changes.items()]
    if is_zero(dx):
        return value, functools.reduce(jnp.add, by_params, _zeros_like(value))
    gradient = jnp.where(x == -jnp.inf, 0.0, p - y)
    return value, functools.reduce(jnp.add, by_params, jnp.sum(gradient * dx, axis=-1, keepdims=True))


def _times(slope: Array, change: Array, value: Array) -> Array:
    """slope times the change of a parameter, in the dtype of the value."""
    return (slope * change).astype(value.dtype)


# -- the loss of class indices, in one pass ------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _index(static: Static, params: dict[str, Array], x: Array, index: Array) -> tuple[Array, Array]:
    """The loss of each row, and a constant that its gradient needs from the forward pass."""
    loss = xla.ENGINE.index_loss(static.mapping(params), x, index, save=True)
    assert loss is not None
    return loss.value, loss.saved


@functools.partial(_index.defjvp, symbolic_zeros=True)
def _index_rule(static: Static, primals: Any, tangents: Any) -> Any:
    (params, x, index), (dparams, dx, _) = primals, tangents
    mapping = static.mapping(params)
    changes = {name: change for name, change in dparams.items() if not is_zero(change)}
    if not changes.keys() <= set(loss_learns(mapping)):
        f = lambda params, x: _composed(static, params, x, index)  # noqa: E731
        change = jax.jvp(f, (params, x), with_zeros((dparams, dx), (params, x)))[1]
        value, tau = _index(static, params, x, index)
        return (value, tau), (change, _zeros_like(tau))
    value, tau, *slopes = _index_and_slopes(static, tuple(changes), params, x, index)
    change = _zeros_like(value)
    if not is_zero(dx):
        change = _slope(x, tau, index, dx, *_beside(x, params), static=static, transposed=False)
    for slope, by in zip(slopes, changes.values()):
        change = change + jnp.squeeze(_times(slope[..., None], by, value), -1)
    return (value, tau), (change, _zeros_like(tau))


def _index_and_slopes(static: Static, names: tuple[str, ...], params: dict[str, Array], x: Array, index: Array) -> Any:
    """What `_index` gives, and the derivative of each row's loss by the parameters of these names."""
    mapping = static.mapping(params)
    if names and not scales_scores(mapping):
        return _index_and_slope(static, params, x, index)
    loss = _index(static, params, x, index)
    if not names:
        return loss
    p = _apply(static, params, upcast(x, jnp))
    largest = _index(static, params, x, jnp.argmax(x, axis=-1))[0]
    slopes = [slope_by_scale(mapping, name, x, p, largest)[..., 0] for name in names]
    return *loss, *(jnp.where(index >= 0, slope, 0.0) for slope in slopes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _index_and_slope(static: Static, params: dict[str, Array], x: Array, index: Array) -> tuple[Array, Array, Array]:
    """What `_index` gives, and the derivative by the map's only parameter, in one pass."""
    loss = xla.ENGINE.index_loss(static.mapping(params), x, index, save=True, slope=True)
    assert loss is not None
    assert loss.slope is not None
    return loss.value, loss.saved, loss.slope


@_index_and_slope.defjvp
def _index_and_slope_rule(static: Static, primals: Any, tangents: Any) -> Any:
    params, x, index = primals
    (name,) = params

    def slope(params: dict[str, Array], x: Array) -> Array:
        p = _apply(static, params, upcast(x, jnp))
        return xla_rows.loss_slope(static.mapping(params), name, x, p, index)

    value, tau, by_param = _index_and_slope(static, params, x, index)
    by_value = jax.jvp(lambda params, x: _index(static, params, x, index)[0], (params, x), tangents[:2])[1]
    by_slope = jax.jvp(slope, (params, x), tangents[:2])[1]
    return (value, tau, by_param), (by_value, _zeros_like(tau), by_slope.astype(by_param.dtype))


def _composed(static: Static, params: dict[str, Array], x: Array, index: Array) -> Array:
    loss = lambda mapping, x, p, y: _loss(static, params, x, y)  # noqa: E731
    return xla_rows.plain_loss(static.mapping(params), x, x, index, loss)


def _slope_plain(
    x: Array, tau: Array, index: Array, v: Array, *params: Array, static: Static, transposed: bool
) -> Array:
    p = _apply(static, dict(zip(static.names, params)), upcast(x, jnp))
    if transposed:
        return xla_rows.plain_slope(x, p, index, v)
    slope = xla_rows.plain_slope(upcast(x, jnp), p, index, jnp.ones_like(p[..., 0]))
    return jnp.sum(slope * upcast(v, jnp), axis=-1)


def _slope_value(
    x: Array, tau: Array, index: Array, v: Array, *params: Array, static: Static, transposed: bool
) -> Array:
    if transposed:
        return xla.ENGINE.index_loss_grad(static.mapping_of(params), x, index, v, tau)
    return _slope_plain(x, tau, index, v, *params, static=static, transposed=False)


def _slope_shape(x: Any, tau: Any, *others: Any, transposed: bool, **facts: Any) -> Any:
    return (x if transposed else tau).update(weak_type=False)


# <p - y, v> for each row, transposed v (p - y); the backward kernel recomputes p from the scores
_slope = linear_primitive("anymax_slope", 3, _slope_shape, _slope_value, _slope_plain)


def _threshold(static: Static, params: dict[str, Array], x: Array) -> Array:
    return reference.threshold(static.mapping(params), x)


_compiled = jax.jit(_apply, static_argnums=(0,))
_compiled_threshold = jax.jit(_threshold, static_argnums=(0,))
_compiled_loss = jax.jit(_loss, static_argnums=(0,))
_compiled_index = jax.jit(_index, static_argnums=(0,))


def static_of(mapping: Mapping) -> Static:
    return Static(mapping, kernels.forced())


def _run(program: Callable[..., Any], mapping: Mapping, *arrays: Array) -> Any:
    """The result of a program of (static, parameters, *arrays)."""
    params = mapping.params()
    together = alike(*arrays, *params.values())
    arrays, values = together[: len(arrays)], together[len(arrays) :]
    return program(static_of(mapping), dict(zip(params, values)), *arrays)


def _usual(value: Any) -> bool:
    """True for numbers that people type: one decimal, quarters and thirds. Also near 1, where fp32 has too few digits."""
    if type(value) is not float or not 1e-3 < abs(value - 1.0) < 1e3:
        return True
    return any(abs(value * of - round(value * of)) < 1e-12 for of in (10, 4, 3))


def _opened(mapping: Mapping, x: Array) -> Mapping:
    """Outside jit, the map with an unusual number as an array, so that one compiled program works for all such numbers."""
    name = mapping.array_field
    if name is None or _usual(value := getattr(mapping, name)):
        return mapping
    while isinstance(x, Tracer):  # the value inside a tracer of grad or vmap
        x = getattr(x, "primal", getattr(x, "val", None))
    if not isinstance(x, jax.Array):
        return mapping
    return mapping.laid_out(**{name: jnp.asarray(value)})


# -- the fast path: a concrete array, its last axis, no options ------------------------------

_DTYPES = frozenset(jnp.dtype(name) for name in ("float32", "float64", "bfloat16", "float16"))


@functools.lru_cache(maxsize=256)
def _short(mapping: Mapping) -> Any:
    return jax.jit(functools.partial(_apply, Static(mapping, None), {}))


def _quick(mapping: Mapping, x: Array, axis: Any, mask: Any, out: Any) -> Array | None:
    """p(x) along the last axis, in as few steps as possible; None for an unusual call."""
    if (
        out is not None
        or mask is not None
        or not x.ndim
        or not (axis is None or (type(axis) is int and axis in (-1, x.ndim - 1)))
    ):
        return None
    if not x.shape[-1] or x.dtype not in _DTYPES or kernels.asked() is not None:
        return None
    link = link_of(mapping)
    if type(link) is not Link or link.params is not None or link.upper is not None or link.kind == "perturb_max":
        return None
    mapping.check(x.shape[-1])
    name = mapping.array_field
    return None if name is not None and not _usual(getattr(mapping, name)) else _short(mapping)(x)


# -- the bridge ------------------------------------------------------------------------------------------------------

with jax.ensure_compile_time_eval():
    _KINDS = (type(jnp.zeros(())),)


class JaxBridge(Bridge):
    framework = "jax"
    kinds = _KINDS

    def apply(self, mapping: Mapping, x: Array, mask: Array | None = None) -> Array:
        return _run(_compiled, _opened(mapping, x), x)

    def quick(self) -> Any:
        return _quick

    def threshold(self, mapping: Mapping, x: Array) -> Array:
        return _run(_compiled_threshold, _opened(mapping, x), x)

    def loss(self, mapping: Mapping, x: Array, y: Array) -> Array:
        return _run(_compiled_loss, _opened(mapping, x), x, y)

    def index_loss(
        self, mapping: Mapping, x: Array, index: Array, axis: int = -1, ignored: int = BELOW, reduction: str = "none"
    ) -> Array | None:
        if (axis, ignored, reduction) != (-1, BELOW, "none"):
            return None
        mapping = _opened(mapping, x)
        if not kernels.choose("index_loss", mapping, x).compiled:
            return None
        return _run(_compiled_index, mapping, x, index)[0]

    def recomputed(self, function: Callable[[int], Array]) -> Callable[[int], Array]:
        return jax.checkpoint(function, static_argnums=0)


BRIDGE = JaxBridge()
BRIDGES.update(dict.fromkeys(JaxBridge.kinds, BRIDGE))
