"""The grid: a verb in each layout of the classes, on each kind of array, with each kind of parameter, eager and compiled.

A row is a verb with its options and the parameter that it asks about. A cell is served, and held to NumPy's rows by the reference in fp64,
one row and one number at a time, and to central differences of these; or `REFUSED` has the sentence that refuses it. `test_grid.py` runs
them. A new verb, option, layout or parameter is a row here. A verb that `layout_cases.VERBS` has in a layout, and that no row asks
about, is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from plainly import entmax

import anymax as A
from anymax import distributed, linear, segments

ROWS, CLASSES = 3, 6
LAYOUTS = {"rows": A, "segments": segments, "layer": linear, "shards": distributed, "layer on shards": distributed}
LAYERS, SHARDED = ("layer", "layer on shards"), ("shards", "layer on shards")
PARAMETERS = ("number", "array", "learned", "learned array")
KINDS = ("numpy", "torch", "jax")
HOW = ("eager", "compiled")

X = np.random.default_rng(0).normal(size=(ROWS, CLASSES))
TARGET = np.array([int(np.argmax(X[0])), 2, 4])
LIKELY = np.argsort(-X, -1)[:, :2]  # classes that no map here gives zero
TEACHER = np.log(np.array([[0.5, 0.3], [0.6, 0.1], [0.2, 0.7]]))
SHARES = np.random.default_rng(1).dirichlet(np.ones(CLASSES), ROWS)
# "apart": so far that one class has all of p, and a draw is no chance
SCORES = {"scores": X, "shares": SHARES, "apart": 20.0 * X}
REFERENCE = X[:, ::-1] - 0.3 * X  # the scores of another layer
IDENTITY = np.eye(CLASSES)  # the weight of a layer whose features are the scores
CLASS_WEIGHT = np.linspace(0.5, 2.0, CLASSES)


class Row(NamedTuple):
    """A verb that the grid asks about."""

    # layout -> the name of the verb there, or a formula in its place; an output layer's verb has the same name on shards
    names: dict[str, Any]
    make: Any = A.Entmax  # the map of a parameter, or the name of the keyword that takes it
    value: float = 1.4  # of the parameter
    arguments: tuple[str, ...] = ()  # after the scores: names in `operands`
    options: Mapping[str, Any] = MappingProxyType({})  # of the verb, by keyword
    smooth: bool = True  # it has derivatives by the scores
    scores: str = "scores"  # in `SCORES`

    @property
    def layouts(self) -> dict[str, Any]:
        """`names` with the layers on shards."""
        return self.names | ({"layer on shards": self.names["layer"]} if "layer" in self.names else {})


def _everywhere(name: str, **more: str) -> dict[str, str]:
    return {"rows": name, "segments": f"segment_{name}", "shards": name, **more}


def divergence(mapping: Any, x: Any, y: Any, identity: Any, beta: float = 0.0) -> Any:
    """The divergence between the distributions of two rows of scores, in the place of a verb that `anymax` has of output layers alone."""
    p, q = A.apply(mapping, x), A.apply(mapping, y)
    m = (1.0 - beta) * p + beta * q if 0.0 < beta < 1.0 else q if beta else p
    kl = lambda a: np.sum(a * np.log(np.where(a > 0, a, 1.0) / np.where(m > 0, m, 1.0)), -1)  # noqa: E731
    return beta * kl(q) + (1.0 - beta) * kl(p) if 0.0 < beta < 1.0 else kl(p) if beta else kl(q)


KL = {"rows": divergence, "layer": "linear_kl"}
LOSS = {"rows": "fenchel_young", "segments": "segment_loss", "layer": "linear_loss", "shards": "fenchel_young"}
NLL = {"rows": "nll", "shards": "nll"}
EACH: dict[str, Any] = {"reduction": "none"}

GRID = {
    "apply, alpha of entmax": Row(_everywhere("apply")),
    "apply, alpha of normmax": Row(_everywhere("apply"), A.NormMax, 2.3),
    "apply, k of budget": Row(_everywhere("apply"), A.Budget, 1.7),
    "apply, bound of bounded": Row(_everywhere("apply"), A.Bounded, 0.45),
    "apply, scale of perturb-max": Row(_everywhere("apply"), lambda s: A.PerturbMax("logistic", scale=s), 0.8),
    "apply, scale of gumbel": Row(_everywhere("apply"), lambda s: A.PerturbMax("gumbel", scale=s), 0.8),
    "apply, score of a sink": Row(_everywhere("apply"), lambda s: A.Sink(A.Sparsemax(), s), 0.3),
    "log_apply": Row(_everywhere("log_apply"), value=1.1),
    "threshold": Row(_everywhere("threshold", layer="linear_threshold")),
    "logsumexp": Row(_everywhere("logsumexp"), "temperature", 0.7),
    "entropy": Row({"rows": "entropy", "segments": "segment_entropy"}, "alpha", 1.5, options={"kind": "tsallis"}, scores="shares"),
    "support": Row({"rows": "support"}, None, smooth=False, scores="shares"),
    "fenchel_young, alpha of entmax": Row(LOSS, arguments=("target",), options=EACH),
    "fenchel_young, alpha of normmax": Row(LOSS, A.NormMax, 2.3, ("target",), EACH),
    "fenchel_young, scale of perturb-max": Row(LOSS, lambda s: A.PerturbMax("logistic", scale=s), 0.8, ("target",), EACH),
    "fenchel_young, score of a sink": Row(LOSS, lambda s: A.Sink(A.Sparsemax(), s), 0.3, ("target",), EACH),
    "fenchel_young, a distribution": Row(LOSS, arguments=("shares",), options=EACH),
    "fenchel_young, label_smoothing": Row(LOSS, arguments=("target",), options=EACH | {"label_smoothing": 0.2}),
    "fenchel_young, weight": Row(LOSS, arguments=("target",), options=EACH | {"weight": "class_weight"}),
    "fenchel_young, mean": Row(LOSS, arguments=("target",), options={"reduction": "mean"}),
    "nll": Row(NLL, arguments=("likely",), options=EACH),
    "nll, label_smoothing": Row(NLL, value=1.05, arguments=("likely",), options=EACH | {"label_smoothing": 0.1}),
    "log_prob": Row({"rows": "log_prob", "layer": "linear_log_prob"}, arguments=("likely",)),
    "log_prob_entropy": Row(
        {"rows": "log_prob_entropy", "layer": "linear_log_prob_entropy", "shards": "log_prob_entropy"}, arguments=("likely",)
    ),
    "topk_kl": Row({"rows": "topk_kl", "layer": "linear_topk_kl"}, "temperature", 0.7, ("ids", "teacher")),
    "linear_kl, dense": Row(KL, value=1.05, arguments=("reference", "identity")),
    "linear_kl, reverse": Row(KL, value=1.05, arguments=("reference", "identity"), options={"beta": 1.0}),
    "linear_kl, sparse": Row(KL, arguments=("reference", "identity"), options={"beta": 0.3}),
    "sample": Row(_everywhere("sample"), value=1.5, options={"generator": 0}, smooth=False, scores="apart"),
}  # fmt: skip


def _kl(p: Any, q: Any) -> Any:
    return np.sum(p[p > 0] * np.log(p[p > 0] / q[p > 0]))


# row -> what its options say, in plain operations: f(the verb without the options at a target, the value of its parameter)
PLAINLY = {
    "fenchel_young, label_smoothing": lambda loss, _: loss(0.8 * np.eye(CLASSES)[TARGET] + 0.2 / CLASSES),
    "fenchel_young, weight": lambda loss, _: CLASS_WEIGHT[TARGET] * loss(TARGET),
    "fenchel_young, mean": lambda loss, _: np.mean(loss(TARGET)),
    "nll, label_smoothing": lambda loss, _: (
        0.9 * loss(LIKELY[:, 0]) + 0.1 * np.mean([loss(np.full(ROWS, c)) for c in range(CLASSES)], 0)
    ),
    "entropy": lambda _, alpha: (1.0 - np.sum(SHARES**alpha, -1)) / (alpha * (alpha - 1.0)),
    "logsumexp": lambda _, t: t * np.log(np.sum(np.exp(X / t), -1)),
    "linear_kl, reverse": lambda _, alpha: np.array(
        [np.sum((p := entmax(x, alpha)) * np.log(p / entmax(y, alpha))) for x, y in zip(X, REFERENCE)]
    ),
    "linear_kl, sparse": lambda _, alpha: np.array(
        [0.7 * _kl(p := entmax(x, alpha), m := 0.7 * p + 0.3 * (q := entmax(y, alpha))) + 0.3 * _kl(q, m) for x, y in zip(X, REFERENCE)]
    ),
    "topk_kl": lambda _, t: np.sum(
        np.exp(TEACHER) * (TEACHER - np.take_along_axis(X / t - np.log(np.sum(np.exp(X / t), -1, keepdims=True)), LIKELY, -1)), -1
    ),
}  # fmt: skip


APART = {
    ("segments", "segment_support"): "a count of classes, where the verb of rows gives a mask",
    ("rows", "kl"): "two maps and the scores of each; that of layers has one map, and its row a formula of its own",
}


class Cell(NamedTuple):
    row: str
    layout: str
    kind: str
    parameter: str
    how: str

    @property
    def id(self) -> str:
        return f"{self.row}: {self.layout}, {self.kind}, {self.parameter}, {self.how}"

    def fits(self, pattern: tuple[str, ...]) -> bool:
        return all(want in ("", got) for want, got in zip(pattern, self))


def cells() -> list[Cell]:
    """Every combination that is one: NumPy learns nothing and compiles nothing, and a formula is of NumPy."""
    every = (
        Cell(name, *rest)
        for name, row in GRID.items()
        for rest in itertools.product(row.layouts, KINDS, PARAMETERS if row.make else PARAMETERS[:1], HOW)
        if not callable(row.layouts[rest[0]]) or rest[1] == "numpy"
    )
    return [c for c in every if c.kind != "numpy" or (c.how == "eager" and not c.parameter.startswith("learned"))]


NO_PROCESSES = (TypeError, "expected this process's part of the scores, a torch tensor with group= or a JAX array")

# (row, layout, kind, parameter, how), "" for any -> (error, words); the first that fits counts
REFUSED: dict[tuple[str, str, str, str, str], tuple[type[Exception], str]] = {
    ("", "shards", "numpy", "", ""): NO_PROCESSES, ("", "layer on shards", "numpy", "", ""): NO_PROCESSES,
    ("fenchel_young, label_smoothing", "segments", "", "", ""): (TypeError, "no option 'label_smoothing'.*target as a distribution"),
    ("fenchel_young, score of a sink", "layer", "", "array", ""): (ValueError, "a sink has one score for all rows"),
    ("fenchel_young, score of a sink", "layer", "", "learned array", ""): (ValueError, "a sink has one score for all rows"),
    ("fenchel_young, weight", "segments", "", "", ""): (TypeError, "has no option 'weight'"),
}  # fmt: skip


def refusal(cell: Cell) -> tuple[type[Exception], str] | None:
    return next((words for pattern, words in REFUSED.items() if cell.fits(pattern)), None)
