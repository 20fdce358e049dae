"""What is said of losses without a figure: smoothed targets and likelihoods, a loss whose value means nothing, scores before training."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

import anymax
from anymax import Entmax, Mapping, Sigsoftmax, Softmax, Sparsemax, Taylor

from . import _images, _networks
from ._common import Experiment, Settings, main, quick_on_one_thread
from ._report import Claim, Findings
from ._statistics import Interval, difference, over_seeds

SU, WIND = "Su 2024, kexue.fm/archives/10145", "allenwind.github.io/blog/15110"
MULLER = "Müller, Kornblith and Hinton 2019 (arXiv 1906.02629)"
EXPERIMENT = Experiment(
    name="statements",
    title="Statements on losses: smoothing, a smoothed likelihood, the stop-gradient loss, scores before training",
    about="Small networks on digits and Fashion-MNIST, stopped on held-out rows and at the end, and networks that are not trained at all.",
    claims={
        "smoothing": Claim(
            "Stopped on held-out rows, label smoothing of 0.1 leaves the accuracy of softmax as it is (within a point)", WIND
        ),
        "calibrated": Claim("Label smoothing of 0.1 lowers the calibration error of softmax, stopped and at the end of training", MULLER),
        "sparsemax": Claim(
            "Sparsemax is more accurate with its own loss than with the smoothed likelihood, whether epsilon is 1e-6 or 0.01", SU
        ),
        "entmax": Claim(
            "1.5-entmax is more accurate with its own loss than with the smoothed likelihood, whether epsilon is 1e-6 or 0.01", SU
        ),
        "stuck": Claim(
            "At the end the smoothed likelihood leaves sparsemax more training rows whose class has a probability of 0 than its own loss",
            "asked here",
        ),
        "taylor": Claim("Taylor softmax trained with the stop-gradient loss is at most a point less accurate than with -log p", SU),
        "sigsoftmax": Claim("Sigsoftmax trained with the stop-gradient loss is at most a point less accurate than with -log p", SU),
        "value": Claim(
            "Stopped where the stop-gradient loss on held-out rows is smallest, a network is less accurate, by half a point at least, "
            "than stopped by their accuracy",
            SU,
        ),
        "watch": Claim(
            "Stopped where -log p on held-out rows is smallest, a network is at most half a point less accurate than stopped by their "
            "accuracy",
            SU,
        ),
        "default": Claim(
            "Before training, with torch's first weights, at most one row in a hundred has scores of n classes log(n-1) apart", WIND
        ),
        "unit": Claim(
            "Before training, with first weights that give scores of variance 1, at most one row in a hundred has scores so far apart",
            WIND,
        ),
    },
    seeds=10,
    needs=("matplotlib", "scipy", "sklearn", "torch"),
    options={"--fashion-mnist": _images.OPTION},
    free=("--fashion-mnist",),
)  # fmt: skip
HELD = 0.2  # of the training rows stop
LENGTHS = {"digits": (60, 240), "Fashion-MNIST": (40, 160)}  # epochs; a claim on trained networks must hold at both
EPSILONS = (1e-6, 1e-2)
CLASSES = (10, 100, 1000)
ROWS = 1000  # whose scores before training are looked at
RARE = 0.01
SOFTMAX, SMOOTHED, SPARSEMAX, ENTMAX = "softmax", "softmax, smoothing 0.1", "sparsemax", "1.5-entmax"
LOG_P = {"Taylor softmax": Taylor(2), "sigsoftmax": Sigsoftmax()}


def likelihood(name: str, epsilon: float) -> str:
    return f"{name}, smoothed likelihood {epsilon:g}"


def stop_gradient(name: str) -> str:
    return f"{name}, stop-gradient"


def _arms() -> dict[str, tuple[Mapping, _networks.Loss]]:
    arms: dict[str, tuple[Mapping, _networks.Loss]] = {
        SOFTMAX: (Softmax(), anymax.cross_entropy),
        SMOOTHED: (Softmax(), lambda x, y: anymax.cross_entropy(x, y, label_smoothing=0.1)),
    }
    for name, mapping in ((SPARSEMAX, Sparsemax()), (ENTMAX, Entmax(1.5))):
        arms[name] = (mapping, lambda x, y, mapping=mapping: anymax.fenchel_young(mapping, x, y))
        for epsilon in EPSILONS:
            arms[likelihood(name, epsilon)] = (
                mapping,
                lambda x, y, mapping=mapping, epsilon=epsilon: anymax.smoothed_nll(mapping, x, y, epsilon=epsilon),
            )
    for name, mapping in LOG_P.items():
        arms[name] = (mapping, lambda x, y, mapping=mapping: anymax.nll(mapping, x, y))
        arms[stop_gradient(name)] = (mapping, lambda x, y, mapping=mapping: anymax.stop_gradient_loss(mapping, x, y))
    return arms


ARMS = _arms()
WATCHED = (SOFTMAX, stop_gradient("sigsoftmax"))  # that are stopped by three figures
BY_ACCURACY, BY_VALUE, BY_LOG_P, LAST = "accuracy", "value", "-log p", "last"


# -- figures ----------------------------------------------------------------------------------------------------------


def watched(mapping: Mapping, z: np.ndarray, y: np.ndarray, all_three: bool) -> dict[str, float]:
    """What may stop a training, of held-out rows; the least is the best."""
    wrong = float((np.asarray(anymax.apply(mapping, z)).argmax(axis=1) != y).mean())
    if not all_three:
        return {BY_ACCURACY: wrong}
    return {
        BY_ACCURACY: wrong,
        BY_VALUE: float(anymax.stop_gradient_loss(mapping, z, y)),
        BY_LOG_P: float(anymax.nll(mapping, z, y)),
    }


def tested(mapping: Mapping, z: np.ndarray, y: np.ndarray) -> dict[str, float]:
    from anymax.plot import reliability  # late: an optional extra

    p = np.asarray(anymax.apply(mapping, z))
    return {"accuracy": 100 * float((p.argmax(axis=1) == y).mean()), "calibration error": 100 * reliability(p, y)[3]}


def trained(data: _networks.Data, arm: str, hidden: int, lengths: tuple[int, ...], seed: int) -> list[dict[str, Any]]:
    """After each of `lengths` epochs: by what stopped the training, the figures of the test rows; training rows at 0; what was watched."""
    x, y, x_test, y_test = data
    mapping, loss = ARMS[arm]
    held = int(HELD * len(y))
    out: list[dict[str, Any]] = []
    seen: list[dict[str, float]] = []
    stopped: dict[str, dict[str, float]] = {}
    best: dict[str, float] = {}
    for epoch, scores in enumerate(_networks.epochs(loss, x[held:], y[held:], hidden, lengths[-1], seed), start=1):
        now = watched(mapping, scores(x[:held]), y[:held], arm in WATCHED)
        seen.append(now)
        better = [by for by, value in now.items() if value < best.get(by, math.inf)]
        best |= {by: now[by] for by in better}
        if better or epoch in lengths:
            figures = tested(mapping, scores(x_test), y_test)
            stopped |= dict.fromkeys(better, figures)
        if epoch in lengths:
            p = np.asarray(anymax.apply(mapping, scores(x[held:])))
            at_zero = 100 * float((p[np.arange(len(p)), y[held:]] == 0).mean())
            out.append({**stopped, LAST: figures, "watched": list(seen), "at 0": at_zero})
    return out


def first_scores(x: np.ndarray, hidden: int, classes: int, unit: bool, seed: int) -> np.ndarray:
    """Scores of a network that is not trained: with torch's first weights, or with those that keep a variance of 1."""
    import torch  # late: listing the experiments needs no torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inner, outer = torch.nn.Linear(x.shape[1], hidden), torch.nn.Linear(hidden, classes)
        if unit:
            x = (x - x.mean()) / x.std()
            torch.nn.init.kaiming_normal_(inner.weight, nonlinearity="relu")
            torch.nn.init.zeros_(inner.bias)
            torch.nn.init.normal_(outer.weight, std=hidden**-0.5)  # the mean square behind the ReLU is 1
            torch.nn.init.zeros_(outer.bias)
    with torch.no_grad():
        return np.asarray(outer(torch.relu(inner(torch.from_numpy(x)))).double().numpy())


def apart(z: np.ndarray) -> float:
    """The per cent of rows whose scores are as far apart as a cross-entropy of log 2 needs: log(n-1)."""
    return 100 * float((np.ptp(z, axis=1) >= anymax.logit_gap(math.log(2), z.shape[1])).mean())


# -- the experiment ---------------------------------------------------------------------------------------------------


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    sets = _networks.sets("statements", settings, found)
    lengths = {"digits": (2, 4)} if settings.quick else LENGTHS
    found.data += " A fifth of the training rows stops the training."
    results: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {
        (name, epochs): {arm: [] for arm in ARMS} for name in sets for epochs in lengths[name]
    }
    first: dict[tuple[str, bool, int], list[dict[str, float]]] = {}
    jobs = [(name, seed) for name in sets for seed in settings.seeds]
    for name, seed in settings.track(jobs, "data and seed", lambda job: f"{job[0]}, {job[1]}"):
        draw_data, hidden = sets[name]
        data = draw_data(seed)
        for unit in (False, True):
            for n in CLASSES:
                z = first_scores(data[2][:ROWS], hidden, n, unit, seed)
                figures = {"apart": apart(z), "spread": float(np.ptp(z, axis=1).mean()), "deviation": float(z.std())}
                first.setdefault((name, unit, n), []).append(figures)
        for arm in ARMS:
            for epochs, one in zip(lengths[name], trained(data, arm, hidden, lengths[name], seed), strict=True):
                results[name, epochs][arm].append(one)
    found.settings = {
        "network": _networks.network(sets),
        "epochs": ", ".join(f"{name}: {' and '.join(map(str, lengths[name]))}" for name in sets),
        "optimizer": _networks.SETTINGS["optimizer"],
        "calibration error": "expected calibration error, 10 bins",
        "stopped": "at the epoch with the best figure of a fifth of the training rows: of their accuracy where nothing else is said",
        "scores of variance 1": "pixels of mean 0 and variance 1; normal weights, of variance 2 / pixels and 1 / units; no biases",
    }  # fmt: skip
    _tell(found, results, first)


def _tell(
    found: Findings,
    results: dict[tuple[str, int], dict[str, list[dict[str, Any]]]],
    first: dict[tuple[str, bool, int], list[dict[str, float]]],
) -> None:
    for (data, epochs), arms in results.items():
        name = f"{data}, {epochs} epochs"

        def of(arm: str, by: str = BY_ACCURACY, figure: str = "accuracy", arms: Any = arms) -> list[float]:
            return [one[by][figure] for one in arms[arm]]

        def at_zero(arm: str, arms: Any = arms) -> list[float]:
            return [one["at 0"] for one in arms[arm]]

        found.table(name, [
            {"loss": arm, "accuracy, stopped": over_seeds(of(arm)), "at the end": over_seeds(of(arm, LAST)),
             "calibration error, stopped": over_seeds(of(arm, figure="calibration error")),
             "of the end": over_seeds(of(arm, LAST, "calibration error")), "rows at 0": over_seeds(at_zero(arm))} for arm in ARMS
        ], "Per cent of the test rows; of the training rows, those whose class has a probability of 0 at the end.")  # fmt: skip
        found.table(f"{name}: stopped by three figures of held-out rows", [
            {"loss": arm, **{by: over_seeds(of(arm, by)) for by in (BY_ACCURACY, BY_VALUE, BY_LOG_P)},
             "epoch with the least value": over_seeds([_epoch(one, BY_VALUE) for one in arms[arm]])} for arm in WATCHED
        ], "Test accuracy in per cent; value: that of the stop-gradient loss.")  # fmt: skip
        same = difference(of(SMOOTHED), of(SOFTMAX))
        what = f"{name}: accuracy, points: {SMOOTHED} - softmax"
        found.test("smoothing", what, same, at_least=-1.0)
        found.test("smoothing", what, same, at_most=1.0)
        for by in (BY_ACCURACY, LAST):
            lower = difference(of(SMOOTHED, by, "calibration error"), of(SOFTMAX, by, "calibration error"))
            when = "at the end" if by == LAST else "stopped"
            found.test(
                "calibrated", f"{name}, {when}: calibration error, points: {SMOOTHED} - softmax", lower, at_most=0.0
            )
        for claim, own in (("sparsemax", SPARSEMAX), ("entmax", ENTMAX)):
            for epsilon in EPSILONS:
                other = likelihood(own, epsilon)
                more = difference(of(own), of(other))
                found.test(claim, f"{name}: accuracy, points: {own} - {other}", more, at_least=0.0)
        for epsilon in EPSILONS:
            other = likelihood(SPARSEMAX, epsilon)
            more = difference(at_zero(other), at_zero(SPARSEMAX))
            found.test("stuck", f"{name}: rows at 0, points: {other} - {SPARSEMAX}", more, at_least=0.0)
        for claim, own in (("taylor", "Taylor softmax"), ("sigsoftmax", "sigsoftmax")):
            other = stop_gradient(own)
            less = difference(of(other), of(own))
            found.test(claim, f"{name}: accuracy, points: {other} - {own}", less, at_least=-1.0)
        for arm in WATCHED:
            for claim, by, bound in (("value", BY_VALUE, {"at_most": -0.5}), ("watch", BY_LOG_P, {"at_least": -0.5})):
                less = difference(of(arm, by), of(arm))
                found.test(claim, f"{name}, {arm}: accuracy, points: stopped by {by} - by accuracy", less, **bound)
    _tell_first(found, first)
    found.notes += [
        (
            "All losses have the same network, first weights, batches and learning rate. Nothing but the epoch is chosen for any of them. "
            "Each claim on trained networks is judged at two lengths of training and must hold at both."
        ),
        (
            "Su writes the stop-gradient loss as (p - y) times a constant x. Its gradient is the Jacobian times x, in which there is no "
            "target: the constant must be p - y, as it is here."
        ),
    ]  # fmt: skip
    last = list(results)[-1]
    found.picture(lambda figure: draw(figure, results[last], first, last[0]), (14.0, 4.4),
                  caption="Accuracy by loss, what may stop a training, and how far apart scores are before it")  # fmt: skip


def _tell_first(found: Findings, first: dict[tuple[str, bool, int], list[dict[str, float]]]) -> None:
    titles = {"deviation": "standard deviation", "spread": "highest less lowest", "apart": "rows log(n-1) apart"}
    ways = {False: "torch's", True: "variance 1"}
    found.table("Scores before training", [
        {"data": name, "first weights": ways[unit], "n": n, "log(n-1)": math.log(n - 1),
         **{title: _of(several, figure) for figure, title in titles.items()}} for (name, unit, n), several in first.items()
    ], f"Of {ROWS:,} test rows at most; the last column in per cent of them.")  # fmt: skip
    for (name, unit, n), several in first.items():
        what = f"{name}, {n:,} classes: per cent of the rows that are log(n-1) apart"
        found.test("unit" if unit else "default", what, _of(several, "apart"), at_most=100 * RARE)


def _of(several: list[dict[str, float]], figure: str) -> Interval:
    return over_seeds([one[figure] for one in several])


def _epoch(one: dict[str, Any], by: str) -> float:
    return 1.0 + float(np.argmin([now[by] for now in one["watched"]]))


def draw(
    figure: Any,
    arms: dict[str, list[dict[str, Any]]],
    first: dict[tuple[str, bool, int], list[dict[str, float]]],
    name: str,
) -> None:
    from anymax.plot.style import COLOURS, DASHES, MARKERS  # late: an optional extra

    losses, paths, spreads = figure.subplots(1, 3, width_ratios=(1.3, 1.0, 1.0))
    for i, arm in enumerate(ARMS):
        for k, (by, label) in enumerate(((BY_ACCURACY, "stopped"), (LAST, "at the end"))):
            span = over_seeds([one[by]["accuracy"] for one in arms[arm]])
            losses.errorbar(
                span.mean, i, xerr=[[span.mean - span.low], [span.high - span.mean]], fmt="os"[k], markersize=5,
                capsize=2, color=COLOURS[k], label=label if i == 0 else None,
            )  # fmt: skip
    losses.set(title=f"{name}: test accuracy, per cent", yticks=range(len(ARMS)), yticklabels=list(ARMS))
    losses.invert_yaxis()
    losses.legend(frameon=False)
    seen = arms[SOFTMAX][0]["watched"]
    for k, (by, label) in enumerate(
        ((BY_ACCURACY, "share of wrong rows"), (BY_VALUE, "stop-gradient loss"), (BY_LOG_P, "cross-entropy"))
    ):
        values = [now[by] for now in seen]
        paths.plot(range(1, len(seen) + 1), values, color=COLOURS[k], linestyle=DASHES[k], label=label)
        at = int(np.argmin(values))
        paths.plot(at + 1, values[at], color=COLOURS[k], marker=MARKERS[k], linestyle="")
    paths.set(title="softmax, held-out rows, seed 0", xlabel="epoch; a mark where the least is")
    paths.legend(frameon=False)
    for k, unit in enumerate((False, True)):
        spans = [_of(first[name, unit, n], "apart") for n in CLASSES]
        label = "first weights of variance 1" if unit else "torch's first weights"
        spreads.errorbar(CLASSES, [s.mean for s in spans], yerr=[[s.mean - s.low for s in spans], [s.high - s.mean for s in spans]],
                         color=COLOURS[k], linestyle=DASHES[k], marker=MARKERS[k], capsize=2, label=label)  # fmt: skip
    spreads.axhline(100 * RARE, color="#5A5A5A", linestyle=":", linewidth=1.0)
    spreads.set(title="rows log(n-1) apart, per cent", xlabel="n", xscale="log", ylim=(-3, 103))
    spreads.legend(frameon=False)
    for ax in (losses, paths, spreads):
        ax.grid(color="#E5E5E5", linewidth=0.6)


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
