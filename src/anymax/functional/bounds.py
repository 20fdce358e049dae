"""The scores up to which a class has no probability, for rows that have other classes, too."""

from __future__ import annotations

import math

from .._array import Array, Namespace, is_array, kth_largest, total, upcast
from .._core.mapping import Mapping
from .._core.separable import Separable
from ..autodiff import bridge


def bound_of(mapping: Mapping, rows: Array, xp: Namespace) -> Array:
    """Scores up to which a class has no probability, in rows that have these classes and any others, [..., 1]; -inf where any may have one.

    More classes only raise a threshold. For a map of `Way.CANDIDATES`. The bound is lower by what rounding may do; NaN where a row is.
    """
    parts = mapping.parts
    most, full, n = parts.most_kept, parts.full_up_to, rows.shape[-1]
    if most is not None:  # all scores equal to the last that is kept stay: the map keeps the first of them
        return _nothing(rows, xp) if n < most else less_rounding(upcast(kth_largest(rows, most, xp), xp), xp)
    if not is_array(full) and full >= n:
        return _nothing(rows, xp)
    if parts.zero_below_threshold:
        bound = bridge(rows).threshold(mapping, rows)
    elif isinstance(mapping, Separable) and mapping.ceiling(rows, xp) is None:
        tau = bridge(rows).threshold(mapping, rows)
        bound = tau + mapping.level_to_tau(tau, xp) + mapping.slope(xp.zeros_like(tau), xp)
    else:
        return _nothing(rows, xp)
    bound = less_rounding(bound, xp)
    if not is_array(full) and not full:
        return bound
    # else each has its upper bound, and tau is arbitrary
    enough = total(xp.astype(xp.isfinite(rows), rows.dtype), xp) > full
    return xp.where(enough, bound, _nothing(rows, xp))


def _nothing(rows: Array, xp: Namespace) -> Array:
    return -math.inf * xp.ones_like(upcast(rows[..., :1], xp))


def less_rounding(bound: Array, xp: Namespace) -> Array:
    """The bound, lower by what rounding may do."""
    size = 1.0 + xp.abs(xp.where(bound == -math.inf, xp.zeros_like(bound), bound))
    return bound - 64.0 * float(xp.finfo(bound.dtype).eps) * size
