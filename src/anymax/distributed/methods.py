"""The choice of the method by which a map is computed over the processes, and the call of a verb by it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .call import ShardedCall
from .candidates import ByAll, ByCandidates, ByLevel, ByNucleus
from .each import ByEach
from .ratio import ByWeights
from .search import searchable
from .shard import Shard
from .softmax import BySums, exponents
from .solution import Columns, Method

_NONE = Columns()


def choose(shard: Shard) -> Method:
    """The first method that applies, from the one that communicates least."""
    mapping = shard.mapping
    a = exponents(mapping, shard.rows, shard.xp)
    if a is not None:
        return BySums(shard, a)
    parts = shard.parts
    if parts.each_alone:
        return ByEach(shard)
    if parts.by_weights:
        return ByWeights(shard)
    if parts.nucleus is not None:
        return ByNucleus(shard)
    if parts.zeros_stay:
        return ByCandidates(shard)
    separable = searchable(shard)
    return ByAll(shard) if separable is None else ByLevel(shard, separable)


def solve(call: ShardedCall, finish: Callable[[Any, Any], Any], columns: Columns = _NONE) -> Any:
    """`finish(solution, state)` for the rows of a call; `columns` are what the verb adds to the collectives, and give the state."""
    shard = call.shard(2 + columns.count, columns.indices)
    method, xp = choose(shard), shard.xp
    high = method.head[0]
    anchor = xp.where(xp.isfinite(high), high, xp.zeros_like(high))
    sent, state = columns.first(shard, method.a, anchor)
    shards = call.first_collective(shard, method.head, sent, method.most)
    state = columns.summed(shards, state)
    return method.solve(shards, functools.partial(columns.second, state), lambda out: finish(out, state))
