"""Pictures: every function draws without a warning on its own Axes and on given ones."""

import sys

import numpy as np
import pytest
from colours import SEEN, linear
from refusals import each, refuses

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")

import matplotlib.pyplot as plt

import anymax
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Softmax, Sparsemax, SparseSoftmax, Taylor, apply, plot
from anymax.mappings import CATALOGUE
from anymax.plot import style

RNG = np.random.default_rng(0)
P = apply(Sparsemax(), RNG.normal(size=(200, 6)))
Y = RNG.integers(6, size=200)
WIDE = RNG.normal(size=(50, 40))

CALLS = {
    "curves": lambda **o: plot.curves(**o),
    "curves of one": lambda **o: plot.curves(Sparsemax(), **o),
    "bars": lambda **o: plot.bars(**o),
    "bars of one": lambda **o: plot.bars(Budget(2), [3.0, 1.0, 0.5], **o),
    "losses": lambda **o: plot.losses(**o),
    "losses of a budget": lambda **o: plot.losses([Budget(2), Budget(1.5)], **o),
    "losses with nll": lambda **o: plot.losses([Taylor(2), Ratio.square()], scaled=False, **o),
    "simplex": lambda **o: plot.simplex(Sparsemax(), resolution=61, **o),
    "simplex, dense": lambda **o: plot.simplex(Softmax(), resolution=61, **o),
    "simplex, zeros": lambda **o: plot.simplex(Ratio.relu(), resolution=61, **o),
    "jacobian": lambda **o: plot.jacobian(Entmax(1.5), [2.0, 1.0, 0.1], **o),
    "jacobian, large": lambda **o: plot.jacobian(Sparsemax(), RNG.normal(size=30), **o),
    "jacobian, all zero": lambda **o: plot.jacobian(Sparsemax(), [9.0, 0.0], **o),
    "attention": lambda **o: plot.attention(P[:5], queries="abcde", keys=list("uvwxyz"), **o),
    "attention, masked": lambda **o: plot.attention(np.tril(P[:6]), mask=np.tri(6, dtype=bool), **o),
    "support": lambda **o: plot.support_histogram(P, **o),
    "support of two": lambda **o: plot.support_histogram({"a": P, "b": apply(Softmax(), P)}, **o),
    "support of two, wide": lambda **o: plot.support_histogram({"a": WIDE > 0, "b": WIDE > 1}, **o),
    "calibration": lambda **o: plot.calibration(P, Y, name="sparsemax", **o),
}


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.mark.whole(lambda name: name not in ("curves", "bars of one", "support"))
@pytest.mark.parametrize("name", CALLS)
def test_draws_and_returns_axes(name):
    call = CALLS[name]
    ax = call()
    assert isinstance(ax, plt.Axes)
    ax.figure.canvas.draw()
    assert ax.get_xlabel() or ax.get_title()
    _, own = plt.subplots()
    assert call(ax=own) is own
    own.figure.canvas.draw()


def test_draws_in_a_part_of_a_figure():
    left, _ = plt.figure(layout="constrained").subfigures(1, 2)
    ax = left.subplots()
    assert plot.curves([Softmax(), Sparsemax()], ax=ax) is ax
    left.figure.canvas.draw()


@pytest.mark.whole
def test_heads_give_an_array_of_axes():
    axes = plot.attention(np.stack([P[:6]] * 5))
    assert axes.shape == (2, 4)
    axes.flat[0].figure.canvas.draw()


@pytest.mark.whole
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


def test_one_map_alone_has_softmax_in_grey_beside_it():
    for mapping in (Sparsemax(), "entmax15", Budget(2), Ratio.square()):
        own, soft = plot.curves(mapping).lines
        others = plot.rivals(mapping)
        assert soft.get_label() == "softmax"
        assert soft.get_color() == style.BESIDE
        assert soft.get_zorder() < own.get_zorder()
        np.testing.assert_allclose(soft.get_ydata(), plot.curve(Softmax(), soft.get_xdata(), others))
    for alone in (Softmax(), PerturbMax("gumbel"), Entmax(1.0), [Sparsemax(), Taylor(2)]):
        assert [line for line in plot.curves(alone).lines if line.get_color() == style.BESIDE] == []


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


def test_masked_keys_are_no_zeros():
    """They have a colour of their own with its name in the key, and only keys that may be seen are counted."""
    causal = np.tri(4, dtype=bool)
    w = np.where(causal, 0.25, 0.0)
    w[3, 0] = 0.0
    named = lambda ax: [t.get_text() for a in ax.figure.axes if a.get_legend() for t in a.get_legend().get_texts()]  # noqa: E731
    ax = plot.attention(w)
    assert (ax.get_title(), named(ax), len(ax.images)) == ("44% exact zeros", ["exactly 0"], 1)
    for mask in (causal, np.where(causal, 0.0, -np.inf), causal.tolist()):
        ax = plot.attention(w, mask=mask)
        assert (ax.get_title(), named(ax)) == ("10% exact zeros", ["exactly 0", "masked"])
        shades, masked = ax.images
        assert np.array_equal(masked.get_array().mask, causal)
        assert np.array_equal(shades.get_array().mask, w == 0)
        assert matplotlib.colors.to_hex(masked.to_rgba(0.0)) == style.MASKED.lower()
    assert named(plot.attention(np.where(causal, 0.25, 0.0), mask=causal)) == ["masked"]
    assert plot.attention(np.zeros((2, 2)), mask=np.zeros((2, 2), dtype=bool)).get_title() == "0% exact zeros"
    heads = plot.attention(np.stack([w, 2 * w]), mask=causal)
    assert [len(ax.images) for ax in heads.flat] == [2, 2]
    assert {ax.images[0].norm.vmax for ax in heads.flat} == {0.5}, "heads share one scale"


@pytest.mark.whole
def test_the_key_of_attention_covers_nothing():
    for ax in plot.attention(np.stack([np.tril(P[:6])] * 4), mask=np.tri(6, dtype=bool)).flat:
        ax.figure.canvas.draw()
        bar = next(a for a in ax.figure.axes if a.get_legend() and a.get_position().x0 > ax.get_position().x1)
        box = bar.get_legend().get_window_extent()
        shown = [t for t in bar.get_yticklabels() if 0 <= t.get_position()[1] <= bar.get_ylim()[1]]
        assert shown
        assert not any(box.overlaps(other.get_window_extent()) for other in shown)
        assert not any(box.overlaps(other.bbox) for other in ax.figure.axes)


@pytest.mark.whole
def test_a_legend_of_long_names_stays_on_the_sheet():
    ax = plot.curves([PerturbMax(noise) for noise in ("gumbel", "normal", "logistic", "laplace", "uniform")])
    ax.figure.canvas.draw()
    box, sheet = ax.get_legend().get_window_extent(), ax.figure.bbox
    assert sheet.x0 <= box.x0 < box.x1 <= sheet.x1


def test_wide_supports_of_several_are_outlines():
    from matplotlib.patches import StepPatch

    sizes = {"a": np.arange(1, 41), "b": np.array([3, 3, 40])}
    p = {name: np.arange(40) < size[:, None] for name, size in sizes.items()}
    a, b = plot.support_histogram(p).patches
    assert isinstance(a, StepPatch)
    values, edges, _ = b.get_data()
    at = (edges[:-1] + edges[1:]) / 2
    assert {int(n): round(v, 3) for n, v in zip(at, values) if v} == {3: 0.667, 40: 0.333}
    assert a.get_linestyle() != b.get_linestyle()
    assert len(plot.support_histogram({name: q[:, :12] for name, q in p.items()}).patches) == 26, "bars side by side"


@pytest.mark.whole
def test_torch_tensors_are_drawn():
    torch = pytest.importorskip("torch")
    w = torch.softmax(torch.randn(3, 4, requires_grad=True), -1)
    assert plot.attention(w.bfloat16()) is not None
    assert plot.support_histogram(w) is not None


@pytest.mark.whole
@pytest.mark.parametrize("framework", ["torch", "jax.numpy"])
def test_arrays_of_every_framework_are_drawn_alike(framework):
    module = pytest.importorskip(framework)
    array = module.tensor if framework == "torch" else module.asarray
    mapping, plain = Entmax(array(1.5)), Entmax(1.5)
    for draw in (plot.curves, plot.losses):
        axes = [draw(m, t=array(np.linspace(-1, 1, 9, dtype=np.float32))) for m in (mapping, plain)]
        lines = [next(line for line in ax.lines if line.get_label().startswith("entmax")) for ax in axes]
        np.testing.assert_allclose(lines[0].get_ydata(), lines[1].get_ydata(), atol=1e-6)
        assert lines[0].get_label() == r"entmax $\alpha = 1.5$"
    x = np.array([1.0, 0.5, -2.0], dtype=np.float32)
    images = [plot.jacobian(mapping, array(x)), plot.jacobian(plain, x)]
    np.testing.assert_allclose(*(ax.images[0].get_array() for ax in images), atol=1e-6)
    assert plot.simplex(mapping, resolution=11).get_title() == r"entmax $\alpha = 1.5$"
    p = P.astype(np.float32)
    bars = [[bar.get_height() for bar in plot.support_histogram(a).patches] for a in (array(p), p)]
    assert bars[0] == bars[1]
    assert plot.calibration(array(p), array(Y)).get_title() == plot.calibration(p, Y).get_title()
    np.testing.assert_array_equal(plot.attention(array(p[:4])).images[0].get_array().filled(0), p[:4])


def test_long_supports_are_counted_in_steps():
    sizes = np.array([0, 1, 25, 26, 1000])
    p = np.arange(1000) < sizes[:, None]
    ax = plot.support_histogram(p)
    assert "in steps of 25" in ax.get_xlabel()
    shares = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in ax.patches if bar.get_height()}
    assert shares == {-12: 0.2, 13: 0.4, 38: 0.2, 988: 0.2}
    low, high = ax.get_xlim()
    assert all(low <= bar.get_x() and bar.get_x() + bar.get_width() <= high for bar in ax.patches)
    assert "steps" not in plot.support_histogram(p[:, :60]).get_xlabel()


def luminance(colour):
    return float(np.dot(matplotlib.colors.to_rgb(colour), (0.2126, 0.7152, 0.0722)))


@pytest.mark.whole
@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_nothing_fades_into_the_background(style):
    with plt.style.context(style):
        for draw in (lambda: plot.curves(), lambda: plot.losses(), lambda: plot.calibration(P, Y)):
            ax = draw()
            behind = luminance(ax.get_facecolor())
            for line in [*ax.lines, *ax.get_legend().get_lines()]:
                assert abs(luminance(line.get_color()) - behind) > 0.08, line.get_label()
        for ax in (plot.simplex(Sparsemax(), resolution=41), plot.jacobian(Sparsemax(), [0.5, 0.0, -2.0])):
            for text in ax.texts:
                box = text.get_bbox_patch()
                over = 1.0 if box is not None or text.get_text() == "0" else None
                if over is not None:
                    assert luminance(text.get_color()) < 0.2
        assert plot.jacobian(Sparsemax(), [0.5, 0.0, -2.0]).get_facecolor() == (1.0, 1.0, 1.0, 1.0)


def lab(colours, seen):
    """CIE L*a*b* of colours as someone sees them."""
    rgb = linear(np.array([matplotlib.colors.to_rgb(c) for c in colours]))
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = np.clip(rgb @ np.array(seen).T, 0, 1) @ to_xyz.T / (to_xyz @ np.ones(3))
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], -1)


@pytest.mark.parametrize("seen", SEEN.values(), ids=list(SEEN))
def test_colours_are_told_apart_by_everyone(seen):
    def nearest(colours):
        at = lab(colours, seen)
        apart = np.linalg.norm(at[:, None] - at, axis=-1)
        return apart[~np.eye(len(at), dtype=bool)].min()

    assert nearest(style.COLOURS) > 15
    if seen is SEEN["deutan"]:
        assert nearest(matplotlib.colormaps["tab10"].colors) < 10  # the check can fail
    for scale in (style.SEQUENTIAL, style.shades()):
        shades = matplotlib.colormaps[scale] if isinstance(scale, str) else scale
        lightness = lab(shades(np.linspace(0, 1, 33))[:, :3], seen)[:, 0]
        assert np.all(np.diff(lightness) > 0) or np.all(np.diff(lightness) < 0)
    others = lab([style.MASKED, style.ZERO], seen)
    weights = lab(style.shades()(np.linspace(0, 1, 33))[:, :3], seen)
    assert np.linalg.norm(others[0] - weights, axis=-1).min() > 15
    assert np.linalg.norm(others[0] - others[1]) > 12
    ends = lab(matplotlib.colormaps[style.DIVERGING]([0.1, 0.5, 0.9])[:, :3], seen)
    assert np.linalg.norm(ends[0] - ends[2]) > 40
    assert ends[1, 0] > max(ends[0, 0], ends[2, 0]) + 20


def test_lines_differ_in_more_than_colour():
    maps = [Entmax(1.0 + 0.25 * i) for i in range(8)]
    for ax, look in (
        (plot.curves(maps), lambda line: (line.get_color(), str(line.get_linestyle()), line._dash_pattern)),
        (plot.losses(maps, classic=False), lambda line: (line.get_marker(),)),
    ):
        assert len({str(look(line)) for line in ax.lines}) == 8


COLUMN = {"figure.figsize": (3.3, 2.6), "font.size": 7}  # of a paper in two columns


@pytest.mark.whole(lambda name, style: style or name != "losses")
@pytest.mark.parametrize("style", [{}, COLUMN], ids=["screen", "column"])
@pytest.mark.parametrize("name", ["curves", "bars", "losses", "support of two"])
def test_a_legend_covers_nothing_and_the_sizes_are_matplotlibs_own(name, style):
    with plt.rc_context(style):
        ax = CALLS[name]()
        figure = ax.figure
        figure.canvas.draw()
        assert tuple(figure.get_size_inches()) == tuple(plt.rcParams["figure.figsize"])
        legend, sheet = ax.get_legend(), figure.bbox
        box = legend.get_window_extent()
        for other in (
            ax.bbox,
            ax.xaxis.label.get_window_extent(),
            *(t.get_window_extent() for t in ax.get_xticklabels()),
        ):
            assert not box.overlaps(other)
        assert sheet.x0 <= box.x0 < box.x1 <= sheet.x1, "it is on the sheet, whole"
        assert sheet.y0 <= box.y0
        assert legend.get_texts()[0].get_fontsize() < plt.rcParams["font.size"]


@pytest.mark.parametrize(
    ("mappings", "others"),
    [
        (Sparsemax(), (0.0,)),
        (Budget(1.5), (0.0,)),
        (Budget(2), (0.0, 0.0)),
        (Budget(4), (0.0,) * 4),
        (Ratio.square(), (1.0,)),
        ([Softmax(), Budget(2)], (0.0, 0.0)),
    ],
)
def test_a_curve_is_drawn_beside_scores_that_say_something(mappings, others):
    assert plot.rivals(mappings) == others
    for line in plot.curves(mappings).lines:
        assert len(np.unique(np.round(line.get_ydata(), 6))) > 2


def test_the_loss_of_a_budget_is_that_of_its_labels_together():
    y = plot.losses(Budget(2), classic=False, scaled=False, t=np.array([-1.0, 0.0, 2.0])).lines[0].get_ydata()
    rows = np.array([[t, t, 0.0] for t in (-1.0, 0.0, 2.0)])
    np.testing.assert_allclose(
        y, anymax.fenchel_young(Budget(2), rows, np.array([[1.0, 1.0, 0.0]] * 3), reduction="none")
    )


def test_bars_are_the_probabilities_and_zeros_are_named():
    ax = plot.bars([Softmax(), Sparsemax()], [2.0, 1.4, 0.6, -1.0])
    heights = np.reshape([bar.get_height() for bar in ax.patches], (2, 4))
    np.testing.assert_allclose(heights[1], [0.8, 0.2, 0, 0], atol=1e-12)
    assert [t.get_text() for t in ax.texts] == ["0", "0"]


def test_jacobians_of_one_page_share_a_scale():
    from anymax.cli import pictures

    axes = [ax for ax in pictures.draw("jacobian", [Softmax(), Sparsemax()]).axes if ax.images]
    assert len({image.norm.vmax for ax in axes for image in ax.images}) == 1
    assert plot.jacobian(Softmax(), [1.0, 0.0], bound=0.5).images[0].norm.vmax == 0.5


def test_regions_too_small_to_see_have_no_label():
    labels = {text.get_text() for text in plot.simplex(Ratio.square()).texts}
    assert labels == {"class 1", "class 2", "class 3", "3 of 3"}
    assert "2 of 3" in {text.get_text() for text in plot.simplex(Sparsemax()).texts}
    everywhere = {text.get_text() for text in plot.simplex(SparseSoftmax(k=2)).texts}
    assert everywhere == {"class 1", "class 2", "class 3", "2 of 3"}


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


SQUARE = np.ones((3, 3))
WRONG = {
    "a class for a map": (lambda: plot.curves(Sparsemax), TypeError, r"got the class Sparsemax; add \(\): Sparsemax\(\)"),
    "no such map": (lambda: plot.curves("softmin"), ValueError, "there is no map 'softmin'"),
    "curves of nothing": (lambda: plot.curves([]), ValueError, "got no mappings"),
    "bars of nothing": (lambda: plot.bars([]), ValueError, "no mappings"),
    "bars of two rows": (lambda: plot.bars(x=[[1.0, 2.0]]), ValueError, "choose a row"),
    "a Jacobian of two rows": (lambda: plot.jacobian(Softmax(), np.zeros((2, 3))), ValueError, "choose a row"),
    "attention of one axis": (lambda: plot.attention(np.zeros(3)), ValueError, "got shape"),
    "no queries": (lambda: plot.attention(np.zeros((0, 4))), ValueError, "no weights to draw, got shape"),
    "no heads": (lambda: plot.attention(np.zeros((0, 4, 3))), ValueError, "no weights to draw, got shape"),
    "too few Axes": (
        lambda: plot.attention(np.zeros((3, 2, 2)), ax=plt.subplots(1, 2)[1]), ValueError, "heads need as many Axes",
    ),
    "a masked weight": (
        lambda: plot.attention(np.tri(3) / 3, mask=~np.tri(3, dtype=bool)),
        ValueError, "a masked key has a weight; in a boolean mask True means",
    ),
    "a mask of another shape": (
        lambda: plot.attention(np.eye(3), mask=SQUARE[:2, :2] > 0),
        ValueError, r"mask of shape \(2, 2\) does not broadcast to weights of shape \(3, 3\)",
    ),
    "a mask of integers": (lambda: plot.attention(np.eye(3), mask=SQUARE.astype(int)), TypeError, "mask must be boolean"),
    "one target too many": (lambda: plot.calibration(np.zeros((3, 2)), np.zeros(4)), ValueError, "got shapes"),
}  # fmt: skip


@each(WRONG)
def test_wrong_arguments(call, error, words):
    refuses(call, error, words)


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'anymax\[plot\]'"):
        plot.curves()


def test_the_package_holds_public_names_alone():
    places = {"inputs", "maps", "models", "notebook", "style", "two_classes", "words"}  # its files
    places |= {"TYPE_CHECKING", "answering"}  # what the names of other packages are answered with
    assert {name for name in vars(plot) if not name.startswith("_")} - places == set(plot.__all__)
