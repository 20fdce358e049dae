"""The functions of Python that the C++ engine calls, for memory and copies."""

from __future__ import annotations

import math

import numpy as np

from .._array import Array
from .._array.memory import LARGE
from .arrays import DTYPES, MEMORY, SIZES, arrays_of, dtype_of, empty_like, room_in
from .link import MAPS, SPARSE

_BY_CODE = (*DTYPES, "int32", "int64")  # in the order of the codes of csrc/doors/python/arrays.hpp
_SPARSE = frozenset(MAPS[kind] for kind in (*SPARSE, "bounded"))


def copied(a: Array, shape: tuple[int, ...] | None) -> Array:
    return arrays_of(a).copied(a, shape)


def store(out: Array, a: Array) -> None:
    out[...] = a


def bits(a: np.ndarray) -> np.ndarray | None:
    """A bfloat16 array as uint16, since NumPy's buffers have no code for bfloat16."""
    return a.view(np.uint16) if a.dtype.name == "bfloat16" and a.dtype.isnative else None


def result(like: Array, code: int, zeros: bool) -> tuple[Array, int]:
    """Memory for a result, and whether its pages are newly allocated: 0 no, 1 most likely, 2 yes, and they hold zeros.

    Newly allocated memory costs more than the computation, so results up to LARGE bytes are recycled. For larger ones NumPy requests huge
    pages, which torch does only if configured to. Those of `np.zeros` hold zeros already, so a sparse map need not write its zeros.
    """
    arrays, dtype, shape = arrays_of(like), dtype_of(like), tuple(like.shape)
    fresh = math.prod(shape) * SIZES[dtype] > LARGE
    if fresh and zeros and code in _SPARSE and arrays.is_contiguous(like) and shape[-1] > 2048:
        return arrays.adopt(np.zeros(shape, MEMORY.get(dtype, dtype)), dtype), 2
    return empty_like(like), int(fresh)


def room(x: Array, count: int, dtype: int) -> Array:
    return room_in(arrays_of(x), (count,), _BY_CODE[dtype])
