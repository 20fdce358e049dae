"""How the threshold of a row follows from parts of it: blocks of an output layer, or shards of processes."""

from __future__ import annotations

import enum
import math

from .._array import Array, Namespace, is_array, kth_largest, total, upcast
from .._core.mapping import Mapping
from .._core.separable import Separable
from ..autodiff import bridge


class Way(enum.Enum):
    """What a way needs of each part; it needs less than those below it."""

    SUMS = "the maximum and the sum of the exponentials"
    EACH = "nothing: p of a class follows from its score"
    WEIGHTS = "the largest weight, then the sum of the weights"
    NUCLEUS = "the sum of the exponentials, and the classes that may be in the nucleus"
    CANDIDATES = "the classes that have a probability among those of the part"
    LEVEL = "sums over the classes for each step of a search"
    ALL = "all classes"


def way_of(mapping: Mapping, rows: Array, xp: Namespace) -> Way:
    """The way that needs least, for rows like these."""
    parts = mapping.parts
    if mapping.is_softmax or parts.temperature is not None or parts.exponents is not None:
        return Way.SUMS
    if parts.each_alone:
        return Way.EACH
    if parts.by_weights:
        return Way.WEIGHTS
    if parts.nucleus is not None:
        return Way.NUCLEUS
    if parts.zeros_stay:
        return Way.CANDIDATES
    return Way.LEVEL if searchable(mapping, rows, xp) else Way.ALL


def searchable(mapping: Mapping, rows: Array, xp: Namespace) -> bool:
    """True if sums alone find the level of a separable map: no ceiling, no steep edge, no other kind of search."""
    return isinstance(mapping, Separable) and mapping.sums_suffice(rows, xp)


# -- the bound of candidates ---------------------------------------------------------------------------------------------------------


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
