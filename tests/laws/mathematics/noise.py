"""Section 9: perturbed argmax."""

from __future__ import annotations

import math

import numpy as np
import oracles
from scipy.special import expit, log_ndtr, ndtr, ndtri

import anymax as A
from anymax import PerturbMax

from . import checks, differences, gradient, lse, numbers, rows

X = rows(4, 6, 1.0)


class Law:
    def __init__(self, name, cdf, density, hazard, quantile, mean):
        self.name, self.cdf, self.density, self.hazard, self.quantile, self.mean = (
            name,
            cdf,
            density,
            hazard,
            quantile,
            mean,
        )


def normal_density(v):
    return np.exp(-0.5 * v * v) / math.sqrt(2 * math.pi)


LAWS = (
    Law("gumbel", lambda v: np.exp(-np.exp(-v)), lambda v: np.exp(-v - np.exp(-v)), lambda v: np.exp(-v),
        lambda t: -np.log(-np.log(t)), np.euler_gamma),
    Law("normal", ndtr, normal_density, lambda v: np.exp(-0.5 * v * v - log_ndtr(v)) / math.sqrt(2 * math.pi), ndtri, 0.0),
    Law("logistic", expit, lambda v: expit(v) * expit(-v), lambda v: expit(-v), lambda t: np.log(t / (1 - t)), 0.0),
)  # fmt: skip
GUMBEL, NORMAL, _ = LAWS

# Gauss-Legendre points on 60 panels of all levels that matter
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_EDGES = np.linspace(-12.0, 48.0, 121)
_HALF = np.diff(_EDGES)[:, None] / 2
U = (_EDGES[:-1, None] + _HALF + _HALF * _NODES).ravel()
W = (_HALF * _WEIGHTS).ravel()


def levels(x, law):
    """G, the distribution function of the perturbed maximum, at all points."""
    return np.prod(law.cdf(U - x[:, None]), 0)


def winning(x, law):
    """The probability of each class, from the definition."""
    return np.array([W @ (law.density(U - v) * levels(np.delete(x, i), law)) for i, v in enumerate(x)])


def expected_maximum(x, law):
    """E max = INT (1 - G) above 0 minus INT G below."""
    g = levels(x, law)
    return float(W @ np.where(U > 0, 1 - g, -g))


@checks("gumbel-max")
def gumbel_max():
    v = np.linspace(-2, 8, 30)
    for x in X:
        p = numbers(oracles.softmax, x)
        np.testing.assert_allclose(winning(x, GUMBEL), p, atol=1e-11)
        for i in range(4):
            rest = np.delete(x, i)
            density = GUMBEL.density(v - x[i]) * np.prod(GUMBEL.cdf(v - rest[:, None]), 0)
            np.testing.assert_allclose(density, np.exp(x[i] - v) * np.exp(-np.exp(-v) * np.exp(x).sum()))
        np.testing.assert_allclose(A.perturb_max(x, noise="gumbel"), p, atol=1e-12)
    draws = A.gumbel_max(np.broadcast_to(X[0], (40_000, 4)), generator=np.random.default_rng(0))
    share = np.bincount(draws, minlength=4) / 40_000
    np.testing.assert_allclose(share, A.softmax(X[0]), atol=4 * 0.5 / math.sqrt(40_000))


@checks("perturb-max")
def perturb_max():
    rng = np.random.default_rng(1)
    for law in LAWS:
        for x in X:
            p = winning(x, law)
            np.testing.assert_allclose(p.sum(), 1, atol=1e-11)
            np.testing.assert_allclose(A.perturb_max(x, noise=law.name), p, atol=1e-8)
            np.testing.assert_allclose(A.perturb_max(x + 5.0, noise=law.name), p, atol=1e-8)
            assert np.array_equal(np.argsort(x), np.argsort(p))
    x = X[0]
    i, k = np.argmax(x), np.argmin(x)
    noise = rng.normal(size=(2000, 4))
    swapped = noise.copy()
    swapped[:, [i, k]] = noise[:, [k, i]]
    won, after = np.argmax(x + noise, -1), np.argmax(x + swapped, -1)
    assert (won == k).any()
    assert np.all(after[won == k] == i)
    eps = rng.normal(size=100_000)
    mean = np.prod([ndtr(x[0] - x[j] + eps) for j in range(1, 4)], 0).mean()
    np.testing.assert_allclose(mean, A.perturb_max(x)[0], atol=0.006)


def by_quantiles(x, law, q):
    eps = law.quantile((np.arange(q) + 0.5) / q)
    out = [np.mean(np.exp(log_ndtr(v - np.delete(x, i)[:, None] + eps).sum(0))) for i, v in enumerate(x)]
    return np.array(out)


@checks("perturb-quantiles")
def perturb_quantiles():
    x = X[0]
    exact = winning(x, NORMAL)
    errors = [np.abs(by_quantiles(x, NORMAL, q) - exact).sum() / 2 for q in (16, 64, 256, 1024)]
    assert np.all(np.diff(errors) < 0)
    assert errors[-1] < 1e-3
    assert abs(by_quantiles(x, NORMAL, 16).sum() - 1) > 1e-4
    wide = rows(100, 1, 1.0)[0]
    mine = A.perturb_max(wide)
    far, near = (np.abs(by_quantiles(wide, NORMAL, q) - mine).sum() / 2 for q in (32, 1024))
    assert far > 0.03  # many classes
    assert near < 0.01


@checks("perturb-hazard")
def perturb_hazard():
    for law in LAWS:
        middle = U[(U > -5) & (U < 20)]
        np.testing.assert_allclose(law.hazard(middle), law.density(middle) / law.cdf(middle), rtol=1e-9)
        for x in X[:3]:
            exact, g = winning(x, law), levels(x, law)
            inside = g > 1e-300
            h = np.where(inside, law.hazard(np.where(inside, U - x[:, None], 0.0)), 0.0)
            np.testing.assert_allclose((g * h) @ W, exact, atol=1e-10)
            step = 1e-5
            rise = (np.prod(law.cdf(U + step - x[:, None]), 0) - np.prod(law.cdf(U - step - x[:, None]), 0)) / (
                2 * step
            )
            np.testing.assert_allclose(rise, g * h.sum(0), atol=1e-8)
            for few in (1, 3, 10):  # the second form, with any points
                at = np.linspace(x.max() - 1, x.max() + 2, few)
                weights = law.hazard(at - x[:, None])
                p = (weights / weights.sum(0)).mean(-1)
                np.testing.assert_allclose(p.sum(), 1)
                assert np.array_equal(np.argsort(x), np.argsort(p))
                moved = law.hazard(at + 3 - (x + 3)[:, None])
                np.testing.assert_allclose(moved, weights, rtol=1e-9)
                if law is GUMBEL:
                    np.testing.assert_allclose(p, A.softmax(x))
    np.testing.assert_allclose(A.perturb_max(X[0], noise="gumbel", nodes=8), A.softmax(X[0]), atol=1e-14)


@checks("perturb-potential")
def perturb_potential():
    for law in LAWS:
        for x in X:
            slope = gradient(lambda v: expected_maximum(v, law), x, 1e-3)  # noqa: B023
            np.testing.assert_allclose(slope, winning(x, law), atol=1e-9)
            value = expected_maximum(x, law)
            for t in range(4):
                loss = float(A.perturb_max_loss(x[None], np.array([t]), noise=law.name))
                np.testing.assert_allclose(loss, value - x[t] - law.mean, atol=1e-7)
                assert loss >= 0
            middle = expected_maximum((x + X[1]) / 2, law)
            assert middle <= (value + expected_maximum(X[1], law)) / 2 + 1e-12
            if law is GUMBEL:
                np.testing.assert_allclose(value, lse(x) + np.euler_gamma, atol=1e-10)


@checks("perturb-jacobian")
def perturb_jacobian():
    for law in LAWS:
        for x in X[:3]:
            j, g = A.jacobian(PerturbMax(law.name), x), levels(x, law)
            inside = g > 1e-300
            h = np.where(inside, law.hazard(np.where(inside, U - x[:, None], 0.0)), 0.0)
            shared = (g * h * W) @ h.T
            off = ~np.eye(4, dtype=bool)
            np.testing.assert_allclose(j[off], -shared[off], atol=1e-7)
            np.testing.assert_allclose(j.sum(-1), 0, atol=1e-8)
            assert np.linalg.eigvalsh(j).min() > -1e-8
            slopes = differences(lambda v: winning(v, law), x, 1e-3)  # noqa: B023
            np.testing.assert_allclose(slopes, j, atol=1e-6)


@checks("perturb-two")
def perturb_two():
    d = np.linspace(-2, 2, 41)
    pair = np.stack([d, 0 * d], -1)
    np.testing.assert_allclose(A.perturb_max(pair)[:, 0], ndtr(d / math.sqrt(2)), atol=1e-9)
    lead = d[d >= 0]
    triangle = np.where(lead < 1, 1 - (1 - lead) ** 2 / 2, 1.0)
    uniform = A.perturb_max(np.stack([lead, 0 * lead], -1), noise="uniform")
    np.testing.assert_allclose(uniform[:, 0], triangle, atol=1e-9)
    assert np.all(uniform[lead > 1.01, 1] == 0)


@checks("expected-accuracy")
def expected_accuracy():
    rng = np.random.default_rng(0)
    x, y = X, np.array([0, 1, 2, 3, 0, 1])
    p = A.perturb_max(x)
    right = np.mean(np.argmax(x + rng.normal(size=(50_000, 6, 4)), -1) == y, 0)
    np.testing.assert_allclose(p[np.arange(6), y], right, atol=0.01)
    np.testing.assert_allclose(A.accuracy_loss(PerturbMax(), x, y), -p[np.arange(6), y].mean())
    sharp = A.accuracy_loss(PerturbMax(scale=1e-4), x, y)
    np.testing.assert_allclose(-sharp, np.mean(x.argmax(-1) == y), atol=1e-6)


@checks("gumbel-softmax")
def gumbel_softmax():
    x = np.broadcast_to(X[1], (30_000, 4))
    hard = A.gumbel_max(x, generator=np.random.default_rng(3))
    for t in (0.01, 0.5, 5.0):
        soft = A.gumbel_softmax(x, t, generator=np.random.default_rng(3))
        assert np.array_equal(soft.argmax(-1), hard)
        np.testing.assert_allclose(soft.sum(-1), 1)
    share = np.bincount(soft.argmax(-1), minlength=4) / len(x)
    np.testing.assert_allclose(share, A.softmax(X[1]), atol=0.012)
    near = A.gumbel_softmax(x, 1e-4, generator=np.random.default_rng(3))
    assert np.mean(np.abs(near - np.eye(4)[hard]).max(-1) > 1e-3) < 0.01
