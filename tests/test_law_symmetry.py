"""Permutations commute with every map; order and shifts where the facts say so, and a witness against them where they do not."""

import laws
import numpy as np
import pytest
from cases import BY_ID, CASES, each, each_case

MONOTONE = [c for c in CASES if c.mapping.facts.monotone]
INVARIANT = [c for c in CASES if c.mapping.facts.shift_invariant]

# scores x_0 > x_1 with p_0 < p_1
DISORDER = {
    "taylor-2": [-1.0, -3.0],
    "taylor-4": [-1.6, -4.0],
    "taylor-6": [-2.2, -5.0],
    "ratio-square": [0.0, -1.0],
}


@each_case
def test_permutation(case):
    laws.permutation(case.apply)


@each(MONOTONE)
def test_monotone(case):
    laws.monotone(case.apply)


@each(INVARIANT)
def test_shift(case):
    laws.shift(case.apply)


def test_every_refuted_order_has_its_witness():
    assert {c.id for c in CASES} - {c.id for c in MONOTONE} == set(DISORDER)


@pytest.mark.parametrize("id", DISORDER)
def test_order_refuted(id):
    x = DISORDER[id]
    p = BY_ID[id].apply(x)
    assert x[0] > x[1]
    assert p[0] < p[1]
    q = [float(v) for v in BY_ID[id].oracle(np.array(x))]
    assert q[0] < q[1]  # mathematics, not rounding


@each([c for c in CASES if c not in INVARIANT])
def test_shift_refuted(case):
    x = np.array([1.0, 0.5])
    c = 9.0  # far enough to show it for every order of Taylor
    assert np.abs(case.apply(x + c) - case.apply(x)).max() > 1e-2
    assert abs(float(case.oracle(x + c)[0]) - float(case.oracle(x)[0])) > 1e-2
