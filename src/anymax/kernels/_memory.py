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
LARGE = (
    32 << 20
)  # bytes of a result that comes from the system afresh each time, which then clears its pages in huge ones
LINE = 64
HUGE = 2 << 20  # a huge page, which NumPy asks for in arrays of twice as much


def _limit() -> int:
    """The bytes that are kept: ANYMAX_KEPT_MB, or as many as malloc keeps at most."""
    text = os.environ.get("ANYMAX_KEPT_MB", "64")
    try:
        return int(float(text) * 2**20)
    except (ValueError, OverflowError):
        raise ValueError(f"ANYMAX_KEPT_MB must be a number of megabytes (0: keep none), got {text!r}") from None


class Kept:
    """Pieces of memory, the latest last, after one that is never lent: it has the reference count of those that are in no use."""

    def __init__(self, limit: int) -> None:
        counts = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
        self.limit = limit if counts else 0
        self.lock = threading.Lock()
        self.memory = [np.empty(0, np.uint8)]
        self.sizes = [(0, 0)]  # of each: its bytes, and where its first whole line begins

    def take(self, shape: tuple[int, ...], dtype: Any, size: int) -> np.ndarray:
        """An array of `size` bytes; what it holds is anything."""
        if not SMALLEST <= size <= LARGE or not self.limit or not self.lock.acquire(False):
            return np.empty(shape, dtype)
        try:
            step = (
                HUGE if size >= HUGE // 2 else 1 << (size.bit_length() - 4)
            )  # a row more or less takes the same piece
            room = -(-size // step) * step
            memory, sizes = self.memory, self.sizes
            uses = list(map(sys.getrefcount, memory))
            for i in range(len(uses) - 1, 0, -1):
                if uses[i] == uses[0] and sizes[i][0] == room:
                    break
            else:
                i = self._more(room)
            if i != len(sizes) - 1:
                memory.append(memory.pop(i))
                sizes.append(sizes.pop(i))
            return np.ndarray(shape, dtype, memory[-1], sizes[-1][1])
        finally:
            self.lock.release()

    def _more(self, room: int) -> int:
        unit = HUGE if room >= HUGE else LINE
        memory = np.empty(room + unit, np.uint8)
        self.memory.append(memory)
        self.sizes.append((room, -memory.ctypes.data % unit))
        while self.total() > self.limit and len(self.sizes) > 2:  # one that is in use stays with its user
            del self.memory[1], self.sizes[1]
        return len(self.sizes) - 1

    def total(self) -> int:
        return sum(room for room, _ in self.sizes)


kept = Kept(_limit())
