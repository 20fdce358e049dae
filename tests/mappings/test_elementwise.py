"""`Elementwise`: the link of a map with a fixed threshold, against torch's own sigmoid, ReLU and binary losses."""

import math

import numpy as np
import pytest
import torch
from kinds import KINDS, back

import anymax as am

X = 2.0 * np.random.default_rng(0).standard_normal((5, 7))
T = torch.tensor(X)


@pytest.mark.parametrize("kind", KINDS)
def test_sigmoid_and_relu(kind):
    x = X.copy()
    x[1, 2], x[2], x[3, 0] = -math.inf, -math.inf, math.nan
    want = np.where(np.isneginf(x), 0.0, 1 / (1 + np.exp(-x)))
    want[3] = math.nan
    np.testing.assert_allclose(back(am.apply(am.Elementwise(), KINDS[kind](x))), want, rtol=1e-6)
    relu = np.where(np.isnan(want), want, np.maximum(np.where(np.isneginf(x), -1.0, x) - 0.3, 0.0))
    np.testing.assert_allclose(
        back(am.apply(am.Elementwise("relu", tau=0.3), KINDS[kind](x))), relu, rtol=1e-5, atol=1e-6
    )


def test_alpha_relu():
    """((alpha - 1) x - tau)_+^(1 / (alpha - 1)), with its tau divided by alpha - 1."""
    alpha, tau = 1.5, 0.4
    want = np.maximum((alpha - 1) * X - tau, 0.0) ** (1 / (alpha - 1))
    np.testing.assert_allclose(am.apply(am.Elementwise(am.Entmax(alpha), tau / (alpha - 1)), X), want, atol=1e-13)


def test_the_loss_is_a_sum_of_binary_ones():
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    y = torch.rand(X.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for target in (y, y.round(), torch.zeros_like(y)):
        entropy = (torch.special.entr(target) + torch.special.entr(1 - target)).sum(-1)
        got = am.fenchel_young(am.Elementwise(), T, target, reduction="none")
        torch.testing.assert_close(got, bce(T, target, reduction="none").sum(-1) - entropy)
    index = torch.tensor([0, 3, 6, -100, 2])
    got = am.fenchel_young(am.Elementwise(), T, index, reduction="none")
    one = torch.nn.functional.one_hot(index.clamp(min=0), 7).double()
    torch.testing.assert_close(got, bce(T, one, reduction="none").sum(-1) * (index >= 0))
    relu = am.fenchel_young(am.Elementwise("relu"), T, y, reduction="none")
    torch.testing.assert_close(relu, (0.5 * T.clamp(min=0) ** 2 + 0.5 * y**2 - T * y).sum(-1))
    for mapping in (
        am.Elementwise(am.Entmax(1.3)),
        am.Elementwise(am.Budget(1, shape="laplace"), 0.2),
        am.Elementwise("softmax", 1.0),
    ):
        x = T.clone().requires_grad_()
        p = am.apply(mapping, x)
        value = am.fenchel_young(mapping, x, p.detach())
        torch.testing.assert_close(value, torch.zeros_like(value), atol=1e-12, rtol=0)
        (slope,) = torch.autograd.grad(am.fenchel_young(mapping, x, 0.5 * p.detach(), reduction="sum"), x)
        torch.testing.assert_close(slope, 0.5 * p.detach())


@pytest.mark.whole
def test_derivatives_also_in_the_threshold():
    x = T.clone().requires_grad_()
    tau = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None].requires_grad_()
    for inner in ("sigmoid", "relu", am.Entmax(1.5)):
        f = lambda x, tau: am.apply(am.Elementwise(inner, tau), x)  # noqa: B023, E731
        assert torch.autograd.gradcheck(f, (x, tau))
        assert torch.autograd.gradgradcheck(f, (x, tau))
    y = torch.rand(X.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, tau: am.fenchel_young(am.Elementwise("sigmoid", tau), x, y), (x, tau))
    f = lambda x: am.apply(am.Elementwise(), x)  # noqa: E731
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="eager")(T), T.sigmoid())
    torch.testing.assert_close(torch.vmap(f)(T), T.sigmoid())
    jax = pytest.importorskip("jax")
    slope = jax.jit(jax.grad(lambda x: am.apply(am.Elementwise(), x).sum()))(jax.numpy.asarray(X))
    np.testing.assert_allclose(slope, T.sigmoid() * (1 - T.sigmoid()), atol=1e-6)


def test_sigmoid_attention():
    """sigmoid(q k / sqrt(d) - log n) v, a query that sees nothing gives 0; a module learns the threshold."""
    q, k, v = (
        torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(3)
    )
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    seen[2] = False
    want = ((q @ k.mT / 2 - math.log(6)).sigmoid() * seen) @ v
    mapping = am.Elementwise(tau=math.log(6))
    for implementation in ("reference", "blockwise"):
        torch.testing.assert_close(am.attention(q, k, v, mapping, mask=seen, implementation=implementation), want)
    tau = torch.full((3, 1, 1), math.log(6), dtype=torch.float64, requires_grad=True)
    out = am.attention(q, k, v, am.Elementwise(tau=tau), mask=seen)
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out.square().sum(), tau)[0]
    plain = tau.detach().requires_grad_()
    other = ((q @ k.mT / 2 - plain).sigmoid() * seen) @ v
    torch.testing.assert_close(got, torch.autograd.grad(other.square().sum(), plain)[0])
    layer = am.nn.Attention(8, 2, am.Elementwise(tau=torch.nn.Parameter(torch.zeros(2, 1, 1))), batch_first=True)
    layer(*[torch.randn(1, 5, 8)] * 3)[0].sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_other_verbs():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(am.log_apply(am.Elementwise(), T), torch.nn.functional.logsigmoid(T))
    w = torch.randn(7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.rand(3, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(
        am.linear_loss(x, w, y, am.Elementwise()), am.fenchel_young(am.Elementwise(), x @ w.T, y)
    )
    np.testing.assert_allclose(am.segment_apply(am.Elementwise(), X.ravel(), lengths=[3, 0, 32]), T.sigmoid().flatten())
    np.testing.assert_array_equal(am.threshold(am.Elementwise(tau=0.3), X).tau, np.full(5, 0.3))
