"""JAX: an output layer in a loop over groups of rows, which recomputes the scores of a group for its derivatives.

Second derivatives need the formulas, `anymax.use("reference")`, since `jax.checkpoint` separates a compiled kernel from its derivative.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from .._array import Array, wide_dtype
from .._core.static import Static
from ..autodiff.jax import static_of
from .bridge import PIECE, TILE, LayerBridge, in_tiles
from .job import Job, PerRow
from .layer import ByRow, Layer, dots, rows_at_a_time


class _How(NamedTuple):
    """What is computed, and in which parts."""

    per_row: PerRow
    rounded_to: Any  # of the layer
    step: int  # how many rows at a time
    alike: bool  # in a loop even if it has one round, so that a row is computed in the same way in each


class _Shared(NamedTuple):
    """The arrays that all rows share."""

    weight: Array
    bias: Array | None
    keep: Array | None
    params: dict[str, Array]
    class_weight: Array | None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(how: _How, static: Static, by_row: ByRow, shared: _Shared, target: Array | None) -> Any:
    per_row, rounded_to, step, alike = how

    @jax.checkpoint
    def group(by_row: ByRow, target: Array | None, shared: _Shared) -> Any:
        x, keep, params = by_row
        params = params | shared.params
        mapping = static.mapping({k: params[k] for k in static.names})
        keep = shared.keep if keep is None else keep
        part = Layer(x, shared.weight, shared.bias, keep, mapping, (), x.dtype, rounded_to=rounded_to)
        return Job(part, per_row, target, shared.class_weight).result()

    rows = by_row.x.shape[0]
    inputs = by_row, target
    if rows <= step and not alike:
        return group(*inputs, shared)
    whole = rows // step * step
    stacked = jax.tree.map(lambda a: a[:whole].reshape(rows // step, step, *a.shape[1:]), inputs)
    out = jax.lax.map(lambda part: group(*part, shared), stacked)
    out = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), out)
    if whole == rows:
        return out
    last = group(*jax.tree.map(lambda a: a[whole:], inputs), shared)
    return jax.tree.map(lambda a, b: jax.numpy.concatenate([a, b]), out, last)


@functools.partial(jax.jit, static_argnums=(0,))
def _gathered(step: int, x: Array, weight: Array, bias: Array | None, classes: Array) -> Array:
    def row(part: tuple[Array, Array]) -> Array:
        return dots(part[0][None], weight, bias, part[1][None], jax.numpy)[0]

    return jax.lax.map(jax.checkpoint(row), (x, classes), batch_size=step)


def _by_rows(job: Job) -> Any:
    layer, step = job.layer, TILE if job.invariant else rows_at_a_time(job.layer, job.chunk)
    by_row = layer.by_row()
    params = {k: v for k, v in layer.mapping.params().items() if k not in by_row.params}
    keep = layer.keep if by_row.keep is None else None
    shared = _Shared(layer.weight, layer.bias, keep, params, job.class_weight)
    how = _How(job.per_row, layer.rounded_to, step, job.invariant)
    return _run(how, static_of(layer.mapping), by_row, shared, job.target)


class JaxLayers(LayerBridge):
    def by_rows(self, job: Job) -> Any:
        return in_tiles(job, TILE, _by_rows) if job.invariant else _by_rows(job)

    def product(self, x: Array, weight: Array) -> Array:
        return jax.numpy.matmul(x, weight.T, preferred_element_type=wide_dtype(x, jax.numpy))

    def gathered(self, layer: Layer, classes: Array) -> Array:
        step = max(1, min(layer.rows, PIECE // max(1, classes.shape[1] * layer.x.shape[1])))
        return layer.rounded(_gathered(step, layer.x, layer.weight, layer.bias, classes), jax.numpy)


BRIDGE = JaxLayers()
