"""The derivative by a map's parameter in the C++ engine: of p, times a gradient, and of a loss."""

from __future__ import annotations

from fractions import Fraction

import mpmath as mp
import numpy as np
import oracles
import pytest
from engine_state import by_threads
from segment_cases import COUNT, ENTRIES, PTR, SHUFFLED, SORTED, compiled, each_segment, scores

from anymax import Budget, Entmax, NormMax, Segments, Softmax, Sparsemax, SparseSoftmax
from anymax.kernels import link, native, ragged
from anymax.kernels.engine import SegmentsAlong
from anymax.kernels.link import LEFT_OUT

pytestmark = compiled

ENGINE = native.ENGINE
NAME = {Entmax: "alpha", NormMax: "alpha", Budget: "k"}
ORACLE = {Entmax: oracles.entmax, NormMax: oracles.normmax, Budget: oracles.budget}
ALPHAS = (1.0, 1.0001, 1.01, 1.25, 1.3, 1.5, 1.7, 2.0, 2.5, 4.0)
CASES = [
    *((Entmax, a) for a in (0.3, 0.9, *ALPHAS)), *((NormMax, a) for a in (1.05, 1.5, 2.0, 3.0)),
    *((Budget, k) for k in (0.5, 1.5, 3.3)),
]  # fmt: skip
FEW = [*((Entmax, a) for a in (1.0, 1.05, 1.3, 1.5, 2.0, 3.0)), (NormMax, 2.0), (Budget, 2.2)]
LENGTHS = [1, 2, 5, 31, 64, 200, 512, 5000]

ROWS = [
    [0.3],
    [0.7, 0.1],
    [2.0, 1.9, 0.3, -0.4, 1.1],
    [1.0, 1.0, 1.0, 0.4, 0.4, -3.0],  # ties
    [4.0, 0.0, -1.0, -30.0],  # nearly all on one class
]


def each(cases, name=None, values=()):
    """Of each map and parameter, and of each row or number of classes that is longer than its budget."""
    names = ("kind", "value") if name is None else ("kind", "value", name)
    size = lambda v: len(v) if isinstance(v, list) else v  # noqa: E731
    table = (
        [(*case, v) for case in cases for v in values if case[0] is not Budget or case[1] < size(v)] if name else cases
    )
    return pytest.mark.parametrize(names, table, ids=lambda v: getattr(v, "__name__", size(v)))


each_few = each(FEW)


def of_rows(kind, value, x):
    """The map with this parameter in each row: at alpha = 1, too, a link of entmax."""
    return kind(np.full((*x.shape[:-1], 1), value))


def normal(n, rows=9, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=(rows, n)).astype(dtype)


H = Fraction(1, 10**14)
EXACT = ((np.float64, 1e-10), (np.float32, 1e-5))


def exactly(kind, value, row):
    """p at 50 digits."""
    found = ORACLE[kind](Fraction(value))(np.asarray(row))
    return [mp.mpf(v.numerator) / v.denominator if isinstance(v, Fraction) else v for v in found]


def moved(kind, value, row):
    """dp/dparam of a row by central differences at 50 digits."""
    with mp.workdps(50):
        above, below = (exactly(kind, Fraction(value) + h, row) for h in (H, -H))
        return [(a - b) * (10**14) / 2 for a, b in zip(above, below, strict=True)]


@each(CASES, "row", ROWS)
def test_slope_is_the_derivative_of_p(kind, value, row):
    x, g = np.array([row]), normal(len(row), 1, seed=len(row))
    want = moved(kind, value, row)
    terms = [w * float(v) for w, v in zip(want, g[0], strict=True)]
    total, size, moves = float(mp.fsum(terms)), float(mp.fsum(map(abs, terms))), float(mp.fsum(map(abs, want)))
    for dtype, digits in EXACT:
        p = np.array([[float(v) for v in exactly(kind, value, row)]]).astype(dtype)
        exact = g.astype(dtype)
        got = ENGINE.slope(of_rows(kind, value, x), NAME[kind], x.astype(dtype), p, exact)
        assert (got.shape, got.dtype) == ((1, 1), dtype)
        # g is rounded, and so is p; where dp is 0 what is left is the rounding of sums
        lost = np.abs(g - exact).max() * moves + np.finfo(dtype).eps * np.abs(g).max() * (1.0 + 4.0 * moves)
        assert abs(float(got[0, 0]) - total) <= digits * size + lost


def loss_of(kind, value, row, target):
    """Omega*(x) - x_t at 50 digits."""
    with mp.workdps(50):
        exact = exactly(kind, value, row)
        x, a = [mp.mpf(v) for v in row], mp.mpf(Fraction(value).numerator) / Fraction(value).denominator
        inside = [p for p in exact if p > 0]
        if kind is NormMax:
            omega = mp.power(mp.fsum(p**a for p in inside), 1 / a) - 1
        elif kind is Budget:
            omega = mp.fsum(p * (p - 1) for p in inside) / 2
        else:
            omega = mp.fsum(p**a - p for p in inside) / (a * (a - 1))
        return mp.fsum(p * v for p, v in zip(exact, x, strict=True)) - omega - x[target]


@each(CASES, "row", ROWS)
def test_slope_of_a_loss(kind, value, row):
    x = np.array([row])
    with mp.workdps(50):
        above, below = (loss_of(kind, Fraction(value) + h, row, 0) for h in (H, -H))
        want = float((above - below) * 10**14 / 2)
    for dtype, digits in EXACT:
        made = ENGINE.index_loss(of_rows(kind, value, x), x.astype(dtype), np.array([0]), save=False, slope=True)
        assert (made.slope.shape, made.slope.dtype) == ((1,), dtype)
        assert abs(float(made.slope[0]) - want) <= digits * abs(want) + 8 * np.finfo(dtype).eps * len(row)


def differences(kind, value, x, f):
    """Central differences of the fp64 engine by the parameter, of fourth order."""
    h = 2e-5
    one, two = ([f(of_rows(kind, value + s * d, x)) for s in (1, -1)] for d in (h, 2 * h))
    return (8 * (one[0] - one[1]) - (two[0] - two[1])) / (12 * h)


@each(FEW, "n", LENGTHS)
def test_slopes_of_all_lengths_are_differences(kind, value, n):
    """By tile, batch, candidates and row, in doubles and in floats."""
    x, g, index = normal(n), normal(n, seed=1) + 3.0, np.random.default_rng(2).integers(0, n, 9)
    if kind is Budget:
        index = x.argmin(-1)  # of a smaller target the loss is above 0, where the engine ends it
    mapping, rows = of_rows(kind, value, x), np.arange(9)
    p = ENGINE.forward(mapping, x)
    got = ENGINE.slope(mapping, NAME[kind], x, p, g)[:, 0]
    want = differences(kind, value, x, lambda m: (g * ENGINE.forward(m, x)).sum(-1))
    near = 1e-4 if value == 2.0 else 1e-6  # near the edge of a support alpha = 2 bends
    np.testing.assert_allclose(got, want, rtol=near, atol=near)
    loss = ENGINE.index_loss(mapping, x, index, save=False, slope=True)
    np.testing.assert_array_equal(loss.value, ENGINE.index_loss(mapping, x, index, save=False).value)
    want = differences(kind, value, x, lambda m: ENGINE.index_loss(m, x, index, save=False).value)
    want = want + x[rows, index] if kind is Budget else want  # the engine's loss takes k x_t off
    np.testing.assert_allclose(loss.slope, want, rtol=1e-6, atol=1e-6)
    less = x.astype("float32")
    p, narrow = ENGINE.forward(mapping, less), g.astype("float32")
    got32 = ENGINE.slope(mapping, NAME[kind], less, p, narrow)[:, 0]
    got64 = ENGINE.slope(mapping, NAME[kind], x, p.astype("float64"), narrow.astype("float64"))[:, 0]
    np.testing.assert_allclose(got32, got64, rtol=1e-5, atol=1e-5)
    loss32 = ENGINE.index_loss(mapping, less, index, save=False, slope=True)
    loss64 = ENGINE.index_loss(mapping, less.astype("float64"), index, save=False, slope=True)
    np.testing.assert_allclose(loss32.slope, loss64.slope, rtol=1e-5, atol=2e-6)


@each_few
@pytest.mark.parametrize("n", [40, 700])
def test_a_row_alone_and_a_number_for_all(kind, value, n):
    """A number for all rows, one in each, and each row alone: the same bits."""
    x, g, index = (normal(n, 33, dtype="float32"), normal(n, 33, seed=1, dtype="float32"), np.arange(33))
    each = of_rows(kind, value, x)
    mixed = kind(np.where(np.arange(33)[:, None] % 2, value, value + 0.25))
    p, saved = ENGINE.forward_saving(each, x, capacity=n)
    got, loss = ENGINE.slope(each, NAME[kind], x, p, g), ENGINE.index_loss(each, x, index, save=False, slope=True)
    if value != 1.0:  # the number 1 is softmax, which has no parameter
        all_at_once = kind(value)
        np.testing.assert_array_equal(got, ENGINE.slope(all_at_once, NAME[kind], x, p, g))
        np.testing.assert_array_equal(loss.slope, ENGINE.index_loss(all_at_once, x, index, save=True, slope=True).slope)
    if saved is not None:
        np.testing.assert_allclose(got, ENGINE.slope(each, NAME[kind], x, p, g, saved), rtol=1e-5, atol=1e-6)
    q = ENGINE.forward(mixed, x)
    found, losses = ENGINE.slope(mixed, NAME[kind], x, q, g), ENGINE.index_loss(mixed, x, index, save=False, slope=True)
    for r in (0, 1, 17, 32):
        one = slice(r, r + 1)
        np.testing.assert_array_equal(
            got[one], ENGINE.slope(of_rows(kind, value, x[one]), NAME[kind], x[one], p[one], g[one])
        )
        alone = kind(np.array([[value if r % 2 else value + 0.25]]))
        np.testing.assert_array_equal(found[one], ENGINE.slope(alone, NAME[kind], x[one], q[one], g[one]))
        np.testing.assert_array_equal(
            losses.slope[one], ENGINE.index_loss(alone, x[one], index[one], save=False, slope=True).slope
        )


@each(FEW[1:])  # the number 1 is softmax
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_strides_and_halves(kind, value, dtype):
    n, mapping = 37, kind(value)
    p = ENGINE.forward(mapping, normal(n, 12, dtype=dtype))
    g = normal(n, 12, seed=1, dtype=dtype)
    want = ENGINE.slope(mapping, NAME[kind], p, p.astype("float64"), g.astype("float64"))
    got = ENGINE.slope(mapping, NAME[kind], p, p, g)
    assert got.dtype == ("float64" if dtype == "float64" else "float32")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    apart = np.zeros((12, 2 * n), dtype)
    apart[:, ::2] = p
    np.testing.assert_array_equal(ENGINE.slope(mapping, NAME[kind], p, apart[:, ::2], np.asfortranarray(g)), got)
    engine, known = native.engine_for(p), native.found_link(mapping)
    for axis, turned in ((0, (1, 0)), (1, (0, 2, 1))):
        shape = (12, n) if axis == 0 else (3, 4, n)
        q, h = (np.ascontiguousarray(np.transpose(a.reshape(shape), turned)) for a in (p, g))
        value_of = np.empty([s for i, s in enumerate(q.shape) if i != axis], got.dtype)
        assert engine.slope(known, None, q, h, axis, None, value_of)
        np.testing.assert_array_equal(value_of.ravel(), got[:, 0])
        for number in (np.empty((), "float32"), np.empty((), "float64")):  # the sum beside J^T g
            by_scores = engine.vjp(known, None, q, h, axis, None, number)
            np.testing.assert_array_equal(by_scores, engine.vjp(known, None, q, h, axis, None))
            np.testing.assert_allclose(number, value_of.sum(dtype="float64"), rtol=1e-6, atol=1e-6)
        for refused in (np.empty((), "float16"), np.empty(2, "float64"), np.empty(0, "float64")):
            assert engine.vjp(known, None, q, h, axis, None, refused) is None
    assert engine.vjp(native.found_link(Sparsemax()), None, p, g, -1, None, np.empty((), "float64")) is None
    each, one, index = np.empty(12, got.dtype), np.empty((), got.dtype), np.arange(12) - 1
    for reduction in (0, 1, 2):  # of a loss without its mean
        for slope in (each, one):
            value_of = np.empty(() if reduction else 12, got.dtype)
            assert engine.loss(known, p, index, value_of, -1, -1, reduction, False, slope)[0] == 11
        np.testing.assert_allclose(one, each.sum(dtype="float64"), rtol=1e-6, atol=1e-6)


@each_few
def test_poisoned_rows_and_rows_left_out(kind, value):
    x, g = normal(50, 6, dtype="float32"), normal(50, 6, seed=1, dtype="float32")
    clean = ENGINE.slope(of_rows(kind, value, x), NAME[kind], x, ENGINE.forward(of_rows(kind, value, x), x), g)
    x[1, 7], x[2] = np.nan, -np.inf
    mapping, index = of_rows(kind, value, x), np.array([3, 3, 3, -1, 3, 3])
    p = ENGINE.forward(mapping, x)
    g[p == 0] = np.nan  # nothing is asked of g there
    got = ENGINE.slope(mapping, NAME[kind], x, p, g)[:, 0]
    assert np.isnan(got[1])
    assert got[2] == 0.0
    np.testing.assert_array_equal(got[[0, 3, 4, 5]], clean[[0, 3, 4, 5], 0])
    slope = ENGINE.index_loss(mapping, x, index, save=False, slope=True).slope
    assert np.isnan(slope[1])
    assert (slope[2:4] == 0.0).all()
    assert np.isfinite(slope[[0, 4, 5]]).all()
    mean = ENGINE.index_loss(mapping, x, index, save=False, slope=True, reduction="mean")
    np.testing.assert_array_equal(mean.slope, slope)


def test_a_gradient_far_from_0_changes_nothing():
    """dp sums to 0: g and g + 1e6 have one slope, in floats but for the rounding of g itself."""
    x, g = normal(60, 5, dtype="float32"), np.round(normal(60, 5, seed=1) * 64) / 64
    for kind, value in FEW[:-1]:
        mapping = of_rows(kind, value, x)
        p = ENGINE.forward(mapping, x)
        a, b = (ENGINE.slope(mapping, NAME[kind], x, p, (g + far).astype("float32")) for far in (0.0, 65536.0))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@each_few
def test_threads_change_nothing(kind, value):
    x, g = normal(300, 700, dtype="float32"), normal(300, 700, seed=1, dtype="float32")
    mapping, index = of_rows(kind, value, x), np.zeros(700, np.int64)
    p = ENGINE.forward(mapping, x)

    def both():
        losses = ENGINE.index_loss(mapping, x, index, save=True, slope=True)
        return ENGINE.slope(mapping, NAME[kind], x, p, g), losses.slope

    made = by_threads((1, 4), both)
    for one, four in zip(*made, strict=True):
        np.testing.assert_array_equal(one, four)


@pytest.mark.parametrize("index", [SORTED, SHUFFLED], ids=["sorted", "shuffled"])
@pytest.mark.parametrize("heads", [(), (3,)], ids=["alone", "heads"])
@each_few
def test_slopes_of_segments(kind, value, heads, index):
    value = 1.0 if kind is Budget else value  # some segments have one entry
    x, g = scores(*heads), scores(*heads, seed=1)
    mapping = kind(np.full((*heads, COUNT), value))
    along = SegmentsAlong(Segments(PTR, np.argsort(index, kind="stable") if index is SHUFFLED else None, ENTRIES), 0)
    engine = ragged.NativeSegments(along)
    p, saved = engine.forward_saving(mapping, x)
    got = engine.slope(mapping, NAME[kind], x, p, g, saved)
    want = np.zeros((*heads, COUNT), np.float32)
    for s in range(COUNT):
        own = np.nonzero(index == s)[0]
        for head in np.ndindex(*heads):
            if len(own):
                q, h = (np.ascontiguousarray(a[(own, *head)])[None] for a in (p, g))
                want[(*head, s)] = ENGINE.slope(of_rows(kind, value, q), NAME[kind], q, q, h)[0, 0]
    assert got.shape == (*heads, COUNT)
    np.testing.assert_array_equal(got, want)
    place = np.zeros((*heads, COUNT), np.int64)
    place[..., [1, 6]] = LEFT_OUT  # those without an entry
    loss = engine.index_loss(mapping, x, place, save=False, slope=True)
    np.testing.assert_array_equal(loss.value, engine.index_loss(mapping, x, place, save=False).value)

    def of_row(row):
        made = ENGINE.index_loss(
            of_rows(kind, value, row[None]), row[None], np.zeros(1, np.int64), save=False, slope=True
        )
        return made.slope[0]

    np.testing.assert_array_equal(np.moveaxis(loss.slope, -1, 0), each_segment(x, index, of_row, 0.0))


def test_slopes_of_long_segments():
    """One among short ones is served where it lies, with all threads or with one."""
    lengths = np.array([3, 3000, 0, 5, 2500])
    ptr, total = np.concatenate([[0], np.cumsum(lengths)]), int(lengths.sum())
    x, g = normal(1, total, dtype="float32")[:, 0], normal(1, total, seed=1, dtype="float32")[:, 0]
    along, mapping = SegmentsAlong(Segments(ptr, None, total), 0), Entmax(np.array([1.3, 1.4, 1.5, 1.6, 2.5]))
    engine = ragged.NativeSegments(along)
    p = engine.forward(mapping, x)
    slope = engine.slope(mapping, "alpha", x, p, g)
    loss = engine.index_loss(mapping, x, np.array([0, 1, LEFT_OUT, 2, LEFT_OUT]), save=False, slope=True)
    for s, place in ((0, 0), (1, 1), (3, 2), (4, LEFT_OUT)):
        own, alone = slice(ptr[s], ptr[s + 1]), Entmax(np.array([[mapping.alpha[s]]]))
        q, h, y = (a[own][None] for a in (p, g, x))
        np.testing.assert_array_equal(slope[s], ENGINE.slope(alone, "alpha", y, q, h)[0, 0])
        made = ENGINE.index_loss(alone, y, np.array([place]), save=False, slope=True)
        np.testing.assert_array_equal(loss.slope[s], made.slope[0])
    assert slope[2] == loss.slope[2] == 0.0


def test_other_maps_and_parameters_are_refused():
    x = normal(20, 4)
    value = np.full((4, 1), 7.0)
    for mapping in (Softmax(), Sparsemax(), SparseSoftmax(k=2)):
        p = ENGINE.forward(mapping, x)
        assert native.engine_for(x).slope(native.found_link(mapping), None, p, x, -1, None, value) is None
        assert link.refuse_link("slope", native.found_link(mapping)) is not None
        assert ENGINE.index_loss(mapping, x, np.zeros(4, np.int64), save=False, slope=True).slope is None
        with pytest.raises(RuntimeError, match="does not have this operation"):
            native.engine_for(x).loss(
                native.found_link(mapping), x, np.zeros(4, np.int64), np.empty(4), -1, -1, 0, False, np.empty(4)
            )
    assert (value == 7.0).all()
