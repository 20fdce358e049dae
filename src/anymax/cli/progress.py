"""Progress bars for long work, on stderr, if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


def bars() -> Progress:
    """A context with progress bars, which disappear at its end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = sys.stderr is None or not sys.stderr.isatty()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden)


def each(items: Iterable[T], words: str) -> Iterator[T]:
    """Yield the items, with a progress bar."""
    items = list(items)
    with bars() as progress:
        yield from progress.track(items, description=words)
