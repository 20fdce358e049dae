"""torch: derivatives in the parameters of a map."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest
from forty_digits import exact, slopes, tsallis
from torch_cases import D, T, its_own_warnings, leaf, scores

torch = pytest.importorskip("torch")

import anymax as A

pytestmark = its_own_warnings
autograd, func = torch.autograd, torch.func


ALPHAS = [0.5, 1.0, 1 + 1e-12, 1 + 1e-6, 1.0001, 1.001, 1.25, 4 / 3, 1.5, 2.0, 2.5, 3.0, 10.0]
POINT = np.array([0.4, -0.2, 0.93, -1.0, 0.1])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradient_in_alpha(alpha):
    """By forward and reverse mode, for a float's worth of fp64, against 40 digits."""
    want, _ = slopes(A.Entmax, alpha, tuple(POINT))
    x, a = torch.tensor(POINT), torch.tensor(alpha, dtype=D)
    for jacobian in (func.jacrev, func.jacfwd):
        np.testing.assert_allclose(jacobian(lambda a: A.entmax(x, a))(a), want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_loss_of_a_soft_target(alpha):
    """Its value and its derivative in alpha by the definition, Omega* + Omega(y) - <x, y>."""
    x, y = torch.tensor(POINT), torch.tensor([0.2, 0.0, 0.5, 0.3, 0.0], dtype=D)
    a = torch.tensor(alpha, dtype=D, requires_grad=True)
    loss = A.entmax_loss(x, y, alpha=a)
    loss.backward()
    with mpmath.workdps(40):
        h, target = mpmath.mpf(10) ** -13, [mpmath.mpf(float(v)) for v in y]
        of_target = float((tsallis(target, alpha + h) - tsallis(target, alpha - h)) / (2 * h))
        value = float(exact(A.Entmax, mpmath.mpf(alpha), POINT)[1] + tsallis(target, alpha)) - float(x @ y)
    np.testing.assert_allclose(a.grad, slopes(A.Entmax, alpha, tuple(POINT))[1] + of_target, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(loss.detach(), value, rtol=1e-10, atol=1e-12)


def test_gradient_in_an_alpha_for_each_row():
    x = scores(15, (5, 6))
    alpha = torch.tensor([[0.6], [1.0], [1.0001], [1.5], [3.0]], dtype=D, requires_grad=True)
    given = (x.clone().requires_grad_(), alpha)
    assert autograd.gradcheck(A.entmax, given, check_forward_ad=True, fast_mode=True)
    t = torch.tensor([0, 5, 3, 2, 1])
    assert autograd.gradcheck(lambda x, a: A.entmax_loss(x, t, alpha=a, reduction="none"), given, fast_mode=True)
    for i in range(5):
        one = alpha.detach()[i, 0].clone().requires_grad_()
        (want,) = autograd.grad(A.entmax(x[i], one)[0], one)
        (got,) = autograd.grad(A.entmax(x, alpha)[i, 0], alpha)
        torch.testing.assert_close(got[i, 0], want)
        assert torch.count_nonzero(got) <= 1


def test_alpha_for_each_head():
    x = scores(16, (2, 3, 4, 5))
    alpha = torch.tensor([1.0, 1.5, 2.5], dtype=D).reshape(3, 1, 1).requires_grad_()
    p = A.entmax(x, alpha)
    for h in range(3):
        torch.testing.assert_close(p[:, h], A.entmax(x[:, h], alpha[h].item()))
    p[:, 1, 0, 0].sum().backward()
    assert alpha.grad[0] == alpha.grad[2] == 0
    assert alpha.grad[1] != 0
    other = x.transpose(1, -1)  # classes along axis 1
    torch.testing.assert_close(
        A.entmax(other, alpha.detach().reshape(1, 1, 1, 3).movedim(-1, -1), axis=1), p.transpose(1, -1)
    )


def test_a_steep_edge():
    """Above alpha = 2 the link is infinitely steep where the support ends; derivatives stay finite and right."""
    for alpha, gap in itertools.product((2.5, 3.0, 5.0), (0.9, 0.999, 1.001, 1.1)):
        edge = 1.0 / (alpha - 1.0)
        x = torch.tensor([0.0, -edge * gap, -9.0], dtype=D)
        a = torch.tensor(alpha, dtype=D)
        want, _ = slopes(A.Entmax, alpha, tuple(x.tolist()))
        got = func.jacrev(lambda a, x=x: A.entmax(x, a))(a)
        assert got.isfinite().all()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("alpha", [2.5, 3.0, 5.0])
def test_a_steep_edge_in_fp32(alpha):
    """A probability near 0 has a sensitivity beyond all others: what nearly cancels must not."""
    edge = 1.0 / (alpha - 1.0)
    x = torch.tensor([0.0, -edge + 2e-7, -0.2 * edge, 0.0], dtype=torch.float32)
    g = torch.tensor([1.0, 1000.0, -2.0, 0.5])
    grads = []
    for n, dtype in itertools.product((2, 4), (torch.float32, D)):
        a = x[:n].clone().to(dtype).requires_grad_()
        (A.entmax(a, alpha) * g[:n].to(dtype)).sum().backward()
        grads.append(a.grad.double())
    for got, want in (grads[:2], grads[2:]):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-5)


BY_PARAMETER = {  # a function of scores and a parameter, and the parameter's value
    "budget": (A.budget, 1.7),
    "budget whole": (A.budget, 2.3),
    "budget sigmoid": (lambda x, k: A.apply(A.Budget(k, "sigmoid"), x), 1.7),
    "budget laplace": (lambda x, k: A.apply(A.Budget(k, "laplace"), x), 2.3),
    "normmax": (A.normmax, 2.0),
    "normmax 1.3": (A.normmax, 1.3),
    "normmax loss": (lambda x, a: A.normmax_loss(x, T, alpha=a), 1.7),
    "scale": (lambda x, s: A.perturb_max(x, scale=s), 0.8),
    "scale loss": (lambda x, s: A.perturb_max_loss(x, T, scale=s), 0.8),
    "entmax": (A.entmax, 1.4),
    "entmax flat": (A.entmax, 0.8),
    "entmax steep": (A.entmax, 2.6),
    "entmax one": (A.entmax, 1.0),
    "entmax loss": (lambda x, a: A.entmax_loss(x, T, alpha=a), 1.4),
    "logsumexp": (lambda x, t: A.logsumexp(x, temperature=t), 0.7),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", BY_PARAMETER)
def test_parameters_by_differences_to_second_order(name):
    """The gradient, the second derivative and the mixed one, in the scores and in the parameter."""
    f, value = BY_PARAMETER[name]
    x, theta = leaf(17, (3, 4)), torch.tensor(value, dtype=D, requires_grad=True)
    assert autograd.gradcheck(f, (x, theta), check_forward_ad=True)
    assert autograd.gradgradcheck(f, (x, theta), fast_mode="scale" in name)
    rows = torch.full((3, 1), value, dtype=D) + torch.tensor([[0.0], [0.05], [0.1]], dtype=D)
    assert autograd.gradcheck(f, (x, rows.requires_grad_()), fast_mode=True)


def test_a_constant_alpha_takes_the_short_way():
    alpha = torch.tensor(1.3, dtype=D)
    x = leaf(18)
    torch.testing.assert_close(A.entmax(x, alpha), A.entmax(x, 1.3))
    A.entmax(x, alpha)[0, 0].backward()
    assert alpha.grad is None
