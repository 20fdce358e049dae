"""The regression of proportions."""

import numpy as np
import pytest
from sklearn_data import TIGHT, blobs

pytest.importorskip("sklearn")

from scipy import sparse
from scipy.spatial import distance
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV

import anymax as am
from anymax.sklearn import LabelDistributionClassifier, MappingClassifier, losses


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
    a, b = MappingClassifier("entmax15").fit(x, y), LabelDistributionClassifier().fit(x, y)
    np.testing.assert_array_equal(a.coef_, b.coef_)
    assert a.score(x, y) == b.score(x, y)
    np.testing.assert_allclose(LabelDistributionClassifier().fit(x, np.eye(3)[y]).coef_, a.coef_, atol=1e-3)
    heavy = LabelDistributionClassifier(class_weight={1: 3.0}, **TIGHT).fit(x, np.eye(3)[y])
    np.testing.assert_allclose(
        heavy.coef_, MappingClassifier("entmax15", class_weight={1: 3.0}, **TIGHT).fit(x, y).coef_, atol=1e-6
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
