"""Section 8: softmax over fewer classes, Taylor softmax, sigsoftmax."""

from __future__ import annotations

import itertools
import math

import numpy as np
import oracles
import pytest
import sympy

import anymax as A
from anymax import Sigsoftmax, Softmax, SparseSoftmax, Taylor
from anymax._attention.linear import taylor_features

from . import checks, gradient, lse, numbers, rows, simplex
from .softmax import shannon

X = rows()
EYE = np.eye(5)


@checks("sparse-softmax")
def sparse_softmax():
    for k in (1, 2, 3):
        for x, other in itertools.pairwise(X):
            p = A.sparse_softmax(x, k=k)
            np.testing.assert_allclose(p, numbers(oracles.sparse_softmax(k=k), x), atol=1e-14)

            def potential(v):
                return max(lse(v[list(s)]) for s in itertools.combinations(range(5), k))  # noqa: B023

            np.testing.assert_allclose(p @ x + shannon(p), potential(x))
            for q in simplex(count=60):
                if (q > 0).sum() <= k:
                    assert q @ x + shannon(q) <= potential(x) + 1e-12
            np.testing.assert_allclose(gradient(potential, x), p, atol=1e-7)
            assert potential((x + other) / 2) <= (potential(x) + potential(other)) / 2 + 1e-12
            assert np.all(np.diff(p[np.argsort(x)]) >= 0)
            np.testing.assert_allclose(A.sparse_softmax(x + 7.0, k=k), p, atol=1e-13)


@checks("sparse-softmax-loss")
def sparse_softmax_loss():
    for x in X:
        kept = np.argsort(-x)[:2]
        for t in range(5):
            loss = float(A.sparse_softmax_loss(x[None], np.array([t]), k=2))
            np.testing.assert_allclose(loss, lse(x[kept]) - x[t])
            slope = gradient(lambda v: float(A.sparse_softmax_loss(v[None], np.array([t]), k=2)), x)  # noqa: B023
            np.testing.assert_allclose(slope, A.sparse_softmax(x, k=2) - EYE[t], atol=1e-7)
            assert (np.abs(slope) > 1e-9).sum() <= 3
            if t not in kept:
                np.testing.assert_allclose(slope[t], -1, atol=1e-8)
                assert np.isinf(A.nll(SparseSoftmax(k=2), x[None], np.array([t])))


@checks("sparse-softmax-gap")
def sparse_softmax_gap():
    for k in (2, 3, 10):
        for x in rows(40, 20, 2.0):
            ranked = np.sort(x)[::-1]
            for t in range(k):
                loss = float(A.sparse_softmax_loss(ranked[None], np.array([t]), k=k))
                assert ranked[t] - ranked[k - 1] >= A.logit_gap(loss, k) - 1e-9
    sharp = np.array([[1.5, 0.0, 0.0, -9.0, -9.0]])
    np.testing.assert_allclose(A.logit_gap(float(A.sparse_softmax_loss(sharp, np.array([0]), k=3)), 3), 1.5)


@checks("nucleus")
def nucleus():
    for x in rows(12, 40, 2.0):
        for mass in (0.3, 0.7, 0.95):
            p = A.sparse_softmax(x, p=mass)
            np.testing.assert_allclose(p, numbers(oracles.sparse_softmax(p=mass), x), atol=1e-13)
            low = x < lse(x) + math.log((1 - mass) / 12)
            assert np.all(p[low] == 0)
            assert A.softmax(x)[low].sum() < 1 - mass
    # where a class enters the nucleus, the loss jumps
    at = math.log(0.6 / 0.4)  # the first of two classes alone has the mass 0.6
    sides = np.array([[at + 1e-9, 0.0], [at - 1e-9, 0.0]])
    loss = A.sparse_softmax_loss(sides, np.zeros(2, int), p=0.6, reduction="none")
    np.testing.assert_allclose(loss, [0.0, -math.log(0.6)], atol=1e-6)
    ends = np.array([[at + 0.2, 0.0], [at + 0.1, 0.0], [at - 0.1, 0.0], [at - 0.4, 0.0]])
    a, _, b, c = A.sparse_softmax_loss(ends, np.zeros(4, int), p=0.6, reduction="none")
    assert b > (a + c) / 2  # not convex: b is halfway between
    top = A.sparse_softmax_loss(np.array([[1e-9, 0.0, 0.0], [-1e-9, 0.0, 0.0]]), np.ones(2, int), k=2, reduction="none")
    assert abs(top[0] - top[1]) < 1e-8
    for x in X:
        y = EYE[0]
        slope = gradient(lambda v: float(A.sparse_softmax_loss(v[None], np.array([0]), p=0.8)), x, 1e-7)
        np.testing.assert_allclose(slope, A.sparse_softmax(x, p=0.8) - y, atol=1e-6)


@checks("top-k-groups")
def top_k_groups():
    for x in rows(60, 50, 1.0):
        for groups in (x.reshape(12, 5), x.reshape(20, 3)):
            maxima = np.sort(groups.max(1))[::-1]
            ranked = np.sort(x)[::-1]
            for k in (1, 3, 12):
                assert maxima[k - 1] <= ranked[k - 1]
                assert (x >= maxima[k - 1]).sum() >= k


@checks("min-p")
def min_p():
    for x in X:
        for c in (0.05, 0.3, 0.9):
            p = A.softmax(x)
            kept = A.minp(c)(x) > -np.inf
            assert np.array_equal(kept, x >= x.max() + math.log(c))
            assert np.array_equal(kept, p >= c * p.max())


# -- Taylor and sigsoftmax --------------------------------------------------------------------------------------------------


def taylor(k):
    v = sympy.symbols("v", real=True)
    return v, sum(v**m / sympy.factorial(m) for m in range(k + 1))


@checks("taylor-positive")
def taylor_positive():
    for k in range(1, 13):
        v, f = taylor(k)
        real = sympy.Poly(f, v).count_roots()
        assert real == k % 2
        assert sympy.expand(sympy.diff(f, v) - (f - v**k / sympy.factorial(k))) == 0
        if k % 2 == 0:
            low = float(sympy.Poly(sympy.diff(f, v), v).real_roots()[0].evalf(20))
            np.testing.assert_allclose(float(f.subs(v, low)), low**k / math.factorial(k), rtol=1e-9)
            assert low < 0
            x = np.linspace(-9, 9, 50)
            u = np.array([sum(t**m / math.factorial(m) for m in range(k + 1)) for t in x])
            np.testing.assert_allclose(A.taylor_softmax(x, k), u / u.sum(), atol=1e-13)
            assert A.taylor_softmax(x, k).min() > 0
        else:
            with pytest.raises(ValueError, match="must be even"):
                Taylor(k)


@checks("taylor-properties")
def taylor_properties():
    for k, where, value in ((2, -1.0, 0.5), (4, -1.596, 0.2704)):
        v, f = taylor(k)
        low = float(sympy.Poly(sympy.diff(f, v), v).real_roots()[0].evalf(20))
        np.testing.assert_allclose([low, float(f.subs(v, low))], [where, value], atol=5e-4)
        p = A.taylor_softmax([low, low - 1.0, 0.0], k)
        assert p[1] > p[0]
        assert not Taylor(k).facts.monotone
        x = np.array([1.0, 3.0])
        assert np.abs(A.taylor_softmax(x - x.max(), k) - A.taylor_softmax(x, k)).max() > 0.1


@checks("taylor-tail")
def taylor_tail():
    for k in (2, 4, 6):
        m = np.linspace(0, 30, 61)
        f = sum(m**i / math.factorial(i) for i in range(k + 1))
        assert np.all(f <= np.exp(m) * (1 + 1e-12))
        p = A.taylor_softmax(np.stack([m, 0 * m], -1), k)[:, 1]
        np.testing.assert_allclose(p, 1 / (1 + f), rtol=1e-12)
        assert np.all(p >= A.softmax(np.stack([m, 0 * m], -1))[:, 1] * (1 - 1e-12))
        x = np.array([2.0, 1.0, -1.5])
        np.testing.assert_allclose(A.taylor_softmax(x / 1e-6, k), x**k / np.sum(x**k), rtol=1e-4)


@checks("taylor-attention")
def taylor_attention():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(7, 4)) for _ in range(3))
    s = q @ k.T
    assert taylor_features(q).shape == (7, 1 + 4 + 10)
    np.testing.assert_allclose(taylor_features(q) @ taylor_features(k).T, 1 + s + s * s / 2, rtol=1e-12)
    by_hand = [[1.0, *r, *(r * r / math.sqrt(2)), *(r[a] * r[b] for a in range(4) for b in range(a + 1, 4))] for r in q]
    np.testing.assert_allclose(np.sort(by_hand), np.sort(taylor_features(q)), atol=1e-12)
    w = 1 + s + s * s / 2
    expected = w @ v / w.sum(-1, keepdims=True)
    np.testing.assert_allclose(A.attention(q, k, v, Taylor(2), scale=1.0), expected, rtol=1e-10)
    np.testing.assert_allclose(A.linear_attention(q, k, v, scale=1.0), expected, rtol=1e-10)
    memory, mass = taylor_features(k).T @ v, taylor_features(k).sum(0)
    np.testing.assert_allclose(taylor_features(q) @ memory / (taylor_features(q) @ mass)[:, None], expected, rtol=1e-10)


@checks("sigsoftmax")
def sigsoftmax():
    for x in X:
        u = np.exp(x) / (1 + np.exp(-x))
        np.testing.assert_allclose(A.sigsoftmax(x), u / u.sum(), rtol=1e-12)
        log_p = A.log_apply(Sigsoftmax(), x)
        assert np.ptp(log_p - (2 * x - np.log1p(np.exp(x)))) < 1e-12
        assert np.array_equal(np.argsort(x), np.argsort(u))
    assert np.abs(A.sigsoftmax(X + 3) - A.sigsoftmax(X)).max() > 0.01
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 30))
    assert np.linalg.matrix_rank(A.log_apply(Softmax(), scores)) == 4
    assert np.linalg.matrix_rank(A.log_apply(Sigsoftmax(), scores)) > 10
