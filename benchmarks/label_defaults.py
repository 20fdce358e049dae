"""How the default of `MultiLabelMappingClassifier` is chosen: `python -m benchmarks.defaults labels`.

**Two parts.** Real sets from ANYMAX_DATA/multilabel (`python -m experiments.data.mulan` writes those of Mulan) choose. Four others
judge the choice, once: Enron, TMC2007, Corel5k and Birds, whole. This rule was written down before "sets" had a figure on one of the
four; the default before, "sigmoid" and logistic regression had some. What "sets" tunes, and by which score, had been tried on choosing
sets alone. A set that is not there is left out, and the program says so. Of a choosing set at most 1,200 random rows, the 1,000 features
that most rows have, and the 100 commonest labels stay; three folds test. Of a judging set everything stays; five folds test. Features
that are not 0 or 1 are standardised on the training rows. Rows without a label stay.

**Measures.** micro-F1, macro-F1 and equal sets (the share of test rows whose set is exactly right), in per cent; together they are their
mean. The F1 of rows is shown and counts for nothing. All figures are means over the folds.

**Time.** Seconds of a processor of all fits, divided by that of one-vs-rest logistic regression (scikit-learn's, at its defaults).

**Shortfall.** In micro-F1 and in equal sets, by how much a contender is below the better of two references: logistic regression, and
"sigmoid" with C = 0.3 (a logistic regression for each label, with one threshold for all, tuned for micro-F1). Where it isn't below, the
shortfall is 0.

**Rule.**

1. A contender qualifies if its fits take at most 2 times the time in sum over the choosing sets, and on nine sets of ten.
2. Of those, a contender stays if its mean shortfall over the choosing sets and both measures is within 0.2 points of the smallest.
3. The one with the highest mean over the choosing sets of the three measures together wins. All within 0.2 points of it tie with it.
4. Of these the one that takes the least time is the winner.
5. The winner becomes the default if its mean shortfall on the judging sets is below that of the default before.

The bar for a default, which the page reports: no shortfall on any judging set, and at most 2 times the time.
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
    "emotions", "flags", "foodtruck", "yeast", "scene", "medical", "genbase", "cal500", "bibtex", "delicious",
    "rcv1v2_subsets_pooled", "corel16k",
)  # fmt: skip
JUDGING = ("birds", "enron", "corel5k", "tmc2007")
KINDS: dict[str, dict[str, Any]] = {
    "sets": {"mapping": "sigmoid", "decision": "sets"},
    "sigmoid": {"mapping": "sigmoid", "decision": "threshold"},
    "softmax": {"mapping": "softmax"},
    "1.5-entmax, support": {"mapping": "entmax15"},
    "1.5-entmax, threshold": {"mapping": "entmax15", "decision": "threshold"},
    "ZLPR": {"mapping": "zlpr"},
}
# a kind, its values of C, and what is tuned
TRIED: tuple[tuple[str, tuple[float | str, ...], str], ...] = (
    ("sets", ("cv", 1.0, 0.3, 0.1), "auto"),
    ("sets", (0.3,), "f1_micro"),
    ("sets", (0.3,), "accuracy"),
    ("sigmoid", (1.0, 0.3, 0.1), "f1_micro"),
    ("sigmoid", (0.3,), "accuracy"),
    ("softmax", (0.3,), "f1_micro"),
    ("1.5-entmax, support", (0.3,), "f1_micro"),
    ("1.5-entmax, threshold", (0.3,), "f1_micro"),
    ("ZLPR", (0.3,), "f1_micro"),
)
CONTENDERS: dict[str, dict[str, Any]] = {
    f"{kind}, C = {C}, {scoring}": {**KINDS[kind], "C": C, "scoring": scoring}
    for kind, penalties, scoring in TRIED
    for C in penalties
}
LOGISTIC, SIGMOID, BEFORE = (
    "logistic regression",
    "sigmoid, C = 0.3, f1_micro",
    "1.5-entmax, support, C = 0.3, f1_micro",
)
MEASURES = ("micro-F1", "macro-F1", "equal sets", "F1 of rows")  # the first three count
COUNT, BARRED = 3, (0, 2)  # those in which a shortfall counts
TIMES, SETS_IN_TIME, TIE = 2.0, 0.9, 0.2
ROWS, FEATURES, LABELS = 1200, 1000, 100
CHOOSING_FOLDS, JUDGING_FOLDS = 3, 5

Data = tuple[str, np.ndarray, np.ndarray]  # name, features, labels


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


def choosing() -> Iterator[Data]:
    for name in CHOOSING:
        path = found(name)
        if path is not None:
            x, y, _ = kept(path)
            yield name, *some(x, y)


def some(x: Any, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Random rows, the commonest features and the commonest labels, each in the order of the set."""
    rows = np.random.default_rng(0).permutation(len(y))[:ROWS]
    x, y = x[rows], y[rows]
    features = np.sort(np.argsort(-np.asarray((x != 0).sum(axis=0)).reshape(-1), kind="stable")[:FEATURES])
    labels = np.sort(np.argsort(-y.sum(axis=0), kind="stable")[:LABELS])
    return x[:, features].toarray(), y[:, labels]


def judging() -> Iterator[Data]:
    for name in JUDGING:
        path = found(name)
        if path is not None:
            x, y, _ = kept(path)
            yield name, x.toarray(), y


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
    return makers | {LOGISTIC: lambda: OneVsRestClassifier(LogisticRegression())}


Figures = dict[str, dict[str, list[float]]]  # contender -> set -> its measures and its seconds


def run(sets: Iterator[Data], names: list[str], folds: int) -> Figures:
    from sklearn.model_selection import KFold  # late: an optional extra

    begun, out = time.monotonic(), {name: {} for name in (*names, LOGISTIC)}
    for name, x, y in sets:
        title = f"{name} ({len(x)} x {x.shape[1]}, {y.shape[1]} labels)"
        print(f"{time.monotonic() - begun:5.0f} s  {title}", file=sys.stderr, flush=True)
        splits = list(KFold(folds, shuffle=True, random_state=0).split(x))
        for contender, make in contenders(names).items():
            rows = []
            for train, test in splits:
                x_train, x_test = prepared(x[train], x[test])
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a label that no training row has; a solver that stops early
                    at = time.process_time()
                    model = make().fit(x_train, y[train])
                    seconds = time.process_time() - at
                    rows.append([*measured(y[test], model.predict(x_test)), seconds])
            out[contender][title] = np.mean(rows, axis=0).tolist()
    return out


# -- the rule ---------------------------------------------------------------------------------------------------------------------


def shortfalls(figures: Figures, contender: str) -> np.ndarray:
    """Of each set, in micro-F1 and in equal sets."""
    names = list(figures[LOGISTIC])
    own, *references = (np.array([figures[one][name] for name in names]) for one in (contender, LOGISTIC, SIGMOID))
    return np.maximum(np.maximum(*references) - own, 0.0)[:, BARRED]


def summed(figures: Figures) -> dict[str, dict[str, float]]:
    """Of each contender: the mean of each measure and of the three together, its mean shortfall, how often it has none, and its time in
    units of that of logistic regression."""
    names = list(figures[LOGISTIC])
    base = np.array([figures[LOGISTIC][name] for name in names])
    out = {}
    for contender, rows in figures.items():
        table, short = np.array([rows[name] for name in names]), shortfalls(figures, contender)
        found = {m: float(table[:, i].mean()) for i, m in enumerate(MEASURES)}
        found["together"] = float(table[:, :COUNT].mean())
        found["shortfall"] = float(short.mean())
        found |= {f"none in {MEASURES[i]}": float((part == 0).mean()) for i, part in zip(BARRED, short.T)}
        found["time"] = float(table[:, -1].sum() / base[:, -1].sum())
        found["in time"] = float((table[:, -1] <= TIMES * base[:, -1]).mean())
        out[contender] = found
    return out


def choice(figures: Figures) -> str:
    """The contender that wins on the choosing sets."""
    of = {name: row for name, row in summed(figures).items() if name != LOGISTIC}
    of = {name: row for name, row in of.items() if row["time"] <= TIMES and row["in time"] >= SETS_IN_TIME}
    least = min(row["shortfall"] for row in of.values())
    stay = [name for name in of if of[name]["shortfall"] <= least + TIE]
    top = max(of[name]["together"] for name in stay)
    tied = [name for name in stay if of[name]["together"] >= top - TIE]
    return min(tied, key=lambda name: of[name]["time"])


def default(parts: dict[str, Figures]) -> str:
    """The contender that becomes the default."""
    winner = choice(parts["choosing"])
    won, before = (float(shortfalls(parts["judging"], name).mean()) for name in (winner, BEFORE))
    return winner if won < before else BEFORE


# -- the page ---------------------------------------------------------------------------------------------------------------------


def overview(figures: Figures) -> list[str]:
    shares = [f"none in {MEASURES[i]}" for i in BARRED]
    head = [*MEASURES[:COUNT], "together", "shortfall", *shares, MEASURES[3]]
    lines = [f"| contender | {' | '.join(head)} | time | sets in time |", f"|---|{'---:|' * (len(head) + 2)}"]
    of = summed(figures)
    for name in sorted(of, key=lambda name: -of[name]["together"]):
        row = of[name]
        cells = [
            f"{100 * row[h]:.0f} %" if h in shares else format(row[h], ".2f" if h == "shortfall" else ".1f")
            for h in head
        ]
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


def report(parts: dict[str, Figures]) -> str:
    chosen, judged = parts["choosing"], parts["judging"]
    shown = list(dict.fromkeys((choice(chosen), BEFORE, SIGMOID, LOGISTIC)))
    machine = f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}"
    lines = [
        f"The winner is **{choice(chosen)}**; the default is **{default(parts)}**.",
        "",
        f"{len(chosen[LOGISTIC])} sets choose. Means in per cent; time is in units of that of logistic regression.",
        "",
        *overview(chosen),
        *each_set(chosen, shown),
        "",
        f"{len(judged[LOGISTIC])} sets judge, computed once after the choice:",
        "",
        *overview(judged),
        *each_set(judged, shown),
    ]
    return "\n".join([*lines, "", f"`python -m benchmarks.defaults labels`; {machine}.", ""])


def save(path: Path, parts: dict[str, Figures]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["part", "contender", "set", *MEASURES, "seconds"])
        for part, figures in parts.items():
            for contender, rows in figures.items():
                for name, row in rows.items():
                    writer.writerow([part, contender, name, *(f"{v:.3f}" for v in row[:-1]), f"{row[-1]:.4f}"])


def load(path: Path) -> dict[str, Figures]:
    parts: dict[str, Figures] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for part, contender, name, *row in list(csv.reader(file))[1:]:
            parts.setdefault(part, {}).setdefault(contender, {})[name] = [float(v) for v in row]
    return parts


def main(keep: bool) -> None:
    """Choose, then judge, in this order."""
    chosen = run(choosing(), list(CONTENDERS), CHOOSING_FOLDS)
    winner = choice(chosen)
    print(f"The winner is {winner}", file=sys.stderr, flush=True)
    judged = run(judging(), list(dict.fromkeys((winner, BEFORE, SIGMOID))), JUDGING_FOLDS)
    if keep:
        save(FIGURES, {"choosing": chosen, "judging": judged})
        RESULT.write_text(report(load(FIGURES)), encoding="utf-8")  # rounded as they are kept
    print(report({"choosing": chosen, "judging": judged}))
