"""The loss of an output layer whose classes are split over processes: some rows at a time, computed again for the gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import _array
from .._array import Array, device_of, namespace, upcast
from ..autodiff import bridge
from ..linear.layer import Layer, check_chunk
from ..linear.per_row import loss_of
from ..losses.options import LossOptions, class_weights
from ..losses.targets import counted_weight, holds_indices
from .agreement import Agreement, fail_together
from .call import Arguments, ShardedCall, described, message_of
from .group import Group
from .losses import loss_of_call, say_options, target_is, width

_WHO = "linear_loss"
_SCORES = 1 << 22  # scores that a process holds at a time
_PARTS = 16  # parts in a JAX program, which contains the code of each part


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
    options = LossOptions.read(_WHO, weight, given)
    layer = Layer.of(_WHO, arguments.x, linear_weight, arguments.mapping, linear_bias, arguments.mask, part=True)
    chunk = check_chunk(_WHO, chunk, "rows")
    xp, lead, n, rows, shared = namespace(layer.x), layer.lead, layer.classes, layer.rows, agreement.group
    target = _array.beside(target, layer.x, "target", xp)
    soft = not holds_indices(target, (*lead, n), -1, f"{_WHO}: target", part=True)
    call = ShardedCall.of(agreement, layer.mapping, layer.x, -1, None, arguments.class_start, arguments.class_count)
    sizes, start, count = [n] * shared.size, call.start, None
    if shared.strict:
        say_options(agreement, options)
        target_is(agreement, target, xp)
        agreement.say(chunk=chunk, x=f"{layer.x.shape[-1]} features, {described(layer.x)}")
        sizes = call.agree(n)
        start, count = sum(sizes[: shared.rank]) if start is None else start, sum(sizes)
    if arguments.class_count is not None and arguments.class_count != sum(sizes):
        raise ValueError(f"{_WHO}: class_count={arguments.class_count}, but the processes have {sum(sizes)} classes")
    step = chunk or _rows_at_a_time(rows, max(sizes), shared)
    layer = dataclasses.replace(layer, x=shared.vary(layer.x))
    target = xp.reshape(target, (rows, n) if soft else (rows,))
    each = options._replace(reduction="none")

    def some(begin: int) -> Array:
        where = slice(begin, min(begin + step, rows))
        message = message_of(where.stop - begin, 2 + width(options), layer.x) if shared.strict else None
        part = Agreement(_WHO, shared, layer.x, message)

        def loss() -> Array:
            these = layer.part(where)
            call = ShardedCall.of(part, these.mapping, these.scores(), -1, None, start, count)
            return loss_of_call(call, loss_of(layer.mapping), target[where, ...], each)

        return fail_together(part, loss)

    again = bridge(layer.x).recomputed(some) if rows > step else some
    # without rows too, so that every parameter has a gradient, of zeros
    value = upcast(xp.concat([again(begin) for begin in range(0, max(rows, 1), step)]), xp)
    norm = _norm(target, soft, options, start, n, shared, value, xp)
    return options.reduce(xp.reshape(value, lead), xp.reshape(norm, lead), layer.dtype, xp)


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
