"""Engines: `choose` walks a visible tuple, the first that does not refuse serves; the reference never refuses.

An engine is a module with a `name`, `refuse(op, mapping, x)` that answers None or a sentence, and the operations `forward(mapping, x)`,
`log_forward(mapping, x)`, `vjp(mapping, x, p, g)` and `loss(mapping, x, p, y)`. Rows come with the classes as the last axis, in the
caller's dtype. "index_loss" is the loss of class indices, and its gradient, in one pass: where no kernel has it, it is composed of the
others.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from .._array import Array, asarray
from .._mapping import Mapping
from .._names import as_mapping
from . import framework, native, reference, triton, xla

ENGINES: tuple[ModuleType, ...] = (native, triton, framework, xla, reference)
COMPILED = (
    native,
    triton,
)  # kernels of our own: they take a mask and `out`, and have the operations that others compose
OPS = ("forward", "log_forward", "vjp", "loss", "index_loss")

_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("anymax_engine", default=None)
_environment: str | None = (
    os.environ.get("ANYMAX_ENGINE") or None
)  # read once: a call of a microsecond has no time to look again


def names() -> tuple[str, ...]:
    return tuple(engine.name for engine in ENGINES)


def _by_name(name: str, source: str) -> ModuleType:
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise ValueError(f"{source}: there is no engine {name!r}; the engines are {', '.join(names())}")


def forced() -> ModuleType | None:
    """The one engine that `use` or the environment variable ANYMAX_ENGINE asks for, if any."""
    name = asked()
    return _by_name(name, "anymax.use" if _forced.get() else "ANYMAX_ENGINE") if name else None


def asked() -> str | None:
    """The name of the one engine that is asked for, None where all may serve."""
    return _forced.get() or _environment


def free_to_ask() -> Callable[[], str | None]:
    """What answers as `asked` does, as quick as it can: without the environment's word the context variable itself."""
    return asked if _environment else _forced.get


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


def compiled(op: str, mapping: Mapping, x: Array) -> ModuleType | None:
    """The compiled engine that serves an operation that is composed of others elsewhere ("log_forward", "index_loss"), if any."""
    name = asked()
    for engine in COMPILED:
        if name in (None, engine.name) and engine.refuse(op, mapping, x) is None:
            return engine
    return None


def choose(op: str, mapping: Mapping, x: Array) -> ModuleType:
    """The engine that serves `op` (one of `OPS`) of this mapping on scores like x."""
    if op not in OPS:
        raise ValueError(f"there is no operation {op!r}; the operations are {', '.join(OPS)}")
    mapping = as_mapping(mapping, "choose")
    x = asarray(x) if isinstance(x, (list, tuple, str)) else x
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
    plans: tuple[str | None, ...] = ()  # of each row: how the engine goes about it, where it says so

    def __str__(self) -> str:
        refused: dict[tuple[str, str], list[str]] = {}  # a refusal is said once, where it comes first
        for op, _, refusals in self.rows:
            for refusal in refusals:
                refused.setdefault(refusal, []).append(op)
        lines = [repr(self.mapping)]
        for (op, engine, refusals), plan in itertools.zip_longest(self.rows, self.plans):
            lines.append(f"  {op:11s} {engine}" + (f" ({plan})" if plan else ""))
            for name, reason in refusals:
                first, *others = refused[name, reason]
                also = f", also {' and '.join(others)}" if others else ""
                lines.extend([f"              ({name} refuses{also}: {reason})"] if first == op else [])
        return "\n".join(lines)

    __repr__ = __str__


def explain(mapping: Mapping, x: Any) -> Explanation:
    """Which engine serves each call of this mapping on scores like x, and why not the others. Print it to read it."""
    mapping, x = as_mapping(mapping, "explain"), asarray(x)
    rows, plans = [], []
    for op in OPS:
        engine = choose(op, mapping, x)
        plans.append(native.plan(op, mapping, x) if engine is native else None)
        refusals = []
        for other in ENGINES:
            if other is engine:
                break
            reason = other.refuse(op, mapping, x)
            refusals.append((other.name, reason or f"engine {engine.name!r} was asked for"))
        rows.append((op, engine.name, tuple(refusals)))
    return Explanation(mapping, tuple(rows), tuple(plans))


def warm_up(mapping: Mapping, shapes: Any, dtypes: Any = ("float32",), device: Any = "cuda") -> None:
    """Compiles the GPU kernels that calls of this mapping on scores of these shapes (the classes last) and dtypes want, for torch.

    A kernel is compiled with its first call, which takes seconds; a call that is captured in a CUDA graph can't wait for that. Those are
    compiled that serve p(x), log p(x), the losses of class indices and their gradients, with a mask and without.

    `anymax.warm_up(anymax.Entmax(1.5), [(4096, 1024), (8, 50_257)], ["float32", "bfloat16"])`
    """
    mapping = as_mapping(mapping, "warm_up")
    launch = triton.load()
    if isinstance(launch, str):
        raise RuntimeError(f"warm_up: the GPU engine can't serve: {launch}")
    torch = launch.torch
    kinds = [dtypes] if isinstance(dtypes, (str, torch.dtype)) else list(dtypes)
    sizes = [shapes] if isinstance(shapes, (tuple, list)) and all(type(n) is int for n in shapes) else list(shapes)
    for kind in kinds:
        dtype = getattr(torch, kind, None) if isinstance(kind, str) else kind
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"warm_up: expected dtypes such as 'bfloat16' or torch.bfloat16, got {kind!r}")
        for shape in sizes:
            shape = tuple(shape)
            if not shape or min(shape) < 1:
                raise ValueError(f"warm_up: expected shapes of scores, the classes last, got {shape}")
            mapping.check(shape[-1])
            reason = triton.refuse("forward", mapping, torch.empty(1, dtype=dtype, device=device))
            if reason is not None:
                raise RuntimeError(f"warm_up: the GPU engine can't serve {mapping!r}: {reason}")
            triton.warm_up(mapping, shape, dtype, device)
