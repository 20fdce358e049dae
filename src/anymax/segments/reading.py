"""Reads an index, bounds or lengths: which entries belong to which segment, with an error that says what is wrong."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import _array
from .._array import Array, asarray, compiling, eager, is_integer, is_jax, is_torch, namespace, shown
from ..kernels import ragged, xla_segments


def only(who: str, index: Any, ptr: Any, lengths: Any, num_segments: Any) -> tuple[str, Any, int | None]:
    """(the name of the one argument that is given, its value, num_segments)."""
    given = [(name, a) for name, a in (("index", index), ("ptr", ptr), ("lengths", lengths)) if a is not None]
    if len(given) != 1:
        said = " and ".join(f"{name}=" for name, _ in given) or "none of them"
        raise TypeError(
            f"{who}: give exactly one of index= (the segment of each entry), ptr= (the bounds) and lengths=; got {said}"
        )
    ((name, value),) = given
    if num_segments is not None:
        if not _array.is_int(_array.number(num_segments)) or num_segments < 0:
            raise TypeError(f"{who}: num_segments must be an integer from 0 on, got {shown(num_segments)}")
        num_segments = int(num_segments)
    return name, value, num_segments


def arrange(who: str, name: str, value: Any, num_segments: int | None) -> tuple[Any, Any, int, Any]:
    """(ptr, order, num_entries, index) of `Segments`; the index is None unless it was found, too."""
    if isinstance(value, (list, tuple)) and compiling():  # torch.compile can't trace the dtypes of NumPy
        value = sys.modules["torch"].tensor(value)
    value = asarray(value, name)
    if value.ndim != 1:
        raise ValueError(f"{who}: {name} must have one axis, got the shape {tuple(value.shape)}")
    if not is_integer(value) and not (isinstance(value, np.ndarray) and not value.size):
        raise TypeError(f"{who}: {name} must be integers, got {value.dtype}")
    if name not in ("index", "lengths") and not value.shape[0]:
        raise ValueError(f"{who}: {name} is empty; it has one number more than there are segments, the first of them 0")
    if eager(value):
        return _known(who, name, value, num_segments)
    return _traced(who, name, value, num_segments)


def _known(who: str, name: str, value: Array, num_segments: int | None) -> tuple[Any, Any, int, Any]:
    tensor = is_torch(value)
    a = np.require(value.detach().cpu().numpy() if tensor else np.asarray(value), requirements=("C", "A"))
    if a.dtype.kind == "u" and a.size and int(a.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{who}: {name}[{int(a.argmax())}] is {int(a.max())}, beyond 64 bits")
    a = a.astype(np.int64, copy=False)
    if name == "index":
        try:
            wrong, ptr, order = ragged.sort(a, num_segments, tensor)
        except ragged.TooMany as error:
            (count,) = error.args
            which = f"num_segments={count}" if num_segments is not None else f"index[{int(a.argmax())}] is {count - 1}"
            raise ValueError(
                f"{who}: {which}, and at most {ragged.MOST} segments are supported; number them from 0 on without gaps, as "
                "numpy.unique(index, return_inverse=True) does"
            ) from None
        if wrong >= 0:
            count = ptr.size - 1
            allowed = f"from 0 to {count - 1}" if count else "none, since there are no segments"
            few = "" if num_segments is None or a[wrong] < 0 else f" (num_segments={num_segments} is too small)"
            raise IndexError(f"{who}: index[{wrong}] is {int(a[wrong])}; allowed is {allowed}{few}")
        return ptr, order, a.size, None
    if name == "lengths":
        if (a < 0).any():
            first = int((a < 0).argmax())
            raise ValueError(f"{who}: lengths[{first}] is {int(a[first])}; a length is 0 or more")
        if a.sum(dtype=np.float64) >= 2.0**63:
            raise ValueError(f"{who}: the lengths sum to {a.sum(dtype=np.float64):.4g}, beyond 64 bits")
        a = np.concatenate([np.zeros(1, np.int64), np.cumsum(a)])
    else:
        if a[0]:
            raise ValueError(f"{who}: {name}[0] is {int(a[0])}; the first segment begins at entry 0")
        if (a[1:] < a[:-1]).any():
            at = int((a[1:] < a[:-1]).argmax())
            raise ValueError(
                f"{who}: {name}[{at + 1}] is {int(a[at + 1])}, below {name}[{at}], {int(a[at])}; {name} must ascend"
            )
        a = a.copy() if a.flags.owndata is False or a is value else a  # a later change by the caller must not matter
    if num_segments not in (None, a.size - 1):
        raise ValueError(f"{who}: num_segments={num_segments}, and {name} has {a.size - 1} segments")
    return a, None, int(a[-1]), None


def _traced(who: str, name: str, value: Array, num_segments: int | None) -> tuple[Any, Any, int, Any]:
    """`_known` in operations of the framework, without reading a value. An entry whose index is out of range has no segment."""
    xp = namespace(value)
    if name == "index":
        if num_segments is None:
            raise TypeError(f"{who}: under a compiler an index needs num_segments=, which is part of the program")
        if is_jax(value):
            index, ptr, order = xla_segments.sort(value, num_segments)
            return ptr, order, value.shape[0], index
        order = value.argsort(stable=True)
        ptr = xp.searchsorted(value[order], xp.arange(num_segments + 1, device=value.device), side="left")
        return ptr, order, value.shape[0], None
    count = value.shape[0] - (name != "lengths")
    if num_segments not in (None, count):
        raise ValueError(f"{who}: num_segments={num_segments}, and {name} has {count} segments")
    if name == "lengths":
        value = xp.concat(
            [xp.zeros_like(value[:1]), xp.cumsum(value, 0) if is_torch(value) else xp.cumulative_sum(value)]
        )
    return value, None, -1, None
