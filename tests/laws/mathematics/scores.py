"""Section 10: what is done to the scores before the map."""

from __future__ import annotations

import math

import numpy as np
import oracles
from scipy.special import lambertw

import anymax as A
from anymax import Entmax, Softmax, Sparsemax, margins, transforms

from . import checks, differences, numbers, rows

X = rows()
COSINES = np.random.default_rng(5).uniform(-1, 1, (40, 6))


@checks("cosine-scale")
def cosine_scale():
    for n in (10, 1000):
        best = -np.ones(n)
        best[0] = 1.0  # as far apart as cosines can be
        for s in (1.0, 4.0, 30.0):
            loss = float(A.cross_entropy(s * best[None], np.array([0])))
            np.testing.assert_allclose(s, 0.5 * A.logit_gap(loss, n), rtol=1e-6)
    rng = np.random.default_rng(0)
    z, w = rng.normal(size=(5, 8)), rng.normal(size=(6, 8))
    c = transforms.cosine(w)(z)
    expected = [[a @ b / math.sqrt((a @ a) * (b @ b)) for b in w] for a in z]
    np.testing.assert_allclose(c, expected, rtol=1e-6)
    assert np.all(np.abs(c) <= 1)
    for row in COSINES:
        loss = float(A.cross_entropy(4.0 * row[None], np.array([0])))
        assert 0.5 * A.logit_gap(loss, 6) <= 4.0 + 1e-9


@checks("margin")
def margin():
    for row in COSINES:
        for m, s in ((0.0, 5.0), (0.35, 5.0), (0.35, 30.0)):
            others = np.delete(row, 2) - row[2]
            by_hand = math.log1p(math.exp(s * m) * np.sum(np.exp(s * others)))
            mine = float(A.margin_loss(Softmax(), row[None], np.array([2]), margin=m, scale=s))
            np.testing.assert_allclose(mine, by_hand, rtol=1e-9)
            lowered = s * row
            lowered[2] -= s * m
            np.testing.assert_allclose(mine, A.cross_entropy(lowered[None], np.array([2])), rtol=1e-9)
            if math.exp(-mine) > 0.5:
                assert row[2] - np.delete(row, 2).max() > m


@checks("margin-family")
def margin_family():
    theta = np.linspace(0.0, math.pi, 2001)[1:-1]
    cosines = np.stack([np.cos(theta), 0 * theta], -1)
    cases = [
        (margins.AM(0.35), (1, 0, 0.35)),
        (margins.ArcFace(0.5), (1, 0.5, 0)),
        (margins.SphereFace(4.0), (4, 0, 0)),
        (margins.SphereFace(1.35), (1.35, 0, 0)),
        (margins.Combined(1.2, 0.3, 0.1), (1.2, 0.3, 0.1)),
    ]
    for rule, (m1, m2, m3) in cases:
        psi = rule(cosines, np.zeros(len(theta), int))[:, 0]
        phi = m1 * theta + m2
        k = np.floor(phi / math.pi)
        np.testing.assert_allclose(psi, (-1) ** k * np.cos(phi) - 2 * k - m3, atol=1e-9)
        early = phi < math.pi
        np.testing.assert_allclose(psi[early], (np.cos(phi) - m3)[early], atol=1e-9)
        assert np.all(np.diff(psi) < 1e-9)
        assert np.abs(np.diff(psi)).max() < 2 * m1 * math.pi / 2000 + 1e-9  # no jump
        assert np.all(psi <= np.cos(theta) + 1e-9)


@checks("margin-sparse")
def margin_sparse():
    for mapping, reach in ((Sparsemax(), 1.0), (Entmax(1.5), 2.0)):
        m, s = 0.2, 8.0
        zero = 0
        for row in np.concatenate([COSINES, COSINES + np.eye(6)[1] * (1 - COSINES[:, 1:2])]):
            loss = float(A.margin_loss(mapping, row[None], np.array([1]), margin=m, scale=s))
            lead = row[1] - np.delete(row, 1).max()
            assert (loss < 1e-14) == (lead >= m + reach / s)
            zero += loss < 1e-14
        assert 3 < zero < 70


@checks("prior-added")
def prior_added():
    rng = np.random.default_rng(0)
    prior = np.array([0.7, 0.2, 0.1])
    means = np.array([[0.0, 0.0], [1.5, 0.0], [0.0, 1.5]])
    points = rng.normal(size=(50, 2)) + means[rng.integers(3, size=50)]
    log_likelihood = -0.5 * np.sum((points[:, None] - means) ** 2, -1) - math.log(2 * math.pi)
    joint = prior * np.exp(log_likelihood)
    posterior = joint / joint.sum(-1, keepdims=True)
    scores = log_likelihood + rng.normal(size=(50, 1))  # any constant of the row
    np.testing.assert_allclose(A.softmax(transforms.prior(log_p=np.log(prior))(scores)), posterior, rtol=1e-9)
    trained = scores + np.log(prior)
    balanced = np.exp(log_likelihood) / np.exp(log_likelihood).sum(-1, keepdims=True)
    np.testing.assert_allclose(A.softmax(transforms.prior(log_p=-np.log(prior))(trained)), balanced, rtol=1e-9)
    p = A.softmax(X)
    pi = np.array([0.4, 0.3, 0.1, 0.1, 0.1])
    np.testing.assert_allclose(A.softmax(X + np.log(pi)), pi * p / (pi * p).sum(-1, keepdims=True))


@checks("prior-scaled")
def prior_scaled():
    s = np.array([1.0, 2.0, 0.5, 1.0, 0.0])
    for x in X:
        np.testing.assert_allclose(
            A.softmax(transforms.prior(scale=3.0)(x)), A.softmax(transforms.temperature(1 / 3)(x))
        )
        scaled = A.softmax(transforms.prior(scale=s)(x))
        np.testing.assert_allclose(scaled, numbers(oracles.softmax, s * x), rtol=1e-12)
        j = differences(lambda v: numbers(oracles.softmax, s * v), x)
        np.testing.assert_allclose(j, A.jacobian(Softmax(), s * x) @ np.diag(s), atol=1e-9)


@checks("prior-mixed")
def prior_mixed():
    pi, w = np.array([0.4, 0.3, 0.1, 0.1, 0.1]), 0.25
    for x in X:
        p = A.sparsemax(x)
        mixed = A.mix(p, pi, w)
        np.testing.assert_allclose(mixed, (1 - w) * p + w * pi)
        np.testing.assert_allclose(mixed.sum(), 1)
        assert np.all(-np.log(mixed) <= -np.log(w * pi) + 1e-12)
        j = differences(lambda v: A.mix(A.sparsemax(v), pi, w), x, 1e-6)
        np.testing.assert_allclose(j, (1 - w) * A.jacobian(Sparsemax(), x), atol=1e-8)
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 4)), rng.normal(size=(5, 4)), rng.normal(size=(5, 2))
    plain = A.attention(q, k, v, Sparsemax())
    np.testing.assert_allclose(A.attention(q, k, v, Sparsemax(), mix=(pi, w)), (1 - w) * plain + w * pi @ v)


@checks("normalised-scores")
def normalised_scores():
    for kind, norm, spread in (
        ("l1", lambda x: np.abs(x).sum(), 1.0),
        ("l2", lambda x: math.sqrt(np.sum(x * x)), math.sqrt(2)),
        ("max", lambda x: x.max(), 1.0),
    ):
        for x in np.concatenate([rows(6, 60, 2.0), rows(6, 10, 100.0)]):
            x = np.abs(x) if kind == "max" else x
            y = transforms.normalize(kind)(x)
            np.testing.assert_allclose(y, x / norm(x), rtol=1e-12)
            np.testing.assert_allclose(transforms.normalize(kind)(7 * x), y, rtol=1e-12)
            assert np.ptp(y) <= spread + 1e-12
            loss = float(A.cross_entropy(y[None], np.array([int(y.argmax())])))
            assert A.logit_gap(loss, 6) <= spread + 1e-9
    np.testing.assert_allclose(np.ptp(transforms.normalize("l2")([3.0, -3.0])), math.sqrt(2))
    floor = math.log1p(999 * math.exp(-math.sqrt(2)))
    for x in rows(1000, 5, 1.0):
        assert float(A.cross_entropy(transforms.normalize("l2")(x)[None], np.array([0]))) >= floor


@checks("attention-scale")
def attention_scale():
    rng = np.random.default_rng(0)
    for d in (4, 64):
        products = np.sum(rng.normal(size=(40_000, d)) * rng.uniform(-(3**0.5), 3**0.5, (40_000, d)), -1)
        np.testing.assert_allclose(products.var(), d, rtol=0.06)
    x = rng.normal(size=(200, 20)) * 16  # d = 256
    unscaled, scaled = (A.inspection.jacobian_norm(Softmax(), v).mean() for v in (x, x / 16))
    assert unscaled < 0.25
    assert scaled > 0.8
    q, k, v = (rng.normal(size=(6, 64)) for _ in range(3))
    s = q @ k.T / 8
    np.testing.assert_allclose(A.attention(q, k, v), numbers(oracles.softmax, s) @ v, rtol=1e-9)


@checks("length")
def length():
    for n in (10, 100, 5000):
        for r in (0.5, 3.0):
            x = np.random.default_rng(n).uniform(0, r, n)
            p = A.softmax(x)
            assert p.max() <= math.exp(r) / n
            assert A.entropy(p) >= math.log(n) - r - 1e-12
    sharp = np.zeros(5000)
    sharp[0] = 3.0
    assert A.softmax(sharp)[0] < 0.005


@checks("scalable")
def scalable():
    for s, g in ((1.0, 1.5), (0.5, 3.0), (2.0, 0.3)):
        shares = []
        for n in (10, 1000, 100_000):
            x = np.zeros(n)
            x[0] = g
            p = A.softmax(transforms.scalable(beta=s)(x))
            np.testing.assert_allclose(p[0], 1 / (1 + (n - 1) * n ** (-s * g)), rtol=1e-9)
            assert p[0] >= 1 / (1 + n ** (1 - s * g)) * (1 - 1e-12)
            shares.append(p[0])
            for alpha in (1.5, 2.0):
                x[0] = 1 / (alpha - 1)
                assert A.entmax(x, alpha)[0] == 1.0
        assert (np.diff(shares) > 0).all() == (s * g > 1)


@checks("best-scale")
def best_scale():
    for x in X[:5]:
        for a in (0.3, 1.0, 4.0):
            j = differences(lambda v, a=a: A.softmax(a * v), x)
            np.testing.assert_allclose(
                0.5 * np.abs(j).sum(), a * A.inspection.jacobian_norm(Softmax(), a * x), atol=1e-9
            )
    rng = np.random.default_rng(0)
    for n, found, formula in ((16, 3.8, 1.2), (256, 5.7, 1.9), (4096, 8.0, 2.4)):
        by_formula = math.sqrt(float(lambertw(0.5 * n * math.sqrt(math.e)).real) - 0.5)
        np.testing.assert_allclose(math.exp(by_formula**2) * (1 + 2 * by_formula**2), n)
        assert round(by_formula, 1) == formula
        x = rng.normal(size=(300, n))
        scales = np.geomspace(0.3, 60, 60)
        sizes = []
        for a in scales:
            p = A.softmax(a * x)
            sizes.append(a * (1 - np.sum(p * p, -1)))
        assert abs(np.median(scales[np.argmax(sizes, 0)]) - found) < 0.25 * found
        inside = (np.argmax(sizes, 0) > 0) & (np.argmax(sizes, 0) < 59)
        assert inside.mean() > 0.8  # but for near ties
    for a in (0.3, 0.7):  # where the sums are their expectations
        p = A.softmax(a * rng.normal(size=(20, 100_000)))
        np.testing.assert_allclose(np.sum(p * p, -1), math.exp(a * a) / 100_000, rtol=0.05)


@checks("triangle-margin")
def triangle_margin():
    rng = np.random.default_rng(1)
    held = 0
    for sphere in (False, True):
        for _ in range(60):
            centres = rng.normal(size=(4, 3)) * 3
            centres /= np.linalg.norm(centres, axis=-1, keepdims=True) if sphere else 1.0
            label = rng.integers(4, size=40)
            z = centres[label] + rng.uniform(0.02, 0.6) * rng.normal(size=(40, 3))
            z /= np.linalg.norm(z, axis=-1, keepdims=True) if sphere else 1.0

            def d(a, b, sphere=sphere):
                return np.arccos(np.clip(a @ b.T, -1, 1)) if sphere else np.linalg.norm(a[:, None] - b[None], axis=-1)

            to = d(z, centres)
            own = to[np.arange(40), label]
            others = np.where(np.eye(4, dtype=bool)[label], np.inf, to).min(-1)
            if (others > own + 2 * own.max()).all():
                held += 1
                between, same = d(z, z), label[:, None] == label[None]
                far = np.where(same, between, -np.inf).max(-1)
                near = np.where(same, np.inf, between).min(-1)
                assert (far < near).all()
    assert held > 10
    # no smaller margin does: on a line, the centres 0 and D, each point r from its own
    r, e = 1.0, 0.1
    far_centre = 4 * r - e
    z, partner, w = r, -r, far_centre - r
    for point, own_centre, other in ((z, 0.0, far_centre), (partner, 0.0, far_centre), (w, far_centre, 0.0)):
        assert abs(point - own_centre) <= r
        assert abs(point - other) >= abs(point - own_centre) + 2 * r - e
    assert abs(z - partner) > abs(z - w)
