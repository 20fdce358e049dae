"""Sparsemax: the map with the ReLU link."""

from __future__ import annotations

import dataclasses

from .._array import Array, Namespace, sorts_quickly
from .._core.facts import Facts
from .._core.parts import SUMMED, Parts
from .._core.separable import Separable
from .._core.solve import sorted_power_threshold


@dataclasses.dataclass(frozen=True, eq=False)
class Sparsemax(Separable):
    """Sparsemax, the point of the simplex nearest to x: `p_i = max(x_i - tau, 0)`, the map of `Omega(p) = 1/2 sum_i p_i^2`.

    Use it if few classes matter and you want to see which. It is piecewise linear; for two classes it is the hard sigmoid, and its loss
    is the modified Huber loss, exactly 0 once the target leads by 1. Martins and Astudillo 2016, sections 2 and 3. fp32 total variation
    error 1e-7. It has no parameters.

    Examples
    --------
    >>> anymax.apply(anymax.Sparsemax(), [2.0, 1.5, -1.0])
    array([0.75, 0.25, 0.  ])
    """

    name = "sparsemax"
    formula = "pᵢ = (xᵢ − τ)₊, the point of the simplex nearest to x"
    kernel = "sparsemax"
    parts = Parts(zeros_stay=True, zero_below_threshold=True, constant=SUMMED)  # type: ignore[assignment]

    @property
    def facts(self) -> Facts:
        return Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True, margin=1.0)

    def omega_terms(self, q: Array, xp: Namespace) -> Array:
        return 0.5 * q * (q - 1.0)  # 1/2 q^2 up to a constant on the simplex; no cancellation near a vertex

    def link(self, t: Array, xp: Namespace) -> Array:
        return xp.where(t > 0, t, xp.zeros_like(t))

    def slope(self, q: Array, xp: Namespace) -> Array:
        return q

    def curvature(self, q: Array, xp: Namespace) -> Array:
        return xp.ones_like(q)

    def closed(self, y: Array, keep: Array, xp: Namespace) -> Array | None:
        if not sorts_quickly(y):
            return None
        return -sorted_power_threshold(xp.where(keep, y, -xp.ones_like(y)), 1, xp)
