"""Budget: k units of probability, at most one for each class."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from .._array import (
    Array,
    Namespace,
    check_number,
    dot,
    finite_scores,
    is_array,
    known_largest,
    like,
    stop_gradient,
    top,
    total,
)
from .._core.facts import Facts
from .._core.separable import Separable
from .._core.typing import Parameter


@dataclasses.dataclass(frozen=True, eq=False)
class Budget(Separable):
    """Budget, the point nearest to x with `0 <= p_i <= 1` and `sum_i p_i = k`: `p_i = min(max(x_i - tau, 0), 1)`.

    Use it to choose k of n classes, as a layer with a gradient; k = 1 is sparsemax. In a row with fewer than k unmasked classes each
    of them gets 1.

    Parameters
    ----------
    k
        The sum of p, a number above 0, or an array that broadcasts to the scores with size 1 along the classes; it has a
        gradient. A k above the number of classes is an error; in an array whose values can't be read, as under a compiler,
        each class gets 1.

    Examples
    --------
    >>> anymax.apply(anymax.Budget(k=2), [3.0, 1.0, 0.5, -9.0])
    array([1.  , 0.75, 0.25, 0.  ])
    """

    k: Parameter = 1.0

    name = "budget"
    formula = "pᵢ = min((xᵢ − τ)₊, 1), Σp = k"
    kernel = "budget"
    zero_below_threshold = True
    array_field = "k"
    example: ClassVar[dict[str, Any]] = {"k": 2}

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "k", check_number("Budget", "k", self.k, above=0.0, hint="the sum that the probabilities shall have")
        )

    @property
    def mass(self) -> Any:  # type: ignore[override]
        return self.k

    @property
    def full_up_to(self) -> Any:  # type: ignore[override]
        return self.k

    @property
    def facts(self) -> Facts:
        return Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True, margin=1.0)

    def omega_terms(self, q: Array, xp: Namespace) -> Array:
        return 0.5 * q * (q - 1.0)

    def link(self, t: Array, xp: Namespace) -> Array:
        return xp.where(t > 0, xp.where(t < 1, t, xp.ones_like(t)), xp.zeros_like(t))

    def slope(self, q: Array, xp: Namespace) -> Array:
        return q

    def curvature(self, q: Array, xp: Namespace) -> Array:
        return xp.ones_like(q)

    def ceiling(self, x: Array, xp: Namespace) -> float:
        return 1.0

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        """The generic loss takes p as a constant and so lacks the derivative in k, the sum of p: d Omega* / dk = tau + 1/2."""
        value = super().loss(x, p, y, xp)
        if not is_array(self.k):
            return value
        x, keep, _ = finite_scores(x, xp)
        k, held = like(self.k, x, xp), stop_gradient(p)
        inside, full = (held > 0) & (held < 1) & keep, held >= 1
        count = total(xp.astype(inside, x.dtype), xp)
        lowest = -top(xp.where(full, -x, -xp.inf * xp.ones_like(x)), xp)  # if no class is inside, tau may be lowest - 1
        lowest = xp.where(count > 0, xp.zeros_like(lowest), lowest)
        tau = total(xp.where(inside, x, xp.zeros_like(x)), xp) + total(xp.astype(full, x.dtype), xp) - k
        tau = xp.where(count > 0, tau / xp.where(count > 0, count, xp.ones_like(count)), lowest - 1.0)
        price = tau + 0.5
        # the generic loss is centred for targets that sum to k; those of a difference quotient in k do not
        aim = total(y, xp)
        centre = dot(y, x, xp) / xp.where(aim == 0, xp.ones_like(aim), aim)
        value = value + stop_gradient(centre * (k - aim))
        # half of the mixed second derivative in k and x comes from here, the other half from the generic loss
        return value + (k - stop_gradient(k)) * (stop_gradient(price) + 0.5 * (price - stop_gradient(price)))

    def check(self, n: int) -> None:
        k: Any = known_largest(self.k) if is_array(self.k) else self.k
        if k is not None and k > n:
            raise ValueError(
                f"Budget(k={k}): k classes can't be chosen of {n}; k must be at most the number of classes"
            )
