"""Pictures of maps, of their losses and of what a model does with them: each function draws on `ax` and returns it.

matplotlib is imported at the first call (extra `plot`). Colours are those of Okabe and Ito, which colour-blind readers can tell
apart; no line relies on its colour alone. What is neutral has the colour of the labels, so that dark styles work too. Sizes of figures and
of words are those of matplotlib's `rcParams`, so that a picture made for a column of 3.3 inches can be read there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ._array import Array, is_array, is_torch
from ._mapping import Mapping
from ._names import as_mapping
from .functional import apply
from .inspection import jacobian as _jacobian
from .losses import fenchel_young, nll
from .mappings import Entmax, NormMax, PerturbMax, Sigsoftmax, Softmax, Sparsemax, Taylor

Axes = Any  # matplotlib's, which may not be installed

NEUTRAL = "#000000"  # stands for the colour of the labels
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", NEUTRAL, "#5A5A5A")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = "osD^vPX*"
SEQUENTIAL, DIVERGING = "cividis", "PuOr"
WEIGHTS = ("#D6E6F4", "#4A90C4", "#08306B")  # the more, the darker; all apart from the grey of exact zeros
USUAL = (Softmax(), Entmax(1.5), Sparsemax(), NormMax(2.0), Taylor(2), Sigsoftmax(), PerturbMax())


def label(mapping: Mapping) -> str:
    """The name of a map with the parameters that tell it from its kin: `entmax alpha=1.5`."""
    words = [mapping.name]
    for i, field in enumerate(dataclasses.fields(mapping)):  # type: ignore[arg-type]
        value = getattr(mapping, field.name)
        if is_array(value):
            words.append(f"{field.name}={np.round(_numpy(value), 3).tolist()}")
        elif callable(value):
            words += [f"{value.__name__.lstrip('_')}"] if field.name == "u" and hasattr(value, "__name__") else []
        elif value is not None and (i == 0 or value != field.default):
            words.append(f"{field.name}={value:g}" if isinstance(value, float) else f"{field.name}={value}")
    return " ".join(words)


SYMBOLS = {"alpha": r"\alpha"}  # of parameters, where mathematics has another word for them


def title(mapping: Mapping) -> str:
    """`label` with its parameters as mathematics."""
    name, *words = label(mapping).split()
    pairs = [word.partition("=") for word in words]
    return " ".join([name, *(_symbol(key, value) if sep else key for key, sep, value in pairs)])


def _symbol(key: str, value: str) -> str:
    symbol = SYMBOLS.get(key, key if len(key) == 1 else "")
    return f"${symbol} = {value}$" if symbol else f"{key}={value}"


def rivals(mappings: Mapping | Iterable[Mapping]) -> tuple[float, ...]:
    """The scores of the other classes beside which the probability of one with the score t says most of these maps.

    One of score 0, if that will do. It won't where the total leaves no choice (budget k of k classes), or where a score of 0 counts for
    nothing (`Ratio.square()`): then one of score 1, or as many of score 0 as it takes.
    """
    t, maps = np.linspace(-2.0, 2.0, 17), _maps(mappings, ())
    for others in ((0.0,), (1.0,), *((0.0,) * n for n in range(2, 9))):
        if all(_fits(m, 1 + len(others)) and len(np.unique(np.round(_curve(m, t, others), 6))) > 2 for m in maps):
            return others
    return (0.0,)


def _fits(mapping: Mapping, classes: int) -> bool:
    try:
        mapping.check(classes)
    except ValueError:  # more to give than there are classes
        return False
    return True


def _curve(mapping: Mapping, t: np.ndarray, others: tuple[float, ...]) -> np.ndarray:
    scores = np.concatenate([t[:, None], np.broadcast_to(others, (len(t), len(others)))], axis=-1)
    return _numpy(apply(mapping, scores))[:, 0]


def _classes(others: tuple[float, ...]) -> str:
    words = "Two Three Four Five Six Seven Eight Nine".split()
    return f"{words[len(others) - 1]} classes"


def curves(mappings: Mapping | Iterable[Mapping] | None = None, *, t: Array | None = None, ax: Axes = None) -> Axes:
    """The probability of the first of two classes with the scores (t, 0). Sparsemax is the hard sigmoid here.

    Where these scores say nothing of a map, the others are those of `rivals`, and the axis names them: three for `Budget(2)`.
    """
    maps = _maps(mappings, USUAL)
    if not maps:
        raise ValueError("anymax.plot.curves: got no mappings; pass at least one, as in [Softmax()]")
    grid = np.linspace(-4.0, 4.0, 801) if t is None else _numpy(t).astype(float)
    others = rivals(maps)
    lines = [_curve(mapping, grid, others) for mapping in maps]
    ax = _axes(ax)
    for i, (mapping, p) in enumerate(zip(maps, lines, strict=True)):
        ax.plot(grid, p, label=title(mapping), **_line(i, ax))
    scores = ", ".join(["t", *(f"{other:g}" for other in others)])
    ax.set(xlabel=f"$t$, with the scores $({scores})$", ylabel="probability of the first class", title=_classes(others))
    ax.set_xlim(grid[0], grid[-1])
    ax.set_ylim(-0.04, 1.04)
    return _tidy(ax, len(maps))


def bars(mappings: Mapping | Iterable[Mapping] | None = None, x: Array | None = None, *, ax: Axes = None) -> Axes:
    """The probabilities that maps give to one row of scores, side by side; each exact zero is written as 0."""
    maps = _maps(mappings, (Softmax(), Entmax(1.5), Sparsemax()))
    if not maps:
        raise ValueError("anymax.plot.bars: got no mappings; pass at least one, as in [Softmax()]")
    x = np.array([2.0, 1.4, 0.6, -1.0]) if x is None else _numpy(x).astype(float)
    if x.ndim != 1:
        raise ValueError(f"plot.bars draws one row of scores, got an array of shape {x.shape}; choose a row")
    rows = [_numpy(apply(mapping, x)) for mapping in maps]
    ax = _axes(ax)
    width = 0.8 / len(maps)
    for i, (mapping, p) in enumerate(zip(maps, rows, strict=True)):
        at = np.arange(len(x)) + (i - (len(maps) - 1) / 2) * width
        ax.bar(at, p, width, label=title(mapping), **_fill(i, ax))
        for place in at[p == 0]:
            ax.annotate("0", (place, 0.0), ha="center", va="bottom", fontsize="small", color=_colour(i, ax))
    ax.set_xticks(range(len(x)), [f"{v:g}".replace("-", "−") for v in x])
    ax.set(xlabel="scores", ylabel="probability", title="One row of scores")
    return _tidy(ax, len(maps))


def losses(
    mappings: Mapping | Iterable[Mapping] | None = None,
    *,
    t: Array | None = None,
    classic: bool = True,
    scaled: bool = True,
    ax: Axes = None,
) -> Axes:
    """The loss of two classes against the margin t, by which the target's score leads the other (or the others: see `rivals`).

    The loss of a map is its Fenchel-Young loss, or the negative log-likelihood where it has none. `classic` adds the hinge,
    logistic, squared and modified Huber losses. `scaled` divides each by its value at t = 0, so that all meet there: the sparsemax
    loss then lies on the modified Huber loss, and that of softmax on the logistic loss.
    """
    maps = _maps(mappings, (Softmax(), Entmax(1.5), Sparsemax()))
    grid = np.linspace(-3.0, 3.0, 601) if t is None else _numpy(t).astype(float)
    others = rivals(maps) if maps else (0.0,)
    found = [_lead_loss(mapping, others) for mapping in maps]
    ax = _axes(ax)

    def draw(f: Callable[[np.ndarray], np.ndarray], **style: Any) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            at_zero = float(f(np.zeros(1))[0]) if scaled else 1.0
            ax.plot(grid, f(grid) / (at_zero if 0 < at_zero < np.inf else 1.0), **style)

    for i, (name, f) in enumerate(CLASSIC.items() if classic else ()):
        draw(f, label=name, color=_ink(ax), linestyle=DASHES[i], linewidth=1.2, zorder=3)
    every = max(1, len(grid) // 12)
    for i, (mapping, f) in enumerate(zip(maps, found, strict=True)):
        marks = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "markevery": (i * every // 3 % every, every)}
        wide = {"linestyle": "-", "linewidth": 3.0, "alpha": 0.75}
        draw(f, label=title(mapping), **{**_line(i, ax), **marks, **wide})
    ax.set(
        xlabel="lead $t$ of the target's score",
        ylabel="loss / loss at $t = 0$" if scaled else "loss",
        title=_classes(others),
    )
    ax.set_xlim(grid[0], grid[-1])
    ax.set_ylim(-0.1, 4.2)
    return _tidy(ax, 1 + len(maps) + 4 * classic)


CLASSIC: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "hinge": lambda t: np.maximum(0.0, 1.0 - t),
    "logistic": lambda t: np.logaddexp(0.0, -t),
    "squared": lambda t: (1.0 - t) ** 2,
    "modified Huber": lambda t: np.where(t >= -1.0, np.maximum(0.0, 1.0 - t) ** 2, -4.0 * t),
}


def _lead_loss(mapping: Mapping, others: tuple[float, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """The loss of one row as a function of the lead: of the target, or where the map gives k probabilities, of k targets together."""
    loss = fenchel_young if mapping.facts.has_potential else nll
    n, mass = 1 + len(others), float(getattr(mapping, "mass", 1.0))
    y = np.clip(mass - np.arange(n), 0.0, 1.0)[None]  # k labels, and for a k that is not whole a part of the next
    targets = max(1, int(mass))

    def f(t: np.ndarray) -> np.ndarray:
        base = np.array([*others, 0.0][: n - targets])
        lead = np.broadcast_to(t[:, None] + (others[0] if others else 0.0), (len(t), targets))
        scores = np.concatenate([lead, np.broadcast_to(base, (len(t), n - targets))], axis=-1)
        return _numpy(loss(mapping, scores, np.broadcast_to(y, scores.shape), reduction="none"))

    return f


SMALLEST_REGION = 0.005  # of the picture: a region that is smaller is a line, and has no name written on it


def simplex(mapping: Mapping, *, extent: float = 3.0, resolution: int = 301, ax: Axes = None) -> Axes:
    """The largest of three probabilities over the plane of scores that sum to 0, in its true geometry.

    White lines part the regions in which 1, 2 or 3 classes have a probability above 0. The dashed triangle is the simplex
    itself: sparsemax leaves what is inside of it where it is, and projects the rest on it.
    """
    (mapping,) = _maps(mapping, ())
    ax = _axes(ax)
    basis = np.array([[1.0, -1.0, 0.0], [-1.0, -1.0, 2.0]]) / np.sqrt([[2.0], [6.0]])  # orthonormal, both sum to 0
    side = np.linspace(-extent, extent, resolution)
    plane = np.stack(np.meshgrid(side, side), axis=-1)  # [row, column, 2]
    p = _numpy(apply(mapping, plane @ basis))
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
        if count == 1:  # the corners, which have the names of the classes
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


def jacobian(mapping: Mapping, x: Array, *, bound: float | None = None, ax: Axes = None) -> Axes:
    """`dp_i / dx_j` at the scores x, as a heat map around 0; small ones with their numbers. Exact zeros stay white.

    bound: the absolute value that has the darkest colour, so that several pictures can share one scale; the largest of this one if None.
    """
    (mapping,) = _maps(mapping, ())
    x = _numpy(x).astype(float)
    if x.ndim != 1:
        raise ValueError(f"plot.jacobian draws one row of scores, got an array of shape {x.shape}; choose a row")
    j = _numpy(_jacobian(mapping, x))
    ax = _axes(ax)
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
        _count(ax.xaxis, ax.yaxis)
    ax.set(xlabel="score $x_j$", ylabel="probability of the score $x_i$", title=title(mapping))
    return ax


def attention(
    weights: Array,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    ax: Axes = None,
) -> Axes:
    """Attention weights [queries, keys], or one picture a head for [heads, queries, keys]. Exact zeros are hatched."""
    w = _numpy(weights).astype(float)
    if not w.size:
        raise ValueError(f"plot.attention: there are no weights to draw, got shape {w.shape}")
    if w.ndim == 3:
        axes = np.asarray(_grid(len(w)) if ax is None else ax, dtype=object)
        if axes.size < len(w):
            raise ValueError(f"plot.attention: {len(w)} heads need as many Axes, got {axes.size}")
        for head, (one, panel) in enumerate(zip(w, axes.flat)):
            attention(one, queries=queries, keys=keys, ax=panel).set_title(f"head {head}")
        for panel in list(axes.flat)[len(w) :]:
            panel.set_axis_off()
        return axes
    if w.ndim != 2:
        raise ValueError(f"plot.attention: expected [queries, keys] or [heads, queries, keys], got shape {w.shape}")
    ax = _axes(ax, (max(3.2, 0.36 * w.shape[1] + 1.8), max(2.6, 0.3 * w.shape[0] + 1.4)))
    ax.set_facecolor("#F2F2F2")
    ax.patch.set(hatch="////", edgecolor="#D0D0D0")
    image = ax.imshow(np.where(w == 0, np.nan, w), cmap=_shades(), vmin=0.0, vmax=max(w.max(), 1e-12), aspect="auto")
    ax.figure.colorbar(image, ax=ax, label="weight")
    _count(ax.xaxis, ax.yaxis)
    if keys is not None:
        ax.set_xticks(range(len(keys)), keys, rotation=45, ha="right", rotation_mode="anchor")
    if queries is not None:
        ax.set_yticks(range(len(queries)), queries)
    ax.set(xlabel="keys" if keys is None else "", ylabel="queries" if queries is None else "")
    ax.set_title(f"{(w == 0).mean():.0%} exact zeros")
    return ax


def support_histogram(p: Array | dict[str, Array], *, ax: Axes = None) -> Axes:
    """How many rows of p [..., classes] have 1, 2, 3, ... probabilities above 0; a dict of several gives grouped bars.

    Supports of more than 60 classes are counted in steps, so that the bars stay wide enough to be seen.
    """
    groups = p if isinstance(p, dict) else {"": p}
    ax = _axes(ax)
    sizes = {name: (_numpy(q) > 0).sum(axis=-1).ravel() for name, q in groups.items()}
    most = max((int(s.max()) for s in sizes.values() if s.size), default=1)
    step = 1 if most <= 60 else -(-most // 40)
    bars = -(-most // step)
    width = 0.8 * step / len(sizes)
    for i, (name, size) in enumerate(sizes.items()):
        share = np.bincount(-(-size // step), minlength=bars + 1) / max(size.size, 1)
        mean = f"mean {size.mean():.2f}" if size.size else "no rows"
        at = np.arange(bars + 1) * step - (step - 1) / 2 + (i - (len(sizes) - 1) / 2) * width
        ax.bar(at, share, width, label=f"{name} ({mean})" if name else mean, **_fill(i, ax))
    ax.set(
        xlabel="classes with a probability above 0" + f", in steps of {step}" * (step > 1),
        ylabel="share of rows",
        title="Support size",
    )
    empty = any((s == 0).any() for s in sizes.values())
    ax.set_xlim(0.5 - step * (1.1 if empty else 0.1), bars * step + 0.5 + 0.1 * step)
    _count(ax.xaxis)
    return _tidy(ax, len(sizes))


def calibration(p: Array, y: Array, *, bins: int = 10, name: str = "", ax: Axes = None) -> Axes:
    """Accuracy against confidence (the probability of the class predicted), in bins; a calibrated model follows the diagonal."""
    confidence, accuracy, share, error = reliability(p, y, bins)
    ax = _axes(ax)
    edges = np.linspace(0.0, 1.0, bins + 1)
    full = share > 0
    ax.bar(
        edges[:-1][full], accuracy[full], 1.0 / bins, align="edge", label="accuracy", **{**_fill(0, ax), "alpha": 0.45}
    )
    ax.plot([0, 1], [0, 1], color=_ink(ax), linestyle=DASHES[1], linewidth=1.0, label="calibrated")
    ax.scatter(
        confidence[full], accuracy[full], s=10 + 90 * share[full], color=COLOURS[1], zorder=3, label="bin (area: rows)"
    )
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.03), aspect="equal")
    ax.set_title(f"{name}\n" * bool(name) + f"calibration error {error:.3f}", fontsize="medium")
    return _tidy(ax, 1)


def reliability(p: Array, y: Array, bins: int = 10) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """(mean confidence, accuracy, share of rows) of each bin, and the expected calibration error, their weighted gap."""
    p, y = _numpy(p).astype(float), _numpy(y)
    if p.ndim != 2 or y.shape != p.shape[:1]:
        raise ValueError(f"calibration: expected p [rows, classes] and y [rows], got shapes {p.shape} and {y.shape}")
    sure, hit = p.max(axis=-1), p.argmax(axis=-1) == y
    index = np.clip((sure * bins).astype(int), 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    rows = np.maximum(count, 1)
    confidence, accuracy = (np.bincount(index, weights=w, minlength=bins) / rows for w in (sure, hit.astype(float)))
    share = count / max(len(p), 1)
    return confidence, accuracy, share, float((share * np.abs(confidence - accuracy)).sum())


# -- helpers ----------------------------------------------------------------------------------------------------------


def _numpy(x: Any) -> np.ndarray:
    if is_torch(x):
        x = x.detach().cpu()
        x = x.float() if x.is_floating_point() and x.element_size() < 4 else x
    return np.asarray(x)


def _plain(mapping: Mapping) -> Mapping:
    """The map with its parameters as NumPy arrays, for NumPy scores."""
    return mapping.replace(**{name: _numpy(value) for name, value in mapping.params().items()})


def _maps(given: Mapping | Iterable[Mapping] | None, default: Sequence[Mapping]) -> list[Mapping]:
    if given is None:
        return [_plain(m) for m in default]
    several = given if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    return [_plain(as_mapping(m, "anymax.plot")) for m in several]


def pyplot() -> Any:
    """matplotlib.pyplot, or a clear error."""
    try:
        import matplotlib.pyplot as plt  # late: an optional extra, and slow to import
    except ImportError as error:
        raise ImportError("anymax.plot needs matplotlib; install it with: pip install 'anymax[plot]'") from error
    return plt


def _axes(ax: Axes, size: tuple[float, float] | None = None) -> Axes:
    """`ax`, or a new one: of the size that matplotlib is set to, unless what is drawn asks for another."""
    return pyplot().subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def _grid(n: int) -> Any:
    columns = min(n, 4)
    rows = -(-n // columns)
    return pyplot().subplots(rows, columns, figsize=(3.2 * columns, 2.8 * rows), layout="constrained", squeeze=False)[1]


def _ink(ax: Axes) -> Any:
    """The colour of the labels: black, or what a dark style has."""
    return ax.xaxis.label.get_color()


def _colour(i: int, ax: Axes) -> Any:
    colour = COLOURS[i % len(COLOURS)]
    return _ink(ax) if colour == NEUTRAL else colour


def _line(i: int, ax: Axes) -> dict[str, Any]:
    return {"color": _colour(i, ax), "linestyle": DASHES[i % len(DASHES)], "linewidth": 2.0}


def _fill(i: int, ax: Axes) -> dict[str, Any]:
    return {
        "color": _colour(i, ax),
        "alpha": 0.8,
        "edgecolor": ax.get_facecolor(),
        "linewidth": 0.5,
        "hatch": ("", "//", "..", "xx")[i % 4],
    }


def _shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap  # late, like pyplot

    return LinearSegmentedColormap.from_list("weights", WEIGHTS)


def _count(*sides: Any) -> None:
    """Ticks at whole numbers only."""
    for side in sides:
        side.get_major_locator().set_params(integer=True)


def _tidy(ax: Axes, entries: int) -> Axes:
    ax.grid(color=_ink(ax), alpha=0.12, linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if entries:
        _legend(ax, entries)
    return ax


def _legend(ax: Axes, entries: int) -> None:
    """Below the axes, where it covers nothing: under the ticks, their numbers and the label."""
    import matplotlib as mpl  # late, like pyplot
    from matplotlib.font_manager import FontProperties
    from matplotlib.transforms import ScaledTranslation

    def points(size: Any) -> float:
        return FontProperties(size=size).get_size_in_points()

    down = sum(1.3 * points(mpl.rcParams[key]) for key in ("xtick.labelsize", "axes.labelsize"))
    down += sum(mpl.rcParams[key] for key in ("xtick.major.size", "xtick.major.pad", "axes.labelpad"))
    wide = ax.get_position().width * ax.figure.get_figwidth()  # inches
    columns = min(entries, max(1, int(wide / (0.15 * points("small")))))  # a name has about a dozen letters
    place = ax.transAxes + ScaledTranslation(0.0, -down / 72.0, ax.figure.dpi_scale_trans)
    ax.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=place, ncols=columns, fontsize="small",
        frameon=False, handlelength=2.6, columnspacing=1.2, labelspacing=0.3, borderaxespad=0.2,
    )  # fmt: skip
