"""The experiments: each runs quickly without data and writes what it found; intervals and verdicts are what they say."""

import argparse
import dataclasses
import functools
import importlib
import json
import math
import re
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

ROOT = Path(__file__).parents[2]

pytest.importorskip("matplotlib")
stats = pytest.importorskip("scipy.stats")

import experiments
from experiments import _cells, _common, _jobs, _report, _statistics, _together, _until
from experiments._statistics import CONFIRMED, CONTRADICTED, NOT_TESTED, UNDECIDED

pytestmark = pytest.mark.whole

ORDER = [
    "multilabel", "proportions", "nli", "finetune", "seq2seq", "inflection", "intents", "verification", "overconfidence", "exact", "graphs",
    "conformal", "longtail", "length", "calibration", "noise", "router", "language", "statements", "attending",
]  # fmt: skip


def load(name):
    return importlib.import_module(f"experiments.{name}")


def judged(test):
    """The verdict that a test in the JSON file must have; shares no code with `verdict`."""
    if test.get("edge"):
        return UNDECIDED
    low = -math.inf if test["found"]["low"] is None else test["found"]["low"]
    high = math.inf if test["found"]["high"] is None else test["found"]["high"]
    if "at_least" in test:
        return CONFIRMED if low >= test["at_least"] else CONTRADICTED if high < test["at_least"] else UNDECIDED
    return CONFIRMED if high <= test["at_most"] else CONTRADICTED if low > test["at_most"] else UNDECIDED


def check_files(folder, name, quick):
    known = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    page = (folder / f"{name}.md").read_text(encoding="utf-8")
    experiment = load(name).EXPERIMENT
    assert known["name"] == name
    assert known["quick"] is quick
    assert known["data"]
    assert known["settings"]["seeds"] == list(range(len(known["settings"]["seeds"])))
    assert {"python", "anymax", "commit", "numpy"} <= known["versions"].keys()
    assert known["hardware"]["cpu"]
    assert len(known["date"]) == 10
    assert [c["key"] for c in known["claims"]] == list(experiment.claims)
    assert known["tables"]
    assert all(table["rows"] for table in known["tables"])
    assert known["tests"]
    for test in known["tests"]:
        assert test["verdict"] == judged(test), test
    for claim in known["claims"]:
        said = {t["verdict"] for t in known["tests"] if t["claim"] == claim["key"]}
        expected = CONTRADICTED if CONTRADICTED in said else CONFIRMED if said == {CONFIRMED} else UNDECIDED
        needs = experiment.claims[claim["key"]].needs
        lacks = needs and next(c["verdict"] for c in known["claims"] if c["key"] == needs) != CONFIRMED
        assert claim["verdict"] == (NOT_TESTED if lacks else expected)
        assert claim == {"key": claim["key"], **experiment.claims[claim["key"]].words(), "verdict": claim["verdict"]}
        assert f"| {_statistics.signs(claim['claim'])} |" in page.replace("\\|", "|")
    assert ("A quick run" in page) is quick
    assert known["pictures"]
    for picture in known["pictures"]:
        assert f"({picture['file']})" in page
        check_picture(folder / picture["file"])
    return known


def check_picture(path):
    from matplotlib.image import imread

    pixels = np.asarray(imread(path))[..., :3].reshape(-1, 3)
    assert len(pixels) > 100_000
    colours = np.unique((pixels * 255).round().astype(np.uint8), axis=0)
    assert len(colours) > 20, "a picture of nearly nothing"
    assert (pixels.min(axis=1) < 0.9).mean() > 0.005


@pytest.mark.parametrize("name", experiments.NAMES)
def test_quick_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ANYMAX_DATA", raising=False)
    module = load(name)
    for package in module.EXPERIMENT.needs:
        pytest.importorskip(package)
    begun = time.process_time()
    assert _common.main(module.EXPERIMENT, module.run, ["--quick", "--out", str(tmp_path)]) == 0
    known = check_files(tmp_path, name, quick=True)
    assert time.process_time() - begun < 60  # of the processor: the machine may be busy
    told = capsys.readouterr()
    assert all(f"{c['verdict']:>12}: {c['claim']}" in told.out for c in known["claims"])
    assert f"[{name} " in told.err  # progress
    assert (tmp_path / "README.md").read_text(encoding="utf-8").count(f"[{name}]({name}.md)") == len(known["claims"])
    assert not list(tmp_path.glob(".*"))


def test_names_are_the_scripts_and_the_guide_has_them():
    scripts = {p.stem for p in (ROOT / "experiments").glob("*.py") if not p.name.startswith("_")}
    assert scripts == set(experiments.NAMES)
    assert [n for n in ORDER if n in scripts] == list(experiments.NAMES)
    guide = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    for name in experiments.NAMES:
        assert f"| `{name}` |" in guide
        assert load(name).EXPERIMENT.name == name
        assert load(name).__name__.endswith(name)


@pytest.mark.parametrize("path", sorted((ROOT / "experiments" / "results").glob("*.json")), ids=lambda p: p.stem)
def test_saved_results(path):
    """They are full runs, and their verdicts follow from their figures."""
    check_files(path.parent, path.stem, quick=False)
    assert f"({path.stem}.md)" in (path.parent / "README.md").read_text(encoding="utf-8")


def test_list(capsys):
    assert importlib.import_module("experiments.__main__").main([]) == 0
    told = capsys.readouterr().out
    for name in experiments.NAMES:
        assert f"experiments.{name} " in told
        assert all(claim.text in told for claim in load(name).EXPERIMENT.claims.values())
    saved = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "experiments" / "results").glob("*.json")]
    assert told.count("    saved on ") == len(saved)
    assert f"together took {sum(one['seconds'] for one in saved) / 3600:.1f} hours" in told


# -- intervals and verdicts -------------------------------------------------------------------------------------------


def test_interval_over_seeds_is_student_t():
    values = np.random.default_rng(0).normal(3.0, 2.0, size=7)
    ours, theirs = _statistics.over_seeds(values), stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert ours.n == 7


def test_paired_intervals():
    rng = np.random.default_rng(1)
    common = rng.normal(size=6)
    a, b = np.exp(common + 0.1 * rng.normal(size=6)), np.exp(common + 0.1 * rng.normal(size=6))
    theirs = stats.ttest_rel(a, b).confidence_interval(0.95)
    ours = _statistics.difference(a, b)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    theirs = stats.ttest_rel(np.log(a), np.log(b)).confidence_interval(0.95)
    ours = _statistics.ratio(a, b)
    assert (ours.low, ours.high) == pytest.approx((math.exp(theirs.low), math.exp(theirs.high)))
    assert ours.mean == pytest.approx(stats.gmean(a / b))
    with pytest.raises(ValueError, match="positive"):
        _statistics.ratio([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="one figure a seed"):
        _statistics.difference([1.0, 2.0], [1.0])


def test_bootstrap_agrees_with_the_normal_interval():
    x = np.random.default_rng(2).normal(1.0, 1.0, size=400)
    ours = _statistics.bootstrap(lambda v: float(v.mean()), x, draws=2000)
    half = 1.96 * x.std() / math.sqrt(len(x))
    assert ours.mean == pytest.approx(x.mean())
    assert (ours.low, ours.high) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.02)
    with pytest.raises(ValueError, match="same number"):
        _statistics.bootstrap(lambda a, b: 0.0, x, x[:-1])


@pytest.mark.parametrize(
    ("low", "high", "at_most", "at_least"),
    [(0.5, 0.7, CONFIRMED, UNDECIDED), (0.6, 0.8, UNDECIDED, UNDECIDED), (0.71, 0.8, CONTRADICTED, CONFIRMED),
     (0.7, 0.8, UNDECIDED, CONFIRMED), (0.1, 0.69, CONFIRMED, CONTRADICTED), (-math.inf, math.inf, UNDECIDED, UNDECIDED),
     (math.nan, math.nan, UNDECIDED, UNDECIDED)],
)  # fmt: skip
def test_verdict(low, high, at_most, at_least):
    interval = _statistics.Interval(0.5 * (low + high), low, high, 5, "made up")
    assert _statistics.verdict(interval, at_most=0.7) == at_most
    assert _statistics.verdict(interval, at_least=0.7) == at_least
    with pytest.raises(ValueError, match="exactly one"):
        _statistics.verdict(interval)


def test_one_seed_decides_nothing():
    one = _statistics.over_seeds([0.1])
    assert _statistics.verdict(one, at_most=100.0) == UNDECIDED
    assert one.as_json()["low"] is None
    assert str(one) == "0.1 (no interval)"
    assert _statistics.verdict(_statistics.exact(0.1), at_most=0.1) == CONFIRMED
    with pytest.raises(ValueError, match="at least one seed"):
        _statistics.over_seeds([])


@pytest.mark.parametrize(
    ("mean", "half", "even", "uneven"),
    [(6.067, 1.3, "6.1 ± 1.3", "6.1 [4.8, 7.4]"), (-0.817, 0.24, "−0.82 ± 0.24", "−0.82 [−1.06, −0.58]"),
     (52.55, 10.96, "53 ± 11", "53 [42, 64]"), (4720.4, 238.0, "4,720 ± 240", "4,720 [4,480, 4,960]"),
     (86.0, 3.96, "86.0 ± 4.0", "86.0 [82.0, 90.0]"), (-0.0004, 0.05, "0.000 ± 0.050", "0.00 [−0.05, 0.05]"),
     (0.5, 0.0996, "0.50 ± 0.10", "0.50 [0.40, 0.60]"), (-1.45, 1.5, "−1.5 ± 1.5", "−1.5 [−3.0, 0.1]"),
     (-0.0034112, 0.0, "−0.003411", "−0.003411"), (1e-6, 0.0, "1e-6", "1e-6"), (10131, 0.0, "10,131", "10,131"),
     (0.25, math.inf, "0.25 (no interval)", "0.25 (no interval)")],
)  # fmt: skip
def test_a_figure_has_the_decimals_of_its_interval(mean, half, even, uneven):
    for method, shown in (("t over 3 seeds", even), ("bootstrap over 9 test rows", uneven)):
        assert str(_statistics.Interval(mean, mean - half, mean + half, 3, method)) == shown


def test_a_hyphen_that_means_minus_becomes_one():
    said = _statistics.signs("1.5-entmax - softmax, log(n-1) - 1, -log p, (-2 to 1e-6), CIFAR-10, `a - b`")
    assert said == "1.5-entmax − softmax, log(n−1) − 1, −log p, (−2 to 1e-6), CIFAR-10, `a - b`"


@pytest.mark.parametrize(
    ("what", "bound", "shown"),
    [("gain, points: a - b", {"at_least": -1.0}, "≥ −1 point"), ("gain, points: a - b", {"at_most": 0.5}, "≤ 0.5 points"),
     ("zeros, percent: 25 % noise", {"at_least": 10.0}, "≥ 10 %"), ("accuracy, 25 % noise", {"at_most": 1000.0}, "≤ 1,000"),
     ("0% wrong: accuracy", {"at_least": -0.01}, "≥ −0.01")],
)  # fmt: skip
def test_a_bound_has_the_unit_that_its_test_names(what, bound, shown):
    assert _report.bound({"what": what, **bound}).replace("\N{NO-BREAK SPACE}", " ") == shown


def test_a_page_shows_first_what_a_reader_needs(tmp_path):
    """Each claim above its tests; how values were chosen and the machine are folded, below the results, and so is what is long."""
    claims = {key: _report.Claim(f"Claim {key}", "us") for key in "ab"}
    head = {
        "title": "T",
        "quick": True,
        "settings": {"seeds": [0, 1, 2, 3], "rates": [1.0, 3.0], "only": ""},
        "command": "it",
        "date": "",
    }
    head |= {"seconds": 300, "hardware": {"cpu": ""}, "threads": 1, "versions": {}}
    figure = _statistics.over_seeds([1.0, 1.1, 0.9])

    def page(tests, tables):
        found = _report.Findings("seq2seq", claims, tmp_path)
        for i in range(tests):
            found.test("ba"[i % 2], f"test {i}", figure, at_least=0.0)
        for title in tables:
            found.table(title, [{"a": figure}])
        return _report.as_markdown(_report.as_json(head, found), {})

    short = page(2, ["What was chosen", "Result"])
    order = [
        "| Claim a | us |",
        "## Tests",
        "Student's t over 3 seeds.",
        "**Claim a**",
        "| test 1 |",
        "**Claim b**",
        "| test 0 |",
    ]
    order += ["## Result", "## How it was run", "`it`, , 5 minutes.", "<summary>What was chosen"]
    order += ["<summary>Settings", "| seeds | 0 to 3 |", "| rates | 1, 3 |"]
    places = [short.index(words) for words in order]
    assert places == sorted(places)
    assert "| only |" not in short
    assert short.count("<details>") == 2
    long = page(_report.MOST_TESTS + 1, [f"Result {i}" for i in range(_report.MOST_TABLES + 1)])
    assert f"<summary>{_report.MOST_TESTS + 1} tests of the claims</summary>\n\n| test |" in long
    assert long.count("<details>") == long.count("</details>") == _report.MOST_TABLES + 3
    assert "## Result" not in long


@pytest.mark.parametrize(
    ("parts", "whole"),
    [([], UNDECIDED), ([CONFIRMED], CONFIRMED), ([CONFIRMED, UNDECIDED], UNDECIDED),
     ([UNDECIDED, CONTRADICTED, CONFIRMED], CONTRADICTED)],
)  # fmt: skip
def test_verdict_of_several_tests(parts, whole):
    assert _statistics.all_of(parts) == whole


# -- the command line -------------------------------------------------------------------------------------------------


def made_up(**options):
    return _common.Experiment(
        "made_up", "Made up", "Nothing.", {"it": _report.Claim("It is so", "nobody")}, seeds=3, **options
    )


def test_missing_data_is_one_sentence(monkeypatch, tmp_path, capsys):
    experiment = made_up(data={"folder/file.npz": "The Original (Someone 1999)"})

    def run(settings, found):
        settings.data("folder/file.npz")

    monkeypatch.delenv("ANYMAX_DATA", raising=False)
    assert _common.main(experiment, run, ["--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "ANYMAX_DATA is not set" in told
    assert "The Original (Someone 1999)" in told
    monkeypatch.setenv("ANYMAX_DATA", str(tmp_path))
    assert _common.main(experiment, run, ["--out", str(tmp_path)]) == 2
    assert "folder/file.npz is not in the folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file.npz").touch()
    settings = _common.Settings(experiment, False, [0], None)
    assert settings.data("folder/file.npz") == tmp_path / "folder" / "file.npz"


def test_missing_package_is_one_sentence(tmp_path, capsys):
    assert _common.main(made_up(needs=("no_such_package",)), lambda s, f: None, ["--out", str(tmp_path)]) == 2
    assert "needs no_such_package" in capsys.readouterr().err


def test_seeds_and_options(tmp_path, capsys):
    experiment = made_up(options={"--size": {"type": int, "default": 5}})
    seen = []

    def run(settings, found):
        seen.append((settings.seeds, settings.options.size, settings.quick))
        found.data = "Nothing."
        found.test("it", "a test", _statistics.over_seeds([1.0, 1.1, 0.9]), at_least=0.5)
        found.against_paper("a figure", 2.0, _statistics.over_seeds([1.0, 1.1, 0.9]))
        found.table("A table", [{"a": "x|y", "b": 1.0, "c": True, "d": None}, {"a": "z", "b": 2.0}])
        found.notes.append("A note.")

    arguments = ["--out", str(tmp_path), "--size", "7", "--seeds", "4"]
    assert _common.main(experiment, run, arguments) == 0
    assert seen == [([0, 1, 2, 3], 7, False)]
    page = (tmp_path / "made_up.md").read_text(encoding="utf-8")
    assert "| x\\|y | 1 | yes |\n" in page
    assert "| a figure | 2.0 | 1.00\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}0.25 | −1.0 |\n" in page
    assert str(tmp_path) not in page + (tmp_path / "made_up.json").read_text(encoding="utf-8")
    assert "confirmed: It is so" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        _common.main(experiment, run, ["--seeds", "0"])
    assert "positive whole number" in capsys.readouterr().err


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The saved results and the folder of other runs, both out of the way."""
    saved, scratch = tmp_path / "results", tmp_path / "scratch"
    monkeypatch.setattr(_common, "RESULTS", saved)
    monkeypatch.setattr(_common, "_scratch", lambda: scratch)
    monkeypatch.setattr(_common.subprocess, "check_output", lambda *_, **__: "")
    return saved, scratch


def told(found, edge=False, partial=False):
    found.data, found.partial = "Nothing.", partial
    found.test("it", "a test", _statistics.over_seeds([1.0, 1.1, 0.9]), at_least=0.5)
    found.chosen("the rate", 1.0 if edge else 0.5, [0.1, 0.5, 1.0])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_come_in_their_order_whatever_the_number_of_processes(jobs):
    with _jobs.run_on(jobs) as each:
        assert list(each(divmod, [(7, 2), (9, 4), (1, 3)])) == [(3, 1), (2, 1), (0, 1)]
        threads = each(torch_threads, [(), ()])
        assert [next(threads), next(threads)] == [1, 1]  # of a second call too


def torch_threads():
    import torch

    return torch.get_num_threads()


def test_saved_results_come_from_the_default_command(elsewhere, capsys):
    saved, scratch = elsewhere
    experiment = made_up(
        options={"--size": {"type": int, "default": 5}, "--jobs": {"type": int, "default": 1}}, free=("--jobs",)
    )

    def run(settings, found):
        told(found)

    assert _common.main(experiment, run, ["--jobs", "2"]) == 0
    before = (saved / "made_up.json").read_bytes()
    for words in (["--seeds", "2"], ["--size", "7"], ["--quick"]):
        assert _common.main(experiment, run, words) == 0
        assert (scratch / "made_up.json").is_file()
        (scratch / "made_up.json").unlink()
        capsys.readouterr()
        assert _common.main(experiment, run, [*words, "--out", str(saved)]) == 2
        assert "only `python -m experiments.made_up` writes the saved results" in capsys.readouterr().err
    assert (saved / "made_up.json").read_bytes() == before
    assert _common.main(experiment, run, ["--size", "5"]) == 0
    assert "3 seeds; the saved full run, of 20" in capsys.readouterr().err


def test_a_changed_tree_saves_nothing(elsewhere, monkeypatch, tmp_path, capsys):
    saved, _ = elsewhere
    monkeypatch.setattr(
        _common.subprocess, "check_output", lambda *_, **__: " M src/anymax/losses/verbs.py\n?? experiments/new.py\n"
    )
    assert _common.main(made_up(), lambda settings, found: told(found), []) == 2
    assert "these files differ: src/anymax/losses/verbs.py, experiments/new.py" in capsys.readouterr().err
    assert not saved.exists()
    assert _common.main(made_up(), lambda settings, found: told(found), ["--out", str(tmp_path / "other")]) == 0


def test_an_optimum_at_the_edge_is_none(elsewhere, capsys):
    saved, scratch = elsewhere

    def run(settings, found):
        found.picture(lambda figure: figure.subplots())
        told(found, edge=True)
        assert settings.quick, "a full run ends at once"

    assert _common.main(made_up(), run, []) == 2
    assert "the rate: 1 was chosen among 0.1, 0.5, 1. Nothing is written" in capsys.readouterr().err
    assert not saved.exists()
    assert _common.main(made_up(), run, ["--quick"]) == 0
    assert (scratch / "made_up.png").is_file()
    found = _report.Findings("made_up", {}, saved, strict=True)
    found.chosen("a penalty", 0.0, [0.0, 1.0, 2.0], ends=(0.0,))
    with pytest.raises(_report.Refused, match="a penalty: 2 was chosen"):
        found.chosen("a penalty", 2.0, [0.0, 1.0, 2.0], ends=(0.0,))


def test_a_training_that_was_not_over_decides_nothing(tmp_path):
    found = _report.Findings("seq2seq", {"better": _report.Claim("Better", "us")}, tmp_path)
    far = _statistics.over_seeds([5.0, 5.1, 5.2])
    assert found.test("better", "over", far, at_least=0.0) == CONFIRMED
    assert found.test("better", "cut off", far, at_least=0.0, edge="1 of 3 trainings was not over") == UNDECIDED
    assert found.verdicts() == {"better": UNDECIDED}
    head = {
        "title": "T",
        "quick": True,
        "settings": {},
        "command": "",
        "date": "",
        "seconds": 0,
        "hardware": {"cpu": ""},
        "threads": 1,
    }
    page = _report.as_markdown(_report.as_json({**head, "versions": {}}, found), {})
    assert "| cut off | 5.10 ± 0.25 | ≥ 0 | undecided (1) |" in page.replace("\N{NO-BREAK SPACE}", " ")
    assert "\n(1) Undecided, since trainings were not over: 1 of 3 trainings was not over.\n" in page


def test_patience_is_over_after_so_many_epochs_without_less():
    watch = _until.Watch[int]((1, 3))
    for epoch, error in enumerate([5.0, 4.0, 4.0, 3.0, 3.5, 3.5, 3.5, 2.0], start=1):
        if watch.better(error):
            watch.keep(epoch)
        if watch.over(most=9):
            break
    assert [(stop.patience, stop.epoch, stop.kept, stop.after, stop.ended) for stop in watch.stops] == [
        (1, 2, 2, 3, True),
        (3, 4, 4, 7, True),
    ]
    short = _until.Watch[int]((1, 3))
    for epoch, error in enumerate([3.0, 2.0], start=1):
        assert short.better(error)
        short.keep(epoch)
        assert short.over(most=2) is (epoch == 2)
    assert [(stop.epoch, stop.ended) for stop in short.stops] == [(2, False), (2, False)]


def test_cells_are_taken_where_their_sources_are_the_same(tmp_path, capsys):
    settings = _common.Settings(load("inflection").EXPERIMENT, True, [0], argparse.Namespace(cells=tmp_path))
    made = []

    def work(value):
        made.append(value)
        return {"figure": value, "row": np.arange(value)}

    def cells(**recipe):
        return _cells.Cells(settings, "_transducer", recipe)

    for again in range(2):
        one = cells(width=3).get(("seed", 0, "a b"), work, 4)
        assert one["figure"] == 4
        assert_array_equal(one["row"], np.arange(4))
        assert len(made) == 1
        assert ("taken from seed_0_a-b.npz" in capsys.readouterr().err) is bool(again)
    assert [p.name for p in tmp_path.iterdir()] == ["seed_0_a-b.npz"]
    cells(width=4).get(("seed", 0, "a b"), work, 4)
    assert len(made) == 2
    assert "comes from other sources" in capsys.readouterr().err


def test_a_run_cut_short_takes_no_saved_place(elsewhere):
    saved, scratch = elsewhere
    assert _common.main(made_up(), lambda settings, found: told(found, partial=True), []) == 0
    assert not (saved / "made_up.json").exists()
    assert (scratch / "made_up.json").is_file()


@pytest.mark.parametrize(("best", "start"), [(3.0, 1.0), (0.02, 1.0), (1.0, 1.0)])
def test_a_walk_ends_inside_of_what_it_tried(best, start):
    asked = []

    def loss(x):
        asked.append(x)
        return math.log(x / best) ** 2

    at, tried, inside = _common.walk(loss, start, 2.0, 1e-6, most=10)
    assert inside
    assert abs(math.log2(at / best)) <= 0.5 + 1e-9
    assert min(tried) < at < max(tried)
    assert len(asked) == len(set(asked))
    assert not _common.walk(lambda x: -x, 1.0, 2.0, 1e-6, most=3)[2]


def test_an_interrupted_run_keeps_what_is_done(tmp_path, monkeypatch, capsys):
    module = load("multilabel")
    for package in module.EXPERIMENT.needs:
        pytest.importorskip(package)
    whole = module.collection

    def interrupted(settings, found, name, plan):
        if name != "scene":
            raise KeyboardInterrupt
        found.strict = False  # of one l2 none is an optimum, which would end the run here
        small = module.Plan(folds=1, l2=(1e-2,), models=("sigmoid", "softmax", "1.5-entmax", "sparsemax", "ZLPR"))
        return whole(dataclasses.replace(settings, quick=True), found, "synthetic", small)

    monkeypatch.setattr(module, "collection", interrupted)
    assert _common.main(module.EXPERIMENT, module.run, ["--out", str(tmp_path)]) == 0
    known = json.loads((tmp_path / "multilabel.json").read_text(encoding="utf-8"))
    assert known["notes"][0] == "Interrupted after scene."
    assert [row["collection"] for row in known["tables"][0]["rows"]] == ["scene"]
    monkeypatch.setattr(module, "collection", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _common.main(module.EXPERIMENT, module.run, ["--out", str(tmp_path)])


def test_a_test_of_no_claim(tmp_path):
    found = _report.Findings("made_up", {"it": _report.Claim("It is so", "nobody")}, tmp_path)
    with pytest.raises(KeyError, match="no claim 'that'"):
        found.test("that", "x", _statistics.exact(1.0), at_most=2.0)


# -- formulas of single experiments -----------------------------------------------------------------------------------


def test_f1_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(3)
    y, chosen = rng.random((80, 7)) < 0.3, rng.random((80, 7)) < 0.25
    chosen[:, 6] = False  # a label never chosen
    micro, macro = load("multilabel").measured(chosen, y.astype(np.uint8))
    assert micro == pytest.approx(100 * metrics.f1_score(y, chosen, average="micro"))
    precision = metrics.precision_score(y, chosen, average="macro", zero_division=0)
    recall = metrics.recall_score(y, chosen, average="macro", zero_division=0)
    assert macro == pytest.approx(100 * stats.hmean([precision, recall]))


def test_f1_of_a_draw_is_that_of_its_rows():
    rng = np.random.default_rng(4)
    y, chosen = rng.random((50, 5)) < 0.3, rng.random((50, 5)) < 0.3
    index = rng.integers(0, 50, size=(3, 50))
    weights = np.stack([np.bincount(i, minlength=50) for i in index]).astype(np.float32)
    measured = load("multilabel").measured
    one_by_one = np.stack([measured(chosen[i], y[i]) for i in index], axis=1)
    np.testing.assert_allclose(measured(chosen, y, weights), one_by_one, rtol=1e-5)


@pytest.mark.parametrize(("model", "level"), [("softmax", 0.2), ("sparsemax", 0.7), ("sigmoid", 0.4)])
def test_decisions_on_sets_of_labels_are_those_of_the_estimator(model, level):
    datasets = pytest.importorskip("sklearn.datasets")
    from anymax import Softmax, Sparsemax
    from anymax.sklearn import MultiLabelMappingClassifier

    x, y = datasets.make_multilabel_classification(
        120, 8, n_classes=4, n_labels=1, allow_unlabeled=False, random_state=0
    )
    mapping = {"softmax": Softmax(), "sparsemax": Sparsemax()}.get(model, model)
    trained = MultiLabelMappingClassifier(mapping, l2=0.01, threshold=level, scale=level).fit(x, y)
    module = load("multilabel")
    plan = module.Plan(solver={})
    z = module.scores(mapping, 0.01, plan, x, y, x)
    np.testing.assert_array_equal(z, trained.decision_function(x))
    np.testing.assert_array_equal(module.decide(mapping, z, level), trained.predict(x) > 0)


def test_rows_without_a_label_are_left_out_and_folds_cover_the_rest(tmp_path, monkeypatch):
    """Ten rows of which two have no label, in a file as that of Birds."""
    from scipy import sparse

    module = load("multilabel")
    x = sparse.csr_matrix(np.arange(30.0).reshape(10, 3))
    y = np.tile([[1, 0], [0, 1], [0, 0], [1, 1], [1, 0]], (2, 1))
    arrays = {"X_data": x.data, "X_indices": x.indices, "X_indptr": x.indptr, "X_shape": x.shape}
    arrays |= {"Y": np.packbits(y, axis=1), "Y_shape": y.shape, "split": np.repeat([0, 1], 5)}
    (tmp_path / "multilabel").mkdir()
    np.savez(tmp_path / "multilabel" / "birds.npz", **arrays)
    monkeypatch.setenv("ANYMAX_DATA", str(tmp_path))
    data = module.read(_common.Settings(module.EXPERIMENT, False, [0], argparse.Namespace(rows=9)), "birds", 0)
    assert_array_equal(data.y, y[[0, 1, 3, 4]])
    assert (len(data.y_test), data.unlabelled) == (4, 2)
    for plan, in_order in ((module.PLANS["birds"], True), (module.PLANS["scene"], False)):
        held = [rows for _, rows in module.folds(13, plan, 0)]
        assert [len(rows) for rows in held] == [3, 3, 3, 3, 1]
        every = np.concatenate(held).tolist()
        assert sorted(every) == list(range(13))
        assert (every == list(range(13))) is in_order


@pytest.mark.parametrize("kind", ["uniform", "random"])
def test_documents_are_what_they_say(kind):
    x, q = load("proportions").documents(np.random.default_rng(6), 400, 10, 300, kind)
    assert x.shape == q.shape == (400, 10)
    np.testing.assert_allclose(q.sum(axis=1), 1.0)
    count = (q > 0).sum(axis=1)
    assert count.min() == 1
    # Poisson(1) given that it is not 0 has the mean 1 / (1 - 1/e)
    assert count.mean() == pytest.approx(1 / (1 - math.exp(-1)), abs=4 * count.std() / 20)
    assert x.sum(axis=1).mean() == pytest.approx(300, abs=4 * math.sqrt(300) / 20)
    even = np.array([len(set(np.round(row[row > 0], 12))) == 1 for row in q])
    assert even.all() if kind == "uniform" else not even[count > 1].any()


def test_gap_of_scores_that_meet_the_bound():
    """Equal scores but for the target's: there the bound is met."""
    overconfidence = load("overconfidence")
    lead = np.array([0.5, 3.0, 40.0])
    z = np.zeros((3, 10))
    z[[0, 1, 2], [4, 5, 6]] = lead
    y = np.array([4, 5, 6])
    np.testing.assert_allclose(overconfidence.losses(z, y), np.log1p(9 * np.exp(-lead)), rtol=1e-12)
    np.testing.assert_allclose(overconfidence.slack(z, y), 0.0, atol=1e-9)
    z[:, 0] = -1.0
    assert (overconfidence.slack(z, y) > 0.5).all()


# -- all claims together ----------------------------------------------------------------------------------------------------


def test_holms_correction():
    assert _together.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert _together.holm([0.2, 0.9, 0.001]) == pytest.approx([0.4, 0.9, 0.003])
    assert _together.holm([]) == []


def a_test(values, bound, claim="a"):
    found = _statistics.over_seeds(values)
    said = _statistics.verdict(found, at_most=bound)
    return {"claim": claim, "what": claim, "found": found.as_json(), "at_most": bound, "verdict": said}


def saved(folder, name, *tests, quick=False):
    keys = dict.fromkeys(test["claim"] for test in tests)
    claims = [
        {"key": k, "claim": k, "source": "", "verdict": _statistics.all_of([t["verdict"] for t in tests if t["claim"] == k])}
        for k in keys
    ]  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps({"name": name, "quick": quick, "claims": claims, "tests": tests}))


def test_what_is_confirmed_contradicts_no_claim(tmp_path):
    rng = np.random.default_rng(0)
    clear, faint = rng.normal(-1.0, 0.1, 8), np.array([0.4, 1.5, 1.2, 0.5])
    saved(tmp_path, "one", a_test(clear, 0.0), a_test(faint, 0.0), a_test(clear, 0.0))
    (one,) = _together.claims(tmp_path)
    assert one.verdict == CONTRADICTED
    assert one.p == pytest.approx(3 * stats.ttest_1samp(faint, 0.0).pvalue)
    assert one.together == UNDECIDED


def test_claims_together(tmp_path):
    rng = np.random.default_rng(0)
    clear, faint = rng.normal(-1.0, 0.1, 8), np.array([-0.4, -1.5, -1.2, -0.5])
    undecided = np.array([-1.0, 0.4, -0.9, 0.3])
    both = [a_test(values, 0.0, "both") for values in (clear, faint)]
    saved(tmp_path, "one", a_test(clear, 0.0), a_test(faint, 0.0, "b"), *both)
    saved(tmp_path, "two", a_test(undecided, 0.0, "c"), a_test(-clear, 0.0, "d"), a_test(clear, 0.0, "d"))
    saved(tmp_path, "three", a_test(clear, 0.0), quick=True)
    found = {one.claim: one for one in _together.claims(tmp_path)}
    assert found.keys() == {"a", "b", "both", "c", "d"}
    assert found["a"].p == pytest.approx(stats.ttest_1samp(clear, 0.0).pvalue)
    assert found["b"].p == found["both"].p == pytest.approx(stats.ttest_1samp(faint, 0.0).pvalue)  # all must confirm
    assert found["d"].p == pytest.approx(2 * found["a"].p)  # any of two may contradict
    of_b = CONFIRMED if found["b"].p < 0.05 else UNDECIDED
    assert [found[k].verdict for k in "abcd"] == [CONFIRMED, of_b, UNDECIDED, CONTRADICTED]
    assert found["a"].together == CONFIRMED
    assert found["b"].together == UNDECIDED
    assert found["a"].seen == found["d"].seen == ""
    assert re.fullmatch(r"[\d.]+ with 4 seeds", found["c"].seen)


@pytest.mark.parametrize("level", [0.05, 0.001])
def test_what_a_test_could_have_seen(level):
    """Of runs at that distance from the bound four in five are decided at the level; at half of it, far fewer."""
    rng = np.random.default_rng(1)
    distance = _together.detectable(a_test([0.7, -1.3, 0.1, 0.9, -0.4, 0.0], 0.0), level)
    spread = np.std([0.7, -1.3, 0.1, 0.9, -0.4, 0.0], ddof=1)
    for away, expected in ((distance, 0.8), (distance / 2, {0.05: 0.28, 0.001: 0.18}[level])):
        runs = rng.normal(-away, spread, (4000, 6))
        half = stats.t.isf(level / 2, 5) * runs.std(axis=1, ddof=1) / 6**0.5
        assert (runs.mean(axis=1) + half <= 0.0).mean() == pytest.approx(expected, abs=0.05)
    assert _together.detectable(a_test([1.0], 0.0), level) == math.inf
    rows = {"mean": 0.1, "low": -0.1, "high": 0.3, "n": 500, "method": "bootstrap over 500 test rows"}
    needed = stats.norm.isf(level / 2)
    assert _together.detectable({"found": rows, "at_most": 0.0}, level) == pytest.approx(
        0.2 * (needed + 0.8416) / 1.96, rel=1e-3
    )


def test_the_level_that_holm_leaves(tmp_path):
    """A claim more is decided at just this level, beside those that are; and an undecided claim is said to have been judged at it."""
    assert _together.left([1e-6, 1e-5, 0.4, 0.9]) == pytest.approx(0.025)
    for p, decided in ((0.0249, True), (0.0251, False)):
        assert (_together.holm([1e-6, 1e-5, p, 0.9])[2] <= 0.05) is decided
    clear, undecided = np.random.default_rng(0).normal(-1.0, 0.1, 8), a_test(np.array([-1.0, 0.4, -0.9, 0.3]), 0.0, "c")
    saved(
        tmp_path, "one", a_test(clear, 0.0), undecided, *(a_test(np.array([-1.0, 1.0]), 0.0, f"d{i}") for i in range(8))
    )
    (seen,) = (one.seen for one in _together.claims(tmp_path) if one.claim == "c")
    assert float(seen.split()[0]) == pytest.approx(_together.detectable(undecided, 0.05 / 9), rel=0.05)


def test_where_chance_has_no_part_a_claim_is_not_judged_with_the_others(tmp_path):
    rng = np.random.default_rng(0)
    clear = rng.normal(-1.0, 0.1, 8)
    saved(tmp_path, "one", a_test(clear, 0.0), a_test(np.full(8, 2.0), 0.0, "same"), a_test(clear, 0.0, "theorem"))
    known = json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))
    known["claims"][2] |= _report.Claim("theorem", "", apart="it is a theorem", notes=("seen later",)).words()
    (tmp_path / "one.json").write_text(json.dumps(known), encoding="utf-8")
    a, same, theorem = _together.claims(tmp_path)
    assert a.corrected == a.p  # it is alone in its family
    assert (same.together, same.apart) == (CONTRADICTED, _together.NO_SPREAD)
    assert theorem.told == "confirmed; not judged with the others: it is a theorem; seen later"
    assert "1 of 3 claims together" in _words(tmp_path)


def _words(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_together, "claims", functools.partial(_together.claims, folder))
        return _together.words()


def test_networks_that_were_best_at_the_end_decide_nothing():
    calibration = load("calibration")
    tests = [
        {"claim": c, "what": f"{n}: error", "verdict": CONFIRMED}
        for n in ("early", "late")
        for c in ("stopped", "long")
    ]
    tables = [
        {"title": f"{name}: stopped on held-out rows, as trained", "rows": [{"epoch": _statistics.over_seeds(epochs)}]}
        for name, epochs in (("early", [30.0, 200.0]), ("late", [30.0, 239.0]))
    ]
    edges = calibration.edges(tables, tests)
    assert edges == {("stopped", "late: error"): "1 of 2 networks were best within the last twentieth of the epochs"}
    assert edges == calibration.edges(json.loads(json.dumps(_report._plain(tables))), tests)
    _report.cut(tests, edges)
    assert [t["verdict"] for t in tests] == [CONFIRMED, CONFIRMED, UNDECIDED, CONFIRMED]
    claims = {"stopped": _report.Claim("", ""), "long": _report.Claim("", "")}
    assert _report.verdicts(claims, tests) == {"stopped": UNDECIDED, "long": CONFIRMED}


def test_what_a_test_could_have_seen_names_its_unit(tmp_path):
    rng = np.random.default_rng(1)
    tests = []
    for of, n in (("pairs", 9000), ("alphabets", 4)):
        values = rng.normal(0.0, 1.0, n)
        found = _statistics.difference(values - values.mean(), np.zeros(n), of=of)
        tests.append({"claim": "a", "what": of, "found": found.as_json(), "at_most": 0.0, "verdict": UNDECIDED})
    ratio = _statistics.ratio([1.0, 1.2, 0.8], [1.0, 1.0, 1.0])
    tests.append({"claim": "a", "what": "ratio", "found": ratio.as_json(), "at_most": 1.0, "verdict": UNDECIDED})
    saved(tmp_path, "one", *tests)
    (one,) = _together.claims(tmp_path)
    assert re.fullmatch(r"[\d.]+ with 9,000 pairs, [\d.]+ with 4 alphabets, a factor of [\d.]+ with 3 seeds", one.seen)


def test_figures_of_each_seed_are_saved():
    """All that an interval is made of is in the JSON file, on one line, and makes the same interval again."""
    ours, theirs = [1.0, 2.5, 3.0], [0.5, 0.25, 4.0]
    for made in (_statistics.over_seeds(ours), _statistics.difference(ours, theirs), _statistics.ratio(ours, theirs)):
        known = made.as_json()
        assert known["figures"][0] == ours
        assert len(known["figures"]) == (1 if made.method == "t over 3 seeds" else 2)
        assert _statistics.from_json(known) == made
    assert "figures" not in _statistics.over(np.zeros(9000), "rows").as_json()


def test_pages_are_written_anew(tmp_path):
    """From the JSON files alone the same pages follow as after the run, and each knows the verdicts beside all others."""
    claims = {"a": _report.Claim("It falls", "nobody"), "b": _report.Claim("It rises", "nobody")}
    for name, shift in (("proportions", -1.0), ("graphs", -0.35)):
        found = _report.Findings(name, claims, tmp_path, data="Numbers.")
        figure = _statistics.over_seeds(shift + np.array([0.1, -0.1, 0.05]))
        found.test("a", "it", figure, at_most=0.0)
        found.table("All", [{"which": "one", "figure": figure, "none": None}])
        found.against_paper("it", 1.0, figure)
        head = {
            "name": name, "title": name, "quick": False, "command": "python", "seconds": 1.0, "date": "2026-01-01",
            "threads": 1,
        }  # fmt: skip
        head |= {
            "settings": {"seeds": [0, 1, 2]},
            "hardware": {"cpu": "one"},
            "versions": {"python": "3"},
            "sources": {"csrc": "0123"},
        }
        _report.write(head, found)
    before = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md")}
    for path in tmp_path.glob("*.md"):
        path.unlink()
    _report.pages(tmp_path)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md")} == before
    assert "| It falls | nobody | confirmed | undecided |" in before["graphs.md"]
    assert "| It falls | nobody | confirmed | confirmed |" in before["proportions.md"]
    assert "csrc 0123" in before["graphs.md"]
    known = (tmp_path / "graphs.json").read_text(encoding="utf-8")
    assert "[-0.25, -0.45, -0.3]" in known


def test_what_scripts_say_now_goes_into_saved_results(tmp_path, monkeypatch):
    """Notes, and claims on figures that are there; where the words of a claim differ, its results stay as they are."""
    command = importlib.import_module("experiments.__main__")
    saved = json.loads((ROOT / "experiments" / "results" / "finetune.json").read_text(encoding="utf-8"))
    before = {
        **saved,
        "claims": [{k: v for k, v in one.items() if k != "notes"} for one in saved["claims"] if one["key"] != "point"],
        "tests": [test for test in saved["tests"] if test["claim"] != "point"],
    }
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    path = tmp_path / "finetune.json"
    path.write_text(json.dumps(before), encoding="utf-8")
    assert command.main(["--pages"]) == 0
    assert json.loads(path.read_text(encoding="utf-8")) == saved
    assert "| written after the figures" in path.with_suffix(".md").read_text(encoding="utf-8").replace("; ", "| ")
    before["claims"][0]["claim"] = "Another"
    path.write_text(json.dumps(before), encoding="utf-8")
    assert command.main(["--pages"]) == 0
    assert json.loads(path.read_text(encoding="utf-8")) == before


def test_sources_are_what_an_experiment_imports():
    assert {"_common", "_jobs", "_report", "_statistics", "_together", "graphs"} == set(_common._own("graphs"))
    assert "_images" in _common._own("longtail")
    before = _common.sources("graphs")
    assert before == _common.sources("graphs")
    assert before["the experiment"] != _common.sources("length")["the experiment"]
    assert before["csrc"] == _common.sources("length")["csrc"]


def test_a_claim_that_needs_another():
    claims = {
        "first": _report.Claim("It helps", "nobody"),
        "then": _report.Claim("So does that", "nobody", needs="first"),
    }
    for values, expected in (
        ([1.0, 1.1, 0.9], CONFIRMED),
        ([1.0, -1.1, 0.2], NOT_TESTED),
        ([-1.0, -1.1, -0.9], NOT_TESTED),
    ):
        found = _report.Findings("made_up", claims, None)
        found.test("first", "a test", _statistics.over_seeds(values), at_least=0.0)
        found.test("then", "another", _statistics.over_seeds([1.0, 1.1, 0.9]), at_least=0.0)
        assert found.verdicts()["then"] == expected
    judged = _together.Judged("made_up", "So does that", "nobody", NOT_TESTED, 1.0, 1.0, "")
    assert judged.together == NOT_TESTED
