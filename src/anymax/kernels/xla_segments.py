"""Sorts the index of segments within JAX programs: on a CPU by the C++ engine, elsewhere by JAX operations."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._array import Array
from .choice import asked
from .jax_primitives import by_library, problem
from .xla import ENGINE


def sort(index: Array, segments: int) -> tuple[Array, Array, Array]:
    """(index, ptr [segments + 1], order): `segments` replaces an index out of range; `order` sorts by segment, those entries last."""
    index = index.astype(jnp.asarray(0).dtype)
    index = jnp.where((index >= 0) & (index < segments), index, segments)
    if asked() not in (None, ENGINE.name) or problem() is not None:
        return index, *_formula(index, segments=segments)
    return index, *_sort.bind(index, segments=segments)


def _formula(index: Array, *, segments: int) -> list[Array]:
    order = jnp.argsort(index, stable=True).astype(index.dtype)
    ptr = jnp.searchsorted(index[order], jnp.arange(segments + 1, dtype=index.dtype), side="left")
    return [ptr.astype(index.dtype), order]


def _shapes(index: Any, *, segments: int) -> Any:
    return [index.update(shape=(segments + 1,), weak_type=False), index.update(weak_type=False)]


def _batch(primitive: Any, operands: Any, dims: Any, *, segments: int) -> Any:
    return jax.vmap(functools.partial(_formula, segments=segments), dims[0])(*operands), [0, 0]


def _attributes(segments: int) -> dict[str, Any]:
    return {
        **dict.fromkeys(("op", "map", "noise", "nodes", "per_row"), np.int64(0)),
        "param": np.float64(0.0),
        "segments": np.int64(2),
    }


_sort = by_library("anymax_sort_segments", _shapes, _formula, _attributes, _batch)
