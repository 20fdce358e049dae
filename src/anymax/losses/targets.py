"""Scores and targets as rows: what the signature of a loss says, read once; and reductions."""

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
from .._core.names import as_mapping
from .._core.options import allowed
from .._core.rows import join, prepare
from .._core.shards import refuse as refuse_sharded

_REDUCTIONS = ("mean", "sum", "none")
OPTIONS = ("weight", "ignore_index", "reduction", "label_smoothing", "axis", "dim", "mask")
_PARAMETERS = {
    "alpha": "it belongs to the map, as in anymax.Entmax(alpha=1.3)",
    "k": "it belongs to the map, as in anymax.SparseSoftmax(k=8)",
}


def one_axis(mapping: Mapping, scores: Any, target: Any, options: Any) -> tuple[Mapping, Any, Any]:
    """Classes along a tuple of axes moved to the last axis, as one; `options` then says so."""
    refuse_sharded("a loss", scores)
    axes = options.get("axis")
    axes = options.get("dim") if axes is None else axes
    if not isinstance(axes, (tuple, list)):
        return mapping, scores, target
    _array.pick_axis(options.get("axis"), options.pop("dim", None))
    joined, mapping, options["mask"] = join(mapping, scores, axes, options.get("mask"))
    options["axis"] = -1
    target = _array.beside(target, joined.scores, "target", namespace(joined.scores))
    full, rest = tuple(asarray(scores).shape), tuple(joined.scores.shape[:-1])
    if tuple(target.shape) != (rest if is_integer(target) else full):
        raise ValueError(
            f"target of shape {tuple(target.shape)}: for scores of shape {full} with the classes along axes {tuple(axes)}, expected class "
            f"indices (integers) of shape {rest}, or a distribution (floating point) of shape {full}"
        )
    return mapping, joined.scores, target if is_integer(target) else Joined.of(target, axes).scores


@dataclasses.dataclass
class Batch:
    """Scores and targets as rows: everything that the signature of a loss says, read once."""

    xp: Any
    mapping: Mapping
    rows: Array  # [..., n] in the dtype to compute in
    keep: Array  # [..., n], False where masked
    poisoned: Array  # [..., 1], True for scores with NaN or +inf and for an impossible target
    y: Array  # [..., n], the target as a distribution, smoothed
    soft: bool  # the target is a distribution, or was made one by smoothing
    indices: bool
    smoothing: float
    counted: Array  # [..., 1], 1 for a sample that counts, 0 for an ignored one
    sample_weight: Array  # [..., 1]
    class_weight: Array | None  # [n]
    reduction: str
    dtype: Any

    @classmethod
    def of(cls, mapping: Mapping | str, scores: Any, target: Any, weight: Any, options: Any) -> Batch:
        mapping, scores, target = one_axis(as_mapping(mapping), scores, target, options)
        allowed("a loss", OPTIONS, options, _PARAMETERS)
        axis, dim, mask = options.pop("axis", None), options.pop("dim", None), options.pop("mask", None)
        ignore_index, reduction = options.pop("ignore_index", -100), options.pop("reduction", "mean")
        smoothing = _array.number(options.pop("label_smoothing", 0.0))
        check_reduction(reduction)
        _array.check_integer("a loss", "ignore_index", ignore_index, "an integer, which marks samples to leave out")
        if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)) or not 0 <= smoothing <= 1:
            raise ValueError(f"label_smoothing must be a number from 0 to 1, got {smoothing!r}")
        x, given = asarray(scores), axis
        x, rows, mapping, axis = prepare(mapping, x, class_axis(x, axis, dim), mask, None)
        xp = namespace(rows)
        dtype, rows = result_dtype(rows), upcast(rows, xp)
        with quiet(rows):
            _, keep, poisoned = _array.finite_scores(rows, xp)
        n = rows.shape[-1]
        class_weight = None if weight is None else class_weights(weight, rows, xp)
        t = _array.beside(target, rows, "target", xp)
        indices = is_integer(t)
        ask_for_axis(x, t, given, dim)
        one = xp.ones_like(rows[..., :1])
        if indices:
            y, counted, stray = _one_hot(t, x, rows, axis, ignore_index, xp)
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
            xp, mapping, rows, keep, poisoned, y, bool(smoothing) or not indices, indices, smoothing,
            counted, sample, class_weight, reduction, dtype,
        )  # fmt: skip

    def check_mass(self) -> None:
        """An error where the target can't be a distribution of the map; only where values may be looked at."""
        xp, mass = self.xp, self.mapping.mass
        if is_array(mass):
            return
        if self.indices:
            if mass != 1.0:
                raise ValueError(
                    f"{self.mapping!r} sums to {mass:g}, a class index to 1; give the target as an indicator of {mass:g} classes"
                )
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
        """What the rounding of its terms, and a target that misses its sum by rounding, can take from a loss, [..., 1]."""
        xp, rows = self.xp, stop_gradient(self.rows)
        x, _, _ = _array.finite_scores(rows, xp)
        y = stop_gradient(self.y)
        mass = total(y, xp)
        centre = dot(y, x, xp) / xp.where(mass == 0, xp.ones_like(mass), mass)
        # of the scores below the centre only those of targets count: p makes the terms of the others small
        size = 1.0 + xp.abs(row_top(x, self.keep, xp) - centre) + dot(y, xp.abs(x - centre), xp)
        share = (64.0 + 4.0 * math.sqrt(x.shape[-1])) * float(xp.finfo(x.dtype).eps)
        return (share + 4.0 * xp.abs(mass - _array.like(self.mapping.mass, x, xp))) * size

    def not_below_zero(self, value: Array, masked: Array) -> Array:
        """0 for what rounding has made negative; more than that is a fault of the map's formulas: an error, or where no value may be
        asked for, left to be seen."""
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

    def reduce(self, value: Array, weighted: bool = False) -> Array:
        """`value` is [..., 1]; `weighted` says that the class weights are in it already."""
        xp = self.xp
        value = _array.poison(value, self.poisoned, xp)
        ignored = self.counted == 0
        value = xp.where(ignored, xp.zeros_like(value), value)
        value = value if weighted or self.class_weight is None else value * self.sample_weight
        norm = self.sample_weight if self.indices else self.counted
        return reduced(xp.squeeze(value, axis=-1), xp.squeeze(norm, axis=-1), self.reduction, self.dtype, xp)


def to_spread(mapping: Mapping, sums: Array) -> Any:
    """What label smoothing spreads a share of: 1, also where a soft target sums to something else, as in torch; for a map whose p sums to
    more, what the target sums to."""
    mass = getattr(mapping, "mass", 1.0)
    return sums if is_array(mass) or mass != 1.0 else 1.0


def reduced(value: Array, norm: Array, reduction: str, dtype: Any, xp: Any) -> Array:
    check_reduction(reduction)
    if reduction == "mean":
        weight = xp.sum(norm)
        value = xp.sum(value) / xp.where(weight == 0, xp.ones_like(weight), weight)
    elif reduction == "sum":
        value = xp.sum(value)
    return cast(value, dtype, xp)


def cast(value: Array, dtype: Any, xp: Any) -> Array:
    """In the dtype of the result: a loss above the largest number of fp16 is +inf."""
    if value.dtype == dtype:
        return value
    with quiet(value):
        return xp.astype(value, dtype)


def check_reduction(reduction: Any) -> None:
    if reduction not in _REDUCTIONS:
        hint = "; it is called 'mean' here" if reduction == "elementwise_mean" else ""
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}{hint}")


_warned = False


def ask_for_axis(x: Array, target: Any, axis: Any, dim: Any) -> None:
    """Warns, once in a process, where class indices fit classes along axis 1, which is meant, and along the last axis as well."""
    global _warned
    shape = tuple(x.shape)
    if _warned or len(shape) < 3 or shape[1:-1] != shape[2:] or axis is not None or dim is not None:
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


def class_axis(x: Array, axis: int | None, dim: int | None) -> int:
    return _array.pick_axis(axis, dim, 1 if x.ndim > 1 else 0)


def result_dtype(rows: Array) -> Any:
    """The dtype of the scores; under torch's autocast losses are fp32, as torch's own are."""
    if is_torch(rows):
        torch, device = sys.modules["torch"], rows.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return upcast(rows, namespace(rows)).dtype
    return rows.dtype


def class_weights(weight: Any, rows: Array, xp: Any) -> Array:
    weight = _array.beside(weight, rows, "weight", xp)
    if tuple(weight.shape) != (rows.shape[-1],):
        hint = "" if weight.ndim else "; a parameter of the map is a keyword, as in alpha=1.5"
        raise ValueError(
            f"weight of shape {tuple(weight.shape)}: expected one factor for each of the {rows.shape[-1]} classes{hint}"
        )
    return weight if weight.dtype == rows.dtype else xp.astype(weight, rows.dtype)


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
    stray = ~ignored & ((t < 0) | (t >= n))  # where no value may be asked for, such a sample is NaN
    if known_any(stray, xp):
        raise IndexError(
            f"target: class indices must be from 0 to {n - 1} (or ignore_index={ignore_index}), "
            f"got values from {int(xp.min(t))} to {int(xp.max(t))}"
        )
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
