"""torch: every order and mode of differentiation, exact in the scores and in every parameter, and the manners of a tensor."""

from __future__ import annotations

import contextlib
import itertools

import mpmath
import numpy as np
import plainly
import pytest
from cases import whole

torch = pytest.importorskip("torch")

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Ratio, Sigsoftmax, Softmax, Sparsemax, SparseSoftmax, Taylor
from anymax.kernels.support import Saved

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*torch.jit.script.*is deprecated:DeprecationWarning"
    ),  # torch's own, in forward AD
]
autograd, func = torch.autograd, torch.func
D = torch.float64

MAPS = whole(
    {
        "softmax": Softmax(),
        "sparsemax": Sparsemax(),
        "entmax1.5": Entmax(1.5),
        "entmax1.25": Entmax(1.25),
        "entmax1": Entmax(1.0),
        "entmax0.7": Entmax(0.7),
        "entmax3": Entmax(3.0),
        "entmax_rows": Entmax(torch.tensor([[1.0], [1.5], [3.0]], dtype=D)),
        "budget": Budget(1.5),
        "normmax": NormMax(2.0),
        "normmax1.5": NormMax(1.5),
        "taylor": Taylor(2),
        "sigsoftmax": Sigsoftmax(),
        "ratio": Ratio.sigmoid(),
        "ratio_traced": Ratio(lambda x: (1.0 + x * x).log1p()),
        "sparse_softmax_k": SparseSoftmax(k=3),
        "sparse_softmax_p": SparseSoftmax(p=0.8),
        "perturb_max": PerturbMax(),
        "perturb_gumbel": PerturbMax("gumbel"),
    }
)
FENCHEL = [n for n, m in MAPS.items() if m.facts.has_potential and n != "budget"]
ROWS = [n for n in MAPS if n != "entmax_rows"]  # one mapping for any row
SLOW = ("entmax_rows", "perturb_max", "perturb_gumbel")
every_map = pytest.mark.parametrize("name", MAPS)
every_row_map = pytest.mark.parametrize("name", ROWS)
every_loss = pytest.mark.parametrize("name", FENCHEL)
T = torch.tensor([0, 3, 2])


def scores(seed=0, shape=(3, 6)):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def leaf(seed=0, shape=(3, 6)):
    return scores(seed, shape).requires_grad_()


def of(name):
    return lambda x: A.apply(MAPS[name], x)


def loss_of(name):
    return lambda x: A.fenchel_young(MAPS[name], x, T, reduction="sum")


def square_of(name):
    return lambda x: (A.apply(MAPS[name], x) ** 2).sum()


def differences(f, x, h=1e-6):
    """df/dx by central differences, [*f, *x], in NumPy."""
    x = x.detach()
    columns = []
    for i in np.ndindex(*x.shape):
        d = torch.zeros_like(x)
        d[i] = h
        columns.append((f(x + d) - f(x - d)).detach() / (2 * h))
    return torch.stack(columns, -1).reshape(*columns[0].shape, *x.shape)


# -- eager ---------------------------------------------------------------------------------------------------------------------


@every_map
def test_gradients_by_differences(name):
    x = leaf(shape=(3, 4))
    assert autograd.gradcheck(of(name), x, check_batched_grad=True, check_forward_ad=True, fast_mode=name in SLOW)
    assert autograd.gradgradcheck(of(name), x, check_fwd_over_rev=True, fast_mode=True)


@every_loss
def test_gradients_of_the_loss_by_differences(name):
    x = leaf(1, (3, 4))
    assert autograd.gradcheck(loss_of(name), x, check_batched_grad=True, check_forward_ad=True, fast_mode=name in SLOW)
    assert autograd.gradgradcheck(loss_of(name), x, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("loss", [A.nll, A.smoothed_nll, A.accuracy_loss])
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


@every_map
def test_func_grad(name):
    x = leaf(5)
    (want,) = autograd.grad(square_of(name)(x), x)
    torch.testing.assert_close(func.grad(square_of(name))(x.detach()), want)


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
    x = scores(11)
    got = func.vmap(func.grad(square_of(name)))(x)
    want = torch.stack([func.grad(square_of(name))(row) for row in x])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", [n for n in FENCHEL if n != "entmax_rows"])
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


# -- parameters ---------------------------------------------------------------------------------------------------------------------


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


# -- the manners of a tensor -----------------------------------------------------------------------------------------------------------


@every_map
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_halves_are_computed_in_fp32(name, dtype):
    x = scores(19).to(dtype).requires_grad_()
    p = A.apply(MAPS[name], x)
    assert p.dtype == dtype
    (p.float() * torch.arange(6)).sum().backward()
    assert x.grad.dtype == dtype
    wide = x.detach().double().requires_grad_()
    q = A.apply(MAPS[name], wide)
    (q * torch.arange(6)).sum().backward()
    eps = float(torch.finfo(dtype).eps)
    torch.testing.assert_close(p.double(), q, rtol=eps, atol=max(1e-7 if dtype != torch.float32 else 1e-6, 1e-6))
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=0, atol=16 * eps)


@pytest.mark.parametrize(
    "name", ["softmax", "sparsemax", "entmax1.5", "entmax1.25", "normmax", "taylor", "perturb_max"]
)
def test_autocast(name):
    """A map keeps bf16, as torch.softmax does on a CPU; a loss is fp32, as torch's are."""
    mapping, layer = MAPS[name], torch.nn.Linear(6, 6)
    x = scores(20).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = layer(x)
        p = A.apply(mapping, h)
        loss = (A.fenchel_young if mapping.facts.has_potential else A.nll)(mapping, h, T)
    assert h.dtype == p.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    want = (A.fenchel_young if mapping.facts.has_potential else A.nll)(mapping, h.float(), T)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    loss.backward()
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.any()


@every_map
def test_no_graph_is_kept_without_a_gradient(name):
    x = leaf(21)
    with torch.no_grad():
        p = A.apply(MAPS[name], x)
    assert p.grad_fn is None
    assert not p.requires_grad
    q = A.apply(MAPS[name], x.detach())
    assert q.grad_fn is None
    with torch.inference_mode():
        r = A.apply(MAPS[name], scores(21))
    assert r.is_inference()
    torch.testing.assert_close(p, q)
    torch.testing.assert_close(p, r.clone())


def test_no_graph_is_kept_for_a_parameter_without_a_gradient():
    alpha = torch.tensor(1.5, requires_grad=True)
    with torch.no_grad():
        assert not A.entmax(scores(), alpha).requires_grad
    assert A.entmax(scores(), alpha).requires_grad


@every_map
def test_leaves_and_versions_are_left_alone(name):
    x = leaf(22)
    before, version = x.detach().clone(), x._version
    A.apply(MAPS[name], x).sum().backward()
    assert x._version == version
    assert x.is_leaf
    assert x.requires_grad
    assert torch.equal(x, before)


@every_row_map
def test_strides_and_axes(name):
    x = scores(23, (4, 6, 3))
    want = A.apply(MAPS[name], x.transpose(1, 2).contiguous())
    torch.testing.assert_close(A.apply(MAPS[name], x, 1).transpose(1, 2), want)
    torch.testing.assert_close(A.apply(MAPS[name], x, dim=-2).transpose(1, 2), want)
    torch.testing.assert_close(A.apply(MAPS[name], x.transpose(1, 2)), want)
    wide = scores(24, (4, 12))
    torch.testing.assert_close(A.apply(MAPS[name], wide[:, ::2]), A.apply(MAPS[name], wide[:, ::2].contiguous()))
    row = scores(25, (6,))
    torch.testing.assert_close(A.apply(MAPS[name], row.expand(4, 6)), A.apply(MAPS[name], row).expand(4, 6))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = scores(26, (4, 6, 3))
    (A.apply(MAPS[name], a, 1) * weights).sum().backward()
    (A.apply(MAPS[name], b.transpose(1, 2)) * weights.transpose(1, 2)).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    assert A.apply(MAPS[name], torch.zeros(0, 6, dtype=D)).shape == (0, 6)


@every_row_map
def test_out(name):
    x = scores(27)
    out = torch.full_like(x, torch.nan)
    assert A.apply(MAPS[name], x, out=out) is out
    torch.testing.assert_close(out, A.apply(MAPS[name], x))
    with pytest.raises(ValueError, match="out= can't be used where a gradient is asked for"):
        A.apply(MAPS[name], leaf(27), out=out)
    with torch.no_grad():
        A.apply(MAPS[name], leaf(27), out=out)


def test_out_must_fit():
    with pytest.raises(ValueError, match=r"expected shape \(3, 6\)"):
        A.softmax(scores(), out=torch.zeros(3, 5, dtype=D))
    with pytest.raises(ValueError, match=r"torch\.float64"):
        A.softmax(scores(), out=torch.zeros(3, 6))
    with pytest.raises(TypeError, match="expected a writable Tensor"):
        A.softmax(scores(), out=np.zeros((3, 6)))


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax1.25", "taylor", "perturb_max"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(name, reentrant):
    from torch.utils.checkpoint import checkpoint

    a, b = leaf(28), leaf(28)
    (checkpoint(of(name), a, use_reentrant=reentrant) ** 2).sum().backward()
    square_of(name)(b).backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_a_gradient_twice_through_one_graph():
    x = leaf(29)
    p = A.sparsemax(x)
    p[0, 0].backward(retain_graph=True)
    first = x.grad.clone()
    p[0, 0].backward()
    torch.testing.assert_close(x.grad, 2 * first)


def test_a_subclass_and_a_parameter():
    w = torch.nn.Parameter(scores(30))
    A.entmax15(w).pow(2).sum().backward()
    assert w.grad is not None
    assert type(A.entmax15(w)) is torch.Tensor


def test_the_dtype_argument():
    assert A.softmax(scores().half(), dtype=torch.float32).dtype == torch.float32
    assert A.sparsemax(torch.tensor([1, 2]), dtype=torch.float64).dtype == D
    assert A.sparsemax(torch.tensor([1, 2])).dtype == torch.get_default_dtype()


def test_meta_tensors_give_shapes():
    x = torch.empty(3, 6, device="meta")
    for name in ("softmax", "taylor"):
        assert A.apply(MAPS[name], x).shape == (3, 6)


@pytest.mark.parametrize("op", ["forward", "vjp", "hold"])
@pytest.mark.parametrize(
    "name", ["sparsemax", "entmax1.25", "entmax_rows", "entmax3", "budget", "normmax", "perturb_max"]
)
def test_opcheck(op, name):
    from anymax.autodiff.torch_operations import spec_of

    mapping = MAPS[name]
    x = scores(31)
    params, spec = list(mapping.params().values()), spec_of(mapping)
    p = A.apply(mapping, x)
    args = {"forward": (x, params, spec), "vjp": (x, p, scores(32), params, spec), "hold": (x, params, spec)}[op]
    torch.library.opcheck(getattr(torch.ops.anymax, op).default, args, raise_exception=True)
    strided = tuple(a.transpose(0, 1).contiguous().transpose(0, 1) if a is x else a for a in args)
    torch.library.opcheck(getattr(torch.ops.anymax, op).default, strided, test_utils="test_faketensor")


# -- what comes back from the graph is not always what was saved -----------------------------------------------------------------

ROWS_OF_SCORES = torch.randn(64, 512, generator=torch.Generator().manual_seed(33))
CLASSES = torch.arange(64) * 7
HOOKED = {
    "softmax": lambda x: A.softmax(x).pow(2).sum(),
    "sparsemax": lambda x: A.sparsemax(x).pow(2).sum(),
    "axis": lambda x: A.entmax15(x, axis=0).pow(2).sum(),
    "mask": lambda x: A.sparsemax(x, mask=torch.arange(512) > 5).pow(2).sum(),
    "sigsoftmax": lambda x: A.sigsoftmax(x).pow(2).sum(),
    "log_softmax": lambda x: A.log_softmax(x)[:, 3].sum(),
    "cross_entropy": lambda x: A.cross_entropy(x, CLASSES),
    "sparsemax_loss": lambda x: A.sparsemax_loss(x, CLASSES),
    "loss_of_each": lambda x: A.sparsemax_loss(x, CLASSES, reduction="none").square().sum(),
    "loss_ignored": lambda x: A.cross_entropy(x, CLASSES.where(CLASSES > 9, -100)),
    "attention": lambda x: A.attention(*x.view(1, 8, 64, 64).expand(3, -1, -1, -1, -1), Sparsemax()).square().sum(),
    "blockwise": lambda x: (
        A.attention(*3 * x.view(1, 2, 256, 64).expand(3, -1, -1, -1, -1), Sparsemax(), implementation="blockwise")
        .square()
        .sum()
    ),
    "linear": lambda x: A.linear_attention(*x.view(8, 64, 64).expand(3, -1, -1, -1)).square().sum(),
}
UNPACK = {
    "double": lambda t: t.double() if t.is_floating_point() else t,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "negated": lambda t: torch._neg_view(-t) if t.is_floating_point() else t,
}


def gradient_of(f, hooks=None):
    x = ROWS_OF_SCORES.clone().requires_grad_()
    with hooks or contextlib.nullcontext():
        out = f(x)
    out.backward()
    return x.grad


@pytest.mark.parametrize("unpack", UNPACK)
@pytest.mark.parametrize("f", HOOKED)
def test_hooks_may_give_back_another_float_or_other_strides(f, unpack):
    if f == "attention" and unpack == "double":
        pytest.skip("torch's own product of matrices refuses it")
    want = gradient_of(HOOKED[f])
    got = gradient_of(HOOKED[f], autograd.graph.saved_tensors_hooks(lambda t: t, UNPACK[unpack]))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("f", ["sparsemax", "axis", "mask", "softmax", "blockwise", "linear"])
def test_hooks_that_round_everything(f):
    """A map saves nothing but floats then; torch's own losses and ours refuse a target that was made one."""
    want = gradient_of(HOOKED[f])
    hooks = autograd.graph.saved_tensors_hooks(lambda t: (t.dtype, t.bfloat16()), lambda s: s[1].to(s[0]))
    got = gradient_of(HOOKED[f], hooks)
    assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("f", ["cross_entropy", "sparsemax_loss", "loss_of_each", "loss_ignored"])
@pytest.mark.parametrize("wrong", [torch.Tensor.bfloat16, torch.Tensor.int, lambda t: t[1:]])
def test_a_target_that_came_back_as_another_is_refused(f, wrong):
    with autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t if t.is_floating_point() else wrong(t)):
        loss = HOOKED[f](ROWS_OF_SCORES.clone().requires_grad_())
        with pytest.raises(RuntimeError, match=r"was saved, and .* came back; a hook of saved tensors"):
            loss.backward()


@pytest.mark.parametrize("wrong", [torch.Tensor.long, lambda t: t[..., 1:], torch.Tensor.to_sparse, torch.Tensor.ravel])
@pytest.mark.parametrize("f", ["softmax", "sparsemax", "axis", "blockwise", "linear", "log_softmax"])
def test_floats_that_came_back_as_another_kind_or_shape_are_refused(f, wrong):
    leaf = ROWS_OF_SCORES.clone().requires_grad_()
    with autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t if t is leaf else wrong(t)):
        p = HOOKED[f](leaf * 1.0)
        with pytest.raises(RuntimeError):
            p.backward()


def with_index(memory, place, value):
    """A saved support whose first row has another class at a place."""
    saved = Saved(memory.clone(), len(ROWS_OF_SCORES), 1)
    assert int(saved.count[0]) >= 2
    saved.index[0, place(int(saved.count[0]))] = value(saved.index[0])
    return saved.memory


WRONG = [torch.Tensor.float, lambda t: t.flip(0), lambda t: t + 1000, lambda t: t.int() * 0 - 7, lambda t: t[:-1]]
TWICE = lambda t: with_index(t, lambda count: 1, lambda index: index[0])  # noqa: E731
BEYOND = lambda t: with_index(t, lambda count: count - 1, lambda index: ROWS_OF_SCORES.shape[1])  # noqa: E731


@pytest.mark.parametrize("f", [A.sparsemax, lambda x: A.sparsemax_loss(x, CLASSES)])
@pytest.mark.parametrize("wrong", [*WRONG, TWICE, BEYOND])
def test_a_support_that_came_back_as_another_is_refused(f, wrong):
    out = f(ROWS_OF_SCORES.clone().requires_grad_())
    memory = out.grad_fn._raw_saved_tensors[-1]
    memory.register_hooks(lambda t: t, wrong)
    with pytest.raises(RuntimeError, match=r"came back; a hook|the saved support has changed"):
        out.sum().backward()


@pytest.mark.parametrize("f", ["cross_entropy", "sparsemax_loss", "loss_of_each", "log_softmax", "sigsoftmax"])
def test_scores_that_were_assigned_to_since(f):
    x = ROWS_OF_SCORES.clone().requires_grad_()
    out = HOOKED[f](x)
    x.data = x.data[:, :100]
    with pytest.raises(RuntimeError):
        out.backward()


# -- what torch refuses, and what it once refused without saying why -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "f",
    [
        lambda x: A.entmax(x, 3.0),
        lambda x: A.sparse_softmax(x, p=0.8),
        lambda x: A.topp(0.8)(x),
        lambda x: A.sparse_softmax(x, p=1.0),
    ],
)
def test_jit_trace(f):
    x, y = scores(34), scores(35, (5, 6))
    torch.testing.assert_close(torch.jit.trace(f, x)(y), f(y))


def test_out_of_inference_mode_is_refused_as_torch_refuses_it():
    x = scores(36)
    with torch.inference_mode():
        out = torch.zeros_like(x)
        assert A.softmax(x, out=out) is out
    for options in ({}, {"mask": x > 0}, {"axis": 0}):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
            A.softmax(x, out=out, **options)


def test_a_batch_of_parameters_along_a_later_axis():
    x, alpha = torch.randn(3, 5, 7, dtype=torch.float64), 1.2 + torch.rand(5, 1, 3, dtype=torch.float64)
    y = torch.tensor([0, 3, 6, 2, 2])

    def loss(x, alpha):
        return A.entmax_loss(x, y, alpha=alpha)

    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, 2))(x, alpha)
    for i in range(3):
        want = torch.func.grad(loss, argnums=(0, 1))(x[i], alpha[..., i])
        torch.testing.assert_close([got[0][i], got[1][i]], list(want))


def test_the_price_of_a_budget():
    x = torch.tensor([[2.0, 1.9, 1.5, -1.0], [3.0, 2.5, 2.2, 0.1]], dtype=torch.float64)
    k = torch.tensor([[2.0], [2.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    A.fenchel_young(Budget(k), x, y, reduction="sum").backward()
    # Omega* = max of <p, x> - |p|^2 / 2 + k / 2 over the p of mass k, by differences of p itself
    value = lambda k: (x * (p := A.budget(x, k)) - p * p / 2).sum(-1, keepdim=True) + k / 2  # noqa: E731
    h = 1e-4
    torch.testing.assert_close(k.grad, (value(k.detach() + h) - value(k.detach() - h)) / (2 * h), atol=1e-6, rtol=0)


# -- no rows ---------------------------------------------------------------------------------------------------------------------------


def _no_rows(mapping, x):
    """Every verb on no rows at all."""
    t, y = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 5)
    yield A.apply(mapping, x)
    yield A.apply(mapping, x, mask=torch.ones(0, 5, dtype=torch.bool))
    yield A.log_apply(mapping, x)
    yield A.nll(mapping, x, t)
    yield A.likelihood.kl(mapping, x, "softmax", y)
    yield A.log_prob(mapping, x, t)
    yield A.linear_log_prob(x, torch.ones(7, 5), t, mapping)
    if not isinstance(mapping, Budget):
        targets = (t,) if isinstance(mapping, SparseSoftmax) else (t, y)  # a nucleus has no loss of distributions
        yield from (A.fenchel_young(mapping, x, target, reduction="none") for target in targets)
    if not isinstance(mapping, PerturbMax):
        yield A.threshold(mapping, x).tau
    yield A.sample(mapping, x, return_log_prob=True).log_prob


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Entmax, 1.5),
        (NormMax, 2.0),
        (Budget, 2.0),
        (lambda p: SparseSoftmax(p=p), 0.5),
        (lambda s: PerturbMax(scale=s), 1.0),
    ],
    ids=["entmax", "normmax", "budget", "sparse_softmax", "perturb_max"],
)
def test_no_rows_with_a_tensor_for_a_parameter(kind, value, learns):
    """In evaluation too, where a parameter that learns is a constant."""
    mapping = kind(torch.tensor(value, requires_grad=learns))
    for out in _no_rows(mapping, x := torch.zeros(0, 5, requires_grad=True)):
        assert not out.numel() or out == 0
        if out.requires_grad:
            (gradient,) = torch.autograd.grad(out.sum(), x)
            assert gradient.shape == (0, 5)
    with torch.no_grad():
        assert all(not out.numel() or out == 0 for out in _no_rows(mapping, x))


def test_no_rows_among_the_other_axes():
    for shape in ((4, 0, 6), (0, 3, 6)):
        x = torch.zeros(shape)
        assert A.logsumexp(x).shape == shape[:-1]
        assert A.threshold(Sparsemax(), x).tau.shape == shape[:-1]
    alpha = torch.tensor([[[1.5]], [[1.3]]])  # of each head
    q, k = torch.zeros(0, 2, 5, 4), torch.zeros(0, 2, 6, 4)
    assert A.attention(q, k, k, Entmax(alpha)).shape == (0, 2, 5, 4)
