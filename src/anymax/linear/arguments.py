"""How the verbs of output layers read what a caller says: transforms, temperature, classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import _array
from .._array import (
    Array,
    Namespace,
    as_dtype,
    differentiates,
    is_array,
    is_integer,
    namespace,
    recorded,
    upcast,
)
from .._core.classes import class_indices
from .._core.shards import refuse as refuse_sharded
from ..transforms import temperature as tempered
from ..transforms.applying import transforms_along
from ..transforms.base import Transform, check_range
from .job import Job, PerRow
from .layer import Layer, check_chunk

HINTS = {
    "axis": "leave it out: the features of x are its last axis",
    "input": "say x=",
    "softcap": "give it as transform=, as in transform=anymax.transforms.softcap(30.0)",
}


class LayerArguments(NamedTuple):
    """The arguments that the verbs of output layers share, not yet checked."""

    who: str  # the verb
    x: Any
    linear_weight: Any
    mapping: Any
    linear_bias: Any
    mask: Any
    transform: Any
    chunk: Any
    temperature: Any = None
    score_dtype: Any = None
    invariant: Any = False

    def layer(self) -> Layer:
        """The operands, before a temperature."""
        return Layer.of(
            self.who,
            self.x,
            self.linear_weight,
            self.mapping,
            self.linear_bias,
            self.mask,
            score_dtype=self.score_dtype,
        )

    def job(
        self,
        layer: Layer,
        per_row: PerRow,
        target: Any = None,
        class_weight: Any = None,
        reference: Layer | None = None,
    ) -> Job:
        """What to compute for each row, by the parts that the caller wants."""
        invariant = _array.check_flag(self.who, "invariant", self.invariant)
        if invariant:  # a library of products also chooses by strides
            layer = layer.with_operands(layer.x, _in_line(layer.weight), layer.bias)
            if reference is not None:
                reference = reference.with_operands(reference.x, _in_line(reference.weight), reference.bias)
        return Job(layer, per_row, target, class_weight, check_chunk(self.who, self.chunk), invariant, reference)


def _in_line(weight: Array) -> Array:
    """The weight with its rows one after the other in memory, as one long row has them."""
    xp = namespace(weight)
    return xp.reshape(xp.reshape(weight, (-1,)), weight.shape)


def row_transforms(who: str, transform: Any) -> tuple[Callable[[Any], Any], ...]:
    """The transforms of the scores; those that can't be computed for some rows at a time are refused."""
    if transform is None:
        return ()
    parts = transforms_along(transform, 1, 2, who)
    for t in parts:
        if isinstance(t, Transform) and t.random:
            raise ValueError(
                f"{who}: {t!r} draws random numbers, which would differ when the scores are recomputed; compute the scores and use nll"
            )
        if isinstance(t, Transform) and any(
            is_array(v) and v.ndim > 1 and math.prod(v.shape[:-1]) > 1 for _, v in t.params
        ):
            raise ValueError(
                f"{who}: {t!r} has parameters that differ between rows, which can't be split; scale x, or give mask=, instead"
            )
    return parts


def elementwise(who: str, transform: Any, why: str, instead: str) -> tuple[Transform, ...]:
    """The transforms, each of which must change every score by itself.

    why: what keeps some scores of a row from it. instead: what to do about one that needs them.
    """
    out: list[Transform] = []
    for t in row_transforms(who, transform):
        if not isinstance(t, Transform):
            raise ValueError(
                f"{who}: {why}, and nothing says whether {t!r} changes each score by itself; write it as a subclass of "
                "anymax.transforms.Transform with elementwise = True"
            )
        if not t.by_classes:
            raise ValueError(
                f"{who}: {why}, so a transform must change each score by itself, and all classes alike, as softcap and a temperature "
                f"above 0 do; {t!r} does not: {instead}"
            )
        out.append(t)
    return tuple(out)


INVARIANT_SUPPORT = (
    "invariant=True can't be given with a support: how many classes are summed at a time is that of the widest row; "
    "leave one of the two out"
)
FULL_WITHOUT_SUPPORT = "full=True applies to a support; without one the result is over all classes already"


def check_support(who: str, support: Any, mask: Any, transform: Any, invariant: Any = False) -> None:
    """Refuse what can't be given with a support."""
    if support is None:
        return
    if invariant:
        raise ValueError(f"{who}: {INVARIANT_SUPPORT}")
    if mask is not None:
        raise ValueError(f"{who}: with a support a mask has no meaning; give the classes that it leaves")
    elementwise(
        who, transform, "a support has some scores of a row only", "give the classes that it leaves as the support"
    )


def with_temperature(
    who: str, layer: Layer, temperature: Any, invariant: Any = False
) -> tuple[Layer, tuple[Callable[[Any], Any], ...]]:
    """(the layer with its scores divided by a temperature, the transforms that do what its operands can't).

    The temperature is a number, or has one value for each row, in the shape of x without its last axis. invariant: as in `Job`; then a row
    alone is computed as one of several.
    """
    xp = namespace(layer.x)
    check_range(who, "temperature", temperature, _array.AT_LEAST_0)
    features = upcast(layer.x, xp)
    if not is_array(temperature) or (math.prod(temperature.shape) == 1 and not (invariant and temperature.ndim)):
        scale = _array.number(temperature)
        if is_array(scale):
            scale = as_dtype(xp.reshape(_array.beside(scale, layer.x, "temperature", xp), ()), features.dtype, xp)
            scale = _array.nan_outside(scale, _array.AT_LEAST_0)
            scale = float(scale) if _array.known(scale) and not differentiates(scale) else scale
        if not is_array(scale) and not float(xp.finfo(features.dtype).smallest_normal) <= scale < math.inf:
            return layer, (tempered(scale),)  # argmax, or no difference between the classes
        if _rounds(layer, scale):
            return layer.times(1.0 / scale, xp), ()
        x, bias = as_dtype(features / scale, layer.x.dtype, xp), layer.bias
        if bias is not None:
            masked = bias == -math.inf
            free = xp.where(masked, xp.zeros_like(bias), bias)  # so that the derivative by a temperature is finite
            bias = xp.where(masked, bias, as_dtype(upcast(free, xp) / scale, bias.dtype, xp))
        return layer.with_operands(x, layer.weight, bias), ()
    scale = as_dtype(temperature_of_rows(who, temperature, layer, xp), features.dtype, xp)
    if _array.known_any(scale < float(xp.finfo(scale.dtype).smallest_normal), xp):
        raise ValueError(f"{who}: a temperature of 0 in some rows; give one number for all rows, or values above 0")
    if _rounds(layer, scale):
        return layer.times(1.0 / scale, xp), ()
    return layer.scaled_rows(1.0 / scale, xp), ()


def _rounds(layer: Layer, scale: Any) -> bool:
    """True if features divided by a temperature would be rounded to half precision. In torch one that learns divides them all the same."""
    return layer.x.dtype != layer.dtype and not recorded(scale)


def temperature_of_rows(who: str, temperature: Array, layer: Layer, xp: Namespace) -> Array:
    """A temperature with one value for each row, [rows, 1]."""
    scale = _array.beside(temperature, layer.x, "temperature", xp)
    if math.prod(scale.shape) == 1:
        return xp.broadcast_to(_array.nan_outside(xp.reshape(scale, (1, 1)), _array.AT_LEAST_0), (layer.rows, 1))
    if tuple(scale.shape) not in (layer.lead, (*layer.lead, 1)):
        raise ValueError(
            f"{who}: temperature of shape {tuple(scale.shape)}: expected a number, or one value for each row, of shape {layer.lead}"
        )
    return xp.reshape(_array.nan_outside(scale, _array.AT_LEAST_0), (layer.rows, 1))


def class_of_each_row(
    who: str, target: Array, layer: Layer, ignore_index: int | None, xp: Namespace
) -> tuple[Array, Array]:
    """`class_indices` of the rows, [rows]; without an `ignore_index` -1 and `PADDING` are left out."""
    index = xp.reshape(_array.counts(target, xp), (layer.rows,))
    return class_indices(who, index, layer.seen_classes, ignore_index, xp, hides=layer.hides, pads=ignore_index is None)


def indices_of_rows(who: str, target: Any, layer: Layer, xp: Namespace) -> Array:
    """An integer for each row, in the shape of the rows as given."""
    refuse_sharded(who, None, target=target)
    target = _array.beside(target, layer.x, "target", xp)
    if not is_integer(target):
        raise TypeError(f"{who}: target must be class indices (integers), got {target.dtype}")
    if tuple(target.shape) != layer.lead:
        raise ValueError(
            f"{who}: target of shape {tuple(target.shape)}: expected class indices (integers) of shape {layer.lead}"
        )
    return target
