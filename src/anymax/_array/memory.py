"""Recycles the memory of results.

The system clears each page of newly allocated memory at its first touch. For a result of a megabyte that is more work than its softmax, so
pieces that are out of use are recycled, the latest first. A piece is out of use when its reference count says so, since every view of it,
in NumPy or torch, holds a reference.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np

SMALLEST = 1 << 19  # bytes; the allocator recycles smaller pieces itself
LARGE = 32 << 20  # bytes; larger results are newly allocated each time, in huge pages
LINE = 64
HUGE = 2 << 20  # bytes of a huge page; NumPy requests huge pages for arrays of twice that size or more


def _limit() -> int:
    """The most bytes to keep: ANYMAX_KEPT_MB, by default enough for a result of LARGE bytes, its gradient and the saved memory."""
    text = os.environ.get("ANYMAX_KEPT_MB") or "96"
    try:
        limit = int(float(text) * 2**20)
    except (ValueError, OverflowError):
        limit = -1
    if limit < 0:
        raise ValueError(f"ANYMAX_KEPT_MB must be a number of megabytes (0: keep none), got {text!r}")
    return limit


class Recycler:
    """Pieces of memory, the most recently used last."""

    def __init__(self, limit: int) -> None:
        counts = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
        self.limit = limit if counts else 0
        self.lock = threading.Lock()
        self.memory = [np.empty(0, np.uint8)]
        self.sizes: dict[int, tuple[int, int]] = {}  # id of a piece -> its bytes, and the offset at which it is aligned
        (self.idle,) = map(sys.getrefcount, self.memory)  # the count, as in `take`, of a piece that nobody else holds
        self.memory.clear()

    def take(self, shape: tuple[int, ...], dtype: Any, size: int) -> np.ndarray:
        """An uninitialized array of `size` bytes."""
        if not SMALLEST <= size <= LARGE or not self.limit or not self.lock.acquire(False):
            return np.empty(shape, dtype)
        try:  # an interrupt may come between any two steps: a piece that is then missing from `memory` is not recycled
            # sizes are rounded up, so that results with a row more or less can use the same piece
            step = HUGE if size >= HUGE // 2 else 1 << (size.bit_length() - 4)
            room = -(-size // step) * step
            memory, sizes = self.memory, self.sizes
            uses = list(map(sys.getrefcount, memory))
            for i in range(len(uses) - 1, -1, -1):
                if uses[i] == self.idle and sizes[id(memory[i])][0] == room:
                    break
            else:
                i = self._more(room)
            if i != len(memory) - 1:
                memory.append(memory.pop(i))
            return np.ndarray(shape, dtype, memory[-1], sizes[id(memory[-1])][1])
        finally:
            self.lock.release()

    def _more(self, room: int) -> int:
        unit = HUGE if room >= HUGE else LINE
        memory = np.empty(room + unit, np.uint8)
        self.sizes[id(memory)] = room, -memory.ctypes.data % unit
        self.memory.append(memory)
        while self.total() > self.limit and len(self.memory) > 1:  # a piece in use lives on with its user
            del self.sizes[id(self.memory.pop(0))]
        return len(self.memory) - 1

    def total(self) -> int:
        return sum(self.sizes[id(memory)][0] for memory in self.memory)


recycler = Recycler(_limit())
