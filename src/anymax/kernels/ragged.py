"""Segments of entries along an axis, without padding, by the C++ engine (csrc/doors/ragged.cpp)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from .._array import Array, from_last, is_torch, namespace
from .._core.mapping import Mapping
from . import native
from .choice import asked
from .link import NEED_SCORES, OPS, Link, link_of


def refuse(op: str, mapping: Mapping, x: Array) -> str | None:
    """Why the engine can't take segments of arrays like x; None if it can."""
    if asked() not in (None, native.ENGINE.name):
        return f"the engine {asked()} is asked for"
    return native.ENGINE.refuse(op, mapping, x)


class TooMany(ValueError):
    """There are more segments than MOST."""


def _few(count: int) -> int:
    if count > MOST:
        raise TooMany(count)
    return count


def sort(index: np.ndarray, segments: int | None, threads_of_torch: bool) -> tuple[int, np.ndarray, np.ndarray | None]:
    """(-1, ptr, order), where `order` sorts the entries by segment and is None if they are sorted.

    (entry, ptr, None) where an entry's index is out of range. segments: how many there are; None: the largest index plus one.
    """
    engine = native.load()
    if not isinstance(engine, str):
        # most indices are sorted: the last is then the largest, and no order is needed
        last = segments if segments is not None else max(int(index[-1]) + 1, 0) if index.size else 0
        ptr = np.empty(_few(last) + 1, np.int64)
        if engine.sort_segments(index, ptr, None, threads_of_torch) == index.size:
            return -1, ptr, None
    count = segments if segments is not None else max(int(index.max(initial=-1)) + 1, 0)
    ptr = np.zeros(_few(count) + 1, np.int64)
    if not isinstance(engine, str):
        order = np.empty(index.shape, np.int64)
        done = engine.sort_segments(index, ptr, order, threads_of_torch)
        return (-1 - done, ptr, None) if done < 0 else (-1, ptr, order)
    wrong = (index < 0) | (index >= count)
    if wrong.any():
        return int(wrong.argmax()), ptr, None
    np.cumsum(np.bincount(index, minlength=count), out=ptr[1:])
    return -1, ptr, None if (index[1:] >= index[:-1]).all() else np.argsort(index, kind="stable")


MOST = 2**31 - 1  # the most segments: the engine counts them in 32 bits
Layout = tuple[np.ndarray, np.ndarray | None, int]  # ptr, order, the axis of the entries


def forward(mapping: Mapping, x: Array, layout: Layout) -> Array:
    """p(x) of each segment."""
    return _entries("forward", mapping, layout, x, None, None)


def forward_keeping(mapping: Mapping, x: Array, layout: Layout) -> tuple[Array, Array | None]:
    """p(x) of each segment; and where the entries have an order, p sorted by segment, [entries, heads], for `vjp`."""
    kept = None
    if layout[1] is not None:
        entries = x.shape[layout[2]]
        shape = (entries, math.prod(x.shape) // max(entries, 1))
        kept = native.room_in(native.world_of(x), shape, native.dtype_of(x))
    return _entries("forward", mapping, layout, x, None, None, kept=kept), kept


def log_forward(mapping: Mapping, x: Array, layout: Layout) -> Array:
    return _entries("log_forward", mapping, layout, x, None, None)


def vjp(mapping: Mapping, x: Array | None, p: Array, g: Array, layout: Layout, kept: Array | None = None) -> Array:
    """J^T g."""
    return _entries("vjp", mapping, layout, x, p, g, kept=kept)


def log_vjp(mapping: Mapping, x: Array | None, log_p: Array, g: Array, layout: Layout) -> Array:
    return _entries("log_vjp", mapping, layout, x, log_p, g)


def index_loss(mapping: Mapping, x: Array, index: Array, layout: Layout) -> Array:
    """The loss of each segment for the index of its target within the segment; 0 for an index below 0."""
    return _each("index_loss", mapping, layout, x, index)


def index_loss_keeping(mapping: Mapping, x: Array, index: Array, layout: Layout) -> tuple[Array, None]:
    """`index_loss`, and None, since this engine's gradient needs nothing else."""
    return index_loss(mapping, x, index, layout), None


def index_loss_grad(mapping: Mapping, x: Array, index: Array, scale: Array, layout: Layout, kept: None = None) -> Array:
    """`scale (p - y)`, scale one per segment."""
    return _entries("index_loss_grad", mapping, layout, x, None, None, index, scale)


def threshold(mapping: Mapping, x: Array, layout: Layout) -> Array:
    """tau of each segment, float32 or float64; logsumexp for softmax; -inf for an empty segment."""
    return _each("threshold", mapping, layout, x, None)


def _link(mapping: Any, x: Array, segments: int, axis: int) -> Link:
    """The link, with its array of parameters broadcast to one for each segment and head, float64 and contiguous."""
    link = mapping if isinstance(mapping, Link) else link_of(mapping)
    assert not isinstance(link, str), link
    if link.params is None:
        return link
    world = native.world_of(x)
    shape = (segments, *(n for i, n in enumerate(x.shape) if i != axis))
    return link._replace(params=world.contiguous(world.broadcast(world.cast(link.params, "float64", x), shape)))


def _run(
    op: str, mapping: Any, layout: Layout, operands: list[Any], index: Any, scale: Any, result: Any, kept: Any = None
) -> None:
    ptr, order, axis = layout
    like = next(a for a in operands if a is not None)
    link = _link(mapping, like, len(ptr) - 1, axis)
    engine = native.engine_for(like)
    index, scale = (None if a is None else native.world_of(a).contiguous(a) for a in (index, scale))
    made = engine.segments(link, OPS[op], ptr, order, axis, *operands, index, scale, result, kept)
    if made is None:
        words = ", ".join(f"{native.dtype_of(a)} {tuple(a.shape)}" for a in operands if a is not None)
        raise RuntimeError(f"the native engine does not serve {op} of segments on {words}")


def _one_stride(a: Array, axis: int) -> bool:
    """True if one stride leads through the heads of an entry, and the address is aligned for the dtype."""
    axes = [i for i in range(a.ndim) if i != axis and a.shape[i] != 1]
    steps = a.stride() if is_torch(a) else a.strides
    return native.world_of(a).aligned(a) and all(steps[i] == steps[j] * a.shape[j] for i, j in itertools.pairwise(axes))


def _laid_out(operands: list[Any], axis: int) -> tuple[list[Any], int]:
    """The operands, copied where their heads have no single stride, and the axis of their entries, moved to the front from the middle."""
    lead = next(a for a in operands if a is not None)
    if 0 < axis < lead.ndim - 1:
        xp = namespace(lead)
        axes = (axis, *(i for i in range(lead.ndim) if i != axis))
        operands, axis = [None if a is None else xp.permute_dims(a, axes) for a in operands], 0
        return [None if a is None else native.world_of(a).contiguous(a) for a in operands], 0
    return [a if a is None or _one_stride(a, axis) else native.world_of(a).contiguous(a) for a in operands], axis


def _entries(
    op: str,
    mapping: Any,
    layout: Layout,
    x: Any,
    p: Any,
    g: Any,
    index: Any = None,
    scale: Any = None,
    kept: Any = None,
) -> Array:
    """Runs an operation whose result has a number for each entry."""
    lead = x if p is None else p
    world, dtype = native.world_of(lead), native.dtype_of(lead)
    if g is not None and native.dtype_of(g) != dtype:
        g = world.cast(g, dtype, lead)
    link = link_of(mapping)
    kind = "" if isinstance(link, str) else link.kind
    if p is not None and not (op == "vjp" and kind in NEED_SCORES) and not (op == "log_vjp" and kind == "sigsoftmax"):
        x = None
    ptr, order, axis = layout
    (x, p, g), at = _laid_out([x, p, g], axis)
    lead = x if p is None else p
    out = native.room_in(world, tuple(lead.shape), dtype)
    if math.prod(lead.shape):
        _run(op, mapping, (ptr, order, at), [x, p, g, out], index, scale, None, kept)
    return (
        out
        if at == axis
        else from_last(namespace(out).permute_dims(out, (*range(1, out.ndim), 0)), axis, namespace(out))
    )


def _each(op: str, mapping: Any, layout: Layout, x: Array, index: Any) -> Array:
    """Runs an operation whose result has a number for each segment and head: [segments, heads ...]."""
    ptr, order, axis = layout
    shape = (len(ptr) - 1, *(n for i, n in enumerate(x.shape) if i != axis))
    result = native.room_in(native.world_of(x), shape, native.wide(x))
    if math.prod(shape):
        (x,), axis = _laid_out([x], axis)
        _run(op, mapping, (ptr, order, axis), [x, None, None, None], index, None, result)
    return result
