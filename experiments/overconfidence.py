"""How far softmax drives scores apart in small networks, and what training for the accuracy itself does."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import anymax

from . import _images, _networks
from ._common import Experiment, Settings, main
from ._report import Claim, Findings
from ._statistics import difference, exact, over_seeds, ratio

SU, SU_SPARSE = "Su 2024, kexue.fm/archives/10145", "Su 2021, kexue.fm/archives/8046"
EXPERIMENT = Experiment(
    name="overconfidence",
    title="Scores that drift apart: softmax against other maps, and against the accuracy itself",
    about="One small network a map on digits and Fashion-MNIST: accuracy, confidence, and the gap between the scores.",
    claims={
        "exact": Claim(
            "Trained from scratch for the accuracy itself (perturb-max, minus p of the target), without the margin and the normalised "
            "gradient of EXACT, a network is more accurate",
            "after Karpukhin et al. 2022 (EXACT)",
        ),
        "no effect": Claim(
            "Perturb-max as a smooth accuracy has no particular effect: within one point of softmax's accuracy", SU
        ),
        "gap": Claim(
            "With a cross-entropy of l, the scores of n classes are at least log(n-1) - log(exp(l)-1) apart", SU_SPARSE,
            apart="it is a theorem",
        ),
        "apart": Claim(
            "Softmax drives the scores of training rows farther apart than sparsemax",
            SU_SPARSE,
            notes=("at one length of training, each with its own loss, whose scales differ",),
        ),
    },
    seeds=10,
    lengths="Each network was trained for one length only, of 150 epochs on the digits and 60 on Fashion-MNIST; "
            "it is not shown that the held-out accuracy had stopped by then, and a verdict may turn with the length.",
    needs=("matplotlib", "scipy", "sklearn", "torch"),
    options={
        "--fashion-mnist": _images.OPTION,
        "--train": {"type": int, "default": 5000, "metavar": "N", "help": "training rows of Fashion-MNIST, at most (default 5000)"},
        "--epochs": {"type": int, "default": 60, "metavar": "N", "help": "on Fashion-MNIST (default 60)"},
    },
    free=("--fashion-mnist",),
)  # fmt: skip

DIAGRAMS = ("softmax", "Taylor softmax", "perturb-max, accuracy", "sparsemax")


# -- figures ----------------------------------------------------------------------------------------------------------


def losses(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The cross-entropy of each row, exact also where it is tiny: log(1 + sum over the others of exp(z_j - z_target))."""
    ahead = z - z[np.arange(len(y)), y][:, None]
    ahead[np.arange(len(y)), y] = -np.inf
    return np.log1p(np.exp(ahead).sum(axis=1))


def slack(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """By how much the scores of each row are farther apart than the bound of its loss."""
    loss = losses(z, y)
    bound = np.array([anymax.logit_gap(float(value), z.shape[1]) for value in loss])
    return np.ptp(z, axis=1) - bound


def measure(data: _networks.Data, name: str, hidden: int, epochs: int, seed: int) -> dict[str, Any]:
    from anymax.plot import reliability  # late: an optional extra

    x, y, x_test, y_test = data
    mapping, loss = _networks.MODELS[name]
    scores = list(_networks.epochs(loss, x, y, hidden, epochs, seed))[-1]
    z, z_test = scores(x), scores(x_test)
    p = anymax.apply(mapping, z_test)
    confidence, accuracy = float(p.max(axis=1).mean()), float((p.argmax(axis=1) == y_test).mean())
    truth = np.eye(p.shape[1])[y_test]
    return {
        "accuracy": 100 * accuracy,
        "training accuracy": 100 * float((anymax.apply(mapping, z).argmax(axis=1) == y).mean()),
        "confidence less accuracy": 100 * (confidence - accuracy),
        "calibration error": 100 * reliability(p, y_test)[3],
        "Brier score": float(((p - truth) ** 2).sum(axis=1).mean()),
        "spread": float(np.ptp(z, axis=1).mean()),
        "p": p,
        "z": z,
    }


# -- the experiment ---------------------------------------------------------------------------------------------------


def run(settings: Settings, found: Findings) -> None:
    options = settings.options
    sets = _networks.sets("overconfidence", settings, found, options.train)
    lengths = {"digits": 20 if settings.quick else 150, "Fashion-MNIST": options.epochs}
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {model: [] for model in _networks.MODELS} for name in sets
    }
    gaps: dict[str, float] = {}
    jobs = [(name, seed) for name in sets for seed in settings.seeds]
    for name, seed in settings.track(jobs, "data and seed", lambda job: f"{job[0]}, {job[1]}"):
        draw_data, hidden = sets[name]
        data = draw_data(seed)
        for model in _networks.MODELS:
            settings.say(f"{name}, seed {seed}: {model}")
            one = measure(data, model, hidden, lengths[name], seed)
            if model == "softmax":
                gaps[name] = min(gaps.get(name, np.inf), float(slack(one["z"], data[1]).min()))
            one["y"], one["y_test"] = data[1], data[3]
            results[name][model].append(one)
    figures = (
        "accuracy",
        "training accuracy",
        "confidence less accuracy",
        "calibration error",
        "Brier score",
        "spread",
    )
    for name, columns in results.items():
        rows = [
            {"map": model, **{figure: over_seeds([one[figure] for one in several]) for figure in figures}}
            for model, several in columns.items()
        ]
        found.table(
            name,
            rows,
            "Per cent, but for the Brier score (less is better) and the spread: of a training row's scores the largest less the smallest.",
        )
    _tests(found, results, gaps)
    found.table(
        "The least gap between the scores of n classes, for a cross-entropy of l",
        [
            {"l": label, **{f"n = {n:,}": anymax.logit_gap(loss, n) for n in (10, 100, 1000, 100_000)}}
            for label, loss in (("log 2", float(np.log(2))), ("0.1", 0.1), ("0.01", 0.01))
        ],
        "log(n-1) - log(exp(l)-1), by arithmetic.",
    )
    found.settings = {
        "network": _networks.network(sets),
        "epochs": ", ".join(f"{name}: {lengths[name]}" for name in sets),
        **_networks.SETTINGS,
        "calibration error": "expected calibration error, 10 bins",
    }
    found.notes += [
        "All maps have the same network, first weights, batches, learning rate and epochs. Nothing is tuned for any of them.",
        "The accuracy loss trains from scratch, without the margin and the normalised gradient of EXACT.",
        (
            "The scores of two maps are on different scales: the loss of sparsemax is 0 "
            "once the target leads by 1, and the loss of softmax never is."
        ),
        (
            "Each map is judged by its own probabilities: the softmax of the scores for "
            "softmax, the perturb-max of the scores for perturb-max, and so on."
        ),
    ]
    last = list(sets)[-1]
    found.picture(
        lambda figure: draw(figure, results[last]), (12.5, 6.2), caption=f"Calibration and gaps on {last}, seed 0"
    )


def _tests(found: Findings, results: dict[str, dict[str, list[dict[str, Any]]]], gaps: dict[str, float]) -> None:
    for name, columns in results.items():

        def of(model: str, figure: str, columns: dict[str, list[dict[str, Any]]] = columns) -> list[float]:
            return [one[figure] for one in columns[model]]

        def less(model: str, figure: str) -> Any:
            return difference(of(model, figure), of("softmax", figure))

        accurate = less("perturb-max, accuracy", "accuracy")
        found.test("exact", f"{name}: accuracy, with the accuracy loss less softmax", accurate, at_least=0.0)
        found.test("no effect", f"{name}: accuracy, with the accuracy loss less softmax", accurate, at_least=-1.0)
        found.test("no effect", f"{name}: accuracy, with the accuracy loss less softmax", accurate, at_most=1.0)
        found.test(
            "gap",
            f"{name}: least excess over the bound, of all training rows and seeds",
            exact(gaps[name]),
            at_least=-1e-9,
        )
        spread = ratio(of("softmax", "spread"), of("sparsemax", "spread"))
        found.test("apart", f"{name}: spread of the scores, softmax / sparsemax", spread, at_least=1.0)


def draw(figure: Any, columns: dict[str, list[dict[str, Any]]]) -> None:
    from anymax.plot import calibration  # late: an optional extra
    from anymax.plot.style import COLOURS

    panels = figure.subplots(2, 4, sharey="row")
    for ax, model in zip(panels[0], DIAGRAMS):
        one = columns[model][0]
        calibration(one["p"], one["y_test"], name=model, ax=ax)
        ax.get_legend().set_visible(model == DIAGRAMS[0])
    for ax, model in zip(panels[1], DIAGRAMS):
        one = columns[model][0]
        loss, spread = losses(one["z"], one["y"]), np.ptp(one["z"], axis=1)
        step = max(1, len(loss) // 1500)
        least = max(float(np.percentile(loss, 1)), 1e-16)
        ax.scatter(np.maximum(loss[::step], least), spread[::step], s=4, color=COLOURS[0], alpha=0.4, linewidth=0)
        line = np.geomspace(least, float(loss.max()), 200)
        bound = [anymax.logit_gap(float(value), one["z"].shape[1]) for value in line]
        ax.plot(line, np.maximum(bound, 0), color=COLOURS[1], label="the bound")
        ax.set(xscale="log", xlabel="cross-entropy of a training row", title=model)
        ax.grid(color="#E5E5E5", linewidth=0.6)
    panels[1][0].set_ylabel("highest score less lowest")
    panels[1][0].legend(frameon=False)


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
