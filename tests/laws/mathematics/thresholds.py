"""Sections 3 and 4: threshold maps and sparsemax."""

from __future__ import annotations

import math

import numpy as np
import oracles
from scipy.optimize import minimize

import anymax as A
from anymax import Entmax, Softmax, Sparsemax

from . import checks, differences, gradient, lse, numbers, root, rows, simplex, subsets

X = rows()
SPARSE = numbers(oracles.entmax(2), X)


class Family:
    """omega, its derivatives and its link, written out as the page has them."""

    def __init__(self, mapping, oracle, omega, slope, curvature, link):
        self.mapping, self.omega, self.slope, self.curvature, self.link = mapping, omega, slope, curvature, link
        self.p = numbers(oracle, X)


def entmax(alpha):
    c = alpha - 1
    return Family(
        Entmax(alpha),
        oracles.entmax(alpha),
        lambda q: (q**alpha - q) / (alpha * c),
        lambda q: q**c / c - 1 / (alpha * c),
        lambda q: q ** (alpha - 2),
        lambda t: np.maximum(c * (t + 1 / (alpha * c)), 0) ** (1 / c),
    )


def xlogx(q):
    return q * np.log(np.where(q > 0, q, 1.0))


FAMILIES = (
    Family(Softmax(), oracles.softmax, lambda q: xlogx(q) - q, np.log, lambda q: 1 / q, np.exp),
    Family(
        Sparsemax(),
        oracles.entmax(2),
        lambda q: q * q / 2,
        lambda q: q,
        lambda q: np.ones_like(q),
        lambda t: np.maximum(t, 0),
    ),
    entmax(1.25),
    entmax(1.5),
    entmax(3.0),
)


@checks("kkt")
def kkt():
    for family in FAMILIES:
        for x, p in zip(X, family.p):
            inside = p > 0
            prices = x[inside] - family.slope(p[inside])  # tau, the same for all of the support
            assert np.ptp(prices) < 1e-9
            at_zero = -math.inf if family.mapping.name == "softmax" else float(family.slope(np.array(0.0)))
            assert np.all(x[~inside] - prices[0] <= at_zero + 1e-9)  # mu >= 0
            value = p @ x - family.omega(p).sum()
            others = simplex() @ x - family.omega(simplex()).sum(-1)
            assert np.all(value >= others - 1e-12)  # the conditions are sufficient
            np.testing.assert_allclose(p, family.link(x - prices[0]), atol=1e-9)
            np.testing.assert_allclose(A.apply(family.mapping, x), p, atol=1e-13)


@checks("threshold-unique")
def threshold_unique():
    for family in FAMILIES:
        for x, p in zip(X, family.p):
            low, high = (x.max() - float(family.slope(np.array(q))) for q in (1.0, 0.2))
            tau = root(lambda v: family.link(x - v).sum() - 1, low, high)  # noqa: B023
            np.testing.assert_allclose(family.link(x - tau), p, atol=1e-9)
            around = np.array([family.link(x - v).sum() for v in np.linspace(low - 1, high + 1, 50)])
            assert np.all(np.diff(around)[around[:-1] > 0] < 0)
            assert family.link(x - low).sum() >= 1 - 1e-12
            assert family.link(x - high).sum() <= 1 + 1e-12
        even, lead = np.zeros(5), np.array([99.0, 0.0, 0.0, 0.0, 0.0])  # both ends are reached
        for x, q in ((even, 0.2), (lead, 1.0)):
            tau = x.max() - float(family.slope(np.array(q)))
            np.testing.assert_allclose(family.link(x - tau).sum(), 1)


@checks("threshold-properties")
def threshold_properties():
    turn = np.array([3, 0, 4, 1, 2])
    for family in FAMILIES:
        order = np.argsort(X, -1)
        assert np.all(np.diff(np.take_along_axis(family.p, order, -1), axis=-1) >= 0)
        np.testing.assert_allclose(A.apply(family.mapping, X + 7.0), family.p, atol=1e-12)
        np.testing.assert_allclose(A.apply(family.mapping, X[:, turn]), family.p[:, turn], atol=1e-13)
        tau, moved = (A.threshold(family.mapping, v)[0] for v in (X, X + 7.0))
        np.testing.assert_allclose(moved - tau, 7.0, atol=1e-12)


def sensitivity(family, p):
    return np.where(p > 0, 1 / family.curvature(np.where(p > 0, p, 1.0)), 0.0)


@checks("threshold-jacobian")
def threshold_jacobian():
    for family in FAMILIES:
        for x, p in zip(X[:3], family.p):
            s = sensitivity(family, p)
            j = np.diag(s) - np.outer(s, s) / s.sum()
            np.testing.assert_allclose(A.jacobian(family.mapping, x), j, atol=1e-11)

            def tau(v):
                return root(lambda u: family.link(v - u).sum() - 1, v.max() - 9, v.max() + 9)  # noqa: B023

            def forward(v):
                return family.link(v - tau(v))  # noqa: B023

            np.testing.assert_allclose(differences(forward, x), j, atol=1e-7)
            slope = differences(lambda v: np.array([tau(v)]), x)[0]
            np.testing.assert_allclose(slope, s / s.sum(), atol=1e-7)


@checks("threshold-variance")
def threshold_variance():
    for family in FAMILIES:
        for x, p in zip(X, family.p):
            j, s = A.jacobian(family.mapping, x), sensitivity(family, p)
            w = s / s.sum()
            for v in rows(count=4, seed=5):
                np.testing.assert_allclose(v @ j @ v, s.sum() * (w @ v**2 - (w @ v) ** 2), atol=1e-10)
            np.testing.assert_allclose(j, j.T, atol=1e-12)
            np.testing.assert_allclose(j @ np.ones(5), 0, atol=1e-10)
            assert np.linalg.eigvalsh(j).min() > -1e-12


@checks("softmax-threshold")
def softmax_threshold():
    tau, size = A.threshold(Softmax(), X)
    np.testing.assert_allclose(tau, [lse(x) for x in X])
    assert np.all(size == 5)
    np.testing.assert_allclose(np.exp(X - tau[:, None]), A.softmax(X))
    steep = [FAMILIES[0].slope(np.array(10.0**-k)) for k in (10, 100, 300)]
    assert steep[2] < steep[1] < steep[0] < -20
    for family in FAMILIES:
        assert family.mapping.facts.sparse == (family.mapping.name != "softmax")


@checks("masks")
def masks():
    keep = np.array([True, False, True, True, False])
    for family in FAMILIES:
        p = A.apply(family.mapping, np.where(keep, X, -np.inf))
        np.testing.assert_allclose(p[:, keep], A.apply(family.mapping, X[:, keep]), atol=1e-14)
        assert np.all(p[:, ~keep] == 0)
        np.testing.assert_array_equal(p, A.apply(family.mapping, X, mask=keep))


@checks("threshold-subset")
def threshold_subset():
    x = rows(24, 8, 1.0, 2)
    for family in FAMILIES:
        for row in x:
            whole = float(A.threshold(family.mapping, row)[0])
            for part in (row[:7], row[::3], row.reshape(6, 4).max(1)):
                bound = float(A.threshold(family.mapping, part)[0])
                assert bound <= whole + 1e-12
                out = family.link(row - bound) == 0
                assert np.all(A.apply(family.mapping, row)[out] == 0)


# -- sparsemax --------------------------------------------------------------------------------------------------------------


@checks("sparsemax-projection")
def sparsemax_projection():
    for x, p in zip(X, SPARSE):
        np.testing.assert_allclose(A.sparsemax(x), p, atol=1e-14)
        distance = np.sum((simplex() - x) ** 2, -1)
        assert np.sum((p - x) ** 2) <= distance.min()
        linear = simplex() @ x - np.sum(simplex() ** 2, -1) / 2
        np.testing.assert_allclose(linear, (x @ x - distance) / 2)  # the two problems differ by a constant
        found = minimize(
            lambda q: np.sum((q - x) ** 2),  # noqa: B023
            np.full(5, 0.2),
            bounds=[(0, 1)] * 5,
            constraints={"type": "eq", "fun": lambda q: q.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-12},
        )
        np.testing.assert_allclose(found.x, p, atol=1e-4)
    assert (SPARSE == 0).mean() > 0.4


@checks("sparsemax-threshold")
def sparsemax_threshold():
    tau, size = A.threshold(Sparsemax(), X)
    for x, p, t, k in zip(X, SPARSE, tau, size):
        inside = p > 0
        np.testing.assert_allclose(t, (x[inside].sum() - 1) / inside.sum())
        assert k == inside.sum()
        good = []  # by brute force: the supports that are consistent
        for s in map(list, subsets(5)):
            level = (x[s].sum() - 1) / len(s)
            if np.all(x[s] > level) and np.all(np.delete(x, s) <= level):
                good.append(s)
        assert good == [np.flatnonzero(inside).tolist()]


@checks("sparsemax-sort")
def sparsemax_sort():
    for x, p in zip(rows(9, 60, 0.4, 3), numbers(oracles.entmax(2), rows(9, 60, 0.4, 3))):
        ranked = np.sort(x)[::-1]
        k = np.arange(1, 10)
        levels = (np.cumsum(ranked) - 1) / k
        np.testing.assert_allclose(levels[1:], (k[:-1] * levels[:-1] + ranked[1:]) / k[1:])
        inside = ranked > levels
        size = int((p > 0).sum())
        assert inside.tolist() == [True] * size + [False] * (9 - size)
        assert np.array_equal(inside, 1 + k * ranked > np.cumsum(ranked))
        assert np.all(np.diff(levels[:size]) >= 0)
        assert np.all(np.diff(levels[size - 1 :]) <= 1e-15)
        np.testing.assert_allclose(levels.max(), A.threshold(Sparsemax(), x)[0])


@checks("sparsemax-ties")
def sparsemax_ties():
    for x in ([1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0]):
        ranked = np.sort(x)[::-1]
        levels = (np.cumsum(ranked) - 1) / np.arange(1, len(x) + 1)
        strict, loose = levels[(ranked > levels).sum() - 1], levels[(ranked >= levels).sum() - 1]
        assert strict == loose
        np.testing.assert_allclose(A.sparsemax(x), np.maximum(np.array(x) - strict, 0))


@checks("hard-sigmoid")
def hard_sigmoid():
    t = np.linspace(-3, 3, 61)
    pair = np.stack([t, 0 * t], -1)
    np.testing.assert_allclose(A.sparsemax(pair)[:, 0], np.clip((t + 1) / 2, 0, 1), atol=1e-15)
    np.testing.assert_allclose(A.softmax(pair)[:, 0], 1 / (1 + np.exp(-t)))
    x = rows(3, 400, 1.0)
    leads = x[:, 0] - x[:, 1:].max(-1)
    assert np.array_equal(A.sparsemax(x)[:, 0] == 1.0, leads >= 1)
    assert 20 < (leads >= 1).sum() < 380
    np.testing.assert_allclose(A.sparsemax(simplex()), simplex(), atol=1e-15)


@checks("sparsemax-jacobian")
def sparsemax_jacobian():
    for x, p in zip(X, SPARSE):
        inside = (p > 0).astype(float)
        k = inside.sum()
        j = differences(lambda v: numbers(oracles.entmax(2), v), x, 1e-6)
        np.testing.assert_allclose(j, np.diag(inside) - np.outer(inside, inside) / k, atol=1e-8)
        np.testing.assert_allclose(A.jacobian(Sparsemax(), x), j, atol=1e-8)
        np.testing.assert_allclose(np.abs(j).sum() / 2, k - 1, atol=1e-7)
        np.testing.assert_allclose(A.inspection.jacobian_norm(Sparsemax(), x), k - 1, atol=1e-12)
        np.testing.assert_allclose(j @ j, j, atol=1e-7)
    for a, b in zip(X[1:], X):
        assert np.linalg.norm(A.sparsemax(a) - A.sparsemax(b)) <= np.linalg.norm(a - b)
        assert np.linalg.norm(A.softmax(a) - A.softmax(b)) <= np.linalg.norm(a - b) / 2


@checks("sparsemax-temperature")
def sparsemax_temperature():
    for x in X:
        ranked = np.sort(x)[::-1]
        enters = np.array([(ranked[:k] - ranked[k - 1]).sum() for k in range(1, 6)])
        last = 0
        for t in np.geomspace(0.01, 30, 80):
            size = int((A.sparsemax(x / t) > 0).sum())
            assert size == (enters < t).sum()
            assert size >= last
            last = size
        gap = ranked[0] - ranked[1]
        assert A.sparsemax(x / gap).max() > 1 - 1e-12
        assert A.sparsemax(x / (1.01 * gap)).max() < 1


@checks("penalties")
def penalties():
    """A linear model trained with an L1 penalty on its weights (proximal steps), or on its outputs."""
    rng = np.random.default_rng(0)
    features, classes = rng.normal(size=(80, 12)), 6
    y = (features[:, :2] @ rng.normal(size=(2, classes))).argmax(-1)
    w = np.zeros((12, classes))
    for _ in range(300):
        p = A.softmax(features @ w)
        w -= 0.5 * features.T @ (p - np.eye(classes)[y]) / len(y)
        w = np.sign(w) * np.maximum(np.abs(w) - 0.5 * 0.02, 0.0)
    assert (w == 0).mean() > 0.5
    assert (A.softmax(features @ w) > 0).all()
    assert (A.sparsemax(features @ w) == 0).any()
    for x in X:
        np.testing.assert_allclose(np.abs(A.softmax(x)).sum(), 1.0)
        np.testing.assert_allclose(gradient(lambda v: float(np.abs(A.softmax(v)).sum()), x), 0, atol=1e-9)
