"""Pictures of maps at one row of scores, over three classes, and the pictures of one map; each function draws on `ax` and returns it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._array import on_host
from .._core.mapping import Mapping
from .._core.tables import document, documented_like
from .._core.typing import AnyArray, Numbers
from ..functional import apply
from ..inspection import jacobian as _jacobian
from . import style
from .inputs import SCORES, THREE, Maps, maps_of, row_of, some_maps
from .style import DIVERGING, SEQUENTIAL, PictureOptions
from .two_classes import curves, losses
from .words import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def bars(mappings: Maps | None = None, x: AnyArray | Numbers | None = None, *, ax: Axes | None = None) -> Axes:
    """The probabilities that maps give to one row of scores, as bars side by side; each exact zero is written as 0.

    Use it to see what maps do to your scores.

    Parameters
    ----------
    mappings
        A map or its name, or a list of them; softmax, entmax 1.5 and sparsemax by default.
    x
        The scores, one row of them; (2, 1.4, 0.6, -1) by default.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("agg")
    >>> ax = anymax.plot.bars([anymax.Softmax(), anymax.Sparsemax()], [2.0, 1.4, 0.6])
    >>> len(ax.patches), [text.get_text() for text in ax.texts]
    (6, ['0'])
    """
    maps = some_maps("bars", mappings, THREE)
    x = row_of("bars", (2.0, 1.4, 0.6, -1.0) if x is None else x)
    rows = [on_host(apply(mapping, x)) for mapping in maps]
    ax = style.axes(ax)
    width = 0.8 / len(maps)
    for i, (mapping, p) in enumerate(zip(maps, rows, strict=True)):
        positions = np.arange(len(x)) + (i - (len(maps) - 1) / 2) * width
        ax.bar(positions, p, width, label=title(mapping), **style.fill(i, ax))
        for x_zero in positions[p == 0]:
            ax.annotate("0", (x_zero, 0.0), ha="center", va="bottom", fontsize="small", color=style.colour(i, ax))
    ax.set_xticks(range(len(x)), [style.shown(v) for v in x])
    ax.set(xlabel="scores", ylabel="probability", title="One row of scores")
    return style.tidy(ax, len(maps))


SMALLEST_REGION = 0.005  # share of the picture: a smaller region is only a line, and gets no label


def simplex(mapping: Mapping | str, *, extent: float = 3.0, resolution: int = 301, ax: Axes | None = None) -> Axes:
    """The largest of three probabilities over the plane of scores that sum to 0, in its true geometry.

    Use it to see where a map has exact zeros: white lines separate the regions in which 1, 2 or 3 classes have a probability above 0. A
    map with the same number everywhere has no line, and that number stands at the centre. The dashed triangle is the simplex itself:
    sparsemax keeps points inside it, and projects all others onto it.

    Parameters
    ----------
    mapping
        The map, or its name.
    extent
        How far the plane reaches from its centre.
    resolution
        The number of points along each side.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("agg")
    >>> ax = anymax.plot.simplex(anymax.Sparsemax(), resolution=61)
    >>> [text.get_text() for text in ax.texts]
    ['class 1', 'class 2', 'class 3', '2 of 3', '3 of 3']
    """
    (mapping,) = maps_of(mapping, ())
    ax = style.axes(ax)
    basis = np.array([[1.0, -1.0, 0.0], [-1.0, -1.0, 2.0]]) / np.sqrt([[2.0], [6.0]])  # orthonormal, both sum to 0
    side = np.linspace(-extent, extent, resolution)
    plane = np.stack(np.meshgrid(side, side), axis=-1)  # [row, column, 2]
    p = on_host(apply(mapping, plane @ basis))
    image = ax.pcolormesh(
        side, side, p.max(axis=-1), cmap=SEQUENTIAL, vmin=1 / 3, vmax=1.0, shading="auto", rasterized=True
    )
    ax.figure.colorbar(image, ax=ax, label="largest probability", shrink=0.85)
    size = (p > 0).sum(axis=-1)
    regions = [count for count in range(4) if (size == count).mean() > SMALLEST_REGION]
    if len(regions) > 1:
        lines = ax.contour(side, side, size, levels=[1.5, 2.5], colors="white", linewidths=1.4)
        lines.set_path_effects(style.rim(2.8))
    corners = (np.eye(3) - 1 / 3) @ basis.T
    ax.plot(*np.vstack([corners, corners[:1]]).T, color="white", linestyle=(0, (4, 3)), linewidth=1.0)
    halo = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    tag = {"ha": "center", "va": "center", "fontsize": "small", "color": "black", "bbox": halo}
    for i, corner in enumerate(corners):
        x, y = corner / np.abs(corner).max() * extent * 0.8
        ax.annotate(f"class {i + 1}", (x, y), **tag)
    for count in regions:
        if count > 1:  # the corners, where it is 1, are labelled with their classes
            at = _inside(plane, size == count) if len(regions) > 1 else (0.0, 0.0)
            ax.annotate(f"{count} of 3", tuple(at), **tag)
    ax.set(
        xlabel=r"$(x_1 - x_2) / \sqrt{2}$",
        ylabel=r"$(2 x_3 - x_1 - x_2) / \sqrt{6}$",
        title=title(mapping),
        aspect="equal",
    )
    return ax


def _inside(plane: np.ndarray, region: np.ndarray) -> np.ndarray:
    """A point deep inside the region, away from the picture's edge: it survives the most erosions; ties go to the right."""
    last, inner = region, region
    while True:
        inner = np.pad(inner, 1)
        inner = inner[1:-1, 1:-1] & inner[:-2, 1:-1] & inner[2:, 1:-1] & inner[1:-1, :-2] & inner[1:-1, 2:]
        if not inner.any():
            break
        last = inner
    points = plane[last]
    return points[np.argmax(points[:, 0] - 2.0 * np.abs(points[:, 1]))]


@documented_like(simplex)
def jacobian(
    mapping: Mapping | str, x: AnyArray | Numbers, *, bound: float | None = None, ax: Axes | None = None
) -> Axes:
    """The derivatives `dp_i / dx_j` at a row of scores, as a heat map around 0.

    Use it to see which scores move which probabilities: exact zeros stay white, and up to 8 classes show their numbers.

    Parameters
    ----------
    x
        The scores, one row of them.
    bound
        The absolute value with the darkest colour, so that several pictures can share one scale; by default the largest in
        this picture.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("agg")
    >>> ax = anymax.plot.jacobian(anymax.Sparsemax(), [1.0, 0.5, -2.0])
    >>> [text.get_text() for text in ax.texts[:3]]
    ['0.50', '−0.50', '0']
    """
    (mapping,) = maps_of(mapping, ())
    x = row_of("jacobian", x)
    j = on_host(_jacobian(mapping, x))
    ax = style.axes(ax)
    bound = float(np.abs(j).max()) or 1.0 if bound is None else bound
    ax.set_facecolor("white")
    image = ax.imshow(np.where(j == 0, np.nan, j), cmap=DIVERGING, vmin=-bound, vmax=bound)
    ax.figure.colorbar(image, ax=ax, label=r"$\partial p_i / \partial x_j$", shrink=0.85)
    n = len(x)
    if n <= 8:
        for (i, k), value in np.ndenumerate(j):
            dark = abs(value) > 0.6 * bound
            text = "0" if value == 0 else f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")
            ax.text(k, i, text, ha="center", va="center", fontsize="small", color="white" if dark else "black")
        names = [style.shown(v) for v in x]
        ax.set_xticks(range(n), names)
        ax.set_yticks(range(n), names)
    else:
        style.count(ax.xaxis, ax.yaxis)
    ax.set(xlabel="score $x_j$", ylabel="probability of the score $x_i$", title=title(mapping))
    return ax


def panels(mapping: Mapping, x: Sequence[float] = SCORES) -> dict[str, Callable[[Axes], Any]]:
    """For each picture of one map its name, and the function that draws it; the Jacobian is that at the scores x."""
    return {
        "curves": lambda ax: curves(mapping, ax=ax),
        "simplex": lambda ax: simplex(mapping, ax=ax).set_title("Three classes"),
        "losses": lambda ax: losses(mapping, ax=ax).set_title(f"Loss: {ax.get_title().lower()}"),
        "jacobian": lambda ax: jacobian(mapping, x, ax=ax).set_title("Jacobian"),
    }


document(globals(), PictureOptions)
