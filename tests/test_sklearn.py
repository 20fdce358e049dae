"""The estimators of scikit-learn's kind: the objective, its optimum, and the manners that scikit-learn asks for."""

import functools
import pickle

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy import optimize, sparse
from scipy.spatial import distance
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, make_classification, make_multilabel_classification
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, log_loss
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import anymax as am
from anymax.sklearn import (
    LabelDistributionClassifier,
    MappingClassifier,
    MultiLabelMappingClassifier,
    lbfgs,
    levels,
    losses,
)  # fmt: skip
from anymax.sklearn.objective import Linear

TIGHT = {"tol": 1e-9, "max_iter": 2000}
OWN_LOSS = [
    "softmax",
    "sparsemax",
    "entmax15",
    am.Entmax(1.2),
    am.Entmax(0.7),
    am.NormMax(2.0),
    am.PerturbMax("logistic"),
]

LOSSES = [am.Softmax(), am.Sparsemax(), am.Entmax(1.5), am.Entmax(1.2), am.Entmax(0.6), am.NormMax()]


def blobs(n=120, d=6, k=4, seed=0):
    return make_classification(
        n, d, n_informative=d - 1, n_redundant=1, n_classes=k, n_clusters_per_class=1, class_sep=0.7, random_state=seed
    )


def labels(n=150, d=8, k=5, seed=1):
    return make_multilabel_classification(n, d, n_classes=k, n_labels=2, allow_unlabeled=False, random_state=seed)


def objective(w, x, intercept, loss, l2):
    """The definition, word for word, from the public losses."""
    z = x @ w[: x.shape[1]] + (w[x.shape[1]] if intercept else 0)
    return loss(z) + 0.5 * l2 * np.sum(w[: x.shape[1]] ** 2)


# -- scikit-learn's own checks -------------------------------------------------------------------------------------------------


ZEROS = "check_classifiers_multilabel_output_format_predict_proba"


@parametrize_with_checks(
    [
        kind(mapping)
        for kind in (MappingClassifier, MultiLabelMappingClassifier)
        for mapping in ("softmax", "sparsemax")
    ],
    expected_failed_checks=lambda model: (
        {ZEROS: "it wants 0 < p; sparse maps give exact zeros"}
        if isinstance(model, MultiLabelMappingClassifier) and model.mapping == "sparsemax"
        else {}
    ),
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.whole(lambda estimator: estimator.mapping == "softmax")
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


# -- the optimum ---------------------------------------------------------------------------------------------------------------


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


@pytest.mark.thin(3)
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
    "sparsemax",
    "entmax",
    "normmax",
    "taylor",
    "binary",
    "labels",
    "labels taylor",
    "labels csr",
    "sigmoid",
    "zlpr",
)


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
    yield "binary", x, losses.BinaryLoss(am.Entmax(1.5), (y > 0).astype(np.int64), share), 1
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


# -- the solver ----------------------------------------------------------------------------------------------------------------


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


# -- data ----------------------------------------------------------------------------------------------------------------------


def refuse(self, *args, **options):
    raise AssertionError("densified")


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_csr(dtype, index, monkeypatch):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 150)
    x = sparse.random(150, 700, 0.05, "csr", rng=rng)
    x = (x + sparse.csr_matrix((np.full(150, 2.0), (np.arange(150), y)), x.shape)).astype(dtype)
    x.indices, x.indptr = x.indices.astype(index), x.indptr.astype(index)
    dense = MappingClassifier("sparsemax", tol=1e-6, max_iter=500).fit(x.toarray(), y)
    with monkeypatch.context() as patch:
        for name in ("toarray", "todense"):
            patch.setattr(sparse.csr_matrix, name, refuse)
        model = MappingClassifier("sparsemax", tol=1e-6, max_iter=500).fit(x, y)
        model.predict_proba(x)
    assert model.coef_.dtype == model.intercept_.dtype == model.predict_proba(x).dtype == dtype
    assert x.indices.dtype == index
    np.testing.assert_allclose(model.coef_, dense.coef_, atol=2e-4)
    array = MappingClassifier("sparsemax", tol=1e-6, max_iter=500).fit(sparse.csr_array(x), y)
    np.testing.assert_array_equal(array.coef_, model.coef_)
    _, many = labels(150, 4, 5)
    both = MultiLabelMappingClassifier("sparsemax", scale=1.0).fit(x, sparse.csr_matrix(many)).predict(x)
    assert sparse.issparse(both)


def test_layouts_of_dense_data():
    x, y = blobs(100, 6, 3)
    wide = np.empty((100, 12))
    wide[:, ::2] = x
    wide.flags.writeable = False
    want = MappingClassifier(**TIGHT).fit(x, y).coef_
    for other in (np.asfortranarray(x), wide[:, ::2], x.tolist()):
        np.testing.assert_allclose(MappingClassifier(**TIGHT).fit(other, y).coef_, want, atol=1e-7)
    small = MappingClassifier().fit(x.astype(np.float32), y)
    assert small.predict_proba(x.astype(np.float32)).dtype == np.float32
    np.testing.assert_allclose(small.coef_, want, atol=5e-3)


def test_many_features_few_rows():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 900)), np.arange(30) % 3
    model = MappingClassifier("softmax", tol=1e-7, max_iter=1000).fit(x, y)
    theirs = LogisticRegression(tol=1e-9, max_iter=5000).fit(x, y)
    np.testing.assert_allclose(model.coef_, theirs.coef_, atol=1e-4)


def test_weights_are_repetitions():
    x, y = blobs(60, 4, 3)
    weights = np.random.default_rng(0).integers(0, 3, 60)
    keep = np.repeat(np.arange(60), weights)
    for model in (MappingClassifier(**TIGHT), MappingClassifier("entmax15", class_weight="balanced", **TIGHT)):
        a = clone(model).fit(x, y, weights)
        b = clone(model).fit(x[keep], y[keep])
        np.testing.assert_allclose(a.coef_, b.coef_, atol=1e-6)


# -- what the estimators promise ------------------------------------------------------------------------------------------------


def test_exact_zeros():
    x, y = blobs(300, 6, 4)
    model = MappingClassifier("sparsemax", C=10).fit(x, y)
    p, log_p = model.predict_proba(x), model.predict_log_proba(x)
    assert (p == 0).mean() > 0.2
    np.testing.assert_allclose(p.sum(axis=1), 1)
    assert (np.isneginf(log_p) == (p == 0)).all()
    np.testing.assert_allclose(np.exp(log_p), p)
    np.testing.assert_array_equal(p, am.sparsemax(model.decision_function(x)))
    assert model.score(x, y) == np.mean(model.predict(x) == y)


def test_two_classes_are_one_column():
    x, y = blobs(100, 4, 2)
    names = np.array(["no", "yes"])[y]
    for mapping in ("sparsemax", "entmax15", am.Entmax(1.2)):
        model = MappingClassifier(mapping, **TIGHT).fit(x, names)
        assert model.coef_.shape == (1, 4)
        z = model.decision_function(x)
        assert z.shape == (100,)
        np.testing.assert_array_equal(model.predict(x), np.array(["no", "yes"])[(z > 0).astype(int)])
        np.testing.assert_allclose(
            model.predict_proba(x), am.apply(model.mapping_, np.stack([0 * z, z], 1)), atol=1e-12
        )


def test_maps_without_a_potential_train_by_log_p():
    x, y = blobs(150, 5, 3)
    for mapping in ("taylor", "sigsoftmax", am.Ratio.sigmoid()):
        model = MappingClassifier(mapping, max_iter=500).fit(x, y)
        assert model.score(x, y) > LogisticRegression().fit(x, y).score(x, y) - 0.08
        assert (model.predict(x) == model.predict_proba(x).argmax(axis=1)).all()
    two = MappingClassifier("taylor", max_iter=500).fit(x[y < 2], y[y < 2])
    assert two.coef_.shape == (2, 5)
    assert two.decision_function(x).shape == (150,)


def test_alpha_and_names():
    x, y = blobs()
    assert MappingClassifier("entmax", alpha=1.3).fit(x, y).mapping_ == am.Entmax(1.3)
    assert MappingClassifier(am.Entmax(1.9), alpha=1.3).fit(x, y).mapping_ == am.Entmax(1.3)
    same = [MappingClassifier(m, **TIGHT).fit(x, y).coef_ for m in ("sparsemax", am.Entmax(2.0), "entmax")]
    np.testing.assert_allclose(same[0], same[1], atol=1e-6)
    assert abs(same[0] - same[2]).max() > 1e-3


def test_c_and_l2_say_the_same():
    x, y = blobs(100)
    weights = np.full(100, 2.0)
    a = MappingClassifier(C=0.5, **TIGHT).fit(x, y, weights).coef_
    np.testing.assert_allclose(MappingClassifier(l2=1 / (0.5 * 200), **TIGHT).fit(x, y, weights).coef_, a, atol=1e-6)


def test_warm_start_and_verbose(capsys):
    x, y = blobs(200)
    model = MappingClassifier("entmax15", warm_start=True, verbose=1).fit(x, y)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == model.n_iter_[0] + 1
    assert lines[0].startswith("iteration 0: objective ")
    model.fit(x, y)
    assert model.n_iter_[0] == 0
    cold = MappingClassifier("entmax15", verbose=1, solver="lbfgs-scipy").fit(x, y)
    assert len(capsys.readouterr().out.splitlines()) == 1 + cold.n_iter_[0]
    with pytest.raises(ValueError, match=r"warm_start: the last fit had coefficients of shape \(4, 6\)"):
        model.fit(x[:, :3], y)


@pytest.mark.parametrize("kind", [MappingClassifier, MultiLabelMappingClassifier, LabelDistributionClassifier])
def test_pickles_name_the_public_path(kind):
    """And not the file of the package that the class lies in, which may change."""
    assert (kind.__module__, kind.__qualname__) == ("anymax.sklearn", kind.__name__)
    old = f"canymax.sklearn\n{kind.__name__}\n.".encode()  # protocol 0
    assert pickle.loads(old) is kind
    assert pickle.dumps(kind, protocol=0).startswith(old[:-1])


def test_pipeline_grid_pickle_and_clone():
    x, y = blobs(150)
    pipeline = make_pipeline(StandardScaler(), MappingClassifier())
    grid = {
        "mappingclassifier__mapping": ["softmax", am.Sparsemax(), am.Entmax(1.2)],
        "mappingclassifier__C": [0.1, 1.0],
    }
    search = GridSearchCV(pipeline, grid, cv=3).fit(x, y)
    assert search.best_score_ > 0.5
    for model in (search, MultiLabelMappingClassifier("entmax", alpha=1.3).fit(*labels())):
        again = pickle.loads(pickle.dumps(model))
        point = x if model is search else labels()[0]
        np.testing.assert_array_equal(again.predict_proba(point), model.predict_proba(point))
    copy = clone(MappingClassifier(am.Entmax(1.2), C=3))
    assert copy.get_params()["mapping"] == am.Entmax(1.2)
    assert "Entmax(alpha=1.2)" in repr(copy)
    with pytest.raises(NotFittedError):
        copy.predict(x)


def test_the_parameters_of_a_map_are_searched():
    x, y = blobs(150)
    map_of = am.Entmax(1.5)
    grid = {"mapping__alpha": [1.25, 1.5, 2.0], "C": [0.1, 1.0]}
    search = GridSearchCV(MappingClassifier(map_of), grid, cv=3).fit(x, y)
    assert search.best_estimator_.mapping == am.Entmax(search.best_params_["mapping__alpha"])
    assert map_of == am.Entmax(1.5), "maps are frozen"
    assert clone(search.best_estimator_).mapping == search.best_estimator_.mapping
    assert clone(search).fit(x, y).best_params_ == search.best_params_
    one = GridSearchCV(
        MappingClassifier(), {"mapping": [am.Entmax(a) for a in (1.25, 1.5, 2.0)], "C": [0.1, 1.0]}, cv=3
    )
    np.testing.assert_array_equal(
        np.sort(one.fit(x, y).cv_results_["mean_test_score"]), np.sort(search.cv_results_["mean_test_score"])
    )
    pipeline = make_pipeline(StandardScaler(), MultiLabelMappingClassifier("entmax"))
    pipeline.set_params(multilabelmappingclassifier__mapping__alpha=1.3)
    assert pipeline[-1].mapping == am.Entmax(1.3)
    model = MappingClassifier().set_params(mapping="normmax", mapping__alpha=3.0)
    assert model.mapping == am.NormMax(3.0)
    assert model.get_params()["mapping__alpha"] == 3.0
    assert "mapping__alpha" not in model.get_params(deep=False)
    with pytest.raises(ValueError, match=r"mapping__beta: .*has no parameter 'beta'; it has alpha"):
        model.set_params(mapping__beta=1.0)
    with pytest.raises(ValueError, match="mapping__alpha: 'sigmoid' has no parameter 'alpha'; it has none"):
        MultiLabelMappingClassifier("sigmoid").set_params(mapping__alpha=1.0)


def test_smoothing_bounds_the_log_loss():
    x, y = blobs(300, 6, 4)
    plain = MappingClassifier("sparsemax", C=10).fit(x[:150], y[:150])
    model = MappingClassifier("sparsemax", C=10, smoothing=0.04).fit(x[:150], y[:150])
    p = model.predict_proba(x)
    assert p.min() == pytest.approx(0.01)
    np.testing.assert_allclose(p, 0.96 * plain.predict_proba(x) + 0.01)
    np.testing.assert_allclose(model.predict_log_proba(x), np.log(p))
    np.testing.assert_array_equal(model.predict(x), plain.predict(x))
    assert log_loss(y[150:], p[150:]) < log_loss(y[150:], plain.predict_proba(x[150:])) / 2
    x, many = labels()
    for mapping, floor in (("sparsemax", 0.02), ("sigmoid", 0.05)):
        rough = MultiLabelMappingClassifier(mapping).fit(x, many)
        even = MultiLabelMappingClassifier(mapping, smoothing=0.1).fit(x, many)
        np.testing.assert_array_equal(rough.predict(x), even.predict(x))
        np.testing.assert_allclose(even.predict_proba(x), 0.9 * rough.predict_proba(x) + floor)
        assert np.isfinite(even.predict_log_proba(x)).all()


def test_no_penalty_is_an_infinite_c():
    x, y = blobs(200, 4, 3)
    a, b = MappingClassifier("softmax", penalty=None).fit(x, y), MappingClassifier("softmax", C=np.inf).fit(x, y)
    np.testing.assert_array_equal(a.coef_, b.coef_)


def test_n_jobs_is_the_number_of_threads(monkeypatch):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    x, y = blobs(100)
    seen, call = set(), losses.IndexLoss.__call__

    def look(self, z):
        seen.update(library["num_threads"] for library in threadpoolctl.threadpool_info())
        return call(self, z)

    monkeypatch.setattr(losses.IndexLoss, "__call__", look)
    with threadpoolctl.threadpool_limits(2):
        MappingClassifier(n_jobs=1, max_iter=3, tol=1.0).fit(x, y)
        assert seen == {1}
        seen.clear()
        MappingClassifier(n_jobs=1).partial_fit(x, y, classes=range(4))
        assert seen == {1}


def test_feature_names():
    x, y = blobs(60, 3, 3)

    pandas = pytest.importorskip("pandas")
    model = MappingClassifier().fit(pandas.DataFrame(x, columns=["a", "b", "c"]), y)
    assert list(model.feature_names_in_) == ["a", "b", "c"]
    with pytest.warns(UserWarning, match="feature names"):
        model.predict(x)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"mapping": "softmaxx"},
            r"there is no map 'softmaxx' \(did you mean 'softmax'\?\); the maps are softmax, sparsemax",
        ),
        ({"mapping": 3}, "or a name such as 'sparsemax', got 3"),
        ({"mapping": "ratio"}, "ratio needs a function; choose one of square, sigmoid, relu, or give"),
        ({"mapping": "entmax:alpha=1.5", "alpha": 1.2}, "says its alpha already; choose mapping='entmax'"),
        ({"mapping": "softmax", "alpha": 1.2}, "softmax has no alpha"),
        ({"mapping": "entmax15", "alpha": 1.2}, "choose mapping='entmax'"),
        ({"mapping": am.Budget(2)}, "sums to 2; a classifier needs a map that sums to 1"),
        ({"mapping": am.Entmax(np.array([1.5]))}, "its alpha is an array"),
        ({"C": 0}, "C=0: expected a positive number"),
        ({"C": 2.0, "l2": 0.1}, "give one of them"),
        ({"l2": -1}, "l2=-1: expected a number from 0"),
        ({"tol": float("nan")}, "tol=nan"),
        ({"max_iter": 1.5}, "max_iter=1.5: expected an integer"),
        ({"penalty": "l1"}, "penalty='l1': expected 'l2', or None for no penalty"),
        ({"penalty": None, "C": 2.0}, "without a penalty there is no weight of it"),
        ({"n_jobs": 0}, "n_jobs=0: expected a number of threads from 1, -1 for one a processor, or None"),
        ({"smoothing": 1.5}, "smoothing=1.5: expected a number from 0 to 1"),
        ({"solver": "sgd"}, "expected 'lbfgs' or 'lbfgs-scipy'"),
    ],
)
def test_errors_say_what_to_do(options, words):
    x, y = blobs(30, 4, 3)
    with pytest.raises((ValueError, TypeError), match=words):
        MappingClassifier(**options).fit(x, y)


# -- many labels ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax", "entmax15"])
def test_many_labels_first_order_conditions(mapping):
    x, many = labels()
    model = MultiLabelMappingClassifier(mapping, l2=0.1, threshold=0.2, scale=1.0, **TIGHT).fit(x, many)
    residual = many / many.sum(axis=1, keepdims=True) - model.predict_proba(x)
    np.testing.assert_allclose(0.1 * model.coef_, residual.T @ x / len(x), atol=1e-8)


def test_rows_without_a_label_take_no_part_without_none():
    x, many = labels()
    more = np.vstack([x, 5 + x[:20]])
    empty = np.vstack([many, np.zeros((20, many.shape[1]), int)])
    for mapping, same, none in (
        ("sparsemax", True, False),
        ("sparsemax", False, "auto"),
        ("sigmoid", False, False),
        ("zlpr", False, False),
    ):
        options = {"threshold": 0.5, "scale": 1.0, "max_iter": 500, "none": none}
        a = MultiLabelMappingClassifier(mapping, **options).fit(x, many).coef_
        b = MultiLabelMappingClassifier(mapping, **options).fit(more, empty).coef_
        assert (abs(a - b).max() < 1e-12) == same


def test_sigmoid_is_a_logistic_regression_for_each_label():
    x, many = labels()
    model = MultiLabelMappingClassifier("sigmoid", threshold=0.5, C=1.0, tol=1e-8, max_iter=2000).fit(x, many)
    for j in range(many.shape[1]):
        one = LogisticRegression(tol=1e-10, max_iter=5000).fit(x, many[:, j])
        np.testing.assert_allclose(model.coef_[j], one.coef_[0], atol=1e-5)
        np.testing.assert_allclose(model.predict_proba(x)[:, j], one.predict_proba(x)[:, 1], atol=1e-5)
    np.testing.assert_allclose(model.predict_log_proba(x), np.log(model.predict_proba(x)))


def test_decisions():
    x, many = labels()
    model = MultiLabelMappingClassifier("sparsemax", scale=2.0).fit(x, many)
    z = model.decision_function(x)
    assert (model.decision_, model.scale_) == ("support", 2.0)
    np.testing.assert_array_equal(model.predict(x), am.sparsemax(2 * z) > 0)
    assert model.predict(x).sum(axis=1).min() >= 1
    model = MultiLabelMappingClassifier("sparsemax", decision="threshold", threshold=0.3).fit(x, many)
    np.testing.assert_array_equal(model.predict(x), am.sparsemax(z) > 0.3)
    assert not hasattr(model, "scale_")
    model = MultiLabelMappingClassifier("softmax").fit(x, many)
    assert model.decision_ == "threshold"
    np.testing.assert_array_equal(model.predict(x), am.softmax(model.decision_function(x)) > model.threshold_)
    assert len(model.cv_results_["threshold"]) in (200, 201)  # the best is one of 200, or one more


@pytest.mark.parametrize("scoring", ["f1_micro", lambda a, b: f1_score(a, b, average="macro", zero_division=0)])
def test_tuning_is_cross_validation(scoring):
    """The scores of the grid, computed again with the public interface, a fit for each fold and each level."""
    x, many = labels(80)
    grid = [0.5, 1.0, 3.0]
    model = MultiLabelMappingClassifier("sparsemax", grid=grid, scoring=scoring, cv=4, random_state=7).fit(x, many)
    for level, score in zip(grid, model.cv_results_["score"]):
        guess = np.zeros_like(many)
        for train, test in KFold(4, shuffle=True, random_state=7).split(x):
            part = MultiLabelMappingClassifier("sparsemax", scale=level).fit(x[train], many[train])
            guess[test] = part.predict(x[test])
        want = f1_score(many, guess, average="micro") if scoring == "f1_micro" else scoring(many, guess)
        assert score == pytest.approx(want)
    assert model.scale_ == grid[int(np.argmax(model.cv_results_["score"]))]
    again = clone(model).fit(x, many)
    assert (again.cv_results_["score"] == model.cv_results_["score"]).all()


def test_the_empty_set_is_learned():
    """It was never predicted, in silence, where every third row had no label."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 3, 300)
    x = np.eye(3)[kind] + 0.05 * rng.normal(size=(300, 3))
    many = np.array([[0, 0], [1, 0], [1, 1]])[kind]
    for mapping in ("sparsemax", "softmax", "taylor", "sigmoid", "zlpr"):
        model = MultiLabelMappingClassifier(mapping, C=10).fit(x, many)
        np.testing.assert_array_equal(model.predict(x), many, err_msg=mapping)
        assert model.none_ == (mapping not in ("sigmoid", "zlpr"))
        if model.none_:
            p = model.predict_proba(x)
            assert (p.sum(axis=1)[kind == 0] < 0.6).all()
            np.testing.assert_allclose(
                np.log(p, where=p > 0, out=np.full(p.shape, -np.inf)), model.predict_log_proba(x)
            )
    rare = MultiLabelMappingClassifier("softmax", threshold=0.01).fit(x, many)
    assert not rare.predict(x)[kind == 0].any(), "where none is the most probable, whatever the threshold is"
    some = kind > 0
    assert not MultiLabelMappingClassifier().fit(x[some], many[some]).none_
    assert MultiLabelMappingClassifier(none=True).fit(x[some], many[some]).none_
    assert (
        MultiLabelMappingClassifier("sparsemax", none=False, scale=1.0)
        .fit(x, many)
        .predict(x)[kind == 0]
        .any(axis=1)
        .all()
    )


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax", "entmax15"])
def test_none_has_the_score_0(mapping):
    """The conditions of the optimum where the target of an empty row is "none": from the public map alone."""
    x, many = make_multilabel_classification(120, 6, n_classes=4, n_labels=1, random_state=0)
    assert (many.sum(axis=1) == 0).mean() > 0.2
    model = MultiLabelMappingClassifier(mapping, l2=0.05, threshold=0.2, scale=1.0, **TIGHT).fit(x, many)
    p = am.apply(model.mapping_, np.c_[np.zeros(120), model.decision_function(x)])[:, 1:]
    np.testing.assert_allclose(model.predict_proba(x), p)
    residual = many / np.maximum(many.sum(axis=1, keepdims=True), 1) - p
    np.testing.assert_allclose(0.05 * model.coef_, residual.T @ x / 120, atol=1e-8)
    np.testing.assert_allclose(residual.mean(axis=0), 0, atol=1e-8)


def sets(n=40, k=6, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((n, k)).round(2), rng.random((n, k)) < 0.3


@pytest.mark.parametrize("scoring", levels.SCORES)
def test_the_score_of_every_level(scoring):
    """By running sums, and by scikit-learn at each level."""
    ranks, truth = sets()
    truth[:3] = False
    cuts, where, order = levels._cuts(ranks, False)
    found = levels.SCORES[scoring].along(truth, order)[where]
    assert len(cuts) == len(np.unique(ranks[ranks > 0])) + 1
    want = [levels.SCORES[scoring].score(truth, (ranks > level).astype(int)) for level in cuts]
    np.testing.assert_allclose(found, want, atol=1e-12)
    level, tried = levels.best(ranks, truth, scoring, None, False)
    assert tried["score"].max() == max(found)
    assert levels.SCORES[scoring].score(truth, (ranks > level).astype(int)) == pytest.approx(max(want))


@pytest.mark.parametrize("mapping", [am.Sparsemax(), am.Entmax(1.5), am.Entmax(1.2), am.Entmax(2.7)], ids=str)
def test_the_scale_up_to_which_a_label_lasts(mapping):
    z = np.random.default_rng(0).normal(size=(30, 7)) * 2
    z[0] = 0.0  # all are the largest
    ranks = levels.lasting(mapping, z)
    for scale in (0.3, 0.7, 1.0, 2.5, 6.0):
        np.testing.assert_array_equal(ranks > scale, am.apply(mapping, scale * z) > 0)
    assert np.isposinf(ranks[0]).all()


def test_the_scales_of_other_maps_are_looked_up():
    z = np.random.default_rng(0).normal(size=(30, 7)) * 2
    ranks = levels.lasting(am.NormMax(2.0), z)
    for scale in np.geomspace(0.1, 100.0, 64)[::7]:
        np.testing.assert_array_equal(ranks > scale, am.apply(am.NormMax(2.0), scale * z) > 0)


def test_a_level_that_no_grid_has():
    """The best threshold is below 1/n, where the usual grid began."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    many = (x @ rng.normal(size=(3, 8)) + np.r_[6.0, np.full(7, -1.0)] + rng.normal(size=(400, 8)) > 0).astype(int)
    model = MultiLabelMappingClassifier("softmax", decision="threshold").fit(x, many)
    assert model.threshold_ < 1 / 8
    coarse = MultiLabelMappingClassifier("softmax", grid=[i / 8 for i in range(1, 8)]).fit(x, many)
    assert model.cv_results_["score"].max() > coarse.cv_results_["score"].max() + 0.01


def test_sparse_and_dense_labels_are_the_same():
    x, many = labels()
    a = MultiLabelMappingClassifier("entmax15").fit(x, many)
    b = MultiLabelMappingClassifier("entmax15").fit(sparse.csr_matrix(x), sparse.csr_matrix(many))
    assert sparse.issparse(b.predict(x))
    assert (a.predict(x) != b.predict(x).toarray()).mean() < 0.01
    np.testing.assert_allclose(a.coef_, b.coef_, atol=2e-3)
    weighted = MultiLabelMappingClassifier("entmax15", class_weight="balanced", scale=1.0).fit(x, many, np.ones(len(x)))
    assert abs(weighted.coef_ - a.coef_).max() > 1e-3


def test_one_class_a_row_is_a_mapping_classifier():
    x, y = blobs()
    a, b = MappingClassifier(C=0.3).fit(x, y), MultiLabelMappingClassifier("entmax15").fit(x, y)
    assert b.decision_ == "argmax"
    np.testing.assert_array_equal(a.coef_, b.coef_)
    np.testing.assert_array_equal(a.predict(x), b.predict(x))
    np.testing.assert_array_equal(a.predict_log_proba(x), b.predict_log_proba(x))


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("options", "many", "words"),
    [
        ({"decision": "top"}, None, "decision='top': expected 'auto', 'support' or 'threshold'"),
        ({"mapping": "softmax", "decision": "support"}, None, "is never 0; use decision='threshold' or a sparse map"),
        ({"threshold": -0.1}, None, "a number from 0, or 'cv' to tune it"),
        ({"scale": 0}, None, "a positive number, or 'cv'"),
        ({"scoring": "accuracy"}, None, "scoring='accuracy': expected 'f1_micro'"),
        ({"grid": []}, None, "grid is empty"),
        ({"mapping": "zlpr", "alpha": 2}, None, "'zlpr' has no alpha"),
        ({"class_weight": {9: 1.0}}, None, "names the label 9; the labels are the columns 0 to 4"),
        ({"class_weight": {1: -1.0}}, None, r"class_weight=\{1: -1.0\}: expected numbers from 0"),
        ({"cv": 1}, None, "cross-validation needs 2 folds"),
        ({}, np.zeros((150, 5), int), "y has no label in any row"),
        ({}, np.full((150, 5), 2), "expected an indicator matrix"),
        ({"mapping": "sigmoid"}, np.arange(150) % 3, "is for an indicator matrix"),
    ],
)
def test_errors_of_many_labels_say_what_to_do(options, many, words):
    x, usual = labels()
    with pytest.raises(ValueError, match=words):
        MultiLabelMappingClassifier(**options).fit(x, usual if many is None else many)


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


@pytest.mark.parametrize("mapping", [am.Ratio.relu(), am.Ratio.square()], ids=["relu", "square"])
@pytest.mark.parametrize("kind", [MappingClassifier, MultiLabelMappingClassifier])
def test_a_sparse_map_without_a_loss_is_refused(mapping, kind):
    """It stayed at chance with a NaN gradient, and blamed rounding."""
    X, y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 2, 1])
    with pytest.raises(ValueError, match=r"exact zeros and has no Fenchel-Young loss.*choose a sparse map with a loss"):
        kind(mapping).fit(X, y if kind is MappingClassifier else np.eye(3, dtype=int)[y])


def test_a_gradient_that_is_not_finite_is_named():
    class Hole(am.Sigsoftmax):
        def weights(self, x, keep, xp):
            u, du = super().weights(x, keep, xp)
            return u, du * np.nan

    X, y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 2, 1])
    with pytest.warns(ConvergenceWarning, match=r"the gradient of the loss is nan, .*check_mapping"):
        MappingClassifier(Hole()).fit(X, y)


# -- proportions ------------------------------------------------------------------------------------------------------------------


def mixtures(k=4, n=150, seed=0):
    """Proportions that are sparsemax of linear scores: many of them are 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5))
    return x, am.sparsemax(x @ rng.normal(size=(5, k)))


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax", "entmax15", am.Entmax(1.2), "taylor"], ids=str)
@pytest.mark.parametrize("k", [2, 4])
def test_proportions_are_fitted_by_the_maps_loss(mapping, k):
    x, q = mixtures(k)
    model = LabelDistributionClassifier(mapping, l2=0.01, tol=1e-7, max_iter=3000).fit(x, q)
    assert model.coef_.shape == ((1, 5) if k == 2 and mapping != "taylor" else (k, 5))
    again = LabelDistributionClassifier(mapping, l2=0.01, tol=1e-7, max_iter=3000).fit(x, sparse.csr_matrix(q))
    np.testing.assert_array_equal(again.coef_, model.coef_)
    if mapping == "taylor":
        return
    p = model.predict_proba(x)
    residual = q - p if k > 2 else (q - p)[:, 1:]
    np.testing.assert_allclose(0.01 * model.coef_, residual.T @ x / len(x), atol=1e-6)
    z = np.random.default_rng(1).normal(size=q.shape)
    value, gradient = losses.SharesLoss(model.mapping_, sparse.csr_matrix(q), np.full(150, 1 / 150))(z)
    assert value == pytest.approx(float(am.fenchel_young(model.mapping_, z, q)), rel=1e-9)
    np.testing.assert_allclose(gradient, (am.apply(model.mapping_, z) - q) / 150, atol=1e-12)


def test_the_score_is_the_jensen_shannon_divergence():
    x, q = mixtures()
    model = LabelDistributionClassifier("sparsemax", C=1e4).fit(x, q)
    theirs = distance.jensenshannon(model.predict_proba(x), q, axis=1) ** 2
    assert model.score(x, q) == pytest.approx(-theirs.mean(), abs=1e-9)
    assert model.score(x, q, np.arange(150.0)) == pytest.approx(-np.average(theirs, weights=np.arange(150.0)), abs=1e-9)
    assert model.score(x, q) > -1e-3
    assert model.score(x, q) > LabelDistributionClassifier("softmax", C=1e4).fit(x, q).score(x, q)
    apart = LabelDistributionClassifier("sparsemax", max_iter=0)
    with pytest.warns(ConvergenceWarning):
        apart.fit(x, q)
    assert apart.score(x, np.eye(4)[[0] * 150]) == pytest.approx(
        -(distance.jensenshannon(np.full(4, 0.25), [1, 0, 0, 0]) ** 2)
    )
    search = GridSearchCV(LabelDistributionClassifier("entmax"), {"mapping__alpha": [1.1, 2.0]}, cv=3).fit(x, q)
    assert search.best_params_ == {"mapping__alpha": 2.0}


def test_one_class_a_row_of_proportions_is_a_mapping_classifier():
    x, y = blobs(150, 6, 3)
    a, b = MappingClassifier().fit(x, y), LabelDistributionClassifier().fit(x, y)
    np.testing.assert_array_equal(a.coef_, b.coef_)
    assert a.score(x, y) == b.score(x, y)
    np.testing.assert_allclose(LabelDistributionClassifier().fit(x, np.eye(3)[y]).coef_, a.coef_, atol=1e-3)
    heavy = LabelDistributionClassifier(class_weight={1: 3.0}, **TIGHT).fit(x, np.eye(3)[y])
    np.testing.assert_allclose(
        heavy.coef_, MappingClassifier(class_weight={1: 3.0}, **TIGHT).fit(x, y).coef_, atol=1e-6
    )


def test_proportions_a_few_rows_at_a_time():
    x, q = mixtures(n=600)
    model = LabelDistributionClassifier("sparsemax", l2=1e-3)
    for _ in range(4):
        for rows in np.array_split(np.arange(600), 4):
            model.partial_fit(x[rows], q[rows])
    assert model.score(x, q) > LabelDistributionClassifier("sparsemax", l2=1e-3).fit(x, q).score(x, q) - 0.005
    with pytest.raises(ValueError, match="are not those of the first call"):
        model.partial_fit(x, mixtures(5, 600)[1])


@pytest.mark.parametrize(
    ("q", "options", "words"),
    [
        (np.full((150, 4), 0.5), {}, "row 0 of y sums to 2: expected proportions that sum to 1"),
        (np.full((150, 4), [2.0, -1.0, 0.0, 0.0]), {}, "y holds -1.0: expected proportions from 0"),
        (np.eye(4)[[0] * 150], {"class_weight": "balanced"}, "of proportions it is a dict of column: weight, or None"),
        (np.eye(4)[[0] * 150], {"class_weight": {7: 1.0}}, "names the class 7; the classes are the columns 0 to 3"),
    ],
)
def test_errors_of_proportions(q, options, words):
    with pytest.raises(ValueError, match=words):
        LabelDistributionClassifier(**options).fit(mixtures()[0], q)


# -- a few rows at a time ---------------------------------------------------------------------------------------------------------


def loss_and_penalty(model, x, y, l2):
    z = model.decision_function(x)
    z = np.stack([0 * z, z], axis=1) if z.ndim == 1 else z
    return float(am.fenchel_young(model.mapping_, z, y, reduction="mean")) + 0.5 * l2 * np.sum(model.coef_**2)


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax", "entmax15"])
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.thin(2)
def test_some_epochs_come_near_to_fit(mapping, k):
    """Without a rate to be tuned, and whatever the units and offsets of the features are."""
    x, y = blobs(500, 8, k)
    best = loss_and_penalty(MappingClassifier(mapping, l2=0.01, tol=1e-7).fit(x, y), x, y, 0.01)
    for data, l2 in ((x, 0.01), (np.asfortranarray(x), 0.01), (sparse.csr_matrix(x), 0.01)):
        model = MappingClassifier(mapping, l2=l2)
        values = []
        for _ in range(8):
            model.partial_fit(data, y, classes=range(k))
            values.append(loss_and_penalty(model, x, y, l2))
        assert values[0] < 1.3 * best
        assert best - 1e-9 <= values[-1] < 1.01 * best
    assert model.n_iter_ == [8 * -(-500 // 32)]
    assert model.weight_ == 8 * 500


def test_units_and_offsets_do_not_matter_to_partial_fit():
    x, y = blobs(400, 5, 3)
    moved = x * [1e-4, 1.0, 1e3, 1e6, 1e-2] + [0.0, 10.0, -1e3, 1e7, 0.0]
    plain, other = MappingClassifier(l2=0.0), MappingClassifier(l2=0.0)
    for at in range(0, 400, 100):
        plain.partial_fit(x[at : at + 100], y[at : at + 100], classes=range(3))
        other.partial_fit(moved[at : at + 100], y[at : at + 100], classes=range(3))
    np.testing.assert_allclose(other.predict_proba(moved), plain.predict_proba(x), atol=1e-4)


@pytest.mark.parametrize("intercept", [True, False])
def test_one_pass_over_many_rows(intercept):
    """The penalty is that of `fit` on all rows of all calls."""
    x, y = blobs(3000, 6, 3)
    model = MappingClassifier("softmax", C=0.01, fit_intercept=intercept)
    for rows in np.array_split(np.arange(3000), 7):
        model.partial_fit(x[rows], y[rows], classes=range(3))
    best = MappingClassifier("softmax", C=0.01, fit_intercept=intercept).fit(x, y)
    l2 = 1 / (0.01 * 3000)
    assert loss_and_penalty(model, x, y, l2) < 1.02 * loss_and_penalty(best, x, y, l2)
    assert intercept == model.intercept_.any()


def test_partial_fit_goes_on_from_fit_and_is_repeatable():
    x, y = blobs(300, 6, 4)
    names = np.array(["a", "b", "c", "d"])[y]
    model = MappingClassifier("softmax", l2=0.01).fit(x, names)
    best = loss_and_penalty(model, x, y, 0.01)
    model.partial_fit(x, names)
    assert loss_and_penalty(model, x, y, 0.01) < 1.05 * best
    assert model.weight_ == 600
    one, two, three = (MappingClassifier(random_state=seed) for seed in (0, 0, 1))
    for each in (one, two, three):
        each.partial_fit(x[:50], names[:50], classes=names).partial_fit(x[50:], names[50:])
    again = pickle.loads(pickle.dumps(one)).partial_fit(x, names)
    np.testing.assert_array_equal(one.coef_, two.coef_)
    np.testing.assert_array_equal(again.coef_, two.partial_fit(x, names).coef_)
    assert abs(one.coef_ - three.coef_).max() > 0
    assert not hasattr(one.fit(x, names), "stream_")
    small = MappingClassifier().partial_fit(x.astype(np.float32), y, classes=range(4))
    assert small.coef_.dtype == small.partial_fit(x, y).coef_.dtype == np.float32


def test_weights_of_rows_in_partial_fit():
    x, y = blobs(300, 6, 3)
    weights = np.where(y == 2, 0.0, 1.0)
    a = MappingClassifier("softmax").partial_fit(x, y, range(3), weights)
    b = MappingClassifier("softmax", class_weight={2: 0.0}).partial_fit(x, y, classes=range(3))
    np.testing.assert_array_equal(a.coef_, b.coef_)
    assert a.weight_ == weights.sum()
    assert (a.predict(x) != 2).all()


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax", "sigmoid", "zlpr"])
def test_label_sets_a_few_rows_at_a_time(mapping):
    x, many = make_multilabel_classification(600, 10, n_classes=5, n_labels=2, random_state=0)
    assert (many.sum(axis=1) == 0).any()
    model = MultiLabelMappingClassifier(mapping, l2=0.01)
    for _ in range(3):
        for rows in np.array_split(np.arange(600), 5):
            model.partial_fit(x[rows], many[rows])
    whole = MultiLabelMappingClassifier(mapping, l2=0.01).fit(x, many)
    reached, wanted = (f1_score(many, each.predict(x), average="micro") for each in (model, whole))
    assert reached > wanted - 0.03
    assert model.none_ == whole.none_ == (mapping in ("softmax", "sparsemax"))
    assert sum(len(z) for z, _ in model.last_) < 1000 + 32
    fixed = MultiLabelMappingClassifier(mapping, threshold=0.25, scale=2.0).partial_fit(
        sparse.csr_matrix(x), sparse.csr_matrix(many)
    )
    assert sparse.issparse(fixed.predict(x))
    assert not hasattr(fixed, "cv_results_")
    if fixed.none_:
        without = MultiLabelMappingClassifier(mapping, none=False, scale=1.0, threshold=0.3).partial_fit(x, many)
        some = many.any(axis=1)
        other = MultiLabelMappingClassifier(mapping, none=False, scale=1.0, threshold=0.3)
        assert without.weight_ == some.sum()
        assert other.partial_fit(x[some], many[some]).weight_ == some.sum()


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            [{"classes": None}],
            r"the first call of partial_fit needs all classes .*partial_fit\(X, y, classes=\[...\]\)",
        ),
        ([{"classes": [0, 1]}], "y holds the class 2, which the first call of partial_fit did not name"),
        ([{"classes": [7]}], "has one class; a classifier needs at least 2"),
        ([{"classes": [0, 1, 2]}, {"classes": [0, 1, 2, 3]}], "are not those of the first call"),
        ([{"classes": [0, 1, 2], "class_weight": "balanced"}], "found from all rows at once"),
        ([{"classes": [0, 1, 2]}, {"columns": 3}], "X has 3 features, but MappingClassifier is expecting 4"),
    ],
)
def test_errors_of_partial_fit(calls, words):
    x, y = blobs(60, 4, 3)
    model = MappingClassifier()
    for call in calls[:-1]:
        model.partial_fit(x, y, classes=call["classes"])
    call = calls[-1]
    model.class_weight = call.get("class_weight")
    with pytest.raises(ValueError, match=words):
        model.partial_fit(x[:, : call.get("columns", 4)], y, classes=call.get("classes"))


def test_errors_of_partial_fit_on_label_sets():
    x, many = labels()
    model = MultiLabelMappingClassifier().partial_fit(x, many, classes=range(5))
    for y, options, words in (
        (many[:, :4], {}, "a matrix of 5 labels"),
        (many[:, 0], {}, "y is one class per row; that of the first call was an indicator matrix of 5 labels"),
        (many, {"classes": [3, 4]}, "the classes of an indicator matrix are its columns, 0 to 4"),
    ):
        with pytest.raises(ValueError, match=words):
            model.partial_fit(x, y, **options)
    with pytest.raises(ValueError, match="that of the first call was one class per row"):
        MultiLabelMappingClassifier().partial_fit(x, many[:, 0], classes=[0, 1]).partial_fit(x, many)
