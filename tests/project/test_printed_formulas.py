"""The threshold that `anymax.threshold` gives, put into the formulas that the maps, their pages and the explorer print, gives p."""

import re
from pathlib import Path

import numpy as np
import pytest

import anymax
from anymax import Budget, Entmax, Softmax, Sparsemax

pytestmark = pytest.mark.whole
ROOT = Path(__file__).parents[2]
X = np.array([1.3, 0.9, 0.4, -0.2, -2.0])
MAPS = [Softmax(), Sparsemax(), Entmax(1.5), Entmax(1.2), Entmax(3.0), Entmax(0.8), Budget(2)]


def lines_of(text, start):
    return [line for line in text.splitlines() if line.startswith(start)]


def of_class(name):
    return getattr(anymax, name).formula.split("= ", 1)[1]


def of_page(name):
    text = (ROOT / "docs" / "maps" / f"{name.lower()}.md").read_text(encoding="utf-8")
    (line,) = lines_of(text.split("## Definition")[1].split("## Loss")[0], "$$")
    return re.split(r"p_i = ", line)[1].strip("$")


def of_explorer(name):
    text = (ROOT / "src" / "anymax" / "explorer" / "maps.mjs").read_text(encoding="utf-8")
    return re.search(rf'title: "{name.lower()}", formula: "p = ([^"]*)"', text)[1]


WORDS = (  # the mathematics of the three in Python, in this order
    (r"\\frac\{e\^\{x_i\}\}\{\\sum_j e\^\{x_j\}\} = |, \\qquad.*|, the point.*|,  ?Σp = k.*", ""),
    (r"\\bigl|\\bigr|\\operatorname\{clip\}", lambda m: "clip" if "clip" in m[0] else ""),
    (r"e\^\{x_i - \\tau\}", "exp(x - tau)"),
    (r"[sx](ᵢ|_i)?(?= [−-])", "x"),
    (r"\\tau|τ", "tau"),
    (r"\\alpha|α", "alpha"),
    ("−", "-"),
    (r"(\((?:[^()]|\([^()]*\))*\)|\[[^\]]*\])(₊|_\+)", lambda m: f"relu({m[1].strip('[]')})"),
    (r"\^\{([^}]*)\}", r"**(\1)"),
    (r"\^\(", "**("),
    (r"\)\(", ")*("),
)


def value(formula, tau, mapping):
    """What a printed formula gives."""
    for pattern, word in WORDS:
        formula = re.sub(pattern, word, formula)
    scope = {
        "x": X, "tau": tau, "alpha": getattr(mapping, "alpha", None), "exp": np.exp, "clip": np.clip, "min": np.minimum,
    }  # fmt: skip
    return eval(formula.strip(), {"__builtins__": {}, "relu": lambda t: np.maximum(t, 0.0), **scope})


@pytest.mark.parametrize("source", [of_class, of_page, of_explorer], ids=["class", "page", "explorer"])
@pytest.mark.parametrize("mapping", MAPS, ids=repr)
def test_the_threshold_fits_the_formula(source, mapping):
    formula = source(type(mapping).__name__)
    found = anymax.threshold(mapping, X)
    with np.errstate(divide="ignore"):  # of alpha below 1 nothing is cut off
        p = value(formula, found.tau, mapping)
    np.testing.assert_allclose(p, anymax.apply(mapping, X), atol=1e-12)
    assert found.support == (p > 0).sum()


def test_near_1_the_threshold_falls_as_the_page_says():
    for alpha in (1.1, 1.01, 1.001):
        tau = anymax.threshold(Entmax(alpha), X).tau
        assert abs(tau + 1.0 / (alpha - 1.0) - anymax.logsumexp(X)) < 2.0 * (alpha - 1.0)
    assert anymax.threshold(Entmax(1.0), X).tau == pytest.approx(anymax.logsumexp(X))
