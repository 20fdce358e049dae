"""Which entries belong to which segment: an index, bounds or lengths, checked once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .._array import (
    Array,
    asarray,
    check_axis,
    compiling,
    counts,
    device_of,
    eager,
    is_int,
    is_integer,
    is_jax,
    is_torch,
    namespace,
    number,
    on_constants,
    running_sum,
    shown,
)
from .._core.options import check_keywords
from ..kernels import ragged


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
        # by name and device: as `ptr` is, under None, and as arrays of other kinds; functools.cached_property has a lock in Python 3.11,
        # which torch.compile can't trace
        self._cache: dict[tuple[Any, str | None], Any] = {} if index is None else {("index", None): index}

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

    @property
    def index(self) -> Any:
        """The segment of each entry, [num_entries]; under a compiler num_segments for an entry without a segment."""
        if ("index", None) not in self._cache:
            self._cache["index", None] = self._find_index()
        return self._cache["index", None]

    def _find_index(self) -> Any:
        if isinstance(self.ptr, np.ndarray):
            out = np.repeat(np.arange(self.num_segments), self.lengths)
            if self.order is None:
                return out
            index = np.empty_like(out)
            index[self.order] = out
            return index
        xp = namespace(self.ptr)
        each = _arange(self.num_entries, self.ptr)
        if is_jax(self.ptr):  # the number of segments that have ended; its searchsorted takes twice as long on a CPU
            ends = xp.zeros((self.num_entries + 1,), self.ptr.dtype).at[self.ptr[1:]].add(1)
            out = running_sum(ends, xp)[:-1]
        else:
            out = xp.searchsorted(self.ptr[1:], each, side="right")
        out = xp.where(each < self.ptr[0], self.num_segments * xp.ones_like(out), out)
        return out if self.order is None else out[self.inverse]

    @property
    def inverse(self) -> Any:
        """The place of each entry in `order`, [num_entries]; None if `order` is None."""
        if ("inverse", None) not in self._cache:
            self._cache["inverse", None] = self._find_inverse()
        return self._cache["inverse", None]

    def _find_inverse(self) -> Any:
        if self.order is None:
            return None
        if isinstance(self.order, np.ndarray):
            out = np.empty_like(self.order)
            out[self.order] = np.arange(self.num_entries)
            return out
        if is_jax(self.order):
            return self.order.at[self.order].set(_arange(self.num_entries, self.order).astype(self.order.dtype))
        return namespace(self.order).argsort(self.order)

    @property
    def rank(self) -> Any:
        """The place of each entry within its segment, [num_entries]."""
        if ("rank", None) not in self._cache:
            self._cache["rank", None] = self._find_rank()
        return self._cache["rank", None]

    def _find_rank(self) -> Any:
        return (np.arange(self.num_entries) if self.order is None else self.inverse) - self.ptr[self.index]

    def ptr_of(self, x: Array) -> Any:
        """`ptr` as an array of x's kind, on its device."""
        return self.cached("ptr", x, lambda: self.ptr)

    def order_of(self, x: Array) -> Any:
        """`order` as an array of x's kind, on its device; None if the entries are sorted."""
        return self.cached("order", x, lambda: self.order)

    def index_of(self, x: Array) -> Any:
        """`index` as an array of x's kind, on its device."""
        return self.cached("index", x, lambda: self.index)

    def rank_of(self, x: Array) -> Any:
        """`rank` as an array of x's kind, on its device."""
        return self.cached("rank", x, lambda: self.rank)

    def lengths_of(self, x: Array) -> Any:
        """`lengths` as an array of x's kind, on its device."""
        return self.cached("lengths", x, lambda: self.lengths)

    def cached(self, name: Any, x: Array, make: Callable[[], Any]) -> Any:
        """The result of `make()`, its NumPy arrays as arrays of x's kind on its device; cached unless something is traced."""
        if not self.known:
            return make()
        device = str(x.device) if is_torch(x) else "jax" if is_jax(x) else None
        if (name, None) not in self._cache:
            self._cache[name, None] = make()
        if (name, device) not in self._cache:
            value = _as_array(self._cache[name, None], x)
            if not eager(x) and is_torch(x):
                return value
            self._cache[name, device] = value
        return self._cache[name, device]

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
        return namespace(values).take(values, self.index_of(values), axis=axis)

    def __repr__(self) -> str:
        return f"Segments(num_segments={self.num_segments}, num_entries={self.num_entries})"


def _as_array(value: Any, x: Array) -> Any:
    if isinstance(value, np.ndarray):
        if not (is_torch(x) or is_jax(x)):
            return value
        with on_constants(x):
            return namespace(x).asarray(np.ascontiguousarray(value), **device_of(x))
    if isinstance(value, tuple):
        parts = [_as_array(part, x) for part in value]
        return tuple(parts) if type(value) is tuple else type(value)(*parts)
    return value


def _arange(n: int, like: Any) -> Any:
    return namespace(like).arange(n, **device_of(like))


# -- from what a caller gives -------------------------------------------------------------------------------------------------------


def read(who: str, index: Any, ptr: Any, lengths: Any, num_segments: Any) -> Segments:
    """The segments by the one argument that is given."""
    arguments = [(name, a) for name, a in (("index", index), ("ptr", ptr), ("lengths", lengths)) if a is not None]
    if len(arguments) != 1:
        said = " and ".join(f"{name}=" for name, _ in arguments) or "none of them"
        raise TypeError(
            f"{who}: give exactly one of index= (the segment of each entry), ptr= (the bounds) and lengths=; got {said}"
        )
    ((name, value),) = arguments
    if num_segments is not None:
        if not is_int(number(num_segments)) or num_segments < 0:
            raise TypeError(f"{who}: num_segments must be an integer from 0 on, got {shown(num_segments)}")
        num_segments = int(num_segments)
    return read_one(who, name, value, num_segments)


def read_one(who: str, name: str, value: Any, num_segments: int | None = None) -> Segments:
    """The segments by an index, by lengths, or by bounds, which the caller may know by another name than ptr."""
    if isinstance(value, Segments):
        if num_segments not in (None, value.num_segments):
            raise ValueError(f"{who}: num_segments={num_segments}, and {name} has {value.num_segments} segments")
        return value
    if isinstance(value, (list, tuple)) and compiling():  # torch.compile can't trace the dtypes of NumPy
        value = sys.modules["torch"].tensor(value)
    value = asarray(value, name)
    if value.ndim != 1:
        raise ValueError(f"{who}: {name} must have one axis, got the shape {tuple(value.shape)}")
    if not is_integer(value) and not (isinstance(value, np.ndarray) and not value.size):
        raise TypeError(f"{who}: {name} must be integers, got {value.dtype}")
    if name not in ("index", "lengths") and not value.shape[0]:
        raise ValueError(f"{who}: {name} is empty; it has one number more than there are segments, the first of them 0")
    return (_known if eager(value) else _traced)(who, name, value, num_segments)


def _known(who: str, name: str, value: Array, num_segments: int | None) -> Segments:
    tensor = is_torch(value)
    a = np.require(value.detach().cpu().numpy() if tensor else np.asarray(value), requirements=("C", "A"))
    if a.dtype.kind == "u" and a.size and int(a.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{who}: {name}[{int(a.argmax())}] is {int(a.max())}, beyond 64 bits")
    a = a.astype(np.int64, copy=False)
    if name == "index":
        return _sorted(who, a, num_segments, tensor)
    if name == "lengths":
        ptr = _ends(who, a)
    else:
        # a change by the caller must not matter, now or later
        ptr = a.copy() if not a.flags.owndata or a is value else a
        _check_bounds(who, name, ptr)
    if num_segments not in (None, ptr.size - 1):
        raise ValueError(f"{who}: num_segments={num_segments}, and {name} has {ptr.size - 1} segments")
    return Segments(ptr, None, int(ptr[-1]))


def _sorted(who: str, index: np.ndarray, num_segments: int | None, tensor: bool) -> Segments:
    try:
        wrong, ptr, order = ragged.sort(index, num_segments, tensor)
    except ragged.TooMany as error:
        (count,) = error.args
        which = f"num_segments={count}" if num_segments is not None else f"index[{int(index.argmax())}] is {count - 1}"
        raise ValueError(
            f"{who}: {which}, and at most {ragged.MOST} segments are supported; number them from 0 on without gaps, as "
            "numpy.unique(index, return_inverse=True) does"
        ) from None
    if wrong >= 0:
        count = ptr.size - 1
        allowed = f"from 0 to {count - 1}" if count else "none, since there are no segments"
        hint = "" if num_segments is None or index[wrong] < 0 else f" (num_segments={num_segments} is too small)"
        raise IndexError(f"{who}: index[{wrong}] is {int(index[wrong])}; allowed is {allowed}{hint}")
    return Segments(ptr, order, index.size)


def _ends(who: str, lengths: np.ndarray) -> np.ndarray:
    """The bounds of segments of these lengths."""
    if (lengths < 0).any():
        first = int((lengths < 0).argmax())
        raise ValueError(f"{who}: lengths[{first}] is {int(lengths[first])}; a length is 0 or more")
    if lengths.sum(dtype=np.float64) >= 2.0**63:
        raise ValueError(f"{who}: the lengths sum to {lengths.sum(dtype=np.float64):.4g}, beyond 64 bits")
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _check_bounds(who: str, name: str, ptr: np.ndarray) -> None:
    if ptr[0]:
        raise ValueError(f"{who}: {name}[0] is {int(ptr[0])}; the first segment begins at entry 0")
    if (ptr[1:] < ptr[:-1]).any():
        at = int((ptr[1:] < ptr[:-1]).argmax())
        raise ValueError(
            f"{who}: {name}[{at + 1}] is {int(ptr[at + 1])}, below {name}[{at}], {int(ptr[at])}; {name} must ascend"
        )


def _traced(who: str, name: str, value: Array, num_segments: int | None) -> Segments:
    """`_known` in operations of the framework, without reading a value. An entry whose index is out of range has no segment."""
    xp = namespace(value)
    if name == "index":
        if num_segments is None:
            raise TypeError(f"{who}: under a compiler an index needs num_segments=, which is part of the program")
        if is_jax(value):
            from ..kernels import xla_segments  # late: jax is loaded already

            index, ptr, order = xla_segments.sort(value, num_segments)
            return Segments(ptr, order, value.shape[0], index)
        order = value.argsort(stable=True)
        ptr = xp.searchsorted(value[order], xp.arange(num_segments + 1, device=value.device), side="left")
        return Segments(ptr, order, value.shape[0])
    count = value.shape[0] - (name != "lengths")
    if num_segments not in (None, count):
        raise ValueError(f"{who}: num_segments={num_segments}, and {name} has {count} segments")
    if name == "lengths":
        value = counts(value, xp)
        value = xp.concat([xp.zeros_like(value[:1]), running_sum(value, xp)])
    return Segments(value, None, -1)  # `along` tells how many entries there are


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
