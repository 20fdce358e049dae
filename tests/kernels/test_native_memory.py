"""The ways into the compiled engine: which arrays it takes, results in place and in pages of their own."""

from __future__ import annotations

import ctypes
import itertools
import sys

import numpy as np
import pytest
from abi import Call, View
from native_cases import DTYPES, ENGINE, FEW
from row_cases import torch

import anymax as am
from anymax import kernels
from anymax._array import memory
from anymax.kernels import arrays, callbacks, link, native


def test_out_is_written_without_a_copy(monkeypatch):
    x = torch.randn(300, 50)
    monkeypatch.setattr(torch.Tensor, "copy_", None)  # a copy would fail
    for out in (torch.empty(300, 50), torch.empty(50, 300).T, torch.empty(300, 100)[:, ::2]):
        assert am.sparsemax(x, out=out) is out
        torch.testing.assert_close(out, am.sparsemax(x), rtol=0, atol=1e-6)
    want = am.softmax(x)
    assert am.softmax(x, out=x) is x  # in place
    torch.testing.assert_close(x, want)
    monkeypatch.undo()
    base = torch.randn(301, 50)
    want = am.softmax(base[1:])
    assert torch.equal(am.softmax(base[1:], out=base[:-1]), want)  # overlapping: through a copy
    a = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    out = np.empty_like(a)
    assert am.entmax15(a, out=out) is out
    assert np.array_equal(out, am.entmax15(a))


@pytest.mark.parametrize("shared", ["view", "from_numpy", "from_dlpack", "frombuffer"])
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("call", [am.softmax, am.sparsemax, am.sigsoftmax])
def test_out_that_overlaps_the_scores_by_address(shared, axis, call):
    base = np.random.default_rng(0).normal(size=(65, 300)).astype(np.float32)
    whole = torch.from_numpy(base)
    make = {
        "view": lambda a: torch.as_strided(
            whole, a.shape, [s // 4 for s in a.strides], (a.ctypes.data - base.ctypes.data) // 4
        ),
        "from_numpy": torch.from_numpy,
        "from_dlpack": torch.from_dlpack,
        "frombuffer": lambda a: torch.as_strided(
            torch.frombuffer(memoryview(base).cast("B")[a.ctypes.data - base.ctypes.data :], dtype=torch.float32),
            a.shape, [s // 4 for s in a.strides],
        ),
    }[shared]  # fmt: skip
    for there, here in (
        (np.s_[1:], np.s_[:-1]),
        (np.s_[:-1, 1:], np.s_[1:, 1:]),
        (np.s_[:, 1:], np.s_[:, :-1]),
        (..., ...),
    ):
        base[...] = np.random.default_rng(1).normal(size=base.shape)
        x, out = make(base[there]), make(base[here])
        want = call(x.clone(), axis=axis)
        assert torch.equal(call(x, axis=axis, out=out), want)


def test_out_that_overlaps_the_mask_or_a_parameter():
    memory = np.zeros(64 * 512 * 4, np.uint8)
    x = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
    for where in (np.s_[: 64 * 512], np.s_[-64 * 512 :]):
        keep = memory[where].view(bool).reshape(64, 512)
        keep[...] = np.random.default_rng(1).random((64, 512)) < 0.5
        want = am.sparsemax(x, mask=keep.copy())
        np.testing.assert_array_equal(am.sparsemax(x, mask=keep, out=memory.view(np.float32).reshape(64, 512)), want)
    alpha = memory[1024 : 1024 + 64 * 8].view(np.float64).reshape(64, 1)
    alpha[...] = np.linspace(1.1, 1.9, 64)[:, None]
    want = am.entmax(x, alpha.copy())
    np.testing.assert_array_equal(am.entmax(x, alpha, out=memory.view(np.float32).reshape(64, 512)), want)


@pytest.mark.parametrize("mapping", [am.Softmax(), am.Sparsemax(), am.Entmax(1.5), am.SparseSoftmax(k=2)], ids=repr)
def test_the_short_way_is_the_long_way(mapping):
    for shape in ((10,), (1, 10), (3, 4, 50), (2, 3000)):
        x = torch.randn(shape)
        want = ENGINE.forward(mapping, x)
        assert torch.equal(am.apply(mapping, x), want)
        assert np.array_equal(am.apply(mapping, x.numpy()), want.numpy())
        free = x.clone().requires_grad_()
        p, g = am.apply(mapping, free), torch.randn(shape)
        assert torch.equal(p.detach(), want)
        (got,) = torch.autograd.grad(p, free, g)
        torch.testing.assert_close(got, kernels.reference.ENGINE.vjp(mapping, x, want, g), rtol=1e-5, atol=1e-6)


def traced(how):
    """softmax and sparsemax as make_fx or torch.jit trace them, of other numbers."""

    def check(x):
        for f in (lambda t: am.softmax(t), lambda t: am.sparsemax(t)):
            torch.testing.assert_close(how(f, x)(2 * x), f(2 * x), rtol=0, atol=1e-6)

    return check


def by_make_fx(f, x, **options):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(f, **options)(x)


def vmapped(x):
    torch.testing.assert_close(torch.vmap(am.sparsemax)(x), am.sparsemax(x))
    w, each = torch.randn(3, 5, requires_grad=True), x[:, None, None]
    torch.testing.assert_close(torch.vmap(lambda a: am.softmax(w) * a)(each), torch.softmax(w, -1) * each)
    torch.testing.assert_close(torch.func.grad(lambda a: (am.softmax(w) * a).sum())(x), torch.softmax(w, -1))
    jacobian = torch.autograd.functional.jacobian(am.sparsemax, x)
    torch.testing.assert_close(torch.func.grad(lambda t: am.sparsemax(t)[0, 0])(x), jacobian[0, 0])


def minus(x):
    """A lazy minus sign, of scores and of a gradient."""
    z = torch.complex(x, x).conj().imag
    torch.testing.assert_close(am.sparsemax(z), am.sparsemax(z.resolve_neg().clone()))
    torch.testing.assert_close(am.softmax(torch._neg_view(x)), torch.softmax(-x, -1))
    w = torch.randn(3, 5, requires_grad=True)
    (got,) = torch.autograd.grad(am.sparsemax(w), w, torch._neg_view(x))
    torch.testing.assert_close(got, torch.autograd.grad(am.sparsemax(w), w, -x)[0])


def shapes(x):
    assert am.sparsemax(torch.tensor(1.0).reshape(1)).tolist() == [1.0]
    for shape in ((), (0, 5), (5, 0)):
        assert am.sparsemax(torch.ones(shape)).shape == shape
    assert am.sparsemax(x.to(torch.int64)).dtype == torch.float32
    assert am.sparsemax(x.to("meta")).device.type == "meta"
    with torch._subclasses.FakeTensorMode() as mode:
        assert type(am.sparsemax(mode.from_tensor(x))) is not torch.Tensor


UNUSUAL = {
    "shapes and kinds": shapes,
    "vmap and func.grad": vmapped,
    "a lazy minus": minus,
    "make_fx": traced(by_make_fx),
    "make_fx before autograd": traced(lambda f, x: by_make_fx(f, x, pre_dispatch=True)),
    "torch.jit": traced(lambda f, x: torch.jit.trace(f, x, check_trace=False)),
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and people use it
@pytest.mark.parametrize("call", UNUSUAL)
def test_the_short_way_steps_aside(call):
    x = torch.randn(3, 5)
    am.softmax(x)  # from here on torch has a short way
    UNUSUAL[call](x)


@pytest.mark.parametrize("n", [5, 40, 300, 3000])
def test_operations_in_place_are_those_beside(n):
    """At the C ABI: a result may lie where one of its operands does."""
    lib = ctypes.CDLL(native.load().__file__)
    lib.anymax_run.argtypes = [ctypes.c_void_p]
    maps = {
        "softmax": 0.0, "sparsemax": 0.0, "entmax": 1.3, "budget": 2.0, "normmax": 2.0, "topk": 3.0, "topp": 0.7,
        "taylor": 4.0, "sigsoftmax": 0.0, "perturb_max": 1.0, "relu": 0.0, "softpick": 1e-8,
    }  # fmt: skip
    g = np.random.default_rng(n)
    scores, weights = g.normal(size=(2, 5, n)) * 2
    scores[1, : n // 2] = -np.inf
    index, served = g.integers(n // 2, n, size=5), 0
    ops = [
        ("forward", "x"),
        ("log_forward", "x"),
        ("index_loss_grad", "x"),
        *itertools.product(("vjp", "log_vjp"), "pg"),
    ]
    for (op, over), (name, param), dtype in itertools.product(ops, maps.items(), (np.float32, np.float64)):
        code = link.CODES[op]
        made = []
        for in_place in (False, True):
            call = Call(op=code, map=link.MAPS[name], dtype=arrays.DTYPES[np.dtype(dtype).name], param=param, nodes=32)
            call.outer, call.inner, call.n, call.pool = 5, 1, n, -1
            x = scores.astype(dtype)
            p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
            with np.errstate(divide="ignore"):
                p = np.log(p) if op == "log_vjp" else p
            operands = {"x": x, "p": p, "g": weights.astype(dtype), "out": np.zeros((5, n), dtype)}
            if in_place:
                operands["out"] = operands[over]
            for key, a in operands.items():
                setattr(call, key, View(a.ctypes.data, n, 0, 1))
            scale = np.ones(5, dtype)
            call.index, call.scale = index.ctypes.data, scale.ctypes.data
            made.append((lib.anymax_run(ctypes.byref(call)), operands["out"]))
        (refused, want), (also, got) = made
        assert refused == also
        if refused:
            continue
        np.testing.assert_array_equal(got, want, err_msg=f"{op} of {name} in {np.dtype(dtype).name}, over {over}")
        served += 1
    assert served == 2 * (12 + 4 + 8 + 2 * 12 + 2 * 4)


def unaligned(a):
    """The same numbers in memory of the same kind, at an odd address."""
    if isinstance(a, torch.Tensor):
        memory = bytearray(a.numel() * a.element_size() + 1)
        return torch.frombuffer(memory, dtype=a.dtype, offset=1).view(a.shape).copy_(a)
    out = np.ndarray(a.shape, a.dtype, bytearray(a.nbytes + 1), 1)
    out[...] = a
    return out


@pytest.mark.parametrize("exchange", [True, False])
def test_out_at_an_odd_address_that_bypasses_the_caches(exchange):
    """Vectors that are stored so must lie at addresses of their own size: to others the processor answers with a fault."""
    x, engine = torch.randn(8192, 1024), native.load()
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    engine.bind({"exchange": capsule if exchange else None})
    try:
        for mapping in (am.Softmax(), am.Sparsemax(), am.SparseSoftmax(k=3)):
            out = unaligned(x)
            assert am.apply(mapping, out, out=out) is out
            assert torch.equal(out, am.apply(mapping, x))
    finally:
        engine.bind({"exchange": capsule})


ODD = {
    "p": lambda a: am.sparsemax(a["x"]),
    "p along the first axis": lambda a: am.entmax15(a["x"], axis=0),
    "a parameter a row": lambda a: am.entmax(a["x"], a["alpha"]),
    "out": lambda a: am.softmax(a["x"], out=a["y"]),
    "log p": lambda a: am.log_softmax(a["x"]),
    "threshold": lambda a: am.threshold(am.Entmax(a["alpha"]), a["x"]).tau,
    "logsumexp": lambda a: am.logsumexp(a["x"]),
    "loss of indices": lambda a: am.entmax15_loss(a["x"], a["t"], reduction="none"),
    "loss of distributions": lambda a: am.sparsemax_loss(a["x"], a["y"]),
    "sample": lambda a: am.sample(am.Sparsemax(), a["x"], generator=0),
    "truncation": lambda a: am.topp(0.6)(a["x"]),
    "log p of classes": lambda a: am.log_prob(am.Softmax(), a["x"], a["t"]),
    "segments": lambda a: am.segment_apply(am.Entmax(a["alpha"][:3]), a["x"], index=a["order"]),
    "log p of segments": lambda a: am.segment_log_apply("softmax", a["x"], index=a["order"]),
    "threshold of segments": lambda a: am.segment_logsumexp(a["x"], lengths=a["lengths"]),
    "loss of segments": lambda a: am.segment_loss("sparsemax", a["flat"], a["first"], lengths=a["lengths"]),
    "linear attention": lambda a: am.linear_attention(a["x"], a["y"], a["x"]),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("verb", ODD)
def test_arrays_at_odd_addresses(verb, kind):
    g = np.random.default_rng(0)
    y = g.random((6, 10)).astype(np.float32)
    a = {
        "x": g.normal(size=(6, 10)).astype(np.float32), "y": y / y.sum(-1, keepdims=True), "t": g.integers(10, size=6),
        "alpha": np.linspace(1.2, 2.0, 6)[:, None], "order": np.array([2, 0, 1, 0, 2, 0]), "lengths": np.array([1, 3, 2]),
        "flat": g.normal(size=6).astype(np.float32), "first": np.array([0, 1, 4]),
    }  # fmt: skip
    if kind == "torch":
        a = {name: torch.from_numpy(value) for name, value in a.items()}
    odd = {name: unaligned(value) for name, value in a.items()}
    got, want = ODD[verb](odd), ODD[verb](a)
    for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_gradients_at_odd_addresses():
    x, g = torch.randn(6, 10), torch.randn(6, 10)
    t = torch.arange(6)
    verbs = (
        am.sparsemax,
        am.sigsoftmax,
        am.log_softmax,
        lambda x: am.entmax15_loss(x, t, reduction="none"),
        lambda x: am.cross_entropy(x, t),
        lambda x: am.segment_apply("entmax15", x, index=t % 3),
        lambda x: am.linear_attention(x, x, x),
    )
    for verb in verbs:
        made = []
        for scores, to in ((x, lambda a: a), (unaligned(x), unaligned)):
            scores = scores.requires_grad_()
            out = verb(scores)
            made.append(torch.autograd.grad(out, scores, to(g.reshape(-1)[: out.numel()].reshape(out.shape))))
        assert torch.equal(made[0][0], made[1][0])


def taken(x, out):
    """True where the engine serves, and then its result is that of the reference; False where it refuses and writes nothing."""
    said = native.load().forward(am.Sparsemax(), x, -1, None, out)
    if said is None:
        return False
    assert said is out
    with am.use("reference"):
        np.testing.assert_allclose(np.asarray(out), np.asarray(am.sparsemax(x)), atol=2e-3)
    return True


def test_the_engine_takes_plain_tensors_and_refuses_the_rest():
    x = torch.randn(4, 6)
    for dtype in (torch.float32, torch.float64, torch.float16):
        assert taken(x.to(dtype), torch.empty(4, 6, dtype=dtype))
    line = torch.full((30,), 7.0)
    for scores, place in (
        (x.clone(), x.clone()), (x[:2], torch.empty(2, 6)), (x[1], torch.empty(6)), (x[None, :, None], torch.empty(1, 4, 1, 6)),
        (x.reshape(6, 4).T, torch.empty(4, 6)), (x.expand(3, 4, 6)[:, 0], torch.empty(3, 6)), (x[:, :5], torch.empty(6, 5).T[:4]),
        (x, torch.empty(6, 4).T), (torch.empty(0, 6), torch.empty(0, 6)),
    ):  # fmt: skip
        if place.numel() and place.shape != scores.shape:
            place = torch.empty_like(scores)
        assert taken(scores, place)
    same = x.clone()
    want = am.sparsemax(same)
    assert native.load().forward(am.Sparsemax(), same, -1, None, same) is same
    assert torch.equal(same, want)
    line[:24] = torch.randn(24)
    scores, place = line[:24].reshape(4, 6), line[6:].reshape(4, 6)  # through a copy
    want = am.sparsemax(scores.clone())
    assert native.load().forward(am.Sparsemax(), scores, -1, None, place) is place
    assert torch.equal(place, want)
    out = torch.full((4, 6), 7.0)
    for scores, place in (
        (x.double(), out), (x[:2], out), (x.reshape(2, 12), out), (torch.tensor(1.0), torch.tensor(7.0)), (x, out[:1].expand(4, 6)),
        (x.int(), out.int()), (x.bool(), out.bool()), (x.cfloat(), out.cfloat()), (x.to_sparse(), out), (x.to("meta"), out),
        (x.numpy(), out), (None, out), (x, "out"), ("x", out), (torch._neg_view(x), out), (x[:, :0], out[:, :0]),
    ):  # fmt: skip
        assert not taken(scores, place)
    assert torch.equal(out, torch.full((4, 6), 7.0))
    kinds = []
    torch.func.vmap(lambda t: kinds.append(native.load().forward(am.Sparsemax(), t, -1, None, out[0])) or t)(x)
    assert kinds == [None]


def test_the_engine_takes_plain_arrays_and_refuses_the_rest():
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    for dtype in (np.float32, np.float64, np.float16):
        assert taken(x.astype(dtype), np.empty((4, 6), dtype))
    frozen, raw, out = x.copy(), np.zeros(101, np.uint8), np.full((4, 6), 7, np.float32)
    frozen.flags.writeable = False
    for scores, place in (
        (frozen, np.empty_like(x)), (raw[1:97].view(np.float32).reshape(4, 6), np.empty_like(x)),
        (x, raw[1:97].view(np.float32).reshape(4, 6)),
        (x.T, np.empty((6, 4), np.float32)), (x[:, ::-2], np.empty((4, 3), np.float32)),
        (np.empty((0, 6), np.float32), np.empty((0, 6), np.float32)),
    ):  # fmt: skip
        assert taken(scores, place)
    for scores, place in (
        (x, frozen), (x.astype(">f4"), out), (x, out.astype(np.float64)), (x.astype(int), out), (x.astype(object), out),
        (np.float32(1), out), (x.tolist(), out), (b"12345678", out), (x.astype(np.longdouble), out.astype(np.longdouble)),
    ):  # fmt: skip
        assert not taken(scores, place)
    assert (out == 7).all()


def test_the_engine_makes_its_result():
    engine, x = native.load(), torch.randn(4, 6)
    large = torch.randn(700, 300)
    for scores in (x, x.double(), x.bfloat16(), x[1], torch.nn.Parameter(x), large, large.bfloat16()):
        p = engine.forward(am.Sparsemax(), scores, -1, None, None)
        assert (type(p), p.dtype, p.requires_grad) == (torch.Tensor, scores.dtype, False)
        assert torch.equal(p, engine.forward(am.Sparsemax(), scores, -1, None, torch.empty_like(p)))
        fresh = torch.empty(1)
        assert sys.getrefcount(p) == sys.getrefcount(fresh)
        assert p.data_ptr() != scores.data_ptr()
    with torch.inference_mode():
        assert engine.forward(am.Sparsemax(), x, -1, None, None).is_inference()


def test_arrays_are_not_kept():
    import gc
    import weakref

    for make in (lambda: torch.randn(3, 4), lambda: np.zeros((3, 4))):
        x, out = make(), make()
        before = sys.getrefcount(out), sys.getrefcount(x)
        for place in (out, None, "none"):
            for _ in range(10):
                native.load().forward(am.Sparsemax(), x, -1, None, place)
                native.load().forward(am.Sparsemax(), x, 0, x > 0, place)
                native.load().forward_saving(am.Sparsemax(), x, -1, None, place, 2)
        assert (sys.getrefcount(out), sys.getrefcount(x)) == before
        seen = weakref.ref(out)
        del out
        gc.collect()
        assert seen() is None
        if isinstance(x, np.ndarray):
            x.resize((6, 4))  # no buffer is held


@pytest.mark.parametrize("axis", [None, 0])
def test_out_is_new_to_a_graph_that_saved_it(axis):
    w, saved, x = torch.randn(4, 7, requires_grad=True), torch.ones(4, 7), torch.randn(4, 7)
    y = (w * saved).sum()
    am.softmax(x, axis=axis, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        out = torch.empty(4, 7)
        assert am.softmax(x, axis=axis, out=out) is out


def test_scratch_is_where_the_scores_are():
    x = torch.randn(64, 300, requires_grad=True)
    want = torch.autograd.grad(am.sparsemax(x, axis=0).square().sum(), x)[0]
    torch.set_default_device("meta")
    try:
        got = torch.autograd.grad(am.sparsemax(x, axis=0).square().sum(), x)[0]
        loss = am.sparsemax_loss(x, torch.zeros(64, dtype=torch.int64, device="cpu"))
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, want)
    assert loss.device.type == "cpu"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [100, 3000])
def test_large_results_have_pages_of_their_own(kind, dtype, n, monkeypatch):
    if kind == "numpy" and dtype == "bfloat16":
        pytest.skip("NumPy has none")
    g = np.random.default_rng(0)
    x, y = (torch.tensor(g.normal(size=(5, n))).to(getattr(torch, dtype)) for _ in range(2))
    x[2] = -torch.inf
    x[3, 7] = torch.nan
    x, y = (x.numpy(), y.numpy()) if kind == "numpy" else (x, y)
    index, scale = torch.arange(5), torch.ones(5, dtype=torch.float64 if dtype == "float64" else torch.float32)
    index, scale = (index.numpy(), scale.numpy()) if kind == "numpy" else (index, scale)

    def results(mapping):
        p, saved = ENGINE.forward_saving(mapping, x)
        yield from (p, ENGINE.forward(mapping, x), ENGINE.vjp(mapping, x, p, y, saved), ENGINE.vjp(mapping, x, p, y))
        if ENGINE.refuse("index_loss", mapping, x) is None:
            yield ENGINE.index_loss_grad(mapping, x, index, scale, None)

    for mapping in (*FEW, am.SparseSoftmax(k=9), am.Budget(3), am.NormMax(), am.Entmax(3.0), am.Taylor(2)):
        want = [torch.as_tensor(a).double().numpy() for a in results(mapping)]
        for module, bound, size in ((native, "SMALLEST", 500), (callbacks, "LARGE", 1000), (memory, "LARGE", 1000)):
            monkeypatch.setattr(module, bound, size)
        native.load().bind({"smallest": 500})
        try:
            got = [torch.as_tensor(a).double().numpy() for a in results(mapping)]
        finally:
            native.load().bind({"smallest": memory.SMALLEST})
            monkeypatch.undo()
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_large_result_is_a_tensor_like_any_other():
    x = torch.randn(1100, 8192, requires_grad=True)
    p = am.sparsemax(x)
    p.backward(torch.ones_like(p) * torch.arange(8192))
    assert p.nbytes == x.grad.nbytes > callbacks.LARGE
    with am.use("reference"):
        part = x[::100].detach().requires_grad_()
        q = am.sparsemax(part)
        q.backward(torch.ones_like(q) * torch.arange(8192))
    torch.testing.assert_close(p[::100], q, rtol=0, atol=1e-6)
    torch.testing.assert_close(x.grad[::100], part.grad, rtol=1e-4, atol=2e-2)
    shared = p.detach()
    assert torch.equal(shared.share_memory_(), p)
    out = torch.full_like(x, 7.0).detach()
    assert am.sparsemax(x.detach(), out=out) is out
    assert torch.equal(out, p)
    assert am.sparsemax(x.detach().numpy()).sum() == pytest.approx(1100, rel=1e-5)


@pytest.mark.parametrize("n", [1001, 100_003, 1 << 20])
def test_each_number_of_a_result_that_bypasses_the_caches_is_written(n):
    """Rows that begin anywhere, in memory full of NaN."""
    count = (40 << 20) // (4 * n)
    x = torch.randn(count, n, generator=torch.Generator().manual_seed(0)) * 3
    x[1] = -torch.inf  # a row of zeros
    for mapping in (am.Softmax(), am.Sparsemax(), am.SparseSoftmax(k=2)):
        out = torch.full((count * n + 1,), torch.nan)[1:].view(count, n)
        am.apply(mapping, x, out=out)
        assert torch.equal(out[:3], am.apply(mapping, x[:3]))
        assert torch.equal(out[-3:], am.apply(mapping, x[-3:]))
        assert not bool(out.isnan().any())
