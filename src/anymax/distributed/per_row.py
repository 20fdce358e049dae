"""Results with one or a few numbers per row: thresholds, smooth maxima, log p of given classes and the entropy, and samples."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from .. import _array
from .._array import (
    Array,
    Namespace,
    as_dtype,
    counts,
    device_of,
    is_integer,
    namespace,
    stop_gradient,
    take,
    total,
    upcast,
)
from .._core.classes import pads_row, refuse_strays
from .._core.mapping import missing_mass, no_threshold
from .._core.parameters import one_a_row
from .._core.rows import aligned, with_a_class
from .._random.draws import count_of, uniforms
from ..autodiff import bridge
from ..autodiff.agreement import Agreement, fail_together
from ..functional.draws import check_draw, one_draw, sum_of
from ..likelihood.divergence import divergence_sums, of_sums
from ..likelihood.softmax_plain import Terms, at_classes
from ..likelihood.support import padded, place_among, sized_support
from ..linear.layer import Layer
from ..thresholds import Threshold
from .call import Arguments, ShardedCall
from .methods import solve
from .shard import Shard, Shards, columns_of
from .solution import Columns, Solution
from .sums import Part, Sums

# -- thresholds ------------------------------------------------------------------------------------------------------------------


def threshold(arguments: Arguments, agreement: Agreement, keepdims: bool) -> Threshold:
    return threshold_of_call(arguments.call(agreement), keepdims)


def threshold_of_call(call: ShardedCall, keepdims: bool = False) -> Threshold:
    if not call.mapping.has_threshold:
        raise TypeError(no_threshold(call.mapping))

    def finish(out: Solution, _: None) -> Threshold:
        shards, shard, xp = out.shards, out.shards.shard, out.shards.xp
        tau, size = _array.poison(out.tau(), shards.poisoned, xp), out.support()
        size = xp.where(shards.poisoned, xp.zeros_like(size), size)
        return Threshold(shard.per_row(tau, keepdims), shard.per_row(size, keepdims))

    return solve(call, finish)


def logsumexp(arguments: Arguments, agreement: Agreement, temperature: Any, keepdims: bool) -> Array:
    call = arguments.call(agreement)
    temperature = _array.check_number(
        "logsumexp", "temperature", temperature, _array.AT_LEAST_0, "0 is the limit, the maximum"
    )
    tiny = float(namespace(call.x).finfo(_array.wide_dtype(call.x, namespace(call.x))).smallest_normal)
    if _array.is_array(temperature):
        temperature = _array.nan_outside(temperature, _array.AT_LEAST_0)
        cold = temperature < tiny
        warm = _array.safe(temperature, ~cold, 1.0, namespace(temperature))
    else:
        cold = bool(temperature < tiny)
        warm = 1.0 if cold else temperature
        agreement.say(limit="the maximum" if cold else "none")

    def finish(out: Sums, largest: Any) -> Array:
        shards, shard, xp = out.shards, out.shards.shard, out.shards.xp
        bad = xp.any(xp.isnan(shards.highs), axis=0)  # XLA's maximum of many rows may lose NaN
        strange = _array.poison(xp.max(shards.highs, axis=0), bad, xp)  # NaN, +inf, or -inf for a row without classes
        value = shard.temperature * (shards.high + out.log_z)
        if columns is not None:
            value = xp.where(columns.where_cold(shard), largest, value)
        return shard.per_row(xp.where(shards.poisoned | shards.empty, strange, value), keepdims)

    columns = None if cold is False else Largest(call, cold)
    return solve(dataclasses.replace(call, temperature=warm), finish, columns or Columns())


class Largest(Columns):
    """The maximum, the limit of a temperature of 0: how many scores of a process are its largest, and their sum."""

    count = 2

    def __init__(self, call: ShardedCall, cold: Any) -> None:
        self.call, self.cold = call, cold

    def where_cold(self, shard: Shard) -> Any:
        """True where the temperature is 0, [..., 1] or for all rows."""
        if not _array.is_array(self.cold):
            return shard.xp.ones_like(shard.rows[..., :1]) > 0
        return one_a_row(aligned(self.cold, shard.rows, self.call.axis, "temperature"), "temperature") > 0

    def first(self, shard: Shard, a: Array, anchor: Array) -> tuple[list[Array], None]:
        xp = shard.xp
        best = xp.isfinite(a) & (a == shard.high())
        zero = xp.zeros_like(a)
        scores = xp.where(best, a, zero)
        return [
            total(xp.astype(best, a.dtype), xp),
            total(xp.where(best, scores - stop_gradient(scores), zero), xp),
        ], None

    def summed(self, shards: Shards, state: None) -> Array:
        xp, (counts, sums) = shards.xp, shards.extra
        best = shards.highs == shards.high
        count, sums = (xp.sum(xp.where(best, part, xp.zeros_like(part)), axis=0) for part in (counts, sums))
        return shards.high + sums / xp.where(count > 0, count, xp.ones_like(count))


# -- log p of given classes ----------------------------------------------------------------------------------------------------------


def log_prob(arguments: Arguments, agreement: Agreement, target: Any, entropy: bool) -> tuple[Array, Array | None]:
    call = arguments.call(agreement)
    shape, lead, xp = tuple(getattr(target, "shape", ())), call.lead, namespace(call.x)
    first = len(shape) - len(lead)
    if first < 0 or shape[first:] != lead:
        raise ValueError(
            f"{call.who}: target of shape {shape}: expected one class for each row, of shape {lead}, or with axes of samples before these"
        )
    target = _array.beside(target, call.x, "target", xp)
    if not is_integer(target):
        raise TypeError(f"{call.who}: target must be class indices (integers), got {target.dtype}")
    target = _array.counts(target, xp)
    agreement.say(target=f"of shape {shape}")
    agreement.same["target"] = target
    index = xp.moveaxis(xp.reshape(target, (math.prod(shape[:first]), *lead)), 0, -1)
    terms = terms_of_call(call, "target", index, entropy=entropy, hidden=True)
    log_p, h = xp.reshape(xp.moveaxis(terms.log_p, -1, 0), shape), terms.entropy
    return log_p, None if h is None else xp.where(pads_row(index, xp), xp.zeros_like(h), h)[..., 0]


def terms_of_call(
    call: ShardedCall, name: str, index: Array, *, entropy: bool = False, rest: bool = False, kept: SupportPart | None = None,
    hidden: bool = False,
) -> Terms:  # fmt: skip
    """log p of the classes `index` [..., m], an argument of this name, and on request the entropy and log p of all other classes.

    kept: the scores of the call are those of this part of a support. hidden: -1 is the class that the map hides, if it hides one.
    """
    check_draw(call.mapping, call.who)
    hidden = hidden and call.hides

    def finish(out: Solution, places: tuple[Array, Array]) -> Terms:
        shards, xp = out.shards, out.shards.xp
        count = shards.count if kept is None else kept.count
        stray = refuse_strays(f"{call.who}: {name}", index, count, None, xp, hides=hidden, pads=True)
        terms = out.log_prob(*places, entropy=entropy, rest=rest)
        log_p = xp.where(index < (-1 if hidden else 0), xp.zeros_like(terms.log_p), terms.log_p)
        terms = terms._replace(log_p=_array.poison(log_p, stray, xp))
        return Terms(*(None if part is None else _array.poison(part, shards.poisoned, xp) for part in terms))

    return solve(call, finish, GivenClasses(call, index, kept, hidden, entropy=entropy, rest=rest))


class GivenClasses(Columns):
    """Classes of each row: the distance of each from the maximum, and 1, on its process; then any part of the entropy; then the maximum
    of all other classes, and the sum of their exponentials as `Part` has it."""

    def __init__(
        self, call: ShardedCall, index: Array, kept: SupportPart | None, hidden: bool, *, entropy: bool, rest: bool
    ) -> None:
        """index: [..., m], counted over all processes; below 0 for no class, but -1 for the class that the map hides if `hidden` is true.

        kept: as in `terms_of_call`.
        """
        self.call, self.index, self.kept, self.hidden = call, index, kept, hidden
        self.entropy, self.rest = entropy, rest
        self.indices = kept is None
        self.count = self.width(index.shape[-1], entropy=entropy, rest=rest)

    @staticmethod
    def width(m: int, *, entropy: bool, rest: bool) -> int:
        """The count of columns for m classes."""
        return 2 * m + entropy + 2 * rest

    def first(self, shard: Shard, a: Array, anchor: Array) -> tuple[list[Array], tuple[Array, Array]]:
        xp = shard.xp
        if self.kept is None:
            here, at = shard.place(self.index, self.hidden)
        else:
            here, at = self.kept.here & (self.index >= 0), self.kept.at
            at = xp.where(here, at, xp.zeros_like(at))
            here, at = shard.place_hidden(self.index, here, at) if self.hidden else (here, at)
        score = xp.take_along_axis(a, at, axis=-1)
        there = here & (score != -math.inf)
        gap = xp.where(
            there, anchor - xp.where(there, score, anchor), xp.where(here, math.inf, 0.0) * xp.ones_like(score)
        )
        columns = [gap, xp.astype(here, a.dtype)]
        if self.entropy:
            keep = xp.isfinite(a)
            below = xp.where(keep, anchor - xp.where(keep, a, anchor), xp.zeros_like(a))
            columns.append(total(xp.where(keep, xp.exp(-below), xp.zeros_like(a)) * below, xp))
        if self.rest:
            at_class = at_classes(xp.where(here, at, a.shape[-1] * xp.ones_like(at)), a, xp)
            others = Part.of(xp.where(at_class, -math.inf * xp.ones_like(a), a), xp)
            columns += [others.high, others.rest]
        return columns, (here, at)


# -- divergences ---------------------------------------------------------------------------------------------------------------------


def divergence_of_calls(call: ShardedCall, other: ShardedCall, beta: float) -> Array:
    """The divergence between two calls over the same rows and classes, [...], that of `divergence_rows`."""

    def finish(s: Solution, _: None) -> Array:
        of_other = lambda: solve(other, lambda t, _: _divergence(s, t, beta))  # noqa: E731
        return fail_together(other.agreement, of_other)

    return solve(call, finish)


def _divergence(s: Solution, t: Solution, beta: float) -> Array:
    shards, xp, group, draw = s.shards, s.xp, s.shard.group, one_draw(s.shard.local)
    poisoned = shards.poisoned | t.shards.poisoned
    log_p = [xp.where(poisoned, xp.zeros_like(a), a) for a in (s.log_p(), as_dtype(t.log_p(), s.shard.rows.dtype, xp))]
    scores = [as_dtype(out.shard.rows, s.shard.rows.dtype, xp) for out in (s, t)]
    none = None
    if draw != "p":
        masses = shards.collect([total(xp.exp(a), xp) for a in log_p])
        masses = [xp.sum(a, axis=0) for a in masses]
        if draw == "share":
            log_p = [a - group.vary(xp.log(sum_of(mass, xp))) for a, mass in zip(log_p, masses)]
        else:  # a draw of none of the classes is one more outcome
            none = [_array.log(missing_mass(mass, 1.0, xp), xp) for mass in masses]
    columns = divergence_sums((log_p[0], log_p[1]), (scores[0], scores[1]), beta, xp, always=True)
    sums = [xp.sum(a, axis=0) for a in shards.collect([total(a, xp) for a in columns])]
    if none is not None:
        zero = xp.zeros_like(none[0])
        sums = [a + b for a, b in zip(sums, divergence_sums((none[0], none[1]), (zero, zero), beta, xp, always=True))]
    return _array.poison(of_sums(sums, beta, xp), poisoned, xp)[..., 0]


# -- samples -------------------------------------------------------------------------------------------------------------------------


def sample(arguments: Arguments, agreement: Agreement, generator: Any, num_samples: int | None) -> Array:
    call, size = arguments.call(agreement).constant(), count_of(num_samples)
    check_draw(call.mapping, "sample")
    agreement.say(num_samples=num_samples)

    def finish(out: Solution, _: None) -> Array:
        shards, shard, xp = out.shards, out.shards.shard, out.shards.xp
        dtype = uniforms(shard.rows[..., :1][:0], 0, 0, xp).dtype
        u = [xp.astype(shards.extra[i][0], dtype) + xp.astype(shards.extra[size + i][0], dtype) for i in range(size)]
        u = xp.concat(u, axis=-1) if u else xp.zeros((*shard.rows.shape[:-1], 0), dtype=dtype, **device_of(shard.rows))
        u = xp.where(u < 1.0, u, (1.0 - float(xp.finfo(dtype).eps)) * xp.ones_like(u))
        index = out.draw(u)
        # the hidden class is the last
        index = xp.where(shards.poisoned | (index >= shards.count), -xp.ones_like(index), index)
        return index[..., 0] if num_samples is None else xp.moveaxis(index, -1, 0)

    return solve(call, finish, Uniforms(size, generator))


class Uniforms(Columns):
    """Uniform numbers, each as two parts that the dtype of the scores can hold; those of the first process are used."""

    def __init__(self, size: int, generator: Any) -> None:
        self.size, self.generator, self.count = size, generator, 2 * size

    def first(self, shard: Shard, a: Array, anchor: Array) -> tuple[list[Array], None]:
        u = uniforms(shard.rows, self.size, self.generator, shard.xp)
        high = shard.xp.astype(u, a.dtype)
        low = shard.xp.astype(u - shard.xp.astype(high, u.dtype), a.dtype)
        return [*columns_of(high), *columns_of(low)], None


# -- the support of rows, of which each process gathers the scores of its own classes ------------------------------------------------


class SupportPart(NamedTuple):
    """The classes of each row's support that lie on this process, and the row's own class among them."""

    classes: Array  # [rows, width + 1], by their places on this process; the last one is empty
    there: Array  # True where there is one
    here: Array  # [rows, 1], True if the row's own class lies on this process
    at: Array  # [rows, 1], its place in `classes`: the last one if it is not in the support
    count: int  # of the classes of all processes
    width: int  # of the widest support of a row over all processes, and 1 more

    @classmethod
    def of(
        cls, who: str, layer: Layer, index: Array, support: Any, start: Any, count: int, known: bool, xp: Namespace
    ) -> SupportPart:
        """index: [rows, 1], counted over all processes. start: this process's first class. known: it is a number, as in torch."""
        n, (ids, offsets) = layer.classes, sized_support(who, layer.x, layer.rows, count, support, xp)
        # the same on all processes, as are its errors
        classes, there = padded(who, (layer.rows,), count, ids, offsets, xp)
        width = classes.shape[-1]
        classes, local = classes - start, index - start
        there = there & (classes >= 0) & (classes < n)
        if known:  # the classes of this process come first, and no more columns are gathered than it needs
            most = int(xp.max(total(counts(there, xp), xp))) if layer.rows else 0
            first = xp.argsort(~there, axis=-1, stable=True)[:, : most + 1]
            classes, there = take(classes, first, xp), take(there, first, xp)
        at = place_among(classes, there, local, xp)
        return cls(
            xp.where(there, classes, xp.zeros_like(classes)), there, (local >= 0) & (local < n), at, count, width
        )

    def part(self, where: slice) -> SupportPart:
        """The part of these rows."""
        rows = (self.classes[where, ...], self.there[where, ...], self.here[where, ...], self.at[where, ...])
        return SupportPart(*rows, self.count, self.width)

    def scores(self, layer: Layer, xp: Namespace) -> Array:
        """The scores of these classes, -inf where there is none; no other row of the weight has a gradient."""
        if not layer.classes:
            return with_a_class(upcast(layer.scores(), xp))
        s = bridge(layer.x).layers.gathered(layer, self.classes)
        return xp.where(self.there, s, -xp.inf * xp.ones_like(s))
