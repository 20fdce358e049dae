"""Derivatives and compilers pass through transforms."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from transform_cases import ALL, INF, everyone

from anymax.transforms import (
    cosine,
    eta,
    minp,
    mix,
    normalize,
    prior,
    scalable,
    softcap,
    temperature,
    topk,
    topp,
    typical,
)


@everyone
def test_torch_gradients(name):
    torch = pytest.importorskip("torch")
    transform = ALL[name]
    x = torch.tensor(np.random.default_rng(4).normal(size=(3, 5)), requires_grad=True)
    sound = lambda v: (y := transform(v)).masked_fill(y == -INF, 0)  # noqa: E731
    assert torch.autograd.gradcheck(sound, x)
    assert torch.autograd.gradgradcheck(sound, x)
    if name == "cosine":
        return
    holes = x.detach().clone()
    holes[1, 2], holes[2] = -INF, -INF
    holes.requires_grad_()
    grad = torch.autograd.grad(sound(holes).sum(), holes)[0]
    assert torch.isfinite(grad).all()
    assert grad[1, 2] == 0
    assert (grad[2] == 0).all()


@pytest.mark.whole
@everyone
def test_jax_gradients_and_jit(name):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    transform = ALL[name]
    x = np.random.default_rng(4).normal(size=(3, 5)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(transform)(x), transform(jnp.asarray(x)), rtol=1e-6, atol=3e-7)
    if name not in ("temperature[]", "topk[]", "noise"):
        np.testing.assert_allclose(jax.jit(jax.vmap(transform))(x), transform(jnp.asarray(x)), rtol=1e-6, atol=3e-7)
    holes = x.copy()
    if name != "cosine":
        holes[1, 2], holes[2] = -INF, -INF
    weights = np.random.default_rng(5).normal(size=(3, 5))

    def value(v):
        y = transform(v)
        return jnp.where(y == -INF, 0, y * weights.astype(np.float32)).sum()

    def value64(v):
        y = transform(v)
        return np.where(y == -INF, 0, np.where(y == -INF, 0, y) * weights).sum()

    grad = np.asarray(jax.jit(jax.grad(value))(jnp.asarray(holes)))
    assert np.isfinite(grad).all()
    if name == "noise":
        return  # another stream of random numbers in NumPy
    for i, j in np.ndindex(*holes.shape):
        step = np.zeros(holes.shape)
        step[i, j] = 1e-6
        wide = holes.astype(np.float64)
        want = (value64(wide + step) - value64(wide - step)) / 2e-6
        assert abs(grad[i, j] - want) < 2e-4, (i, j)


@pytest.mark.parametrize("which", ["l1", "l2", "max", "standard"])
def test_normalize_has_no_nan_derivative_at_zero(which):
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 3, dtype=torch.float64)
    x[1, 0] = -1.0
    x.requires_grad_()
    y = normalize(which)(x)
    assert torch.isfinite(torch.autograd.grad(y.sum(), x)[0]).all()


def test_parameters_are_differentiable():
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    holes = x.clone()
    holes[0, 1] = -INF
    w = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    t = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    b = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64, requires_grad=True)
    clean = lambda y: y.masked_fill(y == -INF, 0)  # noqa: E731
    assert torch.autograd.gradcheck(lambda t: clean(temperature(t)(holes)), t)
    assert torch.autograd.gradcheck(lambda b: clean(prior(b, b)(holes)), b)
    g = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: clean(scalable(*a)(holes)), (t, g, b[:1].detach().requires_grad_()))
    assert torch.autograd.gradcheck(lambda w: cosine(w)(x), w)
    assert torch.autograd.gradcheck(lambda t: mix(x.softmax(-1), [0.2, 0.3, 0.5], t / 4), t)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "transform", [topk(3), topp(0.6), minp(0.1, 3), typical(0.6), eta(0.3, 2)], ids=lambda t: t.name
)
def test_a_trace_is_no_decision(transform):
    """torch.jit.trace keeps what was done for its example: that must be right for other scores, with ties, or spread out."""
    torch = pytest.importorskip("torch")
    peaked = torch.full((2, 64), -30.0)
    peaked[:, 5:9] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    traced = torch.jit.trace(lambda x: transform(x), peaked)
    draw = torch.Generator().manual_seed(0)
    for x in (torch.randn(2, 64, generator=draw), torch.randint(4, (2, 64), generator=draw) * 0.25):
        assert torch.equal(traced(x), transform(x))


@pytest.mark.whole
@everyone
def test_torch_compile_and_vmap(name):
    torch = pytest.importorskip("torch")
    transform = ALL[name]
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    if name not in ("noise", "xtc"):  # torch.compile cannot trace a torch.Generator
        torch._dynamo.reset()
        got = torch.compile(lambda v: transform(v), fullgraph=True, backend="eager")(x)
        torch.testing.assert_close(got, transform(x))
    if name not in ("temperature[]", "topk[]", "noise", "xtc"):
        torch.testing.assert_close(torch.func.vmap(transform)(x), transform(x))
        first = dataclasses.replace(transform, axis=0) if name != "compose" else transform
        cube = torch.stack([x.T, -x.T]) if name != "compose" else torch.stack([x, -x])
        torch.testing.assert_close(torch.func.vmap(first)(cube), torch.stack([first(c) for c in cube]))


def test_a_number_of_python_has_a_gradient_in_jax():
    """`jax.grad` at a float: JAX's constant of it is no array."""
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray([1.0, 2.0, 0.0])
    for make in (temperature, softcap):
        at_number, at_array = (jax.grad(lambda t, make=make: make(t)(x)[0])(t) for t in (1.5, jax.numpy.asarray(1.5)))
        assert float(at_number) == float(at_array) != 0.0
