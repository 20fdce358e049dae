"""Small calls: their results are tensors as torch makes them, and autograd's node of one holds p and a call alone."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

import anymax as am
from anymax.kernels import native

if isinstance(native.load(), str):
    pytest.skip(f"no compiled library: {native.load()}", allow_module_level=True)

ROOT = os.path.dirname(am.__file__)
X = torch.randn((2, 10), generator=torch.Generator().manual_seed(0))
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


WANT = am.Sparsemax()(X.double()).float()
SLOPE = (torch.where(WANT > 0, X - (X * (WANT > 0)).sum(-1, True) / (WANT > 0).sum(-1, True), 0.0)).detach()


# -- the result --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    "x",
    [
        X,
        X.T.contiguous().T,
        X[:, ::2],
        X[:1],
        X[:, :1],
        X[0],
        X[:0],
        X[:, None],
        X.expand(3, 2, 10),
        X.reshape(1, 2, 1, 5, 2),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)
def test_a_result_is_laid_out_as_torch_lays_out_one(x, dtype):
    x = x.to(dtype)
    for _ in range(2):  # a shape is kept from call to call
        p, like = am.sparsemax(x), torch.empty_like(x)
        assert (p.dtype, p.shape, p.device, p.stride()) == (like.dtype, like.shape, like.device, like.stride())
        assert (p.storage_offset(), p.untyped_storage().nbytes()) == (0, like.untyped_storage().nbytes())
        assert type(p) is torch.Tensor
        assert p.is_leaf
        assert not p._is_view()
        assert not p.is_inference()
        assert not p.requires_grad
        assert p.untyped_storage().resizable()
        assert p.is_contiguous() == like.is_contiguous()


def test_strides_of_axes_of_size_1_are_those_of_torch():
    for step in (10, 7, 10):
        x = X.as_strided((2, 1, 10), (10, step, 1))
        assert am.sparsemax(x).stride() == torch.empty_like(x).stride()


def test_a_result_can_be_all_that_one_of_torch_can():
    p = am.sparsemax(X)
    close(p, WANT)
    kept = p.clone()
    assert p.data_ptr() % 64 == 0
    assert am.sparsemax(X).data_ptr() != p.data_ptr()
    assert torch.equal(pickle.loads(pickle.dumps(p)), kept)
    assert torch.equal(copy.deepcopy(p), kept)
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    assert torch.equal(torch.load(file), kept)
    p.numpy()[0, 0] = 7.0
    assert p[0, 0] == 7.0
    p.requires_grad_()
    assert torch.autograd.grad((p * 2).sum(), p)[0].eq(2).all()
    assert am.sparsemax(X).resize_(4, 50).shape == (4, 50)
    assert am.sparsemax(X).untyped_storage().resize_(4000).nbytes() == 4000
    shared = am.sparsemax(X).share_memory_()
    assert shared.is_shared()
    assert torch.equal(shared, kept)
    p = am.sparsemax(X)
    p.set_(torch.ones(3))
    assert p.shape == (3,)
    p = am.sparsemax(X)
    p.mul_(2).transpose_(0, 1).unsqueeze_(0)
    assert torch.equal(p[0].T, 2 * kept)


def test_a_result_in_inference_mode_and_with_memory_that_is_filled():
    with torch.inference_mode():
        p = am.sparsemax(X)
        assert p.is_inference()
        assert torch.empty_like(X).is_inference()
    close(p.clone(), WANT)
    with pytest.raises(RuntimeError, match="inference tensor"):
        p.add_(1)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        close(am.sparsemax(X), WANT)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_result_within_a_transform_is_of_its_level():
    """Of a tensor that the function holds: what it makes may be changed by what it gets."""

    def f(y, ours):
        return (ours(X).mul_(y)).sum()

    want = torch.func.grad(lambda y: f(y, lambda x: torch.softmax(x, -1)))(torch.tensor(2.0))
    close(torch.func.grad(lambda y: f(y, am.softmax))(torch.tensor(2.0)), want)
    _, slope = torch.func.jvp(lambda y: f(y, am.softmax), (torch.tensor(2.0),), (torch.tensor(1.0),))
    close(slope, want)
    each = torch.func.vmap(lambda y: am.sparsemax(X) * y)(torch.arange(3.0))
    close(each, WANT * torch.arange(3.0)[:, None, None])
    close(torch.func.vmap(am.sparsemax)(X), WANT)
    close(torch.func.grad(lambda x: (am.sparsemax(x) * X).sum())(X), SLOPE)


def test_a_result_goes_on_into_a_compiled_function_and_comes_out_of_one():
    f = torch.compile(lambda x: am.sparsemax(x) * 2, backend="eager", fullgraph=True)
    close(f(am.sparsemax(X)), 2 * am.Sparsemax()(WANT.double()).float())
    g = torch.compile(lambda p: p.view(-1).mul_(2), backend="aot_eager", fullgraph=True)
    p = am.sparsemax(X)
    g(p)
    close(p, 2 * WANT)


def test_modes_see_what_they_have_to():
    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Functions():
        close(am.sparsemax(X), WANT)
    with torch.device("meta"):
        close(am.sparsemax(X), WANT)
    with torch._subclasses.FakeTensorMode() as mode:
        assert am.sparsemax(mode.from_tensor(X)).shape == X.shape
    assert am.sparsemax(X.to("meta")).is_meta
    negative = torch._neg_view(X)
    close(am.sparsemax(negative), am.sparsemax(-X))
    assert not am.sparsemax(negative).is_neg()


def test_threads_that_make_results_of_several_shapes():
    wrong = []

    def run(seed):
        draw = torch.Generator().manual_seed(seed)
        for turn in range(300):
            x = torch.randn((1 + (turn + seed) % 3, 2 + seed), generator=draw, dtype=KINDS[turn % 2])
            p = am.sparsemax(x)
            if (
                p.shape != x.shape
                or p.dtype != x.dtype
                or not torch.allclose(p.sum(-1), torch.ones(len(x), dtype=x.dtype))
            ):
                wrong.append((turn, seed))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- its gradient ------------------------------------------------------------------------------------------------------------


def test_a_node_holds_p_and_gives_what_the_formula_gives():
    x = X.clone().requires_grad_()
    p = am.sparsemax(x)
    assert type(p.grad_fn).__name__ == "ApplyBackward"
    assert not p.is_leaf
    assert p.requires_grad
    assert [t.data_ptr() for t in p.grad_fn.saved_tensors] == [p.data_ptr()]
    close(p.detach(), WANT)
    for _ in range(2):
        close(torch.autograd.grad(p, x, X, retain_graph=True)[0], SLOPE)
    for axis in (1, None, 0):
        q = am.sparsemax(x, axis=axis) if axis is not None else am.sparsemax(x.view(-1))
        assert torch.autograd.gradcheck(lambda a, axis=axis: am.entmax15(a, axis=axis), X.double().requires_grad_())
        assert q.requires_grad
    with torch.no_grad():
        assert not am.sparsemax(x).requires_grad
    with torch.inference_mode():
        assert am.sparsemax(x).is_inference()
    parameter = torch.nn.Parameter(X.clone())
    am.sparsemax(parameter).backward(X)
    close(parameter.grad, SLOPE)


def test_a_gradient_has_derivatives_and_hooks_see_what_is_saved():
    x = X.double().requires_grad_()
    for f in (am.softmax, am.entmax15, am.sigsoftmax):
        assert torch.autograd.gradgradcheck(f, x)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t.to(torch.float64)):
        p = am.softmax(x)
    assert len(packed) == 1
    assert torch.equal(packed[0], p)
    close(torch.autograd.grad(p, x, X.double())[0], torch.autograd.grad(torch.softmax(x, -1), x, X.double())[0])
    p = am.softmax(x)
    p.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        p.sum().backward()
    p = am.softmax(x)
    p.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        p.sum().backward()


def test_a_gradient_that_does_not_fit_is_seen_to_in_python():
    x = X.clone().requires_grad_()
    for wrong in (X[:, :4], X.to("meta")):
        with pytest.raises(RuntimeError):
            am.sparsemax(x).grad_fn.apply(wrong)
    for fits in (X[:1].expand(2, 10), torch._neg_view(-X), X.T.contiguous().T):
        got = torch.autograd.grad(am.sparsemax(x), x, fits)[0]
        close(got, torch.autograd.grad(am.sparsemax(x), x, fits.clone())[0])


def test_a_graph_goes_with_its_result():
    x = X.clone().requires_grad_()
    gc.disable()
    try:
        p = am.sparsemax(x)
        gone = weakref.ref(p)
        del p
        assert gone() is None
        p = am.entmax(x, torch.tensor(1.5))
        gone = weakref.ref(p)
        del p
        assert gone() is None
    finally:
        gc.enable()


# -- what a call costs -------------------------------------------------------------------------------------------------------


def python_calls(call):
    call()
    codes = []
    sys.setprofile(lambda frame, event, _: codes.append(frame.f_code) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [code.co_name for code in codes if code.co_filename.startswith(ROOT)]


def test_a_small_call_runs_few_functions_of_python():
    x, given = X[:1].clone(), X[:1].clone().requires_grad_()
    assert python_calls(lambda: am.sparsemax(x)) == ["sparsemax", "call"]
    assert python_calls(lambda: am.sparse_softmax(x, k=3)) == ["sparse_softmax", "call"]
    assert python_calls(lambda: am.sparsemax(given)) == ["sparsemax", "call", "forward"]
    p = am.sparsemax(given)
    assert python_calls(lambda: torch.autograd.grad(p, given, x, retain_graph=True)) == ["backward"]
