"""The choice of the method by which a map is computed over the processes, and the call of a verb by it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..functional.ways import Way, way_of
from .call import ShardedCall
from .candidates import ByAll, ByCandidates, ByLevel, ByNucleus
from .each import ByEach
from .ratio import ByWeights
from .softmax import BySums
from .solution import Columns, Method

_NONE = Columns()


_METHODS: dict[Way, type[Method]] = {
    Way.SUMS: BySums, Way.EACH: ByEach, Way.WEIGHTS: ByWeights, Way.NUCLEUS: ByNucleus, Way.CANDIDATES: ByCandidates, Way.LEVEL: ByLevel,
    Way.ALL: ByAll,
}  # fmt: skip


def solve(call: ShardedCall, finish: Callable[[Any, Any], Any], columns: Columns = _NONE) -> Any:
    """`finish(solution, state)` for the rows of a call; `columns` are what the verb adds to the collectives, and give the state."""
    shard = call.shard(2 + columns.count, columns.indices)
    xp = shard.xp
    method = _METHODS[way_of(shard.mapping, shard.rows, xp)](shard)
    high = method.head[0]
    anchor = xp.where(xp.isfinite(high), high, xp.zeros_like(high))
    sent, state = columns.first(shard, method.a, anchor)
    shards = call.first_collective(shard, method.head, sent, method.most)
    state = columns.summed(shards, state)
    return method.solve(shards, functools.partial(columns.second, state), lambda out: finish(out, state))
