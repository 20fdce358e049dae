"""Checks that methods of transformers make before they work."""

from __future__ import annotations

import functools
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
