"""Samplers: frequencies within five standard deviations of exact probabilities, and what may never be drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, generator, readonly
from scipy import stats
from scipy.special import softmax as scipy_softmax

from anymax._random import uniform
from anymax.mappings import Entmax, Softmax, Sparsemax, SparseSoftmax
from anymax.samplers import _first_above, _invert, gumbel_max, gumbel_softmax, perturb_argmax, sample

INF = math.inf
N = 20_000


def sparsemax_row(z):
    s = np.sort(z)[::-1]
    tau = (np.cumsum(s) - 1) / np.arange(1, len(z) + 1)
    return np.maximum(z - tau[np.sum(s > tau) - 1], 0)


def agrees(index, p):
    """Counts against probabilities: nothing of probability 0, everything within five standard deviations, chi-square."""
    counts = np.bincount(index, minlength=len(p))
    assert counts.sum() == len(index)
    assert counts[p == 0].sum() == 0
    n = len(index)
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1e-9).all(), (counts / n, p)
    assert stats.chisquare(counts[p > 0], n * p[p > 0] / p.sum()).pvalue > 1e-6


X = readonly(
    np.array([[0.3, -0.5, 1.1, -INF, 0.2], [2.0, 1.9, -3.0, -INF, -INF], [0.0, 0.0, 0.0, 0.0, 0.0]], np.float32)
)


@every_kind
def test_gumbel_max_is_softmax(kind):
    index = back(gumbel_max(KINDS[kind](X), generator=generator(kind), num_samples=N))
    assert index.shape == (N, 3)
    assert index.dtype.kind == "i"
    for row, x in zip(index.T, X):
        agrees(row, scipy_softmax(x.astype(np.float64)))


@every_kind
def test_the_extremes_of_fp32_noise_have_no_ties(kind):
    """24 random bits give some among the thousand largest of a million, and ties favour the first classes."""
    u = back(uniform((2**20,), KINDS[kind](np.zeros(1, np.float32)), generator(kind)))
    assert u.dtype == np.float32
    assert u.min() > 0
    assert u.max() < 1
    low = np.sort(u)[:1000]
    assert len(np.unique(low)) >= 999
    assert stats.kstest(u, "uniform").pvalue > 1e-6


@every_kind
@pytest.mark.parametrize("noise", ["gumbel", "normal", "logistic", "laplace", "exponential", "uniform"])
def test_perturb_argmax_of_two(kind, noise):
    """P[x0 + e0 > x1 + e1] from the distribution of the difference of two noises, by numerical integration."""
    law = {
        "gumbel": stats.gumbel_r,
        "normal": stats.norm,
        "logistic": stats.logistic,
        "laplace": stats.laplace,
        "exponential": stats.expon,
        "uniform": stats.uniform,
    }[noise]
    x, scale = np.array([0.4, 0.0], np.float32), 0.8
    grid = np.linspace(-40, 40, 400_001)
    p = np.trapezoid(law.pdf(grid) * law.cdf(grid + 0.5), grid)
    index = back(perturb_argmax(KINDS[kind](x), noise, scale, generator=generator(kind), num_samples=N))
    agrees(index, np.array([p, 1 - p]))


@every_kind
def test_scale_zero_is_argmax(kind):
    assert np.array_equal(back(perturb_argmax(KINDS[kind](X), scale=0, generator=0)), X.argmax(-1))


MAPS = {
    "softmax": (Softmax(), lambda x: scipy_softmax(x)),
    "sparsemax": (Sparsemax(), sparsemax_row),
    "topk": (SparseSoftmax(k=2), lambda x: scipy_softmax(np.where(np.argsort(np.argsort(-x)) < 2, x, -INF))),
}


@every_kind
@pytest.mark.parametrize("name", MAPS)
def test_sample_from_any_map(kind, name):
    mapping, oracle = MAPS[name]
    x = np.random.default_rng(0).normal(0, 1, (3, 5)).astype(np.float32)
    index = back(sample(mapping, KINDS[kind](x), generator=generator(kind), num_samples=N))
    assert index.shape == (N, 3)
    for row, r in zip(index.T, x.astype(np.float64)):
        agrees(row, oracle(r))


@every_kind
def test_sample_masks_axes_and_one_sample(kind):
    c = KINDS[kind]
    keep = np.array([True, False, True, True, True])
    x = np.nan_to_num(X, neginf=0.0)
    index = back(sample(Softmax(), c(x.T), generator=generator(kind), num_samples=2000, axis=0, mask=c(keep[:, None])))
    assert index.shape == (2000, 3)
    assert set(np.unique(index)) == {0, 2, 3, 4}
    one = sample(Softmax(), c(x), generator=generator(kind))
    assert one.shape == (3,)
    assert back(sample(Softmax(), c(x[0]), generator=generator(kind))).shape == ()
    if kind == "jax":
        return  # the rest is the same code, and each shape is a compilation
    cube = c(np.random.default_rng(0).normal(size=(2, 3, 4)))
    for verb in (gumbel_max, perturb_argmax, lambda a, **k: sample(Sparsemax(), a, **k)):
        assert verb(cube, axis=1, generator=generator(kind), num_samples=6).shape == (6, 2, 4)
        assert verb(cube, dim=0, generator=generator(kind)).shape == (3, 4)
        assert verb(c(np.zeros((0, 4))), generator=generator(kind)).shape == (0,)
        assert (back(verb(c(np.zeros((3, 1))), generator=generator(kind))) == 0).all()


@pytest.mark.thin(2)
@every_kind
@pytest.mark.parametrize("verb", ["gumbel_max", "sample"])
def test_nothing_to_draw_is_minus_one(kind, verb):
    x = np.array([[-INF, -INF], [math.nan, 0.0], [INF, 0.0], [-INF, 0.0]], np.float32)
    draw = gumbel_max if verb == "gumbel_max" else lambda a, **k: sample(Softmax(), a, **k)
    for count in (50,) if kind == "jax" else (None, 50):
        index = back(draw(KINDS[kind](x), generator=generator(kind), num_samples=count))
        assert (index == np.array([-1, -1, -1, 1])).all()


@every_kind
def test_a_class_of_probability_zero_is_never_drawn(kind):
    """First and last classes without mass, and cumulative sums that are not monotone in the last bit."""
    c = KINDS[kind]
    p = np.zeros((1, 40), np.float32)
    p[0, [7, 20, 21]] = 0.25, 1e-30, 0.75
    xp = __import__("anymax._array", fromlist=["namespace"]).namespace(c(p))
    index = back(_invert(c(p), 5000, generator(kind), xp))
    assert set(np.unique(index)) == {7, 21}


def test_sums_that_are_not_monotone(monkeypatch):
    """What a parallel sum may do, made gross: the sum grows where there is no mass."""
    import anymax.samplers as s

    p = np.array([[0.0, 0.5, 0.0, 0.0, 0.5, 0.0]])
    exact = s.running_sum

    def rough(x, xp, dtype=None):
        out = exact(x, xp, dtype)
        return out + np.array([0.1, 0.0, 0.1, -0.05, 0.0, 0.1]) if np.issubdtype(out.dtype, np.floating) else out

    monkeypatch.setattr(s, "running_sum", rough)
    index = s._invert(p, 5000, np.random.default_rng(0), np)
    assert set(np.unique(index)) == {1, 4}


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 507])
def test_bisection_is_searchsorted(n):
    rng = np.random.default_rng(n)
    rows = np.sort(rng.integers(0, 9, (4, n)), axis=-1)
    level = rng.integers(-1, 11, (4, 50))
    want = np.stack([np.searchsorted(r, v, side="right") for r, v in zip(rows, level)])
    assert np.array_equal(_first_above(rows, level, np), np.minimum(want, n - 1))


# -- relaxed samples ------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("hard", [False, True])
def test_gumbel_softmax(kind, hard):
    x = np.tile(X[:2], (4000, 1, 1))
    y = back(gumbel_softmax(KINDS[kind](x), 0.7, hard=hard, generator=generator(kind)))
    assert y.dtype == np.float32
    np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-5)
    for i in range(2):
        agrees(y[:, i].argmax(-1), scipy_softmax(X[i].astype(np.float64)))
    assert set(np.unique(y)) == {0, 1} if hard else (y[..., :3] > 0).all()
    assert (y[:, 0, 3] == 0).all()


@every_kind
def test_gumbel_softmax_strange_rows_and_axes(kind):
    x = np.array([[-INF, -INF, -INF], [math.nan, 0.0, 1.0], [0.0, 1.0, 2.0]], np.float32)
    for hard in (False, True):
        y = back(gumbel_softmax(KINDS[kind](x), hard=hard, generator=generator(kind)))
        assert (y[0] == 0).all()
        assert np.isnan(y[1]).all()
        assert np.isclose(y[2].sum(), 1)
    if kind == "jax":
        return  # the same code, and each shape is a compilation
    y = back(gumbel_softmax(KINDS[kind](np.zeros((5, 3, 2))), 0.5, hard=True, axis=1, generator=generator(kind)))
    assert (y.sum(1) == 1).all()
    y = back(gumbel_softmax(KINDS[kind](np.zeros((5, 9))), mapping=Sparsemax(), generator=generator(kind)))
    np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-6)
    assert (y == 0).any()


def test_gumbel_softmax_gradient_is_that_of_the_soft_sample():
    torch = pytest.importorskip("torch")
    x = torch.tensor(X[0].astype(np.float64), requires_grad=True)
    w = torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    grads = [torch.autograd.grad(w @ gumbel_softmax(x, 0.7, hard=hard, generator=5), x)[0] for hard in (True, False)]
    assert torch.equal(*grads)
    assert torch.isfinite(grads[0]).all()
    assert grads[0].abs().sum() > 0
    finite = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for mapping in (None, Entmax(1.5)):
        assert torch.autograd.gradcheck(lambda v, m=mapping: gumbel_softmax(v, 0.7, generator=5, mapping=m), finite)


def test_gumbel_softmax_is_torchs_own():
    """The same noise into torch's formula."""
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    from anymax.transforms import noise

    z = noise("gumbel", generator=9)(x) / 0.3
    torch.testing.assert_close(gumbel_softmax(x, 0.3, generator=9), z.softmax(-1))
    hard = torch.nn.functional.one_hot(z.argmax(-1), 6).float()
    assert torch.equal(gumbel_softmax(x, 0.3, generator=9, hard=True), hard)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_halves(half):
    torch = pytest.importorskip("torch")
    x = torch.tensor(X).to(getattr(torch, half))
    assert gumbel_softmax(x, generator=0).dtype == x.dtype
    assert torch.equal(gumbel_max(x, generator=0, num_samples=50), gumbel_max(x.float(), generator=0, num_samples=50))
    mine = sample(Softmax(), x, generator=0, num_samples=50)
    assert torch.equal(mine, sample(Softmax(), x.float(), generator=0, num_samples=50))


# -- randomness is an argument --------------------------------------------------------------------------------------------

VERBS = {
    "gumbel_max": gumbel_max,
    "perturb_argmax": lambda x, **k: perturb_argmax(x, "normal", **k),
    "gumbel_softmax": gumbel_softmax,
    "sample": lambda x, **k: sample(Softmax(), x, **k),
}


@every_kind
@pytest.mark.parametrize("verb", VERBS)
def test_generators(kind, verb):
    draw, x = VERBS[verb], KINDS[kind](np.zeros(1000, np.float32))
    assert np.array_equal(back(draw(x, generator=3)), back(draw(x, generator=np.int64(3))))
    assert not np.array_equal(back(draw(x, generator=3)), back(draw(x, generator=4)))
    assert np.array_equal(back(draw(x, generator=generator(kind))), back(draw(x, generator=generator(kind))))
    moving = generator(kind)
    assert np.array_equal(back(draw(x, generator=moving)), back(draw(x, generator=moving))) == (kind == "jax")
    with pytest.raises(TypeError, match="generator"):
        draw(x)
    words = {"numpy": "numpy.random.default_rng", "torch": "torch.Generator", "jax": "jax.random.key"}
    others = [generator(k) for k in KINDS if k != kind and {k, kind} != {"numpy", "strict"}]
    for wrong in (None, True, 1.5, np.random, *others):
        with pytest.raises(TypeError, match=words.get(kind, "numpy.random.Generator")):
            draw(x, generator=wrong)
    assert np.array_equal(back(x), np.zeros(1000))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: gumbel_max([True, False], generator=0), TypeError, "bool"),
        (lambda: gumbel_max(np.zeros((2, 0)), generator=0), ValueError, "no class to draw"),
        (lambda: gumbel_max([0.0], generator=0, num_samples=1.5), TypeError, "num_samples"),
        (lambda: gumbel_max([0.0], generator=0, num_samples=-1), TypeError, "num_samples"),
        (lambda: gumbel_max([0.0], generator=0, axis=1), ValueError, "out of range"),
        (lambda: perturb_argmax([0.0], "cauchy", generator=0), ValueError, "gumbel, normal"),
        (lambda: perturb_argmax([0.0], scale=-1, generator=0), ValueError, "at least 0"),
        (lambda: perturb_argmax([0.0], scale="1", generator=0), TypeError, "number"),
        (lambda: gumbel_softmax([0.0], -1.0, generator=0), ValueError, "at least 0"),
        (lambda: sample(Softmax(), np.zeros((2, 0)), generator=0), ValueError, "no class to draw"),
        (lambda: sample(Softmax(), [True], generator=0), TypeError, "bool"),
    ],
)
def test_what_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_integer_scores_and_lists():
    assert gumbel_max([0, 100], generator=0) == 1
    assert sample(Softmax(), np.array([0, 100]), generator=0) == 1


@pytest.mark.thin(2)
@pytest.mark.parametrize("verb", VERBS)
def test_jit_and_vmap(verb):
    jax = pytest.importorskip("jax")
    draw = VERBS[verb]
    x = jax.numpy.asarray(np.random.default_rng(0).normal(size=(3, 5)), dtype="float32")
    key = jax.random.key(0)
    got = jax.jit(lambda x, key: draw(x, generator=key))(x, key)
    np.testing.assert_allclose(got, draw(x, generator=key), rtol=1e-5)
    if verb in ("gumbel_max", "sample"):
        keys = jax.random.split(key, 3)
        one = jax.jit(lambda x, key: draw(x, generator=key))
        rows = jax.jit(jax.vmap(lambda x, key: draw(x, generator=key)))(x, keys)
        assert np.array_equal(rows, np.stack([one(r, k) for r, k in zip(x, keys)]))


def test_jax_gradient():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(X[0])
    w = jax.numpy.arange(5.0)
    value = lambda v, h: w @ gumbel_softmax(v, 0.7, hard=h, generator=5)  # noqa: E731
    soft, hard = (jax.jit(jax.grad(value), static_argnums=1)(x, h) for h in (False, True))
    np.testing.assert_allclose(soft, hard, rtol=1e-6)
    assert np.isfinite(soft).all()
