"""Pictures: every function draws without a warning on its own Axes and on given ones."""

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")

import matplotlib.pyplot as plt

from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Softmax, Sparsemax, SparseSoftmax, Taylor, apply, plot
from anymax.mappings import CATALOGUE

RNG = np.random.default_rng(0)
P = apply(Sparsemax(), RNG.normal(size=(200, 6)))
Y = RNG.integers(6, size=200)

CALLS = {
    "curves": lambda **o: plot.curves(**o),
    "curves of one": lambda **o: plot.curves(Sparsemax(), **o),
    "losses": lambda **o: plot.losses(**o),
    "losses with nll": lambda **o: plot.losses([Taylor(2), Ratio.square()], scaled=False, **o),
    "simplex": lambda **o: plot.simplex(Sparsemax(), resolution=61, **o),
    "simplex, dense": lambda **o: plot.simplex(Softmax(), resolution=61, **o),
    "simplex, zeros": lambda **o: plot.simplex(Ratio.relu(), resolution=61, **o),
    "jacobian": lambda **o: plot.jacobian(Entmax(1.5), [2.0, 1.0, 0.1], **o),
    "jacobian, large": lambda **o: plot.jacobian(Sparsemax(), RNG.normal(size=30), **o),
    "jacobian, all zero": lambda **o: plot.jacobian(Sparsemax(), [9.0, 0.0], **o),
    "attention": lambda **o: plot.attention(P[:5], queries="abcde", keys=list("uvwxyz"), **o),
    "support": lambda **o: plot.support_histogram(P, **o),
    "support of two": lambda **o: plot.support_histogram({"a": P, "b": apply(Softmax(), P)}, **o),
    "calibration": lambda **o: plot.calibration(P, Y, name="sparsemax", **o),
}


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_draws_and_returns_axes(call):
    ax = call()
    assert isinstance(ax, plt.Axes)
    ax.figure.canvas.draw()
    assert ax.get_xlabel() or ax.get_title()
    _, own = plt.subplots()
    assert call(ax=own) is own
    own.figure.canvas.draw()


def test_heads_give_an_array_of_axes():
    axes = plot.attention(np.stack([P[:6]] * 5))
    assert axes.shape == (2, 4)
    axes.flat[0].figure.canvas.draw()


@pytest.mark.parametrize("cls", CATALOGUE)
def test_every_map_has_a_portrait(cls):
    pytest.importorskip("rich")
    from anymax.cli import names, pictures

    figure = pictures.portrait(names.make(cls.name, {}), pictures.SCORES)
    figure.canvas.draw()
    assert figure.get_suptitle().split()[0] == cls.name


def test_sparsemax_is_the_hard_sigmoid():
    line = plot.curves(Sparsemax()).lines[0]
    t, p = line.get_data()
    np.testing.assert_allclose(p, np.clip((t + 1) / 2, 0, 1), atol=1e-12)


def test_sparsemax_loss_is_the_modified_huber_loss():
    ax = plot.losses([Sparsemax(), Softmax()])
    lines = {line.get_label(): line.get_ydata() for line in ax.lines}
    np.testing.assert_allclose(lines["sparsemax"], lines["modified Huber"], atol=1e-12)
    np.testing.assert_allclose(lines["softmax"], lines["logistic"], atol=1e-12)
    assert {"hinge", "squared"} <= lines.keys()


def test_reliability_by_hand():
    p = np.array([[0.95, 0.05], [0.95, 0.05], [0.35, 0.65], [1.0, 0.0]])
    confidence, accuracy, share, error = plot.reliability(p, np.array([0, 1, 1, 0]), bins=10)
    assert share.tolist() == [0, 0, 0, 0, 0, 0, 0.25, 0, 0, 0.75]
    assert accuracy[6] == 1
    np.testing.assert_allclose([confidence[9], accuracy[9]], [2.9 / 3, 2 / 3])
    np.testing.assert_allclose(error, 0.25 * 0.35 + 0.75 * (2.9 - 2) / 3)


def test_torch_tensors_are_drawn():
    torch = pytest.importorskip("torch")
    w = torch.softmax(torch.randn(3, 4, requires_grad=True), -1)
    assert plot.attention(w.bfloat16()) is not None
    assert plot.support_histogram(w) is not None


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        (Entmax(1.5), "entmax alpha=1.5"),
        (Entmax(np.array([1.25, 2.0])), "entmax alpha=[1.25, 2.0]"),
        (Budget(3), "budget k=3"),
        (NormMax(2.0), "normmax alpha=2"),
        (SparseSoftmax(p=0.9), "sparse_softmax p=0.9"),
        (Taylor(4), "taylor order=4"),
        (Ratio.square(), "ratio square"),
        (PerturbMax("gumbel"), "perturb_max noise=gumbel"),
        (Softmax(), "softmax"),
    ],
)
def test_labels(mapping, words):
    assert plot.label(mapping) == words


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"write Sparsemax\(\)"):
        plot.curves(Sparsemax)
    with pytest.raises(ValueError, match="choose a row"):
        plot.jacobian(Softmax(), np.zeros((2, 3)))
    with pytest.raises(ValueError, match="got shape"):
        plot.attention(np.zeros(3))
    with pytest.raises(ValueError, match="heads need as many Axes"):
        plot.attention(np.zeros((3, 2, 2)), ax=plt.subplots(1, 2)[1])
    with pytest.raises(ValueError, match="got shapes"):
        plot.calibration(np.zeros((3, 2)), np.zeros(4))


def test_without_matplotlib(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'anymax\[plot\]'"):
        plot.curves()
