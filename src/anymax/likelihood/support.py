"""The support of rows: the classes of each row that count; all others are masked.

A caller gives (ids, offsets), a list for each row, or integers [..., k] with -1 for none. All are read as (ids, offsets).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import _array
from .._array import (
    Array,
    Namespace,
    counts,
    device_of,
    eager,
    is_array,
    is_integer,
    known,
    known_any,
    on_constants,
    running_sum,
    take,
)
from .._core.mapping import Mapping
from .._core.rows import hide
from .softmax_plain import at_classes


def on_support(
    who: str, mapping: Mapping, rows: Array, index: Array, support: Any, xp: Namespace
) -> tuple[Array, Array]:
    """(scores of each row's support with a masked class at the end, places of the classes).

    The rows are masked instead if they are traced, or if a parameter varies along the classes."""
    *lead, n = rows.shape
    ids, offsets = read_support(who, rows, math.prod(lead), n, support, xp)
    if not eager(ids) or any(v.ndim and v.shape[-1] != 1 for v in mapping.params().values()):
        return hide(rows, _as_mask(ids, offsets, tuple(rows.shape), xp)), index
    classes, there, spot = places_of(who, tuple(lead), n, index, ids, offsets, xp)
    scores = take(rows, classes, xp)
    return hide(scores, there), spot


def read_support(who: str, rows: Array, count: int, n: int, support: Any, xp: Namespace) -> tuple[Array, Array]:
    """The ids and the offsets of a support of `count` rows of n classes, as arrays of the kind of `rows`."""
    ids, offsets = pair_of(who, rows, count, support, xp)
    with on_constants(rows, ids, offsets):
        return _checked(who, count, n, ids, offsets, xp)


def sized_support(who: str, rows: Array, count: int, n: int, support: Any, xp: Namespace) -> tuple[Array, Array]:
    """`read_support` for functions whose shapes depend on the sizes of the support, which must be known."""
    ids, offsets = read_support(who, rows, count, n, support, xp)
    if not eager(offsets) or (is_pair(support) and not eager(ids)):
        raise TypeError(
            f"{who}: the sizes of a support must be known, and this one is traced: in JAX let the function close over it, or give integers "
            "[..., k], with -1 where a row has fewer; or make the scores, and use log_prob"
        )
    return ids, offsets


def pair_of(who: str, rows: Array, count: int, support: Any, xp: Namespace) -> tuple[Array, Array]:
    """A support of `count` rows as (ids, offsets), arrays of the kind of `rows`."""
    given = support if is_pair(support) else _of_lists(who, count, support)
    if is_pair(given):
        with on_constants(rows, *given):
            ids, offsets = (
                _array.beside(a, rows, f"support: {name}", xp) for a, name in zip(given, ("ids", "offsets"))
            )
        return ids, offsets
    if not is_array(given) or given.ndim < 2 or not is_integer(given):
        what = f"{given.dtype} {tuple(given.shape)}" if is_array(given) else type(given).__name__
        raise TypeError(
            f"{who}: support must be (ids, offsets), as sample(return_support=True) gives it, a list with a list of ids for each row, or "
            f"integers [..., k], -1 where a row has fewer than k; got {what}"
        )
    *lead, k = given.shape
    _refuse_other_count(who, math.prod(lead), count)
    with on_constants(rows, given):
        ids = xp.reshape(counts(_array.beside(given, rows, "support", xp), xp), (count * k,))
        if not eager(ids):  # those below 0 stay
            return ids, k * xp.arange(count + 1, dtype=ids.dtype, **device_of(ids))
        there = ids >= 0
        sizes = xp.sum(xp.astype(xp.reshape(there, (count, k)), ids.dtype), axis=-1)
        begins = xp.zeros((1,), dtype=ids.dtype, **device_of(ids))
        return ids[there], xp.concat([begins, running_sum(sizes, xp)])


def _of_lists(who: str, count: int, support: Any) -> Any:
    """(ids, offsets) of lists, without the ids below 0, which fill a list up; what are no lists of integers as it is."""
    if not isinstance(support, list):
        return support
    each = list(_lists(support))
    ids = np.asarray([*itertools.chain.from_iterable(each)]) if any(each) else np.zeros(0, int)
    if not is_integer(ids):
        return support
    _refuse_other_count(who, len(each), count)
    if (ids < 0).any():
        each = [[i for i in one if i >= 0] for one in each]
        ids = ids[ids >= 0]
    return ids, np.cumsum([0, *map(len, each)])


def is_pair(support: Any) -> bool:
    """Whether a support is (ids, offsets), a tuple of two; a list has the ids of each row."""
    return isinstance(support, tuple) and len(support) == 2


def _lists(support: Any) -> Iterator[list[int]]:
    """The ids of each row, from lists in lists to any depth, or arrays in them."""
    support = support.tolist() if is_array(support) else support
    if any(isinstance(a, (list, tuple)) or is_array(a) for a in support):
        for a in support:
            yield from _lists(a)
    else:
        yield list(support)


def _refuse_other_count(who: str, given: int, count: int) -> None:
    if given != count:
        raise ValueError(f"{who}: support has the ids of {given} rows, and there are {count}")


def _checked(who: str, count: int, n: int, ids: Array, offsets: Array, xp: Namespace) -> tuple[Array, Array]:
    if not (is_integer(ids) and is_integer(offsets)) or ids.ndim != 1 or tuple(offsets.shape) != (count + 1,):
        raise ValueError(
            f"{who}: support must be ids, one axis of class indices (integers), and offsets, {count + 1} integers for {count} rows; got "
            f"{ids.dtype} {tuple(ids.shape)} and {offsets.dtype} {tuple(offsets.shape)}"
        )
    ids, offsets = counts(ids, xp), counts(offsets, xp)
    size = offsets[1:] - offsets[:-1]
    if known(offsets) and known(ids):
        if int(offsets[0]) or int(offsets[-1]) != ids.shape[0] or bool(xp.any(size < 0)):
            raise ValueError(f"{who}: support: offsets must rise from 0 to {ids.shape[0]}, the number of ids")
        if known_any((ids < 0) | (ids >= n), xp):
            raise IndexError(
                f"{who}: support: ids must be from 0 to {n - 1}, got {int(xp.min(ids))} to {int(xp.max(ids))}"
            )
    return ids, offsets


def places_of(
    who: str, lead: tuple[int, ...], n: int, index: Array, ids: Array, offsets: Array, xp: Namespace
) -> tuple[Array, Array, Array]:
    """(ids of each row's support and True where there is one, as in `padded`; the place of each class of `index` [..., m] among them).

    An index below 0 stays. One above all classes is no error here, since its value is not known; it becomes -2, which is no class either.
    """
    classes, there = padded(who, lead, n, ids, offsets, xp)
    spot = xp.where(index < 0, index, place_among(classes, there, index, xp))
    return classes, there, xp.where(index >= n, -2 * xp.ones_like(index), spot)


def padded(who: str, lead: tuple[int, ...], n: int, ids: Array, offsets: Array, xp: Namespace) -> tuple[Array, Array]:
    """(ids of each row's support, [..., width + 1]; True where there is one). The last place is always empty."""
    with on_constants(ids, ids, offsets):
        size, count = offsets[1:] - offsets[:-1], math.prod(lead)
        width = int(xp.max(size)) if count else 0
        step = xp.reshape(xp.arange(width + 1, dtype=ids.dtype, **device_of(ids)), (1, width + 1))
        there = step < size[:, None]
        at = xp.where(there, offsets[:-1][:, None] + step, xp.zeros_like(step))
        classes = xp.take(ids, xp.reshape(at, (-1,)), axis=0) if ids.shape[0] else xp.zeros_like(at)
        shape = (*lead, width + 1)
        classes, there = xp.reshape(classes, shape), xp.reshape(there, shape)
        if not eager(ids):
            there = there & (classes >= 0)
        if width > 1:
            ordered = xp.sort(xp.where(there, classes, n + step), axis=-1)
            if known_any(ordered[..., 1:] == ordered[..., :-1], xp):
                raise ValueError(f"{who}: support: a row has a class twice")
    return classes, there


def place_among(classes: Array, there: Array, index: Array, xp: Namespace) -> Array:
    """The place of each class of `index` [..., m] among `classes` [..., width + 1]; the last one, which is empty, if it is not there."""
    hit = (xp.expand_dims(classes, axis=-2) == xp.expand_dims(index, axis=-1)) & xp.expand_dims(there, axis=-2)
    last = (classes.shape[-1] - 1) * xp.ones_like(index)
    return xp.where(xp.any(hit, axis=-1), xp.argmax(xp.astype(hit, xp.int32), axis=-1), last)


def _as_mask(ids: Array, offsets: Array, shape: tuple[int, ...], xp: Namespace) -> Array:
    """The support as a mask of the rows, for traces, in which shapes can't depend on values."""
    row = xp.searchsorted(offsets[1:], xp.arange(ids.shape[0], dtype=ids.dtype, **device_of(ids)), side="right")
    flat = xp.where(ids < 0, math.prod(shape) * xp.ones_like(ids), row * shape[-1] + ids)
    flat = xp.reshape(flat, (1, -1))
    like = xp.zeros((1, math.prod(shape)), **device_of(ids))
    return xp.reshape(at_classes(xp.astype(flat, ids.dtype), like, xp), shape)
