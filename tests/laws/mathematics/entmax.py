"""Section 7: the family between softmax and sparsemax, budget and normmax."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import oracles
import sympy

import anymax as A
from anymax import Budget, Entmax, NormMax

from . import checks, differences, gradient, numbers, rows, simplex

X = rows()
ALPHAS = (1.25, 1.5, 2.0, 3.0)


@checks("deformed-exponential")
def deformed_exponential():
    t = np.linspace(-6, 6, 121)
    betas = (1e-8, 0.1, 0.3, 0.5, 0.8, 1.0)
    values = [np.maximum(1 + b * t, 0) ** (1 / b) for b in betas]
    np.testing.assert_allclose(values[0], np.exp(t), rtol=1e-6)
    for finer, rougher in zip([np.exp(t), *values[1:]], values[1:]):
        assert np.all(rougher <= finer + 1e-12)
    assert np.array_equal(values[-1], np.maximum(1 + t, 0))
    b, x = sympy.symbols("b x", positive=True)
    slope = sympy.diff(sympy.log(1 + b * x) / b, b)
    assert sympy.simplify(slope - (b * x / (1 + b * x) - sympy.log(1 + b * x)) / b**2) == 0  # log(1+v) >= v / (1+v)
    for v in (-0.9, -0.1, 0.2, 5.0):
        assert v / (1 + v) - math.log1p(v) < 0
    for row in X:
        for alpha in ALPHAS:
            p, tau = A.entmax(row, alpha), float(A.threshold(Entmax(alpha), row)[0])
            beta = alpha - 1
            np.testing.assert_allclose(p, np.maximum(beta * (row - tau), 0) ** (1 / beta), atol=1e-12)
            shifted = np.maximum(1 + beta * (row - (tau + 1 / beta)), 0) ** (1 / beta)  # the 1 taken into tau
            np.testing.assert_allclose(p, shifted, atol=1e-12)


@checks("tsallis")
def tsallis():
    q = simplex()
    for alpha in (0.5, *ALPHAS):
        power = np.where(q > 0, np.where(q > 0, q, 1.0) ** alpha, 0.0)
        h = (1 - power.sum(-1)) / (alpha * (alpha - 1))
        np.testing.assert_allclose(A.entropy(q, "tsallis", alpha), h, atol=1e-12)
        assert np.all(h >= -1e-12)
        np.testing.assert_allclose(h[-5:], 0, atol=1e-15)
        assert np.all(h <= (1 - 5 ** (1 - alpha)) / (alpha * (alpha - 1)) + 1e-12)
        middle = A.entropy((q[1:] + q[:-1]) / 2, "tsallis", alpha)
        assert np.all(middle >= (h[1:] + h[:-1]) / 2 - 1e-12)
    np.testing.assert_allclose(A.entropy(q, "tsallis", 1 + 1e-7), A.entropy(q), atol=1e-5)
    np.testing.assert_allclose(A.entropy(q, "tsallis", 2.0), 0.5 * (1 - np.sum(q**2, -1)), atol=1e-14)
    a, p = sympy.symbols("a p", positive=True)
    limit = sympy.limit((p - p**a) / (a * (a - 1)), a, 1)
    assert sympy.simplify(limit + p * sympy.log(p)) == 0


@checks("entmax-threshold")
def entmax_threshold():
    a, q = sympy.symbols("a q", positive=True)
    slope = sympy.diff((q**a - q) / (a * (a - 1)), q)
    assert sympy.simplify(slope - (q ** (a - 1) / (a - 1) - 1 / (a * (a - 1)))) == 0
    for alpha in ALPHAS:
        for x in X:
            p = numbers(oracles.entmax(alpha), x)
            inside = p > 0
            theta = ((alpha - 1) * x - p ** (alpha - 1))[inside]
            assert np.ptp(theta) < 1e-9
            assert np.all(((alpha - 1) * x)[~inside] <= theta[0] + 1e-9)
            np.testing.assert_allclose(A.entmax(x, alpha), p, atol=1e-13)
            value = p @ x + A.entropy(p, "tsallis", alpha)
            assert np.all(simplex() @ x + A.entropy(simplex(), "tsallis", alpha) <= value + 1e-12)
        assert (A.entmax(3 * X, alpha) == 0).any()


@checks("entmax-bracket")
def entmax_bracket():
    for alpha in ALPHAS:
        for x in X:
            z = (alpha - 1) * x
            z = z - z.max() + 1
            exact = float(((alpha - 1) * x - x.max() * (alpha - 1) + 1).max() - A.entmax(x, alpha).max() ** (alpha - 1))

            def mass(theta):
                return np.sum(np.maximum(z - theta, 0) ** (1 / (alpha - 1)))  # noqa: B023

            assert mass(0.0) >= 1
            assert mass(1.0) == 0
            assert 0 <= exact <= 1 - 5 ** (1 - alpha) + 1e-12
            low, high = 0.0, 1.0
            for step in range(1, 40):
                middle = (low + high) / 2
                low, high = (middle, high) if mass(middle) > 1 else (low, middle)
                assert abs((low + high) / 2 - exact) <= 0.5 ** (step + 1) + 1e-12


@checks("entmax-support")
def entmax_support():
    for alpha in ALPHAS:
        for x in rows(8, 30, 1.0, 4):
            z = (alpha - 1) * np.sort(x)[::-1]
            fill = [np.sum((z[:k] - z[k]) ** (1 / (alpha - 1))) for k in range(8)]
            size = int((numbers(oracles.entmax(alpha), x) > 0).sum())
            assert (np.array(fill) < 1).tolist() == [True] * size + [False] * (8 - size)
            assert A.threshold(Entmax(alpha), x)[1] == size


def thetas(z):
    """theta_k in exact square roots where they exist, else None; z in descending order, as fractions."""
    out = []
    for k in range(1, len(z) + 1):
        mean = sum(z[:k]) / k
        variance = sum(v * v for v in z[:k]) / k - mean * mean
        room = Fraction(1, k) - variance
        with mp.workdps(40):
            out.append(
                None
                if room < 0
                else mp.mpf(mean.numerator) / mean.denominator - mp.sqrt(mp.mpf(room.numerator) / room.denominator)
            )
    return out


@checks("entmax15-closed")
def entmax15_closed():
    k, theta, s1, s2 = sympy.symbols("k theta s1 s2", positive=True)
    mean = s1 / k
    smaller = mean - sympy.sqrt(1 / k - (s2 / k - mean**2))
    assert sympy.simplify((s2 - 2 * theta * s1 + k * theta**2 - 1).subs(theta, smaller)) == 0
    for x in X:
        p = numbers(oracles.entmax(1.5), x)
        z = np.sort(x[p > 0] / 2)[::-1]
        n = len(z)
        closed = z.mean() - math.sqrt(1 / n - (np.mean(z**2) - z.mean() ** 2))
        np.testing.assert_allclose(np.maximum(x / 2 - closed, 0) ** 2, p, atol=1e-9)


@checks("entmax15-support")
def entmax15_support():
    rng = np.random.default_rng(0)
    rows_of_eighths = [rng.integers(-8, 9, rng.integers(1, 8)) for _ in range(300)]
    on_the_threshold = 0
    for row in [*rows_of_eighths, [8, 0], [16, 8, 8]]:
        z = sorted((Fraction(int(v), 8) for v in row), reverse=True)
        levels, values = thetas(z), [mp.mpf(v.numerator) / v.denominator for v in z]
        counted = [t is not None and t <= v for t, v in zip(levels, values)]
        size = sum(counted)
        assert counted == [True] * size + [False] * (len(z) - size)
        theta = levels[size - 1]
        p = [max(v - theta, 0) ** 2 for v in values]
        assert abs(mp.fsum(p) - 1) < 1e-14
        np.testing.assert_allclose(A.entmax15([2 * float(v) for v in z]), [float(v) for v in p], atol=1e-13)
        following = [*values[1:], -mp.inf]
        both = [t is not None and v > t > w for t, v, w in zip(levels, values, following)]
        assert sum(both) == (theta not in values)
        on_the_threshold += theta in values
    assert on_the_threshold > 2


@checks("entmax-jacobian")
def entmax_jacobian():
    for alpha in ALPHAS:
        for x in X[:6]:
            p = numbers(oracles.entmax(alpha), x)
            s = np.where(p > 0, np.where(p > 0, p, 1) ** (2 - alpha), 0)
            j = np.diag(s) - np.outer(s, s) / s.sum()
            np.testing.assert_allclose(A.jacobian(Entmax(alpha), x), j, atol=1e-11)
            np.testing.assert_allclose(differences(lambda v: A.entmax(v, alpha), x), j, atol=1e-6)  # noqa: B023
    p = A.entmax15(X[0])
    np.testing.assert_allclose(
        A.jacobian(Entmax(1.5), X[0]), np.diag(np.sqrt(p)) - np.outer(np.sqrt(p), np.sqrt(p)) / np.sqrt(p).sum()
    )


@checks("entmax-alpha")
def entmax_alpha():
    for alpha in (1.25, 1.5, 1.9, 3.0):
        c, h = alpha - 1, 2.0**-14
        for x in X[:8]:
            p = numbers(oracles.entmax(alpha), x)
            q = np.where(p > 0, p, 1.0)
            s = np.where(p > 0, q ** (2 - alpha), 0)
            share, entropy = s / s.sum(), p * np.log(q)
            slope = (p - share) / c**2 - (entropy - share * entropy.sum()) / c
            ends = [numbers(oracles.entmax(alpha + d), x) for d in (-h, h)]
            if np.array_equal(ends[0] > 0, ends[1] > 0):
                np.testing.assert_allclose(slope, (ends[1] - ends[0]) / (2 * h), atol=1e-6)
            np.testing.assert_allclose(slope.sum(), 0, atol=1e-10)
            mapping = Entmax(np.array(alpha))
            mine = gradient(lambda a: A.entmax(x, np.array(a[0]))[0], np.array([alpha]))[0]  # noqa: B023
            np.testing.assert_allclose(mine, slope[0], atol=1e-6)
            assert mapping.params().keys() == {"alpha"}


@checks("entmax-loss")
def entmax_loss():
    for x in X:
        for t in range(5):
            target = np.array([t])
            for alpha in ALPHAS:
                p = numbers(oracles.entmax(alpha), x)
                h = float(np.sum(p - np.where(p > 0, p, 0) ** alpha)) / (alpha * (alpha - 1))
                np.testing.assert_allclose(A.entmax_loss(x[None], target, alpha=alpha), p @ (x - x[t]) + h, atol=1e-12)
            np.testing.assert_allclose(A.entmax_loss(x[None], target, alpha=1.0), A.cross_entropy(x[None], target))
            np.testing.assert_allclose(
                A.entmax_loss(x[None], target, alpha=2.0), A.sparsemax_loss(x[None], target), atol=1e-14
            )


@checks("entmax-margin")
def entmax_margin():
    a = sympy.symbols("a", positive=True)
    q = sympy.symbols("q", positive=True)
    slope = q ** (a - 1) / (a - 1)
    assert sympy.simplify(slope.subs(q, 1) - 1 / (a - 1)) == 0
    for alpha in ALPHAS:
        reach = 1 / (alpha - 1)
        np.testing.assert_allclose(
            A.entmax_loss(np.array([[reach, 0.0, -1.0]]), np.array([0]), alpha=alpha), 0, atol=1e-15
        )
        assert A.entmax([reach, 0.0], alpha)[1] == 0
        assert A.entmax([0.9 * reach, 0.0], alpha)[1] > 0
        wide = 3 * X
        assert np.all(A.entmax(wide, alpha)[wide <= wide.max(-1, keepdims=True) - reach] == 0)


@checks("entmax-limits")
def entmax_limits():
    x = np.array([1.0, 1.0, 0.5, -1.0])
    np.testing.assert_allclose(A.entmax(x, 1 + 1e-6), numbers(oracles.softmax, x), atol=1e-5)
    np.testing.assert_allclose(A.entmax(x, 1.0), A.softmax(x), rtol=1e-15)
    np.testing.assert_allclose(A.entmax(x, 1000.0), [0.5, 0.5, 0.0, 0.0], atol=1e-12)
    assert (A.softmax(x / 0.02) > 0).all()


@checks("entmax-newton")
def entmax_newton():
    for alpha in (1.1, 1.25, 1.5, 1.75, 2.0):
        r = 1 / (alpha - 1)
        for x in rows(30, 10, 1.0, 6):
            z = (alpha - 1) * x

            def parts(theta):
                inside = np.maximum(z - theta, 0)  # noqa: B023
                held = inside > 0
                return np.sum(inside[held] ** r), np.sum(inside[held] ** (r - 1))  # noqa: B023

            exact = z.max() - A.entmax(x, alpha).max() ** (alpha - 1)
            grid = np.linspace(z.max() - 2, z.max() - 1e-3, 60)
            g = np.array([parts(v)[0] ** (1 / r) - 1 for v in grid])
            assert np.all(np.diff(g) < 0)
            assert np.all(np.diff(g, 2) > -1e-12)
            for start in (z.max() - 1, z.max() - 3, exact + 0.5 * (z.max() - exact)):
                theta = start
                for step in range(40):
                    s0, s1 = parts(theta)
                    following = theta + (s0 - s0 ** (1 - 1 / r)) / s1
                    assert following <= exact + 1e-12
                    if step or start <= exact:
                        assert following >= theta - 1e-12
                    theta = following
                np.testing.assert_allclose(theta, exact, atol=1e-10)


# -- budget and normmax -----------------------------------------------------------------------------------------------------


@checks("budget")
def budget():
    rng = np.random.default_rng(0)
    for k in (1, 2, 3, 2.5):
        for x in X:
            p = numbers(oracles.budget(k), x)
            np.testing.assert_allclose(A.budget(x, k), p, atol=1e-13)
            np.testing.assert_allclose(p.sum(), k)
            full, inside = p >= 1, (p > 0) & (p < 1)
            if inside.any():
                tau = (x[inside].sum() + full.sum() - k) / inside.sum()
                np.testing.assert_allclose(np.clip(x - tau, 0, 1), p, atol=1e-12)
            j = np.diag(inside * 1.0) - np.outer(inside, inside) / max(inside.sum(), 1)
            np.testing.assert_allclose(A.jacobian(Budget(k), x), j, atol=1e-12)
            for _ in range(20):  # other points of the capped simplex
                q = p + 0.3 * (lambda d: d - d.mean())(rng.normal(size=5))
                if q.min() >= 0 and q.max() <= 1:
                    assert q @ x - q @ q / 2 <= p @ x - p @ p / 2 + 1e-12
    np.testing.assert_allclose(A.budget(X, 1), A.sparsemax(X), atol=1e-14)


@checks("normmax")
def normmax():
    for alpha in (1.5, 2.0, 3.0):
        for x in X:
            p = numbers(oracles.normmax(alpha), x)
            np.testing.assert_allclose(A.normmax(x, alpha), p, atol=1e-12)
            norm = np.sum(p**alpha) ** (1 / alpha)
            inside = p > 0
            tau = (x - (p / norm) ** (alpha - 1))[inside]
            assert np.ptp(tau) < 1e-9
            assert np.all(x[~inside] <= tau[0] + 1e-9)
            np.testing.assert_allclose(np.sum(np.maximum(x - tau[0], 0) ** (alpha / (alpha - 1))), 1, atol=1e-9)
            w = np.maximum(x - tau[0], 0) ** (1 / (alpha - 1))
            np.testing.assert_allclose(w / w.sum(), p, atol=1e-9)
            np.testing.assert_allclose(p @ x - norm, tau[0], atol=1e-12)
            np.testing.assert_allclose(A.threshold(NormMax(alpha), x)[0], tau[0], atol=1e-12)
            others = simplex() @ x - np.sum(simplex() ** alpha, -1) ** (1 / alpha)
            assert np.all(others <= tau[0] + 1e-12)
        p = A.normmax(X, alpha)
        np.testing.assert_allclose(A.normmax(X + 7.0, alpha), p, atol=1e-12)
        assert np.all(np.diff(np.take_along_axis(p, np.argsort(X, -1), -1), axis=-1) >= 0)
        slope = gradient(lambda v: float(A.threshold(NormMax(alpha), v)[0]), X[0])  # noqa: B023
        np.testing.assert_allclose(slope, A.normmax(X[0], alpha), atol=1e-7)
        lead = np.array([[1.0, 0.0, -2.0]])
        np.testing.assert_allclose(A.normmax_loss(lead, np.array([0]), alpha=alpha), 0, atol=1e-15)
        assert A.normmax_loss(lead - [0.05, 0, 0], np.array([0]), alpha=alpha) > 1e-9


@checks("normmax-jacobian")
def normmax_jacobian():
    for alpha in (1.5, 2.0, 3.0):
        for x in X[:8]:
            p = numbers(oracles.normmax(alpha), x)
            norm = np.sum(p**alpha) ** (1 / alpha)
            v = np.where(p > 0, np.where(p > 0, p, 1) ** (2 - alpha) * norm ** (alpha - 1) / (alpha - 1), 0)
            j = np.diag(v) - np.outer(v, p) - np.outer(p, v) + v.sum() * np.outer(p, p)
            np.testing.assert_allclose(A.jacobian(NormMax(alpha), x), j, atol=1e-11)
            np.testing.assert_allclose(differences(lambda u: A.normmax(u, alpha), x), j, atol=1e-6)  # noqa: B023


@checks("normmax-uniform")
def normmax_uniform():
    x = np.array([1.0, 0.9, 0.8, -3.0])
    spread = []
    for alpha in (2.0, 5.0, 20.0, 200.0):
        p = A.normmax(x, alpha)
        kept = p[p > 0]
        spread.append(np.ptp(kept))
    assert np.all(np.diff(spread) < 0)
    assert spread[-1] < 0.02
    assert np.ptp(A.sparsemax(x)[:3]) > 0.15
