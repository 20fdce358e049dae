"""The ids of the k largest scores of each row, the largest first: what decoders and routers choose."""

from __future__ import annotations

import math

from .._array import Array, Namespace, decides, quiet, stop_gradient, top, upcast
from .._core.rows import hide
from .._random.draws import at, largest
from .._random.truncation import group_keep
from . import engine_of
from .arrays import arrays_of
from .tasks import SELECT, WHOLE, Groups


def chosen(x: Array, k: int, xp: Namespace, groups: Groups | None = None) -> Array:
    """The ids of the k largest scores, [..., k], in descending order, without a derivative; equal scores by their place.

    Halves are compared in fp32. -1 stands where a row has fewer scores above -inf, and in all of a row with a NaN.
    """
    x = stop_gradient(x)
    if groups is not None and groups.keep == groups.count:
        groups = None
    task = k, groups or WHOLE
    engine = engine_of(SELECT, task, x)
    if engine is not None and (index := engine.select(task, x)) is not None:
        return index
    x = upcast(x, xp)
    if groups is not None:
        x = hide(x, group_keep(x, groups.count, groups.keep, groups.most, xp))
    nan = xp.isnan(top(x, xp))
    index = largest(xp.where(nan, xp.zeros_like(x), x), k, xp)
    return xp.where(nan | (at(x, index, xp) == -math.inf), -xp.ones_like(index), index)


def masked_as(key: Array, rows: Array, xp: Namespace) -> Array:
    """Other scores to choose by: where the rows have infinities and NaN, these."""
    rows = stop_gradient(rows)
    with quiet(rows):
        if decides(rows) and bool(xp.isfinite(xp.sum(rows))):  # the usual case
            return key
        return xp.where(xp.isfinite(rows), key, rows)


def chosen_mask(x: Array, k: int, xp: Namespace, groups: Groups | None = None) -> Array | None:
    """True at the k largest scores, and in a row with a NaN at all above -inf; None where no engine computes it."""
    task = k, groups or WHOLE
    engine = engine_of(SELECT, task, x)
    index = engine and engine.select(task, x)
    if index is None:
        return None
    first = index[..., :1]
    mask = arrays_of(x).scattered(xp.where(index < 0, xp.where(first < 0, xp.zeros_like(first), first), index), x)
    return xp.where(first < 0, x != -math.inf, mask)
