"""Rows in blocks: what each row has alone is computed for some rows at a time, so that intermediate results stay in a cache."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .dtypes import dtype_name
from .kinds import Array, is_torch, namespace
from .memory import recycler
from .tracing import at_least, compiling, decides, differentiates, recorded

# numbers of the rows that are computed at a time: what is read again and again fits into a second cache
BLOCK = 65536


def takes_blocks(x: Array, *others: Any) -> bool:
    """True for many rows in the memory of a CPU, where nothing traces or records operations on them and on the others."""
    if not (type(x) is np.ndarray or is_torch(x)) or not is_large(x) or x.ndim < 2 or math.prod(x.shape[:-1]) < 2:
        return False
    return decides(x) and not differentiates(x) and not recorded(*others)


def is_large(x: Array) -> bool:
    """True for more numbers than a cache holds, beside which what a further step costs is nothing; not while torch.compile traces."""
    return at_least(math.prod(x.shape), 2 * BLOCK) and not compiling()


def in_blocks(function: Callable[..., Array], x: Array, *others: Array) -> Array:
    """`function(x, *others)`, some rows at a time. Each of the others [..., m] broadcasts to the rows of x."""
    lead = tuple(x.shape[:-1])
    out: Any = None
    i = 0
    for rows in blocks(x, *others):
        part = function(*rows)
        if out is None:
            out = _room((math.prod(lead), *part.shape[1:]), part)
        out[i : i + part.shape[0]] = part
        i += part.shape[0]
    return namespace(out).reshape(out, (*lead, *out.shape[1:]))


def blocks(x: Array, *others: Array, large: int = 1) -> Iterator[list[Array]]:
    """Some rows of x, [rows, n], and their part of each of the others, in turn; `large`: so many times as many rows."""
    lead, n = tuple(x.shape[:-1]), x.shape[-1]
    every = [_by_rows(value, lead) for value in (x, *others)]
    threads = sys.modules["torch"].get_num_threads() if is_torch(x) else 1
    step = max(BLOCK * threads * large // n, 1)
    for i in range(0, math.prod(lead), step):
        yield [value[i : i + step] for value in every]


def _room(shape: tuple[int, ...], like: Any) -> Any:
    """An uninitialized array; a large one is recycled."""
    name = dtype_name(like)
    if name == "bfloat16":  # which NumPy lacks
        return like.new_empty(shape)
    room = recycler.take(shape, np.dtype(name), math.prod(shape) * np.dtype(name).itemsize)
    return sys.modules["torch"].from_numpy(room) if is_torch(like) else room


def _by_rows(value: Array, lead: tuple[int, ...]) -> Array:
    xp, width = namespace(value), value.shape[-1] if value.ndim else 1
    return xp.reshape(xp.broadcast_to(value, (*lead, width)), (-1, width))
