"""Bars and tables for the terminal, which adapt to its width."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._core.mapping import Mapping
from ..plot.style import COLOURS
from ..plot.words import label

EIGHTHS = " ▏▎▍▌▋▊▉█"
HUES = COLOURS[:6]  # without black and grey


def bar(share: float, width: int, unicode: bool) -> str:
    """A bar of up to `width` cells; even the smallest probability above 0 is visible."""
    share = min(max(share, 0.0), 1.0)
    if not unicode:
        return ("#" * max(round(share * width), share > 0)).ljust(width)
    eighths = max(round(share * width * 8), int(share > 0))
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(width)


def short(p: float) -> str:
    """A probability; an exact zero is 0, and so differs from numbers that round to it."""
    if p == 0:
        return "0"
    return "<.001" if 0 < p < 0.0005 else f"{p:.3f}"


def number(x: float) -> str:
    return f"{x:g}"


def bars(console: Console, scores: Sequence[float], rows: Sequence[tuple[Mapping, np.ndarray]]) -> None:
    """Every map on one vector: a column for each score if the terminal is wide enough, else a block for each map."""
    unicode = (console.encoding or "").lower().startswith("utf")
    names = [label(mapping) for mapping, _ in rows]
    first = max(len(name) for name in [*names, "scores"])
    room = console.width - first - 1
    cell = room // max(len(scores), 1) - 1
    if cell >= 8:
        cell = min(cell, 24)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("scores", no_wrap=True)
        for score in scores:
            table.add_column(number(score), no_wrap=True, min_width=cell, max_width=cell)
        for name, (_, p) in zip(names, rows):
            table.add_row(name, *(_cell(v, cell, HUES[i % len(HUES)], unicode) for i, v in enumerate(p.tolist())))
        console.print(table)
        return
    left = max(len(number(score)) for score in scores)
    width = max(min(console.width - left - 8, 40), 4)
    for name, (_, p) in zip(names, rows):
        console.print(Text(name, style="bold"))
        for i, (score, v) in enumerate(zip(scores, p.tolist())):
            line = Text(number(score).rjust(left) + " ", style="dim")
            line.append_text(_cell(v, width + 6, HUES[i % len(HUES)], unicode))
            console.print(line, no_wrap=True, crop=True)


def _cell(v: float, width: int, colour: str, unicode: bool) -> Text:
    text = Text(short(v).rjust(5) + " ", style="dim" if v == 0 else "")
    return text.append(bar(v, width - 6, unicode), style=colour)


def grid(console: Console, header: Sequence[str], rows: Sequence[Sequence[Any]], numeric: int | None) -> None:
    """A plain table; columns from `numeric` on are right-aligned, none if it is None. Narrow terminals get one block per row, a pipe
    or a file the whole width."""
    cells = [[str(value) for value in row] for row in rows]
    need = sum(max(len(row[i]) for row in [list(header), *cells]) + 2 for i in range(len(header)))
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(need, console.width)
    if need > console.width:
        side = max(len(name) for name in header[1:])
        for row in cells:
            console.print(Text(row[0], style="bold"))
            for name, value in zip(header[1:], row[1:]):
                console.print(Text(f"  {name.ljust(side)}  ", style="dim").append(value, style="not dim"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for i, name in enumerate(header):
        table.add_column(name, no_wrap=True, justify="left" if numeric is None or i < numeric else "right")
    for row in cells:
        table.add_row(*(Text(value) for value in row))
    console.print(table)
