"""Budget: k units of probability, at most one for each class; relaxed top-k."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

from .._array import (
    BELOW_1,
    NOT_NEGATIVE,
    Array,
    Namespace,
    Ranges,
    dot,
    dtype_name,
    finite_scores,
    is_array,
    known_largest,
    like,
    safe,
    sigmoid,
    stop_gradient,
    top,
    total,
    xlogx,
)
from .._core.facts import Facts
from .._core.parameters import check_ranges
from .._core.parts import SUMMED, Parts
from .._core.separable import Separable
from .._core.typing import Parameter

_NEARLY_1 = 1.0 - 2.0**-20  # what is no further from 1 may be 1 but for the rounding of the threshold

_FORMULAS = {
    "linear": "pᵢ = min((xᵢ − τ)₊, 1), Σp = k",
    "sigmoid": "pᵢ = 1 / (1 + exp(τ − xᵢ)), Σp = k",
    "laplace": "pᵢ = F(xᵢ − τ), F the distribution function of Laplace, Σp = k",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Budget(Separable):
    """Budget, a relaxed top-k: `p_i = F(x_i - tau)` with a rising F from 0 to 1, and tau such that `sum_i p_i = k`.

    Use it to choose k of n classes, as a layer with a gradient. The default is the point nearest to x with `0 <= p_i <= 1` and
    `sum_i p_i = k`, `p_i = min(max(x_i - tau, 0), 1)`; k = 1 is sparsemax. In a row with fewer than k unmasked classes each of them
    gets 1.

    Parameters
    ----------
    k
        The sum of p, a number of at least 0, or an array that broadcasts to the scores with size 1 along the classes; it has a
        gradient. 0 gives zeros. A k above the number of classes is an error; in an array whose values can't be read, as under a compiler,
        each class gets 1.
    shape
        F: "linear" has exact zeros and ones; "sigmoid" is `1 / (1 + exp(-t))`, and "laplace" is `exp(t) / 2` below 0 and
        `1 - exp(-t) / 2` above, as in LapSum (Struski et al. 2025). Both leave each class strictly between 0 and 1, with a
        gradient for all of them; where half precision rounds a class to 1, its gradient is 0.

    Examples
    --------
    >>> anymax.apply(anymax.Budget(k=2), [3.0, 1.0, 0.5, -9.0])
    array([1.  , 0.75, 0.25, 0.  ])
    >>> anymax.apply(anymax.Budget(k=2, shape="sigmoid"), [3.0, 1.0, 0.5, -9.0]).round(3)
    array([0.918, 0.603, 0.479, 0.   ])
    """

    k: Parameter = 1.0
    shape: Literal["linear", "sigmoid", "laplace"] = "linear"

    name = "budget"
    formula = _FORMULAS["linear"]
    kernel = "budget"
    array_field = "k"
    learns = ("k",)
    example: ClassVar[dict[str, Any]] = {"k": 2}
    ranges: ClassVar[Ranges] = {"k": NOT_NEGATIVE}

    def __post_init__(self) -> None:
        check_ranges(self, "the sum that the probabilities shall have", "k")
        if not isinstance(self.shape, str) or self.shape not in _FORMULAS:
            raise ValueError(f"Budget: shape must be one of {', '.join(map(repr, _FORMULAS))}, got {self.shape!r}")
        if self.shape != "linear":  # of what the class says of itself, this holds for "linear" only
            for field, value in (("formula", _FORMULAS[self.shape]), ("kernel", None)):
                object.__setattr__(self, field, value)

    @property
    def mass(self) -> Any:  # type: ignore[override]
        return self.k

    @property
    def sums_to_one(self) -> bool:
        return not is_array(self.k) and self.k == 1.0  # the bound of one class is no less

    @property
    def parts(self) -> Parts:  # type: ignore[override]
        linear = self.shape == "linear"
        return Parts(
            zeros_stay=linear, zero_below_threshold=linear, full_up_to=self.k, learns_by_sums=("k",), constant=SUMMED
        )

    @property
    def facts(self) -> Facts:
        linear = self.shape == "linear"
        margin = 1.0 if linear else None
        return Facts(monotone=True, shift_invariant=True, sparse=linear, has_potential=True, margin=margin)

    def omega_terms(self, q: Array, xp: Namespace) -> Array:
        if self.shape == "linear":
            return 0.5 * q * (q - 1.0)
        if self.shape == "sigmoid":
            return xlogx(q, xp) + xlogx(1.0 - q, xp)
        rest = _nearest_end(q, xp)
        return xlogx(rest, xp) + (math.log(2.0) - 1.0) * rest

    def without_rounding(self, t: Array, level: Array, xp: Namespace) -> Array:
        if self.shape != "linear":
            return t
        # the level is rounded, relative to its size, and a class at an end is to stay there
        eps, level = float(xp.finfo(t.dtype).eps), stop_gradient(level)
        small = xp.where(level < 1.0, level, xp.ones_like(level))
        t = xp.where(t > 2.0 * eps * small, t, xp.zeros_like(t))
        return xp.where(t < 1.0 - eps, t, xp.ones_like(t))

    def link(self, t: Array, xp: Namespace) -> Array:
        if self.shape == "linear":
            return xp.where(t > 0, xp.where(t < 1, t, xp.ones_like(t)), xp.zeros_like(t))
        if self.shape == "sigmoid":
            return sigmoid(t, xp)
        rest = 0.5 * xp.exp(xp.where(t < 0, t, -t))  # not by the absolute value, whose derivative at 0 is 0
        return xp.where(t < 0, rest, 1.0 - rest)

    def slope(self, q: Array, xp: Namespace) -> Array:
        if self.shape == "linear":
            return q
        if self.shape == "sigmoid":
            return xp.log(q) - xp.log1p(-q)
        lifted = xp.log(2.0 * _nearest_end(q, xp))
        return xp.where(q < 0.5, lifted, -lifted)

    def curvature(self, q: Array, xp: Namespace) -> Array:
        if self.shape == "linear":
            return xp.ones_like(q)
        return 1.0 / (q * (1.0 - q) if self.shape == "sigmoid" else _nearest_end(q, xp))

    def sensitivity(self, p: Array, xp: Namespace) -> Array:
        if self.shape == "linear":
            return super().sensitivity(p, xp)
        return p * (1.0 - p) if self.shape == "sigmoid" else _nearest_end(p, xp)

    def mass_rate(self, name: str) -> float:
        return 1.0

    def loss_slope(self, name: str, x: Array, p: Array, xp: Namespace) -> Array:
        """`d Omega* / dk = tau`, plus 1/2 for "linear", whose Omega is 0 at the vertices by half of the sum."""
        x, keep, _ = finite_scores(x, xp)
        tau = self._threshold_beside(x, keep, p, like(self.k, x, xp), xp)
        # a row without classes has no price
        tau = xp.where(xp.any(keep, axis=-1, keepdims=True), tau, xp.zeros_like(tau))
        return tau + 0.5 if self.shape == "linear" else tau

    def omega_slope(self, q: Array, xp: Namespace) -> Array:
        inside = q > 0
        if self.shape != "linear":  # its slope is infinite at 1
            inside = inside & (q < 1)
        return self.slope(safe(q, inside, 0.5, xp), xp)

    def ceiling(self, x: Array, xp: Namespace) -> float:
        return 1.0

    def in_dtype_of(self, p: Array, x: Array, xp: Namespace) -> Array:
        """A class below its bound stays below: at 1, to which half precision would round it, it would have no gradient."""
        if self.shape == "linear" and (most := BELOW_1.get(dtype_name(x))):
            p = p + stop_gradient(xp.where((p > most) & (p < _NEARLY_1), most - p, xp.zeros_like(p)))
        return xp.astype(p, x.dtype)

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        """The generic loss takes p as a constant and so lacks the derivative in k, the sum of p.

        That is `d Omega* / dk = tau`, plus 1/2 for "linear", whose Omega is 0 at the vertices by half of the sum.
        """
        value = super().loss(x, p, y, xp)
        if not is_array(self.k):
            return value
        x, keep, _ = finite_scores(x, xp)
        k, held = like(self.k, x, xp), stop_gradient(p)
        price = self._threshold_beside(x, keep, held, k, xp) + (0.5 if self.shape == "linear" else 0.0)
        # the generic loss is centred for targets that sum to k; those of a difference quotient in k do not
        aim = total(y, xp)
        centre = dot(y, x, xp) / xp.where(aim == 0, xp.ones_like(aim), aim)
        value = value + stop_gradient(centre * (k - aim))
        # half of the mixed second derivative in k and x comes from here, the other half from the generic loss
        return value + (k - stop_gradient(k)) * (stop_gradient(price) + 0.5 * (price - stop_gradient(price)))

    def _threshold_beside(self, x: Array, keep: Array, held: Array, k: Array, xp: Namespace) -> Array:
        """tau, [..., 1], with its first derivatives, of a row whose p is held constant."""
        inside, full = (held > 0) & (held < 1) & keep, held >= 1
        lowest = -top(xp.where(full, -x, -math.inf * xp.ones_like(x)), xp)
        if self.shape == "linear":
            count = total(xp.astype(inside, x.dtype), xp)
            lowest = xp.where(count > 0, xp.zeros_like(lowest), lowest)  # if no class is inside, tau may be lowest - 1
            tau = total(xp.where(inside, x, xp.zeros_like(x)), xp) + total(xp.astype(full, x.dtype), xp) - k
            return xp.where(count > 0, tau / xp.where(count > 0, count, xp.ones_like(count)), lowest - 1.0)
        s = xp.where(inside, self.sensitivity(held, xp), xp.zeros_like(x))
        rate = total(s, xp)
        some = rate > 0
        rate = xp.where(some, rate, xp.ones_like(rate))
        start = stop_gradient(total(s * (x - self.omega_slope(held, xp)), xp) / rate)
        change = dot(s, x - stop_gradient(x), xp) - (k - stop_gradient(k))
        return xp.where(some, start + change / rate, xp.where(some, xp.zeros_like(lowest), lowest))

    def check(self, n: int) -> None:
        k: Any = known_largest(self.k) if is_array(self.k) else self.k
        if k is not None and k > n:
            raise ValueError(
                f"Budget(k={k}): k classes can't be chosen of {n}; k must be at most the number of classes"
            )


def _nearest_end(q: Array, xp: Namespace) -> Array:
    """The distance of q to 0 or to 1, whichever is nearer."""
    return xp.where(q < 0.5, q, 1.0 - q)
