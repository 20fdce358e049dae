"""Which entries belong to which segment: an index, bounds or lengths, checked once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._array import Array, asarray, check_axis, eager, is_jax, is_torch, namespace
from .._core.options import check_keywords
from . import reading


class Bucket(NamedTuple):
    """Segments of similar length, padded to rows of one length."""

    ids: Any  # [rows]: the segment; any for an unused row
    entry: Any  # [rows * width]: the entry; any for an unused place
    valid: Any  # [rows, width]: whether the place has an entry
    width: int


class Rows(NamedTuple):
    """All segments as rows of a few lengths, and the indices that lead back."""

    buckets: tuple[Bucket, ...]
    place: Any  # [entries]: the place of each entry in the concatenated buckets
    row: Any  # [segments]: the row of each segment in the concatenated buckets; one past the last if empty


class _once(property):
    """A cached property. That of functools has a lock in Python 3.11, which torch.compile can't trace."""

    def __init__(self, find: Callable[[Any], Any]) -> None:
        def get(self: Segments) -> Any:
            if find.__name__ not in self._found:
                self._found[find.__name__] = find(self)
            return self._found[find.__name__]

        super().__init__(get, doc=find.__doc__)


class Segments:
    """Which entries belong to which segment: created by `Segments.of`, accepted wherever an index is.

    An index is sorted once, here, and not in every call.

    Parameters
    ----------
    num_segments
        How many segments there are, including empty ones.
    num_entries
        How many entries there are.
    ptr
        Integers [num_segments + 1]; the entries from `ptr[s]` up to `ptr[s + 1]`, in the order of `order`, belong to
        segment s.
    order
        Integers [num_entries], the entries sorted by segment; None if they are sorted already.
    index
        Integers [num_entries], the segment of each entry; found when it is needed, by default.

    Examples
    --------
    >>> rows = anymax.Segments.of([1, 0, 1])
    >>> rows.ptr, rows.order, rows.lengths
    (array([0, 1, 3]), array([1, 0, 2]), array([1, 2]))
    """

    def __init__(self, ptr: Any, order: Any, num_entries: int, index: Any = None) -> None:
        self.ptr, self.order = ptr, order
        self.num_segments, self.num_entries = ptr.shape[0] - 1, num_entries
        self._found: dict[str, Any] = {} if index is None else {"index": index}
        self._as: dict[Any, Any] = {}  # what `cached` returned, by name and place

    @staticmethod
    @check_keywords(
        batch="index", segment_ids="index", offsets="ptr", cu_seqlens="ptr", splits="lengths", n_node="lengths"
    )
    def of(index: Any = None, *, ptr: Any = None, lengths: Any = None, num_segments: int | None = None) -> Segments:
        """Create segments, which several calls can use in place of an index.

        An unsorted index is sorted here, once. Give exactly one of index, ptr and lengths.

        Parameters
        ----------
        index
            The segment of each entry, integers from 0 on, in any order; a `Segments` is returned unchanged.
        ptr
            The bounds, integers [num_segments + 1] that ascend from 0 to the number of entries.
        lengths
            How many entries each segment has, integers [num_segments]; the entries lie one segment after another.
        num_segments
            How many segments there are, by default the largest index plus one. An index under `jax.jit` needs it.

        Returns
        -------
        Segments
            A `Segments`.

        Examples
        --------
        >>> rows = anymax.Segments.of([1, 0, 1])
        >>> anymax.segment_apply("softmax", [0.0, 5.0, 0.0], index=rows)
        array([0.5, 1. , 0.5])
        """
        return read("Segments.of", index, ptr, lengths, num_segments)

    @property
    def known(self) -> bool:
        """False under a compiler, where values are not known."""
        return isinstance(self.ptr, np.ndarray)

    @property
    def lengths(self) -> Any:
        """How many entries each segment has, [num_segments]."""
        return self.ptr[1:] - self.ptr[:-1]

    @_once
    def index(self) -> Any:
        """The segment of each entry, [num_entries]; under a compiler num_segments for an entry without a segment."""
        if isinstance(self.ptr, np.ndarray):
            out = np.repeat(np.arange(self.num_segments), self.lengths)
            if self.order is None:
                return out
            index = np.empty_like(out)
            index[self.order] = out
            return index
        xp = namespace(self.ptr)
        each = _arange(self.num_entries, self.ptr)
        out = xp.searchsorted(self.ptr[1:], each, side="right")
        out = xp.where(each < self.ptr[0], self.num_segments * xp.ones_like(out), out)
        return out if self.order is None else out[self.inverse]

    @_once
    def inverse(self) -> Any:
        """The place of each entry in `order`, [num_entries]; None if `order` is None."""
        if self.order is None:
            return None
        if isinstance(self.order, np.ndarray):
            out = np.empty_like(self.order)
            out[self.order] = np.arange(self.num_entries)
            return out
        if is_jax(self.order):
            return self.order.at[self.order].set(_arange(self.num_entries, self.order).astype(self.order.dtype))
        return namespace(self.order).argsort(self.order)

    @_once
    def rank(self) -> Any:
        """The place of each entry within its segment, [num_entries]."""
        place = np.arange(self.num_entries) if self.order is None else self.inverse
        return place - self.ptr[self.index]

    def placed(self, name: str, x: Array) -> Any:
        """`ptr`, `order`, `index`, `inverse` or `rank` as an array of x's kind, on its device."""
        return self.cached(name, x, lambda: getattr(self, name))

    def cached(self, name: Any, x: Array, make: Any) -> Any:
        """The result of `make()`, its NumPy arrays as arrays of x's kind on its device; cached unless something is traced."""
        if not self.known:
            return make()
        place = str(x.device) if is_torch(x) else "jax" if is_jax(x) else None
        if (name, None) not in self._as:
            self._as[name, None] = make()
        if (name, place) not in self._as:
            made = _placed(self._as[name, None], x)
            if not eager(x) and is_torch(x):
                return made
            self._as[name, place] = made
        return self._as[name, place]

    def spread(self, values: Any, axis: int = 0) -> Any:
        """Give all entries the value of their segment, such as a temperature or a weight.

        Parameters
        ----------
        values
            An array with the segments along `axis`, or a list of numbers.
        axis
            Where the segments are.

        Returns
        -------
        Any
            An array of the kind of values, with entries in place of segments.

        Examples
        --------
        >>> anymax.Segments.of([1, 0, 1]).spread([10.0, 20.0])
        array([20., 10., 20.])
        """
        values = asarray(values, "values")
        axis = check_axis(axis, values.ndim)
        if values.shape[axis] != self.num_segments:
            raise ValueError(
                f"values of shape {tuple(values.shape)}: expected {self.num_segments} along axis {axis}, one for each segment"
            )
        return namespace(values).take(values, self.placed("index", values), axis=axis)

    def __repr__(self) -> str:
        return f"Segments(num_segments={self.num_segments}, num_entries={self.num_entries})"


def _placed(made: Any, x: Array) -> Any:
    if isinstance(made, np.ndarray):
        if not (is_torch(x) or is_jax(x)):
            return made
        if is_torch(x):
            xp = namespace(x)
            return xp.asarray(np.ascontiguousarray(made), device=x.device)
        jax: Any = sys.modules["jax"]
        with jax.ensure_compile_time_eval():
            return jax.numpy.asarray(made)
    if isinstance(made, tuple):
        parts = [_placed(part, x) for part in made]
        return tuple(parts) if type(made) is tuple else type(made)(*parts)
    return made


def _arange(n: int, like: Any) -> Any:
    xp = namespace(like)
    return xp.arange(n, device=like.device) if is_torch(like) else xp.arange(n)


# -- from what a caller gives -------------------------------------------------------------------------------------------------------


def read(who: str, index: Any, ptr: Any, lengths: Any, num_segments: Any) -> Segments:
    return _read(who, *reading.only(who, index, ptr, lengths, num_segments))


def bounds(who: str, name: str, value: Any) -> Segments:
    """The segments of bounds that the caller knows by another name than ptr."""
    return _read(who, name, value, None)


def _read(who: str, name: str, value: Any, num_segments: int | None) -> Segments:
    if isinstance(value, Segments):
        if num_segments not in (None, value.num_segments):
            raise ValueError(f"{who}: num_segments={num_segments}, and {name} has {value.num_segments} segments")
        return value
    return Segments(*reading.arrange(who, name, value, num_segments))


def check(who: str, rows: Segments) -> Segments:
    """Check segments that were traced, now that their values are known."""
    ptr, order, n = rows.ptr, rows.order, rows.num_entries
    if order is not None and n and (ptr[0] > 0 or ptr[-1] < n):
        wrong = int(order[0] if ptr[0] > 0 else order[-1])
        raise IndexError(f"{who}: index[{wrong}] is out of range; allowed is from 0 to {rows.num_segments - 1}")
    return along(who, read(who, None, ptr, None, None), n, "x") if order is None else rows


def along(who: str, rows: Segments, n: int, what: str) -> Segments:
    """The segments; raise if they do not have n entries, as `what` has."""
    if rows.num_entries < 0:  # traced bounds
        return Segments(rows.ptr, None, n)
    if rows.num_entries != n:
        raise ValueError(f"{who}: the segments have {rows.num_entries} entries in all, and {what} has {n}")
    return rows
