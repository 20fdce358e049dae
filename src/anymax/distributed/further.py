"""The further losses of output layers over classes on several processes: logsumexp squared, and the second loss of Sparsemax+."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from .._array import Array, Namespace, stop_gradient, total
from .._core.rows import hide
from .shard import highest
from .softmax import Part, log_sum
from .solution import Solution


class FurtherLosses(NamedTuple):
    """The factors of what `linear_loss` adds to the loss of each row; false if there is none."""

    z_loss: float = 0.0
    suppress: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.z_loss or self.suppress)

    def of(self, out: Solution, here: Callable[[], Array]) -> Array:
        """Their sum, [..., 1]; 0 in a row without classes. here: gives True at the target, on its process."""
        value = out.xp.zeros_like(out.shards.high)
        if self.z_loss:
            level = out.xp.where(out.shards.empty, out.xp.zeros_like(value), out.tau())
            value = value + self.z_loss * level * level
        return value + self.suppress * _suppression(out, here()) if self.suppress else value


def _suppression(out: Solution, here: Array) -> Array:
    """As `losses.suppression` has it, by one collective: `(1 - s_t) * -log(1 - s_0)`."""
    shards, shard, xp = out.shards, out.shard, out.xp
    a = shard.rows
    parts = (
        Part.of(a, xp),
        Part.of(hide(a, (stop_gradient(out.p()) != 0) | here), xp),
    )  # of all classes, and of those that count
    own = total(xp.where(here, stop_gradient(a), xp.zeros_like(a)), xp)
    own, *sums = shards.collect([own, *(column for part in parts for column in (part.high, part.rest))])
    whole, kept = (_logsumexp(high, rest, xp) for high, rest in (sums[:2], sums[2:]))
    share = xp.exp(stop_gradient(xp.sum(own, axis=0) - whole))
    value = (1.0 - share) * (whole - kept)
    return xp.where(shards.empty, xp.zeros_like(value), value)


def _logsumexp(highs: Array, rests: Array, xp: Namespace) -> Array:
    high, empty = highest(highs, xp)
    return xp.where(empty, -math.inf * xp.ones_like(high), high + log_sum(highs, rests, high, xp)[0])
