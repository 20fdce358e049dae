"""Methods that gather no class.

- a softmax, also of other scores: one collective combines the maximum and the sum of each process;
- `p_i = u(x_i) / sum u`: one collective finds the largest weight, another the sum;
- maps that compute each class by itself: no process needs the scores of another, and a loss is the sum of its parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, Namespace, device_of, exp_and_rest, like, stop_gradient, top, total
from .._core.mapping import Mapping, no_potential, no_threshold
from .._core.rows import hide
from ..autodiff import bridge
from ..functional import apply, log_apply
from ..likelihood.softmax_plain import Terms
from .shard import Shard, Shards, divided, highest
from .solution import Method, Second, Solution


def exponents(shard: Shard) -> Array:
    """The a with p = softmax(a), -inf for a masked class."""
    rows, xp, parts = shard.rows, shard.xp, shard.parts
    if shard.local.is_softmax:
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
        self.a = exponents(shard)
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
        return (self.log_z * mass + gap) * size_of(shard.shared, shard.rows[..., :1], shard.xp)

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


# -- a ratio -------------------------------------------------------------------------------------------------------------------------


class ByWeights(Method):
    """`head` has the score with the largest weight."""

    def __init__(self, shard: Shard) -> None:
        local: Any = shard.local
        xp, rows = shard.xp, shard.rows
        self.a = rows
        keep = xp.isfinite(rows)
        y = stop_gradient(xp.where(keep, rows, xp.zeros_like(rows)))
        u = local.frozen().weights(y, keep, xp)[0]
        u = xp.where(keep, u, -xp.ones_like(u))
        best = xp.take_along_axis(y, xp.argmax(stop_gradient(u), axis=-1, keepdims=True), axis=-1)
        best = xp.where(xp.any(keep, axis=-1, keepdims=True), best, -math.inf * xp.ones_like(best))
        self.head = [shard.high(), best]

    def solve(self, shards: Shards, second: Second, finish: Callable[[Any], Any]) -> Any:
        """`weights` may scale a row freely, so the row gets the best score of each process added, and the weights are relative to those."""
        local: Any = shards.shard.local
        xp, rows = shards.xp, shards.shard.rows
        best = xp.moveaxis(stop_gradient(shards.head[1])[..., 0], 0, -1)  # [..., size]
        both = xp.concat([rows, xp.broadcast_to(best, (*rows.shape[:-1], best.shape[-1]))], axis=-1)
        keep = xp.isfinite(both)
        u = local.weights(xp.where(keep, both, xp.zeros_like(both)), keep, xp)[0]
        u = xp.where(keep, u, xp.zeros_like(u))
        n = rows.shape[-1]
        largest = stop_gradient(xp.max(u[..., n:], axis=-1, keepdims=True))
        v = u[..., :n] / xp.where(largest > 0, largest, xp.ones_like(largest))
        z, *later = shards.collect([total(v, xp), *second(v)])
        z = xp.sum(z, axis=0)
        return finish(Weights(shards, later, v, xp.where(z == 0, xp.ones_like(z), z)))


class Weights(Solution):
    """p is v / z; the columns of the second collective are the `terms` of v, if the loss is `nll`."""

    def __init__(self, shards: Shards, later: list[Array], v: Array, z: Array) -> None:
        super().__init__(shards, later)
        self.v, self.z = v, z

    def p(self) -> Array:
        return self.xp.where(self.shards.poisoned, math.nan, self.v / self.shard.group.vary(self.z))

    def log_p(self) -> Array:
        xp = self.xp
        out = _array.log(self.v, xp) - xp.log(self.shard.group.vary(self.z))
        return xp.where(self.shards.poisoned, math.nan, out)

    def tau(self) -> Array:
        raise TypeError(no_threshold(self.shard.local))

    def fenchel_young(self, gap: Array, mass: Array, target: Callable[[], Array]) -> Array:
        raise TypeError(no_potential(self.shard.local))

    def nll(self, gap: Array, mass: Array, terms: Callable[[Array], Array]) -> Array:
        return self.xp.sum(self.later[0], axis=0) + self.xp.log(self.z) * mass


# -- each class by itself ------------------------------------------------------------------------------------------------------------


class ByEach(Method):
    """`head` has the maximum alone, which says whether a row has classes and whether it is sound."""

    def __init__(self, shard: Shard) -> None:
        self.a = shard.rows
        self.head = [shard.high(), shard.xp.zeros_like(shard.rows[..., :1])]

    def solve(self, shards: Shards, second: Second, finish: Callable[[Any], Any]) -> Any:
        return finish(Each(shards, shards.collect(second())))


class Each(Solution):
    """p of this process's classes follows from their scores."""

    def p(self) -> Array:
        return self.xp.where(self.shards.poisoned, math.nan, apply(self.shard.local, self.shard.rows))

    def log_p(self) -> Array:
        return self.xp.where(self.shards.poisoned, math.nan, log_apply(self.shard.local, self.shard.rows))

    def tau(self) -> Array:
        xp = self.xp
        tau = self.shard.shared.threshold(xp.zeros_like(self.shards.high), xp)
        return xp.where(self.shards.empty, -math.inf * xp.ones_like(tau), tau)

    def fenchel_young(self, gap: Array, mass: Array, target: Callable[[], Array]) -> Array:
        """The sum of the processes' losses, in each of which Omega is 0 for one class, and so less than 0 for none."""
        xp, shard = self.xp, self.shard
        x = hide(shard.rows, shard.rows != -math.inf)  # no gradient at a masked class, whatever its target
        part = bridge(x).loss(shard.local, x, target())
        of_none = shard.shared.omega(xp.zeros_like(self.shards.high), xp)
        value = xp.sum(self.shards.stack(part), axis=0) + (shard.group.size - 1) * of_none
        return value + stop_gradient(xp.where(gap == math.inf, gap, xp.zeros_like(gap)))  # the target is masked
