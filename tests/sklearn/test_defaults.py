"""The comparison that the defaults of the estimators come from: its ranks, its table, and what the page says of it."""

import pathlib

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy import sparse

ROOT = pathlib.Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("only in the repository", allow_module_level=True)

from anymax.sklearn import MappingClassifier, MultiLabelMappingClassifier
from benchmarks import defaults, label_defaults


def table(text, head):
    """The rows of a Markdown table of the report, name -> figures."""
    lines = text.split(head)[1].strip().split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[0][1:], {row[0]: [float(cell) for cell in row[1:]] for row in cells[2:]}


def test_ranks_share_their_ties():
    np.testing.assert_array_equal(defaults.ranks(np.array([3.0, 5.0, 3.0, 1.0])), [2.5, 1.0, 2.5, 4.0])


LOGISTIC = [50.0, 40.0, 30.0, 50.0, 1.0]  # micro-F1, macro-F1, equal sets, F1 of rows, seconds


def figures(**rows):
    """Ten sets, on each of which a contender has the same row, unless it has a list of ten."""
    rows = {"logistic regression": LOGISTIC, **rows}
    as_ten = {name: row if isinstance(row[0], list) else [row] * 10 for name, row in rows.items()}
    return {name: {f"set {i}": row for i, row in enumerate(ten)} for name, ten in as_ten.items()}


def test_the_rule():
    good, slow = [60.0, 50.0, 30.0, 60.0, 1.9], [90.0, 90.0, 90.0, 90.0, 2.1]
    assert label_defaults.choice(figures(good=good, slow=slow)) == "good"
    once = [slow] * 2 + [[90.0, 90.0, 90.0, 90.0, 1.0]] * 8
    assert label_defaults.choice(figures(good=good, slow=once)) == "good", "too slow on two sets of ten"
    assert label_defaults.choice(figures(good=good, slow=once[1:] + once[-1:])) == "slow", "on one set it may be"
    unequal = [90.0, 90.0, 29.9, 90.0, 1.0]
    assert label_defaults.choice(figures(good=good, unequal=unequal)) == "good", (
        "fewer equal sets than logistic regression"
    )
    half = [unequal] * 5 + [[90.0, 90.0, 30.0, 90.0, 1.0]] * 5
    assert label_defaults.choice(figures(good=good, half=half)) == "half"
    low = [49.0, 50.0, 29.0, 90.0, 1.0]
    assert label_defaults.choice(figures(low=low, unequal=unequal)) == "unequal", "two measures of three, not one"
    near = [60.0, 49.5, 30.0, 0.0, 1.2]
    assert label_defaults.choice(figures(good=good, near=near)) == "near", "a tie goes to the faster"
    assert label_defaults.choice(figures(good=good, far=[60.0, 49.3, 30.0, 99.0, 1.2])) == "good"


def test_the_figures_are_written_and_read(tmp_path):
    halves = {"choosing": figures(a=[1.0, 2.0, 3.0, 4.0, 0.5]), "reporting": figures(b=[5.0, 6.0, 7.0, 8.0, 0.25])}
    label_defaults.save(tmp_path / "figures.csv", halves)
    assert label_defaults.load(tmp_path / "figures.csv") == halves
    text = "\n".join(label_defaults.overview(halves["choosing"]))
    assert "| a | 1.0 | 2.0 | 3.0 | 2.0 | 0 % | 0 % | 0 % | 4.0 | 0.50 | 100 % |" in text


def test_the_default_is_what_the_rule_chooses():
    halves = label_defaults.load(label_defaults.FIGURES)
    chosen = label_defaults.CONTENDERS[label_defaults.choice(halves["choosing"])]
    default = MultiLabelMappingClassifier().get_params(deep=False)
    assert {name: default[name] for name in chosen} == chosen
    assert (default["decision"], default["threshold"], default["scale"]) == ("auto", "cv", "cv")
    assert (
        label_defaults.report(halves["choosing"], halves["reporting"]).split("`python")[0]
        == (label_defaults.RESULT.read_text(encoding="utf-8").split("`python")[0])
    )


def test_what_the_page_says_of_the_reporting_half():
    """docs/sklearn_defaults.md and docs/sklearn.md."""
    halves = label_defaults.load(label_defaults.FIGURES)
    of, names = halves["reporting"], list(halves["reporting"][label_defaults.LOGISTIC])
    winner = label_defaults.choice(halves["choosing"])
    default, logistic, sigmoid, before = (
        np.array([of[one][name] for name in names])
        for one in (winner, label_defaults.LOGISTIC, "sigmoid, C = 0.3, f1_micro", label_defaults.SHOWN[0])
    )
    assert (len(halves["choosing"][winner]), len(names)) == (16, 13)
    better = default - logistic
    np.testing.assert_array_equal((better > 0).sum(axis=0)[:3], [10, 11, 3])
    np.testing.assert_allclose(better.mean(axis=0)[:3], [4.4, 4.8, -1.6], atol=0.051)
    np.testing.assert_allclose((sigmoid - default).mean(axis=0)[:3], [3.7, 4.1, -2.0], atol=0.051)
    np.testing.assert_allclose((default - before).mean(axis=0)[:3], [-0.2, 2.2, -0.1], atol=0.051)
    times = default[:, -1] / logistic[:, -1]
    assert (times > 2).sum() == 3
    assert times.max() == pytest.approx(3.2, abs=0.05)
    assert default[:, -1].sum() / logistic[:, -1].sum() == pytest.approx(1.4, abs=0.05)
    assert default[:, -1].sum() / before[:, -1].sum() == pytest.approx(0.6, abs=0.05)
    assert sigmoid[:, -1].sum() == min(table[:, -1].sum() for table in (default, logistic, sigmoid, before))


def test_no_set_chooses_and_reports():
    assert not {name for name, *_ in label_defaults.REPORTING} & set(label_defaults.CHOOSING)


def test_labels_that_do_not_compete():
    x, y = label_defaults.independent(400, 10, 5, 2.0, 0)
    assert x.shape == (400, 10)
    assert y.shape == (400, 5)
    assert 0.1 < y.mean() < 0.6


def test_some_labels_are_the_commonest_and_no_row_is_in_both_parts():
    rng = np.random.default_rng(0)
    x = sparse.csr_matrix(np.arange(3000)[:, None] * np.ones((1, 3)) + 2)
    y = (rng.random((3000, 6)) < [0.1, 0.6, 0.3, 0.5, 0.2, 0.4]).astype(int)
    name, train, y_train, test, y_test = label_defaults.some_labels("name", x, y, 1, 4, 0)
    assert name == "name, labels 2 to 4"
    assert (y_train.shape, y_test.shape) == ((1200, 3), (1200, 3))
    np.testing.assert_allclose(y_train.mean(axis=0), [0.5, 0.4, 0.3], atol=0.05)
    assert not set(train[:, 0]) & set(test[:, 0])


def test_measures_of_classes():
    p, truth = np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]), np.array([0, 1])
    accuracy, brier, log = defaults.measured_of_classes(truth, p)
    assert (accuracy, brier) == (100.0, -0.25)
    assert log == pytest.approx(0.5 * np.log(0.5))
    assert defaults.measured_of_classes(np.array([2, 1]), p)[2] == -np.inf


def test_the_default_map_has_the_best_log_loss_and_costs_nothing_else():
    """At each penalty, and within half a rank of the best in accuracy and Brier score: docs/sklearn_defaults.md says so."""
    text, default = defaults.RESULT_OF_CLASSES.read_text(encoding="utf-8"), MappingClassifier().mapping
    for C in defaults.PENALTIES_OF_CLASSES:
        _, ranked = table(text, f"C = {C:g}: mean ranks over 17 sets; 1 is the best of 5. Seconds are of all fits.")
        for column in (2, 4):  # of the log-loss and of the seconds
            assert ranked[default][column] == min(row[column] for row in ranked.values())
        assert ranked[default][3] <= min(row[3] for row in ranked.values()) + 0.5


def test_softmax_on_the_sets_that_had_no_part():
    text = defaults.RESULT_OF_CLASSES.read_text(encoding="utf-8")
    for measure, least in (("Brier score", 5), ("log-loss", 5)):
        names, rows = table(text, f"Held out, {measure}, less is better:")
        at = {name: np.array([row[names.index(name)] for row in rows.values()]) for name in names}
        assert len(rows) == 8
        assert (at["softmax"] < at["entmax15"]).sum() == least
        np.testing.assert_allclose(at["softmax"], at["logistic regression"], atol=0.011)
