"""The compiled engine against the reference: every map, dtype and layout; threads, forks, and what it refuses."""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
from abi import Call, View
from cases import CASES, each, on

import anymax as am
from anymax import functional, kernels
from anymax.kernels import _memory, arrays, link, native

if isinstance(native.load(), str):
    pytest.skip(f"no compiled library: {native.load()}", allow_module_level=True)

torch = pytest.importorskip("torch")
native.engine_for(torch.empty(0))  # the engine takes tensors in whichever test comes first

SERVED = tuple(c for c in CASES if not isinstance(link.link_of(c.mapping), str))
each_served = each(SERVED)
DTYPES = ("float32", "float64", "bfloat16", "float16")
SPARSE = tuple(c for c in SERVED if c.row in ("Sparsemax", "Entmax", "Budget", "NormMax", "SparseSoftmax"))


def tensor(a, dtype):
    return torch.as_tensor(np.asarray(a)).to(getattr(torch, dtype))


def rows(case, n, dtype, batch=(6,), sigma=2.0, seed=0):
    """Scores on a grid of 1/8, so that every dtype holds the same ones; no ties where the map breaks them by position."""
    rng = np.random.default_rng([seed, n])
    x = rng.normal(size=(*batch, n)) * sigma
    return tensor(np.round(x * 8) / 8, dtype)


def reference(f, *tensors):
    """The same call by the reference in fp64."""
    with am.use("reference"):
        return f(*(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors))


def bound(case, want, dtype):
    """What the reference itself is allowed, and one ulp more."""
    eps = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-8, "float16": 2.0**-10}[dtype]
    top = float(want.abs().max()) if want.numel() else 1.0
    if dtype in ("float32", "float64"):
        if case.tv is not None:
            return 2 * case.tv[dtype == "float64"] + eps * top
        return (1 + (case.ulps64 if dtype == "float64" else case.ulps)) * eps * top
    return eps * top + 4e-7


def mapped(case, dtype="float32"):
    """The case's mapping for torch; perturb-max with the nodes that this dtype gets, of which the reference in fp64 takes more."""
    mapping = on(case.mapping, torch.as_tensor)
    return mapping.replace(nodes=64 if dtype == "float64" else 32) if case.row == "PerturbMax" else mapping


# -- values ------------------------------------------------------------------------------------------------------------------


@pytest.mark.thin(4)
@each_served
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 5, 8, 17, 33, 128, 129, 1000, 2049, 5000])
def test_forward_is_the_references(case, dtype, n):
    if case.mass > n:
        pytest.skip("fewer classes than the budget")
    x = rows(case, n, dtype)
    got = native.ENGINE.forward(mapped(case, dtype), x)
    want = reference(lambda t: am.apply(mapped(case, dtype), t), x)
    assert got.dtype == x.dtype
    assert float((got.double() - want).abs().max()) <= bound(case, want, dtype)


@pytest.mark.thin(2)
@each_served
@pytest.mark.parametrize("sigma", [0.02, 8.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_forward_of_flat_and_of_peaked_rows(case, dtype, sigma):
    x = tensor(np.random.default_rng(1).normal(size=(3, 3000)) * sigma, dtype)
    got = native.ENGINE.forward(mapped(case, dtype), x)
    want = reference(lambda t: am.apply(mapped(case, dtype), t), x)
    assert float((got.double() - want).abs().max()) <= bound(case, want, dtype)


ALIKE = {
    "flat": lambda z: z * 0.02,
    "nearly flat": lambda z: z * 1e-4,
    "the same": lambda z: z * 0.0,
    "two kinds": lambda z: (z > 0).astype(float) * 0.1,
    "a ramp": lambda z: np.linspace(0.0, 0.1, z.size).reshape(z.shape),
    "one above a shelf": lambda z: z * 0.01 + (np.arange(z.shape[-1]) == 7),
}


@pytest.mark.thin(4)
@each(SPARSE)
@pytest.mark.parametrize("scores", ALIKE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [100, 1500, 20_000])
def test_many_classes_that_are_much_alike(case, dtype, scores, n):
    """What the maxima of parts of a row say of its threshold leaves nothing out."""
    x = tensor(ALIKE[scores](np.random.default_rng(n).normal(size=(2, n))), dtype)
    got = native.ENGINE.forward(mapped(case, dtype), x)
    want = reference(lambda t: am.apply(mapped(case, dtype), t), x)
    allowed = bound(case, want, dtype) if dtype == "float32" else 1e-14  # the reference is no more exact than that here
    assert float((got.double() - want).abs().max()) <= allowed
    if case.row in ("Entmax", "NormMax", "Sparsemax"):
        torch.testing.assert_close(got.double().sum(-1), torch.ones(2, dtype=torch.float64), atol=2e-6, rtol=0)


LAYOUTS = {
    "contiguous": lambda x: x,
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "padded": lambda x: torch.nn.functional.pad(x, (3, 4))[..., 3:-4],
    "every other class": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "classes first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "classes in the middle": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "outer axes swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "one row for all": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@each(
    tuple(c for c in SERVED if c.id in ("softmax", "entmax-1.5", "taylor-2", "sparse_softmax-k2", "perturb_max-normal"))
)
def test_layouts(case, dtype, layout):
    plain = rows(case, 40, dtype, batch=(3, 20))
    x = LAYOUTS[layout](plain)
    before = x.clone()
    want = native.ENGINE.forward(case.mapping, x.contiguous())
    got = native.ENGINE.forward(case.mapping, x)
    assert torch.equal(x, before)
    assert torch.equal(got, want) or float((got.double() - want.double()).abs().max()) <= bound(case, want, dtype)
    p, g = LAYOUTS[layout](want.clone()), LAYOUTS[layout](rows(case, 40, dtype, batch=(3, 20), seed=5))
    want = native.ENGINE.vjp(case.mapping, x.contiguous(), p.contiguous(), g.contiguous())
    got = native.ENGINE.vjp(case.mapping, x, p, g)
    torch.testing.assert_close(got, want, rtol=0, atol=4 * bound(case, want, dtype))


@pytest.mark.parametrize("axis", [0, 1, 2])
@each(tuple(c for c in SERVED if c.id in ("softmax", "sparsemax", "sparse_softmax-k2")))
def test_axes_of_numpy(case, axis):
    x = np.random.default_rng(2).normal(size=(5, 33, 7)).astype(np.float32)
    for view in (x, x[::-1, ::2], np.asfortranarray(x), x.transpose(2, 0, 1)):
        with am.use("reference"):
            want = am.apply(case.mapping, view.astype(np.float64), axis)
        view = view.copy() if view is x else view
        view.setflags(write=False)
        with am.use("native"):
            got = am.apply(case.mapping, view, axis)
        np.testing.assert_allclose(got, want, rtol=0, atol=6e-7)


@each_served
def test_masks_without_a_copy(case):
    x = rows(case, 50, "float32", batch=(4, 3))
    keep = torch.rand(3, 50, generator=torch.Generator().manual_seed(0)) > 0.4
    keep[1] = False
    keep[2, 10:] = True
    got = am.apply(mapped(case), x, mask=keep)
    want = reference(lambda t: am.apply(mapped(case), t, mask=keep), x)
    assert float((got.double() - want).abs().max()) <= bound(case, want, "float32")
    assert not bool(got[:, 1].any())
    assert not bool(got[~keep.expand_as(got)].any())


@pytest.mark.thin(3)
@each_served
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("n", [3, 8, 40, 300, 3000])
def test_backward_is_the_references(case, dtype, n):
    if case.mass > n:
        pytest.skip("fewer classes than the budget")
    x, g = rows(case, n, dtype, sigma=1.0), rows(case, n, dtype, seed=9)
    p = native.ENGINE.forward(mapped(case, dtype), x)
    got = native.ENGINE.vjp(mapped(case, dtype), x, p, g)
    want = reference(lambda *t: kernels.reference.ENGINE.vjp(mapped(case, dtype), *t), x, p, g)
    eps = {"float32": 3e-6, "float64": 1e-13, "bfloat16": 2e-2}[dtype]
    assert float((got.double() - want).abs().max()) <= eps * max(1.0, float(want.abs().max()))


@each(SPARSE)
@pytest.mark.parametrize("n", [256, 2000, 9000])
def test_backward_from_the_saved_support(case, n):
    x, g = rows(case, n, "float32", batch=(70,)), rows(case, n, "float32", batch=(70,), seed=3)
    p, saved = native.ENGINE.forward_saving(mapped(case), x, capacity=min(n, max(128, n // 32)))
    assert saved is not None
    count = (p > 0).sum(-1)
    kept = saved.count >= 0
    assert bool((saved.count[kept] == count[kept]).all())
    assert bool((count[~kept] > saved.index.shape[-1]).all())
    for r in range(0, 70, 23):
        if kept[r]:
            index = saved.index[r, : int(count[r])].long()
            assert torch.equal(p[r, index], saved.value[r, : int(count[r])])
    got, want = native.ENGINE.vjp(mapped(case), x, p, g, saved), native.ENGINE.vjp(mapped(case), x, p, g)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("n", [256, 512, 1000, 2048, 4096, 32000])
def test_what_is_saved_of_normal_scores_has_room(n):
    """Where there is none the forward has saved in vain: so a map with wider supports saves nothing."""
    x, some = torch.randn(100, n), 0
    for mapping in (
        *(
            am.Sparsemax(),
            am.Entmax(1.5),
            am.Entmax(4 / 3),
            am.Entmax(1.25),
            am.Entmax(1.2),
            am.Entmax(1.0),
            am.NormMax(),
        ),
        *(am.Budget(k) for k in (2, 10, 50)),
        *(am.SparseSoftmax(k=k) for k in (10, 50, 200)),
    ):
        p, saved = native.ENGINE.forward_saving(mapping, x)
        some += saved is not None
        if saved is not None:
            assert float(((p > 0).sum(-1) > saved.capacity).float().mean()) < 0.2, mapping
        assert native.ENGINE.forward_saving(mapping, x[:1, :256])[1] is None
    assert some >= 3


LOSSES = tuple(c for c in SERVED if c.mapping.facts.has_potential and c.mass == 1.0)


@pytest.mark.thin(3)
@each(LOSSES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("n", [2, 9, 70, 700, 4000])
def test_index_losses(case, dtype, n):
    count = 5 if case.row == "PerturbMax" and n > 70 else 9
    x = rows(case, n, dtype, batch=(count,)).requires_grad_()
    t = torch.arange(len(x)) % n
    t[4] = -100
    assert kernels.choose("index_loss", mapped(case), x) is native.ENGINE
    got = am.fenchel_young(mapped(case, dtype), x, t, reduction="none")
    got.sum().backward()
    y = x.detach().double().requires_grad_()
    with am.use("reference"):
        want = am.fenchel_young(mapped(case, dtype), y, t, reduction="none")
        want.sum().backward()
    got, want = got.detach(), want.detach()
    eps = {"float32": 1e-6, "float64": 1e-12, "float16": 2e-3}[dtype]
    if case.tv is not None:
        eps = max(eps, 20 * case.tv[dtype == "float64"])
    scale = max(1.0, float(want.max()))
    assert float((got.double() - want).abs().max()) <= eps * scale
    assert float((x.grad.double() - y.grad).abs().max()) <= eps
    assert float(got[4]) == 0.0
    assert not bool(x.grad[4].any())


@pytest.mark.parametrize("n", [3, 100, 3000])
@pytest.mark.parametrize(
    "case", [c for c in SERVED if c.row in ("Softmax", "Sigsoftmax", "SparseSoftmax")], ids=lambda c: c.id
)
def test_logarithms_and_their_backward(case, n):
    x = rows(case, n, "float64", sigma=1.0)
    x[0, 0] = -torch.inf
    got, want = native.ENGINE.log_forward(case.mapping, x), kernels.reference.ENGINE.log_forward(case.mapping, x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    g = rows(case, n, "float64", seed=4)
    free = x.clone().requires_grad_()
    with am.use("reference"):
        lp = am.log_apply(case.mapping, free)
        want = torch.autograd.grad(torch.where(torch.isfinite(lp), lp, 0.0), free, g)[0]
    got = native.ENGINE.log_vjp(
        case.mapping, x, native.ENGINE.log_forward(case.mapping, x), torch.where(torch.isfinite(lp), g, 0.0)
    )
    torch.testing.assert_close(got, torch.nan_to_num(want), rtol=1e-9, atol=1e-9)


@each(tuple(c for c in SERVED if c.mapping.has_threshold and c.row != "PerturbMax"))
def test_thresholds(case):
    x = rows(case, 60, "float64")
    got = native.ENGINE.threshold(mapped(case), x)
    with am.use("reference"):
        want = am.threshold(mapped(case), x, keepdims=True).tau
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (100, 100), (1000, 50), (5000, 4000), (40000, 10)])
def test_largest(dtype, n, k):
    x = rows(None, n, dtype, batch=(4,))
    value, index = native.ENGINE.largest(x, k)
    order = torch.argsort(x.double(), dim=-1, descending=True, stable=True)[:, :k]
    assert torch.equal(index, order)
    assert torch.equal(value, x.gather(-1, order))


def test_largest_of_masked_rows():
    x = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0], [-torch.inf] * 4])
    value, index = native.ENGINE.largest(x, 3)
    assert index.tolist() == [[3, 1, 0], [0, 1, 2]]
    assert value[0].tolist() == [2.0, 1.0, -torch.inf]


@each_served
def test_strange_rows_touch_no_other(case):
    x = rows(case, 300, "float32", batch=(8,))
    want = native.ENGINE.forward(mapped(case), x)
    y = x.clone()
    y[1, 5] = torch.nan
    y[3, 299] = torch.inf
    y[5] = -torch.inf
    got = native.ENGINE.forward(mapped(case), y)
    assert bool(got[1].isnan().all())
    assert bool(got[3].isnan().all())
    assert not bool(got[5].any())
    assert torch.equal(got[[0, 2, 4, 6, 7]], want[[0, 2, 4, 6, 7]])


@each_served
def test_huge_tiny_and_equal_scores(case):
    big, tiny = torch.finfo(torch.float32).max, 1e-45
    for row in (
        [big, -big, 0.0],
        [2.9e33],
        [big, big, big],
        [tiny, -tiny, 0.0],
        [-big, -big, -big],
        [1e4, 1e4 - 1, 1e4 - 2],
    ):
        x = torch.tensor([row])
        if case.mass > len(row):
            continue
        p = native.ENGINE.forward(mapped(case), x)
        assert bool(p.isfinite().all()), row
        mass = 0.0 if case.positive_row and max(row) <= 0.0 else case.mass
        assert abs(float(p.double().sum()) - mass) < 1e-6, row


# -- instruction sets, threads, forks ----------------------------------------------------------------------------------------------


def in_a_child(code, **env):
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    return out.stdout.strip()


def test_while_another_thread_imports_torch():
    """torch is in sys.modules from its first line on, and has next to nothing then."""
    code = """
    import sys, types
    import numpy as np
    import anymax as am
    half = sys.modules["torch"] = types.ModuleType("torch")
    x = np.linspace(-1, 1, 2048, dtype=np.float32).reshape(64, 32)
    for part in (None, "Tensor", "get_num_threads", "empty_like"):
        if part:
            setattr(half, part, type(part, (), {}))
        assert np.allclose(am.sparsemax(x).sum(-1), 1) and am.softmax([1.0, 1.0]).tolist() == [0.5, 0.5]
        assert am.sparsemax_loss(x, np.arange(64) % 32).shape == ()
    del sys.modules["torch"]
    import torch
    from anymax.kernels import library
    p = am.sparsemax(torch.from_numpy(x))
    assert np.array_equal(p.numpy(), am.sparsemax(x)) and am.sparsemax(torch.ones(1, 4)).sum() == 1
    assert library.pool() == library._lent and library._lent is not None
    """
    in_a_child(code)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1.0, 1e15, 1e17, -1e17, 1e30, -1e30])
def test_a_budget_of_tied_scores_of_any_size(size, dtype):
    for n in (1, 2, 5, 9, 31, 40, 200):
        x = np.full((17, n), size, dtype)
        x[3] = np.linspace(-1, 1, n)
        for k in (0.1, 0.97, 2.5):
            if k <= n:
                total = native.ENGINE.forward(am.Budget(k), x).astype(float).sum(-1)
                np.testing.assert_allclose(total, k, rtol=1e-5)


def test_rows_of_two_strides_have_the_gradients_that_they_have_alone():
    g = np.random.default_rng(0).normal(size=(2, 5, 3, 40)).astype(np.float32)
    for mapping in (am.Softmax(), am.Sparsemax(), am.Entmax(1.5), am.Entmax(1.25), am.NormMax(2.0)):
        p = am.apply(mapping, np.random.default_rng(1).normal(size=(2, 5, 3, 40)).astype(np.float32))
        some, of = p[:, ::2, ::2], g[:, ::2, ::2]  # what two strides can say, and three can't
        together = native.ENGINE.vjp(mapping, some[0], some[0], of[0])
        for i, j in np.ndindex(3, 2):
            alone = native.ENGINE.vjp(mapping, some[0, i, j][None], some[0, i, j][None], of[0, i, j][None])
            np.testing.assert_array_equal(together[i, j], alone[0])


def test_the_first_call_goes_the_short_way():
    """One forward and many backwards is all that some programs do."""
    code = """
    import torch, anymax as am
    p = am.sparsemax(torch.ones(2, 4, requires_grad=True))
    q = am.sparsemax(torch.nn.Parameter(torch.ones(2, 4)))
    from anymax import functional
    assert functional._QUICK[torch.Tensor] is functional._QUICK[torch.nn.Parameter]
    assert type(p.grad_fn) is type(q.grad_fn), (p.grad_fn, q.grad_fn)
    """
    in_a_child(code)


@pytest.mark.parametrize("isa", native.load().isas())
def test_every_instruction_set(isa):
    lib, before = native.load(), native.isa()
    x = {
        d: rows(None, n, d, batch=(5,))
        for d, n in (("float32", 700), ("float64", 90), ("bfloat16", 33), ("float16", 9))
    }
    want = {(c.id, d): native.ENGINE.forward(mapped(c), a) for c in SERVED for d, a in x.items()}
    assert lib.set_isa(isa)
    try:
        assert native.isa() == isa
        for (id_, d), p in want.items():
            case = next(c for c in SERVED if c.id == id_)
            got = native.ENGINE.forward(mapped(case), x[d])
            assert float((got.double() - p.double()).abs().max()) <= 2 * bound(case, p, d), (id_, d)
    finally:
        lib.set_isa(before)


def test_an_instruction_set_by_the_environment():
    code = (
        "from anymax.kernels import _memory, native; print(native.isa(), native.load() if native.isa() is None else '')"
    )
    assert in_a_child(code, ANYMAX_ISA="baseline").startswith("baseline")
    assert "ANYMAX_ISA asks for 'mmx'" in in_a_child(code, ANYMAX_ISA="mmx")
    assert not native.load().set_isa("mmx")


@pytest.mark.thin(3)
@pytest.mark.parametrize("shape", [(7, 5000), (1, 300_000), (3, 262_144 + 17)], ids=str)
@each(
    tuple(
        c
        for c in SERVED
        if c.id in ("softmax", "sparsemax", "entmax-1.5", "entmax-1.1", "sparse_softmax-k5", "budget-2")
    )
)
def test_results_do_not_depend_on_the_number_of_threads(case, shape):
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    before = native.get_num_threads()
    x = torch.as_tensor(x)
    results = []
    try:
        for threads in (1, 2, 3):
            native.set_num_threads(threads)
            assert native.get_num_threads() == threads
            torch.set_num_threads(threads)
            results.append(native.ENGINE.forward(case.mapping, x))
            results.append(torch.as_tensor(native.ENGINE.forward(case.mapping, x.numpy())))  # the library's own pool
    finally:
        native.set_num_threads(before)
        torch.set_num_threads(os.cpu_count() or 1)
    assert all(torch.equal(r, results[0]) for r in results)
    want = reference(lambda t: am.apply(case.mapping, t), x)
    assert float((results[0].double() - want).abs().max()) <= bound(case, want, "float32")


def test_many_threads_of_python_at_once():
    x = [np.random.default_rng(i).normal(size=(50, 3000)).astype(np.float32) for i in range(8)]
    want = [am.entmax15(a) for a in x]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for got, w in zip(pool.map(am.entmax15, x), want):
                assert np.array_equal(got, w)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("first", ["import torch", "pass"])
def test_a_forked_child_works(first):
    code = f"""
    import os, sys
    import numpy as np
    {first}
    import anymax
    x = np.random.default_rng(0).normal(size=(64, 30000)).astype("float32")
    want = anymax.sparsemax(x)
    pid = os.fork()
    if pid == 0:
        for _ in range(3):
            ok = np.array_equal(anymax.sparsemax(x), want)
        os._exit(0 if ok else 3)
    _, status = os.waitpid(pid, 0)
    assert np.array_equal(anymax.sparsemax(x), want)
    print(os.waitstatus_to_exitcode(status))
    """
    assert in_a_child(code, OMP_NUM_THREADS="2") == "0"


def test_omp_num_threads():
    code = "from anymax.kernels import _memory, native; print(native.get_num_threads())"
    assert in_a_child(code, OMP_NUM_THREADS="3") == "3"


def test_only_tensors_go_to_the_pool_of_torch():
    """Its threads wait awake, which a BLAS beside them pays for dearly."""
    code = """
    import ctypes
    import numpy as np, torch
    import anymax as am
    from anymax.kernels import native
    N, P = ctypes.c_int64, ctypes.c_void_p
    calls = []

    def lent(begin, end, grain, task, context):
        calls.append(grain)
        ctypes.CFUNCTYPE(None, N, N, P)(task)(begin, end, context)
        return 0

    lent = ctypes.CFUNCTYPE(ctypes.c_int, N, N, N, P, P)(lent)
    assert native.pool() == 1 and native.pool(False) == 0
    ctypes.CDLL(native.load().__file__).anymax_set_parallel(ctypes.cast(lent, P))
    x, y = np.random.default_rng(0).normal(size=(300, 400)).astype(np.float32), np.arange(300) % 400
    g = x[::-1].copy()
    for make, want in ((torch.from_numpy, True), (np.asarray, False)):
        a, b = make(x), make(g)
        for name, f in {
            "plain": lambda: am.sparsemax(a),
            "out": lambda: am.sparsemax(a, out=make(np.empty_like(x))),
            "another axis": lambda: am.entmax15(a, axis=0),
            "mask": lambda: am.sparsemax(a, mask=make(x > -1)),
            "alpha by row": lambda: am.entmax(a, make(np.full((300, 1), 1.3))),
            "backward": lambda: native.ENGINE.vjp(am.Sparsemax(), a, am.sparsemax(a), b),
            "loss": lambda: am.sparsemax_loss(a, make(y)),
            "largest": lambda: native.ENGINE.largest(a, 3),
        }.items():
            calls.clear()
            f()
            assert bool(calls) == want, (name, want, calls)
    calls.clear()
    am.sparsemax(torch.from_numpy(x), axis=0), am.sparsemax(torch.zeros(4000, 48), axis=0), am.sparsemax(torch.zeros(9, 32000))
    assert calls == [48, 16, 1], calls  # adjacent rows are transposed sixteen at once
    """
    in_a_child(code)


@pytest.mark.parametrize("name", [None, "Engine.so"])
def test_threadpoolctl_limits_the_pool(name, tmp_path):
    """In a process of its own: threadpoolctl finds a library by its file, and can't where that was replaced meanwhile."""
    pytest.importorskip("threadpoolctl")
    path = Path(native.load().__file__).resolve()
    if name is not None:
        shutil.copy(path, tmp_path / name)
        path = tmp_path / name if os.name == "nt" else tmp_path / "link.so"
        if os.name != "nt":
            path.symlink_to(tmp_path / name)
    code = """
    import threadpoolctl
    from anymax.kernels import _memory, native
    native.set_num_threads(4)
    with threadpoolctl.threadpool_limits(limits=1):
        print(native.get_num_threads(), end=" ")
    print(native.get_num_threads())
    """
    assert in_a_child(code, ANYMAX_LIBRARY=str(path)) == "1 4"


def test_a_threadpoolctl_too_old_to_be_told_of_a_library_is_left_alone(tmp_path):
    (tmp_path / "threadpoolctl.py").write_text("def threadpool_limits(limits=None, user_api=None): ...\n")
    code = "import anymax, numpy; from anymax.kernels import _memory, native; print(native.isa(), anymax.sparsemax(numpy.eye(2)).sum())"
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert in_a_child(code, PYTHONPATH=paths) == f"{native.isa()} 2.0"


# -- the ways in -----------------------------------------------------------------------------------------------------------------------


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
    torch = pytest.importorskip("torch")
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
    for read, write in (
        (base[1:], base[:-1]),
        (base[:-1, 1:], base[1:, 1:]),
        (base[:, 1:], base[:, :-1]),
        (base, base),
    ):
        base[...] = np.random.default_rng(1).normal(size=base.shape)
        x, out = make(read), make(write)
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
        want = native.ENGINE.forward(mapping, x)
        assert torch.equal(am.apply(mapping, x), want)
        assert np.array_equal(am.apply(mapping, x.numpy()), want.numpy())
        free = x.clone().requires_grad_()
        p, g = am.apply(mapping, free), torch.randn(shape)
        assert torch.equal(p.detach(), want)
        (got,) = torch.autograd.grad(p, free, g)
        torch.testing.assert_close(got, kernels.reference.ENGINE.vjp(mapping, x, want, g), rtol=1e-5, atol=1e-6)


def test_the_short_way_steps_aside():
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3, 5)
    want = am.sparsemax(x)
    assert am.sparsemax(torch.tensor(1.0).reshape(1)).tolist() == [1.0]
    with pytest.raises(ValueError, match="0-d"):
        am.sparsemax(torch.tensor(1.0))
    graph = make_fx(lambda t: am.sparsemax(t))(x)
    torch.testing.assert_close(graph(2 * x), am.sparsemax(2 * x), rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.vmap(am.sparsemax)(x), want)
    jacobian = torch.autograd.functional.jacobian(am.sparsemax, x)
    torch.testing.assert_close(torch.func.grad(lambda t: am.sparsemax(t)[0, 0])(x), jacobian[0, 0])
    assert am.sparsemax(x.to(torch.int64)).dtype == torch.float32
    assert am.sparsemax(torch.empty(0, 5)).shape == (0, 5)
    with pytest.raises(ValueError, match="no classes"):
        am.sparsemax(torch.empty(5, 0))
    assert am.sparsemax(torch.randn(3, 5, device="meta")).device.type == "meta"
    with torch._subclasses.FakeTensorMode() as mode:
        assert type(am.sparsemax(mode.from_tensor(x))) is not torch.Tensor
    z = torch.randn(3, 5, dtype=torch.complex64).conj().imag  # a lazy minus sign
    torch.testing.assert_close(am.sparsemax(z), am.sparsemax(z.resolve_neg().clone()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and people use it
        traced = torch.jit.trace(lambda t: am.sparsemax(t), x, check_trace=False)
        torch.testing.assert_close(traced(2 * x), am.sparsemax(2 * x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [5, 40, 300, 3000])
def test_operations_in_place_are_those_beside(n):
    """At the C ABI: a result may lie where one of its operands does."""
    lib = ctypes.CDLL(native.load().__file__)
    lib.anymax_run.argtypes = [ctypes.c_void_p]
    maps = {
        "softmax": 0.0, "sparsemax": 0.0, "entmax": 1.3, "budget": 2.0, "normmax": 2.0, "topk": 3.0, "topp": 0.7,
        "taylor": 4.0, "sigsoftmax": 0.0, "perturb_max": 1.0, "relu": 0.0,
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
    assert served == 2 * (11 + 4 + 8 + 2 * 11 + 2 * 4)


@pytest.mark.parametrize("isa", native.load().isas())
@pytest.mark.parametrize("mapping", [am.Softmax(), am.SparseSoftmax(k=60)], ids=repr)
def test_no_probability_is_subnormal_far_below_the_largest(mapping, isa):
    """Numbers that are not normal cost most processors a hundred cycles each; 2 ^ -127 is exp(-88.03)."""
    lib, before = native.load(), native.isa()
    assert lib.set_isa(isa)
    try:
        for n in (10, 64, 700):
            x = torch.linspace(-88.1, -104.0, n).repeat(6, 1)
            x[:, 0] = 0.0
            p = native.ENGINE.forward(mapping, x)
            assert torch.equal(p, torch.eye(n)[:1].expand(6, n)), n
    finally:
        lib.set_isa(before)


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


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(0, 5), (4, 0, 6)])
def test_no_rows_with_a_parameter_each(shape, kind):
    make = torch.from_numpy if kind == "torch" else np.asarray
    x = make(np.zeros(shape, np.float32))
    for mapping in (
        lambda a: am.Entmax(a + 0.5),
        am.NormMax,
        lambda a: am.Budget(a),
        lambda a: am.SparseSoftmax(k=a),
        lambda a: am.SparseSoftmax(p=a / 4),
    ):
        for size in ((1,) * len(shape), (*shape[:-1], 1)):
            m = mapping(make(np.full(size, 2.0)))
            assert native.ENGINE.forward(m, x).shape == shape
            assert native.ENGINE.vjp(m, x, x, x).shape == shape
            assert native.ENGINE.threshold(m, x).shape == (*shape[:-1], 1)
    assert native.ENGINE.logsumexp(x).shape == (*shape[:-1], 1)


def test_refusals():
    x = np.zeros((2, 3), np.float32)
    assert native.ENGINE.refuse("forward", am.Sparsemax(), x) is None
    for op, mapping, scores, words in (
        ("loss", am.Sparsemax(), x, "not loss"),
        ("forward", am.Ratio.square(), x, "no kernel for ratio"),
        ("forward", am.PerturbMax("exponential"), x, "no kernel"),
        ("forward", am.PerturbMax("normal", scale=np.ones((2, 1))), x, "one scale of the noise"),
        ("log_forward", am.Sparsemax(), x, "log of p is used"),
        ("index_loss", am.Taylor(2), x, "no such operation"),
        ("forward", am.Sparsemax(), x.astype(np.longdouble), "it takes float32"),
        ("forward", am.Sparsemax(), x.astype(">f4"), "byte order"),
        ("forward", am.Sparsemax(), torch.zeros(2, 3).to_sparse(), "dense tensors"),
        ("forward", am.Sparsemax(), torch.zeros(2, 3, device="meta"), "on the CPU"),
    ):
        assert words in native.ENGINE.refuse(op, mapping, scores), (op, mapping)


def test_without_a_library(monkeypatch):
    sentence = "it was not compiled when anymax was installed"
    monkeypatch.setattr(native, "load", lambda: sentence)
    monkeypatch.setattr(functional, "_QUICK", {})
    x = torch.randn(4, 5)
    assert sentence in str(am.explain(am.Sparsemax(), x))
    assert kernels.choose("forward", am.Sparsemax(), x) is kernels.reference.ENGINE
    assert float(am.sparsemax(x).sum()) == pytest.approx(4)
    assert float(am.sparsemax_loss(x, torch.tensor([0, 1, 2, 3]))) >= 0
    assert am.sparsemax(x.numpy()).shape == (4, 5)
    assert native.isa() is None
    with am.use("native"), pytest.raises(RuntimeError, match="not compiled"):
        am.sparsemax(x)


def test_explain_names_the_engine():
    told = str(am.explain(am.Entmax(1.5), torch.randn(2, 5)))
    assert f"forward     native ({native.ENGINE.plan('forward', am.Entmax(1.5), torch.randn(2, 5))})" in told
    assert "index_loss  native" in told
    for n in (5, 200, 5000):
        for op in ("forward", "vjp", "index_loss"):
            way, _, isa = native.ENGINE.plan(op, am.Entmax(1.5), torch.randn(300, n)).rpartition(" ")
            assert isa == native.isa()
            assert way
    assert "it has no log p of entmax; log of p is used" in told


def test_bad_calls_are_codes_and_never_crashes():
    lib = ctypes.CDLL(native.load().__file__)
    lib.anymax_error.restype = ctypes.c_char_p
    lib.anymax_run.argtypes = [ctypes.c_void_p]
    words = set()
    for change in (
        {"op": 99}, {"op": -1}, {"map": 77}, {"dtype": 9}, {"n": 0}, {"n": -4}, {"outer": -1}, {"outer": 2**62}, {"out": View()},
        {"x": View()}, {"map": 2, "param": -1.0}, {"map": 2, "param": float("nan")}, {"map": 4, "param": 1.0}, {"map": 5},
        {"map": 6, "param": 2.0}, {"map": 7, "param": 3.0}, {"map": 7, "param": 400.0}, {"op": 4}, {"op": 5}, {"op": 7, "param": 9.0},
        {"map": 7, "param": 2.5}, {"map": 5, "param": 2.5}, {"op": 7, "map": 5, "param": 1.5}, {"n": 2**31},
        {"op": 1, "map": 1}, {"map": 9, "param": 1.0, "nodes": 0}, {"map": 9, "param": 1.0, "nodes": 32, "noise": 40},
    ):  # fmt: skip
        x, out = np.zeros((2, 3), np.float32), np.full((2, 3), 7, np.float32)
        call = Call()
        call.map, call.outer, call.inner, call.n = 1, 2, 1, 3
        call.x = View(x.ctypes.data, 3, 0, 1)
        call.out = View(out.ctypes.data, 3, 0, 1)
        for key, value in change.items():
            setattr(call, key, value)
        code = lib.anymax_run(ctypes.byref(call))
        assert code != 0, change
        assert np.all(out == 7), change
        words.add(lib.anymax_error(code))
    assert lib.anymax_run(None) != 0
    assert len(words) >= 5


def test_tiny_rows_in_great_number():
    x = torch.randn(200_003, 4)
    with am.use("reference"):
        want = am.sparsemax(x[-1000:])
    got = am.sparsemax(x)
    torch.testing.assert_close(got[-1000:], want, rtol=0, atol=3e-7)
    assert float((got.sum(-1) - 1).abs().max()) < 3e-7


def test_a_row_of_a_million():
    x = torch.randn(1, 1_000_003, generator=torch.Generator().manual_seed(0))
    for f in (am.softmax, am.sparsemax, am.entmax15, lambda t: am.sparse_softmax(t, k=100)):
        with am.use("reference"):
            want = f(x.double())
        assert float((f(x).double() - want).abs().sum()) < 3e-7


def test_what_the_engine_lacks_is_composed_when_it_is_asked_for():
    x = torch.randn(3, 5)
    with am.use("native"):
        torch.testing.assert_close(am.log_apply(am.Sparsemax(), x).exp(), am.sparsemax(x))
        assert float(am.nll(am.Entmax(1.2), x, torch.tensor([0, 1, 2]))) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_logsumexp(dtype):
    x = rows(None, 700, dtype, batch=(3, 4))
    x[0, 0] = -torch.inf
    got, want = am.logsumexp(x, 1), torch.logsumexp(x.double(), 1)
    torch.testing.assert_close(got.double(), want, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-6)
    free = x.clone().requires_grad_()
    am.logsumexp(free).sum().backward()  # plain operations, with their gradient
    torch.testing.assert_close(free.grad, am.softmax(x), rtol=1e-2, atol=1e-2)


# -- what the engine takes ------------------------------------------------------------------------------------------


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


def test_bfloat16_of_numpy():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).normal(size=(4, 30)).astype(ml_dtypes.bfloat16)
    want = am.sparsemax(torch.tensor(x.astype(np.float32)).bfloat16()).float().numpy()
    for scores, axis in ((x, -1), (x.T.copy(), 0), (x.T, 0)):
        p = native.load().forward(am.Sparsemax(), scores, axis, None, None)
        assert p.dtype == x.dtype
        assert p.shape == scores.shape
        np.testing.assert_array_equal(np.moveaxis(p, axis, -1).astype(np.float32), want)


def layouts(a):
    """The same numbers as they can lie in memory."""
    wide = np.repeat(a, 2, -1)
    yield from (a, np.asfortranarray(a), wide[..., ::2], np.ascontiguousarray(a[..., ::-1])[..., ::-1])
    yield np.ascontiguousarray(np.moveaxis(a, 0, -1)).transpose(a.ndim - 1, *range(a.ndim - 1))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    "mapping", [am.Softmax(), am.Sparsemax(), am.Entmax(1.3), am.Taylor(2), am.Budget(2)], ids=repr
)
def test_any_axis_layout_mask_and_out(kind, mapping):
    """Masks that are broadcast, five axes of rows that no two strides can say, results with any strides: all as in C order, by rows."""
    g = np.random.default_rng(0)
    make = torch.from_numpy if kind == "torch" else np.asarray
    x = g.normal(size=(2, 3, 4, 5, 6)).astype(np.float32)
    for axis in (-1, 0, 2, -2):
        rows_ = np.ascontiguousarray(np.moveaxis(x, axis, -1))
        for mask in (None, g.random((4, 1, 6)) < 0.9, g.random(x.shape) < 0.9, np.array(True)):
            keep = None if mask is None else np.moveaxis(np.broadcast_to(mask, x.shape), axis, -1)
            if isinstance(mapping, am.Budget) and mask is not None and keep.sum(-1).min() < 2:
                continue
            want = am.apply(mapping, rows_ if keep is None else np.where(keep, rows_, np.float32(-np.inf)))
            for scores in layouts(x):
                if kind == "torch" and min(scores.strides) < 0:
                    continue
                masked = None if mask is None else make(mask)
                p = native.load().forward(mapping, make(scores), axis, masked, None)
                np.testing.assert_allclose(np.moveaxis(np.asarray(p), axis, -1), want, rtol=1e-6, atol=1e-7)
                for place in layouts(np.empty_like(x)):
                    if kind == "torch" and min(place.strides) < 0:
                        continue
                    out = make(place)
                    assert native.load().forward(mapping, make(scores), axis, masked, out) is out
                    np.testing.assert_array_equal(np.asarray(out), np.asarray(p))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("mapping", [am.Softmax(), am.Sparsemax(), am.Entmax(1.3), am.Taylor(2)], ids=repr)
def test_gradients_along_any_axis(kind, mapping):
    g = np.random.default_rng(0)
    make = torch.from_numpy if kind == "torch" else np.asarray
    x, d = g.normal(size=(2, 2, 3, 40, 5)).astype(np.float32)
    for axis in (-1, 0, 1):
        p = native.load().forward(mapping, x, axis, None, None)
        rows_ = [np.ascontiguousarray(np.moveaxis(a, axis, -1)) for a in (x, p, d)]
        want = np.moveaxis(np.asarray(kernels.reference.ENGINE.vjp(mapping, *rows_)), -1, axis)
        for a, b in itertools.product(layouts(p), layouts(d)):
            if kind == "torch" and min(*a.strides, *b.strides) < 0:
                continue
            scores = make(x) if mapping.needs_scores else None
            got = native.load().vjp(mapping, scores, make(a), make(b), axis, None)
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("low", [-50.0, -1000.0, -9000.0, -20000.0])
def test_a_budget_in_doubles_is_as_good_beside_a_score_far_below(low):
    x = np.random.default_rng(0).normal(size=(20, 32)) * 0.3
    x[:, 0] = low
    p = am.budget(x, 2.0)
    with am.use("reference"):
        assert abs(p - am.budget(x, 2.0)).max() < 2e-15


@pytest.mark.parametrize("n", [2, 20, 128, 1000, 5000])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999])
def test_of_ties_at_the_end_of_a_nucleus_the_first_are_kept(n, p):
    x = torch.cat([torch.zeros(3, n), (torch.randn(20, n) * 3).round()])
    got = am.sparse_softmax(x, p=p)
    saved = am.sparse_softmax(x.requires_grad_(), p=p)
    with am.use("reference"):
        less, want, more = (am.sparse_softmax(x.detach().double(), p=q) for q in (p * (1 - 3e-7), p, p * (1 + 3e-7)))
    firm = ((less > 0) == (more > 0)).all(-1)  # rounding does not move the end
    assert firm.any()
    assert torch.equal(got[firm] > 0, want[firm] > 0)
    assert torch.equal(saved[firm] > 0, want[firm] > 0)
    torch.testing.assert_close(got[firm].double(), want[firm], atol=2e-7, rtol=0)


@pytest.mark.thin(2)
@pytest.mark.parametrize("n", [33, 100, 128, 1000, 32001])
def test_results_written_past_the_caches_are_those_of_their_pieces(n):
    rows = (36 << 20) // (4 * n)  # more than the cache of most machines, three quarters of which is enough
    x = torch.randn(rows * n + 3)[3:].view(rows, n)  # rows that begin anywhere
    out = torch.empty(rows * n + 1)[1:].view(rows, n)
    for mapping in (
        am.Softmax(),
        am.Sparsemax(),
        am.Entmax(4 / 3),
        am.Budget(5),
        am.SparseSoftmax(k=3),
        am.SparseSoftmax(k=30),
    ):
        am.apply(mapping, x, out=out)
        for piece in torch.arange(rows).tensor_split(5):
            assert torch.equal(out[piece], am.apply(mapping, x[piece])), mapping


@pytest.mark.whole(lambda n: n in (1003, 70001))
@pytest.mark.parametrize(("n", "dtype"), [(300, "float32"), (1003, "float32"), (5000, "float64"), (70001, "float32")])
def test_gradients_written_past_the_caches_are_those_of_single_rows(n, dtype):
    rows = (30 << 20) // (n * (8 if dtype == "float64" else 4))
    x, g = (torch.randn(rows * n + 3, dtype=getattr(torch, dtype))[3:].view(rows, n) for _ in range(2))
    some = torch.randperm(rows)[:40]
    for mapping in (
        am.Sparsemax(),
        am.Entmax(4 / 3),
        am.Entmax(1.25),
        am.Budget(5),
        am.NormMax(2.0),
        am.SparseSoftmax(k=30),
    ):
        p, saved = native.ENGINE.forward_saving(mapping, x, capacity=max(128, n // 32))
        want = kernels.reference.ENGINE.vjp(mapping, x[some].double(), p[some].double(), g[some].double())
        for memory in (saved, None):
            got = native.ENGINE.vjp(mapping, x, p, g, memory)
            assert float((got[some].double() - want).abs().max()) < 3e-6, (mapping, memory is None)
            assert torch.equal(got != 0, (got != 0) & (p != 0))
            alone = torch.stack([native.ENGINE.vjp(mapping, x[i], p[i], g[i]) for i in some])
            torch.testing.assert_close(got[some], alone, atol=2e-6, rtol=0)


def test_the_engine_makes_its_result():
    engine, x = native.load(), torch.randn(4, 6)
    for scores in (
        x,
        x.double(),
        x.bfloat16(),
        x[1],
        torch.nn.Parameter(x),
        torch.randn(700, 300),
        torch.randn(700, 300).bfloat16(),
    ):
        p = engine.forward(am.Sparsemax(), scores, -1, None, None)
        assert (type(p), p.dtype, p.requires_grad) == (torch.Tensor, scores.dtype, False)
        assert torch.equal(p, engine.forward(am.Sparsemax(), scores, -1, None, torch.empty_like(p)))
        fresh = torch.empty(1)
        assert sys.getrefcount(p) == sys.getrefcount(fresh)
        assert p.data_ptr() != scores.data_ptr()
    with torch.inference_mode():
        assert engine.forward(am.Sparsemax(), x, -1, None, None).is_inference()


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_the_engine_stands_back_where_torch_looks_on(where):
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            return f(*args, **(kwargs or {}))

    x, said, engine, index = torch.randn(3, 5), [], native.load(), torch.arange(3)
    value = torch.empty(3)

    def ask(_):
        if where == "forward":
            said.append(engine.forward(am.Sparsemax(), x, -1, None, None))
        elif where == "backward":
            said.append(engine.vjp(am.Sparsemax(), None, x, x, -1, None))
        else:
            said.append(engine.loss(am.Sparsemax(), x, index, value, -1, -100, 0, False))
        return torch.ones(2) * 2

    ask(x)
    assert said.pop() is not None
    with Counter():
        ask(x)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        ask(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(ask, x, check_trace=False)
    make_fx(ask)(x)
    make_fx(ask, pre_dispatch=True)(x)
    with torch.autograd.forward_ad.dual_level():
        ask(x)
    with am.use("reference"):
        ask(x)
    assert len(said) >= 7
    assert said == [None] * len(said)
    with am.use("native"):
        ask(x)
    assert said.pop() is not None
    ask(x)
    assert said.pop() is not None


def test_the_engine_says_what_is_no_argument():
    engine, x, out = native.load(), torch.randn(2, 5), torch.full((2, 5), 7.0)
    for mapping, axis, mask in (
        (am.Budget(7), -1, None), (am.Sparsemax(), 2, None), (am.Sparsemax(), -3, None), (am.Sparsemax(), 1.0, None),
        (am.Sparsemax(), True, None),
        (am.Sparsemax(), 2**80, None), (am.Sparsemax(), (1,), None), (am.Sparsemax(), -1, torch.ones(2, 5)),
        (am.Sparsemax(), -1, torch.ones(3, dtype=bool)),
        (am.Sparsemax(), -1, torch.ones(1, 2, 5, dtype=bool)), (am.Sparsemax(), -1, np.ones(5, bool)), (am.Ratio.square(), -1, None),
        (am.Entmax(torch.ones(2, 1) * 1.5), -1, None), ("sparsemax", -1, None), (None, -1, None),
    ):  # fmt: skip
        assert engine.forward(mapping, x, axis, mask, out) is None, (mapping, axis)
    g, memory = torch.randn(2, 5), torch.empty(2 * (3 * 2 + 1), dtype=torch.int32)
    for p, g_, memory_ in (
        (None, g, None), (x, None, None), (x, g[:1], None), (x, g.double(), None), (x, g, memory[1:]), (x, g, memory.long()), (x, g, g),
        (x, g, torch.empty(2 * (6 * 2 + 1), dtype=torch.int32)),
    ):  # fmt: skip
        assert engine.vjp(am.Sparsemax(), None, p, g_, -1, memory_) is None
    assert (out == 7).all()
    for wrong in ((), (am.Sparsemax(), x), (0,) * 9):
        for f in (
            engine.forward,
            engine.forward_saving,
            engine.vjp,
            engine.loss,
            engine.loss_grad,
            engine.threshold,
            engine.largest,
            engine.linear,
        ):
            with pytest.raises(TypeError, match="arguments"):
                f(*wrong)
    with pytest.raises(RuntimeError, match="an operand is missing"):
        engine.vjp(am.Taylor(2), None, x, g, -1, None)
    with pytest.raises(RuntimeError, match="parameter is out of range"):
        engine.forward(link.link_of(am.SparseSoftmax(k=3))._replace(param=0.0), x, -1, None, None)
    memory[:] = 9  # classes that are none
    with pytest.raises(RuntimeError, match="has changed since"):
        engine.vjp(am.Sparsemax(), None, x, g, -1, memory)


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


def test_the_short_way_leaves_what_is_out_of_the_ordinary():
    from torch.fx.experimental.proxy_tensor import make_fx

    x, w = torch.randn(4, 7), torch.randn(4, 7, requires_grad=True)
    am.softmax(x)  # from here on torch has a short way
    torch.testing.assert_close(am.softmax(torch._neg_view(x)), torch.softmax(-x, -1))
    p = am.sparsemax(w)
    (got,) = torch.autograd.grad(p, w, torch._neg_view(x), retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(p, w, -x)[0])
    torch.testing.assert_close(
        torch.vmap(lambda a: am.softmax(w) * a)(x[:, None, None]), torch.softmax(w, -1) * x[:, None, None]
    )
    torch.testing.assert_close(torch.func.grad(lambda a: (am.softmax(w) * a).sum())(x), torch.softmax(w, -1))
    traced = make_fx(lambda a: am.softmax(a), pre_dispatch=True)(x)
    torch.testing.assert_close(traced(2 * x), torch.softmax(2 * x, -1))


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


@pytest.mark.parametrize("rows_", [64, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_class_without_weight_takes_no_part_in_backward(rows_, dtype):
    x = torch.randn(rows_, 300, dtype=getattr(torch, dtype)) / 2
    x[:, 0] = 100
    x.requires_grad_()
    g = torch.randn_like(x)
    g[:, 0] = torch.inf  # budget: p = 1 there, whatever the score
    am.apply(am.Budget(9), x).backward(g)
    assert x.grad[:, 1:].isfinite().all()


def test_a_class_that_half_precision_rounds_to_zero_is_none_of_the_support():
    x = (8 * torch.randn(64, 256, generator=torch.Generator().manual_seed(0))).half().requires_grad_()
    p = am.entmax(x, 1.25)
    g = torch.ones_like(x)
    g[p.detach() == 0] = torch.inf
    p.backward(g)
    assert x.grad.isfinite().all()
    y = x.detach().clone().requires_grad_()
    p = am.sigsoftmax(y)
    g = torch.ones_like(y)
    g[p.detach() == 0] = torch.inf
    p.backward(g)
    assert y.grad.isfinite().all()


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


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc to spoil what is freed")
def test_the_end_of_the_interpreter():
    code = """
    import numpy as np, torch, anymax
    x = torch.randn(3, 3)
    for _ in range(2):
        anymax.softmax(x), anymax.softmax(x.numpy())
    """
    assert in_a_child(code, PYTHONMALLOC="malloc", MALLOC_PERTURB_="255") == ""


def test_a_torch_without_the_exchange_api():
    """Tensors then say by their attributes where their numbers are."""
    engine, g = native.load(), torch.randn(4, 5, 6)
    x = torch.randn(4, 5, 6)
    want = {axis: am.sparsemax(x, axis) for axis in (0, 1, 2)}
    assert engine.bind({"exchange": None}) is False
    try:
        for axis, p in want.items():
            for scores in (x, x.transpose(0, 2).contiguous().transpose(0, 2), x.repeat_interleave(2, -1)[..., ::2]):
                assert torch.equal(engine.forward(am.Sparsemax(), scores, axis, None, None), p)
            torch.testing.assert_close(
                engine.vjp(am.Softmax(), None, p, g, axis, None), p * (g - (p * g).sum(axis, keepdim=True))
            )
        assert engine.forward(am.Sparsemax(), x.bfloat16(), 0, x > 0, None).dtype is torch.bfloat16
        for odd in (x.to("meta"), x.to_sparse(), x.int(), torch._neg_view(x)):
            assert engine.forward(am.Sparsemax(), odd, -1, None, None) is None
        free = x.clone().requires_grad_()
        am.sparsemax_loss(free, torch.zeros(4, 6, dtype=torch.int64)).backward()
        torch.testing.assert_close(torch.vmap(am.sparsemax)(x), want[2])
    finally:
        capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        assert engine.bind({"exchange": capsule}) is (capsule is not None)


FEW = [am.Softmax(), am.Sparsemax(), am.Entmax(1.5), am.Entmax(2.0), am.Entmax(1.0)]


def few_rows(n, rows_=37, scale=1.0):
    g = np.random.default_rng(n)
    x = g.normal(size=(rows_, n)) * scale
    x[3] = x[3, 0]  # ties
    x[5] = np.where(np.arange(n) == n // 2, 25.0, x[5])  # one far above
    if n > 2:
        x[7, : n // 2] = -np.inf
    index = g.integers(n, size=rows_)
    index[5] = n // 2
    return x, index


@pytest.mark.thin(4)
@pytest.mark.parametrize("mapping", FEW, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 31, 33, 64, 100, 127, 128, 129])
def test_losses_of_few_classes(mapping, dtype, n):
    torch = pytest.importorskip("torch")
    for scale in (0.02, 1.0, 8.0):
        x, index = few_rows(n, scale=scale)
        x = torch.tensor(x).to(getattr(torch, dtype))
        wide, index = x.double(), torch.tensor(index)
        with am.use("reference"):
            want = am.fenchel_young(mapping, wide, index, reduction="none")
            p = am.apply(mapping, wide)
            tau = am.threshold(mapping, wide).tau
        y = torch.nn.functional.one_hot(index, n).double()
        free = x.clone().requires_grad_()
        value = am.fenchel_young(mapping, free, index, reduction="none")
        (gradient,) = torch.autograd.grad(value, free, torch.full_like(value, 0.5))
        rounding = {"float64": 1e-14, "float32": 5e-7, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
        fine = {"rtol": 4 * rounding, "atol": 1e-15 if dtype == "float64" else rounding * 1e-2}
        torch.testing.assert_close(value.double(), want, **{**fine, "rtol": 4 * rounding * max(1.0, scale * 4)})
        torch.testing.assert_close(gradient.double(), 0.5 * (p - y), rtol=4 * rounding, atol=rounding)
        torch.testing.assert_close(
            am.threshold(mapping, x).tau.double(), tau, rtol=4 * rounding, atol=rounding * max(1.0, scale)
        )


@pytest.mark.parametrize("mapping", FEW[:3], ids=repr)
@pytest.mark.parametrize("n", [10, 100])
def test_what_is_strange_in_a_row_of_few_classes(mapping, n):
    torch = pytest.importorskip("torch")
    x, index = (torch.tensor(a) for a in few_rows(n))
    x = x.float()
    clean = am.fenchel_young(mapping, x, index, reduction="none")
    x[0, 1], x[1, 2], x[2] = torch.nan, torch.inf, -torch.inf
    index[4] = -100
    x[9, index[9]] = -torch.inf
    x.requires_grad_()
    value = am.fenchel_young(mapping, x, index, reduction="none")
    (gradient,) = torch.autograd.grad(value, x, torch.ones_like(value))
    assert value[:2].isnan().all()
    assert value[2] == value[9] == torch.inf
    assert value[4] == 0.0
    assert gradient[:2].isnan().all()
    assert not gradient[4].any()
    assert gradient[2, index[2]] == -1.0
    assert gradient[9, index[9]].item() == pytest.approx(-1.0, rel=1e-6)  # less the sum of the others, which rounds
    assert torch.count_nonzero(gradient[2]) == 1
    others = [i for i in range(len(x)) if i not in (0, 1, 2, 4, 9)]
    assert torch.equal(value[others], clean[others])
    assert gradient[others].isfinite().all()
    np.testing.assert_allclose(gradient[others].sum(-1).numpy(), 0.0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_small_loss_keeps_its_digits(dtype):
    torch = pytest.importorskip("torch")
    x = torch.zeros(20, 4, dtype=getattr(torch, dtype))
    x[:, 0] = torch.arange(20) * 1.5
    x.requires_grad_()
    value = am.cross_entropy(x, torch.zeros(20, dtype=torch.int64), reduction="none")
    (gradient,) = torch.autograd.grad(value.sum(), x)
    small = 3 * np.exp(-1.5 * np.arange(20))
    np.testing.assert_allclose(value.detach(), np.log1p(small), rtol=2e-6 if dtype == "float32" else 1e-14)
    np.testing.assert_allclose(gradient[:, 0], -small / (1 + small), rtol=2e-6 if dtype == "float32" else 1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_in_one_pass_are_those_that_are_composed(reduction):
    x, index = (torch.tensor(a) for a in few_rows(10))
    x.requires_grad_()
    results = []
    for weight in (None, torch.ones(10, dtype=x.dtype)):  # with weights a row at a time, then reduced
        for mapping in FEW:
            value = am.fenchel_young(mapping, x, index, weight, reduction=reduction)
            (gradient,) = torch.autograd.grad(value, x, torch.ones_like(value), create_graph=True)
            (plain,) = torch.autograd.grad(value, x, torch.ones_like(value), retain_graph=True)
            torch.testing.assert_close(gradient, plain)
            results.append((value.detach(), plain))
    half = len(FEW)
    for (a, b), (c, d) in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(a, c, rtol=1e-14, atol=0)
        torch.testing.assert_close(b, d, rtol=1e-14, atol=0)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_losses_along_any_axis_with_samples_to_ignore(axis):
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    n = x.shape[axis]
    index = torch.randint(n, [s for i, s in enumerate(x.shape) if i != axis % 3])
    index[0, 1] = -7
    rows_ = x.movedim(axis, -1).reshape(-1, n)
    for mapping in (am.Softmax(), am.Sparsemax(), am.Entmax(1.3)):
        for reduction in ("none", "sum", "mean"):
            a, b = (t.clone().requires_grad_() for t in (x, rows_))
            got = am.fenchel_young(mapping, a, index, axis=axis, ignore_index=-7, reduction=reduction)
            with am.use("reference"):
                want = am.fenchel_young(mapping, b, index.flatten(), ignore_index=-7, reduction=reduction)
                (dw,) = torch.autograd.grad(want.sum(), b)
            torch.testing.assert_close(got.flatten(), want.flatten(), rtol=1e-12, atol=1e-13)
            (dg,) = torch.autograd.grad(got.sum(), a)
            torch.testing.assert_close(dg.movedim(axis, -1).reshape(-1, n), dw, rtol=1e-10, atol=1e-13)
            plain = am.fenchel_young(mapping, x.numpy(), index.numpy(), axis=axis, ignore_index=-7, reduction=reduction)
            np.testing.assert_allclose(plain, got.detach().numpy(), rtol=1e-13)
        assert am.fenchel_young(mapping, x, torch.full_like(index, -7), axis=axis, ignore_index=-7) == 0


def test_the_loss_of_the_engine_refuses_the_rest():
    engine = native.load()
    x, index = (torch.tensor(a) for a in few_rows(10))
    value, one, scale = (
        torch.full((37,), 7.0, dtype=x.dtype),
        torch.tensor(7.0, dtype=x.dtype),
        torch.ones(37, dtype=x.dtype),
    )

    def loss(mapping=am.Sparsemax(), x=x, value=value, index=index, reduction=0, save=False):  # noqa: B008
        return engine.loss(mapping, x, index, value, -1, -100, reduction, save)

    def gradient(mapping=am.Sparsemax(), x=x, index=index, scale=scale, memory=None, factor=1.0):  # noqa: B008
        return engine.loss_grad(mapping, x, index, scale, -1, factor, memory)

    stray, negative = index.clone(), index.clone()
    stray[5], negative[5] = 10, -1
    for refused in (
        {"index": stray}, {"index": index.int()}, {"index": index[:36]}, {"index": index[None]}, {"x": x.half()}, {"x": x.T},
        {"x": x[None]},
        {"x": x[:, 0]}, {"x": x.float()}, {"mapping": am.Budget(50)},
    ):  # fmt: skip
        assert loss(**refused) is None
        assert gradient(**refused) is None
    for refused in (
        {"index": negative},
        {"value": value[:36]},
        {"value": value.float()},
        {"value": one},
        {"reduction": 1},
    ):
        assert loss(**refused) is None
    memory = torch.empty(37 * (8 * 3 + 1), dtype=torch.int32)
    for refused in (
        {"scale": scale[:36]}, {"scale": scale.float()}, {"scale": scale, "factor": 2.0}, {"memory": memory[1:]}, {"memory": memory.long()},
        {"memory": scale}, {"mapping": am.Softmax(), "memory": scale[1:]}, {"mapping": am.Softmax(), "memory": scale.float()},
    ):  # fmt: skip
        assert gradient(**refused) is None
    assert (value == 7.0).all()
    assert one == 7.0
    assert loss() == (37, None)
    assert loss(value=one, reduction=2) == (37, None)
    torch.testing.assert_close(one, value.mean())
    wide, classes = torch.randn(6, 300), torch.arange(6)
    for mapping in (am.Softmax(), am.Sparsemax()):
        each = torch.empty(6)
        counted, memory = loss(mapping, wide, each, classes, save=True)
        assert counted == 6
        assert memory is not None
        want = (am.apply(mapping, wide) - torch.nn.functional.one_hot(classes, 300)) / 4
        for saved in (memory, None):
            torch.testing.assert_close(gradient(mapping, wide, classes, torch.tensor(0.5), saved, 0.5), want)
    assert gradient(index=negative)[5].eq(0).all()
    with pytest.raises(TypeError):
        engine.loss(am.Sparsemax(), x, index, value, -1, "2", 0, False)


SINGLE = [
    am.Softmax(),
    am.Sparsemax(),
    am.Entmax(1.5),
    am.Entmax(1.3),
    am.NormMax(2.0),
    am.SparseSoftmax(k=4),
    am.SparseSoftmax(p=0.9),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("mapping", SINGLE, ids=repr)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    ("rows", "n", "dtype"), [(5, 150, "float32"), (300, 1000, "float32"), (40, 700, "float64"), (1, 2000, "float32")]
)
def test_the_short_way_of_losses_of_many_classes(mapping, reduction, rows, n, dtype):
    torch = pytest.importorskip("torch")
    x, index = torch.randn(rows, n, dtype=getattr(torch, dtype)), torch.randint(n, (rows,))
    w = torch.rand(rows if reduction == "none" else (), dtype=x.dtype)

    def both(scores, target, **options):
        free = scores.detach().requires_grad_()
        value = am.fenchel_young(mapping, free, target, reduction=reduction, **options)
        assert am.fenchel_young(mapping, scores, target, reduction=reduction, **options).equal(value.detach())
        return value, torch.autograd.grad(value, free, w)[0]

    value, gradient = both(x, index)
    assert type(value.grad_fn).__name__ == "_IndexLossBackward"
    long, slow = both(x, index, mask=torch.ones_like(x, dtype=torch.bool))
    rtol, atol = (3e-6, 2e-7) if dtype == "float32" else (1e-13, 1e-14)
    torch.testing.assert_close(value, long, rtol=rtol, atol=atol)
    torch.testing.assert_close(gradient, slow, rtol=rtol, atol=atol)
    free = x.detach().requires_grad_()  # a second derivative: the first is then in plain operations
    first = torch.autograd.grad(
        am.fenchel_young(mapping, free, index, reduction=reduction), free, w, create_graph=True
    )[0]
    torch.testing.assert_close(first, gradient, rtol=2e-5, atol=2e-6)
    assert torch.autograd.grad(first.square().sum(), free)[0].isfinite().all()


@pytest.mark.thin(7)
@pytest.mark.parametrize("mapping", SINGLE, ids=repr)
@pytest.mark.parametrize("n", [33, 128, 129, 513, 2048, 2049])
@pytest.mark.parametrize("save", [True, False])
def test_losses_of_as_many_rows_as_a_vector_has_lanes(mapping, n, save):
    for scale in (0.02, 1.0, 8.0):
        x, index = (torch.tensor(a) for a in few_rows(n, scale=scale))
        x, g = x.float(), torch.rand(37, generator=torch.Generator().manual_seed(n))
        x[0, 1], x[1, 2], x[2] = torch.nan, torch.inf, -torch.inf
        x[9, index[9]] = -torch.inf
        index[4] = -100
        with am.use("reference"):
            wide = x.double().requires_grad_()
            want = am.fenchel_young(mapping, wide, index, reduction="none")
            p = am.apply(mapping, wide.detach())
        y = torch.nn.functional.one_hot(index.clamp(min=0), n).double()
        value, saved, _ = native.ENGINE.index_loss(mapping, x, index, save=save)
        gradient = native.ENGINE.index_loss_grad(mapping, x, index, g, saved)
        torch.testing.assert_close(
            value.double(), want.detach(), rtol=5e-7, atol=2e-7 * max(1.0, scale), equal_nan=True
        )
        rows_ = [i for i in range(37) if i not in (2, 4)]
        torch.testing.assert_close(
            gradient[rows_].double(), (g[:, None] * (p - y))[rows_], rtol=0, atol=1e-6, equal_nan=True
        )
        assert not gradient[4].any()
        assert gradient[2, index[2]] == -g[2]
        assert torch.count_nonzero(gradient[2]) == 1


@pytest.mark.parametrize("mapping", FEW[:3], ids=repr)
def test_the_gradient_of_a_poisoned_row_of_one_class(mapping):
    torch = pytest.importorskip("torch")
    x = torch.tensor([[torch.nan], [1.0], [-torch.inf], [torch.inf]], requires_grad=True)
    value = am.fenchel_young(mapping, x, torch.zeros(4, dtype=torch.int64), reduction="none")
    (gradient,) = torch.autograd.grad(value, x, torch.ones_like(value))
    np.testing.assert_array_equal(gradient[:, 0], [np.nan, 0.0, -1.0, np.nan])
    np.testing.assert_array_equal(value.detach(), [np.nan, 0.0, np.inf, np.nan])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [100, 3000])
def test_large_results_have_pages_of_their_own(kind, dtype, n, monkeypatch):
    torch = pytest.importorskip("torch")
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
        p, saved = native.ENGINE.forward_saving(mapping, x)
        yield from (
            p,
            native.ENGINE.forward(mapping, x),
            native.ENGINE.vjp(mapping, x, p, y, saved),
            native.ENGINE.vjp(mapping, x, p, y),
        )
        if native.ENGINE.refuse("index_loss", mapping, x) is None:
            yield native.ENGINE.index_loss_grad(mapping, x, index, scale, None)

    for mapping in (*FEW, am.SparseSoftmax(k=9), am.Budget(3), am.NormMax(), am.Entmax(3.0), am.Taylor(2)):
        want = [torch.as_tensor(a).double().numpy() for a in results(mapping)]
        for module, bound, size in ((native, "SMALLEST", 500), (native, "LARGE", 1000), (_memory, "LARGE", 1000)):
            monkeypatch.setattr(module, bound, size)
        native.load().bind({"smallest": 500})
        try:
            got = [torch.as_tensor(a).double().numpy() for a in results(mapping)]
        finally:
            native.load().bind({"smallest": _memory.SMALLEST})
            monkeypatch.undo()
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_large_result_is_a_tensor_like_any_other():
    torch = pytest.importorskip("torch")
    x = torch.randn(1100, 8192, requires_grad=True)
    p = am.sparsemax(x)
    p.backward(torch.ones_like(p) * torch.arange(8192))
    assert p.nbytes == x.grad.nbytes > native.LARGE
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


MIDDLING = (
    *(am.Entmax(alpha) for alpha in (4 / 3, 1.25, 1.2, 1.1, 1.45, 1.7, 1.95)),
    *(am.NormMax(alpha) for alpha in (2.0, 1.3, 40.0)),
    *(am.Budget(k) for k in (1, 2.5, 16, 1e-3)),
    *(am.SparseSoftmax(k=k) for k in (5, 15, 32)),
)


@pytest.mark.parametrize("n", [33, 64, 100, 128, 129, 256, 500, 1000, 2048])
@pytest.mark.parametrize("mapping", MIDDLING, ids=repr)
def test_rows_of_middling_length_are_right_to_the_last_digits(mapping, n):
    g = np.random.default_rng(n)
    for size in (0.02, 0.5, 1.0, 8.0, 100.0):
        x = (g.normal(size=(37, n)) * size).astype("float32")
        x[3] = -np.inf
        x[4, : n // 2 - 1] = -np.inf  # one score more than half is left
        x[5] = 5.0
        x[6, 1] = np.nan
        x[7, n // 2 :] = -1e30
        x[8] += 1000.0
        x[9, 3] = np.inf
        x[10] = g.standard_cauchy(n) * size
        x[11] = np.round(x[11] * 4) / 4  # ties
        p = am.apply(mapping, x)
        want = am.apply(mapping, x.astype("float64"))
        np.testing.assert_array_equal(np.isnan(p), np.isnan(want))
        np.testing.assert_allclose(p, want, rtol=2e-6, atol=4e-7)
        for row in (0, 2, 8, 10, 11, 17, 30):  # whatever is beside it
            np.testing.assert_array_equal(am.apply(mapping, x[row : row + 1])[0], p[row])
        out = x.copy()
        np.testing.assert_array_equal(am.apply(mapping, out, out=out), p)


@pytest.mark.parametrize("offset", [1e8, 1e17, -1e20, 3e38])
@pytest.mark.parametrize("k", [1e-6, 0.1, 1.0, 2.5, 30.0])
def test_a_budget_of_scores_of_any_size_is_spent(k, offset):
    for n in (100, 165, 1000):
        x = (np.random.default_rng(n).normal(size=(3, n)) + offset).astype("float32")
        np.testing.assert_allclose(am.budget(x, k).sum(-1), k, rtol=1e-5)
