"""The call of a verb by the method of its map, and the methods that gather classes: candidates, those of a nucleus, or all.

A class without a probability among the classes of its process has none among all classes, since more classes raise the threshold. The
same is true of a class below the largest threshold of any process. The remaining classes keep their order, so the result does not
depend on the number of processes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, Namespace, like, stop_gradient, sums_at, take, total
from .._core.ways import Way, searchable, way_of
from .._random.truncation import topk_keep, topp_keep
from ..autodiff.group import jax
from ..functional import apply
from ..functional.bounds import bound_of
from .call import ShardedCall
from .gathered import Gathered, gather
from .search import MANY, Level
from .shard import Shard, Shards
from .solution import Columns, Method, Second, Solution
from .sums import ByEach, BySums, ByWeights, Part, log_sum

COUNT = 128  # with more candidates, a collective that counts those above the common bound pays
FEW = 1024  # of so many classes on all processes together the sums of intervals would not pay
INTERVALS = 32
FIXED = 128  # candidates per device in JAX, where shapes can't depend on values


class ByCandidates(Method):
    """A class with p = 0 keeps it when classes are added. `head` has the threshold of this process's classes; in JAX also their number."""

    def __init__(self, shard: Shard) -> None:
        self.a = shard.rows
        tau, self.candidates = find_candidates(shard)
        self.head = [shard.high(), tau]
        if shard.group.strict:
            self.most = int(fullest(self.candidates, shard.xp))
        else:  # one more column, which decides how many are gathered
            self.head.append(total(shard.xp.astype(self.candidates, tau.dtype), shard.xp))

    def solve(self, shards: Shards, second: Second, finish: Callable[[Any], Any]) -> Any:
        shard = shards.shard
        group, n, most_kept = shard.group, shard.rows.shape[-1], shard.parts.most_kept
        chosen = self.candidates & (shard.rows > bound(shards))
        least = max(
            1, -(-shard.local.least_classes // group.size)
        )  # of fewer classes a map is refused, masked ones or not
        if group.strict:
            k = max(least, shards.most)
            k = k if k <= COUNT else max(least, largest(shards, chosen))
            return finish(self._gathered_or_searched(shards, chosen, k, k * group.size > MANY, second))
        k = min(max(FIXED, least) if most_kept is None else most_kept, n)
        if k >= n or most_kept is not None:  # a row never has more
            return finish(self._gathered_or_searched(shards, chosen, k, False, second))
        return jax().lax.cond(
            shards.xp.max(shards.head[2]) <= k,
            lambda: finish(self._gathered_or_searched(shards, chosen, k, False, second)),
            lambda: finish(self._gathered_or_searched(shards, chosen, n, True, second)),
        )

    def _gathered_or_searched(self, shards: Shards, chosen: Array, k: int, many: bool, second: Second) -> Solution:
        """With k classes of each process; if these are `many`, the level is searched instead, if it can be."""
        local: Any = shards.shard.local
        if not many or not searchable(local, shards.shard.rows, shards.xp):
            return gather(shards, chosen, k, second)
        tau = bound(shards)
        shift = local.frozen().level_to_tau(tau, shards.xp)
        return Level(shards, shards.collect(second()), None if _array.is_array(shift) else tau + shift)


class ByLevel(Method):
    """All classes, or a search if these are many. `head` has the threshold of this process's classes, in terms of the level."""

    def __init__(self, shard: Shard) -> None:
        local: Any = shard.local
        xp, self.a, rows = shard.xp, shard.rows, stop_gradient(shard.rows)
        y, keep, _ = _array.finite_scores(rows, xp)
        anchor, level = local.frozen().solve(y, keep, xp)
        known = xp.any(keep, axis=-1, keepdims=True) & xp.isfinite(level)
        self.head = [shard.high(), xp.where(known, anchor - level, -math.inf * xp.ones_like(rows[..., :1]))]

    def solve(self, shards: Shards, second: Second, finish: Callable[[Any], Any]) -> Any:
        if shards.count > MANY:
            return finish(Level(shards, shards.collect(second()), bound(shards)))
        return finish(gather_all(shards, second))


class ByAll(Method):
    """All classes are gathered, for a map of which nothing else is known."""

    def __init__(self, shard: Shard) -> None:
        self.a = shard.rows
        self.head = [shard.high(), -math.inf * shard.xp.ones_like(shard.rows[..., :1])]

    def solve(self, shards: Shards, second: Second, finish: Callable[[Any], Any]) -> Any:
        return finish(gather_all(shards, second))


class ByNucleus(Method):
    """The classes that can be in the nucleus: n such classes would hold at least 1 - p of the mass, and less than p of it lies above."""

    def __init__(self, shard: Shard) -> None:
        self.a = shard.rows
        self.part = Part.of(shard.rows, shard.xp)
        self.head = [self.part.high, self.part.rest]

    def solve(self, shards: Shards, second: Second, finish: Callable[[Any], Any]) -> Any:
        shard, xp, part = shards.shard, shards.xp, self.part
        nucleus = shard.parts.nucleus
        share = stop_gradient(part.e) * xp.exp(part.anchor - shards.high)
        z, level = (
            stop_gradient(log_sum(shards.highs, shards.head[1], shards.high, xp)[1]),
            stop_gradient(like(nucleus, shard.rows, xp)),
        )
        count = shards.count + shard.hides
        chosen = (share * count >= 0.99 * (1.0 - level) * z) & (share > 0)
        chosen = chosen | ((share >= 0) & xp.isfinite(shard.rows) & (level >= 1.0 + 0.0 * z))

        def gathered(chosen: Array, k: int) -> Any:
            out = gather(shards, chosen, k, second)
            return finish(out.softmax_over(topp_keep(out.z, nucleus, xp, mass=z)))

        n = shard.rows.shape[-1]
        if shards.count <= FEW:
            return gathered(chosen, largest(shards, chosen) if shard.group.strict else n)
        inside, most = _down_to(shards, chosen, share, level, z)
        if shard.group.strict:
            return gathered(inside, max(1, int(most)))
        if n <= FIXED:
            return gathered(inside, n)
        return jax().lax.cond(most <= FIXED, lambda: gathered(inside, FIXED), lambda: gathered(chosen, n))


def _down_to(shards: Shards, chosen: Array, share: Array, level: Array, z: Array) -> tuple[Array, Array]:
    """(those of the chosen classes above which there is less than `level` of the mass z, or little more; how many the fullest row has).

    One collective of the mass and the number of classes in each of some intervals of the scores.
    """
    xp = shards.xp
    count = shards.count + shards.shard.hides
    lowest = xp.log(0.99 * (1.0 - level) * z / count)  # of those that are chosen
    below = INTERVALS * (xp.log(xp.where(chosen, share, xp.ones_like(share))) / lowest)
    below = xp.where(chosen & (below > 0), below, xp.zeros_like(below))  # level 1: all are in the first
    interval = _array.counts(xp.where(below < INTERVALS - 1, below, (INTERVALS - 1) * xp.ones_like(below)), xp)
    place = xp.where(chosen, interval, -xp.ones_like(interval))
    mass = sums_at(place, xp.where(chosen, share, xp.zeros_like(share)), INTERVALS, xp)
    number = xp.astype(sums_at(place, None, INTERVALS, xp), mass.dtype)
    stacked = shards.stack(xp.concat([mass, number], axis=-1))
    every = xp.sum(stacked[..., :INTERVALS], axis=0)
    before = _array.running_sum(every, xp) - every
    needed = before < (level + 1e-4) * z
    most = fullest(xp.where(needed, stacked[..., INTERVALS:], xp.zeros_like(stacked[..., INTERVALS:])), xp)
    return chosen & take(needed, interval, xp), most


def gather_all(shards: Shards, second: Second) -> Gathered:
    return gather(shards, shards.xp.ones_like(shards.shard.rows) > 0, max(1, shards.places.most), second, whole=True)


def find_candidates(shard: Shard) -> tuple[Array, Array]:
    """(the bound of this process's classes alone, -inf if it bounds nothing; the classes above it that may have a probability)."""
    mapping, xp, rows, most = shard.local.frozen(), shard.xp, stop_gradient(shard.rows), shard.parts.most_kept
    if most is not None:
        return -math.inf * xp.ones_like(rows[..., :1]), topk_keep(rows, most, xp) & xp.isfinite(rows)
    low = bound_of(mapping, rows, xp)
    # the threshold of a traced alpha below 1 lies above all classes, and bounds none
    low = xp.where(xp.isfinite(low) & (low < shard.high()), low, -math.inf * xp.ones_like(low))
    kept = (rows > low) & (rows < math.inf)
    return low, kept if shard.parts.zero_below_threshold else kept & (apply(mapping, rows) > 0)


def fullest(chosen: Array, xp: Namespace) -> Array:
    """The largest number of True classes in a row, or the largest sum of numbers."""
    number = total(xp.astype(chosen, xp.float32), xp)
    return xp.max(xp.reshape(number, (-1,))) if math.prod(number.shape) else 0 * xp.sum(number)


def largest(shards: Shards, chosen: Array) -> int:
    """The largest number of True classes in a row of any process, at least 1, by a collective."""
    mine = shards.xp.astype(fullest(chosen, shards.xp), shards.shard.rows.dtype)
    return max(1, int(shards.xp.max(shards.stack(shards.xp.reshape(mine, (1,))))))


def bound(shards: Shards) -> Array:
    """The largest of the processes' thresholds, [..., 1]: no class below it has a probability."""
    return stop_gradient(shards.xp.max(shards.head[1], axis=0))


# -- the call of a verb --------------------------------------------------------------------------------------------------------------


_NONE = Columns()


_METHODS: dict[Way, type[Method]] = {
    Way.SUMS: BySums, Way.EACH: ByEach, Way.WEIGHTS: ByWeights, Way.NUCLEUS: ByNucleus, Way.CANDIDATES: ByCandidates, Way.LEVEL: ByLevel,
    Way.ALL: ByAll,
}  # fmt: skip


def solve(call: ShardedCall, finish: Callable[[Any, Any], Any], columns: Columns = _NONE) -> Any:
    """`finish(solution, state)` for the rows of a call; `columns` are what the verb adds to the collectives, and give the state."""
    call = call.placed(2 + columns.count, columns.indices)
    shard = call.shard()
    xp = shard.xp
    method = _METHODS[way_of(shard.local, shard.rows, xp)](shard)
    high = method.head[0]
    anchor = xp.where(xp.isfinite(high), high, xp.zeros_like(high))
    sent, state = columns.first(shard, method.a, anchor)
    shards = call.first_collective(shard, method.head, sent, method.most)
    state = columns.summed(shards, state)
    return method.solve(shards, functools.partial(columns.second, state), lambda out: finish(out, state))
