"""The explorer: its page as it is shipped, its kernels and program held to Python through Node, the command that opens it."""

import base64
import contextlib
import gzip
import io
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from explorer_at_work import INDEX, ROOT, SCREENS, build_tool

import anymax
from anymax import plot

pytestmark = pytest.mark.whole

# -- the page as it is shipped ---------------------------------------------------------------------------------------


def another_kernel(page):
    tool = build_tool()
    wasm = bytearray(tool.wasm_of(page))
    wasm[-1] ^= 1
    return page.replace(tool.packed_of(page), base64.b64encode(gzip.compress(wasm, 9, mtime=0)).decode())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda page: page.replace("</body>", "<script>fetch('//x')</script></body>"), "not what its sources make"),
        (lambda page: page.replace('"use strict";', '"use strict"; '), "not what its sources make"),
        (lambda page: page + "\n", "not what its sources make"),
        (another_kernel, "not those of tools/explorer-kernels.json"),
    ],
    ids=["a script", "a blank", "a line", "a byte of the kernels"],
)
def test_a_page_that_is_changed_by_hand_is_found(change, words, monkeypatch, tmp_path):
    """The page ships in the wheel, and its kernels in the npm package: it is compared with what its sources make, byte for byte."""
    tool, changed = build_tool(), tmp_path / "index.html"
    changed.write_text(change(INDEX.read_text(encoding="utf-8")), encoding="utf-8")
    monkeypatch.setattr(tool, "INDEX", changed)
    assert words in tool.staleness()


def test_a_change_of_the_sources_makes_the_page_old(monkeypatch):
    tool = build_tool()
    flags = tool.flags()
    with monkeypatch.context() as patch:
        patch.setattr(tool, "STYLES", tool.STYLES[:2])
        assert "not what its sources make" in tool.staleness()
    monkeypatch.setattr(tool, "flags", lambda: flags + " -Os")
    assert "sources of the kernels have changed" in tool.staleness()


def test_the_page_names_the_libraries_in_its_kernels():
    notice = build_tool().NOTICE.read_text(encoding="utf-8")
    assert "-->" not in notice
    assert notice in INDEX.read_text(encoding="utf-8")
    for name in ("wasi-libc", "musl", "dlmalloc", "compiler-rt"):
        assert name in notice


def test_the_page_is_one_file_that_asks_for_nothing():
    text = INDEX.read_text(encoding="utf-8")
    assert INDEX.stat().st_size < 1_000_000
    shown = re.sub(r'<script type="application/wasm\+gzip".*?</script>', "", text, flags=re.S)
    assert len(shown) > 20_000
    assert not re.findall(
        r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z0-9-]+\.[a-z]{2,}", re.sub(r"(?m)^\s*//.*$", "", shown)
    )
    assert not re.findall(
        r"<script[^>]+src=|<link[^>]+stylesheet|@import|\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon", shown
    )
    assert f"anymax {anymax.__version__}." in text


def test_the_page_is_packed():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert not [line for line in ignored if line.strip("/") in ("explorer", "*.html", "index.html", "wasm")]
    assert 'wheel.packages = ["src/anymax"]' in (ROOT / "pyproject.toml").read_text()


# -- the kernels against Python, through Node ------------------------------------------------------------------------


def prints(program):
    """What a program on the page prints, and its names."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, scope := {})
    return out.getvalue(), scope


def test_every_map_of_the_library_is_on_the_page(maps):
    made = {key: eval(row["python"], {"anymax": anymax}) for key, row in maps.items()}
    from anymax.mappings import CATALOGUE

    # Ratio, whose functions are the reader's, has its ready-made kinds there; a map without a link of the kernels, with a bound for each
    # class, or whose rows have no fixed sum, can't be on the page
    linked = {kind for kind in CATALOGUE if kind.kernel and not kind.per_class}
    linked -= {anymax.Ranks, anymax.Fusedmax, anymax.Softpick}
    assert {type(mapping) for mapping in made.values()} == linked | {anymax.Ratio, anymax.Sink}
    for key, mapping in made.items():
        assert maps[key]["potential"] == mapping.facts.has_potential, key
        assert maps[key]["threshold"] == mapping.has_threshold, key


def test_the_program_on_the_page_gives_the_numbers_on_the_page(ask, maps):
    """For every map: the page's numbers, from the compiled kernels, are those of the Python that the page hands out."""
    requests = [
        {"ask": "screen", "given": {**given, "maps": list(maps), "focus": focus}}
        for given in SCREENS.values()
        for focus in (maps if len(given.get("x", ())) < 10 else ("entmax", "square"))
    ]
    ran = {}
    for reply in ask(*requests):
        answer = reply["answer"]
        head, _, tail = answer["program"].partition("\njacobian = ")
        if head not in ran:
            ran[head] = run_program(head)
            numbers_agree(answer["results"], ran[head]["results"], ran[head]["x"])
        scope = dict(ran[head])
        exec("jacobian = " + tail.partition("\nfor name")[0], scope)
        m = len(answer["which"])
        assert np.allclose(np.reshape(answer["jacobian"], (m, m)), scope["jacobian"], rtol=1e-9, atol=1e-11)
    assert len(ran) == len(SCREENS)


def run_program(text):
    """Its names, from the plain formulas and not from kernels compiled from the same sources."""
    scope = {}
    with anymax.use("reference"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # log 0 of a target without probability
        exec(text, scope)
    return scope


def numbers_agree(found, wanted, x):
    assert found.keys() == wanted.keys()
    for name, numbers in wanted.items():
        quadrature = name.startswith("perturbed")
        got = {key: value for key, value in found[name].items() if key not in ("refused", "sum")}
        assert got.keys() == numbers.keys(), name
        assert ("loss" in got) != ("refused" in found[name]), name
        assert ("shannon" in got) == (abs(sum(got["p"]) - 1) < 1e-9), name
        for key, value in numbers.items():
            here = np.asarray(got[key], dtype=float)
            if key == "p":
                assert ((here == 0) == (value == 0)).all(), (name, "exact zeros")
            if key == "gradient" and not np.isfinite(numbers["loss"]):
                continue  # minus the logarithm of 0: the page says so instead
            worst = f"{name}: {key} of {len(x)} classes is {here}, in Python {value}"
            assert np.allclose(here, value, rtol=1e-9, atol=1e-9 if quadrature else 1e-12, equal_nan=True), worst


def test_the_whole_program_runs_and_prints(ask):
    said, _ = prints(ask({"ask": "screen", "given": SCREENS["all settings"]})[0]["answer"]["program"])
    assert "sparsemax\n  p: " in said
    assert "gradient" in said


def test_the_program_has_the_names(ask):
    program = ask({"ask": "screen", "given": SCREENS["names"]})[0]["answer"]["program"]
    said, scope = prints(program)
    assert scope["names"] == ["cat", "class 1", 'a "wild" \\owl ü']
    assert 'target = 2  # a "wild" \\owl ü' in program
    p = anymax.sparsemax([1.5, 0.2, -0.3])
    wanted = f'sparsemax\n  cat: {p[0]:.4g}, class 1: {p[1]:.4g}, a "wild" \\owl ü: {p[2]:.4g}\n'
    assert wanted in said


def test_the_draws_of_the_page(ask, maps):
    """Frequencies are the probabilities, within 5 standard deviations; no class of probability 0 is drawn; a seed is its draws."""
    given = {"x": [2.0, 1.0, 0.5, -1.0, -4.0], "maps": list(maps), "draws": 10_000, "seed": 3}
    many = {"x": [i % 7 / 3 for i in range(500)], "maps": ["sparsemax"], "draws": 1, "seed": 0}
    other, none = {**given, "seed": 4}, {**given, "draws": 0}
    first, again, second, one, without = (
        reply["answer"]["results"]
        for reply in ask(*({"ask": "screen", "given": g} for g in (given, given, other, many, none)))
    )
    for name, found in first.items():
        p = np.asarray(found["p"])
        if abs(p.sum() - 1) > 1e-9:
            assert "drawn" not in found
            continue
        counts = np.asarray(found["drawn"])
        assert counts.sum() == 10_000
        assert (counts[p == 0] == 0).all(), name
        assert (np.abs(counts - 10_000 * p) <= 5 * np.sqrt(10_000 * p * (1 - p)) + 1e-6).all(), name
        assert again[name]["drawn"] == found["drawn"]
        assert (second[name]["drawn"] == found["drawn"]) == (p.max() == 1), name
    assert sum(one["sparsemax"]["drawn"]) == 1
    assert not any("drawn" in found for found in without.values())


def test_the_address_has_the_draws(ask):
    given, bad = {"ask": "turn", "given": {"draws": 100, "seed": 7}}, {"ask": "hash", "text": "#draws=7&seed=x"}
    turned, plain, wrong = (reply["answer"] for reply in ask(given, {"ask": "turn", "given": {}}, bad))
    assert (turned["state"]["draws"], turned["state"]["seed"], turned["complaints"]) == (100, 7, [])
    assert (plain["state"]["draws"], plain["state"]["seed"], plain["complaints"]) == (0, 1, [])
    assert len(wrong["complaints"]) == 2
    assert "one of 0, 1, 10, 100, 1000, 10000" in wrong["complaints"][0]


def test_the_program_draws_too(ask):
    given = {"draws": 100, "maps": ["sparsemax", "budget"], "focus": "sparsemax", "k": 2}
    results = prints(ask({"ask": "screen", "given": given})[0]["answer"]["program"])[1]["results"]
    assert [found["drawn"].sum() if "drawn" in found else None for found in results.values()] == [100, None]


def test_pictures_are_those_of_python(ask, maps):
    settings = {"T": 0.8, "tilt": 0.3, "margin": 0.25, "k": 1}
    seen = lambda s: np.asarray(s) / 0.8 - 0.3 * np.log(np.arange(1, s.shape[-1] + 1))  # noqa: E731
    made = {
        key: eval(row["python"].replace("k=2", "k=1").replace("Budget(2)", "Budget(1)"), {"anymax": anymax})
        for key, row in maps.items()
    }
    replies = ask(
        *({"ask": "two", "key": key, "given": settings} for key in maps),
        *({"ask": "simplex", "key": key, "given": settings, "heat": heat} for key in maps for heat in range(3)),
        *({"ask": "classic", "name": name} for name in ("hinge", "logistic", "modified Huber", "hard sigmoid")),
    )
    answers = [reply["answer"] for reply in replies]
    t = np.linspace(-4, 4, 81)
    s = seen(np.stack([t, np.zeros(81)], -1))
    moved = s - [settings["margin"], 0]
    side = np.linspace(-3, 3, 13)
    u, v = np.meshgrid(side, side[::-1])
    plane = seen(np.stack([u, v], -1) @ (np.array([[1, -1, 0], [-1, -1, 2]]) / np.sqrt([[2], [6]])))
    with anymax.use("reference"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of log 0, and of the entropy of rows that leave some to a sink
        for key, mapping in made.items():
            two = answers.pop(0)
            loss = anymax.fenchel_young if mapping.facts.has_potential else anymax.nll
            wanted = loss(mapping, moved, np.zeros(81, dtype=int), reduction="none")
            assert np.allclose(two["p"], anymax.apply(mapping, s)[:, 0], atol=1e-11), key
            assert np.allclose(two["losses"], wanted, rtol=1e-9, atol=1e-9), key
        for key, mapping in made.items():
            p = anymax.apply(mapping, plane)
            for field in (p.max(-1), p[..., 0], anymax.entropy(p)):
                simplex = answers.pop(0)
                assert np.allclose(simplex["values"], field.ravel(), atol=2e-7), key
                assert simplex["part"] == simplex["values"][4 * 13 : 6 * 13]
            # on the border of a region rounding decides
            apart = np.asarray(simplex["support"]) != (p > 0).sum(-1).ravel()
            assert (np.sort(p.reshape(-1, 3)[apart], -1)[:, :2].min(-1, initial=1) < 1e-12).all(), key
    t = np.linspace(-3, 3, 61)
    for name in ("hinge", "logistic", "modified Huber"):
        assert np.allclose(answers.pop(0), plot.two_classes.CLASSIC[name](t), atol=1e-14)
    assert np.allclose(answers.pop(0), anymax.sparsemax(np.stack([t, 0 * t], -1))[:, 0], atol=1e-14)


# -- the command -----------------------------------------------------------------------------------------------------


def explore(*words):
    testing = pytest.importorskip("click.testing")
    pytest.importorskip("rich")
    from anymax.cli.commands import program

    return testing.CliRunner().invoke(program, ["explore", *words])


def test_the_command_opens_the_page(monkeypatch):
    addresses = []
    monkeypatch.setattr("webbrowser.open", lambda url: addresses.append(url) or True)
    done = explore()
    assert done.exit_code == 0, done.output
    assert addresses == [INDEX.as_uri()]


def test_the_command_without_a_browser(monkeypatch):
    done = explore("--print-path")
    assert done.exit_code == 0
    assert Path(done.output.strip()) == INDEX
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    done = explore()
    assert done.exit_code == 1
    assert done.output.strip().endswith(f"there is no browser to open on this machine; open this file in one: {INDEX}")
    monkeypatch.setattr("anymax.cli.commands.EXPLORER", INDEX.with_name("none.html"))
    done = explore("--print-path")
    assert done.exit_code == 1
    assert "install anymax again" in done.output
