"""Where the maps meet: temperatures 0 and infinity, and the members of a family that are another map."""

import math

import laws
import numpy as np
import pytest
from cases import CASES, each

import anymax as am

X = laws.scores(6, 63, sigma=2.0, seed=11)


@each([c for c in CASES if c.cold is None])
def test_cold(case):
    laws.cold(case.apply, case.mass)


@each([c for c in CASES if c.cold is not None])
def test_cold_refuted(case):
    laws.close(case.apply(np.array([2.0, 1.0]) / 1e-9), case.cold, 1e-8)


@each([c for c in CASES if not c.homogeneous and c.row != "SparseSoftmax" and c.between is None])
def test_warm(case):
    laws.warm(case.apply, case.mass)


@each([c for c in CASES if c.homogeneous])
def test_warm_refuted(case):
    laws.close(case.apply(X / 1e9), case.apply(X), 1e-14)


def test_warm_sparse_softmax():
    p = am.sparse_softmax(X / 1e30, k=5)
    assert ((p > 0).sum(-1) == 5).all()
    laws.close(p[p > 0], np.full(30, 0.2), 1e-12)


@pytest.mark.parametrize("alpha", [1 - 1e-7, 1 + 1e-7, 1 - 1e-12, 1 + 1e-12, 1 + 1e-15])
def test_entmax_near_1_is_softmax(alpha):
    laws.close(am.entmax(X, alpha), am.softmax(X), 8 * abs(alpha - 1) * 30 + 4e-16)
    laws.close(am.entmax(X, np.asarray([alpha])), am.softmax(X), 8 * abs(alpha - 1) * 30 + 4e-16)


@pytest.mark.parametrize(
    ("one", "other", "atol"),
    [
        (am.Entmax(1.0), am.Softmax(), 0.0),
        (am.Entmax(np.asarray([1.0])), am.Softmax(), 2e-16),
        (am.Entmax(2.0), am.Sparsemax(), 4e-16),
        (am.Entmax(np.asarray([2.0])), am.Sparsemax(), 4e-16),
        (am.Budget(1), am.Sparsemax(), 4e-16),
        (am.PerturbMax("gumbel"), am.Softmax(), 4e-16),
        (am.SparseSoftmax(k=63), am.Softmax(), 2e-16),
        (am.SparseSoftmax(k=1000), am.Softmax(), 2e-16),
        (am.SparseSoftmax(p=1.0), am.Softmax(), 2e-16),
        (am.NormMax(1 + 1e-9), am.Softmax(), math.inf),  # no limit of ours: it only has to be a distribution
    ],
    ids=str,
)
def test_members_that_are_another_map(one, other, atol):
    p = am.apply(one, X)
    laws.close(p, am.apply(other, X), atol)
    laws.close(p.sum(-1), np.ones(6), 1e-14)


def test_one_kept_class_is_argmax():
    np.testing.assert_array_equal(am.sparse_softmax(X, k=1), np.eye(63)[X.argmax(-1)])


def test_large_budget_is_everything():
    np.testing.assert_array_equal(am.budget(X, 63), np.ones_like(X))


def test_logsumexp_between_max_and_mean():
    exact = X.max(-1)
    np.testing.assert_array_equal(am.logsumexp(X, temperature=0), exact)
    last = math.inf
    for t in (10.0, 1.0, 0.1, 1e-2, 1e-4, 1e-300):
        value = am.logsumexp(X, temperature=t)
        assert np.all(value >= exact)
        assert np.all(value <= exact + t * math.log(63) + 1e-14)
        assert np.max(value - exact) <= last + 1e-14  # it falls with the temperature
        last = np.max(value - exact)
    laws.close(am.logsumexp(X, temperature=1e-4), exact, 1e-12)
    mean = am.logsumexp(X, temperature=1e6) - 1e6 * math.log(63)
    laws.close(mean, X.mean(-1), 1e-5)


def test_logsumexp_bad_rows():
    x = np.array([[-np.inf] * 3, [np.inf, 0, 1], [np.nan, 0, 1], [1e308, 1e308, 0]])
    out = am.logsumexp(x)
    assert out[0] == -np.inf
    assert out[1] == np.inf
    assert np.isnan(out[2])
    assert out[3] == 1e308
