"""Sparse maps: the few classes that can have a probability above 0 are gathered, and every process solves the same small problem.

A class without a probability among the classes of its process has none among all classes, since more classes raise the threshold. The
same is true of a class below the largest threshold of any process. The remaining classes keep their order, so the result does not
depend on the number of processes.
"""

from __future__ import annotations

import dataclasses
import math

from .. import _array
from .._array import Array, Namespace, stop_gradient, total
from .._random.truncation import topk_keep
from ..autodiff import bridge
from ..functional import apply
from ._shard import Met, Shard, place_of

ASK = 128  # with more candidates, a collective that counts those above the common bound pays
FIXED = 128  # candidates per device in JAX, where shapes can't depend on values


def candidates(shard: Shard) -> tuple[Array, Array]:
    """(the threshold of this process's classes alone, -inf if it bounds nothing; the classes above it)."""
    mapping, xp, rows = shard.mapping.frozen(), shard.xp, stop_gradient(shard.rows)
    nothing = -math.inf * xp.ones_like(rows[..., :1])
    if mapping.zero_below_threshold:
        k = mapping.full_up_to
        if not _array.is_array(k) and k >= rows.shape[-1]:
            return nothing, xp.isfinite(rows)
        tau = bridge(rows).threshold(mapping, rows)
        some = total(xp.astype(xp.isfinite(rows), rows.dtype), xp) > k  # else each gets 1, and tau is arbitrary
        tau = xp.where(xp.isfinite(tau) & some, tau, nothing)
        return tau, above(rows, tau, xp)
    if mapping.most_kept is not None:
        return nothing, topk_keep(rows, mapping.most_kept, xp) & xp.isfinite(rows)
    return nothing, apply(mapping, rows) > 0


def above(rows: Array, tau: Array, xp: Namespace) -> Array:
    """Scores above the threshold, or below it by no more than rounding."""
    size = 1.0 + xp.where(tau == -math.inf, xp.zeros_like(tau), xp.abs(tau))
    return (rows > tau - 32.0 * float(xp.finfo(rows.dtype).eps) * size) & (rows < math.inf)


def fullest(some: Array, xp: Namespace) -> Array:
    """The largest number of True classes in a row."""
    number = total(xp.astype(some, xp.float32), xp)
    return xp.max(xp.reshape(number, (-1,))) if math.prod(number.shape) else 0 * xp.sum(number)


@dataclasses.dataclass
class Small:
    """The small problem."""

    met: Met
    z: Array  # [..., processes * k], common; -inf where a process has fewer candidates
    places: Array  # [..., k], where this process's candidates lie in its rows
    k: int  # 0 if z has all classes in place

    def spread(self, value: Array, fill: float) -> Array:
        """Results for the candidates as rows of this process; `fill` for all other classes."""
        shard, group = self.met.shard, self.met.shard.group
        xp = shard.xp
        if not self.k:
            mine = value[..., self.met.start : self.met.start + shard.n]
            return mine if shard.n else xp.sum(value, axis=-1, keepdims=True) * 0.0  # an entry that stands for no class
        blocks = xp.reshape(value, (*value.shape[:-1], group.size, self.k))
        mine = self.met.mine(xp.moveaxis(blocks, -2, 0))
        n = shard.rows.shape[-1]
        if self.k > n:
            mine = mine[..., :n]
        out = fill * xp.ones_like(shard.rows) if fill else xp.zeros_like(shard.rows)
        return put(stop_gradient(out), self.places[..., :n], mine, xp)

    def ids(self) -> Array:
        """The class indices of the candidates."""
        xp = self.met.shard.xp
        if not self.k:
            every = _array.positions(self.z, xp.int64, xp)
            return xp.broadcast_to(every, self.z.shape)
        mine = _array.counts(self.places, xp) + self.met.start
        return side_by_side(self.met.stack(mine), xp)


def put(out: Array, places: Array, values: Array, xp: Namespace) -> Array:
    """`out` with the values at their places along the last axis."""
    if _array.is_torch(out):
        return out.scatter(-1, places, values)
    return xp.put_along_axis(out, places, values, axis=-1, inplace=False)


def side_by_side(stacked: Array, xp: Namespace) -> Array:
    """[size, ..., k] as [..., size * k]."""
    blocks = xp.moveaxis(stacked, 0, -2)
    return xp.reshape(blocks, (*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1]))


def chosen(met: Met, some: Array, k: int) -> tuple[Array, Array]:
    """(places [..., k] in rising order, the scores there, -inf for places that are not among `some`)."""
    shard = met.shard
    xp, rows, n = shard.xp, shard.rows, shard.rows.shape[-1]
    masked = -math.inf * xp.ones_like(rows[..., :1])
    if k >= n:
        places = xp.broadcast_to(_array.positions(rows, xp.int64 if _array.is_torch(rows) else None, xp), rows.shape)
        values = xp.where(some, rows, masked)
        if k > n:
            values = xp.concat([values, xp.broadcast_to(masked, (*rows.shape[:-1], k - n))], axis=-1)
            places = xp.concat(
                [places, xp.zeros((*rows.shape[:-1], k - n), dtype=places.dtype, **place_of(rows))], axis=-1
            )
        return places, values
    key = xp.where(some, stop_gradient(rows), masked)
    places = key.topk(k, dim=-1).indices if _array.is_torch(rows) else _array_top(key, k)
    places = xp.sort(places, axis=-1)
    there = xp.take_along_axis(some, places, axis=-1)
    return places, xp.where(there, xp.take_along_axis(rows, places, axis=-1), masked)


def _array_top(key: Array, k: int) -> Array:
    from ._group import jax

    return jax().lax.top_k(key, k)[1]


def bound(met: Met, column: int, xp: Namespace) -> Array:
    """The largest of the processes' thresholds, [..., 1]: no class below it has a probability."""
    return stop_gradient(xp.max(met.columns[column], axis=0))


def narrowed(met: Met, some: Array) -> tuple[Array, int]:
    """The candidates above the common bound, and a number, equal on all processes, that is enough for them."""
    shard, most = met.shard, max(1, met.most)
    if most > ASK:
        xp = shard.xp
        mine = fullest(some, xp)
        told = met.stack(xp.reshape(xp.astype(mine, shard.rows.dtype), (1,)))
        most = max(1, int(xp.max(told)))
    return some, most


def gathered(met: Met, some: Array, k: int, more: list[Array], whole: bool = False) -> tuple[Small, list[Array]]:
    """The second collective: the candidates or all classes, with more columns [..., 1]."""
    xp = met.shard.xp
    places, values = chosen(met, some, k)
    stacked = met.stack(xp.concat([values, *more], axis=-1))
    rest = [stacked[..., k + i : k + i + 1] for i in range(len(more))]
    if whole and met.order is not None:  # no padding, since a map may ask how many classes there are
        parts = [stacked[i][..., : met.sizes[rank]] for i, rank in enumerate(met.order)]
        return Small(met, xp.concat(parts, axis=-1), places, 0), rest
    return Small(met, side_by_side(stacked[..., :k], xp), places, k), rest
