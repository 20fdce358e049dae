"""Softmax: the map with the exponential link."""

from __future__ import annotations

import dataclasses
import math

from .._array import Array, Namespace, dot, exp_and_rest, finish, finite_scores, stop_gradient, total, xlogx
from .._core.facts import Facts
from .._core.mapping import row_top
from .._core.parts import SUMMED, Parts
from .._core.separable import Separable


@dataclasses.dataclass(frozen=True, eq=False)
class Softmax(Separable):
    """Softmax: `p_i = exp(x_i - tau)` with tau = logsumexp(x), the map of `Omega(p) = sum_i p_i log p_i`.

    The default choice. Dense, monotone, shift-invariant; its loss is the cross-entropy. fp32 total variation error 1e-7. It has
    no parameters.

    Examples
    --------
    >>> anymax.apply(anymax.Softmax(), [2.0, 1.0, -1.0]).round(3)
    array([0.705, 0.259, 0.035])
    """

    name = "softmax"
    formula = "pᵢ = exp(xᵢ − τ)"
    kernel = "softmax"
    iterative = False
    needs_scores = False
    loss_from_scores = True
    is_softmax = True
    parts = Parts(temperature=1.0, constant=SUMMED)  # type: ignore[assignment]

    @property
    def facts(self) -> Facts:
        return Facts(monotone=True, shift_invariant=True, sparse=False, has_potential=True)

    def omega_terms(self, q: Array, xp: Namespace) -> Array:
        return xlogx(q, xp)

    def link(self, t: Array, xp: Namespace) -> Array:
        return xp.exp(t)

    def slope(self, q: Array, xp: Namespace) -> Array:
        return xp.log(q)

    def curvature(self, q: Array, xp: Namespace) -> Array:
        return 1.0 / q

    def sensitivity(self, p: Array, xp: Namespace) -> Array:
        return p

    def closed(self, y: Array, keep: Array, xp: Namespace) -> Array:
        z = total(xp.where(keep, xp.exp(y), xp.zeros_like(y)), xp)
        return -xp.log(xp.where(z == 0, xp.ones_like(z), z))

    def shifted(self, x: Array, xp: Namespace) -> tuple[Array, ...]:
        """(x - max x, its exponentials, their sum, keep, poisoned), from plain operations that can be differentiated."""
        y, keep, poisoned = finite_scores(x, xp)
        y = y - stop_gradient(row_top(y, keep, xp))
        e = xp.where(keep, xp.exp(xp.where(keep, y, xp.zeros_like(y))), xp.zeros_like(y))
        z = total(e, xp)
        return y, e, xp.where(z == 0, xp.ones_like(z), z), keep, poisoned

    def forward(self, x: Array, xp: Namespace) -> Array:
        _, e, z, keep, poisoned = self.shifted(x, xp)
        return finish(e / z, keep, poisoned, xp)

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        return self.forward(x, xp)

    def log_forward(self, x: Array, xp: Namespace) -> Array:
        y, _, z, keep, poisoned = self.shifted(x, xp)
        return finish(y - xp.log(z), keep, poisoned, xp, masked=-math.inf)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        return p * (g - total(p * g, xp))

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        """`logsumexp(x) - <x, y>`, from the scores, since the sum of a fused kernel's p may not be accurate enough."""
        s, keep, _ = finite_scores(x, xp)
        s = s - stop_gradient(row_top(s, keep, xp))
        _, rest = exp_and_rest(x, s, keep, xp)
        return xp.log1p(rest) * total(y, xp) - dot(y, s, xp)
