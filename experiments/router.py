"""Routers: small mixtures of experts with six ways to choose and to balance: accuracy, loads, experts that nobody asks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from . import _networks
from ._common import Experiment, Settings, main, quick_on_one_thread
from ._report import Claim, Findings
from ._statistics import difference, over_seeds, ratio

SU, WANG = "Su 2026, kexue.fm (balance by quantiles)", "Wang et al. 2024 (arXiv 2408.15664)"
AGAIN = (
    "run again on whole batches: before, the last batch of an epoch, with three rows, had set the bias by quantiles",
)
BANKING = {f"text/banking77_{part}.csv.gz": "Banking77 (Casanueva et al. 2020)" for part in ("train", "test")}
EXPERIMENT = Experiment(
    name="router",
    title="Routers: who evens out the loads of experts, and what does it cost?",
    about="Mixtures of 16 small experts on digits and sentences: three maps, balanced by a loss, a sign rule or quantiles, or not.",
    claims={
        "loads": Claim(
            "Balanced by quantiles, the error of the loads on test rows is at most half of that with the sign rule", SU, notes=AGAIN
        ),
        "loss loads": Claim("It is smaller than with the balancing loss too", SU, notes=AGAIN),
        "dead": Claim("Unbalanced, a softmax router leaves at least one expert in ten nearly without work", "asked here"),
        "alive": Claim("Balanced by quantiles, it is less than one in a hundred", "asked here", notes=AGAIN),
        "accurate": Claim(
            "Balanced by quantiles, a router is as accurate as with the balancing loss (within a point)", WANG, notes=AGAIN
        ),
        "sparse": Claim("A 1.5-entmax router with any number of experts takes fewer than two a row", "asked here"),
        "sparse accurate": Claim("It is at most a point less accurate than two experts by softmax, unbalanced", "asked here"),
    },
    seeds=10,
    quick_seeds=2,
    data=BANKING,
    needs=("matplotlib", "scipy", "sklearn", "torch"),
)  # fmt: skip
EXPERTS, K, HIDDEN, FEATURES = 16, 2, 16, 100
LENGTHS = {"digits": (60, 240), "Banking77": (20, 80)}  # epochs, at each of which a claim must hold
# Switch's weight of its loss; ten times DeepSeek-V3's step, as training is so much shorter
LOSS_WEIGHT, SIGN_STEP = 0.01, 0.01
NEARLY = 0.1  # an expert with less than this part of the mean load has nearly no work


@dataclasses.dataclass(frozen=True)
class Arm:
    """How experts are chosen, and how their loads are evened out."""

    scoring: str
    balance: str = ""  # "loss", "sign" or "quantile"
    any_number: bool = False  # all experts with a weight above 0, in place of the two with the largest


SOFTMAX, LOSS, SIGN, QUANTILE, SPARSE, SPARSE_QUANTILE = ARMS = {
    "softmax, two, unbalanced": Arm("softmax"),
    "softmax, two, balancing loss": Arm("softmax", "loss"),
    "sigmoid, two, sign rule": Arm("sigmoid", "sign"),
    "sigmoid, two, quantiles": Arm("sigmoid", "quantile"),
    "1.5-entmax, any number, unbalanced": Arm("entmax15", any_number=True),
    "1.5-entmax, two, quantiles": Arm("entmax15", "quantile"),
}


def trained(data: _networks.Data, name: str, lengths: tuple[int, ...], seed: int) -> list[dict[str, float]]:
    """The figures of one mixture on the test rows after each of `lengths` epochs, whose router has the bias of the last step."""
    import torch  # late: listing the experiments needs no torch

    import anymax
    from anymax import routing

    arm = ARMS[name]
    x, y, x_test, y_test = (torch.from_numpy(np.asarray(a)) for a in data)
    shuffle = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        gate = torch.nn.Linear(x.shape[1], EXPERTS)
        first = torch.nn.Parameter(torch.randn(EXPERTS, x.shape[1], HIDDEN) * (2.0 / x.shape[1]) ** 0.5)
        second = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, int(y.max()) + 1) * (1.0 / HIDDEN) ** 0.5)
    optimizer = torch.optim.Adam([*gate.parameters(), first, second], lr=_networks.RATE)
    bias = torch.zeros(EXPERTS)

    def weights(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight of each expert in each row, mostly 0, and the experts that were chosen."""
        if arm.any_number:
            return anymax.apply(arm.scoring, scores), None
        routes = routing.route(scores, K, arm.scoring, bias=bias, norm_topk_prob=True)
        held = routes.index.clamp(min=0)  # -1 has the weight 0
        return torch.zeros_like(scores).scatter_add(1, held, routes.weight), routes.index

    def forward(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        scores = gate(rows)
        weight, index = weights(scores)
        hidden = torch.relu(torch.einsum("rf,efh->reh", rows, first)) * weight[..., None]
        return torch.einsum("reh,ehc->rc", hidden, second), scores, weight, index

    def figures() -> dict[str, float]:
        with torch.no_grad():
            z, _, weight, _ = forward(x_test)
        load = (weight > 0).double().mean(0).numpy()
        return {
            "accuracy": 100 * float((z.argmax(1) == y_test).double().mean()),
            "load error": 100 * float(load.max() / load.mean() - 1.0),
            "nearly without work": 100 * float((load < NEARLY * load.mean()).mean()),
            "experts a row": float(load.sum()),
        }

    out = []
    whole = len(x) // _networks.BATCH * _networks.BATCH
    for epoch in range(1, lengths[-1] + 1):
        # whole batches alone: the quantiles of three rows would be the bias that is judged
        for batch in torch.randperm(len(x), generator=shuffle)[:whole].split(_networks.BATCH):
            optimizer.zero_grad()
            z, scores, _, index = forward(x[batch])
            loss = torch.nn.functional.cross_entropy(z, y[batch])
            if arm.balance == "loss":
                loss = loss + LOSS_WEIGHT * routing.load_balancing_loss(scores, index, arm.scoring)
            loss.backward()
            optimizer.step()
            if arm.balance in ("sign", "quantile"):
                step = {"step": SIGN_STEP} if arm.balance == "sign" else {}
                bias = routing.balance(scores.detach(), K, bias=bias, scoring=arm.scoring, method=arm.balance, **step)
        if epoch in lengths:
            out.append(figures())
    return out


def text(settings: Settings) -> _networks.Data:
    """Banking77 as tf-idf of words and pairs of words, in the directions of the largest spread, each of spread 1."""
    from sklearn.decomposition import TruncatedSVD  # late: an optional extra
    from sklearn.feature_extraction.text import TfidfVectorizer

    from ._sentences import banking  # late: it needs torch

    task = banking(*(settings.data(path) for path in BANKING), list)
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2)
    reduced = TruncatedSVD(FEATURES, random_state=0)
    x = reduced.fit_transform(words.fit_transform(task.train.tokens))
    spread = x.std(axis=0)
    x_test = reduced.transform(words.transform(task.test.tokens))
    return (x / spread).astype(np.float32), task.train.classes, (x_test / spread).astype(np.float32), task.test.classes


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    quick = settings.quick
    sets: dict[str, Callable[[int], _networks.Data]] = {"digits": _networks.digits}
    lengths = {"digits": (2, 4)} if quick else LENGTHS
    found.data = f"{_networks.DIGITS}: of 1,797 rows 1,000 drawn to train, the others to test."
    if not quick:
        sentences = text(settings)
        sets["Banking77"] = lambda _: sentences
        found.data += f" Banking77 (Casanueva et al. 2020), all rows: tf-idf of words and pairs of words in {FEATURES} directions."
    results: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    jobs = [(name, seed) for name in sets for seed in settings.seeds]
    for name, seed in settings.track(jobs, "data and seed", lambda job: f"{job[0]}, {job[1]}"):
        data = sets[name](seed)
        for arm in ARMS:
            for epochs, one in zip(lengths[name], trained(data, arm, lengths[name], seed), strict=True):
                results.setdefault((name, epochs, arm), []).append(one)
    found.settings = {
        "experts": f"{EXPERTS}, each with {HIDDEN} hidden units (ReLU); the weights of the two chosen sum to 1",
        "epochs": ", ".join(f"{name}: {' and '.join(map(str, lengths[name]))}" for name in sets),
        "optimizer": _networks.SETTINGS["optimizer"],
        "balancing loss": f"Switch's, times {LOSS_WEIGHT:g}",
        "sign rule": f"steps of {SIGN_STEP:g}, after each batch",
        "quantiles": "after each batch, on its scores; the rows of an epoch that fill no batch are left out, for all routers",
        "sentences": "1 + log of the count, in two training sentences or more; each direction is divided by its spread",
        "weights at first": "of an expert normal, with variances of 2 / features and 1 / hidden units; the router those of torch",
        "load": "how many rows have the expert at a weight above 0",
    }
    _tell(found, results, {name: lengths[name] for name in sets})


def _tell(
    found: Findings, results: dict[tuple[str, int, str], list[dict[str, float]]], lengths: dict[str, tuple[int, ...]]
) -> None:
    def of(when: tuple[str, int], arm: str, figure: str) -> list[float]:
        return [one[figure] for one in results[(*when, arm)]]

    figures = ("accuracy", "load error", "nearly without work", "experts a row")
    for when in ((name, epochs) for name, all_ in lengths.items() for epochs in all_):
        name = f"{when[0]}, {when[1]} epochs"
        found.table(name, [
            {"router": arm, **{figure: over_seeds(of(when, arm, figure)) for figure in figures}} for arm in ARMS
        ], "On test rows: accuracy in per cent; the load error is how far the largest load is above the mean, in per cent of the mean; "
           f"experts with less than {NEARLY:.0%} of the mean load, in per cent.")  # fmt: skip
        for claim, other, most in (("loads", SIGN, 0.5), ("loss loads", LOSS, 1.0)):
            both = ratio(of(when, QUANTILE, "load error"), of(when, other, "load error"))
            found.test(claim, f"{name}: load error, {QUANTILE} / {other}", both, at_most=most)
        found.test(
            "dead",
            f"{name}: per cent nearly without work, {SOFTMAX}",
            over_seeds(of(when, SOFTMAX, "nearly without work")),
            at_least=10.0,
        )
        found.test(
            "alive",
            f"{name}: per cent nearly without work, {QUANTILE}",
            over_seeds(of(when, QUANTILE, "nearly without work")),
            at_most=1.0,
        )
        both = difference(of(when, QUANTILE, "accuracy"), of(when, LOSS, "accuracy"))
        found.test("accurate", f"{name}: accuracy, {QUANTILE} less {LOSS}", both, at_least=-1.0)
        found.test("accurate", f"{name}: accuracy, {QUANTILE} less {LOSS}", both, at_most=1.0)
        found.test(
            "sparse", f"{name}: experts a row, {SPARSE}", over_seeds(of(when, SPARSE, "experts a row")), at_most=2.0
        )
        both = difference(of(when, SPARSE, "accuracy"), of(when, SOFTMAX, "accuracy"))
        found.test("sparse accurate", f"{name}: accuracy, {SPARSE} less {SOFTMAX}", both, at_least=-1.0)
    found.notes.append(
        "All routers have the same experts, first weights, batches and learning rate. Nothing is tuned for any of them. Each claim is "
        "judged at two lengths of training and must hold at both."
    )
    found.picture(
        lambda figure: draw(figure, of, [(name, all_[-1]) for name, all_ in lengths.items()]),
        (4.6 * len(lengths) + 3.0, 4.0),
        caption="Accuracy against the error of the loads, on test rows",
    )


def draw(figure: Any, of: Callable[..., list[float]], cases: list[tuple[str, int]]) -> None:
    from anymax.plot.style import COLOURS  # late: an optional extra

    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for ax, case in zip(panels, cases, strict=True):
        for k, arm in enumerate(ARMS):
            x, y = (over_seeds(of(case, arm, what)) for what in ("load error", "accuracy"))
            ax.errorbar(x.mean, y.mean, xerr=[[x.mean - x.low], [x.high - x.mean]], yerr=[[y.mean - y.low], [y.high - y.mean]],
                        fmt="o", color=COLOURS[k % len(COLOURS)], capsize=2, label=arm)  # fmt: skip
        ax.set(title=f"{case[0]}, {case[1]} epochs", xlabel="load error, per cent of the mean load")
        ax.grid(color="#E5E5E5", linewidth=0.6)
    panels[0].set_ylabel("accuracy, per cent")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
