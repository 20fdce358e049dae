"""Sorts the index of segments within JAX programs: on a CPU by the C++ engine, elsewhere by JAX operations."""

from __future__ import annotations

import functools
import sys
from typing import Any

from .._array import Array
from . import xla
from .choice import asked


def sort(index: Array, segments: int) -> tuple[Array, Array, Array]:
    """(index, ptr [segments + 1], order): `segments` replaces an index out of range; `order` sorts by segment, those entries last."""
    jnp = sys.modules["jax"].numpy
    index = index.astype(jnp.asarray(0).dtype)
    index = jnp.where((index >= 0) & (index < segments), index, segments)
    if asked() not in (None, xla.ENGINE.name) or xla.problem() is not None:
        return index, *_formula(index, segments=segments)
    return index, *_primitive().bind(index, segments=segments)


def _formula(index: Array, *, segments: int) -> list[Array]:
    jnp = sys.modules["jax"].numpy
    order = jnp.argsort(index, stable=True).astype(index.dtype)
    ptr = jnp.searchsorted(index[order], jnp.arange(segments + 1, dtype=index.dtype), side="left")
    return [ptr.astype(index.dtype), order]


@functools.cache
def _primitive() -> Any:
    import jax
    import numpy as np
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    primitive = Primitive("anymax_sort_segments")
    primitive.multiple_results = True

    def shapes(index: Any, *, segments: int) -> Any:
        return [index.update(shape=(segments + 1,), weak_type=False), index.update(weak_type=False)]

    def batch(operands: Any, dims: Any, *, segments: int) -> Any:
        return jax.vmap(functools.partial(_formula, segments=segments), dims[0])(*operands), [0, 0]

    formula = mlir.lower_fun(_formula, multiple_results=True)

    def on_cpu(ctx: Any, index: Any, *, segments: int) -> Any:
        if getattr(ctx.module_context.lowering_parameters, "for_export", False):
            return formula(ctx, index, segments=segments)
        numbers = {name: np.int64(0) for name in ("op", "map", "noise", "nodes", "per_row")}
        rule = jax.ffi.ffi_lowering(xla.TARGET)
        return rule(ctx, index, param=np.float64(0.0), segments=np.int64(2), **numbers)

    primitive.def_impl(xla.outside_of_jit(primitive))
    primitive.def_abstract_eval(shapes)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, formula)
    mlir.register_lowering(primitive, on_cpu, platform="cpu")
    return primitive
