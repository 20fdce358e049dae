"""The cases of `anymax.sklearn`: fitting a linear classifier, beside LogisticRegression on the same data at the same tolerance."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .cases import OURS, Bar, Case, Workload

TOL, PATIENCE = 1e-4, 10_000  # both go on until no entry of the gradient is larger
PEER = "LogisticRegression(lbfgs)"


@functools.lru_cache(maxsize=1)
def data(note: str, shape: tuple[int, ...]) -> tuple[Any, np.ndarray]:
    """X [rows, features] and y; `shape` is (rows, features, classes)."""
    from sklearn.datasets import load_digits

    if note == "digits":
        return load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    return text(rng, *shape) if note.startswith("CSR") else planted(rng, *shape)


def planted(rng: Any, rows: int, features: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """A softmax model of random weights, of whose labels three in ten are luck."""
    x = rng.normal(size=(rows, features))
    scores = x @ rng.normal(size=(features, classes))
    return x, np.argmax(scores + 3 * rng.gumbel(size=scores.shape), axis=1)


def text(rng: Any, rows: int, features: int, classes: int, words: int = 66, own: float = 0.3) -> tuple[Any, np.ndarray]:
    """Bags of words by Zipf's law, three in ten from the 400 words of the class; tf-idf, rows of length 1, about 60 words left."""
    from scipy import sparse

    share = 1 / (np.arange(features) + 10.0)
    steps = np.cumsum(share / share.sum())
    topics = rng.integers(0, features, size=(classes, 400))
    y = rng.integers(0, classes, size=rows)
    word = np.minimum(np.searchsorted(steps, rng.random((rows, words))), features - 1)
    word = np.where(rng.random(word.shape) < own, topics[y[:, None], rng.integers(0, 400, size=word.shape)], word)
    ones, starts = np.ones(word.size), np.arange(0, word.size + 1, words)
    x = sparse.csr_matrix((ones, word.reshape(-1), starts), shape=(rows, features))
    x.sum_duplicates()
    seen = np.bincount(x.indices, minlength=features)
    x.data = np.log1p(x.data) * np.log((1 + rows) / (1 + seen))[x.indices]
    length = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).reshape(-1))
    x.data /= np.repeat(length, np.diff(x.indptr))
    return x, y


def fit(case: Case) -> Workload:
    from sklearn.linear_model import LogisticRegression

    from anymax.sklearn import MappingClassifier

    x, y = data(case.note, case.shape)
    ours = MappingClassifier(case.map, tol=TOL, max_iter=PATIENCE)
    theirs = LogisticRegression(tol=TOL, max_iter=PATIENCE)

    def check() -> str | None:
        """The gradient from `predict_proba` alone; for softmax also LogisticRegression's objective."""
        model = ours.fit(x, y)
        n, target = len(y), np.eye(len(model.classes_))[y]
        p = model.predict_proba(x)
        gradient = np.asarray(x.T @ (p - target)).T / n + model.coef_ / n
        worst = max(np.abs(gradient).max(), np.abs((p - target).mean(axis=0)).max())
        if worst > 1.001 * TOL:
            return f"an entry of the gradient is {worst:.2g} where {TOL:g} is allowed"
        if case.map == "softmax":
            here, there = (objective(m, x, y) for m in (model, theirs.fit(x, y)))
            if here > 1.001 * there:
                return f"objective {here:.6g}, LogisticRegression's is {there:.6g}"
        return None

    return Workload({OURS: lambda: ours.fit(x, y), PEER: lambda: theirs.fit(x, y)}, check, "native")


def objective(model: Any, x: Any, y: np.ndarray) -> float:
    chosen = model.predict_log_proba(x)[np.arange(len(y)), y]
    return float(-chosen.mean() + np.sum(model.coef_**2) / (2 * len(y)))


def sklearn_cases() -> Iterator[Case]:
    for note, shape in (
        ("dense", (5000, 100, 10)),
        ("digits", (1797, 64, 10)),
        ("CSR, 60 words a row", (20000, 47000, 100)),
    ):
        for name in ("softmax", "sparsemax", "entmax15"):
            bars = (Bar(PEER, at_most=1.0),)
            yield Case("sklearn", name, shape, fit, bars, dtype="float64", note=note, needs=("sklearn",))
