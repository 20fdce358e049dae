"""A call of an output layer, `Job`: its operands, the targets, and what to compute for each row, a `PerRow`."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Self

from .._array import Array, as_dtype, dot, is_array, namespace, safe, take, upcast, wide_dtype
from .._core.mapping import Mapping
from .._core.typing import LossKind
from ..likelihood.terms import terms_of
from ..losses.formulas import FORMULAS, loss_of_class
from ..losses.margins import nearest_centers
from ..losses.options import EACH_ROW, LossOptions
from ..losses.penalties import NO_PENALTIES, LogSums, RowPenalties, log_sums
from ..losses.targets import counted_weight, weighted
from ..thresholds import tau_and_support, tau_of
from ..transforms.base import Transform, put_through
from .layer import Layer


@dataclasses.dataclass(frozen=True)
class PerRow(ABC):
    """Computes one number for each row, several in columns, or a tuple of these; hashable, so that a program is compiled once."""

    who: str = ""
    transforms: tuple[Callable[[Any], Any], ...] = ()  # of the scores
    options: LossOptions = EACH_ROW  # this and the following are for a loss
    margin: Callable[..., Any] | None = None
    scale: float = 1.0  # of the cosines that the margin takes
    sub_centers: int = 1  # scores of each class, next to each other, of which the largest counts
    least: float = 0.0  # softmax may leave out the gradient of classes below this probability
    penalties: RowPenalties = NO_PENALTIES

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
        values = iter(arrays)
        transforms = tuple(
            t.replace(**{k: next(values) for k, v in t.params if is_array(v)}) if isinstance(t, Transform) else t
            for t in self.transforms
        )
        return dataclasses.replace(self, transforms=transforms)


class RowLoss(PerRow):
    """Computes the loss of each row."""

    def __call__(self, mapping: Mapping, scores: Array, target: Array | None, class_weight: Array | None) -> Array:
        assert target is not None
        s, xp, penalties = scores, namespace(scores), bool(self.penalties)
        if self.transforms or self.sub_centers > 1 or self.margin is not None or penalties:
            s = nearest_centers(self.transformed(upcast(s, xp)), self.sub_centers, -1)
        if self.margin is not None:
            s = self.scale * self.margin(s / self.scale, target, -1)
        kind = loss_of(mapping)
        if target.ndim > 1 or self.options.label_smoothing:
            value = FORMULAS[kind](mapping, upcast(s, xp), target, self.options._replace(weight=class_weight))
        else:
            # a parameter's gradient is not to be rounded
            s = upcast(s, xp) if s.dtype != wide_dtype(s, xp) and mapping.params() else s
            value = loss_of_class(kind, mapping, s, target)
            if class_weight is not None:
                value = weighted(value, counted_weight(target, target < 0, class_weight, value.dtype, xp), xp)
        if not penalties:
            return value
        plain = value if class_weight is None and not self.options.label_smoothing else None
        tau, parts = lambda: _tau(mapping, s, target, plain), lambda: log_sums(mapping, s, target)
        return value + self.penalty(target, class_weight, tau, parts)

    def penalty(
        self,
        target: Array,
        class_weight: Array | None,
        tau: Callable[[], Array],
        log_sums: Callable[[], LogSums] | None = None,
    ) -> Array:
        """The penalties of rows, times the class weights of their targets."""
        none = target.ndim == 1 and target < 0
        penalty = self.penalties.of(none, tau, log_sums)
        if class_weight is None:
            return penalty
        xp = namespace(penalty)
        if target.ndim > 1:
            return penalty * dot(as_dtype(target, penalty.dtype, xp), class_weight, xp)[:, 0]
        return penalty * counted_weight(target, none, class_weight, penalty.dtype, xp)

    def of_candidates(self, mapping: Mapping, s: Array, at: Any) -> Array:
        """The loss without smoothing, margin and class weights."""
        return loss_of_class(loss_of(mapping), mapping, s, at)


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


@dataclasses.dataclass(frozen=True)
class Job:
    """`per_row` for all rows of a layer."""

    layer: Layer
    per_row: PerRow
    target: Array | None = None  # [rows], class indices with -1 for none, or [rows, classes]
    class_weight: Array | None = None  # [classes]
    chunk: int | None = None  # as the caller says

    def part(self, rows: Any, layer: Layer | None = None) -> Job:
        """The job for some of the rows: a slice, or their indices. layer: its part, if it is known."""
        target = None if self.target is None else self.target[rows, ...]
        return dataclasses.replace(self, layer=self.layer.part(rows) if layer is None else layer, target=target)

    def parts(self, step: int) -> Iterator[tuple[slice, Job]]:
        """The job for `step` rows at a time, and where these are."""
        for where, layer in self.layer.parts(step):
            yield where, self if layer is self.layer else self.part(where, layer)

    def result(self) -> Any:
        """All rows at once, from all of their scores."""
        return self.per_row(self.layer.mapping, self.layer.scores(), self.target, self.class_weight)


def loss_of(mapping: Mapping) -> LossKind:
    """The map's own loss; for softmax the cross-entropy, as in torch's output layers, which differs from it by the target's entropy."""
    return "nll" if mapping.is_softmax else mapping.own_loss


def _tau(mapping: Mapping, s: Array, target: Array, plain: Array | None) -> Array:
    """tau of each row. For softmax it is the loss of a class, which an engine computes, plus the score of this class.

    plain: that loss without smoothing and weights, if it is known. If the target is masked, and the loss infinite, the result is 0.
    """
    xp = namespace(s)
    if not mapping.is_softmax or target.ndim > 1:
        return tau_of(mapping, s, xp)[:, 0]
    score = take(s, xp.where(target < 0, xp.zeros_like(target), target)[:, None], xp)[:, 0]
    plain = loss_of_class("nll", mapping, s, target) if plain is None else plain
    known = ~(score == -math.inf)
    return xp.where(known, safe(plain, known, 0.0, xp) + safe(score, known, 0.0, xp), xp.zeros_like(score))
