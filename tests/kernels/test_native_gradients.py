"""The compiled engine's gradients and losses against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import each
from native_cases import DTYPES, ENGINE, FEW, LOSSES, PLAIN, SPARSE, layouts, mapped
from row_cases import reference, rows, torch

import anymax as am
from anymax import kernels
from anymax.kernels import native


@pytest.mark.whole(lambda n: n != 256)
@each(SPARSE)
@pytest.mark.parametrize("n", [256, 2000, 9000])
def test_backward_from_the_saved_support(case, n):
    x, g = rows(n, "float32", batch=(70,)), rows(n, "float32", batch=(70,), seed=3)
    p, saved = ENGINE.forward_saving(mapped(case), x, capacity=min(n, max(128, n // 32)))
    assert saved is not None
    count = (p > 0).sum(-1)
    kept = saved.count >= 0
    assert bool((saved.count[kept] == count[kept]).all())
    assert bool((count[~kept] > saved.index.shape[-1]).all())
    for r in range(0, 70, 23):
        if kept[r]:
            index = saved.index[r, : int(count[r])].long()
            assert torch.equal(p[r, index], saved.value[r, : int(count[r])])
    got, want = ENGINE.vjp(mapped(case), x, p, g, saved), ENGINE.vjp(mapped(case), x, p, g)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def of_k(k):
    return am.SparseSoftmax(k=k)


@pytest.mark.whole(lambda n: n in (512, 1000, 32000))
@pytest.mark.parametrize("n", [321, 512, 1000, 2048, 4096, 32000])
def test_what_is_saved_of_normal_scores_has_room(n):
    """Where there is none the forward has saved in vain: so a map with wider supports saves nothing."""
    x, some = torch.randn(100, n), 0
    some_entmax = (am.Entmax(alpha) for alpha in (1.0, 1.2, 1.25, 4 / 3, 1.5))
    some_more = (kind(k) for kind, ks in ((am.Budget, (2, 10, 50)), (of_k, (10, 50, 200))) for k in ks)
    for mapping in (am.Sparsemax(), am.NormMax(), *some_entmax, *some_more):
        p, saved = ENGINE.forward_saving(mapping, x)
        some += saved is not None
        if saved is not None:
            assert float(((p > 0).sum(-1) > saved.capacity).float().mean()) < 0.2, mapping
        assert ENGINE.forward_saving(mapping, x[:1, :256])[1] is None
    assert some >= 3


@each(LOSSES)
def test_a_row_to_ignore_has_no_loss(case):
    """The values are in the table of native_cases.py."""
    x = rows(70).requires_grad_()
    t = torch.tensor([0, 1, 2, 3, -100, 5])
    assert kernels.choose("index_loss", mapped(case), x) is ENGINE
    loss = am.fenchel_young(mapped(case), x, t, reduction="none")
    loss.sum().backward()
    assert loss[4] == 0.0 == x.grad[4].abs().max()


def test_rows_of_two_strides_have_the_gradients_that_they_have_alone():
    g = np.random.default_rng(0).normal(size=(2, 5, 3, 40)).astype(np.float32)
    for mapping in (am.Softmax(), am.Sparsemax(), am.Entmax(1.5), am.Entmax(1.25), am.NormMax(2.0)):
        p = am.apply(mapping, np.random.default_rng(1).normal(size=(2, 5, 3, 40)).astype(np.float32))
        some, of = p[:, ::2, ::2], g[:, ::2, ::2]  # what two strides can say, and three can't
        together = ENGINE.vjp(mapping, some[0], some[0], of[0])
        for i, j in np.ndindex(3, 2):
            alone = ENGINE.vjp(mapping, some[0, i, j][None], some[0, i, j][None], of[0, i, j][None])
            np.testing.assert_array_equal(together[i, j], alone[0])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("mapping", [am.Softmax(), am.Sparsemax(), am.Entmax(1.3), am.Taylor(2)], ids=repr)
def test_gradients_along_any_axis(kind, mapping):
    g = np.random.default_rng(0)
    make = torch.from_numpy if kind == "torch" else np.asarray
    x, d = g.normal(size=(2, 2, 3, 40, 5)).astype(np.float32)
    for axis in (-1, 0, 1):
        p = native.load().forward(mapping, x, axis, None, None)
        rows_ = [np.ascontiguousarray(np.moveaxis(a, axis, -1)) for a in (x, p, d)]
        want = np.moveaxis(np.asarray(PLAIN.vjp(mapping, *rows_)), -1, axis)
        for a, b in itertools.product(layouts(p), layouts(d)):
            if kind == "torch" and min(*a.strides, *b.strides) < 0:
                continue
            scores = make(x) if mapping.needs_scores else None
            got = native.load().vjp(mapping, scores, make(a), make(b), axis, None)
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-6)


@pytest.mark.whole(lambda n: n != 300)
@pytest.mark.parametrize(("n", "dtype"), [(300, "float32"), (1003, "float32"), (5000, "float64"), (70001, "float32")])
def test_gradients_written_past_the_caches_are_those_of_single_rows(n, dtype):
    rows = (30 << 20) // (n * (8 if dtype == "float64" else 4))
    x, g = (torch.randn(rows * n + 3, dtype=getattr(torch, dtype))[3:].view(rows, n) for _ in range(2))
    some = torch.randperm(rows)[:40]
    for mapping in (am.Sparsemax(), am.Entmax(4 / 3), am.Entmax(1.25), am.Budget(5), am.NormMax(2.0), of_k(30)):
        p, saved = ENGINE.forward_saving(mapping, x, capacity=max(128, n // 32))
        want = PLAIN.vjp(mapping, x[some].double(), p[some].double(), g[some].double())
        for memory in (saved, None):
            got = ENGINE.vjp(mapping, x, p, g, memory)
            assert float((got[some].double() - want).abs().max()) < 3e-6, (mapping, memory is None)
            assert torch.equal(got != 0, (got != 0) & (p != 0))
            alone = torch.stack([ENGINE.vjp(mapping, x[i], p[i], g[i]) for i in some])
            torch.testing.assert_close(got[some], alone, atol=2e-6, rtol=0)


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


def taught(mapping, x, index, g):
    """The loss of each row, its gradient times g, and the threshold."""
    free = x.clone().requires_grad_()
    value = am.fenchel_young(mapping, free, index, reduction="none")
    (gradient,) = torch.autograd.grad(value, free, g.to(value.dtype))
    return value.detach(), gradient, am.threshold(mapping, x).tau


SOON = {
    (33, "float32"),
    (8, "float64"),
    (31, "float16"),
    (129, "bfloat16"),
    (2, "float32"),
    (128, "float64"),
    (1, "float64"),
}


@pytest.mark.whole(lambda n, dtype: (n, dtype) not in SOON)
@pytest.mark.parametrize("mapping", FEW, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 31, 33, 64, 100, 127, 128, 129])
def test_losses_of_few_classes(mapping, dtype, n):
    rounding = {"float64": 1e-14, "float32": 5e-7, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    for scale in (0.02, 1.0, 8.0):
        x, index = (torch.tensor(a) for a in few_rows(n, scale=scale))
        x = x.to(getattr(torch, dtype))
        got = taught(mapping, x, index, torch.full((len(x),), 0.5))
        want = reference(lambda *t: taught(mapping, *t), x, index, torch.full((len(x),), 0.5))
        large, least = max(1.0, scale), 1e-15 if dtype == "float64" else rounding * 1e-2
        for a, b, rtol, atol in zip(
            got, want, (4 * max(1.0, 4 * scale), 4, 4), (least, rounding, rounding * large), strict=True
        ):
            torch.testing.assert_close(a.double(), b, rtol=rtol * rounding, atol=atol)


@pytest.mark.parametrize("mapping", FEW[:3], ids=repr)
@pytest.mark.parametrize("n", [10, 100])
def test_what_is_strange_in_a_row_of_few_classes(mapping, n):
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
    of_k(4),
    am.SparseSoftmax(p=0.9),
]


@pytest.mark.whole(
    lambda rows, reduction: (rows, reduction) not in {(5, "mean"), (300, "sum"), (40, "none"), (1, "mean")}
)
@pytest.mark.parametrize("mapping", SINGLE, ids=repr)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    ("rows", "n", "dtype"), [(5, 150, "float32"), (300, 1000, "float32"), (40, 700, "float64"), (1, 2000, "float32")]
)
def test_the_short_way_of_losses_of_many_classes(mapping, reduction, rows, n, dtype):
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


@pytest.mark.whole(lambda n, save: n != 129 or not save)
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
        value, saved, *_ = ENGINE.index_loss(mapping, x, index, save=save)
        gradient = ENGINE.index_loss_grad(mapping, x, index, g, saved)
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
    x = torch.tensor([[torch.nan], [1.0], [-torch.inf], [torch.inf]], requires_grad=True)
    value = am.fenchel_young(mapping, x, torch.zeros(4, dtype=torch.int64), reduction="none")
    (gradient,) = torch.autograd.grad(value, x, torch.ones_like(value))
    np.testing.assert_array_equal(gradient[:, 0], [np.nan, 0.0, -1.0, np.nan])
    np.testing.assert_array_equal(value.detach(), [np.nan, 0.0, np.inf, np.nan])


@pytest.mark.parametrize("n", [3, 21, 70, 1000])
@pytest.mark.parametrize("order", [2, 4])
def test_taylors_gradient_of_large_scores(n, order):
    """Scores beyond 4 are scaled down, by a power of two."""
    g = torch.Generator().manual_seed(n)
    x, v = 30.0 * torch.randn(4, n, generator=g), torch.randn(4, n, generator=g)
    mapping = am.Taylor(order)
    p = am.apply(mapping, x)
    want = reference(lambda *t: PLAIN.vjp(mapping, *t), x, p, v)
    got = ENGINE.vjp(mapping, x, p, v)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("n", [3, 7, 21, 70, 333])
@pytest.mark.parametrize("mapping", [am.Sparsemax(), am.Entmax(1.5), am.Entmax(1.2), am.NormMax(2.0)], ids=repr)
def test_an_infinite_gradient_outside_of_the_support(mapping, n):
    g = torch.Generator().manual_seed(n)
    x, v = 4.0 * torch.randn(5, n, generator=g), torch.randn(5, n, generator=g)
    p = am.apply(mapping, x)
    assert bool((p == 0).any())
    want = ENGINE.vjp(mapping, x, p, torch.where(p == 0, 0.0, v))
    got = ENGINE.vjp(mapping, x, p, torch.where(p == 0, torch.inf, v))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("n", [70, 300])
def test_the_support_of_halves_has_all_that_is_above_0(n):
    """Also probabilities that float16 holds without all their digits: the link's slope there is not small."""
    x = torch.linspace(0.0, 1.0, n).half().expand(40, n) * torch.linspace(0.2, 3.0, 40).half()[:, None]
    p, saved = ENGINE.forward_saving(am.Entmax(1.5), x, capacity=n)
    assert bool(((p > 0) & (p < 2.0**-20)).any())
    assert saved.count.tolist() == (p > 0).sum(-1).tolist()


@pytest.mark.parametrize("n", [10, 100, 1000, 5000])
@pytest.mark.parametrize("mapping", [am.Softmax(), am.Entmax(1.5), am.SparseSoftmax(k=3)], ids=repr)
def test_losses_of_rows_with_two_strides(mapping, n):
    wide = torch.randn(3, 5, n, generator=torch.Generator().manual_seed(n))
    x, t = wide[:, :4], torch.arange(12).view(3, 4) % n
    got = ENGINE.index_loss(mapping, x, t, save=True)
    want = ENGINE.index_loss(mapping, x.contiguous(), t, save=True)
    torch.testing.assert_close(got.value, want.value)
    scale = torch.linspace(0.5, 2.0, 12).view(3, 4)
    grads = [ENGINE.index_loss_grad(mapping, a, t, scale, of.saved) for a, of in ((x, got), (x.contiguous(), want))]
    torch.testing.assert_close(*grads)
