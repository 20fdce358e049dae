"""The program `anymax` as a whole: help, progress, processes, and the tour from end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_calls import done, needs_plot, needs_tour, program

import anymax
from anymax.cli import main, names
from anymax.mappings import CATALOGUE

# -- progress -----------------------------------------------------------------------------------------------------------------


@pytest.mark.whole
@needs_plot
def test_progress_is_for_a_terminal_alone(call, monkeypatch, tmp_path):
    """A line on stderr where that is a terminal; nothing elsewhere, and never anything on stdout."""
    words = ["plot", "jacobian", "-m", "softmax", "-m", "sparsemax", "--out", tmp_path / "x.png"]
    out = done(call, *words)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, told, err = call(*words, TERM="xterm")
    assert (code, told) == (0, out)
    assert "jacobian" in err
    assert "2/2" in err


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
        out = done(call, *words)
        assert all(command in out for command in ("tour", "compare", "inventory", "plot", "explain"))


def test_help_cuts_no_summary_at_80_columns(call):
    _, out, _ = call("--help", width=80)
    commands = out.split("Commands:\n")[1].split("\n\n")[0].splitlines()
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


@pytest.mark.whole
def test_as_a_process(tmp_path):
    done = program("compare", "2", "1", "0.1", "-1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(json.loads(done.stdout)["mappings"]) == len(CATALOGUE)
    done = program("compare", "2", "one", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


@pytest.mark.whole
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
    # a bound below 1, and orderings
    assert set(rows) == {cls.name for cls in CATALOGUE} - {"bounded", "ranks"}
    assert rows["softmax"]["support"] == 10
    assert rows["sparsemax"]["support"] < 3
    for name in ("softmax", "sparsemax", "entmax", "normmax", "taylor", "sigsoftmax", "perturb_max"):
        assert rows[name]["accuracy"] > 0.85, name


@pytest.mark.whole
@needs_tour
def test_tour_without_pictures_leaves_no_folder(tmp_path, monkeypatch, call):
    from anymax.cli import tour

    train = tour.train
    monkeypatch.setattr(tour, "train", lambda m, data, epochs, *rest: train(m, data, 1, *rest))
    monkeypatch.chdir(tmp_path)
    out = done(call, "tour", "--quick", "--no-pictures")
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


@pytest.mark.whole
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
@pytest.mark.parametrize("words", [["inventory"], ["inventory", "--json"], ["compare", "1", "2"]])
def test_a_full_disk_is_one_line_and_1(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "anymax", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["anymax: can't write: No space left on device"]
