"""Sections 1 and 2: from argmax to softmax, and cross-entropy."""

from __future__ import annotations

import math

import numpy as np
import oracles
import sympy
from scipy.optimize import linprog, minimize
from scipy.stats import norm

import anymax as A
from anymax import Ratio, Sigsoftmax, Softmax, Taylor

from . import checks, differences, gradient, lse, numbers, rows, simplex

X = rows()
P = numbers(oracles.softmax, X)
EYE = np.eye(5)


@checks("argmax-variational")
def argmax_variational():
    for x in X:
        best = linprog(-x, A_eq=np.ones((1, 5)), b_eq=[1.0])
        np.testing.assert_allclose(-best.fun, x.max())
        np.testing.assert_allclose(best.x, EYE[x.argmax()], atol=1e-9)
        assert np.all(simplex() @ x <= x.max() + 1e-12)
    tied = np.array([1.0, 3.0, 3.0])
    for share in (0.0, 0.25, 1.0):  # their products and sums are exact
        assert np.array([0.0, share, 1.0 - share]) @ tied == 3.0


@checks("ratio-maps")
def ratio_maps():
    for mapping, u in (
        (Ratio.square(), lambda v: v * v),
        (Ratio.sigmoid(), lambda v: 1 / (1 + np.exp(-v))),
        (Ratio.relu(), lambda v: np.maximum(v, 0)),
        (Taylor(2), lambda v: 1 + v + v * v / 2),
    ):
        x = X[X.max(-1) > 0]
        p = A.apply(mapping, x)
        np.testing.assert_allclose(p, u(x) / u(x).sum(-1, keepdims=True), atol=1e-14)
        assert np.all(p >= 0)
    order = np.array([-2.0, 0.0, 1.0])
    square, sigmoid = (A.apply(m, order) for m in (Ratio.square(), Ratio.sigmoid()))
    assert square[0] > square[2] > square[1]
    assert sigmoid[0] < sigmoid[1] < sigmoid[2]


@checks("two-properties")
def two_properties():
    for x, p in zip(X, P):
        assert np.array_equal(np.argsort(x), np.argsort(p))
        np.testing.assert_allclose(p[:, None] / p, np.exp(x[:, None] - x))
        assert np.argmax(x + 3.0) == np.argmax(x)
        for c in (-700.0, 3.0, 1e5):
            np.testing.assert_allclose(A.softmax(x + c), p, rtol=1e-9)
    np.testing.assert_allclose(A.softmax(X), P, rtol=1e-13)


@checks("only-exponentials")
def only_exponentials():
    a, beta = sympy.symbols("a beta", real=True)
    g = sympy.Function("g")
    # g(a + c) = g(a) g(c), differentiated in c at 0, with beta = g'(0) and g(0) = 1
    solution = sympy.dsolve(sympy.Eq(g(a).diff(a), beta * g(a)), ics={g(0): 1}).rhs
    assert sympy.simplify(solution - sympy.exp(beta * a)) == 0
    for mapping in (Ratio.square(), Ratio.sigmoid(), Taylor(2), Taylor(4), Sigsoftmax()):
        moved = np.abs(A.apply(mapping, X + 1.0) - A.apply(mapping, X)).max()
        assert moved > 1e-2
        assert not mapping.facts.shift_invariant
    steeper = Ratio(lambda v: np.exp(2.5 * v), lambda v: 2.5 * np.exp(2.5 * v))
    np.testing.assert_allclose(A.apply(steeper, X + 1.0), A.softmax(2.5 * X), rtol=1e-12)


@checks("softmax-from-onehot")
def softmax_from_onehot():
    for x, p in zip(X, P):
        rough = np.exp(x - x.max())
        assert rough.max() == 1.0
        np.testing.assert_allclose(p, np.exp(x - lse(x)), rtol=1e-12)
        assert np.all(rough / 5 <= p)
        assert np.all(p <= rough)
    np.testing.assert_allclose(np.exp(40 * (X[0] - X[0].max())).sum(), 1.0, atol=1e-3)


def shannon(q):
    return float(-np.sum(q * np.log(np.where(q > 0, q, 1.0))))


def kl(q, p):
    return float(np.sum(q * np.log(np.where(q > 0, q, 1.0) / p)))


@checks("maximum-entropy")
def maximum_entropy():
    for x, p in zip(X, P):
        for q in simplex():
            np.testing.assert_allclose(q @ x + shannon(q), lse(x) - kl(q, p), atol=1e-12)
        found = minimize(
            lambda q: -(q @ x) - shannon(q),  # noqa: B023
            np.full(5, 0.2),
            bounds=[(1e-9, 1)] * 5,
            constraints={"type": "eq", "fun": lambda q: q.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-12},
        )
        np.testing.assert_allclose(found.x, A.softmax(x), atol=1e-4)
        np.testing.assert_allclose(-found.fun, A.logsumexp(x), atol=1e-8)


@checks("overflow")
def overflow():
    x = np.array([1000.0, 999.0, -1000.0])
    with np.errstate(over="ignore", invalid="ignore"):
        naive = np.exp(x) / np.exp(x).sum()
    assert np.isnan(naive).any()
    exact = numbers(oracles.softmax, x)
    shifted = np.exp(x - x.max())
    assert 1.0 <= shifted.sum() <= 3.0
    np.testing.assert_allclose(shifted / shifted.sum(), exact, rtol=1e-14)
    np.testing.assert_allclose(A.softmax(x), exact, rtol=1e-14)
    np.testing.assert_allclose(A.logsumexp(x), 1000.0 + math.log1p(math.exp(-1)), rtol=1e-15)


@checks("logsumexp-bounds")
def logsumexp_bounds():
    for x in X:
        for t in (0.01, 0.3, 1.0, 7.0):
            smooth = float(A.logsumexp(x, temperature=t))
            np.testing.assert_allclose(smooth, x.max() + t * lse((x - x.max()) / t), rtol=1e-12)
            assert x.max() <= smooth <= x.max() + t * math.log(5)
            largest = numbers(oracles.softmax, x / t).max()
            np.testing.assert_allclose(smooth - x.max(), -t * math.log(largest), atol=1e-9)
    np.testing.assert_allclose(A.logsumexp(np.ones(8), temperature=2.0), 1.0 + 2.0 * math.log(8))  # the bound is sharp
    np.testing.assert_allclose(A.logsumexp(X, temperature=1e-6), X.max(-1), atol=1e-5)


@checks("temperature-entropy")
def temperature_entropy():
    for x in X:
        for t in (0.4, 1.0, 3.0):

            def at(t):
                return numbers(oracles.softmax, x / t)  # noqa: B023

            p = at(t)
            slope = gradient(lambda v: v[0] * lse(x / v[0]), np.array([t]))[0]  # noqa: B023
            np.testing.assert_allclose(slope, shannon(p), rtol=1e-6)
            np.testing.assert_allclose(slope, A.entropy(A.softmax(x / t)), rtol=1e-6)
            bend = gradient(lambda v: shannon(at(v[0])), np.array([t]))[0]
            np.testing.assert_allclose(bend, (p @ x**2 - (p @ x) ** 2) / t**3, rtol=1e-5)


@checks("temperature-limits")
def temperature_limits():
    x = np.array([2.0, 2.0, 1.5, -1.0])
    for t in (0.02, 0.1, 0.5, 2.0):
        missing = 1.0 - numbers(oracles.softmax, x / t)[:2].sum()
        assert missing <= (4 - 2) / 2 * math.exp(-0.5 / t) + 1e-15
    np.testing.assert_allclose(A.softmax(A.temperature(1e-3)(x)), [0.5, 0.5, 0.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(A.softmax(A.temperature(1e6)(x)), 0.25, atol=1e-6)


@checks("softmax-jacobian")
def softmax_jacobian():
    x = sympy.symbols("x0:3", real=True)
    z = sum(sympy.exp(v) for v in x)
    p = [sympy.exp(v) / z for v in x]
    for i in range(3):
        for j in range(3):
            assert sympy.simplify(sympy.diff(p[i], x[j]) - (p[i] * int(i == j) - p[i] * p[j])) == 0
    for row, q in zip(X, P):
        np.testing.assert_allclose(A.jacobian(Softmax(), row), np.diag(q) - np.outer(q, q), atol=1e-14)


@checks("jacobian-norm")
def jacobian_norm():
    for x, p in zip(X, P):
        j = differences(lambda v: numbers(oracles.softmax, v), x)
        size = 0.5 * np.abs(j).sum()
        np.testing.assert_allclose(size, 1 - np.sum(p**2), atol=1e-9)
        np.testing.assert_allclose(A.inspection.jacobian_norm(Softmax(), x), 1 - np.sum(p**2), atol=1e-13)
        np.testing.assert_allclose(A.entropy(p, "renyi2"), -math.log(np.sum(p**2)), atol=1e-13)
    q = simplex()
    gini = 1 - np.sum(q**2, -1)
    assert np.all(gini <= 1 - 1 / 5 + 1e-12)
    assert np.all(gini <= 2 * (1 - q.max(-1)) + 1e-12)
    assert np.array_equal(gini < 1e-12, q.max(-1) > 1 - 1e-12)
    np.testing.assert_allclose(A.inspection.jacobian_norm(Softmax(), np.zeros(5)), 0.8)
    assert A.inspection.jacobian_norm(Softmax(), np.array([40.0, 0.0, 0.0])) < 1e-15


@checks("jacobian-variance")
def jacobian_variance():
    for x, p in zip(X, P):
        j = A.jacobian(Softmax(), x)
        for v in rows(count=5, seed=3):
            np.testing.assert_allclose(v @ j @ v, p @ v**2 - (p @ v) ** 2, atol=1e-13)
            assert v @ j @ v <= (v.max() - v.min()) ** 2 / 4 <= v @ v / 2
        values = np.linalg.eigvalsh(j)
        assert values.min() > -1e-15
        assert values.max() <= 0.5
        np.testing.assert_allclose(j @ np.ones(5), 0, atol=1e-15)
    np.testing.assert_allclose(np.linalg.eigvalsh(A.jacobian(Softmax(), np.zeros(2))), [0.0, 0.5], atol=1e-15)


# -- cross-entropy ----------------------------------------------------------------------------------------------------------


@checks("cross-entropy-gradient")
def cross_entropy_gradient():
    for x, p in zip(X[:6], P):
        for y in (EYE[0], *simplex(count=3)[:3]):
            slope = gradient(lambda v: -float(y @ (v - lse(v))), x)  # noqa: B023
            np.testing.assert_allclose(slope, p - y, atol=1e-8)
            mine = gradient(lambda v: float(A.cross_entropy(v[None], y[None])), x)  # noqa: B023
            np.testing.assert_allclose(mine, p - y, atol=1e-8)
            np.testing.assert_allclose(A.cross_entropy(x[None], y[None]), -(y @ np.log(p)), rtol=1e-12)


@checks("maximum-likelihood")
def maximum_likelihood():
    rng = np.random.default_rng(0)
    for x, p in zip(X, P):
        labels = rng.choice(5, size=50, p=p)
        share = np.bincount(labels, minlength=5) / 50
        per_label = -np.log(p[labels]).sum() / 50
        np.testing.assert_allclose(per_label, shannon(share) + kl(share, p))
        np.testing.assert_allclose(A.cross_entropy(np.broadcast_to(x, (50, 5)), labels), per_label)
        assert per_label >= shannon(share)


@checks("cross-entropy-never-stops")
def cross_entropy_never_stops():
    for x in X:
        hessian = differences(lambda v: gradient(lambda w: lse(w) - w[0], v, 1e-3), x, 1e-3)
        np.testing.assert_allclose(hessian, A.jacobian(Softmax(), x), atol=1e-6)
    leads = np.arange(1.0, 30.0)
    scores = np.stack([leads, 0 * leads], -1)
    pull = 1.0 - A.softmax(scores)[:, 0]
    assert np.all(pull > 0)
    assert np.all(np.diff(pull) < 0)
    assert A.facts(Softmax()).margin is None


@checks("logit-gap")
def logit_gap():
    for n in (2, 10, 1000):
        for x in rows(n, 50, 3.0):
            for t in (int(x.argmax()), 0):
                loss = float(A.cross_entropy(x[None], np.array([t])))
                assert loss >= math.log1p((n - 1) * math.exp(-(x[t] - x.min()))) - 1e-12
                assert x.max() - x.min() >= x[t] - x.min() - 1e-12
                assert x[t] - x.min() >= math.log(n - 1) - math.log(math.expm1(loss)) - 1e-9
                np.testing.assert_allclose(
                    A.logit_gap(loss, n), math.log(n - 1) - math.log(math.expm1(loss)), atol=1e-9
                )
        sharp = np.zeros(n)
        sharp[0] = 1.7
        np.testing.assert_allclose(A.logit_gap(float(A.cross_entropy(sharp[None], np.array([0]))), n), 1.7)
    np.testing.assert_allclose(A.logit_gap(math.log(2), 100), math.log(99))
    assert f"{math.log(99):.3f}" == "4.595"


@checks("label-smoothing")
def label_smoothing():
    n, epsilon = 5, 0.1
    for x, p in zip(X, P):
        per_class = -np.log(p)
        expected = (1 - epsilon) * per_class[2] + epsilon * per_class.mean()
        np.testing.assert_allclose(
            A.cross_entropy(x[None], np.array([2]), label_smoothing=epsilon), expected, rtol=1e-12
        )
    best = np.zeros(n)
    best[2] = math.log1p(n * (1 - epsilon) / epsilon)
    y = (1 - epsilon) * EYE[2] + epsilon / n
    np.testing.assert_allclose(A.softmax(best), y)
    np.testing.assert_allclose(gradient(lambda v: lse(v) - y @ v, best), 0, atol=1e-9)
    others = np.full(n, epsilon / (n - 1))
    others[2] = 1 - epsilon
    for x in X:
        forms = A.cross_entropy(x, others), A.cross_entropy(x, np.array(2), label_smoothing=epsilon * n / (n - 1))
        np.testing.assert_allclose(*forms, rtol=1e-12)
    best[2] = math.log((n - 1) * (1 - epsilon) / epsilon)
    np.testing.assert_allclose(A.softmax(best), others)


@checks("accuracy-loss")
def accuracy_loss():
    for x, p in zip(X, P):
        slope = gradient(lambda v: float(A.accuracy_loss(Softmax(), v[None], np.array([1]))), x)
        np.testing.assert_allclose(A.accuracy_loss(Softmax(), x[None], np.array([1])), -p[1])
        np.testing.assert_allclose(slope, p[1] * (p - EYE[1]), atol=1e-8)
        np.testing.assert_allclose(np.abs(slope).sum(), 2 * p[1] * (1 - p[1]), atol=1e-8)
    for x in (np.array([30.0, 0.0]), np.array([-30.0, 0.0])):  # right, and badly wrong
        assert np.abs(gradient(lambda v: float(A.accuracy_loss(Softmax(), v[None], np.array([0]))), x)).max() < 1e-8


@checks("multilabel")
def multilabel():
    x = rows(6)
    for k, row in enumerate(x):
        y = (np.arange(6) % (2 + k % 3) == 0).astype(int)
        neg, pos = row[y == 0], row[y == 1]
        pairs = np.exp(neg[:, None] - pos).sum()
        whole = math.log(1 + pairs + np.exp(neg).sum() + np.exp(-pos).sum())
        np.testing.assert_allclose(whole, math.log1p(np.exp(neg).sum()) + math.log1p(np.exp(-pos).sum()))
        np.testing.assert_allclose(A.multilabel_softmax_loss(row[None], y[None]), whole, rtol=1e-12)
        slope = gradient(lambda v: float(A.multilabel_softmax_loss(v[None], y[None])), row)  # noqa: B023
        np.testing.assert_allclose(slope[y == 0], A.softmax(np.append(neg, 0.0))[:-1], atol=1e-8)
        np.testing.assert_allclose(slope[y == 1], -A.softmax(np.append(-pos, 0.0))[:-1], atol=1e-8)


@checks("order-exactly")
def order_exactly():
    x = rows(6, 40, 2.0)
    higher = x[:, :, None] > x[:, None, :]
    for mapping in (
        Softmax(),
        A.Entmax(0.5),
        Sigsoftmax(),
        Ratio.sigmoid(),
        A.PerturbMax("normal"),
        A.Sparsemax(),
        A.Entmax(1.5),
    ):
        p = A.apply(mapping, x)
        more = p[:, :, None] > p[:, None, :]
        assert not (more & ~higher).any()
        assert (more == higher).all() == A.facts(mapping).strict == (not A.facts(mapping).sparse), mapping
        inside = (p > 0)[:, :, None] & (p > 0)[:, None, :]
        assert (more == higher)[inside].all()
    full = A.budget(x, 3.0)
    assert any((row == 1).sum() > 1 for row in full)
    tied = A.softmax(np.array([1.0, 2.0, 1.0]))
    assert tied[0] == tied[2]
    assert not A.facts(Taylor(2)).strict
    assert A.sparse_softmax(np.array([1.0, 1.0]), k=1).tolist() == [1.0, 0.0]


@checks("initial-gap")
def initial_gap():
    rng = np.random.default_rng(0)
    for n, sigma in ((100, 1.0), (10, 1.0), (10, 0.7)):
        x = rng.normal(0.0, sigma, (200_000 // n * 10, n))
        bound = norm.sf(math.log(n - 1) / (sigma * math.sqrt(n / (n - 1))))
        p = np.exp(x[:, 0]) / np.exp(x).sum(-1)
        assert (p >= 0.5).mean() <= bound * 1.2 + 1e-4
    assert f"{norm.sf(math.log(99) / math.sqrt(100 / 99)):.1e}" == "2.4e-06"
    gap = math.log(99)
    x = rng.normal(0.0, 0.5, (20_000, 100))
    bound = 200 * math.exp(-(gap**2) / (8 * 0.25))
    assert (np.ptp(x, axis=-1) >= gap).mean() <= bound < 0.006
    assert (np.ptp(2 * x, axis=-1) >= gap).mean() > 0.3
