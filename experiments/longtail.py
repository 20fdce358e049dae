"""A long tail: classes that are rare in training and as frequent as the others in the test, and what a prior does about it."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import anymax
from anymax import transforms

from . import _images
from ._common import Experiment, Settings, main, quick_on_one_thread, walk
from ._report import Claim, Findings
from ._statistics import Interval, difference, over_seeds

LATER = "written after a run that had tuned the strength"
MENON = "Menon et al. 2021 (arXiv 2007.07314)"
EXPERIMENT = Experiment(
    name="longtail",
    title="A long tail: priors, class weights and neither, for softmax and 1.5-entmax",
    about="Fashion-MNIST with classes of 5,000 down to 50 training images: which remedy gives the best balanced accuracy?",
    claims={
        "post hoc": Claim("Subtracting the log prior from the scores after training raises the balanced accuracy of softmax", MENON),
        "trained": Claim("Training with the log prior added to the scores raises it more than that", MENON),
        "weights": Claim("Both raise it more than class weights in the loss do", MENON),
        "entmax": Claim("A prior in training raises the balanced accuracy of 1.5-entmax too", "asked here"),
        "as softmax": Claim("1.5-entmax trained with a prior is as accurate as softmax trained with one, within a point", "asked here"),
        "fits": Claim(
            "At the strength that fits 1.5-entmax, untuned, a prior raises its balanced accuracy, in training and after it", "asked here",
            notes=(LATER,),
        ),
        "near": Claim("That strength is at most a point worse than the tuned one, in training and after it", "asked here", notes=(LATER,)),
        "one": Claim(
            "At strength 1, which fits softmax, a prior lowers the balanced accuracy of 1.5-entmax, in training and after it", "asked here",
            notes=(LATER,),
        ),
    },
    seeds=10,
    needs=("matplotlib", "scipy", "sklearn", "torch"),
    options={"--fashion-mnist": _images.OPTION},
    free=("--fashion-mnist",),
)  # fmt: skip
# the largest class over the smallest, its images, and those of a class that choose
RATIO, MOST, HELD = 100.0, 5000, 500
TUNING = 10_000  # seeds from here on choose, and are never tested
LENGTHS = (10, 60)  # epochs, with their own rates and strengths; a claim must hold at each
# where the searches begin, and their steps; points of balanced error
RATE, STRENGTH, TIE = (1e-3, 3.0), (1.0, 2**0.5), 0.1
# balanced accuracy of softmax on CIFAR-10-LT of the same ratio, from the README of the authors' program
PUBLISHED = {"bare": 71.36, "post hoc": 77.32, "trained": 77.89}

Rows = tuple[np.ndarray, np.ndarray]
Strength = float | str  # a map's name: the strength that fits it
Scores = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to train and to predict: its loss, and where the strength of the prior or of the weights comes in."""

    loss: str  # softmax or entmax15
    strength: str = ""  # of what: "prior" or "weights" in training, "after" it; nothing where there is none
    fixed: Strength | None = None  # a strength that is not tuned; the rate is that of the bare map then


ARMS = {
    "softmax": Arm("softmax"),
    "softmax, prior after training": Arm("softmax", "after"),
    "softmax, prior in training": Arm("softmax", "prior"),
    "softmax, class weights": Arm("softmax", "weights"),
    "1.5-entmax": Arm("entmax15"),
    "1.5-entmax, prior after training": Arm("entmax15", "after"),
    "1.5-entmax, prior in training": Arm("entmax15", "prior"),
    "1.5-entmax, prior after training, strength of the map": Arm("entmax15", "after", "entmax15"),
    "1.5-entmax, prior in training, strength of the map": Arm("entmax15", "prior", "entmax15"),
    "1.5-entmax, prior after training, strength 1": Arm("entmax15", "after", 1.0),
    "1.5-entmax, prior in training, strength 1": Arm("entmax15", "prior", 1.0),
}
BARE = {"softmax": "softmax", "entmax15": "1.5-entmax"}


@dataclasses.dataclass(frozen=True)
class Task:
    """Rows to train on, with a long tail, and balanced rows that choose and that test; log_p: of the classes in training."""

    train: Rows
    held: Rows
    test: Rows
    log_p: np.ndarray


def long_tail(pool: Rows, test: Rows, most: int, held: int, seed: int) -> Task:
    """Class of rank r keeps `most * RATIO^(-r / (classes - 1))` rows; `seed` draws the ranks and the rows."""
    x, y = pool
    rng = np.random.default_rng([seed, 77])
    classes = int(y.max()) + 1
    counts = np.round(most * RATIO ** (-np.arange(classes) / (classes - 1))).astype(int)
    rank = rng.permutation(classes)
    train, chooses = [], []
    for c in range(classes):
        rows = rng.permutation(np.flatnonzero(y == c))
        chooses.append(rows[:held])
        train.append(rows[held : held + counts[rank[c]]])
    share = np.array([len(rows) for rows in train], float)
    kept, held_rows = np.concatenate(train), np.concatenate(chooses)
    return Task((x[kept], y[kept]), (x[held_rows], y[held_rows]), test, np.log(share / share.sum()))


def trained(arm: Arm, task: Task, rate: float, strength: Strength, plan: dict[str, int], seed: int) -> Scores:
    """A network with one hidden layer, by Adam with a rate that falls to 0 as a cosine. Returns x -> scores."""
    import torch  # late: listing the experiments needs no torch

    x, y = (torch.from_numpy(a) for a in task.train)
    log_p = torch.from_numpy(task.log_p.astype(np.float32))
    weight = None
    if arm.strength == "weights":
        assert isinstance(strength, float)
        weight = torch.exp(-strength * log_p)
        weight = weight / weight[y].mean()
    move = transforms.prior(log_p=log_p, strength=strength) if arm.strength == "prior" else lambda z: z
    shuffle = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], plan["hidden"]), torch.nn.ReLU(), torch.nn.Linear(plan["hidden"], len(log_p))
        )
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    steps = plan["epochs"] * math.ceil(len(y) / plan["batch"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))
    for _ in range(plan["epochs"]):
        for batch in torch.randperm(len(y), generator=shuffle).split(plan["batch"]):
            optimiser.zero_grad()
            z = move(model(x[batch]))
            if weight is None:
                loss = anymax.fenchel_young(arm.loss, z, y[batch])
            else:
                loss = (weight[y[batch]] * anymax.cross_entropy(z, y[batch], reduction="none")).mean()
            loss.backward()
            optimiser.step()
            schedule.step()

    def scores(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(x)).double().numpy()

    return scores


def recalls(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The share of each class's rows that are found, in per cent; their mean is the balanced accuracy."""
    right = z.argmax(axis=1) == y
    return 100.0 * np.bincount(y, right, z.shape[1]) / np.bincount(y, minlength=z.shape[1])


def predicted(arm: Arm, scores: np.ndarray, task: Task, strength: Strength) -> np.ndarray:
    return transforms.prior(log_p=-task.log_p, strength=strength)(scores) if arm.strength == "after" else scores


def chosen(
    name: str, tasks: list[Task], plan: dict[str, int], rate: float, note: Callable[..., None]
) -> tuple[float, float]:
    """The strength at this rate, then the rate at that strength, with the least balanced error on the rows that choose."""
    arm = ARMS[name]
    kept: dict[tuple[float, float], list[Scores]] = {}

    def error(rate: float, strength: float) -> float:
        key = (rate, 0.0 if arm.strength == "after" else strength)  # what is done after training needs no other network
        if key not in kept:
            kept[key] = [trained(arm, task, *key, plan, TUNING + i) for i, task in enumerate(tasks)]
        each = [
            recalls(predicted(arm, net(task.held[0]), task, strength), task.held[1])
            for net, task in zip(kept[key], tasks)
        ]
        return 100.0 - float(np.mean(each))

    strength = 0.0
    if arm.strength:
        strength, strengths, _ = walk(lambda s: error(rate, s), *STRENGTH, TIE)
        note("strength", strength, strengths)
    if arm.strength != "after":
        rate, rates, _ = walk(lambda r: error(r, strength), rate, RATE[1], TIE)
        note("rate", rate, rates)
    return rate, strength


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    import torch  # late: listing the experiments needs no torch

    torch.set_num_threads(1)
    if settings.quick:
        plan, lengths = {"hidden": 16, "batch": 64}, (2, 4)
        pool, test = digits()
        most, held, tunings = 100, 20, 1
        found.data = "The digits of scikit-learn (UCI) with a long tail, not Fashion-MNIST."
    else:
        plan, lengths = {"hidden": 128, "batch": 256}, LENGTHS
        x, y, *rest = _images.fashion("longtail", settings.options.fashion_mnist)
        pool, test = (x, y), (rest[0], rest[1])
        most, held, tunings = MOST, HELD, 2
        found.data = (
            "Fashion-MNIST (Xiao, Rasul and Vollgraf 2017): of ten classes the one of rank r keeps 5,000 x 100^(-r/9) training images, "
            "from 5,000 to 50. The test set is balanced, 1,000 images a class. Which class has which rank is drawn anew for each seed."
        )
    tuning = [long_tail(pool, test, most, held, TUNING + i) for i in range(tunings)]
    tasks = [long_tail(pool, test, most, held, seed) for seed in settings.seeds]
    rows: list[dict[str, Any]] = []
    results = {}
    for epochs in lengths:
        own = {**plan, "epochs": epochs}
        best = _best(settings, found, tuning, own, rows)
        results[epochs] = _of_seeds(settings, tasks, own, best)
    found.settings = {
        **plan, "epochs": lengths, "ratio": RATIO, "images of a class that choose": held, "data sets that choose": tunings,
        "network": "one hidden layer, ReLU; pixels from 0 to 1",
        "optimiser": "Adam, the rate falls to 0 as a cosine; no weight decay",
        "strength": "what the log prior is multiplied by; of the weights, the power of 1 / frequency",
        "strength of the map": "`prior(log_p, strength=mapping)`: 10^(1 - alpha) for alpha-entmax of ten classes, 0.316 for 1.5-entmax; "
                               "not tuned, at the rate of the bare map, as strength 1",
        "chosen by": f"for each length of training, balanced error: the strength by steps of {STRENGTH[1]:.3g} from {STRENGTH[0]:g} (at "
                     f"the rate of the bare map), then the rate by steps of {RATE[1]:g} from there, of the bare maps from {RATE[0]:g}, "
                     f"until neither neighbour is better by more than {TIE:g} points",
    }  # fmt: skip
    _tell(found, results, rows)


def _best(
    settings: Settings, found: Findings, tuning: list[Task], plan: dict[str, int], rows: list[dict[str, Any]]
) -> dict[str, tuple[float, Strength]]:
    """The rate and the strength of each way; what was tried goes into `rows`."""
    best: dict[str, tuple[float, Strength]] = {}
    for name in settings.track(ARMS, f"{plan['epochs']} epochs, choosing"):
        row: dict[str, Any] = {"epochs": plan["epochs"], "way": name}

        def note(what: str, value: float, tried: dict[float, float], row: dict[str, Any] = row) -> None:
            row |= {
                what: value,
                f"errors by {what}": ", ".join(f"{at:.3g}: {error:.2f}" for at, error in tried.items()),
            }
            found.chosen(f"{what} of {row['way']}, {plan['epochs']} epochs", value, tried)

        arm = ARMS[name]
        first = best[BARE[arm.loss]][0] if arm.strength else RATE[0]
        if arm.fixed is not None:
            best[name] = first, arm.fixed
            continue
        best[name] = chosen(name, tuning, plan, first, note)
        rows.append(row)
    return best


def _of_seeds(
    settings: Settings, tasks: list[Task], plan: dict[str, int], best: dict[str, tuple[float, Strength]]
) -> dict[str, list[dict[str, float]]]:
    """The recalls of each way, one a seed."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for seed, task in settings.track(
        list(zip(settings.seeds, tasks)), f"{plan['epochs']} epochs, seed", lambda one: one[0]
    ):
        order = np.argsort(-task.log_p, kind="stable")
        nets: dict[str, Scores] = {}
        for name, arm in ARMS.items():
            rate, strength = best[name]
            bare = BARE[arm.loss]
            nets[name] = nets[bare] if arm.strength == "after" else trained(arm, task, rate, strength, plan, seed)
            each = recalls(predicted(arm, nets[name](task.test[0]), task, strength), task.test[1])[order]
            third = len(each) // 3
            results[name].append({
                "all": float(each.mean()), "head": float(each[:third].mean()), "middle": float(each[third:-third].mean()),
                "tail": float(each[-third:].mean()),
            })  # fmt: skip
        settings.say(", ".join(f"{name} {of[-1]['all']:.1f}" for name, of in results.items()))
    return results


def digits() -> tuple[Rows, Rows]:
    from sklearn.datasets import load_digits  # late: an optional extra

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    return (x[:1300], y[:1300]), (x[1300:], y[1300:])


def _tell(found: Findings, lengths: dict[int, dict[str, list[dict[str, float]]]], rows: list[dict[str, Any]]) -> None:
    names = {"all": "all classes", "head": "three largest", "middle": "four between", "tail": "three smallest"}
    after, within, weights = (
        f"softmax, {way}" for way in ("prior after training", "prior in training", "class weights")
    )
    for epochs, results in lengths.items():

        def apart(name: str, other: str, results: dict[str, list[dict[str, float]]] = results) -> Interval:
            return difference(*([one["all"] for one in results[way]] for way in (name, other)))

        found.table(
            f"Balanced accuracy after {epochs} epochs",
            [
                {"way": way, **{title: over_seeds([one[part] for one in of]) for part, title in names.items()}}
                for way, of in results.items()
            ],
            "The mean recall of the classes in per cent, and that of the classes with the most and the fewest training images, over seeds.",
        )  # fmt: skip
        gain = f"balanced accuracy, points, {epochs} epochs: "
        found.test("post hoc", f"{gain}{after} - softmax", apart(after, "softmax"), at_least=0.0)
        found.test("trained", f"{gain}{within} - {after}", apart(within, after), at_least=0.0)
        for name in (after, within):
            found.test("weights", f"{gain}{name} - {weights}", apart(name, weights), at_least=0.0)
        sparse = "1.5-entmax, prior in training"
        found.test("entmax", f"{gain}{sparse} - 1.5-entmax", apart(sparse, "1.5-entmax"), at_least=0.0)
        found.test("as softmax", f"{gain}{sparse} - {within}", apart(sparse, within), at_least=-1.0)
        for way in ("prior after training", "prior in training"):
            tuned = f"1.5-entmax, {way}"
            fits, one = f"{tuned}, strength of the map", f"{tuned}, strength 1"
            found.test("fits", f"{gain}{fits} - 1.5-entmax", apart(fits, "1.5-entmax"), at_least=0.0)
            found.test("near", f"{gain}{fits} - {tuned}", apart(fits, tuned), at_least=-1.0)
            found.test("one", f"{gain}{one} - 1.5-entmax", apart(one, "1.5-entmax"), at_most=0.0)
        for name, key in ((after, "post hoc"), (within, "trained")):
            found.against_paper(
                f"gain of {name}, points, {epochs} epochs",
                PUBLISHED[key] - PUBLISHED["bare"],
                apart(name, "softmax"),
                "there CIFAR-10-LT and a ResNet",
            )
    found.table(
        "What was chosen",
        rows,
        "Mean balanced error in per cent on the rows that choose, at each value that was tried.",
    )
    found.picture(
        lambda figure: draw(figure, lengths[max(lengths)]),
        (10.0, 4.8),
        caption=f"Recall of the classes, by the number of their training images, after {max(lengths)} epochs",
    )
    found.notes += [
        "On CIFAR-10-LT with the same ratio, the authors' program (google-research/logit_adjustment) reaches {bare:g} without a prior, "
        "{post hoc:g} with a prior after training, and {trained:g} with a prior in training.".format(**PUBLISHED),
        "A seed draws the ranks of the classes, the training images, the first weights and the batches. All methods share them.",
        "The rows that choose the settings are balanced, for all methods. In practice they would have a long tail too.",
        "Each claim is judged at both lengths of training, each with its own rates and strengths, and must hold at both.",
    ]


def draw(figure: Any, results: dict[str, list[dict[str, float]]]) -> None:
    from anymax.plot.style import COLOURS  # late: an optional extra

    parts = {"all": "all classes", "head": "three largest", "middle": "four between", "tail": "three smallest"}
    panels = figure.subplots(1, len(parts), sharey=True, sharex=True)
    for ax, (part, title) in zip(panels, parts.items()):
        for i, (way, of) in enumerate(results.items()):
            span = over_seeds([one[part] for one in of])
            ax.errorbar(
                span.mean, i, xerr=[[span.mean - span.low], [span.high - span.mean]], fmt="so"[way.startswith("softmax")],
                markersize=5, capsize=2, color=COLOURS[0 if way.startswith("softmax") else 1],
            )  # fmt: skip
        ax.set(title=title, yticks=range(len(results)), yticklabels=list(results))
        ax.grid(color="#E5E5E5", linewidth=0.6)
    panels[0].invert_yaxis()
    figure.supxlabel("mean recall, per cent", fontsize="medium")


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
