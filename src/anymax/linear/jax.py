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
from .bridge import PIECE, LayerBridge, in_tiles
from .job import Job, PerRow
from .layer import ByRow, Layer, dots


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


def _shared(layer: Layer, by_row: ByRow, job: Job) -> _Shared:
    params = {k: v for k, v in layer.mapping.params().items() if k not in by_row.params}
    keep = layer.keep if by_row.keep is None else None
    return _Shared(layer.weight, layer.bias, keep, params, job.class_weight)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    how: _How, static: Static, by_row: tuple[ByRow, ...], shared: tuple[_Shared, ...], target: Array | None
) -> Any:  # fmt: skip
    per_row, rounded_to, step, alike = how

    @jax.checkpoint
    def group(by_row: tuple[ByRow, ...], target: Array | None, shared: tuple[_Shared, ...]) -> Any:
        params = by_row[0].params | shared[0].params
        mapping = static.mapping({k: params[k] for k in static.names})
        layer, *reference = (
            Layer(
                x,
                s.weight,
                s.bias,
                s.keep if keep is None else keep,
                mapping,
                (),
                x.dtype,
                rounded_to=rounded_to,
                factor=factor,
            )
            for (x, keep, _, factor), s in zip(by_row, shared)
        )
        return Job(layer, per_row, target, shared[0].class_weight, reference=next(iter(reference), None)).result()

    rows = by_row[0].x.shape[0]
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


def _by_rows(job: Job, step: int) -> Any:
    by_row = tuple(layer.by_row() for layer in job.layers)
    shared = tuple(_shared(layer, of, job) for layer, of in zip(job.layers, by_row))
    how = _How(job.per_row, job.layer.rounded_to, step, job.invariant)
    return _run(how, static_of(job.layer.mapping), by_row, shared, job.target)


class JaxLayers(LayerBridge):
    rounds_products = False

    def by_rows(self, job: Job) -> Any:
        step = self.rows_of_group(job)
        return in_tiles(job, step, lambda job: _by_rows(job, step)) if job.invariant else _by_rows(job, step)

    def product(self, x: Array, weight: Array) -> Array:
        return jax.numpy.matmul(x, weight.T, preferred_element_type=wide_dtype(x, jax.numpy))

    def gathered(self, layer: Layer, classes: Array) -> Array:
        step = max(1, min(layer.rows, PIECE // max(1, classes.shape[1] * layer.x.shape[1])))
        return layer.rounded(_gathered(step, layer.x, layer.weight, layer.bias, classes), jax.numpy)


BRIDGE = JaxLayers()
