"""Samplers: frequencies within five standard deviations of exact probabilities, and what may never be drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, generator, jax_in_the_whole_battery
from sampling_cases import CUT, INF, N, X, agrees, vocabulary
from scipy import stats
from scipy.special import softmax as scipy_softmax

from anymax import apply
from anymax._array import namespace
from anymax._random import draws, generators
from anymax._random.draws import first_above, invert, uniforms
from anymax.mappings import Budget, Entmax, Softmax, Sparsemax, SparseSoftmax
from anymax.sampling.samplers import gumbel_max, gumbel_softmax, perturb_argmax, sample
from anymax.transforms import compose, logit_bias, noise, prior, temperature, topk, topp


def sparsemax_row(z):
    s = np.sort(z)[::-1]
    tau = (np.cumsum(s) - 1) / np.arange(1, len(z) + 1)
    return np.maximum(z - tau[np.sum(s > tau) - 1], 0)


@every_kind
def test_gumbel_max_is_softmax(kind):
    index = back(gumbel_max(KINDS[kind](X), generator=generator(kind), num_samples=N))
    assert index.shape == (N, 3)
    assert index.dtype.kind == "i"
    for row, x in zip(index.T, X):
        agrees(row, scipy_softmax(x.astype(np.float64)))


@jax_in_the_whole_battery
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


NOISES = {
    "gumbel": stats.gumbel_r, "normal": stats.norm, "logistic": stats.logistic, "laplace": stats.laplace, "exponential": stats.expon,
    "uniform": stats.uniform,
}  # fmt: skip


@jax_in_the_whole_battery
@every_kind
@pytest.mark.parametrize("noise", NOISES)
def test_perturb_argmax_of_two(kind, noise):
    """P[x0 + e0 > x1 + e1] from the distribution of the difference of two noises, by numerical integration."""
    law = NOISES[noise]
    x, scale = np.array([0.4, 0.0], np.float32), 0.8
    grid = np.linspace(-40, 40, 400_001)
    p = np.trapezoid(law.pdf(grid) * law.cdf(grid + 0.5), grid)
    index = back(perturb_argmax(KINDS[kind](x), noise, scale, generator=generator(kind), num_samples=N))
    agrees(index, np.array([p, 1 - p]))


@jax_in_the_whole_battery
@every_kind
def test_scale_zero_is_argmax(kind):
    assert np.array_equal(back(perturb_argmax(KINDS[kind](X), scale=0, generator=0)), X.argmax(-1))


MAPS = {
    "softmax": (Softmax(), lambda x: scipy_softmax(x)),
    "sparsemax": (Sparsemax(), sparsemax_row),
    "topk": (SparseSoftmax(k=2), lambda x: scipy_softmax(np.where(np.argsort(np.argsort(-x)) < 2, x, -INF))),
}


@jax_in_the_whole_battery
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


@jax_in_the_whole_battery
@every_kind
@pytest.mark.parametrize("verb", ["gumbel_max", "sample"])
def test_nothing_to_draw_is_minus_one(kind, verb):
    x = np.array([[-INF, -INF], [math.nan, 0.0], [INF, 0.0], [-INF, 0.0]], np.float32)
    draw = gumbel_max if verb == "gumbel_max" else lambda a, **k: sample(Softmax(), a, **k)
    for count in (50,) if kind == "jax" else (None, 50):
        index = back(draw(KINDS[kind](x), generator=generator(kind), num_samples=count))
        assert (index == np.array([-1, -1, -1, 1])).all()


@jax_in_the_whole_battery
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


@jax_in_the_whole_battery
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


@jax_in_the_whole_battery
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


@jax_in_the_whole_battery
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
        for shape in ("sigmoid", "laplace"):
            np.testing.assert_array_equal(back(draw(KINDS[kind](x), mapping=Budget(k, shape), hard=True)), want)
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


@jax_in_the_whole_battery
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


@pytest.mark.soon
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


@jax_in_the_whole_battery
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


@pytest.mark.whole
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


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("mapping", [Softmax(), Entmax(1.5), Budget(2.0), SparseSoftmax(p=0.8)])
def test_the_support_is_where_p_is_not_0(mapping, kind):
    x = np.random.default_rng(0).normal(0, 3, (6, 2000)).astype(np.float32)
    x[0], x[1, 1:], x[2, 3], x[3, 4], x[4, 5] = -np.inf, -np.inf, np.nan, np.inf, 300.0
    x[5, ::2] = -np.inf
    heat = np.linspace(0.3, 1.2, 6, dtype=np.float32)[:, None]
    given = x if kind == "numpy" else pytest.importorskip("torch").tensor(x)
    for cut in (None, topp(0.9), compose(temperature(heat), topk(7), temperature(0.05))):
        drawn = sample(mapping, given, transform=cut, generator=0, num_samples=3, return_support=True)
        p = np.asarray(apply(mapping, x if cut is None else cut(x)))
        want = [np.flatnonzero(row > 0) for row in p]
        ids, offsets = (np.asarray(a) for a in drawn.support)
        for i, row in enumerate(want):
            np.testing.assert_array_equal(ids[offsets[i] : offsets[i + 1]], row)
        for i, classes in enumerate(np.asarray(drawn.index).T):
            assert set(classes) <= {-1, *want[i]}


@pytest.mark.parametrize("mapping", ["entmax15", SparseSoftmax(p=0.9), "softmax"])
def test_a_support_is_listed_in_the_pass_that_draws(mapping, monkeypatch):
    """A second pass, as p of all classes or of candidates, costs more than the draw."""
    from anymax.kernels import native

    if isinstance(native.load(), str):
        pytest.skip("no compiled engine")
    passes, decode = [], native.ENGINE.decode
    monkeypatch.setattr(native.ENGINE, "decode", lambda *a, **k: (passes.append(k), decode(*a, **k))[1])
    sample(mapping, vocabulary(rows=3, n=4000), generator=0, return_support=True)
    assert [k.get("support") for k in passes] == [True]


@pytest.mark.filterwarnings("error")
def test_the_support_of_long_rows_that_are_strange_or_missing():
    none = sample(Softmax(), np.zeros((0, 2000), np.float32), generator=1, return_support=True)
    assert none.support.ids.size == 0
    assert none.support.offsets.tolist() == [0]
    x = np.zeros((80, 2000), np.float32)
    for first, others in ((INF, INF), (3e38, -3e38)):
        x[5], x[5, 0] = others, first
        drawn = sample(Softmax(), x, transform=topk(5), generator=1, return_support=True)
        assert np.diff(drawn.support.offsets)[[0, 5]].tolist() == ([5, 0] if others == INF else [5, 1])
