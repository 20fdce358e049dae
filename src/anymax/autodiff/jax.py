"""JAX: the forward pass by an engine, every derivative by the map's plain operations.

`jax.custom_jvp` with a rule that is itself `jax.jvp` of `Mapping.differentiable`: jit, grad, jvp, vmap, hessian and shard_map follow,
for the scores and for every array parameter.
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
    """A mapping without its arrays, as a static argument; equal mappings are one."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.key = (type(mapping), *mapping.constants().items())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.key == other.key

    def restore(self, params: dict[str, Array]) -> Mapping:
        return self.mapping.replace(**params)


def _with_rule(forward: Any, differentiable: Any) -> Any:
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def call(static: _Static, params: dict[str, Array], *arrays: Array) -> Array:
        return forward(static.restore(params), *arrays)

    @call.defjvp
    def rule(static: _Static, primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda params, *arrays: differentiable(static.restore(params), *arrays), primals, tangents)

    return call


_forward = _with_rule(lambda m, x: kernels.choose("forward", m, x).forward(m, x), reference.differentiable)


def apply(mapping: Mapping, x: Array) -> Array:
    return _forward(_Static(mapping), mapping.params(), x)


def loss(mapping: Mapping, x: Array, y: Array) -> Array:
    return reference.loss(mapping, x, apply(mapping, x), y)
