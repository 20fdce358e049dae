"""Intents of short sentences, all layers of a pretrained encoder trained until it is over: softmax, sparse softmax, 1.5-entmax, sparsemax.

Each map has a learning rate of its own on each data set, chosen on sentences held out. A training is over when so many epochs have
brought no better held-out accuracy; every claim is judged at two such patiences.

Run it with `--cells FOLDER`: what is finished is kept there, and a run that is started again goes on from it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import anymax
from anymax import Entmax, Mapping, Softmax, Sparsemax, SparseSoftmax

from . import _cells, calibration, conformal, finetune
from ._common import Experiment, Settings, main, quick_on_one_thread, walk
from ._report import Claim, Findings
from ._statistics import Interval, difference, over_seeds, ratio

if TYPE_CHECKING:
    from ._sentences import Encoder, Sentences, Task
    from ._until import Patient

CLINC = "text/clinc150_full.json.gz"
EXPERIMENT = Experiment(
    name="intents",
    title="All layers of an encoder, fine-tuned to the end",
    about="Banking77 and CLINC150 with all six layers of MiniLM: four output maps, a learning rate for each, five seeds.",
    claims={
        "helps": Claim("In fine-tuning, sparse softmax with k = 10 is more accurate than softmax", finetune.SU),
        "point": Claim("By at least a point", f"{finetune.SU}: “about 1 % on most tasks”"),
        "entmax": Claim("1.5-entmax is at most half a point less accurate than softmax", "asked here"),
        "sparsemax": Claim("Sparsemax is at most half a point less accurate than softmax", "asked here"),
        "log-loss": Claim("With a temperature from held-out sentences, no other map has a lower log-loss than softmax", "asked here"),
        "calibrated": Claim("As trained, 1.5-entmax has a smaller calibration error than softmax", "asked here"),
        "sets": Claim("The sets that hold 99 % of the true intents are at most 5 % larger with 1.5-entmax than with softmax", "asked here"),
    },
    seeds=5,
    data={**finetune.EXPERIMENT.data, CLINC: conformal.EXPERIMENT.data[CLINC]},
    needs=("torch", "matplotlib", "scipy"),
    options={"--cells": _cells.OPTION},
    free=("--cells",),
)  # fmt: skip
MAPS: dict[str, Mapping] = {
    "softmax": Softmax(), "sparse softmax, k = 10": SparseSoftmax(k=10), "1.5-entmax": Entmax(1.5), "sparsemax": Sparsemax(),
}  # fmt: skip
ALPHAS = {"1.5-entmax": 1.5, "sparsemax": 2.0}
PATIENCES, MOST = (2, 5), 40
RATE, CHOOSING = 1e-4, 1000  # where the search begins, and its seed, which no run has
HELD, TOKENS = 0.1, 32
LEVELS, SPLITS = (0.95, 0.99), 20
RAW, SCALED = "as trained", "with a temperature"


@dataclasses.dataclass(frozen=True)
class Reading:
    """A data set as the layers to train read it, and a model of it that is not trained."""

    train: Sentences
    test: Sentences
    model: Callable[[int], Any]  # of a seed

    def parts(self, seed: int) -> tuple[Sentences, Sentences]:
        """The sentences to train on and those held out, as a seed draws them."""
        order = np.random.default_rng(seed).permutation(len(self.train))
        cut = int(HELD * len(order))
        return self.train.take(order[cut:]), self.train.take(order[:cut])


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    from ._sentences import (
        Recipe,
        Shape,
        banking,
        clinc,
        invented,
        pretrained,
        tokenizer,
        trained_on,
    )  # late: it needs torch
    from ._until import Patient

    if settings.quick:
        shape = Shape(120, 32, 2, 4, 64, 16)
        encoder = trained_on(invented(40, 1000, each=20), shape, Recipe(3, 3e-3, 32), 0)
        sets = {"invented": _reading(encoder, invented(30, 1001, each=30), 2)}
        recipe = Patient((1, 2), 4, batch=64, rising=5, decay=0.8)
        found.data = "Invented sentences of 30 classes; the encoder was trained on 40 other classes."
    else:
        folder = finetune.model_folder()
        encoder, tokens = pretrained(folder), tokenizer(folder, TOKENS)
        tasks = {
            "Banking77": banking(*(settings.data(path) for path in finetune.BANKING), tokens),
            "CLINC150": clinc(settings.data(CLINC), tokens),
        }
        sets = {name: _reading(encoder, task, len(encoder.layers)) for name, task in tasks.items()}
        recipe = Patient(PATIENCES, MOST, batch=32, rising=200, decay=0.99)
        found.data = (
            "; ".join(f"{name}: {len(task.train):,} sentences to train on, {len(task.test):,} of test, {task.classes} intents"
                      for name, task in tasks.items())
            + f". A tenth of the former, drawn anew for each seed, is held out. Encoder: {finetune.MODEL_VERSION}, all six layers."
        )  # fmt: skip
    cells = _cells.Cells(settings, "_sentences", {"recipe": dataclasses.asdict(recipe), "held": HELD, "tokens": TOKENS})
    rates: dict[tuple[str, str], float] = {}
    trials: list[dict[str, Any]] = []
    for data, name in settings.track(((d, m) for d in sets for m in MAPS), "rate of", ", ".join):
        rates[data, name], tried = _rate(cells, sets, recipe, data, name)
        found.chosen(f"rate of {name} on {data}", rates[data, name], tried)
        trials += [
            {"data": data, "map": name, "rate": r, "held-out accuracy %": 100 * (1 - e)} for r, e in tried.items()
        ]
    results: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    work = [(seed, data, name) for seed in settings.seeds for data in sets for name in MAPS]
    for seed, data, name in settings.track(work, "training", lambda one: f"{one[2]}, {one[1]}, seed {one[0]}"):
        key = ("seed", seed, data, name, f"{rates[data, name]:g}")
        cell = cells.get(key, _cell, sets[data], name, rates[data, name], recipe, seed)
        for i, patience in enumerate(recipe.patiences):
            one = _judged(sets[data], name, cell[f"test {i}"], cell[f"held {i}"], seed)
            results.setdefault((data, name, patience), []).append({**cell["stops"][i], **one})
        settings.say(", ".join(f"{100 * results[data, name, p][-1]['right'].mean():.1f} %" for p in recipe.patiences))
    found.settings |= {
        "rates": [f"{name}, {data}: {rate:g}" for (data, name), rate in rates.items()],
        "a training is over": f"after {' or '.join(map(str, recipe.patiences))} epochs without fewer held-out sentences wrong, at most "
        f"{recipe.most} in all; the rates were chosen with {recipe.patiences[0]}",
        "optimiser": f"AdamW, batches of {recipe.batch}, the rate rises for {recipe.rising} steps and then stays; the new linear layer "
        "learns 10 times as fast; dropout 0.1; matrix products of the training in bfloat16; what is judged are the mean weights of about "
        f"the last {1 / (1 - recipe.decay):.0f} steps",
        "temperature": "the one with the least Brier score on held-out sentences",
        "log-loss": f"of the probabilities mixed with {calibration.UNIFORM:.0%} of the uniform distribution",
        "sets": f"half of the test sentences calibrate, the other half is judged, the mean of {SPLITS} such halves; the score is the "
        "probability (LAC), and for entmax the temperature at which a class enters the support",
        **cells.told(),
    }
    _tell(found, sets, recipe, results, trials)


def _reading(encoder: Encoder, task: Task, layers: int) -> Reading:
    from ._sentences import start  # late: it needs torch

    first, train, test = start(encoder, task.train, task.test, task.classes, layers, True, 0)

    def model(seed: int) -> Any:
        import torch  # late: listing the experiments needs no torch

        torch.manual_seed(seed)
        fresh = copy.deepcopy(first)
        fresh.head.reset_parameters()
        return fresh

    return Reading(train, test, model)


def _rate(
    cells: _cells.Cells, sets: dict[str, Reading], recipe: Patient, data: str, name: str
) -> tuple[float, dict[float, float]]:
    """The rate with the fewest held-out sentences wrong, and the errors of all that were tried."""

    def error(rate: float) -> float:
        cells.say(f"rate {rate:g} of {name}, {data}")
        key = ("rate", data, name, f"{rate:g}")
        return min(cells.get(key, _tried, sets[data], name, rate, recipe)["errors"])

    rate, tried, _ = walk(error, RATE, 2.0, 0.0)
    return rate, tried


def _tried(reading: Reading, name: str, rate: float, recipe: Patient) -> dict[str, Any]:
    """The share of held-out sentences wrong after each epoch, to the shorter patience."""
    from ._sentences import settled  # late: as above

    shorter = dataclasses.replace(recipe, patiences=recipe.patiences[:1])
    train, held = reading.parts(CHOOSING)
    return {"errors": settled(reading.model(CHOOSING), MAPS[name], train, held, rate, shorter, CHOOSING)[1]}


def _cell(reading: Reading, name: str, rate: float, recipe: Patient, seed: int) -> dict[str, Any]:
    """One training: for each patience the scores of test and held-out sentences."""
    from ._sentences import scores_of, settled  # late: as above

    train, held = reading.parts(seed)
    stops, errors = settled(reading.model(seed), MAPS[name], train, held, rate, recipe, seed)
    out: dict[str, Any] = {"errors": errors, "stops": []}
    for i, (stop, model) in enumerate(stops):
        out["stops"].append({"epoch": stop.epoch, "after": stop.after, "ended": stop.ended})
        out |= {f"test {i}": scores_of(model, reading.test), f"held {i}": scores_of(model, held)}
    return out


def _judged(reading: Reading, name: str, z: np.ndarray, z_held: np.ndarray, seed: int) -> dict[str, Any]:
    """What the scores of a trained model are worth."""
    y, y_held, mapping = reading.test.classes, reading.parts(seed)[1].classes, MAPS[name]
    z, z_held = z.astype(float), z_held.astype(float)
    scale = calibration.temperature(mapping, z_held, y_held)
    return {
        "right": z.argmax(axis=1) == y,
        RAW: calibration.judge(anymax.apply(mapping, z), y),
        SCALED: calibration.judge(anymax.apply(mapping, z / scale), y),
        "temperature": scale,
        "sizes": _sizes(name, z, y, seed),
    }


def _sizes(name: str, z: np.ndarray, y: np.ndarray, seed: int) -> dict[float, float]:
    """For each level the mean size of the conformal sets."""
    score = conformal.support(ALPHAS[name], z) if name in ALPHAS else conformal.lac(anymax.apply(MAPS[name], z))
    own = score[np.arange(len(y)), y]
    sizes: dict[float, list[float]] = {level: [] for level in LEVELS}
    rng = np.random.default_rng(seed)
    for _ in range(SPLITS):
        order = rng.permutation(len(y))
        half, rest = order[: len(y) // 2], order[len(y) // 2 :]
        for level in LEVELS:
            sizes[level].append(float((score[rest] <= conformal.quantile(own[half], level)).sum(axis=1).mean()))
    return {level: float(np.mean(found)) for level, found in sizes.items()}


def _tell(
    found: Findings, sets: dict[str, Reading], recipe: Patient, results: dict[tuple[str, str, int], list[dict[str, Any]]],
    trials: list[dict[str, Any]],
) -> None:  # fmt: skip
    def of(data: str, name: str, patience: int, kind: str, figure: str | float) -> list[float]:
        return [one[kind][figure] for one in results[data, name, patience]]

    def of_intents(data: str, name: str, patience: int) -> list[float]:
        """The accuracy on each intent, the mean over seeds, in per cent."""
        right, intents = (
            np.mean([one["right"] for one in results[data, name, patience]], axis=0),
            sets[data].test.classes,
        )
        return [100 * float(right[intents == c].mean()) for c in np.unique(intents)]

    def test(claim: str, data: str, patience: int, name: str, what: str, figure: Interval, **bound: float) -> None:
        ones = [one for other in (name, "softmax") for one in results[data, other, patience]]
        cut = sum(not one["ended"] for one in ones)
        edge = f"{cut} of {len(ones)} trainings were not over after {recipe.most} epochs" if cut else ""
        found.test(claim, f"{data}, patience {patience}: {what}", figure, edge=edge, **bound)

    for data in sets:
        for patience in recipe.patiences:

            def less(name: str, kind: str, figure: str, data: str = data, patience: int = patience) -> Interval:
                return difference(*(of(data, one, patience, kind, figure) for one in (name, "softmax")))

            for claim, name, bound in (
                ("helps", "sparse softmax, k = 10", 0.0), ("point", "sparse softmax, k = 10", 1.0),
                ("entmax", "1.5-entmax", -0.5), ("sparsemax", "sparsemax", -0.5),
            ):  # fmt: skip
                words = f"accuracy of {name} − softmax, points"
                test(claim, data, patience, name, f"{words}, over seeds", less(name, RAW, "accuracy"), at_least=bound)
                apart = difference(*(of_intents(data, one, patience) for one in (name, "softmax")), of="intents")
                test(claim, data, patience, name, f"{words}, over intents", apart, at_least=bound)
            for name in MAPS:
                if name != "softmax":
                    what = f"log-loss of {name} − softmax, {SCALED}"
                    test("log-loss", data, patience, name, what, less(name, SCALED, "log-loss"), at_least=0.0)
            what = "calibration error of 1.5-entmax − softmax, points"
            test(
                "calibrated",
                data,
                patience,
                "1.5-entmax",
                what,
                less("1.5-entmax", RAW, "calibration error"),
                at_most=0.0,
            )
            sizes = ratio(*(of(data, one, patience, "sizes", LEVELS[-1]) for one in ("1.5-entmax", "softmax")))
            test("sets", data, patience, "1.5-entmax", "size of the sets, 1.5-entmax / softmax", sizes, at_most=1.05)
            found.table(f"{data}, patience {patience}", [
                {
                    "map": name, "accuracy %": over_seeds(of(data, name, patience, RAW, "accuracy")),
                    **{f"{figure}, {kind}": over_seeds(of(data, name, patience, kind, figure))
                       for figure in ("log-loss", "Brier score", "calibration error") for kind in (RAW, SCALED)},
                    **{f"size of sets, {level:.0%}": over_seeds(of(data, name, patience, "sizes", level)) for level in LEVELS},
                    **{when: over_seeds([one[when] for one in results[data, name, patience]]) for when in ("epoch", "after")},
                }
                for name in MAPS
            ], "Mean over seeds. epoch: the one whose weights are judged; after: the one at which the training was over.")  # fmt: skip
    found.against_paper(
        "gain of k = 10 in fine-tuning, points, on " + next(iter(sets)), 1.0,
        difference(*(of(next(iter(sets)), one, recipe.patiences[-1], RAW, "accuracy") for one in ("sparse softmax, k = 10", "softmax"))),
        "“about 1 % on most tasks”, other tasks and models",
    )  # fmt: skip
    found.table("Choosing the rates", trials, "One training each.")
    found.notes += [
        "Within a seed, all maps share sentences, first weights and the order of the batches. Each map has the rate that was best for it.",
        "Each claim is judged at both patiences and must hold at both. A training that the most epochs cut off decides nothing.",
        "Accuracy is tested over seeds (the chance in training) and over intents (the chance in the choice of questions).",
    ]
    found.picture(
        lambda figure: _draw(figure, sets, recipe, results), (9.0, 3.6), caption="Accuracy beside softmax, by seed"
    )


def _draw(
    figure: Any, sets: dict[str, Reading], recipe: Patient, results: dict[tuple[str, str, int], list[dict[str, Any]]]
) -> None:
    from anymax.plot.style import COLOURS  # late: an optional extra

    names = [name for name in MAPS if name != "softmax"]
    panels = figure.subplots(1, len(sets), sharey=True, squeeze=False)[0]
    for ax, data in zip(panels, sets, strict=True):
        for i, name in enumerate(names):
            for k, patience in enumerate(recipe.patiences):
                ours, theirs = ([one[RAW]["accuracy"] for one in results[data, m, patience]] for m in (name, "softmax"))
                gains, at = np.subtract(ours, theirs), i + 0.15 * (2 * k - 1)
                span = over_seeds(list(gains))
                half = span.high - span.mean if np.isfinite(span.high) else None
                ax.plot(gains, [at] * len(gains), ".", color=COLOURS[7], alpha=0.7)
                label = f"patience {patience}" if i == 0 else None
                ax.errorbar(span.mean, at, xerr=half, fmt="o", color=COLOURS[k], capsize=3, label=label)
        ax.axvline(0.0, color="#888888", linewidth=0.8)
        ax.set(title=data, xlabel="accuracy, points more than with softmax")
        ax.set_yticks(range(len(names)), names)
        ax.grid(axis="x", color="#E5E5E5", linewidth=0.6)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)


if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT, run))
