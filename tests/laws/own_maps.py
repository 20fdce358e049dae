"""Separable maps without a kernel, as users write them, each with its link on numbers of mpmath."""

from __future__ import annotations

import dataclasses
from typing import Any

import mpmath as mp

import anymax as am

DENSE = am.Facts(monotone=True, shift_invariant=True, sparse=False, has_potential=True)
SPARSE = am.Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True)


def _positive(t, xp):
    return xp.where(t > 0, t, 0.0 * t)


@dataclasses.dataclass(frozen=True, eq=False)
class Squares(am.Separable):
    """Sparsemax."""

    name = "squares"
    facts = SPARSE

    def omega_terms(self, q, xp):
        return 0.5 * q * q

    def link(self, t, xp):
        return _positive(t, xp)

    def slope(self, q, xp):
        return q

    def curvature(self, q, xp):
        return xp.ones_like(q)

    def exact(self, t):
        return max(t, mp.mpf(0))


@dataclasses.dataclass(frozen=True, eq=False)
class Exps(am.Separable):
    """Softmax."""

    name = "exps"
    facts = DENSE

    def omega_terms(self, q, xp):
        return xp.where(q > 0, q * xp.log(xp.where(q > 0, q, 1.0 + 0.0 * q)), 0.0 * q)

    def link(self, t, xp):
        return xp.exp(t)

    def slope(self, q, xp):
        return xp.log(q)

    def curvature(self, q, xp):
        return 1.0 / q

    def exact(self, t):
        return mp.exp(t)


@dataclasses.dataclass(frozen=True, eq=False)
class Powers(am.Separable):
    """Entmax."""

    alpha: float = 1.5

    name = "powers"
    facts = SPARSE

    def omega_terms(self, q, xp):
        return (q**self.alpha - q) / (self.alpha * (self.alpha - 1.0))

    def link(self, t, xp):
        return _positive((self.alpha - 1.0) * t, xp) ** (1.0 / (self.alpha - 1.0))

    def slope(self, q, xp):
        return q ** (self.alpha - 1.0) / (self.alpha - 1.0)

    def curvature(self, q, xp):
        return q ** (self.alpha - 2.0)

    def exact(self, t):
        a = mp.mpf(self.alpha) - 1
        return mp.power(a * t, 1 / a) if t > 0 else mp.mpf(0)


@dataclasses.dataclass(frozen=True, eq=False)
class Sigmoids(am.Separable):
    """Units of probability with the binary entropy: the ceiling is reached in the limit alone."""

    k: float = 3.0

    name = "sigmoids"
    facts = DENSE

    @property
    def mass(self):
        return self.k

    def omega_terms(self, q, xp):
        return sum(xp.where(r > 0, r * xp.log(xp.where(r > 0, r, 1.0 + 0.0 * r)), 0.0 * r) for r in (q, 1.0 - q))

    def link(self, t, xp):
        e = xp.exp(-xp.abs(t))
        return xp.where(t < 0, e, xp.ones_like(t)) / (1.0 + e)

    def slope(self, q, xp):
        return xp.log(q) - xp.log1p(-q)

    def curvature(self, q, xp):
        return 1.0 / (q * (1.0 - q))

    def ceiling(self, x, xp):
        return 1.0

    def exact(self, t):
        return 1 / (1 + mp.exp(-t))


@dataclasses.dataclass(frozen=True, eq=False)
class Laplaces(Sigmoids):
    """The distribution function of Laplace, which bends at 0."""

    name = "laplaces"

    def omega_terms(self, q, xp):
        rest = xp.where(q < 0.5, q, 1.0 - q)
        return xp.where(rest > 0, rest * xp.log(xp.where(rest > 0, rest, 1.0 + 0.0 * q)), 0.0 * q) - 0.307 * rest

    def link(self, t, xp):
        e = 0.5 * xp.exp(-xp.abs(t))
        return xp.where(t < 0, e, 1.0 - e)

    def slope(self, q, xp):
        lifted = xp.log(2.0 * xp.where(q < 0.5, q, 1.0 - q))
        return xp.where(q < 0.5, lifted, -lifted)

    def curvature(self, q, xp):
        return 1.0 / xp.where(q < 0.5, q, 1.0 - q)

    def exact(self, t):
        return mp.exp(t) / 2 if t < 0 else 1 - mp.exp(-t) / 2


@dataclasses.dataclass(frozen=True, eq=False)
class Caps(Squares):
    """Budget: at most so much of k for each class."""

    k: float = 3.0
    most: Any = 1.0

    name = "caps"
    per_class = ("most",)

    @property
    def mass(self):
        return self.k

    def link(self, t, xp):
        return _positive(xp.where(t < self.most, t, self.most + 0.0 * t), xp)

    def ceiling(self, x, xp):
        return self.most

    def exact(self, t):
        return min(max(t, mp.mpf(0)), mp.mpf(self.most))


@dataclasses.dataclass(frozen=True, eq=False)
class Tails(am.Separable):
    """`p_i = (1 - t)^-2`: a tail so long that the smallest normal float lies at -1e19."""

    name = "tails"
    facts = DENSE

    def omega_terms(self, q, xp):
        return q - 2.0 * q**0.5

    def link(self, t, xp):
        return (1.0 - t) ** -2.0

    def slope(self, q, xp):
        return 1.0 - q**-0.5

    def curvature(self, q, xp):
        return 0.5 * q**-1.5

    def exact(self, t):
        return (1 - t) ** -2 if t < 1 else mp.inf


@dataclasses.dataclass(frozen=True, eq=False)
class Bent(Squares):
    """Its link rises twice as fast from 0.3 on."""

    name = "bent"

    def omega_terms(self, q, xp):
        return xp.where(q < 0.3, 0.5 * q * q, 0.25 * q * q + 0.15 * q - 0.0225)

    def link(self, t, xp):
        return _positive(t, xp) + _positive(t - 0.3, xp)

    def slope(self, q, xp):
        return xp.where(q < 0.3, q, 0.5 * q + 0.15)

    def curvature(self, q, xp):
        return xp.where(q < 0.3, xp.ones_like(q), 0.5 * xp.ones_like(q))

    def exact(self, t):
        return max(t, mp.mpf(0)) + max(t - mp.mpf(0.3), mp.mpf(0))


@dataclasses.dataclass(frozen=True, eq=False)
class Moved(Squares):
    """Sparsemax, whose tau is larger by 1: a class has a probability also somewhat below it."""

    name = "moved"

    def omega_terms(self, q, xp):
        return super().omega_terms(q, xp) - q

    def link(self, t, xp):
        return super().link(t + 1.0, xp)

    def slope(self, q, xp):
        return q - 1.0


WITH_A_TABLE = (
    Squares(), Exps(), Powers(1.5), Powers(1.1), Powers(1.9), Sigmoids(3.0), Sigmoids(1.0), Sigmoids(0.5), Laplaces(3.0), Caps(3.0),
    Caps(2.5, 0.75), Tails(),
)  # fmt: skip
WITHOUT_ONE = (Powers(3.0), Bent())  # a steep edge, a kink
