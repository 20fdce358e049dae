"""Which one engine the caller asks for: by `anymax.use`, or by the environment variable ANYMAX_ENGINE."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable

forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("anymax_engine", default=None)
environment: str | None = (
    os.environ.get("ANYMAX_ENGINE") or None
)  # read once: a call of a microsecond has no time to look again


def asked() -> str | None:
    """The name of the one engine that is asked for, None where all may serve."""
    return forced.get() or environment


def quickest() -> Callable[[], str | None]:
    """What answers as `asked` does in the least time: the context variable itself, where the environment says nothing."""
    return asked if environment else forced.get
