"""NormMax: the map whose regulariser is a norm."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from .._array import (
    Array,
    Namespace,
    Range,
    Ranges,
    dot,
    finish,
    finite_scores,
    is_array,
    like,
    poison,
    power,
    safe,
    stop_gradient,
    top,
    total,
)
from .._core.facts import Facts
from .._core.mapping import Mapping, positive, row_top
from .._core.parameters import check_ranges
from .._core.parts import PartedConstant, Parts
from .._core.solve import Totals, root, totals
from .._core.typing import Parameter

# the norm of all classes is that of the parts' norms
_NORMS = PartedConstant(
    lambda m, y, xp: [m.omega(y, xp) + 1.0],
    lambda m, terms, xp: m.omega(xp.moveaxis(terms[0][..., 0], 0, -1), xp),
)


@dataclasses.dataclass(frozen=True, eq=False)
class NormMax(Mapping):
    """Normmax, `argmax <p, x> - ||p||_alpha`: p_i in proportion to `max(x_i - tau, 0)^(1/(alpha-1))`.

    Use it to choose a set of classes and treat them alike: it is sparse, and nearly uniform on its support. tau, with
    `sum_i max(x_i - tau, 0)^(alpha/(alpha-1)) = 1`, is the potential itself, so p = d tau / dx. Blondel, Martins and Niculae 2020,
    section 4.

    Parameters
    ----------
    alpha
        The order of the norm, a number above 1, or an array that broadcasts to the scores with size 1 along the classes; it
        has a gradient. A larger alpha makes the probabilities on the support more equal.

    Examples
    --------
    >>> anymax.apply(anymax.NormMax(alpha=2.0), [1.0, 1.0, -2.0])
    array([0.5, 0.5, 0. ])
    """

    alpha: Parameter = 2.0

    name = "normmax"
    formula = "argmax ⟨p, x⟩ − ‖p‖_α"
    kernel = "normmax"
    parts = Parts(zeros_stay=True, zero_below_threshold=True, learns_by_sums=("alpha",), constant=_NORMS)
    array_field = "alpha"
    learns = ("alpha",)
    iterative = True
    needs_scores = False
    ranges: ClassVar[Ranges] = {"alpha": Range(1.0, math.inf)}

    def __post_init__(self) -> None:
        check_ranges(self, "the norm must be strictly convex", "alpha")

    @property
    def facts(self) -> Facts:
        return Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True, margin=1.0)

    def _solve(self, y: Array, keep: Array, alpha: Any, xp: Namespace) -> Array:
        """The level max(x) - tau in (0, 1], by Newton's method on the beta-norm, which is convex; beta = alpha / (alpha - 1)."""
        beta = alpha / (alpha - 1.0)
        one = xp.ones_like(total(y, xp))
        count = total(xp.astype(keep, y.dtype), xp)
        low = xp.where(count > 0, count, one) ** (-1.0 / (beta * one))

        def evaluate(level: Array) -> tuple[Array, Array]:
            base = y + level
            base = xp.where(keep & (base > 0), base, xp.zeros_like(y))
            s0, s1 = total(power(base, beta, xp), xp), total(power(base, beta - 1.0, xp), xp)
            return s0 - 1.0, -(s0 - s0 ** (1.0 - 1.0 / beta)) / xp.where(s1 > 0, s1, one)

        return root(evaluate, low, one, xp)

    def forward(self, x: Array, xp: Namespace) -> Array:
        return self.differentiable(x, xp)

    def hold(self, x: Array, xp: Namespace) -> Array:
        x, keep, _ = finite_scores(x, xp)
        anchor = row_top(x, keep, xp)
        return xp.concat([anchor, self._solve(x - anchor, keep, like(self.alpha, x, xp), xp)], axis=-1)

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        """Two Newton steps from a constant level make its first and second derivatives exact; then the formula gives p."""
        ends: Array = stop_gradient(self.frozen().hold(stop_gradient(x), xp)) if held is None else held
        x, keep, poisoned = finite_scores(x, xp)
        alpha = like(self.alpha, x, xp)
        beta, r = alpha / (alpha - 1.0), 1.0 / (alpha - 1.0)
        y, level = x - ends[..., :1], ends[..., 1:]
        for _ in range(2):
            base = xp.where(keep, y + level, xp.zeros_like(y))
            slope = stop_gradient(total(beta * power(base, r, xp), xp))
            level = level + (1.0 - total(power(base, beta, xp), xp)) / xp.where(slope > 0, slope, xp.ones_like(slope))
        base = xp.where(keep, y + level, xp.zeros_like(y))
        inside = base > 0
        # For alpha <= 2 use ((y + level) / level)^r by log1p: rounding y + level would cost digits in the power, which is steep near
        # alpha = 1. Above 2 the edge of the support is steep; y + level is exact there, and its power is used.
        near = xp.exp(r * xp.log1p(xp.where(inside, y, xp.zeros_like(y)) / level))
        if is_array(alpha):
            q = xp.where(inside, xp.where(alpha <= 2.0, near, power(base, r, xp)), xp.zeros_like(y))
            q = poison(q, ~(alpha > 1.0), xp)
        else:
            q = xp.where(inside, near, xp.zeros_like(y)) if alpha <= 2.0 else power(base, r, xp)
        z = total(q, xp)
        return finish(q / xp.where(z == 0, xp.ones_like(z), z), keep, poisoned, xp)

    def threshold(self, x: Array, xp: Namespace) -> Array:
        """tau, [..., 1]."""
        _, keep, poisoned = finite_scores(x, xp)
        held = self.hold(x, xp)
        tau = held[..., :1] - held[..., 1:]
        tau = xp.where(xp.any(keep, axis=-1, keepdims=True), tau, -xp.inf * xp.ones_like(tau))
        return poison(tau, poisoned, xp)

    def moving_threshold(self, x: Array, p: Array, xp: Namespace) -> Array:
        p0 = stop_gradient(p)  # tau is the potential Omega*(x)
        return self.loss(x, p, p0, xp) + dot(p0, finite_scores(x, xp)[0], xp)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        """The Hessian of tau: `J = diag(w) - w p^T - p w^T + <w, 1> p p^T`, `w_i = p_i (||p|| / p_i)^(alpha-1) / (alpha-1)`."""
        c = like(self.alpha, p, xp) - 1.0
        h = g - dot(p, g, xp)
        wh = p * xp.exp(c * self._below_norm(p, xp)[0]) / c * h
        return wh - p * total(wh, xp)

    def _below_norm(self, p: Array, xp: Namespace, totals: Totals = totals) -> tuple[Array, Array, Array]:
        """`log(||p|| / p)`, 0 where p is 0, `||p||`, and the derivative of its logarithm by alpha at a constant p.

        All of it is that of `p / <p, p>`, whose powers are numbers for any alpha: in a row of this map nearly all of it is near to 1.
        """
        alpha, inside = like(self.alpha, p, xp), positive(p)
        size = totals([p * p], xp)[0]
        size = xp.where(size == 0, xp.ones_like(size), size)
        log_u = xp.log(safe(p / size, inside, 1.0, xp))
        powers = xp.where(inside, xp.exp(alpha * log_u), xp.zeros_like(p))
        mass, bent = totals([powers, powers * log_u], xp)
        mass = xp.where(mass == 0, xp.ones_like(mass), mass)
        level = xp.log(mass) / alpha
        return xp.where(inside, level - log_u, xp.zeros_like(p)), size * xp.exp(level), (bent / mass - level) / alpha

    def param_jvp(
        self, name: str, x: Array, p: Array, v: Array, xp: Namespace, totals: Totals = totals
    ) -> Array:  # fmt: skip
        """`a - p sum a` times v, with `a = w d||p||/d alpha - p log p / (alpha-1)` and w as in `vjp`."""
        below, norm, slope = self._below_norm(p, xp, totals)
        c = like(self.alpha, p, xp) - 1.0
        a = p * (norm * xp.exp(c * below) * slope + (below - xp.log(norm))) / c
        return (a - p * totals([a], xp)[0]) * v

    def loss_slope(self, name: str, x: Array, p: Array, xp: Namespace) -> Array:
        _, norm, slope = self._below_norm(p, xp)
        return -norm * slope

    def _norm(self, q: Array, xp: Namespace) -> Array:
        """`||q||`, by the norm of `q / max(q)`, whose powers are numbers for any alpha."""
        alpha, high = like(self.alpha, q, xp), stop_gradient(top(q, xp))
        high = xp.where(high > 0, high, xp.ones_like(high))
        return high * power(total(power(q / high, alpha, xp), xp), 1.0 / alpha, xp)

    def omega(self, q: Array, xp: Namespace) -> Array:
        """`||q||_alpha - 1`."""
        return self._norm(q, xp) - 1.0

    def omega_slope(self, q: Array, xp: Namespace) -> Array:
        """`(q / ||q||)^(alpha-1)`."""
        return power(q / self._norm(q, xp), like(self.alpha, q, xp) - 1.0, xp)
