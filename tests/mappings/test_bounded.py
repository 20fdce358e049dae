"""Bounded: entmax under an upper bound for each class, against bisection in 50 digits; its gradients in the bounds; its losses."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery

import anymax as am

INF = math.inf
ALPHAS = (1.0, 1.3, 1.5, 2.0)


def exact(x, u, alpha):
    out = np.zeros(x.shape)
    for i, (row, most) in enumerate(zip(x, np.broadcast_to(u, x.shape), strict=True)):
        keep = row > -INF
        if keep.any():
            out[i, keep] = [float(v) for v in oracles.bounded(most[keep], alpha)(row[keep])]
    return out


def rows(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (12, 7)) * np.repeat([0.1, 1, 20.0], 4)[:, None]
    u = rng.uniform(0, 1, (12, 7)) * rng.choice([0.3, 1.0, 2.0], (12, 1))
    x[0] = -INF
    x[1, ::2] = -INF
    u[2, :3] = 0.0
    u[3] = 0.05  # sums to less than 1
    u[4] = 0.0
    u[5] = INF
    x[6] = 0.5  # equal scores
    return x, u


@jax_in_the_whole_battery
@every_kind
@pytest.mark.parametrize("alpha", ALPHAS)
def test_p_is_that_of_bisection(kind, alpha):
    c = KINDS[kind]
    x, u = rows()
    for dtype, atol in ((np.float64, 2e-15), (np.float32, 4e-7)):
        if kind == "jax" and dtype is np.float64:
            continue
        y, v = x.astype(dtype), u.astype(dtype)
        want = exact(y, v, alpha)
        got = back(am.apply(am.Bounded(c(v), alpha), c(y)))
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, atol=atol)
        assert (got <= v).all()
        np.testing.assert_allclose(back(am.apply(am.Bounded(0.3, alpha), c(y))), exact(y, 0.3, alpha), atol=atol)
        # bounds of classes, for all rows
        each = back(am.apply(am.Bounded(c(v[0]), c(np.full((12, 1), alpha, dtype))), c(y)))
        np.testing.assert_allclose(each, exact(y, v[0], alpha), atol=3 * atol)


def test_without_a_bound_that_matters_it_is_entmax():
    x = np.random.default_rng(1).normal(0, 3, (50, 9))
    for alpha in ALPHAS:
        np.testing.assert_allclose(am.apply(am.Bounded(1.0, alpha), x), am.entmax(x, alpha), atol=2e-15)
    np.testing.assert_allclose(am.apply(am.Bounded(np.full(9, 7.0)), x), am.sparsemax(x), atol=1e-15)


def test_fertility():
    """What it is for: attention spends the budget of each source word step by step, and none is exceeded."""
    rng = np.random.default_rng(2)
    left = np.full(6, 1.5)
    for _ in range(8):
        p = am.apply(am.Bounded(np.clip(left, 0, None)), rng.normal(0, 2, 6))
        left = left - p
        np.testing.assert_allclose(p.sum(), 1.0)
    assert (left > -1e-12).all()
    np.testing.assert_allclose(left.sum(), 1.0)


def test_large_scores_with_bounds_of_their_own():
    """A common offset so large that the differences between bounds vanish beside it."""
    u = np.array([0.3, 0.2, 0.5, 0.9, 0.05, 0.6, 0.1])
    want = am.apply(am.Bounded(u), np.zeros(7))
    for far in (1e17, 1e300, -1e300):
        np.testing.assert_allclose(am.apply(am.Bounded(u), np.full(7, far)), want, atol=1e-14)
        short = np.array([0.3, 0.2, 0.1, 0.1, 0.05, 0.1, 0.1])
        np.testing.assert_array_equal(am.apply(am.Bounded(short), np.full(7, far)), short)


def test_derivatives():
    torch = pytest.importorskip("torch")
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(4, 5, generator=draw).double().requires_grad_()
    u = (0.05 + 0.55 * torch.rand(4, 5, generator=draw)).double().requires_grad_()
    a = torch.tensor([[1.05], [1.2], [1.5], [1.9]], dtype=torch.float64, requires_grad=True)
    f = lambda x, u, a: am.apply(am.Bounded(u, a), x)  # noqa: E731
    assert torch.autograd.gradcheck(f, (x, u, a))
    assert torch.autograd.gradgradcheck(f, (x, u, a))
    for alpha in ALPHAS:
        assert torch.autograd.gradcheck(lambda x, u: am.apply(am.Bounded(u, alpha), x), (x, u))  # noqa: B023
    # bounds that sum to less than 1: p is u, and has no gradient in x
    short = (0.1 * u).detach().requires_grad_()
    p = am.apply(am.Bounded(short, 1.5), x)
    gx, gu = torch.autograd.grad((p * torch.arange(5.0)).sum(), (x, short))
    assert not gx.any()
    torch.testing.assert_close(gu, torch.arange(5.0, dtype=torch.float64).expand(4, 5))


def test_the_gradient_of_half_precision_knows_which_classes_have_their_bound():
    """p is saved rounded: below a bound of 0.3 in fp16, which is 0.29998."""
    torch = pytest.importorskip("torch")
    x = torch.tensor([[2.0, 1.0, 0.9, 0.8]])
    for dtype in (torch.float16, torch.bfloat16):
        h = x.to(dtype).requires_grad_()
        w = torch.tensor([1.0, 2.0, 5.0, 7.0])
        for upper in (0.3, 0.31, 0.37, torch.full((4,), 0.3)):
            (got,) = torch.autograd.grad((am.apply(am.Bounded(upper), h) * w.to(dtype)).sum(), h)
            y = h.detach().float().requires_grad_()
            (want,) = torch.autograd.grad((am.apply(am.Bounded(upper), y) * w).sum(), y)
            torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)


def test_losses():
    torch = pytest.importorskip("torch")
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(4, 5, generator=draw).double().requires_grad_()
    u = (0.15 + 0.5 * torch.rand(4, 5, generator=draw)).double().requires_grad_()
    a = torch.tensor([[1.05], [1.2], [1.5], [1.9]], dtype=torch.float64, requires_grad=True)
    y = 0.5 * am.apply(am.Bounded(u.detach(), 1.5), torch.randn(4, 5, generator=draw).double())
    y = y + 0.5 * am.apply(am.Bounded(0.9 * u.detach(), 1.2), torch.randn(4, 5, generator=draw).double())
    loss = lambda x, u, a: am.fenchel_young(am.Bounded(u, a), x, y, reduction="none")  # noqa: E731
    assert (loss(x, u, a) > 0).all()
    p = am.apply(am.Bounded(u, a), x)
    torch.testing.assert_close(torch.autograd.grad(loss(x, u, a).sum(), x)[0], p - y)
    assert float(am.fenchel_young(am.Bounded(u, a), x, p.detach()).detach().abs()) < 1e-14
    assert torch.autograd.gradcheck(loss, (x, u, a))
    assert torch.autograd.gradgradcheck(loss, (x, u, a))


@pytest.mark.whole
def test_jax_derivatives():
    jax = pytest.importorskip("jax")
    x, u = (a.astype(np.float32) for a in rows(7))
    x, u = x[7:], u[7:] + 0.02
    f = jax.jit(lambda x, u: (am.apply(am.Bounded(u, 1.5), x) * np.arange(7, dtype=np.float32)).sum())
    gx, gu = jax.grad(f, (0, 1))(x, u)
    torch = pytest.importorskip("torch")
    tx, tu = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, u))
    (am.apply(am.Bounded(tu, 1.5), tx) * torch.arange(7)).sum().backward()
    np.testing.assert_allclose(gx, tx.grad, atol=2e-5)
    np.testing.assert_allclose(gu, tu.grad, atol=2e-5)
    np.testing.assert_allclose(
        jax.vmap(lambda x, u: am.apply(am.Bounded(u), x))(x, u), am.apply(am.Bounded(u), x), atol=1e-6
    )


@pytest.mark.whole
@pytest.mark.parametrize("alpha", [2.0, 1.0])
def test_the_contract(alpha):
    for upper in (0.4, np.array([0.3, 0.2, 0.5, 0.9, 0.05, 0.6, 0.1])):
        assert len(am.check_mapping(am.Bounded(upper, alpha))) >= 10


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_threshold_gives_p(alpha):
    x, u = rows(9)
    x, u = x[6:], u[6:] + 0.2
    tau, support = am.threshold(am.Bounded(u, alpha), x)
    t = (alpha - 1) * (x - tau[:, None])
    free = np.exp(x - tau[:, None]) if alpha == 1 else np.maximum(t, 0) ** (1 / max(alpha - 1, 1e-9))
    p = am.apply(am.Bounded(u, alpha), x)
    np.testing.assert_allclose(np.minimum(free, np.minimum(u, 1)), p, atol=1e-13)
    np.testing.assert_array_equal(support, (p > 0).sum(-1))
