"""The program `anymax`: exit codes, JSON, wrong arguments, and the tour from end to end."""

import dataclasses
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

import anymax
from anymax.cli import main, names
from anymax.mappings import CATALOGUE

needs_plot = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
needs_tour = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "sklearn", "matplotlib")),
    reason="needs torch, scikit-learn and matplotlib",
)


@pytest.fixture
def call(capsys, monkeypatch):
    """Runs the program: (exit code, stdout, stderr)."""

    def run(*args, width=100, **environment):
        monkeypatch.setenv("COLUMNS", str(width))
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        code = main([str(a) for a in args])
        return code, *capsys.readouterr()

    return run


def program(*args, cwd, **environment):
    """The program in a process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "anymax", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONUTF8": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


# -- compare ------------------------------------------------------------------------------------------------------------


def test_compare_json_is_one_document_with_the_maps_own_numbers(call):
    code, out, err = call("compare", 2, 1, 0.1, -1, "--json", "--temperature", 2)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["scores"] == [2, 1, 0.1, -1]
    assert [m["name"] for m in document["mappings"]] == [cls.name for cls in CATALOGUE]
    for m in document["mappings"]:
        mapping = names.make(m["name"], {})
        np.testing.assert_allclose(m["p"], anymax.apply(mapping, np.array([2, 1, 0.1, -1]) / 2), atol=1e-12)
        assert m["support"] == sum(v > 0 for v in m["p"])


def test_compare_options_choose_maps_and_parameters(call):
    code, out, _ = call(
        "compare", 1, -1, "-0.5", "--mapping", "entmax", "-m", "SparseSoftmax", "--alpha", 1.3, "--k", 1, "--json"
    )
    assert code == 0
    entmax, sparse = json.loads(out)["mappings"]
    assert (entmax["name"], entmax["parameters"]) == ("entmax", {"alpha": 1.3})
    assert (sparse["name"], sparse["parameters"]["k"]) == ("sparse_softmax", 1)
    assert sparse["p"] == [1, 0, 0]


def test_compare_specs_carry_their_own_parameters(call):
    _, out, _ = call(
        "compare", 1, 0, "-m", "entmax:alpha=1.2", "-m", "entmax:alpha=2", "-m", "taylor", "--order", 4, "--json"
    )
    assert [m["parameters"] for m in json.loads(out)["mappings"]] == [{"alpha": 1.2}, {"alpha": 2}, {"order": 4}]


@pytest.mark.parametrize(
    "words", [["--p", "0.5"], ["--noise", "gumbel"], ["--order", "4"], ["--k", "1"], ["--alpha", "1.2"]]
)
def test_compare_takes_every_parameter(call, words):
    assert call("compare", 3, -2, 1, *words)[0] == 0


@pytest.mark.parametrize("score", ["-1", "-1.5", "-.5", "-1e-3", "-2E+2", "-0", "-inf"])
def test_compare_takes_negative_numbers_in_any_place(call, score):
    code, out, err = call("compare", score, "1", "--json", score)
    assert code == 0, err
    scores = json.loads(out)["scores"]
    assert scores == [None if score == "-inf" else float(score), 1, None if score == "-inf" else float(score)]


@pytest.mark.parametrize("name", ["entmax15", "Entmax-15"])
def test_entmax15_is_entmax_with_its_alpha(call, name):
    code, out, err = call("compare", 2, 1, "-m", name, "-m", "entmax:alpha=1.5", "--json")
    assert (code, err) == (0, "")
    a, b = json.loads(out)["mappings"]
    assert a == b


def test_unknown_map_lists_each_name_once(call):
    _, _, err = call("compare", 1, "-m", "softmin")
    listed = err.split("the maps are ")[1].strip().split(", ")
    maps = [names.make(name, {}) for name in listed]
    assert {m.name for m in maps} == {cls.name for cls in CATALOGUE}
    assert len({(m.name, getattr(m, "u", None)) for m in maps}) == len(listed)
    assert "--k: entmax has no such" in call("compare", 1, "-m", "entmax", "-m", "entmax:alpha=2", "--k", 1)[2]


def test_compare_masks_minus_infinity(call):
    _, out, _ = call("compare", 1, "-inf", 0.5, "--json")
    assert all(m["p"][1] == 0 for m in json.loads(out)["mappings"])


def test_compare_one_score(call):
    _, out, _ = call("compare", 5, "--json")
    assert all(m["p"] == [pytest.approx(1)] for m in json.loads(out)["mappings"])


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("n", [1, 4, 30])
def test_compare_fits_the_terminal(call, width, n):
    code, out, _ = call("compare", *[-i / 7 for i in range(n)], width=width)
    assert code == 0
    assert max(map(len, out.splitlines())) <= max(width, 40)
    assert "sparsemax" in out
    assert "█" in out or "#" in out


def test_compare_is_plain_text_where_there_is_no_terminal(call):
    assert "\x1b" not in call("compare", 2, 1)[1]


def test_colours_can_be_forced_and_refused(call, monkeypatch):
    assert "\x1b[38" in call("compare", 2, 1, FORCE_COLOR="1", TERM="xterm-256color")[1]
    assert "\x1b[38" not in call("compare", 2, 1, FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1")[1]


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
    code, out, err = pipe(text, "compare", "-", "--json", "-m", "sparsemax")
    assert (code, err) == (0, "")
    documents = json.loads(out)
    assert [d["scores"] for d in documents] == rows
    for document, row in zip(documents, rows, strict=True):
        np.testing.assert_allclose(document["mappings"][0]["p"], anymax.sparsemax(row))


def test_rows_of_standard_input_as_tables(pipe):
    code, out, _ = pipe("2 1\n3 -inf 1\n", "compare", "-")
    assert code == 0
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
    code, _, err = pipe("1,2,3", "plot", "bars", "-", "--out", tmp_path / "x.png")
    assert code == 0, err


def test_a_process_reads_its_standard_input(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "anymax", "compare", "-", "--json"], input=b"2 1\n", capture_output=True, check=True
    )
    assert json.loads(done.stdout)[0]["scores"] == [2, 1]
    done = subprocess.run(
        [sys.executable, "-m", "anymax", "compare", "-"], input=b"\xff\xfe2", capture_output=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1


# -- progress -----------------------------------------------------------------------------------------------------------------


@needs_plot
def test_progress_is_for_a_terminal_alone(call, monkeypatch, tmp_path):
    """A line on stderr where that is a terminal; nothing elsewhere, and never anything on stdout."""
    words = ["plot", "jacobian", "-m", "softmax", "-m", "sparsemax", "--out", tmp_path / "x.png"]
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, told, err = call(*words, TERM="xterm")
    assert (code, told) == (0, out)
    assert "jacobian" in err
    assert "2/2" in err


# -- inventory ----------------------------------------------------------------------------------------------------------


def test_inventory_lists_the_catalogue(call):
    code, out, _ = call("inventory", "--json")
    assert code == 0
    rows = json.loads(out)
    assert [row["class"] for row in rows] == [cls.__name__ for cls in CATALOGUE]
    for row in rows:
        facts = names.make(row["name"], {}).facts
        assert row["sparse"] == facts.sparse
        assert row["loss"] == ("fenchel_young" if facts.has_potential else "nll")
        assert row["definition"]


@pytest.mark.parametrize("width", [30, 80, 160])
def test_inventory_as_a_table(call, width):
    code, out, _ = call("inventory", width=width)
    assert code == 0
    assert all(cls.name in out for cls in CATALOGUE)
    assert max(map(len, out.splitlines())) <= width


# -- explain ------------------------------------------------------------------------------------------------------------


def test_explain_names_an_engine_for_each_framework(call):
    code, out, _ = call("explain", "entmax", "--alpha", "1.3", "2", "1", "--framework", "all")
    assert code == 0
    assert "Entmax(alpha=1.3)" in out
    assert "reference" in out
    assert [w for w in ("numpy", "torch", "jax") if f"{w}, float32" in out or f"{w}: not installed" in out] == [
        "numpy",
        "torch",
        "jax",
    ]


def test_explain_says_each_refusal_once(call):
    """Every operation had all of them again."""
    code, out, err = call("explain", "square", "2", "-1", "--framework", "all")
    assert (code, err) == (0, "")
    for part in out.split(", float32 of shape (2,)")[1:]:
        refusals = [line for line in part.splitlines() if " refuses" in line]
        assert refusals
        assert len({line.partition(": ")[2] + line.split()[0] for line in refusals}) == len(refusals)
    assert "(triton refuses, also log_forward and vjp and log_vjp and loss and index_loss: " in out


@pytest.mark.parametrize(
    "words", [["compare", "2", "1"], ["explain", "entmax"], ["inventory"], ["compare", "2", "1", "--json"]]
)
def test_quick_commands_load_no_framework(words):
    """They made half a second of imports into three."""
    code = f"import sys; from anymax.cli import main; main({words!r}); print(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert not loaded & {"torch", "jax", "matplotlib", "scipy", "sklearn", "triton", "pandas"}
    assert {"numpy", "rich", "click"} <= loaded


def test_explain_of_one_framework(call):
    code, out, _ = call("explain", "entmax")
    assert code == 0
    assert out.startswith("numpy, float32 of shape (4,)\nEntmax(alpha=1.5)\n")
    assert "torch, float32" not in out
    assert "'tf' is not one of" in call("explain", "entmax", "--framework", "tf")[2]


def test_explain_offers_no_choice_of_maps(call):
    assert "--mapping" not in call("explain", "--help")[1]
    code, out, err = call("explain", "entmax", "-m", "sparsemax")
    assert (code, out) == (2, "")
    assert "-m" in err


# -- plot ---------------------------------------------------------------------------------------------------------------


@pytest.mark.thin(3)
@needs_plot
@pytest.mark.parametrize("name", ["curves", "bars", "losses", "jacobian", "simplex", "sparsemax", "entmax:alpha=1.3"])
def test_plot_writes_a_picture(call, tmp_path, name):
    out = tmp_path / "picture.png"
    code, said, err = call("plot", name, "--out", out, *(["-m", "sparsemax"] if name == "simplex" else []))
    assert code == 0, err
    assert said == f"{out}\n"
    assert out.read_bytes().startswith(b"\x89PNG")


@needs_plot
def test_plot_names_its_file(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said, _ = call("plot", "curves", "--alpha", "1.2", "--mapping", "entmax")
    assert (code, said) == (0, "curves.png\n")
    assert (tmp_path / "curves.png").exists()


@needs_plot
@pytest.mark.parametrize(
    ("out", "written"),
    [
        ("folder", "folder/losses.png"),
        ("folder/", "folder/losses.png"),
        ("new/folder/", "new/folder/losses.png"),
        (".", "losses.png"),
        ("bare", "bare.png"),
        ("dot.", "dot.png"),
        ("folder/x.svg", "folder/x.svg"),
        ("folder.d/x", "folder.d/x.png"),
    ],
)
def test_plot_says_the_file_that_it_wrote(call, tmp_path, monkeypatch, out, written):
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "folder.d"):
        Path(folder).mkdir()
    code, said, err = call("plot", "losses", "-m", "softmax", "--out", out)
    assert (code, err) == (0, "")
    assert Path(said.removesuffix("\n")) == Path(written)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()] == [Path(written)]


@needs_plot
@pytest.mark.parametrize("name", ["jacobian", "sparsemax"])
def test_plot_of_scores(call, tmp_path, name):
    code, _, err = call("plot", name, 1, -2, 0.5, "--out", tmp_path / "x.png")
    assert code == 0, err


@needs_plot
def test_curves_of_what_is_no_list_of_mappings():
    from anymax import plot

    with pytest.raises(ValueError, match="there is no map 'softmin'"):
        plot.curves("softmin")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a mapping such as .*, got the class Softmax; add"):
        plot.curves(anymax.Softmax)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got no mappings"):
        plot.curves([])


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
        ("compare 1 2 --mapping entmax:1.5", "write NAME:parameter=value"),
        ("compare 1 2 --mapping entmax:alpha=x", "alpha"),
        ("compare 1 2 --alpha -1", "--alpha: Entmax(alpha=-1.0): alpha must be finite and above"),
        ("compare 1 2 --p 2", "--p: SparseSoftmax(p=2): p must be at most 1"),
        ("compare 1 2 --p 0.5 --k 1", "--k, --p: SparseSoftmax(k=1, p=0.5): give exactly one"),
        ("compare 1 2 --mapping taylor:order=4 --mapping taylor --order 0", "--order: Taylor(order=0)"),
        ("compare 1,2,3", "'1,2,3' is not a number; separate numbers by spaces, as in 1 2 3"),
        ("compare [-1,2]", "'[-1,2]' is not a number; separate numbers by spaces, as in -1 2"),
        ("compare -1,2", "'-1,2' is not a number; separate numbers by spaces, as in -1 2"),
        ("compare 2, 1", "'2,' is not a number; separate numbers by spaces, as in 2"),
        ("compare [ 1 ]", "'[' is not a number; separate numbers by spaces"),
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


def test_scores_in_quotes(call):
    code, _, err = call("compare", "1 2 3")
    assert code == 2
    assert "'1 2 3' is not a number; separate numbers by spaces and without quotes, as in 1 2 3" in err


def test_unknown_engine_in_the_environment_is_one_line(call, environment):
    environment("steam")
    code, out, err = call("compare", 1, 2)
    assert (code, out) == (2, "")
    assert "there is no engine 'steam'" in err
    assert err.count("\n") == 1


# -- the program itself -------------------------------------------------------------------------------------------------


def test_show_config_says_what_runs_here(call, capsys, monkeypatch):
    monkeypatch.setenv("ANYMAX_KEPT_MB", "12")
    found = anymax.show_config("dicts")
    assert found["packages"]["numpy"] == np.__version__
    assert found["variables"]["ANYMAX_KEPT_MB"] == "12"
    with anymax.use("reference"):
        assert anymax.show_config("dicts")["engines"]["asked for"] == "reference"
    anymax.show_config()
    printed = capsys.readouterr().out
    assert f"  numpy: {np.__version__}\n" in printed
    code, said, _ = call("show-config")
    assert (code, said) == (0, printed)
    code, said, _ = call("show-config", "--json")
    assert json.loads(said) == found
    with pytest.raises(ValueError, match="'stdout' or 'dicts', got 'json'"):
        anymax.show_config("json")


def test_version_and_help(call):
    assert call("--version")[:2] == (0, f"anymax {anymax.__version__}\n")
    for words in ([], ["--help"], ["-h"]):
        code, out, _ = call(*words)
        assert code == 0
        assert all(command in out for command in ("tour", "compare", "inventory", "plot", "explain"))


def test_help_cuts_no_summary_at_80_columns(call):
    _, out, _ = call("--help", width=80)
    commands = out.split("Commands:\n")[1].splitlines()
    assert len(commands) == 7
    assert all(line.endswith(".") and "..." not in line for line in commands)


def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "click", None)
    assert main(["inventory"]) == 1
    assert "pip install 'anymax[cli]'" in capsys.readouterr().err


def test_without_matplotlib_plot_says_what_to_install(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    code, _, err = call("plot", "curves")
    assert code == 1
    assert "pip install 'anymax[plot]'" in err


def test_interrupt_is_one_line(call, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(names, "choose", stop)
    code, _, err = call("inventory")
    assert (code, err.strip()) == (130, "anymax: interrupted")


def test_as_a_process(tmp_path):
    done = program("compare", "2", "1", "0.1", "-1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(json.loads(done.stdout)["mappings"]) == len(CATALOGUE)
    done = program("compare", "2", "one", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


def test_a_terminal_without_unicode(tmp_path):
    done = program("compare", "2", "1", "-1", cwd=tmp_path, PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert "#" in done.stdout
    assert program("inventory", cwd=tmp_path, PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C").returncode == 0


@pytest.mark.whole
@needs_tour
def test_tour_from_end_to_end(tmp_path):
    done = program("tour", "--quick", "--out", "pictures", cwd=tmp_path, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = tmp_path / "pictures"
    assert str(folder) in done.stdout.splitlines()[-1]
    pictures = sorted(path.name for path in folder.glob("*.png"))
    assert pictures == ["calibration.png", "curves.png", "jacobians.png", "losses.png", "simplex.png", "support.png"]
    rows = {row["mapping"].split()[0]: row for row in json.loads((folder / "results.json").read_text(encoding="utf-8"))}
    assert set(rows) == {cls.name for cls in CATALOGUE}
    assert rows["softmax"]["support"] == 10
    assert rows["sparsemax"]["support"] < 3
    for name in ("softmax", "sparsemax", "entmax", "normmax", "taylor", "sigsoftmax", "perturb_max"):
        assert rows[name]["accuracy"] > 0.85, name


@needs_tour
def test_tour_without_pictures_leaves_no_folder(tmp_path, monkeypatch, call):
    from anymax.cli import tour

    train = tour.train
    monkeypatch.setattr(tour, "train", lambda m, data, epochs, *rest: train(m, data, 1, *rest))
    monkeypatch.chdir(tmp_path)
    code, out, err = call("tour", "--quick", "--no-pictures")
    assert code == 0, err
    assert "accuracy" in out
    assert list(Path().iterdir()) == []


@needs_tour
def test_tour_says_at_once_that_a_folder_cannot_be_written(tmp_path, monkeypatch, call):
    from anymax.cli import tour

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tour.tempfile, "TemporaryFile", refuse)
    code, out, err = call("tour", "--out", tmp_path)
    assert (code, out) == (2, "")
    assert "can't be written (Permission denied)" in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
@pytest.mark.parametrize("words", [["inventory"], ["inventory", "--json"], ["compare", "1", "2"]])
def test_a_full_disk_is_one_line_and_1(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "anymax", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["anymax: can't write: No space left on device"]


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
    from anymax._core.handed import handed
    from anymax.cli import commands

    with monkeypatch.context() as patch:
        patch.setattr(handed, "catalogue", (*CATALOGUE, Sparsegen))
        importlib.reload(names)
        importlib.reload(commands)
        yield
    importlib.reload(names)
    importlib.reload(commands)


def test_the_fields_of_a_map_are_its_options(call, with_sparsegen):
    """From a fixed list they came, so that `sparsegen:lam=0.5` was refused, and a field without a default broke compare."""
    x = np.array([0.5, 0.3, 0.1])

    def p(*words):
        code, out, err = call("compare", *x, "--json", *words)
        assert (code, err) == (0, "")
        return {row["name"]: row for row in json.loads(out)["mappings"]}["sparsegen"]

    for words, lam in (((), 0.25), (("-m", "sparsegen:lam=0.5"), 0.5), (("-m", "sparsegen", "--lam", "0.4"), 0.4)):
        row = p(*words)
        assert row["parameters"] == {"lam": lam}
        np.testing.assert_allclose(row["p"], anymax.sparsemax(x / (1 - lam)))
    code, out, _ = call("inventory", width=120)
    assert code == 0
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
    code, out, _ = call("compare", 1, 2, "-m", "perturb_max:noise=gumbel,scale=2,nodes=16", "--json")
    assert code == 0
    assert json.loads(out)["mappings"][0]["parameters"] == {"noise": "gumbel", "nodes": 16, "scale": 2}
