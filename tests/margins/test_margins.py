"""Margins: psi by its definition in fp64, monotone past pi, and with the gradient that finite differences give."""

from __future__ import annotations

import math
import pickle

import mpmath
import numpy as np
import pytest
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery, readonly
from refusals import each, refuses

import anymax
from anymax.margins import AM, ArcFace, Combined, CosFace, SphereFace, as_margin

MARGINS = {
    "am": (AM(), (1, 0, 0.35)),
    "am-": (AM(-0.1), (1, 0, -0.1)),
    "arcface": (ArcFace(), (1, 0.5, 0)),
    "arcface2.5": (ArcFace(2.5), (1, 2.5, 0)),
    "arcface-": (ArcFace(-0.3), (1, -0.3, 0)),
    "sphereface": (SphereFace(), (4, 0, 0)),
    "sphereface1": (SphereFace(1), (1, 0, 0)),
    "sphereface3": (SphereFace(3), (3, 0, 0)),
    "sphereface1.35": (SphereFace(1.35), (1.35, 0, 0)),
    "combined": (Combined(1.2, 0.4, 0.1), (1.2, 0.4, 0.1)),
    "combined4": (Combined(2, 4.0, 0.2), (2, 4.0, 0.2)),
}
every_margin = pytest.mark.parametrize("name", MARGINS)


def psi(c, parts):
    """By the definition, with 40 digits."""
    with mpmath.workdps(40):
        m1, m2, m3 = (mpmath.mpf(float(m)) for m in parts)
        phi = m1 * mpmath.acos(c) + m2
        k = mpmath.floor(phi / mpmath.pi)
        return (-1) ** int(k) * mpmath.cos(phi) - 2 * k - m3


def slope(c, parts):
    """By central differences, with 40 digits."""
    with mpmath.workdps(40):
        c, h = mpmath.mpf(float(c)), mpmath.mpf(10) ** -15
        return float((psi(c + h, parts) - psi(c - h, parts)) / (2 * h))


def cosines(dtype, n=5, rows=41):
    c = np.random.default_rng(0).uniform(-1, 1, (rows, n))
    t = np.random.default_rng(1).integers(0, n, rows)
    c[np.arange(rows), t] = np.linspace(-1, 1, rows)
    return readonly(c.astype(dtype)), readonly(t)


@every_kind
@every_margin
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_psi_at_the_target_and_nothing_elsewhere(kind, name, dtype):
    if kind == "jax" and dtype == "float64":
        return  # JAX has no fp64 by default
    margin, parts = MARGINS[name]
    c, t = cosines(dtype)
    got = back(margin(KINDS[kind](c), KINDS[kind](t)))
    assert got.dtype == c.dtype
    want = c.astype(np.float64)
    for i, j in enumerate(t):
        want[i, j] = float(psi(mpmath.mpf(float(c[i, j])), parts))
    np.testing.assert_allclose(got, want, atol=3e-6 if dtype == "float32" else 1e-14)
    away = np.arange(5) != t[:, None]
    assert np.array_equal(got[away], c[away])


@every_margin
def test_psi_falls_with_the_angle_without_a_jump(name):
    margin, parts = MARGINS[name]
    c = np.cos(np.linspace(0, math.pi, 20_001))[:, None]
    y = margin(c, np.zeros(len(c), int))[:, 0]
    steps = np.diff(y)
    assert (steps < 1e-12).all()
    assert (-steps).max() < 2 * parts[0] * math.pi / 20_000


@every_margin
def test_torch_gradient_is_the_true_one(name):
    torch = pytest.importorskip("torch")
    margin, parts = MARGINS[name]
    c = np.linspace(-0.999, 0.998, 37)
    x = torch.tensor(c[:, None], requires_grad=True)
    t = torch.zeros(len(c), dtype=torch.long)
    grad = torch.autograd.grad(margin(x, t).sum(), x)[0][:, 0]
    np.testing.assert_allclose(grad.numpy(), [slope(v, parts) for v in c], rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(lambda v: margin(v, t), x, eps=1e-7, atol=1e-5)
    inner = torch.tensor(np.linspace(-0.93, 0.89, 9)[:, None], requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v: margin(v, t[:9]), inner, atol=1e-4)


@pytest.mark.whole(lambda name: name not in ("arcface2.5", "combined4"))
@every_margin
def test_jax_gradient_is_the_true_one(name):
    jax = pytest.importorskip("jax")
    margin, parts = MARGINS[name]
    c = np.linspace(-0.99, 0.98, 23).astype(np.float32)
    t = np.zeros(len(c), np.int32)
    value = lambda v: margin(v, t).sum()  # noqa: E731
    grad = np.asarray(jax.jit(jax.grad(value))(jax.numpy.asarray(c[:, None])))[:, 0]
    np.testing.assert_allclose(grad, [slope(v, parts) for v in c], rtol=2e-4, atol=2e-4)


@every_margin
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_at_and_near_the_ends_are_finite_and_not_negative(name, dtype):
    torch = pytest.importorskip("torch")
    margin, parts = MARGINS[name]
    eps = float(np.finfo(dtype).eps)
    ends = [1.0, 1 - eps / 2, 1 - eps, 1 + eps, 1.001, -1.0, -1 + eps / 2, -1 - eps, 1 - 1e-4, -1 + 1e-4]
    x = torch.tensor(ends, dtype=getattr(torch, dtype))[:, None].requires_grad_()
    y = margin(x, torch.zeros(len(ends), dtype=torch.int32))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.isfinite(y).all()
    assert torch.isfinite(grad).all()
    assert torch.isfinite(torch.autograd.grad(grad.sum(), x)[0]).all() if grad.requires_grad else True
    m1, m2, _ = parts
    assert (grad >= 0).all()
    # at the ends m1^2 |cos(phi)|; where m2 = 0 this is the limit, d cos(m theta) / d cos(theta) = m^2
    assert grad[0, 0].item() == pytest.approx(m1**2 * abs(math.cos(m2)))
    assert grad[5, 0].item() == pytest.approx(m1**2 * abs(math.cos(m1 * math.pi + m2)))
    # out of range by rounding: the value of the end of the range
    assert y[3, 0] == y[0, 0] == y[4, 0]
    assert y[7, 0] == y[5, 0]


def test_training_at_perfect_alignment():
    """Where arccos is used as it stands the gradient is infinite or NaN."""
    torch = pytest.importorskip("torch")
    from anymax.transforms import cosine

    w = torch.eye(3)
    for margin in (ArcFace(), SphereFace(), Combined(1.1, 0.3, 0.1)):
        e = torch.tensor([[2.0, 0.0, 0.0], [0.0, -3.0, 0.0]], requires_grad=True)
        y = margin(cosine(w)(e), torch.tensor([0, 1]))
        assert torch.isfinite(torch.autograd.grad(y.sum(), e)[0]).all()


@every_kind
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint16"])
def test_targets_of_any_integer_dtype(kind, dtype):
    if kind == "jax" and dtype == "int64":
        return  # JAX has no int64 by default
    c, t = cosines("float32")
    got = back(AM(0.25)(KINDS[kind](c), KINDS[kind](t.astype(dtype))))
    assert np.array_equal(got, c - 0.25 * np.eye(5, dtype="float32")[t])


@every_kind
def test_ignored_rows_are_left_as_they_are(kind):
    c, t = cosines("float32")
    t = np.array(t)
    t[3], t[7] = -100, -1
    got = back(ArcFace()(KINDS[kind](c), KINDS[kind](t)))
    assert np.array_equal(got[[3, 7]], c[[3, 7]])
    live = t >= 0
    assert (got[live, t[live]] != c[live, t[live]]).all()


@jax_in_the_whole_battery
@every_kind
def test_axes_and_shapes(kind):
    rng = np.random.default_rng(3)
    c, t = rng.uniform(-1, 1, (2, 6, 3, 4)), rng.integers(0, 6, (2, 3, 4))
    want = np.moveaxis(ArcFace()(np.moveaxis(c, 1, -1), t), -1, 1)
    assert np.array_equal(back(ArcFace()(KINDS[kind](c), KINDS[kind](t), axis=1)), want) or kind == "jax"
    np.testing.assert_allclose(back(ArcFace()(KINDS[kind](c), t, 1)), want, rtol=1e-5)
    one = back(ArcFace()(KINDS[kind](np.array([0.5, 0.2])), KINDS[kind](np.array(1))))
    np.testing.assert_allclose(one, [0.5, math.cos(math.acos(0.2) + 0.5)], rtol=1e-6)
    assert back(ArcFace()(KINDS[kind](np.zeros((0, 4))), KINDS[kind](np.zeros(0, np.int32)))).shape == (0, 4)


@every_kind
@pytest.mark.parametrize("name", ["am", "arcface", "sphereface"])
def test_masked_and_nan_entries(kind, name):
    c = np.array([[-math.inf, 0.5], [math.nan, 0.5], [0.5, -math.inf]], np.float32)
    got = back(MARGINS[name][0](KINDS[kind](c), KINDS[kind](np.array([0, 0, 0]))))
    assert got[0, 0] == -math.inf
    assert np.isnan(got[1, 0])
    assert np.isfinite(got[2, 0])
    assert got[2, 1] == -math.inf
    assert (got[:2, 1] == 0.5).all()


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@every_margin
def test_halves_are_computed_in_fp32(name, half):
    torch = pytest.importorskip("torch")
    margin, _ = MARGINS[name]
    x = torch.linspace(-1.0078, 1.0078, 31)[:, None].to(getattr(torch, half))
    t = torch.zeros(31, dtype=torch.long)
    y = margin(x, t)
    assert y.dtype == x.dtype
    assert torch.equal(y, margin(x.float(), t).to(x.dtype))


def refused(c, t):
    return lambda make: ArcFace()(make(np.array(c)), make(np.array(t)))


WRONG = {
    "a score": (
        refused([[1.5, 0.0]], [0]),
        ValueError,
        r"cosines in \[-1, 1\], got one of size 1.5; use transforms.cosine",
    ),
    "a large score": (refused([[-30.0, 0.0]], [0]), ValueError, r"cosines in \[-1, 1\], got one of size 30"),
    "a class too high": (refused([[0.5, 0.0]], [2]), ValueError, "class 2 is out of range for 2 classes; use 0 to 1"),
    "a fraction of a class": (refused([[0.5, 0.0]], [0.0]), TypeError, "integer dtype, got float"),
    "a boolean": (refused([[0.5, 0.0]], [True]), TypeError, "integer dtype, got bool"),
    "a shape": (refused([[0.5, 0.0]], [[0]]), ValueError, r"\(1,\), got \(1, 1\)"),
    "boolean cosines": (refused([[True, False]], [0]), TypeError, "cosines: expected real floating"),
}


@every_kind
@each(WRONG)
def test_what_is_refused(kind, call, error, words):
    refuses(lambda: call(KINDS[kind]), error, words)


def loss_of(target):
    return lambda: anymax.margin_loss("softmax", np.zeros((2, 2)), target)


MADE_WRONGLY = {
    "a target of booleans": (loss_of(np.eye(2, dtype=bool)), TypeError, "a margin needs class indices of an integer dtype"),
    "a distribution as target": (loss_of(np.eye(2)), TypeError, "a margin needs class indices of an integer dtype"),
    "m below 1": (lambda: SphereFace(0.5), ValueError, "must be"),
    "m1 of 0": (lambda: Combined(m1=0.0), ValueError, "must be"),
    "NaN": (lambda: AM(math.nan), ValueError, "must be"),
    "words": (lambda: ArcFace("0.5"), TypeError, "must be"),
    "a boolean": (lambda: ArcFace(True), TypeError, "must be"),
    "degrees": (lambda: ArcFace(28.6), ValueError, "must be"),
    "m2": (lambda: Combined(m2=-30.0), ValueError, "must be"),
    **{repr(wrong): (lambda wrong=wrong: as_margin(wrong), TypeError, "expected a number") for wrong in (None, True, "arcface", ArcFace)},
}  # fmt: skip


@each(MADE_WRONGLY)
def test_what_is_made_wrongly(call, error, words):
    refuses(call, error, words)


def test_lists():
    np.testing.assert_allclose(AM(0.25)([[0.75, 0.5]], [0]), [[0.5, 0.5]])


def test_data():
    assert CosFace is AM
    for margin, _ in MARGINS.values():
        assert pickle.loads(pickle.dumps(margin)) == margin
        assert eval(repr(margin)) == margin
        assert hash(margin) == hash(eval(repr(margin)))
        assert as_margin(margin) is margin
    assert as_margin(0.2) == AM(0.2)
    assert as_margin(1) == AM(1.0)
    with pytest.raises(AttributeError):
        ArcFace().m = 3


@pytest.mark.whole(lambda name: name != "combined")
@every_margin
def test_compilers(name):
    margin, _ = MARGINS[name]
    c, t = cosines("float32")
    want = margin(c, t)
    jax = pytest.importorskip("jax")
    np.testing.assert_allclose(jax.jit(margin)(c, t.astype(np.int32)), want, atol=3e-6)
    rows = jax.jit(jax.vmap(margin))(jax.numpy.asarray(c), jax.numpy.asarray(t.astype(np.int32)))
    np.testing.assert_allclose(rows, want, atol=3e-6)
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    x, y = torch.tensor(c), torch.tensor(t)
    compiled = torch.compile(lambda a, b: margin(a, b), fullgraph=True, backend="eager")
    np.testing.assert_allclose(compiled(x, y), want, atol=3e-6)
    np.testing.assert_allclose(torch.func.vmap(margin)(x, y), want, atol=3e-6)


def test_classes_along_a_tuple_of_axes():
    cosines, target = np.tanh(np.linspace(-1.0, 1.0, 24).reshape(4, 2, 3)), np.array([0, 1, 2, 5])
    whole = anymax.margin_loss("softmax", cosines.reshape(4, 6), target, reduction="none")
    np.testing.assert_array_equal(anymax.margin_loss("softmax", cosines, target, axis=(1, 2), reduction="none"), whole)
