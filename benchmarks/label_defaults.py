"""How the default of `MultiLabelMappingClassifier` is chosen, written down before the first figure: `python -m benchmarks.defaults labels`.

**Two halves.** Every set that had a part in an earlier choice chooses (`choosing`). The others only report (`reporting`): once, after the
choice, whatever comes out. Real sets are read from ANYMAX_DATA/multilabel (`python -m experiments.data.mulan` writes those of Mulan); a
set that is not there is left out, and the program says so. A choosing set keeps its official split, or every third row tests, and at most
1,500 rows train. A reporting set is some labels of a larger set, by how common they are, with 1,200 random rows to train and as many
others to test, and the thousand features that most of the training rows have; or it is made up, by a generator that no choice has used or
with a new seed and shape. (An experiment of this repository, `experiments.multilabel`, compares maps on Bibtex, Delicious and RCV1 as a
whole, tuned in another way; no default was chosen from it.) Rows without a label stay. Features that are not 0 or 1 are standardised on
the training rows.

**Measures.** micro-F1, macro-F1 and equal sets (the share of test rows whose set is exactly right), in per cent; together they are their
mean. The F1 of rows is shown and counts for nothing.

**Time.** Seconds of a processor of `fit`, the lesser of two fits (of one, if that takes more than two seconds), divided by that of
one-vs-rest logistic regression (scikit-learn's, at its defaults) on the same rows.

**Rule.**

1. A contender qualifies if its fits take at most 2 times the time in sum over the choosing sets, and on nine sets of ten.
2. Of those, a contender stays if in each of the three measures it is at least as good as logistic regression on at least half of the
   choosing sets. If none is, those stay that are so in the most measures.
3. The one with the highest mean over the choosing sets of the three measures together wins. All within 0.2 points of it tie with it.
4. Of these the one that takes the least time is the default.

The default gets the map, C, the decision, the score that is tuned and the number of folds of the winner.
"""

from __future__ import annotations

import csv
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

RESULT = Path(__file__).parent / "results" / "estimators.md"
FIGURES = RESULT.with_suffix(".csv")
CHOOSING = (
    "birds",
    "emotions",
    "flags",
    "foodtruck",
    "yeast",
    "scene",
    "medical",
    "genbase",
    "enron",
    "cal500",
)
# a set, which of its labels from the commonest on, and the seed of its rows
REPORTING = (
    ("bibtex", 0, 15, 0),
    ("bibtex", 15, 45, 1),
    ("delicious", 0, 20, 0),
    ("delicious", 20, 60, 1),
    ("rcv1v2_subsets_pooled", 0, 20, 0),
    ("rcv1v2_subsets_pooled", 20, 50, 1),
    ("tmc2007", 0, 22, 0),
    ("corel5k", 0, 40, 0),
    ("corel16k", 0, 40, 0),
)
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"mapping": "softmax"},
    "1.5-entmax, support": {"mapping": "entmax15"},
    "1.5-entmax, threshold": {"mapping": "entmax15", "decision": "threshold"},
    "sparsemax, support": {"mapping": "sparsemax"},
    "sigmoid": {"mapping": "sigmoid"},
    "ZLPR": {"mapping": "zlpr"},
    "sigmoid at 1/2": {"mapping": "sigmoid", "threshold": 0.5},
}
# a kind, its values of C, what is tuned, and the folds
TRIED: tuple[tuple[str, tuple[float, ...], str, int], ...] = (
    ("softmax", (1.0, 0.3, 0.1), "f1_micro", 3),
    ("1.5-entmax, support", (1.0, 0.3), "f1_micro", 3),
    ("1.5-entmax, threshold", (0.3,), "f1_micro", 3),
    ("sparsemax, support", (0.3,), "f1_micro", 3),
    ("sigmoid", (1.0, 0.3, 0.1), "f1_micro", 3),
    ("ZLPR", (0.3,), "f1_micro", 3),
    ("softmax", (1.0, 0.3), "f1_samples", 3),
    ("1.5-entmax, support", (1.0, 0.3), "f1_samples", 3),
    ("sigmoid", (1.0, 0.3), "f1_samples", 3),
    ("softmax", (1.0, 0.3), "accuracy", 3),
    ("1.5-entmax, support", (1.0, 0.3), "accuracy", 3),
    ("sigmoid", (1.0, 0.3), "accuracy", 3),
    ("softmax", (0.3,), "f1_micro", 5),
    ("sigmoid", (0.3,), "f1_micro", 5),
    ("sigmoid at 1/2", (1.0,), "f1_micro", 3),
)
CONTENDERS: dict[str, dict[str, Any]] = {
    f"{kind}, C = {C:g}" + (f", {scoring}" if kind != "sigmoid at 1/2" else "") + (f", {cv} folds" if cv != 3 else ""): {
        **KINDS[kind], "C": C, "scoring": scoring, "cv": cv,
    }
    for kind, penalties, scoring, cv in TRIED
    for C in penalties
}  # fmt: skip
LOGISTIC = "logistic regression"
MEASURES = ("micro-F1", "macro-F1", "equal sets", "F1 of rows")  # the first three count
COUNT = 3
TIMES, SETS_IN_TIME, TIE = 2.0, 0.9, 0.2
# beside the winner; the first was the default before
SHOWN = ("softmax, C = 0.3, f1_micro, 5 folds", "1.5-entmax, support, C = 0.3, f1_micro", "sigmoid, C = 0.3, f1_micro")
MOST, ROWS, FEATURES = 1500, 1200, 1000

# name; features and labels to train; the same to test
Data = tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def kept(path: Path) -> tuple[Any, np.ndarray, np.ndarray]:
    """The features (CSR), the labels and which rows are for testing."""
    from scipy import sparse  # late: an optional extra

    z = np.load(path)
    shape = tuple(int(n) for n in z["X_shape"])
    x = sparse.csr_matrix((z["X_data"].astype(np.float64), z["X_indices"], z["X_indptr"]), shape=shape)
    y = np.unpackbits(z["Y"], axis=1)[:, : int(z["Y_shape"][1])].astype(np.int64)
    split = z["split"] if "split" in z else np.full(len(y), -1)
    test = split == 1 if (split == 1).any() else np.arange(len(y)) % 3 == 2
    return x, y, test


def found(name: str) -> Path | None:
    folder = os.environ.get("ANYMAX_DATA")
    path = Path(folder or "", "multilabel", f"{name}.npz")
    if folder and path.exists():
        return path
    print(f"{name}: not there (ANYMAX_DATA/multilabel/{name}.npz)", file=sys.stderr)
    return None


def prepared(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    plain = np.isin(train, (0.0, 1.0)).all(axis=0)
    mean, spread = train.mean(axis=0), train.std(axis=0)
    spread[spread == 0] = 1.0
    x, x_test = (np.where(plain, x, (x - mean) / spread) for x in (train, test))
    return x, x_test


def parted(name: str, x: np.ndarray, y: np.ndarray, test: np.ndarray) -> Data:
    train = np.flatnonzero(~test)[:MOST]
    x_train, x_test = prepared(x[train], x[test])
    return name, x_train, y[train], x_test, y[test]


def choosing() -> Iterator[Data]:
    from sklearn.datasets import make_multilabel_classification  # late: an optional extra

    for name in CHOOSING:
        path = found(name)
        if path is None:
            continue
        x, y, test = kept(path)
        yield parted(name, x.toarray(), y, test)
        if name in ("emotions", "scene"):  # many rows without a label
            fewer = np.delete(y, np.argsort(-y.sum(axis=0))[:2], axis=1)
            yield parted(f"{name} less its two commonest labels", x.toarray(), fewer, test)
    for seed, (k, each, empty) in enumerate(((5, 1, True), (8, 2, True), (12, 3, False), (20, 2, False))):
        size = {"n_samples": 900, "n_features": 40, "n_classes": k, "n_labels": each, "allow_unlabeled": empty}
        x, y = make_multilabel_classification(**size, random_state=seed)
        yield parted(f"made up, {k} labels", x, y, np.arange(900) % 3 == 2)


def some_labels(name: str, x: Any, y: np.ndarray, first: int, last: int, seed: int) -> Data:
    """Some of the labels, rows and features of a larger set."""
    labels = np.argsort(-y.sum(axis=0), kind="stable")[first:last]
    order = np.random.default_rng(seed).permutation(len(y))
    half = min(ROWS, len(order) * 2 // 3)
    train, test = order[:half], order[half : half + ROWS]
    features = np.sort(np.argsort(-np.asarray((x[train] != 0).sum(axis=0)).ravel(), kind="stable")[:FEATURES])
    x_train, x_test = prepared(x[train][:, features].toarray(), x[test][:, features].toarray())
    return f"{name}, labels {first + 1} to {last}", x_train, y[train][:, labels], x_test, y[test][:, labels]


def independent(n: int, d: int, k: int, rare: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels that do not compete: each has scores of its own, with logistic noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    z = 2.0 * (x @ rng.normal(size=(d, k))) / np.sqrt(d) - rare * rng.random(k)
    return x, (z + rng.logistic(size=z.shape) > 0).astype(np.int64)


def reporting() -> Iterator[Data]:
    from sklearn.datasets import make_multilabel_classification  # late: an optional extra

    for name, first, last, seed in REPORTING:
        path = found(name)
        if path is not None:
            x, y, _ = kept(path)
            yield some_labels(name, x, y, first, last, seed)
    for seed, n, d, k, each, empty in ((10, 600, 20, 6, 1, True), (11, 1500, 100, 30, 3, False)):
        size = {"n_samples": n, "n_features": d, "n_classes": k, "n_labels": each, "allow_unlabeled": empty}
        x, y = make_multilabel_classification(**size, random_state=seed)
        yield parted(f"made up, {k} labels", x, y, np.arange(n) % 3 == 2)
    for seed, n, d, k, rare in ((12, 900, 30, 10, 2.0), (13, 1500, 60, 20, 4.0)):
        x, y = independent(n, d, k, rare, seed)
        yield parted(f"made up, {k} independent labels", x, y, np.arange(n) % 3 == 2)


def measured(truth: np.ndarray, guess: np.ndarray) -> list[float]:
    from sklearn.metrics import f1_score  # late: an optional extra

    micro, macro, rows = (
        f1_score(truth, guess, average=average, zero_division=0) for average in ("micro", "macro", "samples")
    )
    return [100.0 * float(value) for value in (micro, macro, (truth == guess).all(axis=1).mean(), rows)]


def contenders(names: list[str]) -> dict[str, Callable[[], Any]]:
    from sklearn.linear_model import LogisticRegression  # late: an optional extra
    from sklearn.multiclass import OneVsRestClassifier

    from anymax.sklearn import MultiLabelMappingClassifier

    makers: dict[str, Callable[[], Any]] = {
        name: lambda options=CONTENDERS[name]: MultiLabelMappingClassifier(**options) for name in names
    }
    return makers | {LOGISTIC: lambda: OneVsRestClassifier(LogisticRegression(max_iter=5000))}


Figures = dict[str, dict[str, list[float]]]  # contender -> set -> its measures and its seconds


def run(sets: Iterator[Data], names: list[str]) -> Figures:
    begun, out = time.monotonic(), {name: {} for name in (*names, LOGISTIC)}
    for name, x, y, x_test, y_test in sets:
        title = f"{name} ({len(x)} x {x.shape[1]}, {y.shape[1]} labels)"
        print(f"{time.monotonic() - begun:5.0f} s  {title}", file=sys.stderr, flush=True)
        for contender, make in contenders(names).items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a label that no training row has; a solver that stops early
                model, seconds = _fitted(make, x, y)
                if seconds < 2.0:
                    seconds = min(seconds, _fitted(make, x, y)[1])
                out[contender][title] = [*measured(y_test, model.predict(x_test)), seconds]
    return out


def _fitted(make: Callable[[], Any], x: np.ndarray, y: np.ndarray) -> tuple[Any, float]:
    at = time.process_time()
    model = make().fit(x, y)
    return model, time.process_time() - at


# -- the rule ---------------------------------------------------------------------------------------------------------------------


def summed(figures: Figures) -> dict[str, dict[str, float]]:
    """Of each contender: the mean of each measure and of the three together, the shares of sets where it is no worse than logistic
    regression, and its time in units of that."""
    names = list(figures[LOGISTIC])
    base = np.array([figures[LOGISTIC][name] for name in names])
    out = {}
    for contender, rows in figures.items():
        table = np.array([rows[name] for name in names])
        found = {m: float(table[:, i].mean()) for i, m in enumerate(MEASURES)}
        found |= {f"no worse in {m}": float((table[:, i] >= base[:, i]).mean()) for i, m in enumerate(MEASURES[:COUNT])}
        found["together"] = float(table[:, :COUNT].mean())
        found["time"] = float(table[:, -1].sum() / base[:, -1].sum())
        found["in time"] = float((table[:, -1] <= TIMES * base[:, -1]).mean())
        out[contender] = found
    return out


def choice(figures: Figures) -> str:
    """The contender that the rule chooses."""
    of = {name: row for name, row in summed(figures).items() if name != LOGISTIC}
    of = {name: row for name, row in of.items() if row["time"] <= TIMES and row["in time"] >= SETS_IN_TIME}
    good = {name: sum(row[f"no worse in {m}"] >= 0.5 for m in MEASURES[:COUNT]) for name, row in of.items()}
    stay = [name for name in of if good[name] == max(good.values())]
    top = max(of[name]["together"] for name in stay)
    tied = [name for name in stay if of[name]["together"] >= top - TIE]
    return min(tied, key=lambda name: of[name]["time"])


# -- the page ---------------------------------------------------------------------------------------------------------------------


def overview(figures: Figures) -> list[str]:
    head = [*MEASURES[:COUNT], "together", *(f"no worse in {m}" for m in MEASURES[:COUNT]), MEASURES[3]]
    lines = [f"| contender | {' | '.join(head)} | time | sets in time |", f"|---|{'---:|' * (len(head) + 2)}"]
    of = summed(figures)
    for name in sorted(of, key=lambda name: -of[name]["together"]):
        row = of[name]
        cells = [f"{100 * row[h]:.0f} %" if h.startswith("no worse") else f"{row[h]:.1f}" for h in head]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['time']:.2f} | {100 * row['in time']:.0f} % |")
    return lines


def each_set(figures: Figures, names: list[str]) -> list[str]:
    lines: list[str] = []
    for m, title in enumerate((*MEASURES[:COUNT], "seconds of a fit")):
        i, form = (m, ".1f") if m < COUNT else (len(MEASURES), ".3f")
        lines += ["", f"{title}{', per cent' if m < COUNT else ''}:", ""]
        lines += [f"| set | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
        lines += [
            f"| {name} | {' | '.join(format(figures[one][name][i], form) for one in names)} |"
            for name in figures[LOGISTIC]
        ]
    return lines


def report(chosen: Figures, reported: Figures) -> str:
    winner = choice(chosen)
    shown = list(dict.fromkeys((winner, *SHOWN, LOGISTIC)))
    machine = f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}"
    lines = [
        f"The rule chooses **{winner}**.",
        "",
        f'The choosing half, {len(chosen[LOGISTIC])} sets. Means in per cent; "no worse" and time: than logistic regression.',
        "",
        *overview(chosen),
        *each_set(chosen, shown),
        "",
        f"The reporting half, {len(reported[LOGISTIC])} sets, computed once after the choice:",
        "",
        *overview(reported),
        *each_set(reported, shown),
    ]
    return "\n".join([*lines, "", f"`python -m benchmarks.defaults labels`; {machine}.", ""])


def save(path: Path, halves: dict[str, Figures]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["half", "contender", "set", *MEASURES, "seconds"])
        for half, figures in halves.items():
            for contender, rows in figures.items():
                for name, row in rows.items():
                    writer.writerow([half, contender, name, *(f"{v:.3f}" for v in row[:-1]), f"{row[-1]:.4f}"])


def load(path: Path) -> dict[str, Figures]:
    halves: dict[str, Figures] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for half, contender, name, *row in list(csv.reader(file))[1:]:
            halves.setdefault(half, {}).setdefault(contender, {})[name] = [float(v) for v in row]
    return halves


def main(keep: bool) -> None:
    """Choose, then report on the other half, in this order."""
    chosen = run(choosing(), list(CONTENDERS))
    winner = choice(chosen)
    print(f"The rule chooses {winner}", file=sys.stderr, flush=True)
    reported = run(reporting(), list(dict.fromkeys((winner, *SHOWN))))
    if keep:
        save(FIGURES, {"choosing": chosen, "reporting": reported})
        halves = load(FIGURES)  # rounded as they are kept
        RESULT.write_text(report(halves["choosing"], halves["reporting"]), encoding="utf-8")
    print(report(chosen, reported))
