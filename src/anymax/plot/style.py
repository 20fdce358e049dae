"""How the pictures of `plot` look: colours, dashes, axes, legends.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart; no line relies on its colour alone. Neutral parts have
the colour of the labels, so that dark styles work too. Sizes of figures and fonts are those of matplotlib's `rcParams`, so that a picture
for a column of 3.3 inches stays readable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEUTRAL = "#000000"  # stands for the colour of the labels
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", NEUTRAL, "#5A5A5A")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = "osD^vPX*"
SEQUENTIAL, DIVERGING = "cividis", "PuOr"
WEIGHTS = ("#D6E6F4", "#4A90C4", "#08306B")  # the larger, the darker; all differ from the two grounds below
ZERO = "#F2F2F2"  # the ground of weights that are exactly 0, which is also hatched,
MASKED = "#E9D8B4"  # and of those that a mask leaves out
BESIDE = "#8A8A8A"  # of the curve of softmax beside that of a map; visible on light and dark grounds


def pyplot() -> Any:
    """matplotlib.pyplot; a clear error if it is not installed."""
    try:
        import matplotlib.pyplot as plt  # late: an optional extra, and slow to import
    except ImportError as error:
        raise ImportError("anymax.plot needs matplotlib; install it with: pip install 'anymax[plot]'") from error
    return plt


def axes(ax: Axes | None, size: tuple[float, float] | None = None) -> Axes:
    """`ax`, or new Axes of this size; by default of the size in matplotlib's settings."""
    return pyplot().subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def grid(n: int) -> Any:
    columns = min(n, 4)
    rows = -(-n // columns)
    return pyplot().subplots(rows, columns, figsize=(3.2 * columns, 2.8 * rows), layout="constrained", squeeze=False)[1]


def shown(value: float) -> str:
    """A number on an axis."""
    return f"{value:g}".replace("-", "−")


def ink(ax: Axes) -> Any:
    """The colour of the labels: black, or that of a dark style."""
    return ax.xaxis.label.get_color()


def colour(i: int, ax: Axes) -> Any:
    colour = COLOURS[i % len(COLOURS)]
    return ink(ax) if colour == NEUTRAL else colour


def line(i: int, ax: Axes) -> dict[str, Any]:
    return {"color": colour(i, ax), "linestyle": DASHES[i % len(DASHES)], "linewidth": 2.0}


def beside() -> dict[str, Any]:
    """The look of a line to compare with: thin, grey and dashed, behind the others."""
    return {"color": BESIDE, "linestyle": DASHES[1], "linewidth": 1.4, "zorder": 1.9}


def outline(i: int, ax: Axes) -> dict[str, Any]:
    """The look of a filled outline, through which those behind it are seen."""
    return {
        "facecolor": (colour(i, ax), 0.3),
        "edgecolor": colour(i, ax),
        "linestyle": DASHES[i % len(DASHES)],
        "linewidth": 1.5,
    }


def rim(width: float) -> list[Any]:
    """A dark rim of this width around a white line, which is seen on bright yellow too."""
    from matplotlib.patheffects import Normal, Stroke  # late, like pyplot

    return [Stroke(linewidth=width, foreground="#333333"), Normal()]


def fill(i: int, ax: Axes) -> dict[str, Any]:
    return {
        "color": colour(i, ax),
        "alpha": 0.8,
        "edgecolor": ax.get_facecolor(),
        "linewidth": 0.5,
        "hatch": ("", "//", "..", "xx")[i % 4],
    }


def shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap  # late, like pyplot

    return LinearSegmentedColormap.from_list("weights", WEIGHTS)


def count(*sides: Any) -> None:
    """Ticks at whole numbers only."""
    for side in sides:
        side.get_major_locator().set_params(integer=True)


def tidy(ax: Axes, entries: int) -> Axes:
    ax.grid(color=ink(ax), alpha=0.12, linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if entries:
        legend(ax, entries)
    return ax


def legend(ax: Axes, entries: int) -> None:
    """Add a legend below the axes, under the ticks, their numbers and the label, where it covers nothing."""
    import matplotlib as mpl  # late, like pyplot
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import ScaledTranslation

    def points(size: Any) -> float:
        return FontProperties(size=size).get_size_in_points()

    down = sum(1.3 * points(mpl.rcParams[key]) for key in ("xtick.labelsize", "axes.labelsize"))
    down += sum(mpl.rcParams[key] for key in ("xtick.major.size", "xtick.major.pad", "axes.labelpad"))
    small = FontProperties(size="small")
    names = [TextPath((0.0, 0.0), name, prop=small) for name in ax.get_legend_handles_labels()[1] if name.strip()]
    # with its line and a space
    widest = max((name.get_extents().width for name in names), default=0.0) + 4.8 * points("small")
    wide = ax.bbox.width / ax.figure.dpi  # inches, also in a subfigure
    columns = min(entries, max(1, int(72.0 * wide / widest)))
    below_axes = ax.transAxes + ScaledTranslation(0.0, -down / 72.0, ax.figure.dpi_scale_trans)
    ax.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below_axes, ncols=columns, fontsize="small",
        frameon=False, handlelength=2.6, columnspacing=1.2, labelspacing=0.3, borderaxespad=0.2,
    )  # fmt: skip


class PictureOptions(TypedDict, total=False):
    """The option that all pictures share.

    Parameters
    ----------
    ax
        The matplotlib Axes to draw on; new ones by default.

    Returns
    -------
    Axes
        The Axes.
    """

    ax: Axes | None
