"""Wrong labels: seven losses where none, a fifth and two fifths of the training labels are wrong, by the length of training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import anymax
from anymax import Entmax, Mapping, PerturbMax, Softmax, Sparsemax, Taylor

from . import _images, _networks
from ._common import Experiment, Settings, main, quick_on_one_thread
from ._report import Claim, Findings
from ._statistics import Interval, difference, over_seeds

GHOSH = "Ghosh, Kumar and Sastry 2017 (arXiv 1712.09482)"
EXPERIMENT = Experiment(
    name="noise",
    title="Wrong labels: which map and loss stays accurate?",
    about="Small networks on digits and Fashion-MNIST with 0, 20 and 40 % wrong training labels, after 10 to 600 epochs and stopped.",
    claims={
        "memory": Claim(
            "With 40 % wrong labels softmax, trained on, is less accurate than stopped on validation rows", "asked here",
            notes=("written after it was seen that the fall from 10 epochs on turns with the length of training",),
        ),
        "taylor": Claim("With 40 % wrong labels, and not stopped, Taylor softmax is more accurate than softmax", "asked here"),
        "robust": Claim(
            "With 40 % wrong labels the accuracy loss, trained on, is at most a point less accurate than after 10 epochs", GHOSH
        ),
        "smoothing": Claim(
            "With 40 % wrong labels, stopped on validation rows, label smoothing makes softmax more accurate",
            "Lukasik et al. 2020 (arXiv 2003.02819)",
        ),
        "taylor stopped": Claim(
            "With 40 % wrong labels, stopped on validation rows, Taylor softmax is more accurate than softmax",
            "asked here",
        ),
        "accuracy stopped": Claim(
            "With 40 % wrong labels, stopped on validation rows, the accuracy loss is more accurate than softmax",
            GHOSH,
        ),
        "sparse": Claim(
            "Stopped on validation rows, 1.5-entmax and sparsemax are as accurate as softmax at every share (within a point)",
            "asked here",
        ),
        "clean": Claim(
            "Without wrong labels, stopped on validation rows, none is less accurate than softmax by more than a point",
            "asked here",
        ),
    },
    seeds=10,
    needs=("matplotlib", "scipy", "sklearn", "torch"),
    options={"--fashion-mnist": _images.OPTION},
    free=("--fashion-mnist",),
)  # fmt: skip
SHARES = (0.0, 0.2, 0.4)
LENGTHS = {"digits": (10, 60, 600), "Fashion-MNIST": (10, 30, 60)}  # epochs; a claim on them must hold at the last two
STOPPED, EPOCH = "stopped", "the epoch where it stopped"
HELD = 0.2  # of the training rows, with wrong labels as the others, stop
ARMS: dict[str, tuple[Mapping, _networks.Loss]] = {
    "softmax": (Softmax(), anymax.cross_entropy),
    "softmax, smoothing 0.1": (Softmax(), lambda x, y: anymax.cross_entropy(x, y, label_smoothing=0.1)),
    "Taylor softmax": (Taylor(2), anymax.taylor_softmax_loss),
    "1.5-entmax": (Entmax(1.5), anymax.entmax15_loss),
    "sparsemax": (Sparsemax(), anymax.sparsemax_loss),
    "perturb-max": (PerturbMax(), anymax.perturb_max_loss),
    "softmax, accuracy loss": (Softmax(), lambda x, y: anymax.accuracy_loss(Softmax(), x, y)),
}


def wrong(y: np.ndarray, share: float, seed: int) -> np.ndarray:
    """The labels, of which exactly this share, drawn at random, is another class: each of the others as often."""
    classes = int(y.max()) + 1
    rng = np.random.default_rng([seed, 401])
    chosen = rng.permutation(len(y))[: round(share * len(y))]
    out = y.copy()
    out[chosen] = (y[chosen] + rng.integers(1, classes, len(chosen))) % classes
    return out


def trained(data: _networks.Data, arm: str, hidden: int, lengths: tuple[int, ...], seed: int) -> dict[int | str, float]:
    """Test accuracy, in per cent, at each length and at the epoch with the best accuracy on the held-out rows."""
    x, y, x_test, y_test = data
    mapping, loss = ARMS[arm]
    held = int(HELD * len(y))
    out: dict[int | str, float] = {}

    def accuracy(z: np.ndarray, y: np.ndarray) -> float:
        return 100 * float((np.asarray(anymax.apply(mapping, z)).argmax(axis=1) == y).mean())

    best = -1.0
    for epoch, scores in enumerate(_networks.epochs(loss, x[held:], y[held:], hidden, lengths[-1], seed), start=1):
        now = accuracy(scores(x[:held]), y[:held])
        if now > best:
            best, out[STOPPED], out[EPOCH] = now, accuracy(scores(x_test), y_test), epoch
        if epoch in lengths:
            out[epoch] = accuracy(scores(x_test), y_test)
    return out


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    lengths = {"digits": (2, 4, 6)} if settings.quick else LENGTHS
    sets = _networks.sets("noise", settings, found)
    found.data += " Labels are made wrong in the training rows alone, of which a fifth stops the training."
    results: dict[tuple[str, float, str], list[dict[int | str, float]]] = {}
    jobs = [(name, seed) for name in sets for seed in settings.seeds]
    for name, seed in settings.track(jobs, "data and seed", lambda job: f"{job[0]}, {job[1]}"):
        draw_data, hidden = sets[name]
        x, y, x_test, y_test = draw_data(seed)
        for share in SHARES:
            for arm in ARMS:
                one = trained((x, wrong(y, share, seed), x_test, y_test), arm, hidden, lengths[name], seed)
                results.setdefault((name, share, arm), []).append(one)
    found.settings = {
        "network": _networks.network(sets),
        "epochs": "; ".join(f"{name}: {', '.join(map(str, lengths[name]))}" for name in sets),
        **_networks.SETTINGS,
        "wrong labels": "exactly the share said, drawn at random; each of the other classes as often",
        "stopped": "at the epoch with the best accuracy on a fifth of the training rows, whose labels are wrong as often as the others'",
    }
    _tell(found, results, {name: lengths[name] for name in sets})


def _tell(
    found: Findings,
    results: dict[tuple[str, float, str], list[dict[int | str, float]]],
    lengths: dict[str, tuple[int, ...]],
) -> None:
    def of(name: str, share: float, arm: str, length: int | str) -> list[float]:
        return [one[length] for one in results[name, share, arm]]

    def less(name: str, share: float, arm: str, length: int | str) -> Interval:
        return difference(of(name, share, arm, length), of(name, share, "softmax", length))

    def edge(name: str, share: float, *arms: str) -> str:
        """Why the stopped networks decide nothing, if some were best at the last epoch."""
        epochs = [epoch for arm in arms for epoch in of(name, share, arm, EPOCH)]
        last = sum(epoch == lengths[name][-1] for epoch in epochs)
        return f"{last} of {len(epochs)} networks were best at the last epoch" if last else ""

    most = SHARES[-1]
    for name, (first, *later) in lengths.items():
        for length in (first, *later, STOPPED):
            title = f"{name}: test accuracy, " + (
                "stopped on held-out rows" if length == STOPPED else f"after {length} epochs"
            )
            columns = {share: f"{share:.0%} wrong".replace("%", " %") for share in SHARES}
            found.table(title, [
                {"loss": arm, **{columns[share]: over_seeds(of(name, share, arm, length)) for share in SHARES},
                 f"{columns[most]}, less softmax": None if arm == "softmax" else less(name, most, arm, length)} for arm in ARMS
            ], "Per cent of the test rows, whose labels are right; points.")  # fmt: skip
        found.table(f"{name}: {EPOCH}", [
            {"loss": arm, **{f"{share:.0%} wrong".replace("%", " %"): over_seeds(of(name, share, arm, EPOCH)) for share in SHARES}}
            for arm in ARMS
        ], f"At most {later[-1]}.")  # fmt: skip
        for length in later:
            fall = difference(of(name, most, "softmax", length), of(name, most, "softmax", STOPPED))
            what = f"{name}: accuracy of softmax, after {length} epochs less stopped"
            found.test("memory", what, fall, at_most=0.0, edge=edge(name, most, "softmax"))
            fall = difference(*(of(name, most, "softmax, accuracy loss", n) for n in (length, first)))
            found.test(
                "robust",
                f"{name}: accuracy of softmax, accuracy loss, {length} epochs less {first}",
                fall,
                at_least=-1.0,
            )
            what = f"{name}: accuracy, Taylor softmax less softmax, after {length} epochs"
            found.test("taylor", what, less(name, most, "Taylor softmax", length), at_least=0.0)
        for claim, arm in (
            ("taylor stopped", "Taylor softmax"), ("smoothing", "softmax, smoothing 0.1"), ("accuracy stopped", "softmax, accuracy loss"),
        ):  # fmt: skip
            what = f"{name}: accuracy, {arm} less softmax"
            found.test(claim, what, less(name, most, arm, STOPPED), at_least=0.0, edge=edge(name, most, arm, "softmax"))
        for arm in ("1.5-entmax", "sparsemax"):
            for share in SHARES:
                both, cut = less(name, share, arm, STOPPED), edge(name, share, arm, "softmax")
                what = f"{name}, {share:.0%} wrong: accuracy, {arm} less softmax"
                found.test("sparse", what, both, at_least=-1.0, edge=cut)
                found.test("sparse", what, both, at_most=1.0, edge=cut)
        for arm in ARMS:
            if arm != "softmax":
                what = f"{name}: accuracy, {arm} less softmax"
                found.test(
                    "clean", what, less(name, 0.0, arm, STOPPED), at_least=-1.0, edge=edge(name, 0.0, arm, "softmax")
                )
    found.notes.append(
        "All losses have the same network, first weights, batches and learning rate. Nothing but the epoch is chosen for any of them."
    )
    found.picture(lambda figure: draw(figure, of, lengths), (5.0 * len(lengths) + 2.0, 4.8),
                  caption="Test accuracy with 40 % wrong training labels, by the length of training")  # fmt: skip


def draw(figure: Any, of: Callable[..., list[float]], lengths: dict[str, tuple[int, ...]]) -> None:
    from anymax.plot.style import COLOURS  # late: an optional extra

    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for ax, (name, own) in zip(panels, lengths.items(), strict=True):
        for k, arm in enumerate(ARMS):
            shown = [over_seeds(of(name, SHARES[-1], arm, length)) for length in (*own, STOPPED)]
            at = np.arange(len(shown)) + 0.06 * (k - len(ARMS) / 2)
            ax.errorbar(at, [s.mean for s in shown], yerr=[[s.mean - s.low for s in shown], [s.high - s.mean for s in shown]],
                        fmt="o", color=COLOURS[k % len(COLOURS)], markersize=4, capsize=2, label=arm)  # fmt: skip
        ax.set(title=name, xticks=range(len(own) + 1), xticklabels=[*(f"{n} epochs" for n in own), "stopped"])
        ax.grid(color="#E5E5E5", linewidth=0.6)
    panels[0].set_ylabel("test accuracy, per cent")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
