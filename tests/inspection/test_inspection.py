"""Looking at maps: entropies against SciPy, the bound on the logit gap, thresholds, Jacobians."""

from __future__ import annotations

import math

import numpy as np
import plainly
import pytest
import scipy.optimize
import scipy.stats
from kinds import KINDS, back, every_kind
from refusals import each, one_sentence, said

import anymax as A
from anymax import Budget, Entmax, NormMax, Ratio, Softmax, Sparsemax, SparseSoftmax, Taylor

P = np.array([[0.5, 0.3, 0.2, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])


def rng(seed=0):
    return np.random.default_rng(seed)


def tolerance(kind):
    return 2e-6 if kind == "jax" else 1e-12


# -- entropies --------------------------------------------------------------------------------------------------------


@every_kind
def test_shannon_is_scipys(kind):
    got = back(A.entropy(KINDS[kind](P)))
    np.testing.assert_allclose(got, scipy.stats.entropy(P, axis=-1), atol=tolerance(kind))
    np.testing.assert_allclose(
        back(A.entropy(KINDS[kind](np.ascontiguousarray(P.T)), axis=0)),
        scipy.stats.entropy(P, axis=-1),
        atol=tolerance(kind),
    )


@every_kind
@pytest.mark.parametrize("alpha", [0.5, 1.5, 2.0, 3.0])
def test_renyi_and_tsallis_by_their_formulas(alpha, kind):
    q = np.array([[0.5, 0.3, 0.2], [0.7, 0.2, 0.1]])
    power = (q**alpha).sum(-1)
    tol = 10 * tolerance(kind)
    np.testing.assert_allclose(back(A.entropy(KINDS[kind](q), "renyi", alpha)), np.log(power) / (1 - alpha), rtol=tol)
    np.testing.assert_allclose(
        back(A.entropy(KINDS[kind](q), "tsallis", alpha)), (1 - power) / (alpha * (alpha - 1)), rtol=tol
    )
    np.testing.assert_allclose(back(A.entropy(KINDS[kind](q), "renyi2")), -np.log((q**2).sum(-1)), rtol=tol)


@pytest.mark.parametrize("kind", ["renyi", "tsallis"])
def test_the_limit_alpha_to_1_is_shannon(kind):
    want = scipy.stats.entropy(P[0])
    assert A.entropy(P[0], kind, 1.0) == pytest.approx(want, rel=1e-14)
    assert A.entropy(P[0], kind, 1) == pytest.approx(want, rel=1e-14)
    slack = {1 + 1e-3: 1e-2, 1 - 1e-3: 1e-2, 1 + 1e-6: 1e-5, 1 - 1e-6: 1e-5, 1 + 1e-9: 1e-7}
    for alpha, tol in slack.items():
        assert A.entropy(P[0], kind, alpha) == pytest.approx(want, rel=tol)


def test_an_entropy_of_nan_is_nan_and_of_others_not():
    p = P.copy()
    p[1, 1] = math.nan
    for kind in ("shannon", "renyi2", "tsallis"):
        h = A.entropy(p, kind)
        assert np.isnan(h[1])
        assert np.isfinite(h[[0, 2]]).all()


WRONG = said(
    ValueError,
    (lambda: A.entropy(P, "gini"), "kind must be one of renyi, renyi2, shannon, tsallis, got 'gini'"),
    (lambda: A.entropy(P, "renyi", 0), "alpha must be above 0 and finite"),
    (lambda: A.entropy(P, axis=2), "axis 2 is out of range"),
    (lambda: A.entropy([0.5, -1.0]), "from 0 to 1, got numbers from -1 to 0.5; for scores, apply a map first"),
    (lambda: A.entropy([2.0, 0.5], "renyi2"), "got numbers from 0.5 to 2"),
    (lambda: A.logit_gap(0.0, 10), "positive"),
    (lambda: A.logit_gap(1.0, 1), "at least 2"),
    (lambda: A.logit_gap(1.0, 2.0), "integer"),
) | said(
    TypeError,
    (lambda: A.entropy(P, "shannon", 2.0), "'shannon' takes no alpha; use 'renyi' or 'tsallis'"),
    (lambda: A.entropy(P, "renyi", True), "expected a number or an array, got True"),
    (lambda: A.facts(2), "expected a mapping"),
    (lambda: A.threshold(Taylor(2), P), "taylor has no threshold"),
    (lambda: A.jacobian(Ratio(lambda x: x * x), P), "du was not given"),
)


@each(WRONG)
def test_errors(call, error, words):
    one_sentence(call, error, words)


# -- the gap of the logits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 10, 1000])
@pytest.mark.parametrize("loss", [1e-9, 0.01, 0.5, 3.0])
def test_logit_gap(loss, n):
    """The formula; it is reached by one high score among equals, and no scores of that loss have a smaller gap."""
    gap = A.logit_gap(loss, n)
    assert gap == pytest.approx(math.log(n - 1) - math.log(math.expm1(loss)), abs=1e-12)
    x = np.zeros(n)
    x[0] = gap
    assert math.log1p((n - 1) * math.exp(-gap)) == pytest.approx(loss, rel=1e-7)
    if gap > 0:
        assert A.cross_entropy(x, 0) == pytest.approx(loss, rel=1e-6)
        for seed in range(20):
            spread = rng(seed).uniform(0, 1, n) * gap  # any scores within the gap
            assert A.cross_entropy(spread, 0) >= loss * (1 - 1e-7)


def test_logit_gap_of_arrays_and_of_large_losses():
    np.testing.assert_allclose(A.logit_gap(np.array([0.5, 1.0]), 10), [A.logit_gap(0.5, 10), A.logit_gap(1.0, 10)])
    assert A.logit_gap(1e4, 10) == pytest.approx(math.log(9) - 1e4)


# -- support, facts ---------------------------------------------------------------------------------------------------


@every_kind
def test_support(kind):
    got = A.support(KINDS[kind](P))
    np.testing.assert_array_equal(back(got), P > 0)


# -- thresholds -------------------------------------------------------------------------------------------------------


def relu(t):
    return np.maximum(t, 0.0)


def entmax_link(alpha):
    return lambda t: relu((alpha - 1) * t) ** (1 / (alpha - 1))


LINKS = {
    "softmax": (Softmax(), np.exp),
    "sparsemax": (Sparsemax(), relu),
    "entmax1": (Entmax(1.0), np.exp),
    "entmax1.25": (Entmax(1.25), entmax_link(1.25)),
    "entmax4/3": (Entmax(4 / 3), entmax_link(4 / 3)),
    "entmax1.5": (Entmax(1.5), entmax_link(1.5)),
    "entmax2": (Entmax(2.0), relu),
    "entmax3": (Entmax(3.0), entmax_link(3.0)),
    "entmax0.7": (Entmax(0.7), lambda t: (-0.3 * t) ** (-1 / 0.3)),
    "budget": (Budget(2), lambda t: np.clip(t, 0, 1)),
    "budget1.5": (Budget(1.5), lambda t: np.clip(t, 0, 1)),
}


@every_kind
@pytest.mark.parametrize("name", LINKS)
def test_p_is_the_link_of_the_score_less_tau(name, kind):
    mapping, link = LINKS[name]
    x = rng(1).normal(size=(3, 6)) * 1.5 + 4
    make = KINDS[kind]
    tau, size = A.threshold(mapping, make(x))
    p = back(A.apply(mapping, make(x)))
    assert tau.shape == size.shape == (3,)
    np.testing.assert_allclose(link(x - back(tau)[:, None]), p, atol=50 * tolerance(kind))
    np.testing.assert_array_equal(back(size), (p > 0).sum(-1))
    if kind == "numpy":
        wide = A.threshold(mapping, x.T, axis=0, keepdims=True)
        assert wide.tau.shape == wide.support.shape == (1, 3)
        np.testing.assert_allclose(wide.tau[0], tau, rtol=1e-14)
        assert A.threshold(mapping, x.astype(np.float32)).tau.dtype == np.float32


def test_thresholds_that_are_potentials():
    x = rng(2).normal(size=6)
    assert A.threshold(Softmax(), x).tau == pytest.approx(plainly.logsumexp(x))
    top = np.sort(x)[-2:]
    assert A.threshold(SparseSoftmax(k=2), x).tau == pytest.approx(plainly.logsumexp(top))
    assert A.threshold(SparseSoftmax(k=2), x).support == 2
    tau = scipy.optimize.brentq(lambda t: (relu(x - t) ** 2).sum() - 1, x.max() - 1, x.max())  # beta = 2
    assert A.threshold(NormMax(2.0), x).tau == pytest.approx(tau, abs=1e-12)
    beta = 1.5 / 0.5
    tau = scipy.optimize.brentq(lambda t: (relu(x - t) ** beta).sum() - 1, x.max() - 1, x.max())
    assert A.threshold(NormMax(1.5), x).tau == pytest.approx(tau, abs=1e-12)


@pytest.mark.parametrize("name", LINKS)
def test_thresholds_of_masked_and_poisoned_rows(name):
    mapping, _ = LINKS[name]
    x = rng(3).normal(size=(3, 5))
    x[0] = -np.inf
    x[1, 2] = np.nan
    tau, size = A.threshold(mapping, x)
    assert tau[0] == -np.inf
    assert np.isnan(tau[1])
    assert np.isfinite(tau[2])
    assert size[0] == 0


@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax(), A.Elementwise()], ids=lambda m: m.name)
def test_a_threshold_with_a_gradient_is_the_same_number(mapping):
    torch = pytest.importorskip("torch")
    x = torch.tensor(
        [[1.0, 2.0, -math.inf], [-math.inf] * 3, [math.nan, 0.0, 1.0], [math.inf, 0.0, 1.0]], dtype=torch.float64
    )
    plain, tau = A.threshold(mapping, x).tau, A.threshold(mapping, x.clone().requires_grad_()).tau
    torch.testing.assert_close(tau.detach(), plain, equal_nan=True, rtol=1e-15, atol=0.0)
    assert tau[1] == -math.inf
    if mapping.name == "elementwise":
        learned = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        tau = A.threshold(A.Elementwise(tau=learned), x).tau
        assert tau[1] == -math.inf
        (gradient,) = torch.autograd.grad(tau[0], learned)
        assert gradient == 1.0


# -- Jacobians --------------------------------------------------------------------------------------------------------


def test_jacobian_with_an_alpha_for_each_row():
    x, alpha = rng(6).normal(size=(3, 5)), np.array([[1.0], [1.5], [3.0]])
    got = A.jacobian(Entmax(alpha), x)
    for r in range(3):
        np.testing.assert_allclose(got[r], A.jacobian(Entmax(float(alpha[r, 0])), x[r]), atol=1e-12)


@every_kind
def test_jacobians_of_every_kind(kind):
    x = rng(7).normal(size=(2, 4))
    x[0, 1] = -np.inf
    got = A.jacobian(Entmax(1.5), KINDS[kind](x))
    np.testing.assert_allclose(back(got), A.jacobian(Entmax(1.5), x), atol=tolerance(kind) * 10)
    assert not back(got)[0, 1].any()
    assert not back(got)[0, :, 1].any()


@every_kind
def test_zeros_have_no_sign(kind):
    """A zero is printed as 0, not as -0."""
    x = KINDS[kind](np.array([[2.0, 0.5, -1.0], [0.5, 0.4, -2.0]]))
    p = A.sparsemax(x)
    found = [
        A.entropy(p),
        A.entropy(p, "renyi2"),
        A.entropy(p, "tsallis", 1.5),
        A.jacobian(Sparsemax(), x),
        A.inspection.jacobian_norm(Sparsemax(), x),
    ]
    for values in found:
        zero = back(values) == 0
        assert zero.any()
        assert not np.signbit(back(values)[zero]).any()
