"""Fusedmax: sparsemax that gives neighbouring classes the same probability."""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import Any, ClassVar

import numpy as np

from .._array import (
    NOT_NEGATIVE,
    Array,
    Namespace,
    Ranges,
    adopt,
    decides,
    differentiates,
    dot,
    finish,
    finite_scores,
    index_dtype,
    is_array,
    is_jax,
    is_torch,
    like,
    loop,
    on_host,
    positions,
    running_sum,
    stop_gradient,
    sum_dtype,
    take,
    top,
    total,
)
from .._core.facts import Facts
from .._core.mapping import Mapping, row_top
from .._core.parameters import check_ranges
from .._core.parts import Parts
from .._core.rows import hide
from .._core.typing import Parameter
from .sparsemax import Sparsemax

_SPARSEMAX = Sparsemax()


@dataclasses.dataclass(frozen=True, eq=False)
class Fusedmax(Mapping):
    """Sparsemax with a price on differences between neighbours, `strength * sum_i |p_(i+1) - p_i|`: neighbours share one probability.

    Use it where the order of the classes has a meaning, such as attention over the words of a text: whole phrases get attention, or none.
    It is sparsemax of the scores after total variation denoising. Niculae and Blondel 2017. Masked classes are left out of the chain.

    Parameters
    ----------
    strength
        The price, a number of at least 0, or an array that broadcasts to the scores with size 1 along the classes; it has a gradient.
        0 is sparsemax.

    Examples
    --------
    >>> anymax.apply(anymax.Fusedmax(0.3), [1.0, 0.8, -1.0, 0.7])
    array([0.45, 0.45, 0.  , 0.1 ])
    """

    strength: Parameter = 0.1

    parts = Parts(loss_of_whole_target=True)
    ranges: ClassVar[Ranges] = {"strength": NOT_NEGATIVE}

    name = "fusedmax"
    formula = "p = sparsemax(TV(x))"
    kernel = "fusedmax"
    iterative = True
    learns = ("strength",)

    def __post_init__(self) -> None:
        check_ranges(self, "the price of a difference", "strength")

    @property
    def facts(self) -> Facts:
        strength: Any = self.strength
        margin = None if is_array(strength) else 1.0 + 3.0 * strength
        return Facts(
            monotone=False, shift_invariant=True, sparse=True, has_potential=True, margin=margin, ordered=True
        )  # fmt: skip

    # -- the groups ----------------------------------------------------------------------------------------------------------

    def hold(self, x: Array, xp: Namespace) -> Array:
        """For each class of the chain: first and last place of its group, the pull of the groups beside it, the group's mean, [..., 4 n].

        Scores are relative to the largest. One far below it has p = 0, as has its group, so it counts as nearer: sums stay finite.
        """
        y, keep, _ = finite_scores(x, xp)
        strength = like(self.strength, y, xp) + xp.zeros_like(y[..., :1])
        floor = -4.0 * x.shape[-1] * (1.0 + strength)
        y = y - row_top(y, keep, xp)
        y = xp.where(y < floor, floor, y)
        order = _order(keep, xp)
        y = take(y, order, xp)
        first, last, mean, sign = _groups(y, total(xp.astype(keep, y.dtype), xp), strength, xp)
        return xp.concat([first, last, _pull(first, last, sign, xp), mean], axis=-1)

    def held_size(self, n: Any) -> Any:
        return 4 * n

    def _denoised(self, x: Array, keep: Array, held: Array, xp: Namespace) -> Array:
        """The scores after total variation denoising, with the groups as constants."""
        n = x.shape[-1]
        first, last, pull, mean = (held[..., i * n : (i + 1) * n] for i in range(4))
        v = mean + like(self.strength, x, xp) * pull / (last - first + 1.0)
        v = take(v, _inverse(_order(keep, xp), xp), xp)
        if not differentiates(x):
            return v
        # 0, for its derivative: sums of scores are less accurate than the means, and may overflow
        return v + self._averaged(x - stop_gradient(x), keep, held, xp)

    def _averaged(self, x: Array, keep: Array, held: Array, xp: Namespace) -> Array:
        """The mean of each group, at each of its classes: a symmetric matrix."""
        n = x.shape[-1]
        order = _order(keep, xp)
        first, last = held[..., :n], held[..., n : 2 * n]
        y = take(xp.where(keep, x, xp.zeros_like(x)), order, xp)
        sums = running_sum(y, xp, sum_dtype(y, xp))  # a sum over a group is a difference of two of them
        ends, before = take(sums, _index(last, xp), xp), _index(first, xp) - 1
        start = take(sums, xp.where(before < 0, xp.zeros_like(before), before), xp)
        start = xp.where(before < 0, xp.zeros_like(start), start)
        alone = first == last
        mean = xp.where(alone, y, xp.astype(ends - start, y.dtype) / (last - first + 1.0))
        return take(mean, _inverse(order, xp), xp)

    # -- the contract ---------------------------------------------------------------------------------------------------------

    def forward(self, x: Array, xp: Namespace) -> Array:
        y, keep, poisoned = finite_scores(x, xp)
        v = self._denoised(y, keep, self.hold(x, xp), xp)
        return finish(_SPARSEMAX.forward(hide(v, keep), xp), keep, poisoned, xp)

    def differentiable(self, x: Array, xp: Namespace, held: Array | None = None) -> Array:
        held = self.frozen().hold(stop_gradient(x), xp) if held is None else held
        y, keep, poisoned = finite_scores(x, xp)
        v = self._denoised(y, keep, stop_gradient(held), xp)
        return finish(_SPARSEMAX.differentiable(hide(v, keep), xp), keep, poisoned, xp)

    def vjp(self, x: Array, p: Array, g: Array, xp: Namespace) -> Array:
        _, keep, _ = finite_scores(x, xp)
        held = self.frozen().hold(stop_gradient(x), xp)
        return self._averaged(_SPARSEMAX.vjp(x, p, g, xp), keep, held, xp) + xp.where(xp.isnan(p), p, xp.zeros_like(p))

    def param_jvp(self, name: str, x: Array, p: Array, v: Array, xp: Namespace) -> Array:
        """Neighbouring groups approach each other: a change of the scores that is one number in each group."""
        _, keep, _ = finite_scores(x, xp)
        held, n = self.frozen().hold(stop_gradient(x), xp), x.shape[-1]
        first, last, pull = (held[..., i * n : (i + 1) * n] for i in range(3))
        change = take(pull / (last - first + 1.0), _inverse(_order(keep, xp), xp), xp)
        return self.jvp(x, p, xp.where(keep, change, xp.zeros_like(change)) * v, xp)

    # -- the loss ------------------------------------------------------------------------------------------------------------

    def omega(self, q: Array, xp: Namespace) -> Array:
        return _SPARSEMAX.omega(q, xp) + like(self.strength, q, xp) * _variation(q, xp.ones_like(q) > 0, xp)

    def constant(self, y: Array, xp: Namespace) -> Array:
        return _SPARSEMAX.omega(y, xp)  # the rest, which is not 0 for a single class, is in `loss`

    def loss(self, x: Array, p: Array, y: Array, xp: Namespace) -> Array:
        """`Omega*(x) - <x, y>` and the price of the target's own differences."""
        x, keep, _ = finite_scores(x, xp)
        mass = total(y, xp)
        c = stop_gradient(dot(y, x, xp) / xp.where(mass == 0, xp.ones_like(mass), mass))
        held, strength = stop_gradient(p), like(self.strength, x, xp)
        rough = _variation(y, keep, xp) - _variation(held, keep, xp)
        value = dot(held - y, x - c, xp) - _SPARSEMAX.omega(held, xp) + strength * rough
        if held is p or not differentiates(p):
            return value
        value = value + 0.5 * dot(x - stop_gradient(x), p - held, xp)
        if not is_array(strength):
            return value
        moved = _variation(p, keep, xp)
        return value - 0.5 * (strength - stop_gradient(strength)) * (moved - stop_gradient(moved))


def _order(keep: Array, xp: Namespace) -> Array:
    """The places of the kept classes in their order, and then those of the others."""
    n = keep.shape[-1]
    place = positions(keep, index_dtype(keep, xp), xp)
    return xp.argsort(xp.where(keep, place, place + n), axis=-1)


def _inverse(order: Array, xp: Namespace) -> Array:
    return xp.argsort(order, axis=-1)


def _index(place: Array, xp: Namespace) -> Array:
    return xp.astype(place, index_dtype(place, xp))


def _variation(q: Array, keep: Array, xp: Namespace) -> Array:
    """sum |q_(i+1) - q_i| over the kept classes, [..., 1]."""
    if decides(keep) and bool(xp.all(keep)):
        return total(xp.abs(q[..., 1:] - q[..., :-1]), xp)
    order = _order(keep, xp)
    kept = take(keep, order, xp)[..., 1:]
    q = take(q, order, xp)
    step = xp.abs(q[..., 1:] - q[..., :-1])
    return total(xp.where(kept, step, xp.zeros_like(step)), xp)


def _pull(first: Array, last: Array, sign: Array, xp: Namespace) -> Array:
    """How many of the groups beside each class's group are above it, minus how many are below. `sign` is that of x_(i+1) - x_i."""
    after = take(sign, _index(last, xp), xp)
    before = _index(first, xp) - 1
    ahead = take(sign, xp.where(before < 0, xp.zeros_like(before), before), xp)
    return after - xp.where(before < 0, xp.zeros_like(ahead), ahead)


def _groups(y: Array, count: Array, strength: Array, xp: Namespace) -> tuple[Array, Array, Array, Array]:
    """The groups of total variation denoising of the first `count` scores of each row: first and last place, mean, and the signs, [..., n].

    As the strength rises from 0, groups of neighbours approach each other at constant rates, and once two meet they stay one group. So
    the groups follow from at most n - 1 meetings, taken in their order. Until they meet, the order of two neighbours does not change.
    """
    n = y.shape[-1]
    place = positions(y, y.dtype, xp) + xp.zeros_like(y)
    if decides(y) and (isinstance(y, np.ndarray) or is_torch(y) or is_jax(y)):
        return _groups_by_rows(y, count, strength, xp)  # type: ignore[return-value]
    behind = xp.concat([y[..., 1:], y[..., -1:]], axis=-1)
    there = place + 1.0 < count
    sign = xp.where(there, xp.sign(behind - y), xp.zeros_like(y))
    never = math.inf * xp.ones_like(y)

    def meeting(first: Array, last: Array, mean: Array) -> tuple[Array, Array]:
        """(the strength at which the next two groups of each row meet, the place before their border)."""
        rate = _pull(first, last, sign, xp) / (last - first + 1.0)
        next_mean, next_rate = (xp.concat([a[..., 1:], a[..., -1:]], axis=-1) for a in (mean, rate))
        nearer = sign * (rate - next_rate)  # at least 0
        gap = sign * (next_mean - mean)
        gap = xp.where(gap > 0, gap, xp.zeros_like(gap))
        meets = there & (last == place)
        moving = nearer > 0
        at = xp.where(moving, gap / xp.where(moving, nearer, xp.ones_like(nearer)), never)
        at = xp.where(meets, xp.where(sign == 0, xp.zeros_like(at), at), never)
        soon = -top(-at, xp)
        border = -top(-xp.where(at == soon, place, n * xp.ones_like(place)), xp)
        return soon, border

    def active(state: tuple) -> Array:
        return state[3] <= strength

    def body(state: tuple) -> tuple:
        first, last, mean, soon, border = state
        go = soon <= strength
        left = _index(xp.where(go, border, xp.zeros_like(border)), xp)
        right = xp.where(left + 1 < n, left + 1, left)
        start, end = take(first, left, xp), take(last, right, xp)
        one, two = take(last, left, xp) - start + 1.0, end - take(first, right, xp) + 1.0
        joint = (one * take(mean, left, xp) + two * take(mean, right, xp)) / (one + two)
        inside = go & (place >= start) & (place <= end)
        first, last, mean = (xp.where(inside, a, b) for a, b in ((start, first), (end, last), (joint, mean)))
        return first, last, mean, *meeting(first, last, mean)

    first, last, mean, *_ = loop(active, body, (place, place, y, *meeting(place, place, y)), n, n)
    return first, last, mean, sign


def _groups_by_rows(y: Array, count: Array, strength: Array, xp: Namespace) -> tuple[Array, ...]:
    """The groups of `_groups` where values can be read, row by row with a queue of the meetings: n log n steps in place of n^2."""
    rows, counts, strengths = (on_host(a) for a in (y, count, strength))
    shape, n = rows.shape, rows.shape[-1]
    rows = rows.reshape(-1, n)
    first, last, mean, sign = np.empty_like(rows), np.empty_like(rows), np.empty_like(rows), np.zeros_like(rows)
    for i, (row, kept, price) in enumerate(zip(rows, counts.reshape(-1), strengths.reshape(-1), strict=True)):
        k = int(kept)
        sign[i, : max(k - 1, 0)] = np.sign(np.diff(row[:k]))
        starts = np.concatenate([_starts(row[:k].tolist(), sign[i].tolist(), float(price)), np.arange(k, n)]).astype(
            np.int64
        )
        sizes = np.diff(starts, append=n)
        first[i], last[i] = np.repeat(starts, sizes), np.repeat(starts + sizes - 1, sizes)
        mean[i] = np.repeat(np.add.reduceat(row.astype(np.float64), starts) / sizes, sizes)
    return tuple(adopt(a.reshape(shape), y, xp) for a in (first, last, mean, sign))


def _starts(row: list[float], sign: list[float], strength: float) -> list[int]:
    """The first place of each group of one row."""
    n = len(row)
    start, end = list(range(n)), list(range(n))  # the other end of a group, at its last and at its first place
    mean = list(row)  # at the first place of a group
    apart = [True] * n  # a border after this place
    due = [0] * n  # how often a border has been looked at: older entries of the queue do not count
    queue: list[tuple[float, int, int]] = []

    def rate(a: int) -> float:
        return (sign[end[a]] - (sign[a - 1] if a else 0.0)) / (end[a] - a + 1)

    def look(border: int) -> None:
        a, b = start[border], border + 1
        nearer = sign[border] * (rate(a) - rate(b))
        gap = max(sign[border] * (mean[b] - mean[a]), 0.0)
        at = 0.0 if sign[border] == 0 else gap / nearer if nearer > 0 else math.inf
        due[border] += 1
        if at <= strength:
            heapq.heappush(queue, (at, border, due[border]))

    for border in range(n - 1):
        look(border)
    while queue:
        _, border, seen = heapq.heappop(queue)
        if not apart[border] or seen != due[border]:
            continue
        a, b = start[border], border + 1
        c, one, two = end[b], b - a, end[b] - b + 1
        mean[a] = (one * mean[a] + two * mean[b]) / (one + two)
        apart[border], end[a], start[c] = False, c, a
        if a:
            look(a - 1)
        if c < n - 1:
            look(c)
    return [0, *(b + 1 for b in range(n - 1) if apart[b])] if n else []
