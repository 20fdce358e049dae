"""Sparse softmax: softmax over the k largest scores, or over the nucleus with mass p."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from .._array import (
    SHARE,
    Array,
    Namespace,
    Range,
    Ranges,
    check_integer,
    counts,
    dot,
    finish,
    finite_scores,
    is_array,
    like,
    poison,
    stop_gradient,
    total,
    xlogx,
)
from .._core.facts import Facts
from .._core.mapping import Mapping, row_top
from .._core.parameters import check_ranges
from .._core.parts import PartedConstant, Parts
from .._core.typing import AnyArray, LossKind, Parameter
from .._random.truncation import topk_keep, topp_keep


def _sum_and_size(mapping: SparseSoftmax, y: Array, xp: Namespace) -> list[Array]:
    return [total(xlogx(y, xp), xp), total(xp.astype(y > 0, y.dtype), xp)]


def _omega_of_sums(mapping: SparseSoftmax, sums: list[Array], xp: Namespace) -> Array:
    value, size = (xp.sum(each, axis=0) for each in sums)
    return value if mapping.k is None else xp.where(size <= mapping.k, value, math.inf * xp.ones_like(value))


_CONSTANT = PartedConstant(_sum_and_size, _omega_of_sums)


@dataclasses.dataclass(frozen=True, eq=False)
class SparseSoftmax(Mapping):
    """Softmax over the k largest scores, or over the fewest whose softmax mass reaches p: `p_i = exp(x_i - tau)` for kept classes.

    Use it to fine-tune, not to train from scratch: classes that are left out get neither mass nor gradient. tau is logsumexp over the
    kept classes. The loss, tau - x_t, is finite and has a gradient even if the target is left out. Give either k or p. Su 2020; Sun
    et al. 2021.

    Parameters
    ----------
    k
        The number of classes to keep, an integer from 1, or an array of whole numbers with one per row; ties are broken by
        position, so exactly k are kept.
    p
        The mass to keep, a number above 0 and at most 1, or an array with one value per row.

    Examples
    --------
    >>> anymax.apply(anymax.SparseSoftmax(k=2), [1.0, 1.0, 0.0])
    array([0.5, 0.5, 0. ])
    """

    k: int | AnyArray | None = None
    p: Parameter | None = None

    name = "sparse_softmax"
    formula = "softmax over the k largest scores, or over the fewest that hold mass p"
    kernel = "sparse_softmax"
    loss_from_scores = True
    own_loss: ClassVar[LossKind] = "without_constant"  # type: ignore[misc]
    array_field = "p"
    example: ClassVar[dict[str, Any]] = {"k": 2}
    needs_scores = False
    ranges: ClassVar[Ranges] = {"k": Range(1.0, math.inf, "low", whole=True), "p": SHARE}

    def __post_init__(self) -> None:
        if (self.k is None) == (self.p is None):
            raise TypeError(
                f"SparseSoftmax(k={self.k!r}, p={self.p!r}): give exactly one, k=<number of classes to keep> or p=<mass>"
            )
        if self.k is not None:
            if not is_array(self.k):
                what = "an integer, the number of classes to keep, or an array of them, one per row"
                check_integer("SparseSoftmax", "k", self.k, what)
            check_ranges(self, "the number of classes to keep", "k")
        else:
            check_ranges(self, "the softmax mass to keep", "p")

    @property
    def facts(self) -> Facts:
        return Facts(
            monotone=True,
            shift_invariant=True,
            sparse=True,
            has_potential=True,
            margin=0.0 if not is_array(self.k) and self.k == 1 else None,
        )

    def _kept(self, x: Array, xp: Namespace) -> tuple[Array, ...]:
        y, keep, poisoned = finite_scores(x, xp)
        s = stop_gradient(xp.where(keep, y, -math.inf * xp.ones_like(y)))
        kept = keep & (topk_keep(s, self.k, xp) if self.k is not None else topp_keep(s, self.p, xp))
        return y - stop_gradient(row_top(y, keep, xp)), kept, keep, poisoned

    def _sums(self, y: Array, kept: Array, xp: Namespace) -> tuple[Array, Array]:
        e = xp.where(kept, xp.exp(xp.where(kept, y, xp.zeros_like(y))), xp.zeros_like(y))
        z = total(e, xp)
        return e, xp.where(z == 0, xp.ones_like(z), z)

    def forward(self, x: Array, xp: Namespace) -> Array:
        y, kept, keep, poisoned = self._kept(x, xp)
        e, z = self._sums(y, kept, xp)
        return finish(e / z, keep, poisoned, xp)

    def log_forward(self, x: Array, xp: Namespace) -> Array:
        y, kept, _, poisoned = self._kept(x, xp)
        _, z = self._sums(y, kept, xp)
        return finish(y - xp.log(z), kept, poisoned, xp, masked=-math.inf)

    def threshold(self, x: Array, xp: Namespace) -> Array:
        """logsumexp over the kept scores, [..., 1]."""
        y, kept, keep, poisoned = self._kept(x, xp)
        _, z = self._sums(y, kept, xp)
        first, _, _ = finite_scores(x, xp)
        tau = row_top(first, keep, xp) + xp.log(z)
        tau = xp.where(xp.any(keep, axis=-1, keepdims=True), tau, -math.inf * xp.ones_like(tau))
        return poison(tau, poisoned, xp)

    def moving_threshold(self, x: Array, p: Array, xp: Namespace) -> Array:
        y, kept, _, _ = self._kept(x, xp)
        return xp.log(self._sums(y, kept, xp)[1])

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        return p * (g - dot(p, g, xp))

    def omega(self, q: Array, xp: Namespace) -> Array:
        """`sum q log q` for at most k classes, +inf for more, since p never has more than k classes."""
        value = total(xlogx(q, xp), xp)
        if self.k is None:
            return value
        size = xp.sum(counts(q > 0, xp), axis=-1, keepdims=True)
        most = like(self.k, value, xp) if is_array(self.k) else self.k
        return xp.where(size <= most, value, math.inf * xp.ones_like(value))

    @property
    def parts(self) -> Parts:  # type: ignore[override]
        k: Any = None if is_array(self.k) else self.k
        return Parts(zeros_stay=k is not None, most_kept=k, nucleus=self.p, constant=_CONSTANT)

    def no_constant(self, smoothed: bool) -> str | None:
        if self.k is not None:
            return (
                f"label_smoothing gives every class some mass, which no {self!r} can reach: its Fenchel-Young loss would be infinite; "
                "use sparse_softmax_loss, which leaves that constant out"
                if smoothed
                else None
            )
        return (
            f"{self!r} keeps classes that depend on the scores, so its Fenchel-Young loss has no constant for "
            f"{'label_smoothing' if smoothed else 'a distribution as target'}; give class indices alone, or use sparse_softmax_loss, which "
            "leaves that constant out"
        )

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        s, kept, _, _ = self._kept(x, xp)
        _, z = self._sums(s, kept, xp)
        return xp.log(z) * total(y, xp) - dot(y, s, xp)
