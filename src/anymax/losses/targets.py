"""Scores and targets as rows."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from typing import Any

from .. import _array
from .._array import (
    Array,
    asarray,
    dot,
    is_array,
    is_integer,
    is_torch,
    known_any,
    namespace,
    quiet,
    stop_gradient,
    total,
    upcast,
)
from .._core.axes import Joined
from .._core.mapping import Mapping, row_top
from .._core.rows import join, prepare
from ..autodiff import bridge
from .options import LossOptions, class_weights


def one_axis(mapping: Mapping, scores: Any, target: Any, options: LossOptions) -> tuple[Mapping, Any, Any, LossOptions]:
    """The map, scores and target with several class axes joined into the last axis."""
    axes: Any = options.axis
    joined, mapping, mask = join(mapping, scores, axes, options.mask)
    target = _array.beside(target, joined.scores, "target", namespace(joined.scores))
    full, rest = tuple(asarray(scores).shape), tuple(joined.scores.shape[:-1])
    if tuple(target.shape) != (rest if is_integer(target) else full):
        raise ValueError(
            f"target of shape {tuple(target.shape)}: for scores of shape {full} with the classes along axes {tuple(axes)}, expected class "
            f"indices (integers) of shape {rest}, or a distribution (floating point) of shape {full}"
        )
    target = target if is_integer(target) else Joined.of(target, axes).scores
    return mapping, joined.scores, target, options._replace(axis=-1, mask=mask)


@dataclasses.dataclass
class Batch:
    """Scores and targets as rows, with the options applied."""

    xp: Any
    mapping: Mapping
    rows: Array  # [..., n], in the dtype of the computation
    keep: Array  # [..., n], False where masked
    poisoned: Array  # [..., 1], True for scores with NaN or +inf and for an impossible target
    y: Array  # [..., n], the target as a distribution, smoothed
    soft: bool  # the target is a distribution, as given or by smoothing
    indices: bool
    counted: Array  # [..., 1], 1 for a sample that counts, 0 for an ignored one
    sample_weight: Array  # [..., 1]
    class_weight: Array | None  # [n]
    options: LossOptions
    dtype: Any  # of the result

    @classmethod
    def of(cls, mapping: Mapping, scores: Any, target: Any, options: LossOptions) -> Batch:
        x, smoothing = asarray(scores), options.label_smoothing
        x, rows, mapping, axis = prepare(mapping, x, options.class_axis(x), options.mask, None)
        xp = namespace(rows)
        dtype, rows = result_dtype(rows), upcast(rows, xp)
        with quiet(rows):
            _, keep, poisoned = _array.finite_scores(rows, xp)
        n = rows.shape[-1]
        class_weight = None if options.weight is None else class_weights(options.weight, rows, xp)
        t = _array.beside(target, rows, "target", xp)
        indices = is_integer(t)
        ask_for_axis(x, t, options.axis)
        one = xp.ones_like(rows[..., :1])
        if indices:
            y, counted, stray = _one_hot(t, x, rows, axis, options.ignore_index, xp)
            poisoned = poisoned | stray
        else:
            y, counted = _distribution(t, x, rows, axis, xp), one
        with quiet(rows):
            sample = counted if class_weight is None else counted * dot(y, class_weight, xp)
        if smoothing:
            free = xp.astype(keep, rows.dtype)
            count = total(free, xp)
            uniform = free / xp.where(count > 0, count, xp.ones_like(count))
            y = (1.0 - smoothing) * y + smoothing * to_spread(mapping, total(y, xp)) * uniform
        assert n == y.shape[-1]
        return cls(
            xp, mapping, rows, keep, poisoned, y, bool(smoothing) or not indices, indices, counted, sample,
            class_weight, options, dtype,
        )  # fmt: skip

    def check_mass(self) -> None:
        """Raise an error if the target is not a distribution that the map can reach, as far as values may be read."""
        xp, mass = self.xp, self.mapping.mass
        if self.indices:
            refuse_one_class(self.mapping)
            return
        if is_array(mass):
            return
        if known_any(self.y < 0, xp):
            raise ValueError(
                f"target: expected rows of non-negative numbers that sum to {mass:g}; the smallest number is {float(xp.min(self.y)):g}"
            )
        sums = total(self.y, xp)
        if known_any(xp.abs(sums - mass) > 1e-2 * mass, xp):
            raise ValueError(
                f"target: expected rows of non-negative numbers that sum to {mass:g}; the sums go from {float(xp.min(sums)):g} to "
                f"{float(xp.max(sums)):g}. For several labels in a row, divide their indicator by their number"
            )

    def rounding(self) -> Array:
        """How far rounding may push a loss below 0, [..., 1]: rounding of its terms, and of a target's sum."""
        xp, rows = self.xp, stop_gradient(self.rows)
        x, _, _ = _array.finite_scores(rows, xp)
        y = stop_gradient(self.y)
        mass = total(y, xp)
        centre = dot(y, x, xp) / xp.where(mass == 0, xp.ones_like(mass), mass)
        # below the centre only scores of targets count: elsewhere p makes the terms small
        size = 1.0 + xp.abs(row_top(x, self.keep, xp) - centre) + dot(y, xp.abs(x - centre), xp)
        share = (64.0 + 4.0 * math.sqrt(x.shape[-1])) * float(xp.finfo(x.dtype).eps)
        return (share + 4.0 * xp.abs(mass - _array.like(self.mapping.mass, x, xp))) * size

    def not_below_zero(self, value: Array, masked: Array) -> Array:
        """Set losses that rounding made negative to 0. A loss further below 0 is a fault in the map's formulas: raise an error, or leave
        it visible if values may not be read."""
        xp, below = self.xp, value < 0
        if _array.known(below) and not bool(xp.any(below)):
            return value
        wrong = (value < -self.rounding()) & ~masked & ~self.poisoned & (self.counted != 0)
        if known_any(wrong, xp):
            worst = float(xp.min(xp.where(wrong, stop_gradient(value), xp.zeros_like(value))))  # others may be NaN
            raise ValueError(
                f"{self.mapping!r}: its Fenchel-Young loss is {worst:g}, and no such loss is below 0: either "
                "its omega() is not the regulariser of its forward() (anymax.check_mapping tells), or the target is out of the map's range"
            )
        return value + stop_gradient(xp.where(below & ~wrong, -value, xp.zeros_like(value)))

    def p(self) -> Array:
        """The probabilities [..., n]."""
        return bridge(self.rows).apply(self.mapping, self.rows)

    def of_target(self, per_class: Array, finite: Array) -> Array:
        """<y, per_class> with the class weights, [..., 1]; infinities and NaN where y is 0 do not count."""
        xp = self.xp
        factor = self.y if self.class_weight is None else self.y * self.class_weight
        asked = (factor != 0) | finite  # keep finite entries, whose derivative in y exists also where y is 0
        zero = xp.zeros_like(per_class)
        return total(xp.where(asked, factor * xp.where(asked, per_class, zero), zero), xp)

    def reduce(self, value: Array, weighted: bool = False) -> Array:
        """Reduce `value`, [..., 1]; `weighted` means that it includes the class weights already."""
        xp = self.xp
        value = _array.poison(value, self.poisoned, xp)
        ignored = self.counted == 0
        value = xp.where(ignored, xp.zeros_like(value), value)
        value = value if weighted or self.class_weight is None else value * self.sample_weight
        norm = self.sample_weight if self.indices else self.counted
        return self.options.reduce(xp.squeeze(value, axis=-1), xp.squeeze(norm, axis=-1), self.dtype, xp)


def to_spread(mapping: Mapping, sums: Array) -> Any:
    """The mass that label smoothing redistributes: 1, as in torch, even if a soft target sums to something else; for a map
    whose p sums to more than 1, the sum of the target.
    """
    return 1.0 if mapping.sums_to_one else sums


_warned = False


def ask_for_axis(x: Array, target: Any, axis: Any) -> None:
    """Warn, once per process, if class indices would fit both axis 1, which is used, and the last axis as the class axis."""
    global _warned
    shape = tuple(x.shape)
    if _warned or len(shape) < 3 or shape[1:-1] != shape[2:] or axis is not None:
        return
    if not is_integer(target) or not _array.eager(x) or _array.compiling():
        return
    _warned = True
    depth, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "anymax":
        depth, frame = depth + 1, frame.f_back
    warnings.warn(
        f"a loss of scores of shape {shape}: the classes are axis 1, as in torch, and could be the last axis by these shapes; "
        "say axis=1 or axis=-1",
        UserWarning,
        stacklevel=depth,
    )


def result_dtype(rows: Array) -> Any:
    """The dtype of the scores; under torch's autocast losses are fp32, as torch's own are."""
    if is_torch(rows):
        torch, device = sys.modules["torch"], rows.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return upcast(rows, namespace(rows)).dtype
    return rows.dtype


def refuse_strays(t: Array, stray: Array, n: int, ignore_index: int, xp: Any) -> None:
    """Raise an error if an index is known to be neither a class nor to be ignored."""
    if known_any(stray, xp):
        raise IndexError(
            f"target: class indices must be from 0 to {n - 1} (or ignore_index={ignore_index}), "
            f"got values from {int(xp.min(t))} to {int(xp.max(t))}"
        )


def refuse_one_class(mapping: Mapping) -> None:
    """Raise an error if p does not sum to 1, as a class index does; a mass that is an array is not checked."""
    mass = mapping.mass
    if not is_array(mass) and mass != 1.0:
        raise ValueError(
            f"{mapping!r} sums to {mass:g}, a class index to 1; give the target as an indicator of {mass:g} classes"
        )


def _one_hot(t: Array, x: Array, rows: Array, axis: int, ignore_index: int, xp: Any) -> tuple[Array, Array, Array]:
    n = rows.shape[-1]
    expected = tuple(s for i, s in enumerate(x.shape) if i != axis)
    if tuple(t.shape) != expected:
        hint = ""
        if tuple(t.shape) == tuple(x.shape):
            hint = "; integers are class indices: convert one-hot rows to floating point, or give their argmax"
        elif tuple(t.shape) == tuple(x.shape[:-1]):
            hint = "; if the classes are last, say axis=-1"
        raise ValueError(
            f"target of shape {tuple(t.shape)}: for scores of shape {tuple(x.shape)} with the classes along axis {axis}, expected class "
            f"indices of shape {expected}, or a distribution (floating point) of shape {tuple(x.shape)}{hint}"
        )
    t = _array.counts(t, xp)  # before any comparison: -100 does not exist in uint8, nor 200 in int8
    ignored = t == ignore_index
    stray = ~ignored & ((t < 0) | (t >= n))  # if values may not be read, such a sample becomes NaN
    refuse_strays(t, stray, n, ignore_index, xp)
    t = xp.where(ignored, xp.zeros_like(t), t)
    y = xp.astype(t[..., None] == _array.positions(rows, t.dtype, xp), rows.dtype)
    return y, xp.astype(~ignored[..., None], rows.dtype), stray[..., None]


def _distribution(t: Array, x: Array, rows: Array, axis: int, xp: Any) -> Array:
    if not _array.is_floating(t):
        hint = "; convert one-hot rows to floating point" if "bool" in _array.dtype_name(t) else ""
        raise TypeError(
            f"target: expected class indices (integers) or a distribution (floating point), got {t.dtype}{hint}"
        )
    if tuple(t.shape) != tuple(x.shape):
        hint = "class indices must be integers" if t.ndim < x.ndim else "the scores come first, the target after them"
        raise ValueError(
            f"target of shape {tuple(t.shape)} is a distribution (floating point) and must have the shape of the scores, {tuple(x.shape)}; "
            + hint
        )
    t = t if t.dtype == rows.dtype else xp.astype(t, rows.dtype)
    return _array.to_last(t, axis, xp)
