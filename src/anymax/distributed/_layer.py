"""The loss of an output layer whose classes lie on several processes: scores are made for some rows at a time, again for the gradient."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from .. import _array
from .._array import Array, asarray, floating, is_integer, is_torch, namespace, upcast
from .._mapping import Mapping
from .._names import as_mapping
from .._targets import check_reduction, class_weights, reduced, result_dtype
from ..mappings import Softmax, SparseSoftmax
from ._group import Group, as_group
from ._shard import place_of

_WHO = "linear_loss"
_SCORES = 1 << 22  # of a process that are held at a time
_PARTS = 16  # in a program of JAX, which has each of them written out


def loss_of_rows(mapping: Mapping) -> Callable[..., Any]:
    """The loss that `anymax.linear_loss` has for a map."""
    from . import _without_constant, fenchel_young, nll  # late: they are the verbs of this package

    if isinstance(mapping, SparseSoftmax):
        return _without_constant
    return fenchel_young if mapping.facts.has_potential and mapping.kernel != Softmax.kernel else nll


def linear_loss(
    x: Any, linear_weight: Any, target: Any, mapping: Any, linear_bias: Any, weight: Any, reduction: Any, ignore_index: Any,
    label_smoothing: Any, mask: Any, group: Any, axis_name: Any, class_start: Any, class_count: Any, chunk: Any,
) -> Any:  # fmt: skip
    mapping = as_mapping(mapping, _WHO)
    check_reduction(reduction)
    x = asarray(x, "x")
    xp = namespace(x)
    x = floating(x, xp, "x")
    linear_weight = floating(_array.beside(linear_weight, x, "linear_weight", xp), xp, "linear_weight")
    if x.ndim < 1 or linear_weight.ndim != 2 or linear_weight.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"{_WHO}: expected features [..., features] and this process's part of a linear_weight, [classes, features], got "
            f"{tuple(x.shape)} and {tuple(linear_weight.shape)}"
        )
    if chunk is not None and _array.check_integer(_WHO, "chunk", chunk, "an integer, the number of rows at a time") < 1:
        raise ValueError(f"{_WHO}: chunk must be at least 1, the number of rows at a time, got {chunk}")
    shared = as_group(_WHO, group, axis_name, x)
    lead, n = tuple(x.shape[:-1]), linear_weight.shape[0]
    rows = math.prod(lead)
    sizes = _sizes(shared, n, x, xp)
    start = sum(sizes[: shared.rank]) if class_start is None and shared.strict else class_start
    if class_count is not None and class_count != sum(sizes):
        raise ValueError(f"{_WHO}: class_count={class_count}, but the processes have {sum(sizes)} classes")
    step = chunk or _rows_at_a_time(rows, max(sizes), shared)
    flat = xp.reshape(shared.own(x), (rows, x.shape[-1]))
    target = _array.beside(target, x, "target", xp)
    soft = not is_integer(target)
    wanted = (*lead, n) if soft else lead
    if tuple(target.shape) != wanted:
        raise ValueError(
            f"{_WHO}: target of shape {tuple(target.shape)}: expected class indices (integers) of shape {lead}, or this process's part of "
            f"distributions (floating point), {(*lead, n)}"
        )
    target = xp.reshape(target, (rows, n) if soft else (rows,))
    keep = None if mask is None else _mask(mask, x, (*lead, n), xp)
    mapping = _by_row(mapping, lead, xp)
    where: dict[str, Any] = {"group": shared} if shared.strict else {"axis_name": axis_name}
    if shared.strict:
        where |= {"class_start": start, "class_count": sum(sizes)}

    def some(a: Array, w: Array, b: Array | None, begin: int) -> Array:
        end = min(begin + step, rows)
        scores = xp.matmul(a, w.T)
        scores = scores if b is None else scores + b
        part = {k: v[begin:end, ...] if v.ndim else v for k, v in mapping.params().items()}
        return loss_of_rows(mapping)(
            mapping.replace(**part) if part else mapping, scores, target[begin:end, ...], weight, axis=-1, reduction="none",
            mask=None if keep is None else keep if keep.shape[0] == 1 else keep[begin:end, ...], ignore_index=ignore_index,
            label_smoothing=label_smoothing, **where,
        )  # fmt: skip

    bias = (
        None if linear_bias is None else floating(_array.beside(linear_bias, x, "linear_bias", xp), xp, "linear_bias")
    )
    again = _again(some, x) if rows > step else some
    values = [again(flat[i : i + step, ...], linear_weight, bias, i) for i in range(0, rows, step)]
    value = upcast(xp.concat(values) if values else flat[:, 0] * 0, xp)
    norm = _norm(target, soft, weight, ignore_index, start, n, shared, value, xp)
    dtype = result_dtype(x) if is_torch(x) else xp.result_type(x, linear_weight)
    return reduced(xp.reshape(value, lead), xp.reshape(norm, lead), reduction, dtype, xp)


def _sizes(group: Group, n: int, x: Array, xp: Any) -> list[int]:
    """How many classes each process has; in JAX all have as many."""
    if not group.strict:
        return [n] * group.size
    return [int(size) for size in group.stack(xp.asarray([n], **place_of(x)))[:, 0]]


def _rows_at_a_time(rows: int, classes: int, group: Group) -> int:
    """The same on every process, since each part is a call that all make together."""
    step = max(1, _SCORES // max(1, classes))
    return step if group.strict else max(step, -(-rows // _PARTS))


def _again(function: Callable[..., Any], x: Array) -> Callable[..., Any]:
    """A function that keeps none of what it makes, and makes it again for the gradient."""
    if is_torch(x):
        checkpoint = sys.modules["torch"].utils.checkpoint.checkpoint
        return lambda *args: checkpoint(function, *args, use_reentrant=False)
    return sys.modules["jax"].checkpoint(function, static_argnums=3)


def _mask(mask: Any, x: Array, shape: tuple[int, ...], xp: Any) -> Array:
    """[1 or rows, classes]"""
    mask = _array.beside(mask, x, "mask", xp)
    if mask.ndim <= 1:
        return xp.broadcast_to(mask, (1, shape[-1]))
    return xp.reshape(xp.broadcast_to(mask, shape), (math.prod(shape[:-1]), shape[-1]))


def _by_row(mapping: Mapping, lead: tuple[int, ...], xp: Any) -> Mapping:
    """Its parameters as numbers, or as arrays [rows, 1]."""
    params = {
        k: v if not v.ndim else xp.reshape(xp.broadcast_to(v, (*lead, 1)), (-1, 1)) for k, v in mapping.params().items()
    }
    return mapping.replace(**params) if params else mapping


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
    w = class_weights(weight, xp.broadcast_to(value[:1, None], (1, n)), xp)
    at = index - first
    own = (at >= 0) & (at < n) & (index != ignore_index)
    mine = xp.where(own, w[xp.where(own, at, xp.zeros_like(at))], xp.zeros_like(value)) if n else xp.zeros_like(value)
    return xp.sum(group.stack(mine), axis=0)
