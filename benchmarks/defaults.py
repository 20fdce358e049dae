"""Which defaults the classifiers should have: mean ranks over many sets, `python -m benchmarks.defaults labels`, and `classes`.

Of `labels` (`MultiLabelMappingClassifier`) the sets are those of ANYMAX_DATA/multilabel that are there (Mulan's, with the official split
into training and test rows, or every third row as a test row), and sets made up by scikit-learn. Rows without a label
stay. Features that are not 0 or 1 are standardised on the training rows; nothing is tuned but what `fit` tunes. It takes some twenty
minutes on one core, and prints where it is.

The maps and the measures were fixed before the first run; that "none" as the most probable class means the empty set came after it, and
the same map was first with and without that rule. Penalties other than C = 1 came last, when the default had lost to logistic regression on
Birds: they are chosen on the other sets, and Birds takes no part in the ranks. A rank is that among the contenders on one set, 1 the
best, ties shared; one-vs-rest logistic regression (scikit-learn's, at its defaults) takes part.

Of `classes` (`MappingClassifier`) the sets are those inside scikit-learn, those of ANYMAX_DATA/text that are there, the rows of
ANYMAX_DATA/multilabel with one label, and sets made up by scikit-learn. Every third row, in a random order, tests; at most 1,500 rows
train. The maps are compared with each other at three penalties. Contenders, sets and measures were fixed before the
first whole run. It takes some five minutes on one core.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import multiprocessing
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("birds", "emotions", "flags", "foodtruck", "yeast", "scene", "medical", "genbase", "enron", "cal500")
RESULT = Path(__file__).parent / "results" / "estimators.md"
RESULT_OF_CLASSES = RESULT.with_name("classifiers.md")
KINDS: tuple[tuple[str, dict[str, Any], tuple[float, ...]], ...] = (
    ("softmax", {"mapping": "softmax"}, (1.0, 0.3, 0.1, 0.03)),
    ("1.5-entmax, support", {"mapping": "entmax15", "decision": "support"}, (1.0, 0.3)),
    ("sparsemax, support", {"mapping": "sparsemax", "decision": "support"}, (1.0, 0.3)),
    ("sigmoid", {"mapping": "sigmoid"}, (1.0, 0.3, 0.1)),
    ("ZLPR", {"mapping": "zlpr"}, (1.0, 0.3)),
    ("sigmoid at 1/2", {"mapping": "sigmoid", "threshold": 0.5}, (1.0,)),
)
CONTENDERS = {f"{name}, C = {C:g}": {**kind, "C": C} for name, kind, penalties in KINDS for C in penalties}
HELD = "birds"  # what the choice of a default is tested on, and so takes no part in it
SHOWN = (
    "softmax, C = 0.3",
    "softmax, C = 1",
    "1.5-entmax, support, C = 0.3",
    "sparsemax, support, C = 0.3",
    "sigmoid, C = 0.3",
    "ZLPR, C = 0.3",
)
LOGISTIC = "logistic regression"
MEASURES = ("micro-F1", "macro-F1", "F1 of rows", "equal sets")
MAPS = ("softmax", "entmax:alpha=1.25", "entmax15", "entmax:alpha=1.75", "sparsemax")
PENALTIES_OF_CLASSES = (0.1, 1.0, 10.0)
MEASURES_OF_CLASSES = ("accuracy", "Brier score", "log-loss")
MOST = 1500


def kept(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The features, the labels and which rows are for testing."""
    from scipy import sparse  # late: an optional extra

    z = np.load(path)
    shape = tuple(int(n) for n in z["X_shape"])
    x = sparse.csr_matrix((z["X_data"].astype(np.float64), z["X_indices"], z["X_indptr"]), shape=shape).toarray()
    y = np.unpackbits(z["Y"], axis=1)[:, : int(z["Y_shape"][1])].astype(np.int64)
    split = z["split"]
    test = split == 1 if (split == 1).any() else np.arange(len(y)) % 3 == 2
    return x, y, test


def sets(warn: bool = False) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """Names, features, labels, and which rows test."""
    from sklearn.datasets import make_multilabel_classification  # late: an optional extra

    folder = os.environ.get("ANYMAX_DATA")
    for name in NAMES:
        path = Path(folder or "", "multilabel", f"{name}.npz")
        if folder and path.exists():
            x, y, test = kept(path)
            yield name, x, y, test
            if name in ("emotions", "scene"):  # many rows without a label
                yield (
                    f"{name} less its two commonest labels",
                    x,
                    np.delete(y, np.argsort(-y.sum(axis=0))[:2], axis=1),
                    test,
                )
        elif warn:
            print(f"{name}: not there (ANYMAX_DATA/multilabel/{name}.npz)", file=sys.stderr)
    for seed, (k, each, empty) in enumerate(((5, 1, True), (8, 2, True), (12, 3, False), (20, 2, False))):
        size = {"n_samples": 900, "n_features": 40, "n_classes": k, "n_labels": each, "allow_unlabeled": empty}
        x, y = make_multilabel_classification(**size, random_state=seed)
        yield f"made up, {k} labels", x, y, np.arange(900) % 3 == 2


def prepared(x: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    plain = np.isin(x, (0.0, 1.0)).all(axis=0)
    mean, spread = x[~test].mean(axis=0), x[~test].std(axis=0)
    spread[spread == 0] = 1.0
    x = np.where(plain, x, (x - mean) / spread)
    return x[~test], x[test]


def measured(truth: np.ndarray, found: np.ndarray) -> list[float]:
    from sklearn.metrics import f1_score  # late: an optional extra

    f1 = [f1_score(truth, found, average=average, zero_division=0) for average in ("micro", "macro", "samples")]
    return [100.0 * value for value in (*f1, float((truth == found).all(axis=1).mean()))]


def contenders() -> dict[str, Callable[[], Any]]:
    from sklearn.linear_model import LogisticRegression  # late: an optional extra
    from sklearn.multiclass import OneVsRestClassifier

    from anymax.sklearn import MultiLabelMappingClassifier

    found: dict[str, Callable[[], Any]] = {
        name: lambda options=options: MultiLabelMappingClassifier(**options) for name, options in CONTENDERS.items()
    }
    return found | {LOGISTIC: lambda: OneVsRestClassifier(LogisticRegression(max_iter=5000))}


def fitted(task: tuple[str, str]) -> tuple[str, str, list[float]]:
    """The size of a set, a contender, and its measures and seconds of a processor there."""
    wanted, contender = task
    name, x, y, test = next(one for one in sets() if one[0] == wanted)
    train_x, test_x = prepared(x, test)
    at = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a label that no training row has
        model = contenders()[contender]().fit(train_x, y[~test])
    found = [*measured(y[test], model.predict(test_x)), time.process_time() - at]
    return f"{name} ({(~test).sum()} x {x.shape[1]}, {y.shape[1]} labels)", contender, found


def run(jobs: int = 1) -> tuple[list[str], dict[str, np.ndarray]]:
    """The names of the sets, and of each contender its measures and its seconds, [sets, 5]; `jobs` processes."""
    begun, names = time.monotonic(), []
    rows: dict[str, list[list[float]]] = {name: [] for name in contenders()}
    tasks = [(name, contender) for name, *_ in sets(warn=True) for contender in rows]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for name, contender, found in pool.imap(fitted, tasks):
            print(f"{time.monotonic() - begun:5.0f} s  {name}: {contender}", file=sys.stderr, flush=True)
            names += [name] if name not in names else []
            rows[contender].append(found)
    return names, {name: np.array(values) for name, values in rows.items()}


def ranks(values: np.ndarray) -> np.ndarray:
    """Of the values of one measure on one set, the largest first; ties share the mean of their places."""
    return np.array([(values > v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def report(names: list[str], found: dict[str, np.ndarray]) -> str:
    table = np.stack(list(found.values()))  # [contenders, sets, 5]
    choosing = [s for s, name in enumerate(names) if not name.startswith(HELD)]
    places = np.stack([[ranks(table[:, s, m]) for m in range(4)] for s in choosing]).mean(axis=0)  # [4, contenders]
    order = np.argsort(places.mean(axis=0), kind="stable")
    lines = [
        f"Mean ranks over {len(choosing)} sets (all but {HELD.capitalize()}); 1 is the best of {len(found)}. Seconds are of all fits.",
        "",
        f"| contender | {' | '.join(MEASURES)} | all four | seconds |",
        f"|---|{'---|' * 6}",
    ]
    for i in order:
        ranked = " | ".join(f"{place:.1f}" for place in places[:, i])
        lines.append(f"| {list(found)[i]} | {ranked} | {places[:, i].mean():.2f} | {table[i, :, 4].sum():.0f} |")
    shown = [name for name in found if name in (*SHOWN, LOGISTIC)]
    for m in (0, 3):
        lines += ["", f"{MEASURES[m]}, per cent:", "", f"| set | {' | '.join(shown)} |", f"|---|{'---|' * len(shown)}"]
        lines += [
            f"| {name} | {' | '.join(f'{found[one][s, m]:.1f}' for one in shown)} |" for s, name in enumerate(names)
        ]
    machine = f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}"
    return "\n".join([*lines, "", f"`python -m benchmarks.defaults labels`; {machine}.", ""])


# -- one class a row --------------------------------------------------------------------------------------------------------------


def sets_of_classes() -> Iterator[tuple[str, Any, np.ndarray]]:
    from sklearn import datasets  # late: an optional extra

    for name in ("iris", "wine", "breast_cancer", "digits"):
        yield (name, *getattr(datasets, f"load_{name}")(return_X_y=True))
    folder = os.environ.get("ANYMAX_DATA")
    for name in ("emotions", "scene", "birds"):
        path = Path(folder or "", "multilabel", f"{name}.npz")
        if folder and path.exists():
            x, y, _ = kept(path)
            one = y.sum(axis=1) == 1
            yield f"{name}, rows of one label", x[one], y[one].argmax(axis=1)
        else:
            print(f"{name}: not there (ANYMAX_DATA/multilabel/{name}.npz)", file=sys.stderr)
    for name, read in TEXTS.items():
        if folder and Path(folder, "text").is_dir():
            yield (name, *words(*read(Path(folder, "text"))))
        else:
            print(f"{name}: not there (ANYMAX_DATA/text)", file=sys.stderr)
    for seed, (k, informative, apart, noise) in enumerate(
        ((2, 5, 1.0, 0.0), (4, 8, 1.0, 0.1), (10, 10, 1.5, 0.0), (10, 15, 0.8, 0.1))
    ):
        x, y = datasets.make_classification(
            1500, 30, n_informative=informative, n_redundant=5, n_classes=k, n_clusters_per_class=1, class_sep=apart, flip_y=noise,
            random_state=seed,
        )  # fmt: skip
        yield f"made up, {k} classes{', a tenth of them wrong' if noise else ''}", x, y
    x, y = datasets.make_blobs(1500, 10, centers=20, cluster_std=4.0, random_state=0)
    yield "made up, 20 balls", x, y
    x, y = datasets.make_gaussian_quantiles(n_samples=1500, n_features=10, n_classes=4, random_state=0)
    yield "made up, 4 shells", x, y


def _lines(folder: Path, names: tuple[str, ...]) -> tuple[list[str], np.ndarray]:
    said, which = [], []
    for i, name in enumerate(names):
        lines = gzip.decompress((folder / f"{name}.gz").read_bytes()).decode("latin-1").splitlines()
        said += lines
        which += [i] * len(lines)
    return said, np.array(which)


def _banking(folder: Path) -> tuple[list[str], np.ndarray]:
    with gzip.open(folder / "banking77_train.csv.gz", "rt", encoding="utf-8", newline="") as file:
        rows = [(row["text"], row["category"]) for row in csv.DictReader(file)]
    return [text for text, _ in rows], np.unique([name for _, name in rows], return_inverse=True)[1]


def _clinc(folder: Path) -> tuple[list[str], np.ndarray]:
    with gzip.open(folder / "clinc150_full.json.gz", "rt", encoding="utf-8") as file:
        rows = json.load(file)["train"]
    return [text for text, _ in rows], np.unique([name for _, name in rows], return_inverse=True)[1]


TEXTS: dict[str, Callable[[Path], tuple[list[str], np.ndarray]]] = {
    "polarity": lambda folder: _lines(
        folder, ("sentence_polarity__rt-polarity.neg", "sentence_polarity__rt-polarity.pos")
    ),
    "subjectivity": lambda folder: _lines(
        folder, ("subjectivity__plot.tok.gt9.5000", "subjectivity__quote.tok.gt9.5000")
    ),
    "banking77": _banking,
    "clinc150": _clinc,
}


def words(said: list[str], y: np.ndarray) -> tuple[Any, np.ndarray]:
    """Some of the sentences, as tf-idf of their words."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # late: an optional extra

    some = np.random.default_rng(0).permutation(len(said))[: MOST * 3 // 2]
    return TfidfVectorizer(sublinear_tf=True, min_df=2).fit_transform([said[i] for i in some]), y[some]


def parted(x: Any, y: np.ndarray) -> tuple[Any, np.ndarray, Any, np.ndarray]:
    """Every third row tests, in a random order; of the others at most MOST train. Dense features are standardised on these."""
    order = np.random.default_rng(1).permutation(len(y))
    test = np.zeros(len(y), bool)
    test[order[::3]] = True
    train = np.flatnonzero(~test)[:MOST]
    seen = np.isin(y, y[train])  # a class that no training row has is none of the question
    test &= seen
    if isinstance(x, np.ndarray):
        mean, spread = x[train].mean(axis=0), x[train].std(axis=0)
        x = (x - mean) / np.where(spread > 0, spread, 1.0)
    return x[train], y[train], x[test], y[test]


def measured_of_classes(truth: np.ndarray, p: np.ndarray) -> list[float]:
    """All the larger the better: the accuracy in per cent, minus the Brier score, minus the log-loss."""
    right = p[np.arange(len(p)), truth]
    brier = (p * p).sum(axis=1) - 2 * right + 1
    with np.errstate(divide="ignore"):
        return [100.0 * float((p.argmax(axis=1) == truth).mean()), -float(brier.mean()), float(np.log(right).mean())]


def run_of_classes() -> tuple[list[str], dict[tuple[str, float], np.ndarray]]:
    """The names of the sets, and of each map and penalty its measures and its seconds, [sets, 4]."""
    from anymax.sklearn import MappingClassifier  # late: an optional extra

    begun, names = time.monotonic(), []
    rows: dict[tuple[str, float], list[list[float]]] = {(name, C): [] for C in PENALTIES_OF_CLASSES for name in MAPS}
    for name, x, y in sets_of_classes():
        x, y, x_test, y_test = parted(x, y)
        known, y = np.unique(y, return_inverse=True)
        names.append(f"{name} ({len(y)} x {x.shape[1]}, {len(known)} classes)")
        print(f"{time.monotonic() - begun:5.0f} s  {names[-1]}", file=sys.stderr, flush=True)
        for (mapping, C), found in rows.items():
            at = time.process_time()
            model = MappingClassifier(mapping, C=C, max_iter=5000).fit(x, y)
            p = model.predict_proba(x_test)
            found.append([*measured_of_classes(np.searchsorted(known, y_test), p), time.process_time() - at])
    return names, {contender: np.array(values) for contender, values in rows.items()}


def report_of_classes(names: list[str], found: dict[tuple[str, float], np.ndarray]) -> str:
    lines: list[str] = []
    for C in (1.0, *(C for C in PENALTIES_OF_CLASSES if C != 1)):
        table = np.stack([found[name, C] for name in MAPS])  # [maps, sets, 4]
        places = np.stack([[ranks(table[:, s, m]) for m in range(3)] for s in range(len(names))]).mean(
            axis=0
        )  # [3, maps]
        lines += [
            f"C = {C:g}: mean ranks over {len(names)} sets; 1 is the best of {len(MAPS)}. Seconds are of all fits.",
            "",
            f"| map | {' | '.join(MEASURES_OF_CLASSES)} | accuracy and Brier score | seconds |",
            f"|---|{'---|' * 5}",
        ]
        for i in np.argsort(places[:2].mean(axis=0), kind="stable"):
            ranked = " | ".join(f"{place:.1f}" for place in places[:, i])
            lines.append(f"| {MAPS[i]} | {ranked} | {places[:2, i].mean():.2f} | {table[i, :, 3].sum():.0f} |")
        lines.append("")
    for m, title, form in (
        (0, "Accuracy with C = 1, per cent", ".1f"),
        (1, "Brier score with C = 1, less is better", ".3f"),
    ):
        lines += [f"{title}:", "", f"| set | {' | '.join(MAPS)} |", f"|---|{'---|' * len(MAPS)}"]
        lines += [
            f"| {name} | {' | '.join(format(abs(found[one, 1.0][s, m]), form) for one in MAPS)} |"
            for s, name in enumerate(names)
        ]
        lines.append("")
    machine = f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}"
    return "\n".join([*lines, f"`python -m benchmarks.defaults classes`; {machine}.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("labels", "classes"), help="sets of labels, or one class a row")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes, for labels")
    parser.add_argument("--keep", action="store_true", help="write the tables into benchmarks/results")
    options = parser.parse_args()
    labels = options.what == "labels"
    text = report(*run(options.jobs)) if labels else report_of_classes(*run_of_classes())
    print(text)
    if options.keep:
        (RESULT if labels else RESULT_OF_CLASSES).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
