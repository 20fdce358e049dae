"""Pictures of `benchmarks/results/`: one that is read at a glance for the CPU and for the GPU, and one of every figure."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import measured, pictures

MAPS = {"softmax": "softmax", "sparsemax": "sparsemax", "entmax15": "entmax 1.5", "sparse_softmax": "sparse softmax"}
SHAPES = ("512x1000", "64x32000", "4096x32000")
GPU_SHAPES = ("65536x128", "4096x8192", "4096x50257")


class Bar(NamedTuple):
    name: str
    ratio: float


Groups = dict[str, list[Bar]]  # under a heading


def _rows(shape: str) -> str:
    rows, classes = (int(n) for n in shape.split("x"))
    return f"{rows:,} rows of {classes:,} classes"


def _bars(run: measured.Run, groups: tuple[str, ...], shapes: tuple[str, ...], ending: str) -> Groups:
    """The maps' ratios to `torch.softmax` at these shapes; what was noisy is left out."""
    found: dict[tuple[str, str], float] = {}
    for r in run.readings:
        name, shape = measured.case_of(r, ending)
        if shape and r["group"] in groups and r["peer"] == "torch.softmax" and measured.is_sound(r):
            found[shape, name] = r["ratio"]
    listed = {
        _rows(s): [Bar(words, found[s, name]) for name, words in MAPS.items() if (s, name) in found] for s in shapes
    }
    return {heading: bars for heading, bars in listed.items() if bars}


def on_cpu(run: measured.Run) -> Groups:
    return _bars(run, measured.COLUMNS["forward"], SHAPES, "")


def on_gpu(run: measured.Run) -> Groups:
    """The maps, and attention forward: where queries reach an eighth of the keys, and where no key can be left out."""
    rows, attention = _bars(run, ("gpu forward",), GPU_SHAPES, " bfloat16"), []
    for r in run.readings:
        match = re.fullmatch(r"entmax15 \d+x\d+x(\d+)x\d+ (.*) bfloat16 (reach 1/8|scores everywhere)", r["name"])
        if match and "FlashAttention" in r["peer"] and measured.is_sound(r):
            keys = "an eighth of the keys" if match[2] == "local" else "all keys"
            attention.append(Bar(f"{int(match[1]):,} tokens, {keys}", r["ratio"]))
    return {**rows, **({"causal attention, entmax 1.5": attention} if attention else {})}


class Overview(NamedTuple):
    """A picture of a dozen bars."""

    name: str
    run: Callable[[], measured.Run | None]
    groups: Callable[[measured.Run], Groups]
    theirs: str
    words: str


CPU = Overview(
    "cpu", measured.main_run, on_cpu, "time of torch.softmax", "fp32, normal scores, forward pass into a given `out=`."
)
GPU = Overview(
    "gpu", measured.gpu_run, on_gpu, "time of torch or FlashAttention-2",
    "bf16, normal scores, in CUDA graphs: the maps against `torch.softmax`; attention, with high scores only for keys near "
    "the query (an eighth of the sequence) or for keys everywhere, against FlashAttention-2.",
)  # fmt: skip


def overview(folder: Path, of: Overview) -> str:
    """Draw the bars; the Markdown that shows them and says what they mean."""
    run = of.run()
    groups = {} if run is None else of.groups(run)
    if run is None or not groups:
        return measured.NONE
    target = folder / f"speed-{of.name}.svg"
    if pictures.old(target, (measured.RESULTS / f"{run.name}.json", pictures.__file__, __file__)):
        pictures.save(target, lambda plt: _draw_bars(groups, f"our time / {of.theirs}", plt), **{"font.size": 11})
    said = "; ".join(f"{h}: " + ", ".join(f"{b.name} {b.ratio:.2f}" for b in bars) for h, bars in groups.items())
    alt = f"Bars of our time divided by the {of.theirs}. {said}"
    return f"{pictures.shown(f'/generated/{target.name}', alt, 'speed')}\n\n{{.caption}}\n{of.words} {run.machine}."


def _draw_bars(groups: Groups, label: str, plt: Any) -> Any:
    from anymax import plot

    places: list[float] = []
    names, ratios, headings = [], [], []
    at = 0.0
    for heading, bars in groups.items():
        headings.append((at, heading))
        for i, bar in enumerate(bars, start=1):
            places.append(at - i)
            names.append(bar.name)
            ratios.append(bar.ratio)
        at -= len(bars) + 1.4
    figure, ax = plt.subplots(figsize=(6.6, 0.27 * -at + 0.7), layout="constrained")
    ink = ax.xaxis.label.get_color()
    for faster, colour, hatch in ((True, plot.style.COLOURS[0], ""), (False, plot.style.COLOURS[1], "///")):
        some = [i for i, ratio in enumerate(ratios) if (ratio < 1) is faster]
        ax.barh(
            [places[i] for i in some], [ratios[i] for i in some], 0.72, color=colour, hatch=hatch, edgecolor="white",
            linewidth=0,
        )  # fmt: skip
    most = max(1.2, 1.15 * max(ratios))
    for place, ratio in zip(places, ratios):
        inside = 1.0 - 0.13 * most < ratio < 1.0  # beside the bar it would lie on the line
        side = {"ha": "right", "color": "white"} if inside else {"ha": "left"}
        ax.annotate(
            f"{ratio:.2f}", (ratio, place), (-4 if inside else 4, 0), textcoords="offset points", va="center", **side
        )
    for place, heading in headings:
        ax.annotate(heading, (0, place), (2, 0), textcoords="offset points", va="center", fontweight="bold")
        ends = place - 0.5, place - len(groups[heading]) - 0.5  # not through the words
        ax.plot([1.0, 1.0], ends, color=ink, linewidth=1.2)
    ax.annotate("torch", (1.0, 1.0), xycoords=("data", "axes fraction"), va="top", ha="center")
    ax.set_yticks(places, names)
    ax.tick_params(axis="y", length=0)
    ax.set_xlim(0.0, most)
    ax.set_ylim(at + 0.9, 1.6)
    ax.set_xlabel(f"{label}\nbelow 1 we are faster")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    return figure


def every(folder: Path) -> str:
    """A picture of the ratios of each run that has any; the Markdown that shows them."""
    out = []
    for run in measured.runs():
        found = [(title, points) for title, groups in measured.COLUMNS.items() if (points := _points(run, groups))]
        if not found:
            continue
        target = folder / f"performance-{run.name}.svg"
        if pictures.old(target, (measured.RESULTS / f"{run.name}.json", pictures.__file__, __file__)):
            pictures.save(target, _dots(found))
        words = "; ".join(title for title, _ in found)
        alt = f"Our time divided by the peer's for each map and shape, on a logarithmic axis: {words}."
        out.append(
            f"{pictures.shown(f'/generated/{target.name}', alt)}\n\nOur time divided by that of `torch.softmax` (losses: "
            "`F.cross_entropy`), fp32, normal scores; left of the line we are faster. The whiskers are quartiles; what was noisy is "
            f"left out. {run.machine}."
        )
    return "\n\n".join(out) or measured.NONE


Point = tuple[str, float, float, float]  # a name, the ratio and its quartiles


def _points(run: measured.Run, groups: tuple[str, ...]) -> list[Point]:
    points = []
    for r in run.readings:
        wanted = r["group"] in groups and r["peer"] in ("torch.softmax", "F.cross_entropy") and " normal" in r["name"]
        if wanted and not r["name"].startswith("log") and measured.is_sound(r):
            points.append((r["name"].replace(" normal", "").replace(" out=", ""), r["ratio"], r["low"], r["high"]))
    return points


def _dots(found: list[tuple[str, list[Point]]]) -> Callable[[Any], Any]:
    def picture(plt: Any) -> Any:
        from anymax import plot

        heights = [len(points) for _, points in found]
        figure, axes = plt.subplots(
            len(found), 1, figsize=(7.6, 0.19 * sum(heights) + 0.9 * len(found)), height_ratios=heights, layout="constrained",
            squeeze=False, sharex=True,
        )  # fmt: skip
        for (title, points), ax in zip(found, axes[:, 0]):
            names, ratios, low, high = zip(*points)
            at = range(len(points), 0, -1)
            for faster, colour, marker in ((True, plot.style.COLOURS[0], "o"), (False, plot.style.COLOURS[1], "D")):
                some = [i for i, ratio in enumerate(ratios) if (ratio < 1) is faster]
                ax.errorbar(
                    [ratios[i] for i in some], [at[i] for i in some],
                    xerr=[[ratios[i] - low[i] for i in some], [high[i] - ratios[i] for i in some]],
                    fmt=marker, color=colour, markersize=4, elinewidth=1.2, linestyle="none",
                )  # fmt: skip
            ax.axvline(1.0, color=ax.xaxis.label.get_color(), linewidth=1.0)
            ax.set_yticks(list(at), names, fontsize=7)
            ax.set_ylim(0.2, len(points) + 0.8)
            ax.set(xscale="log", title=title)
            ax.grid(axis="x", which="both", alpha=0.25)
        axes[-1, 0].set_xlabel("our time / their time")
        ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]
        axes[-1, 0].set_xticks(ticks, [f"{t:g}" for t in ticks])
        return figure

    return picture
