"""torch: derivatives in the parameters of a map."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import plainly
import pytest
from torch_cases import D, T, its_own_warnings, leaf, scores

torch = pytest.importorskip("torch")

import anymax as A

pytestmark = its_own_warnings
autograd, func = torch.autograd, torch.func


def p_mp(x, alpha):
    """entmax of one row with 40 digits."""
    c = mpmath.mpf(alpha) - 1
    x = [mpmath.mpf(float(v)) for v in x]
    if c == 0:
        e = [mpmath.exp(v - max(x)) for v in x]
        return [v / sum(e) for v in e]
    y = [c * (v - max(x)) for v in x]

    def p(t):
        return [max(v - t, 0) ** (1 / c) if v > t else mpmath.mpf(0) for v in y]

    low, high = (
        (mpmath.mpf(-1), mpmath.mpf(0)) if c > 0 else (mpmath.mpf(-1) - mpmath.mpf(len(x)) ** (-c), mpmath.mpf(-1))
    )
    for _ in range(150):
        middle = (low + high) / 2
        more = (sum(p(middle)) > 1) == (c > 0)
        low, high = (middle, high) if more else (low, middle)
    return p(low)


def dp_dalpha_mp(x, alpha):
    with mpmath.workdps(40):
        h = mpmath.mpf(10) ** -12
        a = mpmath.mpf(alpha)
        return [float((u - v) / (2 * h)) for u, v in zip(p_mp(x, a + h), p_mp(x, a - h))]


ALPHAS = [0.5, 1.0, 1 + 1e-12, 1 + 1e-6, 1.0001, 1.001, 1.25, 4 / 3, 1.5, 2.0, 2.5, 3.0, 10.0]
POINT = np.array([0.4, -0.2, 0.93, -1.0, 0.1])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradient_in_alpha(alpha):
    """By forward and reverse mode, for a float's worth of fp64, against 40 digits."""
    want = np.array(dp_dalpha_mp(POINT, alpha))
    x, a = torch.tensor(POINT), torch.tensor(alpha, dtype=D)
    got = func.jacrev(lambda a: A.entmax(x, a))(a)
    np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(func.jacfwd(lambda a: A.entmax(x, a))(a), want, rtol=1e-8, atol=1e-10)
    eager = a.clone().requires_grad_()
    A.entmax(x, eager)[0].backward()
    np.testing.assert_allclose(eager.grad, want[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("alpha", [1.0, 1 + 1e-6, 1.0001, 1.001, 1.01, 1.1, 1.5, 2.0, 3.0])
def test_gradient_in_alpha_in_fp32(alpha):
    """entmax 1.3 gives +6.77 at 1.0001 where the truth is -0.444."""
    a = torch.tensor(alpha, dtype=torch.float32, requires_grad=True)
    p = A.entmax(torch.tensor(POINT, dtype=torch.float32), a)
    got = [float(autograd.grad(p[i], a, retain_graph=True)[0]) for i in range(5)]
    want = np.array(dp_dalpha_mp(np.float32(POINT), float(np.float32(alpha))))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    assert (np.sign(got)[np.abs(want) > 1e-4] == np.sign(want)[np.abs(want) > 1e-4]).all()


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("soft", [False, True])
def test_gradient_in_alpha_of_the_loss(alpha, soft):
    x = torch.tensor(POINT)
    y = torch.tensor([0.2, 0.0, 0.5, 0.3, 0.0], dtype=D) if soft else torch.tensor(2)
    a = torch.tensor(alpha, dtype=D, requires_grad=True)
    A.entmax_loss(x, y, alpha=a).backward()

    # by the definition, whose derivative in alpha is -dOmega(p) + dOmega(y) at constant p
    def omega(q, a):
        q = [v for v in q if v > 0]
        if a == 1:
            return sum(v * mpmath.log(v) for v in q)
        return (sum(v**a for v in q) - sum(q)) / (a * (a - 1))

    with mpmath.workdps(40):
        h, b = mpmath.mpf(10) ** -12, mpmath.mpf(alpha)
        target = [mpmath.mpf(float(v)) for v in (y if soft else np.eye(5)[2])]

        def value(b):
            p = p_mp(POINT, b)
            return (
                sum((u - v) * mpmath.mpf(float(w)) for u, v, w in zip(p, target, POINT))
                - omega(p, b)
                + omega(target, b)
            )

        want = float((value(b + h) - value(b - h)) / (2 * h))
        worth = float(value(b))
    np.testing.assert_allclose(a.grad, want, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(A.entmax_loss(x, y, alpha=a.detach()), worth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.0, 1.0001, 1.01, 1.5, 3.0])
def test_gradient_in_alpha_of_the_loss_in_fp32(alpha):
    x = torch.tensor(POINT, dtype=torch.float32)
    a = torch.tensor(alpha, requires_grad=True)
    A.entmax_loss(x, torch.tensor(2), alpha=a).backward()
    b = torch.tensor(float(a.detach()), dtype=D, requires_grad=True)
    A.entmax_loss(x.double(), torch.tensor(2), alpha=b).backward()
    np.testing.assert_allclose(a.grad, b.grad, rtol=1e-4, atol=2e-6)


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
        with np.errstate(all="ignore"):
            want = np.array(dp_dalpha_mp(x.numpy(), alpha))
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


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "case",
    [
        ("budget", lambda x, k: A.budget(x, k), 1.7), ("budget whole", lambda x, k: A.budget(x, k), 2.3),
        ("budget sigmoid", lambda x, k: A.apply(A.Budget(k, "sigmoid"), x), 1.7),
        ("budget laplace", lambda x, k: A.apply(A.Budget(k, "laplace"), x), 2.3),
        ("normmax", lambda x, a: A.normmax(x, a), 2.0), ("normmax 1.3", lambda x, a: A.normmax(x, a), 1.3),
        ("normmax loss", lambda x, a: A.normmax_loss(x, T, alpha=a), 1.7), ("scale", lambda x, s: A.perturb_max(x, scale=s), 0.8),
        ("scale loss", lambda x, s: A.perturb_max_loss(x, T, scale=s), 0.8), ("entmax", A.entmax, 1.4), ("entmax flat", A.entmax, 0.8),
        ("entmax steep", A.entmax, 2.6), ("entmax one", A.entmax, 1.0), ("entmax loss", lambda x, a: A.entmax_loss(x, T, alpha=a), 1.4),
        ("logsumexp", lambda x, t: A.logsumexp(x, temperature=t), 0.7),
    ],
    ids=lambda c: c[0],
)  # fmt: skip
def test_parameters_by_differences_to_second_order(case):
    """The gradient, the second derivative and the mixed one, in the scores and in the parameter."""
    _, f, value = case
    x, theta = leaf(17, (3, 4)), torch.tensor(value, dtype=D, requires_grad=True)
    assert autograd.gradcheck(f, (x, theta), check_forward_ad=True)
    assert autograd.gradgradcheck(f, (x, theta), fast_mode="scale" in case[0])
    rows = torch.full((3, 1), value, dtype=D) + torch.tensor([[0.0], [0.05], [0.1]], dtype=D)
    assert autograd.gradcheck(f, (x, rows.requires_grad_()), fast_mode=True)


def test_mixed_derivatives_in_alpha_by_differences_of_the_plain_map():
    alpha, h = 1.4, 1e-4

    def p(a):
        return plainly.entmax(POINT, a)

    x, a = torch.tensor(POINT), torch.tensor(alpha, dtype=D)
    got = func.jacfwd(func.jacrev(lambda a: A.entmax(x, a)))(a)
    np.testing.assert_allclose(got, (p(alpha + h) - 2 * p(alpha) + p(alpha - h)) / h**2, rtol=1e-4, atol=1e-5)


def test_a_constant_alpha_takes_the_short_way():
    alpha = torch.tensor(1.3, dtype=D)
    x = leaf(18)
    torch.testing.assert_close(A.entmax(x, alpha), A.entmax(x, 1.3))
    A.entmax(x, alpha)[0, 0].backward()
    assert alpha.grad is None
