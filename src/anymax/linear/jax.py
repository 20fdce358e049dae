"""JAX: an output layer in a loop over groups of rows, which recomputes the scores of a group for its derivatives.

Second derivatives need the formulas, `anymax.use("reference")`, since `jax.checkpoint` separates a compiled kernel from its derivative.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from .._array import Array
from .._core.static import Static
from ..autodiff.jax import static_of
from .bridge import PIECE, LayerBridge
from .layer import Layer, dots, rows_at_a_time
from .per_row import PerRow


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    per_row: PerRow, static: Static, step: int, by_row: dict[str, Array], shared: dict[str, Any], target: Array | None
) -> Any:
    @jax.checkpoint
    def group(by_row: dict[str, Array], target: Array | None, shared: dict[str, Any]) -> Any:
        params = {k: v for k, v in by_row.items() if k not in ("x", "keep")} | shared["numbers"]
        mapping = static.mapping({k: params[k] for k in static.names})
        keep = by_row.get("keep", shared.get("keep"))
        part = Layer(by_row["x"], shared["weight"], shared["bias"], keep, mapping, (), by_row["x"].dtype)
        return per_row(part, part.scores(), target, shared["class_weight"])

    rows = by_row["x"].shape[0]
    given = by_row, target
    if rows <= step:
        return group(*given, shared)
    whole = rows // step * step
    stacked = jax.tree.map(lambda a: a[:whole].reshape(rows // step, step, *a.shape[1:]), given)
    out = jax.lax.map(lambda part: group(*part, shared), stacked)
    out = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), out)
    if whole == rows:
        return out
    last = group(*jax.tree.map(lambda a: a[whole:], given), shared)
    return jax.tree.map(lambda a, b: jax.numpy.concatenate([a, b]), out, last)


@functools.partial(jax.jit, static_argnums=(0,))
def _gathered(step: int, x: Array, weight: Array, bias: Array | None, classes: Array) -> Array:
    def row(part: tuple[Array, Array]) -> Array:
        one = Layer(part[0][None], weight, bias, None, None, (), x.dtype)  # type: ignore[arg-type]
        return dots(one, part[1][None], jax.numpy)[0]

    return jax.lax.map(jax.checkpoint(row), (x, classes), batch_size=step)


class JaxLayers(LayerBridge):
    def by_rows(
        self, layer: Layer, per_row: PerRow, target: Array | None, class_weight: Array | None, chunk: int | None
    ) -> Any:
        shared = {"weight": layer.weight, "bias": layer.bias, "class_weight": class_weight}
        if layer.keep is not None and layer.keep.shape[0] == 1:
            shared["keep"] = layer.keep
        params = layer.mapping.params()
        shared["numbers"] = {k: v for k, v in params.items() if not v.ndim}
        return _run(per_row, static_of(layer.mapping), rows_at_a_time(layer, chunk), layer.by_row(), shared, target)

    def gathered(self, layer: Layer, classes: Array) -> Array:
        step = max(1, min(layer.rows, PIECE // max(1, classes.shape[1] * layer.x.shape[1])))
        return _gathered(step, layer.x, layer.weight, layer.bias, classes)


BRIDGE = JaxLayers()
