"""The laws on shapes, axes, extremes and masks that nobody thought of; the same ones in every run."""

import math

import numpy as np
import pytest
from cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import anymax as am

FEW = settings(derandomize=True, max_examples=40, deadline=None, database=None)
MAPS = st.sampled_from([c for c in CASES if c.distribution and c.row not in ("PerturbMax", "Ratio")])
SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=6)
ANY = st.floats(allow_nan=True, allow_infinity=True, width=32)
FINITE = st.floats(min_value=-100, max_value=100, width=32) | st.sampled_from([0.0, -math.inf, 1.0, 1e30, -1e30])
TAME = st.floats(min_value=-8, max_value=8, width=32)


def rows(elements, dtype=np.float32, shapes=SHAPES):
    return hnp.arrays(dtype, shapes, elements=elements)


@FEW
@given(MAPS, rows(ANY), st.data())
def test_the_policy_of_the_house(case, x, data):
    """Whatever comes in: NaN rows where there is NaN or +inf, zeros for masked rows, a distribution elsewhere."""
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    before = x.copy()
    p = case.apply(x, axis=axis)
    np.testing.assert_array_equal(x, before)
    assert p.shape == x.shape
    assert p.dtype == x.dtype
    x, p = np.moveaxis(x, axis, -1), np.moveaxis(p, axis, -1)
    poisoned = (np.isnan(x) | np.isposinf(x)).any(-1)
    empty = np.isneginf(x).all(-1)
    assert np.isnan(p[poisoned]).all()
    assert (p[empty] == 0).all()
    rest = p[~poisoned & ~empty]
    assert (rest >= 0).all()
    np.testing.assert_allclose(rest.astype(np.float64).sum(-1), 1.0, atol=4e-7)


@FEW
@given(MAPS, rows(FINITE, np.float64), st.data())
def test_masks(case, x, data):
    keep = data.draw(hnp.arrays(np.bool_, x.shape))
    p = case.apply(x, mask=keep)
    assert (p[~keep] == 0).all()
    np.testing.assert_array_equal(p, case.apply(np.where(keep, x, -np.inf)))


@FEW
@given(
    MAPS.filter(lambda c: not c.mapping.facts.ordered),
    rows(TAME, np.float64, hnp.array_shapes(min_dims=1, max_dims=1, min_side=2, max_side=12)),
    st.data(),
)
def test_permutations(case, x, data):
    order = np.array(data.draw(st.permutations(range(x.size))))
    if case.row == "SparseSoftmax" and np.unique(x).size < x.size:
        return  # ties are broken by position
    np.testing.assert_allclose(case.apply(x[order]), case.apply(x)[order], atol=1e-7)  # an edge of alpha = 10 is steep


@FEW
@given(MAPS.filter(lambda c: c.mapping.facts.monotone), rows(TAME, np.float64))
def test_order(case, x):
    p = case.apply(x)
    order = np.argsort(x, axis=-1, kind="stable")
    ranked = np.take_along_axis(p, order, -1)
    ties = case.row == "SparseSoftmax"
    for row, q in zip(np.take_along_axis(x, order, -1).reshape(-1, x.shape[-1]), ranked.reshape(-1, x.shape[-1])):
        rising = np.diff(row) > 0 if ties else np.full(len(row) - 1, True)
        assert (np.diff(q)[rising] >= -1e-15).all()


@FEW
@given(
    MAPS.filter(lambda c: c.mapping.facts.has_potential),
    rows(TAME, np.float64, hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=6)),
    st.data(),
)
def test_losses(case, x, data):
    """Not negative, and no smaller than what the gradient at another point allows: L(b) >= L(a) + <p(a) - y, b - a>."""
    t = data.draw(hnp.arrays(np.int64, x.shape[:1], elements=st.integers(0, x.shape[1] - 1)))
    a = am.fenchel_young(case.mapping, x, t, reduction="none")
    assert (a >= 0).all()
    if not case.potential:
        return
    other = x[::-1]
    b = am.fenchel_young(case.mapping, other, t, reduction="none")
    y = np.eye(x.shape[1])[t]
    assert (b >= a + ((case.apply(x) - y) * (other - x)).sum(-1) - 1e-9).all()


@FEW
@given(rows(TAME, np.float64), st.floats(min_value=0.3, max_value=12), st.data())
def test_any_alpha(x, alpha, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    p = am.entmax(x, alpha, axis)
    np.testing.assert_allclose(p.sum(axis), 1.0, atol=1e-14)
    np.testing.assert_allclose(am.entmax(x, np.asarray(alpha), axis), p, atol=1e-13)


@FEW
@given(rows(TAME, np.float64), st.floats(min_value=0.1, max_value=6), st.data())
def test_any_budget(x, k, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    n = x.shape[axis]
    if k > n:
        with pytest.raises(ValueError, match="can't be chosen"):
            am.budget(x, k, axis)
        return
    p = am.budget(x, k, axis)
    assert ((p >= 0) & (p <= 1)).all()
    np.testing.assert_allclose(p.sum(axis), k, atol=1e-13)
