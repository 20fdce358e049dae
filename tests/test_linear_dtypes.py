"""Output layers: the dtypes of operands, gradients and results."""

from __future__ import annotations

import pytest
from kinds import every_kind
from laws import close
from linear_cases import MAPS, made, operands, torch_operands

import anymax as A


@pytest.mark.parametrize("name", ["softmax", "entmax15", "topk", "taylor"])
def test_dtypes_may_differ(name):
    """The product is computed in the widest of them, so the loss is exact; each operand gets its gradient in its own dtype."""
    torch, free, y = torch_operands()
    for dtypes in (
        ("bfloat16", "float32", "float16"),
        ("float32", "bfloat16", "bfloat16"),
        ("float64", "float32", "bfloat16"),
    ):
        own = [a.detach().to(getattr(torch, d)).requires_grad_() for a, d in zip(free, dtypes)]
        exact = [a.detach().double().requires_grad_() for a in own]
        for options in ({}, {"chunk": 16}, {"reduction": "none"}, {"label_smoothing": 0.1, "chunk": 16}):
            got = A.linear_loss(*own[:2], y, MAPS[name], linear_bias=own[2], **options)
            want = A.linear_loss(*exact[:2], y, MAPS[name], linear_bias=exact[2], **options)
            assert got.dtype is (torch.float64 if "float64" in dtypes else torch.float32)
            close(got.detach(), want.detach(), 1e-5, (dtypes, options))
            gradients = torch.autograd.grad(got.sum(), own), torch.autograd.grad(want.sum(), exact)
            for a, b, of in zip(*gradients, own):
                assert a.dtype is of.dtype
                close(a.double(), b, 1e-5 + torch.finfo(of.dtype).eps, (dtypes, options))
        ask = lambda *o: A.linear_log_prob(*o[:2], y, MAPS[name], linear_bias=o[2]).clamp(min=-1e3)  # noqa: E731
        close(ask(*own).detach(), ask(*exact).detach(), 1e-4, dtypes)


def test_autocast_converts_dtypes_that_differ():
    torch, free, y = torch_operands("float32")
    half = free[0].detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = A.linear_loss(half, free[1], y, linear_bias=free[2])
        want = torch.nn.functional.cross_entropy(torch.nn.functional.linear(half, *free[1:]), y)
    assert got.dtype is torch.float32
    close(got.detach(), want.detach(), 1e-2)
    for a, b in zip(torch.autograd.grad(got, [half, free[1]]), torch.autograd.grad(want, [half, free[1]])):
        assert a.dtype is b.dtype
        close(a.float(), b.float(), 1e-2)


@every_kind
def test_losses_of_half_precision_are_in_single_precision(kind):
    """So are those of all other verbs here, and the loss of 40 classes has more digits than bf16 can hold."""
    x, weight, _, y, *_ = operands()
    a, w, t = made(kind, x, weight, y)
    if kind == "strict":
        pytest.skip("has no half precision")
    half = "bfloat16" if kind != "numpy" else "float16"
    convert = (lambda v: v.astype(half)) if kind != "torch" else (lambda v: v.to(getattr(__import__("torch"), half)))
    for given in (
        {},
        {"reduction": "none"},
        {"chunk": 16},
        {"mapping": "sparsemax"},
        {"mapping": "taylor", "reduction": "sum"},
    ):
        assert "float32" in str(A.linear_loss(convert(a), convert(w), t, **given).dtype)
    for verb in (A.linear_log_prob, lambda a, w, t: A.linear.linear_threshold(a, w).tau):
        assert "float32" in str(verb(convert(a), convert(w), t).dtype)


def test_the_loss_of_a_margin_head_is_in_single_precision():
    torch = pytest.importorskip("torch")
    head = A.nn.MarginHead(6, 50)
    x, y = torch.randn(9, 6), torch.randint(50, (9,))
    want = head(x, y)
    got = head.bfloat16()(x.bfloat16(), y)
    assert got.dtype is torch.float32
    close(got.detach(), want.detach(), 0.1)
