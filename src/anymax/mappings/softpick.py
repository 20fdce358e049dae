"""Softpick: a softmax from which every score of 0 or less gets exactly 0, and whose rows may sum to less than 1."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .._array import Array, Namespace, check_scalar, dot, finish, finite_scores, stop_gradient, top, total
from .._core.facts import Facts
from .._core.mapping import Mapping


@dataclasses.dataclass(frozen=True, eq=False)
class Softpick(Mapping):
    """Softpick, `p_i = max(exp(x_i) - 1, 0) / (sum_j |exp(x_j) - 1| + epsilon)`: exact zeros at scores up to 0, and sums from 0 to 1.

    Use it in attention without a sink: a query whose scores are all 0 or less attends to nothing. Scores below 0 get no probability
    and still have a gradient, through the sum. It is not shift-invariant. Its loss is `nll`. Zuhri et al. 2025.

    Parameters
    ----------
    epsilon
        What is added to the sum, a number of at least 0.

    Examples
    --------
    >>> anymax.apply(anymax.Softpick(), [2.0, 1.0, -1.0]).round(3)
    array([0.731, 0.197, 0.   ])
    >>> anymax.apply(anymax.Softpick(), [-1.0, -2.0])
    array([0., 0.])
    """

    epsilon: float = 1e-8

    name = "softpick"
    kernel = "softpick"
    formula = "pᵢ = (exp(xᵢ) − 1)₊ / (Σ abs(exp(xⱼ) − 1) + ε)"

    def __post_init__(self) -> None:
        allowed = lambda v: 0 <= v < math.inf  # noqa: E731
        epsilon = check_scalar("Softpick: epsilon", self.epsilon, allowed, "a finite number of at least 0")
        object.__setattr__(self, "epsilon", float(epsilon))

    @property
    def facts(self) -> Facts:
        return Facts(monotone=True, shift_invariant=False, sparse=True, has_potential=False)

    def sums(self, keep: Array | None, xp: Namespace) -> tuple[Any, Any]:
        return 0.0, 1.0

    @property
    def sums_to_one(self) -> bool:
        return False

    def _parts(self, x: Array, xp: Namespace) -> tuple[Array, Array, Array, Array, Array]:
        """(exp(x) - 1, exp(x), their common divisor, keep, poisoned), the first two times a factor that is a constant of the row."""
        y, keep, poisoned = finite_scores(x, xp)
        high = stop_gradient(top(y, xp))
        high = xp.where(high > 0, high, xp.zeros_like(high))
        above = y > 0
        # exp(x - high) (1 - exp(-x)) above 0, exp(-high) (exp(x) - 1) below: neither overflows nor cancels
        up = xp.where(above, y, xp.zeros_like(y))
        less = xp.where(above, -xp.exp(up - high) * xp.expm1(-up), xp.exp(-high) * xp.expm1(y - up))
        less = xp.where(keep, less, xp.zeros_like(y))
        rise = xp.where(keep, xp.exp(y - high), xp.zeros_like(y))
        size = total(xp.where(above, less, -less), xp) + self.epsilon * xp.exp(-high)
        return less, rise, xp.where(size > 0, size, xp.ones_like(size)), keep, poisoned

    def forward(self, x: Array, xp: Namespace) -> Array:
        less, _, size, keep, poisoned = self._parts(x, xp)
        return finish(xp.where(less > 0, less, xp.zeros_like(less)) / size, keep, poisoned, xp)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        less, rise, size, keep, poisoned = self._parts(x, xp)
        own = xp.where(less > 0, g, xp.zeros_like(g))
        pull = dot(p, g, xp)
        return finish(rise * (own - xp.where(less > 0, pull, -pull)) / size, keep, poisoned, xp)

    def jvp(self, x: Array, p: Array, v: Array, xp: Namespace) -> Array:
        less, rise, size, keep, poisoned = self._parts(x, xp)
        change = xp.where(keep, rise * v, xp.zeros_like(v))
        up = xp.where(less > 0, change, xp.zeros_like(change))
        return finish((up - p * total(xp.where(less > 0, change, -change), xp)) / size, keep, poisoned, xp)
