"""Permutations commute with every map; order and shifts where the facts say so, and a witness against them where they do not."""

import laws
import numpy as np
import pytest
from cases import CASES, each

MONOTONE = [c for c in CASES if c.mapping.facts.monotone]
INVARIANT = [c for c in CASES if c.mapping.facts.shift_invariant]


@each([c for c in CASES if not c.mapping.facts.ordered])
def test_permutation(case):
    laws.permutation(case.apply)


@each([c for c in CASES if c.mapping.facts.ordered])
def test_permutation_refuted(case):
    with pytest.raises(AssertionError, match="off by"):
        laws.permutation(case.apply)


@each(MONOTONE)
def test_monotone(case):
    laws.monotone(case.apply)


@each(INVARIANT)
def test_shift(case):
    laws.shift(case.apply)


def test_every_refuted_order_has_its_witness():
    assert [c.id for c in CASES if c.disorder] == [c.id for c in CASES if c not in MONOTONE]


@each([c for c in CASES if c.disorder])
def test_order_refuted(case):
    x = case.disorder
    last = len(x) - 1  # neighbours of a chain keep their order
    p = case.apply(x)
    assert x[0] > x[last]
    assert p[0] < p[last]
    q = [float(v) for v in case.oracle(np.array(x))]
    assert q[0] < q[last]  # mathematics, not rounding


@each([c for c in CASES if c not in INVARIANT])
def test_shift_refuted(case):
    x = np.array([1.0, 0.5]) - (5.0 if case.between else 0.0)  # both sums in reach
    c = 9.0  # far enough to show it for every order of Taylor
    assert np.abs(case.apply(x + c) - case.apply(x)).max() > 1e-2
    assert abs(float(case.oracle(x + c)[0]) - float(case.oracle(x)[0])) > 1e-2
