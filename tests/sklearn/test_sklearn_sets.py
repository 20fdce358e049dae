"""`decision="sets"`: known sets, the rule, its tuning, and the training of labels apart."""

import numpy as np
import pytest
from sklearn_data import TIGHT, blobs, labels

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score

from anymax.sklearn import MappingClassifier, MultiLabelMappingClassifier, each, sets


def some(n=60, k=5, seed=0):
    rng = np.random.default_rng(seed)
    kinds = (rng.random((7, k)) < 0.4).astype(int)
    y = kinds[rng.integers(0, 7, n)]
    return rng.normal(size=(n, k)).astype(np.float32) + 2 * y - 1, y


def decided(z, y, threshold, lift, slack):
    """The rule, set by set."""
    share, out = (y.sum(axis=0) + 0.5) / (len(y) + 1), []
    kinds, count = np.unique(y, axis=0, return_counts=True)
    chance = kinds @ np.log(share) + (1 - kinds) @ np.log(1 - share)
    for row in z.astype(np.float64):
        worth = kinds @ (row - threshold) + lift * (np.log(count / len(y)) - chance)
        gap = np.maximum(row - threshold, 0).sum() - worth.max()
        out.append(kinds[worth.argmax()] > 0 if gap <= slack else row > threshold)
    return np.array(out)


@pytest.mark.parametrize(
    "rule", [(0.1, 0.0, 1.0), (-0.4, 0.5, 0.5), (0.0, 0.5, np.inf), (0.3, 0.0, -np.inf), (0.2, 0.5, -2.0)]
)
def test_the_rule_is_that_of_its_words(rule, monkeypatch):
    monkeypatch.setattr(sets, "_BLOCK", 64)  # several blocks
    z, y = some()
    known = sets.KnownSets(sparse.csr_matrix(y), 100)
    np.testing.assert_array_equal(sets.SetRule(known, *rule).chosen(z), decided(z, y, *rule))


def test_the_commonest_sets_are_known():
    y = np.repeat([[1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 1, 1]], [4, 5, 2, 1], axis=0)
    known = sets.KnownSets(sparse.csr_matrix(y), 3)
    np.testing.assert_array_equal(known.sets.toarray(), [[0, 0, 0], [1, 0, 0], [1, 1, 0]])
    np.testing.assert_array_equal(known.sizes, [0, 1, 2])


@pytest.mark.parametrize("scoring", list(sets.WEIGHTS))
def test_the_best_of_all_rules_is_found(scoring, monkeypatch):
    monkeypatch.setattr(sets, "_CHUNK", 64)
    z, y = some(40)
    z, micro, equal = z - 0.3, *sets.WEIGHTS[scoring]
    csr, halves = sparse.csr_matrix(y), (np.arange(40) < 20, np.arange(40) >= 20)
    folds = [(z[test], csr[np.flatnonzero(test)], sets.KnownSets(csr[np.flatnonzero(~test)], 100)) for test in halves]
    levels = sets.thresholds([z], int(y.sum()))[::4]
    (threshold, lift, slack), best = sets.tuned(folds, levels, sets.WEIGHTS[scoring])

    def score(*rule):
        guess = np.zeros_like(y)
        for test in halves:
            guess[test] = decided(z[test], y[~test], *rule)
        return micro * f1_score(y, guess, average="micro") + equal * (guess == y).all(axis=1).mean()

    slacks = [-np.inf, *sets._SLACKS[10:40], np.inf]
    want = [max(score(level, lift, slack) for lift in sets._LIFTS for slack in slacks) for level in levels]
    np.testing.assert_allclose(best, want)
    assert score(threshold, lift, slack) == pytest.approx(max(want))


def test_the_default_knows_the_sets_of_the_training_rows():
    rng = np.random.default_rng(0)
    many = (rng.random((6, 8)) < 0.4).astype(int)[rng.integers(0, 6, 400)]
    x = many + rng.normal(size=(400, 8))
    model = MultiLabelMappingClassifier().fit(x[:200], many[:200])
    plain = MultiLabelMappingClassifier("sigmoid").fit(x[:200], many[:200])
    assert (model.mapping_, model.decision_, plain.decision_) == ("sigmoid", "sets", "threshold")
    assert model.score(x[200:], many[200:]) > plain.score(x[200:], many[200:]) + 0.05
    known = {tuple(row) for row in many}
    assert np.mean([tuple(row) in known for row in model.predict(x)]) > 0.8
    assert model.cv_results_["score"].shape == model.cv_results_["threshold"].shape
    assert model.threshold_ in model.cv_results_["threshold"]
    as_csr = MultiLabelMappingClassifier().fit(sparse.csr_matrix(x[:200]), sparse.csr_matrix(many[:200]))
    assert (as_csr.predict(x).toarray() == model.predict(x)).mean() > 0.98


def test_the_penalty_is_the_one_that_tunes_better():
    x, many = labels(300)
    model = MultiLabelMappingClassifier().fit(x, many)
    each_c = {C: MultiLabelMappingClassifier(C=C).fit(x, many) for C in (0.3, 1.0)}
    best = {C: one.cv_results_["score"].max() for C, one in each_c.items()}
    assert abs(best[0.3] - best[1.0]) > 1e-4
    assert max(best, key=best.get) == model.C_
    assert model.cv_results_["score"].max() == pytest.approx(max(best.values()), abs=2e-3)
    np.testing.assert_allclose(model.coef_, each_c[model.C_].coef_, atol=1e-2)
    for options in ({"C": 2.0}, {"l2": 0.01}, {"penalty": None}):
        assert MultiLabelMappingClassifier(**options).fit(x, many).decision_ == "sets"
    assert MultiLabelMappingClassifier("entmax15").fit(x, many).C_ == 0.3
    with pytest.raises(ValueError, match="C='cv': expected a positive number"):
        MappingClassifier(C="cv").fit(*blobs())


def test_what_auto_stands_for():
    x, many = labels()
    for options, want in (
        ({}, ("sigmoid", "sets")),
        ({"threshold": 0.5}, ("sigmoid", "threshold")),
        ({"grid": [0.2, 0.4]}, ("sigmoid", "threshold")),
        ({"scoring": "f1_macro"}, ("sigmoid", "threshold")),
        ({"mapping": "sigmoid", "decision": "sets", "threshold": 0.5, "scoring": "accuracy"}, ("sigmoid", "sets")),
    ):
        model = MultiLabelMappingClassifier(**options).fit(x, many)
        assert (model.mapping_, model.decision_) == want, options
    assert model.threshold_ == pytest.approx(0.5)
    for options in ({"decision": "support"}, {"scale": 2.0}, {"none": True}):
        model = MultiLabelMappingClassifier(**options).fit(x, many)
        assert (model.mapping_.name, model.decision_) == ("entmax", "support"), options
    a, b = MappingClassifier("entmax15", C=0.3).fit(*blobs()), MultiLabelMappingClassifier().fit(*blobs())
    np.testing.assert_array_equal(a.coef_, b.coef_)
    streamed = MultiLabelMappingClassifier().partial_fit(x, many)
    assert (streamed.mapping_, streamed.decision_) == ("sigmoid", "threshold")


def same(a, b, x):
    np.testing.assert_array_equal(a.predict(x), b.predict(x))
    for name in ("coef_", "threshold_"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert a.cv_results_["score"].tolist() == b.cv_results_["score"].tolist()


@pytest.mark.parametrize("options", [{}, {"mapping": "sigmoid"}, {"mapping": "softmax"}])
def test_rows_of_weight_0_are_left_out(options):
    x, many = labels(120)
    weights = np.repeat([1.0, 0.0], 60)
    other = np.where(weights[:, None] > 0, many, 0)  # no label there
    some = MultiLabelMappingClassifier(**options).fit(x[:60], many[:60])
    for target in (many, other):
        model = MultiLabelMappingClassifier(**options).fit(x, target, weights)
        assert model.none_ == some.none_
        same(model, some, x)
    halves = [(np.arange(1, 120, 2), np.arange(0, 120, 2)), (np.arange(0, 120, 2), np.arange(1, 120, 2))]
    of_some = [(train[:30], test[:30]) for train, test in halves]
    model = MultiLabelMappingClassifier(cv=halves, **options).fit(x, many, weights)
    same(model, MultiLabelMappingClassifier(cv=of_some, **options).fit(x[:60], many[:60]), x)
    by_class = MultiLabelMappingClassifier(**options, class_weight={0: 0.0}).fit(x, many)
    alone = (many[:, 0] == 1) & (many.sum(axis=1) == 1)
    assert alone.any()
    same(by_class, MultiLabelMappingClassifier(**options, class_weight={0: 0.0}).fit(x[~alone], many[~alone]), x)


def test_streamed_rows_of_weight_0_tune_nothing():
    x, many = labels(120)
    wrong, weights = many.copy(), np.tile([1.0, 0.0], 60)
    wrong[1::2] = 1 - wrong[1::2]
    a, b = (MultiLabelMappingClassifier().partial_fit(x, y, sample_weight=weights) for y in (many, wrong))
    assert a.threshold_ == b.threshold_


@pytest.mark.parametrize("mapping", ["auto", "entmax15"])
def test_masks_split_as_their_rows_do(mapping):
    x, many = labels()
    fold = np.arange(len(x)) % 3
    masks = [(fold != i, fold == i) for i in range(3)]
    rows = [tuple(map(np.flatnonzero, split)) for split in masks]
    a, b = (MultiLabelMappingClassifier(mapping, cv=cv).fit(x, many) for cv in (masks, rows))
    np.testing.assert_array_equal(a.coef_, b.coef_)
    assert a.cv_results_["score"].tolist() == b.cv_results_["score"].tolist()


def test_a_split_of_all_rows_serves_where_some_are_left_out():
    x, many = labels()
    many[::5] = 0
    kept = np.flatnonzero(many.any(axis=1))
    halves = [(np.arange(75), np.arange(75, 150)), (np.arange(75, 150), np.arange(75))]
    of_kept = [tuple(np.flatnonzero(np.isin(kept, part)) for part in split) for split in halves]
    a = MultiLabelMappingClassifier("entmax15", none=False, cv=halves).fit(x, many)
    b = MultiLabelMappingClassifier("entmax15", none=False, cv=of_kept).fit(x[kept], many[kept])
    np.testing.assert_array_equal(a.coef_, b.coef_)
    assert a.scale_ == b.scale_


def test_none_chooses_a_map():
    x, many = labels()
    many[::5] = 0
    model = MultiLabelMappingClassifier(none=False).fit(x, many)
    assert (model.mapping_.name, model.decision_, model.none_) == ("entmax", "support", False)
    assert model.predict(x).any(axis=1).all()


def test_nothing_of_the_last_fit_stays():
    x, many = labels()
    tuned = ("rule_", "threshold_", "scale_", "cv_results_")
    model = MultiLabelMappingClassifier().fit(x, many)
    model.partial_fit(x, many)
    assert [name for name in tuned if hasattr(model, name)] == ["threshold_", "cv_results_"]
    assert model.C_ == 0.3
    model.fit(x, many).fit(x, many[:, 0])
    assert not [name for name in tuned if hasattr(model, name)]
    model.fit(x, many).set_params(threshold=0.5).partial_fit(x, many)
    assert [name for name in tuned if hasattr(model, name)] == ["threshold_"]


def test_the_known_sets_take_any_threshold_between_0_and_1():
    x, many = labels()
    model = MultiLabelMappingClassifier(decision="sets", threshold=1e-14).fit(x, many)
    assert model.threshold_ == pytest.approx(1e-14, rel=0.01, abs=0)


@pytest.mark.parametrize("kind", ["narrow", "wide", "csr"])
def test_squares_that_overflow_are_refused(kind, monkeypatch):
    x, many = labels()
    if kind == "wide":
        monkeypatch.setattr(each, "_FULL", 1)
        monkeypatch.setattr(each, "_LATE", 1)
    x = x * 1e160
    with pytest.raises(ValueError, match=r"squares of the features overflow in float64; scale them \(.*StandardScaler"):
        MultiLabelMappingClassifier().fit(sparse.csr_matrix(x) if kind == "csr" else x, many)


@pytest.mark.parametrize("kind", ["narrow", "wide", "no intercept", "csr", "weights"])
def test_labels_apart_are_logistic_regressions(kind, monkeypatch):
    x, many = labels()
    many[:, 0] = 0  # a label that no row has
    weights = np.linspace(0.5, 1.5, len(x)) if kind == "weights" else None
    if kind == "wide":
        monkeypatch.setattr(each, "_FULL", 1)
        monkeypatch.setattr(each, "_LATE", 1)
    given = sparse.csr_matrix(x) if kind == "csr" else x
    options = {"threshold": 0.5, "C": 1.0, "fit_intercept": kind != "no intercept", **TIGHT}
    model = MultiLabelMappingClassifier("sigmoid", **options).fit(given, many, weights)
    for j in range(1, many.shape[1]):
        one = LogisticRegression(tol=1e-10, max_iter=5000, fit_intercept=kind != "no intercept")
        one.fit(x, many[:, j], weights)
        np.testing.assert_allclose(model.coef_[j], one.coef_[0], atol=1e-5)
        np.testing.assert_allclose(model.intercept_[j], one.intercept_[0] if kind != "no intercept" else 0, atol=1e-5)
    assert (model.predict_proba(x)[:, 0] < (1e-3 if kind != "no intercept" else 0.5)).all()


def test_labels_apart_warn_where_they_do_not_converge():
    x, many = labels()
    with pytest.warns(ConvergenceWarning, match="max_iter=2 iterations were not enough") as caught:
        MultiLabelMappingClassifier("sigmoid", threshold=0.5, max_iter=2).fit(x, many)
    assert caught[0].filename == __file__
