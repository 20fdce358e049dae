"""The maps and the losses of the losses' tests."""

from __future__ import annotations

import numpy as np
import plainly
import pytest
from cases import takes_an_index, whole
from kinds import KINDS

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor

# name -> (map, p(x), Omega(p)), the last two by the definitions
FENCHEL = {
    "softmax": (Softmax(), plainly.softmax, plainly.neg_shannon),
    "sparsemax": (Sparsemax(), lambda x: plainly.entmax(x, 2.0), lambda p: 0.5 * (p @ p)),
    "entmax1.5": (Entmax(1.5), lambda x: plainly.entmax(x, 1.5), lambda p: plainly.neg_tsallis(p, 1.5)),
    "entmax1.25": (Entmax(1.25), lambda x: plainly.entmax(x, 1.25), lambda p: plainly.neg_tsallis(p, 1.25)),
    "entmax0.7": (Entmax(0.7), lambda x: plainly.entmax(x, 0.7), lambda p: plainly.neg_tsallis(p, 0.7)),
    "entmax3": (Entmax(3.0), lambda x: plainly.entmax(x, 3.0), lambda p: plainly.neg_tsallis(p, 3.0)),
    "normmax": (NormMax(2.0), lambda x: plainly.normmax(x, 2.0), lambda p: (p**2).sum() ** 0.5),
    "normmax1.5": (NormMax(1.5), lambda x: plainly.normmax(x, 1.5), lambda p: (p**1.5).sum() ** (1 / 1.5)),
}
POTENTIAL = {name: row[0] for name, row in FENCHEL.items()} | {
    "sparse_softmax_k": SparseSoftmax(k=2),
    "sparse_softmax_p": SparseSoftmax(p=0.8),
    "perturb_max": PerturbMax(),
    "budget1": Budget(1.0),
}
WITHOUT = {
    "taylor": Taylor(2),
    "sigsoftmax": Sigsoftmax(),
    "ratio_square": Ratio.square(),
    "ratio_sigmoid": Ratio.sigmoid(),
}
MAPS = {name: mapping for name, mapping in whole(POTENTIAL | WITHOUT).items() if takes_an_index(mapping)}
POTENTIAL, WITHOUT = ({n: m for n, m in MAPS.items() if m.facts.has_potential is has} for has in (True, False))
SOFT = {n: m for n, m in POTENTIAL.items() if m.no_constant(smoothed=False) is None}  # with a loss of distributions

every_potential = pytest.mark.parametrize("name", POTENTIAL)
every_map = pytest.mark.parametrize("name", MAPS)


def on_kinds(names, few=("sparsemax", "entmax1.5")):
    """(name, kind) for all names on NumPy and torch, for a few elsewhere: they share the formula, and JAX compiles for long."""
    return pytest.mark.parametrize(
        ("name", "kind"), [(n, k) for n in names for k in KINDS if k in ("numpy", "torch") or n in few]
    )


def rng(seed=0):
    return np.random.default_rng(seed)


def tolerance(kind):
    return 3e-6 if kind == "jax" else 1e-11  # without x64 JAX computes in fp32


def one_hot(t, n):
    return np.eye(n)[t]


# every loss as a function of (scores, class indices, **options), to be held to one law


def losses():
    table = {}
    for name, mapping in POTENTIAL.items():
        table[f"fenchel_young-{name}"] = lambda x, t, m=mapping, **o: A.fenchel_young(m, x, t, **o)
    for name, mapping in MAPS.items():
        if mapping.one_draw != "none" and (not mapping.facts.sparse or mapping.name == "ratio"):
            table[f"nll-{name}"] = lambda x, t, m=mapping, **o: A.nll(m, x, t, **o)
        if mapping.one_draw != "none":
            table[f"smoothed_nll-{name}"] = lambda x, t, m=mapping, **o: A.smoothed_nll(m, x, t, epsilon=1e-3, **o)
        table[f"accuracy_loss-{name}"] = lambda x, t, m=mapping, **o: A.accuracy_loss(m, x, t, **o)
        table[f"stop_gradient_loss-{name}"] = lambda x, t, m=mapping, **o: A.stop_gradient_loss(m, x, t, **o)
    table["sparse_softmax_loss"] = lambda x, t, **o: A.sparse_softmax_loss(x, t, k=2, **o)
    return table


LOSSES = losses()
every_loss = pytest.mark.parametrize("loss", LOSSES)
