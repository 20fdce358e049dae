"""Memory that is kept for results: never one that is in use, and again once it is not."""

import gc
import importlib.util
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from engine_state import in_a_child

import anymax as am
from anymax._array.memory import LARGE, LINE, SMALLEST, Recycler
from anymax.kernels import arrays, native

pytestmark = pytest.mark.skipif(isinstance(native.load(), str), reason="no compiled engine")
COUNTS = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
counted = pytest.mark.skipif(not COUNTS, reason="reference counts say nothing here")
N = SMALLEST  # bytes and more


def place(a):
    return a.ctypes.data if isinstance(a, np.ndarray) else a.data_ptr()


@counted
def test_memory_serves_again_once_nothing_holds_it():
    kept = Recycler(1 << 26)
    a = kept.take((N,), np.uint8, N)
    first = place(a)
    assert first % LINE == 0
    b = kept.take((N,), np.uint8, N)
    assert place(b) != first
    del a
    assert place(kept.take((N // 4,), np.float32, N)) == first
    part = kept.take((N,), np.uint8, N)[5:9]  # a part of it, or what shows it, holds it as the whole does
    shown = memoryview(kept.take((N,), np.uint8, N))
    places = {place(part) - 5, place(np.asarray(shown))}
    taken = [kept.take((N,), np.uint8, N) for _ in range(5)]
    assert not places & {place(c) for c in taken}
    del part, shown
    gc.collect()
    assert places <= {place(c) for c in [kept.take((N,), np.uint8, N) for _ in range(2)]}


@counted
def test_sizes_that_are_near_share_and_others_do_not():
    kept = Recycler(1 << 26)
    first = place(kept.take((N + 4096,), np.uint8, N + 4096))
    assert place(kept.take((N + 8192,), np.uint8, N + 8192)) == first
    assert place(kept.take((2 * N,), np.uint8, 2 * N)) != first


def test_no_more_is_kept_than_the_limit():
    kept = Recycler(4 * N)
    held = [kept.take((N,), np.uint8, N) for _ in range(9)]
    for i, a in enumerate(held):
        a[:] = i
    assert kept.total() <= kept.limit
    assert len({place(a) for a in held}) == 9
    assert all((a == i).all() for i, a in enumerate(held))
    del held, a
    for size in (2 * N, 3 * N, N):
        kept.take((size,), np.uint8, size)
        assert kept.total() <= kept.limit or len(kept.memory) == 1


@pytest.mark.parametrize("size", [N - 1, LARGE + 1])
def test_small_and_very_large_ones_are_not_kept(size):
    kept = Recycler(1 << 30)
    assert kept.take((size,), np.uint8, size).flags.owndata
    assert not kept.memory
    assert Recycler(0).take((N,), np.uint8, N).flags.owndata


@counted
def test_what_else_holds_a_piece_keeps_it():
    kept = Recycler(1 << 26)
    a = kept.take((N,), np.uint8, N)
    seen = gc.get_referents(kept.memory)  # as tools do that look at all of the memory
    b = kept.take((2 * N,), np.uint8, 2 * N)
    first, second = place(a), place(b)
    assert place(kept.take((2 * N,), np.uint8, 2 * N)) != second
    del a
    assert place(kept.take((N,), np.uint8, N)) != first
    del seen
    assert first in {place(c) for c in [kept.take((N,), np.uint8, N) for _ in range(2)]}


@counted
def test_an_interrupt_leaves_it_whole(monkeypatch):
    class Interrupted(list):
        def append(self, piece):
            raise KeyboardInterrupt

    kept = Recycler(1 << 26)
    pieces = [kept.take((size,), np.uint8, size) for size in (N, 2 * N, 3 * N)]
    del pieces
    for size in (N, 2 * N, 3 * N, 5 * N):
        monkeypatch.setattr(kept, "memory", Interrupted(kept.memory))
        try:
            kept.take((size,), np.uint8, size)
        except KeyboardInterrupt:
            monkeypatch.setattr(kept, "memory", list(kept.memory))
        taken = [kept.take((s,), np.uint8, s) for s in (N, 2 * N, 3 * N, 5 * N)]
        assert all(place(a) % LINE == 0 for a in taken)
        del taken


def test_a_lock_that_is_held_is_not_waited_for():
    kept = Recycler(1 << 26)
    with kept.lock:  # of another thread, or of one that was forked away
        assert kept.take((N,), np.uint8, N).flags.owndata


def test_threads_never_share():
    kept, wrong = Recycler(1 << 23), []

    def work(me):
        for _ in range(300):
            a = kept.take((N,), np.uint8, N)
            a[::4096] = me
            time.sleep(0)
            if (a[::4096] != me).any():
                wrong.append(me)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.whole(lambda kind, dtype: (kind, dtype) not in {("numpy", "float32"), ("torch", "bfloat16")})
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_results_stay_what_they_are_while_others_come_and_go(kind, dtype):
    torch = pytest.importorskip("torch")
    if kind == "numpy" and dtype == "bfloat16":
        pytest.skip("NumPy has none")
    generator = torch.Generator().manual_seed(0)

    def scores():
        x = torch.randn(300, 1100, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
        return x.numpy() if kind == "numpy" else x

    xs = [scores() for _ in range(4)]
    with am.use("reference"):
        want = [am.entmax15(x) for x in xs]
    held, views = [], []
    for turn in range(3):
        for x in xs:
            p = am.entmax15(x)
            assert p.dtype == x.dtype
            assert p.shape == x.shape
            if kind == "torch":
                assert not p._is_view()
            held.append(p if turn else None)  # the first are let go
            views.append(p[17])  # but for a part
            am.sparsemax(x)
    for i, (p, view) in enumerate(zip(held, views, strict=True)):
        expected = torch.as_tensor(want[i % 4]).double()
        torch.testing.assert_close(torch.as_tensor(view).double(), expected[17], rtol=0, atol=4e-3)
        if p is not None:
            torch.testing.assert_close(torch.as_tensor(p).double(), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_default_device_is_not_that_of_results(dtype):
    torch = pytest.importorskip("torch")
    x = torch.randn(300, 1100).to(getattr(torch, dtype))
    want = am.sparsemax(x)
    with torch.device("meta"):
        leaf = x.detach().requires_grad_()
        p = am.sparsemax(leaf)
        (g,) = torch.autograd.grad(p, leaf, torch.ones_like(want, device="cpu"))
    assert torch.equal(p, want)
    assert g.is_cpu


def test_a_large_sparse_tensor_is_served_as_a_small_one_is():
    torch = pytest.importorskip("torch")
    for shape in ((4, 16), (512, 1024)):
        x = torch.ones(shape)
        assert torch.equal(am.sparsemax(x.to_sparse()).to_dense(), am.sparsemax(x))


@counted
def test_training_takes_the_same_memory_at_every_step():
    torch = pytest.importorskip("torch")
    x = torch.randn(512, 1024)
    with am.use("reference"):  # which takes such memory, too
        want = am.sparsemax(x)
    seen = []
    for _ in range(4):
        leaf = x.clone().requires_grad_()
        p = am.sparsemax(leaf)
        (g,) = torch.autograd.grad(p, leaf, torch.ones_like(p).cumsum(-1))
        seen.append({p.data_ptr(), g.data_ptr()})
        torch.testing.assert_close(p, want, rtol=0, atol=1e-6)
        del p, g
    assert seen[1] == seen[2] == seen[3]


def test_gradients_hold_what_the_backward_needs():
    torch = pytest.importorskip("torch")
    xs = [torch.randn(200, 1500, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    gs = [torch.randn(200, 1500, dtype=torch.float64) for _ in range(3)]
    total = sum((am.entmax15(x) * g).sum() for x, g in zip(xs, gs, strict=True))  # each p lives in the graph alone
    for _ in range(4):
        am.sparsemax(gs[0])
    total.backward()
    for x, g in zip(xs, gs, strict=True):
        with am.use("reference"):
            y = x.detach().requires_grad_()
            (am.entmax15(y) * g).sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-12)


def test_a_shared_tensor_leaves_what_is_kept():
    torch = pytest.importorskip("torch")
    x = torch.randn(256, 1024)
    p = am.sparsemax(x)
    want = p.clone()
    p.share_memory_()  # its numbers move to where other processes see them
    for _ in range(3):
        am.softmax(x)
    assert torch.equal(p, want)
    assert p.is_shared()


FORKS = """
import os
import numpy as np
import anymax as am

x = np.random.default_rng(0).normal(size=(256, 1024)).astype("float32")
p = am.sparsemax(x)
want = p.copy()
child = os.fork()
if child == 0:
    held = [am.softmax(x) for _ in range(4)]  # none of them where the parent's result lies
    os._exit(0 if abs(am.sparsemax(x).sum() - 256) < 1e-2 and (p == want).all() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (p == want).all())
"""


@pytest.mark.whole
@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is POSIX's")
def test_a_forked_child_has_its_own():
    assert in_a_child(FORKS).split() == ["0", "True"]


def run(value):
    code = (
        "import numpy as np, anymax as am\nfrom anymax._array.memory import recycler\n"
        "x = np.zeros((256, 1024), 'float32')\nfor _ in range(3): am.sparsemax(x)\nprint(recycler.limit, len(recycler.memory))"
    )
    environment = {**os.environ, "ANYMAX_KEPT_MB": value}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.whole
@counted
def test_the_environment_says_how_much():
    assert run("0").stdout.split() == ["0", "0"]
    assert run("1.5").stdout.split() == [str(3 << 19), "1"]
    assert run("").stdout.split() == [str(96 << 20), "1"]
    for wrong in ("much", "-1", "nan", "inf"):
        assert f"ANYMAX_KEPT_MB must be a number of megabytes (0: keep none), got '{wrong}'" in run(wrong).stderr


def test_what_is_too_large_to_be_kept_still_comes_from_numpy():
    torch = pytest.importorskip("torch")
    x = torch.zeros(LARGE // 4 // 512 + 1, 512)
    p = arrays.empty_like(x)
    assert (p.shape, p.dtype) == (x.shape, x.dtype)
    with pytest.raises(RuntimeError, match="not resizable"):  # as memory of NumPy's, which comes in huge pages
        p.resize_(2 * len(x), 512)


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="a limit on memory, which threads run into first")
def test_threads_that_cannot_be_made_are_done_without():
    code = """
import resource
import numpy as np
import anymax as A
from anymax.kernels import native
native.set_num_threads(16)
x = np.random.default_rng(0).normal(size=(256, 1024)).astype("float32")
with A.use("reference"):
    want, out = A.sparsemax(x), np.empty_like(x)
A.sparsemax(x[:2], out=out[:2])
size = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")][0] << 10
resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), resource.RLIM_INFINITY))
for _ in range(3):
    A.sparsemax(x, out=out)
    assert np.abs(out - want).max() < 1e-6
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
A.sparsemax(x, out=out)
assert len(__import__("os").listdir("/proc/self/task")) >= 15
"""
    in_a_child(code)


@pytest.mark.whole(lambda module: module != "torch")
@pytest.mark.parametrize("module", ["torch", "jax", "pandas"])
def test_a_framework_that_another_thread_is_importing(module):
    """Half of it is in sys.modules; arrays of NumPy are not asked whether they are its."""
    code = f"""
import sys, types
import numpy as np
sys.modules[{module!r}] = types.ModuleType({module!r})
import anymax as A
x = np.random.default_rng(0).normal(size=(4, 9))
y = np.array([0, 1, 2, 3])
A.softmax(x), A.sparsemax(x, axis=0), A.entmax(x, np.full((4, 1), 1.3)), A.sparsemax(x, mask=x > 0), A.softmax(x.tolist())
A.apply(A.NormMax(1.5), x), A.apply(A.PerturbMax(), x), A.apply(A.Ratio.square(), x), A.log_softmax(x), A.logsumexp(x)
A.cross_entropy(x, y), A.sparsemax_loss(x, y, reduction="none"), A.fenchel_young(A.Budget(2), x, x * 0 + 2 / 9)
A.attention(x, x, x, A.Sparsemax(), is_causal=True), A.linear_attention(x, x, x), A.threshold(A.Sparsemax(), x)
A.sample(A.Softmax(), x, generator=np.random.default_rng(0)), A.jacobian(A.Entmax(1.5), x[0]), A.topk(3)(x)
print(A.explain(A.Sparsemax(), x))
with A.use("reference"):
    A.softmax(x)
"""
    in_a_child(code, "-W", "error")


@pytest.mark.whole
def test_an_interrupt_of_the_first_call_of_torch_spoils_nothing():
    """Ctrl-C before or after any one of the registrations of the leaves, one after another; then the call is made again."""
    pytest.importorskip("torch")
    code = """
import sys
import torch
import anymax as A
left = 0
def interrupted(function):
    def run(*args, **options):
        global left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        result = function(*args, **options)
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return result
    return run
library = torch.library
for owner, name in ((library.Library, "define"), (library.Library, "impl"), (library, "register_fake"), (library, "register_vmap")):
    setattr(owner, name, interrupted(getattr(owner, name)))
x, times = torch.randn(3, 5, dtype=torch.float64), 0
while left <= 0:
    times, left = times + 1, times + 1
    try:
        A.softmax(x)
        if FOUND:
            import anymax._attention.torch_flash
    except KeyboardInterrupt:
        pass
assert times > 20, times
left = 0
p = A.softmax(x.requires_grad_())
p[:, 0].sum().backward()
assert torch.allclose(p, torch.softmax(x, -1))
assert torch.func.vmap(torch.func.grad(lambda s: A.entmax(s, 1.3)[0]))(x).isfinite().all()
"""
    in_a_child(code.replace("FOUND", repr(importlib.util.find_spec("triton") is not None)))


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="a limit on memory")
@pytest.mark.parametrize("shape", [(33, 1 << 20), (3, 11 << 20), (1 << 21, 16)])
def test_the_size_of_supports_is_counted_in_pieces(shape):
    pytest.importorskip("torch")
    code = f"""
import resource
import torch
import anymax as A
x = torch.randn({shape}, generator=torch.Generator().manual_seed(0)).half()
A.threshold(A.Sparsemax(), x[:1, :40]), A.sparsemax(x[:1])
size = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")][0] << 10
resource.setrlimit(resource.RLIMIT_AS, (size + 9 * x.numel(), resource.RLIM_INFINITY))
tau, support = A.threshold(A.Sparsemax(), x)  # p has two bytes an entry, and integers eight more
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert support.shape == tau.shape == x.shape[:1] and support.dtype == torch.int64
assert torch.equal(support, (A.sparsemax(x) > 0).sum(-1))
"""
    in_a_child(code)
