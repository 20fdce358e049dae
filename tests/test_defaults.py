"""The comparison that the defaults of the estimators come from: its ranks, its table, and what the page says of it."""

import pathlib

import numpy as np
import pytest

pytest.importorskip("sklearn")

ROOT = pathlib.Path(__file__).parents[1]
if not (ROOT / "benchmarks").exists():
    pytest.skip("only in the repository", allow_module_level=True)

from anymax.sklearn import MultiLabelMappingClassifier
from benchmarks import defaults


def table(text, head):
    """The rows of a Markdown table of the report, name -> figures."""
    lines = text.split(head)[1].strip().split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[0][1:], {row[0]: [float(cell) for cell in row[1:]] for row in cells[2:]}


def test_ranks_share_their_ties():
    np.testing.assert_array_equal(defaults.ranks(np.array([3.0, 5.0, 3.0, 1.0])), [2.5, 1.0, 2.5, 4.0])


def test_the_report_puts_the_best_first():
    found = {
        "a": np.array([[50.0, 40, 30, 20, 1], [60, 50, 40, 30, 1]]),
        "b": np.array([[40.0, 30, 20, 10, 2], [70, 40, 30, 20, 3]]),
    }
    text = defaults.report(["one", "two"], found)
    _, ranked = table(text, "of all fits.")
    assert list(ranked) == ["a", "b"]
    assert ranked["a"] == [1.5, 1.0, 1.0, 1.0, 1.12, 2.0]
    assert table(text, "micro-F1, per cent:") == (["a", "b"], {"one": [50.0, 40.0], "two": [60.0, 70.0]})


def test_the_default_is_the_first_of_the_kept_table():
    text = defaults.RESULT.read_text(encoding="utf-8")
    _, ranked = table(text, "of all fits.")
    first = next(iter(ranked))
    assert defaults.CONTENDERS[first]["mapping"] == MultiLabelMappingClassifier().mapping
    assert ranked[first][0] == min(row[0] for row in ranked.values()), "in micro-F1, which is tuned, too"
    names, f1 = table(text, "micro-F1, per cent:")
    real = [row for name, row in f1.items() if not name.startswith("made up")]
    ahead = [row[names.index("sigmoid")] > row[names.index(first)] for row in real]
    assert sum(ahead) > len(real) / 2, "docs/sklearn.md says so"
