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
    path = engine.path()
    if path is None:
        pytest.skip("installed without the compiled library")
    library = ctypes.CDLL(str(path))
    library.anymax_run.argtypes = [ctypes.POINTER(Call)]
    library.anymax_saves.restype = ctypes.c_int64

    def run(op, name, param=0.0, shape=(1, 1, 1), dtype=F32, **operands):
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
        return library.anymax_run(ctypes.byref(call))

    return run


def scores(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("n", [10, 100, 1000])
@pytest.mark.parametrize(("name", "param"), [("softmax", 0.0), ("entmax", 1.5), ("normmax", 2.0), ("topk", 3.0)])
def test_gradients_of_rows_by_their_starts(run, name, param, n):
    shape = (3, 4, n)
    x, g, p = scores(*shape), scores(*shape, seed=1), np.empty(shape, np.float32)
    assert run("forward", name, param, shape, x=x, out=p) == 0
    want, got = np.empty(shape, np.float32), np.empty(shape, np.float32)
    assert run("vjp", name, param, shape, p=p, g=g, out=want) == 0
    assert run("vjp", name, param, shape, p=p, g=g, out=got, starts=np.arange(3) * 4 * n) == 0
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["sparsemax", "entmax", "topk"])
@pytest.mark.parametrize("n", [300, 1000, 5000])
def test_a_gradient_from_saved_supports_in_place(run, name, n):
    param, shape, most = {"entmax": 1.5, "topk": 7.0}.get(name, 0.0), (40, 1, n), n
    x, g, p = scores(*shape), scores(*shape, seed=1), np.empty(shape, np.float32)
    index, value, count = np.empty((40, most), np.int32), np.empty((40, most), np.float32), np.empty(40, np.int32)
    support = Support(index.ctypes.data, value.ctypes.data, count.ctypes.data, most)
    assert run("forward", name, param, shape, x=x, out=p, support=support) == 0
    assert (count > 0).all()
    want = np.empty(shape, np.float32)
    assert run("vjp", name, param, shape, p=p, g=g, out=want, support=support) == 0
    assert np.count_nonzero(want) > 40
    assert run("vjp", name, param, shape, p=p, g=g, out=g, support=support) == 0
    np.testing.assert_array_equal(g, want)


@pytest.mark.parametrize("op", ["forward", "log_forward", "threshold"])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("topk", 2.5),
        ("topk", 0.5),
        ("topp", 1.5),
        ("topp", -1.0),
        ("budget", -1.0),
        ("entmax", 0.0),
        ("perturb_max", 0.0),
        ("perturb_max", np.inf),
    ],
)
def test_a_wrong_parameter_of_a_row_makes_that_row_nan(run, op, name, wrong):
    if op == "log_forward" and name in link.WITHOUT_LOG:
        pytest.skip("it has no log p")
    n = 50
    params = np.array([1.0, wrong, 1.0])
    x, out, tau = scores(3, 1, n), np.empty((3, 1, n), np.float32), np.empty(3, np.float32)
    assert run(op, name, 1.0, (3, 1, n), x=x, out=out, tau=tau, params=params) == 0
    found = tau if op == "threshold" else out.sum(-1)[:, 0]
    assert np.isnan(found).tolist() == [False, True, False]


@pytest.mark.parametrize("n", [10, 40, 300, 3000])
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("entmax", (1.5, 1.3, 2.0, 1.0, 3.0)),
        ("topk", (3, 8, 1)),
        ("topp", (0.5, 0.9)),
        ("budget", (2.0, 3.5)),
        ("normmax", (2.0, 60.0)),
        ("perturb_max", (0.7, 2.0, 1e-3, 40.0)),
    ],
)
def test_rows_with_parameters_of_their_own_are_rows_of_those_parameters(run, name, params, n):
    """To the last bit, whether the next rows have the same parameter or not."""
    each = np.concatenate([np.repeat(params, 20), np.tile(params, 7)]).astype(np.float64)
    rows = len(each)
    x, g = scores(rows, 1, n), scores(rows, 1, n, seed=1)
    p, d = np.empty_like(x), np.empty_like(x)
    assert run("forward", name, 1.5, x.shape[:1] + (1, n), x=x, out=p, params=each) == 0
    assert run("vjp", name, 1.5, x.shape[:1] + (1, n), x=x, p=p, g=g, out=d, params=each) == 0
    for r in range(rows):
        alone, grad = np.empty((1, 1, n), np.float32), np.empty((1, 1, n), np.float32)
        assert run("forward", name, each[r], (1, 1, n), x=x[r : r + 1].copy(), out=alone) == 0
        one = {"p": p[r : r + 1].copy(), "g": g[r : r + 1].copy(), "x": x[r : r + 1].copy()}
        assert run("vjp", name, each[r], (1, 1, n), **one, out=grad) == 0
        np.testing.assert_array_equal(p[r], alone[0])
        np.testing.assert_array_equal(d[r], grad[0])


@pytest.mark.parametrize("noise", range(5))
def test_the_loss_of_perturb_max_has_its_threshold(run, noise):
    x, index = scores(6, 1, 30, dtype=np.float64), np.arange(6)
    x[2], x[3, 0, 3] = -np.inf, np.nan
    value, tau, want = np.empty(6), np.full(6, 99.0), np.empty(6)
    assert (
        run("index_loss", "perturb_max", 1.0, (6, 1, 30), F64, x=x, index=index, value=value, tau=tau, noise=noise) == 0
    )
    assert run("threshold", "perturb_max", 1.0, (6, 1, 30), F64, x=x, tau=want, noise=noise) == 0
    np.testing.assert_allclose(tau, want, rtol=1e-14)
    assert np.isnan(tau).tolist() == np.isnan(value).tolist() == [False, False, False, True, False, False]
    assert tau[2] == -np.inf
    assert value[2] == np.inf


@pytest.mark.parametrize("n", [1, 3, 8, 40, 128])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_log_softmax_of_few_classes(run, dtype, n):
    kind, rows = (np.float64, 37) if dtype == F64 else (np.float32, 37)
    x, g = 5 * scores(rows, 1, n, dtype=kind), scores(rows, 1, n, seed=1, dtype=kind)
    x[1, 0, 0], x[2, 0, 0], x[3] = np.nan, np.inf, -np.inf
    x[4, 0, : n // 2] = -np.inf
    got, grad = np.empty_like(x), np.empty_like(x)
    assert run("log_forward", "softmax", 0.0, (rows, 1, n), dtype, x=x, out=got) == 0
    assert run("log_vjp", "softmax", 0.0, (rows, 1, n), dtype, p=got, g=g, out=grad) == 0
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
    rows = 37
    x, g, p = scores(rows, 1, n), scores(rows, 1, n, seed=1), np.empty((rows, 1, n), np.float32)
    assert run("forward", name, param, (rows, 1, n), x=x, out=p) == 0
    want, got = np.empty_like(x), np.empty_like(x)
    assert run("vjp", name, param, (rows, 1, n), p=p, g=g, out=want) == 0
    operands = {"p": p, "g": g, "out": got}
    lying = np.ascontiguousarray(operands[spaced][:, 0].T)
    operands[spaced] = View(lying.ctypes.data, 1, 1, rows)
    assert run("vjp", name, param, (rows, 1, n), **operands) == 0
    np.testing.assert_array_equal(lying.T if spaced == "out" else got[:, 0], want[:, 0])


@pytest.mark.parametrize("n", [10, 40, 128, 300, 2000])
@pytest.mark.parametrize(
    ("name", "param"), [("sparsemax", 0.0), ("entmax", 1.5), ("entmax", 1.3), ("normmax", 2.0), ("topk", 3.0)]
)
def test_losses_and_thresholds_of_rows_in_any_layout(run, name, param, n):
    """Masked rows, spaced classes, the threshold wanted: the loss of the plain row in doubles."""
    g = np.random.default_rng(n)
    rows, index = 19, g.integers(0, n, 19)
    x = g.normal(size=(rows, n)).astype(np.float32)
    mask = g.random((rows, n)) < 0.9
    mask[np.arange(rows), index] = np.arange(rows) != 3  # one target is masked
    found = {}
    for dtype, spaced, masked in itertools.product((np.float64, np.float32), (False, True), (False, True)):
        kept = (x if masked else np.where(mask, x, -np.inf)).astype(dtype)
        kept = np.asfortranarray(kept) if spaced else kept
        value, tau = np.empty(rows, dtype), np.empty(rows, dtype)
        given = {
            "index": index,
            "value": value,
            "tau": tau,
            "x": View(kept.ctypes.data, *((1, 1, rows) if spaced else (n, 1, 1))),
        }
        if masked:
            given["mask"] = View(mask.ctypes.data, n, 1, 1)
        assert run("index_loss", name, param, (rows, 1, n), F64 if dtype == np.float64 else F32, **given) == 0
        found[dtype, spaced, masked] = value, tau
    want = found[np.float64, False, False]
    assert np.isinf(want[0][3])
    assert np.isfinite(np.delete(want[0], 3)).all()
    for (dtype, *_), got in found.items():
        near = {"rtol": 1e-6, "atol": 2e-6} if dtype == np.float32 else {"rtol": 1e-13, "atol": 1e-13}
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, **near)


def test_the_largest_take_one_k(run):
    """`params` of the rows was not checked, and more numbers were written than there is room for."""
    x, out, at, params = scores(1, 1, 50), np.zeros(60, np.float32), np.zeros(60, np.int64), np.array([40.0])
    call = {"x": x, "out": out.ctypes.data, "positions": at}
    call["out"] = View(out.ctypes.data, 1, 1, 1)
    assert run("largest", "topk", 1.0, (1, 1, 50), **call) == 0
    assert run("largest", "topk", 1.0, (1, 1, 50), params=params, **call) != 0
    assert np.count_nonzero(out) == 1


@pytest.mark.parametrize("name", ["relu", "perturb_max"])
def test_a_map_whose_gradient_needs_the_scores_does_without_its_support(run, name):
    shape, n = (6, 1, 40), 40
    x, g, p = scores(*shape), scores(*shape, seed=1), np.empty(shape, np.float32)
    assert run("forward", name, 1.0, shape, x=x, out=p) == 0
    index = np.tile(np.arange(n, dtype=np.int32), (6, 1))
    value, count = np.zeros((6, n), np.float32), np.full(6, 2, np.int32)
    support = Support(index.ctypes.data, value.ctypes.data, count.ctypes.data, n)
    got, want = np.empty(shape, np.float32), np.empty(shape, np.float32)
    assert run("vjp", name, 1.0, shape, x=x, p=p, g=g, out=want) == 0
    assert run("vjp", name, 1.0, shape, x=x, p=p, g=g, out=got, support=support) == 0
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "topk", "topp"])
def test_the_threshold_of_a_row_without_a_target_is_written(run, name):
    param = {"topk": 3.0, "topp": 0.7}.get(name, 0.0)
    x, index = scores(40, 1, 200), np.full(40, -1)
    value, tau = np.empty(40, np.float32), np.full(40, 99.0, np.float32)
    assert run("index_loss", name, param, (40, 1, 200), x=x, index=index, value=value, tau=tau) == 0
    assert not value.any()
    assert (tau != 99.0).all()
