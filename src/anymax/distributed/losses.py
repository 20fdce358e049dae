"""Losses over classes on several processes: `Omega*(x) - <x, y> + Omega(y)` and -log p. Each process has the targets of its classes.

With M the maximum of the row, `<M - x, y>` is a sum of terms that each process knows, and `Omega*(x) - M` is the loss of the small
problem whose target is the largest candidate. So no large numbers cancel, and the gradient p - y needs no collective.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from .. import _array
from .._array import (
    Array,
    Namespace,
    as_dtype,
    device_of,
    differentiates,
    dot,
    is_integer,
    namespace,
    stop_gradient,
    total,
)
from ..losses.options import LossKind, LossOptions, class_weights
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
from .agreement import Agreement
from .call import Arguments, ShardedCall
from .methods import solve
from .shard import Shard, Shards, columns_of
from .softmax import size_of
from .solution import Columns, Solution

_EVERYWHERE = " over all processes"


def width(options: LossOptions) -> int:
    """How many numbers per row each process sends about its targets."""
    return 4 + 3 * bool(options.label_smoothing)


class TargetSums(NamedTuple):
    """What all processes know of the targets of their rows after the first collective, [..., 1]."""

    shards: Shards
    gap: Array  # <w y, M - a>, with M the maximum of the exponents (or scores) a; y is smoothed in this and the next
    mass: Array  # <w y, 1>
    whole: Array  # <y, 1>
    sample: Array  # <y, w>, or <y, 1> without weights
    stray: Array  # True for an index that is not a class
    free: Any = None  # the number of unmasked classes, with label smoothing


class Target(Columns, ABC):
    """The target of a loss as this process knows it, and after the first collective its sums over all processes.

    y is the part of this process's classes, w their weights. The class weights belong inside the sums of `nll`; they multiply other losses.
    """

    ignored: Array  # [..., 1], common; set by `first`
    w: Array | None = None  # [n]; set by `first`
    sums: TargetSums  # set by `second`
    by_terms: bool = False  # set by `second`: it sends the terms of Omega(y), of which a sum suffices, and not y

    def __init__(self, call: ShardedCall, kind: LossKind, t: Array, options: LossOptions) -> None:
        self.call, self.kind, self.t, self.options = call, kind, t, options
        self.nll, self.count = kind == "nll", width(options)

    @staticmethod
    def of(call: ShardedCall, kind: LossKind, target: Any, options: LossOptions) -> Target:
        xp = namespace(call.x)
        t = _array.beside(target, call.x, "target", xp)
        if call.group.strict and not call.agreement.agreed:
            say_options(call.agreement, options)
            target_is(call.agreement, t, xp)
        return (ClassIndices if is_integer(t) else Distributions)(call, kind, t, options)

    @abstractmethod
    def _sums(self, shard: Shard, a: Array, anchor: Array, keep: Array, inside: Array | None) -> list[Array]:
        """This process's <w y, anchor - a>, <w y, 1>, <y, 1> and <y, w>, [..., 1]; `inside` is w where these are inside the loss."""

    @abstractmethod
    def _check(self, shards: Shards, whole: Array) -> Array:
        """Refuse a target that is out of range over all processes; return `stray`."""

    @abstractmethod
    def _here(self, shard: Shard) -> Array:
        """y, [..., n]."""

    def first(self, shard: Shard, a: Array, anchor: Array) -> list[Array]:
        """`_sums`; with smoothing also the first two for 1 in place of y, over the unmasked classes, and the number of these."""
        xp, options = shard.xp, self.options
        if options.weight is not None:
            w = class_weights(options.weight, shard.rows[..., : shard.n], xp)
            self.w = w if shard.n else xp.zeros((1,), dtype=a.dtype, **device_of(a))
        keep, inside = a != -math.inf, self.w if self.nll else None
        holds_indices(self.t, self.call.x.shape, shard.axis, part=True)
        columns = self._sums(shard, a, anchor, keep, inside)
        if options.label_smoothing:
            free = xp.astype(keep, a.dtype)
            wf = free if inside is None else free * inside
            gap = xp.where(keep, anchor - a, xp.zeros_like(a))
            columns += [total(wf * gap, xp), total(wf, xp), total(free, xp)]
        return columns

    def second(self, shards: Shards) -> list[Array]:
        """Take the sums; then this process's part of Omega(y)."""
        self.sums = self._summed(shards)
        return [] if self.nll else self._constants()

    def second_of_ratio(self, shards: Shards, v: Array) -> list[Array]:
        self.sums = self._summed(shards)
        return [self.terms(_array.log(v, shards.xp))]  # a ratio map has no loss but `nll`

    def _summed(self, shards: Shards) -> TargetSums:
        xp, s, extra = shards.xp, self.options.label_smoothing, shards.extra
        below = shards.high[None, ...] - shards.anchors

        def summed(i: int) -> tuple[Array, Array]:
            return xp.sum(extra[i] + extra[i + 1] * below, axis=0), xp.sum(extra[i + 1], axis=0)

        gap, mass = summed(0)
        whole, sample = xp.sum(extra[2], axis=0), xp.sum(extra[3], axis=0)
        stray = self._check(shards, whole)
        if not s:
            return TargetSums(shards, gap, mass, whole, sample, stray)
        even_gap, even_mass = summed(4)
        free = stop_gradient(xp.sum(extra[6], axis=0))
        spread = s * to_spread(shards.shard.mapping, whole)
        share = spread / xp.where(free > 0, free, xp.ones_like(free))
        gap = (1.0 - s) * gap + share * even_gap
        mass = (1.0 - s) * mass + share * even_mass
        return TargetSums(shards, gap, mass, whole, sample, stray, free)

    # -- the target of this process's classes as a distribution ------------------------------------------------------------------

    def _smoothed(self) -> Array:
        sums, s = self.sums, self.options.label_smoothing
        shard, xp = sums.shards.shard, sums.shards.xp
        y = self._here(shard)
        if not s:
            return y
        free = xp.astype(shard.rows != -math.inf, y.dtype)
        whole = shard.group.vary(sums.whole) if differentiates(y) else stop_gradient(sums.whole)
        spread = s * to_spread(shard.mapping, whole)
        return (1.0 - s) * y + spread * free / xp.where(sums.free > 0, sums.free, xp.ones_like(sums.free))

    def terms(self, log_p: Array) -> Array:
        """-<w y, log p> of this process's classes."""
        shards, y = self.sums.shards, self._smoothed()
        xp = shards.xp
        y = y if self.w is None else y * self.w
        finite = log_p > -math.inf
        return -of_target(y, xp.where(shards.poisoned, xp.zeros_like(log_p), log_p), finite, xp)

    def _constants(self) -> list[Array]:
        """This process's part of Omega(y), as columns for the second collective."""
        smooth, shards = bool(self.options.label_smoothing), self.sums.shards
        shard, xp = shards.shard, shards.xp
        if (self.indices and not smooth) or self.kind != "fenchel_young":
            return []
        refused = shard.mapping.no_constant(smooth)
        if refused is not None:
            raise ValueError(refused)
        y = self._smoothed()
        terms = shard.mapping.constant_terms(y, xp)
        self.by_terms = terms is not None
        if terms is not None:
            return terms
        most, n = max(shards.sizes), shard.n
        none = xp.zeros((*y.shape[:-1], most - n), dtype=y.dtype, **device_of(y))
        y = xp.concat([y[..., :n], none], axis=-1)  # all processes send as many
        return columns_of(y)

    # -- the results of a solution -----------------------------------------------------------------------------------------------

    def _constant(self, later: list[Array]) -> Any:
        """Omega(y) from the parts of all processes."""
        shards = self.sums.shards
        mapping, xp = shards.shard.common, shards.xp
        if not later:
            return 0.0
        if self.by_terms:
            return mapping.constant_of(later, xp)
        return mapping.constant(shards.joined(xp.concat(later, axis=-1)), xp)

    def _rounding(self) -> Array:
        """A bound of the terms' rounding, since |x - centre| <= (maximum - x) + (maximum - centre)."""
        shards, gap, mass = self.sums.shards, stop_gradient(self.sums.gap), stop_gradient(self.sums.mass)
        shard, xp = shards.shard, shards.xp
        size = 1.0 + gap / xp.where(mass == 0, xp.ones_like(mass), mass) + 2.0 * gap
        size = 1.0 + size * size_of(shard.common, shard.rows[..., :1], xp)  # `gap` is that of the exponents
        return rounding(size, mass, shard.common, shards.count, xp)

    def loss(self, out: Solution) -> Array:
        """The loss of each row, reduced."""
        sums, shards, shard, xp = self.sums, self.sums.shards, self.sums.shards.shard, self.sums.shards.xp
        poisoned = shards.poisoned | sums.stray
        if self.nll:
            value = out.nll(sums.gap, sums.mass, self.terms)
        else:
            value = out.fenchel_young(sums.gap, sums.mass) + self._constant(out.later)
            value = not_below_zero(shard.common, value, ~(poisoned | self.ignored), self._rounding, xp)
        dtype = result_dtype(xp.astype(shard.rows[..., :1], shard.dtype))
        return reduce_rows(self.options, value, poisoned, self.ignored, sums.sample, self.indices, self.nll, dtype, xp)


class ClassIndices(Target):
    """One class for each row, counted over all processes, and the same on each."""

    indices = True

    def _sums(self, shard: Shard, a: Array, anchor: Array, keep: Array, inside: Array | None) -> list[Array]:
        xp, one, w = shard.xp, shard.xp.ones_like(anchor), self.w
        self.t = t = _array.counts(self.t, xp)
        self.ignored = (t == self.options.ignore_index)[..., None]
        at = t[..., None] - self.call.first(shard)
        here = (at >= 0) & (at < shard.n) & ~self.ignored
        at = xp.where(here, at, xp.zeros_like(at))
        y, kept = xp.astype(here, shard.rows.dtype), xp.take_along_axis(keep, at, axis=-1)
        gap = anchor - xp.where(here & kept, xp.take_along_axis(a, at, axis=-1), anchor)
        wy = y if inside is None else y * inside[at]
        gap = xp.where(here & ~kept & (wy > 0), math.inf * one, gap * wy)
        return [gap, wy, y, y if w is None else y * w[at]]

    def _check(self, shards: Shards, whole: Array) -> Array:
        t = self.t[..., None]
        stray = refuse_strays("target", t, shards.count, self.options.ignore_index, shards.xp)
        if not self.nll:
            refuse_one_class(shards.shard.mapping)
        return stray

    def _here(self, shard: Shard) -> Array:
        xp, t = shard.xp, self.t[..., None] - self.call.first(shard)
        places = _array.positions(shard.rows, t.dtype, xp)
        return xp.astype((places == t) & ~self.ignored & (places < shard.n), shard.rows.dtype)


class Distributions(Target):
    """The part of a distribution for this process's classes."""

    def _sums(self, shard: Shard, a: Array, anchor: Array, keep: Array, inside: Array | None) -> list[Array]:
        xp, t, w = shard.xp, self.t, self.w
        refuse_negative(t, None if self.nll else shard.mapping.mass, xp, _EVERYWHERE)
        y = _array.to_last(as_dtype(t, shard.rows.dtype, xp), shard.axis, xp)
        lead = (*shard.rows.shape[:-1], 1)
        self.ignored = xp.zeros(lead, dtype=xp.bool, **device_of(shard.rows))  # common: it does not depend on the rows
        self.y = y = y if shard.n else xp.zeros_like(shard.rows)
        wy = y if inside is None else y * inside
        gap = xp.where(keep, anchor - xp.where(keep, a, anchor), math.inf * xp.ones_like(a))
        return [dot(wy, gap, xp), total(wy, xp), total(y, xp), total(y, xp) if w is None else dot(y, w, xp)]

    def _check(self, shards: Shards, whole: Array) -> Array:
        mass = shards.shard.mapping.mass
        if not self.nll and not _array.is_array(mass):
            refuse_sums(whole, mass, shards.xp, _EVERYWHERE)
        return shards.xp.zeros_like(self.ignored)

    def _here(self, shard: Shard) -> Array:
        return self.y


# -- the two losses --------------------------------------------------------------------------------------------------------------------


def say_options(agreement: Agreement, options: LossOptions) -> None:
    """The options that must be the same on every process."""
    agreement.say(
        weight="not given" if options.weight is None else "given", ignore_index=options.ignore_index,
        reduction=repr(options.reduction), label_smoothing=options.label_smoothing,
    )  # fmt: skip


def target_is(agreement: Agreement, t: Array, xp: Namespace) -> None:
    """The part of the target that must be the same on every process: all class indices, or the fact that it holds distributions."""
    if is_integer(t):
        agreement.say(target=f"class indices of shape {tuple(t.shape)}")
        agreement.same = "target", _array.counts(t, xp)
    else:
        agreement.say(target=f"a part of distributions in {len(t.shape)} dimensions")


def loss(
    arguments: Arguments, agreement: Agreement, kind: LossKind, target: Any, weight: Any, given: dict[str, Any]
) -> Array:
    call = arguments.call(agreement, classes_last=False)
    return loss_of_call(call, kind, target, LossOptions.read(arguments.who, weight, given))


def loss_of_call(call: ShardedCall, kind: LossKind, target: Any, options: LossOptions) -> Array:
    if kind != "nll" and not call.mapping.facts.has_potential:
        raise TypeError(call.mapping.no_potential())
    columns = Target.of(call, kind, target, options)
    return solve(call, columns.loss, columns)
