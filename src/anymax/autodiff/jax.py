"""JAX: the forward pass by an engine, every derivative by the map's plain operations.

`jax.custom_jvp` with a rule that is itself `jax.jvp` of `Mapping.differentiable`: jit, grad, jvp, vmap, hessian and shard_map follow,
for the scores and for every array parameter. Calls outside of jit are compiled as well, once a mapping and shape.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from .. import kernels
from .._array import Array
from .._mapping import Mapping
from ..kernels import reference


class _Static:
    """A mapping without its arrays, and the engine asked for: what a compiled call depends on beside its arrays."""

    def __init__(self, mapping: Mapping) -> None:
        self.kind, self.constants = type(mapping), mapping.constants()
        self.key = (self.kind, kernels.forced(), *self.constants.items())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.key == other.key

    def mapping(self, params: dict[str, Array]) -> Mapping:
        return self.kind(**self.constants, **params)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply(static: _Static, params: dict[str, Array], x: Array) -> Array:
    mapping = static.mapping(params)
    return kernels.choose("forward", mapping, x).forward(mapping, x)


@_apply.defjvp
def _rule(static: _Static, primals: Any, tangents: Any) -> Any:
    return jax.jvp(lambda params, x: reference.differentiable(static.mapping(params), x), primals, tangents)


_compiled = jax.jit(_apply, static_argnums=(0,))


@functools.partial(jax.jit, static_argnums=(0,))
def _loss(static: _Static, params: dict[str, Array], x: Array, y: Array) -> Array:
    return reference.loss(static.mapping(params), x, _apply(static, params, x), y)


def apply(mapping: Mapping, x: Array) -> Array:
    return _compiled(_Static(mapping), mapping.params(), x)


def loss(mapping: Mapping, x: Array, y: Array) -> Array:
    return _loss(_Static(mapping), mapping.params(), x, y)
