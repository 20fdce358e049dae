"""PerturbMax against scipy's quadrature, finite differences, sampling, and the laws that it promises."""

import contextlib
import math

import array_api_compat.torch as xt
import laws
import numpy as np
import oracles
import pytest
import torch
from scipy import integrate, special, stats

import anymax as A
from anymax import kernels
from anymax._array import unchecked
from anymax._random.noises import NOISES, Noise
from anymax.kernels import native
from anymax.mappings.perturb_max import PerturbMax

LAWS = {
    "gumbel": stats.gumbel_r(),
    "normal": stats.norm(),
    "logistic": stats.logistic(),
    "uniform": stats.uniform(0, 1),
    "laplace": stats.laplace(),
    "exponential": stats.expon(),
}
ALL = sorted(NOISES)
compiled = pytest.mark.skipif(isinstance(native.load(), str), reason="no engine")
KINKED = {"uniform": (0.0, 1.0), "laplace": (0.0,), "exponential": (0.0,)}
ROW = np.array([0.3, -0.2, 1.0, 0.7, -1.9])


def oracle(x, law, kinks=(), points=40):
    """p = INT f_i prod_{j != i} F_j, by Gauss points in each of 60 panels or more, whose edges include the kinks of every score."""
    ends = law.ppf(1e-15), law.isf(1e-15)
    low, high = (max if math.isfinite(law.support()[0]) else min)(x + ends[0]), max(x) + ends[1]
    edges = np.unique(np.clip([*np.linspace(low, high, 61), *np.add.outer(x, kinks).ravel()], low, high))
    t, w = np.polynomial.legendre.leggauss(points)
    half = 0.5 * np.diff(edges)[:, None]
    v = (0.5 * (edges[1:] + edges[:-1])[:, None] + half * t)[..., None] - x
    log_cdf = law.logcdf(v)
    others = np.exp(log_cdf.sum(-1, keepdims=True) - log_cdf + law.logpdf(v))
    return ((half * w)[..., None] * others).sum((0, 1))


@pytest.mark.parametrize("noise", ALL)
def test_oracle(noise):
    for row in (ROW, ROW[:2], 0.05 * ROW, 3.0 * ROW):
        p = oracle(row, LAWS[noise], KINKED.get(noise, ()))
        assert abs(p.sum() - 1) < 1e-9
        assert 0.5 * np.abs(PerturbMax(noise).forward(row, np) - p).sum() < 2e-9
        single = PerturbMax(noise).forward(row.astype(np.float32), np)
        assert single.dtype == np.float32
        assert 0.5 * np.abs(single - p).sum() < 5e-7
    p = oracle(ROW / 0.3, LAWS[noise], KINKED.get(noise, ()))
    np.testing.assert_allclose(PerturbMax(noise, scale=0.3).forward(ROW, np), p, atol=2e-9)


@pytest.mark.parametrize("noise", ALL)
def test_longdouble_has_the_digits_of_doubles(noise):
    """NumPy's alone: its name is that of no dtype of the other frameworks."""
    p = PerturbMax(noise).forward(ROW.astype(np.longdouble), np)
    assert p.dtype == np.longdouble
    np.testing.assert_allclose(p.astype(np.float64), PerturbMax(noise).forward(ROW, np), atol=1e-14)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("noise", ["gumbel", "uniform"])
def test_no_rows_with_a_scale_for_each(noise, make):
    mapping, none = PerturbMax(noise, scale=make(np.ones((0, 1)))), make(np.zeros((0, 5)))
    assert mapping.facts.margin is None
    assert A.fenchel_young(mapping, none, make(np.zeros(0, int))) == 0
    assert A.fenchel_young(mapping, none, none, reduction="none").shape == (0,)


# one for each row, from nearly no noise to nearly nothing but noise; equal ones follow one another, as the first and the last do
SCALES = np.array([0.3, 1.7, 1.7, 0.05, 25.0, 0.8])[:, None]


@compiled
@pytest.mark.parametrize("noise", sorted(NOISES.keys() - {"exponential"}))
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_the_engines_take_a_scale_for_each_row(noise, kind):
    """p at x / scale, whose derivative is that of p divided by the scale, and whose loss is multiplied by it."""
    jax = pytest.importorskip("jax") if kind == "jax" else None
    make = {"numpy": np.asarray, "torch": torch.tensor}[kind] if jax is None else jax.numpy.asarray
    with contextlib.nullcontext() if jax is None else jax.enable_x64(True):
        x = np.stack([ROW, ROW[::-1], 0.5 * ROW, ROW + 3.0, 2.0 * ROW, ROW**2])
        mapping, target = PerturbMax(noise, scale=make(SCALES)), np.arange(6) % 5
        engine = kernels.choose("forward", mapping, make(x))
        assert engine is kernels.choose("vjp", mapping, make(x)) is kernels.choose("index_loss", mapping, make(x))
        assert engine.name == ("native" if jax is None else "xla")
        p, g = engine.forward(mapping, make(x)), np.cos(np.arange(30.0)).reshape(6, 5)
        for row, one, scale in zip(x, np.asarray(p), SCALES[:, 0], strict=True):
            np.testing.assert_allclose(one, oracle(row / scale, LAWS[noise], KINKED.get(noise, ())), atol=3e-9)
        alone, with_one = PerturbMax(noise), x / SCALES
        pulled = np.asarray(engine.vjp(mapping, make(x), p, make(g)))
        want = alone.vjp(with_one, alone.forward(with_one, np), g, np) / SCALES
        np.testing.assert_allclose(pulled, want, atol=1e-8 * np.abs(want).max(-1, keepdims=True).max())
        value = np.asarray(A.fenchel_young(mapping, make(x), make(target), reduction="none"))
        want = alone.loss(with_one, None, np.eye(5)[target], np)[:, 0] * SCALES[:, 0]
        np.testing.assert_allclose(value, want, atol=1e-8 * (1.0 + want.max()))


@compiled
def test_a_scale_for_each_row_in_other_layouts_and_dtypes():
    x = np.random.default_rng(2).normal(size=(4, 3, 40))
    scale = np.exp(np.random.default_rng(3).normal(size=(4, 3, 1)))
    mapping, keep = PerturbMax("logistic", scale=scale), x > -1.0
    p = A.apply(mapping, x)
    with A.use("reference"):
        np.testing.assert_allclose(p, A.apply(mapping, x), atol=1e-9)
        masked = A.apply(mapping, x, mask=keep)
    np.testing.assert_allclose(A.apply(mapping, x, mask=keep), masked, atol=1e-9)
    turned = PerturbMax("logistic", scale=np.moveaxis(scale, -1, 0))
    np.testing.assert_allclose(A.apply(turned, np.moveaxis(x, -1, 0), axis=0), np.moveaxis(p, -1, 0), atol=1e-14)
    heads = PerturbMax("logistic", scale=scale[:1])  # one for each of the second axis
    for i in range(3):
        one = PerturbMax("logistic", scale=float(scale[0, i, 0]))
        np.testing.assert_array_equal(A.apply(heads, x)[:, i], A.apply(one, x[:, i]))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        half = A.apply(mapping, torch.tensor(x).to(dtype))
        assert half.dtype == dtype
        assert float((half.double() - torch.tensor(p)).abs().max()) < 8 * torch.finfo(dtype).eps  # of the nodes, too


def central(f, scale, h=1e-5):
    """The derivative of f, one number a row, by the scale of each row, or by one for all, by central differences."""
    return ((f(scale + h) - f(scale - h)) / (2 * h)).sum_to_size(scale.shape)


@compiled
@pytest.mark.whole(lambda noise: noise not in ("logistic", "uniform"))
@pytest.mark.parametrize("shape", [(6, 1), ()], ids=["a row", "one"])
@pytest.mark.parametrize("noise", sorted(NOISES.keys() - {"exponential"}))
def test_a_learned_scale_runs_in_the_engine(noise, shape):
    """Its derivative by central differences of p and of the loss, beside masked classes and rows that are left out."""
    draw = torch.Generator().manual_seed(3)
    x, g = (torch.randn(6, 9, dtype=torch.float64, generator=draw) for _ in range(2))
    x[1, ::3] = -torch.inf
    scale = 0.5 + torch.rand(shape, dtype=torch.float64, generator=draw)
    target, weight = (
        torch.tensor([0, 4, 8, -100, 3, 2]),
        torch.tensor([[1.0], [0.5], [2.0], [1.0], [0.1], [1.0]]).double(),
    )

    def weighed(s):
        return (A.apply(PerturbMax(noise, scale=s), x) * g).sum(-1, keepdim=True)

    def losses(s):
        return weight * A.fenchel_young(PerturbMax(noise, scale=s), x, target, reduction="none")[:, None]

    for f in (weighed, losses):
        free = scale.clone().requires_grad_()
        with A.use("native"):
            (got,) = torch.autograd.grad(f(free).sum(), free)
        torch.testing.assert_close(got, central(f, scale), rtol=1e-7, atol=2e-9)
    mean = scale.clone().requires_grad_()
    (got,) = torch.autograd.grad(A.fenchel_young(PerturbMax(noise, scale=mean), x, target), mean)
    one = central(lambda s: A.fenchel_young(PerturbMax(noise, scale=s), x, target, reduction="none")[:, None], scale)
    torch.testing.assert_close(got, one / 5, rtol=1e-7, atol=2e-9)
    both = x[[0, 2]].clone().requires_grad_(), (scale[[0, 2]] if shape else scale).clone().requires_grad_()
    function = lambda x, s: A.apply(PerturbMax(noise, scale=s), x)  # noqa: E731
    assert torch.autograd.gradcheck(function, both, atol=1e-6)
    assert torch.autograd.gradgradcheck(function, both, atol=1e-5)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learned_scale_of_few_digits(dtype):
    """Of the scores as they are rounded, against the reference in fp64; scores far from 0 and a sure row lose no digits."""
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1] += 1000.0
    x[2, 7] = 60.0
    g, target = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).to(dtype), torch.tensor([3, 4, 7, 7])
    found = []
    for kind, wide in (("native", torch.float32), ("reference", torch.float64)):
        with A.use(kind):
            scale = torch.tensor([[0.7], [1.0], [1.3], [2.0]], dtype=wide, requires_grad=True)
            given = x if kind == "native" else x.double()
            p = A.apply(PerturbMax("normal", scale=scale), given)
            (slope,) = torch.autograd.grad((p * g.to(p.dtype)).sum(), scale)
            value = A.fenchel_young(PerturbMax("normal", scale=scale), given, target, reduction="none")
            found.append((slope.double(), torch.autograd.grad(value.sum(), scale)[0].double()))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("noise", ["normal", "gumbel", "uniform"])
def test_a_learned_scale_and_a_row_without_classes(noise):
    """Its loss is infinite, and no part of the gradient where it is left out."""
    x = torch.tensor([[1.0, 2.0, 0.0], [-math.inf] * 3], dtype=torch.float64)
    grads = []
    for rows in (x, x[:1]):
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        value = A.fenchel_young(
            PerturbMax(noise, scale=scale), rows, torch.tensor([0, 1])[: len(rows)], reduction="none"
        )
        assert value[1:].isposinf().all()
        grads.append(torch.autograd.grad(value[0], scale)[0])
    torch.testing.assert_close(*grads)


@compiled
@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_learned_scale_in_programs():
    """Compiled programs of torch, and of JAX, with second derivatives, run the engine's values."""
    x, scale = torch.tensor(np.stack([ROW, ROW**2])), torch.tensor([[0.7], [1.4]], dtype=torch.float64)
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0], dtype=torch.float64)

    def value(s):
        return (A.apply(PerturbMax("logistic", scale=s), x) * weight).sum(-1, keepdim=True)

    want, free = central(value, scale), scale.clone().requires_grad_()
    (got,) = torch.autograd.grad(torch.compile(value, backend="aot_eager", fullgraph=True)(free).sum(), free)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=2e-9)
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    with jax.enable_x64(True):
        y, w, s = jnp.asarray(x.numpy()), jnp.asarray(weight.numpy()), jnp.asarray(scale.numpy())
        p = lambda s: (A.apply(PerturbMax("logistic", scale=s), y) * w).sum()  # noqa: E731
        loss = lambda s: A.fenchel_young(PerturbMax("logistic", scale=s), y, jnp.asarray([3, 0])).sum()  # noqa: E731
        np.testing.assert_allclose(jax.jit(jax.grad(p))(s), want, rtol=1e-7, atol=2e-9)
        for f in (p, loss):
            slope, h = jax.jit(jax.grad(f)), 1e-5
            second, first = np.asarray(jax.jit(jax.hessian(f))(s)), jax.jit(jax.jacfwd(f))(s)
            np.testing.assert_allclose(first, slope(s), atol=1e-14)
            for i in range(2):
                e = jnp.zeros((2, 1)).at[i].set(h)
                np.testing.assert_allclose(slope(s)[i, 0], (f(s + e) - f(s - e)) / (2 * h), rtol=1e-7, atol=2e-9)
                np.testing.assert_allclose(
                    second[:, 0, i, 0], ((slope(s + e) - slope(s - e)) / (2 * h))[:, 0], atol=2e-8
                )


@compiled
def test_rows_of_a_scale_out_of_range_are_nan_and_the_others_are_not():
    x, scale = np.stack([ROW] * 5), np.array([[1.0], [0.0], [np.nan], [np.inf], [-1.0]])
    with unchecked():  # as on a device, where the values are not read
        mapping = PerturbMax("normal", scale=scale)
    engine = kernels.choose("forward", mapping, x)
    p = engine.forward(mapping, x)
    found = p, engine.vjp(mapping, x, np.stack([p[0]] * 5), x)
    made = engine.index_loss(mapping, x, np.zeros(5, np.int64), save=True)
    slope = engine.index_loss_grad(mapping, x, np.zeros(5, np.int64), np.ones(5), made.saved)
    for rows in (*found, made.value[:, None], slope, engine.threshold(mapping, x)):
        assert np.isfinite(rows[0]).all()
        assert np.isnan(rows[1:]).all()


@pytest.mark.parametrize(("noise", "budget"), [("normal", 1e-9), ("logistic", 5e-7)])
def test_thousand_classes(noise, budget):
    x = np.random.default_rng(0).normal(size=1000)
    p = oracle(x, LAWS[noise])
    assert 0.5 * np.abs(PerturbMax(noise, nodes=32).forward(x, np) - p).sum() < budget
    assert 0.5 * np.abs(PerturbMax(noise).forward(x.astype(np.float32), np) - p).sum() < 1e-6


@pytest.mark.parametrize(("n", "spread"), [(60, 0.2), (300, 0.05), (300, 1.0)])
def test_uniform_beyond_the_exact_kinks(n, spread):
    x = np.random.default_rng(1).normal(size=n) * spread
    p = oracle(x / 2.0, LAWS["uniform"], KINKED["uniform"], points=8)
    assert abs(p.sum() - 1) < 1e-7
    assert 0.5 * np.abs(PerturbMax("uniform", scale=2.0).forward(x, np) - p).sum() < 4e-6


def test_gumbel_is_softmax():
    """In logarithms, and as a noise of one's own; p and its Jacobian: tests/laws/test_law_limits.py."""
    x = np.random.default_rng(0).normal(size=(3, 7)) * 3
    np.testing.assert_allclose(PerturbMax("gumbel").log_forward(x, np), special.log_softmax(x, axis=-1), rtol=1e-13)
    own = Noise(cdf=lambda v: np.exp(-np.exp(-v)), pdf=lambda v: np.exp(-v - np.exp(-v)))
    np.testing.assert_allclose(PerturbMax(own).forward(x, np), special.softmax(x, axis=-1), atol=1e-12)


@pytest.mark.parametrize("noise", ALL)
def test_other_ways_to_the_same_p(noise):
    m = PerturbMax(noise, scale=1.3)
    p = m.forward(ROW, np)
    # Su's form: a midpoint rule in t, error O(1/nodes) where the quantile has infinite ends
    np.testing.assert_allclose(m.quantile_form(ROW, nodes=20000), p, atol=2e-4)
    count = 40000
    tolerance = 5 * np.sqrt(p * (1 - p) / count) + 1e-9
    assert np.all(np.abs(m.monte_carlo(ROW, count, np.random.default_rng(0)) - p) < tolerance)
    out = m.monte_carlo(torch.tensor(ROW), count, torch.Generator().manual_seed(0))
    assert out.dtype == torch.float64
    assert np.all(np.abs(out.numpy() - p) < tolerance)


@pytest.mark.whole
def test_monte_carlo_jax():
    jax = pytest.importorskip("jax")
    m, count = PerturbMax("laplace"), 60000  # in three chunks, each with a key of its own
    p = m.forward(ROW, np)
    out = m.monte_carlo(jax.numpy.asarray(ROW, dtype="float32"), count, jax.random.key(0))
    assert np.all(np.abs(np.asarray(out) - p) < 5 * np.sqrt(p * (1 - p) / count))
    assert float(out.sum()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("noise", ALL)
def test_sampled_noise_has_its_law(noise):
    eps = PerturbMax(noise).sample_noise((20000,), np.zeros(1), np.random.default_rng(0))
    assert stats.kstest(eps, LAWS[noise].cdf).pvalue > 1e-4
    assert abs(NOISES[noise].mean - LAWS[noise].mean()) < 1e-12


@pytest.mark.parametrize("noise", ALL)
def test_log_cdf_and_hazard(noise):
    law, mine = LAWS[noise], NOISES[noise]
    shift = mine.location
    low, high = max(law.support()[0], -30.0), min(law.support()[1], 30.0)
    low = max(low, -4.0) if noise == "gumbel" else low
    v = np.linspace(low, high, 4001)[1:-1]
    # scipy rounds the F of three of them to 1 before the logarithm
    exact_log = {
        "laplace": lambda v: np.where(v < 0, np.log(0.5) + v, np.log1p(-0.5 * np.exp(-np.abs(v)))),
        "logistic": lambda v: -np.logaddexp(0.0, -v),
        "exponential": lambda v: np.where(v < 0.5, np.log(-np.expm1(-v)), np.log1p(-np.exp(-v))),
    }.get(noise, law.logcdf)
    ref = exact_log(v)
    got, log_h = mine.core(v - shift, np)
    np.testing.assert_allclose(got, ref, rtol=5e-13 if noise != "uniform" else 1e-11, atol=1e-300)
    np.testing.assert_allclose(log_h, law.logpdf(v) - ref, rtol=1e-12, atol=1e-12)
    single = mine.core((v - shift).astype(np.float32), np)[0]
    exact = exact_log((v - shift).astype(np.float32).astype(float) + shift)
    np.testing.assert_allclose(single, exact, rtol=1e-5, atol=1e-30)
    h = np.exp(log_h)
    steps = 1e-6
    inner = (v - shift > low - shift + 1e-2) & (v < high - 1e-2) & (np.abs(v) > 1e-2)
    rise = [np.exp(mine.core(v[inner] - shift + s, np)[1]) for s in (steps, -steps)]
    np.testing.assert_allclose(
        mine.bend(v - shift, h, np)[inner], (rise[0] - rise[1]) / (2 * steps), rtol=1e-5, atol=1e-7
    )
    depth = np.array([50.0, 5.0, 0.7, 0.1, 1e-9, 1e-13])
    if noise != "uniform":  # its F(-1 + 2e-22) has no argument in fp64
        np.testing.assert_allclose(mine.core(mine.level(depth, np), np)[0], -depth, rtol=2e-3)
        np.testing.assert_allclose(mine.core(mine.level(depth[:4], np), np)[0], -depth[:4], rtol=1e-12)


# -- derivatives and the potential -----------------------------------------------------------------------------------------


@pytest.mark.whole(lambda noise: noise != "exponential")
@pytest.mark.parametrize("noise", ALL)
def test_derivatives_torch(noise):
    x = torch.tensor(np.stack([ROW, 0.4 * ROW[::-1]]), requires_grad=True)
    width = 2.0 if noise == "uniform" else 1.0  # at width 1 a score of ROW sits exactly on the edge of the support
    m = PerturbMax(noise, scale=width)
    weights = torch.arange(5.0, dtype=torch.float64)
    target = torch.softmax(weights, 0).expand(2, 5)
    assert torch.autograd.gradcheck(lambda a: m.differentiable(a, xt), (x,))
    assert torch.autograd.gradgradcheck(lambda a: m.differentiable(a, xt), (x,), atol=1e-6)
    assert torch.autograd.gradcheck(lambda a: m.loss(a, None, target, xt), (x,))
    assert torch.autograd.gradgradcheck(lambda a: m.loss(a, None, target, xt), (x,), atol=1e-6)
    assert torch.autograd.gradcheck(
        lambda a, g: m.vjp(a, m.forward(a, xt), g, xt), (x, weights.expand(2, 5).clone().requires_grad_())
    )
    (g,) = torch.autograd.grad((m.differentiable(x, xt) * weights).sum(), x)
    scores = x.detach().numpy()
    direct = m.vjp(scores, m.forward(scores, np), np.broadcast_to(weights.numpy(), (2, 5)), np)
    np.testing.assert_allclose(g.numpy(), direct, atol=1e-14)
    scale = torch.tensor([[0.7 * width], [1.4 * width]], dtype=torch.float64, requires_grad=True)
    for f in (lambda a, s: PerturbMax(noise, scale=s).differentiable(a, xt),
              lambda a, s: PerturbMax(noise, scale=s).loss(a, None, target, xt)):  # fmt: skip
        assert torch.autograd.gradcheck(f, (x, scale))
        assert torch.autograd.gradgradcheck(f, (x, scale), atol=1e-6)


@pytest.mark.whole
@pytest.mark.parametrize("noise", ["normal", "uniform"])
def test_derivatives_jax(noise):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    m, w = PerturbMax(noise), np.arange(3.0)

    def product(x, v):
        return m.vjp(x, m.forward(x, np), v, np)

    def everything(a):
        f = lambda a: (m.differentiable(a, jnp) * w).sum()  # noqa: E731
        return m.forward(a, jnp), jax.grad(f)(a), jax.hessian(f)(a)

    with jax.enable_x64(True):
        p, g, h = jax.jit(everything)(jnp.asarray(ROW[:3]))
    np.testing.assert_allclose(p, m.forward(ROW[:3], np), atol=1e-13)
    np.testing.assert_allclose(g, product(ROW[:3], w), atol=1e-13)
    steps = [product(ROW[:3] + 1e-5 * e, w) - product(ROW[:3] - 1e-5 * e, w) for e in np.eye(3)]
    np.testing.assert_allclose(h, np.stack(steps) / 2e-5, atol=1e-7)


@pytest.mark.parametrize("noise", ALL)
def test_expected_max_and_loss(noise):
    law, m = LAWS[noise], PerturbMax(noise)
    low, high = ROW.max() + law.ppf(1e-15), ROW.max() + law.isf(1e-15)
    kinks = [k + s for k in KINKED.get(noise, ()) for s in ROW]
    points = [k for k in kinks if low < k < high] or None
    top = integrate.quad(lambda u: 1 - np.prod(law.cdf(u - ROW)), low, high, points=points, limit=500)[0]
    exact = low + top
    np.testing.assert_allclose(m.expected_max(ROW, np), [exact], rtol=1e-9)
    loss = m.loss(np.broadcast_to(ROW, (5, 5)), None, np.eye(5), np)[:, 0]
    np.testing.assert_allclose(loss, exact - law.mean() - ROW, rtol=1e-8)
    y = np.full(5, 0.2)
    np.testing.assert_allclose(m.loss(ROW, None, y, np), [loss.mean()], rtol=1e-13)
    far = np.array([0.0, -60.0, -1e4])
    for offset in (0.0, 2.0**20):
        tiny = m.loss(far + offset, None, np.array([1.0, 0, 0]), np)[0]
        assert 0 <= tiny < 1e-12
    big = m.loss(far, None, np.array([0, 0, 1.0]), np)[0]
    assert big == pytest.approx(1e4, rel=1e-12)
    assert m.constant(y, np) == 0.0
    slope = oracles.differences(lambda x: m.expected_max(x, np)[0], ROW, h=1e-5)
    np.testing.assert_allclose(slope, m.forward(ROW, np), atol=1e-7)


def test_log_forward_in_the_tail():
    x = np.array([0.0, -6.0, -10.0, -14.0])
    ref = special.log_ndtr(x[1:] / math.sqrt(2))  # of two classes
    pairs = np.stack([np.zeros(3), x[1:]], axis=1)
    np.testing.assert_allclose(PerturbMax().log_forward(pairs, np)[:, 1], ref, rtol=1e-6)
    single = PerturbMax().log_forward(pairs.astype(np.float32), np)[:, 1]
    np.testing.assert_allclose(single, ref, rtol=1e-5)
    far = PerturbMax().log_forward(np.array([0.0, -1e4]), np)
    assert np.isfinite(far).all()
    assert PerturbMax("uniform").log_forward(np.array([0.0, -3.0]), np)[1] == -np.inf


# -- laws ------------------------------------------------------------------------------------------------------------------


# of the other noises tests/laws go over four
LEFT = {
    "simplex": laws.simplex, "masked": lambda apply: laws.masked(apply, atol=1e-7), "permutation": laws.permutation,
    "monotone": laws.monotone, "shift": lambda apply: laws.shift(apply, 1e-9), "views": laws.views, "empty": laws.empty,
    "poison": laws.poison, "extremes": laws.extremes,
}  # fmt: skip


@pytest.mark.parametrize("noise", ["exponential", "laplace"])
@pytest.mark.parametrize("law", LEFT)
def test_laws(law, noise):
    LEFT[law](lambda x, **options: A.apply(PerturbMax(noise), x, **options))


@pytest.mark.parametrize("noise", ["exponential", "laplace"])
def test_law_of_the_jacobian(noise):
    m = PerturbMax(noise, scale=0.8)
    rows = [ROW, ROW[:3]]
    laws.jacobian(lambda x: A.apply(m, x), lambda x: A.jacobian(m, x), rows, potential=True, invariant=True)


@pytest.mark.parametrize("noise", ALL)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shapes_and_masks_of_the_other_forms(noise, dtype):
    """Of log p, of the form by quantiles, of the loss and of the gradients of torch."""
    m = PerturbMax(noise)
    for shape in ((3,), (2, 2, 3), (0, 3), (4, 1), (1,)):
        z = np.zeros(shape, dtype=dtype)
        for out in (m.log_forward(z, np), m.quantile_form(z)):
            assert out.shape == shape
            assert out.dtype == dtype
            assert not np.isnan(out).any()
        assert m.loss(z, None, m.forward(z, np), np).shape == (*shape[:-1], 1)
    x = np.array([[0.5, -np.inf, 1, 0], [-np.inf] * 4, [1e6, 1e6, 1e6 - 1e4, -1e6], [3, *[-np.inf] * 3]], dtype)
    t = torch.tensor(x, requires_grad=True)
    for f in (m.differentiable, m.log_forward):
        (grad,) = torch.autograd.grad(f(t, xt).exp().sum(), t)
        assert not torch.isnan(grad).any()
    assert m.expected_max(x, np)[1, 0] == -np.inf


@pytest.mark.whole(lambda n: n != 70)
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [4, 70, 700])
@pytest.mark.parametrize("noise", ALL)
def test_an_infinite_gradient_where_p_is_0(noise, n, dtype, make):
    """Such a class has no part in the others' gradients, and its own is 0: in the reference, and in the engine where it has the noise."""
    rng = np.random.default_rng(n)
    x, v = rng.normal(0, 0.3, (3, n)).astype(dtype), rng.normal(size=(3, n)).astype(dtype)
    x[:, 1], x[1, n - 2 :] = -1e5, -1e3
    x[0, 2] = -np.inf
    m = PerturbMax(noise)
    for engine in {kernels.choose("vjp", m, make(x)), kernels.reference.ENGINE}:
        p = engine.forward(m, make(x))
        none = np.asarray(p) == 0
        assert none[:, 1].all()
        assert none[0, 2]
        want, got = (
            np.asarray(engine.vjp(m, make(x), p, make(np.where(none, there, v).astype(dtype)))) for there in (0, np.inf)
        )
        np.testing.assert_array_equal(got, want)
        assert not got[none].any()
        assert got.any()


@pytest.mark.parametrize("noise", ALL)
def test_strict_namespace_and_read_only(noise):
    xp = pytest.importorskip("array_api_strict")
    frozen = ROW.copy()
    frozen.flags.writeable = False
    m = PerturbMax(noise)
    np.testing.assert_array_equal(np.asarray(m.forward(xp.asarray(frozen), xp)), m.forward(frozen, np))
    y = np.full(5, 0.2)
    assert float(m.loss(xp.asarray(frozen), None, xp.asarray(y), xp)[0]) == pytest.approx(m.loss(ROW, None, y, np)[0])


def test_hold():
    held = PerturbMax().hold(ROW, np)
    assert held.shape == (2,)
    np.testing.assert_array_equal(PerturbMax().differentiable(ROW, np, held), PerturbMax().forward(ROW, np))


# -- a noise of the user's ----------------------------------------------------------------------------------------------------


def test_own_noise():
    p = PerturbMax("normal").forward(ROW, np)
    normal = Noise(cdf=special.ndtr, pdf=stats.norm.pdf, log_cdf=special.log_ndtr)
    np.testing.assert_allclose(PerturbMax(normal).forward(ROW, np), p, atol=1e-12)
    np.testing.assert_allclose(PerturbMax(normal).expected_max(ROW, np), PerturbMax().expected_max(ROW, np), atol=1e-9)
    table = PerturbMax(Noise(quantile=special.ndtri, mean=0.0))
    np.testing.assert_allclose(table.forward(ROW, np), p, atol=1e-7)
    np.testing.assert_allclose(table.vjp(ROW, None, ROW, np), PerturbMax().vjp(ROW, None, ROW, np), atol=1e-6)
    assert abs(table.monte_carlo(ROW, 20000, np.random.default_rng(0)) - p).max() < 0.02
    root = Noise(cdf=lambda v: torch.special.ndtr(v), pdf=lambda v: torch.exp(-0.5 * v * v) / math.sqrt(2 * math.pi))
    x = torch.tensor(ROW, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: PerturbMax(root, nodes=16).differentiable(a, xt), (x,))
    assert torch.autograd.gradgradcheck(lambda a: PerturbMax(root, nodes=16).differentiable(a, xt), (x,), atol=1e-5)


def test_own_noise_with_support():
    beta = stats.beta(2, 3)
    for law, kinks in ((beta, (0.0, 1.0)), (stats.triang(0.3), (0.0, 0.3, 1.0))):
        own = Noise(cdf=law.cdf, pdf=law.pdf, support=(0.0, 1.0), kinks=kinks)
        row = 0.4 * ROW
        np.testing.assert_allclose(PerturbMax(own).forward(row, np), oracle(row, law, kinks), atol=1e-9)
        assert PerturbMax(own).facts.margin == 1.0
    shape = stats.gamma(2)
    own = Noise(cdf=shape.cdf, pdf=shape.pdf, support=(0.0, math.inf))
    np.testing.assert_allclose(PerturbMax(own).forward(ROW, np), oracle(ROW, shape, (0.0,)), atol=1e-9)


# -- heavy tails ----------------------------------------------------------------------------------------------------------------


def by_quantiles(law, x):
    """INT prod_j F(x_i - x_j + Q(t)) dt, from either end of (0, 1)."""

    def share(i, eps):
        return np.prod([law.cdf(x[i] - x[j] + eps) for j in range(len(x)) if j != i])

    def half(i, quantile):
        return integrate.quad(lambda t: share(i, quantile(t)), 0, 0.5, limit=400, epsabs=1e-12)[0]

    return np.array([half(i, law.ppf) + half(i, law.isf) for i in range(len(x))])


HEAVY = {
    "t5": (stats.t(5), {}, 1e-10),
    "t3": (stats.t(3), {}, 1e-10),
    "cauchy": (stats.cauchy(), {}, 1e-12),
    "normal": (stats.norm(), {}, 1e-10),
    "pareto": (stats.lomax(1.5), {"support": (0.0, math.inf)}, 1e-10),
    "lognormal": (stats.lognorm(1.0), {"support": (0.0, math.inf)}, 1e-10),
    "laplace": (stats.laplace(), {"kinks": (0.0,)}, 1e-10),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", HEAVY)
def test_tails_of_any_weight(name):
    """Student t of 5 degrees was .471 for .540, Cauchy .250 for .419 with any number of nodes."""
    law, options, atol = HEAVY[name]
    mapping = PerturbMax(Noise(cdf=law.cdf, pdf=law.pdf, **options))
    x = np.array([0.3, -0.5, 1.1, 0.0])
    want = by_quantiles(law, x)
    np.testing.assert_allclose(A.apply(mapping, x), want, atol=atol)
    np.testing.assert_allclose(A.apply(mapping, x.astype("float32")), want, atol=5e-5)
    j, h = A.jacobian(mapping, x), 1e-5 * np.eye(4)
    numeric = np.stack([(A.apply(mapping, x + d) - A.apply(mapping, x - d)) / 2e-5 for d in h], -1)
    np.testing.assert_allclose(j, numeric, atol=max(1e-8, 20 * atol))
    np.testing.assert_allclose(np.exp(A.log_apply(mapping, x)), want, atol=10 * atol + 1e-9)
    np.testing.assert_allclose(mapping.quantile_form(x, 20_000), want, atol=2e-4)


@pytest.mark.parametrize("kind", ["cdf", "quantile"])
def test_scores_far_apart_under_heavy_tails(kind):
    """Cauchy was off by 3e-4 at scores 5 apart, and an error from 8. Of two classes P[0 + e > x + e'] is 1/2 + atan(-x / 2) / pi."""
    cdf = Noise(cdf=stats.cauchy.cdf, pdf=stats.cauchy.pdf)
    own, atol = (cdf, 1e-11) if kind == "cdf" else (Noise(quantile=lambda q: np.tan(np.pi * (q - 0.5))), 2e-7)
    x = np.stack([np.zeros(6), -np.array([2.0, 5.0, 8.0, 50.0, 1000.0, 1e5])], -1)
    want = 0.5 + np.arctan(-x[:, 1] / 2.0) / np.pi
    np.testing.assert_allclose(A.apply(PerturbMax(own), x)[:, 0], want, atol=atol)
    # a class that can't win changes nothing, and neither does one beside another far below
    rows = np.insert(x[:4], 1, [-1e15, -np.inf, -1e15, -np.inf], axis=1)
    np.testing.assert_allclose(A.apply(PerturbMax(own), rows)[:, 0], want[:4], atol=atol)
    three = np.array([0.0, -8.0, -50.0])
    np.testing.assert_allclose(A.apply(PerturbMax(cdf), three), by_quantiles(stats.cauchy(), three), atol=1e-9)


def test_a_quantile_that_is_infinite_at_1():
    own = Noise(quantile=special.ndtri, mean=0.0)
    assert np.isfinite(own.level(np.array([0.0, 1e-18, 1.0]), np)).all()
    assert abs(A.apply(PerturbMax(own), np.zeros(4)) - 0.25).max() < 1e-15


@pytest.mark.whole
def test_the_loss_of_heavy_tails():
    """E max - E eps - x_t by Simpson's rule in the quantiles' logit: 1.606 was shown for 2.441."""
    law, x = stats.t(3), np.array([0.3, -0.5, 1.1, 0.0])
    mapping = PerturbMax(Noise(cdf=law.cdf, pdf=law.pdf))
    y = np.linspace(-60, 60, 40_001)
    v = np.where(y < 0, law.ppf(special.expit(y)), law.isf(special.expit(-y)))
    below = law.cdf(v) - np.prod([law.cdf(v - a) for a in x - x.max()], axis=0)
    slope = special.expit(y) * special.expit(-y) / law.pdf(v)
    top = integrate.simpson(below * slope, x=y)
    for t in range(4):
        got = A.fenchel_young(mapping, x, t)
        assert got == pytest.approx(top + x.max() - x[t], abs=1e-8)
    h = 1e-5
    slopes = [
        (A.fenchel_young(mapping, x + d, 1) - A.fenchel_young(mapping, x - d, 1)) / (2 * h) for d in h * np.eye(4)
    ]
    np.testing.assert_allclose(slopes, A.apply(mapping, x) - np.eye(4)[1], atol=1e-7)
    assert mapping.expected_max(x[None], np) == pytest.approx(top + x.max(), abs=1e-8)


@pytest.mark.whole(lambda kind: kind == "jax")
@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_heavy_tails_where_no_value_is_known(kind):
    """Compiled the same numbers, and NaN where the nodes miss the noise."""
    if kind == "torch":
        torch = pytest.importorskip("torch")
        to, trace, atan = torch.tensor, torch.func.vmap, torch.atan
    else:
        jax = pytest.importorskip("jax")
        to, trace, atan = jax.numpy.asarray, jax.jit, jax.numpy.arctan
    own = Noise(cdf=lambda v: 0.5 + atan(v) / math.pi, pdf=lambda v: 1 / (math.pi * (1 + v * v)))
    rows = np.array([[0.3, -0.5, 1.1, 0.0], [0.0, -30.0, -1e9, -1e9]])

    def shares(nodes):
        return np.asarray(trace(lambda x: A.apply(PerturbMax(own, nodes=nodes), x))(to(rows)))

    np.testing.assert_allclose(shares(None)[0], by_quantiles(stats.cauchy(), rows[0]), atol=1e-6)
    np.testing.assert_allclose(shares(None)[1, 0], 0.5 + math.atan(15.0) / math.pi, atol=1e-6)
    assert np.isnan(shares(8)[1]).all()
