"""Calls of the C ABI that few or no callers make: rows by their starts, in place over a gradient, a parameter for each row."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from abi import Call, Support, View

from anymax.kernels import library as engine
from anymax.kernels import link

F32, F64 = 0, 1


@pytest.fixture(scope="module")
def run():
    """A call of these operands, which must be served, or with `code=True` what the library says of it."""
    path = engine.path()
    if path is None:
        pytest.skip("installed without the compiled library")
    library = ctypes.CDLL(str(path))
    library.anymax_run.argtypes = [ctypes.POINTER(Call)]
    library.anymax_saves.restype = ctypes.c_int64

    def run(op, name, param=0.0, shape=(1, 1, 1), dtype=F32, code=False, **operands):
        outer, inner, n = shape
        call = Call(
            op=link.CODES[op],
            map=link.MAPS[name],
            dtype=dtype,
            param=param,
            outer=outer,
            inner=inner,
            n=n,
            nodes=32,
            pool=-1,
        )
        for key, a in operands.items():
            if isinstance(a, np.ndarray):
                a = View(a.ctypes.data, inner * n, n, 1) if key in ("x", "p", "g", "out") else a.ctypes.data
            setattr(call, key, a)
        said = library.anymax_run(ctypes.byref(call))
        if code:
            return said
        assert said == 0
        return operands.get("out")

    return run


def scores(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def rows(run, name, param, *shape, **more):
    """Scores, a gradient, p, and memory for a result."""
    x, g = scores(*shape), scores(*shape, seed=1)
    return x, g, run("forward", name, param, shape, x=x, out=np.empty_like(x), **more), np.empty_like(x)


def saved(index, value, count):
    return Support(index.ctypes.data, value.ctypes.data, count.ctypes.data, index.shape[-1])


@pytest.mark.parametrize("n", [10, 100, 1000])
@pytest.mark.parametrize(("name", "param"), [("softmax", 0.0), ("entmax", 1.5), ("normmax", 2.0), ("topk", 3.0)])
def test_gradients_of_rows_by_their_starts(run, name, param, n):
    shape = (3, 4, n)
    _, g, p, got = rows(run, name, param, *shape)
    want = run("vjp", name, param, shape, p=p, g=g, out=np.empty_like(p))
    run("vjp", name, param, shape, p=p, g=g, out=got, starts=np.arange(3) * 4 * n)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["sparsemax", "entmax", "topk"])
@pytest.mark.parametrize("n", [300, 1000, 5000])
def test_a_gradient_from_saved_supports_in_place(run, name, n):
    param, shape = {"entmax": 1.5, "topk": 7.0}.get(name, 0.0), (40, 1, n)
    index, value, count = np.empty((40, n), np.int32), np.empty((40, n), np.float32), np.empty(40, np.int32)
    support = saved(index, value, count)
    _, g, p, want = rows(run, name, param, *shape, support=support)
    assert (count > 0).all()
    run("vjp", name, param, shape, p=p, g=g, out=want, support=support)
    assert np.count_nonzero(want) > 40
    run("vjp", name, param, shape, p=p, g=g, out=g, support=support)
    np.testing.assert_array_equal(g, want)


WRONG = {"topk": (2.5, 0.5), "topp": (1.5, -1.0), "budget": (-1.0,), "entmax": (0.0,), "perturb_max": (0.0, np.inf)}
OPS_OF_ROWS = [
    (op, name, value) for op in ("forward", "log_forward", "threshold") for name, values in WRONG.items() for value in values
    if op != "log_forward" or name not in link.WITHOUT_LOG
]  # fmt: skip


@pytest.mark.parametrize(("op", "name", "wrong"), OPS_OF_ROWS)
def test_a_wrong_parameter_of_a_row_makes_that_row_nan(run, op, name, wrong):
    n, params = 50, np.array([1.0, wrong, 1.0])
    out, tau = np.empty((3, 1, n), np.float32), np.empty(3, np.float32)
    run(op, name, 1.0, (3, 1, n), x=scores(3, 1, n), out=out, tau=tau, params=params)
    found = tau if op == "threshold" else out.sum(-1)[:, 0]
    assert np.isnan(found).tolist() == [False, True, False]


MIXED = {
    "entmax": (1.5, 1.3, 2.0, 1.0, 3.0), "topk": (3, 8, 1), "topp": (0.5, 0.9), "budget": (2.0, 3.5), "normmax": (2.0, 60.0),
    "perturb_max": (0.7, 2.0, 1e-3, 40.0),
}  # fmt: skip


@pytest.mark.parametrize("n", [10, 40, 300, 3000])
@pytest.mark.parametrize("name", MIXED)
def test_rows_with_parameters_of_their_own_are_rows_of_those_parameters(run, name, n):
    """To the last bit, whether the next rows have the same parameter or not."""
    each = np.concatenate([np.repeat(MIXED[name], 20), np.tile(MIXED[name], 7)]).astype(np.float64)
    x, g, p, d = rows(run, name, 1.5, len(each), 1, n, params=each)
    run("vjp", name, 1.5, x.shape, x=x, p=p, g=g, out=d, params=each)
    for r, param in enumerate(each):
        one = {key: a[r : r + 1].copy() for key, a in (("x", x), ("p", p), ("g", g))}
        alone = run("forward", name, param, (1, 1, n), x=one["x"], out=np.empty((1, 1, n), np.float32))
        grad = run("vjp", name, param, (1, 1, n), **one, out=np.empty((1, 1, n), np.float32))
        np.testing.assert_array_equal(p[r], alone[0])
        np.testing.assert_array_equal(d[r], grad[0])


@pytest.mark.parametrize("noise", range(5))
def test_the_loss_of_perturb_max_has_its_threshold(run, noise):
    x, index = scores(6, 1, 30, dtype=np.float64), np.arange(6)
    x[2], x[3, 0, 3] = -np.inf, np.nan
    value, tau, want = np.empty(6), np.full(6, 99.0), np.empty(6)
    given = {"shape": (6, 1, 30), "dtype": F64, "x": x, "noise": noise}
    run("index_loss", "perturb_max", 1.0, index=index, value=value, tau=tau, **given)
    run("threshold", "perturb_max", 1.0, tau=want, **given)
    np.testing.assert_allclose(tau, want, rtol=1e-14)
    assert np.isnan(tau).tolist() == np.isnan(value).tolist() == [False, False, False, True, False, False]
    assert tau[2] == -np.inf
    assert value[2] == np.inf


@pytest.mark.parametrize("n", [1, 3, 8, 40, 128])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_log_softmax_of_few_classes(run, dtype, n):
    kind, shape = np.float64 if dtype == F64 else np.float32, (37, 1, n)
    x, g = 5 * scores(*shape, dtype=kind), scores(*shape, seed=1, dtype=kind)
    x[1, 0, 0], x[2, 0, 0], x[3] = np.nan, np.inf, -np.inf
    x[4, 0, : n // 2] = -np.inf
    got = run("log_forward", "softmax", 0.0, shape, dtype, x=x, out=np.empty_like(x))
    grad = run("log_vjp", "softmax", 0.0, shape, dtype, p=got, g=g, out=np.empty_like(x))
    wide = x.astype(np.longdouble)
    with np.errstate(all="ignore"):
        top = wide.max(-1, keepdims=True)
        want = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
        want[1:3], want[3] = np.nan, -np.inf
        slope = np.where(want == -np.inf, 0, g - np.exp(want) * np.where(want == -np.inf, 0, g).sum(-1, keepdims=True))
    tolerance = {"rtol": 1e-6, "atol": 2e-6} if dtype == F32 else {"rtol": 1e-13, "atol": 1e-14}
    np.testing.assert_allclose(got, want.astype(kind), **tolerance)
    np.testing.assert_allclose(grad, slope.astype(kind), **tolerance)


@pytest.mark.parametrize("spaced", ["p", "g", "out"])
@pytest.mark.parametrize(("name", "param"), [("softmax", 0.0), ("entmax", 1.5), ("normmax", 2.0)])
@pytest.mark.parametrize("n", [7, 100, 300])
def test_gradients_of_operands_in_layouts_of_their_own(run, name, param, n, spaced):
    shape = (37, 1, n)
    _, g, p, got = rows(run, name, param, *shape)
    want = run("vjp", name, param, shape, p=p, g=g, out=np.empty_like(p))
    operands = {"p": p, "g": g, "out": got}
    lying = np.ascontiguousarray(operands[spaced][:, 0].T)
    operands[spaced] = View(lying.ctypes.data, 1, 1, 37)
    run("vjp", name, param, shape, **operands)
    np.testing.assert_array_equal(lying.T if spaced == "out" else got[:, 0], want[:, 0])


@pytest.mark.parametrize("n", [10, 40, 128, 300, 2000])
@pytest.mark.parametrize(
    ("name", "param"), [("sparsemax", 0.0), ("entmax", 1.5), ("entmax", 1.3), ("normmax", 2.0), ("topk", 3.0)]
)
def test_losses_and_thresholds_of_rows_in_any_layout(run, name, param, n):
    """Masked rows, spaced classes, the threshold wanted: the loss of the plain row in doubles."""
    g = np.random.default_rng(n)
    count, index = 19, g.integers(0, n, 19)
    x = g.normal(size=(count, n)).astype(np.float32)
    mask = g.random((count, n)) < 0.9
    mask[np.arange(count), index] = np.arange(count) != 3  # one target is masked
    found = {}
    for dtype, spaced, masked in itertools.product((np.float64, np.float32), (False, True), (False, True)):
        kept = (x if masked else np.where(mask, x, -np.inf)).astype(dtype)
        kept = np.asfortranarray(kept) if spaced else kept
        value, tau = np.empty(count, dtype), np.empty(count, dtype)
        given = {"x": View(kept.ctypes.data, *((1, 1, count) if spaced else (n, 1, 1)))}
        given |= {"mask": View(mask.ctypes.data, n, 1, 1)} if masked else {}
        code = F64 if dtype == np.float64 else F32
        run("index_loss", name, param, (count, 1, n), code, index=index, value=value, tau=tau, **given)
        found[dtype, spaced, masked] = value, tau
    want = found[np.float64, False, False]
    assert np.isinf(want[0][3])
    assert np.isfinite(np.delete(want[0], 3)).all()
    for (dtype, *_), got in found.items():
        near = {"rtol": 1e-6, "atol": 2e-6} if dtype == np.float32 else {"rtol": 1e-13, "atol": 1e-13}
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, **near)


def test_the_largest_take_one_k(run):
    """With `params` of the rows more numbers would be written than there is room for."""
    out, at, params = np.zeros(60, np.float32), np.zeros(60, np.int64), np.array([40.0])
    call = {"x": scores(1, 1, 50), "out": View(out.ctypes.data, 1, 1, 1), "positions": at}
    run("largest", "topk", 1.0, (1, 1, 50), **call)
    assert run("largest", "topk", 1.0, (1, 1, 50), code=True, params=params, **call) != 0
    assert np.count_nonzero(out) == 1


@pytest.mark.parametrize("name", ["relu", "softpick", "perturb_max"])
def test_a_map_whose_gradient_needs_the_scores_does_without_its_support(run, name):
    shape = (6, 1, 40)
    x, g, p, got = rows(run, name, 1.0, *shape)
    index = np.tile(np.arange(40, dtype=np.int32), (6, 1))
    value, count = np.zeros((6, 40), np.float32), np.full(6, 2, np.int32)
    want = run("vjp", name, 1.0, shape, x=x, p=p, g=g, out=np.empty_like(x))
    run("vjp", name, 1.0, shape, x=x, p=p, g=g, out=got, support=saved(index, value, count))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "topk", "topp"])
def test_the_threshold_of_a_row_without_a_target_is_written(run, name):
    param = {"topk": 3.0, "topp": 0.7}.get(name, 0.0)
    x, index = scores(40, 1, 200), np.full(40, -1)
    value, tau = np.empty(40, np.float32), np.full(40, 99.0, np.float32)
    run("index_loss", name, param, (40, 1, 200), x=x, index=index, value=value, tau=tau)
    assert not value.any()
    assert (tau != 99.0).all()
