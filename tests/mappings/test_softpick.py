"""`Softpick` against a few lines of torch, in attention and in draws."""

import math

import numpy as np
import pytest
import torch
from kinds import KINDS, back

import anymax as am

X = 2.0 * np.random.default_rng(0).standard_normal((6, 8))


def plain(x, epsilon=1e-8):
    less = torch.expm1(x)
    return less.relu() / (less.abs().sum(-1, keepdim=True) + epsilon)


@pytest.mark.parametrize("kind", KINDS)
def test_values_masks_and_strange_rows(kind):
    x = X.copy()
    x[1, 3], x[2], x[3] = -math.inf, -math.inf, -1.0
    x[4, 0] = math.nan
    got = back(am.apply(am.Softpick(), KINDS[kind](x)))
    want = plain(torch.tensor(x).masked_fill(torch.tensor(np.isneginf(x)), 0.0)).numpy()
    want[2:4], want[4] = 0.0, math.nan
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    big = back(am.apply(am.Softpick(), KINDS[kind](np.array([[1000.0, 999.0, -1000.0], [-1000.0, 1e-6, 0.0]]))))
    np.testing.assert_allclose(
        big, [[1 / (1 + 1 / math.e), 1 / (1 + math.e), 0], [0, 1e-6 / (1 + 1e-6 + 1e-8), 0]], rtol=1e-4
    )


def test_derivatives_are_those_of_the_formula():
    x = torch.tensor(X, requires_grad=True)
    f = lambda x: am.apply(am.Softpick(), x)  # noqa: E731
    torch.testing.assert_close(f(x), plain(x))
    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x)
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="eager")(x), plain(x))
    jax = pytest.importorskip("jax")
    g = np.random.default_rng(1).standard_normal(X.shape)
    slope = jax.jit(jax.grad(lambda x: (am.apply(am.Softpick(), x) * g).sum()))(jax.numpy.asarray(X))
    np.testing.assert_allclose(slope, torch.autograd.grad((plain(x) * torch.tensor(g)).sum(), x)[0], atol=1e-5)


def test_attention_and_draws():
    q, k, v = (
        torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(3)
    )
    scores = (q @ k.mT / 2).masked_fill(~torch.ones(6, 6).tril().bool(), 0.0)
    for implementation in ("reference", "blockwise"):
        got = am.attention(q, k, v, am.Softpick(), is_causal=True, implementation=implementation)
        torch.testing.assert_close(got, plain(scores) @ v)
    x = np.tile([1.0, 0.5, -2.0], (20_000, 1))
    p = am.apply(am.Softpick(), x[0])
    drawn = am.sample(am.Softpick(), x, generator=0, return_log_prob=True)
    share = [(drawn.index == i).mean() for i in (-1, 0, 1, 2)]
    np.testing.assert_allclose(share, [1 - p.sum(), *p], atol=0.01)
    np.testing.assert_allclose(drawn.log_prob, np.log(np.append(p[:2], 1 - p.sum()))[drawn.index])
    assert am.sample(am.Softpick(), [-1.0, -2.0], generator=0) == -1


@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 0.5, 30.0])
def test_epsilon_stands_beside_the_sum(epsilon):
    """In floats and doubles, of rows whose scores are small, large, all below 0, and masked."""
    x = np.random.default_rng(0).normal(size=(5, 40)) * np.array([[1.0], [1e-3], [30.0], [1.0], [1.0]])
    x[3], x[4, ::3] = -np.abs(x[3]), -np.inf
    less = np.expm1(x)
    with np.errstate(invalid="ignore"):
        want = np.maximum(less, 0.0) / (np.abs(np.where(x > -np.inf, less, 0.0)).sum(-1, keepdims=True) + epsilon)
    for dtype, rtol in ((np.float64, 1e-13), (np.float32, 4e-6)):
        np.testing.assert_allclose(am.apply(am.Softpick(epsilon), x.astype(dtype)), want, rtol=rtol, atol=1e-30)
