"""The processes that share the classes, as two operations with correct derivatives.

A value that is the same on every process is *common*: thresholds, sums, losses. A value that differs between processes *varies*: scores,
probabilities. `stack` collects varying values into a common one, and is the only operation that communicates in a forward pass. `vary`
lets each process use a common value by itself, as `jax.lax.pvary` does; its backward pass adds up the gradients of all processes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from .._array import Array, differentiates

_CALLS = 8  # the next call is predicted from at most this many last calls
_RUNS = 4096  # sequences of calls that are remembered for a group


class Message(NamedTuple):
    """What each process sends in a collective: how many numbers, and their dtype."""

    count: int
    dtype: Any


class Expected:
    """Predicts the first collective of a group's next call; equal on all processes, since all have made the same calls."""

    def __init__(self, first: Message) -> None:
        self.last: tuple[Message, ...] = (first,)
        self.after: dict[tuple[Message, ...], Message] = {}  # what last followed a sequence of calls

    def next(self) -> Message:
        """What followed the longest known sequence of last calls; if none is known, the last message again."""
        runs = (self.last[i:] for i in range(len(self.last)))
        return next((self.after[run] for run in runs if run in self.after), self.last[-1])

    def came(self, message: Message) -> None:
        if len(self.after) >= _RUNS:
            self.after.clear()
        self.after |= {self.last[i:]: message for i in range(len(self.last))}
        self.last = (*self.last, message)[-_CALLS:]


class Group(ABC):
    """The processes (or devices of JAX) that share the classes, `size` of them; `rank` is the number of this one."""

    size: int
    rank: Any
    strict: bool = False  # True if values are known, so that processes can exchange failures and sizes
    expected: Any = None  # an `Expected`, if the group is strict

    @abstractmethod
    def stack(self, a: Array) -> Array:
        """The values of all processes as a common array, [size, ...]; each process gets the gradient of its part."""

    @abstractmethod
    def vary(self, a: Array) -> Array:
        """A common value, which each process uses by itself; the gradients of all processes are added up."""

    def vary_parameter(self, value: Any) -> Any:
        """`vary` for a parameter; one without a gradient is returned unchanged."""
        return self.vary(value) if differentiates(value) else value

    def gathered(self, a: Array) -> Array:
        """`stack` without a derivative; only a strict group has it."""
        raise TypeError(f"{type(self).__name__} is not strict: its processes can't exchange messages, only results")

    def texts(self, text: str, like: Any) -> list[str]:
        """The texts of all processes, by two collectives; only a strict group has it."""
        raise TypeError(f"{type(self).__name__} is not strict: its processes can't exchange messages, only results")

    # -- operations that frameworks name differently ---------------------------------------------------------------------------

    @abstractmethod
    def mine(self, stacked: Array, block: Any) -> Array:
        """stacked[block], for the block of this process."""

    @abstractmethod
    def largest(self, a: Array, k: int) -> Array:
        """The places of the k largest entries along the last axis, in any order."""

    @abstractmethod
    def put(self, a: Array, places: Array, values: Array) -> Array:
        """A copy with the values at their places along the last axis."""


def jax() -> Any:
    """The module jax, which is loaded wherever there is a JAX array."""
    return sys.modules["jax"]
