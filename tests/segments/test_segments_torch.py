"""Ragged rows in torch: derivatives, compilation, nested and sparse tensors."""

import numpy as np
import pytest
from segment_cases import (
    COUNT,
    FEW,
    PTR,
    SHUFFLED,
    SORTED,
    by_few,
    by_map,
    by_segment,
    its_own_warnings,
    scores,
)

import anymax
from anymax import (
    Budget,
    Segments,
    Sigsoftmax,
    Softmax,
    segment_apply,
    segment_entropy,
    segment_log_apply,
    segment_logsumexp,
    segment_loss,
)

torch = pytest.importorskip("torch")

pytestmark = its_own_warnings


@pytest.mark.whole(lambda mapping: not isinstance(mapping, (Softmax, Budget)))
@by_map
def test_second_derivatives(mapping):
    x = torch.tensor(scores(dtype="float64")[: PTR[5]], requires_grad=True)
    f = lambda x: segment_apply(mapping, x, ptr=PTR[:6])  # noqa: E731
    assert torch.autograd.gradgradcheck(f, (x,))
    log = lambda x: segment_log_apply(mapping, x, ptr=PTR[:6])  # noqa: E731
    if isinstance(mapping, (Softmax, Sigsoftmax)):
        assert torch.autograd.gradcheck(log, (x,))
        assert torch.autograd.gradgradcheck(log, (x,))


def test_vmap():
    x = torch.tensor(scores(3))
    want = segment_apply("sparsemax", x, ptr=PTR)
    got = torch.func.vmap(lambda x: segment_apply("sparsemax", x, ptr=PTR), in_dims=1, out_dims=1)(x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    x = torch.tensor(scores(2)).to(dtype).requires_grad_()
    p = segment_apply("sparsemax", x, ptr=PTR)
    assert p.dtype == dtype
    want = by_segment(x.detach().float().numpy(), SORTED, anymax.sparsemax)
    np.testing.assert_array_equal(p.detach().float(), torch.tensor(want).to(dtype).float())
    p.sum().backward()
    assert x.grad.dtype == dtype


@pytest.mark.whole
@by_few
def test_under_torch_compile(mapping):
    x, w = torch.tensor(scores(2), requires_grad=True), torch.tensor(scores(2, seed=3))
    index, ptr = torch.tensor(SHUFFLED), torch.tensor(PTR)
    rows = Segments.of(index)
    ways = [
        (lambda x, i: segment_apply(mapping, x, index=i, num_segments=COUNT), index),
        (lambda x, i: segment_apply(mapping, x, ptr=i), ptr),
        (lambda x, i: segment_apply(mapping, x, index=rows), index),
    ]
    for f, given in ways:
        torch._dynamo.reset()
        c = torch.compile(f, fullgraph=True)
        torch.testing.assert_close(c(x, given), f(x, given))
        (got,), (want,) = (torch.autograd.grad((way(x, given) * w).sum(), x) for way in (c, f))
        torch.testing.assert_close(got, want)
    bad = index.clone()
    bad[4] = COUNT
    torch._dynamo.reset()
    with pytest.raises(IndexError, match=r"index\[4\]"):
        torch.compile(ways[0][0], fullgraph=True)(x, bad)


@pytest.mark.whole
def test_lists_under_torch_compile():
    torch._dynamo.reset()
    f = lambda x: segment_apply("softmax", x, lengths=[1, 3])  # noqa: E731
    x = torch.tensor([0.5, 1.0, 0.25, 0.0])
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="eager")(x), f(x))


@pytest.mark.whole
@pytest.mark.parametrize("mapping", FEW[:2], ids=repr)
def test_export(mapping):
    class Module(torch.nn.Module):
        def forward(self, x, index):
            return segment_apply(mapping, x, index=index, num_segments=COUNT)

    x, index = torch.tensor(scores(2)), torch.tensor(SHUFFLED)
    program = torch.export.export(Module(), (x, index))
    torch.testing.assert_close(program.module()(x, index), Module()(x, index), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(), (3,)], ids=str)
@by_few
def test_nested_tensors(mapping, heads):
    parts = [torch.randn(n, *heads, generator=torch.Generator().manual_seed(n)) for n in (3, 1, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    p = segment_apply(mapping, nested)
    assert p.layout is torch.jagged
    for part, own in zip(parts, p.unbind(), strict=True):
        torch.testing.assert_close(own, anymax.apply(mapping, part, 0))
    torch.testing.assert_close(anymax.apply(mapping, nested, 1).values(), p.values())
    if heads:
        dense = anymax.apply(mapping, nested)
        torch.testing.assert_close(dense.values(), anymax.apply(mapping, nested.values()))
    else:
        torch.testing.assert_close(anymax.apply(mapping, nested).values(), p.values())
    (g,) = torch.autograd.grad(p.values().pow(2).sum(), nested)
    plain = torch.cat(parts).requires_grad_()
    (want,) = torch.autograd.grad(segment_apply(mapping, plain, lengths=[3, 1, 5]).pow(2).sum(), plain)
    torch.testing.assert_close(g.values(), want)
    with pytest.raises(ValueError, match="axis 0"):
        anymax.apply(mapping, nested, 0)
    with pytest.raises(TypeError, match="knows its segments"):
        segment_apply(mapping, nested, ptr=[0, 9])
    log = segment_log_apply(mapping, nested)
    torch.testing.assert_close(log.values().exp(), p.values())


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@by_few
def test_sparse_tensors(mapping):
    dense = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
    keep = torch.rand(4, 3, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    keep[1, 1] = False
    want = anymax.apply(mapping, dense, mask=keep)
    x = (dense * keep).to_sparse().requires_grad_()
    p = anymax.apply(mapping, x)
    assert p.layout is torch.sparse_coo
    torch.testing.assert_close(p.to_dense(), want)
    torch.sparse.sum(p * p.detach()).backward()
    assert x.grad.layout is torch.sparse_coo
    flat = (dense * keep)[0].to_sparse_csr()
    p = segment_apply(mapping, flat)
    assert p.layout is torch.sparse_csr
    torch.testing.assert_close(p.to_dense(), want[0])
    assert p._nnz() == flat._nnz()  # zeros of the map stay entries, and absent ones absent
    free = flat.clone().requires_grad_()
    anymax.apply(mapping, free).values().pow(2).sum().backward()
    assert free.grad.layout is torch.sparse_csr
    with pytest.raises(ValueError, match="last axis"):
        anymax.apply(mapping, flat, 0)
    with pytest.raises(TypeError, match="or None for all, have no meaning here"):
        segment_apply(mapping, flat, axis=None)


def test_nested_and_sparse_tensors_where_there_is_no_such_result():
    nested = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)
    for call in (
        lambda: segment_logsumexp(nested, ptr=[0, 2]),
        lambda: segment_loss("softmax", torch.eye(2).to_sparse(), [0, 1]),
        lambda: segment_entropy(torch.eye(2).to_sparse_csr()),
    ):
        with pytest.raises(TypeError, match="takes a dense tensor"):
            call()
