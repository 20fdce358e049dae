"""What is said of attention without a figure: Taylor's polynomial for exp, priors over the keys, the scale with the most gradient."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import numpy as np

import anymax
from anymax import attention, transforms

from ._common import Experiment, Settings, main, quick_on_one_thread, walk
from ._report import Claim, Findings
from ._statistics import Interval, difference, interval, over_seeds

SU, WIND = "Su 2024, kexue.fm/archives/10145", "allenwind.github.io/blog/15110"
BASED, AFTER_SU = "Arora et al. 2024 (arXiv 2402.18668)", "after Su 2023, named in kexue.fm/archives/10145"
EXPERIMENT = Experiment(
    name="attending",
    title="Statements on attention: Taylor's polynomial, priors over the keys, the scale with the most gradient",
    about="One layer of attention looks up values by their keys, exact and noisy; and the gradient of softmax on random scores.",
    claims={
        "few": Claim("Among 16 keys Taylor attention recalls as accurately as softmax attention (at most a point less)", SU),
        "many": Claim("Among 256 keys, more than its 153 features, it recalls less accurately than softmax attention, by 5 points", BASED),
        "wider": Claim("With 561 features it recalls more accurately among 256 keys than with 153, by 5 points", BASED),
        "prior": Claim(
            "A prior over the keys makes attention more accurate, whether it is added to the scores, scales them or is mixed in after", WIND
        ),
        "added": Claim("A log prior added to the scores makes it more accurate than a prior that scales or is mixed in", "asked here"),
        "sparse": Claim("1.5-entmax attention gains as much from an added prior as softmax (at most a point less)", "asked here"),
        "misled": Claim("Where the prior says nothing of the answers, one mixed in costs less accuracy than one added", "asked here"),
        "cost": Claim(
            "Where the prior says nothing of the answers, one added makes attention less accurate than none", "asked here",
            notes=("written after the figures",),
        ),
        "grows": Claim("The scale with the most gradient of a row grows with n as a power of log n between 0.4 and 0.6", AFTER_SU),
        "half": Claim(
            "Scores of variance 1, as 1/sqrt(d) gives, have on average at most half of the gradient of the best scale", AFTER_SU
        ),
        "vanishes": Claim("At four times sqrt(2 log n), near one-hot, softmax has at most half of that gradient, on average", SU),
        "faster": Claim(
            "Attention whose scores start with a deviation of sqrt(2 log n) recalls more, after a short training, than with 1", AFTER_SU
        ),
        "one-hot": Claim("Attention that starts near one-hot, with ten times sqrt(2 log n), recalls less than with a deviation of 1", SU),
    },
    seeds=10,
    lengths="Each network was trained for one length only, of 300 to 1,000 steps; "
            "it is not shown that the held-out loss had stopped by then, and a verdict may turn with the length.",
    needs=("matplotlib", "scipy", "torch"),
)  # fmt: skip
TUNING = 10_000  # seeds from here on choose, and are never tested
RATE, TIE = (1e-2, 3.0), 0.5  # where the search begins, and its step; points of accuracy
KEYS, VALUES, WIDTH = 512, 64, 32  # of exact recall: how many there are, and the width of a value
BATCH, QUERIES = 32, 16  # contexts in a batch, and queries of each
# of noisy recall; SPREAD: of the log prior before it is normalised
NOISY_KEYS, FEATURES, NOISE, SPREAD = 16, 8, 1.0, 1.5
SIZES = (16, 64, 256, 1024, 4096)
ASKED = (16, 256, 4096)
STEP = 2 ** (1 / 16)  # between scales
SOFTMAX, TAYLOR, WIDE = "softmax, 16 features", "Taylor, 16 features", "Taylor, 32 features"


# -- exact recall -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Exact:
    """A context of `keys` different keys with values; each query is a key, and its value is asked for.

    The keys and queries begin as normal vectors, so that the scores begin with the variance `scale`^2.
    """

    mapping: str
    keys: int
    features: int
    scale: float = 1.0

    def batch(self, rng: np.random.Generator, rows: int) -> tuple[tuple[Any, ...], Any]:
        keys = rng.random((rows, KEYS)).argsort(1)[:, : self.keys]
        values = rng.integers(VALUES, size=(rows, self.keys))
        at, row = rng.integers(self.keys, size=(rows, QUERIES)), np.arange(rows)[:, None]
        return (keys, values, keys[row, at]), values[row, at]

    def network(self) -> Any:
        import torch  # late: listing the experiments needs no torch

        task = self

        class Network(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.query, self.key = (torch.nn.Parameter(torch.randn(KEYS, task.features)) for _ in range(2))
                self.value = torch.nn.Parameter(torch.randn(VALUES, WIDTH))
                self.out = torch.nn.Linear(WIDTH, VALUES)

            def forward(self, keys: torch.Tensor, values: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
                q, k, v = (a[:, None] for a in (self.query[asked], self.key[keys], self.value[values]))
                return self.out(attention(q, k, v, task.mapping, scale=task.scale / task.features**0.5)[:, 0])

        return Network()


# -- noisy recall -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Noisy:
    """Keys are vectors of one length, a query is one of them with noise, drawn by a prior that is told; another one for each context.

    way: how the prior comes in: not at all, "added", "scaled" or "mixed", each with a strength that is learned. even: all keys are as
    likely, whatever the prior says.
    """

    mapping: str
    way: str = ""
    even: bool = False

    def batch(self, rng: np.random.Generator, rows: int) -> tuple[tuple[Any, ...], Any]:
        keys = rng.normal(size=(rows, NOISY_KEYS, FEATURES))
        keys *= FEATURES**0.5 / np.linalg.norm(keys, axis=-1, keepdims=True)
        values = rng.integers(VALUES, size=(rows, NOISY_KEYS))
        log_p = SPREAD * rng.normal(size=(rows, NOISY_KEYS))
        log_p -= anymax.logsumexp(log_p)[:, None]
        drawn = rng.random((rows, QUERIES, 1))
        up_to = np.arange(1, NOISY_KEYS) / NOISY_KEYS if self.even else np.exp(log_p).cumsum(1)[:, None, :-1]
        at, row = (drawn > up_to).sum(-1), np.arange(rows)[:, None]
        queries = keys[row, at] + NOISE * rng.normal(size=(rows, QUERIES, FEATURES))
        keys, log_p, queries = (a.astype(np.float32) for a in (keys, log_p, queries))
        return (keys, values, log_p, queries), values[row, at]

    def network(self) -> Any:
        import torch  # late: listing the experiments needs no torch

        task = self

        class Network(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.query, self.key = (torch.nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))
                self.value = torch.nn.Parameter(torch.randn(VALUES, WIDTH))
                self.out = torch.nn.Linear(WIDTH, VALUES)
                start = {"added": 1.0, "scaled": 0.5, "mixed": -1.0}.get(task.way)
                self.strength = None if start is None else torch.nn.Parameter(torch.tensor(start))

            def forward(
                self, keys: torch.Tensor, values: torch.Tensor, log_p: torch.Tensor, queries: torch.Tensor
            ) -> torch.Tensor:
                how: dict[str, Any] = {}
                if self.strength is not None:
                    log_p = log_p[:, None, None]
                    if task.way == "added":
                        how["bias"] = self.strength * log_p
                    elif task.way == "scaled":
                        how["transform"] = transforms.prior(
                            scale=torch.exp(self.strength * (log_p + math.log(NOISY_KEYS)))
                        )
                    else:
                        how["mix"] = (log_p.exp(), torch.sigmoid(self.strength))
                q, k, v = (a[:, None] for a in (self.query(queries), self.key(keys), self.value[values]))
                return self.out(attention(q, k, v, task.mapping, **how)[:, 0])

        return Network()


def by_bayes(given: tuple[Any, ...], right: Any, prior: bool) -> float:
    """Per cent right of the most likely key, with the prior or without."""
    keys, values, log_p, queries = given
    likely = -((queries[:, :, None] - keys[:, None]) ** 2).sum(-1) / (2 * NOISE**2) + prior * log_p[:, None]
    return 100 * float((np.take_along_axis(values, likely.argmax(-1), 1) == right).mean())


# -- training ---------------------------------------------------------------------------------------------------------


def trained(task: Exact | Noisy, rate: float, steps: int, seed: int) -> Any:
    """By Adam, with a rate that rises over a sixteenth of the steps and falls to 0 as a cosine."""
    import torch  # late: listing the experiments needs no torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = task.network()
    rng = np.random.default_rng([seed, 1])  # the same contexts for all that have the same task
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(steps):
        share = min(1.0, 16 * (step + 1) / steps) * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        optimiser.param_groups[0]["lr"] = rate * share
        given, right = task.batch(rng, BATCH)
        optimiser.zero_grad()
        scores = model(*map(torch.from_numpy, given)).flatten(0, 1)
        torch.nn.functional.cross_entropy(scores, torch.from_numpy(right).flatten()).backward()
        optimiser.step()
    return model


def accuracy(model: Any, task: Exact | Noisy, contexts: int, seed: int) -> float:
    """Per cent right, of contexts that are the same for all that have the same task."""
    import torch  # late: listing the experiments needs no torch

    rng, found = np.random.default_rng([seed, 2]), []
    with torch.no_grad():
        for _ in range(contexts // BATCH):
            given, right = task.batch(rng, BATCH)
            found.append(float((model(*map(torch.from_numpy, given)).argmax(-1).numpy() == right).mean()))
    return 100 * float(np.mean(found))


# -- the gradient on random scores ------------------------------------------------------------------------------------


def gradients(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Half the L1 norm of the Jacobian of softmax(a x) in x, for each scale a and each row: a (1 - sum of p^2)."""
    return np.stack([a * (1.0 - np.square(anymax.softmax(a * x)).sum(axis=1)) for a in scales])


def edge(n: int) -> float:
    """sqrt(2 log n): about the highest of n normal scores."""
    return math.sqrt(2 * math.log(n))


def on_random_scores(n: int, rows: int, seed: int) -> dict[str, Any]:
    """The median over rows of the best scale; and of the mean gradient what is left of its maximum at 1 and at four times the edge."""
    x = np.random.default_rng([seed, n]).normal(size=(rows, n))
    scales = 0.5 * STEP ** np.arange(math.ceil(math.log(2**9, STEP)) + 1)  # to 256
    best, curve = np.zeros(rows), np.zeros(len(scales))
    for part in np.array_split(np.arange(rows), max(1, rows * n // 2**16)):
        some = gradients(x[part], scales)
        best[part] = scales[some.argmax(axis=0)]
        curve += some.sum(axis=1) / rows
    inside = scales <= 4 * edge(n) * STEP**0.5
    most = float(curve[inside].max())
    at = {name: float(np.interp(a, scales, curve)) / most for name, a in (("at 1", 1.0), ("at 4 edges", 4 * edge(n)))}
    return {"best": float(np.median(best)), **at, "most": most, "scales": scales, "curve": curve}


def power(best: dict[int, float]) -> float:
    """The slope of log best scale against log log n, by least squares."""
    n = np.array(list(best))
    return float(np.polyfit(np.log(np.log(n)), np.log(list(best.values())), 1)[0])


# -- the experiment ---------------------------------------------------------------------------------------------------

FEW, MANY, SHORT = 16, 256, 64  # keys
TWO = "taylor:order=2"
RECALL = {
    f"{name}, {keys} keys": Exact(mapping, keys, features)
    for name, mapping, keys, features in (
        (SOFTMAX, "softmax", FEW, 16), (TAYLOR, TWO, FEW, 16),
        (SOFTMAX, "softmax", MANY, 16), (TAYLOR, TWO, MANY, 16), (WIDE, TWO, MANY, 32),
    )
}  # fmt: skip
PRIORS = {
    "softmax, no prior": Noisy("softmax"),
    **{f"softmax, prior {way}": Noisy("softmax", way) for way in ("added", "scaled", "mixed")},
    "1.5-entmax, no prior": Noisy("entmax15"),
    "1.5-entmax, prior added": Noisy("entmax15", "added"),
}
ONE, BEST, TEN = "variance 1", "sqrt(2 log n)", "10 sqrt(2 log n)"
STARTS = {
    name: Exact("softmax", SHORT, 16, scale)
    for name, scale in ((ONE, 1.0), (BEST, edge(SHORT)), (TEN, 10 * edge(SHORT)))
}


@quick_on_one_thread
def run(settings: Settings, found: Findings) -> None:
    quick = settings.quick
    plan = {"recall": 20 if quick else 1000, "priors": 20 if quick else 600, "starts": 10 if quick else 300}
    contexts, tunings, rows = (32, 1, 50) if quick else (256, 2, 1000)
    sizes = SIZES[:3] if quick else SIZES
    found.data = "Drawn anew for each seed: contexts of keys with values, and random scores. No data is read."
    rates: list[dict[str, Any]] = []
    results: dict[str, list[float]] = {}
    misled: dict[str, list[float]] = {}
    strengths: dict[str, list[float]] = {}
    for part, tasks in (("recall", RECALL), ("priors", PRIORS), ("starts", STARTS)):
        for name, task in settings.track(tasks.items(), f"{part}, network", lambda item: item[0]):

            def error(rate: float, task: Exact | Noisy = task, steps: int = plan[part]) -> float:
                seeds = range(TUNING, TUNING + tunings)
                return 100 - float(np.mean([accuracy(trained(task, rate, steps, s), task, contexts, s) for s in seeds]))

            rate, tried, _ = (RATE[0], {}, True) if quick else walk(error, *RATE, TIE)
            if not quick:
                found.chosen(f"{part}, {name}: learning rate", rate, tried)
            rates.append({
                "part": part, "network": name, "learning rate": rate,
                "error at each rate": ", ".join(f"{r:.2g}: {e:.1f}" for r, e in tried.items()),
            })  # fmt: skip
            for seed in settings.seeds:
                model = trained(task, rate, plan[part], seed)
                results.setdefault(name, []).append(accuracy(model, task, contexts, seed))
                if isinstance(task, Noisy):
                    even = dataclasses.replace(task, even=True)
                    misled.setdefault(name, []).append(accuracy(model, even, contexts, seed))
                    strengths.setdefault(name, []).append(
                        float("nan") if model.strength is None else model.strength.item()
                    )
            settings.say(f"{name}, rate {rate:.2g}: {np.mean(results[name]):.1f} % right")
    bayes = {
        (prior, even): [by_bayes(*Noisy("softmax", even=even).batch(np.random.default_rng([seed, 2]), contexts), prior)
                        for seed in settings.seeds]
        for prior in (False, True) for even in (False, True)
    }  # fmt: skip
    random = {
        n: [on_random_scores(n, rows, seed) for seed in settings.seeds]
        for n in settings.track(sizes, "random scores, size")
    }
    found.settings = {
        **{f"steps, {part}": steps for part, steps in plan.items()},
        "batch": f"{BATCH} contexts of {QUERIES} queries", "test contexts": contexts, "seeds that choose the rate": tunings,
        "exact recall": f"{KEYS} keys, {VALUES} values of width {WIDTH}; tables of vectors for queries, keys and values, one head",
        "noisy recall": f"{NOISY_KEYS} keys with {FEATURES} features, noise of deviation {NOISE:g}, a log prior of deviation {SPREAD:g}; "
                        f"keys of length sqrt({FEATURES}), {VALUES} values of width {WIDTH}, linear maps of queries and keys, scores "
                        f"divided by sqrt({FEATURES}); a strength starts at 1 added, 0.5 scaled, -1 mixed",
        "optimiser": "Adam, the rate rises over a sixteenth of the steps and falls to 0 as a cosine",
        "chosen by": f"the rate by steps of {RATE[1]:g} from {RATE[0]:g}, until neither neighbour is better by more than {TIE:g} points",
        "random scores": f"{rows:,} rows of n normal scores; scales from 0.5 to 256 by steps of 2^(1/16)",
    }  # fmt: skip
    _tell_recall(found, results)
    _tell_priors(found, results, misled, strengths, bayes)
    _tell_scales(found, results, random)
    found.table(
        "What was chosen", rates, "Mean error in per cent at each learning rate that was tried, on other seeds."
    )
    found.notes += [
        "Taylor attention of D features is linear attention with 1 + D + D (D + 1) / 2 features: 153 for 16, 561 for 32.",
        "A prior's strength is learned: a factor of the log prior, the power of the prior that scales, the weight of the mix by a sigmoid.",
        (
            "The gradient is half the L1 norm of the Jacobian of softmax(a x) in x. At large scales its mean comes from few rows, those "
            "whose two highest scores nearly tie."
        ),
        "Su 2023 was not at hand; its claims are as docs/mathematics.md derives them.",
    ]  # fmt: skip
    found.picture(lambda figure: draw(figure, results, misled, random), (14.0, 4.4),
                  caption="Recall with softmax and Taylor attention, priors right and misleading, the gradient by the scale")  # fmt: skip


def _tell_recall(found: Findings, results: dict[str, list[float]]) -> None:
    found.table(
        "Exact recall", [{"network": name, "accuracy": over_seeds(results[name])} for name in RECALL], "Per cent of the queries."
    )  # fmt: skip
    for claim, ours, theirs, bound in (
        ("few", f"{TAYLOR}, {FEW} keys", f"{SOFTMAX}, {FEW} keys", {"at_least": -1.0}),
        ("many", f"{TAYLOR}, {MANY} keys", f"{SOFTMAX}, {MANY} keys", {"at_most": -5.0}),
        ("wider", f"{WIDE}, {MANY} keys", f"{TAYLOR}, {MANY} keys", {"at_least": 5.0}),
    ):
        found.test(claim, f"accuracy, points: {ours} - {theirs}", difference(results[ours], results[theirs]), **bound)


def _tell_priors(
    found: Findings,
    results: dict[str, list[float]],
    misled: dict[str, list[float]],
    strengths: dict[str, list[float]],
    bayes: dict[tuple[bool, bool], list[float]],
) -> None:
    learned = {name: None if math.isnan(of[0]) else over_seeds(of) for name, of in strengths.items()}
    rows: list[dict[str, Any]] = [
        {"network": name, "accuracy": over_seeds(results[name]), "misled": over_seeds(misled[name]), "learned strength": learned[name]}
        for name in PRIORS
    ]  # fmt: skip
    rows += [
        {"network": f"the most likely key, {'with' if prior else 'without'} the prior",
         "accuracy": over_seeds(bayes[prior, False]), "misled": over_seeds(bayes[prior, True])}
        for prior in (False, True)
    ]  # fmt: skip
    found.table(
        "Noisy recall", rows, "Per cent of the queries; misled: all keys are as likely, whatever the prior says."
    )
    none, added = "softmax, no prior", "softmax, prior added"
    for name in (added, "softmax, prior scaled", "softmax, prior mixed"):
        found.test(
            "prior", f"accuracy, points: {name} - {none}", difference(results[name], results[none]), at_least=0.0
        )
        if name != added:
            more = difference(results[added], results[name])
            found.test("added", f"accuracy, points: {added} - {name}", more, at_least=0.0)
    gains = [
        np.subtract(results[f"{m}, prior added"], results[f"{m}, no prior"]).tolist() for m in ("1.5-entmax", "softmax")
    ]
    found.test(
        "sparse", "gain in accuracy, points: 1.5-entmax - softmax", difference(gains[0], gains[1]), at_least=-1.0
    )
    less = difference(misled["softmax, prior mixed"], misled[added])
    found.test("misled", f"misled: accuracy, points: softmax, prior mixed - {added}", less, at_least=0.0)
    afterwards(found)


def afterwards(found: Findings) -> None:
    """What an added prior costs where it says nothing."""
    (recall,) = (table for table in found.tables if table["title"] == "Noisy recall")
    added, none = "softmax, prior added", "softmax, no prior"
    misled = {
        row["network"]: interval(row["misled"]).figures[0] for row in recall["rows"] if row["network"] in (added, none)
    }
    less = difference(misled[added], misled[none])
    found.test("cost", f"misled: accuracy, points: {added} - {none}", less, at_most=0.0)


def _tell_scales(found: Findings, results: dict[str, list[float]], random: dict[int, list[dict[str, Any]]]) -> None:
    def of(n: int, figure: str) -> Interval:
        return over_seeds([one[figure] for one in random[n]])

    found.table("The gradient of softmax on random scores", [
        {"n": n, "sqrt(log n)": math.sqrt(math.log(n)), "sqrt(2 log n)": edge(n), "best scale, median of the rows": of(n, "best"),
         "most mean gradient": of(n, "most"), "share of it at 1": of(n, "at 1"), "at 4 sqrt(2 log n)": of(n, "at 4 edges")}
        for n in random
    ], "Normal scores of variance 1 times a scale. The most is that of the scales up to 4 sqrt(2 log n).")  # fmt: skip
    powers = over_seeds(
        [power({n: several[i]["best"] for n, several in random.items()}) for i in range(len(random[FEW]))]
    )
    for bound in ({"at_least": 0.4}, {"at_most": 0.6}):
        found.test("grows", f"power of log n, from n = {min(random)} to {max(random):,}", powers, **bound)
    for n in (n for n in ASKED if n in random):
        found.test("half", f"n = {n:,}: mean gradient at 1, share of the most", of(n, "at 1"), at_most=0.5)
        found.test(
            "vanishes",
            f"n = {n:,}: mean gradient at 4 sqrt(2 log n), share of the most",
            of(n, "at 4 edges"),
            at_most=0.5,
        )
    found.table(
        f"Exact recall among {SHORT} keys after a short training, by the scale at its start",
        [{"scale": name, "accuracy": over_seeds(results[name])} for name in STARTS], "Per cent of the queries.",
    )  # fmt: skip
    for claim, name, bound in (("faster", BEST, {"at_least": 0.0}), ("one-hot", TEN, {"at_most": 0.0})):
        found.test(claim, f"accuracy, points: {name} - {ONE}", difference(results[name], results[ONE]), **bound)


def draw(
    figure: Any,
    results: dict[str, list[float]],
    misled: dict[str, list[float]],
    random: dict[int, list[dict[str, Any]]],
) -> None:
    from anymax.plot.style import COLOURS, DASHES  # late: an optional extra

    recall, priors, scales = figure.subplots(1, 3)

    def bars(ax: Any, name: str, at: float, values: list[float], colour: int, label: str | None = None) -> None:
        span = over_seeds(values)
        ax.errorbar(
            span.mean, at, xerr=[[span.mean - span.low], [span.high - span.mean]], fmt="os"[colour], markersize=5, capsize=2,
            color=COLOURS[colour], label=label,
        )  # fmt: skip

    names = [*RECALL, *(f"{SHORT} keys, from {name}" for name in STARTS)]
    for i, name in enumerate((*RECALL, *STARTS)):
        bars(recall, name, i, results[name], int(i >= len(RECALL)))
    recall.set(title="exact recall, per cent", yticks=range(len(names)), yticklabels=names)
    for i, name in enumerate(PRIORS):
        for k, (what, label) in enumerate(((results, "prior right"), (misled, "prior says nothing"))):
            bars(priors, name, i, what[name], k, label if i == 0 else None)
    priors.set(title="noisy recall, per cent", yticks=range(len(PRIORS)), yticklabels=list(PRIORS))
    priors.legend(frameon=False)
    for ax in (recall, priors):
        ax.invert_yaxis()
    for k, n in enumerate(n for n in ASKED if n in random):
        scale = random[n][0]["scales"]
        curve = np.mean([one["curve"] for one in random[n]], axis=0)
        shown = scale <= 4 * edge(n) * STEP**0.5
        scales.plot(scale[shown], curve[shown], color=COLOURS[k], linestyle=DASHES[k], label=f"n = {n:,}")
        scales.axvline(edge(n), color=COLOURS[k], linestyle=":", linewidth=1.0)
    scales.set(title="mean gradient of softmax", xlabel="scale; dotted: sqrt(2 log n)", xscale="log")
    scales.legend(frameon=False)
    for ax in (recall, priors, scales):
        ax.grid(color="#E5E5E5", linewidth=0.6)


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
