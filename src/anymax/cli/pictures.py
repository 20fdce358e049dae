"""Whole figures for the command line: several panels of `anymax.plot` on a page, saved without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import plot
from .._core.mapping import Mapping
from ..inspection import jacobian
from ..plot import style
from ..plot.inputs import SCORES, USUAL
from ..plot.maps import panels
from . import progress


def prepare() -> None:
    """Draw to files only, with or without a display; raise a clear error without matplotlib."""
    style.pyplot().switch_backend("agg")


def page(count: int, width: float = 4.6, height: float = 4.0, columns: int = 4) -> tuple[Any, list[Any]]:
    columns = min(count, columns)
    rows = -(-count // columns)
    figure, axes = style.pyplot().subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False
    )
    flat = list(axes.flat)
    for spare in flat[count:]:
        spare.set_axis_off()
    return figure, flat[:count]


def draw(kind: str, maps: Sequence[Mapping] | None = None, x: Sequence[float] = SCORES, resolution: int = 301) -> Any:
    """Draw a picture by its name; simplex and jacobian have a panel for each map."""
    if kind in ("curves", "losses"):
        return getattr(plot, kind)(maps).figure
    if kind == "bars":
        return plot.bars(maps, x).figure
    shown = list(maps or USUAL)
    figure, axes = page(len(shown))
    bound = max(float(np.abs(jacobian(mapping, x)).max()) for mapping in shown) if kind == "jacobian" else 0.0
    for mapping, ax in progress.each(zip(shown, axes), kind):
        if kind == "simplex":
            plot.simplex(mapping, resolution=resolution, ax=ax)
        else:
            plot.jacobian(mapping, x, bound=bound or 1.0, ax=ax)
    return figure


def portrait(mapping: Mapping, x: Sequence[float]) -> Any:
    """The four pictures of one map."""
    figure, axes = page(4, width=5.4, height=4.4, columns=2)
    for panel, ax in progress.each(zip(panels(mapping, x).values(), axes), mapping.name):
        panel(ax)
    figure.suptitle(plot.title(mapping))
    return figure


def save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    finally:
        style.pyplot().close(figure)
