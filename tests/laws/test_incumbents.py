"""What goes wrong in the packages before this one, found by trying them: each defect is a test of ours.

Where entmax 1.3 is installed and its defect is cheap and certain to show, `theirs_*` shows it, so that the list stays honest.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import plainly
import pytest
from kinds import KINDS, back, every_kind

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor

torch = pytest.importorskip("torch")
D = torch.float64
INF, NAN = math.inf, math.nan

MAPS = {
    "softmax": Softmax(),
    "sparsemax": Sparsemax(),
    "entmax15": Entmax(1.5),
    "entmax1.25": Entmax(1.25),
    "entmax3": Entmax(3.0),
    "entmax_rows": Entmax(np.array([[1.0], [1.5], [2.5]])),
    "budget": Budget(2),
    "normmax": NormMax(2.0),
    "taylor": Taylor(2),
    "sigsoftmax": Sigsoftmax(),
    "ratio": Ratio.sigmoid(),
    "sparse_softmax_k": SparseSoftmax(k=2),
    "sparse_softmax_p": SparseSoftmax(p=0.9),
    "perturb_max": PerturbMax(),
}
SHIFTS = [n for n, m in MAPS.items() if m.facts.shift_invariant]
every_map = pytest.mark.parametrize("name", MAPS)


def rng(seed=0):
    return np.random.default_rng(seed)


def entmax_mp(x, alpha):
    with mpmath.workdps(50):
        c, x = mpmath.mpf(alpha) - 1, [mpmath.mpf(float(v)) for v in x]
        y = [c * (v - max(x)) for v in x]
        low, high = mpmath.mpf(-1), mpmath.mpf(0)
        for _ in range(170):
            t = (low + high) / 2
            s = sum((v - t) ** (1 / c) for v in y if v > t)
            low, high = (t, high) if s > 1 else (low, t)
        return np.array([float((v - low) ** (1 / c)) if v > low else 0.0 for v in y])


@pytest.fixture
def theirs():
    """entmax, of the version whose defects are listed."""
    entmax = pytest.importorskip("entmax")
    if entmax.__version__ != "1.3":
        pytest.skip("another entmax than 1.3")
    return entmax


# -- rows without an answer: entmax raises for the whole batch --------------------------------------------------------------------


@every_map
@every_kind
def test_entmax_rows_of_minus_inf_nan_and_inf_raise(name, kind):
    if kind in ("jax", "strict") and name not in ("softmax", "sparsemax", "entmax15", "entmax1.25"):
        pytest.skip("numpy and torch share the formula")
    mapping = MAPS[name]
    x = rng().normal(size=(3, 5))
    x[1] = -INF
    p = back(A.apply(mapping, KINDS[kind](x)))
    assert not p[1].any()
    assert np.isfinite(p).all()
    clean = rng().normal(size=(3, 5))
    np.testing.assert_allclose(p[[0, 2]], back(A.apply(mapping, KINDS[kind](clean)))[[0, 2]], rtol=1e-6, atol=1e-12)
    for bad in (NAN, INF):
        x = rng().normal(size=(3, 5))
        x[1, 2] = bad
        p = back(A.apply(mapping, KINDS[kind](x)))
        assert np.isnan(p[1]).all()
        assert np.isfinite(p[[0, 2]]).all()


def test_entmax_raises_for_a_row_of_minus_inf__theirs(theirs):
    with pytest.raises(RuntimeError, match="out of bounds"):
        theirs.sparsemax(torch.tensor([[0.0, 1.0], [-INF, -INF]]), dim=-1)


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax1.25", "normmax"])
def test_entmax_losses_are_nan_beside_a_class_at_minus_inf(name):
    x = torch.tensor([[0.5, -INF, 1.0, 0.2]], dtype=D, requires_grad=True)
    loss = A.fenchel_young(MAPS[name], x, torch.tensor([3]))
    torch.testing.assert_close(loss, A.fenchel_young(MAPS[name], x[:, [0, 2, 3]], torch.tensor([2])))
    loss.backward()
    assert x.grad.isfinite().all()


def test_entmax_losses_are_nan_beside_a_class_at_minus_inf__theirs(theirs):
    assert theirs.entmax15_loss(torch.tensor([[0.5, -INF, 1.0, 0.2]]), torch.tensor([3])).isnan().all()


@pytest.mark.parametrize("loss", [A.sparsemax_loss, A.entmax15_loss, A.entmax_loss, A.normmax_loss, A.cross_entropy])
def test_entmax_does_not_honour_ignore_index_100(loss):
    x = torch.tensor(rng(1).normal(size=(4, 3)), requires_grad=True)
    t = torch.tensor([0, -100, 2, -100])
    torch.testing.assert_close(loss(x, t), loss(x[[0, 2]], t[[0, 2]]))
    assert loss(x, torch.full((4,), -100)) == 0  # not NaN
    loss(x, torch.full((4,), -100)).backward()
    assert not x.grad.any()


def test_entmax_returns_a_tuple_for_a_loss():
    assert isinstance(A.sparsemax_loss(torch.randn(2, 3), torch.tensor([0, 1])), torch.Tensor)


# -- derivatives -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax1.25", "entmax3", "normmax", "budget"])
def test_entmax_hessians_are_nan_once_a_zero_exists(name):
    mapping = MAPS[name]
    x = torch.tensor([2.0, 1.7, 1.6, -3.0, -4.0], dtype=D)
    assert (A.apply(mapping, x) == 0).any()

    def f(x):
        return (A.apply(mapping, x) ** 3).sum()

    h = torch.autograd.functional.hessian(f, x)
    assert h.isfinite().all()

    def gradient(v):
        a = torch.tensor(v, requires_grad=True)
        return torch.autograd.grad(f(a), a)[0].numpy()

    step = 1e-6
    want = np.stack([(gradient(x.numpy() + step * e) - gradient(x.numpy() - step * e)) / (2 * step) for e in np.eye(5)])
    np.testing.assert_allclose(h.numpy(), want, atol=1e-7)


def test_entmax_hessians_are_nan_once_a_zero_exists__theirs(theirs):
    x = torch.tensor([2.0, 1.7, 1.6, -3.0, -4.0], dtype=D)
    h = torch.autograd.functional.hessian(lambda x: (theirs.entmax15(x, dim=-1) ** 3).sum(), x)
    assert h.isnan().all()


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax1.25", "normmax"])
def test_entmax_losses_have_detached_gradients(name):
    x = torch.tensor(rng(2).normal(size=(2, 4)), requires_grad=True)
    (g,) = torch.autograd.grad(A.fenchel_young(MAPS[name], x, torch.tensor([0, 3])), x, create_graph=True)
    assert g.requires_grad
    (h,) = torch.autograd.grad(g[0, 0], x)
    assert h.any()


@pytest.mark.parametrize(
    "case",
    [
        (lambda x, t, a: A.entmax_loss(x, t, alpha=a), 1.3), (lambda x, t, a: A.normmax_loss(x, t, alpha=a), 1.8),
        (lambda x, t, a: A.normmax(x, a)[:, 0].sum(), 1.8), (lambda x, t, a: A.budget(x, a)[:, 0].sum(), 1.4),
    ],
    ids=["entmax_loss", "normmax_loss", "normmax", "budget"],
)  # fmt: skip
def test_entmax_has_no_gradient_in_the_parameter(case):
    f, value = case
    x, t = torch.tensor(rng(3).normal(size=(3, 4))), torch.tensor([0, 3, 1])
    a = torch.tensor(value, dtype=D, requires_grad=True)
    f(x, t, a).backward()
    h = 1e-6
    want = (f(x, t, value + h) - f(x, t, value - h)) / (2 * h)
    torch.testing.assert_close(a.grad, want, rtol=1e-6, atol=1e-9)
    assert a.grad.abs() > 1e-3


def test_entmax_mixed_second_derivative_is_nan():
    x = torch.tensor([0.4, 0.1, -3.0], dtype=D, requires_grad=True)
    a = torch.tensor(1.5, dtype=D, requires_grad=True)
    (g,) = torch.autograd.grad(A.entmax(x, a)[0], a, create_graph=True)
    (h,) = torch.autograd.grad(g, x)
    step = 1e-4

    def p(x, a):
        return plainly.entmax(x, a)[0]

    v = x.detach().numpy()
    want = [
        (
            p(v + step * e, 1.5 + step)
            - p(v - step * e, 1.5 + step)
            - p(v + step * e, 1.5 - step)
            + p(v - step * e, 1.5 - step)
        )
        / (4 * step**2)
        for e in np.eye(3)
    ]
    np.testing.assert_allclose(h.numpy(), want, atol=1e-6)


@pytest.mark.parametrize(
    ("mapping", "field"), [(lambda v: Entmax(v), "alpha"), (lambda v: NormMax(v), "alpha"), (lambda v: Budget(v), "k")]
)
def test_entmax_modules_refuse_a_parameter(mapping, field):
    from anymax.nn import Activation

    module = Activation(mapping(torch.nn.Parameter(torch.tensor(1.5))))
    assert [n for n, _ in module.named_parameters()] == [field]
    module(torch.randn(3, 5))[:, 0].sum().backward()
    assert getattr(module, field).grad is not None


def test_entmax_modules_refuse_a_parameter__theirs(theirs):
    with pytest.raises(AttributeError, match="before Module"):
        theirs.EntmaxBisect(alpha=torch.nn.Parameter(torch.tensor(1.5)))


@every_kind
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "entmax1.25", "normmax", "taylor", "perturb_max"])
def test_entmax_casts_alpha_to_integers(name, kind):
    if kind == "jax" and name not in ("entmax1.25", "sparsemax"):
        pytest.skip("once is enough")
    x = [[3, 1, 2], [0, 5, 5]]
    got = back(A.apply(MAPS[name], KINDS[kind](np.array(x))))
    np.testing.assert_allclose(got, A.apply(MAPS[name], np.array(x, np.float64)), rtol=1e-5, atol=1e-6)
    assert got.dtype.kind == "f"
    with pytest.raises(TypeError, match="convert them"):
        A.apply(MAPS[name], KINDS[kind](np.array(x) > 2))


def test_entmax_casts_alpha_to_integers__theirs(theirs):
    p = theirs.entmax_bisect(torch.tensor([3, 1, 2]), alpha=1.5)
    assert len(set(p.tolist())) == 1  # uniform


def test_entmax_at_alpha_1_is_uniform():
    x = rng(4).normal(size=5)
    np.testing.assert_allclose(A.entmax(x, 1.0), plainly.softmax(x), rtol=1e-14)
    a = torch.tensor(1.0, requires_grad=True)
    A.entmax(torch.tensor(x, dtype=torch.float32), a)[0].backward()
    assert a.grad.isfinite()


# -- accuracy -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0001, 1.001, 1.01])
def test_entmax_gradient_in_alpha_near_1_in_fp32(alpha):
    """Theirs is +6.77 at 1.0001, where -0.444 is right."""
    x, h = np.array([1.0, 0.0, -0.5]), 1e-6
    want = (entmax_mp(x, alpha + h)[0] - entmax_mp(x, alpha - h)[0]) / (2 * h)
    a = torch.tensor(alpha, requires_grad=True)
    A.entmax(torch.tensor(x, dtype=torch.float32), a)[0].backward()
    np.testing.assert_allclose(a.grad, want, rtol=2e-4)


@pytest.mark.parametrize("alpha", [1.000001, 1.0001, 1.001, 1.1, 2.0, 3.0, 4.0, 5.0, 10.0])
def test_entmax_values_in_fp32(alpha):
    """Theirs are off by 6.5e-5 at 1.0001, and on two classes by 0.139 at 10."""
    for gap in np.linspace(0.0, 1.2 / (alpha - 1 if alpha > 1.1 else 0.1), 25, dtype=np.float32):
        x = np.array([gap, 0], np.float32)
        np.testing.assert_allclose(A.entmax(x, alpha), entmax_mp(x, alpha), atol=2.5e-7)


def test_entmax_values_at_alpha_10__theirs(theirs):
    x = np.stack([np.linspace(-0.15, -0.05, 11), np.zeros(11)], axis=1)
    exact = np.array([entmax_mp(row, 10.0) for row in x])
    found = theirs.entmax_bisect(torch.tensor(x, dtype=torch.float32), alpha=10.0).numpy()
    assert np.abs(found - exact).max() > 0.1
    assert np.abs(A.entmax(x, 10.0) - exact).max() < 2e-15


def test_entmax_is_not_monotone_at_alpha_10():
    gaps = np.linspace(0, 0.12, 2000, dtype=np.float32)
    p = A.entmax(np.stack([gaps, np.zeros_like(gaps)], -1), 10.0)
    assert (np.diff(p[:, 0]) >= 0).all()
    assert np.abs(p.sum(-1) - 1).max() < 2e-7


@pytest.mark.parametrize("offset", [1e4, 1e6])
@pytest.mark.parametrize("name", SHIFTS)
def test_optax_liger_and_bisection_lose_the_digits_of_an_offset(name, offset):
    """Scores that are exact at every offset give the same p: optax's rows sum to 0.973, budget_bisect's k = 10 to 10.016."""
    x = rng(5).integers(-64, 64, size=(3, 40)) / 16
    for dtype in (np.float32, np.float64):
        near, far = A.apply(MAPS[name], x.astype(dtype)), A.apply(MAPS[name], (x + offset).astype(dtype))
        np.testing.assert_allclose(far, near, atol=4 * np.finfo(dtype).eps, rtol=0)
        np.testing.assert_allclose(far.sum(-1), 2.0 if name == "budget" else 1.0, atol=1e-6)


def test_liger_sums_to_1_02_on_close_scores():
    x = (rng(6).normal(size=(2, 1000)) * 0.01 + 1e3).astype(np.float32)
    p = A.sparsemax(x)
    np.testing.assert_allclose(p.sum(-1, dtype=np.float64), 1.0, atol=2e-7)
    np.testing.assert_allclose(p[0], plainly.entmax(x[0].astype(np.float64), 2.0), atol=2e-7)


def test_optax_sums_to_0_97_at_offset_1e4():
    x = (rng(7).normal(size=1000) + 1e4).astype(np.float32)
    np.testing.assert_allclose(A.sparsemax(x).sum(dtype=np.float64), 1.0, atol=2e-7)


@pytest.mark.parametrize("n", [2048, 32768])
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "entmax1.25", "normmax"])
def test_entmax_rows_in_bf16_do_not_sum_to_1(name, n):
    """Theirs sum to 0.86 ... 1.19. Ours are rounded once, at the end."""
    x = torch.randn(4, n, generator=torch.Generator().manual_seed(0)).bfloat16()
    p = A.apply(MAPS[name], x)
    want = A.apply(MAPS[name], x.double())
    assert (p.double() - want).abs().max() <= 2**-8 * want.max()
    assert ((p.double().sum(-1) - 1).abs() < 2e-3).all()
    if n == 32768:
        t = torch.tensor([0, 5, 77, 32767])
        loss = A.fenchel_young(MAPS[name], x, t, reduction="none")
        exact = A.fenchel_young(MAPS[name], x.double(), t, reduction="none")
        assert (loss >= 0).all()
        torch.testing.assert_close(loss.double(), exact, rtol=2**-8, atol=1e-6)


def test_entmax_fp16_and_negative_losses():
    x = torch.tensor([[8.0, 0.0, -3.0], [2.0, 1.0, 0.0]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        loss = A.entmax15_loss(x.to(dtype), torch.tensor([0, 0]), reduction="none")
        assert (loss >= 0).all()
        assert loss[0] == 0


# -- axes and shapes -------------------------------------------------------------------------------------------------------------------


@every_map
@pytest.mark.parametrize("axis", [-2, -3, 0, 1])
def test_entmax_cannot_take_a_negative_axis_with_k(name, axis):
    if name == "entmax_rows":
        pytest.skip("its alpha has rows of its own")
    x = rng(8).normal(size=(4, 5, 3))
    want = np.moveaxis(A.apply(MAPS[name], np.moveaxis(x, axis, -1)), -1, axis)
    np.testing.assert_array_equal(A.apply(MAPS[name], x, axis), want)


def test_entmax_budget_gradient_beside_an_axis_of_one():
    x = torch.tensor(rng(9).normal(size=(3, 4, 1)), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: A.budget(x, 2, axis=1), x)
    k = torch.tensor(1.5, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, k: A.budget(x, k, axis=1), (x, k))


def test_entmax_budget_is_nan_beside_minus_inf():
    x = torch.tensor([[0.5, -INF, 1.0, 0.7]], dtype=D, requires_grad=True)
    p = A.budget(x, 2)
    np.testing.assert_allclose(p.detach()[0, [0, 2, 3]], plainly.budget([0.5, 1.0, 0.7], 2), atol=1e-12)
    p[0, 0].backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()


def test_entmax_budget_above_n_is_silent():
    with pytest.raises(ValueError, match="k must be at most the number of classes"):
        A.budget(np.zeros(3), 4)
    np.testing.assert_array_equal(A.budget([3.0, 1.0, 2.0], 3), [1, 1, 1])


@pytest.mark.parametrize("alpha", [0.5, 1.0, -2.0, NAN])
def test_entmax_normmax_below_1_is_accepted(alpha):
    with pytest.raises(ValueError, match="above 1"):
        NormMax(alpha)


def test_entmax_options_that_change_nothing():
    with pytest.raises(TypeError):
        A.sparsemax([1.0, 2.0], n_iter=0)


def test_entmax_losses_take_rows_of_indices_only():
    x = torch.randn(2, 3, 4, dtype=D)
    assert A.entmax15_loss(x, torch.zeros(2, 4, dtype=torch.int64), reduction="none").shape == (2, 4)
    assert A.entmax15_loss(x, torch.full((2, 3, 4), 1 / 3, dtype=D), reduction="none").shape == (2, 4)
    assert A.entmax15_loss(x[0, :, 0], torch.tensor(1)).shape == ()


# -- the others -------------------------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize(
    ("x", "want"),
    [([0, 0.5, 1], [0, 0.25, 0.75]), ([1.0, 1, 1, 1], [0.25] * 4), ([-3, -2.9, -2.8], [0.7 / 3, 1 / 3, 1.3 / 3])],
)
def test_keras_sparsemax(x, want, kind):
    """Keras 3.15 gives [0, 0, .25], zeros, and a sum of 9.5."""
    np.testing.assert_allclose(back(A.sparsemax(KINDS[kind](np.array(x)))), want, atol=1e-6)


def test_insightface_arcface_has_a_wrong_gradient():
    c = torch.tensor([[0.3, -0.2, 0.999], [0.9999, 0.1, -0.5]], dtype=D, requires_grad=True)
    t = torch.tensor([2, 0])
    assert torch.autograd.gradcheck(
        lambda c: A.margin_loss(Softmax(), c, t, margin=A.margins.ArcFace(0.5), scale=10.0), c, eps=1e-7, atol=1e-4
    )


def test_pml_arcface_has_no_gradient_at_perfect_alignment():
    c = torch.tensor([[1.0, 0.2], [-1.0, 0.2]], dtype=D, requires_grad=True)
    loss = A.margin_loss(Softmax(), c, torch.tensor([0, 0]), margin=A.margins.ArcFace(0.5), scale=10.0)
    loss.backward()
    assert loss.isfinite()
    assert c.grad.isfinite().all()


def test_optax_multiclass_sparsemax_loss_fails_on_a_vector():
    x = np.array([0.2, 0.1, 0.0])
    want = plainly.fenchel_young(plainly.entmax(x, 2.0), lambda p: 0.5 * (p @ p), x, np.eye(3)[1])
    np.testing.assert_allclose(A.sparsemax_loss(x, 1), want, rtol=1e-12)


@pytest.mark.parametrize("x", [[NAN, 0.0], [0.0, NAN]])
def test_liger_and_adasplash_hide_a_nan(x):
    for mapping in (Sparsemax(), Entmax(1.5), Entmax(3.0), Softmax()):
        assert np.isnan(A.apply(mapping, x)).all()
        assert A.apply(mapping, torch.tensor(x)).isnan().all()


def test_liger_takes_no_70000_classes():
    p = A.sparsemax(rng(10).normal(size=70_000).astype(np.float32))
    np.testing.assert_allclose(p.sum(dtype=np.float64), 1, atol=2e-7)


@pytest.mark.parametrize("alpha", [2.5, 3.0])
def test_adasplash_beyond_alpha_2(alpha):
    """Theirs sum to 2.5 ... 5.1 at alpha = 3, with a gradient error of 7 at 2.5."""
    x = (rng(11).normal(size=512) * 0.01).astype(np.float32)
    p = A.entmax(x, alpha)
    np.testing.assert_allclose(p.sum(dtype=np.float64), 1, atol=3e-7)
    np.testing.assert_allclose(p, plainly.entmax(x.astype(np.float64), alpha), atol=2e-7)
    a, b = torch.tensor(x, requires_grad=True), torch.tensor(x, dtype=D, requires_grad=True)
    g = torch.tensor(rng(12).normal(size=512))
    (A.entmax(a, alpha) * g.float()).sum().backward()
    (A.entmax(b, alpha) * g).sum().backward()
    assert (a.grad.double() - b.grad).abs().max() < 1e-4 * b.grad.abs().max()


@every_kind
def test_x_transformers_topk_beyond_the_length(kind):
    x = KINDS[kind](np.array([[1.0, 3.0, 2.0]]))
    np.testing.assert_allclose(back(A.sparse_softmax(x, k=8)), back(A.softmax(x)), rtol=1e-6)


@every_kind
def test_x_transformers_topk_keeps_more_than_k_at_ties(kind):
    p = back(A.sparse_softmax(KINDS[kind](np.array([1.0, 2.0, 2.0, 2.0, 0.0])), k=2))
    assert (p > 0).sum() == 2
    np.testing.assert_allclose(p, [0, 0.5, 0.5, 0, 0], rtol=1e-6)


def test_fenchel_young_losses_tsallis_is_off():
    """Theirs is off by 6e-4, sums by 1e-3, and is NaN at -inf."""
    x = rng(13).normal(size=6) * 2
    np.testing.assert_allclose(A.entmax(x, 1.7), plainly.entmax(x, 1.7), atol=1e-12)
    np.testing.assert_allclose(A.entmax(np.append(x, -INF), 1.7)[:-1], A.entmax(x, 1.7), atol=1e-15)


@every_kind
def test_coincheung_taylor_at_minus_1e9_inf_1e20_and_fp16(kind):
    """Taylor softmax is not shift-invariant: -1e9 is a large score of it. A mask is -inf, and has probability 0."""
    make = KINDS[kind]
    x = np.array([[1.0, 2.0, -INF]])
    p = back(A.taylor_softmax(make(x)))
    np.testing.assert_allclose(p[0, :2], plainly.taylor([1.0, 2.0]), rtol=1e-6)
    assert p[0, 2] == 0
    masked = back(A.taylor_softmax(make(np.array([[1.0, 2.0, -1e9]])), mask=make(np.array([[True, True, False]]))))
    np.testing.assert_allclose(masked, p, rtol=1e-6)
    np.testing.assert_allclose(back(A.taylor_softmax(make(np.array([1e20, 1.0])))), [1, 0], atol=1e-6)
    np.testing.assert_allclose(back(A.taylor_softmax(make(np.array([1e20, -1e20], np.float32)))), [0.5, 0.5], atol=1e-6)
    if kind != "strict":
        half = back(A.taylor_softmax(make(np.array([300.0, 1.0], np.float16))))
        np.testing.assert_allclose(half, plainly.taylor([300.0, 1.0]), atol=1e-3)


def test_coincheung_taylor_gradients_are_finite_there():
    for row in ([1e20, 1.0, -1e9], [300.0, -INF, 2.0]):
        x = torch.tensor([row], requires_grad=True)
        A.taylor_softmax_loss(x, torch.tensor([0])).backward()
        assert x.grad.isfinite().all()


def test_softtorch_fails_gradgradcheck():
    x = torch.tensor(rng(14).normal(size=(2, 4)), requires_grad=True)
    for alpha in (1.5, 2.0):
        assert torch.autograd.gradgradcheck(lambda x, a=alpha: A.entmax(x, a), x)


def test_tuero_returns_fp32_for_fp64():
    for mapping in MAPS.values():
        assert A.apply(mapping, np.zeros((3, 5))).dtype == np.float64
        assert A.apply(mapping, np.zeros((3, 5), np.float32)).dtype == np.float32


def test_torch_gumbel_softmax_takes_no_generator():
    x = torch.zeros(4, 6)
    draws = [A.gumbel_softmax(x, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@every_map
def test_inputs_are_never_mutated(name):
    x = rng(15).normal(size=(3, 5))
    x[0, 1] = -INF
    before = x.copy()
    A.apply(MAPS[name], x)
    A.apply(MAPS[name], torch.from_numpy(x))
    np.testing.assert_array_equal(x, before)
