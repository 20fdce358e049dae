"""Masks of the entries that a truncation keeps, without a derivative: the k largest, the nucleus of mass p, the typical ones, ...

They use thresholds of rows and counts of ties, so that shapes never depend on values. Classes are on the last axis. -inf is never kept. A
row with a NaN or +inf (in top-k: a NaN) keeps all other entries, so that its user notices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .._array import (
    Array,
    Namespace,
    decides,
    descending,
    finite_scores,
    index_dtype,
    is_array,
    is_strange,
    kth_largest,
    like,
    positions,
    running_dtype,
    running_sum,
    smallest,
    stop_gradient,
    take,
    top,
    total,
    wider,
)

_FEW = 1024  # the largest entries that are sorted first
_LOWEST = -1000.0  # where exp is 0 in every dtype


def topk_keep(x: Array, k: Any, xp: Namespace) -> Array:
    """True at the k largest entries of each row, exactly k if it has as many; in a tie the first. k may be an array [..., 1]."""
    n = x.shape[-1]
    if is_array(k) and n:
        x = stop_gradient(x)
        k = stop_gradient(like(k, x, xp))
        k = xp.astype(xp.where(k < n, xp.where(k > 1, k, xp.ones_like(k)), n * xp.ones_like(k)), xp.int32)
        k = xp.broadcast_to(k, (*x.shape[:-1], 1))
        place = xp.astype(k - 1, index_dtype(x, xp))
        return _first(x, take(descending(x, xp), place, xp), k, xp)
    if is_array(k) or k >= n:
        return x != -math.inf
    x = stop_gradient(x)
    return _first(x, kth_largest(x, k, xp), k, xp)


def group_keep(x: Array, count: int, keep: int, most: int, xp: Namespace) -> Array:
    """True at the classes of the `keep` groups with the largest sums; in a tie the first groups. The groups are `count` equal blocks.

    The sum of a group is that of its `most` largest entries, added in descending order; -inf counts as nothing, and a group that has no
    other entry is never kept.
    """
    *lead, n = x.shape
    y = xp.reshape(stop_gradient(x), (*lead, count, n // count))
    best = top(y, xp) if most == 1 else descending(y, xp, most)
    kept = xp.expand_dims(topk_keep(_sum_of_group(best, xp), keep, xp), axis=-1)
    return xp.reshape(xp.broadcast_to(kept, y.shape), x.shape)


def _sum_of_group(best: Array, xp: Namespace) -> Array:
    """The sum of entries [..., m] in descending order; -inf counts as nothing, and there is no sum of nothing else."""
    sums = best[..., 0]
    for i in range(1, best.shape[-1]):
        sums = sums + _or_nothing(best[..., i], xp)
    return sums


def _or_nothing(x: Array, xp: Namespace) -> Array:
    return xp.where(x == -math.inf, xp.zeros_like(x), x)


def group_levels(x: Array, count: int, keep: int, most: int, xp: Namespace) -> Array:
    """The level that each entry must pass for its group to be among those that `group_keep` keeps; -inf if the group is so without it.

    It lies in the middle between what the last group that is kept and the first that is not need. There are more groups than are kept.
    """
    y = xp.reshape(x, (*x.shape[:-1], count, x.shape[-1] // count))
    best = descending(y, xp, most + 1)
    best = best if best.shape[-1] > most else wider(best, most + 1, -math.inf, xp)
    sums = xp.expand_dims(_sum_of_group(best[..., :most], xp), axis=-1)
    ranked = descending(sums[..., 0], xp, keep + 1)
    last, after = ranked[..., keep - 1 : keep], ranked[..., keep : keep + 1]
    middle = xp.expand_dims(xp.where(after > -math.inf, 0.5 * (last + after), after), axis=-1)
    inside = y >= best[..., most - 1 : most]  # among those that are added
    small = _or_nothing(sums, xp)
    others = xp.where(inside, small - _or_nothing(y, xp), small - _or_nothing(best[..., most - 1 : most], xp))
    without = xp.where(inside, others + _or_nothing(best[..., most:], xp), sums)
    alone = inside & (best[..., 1:2] == -math.inf)
    level = xp.where((without >= middle) & ~alone, -math.inf * xp.ones_like(y), middle - others)
    return xp.reshape(level, x.shape)


def topp_keep(x: Array, p: Any, xp: Namespace, min_keep: int = 1, mass: Array | None = None) -> Array:
    """True at the smallest set of largest entries whose softmax mass reaches p (a number, or an array [..., 1]).

    In descending order, an entry is kept if the mass before it is below p, or if fewer than `min_keep` entries are before it. So the
    largest is always kept, and all are if p is 1. `mass`: the sum of exp(x - max) of whole rows, if x has only some of their entries.
    """
    x = stop_gradient(x)
    live = x != -math.inf
    if x.shape[-1] == 0:
        return live
    high = top(x, xp)
    strange = xp.isnan(high) | (high == math.inf)
    y = xp.where(strange, xp.zeros_like(x), x)
    high = xp.where(strange | (high == -math.inf), xp.zeros_like(high), high)
    e = xp.exp(y - high)
    level, z = _share(p, e, xp), _mass(e, xp) if mass is None else mass
    # a kept entry and those after it have more than 1 - p of the mass: at most n entries, none above this one
    some = (e * x.shape[-1] >= 0.99 * (1.0 - level) * xp.astype(z, e.dtype)) & (e > 0) & ~strange
    s = descending(y, xp, max(_most(some, xp), min_keep) if mass is None else None)
    inside = _before(xp.exp(s - high), level, z, xp)
    if min_keep > 1:
        inside = inside | (positions(s, xp.int32, xp) < min_keep)
    count = _number(inside, xp)
    edge = xp.min(xp.where(inside, s, math.inf * xp.ones_like(s)), axis=-1, keepdims=True)
    return _or_all(_first(y, edge, count, xp) | strange, level, live)


def typical_keep(x: Array, mass: Any, xp: Namespace, min_keep: int = 1) -> Array:
    """True at the fewest entries with -log p nearest to the entropy whose mass reaches `mass`, but at least at `min_keep`.

    Entries that are equally near are kept or dropped together.
    """
    found = _probabilities(x, xp)
    far = xp.abs(found.log_p + found.entropy(xp))
    far = xp.where(found.live, far, math.inf * xp.ones_like(far))
    order = smallest(far, _most(found.live, xp), xp)
    near, p = (xp.take_along_axis(a, order, axis=-1) for a in (far, found.p))
    level = _share(mass, p, xp)
    inside = _before(p, level, _mass(found.p, xp), xp)
    if min_keep > 1:
        inside = inside | (positions(near, xp.int32, xp) < min_keep)
    edge = top(xp.where(inside, near, -xp.ones_like(near)), xp)
    return _or_all((far <= edge) | found.strange, level, found.live)


def _share(mass: Any, x: Array, xp: Namespace) -> Any:
    """A mass in the dtype of x, where it stays above 0, so that it keeps a class; NaN stays NaN."""
    level, least = stop_gradient(like(mass, x, xp)), float(xp.finfo(x.dtype).smallest_normal)
    return xp.where(level < least, least * xp.ones_like(level), level) if is_array(level) else max(level, least)


def cutoff_keep(x: Array, epsilon: Any, xp: Namespace, min_keep: int = 1, by_entropy: bool = False) -> Array:
    """True where p is at least epsilon, or `by_entropy` at least `min(epsilon, sqrt(epsilon) exp(-entropy))`.

    Entries not below the `min_keep`-th largest are kept too, with all that are equal to it.
    """
    found = _probabilities(x, xp)
    if by_entropy:
        epsilon = epsilon if is_array(epsilon) else epsilon + 0.0 * found.p[..., :1]
        lower = xp.sqrt(epsilon) * xp.exp(-found.entropy(xp))
        epsilon = stop_gradient(xp.where(lower < epsilon, lower, epsilon))
    return ((found.p >= epsilon) | _largest(x, found, min_keep, xp) | found.strange) & found.live


def xtc_keep(x: Array, level: Any, xp: Namespace) -> Array:
    """False at all entries with a probability of at least `level` [..., 1], except the least probable of these.

    In a tie the last counts as the least.
    """
    found = _probabilities(x, xp)
    above = found.live & (found.p >= stop_gradient(level))
    y = stop_gradient(x)
    least = xp.min(xp.where(above, y, math.inf * xp.ones_like(y)), axis=-1, keepdims=True)
    place = running_sum(above & (y == least), xp, xp.int32)
    last = above & (y == least) & (place == place[..., -1:])
    return (~above | last | found.strange) & found.live


def pless_level(x: Array, xp: Namespace, norm: bool = False) -> Array:
    """sum p^2, or with `norm` `(n sum p^2 - 1) / (n - 1)` for n entries, [..., 1], as a level of `cutoff_keep`: between 0 and 1."""
    _, e, mass = _exponentials(x, xp)
    level = total(e * e, xp) / (mass * mass)
    if norm:
        n = total(xp.astype(x != -math.inf, level.dtype), xp)
        level = (n * level - 1.0) / xp.where(n > 1, n - 1.0, xp.ones_like(n))
    level = xp.where(xp.isnan(level), xp.zeros_like(level), level)  # a row that keeps all entries anyway, or has none
    # p of 1 is the largest, which is kept
    return xp.clip(level, float(xp.finfo(level.dtype).smallest_normal), 1.0 - 0.5 * float(xp.finfo(level.dtype).eps))


def toph_count(x: Array, share: Any, entropy: Array, xp: Namespace, min_keep: int = 1) -> Array:
    """How many of the largest entries have an entropy of at most `share` times the row's when they are normalised alone, [..., 1].

    entropy: the row's, [..., 1]. That of its largest entries grows with each further one (p_k is at most 1/k of the sum so far, whose
    entropy is at most log(k - 1)).
    """
    n = x.shape[-1]
    x = stop_gradient(x)
    wide, level = running_dtype(x, xp), stop_gradient(like(share, x, xp))
    limit = like(level, xp.astype(entropy, wide), xp) * xp.astype(entropy, wide)

    def inside(some: Array) -> Array:  # one False ends it, since entropy grows
        z, e, _ = _exponentials(some, xp)
        mass = running_sum(e, xp, wide)
        entropy = xp.log(mass) - running_sum(e * z, xp, wide) / mass
        return ((entropy <= limit) & (e > 0)) | (positions(some, xp.int32, xp) < min_keep)

    some, kept = _enough(inside, x, xp)
    count = _number(inside(some) if kept is None else kept, xp)
    return xp.where((level >= 1) | is_strange(x, xp), n * xp.ones_like(count), count)


def toph_hundred_count(x: Array, share: Any, xp: Namespace) -> Array:
    """How many of the 100 largest entries have a sum of -p log p of at most `share` times that of the 100, [..., 1].

    p is the softmax of these. It is at least 1, and all entries if the share is above 1.
    """
    x = stop_gradient(x)
    z, e, mass = _exponentials(descending(x, xp, 100), xp)
    upto = running_sum(e / xp.astype(mass, e.dtype) * (xp.log(xp.astype(mass, e.dtype)) - z), xp, running_dtype(e, xp))
    level = stop_gradient(like(share, x, xp))
    inside = (upto <= like(level, upto, xp) * upto[..., -1:]) | (positions(upto, xp.int32, xp) < 1)
    count = _number(inside, xp)
    return xp.where((level > 1) | is_strange(x, xp), x.shape[-1] * xp.ones_like(count), count)


def mink_count(x: Array, tau: Any, xp: Namespace, min_keep: int = 1) -> Array:
    """How many entries are before the steepest drop `(x_i - x_(i+1)) / i` of the sorted scores, at least tau / (max x - min x)."""
    n = x.shape[-1]
    x = stop_gradient(x)
    strange = is_strange(x, xp)
    high, low = top(x, xp), xp.min(x, axis=-1, keepdims=True)
    if not (decides(low) and bool(xp.all(xp.isfinite(low)))):
        low = xp.min(xp.where(x == -math.inf, math.inf * xp.ones_like(x), x), axis=-1, keepdims=True)
    sound = xp.isfinite(low) & ~strange
    zero = xp.zeros_like(low)
    spread = xp.where(sound, 0.5 * high - 0.5 * low, zero)  # a difference of two halves does not overflow

    def drops(some: Array) -> Array:
        half = 0.5 * xp.where(some == -math.inf, zero, some)
        last = some[..., 1:] == -math.inf
        place = positions(some, some.dtype, xp)[..., 1:]
        drop = xp.where(last, xp.zeros_like(half[..., 1:]), (half[..., :-1] - half[..., 1:]) / place)
        return xp.concat([drop, zero], axis=-1)

    def goes_on(some: Array) -> Array:
        """True where a later drop may be steeper: from the last of some entries to the least of all."""
        left = xp.where(sound, 0.5 * some[..., -1:] - 0.5 * low, zero)
        return sound & ~(top(drops(some), xp) >= left / some.shape[-1])

    drop = drops(_enough(goes_on, x, xp)[0])
    place = positions(drop, drop.dtype, xp)
    steepest = xp.where(drop == top(drop, xp), place, n * xp.ones_like(place))
    count = xp.min(steepest, axis=-1, keepdims=True) + 1.0
    level = 0.5 * stop_gradient(like(tau, x, xp)) + zero
    flat = xp.where(level > 0, n * xp.ones_like(level), zero)
    fewest = xp.where(level < n * spread, xp.floor(level / xp.where(spread > 0, spread, xp.ones_like(spread))), flat)
    count = xp.where(fewest > count, fewest, count)
    least = float(min(min_keep, n))
    count = xp.where(count > least, count, least * xp.ones_like(count))
    return xp.astype(xp.where(strange, n * xp.ones_like(count), count), index_dtype(x, xp))


def _enough(goes_on: Callable[[Array], Array], x: Array, xp: Namespace) -> tuple[Array, Array | None]:
    """(the largest entries of each row in descending order, `goes_on` of them): so many that it is False at the last; or (all, None)."""
    n = x.shape[-1]
    most = _FEW if decides(x) else n
    while most < n:
        some = descending(x, xp, most)
        more = goes_on(some)
        if not bool(xp.any(more[..., -1:])):
            return some, more
        most *= 8
    return descending(x, xp), None


def _exponentials(x: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    """(z, e, the sum of e) of rows without +inf and NaN, with z = x - max x and e = exp(z); z is finite where an entry is masked."""
    x = stop_gradient(x)
    high = top(x, xp)
    z = xp.clip(x - xp.where(high > -math.inf, high, xp.zeros_like(high)), _LOWEST, 0.0)
    e = xp.exp(z)
    return z, e, xp.sum(e, axis=-1, keepdims=True, dtype=running_dtype(e, xp))


class _Probabilities(NamedTuple):
    """The softmax of rows, without derivatives; log p is 0 where an entry is masked or its row is strange."""

    p: Array
    log_p: Array
    live: Array  # False at -inf
    strange: Array  # [..., 1], True for a row with a NaN or +inf, whose p is 1 / n

    def entropy(self, xp: Namespace) -> Array:
        return -total(self.p * self.log_p, xp)


def _probabilities(x: Array, xp: Namespace) -> _Probabilities:
    y, live, strange = finite_scores(stop_gradient(x), xp)
    zero = xp.zeros_like(y)
    high = top(xp.where(live, y, -math.inf * xp.ones_like(y)), xp)
    y = xp.where(live, y - xp.where(high > -math.inf, high, xp.zeros_like(high)), zero)
    e = xp.where(live, xp.exp(y), zero)
    z = total(e, xp)
    z = xp.where(z == 0, xp.ones_like(z), z)
    return _Probabilities(e / z, xp.where(live, y - xp.log(z), zero), live, strange)


def _sound(x: Array, found: _Probabilities, xp: Namespace) -> Array:
    """The scores as constants, -inf in strange rows."""
    return xp.where(found.live & ~found.strange, stop_gradient(x), -math.inf * xp.ones_like(x))


def _largest(x: Array, found: _Probabilities, k: int, xp: Namespace) -> Array:
    """True at the k largest entries and at all that are equal to the last of these."""
    y = _sound(x, found, xp)
    return y >= kth_largest(y, min(k, x.shape[-1]), xp)


def _mass(mass: Array, xp: Namespace) -> Array:
    """The row's sum, [..., 1]."""
    return xp.sum(mass, axis=-1, keepdims=True, dtype=running_dtype(mass, xp))


def _before(mass: Array, level: Any, whole: Array, xp: Namespace) -> Array:
    """True at entries with less than `level` of the whole mass before them."""
    upto = running_sum(mass, xp, whole.dtype)
    before = xp.concat([xp.zeros_like(upto[..., :1]), upto[..., :-1]], axis=-1)
    return before < like(level, upto, xp) * whole


def _or_all(kept: Array, level: Any, live: Array) -> Array:
    """The live entries that are kept; all of them if the level is 1."""
    if is_array(level):
        return (kept | (level >= 1)) & live
    return live if level >= 1 else kept & live  # torch.jit.trace can't combine a bool with a tensor


def _most(some: Array, xp: Namespace) -> int:
    """The most entries that are True in a row, if that may be read and saves a sort of the whole row; else the row's length."""
    n = some.shape[-1]
    if not decides(some) or not math.prod(some.shape):
        return n
    most = int(xp.max(_number(some, xp)))
    return max(most, 1) if 8 * most < n else n


def _first(x: Array, edge: Array, count: Any, xp: Namespace) -> Array:
    """True at the entries above `edge` and, up to `count` in all, at the first of those equal to it."""
    above = x > edge
    equal = (x == edge) & (x != -math.inf)
    nan = xp.any(xp.isnan(x), axis=-1, keepdims=True) & (x != -math.inf)
    room = count - _number(above, xp)
    if decides(equal) and not bool(xp.any(_number(equal, xp) > room)):  # the usual case, without ties at the edge
        return above | equal | nan
    place = running_sum(equal, xp, xp.int32)
    return above | (equal & (place <= room)) | nan


def _number(some: Array, xp: Namespace) -> Array:
    """How many entries of each row are True, [..., 1]."""
    return xp.sum(xp.astype(some, xp.int32), axis=-1, keepdims=True, dtype=xp.int32)
