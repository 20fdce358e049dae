"""The engine that the caller names, by `anymax.use` or by the environment variable ANYMAX_ENGINE."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
from typing import Any

from .._array import recorded
from .._core.mapping import Mapping, loss_learns

forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("anymax_engine", default=None)
# read once: os.environ is slow compared with a call of 1 us
environment: str | None = os.environ.get("ANYMAX_ENGINE") or None


def asked() -> str | None:
    """The name of the engine that the caller demands, or None."""
    return forced.get() or environment


def refuse_other(name: str) -> str | None:
    """A sentence if the caller demands another engine than that of this name."""
    return None if asked() in (None, name) else f"the engine {asked()} is asked for"


def quickest() -> Callable[[], str | None]:
    """`asked`, or a faster function with the same result: the context variable's `get` where the environment names no engine."""
    return asked if environment else forced.get


def unlearned(op: str, mapping: Mapping, x: Any = None) -> str | None:
    """Why torch must see plain operations: for a parameter whose derivative does not follow from p, or a map without a derivative of its
    own whose scores have a gradient; None if it need not."""
    if mapping.traced and x is not None and recorded(x):
        return f"{mapping.name} has no derivative of its own, and the scores have a gradient; plain operations have it"
    values = mapping.params()
    if not recorded(*values.values()):
        return None
    closed = loss_learns(mapping) if op in ("loss", "index_loss") else mapping.learns
    for name, value in values.items():
        if name not in closed and recorded(value):
            return f"its derivatives in p are those of the scores, and {name} of {mapping.name} has a gradient; plain operations have it"
    return None
