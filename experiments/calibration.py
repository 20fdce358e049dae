"""Calibration against training length: seven maps, from 15 to 240 epochs and stopped on validation rows, before and after a temperature."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import anymax
from anymax import Mapping

from . import _images, _networks
from ._common import Experiment, Settings, main, quick_on_one_thread
from ._report import Claim, Findings, cut
from ._statistics import difference, interval, over_seeds

SU, BREBISSON = "Su 2024, kexue.fm/archives/10145", "de Brebisson and Vincent 2015, section 4"
EXPERIMENT = Experiment(
    name="calibration",
    title="Calibration against training length",
    about="Small networks on digits and Fashion-MNIST, looked at from 15 to 240 epochs: whose probabilities mean what they say, and when?",
    claims={
        "longer": Claim(
            "The longer softmax trains, the more its confidence exceeds its accuracy: after 240 epochs by more than after 15",
            SU,
        ),
        "short": Claim("After 15 epochs Taylor softmax has a smaller calibration error than softmax", SU),
        "long": Claim("After 240 epochs Taylor softmax has a smaller calibration error than softmax", SU),
        "stopped": Claim("Stopped on validation rows, Taylor softmax has a smaller calibration error than softmax", SU),
        "scaled": Claim(
            "Stopped, and with a temperature from validation rows, softmax has a calibration error of at most 2 points",
            "asked here",
        ),
        "brier": Claim(
            "Stopped and with a temperature, no other map has a Brier score less than that of softmax by more than 0.01",
            "asked here",
        ),
        "accuracy": Claim("Stopped on validation rows, Taylor softmax classifies images better than softmax", BREBISSON),
        "either": Claim("Stopped on validation rows, the accuracies of Taylor softmax and softmax differ by at most a point", "asked here"),
    },
    seeds=10,
    needs=("matplotlib", "scipy", "sklearn", "torch"),
    options={"--fashion-mnist": _images.OPTION},
    free=("--fashion-mnist",),
)  # fmt: skip
LENGTHS = (15, 30, 60, 120, 240)
STOPPED = "stopped"
ON_STOPPED = ("stopped", "scaled", "brier", "accuracy", "either")  # the claims on networks that were stopped
HELD = 0.2  # of the training rows stop and choose the temperature
TEMPERATURES = np.geomspace(0.1, 20.0, 81)
UNIFORM = 0.01  # weight of the uniform distribution in the log-loss, which exact zeros would make infinite
FIGURES = ("accuracy", "confidence less accuracy", "calibration error", "Brier score", "log-loss")
RAW, SCALED = "as trained", "with a temperature"


def judge(p: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """What the probabilities of test rows are worth."""
    from anymax.plot import reliability  # late: an optional extra

    n = p.shape[1]
    mixed = (1.0 - UNIFORM) * p[np.arange(len(y)), y] + UNIFORM / n
    accuracy = float((p.argmax(axis=1) == y).mean())
    return {
        "accuracy": 100 * accuracy,
        "confidence less accuracy": 100 * (float(p.max(axis=1).mean()) - accuracy),
        "calibration error": 100 * reliability(p, y)[3],
        "Brier score": brier(p, y),
        "log-loss": float(-np.log(mixed).mean()),
    }


def brier(p: np.ndarray, y: np.ndarray) -> float:
    """The mean squared distance from the true class: it counts exact zeros as what they are."""
    return float(((p - np.eye(p.shape[1])[y]) ** 2).sum(axis=1).mean())


def temperature(mapping: Mapping, z: np.ndarray, y: np.ndarray) -> float:
    """That with the least Brier score on these rows, of a fine grid."""
    return float(min(TEMPERATURES, key=lambda t: brier(anymax.apply(mapping, z / t), y)))


def trained(data: _networks.Data, name: str, hidden: int, lengths: tuple[int, ...], seed: int) -> list[dict[str, Any]]:
    """A row of figures for each length of training and for the epoch with the least Brier score on held-out rows, as trained and scaled."""
    x, y, x_test, y_test = data
    mapping, loss = _networks.MODELS[name]
    held = int(HELD * len(y))
    x, y, x_held, y_held = x[held:], y[held:], x[:held], y[:held]
    rows: list[dict[str, Any]] = []
    best: tuple[float, int, np.ndarray, np.ndarray] = (np.inf, 0, np.empty(0), np.empty(0))

    def tell(length: int | str, z_held: np.ndarray, z_test: np.ndarray, **more: float) -> None:
        t = temperature(mapping, z_held, y_held)
        for kind, scale in ((RAW, 1.0), (SCALED, t)):
            figures = judge(np.asarray(anymax.apply(mapping, z_test / scale)), y_test)
            rows.append({"length": length, "kind": kind, "temperature": scale, **figures, **more})

    for epoch, scores in enumerate(_networks.epochs(loss, x, y, hidden, lengths[-1], seed), start=1):
        z_held = scores(x_held)
        now = brier(np.asarray(anymax.apply(mapping, z_held)), y_held)
        if now < best[0]:
            best = (now, epoch, z_held, scores(x_test))
        if epoch in lengths:
            fitted = anymax.apply(mapping, scores(x)).argmax(axis=1) == y
            tell(epoch, z_held, scores(x_test), **{"training accuracy": 100 * float(fitted.mean())})
    tell(STOPPED, best[2], best[3], epoch=best[1])
    return rows


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    lengths = (2, 5) if settings.quick else LENGTHS
    sets = _networks.sets("calibration", settings, found)
    found.data += f" A fifth of the training rows ({HELD:.0%}) stops the training and chooses the temperature, and trains nothing."
    results: dict[str, dict[str, list[list[dict[str, Any]]]]] = {
        name: {model: [] for model in _networks.MODELS} for name in sets
    }
    jobs = [(name, seed) for name in sets for seed in settings.seeds]
    for name, seed in settings.track(jobs, "data and seed", lambda job: f"{job[0]}, {job[1]}"):
        draw_data, hidden = sets[name]
        data = draw_data(seed)
        for model in _networks.MODELS:
            results[name][model].append(trained(data, model, hidden, lengths, seed))
    found.settings = {
        "network": _networks.network(sets),
        "epochs": lengths,
        **_networks.SETTINGS,
        "stopped": "at the epoch with the least Brier score on the held-out rows, of all epochs",
        "temperature": f"the one of {len(TEMPERATURES)} from {TEMPERATURES[0]:g} to {TEMPERATURES[-1]:g} with the least Brier score there",
        "calibration error": "expected calibration error, 10 bins",
        "log-loss": f"of the probabilities mixed with {UNIFORM:.0%} of the uniform distribution: exact zeros would make it infinite",
    }
    _tell(found, results, lengths)


def _tell(found: Findings, results: dict[str, dict[str, list[list[dict[str, Any]]]]], lengths: tuple[int, ...]) -> None:
    def of(name: str, model: str, length: int | str, kind: str, figure: str) -> list[float]:
        return [
            row[figure]
            for rows in results[name][model]
            for row in rows
            if (row["length"], row["kind"]) == (length, kind)
        ]

    for name in results:
        for length in (*lengths, STOPPED):
            more = "training accuracy" if length != STOPPED else "epoch"
            for kind in (RAW, SCALED):
                extra = more if kind == RAW else "temperature"
                when = "stopped on held-out rows" if length == STOPPED else f"{length} epochs"
                found.table(f"{name}: {when}, {kind}", [
                    {"map": model, **{figure: over_seeds(of(name, model, length, kind, figure)) for figure in (*FIGURES, extra)}}
                    for model in results[name]
                ])  # fmt: skip
        over, error = "confidence less accuracy", "calibration error"

        def less(model: str, length: int | str, kind: str, figure: str, name: str = name) -> Any:
            return difference(of(name, model, length, kind, figure), of(name, "softmax", length, kind, figure))

        grown = difference(of(name, "softmax", lengths[-1], RAW, over), of(name, "softmax", lengths[0], RAW, over))
        found.test("longer", f"{name}: {over} of softmax, {lengths[-1]} epochs less {lengths[0]}", grown, at_least=0.0)
        for claim, length in (("short", lengths[0]), ("long", lengths[-1]), ("stopped", STOPPED)):
            found.test(
                claim, f"{name}: {error}, Taylor less softmax", less("Taylor softmax", length, RAW, error), at_most=0.0
            )
        found.test(
            "scaled",
            f"{name}: {error} of softmax",
            over_seeds(of(name, "softmax", STOPPED, SCALED, error)),
            at_most=2.0,
        )
        for model in results[name]:
            if model != "softmax":
                found.test(
                    "brier",
                    f"{name}: Brier score, {model} less softmax",
                    less(model, STOPPED, SCALED, "Brier score"),
                    at_least=-0.01,
                )
        accurate = less("Taylor softmax", STOPPED, RAW, "accuracy")
        found.test("accuracy", f"{name}: accuracy, Taylor less softmax", accurate, at_least=0.0)
        found.test("either", f"{name}: accuracy, Taylor less softmax", accurate, at_least=-1.0)
        found.test("either", f"{name}: accuracy, Taylor less softmax", accurate, at_most=1.0)
    cut(found.tests, edges(found.tables, found.tests))
    found.notes += [
        (
            "All maps have the same network, first weights, batches and learning rate. Nothing but the epoch and the temperature is "
            "chosen for any of them."
        ),
        "Each map is judged by its own probabilities. A temperature divides the scores before the map.",
    ]
    found.picture(lambda figure: draw(figure, results, lengths, of), (5.0 * len(results) + 2.0, 7.0),
                  caption="Calibration error by the length of training, as trained and with a temperature; right: stopped")  # fmt: skip


def edges(tables: Sequence[dict[str, Any]], tests: Sequence[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Of tests on stopped networks why they decide nothing: the best epochs are so late that training was not over."""
    out: dict[tuple[str, str], str] = {}
    for table in tables:
        name, _, rest = table["title"].partition(": stopped on held-out rows, ")
        if rest != RAW:
            continue
        spans = [interval(row["epoch"]) for row in table["rows"]]
        epochs = [epoch for span in spans for epoch in span.figures[0]]
        late = sum(epoch > 0.95 * LENGTHS[-1] for epoch in epochs)
        if late:
            words = f"{late} of {len(epochs)} networks were best within the last twentieth of the epochs"
            both = ((t["claim"], t["what"]) for t in tests if t["what"].startswith(f"{name}:"))
            out |= {(claim, what): words for claim, what in both if claim in ON_STOPPED}
    return out


def draw(figure: Any, results: dict[str, Any], lengths: tuple[int, ...], of: Callable[..., list[float]]) -> None:
    from anymax.plot.style import COLOURS  # late: an optional extra

    panels = figure.subplots(2, len(results), sharex=True, sharey="col", squeeze=False)
    for column, name in enumerate(results):
        for ax, kind in zip(panels[:, column], (RAW, SCALED), strict=True):
            for k, model in enumerate(results[name]):
                shown = [
                    over_seeds(of(name, model, length, kind, "calibration error")) for length in (*lengths, STOPPED)
                ]
                at = np.arange(len(shown), dtype=float)
                at[-1] += 0.3 + 0.07 * (k - len(results[name]) / 2)
                ax.plot(
                    at[:-1],
                    [span.mean for span in shown[:-1]],
                    color=COLOURS[k % len(COLOURS)],
                    marker="o",
                    markersize=3,
                    label=model,
                )
                ax.errorbar(at[-1:], [shown[-1].mean], yerr=[[shown[-1].mean - shown[-1].low], [shown[-1].high - shown[-1].mean]],
                            color=COLOURS[k % len(COLOURS)], fmt="s", markersize=4, capsize=2)  # fmt: skip
            ax.set(
                title=f"{name}, {kind}",
                xticks=[*range(len(lengths)), len(lengths) + 0.3],
                xticklabels=[*map(str, lengths), "stopped"],
            )
            ax.set_ylim(bottom=0.0)
            ax.grid(color="#E5E5E5", linewidth=0.6)
        panels[1, column].set_xlabel("epochs")
    for row in panels:
        row[0].set_ylabel("calibration error, points")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
