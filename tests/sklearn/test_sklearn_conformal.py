"""Conformal sets from sparse supports: the definition, the coverage, and scikit-learn's manners."""

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, Perceptron
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

import anymax as am
from anymax.sklearn import MappingClassifier, SupportConformalClassifier, conformal, levels


def data(n=400, k=5, seed=0):
    return make_classification(
        n, 8, n_informative=6, n_redundant=1, n_classes=k, n_clusters_per_class=1, class_sep=0.8, random_state=seed
    )


class Given(ClassifierMixin, BaseEstimator):
    """A trained classifier whose scores are its rows."""

    def __init__(self, k=3):
        self.k = k

    @property
    def classes_(self):
        return np.arange(self.k)

    def fit(self, X, y):
        raise AssertionError("it is frozen")

    def decision_function(self, X):
        return np.asarray(X, np.float64)


@parametrize_with_checks([SupportConformalClassifier()])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.whole
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


# -- the temperature above which a class is in the support -----------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 2.0, 3.0])
def test_a_class_enters_the_support_at_its_temperature(alpha):
    z = np.random.default_rng(0).normal(size=(40, 7)) * np.geomspace(0.01, 100, 40)[:, None]
    z[:5, 3] = z[:5, 4]
    reached = levels.entering(alpha - 1, z)
    assert (reached[z == z.max(axis=1, keepdims=True)] == 0).all()
    for j in range(7):
        rows = reached[:, j] > 0
        for factor, inside in ((1 + 1e-6, True), (1 - 1e-6, False)):
            p = am.entmax(z[rows] / (reached[rows, j, None] * factor), alpha=alpha)
            np.testing.assert_array_equal(p[:, j] > 0, inside)
    # offsets do not matter
    np.testing.assert_allclose(levels.entering(alpha - 1, z + 1e6), reached, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("c", [0.25, 0.5, 1.0])
def test_scores_that_are_not_finite(c):
    z = np.array([
        [1.0, 0.5, -np.inf, 0.0], [np.inf, 3.0, np.inf, -np.inf], [-np.inf] * 4, [2.0, 2.0, -np.inf, -np.inf], [1e300, -1e300, 0.0, 1.0],
    ])  # fmt: skip
    reached = levels.entering(c, z)
    assert not np.isnan(reached).any()
    np.testing.assert_array_equal(reached[1], [0, np.inf, 0, np.inf])
    np.testing.assert_array_equal(reached[2], 0)
    np.testing.assert_array_equal(reached[3], [0, 0, np.inf, np.inf])
    np.testing.assert_allclose(reached[0, [0, 1, 3]], levels.entering(c, z[:1, [0, 1, 3]])[0])
    assert np.isinf(reached[0, 2])
    assert 1e299 < reached[4, 2] < np.inf


# -- the sets --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapping", ["sparsemax", "entmax15", am.Entmax(1.25)])
def test_a_set_is_the_support_just_above_the_temperature(mapping):
    x, y = data()
    model = SupportConformalClassifier(mapping=mapping, coverage=0.95).fit(x[:300], y[:300])
    z = model.decision_function(x[300:])
    np.testing.assert_array_equal(
        model.predict_set(x[300:]), am.apply(mapping, z / (model.temperature_ * (1 + 1e-9))) > 0
    )


def test_the_temperature_is_the_conformal_quantile():
    """Of n calibration scores the one of rank ceil((n + 1) coverage), found here by counting."""
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(99, 3)), rng.integers(0, 3, 99)
    for coverage in (0.5, 0.9, 0.97):
        model = SupportConformalClassifier(FrozenEstimator(Given()), mapping="sparsemax", coverage=coverage).fit(z, y)
        # with two classes above it, sum of the leads; the definition of sparsemax's support
        own = z[np.arange(99), y][:, None]
        lead = np.maximum(z - own, 0).sum(axis=1)
        np.testing.assert_allclose(model.calibration_scores_, np.sort(lead))
        assert model.temperature_ == pytest.approx(np.sort(lead)[math.ceil(100 * coverage - 1e-9) - 1])
        assert (lead <= model.temperature_ + 1e-9).sum() >= 100 * coverage - 1e-9
        np.testing.assert_array_equal(
            model.predict_set(z, coverage=0.8), SupportConformalClassifier(
                FrozenEstimator(Given()), mapping="sparsemax", coverage=0.8).fit(z, y).predict_set(z)
        )  # fmt: skip


def test_ranks_are_exact():
    assert conformal._rank(9, conformal._coverage(0.9)) == 9  # 10 * 0.9 in binary is above 9
    assert conformal._rank(8, conformal._coverage(0.9)) == 9
    assert conformal._rank(99, conformal._coverage(np.float32(0.5))) == 50
    assert conformal._coverage(0.99) == Fraction(99, 100)


@pytest.mark.whole(lambda level: level != 0.8)
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_coverage_over_many_splits(level):
    """The mean coverage is at least the level, and for scores without ties at most 1 / (n + 1) more."""
    rng = np.random.default_rng(2)
    z = rng.normal(size=(400, 6))
    y = np.array([rng.choice(6, p=p) for p in am.softmax(1.5 * z)])
    found = []
    for seed in range(300):
        order = np.random.default_rng(seed).permutation(400)
        model = SupportConformalClassifier(FrozenEstimator(Given(6)), coverage=level).fit(
            z[order[:100]], y[order[:100]]
        )
        rest = order[100:]
        found.append(model.predict_set(z[rest])[np.arange(300), y[rest]].mean())
    error = np.std(found) / math.sqrt(300)
    assert level - 3 * error <= np.mean(found) <= level + 1 / 101 + 3 * error


def test_ties_keep_the_coverage():
    """Scores of few values: every class at the temperature itself is in the set."""
    rng = np.random.default_rng(3)
    z = rng.integers(0, 3, size=(3000, 4)).astype(float)
    y = rng.integers(0, 4, 3000)
    model = SupportConformalClassifier(FrozenEstimator(Given(4)), coverage=0.7).fit(z[:1500], y[:1500])
    assert model.predict_set(z[1500:])[np.arange(1500), y[1500:]].mean() > 0.66
    np.testing.assert_array_equal(model.predict_set(z).any(axis=1), True)


def test_a_classifier_that_is_right_often_enough_needs_one_class():
    z = np.eye(3)[np.arange(60) % 3]
    model = SupportConformalClassifier(FrozenEstimator(Given())).fit(z, np.arange(60) % 3)
    assert model.temperature_ == 0.0
    np.testing.assert_array_equal(model.predict_set(z), z > 0)


def test_too_few_rows_give_all_classes():
    z, y = np.eye(3)[[0, 1, 2] * 3], np.array([0, 1, 2] * 3)
    assert SupportConformalClassifier(FrozenEstimator(Given()), coverage=0.9).fit(z, y).temperature_ == 0.0
    with pytest.warns(UserWarning, match="8 rows that calibrate are too few for a coverage of 0.9, which needs 9"):
        model = SupportConformalClassifier(FrozenEstimator(Given()), coverage=0.9).fit(z[:8], y[:8])
    assert model.temperature_ == np.inf
    assert model.predict_set(np.array([[0.0, -np.inf, 1.0]])).all()


def test_masked_classes_stay_out():
    """A score of -inf: never in a set of finite temperature; where it was the true class too often, all classes are in."""
    z = np.tile([1.0, 0.5, -np.inf], (20, 1))
    y = np.array([0, 1] * 10)
    model = SupportConformalClassifier(FrozenEstimator(Given())).fit(z, y)
    np.testing.assert_array_equal(model.predict_set(z), np.tile([True, True, False], (20, 1)))
    model.fit(z, np.array([0, 2] * 10))
    assert model.predict_set(z).all()


# -- the classifiers inside ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner",
    [LogisticRegression(), GaussianNB(), RandomForestClassifier(20, random_state=0), LinearSVC(), Perceptron(), SVC(),
     DecisionTreeClassifier(max_depth=4, random_state=0), MappingClassifier("sparsemax")],
    ids=lambda inner: type(inner).__name__,
)  # fmt: skip
@pytest.mark.parametrize("k", [2, 4])
def test_any_classifier(inner, k):
    x, y = data(700, k)
    names = np.array(["d", "c", "b", "a"])[y]
    model = SupportConformalClassifier(inner, coverage=0.8).fit(x[:400], names[:400])
    sets = model.predict_set(x[400:])
    assert sets.shape == (300, k)
    assert list(model.classes_) == sorted(set(names))
    index = np.searchsorted(model.classes_, names[400:])
    assert sets[np.arange(300), index].mean() > 0.7
    assert sets.any(axis=1).all()
    best = model.predict(x[400:])
    assert sets[np.arange(300), np.searchsorted(model.classes_, best)].all()
    assert (best == model.estimator_.predict(x[400:])).mean() > 0.97  # an SVC's votes and scores may differ


def test_frozen_or_trained():
    x, y = data()
    inner = LogisticRegression().fit(x[:200], y[:200])
    before = inner.coef_.copy()
    frozen = SupportConformalClassifier(FrozenEstimator(inner)).fit(x[200:300], y[200:300])
    np.testing.assert_array_equal(inner.coef_, before)
    assert len(frozen.calibration_scores_) == 100
    trained = SupportConformalClassifier(LogisticRegression(), calibration=0.25).fit(x, y)
    assert len(trained.calibration_scores_) == 100
    assert len(SupportConformalClassifier(LogisticRegression(), calibration=37).fit(x, y).calibration_scores_) == 37
    again = SupportConformalClassifier(LogisticRegression(), calibration=0.25, random_state=1).fit(x, y)
    assert again.temperature_ != trained.temperature_
    with pytest.raises(ValueError, match="y holds the class 9, which the frozen classifier does not know"):
        frozen.fit(x[:20], np.r_[y[:19], 9])


def test_a_class_that_no_training_row_has():
    x, y = data(60, 3)
    y = np.r_[y[:-1], 7]
    for seed in range(20):
        model = SupportConformalClassifier(random_state=seed, coverage=0.5).fit(x, y)
        assert list(model.classes_) == [0, 1, 2, 7]
        if 7 not in model.estimator_.classes_:
            assert not model.predict_set(x)[:, 3].any()
            assert np.isinf(model.calibration_scores_[-1])
            break
    else:
        raise AssertionError("no seed put it among the rows that calibrate")


def test_rows_of_texts_and_sparse_rows():
    said = ["good", "bad", "good good", "bad bad", "so good", "so bad"] * 10
    y = np.array([1, 0] * 30)
    model = SupportConformalClassifier(make_pipeline(CountVectorizer(), LogisticRegression())).fit(said, y)
    np.testing.assert_array_equal(model.predict_set(["good", "bad"]), [[False, True], [True, False]])
    x, y = data()
    one, two = (SupportConformalClassifier().fit(kind(x), y) for kind in (np.asarray, sparse.csr_matrix))
    np.testing.assert_array_equal(one.predict_set(x), two.predict_set(sparse.csr_matrix(x)))


def test_pickle_clone_and_search():
    x, y = data(200)
    model = SupportConformalClassifier(LogisticRegression(C=0.5), mapping=am.Entmax(1.3), coverage=0.8).fit(x, y)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_set(x), model.predict_set(x))
    copy = clone(model)
    assert copy.get_params()["mapping__alpha"] == 1.3
    assert copy.get_params()["estimator__C"] == 0.5
    copy.set_params(mapping__alpha=2.0, estimator__C=3.0)
    assert (copy.mapping, copy.estimator.C) == (am.Entmax(2.0), 3.0)
    assert model.mapping == am.Entmax(1.3)

    def small(model, x, y):
        return -model.predict_set(x).sum(axis=1).mean()

    search = GridSearchCV(copy, {"mapping__alpha": [1.25, 2.0], "estimator__C": [0.1, 1.0]}, scoring=small, cv=3).fit(
        x, y
    )
    assert search.best_estimator_.mapping == am.Entmax(search.best_params_["mapping__alpha"])
    assert (SupportConformalClassifier.__module__, SupportConformalClassifier.__qualname__) == (
        "anymax.sklearn",
        "SupportConformalClassifier",
    )
