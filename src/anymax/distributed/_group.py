"""The processes that share the classes, as formulas see them: two operations, in which all derivatives are right.

What is the same on every process is *common*: thresholds, sums, losses. What each has for itself is its *own*: its scores, its
probabilities. `stack` makes common what is own, and is the only operation that communicates in a forward pass; `own` lets each process
use for itself what is common, and adds up, in a backward pass, what came of it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from .._array import Array, differentiates

_CALLS = 8  # of which a run tells what comes next
_RUNS = 4096  # that are remembered of a group


class Form(NamedTuple):
    """What a collective sends of each process."""

    count: int
    dtype: Any


class Expected:
    """The form of the first collective of the next call of a group; the same on every process, since all have had the same calls."""

    def __init__(self, first: Form) -> None:
        self.last: tuple[Form, ...] = (first,)
        self.after: dict[tuple[Form, ...], Form] = {}  # what came after some calls the last time

    def next(self) -> Form:
        """What came after the longest run of the last calls that was there before; else the same again."""
        runs = (self.last[i:] for i in range(len(self.last)))
        return next((self.after[run] for run in runs if run in self.after), self.last[-1])

    def came(self, form: Form) -> None:
        if len(self.after) >= _RUNS:
            self.after.clear()
        self.after |= {self.last[i:]: form for i in range(len(self.last))}
        self.last = (*self.last, form)[-_CALLS:]


class Group(ABC):
    """The processes (or devices of JAX) that share the classes, `size` of them; `rank` is the number of this one."""

    size: int
    rank: Any
    strict: bool = False  # True where values are at hand, so that failures and sizes are told to all
    expected: Any = None  # of a strict group: `Expected`

    @abstractmethod
    def stack(self, a: Array) -> Array:
        """[size, ...]: what each process has, common; a gradient comes back to whose part it is."""

    @abstractmethod
    def own(self, a: Array) -> Array:
        """What is common, for each process to use for itself; the gradients of all are added up."""

    def owned(self, value: Any) -> Any:
        """A parameter, for each process to use for itself: of a number nothing is added up."""
        return self.own(value) if differentiates(value) else value

    def gathered(self, a: Array) -> Array:
        """`stack`, of what has no derivative; only a strict group has it."""
        raise TypeError(
            f"{type(self).__name__} is not strict: nothing is told to all of its processes beside the results"
        )

    def texts(self, text: str, like: Any) -> list[str]:
        """The text of every process, over two collectives; only a strict group has it."""
        raise TypeError(
            f"{type(self).__name__} is not strict: nothing is told to all of its processes beside the results"
        )

    @abstractmethod
    def mine(self, stacked: Array, block: Any) -> Array:
        """stacked[block], for the block of this process."""


def jax() -> Any:
    """JAX, which is loaded where one of its arrays is at hand."""
    return sys.modules["jax"]
