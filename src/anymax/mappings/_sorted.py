"""The scores of each row in soft order: the inner map of `anymax.soft_sort`, which is no map to probabilities."""

from __future__ import annotations

import dataclasses
import math

from .._array import (
    Array,
    Namespace,
    counts,
    finish,
    finite_scores,
    like,
    positions,
    stop_gradient,
    take,
    total,
)
from .._core.facts import Facts
from .._core.mapping import Mapping, row_top
from .._core.typing import Parameter
from ._isotonic import of_block, starts_of_blocks
from .ranks import Regularization, check_regularization, check_strength


@dataclasses.dataclass(frozen=True, eq=False)
class SoftSorted(Mapping):
    """`(n, ..., 1) / strength` projected on the permutahedron of the scores; masked classes come last, as 0."""

    strength: Parameter = 1.0
    regularization: Regularization = "l2"
    descending: bool = False

    name = "soft_sort"
    kernel = "soft_sort"
    iterative = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", check_strength("soft_sort", "regularization_strength", self.strength))
        check_regularization("soft_sort", self.regularization)
        if not isinstance(self.descending, bool):
            raise TypeError(f"soft_sort: descending must be True or False, got {self.descending!r}")

    @property
    def facts(self) -> Facts:
        return Facts(monotone=False, shift_invariant=False, sparse=False, has_potential=False)

    def hold(self, x: Array, xp: Namespace) -> Array:
        """The classes in order, and for each place the first of its block."""
        y, keep, _ = finite_scores(x, xp)
        y = y if self.descending else -y
        order = xp.argsort(xp.where(keep, y, -math.inf * xp.ones_like(y)), axis=-1, descending=True, stable=True)
        s = take(y - row_top(y, keep, xp), order, xp)
        place = positions(s, s.dtype, xp) + xp.zeros_like(s)
        kept = place < total(xp.astype(keep, y.dtype), xp)
        s = xp.where(kept, s, xp.zeros_like(s))
        z = -place / like(self.strength, y, xp)
        starts = starts_of_blocks(z, s, kept, None if self.regularization == "l2" else xp.exp(s), xp)
        return xp.concat([xp.astype(order, y.dtype), starts], axis=-1)

    def held_size(self, n: int) -> int:
        return 2 * n

    def _ordered(self, x: Array, held: Array, xp: Namespace) -> tuple[Array, Array, Array]:
        """(the classes in order, the block of each place, how many places it has)."""
        n = x.shape[-1]
        block = held[..., n:]
        return counts(held[..., :n], xp), block, of_block(xp.ones_like(block), block, xp)

    def forward(self, x: Array, xp: Namespace) -> Array:
        return self.differentiable(x, xp)

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        held = stop_gradient(self.frozen().hold(stop_gradient(x), xp)) if held is None else held
        y, keep, poisoned = finite_scores(x, xp)
        order, block, size = self._ordered(x, held, xp)
        s = take(y, order, xp) if self.descending else -take(y, order, xp)
        place = positions(s, s.dtype, xp) + xp.zeros_like(s)
        strength = like(self.strength, y, xp)
        if self.regularization == "l2":
            out = of_block(s, block, xp) / size + (block + 0.5 * (size - 1.0) - place) / strength
        else:
            z = (block - place) / strength
            first = stop_gradient(of_block(xp.where(place == block, s, xp.zeros_like(s)), block, xp))
            out = z + first + xp.log(of_block(xp.exp(s - first), block, xp) / of_block(xp.exp(z), block, xp))
        kept = place < total(xp.astype(keep, y.dtype), xp)
        return finish(out if self.descending else -out, kept, poisoned, xp)

    def _shares(self, x: Array, order: Array, block: Array, size: Array, xp: Namespace) -> Array:
        """How much of a block's score each score in order moves."""
        if self.regularization == "l2":
            return 1.0 / size
        y, _, _ = finite_scores(x, xp)
        s = take(y, order, xp) if self.descending else -take(y, order, xp)
        place = positions(s, s.dtype, xp) + xp.zeros_like(s)
        first = stop_gradient(of_block(xp.where(place == block, s, xp.zeros_like(s)), block, xp))
        e = xp.exp(s - first)
        return e / of_block(e, block, xp)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        order, block, size = self._ordered(x, self.frozen().hold(stop_gradient(x), xp), xp)
        moved = of_block(g, block, xp) * self._shares(x, order, block, size, xp)
        out = take(moved, xp.argsort(order, axis=-1), xp) + 0.0 * p[..., :1]
        return xp.where(x != -math.inf, out, xp.zeros_like(out))

    def jvp(self, x: Array, p: Array, v: Array, xp: Namespace) -> Array:
        order, block, size = self._ordered(x, self.frozen().hold(stop_gradient(x), xp), xp)
        v = take(xp.where(x != -math.inf, v, xp.zeros_like(v)), order, xp)
        return of_block(v * self._shares(x, order, block, size, xp), block, xp) + 0.0 * p[..., :1]
