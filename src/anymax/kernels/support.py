"""The support of a sparse map's rows, which the native engine saves for the gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

from .._array import Array
from .arrays import arrays_of, wide


class NonZeros(NamedTuple):
    """The non-zeros of each row of a sparse map: [rows, capacity] values and indices and [rows] counts in one array."""

    memory: Array  # int32
    rows: int
    words: int  # int32 numbers of a value: 2 for float64, else 1

    @property
    def capacity(self) -> int:
        return (self.memory.shape[0] // self.rows - 1) // (self.words + 1)

    @property
    def value(self) -> Array:
        part = self.memory[: self.rows * self.capacity * self.words]
        name = "float64" if self.words == 2 else "float32"
        return arrays_of(part).viewed(part, name).reshape(self.rows, self.capacity)

    @property
    def index(self) -> Array:
        size = self.rows * self.capacity
        return self.memory[size * self.words : size * (self.words + 1)].reshape(self.rows, self.capacity)

    @property
    def count(self) -> Array:
        """The number of non-zeros; -1 where it exceeds the capacity."""
        return self.memory[self.rows * self.capacity * (self.words + 1) :]


def non_zeros_in(memory: Array, p: Array, axis: int) -> NonZeros:
    """The non-zeros of p, whose classes are along `axis`, from the engine's memory."""
    return NonZeros(memory, math.prod(p.shape) // p.shape[axis], 2 if wide(p) == "float64" else 1)
