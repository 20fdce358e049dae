"""The program `anymax`: scores from standard input, wrong arguments, and maps that are not of ours."""

import dataclasses
import importlib.util
import io
import json
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest
from cli_calls import document, done

import anymax
from anymax.cli import names
from anymax.mappings import CATALOGUE

# -- scores from standard input -------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(call, monkeypatch):
    """Runs the program with words on its standard input."""

    def run(text, *args):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return call(*args)

    return run


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("2 1 0.1\n", [[2, 1, 0.1]]),
        ("2,1,0.1", [[2, 1, 0.1]]),
        ("2, 1, 0.1,\n", [[2, 1, 0.1]]),
        ("2;1;-.5\r\n", [[2, 1, -0.5]]),
        ("2\t1\t1e-3\n\n", [[2, 1, 1e-3]]),
        ("2\n1\n0.1\n", [[2, 1, 0.1]]),
        ("2 1\n\n-1 -2 3\n", [[2, 1], [-1, -2, 3]]),
        ("\ufeff2,1\n3,4\n", [[2, 1], [3, 4]]),
        ("[2, 1, 0.1]", [[2, 1, 0.1]]),
        ("[[2, 1], [3, 4]]", [[2, 1], [3, 4]]),
        ("[[2.  1. ]\n [3. 4.]]\n", [[2, 1], [3, 4]]),
        ("5\n", [[5]]),
    ],
)
def test_compare_reads_standard_input(pipe, text, rows):
    found = document(pipe, text, "compare", "-", "-m", "sparsemax")
    assert [one["scores"] for one in found] == rows
    for one, row in zip(found, rows, strict=True):
        np.testing.assert_allclose(one["mappings"][0]["p"], anymax.sparsemax(row))


def test_rows_of_standard_input_as_tables(pipe):
    out = done(pipe, "2 1\n3 -inf 1\n", "compare", "-")
    assert [line for line in out.splitlines() if line.startswith("row")] == ["row 1", "row 2"]
    assert out.count("sparsemax") == 2
    one = pipe("2 1 0.1\n", "compare", "-")[1]
    assert one == pipe("", "compare", "2", "1", "0.1")[1]


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("", "compare -", "standard input has no scores; expected numbers, one row of them a line"),
        ("1,5 2,5\n", "compare -", "line 1, '1,5 2,5': numbers are separated by commas or by spaces, not by both"),
        (
            "a,b\n1,2\n",
            "compare -",
            "line 1: 'a' is not a number; scores are numbers such as 2 or -1.5, without a header",
        ),
        ("1,2\n3,nan\n", "compare -", "line 2: 'nan' is not a score"),
        ("1,,2\n", "compare -", "line 1: '' is not a number"),
        ("[1, [2]]", "compare -", "list 1: '[2]' is not a number"),
        ("[]", "compare -", "standard input has no scores; expected numbers, one row of them a line"),
        ("[[1, 2], []]", "compare -", "list 2: it is empty; a row has one score or more"),
        pytest.param("[" * 100_000, "compare -", "its brackets are nested too deep; a list has scores", id="brackets"),
        ("1 2", "compare 3 -", "- reads all scores from standard input; give it alone, or numbers"),
        ("1 2\n3\n4 5", "explain entmax -", "rows of one call have the same length, got 2, 1, 2"),
        ("1 2\n3 4", "plot bars -", "a picture shows one row of scores, got 2"),
    ],
)
def test_standard_input_that_is_no_scores(pipe, text, words, says):
    code, out, err = pipe(text, *words.split())
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_explain_and_plot_read_standard_input(pipe, tmp_path):
    assert "float32 of shape (2, 3)" in pipe("1 2 3\n4 5 6\n", "explain", "entmax", "-")[1]
    pytest.importorskip("matplotlib")
    done(pipe, "1,2,3", "plot", "bars", "-", "--out", tmp_path / "x.png")


@pytest.mark.whole
def test_a_process_reads_its_standard_input():
    def ran(words, given):
        command = [sys.executable, "-m", "anymax", *words.split()]
        return subprocess.run(command, input=given, capture_output=True, check=False)

    program = ran("compare - --json", b"2 1\n")
    assert json.loads(program.stdout)[0]["scores"] == [2, 1]
    assert ran("compare --json", b"2 1\n").stdout == program.stdout
    program = ran("compare -", b"\xff\xfe2")
    assert program.returncode == 2
    assert program.stderr.count(b"\n") == 1


# -- wrong arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("compare", "SCORES"),
        ("compare two", "'two' is not a number"),
        ("compare 1 nan", "'nan' is not a score"),
        ("compare 1 inf", "'inf' is not a score"),
        ("compare 1 2 --alhpa 3", "'--alhpa' is an unknown option"),
        ("compare 1 2 --mapping softmin", "there is no map 'softmin' (did you mean 'softmax'?); the maps are softmax"),
        ("compare 1 2 --mapping softmax --alpha 2", "--alpha: softmax has no such parameter"),
        ("compare 1 2 --mapping entmax:k=2", "entmax has no parameter 'k'; it takes alpha"),
        ("compare 1 2 --mapping entmax:beta=2", "entmax has no parameter 'beta'; it takes alpha"),
        ("compare 1 2 --mapping sparse-softmax:q=2", "sparse_softmax has no parameter 'q'; it takes k or p"),
        ("compare 1 2 --mapping square:alpha=2", "square has no parameter 'alpha'; it takes none"),
        ("compare 1 2 --mapping softmin:beta=2", "there is no map 'softmin'"),
        ("compare 1 2 --mapping entmax15:alpha=2", "entmax15 is entmax:alpha=1.5 and takes no parameters"),
        ("compare 1 2 --mapping entmax:1.5", "'entmax:1.5': write entmax:alpha=1.5"),
        ("explain", "Missing argument 'NAME'. For example: sparsemax."),
        ("sparsemax 1 2 3", "sparsemax is a map, not a command; write anymax compare -m sparsemax 1 2 3"),
        ("compare 1 2 --mapping entmax:alpha=x", "alpha"),
        ("compare 1 2 --alpha -1", "--alpha: Entmax(alpha=-1.0): alpha must be above 0 and finite"),
        ("compare 1 2 --p 2", "--p: SparseSoftmax(p=2): p must be above 0 and at most 1"),
        ("compare 1 2 --p 0.5 --k 1", "--k, --p: SparseSoftmax(k=1, p=0.5): give exactly one"),
        ("compare 1 2 --mapping taylor:order=4 --mapping taylor --order 0", "--order: Taylor(order=0)"),
        ("compare 1,inf", "'inf' is not a score"),
        ("compare ,", "Missing argument 'SCORES...': give numbers, such as 2 1 0.1 -1, or pipe them in"),
        ("compare a,b", "'a,b' is not a number; scores are numbers"),
        ("compare 1 2 --alpha x", "--alpha"),
        ("compare 1 2 --order 3", "must be even"),
        ("compare 1 2 --noise pink", "pink"),
        ("compare 1 2 --k 0", "k"),
        ("compare 1 2 --mapping sparse_softmax --k 1.5", "k must be an integer"),
        ("compare 1 2 --temperature=-1", "--temperature: must be finite and at least 0"),
        ("compare 1 2 --temperature nan", "--temperature: must be finite and at least 0"),
        ("inventory now", "now"),
        ("plot circles", "'circles' is neither a picture"),
        ("plot", "NAME"),
        ("plot circles -m sparsemax", "'circles' is neither a picture"),
        ("plot softmax -m sparsemax", "a map's name (softmax) and --mapping don't combine"),
        ("plot simplex 1 2 3", "simplex takes no scores, got 3"),
        ("plot curves 1 2", "curves takes no scores, got 2"),
        ("plot losses -1", "losses takes no scores, got 1"),
        ("plot curves --out /no/such/folder/x.png", "No such file or directory"),
        ("plot curves --out picture.docx", "docx"),
        ("explain softmin", "there is no map 'softmin'"),
        ("tour --seed -1", "--seed"),
        ("tour --out README.md/x", "README.md"),
        ("dance", "No such command 'dance'. The commands are compare, explain, "),
        ("--dance", "--dance"),
    ],
)
def test_wrong_arguments_give_one_line_and_2(call, tmp_path, monkeypatch, words, says):
    if words.startswith(("plot", "tour")):
        for package in ("torch", "sklearn", "matplotlib"):
            pytest.importorskip(package)
    (tmp_path / "README.md").touch()
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*words.split())
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("anymax")
    assert says in err


@pytest.mark.parametrize(
    "words", [["2,1,-1"], ["[2,", "1,", "-1]"], ["2 1 -1"], ["2,1", "-1"], ["(", "2", "1;-1", ")"]]
)
def test_scores_with_commas_in_brackets_and_in_quotes(call, words):
    assert document(call, "compare", *words)["scores"] == [2, 1, -1]


def test_unknown_engine_in_the_environment_is_one_line(call, environment):
    environment("steam")
    code, out, err = call("compare", 1, 2)
    assert (code, out) == (2, "")
    assert "there is no engine 'steam'" in err
    assert err.count("\n") == 1


# -- a map that is not of ours ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Sparsegen(anymax.Sparsemax):
    """Sparsemax of `x / (1 - lam)`; lam has no default."""

    lam: float
    name = "sparsegen"
    example: ClassVar[dict] = {"lam": 0.25}

    def forward(self, x, xp):
        return super().forward(x / (1.0 - self.lam), xp)


@pytest.fixture
def with_sparsegen(monkeypatch):
    from anymax._core.providers import providers
    from anymax.cli import commands

    with monkeypatch.context() as patch:
        patch.setattr(providers, "catalogue", (*CATALOGUE, Sparsegen))
        importlib.reload(names)
        importlib.reload(commands)
        yield
    importlib.reload(names)
    importlib.reload(commands)


def test_the_fields_of_a_map_are_its_options(call, with_sparsegen):
    """From a fixed list they came, so that `sparsegen:lam=0.5` was refused, and a field without a default broke compare."""
    x = np.array([0.5, 0.3, 0.1])

    def p(*words):
        return {row["name"]: row for row in document(call, "compare", *x, *words)["mappings"]}["sparsegen"]

    for words, lam in (((), 0.25), (("-m", "sparsegen:lam=0.5"), 0.5), (("-m", "sparsegen", "--lam", "0.4"), 0.4)):
        row = p(*words)
        assert row["parameters"] == {"lam": lam}
        np.testing.assert_allclose(row["p"], anymax.sparsemax(x / (1 - lam)))
    out = done(call, "inventory", width=120)
    assert "sparsegen lam=0.25" in out
    assert "--lam" in call("compare", "--help")[1]


def test_a_field_without_a_default_is_asked_for(call, with_sparsegen, monkeypatch):
    monkeypatch.setattr(Sparsegen, "example", {})
    code, _, err = call("compare", 1, 2, "-m", "sparsegen")
    assert code == 2
    assert "sparsegen needs lam; write sparsegen:lam=..." in err


def test_every_parameter_that_is_no_function_is_an_option(call):
    said = call("compare", "--help")[1]
    for cls in CATALOGUE:
        for field in dataclasses.fields(cls):
            if cls is not anymax.Ratio:
                assert f"--{field.name} " in said
    (found,) = document(call, "compare", 1, 2, "-m", "perturb_max:noise=gumbel,scale=2,nodes=16")["mappings"]
    assert found["parameters"] == {"noise": "gumbel", "nodes": 16, "scale": 2}
