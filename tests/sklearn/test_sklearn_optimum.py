"""The estimators' objective and its optimum, against other ways to both."""

import functools

import numpy as np
import pytest
from sklearn_data import TIGHT, blobs, labels

pytest.importorskip("sklearn")

from scipy import optimize, sparse
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

import anymax as am
from anymax.sklearn import MappingClassifier, MultiLabelMappingClassifier, losses
from anymax.sklearn.objective import Linear

OWN_LOSS = [
    "softmax", "sparsemax", "entmax15", am.Entmax(1.2), am.Entmax(0.7), am.NormMax(2.0), am.PerturbMax("logistic"),
]  # fmt: skip

LOSSES = [am.Softmax(), am.Sparsemax(), am.Entmax(1.5), am.Entmax(1.2), am.Entmax(0.6), am.NormMax()]


def objective(w, x, intercept, loss, l2):
    """The definition, word for word, from the public losses."""
    z = x @ w[: x.shape[1]] + (w[x.shape[1]] if intercept else 0)
    return loss(z) + 0.5 * l2 * np.sum(w[: x.shape[1]] ** 2)


@pytest.mark.parametrize("solver", ["lbfgs", "lbfgs-scipy"])
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("C", [0.1, 10.0])
def test_softmax_is_logistic_regression(solver, k, intercept, C):
    x, y = blobs(k=k)
    theirs = LogisticRegression(C=C, fit_intercept=intercept, tol=1e-10, max_iter=5000).fit(x, y)
    ours = MappingClassifier("softmax", C=C, fit_intercept=intercept, solver=solver, tol=1e-7, max_iter=5000).fit(x, y)
    assert ours.coef_.shape == theirs.coef_.shape
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=2e-5)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=2e-5)
    np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), atol=1e-5)
    np.testing.assert_allclose(ours.decision_function(x), theirs.decision_function(x), atol=1e-4)


def test_softmax_is_logistic_regression_with_weights():
    x, y = blobs()
    weights = np.random.default_rng(0).random(len(y))
    for class_weight in ({0: 3.0, 2: 0.5}, "balanced"):
        theirs = LogisticRegression(class_weight=class_weight, tol=1e-10, max_iter=5000).fit(x, y)
        ours = MappingClassifier("softmax", class_weight=class_weight, **TIGHT).fit(x, y)
        np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-5)
    theirs = LogisticRegression(class_weight={1: 2.0}, tol=1e-10, max_iter=5000).fit(x, y, weights)
    ours = MappingClassifier("softmax", class_weight={1: 2.0}, **TIGHT).fit(x, y, weights)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-5)


@pytest.mark.whole(lambda mapping: mapping not in ("softmax", "sparsemax"))
@pytest.mark.parametrize("mapping", OWN_LOSS, ids=str)
def test_nothing_lowers_the_objective(mapping):
    """Against SciPy on the definition, with numerical derivatives where they are smooth enough: no code in common but the loss."""
    x, y = blobs(60, 4, 3)
    model = MappingClassifier(mapping, C=2.0, **TIGHT).fit(x, y)

    def value(flat):
        w = flat.reshape(5, 3)
        loss = lambda z: am.fenchel_young(model.mapping_, z, y, reduction="mean")  # noqa: E731
        return objective(w, x, True, loss, 1 / (2.0 * 60))

    found = np.vstack([model.coef_.T, model.intercept_]).reshape(-1)
    best = optimize.minimize(
        value, np.zeros(15), method="L-BFGS-B", options={"maxiter": 500, "ftol": 1e-14, "gtol": 1e-7}
    )
    assert value(found) <= best.fun + 1e-12
    assert value(found) >= best.fun - 1e-6 * (1 + best.fun)


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax", "entmax15"])
def test_first_order_conditions(mapping):
    """l2 W = x^t (y - p) / n, and the residuals of each class sum to 0: both from `predict_proba` alone."""
    x, y = blobs(200, 5, 3, seed=3)
    model = MappingClassifier(mapping, l2=0.01, **TIGHT).fit(x, y)
    residual = np.eye(3)[y] - model.predict_proba(x)
    np.testing.assert_allclose(0.01 * model.coef_, residual.T @ x / 200, atol=2e-9)
    np.testing.assert_allclose(residual.mean(axis=0), 0, atol=2e-9)


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax"])
@pytest.mark.parametrize("intercept", [True, False])
def test_what_all_classes_have_in_common_is_0(mapping, intercept):
    """Where the penalty is weak, its gradient in that direction is below any tolerance: the descent alone leaves it anywhere."""
    x, y = load_iris(return_X_y=True)
    for model in (
        MappingClassifier(mapping, C=100.0, fit_intercept=intercept).fit(x, y),
        MultiLabelMappingClassifier(mapping, C=100.0, fit_intercept=intercept).fit(x, np.eye(3, dtype=int)[y]),
    ):
        np.testing.assert_allclose(model.coef_.sum(axis=0), 0, atol=1e-11)
        np.testing.assert_allclose(model.intercept_.sum(), 0, atol=1e-11)
        assert abs(model.coef_).max() > 1


@pytest.mark.whole
def test_sparsemax_by_another_way():
    """A convex quadratic in a lifted form: the loss is max over p of <p, z> - |p|^2 / 2, so the dual is one over p alone."""
    x, y = blobs(40, 3, 3, seed=5)
    n, l2, target = 40, 0.05, np.eye(3)[y]
    gram = x @ x.T / (l2 * n * n)

    def negative_dual(flat):
        p = flat.reshape(n, 3)
        r = target - p
        pull = gram @ r
        return 0.5 * np.sum(r * pull) + np.sum(p * p) / (2 * n), (-pull + p / n).reshape(-1)

    ones = np.kron(np.eye(n), np.ones(3))
    found = optimize.minimize(
        negative_dual, np.full(n * 3, 1 / 3), jac=True, method="SLSQP", bounds=[(0, 1)] * (n * 3),
        constraints={"type": "eq", "fun": lambda p: ones @ p - 1, "jac": lambda p: ones},
        options={"maxiter": 500, "ftol": 1e-14},
    )  # fmt: skip
    model = MappingClassifier("sparsemax", l2=l2, fit_intercept=False, **TIGHT).fit(x, y)
    np.testing.assert_allclose(model.predict_proba(x), found.x.reshape(n, 3), atol=1e-5)


PROBLEMS = (
    "sparsemax", "entmax", "normmax", "taylor", "binary", "labels", "labels taylor", "labels csr", "sigmoid", "zlpr",
)  # fmt: skip


@functools.cache
def problems():
    """Of each name (features, loss, columns); made when the first test asks, since data of many labels take seconds."""
    return {name: tuple(rest) for name, *rest in _problems()}


def _problems():
    x, y = blobs(30, 4, 3)
    share = np.random.default_rng(0).random(30)
    share /= share.sum()
    _, many = labels(30, 4, 3)
    csr = sparse.csr_matrix(many)
    yield "sparsemax", x, losses.IndexLoss(am.Sparsemax(), y, share), 3
    yield "entmax", x, losses.IndexLoss(am.Entmax(1.3), y, share), 3
    yield "normmax", x, losses.IndexLoss(am.NormMax(), y, share), 3
    yield "taylor", x, losses.IndexLoss(am.Taylor(), y, share), 3
    yield "binary", x, losses.ZeroFirst(losses.IndexLoss(am.Entmax(1.5), (y > 0).astype(np.int64), share)), 1
    yield "labels", x, losses.SharesLoss(am.Entmax(1.5), losses.evenly(csr, False), share), 3
    yield "labels taylor", x, losses.SharesLoss(am.Taylor(), losses.evenly(csr, False), share), 3
    yield "labels csr", sparse.csr_matrix(x), losses.SharesLoss(am.Softmax(), losses.evenly(csr, False), share), 3
    yield "sigmoid", x, losses.SigmoidLoss(csr, share), 3
    yield "zlpr", sparse.csr_matrix(x), losses.ZlprLoss(csr, share), 3


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_finite_differences(name):
    assert tuple(problems()) == PROBLEMS
    x, loss, k = problems()[name]
    rng = np.random.default_rng(1)
    w, share = rng.normal(size=(5, k)), np.full(30, 1 / 30)
    model = Linear(x, loss, 0.1, w, True, 0.3, share)
    got = model.slope()
    for _ in range(4):
        step = rng.normal(size=w.shape)
        ends = []
        for h in (1e-6, -1e-6):
            model.put(w + h * step)
            ends.append(model.value)
        assert np.sum(got * step) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("few", [True, False], ids=["few features", "many features"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_blocks_of_rows_add_up(name, few, monkeypatch):
    """On a line, at the point it leads to, and in the curvatures."""
    x, loss, k = problems()[name]
    rng = np.random.default_rng(1)
    w, line, share = rng.normal(size=(5, k)), rng.normal(size=5 * k), np.full(30, 1 / 30)
    monkeypatch.setattr("anymax.sklearn.objective._CHEAP", 64 if few else 0)

    def answers():
        model = Linear(x, loss, 0.1, w, True, 0.3, share)
        first = model.value, model.gradient()
        model.aim(line)
        looks = model.look(0.7), model.look(0.3)
        model.move(0.3)
        here = model.value, model.slope().copy(), model.mean.curvature(model.w).copy()
        model.put(model.w)
        np.testing.assert_allclose(model.value, here[0], rtol=1e-12)
        np.testing.assert_allclose(model.slope(), here[1], atol=1e-12)
        return [*first, *looks, *here]

    whole = answers()
    monkeypatch.setattr("anymax.sklearn.objective._BLOCK", 0)
    monkeypatch.setattr("anymax.sklearn.objective._LEAST", 7)
    for got, want in zip(answers(), whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("mapping", [*LOSSES, am.SparseSoftmax(k=2)], ids=str)
@pytest.mark.parametrize("k", [3, 80])
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_losses_are_the_librarys(mapping, k, engine):
    """Every way to the loss of an index and its gradient, against the public loss and p - y."""
    rng = np.random.default_rng(k)
    z, y, share = 3 * rng.normal(size=(20, k)), rng.integers(0, k, 20), np.full(20, 0.05)
    if engine == "native" and isinstance(am.kernels.native.load(), str):
        pytest.skip("the library is not compiled")
    with am.use(engine):
        mean, residual = losses.IndexLoss(mapping, y, share)(z.copy())
    with am.use("reference"):
        assert mean == pytest.approx(float(am.fenchel_young(mapping, z, y)), rel=1e-10, abs=1e-13)
        np.testing.assert_allclose(residual, (am.apply(mapping, z) - np.eye(k)[y]) / 20, atol=1e-12)


@pytest.mark.whole
def test_label_losses_are_the_librarys():
    rng = np.random.default_rng(0)
    z, share = rng.normal(size=(30, 3)), np.full(30, 1 / 30)
    _, many = labels(30, 4, 3)
    csr = sparse.csr_matrix(many)
    target = many / many.sum(axis=1, keepdims=True)
    for mapping in (am.Softmax(), am.Sparsemax(), am.Entmax(1.2), am.PerturbMax()):
        mean, _ = losses.SharesLoss(mapping, losses.evenly(csr, False), share)(z)
        assert mean == pytest.approx(float(am.fenchel_young(mapping, z, target)), rel=1e-9)
    mean, _ = losses.ZlprLoss(csr, share)(z)
    assert mean == pytest.approx(float(am.multilabel_softmax_loss(z, many)), rel=1e-12)


@pytest.mark.parametrize("mapping", [am.Softmax(), am.Sparsemax(), am.Entmax(1.5)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_total_of_a_narrow_loss_is_that_of_its_rows(mapping, order):
    rng = np.random.default_rng(0)
    z, y = np.asarray(3 * rng.normal(size=(50, 7)), order=order), rng.integers(7, size=50)
    loss = losses.IndexLoss(mapping, y, rng.dirichlet(np.ones(50)))
    for scores in (z, z + 1e4, 1e-3 * z):
        value, residual = loss.total(scores)
        rows, want = loss.rows(scores)
        assert value == pytest.approx(rows @ loss.wide, rel=1e-12, abs=1e-11)
        np.testing.assert_allclose(residual, want, atol=1e-12)
    assert losses.IndexLoss(am.Entmax(1.3), y, loss.wide).total(z) is None
    z[:, 0], y[:] = 1e4, 1  # a probability too small to have a logarithm
    far = losses.IndexLoss(mapping, y, loss.wide)
    assert far(z)[0] == pytest.approx(far.rows(z)[0] @ loss.wide)
    assert np.isfinite(far(z)[0])
