"""The commands of the program `anymax`: compare, inventory, explain and plot."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_calls import document, done, needs_plot

import anymax
from anymax.cli import names
from anymax.mappings import CATALOGUE

# -- compare ------------------------------------------------------------------------------------------------------------


def test_compare_json_is_one_document_with_the_maps_own_numbers(call):
    found = document(call, "compare", 2, 1, 0.1, -1, "--temperature", 2)
    assert found["scores"] == [2, 1, 0.1, -1]
    assert [m["name"] for m in found["mappings"]] == [cls.name for cls in CATALOGUE]
    for m in found["mappings"]:
        mapping = names.make(m["name"], {})
        np.testing.assert_allclose(m["p"], anymax.apply(mapping, np.array([2, 1, 0.1, -1]) / 2), atol=1e-12)
        assert m["support"] == sum(v > 0 for v in m["p"])


def test_compare_options_choose_maps_and_parameters(call):
    words = "compare 1 -1 -0.5 --mapping entmax -m SparseSoftmax --alpha 1.3 --k 1"
    entmax, sparse = document(call, *words.split())["mappings"]
    assert (entmax["name"], entmax["parameters"]) == ("entmax", {"alpha": 1.3})
    assert (sparse["name"], sparse["parameters"]["k"]) == ("sparse_softmax", 1)
    assert sparse["p"] == [1, 0, 0]


def test_compare_specs_carry_their_own_parameters(call):
    words = "compare 1 0 -m entmax:alpha=1.2 -m entmax:alpha=2 -m taylor --order 4"
    found = document(call, *words.split())["mappings"]
    assert [m["parameters"] for m in found] == [{"alpha": 1.2}, {"alpha": 2}, {"order": 4}]


@pytest.mark.parametrize(
    "words", [["--p", "0.5"], ["--noise", "gumbel"], ["--order", "4"], ["--k", "1"], ["--alpha", "1.2"]]
)
def test_compare_takes_every_parameter(call, words):
    assert call("compare", 3, -2, 1, *words)[0] == 0


@pytest.mark.parametrize("score", ["-1", "-1.5", "-.5", "-1e-3", "-2E+2", "-0", "-inf"])
def test_compare_takes_negative_numbers_in_any_place(call, score):
    scores = document(call, "compare", score, "1", score)["scores"]
    assert scores == [None if score == "-inf" else float(score), 1, None if score == "-inf" else float(score)]


@pytest.mark.parametrize("name", ["entmax15", "Entmax-15"])
def test_entmax15_is_entmax_with_its_alpha(call, name):
    a, b = document(call, "compare", 2, 1, "-m", name, "-m", "entmax:alpha=1.5")["mappings"]
    assert a == b


def test_unknown_map_lists_each_name_once(call):
    _, _, err = call("compare", 1, "-m", "softmin")
    listed = err.split("the maps are ")[1].strip().split(", ")
    maps = [names.make(name, {}) for name in listed]
    assert {m.name for m in maps} == {cls.name for cls in CATALOGUE}
    assert len({(m.name, getattr(m, "u", None)) for m in maps}) == len(listed)
    assert "--k: entmax has no such" in call("compare", 1, "-m", "entmax", "-m", "entmax:alpha=2", "--k", 1)[2]


def test_compare_masks_minus_infinity(call):
    assert all(m["p"][1] == 0 for m in document(call, "compare", 1, "-inf", 0.5)["mappings"])


def test_compare_one_score(call):
    short = ("sink", "elementwise", "softpick", "bounded")  # whose rows may sum to less
    found = document(call, "compare", 5)["mappings"]
    assert all(m["p"] == [pytest.approx(1)] for m in found if m["name"] not in short)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("n", [1, 4, 30])
def test_compare_fits_the_terminal(call, width, n):
    out = done(call, "compare", *[-i / 7 for i in range(n)], width=width)
    assert max(map(len, out.splitlines())) <= max(width, 40)
    assert "sparsemax" in out
    assert "█" in out or "#" in out


def test_compare_is_plain_text_where_there_is_no_terminal(call):
    assert "\x1b" not in call("compare", 2, 1)[1]


def test_colours_can_be_forced_and_refused(call, monkeypatch):
    assert "\x1b[38" in call("compare", 2, 1, FORCE_COLOR="1", TERM="xterm-256color")[1]
    assert "\x1b[38" not in call("compare", 2, 1, FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1")[1]


# -- inventory ----------------------------------------------------------------------------------------------------------


def test_inventory_lists_the_catalogue(call):
    rows = document(call, "inventory")
    assert [row["class"] for row in rows] == [cls.__name__ for cls in CATALOGUE]
    for row in rows:
        facts = names.make(row["name"], {}).facts
        assert row["sparse"] == facts.sparse
        own = {"sparse_softmax": "sparse_softmax_loss"}
        assert row["loss"] == own.get(row["name"], "fenchel_young" if facts.has_potential else "nll")
        assert row["definition"]


@pytest.mark.parametrize("width", [30, 80, 160])
def test_inventory_as_a_table(call, width):
    out = done(call, "inventory", width=width)
    assert all(cls.name in out for cls in CATALOGUE)
    assert max(map(len, out.splitlines())) <= width
    words = " ".join(out.split())
    assert all(f"{heading}: " in words for heading in ("exact zeros", "keeps order", "ignores shifts", "lead", "loss"))
    assert "sparsemax_loss" in words
    assert "fenchel_young(map, ...)" in words


# -- explain ------------------------------------------------------------------------------------------------------------


def test_explain_names_an_engine_for_each_framework(call):
    out = done(call, "explain", "entmax", "--alpha", "1.3", "2", "1", "--framework", "all")
    assert "Entmax(alpha=1.3)" in out
    assert "reference" in out
    assert [w for w in ("numpy", "torch", "jax") if f"{w}, float32" in out or f"{w}: not installed" in out] == [
        "numpy",
        "torch",
        "jax",
    ]


def test_explain_says_each_refusal_once(call):
    """Every operation had all of them again."""
    out = done(call, "explain", "square", "2", "-1", "--framework", "all", "--verbose")
    for part in out.split(", float32 of shape (2,)")[1:]:
        refusals = [line for line in part.splitlines() if line.lstrip().startswith("not ")]
        assert refusals
        assert len({line.partition(": ")[2] + line.split()[1] for line in refusals}) == len(refusals)
    assert (
        "not triton (nor for log p, gradient of p, gradient of log p, loss (soft targets), loss (class indices)): "
        in out
    )


@pytest.mark.whole
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
    out = done(call, "explain", "entmax")
    assert out.startswith("numpy, float32 of shape (4,)\nEntmax(alpha=1.5)\n")
    assert "torch, float32" not in out
    assert "'tf' is not one of" in call("explain", "entmax", "--framework", "tf")[2]


def test_explain_offers_no_choice_of_maps(call):
    assert "--mapping" not in call("explain", "--help")[1]
    code, out, err = call("explain", "entmax", "-m", "sparsemax")
    assert (code, out) == (2, "")
    assert "-m" in err


# -- plot ---------------------------------------------------------------------------------------------------------------


@pytest.mark.whole(lambda name: name != "bars")
@needs_plot
@pytest.mark.parametrize("name", ["curves", "bars", "losses", "jacobian", "simplex", "sparsemax", "entmax:alpha=1.3"])
def test_plot_writes_a_picture(call, tmp_path, name):
    out = tmp_path / "picture.png"
    said = done(call, "plot", name, "--out", out, *(["-m", "sparsemax"] if name == "simplex" else []))
    assert said == f"{out}\n"
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.whole
@needs_plot
def test_plot_names_its_file(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said, _ = call("plot", "curves", "--alpha", "1.2", "--mapping", "entmax")
    assert (code, said) == (0, "curves.png\n")
    assert (tmp_path / "curves.png").exists()


@pytest.mark.whole(lambda out: out not in ("folder", "bare"))
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
    said = done(call, "plot", "losses", "-m", "softmax", "--out", out)
    assert Path(said.removesuffix("\n")) == Path(written)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()] == [Path(written)]


@pytest.mark.whole
@needs_plot
@pytest.mark.parametrize("name", ["jacobian", "sparsemax"])
def test_plot_of_scores(call, tmp_path, name):
    done(call, "plot", name, 1, -2, 0.5, "--out", tmp_path / "x.png")
