"""The README's examples run, and its commands are those of the continuous integration."""

import doctest
import re
import subprocess
import sys
import types
from pathlib import Path

import laws
import mpmath
import numpy as np
import pytest

import anymax

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.whole
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^## ([^\n]+)\n+```python\n(.*?)^```", README, flags=re.M | re.S)


def test_there_is_an_example_for_each_framework():
    assert [title for title, _ in BLOCKS] == ["NumPy", "PyTorch", "JAX"]


@pytest.mark.parametrize(("title", "code"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_example_runs(title, code, capsys):
    if title != "NumPy":
        pytest.importorskip({"PyTorch": "torch", "JAX": "jax"}[title])
    assert len([line for line in code.splitlines() if line]) <= 12
    exec(compile(code, f"README.md, {title}", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert printed
    assert "nan" not in printed


def test_the_first_screen_is_true_and_the_whole_short():
    """The lines above the first heading do what they print, the picture is there, and so is every file that is linked to."""
    block = re.search(r"^```pycon\n(.*?)^```", README, flags=re.M | re.S)
    assert block
    example = doctest.DocTestParser().get_doctest(block[1], {}, "README.md", "README.md", 0)
    results = doctest.DocTestRunner().run(example, out=lambda text: None)
    assert results.attempted >= 3
    assert not results.failed
    order = ("pip install", ">>> import anymax", "readme.svg", "| instead of |", "\n## ", "| | anymax |")
    places = [README.index(words) for words in order]
    assert places == sorted(places)
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert "docs/_static/readme.svg" in links
    assert not [link for link in links if not (ROOT / link).exists()]
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize(
    ("said", "case"),
    [
        (r"exact zeros, \[([\d.]+) times as fast\]", "| sparsemax 64x32000 normal | {} | torch.softmax |"),
        (r"reaches 0, \[([\d.]+) times as fast\]", "| entmax15_loss 64x32000 normal | {} | F.cross_entropy |"),
        (r"\[more than (\d+) times as fast\]", "| entmax15 64x32000 normal | {} | entmax.entmax15 |"),
    ],
)
def test_the_gains_are_those_of_the_saved_results(said, case):
    results = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    before, _, after = case.partition("{}")
    row = re.search(re.escape(before) + r"[^|]+" + re.escape(after) + r"[^|]+\| ([\d.]+)", results)
    found = re.search(said, README)
    assert row
    assert found
    gain = float(row[1]) if "entmax.entmax15" in case else 1.0 / float(row[1])
    assert float(found[1]) <= 1.02 * gain
    assert "more than" in said or float(found[1]) >= 0.95 * gain


def test_commands_of_the_text_run(capsys, tmp_path, monkeypatch):
    pytest.importorskip("click")
    pytest.importorskip("rich")
    from anymax.cli import main

    monkeypatch.chdir(tmp_path)
    commands = [line.split() for line in re.findall(r"`anymax ([^`]*)`", README)]
    assert {command[0] for command in commands} >= {"explore", "compare"}
    for command in commands:
        more = ["--print-path"] if command == ["explore"] else []
        assert main([*command, *more]) == 0, capsys.readouterr().err


@pytest.fixture
def softplus(monkeypatch):
    """The map of the contributing guide, from its text."""
    path = ROOT / "CONTRIBUTING.md"
    if not path.exists():
        pytest.skip("only in the repository")
    block = re.search(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert block
    module = types.ModuleType("anymax.mappings.softplus")
    module.__package__ = "anymax.mappings"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block[1], "CONTRIBUTING.md", "exec"), module.__dict__)
    return module.Softplus()


def test_the_map_of_the_contributing_guide_keeps_the_contract(softplus):
    anymax.check_mapping(softplus)


def test_the_map_of_the_contributing_guide_passes_the_battery(softplus):
    """[-800, -801, -900] and [3e38, 3e38, 1] in fp32 gave rows of zeros."""

    def oracle(x):
        u = [mpmath.log1p(mpmath.exp(mpmath.mpf(float(v)))) for v in x]
        return [a / mpmath.fsum(u) for a in u]

    def apply(x, **options):
        return anymax.apply(softplus, x, **options)

    rows = [laws.scores(n, sigma=s, seed=n) for n in (2, 63) for s in (0.02, 1.0, 30.0)]
    rows += [
        np.array(r) for r in ([-800.0, -801.0, -900.0], [3e38, 3e38, 1.0], [50.0, -50.0, 0.0], [-1e30, -3.0, -2.0])
    ]
    laws.accuracy(apply, oracle, 4, 8, rows)
    laws.simplex(apply)
    laws.masked(apply)
    laws.permutation(apply)
    laws.monotone(apply)
    laws.axes(apply)
    laws.views(apply)
    laws.empty(apply)
    laws.poison(apply)
    laws.extremes(apply)
    smooth = [laws.scores(5, seed=i) for i in range(3)]
    laws.jacobian(apply, lambda x: anymax.jacobian(softplus, x), smooth, False, False)


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="only in the repository")
def test_ci_finds_the_test_command():
    """.ci/run takes the test command from the README with this program."""
    program = re.search(r"awk '(.+?)' README.md", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert program
    done = subprocess.run(["awk", program[1], ROOT / "README.md"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["&&", "&&", "auto"]
    assert "-c constraints.txt" in lines[1]
    assert lines[2].endswith("-m pytest -n auto")


def test_no_command_of_the_readme_scrolls():
    blocks = re.findall(r"^```bash\n(.*?)^```", README, flags=re.M | re.S)
    assert len(blocks) == 3
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 88
