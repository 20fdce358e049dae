"""Samplers: frequencies within five standard deviations of exact probabilities, and what may never be drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, generator, jax_in_the_whole_battery, readonly
from scipy import stats
from scipy.special import softmax as scipy_softmax

import anymax as am
from anymax._array import namespace
from anymax._random import draws, generators
from anymax._random.draws import first_above, invert, uniforms
from anymax.mappings import Budget, Entmax, Softmax, Sparsemax, SparseSoftmax
from anymax.sampling.samplers import gumbel_max, gumbel_softmax, perturb_argmax, sample
from anymax.transforms import compose, cosine, logit_bias, minp, noise, prior, temperature, topk, topp

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
    u = back(generators.uniform((2**20,), KINDS[kind](np.zeros(1, np.float32)), generator(kind)))
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


@jax_in_the_whole_battery
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
    xp = namespace(c(p))
    index = back(invert(c(p), uniforms(c(p), 5000, generator(kind), xp), xp))
    assert set(np.unique(index)) == {7, 21}


def test_sums_that_are_not_monotone(monkeypatch):
    """What a parallel sum may do, made gross: the sum grows where there is no mass."""
    p = np.array([[0.0, 0.5, 0.0, 0.0, 0.5, 0.0]])
    exact = draws.running_sum

    def rough(x, xp, dtype=None):
        out = exact(x, xp, dtype)
        return out + np.array([0.1, 0.0, 0.1, -0.05, 0.0, 0.1]) if np.issubdtype(out.dtype, np.floating) else out

    monkeypatch.setattr(draws, "running_sum", rough)
    index = invert(p, np.random.default_rng(0).random((1, 5000)), np)
    assert set(np.unique(index)) == {1, 4}


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 507])
def test_bisection_is_searchsorted(n):
    rng = np.random.default_rng(n)
    rows = np.sort(rng.integers(0, 9, (4, n)), axis=-1)
    level = rng.integers(-1, 11, (4, 50))
    want = np.stack([np.searchsorted(r, v, side="right") for r, v in zip(rows, level)])
    assert np.array_equal(first_above(rows, level, np), np.minimum(want, n - 1))


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


@every_kind
def test_a_hard_sample_of_a_budget_has_k_ones(kind):
    """Those of the k largest scores with their noise; half a unit goes to the next, and a row has no more than its classes."""
    x = np.random.default_rng(3).normal(size=(4, 6)).astype(np.float32)
    x[3, 2:] = -INF
    draw = lambda x, **given: gumbel_softmax(x, generator=generator(kind), **given)  # noqa: E731
    place = np.argsort(np.argsort(-back(draw(KINDS[kind](x))), axis=-1), axis=-1)
    for k in (1, 2, 1.5):
        want = np.where(x > -INF, np.clip(k - place, 0, 1), 0)
        np.testing.assert_array_equal(back(draw(KINDS[kind](x), mapping=Budget(k), hard=True)), want)
    each = KINDS[kind](np.array([[1.0, 3.0, 2.0, 1.0]], np.float32))
    sums = back(draw(KINDS[kind](x.T), mapping=Budget(each), hard=True, axis=0)).sum(0)
    assert sums.tolist() == [1, 3, 2, 1]


def test_the_gradient_of_a_hard_sample_is_that_of_the_soft_one_for_a_learned_budget():
    torch = pytest.importorskip("torch")
    x, k = torch.randn(6, generator=torch.Generator().manual_seed(1)), torch.tensor(2.5)
    x.requires_grad_(), k.requires_grad_()
    w = torch.arange(1.0, 7.0)
    hard, soft = (
        torch.autograd.grad(w @ gumbel_softmax(x, 0.7, hard=hard, generator=5, mapping=Budget(k)), (x, k))
        for hard in (True, False)
    )
    assert soft[1] > 0
    torch.testing.assert_close(hard, soft)


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
    if kind != "jax":
        assert draw(x) is not None
    words = {"numpy": "numpy.random.default_rng", "torch": "torch.Generator", "jax": "jax.random.key"}
    others = [generator(k) for k in KINDS if k != kind and {k, kind} != {"numpy", "strict"}]
    for wrong in (True, 1.5, np.random, *others, *([None] if kind == "jax" else [])):
        with pytest.raises(TypeError, match=words.get(kind, "numpy.random.Generator")):
            draw(x, generator=wrong)
    assert np.array_equal(back(x), np.zeros(1000))


@every_kind
def test_a_seed_is_an_integer_of_one_range_for_all_frameworks(kind):
    x = KINDS[kind](np.zeros((2, 30), np.float32))
    for seed in (-1, np.int64(-7), 2**63, np.uint64(2**63), 2**70, [3, -1]):
        with pytest.raises(ValueError, match=r"generator: a seed must be an integer from 0 to 2\*\*63 - 1, got "):
            sample(Softmax(), x, generator=seed)
    assert back(sample(Softmax(), x, generator=2**63 - 1)).min() >= 0


def test_seeds_on_the_meta_device():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 5, device="meta")
    drawn = sample(Softmax(), x, transform=compose(topk(2), noise(generator=1)), generator=[0, 1], return_log_prob=True)
    assert [tuple(v.shape) for v in drawn[:3]] == [(2,), (2,), (2,)]
    assert drawn.index.device.type == "meta"
    assert am.attention(x, x, x, Sparsemax(), dropout_p=0.5, generator=0).shape == (2, 5)


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
        (
            lambda: sample(Softmax(), np.zeros((2, 3)), transform=cosine(np.eye(5, 3))),
            ValueError,
            r"got, \(2, 3\) of float64, but gave ndarray of float64 \(2, 5\)",
        ),
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


# -- one number a row --------------------------------------------------------------------------------------------------------

CUT = compose(temperature(0.7), topk(6), topp(0.9), minp(0.02))


def vocabulary(rows=6, n=40, seed=0):
    x = np.random.default_rng(seed).normal(0, 1.5, (rows, n)).astype(np.float32)
    x[:, 3] = -INF
    return x


@every_kind
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_a_row_with_some_strange_probabilities_has_no_class(kind, bad):
    """Its last class has a probability, which a search in sums that no number is above comes to."""
    p = KINDS[kind](np.array([[0.5, bad, 0.5]]))
    xp = namespace(p)
    assert back(invert(p, 0.3 * xp.ones_like(p[..., :1]), xp)).tolist() == [[-1]]


@every_kind
def test_the_inverse_at_its_ends(kind):
    """u = 0 and u = 1 - ulp give the first and the last class with mass, whatever lies outside."""
    c = KINDS[kind]
    p = np.zeros((3, 9), np.float32)
    p[0, [2, 5]] = 0.3, 0.7
    p[1, 4] = 1.0
    p[2, [1, 2, 7]] = 0.1, 1e-45, 1 / 3
    ulp = 2.0**-24 if kind == "jax" else 2.0**-53
    u = np.tile(np.array([0.0, 1 - ulp]), (3, 1)).astype(np.float32 if kind == "jax" else np.float64)
    index = back(invert(c(p), c(u), namespace(c(p))))
    assert index.tolist() == [[2, 5], [4, 4], [1, 7]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jax"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_a_row_is_the_generators_own(kind, count):
    """What an engine that draws has to keep: fp64, rows in C order, the first class whose cumulative probability exceeds it."""
    x = vocabulary().reshape(2, 3, 40)
    if kind == "torch":
        import torch

        u = torch.rand(6 * count, dtype=torch.float64, generator=torch.Generator().manual_seed(8)).numpy()
    else:
        u = np.random.default_rng(8).random(6 * count)
    p = back(am.apply(Softmax(), CUT(KINDS[kind](x)))).reshape(6, 40).astype(np.float64)
    upto = np.cumsum(p, axis=-1)
    want = [[np.searchsorted(c, v * c[-1], side="right") for v in vs] for c, vs in zip(upto, u.reshape(6, count))]
    got = back(sample(Softmax(), KINDS[kind](x), transform=CUT, generator=8, num_samples=count))
    assert got.tolist() == np.array(want).T.reshape(count, 2, 3).tolist()


@every_kind
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_number_does_not_mind_how_many_follow(kind, dtype):
    like = KINDS[kind](np.zeros(1, dtype))
    many, few = (back(generators.uniform((n, 3), like, generator(kind))) for n in (50, 7))
    assert np.array_equal(many[:7], few)
    assert len(np.unique(many)) == 150


@pytest.mark.whole(lambda kind: kind == "jax")
@every_kind
@pytest.mark.parametrize("mapping", [Softmax(), Sparsemax(), Entmax(1.5), SparseSoftmax(k=4)], ids=lambda m: m.name)
def test_a_row_does_not_mind_its_neighbours(kind, mapping):
    """From one seed row i has the i-th number, however many follow; from a list its own, whatever stands before it."""
    if kind == "jax" and mapping.name in ("sparsemax", "sparse_softmax"):
        pytest.skip("drawn as entmax is, and each program takes a while to compile")
    c, x = KINDS[kind], vocabulary()
    whole = back(sample(mapping, c(x), transform=CUT, generator=5))
    few = back(sample(mapping, c(x[:2]), transform=CUT, generator=5))
    assert np.array_equal(whole[:2], few)
    many = back(sample(mapping, c(x), transform=CUT, generator=5, num_samples=7))
    assert np.array_equal(many[:, :2], back(sample(mapping, c(x[:2]), transform=CUT, generator=5, num_samples=7)))
    seeds = [7, 1, 7, 3, 2, 9]
    for count in (None, 5):
        rows = back(sample(mapping, c(x), transform=CUT, generator=seeds, num_samples=count))
        alone = [back(sample(mapping, c(r), transform=CUT, generator=s, num_samples=count)) for r, s in zip(x, seeds)]
        assert np.array_equal(rows, np.stack(alone, axis=-1))
    drawn = back(sample(mapping, c(np.zeros((6, 1000), np.float32)), generator=[1, 1, 2, 2, 3, 3]))
    assert (drawn[::2] == drawn[1::2]).all()
    assert len(set(drawn.tolist())) > 1


@every_kind
@pytest.mark.parametrize("verb", VERBS)
def test_generators_a_row(kind, verb):
    draw, c, x = VERBS[verb], KINDS[kind], np.random.default_rng(1).normal(size=(2, 2, 30)).astype(np.float32)
    rows = back(draw(c(x), generator=[generator(kind, s) for s in (4, 5, 6, 7)]))
    for i, seed in enumerate((4, 5, 6, 7)):
        assert np.array_equal(
            rows.reshape(4, -1)[i], back(draw(c(x.reshape(4, 30)[i]), generator=generator(kind, seed))).ravel()
        )
    moved = back(draw(c(np.moveaxis(x, -1, 0)), generator=(4, 5, 6, 7), axis=0))
    straight = back(draw(c(x), generator=[4, 5, 6, 7]))
    assert np.array_equal(moved if verb != "gumbel_softmax" else np.moveaxis(moved, 0, -1), straight)
    with pytest.raises(ValueError, match="got 3 for 4 rows; give one for each row, or one for all"):
        draw(c(x), generator=[1, 2, 3])


@pytest.mark.whole
def test_keys_a_row():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(vocabulary())
    keys = jax.random.split(jax.random.key(0), 6)
    got = jax.jit(lambda x, keys: sample(Softmax(), x, transform=CUT, generator=keys))(x, keys)
    assert np.array_equal(got, sample(Softmax(), x, transform=CUT, generator=list(keys)))
    each = jax.vmap(lambda r, k: sample(Softmax(), r, transform=CUT, generator=k))(x, keys)
    assert np.array_equal(got, each)


def test_the_global_generators():
    torch = pytest.importorskip("torch")
    x = vocabulary()
    for c, seed in ((np.asarray, np.random.seed), (torch.tensor, torch.manual_seed)):
        drawn = []
        for _ in range(2):
            seed(3)
            drawn.append(np.stack([back(sample(Softmax(), c(x))) for _ in range(5)]))
        assert np.array_equal(*drawn)
        assert len(np.unique(drawn[0], axis=0)) > 1
    x = torch.tensor(x)
    torch.manual_seed(0)
    first = sample(Softmax(), x)
    assert torch.equal(first, sample(Softmax(), x, generator=torch.Generator().manual_seed(0)))


def test_a_generator_of_another_device():
    """Asked of scores without data, since a machine may have one device only."""
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"generator: it is on cpu and the scores are on meta; use torch\.Generator"):
        generators.uniform((3, 1), torch.zeros(3, device="meta"), torch.Generator())


# -- transforms, log p, supports ---------------------------------------------------------------------------------------------


@jax_in_the_whole_battery
@every_kind
def test_draws_after_transforms_have_their_frequencies(kind):
    x = vocabulary(rows=2, n=12)
    drawn = back(sample(Softmax(), KINDS[kind](x), transform=CUT, generator=generator(kind), num_samples=N))
    for row, r in zip(drawn.T, x):
        agrees(row, scipy_softmax(CUT(r.astype(np.float64))))
    sparse = compose(topk(4), prior(scale=0.5))
    drawn = back(sample(Sparsemax(), KINDS[kind](x), transform=sparse, generator=generator(kind), num_samples=N))
    for row, r in zip(drawn.T, x.astype(np.float64)):
        agrees(row, np.where(np.isinf(sparse(r)), 0, sparsemax_row(np.maximum(sparse(r), -1e3))))


@every_kind
@pytest.mark.parametrize("count", [None, 3])
def test_log_prob_and_support(kind, count):
    c, x = KINDS[kind], vocabulary()
    x[1], x[4, 5] = -INF, math.nan
    order = compose(logit_bias({0: 1.0, 7: -INF}), topk(9), temperature(0.7), topp(0.9))
    whole = compose(logit_bias({0: 1.0, 7: -INF}), temperature(0.7))
    drawn = sample(
        Softmax(), c(x), transform=order, generator=2, num_samples=count, return_log_prob=True, return_support=True
    )
    index, log_prob, full, (ids, offsets) = (back(a) if i < 3 else tuple(map(back, a)) for i, a in enumerate(drawn))
    assert np.array_equal(index, back(sample(Softmax(), c(x), transform=order, generator=2, num_samples=count)))
    assert index.shape == log_prob.shape == full.shape == ((6,) if count is None else (3, 6))
    assert offsets.shape == (7,)
    assert offsets[0] == 0
    assert offsets[-1] == len(ids)
    for i, r in enumerate(x.astype(np.float64)):
        kept = ids[offsets[i] : offsets[i + 1]]
        each = index[..., i].ravel()
        if i in (1, 4):
            assert len(kept) == 0
            assert (each == -1).all()
            for a in (log_prob, full):
                assert (np.isnan if i == 4 else np.isneginf)(a[..., i]).all()
            continue
        p, q = scipy_softmax(order(r)), scipy_softmax(whole(r))
        assert np.array_equal(kept, np.flatnonzero(p))
        found, whole_found = log_prob[..., i].ravel(), full[..., i].ravel()
        np.testing.assert_allclose(found, np.log(p[each]), atol=2e-6)
        np.testing.assert_allclose(whole_found, np.log(q[each]), atol=2e-6)
        np.testing.assert_allclose(whole_found - found, np.log(q[kept].sum()), atol=3e-6)  # the kept mass


@every_kind
def test_log_prob_of_other_maps_axes_and_masks(kind):
    c, x = KINDS[kind], vocabulary()
    keep = np.arange(40) % 2 == 0
    drawn = sample(
        Sparsemax(), c(x.T), transform=compose(prior(scale=0.3), topk(5)), generator=2, axis=0, mask=c(keep[:, None]),
        return_log_prob=True, return_support=True,
    )  # fmt: skip
    ids, offsets = map(back, drawn.support)
    for i, r in enumerate(x.astype(np.float64)):
        r = np.where(keep, r, -INF) * 0.3
        cut = np.where(topk(5)(r) > -INF, r, -1e3)
        p, q = sparsemax_row(cut), sparsemax_row(np.maximum(r, -1e3))
        assert np.array_equal(ids[offsets[i] : offsets[i + 1]], np.flatnonzero(p))
        assert p[back(drawn.index)[i]] > 0
        np.testing.assert_allclose(back(drawn.log_prob)[i], np.log(p[back(drawn.index)[i]]), atol=1e-5)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(back(drawn.full_log_prob)[i], np.log(q[back(drawn.index)[i]]), atol=1e-5)
    two = sample(Budget(2), c(np.array([3.0, 1.0, 0.5, -9.0])), generator=0, num_samples=50, return_log_prob=True)
    want = np.log(np.array([1.0, 0.75, 0.25]) / 2)[back(two.index)]  # one class is drawn, of a mass of 2
    np.testing.assert_allclose(back(two.log_prob), want, atol=1e-6)
    half = sample(Budget(3), c(np.array([3.0, 1.0, -INF, -INF])), generator=0, num_samples=50, return_log_prob=True)
    np.testing.assert_allclose(back(half.log_prob), math.log(0.5), atol=1e-6)


@jax_in_the_whole_battery
@every_kind
def test_log_prob_with_noise_in_the_transform(kind):
    """The same noise in both log p: without a truncation before it they agree to the kept mass."""
    x = vocabulary(rows=3, n=8)
    order = compose(topk(5), noise("gumbel", 2.0, generator=generator(kind)), topk(3))
    drawn = sample(Softmax(), KINDS[kind](x), transform=order, generator=1, return_log_prob=True, return_support=True)
    assert (back(drawn.log_prob) >= back(drawn.full_log_prob) - 1e-6).all()
    assert (np.diff(back(drawn.support.offsets)) == 3).all()
    plain = sample(Softmax(), KINDS[kind](x), generator=1, return_log_prob=True)
    assert np.array_equal(back(plain.log_prob), back(plain.full_log_prob))
    assert plain.support is None


@every_kind
def test_transforms_go_along_the_axis_of_the_classes(kind):
    c, x = KINDS[kind], vocabulary()
    straight = back(sample(Softmax(), c(x), transform=compose(temperature(0.5), topk(2)), generator=4, num_samples=3))
    for cut in (compose(temperature(0.5), topk(2)), compose(temperature(0.5), topk(2, axis=0))):
        assert np.array_equal(
            straight, back(sample(Softmax(), c(x.T), transform=cut, generator=4, num_samples=3, axis=0))
        )
    with pytest.raises(ValueError, match=r"topk\(k=2, axis=1\) goes along axis 1 and the classes are axis 0"):
        sample(Softmax(), c(x.T), transform=topk(2, axis=1), axis=0, generator=4)
    for wrong in (0.7, Softmax, Softmax(), [topk(2)]):
        with pytest.raises(TypeError, match="transform must be a function scores -> scores"):
            sample(Softmax(), c(x), transform=wrong, generator=4)
    own = back(sample(Softmax(), c(x), transform=lambda s: topk(2)(temperature(0.5)(s)), generator=4, num_samples=3))
    assert np.array_equal(straight, own)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_log_prob_of_halves_is_fp32(half):
    torch = pytest.importorskip("torch")
    x = torch.tensor(vocabulary()).to(getattr(torch, half))
    mine = sample(Softmax(), x, transform=CUT, generator=0, return_log_prob=True)
    theirs = sample(Softmax(), x.float(), transform=CUT, generator=0, return_log_prob=True)
    assert mine.log_prob.dtype == mine.full_log_prob.dtype == torch.float32
    for a, b in zip(mine[:3], theirs[:3]):
        assert torch.equal(a, b)


def test_no_derivative_and_learned_parameters():
    torch = pytest.importorskip("torch")
    alpha = torch.tensor(1.5, requires_grad=True)
    x = torch.tensor(vocabulary(), requires_grad=True)
    drawn = sample(Entmax(alpha), x, transform=temperature(alpha), generator=0, return_log_prob=True)
    assert not any(a.requires_grad for a in drawn[:3])


def test_jit_with_transforms_and_log_prob():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(vocabulary())
    draw = lambda x, key: sample(Softmax(), x, transform=CUT, generator=key, return_log_prob=True)[:3]  # noqa: E731
    for a, b in zip(jax.jit(draw)(x, jax.random.key(1)), draw(x, jax.random.key(1))):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    with pytest.raises(TypeError, match="return_support: how many classes there are depends on the scores"):
        jax.jit(lambda x: sample(Softmax(), x, generator=0, return_support=True).support)(x)


@jax_in_the_whole_battery
@every_kind
def test_empty_batches(kind):
    drawn = sample(
        Softmax(), KINDS[kind](np.zeros((0, 4))), transform=CUT, generator=0, return_log_prob=True, return_support=True
    )
    assert back(drawn.index).shape == back(drawn.log_prob).shape == (0,)
    assert back(drawn.support.offsets).tolist() == [0]
    assert sample(Softmax(), KINDS[kind](np.zeros((0, 4))), generator=[]).shape == (0,)
