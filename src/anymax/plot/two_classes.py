"""Pictures of two classes: the probability of one of them, and its loss, over its lead; each function draws on `ax` and returns it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .._array import on_host
from .._core.mapping import Mapping
from .._core.tables import document
from .._core.typing import AnyArray, Numbers
from ..functional import apply
from ..losses import verbs
from ..mappings import Softmax
from . import style
from .inputs import THREE, USUAL, Maps, maps_of, some_maps
from .style import DASHES, MARKERS, PictureOptions
from .words import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    t, maps = np.linspace(-2.0, 2.0, 17), maps_of(mappings, ())
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
    return on_host(_applied(mapping, scores))[:, 0]


def _applied(mapping: Mapping, scores: np.ndarray) -> Any:
    """p(scores); a user's function that rejects NumPy arrays gets one of torch or JAX, if that is loaded."""
    try:
        return apply(mapping, scores)
    except (TypeError, AttributeError):
        if not any(callable(value) and not isinstance(value, type) for value in mapping.constants().values()):
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


def curves(mappings: Maps | None = None, *, t: AnyArray | Numbers | None = None, ax: Axes | None = None) -> Axes:
    """The probability of the first of two classes with the scores (t, 0), as curves over t; one map alone has softmax in grey beside it.

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
    maps = some_maps("curves", mappings, USUAL)
    grid = np.linspace(-4.0, 4.0, 801) if t is None else on_host(t).astype(float)
    others = rivals(maps)
    lines = [curve(mapping, grid, others) for mapping in maps]
    ax = style.axes(ax)
    for i, (mapping, p) in enumerate(zip(maps, lines, strict=True)):
        ax.plot(grid, p, label=title(mapping), **style.line(i, ax))
    alone = len(maps) == 1 and not maps[0].is_softmax
    if alone:
        ax.plot(grid, curve(Softmax(), grid, others), label="softmax", **style.beside())
    scores = ", ".join(["t", *(f"{other:g}" for other in others)])
    ax.set(xlabel=f"$t$, with the scores $({scores})$", ylabel="probability of the first class", title=_classes(others))
    ax.set_xlim(grid[0], grid[-1])
    ax.set_ylim(-0.04, 1.04)
    return style.tidy(ax, len(maps) + alone)


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
    maps = maps_of(mappings, THREE)
    grid = np.linspace(-3.0, 3.0, 601) if t is None else on_host(t).astype(float)
    others = rivals(maps) if maps else (0.0,)
    found = [_lead_loss(mapping, others) for mapping in maps]
    ax = style.axes(ax)

    def draw(f: Callable[[np.ndarray], np.ndarray], **look: Any) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            at_zero = float(f(np.zeros(1))[0]) if scaled else 1.0
            ax.plot(grid, f(grid) / (at_zero if 0 < at_zero < np.inf else 1.0), **look)

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
    n = 1 + len(others)
    # of a map with a target of its own, the first class leads
    y, targets = mapping.corner(np.arange(n, 0.0, -1.0)[None], np), 1
    if y is None:
        low, high = (float(np.max(a)) for a in mapping.sums(np.ones((1, n), bool), np))
        mass, most = min(max(1.0, low), high), mapping.ceiling(np.ones((1, n)), np)
        most = 1.0 if most is None else np.max(most)
        # k labels; if k is not an integer, also a part of the next one
        y = np.clip(mass - most * np.arange(n), 0.0, most)[None]
        targets = max(1, int(mass))

    def f(t: np.ndarray) -> np.ndarray:
        base = np.array([*others, 0.0][: n - targets])
        lead = np.broadcast_to(t[:, None] + (others[0] if others else 0.0), (len(t), targets))
        scores = np.concatenate([lead, np.broadcast_to(base, (len(t), n - targets))], axis=-1)
        return on_host(
            verbs.loss_of_kind(mapping.own_loss, mapping, scores, np.broadcast_to(y, scores.shape), reduction="none")
        )

    return f


document(globals(), PictureOptions)
