"""The gallery of the documentation: every example runs, and draws."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")

import matplotlib.pyplot as plt

pytestmark = pytest.mark.whole
GALLERY = Path(__file__).parents[2] / "docs" / "gallery"
if not GALLERY.is_dir():
    pytest.skip("the pages are in the repository only", allow_module_level=True)
EXAMPLES = sorted(GALLERY.glob("plot_*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_draws(path):
    if "sklearn" in path.read_text(encoding="utf-8"):
        pytest.importorskip("sklearn")
    try:
        runpy.run_path(str(path))
        figures = [plt.figure(number) for number in plt.get_fignums()]
        assert figures
        for figure in figures:
            figure.canvas.draw()
            drawn = [ax for ax in figure.axes if ax.has_data()]
            assert drawn, f"{path.name} leaves an empty figure"
            assert all(ax.get_xlabel() or ax.get_title() or ax.get_ylabel() for ax in drawn)
    finally:
        plt.close("all")


GIVEN = {"plot": "matplotlib", "sklearn": "sklearn"}  # extra -> what it lets a notebook import


def test_a_notebook_begins_by_installing_what_the_gallery_imports():
    """On a hosted machine there is no anymax."""
    cell = re.search(r'"first_notebook_cell": (.+),', (GALLERY.parent / "conf.py").read_text(encoding="utf-8"))
    assert cell
    install = re.match(r"%pip install -q 'anymax\[([\w,]+)\]'\n", ast.literal_eval(cell[1]))
    assert install
    there = {*sys.stdlib_module_names, "anymax", "numpy", *(GIVEN[extra] for extra in install[1].split(","))}
    for path in EXAMPLES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= there, path.name


def test_the_gallery_shows_every_kind_of_picture():
    shown = "".join(path.read_text(encoding="utf-8") for path in EXAMPLES)
    kinds = ("curves", "losses", "simplex", "jacobian", "attention", "support_histogram", "calibration")
    assert [kind for kind in kinds if f"plot.{kind}(" not in shown] == []
