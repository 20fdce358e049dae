"""Output layers whose classes are split over processes: some rows at a time, computed again for the gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import _array
from .._array import Array, Namespace, is_array, namespace, upcast
from .._core.classes import PADDING
from .._core.mapping import no_threshold, over_all
from .._core.shards import refuse as refuse_sharded
from ..autodiff import bridge
from ..autodiff.agreement import Agreement, described, fail_together
from ..autodiff.group import Group
from ..functional.draws import check_draw
from ..likelihood.divergence import read_beta
from ..likelihood.support import is_pair, pair_of
from ..likelihood.teacher import Teacher
from ..linear.arguments import (
    FULL_WITHOUT_SUPPORT,
    check_support,
    elementwise,
    indices_of_rows,
    temperature_of_rows,
)
from ..linear.bridge import joined
from ..linear.divergences import check_pair, rows_that_count
from ..linear.job import loss_of
from ..linear.layer import Layer, check_chunk
from ..losses.options import LossOptions
from ..losses.penalties import RowPenalties
from ..losses.targets import holds_indices
from ..thresholds import Threshold
from ..transforms.base import Transform, check_range
from .call import Arguments, ShardedCall, message_of
from .losses import Loss, losses_of_call, target_is
from .per_row import GivenClasses, SupportPart, divergence_of_calls, terms_of_call, threshold_of_call
from .shard import Places

_SCORES = 1 << 22  # scores that a process holds at a time
_INSTEAD = "give mask=, or the classes that it leaves as support= where there is one"
_PARTS = 16  # parts in a JAX program, which contains the code of each part


class LayerOperands(NamedTuple):
    """The operands and options that all verbs of output layers share, beside those of `Arguments`; not yet checked."""

    weight: Any
    bias: Any
    chunk: Any
    transform: Any = None
    temperature: Any = None


@dataclasses.dataclass(frozen=True)
class SplitLayer:
    """An output layer whose classes are split over processes that have compared their calls."""

    agreement: Agreement
    layer: Layer
    temperature: Any  # divides the scores: a number, or [rows, 1]
    transforms: tuple[Transform, ...]  # of the scores after that
    start: int | None  # the index of this process's first class
    count: int  # of all classes
    most: int  # of the classes of a process
    chunk: int | None  # how many classes to compute at a time, if the caller says it

    @classmethod
    def agreed(cls, arguments: Arguments, agreement: Agreement, layer: Layer, of_layer: LayerOperands) -> SplitLayer:
        """The first collective of a call, in which the processes compare what the caller has told `agreement`."""
        who, shared, n = agreement.who, agreement.group, layer.classes
        chunk = check_chunk(who, of_layer.chunk)
        temperature = _temperature(who, of_layer.temperature, layer, namespace(layer.x))
        transforms = elementwise(who, of_layer.transform, "the scores of a row are on several processes", _INSTEAD)
        call = ShardedCall.of(agreement, layer.mapping, layer.x, -1, None, arguments.class_start, arguments.class_count)
        call = dataclasses.replace(call, temperature=temperature, transforms=transforms)
        places = Places.equal(shared, n, call.hides)
        if shared.strict:
            agreement.say(chunk=chunk, x=f"{layer.x.shape[-1]} features, {described(layer.x)}")
            places = call.agree(n)
        sizes, count = places.sizes, arguments.class_count
        if count is not None and count != sum(sizes):
            raise ValueError(f"{who}: class_count={count}, but the processes have {sum(sizes)} classes")
        start = places.start if shared.strict else None
        return cls(agreement, layer, temperature, transforms, start, sum(sizes), max(sizes), chunk)

    def support(self, index: Array, support: Any) -> SupportPart:
        """This process's part of the support of the rows, whose targets are `index` [rows, 1]."""
        layer, shared = self.layer, self.agreement.group
        start = layer.classes * shared.rank if self.start is None else self.start
        xp = namespace(layer.x)
        return SupportPart.of(self.agreement.who, layer, index, support, start, self.count, shared.strict, xp)

    def by_rows(
        self, columns: int, of_rows: Callable[..., Any], kept: SupportPart | None = None, reference: Layer | None = None
    ) -> Any:
        """`of_rows(call, where)`, a group of rows at a time, joined along the first axis. columns: how many it sends first.

        kept: the part of a support whose scores alone are computed. reference: another layer over the same rows and classes, whose call
        is the second argument of `of_rows`.
        """
        who, shared, layer, xp = self.agreement.who, self.agreement.group, self.layer, namespace(self.layer.x)
        start, count = (self.start, self.count if shared.strict else None) if kept is None else (None, None)
        rows = layer.rows
        step = _rows_at_a_time(rows, self.most if kept is None else kept.width, self.chunk, shared)
        layers = [dataclasses.replace(each, x=shared.vary(each.x)) for each in (layer, reference) if each is not None]

        def rows_from(begin: int) -> Any:
            where = slice(begin, min(begin + step, rows))
            count_of = where.stop - begin
            parts = [
                Agreement(who, shared, each.x, message_of(count_of, 2 + columns, each.x) if shared.strict else None)
                for each in layers
            ]

            def call_of(layer: Layer, part: Agreement) -> ShardedCall:
                these = layer.rows_at(where)
                scores = these.scores() if kept is None else kept.part(where).scores(these, xp)
                call = ShardedCall.of(part, these.mapping, scores, -1, None, start, count)
                per_row = is_array(self.temperature) and self.temperature.ndim
                t = self.temperature[where, ...] if per_row else self.temperature
                return dataclasses.replace(call, temperature=t, transforms=self.transforms)

            return fail_together(parts[0], lambda: of_rows(*map(call_of, layers, parts), where))

        again = bridge(layer.x).recomputed(rows_from) if rows > step else rows_from
        # without rows too, so that every parameter has a gradient, of zeros
        return joined([again(begin) for begin in range(0, max(rows, 1), step)])


def linear_loss(
    arguments: Arguments,
    agreement: Agreement,
    of_layer: LayerOperands,
    target: Any,
    weight: Any,
    z_loss: Any,
    suppress: Any,
    options: dict[str, Any],
) -> Any:
    """The loss of the scores `x @ linear_weight.T`."""
    who = agreement.who
    read = LossOptions.read(who, weight, options)
    layer = _layer(arguments, of_layer)
    mapping = over_all(layer.mapping)
    penalties = RowPenalties.read(who, mapping, mapping is not layer.mapping, z_loss, suppress)
    xp, lead, n, rows = namespace(layer.x), layer.lead, layer.classes, layer.rows
    refuse_sharded(who, None, target=target)
    target = _array.beside(target, layer.x, "target", xp)
    soft = not holds_indices(target, (*lead, n), -1, f"{who}: target", part=True)
    penalties.need_indices(who, target)
    if agreement.group.strict:
        agreement.say(**read.words(), **penalties._asdict())
        target_is(agreement, target, xp)
    split = SplitLayer.agreed(arguments, agreement, layer, of_layer)
    target = xp.reshape(target, (rows, n) if soft else (rows,))
    loss = Loss.of(loss_of(mapping), read, layer.mapping, layer.x, target, penalties)
    value, norm = split.by_rows(len(loss.sent), lambda call, where: losses_of_call(call, loss, target[where, ...]))
    return read.reduce(xp.reshape(value, lead), xp.reshape(norm, lead), layer.dtype, xp)


def log_prob(
    arguments: Arguments,
    agreement: Agreement,
    of_layer: LayerOperands,
    target: Any,
    entropy: bool,
    support: Any = None,
    full: bool = False,
) -> list[tuple[Array, Array | None]]:
    """log p of the class of each row, and on request the entropy: over the support if there is one, then, if asked, over all classes."""
    who = agreement.who
    if full and support is None:
        raise ValueError(f"{who}: {FULL_WITHOUT_SUPPORT}")
    check_support(who, support, arguments.mask, of_layer.transform)
    layer = _layer(arguments, of_layer)
    xp = namespace(layer.x)
    target = _array.counts(indices_of_rows(who, target, layer, xp), xp)
    agreement.same["target"] = target
    agreement.say(full=full)
    support = _support(agreement, layer, support)
    split = SplitLayer.agreed(arguments, agreement, layer, of_layer)
    index = xp.reshape(target, (layer.rows, 1))
    parts = [None] if support is None else [split.support(index, support), *([None] if full else [])]
    pairs = []
    for kept in parts:
        columns = _terms(split, "target", index, kept, entropy=entropy, hidden=True)
        log_p, *h = (xp.reshape(columns[:, i], layer.lead) for i in range(1 + entropy))
        pairs.append((log_p, xp.where(target == PADDING, xp.zeros_like(h[0]), h[0]) if entropy else None))
    return pairs


def threshold(arguments: Arguments, agreement: Agreement, of_layer: LayerOperands) -> Threshold:
    """tau of each row, and the number of classes with a probability."""
    layer = _layer(arguments, of_layer)
    if not layer.mapping.has_threshold:
        raise TypeError(no_threshold(layer.mapping))
    split, xp = SplitLayer.agreed(arguments, agreement, layer, of_layer), namespace(layer.x)
    tau, size = split.by_rows(0, lambda call, where: tuple(threshold_of_call(call)))
    return Threshold(upcast(xp.reshape(tau, layer.lead), xp), xp.reshape(size, layer.lead))


def topk_kl(
    arguments: Arguments,
    agreement: Agreement,
    of_layer: LayerOperands,
    ids: Any,
    teacher_log_p: Any,
    tail: Any,
    direction: Any,
) -> Array:
    """The divergence of each row from the k classes of a teacher, counted over all processes."""
    who = agreement.who
    layer = _layer(arguments, of_layer)
    xp, lead = namespace(layer.x), layer.lead
    refuse_sharded(who, None, ids=ids, teacher_log_p=teacher_log_p)
    agreement.say(tail=tail, direction=direction)
    for name, a in (("ids", ids), ("teacher_log_p", teacher_log_p)):
        a = agreement.same[name] = _array.beside(a, layer.x, name, xp)
        agreement.say(**{name: f"{described(a)} of {a.dtype}"})
    split = SplitLayer.agreed(arguments, agreement, layer, of_layer)
    # all processes have the same ids and log_p by now, so what is wrong with them is the same error on all
    ids, teacher_log_p = agreement.same["ids"], agreement.same["teacher_log_p"]
    teacher = Teacher.read(who, layer.x, lead, split.count, -1, ids, teacher_log_p, tail, direction, xp)
    k = teacher.ids.shape[-1]
    columns = _terms(split, "ids", xp.reshape(teacher.ids, (layer.rows, k)), rest=teacher.needs_rest)
    return teacher.of_columns(xp.reshape(columns, (*lead, columns.shape[-1])), xp)


def kl(
    arguments: Arguments,
    agreement: Agreement,
    of_layer: LayerOperands,
    x_ref: Any,
    of_reference: LayerOperands,
    where: Any,
    support: Any,
    direction: Any,
    beta: Any,
    reduction: Any,
) -> Array:
    """The divergence of each row from the same row of another layer, or their sum or mean."""
    who = agreement.who
    check_support(who, support, arguments.mask, of_layer.transform)
    beta, options = read_beta(who, direction, beta), LossOptions.read(who, None, {"reduction": reduction})
    layer = _layer(arguments, of_layer)
    check_draw(layer.mapping, who)
    xp, lead = namespace(layer.x), layer.lead
    refuse_sharded(who, None, x_ref=x_ref, linear_weight_ref=of_reference.weight)
    x_ref = _array.beside(x_ref, layer.x, "x_ref", xp)
    reference = _layer(arguments._replace(who=f"{who}, of the reference", x=x_ref), of_reference)
    check_pair(who, layer, reference)
    there = rows_that_count(who, where, layer, xp)
    if there is not None:
        agreement.same["where"] = there
        layer, reference = (each.with_rows(there, xp) for each in (layer, reference))
    agreement.say(
        beta=beta, reduction=options.reduction, where="not given" if there is None else "given",
        x_ref=f"{x_ref.shape[-1]} features, {described(x_ref)}",
    )  # fmt: skip
    support = _support(agreement, layer, support)
    split = SplitLayer.agreed(arguments, agreement, layer, of_layer)
    none = _array.counts(xp.zeros((layer.rows, 1), dtype=xp.int32, **_array.device_of(layer.x)), xp)
    kept = None if support is None else split.support(none, support)
    reference = dataclasses.replace(reference, mapping=layer.mapping)
    of_rows = lambda call, other, where: divergence_of_calls(call, other, beta)  # noqa: E731
    value = split.by_rows(0, of_rows, kept, reference)
    counted = xp.ones_like(value)
    if there is not None:
        counted = xp.astype(there, value.dtype)
        value = xp.where(there, value, xp.zeros_like(value))
    return options.reduce(xp.reshape(value, lead), xp.reshape(counted, lead), layer.dtype, xp)


def _support(agreement: Agreement, layer: Layer, support: Any) -> Any:
    """The support as arrays, which the processes compare; None if there is none."""
    who, xp = agreement.who, namespace(layer.x)
    agreement.say(support="not given")
    if support is None:
        return None
    given = dict(zip(("ids", "offsets"), support)) if is_pair(support) else {"support": support}
    refuse_sharded(who, None, **given)
    support = pair_of(who, layer.x, layer.rows, support, xp)
    agreement.same |= {"ids of the support": support[0], "offsets of the support": support[1]}
    agreement.say(support=" and ".join(f"{described(a)} of {a.dtype}" for a in support))
    return support


def _terms(
    split: SplitLayer, name: str, index: Array, kept: SupportPart | None = None, *, entropy: bool = False, rest: bool = False,
    hidden: bool = False,
) -> Array:  # fmt: skip
    """The terms of classes [rows, m], an argument of this name, as columns [rows, m + entropy + rest]; over a support if it is given."""
    xp, wanted = namespace(index), {"entropy": entropy, "rest": rest}

    def of_rows(call: ShardedCall, where: slice) -> Array:
        part = None if kept is None else kept.part(where)
        return terms_of_call(call, name, index[where, ...], kept=part, hidden=hidden, **wanted).columns(xp)

    return split.by_rows(GivenClasses.width(index.shape[-1], **wanted), of_rows, kept)


def _layer(arguments: Arguments, of_layer: LayerOperands) -> Layer:
    return Layer.of(
        arguments.who, arguments.x, of_layer.weight, arguments.mapping, of_layer.bias, arguments.mask, of_shard=True
    )


def _temperature(who: str, value: Any, layer: Layer, xp: Namespace) -> Any:
    """A number, or an array of one number or [rows, 1]."""
    if value is None:
        return 1.0
    check_range(who, "temperature", value, _array.ABOVE_0)
    value = _array.number(value)
    if not is_array(value):
        return value
    if math.prod(value.shape) == 1:
        value = _array.beside(value, layer.x, "temperature", xp)
        return xp.reshape(_array.nan_outside(value, _array.ABOVE_0), ())
    return temperature_of_rows(who, value, layer, xp)


def _rows_at_a_time(rows: int, classes: int, chunk: int | None, group: Group) -> int:
    """The rows of a part: the same number on every process, since all make the call of a part together.

    chunk: a part has as many scores as so many classes of all rows.
    """
    classes = max(1, classes)
    if chunk is not None:
        return max(1, min(rows, rows * chunk // classes))
    step = max(1, _SCORES // classes)
    return step if group.strict else max(step, -(-rows // _PARTS))
