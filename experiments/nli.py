"""Attention on sentence pairs: does sparsemax attention read as well as softmax attention, with a few words of each sentence?

Table 3 of Martins & Astudillo 2016, run again on the part of SNLI that is at hand: the development set (less the pairs held out to
choose the epoch, which share no premise with the rest) and the counterfactual training pairs of Kaushik et al. 2020. That is 3 % of
the paper's training set. Words are trained from scratch, there are no GloVe vectors. Expect lower accuracies; the comparison counts.

The paper's network reads the sentences with two GRUs and attends once. The same question is put to decomposable attention, where every word
attends. All weights come from `anymax.nn.Activation` and `anymax.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anymax import Entmax, Softmax, Sparsemax, plot

from ._common import Experiment, Settings, main
from ._report import Claim, Findings
from ._statistics import difference, over_seeds

if TYPE_CHECKING:
    from . import _entailment

FILES = {
    "nli/snli_dev.tsv.gz": "the development set of SNLI (Bowman et al. 2015), tokenised as in e-SNLI",
    "nli/snli_test.tsv.gz": "the test set of SNLI (Bowman et al. 2015), tokenised as in e-SNLI",
    "nli/cad_snli_train.tsv.gz": "NLI/all_combined/train.tsv of github.com/acmi-lab/counterfactually-augmented-data (Kaushik et al. 2020)",
    "nli/cad_snli_test.tsv.gz": "NLI/all_combined/test.tsv of github.com/acmi-lab/counterfactually-augmented-data (Kaushik et al. 2020)",
    "nli/breaking_nli.jsonl.gz": "github.com/BIU-NLP/Breaking_NLI (Glockner et al. 2018)",
}
PAPER = "Martins & Astudillo 2016, table 3"
EXPERIMENT = Experiment(
    "nli",
    "Attention on SNLI: none, logistic, soft, entmax, sparse",
    "Natural language inference with few training pairs: accuracy, exact zeros and pictures of five kinds of attention.",
    claims={
        "attention": Claim("Soft attention reads more accurately than none", PAPER),
        "normalised": Claim("Soft attention reads more accurately than logistic attention", PAPER),
        "sparse": Claim("Sparse attention is as accurate as soft attention (within half a point)", PAPER),
        "entmax": Claim("Entmax attention is as accurate as soft attention (within half a point)", "Peters et al. 2019, of translation"),
        "few": Claim("Sparse attention gives most words of the premise no weight at all", PAPER.replace("table 3", "section 4.3")),
    },
    seeds=3,
    data=FILES,
    needs=("torch", "matplotlib", "scipy"),
    options={"--minutes": {"type": float, "help": "begin no further seed that would end later"}},
)  # fmt: skip
CLOSE = -0.5  # points of accuracy: "as accurate as"
IN_PAPER = {"none": 80.99, "logistic": 80.84, "soft": 82.08, "sparse": 82.20}
EPOCHS, HELD = 5, 1000


def kinds() -> dict[str, _entailment.Attention]:
    from ._entailment import Attention  # late, as all that needs torch: listing the experiments does not

    return {
        "none": Attention(),
        "logistic": Attention(logistic=True),
        "soft": Attention(Softmax()),
        "entmax": Attention(Entmax(1.5)),
        "learned": Attention(Entmax(1.5), learn="alpha"),
        "sparse": Attention(Sparsemax()),
    }


def run(settings: Settings, found: Findings) -> None:
    from . import _entailment as e  # late, as all that needs torch: listing the experiments does not

    if settings.quick:
        pairs, held, tests, epochs = e.invented(192, 0), e.invented(64, 1), {"invented": e.invented(128, 2)}, 2
        found.data = "Invented sentences on two animals, their colours and places."
    else:
        pairs, held, tests = _read(settings)
        epochs = EPOCHS
        found.data = (
            f"{len(pairs):,} pairs to train on: SNLI's development set, less {len(held):,} pairs that choose the epoch and less the "
            "premises that are in the test set too, and the training pairs of counterfactually augmented SNLI. Tested on SNLI's test set "
            f"({len(tests['SNLI']):,} pairs), on the counterfactual test pairs ({len(tests['counterfactual']):,}) and on Breaking NLI "
            f"({len(tests['breaking']):,}, where one word was exchanged). The training set of SNLI, 549,367 pairs, was not at hand."
        )
    main_test, vocabulary = next(iter(tests)), e.Vocabulary(pairs)
    found.settings |= {
        "epochs": epochs,
        "size": e.SIZE,
        "dropout": e.DROPOUT,
        "batch": e.BATCH,
        "rate": e.RATE,
        "words": len(vocabulary),
    }
    models = {"Reader": e.Reader, "Aligner": e.Aligner}
    accuracy: dict[str, dict[str, dict[str, list[float]]]] = {
        m: {k: {t: [] for t in tests} for k in kinds()} for m in models
    }
    zeros: dict[str, dict[str, list[float]]] = {m: {k: [] for k in kinds()} for m in models}
    alphas: dict[str, list[float]] = {m: [] for m in models}
    nets: dict[tuple[str, str], Any] = {}  # of the first seed, for the pictures
    for seed in settings.within(settings.options.minutes):
        for model, kind in settings.track(((m, k) for m in models for k in kinds()), f"seed {seed}", " ".join):
            net = e.train(
                models[model], kinds()[kind], vocabulary, pairs, held, epochs=epochs, seed=seed, say=settings.say
            )
            for name, test in tests.items():
                got = e.measure(net, vocabulary, test)
                accuracy[model][kind][name].append(100 * got.accuracy)
                if name == main_test:
                    zeros[model][kind].append(100 * got.zeros)
            settings.say(f"{accuracy[model][kind][main_test][-1]:.2f} % of {main_test}")
            nets.setdefault((model, kind), net)
            if kind == "learned":
                alphas[model].append(float(net.activation.mapping.params()["alpha"].detach()))

    done = len(accuracy["Reader"]["none"][main_test])
    found.settings["seeds"] = settings.seeds[:done]
    for model, title in (("Reader", "The paper's network"), ("Aligner", "Decomposable attention")):
        by = accuracy[model]
        rows = []
        for kind in kinds():
            row: dict[str, Any] = {"attention": kind}
            row |= {f"{name}, %": over_seeds(by[kind][name]) for name in tests}
            soft = None if kind == "soft" else difference(by[kind][main_test], by["soft"][main_test])
            row |= {f"{main_test} − soft, points": soft}
            row |= {"exact zeros, %": None if kind == "none" else over_seeds(zeros[model][kind])}
            row |= {"learned alpha": over_seeds(alphas[model]) if kind == "learned" else None}
            rows.append(row)
        found.table(title, rows, "Accuracy on the test sets; exact zeros among the weights of real words.")
    by = {kind: values[main_test] for kind, values in accuracy["Reader"].items()}
    found.test("attention", "accuracy of soft − none, points", difference(by["soft"], by["none"]), at_least=0.0)
    found.test(
        "normalised", "accuracy of soft − logistic, points", difference(by["soft"], by["logistic"]), at_least=0.0
    )
    found.test("sparse", "accuracy of sparse − soft, points", difference(by["sparse"], by["soft"]), at_least=CLOSE)
    found.test("entmax", "accuracy of entmax − soft, points", difference(by["entmax"], by["soft"]), at_least=CLOSE)
    found.test("few", "exact zeros of sparse attention, %", over_seeds(zeros["Reader"]["sparse"]), at_least=50.0)
    if not settings.quick:
        for kind, printed in IN_PAPER.items():
            found.against_paper(
                f"{kind}, test accuracy %", printed, over_seeds(by[kind]), "3 % of the paper's training set"
            )
    found.notes += [
        "The intervals hold the chance of start, order and dropout, not that of the training or test pairs.",
        "`learned` is entmax with an alpha between 1 and 2 that is trained with the network, from 1.5.",
        "The pictures show the first pair of each label in the test set with 9 to 16 words in the premise; the networks of the first seed.",
    ]  # fmt: skip
    found.picture(
        lambda figure: _accuracies(figure, accuracy, main_test), (9.5, 3.8), caption=f"Accuracy on {main_test}"
    )
    shown = _shown(tests[main_test], e)
    found.picture(
        lambda figure: _once(figure, shown, nets, vocabulary, e), (9.0, 9.5), "reader",
        "What each kind of attention reads in the premise, given the hypothesis; hatched: exactly 0",
    )  # fmt: skip
    found.picture(
        lambda figure: _every(figure, shown[0], nets, vocabulary, e), (14.0, 4.6), "aligner",
        "Which words of the premise (columns) each word of the hypothesis (rows) reads; hatched: exactly 0",
    )  # fmt: skip


def _read(settings: Settings) -> tuple[list[Any], list[Any], dict[str, list[Any]]]:
    from . import _entailment as e  # late, as above

    files = [settings.data(path) for path in FILES]
    dev, test = e.snli(files[0]), e.snli(files[1])
    seen = {p.premise for p in test}
    rest, held = e.by_premise([p for p in dev if p.premise not in seen], HELD)
    tests = {"SNLI": test, "counterfactual": e.counterfactual(files[3]), "breaking": e.breaking(files[4])}
    known = {p[1:] for pairs in tests.values() for p in pairs}
    augmented = [p for p in e.counterfactual(files[2]) if p[1:] not in known]
    return rest + augmented, held, tests


def _shown(test: Sequence[Any], e: Any) -> list[Any]:
    good = [p for p in test if 9 <= len(p.premise) <= 16]
    return [next(p for p in good if p.label == label) for label in range(len(e.LABELS))]


def _accuracies(figure: Any, accuracy: Any, test: str) -> None:
    for panel, (model, by) in zip(figure.subplots(1, 2), accuracy.items()):
        for i, kind in enumerate(reversed(by)):
            values = by[kind][test]
            interval = over_seeds(values)
            half = interval.high - interval.mean
            panel.plot(values, [i] * len(values), ".", color=plot.COLOURS[7], alpha=0.7)
            panel.errorbar(
                interval.mean, i, xerr=half if np.isfinite(half) else None, fmt="o", color=plot.COLOURS[0], capsize=3
            )
        panel.set_yticks(range(len(by)), list(reversed(by)))
        panel.set(xlabel=f"accuracy on {test}, % (points: seeds; bars: 95 %)", title=model)
        panel.grid(axis="x", color="#E5E5E5", linewidth=0.6)


def _once(figure: Any, shown: Sequence[Any], nets: Any, vocabulary: Any, e: Any) -> None:
    names = [kind for kind, attention in kinds().items() if attention.on]
    for panel, one in zip(figure.subplots(len(shown), 1), shown):
        weights = np.concatenate([e.weights(nets["Reader", kind], vocabulary, one) for kind in names])
        plot.attention(weights, queries=names, keys=one.premise, ax=panel)
        panel.set_title(f"{e.LABELS[one.label]}: {' '.join(one.hypothesis)}", fontsize=10)


def _every(figure: Any, one: Any, nets: Any, vocabulary: Any, e: Any) -> None:
    names = ("soft", "entmax", "sparse")
    for panel, kind in zip(figure.subplots(1, len(names)), names):
        plot.attention(
            e.weights(nets["Aligner", kind], vocabulary, one), queries=one.hypothesis, keys=one.premise, ax=panel
        )
        panel.set_title(f"{kind}: {panel.get_title()}")


if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT, run))
