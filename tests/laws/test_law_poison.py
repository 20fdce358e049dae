"""NaN and +inf are contagious in their row and touch no other; -inf is a mask; the ends of the dtype are only numbers."""

import math

import laws
import numpy as np
import pytest
from cases import CASES, each_case, each_first, few_of_jax, on
from kinds import KINDS, back

import anymax as am

OTHERS = [k for k in KINDS if k != "numpy"]


@each_case
def test_poison(case):
    laws.poison(case.apply)


@each_case
def test_extremes(case):
    laws.extremes(case.apply, case.sums, positive_row=case.positive_row)


@few_of_jax
@each_first
@pytest.mark.parametrize("kind", OTHERS)
def test_poison_of_every_kind(case, kind):
    x = laws.scores(6, 9, seed=40, dtype=np.float32) + np.float32(0.5)
    mapping = on(case.mapping, KINDS[kind])
    clean = back(am.apply(mapping, KINDS[kind](x)))
    y = x.copy()
    y[1, 3], y[2, 0], y[3, 8] = math.nan, math.inf, -math.inf
    y[4] = -math.inf
    p = back(am.apply(mapping, KINDS[kind](y)))
    assert np.isnan(p[1:3]).all()
    assert p[3, 8] == 0
    assert np.isfinite(p[3]).all()
    assert (p[4] == 0).all()
    laws.same(p[[0, 5]], clean[[0, 5]])


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "taylor"])
def test_poison_among_many_rows(kind, name):
    """XLA's maximum of as many rows loses NaN on a CPU."""
    x = np.random.default_rng(0).normal(size=(1000, 32)).astype(np.float32)
    x[500, 7] = math.nan
    with am.use("reference"):
        p = back(am.apply(name, KINDS[kind](x)))
    assert np.isnan(p[500]).all()
    assert np.isfinite(np.delete(p, 500, 0)).all()


@few_of_jax
@each_first
@pytest.mark.parametrize("kind", OTHERS)
def test_extremes_of_every_kind(case, kind):
    big = np.finfo(np.float32).max
    rows = [[big, -big, 0, 1], [big, big, 1, 0], [-big, -big, -big, big / 2], [1e30, -1e30, 1, 0], [1e-40, 0, 0, 0]]
    mapping = on(case.mapping, KINDS[kind])
    p = back(am.apply(mapping, KINDS[kind](np.array(rows, np.float32))))
    assert np.isfinite(p).all()
    assert (p >= 0).all()
    keep = np.ones(5, bool)
    if case.id == "ratio-square":
        keep[4] = False  # XLA flushes subnormals to a row of zeros
    sums, (low, high) = p.sum(-1)[keep], case.sums(4)
    laws.close(sums, np.clip(sums, low, high), 1e-6 * max(1.0, high))


@each_case
def test_poison_by_position_in_a_batch(case):
    """Where the poisoned row stands, and along which axis, makes no difference to the others."""
    x = laws.scores(2, 7, 3, seed=41) + 0.5
    clean = case.apply(x, axis=1)
    y = x.copy()
    y[1, 2, 0] = math.nan
    p = case.apply(y, axis=1)
    assert np.isnan(p[1, :, 0]).all()
    p[1, :, 0] = clean[1, :, 0]
    laws.same(p, clean)


@each_case
def test_rows_do_not_know_each_other(case):
    """A batch is its rows, bit for bit: no row's iteration ends with another's."""
    x = np.stack([laws.scores(63, sigma=s, seed=i) for i, s in enumerate((0.01, 1.0, 30.0, 1e-6))]) + 0.1
    p = case.apply(x)
    for row, q in zip(x, p):
        laws.close(case.apply(row), q, 4e-16 * case.mass if case.tv is None else 1e-15)


@pytest.mark.parametrize(
    "verb", [am.threshold, am.logsumexp, am.inspection.jacobian_norm, am.log_apply], ids=lambda v: v.__name__
)
def test_poison_in_the_other_verbs(verb):
    x = laws.scores(4, 5, seed=42)
    run = (lambda a: verb(a)) if verb is am.logsumexp else (lambda a: verb(am.Entmax(1.5), a))
    clean, y = run(x), x.copy()
    y[2, 3] = math.nan
    out = run(y)
    clean, out = (a.tau if verb is am.threshold else a for a in (clean, out))
    assert np.isnan(out[2]).all()
    laws.same(out[[0, 1, 3]], clean[[0, 1, 3]])


def test_all_cases_are_poisoned():
    assert len(CASES) >= 30
