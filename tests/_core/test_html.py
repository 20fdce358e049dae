"""What a notebook shows of a map: small, quick, without a NaN, and in the colours of its page."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from cases import CASES

import anymax
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Softmax, Sparsemax, SparseSoftmax, Taylor, plot
from anymax.mappings import CATALOGUE
from anymax.plot import notebook

ALPHAS = np.array([1.2, 1.5, 1.9, 1.3]).reshape(4, 1, 1)
MAPS = {
    **{case.id: case.mapping for case in CASES},
    "alpha a head": Entmax(ALPHAS),
    "a thousand alphas": Entmax(np.linspace(1.0, 2.0, 1000)[:, None]),
    "norm": NormMax(np.array(1.5)),
    "scales": PerturbMax("gumbel", scale=np.array([0.5, 2.0])[:, None]),
    "own": Ratio(lambda x: np.exp(-x * x), lambda x: -2.0 * x * np.exp(-x * x)),
    "three scores": Budget(2),
    "many": Budget(20),
    "markup": Ratio(type("<b>&", (), {"__call__": lambda self, x: x * x})()),
}


def parsed(mapping):
    return ET.fromstring(mapping._repr_html_().replace("&ensp;", " "))


def curves(page):
    """The points of each line."""
    return [
        np.array([[float(v) for v in point.split(",")] for point in line.attrib["points"].split()])
        for line in page.iter("polyline")
    ]


@pytest.mark.parametrize("name", MAPS)
def test_the_page_is_small_and_whole(name):
    mapping = MAPS[name]
    text = mapping._repr_html_()
    page = parsed(mapping)
    words = "".join(page.itertext())
    assert len(text.encode()) < 8000
    assert not re.search(r"\b(nan|inf|infinity)\b", text.lower())
    assert type(mapping).__name__ in words
    assert ("exact zeros" in words) is mapping.facts.sparse
    assert ("No Fenchel-Young loss" in words) is not mapping.facts.has_potential
    assert not re.search(r"#[0-9a-fA-F]{3}|rgb|\bblack\b|\bwhite\b", text), (
        "a colour that one of dark and light can't show"
    )
    for points in curves(page):
        assert points[:, 0].min() >= 0
        assert points[:, 0].max() <= 240
        assert points[:, 1].min() >= 0
        assert points[:, 1].max() <= 120


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.name)
def test_a_map_of_the_library_has_a_formula_and_a_curve(kind):
    mapping = Ratio.square() if kind is Ratio else kind(**kind.example)
    assert kind.formula
    assert notebook.typeset(kind.formula) in mapping._repr_html_()
    (points,) = curves(parsed(mapping))
    assert len(np.unique(points[:, 1])) > 2, "the curve says nothing"


def test_the_curve_is_that_of_the_map():
    for mapping, others in (
        (Sparsemax(), (0.0,)),
        (Taylor(2), (0.0,)),
        (Budget(2), (0.0, 0.0)),
        (Ratio.square(), (1.0,)),
    ):
        (points,) = curves(parsed(mapping))
        t = np.linspace(-4.0, 4.0, len(points))
        p = anymax.apply(mapping, np.stack(np.broadcast_arrays(t, *others), axis=-1))[:, 0]
        bottom, top = notebook._BOTTOM, notebook._TOP
        np.testing.assert_allclose((bottom - points[:, 1]) / (bottom - top), p, atol=1e-3)
    assert "scores (t, 0, 0)" in Budget(2)._repr_html_()


def test_exact_zeros_are_thick():
    for mapping, count in ((Sparsemax(), 1), (Ratio.square(), 0), (Softmax(), 0), (SparseSoftmax(k=1), 1)):
        text = mapping._repr_html_()
        assert text.count("exactly 0<") == count
        assert text.count('stroke-width="6"') == (mapping.facts.sparse)


def test_numbers_of_an_array_have_a_curve_each():
    assert len(curves(parsed(Entmax(ALPHAS)))) == 4
    assert len(curves(parsed(MAPS["a thousand alphas"]))) == notebook._LINES
    assert "1.2 to 1.9, of shape (4, 1, 1)" in Entmax(ALPHAS)._repr_html_()


def test_learned_numbers_say_so():
    torch = pytest.importorskip("torch")
    alpha = torch.nn.Parameter(torch.tensor(1.25))
    text = Entmax(alpha)._repr_html_()
    assert "1.25, learned" in text
    assert len(curves(parsed(Entmax(alpha)))) == 1
    assert anymax.nn.Activation(Entmax(1.5), learn="alpha").mapping._repr_html_().count("polyline") == 1


def test_functions_of_another_framework_have_a_curve():
    torch = pytest.importorskip("torch")
    (points,) = curves(parsed(Ratio(torch.sigmoid)))
    expected = plot.curve(Ratio.sigmoid(), notebook._GRID, (0.0,))
    np.testing.assert_allclose(
        (notebook._BOTTOM - points[:, 1]) / (notebook._BOTTOM - notebook._TOP), expected, atol=1e-3
    )


def test_a_tracer_has_no_numbers_and_no_curve():
    jax = pytest.importorskip("jax")
    said = []

    @jax.jit
    def traced(alpha):
        said.append(Entmax(alpha)._repr_html_())
        return alpha

    traced(1.5)
    assert "an array of shape ()" in said[0]
    assert "svg" not in said[0]


def test_functions_that_fail_leave_the_words():
    def u(x):
        raise RuntimeError("not these scores")

    text = Ratio(u)._repr_html_()
    assert "Ratio" in text
    assert "svg" not in text


def test_a_subclass_with_formulas_of_its_own_does_not_print_the_old_one():
    class Louder(Sparsemax):
        def link(self, t, xp):
            return 2.0 * xp.where(t > 0, t, xp.zeros_like(t))

    assert Louder.formula == ""
    assert "simplex" not in Louder()._repr_html_()


@pytest.mark.parametrize(
    ("formula", "shown"),
    [
        ("pᵢ = exp(xᵢ − τ)", "<i>p</i><sub><i>i</i></sub> = exp(<i>x</i><sub><i>i</i></sub> − <i>τ</i>)"),
        ("(x)₊^(1/(α−1)), y", "(<i>x</i>)<sub>+</sub><sup>1/(<i>α</i>−1)</sup>, <i>y</i>"),
        ("‖p‖_α + x²/2", "‖<i>p</i>‖<sub><i>α</i></sub> + <i>x</i><sup>2</sup>/2"),
        ("Σp = k & a < b", "Σ<i>p</i> = <i>k</i> &amp; <i>a</i> &lt; <i>b</i>"),
        ("x^(2", "<i>x</i><sup>2</sup>"),
        ("softmax of k", "softmax of <i>k</i>"),
    ],
)
def test_formulas_are_typeset(formula, shown):
    assert notebook.typeset(formula) == shown


def test_it_is_quick():
    for mapping in (Softmax(), Entmax(1.5), Entmax(ALPHAS), SparseSoftmax(k=2), PerturbMax()):
        mapping._repr_html_()
        best = min(_seconds(mapping) for _ in range(5))
        assert best < 0.010, f"{mapping!r} takes {1e3 * best:.1f} ms"


def _seconds(mapping):
    start = time.perf_counter()
    mapping._repr_html_()
    return time.perf_counter() - start


def test_nothing_is_drawn_with_matplotlib():
    code = "import sys, anymax; anymax.Sparsemax()._repr_html_(); print('matplotlib' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]
