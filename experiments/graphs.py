"""Graph attention: softmax, 1.5-entmax and sparsemax on graphs of which some edges are noise."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from . import _jobs
from ._common import Experiment, Settings, main, quick_on_one_thread, walk
from ._report import Claim, Findings
from ._statistics import Interval, difference, over_seeds

EXPERIMENT = Experiment(
    name="graphs",
    title="Graph attention with noisy edges: sparse maps against softmax",
    about="A graph network of two layers finds the classes of nodes; some edges join nodes of one class, the others any two classes.",
    claims={
        "clean": Claim("Where one edge in four is noise, sparse attention loses at most 1 point of accuracy to softmax", "asked here"),
        "noisy": Claim("Where two edges in three are noise, sparse attention is at least as accurate as softmax", "asked here"),
        "prunes": Claim("Sparse attention makes at least a tenth of the weights of edges exactly 0", "asked here"),
        "finds noise": Claim("It does so on noisy edges more often than on true ones, by 5 points or more", "asked here"),
    },
    seeds=10,
    needs=("matplotlib", "scipy", "torch"),
    options={"--jobs": _jobs.OPTION},
    free=("--jobs",),
)  # fmt: skip
MAPS = {"softmax": "softmax", "1.5-entmax": "entmax15", "sparsemax": "sparsemax"}
SPARSE = ("1.5-entmax", "sparsemax")
ALONE = "without edges"  # softmax on self-loops only: what the features say
CLASSES, FEATURES, TRUE = 4, 16, 6  # TRUE: edges of a node to its own class, on average
NOISE = (2, 6, 12)  # edges of a node to other classes: a quarter, a half and two thirds of all
TUNING = 10_000  # seeds from here on choose, and are never tested
RATE, DECAY = (0.02, 2.0), (1e-3, 4.0)  # where the search begins, and its step
TIE = 1e-3  # validation losses that differ by less are no reason to go on


def graph(seed: int, nodes: int, noise: float, signal: float = 0.6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [nodes, FEATURES], classes [nodes] and edges [2, edges], both ways, of a stochastic block model."""
    rng = np.random.default_rng([seed, nodes, int(noise)])
    y = rng.integers(CLASSES, size=nodes)
    centres = signal * rng.standard_normal((CLASSES, FEATURES))
    x = centres[y] + rng.standard_normal((nodes, FEATURES))
    same = y[:, None] == y
    p = np.where(same, TRUE * CLASSES / nodes, noise * CLASSES / ((CLASSES - 1) * nodes))
    i, j = np.nonzero(np.triu(rng.random((nodes, nodes)) < p, 1))
    return x.astype(np.float32), y, np.stack([np.concatenate([i, j]), np.concatenate([j, i])])


def network(mapping: str) -> Any:
    """Two layers of graph attention: 4 heads of 8 features, then one head for the classes."""
    import torch  # late: listing the experiments needs no torch

    from anymax import nn

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.GraphAttention(FEATURES, 8, 4, mapping)
            self.second = nn.GraphAttention(32, CLASSES, 1, mapping)
            self.drop = torch.nn.Dropout(0.3)

        def forward(self, x: Any, edges: Any) -> tuple[Any, list[Any]]:
            x, (_, first) = self.first(self.drop(x), edges, return_attention_weights=True)
            x = self.drop(torch.nn.functional.elu(x))
            x, (_, second) = self.second(x, edges, return_attention_weights=True)
            return x, [first, second]

    return Network()


def fit(name: str, seed: int, noise: float, rate: float, decay: float, plan: dict[str, Any]) -> dict[str, float]:
    """Figures at the epoch with the least validation loss. A quarter of the nodes train, a quarter validate, half test."""
    import torch  # late: listing the experiments needs no torch

    x, y, edges = (torch.as_tensor(a) for a in graph(seed, plan["nodes"], noise))
    edges = edges[:, :0] if name == ALONE else edges
    quarter = len(y) // 4
    train, valid, test = slice(quarter), slice(quarter, 2 * quarter), slice(2 * quarter, None)
    torch.manual_seed(seed)
    model = network(MAPS.get(name, "softmax"))
    optimiser = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay)
    best: dict[str, float] = {"loss": np.inf, "epoch": 0}
    for epoch in range(1, plan["epochs"] + 1):
        model.train()
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x, edges)[0][train], y[train]).backward()
        optimiser.step()
        if epoch % 4:
            continue
        model.eval()
        with torch.no_grad():
            out, weights = model(x, edges)
        loss = float(torch.nn.functional.cross_entropy(out[valid], y[valid]))
        if loss < best["loss"]:
            right = out[test].argmax(1) == y[test]
            best = {
                "loss": loss,
                "epoch": epoch,
                "accuracy": 100 * float(right.float().mean()),
                **_zeros(weights, y, edges),
            }
        elif epoch - best["epoch"] >= plan["patience"]:
            break
    return best


def _zeros(weights: list[Any], y: Any, edges: Any) -> dict[str, float]:
    """Shares of the weights that are exactly 0, in percent, over both layers and all heads; self-loops are not counted."""
    n = edges.shape[1]
    if not n:
        return {}
    true = y[edges[0]] == y[edges[1]]
    zero = [w[:n] == 0 for w in weights]
    return {
        "zeros": 100 * float(np.mean([float(z.float().mean()) for z in zero])),
        "zeros, true": 100 * float(np.mean([float(z[true].float().mean()) for z in zero])),
        "zeros, noise": 100 * float(np.mean([float(z[~true].float().mean()) for z in zero])),
        "removed": 100 * float(zero[0].all(1).float().mean()),
    }


def tuned(name: str, noise: float, plan: dict[str, Any]) -> dict[str, Any]:
    """The learning rate with the least validation loss on the graphs for tuning, then the weight decay at that rate."""

    def loss(rate: float, decay: float) -> float:
        seeds = range(TUNING, TUNING + plan["graphs for tuning"])
        return float(np.mean([fit(name, seed, noise, rate, decay, plan)["loss"] for seed in seeds]))

    rate, rates, inside = walk(lambda r: loss(r, DECAY[0]), *RATE, TIE)
    decay, decays, also = walk(lambda d: loss(rate, d), *DECAY, TIE)
    return {"rate": rate, "decay": decay, "rates": rates, "decays": decays, "inside": inside and also}


def cell(noise: float, name: str, seeds: list[int], plan: dict[str, Any]) -> tuple[Any, Any, float]:
    """What was chosen, the figures of each seed, and the seconds of a processor that it took."""
    begun = time.process_time()
    chosen = tuned(name, noise, plan)
    results = [fit(name, seed, noise, chosen["rate"], chosen["decay"], plan) for seed in seeds]
    return chosen, results, time.process_time() - begun


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    quick = settings.quick
    plan = {
        "nodes": 120 if quick else 400,
        "epochs": 12 if quick else 160,
        "patience": 8 if quick else 40,
        "graphs for tuning": 1 if quick else 3,
    }
    noises = NOISE[::2] if quick else NOISE
    names = (*MAPS, ALONE)
    found.data = "Graphs of a stochastic block model with four classes, drawn anew for each seed. No data is read."
    found.settings = {
        **plan,
        "classes": CLASSES, "features": FEATURES, "edges of a node to its class": TRUE, "to other classes": list(noises),
        "chosen by": "validation loss on graphs that are not tested: the learning rate, then the weight decay, each by steps of "
                     f"{RATE[1]:g} and {DECAY[1]:g} from {RATE[0]:g} and {DECAY[0]:g}, until neither neighbour is better by more "
                     f"than {TIE:g}",
    }  # fmt: skip
    cells = [(noise, name) for noise in noises for name in names]
    chosen, results, seconds = {}, {}, 0.0
    with _jobs.run_on(settings.options.jobs) as each:
        done = each(cell, [(*one, settings.seeds, plan) for one in cells])
        for key in settings.track(cells, "setting", lambda c: f"{c[1]}, {c[0]} noisy edges a node"):
            chosen[key], results[key], took = next(done)
            seconds += took

    def values(noise: int, name: str, figure: str) -> list[float]:
        return [one[figure] for one in results[noise, name]]

    def apart(noise: int, name: str) -> Interval:
        return difference(values(noise, name, "accuracy"), values(noise, "softmax", "accuracy"))

    rows: list[dict[str, Any]] = []
    for noise in noises:
        row: dict[str, Any] = {"noisy edges": _share(noise)}
        row |= {name: over_seeds(values(noise, name, "accuracy")) for name in names}
        rows.append(row | {f"{name} - softmax": apart(noise, name) for name in SPARSE})
    for (noise, name), one in chosen.items():
        for what in ("rate", "decay"):
            found.chosen(f"{what} of {name}, {_share(noise)} noise", one[what], one[f"{what}s"])
    found.table("Accuracy", rows, "Percent of the test nodes, mean over seeds; differences are paired by seed.")
    rows = [
        {
            "noisy edges": _share(noise), "map": name, "all edges": over_seeds(values(noise, name, "zeros")),
            "true edges": over_seeds(values(noise, name, "zeros, true")),
            "noisy edges only": over_seeds(values(noise, name, "zeros, noise")),
            "zero in all heads of layer 1": over_seeds(values(noise, name, "removed")),
        }
        for noise in noises for name in MAPS
    ]  # fmt: skip
    found.table(
        "Weights that are exactly 0", rows, "Percent of an edge's weights, over heads and both layers, mean over seeds."
    )
    rows = [
        {
            "noisy edges": _share(noise), "map": name, "learning rate": one["rate"], "weight decay": one["decay"],
            "both strictly inside of what was tried, and not bettered by a neighbour": "yes" if one["inside"] else "no",
            "losses by learning rate": _losses(one["rates"]), "by weight decay": _losses(one["decays"]),
        }
        for (noise, name), one in chosen.items()
    ]  # fmt: skip
    found.table(
        "What was chosen", rows, "Mean validation loss over the graphs for tuning, at each value that was tried."
    )
    for name in SPARSE:
        found.test(
            "clean", f"accuracy, {name} - softmax, {_share(noises[0])} noise", apart(noises[0], name), at_least=-1.0
        )
        found.test(
            "noisy", f"accuracy, {name} - softmax, {_share(noises[-1])} noise", apart(noises[-1], name), at_least=0.0
        )
        for noise in noises:
            what = f"{name}, {_share(noise)} noise"
            found.test(
                "prunes", f"weights of 0, percent: {what}", over_seeds(values(noise, name, "zeros")), at_least=10.0
            )
            both = [values(noise, name, f"zeros, {kind}") for kind in ("noise", "true")]
            found.test("finds noise", f"weights of 0, noisy - true edges: {what}", difference(*both), at_least=5.0)
    found.picture(lambda figure: draw(figure, results, noises), (9.5, 3.6),
                  caption="Accuracy, and the share of weights that are exactly 0, against the share of noisy edges")  # fmt: skip
    harm = "Where it is the most accurate, the graph does this network more harm than good"
    found.notes += [
        f"'{ALONE}' is the same network with self-loops alone. {harm}.",
        "There is one network and one kind of graph. The claims are about these, not about graphs in general.",
        f"All of it took {seconds / 60:.1f} minutes of one processor.",
    ]


def _share(noise: float) -> str:
    return f"{100 * noise / (noise + TRUE):.0f} %"


def _losses(tried: dict[float, float]) -> str:
    return ", ".join(f"{at:.3g}: {loss:.3f}" for at, loss in tried.items())


def draw(figure: Any, results: dict[Any, Any], noises: tuple[int, ...]) -> None:
    from anymax.plot.style import COLOURS, DASHES  # late: an optional extra

    left, right = figure.subplots(1, 2, sharex=True)
    shares = [100 * noise / (noise + TRUE) for noise in noises]

    def line(ax: Any, name: str, figure_: str, k: int, label: str, dash: Any) -> None:
        spans = [over_seeds([one[figure_] for one in results[noise, name]]) for noise in noises]
        ax.plot(
            shares, [s.mean for s in spans], color=COLOURS[k], linestyle=dash, marker="o", markersize=4, label=label
        )
        if spans[0].n > 1:
            ax.fill_between(
                shares, [s.low for s in spans], [s.high for s in spans], color=COLOURS[k], alpha=0.15, linewidth=0
            )

    for k, name in enumerate((*MAPS, ALONE)):
        line(left, name, "accuracy", k, name, DASHES[k])
    for k, name in enumerate(MAPS):
        if name in SPARSE:
            line(right, name, "zeros, noise", k, f"{name}, noisy edges", "-")
            line(right, name, "zeros, true", k, f"{name}, true edges", ":")
    left.set(title="accuracy in percent", xlabel="noisy edges in percent of all")
    right.set(title="weights of exactly 0 in percent", xlabel="noisy edges in percent of all", ylim=(0, 110))
    for ax in (left, right):
        ax.grid(color="#E5E5E5", linewidth=0.6)
    left.legend(frameon=False, fontsize="small")
    right.legend(frameon=False, fontsize="small", loc="upper left", ncols=2)


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
