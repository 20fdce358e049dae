"""Softmax by sums over segments, for JAX: one program for all lengths."""

from __future__ import annotations

import sys
from typing import Any

from .._array import Array, as_dtype, from_last, namespace, stop_gradient, upcast
from .layout import Segments


def softmax(segments: Segments, x: Array) -> Array:
    """p of x [..., entries]."""
    xp = namespace(x)
    _, e, z, index = _terms(segments, upcast(x, xp))
    out = e / z[index]
    return _back(out, segments, x)


def log_softmax(segments: Segments, x: Array) -> Array:
    xp = namespace(x)
    y, _, z, index = _terms(segments, upcast(x, xp))
    return _back(y - xp.log(z)[index], segments, x)


def _terms(segments: Segments, x: Array) -> tuple[Array, Array, Array, Any]:
    """Scores minus the maximum of their segment, their exponentials, the sums of these, and the segment of each entry; entries first."""
    jax: Any = sys.modules["jax"]
    xp = namespace(x)
    x = from_last(x, 0, xp)
    index, count = segments.placed("index", x), segments.num_segments + 1  # the last one for entries without a segment
    high = stop_gradient(jax.ops.segment_max(x, index, count))
    high = xp.where(high > -xp.inf, high, 0.0)  # 0 if empty or all masked; also for NaN, which x itself keeps
    high = high.at[-1].set(xp.nan)
    y = x - high[index]
    e = xp.exp(y)
    z = jax.ops.segment_sum(e, index, count)
    return y, e, xp.where(z == 0, 1.0, z), index


def _back(out: Array, segments: Segments, x: Array) -> Array:
    xp = namespace(x)
    out = xp.permute_dims(out, (*range(1, out.ndim), 0))
    return as_dtype(out, x.dtype, xp)
