"""Bounded: softmax, entmax and sparsemax under an upper bound for each class."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from .._array import (
    AT_LEAST_0,
    Array,
    Namespace,
    Range,
    Ranges,
    dot,
    finite_scores,
    is_array,
    known,
    like,
    power,
    safe,
    stop_gradient,
    top,
    total,
)
from .._core.facts import Facts
from .._core.parameters import check_ranges
from .._core.parts import Parts
from .._core.separable import Separable
from .._core.solve import Totals, totals
from .._core.typing import Parameter
from .entmax import Entmax, link_rate

_ENTMAX = Entmax()


@dataclasses.dataclass(frozen=True, eq=False)
class Bounded(Separable):
    """alpha-entmax with `p_i <= u_i`: `p_i = min(max((alpha-1)(x_i - tau), 0)^(1/(alpha-1)), u_i)`, constrained sparsemax for alpha = 2.

    Use it where a class has a budget: a source word that may be attended to only so often (its fertility), an expert with room for so
    many tokens. In a row whose bounds sum to less than 1 each class gets its bound. A target of a loss must not exceed the bounds.
    Martins and Kreutzer 2017; Malaviya, Ferreira and Martins 2018.

    Parameters
    ----------
    upper
        The bounds, at least 0: a number for all classes, or an array that broadcasts to the scores, such as one value for each class,
        or for each class of each row. It has a gradient.
    alpha
        A number from 1, softmax, to 2, sparsemax, or an array that broadcasts to the scores with size 1 along the classes; it has a
        gradient.

    Examples
    --------
    >>> anymax.apply(anymax.Bounded(0.5), [3.0, 1.0, 0.5])
    array([0.5, 0.5, 0. ])
    >>> import numpy as np
    >>> anymax.apply(anymax.Bounded(np.array([0.5, 0.1, 1.0]), alpha=1.0), [3.0, 1.0, 0.0]).round(3)
    array([0.5, 0.1, 0.4])
    """

    upper: Parameter
    alpha: Parameter = 2.0

    name = "bounded"
    kernel = "bounded"
    formula = "pᵢ = min(((α−1)(xᵢ − τ))₊^(1/(α−1)), uᵢ)"
    example: ClassVar[dict[str, Any]] = {"upper": 0.4}
    per_class = ("upper",)
    ranges: ClassVar[Ranges] = {"upper": AT_LEAST_0, "alpha": Range(1.0, 2.0, "both")}
    needs_scores = True
    learns = ("upper", "alpha")

    def __post_init__(self) -> None:
        check_ranges(self, "the most that a class may get", "upper")
        check_ranges(self, "1 is softmax, 2 sparsemax", "alpha")

    @property
    def facts(self) -> Facts:
        u: Any = self.upper
        free = self._free.facts
        if not is_array(u):
            return dataclasses.replace(free, sparse=free.sparse or u == 0, margin=free.margin if u >= 1 else None)
        none = u == 0  # a class without a budget gets 0
        sparse = free.sparse or not known(none) or bool(none.any())
        one_a_row = not u.ndim or u.shape[-1] == 1
        return dataclasses.replace(free, monotone=one_a_row, sparse=sparse, margin=None)

    @property
    def parts(self) -> Parts:  # type: ignore[override]
        return super().parts._replace(zeros_stay=self._free.facts.sparse)  # whatever the bounds of one process are

    @property
    def _free(self) -> Entmax:
        """The map without the bounds."""
        return _ENTMAX.laid_out(alpha=self.alpha) if is_array(self.alpha) else Entmax(self.alpha)

    def with_a_class(self, x: Array, bound: Any, xp: Namespace) -> Bounded:
        """The map of rows like x with one class more, the last. It has this bound, else that of all classes, or none where they differ."""
        u: Any = self.upper
        varies = is_array(u) and u.ndim > 0 and u.shape[-1] != 1
        if bound is None and not varies:
            return self
        one = xp.ones_like(x)
        u = like(u, x, xp) * (one[..., : u.shape[-1]] if varies else one)
        more = like(1.0 if bound is None else bound, x, xp) * xp.ones_like(u[..., :1])
        return self.laid_out(upper=xp.concat([u, more], axis=-1))

    # -- the link, that of entmax below the bound ------------------------------------------------------------------------

    def omega_terms(self, q: Array, xp: Namespace) -> Array:
        return self._free.omega_terms(q, xp)

    def link(self, t: Array, xp: Namespace) -> Array:
        p, most = self._free.link(t, xp), self.ceiling(t, xp)
        return xp.where(p < most, p, most + xp.zeros_like(p))

    def slope(self, q: Array, xp: Namespace) -> Array:
        positive = ~(q <= 0)
        least = xp.zeros_like(q) - self.level_to_tau(q, xp)  # at 0: -1 / (alpha - 1), for softmax -infinity
        least = xp.where(least < 0, least, -math.inf * xp.ones_like(q))
        return xp.where(positive, self._free.slope(safe(q, positive, 1.0, xp), xp), least)

    def curvature(self, q: Array, xp: Namespace) -> Array:
        return self._free.curvature(q, xp)

    def sensitivity(self, p: Array, xp: Namespace) -> Array:
        return xp.where(p >= self.ceiling(p, xp), xp.zeros_like(p), self._free.sensitivity(p, xp))

    def ceiling(self, x: Array, xp: Namespace) -> Any:
        u: Any = self.upper
        if not is_array(u):
            return u if u < 1 else 1.0
        u = like(u, x, xp)
        return xp.where(u > 1, xp.ones_like(u), xp.where(u < 0, xp.zeros_like(u), u))

    # -- the level ----------------------------------------------------------------------------------------------------------

    def solve(self, x: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
        most = self.ceiling(x, xp)
        most = stop_gradient(most) if is_array(most) else most * xp.ones_like(x[..., :1])
        positive = most > 0
        return self._below(safe(most, positive, 1.0, xp), x, keep & positive, xp)

    def at(self, x: Array, anchor: Array, level: Array, xp: Namespace) -> Array:
        c: Any = self.alpha
        if is_array(c) or c < 1.3:
            return self.link(x - anchor + level, xp)
        # a flat row has a level near that of 0, where only the sum with 1 may be rounded, which shifts all classes alike
        p, most = power((1.0 + (c - 1.0) * level) + (c - 1.0) * (x - anchor), 1.0 / (c - 1.0), xp), self.ceiling(x, xp)
        return xp.where(p < most, p, most + xp.zeros_like(p))

    def threshold(self, x: Array, xp: Namespace) -> Array:
        """tau with `p = min(((alpha-1)(x - tau))_+^(1/(alpha-1)), u)`; for softmax with `p = min(exp(x - tau), u)`."""
        return super().threshold(x, xp) - self.level_to_tau(x, xp)

    def level_to_tau(self, level: Array, xp: Namespace) -> Any:
        return self._free.level_to_tau(level, xp)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        # which classes have their bound can't be read from a p that was saved in half precision
        exact = stop_gradient(self.frozen().forward(stop_gradient(x), xp))
        free = (exact > 0) & ~(exact >= stop_gradient(self.ceiling(exact, xp))) | xp.isnan(p)
        s = xp.where(free, self._free.sensitivity(safe(p, free & (p > 0), 1.0, xp), xp), xp.zeros_like(p))
        s = xp.where(xp.isnan(p), p, s)
        rate = total(s, xp)
        return s * (g - dot(s, g, xp) / xp.where(rate == 0, xp.ones_like(rate), rate))

    def param_jvp(
        self, name: str, x: Array, p: Array, v: Array, xp: Namespace, totals: Totals = totals
    ) -> Array:  # fmt: skip
        """A class at its bound moves with that, and the classes between 0 and their bounds share what it takes. p is not rounded."""
        share = self._share(p, xp, totals)
        if name == "upper":
            moves = xp.where(self._full(p, xp), v + xp.zeros_like(p), xp.zeros_like(p))
        else:
            c = like(self.alpha, p, xp) - 1.0
            moves = xp.where(p >= self.ceiling(p, xp), xp.zeros_like(p), link_rate(p, c, xp)) * v
        return moves - share * totals([moves], xp)[0]

    def param_vjp(self, name: str, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        if name != "upper":
            return super().param_vjp(name, x, p, g, xp)
        mean = dot(self._share(p, xp, totals), g, xp)
        return xp.where(self._full(p, xp), g - mean, xp.zeros_like(p) * mean)

    def _full(self, p: Array, xp: Namespace) -> Array:
        """Where a class has its bound, and that is not above 1, where it is no bound."""
        u = like(self.upper, p, xp)
        return (p >= self.ceiling(p, xp)) & (u <= 1.0)

    def _share(self, p: Array, xp: Namespace, totals: Totals) -> Array:
        """`s / sum s`, 0 for all classes where none lies between 0 and its bound."""
        s = self.sensitivity(p, xp)
        rate = totals([s], xp)[0]
        return s / xp.where(rate == 0, xp.ones_like(rate), rate)

    # -- the loss ------------------------------------------------------------------------------------------------------------

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        """The generic loss takes p as a constant and so lacks the derivative in u, the bounds: `x_i - tau - omega'(u_i)` at a bound."""
        value = super().loss(x, p, y, xp)
        if not is_array(self.upper):
            return value
        x, keep, _ = finite_scores(x, xp)
        u, held = self.ceiling(x, xp) + xp.zeros_like(x), stop_gradient(p)
        full = keep & (held >= stop_gradient(u))
        inside = keep & (held > 0) & ~full
        count = total(xp.astype(inside, x.dtype), xp)
        tau = total(xp.where(inside, x - self.slope(safe(p, inside, 1.0, xp), xp), xp.zeros_like(x)), xp)
        at_bound = xp.where(full, x - self.slope(safe(u, full & (u > 0), 1.0, xp), xp), xp.zeros_like(x))
        # without a class between 0 and its bound tau is not unique, and where the bounds sum to less than 1 there is none
        lowest = stop_gradient(-top(xp.where(full & (u > 0), -at_bound, -math.inf * xp.ones_like(x)), xp))
        lowest = xp.where(lowest < math.inf, lowest, xp.zeros_like(lowest))
        short = total(xp.where(keep, stop_gradient(u), xp.zeros_like(x)), xp) < 1.0
        lowest = xp.where(short, 1.0 / like(self.alpha, x, xp) + xp.zeros_like(lowest), lowest)  # omega' minus slope
        tau = xp.where(count > 0, tau / xp.where(count > 0, count, xp.ones_like(count)), lowest)
        # a class without a budget would have an infinite price for alpha up to 1
        price = xp.where(full & (u > 0), at_bound - tau, xp.zeros_like(x))
        # the generic loss is centred for targets with the sum of p; those of a difference quotient in u may have another
        aim = total(y, xp)
        centre = dot(y, x, xp) / xp.where(aim == 0, xp.ones_like(aim), aim)
        value = value + stop_gradient(centre * (total(held, xp) - aim))
        # half of the mixed second derivative in u and x comes from here, the other half from the generic loss
        return value + total((u - stop_gradient(u)) * (stop_gradient(price) + 0.5 * (price - stop_gradient(price))), xp)


def _known_where(value: Any, wrong: Callable[[Any], Any]) -> bool:
    """True if a number, or an entry of an array of NumPy, is wrong."""
    if is_array(value):
        return isinstance(value, np.ndarray) and bool(wrong(value).any())
    return bool(wrong(value))
