"""Output layers whose classes are split over processes: some rows at a time, computed again for the gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, Namespace, device_of, is_array, namespace, upcast
from .._core.shards import refuse as refuse_sharded
from ..autodiff import bridge
from ..likelihood.teacher import Teacher
from ..linear.arguments import indices_of_rows, temperature_of_rows
from ..linear.layer import Layer, check_chunk
from ..linear.per_row import loss_of
from ..losses.options import LossOptions, class_weights
from ..losses.targets import counted_weight, holds_indices
from ..transforms.base import check_range
from .agreement import Agreement, fail_together
from .call import Arguments, ShardedCall, described, message_of
from .group import Group
from .losses import loss_of_call, say_options, target_is, width
from .per_row import GivenClasses, terms_of_call

_SCORES = 1 << 22  # scores that a process holds at a time
_PARTS = 16  # parts in a JAX program, which contains the code of each part


@dataclasses.dataclass(frozen=True)
class SplitLayer:
    """An output layer whose classes are split over processes that have compared their calls."""

    agreement: Agreement
    layer: Layer
    temperature: Any  # divides the scores: a number, or [rows, 1]
    start: int | None  # the index of this process's first class
    count: int  # of all classes
    step: int  # how many rows are computed at a time

    @classmethod
    def agreed(
        cls, arguments: Arguments, agreement: Agreement, layer: Layer, chunk: Any, temperature: Any = 1.0
    ) -> SplitLayer:
        """The first collective of a call, in which the processes compare what the caller has told `agreement`."""
        who, shared, n = agreement.who, agreement.group, layer.classes
        chunk = check_chunk(who, chunk, "rows")
        call = ShardedCall.of(agreement, layer.mapping, layer.x, -1, None, arguments.class_start, arguments.class_count)
        call = dataclasses.replace(call, temperature=temperature)
        sizes, start = [n] * shared.size, call.start
        if shared.strict:
            agreement.say(chunk=chunk, x=f"{layer.x.shape[-1]} features, {described(layer.x)}")
            sizes = call.agree(n)
            start = sum(sizes[: shared.rank]) if start is None else start
        if arguments.class_count is not None and arguments.class_count != sum(sizes):
            raise ValueError(f"{who}: class_count={arguments.class_count}, but the processes have {sum(sizes)} classes")
        step = chunk or _rows_at_a_time(layer.rows, max(sizes), shared)
        return cls(agreement, layer, temperature, start, sum(sizes), step)

    def by_rows(self, columns: int, of_rows: Callable[[ShardedCall, slice], Array]) -> Array:
        """`of_rows(call, where)` of a few rows at a time, one after the other along the first axis. columns: those it sends first."""
        who, shared, layer, xp = self.agreement.who, self.agreement.group, self.layer, namespace(self.layer.x)
        rows, step, count = layer.rows, self.step, self.count if shared.strict else None
        layer = dataclasses.replace(layer, x=shared.vary(layer.x))

        def some(begin: int) -> Array:
            where = slice(begin, min(begin + step, rows))
            message = message_of(where.stop - begin, 2 + columns, layer.x) if shared.strict else None
            part = Agreement(who, shared, layer.x, message)

            def result() -> Array:
                these = layer.part(where)
                call = ShardedCall.of(part, these.mapping, these.scores(), -1, None, self.start, count)
                per_row = is_array(self.temperature) and self.temperature.ndim
                t = self.temperature[where, ...] if per_row else self.temperature
                return of_rows(dataclasses.replace(call, temperature=t), where)

            return fail_together(part, result)

        again = bridge(layer.x).recomputed(some) if rows > step else some
        # without rows too, so that every parameter has a gradient, of zeros
        return upcast(xp.concat([again(begin) for begin in range(0, max(rows, 1), step)]), xp)


def linear_loss(
    arguments: Arguments,
    agreement: Agreement,
    linear_weight: Any,
    linear_bias: Any,
    chunk: Any,
    target: Any,
    weight: Any,
    given: dict[str, Any],
) -> Any:
    """The loss of the scores `x @ linear_weight.T`."""
    who = agreement.who
    options = LossOptions.read(who, weight, given)
    layer = _layer(arguments, linear_weight, linear_bias)
    xp, lead, n, rows, shared = namespace(layer.x), layer.lead, layer.classes, layer.rows, agreement.group
    target = _array.beside(target, layer.x, "target", xp)
    soft = not holds_indices(target, (*lead, n), -1, f"{who}: target", part=True)
    if shared.strict:
        say_options(agreement, options)
        target_is(agreement, target, xp)
    split = SplitLayer.agreed(arguments, agreement, layer, chunk)
    target = xp.reshape(target, (rows, n) if soft else (rows,))
    kind, each = loss_of(layer.mapping), options._replace(reduction="none")
    value = split.by_rows(width(options), lambda call, where: loss_of_call(call, kind, target[where, ...], each))
    norm = _norm(target, soft, options, split.start, n, shared, value, xp)
    return options.reduce(xp.reshape(value, lead), xp.reshape(norm, lead), layer.dtype, xp)


def log_prob(
    arguments: Arguments,
    agreement: Agreement,
    linear_weight: Any,
    linear_bias: Any,
    chunk: Any,
    temperature: Any,
    target: Any,
    entropy: bool,
) -> tuple[Array, Array | None]:
    """log p of the class of each row, and on request the entropy."""
    layer = _layer(arguments, linear_weight, linear_bias)
    xp = namespace(layer.x)
    temperature = _temperature(agreement.who, temperature, layer, xp)
    target = _array.counts(indices_of_rows(agreement.who, target, layer, xp), xp)
    agreement.same["target"] = target
    split = SplitLayer.agreed(arguments, agreement, layer, chunk, temperature)
    index = xp.reshape(target, (layer.rows, 1))
    columns = _terms(split, "target", index, entropy=entropy)
    log_p, *h = (xp.reshape(columns[:, i], layer.lead) for i in range(1 + entropy))
    return log_p, h[0] if entropy else None


def topk_kl(
    arguments: Arguments,
    agreement: Agreement,
    linear_weight: Any,
    linear_bias: Any,
    chunk: Any,
    temperature: Any,
    ids: Any,
    teacher_log_p: Any,
    tail: Any,
    direction: Any,
) -> Array:
    """The divergence of each row from the k classes of a teacher, counted over all processes."""
    who = agreement.who
    layer = _layer(arguments, linear_weight, linear_bias)
    xp, lead = namespace(layer.x), layer.lead
    temperature = _temperature(who, temperature, layer, xp)
    refuse_sharded(who, None, ids=ids, teacher_log_p=teacher_log_p)
    agreement.say(tail=tail, direction=direction)
    for name, a in (("ids", ids), ("teacher_log_p", teacher_log_p)):
        a = agreement.same[name] = _array.beside(a, layer.x, name, xp)
        agreement.say(**{name: f"{described(a)} of {a.dtype}"})
    split = SplitLayer.agreed(arguments, agreement, layer, chunk, temperature)
    # all processes have the same ids and log_p by now, so what is wrong with them is the same error on all
    ids, teacher_log_p = agreement.same["ids"], agreement.same["teacher_log_p"]
    teacher = Teacher.read(who, layer.x, lead, split.count, -1, ids, teacher_log_p, tail, direction, xp)
    k = teacher.ids.shape[-1]
    columns = _terms(split, "ids", xp.reshape(teacher.ids, (layer.rows, k)), rest=teacher.needs_rest)
    return teacher.of_columns(xp.reshape(columns, (*lead, columns.shape[-1])), xp)


def _terms(split: SplitLayer, name: str, index: Array, *, entropy: bool = False, rest: bool = False) -> Array:
    """The terms of classes [rows, m], an argument of this name, as columns [rows, m + entropy + rest]."""
    xp, wanted = namespace(index), {"entropy": entropy, "rest": rest}

    def of_rows(call: ShardedCall, where: slice) -> Array:
        return terms_of_call(call, name, index[where, ...], **wanted).columns(xp)

    return split.by_rows(GivenClasses.width(index.shape[-1], **wanted), of_rows)


def _layer(arguments: Arguments, weight: Any, bias: Any) -> Layer:
    return Layer.of(arguments.who, arguments.x, weight, arguments.mapping, bias, arguments.mask, part=True)


def _temperature(who: str, given: Any, layer: Layer, xp: Namespace) -> Any:
    """A number, or an array of one number or [rows, 1]."""
    if given is None:
        return 1.0
    check_range(who, "temperature", given, lambda v: v > 0, "above 0")
    given = _array.number(given)
    if not is_array(given):
        return given
    if math.prod(given.shape) == 1:
        return xp.reshape(_array.beside(given, layer.x, "temperature", xp), ())
    return temperature_of_rows(who, given, layer, xp)


def _rows_at_a_time(rows: int, classes: int, group: Group) -> int:
    """The rows of a part: the same number on every process, since all make the call of a part together."""
    step = max(1, _SCORES // max(1, classes))
    return step if group.strict else max(step, -(-rows // _PARTS))


def _norm(
    target: Array, soft: bool, options: LossOptions, start: Any, n: int, group: Group, value: Array, xp: Any
) -> Array:
    """The weight of each row in a mean: 1 for a row that counts, or the weight of its target, which one process knows."""
    if soft:
        return xp.ones_like(value)
    index = _array.counts(target, xp)
    ignored = index == options.ignore_index
    if options.weight is None:
        return counted_weight(index, ignored, None, value.dtype, xp)
    first = n * group.rank if start is None else start
    w = class_weights(options.weight, xp.zeros((1, n), dtype=value.dtype, **device_of(value)), xp)
    at = index - first
    elsewhere = (at < 0) | (at >= n)
    mine = counted_weight(at, ignored | elsewhere, w, value.dtype, xp) if n else xp.zeros_like(value)
    return xp.sum(group.stack(mine), axis=0)
