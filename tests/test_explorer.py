"""The explorer: its kernels held to Python through Node, its page at work in Chromium, the command that opens it."""

import contextlib
import importlib.util
import io
import json
import math
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import chromium
import numpy as np
import pytest

import anymax
from anymax import plot

ROOT = Path(__file__).parents[1]
PAGE = Path(anymax.__file__).parent / "explorer"
INDEX = PAGE / "index.html"
SOURCES = ROOT / "src" / "anymax" / "explorer"

node = pytest.mark.skipif(shutil.which("node") is None or not SOURCES.exists(), reason="needs Node and the repository")
browser = pytest.mark.skipif(chromium.path() is None, reason="needs Chromium")


def build_tool():
    path = ROOT / "tools" / "explorer.py"
    if not path.exists():
        pytest.skip("only in the repository")
    spec = importlib.util.spec_from_file_location("build_explorer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the page as it is shipped ---------------------------------------------------------------------------------------


def test_the_page_is_that_of_its_sources(monkeypatch):
    tool = build_tool()
    assert tool.staleness() == ""
    words = tool.flags()
    monkeypatch.setattr(tool, "flags", lambda: words + " -Os")
    assert "sources of the kernels have changed" in tool.staleness()
    monkeypatch.setattr(tool, "STYLES", ())
    assert "kernels and the page have changed" in tool.staleness()


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
    for name in ("pyproject.toml", ".gitignore"):
        if not (ROOT / name).exists():
            pytest.skip("only in the repository")
    ignored = (ROOT / ".gitignore").read_text().split()
    assert not [line for line in ignored if line.strip("/") in ("explorer", "*.html", "index.html", "wasm")]
    assert 'wheel.packages = ["src/anymax"]' in (ROOT / "pyproject.toml").read_text()


# -- the kernels against Python, through Node ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Requests to the page's modules in one run of Node, and their answers; what a module throws is a ValueError."""
    wasm = tmp_path_factory.mktemp("explorer") / "anymax.wasm"
    wasm.write_bytes(build_tool().wasm_of(INDEX.read_text(encoding="utf-8")))

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        if isinstance(value, list):
            return [plain(v) for v in value]
        if isinstance(value, float) and not math.isfinite(value):
            return {"number": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
        return value

    def number(pairs):
        return float(pairs["number"].replace("Infinity", "inf")) if pairs.keys() == {"number"} else pairs

    def run(*requests):
        done = subprocess.run(
            ["node", ROOT / "tests" / "explorer.mjs", SOURCES, wasm],
            input=json.dumps(plain(list(requests))),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout, object_hook=number)

    return run


@pytest.fixture(scope="module")
def maps(ask):
    return ask({"ask": "maps"})[0]["answer"]


@node
def test_every_map_of_the_library_is_on_the_page(maps):
    made = {key: eval(row["python"], {"anymax": anymax}) for key, row in maps.items()}
    from anymax.mappings import CATALOGUE

    # Ratio, whose functions are the reader's, has its ready-made kinds there; a map without a kernel can't be on the page
    assert {type(mapping) for mapping in made.values()} == {kind for kind in CATALOGUE if kind.kernel} | {anymax.Ratio}
    for key, mapping in made.items():
        assert maps[key]["potential"] == mapping.facts.has_potential, key
        assert maps[key]["threshold"] == hasattr(mapping, "threshold"), key


def random(n, seed, sigma=1.5):
    return np.random.default_rng(seed).normal(0, sigma, n).round(2).tolist()


SCREENS = {
    "as it opens": {},
    "all settings": {
        "x": random(7, 1), "target": 2, "T": 0.7, "alpha": 1.2, "norm": 3.0, "k": 3, "p": 0.6, "order": 4, "noise": "logistic",
        "scale": 0.5, "margin": 0.4, "tilt": 0.5,
    },
    "alpha 1": {"x": random(6, 2), "alpha": 1, "norm": 1.05, "k": 1, "p": 1, "noise": "gumbel", "target": 5},
    "steep": {"x": random(6, 3), "alpha": 0.5, "T": 0.1, "noise": "uniform", "target": 1},
    "alpha 4": {"x": random(9, 4), "alpha": 4, "norm": 6, "T": 10, "noise": "laplace", "order": 12},
    "masked": {"x": [1.5, -math.inf, 0.2, -math.inf, 0.3], "target": 2, "k": 2},
    "a masked target": {"x": [1.5, -math.inf, 0.2], "target": 1},
    "all below 0": {"x": [-0.5, -1.0, -2.5], "target": 0},
    "ties": {"x": [1.0, 1.0, 1.0, 0.0], "k": 2, "p": 0.5},
    "two": {"x": [0.3, -0.2], "k": 20},
    "sorted": {"x": random(40, 5), "sorted": True, "target": 39, "tilt": 1.5},
    "thousands": {"x": random(2000, 6, 1.0), "target": 17},
}  # fmt: skip


@node
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
        got = {key: value for key, value in found[name].items() if key != "refused"}
        assert got.keys() == numbers.keys(), name
        assert ("loss" in got) != ("refused" in found[name]), name
        for key, value in numbers.items():
            here = np.asarray(got[key], dtype=float)
            if key == "p":
                assert ((here == 0) == (value == 0)).all(), (name, "exact zeros")
            if key == "gradient" and not np.isfinite(numbers["loss"]):
                continue  # minus the logarithm of 0: the page says so instead
            worst = f"{name}: {key} of {len(x)} classes is {here}, in Python {value}"
            assert np.allclose(here, value, rtol=1e-9, atol=1e-9 if quadrature else 1e-12, equal_nan=True), worst


@node
def test_the_whole_program_runs_and_prints(ask):
    program = ask({"ask": "screen", "given": SCREENS["all settings"]})[0]["answer"]["program"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {})
    assert "sparsemax\n  p: " in out.getvalue()
    assert "gradient" in out.getvalue()


@node
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
        warnings.simplefilter("ignore", RuntimeWarning)
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
        assert np.allclose(answers.pop(0), plot.CLASSIC[name](t), atol=1e-14)
    assert np.allclose(answers.pop(0), anymax.sparsemax(np.stack([t, 0 * t], -1))[:, 0], atol=1e-14)


GOOD = {
    "2 1 0.1 -1": [2, 1, 0.1, -1],
    "[2.0, 1.0, 0.1, -inf]": [2, 1, 0.1, -math.inf],
    "tensor([[ 1.5000, -2.0000e-01,  3.]], device='cuda:0', grad_fn=<AddBackward0>)": [1.5, -0.2, 3],
    "array([1., 2.],\n      dtype=float32)": [1, 2],
    "1;2\n3\t\u22124": [1, 2, 3, -4],
    "[[1 2\n  3]]": [1, 2, 3],
}
BAD = {
    "": "no numbers",
    "1 2 x3": 'Entry 3, "x3", is not a number',
    "1 nan 2": "Entry 2, nan, is not a score",
    "1 inf": "Entry 2, inf, is not a score",
    "1 1e999": "is not a score",
    "[1, 2, ..., 9]": "shortened when it was printed",
    "[[1, 2], [3, 4]]": "2 rows",
    "7": "one score",
    "-inf -inf": "Every score is -inf",
    " ".join(["1"] * 20001): "20001 scores",
}


@node
def test_scores_are_read_as_people_paste_them(ask):
    replies = ask(*({"ask": "parse", "text": text} for text in (*GOOD, *BAD)))
    for wanted, reply in zip(GOOD.values(), replies):
        assert reply.get("answer") == wanted, reply
    for words, reply in zip(BAD.values(), replies[len(GOOD) :]):
        assert words in reply.get("error", ""), reply


@node
def test_the_address_holds_the_whole_state(ask):
    given = {
        **SCREENS["all settings"],
        "x": [0.1, -math.inf, 1e-7, 12345.678, 3, 4],
        "maps": ["relu", "topp"],
        "focus": "topp",
        "heat": "entropy",
        "probe": [-1.25, 3],
        "sorted": True,
    }
    back, partly = ask(
        {"ask": "turn", "given": given},
        {"ask": "hash", "text": "#x=1,oops&maps=softmax,nomax&T=99&k=2.5&y=9&order=3&noise=pink&at=7&new=1&alpha=2"},
    )
    assert back["answer"]["complaints"] == []
    assert back["answer"]["state"] == given
    state, complaints = partly["answer"]["state"], " ".join(partly["answer"]["complaints"])
    assert state["x"] == [2, 1.2, 0.4, -0.3, -1.5]
    assert (state["alpha"], state["T"], state["k"]) == (2, 1, 2)
    for words in (
        "x=1,oops: Entry 2", "no map nomax", "Temperature goes from 0.1 to 10", "k goes from 1 to 20 in steps of 1", "y=9",
        "Taylor order", "noise=pink", "at=7", "new, which this page doesn't know",
    ):  # fmt: skip
        assert words in complaints


# -- the page at work, in Chromium -----------------------------------------------------------------------------------

ADDRESS = INDEX.as_uri()
STATE = "Object.fromEntries(decodeURIComponent(location.hash).slice(1).split('&').map((w) => w.split('=')))"
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def page():
    one = chromium.Chromium()
    yield one
    one.close()


@pytest.fixture
def opened(page):
    page.events.clear()
    page.size(1280, 900)
    page.open(ADDRESS)
    yield page
    page.js(DRAWN)
    wrong = [e["params"] for e in page.events if e.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]
    assert not wrong
    asked = [e["params"]["request"]["url"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
    assert not [url for url in asked if not url.startswith((ADDRESS, "data:", "blob:", "about:"))], (
        "the page asked the network for something"
    )


def state(page):
    page.js(DRAWN)
    page.js("new Promise((done) => setTimeout(done, 200))")  # the address follows a little later
    return page.js(STATE)


def middle(page, selector):
    """The middle of an element, and its box: left, top, width, height."""
    page.js(DRAWN)
    rectangle = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
    box = page.js(f"(({{x, y, width, height}}) => [x, y, width, height])({rectangle})")
    return box[0] + box[2] / 2, box[1] + box[3] / 2, box


def shown(page, name, fact):
    """A number on a card."""
    cards = page.js(
        "[...document.querySelectorAll('.card')].map((c) => [c.dataset.map, Object.fromEntries([...c.querySelectorAll('dl div')]"
        ".map((d) => [d.children[0].textContent, d.children[1].textContent]))])"
    )
    return dict(cards)[name][fact]


@browser
def test_dragging_a_bar_with_mouse_finger_and_keys(opened):
    page = opened
    assert shown(page, "sparsemax", "above 0") == "2 of 5"
    x, y, (_, top, _, height) = middle(page, '.stick[data-at="3"]')
    page.mouse((x, y), (x, top + height * 0.3), (x, top + height * 0.25))
    x3 = float(state(page)["x"].split(",")[3])
    assert x3 == pytest.approx(2.0, abs=0.05)
    scores = [2, 1.2, 0.4, x3, -1.5]
    assert shown(page, "sparsemax", "τ") == f"{anymax.threshold(anymax.Sparsemax(), scores).tau:.2f}"
    heard = page.js("document.querySelector('.card[data-map=sparsemax] canvas').ariaLabel")
    assert heard.count("exactly 0") == (anymax.sparsemax(scores) == 0).sum() == 3
    page.finger((x, top + height * 0.25), (x, top + height * 0.6), (x, top + height * 0.75))
    assert float(state(page)["x"].split(",")[3]) == pytest.approx(-2.0, abs=0.1)
    before = float(state(page)["x"].split(",")[1])
    page.js("document.querySelector('.stick[data-at=\"1\"]').focus()")
    page.key("ArrowUp", 3)
    assert float(state(page)["x"].split(",")[1]) == pytest.approx(before + 0.3)
    page.key("Delete")
    assert state(page)["x"].split(",")[1] == "-inf"
    assert page.js("document.activeElement.getAttribute('aria-valuetext')").startswith("masked")
    page.key("ArrowRight")
    assert page.js("document.activeElement.dataset.at") == "2"


@browser
def test_sliding_a_setting(opened):
    page = opened
    assert shown(page, "entmax", "above 0") == "3 of 5"
    page.js("document.getElementById('set-alpha').focus()")
    page.key("ArrowRight", 10)
    assert state(page)["alpha"] == "2"
    p = anymax.sparsemax(np.array([2, 1.2, 0.4, -0.3, -1.5]))
    assert shown(page, "entmax", "above 0") == f"{(p > 0).sum()} of 5"
    assert page.js("document.querySelector('.card[data-map=entmax] canvas').getAttribute('aria-label')").endswith(
        "class 4: exactly 0"
    )
    x, y, (left, _, width, _) = middle(page, "#set-T")
    page.mouse((x, y), (left + width * 0.9, y))
    assert float(state(page)["T"]) > 5
    p = anymax.sparsemax(np.array([2, 1.2, 0.4, -0.3, -1.5]) / float(state(page)["T"]))
    assert shown(page, "sparsemax", "above 0") == f"{(p > 0).sum()} of 5" != "2 of 5"
    page.js("document.getElementById('reset').click()")
    assert (state(page)["T"], state(page)["alpha"]) == ("1", "1.5")


@browser
def test_bad_input_is_answered_in_words_and_loses_nothing(opened):
    page, before = opened, state(opened)
    page.js("document.getElementById('paste-open').click()")
    page.type("1 2 many")
    page.js("document.querySelector('#paste button[type=submit]').click()")
    words = page.js("document.getElementById('paste-error').textContent")
    assert (
        words
        == 'Entry 3, "many", is not a number; give numbers between spaces or commas, such as 2 1 0.1 -1. Your scores are as they were.'
    )
    assert page.js("document.getElementById('paste-text').value") == "1 2 many"
    assert page.js("document.activeElement.id") == "paste-text"
    assert state(page) == before
    page.js("document.getElementById('paste-text').select()")
    page.type("tensor([3., 1., 2.])")
    page.js("document.querySelector('#paste button[type=submit]').click()")
    assert page.js("document.getElementById('paste-error').textContent") == ""
    assert state(page)["x"] == "3,1,2"
    page.js("document.getElementById('type-T').focus(); document.getElementById('type-T').select()")
    page.type("77")
    page.key("Tab")
    assert page.js("document.getElementById('notice').innerText").startswith(
        "Temperature goes from 0.1 to 10. It stays at 1."
    )
    assert page.js("document.getElementById('type-T').value") == "77"
    assert state(page)["T"] == "1"


@browser
def test_a_link_brings_everything_back(opened):
    page = opened
    page.js("document.querySelector('#chips label[data-map=perturb] input').click()")
    page.js("document.querySelector('.aim[data-aim=\"2\"]').click()")
    page.js(
        "document.getElementById('set-noise').value = 'laplace'; document.getElementById('set-noise').dispatchEvent(new Event('change'))"
    )
    page.js("document.getElementById('sorted').click()")
    before = state(page)
    assert (before["focus"], before["y"], before["noise"], before["sorted"]) == ("perturb", "2", "laplace", "true")
    cards, address = page.js("document.getElementById('cards').innerText"), page.js("location.href")
    page.open(address)
    assert state(page) == before
    assert page.js("document.getElementById('cards').innerText") == cards
    assert page.js("document.getElementById('notice').hidden")
    page.open(ADDRESS + "#x=3,2,1&T=99")
    assert "T=99: Temperature goes from 0.1 to 10." in page.js("document.getElementById('notice').innerText")
    assert state(page)["x"] == "3,2,1"


@browser
def test_the_plane_of_three_classes(opened):
    page = opened
    page.open(ADDRESS + "#x=1,0,-1&maps=sparsemax&focus=sparsemax")
    page.js("document.getElementById('simplex').scrollIntoView({block: 'center'})")
    x, y, (left, top, width, _) = middle(page, "#simplex")
    page.mouse((x, y), (left + width / 2, top + width * 0.1))
    scores = [float(v) for v in state(page)["x"].split(",")]
    assert scores == pytest.approx([-0.98, -0.98, 1.96], abs=0.05)
    assert page.js("document.getElementById('simplex').getAttribute('aria-valuetext')").endswith("class 2: 1.00")
    page.key("ArrowDown", 5)
    assert float(state(page)["x"].split(",")[2]) < scores[2] - 0.3


@browser
def test_the_program_is_copied(opened):
    page = opened
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.js("document.getElementById('copy-python').click()")
    page.wait("document.getElementById('copy-python').textContent === 'Copied'")
    program = page.js("navigator.clipboard.readText()")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(program, scope := {})
    assert shown(page, "sparsemax", "τ") == f"{scope['results']['sparsemax']['tau']:.2f}"
    assert page.js("document.getElementById('python').textContent") == program


@browser
def test_it_answers_within_50_ms_on_2000_classes(opened):
    """The median over a drag; other work on the machine can only add to it, so that the best of some drags counts."""
    page = opened
    page.js("[...document.querySelectorAll('#presets button')].at(-1).click()")
    page.wait("document.querySelector('.surface') !== null")
    left, top, width, height = middle(page, ".surface")[2]
    medians = []
    for _ in range(5):
        page.js("performance.clearMeasures()")
        page.mouse(*((left + width * (0.2 + 0.02 * i), top + height * (0.3 + 0.02 * (i % 5))) for i in range(20)))
        page.js(DRAWN)
        times = page.js("performance.getEntriesByName('anymax-update').map((entry) => entry.duration)")
        assert len(times) >= 5
        medians.append(float(np.median(times)))
        if medians[-1] < 50:
            break
    assert min(medians) < 50
    assert len(state(page)["x"].split(",")) == 2000
    assert shown(page, "softmax", "above 0") == "2000 of 2000"


@browser
def test_everything_to_operate_has_a_name_and_a_place_in_the_order(opened):
    page = opened
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    seen = {}
    for one in tree:
        role = one.get("role", {}).get("value")
        if not one.get("ignored") and role in (
            "slider",
            "button",
            "checkbox",
            "radio",
            "combobox",
            "spinbutton",
            "textbox",
            "image",
            "img",
            "table",
        ):
            seen.setdefault(role, []).append(one.get("name", {}).get("value", "").strip())
    assert all(all(names) for names in seen.values()), seen
    assert len(seen["slider"]) >= 5 + 4 + 1
    assert len(seen["checkbox"]) >= 13
    assert page.js("document.querySelectorAll('[role=alert]').length") == 2
    assert page.js("document.getElementById('live').getAttribute('aria-live')") == "polite"
    page.wait("document.getElementById('live').textContent", lambda text: text.startswith("softmax: 5 of 5 above 0"))
    page.js("document.activeElement.blur()")
    stops = set()
    for _ in range(24):
        page.key("Tab")
        stops.add(
            page.js(
                "document.activeElement.id || document.activeElement.dataset.at || document.activeElement.textContent.trim()"
            )
        )
    assert {"share", "copy-python", "theme", "0", "4", "Five classes", "one-class", "paste-open"} <= stops


def contrast(one, other):
    def light(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(
            w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
            for w, c in zip((0.2126, 0.7152, 0.0722), channels)
        )

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@browser
def test_light_and_dark_are_legible_and_nothing_runs_out_of_a_phone(opened, tmp_path):
    page, painted = opened, set()
    for theme in ("light", "dark"):
        if page.js("document.documentElement.dataset.theme") != theme:
            page.js("document.getElementById('theme').click()")
        names = ("paper", "panel", "well", "ink", "soft", "hot", "bad")
        found = {
            name: page.js(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
            for name in names
        }
        found = {name: "#" + "".join(2 * c for c in v[1:]) if len(v) == 4 else v for name, v in found.items()}
        for paper in ("paper", "panel", "well"):
            for words in ("ink", "soft", "hot", "bad"):
                assert contrast(found[words], found[paper]) >= 4.5, (theme, words, paper)
        page.js(DRAWN)
        page.picture(tmp_path / f"{theme}.png")
        painted.add((tmp_path / f"{theme}.png").read_bytes())
    assert len(painted) == 2
    page.size(390, 844, phone=True)
    page.js(DRAWN)
    assert page.js("document.documentElement.scrollWidth") <= 390


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
    assert addresses == [ADDRESS]


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
