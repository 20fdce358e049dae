"""torch: what hooks give back in place of what was saved for backward."""

from __future__ import annotations

import contextlib

import pytest
from torch_cases import its_own_warnings

torch = pytest.importorskip("torch")

import anymax as A
from anymax import Sparsemax
from anymax.kernels.support import NonZeros

pytestmark = its_own_warnings
autograd, func = torch.autograd, torch.func


ROWS_OF_SCORES = torch.randn(64, 512, generator=torch.Generator().manual_seed(33))
CLASSES = torch.arange(64) * 7
HOOKED = {
    "softmax": lambda x: A.softmax(x).pow(2).sum(),
    "sparsemax": lambda x: A.sparsemax(x).pow(2).sum(),
    "axis": lambda x: A.entmax15(x, axis=0).pow(2).sum(),
    "mask": lambda x: A.sparsemax(x, mask=torch.arange(512) > 5).pow(2).sum(),
    "sigsoftmax": lambda x: A.sigsoftmax(x).pow(2).sum(),
    "log_softmax": lambda x: A.log_softmax(x)[:, 3].sum(),
    "cross_entropy": lambda x: A.cross_entropy(x, CLASSES),
    "sparsemax_loss": lambda x: A.sparsemax_loss(x, CLASSES),
    "loss_of_each": lambda x: A.sparsemax_loss(x, CLASSES, reduction="none").square().sum(),
    "loss_ignored": lambda x: A.cross_entropy(x, CLASSES.where(CLASSES > 9, -100)),
    "attention": lambda x: A.attention(*x.view(1, 8, 64, 64).expand(3, -1, -1, -1, -1), Sparsemax()).square().sum(),
    "blockwise": lambda x: (
        A.attention(*3 * x.view(1, 2, 256, 64).expand(3, -1, -1, -1, -1), Sparsemax(), implementation="blockwise").square().sum()
    ),
    "linear": lambda x: A.linear_attention(*x.view(8, 64, 64).expand(3, -1, -1, -1)).square().sum(),
}  # fmt: skip
UNPACK = {
    "double": lambda t: t.double() if t.is_floating_point() else t,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "negated": lambda t: torch._neg_view(-t) if t.is_floating_point() else t,
}


def gradient_of(f, hooks=None):
    x = ROWS_OF_SCORES.clone().requires_grad_()
    with hooks or contextlib.nullcontext():
        out = f(x)
    out.backward()
    return x.grad


@pytest.mark.parametrize("unpack", UNPACK)
@pytest.mark.parametrize("f", HOOKED)
def test_hooks_may_give_back_another_float_or_other_strides(f, unpack):
    if f == "attention" and unpack == "double":
        pytest.skip("torch's own product of matrices refuses it")
    want = gradient_of(HOOKED[f])
    got = gradient_of(HOOKED[f], autograd.graph.saved_tensors_hooks(lambda t: t, UNPACK[unpack]))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("f", ["sparsemax", "axis", "mask", "softmax", "blockwise", "linear"])
def test_hooks_that_round_everything(f):
    """A map saves nothing but floats then; torch's own losses and ours refuse a target that was made one."""
    want = gradient_of(HOOKED[f])
    hooks = autograd.graph.saved_tensors_hooks(lambda t: (t.dtype, t.bfloat16()), lambda s: s[1].to(s[0]))
    got = gradient_of(HOOKED[f], hooks)
    assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("f", ["cross_entropy", "sparsemax_loss", "loss_of_each", "loss_ignored"])
@pytest.mark.parametrize("wrong", [torch.Tensor.bfloat16, torch.Tensor.int, lambda t: t[1:]])
def test_a_target_that_came_back_as_another_is_refused(f, wrong):
    with autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t if t.is_floating_point() else wrong(t)):
        loss = HOOKED[f](ROWS_OF_SCORES.clone().requires_grad_())
        with pytest.raises(RuntimeError, match=r"was saved, and .* came back; a hook of saved tensors"):
            loss.backward()


@pytest.mark.parametrize("wrong", [torch.Tensor.long, lambda t: t[..., 1:], torch.Tensor.to_sparse, torch.Tensor.ravel])
@pytest.mark.parametrize("f", ["softmax", "sparsemax", "axis", "blockwise", "linear", "log_softmax"])
def test_floats_that_came_back_as_another_kind_or_shape_are_refused(f, wrong):
    leaf = ROWS_OF_SCORES.clone().requires_grad_()
    with autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t if t is leaf else wrong(t)):
        p = HOOKED[f](leaf * 1.0)
        with pytest.raises(RuntimeError):
            p.backward()


def with_index(memory, place, value):
    """A saved support whose first row has another class at a place."""
    saved = NonZeros(memory.clone(), len(ROWS_OF_SCORES), 1)
    assert int(saved.count[0]) >= 2
    saved.index[0, place(int(saved.count[0]))] = value(saved.index[0])
    return saved.memory


WRONG = [torch.Tensor.float, lambda t: t.flip(0), lambda t: t + 1000, lambda t: t.int() * 0 - 7, lambda t: t[:-1]]
TWICE = lambda t: with_index(t, lambda count: 1, lambda index: index[0])  # noqa: E731
BEYOND = lambda t: with_index(t, lambda count: count - 1, lambda index: ROWS_OF_SCORES.shape[1])  # noqa: E731


@pytest.mark.parametrize("f", [A.sparsemax, lambda x: A.sparsemax_loss(x, CLASSES)])
@pytest.mark.parametrize("wrong", [*WRONG, TWICE, BEYOND])
def test_a_support_that_came_back_as_another_is_refused(f, wrong):
    out = f(ROWS_OF_SCORES.clone().requires_grad_())
    memory = out.grad_fn._raw_saved_tensors[-1]
    memory.register_hooks(lambda t: t, wrong)
    with pytest.raises(RuntimeError, match=r"came back; a hook|the saved support has changed"):
        out.sum().backward()


@pytest.mark.parametrize("f", ["cross_entropy", "sparsemax_loss", "loss_of_each", "log_softmax", "sigsoftmax"])
def test_scores_that_were_assigned_to_since(f):
    x = ROWS_OF_SCORES.clone().requires_grad_()
    out = HOOKED[f](x)
    x.data = x.data[:, :100]
    with pytest.raises(RuntimeError):
        out.backward()
