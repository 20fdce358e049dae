"""Maps and scores for the tests of torch's derivatives."""

from __future__ import annotations

import numpy as np
import pytest
from cases import takes_an_index, whole

torch = pytest.importorskip("torch")

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor

# torch's own, in forward AD
its_own_warnings = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")

D = torch.float64

MAPS = whole(
    {
        "softmax": Softmax(),
        "sparsemax": Sparsemax(),
        "entmax1.5": Entmax(1.5),
        "entmax1.25": Entmax(1.25),
        "entmax1": Entmax(1.0),
        "entmax0.7": Entmax(0.7),
        "entmax3": Entmax(3.0),
        "entmax_rows": Entmax(torch.tensor([[1.0], [1.5], [3.0]], dtype=D)),
        "budget": Budget(1.5),
        "budget_sigmoid": Budget(1.5, "sigmoid"),
        "normmax": NormMax(2.0),
        "normmax1.5": NormMax(1.5),
        "taylor": Taylor(2),
        "sigsoftmax": Sigsoftmax(),
        "ratio": Ratio.sigmoid(),
        "ratio_traced": Ratio(lambda x: (1.0 + x * x).log1p()),
        "sparse_softmax_k": SparseSoftmax(k=3),
        "sparse_softmax_p": SparseSoftmax(p=0.8),
        "perturb_max": PerturbMax(),
        "perturb_gumbel": PerturbMax("gumbel"),
    }
)
FENCHEL = [n for n, m in MAPS.items() if m.facts.has_potential and takes_an_index(m)]
ROWS = [n for n in MAPS if n != "entmax_rows"]  # one mapping for any row
SLOW = ("entmax_rows", "perturb_max", "perturb_gumbel")
# of a family with several the short battery takes the others
KIN = ("entmax1.25", "entmax1", "entmax0.7", "normmax1.5", "budget_sigmoid", "perturb_gumbel")


def over(names):
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.whole) if n in KIN else n for n in names])


every_map, every_row_map, every_loss = over(MAPS), over(ROWS), over(FENCHEL)
T = torch.tensor([0, 3, 2])


def scores(seed=0, shape=(3, 6)):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def leaf(seed=0, shape=(3, 6)):
    return scores(seed, shape).requires_grad_()


def of(name):
    return lambda x: A.apply(MAPS[name], x)


def loss_of(name):
    return lambda x: A.fenchel_young(MAPS[name], x, T, reduction="sum")


def square_of(name):
    return lambda x: (A.apply(MAPS[name], x) ** 2).sum()


def differences(f, x, h=1e-6):
    """df/dx by central differences, [*f, *x], in NumPy."""
    x = x.detach()
    columns = []
    for i in np.ndindex(*x.shape):
        d = torch.zeros_like(x)
        d[i] = h
        columns.append((f(x + d) - f(x - d)).detach() / (2 * h))
    return torch.stack(columns, -1).reshape(*columns[0].shape, *x.shape)
