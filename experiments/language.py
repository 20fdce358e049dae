"""A word model of 12,000 words: softmax against sparse output layers, after equal steps and after equal seconds."""

from __future__ import annotations

import gzip
import math
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from . import _jobs
from ._common import Experiment, Settings, main, quick_on_one_thread
from ._report import Claim, Findings
from ._statistics import difference, over_seeds, ratio

TEXT = "lm/tinyshakespeare.txt.gz"
PLUS_PAPER = "the authors of Sparsemax+, ICLR 2026"
TIMED = ("timed on a machine that did other work too",)
EXPERIMENT = Experiment(
    name="language",
    title="A word model: what a sparse output layer costs, and what it is worth",
    about="A recurrent network predicts the next of 12,000 words; output layers by `linear_loss`, with softmax, 1.5-entmax and sparsemax.",
    claims={
        "third": Claim("A step of training with 1.5-entmax takes at most half of the time of one with softmax", "asked here", notes=TIMED),
        "steps": Claim("After equal steps 1.5-entmax predicts the next word as accurately as softmax, within half a point", "asked here"),
        "seconds": Claim("After equal seconds 1.5-entmax predicts it at least as accurately", "asked here", notes=TIMED),
        "perplexity": Claim("After equal seconds its smoothed perplexity is at most 5 % higher", "asked here", notes=TIMED),
        "plus": Claim("The second loss of Sparsemax+ makes sparsemax more accurate after equal steps", PLUS_PAPER),
        "repeats": Claim("Text drawn from 1.5-entmax repeats triples of words no more often than text drawn from softmax", "asked here"),
    },
    seeds=5,
    quick_seeds=2,
    data={TEXT: "tinyshakespeare, github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt"},
    lengths="Each network was trained for one length only, of 800 steps; "
            "it is not shown that the held-out loss had stopped by then, and a verdict may turn with the length.",
    needs=("matplotlib", "scipy", "torch"),
    options={"--jobs": _jobs.OPTION},
    free=("--jobs",),
)  # fmt: skip
SOFTMAX, ENTMAX, PLUS, SPARSEMAX = ARMS = (
    "softmax",
    "1.5-entmax",
    "sparsemax with the loss of Sparsemax+",
    "sparsemax",
)
LAYERS: dict[str, dict[str, Any]] = {
    SOFTMAX: {"mapping": "softmax"},
    ENTMAX: {"mapping": "entmax15"},
    PLUS: {"mapping": "sparsemax", "suppress": 0.5},
    SPARSEMAX: {"mapping": "sparsemax"},
}
STEPS, SECONDS = "equal steps", "equal seconds"
UNIFORM = 0.01  # weight of the uniform distribution in the smoothed perplexity, for all maps
MOST = 4.0  # equal seconds: at most so many times the steps of softmax


def words_of(path: Path, most: int) -> tuple[np.ndarray, int]:
    """The text as numbers of words (punctuation marks and ends of lines are words), the rare ones as 0; and how many numbers there are."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        words = re.findall(r"[a-z']+|[^\sa-z']|\n", file.read().lower())
    number = {word: i for i, (word, _) in enumerate(Counter(words).most_common(most - 1), start=1)}
    return np.array([number.get(word, 0) for word in words]), len(number) + 1


def invented(rows: int, classes: int, seed: int) -> np.ndarray:
    """A chain in which each word has three words that may follow."""
    rng = np.random.default_rng(seed)
    after = rng.integers(classes, size=(classes, 3))
    out = np.zeros(rows, np.int64)
    for i in range(1, rows):
        out[i] = after[out[i - 1], rng.integers(3)]
    return out


def trained(
    name: str, text: np.ndarray, classes: int, plan: dict[str, int], seed: int, seconds: float | None
) -> dict[str, Any]:
    """Figures after `plan['steps']` steps and, where `seconds` of a processor are given, after those; and the seconds of the first."""
    import torch  # late: listing the experiments needs no torch

    import anymax

    layer = LAYERS[name]
    cut = int(0.9 * len(text))
    train, test = (torch.from_numpy(part) for part in (text[:cut], text[cut:]))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        embedding = torch.nn.Embedding(classes, plan["width"])
        reader = torch.nn.GRU(plan["width"], plan["width"], batch_first=True)
        out = torch.nn.Linear(plan["width"], classes, bias=False)
    modules = torch.nn.ModuleList([embedding, reader, out])
    optimizer = torch.optim.Adam(modules.parameters(), lr=plan["rate per mille"] / 1000)
    rows, length = plan["rows"], plan["length"]
    places = torch.Generator().manual_seed(seed)

    def features(tokens: torch.Tensor) -> torch.Tensor:
        return reader(embedding(tokens))[0].flatten(0, 1)

    def measured() -> dict[str, float]:
        right, bits, count = 0, 0.0, 0
        with torch.no_grad():
            for part in test[: plan["test words"] + 1].unfold(0, length + 1, length).split(rows):
                p = anymax.apply(layer["mapping"], features(part[:, :-1]) @ out.weight.T)
                y = part[:, 1:].flatten()
                right += int((p.argmax(1) == y).sum())
                bits -= float(((1 - UNIFORM) * p.gather(1, y[:, None]) + UNIFORM / classes).double().log().sum())
                count += len(y)
        return {"accuracy": 100.0 * right / count, "perplexity": math.exp(bits / count)}

    def repeated() -> float:
        """Of the triples of words in texts that the model writes, the per cent that stood in the same text before."""
        draw = torch.Generator().manual_seed(seed)
        state, token, written = None, test[: plan["texts"]][:, None], []
        with torch.no_grad():
            for _ in range(plan["words of a text"]):
                h, state = reader(embedding(token), state)
                token = anymax.sample(layer["mapping"], h[:, 0] @ out.weight.T, generator=draw)[:, None]
                written.append(token[:, 0])
        texts = torch.stack(written, 1).numpy()
        again = sum(len(t) - 2 - len({tuple(t[i : i + 3]) for i in range(len(t) - 2)}) for t in texts)
        return 100.0 * again / (texts.shape[0] * (texts.shape[1] - 2))

    found: dict[str, Any] = {}
    spent, step = 0.0, 0
    while step < plan["steps"] or (seconds is not None and spent < seconds and step < MOST * plan["steps"]):
        begun = time.process_time()
        start = torch.randint(len(train) - length - 1, (rows, 1), generator=places)
        part = train[start + torch.arange(length + 1)]
        optimizer.zero_grad()
        loss = anymax.linear_loss(features(part[:, :-1]), out.weight, part[:, 1:].flatten(), **layer)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        spent += time.process_time() - begun
        step += 1
        if step == plan["steps"]:
            found[STEPS] = measured() | {"repeats": repeated(), "steps": step}
            found["seconds"] = spent
    found[SECONDS] = found[STEPS] if seconds is None else measured() | {"repeats": repeated(), "steps": step}
    return found


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    if settings.quick:
        plan = {
            "width": 16,
            "rows": 8,
            "length": 8,
            "steps": 20,
            "rate per mille": 10,
            "test words": 200,
            "texts": 4,
            "words of a text": 20,
        }
        text, classes = invented(3000, 50, 0), 50
        found.data = "A chain of 50 words that is drawn at random, not a text."
    else:
        plan = {
            "width": 128,
            "rows": 20,
            "length": 35,
            "steps": 800,
            "rate per mille": 3,
            "test words": 20_000,
            "texts": 50,
            "words of a text": 100,
        }
        text, classes = words_of(settings.data(TEXT), 12_000)
        found.data = f"tinyshakespeare (Karpathy 2015), {len(text):,} words and marks, {classes:,} of them different; the last tenth tests."
    results: dict[str, list[dict[str, Any]]] = {}
    with _jobs.run_on(settings.options.jobs) as each:
        for names in ((SOFTMAX,), (PLUS, ENTMAX, SPARSEMAX)):  # softmax says how many seconds the others have
            work = [
                (name, text, classes, plan, seed, None if name == SOFTMAX else results[SOFTMAX][seed]["seconds"])
                for name in names for seed in settings.seeds
            ]  # fmt: skip
            done = each(trained, work)
            for name, *_ in settings.track(work, "network", lambda one: f"{one[0]}, seed {one[4]}"):
                found_here = next(done)
                results.setdefault(name, []).append(found_here)
                settings.say(f"{found_here['seconds']:.0f} s")
    found.settings = {
        **plan,
        "network": "an embedding, a GRU, an output layer without a bias; each word from the 35 before it at most",
        "optimizer": "Adam; gradients are clipped at norm 1",
        "equal seconds": f"of a processor, as many as softmax took for its steps; at most {MOST:g} times its steps",
        "smoothed perplexity": f"of the probabilities mixed with {UNIFORM:.0%} of the uniform distribution, for all maps",
        "repeats": "of the triples of words in texts that the model writes, the per cent that stood in the same text before",
        "Sparsemax+": f"linear_loss(suppress={LAYERS[PLUS]['suppress']:g})",
    }
    _tell(found, results)


def _tell(found: Findings, results: dict[str, list[dict[str, Any]]]) -> None:
    def of(name: str, when: str, figure: str) -> list[float]:
        return [one[when][figure] for one in results[name]]

    for when in (STEPS, SECONDS):
        found.table(f"After {when}", [
            {"output layer": name, **{what: over_seeds(of(name, when, what)) for what in ("accuracy", "perplexity", "repeats", "steps")},
             "seconds of the steps": over_seeds([one["seconds"] for one in results[name]])} for name in ARMS
        ], "Accuracy and repeats in per cent; the perplexity is smoothed.")  # fmt: skip
    seconds = ratio(*([one["seconds"] for one in results[name]] for name in (ENTMAX, SOFTMAX)))
    found.test("third", f"seconds of a step, {ENTMAX} / {SOFTMAX}", seconds, at_most=0.5)
    steps = difference(of(ENTMAX, STEPS, "accuracy"), of(SOFTMAX, STEPS, "accuracy"))
    found.test("steps", f"accuracy after equal steps, {ENTMAX} less {SOFTMAX}", steps, at_least=-0.5)
    found.test("steps", f"accuracy after equal steps, {ENTMAX} less {SOFTMAX}", steps, at_most=0.5)
    later = difference(of(ENTMAX, SECONDS, "accuracy"), of(SOFTMAX, SECONDS, "accuracy"))
    found.test("seconds", f"accuracy after equal seconds, {ENTMAX} less {SOFTMAX}", later, at_least=0.0)
    worse = ratio(of(ENTMAX, SECONDS, "perplexity"), of(SOFTMAX, SECONDS, "perplexity"))
    found.test("perplexity", f"smoothed perplexity after equal seconds, {ENTMAX} / {SOFTMAX}", worse, at_most=1.05)
    plus = difference(of(PLUS, STEPS, "accuracy"), of(SPARSEMAX, STEPS, "accuracy"))
    found.test("plus", f"accuracy after equal steps, {PLUS} less {SPARSEMAX}", plus, at_least=0.0)
    repeats = difference(of(ENTMAX, STEPS, "repeats"), of(SOFTMAX, STEPS, "repeats"))
    found.test("repeats", f"repeated triples, points, {ENTMAX} less {SOFTMAX}", repeats, at_most=0.0)
    found.notes.append(
        "All output layers have the same network, first weights, batches and learning rate. Nothing is tuned for any of them."
    )
    found.picture(
        lambda figure: draw(figure, of),
        (9.0, 3.8),
        caption="Accuracy and smoothed perplexity, after equal steps and equal seconds",
    )


def draw(figure: Any, of: Any) -> None:
    from anymax.plot.style import COLOURS  # late: an optional extra

    panels = figure.subplots(1, 2, sharey=True)
    for ax, what in zip(panels, ("accuracy", "perplexity"), strict=True):
        for k, when in enumerate((STEPS, SECONDS)):
            spans = [over_seeds(of(name, when, what)) for name in ARMS]
            ax.errorbar([s.mean for s in spans], np.arange(len(ARMS)) + 0.15 * k, fmt="so"[k], color=COLOURS[k], capsize=2, label=when,
                        xerr=[[s.mean - s.low for s in spans], [s.high - s.mean for s in spans]])  # fmt: skip
        ax.set(
            xlabel={"accuracy": "accuracy, per cent", "perplexity": "smoothed perplexity"}[what],
            yticks=range(len(ARMS)),
            yticklabels=ARMS,
        )
        ax.grid(color="#E5E5E5", linewidth=0.6)
    panels[0].invert_yaxis()
    panels[0].legend(frameon=False)


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
