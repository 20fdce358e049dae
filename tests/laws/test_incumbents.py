"""What goes wrong in the packages before this one, found by trying them, where no other test holds ours to better.

Most of it the laws and the tests of derivatives forbid for every map: rows without an answer, sums that are not 1 at offsets and on long
rows, losses beside masked classes, derivatives that are NaN, detached or not there. Where entmax 1.3 is installed and its defect is cheap
and certain to show, THEIRS shows it, so that the list stays honest.
"""

from __future__ import annotations

import math

import numpy as np
import oracles
import plainly
import pytest
from kinds import KINDS, back, every_kind

import anymax as A
from anymax import Entmax, NormMax, Softmax, Sparsemax

torch = pytest.importorskip("torch")
D = torch.float64
INF = math.inf


def rng(seed=0):
    return np.random.default_rng(seed)


def raises(error, words, call):
    with pytest.raises(error, match=words):
        call()
    return True


def far_off_at_alpha_10(entmax):
    x = np.stack([np.linspace(-0.15, -0.05, 11), np.zeros(11)], axis=1)
    exact = np.array([[float(v) for v in oracles.entmax(10.0)(row)] for row in x])
    found = entmax.entmax_bisect(torch.tensor(x, dtype=torch.float32), alpha=10.0).numpy()
    assert np.abs(A.entmax(x, 10.0) - exact).max() < 2e-15
    return np.abs(found - exact).max() > 0.1


def nan_in_a_hessian_beside_a_zero(entmax):
    x = torch.tensor([2.0, 1.7, 1.6, -3.0, -4.0], dtype=D)
    return torch.autograd.functional.hessian(lambda x: (entmax.entmax15(x, dim=-1) ** 3).sum(), x).isnan().all()


THEIRS = {
    "raises for a row of -inf": lambda e: raises(
        RuntimeError, "out of bounds", lambda: e.sparsemax(torch.tensor([[0.0, 1.0], [-INF, -INF]]), dim=-1)
    ),
    "a loss is NaN beside a class at -inf": lambda e: e.entmax15_loss(torch.tensor([[0.5, -INF, 1.0, 0.2]]), torch.tensor([3])).isnan(),
    "modules refuse a parameter": lambda e: raises(
        AttributeError, "before Module", lambda: e.EntmaxBisect(alpha=torch.nn.Parameter(torch.tensor(1.5)))
    ),
    "integers make p uniform": lambda e: len(set(e.entmax_bisect(torch.tensor([3, 1, 2]), alpha=1.5).tolist())) == 1,
    "a Hessian is NaN once a zero exists": nan_in_a_hessian_beside_a_zero,
    "values at alpha = 10 are off by 0.1": far_off_at_alpha_10,
}  # fmt: skip


@pytest.mark.parametrize("defect", THEIRS)
def test_what_entmax_does(defect):
    entmax = pytest.importorskip("entmax")
    if entmax.__version__ != "1.3":
        pytest.skip("another entmax than 1.3")
    assert THEIRS[defect](entmax)


# -- entmax -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("f", "value"), [(A.entmax, 1.5), (A.normmax, 2.0), (A.budget, 1.4)])
def test_second_derivatives_once_a_zero_exists(f, value):
    """In the scores and in the parameter: theirs are NaN."""
    x = torch.tensor([0.4, 0.1, -3.0], dtype=D, requires_grad=True)
    assert f(x, value)[2] == 0
    assert torch.autograd.gradgradcheck(f, (x, torch.tensor(value, dtype=D, requires_grad=True)))


def test_entmax_is_not_monotone_at_alpha_10():
    gaps = np.linspace(0, 0.12, 2000, dtype=np.float32)
    p = A.entmax(np.stack([gaps, np.zeros_like(gaps)], -1), 10.0)
    assert (np.diff(p[:, 0]) >= 0).all()
    assert np.abs(p.sum(-1) - 1).max() < 2e-7


@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax(), Entmax(1.5), Entmax(1.25), NormMax(2.0)], ids=str)
def test_entmax_rows_in_bf16_do_not_sum_to_1(mapping):
    """Theirs sum to 0.86 ... 1.19. Ours are rounded once, at the end."""
    x = torch.randn(4, 32768, generator=torch.Generator().manual_seed(0)).bfloat16()
    p, want = A.apply(mapping, x), A.apply(mapping, x.double())
    assert (p.double() - want).abs().max() <= 2**-8 * want.max()
    assert ((p.double().sum(-1) - 1).abs() < 2e-3).all()
    t = torch.tensor([0, 5, 77, 32767])
    loss, exact = (A.fenchel_young(mapping, scores, t, reduction="none") for scores in (x, x.double()))
    assert (loss >= 0).all()
    torch.testing.assert_close(loss.double(), exact, rtol=2**-8, atol=1e-6)


def test_entmax_fp16_and_negative_losses():
    x = torch.tensor([[8.0, 0.0, -3.0], [2.0, 1.0, 0.0]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        loss = A.entmax15_loss(x.to(dtype), torch.tensor([0, 0]), reduction="none")
        assert (loss >= 0).all()
        assert loss[0] == 0


def test_entmax_budget_gradient_beside_an_axis_of_one():
    x = torch.tensor(rng(9).normal(size=(3, 4, 1)), requires_grad=True)
    k = torch.tensor(1.5, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, k: A.budget(x, k, axis=1), (x, k))


# -- the others -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [2.5, 3.0])
def test_adasplash_gradient_beyond_alpha_2(alpha):
    """Theirs is off by 7 at 2.5."""
    x, g = rng(11).normal(size=512) * 0.01, torch.tensor(rng(12).normal(size=512))
    grads = []
    for dtype in (torch.float32, D):
        a = torch.tensor(x.astype(np.float32)).to(dtype).requires_grad_()
        (A.entmax(a, alpha) * g.to(dtype)).sum().backward()
        grads.append(a.grad.double())
    assert (grads[0] - grads[1]).abs().max() < 1e-4 * grads[1].abs().max()


@every_kind
def test_x_transformers_topk_keeps_more_than_k_at_ties(kind):
    p = back(A.sparse_softmax(KINDS[kind](np.array([1.0, 2.0, 2.0, 2.0, 0.0])), k=2))
    np.testing.assert_allclose(p, [0, 0.5, 0.5, 0, 0], rtol=1e-6)


@every_kind
def test_coincheung_taylor_at_minus_1e9_inf_1e20_and_fp16(kind):
    """Taylor softmax is not shift-invariant: -1e9 is a large score of it. A mask is -inf, and has probability 0."""
    make = KINDS[kind]
    p = back(A.taylor_softmax(make(np.array([[1.0, 2.0, -INF]]))))
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
