"""torch: the adapter that makes operations with derivatives (autodiff/torch_adapter.py)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from anymax import Entmax
from anymax.autodiff.torch_adapter import opaque, operation, plain_grads, traced_operation

X, Y = (torch.randn(3, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (1, 2))
INDEX = torch.tensor([2, 0, 1])


def scaled(name="Scaled", refused=False, **options):
    """x y[index] by a factor, of (factor, x, y, index); `ran` says which way the gradients went."""
    ran = []

    def forward(factor, operands, wants):
        x, y, index = operands
        return factor * x * y[index], (x,)

    def backward(factor, operands, kept, grads, wants):
        ran.append("backward")
        (x, y, index), (g,) = operands, grads
        assert kept[0] is x
        if refused:
            return None
        return factor * g * y[index], torch.zeros_like(y).index_add(0, index, factor * g * x), None

    def plain(factor, operands, kept):
        ran.append("plain")
        x, y, index = operands
        return factor * x * y[index]

    return operation(name, forward, backward, plain, **options), ran


def leaves():
    return [a.clone().requires_grad_() for a in (X, Y)]


def test_first_and_second_derivatives():
    call, ran = scaled()
    f = lambda x, y: call(3.0, x, y, INDEX)  # noqa: E731
    assert torch.autograd.gradcheck(f, leaves())
    assert set(ran) == {"backward"}
    assert torch.autograd.gradgradcheck(f, leaves())
    assert "plain" in ran
    assert type(f(*leaves()).grad_fn).__name__ == "ScaledBackward"


@pytest.mark.parametrize("batched", [False, True])
def test_where_the_plain_formula_has_the_gradients(batched):
    call, ran = scaled(refused=not batched)
    x, y = leaves()
    g = torch.ones(2, 3, 4, dtype=torch.float64)
    (got,) = torch.autograd.grad(call(2.0, x, y, INDEX), x, g if batched else g[0], is_grads_batched=batched)
    torch.testing.assert_close(got, (2.0 * Y[INDEX]).expand(*g.shape if batched else X.shape))
    assert ran[-1] == "plain"


def test_an_operand_that_another_was_computed_from_counts_once():
    call, _ = scaled()
    x, _ = leaves()
    (slope,) = torch.autograd.grad(call(1.0, x, x * x, torch.arange(3)).sum(), x, create_graph=True)
    torch.testing.assert_close(slope, 3.0 * X**2)
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), x)[0], 6.0 * X)


def test_what_is_saved_is_checked_when_it_comes_back():
    call, _ = scaled()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t[:1]):
        out = call(1.0, *leaves(), INDEX)
    with pytest.raises(RuntimeError, match=r"was saved, and .* came back; a hook of saved tensors"):
        out.sum().backward()


def test_operands_that_are_not_saved_may_change():
    def forward(_, operands, wants):
        assert wants == (True, False)
        return operands[0] * 2.0, ()

    call = operation("Twice", forward, lambda _, operands, kept, grads, wants: (grads[0] * 2.0, None), saves=0)
    x, other = leaves()[0], X.clone()
    out = call(None, x, other)
    other.zero_()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], 2.0 * torch.ones_like(x))


def test_a_map_is_an_operand_whose_tensors_may_learn():
    def forward(_, operands, wants):
        x, mapping = operands
        return (x * mapping.alpha, x.argmax(-1)), ()

    def backward(_, operands, kept, grads, wants):
        (x, mapping), (g, none) = operands, grads
        assert none is None
        return g * mapping.alpha, lambda name: (g * x).sum(-1, keepdim=True)

    call = operation("Times", forward, backward, of_map=True, one_result=True)
    x, alpha = leaves()[0], torch.full((3, 1), 1.5, dtype=torch.float64, requires_grad=True)
    out, place = call(None, x, Entmax(alpha))
    assert not place.requires_grad
    of_x, of_alpha = torch.autograd.grad(out.sum(), (x, alpha))
    assert torch.equal(of_x, alpha.detach().expand_as(x))
    torch.testing.assert_close(of_alpha, X.sum(-1, keepdim=True))
    out, _ = call(None, x, Entmax(alpha))
    with torch.no_grad():
        alpha += 0.1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_plain_gradients_are_0_where_nothing_depends_on_an_operand():
    x, y = leaves()
    slopes = plain_grads(lambda a, b, c: (a * 2.0,), (x, y, INDEX), (torch.ones_like(x),), (True, True, False))
    assert slopes[2] is None
    assert torch.equal(slopes[0], 2.0 * torch.ones_like(x))
    assert torch.equal(slopes[1], torch.zeros_like(y))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_an_opaque_operation_can_be_defined_again():
    """As where an import was interrupted; and it has a gradient in a compiled program."""
    for factor in (2.0, 3.0):
        opaque("test_of_adapter(Tensor x, float shift) -> Tensor", lambda x, shift, factor=factor: factor * x + shift)
    run = torch.ops.anymax.test_of_adapter
    assert torch.equal(run(X, 1.0), 3.0 * X + 1.0)
    torch.library.opcheck(run.default, (X, 1.0), raise_exception=True)
    call = traced_operation("Tripled", lambda how, x: run(x, how), lambda how, saved, g, wants: (run(g, 0.0),))
    x = leaves()[0]
    out = torch.compile(lambda x: call(1.0, x) * 2.0, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], 6.0 * torch.ones_like(x))
