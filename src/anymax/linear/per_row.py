"""What to compute from the scores of each row of an output layer: a loss, log p, or a threshold."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from .._array import Array, dtype_name, is_array, is_torch, namespace, safe, take, upcast
from .._core.mapping import Mapping
from .._core.typing import LossKind
from ..likelihood.terms import terms_of
from ..losses.indices import loss_of_rows
from ..losses.margins import nearest_centers
from ..losses.suppression import suppression
from ..losses.targets import counted_weight, weighted
from ..losses.verbs import loss_of_kind
from ..thresholds import tau_and_support, tau_of
from ..transforms.base import Transform, put_through


@dataclasses.dataclass(frozen=True)
class PerRow(ABC):
    """Computes one number for each row, several in columns, or a tuple of these; hashable, so that a program is compiled once."""

    who: str = ""
    transforms: tuple[Callable[[Any], Any], ...] = ()  # of the scores
    smoothing: float = 0.0  # this and the following are for a loss
    margin: Callable[..., Any] | None = None
    scale: float = 1.0  # of the cosines that the margin takes
    sub_centers: int = 1  # scores of each class, next to each other, of which the largest counts
    least: float = 0.0  # softmax may leave out the gradient of classes below this probability
    z_loss: float = 0.0  # the factor of tau squared
    suppress: float = 0.0  # the factor of the loss of classes with probability 0

    def __call__(self, mapping: Mapping, scores: Array, target: Array | None, class_weight: Array | None) -> Any:
        """Compute them from all scores of the rows; a class index of -1 means no class."""
        return self.of_candidates(mapping, self.transformed(upcast(scores, namespace(scores))), target)

    @abstractmethod
    def of_candidates(self, mapping: Mapping, s: Array, at: Any) -> Any:
        """Compute them from scores in fp32 or fp64 that contain the support of each row and, at the place `at`, its target's."""

    def empty_rows(self, target: Array) -> Array:
        """The rows [rows] that have no class, and the result 0."""
        return target < 0

    def transformed(self, s: Array) -> Array:
        """The scores after the transforms."""
        for t in self.transforms:
            s = put_through(self.who, t, s, own=True)
        return s

    def arrays(self) -> list[Array]:
        """The arrays among the parameters of the transforms; those of a user's function are not known."""
        return [v for t in self.transforms if isinstance(t, Transform) for _, v in t.params if is_array(v)]

    def with_arrays(self, arrays: list[Array]) -> Self:
        """A copy with these arrays in place of those that `arrays` returns."""
        if not arrays:
            return self
        left = iter(arrays)
        transforms = tuple(
            t.replace(**{k: next(left) for k, v in t.params if is_array(v)}) if isinstance(t, Transform) else t
            for t in self.transforms
        )
        return dataclasses.replace(self, transforms=transforms)


class RowLoss(PerRow):
    """Computes the loss of each row."""

    def __call__(self, mapping: Mapping, scores: Array, target: Array | None, class_weight: Array | None) -> Array:
        value = self._of_halves(mapping, scores, target, class_weight)
        if value is not None:
            return value
        s = self.transformed(upcast(scores, namespace(scores)))
        s = nearest_centers(s, self.sub_centers, -1)
        if self.margin is not None:
            s = self.scale * self.margin(s / self.scale, target, -1)
        value = _loss(mapping, s, target, class_weight, self.smoothing)
        more = None
        if self.z_loss:
            plain = value if class_weight is None and not self.smoothing else None
            more = self.z_term(_tau(mapping, s, target, plain), target)
        if self.suppress and target is not None:
            part = self.suppress * suppression(mapping, s, target)
            more = part if more is None else more + part
        if more is None:
            return value
        return value + (more if class_weight is None or target is None else self.weighted(more, target, class_weight))

    def _of_halves(self, mapping: Mapping, s: Array, target: Array | None, class_weight: Array | None) -> Array | None:
        """The loss of half-precision scores without a copy in fp32, by an engine that computes in fp32; None where there is none."""
        if not is_torch(s) or dtype_name(s) not in ("bfloat16", "float16") or target is None or target.ndim > 1:
            return None
        if self.transforms or self.margin is not None or self.smoothing or self.z_loss or self.suppress:
            return None
        if (loss_of(mapping) == "nll" and not mapping.is_softmax) or mapping.params():
            return None
        value, xp = loss_of_rows(mapping, s, target), namespace(s)
        if value is None or class_weight is None:
            return value
        return weighted(value, counted_weight(target, target < 0, class_weight, value.dtype, xp), xp)

    def weighted(self, more: Array, target: Array, class_weight: Array) -> Array:
        """Further losses of rows, times the class weights of their targets; those of distributions are left as they are."""
        xp = namespace(more)
        if target.ndim > 1:
            return more
        return more * xp.take(class_weight, xp.where(target < 0, xp.zeros_like(target), target), axis=0)

    def z_term(self, tau: Array, target: Array | None) -> Array:
        """`z_loss` times the square of tau, 0 for a row without a class, one that is all masked, or one that has a target of -1."""
        xp = namespace(tau)
        some = tau > -math.inf if target is None or target.ndim > 1 else (tau > -math.inf) & (target >= 0)
        tau = xp.where(some | xp.isnan(tau), tau, xp.zeros_like(tau))
        return self.z_loss * tau * tau

    def of_candidates(self, mapping: Mapping, s: Array, at: Any) -> Array:
        """The loss without smoothing, margin and class weights."""
        return _loss(mapping, s, at, None, 0.0)


@dataclasses.dataclass(frozen=True)
class RowTerms(PerRow):
    """Computes log p of the classes `target` [rows, m], and on request the entropy and log p of all other classes: a column for each."""

    entropy: bool = False
    rest: bool = False

    def empty_rows(self, target: Array) -> Array:
        none = namespace(target).all(target < 0, axis=-1)
        return none & False if self.entropy or self.rest else none

    def of_candidates(self, mapping: Mapping, s: Array, at: Any) -> Array:
        xp = namespace(s)
        return terms_of(mapping, s, at, xp, entropy=self.entropy, rest=self.rest).columns(xp)


class Thresholds(PerRow):
    """Computes tau and the size of the support for each row."""

    def of_candidates(self, mapping: Mapping, s: Array, at: Any) -> tuple[Array, Array]:
        tau, size = tau_and_support(mapping, s, namespace(s))
        return tau[:, 0], size[:, 0]


def loss_of(mapping: Mapping) -> LossKind:
    """The map's own loss; for softmax the cross-entropy, as in torch's output layers, which differs from it by the target's entropy."""
    return "nll" if mapping.is_softmax else mapping.own_loss


def _tau(mapping: Mapping, s: Array, target: Array | None, plain: Array | None) -> Array:
    """tau of each row. For softmax it is the loss of a class, which an engine computes, plus the score of this class.

    plain: that loss without smoothing and weights, if it is known. If the target is masked, and the loss infinite, tau is given as 0.
    """
    xp = namespace(s)
    if not mapping.is_softmax or target is None or target.ndim > 1:
        return tau_of(mapping, s, xp)[:, 0]
    own = take(s, xp.where(target < 0, xp.zeros_like(target), target)[:, None], xp)[:, 0]
    plain = _loss(mapping, s, target, None, 0.0) if plain is None else plain
    known = ~(own == -math.inf)
    return xp.where(known, safe(plain, known, 0.0, xp) + safe(own, known, 0.0, xp), xp.zeros_like(own))


def _loss(mapping: Mapping, s: Array, target: Any, class_weight: Array | None, smoothing: float) -> Array:
    return loss_of_kind(
        loss_of(mapping), mapping, s, target, class_weight, axis=-1, reduction="none", ignore_index=-1, label_smoothing=smoothing
    )  # fmt: skip
