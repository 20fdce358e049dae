"""Margin softmax: are two drawings the same character? Trained on some alphabets of Omniglot, tested on alphabets never seen.

The alphabets are split in two halves; each is trained on and the other tested on, so that every alphabet is tested once. Latin and
Greek, which share letters, are in one half. The loss acts on the cosines of a drawing's embedding and the centres of the training
characters (`anymax.nn.MarginHead`); plain softmax has a linear layer instead. Scale and margin of each loss are chosen inside the
half that trains: on three of its alphabets, by the error on the fourth. The half under test takes no part in it.

All pairs of drawings of the half under test are compared by cosine. EER is the error rate where false accepts and false rejects are
equally frequent; TAR at a FAR is the share of true pairs accepted by the threshold that accepts that share of the false ones. The
intervals hold the chance in training, not that in the choice of alphabets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from anymax import Entmax, Mapping, Softmax, Sparsemax
from anymax.margins import AM, ArcFace, Margin
from anymax.plot import COLOURS, DASHES

from ._common import Experiment, Settings, main
from ._report import Claim, Findings
from ._statistics import difference, over_seeds

FILE = "verification/omniglot_small.npz"
HALVES = (
    ("Japanese_(katakana)", "Latin", "Greek", "Early_Aramaic"),
    ("Sanskrit", "Korean", "Tagalog", "Balinese"),
)  # the last of each chooses scale and margin
EXPERIMENT = Experiment(
    "verification",
    "Margin softmax: verifying characters of unseen alphabets",
    "Omniglot: train on some alphabets, verify pairs of others; softmax, AM, ArcFace, and entmax with and without a margin.",
    claims={
        "am": Claim("AM softmax verifies unseen classes better than plain softmax", "Wang et al. 2018, Additive margin softmax"),
        "arc": Claim("ArcFace verifies unseen classes better than plain softmax", "Deng et al. 2019, ArcFace"),
        "margin": Claim("The gain is the margin's, and not that of cosine and scale alone", "the same two"),
        "own": Claim(
            "The entmax loss, which has a margin of its own, does as well as AM softmax without being given one (within 0.2 points of EER)",
            "this project's question, from the separation margin 1 / (alpha - 1) in Blondel et al. 2019",
        ),
        "entmax": Claim("A margin on the entmax loss does as well as on softmax (within 0.2 points of EER)", "this project's question"),
    },
    seeds=3,
    data={FILE: "Omniglot's images_background_small1 and small2 (Lake et al. 2015, github.com/brendenlake/omniglot)"},
    needs=("torch", "matplotlib", "scipy"),
)  # fmt: skip
DATA = (
    "Omniglot's two small background sets (Lake et al. 2015): 8 alphabets, 242 characters, 20 drawers, 4,840 drawings, at 28 x 28. "
    f"Half A: {', '.join(HALVES[0])}; half B: {', '.join(HALVES[1])}. "
    "In training each drawing is also turned by 90, 180 and 270 degrees, as further characters."
)
EPOCHS, TRIAL_EPOCHS = 6, 3
CHOOSING = 1000  # the seed of the trials, which no run has
RATES = (1e-2, 1e-3)
CLOSE = 0.2  # points of the equal error rate: "as well as"


class Setting(NamedTuple):
    """What a loss is made of; without a scale it has a linear layer and no cosines."""

    mapping: Mapping
    scale: float | None = None
    margin: Margin = AM(0.0)

    def __str__(self) -> str:
        if self.scale is None:
            return "linear layer"
        return f"scale {self.scale:g}, margin {self.margin.parts[1] or self.margin.parts[2]:g}"


def _each(mapping: Mapping, *pairs: tuple[float, float], margin: type[AM] | type[ArcFace] = AM) -> list[Setting]:
    return [Setting(mapping, scale, margin(m)) for scale, m in pairs]


METHODS: dict[str, list[Setting]] = {
    "softmax": [Setting(Softmax())],
    "cosine softmax": _each(Softmax(), (4, 0), (8, 0), (16, 0)),
    "AM softmax": _each(Softmax(), (8, 0.1), (8, 0.2), (16, 0.1), (16, 0.2)),
    "ArcFace": _each(Softmax(), (8, 0.1), (8, 0.25), (16, 0.1), (16, 0.25), margin=ArcFace),
    "entmax 1.5": _each(Entmax(1.5), (1, 0), (2, 0), (4, 0)),
    "sparsemax": _each(Sparsemax(), (0.5, 0), (1, 0), (2, 0)),
    "AM entmax 1.5": _each(Entmax(1.5), (2, 0.1), (2, 0.2), (4, 0.1), (4, 0.2)),
}  # smaller scales for sparse maps: from a lead of 1 / (scale (alpha - 1)) on their losses are 0, and nothing is learned


class Curve(NamedTuple):
    """Shares of false and true pairs accepted, [thresholds] each, from (0, 0) to (1, 1)."""

    far: np.ndarray
    tar: np.ndarray

    @property
    def eer(self) -> float:
        """Where the curve, taken as straight between its points, meets far = 1 - tar."""
        gap = self.far - (1.0 - self.tar)  # rises from -1 to 1
        i = int(np.argmax(gap >= 0.0))
        part = -gap[i - 1] / (gap[i] - gap[i - 1])
        return float(self.far[i - 1] + part * (self.far[i] - self.far[i - 1]))

    def tar_at(self, far: float) -> float:
        """The largest share of true pairs accepted at a rate of false accepts of at most `far`."""
        return float(self.tar[np.searchsorted(self.far, far, side="right") - 1])


def curve(scores: np.ndarray, true: np.ndarray) -> Curve:
    """The ROC curve of scores [pairs] for pairs that are `true` or not; equal scores are accepted together."""
    order = np.argsort(-scores)
    scores, hits = scores[order], np.cumsum(true[order])
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    tar, far = hits[last] / hits[-1], (last + 1 - hits[last]) / (len(scores) - hits[-1])
    far, tar = np.append(0.0, far), np.append(0.0, tar)
    flat = (tar[1:-1] == tar[:-2]) & (
        tar[1:-1] == tar[2:]
    )  # inside of a level stretch: a million points that say nothing
    corners = np.concatenate([[True], ~flat, [True]])
    return Curve(far[corners], tar[corners])


def pairs(vectors: np.ndarray, characters: np.ndarray) -> Curve:
    """The curve of all pairs of different drawings, by the cosine of their unit vectors."""
    i, j = np.triu_indices(len(vectors), 1)
    return curve((vectors @ vectors.T)[i, j], characters[i] == characters[j])


def run(settings: Settings, found: Findings) -> None:
    from . import _characters  # late, as all that needs torch: listing the experiments does not

    if settings.quick:
        halves, epochs, trial = (("a", "b"), ("c", "d")), 2, 1
        drawings = _characters.invented(("a", "b", "c", "d"), characters=5, drawers=6)
        methods = {name: grid[:2] for name, grid in METHODS.items()}
        found.data = "Invented characters of four strokes: 4 alphabets of 5 characters, 6 drawers."
    else:
        halves, epochs, trial, methods = HALVES, EPOCHS, TRIAL_EPOCHS, METHODS
        drawings = _characters.omniglot(settings.data(FILE))
        found.data = DATA
    found.settings |= {"epochs": epochs, "epochs of a trial": trial, "batch": _characters.BATCH}

    def tested(train: tuple[str, ...], test: tuple[str, ...], setting: Setting, epochs: int, seed: int) -> Curve:
        net = _characters.train(drawings.of(train).turned(), *setting, epochs=epochs, seed=seed)
        part = drawings.of(test)
        return pairs(_characters.embed(net, part), part.characters)

    chosen: dict[tuple[str, int], Setting] = {}
    trials = []
    for name, half in settings.track(((m, h) for m in methods for h in (0, 1)), "choosing", lambda x: x[0]):
        grid, own = methods[name], halves[half]
        errors = [tested(own[:-1], own[-1:], s, trial, CHOOSING).eer for s in grid] if len(grid) > 1 else [0.0]
        chosen[name, half] = grid[int(np.argmin(errors))]
        if len(grid) > 1:
            trials += [
                {"loss": name, "half": "AB"[half], "setting": str(s), "EER %": 100 * e} for s, e in zip(grid, errors)
            ]

    curves: dict[str, list[list[Curve]]] = {name: [] for name in methods}
    for seed in settings.seeds:
        for name in settings.track(methods, f"seed {seed}"):
            both = [tested(halves[h], halves[1 - h], chosen[name, h], epochs, seed) for h in (0, 1)]
            curves[name].append(both)
            settings.say(f"EER {100 * np.mean([c.eer for c in both]):.2f} %")
    _tell(found, curves, {name: [str(chosen[name, h]) for h in (0, 1)] for name in methods}, trials)


def _tell(
    found: Findings, curves: dict[str, list[list[Curve]]], chosen: dict[str, list[str]], trials: list[dict[str, Any]]
) -> None:
    def figures(of: Callable[[Curve], float]) -> dict[str, list[float]]:
        return {name: [100 * float(np.mean([of(c) for c in both])) for both in seeds] for name, seeds in curves.items()}

    eer = figures(lambda c: c.eer)
    tar = {rate: figures(lambda c, rate=rate: c.tar_at(rate)) for rate in RATES}
    for claim, ours, theirs, bound in (
        ("am", "AM softmax", "softmax", 0.0),
        ("arc", "ArcFace", "softmax", 0.0),
        ("margin", "AM softmax", "cosine softmax", 0.0),
        ("margin", "ArcFace", "cosine softmax", 0.0),
        ("own", "entmax 1.5", "AM softmax", CLOSE),
        ("entmax", "AM entmax 1.5", "AM softmax", CLOSE),
    ):
        found.test(claim, f"EER of {ours} − {theirs}, points", difference(eer[ours], eer[theirs]), at_most=bound)
    rows = []
    for name in curves:
        row: dict[str, Any] = {"loss": name, "EER %": over_seeds(eer[name])}
        row |= {f"TAR % at FAR {rate:g}": over_seeds(tar[rate][name]) for rate in RATES}
        row["EER − softmax, points"] = None if name == "softmax" else difference(eer[name], eer["softmax"])
        rows.append({**row, "trained on A": chosen[name][0], "trained on B": chosen[name][1]})
    found.table("Verification of unseen characters", rows, "Mean of both halves, then over seeds.")
    note = "One seed; EER on the alphabet left out of the half that trains."
    found.table("Choosing scale and margin", trials, note)
    found.picture(lambda figure: _draw(figure, curves, eer), (11.0, 4.6), caption="ROC curves and equal error rates")


def _draw(figure: Any, curves: dict[str, list[list[Curve]]], eer: dict[str, list[float]]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1.0))
    far = np.logspace(-4, 0, 200)
    for i, (name, seeds) in enumerate(curves.items()):
        tar = np.mean([[c.tar_at(f) for f in far] for both in seeds for c in both], axis=0)
        left.plot(far, tar, label=name, color=COLOURS[i], linestyle=DASHES[i % len(DASHES)], linewidth=1.6)
    left.set(
        xscale="log",
        xlabel="false pairs accepted (FAR)",
        ylabel="true pairs accepted (TAR)",
        xlim=(1e-4, 1),
        ylim=(0, 1.01),
    )
    left.legend(frameon=False, fontsize=8, handlelength=3.2)
    left.grid(color="#E5E5E5", linewidth=0.6)
    for i, values in enumerate(reversed(eer.values())):
        interval = over_seeds(values)
        colour = COLOURS[len(eer) - 1 - i]
        right.plot(values, [i] * len(values), ".", color=colour, alpha=0.5)
        half = interval.high - interval.mean
        right.errorbar(interval.mean, i, xerr=half if np.isfinite(half) else None, fmt="o", color=colour, capsize=3)
    right.set_yticks(range(len(eer)), list(reversed(eer)))
    right.set(xlabel="equal error rate, % (points: seeds; bars: 95 %)", title="Unseen alphabets")
    right.grid(axis="x", color="#E5E5E5", linewidth=0.6)


if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT, run))
