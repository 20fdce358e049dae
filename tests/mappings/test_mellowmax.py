"""mellowmax against its formula in 120 digits, its limits and its gradient."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery

import anymax as am
from anymax.thresholds import mellowmax


def wide(kind):
    """fp64 in JAX too."""
    return pytest.importorskip("jax").enable_x64(True) if kind == "jax" else contextlib.nullcontext()


mpmath = pytest.importorskip("mpmath")


def exact(row, omega):
    with mpmath.workdps(120):
        kept = [mpmath.mpf(float(v)) for v in row if v > -math.inf]
        if not kept:
            return -math.inf
        if omega == 0:
            return float(sum(kept) / len(kept))
        w = mpmath.mpf(float(omega))
        return float(mpmath.log(sum(mpmath.exp(w * v) for v in kept) / len(kept)) / w)


def rows(seed=0):
    x = np.random.default_rng(seed).normal(0, 2, (9, 7))
    x[0] = -math.inf
    x[1, 1:] = -math.inf
    x[2, ::2] = -math.inf
    x[3] = 0.7
    x[4] *= 1e3
    x[5] = 1e6 + 1e-3 * x[5]
    return x


@jax_in_the_whole_battery
@every_kind
def test_mellowmax_is_its_formula(kind):
    x = rows()
    with wide(kind):
        c = KINDS[kind]
        for omega in (1.0, 3.7, -2.0, 0.0, 1e-3, -1e-9, 1e-30, 40.0, 0.124, 1e5):
            got = back(mellowmax(c(x), omega))
            want = np.array([exact(r, omega) for r in x])
            np.testing.assert_allclose(got, want, rtol=4e-15, atol=4e-15)
        each = np.array([0.5, 1.0, -3.0, 2.0, 0.01, 0.7, 0.0, 1e-12, 8.0])
        got = back(mellowmax(c(x), c(each[:, None])))
        np.testing.assert_allclose(got, [exact(r, w) for r, w in zip(x, each)], rtol=4e-15, atol=4e-15)
    single = x.astype(np.float32)
    for omega in (1.0, 1e-3, 0.4, -2.0):
        got, want = back(mellowmax(KINDS[kind](single), omega)), np.array([exact(r, omega) for r in single])
        size = np.abs(np.where(single == -math.inf, 0, single)).max(-1)
        assert got[0] == -math.inf
        assert (np.abs(got[1:] - want[1:]) <= 3e-7 * size[1:]).all()


@jax_in_the_whole_battery
@every_kind
def test_limits_axes_masks_and_rows_that_are_lost(kind):
    c = KINDS[kind]
    x = np.random.default_rng(1).normal(size=(3, 4, 5)).astype(np.float32)
    for big, want in ((math.inf, x.max(-1)), (-math.inf, x.min(-1))):
        np.testing.assert_array_equal(back(mellowmax(c(x), big)), want)
    keep = x > -0.8
    got = back(mellowmax(c(x), 2.0, axis=(0, 2), mask=c(keep), keepdims=True))
    assert got.shape == (1, 4, 1)
    flat = np.where(keep, x, -math.inf).transpose(1, 0, 2).reshape(4, -1)
    np.testing.assert_allclose(got.ravel(), [exact(r, 2.0) for r in flat], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(
        back(mellowmax(c(x), 2.0, dim=1)), back(mellowmax(c(np.moveaxis(x, 1, -1).copy()), 2.0))
    )
    big = np.array([[3e38, -3e38, 0.0], [math.nan, 1.0, 2.0], [math.inf, 1.0, 2.0], [1.0, 1.0, 1.0]], np.float32)
    got = back(mellowmax(c(big), 1.0))
    assert got[0] == np.float32(3e38)
    assert np.isnan(got[1])
    assert got[2] == math.inf
    assert got[3] == 1.0


# torch's own, inside forward mode
@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")
def test_the_gradient_is_a_softmax():
    torch = pytest.importorskip("torch")
    x = torch.tensor(rows()[1:], requires_grad=True)
    for omega in (1.0, -0.3, 1e-4, 0.0):
        (g,) = torch.autograd.grad(mellowmax(x, omega).sum(), x)
        torch.testing.assert_close(g, am.softmax(omega * x.masked_fill(x == -math.inf, 0), mask=x > -math.inf))
    y = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    w = torch.tensor([[1.0], [-2.0], [0.0], [1e-3], [4.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(mellowmax, (y, w))
    assert torch.autograd.gradcheck(mellowmax, (y, w), check_forward_ad=True, check_batched_grad=True)
    torch.testing.assert_close(torch.func.vmap(lambda r: mellowmax(r, 0.7))(y), mellowmax(y, 0.7))


@pytest.mark.whole
@jax_in_the_whole_battery
@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_compilers(kind):
    module = pytest.importorskip(kind)
    x = np.random.default_rng(4).normal(size=(3, 6)).astype(np.float32)
    if kind == "torch":
        module._dynamo.reset()
        compiled = module.compile(lambda v, w: mellowmax(v, w), fullgraph=True, backend="eager")
    else:
        compiled = module.jit(mellowmax)
    for omega in (0.5, 7.0):
        w = KINDS[kind](np.full((3, 1), omega, np.float32))
        np.testing.assert_allclose(back(compiled(KINDS[kind](x), w)), mellowmax(x, omega), rtol=1e-5, atol=1e-6)
