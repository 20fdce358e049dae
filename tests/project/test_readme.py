"""The README's examples run, and its commands are those of the continuous integration."""

import doctest
import json
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
    """The lines of the first screen do what they print, the picture is there, and so is every file that is linked to."""
    block = re.search(r"^```pycon\n(.*?)^```", README, flags=re.M | re.S)
    assert block
    example = doctest.DocTestParser().get_doctest(block[1], {}, "README.md", "README.md", 0)
    results = doctest.DocTestRunner().run(example, out=lambda text: None)
    assert results.attempted >= 3
    assert not results.failed
    order = (
        "git clone", "pip install", ">>> import anymax", "readme.svg", "## Should you?", "| instead of |", "\n## NumPy", "\n## PyTorch",
        "\n## JAX", "\n## The maps", "\n## Speed", "| | anymax |",
    )  # fmt: skip
    places = [README.index(words) for words in order]
    assert places == sorted(places)
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert "docs/_static/readme.svg" in links
    assert not [link for link in links if not (ROOT / link).exists()]
    assert len(README.splitlines()) <= 166


@pytest.mark.parametrize(
    ("said", "title", "case"),
    [
        (r"exact zeros, \[([\d.]+) to ([\d.]+) times", "Forward into a fresh array", "| sparsemax 64x32000 normal | {} | torch.softmax |"),
        (
            r"reaches 0, \[([\d.]+) to ([\d.]+) times", "Losses, forward and backward",
            "| entmax15_loss 64x32000 normal | {} | F.cross_entropy |",
        ),
        (
            r"the same values, \[([\d.]+) to ([\d.]+) times", "Against the package entmax",
            "| entmax15 64x32000 normal | {} | entmax.entmax15 |",
        ),
    ],
)  # fmt: skip
def test_the_gains_are_those_of_the_saved_results(said, title, case):
    """The range is that of all saved runs of a CPU."""
    results = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    before, _, after = case.partition("{}")
    sections = re.findall(rf"^### {title}\n(.*?)^###", results, flags=re.M | re.S)
    rows = [re.search(re.escape(before) + r"[^|]+" + re.escape(after) + r"[^|]+\| ([\d.]+)", part) for part in sections]
    assert len(rows) >= 2
    gains = [float(row[1]) if "entmax.entmax15" in case else 1.0 / float(row[1]) for row in rows]
    found = re.search(said, README)
    assert found
    for shown, gain in zip(found.groups(), (min(gains), max(gains)), strict=True):
        assert float(shown) == pytest.approx(gain, rel=0.02)


@pytest.mark.parametrize(
    ("experiment", "claim", "test", "says"),
    [
        ("nli", "few", "exact zeros of sparse attention, %", r"([\d.]+) % of them in a small model"),
        ("seq2seq", "exact", "1.5-entmax, over words: Spanish", r"for ([\d.]+) % of the Spanish words"),
        ("proportions", "past 400", "50 topics, random, 500 words", r"([\d.]+) times softmax's divergence"),
        ("length", "sparse", "1.5-entmax - softmax", r"([\d.]+) points more accurate at 16 times the length"),
        ("finetune", "helps", "over seeds", r"helps fine-tuning \(([\d.]+) points"),
    ],
)
def test_the_reasons_to_change_are_those_of_the_experiments(experiment, claim, test, says):
    tests = json.loads((ROOT / "experiments" / "results" / f"{experiment}.json").read_text(encoding="utf-8"))["tests"]
    meant = [t for t in tests if t["claim"] == claim and test in t["what"]]
    mean = min(meant, key=lambda t: len(t["what"]))["found"]["mean"]
    (shown,) = re.findall(says, README)
    assert shown == f"{mean:.{len(shown.partition('.')[2])}f}"


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
