"""The compiled library in its process: instruction sets, threads, forks, what it refuses, and no library at all."""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import shutil
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
from abi import Call, View
from cases import each
from engine_state import by_threads, in_a_child, instructions
from native_cases import ENGINE, SERVED, bound, close, mapped, named
from row_cases import reference, rows, torch

import anymax as am
from anymax import kernels
from anymax.functional import verbs
from anymax.kernels import native
from anymax.kernels.explanation import in_words


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


@pytest.mark.whole
def test_the_first_call_goes_the_short_way():
    """One forward and many backwards is all that some programs do."""
    code = """
    import torch, anymax as am
    p = am.sparsemax(torch.ones(2, 4, requires_grad=True))
    q = am.sparsemax(torch.nn.Parameter(torch.ones(2, 4)))
    from anymax.functional import verbs
    assert verbs._QUICK[torch.Tensor] is verbs._QUICK[torch.nn.Parameter]
    assert type(p.grad_fn) is type(q.grad_fn), (p.grad_fn, q.grad_fn)
    """
    in_a_child(code)


@pytest.mark.parametrize("isa", native.load().isas())
def test_every_instruction_set(isa):
    lengths = {"float32": 700, "float64": 90, "bfloat16": 33, "float16": 9}
    x = {dtype: rows(n, dtype, batch=(5,)) for dtype, n in lengths.items()}
    want = {(case, dtype): ENGINE.forward(mapped(case), a) for case in SERVED for dtype, a in x.items()}
    with instructions(isa):
        assert native.isa() == isa
        for (case, dtype), p in want.items():
            close(ENGINE.forward(mapped(case), x[dtype]), p, 2 * bound(case, p, dtype))


@pytest.mark.whole
def test_an_instruction_set_by_the_environment():
    code = "from anymax.kernels import native; print(native.isa(), native.load() if native.isa() is None else '')"
    assert in_a_child(code, ANYMAX_ISA="baseline").startswith("baseline")
    assert "ANYMAX_ISA asks for 'mmx'" in in_a_child(code, ANYMAX_ISA="mmx")
    assert not native.load().set_isa("mmx")


SOON = {("softmax", 7), ("sparsemax", 3), ("entmax-1.5", 1)}  # (map, rows)


@pytest.mark.whole(lambda case, shape: (case.id, shape[0]) not in SOON)
@pytest.mark.parametrize("shape", [(7, 5000), (1, 300_000), (3, 262_144 + 17)], ids=str)
@each(named("softmax", "sparsemax", "entmax-1.5", "entmax-1.1", "sparse_softmax-k5", "budget-2"))
def test_results_do_not_depend_on_the_number_of_threads(case, shape):
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    of_torch = by_threads((1, 2, 3), lambda: ENGINE.forward(case.mapping, torch.as_tensor(x)))
    of_its_own = by_threads((1, 2, 3), lambda: torch.as_tensor(ENGINE.forward(case.mapping, x)))
    assert all(torch.equal(r, of_torch[0]) for r in (*of_torch, *of_its_own))
    x = torch.as_tensor(x)
    want = reference(lambda t: am.apply(case.mapping, t), x)
    close(of_torch[0], want, bound(case, want, "float32"))


def test_many_threads_of_python_at_once():
    x = [np.random.default_rng(i).normal(size=(50, 3000)).astype(np.float32) for i in range(8)]
    want = [am.entmax15(a) for a in x]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for got, w in zip(pool.map(am.entmax15, x), want):
                assert np.array_equal(got, w)


@pytest.mark.whole
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


@pytest.mark.whole
def test_omp_num_threads():
    code = "from anymax.kernels import native; print(native.get_num_threads())"
    assert in_a_child(code, OMP_NUM_THREADS="3") == "3"


LENT = """
import ctypes
import torch
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
"""


def with_pool_lent(code):
    """Run code in a child where the pool of torch is one that appends the grain of each call to `calls`."""
    return in_a_child(LENT + textwrap.dedent(code))


@pytest.mark.whole
def test_only_tensors_go_to_the_pool_of_torch():
    """Its threads wait awake, which a BLAS beside them pays for dearly."""
    code = """
    import numpy as np
    import anymax as am
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
    with_pool_lent(code)


@pytest.mark.whole
def test_what_threads_share():
    code = """
    import numpy as np
    import anymax as am
    x, index = torch.randn(300, 300), torch.randint(0, 50, (300_000,))
    for name, f, least in (
        ("one matrix", lambda: am.Sinkhorn(3)(x), 6),
        ("a small one", lambda: am.Sinkhorn(3)(x[:100, :100]), 0),
        ("segments of one entry", lambda: am.segment_apply("sparsemax", torch.randn(300_000), lengths=torch.ones(300_000, dtype=int)), 2),
        ("an index that is not in order", lambda: am.Segments.of(index), 3),
    ):
        calls.clear()
        f()
        assert len(calls) >= least if least else not calls, (name, calls)
    """
    with_pool_lent(code)


@pytest.mark.whole
def test_truncations_are_shared_out_by_their_work():
    code = """
    from anymax import Softmax
    from anymax.kernels.decode import Step
    from anymax.kernels.native import ENGINE
    x = torch.randn(64, 200)
    for name, value, want in ("temperature", 2.0, False), ("minp", 0.1, False), ("typical", 0.9, True), ("xtc", 0.1, True):
        calls.clear()
        ENGINE.decode(Softmax(), x, (Step(name, value),), keep=True)
        assert bool(calls) == want, (name, calls)
    calls.clear()
    ENGINE.decode(Softmax(), torch.randn(64, 64), u=torch.rand(64, 40, dtype=torch.float64))
    assert calls  # the draws cost more than the classes
    """
    with_pool_lent(code)


@pytest.mark.whole
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
    from anymax.kernels import native
    native.set_num_threads(4)
    with threadpoolctl.threadpool_limits(limits=1):
        print(native.get_num_threads(), end=" ")
    print(native.get_num_threads())
    """
    assert in_a_child(code, ANYMAX_LIBRARY=str(path)) == "1 4"


@pytest.mark.whole
def test_a_threadpoolctl_too_old_to_be_told_of_a_library_is_left_alone(tmp_path):
    (tmp_path / "threadpoolctl.py").write_text("def threadpool_limits(limits=None, user_api=None): ...\n")
    code = "import anymax, numpy; from anymax.kernels import native; print(native.isa(), anymax.sparsemax(numpy.eye(2)).sum())"
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert in_a_child(code, PYTHONPATH=paths) == f"{native.isa()} 2.0"


def test_without_a_library(monkeypatch):
    sentence = "it was not compiled when anymax was installed"
    monkeypatch.setattr(native, "load", lambda: sentence)
    for name in list(vars(native.ENGINE)):  # the library's functions
        monkeypatch.delattr(native.ENGINE, name)
    monkeypatch.setattr(verbs, "_QUICK", {})
    x = torch.randn(4, 5)
    assert sentence in str(am.explain(am.Sparsemax(), x, verbose=True))
    assert kernels.choose("forward", am.Sparsemax(), x) is kernels.reference.ENGINE
    assert float(am.sparsemax(x).sum()) == pytest.approx(4)
    assert float(am.sparsemax_loss(x, torch.tensor([0, 1, 2, 3]))) >= 0
    assert am.sparsemax(x.numpy()).shape == (4, 5)
    assert native.isa() is None
    with am.use("native"), pytest.raises(RuntimeError, match="not compiled"):
        am.sparsemax(x)


def test_explain_names_the_engine():
    told = str(am.explain(am.Entmax(1.5), torch.randn(2, 5), verbose=True))
    assert f"  p                     native: several rows at a time, over all classes ({native.isa()})\n" in told
    assert "  loss (class indices)  native: " in told
    for n in (5, 200, 5000):
        for op in ("forward", "vjp", "index_loss"):
            way, _, isa = ENGINE.plan(op, am.Entmax(1.5), torch.randn(300, n)).rpartition(" ")
            assert isa == native.isa()
            assert in_words(f"{way} {isa}") != f"{way} {isa}"
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


def test_what_the_engine_lacks_is_composed_when_it_is_asked_for():
    x = torch.randn(3, 5)
    with am.use("native"):
        torch.testing.assert_close(am.log_apply(am.Sparsemax(), x).exp(), am.sparsemax(x))
        assert float(am.nll(am.Entmax(1.2), x, torch.tensor([0, 1, 2]))) > 0


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


@pytest.mark.whole
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
