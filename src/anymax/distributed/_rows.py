"""Results with one or a few numbers per row: thresholds, smooth maxima, log p of given classes with the entropy, and samples."""

from __future__ import annotations

import math
from typing import Any

from .. import _array
from .._array import Array, is_integer, is_number, namespace, stop_gradient, total
from .._random.draws import count_of, invert, uniforms
from ..functional import apply
from ..losses.targets import refuse_strays
from ..thresholds import Threshold
from ..thresholds import threshold as whole_threshold
from ._agree import Talk
from ._shard import Asked, Shard, ShardedCall, place_of
from ._ways import Solved, solve

# -- thresholds ------------------------------------------------------------------------------------------------------------------


def threshold(asked: Asked, talk: Talk, keepdims: bool) -> Threshold:
    call = asked.call(talk)
    mapping: Any = call.mapping
    if not mapping.has_threshold:
        raise TypeError(mapping.no_threshold())
    call.mapping, call.x = mapping.frozen(), stop_gradient(call.x)
    return solve(call, lambda out: _threshold(out, keepdims))


def _threshold(out: Solved, keepdims: bool) -> Threshold:
    shard, xp = out.shard, out.shard.xp
    mapping: Any = shard.mapping
    if out.small is not None:
        tau, size = whole_threshold(*out.inner(), keepdims=True)
    else:
        if out.level is not None:
            anchor, level = out.level
            tau = anchor - level - mapping.level_to_tau(level, xp)
        else:
            assert out.whole is not None
            tau = xp.where(out.whole.empty, -math.inf * xp.ones_like(out.whole.z), out.high + out.whole.log_z)
        some = total(_array.counts(out.p() > 0, xp), xp)
        size = xp.sum(out.met.stack(some), axis=0)
    tau = _array.poison(tau, out.poisoned, xp)
    size = xp.where(out.poisoned, xp.zeros_like(size), size)
    return Threshold(shard.one(tau, keepdims), shard.one(size, keepdims))


def logsumexp(asked: Asked, talk: Talk, temperature: Any, keepdims: bool) -> Array:
    call = asked.call(talk)
    temperature = _array.number(temperature)
    if not _array.is_array(temperature) and (not is_number(temperature) or not temperature > 0):
        raise ValueError(f"logsumexp: temperature must be a number above 0 or an array of them, got {temperature!r}")
    call.temperature = temperature
    return solve(call, lambda out: _smooth(out, keepdims))


def _smooth(out: Solved, keepdims: bool) -> Array:
    shard, xp = out.shard, out.shard.xp
    assert out.whole is not None
    value = shard.temperature * (out.high + out.whole.log_z)
    highs = out.met.columns[0]
    strange = xp.max(highs, axis=0)  # NaN, +inf, or -inf for a row without classes
    return shard.one(xp.where(out.poisoned | out.whole.empty, strange, value), keepdims)


# -- log p of given classes ----------------------------------------------------------------------------------------------------------


def log_prob_entropy(asked: Asked, talk: Talk, y: Any) -> tuple[Array, Array]:
    state: dict[str, Any] = {}
    call = asked.call(talk)
    shape, lead = _classes(call, y)
    many = math.prod(shape[: len(shape) - len(lead)])
    xp = namespace(call.x)
    y = _array.beside(y, call.x, "y", xp)
    if not is_integer(y):
        raise TypeError(f"log_prob_entropy: y must be class indices (integers), got {y.dtype}")
    y = _array.counts(y, xp)
    talk.say(y=f"of shape {shape}")
    talk.same, call.counted = ("y", y), True

    def more(shard: Shard, a: Array, anchor: Array) -> list[Array]:
        """For each given class of this process its distance from the maximum, and 1; then this process's part of the entropy."""
        xp = shard.xp
        given = xp.moveaxis(xp.reshape(y, (many, *lead)), 0, -1)  # [..., many]
        at = given - call.first(shard)
        own = (at >= 0) & (at < shard.n) & (given >= 0)
        at = xp.where(own, at, xp.zeros_like(at))
        state.update(given=given, own=own, at=at)
        score = xp.take_along_axis(a, at, axis=-1)
        kept = own & (score != -math.inf)
        gap = xp.where(kept, anchor - xp.where(kept, score, anchor), xp.where(own, math.inf, 0.0) * xp.ones_like(score))
        keep = xp.isfinite(a)
        below = xp.where(keep, anchor - xp.where(keep, a, anchor), xp.zeros_like(a))
        part = total(xp.where(keep, xp.exp(-below), xp.zeros_like(a)) * below, xp)
        return [gap, xp.astype(own, a.dtype), part]

    finish = lambda out: _found(out, state, many, shape)  # noqa: E731
    return solve(call, finish, 2 * many + 1, lambda *args: _apart(more(*args)))


def _found(out: Solved, state: dict[str, Any], many: int, shape: tuple[int, ...]) -> tuple[Array, Array]:
    xp, given, extra = out.shard.xp, state["given"], out.extra
    stray = refuse_strays("log_prob_entropy: y", given, out.met.count, None, xp)
    if out.way == "sums":
        log_p, h = _of_sums(out, extra, many)
    else:
        log_p, h = _of_probabilities(out, state, many)
    log_p = xp.where(given < 0, xp.zeros_like(log_p), log_p)
    log_p = _array.poison(log_p, out.poisoned | stray, xp)
    h = _array.poison(h, out.poisoned, xp)
    return xp.reshape(xp.moveaxis(log_p, -1, 0), shape), h[..., 0]


def _apart(columns: list[Array]) -> list[Array]:
    gap, own, part = columns
    many = gap.shape[-1]
    return [*(gap[..., i : i + 1] for i in range(many)), *(own[..., i : i + 1] for i in range(many)), part]


def _classes(call: ShardedCall, y: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of y, and that of the rows without the class axis."""
    shape, lead = tuple(getattr(y, "shape", ())), call.lead
    if len(shape) < len(lead) or shape[len(shape) - len(lead) :] != lead:
        raise ValueError(
            f"log_prob_entropy: y of shape {shape}: expected one class for each row, of shape {lead}, or with axes of samples before these"
        )
    return shape, lead


def _of_sums(out: Solved, extra: list[Array], many: int) -> tuple[Array, Array]:
    xp, whole = out.shard.xp, out.whole
    assert whole is not None
    highs = out.met.columns[0]
    some = xp.isfinite(highs)
    anchors = stop_gradient(xp.where(some, highs, xp.zeros_like(highs)))
    below = whole.high[None, ...] - anchors
    gaps = [xp.sum(extra[i] + extra[many + i] * below, axis=0) for i in range(many)]
    log_p = -(whole.log_z + xp.concat(gaps, axis=-1))
    share = xp.where(some, xp.exp(xp.where(some, -below, xp.zeros_like(below))), xp.zeros_like(below))
    spread = xp.sum(share * (extra[2 * many] + (1.0 + out.met.columns[1]) * below), axis=0)
    h = whole.log_z + spread / whole.z
    return log_p, xp.where(whole.empty, xp.zeros_like(h), h)


def _of_probabilities(out: Solved, state: dict[str, Any], many: int) -> tuple[Array, Array]:
    """From log p of each process's classes. A class with p = 0 has -inf, with the gradient e_y - p."""
    shard, xp = out.shard, out.shard.xp
    log_p = out.log_p()
    log_p = xp.where(out.poisoned, xp.zeros_like(log_p), log_p)
    some = log_p > -math.inf
    logs = xp.where(some, log_p, xp.zeros_like(log_p))
    p = xp.where(some, xp.exp(logs), xp.zeros_like(log_p))
    own, at = state["own"], state["at"]
    found, there = xp.take_along_axis(logs, at, axis=-1), xp.take_along_axis(some, at, axis=-1)
    zero = xp.zeros_like(found)
    x = xp.where(xp.isfinite(shard.rows), shard.rows, xp.zeros_like(shard.rows))
    x = x - stop_gradient(x)  # 0, with a gradient
    pull = xp.where(own, xp.take_along_axis(x, at, axis=-1), zero)
    parts = [xp.where(own & there, found, zero), xp.astype(own & ~there, found.dtype), pull]
    parts += [total(stop_gradient(p) * x, xp), total(p * logs, xp), total(p, xp)]
    sums = xp.sum(out.met.stack(xp.concat(parts, axis=-1)), axis=0)
    found, lost, pull = (sums[..., i * many : (i + 1) * many] for i in range(3))
    mean, entropy, mass = (sums[..., 3 * many + i : 3 * many + i + 1] for i in range(3))
    given: Any = shard.mapping.mass
    if _array.is_array(given) or given != 1.0:  # probabilities that sum to k, but one class is drawn
        mass = xp.where(mass > 0, mass, xp.ones_like(mass))
        found, entropy, mean = found - xp.log(mass), entropy / mass - xp.log(mass), mean / stop_gradient(mass)
    lost = lost > 0
    return xp.where(lost, -math.inf + pull - mean, found), -entropy


# -- samples -------------------------------------------------------------------------------------------------------------------------


def sample(asked: Asked, talk: Talk, generator: Any, num_samples: int | None) -> Array:
    call = asked.call(talk)
    call.mapping, call.x = call.mapping.frozen(), stop_gradient(call.x)
    size = count_of(num_samples)
    talk.say(num_samples=num_samples)

    def more(shard: Shard, a: Array, anchor: Array) -> list[Array]:
        """Uniform numbers, each as two parts that the dtype of the scores can hold; those of the first process are used."""
        u = uniforms(shard.rows, size, generator, shard.xp)
        high = shard.xp.astype(u, a.dtype)
        low = shard.xp.astype(u - shard.xp.astype(high, u.dtype), a.dtype)
        return [*(high[..., i : i + 1] for i in range(size)), *(low[..., i : i + 1] for i in range(size))]

    return solve(call, lambda out: _drawn(out, size, num_samples is None), 2 * size, more)


def _drawn(out: Solved, size: int, one: bool) -> Array:
    shard, xp = out.shard, out.shard.xp
    wide = uniforms(shard.rows[..., :1][:0], 0, 0, xp).dtype
    u = [xp.astype(out.extra[i][0], wide) + xp.astype(out.extra[size + i][0], wide) for i in range(size)]
    u = xp.concat(u, axis=-1) if u else xp.zeros((*shard.rows.shape[:-1], 0), dtype=wide, **place_of(shard.rows))
    u = xp.where(u < 1.0, u, (1.0 - float(xp.finfo(wide).eps)) * xp.ones_like(u))
    index = _of_small(out, u) if out.small is not None else _of_shards(out, u, wide)
    index = xp.where(out.poisoned, -xp.ones_like(index), index)
    return index[..., 0] if one else xp.moveaxis(index, -1, 0)


def _of_small(out: Solved, u: Array) -> Array:
    assert out.small is not None
    xp = out.shard.xp
    mapping, z = out.inner()
    index = invert(apply(mapping, z), u, xp)
    ids = _array.counts(out.small.ids(), xp)
    found = xp.take_along_axis(ids, xp.where(index < 0, xp.zeros_like(index), index), axis=-1)
    return xp.where(index < 0, -xp.ones_like(found), found)


def _of_shards(out: Solved, u: Array, wide: Any) -> Array:
    """First choose the process by its mass; that process then finds the class."""
    shard, xp = out.shard, out.shard.xp
    p = xp.where(out.poisoned, xp.zeros_like(shard.rows), out.p())
    if out.whole is not None:  # the sums of all processes are known
        share = xp.exp(
            stop_gradient(xp.where(xp.isfinite(out.met.columns[0]), out.met.columns[0], -math.inf) - out.high)
        )
        masses = xp.astype(share * (1.0 + out.met.columns[1]), wide)
    else:
        masses = out.met.stack(total(xp.astype(p, wide), xp))  # in the order of the classes
    upto = xp.cumulative_sum(masses, axis=0) if not _array.is_torch(masses) else masses.cumsum(0)
    level, whole = u * upto[-1], upto[-1]
    before = out.met.mine(upto) - out.met.mine(masses)
    here = (level >= before) & (level < out.met.mine(upto)) & (whole > 0)
    mass = out.met.mine(masses)
    inside = (level - before) / xp.where(mass > 0, mass, xp.ones_like(mass))
    one = 1.0 - float(xp.finfo(wide).eps)
    inside = xp.where(inside < 0, xp.zeros_like(inside), xp.where(inside < one, inside, one * xp.ones_like(inside)))
    index = invert(p, inside, xp)
    told = xp.where(
        here & (index >= 0), _array.counts(index, xp) + out.met.start + 1, xp.zeros_like(_array.counts(index, xp))
    )
    return xp.max(out.met.stack(told), axis=0) - 1
