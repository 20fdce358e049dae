"""The derivative: formula against differences, symmetric and positive where p is a gradient, J1 = 0 where shifts change nothing."""

import math

import laws
import numpy as np
import pytest
from cases import BY_ID, CASES, each, each_case

import anymax as am

ROWS = [laws.scores(n, sigma=sigma, seed=20 + n) for n in (3, 5, 8) for sigma in (0.3, 1.0)]


@each_case
def test_jacobian(case):
    facts = case.mapping.facts
    formula = lambda x: am.jacobian(case.mapping, x)  # noqa: E731
    rows = [x for x in ROWS if len(x) >= case.mass]
    laws.jacobian(case.apply, formula, rows, facts.has_potential, facts.shift_invariant, kept=case.between is None)


@each([c for c in CASES if not c.mapping.facts.has_potential])
def test_symmetry_refuted(case):
    """A map without a potential has no symmetric Jacobian: a witness."""
    j = am.jacobian(case.mapping, np.array([1.0, 0.5, 2.0]))
    assert np.abs(j - j.T).max() > 1e-3


@each_case
def test_vjp_and_jvp_agree(case):
    """<u, J v> = <J^T u, v>, at 63 and 507 classes."""
    for n in (63, 507):
        x, u, v = laws.scores(3, n, seed=n)
        p = case.apply(x)
        left = u @ case.mapping.jvp(x, p, v, np)
        right = case.mapping.vjp(x, p, u, np) @ v
        assert abs(left - right) <= 1e-12 * max(1.0, abs(left)), (left, right)


@each_case
def test_jacobian_is_made_of_vjps(case):
    x = laws.scores(4, 7, seed=21)
    j, p = am.jacobian(case.mapping, x), case.apply(x)
    assert j.shape == (4, 7, 7)
    for i in range(7):
        g = np.broadcast_to(np.eye(7)[i], x.shape)
        laws.close(j[:, i], case.mapping.vjp(x, p, g, np), 1e-13)
        laws.close(j[:, :, i], case.mapping.jvp(x, p, g, np), 1e-13)
    laws.close(am.jacobian(case.mapping, np.moveaxis(x, -1, 0), axis=0), j, 1e-13)


@each_case
def test_masked_classes_have_no_derivative(case):
    x = laws.scores(7, seed=22) + 0.5
    x[[1, 4]] = -math.inf
    j = am.jacobian(case.mapping, x)
    assert np.isfinite(j).all()
    assert (j[[1, 4]] == 0).all()
    assert (j[:, [1, 4]] == 0).all()
    keep = np.isfinite(x)
    rest = am.jacobian(case.mapping, x[keep])
    laws.close(j[np.ix_(keep, keep)], rest, 1e-12 if case.tv is None else 1e-7)
    assert (am.jacobian(case.mapping, np.full(5, -math.inf)) == 0).all()
    if case.distribution:
        assert (am.jacobian(case.mapping, np.array([0.7])) == 0).all()


@each_case
def test_a_poisoned_row_has_a_poisoned_derivative(case):
    x = laws.scores(3, 5, seed=23) + 0.5
    clean = am.jacobian(case.mapping, x)
    for bad in (math.nan, math.inf):
        y = x.copy()
        y[1, 2] = bad
        j = am.jacobian(case.mapping, y)
        assert np.isnan(j[1]).all()
        laws.same(j[[0, 2]], clean[[0, 2]])


@each_case
def test_jacobian_norm(case):
    x = laws.scores(4, 6, seed=24)
    laws.close(
        am.inspection.jacobian_norm(case.mapping, x), 0.5 * np.abs(am.jacobian(case.mapping, x)).sum((-1, -2)), 1e-13
    )


@pytest.mark.parametrize("alpha", [3.0, 10.0])
def test_steep_rows_stay_finite(alpha):
    """Above alpha = 2 an entry at the edge has infinite slope; next to another its derivative cancels, and stays finite."""
    for gap in (1e-3, 1e-9, 1e-15, 0.0):
        x = np.array([0.0, -1 / (alpha - 1) + gap, -9.0])
        j = am.jacobian(am.Entmax(alpha), x)
        assert np.isfinite(j).all()
        laws.close(j.sum(1), np.zeros(3), 1e-12)
        laws.close(j, j.T, 1e-12)


@pytest.mark.parametrize("id", ["entmax-1.5", "budget-2.5", "normmax-2"])
def test_single_precision(id):
    for x in ROWS[:4]:
        x32 = x.astype(np.float32)
        j = am.jacobian(BY_ID[id].mapping, x32)
        assert j.dtype == np.float32
        laws.close(j, am.jacobian(BY_ID[id].mapping, x32.astype(np.float64)), 2e-5)
