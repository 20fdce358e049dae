"""Maps with `p_i = u(x_i) / sum u`: one collective finds the largest weight, another the sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, stop_gradient, total
from .._core.mapping import no_potential, no_threshold
from .shard import Shard, Shards
from .solution import Method, Second, Solution


class ByWeights(Method):
    """`head` has the score with the largest weight."""

    mapping: Any

    def __init__(self, shard: Shard) -> None:
        self.shard, self.a = shard, shard.rows
        xp, rows, self.mapping = shard.xp, shard.rows, shard.mapping
        keep = xp.isfinite(rows)
        y = stop_gradient(xp.where(keep, rows, xp.zeros_like(rows)))
        u = self.mapping.frozen().weights(y, keep, xp)[0]
        u = xp.where(keep, u, -xp.ones_like(u))
        best = xp.take_along_axis(y, xp.argmax(stop_gradient(u), axis=-1, keepdims=True), axis=-1)
        best = xp.where(xp.any(keep, axis=-1, keepdims=True), best, -math.inf * xp.ones_like(best))
        self.head = [shard.high(), best]

    def solve(self, shards: Shards, second: Second, finish: Callable[[Any], Any]) -> Any:
        """`weights` may scale a row freely, so the row gets the best score of each process added, and the weights are relative to those."""
        xp, rows = shards.xp, self.shard.rows
        best = xp.moveaxis(stop_gradient(shards.head[1])[..., 0], 0, -1)  # [..., size]
        both = xp.concat([rows, xp.broadcast_to(best, (*rows.shape[:-1], best.shape[-1]))], axis=-1)
        keep = xp.isfinite(both)
        u = self.mapping.weights(xp.where(keep, both, xp.zeros_like(both)), keep, xp)[0]
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
        raise TypeError(no_threshold(self.shard.mapping))

    def fenchel_young(self, gap: Array, mass: Array, target: Callable[[], Array]) -> Array:
        raise TypeError(no_potential(self.shard.mapping))

    def nll(self, gap: Array, mass: Array, terms: Callable[[Array], Array]) -> Array:
        return self.xp.sum(self.later[0], axis=0) + self.xp.log(self.z) * mass
