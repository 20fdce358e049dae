"""Transforms that change scores, against their formulas: normalisation, temperature, priors, cosines, noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, generator, jax_in_the_whole_battery
from transform_cases import INF, scores

import anymax as A
from anymax.transforms import (
    compose,
    cosine,
    dynamic_temperature,
    logit_bias,
    mask,
    mix,
    noise,
    normalize,
    prior,
    repetition_penalty,
    scalable,
    temperature,
    topk,
    topnsigma,
    xtc,
)

# -- normalisation --------------------------------------------------------------------------------------------------------


def normalize_row(row, kind):
    keep = row > -INF
    z = row[keep].astype(np.float64)
    if z.size and np.any(z != 0):
        norm = {"l1": np.abs(z).sum(), "l2": math.sqrt((z**2).sum()), "max": z.max() if z.max() > 0 else -z.min()}[kind]
        z = z / norm
    out = row.astype(np.float64)
    out[keep] = z
    return out


@every_kind
@pytest.mark.parametrize("which", ["l1", "l2", "max"])
def test_normalize(kind, which):
    x = np.array(scores(seed=5))
    x[2], x[3], x[4] = 0.0, -np.abs(x[3]), 3.0
    got = back(normalize(which)(KINDS[kind](x)))
    np.testing.assert_allclose(got, np.stack([normalize_row(r, which) for r in x]), rtol=1e-6)
    big = back(normalize(which)(KINDS[kind](np.array([[3e38, -1e38, 3e38], [1e-44, -3e-44, 1e-45]], np.float32))))
    assert np.isfinite(big).all()


def test_normalize_max_never_masks_an_entry():
    x = np.array([[-1.0, 1e-39], [-5.0, 1e-45], [-1e38, 1e-38]], np.float32)
    y = normalize("max")(x)
    assert np.isfinite(y).all()
    assert (y[:, 0] < -0.9).all()
    assert y[0, 1] == 1


@pytest.mark.parametrize("which", ["l1", "l2", "max", "standard"])
def test_normalize_keeps_the_order(which):
    for row in ([-3.0, -1.0, -2.0], [0.0, -1.0, -2.0], [1.0, 5.0, -2.0]):
        x = np.array(row)
        assert np.array_equal(np.argsort(normalize(which)(x)), np.argsort(x))


# -- the simple ones ------------------------------------------------------------------------------------------------------


@every_kind
def test_scalable_follows_the_number_of_kept_entries(kind):
    c = KINDS[kind]
    x = scores(n=5)
    n = (x > -INF).sum(-1, keepdims=True).clip(1)
    beta = np.linspace(0.5, 2, len(x), dtype=np.float32)[:, None]
    np.testing.assert_allclose(
        back(scalable()(c(x))), np.where(x == -INF, -INF, np.log(n) * np.where(x == -INF, 0, x)), rtol=1e-6
    )
    want = np.where(x == -INF, -INF, (0.3 + beta * np.log(n) ** 1.5) * np.where(x == -INF, 0, x))
    np.testing.assert_allclose(back(scalable(c(beta), 1.5, 0.3)(c(x))), want, rtol=1e-5)
    for given in (64, c(np.full((len(x), 1), 64.0, np.float32))):
        want = np.where(x == -INF, -INF, np.log(64.0) * np.where(x == -INF, 0, x))
        np.testing.assert_allclose(back(scalable(n=given)(c(x))), want, rtol=1e-5)
    assert back(scalable(gamma=-1.0, n=1)(c(x[1:2])))[0, 0] == 0.0


def dynamic_row(row, low, high, exponent):
    """llama.cpp's: `temp_ext` of its sampler, for the classes that are not masked."""
    live = row[row > -INF].astype(np.float64)
    q = np.exp(live - live.max()) / np.exp(live - live.max()).sum() if live.size else live
    entropy = -sum(v * math.log(v) for v in q if v > 0)
    share = entropy / math.log(live.size) if live.size > 1 else 0.0
    return row / (low + (high - low) * share**exponent)


@every_kind
def test_dynamic_temperature(kind):
    c = KINDS[kind]
    x = scores(n=7, seed=3)
    level = np.linspace(0.2, 3, len(x), dtype=np.float32)[:, None]
    for low, high, exponent in ((0.5, 1.5, 1.0), (1.2, 0.3, 2.5), (0.7, 0.7, 1.0), (0.1, 2.0, 0.4)):
        want = np.stack([dynamic_row(r, low, high, exponent) for r in x])
        np.testing.assert_allclose(back(dynamic_temperature(low, high, exponent)(c(x))), want, rtol=3e-6)
    want = np.stack([dynamic_row(r, v, 2 * v, 0.5 + v) for r, (v,) in zip(x, level)])
    np.testing.assert_allclose(back(dynamic_temperature(c(level), 2 * level, c(0.5 + level))(c(x))), want, rtol=5e-6)
    sure = back(dynamic_temperature(0, 2.0)(c(np.array([[900.0, 0.0, -3.0], [1.0, 1.0, -INF]], np.float32))))
    assert np.array_equal(sure, [[1, -INF, -INF], [0.5, 0.5, -INF]]), "no entropy and low = 0: the limit"


def test_the_gradient_of_a_dynamic_temperature_passes_its_entropy():
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).double()
    x[1] = 0.3  # the largest entropy
    x[2, 1:] = -60.0  # none
    x.requires_grad_()
    low, high, power = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.5, 1.7, 1.4))
    assert torch.autograd.gradcheck(lambda *a: dynamic_temperature(*a[1:])(a[0]), (x, low, high, power))
    assert torch.autograd.gradgradcheck(dynamic_temperature(0.5, 1.7, 2.0), x)


@every_kind
def test_temperature_mask_prior(kind):
    c = KINDS[kind]
    x = scores(n=4)
    keep = np.array([True, False, True, True])
    log_p = np.array([0.0, -1.0, -INF, 2.0], np.float32)
    factor = np.array([1.0, -2.0, 0.0, 0.5], np.float32)
    off = x == -INF
    assert np.array_equal(back(temperature(0.25)(c(x))), x * 4)
    rows = np.linspace(0.5, 2, len(x), dtype=np.float32)[:, None]
    np.testing.assert_allclose(back(temperature(c(rows))(c(x))), np.where(off, -INF, x / rows), rtol=1e-6)
    assert np.array_equal(back(mask(c(keep))(c(x))), np.where(keep, x, -INF))
    assert np.array_equal(back(mask(keep)(c(x))), np.where(keep, x, -INF))
    finite = np.where(off, 0, x)
    assert np.array_equal(back(prior(log_p)(c(x))), np.where(off, -INF, finite + log_p))
    assert np.array_equal(back(prior(scale=c(factor))(c(x))), np.where(off, -INF, finite * factor))
    assert np.array_equal(back(prior(c(log_p), 2.0)(c(x))), np.where(off, -INF, finite * 2 + log_p))
    assert np.array_equal(back(prior(c(log_p), strength=0.5)(c(x))), np.where(off, -INF, finite + 0.5 * log_p))
    assert np.array_equal(back(prior(c(log_p), strength=0)(c(x))), x)
    assert np.array_equal(back(prior(c(log_p), strength="sparsemax")(c(x))), np.where(off, -INF, finite + 0.25 * log_p))


@pytest.mark.parametrize(
    "mapping",
    ["softmax", "entmax:alpha=1.25", "entmax15", "sparsemax", "taylor", "sigsoftmax", "perturb_max", "normmax:alpha=2"],
)
def test_the_strength_that_fits_a_map(mapping):
    """Where all scores are equal, a small prior of that strength changes log p as it does with softmax."""
    log_p = 1e-3 * np.array([-1.0, 0.3, 0.2, 0.4, 0.1])

    def change(mapping, strength):
        up, down = (A.apply(mapping, prior(sign * log_p, strength=strength)(np.zeros(5))) for sign in (1, -1))
        return np.log(up) - np.log(down)

    np.testing.assert_allclose(change(mapping, mapping), change("softmax", 1), rtol=1e-3)


def test_the_strength_of_entmax_is_a_power_of_the_number_of_classes():
    for alpha in (1.0, 1.25, 1.5, 2.0, 3.0):
        log_p = np.log(np.full((2, 10), 0.1))
        (_, strength) = prior(log_p, strength=A.Entmax(alpha)).params[2]
        assert strength == pytest.approx(10 ** (1 - alpha), rel=1e-6)
    assert prior(log_p, strength="sparse_softmax:k=3").params[2][1] == 1.0
    assert prior(log_p.T, strength="sparsemax", axis=0).params[2][1] == pytest.approx(0.1)


@jax_in_the_whole_battery
@every_kind
def test_cosine(kind):
    c = KINDS[kind]
    rng = np.random.default_rng(0)
    e, w = rng.normal(size=(3, 5, 8)), rng.normal(size=(4, 8))
    e[0, 0] = 0
    e[0, 1] *= 1e30
    tolerance = 1e-6 if kind == "jax" else 1e-15
    w[1] *= 1e-7
    want = np.zeros((3, 5, 4))
    for i in range(3):
        for j in range(5):
            for k in range(4):
                a, b = e[i, j], w[k]
                length = np.linalg.norm(a / np.abs(a).max()) * np.abs(a).max() if np.any(a) else 1.0
                want[i, j, k] = (a / length) @ (b / np.linalg.norm(b))
    np.testing.assert_allclose(back(cosine(c(w))(c(e))), want, atol=tolerance)
    got = back(cosine(w, axis=1)(c(np.moveaxis(e, -1, 1))))
    np.testing.assert_allclose(got, np.moveaxis(want, -1, 1), atol=tolerance)
    short = np.array([1e-9, 0.0])
    np.testing.assert_allclose(back(cosine(np.eye(2), eps=1e-8)(c(short))), [0.1, 0.0], rtol=1e-6)


DISTRIBUTIONS = {
    "gumbel": "gumbel_r",
    "normal": "norm",
    "logistic": "logistic",
    "laplace": "laplace",
    "exponential": "expon",
    "uniform": "uniform",
}


@every_kind
@pytest.mark.parametrize("which", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_noise_has_its_distribution(kind, which, dtype):
    from scipy import stats

    x = np.zeros((2, 20_000), dtype)
    x[0, :5] = -INF
    y = back(noise(which, 2.0, generator=generator(kind))(KINDS[kind](x)))
    assert (y[0, :5] == -INF).all()
    for row in (y[0, 5:] / 2, y[1] / 2):
        assert stats.kstest(row, DISTRIBUTIONS[which]).pvalue > 1e-6
    assert abs(np.corrcoef(y[0, 5:], y[1, 5:])[0, 1]) < 0.04


@every_kind
def test_noise_and_its_generator(kind):
    x = KINDS[kind](np.zeros(6))
    seeded = noise(generator=3)
    assert np.array_equal(back(seeded(x)), back(seeded(x)))
    moving = noise(generator=generator(kind))
    assert np.array_equal(back(moving(x)), back(moving(x))) == (kind == "jax")
    for wrong in (True, 0.5, "seed", np.random.RandomState(0), *([None] if kind == "jax" else [])):
        with pytest.raises(TypeError, match=r"generator: .* need .*, or an integer seed; got"):
            noise(generator=wrong)(x)


@every_kind
def test_the_global_generators_serve(kind):
    x = KINDS[kind](np.zeros((3, 6), np.float32))
    for transform in (noise(), xtc(0.1, 0.5)):
        if kind == "jax":
            with pytest.raises(TypeError, match=r"JAX arrays need a key such as jax.random.key\(0\)"):
                transform(x)
            continue
        first, second = _seeded(transform, x), _seeded(transform, x)
        assert np.array_equal(first, second)
        assert first.std() > 0


def _seeded(transform, x):
    """With the global generators of NumPy and torch at a seed."""
    import torch

    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    return np.concatenate([np.nan_to_num(back(transform(x)), neginf=-9.0) for _ in range(9)])


@jax_in_the_whole_battery
@every_kind
def test_repetition_penalty(kind):
    """A score at a time, by the definition of OpenAI's, vLLM's and llama.cpp's samplers."""
    c = KINDS[kind]
    rng = np.random.default_rng(5)
    x = np.array(scores(n=7, rows=4, seed=3, ties=False))
    x[0], x[1, 0] = rng.normal(size=7), 0.0
    tokens = np.array([[0, 3, 3, 6], [6, 0, -1, -1], [1, 1, 1, 1], [-1, -1, -1, -1]])

    def want(x, tokens, r, a, f):
        out = x.astype(np.float64).copy()
        for i, row in enumerate(tokens):
            for t in set(row.tolist()) - {-1}:
                s = out[i, t]
                out[i, t] = (s / r if s > 0 else s * r) - a - f * row.tolist().count(t)
        return out

    for r, a, f in ((1.3, 0, 0), (1, 0.4, 0), (1, 0, -0.3), (0.7, 0.4, 0.3)):
        got = back(repetition_penalty(c(tokens), r, a, f)(c(x)))
        np.testing.assert_allclose(got, want(x, tokens, r, a, f), rtol=2e-6)
    rows = np.array([[1.1], [2.0], [1.0], [3.0]], np.float32)
    got = back(repetition_penalty(tokens, c(rows), frequency=c(rows / 4))(c(x)))
    alone = [want(x[i : i + 1], tokens[i : i + 1], float(r), 0, float(r) / 4) for i, r in enumerate(rows[:, 0])]
    np.testing.assert_allclose(got, np.concatenate(alone), rtol=2e-6)
    got = back(repetition_penalty([2, 2, 5], 1.5, axis=0)(c(x.T))).T
    np.testing.assert_allclose(got, want(x, np.array([[2, 2, 5]] * 4), 1.5, 0, 0), rtol=2e-6)
    got = back(repetition_penalty(c(tokens), 1.5, axis=0)(c(x.T))).T
    np.testing.assert_allclose(got, want(x, tokens, 1.5, 0, 0), rtol=2e-6)
    assert np.array_equal(back(repetition_penalty([], 2.0, 1.0, 1.0)(c(x))), x)
    got = back(repetition_penalty(np.array([2, 5], np.uint8), 1.5)(c(x)))
    np.testing.assert_allclose(got, want(x, np.array([[2, 5]] * 4), 1.5, 0, 0), rtol=2e-6)
    if kind == "strict":
        return
    cube = np.stack([x, -np.where(np.isinf(x), 0, x)])
    got = back(repetition_penalty(c(tokens), 1.3, 0.1, 0.2)(c(cube)))
    np.testing.assert_allclose(got, np.stack([want(v, tokens, 1.3, 0.1, 0.2) for v in cube]), rtol=2e-6)


@every_kind
def test_logit_bias(kind):
    c, x = KINDS[kind], scores(n=4, rows=5)
    want = x + np.array([0, -INF, 0.5, 0], np.float32)
    assert np.array_equal(back(logit_bias({1: -INF, np.int64(2): 0.5})(c(x))), want)
    assert np.array_equal(back(logit_bias(c(np.array([0, -INF, 0.5, 0], np.float32)))(c(x))), want)
    assert np.array_equal(back(logit_bias({2: 0.5, 1: -INF}, axis=0)(c(x.T))), want.T)
    assert np.array_equal(back(logit_bias({})(c(x))), x)
    assert logit_bias({1: 2}) == logit_bias({1: 2.0})


@every_kind
def test_mix(kind):
    p, q = np.array([[0.75, 0.25, 0.0]]), np.array([0.25, 0.25, 0.5])
    for w in (0, 0.25, 1.0):
        np.testing.assert_allclose(back(mix(KINDS[kind](p), q, w)), (1 - w) * p + w * q)
    rows = np.array([[0.0], [1.0]])
    got = back(mix(KINDS[kind](np.repeat(p, 2, 0)), KINDS[kind](q), KINDS[kind](rows)))
    np.testing.assert_allclose(got, [p[0], q])


@jax_in_the_whole_battery
@every_kind
def test_temperature_0_is_argmax(kind):
    """The limit of every map as T falls to 0, as logsumexp(temperature=0) is max; equal largest scores share."""
    c = KINDS[kind]
    x = np.array(
        [[1.0, 3.0, -INF, 2.0], [2.0, 2.0, 1.0, -5.0], [-INF, -INF, -INF, -INF], [1e38, -1e38, 0.0, 0.0]], np.float32
    )
    want = np.array([[0, 1, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    ratios = (A.Ratio.square(), A.Ratio.relu(), A.Ratio.sigmoid())  # a score of 0 has no weight in the first two
    for mapping in (A.Softmax(), A.Sparsemax(), A.Entmax(1.2), A.NormMax(), A.Taylor(), A.SparseSoftmax(k=2), *ratios):
        assert np.array_equal(back(A.apply(mapping, temperature(0)(c(x)))), want), mapping
        assert np.array_equal(back(A.apply(mapping, temperature(0.0, axis=0)(c(x.T)), axis=0)), want.T)
    near = back(A.apply(A.Softmax(), temperature(1e-30)(c(x[:2]))))
    np.testing.assert_allclose(near, want[:2])
    T = np.array([[0.0], [1.0], [0.0], [2.0]], np.float32)
    mixed = np.stack([back(A.softmax(temperature(float(t))(c(r)))) for t, r in zip(T[:, 0], x)])
    np.testing.assert_allclose(back(A.softmax(temperature(c(T))(c(x)))), mixed, rtol=1e-6)
    bad = back(temperature(0)(c(np.array([[1.0, np.nan], [INF, 0.0], [1.0, 0.0]]))))
    assert np.isnan(back(A.softmax(c(bad)))[:2]).all()
    assert np.array_equal(bad[2], [1.0, -INF])
    if kind == "torch":
        v = c(x[:2]).requires_grad_()
        A.softmax(temperature(0)(v)).pow(2).sum().backward()
        assert (v.grad == 0).all()


HUGE = {"infinite": INF, "beyond fp32": 1e300}


@every_kind
@pytest.mark.parametrize("T", HUGE.values(), ids=HUGE)
def test_a_temperature_without_bounds_makes_all_classes_equal(kind, T):
    """A masked class was NaN, and so was its row; the engine refused to draw."""
    c = KINDS[kind]
    x = np.array([[1.0, 2.0, -INF], [-5.0, -INF, 3.0]], np.float32)
    for each in (T, np.full((2, 1), T)):
        assert np.array_equal(back(temperature(each)(c(x))), np.where(x == -INF, x, 0.0 * np.ones_like(x)))
    found = A.sample(
        A.Softmax(), c(x), transform=compose(temperature(T), topk(2)), generator=generator(kind), return_log_prob=True
    )
    np.testing.assert_allclose(back(found.log_prob), np.log([0.5, 0.5]), rtol=1e-6)
    assert (x[[0, 1], back(found.index)] > -INF).all()


@every_kind
@pytest.mark.parametrize("n", HUGE.values(), ids=HUGE)
def test_deviations_without_bounds_keep_all(kind, n):
    c = KINDS[kind]
    x = np.array([[1.0, 2.0, -INF], [4.0, 4.0, 4.0]], np.float32)
    for each in (n, np.full((2, 1), n)):
        assert np.array_equal(back(topnsigma(each)(c(x))), x)
        drawn = A.sample(A.Softmax(), c(x), transform=topnsigma(each), generator=generator(kind), num_samples=64)
        assert set(back(drawn)[:, 0]) == {0, 1}
        assert set(back(drawn)[:, 1]) == {0, 1, 2}


def test_noise_of_any_scale_leaves_masked_classes_masked():
    x = np.array([[0.0, 1.0, -INF]], np.float32)
    for scale in (1e300, np.array([[1e39]])):
        y = noise("exponential", scale, generator=0)(x)
        assert y[0, 2] == -INF


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_standard_scores(kind, dtype):
    from scipy import stats

    c = KINDS[kind]
    x = (5 * np.random.default_rng(0).normal(size=(4, 9)) + 100).astype(dtype)
    eps = float(np.finfo(back(c(x)).dtype).eps)
    got = back(normalize("standard")(c(x)))
    np.testing.assert_allclose(got, stats.zscore(x.astype(np.float64), axis=-1), atol=200 * eps)
    masked = x.copy()
    masked[:, [1, 5]] = -INF
    keep = masked[0] > -INF
    got = back(normalize("standard")(c(masked)))
    assert (got[:, ~keep] == -INF).all()
    np.testing.assert_allclose(got[:, keep], stats.zscore(x[:, keep].astype(np.float64), axis=-1), atol=200 * eps)
    flat = back(
        normalize("standard")(c(np.array([[0.1, 0.1, 0.1], [3.0, -INF, -INF], [0.0, 0.0, 0.0], [-INF] * 3], dtype)))
    )
    assert np.array_equal(flat, [[0, 0, 0], [0, -INF, -INF], [0, 0, 0], [-INF] * 3])
    huge = np.array([[3e38, -3e38, 3e38, -3e38], [1e-37, 2e-37, 1e-37, 2e-37]], dtype)
    np.testing.assert_allclose(back(normalize("standard")(c(huge))), [[1, -1, 1, -1], [-1, 1, -1, 1]], rtol=1e-5)
