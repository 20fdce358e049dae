"""Any axis, any layout, any kind of array and dtype, any parameter: the same call, the same kind back, inputs untouched."""

import contextlib
import math
import warnings

import laws
import numpy as np
import pytest
from cases import BY_ID, each_case, each_first, few_of_jax, on
from kinds import KINDS, back, every_kind, jax_in_the_whole_battery, readonly
from refusals import each, refuses

import anymax as am

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
HALVES = [("numpy", "float16"), ("torch", "float16"), ("torch", "bfloat16"), ("jax", "bfloat16")]


def cast(kind, a, dtype):
    """An array of that kind and dtype."""
    if kind == "torch":
        return torch.tensor(np.asarray(a)).to(getattr(torch, dtype))
    if kind == "jax":
        return jax.numpy.asarray(np.asarray(a), dtype=dtype)
    return KINDS[kind](np.asarray(a).astype(dtype))


def wide(kind):
    return jax.enable_x64(True) if kind == "jax" else contextlib.nullcontext()


# of other kinds of arrays the short battery takes these to rows of several axes
SEVERAL = {"torch": ("entmax-1.5", "ranks-1"), "strict": ("sparsemax",), "jax": ("softmax",)}


@each_case
def test_axes(case):
    laws.axes(case.apply)


@pytest.mark.whole(lambda case, kind: kind != "numpy" and case.id not in SEVERAL[kind])
@each_first
@every_kind
def test_several_axes_are_one_row(case, kind):
    """`axis=(1, 3)` is the map of rows that hold both axes; masks broadcast, and reductions drop or keep the axes."""
    x = laws.scores(3, 2, 4, 5, seed=60) + 0.5
    keep = laws.scores(3, 1, 1, 5, seed=61) < 1.0
    keep[..., 0] = True
    rows = x.transpose(0, 2, 1, 3).reshape(3, 4, 10)
    kept = np.broadcast_to(keep, x.shape).transpose(0, 2, 1, 3).reshape(3, 4, 10)
    with wide(kind):
        make = KINDS[kind]
        turned = {"axis": (-1, 1)} if not case.mapping.facts.ordered else {"axis": (1, -1)}
        for axes in ({"axis": (1, 3)}, turned, {"dim": [1, -1]}):
            for mask, want in ((None, case.apply(rows)), (keep, case.apply(rows, mask=kept))):
                p = case.apply(make(x), mask=None if mask is None else make(mask), **axes)
                laws.close(back(p), want.reshape(3, 4, 2, 5).transpose(0, 2, 1, 3), 1e-12)
                logs = am.log_apply(case.mapping, make(x), mask=None if mask is None else make(mask), **axes)
                with np.errstate(divide="ignore"):
                    np.testing.assert_allclose(np.exp(back(logs)), back(p), atol=1e-12)
        if case.mapping.has_threshold:
            tau, size = am.threshold(case.mapping, rows)
            got = am.threshold(case.mapping, make(x), axis=(1, 3))
            laws.close(back(got.tau), tau, 1e-12)
            np.testing.assert_array_equal(back(got.support), size)
            held = am.threshold(case.mapping, make(x), axis=(1, 3), keepdims=True)
            laws.same(back(held.tau), back(got.tau)[:, None, :, None])
            laws.same(back(am.threshold(case.mapping, make(x), dim=(1, 3), keepdim=True).tau), back(held.tau))
            laws.same(
                back(am.threshold(case.mapping, make(x), dim=3, keepdim=True).tau)[..., 0],
                back(am.threshold(case.mapping, make(x)).tau),
            )


@every_kind
def test_logsumexp_over_several_axes(kind):
    special = pytest.importorskip("scipy.special")
    x = laws.scores(3, 2, 4, seed=62)
    keep = x > -0.5
    t = np.array([0.5, 1.0, 2.0])[:, None, None]
    with wide(kind):
        make = KINDS[kind]
        for axes in ((0, 2), (2, 1), (0, 1, 2)):
            for keepdims in (False, True):
                got = am.logsumexp(make(x), axis=axes, keepdims=keepdims)
                laws.close(back(got), special.logsumexp(x, axis=axes, keepdims=keepdims), 1e-14)
                laws.same(back(am.logsumexp(make(x), dim=axes, keepdim=keepdims)), back(got))
        laws.close(back(am.logsumexp(make(x), dim=1, keepdim=True)), special.logsumexp(x, axis=1, keepdims=True), 1e-14)
        laws.close(
            back(am.logsumexp(make(x), axis=(1, 2), mask=make(keep))), special.logsumexp(x, axis=(1, 2), b=keep), 1e-14
        )
        got = am.logsumexp(make(x), axis=(1, 2), temperature=make(t))
        laws.close(back(got), t[:, 0, 0] * special.logsumexp(x / t, axis=(1, 2)), 1e-14)


def test_several_axes_with_parameters_and_results():
    x = laws.scores(3, 2, 4, seed=63)
    alpha = np.array([1.2, 1.5, 1.9])[:, None, None]
    p = am.entmax(x, alpha, axis=(1, 2))
    for row, a, got in zip(x, (1.2, 1.5, 1.9), p, strict=True):
        laws.close(got, am.entmax(row.ravel(), a).reshape(2, 4), 1e-15)
    out = np.empty_like(x)
    assert am.sparsemax(x, axis=(0, 2), out=out) is out
    laws.same(out, am.sparsemax(x, axis=(0, 2)))
    free = torch.tensor(x, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: am.entmax15(v, dim=(0, 2)), free)
    laws.same(am.nn.Activation(am.Sparsemax(), dim=(1, 2))(torch.tensor(x)), am.sparsemax(x, axis=(1, 2)))
    laws.close(jax.jit(lambda v: am.softmax(v, axis=(0, 1)))(x).sum((0, 1)), np.ones(4), 1e-6)
    laws.close(
        torch.func.vmap(lambda v: am.sparsemax(v, dim=(0, 1)))(torch.tensor(x)), am.sparsemax(x, axis=(1, 2)), 1e-15
    )


@each_case
def test_views(case):
    laws.views(case.apply)


@each_case
def test_empty(case):
    laws.empty(case.apply)


@few_of_jax
@each_first
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "numpy"])
def test_the_same_on_every_kind(case, kind):
    """fp64 scores: the same kind and dtype out, the same numbers as NumPy's, along a middle axis too."""
    x = laws.scores(2, 7, 3, seed=50) + 0.5
    x[0, 2, 1] = -math.inf
    with wide(kind):
        given = KINDS[kind](x)
        p = am.apply(on(case.mapping, KINDS[kind]), given, axis=1)
        assert type(p) is type(given)
        assert p.dtype == given.dtype
        assert p.shape == given.shape
        laws.close(back(p), case.apply(x, axis=1), 1e-14)
        np.testing.assert_array_equal(back(given), x)


@few_of_jax
@each_first
@pytest.mark.parametrize(("kind", "dtype"), HALVES)
def test_halves_are_computed_in_fp32(case, kind, dtype):
    x = cast(kind, laws.scores(3, 63, sigma=2.0, seed=51) + 0.5, dtype)
    p = case.apply(x)
    assert p.dtype == x.dtype
    single = x.float() if kind == "torch" else x.astype("float32")
    expected = case.apply(single)
    expected = expected.to(x.dtype) if kind == "torch" else expected.astype(x.dtype)
    laws.same(*(back(a.float() if kind == "torch" else a.astype("float32")) for a in (p, expected)))


@every_kind
def test_integers_are_promoted(kind):
    for dtype in ("int32", "int64", "uint8"):
        if kind == "jax" and dtype == "int64":
            continue
        x = cast(kind, [[3, 1, 2], [0, 0, 5]], dtype)
        for name in ("sparsemax", "softmax", "entmax:alpha=1.25", "taylor"):
            p = am.apply(name, x)
            laws.close(back(p), am.apply(name, np.array([[3.0, 1, 2], [0, 0, 5]])), 1e-6)
            assert "float" in str(p.dtype)


@every_kind
@pytest.mark.parametrize(("dtype", "advice"), [("bool", "float32"), ("complex64", "real part")])
def test_other_dtypes_are_errors(kind, dtype, advice):
    with pytest.raises(TypeError, match=rf"scores.*{dtype}.*{advice}"):
        am.softmax(cast(kind, [1, 0], dtype))


@jax_in_the_whole_battery
@every_kind
@each_first
def test_rows_without_a_class(case, kind):
    """Maps and transforms of their kind give an empty array, as torch.softmax; one number of each row is that of a row all masked."""
    if case.mapping.least_classes > 1:
        with pytest.raises(ValueError, match="of 0; k must be at most"):
            am.apply(case.mapping, np.zeros((2, 0)))
        return
    for shape, axis, lead in (
        ((2, 0, 3), 1, (2, 3)),
        ((4, 0), -1, (4,)),
        ((0, 2), 0, (2,)),
        ((0,), None, ()),
        ((2, 0), (0, 1), ()),
    ):
        x = cast(kind, np.zeros(shape), "float32")
        keep = KINDS[kind](np.ones(shape, bool))
        for p in (
            am.apply(case.mapping, x, axis),
            am.log_apply(case.mapping, x, axis),
            am.apply(case.mapping, x, axis, mask=keep),
        ):
            assert type(p) is type(x)
            assert tuple(p.shape) == shape
            assert p.dtype == x.dtype
        if case.mapping.has_threshold:
            tau, size = am.threshold(case.mapping, x, axis)
            assert tuple(tau.shape) == tuple(size.shape) == lead
            assert not np.any(back(size))
            masked = am.threshold(case.mapping, cast(kind, np.full((1,), -math.inf), "float32")).tau
            assert np.all(back(tau) == back(masked))


@every_kind
def test_rows_without_a_class_in_other_verbs(kind):
    x = cast(kind, np.zeros((3, 0)), "float32")
    for high in (am.logsumexp(x), am.logsumexp(x, temperature=0.5), am.thresholds.mellowmax(x)):
        np.testing.assert_array_equal(back(high), [-math.inf] * 3)
    np.testing.assert_array_equal(back(am.entropy(x)), [0.0] * 3)
    assert am.jacobian("entmax15", x).shape == (3, 0, 0)
    assert am.support(x).shape == (3, 0)
    if kind == "strict":
        return
    seed = jax.random.key(0) if kind == "jax" else 0
    assert am.gumbel_softmax(x, hard=True, generator=seed).shape == (3, 0)
    for mapping in ("softmax", "sparsemax", am.Sink("softmax", 0.0), am.Taylor(2)):
        drawn = am.sample(mapping, x, generator=seed, transform=am.topk(2), return_log_prob=True)
        np.testing.assert_array_equal(back(drawn.index), [-1] * 3)
        if not isinstance(mapping, am.Sink):
            np.testing.assert_array_equal(back(drawn.log_prob), [-math.inf] * 3)
    np.testing.assert_array_equal(back(am.gumbel_max(x, generator=seed, num_samples=2)), [[-1] * 3] * 2)
    for draw in (am.gumbel_max, lambda x, **given: am.sample("softmax", x, **given)):
        with pytest.raises(ValueError, match="axis 1 of the scores is empty, so that invalid='argmax' has no class"):
            draw(x, generator=seed, invalid="argmax")
    if kind != "jax":
        ids, offsets = am.sample("softmax", x, generator=seed, return_support=True).support
        assert tuple(ids.shape) == (0,)
        assert back(offsets).tolist() == [0] * 4


def test_rows_without_a_class_have_gradients():
    x = torch.zeros(3, 0, requires_grad=True)
    for verb in (am.sparsemax, am.log_softmax, am.logsumexp, lambda x: am.softmax(x, dtype=torch.float64)):
        (g,) = torch.autograd.grad(verb(x).sum(), x, create_graph=True)
        assert g.shape == x.shape
        assert g.requires_grad
    out = torch.empty(3, 0)
    assert am.softmax(x.detach(), out=out) is out
    assert (
        torch.compile(am.softmax, backend="eager", fullgraph=True)(out).shape
        == torch.vmap(am.softmax)(out).shape
        == (3, 0)
    )
    assert (
        jax.jit(am.softmax)(jax.numpy.zeros((3, 0))).shape
        == jax.vmap(am.softmax)(jax.numpy.zeros((3, 0))).shape
        == (3, 0)
    )


@every_kind
def test_a_number_is_one_class(kind):
    """As in torch.softmax and SciPy."""
    x = KINDS[kind](np.float32(3.0))
    assert back(am.softmax(x)) == back(am.sparsemax(x, 0)) == back(am.softmax(x, mask=KINDS[kind](np.True_))) == 1.0
    assert back(am.log_softmax(x)) == 0.0
    assert back(am.logsumexp(x)) == 3.0
    assert am.softmax(x).shape == ()
    with pytest.raises(ValueError, match="axis 1 is out of range for scores with 1 dimension"):
        am.softmax(x, axis=1)


@each_first
def test_lists(case):
    x = [[0.5, 2.0, 1.0], [3.0, 0.1, 0.2]]
    p = case.apply(x)
    assert isinstance(p, np.ndarray)
    assert p.dtype == np.float64
    laws.same(p, case.apply(np.array(x)))


@pytest.mark.whole(lambda case: case.id not in ("sparsemax", "taylor-2"))
@each_first
def test_rows_of_a_million(case):
    x = laws.scores(1_000_000, seed=52, dtype=np.float32)
    p = case.apply(x)
    low, high = case.sums(x.size)
    assert low - 2e-7 * low <= float(p.astype(np.float64).sum()) <= high + 2e-7 * high
    assert (p >= 0).all()


ONES, ROWS, NONE = np.zeros((3, 2, 4)), np.zeros((2, 3)), np.zeros((2, 0))
WRONG = {
    **{
        f"axes {axes}": (lambda axes=axes: am.softmax(ONES, axis=axes), ValueError, "one axis or more, each of them once")
        for axes in ((), (1, 1), (1, -2))
    },
    "axes beyond": (lambda: am.softmax(ONES, axis=(0, 3)), ValueError, "axis 3 is out of range"),
    "mask of axes": (
        lambda: am.softmax(ONES, axis=(0, 1), mask=np.ones(5, bool)),
        ValueError, r"mask of shape \(5,\) does not broadcast to scores of shape \(3, 2, 4\)",
    ),
    "mask of floats": (lambda: am.softmax(ROWS, mask=np.ones(3)), TypeError, r"mask: expected a boolean array, True = keep, got float64"),
    "mask of four": (lambda: am.softmax(ROWS, mask=np.ones(4, bool)), ValueError, r"mask of shape \(4,\) does not broadcast"),
    "a number": (lambda: am.threshold("softmax", 3.0), ValueError, "at least one dimension"),
    "no classes of a loss": (lambda: am.cross_entropy(NONE, np.zeros(2, int)), ValueError, r"no classes along axis 1"),
    "no classes of log p": (lambda: am.log_prob("softmax", NONE, np.zeros(2, int)), ValueError, r"no classes along axis 1"),
    "no classes of the best": (lambda: am.sampling.top("softmax", NONE, 1), ValueError, r"no classes along axis 1"),
    "axis beyond": (lambda: am.softmax(ROWS, axis=2), ValueError, r"axis 2 is out of range.*use -2 to 1"),
    **{
        f"axis {axis!r}": (lambda axis=axis: am.softmax(ROWS, axis=axis), TypeError, "axis: expected an integer")
        for axis in (True, 1.0, "0")
    },
    "axis and dim": (lambda: am.softmax(ROWS, axis=0, dim=1), TypeError, "two names of one argument"),
    "class of a map": (lambda: am.apply(am.Softmax, np.zeros(3)), TypeError, "expected a mapping such as"),
}  # fmt: skip


@each(WRONG)
def test_what_is_refused(call, error, words):
    refuses(call, error, words)


# -- masks -----------------------------------------------------------------------------------------------------------------


@every_kind
def test_mask_is_minus_infinity(kind):
    x = laws.scores(2, 3, 5, seed=53).astype(np.float32)
    for mask in (np.array([True, False, True, True, False]), np.random.default_rng(0).random((3, 5)) < 0.6):
        p = am.entmax15(KINDS[kind](x), mask=KINDS[kind](mask))
        laws.same(back(p), back(am.entmax15(KINDS[kind](np.where(mask, x, np.float32(-np.inf))))))
    column = np.array([[True], [False], [True]])
    p = am.entmax15(KINDS[kind](x), axis=1, mask=KINDS[kind](column))
    assert (back(p)[:, 1] == 0).all()


# -- out= and dtype= ---------------------------------------------------------------------------------------------------------


@each_first
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_out(case, kind):
    x = KINDS[kind](laws.scores(3, 5, seed=54) + 0.5)
    expected = back(case.apply(x, axis=0))
    out = KINDS[kind](np.full((3, 5), np.nan))
    mapping = on(case.mapping, KINDS[kind])
    given = am.apply(mapping, x, axis=0, out=out) if case.mass <= 3 else None
    assert given is out
    laws.same(back(out), expected)
    big = KINDS[kind](np.full((6, 10), np.nan))
    am.apply(mapping, x, axis=0, out=big[::2, ::2])
    laws.same(back(big)[::2, ::2], expected)
    assert np.isnan(back(big)[1::2]).all()


def test_out_errors():
    x = np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"out: expected shape \(2, 3\) and float64"):
        am.softmax(x, out=np.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"out: expected shape \(2, 3\) and float64"):
        am.softmax(x, out=np.zeros((2, 3), np.float32))
    with pytest.raises(TypeError, match="out: expected a writable ndarray, got list"):
        am.softmax(x, out=[[0.0] * 3] * 2)
    with pytest.raises(TypeError, match="immutable; out= is for NumPy arrays and torch tensors"):
        am.softmax(jax.numpy.zeros((2, 3)), out=jax.numpy.zeros((2, 3)))
    with pytest.raises(ValueError, match="gradient"):
        am.softmax(torch.zeros(2, 3, requires_grad=True), out=torch.zeros(2, 3))


def test_dtype_casts_first():
    x = np.array([60000.0, 60001.0], np.float16)
    p = am.softmax(x, dtype=np.float64)
    assert p.dtype == np.float64
    laws.same(p, am.softmax(x.astype(np.float64)))


# -- parameters that are arrays ------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize(
    ("name", "make", "values"),
    [
        ("alpha", am.Entmax, [0.5, 1.0, 1.5, 2.0, 5.0]),
        ("alpha", am.NormMax, [1.2, 1.5, 2.0, 3.0, 4.0]),
        ("k", am.Budget, [1.0, 1.5, 2.0, 3.0, 0.5]),
    ],
    ids=["entmax", "normmax", "budget"],
)
def test_a_parameter_for_each_row(kind, name, make, values):
    """One value a row, broadcast against any axis, is what each row gives by itself."""
    x = laws.scores(5, 4, 7, seed=55)
    one_by_one = np.stack([am.apply(make(v), row) for v, row in zip(values, x)])
    values = np.array(values)
    with wide(kind):
        to = KINDS[kind]
        laws.close(back(am.apply(make(to(values[:, None, None])), to(x))), one_by_one, 2e-14)
        for axis in (0, 1) if kind != "jax" else (1,):
            y = np.moveaxis(x, 2, axis)  # the classes along `axis`, the values along another
            shape = [1, 1, 1]
            shape[1 if axis == 0 else 0] = 5
            p = am.apply(make(to(values.reshape(shape))), to(y), axis=axis)
            laws.close(back(p), np.moveaxis(one_by_one, 2, axis), 2e-14)
        laws.close(back(am.apply(make(to(values[2])), to(x))), am.apply(make(float(values[2])), x), 2e-14)


def test_parameter_errors():
    with pytest.raises(ValueError, match="varies along the classes"):
        am.entmax(np.zeros((2, 3)), np.array([1.1, 1.5, 2.0]))
    with pytest.raises(ValueError, match="does not broadcast"):
        am.entmax(np.zeros((2, 3)), np.ones((4, 1)))
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="alpha"):
            am.Entmax(bad)
    for bad in ("1", None, True, [1.5]):
        with pytest.raises(TypeError, match="alpha"):
            am.Entmax(bad)
    with pytest.raises(ValueError, match="every entry"):
        am.Entmax(np.array([1.5, -1.0]))
    with pytest.raises(ValueError, match="NormMax"):
        am.NormMax(1.0)
    with pytest.raises(ValueError, match=r"order=3.*use 2 or 4"):
        am.Taylor(3)
    with pytest.raises(TypeError, match="exactly one"):
        am.SparseSoftmax()
    with pytest.raises(ValueError, match="a whole number from 1 on"):
        am.SparseSoftmax(k=0)


def test_no_warning_where_there_is_nothing_to_warn_of():
    x = np.array([[1e308, -1e308, np.nan], [-np.inf, np.inf, 0], [-np.inf] * 3, [1, 2, 3]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in BY_ID.values():
            case.apply(x)


# -- arrays as they come from files and tables -----------------------------------------------------------------------------


def test_the_other_byte_order():
    """FITS, HDF5 and old binary files hold the other one."""
    x = laws.scores(3, 4, seed=70, dtype=np.float32)
    for swapped in (">", "<"):
        y = x.astype(f"{swapped}f4")
        for f in (
            am.softmax,
            am.entmax15,
            am.log_softmax,
            am.logsumexp,
            am.perturb_max,
            lambda x: am.jacobian(am.Sparsemax(), x),
        ):
            p = f(y)
            assert p.dtype == np.float32
            assert p.dtype.isnative
            laws.same(p, f(x))
        t = np.array([0, 3, 1])
        laws.same(am.sparsemax_loss(y, t.astype(f"{swapped}i8")), am.sparsemax_loss(x, t))
        alpha = np.array([[1.2], [1.5], [1.9]])
        laws.same(am.entmax(y, alpha.astype(f"{swapped}f8")), am.entmax(x, alpha))
        for kind in ("torch", "jax"):
            scores = KINDS[kind](x)
            laws.close(am.nll(am.Softmax(), scores, t.astype(f"{swapped}i8")), am.nll(am.Softmax(), scores, t), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_targets_masks_and_parameters_that_are_views_or_read_only(kind):
    """torch warns of read-only arrays, and takes none with negative strides."""
    if kind == "strict":
        pytest.skip("it takes arrays of its own only")
    x, t, alpha, keep = (
        laws.scores(3, 4, seed=71),
        np.array([0, 3, 1]),
        np.array([[1.2], [1.5], [1.9]]),
        np.array([True, True, False, True]),
    )
    scores = KINDS[kind](x)
    calls = {
        "target": lambda v: am.sparsemax_loss(scores, v(t)),
        "margin": lambda v: am.margin_loss(am.Softmax(), 0.1 * scores, v(t)),
        "weight": lambda v: am.cross_entropy(scores, t, v(np.array([1.0, 2.0, 3.0, 4.0]))),
        "alpha": lambda v: am.entmax(scores, v(alpha)),
        "mask": lambda v: am.softmax(scores, mask=v(keep)),
        "prior": lambda v: am.prior(v(np.log([0.1, 0.2, 0.3, 0.4])))(scores),
    }
    for name, call in calls.items():
        want = back(call(np.array))
        for view in (readonly, lambda a: np.flip(np.flip(a).copy()), lambda a: np.broadcast_to(a, a.shape)):
            np.testing.assert_array_equal(back(call(view)), want, err_msg=name)


def test_columns_of_pandas():
    pandas = pytest.importorskip("pandas")
    x, t = laws.scores(3, 4, seed=72), np.array([0, 3, 1])
    table, column = pandas.DataFrame(x), pandas.Series(t)
    want = am.sparsemax_loss(x, t)
    laws.same(am.softmax(table), am.softmax(x))
    laws.same(am.softmax(table[0]), am.softmax(x[:, 0]))
    nullable = table.astype("Float64")
    laws.same(am.softmax(nullable[0]), am.softmax(x[:, 0]))
    with pytest.raises(
        TypeError,
        match=r"a DataFrame whose columns NumPy has no numbers for; if they hold numbers, pass its astype\(float\)",
    ):
        am.softmax(nullable)
    laws.same(am.softmax(nullable.astype(float)), am.softmax(x))
    laws.same(am.sparsemax_loss(table, column), want)
    laws.same(am.sparsemax_loss(x, column, pandas.Series(np.ones(4))), want)
    laws.close(am.sparsemax_loss(torch.tensor(x), column), want, 1e-14)
    laws.close(am.sparsemax_loss(jax.numpy.asarray(x), column), want, 1e-6)


def test_masked_arrays_are_not_read_as_if_they_had_no_mask():
    x = np.ma.masked_array(laws.scores(3, 4, seed=73), mask=np.eye(3, 4, dtype=bool))
    for call in (am.softmax, am.entropy, lambda x: am.gumbel_max(x, generator=0), lambda x: am.softmax(x, axis=(0, 1))):
        with pytest.raises(TypeError, match="masked array is not read; give its data, and mask="):
            call(x)
    with pytest.raises(TypeError, match="target: a masked array"):
        am.sparsemax_loss(x.data, np.ma.masked_array([0, 1, 2], mask=[True, False, False]))
    p = am.softmax(x.data, mask=~np.ma.getmaskarray(x))
    assert (p[x.mask] == 0).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_floats_of_8_bits_are_computed_in_single_precision_and_rounded_once(kind, dtype):
    module = pytest.importorskip(kind)
    narrow = getattr(pytest.importorskip("ml_dtypes"), dtype)
    rounded = np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32).astype(narrow)
    single = rounded.astype(np.float32)
    x = {
        "numpy": lambda: rounded,
        "torch": lambda: module.from_numpy(single).to(getattr(module, dtype)),
        "jax": lambda: module.numpy.asarray(single).astype(dtype),
    }[kind]()
    keep = np.arange(100) % 3 > 0
    for f in (
        am.sparsemax, am.entmax15, am.softmax, am.taylor_softmax, am.perturb_max, lambda x: am.budget(x, 3),
        lambda x: am.softmax(x, axis=0), lambda x: am.sparsemax(x, mask=keep), am.log_softmax,
        am.logsumexp, lambda x: am.threshold(am.Sparsemax(), x)[0],
    ):  # fmt: skip
        got = f(x)
        assert got.dtype == x.dtype
        got = got.float().numpy() if kind == "torch" else np.asarray(got).astype(np.float32)
        np.testing.assert_array_equal(got, np.asarray(f(single), np.float32).astype(narrow).astype(np.float32))
    kept = am.topk(3)(x)  # has -inf, which not all such dtypes have
    assert (back(kept) > -np.inf).sum() == 3 * 3
    loss = am.sparsemax_loss(x, KINDS[kind](np.array([1, 2, 3])))
    np.testing.assert_allclose(float(loss), am.sparsemax_loss(single, np.array([1, 2, 3])), rtol=1e-6)


@pytest.mark.parametrize("engine", ["reference", None], ids=str)
def test_a_parameter_of_another_dtype_leaves_that_of_the_scores(engine):
    x, alpha = laws.scores(5, seed=3).astype(np.float32), np.array([1.4])
    with am.use(engine) if engine else contextlib.nullcontext():
        p = am.entmax(x, alpha)
        assert p.dtype == np.float32
        assert am.entmax_loss(x, 2, alpha=alpha).dtype == np.float32
    np.testing.assert_allclose(p, am.entmax(x.astype(float), 1.4), atol=1e-6)


def test_0_times_an_infinity_is_0():
    from anymax._array.rows import dot

    a, b = np.array([[0.0, 1.0], [0.0, 2.0], [1.0, 1.0]]), np.array([[-np.inf, 3.0], [np.nan, 3.0], [np.inf, 1.0]])
    np.testing.assert_array_equal(dot(a, b, np), [[3.0], [6.0], [np.inf]])
