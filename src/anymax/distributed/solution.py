"""The contract of a method by which a map is computed over the processes, and of its result, from which the verbs take theirs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, stop_gradient, total, xlogx
from .._core.mapping import Mapping, missing_mass
from .._random.draws import invert
from ..functional.draws import one_draw, sum_of
from ..likelihood.softmax_plain import Terms, at_classes
from .shard import Shard, Shards, columns_of


class Columns:
    """The numbers per row that a verb adds to the collectives, as columns [..., 1] or several side by side; the class itself adds none.

    What a verb must remember from one step to the next is its state, which a step returns and the next one takes.
    """

    count: int = 0  # in the first collective
    indices: bool = False  # True if the caller gives classes by their index over all processes

    def first(self, shard: Shard, a: Array, anchor: Array) -> tuple[list[Array], Any]:
        """(the columns of the first collective, the state for `summed`).

        a: the exponents if p is a softmax of them, else the scores. anchor: its maximum on this process, 0 where that is not finite.
        """
        return [], None

    def summed(self, shards: Shards, state: Any) -> Any:
        """The state for `second` and for the verb's result; the first columns of all processes are in `shards.extra`."""
        return state

    def second(self, state: Any, v: Array | None = None) -> list[Array]:
        """The columns of the second collective. v: for a ratio map, whose p is v / sum v over all processes; else None."""
        return []


Second = Callable[..., list[Array]]
"""`Columns.second` for one state."""


class Method(ABC):
    """A method for one call, before the first collective."""

    a: Array  # the exponents if p is a softmax of them, else the scores
    head: list[Array]  # the columns that the method itself sends first: the maximum of `a`, then what each method says
    most: int = 0  # how many candidates the fullest row has, if the method counts them

    @abstractmethod
    def __init__(self, shard: Shard) -> None: ...

    @abstractmethod
    def solve(self, shards: Shards, second: Second, finish: Callable[[Any], Any]) -> Any:
        """`finish(solution)`, after the further collectives."""


class Solution(ABC):
    """What all processes know about each row after the collectives, with the classes of this one."""

    def __init__(self, shards: Shards, later: list[Array]) -> None:
        self.shards, self.shard, self.xp = shards, shards.shard, shards.xp
        self.shared: Mapping = shards.shard.shared
        self.later = later  # the columns of the second collective, each [size, ..., 1] in the order of the classes

    @abstractmethod
    def p(self) -> Array:
        """The probabilities of this process's classes."""

    @abstractmethod
    def log_p(self) -> Array:
        """Their logarithms, -inf where p is 0."""

    @abstractmethod
    def tau(self) -> Array:
        """The threshold, [..., 1]."""

    @abstractmethod
    def fenchel_young(self, gap: Array, mass: Array, target: Callable[[], Array]) -> Array:
        """`Omega*(x) - <x, y>`, [..., 1]. gap is <y, M - a>, with M the maximum of the exponents a (or scores) of a row; mass is <y, 1>.

        `target()` is y of this process's classes, in the layout of its rows.
        """

    def sums(self) -> tuple[Any, Any]:
        """(lowest, highest) of the sums of p, as far as this process knows the rows."""
        return self.shared.sums(None, self.xp)

    def support(self) -> Array:
        """How many classes have a probability above 0, [..., 1]."""
        here = total(_array.counts(self.p()[..., : self.shard.n] > 0, self.xp), self.xp)
        return self.xp.sum(self.shards.stack(here), axis=0)

    def nll(self, gap: Array, mass: Array, terms: Callable[[Array], Array]) -> Array:
        """`-<y, log p>`, [..., 1]; gap and mass as in `fenchel_young`. `terms(log_p)` is the part of this process."""
        xp, log_p = self.xp, self.log_p()
        if one_draw(self.shard.local) != "share":
            return xp.sum(self.shards.stack(terms(log_p)), axis=0)
        p = xp.exp(xp.where(self.shards.poisoned, xp.zeros_like(log_p), log_p))
        both = xp.concat([terms(log_p), total(p, xp)], axis=-1)
        value, whole = columns_of(xp.sum(self.shards.stack(both), axis=0))
        return value + mass * xp.log(sum_of(whole, xp))

    def log_prob(self, here: Array, at: Array, *, entropy: bool = False, rest: bool = False) -> Terms:
        """log p of classes [..., m] and the other terms of each row. here: True where a class is on this process; at: its place.

        A class with p = 0 has -inf, with the gradient e_y - p. `shards.extra` has the columns of `GivenClasses`, which are enough for
        softmax; for all other maps log p of each process's classes is used, by one more collective.
        """
        shards, shard, xp, m = self.shards, self.shard, self.xp, at.shape[-1]
        log_p = self.log_p()
        log_p = xp.where(shards.poisoned, xp.zeros_like(log_p), log_p)
        positive = log_p > -math.inf
        logs = xp.where(positive, log_p, xp.zeros_like(log_p))
        p = xp.where(positive, xp.exp(logs), xp.zeros_like(log_p))
        logs_at, inside = xp.take_along_axis(logs, at, axis=-1), xp.take_along_axis(positive, at, axis=-1)
        zero = xp.zeros_like(logs_at)
        x = xp.where(xp.isfinite(shard.rows), shard.rows, xp.zeros_like(shard.rows))
        x = x - stop_gradient(x)  # 0, with a gradient
        pull = xp.where(here, xp.take_along_axis(x, at, axis=-1), zero)
        parts = [xp.where(here & inside, logs_at, zero), xp.astype(here & ~inside, logs_at.dtype), pull]
        parts += [total(stop_gradient(p) * x, xp), total(p, xp), *([total(p * logs, xp)] if entropy else [])]
        if rest:
            at_class = at_classes(xp.where(here, at, p.shape[-1] * xp.ones_like(at)), p, xp)
            parts.append(total(xp.where(at_class, xp.zeros_like(p), p), xp))
        sums = xp.sum(shards.stack(xp.concat(parts, axis=-1)), axis=0)
        logs_at, lost, pull = (sums[..., i * m : (i + 1) * m] for i in range(3))
        mean, mass, *more = columns_of(sums[..., 3 * m :])
        h, others = more[0] if entropy else None, _array.log(more[-1], xp) if rest else None
        draw = one_draw(shard.local)
        if draw == "share":  # probabilities that sum to k, but one class is drawn
            mass = sum_of(mass, xp)
            logs_at, mean = logs_at - xp.log(mass), mean / stop_gradient(mass)
            h = None if h is None else h / mass - xp.log(mass)
            others = None if others is None else others - xp.log(mass)
        elif draw == "rest":
            missing = missing_mass(mass, 1.0, xp)
            h = None if h is None else h + xlogx(missing, xp)
            others = None if others is None else _array.log(more[-1] + missing, xp)
        lost = lost > 0
        return Terms(xp.where(lost, -math.inf + pull - mean, logs_at), None if h is None else -h, others)

    def draw(self, u: Array) -> Array:
        """The class of each uniform number u [..., m], -1 in a row without classes.

        First choose the process by its mass; that process then finds the class.
        """
        shards, xp = self.shards, self.xp
        p = xp.where(shards.poisoned, xp.zeros_like(shards.shard.rows), self.p())
        masses = self.masses(p, u.dtype)
        upto = _array.running_sum(masses, xp, axis=0)
        level, whole = u * upto[-1], upto[-1]
        before = shards.mine(upto) - shards.mine(masses)
        here = (level >= before) & (level < shards.mine(upto)) & (whole > 0)
        mass = shards.mine(masses)
        inside = (level - before) / xp.where(mass > 0, mass, xp.ones_like(mass))
        one = 1.0 - float(xp.finfo(u.dtype).eps)
        inside = xp.where(inside < 0, xp.zeros_like(inside), xp.where(inside < one, inside, one * xp.ones_like(inside)))
        index = _array.counts(invert(p, inside, xp), xp)
        # 0 on all other processes
        number = xp.where(here & (index >= 0), index + shards.places.start + 1, xp.zeros_like(index))
        return xp.max(shards.stack(number), axis=0) - 1

    def masses(self, p: Array, dtype: Any) -> Array:
        """The sum of p on each process, [size, ..., 1] in the order of the classes."""
        return self.shards.stack(total(self.xp.astype(p, dtype), self.xp))
