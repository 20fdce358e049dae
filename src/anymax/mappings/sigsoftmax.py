"""Sigsoftmax: a remedy for the softmax bottleneck."""

from __future__ import annotations

import dataclasses
import math

from .._array import Array, Namespace, finish, finite_scores, stop_gradient, total
from .._core.facts import Facts
from .._core.mapping import row_top
from .._core.parts import Parts
from .._core.ratio_map import RatioMap


def _exponents(x: Array, xp: Namespace) -> Array:
    keep = x != -math.inf
    a = log_weight(xp.where(keep, x, xp.zeros_like(x)), xp)
    return xp.where(keep, a, -math.inf * xp.ones_like(a))


@dataclasses.dataclass(frozen=True, eq=False)
class Sigsoftmax(RatioMap):
    """Sigsoftmax: p_i in proportion to `exp(x_i) sigmoid(x_i)`.

    Use it for a large vocabulary after a narrow layer: its log-probabilities are not linear in the scores, so the layer can express more
    distributions than with softmax. Dense, monotone, not shift-invariant; train with `nll`, since it has no Fenchel-Young loss. Kanai
    et al. 2018. It has no parameters.

    Examples
    --------
    >>> anymax.apply(anymax.Sigsoftmax(), [2.0, 1.0, -1.0]).round(3)
    array([0.757, 0.231, 0.012])
    """

    name = "sigsoftmax"
    formula = "pᵢ ∝ exp(xᵢ) σ(xᵢ)"
    kernel = "sigsoftmax"
    parts = Parts(by_weights=True, exponents=_exponents)

    @property
    def facts(self) -> Facts:
        return Facts(monotone=True, shift_invariant=False, sparse=False, has_potential=False)

    def weights(self, x: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
        a = log_weight(x, xp)
        u = xp.exp(a - stop_gradient(row_top(a, keep, xp)))
        return u, u * (1.0 + 0.5 * (1.0 - xp.tanh(0.5 * x)))  # (log u)' = 1 + sigmoid(-x)

    def log_forward(self, x: Array, xp: Namespace) -> Array:
        y, keep, poisoned = finite_scores(x, xp)
        a = log_weight(y, xp)
        a = a - stop_gradient(row_top(a, keep, xp))
        z = total(xp.where(keep, xp.exp(xp.where(keep, a, xp.zeros_like(a))), xp.zeros_like(a)), xp)
        z = xp.where(z == 0, xp.ones_like(z), z)
        return finish(a - xp.log(z), keep, poisoned, xp, masked=-math.inf)


def log_weight(x: Array, xp: Namespace) -> Array:
    """x - log(1 + exp(-x)), without overflow on either side."""
    return x - xp.logaddexp(xp.zeros_like(x), -x)
