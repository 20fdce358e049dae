"""Ranks: soft ranks, the projection on the permutahedron; and `SoftSorted`, the scores in soft order."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

from .._array import (
    POSITIVE,
    Array,
    Namespace,
    Ranges,
    check_flag,
    check_number,
    counts,
    descending,
    finish,
    finite_scores,
    like,
    positions,
    running_sum,
    stop_gradient,
    take,
    total,
    xlogx,
)
from .._core.facts import Facts
from .._core.mapping import Mapping, row_top
from .._core.parameters import check_ranges
from .._core.typing import Parameter
from ._isotonic import of_block, starts_of_blocks

Regularization = Literal["l2", "kl"]


HOW_SOFT = "how soft the order is; near 0 it is that of the scores"


def check_regularization(who: str, given: Any) -> None:
    if not isinstance(given, str) or given not in ("l2", "kl"):
        raise ValueError(
            f"{who}: regularization must be 'l2' (squared distance) or 'kl' (relative entropy), got {given!r}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks(Mapping):
    """Soft ranks: `argmax <p, x> - strength Omega(p)` over the mixtures of the orderings of 1, ..., n.

    Use it to rank, or to train a ranking, with a gradient. The largest score has the largest rank, n, and the ranks of a row sum to
    `n (n + 1) / 2`; a masked class has the rank 0, and the others are ranked among themselves. With "l2" the ranks are exactly 1, ..., n
    once the scores lie `strength` apart. Blondel, Teboul, Berthet and Djolonga 2020.

    Parameters
    ----------
    strength
        How soft the ranks are, a number above 0, or an array that broadcasts to the scores with size 1 along the classes; it has a
        gradient. Near 0 the ranks are whole numbers; the larger it is, the nearer they come to their mean.
    regularization
        "l2" for `Omega(p) = ||p||^2 / 2`, or "kl" for `Omega(p) = sum_i p_i log p_i`, as in torchsort and fast-soft-sort.

    Examples
    --------
    >>> anymax.apply(anymax.Ranks(), [5.0, 1.0, 2.0])
    array([3., 1., 2.])
    >>> anymax.apply(anymax.Ranks(strength=2.0), [5.0, 1.0, 2.0])
    array([3.  , 1.25, 1.75])
    """

    strength: Parameter = 1.0
    regularization: Regularization = "l2"

    name = "ranks"
    formula = "argmax ⟨p, x⟩ − strength Ω(p), p a mixture of orderings of 1, …, n"
    kernel = "ranks"
    iterative = True
    array_field = "strength"
    learns = ("strength",)
    ranges: ClassVar[Ranges] = {"strength": POSITIVE}

    def __post_init__(self) -> None:
        check_ranges(self, HOW_SOFT, "strength")
        check_regularization("Ranks", self.regularization)

    @property
    def facts(self) -> Facts:
        return Facts(monotone=True, shift_invariant=True, sparse=False, has_potential=True)

    # -- the sum ----------------------------------------------------------------------------------------------------------

    def sums(self, keep: Array | None, xp: Namespace) -> tuple[Any, Any]:
        """`m (m + 1) / 2` for m classes that are not masked; from 3, of two classes, on where nothing is said of the row."""
        if keep is None:
            return 3.0, math.inf
        count = total(xp.astype(keep, xp.asarray(0.0).dtype), xp)
        out = 0.5 * count * (count + 1.0)
        return out, out

    @property
    def sums_to_one(self) -> bool:
        return False

    def corner(self, x: Array, xp: Namespace) -> Array:
        """The ranks themselves; of equal scores the first has the largest."""
        y, keep, poisoned = finite_scores(x, xp)
        order = xp.argsort(xp.where(keep, -y, math.inf * xp.ones_like(y)), axis=-1)
        place = xp.astype(xp.argsort(order, axis=-1), y.dtype)
        return finish(total(xp.astype(keep, y.dtype), xp) - place, keep, poisoned, xp)

    # -- p and its derivatives ----------------------------------------------------------------------------------------------

    def hold(self, x: Array, xp: Namespace) -> Array:
        """For each class the first place of its block, among all in descending order."""
        y, keep, _ = finite_scores(x, xp)
        order = xp.argsort(xp.where(keep, -y, math.inf * xp.ones_like(y)), axis=-1)
        y, count = take(y, order, xp), total(xp.astype(keep, y.dtype), xp)
        w = count - positions(y, y.dtype, xp)
        kept = w > 0
        w = xp.where(kept, w, xp.ones_like(w))
        # blocks end at a gap of n in l2, and of log n in kl: a larger one counts as that, so that no numbers are large
        gap = (y[..., :-1] - y[..., 1:]) / like(self.strength, y, xp)
        most = float(y.shape[-1] + 1)
        gap = xp.where(kept[..., 1:] & (gap < most), gap, most * xp.ones_like(gap))
        z = -running_sum(xp.concat([xp.zeros_like(y[..., :1]), gap], axis=-1), xp)
        entropic = self.regularization == "kl"
        starts = starts_of_blocks(z, xp.log(w) if entropic else w, kept, entropic, xp)
        return take(starts, xp.argsort(order, axis=-1), xp)

    def held_size(self, n: Any) -> Any:
        return n

    def forward(self, x: Array, xp: Namespace) -> Array:
        return self.differentiable(x, xp)

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        """In each block the mean rank, and around it the scores (l2), or shares of the sum of its ranks (kl)."""
        block: Array = stop_gradient(self.frozen().hold(stop_gradient(x), xp)) if held is None else held
        y, keep, poisoned = finite_scores(x, xp)
        size = of_block(xp.ones_like(y), block, xp)
        rank = total(xp.astype(keep, y.dtype), xp) - block - 0.5 * (size - 1.0)
        alone = size == 1.0
        # about the mean of the block, or its largest score, which may be far from 0
        entropic = self.regularization == "kl"
        centre = self._largest(stop_gradient(y), keep, block, xp) if entropic else of_block(y / size, block, xp)
        z = (y - stop_gradient(xp.where(alone, y, centre))) / like(self.strength, y, xp)
        if not entropic:
            return finish(rank + (z - of_block(z, block, xp) / size), keep, poisoned, xp)
        e = xp.exp(xp.where(alone, xp.zeros_like(z), z))  # within a block scores differ by log n at most
        return finish(rank * size * e / of_block(e, block, xp), keep, poisoned, xp)

    def _largest(self, y: Array, keep: Array, block: Array, xp: Namespace) -> Array:
        ordered = descending(xp.where(keep, y, -math.inf * xp.ones_like(y)), xp)
        return xp.where(keep, take(ordered, xp.astype(block, xp.int64 if y.dtype == xp.float64 else xp.int32), xp), y)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        """The Jacobian is `(I - 1 1^T / size) / strength` in each block, or `(diag(p) - p p^T / <p, 1>) / strength`."""
        block, keep = self.frozen().hold(stop_gradient(x), xp), x != -math.inf
        g = xp.where(keep, g, xp.zeros_like(g))
        if self.regularization == "l2":
            out = g - of_block(g, block, xp) / of_block(xp.ones_like(p), block, xp) + 0.0 * p
        else:
            mass = of_block(p, block, xp)
            out = p * (g - of_block(p * g, block, xp) / xp.where(mass == 0, xp.ones_like(mass), mass))
        return xp.where(keep, out / like(self.strength, p, xp), xp.zeros_like(out))

    def score_change(self, name: str, x: Array, xp: Namespace) -> Array:
        """p is a function of x / strength, and no score but those of its block moves a rank: relative to the largest."""
        y, keep, _ = finite_scores(x, xp)
        return xp.where(keep, row_top(y, keep, xp) - y, xp.zeros_like(y)) / like(self.strength, y, xp)

    # -- the loss -----------------------------------------------------------------------------------------------------------

    def omega(self, q: Array, xp: Namespace) -> Array:
        """`strength Omega(q)`, less that of an ordering of 1, ..., m for the m classes with q > 0."""
        q = descending(q, xp)
        w = total(xp.astype(q > 0, q.dtype), xp) - positions(q, q.dtype, xp)
        w = xp.where(w > 0, w, xp.zeros_like(w))
        if self.regularization == "l2":
            terms = 0.5 * (q - w) * (q + w)
        else:
            terms = xlogx(q, xp) - xlogx(w, xp)
        return like(self.strength, q, xp) * total(terms, xp)

    def omega_slope(self, q: Array, xp: Namespace) -> Array:
        strength = like(self.strength, q, xp)
        return strength * (q if self.regularization == "l2" else xp.log(xp.where(q > 0, q, xp.ones_like(q))) + 1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class SoftSorted(Mapping):
    """The inner map of `anymax.soft_sort`: `(n, ..., 1) / strength` projected on the permutahedron of the scores.

    It gives scores in soft order, those of masked classes last and as 0, and no probabilities, so it is not in the catalogue.
    """

    strength: Parameter = 1.0
    regularization: Regularization = "l2"
    descending: bool = False

    name = "soft_sort"
    kernel = "soft_sort"
    iterative = True
    ranges: ClassVar[Ranges] = {"strength": POSITIVE}

    def __post_init__(self) -> None:
        strength = check_number("soft_sort", "regularization_strength", self.strength, POSITIVE, HOW_SOFT)
        object.__setattr__(self, "strength", strength)
        check_regularization("soft_sort", self.regularization)
        object.__setattr__(self, "descending", check_flag("soft_sort", "descending", self.descending))

    @property
    def facts(self) -> Facts:
        return Facts(monotone=False, shift_invariant=False, sparse=False, has_potential=False)

    def hold(self, x: Array, xp: Namespace) -> Array:
        """The classes in order, and for each place the first of its block."""
        y, keep, _ = finite_scores(x, xp)
        y = y if self.descending else -y
        order = xp.argsort(xp.where(keep, -y, math.inf * xp.ones_like(y)), axis=-1)
        s = take(y - row_top(y, keep, xp), order, xp)
        place = positions(s, s.dtype, xp) + xp.zeros_like(s)
        kept = place < total(xp.astype(keep, y.dtype), xp)
        s = xp.where(kept, s, xp.zeros_like(s))
        z = -place / like(self.strength, y, xp)
        starts = starts_of_blocks(z, s, kept, self.regularization == "kl", xp)
        return xp.concat([xp.astype(order, y.dtype), starts], axis=-1)

    def held_size(self, n: Any) -> Any:
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
