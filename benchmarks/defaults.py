"""Which defaults `MultiLabelMappingClassifier` should have: mean ranks over many sets, `python -m benchmarks.defaults`.

The sets are those of ANYMAX_DATA/multilabel that are there (Mulan's, with the official split into training and test rows, or every third
row as a test row), and sets made up by scikit-learn. Rows without a label stay. Features that are not 0 or 1 are standardised on the
training rows; nothing is tuned but what `fit` tunes. It takes some eight minutes on one core, and prints where it is.

The contenders and the measures were fixed before the first run; that "none" as the most probable class means the empty set came
after it, and the same map was first with and without that rule. A rank is that among the contenders on one set, 1 the best, ties
shared; one-vs-rest logistic regression (scikit-learn's, at its defaults) takes part.
"""

from __future__ import annotations

import argparse
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
CONTENDERS: dict[str, dict[str, Any]] = {
    "softmax": {"mapping": "softmax"},
    "1.5-entmax, support": {"mapping": "entmax15", "decision": "support"},
    "1.5-entmax, threshold": {"mapping": "entmax15", "decision": "threshold"},
    "sparsemax, support": {"mapping": "sparsemax", "decision": "support"},
    "sparsemax, threshold": {"mapping": "sparsemax", "decision": "threshold"},
    "sigmoid": {"mapping": "sigmoid"},
    "sigmoid at 1/2": {"mapping": "sigmoid", "threshold": 0.5},
    "ZLPR": {"mapping": "zlpr"},
    "ZLPR at 1/2": {"mapping": "zlpr", "threshold": 0.5},
}
LOGISTIC = "logistic regression"
MEASURES = ("micro-F1", "macro-F1", "F1 of rows", "equal sets")


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


def sets() -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    from sklearn.datasets import make_multilabel_classification  # late: an optional extra

    folder = os.environ.get("ANYMAX_DATA")
    for name in NAMES:
        path = Path(folder or "", "multilabel", f"{name}.npz")
        if folder and path.exists():
            yield (name, *kept(path))
        else:
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


def run() -> tuple[list[str], dict[str, np.ndarray]]:
    """The names of the sets, and of each contender its measures and its seconds, [sets, 5]."""
    begun, names = time.monotonic(), []
    rows: dict[str, list[list[float]]] = {name: [] for name in contenders()}
    for name, x, y, test in sets():
        names.append(f"{name} ({(~test).sum()} x {x.shape[1]}, {y.shape[1]} labels)")
        train_x, test_x = prepared(x, test)
        for contender, make in contenders().items():
            print(f"{time.monotonic() - begun:5.0f} s  {name}: {contender}", file=sys.stderr, flush=True)
            at = time.monotonic()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a label that no training row has
                model = make().fit(train_x, y[~test])
            rows[contender].append([*measured(y[test], model.predict(test_x)), time.monotonic() - at])
    return names, {name: np.array(values) for name, values in rows.items()}


def ranks(values: np.ndarray) -> np.ndarray:
    """Of the values of one measure on one set, the largest first; ties share the mean of their places."""
    return np.array([(values > v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def report(names: list[str], found: dict[str, np.ndarray]) -> str:
    table = np.stack(list(found.values()))  # [contenders, sets, 5]
    places = np.stack([[ranks(table[:, s, m]) for m in range(4)] for s in range(len(names))]).mean(
        axis=0
    )  # [4, contenders]
    order = np.argsort(places.mean(axis=0), kind="stable")
    lines = [
        f"Mean ranks over {len(names)} sets, 1 the best of {len(found)}; and the seconds of all fits.",
        "",
        f"| contender | {' | '.join(MEASURES)} | all four | seconds |",
        f"|---|{'---|' * 6}",
    ]
    for i in order:
        ranked = " | ".join(f"{place:.1f}" for place in places[:, i])
        lines.append(f"| {list(found)[i]} | {ranked} | {places[:, i].mean():.2f} | {table[i, :, 4].sum():.0f} |")
    for m in (0, 3):
        lines += ["", f"{MEASURES[m]}, per cent:", "", f"| set | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
        lines += [f"| {name} | {' | '.join(f'{v:.1f}' for v in table[:, s, m])} |" for s, name in enumerate(names)]
    machine = f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}"
    return "\n".join([*lines, "", f"`python -m benchmarks.defaults`; {machine}.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help=f"write the tables to {RESULT.name} in benchmarks/results")
    options = parser.parse_args()
    text = report(*run())
    print(text)
    if options.keep:
        RESULT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
