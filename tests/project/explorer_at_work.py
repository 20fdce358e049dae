"""What the tests of the explorer share: its modules and kernels through Node, its page in Chromium. Their fixtures are in conftest.py."""

import importlib.util
import json
import math
import shutil
import subprocess
from pathlib import Path

import chromium
import numpy as np
import pytest

import anymax

ROOT = Path(__file__).parents[2]
PAGE = Path(anymax.__file__).parent / "explorer"
INDEX = PAGE / "index.html"
SOURCES = ROOT / "src" / "anymax" / "explorer"

browser = pytest.mark.skipif(chromium.path() is None, reason="needs Chromium")


def build_tool():
    path = ROOT / "tools" / "explorer.py"
    if not path.exists():
        pytest.skip("only in the repository")
    spec = importlib.util.spec_from_file_location("build_explorer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asker(folder):
    """Requests to the page's modules in one run of Node, and their answers; what a module throws is a ValueError."""
    if shutil.which("node") is None or not SOURCES.exists():
        pytest.skip("needs Node and the repository")
    wasm = folder / "anymax.wasm"
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
            ["node", Path(__file__).parent / "explorer.mjs", SOURCES, wasm],
            input=json.dumps(plain(list(requests))),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout, object_hook=number)

    return run


def random(n, seed, sigma=1.5):
    return np.random.default_rng(seed).normal(0, sigma, n).round(2).tolist()


SCREENS = {
    "as it opens": {},
    "all settings": {
        "x": random(7, 1), "target": 2, "T": 0.7, "alpha": 1.2, "norm": 3.0, "k": 3, "p": 0.6, "order": 4, "noise": "logistic",
        "scale": 0.5, "sink": -0.75, "margin": 0.4, "tilt": 0.5,
    },
    "alpha 1": {"x": random(6, 2), "alpha": 1, "norm": 1.05, "k": 1, "p": 1, "noise": "gumbel", "target": 5},
    "steep": {"x": random(6, 3), "alpha": 0.5, "T": 0.1, "noise": "uniform", "target": 1},
    "alpha 4": {"x": random(9, 4), "alpha": 4, "norm": 6, "T": 10, "noise": "laplace", "order": 12},
    "names": {"x": [1.5, 0.2, -0.3], "names": ["cat", "", 'a "wild" \\owl ü'], "target": 2, "k": 1},
    "masked": {"x": [1.5, -math.inf, 0.2, -math.inf, 0.3], "target": 2, "k": 2},
    "a masked target": {"x": [1.5, -math.inf, 0.2], "target": 1},
    "all below 0": {"x": [-0.5, -1.0, -2.5], "target": 0},
    "ties": {"x": [1.0, 1.0, 1.0, 0.0], "k": 2, "p": 0.5},
    "two": {"x": [0.3, -0.2], "k": 20},
    "sorted": {"x": random(40, 5), "sorted": True, "target": 39, "tilt": 1.5},
    "thousands": {"x": random(2000, 6, 1.0), "target": 17},
}  # fmt: skip


# -- in Chromium -----------------------------------------------------------------------------------------------------

ADDRESS = INDEX.as_uri()
STATE = "Object.fromEntries(decodeURIComponent(location.hash).slice(1).split('&').map((w) => w.split('=')))"
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
ALL = "softmax,entmax,sparsemax,normmax,topk,topp,budget,perturb,taylor,sigsoftmax,square,sigmoid,sink,relu"
BOXES = (
    "[...document.querySelectorAll({})].filter((e) => e.offsetParent).map((e) => e.getBoundingClientRect())"
    ".map((b) => [b.left, b.top, b.right, b.bottom])"
)
RECORD = """
const kept = CanvasRenderingContext2D.prototype.fillText;
window.written = [];
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const wide = this.measureText(text).width, left = x - { left: 0, center: 0.5, right: 1 }[this.textAlign] * wide;
  const box = this.canvas.getBoundingClientRect();
  const { width, height } = box;
  window.written.push({ text, left, right: left + wide, top: y - 8, bottom: y + 3, width, height, canvas: this.canvas.id });
  return kept.call(this, text, x, y);
};
document.getElementById("theme").click();
"""  # what is written on canvases, and where


def opened_page(page):
    """The page as it opens; at the end nothing has gone wrong in it, and it has asked for nothing."""
    page.events.clear()
    page.size(1280, 900)
    page.call("Emulation.setEmulatedMedia", media="", features=[])
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


def choose(page, menu, value):
    found = f"document.getElementById({json.dumps(menu)})"
    page.js(f"{found}.value = {json.dumps(value)}; {found}.dispatchEvent(new Event('change'))")


def click(page, name):
    page.js(f"document.getElementById({json.dumps(name)}).click()")


def words(page, name):
    return page.js(f"document.getElementById({json.dumps(name)}).textContent")


def shown(page, name, fact):
    """A number on a card."""
    cards = page.js(
        "[...document.querySelectorAll('.card')].map((c) => [c.dataset.map, Object.fromEntries([...c.querySelectorAll('dl div')]"
        ".map((d) => [d.children[0].textContent, d.children[1].textContent]))])"
    )
    return dict(cards)[name][fact]


def boxes(page, selector):
    """Left, top, right and bottom of the elements that can be seen."""
    page.js(DRAWN)
    return page.js(BOXES.format(json.dumps(selector)))
