"""Pictures of maps and of their losses; each function draws on `ax` and returns it.

matplotlib is imported at the first call (extra `plot`). Colour-blind readers can tell the colours apart, and no line relies on its colour
alone; dark styles work too. Sizes of figures and fonts are those of matplotlib's `rcParams`, so that a picture for a column of 3.3
inches stays readable.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.mapping import Mapping
from .._core.names import as_mapping
from .._core.options import documented_like
from .._core.typing import AnyArray, Numbers
from ..functional import apply
from ..inspection import jacobian as _jacobian
from ..losses.verbs import fenchel_young, nll
from ..mappings import Entmax, NormMax, PerturbMax, Sigsoftmax, Softmax, Sparsemax, Taylor
from . import style
from .style import DASHES, DIVERGING, MARKERS, SEQUENTIAL, every_picture
from .words import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Maps = Mapping | str | Iterable[Mapping | str]  # a map or its name, or several

USUAL = (Softmax(), Entmax(1.5), Sparsemax(), NormMax(2.0), Taylor(2), Sigsoftmax(), PerturbMax())


def rivals(mappings: Maps) -> tuple[float, ...]:
    """The scores of the other classes, with which `curves` draws these maps.

    Use it to draw another curve beside those of `curves`. The result is one class of score 0, unless a map then shows no curve: because
    its total leaves no choice (budget k of k classes), or because a score of 0 has no weight (`Ratio.square()`). Then it is one class of
    score 1, or as many of score 0 as are needed.

    Parameters
    ----------
    mappings
        A map, or several that share one picture.

    Returns
    -------
    tuple[float, ...]
        The scores of the others, one or more.

    Examples
    --------
    >>> from anymax import Budget, Ratio
    >>> anymax.plot.rivals(anymax.Softmax()), anymax.plot.rivals(anymax.Ratio.square()), anymax.plot.rivals(anymax.Budget(2))
    ((0.0,), (1.0,), (0.0, 0.0))
    """
    t, maps = np.linspace(-2.0, 2.0, 17), _maps(mappings, ())
    for others in ((0.0,), (1.0,), *((0.0,) * n for n in range(2, 9))):
        if all(_fits(m, 1 + len(others)) and len(np.unique(np.round(curve(m, t, others), 6))) > 2 for m in maps):
            return others
    return (0.0,)


def _fits(mapping: Mapping, classes: int) -> bool:
    try:
        mapping.check(classes)
    except ValueError:  # its total exceeds the number of classes
        return False
    return True


def curve(mapping: Mapping, t: np.ndarray, others: tuple[float, ...]) -> np.ndarray:
    """The probability of a class at each of the scores t, beside other classes: the numbers that `curves` draws.

    Parameters
    ----------
    mapping
        The map.
    t
        The scores of the class, a NumPy array [points].
    others
        The scores of the other classes, such as those of `rivals`.

    Returns
    -------
    np.ndarray
        A NumPy array, [points].

    Examples
    --------
    >>> anymax.plot.curve(anymax.Sparsemax(), np.array([-1.0, 0.0, 0.5]), (0.0,))
    array([0.  , 0.5 , 0.75])
    """
    scores = np.concatenate([t[:, None], np.broadcast_to(others, (len(t), len(others)))], axis=-1)
    return style.numbers(_applied(mapping, scores))[:, 0]


def _applied(mapping: Mapping, scores: np.ndarray) -> Any:
    """p(scores); a user's function that rejects NumPy arrays gets one of torch or JAX, if that is loaded."""
    try:
        return apply(mapping, scores)
    except (TypeError, AttributeError):
        if not any(callable(value) for value in mapping.constants().values()):
            raise
        for name in ("torch", "jax.numpy"):
            framework = sys.modules.get(name)
            if framework is not None:
                with contextlib.suppress(TypeError, AttributeError):
                    return apply(mapping, framework.asarray(scores))
        raise


def _classes(others: tuple[float, ...]) -> str:
    words = "Two Three Four Five Six Seven Eight Nine".split()
    return f"{words[len(others) - 1]} classes"


@documented_like(every_picture)
def curves(mappings: Maps | None = None, *, t: AnyArray | Numbers | None = None, ax: Axes | None = None) -> Axes:
    """The probability of the first of two classes with the scores (t, 0), as curves over t.

    Use it to compare maps: where each is exactly 0 or 1, how steep it is, and how far its tails reach. If the scores (t, 0) do not show
    a map, the other classes are those of `rivals`, and the axis names them: `Budget(2)` needs three classes.

    Parameters
    ----------
    mappings
        A map or its name, or a list of them; seven usual ones by default.
    t
        The scores of the first class, ascending; 801 from -4 to 4 by default.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("agg")
    >>> ax = anymax.plot.curves([anymax.Softmax(), anymax.Sparsemax()])
    >>> [line.get_label() for line in ax.lines]
    ['softmax', 'sparsemax']
    """
    maps = _maps(mappings, USUAL)
    if not maps:
        raise ValueError("anymax.plot.curves: got no mappings; pass at least one, as in [Softmax()]")
    grid = np.linspace(-4.0, 4.0, 801) if t is None else style.numbers(t).astype(float)
    others = rivals(maps)
    lines = [curve(mapping, grid, others) for mapping in maps]
    ax = style.axes(ax)
    for i, (mapping, p) in enumerate(zip(maps, lines, strict=True)):
        ax.plot(grid, p, label=title(mapping), **style.line(i, ax))
    scores = ", ".join(["t", *(f"{other:g}" for other in others)])
    ax.set(xlabel=f"$t$, with the scores $({scores})$", ylabel="probability of the first class", title=_classes(others))
    ax.set_xlim(grid[0], grid[-1])
    ax.set_ylim(-0.04, 1.04)
    return style.tidy(ax, len(maps))


@documented_like(every_picture)
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
    maps = _maps(mappings, (Softmax(), Entmax(1.5), Sparsemax()))
    if not maps:
        raise ValueError("anymax.plot.bars: got no mappings; pass at least one, as in [Softmax()]")
    x = np.array([2.0, 1.4, 0.6, -1.0]) if x is None else style.numbers(x).astype(float)
    if x.ndim != 1:
        raise ValueError(f"plot.bars draws one row of scores, got an array of shape {x.shape}; choose a row")
    rows = [style.numbers(apply(mapping, x)) for mapping in maps]
    ax = style.axes(ax)
    width = 0.8 / len(maps)
    for i, (mapping, p) in enumerate(zip(maps, rows, strict=True)):
        positions = np.arange(len(x)) + (i - (len(maps) - 1) / 2) * width
        ax.bar(positions, p, width, label=title(mapping), **style.fill(i, ax))
        for x_zero in positions[p == 0]:
            ax.annotate("0", (x_zero, 0.0), ha="center", va="bottom", fontsize="small", color=style.colour(i, ax))
    ax.set_xticks(range(len(x)), [f"{v:g}".replace("-", "−") for v in x])
    ax.set(xlabel="scores", ylabel="probability", title="One row of scores")
    return style.tidy(ax, len(maps))


@documented_like(every_picture)
def losses(
    mappings: Maps | None = None,
    *,
    t: AnyArray | Numbers | None = None,
    classic: bool = True,
    scaled: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """The loss of two classes against the lead t of the target's score over the other (or the others: see `rivals`).

    Use it to compare losses: where each is exactly 0, and how it punishes a wrong answer. The loss of a map is its Fenchel-Young loss, or
    the negative log-likelihood if it has none.

    Parameters
    ----------
    mappings
        A map or its name, or a list of them; softmax, entmax 1.5 and sparsemax by default, none for `[]`.
    t
        The leads, ascending; 601 from -3 to 3 by default.
    classic
        Add the hinge, logistic, squared and modified Huber losses.
    scaled
        Divide each loss by its value at t = 0, so that all meet there; the sparsemax loss then lies on the modified Huber
        loss, and that of softmax on the logistic loss.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("agg")
    >>> ax = anymax.plot.losses(anymax.Sparsemax())
    >>> [line.get_label() for line in ax.lines]
    ['hinge', 'logistic', 'squared', 'modified Huber', 'sparsemax']
    """
    maps = _maps(mappings, (Softmax(), Entmax(1.5), Sparsemax()))
    grid = np.linspace(-3.0, 3.0, 601) if t is None else style.numbers(t).astype(float)
    others = rivals(maps) if maps else (0.0,)
    found = [_lead_loss(mapping, others) for mapping in maps]
    ax = style.axes(ax)

    def draw(f: Callable[[np.ndarray], np.ndarray], **style: Any) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            at_zero = float(f(np.zeros(1))[0]) if scaled else 1.0
            ax.plot(grid, f(grid) / (at_zero if 0 < at_zero < np.inf else 1.0), **style)

    for i, (name, f) in enumerate(CLASSIC.items() if classic else ()):
        draw(f, label=name, color=style.ink(ax), linestyle=DASHES[i], linewidth=1.2, zorder=3)
    every = max(1, len(grid) // 12)
    for i, (mapping, f) in enumerate(zip(maps, found, strict=True)):
        marks = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "markevery": (i * every // 3 % every, every)}
        wide = {"linestyle": "-", "linewidth": 3.0, "alpha": 0.75}
        draw(f, label=title(mapping), **{**style.line(i, ax), **marks, **wide})
    ax.set(
        xlabel="lead $t$ of the target's score",
        ylabel="loss / loss at $t = 0$" if scaled else "loss",
        title=_classes(others),
    )
    ax.set_xlim(grid[0], grid[-1])
    ax.set_ylim(-0.1, 4.2)
    return style.tidy(ax, 1 + len(maps) + 4 * classic)


CLASSIC: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "hinge": lambda t: np.maximum(0.0, 1.0 - t),
    "logistic": lambda t: np.logaddexp(0.0, -t),
    "squared": lambda t: (1.0 - t) ** 2,
    "modified Huber": lambda t: np.where(t >= -1.0, np.maximum(0.0, 1.0 - t) ** 2, -4.0 * t),
}


def _lead_loss(mapping: Mapping, others: tuple[float, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """The loss of one row as a function of the lead of the target, or of k targets together if the probabilities sum to k."""
    loss = fenchel_young if mapping.facts.has_potential else nll
    n, mass = 1 + len(others), float(mapping.mass)
    y = np.clip(mass - np.arange(n), 0.0, 1.0)[None]  # k labels; if k is not an integer, also a part of the next one
    targets = max(1, int(mass))

    def f(t: np.ndarray) -> np.ndarray:
        base = np.array([*others, 0.0][: n - targets])
        lead = np.broadcast_to(t[:, None] + (others[0] if others else 0.0), (len(t), targets))
        scores = np.concatenate([lead, np.broadcast_to(base, (len(t), n - targets))], axis=-1)
        return style.numbers(loss(mapping, scores, np.broadcast_to(y, scores.shape), reduction="none"))

    return f


SMALLEST_REGION = 0.005  # share of the picture: a smaller region is only a line, and gets no label


@documented_like(every_picture)
def simplex(mapping: Mapping | str, *, extent: float = 3.0, resolution: int = 301, ax: Axes | None = None) -> Axes:
    """The largest of three probabilities over the plane of scores that sum to 0, in its true geometry.

    Use it to see where a map has exact zeros: white lines separate the regions in which 1, 2 or 3 classes have a probability above 0. The
    dashed triangle is the simplex itself: sparsemax keeps points inside it, and projects all others onto it.

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
    (mapping,) = _maps(mapping, ())
    ax = style.axes(ax)
    basis = np.array([[1.0, -1.0, 0.0], [-1.0, -1.0, 2.0]]) / np.sqrt([[2.0], [6.0]])  # orthonormal, both sum to 0
    side = np.linspace(-extent, extent, resolution)
    plane = np.stack(np.meshgrid(side, side), axis=-1)  # [row, column, 2]
    p = style.numbers(apply(mapping, plane @ basis))
    image = ax.pcolormesh(
        side, side, p.max(axis=-1), cmap=SEQUENTIAL, vmin=1 / 3, vmax=1.0, shading="auto", rasterized=True
    )
    ax.figure.colorbar(image, ax=ax, label="largest probability", shrink=0.85)
    size = (p > 0).sum(axis=-1)
    regions = [count for count in range(4) if (size == count).mean() > SMALLEST_REGION]
    if len(regions) > 1:
        ax.contour(side, side, size, levels=[1.5, 2.5], colors="white", linewidths=1.4)
    corners = (np.eye(3) - 1 / 3) @ basis.T
    ax.plot(*np.vstack([corners, corners[:1]]).T, color="white", linestyle=(0, (4, 3)), linewidth=1.0, alpha=0.9)
    halo = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    tag = {"ha": "center", "va": "center", "fontsize": "small", "color": "black", "bbox": halo}
    for i, corner in enumerate(corners):
        x, y = corner / np.abs(corner).max() * extent * 0.8
        ax.annotate(f"class {i + 1}", (x, y), **tag)
    for count in regions if len(regions) > 1 else ():
        if count == 1:  # the corners, which are labelled with their classes
            continue
        x, y = _inside(plane, size == count)
        ax.annotate(f"{count} of 3", (x, y), **tag)
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


@documented_like(every_picture)
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
    (mapping,) = _maps(mapping, ())
    x = style.numbers(x).astype(float)
    if x.ndim != 1:
        raise ValueError(f"plot.jacobian draws one row of scores, got an array of shape {x.shape}; choose a row")
    j = style.numbers(_jacobian(mapping, x))
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
        names = [f"{v:g}".replace("-", "−") for v in x]
        ax.set_xticks(range(n), names)
        ax.set_yticks(range(n), names)
    else:
        style.count(ax.xaxis, ax.yaxis)
    ax.set(xlabel="score $x_j$", ylabel="probability of the score $x_i$", title=title(mapping))
    return ax


# -- helpers ----------------------------------------------------------------------------------------------------------


def _plain(mapping: Mapping) -> Mapping:
    """The map with its parameters as NumPy arrays, for NumPy scores."""
    return mapping.replace(**{name: style.numbers(value) for name, value in mapping.params().items()})


def _maps(mappings: Maps | None, default: Sequence[Mapping]) -> list[Mapping]:
    mappings = default if mappings is None else mappings
    several = mappings if isinstance(mappings, Iterable) and not isinstance(mappings, str) else [mappings]
    return [_plain(as_mapping(m, "anymax.plot")) for m in several]
