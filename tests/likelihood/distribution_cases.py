"""Maps and scores for the tests of log p, entropies and divergences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import KINDS, back

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor

INF = math.inf
MAPS = {
    "softmax": Softmax(), "sparsemax": Sparsemax(), "entmax15": Entmax(1.5), "entmax3": Entmax(3.0), "topk": SparseSoftmax(k=4),
    "topp": SparseSoftmax(p=0.8), "budget": Budget(2), "normmax": NormMax(2.0), "taylor": Taylor(2), "sigsoftmax": Sigsoftmax(),
    "relu": Ratio.relu(), "normal": PerturbMax("normal"),
}  # fmt: skip
every_map = pytest.mark.parametrize("name", MAPS)
briefly = pytest.mark.whole(lambda name, kind: kind in ("jax", "strict") and name not in ("softmax", "sparsemax"))


def scores(rows=6, n=7, seed=0, sigma=0.7):
    return np.random.default_rng(seed).normal(0.3, sigma, (rows, n))


def probabilities(mapping, x):
    p = A.apply(mapping, np.asarray(x, np.float64))
    sums = p.sum(-1, keepdims=True)
    return p / np.where(sums > 0, sums, 1)


def tolerance(kind):
    return 3e-6 if kind == "jax" else 1e-12


def log_of(p, y):
    """log p of a class of each row, by NumPy."""
    with np.errstate(divide="ignore"):
        return np.log(np.take_along_axis(p, y[:, None], -1))[:, 0]


def slopes(kind, f, *arrays):
    """The value of f and the derivatives of its sum by each array, all as NumPy."""
    if kind == "torch":
        import torch

        leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
        value = f(*leaves)
        found = torch.autograd.grad(value.sum(), leaves)
    else:
        import jax

        leaves = [KINDS[kind](a) for a in arrays]
        value, found = f(*leaves), jax.grad(lambda *a: f(*a).sum(), tuple(range(len(leaves))))(*leaves)
    return back(value), *map(back, found)
