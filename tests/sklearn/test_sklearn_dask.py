"""The estimators on Dask's arrays and data frames: the coefficients of one machine, predictions that wait, data read by blocks."""

import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn")
dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

from scipy import sparse
from sklearn.datasets import make_classification, make_multilabel_classification
from sklearn.exceptions import ConvergenceWarning

from anymax.sklearn import MappingClassifier, MultiLabelMappingClassifier
from anymax.sklearn.blocks import Blocks

TIGHT = {"tol": 1e-7, "max_iter": 2000}
METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function")


@pytest.fixture(autouse=True)
def scheduler():
    with dask.config.set(scheduler="synchronous"):
        yield


def classes(k=4, dtype=np.float64):
    x, y = make_classification(
        130, 6, n_informative=5, n_redundant=1, n_classes=k, n_clusters_per_class=1, random_state=0
    )
    return x.astype(dtype), y


def blocks(x, rows=50, columns=4):
    """Odd blocks: the last is shorter, and the columns are in two."""
    return da.from_array(x, chunks=(rows, columns))


def computed(found):
    assert dask.is_dask_collection(found), "predictions of Dask's rows wait until they are asked for"
    return found.compute()


def held_to_one_machine(model, x, y, big, big_y, **options):
    """Fitted on both kinds of data, it is the same."""
    one, many = model().fit(x, y, **options), model().fit(big, big_y, **options)
    np.testing.assert_allclose(many.coef_, one.coef_, atol=1e-6)
    np.testing.assert_allclose(many.intercept_, one.intercept_, atol=1e-6)
    assert many.coef_.dtype == one.coef_.dtype
    assert many.n_features_in_ == x.shape[1]
    for method in METHODS:
        want, found = getattr(many, method)(x), getattr(many, method)(big)
        assert (found.dtype, found.ndim) == (want.dtype, want.ndim)
        np.testing.assert_allclose(computed(found), want, atol=1e-12)
    assert many.score(big, big_y) == many.score(x, y)
    return many


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("mapping", ["softmax", "sparsemax", "taylor"])
@pytest.mark.parametrize("solver", ["lbfgs", "lbfgs-scipy"])
@pytest.mark.whole
def test_the_coefficients_are_those_of_one_machine(mapping, k, solver):
    x, y = classes(k)
    weights = np.random.default_rng(0).random(len(y))
    model = lambda: MappingClassifier(mapping, C=0.5, class_weight="balanced", solver=solver, **TIGHT)  # noqa: E731
    held_to_one_machine(model, x, y, blocks(x), y, sample_weight=weights)
    again = model().fit(blocks(x), da.from_array(y, chunks=30), da.from_array(weights, chunks=130))
    np.testing.assert_array_equal(again.coef_, model().fit(blocks(x), y, weights).coef_)


@pytest.mark.whole
@pytest.mark.parametrize("mapping", ["sparsemax", "softmax", "sigmoid"])
def test_labels_are_tuned_on_blocks_too(mapping):
    x, many = make_multilabel_classification(110, 8, n_classes=4, n_labels=2, random_state=0)
    assert (many.sum(axis=1) == 0).any()
    model = lambda: MultiLabelMappingClassifier(mapping, cv=3, **TIGHT)  # noqa: E731
    found = held_to_one_machine(model, x, many, blocks(x, 40, 8), da.from_array(many, chunks=(25, 4)))
    one = model().fit(x, many)
    for name, values in one.cv_results_.items():
        np.testing.assert_allclose(found.cv_results_[name], values, atol=1e-5)


@pytest.mark.whole
def test_data_frames_keep_their_names():
    pandas, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    x, y = classes()
    frame = pandas.DataFrame(x, columns=list("abcdef"))
    big, big_y = dd.from_pandas(frame, npartitions=3), dd.from_pandas(pandas.Series(y), npartitions=2)
    found = MappingClassifier(**TIGHT).fit(big, big_y)
    want = MappingClassifier(**TIGHT).fit(frame, y)
    np.testing.assert_allclose(found.coef_, want.coef_, atol=1e-6)
    np.testing.assert_array_equal(found.feature_names_in_, want.feature_names_in_)
    np.testing.assert_allclose(computed(found.predict_proba(big)), found.predict_proba(frame), atol=1e-12)
    assert found.score(big, big_y) == found.score(frame, y)
    with pytest.raises(ValueError) as plain:
        found.predict(frame.rename(columns={"a": "z"}))
    with pytest.raises(ValueError, match=re.escape(str(plain.value))):
        found.predict(big.rename(columns={"a": "z"}))


def test_sparse_blocks_stay_sparse(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = sparse.random(150, 700, 0.05, "csr", rng=rng), rng.integers(0, 3, 150)
    big = da.from_array(x.toarray(), chunks=(40, 700)).map_blocks(sparse.csr_matrix)
    want = MappingClassifier("entmax15", C=0.1, **TIGHT).fit(x, y)
    with monkeypatch.context() as patch:
        for name in ("toarray", "todense"):
            patch.setattr(sparse.csr_matrix, name, lambda *_: pytest.fail("densified"))
        found = MappingClassifier("entmax15", C=0.1, **TIGHT).fit(big, y)
        p = computed(found.predict_proba(big))
    np.testing.assert_allclose(found.coef_, want.coef_, atol=1e-6)
    np.testing.assert_allclose(p, found.predict_proba(x), atol=1e-12)


def test_rows_of_unknown_number_and_blocks_without_rows():
    x, y = classes()
    keep = x[:, 0] > np.quantile(x[:100, 0], 0.9)
    keep[50:100] = False  # the second block has no row
    big = blocks(x)
    big = big[da.from_array(keep, chunks=50)]
    assert np.isnan(big.shape[0])
    found = MappingClassifier(**TIGHT).fit(big, y[keep])
    np.testing.assert_allclose(found.coef_, MappingClassifier(**TIGHT).fit(x[keep], y[keep]).coef_, atol=1e-6)
    np.testing.assert_array_equal(computed(found.predict(big)), found.predict(x[keep]))


@pytest.mark.whole
def test_small_floats_stay_small():
    x, y = classes(dtype=np.float32)
    found = MappingClassifier("softmax", tol=1e-6).fit(blocks(x), y)
    assert found.coef_.dtype == found.predict_proba(blocks(x)).dtype == np.float32
    np.testing.assert_allclose(found.coef_, MappingClassifier("softmax", tol=1e-6).fit(x, y).coef_, atol=1e-4)
    whole = MappingClassifier().fit(blocks((10 * x).astype(np.int64)), y)
    assert whole.coef_.dtype == np.float64


def test_blocks_are_read_and_not_kept():
    """Nothing larger than a block is ever put together."""
    x, y = classes()
    seen = []

    def look(block):
        seen.append(len(block))
        return block

    big = blocks(x, 50, 6).map_blocks(look, dtype=x.dtype, meta=x[:0])
    seen.clear()
    model = MappingClassifier("softmax").fit(big, y)
    assert set(seen) == {50, 30}
    assert len(seen) >= 3 * (2 * model.n_iter_[0])
    seen.clear()
    p = model.predict_proba(big)
    assert not seen
    p[:10].compute()
    assert seen == [50]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x, y: (x.rechunk((50, 6))[:, :, None], y), "with 3 axes: expected 2"),
        (lambda x, y: (x[:, 0], y), r"with 1 axis: expected 2, \[rows, features\]; x\.reshape\(-1, 1\)"),
        (lambda x, y: (x[:0], y), "Dask array of 0 rows"),
        (lambda x, y: (x, y[:-1]), "inconsistent numbers of samples"),
        (lambda x, y: (da.where(x > 2, np.nan, x), y), "X contains NaN"),
    ],
)
def test_errors_say_what_to_do(spoil, words):
    x, y = classes()
    with pytest.raises(ValueError, match=words):
        MappingClassifier().fit(*spoil(blocks(x), y))
    model = MappingClassifier().fit(x, y)
    with pytest.raises(ValueError) as plain:
        model.predict(x[:, :5])
    with pytest.raises(ValueError, match=re.escape(str(plain.value))):
        model.predict(blocks(x[:, :5]))
    with pytest.raises(ValueError, match="with 1 axis"):
        model.predict(blocks(x)[0])


def test_what_blocks_answer():
    x, _ = classes()
    x[30] = 0
    mine = Blocks.of(blocks(x))
    w, r, pick = np.ones((6, 2)), np.arange(260.0).reshape(130, 2), np.array([3, 40, 51, 129])
    np.testing.assert_allclose(mine @ w, x @ w)
    np.testing.assert_allclose(mine.T @ r, x.T @ r)
    np.testing.assert_allclose(mine.multiply(mine).T @ r, (x * x).T @ r)
    np.testing.assert_array_equal(mine[::7], x[::7])
    np.testing.assert_array_equal(mine[pick], x[pick])
    some = x[:, 0] > 0
    np.testing.assert_allclose(mine.only(some) @ w, x[some] @ w)
    with pytest.raises(TypeError, match="by themselves only"):
        mine.multiply(mine.only(some))


@pytest.mark.whole
def test_dask_is_not_imported_for_other_data():
    code = (
        "import sys, numpy as np; from anymax.sklearn import MappingClassifier as M; "
        "x = np.arange(8.0).reshape(4, 2); M().fit(x, [0, 1, 0, 1]).predict(x); "
        "raise SystemExit('dask' in sys.modules or 'distributed' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.whole
@pytest.mark.parametrize("processes", [False, True])
def test_on_a_cluster(processes):
    distributed = pytest.importorskip("distributed")
    x, y = classes()
    with (
        dask.config.set(scheduler=None),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=processes, dashboard_address=None, memory_limit=None
        ) as cluster,
        distributed.Client(cluster),
    ):
        held_to_one_machine(lambda: MappingClassifier("entmax15", **TIGHT), x, y, blocks(x), y)


def test_a_fit_that_is_cut_short_says_so():
    x, y = classes()
    with pytest.warns(ConvergenceWarning, match="max_iter=2"):
        MappingClassifier(max_iter=2).fit(blocks(x), y)


def test_partial_fit_takes_block_after_block():
    x, y = classes()
    one = MappingClassifier("softmax")
    for at in (0, 50, 100):
        one.partial_fit(x[at : at + 50], y[at : at + 50], classes=range(4))
    many = MappingClassifier("softmax").partial_fit(blocks(x), y, classes=range(4))
    np.testing.assert_array_equal(many.coef_, one.coef_)
