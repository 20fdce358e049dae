"""torch: every order and mode of differentiation, exact in the scores."""

from __future__ import annotations

import pytest
from torch_cases import (
    FENCHEL,
    MAPS,
    SLOW,
    D,
    T,
    differences,
    every_loss,
    every_map,
    every_row_map,
    its_own_warnings,
    leaf,
    loss_of,
    of,
    over,
    scores,
    square_of,
)

torch = pytest.importorskip("torch")

import anymax as A

pytestmark = its_own_warnings
autograd, func = torch.autograd, torch.func


# -- eager ---------------------------------------------------------------------------------------------------------------------


@every_map
def test_gradients_by_differences(name):
    x = leaf(shape=(3, 4))
    assert autograd.gradcheck(of(name), x, check_batched_grad=True, check_forward_ad=True, fast_mode=name in SLOW)
    assert autograd.gradgradcheck(of(name), x, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.whole
@every_loss
def test_gradients_of_the_loss_by_differences(name):
    x = leaf(1, (3, 4))
    assert autograd.gradcheck(loss_of(name), x, check_batched_grad=True, check_forward_ad=True, fast_mode=name in SLOW)
    assert autograd.gradgradcheck(loss_of(name), x, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("loss", [A.nll, A.smoothed_nll, A.accuracy_loss])
@pytest.mark.whole(lambda name: name not in ("entmax0.7", "taylor"))
@pytest.mark.parametrize("name", ["softmax", "entmax0.7", "sigsoftmax", "taylor", "perturb_max"])
def test_gradients_of_the_kin_by_differences(name, loss):
    def f(x):
        return loss(MAPS[name], x, T)

    x = leaf(2, (3, 4))
    assert autograd.gradcheck(f, x, check_forward_ad=True, fast_mode=name in SLOW)
    assert autograd.gradgradcheck(f, x, fast_mode=True)


@every_map
def test_masked_classes_under_every_derivative(name):
    x = scores(3)
    x[0, 1] = x[1, 2:] = x[2] = -torch.inf
    v = torch.where(torch.isfinite(x), torch.ones_like(x), torch.zeros_like(x))
    x.requires_grad_()
    (g,) = autograd.grad(square_of(name)(x), x, create_graph=True)
    (h,) = autograd.grad((g * g).sum(), x)
    assert g.isfinite().all()
    assert h.isfinite().all()
    assert not g[v == 0].any()
    assert not h[v == 0].any()
    out, tangent = func.jvp(of(name), (x.detach(),), (v,))
    assert out.isfinite().all()
    assert tangent.isfinite().all()
    assert not tangent[v == 0].any()


def test_what_differs_from_torch():
    """The table of docs/numerics.md."""
    x = torch.tensor([[1.0, 2.0, -torch.inf, 0.0], [-torch.inf] * 4], dtype=torch.float64, requires_grad=True)
    assert not A.softmax(x)[1].any()
    assert torch.softmax(x, -1)[1].isnan().all()
    g = torch.tensor([[1.0, 2.0, 5.0, 3.0]], dtype=torch.float64)
    (ours,) = torch.autograd.grad(A.log_softmax(x[:1]), x, g)
    (theirs,) = torch.autograd.grad(torch.log_softmax(x[:1], -1), x, g)
    (same,) = torch.autograd.grad(torch.log_softmax(x[:1], -1), x, g * (x[:1].detach() > -torch.inf))
    torch.testing.assert_close(ours, same)
    assert (ours - theirs).abs().max() > 1
    nobody = torch.full((2,), -100)
    assert A.cross_entropy(x, nobody) == 0
    assert torch.nn.functional.cross_entropy(x, nobody).isnan()
    whole = torch.tensor([1, 2])
    torch.testing.assert_close(A.softmax(whole), torch.softmax(whole.float(), -1))
    with pytest.raises(NotImplementedError):
        torch.softmax(whole, -1)


@every_map
def test_nan_wanders_no_further_than_its_row(name):
    """NaN poisons its row's p and gradient, and nothing else."""
    x = scores(4)
    x[1, 2] = torch.nan
    x.requires_grad_()
    p = A.apply(MAPS[name], x)
    p[:, 0].sum().backward()
    assert p[1].isnan().all()
    assert p[[0, 2]].isfinite().all()
    if name != "ratio_traced":  # there automatic differentiation sees a constant NaN
        assert x.grad[1].isnan().any()
    assert x.grad[[0, 2]].isfinite().all()


# -- torch.func ------------------------------------------------------------------------------------------------------------------


@every_row_map
def test_jacobians(name):
    x = scores(6, (6,))
    want = differences(of(name), x)
    for jacobian in (func.jacrev, func.jacfwd):
        torch.testing.assert_close(jacobian(of(name))(x), want, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(
        A.jacobian(MAPS[name], x) if name != "ratio_traced" else want, want, rtol=1e-6, atol=1e-8
    )


@every_row_map
def test_vmap(name):
    x = scores(7, (2, 3, 6))
    want = of(name)(x)
    for dim in range(3):
        got = func.vmap(of(name), in_dims=dim, out_dims=dim)(x.movedim(0, dim) if dim < 2 else x.movedim(0, 2))
        torch.testing.assert_close(got, want.movedim(0, dim))
    torch.testing.assert_close(func.vmap(func.vmap(of(name)))(x), want)
    torch.testing.assert_close(func.vmap(of(name), in_dims=-1, out_dims=-1)(x.movedim(0, -1)), want.movedim(0, -1))


@every_row_map
def test_jvp_and_vjp(name):
    x, v = scores(8), scores(9)
    p, tangent = func.jvp(of(name), (x,), (v,))
    torch.testing.assert_close(p, of(name)(x))
    h = 1e-6
    torch.testing.assert_close(tangent, (of(name)(x + h * v) - of(name)(x - h * v)) / (2 * h), rtol=1e-5, atol=1e-8)
    _, pull = func.vjp(of(name), x)
    torch.testing.assert_close((pull(v)[0] * v).sum(), (tangent * v).sum())


@every_row_map
def test_hessian(name):
    x = scores(10, (6,))
    want = differences(func.grad(square_of(name)), x)
    torch.testing.assert_close(func.hessian(square_of(name))(x), want, rtol=1e-5, atol=1e-6)


@every_row_map
def test_gradients_per_sample(name):
    x = leaf(11)
    (want,) = autograd.grad(square_of(name)(x), x)
    torch.testing.assert_close(func.vmap(func.grad(square_of(name)))(x.detach()), want)


@over([n for n in FENCHEL if n != "entmax_rows"])
def test_the_loss_under_func(name):
    x = scores(12)
    f = loss_of(name)
    y = torch.nn.functional.one_hot(T, 6).to(D)
    p = of(name)(x)
    torch.testing.assert_close(func.grad(f)(x), p - y, rtol=1e-9, atol=1e-9)

    def single(z, t):
        return A.fenchel_young(MAPS[name], z, t)

    per_sample = func.vmap(func.grad(single))(x, T)
    torch.testing.assert_close(per_sample, p - y, rtol=1e-9, atol=1e-9)
    v = scores(13)
    torch.testing.assert_close(func.jvp(f, (x,), (v,))[1], ((p - y) * v).sum(), rtol=1e-9, atol=1e-9)
    want = differences(of(name), x[0])  # the Hessian of the loss is the Jacobian of the map
    torch.testing.assert_close(func.hessian(lambda z: single(z, T[0]))(x[0]), want, rtol=1e-5, atol=1e-7)


def test_vmap_over_alpha():
    x, alphas = scores(14), torch.tensor([1.0, 1.3, 2.0, 3.0], dtype=D)
    got = func.vmap(lambda a: A.entmax(x, a))(alphas)
    torch.testing.assert_close(got, torch.stack([A.entmax(x, float(a)) for a in alphas]))
    both = func.vmap(lambda z, a: A.entmax(z, a))(x, alphas[:3])
    torch.testing.assert_close(both, torch.stack([A.entmax(z, float(a)) for z, a in zip(x, alphas)]))
    grads = func.vmap(func.grad(lambda a: A.entmax(x[0], a)[0]))(alphas)
    h = 1e-6
    want = torch.stack([(A.entmax(x[0], float(a) + h) - A.entmax(x[0], float(a) - h))[0] / (2 * h) for a in alphas])
    torch.testing.assert_close(grads, want, rtol=1e-6, atol=1e-8)
