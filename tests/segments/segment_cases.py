"""Entries, bounds and maps for the tests of ragged rows."""

import numpy as np
import pytest

from anymax import Budget, Entmax, NormMax, PerturbMax, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor
from anymax.kernels import native

# torch's own, inside forward AD and Dynamo
its_own_warnings = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*is deprecated:DeprecationWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
)

JAX = pytest.param("jax", marks=pytest.mark.whole)

LENGTHS = [4, 0, 5, 1, 3, 17, 0]
ENTRIES, COUNT = sum(LENGTHS), len(LENGTHS)
PTR = np.concatenate([[0], np.cumsum(LENGTHS)])
SORTED = np.repeat(np.arange(COUNT), LENGTHS)
SHUFFLED = np.random.default_rng(1).permutation(SORTED)
MAPS = [
    Softmax(), Sparsemax(), Entmax(1.5), Entmax(1.3), Entmax(3.0), Budget(1.0), NormMax(2.0), SparseSoftmax(k=2),
    SparseSoftmax(p=0.8), Taylor(2), Sigsoftmax(), PerturbMax("normal"),
]  # fmt: skip
by_map = pytest.mark.parametrize("mapping", MAPS, ids=repr)
FEW = [Softmax(), Sparsemax(), Entmax(1.3)]
by_few = pytest.mark.parametrize("mapping", FEW, ids=repr)
compiled = pytest.mark.skipif(isinstance(native.load(), str), reason="no engine")


def scores(*heads, dtype="float32", seed=0):
    return (np.random.default_rng(seed).normal(size=(ENTRIES, *heads)) * 2).astype(dtype)


def by_segment(x, index, verb):
    """verb(row) of each segment and head, of the shape of x."""
    out = np.empty_like(x)
    for s in range(COUNT):
        own = np.nonzero(index == s)[0]
        for head in np.ndindex(*x.shape[1:]):
            if len(own):
                out[(own, *head)] = verb(np.ascontiguousarray(x[(own, *head)]))
    return out


def each_segment(x, index, verb, empty, dtype=None):
    """verb(row) of each segment and head, [segments, heads ...]."""
    out = np.full((COUNT, *x.shape[1:]), empty, x.dtype if dtype is None else dtype)
    for s in range(COUNT):
        own = np.nonzero(index == s)[0]
        for head in np.ndindex(*x.shape[1:]):
            if len(own):
                out[(s, *head)] = verb(np.ascontiguousarray(x[(own, *head)]))
    return out


def targets(rng=5, heads=()):
    out = np.full((COUNT, *heads), -100)
    draw = np.random.default_rng(rng)
    for s in range(COUNT):
        own = np.nonzero(s == SHUFFLED)[0]
        for head in np.ndindex(*heads):
            if len(own):
                out[(s, *head)] = draw.choice(own)
    return out
