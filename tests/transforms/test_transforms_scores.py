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

# -- each by its formula, a row at a time --------------------------------------------------------------------------------------

X = np.array(scores(n=7, rows=40, seed=3))
X[2], X[3], X[4], X[5, 1:] = 0.0, -np.abs(np.nan_to_num(X[3], neginf=1.0)), 3.0, -INF
EACH = np.linspace(0.5, 2, len(X), dtype=np.float32)[:, None]
LOG_P = np.array([0.0, -1.0, -INF, 2.0, 0.5, -0.5, 0.0], np.float32)
FACTOR = np.array([1.0, -2.0, 0.0, 0.5, 1.0, 3.0, 0.1], np.float32)
KEEP = np.array([True, False, True, True, False, True, True])
TOKENS = np.random.default_rng(1).integers(-1, 7, (len(X), 4))  # -1 is none


def live(formula):
    """By the scores that are not masked, as (scores, row's place) -> scores."""

    def row(r, i):
        out = r.copy()
        out[r > -INF] = formula(r[r > -INF], i)
        return out

    return row


def normalized(which):
    def formula(z, i):
        if which == "standard":
            return (z - z.mean()) / (z.std() or 1.0) if z.size else z
        if not z.any():
            return z
        return (
            z
            / {"l1": np.abs(z).sum(), "l2": math.sqrt((z**2).sum()), "max": z.max() if z.max() > 0 else -z.min()}[which]
        )

    return live(formula)


def dynamic(low, high, exponent):
    """llama.cpp's: `temp_ext` of its sampler, for the classes that are not masked."""

    def formula(z, i):
        a, b, power = (v(float(EACH[i, 0])) if callable(v) else v for v in (low, high, exponent))
        q = np.exp(z - z.max()) / np.exp(z - z.max()).sum() if z.size else z
        share = -sum(v * math.log(v) for v in q if v > 0) / math.log(z.size) if z.size > 1 else 0.0
        return z / (a + (b - a) * share**power)

    return live(formula)


def penalized(penalty, presence=0.0, frequency=0.0, tokens=TOKENS):
    """By the definition of OpenAI's, vLLM's and llama.cpp's samplers; a number, or one for each row."""

    def row(r, i):
        k, a, f = (float(v[i, 0]) if isinstance(v, np.ndarray) else v for v in (penalty, presence, frequency))
        out, own = r.copy(), list(tokens[i] if np.ndim(tokens) == 2 else tokens)
        for t in {*own} - {-1}:
            out[t] = (out[t] / k if out[t] > 0 else out[t] * k) - a - f * own.count(t)
        return out

    return row


def added(bias):
    return lambda r, i: np.where((r == -INF) | (bias == -INF), -INF, r + bias)


def spread(beta, gamma=1.0, delta=0.0, n=None):
    return live(lambda z, i: (delta + beta(i) * math.log(n or max(len(z), 1)) ** gamma) * z)


FORMULAS = {  # name: (the transform, of a kind of arrays; its formula)
    **{f"normalize {w}": (lambda c, w=w: normalize(w), normalized(w)) for w in ("l1", "l2", "max", "standard")},
    "scalable": (lambda c: scalable(), spread(lambda i: 1.0)),
    "scalable a row": (lambda c: scalable(c(EACH), 1.5, 0.3), spread(lambda i: EACH[i, 0], 1.5, 0.3)),
    "scalable of 64": (lambda c: scalable(n=64), spread(lambda i: 1.0, n=64)),
    "scalable of 64 a row": (lambda c: scalable(n=c(0 * EACH + 64)), spread(lambda i: 1.0, n=64)),
    "dynamic": (lambda c: dynamic_temperature(0.5, 1.5, 1.0), dynamic(0.5, 1.5, 1.0)),
    "dynamic falls": (lambda c: dynamic_temperature(1.2, 0.3, 2.5), dynamic(1.2, 0.3, 2.5)),
    "dynamic of one": (lambda c: dynamic_temperature(0.7, 0.7), dynamic(0.7, 0.7, 1.0)),
    "dynamic below 1": (lambda c: dynamic_temperature(0.1, 2.0, 0.4), dynamic(0.1, 2.0, 0.4)),
    "dynamic a row": (
        lambda c: dynamic_temperature(c(EACH), 2 * EACH, c(0.5 + EACH)), dynamic(lambda v: v, lambda v: 2 * v, lambda v: 0.5 + v),
    ),
    "temperature": (lambda c: temperature(0.25), live(lambda z, i: 4 * z)),
    "temperature a row": (lambda c: temperature(c(EACH)), live(lambda z, i: z / EACH[i, 0])),
    "mask": (lambda c: mask(c(KEEP)), lambda r, i: np.where(KEEP, r, -INF)),
    "mask of NumPy": (lambda c: mask(KEEP), lambda r, i: np.where(KEEP, r, -INF)),
    "prior": (lambda c: prior(LOG_P), added(LOG_P)),
    "prior of strength": (lambda c: prior(c(LOG_P), strength=0.5), added(0.5 * LOG_P)),
    "prior of no strength": (lambda c: prior(c(LOG_P), strength=0), added(0.0)),
    "prior of a map": (lambda c: prior(c(LOG_P), strength="sparsemax"), added(LOG_P / 7)),
    "scale": (lambda c: prior(scale=c(FACTOR)), lambda r, i: np.where(r == -INF, r, np.where(r == -INF, 0, r) * FACTOR)),
    "scale and prior": (lambda c: prior(c(LOG_P), 2.0), lambda r, i: added(LOG_P)(2 * r, i)),
    "penalty": (lambda c: repetition_penalty(c(TOKENS), 1.3), penalized(1.3)),
    "presence": (lambda c: repetition_penalty(c(TOKENS), 1, 0.4), penalized(1, 0.4)),
    "frequency": (lambda c: repetition_penalty(c(TOKENS), 1, 0, -0.3), penalized(1, 0, -0.3)),
    "all penalties": (lambda c: repetition_penalty(c(TOKENS), 0.7, 0.4, 0.3), penalized(0.7, 0.4, 0.3)),
    "penalties a row": (lambda c: repetition_penalty(TOKENS, c(EACH), frequency=c(EACH / 4)), penalized(EACH, 0.0, EACH / 4)),
    "tokens for all": (lambda c: repetition_penalty([2, 2, 5], 1.5), penalized(1.5, tokens=[2, 2, 5])),
    "tokens of 8 bits": (lambda c: repetition_penalty(np.array([2, 5], np.uint8), 1.5), penalized(1.5, tokens=[2, 5])),
    "no tokens": (lambda c: repetition_penalty([], 2.0, 1.0, 1.0), lambda r, i: r),
    "bias": (lambda c: logit_bias({1: -INF, np.int64(2): 0.5}), added(np.array([0, -INF, 0.5, 0, 0, 0, 0]))),
    "bias of an array": (lambda c: logit_bias(c(LOG_P)), added(LOG_P)),
    "no bias": (lambda c: logit_bias({}), added(0.0)),
}  # fmt: skip


@every_kind
@pytest.mark.parametrize("name", FORMULAS)
def test_a_transform_is_its_formula(kind, name):
    make, formula = FORMULAS[name]
    want = np.stack([formula(row, i) for i, row in enumerate(X.astype(np.float64))])
    np.testing.assert_allclose(back(make(KINDS[kind])(KINDS[kind](X))), want, rtol=5e-6, atol=2e-6)


# -- extremes, and what follows ------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("which", ["l1", "l2", "max"])
def test_normalize_does_not_overflow(kind, which):
    huge = np.array([[3e38, -1e38, 3e38], [1e-44, -3e-44, 1e-45]], np.float32)
    assert np.isfinite(back(normalize(which)(KINDS[kind](huge)))).all()


@every_kind
def test_standard_scores_of_huge_and_equal_ones(kind):
    huge = np.array([[3e38, -3e38, 3e38, -3e38], [1e-37, 2e-37, 1e-37, 2e-37]], np.float32)
    np.testing.assert_allclose(
        back(normalize("standard")(KINDS[kind](huge))), [[1, -1, 1, -1], [-1, 1, -1, 1]], rtol=1e-5
    )
    flat = np.array([[0.1, 0.1, 0.1], [3.0, -INF, -INF], [0.0, 0.0, 0.0], [-INF] * 3], np.float32)
    want = [[0, 0, 0], [0, -INF, -INF], [0, 0, 0], [-INF] * 3]
    assert np.array_equal(back(normalize("standard")(KINDS[kind](flat))), want)


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


@jax_in_the_whole_battery
@every_kind
def test_a_dynamic_temperature_without_an_entropy(kind):
    """The limit, for low = 0."""
    sure = KINDS[kind](np.array([[900.0, 0.0, -3.0], [1.0, 1.0, -INF]], np.float32))
    assert np.array_equal(back(dynamic_temperature(0, 2.0)(sure)), [[1, -INF, -INF], [0.5, 0.5, -INF]])
    assert back(scalable(gamma=-1.0, n=1)(KINDS[kind](np.ones((1, 3), np.float32))))[0, 0] == 0.0


def test_the_gradient_of_a_dynamic_temperature_passes_its_entropy():
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).double()
    x[1] = 0.3  # the largest entropy
    x[2, 1:] = -60.0  # none
    x.requires_grad_()
    low, high, power = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.5, 1.7, 1.4))
    assert torch.autograd.gradcheck(lambda *a: dynamic_temperature(*a[1:])(a[0]), (x, low, high, power))
    assert torch.autograd.gradgradcheck(dynamic_temperature(0.5, 1.7, 2.0), x)


def test_penalties_of_rows_within_a_batch_and_equal_biases():
    cube = np.stack([X, -np.nan_to_num(X, neginf=0.0)])
    got = repetition_penalty(TOKENS, 1.3, 0.1, 0.2)(cube)
    assert np.array_equal(got, np.stack([repetition_penalty(TOKENS, 1.3, 0.1, 0.2)(x) for x in cube]))
    assert logit_bias({1: 2}) == logit_bias({1: 2.0})


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
