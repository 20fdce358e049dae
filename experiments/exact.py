"""Training for the accuracy itself, with the two remedies of EXACT (a margin and a normalised gradient) and without, to the end.

The loss is the chance that the noisy score of the target is not the largest: 1 - p of perturb-max. The margin clips the target's lead over
each other class, so that a row with a large lead no longer pulls; the gradient of a step is divided by its norm. Rate and margin are chosen
on held-out rows of draws that are not judged.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

import anymax

from . import _images, _networks
from ._common import Experiment, Settings, main, quick_on_one_thread, walk
from ._report import Claim, Findings
from ._statistics import Interval, difference, over_seeds

KARPUKHIN = "Karpukhin, Dereka and Kolesnikov 2024, EXACT (arXiv 2205.09615)"
EXPERIMENT = Experiment(
    name="exact",
    title="Training for the accuracy itself, with the remedies of EXACT",
    about="Small networks on digits and Fashion-MNIST: cross-entropy, the accuracy loss, and that with a margin and a normalised gradient.",
    claims={
        "better": Claim("With a margin and a normalised gradient the accuracy loss is more accurate than cross-entropy", KARPUKHIN),
        "remedies": Claim("With them it is more accurate than without", KARPUKHIN),
        "close": Claim("With them it is at most a point less accurate than cross-entropy", "asked here"),
    },
    seeds=10,
    needs=("matplotlib", "scipy", "sklearn", "torch"),
    options={"--fashion-mnist": _images.OPTION},
    free=("--fashion-mnist",),
)  # fmt: skip
SOFTMAX, BARE, EXACT = ARMS = ("cross-entropy", "accuracy loss", "accuracy loss, margin, normalised gradient")
PATIENCES, MOST = (10, 30), 600
HELD = 0.2  # of the training rows stop
TUNING = 10_000  # seeds from here on choose, and are never tested
RATE, MARGIN = (1e-3, 3.0), (4.0, 2.0)  # where the searches begin, and their steps


def trained(
    data: _networks.Data, arm: str, hidden: int, rate: float, margin: float, most: int, seed: int
) -> list[dict[str, Any]]:
    """For each patience the test accuracy of the best epoch, and the least held-out error, both in per cent."""
    import torch  # late: listing the experiments needs no torch

    from ._until import Averaged, Watch

    x, y, x_test, y_test = (torch.from_numpy(np.ascontiguousarray(part)) for part in data)
    held = int(HELD * len(y))
    perturbed = anymax.PerturbMax()
    shuffle = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, int(y.max()) + 1)
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    mean, watch = Averaged(model, 0.9), Watch[float](PATIENCES)

    def error(rows: Any, classes: Any) -> float:
        with torch.no_grad():
            return 100 * float((mean.model(rows).argmax(1) != classes).double().mean())

    while not watch.over(most):
        for batch in (held + torch.randperm(len(y) - held, generator=shuffle)).split(_networks.BATCH):
            z, target = model(x[batch]), y[batch]
            if arm == EXACT:
                z = -(z.gather(1, target[:, None]) - z).clamp(max=margin)
            optimizer.zero_grad()
            (
                anymax.cross_entropy(z, target) if arm == SOFTMAX else anymax.accuracy_loss(perturbed, z, target)
            ).backward()
            if arm == EXACT:
                grads = [weight.grad for weight in model.parameters()]
                norm = torch.sqrt(sum((grad * grad).sum() for grad in grads)) + 1e-12
                for grad in grads:
                    grad /= norm
            optimizer.step()
            mean.step()
        if watch.better(error(x[:held], y[:held])):
            watch.keep(100 - error(x_test, y_test))
    return [
        {"accuracy": s.kept, "epoch": s.epoch, "after": s.after, "ended": s.ended, "held": min(watch.errors)}
        for s in watch.stops
    ]


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    import torch  # late: listing the experiments needs no torch

    torch.set_num_threads(1)
    sets = _networks.sets("exact", settings, found)
    found.data += f" A fifth of the training rows ({HELD:.0%}) stops the training."
    most, draws = (12, 1) if settings.quick else (MOST, 3)
    chosen: dict[tuple[str, str], tuple[float, float]] = {}
    trials: list[dict[str, Any]] = []
    for name, arm in settings.track(((n, a) for n in sets for a in ARMS), "choosing for", ", ".join):
        draw_data, hidden = sets[name]
        data = [draw_data(TUNING + i) for i in range(draws)]

        def error(
            rate: float, margin: float, arm: str = arm, hidden: int = hidden, data: list[_networks.Data] = data
        ) -> float:
            return float(
                np.mean(
                    [
                        trained(one, arm, hidden, rate, margin, most, TUNING + i)[-1]["held"]
                        for i, one in enumerate(data)
                    ]
                )
            )

        rate, margin, row = RATE[0], MARGIN[0], {"data": name, "loss": arm}
        if arm == EXACT:
            margin, tried, _ = walk(lambda m: error(RATE[0], m), *MARGIN, 0.0)
            found.chosen(f"margin of {arm} on {name}", margin, tried)
            row |= {"margin": margin, "errors by margin": ", ".join(f"{at:.3g}: {e:.2f}" for at, e in tried.items())}
        rate, tried, _ = walk(functools.partial(error, margin=margin), *RATE, 0.0)
        found.chosen(f"rate of {arm} on {name}", rate, tried)
        trials.append(
            row | {"rate": rate, "errors by rate": ", ".join(f"{at:.3g}: {e:.2f}" for at, e in tried.items())}
        )
        chosen[name, arm] = rate, margin
    results: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
    for name, seed in settings.track(
        ((n, s) for n in sets for s in settings.seeds), "data and seed", lambda one: f"{one[0]}, {one[1]}"
    ):
        draw_data, hidden = sets[name]
        data = draw_data(seed)
        for arm in ARMS:
            results.setdefault((name, arm), []).append(trained(data, arm, hidden, *chosen[name, arm], most, seed))
    found.settings = {
        "network": _networks.network(sets),
        "optimiser": f"Adam, batches of {_networks.BATCH}; judged are the mean weights of about 10 steps",
        "a training is over": f"after {' or '.join(map(str, PATIENCES))} epochs without fewer held-out errors, at most {most} in all",
        "noise": "normal, of deviation 1, on each score",
        "margin": "a lead of the target over another class counts up to it, and has no gradient beyond",
        "normalised gradient": "that of all weights, divided by its Euclidean norm in each step, before Adam",
        "chosen by": f"the least held-out error, the mean of {draws} draws: the margin by steps of {MARGIN[1]:g} from {MARGIN[0]:g}, then "
                     f"the rate by steps of {RATE[1]:g} from {RATE[0]:g}, until neither neighbour is better",
    }  # fmt: skip
    _tell(found, list(sets), results, trials, most)


def _tell(
    found: Findings,
    names: list[str],
    results: dict[tuple[str, str], list[list[dict[str, Any]]]],
    trials: list[dict[str, Any]],
    most: int,
) -> None:
    for name in names:
        for i, patience in enumerate(PATIENCES):

            def of(arm: str, figure: str, name: str = name, i: int = i) -> list[float]:
                return [stops[i][figure] for stops in results[name, arm]]

            def less(other: str, of: Any = of) -> Interval:
                return difference(of(EXACT, "accuracy"), of(other, "accuracy"))

            found.table(f"{name}, patience {patience}", [
                {"loss": arm, **{figure: over_seeds(of(arm, figure)) for figure in ("accuracy", "epoch", "after")},
                 "− cross-entropy, points": None if arm == SOFTMAX else difference(of(arm, "accuracy"), of(SOFTMAX, "accuracy"))}
                for arm in ARMS
            ], "Per cent of the test rows. epoch: the best; after: the one at which the training was over.")  # fmt: skip
            for claim, other, bound in (("better", SOFTMAX, 0.0), ("remedies", BARE, 0.0), ("close", SOFTMAX, -1.0)):
                cut = sum(not ended for arm in (EXACT, other) for ended in of(arm, "ended"))
                edge = f"{cut} trainings were not over after {most} epochs" if cut else ""
                found.test(
                    claim,
                    f"{name}, patience {patience}: accuracy, {EXACT} less {other}",
                    less(other),
                    at_least=bound,
                    edge=edge,
                )
    found.table("Choosing", trials, "Mean held-out error in per cent at each value that was tried.")
    found.notes += [
        "EXACT also normalises the scores of a batch and lets the deviation of the noise fall. Both are left out here.",
        "A seed draws the rows, the first weights and the batches. All losses share them.",
    ]
    found.picture(
        lambda figure: draw(figure, names, results), (4.6 * len(names) + 2.0, 3.2), caption="Accuracy by loss and seed"
    )


def draw(figure: Any, names: list[str], results: dict[tuple[str, str], list[list[dict[str, Any]]]]) -> None:
    from anymax.plot.style import COLOURS  # late: an optional extra

    for ax, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for k, arm in enumerate(ARMS):
            shown = [stops[-1]["accuracy"] for stops in results[name, arm]]
            span = over_seeds(shown)
            half = span.high - span.mean if np.isfinite(span.high) else None
            ax.plot(shown, [k] * len(shown), ".", color=COLOURS[7], alpha=0.7)
            ax.errorbar(span.mean, k, xerr=half, fmt="o", color=COLOURS[k], capsize=3)
        ax.set(title=name, xlabel="test accuracy, per cent", yticks=range(len(ARMS)), yticklabels=ARMS)
        ax.invert_yaxis()
        ax.grid(axis="x", color="#E5E5E5", linewidth=0.6)


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
