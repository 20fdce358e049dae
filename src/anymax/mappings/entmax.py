"""Entmax: the maps of all Tsallis entropies: heavy tails (alpha < 1), softmax (1), 1.5-entmax, sparsemax (2) and beyond."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from .._array import (
    POSITIVE,
    Array,
    Namespace,
    Ranges,
    eager,
    expm1_over,
    finite_scores,
    is_array,
    known,
    known_any,
    like,
    log1p_over,
    phi,
    plain_number,
    poison,
    power,
    psi,
    safe,
    sorts_quickly,
    total,
)
from .._core.facts import Facts
from .._core.mapping import positive, row_top
from .._core.parameters import check_ranges
from .._core.parts import SUMMED, Parts
from .._core.separable import Separable
from .._core.solve import Totals, anchored_power, pivot, root, sorted_power_threshold, totals
from .._core.typing import Parameter
from .softmax import Softmax

_SORTED = {1.0 / 3.0: 3, 0.5: 2, 1.0: 1}  # alpha - 1 -> r = 1 / (alpha - 1), where a closed form exists


@dataclasses.dataclass(frozen=True, eq=False)
class Entmax(Separable):
    """alpha-entmax: `p_i = max((alpha-1)(x_i - tau), 0)^(1/(alpha-1))`, the map of the Tsallis entropy
    `(1 - sum p^alpha) / (alpha (alpha-1))`.

    Use it between softmax (alpha = 1) and sparsemax (alpha = 2), or learn alpha; sparse above 1, heavy-tailed below. The loss is 0 once
    the target leads by 1/(alpha-1). Peters, Niculae and Martins 2019. Closed forms at 4/3, 3/2 and 2; otherwise Newton's method. fp32
    total variation error below 2e-7.

    Parameters
    ----------
    alpha
        A number above 0, or an array that broadcasts to the scores with size 1 along the classes; a tensor may be learned,
        with an exact gradient through the map and through the loss.

    Examples
    --------
    >>> anymax.apply(anymax.Entmax(alpha=1.5), [1.0, 0.0, -1.0]).round(4)
    array([0.8307, 0.1693, 0.    ])
    """

    # Newton's method works on the r-norm of (x - tau)_+, r = 1/(alpha-1), which is convex. Above alpha = 2, where the edge of the
    # support is infinitely steep, the row is anchored at the smallest supported score (see `solve.pivot`).

    alpha: Parameter = 1.5

    name = "entmax"
    formula = "pᵢ = ((α−1)(xᵢ − τ))₊^(1/(α−1))"
    kernel = "entmax"
    array_field = "alpha"
    learns = ("alpha",)
    searches_by_sums = True  # up to alpha = 2
    ranges: ClassVar[Ranges] = {"alpha": POSITIVE}

    def __post_init__(self) -> None:
        check_ranges(self, "1 is softmax, 1.5 the usual choice, 2 sparsemax", "alpha")

    @property
    def facts(self) -> Facts:
        alpha: Any = self.alpha
        if is_array(alpha):
            above = number > 1 if (number := plain_number(alpha)) is not None else (alpha > 1).any()
            sparse = not known(above) or bool(above)
            return Facts(monotone=True, shift_invariant=True, sparse=sparse, has_potential=True)
        margin = 1.0 / (alpha - 1.0) if alpha > 1 else None
        return Facts(monotone=True, shift_invariant=True, sparse=alpha > 1, has_potential=True, margin=margin)

    @property
    def steep(self) -> bool:  # type: ignore[override]
        alpha: Any = self.alpha
        return is_array(alpha) or alpha > 2

    @property
    def is_softmax(self) -> bool:  # type: ignore[override]
        return self._at_one()

    @property
    def parts(self) -> Parts:  # type: ignore[override]
        temperature = 1.0 if self._at_one() else None
        return Parts(
            zeros_stay=self.facts.sparse,
            zero_below_threshold=True,
            temperature=temperature,
            learns_by_sums=("alpha",),
            constant=SUMMED,
        )

    def _c(self, x: Array, xp: Namespace) -> Any:
        return like(self.alpha, x, xp) - 1.0

    # -- the link, in t = (p^c - 1) / c, which is smooth in alpha at alpha = 1 --------------------------------------------

    def link(self, t: Array, xp: Namespace) -> Array:
        return _link(t, self._c(t, xp), xp)

    def slope(self, q: Array, xp: Namespace) -> Array:
        return expm1_over(self._c(q, xp), xp.log(q), xp)

    def curvature(self, q: Array, xp: Namespace) -> Array:
        return q ** (self._c(q, xp) - 1.0)

    def sensitivity(self, p: Array, xp: Namespace) -> Array:
        inside = positive(p)
        c = self._c(p, xp)
        if not is_array(c) and c in (0.0, 1.0):
            return p if c == 0.0 else xp.where(inside, xp.ones_like(p) + 0.0 * p, xp.zeros_like(p))
        q = safe(p, inside, 1.0, xp)
        # XLA takes an exponential many times as fast as a power of an array
        s = xp.exp((1.0 - c) * xp.log(q)) if is_array(c) else q ** (1.0 - c)
        return xp.where(inside, s, xp.zeros_like(p))

    def omega_terms(self, q: Array, xp: Namespace) -> Array:
        return tsallis_terms(q, like(self.alpha, q, xp), xp)

    # -- the derivative by alpha -------------------------------------------------------------------------------------------

    def link_rate(self, name: str, p: Array, xp: Namespace) -> Array:
        """`-p log^2 p phi(-c log p)`, smooth at alpha = 1; from alpha = 1.5 on `p (1 - c log p) / c^2`, which is that plus `s / c^2`."""
        return link_rate(p, self._c(p, xp), xp)

    def loss_slope(self, name: str, x: Array, p: Array, xp: Namespace) -> Array:
        """`-d Omega / d alpha` at p."""
        alpha = like(self.alpha, p, xp)
        inside = positive(p)
        q = safe(p, inside, 1.0, xp)
        log_q = xp.log(q)
        bent = q * log_q * log_q * psi((alpha - 1.0) * log_q, xp)
        terms = tsallis_terms(q, alpha, xp) - bent
        return total(xp.where(inside, terms, xp.zeros_like(p)), xp) / alpha

    # -- the threshold ----------------------------------------------------------------------------------------------------

    def solve(self, x: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
        """(anchor, level): up to alpha = 2 the maximum and its t; above, the smallest supported score and its probability."""
        c = self._c(x, xp)
        if not is_array(c):
            return pivot(x, keep, c, xp) if c > 1.0 else super().solve(x, keep, xp)
        c = c * xp.ones_like(total(x, xp))  # [..., 1], one per row
        steep = c > 1.0
        look = eager(c)
        anchor = row_top(x, keep, xp)
        level = xp.zeros_like(anchor)
        if not (look and bool(xp.all(steep))):
            level = self._search(x - anchor, keep, xp.where(steep, xp.ones_like(c), c), xp)
        if not (look and not bool(xp.any(steep))):
            low, q = pivot(x, keep, xp.where(steep, c, xp.ones_like(c)), xp)
            anchor, level = xp.where(steep, low, anchor), xp.where(steep, q, level)
        return anchor, poison(level, ~(c > -1.0), xp)

    def closed(self, y: Array, keep: Array, xp: Namespace) -> Array | None:
        c = self._c(y, xp)
        if is_array(c):
            return None
        if c == 0.0:
            return Softmax().closed(y, keep, xp)
        r = next((r for value, r in _SORTED.items() if abs(c - value) < 1e-15), None)
        if r is None or not sorts_quickly(y):
            return None
        z = xp.where(keep, c * y, -xp.ones_like(y))
        return -(1.0 + sorted_power_threshold(z, r, xp)) / c

    def search(
        self, y: Array, keep: Array, xp: Namespace, start: Array | None = None, totals: Totals = totals
    ) -> Array:
        return self._search(y, keep, self._c(y, xp), xp, start, totals)

    def _search(
        self, y: Array, keep: Array, c: Any, xp: Namespace, start: Array | None = None, totals: Totals = totals
    ) -> Array:
        """Newton's method on the r-norm, from the upper end; for alpha <= 2 it is convex, so Newton does not cross the root."""
        (count,) = totals([xp.astype(keep, y.dtype)], xp)
        one = xp.ones_like(count)
        low = expm1_over(c, -xp.log(xp.where(count > 0, count, one)), xp) * one

        def evaluate(level: Array) -> tuple[Array, Array]:
            p = xp.where(keep, _link_from(y, level, c, xp), xp.zeros_like(y))
            inside = p > 0
            s0, s1 = totals([p, xp.where(inside, safe(p, inside, 1.0, xp) ** (1.0 - c), xp.zeros_like(p))], xp)
            ratio = xp.where(s0 > 0, s0, one)
            step = ratio * expm1_over(-c, xp.log(ratio), xp) / xp.where(s1 > 0, s1, one)
            return s0 - 1.0, -step

        return root(evaluate, low, xp.zeros_like(low), xp, start=start)

    def at(self, x: Array, anchor: Array, level: Array, xp: Namespace) -> Array:
        c = self._c(x, xp)
        if not is_array(c):
            return self._above(x, anchor, level, c, xp) if c > 1.0 else _link_from(x - anchor, level, c, xp)
        steep = c > 1.0
        one, half = xp.ones_like(c), 0.5 * xp.ones_like(level)
        flat = _link_from(x - anchor, xp.where(steep, xp.zeros_like(level), level), xp.where(steep, one, c), xp)
        sharp = self._above(x, anchor, xp.where(steep, level, half), xp.where(steep, c, one), xp)
        return poison(xp.where(steep, sharp, flat), ~(c > -1.0), xp)

    def _above(self, x: Array, anchor: Array, q: Array, c: Any, xp: Namespace) -> Array:
        gap = x - anchor
        return anchored_power(q, gap, gap >= 0, c, xp)

    def rate(self, p: Array, level: Array, xp: Namespace) -> Array:
        c = self._c(p, xp)
        flat = is_array(c) or c <= 1.0
        s = self.sensitivity(p, xp)
        if flat and not is_array(c):
            return s
        inside = p > 0
        ratio = xp.where(inside, level / safe(p, inside, 1.0, xp), xp.zeros_like(p))
        sharp = power(ratio, c - 1.0, xp)
        return sharp if not flat else xp.where(c > 1.0, sharp, s)

    def sums_suffice(self, x: Array, xp: Namespace) -> bool:
        alpha: Any = self.alpha
        if not super().sums_suffice(x, xp):
            return False
        return not known_any(~(alpha <= 2.0), xp) and known(alpha) if is_array(alpha) else alpha <= 2.0

    def level_to_tau(self, level: Array, xp: Namespace) -> Any:
        c = self._c(level, xp)
        if not is_array(c):
            return 1.0 / c if c else 0.0
        plain = c == 0  # softmax
        return xp.where(plain, xp.zeros_like(c), 1.0 / safe(c, ~plain, 1.0, xp))

    def threshold(self, x: Array, xp: Namespace) -> Array:
        """tau with `p = ((alpha-1)(x - tau))_+^(1/(alpha-1))`; logsumexp at alpha = 1."""
        c = self._c(x, xp)
        if not is_array(c) and c == 0.0:
            return Softmax().threshold(x, xp)
        tau = super().threshold(x, xp)  # anchor - level
        if not is_array(c) and c <= 1.0:
            return tau - 1.0 / c
        # above alpha = 2 the level is a probability q, and (alpha-1)(anchor - tau) = q^(alpha-1)
        y, keep, _ = finite_scores(x, xp)
        _, q = self.solve(y, keep, xp)
        ones = xp.ones_like(q) * c
        nonzero = xp.where(ones == 0, xp.ones_like(ones), ones)
        sharp = tau + q - power(q, nonzero, xp) / nonzero
        flat = xp.where(ones == 0, tau, tau - 1.0 / nonzero)
        return xp.where(ones > 1.0, sharp, flat)

    # -- alpha = 1 is exactly softmax ---------------------------------------------------------------------------------------

    def forward(self, x: Array, xp: Namespace) -> Array:
        return Softmax().forward(x, xp) if self._at_one() else super().forward(x, xp)

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        return Softmax().differentiable(x, xp) if self._at_one() else super().differentiable(x, xp, held)

    def log_forward(self, x: Array, xp: Namespace) -> Array | None:
        return Softmax().log_forward(x, xp) if self._at_one() else None

    def _at_one(self) -> bool:
        return not is_array(self.alpha) and self.alpha == 1


def tsallis_terms(q: Array, alpha: Any, xp: Namespace) -> Array:
    """`(q^alpha - q) / (alpha (alpha-1))`, as `q expm1((alpha-1) log q) / ((alpha-1) alpha)`; 0 where q is not above 0."""
    inside = q > 0
    s = safe(q, inside, 1.0, xp)
    return xp.where(inside, s * expm1_over(alpha - 1.0, xp.log(s), xp) / alpha, xp.zeros_like(q))


def link_rate(p: Array, c: Any, xp: Namespace) -> Array:
    """The derivative of `(1 + c t)_+^(1/c)` by c at a constant t, as a function of p, less a multiple of `p^(1-c)`; 0 where p is 0."""
    inside = positive(p)
    q = safe(p, inside, 1.0, xp)
    log_q = xp.log(q)
    far = c >= 0.5
    if not is_array(c):
        r = q * (1.0 - c * log_q) / (c * c) if far else -q * log_q * log_q * phi(-c * log_q, xp)
    else:
        one, zero = xp.ones_like(c), xp.zeros_like(c)
        away, near = xp.where(far, c, one), xp.where(far, zero, c)
        r = xp.where(
            far, q * (1.0 - away * log_q) / (away * away), -q * log_q * log_q * phi(-near * log_q, xp)
        )  # fmt: skip
    return xp.where(inside, r, xp.zeros_like(p))


def _link(t: Array, c: Any, xp: Namespace) -> Array:
    """`(1 + c t)_+^(1/c)`, exp(t) at c = 0. For |c| >= 0.3 it is a power, whose relative error is about eps / c."""
    if not is_array(c):
        if c == 0.0:
            return xp.exp(t)
        if abs(c) >= 0.3:
            return power(1.0 + c * t, 1.0 / c, xp)
    w = c * t
    inside = w > -1.0
    return xp.where(inside, xp.exp(log1p_over(c, xp.where(inside, t, xp.zeros_like(t)), xp)), xp.zeros_like(t))


def _link_from(y: Array, level: Array, c: Any, xp: Namespace) -> Array:
    """`link(y + level)` as `P link(y / P^c)` with P = link(level), the probability at the anchor.

    In a flat row over many classes the level is large and y is small; their sum would round away the differences between classes.
    """
    if not is_array(c) and abs(c) >= 0.3:
        return power((1.0 + c * level) + c * y, 1.0 / c, xp)  # only the first sum is rounded, which shifts the level
    return _link(level, c, xp) * _link(y / (1.0 + c * level), c, xp)
