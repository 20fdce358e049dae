"""Forms of words in twelve languages, with softmax, 1.5-entmax and sparsemax in attention and output, each trained until it is over.

Each map has a learning rate of its own, chosen on dev words of a third of the languages. A training is over when so many epochs have
brought no better dev accuracy; every claim is judged at two such patiences. The unit is the language: its figure is the mean over seeds.

Run it with `--cells FOLDER`: what is finished is kept there, and a run that is started again goes on from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anymax import Entmax, Mapping, Softmax, Sparsemax

from . import _cells
from ._common import Experiment, Settings, main, quick_on_one_thread, walk
from ._report import Claim, Findings
from ._statistics import difference, over, over_seeds

if TYPE_CHECKING:
    from ._transducer import Language, Size
    from ._until import Patient

PETERS = "Peters, Niculae and Martins 2019, Sparse sequence-to-sequence models"
UNIMORPH = "CoNLL–SIGMORPHON 2018 task 1 (UniMorph; github.com/sigmorphon/conll2018, task1)"
NAMES = (
    "arabic", "basque", "english", "finnish", "georgian", "german", "hebrew", "hungarian", "navajo", "russian", "spanish", "turkish",
)  # fmt: skip
PARTS = {"train": "train-medium", "dev": "dev", "test": "test"}


def _file(language: str, part: str) -> str:
    return f"seq2seq/sigmorphon2018_{language}-{PARTS[part]}.tsv.gz"


EXPERIMENT = Experiment(
    name="inflection",
    title="Inflection in twelve languages, trained to the end",
    about="Forms of words in UniMorph's medium sets: three maps in attention and output, a learning rate for each, five seeds.",
    claims={
        "better": Claim("With 1.5-entmax in attention and output more forms are right than with softmax", PETERS),
        "gain": Claim("By at least 1.2 points, which is half of what the paper found", f"{PETERS}: 84.93 against 82.55; “half” is ours"),
        "sparsemax": Claim("With sparsemax in attention and output more forms are right than with softmax", PETERS),
        "exact": Claim("With 1.5-entmax, and with sparsemax, a beam of 5 holds all that a model can write, for at least half of the forms",
                       f"{PETERS}; “half” is ours"),
        "proven": Claim("With softmax too, a beam of 5 proves its answer the most probable string, for at least 99 % of the forms",
                        "asked here"),
    },
    seeds=5,
    data={_file(language, part): UNIMORPH for language in NAMES for part in PARTS},
    needs=("torch", "matplotlib", "scipy"),
    options={"--cells": _cells.OPTION},
    free=("--cells",),
)  # fmt: skip
MAPS: dict[str, Mapping] = {"softmax": Softmax(), "1.5-entmax": Entmax(1.5), "sparsemax": Sparsemax()}
PATIENCES, MOST = (5, 15), 200
RATE, CHOOSING = 4e-3, 1000  # where the search begins, and its seed, which no run has
BEAM = 5
FIGURES = ("words right %", "symbol errors %", "output zeros %", "attention zeros %", "listed %", "proven %")


@dataclasses.dataclass(frozen=True)
class Plan:
    languages: dict[str, Language]
    choosing: tuple[str, ...]  # the languages whose dev words choose the rates
    size: Size
    recipe: Patient


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    plan = _quick() if settings.quick else _full(settings)
    found.data = (
        "Two draws of invented words, and how they are said, by rules and with one vowel in twelve in doubt."
        if settings.quick
        else f"{len(NAMES)} languages of {UNIMORPH}, the medium sets: 1,000 words to train on, 1,000 of dev and 1,000 of test each."
    )
    cells = _cells.Cells(
        settings, "_transducer", {"size": dataclasses.asdict(plan.size), "recipe": dataclasses.asdict(plan.recipe)}
    )
    rates: dict[str, float] = {}
    trials: list[dict[str, Any]] = []
    for name in MAPS:
        rates[name], tried = _rate(settings, cells, plan, name)
        found.chosen(f"rate of {name}", rates[name], tried)
        trials += [{"map": name, "rate": rate, "dev words wrong %": 100 * error} for rate, error in tried.items()]
    results: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    work = [(seed, language, name) for seed in settings.seeds for language in plan.languages for name in MAPS]
    for seed, language, name in settings.track(work, "training", lambda one: f"{one[2]}, {one[1]}, seed {one[0]}"):
        key = ("seed", seed, language, name, f"{rates[name]:g}")
        cell = cells.get(key, _cell, plan, language, name, rates[name], seed)
        for patience, one in zip(plan.recipe.patiences, cell["stops"], strict=True):
            results.setdefault((language, name, patience), []).append(one)
        settings.say(
            ", ".join(f"{one['words right %']:.1f} % after {one['epoch']} of {one['after']}" for one in cell["stops"])
        )
    found.settings |= {
        "rates": [f"{name}: {rate:g}" for name, rate in rates.items()],
        "a training is over": f"after {' or '.join(map(str, plan.recipe.patiences))} epochs without fewer dev words wrong, at most "
        f"{plan.recipe.most} in all",
        "network": f"GRU both ways, GRU, one head of attention; width {plan.size.hidden}, embeddings {plan.size.embedding}, "
        f"dropout {plan.size.dropout:g}; attention's scores are divided by the root of the width",
        "source": "the features, each one symbol, then the letters of the lemma; symbols that are not in training are left out",
        "optimiser": f"Adam, batches of {plan.recipe.batch} sources of like length; the rate rises over the first {plan.recipe.rising} "
        f"steps and then stays, the gradient's norm is cut to 5; what is judged are the mean weights of about the last "
        f"{1 / (1 - plan.recipe.decay):.0f} steps",
        "written": f"dev words greedily, test words with a beam of {BEAM}",
        **cells.told(),
    }
    _tell(found, plan, results, trials)


def _quick() -> Plan:
    from . import _transducer as t  # late: it needs torch
    from ._until import Patient

    languages = {
        f"invented words {i}": t.Language(t.invented(i, 160), t.invented(10 + i, 60), t.invented(20 + i, 60))
        for i in (1, 2)
    }
    return Plan(
        languages, ("invented words 1",), t.Size(16, 32, 0.0), Patient((1, 2), 6, batch=16, rising=10, decay=0.8)
    )


def _full(settings: Settings) -> Plan:
    from . import _transducer as t  # late: it needs torch
    from ._until import Patient

    read = {
        language.capitalize(): t.Language(*(t.inflections(settings.data(_file(language, part))) for part in PARTS))
        for language in NAMES
    }
    return Plan(read, tuple(read)[::3], t.Size(64, 128, 0.3), Patient(PATIENCES, MOST))


def _rate(settings: Settings, cells: _cells.Cells, plan: Plan, name: str) -> tuple[float, dict[float, float]]:
    """The rate with the fewest dev words wrong, the mean over the choosing languages, and the errors of all that were tried."""

    def error(rate: float) -> float:
        wrong = []
        for language in plan.choosing:
            settings.say(f"rate {rate:g} of {name}, {language}")
            key = ("rate", language, name, f"{rate:g}")
            wrong.append(min(cells.get(key, _tried, plan, language, name, rate)["errors"]))
        return float(np.mean(wrong))

    rate, tried, _ = walk(error, RATE, 2.0, 0.0)
    return rate, tried


def _tried(plan: Plan, language: str, name: str, rate: float) -> dict[str, Any]:
    """The share of dev words wrong after each epoch; the test words are not looked at."""
    from . import _transducer as t  # late: as above

    return {
        "errors": t.settled(plan.languages[language], MAPS[name], MAPS[name], plan.size, rate, plan.recipe, CHOOSING)[1]
    }


def _cell(plan: Plan, language: str, name: str, rate: float, seed: int) -> dict[str, Any]:
    """One training: what each patience left of it, on the test words."""
    from . import _transducer as t  # late: as above

    stops, errors = t.settled(plan.languages[language], MAPS[name], MAPS[name], plan.size, rate, plan.recipe, seed)
    told = []
    for stop, trained in stops:
        figures, _ = t.measure(trained, plan.languages[language].test, BEAM)
        told.append({"epoch": stop.epoch, "after": stop.after, "ended": stop.ended, **figures})
    return {"stops": told, "errors": errors}


def _tell(
    found: Findings, plan: Plan, results: dict[tuple[str, str, int], list[dict[str, Any]]], trials: list[dict[str, Any]]
) -> None:
    def of_languages(name: str, patience: int, figure: str) -> list[float]:
        return [
            float(np.mean([one[figure] for one in results[language, name, patience]])) for language in plan.languages
        ]

    def edge(patience: int, *names: str) -> str:
        """Why these trainings decide nothing, if some were not over."""
        ones = [one for language in plan.languages for name in names for one in results[language, name, patience]]
        open_ = sum(not one["ended"] for one in ones)
        return f"{open_} of {len(ones)} trainings were not over after {plan.recipe.most} epochs" if open_ else ""

    right, unit = "words right %", "languages"
    for patience in plan.recipe.patiences:
        at = f"patience {patience}"
        for claim, name, bound in (
            ("better", "1.5-entmax", 0.0),
            ("gain", "1.5-entmax", 1.2),
            ("sparsemax", "sparsemax", 0.0),
        ):
            apart = difference(*(of_languages(one, patience, right) for one in (name, "softmax")), of=unit)
            what = f"forms right, {name} − softmax, points, {at}"
            found.test(claim, what, apart, at_least=bound, edge=edge(patience, name, "softmax"))
        for name in ("1.5-entmax", "sparsemax"):
            listed = over(of_languages(name, patience, "listed %"), unit)
            found.test(
                "exact", f"forms listed in full %, {name}, {at}", listed, at_least=50.0, edge=edge(patience, name)
            )
        proven = over(of_languages("softmax", patience, "proven %"), unit)
        found.test("proven", f"forms proven %, softmax, {at}", proven, at_least=99.0, edge=edge(patience, "softmax"))
    for name, paper in (("softmax", 82.55), ("1.5-entmax", 84.93)):
        ours = over(of_languages(name, plan.recipe.patiences[-1], right), unit)
        found.against_paper(f"forms right %, {name}", paper, ours, "the paper: mean of 103 languages, another network")
    for patience in plan.recipe.patiences:
        found.table(f"Patience {patience}", [
            {"map": name, **{figure: over(of_languages(name, patience, figure), unit) for figure in (*FIGURES, "epoch", "after")}}
            for name in MAPS
        ], "Mean over languages. epoch: the one whose weights are judged; after: the one at which the training was over.")  # fmt: skip
    found.table("Forms right, by language", [
        {"language": language, "patience": patience, "map": name,
         right: over_seeds([one[right] for one in results[language, name, patience]])}
        for language in plan.languages for patience in plan.recipe.patiences for name in MAPS
    ], "Mean over seeds.")  # fmt: skip
    found.table(
        "Choosing the rates", trials, f"One training for each of {', '.join(plan.choosing)}, to the longest patience."
    )
    found.notes += [
        "The unit of every test is the language, as languages are what is independent; its figure is the mean over seeds.",
        "Each claim is judged at both patiences and must hold at both. A training that the most epochs cut off decides nothing.",
        "listed: the beam of 5 held every string that the model can write. proven: no string outside of it can be more probable.",
    ]
    found.picture(
        lambda figure: _draw(figure, plan, results),
        (9.0, 4.6),
        caption="Forms right beside softmax, by language; squares: the mean and its interval",
    )


def _draw(figure: Any, plan: Plan, results: dict[tuple[str, str, int], list[dict[str, Any]]]) -> None:
    from anymax.plot.style import COLOURS  # late: an optional extra

    panels: Sequence[Any] = figure.subplots(1, len(plan.recipe.patiences), sharey=True, squeeze=False)[0]
    names = [name for name in MAPS if name != "softmax"]
    for ax, patience in zip(panels, plan.recipe.patiences, strict=True):
        for k, name in enumerate(names):
            gains = []
            for i, language in enumerate(plan.languages):
                ours, theirs = (
                    [one["words right %"] for one in results[language, m, patience]] for m in (name, "softmax")
                )
                gains.append(float(np.mean(np.subtract(ours, theirs))))
                ax.plot(gains[-1], i + 0.16 * (2 * k - 1), "o", color=COLOURS[k], markersize=4)
            span = over(gains, "languages")
            at = len(plan.languages) + 0.3 + 0.16 * (2 * k - 1)
            half = span.high - span.mean if np.isfinite(span.high) else None
            ax.errorbar(span.mean, at, xerr=half, fmt="s", color=COLOURS[k], capsize=3, label=name)
        ax.axvline(0.0, color="#888888", linewidth=0.8)
        ax.set(title=f"patience {patience}", xlabel="forms right, points above softmax")
        ax.set_yticks([*range(len(plan.languages)), len(plan.languages) + 0.3], [*plan.languages, "all languages"])
        ax.grid(axis="x", color="#E5E5E5", linewidth=0.6)
        ax.set_axisbelow(True)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False)


if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT, run))
