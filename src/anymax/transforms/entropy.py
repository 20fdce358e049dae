"""The entropy of softmax, on which some transforms depend."""

from __future__ import annotations

import math

from .._array import Array, Namespace, differentiates, finite_scores, running_dtype, stop_gradient, top, total, xlogx
from .._core.rows import hide
from ..kernels import engine_of
from ..kernels.tasks import DECODE
from ..mappings import Softmax

_SOFTMAX = Softmax()


def softmax_entropy(x: Array, xp: Namespace) -> Array:
    """The entropy of each row, [..., 1]; any number in a row with a NaN or +inf."""
    engine = None if differentiates(x) else engine_of(DECODE, _SOFTMAX, x)
    if engine is not None:
        return xp.astype(engine.decode(_SOFTMAX, x, entropy=True).entropy, running_dtype(x, xp))[..., None]
    y, keep, _ = finite_scores(x, xp)
    high = stop_gradient(top(hide(y, keep), xp))
    y = y - xp.where(high > -math.inf, high, xp.zeros_like(high))
    e = xp.where(keep, xp.exp(xp.where(keep, y, xp.zeros_like(y))), xp.zeros_like(y))
    z = total(e, xp)
    return -total(xlogx(e / xp.where(z > 0, z, xp.ones_like(z)), xp), xp)
