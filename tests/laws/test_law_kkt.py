"""Optimality from mathematics alone: KKT residuals of the separable maps and NormMax; a grid search for small rows."""

import laws
import numpy as np
import oracles
import pytest
from cases import CASES, each

import anymax as am

pytestmark = pytest.mark.usefixtures("engine")


@each([c for c in CASES if c.kkt])
def test_kkt(case):
    laws.kkt(case.apply, case.kkt, max(2, int(np.ceil(case.mass))))


@each([c for c in CASES if c.kkt])
def test_kkt_of_ties_and_gaps(case):
    rows = [
        np.zeros(63),
        np.r_[np.zeros(31), np.full(32, -0.3)],
        -(2.0 ** np.arange(-20, 21)),
        -np.arange(507) / 64.0,
        np.r_[50.0, np.zeros(62)],
    ]
    for x in rows:
        for sign in (1, -1):
            worst = case.kkt(sign * x, case.apply(sign * x))
            assert worst <= 4e-14 * max(1.0, np.abs(x).max()), (worst, x[:3])


def test_every_separable_map_has_a_residual():
    for case in CASES:
        assert case.kkt is not None or not isinstance(case.mapping, am.Separable | am.NormMax), case.id


@pytest.mark.whole(
    lambda case, engine: engine == "reference" or case.id not in ("softmax", "entmax-1.5", "sparse_softmax-k2")
)
@each([c for c in CASES if c.omega])
@pytest.mark.parametrize("x", [[0.2, -0.1, 0.5], [1.0, 0.0, 0.7], [0.0, 0.0, -2.0]], ids=str)
def test_brute_force(case, x):
    """No point of a grid on the simplex is better than p, and the best of them is near."""
    x = np.array(x)

    def omega(q):
        if case.id == "sparse_softmax-k2" and (q > 0).sum() > 2:
            return np.inf
        return case.omega(q)

    p, best = case.apply(x), oracles.brute_force(x, omega)
    assert p @ x - case.omega(p) >= best @ x - omega(best) - 1e-14
    flat = case.mapping.facts.sparse and case.id.startswith("entmax-10")
    laws.close(p, best, 0.2 if flat else 0.012)


@each([c for c in CASES if isinstance(c.mapping, am.Separable)])
def test_threshold(case):
    """tau explains every probability: p = link(x - tau), and the support is what is above."""
    x = laws.scores(5, 63, seed=12)
    tau, size = am.threshold(case.mapping, x)
    p = case.apply(x)
    np.testing.assert_array_equal(size, (p > 0).sum(-1))
    t = x - tau[:, None]
    if getattr(case.mapping, "shape", "linear") != "linear":
        rising, _ = oracles.RISING[case.mapping.shape]
        q = np.array([[float(rising(v)) for v in row] for row in t])
    elif case.row in ("Sparsemax", "Budget"):
        q = np.clip(t, 0, 1 if case.row == "Budget" else None)
    else:
        alpha = 1.0 if case.row == "Softmax" else float(np.asarray(case.mapping.alpha).reshape(-1)[0])
        c = alpha - 1
        if c == 0:
            q = np.exp(t)
        else:
            z = c * t
            q = np.where(z > 0, np.where(z > 0, z, 1.0) ** (1 / c), 0.0)
    # near alpha = 1 the power multiplies tau's own rounding by 1/c; above 2 the edge of the support does
    c = abs(float(np.max(getattr(case.mapping, "alpha", 2.0))) - 1.0)
    laws.close(q, p, 1e-15 ** (1 / c) if c > 1 else 1e-13 / (c or 1.0))
