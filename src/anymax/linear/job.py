"""A call of an output layer, `Job`: its operands, the targets, and what to compute for each row, a `PerRow`."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

from .._array import (
    Array,
    Namespace,
    as_dtype,
    dot,
    is_array,
    namespace,
    safe,
    stop_gradient,
    take,
    upcast,
)
from .._core.mapping import Mapping
from .._core.typing import LossKind
from ..likelihood.divergence import divergence_rows
from ..likelihood.terms import terms_of
from ..losses.formulas import FORMULAS, loss_of_class
from ..losses.margins import nearest_centers
from ..losses.options import EACH_ROW, LossOptions
from ..losses.penalties import NO_PENALTIES, LogSums, RowPenalties, log_sums
from ..losses.targets import counted_weight, smoothed, weighted
from ..thresholds import tau_and_support, tau_of
from ..transforms.base import Transform, put_through
from .layer import Layer, some_rows


@dataclasses.dataclass(frozen=True)
class PerRow(ABC):
    """Computes one number for each row, several in columns, or a tuple of these; hashable, so that a program is compiled once."""

    who: str = ""
    transforms: tuple[Callable[[Any], Any], ...] = ()  # of the scores

    @abstractmethod
    def __call__(self, mapping: Mapping, scores: Array, target: Array | None, class_weight: Array | None) -> Any:
        """Compute them from all scores of the rows; a class index of -1 means no class."""

    def needs_all_scores(self, layer: Layer) -> bool:
        """True if no part of the scores of a row gives the result, whatever the map."""
        return bool(self.transforms)

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


class ShortRow(NamedTuple):
    """Beside some scores of each row, whose map is that of all: candidates, or softmax's target and logsumexp of the others."""

    at: Array  # [rows], the place of the target's score
    # for label smoothing
    score: Array  # the sum of all unmasked scores of each row, softmax's times the class weights
    weight: Any = 0.0  # the sum of these weights
    count: Any = 0.0  # the number of unmasked classes


@dataclasses.dataclass(frozen=True)
class RowLoss(PerRow):
    """Computes the loss of each row."""

    options: LossOptions = EACH_ROW
    margin: Callable[..., Any] | None = None
    scale: float = 1.0  # of the cosines that the margin takes
    sub_centers: int = 1  # scores of each class, next to each other, of which the largest counts
    min_probability: float = 0.0  # softmax may leave out the gradient of classes below this probability
    penalties: RowPenalties = NO_PENALTIES
    predicts: bool = False  # the result is a pair: the loss, and the class with the largest score, -1 for none

    def needs_all_scores(self, layer: Layer) -> bool:
        smoothing, keep = self.options.smoothing, layer.keep
        return bool(
            self.transforms
            or self.predicts
            or self.penalties.suppress
            or self.sub_centers > 1
            or (smoothing and keep is not None and keep.shape[0] != 1)  # over classes of each row
            or smoothing == 1.0  # no share for the target, whose loss may be infinite
        )

    def __call__(
        self,
        mapping: Mapping,
        scores: Array,
        target: Array | None,
        class_weight: Array | None,
        short: ShortRow | None = None,
    ) -> Any:
        """short: the scores are those of short rows."""
        assert target is not None
        s, xp, at = scores, namespace(scores), target if short is None else short.at
        if short is None and (self.transforms or self.sub_centers > 1 or self.margin is not None or self.penalties):
            s = nearest_centers(self.transformed(upcast(s, xp)), self.sub_centers, -1)
        if self.margin is not None:
            s = self.scale * self.margin(s / self.scale, at, -1)
        if short is None:
            value, plain = self._of_all_scores(mapping, s, target, class_weight, xp)
        else:
            value, plain = self._of_short_row(mapping, s, target, class_weight, short, xp), None
        if self.penalties:
            tau = (lambda: _tau(mapping, s, target, plain)) if short is None else (lambda: tau_of(mapping, s, xp)[:, 0])
            value = value + self.penalty(target, class_weight, tau, lambda: log_sums(mapping, s, target))
        return (value, _predicted(s, target, xp)) if self.predicts else value

    def _of_all_scores(
        self, mapping: Mapping, s: Array, target: Array, class_weight: Array | None, xp: Namespace
    ) -> tuple[Array, Array | None]:
        """(the loss of each row; the same before class weights, where it is that of a class index without smoothing)."""
        kind = loss_of(mapping)
        if target.ndim > 1 or self.options.smoothing:
            return FORMULAS[kind](mapping, upcast(s, xp), target, self.options._replace(weight=class_weight)), None
        # a parameter's gradient is not to be rounded
        value = loss_of_class(kind, mapping, upcast(s, xp) if mapping.params() else s, target)
        if class_weight is None:
            return value, value
        return weighted(value, counted_weight(target, target < 0, class_weight, value.dtype, xp), xp), None

    def _of_short_row(
        self, mapping: Mapping, s: Array, target: Array, class_weight: Array | None, short: ShortRow, xp: Namespace
    ) -> Array:
        """The loss of each row, of a class index. Class weights are inside softmax's -<y, log p>, and multiply other losses."""
        s = upcast(s, xp) if mapping.params() else s  # a parameter's gradient is not to be rounded
        value, smoothing = loss_of_class(loss_of(mapping), mapping, s, short.at), self.options.smoothing
        if smoothing and not mapping.is_softmax:
            value = self._smoothed(mapping, value, s, short, xp)
        if class_weight is not None:
            value = weighted(value, counted_weight(target, target < 0, class_weight, value.dtype, xp), xp)
        return self._smoothed_nll(mapping, value, s, short, xp) if smoothing and mapping.is_softmax else value

    def _smoothed_nll(self, mapping: Mapping, value: Array, s: Array, short: ShortRow, xp: Namespace) -> Array:
        """-<y, log p> of the smoothed target y, from that of a class."""
        level = tau_of(mapping, s, xp)[:, 0]  # not from the target's loss, which is infinite for a masked class
        of_ones = short.weight * xp.where(level == -math.inf, xp.zeros_like(level), level) - short.score
        return smoothed(self.options, mapping, value, of_ones, short.count, 1.0, xp)

    def _smoothed(self, mapping: Mapping, value: Array, s: Array, short: ShortRow, xp: Namespace) -> Array:
        """The loss of the smoothed target y, from that of a class: <scores, y> is linear in y, and Omega has two kinds of terms."""
        n, zeros, score = short.count, xp.zeros_like(value), take(s, short.at[:, None], xp)[:, 0]
        score = xp.where(score == -math.inf, zeros, score)  # a masked target's loss is infinite already
        value = value + smoothed(self.options, mapping, 0.0, n * score - short.score, n, 1.0, xp)
        if mapping.own_loss == "fenchel_young":
            ones = xp.ones_like(value[:, None])
            of_target, of_other = (smoothed(self.options, mapping, q, ones, n, 1.0, xp) for q in (1.0, 0.0))
            value = value + (mapping.omega(of_target, xp) + (n - 1) * mapping.omega(of_other, xp))[:, 0]
        return value + stop_gradient(xp.where(value < 0, -value, zeros))

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


class OfSupport(PerRow):
    """Computes what follows from the scores of a row's support alone."""

    def __call__(self, mapping: Mapping, scores: Array, target: Array | None, class_weight: Array | None) -> Any:
        return self.of_candidates(mapping, self.transformed(upcast(scores, namespace(scores))), target)

    @abstractmethod
    def of_candidates(self, mapping: Mapping, s: Array, at: Any) -> Any:
        """Compute it from scores in fp32 or fp64 that contain the support of each row and, at the place `at`, its target's."""


@dataclasses.dataclass(frozen=True)
class RowTerms(OfSupport):
    """Computes log p of the classes `target` [rows, m], and on request the entropy and log p of all other classes: a column for each."""

    entropy: bool = False
    rest: bool = False

    def empty_rows(self, target: Array) -> Array:
        none = namespace(target).all(target < 0, axis=-1)
        return none & False if self.entropy or self.rest else none

    def of_candidates(self, mapping: Mapping, s: Array, at: Any) -> Array:
        xp = namespace(s)
        return terms_of(mapping, s, at, xp, entropy=self.entropy, rest=self.rest).columns(xp)


@dataclasses.dataclass(frozen=True)
class RowDivergence(PerRow):
    """Computes the divergence of each row from the same row of a job's reference, whose scores are the `target` of a call."""

    beta: float = 0.0

    def needs_all_scores(self, layer: Layer) -> bool:
        return True

    def __call__(self, mapping: Mapping, scores: Array, target: Array | None, class_weight: Array | None) -> Array:
        assert target is not None
        xp = namespace(scores)
        s, t = (self.transformed(upcast(a, xp)) for a in (scores, target))
        return divergence_rows(mapping, s, t, self.beta, xp)


class Thresholds(OfSupport):
    """Computes tau and the size of the support for each row. A target is a class that does not count."""

    def of_candidates(self, mapping: Mapping, s: Array, at: Any) -> tuple[Array, Array]:
        tau, size = tau_and_support(mapping, s, namespace(s), None if at is None else at[:, None])
        return tau[:, 0], size[:, 0]


@dataclasses.dataclass(frozen=True)
class Job:
    """`per_row` for all rows of a layer."""

    layer: Layer
    per_row: PerRow
    # [rows], class indices with -1 for none, or [rows, classes]; with a reference 0, and -1 in a row that does not count
    target: Array | None = None
    class_weight: Array | None = None  # [classes]
    chunk: int | None = None  # as the caller says
    invariant: bool = False  # a row's result does not depend on other rows, bit for bit
    reference: Layer | None = None  # its scores are what `per_row` takes as the target; it has the map of `layer`

    @property
    def layers(self) -> tuple[Layer, ...]:
        return (self.layer,) if self.reference is None else (self.layer, self.reference)

    def recorded(self) -> bool:
        """True if autograd of torch records operations on a layer."""
        return self.layer.recorded() or (self.reference is not None and self.reference.recorded())

    def rows_at(self, rows: Any, layer: Layer | None = None) -> Job:
        """The job for some of the rows: a slice, or their indices. layer: its part, if it is known."""
        target = None if self.target is None else some_rows(self.target, rows)
        layer = self.layer.rows_at(rows) if layer is None else layer
        if self.reference is None:
            return dataclasses.replace(self, layer=layer, target=target)
        reference = dataclasses.replace(self.reference.rows_at(rows), mapping=layer.mapping)
        return dataclasses.replace(self, layer=layer, target=target, reference=reference)

    def parts(self, step: int) -> Iterator[tuple[slice, Job]]:
        """The job for `step` rows at a time, and where these are."""
        for where, layer in self.layer.parts(step):
            yield where, self if layer is self.layer else self.rows_at(where, layer)

    def result(self) -> Any:
        """All rows at once, from all of their scores."""
        return self.of_scores(self.layer.mapping, *(layer.scores() for layer in self.layers))

    def of_scores(self, mapping: Mapping, s: Array, of_reference: Array | None = None) -> Any:
        """The result for each row, from the scores of the layers."""
        if of_reference is None:
            return self.per_row(mapping, s, self.target, self.class_weight)
        value = self.per_row(mapping, s, of_reference, self.class_weight)
        return value if self.target is None else safe(value, self.target >= 0, 0.0, namespace(s))


def loss_of(mapping: Mapping) -> LossKind:
    """The map's own loss; for softmax the cross-entropy, as in torch's output layers, which differs from it by the target's entropy."""
    return "nll" if mapping.is_softmax else mapping.own_loss


def _predicted(s: Array, target: Array, xp: Namespace) -> Array:
    """The class with the largest score of each row, -1 for a row without classes, or whose target is none."""
    best = xp.argmax(s, axis=-1)
    none = xp.max(s, axis=-1) == -math.inf
    return xp.where(none if target.ndim > 1 else none | (target < 0), -xp.ones_like(best), best)


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
