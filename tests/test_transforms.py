"""Transforms against brute force; what they keep, what they leave alone, and that derivatives pass through."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, generator, jax_in_the_whole_battery, readonly
from scipy.special import softmax as scipy_softmax

import anymax as A
from anymax.kernels import decode
from anymax.transforms import (
    compose,
    cosine,
    epsilon_cutoff,
    eta,
    logit_bias,
    mask,
    minp,
    mix,
    noise,
    normalize,
    prior,
    repetition_penalty,
    scalable,
    temperature,
    topk,
    topnsigma,
    topp,
    typical,
    xtc,
)
from anymax.transforms.truncation import Truncation

INF = math.inf


def scores(n=9, rows=60, seed=0, dtype=np.float32, ties=True):
    """Rows with many ties, masked entries, one masked altogether and one of a single entry."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, (rows, n)) / 2 if ties else rng.normal(0, 2, (rows, n))
    x = x.astype(dtype)
    x[rng.random(x.shape) < 0.2] = -INF
    x[0] = -INF
    x[1, 1:] = -INF
    return readonly(x)


# -- oracles: one row at a time, by the definition ------------------------------------------------------------------------


def order(row):
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def kept(row, chosen):
    return np.array([v if i in chosen else -INF for i, v in enumerate(row)], dtype=row.dtype)


def topk_row(row, k):
    return kept(row, order(row)[:k])


def topp_row(row, p, least=1):
    if np.all(row == -INF):
        return row
    q = scipy_softmax(row.astype(np.float64))
    chosen, mass = [], 0.0
    for i in order(row):
        chosen.append(i)
        mass += q[i]
        if mass >= p - 1e-7 and len(chosen) >= least:
            break
    return kept(row, chosen)


def minp_row(row, p, least=1):
    if np.all(row == -INF):
        return row
    q = scipy_softmax(row.astype(np.float64))
    chosen = set(np.flatnonzero(q >= p * q.max() * (1 - 1e-6))) | set(order(row)[:least])
    return kept(row, chosen)


def typical_row(row, mass, least=1):
    if np.all(row == -INF):
        return row
    q = scipy_softmax(row.astype(np.float64))
    live = [i for i in range(len(row)) if row[i] > -INF]
    entropy = -sum(q[i] * math.log(q[i]) for i in live)
    far = {i: abs(-math.log(q[i]) - entropy) for i in live}
    sum_, chosen = 0.0, []
    for i in sorted(live, key=lambda i: far[i]):
        chosen.append(i)
        sum_ += q[i]
        if sum_ >= mass - 1e-7 and len(chosen) >= least:
            break
    edge = far[chosen[-1]]
    return kept(row, {i for i in live if far[i] <= edge + 1e-9})


def cutoff_row(row, bar, least=1):
    if np.all(row == -INF):
        return row
    q = scipy_softmax(row.astype(np.float64))
    bar = bar(-np.sum(q[q > 0] * np.log(q[q > 0]))) if callable(bar) else bar
    edge = np.sort(row)[::-1][min(least, len(row)) - 1]
    return np.where(((q >= bar) | (row >= edge)) & (row > -INF), row, -INF).astype(row.dtype)


def xtc_row(row, threshold):
    if np.all(row == -INF):
        return row
    q = scipy_softmax(row.astype(np.float64))
    tops = [i for i in order(row) if q[i] >= threshold and row[i] > -INF]
    return kept(row, set(range(len(row))) - set(tops[:-1]))


def topnsigma_row(row, n):
    finite = row[row > -INF].astype(np.float64)
    if finite.size == 0:
        return row
    return np.where(row >= finite.max() - n * finite.std() - 1e-6, row, -INF).astype(row.dtype)


TRUNCATIONS = {
    "topk1": (topk(1), lambda r: topk_row(r, 1)),
    "topk3": (topk(3), lambda r: topk_row(r, 3)),
    "topk99": (topk(99), lambda r: topk_row(r, 99)),
    "topp.05": (topp(0.05), lambda r: topp_row(r, 0.05)),
    "topp.83": (topp(0.83), lambda r: topp_row(r, 0.83)),
    "topp1": (topp(1.0), lambda r: topp_row(r, 1.0)),
    "minp.3": (minp(0.3), lambda r: minp_row(r, 0.3)),
    "minp1": (minp(1), lambda r: minp_row(r, 1.0)),
    "topnsigma1": (topnsigma(1.0), lambda r: topnsigma_row(r, 1.0)),
    "topnsigma0": (topnsigma(0), lambda r: topnsigma_row(r, 0.0)),
    "topk1,3": (topk(1, min_keep=3), lambda r: topk_row(r, 3)),
    "topp.05,3": (topp(0.05, min_keep=3), lambda r: topp_row(r, 0.05, 3)),
    "topp.83,99": (topp(0.83, min_keep=99), lambda r: topp_row(r, 0.83, 99)),
    "minp.9,4": (minp(0.9, min_keep=4), lambda r: minp_row(r, 0.9, 4)),
    "typical.31": (typical(0.31), lambda r: typical_row(r, 0.31)),
    "typical.83": (typical(0.83), lambda r: typical_row(r, 0.83)),
    "typical1": (typical(1), lambda r: r),
    "typical.1,4": (typical(0.1, min_keep=4), lambda r: typical_row(r, 0.1, 4)),
    "epsilon.11": (epsilon_cutoff(0.11), lambda r: cutoff_row(r, 0.11)),
    "epsilon.9": (epsilon_cutoff(0.9), lambda r: cutoff_row(r, 0.9)),
    "epsilon.5,3": (epsilon_cutoff(0.5, min_keep=3), lambda r: cutoff_row(r, 0.5, 3)),
    "eta.11": (eta(0.11), lambda r: cutoff_row(r, lambda h: min(0.11, math.sqrt(0.11) * math.exp(-h)))),
    "eta.8,2": (eta(0.8, 2), lambda r: cutoff_row(r, lambda h: min(0.8, math.sqrt(0.8) * math.exp(-h)), 2)),
    "xtc.11": (xtc(0.11, 1, generator=0), lambda r: xtc_row(r, 0.11)),
    "xtc0": (xtc(0, 1.0, generator=0), lambda r: xtc_row(r, 0.0)),
    "xtc never": (xtc(0.05, 0, generator=0), lambda r: r),
}
truncations = pytest.mark.parametrize("name", TRUNCATIONS)


@every_kind
@truncations
@pytest.mark.parametrize("ties", [True, False])
def test_truncation_is_the_brute_force(kind, name, ties):
    transform, oracle = TRUNCATIONS[name]
    x = scores(ties=ties)
    assert np.array_equal(back(transform(KINDS[kind](x))), np.stack([oracle(r) for r in x]))


@truncations
def test_odd_sizes(name):
    transform, oracle = TRUNCATIONS[name]
    for n in (1, 2, 63, 507):
        x = np.random.default_rng(n).normal(0, 2, (2, n))
        assert np.array_equal(transform(x), np.stack([oracle(r) for r in x])), n


def test_topk_keeps_exactly_k_and_the_first_of_equals():
    y = topk(3)(np.array([0.0, 1.0, 0.0, 0.0, 2.0, 0.0]))
    assert np.array_equal(y, [0, 1, -INF, -INF, 2, -INF])
    assert np.isfinite(topk(4)(np.zeros((3, 7)))).sum() == 12


def test_topp_keeps_what_huggingface_keeps():
    """Their rule: ascending order, drop where the cumulative mass is <= 1 - p, but never the last one."""
    x = np.random.default_rng(3).normal(0, 3, (200, 50))
    for p in (0.1, 0.5, 0.9, 0.99):
        index = np.argsort(x, axis=-1)
        drop = np.cumsum(np.take_along_axis(scipy_softmax(x, axis=-1), index, -1), -1) <= 1 - p
        drop[:, -1] = False
        want = x.copy()
        np.put_along_axis(want, index, np.where(drop, -INF, np.take_along_axis(x, index, -1)), -1)
        assert np.array_equal(topp(p)(x), want)


def test_topp_of_a_long_flat_row_is_not_moved_by_rounding():
    x = np.zeros((1, 100_000), np.float32)
    assert abs(int(np.isfinite(topp(0.5)(x)).sum()) - 50_000) <= 1
    assert np.isfinite(topp(1.0)(x)).all()
    x = np.random.default_rng(0).normal(0, 0.02, 200_000).astype(np.float32)
    mass = np.cumsum(np.sort(scipy_softmax(x.astype(np.float64)))[::-1])
    assert abs(int(np.isfinite(topp(0.9)(x)).sum()) - (np.searchsorted(mass, 0.9) + 1)) <= 1


@every_kind
def test_topp_at_the_edge(kind):
    """Mass reached exactly is enough; p = 1 keeps even what has no mass in this precision."""
    c = KINDS[kind]
    assert np.array_equal(back(topp(0.5)(c(np.zeros(4, np.float32)))), [0, 0, -INF, -INF])
    assert np.isfinite(back(topp(1.0)(c(np.array([90.0, 0.0, -9.0, 0.0], np.float32))))).all()


def test_topp_sorts_by_the_scores_and_not_by_their_rounded_differences():
    x = np.array([1e-9, 2e-9, 1.0 + 2.0**-20], np.float32)
    y = topp(0.7)(x)  # 0.576 + 0.212 suffice: the larger of the two tiny ones
    assert np.array_equal(y, [-INF, x[1], x[2]])


@jax_in_the_whole_battery
@every_kind
def test_a_level_for_each_row(kind):
    x = scores(ties=False)
    p = np.linspace(0.1, 1.0, len(x), dtype=np.float32)[:, None]
    roots = lambda e: lambda h: min(e, math.sqrt(e) * math.exp(-h))  # noqa: E731
    for transform, oracle in (
        (topp, topp_row),
        (minp, minp_row),
        (typical, typical_row),
        (lambda p: epsilon_cutoff(0.9 * p), lambda r, p: cutoff_row(r, 0.9 * p)),
        (lambda p: eta(0.9 * p), lambda r, p: cutoff_row(r, roots(0.9 * p))),
        (lambda p: xtc(0.5 * p, 1, generator=0), lambda r, p: xtc_row(r, 0.5 * p)),
    ):
        want = np.stack([oracle(r, float(q[0])) for r, q in zip(x, p)])
        assert np.array_equal(back(transform(KINDS[kind](p))(KINDS[kind](x))), want)


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
def test_xtc_cuts_as_often_as_it_is_told(kind):
    x = np.tile(np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32)), (4000, 1))
    y = back(xtc(0.15, 0.3, generator=generator(kind))(KINDS[kind](x)))
    cut = np.isneginf(y)
    assert (cut[:, 0] == cut[:, 1]).all()
    assert not cut[:, 2:].any()
    assert abs(cut[:, 0].mean() - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 4000)
    seeds = list(range(6))
    rows = back(xtc(0.15, 0.5, generator=seeds)(KINDS[kind](x[:6])))
    alone = [back(xtc(0.15, 0.5, generator=s)(KINDS[kind](x[0]))) for s in seeds]
    assert np.array_equal(rows, np.stack(alone))
    assert 0 < np.isneginf(rows[:, 0]).sum() < 6


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


def test_more_classes_to_keep_than_there_are():
    x = np.array([3.0, 1.0, 2.0])
    for cut in (topp(0.5, 10**20), minp(1.0, 2**63), topk(10**20), typical(0.1, 10**20), epsilon_cutoff(0.9, 10**20)):
        assert np.array_equal(cut(x), x)
        assert set(A.sample(A.Softmax(), x, transform=cut, generator=0, num_samples=99).tolist()) == {0, 1, 2}


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


# -- composition, data ----------------------------------------------------------------------------------------------------


def test_compose_goes_left_to_right_and_flattens():
    x = np.array([1.0, 2.0, 3.0])
    assert np.array_equal(compose(lambda v: v + 1, temperature(2))(x), [1, 1.5, 2])
    assert np.array_equal(compose()(x), x)
    deep = compose(topk(2), compose(temperature(2.0), compose(minp(0.1))))
    assert deep == compose(topk(2), temperature(2.0), minp(0.1))
    assert repr(deep) == "compose(topk(k=2), temperature(T=2.0), minp(p=0.1))"
    with pytest.raises(TypeError, match="expected functions"):
        compose(2.0)


ALL = {
    "temperature": temperature(2.0),
    "temperature[]": temperature(np.array([[2.0], [1.0], [0.5]])),
    "mask": mask(np.array([True] * 4 + [False])),
    "prior": prior(np.linspace(-1, 1, 5), np.linspace(1, 2, 5)),
    "l1": normalize("l1"),
    "l2": normalize("l2"),
    "max": normalize("max"),
    "standard": normalize("standard"),
    "temperature 0": temperature(0),
    "topk": topk(3),
    "topp": topp(0.8),
    "minp": minp(0.1),
    "topnsigma": topnsigma(1.5),
    "scalable": scalable(0.7, 1.2, 0.1),
    "cosine": cosine(np.random.default_rng(0).normal(size=(5, 5))),
    "noise": noise("gumbel", 0.5, generator=7),
    "topp 3": topp(0.3, min_keep=3),
    "minp 3": minp(0.9, min_keep=3),
    "typical": typical(0.6, min_keep=2),
    "epsilon": epsilon_cutoff(0.2),
    "eta": eta(0.3, min_keep=2),
    "xtc": xtc(0.15, 1.0, generator=7),
    "penalty": repetition_penalty([0, 2, 2, -1], 1.3, 0.2, 0.1),
    "bias": logit_bias({1: 0.5, 3: -2}),
    "bias[]": logit_bias(np.linspace(-1, 1, 5)),
    "compose": compose(temperature(0.7), topk(4), normalize("l2")),
}
everyone = pytest.mark.parametrize("name", ALL)


@everyone
def test_pickles_and_prints(name):
    transform = ALL[name]
    x = np.random.default_rng(0).normal(size=(3, 5))
    assert np.array_equal(pickle.loads(pickle.dumps(transform))(x), transform(x))
    assert "(" in repr(transform)
    assert len(repr(transform)) < 90
    assert hash(transform) == hash(transform)
    with pytest.raises(AttributeError):
        transform.axis = 3


def test_equality_is_by_value():
    assert topk(3) == topk(3)
    assert topk(3) != topk(3, axis=0)
    assert topk(3) != topp(0.3)
    assert repr(topk(3, dim=1)) == "topk(k=3, axis=1)"


@every_kind
@everyone
def test_kept_properties(kind, name):
    """The dtype is kept, the input is not modified, a NaN or +inf stays in its row, and -inf stays -inf."""
    transform, c = ALL[name], KINDS[kind]
    x = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    a = c(x)
    y = back(transform(a))
    assert y.dtype == np.float32
    assert np.array_equal(back(a), x)
    for strange in (math.nan, INF):
        bad = x.copy()
        bad[1, 2] = strange
        z = back(transform(c(bad)))
        np.testing.assert_array_equal(z[[0, 2]], y[[0, 2]])
        assert not np.isfinite(z[1]).all()
        assert np.isnan(z[1]).any() or (z[1] == INF).any()
    if name != "cosine":
        holes = x.copy()
        holes[1, 2], holes[2] = -INF, -INF
        z = back(transform(c(holes)))
        assert z[1, 2] == -INF
        assert (z[2] == -INF).all()
        assert not np.isnan(z).any()


@every_kind
@everyone
def test_any_axis(kind, name):
    x = np.random.default_rng(2).normal(size=(3, 5))
    if name in ("noise", "compose"):
        return
    transform, c = ALL[name], KINDS[kind]
    other = dataclasses.replace(transform, axis=0)
    if name == "temperature[]":
        other = temperature(np.array([[2.0, 1.0, 0.5]]), axis=0)
    np.testing.assert_allclose(back(other(c(x.T))), back(transform(c(x))).T, rtol=1e-13)
    if name != "temperature[]" and kind != "jax":
        cube = np.random.default_rng(3).normal(size=(2, 5, 3))
        middle = dataclasses.replace(transform, axis=1)
        want = np.moveaxis(back(transform(c(np.moveaxis(cube, 1, -1)))), -1, 1)
        np.testing.assert_allclose(back(middle(c(cube))), want, rtol=1e-13)


@everyone
def test_the_contract(name):
    for t in getattr(ALL[name], "transforms", (ALL[name],)):
        assert set(t.aligned) <= set(dict(t.params))
        assert t.step is None or t.step in decode.STEPS
        assert t.replace() == t
        assert t.truncates == isinstance(t, Truncation)
        assert getattr(A.transforms, t.name)


def test_a_transform_owes_its_rows():
    with pytest.raises(TypeError, match="abstract method"):
        A.transforms.Transform(())


def test_axis_and_dim():
    x = np.random.default_rng(0).normal(size=(4, 3))
    assert np.array_equal(topk(2, dim=0)(x), topk(2, axis=0)(x))
    with pytest.raises(TypeError, match="two names"):
        topk(2, axis=0, dim=1)
    with pytest.raises(ValueError, match="axis 2 is out of range"):
        topk(2, axis=2)(x)


def test_integers_are_promoted_and_booleans_are_errors():
    assert np.array_equal(temperature(2)([1, 3]), [0.5, 1.5])
    assert np.array_equal(topk(1)(np.array([1, 3])), [-INF, 3.0])
    for transform in ALL.values():
        with pytest.raises(TypeError, match="bool"):
            transform(np.ones((3, 5), bool))


@everyone
def test_empty_batches(name):
    if name != "temperature[]":
        assert ALL[name](np.zeros((0, 5))).shape == (0, 5)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@everyone
def test_halves_are_computed_in_fp32(name, half):
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(getattr(torch, half))
    y = ALL[name](x)
    assert y.dtype == x.dtype
    assert torch.equal(y, ALL[name](x.float()).to(x.dtype))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: temperature(-1.0), ValueError, "at least 0"),
        (lambda: temperature(math.nan), ValueError, "at least 0"),
        (lambda: temperature(np.array([1.0, -0.5])), ValueError, "at least 0"),
        (lambda: temperature("1"), TypeError, "number or an array"),
        (lambda: temperature(True), TypeError, "number or an array"),
        (lambda: mask([1, 0]), TypeError, "boolean"),
        (lambda: prior(), TypeError, "log_p=.*scale="),
        (lambda: prior(math.nan), ValueError, "NaN"),
        (lambda: normalize("l3"), ValueError, "'l1', 'l2', 'max' or 'standard'"),
        (lambda: topk(0), ValueError, "at least 1"),
        (lambda: topk(1.5), TypeError, "integer"),
        (lambda: topk(True), TypeError, "integer"),
        (lambda: topp(0), ValueError, "above 0 and at most 1"),
        (lambda: topp(1.1), ValueError, "above 0 and at most 1"),
        (lambda: minp(0.0), ValueError, "above 0 and at most 1"),
        (lambda: topnsigma(-1), ValueError, "at least 0"),
        (lambda: scalable(n=0), ValueError, "n must be at least 1"),
        (lambda: scalable(beta="1"), TypeError, "beta must be a number or an array"),
        (lambda: cosine(np.ones(3)), ValueError, r"\[classes, features\]"),
        (lambda: cosine(np.ones((2, 3)), eps=0), ValueError, "eps"),
        (lambda: cosine(np.ones((2, 3)))(np.ones(4)), ValueError, "4 features and weight has 3"),
        (lambda: noise("cauchy", generator=0), ValueError, "gumbel, normal"),
        (lambda: noise(scale=-1, generator=0), ValueError, "at least 0"),
        (lambda: noise(scale=INF, generator=0), ValueError, "at least 0 and finite"),
        (
            lambda: normalize("l2")(np.zeros((3, 0))),
            ValueError,
            r"scores of shape \(3, 0\) have no classes along their axis",
        ),
        (
            lambda: topnsigma(1.0)(np.zeros((3, 0))),
            ValueError,
            "have no classes along their axis; at least one is needed",
        ),
        (lambda: topk(3, min_keep=0), ValueError, "min_keep must be an integer of at least 1"),
        (lambda: topp(0.5, min_keep=1.5), ValueError, "min_keep must be an integer of at least 1"),
        (lambda: typical(0), ValueError, "above 0 and at most 1"),
        (lambda: typical(1.01), ValueError, "above 0 and at most 1"),
        (lambda: epsilon_cutoff(1.0), ValueError, "above 0 and below 1"),
        (lambda: epsilon_cutoff(np.array([0.5, np.nan])), ValueError, "above 0 and below 1"),
        (lambda: eta(0.0), ValueError, "above 0 and below 1"),
        (lambda: eta("0.1"), TypeError, "epsilon must be a number or an array"),
        (lambda: xtc(-0.1), ValueError, "threshold must be from 0 to 1"),
        (lambda: xtc(0.1, 1.1), ValueError, "probability must be from 0 to 1"),
        (lambda: xtc(0.1, generator="0")([1.0, 2.0]), TypeError, "generator: NumPy arrays need"),
        (lambda: xtc(generator=[1, 2])(np.zeros((3, 2))), ValueError, "got 2 for 3 rows; give one for each row"),
        (lambda: repetition_penalty(3), ValueError, "tokens must have an axis"),
        (lambda: repetition_penalty([0.5]), TypeError, "tokens must be integers"),
        (lambda: repetition_penalty([0], 0.0), ValueError, "penalty must be above 0 and finite"),
        (lambda: repetition_penalty([0], presence=INF), ValueError, "presence must be finite"),
        (lambda: repetition_penalty([0, 5])(np.ones(5)), ValueError, "out of range for 5 classes; tokens are 0 to 4"),
        (lambda: repetition_penalty([0, -2])(np.ones(5)), ValueError, "out of range for 5 classes; tokens are 0 to 4"),
        (lambda: repetition_penalty([[0], [1]])(np.ones((3, 5))), ValueError, "do not belong to rows"),
        (lambda: repetition_penalty([[0], [1]])(np.ones(5)), ValueError, "do not belong to rows"),
        (lambda: logit_bias({5: 1.0})(np.ones(5)), ValueError, "class 5 is out of range for 5 classes"),
        (lambda: logit_bias({-1: 1.0})(np.ones(5)), ValueError, "class -1 is out of range for 5 classes"),
        (lambda: logit_bias({0.5: 1.0}), TypeError, "keys of bias must be classes"),
        (lambda: logit_bias({0: "1"}), TypeError, "values of bias must be numbers"),
        (lambda: logit_bias({0: INF}), ValueError, "below infinity"),
        (lambda: logit_bias([0.0, np.nan]), ValueError, "below infinity"),
        (lambda: mix([0.5, 0.5], [0.5, 0.5], 1.5), ValueError, "from 0 to 1"),
        (lambda: temperature(np.ones((2, 2, 2)), axis=0)(np.ones((2, 2))), ValueError, "does not broadcast"),
    ],
)
def test_what_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


# -- derivatives and compilers --------------------------------------------------------------------------------------------


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


@pytest.mark.thin(4)
@everyone
def test_jax_gradients_and_jit(name):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    transform = ALL[name]
    x = np.random.default_rng(4).normal(size=(3, 5)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(transform)(x), transform(jnp.asarray(x)), rtol=1e-6, atol=3e-7)
    if name not in ("temperature[]", "noise"):
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


@pytest.mark.thin(4)
@everyone
def test_torch_compile_and_vmap(name):
    torch = pytest.importorskip("torch")
    transform = ALL[name]
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    if name not in ("noise", "xtc"):  # torch.compile cannot trace a torch.Generator
        torch._dynamo.reset()
        got = torch.compile(lambda v: transform(v), fullgraph=True, backend="eager")(x)
        torch.testing.assert_close(got, transform(x))
    if name not in ("temperature[]", "noise", "xtc"):
        torch.testing.assert_close(torch.func.vmap(transform)(x), transform(x))
        first = dataclasses.replace(transform, axis=0) if name != "compose" else transform
        cube = torch.stack([x.T, -x.T]) if name != "compose" else torch.stack([x, -x])
        torch.testing.assert_close(torch.func.vmap(first)(cube), torch.stack([first(c) for c in cube]))


@pytest.mark.parametrize("kind", ["strict", "torch"])
def test_a_nucleus_of_equal_scores(kind):
    if kind not in KINDS:
        pytest.skip(f"no {kind}")
    for n, p in ((20, 0.5), (100, 0.11), (1000, 0.999)):
        kept = back(A.topp(p)(KINDS[kind](np.zeros((1, n))))) > -np.inf
        assert kept.sum() == math.ceil(round(p * n, 6))
        assert kept[0, : kept.sum()].all()


@every_kind
def test_a_number_to_keep_beyond_all_classes_keeps_all(kind):
    x = KINDS[kind](np.array([[0.0, 1.0, 3.0]], np.float32))
    for many in (2**31, 10**20):
        for cut in (
            topk(1, many),
            topp(0.1, many),
            minp(1.0, many),
            typical(0.1, many),
            epsilon_cutoff(0.9, many),
            eta(0.9, many),
        ):
            assert back(cut(x)).tolist() == [[0.0, 1.0, 3.0]]


# -- functions of a user's own, in the verbs -----------------------------------------------------------------------------------

VERBS = {
    "sample": lambda x, t: A.sample("softmax", x, transform=t, generator=0),
    "topk_log_prob": lambda x, t: A.sampling.topk_log_prob("softmax", x, 2, t),
    "gumbel_topk": lambda x, t: A.sampling.gumbel_topk(x, 2, transform=t, generator=0),
    "log_prob": lambda x, t: A.log_prob("softmax", x, np.zeros(len(x), int), transform=t),
    "linear_log_prob": lambda x, t: A.linear_log_prob(x, np.eye(3), np.zeros(len(x), int), "softmax", transform=t),
    "attention": lambda x, t: A.attention(x[:2], x, x, transform=t),
}
NO_SCORES = (
    lambda s: s.T,
    lambda s: s[:1],
    lambda s: None,
    lambda s: 3,
    lambda s: s.tolist(),
    lambda s: s > 0,
    lambda s: KINDS["torch"](s),
)


@pytest.mark.parametrize("verb", VERBS)
def test_a_transform_must_give_back_scores(verb):
    x = np.arange(12.0).reshape(4, 3)
    refused = f"{verb}: transform must give back scores of the shape and kind that it got"
    for t in NO_SCORES:
        with pytest.raises(ValueError, match=refused):
            VERBS[verb](x, t)
    np.testing.assert_array_equal(np.stack(VERBS[verb](x, lambda s: s.astype(int))), np.stack(VERBS[verb](x, np.trunc)))


@pytest.mark.parametrize("verb", [*VERBS, "compose"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_transform_in_place_leaves_the_scores_alone(kind, verb):
    def doubled(s):
        s *= 2
        return s

    x = KINDS[kind](np.arange(12.0).reshape(4, 3) ** 2 % 5)
    before, apply = back(x).copy(), VERBS.get(verb, lambda x, t: compose(t)(x))
    got, want = apply(x, doubled), apply(x, lambda s: 2 * s)
    np.testing.assert_array_equal(back(x), before)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(back(a), back(b))


def test_a_transform_in_place_has_a_gradient():
    torch = pytest.importorskip("torch")
    x = torch.tensor([[0.0, 1.0, 3.0]], requires_grad=True)
    A.log_prob("softmax", x, [0], transform=lambda s: s.mul_(2)).sum().backward()
    want = 2 * (np.eye(3)[0] - scipy_softmax([0.0, 2.0, 6.0]))
    np.testing.assert_allclose(x.grad[0], want, atol=1e-6)


@every_kind
def test_a_nucleus_of_a_flat_row_without_the_engine(kind):
    """Half of equal scores, all of which are candidates."""
    with A.use("reference"):
        left = back(A.topp(0.5)(KINDS[kind](np.zeros((3, 8)))))
    assert np.isfinite(left).sum(-1).tolist() == [4, 4, 4]
