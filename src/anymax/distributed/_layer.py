"""The loss of an output layer whose classes lie on several processes: scores are made for some rows at a time, again for the gradient."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, is_integer, is_torch, namespace, upcast
from .._layer import Layer
from .._layer_asks import loss_of
from .._targets import check_reduction, class_weights, reduced
from ._group import Group, as_group
from ._shard import place_of

_WHO = "linear_loss"
_SCORES = 1 << 22  # of a process that are held at a time
_PARTS = 16  # in a program of JAX, which has each of them written out


def linear_loss(
    x: Any, linear_weight: Any, target: Any, mapping: Any, linear_bias: Any, weight: Any, reduction: Any, ignore_index: Any,
    label_smoothing: Any, mask: Any, group: Any, axis_name: Any, class_start: Any, class_count: Any, chunk: Any,
) -> Any:  # fmt: skip
    from . import _without_constant, fenchel_young, nll  # late: they are the verbs of this package

    check_reduction(reduction)
    layer = Layer.of(_WHO, x, linear_weight, mapping, linear_bias, mask, part=True)
    if chunk is not None and _array.check_integer(_WHO, "chunk", chunk, "an integer, the number of rows at a time") < 1:
        raise ValueError(f"{_WHO}: chunk must be at least 1, the number of rows at a time, got {chunk}")
    xp, lead, n, rows = namespace(layer.x), layer.lead, layer.classes, layer.rows
    shared = as_group(_WHO, group, axis_name, layer.x)
    sizes = _sizes(shared, n, layer.x, xp)
    start = sum(sizes[: shared.rank]) if class_start is None and shared.strict else class_start
    if class_count is not None and class_count != sum(sizes):
        raise ValueError(f"{_WHO}: class_count={class_count}, but the processes have {sum(sizes)} classes")
    step = chunk or _rows_at_a_time(rows, max(sizes), shared)
    layer = dataclasses.replace(layer, x=shared.own(layer.x))
    target = _array.beside(target, layer.x, "target", xp)
    soft = not is_integer(target)
    if tuple(target.shape) != ((*lead, n) if soft else lead):
        raise ValueError(
            f"{_WHO}: target of shape {tuple(target.shape)}: expected class indices (integers) of shape {lead}, or this process's part of "
            f"distributions (floating point), {(*lead, n)}"
        )
    target = xp.reshape(target, (rows, n) if soft else (rows,))
    loss = {"sparse_softmax_loss": _without_constant, "fenchel_young": fenchel_young, "nll": nll}[
        loss_of(layer.mapping)
    ]
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if shared.strict:
        options |= {"group": shared, "class_start": start, "class_count": sum(sizes)}
    else:
        options |= {"axis_name": axis_name}

    def some(begin: int) -> Array:
        where = slice(begin, min(begin + step, rows))
        part = layer.part(where)
        return loss(part.mapping, part.scores(), target[where, ...], weight, axis=-1, reduction="none", **options)

    again = _again(some, layer.x) if rows > step else some
    # of no rows too, so that all that learns has a gradient: zeros
    value = upcast(xp.concat([again(begin) for begin in range(0, max(rows, 1), step)]), xp)
    norm = _norm(target, soft, weight, ignore_index, start, n, shared, value, xp)
    return reduced(xp.reshape(value, lead), xp.reshape(norm, lead), reduction, layer.dtype, xp)


def _sizes(group: Group, n: int, x: Array, xp: Any) -> list[int]:
    """How many classes each process has; in JAX all have as many."""
    if not group.strict:
        return [n] * group.size
    return [int(size) for size in group.stack(xp.asarray([n], **place_of(x)))[:, 0]]


def _rows_at_a_time(rows: int, classes: int, group: Group) -> int:
    """The same on every process, since each part is a call that all make together."""
    step = max(1, _SCORES // max(1, classes))
    return step if group.strict else max(step, -(-rows // _PARTS))


def _again(function: Callable[[int], Array], x: Array) -> Callable[[int], Array]:
    """A function that keeps none of what it makes, and makes it again for the gradient."""
    if is_torch(x):
        checkpoint = sys.modules["torch"].utils.checkpoint.checkpoint
        return lambda begin: checkpoint(function, begin, use_reentrant=False)
    return sys.modules["jax"].checkpoint(function, static_argnums=0)


def _norm(
    target: Array, soft: bool, weight: Any, ignore_index: Any, start: Any, n: int, group: Group, value: Array, xp: Any
) -> Array:
    """What a mean divides by: 1 for a row that counts, or the weight of its target, which one process knows."""
    if soft:
        return xp.ones_like(value)
    index = _array.counts(target, xp)
    counts = xp.astype(index != ignore_index, value.dtype)
    if weight is None:
        return counts
    first = n * group.rank if start is None else start
    w = class_weights(weight, xp.zeros((1, n), dtype=value.dtype, **place_of(value)), xp)
    at = index - first
    own = (at >= 0) & (at < n) & (index != ignore_index)
    mine = xp.where(own, w[xp.where(own, at, xp.zeros_like(at))], xp.zeros_like(value)) if n else xp.zeros_like(value)
    return xp.sum(group.stack(mine), axis=0)
