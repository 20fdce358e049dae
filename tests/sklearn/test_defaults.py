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


REFERENCE = [50.0, 40.0, 30.0, 50.0, 1.0]  # micro-F1, macro-F1, equal sets, F1 of rows, seconds


def figures(**rows):
    """Ten sets, on each of which a contender has the same row, unless it has a list of ten."""
    rows = {label_defaults.LOGISTIC: REFERENCE, label_defaults.SIGMOID: [*REFERENCE[:-1], 3.0], **rows}
    as_ten = {name: row if isinstance(row[0], list) else [row] * 10 for name, row in rows.items()}
    return {name: {f"set {i}": row for i, row in enumerate(ten)} for name, ten in as_ten.items()}


def test_the_rule():
    good, slow = [60.0, 50.0, 30.0, 60.0, 1.9], [90.0, 90.0, 90.0, 90.0, 2.1]
    assert label_defaults.choice(figures(good=good, slow=slow)) == "good"
    once = [slow] * 2 + [[90.0, 90.0, 90.0, 90.0, 1.0]] * 8
    assert label_defaults.choice(figures(good=good, slow=once)) == "good", "too slow on two sets of ten"
    assert label_defaults.choice(figures(good=good, slow=once[1:] + once[-1:])) == "slow", "on one set it may be"
    short = [90.0, 90.0, 29.5, 90.0, 1.0]
    assert label_defaults.choice(figures(good=good, short=short)) == "good", "a shortfall of 0.25 in the mean"
    assert label_defaults.choice(figures(good=good, short=[90.0, 90.0, 29.7, 90.0, 1.0])) == "short", "0.15"
    near = [60.0, 49.5, 30.0, 0.0, 1.2]
    assert label_defaults.choice(figures(good=good, near=near)) == "near", "a tie goes to the faster"
    assert label_defaults.choice(figures(good=good, far=[60.0, 49.3, 30.0, 99.0, 1.2])) == "good"


def test_a_shortfall_is_that_to_the_better_reference():
    of = figures(own=[49.0, 0.0, 31.0, 0.0, 1.0])
    of[label_defaults.SIGMOID]["set 0"] = [52.0, 0.0, 33.0, 0.0, 1.0]
    np.testing.assert_array_equal(label_defaults.shortfalls(of, "own")[:2], [[3.0, 2.0], [1.0, 0.0]])


def test_the_winner_is_the_default_if_it_falls_less_short_than_the_last():
    good, before = [60.0, 50.0, 30.0, 60.0, 1.0], {label_defaults.BEFORE: [49.0, 40.0, 30.0, 50.0, 1.0]}
    chosen = figures(good=good, **before)
    assert label_defaults.default({"choosing": chosen, "judging": figures(good=good, **before)}) == "good"
    worse = figures(good=[48.0, 50.0, 30.0, 60.0, 1.0], **before)
    assert label_defaults.default({"choosing": chosen, "judging": worse}) == label_defaults.BEFORE


def test_the_figures_are_written_and_read(tmp_path):
    parts = {"choosing": figures(a=[1.0, 2.0, 3.0, 4.0, 0.5]), "judging": figures(b=[5.0, 6.0, 7.0, 8.0, 0.25])}
    label_defaults.save(tmp_path / "figures.csv", parts)
    assert label_defaults.load(tmp_path / "figures.csv") == parts
    text = "\n".join(label_defaults.overview(parts["choosing"]))
    assert "| a | 1.0 | 2.0 | 3.0 | 2.0 | 38.00 | 0 % | 0 % | 4.0 | 0.50 | 100 % |" in text


def test_the_default_is_what_the_rule_says():
    parts = label_defaults.load(label_defaults.FIGURES)
    want = label_defaults.CONTENDERS[label_defaults.default(parts)]
    model = MultiLabelMappingClassifier().fit([[0.0], [1.0], [2.0], [3.0]], [[0, 1], [0, 1], [1, 1], [1, 0]])
    found = {"mapping": model.mapping_, "decision": model.decision_, "C": model.C, "scoring": model.scoring}
    assert found == want
    assert (model.threshold, model.scale, model.cv) == ("cv", "cv", 3)
    report = label_defaults.report(parts).split("`python")[0]
    assert report == label_defaults.RESULT.read_text(encoding="utf-8").split("`python")[0]


def test_what_the_page_says_of_the_sets_that_judge():
    """docs/sklearn_defaults.md and docs/sklearn.md."""
    parts = label_defaults.load(label_defaults.FIGURES)
    of, winner = parts["judging"], label_defaults.choice(parts["choosing"])
    one_by_one = (winner, label_defaults.BEFORE, label_defaults.SIGMOID, label_defaults.LOGISTIC)
    assert (len(parts["choosing"][winner]), [name.split()[0] for name in of[winner]]) == (
        12,
        list(label_defaults.JUDGING),
    )
    short = label_defaults.shortfalls(of, winner)
    np.testing.assert_allclose(short, [[0, 1.9], [0.6, 0], [0, 0], [0.2, 0]], atol=0.051)
    shorts = [label_defaults.shortfalls(of, name).mean() for name in one_by_one]
    np.testing.assert_allclose(shorts, [0.3, 2.7, 0.7, 3.1], atol=0.051)
    default, before, sigmoid, logistic = (np.array(list(of[name].values())) for name in one_by_one)
    ahead = (default - np.maximum(sigmoid, logistic))[:, label_defaults.BARRED]
    assert ahead.max() == pytest.approx(2.3, abs=0.051)
    np.testing.assert_allclose((default - before).mean(axis=0)[:3], [3.8, 1.8, 2.5], atol=0.051)
    np.testing.assert_allclose((default - sigmoid).mean(axis=0)[[0, 2]], [0.0, 2.4], atol=0.051)
    np.testing.assert_allclose((default - logistic).mean(axis=0)[[0, 2]], [6.1, 0.9], atol=0.051)
    seconds = default[:, -1].sum() / np.array([table[:, -1].sum() for table in (before, sigmoid, logistic)])
    np.testing.assert_allclose(seconds, [0.6, 1.5, 0.6], atol=0.051)
    assert (default / logistic)[:, -1].max() == pytest.approx(1.4, abs=0.05)


def test_no_set_chooses_and_judges():
    assert not set(label_defaults.JUDGING) & set(label_defaults.CHOOSING)


def test_a_set_that_chooses_is_a_part_of_its_rows_features_and_labels(monkeypatch):
    for name, count in (("ROWS", 50), ("FEATURES", 2), ("LABELS", 3)):
        monkeypatch.setattr(label_defaults, name, count)
    rng = np.random.default_rng(0)
    x = sparse.csr_matrix((rng.random((200, 3)) < [0.9, 0.1, 0.6]) * np.arange(1, 201)[:, None])
    y = (rng.random((200, 4)) < [0.1, 0.6, 0.4, 0.5]).astype(int)
    part, labels = label_defaults.some(x, y)
    assert (part.shape, labels.shape) == ((50, 2), (50, 3))
    rows = part.max(axis=1).astype(int)
    np.testing.assert_array_equal(labels[rows > 0], y[rows[rows > 0] - 1][:, 1:])


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
