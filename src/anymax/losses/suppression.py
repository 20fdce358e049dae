"""The second loss of Sparsemax+: it lowers the scores of the classes to which a sparse map gives probability 0."""

from __future__ import annotations

import math

from .._array import Array, device_of, namespace, quiet, stop_gradient, take, upcast
from .._core.mapping import Mapping
from .._core.rows import hide
from ..autodiff import bridge
from ..thresholds import logsumexp


def suppression(mapping: Mapping, rows: Array, target: Array) -> Array:
    """`(1 - s_t) * -log(1 - s_0)` of rows [..., n], for class indices [...]; 0 where an index is below 0.

    s is the softmax of the scores: s_t the share of the target, a constant, and s_0 that of the classes with p = 0 but the target.
    """
    xp = namespace(rows)
    s = upcast(rows, xp)
    index = xp.where(target < 0, xp.zeros_like(target), target)[..., None]
    with quiet(s):
        lost = xp.all(s == -math.inf, axis=-1, keepdims=True)  # the derivative of logsumexp is not a number there
        s = xp.where(lost, xp.zeros_like(s), s)
        p = bridge(s).apply(mapping, stop_gradient(s))
        places = xp.arange(s.shape[-1], dtype=index.dtype, **device_of(s))
        counts = (stop_gradient(p) != 0) | (places == index)  # NaN counts, so that it stays
        whole, kept = logsumexp(s), logsumexp(hide(s, counts))
        own = take(s, index, xp)[..., 0]
        share = xp.exp(stop_gradient(own - whole))
        value = (1.0 - share) * (whole - kept)
    none = (target < 0) | lost[..., 0]
    return xp.where(none, xp.zeros_like(value), value)
