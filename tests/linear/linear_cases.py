"""Maps, operands and the dense computation for the tests of output layers."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from kinds import KINDS

import anymax as A
from anymax import Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor

INF, NAN = math.inf, math.nan
ROWS, FEATURES, CLASSES = 7, 5, 60


@dataclasses.dataclass(frozen=True, eq=False)
class Squares(A.Separable):
    """Sparsemax, as a map of a user's own."""

    name = "squares"
    facts = A.Facts(monotone=True, shift_invariant=True, sparse=True, has_potential=True, margin=1.0)

    def omega_terms(self, q, xp):
        return 0.5 * q * q

    def link(self, t, xp):
        return xp.where(t > 0, t, 0.0 * t)

    def slope(self, q, xp):
        return q

    def curvature(self, q, xp):
        return xp.ones_like(q)


MAPS = {
    "softmax": Softmax(), "sparsemax": Sparsemax(), "entmax15": Entmax(1.5), "entmax1": Entmax(1.0), "entmax3": Entmax(3.0),
    "entmax08": Entmax(0.8), "topk": SparseSoftmax(k=4), "topp": SparseSoftmax(p=0.8), "normmax": NormMax(2.0), "squares": Squares(),
    "taylor": Taylor(2), "sigsoftmax": Sigsoftmax(), "relu": Ratio.square(), "normal": PerturbMax("normal"),
}  # fmt: skip
QUICK = (
    "softmax",
    "sparsemax",
    "entmax15",
    "entmax1",
    "entmax3",
    "topk",
    "squares",
)  # those that never need a whole row
SEVERAL = ("softmax", "entmax1", "sparsemax", "entmax15", "topk", "normmax", "taylor")
every_map = pytest.mark.parametrize("name", MAPS)


def tolerance(kind):
    return 2e-5 if kind == "jax" else 1e-10


def operands(seed=0, rows=ROWS, classes=CLASSES, sigma=0.8):
    rng = np.random.default_rng(seed)
    x, weight, bias = (
        rng.normal(size=(rows, FEATURES)),
        sigma * rng.normal(size=(classes, FEATURES)),
        rng.normal(size=classes),
    )
    return x, weight, bias, rng.integers(classes, size=rows), rng.uniform(0.3, 2.0, classes), rng.random(classes) < 0.8


def dense(mapping, scores, target, weight=None, **options):
    """The loss of all scores, as the map has it."""
    options = {"axis": -1, **options}
    if isinstance(mapping, SparseSoftmax):
        return A.sparse_softmax_loss(scores, target, weight, k=mapping.k, p=mapping.p, **options)
    loss = A.fenchel_young if mapping.facts.has_potential and not mapping.is_softmax else A.nll
    return loss(mapping, scores, target, weight, **options)


def made(kind, *arrays):
    return [KINDS[kind](a) if isinstance(a, np.ndarray) else a for a in arrays]


def torch_operands(dtype="float64", seed=0, **sizes):
    torch = pytest.importorskip("torch")
    x, weight, bias, y, *_ = operands(seed, **sizes)
    free = [torch.tensor(a, dtype=getattr(torch, dtype)).requires_grad_() for a in (x, weight, bias)]
    return torch, free, torch.tensor(y)
