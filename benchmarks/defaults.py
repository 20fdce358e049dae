"""Which defaults the classifiers should have, over many sets: `python -m benchmarks.defaults labels`, and `classes`.

`labels` (`MultiLabelMappingClassifier`) follows the rule in `benchmarks.label_defaults`.

Of `classes` (`MappingClassifier`) the sets are those inside scikit-learn, those of ANYMAX_DATA/text that are there, the rows of
ANYMAX_DATA/multilabel with one label, and sets made up by scikit-learn. Every third row, in a random order, tests; at most 1,500 rows
train. The maps are compared with each other at three penalties. Contenders, sets and measures were fixed before the
first whole run. It takes some five minutes on one core.

Sets that had no part in this are only reported (`held_sets_of_classes`), at C = 1, beside scikit-learn's logistic regression.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import label_defaults
from .label_defaults import found as found_set
from .label_defaults import kept

RESULT_OF_CLASSES = Path(__file__).parent / "results" / "classifiers.md"
MAPS = ("softmax", "entmax:alpha=1.25", "entmax15", "entmax:alpha=1.75", "sparsemax")
PENALTIES_OF_CLASSES = (0.1, 1.0, 10.0)
MEASURES_OF_CLASSES = ("accuracy", "Brier score", "log-loss")
MOST = 1500


def ranks(values: np.ndarray) -> np.ndarray:
    """Of the values of one measure on one set, the largest first; ties share the mean of their places."""
    return np.array([(values > v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def sets_of_classes() -> Iterator[tuple[str, Any, np.ndarray]]:
    from sklearn import datasets  # late: an optional extra

    for name in ("iris", "wine", "breast_cancer", "digits"):
        yield (name, *getattr(datasets, f"load_{name}")(return_X_y=True))
    folder = os.environ.get("ANYMAX_DATA")
    for name in ("emotions", "scene", "birds"):
        for x, y in _rows_of_one_label(name):
            yield f"{name}, rows of one label", x.toarray(), y
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


def _rows_of_one_label(name: str) -> Iterator[tuple[Any, np.ndarray]]:
    path = found_set(name)
    if path is not None:
        x, y, _ = kept(path)
        one = y.sum(axis=1) == 1
        yield x[one], y[one].argmax(axis=1)


def held_sets_of_classes() -> Iterator[tuple[str, Any, np.ndarray]]:
    """Sets that had no part in a choice."""
    from sklearn import datasets  # late: an optional extra

    for name in ("medical", "bibtex", "tmc2007", "rcv1v2_subsets_pooled"):
        for x, y in _rows_of_one_label(name):
            yield f"{name}, rows of one label", x, y
    for seed, k, informative, apart, noise in ((20, 3, 6, 0.7, 0.2), (21, 12, 12, 1.0, 0.0), (22, 50, 20, 1.5, 0.05)):
        x, y = datasets.make_classification(
            2250, 40, n_informative=informative, n_redundant=5, n_classes=k, n_clusters_per_class=1, class_sep=apart, flip_y=noise,
            random_state=seed,
        )  # fmt: skip
        yield f"made up, {k} classes, {100 * noise:g} % of them wrong", x, y
    x, y = datasets.make_blobs(2250, 20, centers=100, cluster_std=5.0, random_state=23)
    yield "made up, 100 balls", x, y


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
        # [3, maps]
        places = np.stack([[ranks(table[:, s, m]) for m in range(3)] for s in range(len(names))]).mean(axis=0)
        lines += [
            f"C = {C:g}: mean ranks over {len(names)} sets; 1 is the best of {len(MAPS)}. Seconds are of all fits.",
            "",
            f"| map | {' | '.join(MEASURES_OF_CLASSES)} | accuracy and Brier score | seconds |",
            f"|---|{'---|' * 5}",
        ]
        for i in np.argsort(places[:2].mean(axis=0), kind="stable"):
            ranked = " | ".join(f"{place:.1f}" for place in places[:, i])
            lines.append(f"| {MAPS[i]} | {ranked} | {places[:2, i].mean():.2f} | {table[i, :, 3].sum():.1f} |")
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


def run_of_held_classes() -> tuple[list[str], dict[str, np.ndarray]]:
    """The names of the sets, and of each contender its measures and its seconds; a probability of 0 counts as 2.2e-16 in the log-loss."""
    from sklearn.linear_model import LogisticRegression  # late: an optional extra

    from anymax.sklearn import MappingClassifier

    contenders: dict[str, Callable[[], Any]] = {
        name: lambda name=name: MappingClassifier(name, max_iter=5000) for name in ("softmax", "entmax15", "sparsemax")
    }
    contenders |= {"logistic regression": lambda: LogisticRegression(max_iter=5000)}
    names: list[str] = []
    rows: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for name, x, y in held_sets_of_classes():
        x, y, x_test, y_test = parted(x, y)
        known, y = np.unique(y, return_inverse=True)
        names.append(f"{name} ({len(y)} x {x.shape[1]}, {len(known)} classes)")
        print(names[-1], file=sys.stderr, flush=True)
        for contender, found in rows.items():
            at = time.process_time()
            p = contenders[contender]().fit(x, y).predict_proba(x_test)
            p = np.maximum(p, np.finfo(np.float64).eps)
            found.append([*measured_of_classes(np.searchsorted(known, y_test), p), time.process_time() - at])
    return names, {contender: np.array(values) for contender, values in rows.items()}


def report_of_held_classes(names: list[str], found: dict[str, np.ndarray]) -> str:
    lines = [f"{len(names)} sets that had no part in the choice, C = 1:", ""]
    for m, form in ((0, ".1f"), (1, ".3f"), (2, ".2f")):
        title = ("accuracy, per cent", "Brier score, less is better", "log-loss, less is better")[m]
        lines += [f"Held out, {title}:", "", f"| set | {' | '.join(found)} |", f"|---|{'---:|' * len(found)}"]
        for s, name in enumerate(names):
            lines.append(f"| {name} | {' | '.join(format(abs(row[s, m]), form) for row in found.values())} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("labels", "classes"), help="sets of labels, or one class a row")
    parser.add_argument("--keep", action="store_true", help="write the tables into benchmarks/results")
    options = parser.parse_args()
    if options.what == "labels":
        label_defaults.main(options.keep)
        return 0
    text = report_of_classes(*run_of_classes()) + "\n" + report_of_held_classes(*run_of_held_classes())
    print(text)
    if options.keep:
        RESULT_OF_CLASSES.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
