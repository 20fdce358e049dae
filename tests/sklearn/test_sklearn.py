"""The estimators: scikit-learn's own checks, kinds of data, and what the estimators promise."""

import pickle

import numpy as np
import pytest
from sklearn_data import TIGHT, blobs, labels

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import anymax as am
from anymax.sklearn import LabelDistributionClassifier, MappingClassifier, MultiLabelMappingClassifier, losses

# -- scikit-learn's own checks -------------------------------------------------------------------------------------------------


ZEROS = "check_classifiers_multilabel_output_format_predict_proba"


@parametrize_with_checks(
    [kind(mapping) for kind in (MappingClassifier, MultiLabelMappingClassifier) for mapping in ("softmax", "sparsemax")]
    + [MultiLabelMappingClassifier()],
    expected_failed_checks=lambda model: (
        {ZEROS: "it wants 0 < p; sparse maps give exact zeros"}
        if isinstance(model, MultiLabelMappingClassifier) and model.mapping == "sparsemax"
        else {}
    ),
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.whole(lambda estimator: estimator.mapping == "softmax" or not isinstance(estimator, MappingClassifier))
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


# -- data ----------------------------------------------------------------------------------------------------------------------


def refuse(self, *args, **options):
    raise AssertionError("densified")


@pytest.mark.whole
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


@pytest.mark.whole
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


@pytest.mark.whole
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


def test_a_gradient_that_is_not_finite_is_named():
    class Hole(am.Sigsoftmax):
        def weights(self, x, keep, xp):
            u, du = super().weights(x, keep, xp)
            return u, du * np.nan

    X, y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 2, 1])
    with pytest.warns(ConvergenceWarning, match=r"the gradient of the loss is nan, .*check_mapping"):
        MappingClassifier(Hole()).fit(X, y)
