"""The table: one row a map of the catalogue, with its instances, their oracles and what can be asked of their accuracy.

Adding a map means adding a row; `test_meta.py` fails where one is missing. Every law of `test_law_*.py` runs over all cases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import oracles
import pytest

import anymax as am


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    id: str
    mapping: Any
    oracle: Callable  # row -> list of mpmath numbers
    ulps: float = 4.0  # worst error in fp32, in ulps of the largest probability
    ulps64: float = 8.0
    # instead, for a quadrature: the measured total variation error in fp32 and fp64
    tv: tuple[float, float] | None = None
    kkt: Callable | None = None  # (row, p) -> residual
    omega: Callable | None = None  # p -> the regulariser, up to a constant
    mass: float = 1.0  # the sum of p, or its upper bound
    # number of classes -> (lowest, highest) sum of p, where the sum is not the mass in every row
    between: Callable | None = None
    # number of classes -> a vertex as a target, where it is not the first classes up to the mass
    target: Callable | None = None
    potential: bool = True  # a convex loss exists
    soft_loss: bool = True  # its loss is 0 at a target that is not one class
    cold: tuple | None = None  # p of [2, 1] as the temperature falls to 0, where that is not the largest score's
    homogeneous: bool = False  # the temperature changes nothing
    disorder: tuple | None = None  # scores x_0 > x_1 with p_0 < p_1, where the map is not monotone
    positive_row: bool = False  # a row without a positive score has no distribution
    row: str = ""

    def apply(self, x, **options):
        return am.apply(self.mapping, x, **options)

    @property
    def distribution(self):
        """p of every row sums to 1."""
        return self.mass == 1 and self.between is None

    def sums(self, n):
        """The lowest and the highest sum of p in a row of n classes."""
        return (self.mass, self.mass) if self.between is None else self.between(n)


@dataclasses.dataclass(frozen=True)
class Row:
    name: str  # of the class, as in the catalogue
    cases: tuple[Case, ...]

    def __post_init__(self):
        for case in self.cases:
            object.__setattr__(case, "row", self.name)


def _tsallis(alpha):
    return lambda p: float(np.sum(p**alpha - p) / (alpha * (alpha - 1)))


def _entropy(p):
    p = p[p > 0]
    return float(np.sum(p * np.log(p)))


def _entmax(alpha, id=None, given=None, **options):
    return Case(
        id or f"entmax-{alpha:.7g}",
        am.Entmax(alpha if given is None else given),
        oracles.entmax(alpha),
        kkt=oracles.kkt_entmax(alpha),
        omega=_entropy if alpha == 1 else _tsallis(alpha),
        **options,
    )


def _budget(k):
    return Case(f"budget-{k:g}", am.Budget(k), oracles.budget(k), kkt=oracles.kkt_budget(k), mass=float(k))


def _bounded(alpha, **options):
    name = f"bounded-1-{alpha:g}"
    return Case(name, am.Bounded(1.0, alpha), oracles.bounded(1, alpha), kkt=oracles.kkt_entmax(alpha), **options)


def _open_budget(k, shape):
    oracle, kkt = oracles.open_budget(k, shape), oracles.kkt_open_budget(k, shape)
    return Case(f"budget-{k:g}-{shape}", am.Budget(k, shape), oracle, kkt=kkt, mass=float(k))


def _fusedmax(strength, **options):
    return Case(
        f"fusedmax-{strength:g}",
        am.Fusedmax(strength),
        oracles.fusedmax(strength),
        disorder=(0.5, -1.0, 1.0, 0.45),
        ulps=8,
        ulps64=16,
        **options,
    )


def _normmax(alpha, id=None, given=None, **options):
    return Case(
        id or f"normmax-{alpha:g}",
        am.NormMax(alpha if given is None else given),
        oracles.normmax(alpha),
        kkt=oracles.kkt_normmax(alpha),
        omega=lambda p: float(np.sum(p**alpha) ** (1 / alpha)),
        **options,
    )


def _ranks(strength, regularization="l2"):
    kl = regularization == "kl"
    return Case(
        f"ranks-{strength:g}" + ("-kl" if kl else ""),
        am.Ranks(strength, regularization),
        oracles.ranks(strength, kl),
        kkt=oracles.kkt_ranks(strength, kl),
        between=lambda n: (n * (n + 1) / 2,) * 2,
        target=lambda n: np.arange(n, 0.0, -1.0),
        cold=(2.0, 1.0),
    )


def _perturb(noise, *tv):
    return Case(f"perturb_max-{noise}", am.PerturbMax(noise), oracles.perturb_max(noise), tv=tv, soft_loss=False)


def _sink(inner, score, oracle, cold=(1.0, 0.0), **options):
    return Case(
        f"sink-{inner}",
        am.Sink(inner, score),
        oracles.sink(oracle, score),
        between=lambda n: (0.0, 1.0),
        cold=cold,
        **options,
    )


def _alone(id, mapping, link):
    """Each class by itself, with p from 0 to 1."""
    oracle = oracles.exact(lambda x: [link(v) for v in x])
    return Case(f"elementwise-{id}", mapping, oracle, between=lambda n: (0.0, float(n)), cold=(1.0, 1.0))


TABLE = (
    Row("Softmax", (Case("softmax", am.Softmax(), oracles.softmax, kkt=oracles.kkt_entmax(1.0), omega=_entropy),)),
    Row(
        "Sparsemax",
        (Case("sparsemax", am.Sparsemax(), oracles.budget(1), kkt=oracles.kkt_entmax(2.0), omega=_tsallis(2.0)),),
    ),
    Row(
        "Entmax",
        (
            _entmax(1.5),
            _entmax(0.5),
            _entmax(0.9),
            _entmax(1.0),
            _entmax(1 + 1e-6),
            _entmax(1.1),
            _entmax(1.25),
            _entmax(4 / 3, id="entmax-4/3"),
            _entmax(2.0),
            _entmax(3.0),
            _entmax(10.0),
            _entmax(1.75, id="entmax-array-1.75", given=np.asarray([1.75])),
            _entmax(3.5, id="entmax-array-3.5", given=np.asarray([3.5])),
        ),
    ),
    Row("Budget", (_budget(2), _budget(1), _budget(2.5), _open_budget(2, "sigmoid"), _open_budget(1.5, "laplace"))),
    # bounds below 1, and bounds that differ between classes, are in tests/mappings/test_bounded.py: no class then gets all
    Row("Bounded", (_bounded(2.0), _bounded(1.5), _bounded(1.0, ulps=16, ulps64=24))),
    Row("Fusedmax", (_fusedmax(0.3), _fusedmax(0.05))),
    Row("NormMax", (_normmax(2.0), _normmax(1.1, ulps=5), _normmax(1.5), _normmax(4.0, ulps64=16))),
    Row("Ranks", (_ranks(1.0), _ranks(0.1), _ranks(0.5, "kl"))),
    Row(
        "Taylor",
        tuple(
            Case(
                f"taylor-{order}",
                am.Taylor(order),
                oracles.taylor(order),
                potential=False,
                cold=(2**order / (2**order + 1), 1 / (2**order + 1)),
                disorder=disorder,
            )
            for order, disorder in ((2, (-1.0, -3.0)), (4, (-1.6, -4.0)), (6, (-2.2, -5.0)))
        ),
    ),
    Row("Sigsoftmax", (Case("sigsoftmax", am.Sigsoftmax(), oracles.sigsoftmax, potential=False),)),
    Row(
        "Ratio",
        (
            Case(
                "ratio-square",
                am.Ratio.square(),
                oracles.ratio(lambda v: v * v),
                potential=False,
                cold=(4 / 5, 1 / 5),
                homogeneous=True,
                disorder=(0.0, -1.0),
            ),
            Case(
                "ratio-sigmoid",
                am.Ratio.sigmoid(),
                oracles.ratio(lambda v: 1 / (1 + mp.exp(-v))),
                potential=False,
                cold=(1 / 2, 1 / 2),
            ),
            Case(
                "ratio-relu",
                am.Ratio.relu(),
                oracles.ratio(lambda v: max(v, mp.mpf(0))),
                potential=False,
                cold=(2 / 3, 1 / 3),
                homogeneous=True,
                positive_row=True,
            ),
            Case(
                "ratio-stablemax",
                am.Ratio.stablemax(),
                oracles.ratio(lambda v: v + 1 if v > 0 else 1 / (1 - v)),
                potential=False,
                cold=(2 / 3, 1 / 3),
            ),
        ),
    ),
    Row(
        "SparseSoftmax",
        (
            Case("sparse_softmax-k2", am.SparseSoftmax(k=2), oracles.sparse_softmax(k=2), omega=_entropy),
            Case("sparse_softmax-k5", am.SparseSoftmax(k=5), oracles.sparse_softmax(k=5)),
            # the nucleus changes with the scores and its logsumexp jumps there: locally a potential, not a convex one
            Case("sparse_softmax-p0.9", am.SparseSoftmax(p=0.9), oracles.sparse_softmax(p=0.9), potential=False),
        ),
    ),
    Row(
        "PerturbMax",
        (
            _perturb("normal", 2e-7, 1e-13),
            _perturb("gumbel", 2e-7, 1e-14),
            _perturb("uniform", 4e-6, 2e-6),  # beyond 24 classes; 1e-12 up to there
            _perturb("logistic", 4e-7, 2e-9),
        ),
    ),
    Row(
        "Sink",
        (
            _sink("softmax", 0.5, oracles.softmax),
            _sink("sparsemax", -1.25, oracles.budget(1)),
            _sink("entmax15", 0.0, oracles.entmax(1.5)),
            _sink("sigsoftmax", 0.5, oracles.sigsoftmax, potential=False),
        ),
    ),
    Row(
        "Softpick",
        (
            Case(
                "softpick",
                am.Softpick(0.0),
                oracles.softpick,
                potential=False,
                between=lambda n: (0.0, 1.0),
                cold=(1.0, 0.0),
            ),
        ),
    ),
    Row(
        "Elementwise",
        (
            _alone("sigmoid", am.Elementwise(), lambda t: 1 / (1 + mp.exp(-t))),
            _alone(
                "laplace",
                am.Elementwise(am.Budget(1, shape="laplace"), tau=0.5),
                lambda t: mp.exp(t - 0.5) / 2 if t < 0.5 else 1 - mp.exp(0.5 - t) / 2,
            ),
        ),
    ),
)

CASES = tuple(case for row in TABLE for case in row.cases)
FIRST = tuple(row.cases[0] for row in TABLE)  # one of each map, where a law costs much
BY_ID = {case.id: case for case in CASES}


def whole(own):
    """A test's own maps by name, and the first case of every map of the table that is not among them."""
    kinds = {type(mapping) for mapping in own.values()}
    return own | {case.id: case.mapping for case in FIRST if type(case.mapping) not in kinds}


def takes_an_index(mapping):
    """True if p may sum to 1, as a class index as target does."""
    lowest, highest = mapping.sums(None, np)
    return bool(np.all(lowest <= 1) and np.all(highest >= 1))


def each(cases=CASES, name="case"):
    """Parametrise a test over cases."""
    return pytest.mark.parametrize(name, cases, ids=lambda c: c.id)


each_case = each()
each_first = each(FIRST)
# JAX compiles each map: of the laws for every kind of array the short battery gives it these
few_of_jax = pytest.mark.whole(
    lambda case, kind: kind == "jax" and case.id not in ("softmax", "entmax-1.5", "taylor-2", "ranks-1")
)


def on(mapping, make):
    """The mapping with its array parameters made by `make`: of the same kind as the scores."""
    return mapping.replace(**{k: make(v) for k, v in mapping.params().items()})
