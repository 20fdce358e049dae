"""Truncations of scores, against brute force."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from kinds import KINDS, back, every_kind, generator, jax_in_the_whole_battery
from scipy.special import softmax as scipy_softmax
from transform_cases import INF, scores

import anymax as A
from anymax.transforms import (
    adaptive,
    epsilon_cutoff,
    eta,
    mink,
    minp,
    pless,
    toph,
    topk,
    topnsigma,
    topp,
    typical,
    xtc,
)


def order(row):
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def kept(row, chosen):
    return np.array([v if i in chosen else -INF for i, v in enumerate(row)], dtype=row.dtype)


def topk_row(row, k):
    return kept(row, order(row)[:k])


def of_p(keep):
    """The row of what `keep(row, its softmax, its classes in order)` names; one that is masked altogether stays."""

    def truncated(row, *levels, **options):
        live = [i for i in order(row) if row[i] > -INF]
        return kept(row, keep(row, scipy_softmax(row.astype(np.float64)), live, *levels, **options)) if live else row

    return truncated


def until(classes, q, mass, least):
    """The first of the classes that have this mass, and at least so many."""
    reached = np.cumsum(q[classes]) >= mass - 1e-7
    return classes[: max(int(np.argmax(reached)) + 1 if reached.any() else len(classes), least)]


def entropy_of(weights):
    q = np.array(weights) / np.sum(weights)
    return float(-np.sum(q * np.log(q)))


@of_p
def topp_row(row, q, live, p, least=1):
    return until(live, q, p, least)


@of_p
def minp_row(row, q, live, p, least=1):
    return set(np.flatnonzero(q >= p * q.max() * (1 - 1e-6))) | set(live[:least])


@of_p
def typical_row(row, q, live, mass, least=1):
    far = np.abs(-np.log(q, where=q > 0, out=np.full(len(q), -INF)) - entropy_of(q[live]))
    chosen = until(sorted(live, key=lambda i: far[i]), q, mass, least)
    return {i for i in live if far[i] <= far[chosen[-1]] + 1e-9}


@of_p
def cutoff_row(row, q, live, bar, least=1):
    bar = bar(entropy_of(q[live])) if callable(bar) else bar
    return {i for i in live if q[i] >= bar or row[i] >= row[live[:least][-1]]}


@of_p
def xtc_row(row, q, live, threshold):
    tops = [i for i in live if q[i] >= threshold]
    return set(live) - set(tops[:-1])


@of_p
def pless_row(row, q, live, norm=False, least=1):
    n, same = len(live), float(np.sum(q * q))
    bar = same if not norm else 0.0 if n == 1 else same - (1 - same) / (n - 1)
    return {i for i in live if q[i] >= min(bar, q.max()) - 1e-9 or row[i] >= row[live[:least][-1]]}


@of_p
def toph_row(row, q, live, a, least=1):
    bar = a * entropy_of(q[live])
    count = max(k for k in range(1, len(live) + 1) if entropy_of(q[live[:k]]) <= bar + 1e-7)
    return live[: max(len(live) if a == 1 else count, least)]


@of_p
def mink_row(row, q, live, tau, least=1):
    s = [float(row[i]) for i in live]
    drops = [(s[k - 1] - s[k]) / k for k in range(1, len(s))] or [0.0]
    spread = s[0] - s[-1]
    flat = math.floor(tau / spread) if spread else len(s) * (tau > 0)
    return live[: max(drops.index(max(drops)) + 1, flat, least)]


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
    "topnsigma0": (topnsigma(1e-9), lambda r: topnsigma_row(r, 0.0)),
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
    "pless": (pless(), pless_row),
    "pless,3": (pless(min_keep=3), lambda r: pless_row(r, least=3)),
    "pless norm": (pless(norm=True), lambda r: pless_row(r, True)),
    "toph.4": (toph(0.4), lambda r: toph_row(r, 0.4)),
    "toph.83": (toph(0.83), lambda r: toph_row(r, 0.83)),
    "toph1": (toph(1), lambda r: r),
    "toph.1,4": (toph(0.1, min_keep=4), lambda r: toph_row(r, 0.1, 4)),
    "mink": (mink(), lambda r: mink_row(r, 3.0)),
    "mink0": (mink(0), lambda r: mink_row(r, 0.0)),
    "mink9": (mink(9.0), lambda r: mink_row(r, 9.0)),
    "mink0,4": (mink(0, min_keep=4), lambda r: mink_row(r, 0.0, 4)),
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
        (lambda p: toph(0.9 * p), lambda r, p: toph_row(r, 0.9 * p)),
        (lambda p: mink(9 * p), lambda r, p: mink_row(r, float(np.float32(9) * np.float32(p)))),
    ):
        want = np.stack([oracle(r, float(q[0])) for r, q in zip(x, p)])
        assert np.array_equal(back(transform(KINDS[kind](p))(KINDS[kind](x))), want)


def test_pless_of_flat_rows_keeps_all():
    for n in (*range(1, 60), 1000, 50_000):
        for norm in (False, True):
            assert np.isfinite(pless(norm=norm)(np.full((2, n), 3.1, np.float32))).all(), n


@every_kind
def test_mink_is_the_same_at_every_temperature_and_for_large_scores(kind):
    x = np.random.default_rng(8).normal(size=(50, 40)).astype(np.float32)
    x[:, :4] += 6
    cut = [np.isfinite(back(mink(0)(KINDS[kind](np.float32(f) * x)))) for f in (1.0, 0.125, 8.0)]
    assert np.array_equal(cut[0], cut[1])
    assert np.array_equal(cut[0], cut[2])
    big = np.array([[3e38, 2.9e38, -3e38, -3.1e38]], np.float32)
    assert np.isfinite(back(mink()(KINDS[kind](big)))).tolist() == [[True, True, False, False]]


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


def test_more_classes_to_keep_than_there_are():
    x = np.array([3.0, 1.0, 2.0])
    for cut in (topp(0.5, 10**20), minp(1.0, 2**63), topk(10**20), typical(0.1, 10**20), epsilon_cutoff(0.9, 10**20)):
        assert np.array_equal(cut(x), x)
        assert set(A.sample(A.Softmax(), x, transform=cut, generator=0, num_samples=99).tolist()) == {0, 1, 2}


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
            pless(min_keep=many),
            toph(0.1, many),
            mink(0, many),
        ):
            assert back(cut(x)).tolist() == [[0.0, 1.0, 3.0]]


@every_kind
def test_of_many_classes_transformers_counts_the_hundred_largest(kind):
    x = np.random.default_rng(0).normal(size=(3, 300)).astype(np.float32)
    left = back(adaptive.toph_of_transformers(0.5)(KINDS[kind](x)))
    for row, got in zip(x, left, strict=True):
        q = scipy_softmax(np.sort(row)[::-1][:100].astype(np.float64))
        terms = np.cumsum(-q * np.log(q))
        assert np.isfinite(got).sum() == (terms <= 0.5 * terms[-1]).sum()


@every_kind
def test_a_nucleus_of_a_flat_row_without_the_engine(kind):
    """Half of equal scores, all of which are candidates."""
    with A.use("reference"):
        left = back(A.topp(0.5)(KINDS[kind](np.zeros((3, 8)))))
    assert np.isfinite(left).sum(-1).tolist() == [4, 4, 4]


@pytest.mark.parametrize("each", [False, True], ids=["number", "array"])
@pytest.mark.parametrize("engine", ["reference", None])
@every_kind
def test_a_mass_below_the_smallest_number_of_the_scores_keeps_a_class(kind, engine, each):
    x = KINDS[kind](np.float32([[2.0, 1.0, 0.0, -1.0]] * 2))
    mass = np.array([[1e-320], [0.5]]) if each else 1e-320
    with A.use(engine) if engine else contextlib.nullcontext():
        assert (back(topp(mass)(x)) > -INF).sum(-1).min() == 1
        assert (back(typical(mass)(x)) > -INF).sum(-1).min() == 1
        assert (back(A.sparse_softmax(x, p=1e-320)) > 0).sum(-1).min() == 1


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.5, 3.0])
def test_long_rows_of_which_few_scores_are_sorted(spread, kind):
    x = np.random.default_rng(0).normal(0, spread, (2, 3000))
    x[1, ::3] = -INF
    x[1, 2000:2500] = x[1].max()
    for transform, row in ((toph(0.9), lambda r: toph_row(r, 0.9)), (mink(0), lambda r: mink_row(r, 0.0))):
        np.testing.assert_array_equal(back(transform(KINDS[kind](x))), np.stack([row(r) for r in x]))
    x = np.linspace(0, -30, 3000)[None]  # the steepest drop is far from the largest score
    x[:, 2000:] -= 1e6
    np.testing.assert_array_equal(back(mink(0)(KINDS[kind](x))), mink_row(x[0], 0.0)[None])


@every_kind
@pytest.mark.parametrize(("tail", "dtype"), [(-200.0, np.float32), (-2000.0, np.float64)])
def test_toph_keeps_no_score_whose_probability_is_0(kind, tail, dtype):
    """Where all but the largest are lost beside it, the entropy of the row is 0, and so is that of any part of it."""
    if kind == "jax" and dtype == np.float64:
        return
    x = np.append(np.zeros(1), np.full(1000, tail)).astype(dtype)
    assert np.isfinite(back(toph(0.4)(KINDS[kind](x)))).sum() == 1
    assert np.isfinite(back(toph(0.4, min_keep=3)(KINDS[kind](x)))).sum() == 3
