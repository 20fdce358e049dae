"""p lies in the simplex: non-negative, summing to 1, zeros where masked."""

import laws
import numpy as np
import pytest
from cases import CASES, each_case, each_first, few_of_jax
from kinds import KINDS, back

import anymax as am


def _least(case):
    return int(np.ceil(case.mass))


@each_case
def test_simplex(case):
    single = 3e-7 if case.row == "NormMax" else 2e-7  # measured: its sum is rounded once more
    laws.simplex(case.apply, case.sums, _least(case), positive_row=case.positive_row, single=single)


@each_case
def test_masked(case):
    # a quadrature's nodes depend on the number of classes, hence its error does
    laws.masked(case.apply, max(2, _least(case)), 1e-14 if case.tv is None else 10 * case.tv[1])


@few_of_jax
@each_first
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "numpy"])
def test_simplex_of_every_kind(case, kind):
    for n in (63,):
        x = laws.scores(3, n, sigma=2.0, seed=n, dtype=np.float32)
        x[2, : n - 2] = -np.inf
        p = back(case.apply(KINDS[kind](x)))
        assert p.dtype == np.float32
        assert (p >= 0).all()
        assert (p[2, : n - 2] == 0).all()
        atol = 2e-7 if case.tv is None else 4e-7  # XLA sums its 63 nodes in another order
        sums = p.astype(np.float64).sum(-1)
        low, high = np.array([case.sums(count) for count in (x > -np.inf).sum(-1)]).T
        laws.close(sums, np.clip(sums, low, high), atol * max(1.0, high.max()), n)
        assert (back(case.apply(KINDS[kind](np.full((1, n), -np.inf, np.float32)))) == 0).all()


def test_fewer_classes_than_units():
    with pytest.raises(ValueError, match=r"Budget\(k=3\).*at most the number of classes"):
        am.budget(np.zeros(2), 3)
    x = np.array([1.0, -np.inf, 0.0])
    np.testing.assert_array_equal(am.budget(x, 3), [1, 0, 1])


@pytest.mark.whole(lambda n: n > 507)
@pytest.mark.parametrize("n", [63, 507, 131072])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.mapping.facts.shift_invariant and c.distribution], ids=lambda c: c.id
)
def test_fp32_sums_at_large_offsets(case, n):
    if n > 507 and case.row == "PerturbMax":
        n = 8191
    for offset in (0.0, 1e3, 1e4):
        x = (laws.scores(n, seed=n) + offset).astype(np.float32)
        assert abs(float(case.apply(x).astype(np.float64).sum()) - 1) <= 2e-7
