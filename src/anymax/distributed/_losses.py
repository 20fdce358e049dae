"""Losses over classes on several processes: `Omega*(x) - <x, y> + Omega(y)` and -log p. Each process has the targets of its classes.

With M the maximum of the row, `<M - x, y>` is a sum of terms that each process knows, and `Omega*(x) - M` is the loss of the small
problem whose target is the largest candidate. So no large numbers cancel, and the gradient p - y needs no collective.
"""

from __future__ import annotations

import math
from typing import Any

from .. import _array
from .._array import Array, Namespace, differentiates, dot, is_integer, namespace, stop_gradient, total
from ..autodiff import bridge
from ..losses.options import LossOptions, class_weights
from ..losses.targets import (
    holds_indices,
    not_below_zero,
    of_target,
    reduce_rows,
    refuse_negative,
    refuse_one_class,
    refuse_strays,
    refuse_sums,
    result_dtype,
    rounding,
    to_spread,
)
from ..losses.verbs import fenchel_young as whole_loss
from ._agree import Talk
from ._exponential import size_of
from ._shard import Asked, Shard, ShardedCall, place_of
from ._ways import Solved, solve

_EVERYWHERE = " over all processes"


def columns(options: LossOptions) -> int:
    """How many numbers per row each process sends about its targets."""
    return 4 + 3 * bool(options.label_smoothing)


class Aim:
    """The target as this process knows it: its columns in the first collective, and the sums of these over all processes."""

    def __init__(self, call: ShardedCall, target: Any, options: LossOptions) -> None:
        self.call, self.options, xp = call, options, namespace(call.x)
        self.nll = call.who == "nll"
        self.t = t = _array.beside(target, call.x, "target", xp)
        call.counted = self.indices = is_integer(t)
        if call.group.strict and not call.talk.agreed:
            say_options(call.talk, options)
            target_is(call.talk, t, xp)

    def read(self, shard: Shard, a: Array, anchor: Array) -> list[Array]:
        """<w y, anchor - a>, <w y, 1>, <y, 1> and the samples' weights; with smoothing the first two for 1 in place of y, over the classes
        that are not masked, and how many these are."""
        xp, options, x = shard.xp, self.options, self.call.x
        self.weight = w = None
        if options.weight is not None:
            w = class_weights(options.weight, shard.rows[..., : shard.n], xp)
            self.weight = w = w if shard.n else xp.zeros((1,), dtype=a.dtype, **place_of(a))
        keep, inside = a != -math.inf, w if self.nll else None
        t = self.t
        holds_indices(t, x.shape, shard.axis, part=True)
        one = xp.ones_like(anchor)
        if self.indices:
            y, own, at = self._index(shard, t, x)
            gap = anchor - xp.where(
                own & xp.take_along_axis(keep, at, axis=-1), xp.take_along_axis(a, at, axis=-1), anchor
            )
            lost = own & ~xp.take_along_axis(keep, at, axis=-1)
            wy = y if inside is None else y * inside[at]
            gap = xp.where(lost & (wy > 0), math.inf * one, gap * wy)
            columns = [gap, wy, y, y if w is None else y * w[at]]
        else:
            y = self.y = self._shares(shard, t, x)
            wy = y if inside is None else y * inside
            gap = xp.where(keep, anchor - xp.where(keep, a, anchor), math.inf * xp.ones_like(a))
            columns = [dot(wy, gap, xp), total(wy, xp), total(y, xp), total(y, xp) if w is None else dot(y, w, xp)]
        if options.label_smoothing:
            free = xp.astype(keep, a.dtype)
            wf = free if inside is None else free * inside
            gap = xp.where(keep, anchor - a, xp.zeros_like(a))
            columns += [total(wf * xp.where(keep, gap, xp.zeros_like(gap)), xp), total(wf, xp), total(free, xp)]
        return columns

    def _index(self, shard: Shard, t: Array, x: Any) -> tuple[Array, Array, Array]:
        """(1 if the class is on this process, the same as a boolean, its place), each [..., 1]."""
        xp = shard.xp
        self.t = t = _array.counts(t, xp)
        self.ignored = (t == self.options.ignore_index)[..., None]
        at = t[..., None] - self.call.first(shard)
        own = (at >= 0) & (at < shard.n) & ~self.ignored
        at = xp.where(own, at, xp.zeros_like(at))
        return xp.astype(own, shard.rows.dtype), own, at

    def _shares(self, shard: Shard, t: Array, x: Any) -> Array:
        xp = shard.xp
        refuse_negative(t, shard.mapping.mass, xp, _EVERYWHERE)
        y = _array.to_last(t if t.dtype == shard.rows.dtype else xp.astype(t, shard.rows.dtype), shard.axis, xp)
        lead = (*shard.rows.shape[:-1], 1)
        self.ignored = xp.zeros(lead, dtype=xp.bool, **place_of(shard.rows))  # common: it does not depend on the rows
        return y if shard.n else xp.zeros_like(shard.rows)

    def told(self, out: Solved) -> None:
        """The sums of the columns: `gap` is <w y, M - a>, `mass` is <w y, 1>."""
        xp, s = out.shard.xp, self.options.label_smoothing
        highs = out.met.columns[0]
        anchors = stop_gradient(xp.where(xp.isfinite(highs), highs, xp.zeros_like(highs)))
        below = out.high[None, ...] - anchors
        extra = out.extra

        def summed(i: int) -> tuple[Array, Array]:
            return xp.sum(extra[i] + extra[i + 1] * below, axis=0), xp.sum(extra[i + 1], axis=0)

        self.gap, self.mass = summed(0)
        self.whole, self.sample = xp.sum(extra[2], axis=0), xp.sum(extra[3], axis=0)
        self.stray = xp.zeros_like(self.ignored)
        if self.indices:
            self._check_range(out)
        else:
            self._check_sums(out)
        if s:
            gap, mass = summed(4)
            self.free = stop_gradient(xp.sum(extra[6], axis=0))
            spread = s * to_spread(out.shard.mapping, self.whole)
            share = spread / xp.where(self.free > 0, self.free, xp.ones_like(self.free))
            self.gap = (1.0 - s) * self.gap + share * gap
            self.mass = (1.0 - s) * self.mass + share * mass

    def _check_range(self, out: Solved) -> None:
        xp, n = out.shard.xp, out.met.count
        t = self.t[..., None]
        self.stray = refuse_strays("target", t, n, self.options.ignore_index, xp)
        if not self.nll:
            refuse_one_class(out.shard.mapping)

    def _check_sums(self, out: Solved) -> None:
        xp, mass = out.shard.xp, out.shard.mapping.mass
        if not self.nll and not _array.is_array(mass):
            refuse_sums(self.whole, mass, xp, _EVERYWHERE)

    # -- Omega(y) ----------------------------------------------------------------------------------------------------------------

    def smoothed(self, out: Solved) -> Array:
        """The target of this process's classes as a distribution, smoothed."""
        shard = out.shard
        xp, s = shard.xp, self.options.label_smoothing
        if self.indices:
            t = self.t[..., None] - self.call.first(shard)
            places = _array.positions(shard.rows, t.dtype, xp)
            y = xp.astype((places == t) & ~self.ignored & (places < shard.n), shard.rows.dtype)
        else:
            y = self.y
        if not s:
            return y
        free = xp.astype(shard.rows != -math.inf, y.dtype)
        learns = not self.indices and differentiates(self.y)
        whole = shard.group.own(self.whole) if learns else stop_gradient(self.whole)
        spread = s * to_spread(shard.mapping, whole)
        return (1.0 - s) * y + spread * free / xp.where(self.free > 0, self.free, xp.ones_like(self.free))

    def constants(self, out: Solved) -> list[Array]:
        """This process's part of Omega(y), as columns for the second collective."""
        smooth = bool(self.options.label_smoothing)
        mapping, xp = out.shard.mapping, out.shard.xp
        if (self.indices and not smooth) or self.call.who != "fenchel_young":
            return []
        refused = mapping.no_constant(smooth)
        if refused is not None:
            raise ValueError(refused)
        y = self.smoothed(out)
        terms = mapping.constant_terms(y, xp)
        self.apart = terms is not None
        if terms is not None:
            return terms
        most, n = max(out.met.sizes), out.shard.n
        none = xp.zeros((*y.shape[:-1], most - n), dtype=y.dtype, **place_of(y))
        y = xp.concat([y[..., :n], none], axis=-1)
        return [y[..., i : i + 1] for i in range(most)]

    def constant(self, out: Solved) -> Any:
        """Omega(y) from the parts of all processes."""
        mapping, xp = out.shard.common, out.shard.xp
        if not out.later:
            return 0.0
        if self.apart:
            return mapping.constant_of(out.later, xp)
        stacked, met = xp.concat(out.later, axis=-1), out.met  # of the processes, in the order of the classes
        parts = [stacked[i][..., : met.sizes[rank]] for i, rank in enumerate(met.order or range(len(met.sizes)))]
        return mapping.constant(xp.concat(parts, axis=-1), xp)

    # -- the end of every loss ---------------------------------------------------------------------------------------------------

    def reduce(self, out: Solved, value: Array) -> Array:
        xp, shard = out.shard.xp, out.shard
        dtype = result_dtype(xp.astype(shard.rows[..., :1], shard.dtype))
        poisoned = out.poisoned | self.stray
        return reduce_rows(self.options, value, poisoned, self.ignored, self.sample, self.indices, self.nll, dtype, xp)

    def not_below_zero(self, out: Solved, value: Array) -> Array:
        """Set losses that rounding made negative to 0; see `not_below_zero`."""
        xp, gap, mass = out.shard.xp, stop_gradient(self.gap), stop_gradient(self.mass)

        def bound() -> Array:  # the size of the terms, since |x - centre| <= (maximum - x) + (maximum - centre)
            size = 1.0 + gap / xp.where(mass == 0, xp.ones_like(mass), mass) + 2.0 * gap
            size = 1.0 + size * size_of(out.shard.common, out.shard.rows[..., :1], xp)  # `gap` is that of the exponents
            return rounding(size, mass, out.shard.common, out.met.count, xp)

        return not_below_zero(out.shard.common, value, ~(out.poisoned | self.stray | self.ignored), bound, xp)


# -- the two losses --------------------------------------------------------------------------------------------------------------------


def say_options(talk: Talk, options: LossOptions) -> None:
    """The options that must be the same on every process."""
    talk.say(
        weight="not given" if options.weight is None else "given", ignore_index=options.ignore_index,
        reduction=repr(options.reduction), label_smoothing=options.label_smoothing,
    )  # fmt: skip


def target_is(talk: Talk, t: Array, xp: Namespace) -> None:
    """The part of the target that must be the same on every process: all class indices, or the fact that it holds distributions."""
    if is_integer(t):
        talk.say(target=f"class indices of shape {tuple(t.shape)}")
        talk.same = "target", _array.counts(t, xp)
    else:
        talk.say(target=f"a part of distributions in {len(t.shape)} dimensions")


def loss(asked: Asked, talk: Talk, target: Any, weight: Any, given: dict[str, Any]) -> Array:
    call = asked.call(talk, classes_last=False)
    return loss_of_call(call, target, LossOptions.read(asked.who, weight, given))


def loss_of_call(call: ShardedCall, target: Any, options: LossOptions) -> Array:
    """The loss named by `call.who`: "nll", "fenchel_young", or the latter without Omega(y)."""
    if call.who != "nll" and not call.mapping.facts.has_potential:
        raise TypeError(call.mapping.no_potential())
    aim = Aim(call, target, options)

    def later(out: Solved) -> list[Array]:
        aim.told(out)
        if aim.nll:
            return [] if out.weights is None else [_log_terms(out, aim, _array.log(out.weights[0], out.shard.xp))]
        return aim.constants(out)

    def finish(out: Solved) -> Array:
        value = (
            _log_loss(out, aim) if aim.nll else aim.not_below_zero(out, _fenchel_young(out, aim) + aim.constant(out))
        )
        return aim.reduce(out, value)

    return solve(call, finish, columns(options), aim.read, later)


def _log_loss(out: Solved, aim: Aim) -> Array:
    """-<w y, log p>, [..., 1]."""
    if out.way == "sums":
        assert out.whole is not None
        return out.whole.log_z * aim.mass + aim.gap
    xp = out.shard.xp
    if out.weights is not None:
        return xp.sum(out.later[0], axis=0) + xp.log(out.weights[1]) * aim.mass
    return xp.sum(out.met.stack(_log_terms(out, aim, out.log_p())), axis=0)


def _log_terms(out: Solved, aim: Aim, log_p: Array) -> Array:
    """-<w y, log p> of this process's classes."""
    xp, y = out.shard.xp, aim.smoothed(out)
    y = y if aim.weight is None else y * aim.weight
    finite = log_p > -math.inf
    return -of_target(y, xp.where(out.poisoned, xp.zeros_like(log_p), log_p), finite, xp)


def _fenchel_young(out: Solved, aim: Aim) -> Array:
    """Omega*(x) - <x, y>, [..., 1]."""
    shard, xp = out.shard, out.shard.xp
    mapping: Any = shard.mapping
    if out.way == "sums":
        assert out.whole is not None
        return (out.whole.log_z * aim.mass + aim.gap) * size_of(shard.common, shard.rows[..., :1], xp)
    if out.level is not None:
        p = out.p()
        x = xp.where(xp.isfinite(shard.rows), shard.rows - out.high, xp.zeros_like(shard.rows))
        p = xp.where(out.poisoned, xp.zeros_like(p), p)
        part = mapping.loss(x, p, xp.zeros_like(p), xp)
        return xp.sum(out.met.stack(part), axis=0) + aim.gap
    mapping, z = out.inner()
    mass: Any = mapping.mass
    high = out.high
    if _array.is_array(mass) or mass != 1.0:  # a class index sums to 1, p does not: Omega*(x - M) itself
        shifted = z - high
        value = bridge(shifted).loss(mapping, shifted, xp.zeros_like(shifted)) + aim.gap
        # `M mass - M <y, 1>` is 0, but its derivative in a learned mass is not
        return value if not _array.is_array(mass) else value + high * (_array.like(mass, z, xp) - aim.mass)
    first = xp.argmax(stop_gradient(z), axis=-1)
    top = xp.take_along_axis(z, first[..., None], axis=-1)
    dead = ~xp.isfinite(stop_gradient(top))
    z = xp.where(dead, xp.zeros_like(z), z)  # a row without classes, or with NaN, gets its value at the end
    top = xp.where(dead, xp.zeros_like(top), top)
    value = whole_loss(mapping, z, first, axis=-1, reduction="none")[..., None]
    value = xp.where(dead, xp.zeros_like(value), value)
    return value + (top - stop_gradient(top)) + aim.gap
