"""DTensors of any placement: the same numbers and gradients as of one tensor, and no communication that is not needed."""

import importlib.util
import subprocess
import sys

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import all_right

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo"
)

PLACED = """
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
import anymax as A
from anymax.autodiff.torch_group import _EXPECTED
mesh = init_device_mesh("cpu", (2, 2) if size == 4 else (2,))
g = torch.Generator().manual_seed(0)
x = torch.randn(7, 23, generator=g, dtype=torch.float64)
t = torch.randint(0, 23, (7,), generator=g)
known, t[2] = t.clone(), -100
shares = torch.rand(7, 23, generator=g, dtype=torch.float64)
shares /= shares.sum(-1, keepdim=True)
w, keep = torch.rand(23, generator=g, dtype=torch.float64), torch.arange(23) % 3 > 0
none = t.where(torch.arange(7) % 3 > 0, torch.tensor(-1))
bounds, order = 0.1 + w, 1.0 + shares.argsort(-1).argsort(-1).double()
alphas = torch.linspace(1.1, 1.9, 7, dtype=torch.float64)[:, None]
def whole(v):
    return v.full_tensor() if isinstance(v, DTensor) else v
def parts(v):
    return v if isinstance(v, tuple) else (v,)
# what is called; collectives forward where the rows lie apart, and where the classes do
calls = [
    (A.sparsemax, 0, 2), (A.softmax, 0, 1), (A.log_softmax, 0, 1), (A.perturb_max, 0, 2), (A.taylor_softmax, 0, 2),
    (lambda x: A.entmax15(x, axis=0), 2, 0), (lambda x: A.sparsemax(x, mask=keep), 0, 2),
    (lambda x: A.sparsemax(x, mask=keep.numpy()), 0, 2),
    (lambda x: A.sparsemax(x, axis=(0, 1)), 1, 1), (lambda x: A.entmax(x, alphas), 0, 2), (lambda x: A.sparse_softmax(x, p=0.7), 0, 3),
    (lambda x: A.apply("sparsemax", x, dtype=torch.float32), 0, 2),
    (lambda x: A.cross_entropy(x, t), 1, 1), (lambda x: A.sparsemax_loss(x, t, w), 1, 2), (lambda x: A.entmax15_loss(x, shares), 0, 2),
    (lambda x: A.entmax15_loss(x, t, label_smoothing=0.1, reduction="sum"), 0, 2), (lambda x: A.sparse_softmax_loss(x, t, k=5), 1, 2),
    (lambda x: A.entmax15_loss(x, shares, reduction="none", mask=keep | True), 0, 2), (lambda x: A.taylor_softmax_loss(x, t), 1, 2),
    (lambda x: A.accuracy_loss(A.Sparsemax(), x, t), 1, 1), (lambda x: A.smoothed_nll(A.Sparsemax(), x, t, epsilon=0.1), 1, 1),
    (lambda x: A.margin_loss("softmax", torch.tanh(x), t), 1, 1), (lambda x: A.entmax15_loss(x, torch.arange(23) % 7, axis=0), 2, 1),
    (A.logsumexp, 0, 1), (lambda x: A.logsumexp(x, temperature=alphas), 0, 1), (lambda x: A.logsumexp(x, keepdims=True), 0, 1),
    (lambda x: A.logsumexp(x, temperature=0), 0, 1), (lambda x: A.logsumexp(x, temperature=alphas - alphas[:1]), 0, 1),
    (lambda x: A.thresholds.mellowmax(x, -0.7), 0, 1), (lambda x: A.thresholds.mellowmax(x, alphas, mask=keep, keepdims=True), 0, 1),
    (lambda x: A.log_prob(A.Softmax(), x, known), 0, 1), (lambda x: A.log_prob(A.Taylor(2), x, known), 0, 3),
    (lambda x: A.log_prob_entropy(A.Taylor(2), x, torch.stack([known, known])), 0, 3),
    (lambda x: A.apply(A.Sink("entmax15", alphas), x), 0, 2), (lambda x: A.fenchel_young(A.Sink("entmax15", 0.3), x, none, w), 1, 2),
    (lambda x: A.fenchel_young(A.Sink(), x, 0.8 * shares, reduction="sum"), 0, 2),
    (lambda x: A.log_prob(A.Sink(), x, none.clamp(-1)), 0, 1),
    (lambda x: A.margin_loss(A.Sink(), torch.tanh(x), none), 1, 1), (lambda x: tuple(A.threshold(A.Sink("sparsemax"), x)), 0, 3),
    (lambda x: A.apply(A.Elementwise(), x), 0, 1), (lambda x: A.apply(A.Fusedmax(), x), 0, 2), (lambda x: A.apply(A.Softpick(), x), 0, 2),
    (lambda x: A.fenchel_young(A.Ranks(), x, order), 0, 2),
    (lambda x: A.apply(A.Bounded(bounds), x), 0, 2), (lambda x: A.apply(A.Bounded(bounds * shares[:, :1]), x), 0, 2),
    (lambda x: A.entropy(A.softmax(x)), 0, None), (lambda x: tuple(A.threshold(A.Sparsemax(), x)), 0, 2),
]
places = [(Shard(0),), (Shard(1),), (Replicate(),)]
if size == 4:
    places = [(Shard(0), Shard(1)), (Shard(1), Shard(1)), (Replicate(), Shard(1))]
for place in places:
    for i, (f, by_rows, by_classes) in enumerate(calls):
        a, d = x.clone().requires_grad_(), distribute_tensor(x.clone(), mesh, place).requires_grad_()
        want = f(a)
        _EXPECTED.clear()  # on all of them: the next call is the first of its group, the one after it is counted
        f(d.detach())
        with CommDebugMode() as counted:
            got = f(d)
        expected = {Shard(0): by_rows, Shard(1): by_classes, Replicate(): 0}[place[0]]
        assert size == 4 or expected in (None, counted.get_total_counts()), (i, place, counted.get_total_counts())
        for one, other in zip(parts(got), parts(want)):
            assert isinstance(one, DTensor), (i, place)
            one = whole(one.detach())
            near = torch.allclose(one, other, rtol=1e-5 if i == 11 else 1e-9, atol=1e-6 if i == 11 else 1e-11)
            assert one.shape == other.shape and near, (i, place, one, other)
        if not parts(want)[-1].requires_grad:
            continue
        parts(want)[-1].square().sum().backward()
        whole(parts(got)[-1]).square().sum().backward()
        assert torch.allclose(whole(d.grad), a.grad, atol=1e-6 if i == 11 else 1e-9), (i, place, (whole(d.grad) - a.grad).abs().max())
    for make in (lambda v: v, lambda v: DTensor.from_local(v, mesh, [Replicate()] * mesh.ndim)):  # a parameter that learns
        alpha, scores = torch.tensor(1.4, dtype=torch.float64, requires_grad=True), distribute_tensor(x.clone(), mesh, place)
        for f in (
            lambda x, a: A.entmax(x, a).square().sum(), lambda x, a: A.entmax_loss(x, known, alpha=a),
            lambda x, a: A.entmax_loss(x, shares, alpha=a), lambda x, a: A.fenchel_young(A.Sink("sparsemax", a), x, none),
            lambda x, a: A.apply(A.Sink(A.Entmax(a), a), x).square().sum(), lambda x, a: A.logsumexp(x, temperature=a).sum(),
        ):
            want = torch.autograd.grad(f(x, alpha), alpha)[0]
            got = torch.autograd.grad(whole(f(scores, make(alpha))), alpha)[0]
            assert torch.allclose(whole(got), want, rtol=1e-9), (place, got, want)
for v, t1, y1 in ((x[:1], known[:1], shares[:1]), (x[:, :1], known[:3].new_zeros(7), shares[:, :1] * 0 + 1)):  # one row; one class
    for place in ((Shard(0),), (Shard(1),)) if size == 2 else ():
        d = distribute_tensor(v.clone(), mesh, place).requires_grad_()
        for f in (
            lambda x: A.sparsemax_loss(x, t1), lambda x: A.entmax15_loss(x, y1),
            lambda x: A.softmax(x, mask=keep[None, :x.shape[1]] | True),
            lambda x: A.cross_entropy(x, t1, w[:x.shape[1]], reduction="sum"), lambda x: A.log_prob("softmax", x, t1),
        ):
            a = v.clone().requires_grad_()
            got = whole(f(d))
            assert torch.allclose(got, f(a)), (place, got, f(a))
            got, want = torch.autograd.grad(got.square().sum(), d)[0], torch.autograd.grad(f(a).square().sum(), a)[0]
            assert torch.allclose(whole(got), want), (place, whole(got), want)
v = x[:, :2]  # a class on each device
for bound in (0.3 + 0.5 * w[: v.shape[1]], 0.3 + 0.5 * w[:7, None], 0.3 + 0.5 * w[:1]):
    u, at = bound.clone().requires_grad_(), distribute_tensor(v, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(1)])
    want = torch.autograd.grad((A.apply(A.Bounded(u), v) * v).sum(), u)[0]
    got = torch.autograd.grad(whole((A.apply(A.Bounded(u), at) * at).sum()), u)[0]
    assert torch.allclose(whole(got), want), (bound.shape, whole(got), want)
half = DTensor.from_local(x / 2, mesh, [Partial()] * mesh.ndim)
apart = distribute_tensor(x, mesh, places[1])
for call, words in (
    (lambda: A.sparsemax(half), "the scores are Partial"), (lambda: A.cross_entropy(half, t), "cross_entropy: the scores are Partial"),
    (lambda: A.logsumexp(half), "the scores are Partial"),
    (lambda: A.likelihood.kl("softmax", apart, "softmax", apart), "takes no DTensor"),
    (lambda: A.segment_apply("softmax", apart, lengths=[1, 5]), "segment_apply takes no DTensor; give"),
    (lambda: A.segment_logsumexp(x, index=apart), "segment_logsumexp takes no DTensor as index; give index.full_tensor()"),
    (lambda: A.linear.linear_threshold(x, apart), "linear_threshold takes no DTensor as linear_weight; give linear_weight.full_tensor()"),
    (lambda: A.linear_log_prob(x, x, apart), "linear_log_prob takes no DTensor as target; give"),
    (lambda: A.sample("softmax", apart, generator=0), "sample takes no DTensor; give"),
    (lambda: A.sample("softmax", apart), "anymax.distributed.sample takes classes that lie on several devices"),
    (lambda: A.gumbel_max(apart), "gumbel_max takes no DTensor; give"),
    (lambda: A.gumbel_softmax(apart), "gumbel_softmax takes no DTensor"),
    (lambda: A.sampling.perturb_argmax(apart), "perturb_argmax takes no DTensor"),
    (lambda: A.sampling.gumbel_topk(apart, 2), "gumbel_topk takes no DTensor"),
    (lambda: A.sampling.topk_log_prob("softmax", apart, 2), "topk_log_prob takes no DTensor"),
    (lambda: A.sampling.speculative_accept(apart, apart, t), "speculative_accept takes no DTensor as p_draft; give p_draft.full_tensor()"),
    (lambda: A.multilabel_softmax_loss(apart, shares), "multilabel_softmax_loss takes no DTensor"),
    (lambda: A.jacobian("softmax", apart), "jacobian takes no DTensor"),
    (lambda: A.inspection.jacobian_norm("softmax", apart), "jacobian_norm takes"),
    (lambda: A.log_prob("softmax", apart, known, temperature=2.0), "log_prob: a DTensor goes without support, transform and temperature"),
    (lambda: A.log_prob("softmax", half, known), "log_prob: the scores are Partial"),
    (lambda: A.log_prob("softmax", apart, known.double()), "log_prob: target must be class indices (integers), got torch.float64"),
):
    try:
        call()
    except TypeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
if size == 2:
    import layout_cases
    wrong = layout_cases.wrong_cells(mesh)
    assert not wrong, wrong
print("right")
dist.destroy_process_group()
"""


def right(size, program):
    all_right(size, program)


def test_every_placement_on_two_devices():
    right(2, PLACED)


@pytest.mark.whole
def test_every_placement_on_a_mesh_of_four():
    right(4, PLACED)


HALVES = """
import anymax as A
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
mesh = init_device_mesh("cpu", (1,))
g = torch.Generator().manual_seed(0)
t = torch.arange(4) % 3
def whole(v):
    return v.full_tensor() if hasattr(v, "full_tensor") else v
for dtype, weights in ((torch.bfloat16, [0.3, 1.1, 0.7]), (torch.float16, [7e4, 1e5, 1.0])):
    x, W = torch.randn(4, 5, generator=g).to(dtype), torch.randn(3, 5, generator=g).to(dtype)
    w, scores = torch.tensor(weights), (x @ W.T).float().to(dtype)
    split = [distribute_tensor(v, mesh, [p]) for v, p in ((x, Replicate()), (W, Shard(0)), (scores, Shard(1)))]
    for reduction in ("sum", "mean", "none"):
        for mapping in ("softmax", "entmax15"):
            want = A.linear_loss(x, W, t, mapping, weight=w, reduction=reduction)
            got = whole(A.linear_loss(*split[:2], t, mapping, weight=w, reduction=reduction))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        want, got = (
            whole(A.cross_entropy(s, t, w / w.max(), reduction=reduction)).float() for s in (scores, split[2])
        )
        torch.testing.assert_close(got, want, rtol=2.0**-10, atol=0.0)
print("right")
dist.destroy_process_group()
"""


def test_class_weights_keep_their_digits_beside_halves():
    right(1, HALVES)


MANY = """
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
import anymax as A
dist.init_process_group("fake", rank=0, world_size=24, store=FakeStore())
g = torch.Generator().manual_seed(0)
x = torch.randn(30, 11, generator=g, dtype=torch.float64)
t = torch.randint(0, 11, (30,), generator=g)
calls = [A.softmax, A.sparsemax, A.entmax15, lambda x: A.sparse_softmax(x, k=3), A.logsumexp]
calls += [lambda x: A.cross_entropy(x, t, reduction="none"), lambda x: A.entmax15_loss(x, t, reduction="none")]
with LocalTensorMode(24):  # each of the processes by turns
    line, grid = init_device_mesh("cpu", (24,)), init_device_mesh("cpu", (6, 4))
    for mesh, place in ((line, [Shard(0)]), (grid, [Shard(0), Shard(0)]), (grid, [Replicate(), Shard(0)])):
        for i, f in enumerate(calls):
            d = distribute_tensor(x, mesh, place)
            with CommDebugMode() as counted:
                got = f(d)
            assert counted.get_total_counts() == 0, (i, place)
            parts = got.full_tensor()._local_tensors
            assert len(parts) == 24
            for part in parts.values():
                torch.testing.assert_close(part, f(x), rtol=1e-12, atol=1e-14)
print("right")
"""


@pytest.mark.whole
def test_rows_on_many_processes():
    done = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, timeout=120, check=False)
    if "No module named 'torch.distributed._local_tensor'" in done.stderr:
        pytest.skip("this torch has no LocalTensorMode")
    assert done.stdout == "right\n", done.stderr[-3000:]


MODELS = """
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
import anymax as A
torch.manual_seed(0)
x, t = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 11, (8,))
def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 11)).double()
plain = model()
want = A.entmax15_loss(plain(x), t)
want.backward()
mesh = init_device_mesh("cpu", (2,))
split = model()  # the classes on both processes, as loss_parallel has them
split[2] = parallelize_module(split[2], mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
scores = split(x)
assert isinstance(scores, DTensor) and scores.placements == (Shard(1),)
loss = A.entmax15_loss(scores, t)
loss.backward()
assert torch.allclose(loss.full_tensor(), want)
assert torch.allclose(split[2].weight.grad.full_tensor(), plain[2].weight.grad)
assert torch.allclose(split[0].weight.grad, plain[0].weight.grad)
sharded = model()  # the rows on both
fully_shard(sharded, mesh=mesh)
rows = slice(4 * rank, 4 * rank + 4)
A.entmax15_loss(sharded(x[rows]), t[rows]).backward()
assert torch.allclose(sharded[2].weight.grad.full_tensor(), plain[2].weight.grad)
print("right")
dist.destroy_process_group()
"""


@pytest.mark.whole
def test_models_that_are_split_by_tensor_parallelism_and_by_fsdp():
    right(2, MODELS)


COMPILED = """
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
import anymax as A
mesh = init_device_mesh("cpu", (1,))
x, t = torch.randn(4, 10), torch.tensor([1, 2, 3, 4])
for place in (Shard(0), Replicate(), Shard(1)):
    for f in (A.sparsemax, lambda x: A.cross_entropy(x, t), A.logsumexp):
        torch._dynamo.reset()
        d, a = distribute_tensor(x, mesh, [place]).requires_grad_(), x.clone().requires_grad_()
        got = torch.compile(f, fullgraph=place != Shard(1), backend="aot_eager")(d).full_tensor()
        torch.testing.assert_close(got, f(a))
        pull = torch.autograd.grad(got.square().sum(), d)[0].full_tensor()
        torch.testing.assert_close(pull, torch.autograd.grad(f(a).square().sum(), a)[0])
for f in (lambda x: A.distributed.apply("sparsemax", x).sin(), lambda x: A.distributed.nll("softmax", x, t)):
    torch._dynamo.reset()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = torch.compile(f, backend="aot_eager")(a), f(b)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), a), torch.autograd.grad(want.sum(), b))
print("right")
dist.destroy_process_group()
"""


@pytest.mark.whole
def test_under_torch_compile():
    """Rows apart in one graph; classes apart outside of it."""
    right(1, COMPILED)


LATE = """
import sys
import anymax.distributed as D
assert "torch" not in sys.modules
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
f = lambda x: D.apply("sparsemax", 2 * x).sum(0) + 1
x = torch.randn(4, 7)
assert torch.equal(torch.compile(f, backend="aot_eager")(x), f(x))
assert torch._dynamo.explain(f)(x).graph_break_count == 1
print("right")
"""


@pytest.mark.whole
def test_under_torch_compile_if_torch_is_imported_last():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "right\n", done.stderr[-3000:]
