"""Elementwise: the link of another map with a threshold that does not depend on the scores."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from .._array import (
    FINITE,
    Array,
    Namespace,
    Ranges,
    as_dtype,
    differentiates,
    finish,
    finite_scores,
    is_array,
    known,
    poison,
    top,
    total,
)
from .._core.facts import Facts
from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.of_another import OfAnother
from .._core.parameters import check_ranges
from .._core.parts import PartedConstant, Parts
from .._core.separable import Separable
from .._core.typing import Parameter
from .budget import Budget
from .sparsemax import Sparsemax

_WORDS: dict[str, Separable] = {"sigmoid": Budget(1.0, shape="sigmoid"), "relu": Sparsemax()}
_LOW, _HIGH = 0.25, 0.5  # every omega is smooth between these
_GAUSS = (  # nodes above 0 and their weights, of 12 on [-1, 1]; written out because NumPy's function slows the import
    (0.1252334085114689, 0.2491470458134028),
    (0.3678314989981802, 0.2334925365383548),
    (0.5873179542866175, 0.2031674267230659),
    (0.7699026741943047, 0.1600783285433462),
    (0.9041172563704749, 0.1069393259953184),
    (0.9815606342467192, 0.0471753363865118),
)
_POINTS = [
    (0.5 * (_LOW + _HIGH) + sign * 0.5 * (_HIGH - _LOW) * node, 0.5 * weight)
    for node, weight in _GAUSS
    for sign in (-1, 1)
]


def _sum_of_terms(mapping: Elementwise, y: Array, xp: Namespace) -> list[Array]:
    return [total(mapping.terms(y, xp), xp)]


def _omega_of_sums(mapping: Elementwise, sums: list[Array], xp: Namespace) -> Array:
    summed = xp.sum(sums[0], axis=0)
    return summed - mapping.terms(xp.ones_like(summed), xp)


@dataclasses.dataclass(frozen=True, eq=False)
class Elementwise(OfAnother):
    """Each class by itself: `p_i = link(x_i - tau)` with a fixed tau, so that the probabilities of a row have no fixed sum.

    Use it for labels that don't exclude each other, and for sigmoid and ReLU attention. Its loss is the sum of one binary loss for each
    class: with "sigmoid" the binary cross-entropy of logits. `Entmax(alpha)` makes it alpha-ReLU.

    Parameters
    ----------
    mapping
        "sigmoid", "relu", or a map `link(x - tau)` whose link is taken, such as `Entmax(1.5)` or `Budget(1, shape="laplace")`.
    tau
        The threshold, a number or an array that broadcasts to the scores with size 1 along the classes; a tensor may be learned.
        Sigmoid attention takes the logarithm of the number of keys (Ramapuram et al. 2024).

    Examples
    --------
    >>> anymax.apply(anymax.Elementwise(), [0.0, 2.0, -1.0]).round(3)
    array([0.5  , 0.881, 0.269])
    >>> anymax.apply(anymax.Elementwise("relu", tau=1.0), [0.0, 2.0, 1.5])
    array([0. , 1. , 0.5])
    >>> anymax.fenchel_young(anymax.Elementwise(), [0.0, 2.0, -1.0], [1.0, 1.0, 0.0]).round(3)
    np.float64(1.133)
    """

    mapping: Mapping | str = "sigmoid"
    tau: Parameter = 0.0

    needs_scores = False
    parts = Parts(each_alone=True, constant=PartedConstant(_sum_of_terms, _omega_of_sums))
    own_ranges: ClassVar[Ranges] = {"tau": FINITE}

    name = "elementwise"
    formula = "pᵢ = link(xᵢ − τ), τ fixed"

    def __post_init__(self) -> None:
        word = self.mapping
        link_map = _WORDS[word] if isinstance(word, str) and word in _WORDS else as_mapping(word, "Elementwise")
        if not isinstance(link_map, Separable):
            raise ValueError(
                f'Elementwise(mapping={word!r}): it takes "sigmoid", "relu", or a map whose p is link(x - tau), such as '
                f"Entmax(1.5), and {link_map.name} has no link"
            )
        object.__setattr__(self, "mapping", link_map)
        check_ranges(self, "the threshold of every class", "tau")

    @property
    def link_map(self) -> Separable:
        """The map whose link this is."""
        assert isinstance(self.mapping, Separable)
        return self.mapping

    @property
    def facts(self) -> Facts:
        return dataclasses.replace(self.inner.facts, shift_invariant=False, margin=None)

    # -- sums --------------------------------------------------------------------------------------------------------------

    def in_dtype_of(self, p: Array, x: Array, xp: Namespace) -> Array:
        return self.link_map.in_dtype_of(p, x, xp)

    def sums(self, keep: Array | None, xp: Namespace) -> tuple[Any, Any]:
        if keep is None:
            return 0.0, math.inf
        one = xp.astype(keep, xp.asarray(0.0).dtype)
        most = self.ceiling(one, xp)
        return 0.0, math.inf if most is None else total(most * one, xp)

    @property
    def sums_to_one(self) -> bool:
        return False

    def ceiling(self, x: Array, xp: Namespace) -> Any:
        return self.inner.ceiling(x, xp)

    # -- p -----------------------------------------------------------------------------------------------------------------

    def _from_tau(self, x: Array, xp: Namespace) -> Array:
        return x - (as_dtype(self.tau, x.dtype, xp) if is_array(self.tau) else self.tau)

    def _argument(self, x: Array, xp: Namespace) -> Array:
        """The argument of the link for scores x; that of entmax is not 0 at the threshold."""
        t = self._from_tau(x, xp) if is_array(self.tau) or self.tau else x
        return t if self.inner.is_softmax else t - self.link_map.level_to_tau(t[..., :1], xp)

    def forward(self, x: Array, xp: Namespace) -> Array:
        if differentiates(x) or self.params():
            y, keep, poisoned = finite_scores(x, xp)
            return finish(self.link_map.link(self._argument(y, xp), xp), keep, poisoned, xp)
        high = top(x, xp)  # fewer passes: no derivative meets the link at -inf
        poisoned = xp.isnan(high) | (high == math.inf)
        p = self.link_map.link(self._argument(x, xp), xp)
        if not known(high) or not bool(xp.all(x > -math.inf)):
            p = xp.where(x == -math.inf, xp.zeros_like(p), p)
        return poison(p, poisoned, xp) if not known(high) or bool(xp.any(poisoned)) else p

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        return g * self.link_map.sensitivity(p, xp)

    def threshold(self, x: Array, xp: Namespace) -> Array:
        unmasked = xp.any(x > -math.inf, axis=-1, keepdims=True)
        tau = -self._from_tau(xp.zeros_like(x[..., :1]), xp)
        return poison(xp.where(unmasked, tau, -math.inf * xp.ones_like(tau)), finite_scores(x, xp)[2], xp)

    # -- the loss: of each class by itself -----------------------------------------------------------------------------------

    def terms(self, q: Array, xp: Namespace) -> Array:
        """omega(q_i) with omega(0) = 0 and the derivative `slope`, the inverse of the link.

        `omega_terms` may lack a linear function of q, which changes no map whose p has a fixed sum.
        """
        zero, link_map = xp.zeros_like(q[..., :1]), self.link_map
        terms = lambda a: link_map.omega_terms(a, xp)  # noqa: E731
        rise = zero  # the mean of the slope between two values of q
        for at, weight in _POINTS:
            rise = rise + weight * link_map.slope(zero + at, xp)
        rise = rise - (terms(zero + _HIGH) - terms(zero + _LOW)) / (_HIGH - _LOW)
        return terms(q) - terms(zero) + rise * q

    def omega(self, q: Array, xp: Namespace) -> Array:
        """The sum of omega over the classes, less omega(1), so that it is 0 for one class."""
        one = xp.ones_like(q[..., :1])
        return total(self.terms(q, xp), xp) - self.terms(one, xp)

    def omega_slope(self, q: Array, xp: Namespace) -> Array:
        return self.link_map.omega_slope(q, xp)

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        return super().loss(self._argument(x, xp), p, y, xp)
