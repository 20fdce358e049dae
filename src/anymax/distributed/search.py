"""The level of a separable map by Newton's method, where each step needs one sum over the processes, instead of gathered classes."""

from __future__ import annotations

import math
from collections.abc import Callable

from .. import _array
from .._array import Array, Namespace, differentiates, stop_gradient, total
from .._core.separable import Separable
from .shard import Shards, columns_of
from .solution import Solution

MANY = 4096  # candidates per row over all processes, above which thresholds are searched by sums over the processes


def _constant(mapping: Separable) -> Separable:
    """The map as a constant of differentiation, whose single numbers that can be read are Python's: formulas of arrays take longer."""
    mapping = mapping.frozen()
    read = {name: float(value) for name, value in mapping.params().items() if not value.ndim and _array.known(value)}
    return mapping.laid_out(**read) if read else mapping


class Level(Solution):
    """The level of each row, from which p follows: its threshold is `shards.high - level`, for a map with a shift minus this."""

    local: Separable

    def __init__(self, shards: Shards, later: list[Array], tau: Array | None) -> None:
        """tau: a bound from the processes' own thresholds, in terms of the level; the largest of them is below the common one."""
        super().__init__(shards, later)
        assert isinstance(shards.shard.local, Separable)
        xp, self.local = shards.xp, shards.shard.local
        rows = stop_gradient(shards.shard.rows)
        keep = xp.isfinite(rows)
        y = xp.where(keep, rows - shards.high, xp.zeros_like(rows))
        start = None if tau is None else xp.where(tau > -math.inf, shards.high - tau, xp.zeros_like(shards.high))
        self.level = _constant(self.local).search(y, keep, xp, start, self._summed)

    def p(self) -> Array:
        shard, shards, xp, mapping = self.shard, self.shards, self.xp, self.local
        y, keep, _ = _array.finite_scores(shard.rows, xp)
        keep = keep & xp.isfinite(shard.rows)
        if self._moves():
            out = mapping.on_level(y, keep, shards.poisoned, shards.high, self.level, xp, self._summed)
        else:
            out = xp.where(keep, mapping.at(y, shards.high, self.level, xp), xp.zeros_like(y))
            out = out + mapping.remainder(out, self.level, xp, self._summed)
        return xp.where(shards.poisoned, math.nan, out)

    def log_p(self) -> Array:
        return _array.log(self.p(), self.xp)

    def tau(self) -> Array:
        shard, xp, level = self.shard, self.xp, self.level
        common = shard.shared
        assert isinstance(common, Separable)
        tau = self.shards.high - level - common.level_to_tau(level, xp)
        tau = xp.where(self.shards.empty, -math.inf * xp.ones_like(tau), tau)
        if not self._moves():
            return tau
        mean = self.local.moving_mean(shard.rows, self.p(), xp, self._known_sums)
        return tau + (mean - stop_gradient(mean))

    def fenchel_young(self, gap: Array, mass: Array, target: Callable[[], Array]) -> Array:
        shard, shards, xp = self.shard, self.shards, self.xp
        p = self.p()
        x = xp.where(xp.isfinite(shard.rows), shard.rows - shards.high, xp.zeros_like(shard.rows))
        p = xp.where(shards.poisoned, xp.zeros_like(p), p)
        part = self.local.loss(x, p, xp.zeros_like(p), xp)
        return xp.sum(shards.stack(part), axis=0) + gap

    def _moves(self) -> bool:
        """True if a derivative in the scores or the map's parameters is taken, or may be."""
        return differentiates(self.shard.rows) or any(differentiates(v) for v in self.local.params().values())

    def _known_sums(self, parts: list[Array], xp: Namespace) -> list[Array]:
        """Sums over the classes of all processes, several in one collective, for a result that all processes have."""
        both = xp.concat([total(a, xp) for a in parts], axis=-1)
        return columns_of(xp.sum(self.shards.stack(both), axis=0))

    def _summed(self, parts: list[Array], xp: Namespace) -> list[Array]:
        """`_known_sums` for results of the classes of one process, which differ between the processes."""
        return [self.shard.group.vary(a) for a in self._known_sums(parts, xp)]
