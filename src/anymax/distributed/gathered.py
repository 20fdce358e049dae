"""The solution of a map whose classes, all or a few of each process, are gathered: every process solves the same problem."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, Namespace, stop_gradient, wider
from .._core.mapping import Mapping, with_missing_mass
from .._core.rows import hide
from .._random.draws import invert
from ..autodiff import bridge
from ..functional import apply, log_apply
from ..functional.draws import one_draw
from ..losses.formulas import loss_of_class
from ..mappings import Softmax
from ..thresholds import Threshold, threshold
from .shard import Shards, columns_of
from .solution import Second, Solution


class Gathered(Solution):
    """The scores of the gathered classes are the same on every process."""

    def __init__(
        self, shards: Shards, later: list[Array], z: Array, places: Array, k: int, whole: bool, local: Mapping, shared: Mapping
    ) -> None:  # fmt: skip
        super().__init__(shards, later)
        self.z = z  # [..., processes * k], common; -inf where a process has fewer classes than k
        self.places = places  # [..., k], where this process's gathered classes lie in its rows
        self.k = k  # 0 if z has all classes in place
        self.whole = whole  # True if z has all classes
        self.local, self.shared = local, shared  # the map of z, as in `Shard`

    def softmax_over(self, keep: Array) -> Gathered:
        """The problem of the softmax over some of the gathered classes instead."""
        z, softmax = self.xp.where(keep, self.z, -math.inf * self.xp.ones_like(self.z)), Softmax()
        return Gathered(self.shards, self.later, z, self.places, self.k, self.whole, softmax, softmax)

    def p(self) -> Array:
        out = self._spread(apply(self.local, self.shard.group.vary(self.z)), 0.0)
        return self.xp.where(self.shards.poisoned, math.nan, out)

    def log_p(self) -> Array:
        out = self._spread(log_apply(self.local, self.shard.group.vary(self.z)), -math.inf)
        return self.xp.where(self.shards.poisoned, math.nan, out)

    @functools.cached_property
    def _threshold(self) -> Threshold[Array]:
        return threshold(self.shared, self.z, keepdims=True)

    def tau(self) -> Array:
        return self._threshold.tau

    def support(self) -> Array:
        return super().support() if self.shard.hides else self._threshold.support

    def sums(self) -> tuple[Any, Any]:
        # where upper bounds decide the sum each class has its own, and is a candidate
        exact = self.whole or self.shared.ceiling(self.z, self.xp) is not None
        return self.shared.sums(self.z > -math.inf, self.xp) if exact else super().sums()

    def fenchel_young(self, gap: Array, mass: Array, target: Callable[[], Array]) -> Array:
        mapping, z, high, xp = self.shared, self.z, self.shards.high, self.xp
        if mapping.parts.loss_of_whole_target:
            z = hide(z, z != -math.inf)  # no gradient at a masked class, whatever its target
            value = bridge(z).loss(mapping, z, self._of_all(target()))
            return value + stop_gradient(xp.where(gap == math.inf, gap, xp.zeros_like(gap)))  # the target is masked
        if not mapping.facts.shift_invariant:
            return bridge(z).loss(mapping, z, xp.zeros_like(z)) + gap - high * mass
        # a class index sums to 1 and is up to 1, and p is not: Omega*(x - M) itself
        if not mapping.sums_to_one or mapping.ceiling(z, xp) is not None:
            shifted = z - high
            value = bridge(shifted).loss(mapping, shifted, xp.zeros_like(shifted)) + gap
            # `M total - M <y, 1>` is 0, but its derivative in a learned total is not
            return value + high * (_array.like(self.sums()[1], z, xp) - mass) if mapping.params() else value
        first = xp.argmax(stop_gradient(z), axis=-1)
        top = xp.take_along_axis(z, first[..., None], axis=-1)
        dead = ~xp.isfinite(stop_gradient(top))
        z = xp.where(dead, xp.zeros_like(z), z)  # a row without classes, or with NaN, gets its value at the end
        top = xp.where(dead, xp.zeros_like(top), top)
        value = loss_of_class("fenchel_young", mapping, z, first)[..., None]
        value = xp.where(dead, xp.zeros_like(value), value)
        return value + (top - stop_gradient(top)) + gap

    def draw(self, u: Array) -> Array:
        xp, n = self.xp, self.z.shape[-1]
        p = apply(self.shared, self.z)
        # what p leaves of 1 is the probability of none of the classes
        index = invert(with_missing_mass(p, 1.0, xp) if one_draw(self.shared) == "rest" else p, u, xp)
        index = xp.where(index < n, index, -xp.ones_like(index))
        ids = _array.counts(self._ids(), xp)
        classes = xp.take_along_axis(ids, xp.where(index < 0, xp.zeros_like(index), index), axis=-1)
        return xp.where(index < 0, -xp.ones_like(classes), classes)

    def _spread(self, value: Array, fill: float) -> Array:
        """Results for the gathered classes as rows of this process; `fill` for all other classes."""
        shard, group = self.shard, self.shard.group
        xp = shard.xp
        if not self.k:
            places, width = self.shards.places, shard.rows.shape[-1]
            mine = value[..., places.start : places.start + places.width(shard.group.rank)]
            if mine.shape[-1] == width:
                return mine
            return xp.concat([mine, fill * xp.ones_like(value[..., :1])], axis=-1)  # an entry that stands for no class
        blocks = xp.reshape(value, (*value.shape[:-1], group.size, self.k))
        mine = self.shards.mine(xp.moveaxis(blocks, -2, 0))
        n = shard.rows.shape[-1]
        if self.k > n:
            mine = mine[..., :n]
        out = fill * xp.ones_like(shard.rows) if fill else xp.zeros_like(shard.rows)
        return group.put(stop_gradient(out), self.places[..., :n], mine)

    def _of_all(self, mine: Array) -> Array:
        """Entries of all classes, in the order of z, from those in the layout of this process's rows."""
        stacked = self.shards.stack(wider(mine, max(1, self.shards.places.most), 0.0, self.xp))
        return _side_by_side(stacked, self.xp) if self.k else self.shards.joined(stacked)

    def _ids(self) -> Array:
        """The class indices of the gathered classes."""
        xp = self.shard.xp
        if not self.k:
            every = _array.positions(self.z, xp.int64, xp)
            return xp.broadcast_to(every, self.z.shape)
        mine = _array.counts(self.places, xp) + self.shards.places.start
        return _side_by_side(self.shards.stack(mine), xp)


def gather(shards: Shards, chosen: Array, k: int, second: Second, whole: bool = False) -> Gathered:
    """The second collective: k classes of this process, those of `chosen` among them, with the verb's columns, `second()`.

    whole: `chosen` and k stand for all classes of every process.
    """
    xp, shard = shards.xp, shards.shard
    places, values = _places_of(shards, chosen, k)
    names = shard.of_classes
    params = shard.local.params() if names else {}
    of_classes = [xp.take_along_axis(xp.broadcast_to(params[name], chosen.shape), places, axis=-1) for name in names]
    stacked = shards.stack(xp.concat([values, *of_classes, *second()], axis=-1))
    blocks, later = (
        [stacked[..., i * k : (i + 1) * k] for i in range(1 + len(names))],
        stacked[..., (1 + len(names)) * k :],
    )
    bare = whole and shard.group.strict  # no padding, since a map may ask how many classes there are
    z, *of_classes = (shards.joined(a) if bare else _side_by_side(a, xp) for a in blocks)
    shared = shard.shared.laid_out(**dict(zip(names, of_classes, strict=True)))
    local = shard.local.laid_out(**{name: shard.group.vary_parameter(a) for name, a in zip(names, of_classes)})
    return Gathered(shards, columns_of(later), z, places, 0 if bare else k, whole, local, shared)


def _places_of(shards: Shards, chosen: Array, k: int) -> tuple[Array, Array]:
    """(places [..., k] in rising order, the scores there, -inf for places that are not among `chosen`)."""
    shard = shards.shard
    xp, rows, n = shard.xp, shard.rows, shard.rows.shape[-1]
    masked = -math.inf * xp.ones_like(rows[..., :1])
    if k >= n:
        places = xp.broadcast_to(_array.positions(rows, None, xp), rows.shape)
        values = xp.where(chosen, rows, masked)
        if k > n:
            values = xp.concat([values, xp.broadcast_to(masked, (*rows.shape[:-1], k - n))], axis=-1)
            places = wider(places, k, 0, xp)
        return places, values
    key = xp.where(chosen, stop_gradient(rows), masked)
    places = xp.sort(shard.group.largest(key, k), axis=-1)
    there = xp.take_along_axis(chosen, places, axis=-1)
    return places, xp.where(there, xp.take_along_axis(rows, places, axis=-1), masked)


def _side_by_side(stacked: Array, xp: Namespace) -> Array:
    """[size, ..., k] as [..., size * k]."""
    blocks = xp.moveaxis(stacked, 0, -2)
    return xp.reshape(blocks, (*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1]))
