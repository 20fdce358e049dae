"""Scores and targets as rows, for the formulas of all losses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .. import _array
from .._array import Array, Namespace, as_dtype, asarray, dot, namespace, quiet, stop_gradient, take, total, upcast
from .._core.axes import Joined
from .._core.classes import class_indices, refuse_strays
from .._core.mapping import Mapping, row_top
from .._core.rows import join, prepare
from ..autodiff import bridge
from .options import LossOptions, class_weights, result_dtype
from .targets import (
    Samples,
    ask_for_axis,
    complete_target,
    each_row,
    holds_indices,
    of_target,
    refuse_above,
    refuse_negative,
    refuse_one_class,
    refuse_sums,
    smoothed,
)


def one_axis(mapping: Mapping, scores: Any, target: Any, options: LossOptions) -> tuple[Mapping, Any, Any, LossOptions]:
    """The map, scores and target with several class axes joined into the last axis."""
    axes: Any = options.axis
    joined, mapping, mask = join(mapping, scores, axes, options.mask)
    target = _array.beside(target, joined.scores, "target", namespace(joined.scores))
    if not holds_indices(target, asarray(scores).shape, axes):
        target = Joined.of(target, axes).scores
    return mapping, joined.scores, target, options._replace(axis=-1, mask=mask)


def with_all_classes(
    mapping: Mapping, scores: Any, target: Any, options: LossOptions
) -> tuple[Mapping, Any, Any, LossOptions]:
    """The map, scores and target with the class that the map hides as the last one: the index -1, and what a distribution leaves."""
    x = asarray(scores)
    call = prepare(mapping, x, options.class_axis(x), options.mask)
    xp, n = namespace(call.rows), call.rows.shape[-1]
    t = _array.beside(target, call.rows, "target", xp)
    ask_for_axis(x, t, options.axis)
    if holds_indices(t, x.shape, call.axis):
        t, _ = class_indices("target", _array.counts(t, xp), n, options.ignore_index, xp, hides=True)
        options = options._replace(ignore_index=-1)
    else:
        y = _array.to_last(as_dtype(t, upcast(call.rows, xp).dtype, xp), call.axis, xp)
        t = complete_target(y, call.mapping.sums(call.rows > -math.inf, xp), xp)
    weight = options.weight
    if weight is not None:
        weight = class_weights(weight, upcast(call.rows, xp), xp)
        weight = xp.concat([weight, xp.ones_like(weight[:1])])
    over_all = call.over_all()
    return over_all.mapping, over_all.rows, t, options._replace(axis=-1, mask=None, weight=weight)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Scores and targets as rows, with the options applied."""

    xp: Any
    mapping: Mapping
    rows: Array  # [..., n], in the dtype of the computation
    keep: Array  # [..., n], False where masked
    poisoned: Array  # [..., 1], True for scores with NaN or +inf and for an impossible target
    target: Array  # [..., n], a distribution as it was given; or [..., 1], a class index, -1 where there is none
    indices: bool
    ignored: Array  # [..., 1], True for a sample that is left out
    class_weight: Array | None  # [n]
    sample_weight: Array | None  # [..., 1], the class weight of the target, 0 where ignored
    options: LossOptions
    dtype: Any  # of the result
    # `y` and `place` once they are found: functools.cached_property has a lock in Python 3.11, which torch.compile can't trace
    found: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, mapping: Mapping, scores: Any, target: Any, options: LossOptions) -> Batch:
        x = asarray(scores)
        call = prepare(mapping, x, options.class_axis(x), options.mask)
        x, mapping, xp = call.scores, call.mapping, namespace(call.rows)
        dtype, rows = result_dtype(call.rows), upcast(call.rows, xp)
        with quiet(rows):
            _, keep, poisoned = _array.finite_scores(rows, xp)
        class_weight = None if options.weight is None else class_weights(options.weight, rows, xp)
        t = _array.beside(target, rows, "target", xp)
        ask_for_axis(x, t, options.axis)
        indices = holds_indices(t, x.shape, call.axis)
        if indices:
            t = _array.counts(t, xp)  # before any comparison: -100 does not exist in uint8, nor 200 in int8
            stray = refuse_strays("target", t, rows.shape[-1], options.ignore_index, xp)
            poisoned = poisoned | stray[..., None]  # if values may not be read, such a sample becomes NaN
            t = t[..., None]
            ignored = t == options.ignore_index
            t = xp.where(ignored, -xp.ones_like(t), t)
        else:
            t = _array.to_last(as_dtype(t, rows.dtype, xp), call.axis, xp)
            ignored = xp.zeros_like(poisoned)
        sample_weight = None
        if class_weight is not None:
            with quiet(rows):
                sample_weight = _of_class(class_weight, t, rows, xp) if indices else dot(t, class_weight, xp)
        return cls(xp, mapping, rows, keep, poisoned, t, indices, ignored, class_weight, sample_weight, options, dtype)

    @property
    def y(self) -> Array:
        """The target as a distribution, [..., n], smoothed."""
        if "y" not in self.found:
            self.found["y"] = self._distribution()
        return self.found["y"]

    def _distribution(self) -> Array:
        xp, rows, y = self.xp, self.rows, self.target
        if self.indices:
            y = xp.astype(y == _array.positions(rows, y.dtype, xp), rows.dtype)
        if not self.options.smoothing:
            return y
        free = xp.astype(self.keep, rows.dtype)
        return smoothed(self.options, self.mapping, y, free, total(free, xp), total(y, xp), xp)

    def check_sums(self, masked: Array) -> None:
        """Raise an error if the target sums to what p can't sum to, as far as values may be read. `masked`: a class with a target is."""
        refuse_above(self.y, self.mapping, self.xp, left_out=masked | self.poisoned | self.ignored)
        if self.indices:
            refuse_one_class(self.mapping)
            return
        xp, sums = self.xp, self.mapping.sums(self.keep, self.xp)
        refuse_negative(self.y, sums, xp)
        refuse_sums(total(self.y, xp), sums, xp, left_out=masked | self.poisoned)

    def terms(self) -> tuple[Array, Array, float]:
        """What `not_below_zero` needs."""
        xp, y = self.xp, stop_gradient(self.y)
        x, keep, _ = _array.finite_scores(stop_gradient(self.rows), xp)
        return dot(y, xp.where(keep, row_top(x, keep, xp) - x, xp.zeros_like(x)), xp), total(y, xp), 1.0

    def p(self) -> Array:
        """The probabilities [..., n]."""
        return bridge(self.rows).apply(self.mapping, self.rows)

    @property
    def place(self) -> Array | None:
        """Where in the row the only class with a target lies, [..., 1], 0 where there is none; None for a distribution."""
        if not self.indices or self.options.smoothing:
            return None
        if "place" not in self.found:
            self.found["place"] = _at(self.target, self.rows, self.xp)
        return self.found["place"]

    def of_target(self, per_class: Array, finite: Array) -> Array:
        """<y, per_class> with the class weights, [..., 1]; see `of_target`."""
        if self.place is not None:
            return self.of_place(take(per_class, self.place, self.xp), take(finite, self.place, self.xp))
        factor = self.y if self.class_weight is None else self.y * self.class_weight
        return of_target(factor, per_class, finite, self.xp)

    def of_place(self, value: Array, finite: Array) -> Array:
        """`of_target` from the values at `place`."""
        return of_target(_of_class(self.class_weight, self.target, self.rows, self.xp), value, finite, self.xp)

    def reduce(self, value: Array, weighted: bool = False) -> Array:
        """Reduce `value`, [..., 1]; `weighted` means that it includes the class weights already."""
        samples = Samples(self.poisoned, self.ignored, self.sample_weight, self.indices)
        return self.options.reduce(*each_row(self.options, value, samples, weighs=weighted), self.dtype, self.xp)


def _at(index: Array, rows: Array, xp: Namespace) -> Array:
    """Class indices [..., 1] as places in the rows, 0 for those that are no class."""
    return xp.where((index >= 0) & (index < rows.shape[-1]), index, xp.zeros_like(index))


def _of_class(weight: Array | None, index: Array, rows: Array, xp: Namespace) -> Array:
    """The class weight of each index, or 1, [..., 1]; 0 for an index that is no class."""
    at = _at(index, rows, xp)
    if weight is None:
        return xp.astype(at == index, rows.dtype)
    of_class = xp.reshape(xp.take(weight, xp.reshape(at, (-1,)), axis=0), index.shape)
    return xp.where(at == index, of_class, xp.zeros_like(of_class))
