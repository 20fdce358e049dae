"""Losses over classes on several processes: `Omega*(x) - <x, y> + Omega(y)` and -log p. Each process has the targets of its classes.

With M the maximum of the row, `<M - x, y>` is a sum of terms that each process knows, and `Omega*(x) - M` is the loss of the small
problem whose target is the largest candidate. So no large numbers cancel, and the gradient p - y needs no collective.
"""

from __future__ import annotations

import functools
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
    wider,
)
from .._core.classes import refuse_strays
from .._core.mapping import Mapping, missing_mass, no_potential
from .._core.rows import hide
from .._core.typing import LossKind
from ..autodiff.agreement import Agreement
from ..functional.draws import check_draw
from ..losses.options import LossOptions, class_weights, result_dtype
from ..losses.penalties import NO_PENALTIES, LogSums, RowPenalties
from ..losses.targets import (
    Samples,
    each_row,
    has_constant,
    holds_indices,
    not_below_zero,
    of_target,
    refuse_above,
    refuse_more_than_room,
    refuse_negative,
    refuse_one_class,
    refuse_sums,
    room_below,
    smoothed,
)
from .call import Arguments, ShardedCall
from .methods import solve
from .shard import Shard, Shards, columns_of
from .solution import Columns, Solution
from .sums import Part, logsumexp, size_of

_EVERYWHERE = " over all processes"


class TargetColumns(NamedTuple):
    """What each process says first of the target of its classes, as columns [..., 1]; None for what the loss does not need.

    a: the exponents, or the scores. anchor: their maximum on this process. w: the class weights, 1 where they multiply the loss itself.
    """

    gap: Array  # <w y, anchor - a>
    mass: Array  # <w y, 1>
    target_sum: Array  # <y, 1>
    target_weight: Array  # <y, w> with the class weights of any loss; <y, 1> without
    even_gap: Any = None  # with label smoothing: `gap` and `mass` with 1 at each unmasked class in place of y
    even_mass: Any = None
    free: Any = None  # the number of these classes
    room: Any = None  # how much smoothing may give each of them, if p has upper bounds
    hidden_gap: Any = (
        None  # with a share of the hidden class, yet to be known: `gap` and `mass` with 1 there in place of y
    )
    hidden_mass: Any = None


class Loss(NamedTuple):
    """Which loss a call computes, read once."""

    kind: LossKind
    options: LossOptions
    penalties: RowPenalties
    bounded: bool  # targets above the upper bounds of classes are refused
    has_hidden_share: bool  # a class that the map hides has what a distribution leaves

    @classmethod
    def of(
        cls, kind: LossKind, options: LossOptions, mapping: Mapping, x: Array, target: Array, penalties: RowPenalties = NO_PENALTIES
    ) -> Loss:  # fmt: skip
        bounded = kind != "nll" and mapping.ceiling(x, namespace(x)) is not None
        return cls(kind, options, penalties, bounded, mapping.hidden is not None and not is_integer(target))

    @property
    def sent(self) -> tuple[str, ...]:
        """The fields of `TargetColumns` that each process sends."""
        names: tuple[str, ...] = ("gap", "mass", "target_sum", "target_weight")
        if self.options.smoothing:
            names += ("even_gap", "even_mass", "free", *(("room",) if self.bounded else ()))
        return names + (("hidden_gap", "hidden_mass") if self.has_hidden_share else ())


class TargetPart(NamedTuple):
    """What a target and its options say of this process's classes."""

    y: Array  # like the rows, or class indices [..., 1]
    w: Array | None  # the class weights, as many as the classes of the rows
    ignored: Array  # [..., 1], common


class TargetSums(NamedTuple):
    """What all processes know of the targets of their rows after the first collective, [..., 1], with the parts of this one."""

    part: TargetPart
    shards: Shards
    gap: Array  # <w y, M - a>, with M the maximum of the exponents (or scores) a; y is smoothed in this and the next
    mass: Array  # <w y, 1>
    target_sum: Array  # <y, 1>
    target_weight: Array  # <y, w>, or <y, 1> without weights
    stray: Array  # True for an index that is not a class
    free: Any = None  # the number of unmasked classes, with label smoothing
    constant: tuple[Array, ...] = ()  # this process's part of Omega(y), for the second collective
    by_terms: bool = False  # these are the terms of Omega(y), of which a sum suffices, and not y


class Target(Columns, ABC):
    """The target of a loss as this process knows it. The class weights belong inside the sums of `nll`; they multiply other losses."""

    def __init__(self, call: ShardedCall, loss: Loss, t: Array) -> None:
        self.call, self.t, self.sent, self.hides = call, t, loss.sent, call.hides
        self.kind, self.options, self.penalties, self.bounded, self.has_hidden_share = loss
        self.nll, self.count = loss.kind == "nll", len(self.sent)

    @staticmethod
    def of(call: ShardedCall, loss: Loss, target: Array) -> Target:
        if loss.kind == "nll":
            check_draw(call.mapping, call.who)
        elif not call.mapping.facts.has_potential:
            raise TypeError(no_potential(call.mapping))
        return (ClassIndices if is_integer(target) else Distributions)(call, loss, target)

    @abstractmethod
    def _sums(
        self, shard: Shard, a: Array, anchor: Array, keep: Array, w: Array | None, inside: Array | None
    ) -> tuple[TargetColumns, TargetPart]:
        """The columns that every loss needs. inside: w where it is inside the loss."""

    @abstractmethod
    def _check(self, part: TargetPart, shards: Shards, target_sum: Array) -> Array:
        """Refuse a target that is out of range over all processes; return `stray`."""

    @abstractmethod
    def _here(self, part: TargetPart, shard: Shard) -> Array:
        """y, like the rows."""

    def first(self, shard: Shard, a: Array, anchor: Array) -> tuple[list[Array], TargetPart]:
        xp, options, w = shard.xp, self.options, None
        if options.weight is not None:
            w = class_weights(options.weight, shard.rows[..., : shard.n], xp)
            w = wider(w, shard.rows.shape[-1], 1.0, xp)  # the hidden class has the weight 1
        keep, inside = a != -math.inf, w if self.nll else None
        holds_indices(self.t, self.call.x.shape, shard.axis, part=True)
        columns, part = self._sums(shard, a, anchor, keep, w, inside)
        if options.smoothing:
            free = xp.astype(keep, a.dtype)
            of_class = free if inside is None else free * inside
            even = total(of_class * xp.where(keep, anchor - a, xp.zeros_like(a)), xp), total(of_class, xp)
            columns = columns._replace(even_gap=even[0], even_mass=even[1], free=total(free, xp))
        if self.bounded and options.smoothing:
            room = room_below(options, self._here(part, shard), keep, shard.local, xp)
            columns = columns._replace(room=room)
        elif self.bounded:
            y, poisoned = self._here(part, shard), xp.any(~(a < math.inf), axis=-1, keepdims=True)
            refuse_above(y, shard.local, xp, left_out=(y > 0) & ~keep | part.ignored | poisoned)
        if self.has_hidden_share:
            gap, mass = _of_hidden(shard, a, anchor)
            columns = columns._replace(hidden_gap=gap, hidden_mass=mass)
        return [getattr(columns, name) for name in self.sent], part

    def summed(self, shards: Shards, state: TargetPart) -> TargetSums:
        xp, mapping, part = shards.xp, shards.shard.local, state
        columns = TargetColumns(**dict(zip(self.sent, shards.extra)))
        below = shards.high[None, ...] - shards.anchors

        def over_processes(gap: Array, mass: Array) -> tuple[Array, Array]:
            """Both over all classes, with the gap below the maximum of the row."""
            return xp.sum(gap + mass * below, axis=0), xp.sum(mass, axis=0)

        gap, mass = over_processes(columns.gap, columns.mass)
        target_sum, target_weight = xp.sum(columns.target_sum, axis=0), xp.sum(columns.target_weight, axis=0)
        free = hidden_share = None
        stray = self._check(part, shards, target_sum)
        if self.has_hidden_share:
            gap_there, _ = over_processes(columns.hidden_gap, columns.hidden_mass)
            part, hidden_share = _complete(part, shards, target_sum)
            zero, there = xp.zeros_like(hidden_share), hidden_share > 0
            gap = gap + xp.where(there, hidden_share * xp.where(there, gap_there, zero), zero)
            mass = mass + hidden_share
            target_sum, target_weight = target_sum + hidden_share, target_weight + hidden_share
        if self.options.smoothing:
            free = stop_gradient(xp.sum(columns.free, axis=0))
            mix = functools.partial(smoothed, self.options, mapping, count=free, sums=target_sum, xp=xp)
            even_gap, even_mass = over_processes(columns.even_gap, columns.even_mass)
            gap, mass = mix(gap, even_gap), mix(mass, even_mass)
            if hidden_share is not None:
                hidden_share = mix(hidden_share, xp.ones_like(hidden_share))
            if self.bounded:
                above = mix(0.0, xp.ones_like(target_sum)) > xp.min(columns.room, axis=0)
                left_out = part.ignored | stray | shards.poisoned | (gap == math.inf)
                refuse_more_than_room(above & ~left_out, mapping, xp)
        if hidden_share is not None and not self.nll:
            refuse_above(hidden_share, shards.shard.shared, xp)
        sums = TargetSums(part, shards, gap, mass, target_sum, target_weight, stray, free)
        if self.kind != "fenchel_young" or not has_constant(mapping, self.indices, self.options):
            return sums
        y = self._smoothed(sums)
        constant = mapping.parts.constant
        if constant is not None:
            return sums._replace(constant=tuple(constant.terms(mapping, y, xp)), by_terms=True)
        y = wider(y[..., : shards.shard.columns], shards.places.most, 0.0, xp)  # all processes send as many
        return sums._replace(constant=tuple(columns_of(y)))

    def second(self, state: TargetSums, v: Array | None = None) -> list[Array]:
        # a ratio map has no loss but `nll`
        return list(state.constant) if v is None else [self._terms(state, _array.log(v, state.shards.xp))]

    # -- the target of this process's classes as a distribution ------------------------------------------------------------------

    def _smoothed(self, sums: TargetSums) -> Array:
        shard, xp = sums.shards.shard, sums.shards.xp
        y = self._here(sums.part, shard)
        if not self.options.smoothing:
            return y
        target_sum = shard.group.vary(sums.target_sum) if differentiates(y) else stop_gradient(sums.target_sum)
        free = xp.astype(shard.rows != -math.inf, y.dtype)
        return smoothed(self.options, shard.local, y, free, sums.free, target_sum, xp)

    def _terms(self, sums: TargetSums, log_p: Array) -> Array:
        """-<w y, log p> of this process's classes."""
        shards, w, y = sums.shards, sums.part.w, self._smoothed(sums)
        xp = shards.xp
        y = y if w is None else y * w
        finite = log_p > -math.inf
        return -of_target(y, xp.where(shards.poisoned, xp.zeros_like(log_p), log_p), finite, xp)

    # -- the results of a solution -----------------------------------------------------------------------------------------------

    def _constant(self, sums: TargetSums, out: Solution) -> Array:
        """Omega(y) from the parts of all processes."""
        shards, later = sums.shards, out.later
        mapping, xp = out.shared, shards.xp
        if sums.by_terms:
            constant = mapping.parts.constant
            assert constant is not None
            return constant.of(mapping, later, xp)
        return mapping.constant(shards.joined(xp.concat(later, axis=-1)), xp)

    def _check_sums(self, out: Solution, sums: TargetSums, left_out: Array) -> None:
        """Refuse a distribution whose sum is not that of p, where only the scores say what this is."""

    def loss(self, out: Solution, sums: TargetSums) -> Array:
        """The loss of all rows, reduced."""
        shard, xp = sums.shards.shard, sums.shards.xp
        dtype = result_dtype(xp.astype(shard.rows[..., :1], shard.dtype))
        return self.options.reduce(*self.each_row(out, sums), dtype, xp)

    def each_row(self, out: Solution, sums: TargetSums) -> tuple[Array, Array]:
        """(the loss of each row, what it counts in a mean)."""
        shards, shard, xp = sums.shards, sums.shards.shard, sums.shards.xp
        poisoned, ignored = shards.poisoned | sums.stray, sums.part.ignored
        if self.nll:
            value = out.nll(sums.gap, sums.mass, functools.partial(self._terms, sums))
        else:
            if not self.indices:
                self._check_sums(out, sums, ignored | poisoned)
            value = out.fenchel_young(sums.gap, sums.mass, functools.partial(self._smoothed, sums))
            value = value + self._constant(sums, out) if out.later else value
            terms = lambda: (sums.gap, sums.mass, size_of(shard.shared, shard.rows[..., :1], xp))  # noqa: E731
            value = not_below_zero(shard.shared, value, ~(poisoned | ignored), terms, shards.count, xp)
        if self.penalties:
            penalty = self.penalties.of(shards.empty, out.tau, lambda: self._log_sums(out, sums))
            # the weights multiply the whole loss of other maps in `each_row`
            value = value + (penalty * sums.target_weight if self.nll and self.options.weight is not None else penalty)
        samples = Samples(poisoned, ignored, sums.target_weight, self.indices)
        return each_row(self.options, value, samples, weighs=self.nll)

    def _log_sums(self, out: Solution, sums: TargetSums) -> LogSums:
        """What `RowPenalties` needs of each row, by one collective."""
        shards, a, xp = sums.shards, out.shard.rows, out.xp
        here = self._here(sums.part, out.shard) > 0
        counts = (stop_gradient(out.p()) != 0) | here
        parts = Part.of(a, xp), Part.of(hide(a, counts), xp)
        score = total(xp.where(here, stop_gradient(a), xp.zeros_like(a)), xp)
        score, *of_parts = shards.collect([score, *(column for part in parts for column in (part.high, part.rest))])
        zero = xp.zeros_like(shards.high)
        whole, kept = (logsumexp(high, rest, zero, xp) for high, rest in (of_parts[:2], of_parts[2:]))
        return xp.sum(score, axis=0), whole, kept


class ClassIndices(Target):
    """One class for each row, counted over all processes, and the same on each."""

    indices = True

    def _sums(
        self, shard: Shard, a: Array, anchor: Array, keep: Array, w: Array | None, inside: Array | None
    ) -> tuple[TargetColumns, TargetPart]:
        xp, one = shard.xp, shard.xp.ones_like(anchor)
        t = _array.counts(self.t, xp)[..., None]
        ignored = t == self.options.ignore_index
        here, at = shard.place(t, self.hides)
        here = here & ~ignored
        y, kept = xp.astype(here, shard.rows.dtype), xp.take_along_axis(keep, at, axis=-1)
        gap = anchor - xp.where(here & kept, xp.take_along_axis(a, at, axis=-1), anchor)
        wy = y if inside is None else y * inside[at]
        gap = xp.where(here & ~kept & (wy > 0), math.inf * one, gap * wy)
        return TargetColumns(gap, wy, y, y if w is None else y * w[at]), TargetPart(t, w, ignored)

    def _check(self, part: TargetPart, shards: Shards, target_sum: Array) -> Array:
        ignore_index = self.options.ignore_index
        stray = refuse_strays("target", part.y, shards.count, ignore_index, shards.xp, hides=self.hides)
        if not self.nll:
            refuse_one_class(shards.shard.local)
        return stray

    def _here(self, part: TargetPart, shard: Shard) -> Array:
        here, at = shard.place(part.y, self.hides)
        places = _array.positions(shard.rows, at.dtype, shard.xp)
        return shard.xp.astype((places == at) & here & ~part.ignored, shard.rows.dtype)


class Distributions(Target):
    """The part of a distribution for this process's classes."""

    @property
    def _has_sums(self) -> bool:
        """Whether the map says what a target sums to: for `nll` only if a class has what the others leave."""
        return not self.nll or self.hides

    def _sums(
        self, shard: Shard, a: Array, anchor: Array, keep: Array, w: Array | None, inside: Array | None
    ) -> tuple[TargetColumns, TargetPart]:
        xp, t = shard.xp, self.t
        refuse_negative(t, shard.caller.sums(None, xp) if self._has_sums else None, xp, _EVERYWHERE)
        y = _array.to_last(as_dtype(t, shard.rows.dtype, xp), shard.axis, xp)
        y = wider(y, shard.rows.shape[-1], 0.0, xp)
        lead = (*shard.rows.shape[:-1], 1)
        ignored = xp.zeros(lead, dtype=xp.bool, **device_of(shard.rows))  # common: it does not depend on the rows
        wy = y if inside is None else y * inside
        gap = xp.where(keep, anchor - xp.where(keep, a, anchor), math.inf * xp.ones_like(a))
        target_sum = total(y, xp)
        target_weight = target_sum if w is None else dot(y, w, xp)
        columns = TargetColumns(dot(wy, gap, xp), total(wy, xp), target_sum, target_weight)
        return columns, TargetPart(y, w, ignored)

    def _check(self, part: TargetPart, shards: Shards, target_sum: Array) -> Array:
        mapping, xp = shards.shard.caller, shards.xp
        # upper bounds may sum to less: `_check_sums` knows
        if self._has_sums and (self.hides or mapping.ceiling(shards.shard.rows, xp) is None):
            refuse_sums(target_sum, mapping.sums(None, xp), xp, _EVERYWHERE)
        return shards.xp.zeros_like(part.ignored)

    def _check_sums(self, out: Solution, sums: TargetSums, left_out: Array) -> None:
        lowest, highest = out.shared.sums(None, out.xp)
        if lowest is not highest or out.shared.ceiling(out.shard.rows, out.xp) is not None:
            refuse_sums(sums.target_sum, out.sums(), out.xp, _EVERYWHERE, left_out | (sums.gap == math.inf))

    def _here(self, part: TargetPart, shard: Shard) -> Array:
        return part.y


def _of_hidden(shard: Shard, a: Array, anchor: Array) -> tuple[Array, Array]:
    """`gap` and `mass` of this process with 1 at the hidden class in place of y."""
    xp, score = shard.xp, a[..., -1:]
    here = (xp.zeros_like(score) == 0) & shard.has_hidden
    keep = score != -math.inf
    gap = xp.where(keep, anchor - xp.where(keep, score, anchor), math.inf * xp.ones_like(score))
    return xp.where(here, gap, xp.zeros_like(gap)), xp.astype(here, a.dtype)


def _complete(part: TargetPart, shards: Shards, target_sum: Array) -> tuple[TargetPart, Array]:
    """(the part with the share of the hidden class, which completes the sum of a distribution; this share)."""
    shard, xp, y = shards.shard, shards.xp, part.y
    hidden_share = missing_mass(target_sum, shard.local.sums(None, xp)[1], xp)
    mine = shard.group.vary(hidden_share) if differentiates(y) else stop_gradient(hidden_share)
    here = (_array.positions(y, xp.int32, xp) == shard.n) & shard.has_hidden
    return part._replace(y=xp.where(here, mine, y)), hidden_share


# -- the losses ------------------------------------------------------------------------------------------------------------------------


def target_is(agreement: Agreement, t: Array, xp: Namespace) -> None:
    """The part of the target that must be the same on every process: all class indices, or the fact that it holds distributions."""
    if is_integer(t):
        agreement.say(target=f"class indices of shape {tuple(t.shape)}")
        agreement.same["target"] = _array.counts(t, xp)
    else:
        agreement.say(target=f"a part of distributions in {len(t.shape)} dimensions")


def loss(
    arguments: Arguments, agreement: Agreement, kind: LossKind, target: Any, weight: Any, keywords: dict[str, Any]
) -> Array:
    call = arguments.call(agreement, classes_last=False)
    options, xp = LossOptions.read(arguments.who, weight, keywords), namespace(call.x)
    target = _array.beside(target, call.x, "target", xp)
    if call.group.strict:
        agreement.say(**options.words())
        target_is(agreement, target, xp)
    columns = Target.of(call, Loss.of(kind, options, call.mapping, call.x, target), target)
    return solve(call, columns.loss, columns)


def losses_of_call(call: ShardedCall, loss: Loss, target: Array) -> tuple[Array, Array]:
    """(the loss of each row, what it counts in a mean)."""
    columns = Target.of(call, loss, target)
    return solve(call, columns.each_row, columns)
