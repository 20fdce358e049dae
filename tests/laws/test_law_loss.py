"""Fenchel-Young losses: >= 0, 0 only where y = p(x), gradient p - y, convex, exactly 0 beyond the margin."""

import itertools
import math

import laws
import numpy as np
import pytest
from cases import BY_ID, CASES, each

import anymax as am

CONVEX = [c for c in CASES if c.potential]
ROWS = [laws.scores(n, sigma=sigma, seed=30 + n) for n in (3, 7) for sigma in (0.3, 1.0, 2.0)]


def loss_of(case):
    return lambda x, y: float(am.fenchel_young(case.mapping, x, y))


def targets_of(case):
    def targets(n):
        whole, rest = divmod(case.mass, 1)
        vertex = np.zeros(n)
        vertex[: int(whole)] = 1.0
        if rest:
            vertex[int(whole)] = rest
        vertex = vertex if case.target is None else case.target(n)
        soft = case.apply(laws.scores(n, seed=99))
        return [vertex, np.roll(vertex, 2), soft]

    return targets


@each(CONVEX)
def test_loss(case):
    rows = [x for x in ROWS if len(x) > case.mass]
    laws.loss_facts(case.apply, loss_of(case), targets_of(case), rows, case.soft_loss)


def test_loss_of_a_moving_nucleus():
    """SparseSoftmax(p): logsumexp of the kept minus x_t, where the nucleus stays: >= 0, with the gradient p - y."""
    case = BY_ID["sparse_softmax-p0.9"]
    for x in ROWS:
        t, y = np.array(1), np.eye(len(x))[1]
        assert am.fenchel_young(case.mapping, x, t) >= 0
        p = case.apply(x)
        kept = p > 0
        laws.close(am.fenchel_young(case.mapping, x, t), np.log(np.exp(x[kept]).sum()) - x[1], 1e-14)
        slope = laws.oracles.differences(lambda v, t=t: am.fenchel_young(case.mapping, v, t), x, h=1e-5)
        laws.close(slope, p - y, 1e-8)


@each([c for c in CASES if not c.mapping.facts.has_potential])
def test_no_potential_no_loss(case):
    with pytest.raises(TypeError, match=r"no Fenchel-Young loss.*Jacobian is not symmetric.*anymax\.nll"):
        am.fenchel_young(case.mapping, np.zeros((2, 3)), np.array([0, 1]))
    x = laws.scores(4, 5, seed=31) + 3.0
    t = np.array([0, 1, 4, 2])
    p = case.apply(x)
    laws.close(am.nll(case.mapping, x, t), -np.log(p[np.arange(4), t]).mean(), 1e-13)


@each([c for c in CONVEX if c.mapping.facts.margin is not None])
def test_margin(case):
    """Exactly 0 once the target leads by the margin, positive within it, and never rising on the way."""
    margin, k = case.mapping.facts.margin, int(case.mass)
    if case.mass != k:
        pytest.skip("half a class can't be a target")
    for n in (max(2, k + 1), 63, 507):
        y = np.zeros(n)
        y[:k] = 1.0
        x = -np.abs(laws.scores(n, seed=32))
        x[: k + 1] = 0.0  # the hardest competitor is at 0
        for lead in (1.0, 1.0 + 1e-9, 1.5, 100.0):
            z = x.copy()
            z[:k] += margin * lead * (1 + 4e-16)
            assert loss_of(case)(z, y) == 0, (n, lead)
        if margin == 0 or case.mapping.facts.ordered:  # a target at the end of a chain needs less
            continue
        values = []
        for lead in (-1.0, 0.0, 0.3, 0.6, 0.9):
            z = x.copy()
            z[:k] += min(margin, 5.0) * lead
            values.append(loss_of(case)(z, y))
        assert values[-1] > 0
        assert all(a > b for a, b in itertools.pairwise(values)), values


@each([c for c in CASES if c.mapping.facts.has_potential and c.mapping.facts.margin is None and c.between is None])
def test_no_margin(case):
    """No lead is enough for every number of classes: a lead of 8 before 100,000 others (array alphas: of 1/(alpha-1))."""
    if case.row in ("Entmax", "NormMax") and case.mapping.params():
        pytest.skip("an alpha for each row has a margin for each row")
    n = 131072 if case.row != "PerturbMax" else 8191
    x = np.zeros(n)
    whole, rest = divmod(case.mass, 1)
    if rest:
        pytest.skip("half a class can't be a target")
    x[: int(whole)] = 8.0 if case.row != "PerturbMax" else 3.0
    target = np.array([0]) if whole == 1 else (x > 0).astype(float)[None]
    assert am.fenchel_young(case.mapping, x[None], target) > 0


# -- numbers ----------------------------------------------------------------------------------------------------------------------


@each([c for c in CONVEX if c.distribution])
def test_large_scores_and_offsets(case):
    """No cancellation: an offset of 2^20 changes no loss by more than the scores' own rounding; gaps of 1e9 are exact."""
    t = np.array([1])
    x = np.round(laws.scores(1, 63, seed=34) * 2**20) / 2**20
    small = am.fenchel_young(case.mapping, x, t)
    laws.close(am.fenchel_young(case.mapping, x + 2.0**20, t), small, 1e-10)
    far = np.array([[1e9, 0.0, -1e9]])
    laws.close(am.fenchel_young(case.mapping, far, t), 1e9, 2.0)
    most = 1e-8 if case.id in ("entmax-0.5", "entmax-0.9") else 0.0  # heavy tails: never quite 0
    assert 0 <= am.fenchel_young(case.mapping, far, np.array([0])) <= most
    tiny = am.fenchel_young(case.mapping, far.astype(np.float32), np.array([0]))
    assert tiny.dtype == np.float32
    assert 0 <= tiny <= most


@each([c for c in CASES if c.mapping.facts.has_potential and c.distribution])
def test_fp32_is_never_negative(case):
    for n in (2, 63, 507):
        x = laws.scores(9, n, sigma=3.0, seed=n, dtype=np.float32)
        values = am.fenchel_young(case.mapping, x, x.argmax(-1), reduction="none")
        assert (values >= 0).all()
        wide = am.fenchel_young(case.mapping, x.astype(np.float64), x.argmax(-1), reduction="none")
        laws.close(values, wide, 4e-6 * max(1.0, wide.max()))


@each([c for c in CASES if c.mapping.facts.has_potential and c.distribution])
def test_masks_in_the_loss(case):
    """A masked class that is not the target changes nothing, a masked target costs +inf, a poisoned row is NaN."""
    x = laws.scores(1, 6, seed=35)
    wide = np.insert(x, 2, -math.inf, axis=1)
    atol = 1e-13 if case.tv is None else 1e-7
    laws.close(
        am.fenchel_young(case.mapping, wide, np.array([0])), am.fenchel_young(case.mapping, x, np.array([0])), atol
    )
    assert am.fenchel_young(case.mapping, wide, np.array([2])) == math.inf
    for bad in (math.nan, math.inf):
        wide[0, 1] = bad
        assert np.isnan(am.fenchel_young(case.mapping, wide, np.array([0])))
