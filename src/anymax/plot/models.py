"""Pictures of the results of a model: attention, supports and calibration. `plot` exports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._array import on_host
from .._core.tables import document, documented_like
from .._core.typing import AnyArray, Numbers
from . import style
from .style import COLOURS, DASHES, PictureOptions

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def attention(
    weights: AnyArray | Numbers,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    mask: AnyArray | Sequence[Any] | None = None,
    ax: Axes | Any = None,
) -> Axes | Any:
    """Attention weights as a heat map, in which exact zeros are hatched and masked keys have a colour of their own; the title gives the
    share of zeros.

    Use it to see what a head attends to, and what a sparse map leaves out. Give the mask of the call too: without it, the keys that a
    query may not see look like zeros of the map, and are counted as such.

    Parameters
    ----------
    weights
        [queries, keys], or [heads, queries, keys] for a picture of each head, as `anymax.attention` returns them with
        `need_weights=True`.
    queries, keys
        Their names, such as words; numbers by default.
    mask
        Which keys each query may see, as in `anymax.attention`: boolean, True = keep, or numbers with -inf for what is masked. It
        broadcasts to the weights; a causal mask is `np.tri(len(weights), dtype=bool)`.
    ax
        The matplotlib Axes to draw on, or an array of them, one for each head; new ones by default.

    Returns
    -------
    Axes | Any
        The Axes, or the array of them where the weights have heads.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("agg")
    >>> ax = anymax.plot.attention([[1.0, 0.0], [0.25, 0.75]], queries=["it", "sat"], keys=["it", "sat"])
    >>> ax.get_title()
    '25% exact zeros'
    >>> ax = anymax.plot.attention([[1.0, 0.0], [0.25, 0.75]], mask=[[True, False], [True, True]])
    >>> ax.get_title()
    '0% exact zeros'
    """
    w = on_host(weights).astype(float)
    if not w.size:
        raise ValueError(f"plot.attention: there are no weights to draw, got shape {w.shape}")
    if w.ndim not in (2, 3):
        raise ValueError(f"plot.attention: expected [queries, keys] or [heads, queries, keys], got shape {w.shape}")
    seen, most = _seen(mask, w), max(w.max(), 1e-12)
    if w.ndim == 3:
        axes = np.asarray(style.grid(len(w)) if ax is None else ax, dtype=object)
        if axes.size < len(w):
            raise ValueError(f"plot.attention: {len(w)} heads need as many Axes, got {axes.size}")
        for head, (one, its, panel) in enumerate(zip(w, seen, axes.flat)):
            _heat(panel, one, its, most, queries, keys).set_title(f"head {head}")
        for panel in list(axes.flat)[len(w) :]:
            panel.set_axis_off()
        return axes
    ax = style.axes(ax, (max(3.2, 0.36 * w.shape[1] + 1.8), max(2.6, 0.3 * w.shape[0] + 1.4)))
    return _heat(ax, w, seen, most, queries, keys)


def _seen(mask: Any, w: np.ndarray) -> np.ndarray:
    """True where a query may attend, in the shape of the weights."""
    if mask is None:
        return np.ones(w.shape, dtype=bool)
    mask = on_host(mask)
    if mask.dtype.kind not in "bf":
        raise TypeError(f"plot.attention: mask must be boolean (True = keep) or real (-inf = masked), got {mask.dtype}")
    keep = mask if mask.dtype.kind == "b" else mask != -np.inf
    try:
        keep = np.broadcast_to(keep, w.shape)
    except ValueError as error:
        raise ValueError(
            f"plot.attention: mask of shape {mask.shape} does not broadcast to weights of shape {w.shape}"
        ) from error
    if (w[~keep] != 0).any():
        raise ValueError(
            "plot.attention: a masked key has a weight; in a boolean mask True means that a query may see the key"
        )
    return keep


def _heat(
    ax: Axes, w: np.ndarray, seen: np.ndarray, most: float, queries: Sequence[str] | None, keys: Sequence[str] | None
) -> Axes:
    """The weights [queries, keys] on `ax`, in shades up to that of `most`, with a key of the shades and grounds beside them."""
    from matplotlib.colors import ListedColormap  # late, like pyplot
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    zeros = (w == 0) & seen
    hatched: dict[str, Any] = {"facecolor": style.ZERO, "edgecolor": "#C4C4C4", "hatch": "////"}
    ax.patch.set(**hatched)
    image = ax.imshow(np.where(w == 0, np.nan, w), cmap=style.shades(), vmin=0.0, vmax=most, aspect="auto")
    grounds = [Patch(label="exactly 0", **hatched)] if zeros.any() else []
    if not seen.all():
        ax.imshow(np.where(seen, np.nan, 0.0), cmap=ListedColormap([style.MASKED]), aspect="auto")
        grounds.append(Patch(label="masked", facecolor=style.MASKED, edgecolor="#C4C4C4"))
    bar = ax.figure.colorbar(image, ax=ax, label="weight", shrink=1.0 - 0.12 * len(grounds), anchor=(0.0, 1.0))
    if grounds:
        # clear of the number 0.0
        below = bar.ax.transAxes + ScaledTranslation(0.0, -8.0 / 72.0, ax.figure.dpi_scale_trans)
        bar.ax.legend(
            handles=grounds, loc="upper left", bbox_to_anchor=(0.0, 0.0), bbox_transform=below, frameon=False, fontsize="small",
            handlelength=1.2, handleheight=1.0, handletextpad=0.5, labelspacing=0.3, borderpad=0.0, borderaxespad=0.0,
        )  # fmt: skip
    style.count(ax.xaxis, ax.yaxis)
    if keys is not None:
        ax.set_xticks(range(len(keys)), keys, rotation=45, ha="right", rotation_mode="anchor")
    if queries is not None:
        ax.set_yticks(range(len(queries)), queries)
    ax.set(xlabel="keys" if keys is None else "", ylabel="queries" if queries is None else "")
    ax.set_title(f"{zeros.sum() / max(int(seen.sum()), 1):.0%} exact zeros")
    return ax


MOST_SIDE_BY_SIDE = 12  # bars of each of several groups: more would be too thin


def support_histogram(p: AnyArray | Numbers | dict[str, Any], *, ax: Axes | None = None) -> Axes:
    """How many rows have 1, 2, 3, ... probabilities above 0, as bars.

    Use it to see how sparse the results of a model are. Supports of more than 60 classes are counted in steps, so that the bars stay
    visible. Several groups of more than 12 bars each are outlines over one another.

    Parameters
    ----------
    p
        Probabilities [..., classes]; or a dict of name: probabilities, for several in one picture.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("agg")
    >>> scores = [[1.0, 0.0], [0.0, 1.0]]
    >>> ax = anymax.plot.support_histogram({"sparsemax": anymax.sparsemax(scores), "softmax": anymax.softmax(scores)})
    >>> ax.get_legend_handles_labels()[1]
    ['sparsemax (mean 1.00)', 'softmax (mean 2.00)']
    """
    groups = p if isinstance(p, dict) else {"": p}
    ax = style.axes(ax)
    sizes = {name: (on_host(q) > 0).sum(axis=-1).ravel() for name, q in groups.items()}
    most = max((int(s.max()) for s in sizes.values() if s.size), default=1)
    step = 1 if most <= 60 else -(-most // 40)
    bars = -(-most // step)
    width = 0.8 * step / len(sizes)
    edges = np.arange(bars + 2) * step - step + 0.5  # a bar has the sizes between two of them
    for i, (name, size) in enumerate(sizes.items()):
        share = np.bincount(-(-size // step), minlength=bars + 1) / max(size.size, 1)
        mean = f"mean {size.mean():.2f}" if size.size else "no rows"
        words = f"{name} ({mean})" if name else mean
        if len(sizes) > 1 and bars > MOST_SIDE_BY_SIDE:
            ax.stairs(share, edges, fill=True, label=words, **style.outline(i, ax))
        else:
            at = (edges[:-1] + edges[1:]) / 2 + (i - (len(sizes) - 1) / 2) * width
            ax.bar(at, share, width, label=words, **style.fill(i, ax))
    ax.set(
        xlabel="classes with a probability above 0" + f", in steps of {step}" * (step > 1),
        ylabel="share of rows",
        title="Support size",
    )
    empty = any((s == 0).any() for s in sizes.values())
    ax.set_xlim(0.5 - step * (1.1 if empty else 0.1), bars * step + 0.5 + 0.1 * step)
    style.count(ax.xaxis)
    return style.tidy(ax, len(sizes))


def calibration(
    p: AnyArray | Numbers, y: AnyArray | Sequence[int], *, bins: int = 10, name: str = "", ax: Axes | None = None
) -> Axes:
    """Accuracy against confidence, in bins: a calibrated model follows the diagonal.

    Use it to see whether the probability of the predicted class can be trusted. The title gives the expected calibration error;
    `reliability` returns the numbers.

    Parameters
    ----------
    p
        Probabilities [rows, classes].
    y
        The class of each row, [rows].
    bins
        The number of equal intervals from 0 to 1 for the confidences.
    name
        The name of the model, for the title.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("agg")
    >>> ax = anymax.plot.calibration([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]], [0, 0, 1], name="a model")
    >>> ax.get_title()
    'a model\\ncalibration error 0.300'
    """
    confidence, accuracy, share, error = reliability(p, y, bins)
    ax = style.axes(ax)
    edges = np.linspace(0.0, 1.0, bins + 1)
    full = share > 0
    ax.bar(
        edges[:-1][full],
        accuracy[full],
        1.0 / bins,
        align="edge",
        label="accuracy",
        **{**style.fill(0, ax), "alpha": 0.45},
    )
    ax.plot([0, 1], [0, 1], color=style.ink(ax), linestyle=DASHES[1], linewidth=1.0, label="calibrated")
    ax.scatter(
        confidence[full], accuracy[full], s=10 + 90 * share[full], color=COLOURS[1], zorder=3, label="bin (area: rows)"
    )
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.03), aspect="equal")
    ax.set_title(f"{name}\n" * bool(name) + f"calibration error {error:.3f}", fontsize="medium")
    return style.tidy(ax, 1)


@documented_like(calibration)
def reliability(
    p: AnyArray | Numbers, y: AnyArray | Sequence[int], bins: int = 10
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """The numbers of `calibration`: confidence and accuracy in bins, and the expected calibration error.

    Returns
    -------
    tuple[np.ndarray, np.ndarray, np.ndarray, float]
        (mean confidence, accuracy, share of rows), each [bins], and the error: the mean gap of the first two, weighted by
        the third.

    Examples
    --------
    >>> confidence, accuracy, share, error = anymax.plot.reliability([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]], [0, 0, 1], bins=2)
    >>> confidence.round(3), accuracy.round(3), share, round(error, 3)
    (array([0.   , 0.767]), array([0.   , 0.667]), array([0., 1.]), 0.1)
    """
    p, y = on_host(p).astype(float), on_host(y)
    if p.ndim != 2 or y.shape != p.shape[:1]:
        raise ValueError(f"calibration: expected p [rows, classes] and y [rows], got shapes {p.shape} and {y.shape}")
    sure, hit = p.max(axis=-1), p.argmax(axis=-1) == y
    index = np.clip((sure * bins).astype(int), 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    rows = np.maximum(count, 1)
    confidence, accuracy = (np.bincount(index, weights=w, minlength=bins) / rows for w in (sure, hit.astype(float)))
    share = count / max(len(p), 1)
    return confidence, accuracy, share, float((share * np.abs(confidence - accuracy)).sum())


document(globals(), PictureOptions)
