"""Label proportions: recover the mixture of topics of a synthetic document (Martins and Astudillo 2016, section 4.1)."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np

from anymax import Entmax, Mapping, Softmax, Sparsemax

from ._common import Experiment, Settings, main
from ._report import Claim, Findings
from ._statistics import over_seeds, ratio

PAPER = "Martins and Astudillo 2016, section 4.1"
EXPERIMENT = Experiment(
    name="proportions",
    title="Label proportions: sparsemax against softmax",
    about="Documents are words drawn from a mixture of topics; linear models estimate the mixture, one trained with each map's loss.",
    claims={
        "past 400": Claim("Past 400 words a document, sparsemax has a smaller Jensen-Shannon divergence than softmax", PAPER),
        "long": Claim("From 1,000 words on, the divergence of sparsemax is at most 0.7 of softmax's", "asked here"),
        "never": Claim("At no length is sparsemax worse than softmax", "asked here"),
    },
    seeds=10,
    needs=("matplotlib", "scipy", "sklearn"),
    options={
        "--lengths": {"nargs": "+", "type": int, "metavar": "WORDS", "help": "mean lengths of the documents"},
        "--l2": {"nargs": "+", "type": float, "metavar": "L2", "help": "penalties to choose from"},
    },
)  # fmt: skip
MAPS: dict[str, Mapping] = {"softmax": Softmax(), "1.5-entmax": Entmax(1.5), "sparsemax": Sparsemax()}
KINDS = ("uniform", "random")


def documents(rng: np.random.Generator, n: int, topics: int, length: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Word counts [n, topics] over as many words as topics, and topic proportions [n, topics].

    The number of topics in a document is Poisson(1), drawn again when 0 or too large; its topics are distinct and drawn with
    unequal probabilities; its words come from the mixture of their word distributions; its length is Poisson(length).
    """
    popular = rng.random(topics)
    popular /= popular.sum()
    words = rng.random((topics, topics))
    words /= words.sum(axis=1, keepdims=True)  # [topic, word]
    q = np.zeros((n, topics))
    for row in q:
        size = 0
        while not 1 <= size <= topics:
            size = rng.poisson(1.0)
        chosen: set[int] = set()
        while len(chosen) < size:
            chosen.add(int(rng.choice(topics, p=popular)))
        share = rng.random(size) if kind == "random" else np.ones(size)
        row[sorted(chosen)] = share / share.sum()
    lengths = np.maximum(rng.poisson(length, size=n), 1)
    p = q @ words
    return rng.multinomial(lengths, p / p.sum(axis=1, keepdims=True)).astype(float), q


def fit(mapping: Mapping, x: np.ndarray, q: np.ndarray, l2: float, iterations: int) -> Any:
    """A linear model of the proportions q."""
    from sklearn.exceptions import ConvergenceWarning  # late: listing the experiments needs no scikit-learn

    from anymax.sklearn import LabelDistributionClassifier

    model = LabelDistributionClassifier(mapping, l2=l2, tol=1e-8, max_iter=iterations, solver="lbfgs-scipy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of iterations belongs to the protocol
        return model.fit(x, q)


def measure(seed: int, topics: int, kind: str, length: int, plan: dict[str, Any]) -> dict[str, dict[str, float]]:
    """For each map the figures on the test documents, with the l2 that has the least divergence on the development documents."""
    rng = np.random.default_rng([seed, topics, KINDS.index(kind), length])
    sizes = plan["documents"]
    x, q = documents(rng, sum(sizes), topics, length, kind)
    cut = np.cumsum(sizes)[:-1]
    (x, x_dev, x_test), (q, q_dev, q_test) = np.split(x, cut), np.split(q, cut)
    mean, spread = x.mean(axis=0), x.std(axis=0)
    spread[spread == 0] = 1.0
    x, x_dev, x_test = ((part - mean) / spread for part in (x, x_dev, x_test))
    found = {}
    for name, mapping in MAPS.items():
        tried = [(l2, fit(mapping, x, q, l2, plan["iterations"])) for l2 in plan["l2"]]
        l2, model = max(tried, key=lambda pair: pair[1].score(x_dev, q_dev))
        p = model.predict_proba(x_test)
        found[name] = {
            "divergence": -model.score(x_test, q_test),  # Jensen and Shannon's, the mean over documents, in nats
            "squared error": float(((p - q_test) ** 2).sum(axis=1).mean()),
            "topics": float((p > 0).sum(axis=1).mean()),
            "l2": l2,
        }
    return found


def run(settings: Settings, found: Findings) -> None:
    quick = settings.quick
    plan = {
        "topics": (10,) if quick else (10, 50),
        "lengths": settings.options.lengths or ((200, 1000) if quick else (200, 500, 1000, 2000)),
        "documents": (300, 100, 300) if quick else (1200, 200, 1000),
        "l2": settings.options.l2 or ((0.0, 1e-4, 1e-2) if quick else (0.0, *(10.0**j for j in range(-6, 0)))),
        "iterations": 50 if quick else 100,
    }
    found.data = "Synthetic documents, drawn anew for each seed. No data is read."
    found.settings = {
        **plan,
        "documents": "train {}, development {}, test {}".format(*plan["documents"]),
        "a document": "as many different words as topics; Poisson(1) topics, at least one, drawn by unequal probabilities; Poisson words "
        "by the mixture of their topics; probabilities of topics, and of words in a topic, are uniform numbers divided by their sum",
        "model": "linear, mean loss + l2 / 2 times the squared weights without the intercepts, by L-BFGS",
        "chosen by": "divergence on the development documents",
    }
    cells = [(topics, kind, length) for topics in plan["topics"] for kind in KINDS for length in plan["lengths"]]
    results = {
        cell: [measure(seed, *cell, plan) for seed in settings.seeds]
        for cell in settings.track(cells, "setting", lambda c: f"{c[0]} topics, {c[1]}, {c[2]} words")
    }
    for cell, seeds in results.items():
        for seed, one in zip(settings.seeds, seeds):
            for name in MAPS:
                found.chosen(f"l2 of {name}, {cell}, seed {seed}", one[name]["l2"], plan["l2"], ends=(0.0,))
    for figure, title in (("divergence", "Jensen-Shannon divergence"), ("squared error", "Squared error"),
                          ("topics", "Topics with a probability above 0")):  # fmt: skip
        rows = []
        for (topics, kind, length), seeds in results.items():
            values = {name: [one[name][figure] for one in seeds] for name in MAPS}
            row: dict[str, Any] = {"topics": topics, "proportions": kind, "words": length}
            row |= {name: over_seeds(v) for name, v in values.items()}
            if figure != "topics":
                row["sparsemax / softmax"] = ratio(values["sparsemax"], values["softmax"])
            rows.append(row)
        found.table(title, rows, "Mean a test document, over seeds.")
    for (topics, kind, length), seeds in results.items():
        both = [[one[name]["divergence"] for one in seeds] for name in ("sparsemax", "softmax")]
        what = f"divergence, sparsemax / softmax: {topics} topics, {kind}, {length} words"
        if length > 400:
            found.test("past 400", what, ratio(*both), at_most=1.0)
        if length >= 1000:
            found.test("long", what, ratio(*both), at_most=0.7)
        found.test("never", what, ratio(*both), at_most=1.0)
    found.picture(lambda figure: draw(figure, results, plan), (9.5, 3.4 * len(plan["topics"])),
                  caption="Divergence against the length of the documents")  # fmt: skip
    found.notes += [
        "The paper shows curves but no table for this experiment, so there are no figures to compare with ours.",
        "Random proportions are uniform numbers divided by their sum, as in the authors' program.",
        (
            "Every word count is standardised. l2 is chosen on development documents, not by cross-validation. "
            "It lies strictly inside the range that was tried, or is 0; the paper's grid goes from 1e-9 to 1."
        ),
    ]


def draw(figure: Any, results: dict[Any, Any], plan: dict[str, Any]) -> None:
    from anymax.plot.style import COLOURS, DASHES  # late: an optional extra

    panels = figure.subplots(len(plan["topics"]), len(KINDS), squeeze=False, sharex=True, sharey="row")
    for i, topics in enumerate(plan["topics"]):
        for j, kind in enumerate(KINDS):
            ax = panels[i][j]
            for k, name in enumerate(MAPS):
                cells = [[one[name]["divergence"] for one in results[topics, kind, n]] for n in plan["lengths"]]
                spans = [over_seeds(v) for v in cells]
                ax.plot(plan["lengths"], [s.mean for s in spans], color=COLOURS[k], linestyle=DASHES[k], label=name)
                if len(cells[0]) > 1:
                    low, high = [s.low for s in spans], [s.high for s in spans]
                    ax.fill_between(plan["lengths"], low, high, color=COLOURS[k], alpha=0.2, linewidth=0)
            ax.set_title(f"{topics} topics, {kind} proportions", fontsize="medium")
            ax.set_ylim(bottom=0)
            ax.grid(color="#E5E5E5", linewidth=0.6)
            if i + 1 == len(plan["topics"]):
                ax.set_xlabel("words in a document")
            if j == 0:
                ax.set_ylabel("Jensen-Shannon divergence")
    panels[0][0].legend(frameon=False)


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
