"""Softmax, and maps that are a softmax of other scores: one collective combines the maximum and the sum of each process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from .._array import Array, Namespace, device_of, exp_and_rest, like, stop_gradient, top
from .._core.mapping import Mapping
from ..likelihood.softmax_plain import Terms
from .shard import Shard, Shards, divided, highest
from .solution import Method, Second, Solution


def exponents(shard: Shard) -> Array:
    """The a with p = softmax(a), -inf for a masked class."""
    rows, xp, parts = shard.rows, shard.xp, shard.parts
    if shard.mapping.is_softmax:
        return rows
    if parts.temperature is not None:
        return divided(rows, like(parts.temperature, rows, xp), xp)
    assert parts.exponents is not None
    return parts.exponents(rows, xp)


def size_of(mapping: Mapping, rows: Array, xp: Namespace) -> Any:
    """The factor of the loss: the temperature."""
    temperature = mapping.parts.temperature
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
        return cls(a, keep, high, anchor, *exp_and_rest(a, a - anchor, keep, xp))


class BySums(Method):
    """The maximum and the sum of each process are combined."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.a = shard, exponents(shard)
        self.part = Part.of(self.a, shard.xp)
        self.head = [self.part.high, self.part.rest]

    def solve(self, shards: Shards, second: Second, finish: Callable[[Any], Any]) -> Any:
        return finish(Sums(shards, shards.collect(second()), self.part))


class Sums(Solution):
    """p is the softmax of exponents; the sum of `exp(a - maximum)` is known."""

    def __init__(self, shards: Shards, later: list[Array], part: Part) -> None:
        super().__init__(shards, later)
        self.part = part
        self.log_z, self.z = log_sum(shards.highs, shards.head[1], shards.high, shards.xp)

    def p(self) -> Array:
        part, shards, xp = self.part, self.shards, self.xp
        here = xp.any(part.keep, axis=-1, keepdims=True)
        share = part.e * xp.exp(xp.where(here, part.anchor - shards.high, xp.zeros_like(part.anchor)))
        return xp.where(shards.poisoned, math.nan, share / shards.shard.group.vary(self.z))

    def log_p(self) -> Array:
        part, shards, xp = self.part, self.shards, self.xp
        out = xp.where(part.keep, part.a - shards.high, xp.zeros_like(part.a)) - shards.shard.group.vary(self.log_z)
        out = xp.where(part.keep, out, -math.inf * xp.ones_like(out))
        return xp.where(shards.poisoned, math.nan, out)

    def tau(self) -> Array:
        shards, xp = self.shards, self.xp
        return xp.where(shards.empty, -math.inf * xp.ones_like(self.z), shards.high + self.log_z)

    def fenchel_young(self, gap: Array, mass: Array, target: Callable[[], Array]) -> Array:
        shard = self.shard
        return (self.log_z * mass + gap) * size_of(shard.common, shard.rows[..., :1], shard.xp)

    def nll(self, gap: Array, mass: Array, terms: Callable[[Array], Array]) -> Array:
        return self.log_z * mass + gap

    def log_prob(self, here: Array, at: Array, *, entropy: bool = False, rest: bool = False) -> Terms:
        shards, xp, m = self.shards, self.xp, at.shape[-1]
        below = shards.high[None, ...] - shards.anchors
        gaps, theirs = (xp.concat(shards.extra[i : i + m], axis=-1) for i in (0, m))
        log_p = -(self.log_z + xp.sum(gaps + theirs * below, axis=0))
        log_rest = self._log_rest(*shards.extra[2 * m + entropy :]) if rest else None
        if not entropy:
            return Terms(log_p, None, log_rest)
        rests, finite = shards.head[1], shards.finite
        share = xp.where(finite, xp.exp(xp.where(finite, -below, xp.zeros_like(below))), xp.zeros_like(below))
        spread = xp.sum(share * (shards.extra[2 * m] + (1.0 + rests) * below), axis=0)
        h = self.log_z + spread / self.z
        return Terms(log_p, xp.where(shards.empty, xp.zeros_like(h), h), log_rest)

    def _log_rest(self, highs: Array, rests: Array) -> Array:
        """log p of all other classes together, from their maximum and their sum on each process, so that no digits cancel."""
        return logsumexp(highs, rests, self.shards.high, self.xp) - self.log_z

    def masses(self, p: Array, dtype: Any) -> Array:
        shards, xp = self.shards, self.xp
        share = xp.exp(stop_gradient(xp.where(shards.finite, shards.highs, -math.inf) - shards.high))
        return xp.astype(share * (1.0 + shards.head[1]), dtype)


def logsumexp(highs: Array, rests: Array, anchor: Array, xp: Namespace) -> Array:
    """logsumexp of all processes less an anchor, [..., 1], from the maximum and the rest of each; -inf without classes."""
    high, none = highest(highs, xp)
    value = (high - anchor) + log_sum(highs, rests, high, xp)[0]
    return xp.where(none, -math.inf * xp.ones_like(value), value)


def log_sum(highs: Array, rests: Array, high: Array, xp: Namespace) -> tuple[Array, Array]:
    """(log z, z), the sum of `exp(a - high)` over all processes, from the maximum and the rest of each, [size, ..., 1]."""
    finite = xp.isfinite(highs)
    share = xp.where(
        finite, xp.exp(xp.where(finite, highs - high[None, ...], xp.zeros_like(highs))), xp.zeros_like(highs)
    )
    first = xp.argmax(xp.where(finite, highs, -math.inf * xp.ones_like(highs)), axis=0, keepdims=True)
    place = xp.reshape(
        xp.arange(highs.shape[0], dtype=first.dtype, **device_of(highs)), (-1,) + (1,) * (highs.ndim - 1)
    )
    one = xp.where(place == first, xp.zeros_like(share), share)
    rest = xp.sum(xp.where(finite, one + share * rests, xp.zeros_like(share)), axis=0)
    return xp.log1p(rest), 1.0 + rest
