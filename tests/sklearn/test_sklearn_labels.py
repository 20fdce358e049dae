"""The classifier of many labels: its optimum, its decisions and its errors."""

import numpy as np
import pytest
from sklearn_data import TIGHT, blobs, labels

pytest.importorskip("sklearn")

from scipy import sparse, special
from sklearn.base import clone
from sklearn.datasets import make_multilabel_classification
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.model_selection import KFold

import anymax as am
from anymax.sklearn import MappingClassifier, MultiLabelMappingClassifier, levels, losses


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax", "entmax15"])
def test_many_labels_first_order_conditions(mapping):
    x, many = labels()
    model = MultiLabelMappingClassifier(mapping, l2=0.1, threshold=0.2, scale=1.0, **TIGHT).fit(x, many)
    residual = many / many.sum(axis=1, keepdims=True) - model.predict_proba(x)
    np.testing.assert_allclose(0.1 * model.coef_, residual.T @ x / len(x), atol=1e-8)


@pytest.mark.whole
def test_rows_without_a_label_take_no_part_without_none():
    x, many = labels()
    more = np.vstack([x, 5 + x[:20]])
    empty = np.vstack([many, np.zeros((20, many.shape[1]), int)])
    for mapping, same, none in (
        ("sparsemax", True, False),
        ("sparsemax", False, "auto"),
        ("sigmoid", False, "auto"),
        ("zlpr", False, "auto"),
    ):
        options = {"threshold": 0.5, "scale": 1.0, "max_iter": 500, "none": none}
        a = MultiLabelMappingClassifier(mapping, **options).fit(x, many).coef_
        b = MultiLabelMappingClassifier(mapping, **options).fit(more, empty).coef_
        assert (abs(a - b).max() < 1e-12) == same


@pytest.mark.whole
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


@pytest.mark.whole(lambda scoring: scoring != "f1_micro")
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


@pytest.mark.whole(lambda mapping, intercept: (mapping, intercept) != ("sigmoid", True))
@pytest.mark.parametrize("mapping", ["softmax", "entmax15", "sigmoid"])
@pytest.mark.parametrize("intercept", [True, False])
def test_the_last_fit_starts_near_its_end(mapping, intercept):
    """At the mean of the folds: it needs fewer iterations, and finds the optimum that it finds from zeros."""
    x, many = labels()
    options = {"fit_intercept": intercept, "tol": 1e-8, "max_iter": 2000}
    tuned = MultiLabelMappingClassifier(mapping, cv=3, **options).fit(x, many)
    given = MultiLabelMappingClassifier(mapping, threshold=0.5, scale=1.0, **options).fit(x, many)
    np.testing.assert_allclose(tuned.coef_, given.coef_, atol=1e-5)
    np.testing.assert_allclose(tuned.intercept_, given.intercept_, atol=1e-5)
    warm = MultiLabelMappingClassifier(mapping, cv=3, warm_start=True, **options).fit(x, many)
    assert warm.fit(x, many).n_iter_[0] <= 1, "the coefficients of the last fit come first"
    x, many, short = *labels(400), {"fit_intercept": intercept}
    tuned = MultiLabelMappingClassifier(mapping, cv=3, **short).fit(x, many)
    given = MultiLabelMappingClassifier(mapping, threshold=0.5, scale=1.0, **short).fit(x, many)
    assert tuned.n_iter_[0] < given.n_iter_[0]


def test_the_loss_of_sigmoids_far_from_0():
    z = np.array([[0.0, -0.0, 40.0, -40.0], [800.0, -800.0, 1.5, -2.0], [800.0, -800.0, 1e-9, -30.0]])
    y = sparse.csr_matrix([[1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0]])
    value, gradient = losses.SigmoidLoss(y, np.full(3, 1 / 3))(z)
    want = np.logaddexp(0, z) - np.where(y.toarray() > 0, z, 0)
    assert value == pytest.approx(want.sum() / 3, rel=1e-14)
    np.testing.assert_allclose(gradient, (special.expit(z) - y.toarray()) / 3, rtol=1e-14, atol=1e-300)


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
    never = MultiLabelMappingClassifier("sparsemax", none=False, scale=1.0).fit(x, many)
    assert never.predict(x)[kind == 0].any(axis=1).all()


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
    known = levels.Cuts(ranks, False)
    found = levels.SCORES[scoring].along(truth, known.order)[known.possible]
    cuts = known.levels(np.flatnonzero(known.possible))
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
    a, b = MappingClassifier("entmax15", C=0.3).fit(x, y), MultiLabelMappingClassifier("entmax15").fit(x, y)
    assert b.decision_ == "argmax"
    np.testing.assert_array_equal(a.coef_, b.coef_)
    np.testing.assert_array_equal(a.predict(x), b.predict(x))
    np.testing.assert_array_equal(a.predict_log_proba(x), b.predict_log_proba(x))
