"""What the pages of transforms and margins show: each function draws the picture of a page with pyplot, and returns the figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import anymax
from anymax import margins, transforms

if TYPE_CHECKING:
    from .scores import Page

ANGLES = np.linspace(0.0, np.pi, 361)
SIX = np.array([2.0, 1.4, 1.0, 0.1, -0.5, -1.0])
WIDER = {  # the page's own example, for six scores
    "mask": transforms.mask(np.array([True, True, False, True, True, False])),
    "prior": transforms.prior(log_p=np.log([0.4, 0.3, 0.1, 0.1, 0.05, 0.05])),
    "truncation": transforms.topk(3),
    "cosine": transforms.cosine(np.eye(6)),
}


def bars(page: Page, plt: Any) -> Any:
    from anymax import plot

    figure, ax = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
    transform = WIDER.get(page.name) or page.made
    after = anymax.softmax(transform(SIX))
    at = np.arange(len(SIX))
    name = page.prose.keys["example"].split("(")[0].removeprefix("transforms.")
    ax.bar(at - 0.2, anymax.softmax(SIX), 0.38, label="softmax", color=plot.style.COLOURS[0])
    ax.bar(
        at + 0.2, after, 0.38, label=f"{name}, then softmax", color=plot.style.COLOURS[1], hatch="//", edgecolor="white"
    )
    for i in np.flatnonzero(after == 0):
        ax.text(i + 0.2, 0.004, "0", ha="center", va="bottom", fontsize=9)
    ax.set_xticks(at, [f"{v:g}".replace("-", "−") for v in SIX])
    ax.set(xlabel="score", ylabel="probability")
    ax.legend(frameon=False)
    return figure


def frequencies(page: Page, plt: Any) -> Any:
    from anymax import plot

    figure, ax = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
    t = np.linspace(-4.0, 4.0, 41)
    scores = np.stack([t, np.zeros_like(t), -np.ones_like(t)], axis=-1)
    for i, kind in enumerate(("gumbel", "normal", "uniform")):
        exact = anymax.perturb_max(scores, noise=kind)[:, 0]
        drawn = transforms.noise(kind, generator=i)(np.broadcast_to(scores, (2000, *scores.shape)))
        ax.plot(
            t,
            exact,
            label=f"{kind}: PerturbMax" + " = softmax" * (kind == "gumbel"),
            color=plot.style.COLOURS[i],
            linestyle=plot.style.DASHES[i],
        )
        ax.plot(t, (drawn.argmax(axis=-1) == 0).mean(axis=0), "osD"[i], color=plot.style.COLOURS[i], markersize=3.5)
    ax.set(xlabel="$t$, with the scores $(t, 0, -1)$", ylabel="how often the first class is largest")
    ax.legend(frameon=False, title="lines: exact; points: 2,000 draws", fontsize=8, title_fontsize=8)
    return figure


def angles(page: Page, plt: Any) -> Any:
    from anymax import plot

    figure, (above, below) = plt.subplots(2, 1, figsize=(6.0, 6.6), layout="constrained", sharex=True)
    cosines = np.stack([np.cos(ANGLES), np.zeros_like(ANGLES)], axis=-1)
    y = np.zeros(len(ANGLES), dtype=np.int64)
    shown = [
        ("none", margins.AM(0.0)),
        ("AM(0.35)", margins.AM(0.35)),
        ("ArcFace(0.5)", margins.ArcFace(0.5)),
        ("SphereFace(2)", margins.SphereFace(2)),
    ]
    for i, (name, margin) in enumerate(shown):
        line = {
            "color": plot.style.COLOURS[i],
            "linestyle": plot.style.DASHES[i % len(plot.style.DASHES)],
            "label": name,
        }
        above.plot(np.degrees(ANGLES), margin(cosines, y)[:, 0], **line)
        below.plot(
            np.degrees(ANGLES),
            anymax.margin_loss(anymax.Softmax(), cosines, y, margin=margin, scale=8.0, reduction="none"),
            **line,
        )
    sparse = anymax.margin_loss(anymax.Entmax(1.5), cosines, y, margin=margins.AM(0.35), scale=8.0, reduction="none")
    below.plot(
        np.degrees(ANGLES), sparse, color=plot.style.COLOURS[4], linewidth=2.6, alpha=0.8, label="AM(0.35), entmax 1.5"
    )
    above.set(ylabel="what the loss takes for its cosine")
    below.set(xlabel="angle to the target's class, degrees", ylabel="loss, two classes, scale 8")
    above.legend(frameon=False, fontsize=8)
    below.legend(frameon=False, fontsize=8)
    return figure
