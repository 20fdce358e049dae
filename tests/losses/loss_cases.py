"""The losses as a table: each loss of each map with its value by the definition, and the options that all of them take.

A map of `cases.py` comes by itself, and a new option is a row of OPTIONS, which the tests of rows, of segments and of output layers ask.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest
from cases import BY_ID, FIRST, Case, takes_an_index
from kinds import KINDS

import anymax as A
from anymax.functional.draws import one_draw

MORE = ("entmax-1.25", "entmax-0.9", "entmax-3", "normmax-1.5", "budget-1", "sparse_softmax-p0.9", "ratio-sigmoid")
CASES = {c.id: c for c in (*FIRST, *(BY_ID[name] for name in MORE)) if takes_an_index(c.mapping)}
MAPS = {name: case.mapping for name, case in CASES.items()}
POTENTIAL, WITHOUT = ({n: m for n, m in MAPS.items() if m.facts.has_potential is has} for has in (True, False))
SOFT = {n: m for n, m in POTENTIAL.items() if m.no_constant(smoothed=False) is None}  # with a loss of distributions

every_potential = pytest.mark.parametrize("name", POTENTIAL)


def rng(seed=0):
    return np.random.default_rng(seed)


def tolerance(kind):
    return 3e-6 if kind == "jax" else 1e-11  # without x64 JAX computes in fp32


def on_kinds(names, few=("sparsemax", "entmax-1.5")):
    """(name, kind) for all names on NumPy and torch, for a few elsewhere: they share the formula, and JAX compiles for long."""
    return pytest.mark.parametrize(
        ("name", "kind"), [(n, k) for n in names for k in KINDS if k in ("numpy", "torch") or n in few]
    )


# -- the losses ------------------------------------------------------------------------------------------------------------------

EPSILON = 1e-3  # of smoothed_nll


@functools.cache
def _p(case, row):
    return np.array([float(v) for v in case.oracle(np.array(row))])


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """One loss of one map. `formula(case, x, y, p)` of one row without masked classes, where it has one."""

    case: Case
    call: Callable  # (scores, target, weight=None, **options)
    formula: Callable | None = None
    weighs: bool = False  # as in torch, class weights are factors of the terms of a row, and else of its value
    soft: bool = True  # a target may be a distribution
    smooth: bool = True  # and it may be smoothed
    hidden: float | None = None  # the score of a class that the map hides, which is the last one here

    def takes(self, given):
        return (self.soft or given.get("target") is not _soft) and (self.smooth or not given.get("label_smoothing"))

    def of_row(self, x, y, y_weighed, p=None):
        if self.formula is not None:
            return self.formula(self.case, x, y_weighed, _p(self.case, tuple(x)) if p is None else p)
        return float(self.call(x, np.argmax(y) if y.max() == 1 else y))  # the row alone, without an option


def fenchel_young(case, x, y, p):
    return p @ x - case.omega(p) + case.omega(y) - y @ x


def nll(case, x, y, p):
    return -np.log(p[y > 0]) @ y[y > 0]


def smoothed_nll(case, x, y, p):
    return -np.log((p + EPSILON) / (1 + len(p) * EPSILON)) @ y


def accuracy_loss(case, x, y, p):
    return -p @ y


def stop_gradient_loss(case, x, y, p):
    return (p - y) @ x


def _losses():
    for name, m in MAPS.items():
        case, hidden = CASES[name], None
        if m.hidden is not None:
            case, hidden = next(c for c in BY_ID.values() if c.mapping == m.mapping), float(m.score)
        if m.facts.has_potential:
            formula = fenchel_young if case.omega is not None else None
            soft = m.no_constant(smoothed=False) is None and case.row != "SparseSoftmax"  # its Omega may be infinite
            smooth = m.no_constant(smoothed=True) is None
            call = functools.partial(A.fenchel_young, m)
            yield f"fenchel_young-{name}", Loss(case, call, formula, False, soft, smooth, hidden)
        if one_draw(m) != "none" and (not m.facts.sparse or name.startswith("ratio")):
            yield f"nll-{name}", Loss(case, functools.partial(A.nll, m), nll, True, hidden=hidden)
        if one_draw(m) != "none":
            call = functools.partial(A.smoothed_nll, m, epsilon=EPSILON)
            yield f"smoothed_nll-{name}", Loss(case, call, smoothed_nll, True, hidden=hidden)
        for formula in (accuracy_loss, stop_gradient_loss):
            call = functools.partial(getattr(A, formula.__name__), m)
            yield f"{formula.__name__}-{name}", Loss(case, call, formula, hidden=hidden)
    call = functools.partial(A.sparse_softmax_loss, k=2)
    yield "sparse_softmax_loss", Loss(CASES["sparse_softmax-k2"], call, fenchel_young, soft=False, smooth=False)


LOSSES = dict(_losses())
every_loss = pytest.mark.parametrize("loss", LOSSES)


def plain(loss, x, t, *, weight=None, mask=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, p=None):
    """The loss by its definition, a row at a time. `p`: of each row, where it is not that of x."""
    weight = np.ones(x.shape[1]) if weight is None else weight
    keep = (x > -np.inf) & (True if mask is None else mask)
    if loss.hidden is not None:
        x, keep, weight = (
            np.insert(x, x.shape[1], loss.hidden, 1),
            np.insert(keep, x.shape[1], True, 1),
            np.append(weight, 1),
        )
        t = t if t.ndim == 1 else np.insert(t, t.shape[1], 1.0 - t.sum(1), 1)
    n, indices, values, norms = x.shape[1], t.ndim == 1, [], []
    for i, (row, own) in enumerate(zip(x, keep)):
        if indices and t[i] == ignore_index:
            values.append(0.0)
            norms.append(0.0)
            continue
        y = np.eye(n)[t[i]] if indices else t[i]
        factor = weight @ y
        y = (1.0 - label_smoothing) * y + label_smoothing * own / own.sum()
        weighed = y * weight if loss.weighs else y
        value = loss.of_row(row[own], y[own], weighed[own], None if p is None else p[i][own])
        values.append(value if loss.weighs else factor * value)
        norms.append(factor if indices else 1.0)
    if reduction == "none":
        return np.array(values)
    return sum(values) / (1.0 if reduction == "sum" else sum(norms) or 1.0)


# -- the options -----------------------------------------------------------------------------------------------------------------
# Keywords of a loss, and "target" for what is no class index; functions get the indices and the number of classes.


def _weight(t, n):
    return np.linspace(0.5, 2.0, n)


def _classes(t, n):
    return ~np.isin(np.arange(n), [c for c in range(n) if c not in t][: max(1, n // 6)])


def _entries(t, n):
    return (rng(2).random((len(t), n)) < 0.7) | np.eye(n, dtype=bool)[t]


def _soft(t, n):
    return rng(3).dirichlet(np.ones(n), len(t))


def _ignored(t, n):
    return np.full(len(t), -100)


OPTIONS = {
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
    "mean": {},
    "weight": {"weight": _weight},
    "ignore_index": {"ignore_index": lambda t, n: int(t[3])},
    "label_smoothing": {"label_smoothing": 0.2, "reduction": "none"},
    "mask of classes": {"mask": _classes, "reduction": "none"},
    "mask of entries": {"mask": _entries},
    "distributions": {"target": _soft},
    "weighted distributions": {"target": _soft, "weight": _weight, "reduction": "sum"},
    "axis": {"axis": 0, "weight": _weight},
    "dim": {"dim": 0, "target": _soft},
    "all": {
        "weight": _weight, "ignore_index": lambda t, n: int(t[3]), "label_smoothing": 0.2, "mask": _entries, "reduction": "mean",
    },
    "smoothed masks": {"weight": _weight, "label_smoothing": 0.2, "mask": _classes, "reduction": "sum"},
    "all ignored": {"target": _ignored},
}  # fmt: skip


def option(name, t, n):
    """(target, keywords) of a row of OPTIONS."""
    given = {k: v(t, n) if callable(v) else v for k, v in OPTIONS[name].items()}
    return given.pop("target", t), given
