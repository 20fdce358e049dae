"""The derivatives of Sinkhorn in torch and JAX: those of n steps, and of the limit; against finite differences and the plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.autograd import gradcheck, gradgradcheck

from anymax.transport import Sinkhorn


def draw(*shape, seed=0, sigma=1.0):
    return sigma * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loop(x, iterations):
    """The plain loop, which autograd differentiates."""
    p = x.exp()
    for _ in range(iterations):
        p = p / p.sum(-1, keepdim=True)
        p = p / p.sum(-2, keepdim=True) * (p.shape[-2] / p.shape[-1])
    return p


ITERATIONS = pytest.mark.parametrize("iterations", [1, 3, None])
SHAPES = pytest.mark.parametrize("shape", [(4, 4), (2, 3), (5, 2)], ids=str)


@ITERATIONS
@SHAPES
def test_first_and_second_derivatives(iterations, shape):
    x = draw(2, *shape).requires_grad_()
    assert gradcheck(Sinkhorn(iterations), (x,))
    assert gradgradcheck(Sinkhorn(iterations), (x,))


@ITERATIONS
def test_derivatives_in_sums_and_temperature(iterations):
    def p(x, rows, columns, temperature):
        rows, columns = rows.exp(), columns.softmax(-1)
        return Sinkhorn(iterations, temperature)(x, rows=rows, columns=columns * rows.sum())

    given = draw(3, 4), draw(3, seed=1), draw(4, seed=2), draw(1, seed=3).exp()
    given = tuple(a.requires_grad_() for a in given)
    assert gradcheck(p, given)
    assert gradgradcheck(p, given)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (8, 8), (12, 20)], ids=str)
def test_the_gradient_of_n_steps_is_that_of_the_plain_loop(shape, dtype):
    x = draw(37, *shape, sigma=2.0).to(getattr(torch, dtype))
    g = draw(37, *shape, seed=1).to(x.dtype)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    Sinkhorn(20)(leaf).backward(g)
    loop(exact, 20).backward(g.double())
    scale = exact.grad.abs().max()
    bound = {"float32": 5e-6, "float64": 1e-13, "bfloat16": 1e-2}[dtype]
    assert leaf.grad.dtype == x.dtype
    assert (leaf.grad.double() - exact.grad).abs().max() <= bound * scale


@pytest.mark.parametrize("sigma", [0.5, 30.0])
def test_large_scores_have_the_gradient_of_the_loop_too(sigma):
    x = draw(16, 4, 4, sigma=sigma).float()
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    g = draw(16, 4, 4, seed=1)
    Sinkhorn(20)(leaf).backward(g.float())
    loop(exact, 20).backward(g)
    assert (leaf.grad.double() - exact.grad).abs().max() <= 2e-5 * max(1.0, exact.grad.abs().max())


def test_many_steps_have_the_gradient_of_the_limit():
    x = draw(5, 4, 4)
    g, found = draw(5, 4, 4, seed=1), []
    for iterations in (400, None):
        leaf = x.clone().requires_grad_()
        Sinkhorn(iterations)(leaf).backward(g)
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@pytest.mark.whole
@pytest.mark.parametrize("iterations", [5, None])
def test_masked_entries_have_no_gradient(iterations):
    x = draw(3, 5, 5)
    keep = (torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) < 0.6) | torch.eye(5, dtype=torch.bool)
    keep[2] = False  # a row without any entry
    keep[:, 2] = False
    for given in (
        lambda v: Sinkhorn(iterations)(v, mask=keep),
        lambda v: Sinkhorn(iterations)(v.masked_fill(~keep, -math.inf)),
    ):
        leaf = x.clone().requires_grad_()
        (given(leaf) * draw(3, 5, 5, seed=2)).sum().backward()
        assert torch.isfinite(leaf.grad).all()
        assert (leaf.grad[:, ~keep] == 0).all()
        assert (leaf.grad[:, keep] != 0).any()
    assert gradcheck(lambda v: Sinkhorn(iterations)(v, mask=keep), x.clone().requires_grad_())


def test_a_nan_does_not_reach_the_gradient_of_other_matrices():
    for iterations in (4, None):
        x = draw(6, 4, 4).float()
        want = x.clone().requires_grad_()
        (Sinkhorn(iterations)(want) * x).sum().backward()
        bad = x.clone()
        bad[2, 1, 1] = math.nan
        leaf = bad.requires_grad_()
        (Sinkhorn(iterations)(leaf) * x).sum().backward()
        others = torch.arange(6) != 2
        torch.testing.assert_close(leaf.grad[others], want.grad[others], rtol=1e-5, atol=1e-7)


# -- the ways of torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("iterations", [3, None])
def test_functional_transforms(iterations):
    x, v = draw(3, 3, 4), draw(3, 3, 4, seed=1)
    one = Sinkhorn(iterations)

    def value(a):
        return (one(a) ** 2).sum()

    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        (want,) = torch.autograd.grad(value(leaf), leaf)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(value))(x), want)
    p, moved = torch.func.jvp(one, (x,), (v,))
    step = 1e-6
    torch.testing.assert_close(moved, (one(x + step * v) - one(x - step * v)) / (2 * step), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(p, one(x))
    a = torch.func.vmap(torch.func.hessian(value))(x)
    torch.testing.assert_close(a, a.permute(0, 3, 4, 1, 2))


@pytest.mark.parametrize("iterations", [2, None])
def test_batches_of_gradients(iterations):
    x, g = draw(2, 4, 4).requires_grad_(), draw(5, 2, 4, 4, seed=1)
    p = Sinkhorn(iterations)(x)
    (got,) = torch.autograd.grad(p, x, g, is_grads_batched=True, retain_graph=True)
    want = torch.stack([torch.autograd.grad(p, x, one, retain_graph=True)[0] for one in g])
    torch.testing.assert_close(got, want)


@pytest.mark.whole
@pytest.mark.long
@pytest.mark.parametrize("iterations", [3, None])
@pytest.mark.filterwarnings("ignore")
def test_compiled(iterations):
    x, g = draw(5, 4, 4).float(), draw(5, 4, 4, seed=1).float()
    found = []
    for call in (Sinkhorn(iterations), torch.compile(Sinkhorn(iterations), fullgraph=True)):
        leaf = x.clone().requires_grad_()
        p = call(leaf)
        p.backward(g)
        found.append((p.detach(), leaf.grad))
    for eager, compiled in zip(*found):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


# -- JAX -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("iterations", [3, None])
def test_jax(iterations):
    jax = pytest.importorskip("jax")
    x = draw(3, 4, 4).numpy().astype(np.float32)
    one = Sinkhorn(iterations)

    def value(a):
        return (one(a) ** 2).sum()

    leaf = torch.from_numpy(x).double().requires_grad_()
    (want,) = torch.autograd.grad((one(leaf) ** 2).sum(), leaf)
    for way in (
        jax.grad(value),
        jax.jit(jax.grad(value)),
        jax.vmap(jax.grad(value)),
        jax.jit(jax.vmap(jax.grad(value))),
    ):
        np.testing.assert_allclose(way(x), want, rtol=1e-4, atol=2e-6)
    h = jax.jit(jax.hessian(value))(x[0])
    np.testing.assert_allclose(h, np.transpose(h, (2, 3, 0, 1)), atol=1e-4)
