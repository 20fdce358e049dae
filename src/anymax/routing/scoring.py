"""How a router makes values of its scores: a function of each score by itself, or a map of the row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from .._array import Array, Namespace, quiet, sigmoid, stop_gradient, top, total
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.rows import hide
from .._random.draws import at
from ..autodiff import bridge
from ..functional import apply
from ..mappings import Softmax

_SOFTMAX = Softmax()


def _sqrt_softplus(x: Array, xp: Namespace) -> Array:
    # sqrt(log(1 + exp(x))): for scores far below 0 it is exp(x / 2)
    low = x < -30.0
    y = xp.where(low, xp.zeros_like(x), x)
    # with the derivative at 0, which that of the absolute value is not
    soft = xp.sqrt(xp.where(y < 0, xp.zeros_like(y), y) + xp.log1p(xp.exp(xp.where(y < 0, y, -y))))
    return xp.where(low, xp.exp(0.5 * xp.where(low, x, xp.zeros_like(x))), soft)


EACH: dict[str, Callable[[Array, Namespace], Array]] = {"sigmoid": sigmoid, "sqrtsoftplus": _sqrt_softplus}


class Scoring(NamedTuple):
    """What makes values of scores: `each`, a function of one score, or `mapping`, a map of the row."""

    each: Callable[[Array, Namespace], Array] | None
    mapping: Mapping

    @classmethod
    def read(cls, who: str, scoring: Mapping | str) -> Scoring:
        if isinstance(scoring, str) and scoring in EACH:
            return cls(EACH[scoring], _SOFTMAX)
        return cls(None, as_mapping(scoring, who))

    @property
    def name(self) -> str:
        """As the kernels know it."""
        if self.each is None:
            return "softmax" if self.mapping.is_softmax else self.mapping.name
        return next(name for name, each in EACH.items() if each is self.each)

    @property
    def in_order(self) -> bool:
        """True if a larger score has a larger value."""
        return self.each is not None or self.mapping.facts.monotone

    @property
    def gives_zeros(self) -> bool:
        """True if experts that are not masked may have the value 0, which leaves them out."""
        return self.each is None and (self.mapping.facts.sparse or not self.mapping.facts.monotone)

    def sound(self, rows: Array, xp: Namespace) -> Array:
        """The scores, all of them masked in a row whose values are not all numbers: one with NaN, or with +inf but for the sigmoid."""
        high = top(stop_gradient(rows), xp)
        return hide(rows, ~xp.isnan(high) if self.each is sigmoid else high < math.inf)

    def values(self, rows: Array, xp: Namespace) -> Array:
        """The value of every expert; 0 for one that is masked."""
        if self.each is None:
            return apply(self.mapping, rows)
        with quiet(rows):
            return self.each(rows, xp)

    def constants(self, rows: Array, xp: Namespace) -> Array:
        """The values, without a derivative."""
        return stop_gradient(self.values(stop_gradient(rows), xp))

    def shares(self, rows: Array, xp: Namespace) -> Array:
        """The values of every expert, divided by their sum."""
        p = self.values(rows, xp)
        return divided(p, total(p, xp), xp) if self.each is not None or not self.mapping.sums_to_one else p

    def at(self, rows: Array, index: Array, xp: Namespace, normalise: bool) -> Array:
        """The values of the experts of `index` [..., k], 0 at -1; `normalise`: divided by their sum."""
        there = index >= 0
        if self.each is None and self.mapping.is_softmax and normalise:
            found = at(rows, index, xp)  # softmax of all, normalised, is softmax of the chosen
            return bridge(found).apply(_SOFTMAX, xp.where(there, found, -xp.inf * xp.ones_like(found)))
        if self.each is None:
            found = at(self.values(rows, xp), index, xp)
        else:
            with quiet(rows):
                found = self.each(at(rows, index, xp), xp)
        found = xp.where(there | xp.isnan(found), found, xp.zeros_like(found))
        return divided(found, total(found, xp), xp) if normalise else found


def divided(values: Array, sums: Array, xp: Namespace) -> Array:
    """values / sums; 0 where a sum is 0."""
    none = sums == 0
    return xp.where(none, xp.zeros_like(values), values / xp.where(none, xp.ones_like(sums), sums))
