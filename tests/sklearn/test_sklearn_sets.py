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
