"""`partial_fit` of the estimators: a few rows at a time."""

import pickle

import numpy as np
import pytest
from sklearn_data import blobs

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.datasets import make_multilabel_classification
from sklearn.metrics import f1_score

import anymax as am
from anymax.sklearn import MappingClassifier, MultiLabelMappingClassifier


def loss_and_penalty(model, x, y, l2):
    z = model.decision_function(x)
    z = np.stack([0 * z, z], axis=1) if z.ndim == 1 else z
    return float(am.fenchel_young(model.mapping_, z, y, reduction="mean")) + 0.5 * l2 * np.sum(model.coef_**2)


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax", "entmax15"])
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.whole(lambda mapping, k: (mapping, k) != ("sparsemax", 4))
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


@pytest.mark.whole(lambda mapping: mapping != "sparsemax")
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
