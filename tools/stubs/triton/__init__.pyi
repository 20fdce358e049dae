"""Triton is typed by hand nowhere: what its decorators make of a kernel means nothing to a checker, and differs between releases."""

from typing import Any

def __getattr__(name: str) -> Any: ...
