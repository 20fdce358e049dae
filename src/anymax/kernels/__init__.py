"""Engines: `choose` walks a visible tuple, the first that does not refuse serves; the reference never refuses.

An engine is a module with a `name`, `refuse(op, mapping, x)` that answers None or a sentence, and the operations `forward(mapping, x)`,
`vjp(mapping, x, p, g)` and `loss(mapping, x, p, y)`. Rows come with the classes as the last axis, in the caller's dtype.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .._array import Array, asarray
from .._mapping import Mapping
from . import framework, reference

ENGINES: tuple[ModuleType, ...] = (framework, reference)
OPS = ("forward", "vjp", "loss")

_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("anymax_engine", default=None)


def names() -> tuple[str, ...]:
    return tuple(engine.name for engine in ENGINES)


def _by_name(name: str, source: str) -> ModuleType:
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise ValueError(f"{source}: there is no engine {name!r}; the engines are {', '.join(names())}")


def forced() -> ModuleType | None:
    """The one engine that `use` or the environment variable ANYMAX_ENGINE asks for, if any."""
    name = _forced.get()
    if name is not None:
        return _by_name(name, "anymax.use")
    name = os.environ.get("ANYMAX_ENGINE")
    return _by_name(name, "ANYMAX_ENGINE") if name else None


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Within this context every call is served by the engine of this name; one that it refuses is an error, not a detour.

    A context variable: threads that were started inside do not see it; the environment variable ANYMAX_ENGINE holds for all.

    >>> import anymax
    >>> with anymax.use("reference"):
    ...     anymax.softmax([0.0, 0.0])
    array([0.5, 0.5])
    """
    _by_name(name, "anymax.use")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(op: str, mapping: Mapping, x: Array) -> ModuleType:
    """The engine that serves `op` ("forward", "vjp" or "loss") of this mapping on scores like x."""
    if op not in OPS:
        raise ValueError(f"there is no operation {op!r}; the operations are {', '.join(OPS)}")
    only = forced()
    if only is not None:
        reason = only.refuse(op, mapping, x)
        if reason is not None:
            raise RuntimeError(f"engine {only.name!r} was asked for and can't serve {op} of {mapping!r}: {reason}")
        return only
    return next(engine for engine in ENGINES if engine.refuse(op, mapping, x) is None)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which engine serves each operation, and the sentence of each engine that refused."""

    mapping: Mapping
    rows: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]  # (op, engine, refusals)

    def __str__(self) -> str:
        lines = [repr(self.mapping)]
        for op, engine, refusals in self.rows:
            lines.append(f"  {op:8s} {engine}")
            lines.extend(f"           ({name} refuses: {reason})" for name, reason in refusals)
        return "\n".join(lines)

    __repr__ = __str__


def explain(mapping: Mapping, x: Any) -> Explanation:
    """Which engine serves each call of this mapping on scores like x, and why not the others. Print it to read it."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"expected a mapping such as anymax.Sparsemax() as the first argument, got {mapping!r}")
    x = asarray(x)
    rows = []
    for op in OPS:
        engine = choose(op, mapping, x)
        refusals = []
        for other in ENGINES:
            if other is engine:
                break
            reason = other.refuse(op, mapping, x)
            refusals.append((other.name, reason or f"engine {engine.name!r} was asked for"))
        rows.append((op, engine.name, tuple(refusals)))
    return Explanation(mapping, tuple(rows))
