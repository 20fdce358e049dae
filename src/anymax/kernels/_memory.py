"""Memory of results, kept for the next ones.

What an allocator takes from the system afresh comes page by page, and each is cleared at its first touch: for a result of a megabyte that
is more work than its softmax. So pieces that have gone out of use serve again, the latest first; they are known by their reference counts,
since every view of a piece, of NumPy or of torch, holds it.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np

SMALLEST = 1 << 19  # bytes: the allocator keeps smaller ones itself
MANY = SMALLEST // 8  # numbers that may take as much
LARGE = 32 << 20  # bytes of a result that comes from the system afresh each time: its pages are cleared as huge ones
LINE = 64
HUGE = 2 << 20  # a huge page, which NumPy asks for in arrays of twice as much


def _limit() -> int:
    """The bytes that are kept: ANYMAX_KEPT_MB, or what a result of LARGE bytes, its gradient and what is saved between them take."""
    text = os.environ.get("ANYMAX_KEPT_MB") or "96"
    try:
        limit = int(float(text) * 2**20)
    except (ValueError, OverflowError):
        limit = -1
    if limit < 0:
        raise ValueError(f"ANYMAX_KEPT_MB must be a number of megabytes (0: keep none), got {text!r}")
    return limit


class Recycler:
    """Pieces of memory, the latest last."""

    def __init__(self, limit: int) -> None:
        counts = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
        self.limit = limit if counts else 0
        self.lock = threading.Lock()
        self.memory = [np.empty(0, np.uint8)]
        self.sizes: dict[int, tuple[int, int]] = {}  # by the id of each: its bytes, where its first line begins
        (self.idle,) = map(sys.getrefcount, self.memory)  # counted as `take` does, of one that nobody else holds
        self.memory.clear()

    def take(self, shape: tuple[int, ...], dtype: Any, size: int) -> np.ndarray:
        """An array of `size` bytes; what it holds is anything."""
        if not SMALLEST <= size <= LARGE or not self.limit or not self.lock.acquire(False):
            return np.empty(shape, dtype)
        try:  # an interrupt may come between any two steps: what it leaves out of `memory` is free, or its user's
            # a row more or less takes the same piece
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
        while self.total() > self.limit and len(self.memory) > 1:  # one that is in use stays with its user
            del self.sizes[id(self.memory.pop(0))]
        return len(self.memory) - 1

    def total(self) -> int:
        return sum(self.sizes[id(memory)][0] for memory in self.memory)


recycler = Recycler(_limit())
