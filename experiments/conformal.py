"""Conformal sets: the support of sparsemax and entmax at a calibrated temperature, against LAC, APS and RAPS."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ._common import Experiment, Settings, main, walk
from ._report import Claim, Findings
from ._statistics import difference, over_seeds, ratio

PAPER, ROMANO = "Campos et al. 2025 (arXiv 2502.14773)", "Romano, Sesia and Candes 2020 (arXiv 2006.02544)"
BANKING = {f"text/banking77_{part}.csv.gz": "Banking77 (Casanueva et al. 2020)" for part in ("train", "test")}
CLINC = "text/clinc150_full.json.gz"
EXPERIMENT = Experiment(
    name="conformal",
    title="Conformal sets from sparse supports: entmax against LAC, APS and RAPS",
    about="A linear classifier is calibrated on held-out rows so that its sets hold the true class as often as asked; how large are they?",
    claims={
        "covers": Claim(
            "The support of entmax holds the true class as often as asked, or a point less", PAPER,
            apart="that it holds it as often as asked is a theorem on rows of one source",
        ),
        "tight": Claim("Where one class is not enough, it holds it at most a point more often than asked", PAPER),
        "aps": Claim("Where one class is not enough, the sets of 1.5-entmax are no larger than those of APS", "asked here"),
        "raps": Claim("Nor are they larger than those of RAPS", "asked here"),
        "lac": Claim("They are at most 5 % larger than those of LAC, which aims at small sets and at nothing else", "asked here"),
        "unsure": Claim(
            "On the fifth of the rows with the least confidence too, the sets of 1.5-entmax hold the true class as often as asked, "
            "or 3 points less", "asked here",
        ),
        "aps unsure": Claim("There the sets of APS hold it as often as asked, or 3 points less", ROMANO),
        "classes": Claim("Where one class is not enough, coverage is as even over the classes with 1.5-entmax as with APS", "asked here"),
    },
    seeds=20,
    quick_seeds=4,
    data={**BANKING, CLINC: "CLINC150 (Larson et al. 2019), github.com/clinc/oos-eval, data/data_full.json"},
    needs=("matplotlib", "scipy", "sklearn", "torch"),
)  # fmt: skip
LEVELS = (0.9, 0.95, 0.99)
ALPHAS = {"1.25-entmax": 1.25, "1.5-entmax": 1.5, "sparsemax": 2.0}
METHODS = (*ALPHAS, "LAC", "APS", "RAPS")
FIGURES = {
    "coverage": "coverage, per cent", "size": "classes in a set", "empty": "empty sets, per cent",
    "unsure": "coverage of the least confident fifth", "sure": "of the most confident fifth",
    "gap": "distance of a class's coverage from that asked, points",
}  # fmt: skip
# of the rank, in RAPS; probabilities sum to 1, and so from 1 on the rank alone decides
WEIGHTS = (0.0, 1e-3, 1e-2, 0.1, 1.0)
C_START, C_STEP, TIE = 16.0, 4.0, 1e-3
# the draws that choose C, which no seed has: several where a draw holds out few rows
CHOOSING = {"digits": range(1000, 1020), "Banking77": range(1000, 1001), "CLINC150": range(1000, 1001)}


@dataclasses.dataclass(frozen=True)
class Pool:
    """The rows that no model was trained on: scores and probabilities [rows, classes], and the classes' numbers."""

    z: np.ndarray
    p: np.ndarray
    y: np.ndarray
    model: Any  # what gave them
    x: Any

    @property
    def accuracy(self) -> float:
        return float((self.z.argmax(axis=1) == self.y).mean())


# -- scores of nonconformity: [rows, classes], a class is in the set where its own is at most the calibrated one ----------------


def lac(p: np.ndarray) -> np.ndarray:
    """Sadinle, Lei and Wasserman 2019: the probabilities themselves."""
    return 1.0 - p


def ranks(p: np.ndarray) -> np.ndarray:
    """1 for the most probable class."""
    out = np.empty(p.shape, np.int64)
    np.put_along_axis(out, np.argsort(-p, axis=1, kind="stable"), np.arange(1, p.shape[1] + 1)[None], 1)
    return out


def aps(p: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Romano, Sesia and Candes 2020: the mass of the more probable classes, and a random part of one's own; u is uniform, [rows, 1]."""
    order = np.argsort(-p, axis=1, kind="stable")
    fall = np.take_along_axis(p, order, 1)
    out = np.empty(p.shape)
    np.put_along_axis(out, order, np.cumsum(fall, axis=1) - fall + u * fall, 1)
    return out


def raps(p: np.ndarray, u: np.ndarray, weight: float, free: int) -> np.ndarray:
    """Angelopoulos et al. 2021: and a price for each rank beyond the first `free`."""
    return aps(p, u) + weight * np.maximum(ranks(p) - free, 0)


def conditional(held: np.ndarray, confidence: np.ndarray, y: np.ndarray, level: float) -> dict[str, float]:
    """Of rows whose sets held the true class or not: coverage of the least and the most confident fifth, and how uneven over classes."""
    fifths = np.array_split(np.argsort(confidence, kind="stable"), 5)
    classes, rows = np.unique(y, return_inverse=True)
    each = np.bincount(rows, held, len(classes)) / np.bincount(rows)
    return {
        "unsure": 100.0 * float(held[fifths[0]].mean()), "sure": 100.0 * float(held[fifths[-1]].mean()),
        "gap": 100.0 * float(np.abs(each - level).mean()),
    }  # fmt: skip


def support(alpha: float, z: np.ndarray) -> np.ndarray:
    """The temperature above which a class is in the support of entmax."""
    from anymax.sklearn.levels import entering  # late: an optional extra

    return entering(alpha - 1.0, z)


def quantile(values: np.ndarray, level: float) -> float:
    """The least score that as many as (n + 1) level of the n scores don't exceed; inf where there are too few."""
    rank = math.ceil((len(values) + 1) * level - 1e-9)
    return float(np.sort(values)[rank - 1]) if rank <= len(values) else math.inf


def tuned_raps(p: np.ndarray, u: np.ndarray, y: np.ndarray, level: float) -> tuple[float, int]:
    """The number of free ranks and the weight, as the authors choose them for small sets, on rows for that alone."""
    free = int(min(quantile(ranks(p)[np.arange(len(y)), y], level), p.shape[1]))

    def size(weight: float) -> float:
        score = raps(p, u, weight, free)
        return float((score <= quantile(score[np.arange(len(y)), y], level)).sum(axis=1).mean())

    return min(WEIGHTS, key=size), free


Split = tuple[Any, np.ndarray, Any, np.ndarray]  # x and y to train, x and y of the other rows


# -- data and model -----------------------------------------------------------------------------------------------------------


def digits(rows: int, seed: int) -> Split:
    """The 1,797 digits of scikit-learn (from UCI), some drawn at random to train."""
    from sklearn.datasets import load_digits  # late: an optional extra

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    train, pool = order[:rows], order[rows:]
    return x[train] / 16, y[train], x[pool] / 16, y[pool]


def sentences(task: Any, seed: int) -> Split:
    """Words and pairs of words, weighted by tf-idf; of all sentences as many as there are training sentences, drawn at random, to train."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # late: an optional extra

    texts, y = [*task.train.tokens, *task.test.tokens], np.concatenate([task.train.classes, task.test.classes])
    order = np.random.default_rng(seed).permutation(len(y))
    train, pool = order[: len(task.train)], order[len(task.train) :]
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2)
    x = words.fit_transform([texts[i] for i in train])
    return x, y[train], words.transform([texts[i] for i in pool]), y[pool]


def chosen(found: Findings, name: str, source: Callable[[int], Split]) -> float:
    """The C of a softmax classifier with the least log-loss on a fifth of the training rows, the mean over the draws that choose."""
    from sklearn.metrics import log_loss  # late: an optional extra

    from anymax.sklearn import MappingClassifier

    draws = [source(draw)[:2] for draw in CHOOSING[name]]

    def loss(C: float) -> float:
        losses = []
        for x, y in draws:
            order = np.random.default_rng(1).permutation(len(y))
            held, kept = order[: len(y) // 5], order[len(y) // 5 :]
            model = MappingClassifier("softmax", C=C).fit(x[kept], y[kept])
            losses.append(log_loss(y[held], model.predict_proba(x[held]), labels=model.classes_))
        return float(np.mean(losses))

    C, tried, _ = walk(loss, C_START, C_STEP, TIE)
    found.chosen(f"C on {name}", C, tried)
    return C


def trained(C: float, x: Any, y: np.ndarray, x_pool: Any, y_pool: np.ndarray) -> Pool:
    """A softmax classifier, and what it says of the rows that it has not seen."""
    from anymax.sklearn import MappingClassifier

    model = MappingClassifier("softmax", C=C).fit(x, y)
    index = np.searchsorted(model.classes_, y_pool)
    return Pool(model.decision_function(x_pool), model.predict_proba(x_pool), index, model, x_pool)


# -- the experiment -----------------------------------------------------------------------------------------------------------


def split(pool: Pool, scores: dict[str, np.ndarray], seed: int) -> list[dict[str, Any]]:
    """Half of the rows calibrate, half are tested: a row for each level and method."""
    rng = np.random.default_rng([seed, len(pool.y)])
    order, u = rng.permutation(len(pool.y)), rng.random((len(pool.y), 1))
    half = len(order) // 2
    rows = []
    for level in LEVELS:
        for method in METHODS:
            calibrate, test = order[:half], order[half:]
            if method == "RAPS":
                chooses, calibrate = calibrate[: half // 5], calibrate[half // 5 :]
                weight, free = tuned_raps(pool.p[chooses], u[chooses], pool.y[chooses], level)
                score = raps(pool.p, u, weight, free)
            else:
                score = aps(pool.p, u) if method == "APS" else scores[method]
            level_of = quantile(score[calibrate, pool.y[calibrate]], level)
            sets = score[test] <= level_of
            held = sets[np.arange(len(test)), pool.y[test]]
            rows.append({
                "level": level, "method": method, "coverage": 100.0 * float(held.mean()),
                "size": float(sets.sum(axis=1).mean()), "empty": 100.0 * float((~sets.any(axis=1)).mean()),
                **conditional(held, pool.p[test].max(axis=1), pool.y[test], level),
            })  # fmt: skip
            if seed == 0 and method in ALPHAS:
                _same(pool, calibrate, test, ALPHAS[method], level, sets)
    return rows


def _same(pool: Pool, calibrate: np.ndarray, test: np.ndarray, alpha: float, level: float, sets: np.ndarray) -> None:
    """An error where the estimator of the library finds other sets."""
    from sklearn.frozen import FrozenEstimator  # late: an optional extra

    from anymax import Entmax
    from anymax.sklearn import SupportConformalClassifier

    model = SupportConformalClassifier(FrozenEstimator(pool.model), mapping=Entmax(alpha), coverage=level)
    theirs = model.fit(pool.x[calibrate], pool.model.classes_[pool.y[calibrate]]).predict_set(pool.x[test])
    if not np.array_equal(theirs, sets):
        raise RuntimeError(
            f"SupportConformalClassifier differs from the experiment at alpha = {alpha:g}, coverage {level:g}"
        )


def run(settings: Settings, found: Findings) -> None:
    sources: dict[str, Callable[[int], Split]] = {"digits": lambda seed: digits(150, seed)}
    if not settings.quick:
        from ._sentences import banking, clinc  # late: it needs torch

        both = {
            "Banking77": banking(*(settings.data(path) for path in BANKING), list),
            "CLINC150": clinc(settings.data(CLINC), list),
        }
        sources |= {name: lambda seed, task=task: sentences(task, seed) for name, task in both.items()}
    results: dict[str, list[list[dict[str, Any]]]] = {}
    about: dict[str, dict[str, Any]] = {}
    for name, source in settings.track(sources.items(), "data", lambda item: item[0]):
        C, right = chosen(found, name, source), []
        for seed in settings.track(settings.seeds, f"{name}, draw"):
            x, y, x_pool, y_pool = source(seed)
            pool = trained(C, x, y, x_pool, y_pool)
            right.append(100 * pool.accuracy)
            scores = {method: support(alpha, pool.z) for method, alpha in ALPHAS.items()} | {"LAC": lac(pool.p)}
            results.setdefault(name, []).append(split(pool, scores, seed))
            half = len(pool.y) // 2
            about[name] = {
                "data": name, "classes": pool.z.shape[1], "features": x.shape[1], "rows that train": len(y), "that calibrate": half,
                "that test": len(pool.y) - half, "C": C, "accuracy, per cent": over_seeds(right),
            }  # fmt: skip
    found.data = (
        "The digits of scikit-learn (UCI), 150 to train."
        + (
            " Banking77 (Casanueva et al. 2020), as many to train as its authors train on."
            if "Banking77" in results
            else ""
        )
        + (" CLINC150 (Larson et al. 2019), the 150 intents in scope, likewise." if "CLINC150" in results else "")
        + " Each seed draws the rows that train; the others are split at random into halves that calibrate and test."
    )
    found.settings = {
        "model": "linear, softmax (MappingClassifier); sentences as tf-idf of words and pairs of words (1 + log of "
                 "the count; in two training sentences or more)",
        "sets of entmax": "what entmax gives a probability above 0 at a temperature: the least at which that many of the true classes of "
                          "the calibrating rows have one",
        "C": f"the least log-loss on a fifth of the training rows, by steps of {C_STEP:g} from {C_START:g} until neither neighbour is "
             f"better by more than {TIE:g}; the mean over draws that are not judged",
        "draws that choose C": ", ".join(f"{name}: {len(CHOOSING[name])}" for name in about),
        "draws": "a seed draws the rows that train, and splits the others; both are the same for all methods",
        "APS and RAPS": "randomised, and so exact; sets may be empty",
        "RAPS": "a fifth of the calibrating rows chooses its free ranks and its weight "
                f"({', '.join(f'{w:g}' for w in WEIGHTS)}) for small sets; 0 is APS, and from 1 on the rank alone decides",
    }  # fmt: skip
    _tell(found, results, about)


def _tell(found: Findings, results: dict[str, list[list[dict[str, Any]]]], about: dict[str, dict[str, Any]]) -> None:
    def values(name: str, level: float, method: str, figure: str) -> list[float]:
        return [
            row[figure] for rows in results[name] for row in rows if row["level"] == level and row["method"] == method
        ]

    for name in results:
        rows = []
        for level in LEVELS:
            for method in METHODS:
                span = {figure: over_seeds(values(name, level, method, figure)) for figure in FIGURES}
                rows.append(
                    {"asked": f"{100 * level:g} %", "method": method, **{FIGURES[k]: v for k, v in span.items()}}
                )
            enough = about[name]["accuracy, per cent"].mean >= 100 * level
            for method in ALPHAS:
                what, span = (
                    f"{name}, {method}, coverage asked {100 * level:g}",
                    over_seeds(values(name, level, method, "coverage")),
                )
                found.test("covers", what, span, at_least=100 * level - 1)
                if not enough:
                    found.test("tight", what, span, at_most=100 * level + 1)
            for claim, method in (("unsure", "1.5-entmax"), ("aps unsure", "APS")):
                what = f"{name}, {method}, coverage of the least confident fifth, asked {100 * level:g}"
                found.test(claim, what, over_seeds(values(name, level, method, "unsure")), at_least=100 * level - 3)
            if not enough:
                what = f"distance of the classes' coverage from {100 * level:g}, points, 1.5-entmax less APS: {name}"
                both = [values(name, level, method, "gap") for method in ("1.5-entmax", "APS")]
                found.test("classes", what, difference(*both), at_most=0.0)
                for claim, other, most in (("aps", "APS", 1.0), ("raps", "RAPS", 1.0), ("lac", "LAC", 1.05)):
                    both = [values(name, level, method, "size") for method in ("1.5-entmax", other)]
                    what = f"size of a set, 1.5-entmax / {other}: {name}, coverage asked {100 * level:g}"
                    found.test(claim, what, ratio(*both), at_most=most)
        found.table(
            name,
            rows,
            "Means over the draws, with their intervals. Fifths of the test rows, by their largest probability.",
        )
    found.table(
        "Data and model",
        list(about.values()),
        "The accuracy is that of the best class alone, on all rows that were not trained on, the mean over draws.",
    )
    found.picture(lambda figure: draw(figure, results), (3.4 * len(results) + 1.6, 6.8),
                  caption="Above: the mean number of classes in a set, for each coverage that was asked for; "
                          "below: the coverage of the least confident fifth of the rows")  # fmt: skip
    found.notes += [
        "The unit is the draw of the rows that train: splits of one pool for one model are not independent of each other.",
        (
            "Sizes are compared where the best class alone is right less often than asked. Where it is right "
            "more often, the sets of entmax hold one class, and some sets of LAC, APS and RAPS are empty."
        ),
        "A first run chose C on the digits by the 30 rows that one draw holds out, and took 4,096; so 20 draws choose it now.",
        "On the first draw SupportConformalClassifier found the same sets.",
    ]


def draw(figure: Any, results: dict[str, list[list[dict[str, Any]]]]) -> None:
    from anymax.plot.style import COLOURS  # late: an optional extra

    panels = figure.subplots(2, len(results), sharey=True, squeeze=False)
    for column, (name, splits) in enumerate(results.items()):
        for ax, what in zip(panels[:, column], ("size", "unsure"), strict=True):
            for k, level in enumerate(LEVELS):
                for i, method in enumerate(METHODS):
                    shown = [
                        row[what]
                        for rows in splits
                        for row in rows
                        if row["level"] == level and row["method"] == method
                    ]
                    span = over_seeds(shown)
                    ax.errorbar(
                        span.mean, i, xerr=[[span.mean - span.low], [span.high - span.mean]], fmt="osD"[k], markersize=5, capsize=2,
                        color=COLOURS[k], label=f"{100 * level:g} % asked" if i == 0 else None,
                    )  # fmt: skip
                if what == "unsure":
                    ax.axvline(100 * level, color=COLOURS[k], linestyle=":", linewidth=1.0)
            ax.set(yticks=range(len(METHODS)), yticklabels=METHODS)
            ax.grid(color="#E5E5E5", linewidth=0.6)
        top = panels[0, column]
        top.set(title=name, xscale="log", xlabel="classes in a set")
        low, high = top.get_xlim()
        ticks = [t for t in (1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100) if low <= t <= high]
        top.set_xticks(ticks, [f"{t:g}" for t in ticks])
        top.set_xticks([], minor=True)
        panels[1, column].set_xlabel("coverage of the least confident fifth")
    panels[0, 0].invert_yaxis()
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(LEVELS), frameon=False
    )


if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, run))
