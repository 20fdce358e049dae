"""Softmax, and maps that are a softmax of other scores: one collective combines the maximum and the sum of each process."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .._array import Array, Namespace, like, positions, stop_gradient, top, total
from .._core.mapping import Mapping
from ._shard import Shard, divided, place_of


def exponents(mapping: Mapping, rows: Array, xp: Namespace) -> Array | None:
    """The a with p = softmax(a), -inf for a masked class; None if the map is not a softmax."""
    temperature = mapping.as_softmax()
    if temperature is not None:
        return rows if mapping.is_softmax else divided(rows, like(temperature, rows, xp), xp)
    return mapping.exponents(rows, xp)


def size_of(mapping: Mapping, rows: Array, xp: Namespace) -> Any:
    """The factor of the loss: the temperature."""
    temperature = mapping.as_softmax()
    return 1.0 if temperature is None else like(temperature, rows, xp)


@dataclasses.dataclass
class Part:
    """The exponents of this process, and the numbers that it sends about them."""

    a: Array
    keep: Array
    high: Array  # [..., 1], a constant: the maximum, which may be infinite or NaN
    anchor: Array  # `high`, or 0 where that is not finite
    e: Array  # exp(a - anchor)
    rest: Array  # [..., 1]: the sum of e minus 1, computed without the 1 of the largest

    @classmethod
    def of(cls, a: Array, xp: Namespace) -> Part:
        high = stop_gradient(top(a, xp))
        sound = xp.isfinite(high)
        keep = (a != -math.inf) & sound
        anchor = xp.where(sound, high, xp.zeros_like(high))
        e = xp.where(keep, xp.exp(xp.where(keep, a - anchor, xp.zeros_like(a))), xp.zeros_like(a))
        first = xp.argmax(stop_gradient(a), axis=-1, keepdims=True)
        rest = total(xp.where((positions(a, first.dtype, xp) == first) & keep, e - 1.0, e), xp)
        return cls(a, keep, high, anchor, e, rest)


@dataclasses.dataclass
class Whole:
    """What all processes know about a row after the first collective, each [..., 1]."""

    high: Array  # the maximum, 0 where it is not finite; a constant
    log_z: Array  # the logarithm of the sum of exp(a - high)
    z: Array
    poisoned: Array
    empty: Array  # True for a row without classes

    @classmethod
    def of(cls, highs: Array, rests: Array, xp: Namespace) -> Whole:
        """From the maximum and the rest of each process, both [size, ..., 1]."""
        poisoned = xp.any(xp.isnan(highs) | (highs == math.inf), axis=0)
        some = xp.isfinite(highs)
        finite = xp.where(some, highs, -math.inf * xp.ones_like(highs))
        high = stop_gradient(xp.max(finite, axis=0))
        empty = high == -math.inf
        high = xp.where(empty, xp.zeros_like(high), high)
        share = xp.where(
            some, xp.exp(xp.where(some, highs - high[None, ...], xp.zeros_like(highs))), xp.zeros_like(highs)
        )
        first = xp.argmax(finite, axis=0, keepdims=True)
        place = xp.reshape(
            xp.arange(highs.shape[0], dtype=first.dtype, **place_of(highs)), (-1,) + (1,) * (highs.ndim - 1)
        )
        one = xp.where(place == first, xp.zeros_like(share), share)
        rest = xp.sum(xp.where(some, one + share * rests, xp.zeros_like(share)), axis=0)
        z = 1.0 + rest
        return cls(high, xp.log1p(rest), z, poisoned, empty)


def columns(part: Part) -> list[Array]:
    return [part.high, part.rest]


def log_p(shard: Shard, part: Part, whole: Whole) -> Array:
    """log p of this process's classes, -inf where masked."""
    xp = shard.xp
    out = xp.where(part.keep, part.a - whole.high, xp.zeros_like(part.a)) - shard.group.own(whole.log_z)
    out = xp.where(part.keep, out, -math.inf * xp.ones_like(out))
    return xp.where(whole.poisoned, math.nan, out)


def p(shard: Shard, part: Part, whole: Whole) -> Array:
    xp = shard.xp
    some = xp.any(part.keep, axis=-1, keepdims=True)
    share = part.e * xp.exp(xp.where(some, part.anchor - whole.high, xp.zeros_like(part.anchor)))
    return xp.where(whole.poisoned, math.nan, share / shard.group.own(whole.z))
