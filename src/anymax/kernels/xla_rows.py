"""The kernels for rows as one primitive of JAX, which the reference engine computes where the library can't."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from .._array import Array, alike, upcast, wide_name
from .._core.mapping import Mapping, loss_learns
from .._core.static import Static
from .jax_primitives import by_library, handler_attributes, link_for
from .link import Link
from .reference import ENGINE as reference


def bind(op: str, mapping: Mapping, *operands: Array) -> list[Array]:
    """The results of an operation; a parameter that is an array is broadcast to one number per row."""
    x, wide = operands[0], wide_name(operands[0])
    params = [jnp.broadcast_to(a, (*x.shape[:-1], 1)).astype(wide) for a in mapping.params().values()]
    operands = alike(*operands, *params) if params else operands
    return _rows.bind(*operands, op=op, static=Static(mapping), link=link_for(mapping, x))


def _formula(*operands: Array, op: str, static: Static, link: Link) -> list[Array]:
    """The primitive by the reference engine."""
    count = len(operands) - len(static.names)
    mapping = static.mapping_of(operands[count:])
    x, *others = operands[:count]
    if op == "forward":
        return [reference.forward(mapping, x)]
    if op == "vjp":
        return [reference.vjp(mapping, x, *operands[count - 2 : count])]
    if op == "slope":
        return [reference.slope(mapping, mapping.learns[0], x, *operands[count - 2 : count])]
    p = reference.forward(mapping, upcast(x, jnp))
    if op == "index_loss":
        value = plain_loss(mapping, x, p, others[0])
        return [value, value]
    if op == "index_loss_slope":
        value = plain_loss(mapping, x, p, others[0])
        return [value, value, loss_slope(mapping, loss_learns(mapping)[0], x, p, others[0])]
    return [plain_slope(x, p, *others[1:])]


def one_hot(index: Array, x: Array) -> Array:
    """The target of each row as a distribution; zeros for an index below 0."""
    return jax.nn.one_hot(index, x.shape[-1], dtype=wide_name(x))


def plain_loss(mapping: Mapping, x: Array, p: Array, index: Array, loss: Any = reference.loss) -> Array:
    """The loss of class indices by plain operations."""
    y = one_hot(index, x)
    value = loss(mapping, upcast(x, jnp), p, y)[..., 0]
    value = jnp.where(jnp.any((y > 0) & (x == -jnp.inf), axis=-1), jnp.inf, jnp.where(value > 0, value, 0.0))
    poisoned = jnp.any(jnp.isnan(x) | (x == jnp.inf), axis=-1) | (index >= x.shape[-1])
    return jnp.where(index < 0, 0.0, jnp.where(poisoned, jnp.nan, value))


def loss_slope(mapping: Mapping, name: str, x: Array, p: Array, index: Array) -> Array:
    """The derivative of `plain_loss` by a parameter, one number a row; p is not rounded."""
    slope = reference.loss_slope(mapping, name, x, p)[..., 0]
    return jnp.where(index < 0, 0.0, jnp.where(index >= x.shape[-1], jnp.nan, slope))


def plain_slope(x: Array, p: Array, index: Array, scale: Array) -> Array:
    """The gradient of `plain_loss`, times a factor for each row."""
    index = index[..., None]
    slope = jnp.where(index >= x.shape[-1], jnp.nan, p - one_hot(index[..., 0], x))
    return jnp.where(index < 0, 0.0, scale[..., None] * slope).astype(x.dtype)


def by_rows(ctx: Any) -> dict[str, Any] | None:
    """Attributes that allow both of XLA's partitioners to put rows on different devices, but not the classes of one row."""
    arrays = (*ctx.avals_in, *ctx.avals_out)
    shapes = [a.shape for a in arrays]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return None
    rows = len(shapes[0]) - 1
    words: dict[str, Any] = {"num_batch_dims": mlir.ir.StringAttr.get(str(rows))}
    out = {"mhlo.frontend_attributes": mlir.ir.DictAttr.get(words)}
    if not getattr(jax.config, "jax_use_shardy_partitioner", False):
        return out
    from jax.extend.mlir.dialects import sdy

    def axes(i: int) -> Any:
        """The axes of array i: all arrays share those of the rows, and its classes have their own."""
        own = [len(sizes)] if len(shapes[i]) > rows else []
        sizes.extend(shapes[i][rows:])
        return sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get([k]) for k in (*range(rows), *own)])

    sizes, count = [*shapes[0][:-1]], len(ctx.avals_in)
    mapped = [axes(i) for i in range(len(arrays))]
    rule = sdy.OpShardingRuleAttr.get(sizes, mapped[:count], mapped[count:], is_custom=True)
    return {**out, "sdy.sharding_rule": rule}


def _shapes(x: Any, *others: Any, op: str, **facts: Any) -> Any:
    wide = np.dtype(wide_name(x))
    if op == "slope":
        return [x.update(shape=(*x.shape[:-1], 1), dtype=wide, weak_type=False)]
    if not op.startswith("index_loss") or op == "index_loss_grad":
        return [x.update(weak_type=False)]
    each = others[0].update(dtype=wide, weak_type=False)  # the index has the shape of the rows
    return [each] * (3 if op == "index_loss_slope" else 2)


_rows = by_library("anymax", _shapes, _formula, handler_attributes, sharding=by_rows)
