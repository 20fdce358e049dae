"""`Separable`: the maps `p_i = link(x_i - tau)`, with their threshold, their loss and all derivatives."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from .._array import (
    Array,
    Namespace,
    counts,
    device_of,
    dot,
    finish,
    finite_scores,
    is_array,
    known,
    known_any,
    known_largest,
    like,
    poison,
    safe,
    stop_gradient,
    take,
    top,
    total,
)
from .mapping import Mapping, positive, row_top
from .parameters import sound
from .parts import SUMMED, Parts
from .solve import Totals, below_ceilings, below_one_ceiling, root, totals

_ONE_CLASS = np.ones((1, 1))


class Separable(Mapping):
    """`p = argmax <p, x> - sum_i omega(p_i)` on the simplex: `p_i = link(x_i - tau)`, tau such that the row sums to `mass`.

    A subclass defines `omega_terms(q)`, `link(t)`, `slope(q) = omega'(q)` and `curvature(q) = omega''(q)`. It may define a closed
    form `closed(y, keep, xp)` of the level, which the tests compare with the generic solver. If the link is bounded, `ceiling`
    must return the bound; a link that does not reach the mass is an error.

    Examples
    --------
    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True, eq=False)
    ... class Squares(anymax.Separable):  # sparsemax
    ...     name = "squares"
    ...     facts = anymax.Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True, margin=1.0)
    ...     def omega_terms(self, q, xp): return 0.5 * q * q
    ...     def link(self, t, xp): return xp.where(t > 0, t, 0.0 * t)
    ...     def slope(self, q, xp): return q
    ...     def curvature(self, q, xp): return xp.ones_like(q)
    >>> anymax.apply(Squares(), [2.0, 1.5, -1.0])
    array([0.75, 0.25, 0.  ])
    """

    iterative = True
    needs_scores = False
    mass: Any = 1.0  # what the threshold makes p sum to: a number, or an array with one value per row
    steep: bool = False  # True if the derivative of the link is infinite at the edge of the support
    # True where `search` is told how to sum over the classes; a subclass that overrides `solve` or `search` says whether it still is
    searches_by_sums: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        members = cls.__dict__
        if ("solve" in members or "search" in members) and "searches_by_sums" not in members:
            cls.searches_by_sums = False

    @abstractmethod
    def omega_terms(self, q: Array, xp: Namespace) -> Array: ...

    @abstractmethod
    def link(self, t: Array, xp: Namespace) -> Array: ...

    @abstractmethod
    def slope(self, q: Array, xp: Namespace) -> Array: ...

    @abstractmethod
    def curvature(self, q: Array, xp: Namespace) -> Array: ...

    def closed(self, y: Array, keep: Array, xp: Namespace) -> Array | None:
        return None

    def ceiling(self, x: Array, xp: Namespace) -> Any:
        """The upper bound of the link, for each class: a number, or an array that broadcasts to rows; None if there is none.

        If a link reaches the bound only in the limit, as a sigmoid does, `slope` is infinite there. A row whose ceilings sum to no more
        than the mass gets its ceilings.
        """
        return None

    def sensitivity(self, p: Array, xp: Namespace) -> Array:
        """s_i = dp_i/dt_i: 1 / omega''(p_i) on the support and below the ceiling, else 0."""
        inside, most = positive(p), self.ceiling(p, xp)
        inside = inside if most is None else inside & ~(p >= most)
        # a constant curvature ignores p; adding 0 p passes on NaN
        return xp.where(inside, 1.0 / self.curvature(safe(p, inside, 1.0, xp), xp) + 0.0 * p, xp.zeros_like(p))

    # -- the sum ----------------------------------------------------------------------------------------------------------

    def sums(self, keep: Array | None, xp: Namespace) -> tuple[Any, Any]:
        """The mass, or the sum of the ceilings where it is smaller."""
        out = self.mass
        if keep is not None:
            # the sum is as accurate as the parameters are
            one = xp.astype(keep, xp.result_type(xp.asarray(0.0).dtype, *(v.dtype for v in self.params().values())))
            if (most := self.ceiling(one, xp)) is not None:
                mass, room = out + 0.0 * one[..., :1], total(most * one, xp)
                out = xp.where(room < mass, room, mass)
        return out, out

    @property
    def sums_to_one(self) -> bool:
        """True if the mass is 1, and no bound is known to be, or may be, below it: then a mask may leave too little."""
        if is_array(self.mass) or self.mass != 1.0:
            return False
        if type(self).ceiling is Separable.ceiling:
            return True
        if not all(isinstance(v, np.ndarray) for v in self.params().values()):
            return False
        most = self.ceiling(_ONE_CLASS, np)
        return most is None or bool(np.all(most >= 1.0) if is_array(most) else most >= 1.0)

    @property
    def least_classes(self) -> int:
        if is_array(self.mass):
            most = known_largest(self.mass)
            return math.ceil(most) if most is not None and math.isfinite(most) else 1
        over, under = self.mass.as_integer_ratio()  # turns a symbol of torch.compile(dynamic=True) into numbers
        return -(-over // under)

    # -- the level: the argument of the link at the anchor ----------------------------------------------------------------

    def solve(self, x: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
        """(anchor, level), both [..., 1], constants for differentiation."""
        most = self.ceiling(x, xp)
        if most is not None:
            return self._below(most, x, keep, xp)
        anchor = row_top(x, keep, xp)
        y = x - anchor
        # running sums over a long row can make the closed form arbitrarily inexact: it only starts Newton's method
        return anchor, self.search(y, keep, xp, self.closed(y, keep, xp))

    def search(
        self, y: Array, keep: Array, xp: Namespace, start: Array | None = None, totals: Totals = totals
    ) -> Array:
        """The level by the generic solver, for rows whose maximum is 0. `start` is a first guess; `totals` sums over the classes."""
        (count,), mass = totals([xp.astype(keep, y.dtype)], xp), like(self.mass, y, xp)
        high = self.slope(xp.ones_like(count) * mass, xp)
        return self._between(self._lowest(count, mass, xp), high, y, keep, count > 0, xp, start, totals)

    def _lowest(self, count: Array, mass: Any, xp: Namespace) -> Array:
        """A level at which the largest score, and so every score, has at most an even share of the mass."""
        one = xp.ones_like(count)
        share = mass / xp.where(count > 0, count, one)
        return self.slope(xp.where(share < 1.0, share, one) * one, xp)

    def _between(
        self,
        low: Array,
        high: Array,
        y: Array,
        keep: Array,
        reachable: Array,
        xp: Namespace,
        start: Array | None = None,
        totals: Totals = totals,
    ) -> Array:
        mass, one = like(self.mass, y, xp), xp.ones_like(high)

        def evaluate(level: Array) -> tuple[Array, Array]:
            p = xp.where(keep, self.link(y + level, xp), xp.zeros_like(y))
            sum_p, rate = totals([p, self.sensitivity(p, xp)], xp)
            residual = sum_p - mass
            return residual, -residual / xp.where(rate > 0, rate, one)

        level = root(evaluate, low, high, xp, start=start)
        at_end = reachable & ~(level < high - 1e-3 * xp.abs(high))
        if known(at_end) and not bool(xp.any(at_end)):
            return level
        short = at_end & (evaluate(high)[0] < -1e-2 * mass)
        if known_any(short, xp) and known_any(short & ~self._lost(short, xp), xp):
            raise ValueError(
                f"{self!r}: its link doesn't reach the sum {_brief(self.mass)} at the upper end of the search for the threshold; if its "
                "probabilities have an upper bound, define ceiling(), and else see that slope() is the inverse of link()"
            )
        return poison(level, short, xp)

    def _lost(self, like: Array, xp: Namespace) -> Array:
        """True for rows with a parameter out of its range, whose level is of no use."""
        return xp.isnan(sound(self, xp.zeros(like.shape, dtype=xp.asarray(0.0).dtype, **device_of(like)), xp))

    def _below(self, most: Any, x: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
        """(anchor, level) for a link with a ceiling."""
        mass = like(self.mass, x, xp)
        if not is_array(most) or most.ndim == 0 or most.shape[-1] == 1:
            count = xp.sum(counts(keep, xp), axis=-1, keepdims=True)
            lowest = self._lowest(xp.astype(count, x.dtype), mass, xp)
            anchor, edge, end, reachable = below_one_ceiling(self.slope, most, mass, x, keep, xp)
        else:
            lowest, anchor, edge, end, reachable = below_ceilings(self.slope, most, mass, x, keep, xp)
        low = lowest - (row_top(x, keep, xp) - anchor)
        low = xp.where(edge > low, edge, low)
        return anchor, self._between(low, end, x - anchor, keep, reachable, xp)

    def at(self, x: Array, anchor: Array, level: Array, xp: Namespace) -> Array:
        return self.link(self.without_rounding(x - anchor + level, level, xp), xp)

    def without_rounding(self, t: Array, level: Array, xp: Namespace) -> Array:
        """`x - tau`, where what differs from an end of p by the rounding of tau alone is that end."""
        return t

    def rate(self, p: Array, level: Array, xp: Namespace) -> Array:
        """dp_i / dlevel."""
        return self.sensitivity(p, xp)

    def threshold(self, x: Array, xp: Namespace) -> Array:
        """tau, [..., 1], with p = link(x - tau)."""
        y, keep, poisoned = finite_scores(x, xp)
        anchor, level = self.solve(y, keep, xp)
        tau = xp.where(xp.any(keep, axis=-1, keepdims=True), anchor - level, -math.inf * xp.ones_like(level))
        return poison(tau, poisoned, xp)

    def moving_threshold(self, x: Array, p: Array, xp: Namespace) -> Array:
        tau = self.moving_mean(x, p, xp)
        # a row whose classes all have 0 or their ceiling moves with the lowest of the latter
        if self.ceiling(x, xp) is not None:
            p0 = stop_gradient(p)
            free = xp.any(~(self.sensitivity(p0, xp) <= 0), axis=-1, keepdims=True)
            lowest = -top(xp.where(p0 > 0, -x, -math.inf * xp.ones_like(x)), xp)
            tau = xp.where(free | (stop_gradient(lowest) == math.inf), tau, lowest)
        return tau - self.level_to_tau(tau, xp) if self.params() else tau

    def moving_mean(self, x: Array, p: Array, xp: Namespace, totals: Totals = totals) -> Array:
        """The mean of `x_i - omega'(p_i)`, [..., 1], with constant weights. It is the same for each class with p between 0 and its ceiling,
        `anchor - level`, so all of its derivatives are those of this number; 0 without such a class."""
        x, _, _ = finite_scores(x, xp)
        s = stop_gradient(self.sensitivity(p, xp))
        inside = ~(s <= 0)  # NaN counts, so that it stays
        if self.steep:
            largest = xp.finfo(s.dtype).max ** 0.5
            s = xp.where(s > largest, largest * xp.ones_like(s), s)
        each = xp.where(inside, x - self.slope(safe(p, inside, 0.5, xp), xp), xp.zeros_like(x))
        mean, rate = totals([s * each, s], xp)
        rate = stop_gradient(rate)
        return mean / xp.where(rate == 0, xp.ones_like(rate), rate)

    # -- the contract -----------------------------------------------------------------------------------------------------

    def forward(self, x: Array, xp: Namespace) -> Array:
        y, keep, poisoned = finite_scores(x, xp)
        anchor, level = self.solve(y, keep, xp)
        p = xp.where(keep, self.at(y, anchor, level, xp), xp.zeros_like(y))
        return finish(p + self.remainder(p, level, xp), keep, poisoned | xp.isnan(level), xp)

    def hold(self, x: Array, xp: Namespace) -> Array:
        y, keep, _ = finite_scores(x, xp)
        return xp.concat(self.solve(y, keep, xp), axis=-1)

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        """Two Newton steps from a constant level: the first makes the first derivative exact, the second the second."""
        ends: Array = stop_gradient(self.frozen().hold(stop_gradient(x), xp)) if held is None else held
        y, keep, poisoned = finite_scores(x, xp)
        return self.on_level(y, keep, poisoned, ends[..., :1], ends[..., 1:], xp)

    def on_level(
        self, y: Array, keep: Array, poisoned: Array, anchor: Array, level: Array, xp: Namespace, totals: Totals = totals
    ) -> Array:  # fmt: skip
        mass = like(self.mass, y, xp)
        for _ in range(2):
            p = xp.where(keep, self.at(y, anchor, level, xp), xp.zeros_like(y))
            sum_p, rate = totals([p, stop_gradient(self.rate(p, level, xp))], xp)
            rate = stop_gradient(rate)
            level = level + (mass - sum_p) / xp.where(rate > 0, rate, xp.ones_like(rate))
        p = xp.where(keep, self.at(y, anchor, level, xp), xp.zeros_like(y))
        return finish(p + stop_gradient(self.remainder(p, level, xp, totals)), keep, poisoned | xp.isnan(level), xp)

    def remainder(self, p: Array, level: Array, xp: Namespace, totals: Totals = totals) -> Array:
        """One Newton step in p along dp/dlevel. It restores what rounding the level to the working precision has lost."""
        rate = self.rate(p, level, xp)
        sum_p, sum_rate = totals([p, rate], xp)
        lost = like(self.mass, p, xp) - sum_p
        change = lost * rate / xp.where(sum_rate > 0, sum_rate, xp.ones_like(sum_rate))
        change, most = xp.where(change > -p, change, -p), self.ceiling(p, xp)
        return change if most is None else xp.where(change < most - p, change, most - p)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        s = self._finite_sensitivity(p, xp)
        if self.steep:  # g minus that of the largest s_i does not cancel
            g = g - take(g, xp.argmax(stop_gradient(s), axis=-1, keepdims=True), xp)
        rate = total(s, xp)
        return s * (g - dot(s, g, xp) / xp.where(rate == 0, xp.ones_like(rate), rate))

    # -- the derivatives by a parameter -----------------------------------------------------------------------------------

    def link_rate(self, name: str, p: Array, xp: Namespace) -> Array:
        """The derivative of the link by a parameter at a constant argument, or that plus a multiple of `sensitivity`; 0 where p is 0."""
        raise TypeError(f"{self.name} has no derivative by {name} in closed form")

    def mass_rate(self, name: str) -> float:
        """The derivative of `mass` by a parameter."""
        return 0.0

    def param_jvp(
        self, name: str, x: Array, p: Array, v: Array, xp: Namespace, totals: Totals = totals
    ) -> Array:  # fmt: skip
        """`r - s (sum r - m) / sum s` times v: r is `link_rate`, s the sensitivity and m `mass_rate`."""
        s, gained = self._finite_sensitivity(p, xp), self.mass_rate(name)
        r = None if gained else self.link_rate(name, p, xp)
        rate, *moved = totals([s] if r is None else [s, r], xp)
        share = s / xp.where(rate == 0, xp.ones_like(rate), rate)
        return gained * share * v if r is None else (r - share * moved[0]) * v

    def _finite_sensitivity(self, p: Array, xp: Namespace) -> Array:
        """`sensitivity`, bounded where it may be infinite: one s_i may exceed all others by many orders of magnitude."""
        s = self.sensitivity(p, xp)
        if not self.steep:
            return s
        largest = xp.finfo(s.dtype).max ** 0.75
        return xp.where(s > largest, largest * xp.ones_like(s), s)

    def omega(self, q: Array, xp: Namespace) -> Array:
        """The sum of `omega_terms` minus an affine function, so that it is 0 at every vertex however the terms are normalised."""
        zero = xp.zeros_like(q[..., :1])
        base = self.omega_terms(zero, xp)
        rise = self.omega_terms(zero + 1.0, xp) - base
        return total(self.omega_terms(q, xp) - base - rise * q, xp)

    def omega_slope(self, q: Array, xp: Namespace) -> Array:
        return self.slope(safe(q, q > 0, 1.0, xp), xp)

    # -- classes that lie on several processes ---------------------------------------------------------------------------

    @property
    def parts(self) -> Parts:  # type: ignore[override]
        return Parts(zeros_stay=self.facts.sparse, constant=SUMMED)

    def sums_suffice(self, x: Array, xp: Namespace) -> bool:
        """True where sums along the classes alone find the level of rows like x, by `search`."""
        return self.searches_by_sums and self.ceiling(x[..., :1], xp) is None

    def level_to_tau(self, level: Array, xp: Namespace) -> Any:
        """`threshold` is `anchor - level` minus this."""
        return 0.0


def _brief(value: Any) -> str:
    return f"{list(value.shape)} of each row" if is_array(value) else f"{value:g}"
