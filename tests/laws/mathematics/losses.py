"""Sections 5 and 6: the loss from its gradient, and Fenchel-Young losses."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import sympy
from scipy.optimize import minimize

import anymax as A
from anymax import Budget, Entmax, NormMax, Ratio, Sigsoftmax, Softmax, Sparsemax, Taylor

from . import checks, gradient, lse, numbers, rows, simplex
from .softmax import kl, shannon

X = rows()
EYE = np.eye(5)
POTENTIALS = (Softmax(), Sparsemax(), Entmax(1.25), Entmax(1.5), Entmax(3.0), NormMax(2.0), Budget(1))
RATIOS = (Taylor(2), Taylor(4), Sigsoftmax(), Ratio.square(), Ratio.sigmoid())


def regulariser(mapping):
    """Omega as the page has it, 0 at a vertex."""
    if isinstance(mapping, Softmax):
        return lambda q: -shannon(q)
    if isinstance(mapping, NormMax):
        return lambda q: float(np.sum(q**mapping.alpha) ** (1 / mapping.alpha)) - 1
    alpha = mapping.alpha if isinstance(mapping, Entmax) else 2.0
    return lambda q: float(np.sum(q**alpha) - 1) / (alpha * (alpha - 1))


def loss_of(mapping, y):
    return lambda x: float(A.fenchel_young(mapping, x[None], y[None]))


def losses_of(mapping, x, y):
    """The losses of one row of scores against many targets."""
    return A.fenchel_young(mapping, np.broadcast_to(x, y.shape), y, reduction="none")


@checks("cross-entropy-fails")
def cross_entropy_fails():
    epsilon = 1e-3
    x = np.array([0.0, 2.0, 5.0])
    assert np.isinf(A.nll(Sparsemax(), x[None], np.array([0])))

    def smooth(v, t):
        return float(A.smoothed_nll(Sparsemax(), v[None], np.array([t]), epsilon=epsilon))

    for v in X:
        p = numbers(oracles.entmax(2), v)
        np.testing.assert_allclose(smooth(v, 1), -math.log((p[1] + epsilon) / (1 + 5 * epsilon)), rtol=1e-10)
        assert smooth(v, 1) <= math.log((1 + 5 * epsilon) / epsilon) + 1e-12
        if p[1] == 0:
            assert np.all(gradient(lambda w: smooth(w, 1), v, 1e-7) == 0)
    ends = np.array([0.0, 0.9]), np.array([0.0, -9.0])  # not convex: the middle is above the mean of the ends
    middle = (ends[0] + ends[1]) / 2
    assert smooth(middle, 1) > (smooth(ends[0], 1) + smooth(ends[1], 1)) / 2 + 1


@checks("symmetry")
def symmetry():
    a, b, beta = sympy.symbols("a b beta", real=True)
    u = sympy.Function("u")
    # u(a) u'(b) = u(b) u'(a): with b fixed, u' = beta u
    solution = sympy.dsolve(u(a).diff(a) - beta * u(a), u(a)).rhs
    ratio = solution / solution.subs(a, b)
    assert sympy.simplify(ratio - sympy.exp(beta * (a - b))) == 0
    for mapping in POTENTIALS:
        j = A.jacobian(mapping, X)
        np.testing.assert_allclose(j, np.swapaxes(j, -1, -2), atol=1e-11)
    for mapping, du in ((Taylor(2), lambda v: 1 + v), (Ratio.square(), lambda v: 2 * v)):
        w = {"taylor": lambda v: 1 + v + v * v / 2, "ratio": lambda v: v * v}[mapping.name]
        for x in X:
            z, p = w(x).sum(), w(x) / w(x).sum()
            np.testing.assert_allclose(A.jacobian(mapping, x), np.diag(du(x)) / z - np.outer(p, du(x)) / z, atol=1e-12)
    for mapping in RATIOS:
        j = A.jacobian(mapping, X)
        assert np.abs(j - np.swapaxes(j, -1, -2)).max() > 1e-2
        with pytest.raises(TypeError, match="its Jacobian is not symmetric"):
            A.fenchel_young(mapping, X, np.zeros(20, int))


def sparsemax_value(x):
    """F = 1/2 sum over the support of (x^2 - tau^2), from the sorted scores."""
    ranked = np.sort(x)[::-1]
    levels = (np.cumsum(ranked) - 1) / np.arange(1, len(x) + 1)
    k = int((ranked > levels).sum())
    return 0.5 * np.sum(ranked[:k] ** 2 - levels[k - 1] ** 2)


@checks("sparsemax-loss")
def sparsemax_loss():
    for x in X:
        p = numbers(oracles.entmax(2), x)
        np.testing.assert_allclose(gradient(sparsemax_value, x), p, atol=1e-8)
        for t in range(5):
            np.testing.assert_allclose(
                A.sparsemax_loss(x[None], np.array([t])), -x[t] + sparsemax_value(x) + 0.5, atol=1e-12
            )
    sure = np.array([4.0, 1.0, -2.0])
    np.testing.assert_allclose(sparsemax_value(sure) - sure[0], -0.5)
    t, x = sympy.symbols("tau x")
    assert sympy.expand((x**2 - t**2) / 2 - x).subs(t, x - 1).expand() == -sympy.Rational(1, 2)


@checks("sparsemax-loss-safe")
def sparsemax_loss_safe():
    for x in X:
        p = numbers(oracles.entmax(2), x)
        for t in range(5):
            safe = p @ (x - x[t]) + 0.5 * (1 - p @ p)
            np.testing.assert_allclose(safe, -x[t] + sparsemax_value(x) + 0.5, atol=1e-12)
    x = X[0].astype(np.float32) + np.float32(10_000)
    exact = -x.astype(float)[1] + sparsemax_value(x.astype(float)) + 0.5
    ranked = np.sort(x)[::-1]
    levels = ((np.cumsum(ranked) - 1) / np.arange(1, 6)).astype(np.float32)
    k = int((ranked > levels).sum())
    rough = np.float32(0.5) * np.sum(ranked[:k] ** 2 - levels[k - 1] ** 2) - x[1] + np.float32(0.5)
    assert abs(rough - exact) > 0.5
    np.testing.assert_allclose(A.sparsemax_loss(x[None], np.array([1])), exact, rtol=1e-5)


@checks("sparsemax-loss-zero")
def sparsemax_loss_zero():
    many = rows(3, 500)
    loss = A.sparsemax_loss(many, np.zeros(500, int), reduction="none")
    p = A.sparsemax(many)
    assert np.all(loss >= 0.5 * np.sum((p - np.eye(3)[0]) ** 2, -1) - 1e-12)
    leads = many[:, 0] - many[:, 1:].max(-1) >= 1
    assert np.array_equal(loss <= 1e-15, leads)
    assert 20 < leads.sum() < 480
    assert np.all(p[leads] == np.eye(3)[0])


@checks("modified-huber")
def modified_huber():
    t = np.linspace(-4, 4, 81)
    loss = A.sparsemax_loss(np.stack([t, 0 * t], -1), np.zeros(81, int), reduction="none")
    piece = np.where(t >= 1, 0.0, np.where(t >= -1, (1 - t) ** 2 / 4, -t))
    np.testing.assert_allclose(loss, piece, atol=1e-14)
    huber = np.where(t >= -1, np.maximum(0, 1 - t) ** 2, -4 * t)  # as Zhang (2004) has it
    np.testing.assert_allclose(loss, huber / 4, atol=1e-14)


@checks("stop-gradient")
def stop_gradient():
    torch = pytest.importorskip("torch")
    for mapping in (Sparsemax(), Softmax(), Taylor(2)):
        for row in X[:5]:
            x = torch.tensor(row, requires_grad=True)
            p = A.apply(mapping, x)
            y = torch.tensor(EYE[1])
            (right,) = torch.autograd.grad(((p - y).detach() * x).sum(), x, retain_graph=True)
            np.testing.assert_allclose(right, (p - y).detach(), atol=1e-14)
            (other,) = torch.autograd.grad(((p - y) * x.detach()).sum(), x)
            np.testing.assert_allclose(other, A.jacobian(mapping, row).T @ row, atol=1e-12)
            assert np.abs(other.numpy() - right.numpy()).max() > 1e-3
            loss = A.stop_gradient_loss(mapping, x[None], torch.tensor([1]))
            (mine,) = torch.autograd.grad(loss, x)
            np.testing.assert_allclose(mine, right, atol=1e-14)
    values = A.stop_gradient_loss(Sparsemax(), X, np.ones(20, int), reduction="none")
    assert values.min() < 0 < values.max()
    features = np.random.default_rng(2).normal(size=(60, 4))
    y = (features @ np.random.default_rng(3).normal(size=(4, 3))).argmax(-1)
    for mapping, better in ((Softmax(), True), (Taylor(2), False)):
        w, seen = np.zeros((4, 3)), []
        for _ in range(55):
            x = features @ w
            right = (x.argmax(-1) == y).mean()
            seen.append((A.stop_gradient_loss(mapping, x, y), float(A.nll(mapping, x, y)), right))
            w -= 0.5 * features.T @ (A.apply(mapping, x) - np.eye(3)[y]) / 60
        shown, watched, accuracy = np.array(seen)[[6, 54]].T
        assert accuracy[1] > accuracy[0]
        if better:  # a larger value where the model has become better by all that counts
            assert shown[1] > shown[0]
            assert watched[1] < 0.5 * watched[0]
        else:  # ten times smaller, for much the same model
            assert shown[1] < 10 * shown[0] < 0
            assert watched[1] > 0.9 * watched[0]


# -- Fenchel-Young ----------------------------------------------------------------------------------------------------------


@checks("conjugate")
def conjugate():
    for mapping in POTENTIALS:
        omega = regulariser(mapping)
        for x in X[:6]:
            p = A.apply(mapping, x)
            value = p @ x - omega(p)
            for q in simplex(count=60):
                assert q @ x - omega(q) <= value + 1e-12

            def potential(v):
                q = A.apply(mapping, v)  # noqa: B023
                return float(q @ v) - omega(q)  # noqa: B023

            np.testing.assert_allclose(gradient(potential, x), p, atol=1e-7)
            other = X[7]
            assert potential((x + other) / 2) <= (potential(x) + potential(other)) / 2 + 1e-12
    for x in X:
        p = A.softmax(x)
        np.testing.assert_allclose(p @ x + shannon(p), lse(x))
        q = A.sparsemax(x)
        np.testing.assert_allclose(q @ x - q @ q / 2, sparsemax_value(x))


@checks("fenchel-young")
def fenchel_young():
    for mapping in POTENTIALS:
        omega = regulariser(mapping)
        for x in X[:3]:
            p = A.apply(mapping, x)
            y = simplex(count=60)
            loss, other, middle = (losses_of(mapping, v, y) for v in (x, X[9], (x + X[9]) / 2))
            omegas = np.array([omega(q) for q in y])
            np.testing.assert_allclose(loss, p @ x - omega(p) + omegas - y @ x, atol=1e-11)
            assert np.all(loss >= -1e-12)
            assert np.all(middle <= (loss + other) / 2 + 1e-12)
            np.testing.assert_allclose(loss_of(mapping, p)(x), 0, atol=1e-12)
            assert loss_of(mapping, 0.9 * p + 0.02)(x) > 1e-5
            for y in (EYE[2], simplex()[4]):
                np.testing.assert_allclose(gradient(loss_of(mapping, y), x), p - y, atol=1e-7)


@checks("fenchel-young-safe")
def fenchel_young_safe():
    for mapping in POTENTIALS:
        omega = regulariser(mapping)
        for x in X[:6]:
            p = A.apply(mapping, x)
            targets = simplex(count=6)
            for y, loss in zip(targets, losses_of(mapping, x, targets)):
                for c in (0.0, 3.0, y @ x):
                    np.testing.assert_allclose(loss, (p - y) @ (x - c) - omega(p) + omega(y), atol=1e-11)
            np.testing.assert_allclose(loss_of(mapping, EYE[3])(x), p @ (x - x[3]) - omega(p), atol=1e-11)
        y = np.array([[0.5, 0.25, 0.25, 0.0, 0.0]])
        far = A.fenchel_young(mapping, X + 1e6, np.broadcast_to(y, X.shape))
        np.testing.assert_allclose(far, A.fenchel_young(mapping, X, np.broadcast_to(y, X.shape)), rtol=1e-8)


@checks("fenchel-young-kl")
def fenchel_young_kl():
    for x in X:
        p, q = numbers(oracles.softmax, x), numbers(oracles.entmax(2), x)
        y = simplex(count=30)
        divergence, own = np.array([kl(one, p) for one in y]), np.array([shannon(one) for one in y])
        np.testing.assert_allclose(losses_of(Softmax(), x, y), divergence, atol=1e-12)
        cross = A.cross_entropy(np.broadcast_to(x, y.shape), y, reduction="none")
        np.testing.assert_allclose(cross - own, divergence, atol=1e-12)
        distance = 0.5 * np.sum((y - x) ** 2, -1) - 0.5 * np.sum((q - x) ** 2)
        np.testing.assert_allclose(losses_of(Sparsemax(), x, y), distance, atol=1e-12)


@checks("proper")
def proper():
    pi = np.array([0.5, 0.3, 0.2, 0.0, 0.0])
    for mapping in (Softmax(), Sparsemax(), Entmax(1.5)):

        def expected(x):
            return float(pi @ losses_of(mapping, x, EYE))  # noqa: B023

        for x in X[:3]:
            np.testing.assert_allclose(gradient(expected, x), A.apply(mapping, x) - pi, atol=1e-7)
        best = minimize(expected, np.zeros(5), method="BFGS", options={"gtol": 1e-9}).x
        np.testing.assert_allclose(A.apply(mapping, best), pi, atol=1e-4)
    for alpha in (1.5, 2.0):  # omega' of pi are scores that give it, zeros included
        x = pi ** (alpha - 1) / (alpha - 1)
        np.testing.assert_allclose(A.entmax(x, alpha), pi, atol=1e-15)
        assert np.all(A.entmax(x, alpha)[3:] == 0)


@checks("separation-margin")
def separation_margin():
    for mapping, margin in ((Sparsemax(), 1.0), (Entmax(1.25), 4.0), (Entmax(1.5), 2.0), (Entmax(3.0), 0.5)):
        alpha = getattr(mapping, "alpha", 2.0)

        def slope(q):
            return (alpha * q ** (alpha - 1) - 1) / (alpha * (alpha - 1))  # noqa: B023

        np.testing.assert_allclose(slope(1.0) - slope(0.0), margin)
        assert mapping.facts.margin == pytest.approx(margin)
        at = np.array([margin, 0.0, -0.3])
        assert abs(loss_of(mapping, np.eye(3)[0])(at)) < 1e-15
        assert loss_of(mapping, np.eye(3)[0])(at - [0.05, 0, 0]) > 1e-10
    lead = np.array([30.0, 0.0, 0.0])
    assert loss_of(Softmax(), np.eye(3)[0])(lead) > 0
    assert Softmax().facts.margin is None


@checks("strong-convexity")
def strong_convexity():
    for x in X:
        y = simplex(count=60)
        p, q = numbers(oracles.entmax(2), x), numbers(oracles.softmax, x)
        assert np.all(losses_of(Sparsemax(), x, y) >= 0.5 * np.sum((y - p) ** 2, -1) - 1e-12)
        assert np.all(losses_of(Softmax(), x, y) >= 0.5 * np.abs(y - q).sum(-1) ** 2 - 1e-12)
