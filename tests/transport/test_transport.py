"""Sinkhorn: matrices whose rows and columns both have given sums, against oracles that share no code with it."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings

import mpmath
import numpy as np
import pytest
from refusals import each, refuses

import anymax as am
from anymax.transport import Sinkhorn, gumbel_sinkhorn
from anymax.transport.assignment import assignment

torch = pytest.importorskip("torch")


def scores(*shape, sigma=2.0, seed=0, dtype=np.float64):
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * sigma).astype(dtype)


def normalised(x, iterations, first=-1, second=-2, rows=1.0, columns=1.0):
    """exp(x), whose rows and then columns are divided by their sums so many times: the plain loop, in float64."""
    x = np.asarray(x, np.float64)
    p = np.exp(x - x.max())
    for _ in range(iterations):
        p = p / p.sum(first, keepdims=True) * rows
        p = p / p.sum(second, keepdims=True) * columns
    return p


def sums(n, m, seed=0):
    """Marginals of one total."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.uniform(0.2, 2.0, n), rng.uniform(0.2, 2.0, m)
    return rows, columns * (rows.sum() / columns.sum())


LAYOUTS = {
    "contiguous": lambda a: a,
    "columns": lambda a: np.asfortranarray(a.reshape(-1, *a.shape[-2:])).reshape(a.shape)[...],
    "steps": lambda a: np.repeat(np.repeat(a, 2, -1), 3, -2)[..., ::3, ::2],
    "turned": lambda a: a[..., ::-1, ::-1][..., ::-1, ::-1],
}
SHAPES = [(4, 4), (1, 1), (2, 3), (5, 4), (8, 8), (9, 7), (1, 6), (40, 33)]


@pytest.fixture(params=["engine", "reference"])
def _by(request):
    """The compiled engine where there is one, and the array code."""
    with am.use("reference") if request.param == "reference" else contextlib.nullcontext():
        yield


# -- n steps -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.whole(lambda framework: framework == "jax")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("framework", ["numpy", "reference", "torch", "jax"])
def test_steps_are_those_of_the_plain_loop(shape, iterations, framework):
    x = scores(19, *shape, dtype=np.float32)
    n, m = shape
    if framework == "jax":
        xp = pytest.importorskip("jax.numpy")
        given = xp.asarray(x)
    else:
        given = torch.from_numpy(x) if framework == "torch" else x
    with am.use("reference") if framework == "reference" else contextlib.nullcontext():
        p = np.asarray(Sinkhorn(iterations)(given))
        rows, columns = sums(n, m)
        other = Sinkhorn(iterations)(x.astype(np.float64), rows=rows, columns=columns)
    assert p.dtype == np.float32
    np.testing.assert_allclose(p, normalised(x, iterations, columns=n / m), rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(other, normalised(x, iterations, rows=rows[:, None], columns=columns), rtol=1e-11)


def hyper_connection(x, epsilon=0.0):
    """As DeepSeek-V4 in transformers: rows and then columns, twenty times, with an epsilon that it adds to each sum."""
    p = x.softmax(-1) + epsilon
    p = p / (p.sum(-2, keepdim=True) + epsilon)
    for _ in range(19):
        p = p / (p.sum(-1, keepdim=True) + epsilon)
        p = p / (p.sum(-2, keepdim=True) + epsilon)
    return p


def test_hyper_connections_rows_first_and_columns_first():
    """mHC's paper normalises columns and then rows."""
    x = torch.from_numpy(scores(50, 4, 4))
    torch.testing.assert_close(Sinkhorn(20)(x), hyper_connection(x), rtol=1e-12, atol=1e-15)
    want = normalised(x.numpy(), 20, -2, -1)
    np.testing.assert_allclose(Sinkhorn(20)(x, axes=(-1, -2)), want, rtol=1e-12, atol=1e-15)
    x = torch.from_numpy(scores(50, 4, 4, sigma=1.0))
    assert (Sinkhorn(20)(x) - hyper_connection(x, 1e-6)).abs().max() < 5e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axes", list(itertools.permutations((0, 1, 2, -1), 2)), ids=str)
def test_axes_and_strides(axes, layout):
    if axes[0] % 3 == axes[1] % 3:
        pytest.skip("one axis twice")
    x = LAYOUTS[layout](scores(3, 4, 5))
    before = x.copy()
    first, second = axes[1], axes[0]  # a row is summed along the axis of the columns
    n, m = x.shape[axes[0]], x.shape[axes[1]]
    want = normalised(x, 5, first, second, columns=n / m)
    np.testing.assert_allclose(Sinkhorn(5)(x, axes), want, rtol=1e-11)
    np.testing.assert_array_equal(x, before)


def test_read_only_and_empty():
    x = scores(3, 4, 4, dtype=np.float32)
    x.flags.writeable = False
    assert Sinkhorn()(x).shape == x.shape
    for shape in ((0, 4, 4), (2, 0, 3, 5)):
        for iterations in (3, None):
            assert Sinkhorn(iterations)(np.zeros(shape)).shape == shape
            assert tuple(Sinkhorn(iterations)(torch.zeros(shape)).shape) == shape


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_computed_in_float32(dtype):
    x = torch.from_numpy(scores(6, 4, 4)).to(getattr(torch, dtype))
    for iterations in (20, None):
        p = Sinkhorn(iterations)(x)
        assert p.dtype == x.dtype
        assert torch.equal(p, Sinkhorn(iterations)(x.float()).to(x.dtype))


def test_integers_and_lists_become_floats():
    np.testing.assert_allclose(Sinkhorn(3)([[1, 0], [0, 1]]), normalised([[1, 0], [0, 1]], 3))


# -- the limit -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 4), (2, 3), (9, 4), (30, 50)], ids=str)
@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("sigma", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_both_sums_at_the_limit(shape, sigma, dtype):
    x = scores(7, *shape, sigma=sigma, dtype=dtype)
    wanted, bound = [a.astype(dtype) for a in sums(*shape)], 1e-6 if dtype == "float32" else 4e-12
    p = Sinkhorn(None)(x, rows=wanted[0], columns=wanted[1])
    for axis, want in zip((-1, -2), wanted):
        np.testing.assert_allclose(p.sum(axis), np.broadcast_to(want, (7, len(want))), rtol=bound)


def test_the_limit_solves_the_problem():
    """log P - x / temperature is a sum of a number of the row and one of the column, and both sums are right: no other P has this."""
    x = scores(5, 6, 4)
    p = Sinkhorn(None, temperature=0.3)(x)
    rest = np.log(p) - x / 0.3
    mixed = rest[:, :1, :1] - rest[:, 1:, :1] - rest[:, :1, 1:] + rest[:, 1:, 1:]
    assert np.abs(mixed).max() < 1e-10


def test_two_by_two_in_closed_form():
    """The doubly stochastic limit of [[a, b], [c, d]] has p_11 = 1 / (1 + sqrt(b c / (a d)))."""
    mpmath.mp.dps = 40
    for a, b, c, d in scores(10, 4, sigma=20.0):
        want = 1 / (1 + mpmath.exp((mpmath.mpf(b) + mpmath.mpf(c) - mpmath.mpf(a) - mpmath.mpf(d)) / 2))
        got = Sinkhorn(None)(np.array([[a, b], [c, d]]))[0, 0]
        assert abs(got - want) <= 1e-12 * max(want, mpmath.mpf(1e-300)) + 1e-300 or abs(got - want) < 1e-12


def test_few_digits_of_mpmath():
    mpmath.mp.dps = 50
    x = scores(4, 4, sigma=5.0)
    u, v = [mpmath.mpf(1)] * 4, [mpmath.mpf(1)] * 4
    k = [[mpmath.exp(mpmath.mpf(float(a))) for a in row] for row in x]
    for _ in range(20):
        u = [1 / sum(k[i][j] * v[j] for j in range(4)) for i in range(4)]
        v = [1 / sum(k[i][j] * u[i] for i in range(4)) for j in range(4)]
    want = np.array([[float(u[i] * k[i][j] * v[j]) for j in range(4)] for i in range(4)])
    np.testing.assert_allclose(Sinkhorn(20)(x), want, rtol=1e-13)
    np.testing.assert_allclose(Sinkhorn(20)(x.astype(np.float32)), want, rtol=2e-5, atol=1e-7)


@pytest.mark.usefixtures("_by")
def test_a_low_temperature_gives_an_assignment():
    x = scores(6, 7, 7)
    want = assignment(x)
    for iterations in (3000, None):
        np.testing.assert_allclose(Sinkhorn(iterations, temperature=2e-3)(x), want, atol=0.02)


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3, 1.0, 1e3, 1e300])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_temperature_overflows(temperature, dtype):
    p = Sinkhorn(20, temperature)(scores(5, 4, 4, sigma=100.0, dtype=dtype))
    assert np.isfinite(p).all()
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(-2), 1.0, rtol=1e-6)


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("temperature", [1e-300, 1e-50, 1e-30, 1e-3])
def test_a_low_temperature_gives_the_assignment(temperature, dtype):
    """Where the best column of each row is that of no other; also for one matrix, and for a temperature that is 0 as a float."""
    best = np.random.default_rng(0).permuted(np.tile(np.arange(6), (5, 1)), axis=1)
    want = (np.arange(6) == best[..., None]).astype(dtype)
    for count in (5, 1):
        x = want[:count] * np.asarray(2.0, dtype)
        np.testing.assert_allclose(Sinkhorn(20, temperature)(x), want[:count], atol=1e-6)


def test_a_high_temperature_gives_equal_shares():
    np.testing.assert_allclose(Sinkhorn(None, 1e9)(scores(3, 5)), 0.2, rtol=1e-6)


def test_unreachable_sums_are_said():
    mask = np.array([[True, False, False], [True, False, False], [True, True, True]])
    with pytest.warns(RuntimeWarning, match=r"sums of some rows are still wrong by .*give a number of iterations"):
        Sinkhorn(None)(np.zeros((3, 3)), mask=mask)


# -- masks, NaN, marginals ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("iterations", [1, 20, None])
def test_a_mask_is_minus_infinity_and_gives_zeros(iterations):
    x = scores(8, 5, 5)
    keep = np.random.default_rng(1).random(x.shape) < 0.7
    keep[..., np.arange(5), np.arange(5)] = True  # so that the sums can be reached
    p = Sinkhorn(iterations)(x, mask=keep)
    assert (p[~keep] == 0).all()
    np.testing.assert_array_equal(p, Sinkhorn(iterations)(np.where(keep, x, -np.inf)))
    if iterations:
        np.testing.assert_allclose(p, normalised(np.where(keep, x, -np.inf), iterations), rtol=1e-11)
    else:
        np.testing.assert_allclose(p.sum(-1), 1.0, rtol=1e-9)


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("iterations", [4, None])
def test_padding_does_not_count(iterations):
    """A matrix within a larger one, whose other rows and columns are masked, is that of its own size."""
    x = scores(5, 6)
    padded = np.full((7, 8), -np.inf)
    padded[:5, :6] = x
    p = Sinkhorn(iterations)(padded)
    np.testing.assert_allclose(p[:5, :6], Sinkhorn(iterations)(x), rtol=1e-11)
    assert p[5:].sum() == p[:, 6:].sum() == 0
    rows, columns = sums(5, 6)
    given = {"rows": [*rows, 3.0, 4.0], "columns": [*columns, 7.0, 0.0]}  # those of masked rows and columns don't count
    p = Sinkhorn(iterations)(padded, **given)
    np.testing.assert_allclose(p[:5, :6], Sinkhorn(iterations)(x, rows=rows, columns=columns), rtol=1e-11)


@pytest.mark.usefixtures("_by")
def test_nothing_kept_gives_zeros():
    for iterations in (2, None):
        assert (Sinkhorn(iterations)(np.full((2, 3, 3), -np.inf)) == 0).all()
        assert (Sinkhorn(iterations)(torch.full((2, 3, 3), -math.inf)) == 0).all()


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(4, 4), (6, 9)], ids=str)
@pytest.mark.parametrize("iterations", [1, 20, None])
def test_a_bad_score_makes_its_matrix_nan_and_no_other(bad, framework, shape, iterations):
    x = scores(33, *shape, dtype=np.float32)
    want = Sinkhorn(iterations)(x)
    x[5, 1, 2] = bad
    p = np.asarray(Sinkhorn(iterations)(torch.from_numpy(x) if framework == "torch" else x))
    assert np.isnan(p[5]).all()
    others = np.arange(33) != 5
    np.testing.assert_allclose(p[others], want[others], rtol=1e-5)


@pytest.mark.usefixtures("_by")
def test_one_of_the_sums_gives_equal_shares_of_its_total_to_the_other():
    x = scores(3, 4)
    rows, columns = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(Sinkhorn(9)(x, rows=rows), Sinkhorn(9)(x, rows=rows, columns=[1.5] * 4))
    np.testing.assert_allclose(Sinkhorn(9)(x, columns=columns), Sinkhorn(9)(x, rows=[10 / 3] * 3, columns=columns))


@pytest.mark.usefixtures("_by")
def test_sums_of_zero_and_of_a_batch():
    x = scores(2, 3, 4)
    p = Sinkhorn(None)(x, rows=[[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]], columns=[0.0, 1.0, 1.5, 0.5])
    np.testing.assert_allclose(p.sum(-1), [[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]], atol=1e-11)
    np.testing.assert_allclose(p.sum(-2), [[0.0, 1.0, 1.5, 0.5]] * 2, atol=1e-11)


@pytest.mark.parametrize("iterations", [1, 6, None])
def test_permutations_move_the_result_along(iterations):
    x = scores(6, 5)
    a, b = np.random.default_rng(0).permutation(6), np.random.default_rng(1).permutation(5)
    rows, columns = sums(6, 5)
    p = Sinkhorn(iterations)(x, rows=rows, columns=columns)
    moved = Sinkhorn(iterations)(x[a][:, b], rows=rows[a], columns=columns[b])
    np.testing.assert_allclose(moved, p[a][:, b], rtol=1e-9)


@pytest.mark.parametrize("iterations", [4, None])
def test_a_number_added_to_a_row_changes_nothing(iterations):
    x = scores(4, 4)
    np.testing.assert_allclose(
        Sinkhorn(iterations)(x + np.array([[3.0], [-50.0], [0.0], [1e3]])), Sinkhorn(iterations)(x), rtol=1e-9
    )


# -- what is refused --------------------------------------------------------------------------------------------------------------


X = scores(3, 4)
REFUSED = {
    "two totals": (lambda: Sinkhorn()(X, rows=[1.0] * 3, columns=[2.0] * 4), ValueError, "got 3 for rows and 8 for columns"),
    "sums of columns": (
        lambda: Sinkhorn()(X, rows=[1.0] * 4), ValueError, r"one number for each of the 3 rows, \[\.\.\., 3\], got shape \(4,\)",
    ),
    "a sum below 0": (lambda: Sinkhorn()(X, rows=[1.0, -1.0, 1.0]), ValueError, "rows must be at least 0 and finite"),
    "one axis twice": (lambda: Sinkhorn()(X, (1, -1)), ValueError, "name one axis twice"),
    "one axis": (lambda: Sinkhorn()(X, -1), TypeError, "axes must be two axes"),
    "axis": (lambda: Sinkhorn()(X, axis=-1), TypeError, r"no option 'axis' \(say axes="),
    "a row": (lambda: Sinkhorn()(X[0]), ValueError, r"two axes or more, rows and columns, got shape \(4,\)"),
    "no columns": (lambda: Sinkhorn()(np.zeros((3, 0))), ValueError, "no rows or no columns"),
    "a mask of numbers": (lambda: Sinkhorn()(X, mask=np.ones((3, 4))), TypeError, "expected a boolean array"),
    "no steps": (lambda: Sinkhorn(0), ValueError, "iterations=0.*an integer of at least 1, or None"),
    "steps below 0": (lambda: Sinkhorn(-1), ValueError, "iterations=-1.*an integer of at least 1, or None"),
    "half a step": (lambda: Sinkhorn(2.5), TypeError, r"iterations=2\.5"),
    "no temperature": (lambda: Sinkhorn(temperature=0.0), ValueError, r"temperature=0\.0.*above 0"),
    "a map of rows": (lambda: am.apply(Sinkhorn(), X), TypeError, r"a map of matrices.*call it: Sinkhorn\(\.\.\.\)\(x, axes=\(-2, -1\)\)"),
    "a permutation of a rectangle": (
        lambda: gumbel_sinkhorn(np.zeros((2, 3)), hard=True, generator=0), ValueError, "as many rows as columns, got 2 and 3",
    ),
    "hard of 1": (lambda: gumbel_sinkhorn(np.zeros((2, 2)), hard=1), TypeError, "hard must be True or False"),
}  # fmt: skip


@each(REFUSED)
def test_what_is_refused(call, error, words):
    refuses(call, error, words)


# -- random permutations -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 6))
def test_the_assignment_is_the_best_of_all(n):
    for seed in range(12):
        x = scores(n, n, seed=seed)
        x = np.round(x) if seed % 2 else x
        best = max(sum(x[i, j] for i, j in enumerate(order)) for order in itertools.permutations(range(n)))
        a = assignment(x)
        assert a.sum(0).tolist() == a.sum(1).tolist() == [1.0] * n
        assert (a * x).sum() == pytest.approx(best)


def test_an_assignment_leaves_out_what_is_masked():
    x = np.array([[1.0, -np.inf, 5.0], [-np.inf] * 3, [-np.inf, -np.inf, 6.0]])
    np.testing.assert_array_equal(assignment(x), [[1, 0, 0], [0, 0, 0], [0, 0, 1]])
    x[0, 1] = np.nan
    assert np.isnan(assignment(x)).all()


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("axes", [(-2, -1), (0, 1)], ids=str)
def test_hard_samples_are_permutations_with_the_relaxed_gradient(framework, axes):
    x = scores(6, 6, 6, dtype=np.float32)
    if framework == "jax":
        jax = pytest.importorskip("jax")
        p = jax.jit(lambda v: gumbel_sinkhorn(v, 0.5, hard=True, generator=jax.random.key(1), axes=axes))(x)
        soft = gumbel_sinkhorn(jax.numpy.asarray(x), 0.5, generator=jax.random.key(1), axes=axes)
        assert soft.shape == x.shape
    elif framework == "torch":
        leaves = [torch.from_numpy(x).requires_grad_() for _ in range(2)]
        p, soft = (gumbel_sinkhorn(v, 0.5, hard=h, generator=1, axes=axes) for v, h in zip(leaves, (True, False)))
        weights = torch.from_numpy(scores(6, 6, 6, seed=1, dtype=np.float32))
        for out in (p, soft):
            (out * weights).sum().backward()
        torch.testing.assert_close(*(v.grad for v in leaves))
        p = p.detach()
    else:
        p = gumbel_sinkhorn(x, 0.5, hard=True, generator=1, axes=axes)
    p = np.asarray(p)
    assert set(np.unique(p)) == {0.0, 1.0}
    assert (p.sum(axes[0]) == 1).all()
    assert (p.sum(axes[1]) == 1).all()


@pytest.mark.usefixtures("_by")
def test_no_warning_where_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sinkhorn(None)(np.where(np.eye(4) > 0, 0.0, -np.inf))
        Sinkhorn()(np.zeros((3, 3)), mask=np.zeros((3, 3), bool))


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("iterations", [5, None])
def test_totals_may_differ_by_the_rounding_of_fp32(iterations):
    rows, columns = (a.astype(np.float32) / a.astype(np.float32).sum() for a in sums(5, 6, seed=1))
    rows, columns = rows.astype(np.float64), columns.astype(np.float64) * (1 + 3e-7)
    p = Sinkhorn(iterations)(scores(5, 6), rows=rows, columns=columns)
    np.testing.assert_allclose(p.sum(-2), columns, rtol=1e-6)
    with pytest.raises(ValueError, match="the rows must have the same total as the columns"):
        Sinkhorn(iterations)(scores(5, 6), rows=rows, columns=columns * (1 + 1e-5))


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_constant_sums_in_a_program_of_jax(name):
    """Their values can be read while the scores are traced: wrong ones are an error there, too."""
    jax = pytest.importorskip("jax")
    x, a = jax.numpy.asarray(scores(3, 3)), jax.numpy.asarray([1.0, 0.5, 1.5])
    given = {"rows": a, "columns": a}
    np.testing.assert_allclose(jax.jit(lambda x: Sinkhorn()(x, **given))(x), Sinkhorn()(x, **given), rtol=1e-5)
    given[name] = -a
    with pytest.raises(ValueError, match=f"{name} must be at least 0 and finite"):
        jax.jit(lambda x: Sinkhorn()(x, **given))(x)


@pytest.mark.whole
def test_the_limit_is_one_program_of_jax_for_each_shape():
    jax = pytest.importorskip("jax")
    from anymax.transport import jax_sinkhorn

    x = jax.numpy.asarray(scores(3, 3))
    want = Sinkhorn(None)(np.asarray(x))
    np.testing.assert_allclose(Sinkhorn(None)(x), want, atol=1e-5)
    compiled = jax_sinkhorn._converged._cache_size(), jax_sinkhorn._differentiable._cache_size()
    np.testing.assert_allclose(Sinkhorn(None)(x + 1.0), want, atol=1e-5)
    assert (jax_sinkhorn._converged._cache_size(), jax_sinkhorn._differentiable._cache_size()) == compiled
