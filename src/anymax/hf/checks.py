"""What transformers does not hand on: checks that its methods make before they work, and the call in which one of ours runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


@functools.cache
def check_first(kind: type, name: str, check: Callable[..., None]) -> None:
    """Makes the method `name` of a class call `check` with its arguments first; a second call does nothing."""
    inner = getattr(kind, name)

    @functools.wraps(inner)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        check(self, *args, **options)
        return inner(self, *args, **options)

    setattr(kind, name, checked)


def within(method: Any) -> dict[str, Any] | None:
    """The variables of the call of a method of transformers in which this function is called; None where there is no such call."""
    code, frame = inspect.unwrap(method).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals
