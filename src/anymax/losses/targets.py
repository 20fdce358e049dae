"""The rules of targets and of the losses of samples, for one process and for several: what is refused, what counts, what rounding may do.

Each refusal reads values only where that costs nothing (`known`), unless it says otherwise. Elsewhere the caller makes such a row NaN.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import _array
from .._array import (
    Array,
    Namespace,
    as_dtype,
    is_array,
    is_integer,
    known,
    known_any,
    namespace,
    stop_gradient,
    total,
)
from .._core.mapping import Mapping, with_missing_mass
from .options import LossOptions

# -- what a target may be ------------------------------------------------------------------------------------------------------------


def holds_indices(t: Array, scores: Any, axis: Any, what: str = "target", *, part: bool = False) -> bool:
    """True for class indices, False for distributions; an error if the target's dtype or shape fits neither.

    scores: the shape of the scores, with the classes along `axis`, one or several. part: other processes have further classes.
    """
    indices = is_integer(t)
    if not indices and not _array.is_floating(t):
        hint = "; convert one-hot rows to floating point" if _array.is_boolean(t) else ""
        raise TypeError(
            f"{what}: expected class indices (integers) or a distribution (floating point), got {t.dtype}{hint}"
        )
    shape, scores = tuple(t.shape), tuple(scores)
    axes = {a % len(scores) for a in (axis if isinstance(axis, (tuple, list)) else (axis,))}
    lead = tuple(s for i, s in enumerate(scores) if i not in axes)
    if shape == (lead if indices else scores):
        return indices
    distribution, whose = "a distribution (floating point)", ""
    if part:
        distribution, whose = f"this process's part of {distribution}", "a shard of "
    if not indices:
        words = (
            "class indices must be integers"
            if len(shape) < len(scores)
            else "the scores come first, the target after them"
        )
        raise ValueError(
            f"{what} of shape {shape} is {distribution} and must have the shape of the scores, {scores}; {words}"
        )
    hint = ""
    if shape == scores:
        hint = "; integers are class indices: convert one-hot rows to floating point, or give their argmax"
    elif shape == scores[:-1]:
        hint = "; if the classes are last, say axis=-1"
    elif shape == (*lead, 1):
        hint = "; drop the last axis"
    along = f"axes {tuple(axis)}" if len(axes) > 1 else f"axis {min(axes)}"
    raise ValueError(
        f"{what} of shape {shape}: for {whose}scores of shape {scores} with the classes along {along}, expected class indices"
        f"{', counted over all processes,' if part else ''} of shape {lead}, or {distribution} of shape {scores}{hint}"
    )


Sums = tuple[Any, Any]  # the lowest and the highest sum of p, as `Mapping.sums` gives them


def refuse_one_class(mapping: Mapping) -> None:
    """Raise an error if p can't sum to 1, as a class index does; sums that are arrays are not checked."""
    lowest, highest = mapping.sums(None, np)
    if not is_array(lowest) and not is_array(highest) and not lowest <= 1.0 <= highest:
        words = (
            f"{lowest:g}"
            if lowest == highest
            else f"{lowest:g} or more"
            if highest == math.inf
            else f"{lowest:g} to {highest:g}"
        )
        target = (
            f"an indicator of {words} classes"
            if highest < math.inf
            else "a row of numbers with the sum of its probabilities"
        )
        raise ValueError(f"{mapping!r} sums to {words}, a class index to 1; give the target as {target}")


def refuse_negative(y: Array, sums: Sums | None, xp: Namespace, where: str = "") -> None:
    """Raise an error if a distribution has an entry that is known to be below 0. sums: what it may sum to, for the error's words."""
    if known_any(y < 0, xp):
        raise ValueError(f"{_expected(sums, where)}; the smallest number is {float(xp.min(stop_gradient(y))):g}")


def refuse_above(y: Array, mapping: Mapping, xp: Namespace, left_out: Any = False) -> None:
    """Raise an error if a target is known to be above the upper bound of its class, in rows that are not left out."""
    most = mapping.ceiling(y, xp)
    if most is None:
        return
    above = (y > 1.01 * most) & ~left_out
    if known_any(above, xp):
        high = float(xp.max(stop_gradient(xp.where(above, y, xp.zeros_like(y)))))
        raise ValueError(
            f"target: {mapping.name} gives no class more than its upper bound, and the target of one is {high:g}, above its bound"
        )


def room_below(options: LossOptions, y: Array, keep: Array, mapping: Mapping, xp: Namespace) -> Array:
    """How much label smoothing may give each class of these, of which others are elsewhere, so that none is above its bound, [..., 1]."""
    room = 1.01 * mapping.ceiling(y, xp) - (1.0 - options.smoothing) * y
    return -_array.top(stop_gradient(xp.where(keep, -room, -math.inf * xp.ones_like(y))), xp)


def refuse_more_than_room(more: Array, mapping: Mapping, xp: Namespace) -> None:
    """Raise an error if label smoothing is known to give a class more than `room_below`."""
    if known_any(more, xp):
        raise ValueError(
            f"target: {mapping.name} gives no class more than its upper bound, and with label smoothing the target of one is above it"
        )


def refuse_sums(mass: Array, sums: Sums, xp: Namespace, where: str = "", left_out: Any = False) -> None:
    """Raise an error if the sums of distributions, [..., 1], are known to differ from those of the map, in rows that are not left out."""
    lowest, highest = sums
    outside = (mass < lowest - 1e-2 * highest) | (mass > highest + 1e-2 * highest)
    if known_any(outside & ~left_out if is_array(left_out) else outside, xp):
        low, high = (float(f(stop_gradient(mass))) for f in (xp.min, xp.max))
        one = not is_array(lowest) and lowest == 1.0
        several = ". For several labels in a row, divide their indicator by their number" if one else ""
        raise ValueError(f"{_expected(sums, where)}; the sums go from {low:g} to {high:g}{several}")


def complete_target(y: Array, sums: Sums, xp: Namespace) -> Array:
    """Distributions with the hidden class as the last, which completes them to the highest sum; an error if a row is none."""
    refuse_negative(y, sums, xp)
    refuse_sums(total(y, xp), sums, xp)
    return with_missing_mass(y, sums[1], xp)


def _expected(sums: Sums | None, where: str) -> str:
    words = ""
    if sums is not None and not is_array(sums[0]) and not is_array(sums[1]):
        words = f" that sum to {sums[0]:g}" + ("" if sums[0] == sums[1] else f" to {sums[1]:g}") + where
    elif sums is not None:
        words = " that sum to what the probabilities of their row sum to" + where
    return "target: expected rows of non-negative numbers" + words


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


# -- what a sample counts ------------------------------------------------------------------------------------------------------------


def counted_weight(index: Array, ignored: Array, class_weight: Array | None, dtype: Any, xp: Namespace) -> Array:
    """What each sample counts in a mean: 0 where it is ignored, else 1, or the weight of its class; a stray index makes the loss NaN."""
    if class_weight is None:
        return xp.astype(~ignored, dtype)
    n = class_weight.shape[0]
    inside = (index >= 0) & (index < n)
    weight = as_dtype(class_weight[xp.where(inside, index, n - 1)], dtype, xp)
    return xp.where(ignored, xp.zeros_like(weight), weight)


def weighted(value: Array, factor: Array, xp: Namespace) -> Array:
    """value * factor; a factor of 0 leaves out an infinite loss too."""
    return xp.where((factor == 0) & ~xp.isfinite(value), xp.zeros_like(value), value * factor)


def smoothed(
    options: LossOptions, mapping: Mapping, of_target: Any, of_ones: Any, count: Any, sums: Any, xp: Namespace
) -> Any:
    """The entries of a target after label smoothing, or what is linear in them: a sum, a gap, a loss without Omega.

    of_ones: the same for a 1 at each unmasked class, of which there are `count`. What is spread sums to 1, as in torch, even if a soft
    target sums to something else; for a map whose p may sum to something else, to the sum of the target. Smoothing by epsilon over the
    n - 1 other classes, another convention, is that by `epsilon * n / (n - 1)`.
    """
    even = of_ones / xp.where(count > 0, count, xp.ones_like(count))
    even = even if mapping.sums_to_one else sums * even
    return (1.0 - options.smoothing) * of_target + options.smoothing * even


def has_constant(mapping: Mapping, indices: bool, options: LossOptions) -> bool:
    """Whether Omega(y) is a part of the loss: it is 0 for a single class. An error if the map has none for such a target."""
    if indices and not options.smoothing:
        return False
    refused = mapping.no_constant(options.smoothing > 0)
    if refused is not None:
        raise ValueError(refused)
    return True


def of_target(factor: Array, per_class: Array, finite: Array, xp: Namespace) -> Array:
    """<factor, per_class>, [..., 1]; infinities and NaN where the factor is 0 do not count."""
    asked = (factor != 0) | finite  # keep finite entries, whose derivative in the target exists also where it is 0
    zero = xp.zeros_like(per_class)
    return total(xp.where(asked, factor * xp.where(asked, per_class, zero), zero), xp)


def _rounding(gap: Array, mass: Array, scale: Any, mapping: Mapping, n: int, xp: Namespace) -> Array:
    """How far rounding may push a loss below 0, [..., 1]: rounding of its terms and of the sum of the target, for n classes.

    gap, mass: <y, M - a> and <y, 1>, M the largest score of the row. Scores below the mean of those of the target, which are less than
    the rest, have a p that makes their terms small. scale: the scores are so many times a.
    """
    size = 1.0 + gap / xp.where(mass == 0, xp.ones_like(mass), mass) + 2.0 * gap  # |a - mean| <= (M - a) + (M - mean)
    share = (64.0 + 4.0 * math.sqrt(n)) * float(xp.finfo(size.dtype).eps)
    lowest, highest = (_array.like(value, size, xp) for value in mapping.sums(None, xp))
    beside = xp.where(mass < lowest, lowest - mass, xp.where(mass > highest, mass - highest, xp.zeros_like(mass)))
    return (share + 4.0 * beside) * (1.0 + scale * size)


def not_below_zero(
    mapping: Mapping, value: Array, checked: Array, terms: Callable[[], tuple[Array, Array, Any]], n: int, xp: Namespace
) -> Array:
    """Set losses that rounding made negative to 0. A `checked` loss further below 0 is a fault in the map's formulas: raise an error, or
    leave it visible if values may not be read. terms: (gap, mass, scale) as in `_rounding`."""
    below = value < 0
    if known(below) and not bool(xp.any(below)):
        return value
    gap, mass, scale = terms()
    wrong = (value < -_rounding(stop_gradient(gap), stop_gradient(mass), scale, mapping, n, xp)) & checked
    if known_any(wrong, xp):
        worst = float(xp.min(xp.where(wrong, stop_gradient(value), xp.zeros_like(value))))  # others may be NaN
        raise ValueError(
            f"{mapping!r}: its Fenchel-Young loss is {worst:g}, and no such loss is below 0: either "
            "its omega() is not the regulariser of its forward() (anymax.check_mapping tells), or the target is out of the map's range"
        )
    return value + stop_gradient(xp.where(below & ~wrong, -value, xp.zeros_like(value)))


class Samples(NamedTuple):
    """What each row counts, [..., 1]."""

    poisoned: Array  # its loss is NaN
    ignored: Array  # it is left out
    weight: Any  # the class weight of its target, 0 where ignored; not read without class weights
    indices: bool  # targets are class indices, and a mean divides by these weights


def each_row(options: LossOptions, value: Array, samples: Samples, *, weighs: bool) -> tuple[Array, Array]:
    """(the losses of all samples, what each counts in a mean), from losses [..., 1]. weighs: these include the class weights already."""
    xp, ignored = namespace(value), samples.ignored
    value = _array.poison(value, samples.poisoned, xp)
    value = xp.where(ignored, xp.zeros_like(value), value)
    if options.weight is not None and not weighs:
        value = weighted(value, samples.weight, xp)
    norm = samples.weight if options.weight is not None and samples.indices else xp.astype(~ignored, value.dtype)
    return xp.squeeze(value, axis=-1), xp.squeeze(norm, axis=-1)
