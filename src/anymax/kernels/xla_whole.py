"""The maps that solve a row whole, soft ranks, soft sorting and Fusedmax, as one primitive of JAX."""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from .._array import Array, alike, upcast
from .._core.mapping import Mapping
from .._core.static import Static
from . import order
from .jax_primitives import by_library
from .link import CODES
from .reference import ENGINE as reference
from .xla_rows import by_rows


def bind(op: str, mapping: Mapping, x: Array, *others: Array) -> Array:
    """The result of "forward", "vjp" (others: p, g) or "slope" in the dtype of x, or wide; each row has its own strength."""
    wide, whole = upcast(x, jnp), cast(Any, mapping)
    strength = jnp.broadcast_to(jnp.asarray(whole.strength, wide.dtype), (*x.shape[:-1], 1))
    operands = alike(wide, *(a.astype(wide.dtype) for a in others), strength)
    (out,) = _whole.bind(*operands, op=op, static=Static(mapping))
    return out if op == "slope" else out.astype(x.dtype)


def _formula(*operands: Array, op: str, static: Static) -> list[Array]:
    *arrays, strength = operands
    mapping = static.mapping_of([strength] if static.names else [])
    if op == "forward":
        return [reference.forward(mapping, *arrays)]
    if op == "vjp":
        return [reference.vjp(mapping, *arrays)]
    return [reference.slope(mapping, "strength", *arrays)]


def _shapes(x: Any, *others: Any, op: str, static: Static) -> list[Any]:
    return [x.update(shape=(*x.shape[:-1], 1) if op == "slope" else x.shape, weak_type=False)]


def _attributes(op: str, static: Static) -> dict[str, Any]:
    in_order = static.kind.kernel in order.KERNELS
    how = order.how(static.kind, static.constants) if in_order else 0
    codes = {"op": CODES[op], "map": how, "noise": 0, "nodes": 0, "per_row": 0, "segments": 3 if in_order else 4}
    return {**{key: np.int64(value) for key, value in codes.items()}, "param": np.float64(0.0)}


_whole = by_library("anymax_whole", _shapes, _formula, _attributes, sharding=by_rows)
