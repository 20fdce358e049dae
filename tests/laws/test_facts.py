"""Every entry of `Facts`, for every map, by numbers: what it promises holds, what it does not promise has a witness against it."""

import dataclasses

import laws
import numpy as np
import pytest
from cases import CASES, each_case

import anymax as am

FIELDS = [f.name for f in dataclasses.fields(am.Facts)]


def broken(law, *args):
    try:
        law(*args)
    except AssertionError:
        return True
    return False


def monotone(case):
    return not broken(laws.monotone, case.apply) and case.disorder is None  # a witness, tried in test_law_symmetry


def shift_invariant(case):
    return not broken(laws.shift, case.apply, 1e-9)


def sparse(case):
    """Some probability is exactly 0 at a moderate spread (dense maps underflow only far out)."""
    rows = [np.array([4.0, 0.0, -4.0]), np.array([0.0, -0.2, 0.5]), np.array([0.5, 0.0, -30.0]), np.linspace(-4, 4, 7)]
    if case.id == "entmax-1.000001":
        rows = [np.array([1.1e6, 0.0])]
    return any((case.apply(x) == 0).any() for x in rows)


def has_potential(case):
    x = np.array([0.6, 0.35, 1.0, -0.1])
    j = am.jacobian(case.mapping, x)
    return bool(np.abs(j - j.T).max() < 1e-12)


def ordered(case):
    return broken(laws.permutation, case.apply)


CHECKS = {
    "monotone": monotone, "shift_invariant": shift_invariant, "sparse": sparse, "has_potential": has_potential, "ordered": ordered,
}  # fmt: skip


@each_case
@pytest.mark.parametrize("fact", CHECKS)
def test_fact(case, fact):
    assert CHECKS[fact](case) == getattr(am.facts(case.mapping), fact)


@each_case
def test_margin(case):
    """The least lead that makes the loss 0 before any number of others, found by halving; tests/laws/test_law_loss.py has the law."""
    margin = am.facts(case.mapping).margin
    if not am.facts(case.mapping).has_potential or case.mass != int(case.mass) or case.mapping.params() or case.between:
        assert margin is None or case.id == "budget-2.5" or case.mapping.params()
        return
    k, n = int(case.mass), 8191 if case.row != "PerturbMax" else 63
    first = 0
    if am.facts(case.mapping).ordered:  # the target between the others
        n, first = 3, 1
    y = np.zeros(n)
    y[first : first + k] = 1.0

    def loss(lead):
        x = np.zeros(n)
        x[first : first + k] = lead
        return float(am.fenchel_young(case.mapping, x, np.array(first) if k == 1 else y))

    if margin is None:
        assert loss(4.0) > 0
        return
    low, high = -1.0, 2.0 * margin + 1.0
    assert loss(high) == 0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if loss(middle) == 0 else (middle, high)
    # near alpha = 1 the loss underflows long before its margin; the last of it is of second order elsewhere
    if case.id in ("entmax-1.000001", "entmax-1.1"):
        assert high <= margin * (1 + 1e-9)
    else:
        assert abs(high - margin) <= 0.05 * max(margin, 0.01), (high, margin)


def test_every_entry_is_checked():
    assert {*CHECKS, "margin"} == set(FIELDS)


@each_case
def test_strict(case):
    """p_i > p_j exactly where x_i > x_j, at scores that no rounding makes equal; a map that is not strict has a witness."""

    def exact(sigma):
        x = laws.scores(40, 7, sigma=sigma, seed=61)
        p = case.apply(x)
        return ((p[:, :, None] > p[:, None, :]) == (x[:, :, None] > x[:, None, :])).all()

    strict = am.facts(case.mapping).strict
    assert exact(2.0) or not strict
    assert strict or not all(map(exact, (2.0, 30.0, 1e7)))


def test_facts_are_data():
    for case in CASES:
        facts = am.facts(case.mapping)
        assert isinstance(facts, am.Facts)
        assert facts == case.mapping.facts
        with pytest.raises(dataclasses.FrozenInstanceError):
            facts.sparse = True
    with pytest.raises(TypeError, match="expected a mapping"):
        am.facts(2)


def test_sparse_of_an_array_alpha():
    assert am.facts(am.Entmax(np.array([0.5, 1.5]))).sparse
    assert not am.facts(am.Entmax(np.array([0.5, 1.0]))).sparse
