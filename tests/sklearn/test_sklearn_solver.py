"""The estimators' solver: its line search, its directions and its warnings."""

import numpy as np
import pytest
from sklearn_data import blobs

pytest.importorskip("sklearn")

from scipy import optimize, sparse
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning

from anymax.sklearn import MappingClassifier, MultiLabelMappingClassifier, lbfgs


class Bowl:
    """A convex function of a vector, as the solver wants it."""

    def __init__(self, f, g, start):
        self.f, self.g, self.x = f, g, start
        self.value = f(start)

    def gradient(self):
        found = self.g(self.x)
        self.worst = float(np.abs(found).max())
        return found

    def steepest(self):
        return self.worst

    def aim(self, direction):
        self.direction = direction.copy()

    def look(self, step):
        there = self.x + step * self.direction
        return self.f(there), float(self.g(there) @ self.direction)

    def move(self, step):
        self.x = self.x + step * self.direction
        self.value = self.f(self.x)

    def refit(self):
        return False


@pytest.mark.whole
def test_lbfgs_finds_what_scipy_finds():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(60, 30)) * np.logspace(-2, 1, 30)
    f = lambda x: float(np.logaddexp(0, a @ x).sum() + 0.05 * x @ x - a.sum(0) @ x / 3)  # noqa: E731
    g = lambda x: a.T @ (1 / (1 + np.exp(-(a @ x)))) + 0.1 * x - a.sum(0) / 3  # noqa: E731
    bowl = Bowl(f, g, np.zeros(30))
    outcome = lbfgs.minimize(bowl, 1e-8, 1000)
    assert outcome.converged
    assert not outcome.exhausted
    theirs = optimize.minimize(
        f, np.zeros(30), jac=g, method="L-BFGS-B", options={"gtol": 1e-9, "ftol": 0, "maxiter": 5000}
    )
    assert outcome.iterations < 1.5 * theirs.nit
    np.testing.assert_allclose(bowl.x, theirs.x, atol=1e-5)


def test_the_small_tables_hold_the_two_loops():
    """The direction from the tables is that of the textbook's two loops over the pairs."""
    rng = np.random.default_rng(2)
    hessian = np.diag(np.logspace(-1, 1, 12))
    pairs, g = lbfgs._Pairs(np.zeros(12)), rng.normal(size=12)
    kept = []
    for _ in range(2 * lbfgs.MEMORY + 3):
        d, s = pairs.direction(g)
        q, a = g.copy(), []
        for step, change in reversed(kept):
            a.append(step @ q / (step @ change))
            q = q - a[-1] * change
        if kept:
            step, change = kept[-1]
            q = q * (step @ change) / (change @ change)
        for (step, change), alpha in zip(kept, reversed(a)):
            q = q + step * (alpha - change @ q / (step @ change))
        np.testing.assert_allclose(d, -q, rtol=1e-6, atol=1e-9)
        assert s == pytest.approx(float(d @ g))
        t = rng.uniform(0.1, 0.3)  # no line search: the gradient moves as it likes
        new = g + t * hessian @ d
        kept = [*kept, (t * d.copy(), new - g)][-lbfgs.MEMORY :]
        pairs.add(t, s, g, new)
        g = new


def test_a_line_search_finds_a_flat_place():
    for start in (1e-4, 1.0, 1e4):
        looked = []

        def look(t, looked=looked):
            looked.append(t)
            return (t - 3.0) ** 4, 4 * (t - 3.0) ** 3

        step = lbfgs.search(look, 81.0, -108.0, start)
        assert step == looked[-1]
        assert abs(look(step)[1]) <= 0.5 * 108
        assert look(step)[0] < 81
    assert lbfgs.search(lambda t: (np.nan, np.nan), 0.0, -1.0, 1.0) is None
    assert lbfgs.search(lambda t: (float(t), 1.0), 0.0, -1.0, 1.0) is None, "a function that rises"


def test_a_line_search_finds_a_kink_far_below_its_first_step():
    """It came down by a tenth a look, and gave up after 25: features that are nearly all 1 were not trained at all."""

    def look(t):
        bent = 1e5 * (t - 1e-4)
        return 0.1 * np.logaddexp(0, bent) - 8e3 * t, 1e4 * np.exp(-np.logaddexp(0, -bent)) - 8e3

    value, slope = look(0.0)
    step = lbfgs.search(look, value, slope, 1.0)
    assert step is not None
    assert look(step)[0] < value
    rng = np.random.default_rng(0)
    x = 1.0 - (rng.random((60, 600)) < 0.003)
    many = (rng.random((60, 9)) < 0.15).astype(int)
    model = MultiLabelMappingClassifier("sigmoid", threshold=0.5).fit(x, many)  # a warning here is an error
    assert model.n_iter_[0] > 0


@pytest.mark.whole(lambda kind: kind is not np.asarray)
@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_matrix])
def test_many_features_that_go_together(kind):
    """Words of few topics: by a diagonal alone it took more than twice as many iterations."""
    rng = np.random.default_rng(0)
    topics = rng.random((300, 8)) < 0.2
    x = 1.0 - (rng.random((300, 700)) < 0.02 + topics @ (rng.random((8, 700)) < 0.2) * 0.3)
    model = MultiLabelMappingClassifier("sigmoid", threshold=0.5, C=1.0).fit(kind(x), topics.astype(int))
    assert model.n_iter_[0] < 100
    residual = model.predict_proba(x) - topics
    gradient = residual.T @ x / 300 + model.coef_ / 300
    assert np.abs(gradient).max() <= 1.01e-4


def test_convergence_warnings_are_right():
    x, y = load_digits(return_X_y=True)
    with pytest.warns(ConvergenceWarning, match="max_iter=3 iterations were not enough: the largest entry"):
        model = MappingClassifier("softmax", max_iter=3).fit(x, y)
    assert model.n_iter_ == [3]
    with pytest.warns(ConvergenceWarning, match="rounding in float32 lets the objective fall no further"):
        MappingClassifier("softmax", tol=1e-12, max_iter=3000).fit(x[:300].astype(np.float32), y[:300])
    with pytest.warns(ConvergenceWarning, match="max_iter=0"):
        assert not MappingClassifier(max_iter=0).fit(x, y).coef_.any()
    model = MappingClassifier("softmax", max_iter=1000, tol=1e-5).fit(x, y)  # a warning here is an error
    residual = model.predict_proba(x) - np.eye(10)[y]
    gradient = residual.T @ x / len(x) + model.coef_ / len(x)
    assert np.abs(gradient).max() <= 1.01e-5


def test_a_small_gradient_is_not_enough():
    """Where the features are tiny so is the gradient, everywhere: training goes on until little is to be gained."""
    x, y = blobs(200, 5, 3)
    tiny = MappingClassifier("softmax", C=1e8, max_iter=1000).fit(1e-4 * x, y)
    plain = MappingClassifier("softmax", C=1.0, max_iter=1000).fit(x, y)
    assert tiny.score(1e-4 * x, y) >= plain.score(x, y) - 0.02


def test_huge_and_tiny_features_are_no_matter():
    x, y = blobs(200, 5, 3)
    scales = np.array([1e-6, 1.0, 1e3, 1e6, 1e-2])
    model = MappingClassifier("sparsemax", C=np.inf, max_iter=200).fit(x * scales, y)
    plain = MappingClassifier("sparsemax", C=np.inf, tol=1e-8, max_iter=500).fit(x, y)
    np.testing.assert_allclose(model.predict_proba(x * scales), plain.predict_proba(x), atol=1e-2)
