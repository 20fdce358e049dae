"""`RatioMap`: the maps `p_i = u(x_i) / sum_j u(x_j)`."""

from __future__ import annotations

from abc import abstractmethod

from .._array import (
    Array,
    Namespace,
    dot,
    finish,
    finite_scores,
    total,
)
from .mapping import Mapping
from .parts import Parts


class RatioMap(Mapping):
    """`p_i = u(x_i) / sum_j u(x_j)` for a non-negative function u; `J^T g = u'/Z * (g - <p, g>)`.

    A subclass defines `weights`, which returns u and its derivative. `Ratio` takes u as a function, without a subclass.

    Examples
    --------
    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True, eq=False)
    ... class Softplus(anymax.RatioMap):
    ...     name = "softplus"
    ...     facts = anymax.Facts(monotone=True, shift_invariant=False, sparse=False, has_potential=False)
    ...     def weights(self, x, keep, xp): return xp.logaddexp(x, 0.0 * x), 1.0 / (1.0 + xp.exp(-x))
    >>> anymax.apply(Softplus(), [2.0, 0.0, -2.0]).round(3)
    array([0.722, 0.235, 0.043])
    """

    parts = Parts(by_weights=True)

    @abstractmethod
    def weights(self, x: Array, keep: Array, xp: Namespace) -> tuple[Array, Array]:
        """(u(x), u'(x)), both times the same positive factor; it is constant in the row and for differentiation."""

    def _parts(self, x: Array, xp: Namespace) -> tuple[Array, Array, Array, Array]:
        y, keep, poisoned = finite_scores(x, xp)
        u, du = self.weights(y, keep, xp)
        u, du = (xp.where(keep, a, xp.zeros_like(y)) for a in (u, du))
        z = total(u, xp)
        z = xp.where(z == 0, xp.ones_like(z), z)
        return u / z, du / z, keep, poisoned

    def forward(self, x: Array, xp: Namespace) -> Array:
        p, _, keep, poisoned = self._parts(x, xp)
        return finish(p, keep, poisoned, xp)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        _, du, keep, poisoned = self._parts(x, xp)
        return finish(du * (g - dot(p, g, xp)), keep, poisoned, xp)

    def jvp(self, x: Array, p: Array, v: Array, xp: Namespace) -> Array:
        _, du, keep, poisoned = self._parts(x, xp)
        w = xp.where(keep, du * v, xp.zeros_like(v))
        return finish(w - p * total(w, xp), keep, poisoned, xp)
