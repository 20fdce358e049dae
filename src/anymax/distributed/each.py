"""Maps that compute each class by itself: no process needs the scores of another, and a loss is the sum of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .._array import Array
from ..autodiff import bridge
from ..functional import apply, log_apply
from .shard import Shard, Shards
from .solution import Method, Second, Solution


class ByEach(Method):
    """`head` has the maximum alone, which says whether a row has classes and whether it is sound."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.a = shard, shard.rows
        self.head = [shard.high(), shard.xp.zeros_like(shard.rows[..., :1])]

    def solve(self, shards: Shards, second: Second, finish: Callable[[Any], Any]) -> Any:
        return finish(Each(shards, shards.collect(second())))


class Each(Solution):
    """p of this process's classes follows from their scores."""

    def p(self) -> Array:
        return self.xp.where(self.shards.poisoned, math.nan, apply(self.shard.mapping, self.shard.rows))

    def log_p(self) -> Array:
        return self.xp.where(self.shards.poisoned, math.nan, log_apply(self.shard.mapping, self.shard.rows))

    def tau(self) -> Array:
        xp = self.xp
        tau = self.shard.common.threshold(xp.zeros_like(self.shards.high), xp)
        return xp.where(self.shards.empty, -math.inf * xp.ones_like(tau), tau)

    def fenchel_young(self, gap: Array, mass: Array, target: Callable[[], Array]) -> Array:
        """The sum of the processes' losses, in each of which Omega is 0 for one class, and so less than 0 for none."""
        xp, shard = self.xp, self.shard
        part = bridge(shard.rows).loss(shard.mapping, shard.rows, target())
        of_none = shard.common.omega(xp.zeros_like(self.shards.high), xp)
        value = xp.sum(self.shards.stack(part), axis=0) + (shard.group.size - 1) * of_none
        return value + xp.where(gap == math.inf, gap, xp.zeros_like(gap))  # the target is masked
